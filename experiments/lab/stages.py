"""The stages of a run: named dictionaries of arrays, each remembered in a folder of its own."""

import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sail_jax import disk

MANIFEST, ARRAYS = "manifest.json", "arrays"
MAX_FILE = 4 << 30  # bytes


def as_arrays(tree: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """The nested dictionary with sorted keys and NumPy leaves, as it comes back from disk.

    Keys are words without `/` and `.`; leaves hold numbers (or booleans), at least one.
    Raises `TypeError` or `ValueError` naming the path of what is not.
    """
    import numpy as np

    if not isinstance(tree, Mapping):
        raise TypeError(f"expected a dict of arrays, got {type(tree).__name__}")
    if not tree:
        raise ValueError(f"{at or 'the dict of arrays'} is empty")
    for key in tree:
        if not isinstance(key, str) or not re.fullmatch(r"\w[\w -]*", key):
            raise ValueError(f"{at}{key!r}: expected a key of letters, digits, '_' and '-'")
    arrays = {}
    for key, leaf in sorted(tree.items()):
        if isinstance(leaf, Mapping):
            arrays[key] = as_arrays(leaf, f"{at}{key}/")
            continue
        array = np.asarray(leaf)
        if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
            raise TypeError(f"{at}{key}: expected numbers, got {type(leaf).__name__} {array.dtype}")
        if array.size == 0:
            raise ValueError(f"{at}{key}: an empty array (shape {array.shape}) cannot be stored")
        arrays[key] = array
    return arrays


def direct(
    name: str, compute: Callable[..., Mapping[str, Any]], *, folder: bool = False
) -> dict[str, Any]:
    """The stage that remembers nothing: computes, and returns the arrays as a store would."""
    return as_arrays(compute(None) if folder else compute())


def folder_name(name: str) -> str:
    """One path component for a stage name, different names giving different ones."""
    if not re.fullmatch(r"\w[\w .,:=+/-]{0,79}", name, flags=re.ASCII):
        raise ValueError(
            f"stage name {name!r}: expected at most 80 letters, digits, spaces and . , : = + / - _,"
            " starting with a letter or digit"
        )
    return quote(name, safe=" ")


def checkpointer():
    """What reads and writes the arrays of this process alone (imported late: slow)."""
    import jax
    import orbax.checkpoint as ocp

    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process-{me}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _save(path: Path, arrays: dict[str, Any]) -> None:
    """Saves with orbax; what the system refused is an `OSError`, as elsewhere."""
    absl = logging.getLogger("absl")  # to it orbax's threads log at length what they also raise
    quiet = lambda record: False  # noqa: E731
    absl.addFilter(quiet)
    try:
        checkpointer().save(path, arrays)
    except ValueError as exc:  # tensorstore's form of an OSError
        code = re.search(r"os_error_code='(\d+)'", str(exc))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from exc
    finally:
        absl.removeFilter(quiet)


def write(folder: Path, name: str, arrays: dict[str, Any], seconds: float) -> None:
    """Makes `folder` hold the finished stage; until the last step it does not exist."""
    part = folder.with_name(f".{folder.name}.part")
    try:
        with disk.explained("write", folder):
            part.mkdir(parents=True)
            _save((part / ARRAYS).absolute(), arrays)
            for file in (part / ARRAYS, *(part / ARRAYS).rglob("*")):
                disk.sync(file)
            manifest = {"name": name, "seconds": seconds, "files": _checksums(part / ARRAYS)}
            disk.write_record(part / MANIFEST, {"format": disk.FORMAT, **manifest})
            os.replace(part, folder)
            disk.sync(folder.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def read(folder: Path, name: str) -> tuple[dict[str, Any], float]:
    """The stage's arrays and the seconds it took, after every file has been checked."""
    redo = f"remove {folder} to compute it again"
    fields = {"name": str, "seconds": float, "files": dict}
    try:
        manifest = disk.read_record(folder / MANIFEST, fields)
    except disk.StoreError as exc:
        raise disk.StoreError(f"{exc}; {redo}") from exc
    with disk.explained("read", folder):
        found = _checksums(folder / ARRAYS)
    for file in sorted(found.keys() | manifest["files"].keys()):
        if found.get(file) != manifest["files"].get(file):
            raise disk.StoreError(f"{folder / ARRAYS / file} is damaged or missing; {redo}")
    if manifest["name"] != name:
        raise disk.StoreError(f"{folder} holds stage '{manifest['name']}', not '{name}'; {redo}")
    return as_arrays(checkpointer().restore((folder / ARRAYS).absolute())), manifest["seconds"]


def _checksums(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if not file.is_dir())
    checked = {file: disk.sha256(disk.read_bytes(file, MAX_FILE)) for file in files}
    return {file.relative_to(folder).as_posix(): found for file, found in checked.items()}
