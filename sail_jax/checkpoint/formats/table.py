"""The table of checkpoint formats, one row each.

All code that reads, writes or lists formats uses this table. So a new format needs only a module
with a reader (and a layout, if it can be written) and a row here.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from sail_jax.checkpoint.formats import (
    levanter_folders,
    msgpack_files,
    npz_files,
    orbax_folders,
    safetensors_files,
    stores,
    torch_pickles,
)
from sail_jax.checkpoint.formats.files import CheckpointError, File
from sail_jax.checkpoint.formats.layout import Layout, Wanted
from sail_jax.checks import one_of
from sail_jax.merging.tensors import Tensor

Contents = tuple[dict[str, Tensor], dict[str, str]]  # tensors by name, and metadata
LayOut = Callable[[Wanted, str, Mapping[str, str], int | None], Layout]


@dataclass(frozen=True, kw_only=True)
class Format:
    """One format of checkpoints.

    Attributes:
      name: Its name in options and messages.
      files: The usual names of its file, one for each suffix. An output uses the first. Empty if a
        checkpoint of this format is a folder made by a library.
      read_file: Reads a file: its tensors by name, and its metadata. None if the format has only
        folders.
      read_folder: Reads a folder made by a library; returns None for any other folder.
      layout: Lays out an output from its tensors, file name, metadata and the size in bytes from
        which there are several files (None: never). None if this format is only read.
      needs: The bytes in memory while a library makes the output from its tensors.
      sharded: Whether several files of this format in a folder are one checkpoint even without an
        index.
      pickled: Whether it is read only with `allow_pickle`.
      plain: Whether its files contain no checksums of tensors, so that values can be replaced in a
        copy.
      not_weights: Names of files with its suffix that contain something else.
      note: Describes what other programs do not read, given the dtypes of an output; "" for
        nothing. None if they read all dtypes.
    """

    name: str
    files: tuple[str, ...] = ()
    read_file: Callable[[File], Contents] | None = None
    read_folder: Callable[[Path], Contents | None] | None = None
    layout: LayOut | None = None
    needs: int = 0
    sharded: bool = False
    pickled: bool = False
    plain: bool = False
    not_weights: tuple[str, ...] = ()
    note: Callable[[Iterable[np.dtype]], str] | None = None

    @property
    def file(self) -> str:
        """The name of an output's file, "" if the output is a folder made by a library."""
        return self.files[0] if self.files else ""


def of_module(module: ModuleType, name: str, *files: str, **about: Any) -> Format:
    """Makes the row of a format from its module.

    Args:
      module: A module with a function `read_file` or `read_folder`, and with one `layout` if the
        format is written.
      name: Its name in options and messages.
      *files: The usual names of its file; none for folders made by a library.
      **about: The other attributes of a `Format`.

    Returns:
      The row.
    """
    functions = ("read_file", "read_folder", "layout", "note")
    defined = {function: getattr(module, function, None) for function in functions}
    return Format(name=name, files=files, **defined, **about)


_TRAINED = ("training_args.bin", "optimizer.bin", "scheduler.bin")
# The order matters: if a folder contains several formats, the first of this table is read.
_TABLE = (
    of_module(safetensors_files, "safetensors", "model.safetensors", sharded=True, plain=True),
    of_module(orbax_folders, "orbax", needs=stores.WRITING),
    of_module(levanter_folders, "levanter"),
    of_module(msgpack_files, "msgpack", "flax_model.msgpack", plain=True),
    of_module(npz_files, "npz", "model.npz"),
    of_module(
        torch_pickles,
        "bin",
        "pytorch_model.bin",
        sharded=True,
        pickled=True,
        not_weights=_TRAINED,
    ),
    of_module(torch_pickles, "pt", "model.pt", "model.pth", pickled=True),
)
FORMATS = {format.name: format for format in _TABLE}


def suffixes() -> dict[str, Format]:
    """Lists the suffixes of files of tensors, with the format of each."""
    return {Path(file).suffix: format for format in FORMATS.values() for file in format.files}


def layouts() -> dict[str, LayOut]:
    """Lists the formats that are written.

    Returns:
      The layout function of each format, by the format's name.
    """
    return {format.name: format.layout for format in FORMATS.values() if format.layout}


def of_file(path: str | Path) -> Format | None:
    """Looks up the format of a file by its suffix.

    Args:
      path: The file, which need not exist.

    Returns:
      The format, or None if no format has this suffix.

    >>> of_file("model.npz").name, of_file("model_best.pth.tar").name, of_file("files.npz.tar")
    ('npz', 'pt', None)
    """
    path = Path(path)
    if path.suffix != ".tar":
        return suffixes().get(path.suffix)
    # By convention PyTorch's files have this suffix, although they are not tar archives.
    format = suffixes().get(Path(path.stem).suffix)
    return format if format and format.pickled else None


def of_output(out: Path) -> Format | None:
    """Looks up the format of a single-file output by its suffix.

    Args:
      out: Where the output goes.

    Returns:
      The format, or None if the output is a folder, because its name has no suffix of a format that
      can be written.
    """
    format = of_file(out)
    return format if format and format.layout else None


def needs(name: str | None) -> int:
    """Returns the memory that a library requires to make an output.

    Args:
      name: The name of a format. None stands for a choice by the output's name, which involves no
        library.

    Returns:
      The bytes, at most.
    """
    return FORMATS[name].needs if name else 0


def check_written(name: str | None) -> None:
    """Checks that outputs can have the format of this name.

    Args:
      name: The name of a format; None, for a choice by the writer, is always valid.

    Raises:
      CheckpointError: If the format is unknown, or can only be read.
    """
    if name is not None:
        one_of("format", name, layouts(), CheckpointError)
