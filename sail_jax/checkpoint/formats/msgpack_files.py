"""Flax's msgpack serialisation (`flax.serialization`), read in place.

Arrays are extensions of type 1 that hold (shape, dtype, bytes), those above 2^30 bytes in chunks;
the keys above them are joined by "/". The library writes what is between arrays; it cannot read it,
since it hands out every array as bytes in memory, and never says where in the file they lie.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import msgpack
import numpy as np

from sail_jax.checkpoint.formats.files import (
    DTYPES,
    CheckpointError,
    File,
    StoredTensor,
    checked_shape,
    reading,
)
from sail_jax.checkpoint.formats.layout import Layout, Region, Wanted
from sail_jax.checkpoint.formats.trees import joined, nested
from sail_jax.merging.tensors import Shape, Tensor

__all__ = ["layout", "read_file"]

CHUNK = 2**30  # bytes of an array that flax keeps in one piece
_CHUNKED = "__msgpack_chunked_array__"
_COMPLEX = 2  # the type of extensions that are Python's complex numbers; 1 and 3 are NumPy's
_DEPTH = 100
_WINDOW = 1 << 16
_VALUES = 1 << 20  # keys, arrays and other values of a file: some seconds
_OF_ARRAY = 100  # its shape, type and bytes


class _Blob(NamedTuple):
    """Bytes that stay in the file: raw (kind None) or an extension of that kind."""

    kind: int | None
    offset: int
    length: int


class _Array(NamedTuple):
    dtype: np.dtype
    shape: Shape
    runs: list[tuple[int, int]]


class _Scan:
    """Reads msgpack's structure, of at most so many values, and steps over its bytes."""

    def __init__(self, file: File, at: int, end: int, values: int) -> None:
        self.file, self.at, self.end, self.values = file, at, end, values
        self._window, self._first = b"", 0

    def take(self, count: int) -> bytes:
        start = self.at - self._first
        if count < 0 or self.at + count > self.end:
            raise ValueError(f"it ends within a value, at byte {self.at}")
        if not (self._window and start >= 0 and start + count <= len(self._window)):
            size = max(count, min(_WINDOW, self.end - self.at))
            self._window, self._first, start = self.file.bytes_at(self.at, size), self.at, 0
        self.at += count
        return self._window[start : start + count]

    def uint(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def blob(self, length: int, kind: int | None = None) -> _Blob:
        blob = _Blob(kind, self.at, length)
        if self.at + length > self.end:
            raise ValueError(f"it ends within the {length} bytes from {self.at} on")
        self.at += length
        return blob

    def text(self, length: int) -> str:
        return self.take(length).decode()

    def value(self, depth: int = 0) -> Any:
        if depth > _DEPTH:
            raise ValueError(f"it is nested more than {_DEPTH} deep")
        self.values -= 1
        if self.values < 0:
            raise ValueError("it has too many values that are no arrays")
        code = self.take(1)[0]
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

    def _list(self, count: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(count)]

    def _map(self, count: int, depth: int) -> dict[str, Any]:
        mapping = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, str | int):
                raise ValueError(f"a key is a {type(key).__name__}, not text")
            if str(key) in mapping:
                raise ValueError(f"the key {str(key)!r} is repeated")
            mapping[str(key)] = self.value(depth + 1)
        return mapping


def read_file(file: File) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The arrays of one file by path; what is not an array is left out."""
    with reading(file.path):
        scan = _Scan(file, 0, file.size, _VALUES)
        tree = scan.value()
        if scan.at != file.size:
            raise ValueError(f"{file.size - scan.at} bytes follow its end")
        if not isinstance(tree, dict):
            raise ValueError("expected a dictionary of arrays")
        tensors: dict[str, Tensor] = {}
        for name, array in _arrays(file, tree, ""):
            if name in tensors:
                raise ValueError(f"the path '{name}' is repeated")
            tensors[name] = StoredTensor(name, array.dtype, array.shape, file, array.runs)
    return tensors, {}


def _arrays(file: File, node: Any, at: str) -> Iterator[tuple[str, _Array]]:
    if isinstance(node, _Blob) and node.kind == _COMPLEX:
        match _Scan(file, node.offset, node.offset + node.length, _OF_ARRAY).value():
            case [float(), float()]:
                pass
            case _:  # it might have been an array
                raise ValueError(f"'{at}' is not a complex number as flax writes it")
    elif isinstance(node, _Blob) and node.kind is not None:
        yield at, _array(file, node, at)
    elif isinstance(node, dict) and _CHUNKED in node:
        parts = [_array(file, blob, at) for blob in _ordered(node.get("chunks"))]
        shape = tuple(_ordered(node.get("shape")))
        if len({part.dtype for part in parts}) != 1:
            raise ValueError(f"'{at}' has no chunks of one type")
        dtype = parts[0].dtype
        shape = checked_shape(shape, dtype.itemsize, f"{file.path}: '{at}'")
        yield at, _Array(dtype, shape, [run for part in parts for run in part.runs])
    elif isinstance(node, dict | list):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in items:
            yield from _arrays(file, child, joined(at, "/", key))


def _ordered(node: Any) -> list[Any]:
    """A dictionary from "0", "1", ... as the list it stands for."""
    if not isinstance(node, dict):
        raise ValueError("a chunked array has no chunks or no shape")
    return [node[str(i)] for i in range(len(node))]


def _array(file: File, blob: Any, at: str) -> _Array:
    if not isinstance(blob, _Blob) or blob.kind not in (1, 3):
        raise ValueError(f"'{at}' is not an array, or a chunk of one, as flax writes them")
    scan = _Scan(file, blob.offset, blob.offset + blob.length, _OF_ARRAY)
    match scan.value():
        case [list(shape), str(name), _Blob(None, offset, length)] if scan.at == scan.end:
            pass
        case _:
            raise ValueError(f"'{at}' is not (shape, dtype, bytes)")
    if name not in DTYPES:
        raise ValueError(f"'{at}' has the type {name[:40]!r}, which is not read")
    dtype = DTYPES[name]
    shape = checked_shape(shape, dtype.itemsize, f"{file.path}: '{at}'")
    if math.prod(shape) * dtype.itemsize != length:
        raise ValueError(f"'{at}' has {length} bytes, {name}{shape} needs another number")
    return _Array(dtype, shape, [(offset, length)])


def layout(
    tensors: Wanted, name: str, metadata: Mapping[str, str], shard_bytes: int | None
) -> Layout:
    """One file, never several, byte for byte what `flax.serialization.msgpack_serialize` gives
    (in_place=True)."""
    if metadata:
        raise CheckpointError("msgpack has no place for metadata")
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
    size = math.prod(shape) * dtype.itemsize
    head = b"\x93" + _packed(shape) + _packed(dtype.name)
    head += _length(size, (0xC4, 0xC5, 0xC6))
    total = len(head) + size
    fixext = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}
    start = bytes([fixext[total]]) if total in fixext else _length(total, (0xC7, 0xC8, 0xC9))
    yield start + b"\x01" + head
    yield name, size


def _packed(value: Any) -> bytes:
    return cast(bytes, msgpack.packb(value))


def _map_head(count: int) -> bytes:
    return cast(bytes, msgpack.Packer().pack_map_header(count))


def _length(count: int, codes: tuple[int, int, int]) -> bytes:
    """The start of bytes that are written apart: msgpack's packer wants them in hand."""
    i = 0 if count < 1 << 8 else 1 if count < 1 << 16 else 2
    return bytes([codes[i]]) + count.to_bytes(1 << i, "big")
