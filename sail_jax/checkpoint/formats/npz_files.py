"""Reads and writes NumPy's .npz: a zip archive with a .npy member for each array, without Python
objects.

The .npy format stores bfloat16 and the float8 types as raw bytes. For these types, the comment of
the member contains the name of the dtype.
"""

import io
import json
import math
import re
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

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

# The number of bytes of a .npy header that are read.
_HEADER = 1 << 16
# The number of bytes that are copied at once.
_BLOCK = 1 << 20
_STAGE = "tensors"


def read_file(file: File) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads the description of an .npz file; the entries of arrays stay in the file.

    Args:
      file: The archive.

    Returns:
      The tensors by name, and the metadata: the archive's comment, if it is a JSON object.

    Raises:
      CheckpointError: If the archive is damaged, or a member is not an array of numbers.
    """
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


def npy_header(file: io.BufferedIOBase) -> tuple[Any, bool, np.dtype]:
    """Reads the header of a .npy file, up to the first entry.

    Args:
      file: The file, at its beginning.

    Returns:
      The stated shape, whether entries are in column-major order, and the dtype.

    Raises:
      ValueError: If the header is damaged, or its version is unknown.
    """
    version = np.lib.format.read_magic(file)
    # Version 3 differs from 2 only in allowing field names beyond latin-1, and arrays of plain
    # numbers have no fields.
    if version not in _NPY:
        raise ValueError(f"a .npy of version {version} cannot hold plain numbers")
    return _NPY[version](file)


_NPY = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def _tensor(name: str, file: File, member: Member) -> Tensor:
    """Makes a tensor of a member."""
    head = io.BytesIO(inflate(file, member, 0, _HEADER).tobytes())
    shape, fortran, spelt = npy_header(head)
    dtype, first = _dtype(spelt, member.comment.decode()), head.tell()
    shape = checked_shape(shape, dtype.itemsize, f"{file.path}: '{name}'")
    # The size in the archive must equal the size of the array, so that neither of them can cause
    # too large an allocation.
    if first + math.prod(shape) * dtype.itemsize != member.size:
        raise ValueError(f"{dtype}{list(shape)} does not fill its {member.size} bytes")
    swap = spelt.byteorder == ">"
    # In column-major order the entries are one run only if there is a single axis.
    if not member.deflated and (not fortran or len(shape) < 2):
        run = (member.offset + first, member.size - first)
        return StoredTensor(name, dtype, shape, file, [run], swap)

    def load() -> np.ndarray:
        flat = inflate(file, member, first).view(dtype)
        if swap:
            flat.byteswap(inplace=True)
        return flat.reshape(shape, order="F" if fortran else "C")

    return LoadedTensor(name, dtype, shape, file.called, load)


def _dtype(spelt: np.dtype, comment: str) -> np.dtype:
    """Returns the dtype of a member's entries, from its .npy header and its comment."""
    if spelt.hasobject:
        raise ValueError("it holds Python objects, which are never unpickled")
    if spelt.kind == "V" and spelt.names is None and spelt.subdtype is None:
        # NumPy writes only bfloat16 as two raw bytes.
        name = comment or {2: "bfloat16"}.get(spelt.itemsize, "")
        if name in DTYPES and DTYPES[name].itemsize == spelt.itemsize:
            return DTYPES[name]
    elif spelt.name in DTYPES:
        return DTYPES[spelt.name]
    raise ValueError(f"it has the unsupported dtype {spelt}")


# Dtypes that are stored as raw bytes, with their names in comments.
_RAW = re.compile(r"bfloat16|float8")


def note(dtypes: Iterable[np.dtype]) -> str:
    """Describes what other programs cannot read in an archive.

    Args:
      dtypes: The dtypes of its tensors.

    Returns:
      A sentence; "" if NumPy reads all of them.

    >>> note([np.dtype(np.float32)])
    ''
    """
    raw = sorted({dtype.name for dtype in dtypes if _RAW.match(dtype.name)})
    said = (
        f"NumPy has no {' or '.join(raw)}: np.load returns raw bytes, load_checkpoint the numbers"
    )
    return said if raw else ""


def layout(
    tensors: Wanted, name: str, metadata: Mapping[str, str], shard_bytes: int | None
) -> Layout:
    """Lays out a stage with all tensors, from which the archive is written at the end.

    The archive cannot be written in any order, because a member's checksum precedes its bytes.

    Args:
      tensors: The dtype and shape of each tensor, by name.
      name: The name of the file, for messages.
      metadata: Text by key, stored as the archive's comment.
      shard_bytes: Not used: an .npz is one file.

    Returns:
      The layout of the stage, with the function that writes the archive from it.

    Raises:
      CheckpointError: If the metadata or a name is too long for a zip archive, or .npz does not
        support a dtype.
    """
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
    """Writes the archive from the stage, with uncompressed members dated 1 January 1980.

    With the fixed date, the default of `zipfile.ZipInfo`, equal tensors give equal bytes.
    """
    with zipfile.ZipFile(out, "w") as archive, closing(File(folder / _STAGE)) as stage:
        archive.comment = comment
        for key, (dtype, shape) in tensors.items():
            member, kind = zipfile.ZipInfo(f"{key}.npy"), dtype
            if _RAW.match(dtype.name):
                # The entries are stored as raw bytes, and the comment contains the dtype.
                member.comment, kind = dtype.name.encode(), np.dtype(f"V{dtype.itemsize}")
            descr = np.lib.format.dtype_to_descr(kind)
            head = {"descr": descr, "fortran_order": False, "shape": shape}
            first = starts[key]
            end = first + math.prod(shape) * dtype.itemsize
            with archive.open(member, "w", force_zip64=True) as file:
                np.lib.format.write_array_header_2_0(file, head)
                for at in range(first, end, _BLOCK):
                    file.write(stage.bytes_at(at, min(_BLOCK, end - at)))
