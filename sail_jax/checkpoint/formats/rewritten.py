"""Copies a checkpoint with new values for some tensors.

Everything else is copied byte for byte: the containers of the tree, metadata, sharding,
compression, the order of tensors, other items, and the other tensors. So the program that wrote the
checkpoint can restore the copy.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sail_jax.checkpoint.formats import stores
from sail_jax.checkpoint.formats.files import (
    CheckpointError,
    StoredTensor,
    contained,
    explained,
    reading,
)
from sail_jax.checkpoint.formats.folders import pwrite
from sail_jax.checkpoint.formats.layout import Layout, staged
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.formats.table import FORMATS
from sail_jax.merging.tensors import Tensor

_STAGE = "tensors"
# The number of bytes of a tensor that are copied at once.
_BLOCK = 8 << 20


def layout(checkpoint: Checkpoint, names: Iterable[str]) -> Layout:
    """Lays out a stage for the new values; the copy is made from it at the end.

    Args:
      checkpoint: The open checkpoint that is copied.
      names: The tensors with new values, of the same dtype and shape.

    Returns:
      The layout of the stage, with the function that makes the copy.

    Raises:
      CheckpointError: If a tensor's value cannot be replaced, or a link in the checkpoint's folder
        leads out of the folder.
    """
    changed = {name: checkpoint.tensors[name] for name in names}
    for name, tensor in changed.items():
        stored = isinstance(tensor, stores.StoredArray)
        # Other formats may have checksums of tensors, which would contradict a new value.
        plain = FORMATS[checkpoint.format].plain and isinstance(tensor, StoredTensor)
        if not stored and not plain:
            raise CheckpointError(
                f"{checkpoint.path}: '{name}' cannot be replaced in a copy of this "
                f"{checkpoint.format} checkpoint; write the parameters alone"
            )
    stage = staged({name: (x.dtype, x.shape) for name, x in changed.items()}, _STAGE)

    def convert(folder: Path, out: Path) -> None:
        def entries(tensor: Tensor, first: int, last: int) -> np.ndarray:
            return stage.entries(folder, tensor.name, tensor.dtype, first, last)

        _copied(checkpoint, out, changed, entries)

    return stage._replace(convert=convert, whole=_size(checkpoint.path))


def needs(tensors: Iterable[Tensor]) -> int:
    """Computes the memory, in bytes, that is required to write a copy with new values.

    Args:
      tensors: The tensors with new values.

    Returns:
      The bytes, at most.
    """
    in_stores = [x for x in tensors if isinstance(x, stores.StoredArray)]
    return stores.rewriting(in_stores) if in_stores else 2 * _BLOCK


def _size(origin: Path) -> int:
    """Returns the size of a file, or of all files in a folder, without links out of the folder."""
    with reading(origin):
        if not origin.is_dir():
            return max(1, origin.stat().st_size)
        size = 1
        for folder, folders, files in os.walk(origin):
            for name in (*folders, *files):
                if (Path(folder) / name).is_symlink():
                    _within(origin, Path(folder) / name)
            for name in folders:
                # A link to a folder is refused: following a link to its parent would never end.
                if (link := Path(folder) / name).is_symlink():
                    raise CheckpointError(f"{link} is a link to a folder, which is not copied")
            size += sum((Path(folder) / name).stat().st_size for name in files)
        return size


def _within(origin: Path, link: Path) -> None:
    """Raises CheckpointError for a link out of the folder, since its target would be copied."""
    if link.parent == origin:
        contained(origin, link.name)
    elif not link.resolve(strict=True).is_relative_to(origin.resolve()):
        raise CheckpointError(f"{link} is a link that leads out of the checkpoint's folder")


_Entries = Callable[[Any, int, int], np.ndarray]
"""Returns new entries of a tensor, flat: those from the first index to the last one."""


def _copied(
    checkpoint: Checkpoint, out: Path, changed: Mapping[str, Tensor], entries: _Entries
) -> None:
    """Makes the copy of a file or a folder at `out`."""
    origin = checkpoint.path
    in_stores: dict[Path, list[Any]] = {}
    in_files: dict[Path, list[StoredTensor]] = {}
    for tensor in changed.values():
        if isinstance(tensor, StoredTensor):
            in_files.setdefault(tensor.path, []).append(tensor)
        else:
            in_stores.setdefault(Path(tensor.source), []).append(tensor)
    roots = [root for root in in_stores if stores.in_one(root)]

    def left_out(folder: str, names: list[str]) -> set[str]:
        # The file with the bytes of all arrays is rewritten below.
        return set(filter(stores.belongs, names)) if Path(folder).resolve() in roots else set()

    with explained("write", out):
        if origin.is_dir():
            shutil.copytree(origin, out, ignore=left_out, dirs_exist_ok=True)
        else:
            shutil.copyfile(origin, out)

    def target(source: Path) -> Path:
        inside = os.path.relpath(source.resolve(), origin.resolve())
        return out if inside == "." else out / inside

    for root, tensors in in_stores.items():
        stores.rewrite(root, target(root), tensors, entries)
    for path, tensors in in_files.items():
        with explained("write", target(path)), target(path).open("r+b", buffering=0) as file:
            for tensor in tensors:
                for offset, data in _bytes(tensor, entries):
                    pwrite(file.fileno(), data, offset)


def _bytes(tensor: StoredTensor, entries: _Entries) -> Iterator[tuple[int, memoryview]]:
    """Returns the new bytes of a tensor, divided into its runs in the file."""
    size, step = math.prod(tensor.shape), _BLOCK // tensor.dtype.itemsize
    runs, (offset, room) = iter(tensor.runs), (0, 0)
    for first in range(0, size, step):
        part = entries(tensor, first, min(first + step, size))
        raw = (part.byteswap() if tensor.swap else part).view(np.uint8).data
        # A run may end within an entry, and a part within a run.
        while len(raw):
            if not room:
                offset, room = next(runs)
                continue
            yield offset, raw[:room]
            taken = min(room, len(raw))
            raw, offset, room = raw[taken:], offset + taken, room - taken
