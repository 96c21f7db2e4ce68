"""Files that are written whole or not at all, and records that are sealed by a checksum."""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sail_jax.checks import argument, escaped

FORMAT = 1
# The most bytes of a JSON file.
MAX_JSON = 4 << 20
# The deepest nesting of JSON, far below Python's limit on recursion.
_DEPTH = 100
# The most parts of a JSON file.
_PARTS = 1 << 23


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


def cache(kind: str) -> Path | None:
    """Finds the folder for what commands keep for one another, and makes it if need be.

    It is $XDG_CACHE_HOME/sail-jax, or ~/.cache/sail-jax without that variable. What lies in it
    decides what is computed, or is executed, so it must be the user's own.

    Args:
      kind: The name of a folder in it.

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
    return folder if own else None


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


def parsed(text: str | bytes, **hooks: Any) -> Any:
    """Parses JSON that may come from a stranger.

    `json` makes 70 bytes of three, and reads a thousand levels. Then `repr`, `json.dumps` and every
    recursion that starts from a deeper frame fail.

    Args:
      text: The JSON.
      **hooks: Options of `json.loads`.

    Returns:
      What it holds.

    Raises:
      ValueError: If it is no JSON, is nested more than 100 deep, or has more than 2^23 parts.
    """
    # Every part but the first of a container follows a comma. Commas within text count as well.
    if sum(map(text.count, ",[{" if isinstance(text, str) else b",[{")) > _PARTS:  # type: ignore[arg-type]
        raise ValueError(f"it has more than {_PARTS} parts")
    tree = json.loads(text, **hooks)
    level = [tree] if isinstance(tree, dict | list) else []
    for _ in range(_DEPTH):
        parts = [node.values() if isinstance(node, dict) else node for node in level]
        level = [x for part in parts for x in part if isinstance(x, dict | list)]
    if level:
        raise ValueError(f"it is nested more than {_DEPTH} deep")
    return tree


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
    # The checksum is of the content and not of the text, so that indentation and order may change.
    sealed = {**record, "sha256": sha256(_canonical(record))}
    write_atomic(path, (json.dumps(sealed, indent=2, allow_nan=False) + "\n").encode())


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
        record = parsed(text.decode(), object_pairs_hook=unique, parse_constant=refuse)
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
