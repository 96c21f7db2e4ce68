"""Which tensors of an unfinished output are whole: lines added after their bytes were written, each
with its checksum, and believed only if the bytes still have theirs."""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sail_jax import disk
from sail_jax.checkpoint.formats.files import CheckpointError, explained, reading, strict_json

__all__ = ["Journal", "Piece", "digest", "gap"]

_PAGE = 512  # words of eight bytes


class Piece(NamedTuple):
    """A run of a tensor's entries, and the digest of their bytes."""

    start: int
    count: int
    digest: int


def digest(data: np.ndarray) -> int:
    """A checksum of bytes at the speed of memory: the sums of their pages of 4 KiB, weighted by odd
    numbers modulo 2^64, with the CRC-32 of what follows the last whole page.

    It tells pages that were lost, swapped or changed by accident; it is no defence against intent.
    """
    count = data.size // (8 * _PAGE)
    pages = data[: count * 8 * _PAGE].view(np.uint64).reshape(count, _PAGE).sum(1)
    weights = np.arange(1, 2 * count, 2, dtype=np.uint64)
    rest = zlib.crc32(data[count * 8 * _PAGE :].data, data.size & 0xFFFFFFFF)
    return (int((pages * weights).sum()) * 0x9E3779B97F4A7C15 + rest) % 2**64


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _record(line: bytes) -> dict[str, Any] | None:
    """What a line says; None if it is torn or damaged."""
    mark, _, text = line.partition(b" ")
    try:
        if mark != b"%08x" % zlib.crc32(text):
            return None
        return strict_json(text, "line")
    except CheckpointError:
        return None


class Journal:
    """An append-only file of such lines; the first says whose output this is."""

    def __init__(
        self, path: Path, head: Mapping[str, Any], lines: Iterable[Mapping[str, Any]] = ()
    ):
        """Starts it anew, whole, with what is still believed of an earlier one."""
        disk.write_atomic(path, b"".join(map(_line, (head, *lines))))
        self.path = path
        with explained("write", path):
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    @staticmethod
    def read(path: Path) -> tuple[dict[str, Any], dict[str, list[Piece]], int | None]:
        """The first line, the pieces of each finished tensor, and the inode about to be committed.

        `CheckpointError` if the first line is damaged; other damaged lines are as if never written.
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
        self._add({"name": name, "pieces": list(pieces)})

    def commit(self, inode: int) -> None:
        self._add({"commit": inode})
        with explained("write", self.path):
            os.fsync(self._fd)

    def _add(self, record: Mapping[str, Any]) -> None:
        line = _line(record)
        with explained("write", self.path):
            # A line that is cut short, by a full disk say, must not swallow the next.
            if os.write(self._fd, line) != len(line):
                os.write(self._fd, b"\n")
                raise CheckpointError(f"cannot write {self.path}: the disk is full")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _is_piece(piece: Any) -> bool:
    return (
        isinstance(piece, list)
        and len(piece) == 3
        and all(type(n) is int and 0 <= n < 2**64 for n in piece)
    )


def gap(pieces: list[Piece], numel: int) -> str:
    """Where the pieces, in order, fail to cover the entries exactly once; "" if nowhere."""
    end = 0
    for piece in pieces:
        if piece.start != end:
            return f"entries {min(end, piece.start)} to {max(end, piece.start)} of {numel}"
        end += piece.count
    return "" if end == numel else f"entries {min(end, numel)} to {max(end, numel)} of {numel}"
