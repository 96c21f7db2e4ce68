"""Orbax checkpoints, read leaf by leaf into NumPy and written as whole trees.

The reader takes what StandardCheckpointer and PyTreeCheckpointer write, and the steps of a
CheckpointManager. Orbax is imported by this module alone, and only when there is such a checkpoint.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sail_jax import disk
from sail_jax.checkpoint.formats.files import DTYPES, CheckpointError, LoadedTensor, checked_shape
from sail_jax.checkpoint.formats.layout import Layout, Wanted, staged
from sail_jax.checkpoint.formats.trees import nested
from sail_jax.merging.tensors import Tensor

__all__ = ["admit", "layout", "read_folder", "write_folder"]

_MARK = "_METADATA"


_STAGE = "tensors"


def _find(folder: Path) -> Path | None:
    """Returns the folder of the one orbax item in or below a folder, or None if there is none.

    Of several steps of a CheckpointManager it is the latest that has one, of several items
    "default".
    """
    if (folder / _MARK).is_file():
        return folder
    steps = {int(p.name): p for p in folder.iterdir() if p.name.isdecimal() and p.is_dir()}
    for step in sorted(steps, reverse=True):
        if item := _find(steps[step]):
            return item
    items = {p.name: p for p in sorted(folder.iterdir()) if (p / _MARK).is_file()}
    if len(items) > 1 and "default" not in items:
        raise CheckpointError(f"{folder} holds several orbax items: name one of {', '.join(items)}")
    return items.get("default", next(iter(items.values()), None))


def read_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Reads the description of an orbax checkpoint; its arrays are loaded when they are asked for.

    Args:
      folder: The folder of an item, of a step, or of all steps of a CheckpointManager.

    Returns:
      The arrays and numbers by path, with "/" between keys, and empty metadata. Text is left out.
      None if the folder is not one of orbax's.

    Raises:
      CheckpointError: If orbax cannot read it, it holds several items and none is "default", a path
        occurs twice, or a dtype is not one of `DTYPES`.
    """
    if (item := _find(folder)) is None:
        return None
    import orbax.checkpoint as ocp

    path = item.resolve()
    with _failing(path), ocp.PyTreeCheckpointer() as checkpointer:
        about: Any = checkpointer.metadata(path).item_metadata
        if about is None:
            raise CheckpointError(f"orbax cannot read {path}: its description is damaged")
        tree = about.tree if hasattr(about, "tree") else about
    tensors: dict[str, Tensor] = {}
    for keys, leaf in _leaves(tree):
        # Text has neither.
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape is None or dtype is None:
            continue
        name = "/".join(key for key, _ in keys)
        if name in tensors:
            raise CheckpointError(f"{path}: the path '{name}' is repeated")
        if np.dtype(dtype).name not in DTYPES:
            raise CheckpointError(f"{path}: '{name}' has the type {dtype}, which is not read")
        dtype = DTYPES[np.dtype(dtype).name]
        shape = checked_shape(tuple(map(int, shape)), dtype.itemsize, f"{path}: '{name}'")
        load = partial(_leaf, path, keys, dtype)
        tensors[name] = LoadedTensor(name, dtype, shape, str(path), load)
    return tensors, {}


# A key of a dictionary, or a place in a list of so many.
_Key = tuple[str, int | None]


def _leaves(node: Any, keys: tuple[_Key, ...] = ()) -> Iterator[tuple[tuple[_Key, ...], Any]]:
    """Yields each leaf of orbax's description with the keys that lead to it."""
    if isinstance(node, Mapping):
        for key, child in node.items():
            yield from _leaves(child, (*keys, (str(key), None)))
    elif isinstance(node, list | tuple) and not hasattr(node, "dtype"):
        for i, child in enumerate(node):
            yield from _leaves(child, (*keys, (str(i), len(node))))
    else:
        yield keys, node


def _leaf(path: Path, keys: tuple[_Key, ...], dtype: np.dtype) -> np.ndarray:
    """Restores a single leaf: orbax is asked for a tree that is empty but for this one."""
    import orbax.checkpoint as ocp

    item: Any = 0
    how: Any = ocp.RestoreArgs(restore_type=np.ndarray)
    for key, length in reversed(keys):
        if length is None:
            item, how = {key: item}, {key: how}
        # Lists keep their length, and the other places stay empty.
        else:
            item = [item if i == int(key) else ocp.PLACEHOLDER for i in range(length)]
            how = [how if i == int(key) else ocp.RestoreArgs() for i in range(length)]
    with _failing(path), ocp.PyTreeCheckpointer() as checkpointer:
        args = ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)
        restored: Any = checkpointer.restore(path, args=args)
        for key, length in keys:
            restored = restored[key if length is None else int(key)]
        return np.asarray(restored, dtype)


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

    with _failing(path), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), filled(nested(arrays)))
        checkpointer.wait_until_finished()


@contextlib.contextmanager
def _failing(path: Path) -> Iterator[None]:
    """Turns any exception of orbax or tensorstore into a one-line `CheckpointError`.

    Their errors are of many types, and their messages have many lines.
    """
    try:
        yield
    except disk.StoreError:
        raise
    except Exception as exc:
        why = " ".join(str(exc).split())[:300] or type(exc).__name__
        raise CheckpointError(f"orbax cannot read or write {path}: {why}") from exc
