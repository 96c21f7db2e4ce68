"""Every format of checkpoints, one row each: whatever reads, writes or lists formats asks here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sail_jax.checkpoint.formats import (
    msgpack_files,
    npz_files,
    orbax_folders,
    safetensors_files,
    torch_pickles,
)
from sail_jax.checkpoint.formats.files import CheckpointError, File
from sail_jax.checkpoint.formats.layout import Layout, Wanted
from sail_jax.merging.tensors import Tensor

__all__ = ["FORMATS", "LAYOUTS", "SUFFIXES", "Format", "check_written", "of_file", "of_output"]

_Contents = tuple[dict[str, Tensor], dict[str, str]]  # tensors by name, and metadata
_LayOut = Callable[[Wanted, str, Mapping[str, str], int | None], Layout]


@dataclass(frozen=True, kw_only=True)
class Format:
    """One format of checkpoints.

    Attributes:
      name: What options and messages call it.
      files: The usual name of its file, once for each suffix that such files have; an output's is
        the first. None if a checkpoint is a folder of the format's own making.
      read_file: What lies in a file.
      read_folder: What lies in a folder of the format's own making; None if it is no such folder.
      layout: Of an output, from its tensors, its file, its metadata and the size from which there
        are several files (None: never). A format without is only read.
      sharded: Whether several files in a folder are one checkpoint, without an index, too.
      pickled: Whether it is read only with `allow_pickle`.
      not_weights: Files with its suffix that hold something else.
    """

    name: str
    files: tuple[str, ...] = ()
    read_file: Callable[[File], _Contents] | None = None
    read_folder: Callable[[Path], _Contents | None] | None = None
    layout: _LayOut | None = None
    sharded: bool = False
    pickled: bool = False
    not_weights: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The name of an output's file, "" if the format makes a folder."""
        return self.files[0] if self.files else ""


# Of the formats that lie in a folder the first of this table is read.
_TABLE = (
    Format(
        name="safetensors",
        files=("model.safetensors",),
        read_file=safetensors_files.read_file,
        layout=safetensors_files.layout,
        sharded=True,
    ),
    Format(
        name="orbax",
        read_folder=orbax_folders.read_folder,
        layout=orbax_folders.layout,
    ),
    Format(
        name="msgpack",
        files=("flax_model.msgpack",),
        read_file=msgpack_files.read_file,
        layout=msgpack_files.layout,
    ),
    Format(
        name="npz",
        files=("model.npz",),
        read_file=npz_files.read_file,
        layout=npz_files.layout,
    ),
    Format(
        name="bin",
        files=("pytorch_model.bin",),
        read_file=torch_pickles.read_file,
        sharded=True,
        pickled=True,
        not_weights=("training_args.bin", "optimizer.bin", "scheduler.bin"),
    ),
    Format(
        name="pt",
        files=("model.pt", "model.pth"),
        read_file=torch_pickles.read_file,
        pickled=True,
    ),
)
FORMATS = {format.name: format for format in _TABLE}
SUFFIXES = {Path(file).suffix: format for format in _TABLE for file in format.files}
LAYOUTS = {format.name: format.layout for format in _TABLE if format.layout}


def of_file(path: str | Path) -> Format | None:
    """The format that the suffix of a file tells, if any."""
    return SUFFIXES.get(Path(path).suffix)


def of_output(out: Path) -> Format | None:
    """The format of an output that is to be one file, by its suffix; None if it is a folder."""
    format = of_file(out)
    return format if format and format.name in LAYOUTS else None


def check_written(name: str | None) -> None:
    """`CheckpointError` if outputs cannot have the format of this name; None leaves the choice."""
    if name is not None and name not in LAYOUTS:
        raise CheckpointError(f"format: expected one of {', '.join(LAYOUTS)}, got {name!r}")
