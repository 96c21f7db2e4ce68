"""Metrics as lines of JSON in a plain file, of which a killed process may leave the last torn."""

import json
from pathlib import Path
from typing import Any

from sail_jax import disk

MAX_FILE = 1 << 30  # bytes
Row = dict[str, Any]


class Rows:
    """The rows of the steps before `step`, from the file if there is one; then those that follow.

    What the file holds of later steps, and a torn last line, is dropped: those steps come again.
    `StoreError` names a line that is damaged otherwise, or a file that is gone. Without a path
    the rows are only kept.
    """

    def __init__(self, path: Path | None, step: int) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path is None:
            return
        if path.exists():
            self.rows = [row for row in _read(path) if row["step"] < step]
        elif step:
            raise disk.StoreError(
                f"{path} is missing: put it back, or remove the checkpoints too, to begin again"
            )
        disk.write_atomic(path, b"".join(map(_line, self.rows)))

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.path is not None:
            with disk.explained("write", self.path), open(self.path, "ab") as file:
                file.write(_line(row))

    def sync(self) -> None:
        """Until what was added is on disk."""
        if self.path is not None:
            with disk.explained("write", self.path):
                disk.sync(self.path)


def _line(row: Row) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def _read(path: Path) -> list[Row]:
    *lines, torn = disk.read_bytes(path, MAX_FILE).split(b"\n")
    del torn  # empty where the last line was finished
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
