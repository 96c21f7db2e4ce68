"""Writes the files of `sail-jax inspect`: a record and figures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sail_jax import disk
from sail_jax.cli.progress import show

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def admit(file: Path | None, schema: str) -> None:
    """Checks that a record can be written, before it is computed.

    Args:
      file: The path, which must not exist or contain an earlier record of this kind; None to write
        nothing.
      schema: The value of the record's entry "schema".
    """
    if file is not None:
        disk.admit(file, schema, "a record of inspect")


def write(file: Path | None, schema: str, record: Mapping[str, Any]) -> None:
    """Writes a record as JSON.

    Args:
      file: The path; None to write nothing.
      schema: The value of the record's entry "schema".
      record: JSON data without NaN and infinities.
    """
    if file is not None:
        text = json.dumps({"schema": schema, **record}, indent=2, allow_nan=False)
        disk.write_atomic(file, text.encode() + b"\n")


def draw(folder: Path, figures: "Mapping[str, Figure]") -> None:
    """Writes figures to a folder, and prints their paths.

    Args:
      folder: The folder, which is made if necessary.
      figures: The figures by file name.
    """
    from sail_jax.drawing import style

    with disk.explained("write to", folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        disk.write_atomic(folder / name, style.png(figure))
        show(folder / name)
