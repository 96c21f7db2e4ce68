"""What `sail-jax inspect` writes: a record, and figures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sail_jax import disk
from sail_jax.cli.progress import show

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def admit(file: Path | None, schema: str) -> None:
    """Checks that a record may be written, before what it describes is computed.

    Args:
      file: Where it goes, which may only be another such record; None for nowhere.
      schema: The value of its entry "schema".
    """
    if file is not None:
        disk.admit(file, schema, "a record of inspect")


def write(file: Path | None, schema: str, record: Mapping[str, Any]) -> None:
    """Writes a record as JSON.

    Args:
      file: Where it goes; None for nowhere.
      schema: The value of its entry "schema".
      record: What JSON can hold, without NaN and infinities.
    """
    if file is not None:
        text = json.dumps({"schema": schema, **record}, indent=2, allow_nan=False)
        disk.write_atomic(file, text.encode() + b"\n")


def draw(folder: Path, figures: "Mapping[str, Figure]") -> None:
    """Writes figures into a folder, and prints where.

    Args:
      folder: The folder, which is made if need be.
      figures: The figures by the names of their files.
    """
    from sail_jax.drawing import style

    with disk.explained("write to", folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        disk.write_atomic(folder / name, style.png(figure))
        show(folder / name)
