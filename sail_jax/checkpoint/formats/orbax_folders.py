"""Orbax checkpoints, read array by array and written as whole trees.

The reader takes what StandardCheckpointer and PyTreeCheckpointer write, and an item or a step of a
CheckpointManager. Orbax's description says which arrays there are, and TensorStore reads them. So
a tree may have any containers within one another. Orbax is imported to write alone.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sail_jax import disk
from sail_jax.checkpoint.formats import stores
from sail_jax.checkpoint.formats.files import MAX_HEADER, CheckpointError, reading, strict_json
from sail_jax.checkpoint.formats.layout import Layout, Wanted, staged
from sail_jax.checkpoint.formats.trees import joined, nested
from sail_jax.merging.tensors import Tensor

__all__ = ["admit", "layout", "read_folder", "temporary", "write_folder"]

_MARK = "_METADATA"
_STAGE = "tensors"
# Of several items these are the network: orbax's own name, MaxText's and Tunix's.
_USUAL = ("default", "items", "model_params")
_WITHOUT_ARRAY = ("string", "None", "Dict", "List", "Tuple", "NamedTuple")


def temporary(name: str) -> bool:
    """Tells whether a folder's name is of a checkpoint that is being written.

    Args:
      name: The name of the folder, without those above it.

    Returns:
      Whether orbax or a trainer renames it when it is finished.
    """
    return name.startswith((".", "tmp")) or ".orbax-checkpoint-tmp" in name


def _find(folder: Path) -> Path | None:
    """Returns the folder of the one orbax item in a folder, or None if there is none.

    Of several items it is the first of `_USUAL`.
    """
    if (folder / _MARK).is_file():
        return folder
    items = {
        p.name: p
        for p in sorted(folder.iterdir())
        if (p / _MARK).is_file() and not temporary(p.name) and not p.name.isdecimal()
    }
    usual = next((items[name] for name in _USUAL if name in items), None)
    if len(items) > 1 and usual is None:
        raise CheckpointError(f"{folder} holds several orbax items: name one of {', '.join(items)}")
    return usual or next(iter(items.values()), None)


def read_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Opens the arrays of an orbax checkpoint; they are read when they are asked for.

    Args:
      folder: The folder of an item, or of a step of a CheckpointManager.

    Returns:
      The arrays and numbers by path, with "/" between keys, and empty metadata. Text and empty
      containers are left out. None if the folder is not one of orbax's.

    Raises:
      CheckpointError: If its description is damaged, it holds several items and none is "default",
        a path occurs twice, or a dtype is not one of `DTYPES`.
    """
    if (item := _find(folder)) is None:
        return None
    path = item.resolve()
    about = strict_json(disk.read_bytes(path / _MARK, MAX_HEADER), path / _MARK)
    names: dict[str, str] = {}
    with reading(path / _MARK):
        for entry in about["tree_metadata"].values():
            keys = [str(key["key"]) for key in entry["key_metadata"]]
            value = entry["value_metadata"]
            # None, empty containers and text have no array.
            if value.get("skip_deserialize") or value["value_type"] in _WITHOUT_ARRAY:
                continue
            name = ""
            for key in keys:
                name = joined(name, "/", key)
            if name in names:
                raise CheckpointError(f"{path}: the path '{name}' is repeated")
            names[name] = ".".join(keys)
        driver = "zarr3" if about.get("use_zarr3") else "zarr"
        missing_is_zero = not about.get("store_array_data_equal_to_fill_value")
    return stores.opened(path, names, driver, missing_is_zero=missing_is_zero), {}


def admit(names: Iterable[str]) -> None:
    """Checks that orbax can store leaves under these paths.

    Orbax joins the keys of a path by ".", so "a/b.c" and "a.b/c" would be the same to it.

    Args:
      names: Paths with "/" between keys.

    Raises:
      CheckpointError: If the paths are not those of a tree, or two of them are the same to orbax.
    """
    nested(names)
    joined: dict[str, str] = {}
    for name in names:
        other = joined.setdefault(name.replace("/", "."), name)
        if other != name:
            raise CheckpointError(f"'{name}' and '{other}' are the same path to orbax")


def layout(
    tensors: Wanted, name: str, metadata: Mapping[str, str], shard_bytes: int | None
) -> Layout:
    """Lays out a stage with all tensors, since orbax writes whole trees.

    Args:
      tensors: The dtype and shape of each tensor, by path.
      name: Not used: orbax names its own files.
      metadata: Must be empty: orbax has no place for it.
      shard_bytes: Not used: orbax chooses the sizes of its files.

    Returns:
      The layout of the stage, with the function that makes orbax's folder from it.

    Raises:
      CheckpointError: If there is metadata, or orbax cannot store leaves under these paths.
    """
    if metadata:
        raise CheckpointError("orbax has no place for metadata")
    admit(tensors)
    stage = staged(tensors, _STAGE)

    def convert(folder: Path, out: Path) -> None:
        # An empty file cannot be mapped into memory.
        raw = np.empty(0, np.uint8)
        if stage.sizes[_STAGE]:
            raw = np.memmap(folder / _STAGE, np.uint8, "r").view(np.ndarray)
        arrays = {}
        for key, [(_, start, length)] in stage.regions.items():
            dtype, shape = tensors[key]
            arrays[key] = raw[start : start + length].view(dtype).reshape(shape)
        write_folder(out, arrays)

    return stage._replace(convert=convert)


def write_folder(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays as nested dictionaries with orbax's StandardCheckpointer.

    Orbax copies all arrays into memory, about twice.

    Args:
      path: The folder to write; there must be none yet.
      arrays: The leaves by path, with "/" between keys.

    Raises:
      CheckpointError: If the paths are not those of a tree, or orbax cannot write.
    """
    import orbax.checkpoint as ocp

    def filled(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: filled(child) for key, child in node.items()}
        return arrays[node]

    with stores.failing(f"write {path}"), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), filled(nested(arrays)))
        checkpointer.wait_until_finished()
