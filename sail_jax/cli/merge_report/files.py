"""Writes the files of a report. They can only replace an earlier report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sail_jax import disk
from sail_jax.checkpoint.executor import Record
from sail_jax.checkpoint.planning.plan import Plan
from sail_jax.cli.merge_report.record import SCHEMA, as_json

FILES = {
    "report.json": f'"schema": "{SCHEMA}"',
    "report.html": f'<meta name="generator" content="{SCHEMA}',
}


def admit(folder: str | Path) -> None:
    """Makes the folder of a report, and checks that the report can be written there.

    Call it before the merge starts, so that an invalid folder is rejected before any work.

    Args:
      folder: The folder.

    Raises:
      RefusedError: If it is a file, contains a report.json or report.html that is not a merge
        report, or is not writable.
      StoreError: If it cannot be made.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise disk.RefusedError(f"{folder} is not a folder; choose another --report")
    for name, mark in FILES.items():
        path = folder / name
        if path.exists() and mark.encode() not in disk.read_bytes(path, 1 << 30)[:200]:
            raise disk.RefusedError(
                f"{path} exists and is not a merge report; choose another --report"
            )
    with disk.explained("write to", folder):
        folder.mkdir(parents=True, exist_ok=True)
    disk.probe(folder)


def write(
    folder: str | Path, plan: Plan, records: Mapping[str, Record], about: Mapping[str, Any]
) -> list[Path]:
    """Writes report.json and report.html, each atomically.

    Args:
      folder: The folder.
      plan: The plan of the merge.
      records: The measurements, by tensor name.
      about: The head of the report, as JSON data: recipe, versions, wall time.

    Returns:
      The paths of the two files.

    Raises:
      RefusedError: As `admit` does.
      StoreError: If the files cannot be written.
    """
    # Imported here because figures import slowly, and `admit` is called before the merge.
    from sail_jax.cli.merge_report.pages import page

    folder = Path(folder)
    admit(folder)
    html = page(plan, records, about).encode()
    texts = dict(zip(FILES, (as_json(plan, records, about), html), strict=True))
    for name, data in texts.items():
        disk.write_atomic(folder / name, data)
    return [folder / name for name in FILES]
