"""Opens checkpoints of any format. Opening reads names, dtypes and shapes, but no entries."""

import contextlib
import math
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from types import MappingProxyType

import numpy as np

from sail_jax.checkpoint.formats import hub, runs
from sail_jax.checkpoint.formats.files import CheckpointError, File, changed, contained, reading
from sail_jax.checkpoint.formats.listing import INDEX, check_shards, is_extra, stored, weights
from sail_jax.checkpoint.formats.quantized import Scheme
from sail_jax.checkpoint.formats.safetensors_files import read_index
from sail_jax.checkpoint.formats.table import FORMATS, Format, of_file, suffixes
from sail_jax.checks import argument, as_path
from sail_jax.merging.selection import Select, Selection, selection
from sail_jax.merging.tensors import Tensor

# Files that are not copied to an output: hidden files, documents, the input's recipe, weights.
_ELSEWHERE = re.compile(
    r"^\.|^(README|LICENSE|USE_POLICY)|^(recipe\.yaml|mergekit_config\.yml)$|\.(gguf|onnx)$", re.I
)


class Checkpoint:
    """An open checkpoint: its tensors and its other files.

    Opening reads no tensor. It is a context manager: its files stay open, and any thread may read
    them, until the context ends or it is closed.

    Attributes:
      path: The file or folder that was opened.
      format: The name of its format, a key of `formats.table.FORMATS`.
      tensors: The tensors by name, in the order of the files.
      metadata: Text by key, if the format stores any.
      extras: The plain files of the checkpoint, such as config.json and the tokenizer's, by file
        name. Each is a path or the contents.
      files: Every file that the checkpoint is read from, with its status at opening.
      rivals: Files of the same format in the folder that are not read, because another one was
        preferred or the index does not list them.
      special: Names of configurations and tokenizers that are pipes, devices or folders.
      others: Files and folders next to the tensors that are neither read nor copied to an output,
        such as a model's code.
      rest: Tensors that were not selected, by name; see `select`.
      selection: Which tensors were selected; None if all were.
      decoded: How codes are decoded to weights, as a sentence; "" for plain weights.
      scheme: The scheme by which the decoded weights are stored as codes; None for plain weights.
      step: Which step of a run is read, as a sentence; "" if the path is the checkpoint itself.
      snapshot: The model on the Hub at one commit; None for anything else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.format = ""
        self.tensors: dict[str, Tensor] = {}
        self.metadata: dict[str, str] = {}
        self.extras: dict[str, Path | bytes] = {}
        self.files: dict[Path, os.stat_result] = {}
        self.rivals: tuple[str, ...] = ()
        self.special: tuple[str, ...] = ()
        self.others: tuple[str, ...] = ()
        self.rest: dict[str, Tensor] = {}
        self.selection: Selection | None = None
        self.decoded = ""
        self.scheme: Scheme | None = None
        self.step = ""
        self.snapshot: hub.Snapshot | None = None
        self._open: list[File] = []

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, tensors={len(self.tensors)})"

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes its files, after which tensors cannot be read."""
        for file in self._open:
            file.close()

    def select(self, select: Select = None) -> None:
        """Keeps the selected tensors in `tensors`, and moves the others to `rest`.

        Args:
          select: Which tensors are kept; see `sail_jax.merging.selection`.

        Raises:
          ValueError: If no tensor is kept.
        """
        every = {**self.tensors, **self.rest}
        self.selection = selection(every, select)
        self.tensors = {name: every[name] for name in self.selection.chosen}
        self.rest = {name: every[name] for name in self.selection.rest}

    def about(self) -> list[str]:
        """Describes which part of the path was opened, if not all of it.

        Returns:
          Sentences: the commit on the Hub, the step of a run, codes, what is not read, and the
          leaves of a state.
        """
        said = []
        if self.snapshot is not None:
            said.append(f"commit {self.snapshot.commit} is read")
        if self.snapshot is not None and self.snapshot.lacking:
            said.append(f"the cache lacks {', '.join(self.snapshot.lacking)}")
        selected = [str(self.selection)] if self.selection and self.rest else []
        return [*said, *filter(None, (self.step, self.decoded)), *self.unread(), *selected]

    def unread(self) -> list[str]:
        """Lists the contents of the folder that are not read.

        Returns:
          Sentences: further files of tensors, and special files.
        """
        said = []
        if self.rivals:
            weights = [path.name for path in self.files if path.name not in self.extras]
            more = f" with {len(weights) - 1} more" if len(weights) > 1 else ""
            said.append(f"{', '.join(self.rivals)} not read: {weights[0]}{more} is")
        # `about` lists links of the cache to missing files.
        lacking = () if self.snapshot is None else self.snapshot.lacking
        if special := [name for name in self.special if name not in lacking]:
            several = len(special) > 1
            of = "are no plain files and count" if several else "is no plain file and counts"
            said.append(f"{', '.join(special)} {of} as missing")
        return said

    def check_unchanged(self) -> None:
        """Checks that no file was written, replaced or removed since the checkpoint was opened.

        A changed file may have been read partly in its old and partly in its new version.

        Raises:
          CheckpointError: If the size or a time of a file differs, or the file no longer exists.
        """
        for path, before in self.files.items():
            try:
                same = _version(path.stat()) == _version(before)
            except OSError:
                same = False
            if not same:
                raise changed(path)

    def _file(self, path: Path) -> File:
        """Opens a file that `close` closes and `check_unchanged` checks."""
        file = File(path, hub.called(path))
        self._open.append(file)
        self.files[path] = file.about
        return file

    def _add(self, path: Path, allow_pickle: bool, names: list[str] | None = None) -> None:
        """Adds the tensors of one file, which must be exactly `names` if they are given."""
        format = of_file(path)
        if format is None or format.read_file is None:
            types = ", ".join(suffixes())
            raise CheckpointError(f"{path}: expected a folder or a file of type {types}")
        if format.pickled and not allow_pickle:
            raise CheckpointError(
                f"{path} is a PyTorch pickle, which is read only with "
                f"{argument('allow_pickle', 'True')}; safetensors files are safer"
            )
        self.format = format.name
        tensors, metadata = format.read_file(self._file(path))
        if names is not None:
            for name in names:
                if name not in tensors:
                    why = "is missing, which the index places there"
                    raise CheckpointError(f"{path}: '{name}' {why}")
            # Other tensors are refused too: this could be another model's file of the same name.
            if unknown := tensors.keys() - set(names):
                raise CheckpointError(f"{path}: '{min(unknown)}' is missing in the index")
        for name in tensors:
            if name in self.tensors:
                raise CheckpointError(
                    f"{path}: '{name}' is also in {self.tensors[name].source}; expected it once"
                )
        self.tensors |= tensors
        self.metadata |= metadata


def _version(about: os.stat_result) -> tuple[int, int, int]:
    """Returns the parts of a file's status that change whenever its contents change."""
    # A program can reset the modification time, but not the change time, the last field.
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns


def open_checkpoint(
    path: str | PathLike[str], *, allow_pickle: bool = False, offline: bool = False
) -> Checkpoint:
    """Opens a checkpoint file, or a folder with the weights of one model.

    `formats.table.FORMATS` lists the formats, such as safetensors. PyTorch's format requires
    `allow_pickle`. If a folder contains several formats, the first one in the table is read. Files
    may be shards, with or without their index. Only names, dtypes and shapes are read. Use the
    result as a context manager to close its files.

    Args:
      path: The file, the index of shards, or the folder. For a training run, the newest checkpoint
        is opened, or the step in "run@1000"; see `formats.runs`. If no such path exists, "org/name"
        or "org/name@revision" is a model on the Hub; see `formats.hub`.
      allow_pickle: Whether PyTorch's pickles are read. They are parsed without running any of
        their code.
      offline: Whether a model on the Hub is read only from this machine's cache. Otherwise it is
        downloaded if necessary, which requires `pip install 'sail-jax[hub]'`.

    Returns:
      The open checkpoint.

    Raises:
      CheckpointError: If the path contains no checkpoint, or something in it is damaged, missing or
        repeated. It is a `ValueError`, and its message contains the file's path.

    >>> import numpy as np, tempfile
    >>> from sail_jax.checkpoint import save_checkpoint
    >>> path = f"{tempfile.mkdtemp()}/model.npz"
    >>> save_checkpoint(path, {"w": np.ones((2, 3), np.float32)})
    >>> with open_checkpoint(path) as checkpoint:
    ...     checkpoint.format, checkpoint.tensors["w"].shape
    ('npz', (2, 3))
    """
    given, path = path, as_path("path", path)
    checkpoint = Checkpoint(path)
    with closed_on_error(checkpoint), reading(path):
        checkpoint.snapshot = hub.resolved(given, offline=offline)
        if checkpoint.snapshot is not None:
            checkpoint.path = path = checkpoint.snapshot.folder
        elif not path.exists():
            step, *others = runs.named(given)
            if others:
                number = 1 + len(others)
                raise CheckpointError(f"{path} matches {number} checkpoints; expected one")
            if (runs.split(given)[1] or "").startswith("last"):
                checkpoint.step = f"step {step.number} is read"
            checkpoint.path = path = step.path
        if path.is_dir():
            _open_folder(checkpoint, path, allow_pickle)
        elif path.name.endswith(INDEX):
            _open_index(checkpoint, path, allow_pickle)
        else:
            checkpoint._add(path, allow_pickle)
        for name in checkpoint.tensors:
            # A pickle or JSON may contain half of a surrogate pair, which cannot be stored.
            name.encode()
    return checkpoint


@contextlib.contextmanager
def closed_on_error(checkpoint: Checkpoint) -> Iterator[None]:
    """Closes a checkpoint if a `with` statement ends with an error.

    Args:
      checkpoint: The checkpoint, which stays open otherwise.

    Yields:
      Nothing.
    """
    try:
        yield
    except BaseException:
        checkpoint.close()
        raise


def check_there(
    paths: Iterable[str | PathLike[str]],
    *,
    offline: bool = False,
    places: Mapping[str, Callable[[], object]] = MappingProxyType({}),
) -> None:
    """Checks that several inputs exist, before any model on the Hub is downloaded.

    Args:
      paths: The inputs, as `open_checkpoint` takes them.
      offline: As `open_checkpoint` takes it.
      places: Functions that find the origin of each input for messages, such as the line of a
        recipe.

    Raises:
      CheckpointError: As `open_checkpoint` does for a missing input, and if the models together do
        not fit on the disk.
    """
    names = list(dict.fromkeys(os.fspath(path) for path in paths))
    for name in names:
        if os.path.lexists(name):
            continue
        try:
            with reading(name):
                runs.named(name)
        except CheckpointError as error:
            if name not in places:
                raise
            raise CheckpointError(f"{places[name]()}: {error}") from error
    # A single model is looked up when it is opened.
    if len(names) > 1:
        hub.check_there(names, offline=offline)


def load_checkpoint(
    path: str | PathLike[str], *, allow_pickle: bool = False, offline: bool = False
) -> dict[str, np.ndarray]:
    """Loads all tensors of a checkpoint into memory.

    Args:
      path: As `open_checkpoint` takes it.
      allow_pickle: As `open_checkpoint` takes it.
      offline: As `open_checkpoint` takes it.

    Returns:
      NumPy arrays by name. Bfloat16 and the float8 types come from `ml_dtypes`. Tied weights in a
      PyTorch file, which are one view of one storage, share an array.

    Raises:
      CheckpointError: As `open_checkpoint` does, and if a file is truncated or changes while it is
        read, or a tensor does not fit into memory.

    >>> import numpy as np, tempfile
    >>> from sail_jax.checkpoint import save_checkpoint
    >>> path = f"{tempfile.mkdtemp()}/model.safetensors"
    >>> save_checkpoint(path, {"w": np.arange(3, dtype=np.float32)})
    >>> load_checkpoint(path)["w"]
    array([0., 1., 2.], dtype=float32)
    """
    with open_checkpoint(path, allow_pickle=allow_pickle, offline=offline) as checkpoint:
        arrays, made = dict[str, np.ndarray](), dict[Hashable, np.ndarray]()
        for name, tensor in checkpoint.tensors.items():
            key = (getattr(tensor, "place", name), tensor.shape)
            if key in made:
                arrays[name] = made[key]
                continue
            with reading(f"{tensor.source}: '{name}'"):
                flat = np.empty(math.prod(tensor.shape), tensor.dtype)
            tensor.read(flat)
            arrays[name] = made[key] = flat.reshape(tensor.shape)
        checkpoint.check_unchanged()
        return arrays


def _open_folder(
    checkpoint: Checkpoint, folder: Path, allow_pickle: bool, is_step: bool = False
) -> None:
    """Adds the weights of a folder, in its first format by the table, and its extras.

    A folder without weights may be a run, whose newest checkpoint is then opened. That checkpoint
    must not be a run itself: if it linked to its parent, the search would never end.
    """
    names = sorted(entry.name for entry in folder.iterdir())
    extras = {
        name: contained(folder, name)
        for name in names
        if is_extra(name) and (folder / name).is_file()
    }
    checkpoint.extras = {**extras}
    checkpoint.special = tuple(name for name in names if is_extra(name) and name not in extras)
    checkpoint.files = {path: path.stat() for path in extras.values()}
    weighty = stored()
    checkpoint.others = tuple(
        name
        for name in names
        if not (name in extras or _ELSEWHERE.search(name) or name.lower().endswith(weighty))
    )
    for format in FORMATS.values():
        if format.read_folder and (contents := format.read_folder(folder)):
            checkpoint.tensors, checkpoint.metadata = contents
            # A library reads these files itself, so all of them are checked for changes.
            below = (path for path in sorted(folder.rglob("*")) if path.is_file())
            checkpoint.files |= {path: path.stat() for path in below}
            checkpoint.format, checkpoint.others = format.name, ()
            return
        for usual in format.files:
            files = weights(folder, names, format, usual)
            for name in files:
                if name.endswith(INDEX):
                    _open_index(checkpoint, contained(folder, name), allow_pickle)
                else:
                    checkpoint._add(contained(folder, name), allow_pickle)
            check_shards(folder, files)
            if files:
                checkpoint.rivals = _rivals(checkpoint, names, format, files)
                return
    if not is_step and (newest := runs.latest(folder)):
        step, checkpoint.step = newest
        _open_folder(checkpoint, step.path, allow_pickle, is_step=True)
        return
    formats = ", ".join(FORMATS)
    listing = ", ".join(names[:8]) + ", ..." * (len(names) > 8) or "nothing"
    raise CheckpointError(f"{folder} holds no checkpoint ({formats}): found {listing}")


def _rivals(
    checkpoint: Checkpoint, names: list[str], format: Format, files: list[str]
) -> tuple[str, ...]:
    """Returns the files of a format in a folder that are not read."""
    read = {path.name for path in checkpoint.files} | {*files, *format.not_weights}
    suffix = Path(files[0].removesuffix(INDEX)).suffix
    alike = [n for n in names if n.endswith((suffix, suffix + INDEX)) and not n.startswith(".")]
    return tuple(name for name in alike if name not in read)


def _open_index(checkpoint: Checkpoint, index: Path, allow_pickle: bool) -> None:
    """Adds the tensors of all files that an index lists."""
    shards = read_index(checkpoint._file(index))
    for shard, names in shards.items():
        if of_file(shard) is None:
            raise CheckpointError(f"{index} places tensors in '{shard}', whose format is not read")
        checkpoint._add(contained(index.parent, shard), allow_pickle, names)
    check_shards(index, shards)
