"""States of a training on disk, from which a killed training continues exactly.

    <step>/arrays          an orbax checkpoint of the state, by the paths of its leaves
    <step>/manifest.json   config, dtype and shape of each leaf, checksum of each file

The folder's name is the number of steps taken. Renaming is the last operation when a folder is
written, so a folder with this name is complete.
"""

import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from experiments.lab.store import config_record, differences
from experiments.training.step import State
from sail_jax import disk
from sail_jax.checkpoint.formats.nesting import nested
from sail_jax.checkpoint.formats.orbax_folders import admit
from sail_jax.checks import integer
from sail_jax.disk import RefusedError, StoreError
from sail_jax.trees import leaf_paths

MANIFEST, ARRAYS = "manifest.json", "arrays"
_FIELDS = {"step": int, "config": dict, "leaves": dict, "key": str, "files": dict}


class Checkpoints:
    """The latest checkpoints of a training, in a separate directory.

    They are written in the background. Use it in a `with` block, whose end waits for the last one.
    If several processes train together, all of them save, wait and restore.

    Args:
      directory: The directory. It is created if it is missing.
      config: A dataclass with everything that affects the training. Checkpoints of a different
        config are rejected.
      keep: The number of checkpoints that are kept, at least 1.

    Raises:
      ValueError: If `keep` is below 1.
      RefusedError: If the directory contains checkpoints of a different config. The message lists
        the fields.
      StoreError: If the latest checkpoint is damaged, or the directory cannot be written to.
    """

    def __init__(self, directory: str | Path, config: Any, *, keep: int = 2) -> None:
        self.directory = Path(directory)
        self.config = config_record(config)
        self.keep = integer("keep", keep)
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._orbax: Any = None
        with disk.explained("write to", self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                # These were left by a process that died.
                for leftover in self.directory.glob(".*.part"):
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        if self.steps():
            self._manifest(self.steps()[-1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._pool.shutdown()
            if self._orbax is not None:
                self._orbax.close()

    def steps(self) -> list[int]:
        """Lists the stored checkpoints.

        Returns:
          The numbers of their steps, in ascending order.
        """
        folders = (p for p in self.directory.iterdir() if p.name.isdecimal() and p.is_dir())
        return sorted(int(folder.name) for folder in folders)

    def save(self, state: State) -> None:
        """Stores a state, unless one of the same step is already stored.

        It returns once the arrays have been copied off the device. The files are written in the
        background.

        Args:
          state: The state.

        Raises:
          StoreError: If this checkpoint cannot be started, or the previous one could not be
            written.
          ValueError: If an array of the state is empty.
          CheckpointError: If orbax would write two leaves to the same path.
        """
        self.wait()
        step = int(state.step)
        folder, part = self.directory / str(step), self.directory / f".{step}.part"
        if folder.exists():
            return
        arrays = _by_path(state)
        manifest = {
            "format": disk.FORMAT,
            "step": step,
            "config": self.config,
            "leaves": {path: _spelt(x) for path, x in arrays.items()},
            "key": str(jax.random.key_impl(state.key)),
        }
        if jax.process_index() == 0:
            with disk.explained("write", folder):
                part.mkdir()
        with _orbax(folder, "write"):
            if self._orbax is None:
                self._orbax = _checkpointer()
            tree = _filled(nested(arrays), arrays)
            # Returns once the arrays are copied to the host; the next step may then take over the
            # buffers.
            self._orbax.save((part / ARRAYS).absolute(), tree)
        self._pending = self._pool.submit(self._commit, folder, part, manifest)

    def _commit(self, folder: Path, part: Path, manifest: dict[str, Any]) -> None:
        """Finishes a checkpoint in the background: syncs its files, writes the manifest, renames
        it.
        """
        with _orbax(folder, "write"):
            self._orbax.wait_until_finished()
        if jax.process_index() != 0:
            return
        with disk.explained("write", folder):
            # All files must be on disk before the rename, which makes the folder count.
            for path in (part / ARRAYS, *(part / ARRAYS).rglob("*")):
                disk.sync(path)
            disk.write_record(part / MANIFEST, {**manifest, "files": _checksums(part / ARRAYS)})
            os.replace(part, folder)
            disk.sync(self.directory)
            for step in self.steps()[: -self.keep]:
                # Renamed before it is removed, so a partial checkpoint never has a valid name.
                old = self.directory / f".{step}.part"
                os.replace(self.directory / str(step), old)
                shutil.rmtree(old)

    def wait(self) -> None:
        """Waits until the last `save` is on disk.

        Raises:
          StoreError: If it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.result()
        # Only the first process renames folders. After this, all processes see them.
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"checkpoint {self.directory}")

    def restore(self, like: State) -> State | None:
        """Reads the latest state.

        Args:
          like: A state with the expected structure, shapes and shardings. Its values are not used.

        Returns:
          The state, with each array laid out as in `like`; None if no state is stored.

        Raises:
          RefusedError: If the stored state is of a different network or optimiser. The message
            contains the name of a leaf.
          StoreError: If a file is missing or damaged. The message explains the remedy.
        """
        self.wait()
        if not self.steps():
            return None
        step = self.steps()[-1]
        folder, manifest = self.directory / str(step), self._manifest(step)
        leaves = {path: _spelt(x) for path, x in _by_path(like).items()}
        unlike = differences(manifest["leaves"], leaves)
        # Numbers of one kind of key would otherwise be read silently as another kind.
        if unlike or manifest["key"] != str(jax.random.key_impl(like.key)):
            why = unlike[0] if unlike else f"its random keys are {manifest['key']}"
            raise RefusedError(f"{folder} is of another network or optimiser: {why}")
        # All bytes are checked before orbax interprets them.
        with disk.explained("read", folder):
            files = _checksums(folder / ARRAYS)
        for file in sorted(files.keys() | manifest["files"].keys()):
            if files.get(file) != manifest["files"].get(file):
                raise StoreError(
                    f"{folder / ARRAYS / file} is damaged or missing; {self._without(step)}"
                )
        with _orbax(folder, "read"):
            arrays = _read((folder / ARRAYS).absolute(), _by_path(like))
        state = jax.tree.unflatten(jax.tree.structure(like), [arrays[p] for p in leaf_paths(like)])
        key = jax.random.wrap_key_data(state.key, impl=jax.random.key_impl(like.key))
        return state._replace(key=key)

    def _manifest(self, step: int) -> dict[str, Any]:
        """Reads the manifest of a step, and checks that it is of this training."""
        path = self.directory / str(step) / MANIFEST
        try:
            manifest = disk.read_record(path, _FIELDS)
        except StoreError as exc:
            raise StoreError(f"{exc}; {self._without(step)}") from exc
        if manifest["step"] != step:
            raise StoreError(f"{path} is of step {manifest['step']}; {self._without(step)}")
        unlike = differences(manifest["config"], self.config)
        if unlike:
            raise RefusedError(
                f"{self.directory} holds another training ({'; '.join(unlike)}): give that config, "
                "or choose another directory"
            )
        return manifest

    def _without(self, step: int) -> str:
        """Returns advice to remove a damaged checkpoint, and the step from which training
        continues."""
        earlier = [s for s in self.steps() if s < step]
        where = f"from step {earlier[-1]}" if earlier else "from the beginning"
        return f"remove {self.directory / str(step)} to continue {where}"


def _by_path(state: State) -> dict[str, Any]:
    """Returns the arrays of a state by path. Random keys become plain numbers for storage."""
    state = state._replace(key=jax.random.key_data(state.key))
    arrays = dict(zip(leaf_paths(state), map(jnp.asarray, jax.tree.leaves(state)), strict=True))
    empty = [path for path, x in arrays.items() if not x.size]
    if empty:
        raise ValueError(f"{empty[0]}: an empty array cannot be stored")
    admit(arrays)
    return arrays


def _spelt(x: jax.Array) -> str:
    """Returns the dtype and shape of an array as text, for manifests and messages."""
    return f"{x.dtype}{list(x.shape)}"


def _filled(node: PyTree, arrays: Mapping[str, PyTree]) -> PyTree:
    """Replaces each path in a nested dictionary by the array at that path."""
    if isinstance(node, dict):
        return {key: _filled(child, arrays) for key, child in node.items()}
    return arrays[node]


def _checkpointer() -> Any:
    """Creates an orbax checkpointer that writes in the background."""
    import orbax.checkpoint as ocp  # slow to import

    return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())


def _read(path: Path, like: dict[str, Any]) -> dict[str, jax.Array]:
    """Reads arrays by path, each laid out on devices as the one in `like`."""
    import orbax.checkpoint as ocp

    how = {
        name: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype)
        for name, x in like.items()
    }
    spelt = nested(like)
    with ocp.PyTreeCheckpointer() as checkpointer:
        args = ocp.args.PyTreeRestore(_filled(spelt, like), _filled(spelt, how))
        tree = checkpointer.restore(path, args=args)
    return {"/".join(k.key for k in keys): x for keys, x in jax.tree.leaves_with_path(tree)}


def _checksums(folder: Path) -> dict[str, str]:
    """Computes the SHA-256 of each file in a folder and below, by relative path."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_dir():
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            digests[path.relative_to(folder).as_posix()] = digest
    return digests


@contextlib.contextmanager
def _orbax(folder: Path, doing: str) -> Iterator[None]:
    """Turns errors of orbax and tensorstore into one sentence, and suppresses their logging."""
    absl = logging.getLogger("absl")
    quiet = lambda record: False  # noqa: E731
    absl.addFilter(quiet)
    try:
        yield
    except Exception as exc:
        why = " ".join(str(exc).split())[:300] or type(exc).__name__
        raise StoreError(f"cannot {doing} {folder}: {why}") from exc
    finally:
        absl.removeFilter(quiet)
