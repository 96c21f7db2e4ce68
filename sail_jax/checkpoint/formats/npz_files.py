"""NumPy's .npz: a zip archive of .npy members, no objects. Bfloat16 and the float8s, which the .npy
format spells as raw bytes, carry their type in the comment of their member."""

import io
import json
import math
import re
import zipfile
from collections.abc import Mapping
from contextlib import closing
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
from sail_jax.checkpoint.formats.layout import Layout, Wanted, staged
from sail_jax.checkpoint.formats.zips import Member, inflate, members
from sail_jax.merging.tensors import Tensor

__all__ = ["layout", "read_file"]

_HEADER = 1 << 16  # bytes of a .npy header that are read
_BLOCK = 1 << 20
_STAGE = "tensors"


def read_file(file: File) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of one archive, and what we wrote into its comment."""
    entries, comment = members(file)
    tensors: dict[str, Tensor] = {}
    for name, member in entries.items():
        if not name.endswith(".npy"):
            raise CheckpointError(f"{file.path}: '{name}' is not an array (.npy)")
        with reading(f"{file.path}: '{name}'"):
            key = name.removesuffix(".npy")
            tensors[key] = _tensor(key, file, member)
    metadata = strict_json(comment, file.path) if comment.startswith(b"{") else {}
    return tensors, {key: str(value) for key, value in metadata.items()}


def _tensor(name: str, file: File, member: Member) -> Tensor:
    head = io.BytesIO(inflate(file, member, 0, _HEADER).tobytes())
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
        flat = inflate(file, member, first).view(dtype)
        if swap:
            flat.byteswap(inplace=True)
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
    """A stage of all tensors, for one archive: a member has its checksum before its bytes."""
    comment = json.dumps(dict(metadata), separators=(",", ":")).encode() if metadata else b""
    if len(comment) > 0xFFFF:
        raise CheckpointError(f"{name}: metadata of {len(comment)} bytes does not fit an .npz")
    for key, (dtype, _) in tensors.items():
        if dtype not in DTYPES.values():
            raise CheckpointError(f"'{key}': .npz cannot hold {dtype}")
        if len(f"{key}.npy".encode()) > 0xFFFF:
            raise CheckpointError(f"'{key[:40]}...': the name is too long for an .npz")
    stage = staged(tensors, _STAGE)
    starts = {key: run.offset for key, [run] in stage.regions.items()}
    return stage._replace(convert=partial(_write, tensors, starts, comment))


def _write(
    tensors: Wanted, starts: Mapping[str, int], comment: bytes, folder: Path, out: Path
) -> None:
    """Members as they are, of 1 January 1980: the same bytes always."""
    with zipfile.ZipFile(out, "w") as archive, closing(File(folder / _STAGE)) as stage:
        archive.comment = comment
        for key, (dtype, shape) in tensors.items():
            member, kind = zipfile.ZipInfo(f"{key}.npy"), dtype
            if re.match(r"bfloat16|float8", dtype.name):
                member.comment, kind = dtype.name.encode(), np.dtype(f"V{dtype.itemsize}")
            descr = np.lib.format.dtype_to_descr(kind)
            head = {"descr": descr, "fortran_order": False, "shape": shape}
            first = starts[key]
            end = first + math.prod(shape) * dtype.itemsize
            with archive.open(member, "w", force_zip64=True) as file:
                np.lib.format.write_array_header_2_0(file, head)
                for at in range(first, end, _BLOCK):
                    file.write(stage.bytes_at(at, min(_BLOCK, end - at)))
