"""Atomic writing of files, and records with a checksum."""

import contextlib
import errno
import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sail_jax.checks import argument, escaped

try:
    import fcntl
# Windows has no such locks, so two processes in one folder are not detected there.
except ImportError:
    fcntl = None

FORMAT = 1
# The largest size of a JSON file in bytes.
MAX_JSON = 4 << 20
NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)
"""The errors of texts that are no path on this system."""

# The deepest nesting of JSON, far below Python's recursion limit.
_DEPTH = 100
# The largest number of parts of a JSON file.
_PARTS = 1 << 23


class StoreError(Exception):
    """Raised if a file cannot be written or trusted.

    The message is one line and contains the path.

    Attributes:
      code: The exit code of a command that it ends: 1, or 2 if the command requested something
        impossible.
    """

    code = 1

    def __init__(self, message: str) -> None:
        # Names in a file may contain line ends.
        super().__init__(escaped(message))


class BusyError(StoreError):
    """Raised if another process has locked a folder."""


class RefusedError(StoreError):
    """Raised before any work starts if the request is impossible."""

    code = 2


@contextlib.contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Converts an `OSError` in its block to a `StoreError` with advice.

    Args:
      doing: The action, as a verb: "read", "write to".
      path: The file or folder of the action.

    Yields:
      Nothing.

    Raises:
      StoreError: If the block raises an `OSError`; a `RefusedError` if no file can have this path.
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
        kind = RefusedError if exc.errno in NO_PATH else StoreError
        raise kind(f"cannot {doing} {path}: {reason(exc)}; {advice}") from exc


def check_length(path: Path) -> None:
    """Checks that a text is not too long for a path.

    From Python 3.14 on, pathlib reports such a path as missing, which would be misleading.

    Args:
      path: The path.

    Raises:
      OSError: If it is too long.
    """
    try:
        os.lstat(path)
    except OSError as exc:
        if exc.errno == errno.ENAMETOOLONG:
            raise


def reason(error: OSError) -> str:
    """Explains an error of the system.

    Args:
      error: The error.

    Returns:
      The description of the system, with advice if too many files are open.
    """
    why = error.strerror or str(error) or type(error).__name__
    few = error.errno in (errno.EMFILE, errno.ENFILE)
    return why + " (`ulimit -n` shows the limit of open files, and raises it)" * few


def admit(path: Path, schema: str, what: str) -> None:
    """Checks that a record may be written to a path, where it may only replace a record of its
    kind.

    Args:
      path: The path of the record.
      schema: The value of "schema" in such records. It must be among a file's first bytes.
      what: The name of such a record in the message, such as "a record of inspect".

    Raises:
      RefusedError: If there is another file at the path.
      StoreError: If that file cannot be read.
    """
    mark = f'"schema": "{schema}"'.encode()
    if path.is_file():
        with explained("read", path), open(path, "rb") as file:
            # The schema is the first entry of such a record, so the rest need not be read.
            alike = mark in file.read(99)
    else:
        alike = not path.exists()
    if not alike:
        raise RefusedError(f"{path} exists and is not {what}; choose another file")


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the device.

    Args:
      path: The file or folder. On Windows, folders are skipped.
    """
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# The user of this process; Windows does not have such numbers.
_USER = getattr(os, "geteuid", lambda: 0)


def foreign(path: Path, *, links: bool = False) -> str:
    """Checks whether an existing folder may contain files of other users.

    Anyone who can write to a folder can replace any file in it by a link, which redirects data
    written to the file.

    Args:
      path: The folder.
      links: Whether it may be a link by this user to a folder that meets the other conditions.

    Returns:
      The problem, to be printed after its name: "is a link", "belongs to another user"; "" for this
        user's own
      folder. The folder's group may have write access, which must have been granted explicitly.

    Raises:
      OSError: If the folder cannot be examined.
    """
    about = os.lstat(path)
    if stat.S_ISLNK(about.st_mode):
        if not links or about.st_uid != _USER():
            return "is a link"
        about = os.stat(path)
    if not stat.S_ISDIR(about.st_mode):
        return "is not a folder"
    if os.name == "nt":
        return ""
    if about.st_uid != _USER():
        return "belongs to another user"
    if about.st_mode & stat.S_IWOTH and _keeps_modes(path, about.st_mode):
        return "can be written to by all users"
    return ""


def stranger(folder: Path) -> str:
    """Finds a file in a folder that another user may have put there.

    Args:
      folder: The folder, which must be trusted itself; see `foreign`.

    Returns:
      The path of a link, of another user's file or folder, or of a special file, with a
      description; "" if there is none.

    Raises:
      OSError: If something cannot be examined.
    """
    mine = os.stat(folder).st_uid
    for above, folders, files in os.walk(folder):
        for path in (os.path.join(above, name) for name in (*folders, *files)):
            try:
                about = os.lstat(path)
            except FileNotFoundError:  # another part of the work has renamed the file
                continue
            if stat.S_ISLNK(about.st_mode):
                return f"{path} is a link"
            if about.st_uid != mine:
                return f"{path} belongs to another user"
            if not stat.S_ISDIR(about.st_mode) and not stat.S_ISREG(about.st_mode):
                return f"{path} is not a plain file"
    return ""


def _keeps_modes(folder: Path, mode: int) -> bool:
    """Checks whether a file system supports write permissions, unlike exFAT and some network
    drives.

    On those every folder appears to be writable by all users.
    """
    try:
        os.chmod(folder, stat.S_IMODE(mode) & ~stat.S_IWOTH)
    except OSError:
        return False
    kept = not os.stat(folder).st_mode & stat.S_IWOTH
    os.chmod(folder, stat.S_IMODE(mode))
    return kept


def lock(folder: Path, *, links: bool = False, shared: bool = False) -> int | None:
    """Locks a folder for this process.

    Args:
      folder: The folder.
      links: Whether a link to a folder is followed.
      shared: Whether other processes may have a shared lock at the same time, but no exclusive one.

    Returns:
      An open file descriptor. The lock lasts until it is closed. None if the system or the file
      system does not support locks.

    Raises:
      BusyError: If another process holds the lock.
      OSError: If the folder cannot be opened.
    """
    if fcntl is None:
        return None
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise BusyError(f"{folder} is in use by another process") from None
    # A file system without locks must not prevent writing.
    except OSError:
        os.close(fd)
        return None
    return fd


def create(path: Path) -> int:
    """Makes a new file, without following links.

    Args:
      path: The file. An existing file is removed.

    Returns:
      An open file descriptor, for writing.

    Raises:
      OSError: If the file cannot be made.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    # O_EXCL does not follow links. Names of temporary files can be guessed, so another user may
    # have put a link into a shared folder such as /tmp.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    return os.open(path, flags | getattr(os, "O_BINARY", 0), 0o666)


def write_atomic(path: str | Path, data: bytes) -> None:
    """Writes a file atomically: the path always contains either the old or the new data.

    Args:
      path: The file.
      data: Its new content.

    Raises:
      StoreError: If the file cannot be written. The path still contains either the old or the new
        contents.
    """
    path = Path(path)
    # The temporary file is in the same folder, because a rename is only atomic within one file
    # system.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with explained("write", path):
        try:
            with open(create(part), "wb") as file:
                file.write(data)
                file.flush()
                # This comes before the rename; otherwise the file could be empty after a crash.
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        # The new name is an entry of the folder, which must also be flushed.
        sync(path.parent)


class Cache:
    """A cache folder of limited size for commands.

    Entries are written atomically. Damaged entries, for example from a full disk, are
    removed when they are read. Failures to store an entry are ignored, and the caller computes it
    again.

    Args:
      folder: The folder, which exists.
      most: The largest total size of its files in bytes. New entries replace the least recently
        used ones.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most
        self._size: int | None = None

    def get(self, name: str) -> bytes | None:
        """Reads an entry.

        Args:
          name: Its name, which is also the name of a file.

        Returns:
          The content that `put` stored under this name; None if there is none.
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
        """Stores an entry, unless writing fails or it exceeds the limit.

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
                # No sync is required, because after a crash incomplete entries fail their checksum.
                part.write_bytes(hashlib.sha256(data).digest() + data)
                os.replace(part, self.folder / name)
            finally:
                part.unlink(missing_ok=True)

    def _make_room(self, size: int) -> bool:
        """Removes the oldest files if necessary; returns whether this many bytes fit."""
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
            # Files are removed to well below the limit, because searching the folder takes time.
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
    """Finds the folder of a cache for commands, and makes it if necessary.

    It is in $XDG_CACHE_HOME/sail-jax, or ~/.cache/sail-jax without that variable. Its contents are
    trusted, and partly executed, so it must belong to the user.

    Args:
      kind: The name of a folder in it.
      most: The largest size of this folder in bytes.

    Returns:
      The cache; None if the folder cannot be written, or others can write to it or to a parent.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        # Each level is checked, because write access to one allows replacing the folder below it.
        for name in ("sail-jax", *kind.split("/")):
            folder /= name
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if foreign(folder, links=True):
                return None
        return Cache(folder, most) if os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):
        return None


def probe(path: Path) -> None:
    """Checks that a folder can be written to, by writing a small file there and removing it.

    Permissions alone are not sufficient: the device may be full or mounted read-only.

    Args:
      path: The folder.

    Raises:
      RefusedError: If the folder cannot be written to.
    """
    probe = path / f".probe.{os.getpid()}.part"
    try:
        with explained("write to", path):
            with open(create(probe), "wb") as file:
                file.write(b"sail-jax")
            sync(probe)
            probe.unlink()
    except StoreError as exc:
        raise RefusedError(str(exc)) from exc


def read_bytes(path: Path, limit: int) -> bytes:
    """Reads a whole file.

    Args:
      path: The file.
      limit: The largest allowed size in bytes.

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


def parsed(text: str | bytes, *, strict: bool = False) -> Any:
    """Parses JSON from an untrusted source.

    `json` makes 70 bytes from three, and reads a thousand levels, for which `repr`, `json.dumps`
    and any recursion from a deeper frame fail.

    Args:
      text: The JSON.
      strict: Whether everything is rejected that JSON parsers interpret differently: repeated keys,
        NaN and infinities, and half of a surrogate pair as a key or a value of an object.

    Returns:
      The content.

    Raises:
      ValueError: If it is not JSON, is nested more than 100 deep, or has more than 2^23 parts; or
        if it is not strict.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            seen = set()
            again = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ValueError(f"the key {again!r} is repeated")
        # JSON can represent half of a surrogate pair as an escape, which cannot be encoded.
        for part in (*mapping, *mapping.values()):
            if isinstance(part, str):
                part.encode()
        return mapping

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    # A comma precedes every part except the first of a container. Commas within text also count.
    if sum(map(text.count, ",[{" if isinstance(text, str) else b",[{")) > _PARTS:  # type: ignore[arg-type]
        raise ValueError(f"it has more than {_PARTS} parts")
    hooks = {"object_pairs_hook": unique, "parse_constant": refuse} if strict else {}
    tree = json.loads(text, **hooks)
    level, depth = [tree] if isinstance(tree, dict | list) else [], 0
    while level:
        if depth == _DEPTH:
            raise ValueError(f"it is nested more than {_DEPTH} deep")
        parts = [node.values() if isinstance(node, dict) else node for node in level]
        level = [x for part in parts for x in part if isinstance(x, dict | list)]
        depth += 1
    return tree


def sha256(data: bytes) -> str:
    """Computes the SHA-256 checksum, which is used everywhere.

    Args:
      data: The bytes.

    Returns:
      64 hexadecimal digits.
    """
    return hashlib.sha256(data).hexdigest()


def _canonical(record: object) -> bytes:
    """Returns the bytes for a record's checksum, which do not depend on the order of its keys."""
    return json.dumps(record, sort_keys=True, allow_nan=False).encode()


def sealed(record: Mapping[str, Any]) -> bytes:
    """Makes the file content of a JSON object with its checksum.

    Args:
      record: JSON data without NaN and infinities.

    Returns:
      The bytes of the file.

    Raises:
      ValueError: For a value that is NaN or infinite.
      TypeError: For a value that JSON cannot represent.
    """
    # The checksum covers the content, not the text, so indentation and order may change.
    whole = {**record, "sha256": sha256(_canonical(record))}
    return (json.dumps(whole, indent=2, allow_nan=False) + "\n").encode()


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a JSON object with its checksum, atomically.

    Args:
      path: The file.
      record: JSON data without NaN and infinities. The field "format" must be `FORMAT` if the
        record will be read again.

    Raises:
      ValueError: For a value that is NaN or infinite.
      TypeError: For a value that JSON cannot represent.
      StoreError: If the file cannot be written.
    """
    write_atomic(path, sealed(record))


def read_record(path: Path, fields: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """Reads and checks an object written by `write_record`.

    Args:
      path: The file.
      fields: The type, or types, of each field. The record must contain exactly these fields,
        "format" and the checksum.

    Returns:
      The object, without its checksum.

    Raises:
      StoreError: If the file cannot be read, is not JSON, repeats a key, or has another checksum,
        another format, or other fields.
    """
    text = read_bytes(path, MAX_JSON)
    try:
        record = parsed(text.decode(), strict=True)
        stated = record.pop("sha256", None) if isinstance(record, dict) else None
        computed = sha256(_canonical(record))
    except (ValueError, RecursionError) as exc:
        raise StoreError(f"{path} is damaged: not JSON ({exc})") from exc
    if stated != computed:
        raise StoreError(f"{path} is damaged or was edited: its checksum does not match")
    if record.get("format") != FORMAT:
        raise StoreError(f"{path} has format {record.get('format')!r}; this version reads {FORMAT}")
    # `...` stands for a missing field and is an instance of none of the types
    for field in sorted(fields.keys() | record.keys() - {"format"}):
        if field not in fields or not isinstance(record.get(field, ...), fields[field]):
            raise StoreError(f"{path} has no valid '{field}'")
    return record
