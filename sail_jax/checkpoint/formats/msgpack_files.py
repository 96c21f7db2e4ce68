"""Flax's msgpack serialisation (`flax.serialization`), read in place and written in any order.

An array is an extension of type 1 that contains (shape, dtype, bytes); above 2^30 bytes it is split
into chunks. The keys above an array are joined by "/". The msgpack library writes the bytes between
arrays, but cannot read them: it copies each array into memory and does not report its position in
the file.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import msgpack
import numpy as np

from sail_jax.checkpoint.formats.files import (
    DTYPES,
    MAX_HEADER,
    CheckpointError,
    File,
    LoadedTensor,
    StoredTensor,
    checked_shape,
    reading,
)
from sail_jax.checkpoint.formats.layout import Layout, Region, Wanted
from sail_jax.checkpoint.formats.nesting import joined, nested
from sail_jax.merging.tensors import Shape, Tensor

# The largest number of bytes of an array that Flax stores in one piece.
CHUNK = 2**30
_CHUNKED = "__msgpack_chunked_array__"
# The type of an extension that contains a Python complex number. NumPy's types are 1 and 3.
_COMPLEX = 2
# The deepest nesting, far below Python's limit on recursion.
_DEPTH = 100
# The number of bytes that are read from the file at once.
_WINDOW = 1 << 16
# The largest number of keys, arrays and other values in a file. Reading this many takes seconds.
_VALUES = 1 << 20
# The largest number of plain numbers in a file.
_NUMBERS = 1 << 16
# The largest number of values inside an extension, which contains the shape, dtype and bytes of an
# array.
_OF_ARRAY = 100


class _Blob(NamedTuple):
    """Bytes that remain in the file: raw bytes (kind None), or an extension of this kind."""

    kind: int | None
    offset: int
    length: int


class _Array(NamedTuple):
    """An array in the file, with its runs of bytes as (offset, length)."""

    dtype: np.dtype
    shape: Shape
    runs: list[tuple[int, int]]


class _Scan:
    """A parser of the structure of msgpack that skips the bytes of arrays.

    It reads at most `values` values, so the time to parse a file is bounded. It also reads at most
    `MAX_HEADER` bytes of text, because it keeps text in memory.
    """

    def __init__(self, file: File, at: int, end: int, values: int) -> None:
        self.file, self.at, self.end, self.values = file, at, end, values
        self._window, self._first, self._text = b"", 0, MAX_HEADER

    def take(self, count: int) -> bytes:
        """Returns the next bytes, from a window of the file."""
        start = self.at - self._first
        if count < 0 or self.at + count > self.end:
            raise ValueError(f"it ends within a value, at byte {self.at}")
        # One system call per byte would dominate the time. The structure is small, so one window
        # usually contains the next values. The bytes of arrays are skipped.
        if not (self._window and start >= 0 and start + count <= len(self._window)):
            size = max(count, min(_WINDOW, self.end - self.at))
            self._window, self._first, start = self.file.bytes_at(self.at, size), self.at, 0
        self.at += count
        return self._window[start : start + count]

    def uint(self, size: int) -> int:
        """Returns the next bytes as an unsigned integer."""
        return int.from_bytes(self.take(size), "big")

    def blob(self, length: int, kind: int | None = None) -> _Blob:
        """Skips bytes and records their position."""
        blob = _Blob(kind, self.at, length)
        if self.at + length > self.end:
            raise ValueError(f"it ends within the {length} bytes from {self.at} on")
        self.at += length
        return blob

    def text(self, length: int) -> str:
        self._text -= length
        if self._text < 0:
            raise ValueError(f"it has more than {MAX_HEADER} bytes of text")
        return self.take(length).decode()

    def value(self, depth: int = 0) -> object:
        """Parses the next value, whose first byte determines its kind."""
        if depth > _DEPTH:
            raise ValueError(f"it is nested more than {_DEPTH} deep")
        self.values -= 1
        if self.values < 0:
            raise ValueError(f"it has more than {_VALUES} keys and values")
        code = self.take(1)[0]
        # The last bits of a code contain the length of the value, or the number of bytes of its
        # length or value: hence 1 << (code - first).
        match code:
            case _ if code < 0x80:
                return code
            case _ if code < 0x90:
                return self._map(code & 15, depth)
            case _ if code < 0xA0:
                return self._list(code & 15, depth)
            case _ if code < 0xC0:
                return self.text(code & 31)
            case 0xC0:
                return None
            case 0xC2 | 0xC3:
                return code == 0xC3
            case 0xC4 | 0xC5 | 0xC6:
                return self.blob(self.uint(1 << (code - 0xC4)))
            case 0xC7 | 0xC8 | 0xC9:
                length = self.uint(1 << (code - 0xC7))
                return self.blob(length, self.uint(1))
            case 0xCA:
                return struct.unpack(">f", self.take(4))[0]
            case 0xCB:
                return struct.unpack(">d", self.take(8))[0]
            case 0xCC | 0xCD | 0xCE | 0xCF:
                return self.uint(1 << (code - 0xCC))
            case 0xD0 | 0xD1 | 0xD2 | 0xD3:
                return int.from_bytes(self.take(1 << (code - 0xD0)), "big", signed=True)
            case 0xD4 | 0xD5 | 0xD6 | 0xD7 | 0xD8:
                kind = self.uint(1)
                return self.blob(1 << (code - 0xD4), kind)
            case 0xD9 | 0xDA | 0xDB:
                return self.text(self.uint(1 << (code - 0xD9)))
            case 0xDC | 0xDD:
                return self._list(self.uint(2 << (code - 0xDC)), depth)
            case 0xDE | 0xDF:
                return self._map(self.uint(2 << (code - 0xDE)), depth)
            case _ if code >= 0xE0:
                return code - 256
        raise ValueError(f"byte {self.at - 1} is {code:#x}, which msgpack never uses")

    def _list(self, count: int, depth: int) -> list[object]:
        return [self.value(depth + 1) for _ in range(count)]

    def _map(self, count: int, depth: int) -> dict[str, object]:
        mapping = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, str | int):
                raise ValueError(f"a key is a {type(key).__name__}, not text")
            # Flax writes lists as dictionaries with the keys "0", "1" and so on; as text, 0 and "0"
            # are equal.
            if str(key) in mapping:
                raise ValueError(f"the key {str(key)!r} is repeated")
            mapping[str(key)] = self.value(depth + 1)
        return mapping


def read_file(file: File) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads the structure of a Flax file; the bytes of arrays stay in the file.

    Args:
      file: The file.

    Returns:
      The arrays and numbers by path, and empty metadata. Text, bytes and None are left out.

    Raises:
      CheckpointError: If the file is damaged, does not contain a dictionary, is nested more than
        100 deep, or contains an array of unknown dtype. Also if it has more than 2^20 keys and
        values (an array counts as one), 2^16 plain numbers or 10^8 bytes of text.
    """
    with reading(file.path):
        scan = _Scan(file, 0, file.size, _VALUES)
        tree = scan.value()
        if scan.at != file.size:
            raise ValueError(f"{file.size - scan.at} bytes follow its end")
        if not isinstance(tree, dict):
            raise ValueError("expected a dictionary of arrays")
        tensors: dict[str, Tensor] = {}
        numbers = 0
        for name, value in _leaves(file, tree, ""):
            if name in tensors:
                raise ValueError(f"the path '{name}' is repeated")
            if isinstance(value, _Array):
                tensors[name] = StoredTensor(name, value.dtype, value.shape, file, value.runs)
                continue
            # A number is one byte in the file, and hundreds of bytes as a tensor.
            numbers += 1
            if numbers > _NUMBERS:
                raise ValueError(f"it has more than {_NUMBERS} plain numbers")
            load = partial(np.copy, value)
            tensors[name] = LoadedTensor(name, value.dtype, (), file.called, load)
    return tensors, {}


def _leaves(
    file: File, node: object, at: str, listed: bool = False
) -> Iterator[tuple[str, _Array | np.ndarray]]:
    """Yields the arrays and the numbers in a tree with their paths.

    Chunks in a list (`listed`) are separate arrays: Flax neither splits nor joins arrays there.
    """
    # Python numbers, such as the step of a training state.
    if isinstance(node, bool | float):
        yield at, np.asarray(node)
    elif isinstance(node, int):
        yield at, np.asarray(node, np.int64 if node < 2**63 else np.uint64)
    elif isinstance(node, _Blob) and node.kind == _COMPLEX:
        match _Scan(file, node.offset, node.offset + node.length, _OF_ARRAY).value():
            case [float(real), float(imaginary)]:
                yield at, np.asarray(complex(real, imaginary))
            # It is refused instead of ignored, because it may be a damaged array.
            case _:
                raise ValueError(f"'{at}' is not a complex number as flax writes it")
    elif isinstance(node, _Blob) and node.kind is not None:
        yield at, _array(file, node, at)
    # A chunked array is a dictionary of its shape and of flat chunks (arrays with one axis).
    elif isinstance(node, dict) and _CHUNKED in node and not listed:
        parts = [_array(file, blob, at) for blob in _ordered(node.get("chunks"))]
        shape = tuple(_ordered(node.get("shape")))
        if len({part.dtype for part in parts}) != 1:
            raise ValueError(f"the chunks of '{at}' are missing or differ in type")
        dtype = parts[0].dtype
        shape = checked_shape(shape, dtype.itemsize, f"{file.path}: '{at}'")
        yield at, _Array(dtype, shape, [run for part in parts for run in part.runs])
    elif isinstance(node, dict | list):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in items:
            inside = listed or isinstance(node, list)
            yield from _leaves(file, child, joined(at, "/", key), inside)


def _ordered(node: object) -> list[object]:
    """Converts a dictionary with the keys "0", "1", ... to the list that it stands for."""
    if not isinstance(node, dict):
        raise ValueError("the chunks or the shape of a chunked array are missing")
    return [node[str(i)] for i in range(len(node))]


def _array(file: File, blob: object, at: str) -> _Array:
    """Checks an extension that contains an array or a chunk."""
    if not isinstance(blob, _Blob) or blob.kind not in (1, 3):
        raise ValueError(f"'{at}' is not an array, or a chunk of one, as flax writes them")
    scan = _Scan(file, blob.offset, blob.offset + blob.length, _OF_ARRAY)
    match scan.value():
        case [list(shape), str(name), _Blob(None, offset, length)] if scan.at == scan.end:
            pass
        case _:
            raise ValueError(f"'{at}' is not (shape, dtype, bytes)")
    if name not in DTYPES:
        raise ValueError(f"'{at}' has the unsupported dtype {name[:40]!r}")
    dtype = DTYPES[name]
    shape = checked_shape(shape, dtype.itemsize, f"{file.path}: '{at}'")
    if math.prod(shape) * dtype.itemsize != length:
        raise ValueError(f"'{at}' has {length} bytes, but {name}{shape} needs another number")
    return _Array(dtype, shape, [(offset, length)])


def layout(
    tensors: Wanted, name: str, metadata: Mapping[str, str], shard_bytes: int | None
) -> Layout:
    """Lays out one file, with the bytes that `flax.serialization.msgpack_serialize` would write.

    Args:
      tensors: The dtype and shape of each tensor, by path.
      name: The name of the file.
      metadata: Must be empty, because the format cannot store it.
      shard_bytes: Not used: there is always one file.

    Returns:
      The layout of the output itself.

    Raises:
      CheckpointError: If there is metadata, the paths do not form a tree, or the format does not
        support a dtype.
    """
    if metadata:
        raise CheckpointError("msgpack cannot store metadata")
    regions: dict[str, list[Region]] = {key: [] for key in tensors}
    fixed, end = [], 0
    for piece in _pack(nested(tensors), tensors):
        if isinstance(piece, bytes):
            fixed.append((name, end, piece))
            end += len(piece)
        else:
            key, size = piece
            regions[key].append(Region(name, end, size))
            end += size
    return Layout(regions, fixed, {name: end})


_Pieces = Iterable[bytes | tuple[str, int]]


def _pack(node: Any, tensors: Wanted) -> _Pieces:
    """Yields a tree's bytes in order; a (path, size) pair stands for the bytes of a tensor."""
    if isinstance(node, dict):
        yield _map_head(len(node))
        for key, child in node.items():
            yield _packed(key)
            yield from _pack(child, tensors)
        return
    dtype, shape = tensors[node]
    if DTYPES.get(dtype.name) != dtype:
        raise CheckpointError(f"'{node}': flax's msgpack cannot hold {dtype}")
    size = math.prod(shape) * dtype.itemsize
    if size <= CHUNK:
        yield from _pack_array(node, dtype, shape)
        return
    # As in flax, a chunk contains as many whole entries as fit.
    step = max(1, CHUNK // dtype.itemsize)
    numel = math.prod(shape)
    sizes = [min(step, numel - start) for start in range(0, numel, step)]
    lengths = {str(i): n for i, n in enumerate(shape)}
    yield _map_head(3) + b"".join(map(_packed, (_CHUNKED, True, "shape", lengths, "chunks")))
    yield _map_head(len(sizes))
    for i, count in enumerate(sizes):
        yield _packed(str(i))
        yield from _pack_array(node, dtype, (count,))


def _pack_array(name: str, dtype: np.dtype, shape: Shape) -> _Pieces:
    """Yields the start of an array's extension, and the (path, size) pair of its bytes."""
    size = math.prod(shape) * dtype.itemsize
    # 0x93 begins a list of three: shape, name of the dtype, bytes.
    head = b"\x93" + _packed(shape) + _packed(dtype.name)
    head += _length(size, (0xC4, 0xC5, 0xC6))
    total = len(head) + size
    # Extensions of these lengths have their own codes. msgpack uses the shortest code, which makes
    # the file byte for byte equal to flax's.
    fixext = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}
    start = bytes([fixext[total]]) if total in fixext else _length(total, (0xC7, 0xC8, 0xC9))
    yield start + b"\x01" + head
    yield name, size


def _packed(value: object) -> bytes:
    """Packs a value with the msgpack library."""
    return cast(bytes, msgpack.packb(value))


def _map_head(count: int) -> bytes:
    """Packs the start of a map with this many keys."""
    return cast(bytes, msgpack.Packer().pack_map_header(count))


def _length(count: int, codes: tuple[int, int, int]) -> bytes:
    """Packs the start of raw bytes or an extension of this length.

    The msgpack library packs these only together with the bytes, which are written separately.
    """
    i = 0 if count < 1 << 8 else 1 if count < 1 << 16 else 2
    return bytes([codes[i]]) + count.to_bytes(1 << i, "big")
