"""A checkpoint on disk, whatever its format: names, types and shapes now, bytes when asked for."""

import fnmatch
import math
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np

from sail_jax.checkpoint.formats import (
    msgpack_files,
    npz_files,
    orbax_folders,
    safetensors_files,
    torch_pickles,
)
from sail_jax.checkpoint.formats.files import CheckpointError, File, contained, reading
from sail_jax.merging.tensors import Tensor

__all__ = ["Checkpoint", "load_checkpoint", "open_checkpoint"]

_EXTRAS = (
    *("*.json", "tokenizer*", "*.model", "vocab*", "merges.txt", "chat_template*", "*.jinja"),
    *("*.tiktoken", "added_tokens*", "special_tokens*"),
)
_WEIGHTS = ("*.index.json", "*.safetensors", "*.bin", "*.pt", "*.pth", "*.npz", "*.msgpack", "*.h5")
_Read = Callable[[File], tuple[dict[str, Tensor], dict[str, str]]]
_READERS: dict[str, _Read] = {
    ".safetensors": safetensors_files.read_file,
    ".npz": npz_files.read_file,
    ".msgpack": msgpack_files.read_file,
    **dict.fromkeys((".bin", ".pt", ".pth"), torch_pickles.read_file),
}


class Checkpoint:
    """The tensors of a checkpoint in file order, its metadata, and the plain files beside them.

    A context manager: its files stay open, for reading by any thread, until it is left.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, Tensor] = {}
        self.metadata: dict[str, str] = {}
        self.extras: dict[str, Path | bytes] = {}
        self._files: list[File] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _file(self, path: Path) -> File:
        self._files.append(File(path))
        return self._files[-1]

    def _add(self, path: Path, names: list[str] | None = None) -> None:
        """The tensors of one file, which must be `names` if they are given."""
        tensors, metadata = _READERS[path.suffix](self._file(path))
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
            elif path.name.endswith(".index.json"):
                _open_index(checkpoint, path, allow_pickle)
            elif path.suffix not in _READERS:
                known = ", ".join(_READERS)
                raise CheckpointError(f"{path}: expected a folder or a file of type {known}")
            else:
                _allowed(path, [path.name], allow_pickle)
                checkpoint._add(path)
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
        return arrays


def _open_folder(checkpoint: Checkpoint, allow_pickle: bool) -> None:
    folder = checkpoint.path
    names = sorted(entry.name for entry in folder.iterdir())
    checkpoint.extras = {
        name: contained(folder, name)
        for name in names
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _EXTRAS)
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in _WEIGHTS)
        and (folder / name).is_file()
    }
    for suffix in (".safetensors", "orbax", ".msgpack", ".npz", ".bin", ".pt", ".pth"):
        if suffix == "orbax":
            if item := orbax_folders.find(folder):
                checkpoint.tensors, checkpoint.metadata = orbax_folders.read_folder(item)
                return
            continue
        files = _weights(folder, names, suffix)
        if not files:
            continue
        _allowed(folder, files, allow_pickle)
        if files[0].endswith(".json"):
            _open_index(checkpoint, contained(folder, files[0]), allow_pickle)
            return
        for name in files:
            checkpoint._add(contained(folder, name))
        return
    found = ", ".join(names[:8]) + ", ..." * (len(names) > 8) or "nothing"
    raise CheckpointError(
        f"{folder} holds no checkpoint (safetensors, orbax, .msgpack, .npz, .bin): found {found}"
    )


def _weights(folder: Path, names: list[str], suffix: str) -> list[str]:
    """The file, the index or the files of one format in a folder, in this order of preference."""
    usual = {".bin": "pytorch_model", ".msgpack": "flax_model"}.get(suffix, "model")
    alike = [name for name in names if name.endswith(suffix) and not name.startswith(".")]
    if f"{usual}{suffix}" in alike:
        return [f"{usual}{suffix}"]
    indexes = [name for name in names if name.endswith(f"{suffix}.index.json")]
    if len(indexes) > 1 and f"{usual}{suffix}.index.json" not in indexes:
        raise CheckpointError(f"{folder} holds several indexes: name one of {', '.join(indexes)}")
    if indexes:
        return [next((n for n in indexes if n == f"{usual}{suffix}.index.json"), indexes[0])]
    if suffix in (".safetensors", ".bin") or len(alike) < 2:
        others = ("training_args.bin", "optimizer.bin", "scheduler.bin")
        return [name for name in alike if name not in others]
    raise CheckpointError(f"{folder} holds several checkpoints: name one of {', '.join(alike)}")


def _open_index(checkpoint: Checkpoint, index: Path, allow_pickle: bool) -> None:
    shards = safetensors_files.read_index(checkpoint._file(index))
    _allowed(index, list(shards), allow_pickle)
    for shard, names in shards.items():
        if Path(shard).suffix not in _READERS:
            raise CheckpointError(f"{index} places tensors in '{shard}', whose format is not read")
        checkpoint._add(contained(index.parent, shard), names)


def _allowed(path: Path, files: list[str], allow_pickle: bool) -> None:
    pickled = [name for name in files if _READERS.get(Path(name).suffix) is torch_pickles.read_file]
    pickled += [name for name in files if name.endswith(".bin.index.json")]
    if pickled and not allow_pickle:
        raise CheckpointError(
            f"{path}: {pickled[0]} is a PyTorch pickle, read only on request (allow_pickle=True, "
            "--allow-pickle); a safetensors file needs no such trust"
        )
