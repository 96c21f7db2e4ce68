"""A folder next to an output for results that only other documents of the file use.

Recipes of one file may use each other's results. Until all documents are done, these results are
stored in the folder `.<name>.documents` next to the output:

- `models/`: the results that others use, by the names of their documents.
- `done/`: a record for each finished document, which a resumed run skips.
"""

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from sail_jax.checkpoint.formats.files import CheckpointError, explained
from sail_jax.checkpoint.formats.folders import hold
from sail_jax.checkpoint.formats.written import unfinished
from sail_jax.checks import argument

_OURS = ("models", "done")


@contextlib.contextmanager
def between(out: Path, names: Collection[str], resume: bool) -> Iterator[Path]:
    """Locks the folder, as a context manager, and removes it unless the block ends with an error.

    Args:
      out: The output.
      names: The names of the documents that others use.
      resume: Whether results of an earlier run are used.

    Yields:
      The folder.

    Raises:
      CheckpointError: If another process has locked it, it contains files that no run writes, or
        results of an earlier run without `resume`; or if it cannot be made or removed.
    """
    folder = out.with_name(f".{out.name}.documents")
    with explained("write", folder):
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = hold(folder, out)
    try:
        with explained("read", folder):
            strange = _strangers(folder, names)
            left = any((folder / "models").iterdir()) if (folder / "models").is_dir() else False
        if strange:
            raise CheckpointError(
                f"{folder} holds a file that no run leaves ({strange}); remove it or choose "
                "another place for the output"
            )
        if left and not resume:
            raise CheckpointError(
                f"{folder} holds documents that are finished or begun; continue them with "
                f"{argument('resume', 'True')}, or remove it"
            )
        with explained("write", folder):
            for name in _OURS:
                (folder / name).mkdir(exist_ok=True)
        yield folder
        with explained("remove", folder):
            shutil.rmtree(folder)
    finally:
        # A run that was refused before it did anything leaves no files.
        with contextlib.suppress(OSError):
            for path in (*(folder / name for name in _OURS), folder):
                path.rmdir()
        if lock is not None:
            os.close(lock)


def _strangers(folder: Path, names: Collection[str]) -> str:
    """Returns the name of an unexpected entry of the folder; "" without one."""
    models = {*names, *(unfinished(folder / name).name for name in names)}
    known = {folder: {*_OURS}, folder / "models": models}
    for place, ours in known.items():
        if place.is_symlink():
            return place.name
        found = {path.name for path in place.iterdir()} if place.is_dir() else set()
        if strange := found - ours:
            return min(strange)
    return ""
