"""The file format of stages: each stage is a dictionary of arrays in a separate file.

`store.Run.stage` decides when a stage is written or read. `direct` is a stage function that stores
nothing.
"""

import io
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sail_jax import disk

# The maximum size of a stage's arrays, in bytes.
MAX_FILE = 4 << 30


def as_arrays(tree: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Converts a nested dictionary to the form in which it is read back from disk.

    Args:
      tree: A dictionary of arrays, numbers, booleans or text, or of such dictionaries. Keys begin
        with a letter, a digit or "_". Further characters may also be spaces and "-".
      at: The path of `tree` within a larger one, for messages; empty, or ending with "/".

    Returns:
      The dictionary with its keys sorted and its leaves as NumPy arrays. bfloat16 is kept.

    Raises:
      TypeError: If `tree` is not a dictionary, or a leaf contains neither numbers nor text.
      ValueError: If a dictionary or an array is empty, or a key does not have the form above.

    >>> as_arrays({"b": [1, 2], "a": {"c": 3.0}})
    {'a': {'c': array(3.)}, 'b': array([1, 2])}
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
    """Computes a stage and stores nothing.

    >>> direct("one", lambda: {"x": [1, 2]})
    {'x': array([1, 2])}
    """
    # Converted as for storage, so that a study receives the same arrays with and without a store.
    return as_arrays(compute(None) if folder else compute())


def file_name(name: str) -> str:
    """Encodes the name of a stage as the name of a file.

    Args:
      name: At most 80 ASCII letters, digits, "_", spaces and . , : = + / -. The first character is
        a letter, a digit or "_".

    Returns:
      One path component. Different names give different components.

    Raises:
      ValueError: If the name does not have this form.

    >>> file_name("draws 3/20")
    'draws 3%2F20'
    """
    if not re.fullmatch(r"\w[\w .,:=+/-]{0,79}", name, flags=re.ASCII):
        raise ValueError(
            f"stage name {name!r}: expected at most 80 letters, digits, spaces and . , : = + / - _,"
            " starting with a letter or digit"
        )
    return quote(name, safe=" ")


def _record(file: Path) -> Path:
    """Returns the path of the record that belongs to a stage's file of arrays."""
    return file.with_name(f"{file.name}.json")


def finished(file: Path) -> bool:
    """Returns whether a stage is stored."""
    return _record(file).exists()


def write(file: Path, name: str, arrays: dict[str, Any], seconds: float) -> None:
    """Stores a finished stage: first its arrays as a .npz, then a record with their checksum.

    Args:
      file: The .npz file. Its folder is made if it is missing.
      name: The name of the stage.
      arrays: The arrays that `as_arrays` returned.
      seconds: The computing time of the stage.

    Raises:
      StoreError: If a file cannot be written.
    """
    import numpy as np

    flat, buffer = _flat(arrays), io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, array in flat.items():
            # NumPy's format cannot store bfloat16. The bits are stored as integers, and the record
            # lists the names of these arrays.
            plain = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
            with archive.open(f"{path}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, plain, allow_pickle=False)
    data = buffer.getvalue()
    with disk.explained("write", file):
        file.parent.mkdir(parents=True, exist_ok=True)
    # The arrays come first. The record comes last and marks the stage as finished.
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
    """Reads a stored stage after checking all of its bytes.

    Args:
      file: The .npz file of its arrays.
      name: The expected name of the stage.

    Returns:
      The arrays that `write` received, and the computing time of the stage in seconds.

    Raises:
      StoreError: If the arrays or the record are missing or damaged, or belong to another stage.
    """
    import jax.numpy as jnp
    import numpy as np

    from sail_jax.checkpoint.formats.files import reading

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
    # The checksum protects against damage, not against forgery, because it is next to the file.
    with reading(file), np.load(io.BytesIO(data), allow_pickle=False) as stored:
        if any(member.compress_type != zipfile.ZIP_STORED for member in stored.zip.infolist()):
            raise ValueError("an array is packed")
        for path in stored.files:
            *folders, leaf = path.split("/")
            node = tree
            for folder in folders:
                node = node.setdefault(folder, {})
            array = stored[path]
            node[leaf] = array.view(jnp.bfloat16) if path in record["bfloat16"] else array
        return as_arrays(tree), record["seconds"]


def _flat(arrays: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Flattens a nested dictionary to arrays by path, with keys joined by "/"."""
    flat: dict[str, Any] = {}
    for key, leaf in arrays.items():
        flat |= _flat(leaf, f"{at}{key}/") if isinstance(leaf, Mapping) else {f"{at}{key}": leaf}
    return flat
