"""Reads zip archives whose members can be read in place: NumPy's .npz and PyTorch's .pt."""

import threading
import zipfile
from itertools import pairwise
from typing import IO, NamedTuple

import numpy as np

from sail_jax.checkpoint.formats.files import MAX_HEADER, CheckpointError, File, reading

# The number of bytes that are unpacked at once.
_BLOCK = 1 << 20
# An optional record after a member: a mark, then its checksum and sizes again.
_DESCRIPTOR = 24


class Member(NamedTuple):
    """One file in an archive.

    Attributes:
      archive: The archive, as the standard library opened it.
      name: The member's name.
      offset: The position of its first byte in the file of the archive, packed or not.
      size: Its size in bytes, unpacked.
      deflated: Whether it is packed (by deflate).
      comment: Its comment, as bytes.
    """

    archive: zipfile.ZipFile
    name: str
    offset: int
    size: int
    deflated: bool
    comment: bytes


class _Reader:
    """A `File` with the methods of a file object that `zipfile` requires."""

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
        # zipfile reads the directory at once, at whatever size the file claims.
        if count > MAX_HEADER:
            raise ValueError(f"its directory would have {count} bytes")
        data = self._file.bytes_at(self._at, count)
        self._at += count
        return data


def members(file: File) -> tuple[dict[str, Member], bytes]:
    """Reads the directory of an archive, and checks it against the bytes it describes.

    Args:
      file: The archive.

    Returns:
      The members by name, and the archive's comment.

    Raises:
      CheckpointError: If the archive is damaged or has bytes outside its members, or a member is
        encrypted, packed by anything but deflate, occurs twice, overlaps another, has an impossible
        size, or has another name in its local header.
    """
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
            # The header before a member: 30 bytes, then a name and an extra field. The 30 bytes end
            # with the lengths of both.
            local = file.bytes_at(info.header_offset, 30)
            if local[:4] != b"PK\3\4":
                raise ValueError(f"'{info.filename}' is not where the directory places it")
            skip = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
            offset = info.header_offset + 30 + skip
            if offset + info.compress_size > file.size:
                raise ValueError(f"'{info.filename}' ends beyond the file")
            deflated = info.compress_type == zipfile.ZIP_DEFLATED
            if not deflated and info.compress_size != info.file_size:
                raise ValueError(f"'{info.filename}' is stored with two sizes")
            # Deflate packs at most 1032 to 1. A larger claim is false, and may be meant to fill the
            # memory.
            if deflated and info.file_size > 1032 * info.compress_size + 64:
                raise ValueError(f"'{info.filename}' cannot unpack to {info.file_size} bytes")
            places.append((info.header_offset, offset + info.compress_size, info.filename))
            entries[info.filename] = Member(
                *(archive, info.filename, offset, info.file_size, deflated, info.comment)
            )
        # Overlapping members would allow a small archive to have large contents.
        places = [(0, 0, ""), *sorted(places), (archive.start_dir, 0, "")]
        for (_, end, name), (start, _, other) in pairwise(places):
            if end > start:
                what = f"'{other}'" if other else "its directory"
                raise ValueError(f"'{name}' and {what} lie in the same bytes")
            # The directory has no checksum. Without this check, lost entries would go unnoticed.
            if start - end > _DESCRIPTOR:
                raise ValueError(f"the bytes {end} to {start} belong to no member")
        # zipfile compares these names when it opens a member. Uncompressed members are read
        # without zipfile.
        for info in archive.infolist():
            spelt = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
            at = info.header_offset + 26
            named = int.from_bytes(file.bytes_at(at, 2), "little")
            if file.bytes_at(at + 4, named) != spelt:
                raise ValueError(f"'{info.filename}' has another name where its bytes lie")
    return entries, archive.comment


def inflate(file: File, member: Member, start: int = 0, count: int | None = None) -> np.ndarray:
    """Reads unpacked bytes of a member, without keeping the rest in memory."""
    return Views(file).read(member, start, count)


class Views:
    """Reads unpacked parts of members. A read continues the previous one where possible.

    So reading a member's parts in order unpacks the member once. Any number of threads may read.
    """

    def __init__(self, file: File) -> None:
        """Stores the archive, without reading it.

        Args:
          file: The archive.
        """
        self._file, self._lock = file, threading.Lock()
        self._kept: tuple[Member, IO[bytes], int] | None = None

    def read(self, member: Member, start: int = 0, count: int | None = None) -> np.ndarray:
        """Reads bytes of a member, as `inflate` does.

        Args:
          member: Which member.
          start: The first byte, counted in the unpacked member.
          count: The largest number of bytes; None for all that follow.

        Returns:
          The bytes.

        Raises:
          CheckpointError: If the member is damaged, or shorter than the directory states.
        """
        left = member.size - start
        count = left if count is None else min(count, left)
        if not member.deflated:
            return self._file.array_at(member.offset + start, count)
        out, end = np.empty(count, np.uint8), 0
        with reading(f"{self._file.path}: what '{member.name}' unpacks to"):
            stream, at = self._opened(member, start)
            while at < start and (block := stream.read(min(_BLOCK, start - at))):
                at += len(block)
            while end < count and (block := stream.read(min(_BLOCK, count - end))):
                out[end : end + len(block)] = np.frombuffer(block, np.uint8)
                end += len(block)
        if end < count:
            raise CheckpointError(
                f"{self._file.path}: '{member.name}' unpacks to {at + end} of {start + count} bytes"
            )
        with self._lock:
            self._kept = (member, stream, at + end)
        return out

    def _opened(self, member: Member, start: int) -> tuple[IO[bytes], int]:
        """Returns a separate stream of a member at or before a byte, and its position."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None and kept[0] is member and kept[2] <= start:
            return kept[1:]
        return member.archive.open(member.name), 0
