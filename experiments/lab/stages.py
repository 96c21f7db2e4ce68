"""The stages of a run: named dictionaries of arrays, each remembered in a file of its own."""

import io
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sail_jax import disk

MAX_FILE = 4 << 30  # bytes


def as_arrays(tree: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """The nested dictionary with sorted keys and NumPy leaves, as it comes back from disk.

    Keys are words without `/` and `.`; leaves hold numbers, booleans or text, at least one.
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
        if array.dtype.kind not in "biufcU" and array.dtype.name != "bfloat16":
            raise TypeError(
                f"{at}{key}: expected numbers or text, got {type(leaf).__name__} {array.dtype}"
            )
        if array.size == 0:
            raise ValueError(f"{at}{key}: an empty array (shape {array.shape}) cannot be stored")
        arrays[key] = array
    return arrays


def direct(
    name: str, compute: Callable[..., Mapping[str, Any]], *, folder: bool = False
) -> dict[str, Any]:
    """The stage that remembers nothing: computes, and returns the arrays as a store would."""
    return as_arrays(compute(None) if folder else compute())


def file_name(name: str) -> str:
    """One path component for a stage name, different names giving different ones."""
    if not re.fullmatch(r"\w[\w .,:=+/-]{0,79}", name, flags=re.ASCII):
        raise ValueError(
            f"stage name {name!r}: expected at most 80 letters, digits, spaces and . , : = + / - _,"
            " starting with a letter or digit"
        )
    return quote(name, safe=" ")


def _record(file: Path) -> Path:
    return file.with_name(f"{file.name}.json")


def finished(file: Path) -> bool:
    """Whether the stage is stored: its record is written last."""
    return _record(file).exists()


def write(file: Path, name: str, arrays: dict[str, Any], seconds: float) -> None:
    """Stores the finished stage: its arrays as a .npz, then the record with their checksum."""
    import numpy as np

    flat, buffer = _flat(arrays), io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, array in flat.items():
            # NumPy's format has no name for bfloat16
            plain = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
            with archive.open(f"{path}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, plain, allow_pickle=False)
    data = buffer.getvalue()
    with disk.explained("write", file):
        file.parent.mkdir(parents=True, exist_ok=True)
    disk.write_atomic(file, data)
    record = {
        "format": disk.FORMAT,
        "name": name,
        "seconds": seconds,
        "arrays": {"bytes": len(data), "sha256": disk.sha256(data)},
        "bfloat16": [path for path, array in flat.items() if array.dtype.name == "bfloat16"],
    }
    disk.write_record(_record(file), record)


def read(file: Path, name: str) -> tuple[dict[str, Any], float]:
    """The stage's arrays and the seconds it took, every byte checked before any is interpreted."""
    import jax.numpy as jnp
    import numpy as np

    redo = f"remove {_record(file)} to compute it again"
    fields = {"name": str, "seconds": float, "arrays": dict, "bfloat16": list}
    try:
        record = disk.read_record(_record(file), fields)
        data = disk.read_bytes(file, MAX_FILE)
    except disk.StoreError as exc:
        raise disk.StoreError(f"{exc}; {redo}") from exc
    if record["arrays"] != {"bytes": len(data), "sha256": disk.sha256(data)}:
        raise disk.StoreError(f"{file} is damaged: its checksum does not match; {redo}")
    if record["name"] != name:
        raise disk.StoreError(f"{file} holds stage '{record['name']}', not '{name}'; {redo}")
    tree: dict[str, Any] = {}
    with np.load(io.BytesIO(data), allow_pickle=False) as stored:
        for path in stored.files:
            *folders, leaf = path.split("/")
            node = tree
            for folder in folders:
                node = node.setdefault(folder, {})
            array = stored[path]
            node[leaf] = array.view(jnp.bfloat16) if path in record["bfloat16"] else array
    return as_arrays(tree), record["seconds"]


def _flat(arrays: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """The arrays by their paths."""
    flat: dict[str, Any] = {}
    for key, leaf in arrays.items():
        flat |= _flat(leaf, f"{at}{key}/") if isinstance(leaf, Mapping) else {f"{at}{key}": leaf}
    return flat
