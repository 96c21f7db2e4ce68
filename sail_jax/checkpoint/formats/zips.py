"""Zip archives whose stored members are read in place: NumPy's .npz and PyTorch's .pt."""

import zipfile
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sail_jax.checkpoint.formats.files import MAX_HEADER, CheckpointError, File, reading

__all__ = ["Member", "inflate", "members"]

_BLOCK = 1 << 20


class Member(NamedTuple):
    """One file of an archive: where its bytes lie, packed or as they are."""

    archive: zipfile.ZipFile
    name: str
    offset: int
    size: int
    deflated: bool
    comment: bytes


class _Reader:
    """What zipfile needs of a file."""

    def __init__(self, file: File) -> None:
        self._file, self._at = file, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._file.size)[whence]
        if at < 0:
            raise ValueError("it points before its beginning")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._file.size - self._at)
        count = left if count is None or count < 0 else min(count, left)
        if count > MAX_HEADER:
            raise ValueError(f"its directory would have {count} bytes")
        data = self._file.bytes_at(self._at, count)
        self._at += count
        return data


def members(file: File) -> tuple[dict[str, Member], bytes]:
    """The members by name and the archive's comment; none may be encrypted, exotic or overlap."""
    entries: dict[str, Member] = {}
    places: list[tuple[int, int, str]] = []
    with reading(file.path):
        archive = zipfile.ZipFile(_Reader(file))  # type: ignore[arg-type]
        for info in archive.infolist():
            if info.flag_bits & 1:
                raise ValueError(f"'{info.filename}' is encrypted")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"'{info.filename}' is compressed by method {info.compress_type}")
            if info.filename in entries:
                raise ValueError(f"it holds '{info.filename}' twice")
            local = file.bytes_at(info.header_offset, 30)
            if local[:4] != b"PK\3\4":
                raise ValueError(f"'{info.filename}' is not where the directory says")
            skip = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
            offset = info.header_offset + 30 + skip
            if offset + info.compress_size > file.size:
                raise ValueError(f"'{info.filename}' ends beyond the file")
            deflated = info.compress_type == zipfile.ZIP_DEFLATED
            if not deflated and info.compress_size != info.file_size:
                raise ValueError(f"'{info.filename}' is stored with two sizes")
            # Deflate packs at most 1032 to 1: a larger claim is a lie, or a bomb.
            if deflated and info.file_size > 1032 * info.compress_size + 64:
                raise ValueError(f"'{info.filename}' cannot unpack to {info.file_size} bytes")
            places.append((info.header_offset, offset + info.compress_size, info.filename))
            entries[info.filename] = Member(
                *(archive, info.filename, offset, info.file_size, deflated, info.comment)
            )
        places.sort()
        for (_, end, name), (start, _, other) in pairwise([*places, (archive.start_dir, 0, "")]):
            if end > start:
                what = f"'{other}'" if other else "its directory"
                raise ValueError(f"'{name}' and {what} lie in the same bytes")
        for info in archive.infolist():
            spelt = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
            at = info.header_offset + 26
            named = int.from_bytes(file.bytes_at(at, 2), "little")
            if file.bytes_at(at + 4, named) != spelt:
                raise ValueError(f"'{info.filename}' has another name where its bytes lie")
    return entries, archive.comment


def inflate(file: File, member: Member, start: int = 0, count: int | None = None) -> np.ndarray:
    """The bytes of a member from `start` on, `count` of them if there are as many; nothing else
    of it is kept."""
    left = member.size - start
    count = left if count is None else min(count, left)
    if not member.deflated:
        return file.array_at(member.offset + start, count)
    out, end, skip = np.empty(count, np.uint8), 0, start
    unpacked = reading(f"{file.path}: what '{member.name}' unpacks to")
    with unpacked, member.archive.open(member.name) as stream:
        while skip and (block := stream.read(min(_BLOCK, skip))):
            skip -= len(block)
        while end < count and (block := stream.read(min(_BLOCK, count - end))):
            out[end : end + len(block)] = np.frombuffer(block, np.uint8)
            end += len(block)
    if end < count:
        raise CheckpointError(
            f"{file.path}: '{member.name}' unpacks to {start - skip + end} of {start + count} bytes"
        )
    return out
