"""Files that are written whole or not at all, and records that are sealed by a checksum."""

import contextlib
import errno
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sail_jax.checks import argument, escaped

FORMAT = 1
# The most bytes of a JSON file.
MAX_JSON = 4 << 20


class StoreError(Exception):
    """Something on disk cannot be written or trusted.

    The message is one line and names the path.
    """

    def __init__(self, message: str) -> None:
        # Names in a file may hold what ends a line.
        super().__init__(escaped(message))


class RefusedError(StoreError):
    """What was asked for cannot be done as asked. This is raised before any work starts."""


@contextlib.contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turns an `OSError` in its block into a `StoreError` that says what to do about it.

    Args:
      doing: What was being done, as a verb: "read", "write to".
      path: The file or folder that it was done to.

    Yields:
      Nothing.

    Raises:
      StoreError: If the block raises an `OSError`.
    """
    try:
        yield
    except OSError as exc:
        again = f"free some space and run again with {argument('resume', 'True')}"
        advice = {
            errno.ENOSPC: again,
            errno.EDQUOT: again,
            errno.EACCES: "check its permissions, or choose another place",
            errno.EPERM: "check its permissions, or choose another place",
            errno.EROFS: "choose another place",
        }.get(exc.errno or 0, "choose another place or repair this one")
        why = exc.strerror or str(exc) or type(exc).__name__
        raise StoreError(f"cannot {doing} {path}: {why}; {advice}") from exc


def admit(path: Path, schema: str, what: str) -> None:
    """Checks that a record may be written to a path: it may only replace one of its kind.

    Args:
      path: Where the record is to be written.
      schema: What the field "schema" of such records says. It has to be among a file's first bytes.
      what: What the message calls such a record, such as "a record of inspect".

    Raises:
      RefusedError: If something else is there already.
      StoreError: If what is there cannot be read.
    """
    mark = f'"schema": "{schema}"'.encode()
    if path.is_file():
        with explained("read", path), open(path, "rb") as file:
            # The schema is the first entry of such a record; the rest need not be read.
            alike = mark in file.read(99)
    else:
        alike = not path.exists()
    if not alike:
        raise RefusedError(f"{path} exists and is not {what}; choose another file")


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the device.

    Args:
      path: The file or folder. On Windows nothing is done for a folder.
    """
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: str | Path, data: bytes) -> None:
    """Writes a file whose path holds, at any instant, all of its old content or all of the new.

    Args:
      path: The file.
      data: Its new content.

    Raises:
      StoreError: If it cannot be written. The path still holds all of the old content, or all of
        the new.
    """
    path = Path(path)
    # In the same folder, since a rename is atomic only within one file system.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with explained("write", path):
        try:
            with open(part, "wb") as file:
                file.write(data)
                file.flush()
                # Before the rename: after a crash the name could else stand for an empty file.
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        # The new name is an entry of the folder, which has to be on disk as well.
        sync(path.parent)


class Cache:
    """A folder of what commands keep for one another, of a bounded size.

    Entries are written whole or not at all. One that is damaged all the same, such as by a full
    disk, is removed when it is read. What cannot be kept is not: the one who asks for it computes
    it again.

    Args:
      folder: The folder, which exists.
      most: The most bytes that all files below it may have. The entries that were longest out of
        use give way to new ones.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most
        self._size: int | None = None

    def get(self, name: str) -> bytes | None:
        """Reads an entry.

        Args:
          name: Its name, which is that of a file.

        Returns:
          What `put` was given under this name; None if there is nothing of it.
        """
        path = self.folder / name
        try:
            sealed = path.read_bytes()
            seal, data = sealed[:_SEAL], sealed[_SEAL:]
            if hashlib.sha256(data).digest() != seal:
                path.unlink()
                return None
            os.utime(path)
        except OSError:
            return None
        return data

    def put(self, name: str, data: bytes) -> None:
        """Keeps an entry, unless the file system refuses or it is larger than the bound.

        Args:
          name: Its name.
          data: Its content.
        """
        size = _SEAL + len(data)
        part = self.folder / f".{name}.{os.getpid()}.{threading.get_ident()}.part"
        with contextlib.suppress(OSError):
            if not self._make_room(size):
                return
            try:
                # Not synced: of what a crash leaves, the seal is wrong.
                part.write_bytes(hashlib.sha256(data).digest() + data)
                os.replace(part, self.folder / name)
            finally:
                part.unlink(missing_ok=True)

    def _make_room(self, size: int) -> bool:
        """Removes the oldest files if need be; returns whether there is room for so many bytes."""
        if size > self.most:
            return False
        held = self._size
        if held is None or held + size > self.most:
            files = []
            for folder, _, names in os.walk(self.folder):
                for name in names:
                    with contextlib.suppress(OSError):  # another process has removed it
                        about = os.lstat(path := os.path.join(folder, name))
                        files.append((about.st_mtime, about.st_size, path))
            held = sum(bytes_ for _, bytes_, _ in files)
            # Down to less than the bound, since to look through the folder takes time.
            least = self.most if held + size <= self.most else self.most * 3 // 4
            for _, freed, path in sorted(files):
                if held + size <= least:
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                held -= freed
        self._size = held + size
        return True


_SEAL = hashlib.sha256().digest_size


def cache(kind: str, most: int) -> Cache | None:
    """Finds the folder for what commands keep for one another, and makes it if need be.

    It is $XDG_CACHE_HOME/sail-jax, or ~/.cache/sail-jax without that variable. What lies in it
    decides what is computed, or is executed, so it must be the user's own.

    Args:
      kind: The name of a folder in it.
      most: The most bytes of this folder.

    Returns:
      That folder; None if it cannot be written or is another user's.
    """
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "sail-jax" / kind
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid()
    except (OSError, RuntimeError):
        return None
    return Cache(folder, most) if own else None


def probe(path: Path) -> None:
    """Checks that a folder can be written to, by writing a small file there and removing it.

    Permissions alone do not tell: the device may be full or mounted read-only.

    Args:
      path: The folder.

    Raises:
      RefusedError: If the folder cannot be written to.
    """
    probe = path / f".probe.{os.getpid()}.part"
    try:
        with explained("write to", path):
            probe.write_bytes(b"sail-jax")
            sync(probe)
            probe.unlink()
    except StoreError as exc:
        raise RefusedError(str(exc)) from exc


def read_bytes(path: Path, limit: int) -> bytes:
    """Reads a whole file.

    Args:
      path: The file.
      limit: The largest size, in bytes, that is read.

    Returns:
      Its content.

    Raises:
      StoreError: If it is missing, larger, not a plain file, or cannot be read.
    """
    with explained("read", path):
        if not path.is_file():
            raise StoreError(f"{path} is missing or not a plain file")
        if (size := path.stat().st_size) > limit:
            raise StoreError(f"{path} is damaged: it has {size} bytes, more than {limit}")
        return path.read_bytes()


def sha256(data: bytes) -> str:
    """Computes the checksum that is used everywhere, SHA-256.

    Args:
      data: What it is of.

    Returns:
      64 hexadecimal digits.
    """
    return hashlib.sha256(data).hexdigest()


def _canonical(record: Any) -> bytes:
    """The bytes whose checksum a record bears, whatever the order of its keys."""
    return json.dumps(record, sort_keys=True, allow_nan=False).encode()


def sealed(record: Mapping[str, Any]) -> bytes:
    """Makes the file of a JSON object together with the checksum of its content.

    Args:
      record: What JSON can hold, without NaN and infinities.

    Returns:
      The bytes of the file.

    Raises:
      ValueError: For a value that is NaN or infinite.
      TypeError: For a value that JSON cannot hold.
    """
    # The checksum is of the content and not of the text, so that indentation and order may change.
    whole = {**record, "sha256": sha256(_canonical(record))}
    return (json.dumps(whole, indent=2, allow_nan=False) + "\n").encode()


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a JSON object together with the checksum of its content, all of it or nothing.

    Args:
      path: The file.
      record: What JSON can hold, without NaN and infinities. The field "format" has to be `FORMAT`
        if the record is to be read again.

    Raises:
      ValueError: For a value that is NaN or infinite.
      TypeError: For a value that JSON cannot hold.
      StoreError: If the file cannot be written.
    """
    write_atomic(path, sealed(record))


def read_record(path: Path, fields: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """Reads the object that `write_record` wrote, and checks it.

    Args:
      path: The file.
      fields: The type, or types, of each field. There must be exactly these, beside "format" and
        the checksum.

    Returns:
      The object, without its checksum.

    Raises:
      StoreError: If the file cannot be read, is no JSON, repeats a key, has another checksum or
        format, or has other fields.
    """

    # `json` would silently take the last of repeated keys, and read NaN
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
    # `...` stands for a missing field: it is of none of the types
    for field in sorted(fields.keys() | record.keys() - {"format"}):
        if field not in fields or not isinstance(record.get(field, ...), fields[field]):
            raise StoreError(f"{path} has no valid '{field}'")
    return record
