"""The journal of an unfinished output: which of its tensors are complete.

A line is added when the bytes of a tensor have been written. Each line has its own checksum, and
digests of the tensor's bytes. A later run trusts a line only if the bytes still match the digests.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sail_jax import disk
from sail_jax.checkpoint.formats.files import CheckpointError, explained, reading, strict_json

_PAGE = 512  # integers of eight bytes


class Piece(NamedTuple):
    """A run of a tensor's entries that was written.

    Attributes:
      start: The index of the first entry.
      count: The number of entries.
      digest: The `digest` of their bytes.
    """

    start: int
    count: int
    digest: int


def digest(data: np.ndarray) -> int:
    """Computes a 64-bit checksum of bytes, about as fast as memory can be read.

    The sums of pages of 4 KiB (as 512 integers), weighted by odd numbers modulo 2^64, are combined
    with the CRC-32 of the bytes after the last whole page. Lost, swapped and accidentally changed
    pages are detected; deliberate changes may not be.

    Args:
      data: The bytes, uint8 of shape `(n,)`.

    Returns:
      The checksum, from 0 to 2^64 - 1.
    """
    count = data.size // (8 * _PAGE)
    pages = data[: count * 8 * _PAGE].view(np.uint64).reshape(count, _PAGE).sum(1)
    # Odd numbers have an inverse modulo 2^64, so a change of a single page's sum is always
    # detected. They differ, so swapped pages are detected, too.
    weights = np.arange(1, 2 * count, 2, dtype=np.uint64)
    # The size is the initial value of the CRC: zeros of another length have another digest.
    rest = zlib.crc32(data[count * 8 * _PAGE :].data, data.size & 0xFFFFFFFF)
    return (int((pages * weights).sum()) * 0x9E3779B97F4A7C15 + rest) % 2**64


def _line(record: Mapping[str, Any]) -> bytes:
    """Makes a line of the journal: the CRC-32 of a record, followed by the record as JSON."""
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _record(line: bytes) -> dict[str, Any] | None:
    """Returns the record in a line, or None if the line is incomplete or damaged."""
    mark, _, text = line.partition(b" ")
    try:
        if mark != b"%08x" % zlib.crc32(text):
            return None
        return strict_json(text, "line")
    except CheckpointError:
        return None


class Journal:
    """An append-only file of records, each on a line with its checksum.

    The first line is the header, which identifies the output.

    Attributes:
      path: The path of the file.
    """

    def __init__(
        self, path: Path, head: Mapping[str, Any], lines: Iterable[Mapping[str, Any]] = ()
    ):
        """Starts a new journal, replacing an earlier one.

        Args:
          path: The path of the file.
          head: The header.
          lines: Records of the earlier journal that are still valid.

        Raises:
          CheckpointError: If the file cannot be written.
        """
        self.path = path
        with explained("write", path):
            disk.write_atomic(path, b"".join(map(_line, (head, *lines))))
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)

    @staticmethod
    def read(path: Path) -> tuple[dict[str, Any], dict[str, list[Piece]], int | None]:
        """Reads a journal, ignoring incomplete or damaged lines.

        Args:
          path: The path of the file.

        Returns:
          The header; the pieces of each finished tensor, by name; and the inode number of the
          output that was about to be renamed, None if there was none.

        Raises:
          CheckpointError: If the header is damaged.
        """
        with reading(path):
            head, *rest = [_record(line) for line in path.read_bytes().split(b"\n")]
        if head is None or not isinstance(head.get("fingerprint"), str):
            raise CheckpointError(f"{path} is damaged; remove {path.parent} to start again")
        finished: dict[str, list[Piece]] = {}
        inode = None
        for record in filter(None, rest):
            match record:
                case {"name": str(name), "pieces": [*pieces]} if all(map(_is_piece, pieces)):
                    finished[name] = [Piece(*piece) for piece in pieces]
                case {"commit": int(inode)}:
                    pass
        return head, finished, inode

    def tensor(self, name: str, pieces: Iterable[Piece]) -> None:
        """Adds the record that a tensor is complete."""
        self._add({"name": name, "pieces": list(pieces)})

    def commit(self, inode: int) -> None:
        """Records that the output is about to be renamed, and flushes the journal to the disk.

        Args:
          inode: The inode number of the output, which identifies it in a later run.

        Raises:
          CheckpointError: If the file cannot be written.
        """
        self._add({"commit": inode})
        with explained("write", self.path, kept=True):
            os.fsync(self._fd)

    def _add(self, record: Mapping[str, Any]) -> None:
        line = _line(record)
        with explained("write", self.path, kept=True):
            # An incomplete line, for example after a full disk, must not be joined with the next
            # line.
            if os.write(self._fd, line) != len(line):
                os.write(self._fd, b"\n")
                raise CheckpointError(f"cannot write {self.path}: the disk is full")

    def close(self) -> None:
        """Closes the file; closing it again does nothing."""
        # The attribute is cleared first, because an interrupt may come before the next line.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _is_piece(piece: object) -> bool:
    """Checks whether a value from a record has the three numbers of a `Piece`."""
    return (
        isinstance(piece, list)
        and len(piece) == 3
        and all(type(n) is int and 0 <= n < 2**64 for n in piece)
    )


def gap(pieces: list[Piece], numel: int) -> str:
    """Finds the first gap or overlap between pieces of a tensor's entries.

    Args:
      pieces: The pieces, in order of their first entries.
      numel: The number of entries of the tensor.

    Returns:
      The first gap or overlap, for messages; "" if there is none.
    """
    end = 0
    for piece in pieces:
        if piece.start != end:
            return f"entries {min(end, piece.start)} to {max(end, piece.start)} of {numel}"
        end += piece.count
    return "" if end == numel else f"entries {min(end, numel)} to {max(end, numel)} of {numel}"
