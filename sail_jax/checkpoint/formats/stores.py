"""Reads and writes arrays in a TensorStore, as orbax and Levanter do, in blocks.

Only this module imports TensorStore, and only for such a checkpoint.
"""

import contextlib
import math
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sail_jax import disk
from sail_jax.checkpoint.formats.files import DTYPES, CheckpointError, checked_shape
from sail_jax.checkpoint.formats.layout import Wanted
from sail_jax.merging.tensors import LastBlock, Shape, Tensor, check_read

# Small blocks are read together, up to this many bytes.
_RUN = 8 << 20
# The largest number of bytes of a written chunk, and of chunks written at once. TensorStore
# requires about five times the memory of a commit: for the given arrays, the encoded ones, and
# memory that the allocator keeps.
_CHUNK, _IN_FLIGHT = 4 << 20, 8 << 20
# Bytes of TensorStore itself, its threads and the tree of a store, as measured.
_ITSELF = 48 << 20
WRITING = _ITSELF + 5 * _IN_FLIGHT
"""Bytes held while arrays are written, at most."""
# The largest number of bytes of a node in the tree of a store. Each commit rewrites the nodes that
# it changes. With one node for all keys, the bytes written would grow with the square of the
# array's size.
_NODE = 1 << 16
# The largest size of a block, as a multiple of the size of its array. A larger block is an error or
# an attack.
_SLACK = 4
_MANIFEST = "manifest.ocdbt"
_DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}
"""The file that describes an array, and the driver that reads it."""
# The largest number of folders of a store that are searched, not counting folders of chunks.
_FOLDERS = 100_000
_ABOUT = (*_DRIVERS, ".zattrs", ".zgroup")


Index = tuple[int | slice, ...]
"""A place in an array."""


class _Blocks:
    """An array as a sequence of blocks of consecutive entries, each of which consists of whole
    chunks.

    The chunks in one row are a block: 32 chunks for an array `[4096, 4096]` in chunks
    `[128, 128]`. But rows of the first axis may be large, as in `[8, 14336, 4096]` in chunks
    `[1, 128, 4096]`. Then each row is a run of blocks, here of one chunk each.

    Attributes:
      size: The number of entries of a block, at least 1; the last block of a run may have fewer.
      run: The number of entries of a run.
    """

    def __init__(self, shape: Shape, chunk: Sequence[int], itemsize: int) -> None:
        """Finds the blocks.

        Args:
          shape: The shape of the array.
          chunk: The shape of a chunk.
          itemsize: Bytes of one entry.
        """
        axis = next((i for i, n in enumerate(shape) if n != 1), 0)
        below = [math.prod(shape[i + 1 :]) * itemsize for i in range(len(shape))]
        while axis + 1 < len(shape) and chunk[axis] == 1 and below[axis] > _RUN:
            axis += 1
        self._above, self._scalar = shape[:axis], not shape
        self._rows = shape[axis] if shape else 1
        self._height = max(1, min(chunk[axis], self._rows)) if shape else 1
        self._per_run = max(1, -(-self._rows // self._height))
        self.size = max(1, self._height * math.prod(shape[axis + 1 :]))
        self.run = self._rows * math.prod(shape[axis + 1 :])

    def at(self, entry: int) -> int:
        """Returns the number of the block that holds an entry."""
        run, inside = divmod(entry, self.run)
        return run * self._per_run + inside // self.size

    def span(self, first: int, end: int) -> tuple[int, int]:
        """Returns the first entry of some blocks of a run, and the index after their last entry."""
        run, number = divmod(first, self._per_run)
        end = min((number + end - first) * self.size, self.run)
        return run * self.run + number * self.size, run * self.run + end

    def place(self, first: int, end: int) -> Index:
        """Returns the index in the array of some blocks of a run."""
        if self._scalar:
            return ()
        run, number = divmod(first, self._per_run)
        end = min((number + end - first) * self._height, self._rows)
        return *map(int, np.unravel_index(run, self._above)), slice(number * self._height, end)

    def together(self, entries: int) -> Iterator[tuple[int, int]]:
        """Yields ranges of blocks of a run, of at most this many entries or one block each."""
        several = max(1, entries // self.size)
        for run in range(math.prod(self._above) if self.run else 0):
            last = (run + 1) * self._per_run
            for first in range(run * self._per_run, last, several):
                yield first, min(first + several, last)


class StoredArray:
    """An array that is stored in chunks, read in blocks of whole chunks.

    A block is a run of consecutive entries. If a read ends inside a block, the block is cached for
    the next read. It is a `sail_jax.merging.tensors.Tensor`.

    Attributes:
      name: The tensor's name in the checkpoint.
      dtype: The type of its entries.
      shape: Its shape.
      source: Where it lies, for messages.
      key: The key of the array in its store.
      block: The number of entries of a block. A read that starts at a block should take all of it.
      needs: The largest number of bytes in memory while it is read.
    """

    def __init__(self, name: str, store: Any, source: str, key: str) -> None:
        """Stores the description of an array, without reading it.

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
            raise CheckpointError(f"{what} has the unsupported dtype {kind}")
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
        self._blocks = _Blocks(self.shape, chunk, self.dtype.itemsize)
        self.block = self._blocks.size
        block = self.block * self.dtype.itemsize
        # Small blocks are read together, because each call of TensorStore is slow.
        self._most = max(1, _RUN // block)
        # TensorStore holds both the encoded and the decoded bytes.
        self.needs = 2 * max(stored, min(size, self._most * block))
        self._store = store
        self._last = LastBlock(lambda number: self._read(number, number + 1))

    @property
    def driver(self) -> str:
        """The format in which the array is stored, "zarr" or "zarr3"."""
        return self._store.spec().to_json()["driver"]

    def bands(self) -> Iterator[tuple[Index, int, int]]:
        """Divides the array into runs of whole chunks as they are written.

        Yields:
          The position of a run in the array, the index of its first entry, and the index after its
          last.
        """
        blocks = self._written()
        for part in blocks.together(_RUN // self.dtype.itemsize):
            yield blocks.place(*part), *blocks.span(*part)

    @property
    def band(self) -> int:
        """The largest number of bytes of a run of `bands`."""
        return max(_RUN, self._written().size * self.dtype.itemsize)

    def _written(self) -> _Blocks:
        """Returns the blocks of written chunks, each of which contains several read chunks."""
        return _Blocks(self.shape, self._store.chunk_layout.write_chunk.shape, self.dtype.itemsize)

    def read(self, out: np.ndarray, start: int = 0) -> None:
        """Reads consecutive entries, in row-major order.

        Args:
          out: The buffer to fill: flat, contiguous, of the array's dtype.
          start: Row-major index of the first entry to read.

        Raises:
          ValueError: If the buffer is invalid, or the array does not have all these entries.
          CheckpointError: If the entries cannot be read.
        """
        check_read(self, out, start)
        blocks, at, end = self._blocks, start, start + out.size
        while at < end:
            number = blocks.at(at)
            first, behind = blocks.span(number, number + 1)
            if at == first and behind <= end:
                # As many whole blocks of one run as requested.
                until = min(end, (at // blocks.run + 1) * blocks.run)
                last = blocks.at(until - 1)
                last += blocks.span(last, last + 1)[1] <= end
                part = self._read(number, min(last, number + self._most))
            else:
                part = self._last.get(number)[at - first : end - first]
                # The engine reads in order, so a block is no longer needed once its end has been
                # read.
                if at + part.size == behind:
                    self._last.forget(number)
            out[at - start : at - start + part.size] = part
            at += part.size

    def _read(self, first: int, end: int) -> np.ndarray:
        """Returns the entries of some blocks of one run, flat."""
        with _failing(f"read {self.source}: '{self.name}'"):
            part = self._store[self._blocks.place(first, end)]
            return np.asarray(part.read().result(), self.dtype).reshape(-1)


def opened(
    root: Path, names: Mapping[str, str], driver: str | None = None, *, missing_is_zero: bool = True
) -> dict[str, Tensor]:
    """Opens several arrays of one store at once.

    Args:
      root: The folder of the store.
      names: The name of each tensor, and the key of its array in the store.
      driver: How all arrays are stored, "zarr" or "zarr3".
      missing_is_zero: Whether missing chunks are filled with the fill value. Otherwise reading them
        fails.

    Returns:
      The arrays by the names of the tensors.

    Raises:
      CheckpointError: If an array is missing or damaged.
    """
    import tensorstore as ts

    store = _store(root)
    # Decoded chunks are not cached: the engine reads each entry once. The cache of an OCDBT store
    # contains the nodes of its tree, which all arrays share.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}, **_NODES})
    pending = {}
    for name, key in names.items():
        if any(part in ("", ".", "..") for part in key.split("/")):
            raise CheckpointError(f"{root}: '{key[:100]}' is not a valid name of an array")
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
    """Writes arrays into a new OCDBT store, in chunks of at most 4 MiB of consecutive entries.

    Nothing is flushed to disk. At most `WRITING` bytes are in memory.

    Args:
      root: The folder of the store, which must not exist yet.
      arrays: The dtype and shape of each array, by its key in the store.
      entries: Returns some entries of an array, flat: `entries(key, first, last + 1)`.

    Raises:
      CheckpointError: If the store cannot be written.
    """
    import tensorstore as ts

    base = {"driver": "file", "path": f"{root}/"}
    store = {
        "driver": "ocdbt",
        "base": base,
        "cache_pool": "cache_pool#nodes",
        "config": {"max_decoded_node_bytes": _NODE},
    }
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": False, **_NODES})
    batch = _Batch(_IN_FLIGHT)
    with _failing(f"write {root}"):
        for key, (dtype, shape) in arrays.items():
            chunks = _chunks(shape, dtype.itemsize)
            blocks = _Blocks(shape, chunks, dtype.itemsize)
            spec = {
                "driver": "zarr",
                "kvstore": {**store, "path": f"{key}/"},
                "metadata": {"compressor": {"id": "zstd", "level": 1}, "chunks": chunks},
                # Readers treat a missing chunk as an error.
                "store_data_equal_to_fill_value": True,
            }
            target = ts.open(
                spec, context=context, transaction=batch.transaction, create=True,
                dtype=ts.dtype(dtype.name), shape=shape,
            ).result()  # fmt: skip
            for some in blocks.together(_CHUNK // dtype.itemsize):
                piece = entries(key, *blocks.span(*some))
                part = target[blocks.place(*some)]
                part.write(piece.reshape(part.shape)).result()
                if batch.wrote(piece.nbytes):
                    target = target.with_transaction(batch.transaction)
        batch.commit()


def _chunks(shape: Shape, itemsize: int) -> list[int]:
    """Returns the shape of chunks of consecutive entries, of at most `_CHUNK` bytes each."""
    chunks, room = [1] * len(shape), max(1, _CHUNK // itemsize)
    for i in reversed(range(len(shape))):
        chunks[i] = max(1, min(shape[i], room))
        room //= chunks[i]
        if chunks[i] < shape[i]:
            break
    return chunks


def listed(root: Path) -> dict[str, str]:
    """Lists the arrays of a store without a description.

    Args:
      root: The folder of the store.

    Returns:
      The driver of each array, by its key in the store; in the order of the keys.

    Raises:
      CheckpointError: If the store is damaged, or has too many folders.
    """
    found = {}
    for key in sorted(_keys(root)):
        above, _, last = key.rpartition("/")
        if above and last in _DRIVERS:
            found[above] = _DRIVERS[last]
    return found


def _keys(root: Path) -> Iterator[str]:
    """Yields the keys of a store; in plain folders, the keys of its arrays' descriptions."""
    if in_one(root):
        import tensorstore as ts

        with _failing(f"read {root}"):
            store = ts.KvStore.open(_store(root), context=ts.Context(_NODES)).result()
            keys: Iterable[bytes] = store.list().result()
            yield from (key.decode() for key in keys)
        return
    # Any folder, even a home folder, may contain a similar description. Links are not followed.
    for seen, (folder, inside, files) in enumerate(os.walk(root)):
        if seen == _FOLDERS:
            raise CheckpointError(f"{root} has more than {_FOLDERS} folders; no checkpoint has")
        above = Path(folder).relative_to(root)
        yield from ((above / name).as_posix() for name in files if name in _DRIVERS)
        if any(name in _DRIVERS for name in files):
            # The chunks of zarr are in the folder itself, those of zarr3 below "c".
            inside[:] = [] if ".zarray" in files else [name for name in inside if name != "c"]


def in_one(root: Path) -> bool:
    """Checks whether a store keeps its arrays in shared files."""
    return (root / _MANIFEST).exists()


def belongs(name: str) -> bool:
    """Checks whether a file or folder next to a manifest belongs to the OCDBT store."""
    return name in (_MANIFEST, "d") or name.startswith("ocdbt.process_")


def rewrite(
    source: Path,
    target: Path,
    arrays: Sequence[StoredArray],
    entries: Callable[[StoredArray, int, int], np.ndarray],
) -> None:
    """Writes new values of some arrays to a copied store; the rest is copied as stored.

    Args:
      source: The folder of the store.
      target: The folder of the copy. If each array has its own folder, the copy already contains
        all of them; otherwise it contains nothing of the store.
      arrays: The arrays with new values, from `opened`.
      entries: Returns new entries of an array, flat: `entries(array, first, last + 1)`.

    Raises:
      CheckpointError: If the store cannot be read or written.
    """
    import tensorstore as ts

    # The copy's files are flushed when it is complete, like all files of an output.
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
                # The description of an array is kept; its chunks are written below.
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
                # Orbax may require chunks of zeros to be stored, too.
                "store_data_equal_to_fill_value": True,
            }
            store = ts.open(spec, context=context, write=True, open=True).result()
            for where, first, last in array.bands():
                piece = entries(array, first, last)
                part = store.with_transaction(batch.transaction)[where]
                part.write(piece.reshape(part.shape)).result()
                batch.wrote(piece.nbytes)
        batch.commit()


def rewriting(arrays: Iterable[StoredArray]) -> int:
    """Computes the largest number of bytes that `rewrite` keeps in memory."""
    # The other values are copied one at a time, and they are not larger than these chunks.
    return _ITSELF + 5 * max((_RUN, *(array.band for array in arrays)))


class _Batch:
    """A batch of writes with one commit, because every commit rewrites the tree of all keys.

    Attributes:
      transaction: The transaction of the writes.
    """

    def __init__(self, most: int) -> None:
        """Starts the first transaction.

        Args:
          most: The number of bytes after which a commit follows; until then they stay in memory.
        """
        import tensorstore as ts

        self._new, self._held, self._most = ts.Transaction, 0, most
        self.transaction: Any = ts.Transaction()

    def wrote(self, size: int) -> bool:
        """Counts written bytes, and commits if there are enough; returns whether it did."""
        self._held += size
        many = self._held >= self._most
        if many:
            self.commit()
        return many

    def commit(self) -> None:
        """Commits the writes and starts a new transaction."""
        self.transaction.commit_sync()
        self.transaction, self._held = self._new(), 0


def _within(folder: str, keys: Container[str]) -> bool:
    """Checks whether a folder of a store is an array's folder, or lies within one."""
    parts = folder.split("/")
    return any("/".join(parts[:i]) in keys for i in range(1, len(parts) + 1))


@contextlib.contextmanager
def _failing(doing: str) -> Iterator[None]:
    """Converts any exception of TensorStore to a one-line `CheckpointError`.

    These errors have many types, and their messages have many lines.

    Args:
      doing: The verb and object for the message, such as "read folder: 'name'".

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
