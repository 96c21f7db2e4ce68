"""Files that are written whole or not at all, and believed only after their checksum."""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sail_jax.checks import escaped

FORMAT = 1
MAX_JSON = 4 << 20  # bytes


class StoreError(Exception):
    """Something on disk cannot be written or believed; the message names the path, in one line."""

    def __init__(self, message: str) -> None:
        super().__init__(escaped(message))  # names in a file may hold what ends a line


class RefusedError(StoreError):
    """What was asked for cannot be done as asked; raised before any work starts."""


@contextlib.contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turns an `OSError` into one line: what failed, where, and what to do about it."""
    try:
        yield
    except OSError as exc:
        advice = {
            errno.ENOSPC: "free some space and run again with resume=True",
            errno.EDQUOT: "free some space and run again with resume=True",
            errno.EACCES: "check its permissions, or choose another place",
            errno.EPERM: "check its permissions, or choose another place",
            errno.EROFS: "choose another place",
        }.get(exc.errno or 0, "choose another place or repair this one")
        why = exc.strerror or str(exc) or type(exc).__name__
        raise StoreError(f"cannot {doing} {path}: {why}; {advice}") from exc


def admit(path: Path, schema: str, what: str) -> None:
    """A record may replace one of its kind, nothing else: RefusedError, before any work starts."""
    mark = f'"schema": "{schema}"'.encode()
    if path.exists() and (path.is_dir() or mark not in read_bytes(path, 1 << 26)[:99]):
        raise RefusedError(f"{path} exists and is not {what}; choose another file")


def sync(path: Path) -> None:
    """Flushes a file or a directory entry to the device."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: str | Path, data: bytes) -> None:
    """Writes `data` so that `path` holds, at any instant, all of the old or all of the new."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with explained("write", path):
        try:
            with open(part, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        sync(path.parent)


def probe(path: Path) -> None:
    """Really writes a file there and removes it: permissions alone do not tell."""
    probe = path / f".probe.{os.getpid()}.part"
    try:
        with explained("write to", path):
            probe.write_bytes(b"sail-jax")
            sync(probe)
            probe.unlink()
    except StoreError as exc:
        raise RefusedError(str(exc)) from exc


def read_bytes(path: Path, limit: int) -> bytes:
    """The whole file, refused if it is not a plain file of at most `limit` bytes."""
    with explained("read", path):
        if not path.is_file():
            raise StoreError(f"{path} is missing or not a plain file")
        if (size := path.stat().st_size) > limit:
            raise StoreError(f"{path} is damaged: it has {size} bytes, more than {limit}")
        return path.read_bytes()


def sha256(data: bytes) -> str:
    """The checksum used everywhere, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _canonical(record: Any) -> bytes:
    return json.dumps(record, sort_keys=True, allow_nan=False).encode()


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a JSON object together with the checksum of its content."""
    sealed = {**record, "sha256": sha256(_canonical(record))}
    write_atomic(path, (json.dumps(sealed, indent=2, allow_nan=False) + "\n").encode())


def read_record(path: Path, fields: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """The object that `write_record` wrote, with exactly these `fields`; `StoreError` otherwise."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a key is repeated")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    text = read_bytes(path, MAX_JSON)
    try:
        record = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refuse)
        stated = record.pop("sha256", None) if isinstance(record, dict) else None
        computed = sha256(_canonical(record))
    except (ValueError, RecursionError) as exc:
        raise StoreError(f"{path} is damaged: not JSON ({exc})") from exc
    if stated != computed:
        raise StoreError(f"{path} is damaged or was edited: its checksum does not match")
    if record.get("format") != FORMAT:
        raise StoreError(f"{path} has format {record.get('format')!r}, this version reads {FORMAT}")
    for field in sorted(fields.keys() | record.keys() - {"format"}):
        if field not in fields or not isinstance(record.get(field, ...), fields[field]):
            raise StoreError(f"{path} has no valid '{field}'")
    return record
