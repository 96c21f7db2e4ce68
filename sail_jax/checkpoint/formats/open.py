"""A checkpoint on disk, whatever its format: names, types and shapes now, bytes when asked for."""

import fnmatch
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import numpy as np

from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.formats.files import CheckpointError, File, contained, reading
from sail_jax.checkpoint.formats.quantized import quantization
from sail_jax.checkpoint.formats.safetensors_files import read_index
from sail_jax.checkpoint.formats.table import FORMATS, SUFFIXES, Format, of_file
from sail_jax.merging.tensors import Tensor

__all__ = ["Checkpoint", "changed", "load_checkpoint", "open_checkpoint", "open_values"]

_EXTRAS = (
    *("*.json", "tokenizer*", "*.model", "vocab*", "merges.txt", "chat_template*", "*.jinja"),
    *("*.tiktoken", "added_tokens*", "special_tokens*"),
)
_INDEX = ".index.json"
_SHARD = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})(\.\w+)", re.DOTALL)
_WEIGHTS = (_INDEX, ".h5", *SUFFIXES)


class Checkpoint:
    """The tensors of a checkpoint in file order, its format by name, its metadata, and the plain
    files beside them; `files` are all that it is read from, as the system described them before.

    A context manager: its files stay open, for reading by any thread, until it is left.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.format = ""
        self.tensors: dict[str, Tensor] = {}
        self.metadata: dict[str, str] = {}
        self.extras: dict[str, Path | bytes] = {}
        self.files: dict[Path, os.stat_result] = {}
        self._open: list[File] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._open:
            file.close()

    def check_unchanged(self) -> None:
        """`CheckpointError` if a file was written, replaced or removed since it was opened: what
        was read of it may be of two versions."""
        for path, before in self.files.items():
            try:
                same = _version(path.stat()) == _version(before)
            except OSError:
                same = False
            if not same:
                raise changed(path)

    def _file(self, path: Path) -> File:
        file = File(path)
        self._open.append(file)
        self.files[path] = file.about
        return file

    def _add(self, path: Path, allow_pickle: bool, names: list[str] | None = None) -> None:
        """The tensors of one file, which must be `names` if they are given."""
        format = of_file(path)
        if format is None or format.read_file is None:
            suffixes = ", ".join(SUFFIXES)
            raise CheckpointError(f"{path}: expected a folder or a file of type {suffixes}")
        if format.pickled and not allow_pickle:
            raise CheckpointError(
                f"{path} is a PyTorch pickle, read only on request, with allow_pickle=True; "
                "a safetensors file needs no such trust"
            )
        self.format = format.name
        tensors, metadata = format.read_file(self._file(path))
        if names is not None:
            for name in names:
                if name not in tensors:
                    raise CheckpointError(f"{path}: the index places '{name}' here; it is not")
            if unknown := tensors.keys() - set(names):
                raise CheckpointError(f"{path} holds '{min(unknown)}', which the index does not")
        for name in tensors:
            if name in self.tensors:
                raise CheckpointError(
                    f"{path}: '{name}' is also in {self.tensors[name].source}; expected it once"
                )
        self.tensors |= tensors
        self.metadata |= metadata


def changed(path: str | Path) -> CheckpointError:
    """What to raise when a file was not left alone."""
    return CheckpointError(
        f"{path} was changed while it was read; run again when nothing writes to it"
    )


def _version(about: os.stat_result) -> tuple[int, int, int]:
    # The last is the time of any change: a program can set the time of writing back, not this.
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns


def open_checkpoint(path: str | Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Opens a file, or a folder with the weights of one model.

    Formats: safetensors (also in shards, with or without their index), orbax, Flax msgpack, NumPy
    .npz and, with `allow_pickle`, PyTorch's .bin and .pt, whose pickles are interpreted without
    running anything. Where a folder holds several formats the first of this list is read.

    Raises `CheckpointError`, which is a ValueError, naming what is wrong with which file.
    """
    path = Path(path)
    checkpoint = Checkpoint(path)
    try:
        with reading(path):
            if path.is_dir():
                _open_folder(checkpoint, allow_pickle)
            elif not path.exists():
                raise CheckpointError(f"{path} does not exist")
            elif path.name.endswith(_INDEX):
                _open_index(checkpoint, path, allow_pickle)
            else:
                checkpoint._add(path, allow_pickle)
            for name in checkpoint.tensors:
                name.encode()  # a pickle or JSON may hold half of a character
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def open_values(path: str | Path, *, allow_pickle: bool = False) -> Checkpoint:
    """As `open_checkpoint`, for arithmetic: `CheckpointError` if the tensors are codes, of which
    there is none."""
    checkpoint = open_checkpoint(path, allow_pickle=allow_pickle)
    try:
        if scheme := quantization(checkpoint.tensors, config_of(checkpoint.extras)):
            raise CheckpointError(
                f"{path} is quantised by {scheme}: its numbers are codes. Dequantise it first (in "
                "transformers model.dequantize(), then save_pretrained), or use what it was "
                "quantised from"
            )
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def load_checkpoint(path: str | Path, *, allow_pickle: bool = False) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, in memory; `open_checkpoint` says what it may be."""
    with open_checkpoint(path, allow_pickle=allow_pickle) as checkpoint:
        arrays = {}
        for name, tensor in checkpoint.tensors.items():
            flat = np.empty(math.prod(tensor.shape), tensor.dtype)
            tensor.read(flat)
            arrays[name] = flat.reshape(tensor.shape)
        checkpoint.check_unchanged()
        return arrays


def _open_folder(checkpoint: Checkpoint, allow_pickle: bool) -> None:
    folder = checkpoint.path
    names = sorted(entry.name for entry in folder.iterdir())
    extras = {
        name: contained(folder, name)
        for name in names
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _EXTRAS)
        and not name.endswith(_WEIGHTS)
        and (folder / name).is_file()
    }
    checkpoint.extras = {**extras}
    checkpoint.files = {path: path.stat() for path in extras.values()}
    for format in FORMATS.values():
        if format.read_folder and (contents := format.read_folder(folder)):
            checkpoint.tensors, checkpoint.metadata = contents
            below = (path for path in sorted(folder.rglob("*")) if path.is_file())
            checkpoint.files |= {path: path.stat() for path in below}
            checkpoint.format = format.name
            return
        for usual in format.files:
            files = _weights(folder, names, format, usual)
            for name in files:
                if name.endswith(_INDEX):
                    _open_index(checkpoint, contained(folder, name), allow_pickle)
                else:
                    checkpoint._add(contained(folder, name), allow_pickle)
            _check_shards(folder, files)
            if files:
                return
    formats = ", ".join(FORMATS)
    listing = ", ".join(names[:8]) + ", ..." * (len(names) > 8) or "nothing"
    raise CheckpointError(f"{folder} holds no checkpoint ({formats}): found {listing}")


def _weights(folder: Path, names: list[str], format: Format, usual: str) -> list[str]:
    """The file, the index or the files of one format in a folder, in this order of preference."""
    suffix, usual_index = Path(usual).suffix, usual + _INDEX
    alike = [
        name
        for name in names
        if name.endswith(suffix) and not name.startswith(".") and name not in format.not_weights
    ]
    indexes = [name for name in names if name.endswith(suffix + _INDEX)]
    for name in (usual, usual_index):
        if name in (*alike, *indexes):
            return [name]
    if len(indexes) > 1:
        raise CheckpointError(f"{folder} holds several indexes: name one of {', '.join(indexes)}")
    if indexes or format.sharded or len(alike) < 2:
        return indexes or alike
    raise CheckpointError(f"{folder} holds several checkpoints: name one of {', '.join(alike)}")


def _check_shards(path: Path, files: Iterable[str]) -> None:
    """CheckpointError unless of files that say how many they are all are there."""
    found: dict[tuple[str, ...], set[str]] = {}
    for file in files:
        if match := _SHARD.fullmatch(file):
            stem, number, count, suffix = match.groups()
            found.setdefault((stem, count, suffix), set()).add(number)
    for (stem, count, suffix), numbers in found.items():
        if len(numbers) != int(count):
            raise CheckpointError(
                f"{path} has {len(numbers)} of the {int(count)} files {stem}-*-of-{count}{suffix}"
            )


def _open_index(checkpoint: Checkpoint, index: Path, allow_pickle: bool) -> None:
    shards = read_index(checkpoint._file(index))
    for shard, names in shards.items():
        if of_file(shard) is None:
            raise CheckpointError(f"{index} places tensors in '{shard}', whose format is not read")
        checkpoint._add(contained(index.parent, shard), allow_pickle, names)
    _check_shards(index, shards)
