"""The record in an output, which identifies it before it is replaced.

It lists every file and folder of the output. Two runs that write the same bytes write the same
record, and they write it last. Three checks detect a later change of a file: its size, a checksum
of samples, and a change time after the record's.
"""

import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from sail_jax import disk
from sail_jax.checkpoint.formats.files import CheckpointError, explained, reading, sample

RECORD = ".sail-jax"
_FIELDS = {"files": dict, "folders": list}


def unfinished(out: Path) -> Path:
    """Returns the folder in which an output is made before it is renamed.

    Args:
      out: The output.

    Returns:
      The folder, next to the output.

    >>> unfinished(Path("models/merged")).name
    '.merged.partial'
    """
    return out.with_name(f".{out.name}.partial")


def seal(folder: Path) -> None:
    """Writes the record of a finished output.

    Args:
      folder: The output, which must not be changed afterwards.

    Raises:
      CheckpointError: If a file cannot be read, or the record cannot be written.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.json").write_text("{}")
    >>> seal(folder)
    >>> strange(folder)
    ''
    >>> _ = (folder / "notes.txt").write_text("mine")
    >>> strange(folder)
    "'notes.txt' was added to it"
    """
    files: dict[str, list[int]] = {}
    folders: list[str] = []
    with reading(folder):
        # A run that was killed at this point left a record.
        for name, about in _entries(folder):
            if stat.S_ISDIR(about.st_mode):
                folders.append(name)
            elif name != RECORD:
                files[name] = [about.st_size, sample(folder / name, about.st_size)]
    about = {
        "format": disk.FORMAT,
        "files": dict(sorted(files.items())),
        "folders": sorted(folders),
    }
    # No temporary name is used, because that file would remain if the process was killed.
    with explained("write", folder):
        (folder / RECORD).write_bytes(disk.sealed(about))


def strange(out: Path) -> str:
    """Finds a reason not to replace an output.

    Args:
      out: An existing path.

    Returns:
      The reason, for a message. It is "" if the output has its record and nothing in it was
      changed, added or removed since.

    Raises:
      CheckpointError: If it cannot be read.
    """
    if out.is_symlink():
        return "it is a link"
    if not out.is_dir():
        return "it is not a folder, and only a folder has a record of what wrote it"
    if not (out / RECORD).is_file() or (out / RECORD).is_symlink():
        return f"it lacks sail-jax's record, {RECORD}"
    try:
        record = disk.read_record(out / RECORD, _FIELDS)
    except disk.StoreError:
        return f"its record {RECORD} is damaged or was changed"
    files, folders = record["files"], set(map(str, record["folders"]))
    with reading(out):
        last = os.lstat(out / RECORD).st_mtime_ns
        found = {name: about for name, about in _entries(out) if name != RECORD}
        places = [
            out,
            *(out / name for name, about in found.items() if stat.S_ISDIR(about.st_mode)),
        ]
        if closed := [path for path in places if not os.access(path, os.W_OK | os.X_OK)]:
            return f"{closed[0]} may not be changed by this user"
        for name, about in sorted(found.items()):
            if stat.S_ISDIR(about.st_mode) and name in folders:
                continue
            if name not in files:
                return f"{name!r} was added to it"
            # Only plain files are opened: a pipe would block, and a link leads elsewhere.
            if (
                not stat.S_ISREG(about.st_mode)
                or about.st_mtime_ns > last
                or files[name] != [about.st_size, sample(out / name, about.st_size)]
            ):
                return f"{name!r} in it was changed"
    if gone := sorted({*files, *folders} - found.keys()):
        return f"{gone[0]!r} was removed from it"
    return ""


def check_own(out: Path, names: Collection[str] = ()) -> None:
    """Checks that an existing path may be replaced: an unchanged output of sail-jax.

    Args:
      out: An existing path.
      names: The names of several outputs, if the path is a folder for them. It may then contain
        only such outputs, with any name, and unfinished ones with these names.

    Raises:
      CheckpointError: If it must not be replaced, or cannot be read; the message states the reason.
    """
    if names and out.is_dir() and not out.is_symlink():
        with reading(out):
            found = sorted(out.iterdir())
        why = "it is one output, not a folder of several" if out / RECORD in found else ""
        for path in found if not why else ():
            if path.name not in {unfinished(out / name).name for name in names}:
                check_own(path)
    else:
        why = strange(out)
    if why:
        raise CheckpointError(
            f"{out} is not replaced, because {why}; move or remove it, or choose "
            "another place for the output"
        )


def _entries(folder: Path, above: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Yields the entries below a folder by their relative path, without following links."""
    with os.scandir(folder / above) as entries:
        for entry in entries:
            name = f"{above}{entry.name}"
            about = entry.stat(follow_symlinks=False)
            yield name, about
            if stat.S_ISDIR(about.st_mode):
                yield from _entries(folder, f"{name}/")
