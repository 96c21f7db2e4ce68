"""Stores factors in a folder next to the output until all of them are known.

The writer of a checkpoint must know all shapes before it begins, but the ranks of factors are known
only after their computation. Factors are therefore first written to the folder `.<name>.factors`,
one file for each change, where a resumed run finds them.
"""

import contextlib
import functools
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sail_jax import disk
from sail_jax.checkpoint.formats.files import CheckpointError, LoadedTensor, explained
from sail_jax.checkpoint.formats.folders import hold
from sail_jax.checkpoint.formats.open import load_checkpoint, open_checkpoint
from sail_jax.checkpoint.output.writer import save_checkpoint
from sail_jax.checkpoint.sources.factored import Factors
from sail_jax.checks import argument

_HEAD = "head.json"


class FactorSpool:
    """Factors in a folder, by name, as a context manager that keeps the folder locked.

    It is also the sink of an executor. The executor reads `Factored` tensors, which store their
    factors here.

    Attributes:
      finished: The names of the factors that an earlier run stored.
    """

    def __init__(self, out: Path, fingerprint: str, names: Sequence[str], resume: bool) -> None:
        """Makes the folder, or reads the state of an earlier run.

        Args:
          out: The output that the factors are for.
          fingerprint: A text that identifies the computation.
          names: The names of all factors.
          resume: Whether the files of an earlier run are used.

        Raises:
          CheckpointError: If the folder is in use, or contains anything else.
        """
        self._folder = out.with_name(f".{out.name}.factors")
        self._places = {name: f"{k}.safetensors" for k, name in enumerate(names)}
        head = {"format": disk.FORMAT, "fingerprint": fingerprint}
        path = self._folder / _HEAD
        with explained("write", out):
            out.parent.mkdir(parents=True, exist_ok=True)
            self._lock = hold(self._folder, out)
        try:
            with explained("read", self._folder):
                there = sorted(os.listdir(self._folder))
            if not there:
                disk.write_record(path, head)
            elif not path.exists() or disk.read_record(path, {"fingerprint": str}) != head:
                raise CheckpointError(
                    f"{self._folder} holds the unfinished work of another run to {out.name}, or an "
                    "input has changed since; remove it or choose another place for the output"
                )
            elif not resume:
                raise CheckpointError(
                    f"{self._folder} holds unfinished work of the same run; continue it with "
                    f"{argument('resume', 'True')}, or remove it"
                )
            self.finished = frozenset(n for n, file in self._places.items() if file in there)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "FactorSpool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the lock; stored factors are kept."""
        with contextlib.suppress(OSError, disk.StoreError):
            if os.listdir(self._folder) in ([], [_HEAD]):
                self.remove()
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def keep(self, name: str, factors: Factors) -> None:
        """Stores factors in a file, atomically.

        Args:
          name: Their name.
          factors: The factors.

        Raises:
          CheckpointError: If they cannot be written.
        """
        path = self._folder / self._places[name]
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        norms = np.array([factors.norm, factors.error])
        arrays = {"left": factors.left, "right": factors.right, "norms": norms}
        save_checkpoint(path, arrays)

    def write(self, name: str, array: np.ndarray, start: int = 0) -> None:
        """Ignores the rank of factors, which their file also contains."""

    def done(self, name: str) -> None:
        """Records that factors have been stored."""

    def norms(self, name: str) -> tuple[int, float, float]:
        """Returns the rank of factors, the norm of their change, and the norm of their error.

        Args:
          name: Their name.

        Returns:
          The rank and the two norms.

        Raises:
          CheckpointError: If their file was damaged.
        """
        with open_checkpoint(self._folder / self._places[name]) as kept:
            norms = np.empty(2)
            kept.tensors["norms"].read(norms)
            return kept.tensors["right"].shape[0], float(norms[0]), float(norms[1])

    def tensor(self, key: str, name: str, side: str, transposed: bool) -> LoadedTensor:
        """Makes a tensor of one factor.

        Args:
          key: The name of the tensor.
          name: The name of the factors.
          side: Which one, "left" or "right".
          transposed: Whether the transpose is returned.

        Returns:
          The tensor, which is read on demand.

        Raises:
          CheckpointError: If the file of the factors was damaged.
        """
        path = self._folder / self._places[name]
        with open_checkpoint(path) as kept:
            like = kept.tensors[side]
        shape = like.shape[::-1] if transposed else like.shape
        load = functools.partial(_loaded, path, side, transposed)
        # The factor is in memory twice, because it may be transposed.
        span = 2 * math.prod(shape) * like.dtype.itemsize
        return LoadedTensor(key, like.dtype, shape, str(path), load, span)

    def remove(self) -> None:
        """Removes the folder after the output is complete.

        Raises:
          CheckpointError: If it cannot be removed.
        """
        with explained("remove", self._folder):
            # The header is removed last, because it identifies the folder as ours.
            for path in sorted(self._folder.iterdir(), key=lambda path: path.name == _HEAD):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            self._folder.rmdir()


def _loaded(path: Path, side: str, transposed: bool) -> np.ndarray:
    """Returns one factor in a file of a spool."""
    array = load_checkpoint(path)[side]
    return array.T if transposed else array
