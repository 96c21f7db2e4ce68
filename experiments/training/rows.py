"""Metrics of a training as lines of JSON; the file survives a kill, except for its last line."""

import json
import math
from pathlib import Path
from typing import Any

from sail_jax import disk

MAX_FILE = 1 << 30  # bytes
Row = dict[str, Any]


class Rows:
    """The metrics of a training so far, also kept in a file.

    Rows of step `step` and later ones are removed from the file, because these steps are repeated.
    An unfinished last line after a kill is also removed.

    Args:
      path: The file. None keeps the rows only in memory.
      step: The step from which the training continues. Rows of earlier steps are read from the
        file.
      kept: Whether the state of that step was stored next to the file, which must then exist. A
        state from elsewhere starts a new file, for any step.

    Attributes:
      path: The file.
      rows: The rows, each with its "step".

    Raises:
      StoreError: If any other line is damaged, or the training continues but the file is missing.
    """

    def __init__(self, path: Path | None, step: int, kept: bool = True) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path is None:
            return
        if kept and path.exists():
            self.rows = [row for row in _read(path) if row["step"] < step]
        elif step and kept:
            raise disk.StoreError(
                f"{path} is missing: put it back, or remove the checkpoints too, to begin again"
            )
        disk.write_atomic(path, b"".join(map(_line, self.rows)))

    def add(self, row: Row) -> None:
        """Adds a row, and writes it to the file."""
        for name, value in row.items():
            if not math.isfinite(value):
                raise FloatingPointError(f"step {row['step']}: the metric {name!r} is {value}")
        self.rows.append(row)
        if self.path is not None:
            with disk.explained("write", self.path), open(self.path, "ab") as file:
                file.write(_line(row))

    def sync(self) -> None:
        """Flushes the rows to the disk.

        It raises `StoreError` if this fails.
        """
        if self.path is not None:
            with disk.explained("write", self.path):
                disk.sync(self.path)


def _line(row: Row) -> bytes:
    """Formats a row as a line of the file."""
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def _read(path: Path) -> list[Row]:
    """Reads the rows of a file, except an unfinished last line."""
    *lines, torn = disk.read_bytes(path, MAX_FILE).split(b"\n")
    # The text after the last line break is empty, or a line that a kill left unfinished.
    del torn
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if type(row["step"]) is not int:
                raise TypeError("no step")
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            where = f"{path} is damaged in line {number}"
            raise disk.StoreError(f"{where}: expected a row of metrics with its step") from exc
        rows.append(row)
    return rows
