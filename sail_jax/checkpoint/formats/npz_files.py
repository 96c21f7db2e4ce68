"""NumPy's .npz: a zip archive of .npy members, no objects. Bfloat16 and the float8s, which the .npy
format spells as raw bytes, carry their type in the comment of their member."""

import io
import json
import math
import re
import struct
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from sail_jax.checkpoint.formats.files import (
    DTYPES,
    CheckpointError,
    File,
    LoadedTensor,
    StoredTensor,
    checked_shape,
    reading,
    strict_json,
)
from sail_jax.checkpoint.formats.layout import Layout, Region, Wanted
from sail_jax.checkpoint.formats.zips import Member, inflate, members
from sail_jax.merging.tensors import Shape, Tensor

__all__ = ["layout", "read_file"]

_HEADER = 1 << 16  # bytes of a .npy header that are read


def read_file(file: File) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of one archive, and what we wrote into its comment."""
    found, comment = members(file)
    tensors: dict[str, Tensor] = {}
    for name, member in found.items():
        if not name.endswith(".npy"):
            raise CheckpointError(f"{file.path}: '{name}' is not an array (.npy)")
        with reading(f"{file.path}: '{name}'"):
            key = name.removesuffix(".npy")
            tensors[key] = _tensor(key, file, member)
    metadata = strict_json(comment, file.path) if comment.startswith(b"{") else {}
    return tensors, {key: str(value) for key, value in metadata.items()}


def _tensor(name: str, file: File, member: Member) -> Tensor:
    head = io.BytesIO(inflate(file, member, _HEADER).tobytes())
    version = np.lib.format.read_magic(head)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"a .npy of version {version} holds no plain numbers")
    if version == (1, 0):
        shape, fortran, spelt = np.lib.format.read_array_header_1_0(head)
    else:
        shape, fortran, spelt = np.lib.format.read_array_header_2_0(head)
    dtype, first = _dtype(spelt, member.comment.decode()), head.tell()
    shape = checked_shape(shape, dtype.itemsize, f"{file.path}: '{name}'")
    if first + math.prod(shape) * dtype.itemsize != member.size:
        raise ValueError(f"{dtype}{list(shape)} does not fill its {member.size} bytes")
    swap = spelt.byteorder == ">"
    if not member.deflated and (not fortran or len(shape) < 2):
        run = (member.offset + first, member.size - first)
        return StoredTensor(name, dtype, shape, file, [run], swap)

    def load() -> np.ndarray:
        flat = inflate(file, member)[first:].copy().view(dtype)
        flat = flat.byteswap() if swap else flat
        return flat.reshape(shape, order="F" if fortran else "C")

    return LoadedTensor(name, dtype, shape, str(file.path), load)


def _dtype(spelt: np.dtype, comment: str) -> np.dtype:
    if spelt.hasobject:
        raise ValueError("it holds Python objects, which are never unpickled")
    if spelt.kind == "V" and spelt.names is None and spelt.subdtype is None:
        # Two raw bytes is how NumPy writes bfloat16, and nothing else.
        name = comment or {2: "bfloat16"}.get(spelt.itemsize, "")
        if name in DTYPES and DTYPES[name].itemsize == spelt.itemsize:
            return DTYPES[name]
    elif spelt.name in DTYPES:
        return DTYPES[spelt.name]
    raise ValueError(f"entries of type {spelt} are not read")


def layout(
    tensors: Wanted, name: str, metadata: Mapping[str, str], shard_bytes: int | None
) -> Layout:
    """One archive of stored members, never several; their checksums are filled in by `seal`."""
    comment = json.dumps(dict(metadata), separators=(",", ":")).encode() if metadata else b""
    if len(comment) > 0xFFFF:
        raise CheckpointError(f"{name}: metadata of {len(comment)} bytes does not fit an .npz")
    regions, fixed, directory, end = {}, [], [], 0
    for key, (dtype, shape) in tensors.items():
        if dtype not in DTYPES.values():
            raise CheckpointError(f"'{key}': .npz cannot hold {dtype}")
        raw = re.match(r"bfloat16|float8", dtype.name) is not None
        head = _npy_header(np.dtype(f"V{dtype.itemsize}") if raw else dtype, shape)
        member, size = f"{key}.npy".encode(), math.prod(shape) * dtype.itemsize
        if len(member) > 0xFFFF:
            raise CheckpointError(f"'{key[:40]}...': the name is too long for an .npz")
        whole = len(head) + size
        local = _local(member, 0, whole)
        fixed.append((name, end, local + head))
        regions[key] = [Region(name, end + len(local) + len(head), size)]
        directory.append((member, end, whole, dtype.name.encode() if raw else b""))
        end += len(local) + whole
    tail = sum(len(_entry(member, 0, 0, about, 0)) for member, _, _, about in directory)
    ending = _ending(len(directory), tail, end, comment)
    fixed.append((name, end + tail, ending))
    sizes = {name: end + tail + len(ending)}
    return Layout(regions, fixed, sizes, partial(_seal, name, end, directory))


def _npy_header(dtype: np.dtype, shape: Shape) -> bytes:
    out = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    about = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(out, about)
    return out.getvalue()


# Version 4.5 throughout (zip64), in UTF-8, stored, of 1 January 1980: the same bytes always.
_COMMON = struct.pack("<HHHHH", 45, 0x800, 0, 0, 0x21)


def _local(member: bytes, crc: int, size: int) -> bytes:
    ends = struct.pack("<IIIHH", crc, 0xFFFFFFFF, 0xFFFFFFFF, len(member), 20)
    return b"PK\3\4" + _COMMON + ends + member + struct.pack("<HHQQ", 1, 16, size, size)


def _entry(member: bytes, at: int, size: int, comment: bytes, crc: int) -> bytes:
    ends = struct.pack("<III", crc, 0xFFFFFFFF, 0xFFFFFFFF)
    ends += struct.pack("<HHHHHII", len(member), 28, len(comment), 0, 0, 0, 0xFFFFFFFF)
    extra = struct.pack("<HHQQQ", 1, 24, size, size, at)
    return b"PK\1\2\x2d\0" + _COMMON + ends + member + extra + comment


def _ending(count: int, size: int, at: int, comment: bytes) -> bytes:
    big = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, size, at)
    where = b"PK\6\7" + struct.pack("<IQI", 0, at + size, 1)
    rest = struct.pack("<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, len(comment))
    return big + where + b"PK\5\6" + rest + comment


def _seal(
    name: str, end: int, directory: list[tuple[bytes, int, int, bytes]], folder: Path
) -> None:
    """Writes the checksum of each member before it and into the directory."""
    block = memoryview(bytearray(1 << 20))
    with open(folder / name, "r+b", buffering=0) as file:
        entries = b""
        for member, at, size, comment in directory:
            file.seek(at + len(_local(member, 0, 0)))
            crc, left = 0, size
            while left:
                got = file.readinto(block[: min(left, len(block))])
                if not got:
                    raise CheckpointError(f"{folder / name} ended while it was being sealed")
                crc, left = zlib.crc32(block[:got], crc), left - got
            file.seek(at)
            file.write(_local(member, crc, size))
            entries += _entry(member, at, size, comment, crc)
        file.seek(end)
        file.write(entries)
