"""Arrays in a TensorStore, as orbax and Levanter write them: all opened at once, read by blocks.

TensorStore is imported by this module alone, and only when there is such a checkpoint.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sail_jax import disk
from sail_jax.checkpoint.formats.files import DTYPES, CheckpointError, checked_shape
from sail_jax.checkpoint.formats.layout import Wanted
from sail_jax.merging.tensors import LastBlock, Shape, Tensor, check_read

__all__ = ["StoredArray", "belongs", "in_one", "listed", "opened", "rewrite", "write"]

# How many bytes of small blocks are read at once.
_RUN = 8 << 20
# How many bytes a chunk has that is written, at most, and how many are written at once.
_CHUNK, _IN_FLIGHT = 32 << 20, 64 << 20
# A block may have so many times the bytes of its array: more is a mistake, or an attack.
_SLACK = 4
_MANIFEST = "manifest.ocdbt"
_DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}
"""The file that describes an array, and the driver that reads it."""
_ABOUT = (*_DRIVERS, ".zattrs", ".zgroup")


class StoredArray:
    """An array that is stored in chunks, read in blocks of whole chunks.

    A block is a run of consecutive entries. If a read ends inside of a block, the block is kept
    for the next read. It is a `sail_jax.merging.tensors.Tensor`.

    Attributes:
      name: The tensor's name in the checkpoint.
      dtype: The type of its entries.
      shape: Its shape.
      source: Where it lies, for messages.
      key: The key of the array in its store.
      needs: Bytes held while it is read, at most.
    """

    def __init__(self, name: str, store: Any, source: str, key: str) -> None:
        """Describes an array; nothing of it is read.

        Args:
          name: The tensor's name in the checkpoint.
          store: The open array, a `tensorstore.TensorStore`.
          source: Where it lies, for messages.
          key: The key of the array in its store.

        Raises:
          CheckpointError: If no array can have its shape, its type is not one of `DTYPES`, or its
            chunks are far larger than the array.
        """
        what = f"{source}: '{name}'"
        kind = store.dtype.name
        if kind not in DTYPES:
            raise CheckpointError(f"{what} has the type {kind}, which is not read")
        self.name, self.source, self.key, self.dtype = name, source, key, DTYPES[kind]
        self.shape: Shape = checked_shape(tuple(store.shape), self.dtype.itemsize, what)
        chunk = checked_shape(
            tuple(store.chunk_layout.read_chunk.shape or ()),
            self.dtype.itemsize,
            f"{what}, a chunk",
        )
        size = math.prod(self.shape) * self.dtype.itemsize
        stored = math.prod(chunk) * self.dtype.itemsize
        if stored > _SLACK * size + (1 << 20):
            raise CheckpointError(f"{what} has {size} bytes in chunks of {stored}")
        axis, rows, self._width = _rows(self.shape)
        self._at = (0,) * axis
        self._height = min(chunk[axis], rows) if chunk else 1
        block = self._height * self._width * self.dtype.itemsize
        # Small blocks are read several at once: each call of TensorStore takes a while.
        self._most = max(1, _RUN // max(1, block))
        # TensorStore holds what it decodes and what it decoded.
        self.needs = 2 * max(stored, min(size, self._most * block))
        self._store = store
        self._last = LastBlock(lambda number: self._read(number, number + 1))

    @property
    def block(self) -> int:
        """The number of entries of a block: what is read at once, if it is read from its start."""
        return max(1, self._height * self._width)

    @property
    def driver(self) -> str:
        """How the array is stored, "zarr" or "zarr3"."""
        return self._store.spec().to_json()["driver"]

    def bands(self) -> Iterator[tuple[tuple[Any, ...], int, int]]:
        """Divides the array into runs of whole chunks as they are written.

        Yields:
          The place of a run in the array; the indices of its first entry, and behind its last.
        """
        size, axis = math.prod(self.shape), len(self._at)
        if not size:
            return
        if not self.shape:
            yield self._at, 0, size
            return
        rows = self.shape[axis]
        height = self._store.chunk_layout.write_chunk.shape[axis]
        height *= max(1, _RUN // max(1, height * self._width * self.dtype.itemsize))
        for first in range(0, rows, height):
            last = min(first + height, rows)
            place = (*self._at, slice(first, last))
            yield place, first * self._width, last * self._width

    def read(self, out: np.ndarray, start: int = 0) -> None:
        """Reads consecutive entries, in row-major order.

        Args:
          out: The buffer to fill: flat, contiguous, of the array's dtype.
          start: Row-major index of the first entry to read.

        Raises:
          ValueError: If the buffer does not fit, or the array does not have all these entries.
          CheckpointError: If the entries cannot be read.
        """
        check_read(self, out, start)
        size, total, end = self._height * self._width, math.prod(self.shape), start + out.size
        at = start
        while at < end:
            first, inside = divmod(at, size)
            # The blocks before this one end before the last entry that is asked for.
            last = end // size if end < total else -(-total // size)
            if inside == 0 and last > first:
                part = self._read(first, min(last, first + self._most))
            else:
                part = self._last.get(first)[inside : inside + end - at]
                # The engine reads from the first entry to the last: a block is done at its end.
                if at + part.size == min((first + 1) * size, total):
                    self._last.forget(first)
            out[at - start : at - start + part.size] = part
            at += part.size

    def _read(self, first: int, last: int) -> np.ndarray:
        """The entries of some blocks, flat."""
        store = self._store
        if self.shape:
            rows = slice(first * self._height, min(last * self._height, self.shape[len(self._at)]))
            store = store[(*self._at, rows)]
        with _failing(f"read {self.source}: '{self.name}'"):
            return np.asarray(store.read().result(), self.dtype).reshape(-1)


def opened(
    root: Path, names: Mapping[str, str], driver: str | None = None, *, missing_is_zero: bool = True
) -> dict[str, Tensor]:
    """Opens arrays of one store, all at once.

    Args:
      root: The folder of the store.
      names: The name of each tensor, and the key of its array in the store.
      driver: How all arrays are stored, "zarr" or "zarr3".
      missing_is_zero: Whether chunks that are not there are full of the fill value. Otherwise
        reading them fails.

    Returns:
      The arrays by the names of the tensors.

    Raises:
      CheckpointError: If an array is missing or damaged.
    """
    import tensorstore as ts

    store = _store(root)
    # Nothing that was decoded is kept: the engine reads each entry once. The cache of an OCDBT
    # store holds the nodes of its tree, which all arrays share.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}, **_NODES})
    pending = {}
    for name, key in names.items():
        if any(part in ("", ".", "..") for part in key.split("/")):
            raise CheckpointError(f"{root}: '{key[:100]}' is no name of an array")
        spec = {
            "driver": driver,
            "kvstore": {**store, "path": f"{store.get('path', '')}{key}/"},
            "fill_missing_data_reads": missing_is_zero,
            "recheck_cached_metadata": False,
            "recheck_cached_data": False,
        }
        with _failing(f"read {root}: '{name}'"):
            pending[name] = ts.open(spec, context=context, read=True, open=True)
    tensors: dict[str, Tensor] = {}
    for name, future in pending.items():
        with _failing(f"read {root}: '{name}'"):
            array = future.result()
        tensors[name] = StoredArray(name, array, str(root), names[name])
    return tensors


_NODES = {"cache_pool#nodes": {"total_bytes_limit": 64 << 20}}


def _store(root: Path) -> dict[str, Any]:
    """TensorStore's description of the store in a folder."""
    base = {"driver": "file", "path": f"{root}/"}
    if (root / _MANIFEST).exists():
        return {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#nodes"}
    return base


def write(root: Path, arrays: Wanted, entries: Callable[[str, int, int], np.ndarray]) -> None:
    """Writes arrays into a new OCDBT store, in chunks of at most 32 MiB of rows.

    Nothing is flushed to the disk. Little of the arrays is held in memory: 64 MiB, and what they
    are packed into.

    Args:
      root: The folder of the store; there must be none yet.
      arrays: The dtype and shape of each array, by its key in the store.
      entries: Returns some entries of an array, flat: `entries(key, first, last + 1)`.

    Raises:
      CheckpointError: If the store cannot be written.
    """
    import tensorstore as ts

    base = {"driver": "file", "path": f"{root}/"}
    store = {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#nodes"}
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": False, **_NODES})
    batch = _Batch(_IN_FLIGHT)
    with _failing(f"write {root}"):
        for key, (dtype, shape) in arrays.items():
            axis, rows, width = _rows(shape)
            height = max(1, min(rows, _CHUNK // max(1, width * dtype.itemsize)))
            chunks = [1] * axis + [height] + [max(1, n) for n in shape[axis + 1 :]] if shape else []
            spec = {
                "driver": "zarr",
                "kvstore": {**store, "path": f"{key}/"},
                "metadata": {"compressor": {"id": "zstd", "level": 1}, "chunks": chunks},
                # A chunk that is missing is a fault to whoever reads it.
                "store_data_equal_to_fill_value": True,
            }
            target = ts.open(
                spec, context=context, transaction=batch.transaction, create=True,
                dtype=ts.dtype(dtype.name), shape=shape,
            ).result()  # fmt: skip
            for first in range(0, rows, height):
                last = min(first + height, rows)
                piece = entries(key, first * width, last * width)
                place = (*(0,) * axis, slice(first, last)) if shape else ...
                part = target[place]
                part.write(piece.reshape(part.shape)).result()
                if batch.wrote(piece.nbytes):
                    target = target.with_transaction(batch.transaction)
        batch.commit()


def _rows(shape: Shape) -> tuple[int, int, int]:
    """The axis that parts the entries of an array into rows, their number and their length.

    Axes of length 1 in front do not part them: the first other axis does.
    """
    axis = next((i for i, n in enumerate(shape) if n != 1), 0)
    return axis, shape[axis] if shape else 1, math.prod(shape[axis + 1 :])


def listed(root: Path) -> dict[str, tuple[str, str]]:
    """Lists the arrays of a store that has no description of its own.

    Args:
      root: The folder of the store.

    Returns:
      The key of each array in the store, with its driver, by path; in the order of the paths.

    Raises:
      CheckpointError: If the store is damaged.
    """
    import tensorstore as ts

    with _failing(f"read {root}"):
        store = ts.KvStore.open(_store(root), context=ts.Context(_NODES)).result()
        keys: Iterable[bytes] = store.list().result()
        found = {}
        for key in sorted(key.decode() for key in keys):
            above, _, last = key.rpartition("/")
            if above and last in _DRIVERS:
                found[above] = (above, _DRIVERS[last])
        return found


def in_one(root: Path) -> bool:
    """Tells whether a store keeps its arrays in files that they share.

    Args:
      root: The folder of the store.

    Returns:
      True for an OCDBT store; False where each array has a folder of its own.
    """
    return (root / _MANIFEST).exists()


def belongs(name: str) -> bool:
    """Tells whether a file or folder beside a manifest belongs to the OCDBT store.

    Args:
      name: The name of the file or folder.

    Returns:
      Whether it holds bytes of arrays.
    """
    return name in (_MANIFEST, "d") or name.startswith("ocdbt.process_")


def rewrite(
    source: Path,
    target: Path,
    arrays: Sequence[StoredArray],
    entries: Callable[[StoredArray, int, int], np.ndarray],
) -> None:
    """Gives some arrays of a copied store other values; the rest is copied as it is stored.

    Args:
      source: The folder of the store.
      target: The folder of the copy. Where each array has its own folder, it holds all of them
        already; otherwise nothing of the store.
      arrays: Those that get other values, as `opened` opened them.
      entries: Returns new entries of an array, flat: `entries(array, first, last + 1)`.

    Raises:
      CheckpointError: If the store cannot be read or written.
    """
    import tensorstore as ts

    # Like all files of an output, those of the copy are flushed when it is complete.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": False, **_NODES})
    keys = {array.key: array for array in arrays}
    place = {**_store(source), "base": {"driver": "file", "path": f"{target}/"}}
    batch = _Batch(_RUN)
    with _failing(f"write {target}"):
        if in_one(source):
            old = ts.KvStore.open(_store(source), context=context).result()
            new = ts.KvStore.open(place, context=context).result()
            for key in old.list().result():
                above, _, last = key.decode().rpartition("/")
                # An array's description stays; its chunks are written below.
                if last in _ABOUT or not _within(above, keys):
                    value = old.read(key).result().value
                    new.with_transaction(batch.transaction).write(key, value).result()
                    batch.wrote(len(value))
            batch.commit()
        else:
            place = _store(target)
        for key, array in keys.items():
            spec = {
                "driver": array.driver,
                "kvstore": {**place, "path": f"{place.get('path', '')}{key}/"},
                # Orbax may ask for chunks of zeros, too.
                "store_data_equal_to_fill_value": True,
            }
            store = ts.open(spec, context=context, write=True, open=True).result()
            for where, first, last in array.bands():
                piece = entries(array, first, last)
                part = store.with_transaction(batch.transaction)[where]
                part.write(piece.reshape(part.shape)).result()
                batch.wrote(piece.nbytes)
        batch.commit()


class _Batch:
    """Writes that share a commit: every commit of a store writes the tree of all keys anew.

    Attributes:
      transaction: What they belong to.
    """

    def __init__(self, most: int) -> None:
        """Begins.

        Args:
          most: After how many bytes there is a commit; they are held in memory until then.
        """
        import tensorstore as ts

        self._new, self._held, self._most = ts.Transaction, 0, most
        self.transaction: Any = ts.Transaction()

    def wrote(self, size: int) -> bool:
        """Counts bytes that were written; True if they were so many that all are committed now."""
        self._held += size
        many = self._held >= self._most
        if many:
            self.commit()
        return many

    def commit(self) -> None:
        """Commits what was written, and begins anew."""
        self.transaction.commit_sync()
        self.transaction, self._held = self._new(), 0


def _within(folder: str, keys: Mapping[str, Any]) -> bool:
    """Whether a folder of a store is one of some arrays, or lies within one."""
    parts = folder.split("/")
    return any("/".join(parts[:i]) in keys for i in range(1, len(parts) + 1))


@contextlib.contextmanager
def _failing(doing: str) -> Iterator[None]:
    """Turns any exception of TensorStore into a one-line `CheckpointError`.

    Their errors are of many types, and their messages have many lines.

    Args:
      doing: What is being done, as the message says it: "read folder: 'name'".

    Yields:
      Nothing.

    Raises:
      CheckpointError: If the body of the `with` statement raises an exception.
    """
    try:
        yield
    except disk.StoreError:
        raise
    except Exception as exc:
        why = " ".join(str(exc).split())[:300] or type(exc).__name__
        raise CheckpointError(f"cannot {doing}: {why}") from exc
