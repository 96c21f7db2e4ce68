"""Lists the checkpoints of a training run, and selects some of them by a text.

A run is a folder with a checkpoint for each step, as trainers write it: `1000`, `step-1000`,
`ckpt_1000`, `checkpoint-1000`. A text chooses checkpoints in one of these forms:

    run                     all of them
    run@last                the newest
    run@last:10             the ten newest
    run@1000                the checkpoint of step 1000
    run@1000:5000           steps 1000 to 5000, both included; either may be left out
    run@1000:5000:500       steps 1000, 1500, ..., 5000; all of them must exist
    run/checkpoint-*        files or folders by a pattern; any of the above may follow

A checkpoint that is still being written is skipped. If no such path exists, org/name[@revision] is
one checkpoint, a model on the Hub.
"""

import contextlib
import glob
import os
import re
from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import NamedTuple

from sail_jax import disk
from sail_jax.checkpoint.formats import hub, levanter_folders, orbax_folders
from sail_jax.checkpoint.formats.files import MAX_HEADER, CheckpointError, reading
from sail_jax.checkpoint.formats.orbax_folders import numbered, temporary
from sail_jax.checkpoint.formats.table import suffixes

_NUMBER = re.compile(r"\d{1,18}")
_CHOICE = re.compile(r"last(?::(\d{1,18}))?|(\d{1,18})|(\d{0,18}):(\d{0,18})(?::(\d{1,18}))?")
_PATTERN = re.compile(r"[*?\[]")
# Files that mark a finished checkpoint of orbax or Levanter.
_MARKS = (orbax_folders.MARK, levanter_folders.MARK)


class Step(NamedTuple):
    """A checkpoint of a run.

    Attributes:
      number: Its step; None if its name contains no number.
      path: Its folder, or its file.
    """

    number: int | None
    path: Path


def steps(run: str | PathLike[str]) -> tuple[Step, ...]:
    """Lists the finished checkpoints of a run by their steps.

    Args:
      run: The folder that contains them.

    Returns:
      The checkpoints, the oldest first; empty if none is numbered.

    Raises:
      CheckpointError: If the folder cannot be read, or contains checkpoints with different names,
        such as ckpt_1 and best_1.

    >>> import numpy as np, tempfile
    >>> from sail_jax.checkpoint import save_checkpoint
    >>> run = tempfile.mkdtemp()
    >>> for step in (900, 1000):
    ...     save_checkpoint(f"{run}/checkpoint-{step}", {"w": np.zeros(2, np.float32)})
    >>> [step.number for step in steps(run)]
    [900, 1000]
    """
    found: dict[str, list[Step]] = {}
    with reading(run):
        for path in sorted(Path(run).iterdir()):
            if (step := numbered(path.name)) and _finished(path):
                found.setdefault(step[0], []).append(Step(step[1], path))
    if len(found) > 1:
        names = ", ".join(str(Path(run) / _like(steps[0].path.name)) for steps in found.values())
        raise CheckpointError(f"{run} holds checkpoints of several names: choose one of {names}")
    return tuple(sorted(*found.values())) if found else ()


def _like(name: str) -> str:
    """Returns the pattern of all names that differ only in the number at the end."""
    return re.sub(r"\d+\Z", "*", name)


def _finished(folder: Path) -> bool:
    """Checks whether a folder is a completely written checkpoint."""
    if not folder.is_dir():
        return False
    # If folders cannot be renamed, orbax marks a finished checkpoint here.
    state = folder / orbax_folders.STATE
    if state.is_file():
        with reading(state):
            about = disk.parsed(disk.read_bytes(state, MAX_HEADER))
            if isinstance(about, dict) and not about.get("commit_timestamp_nsecs", True):
                return False
    inside = [path for path in folder.iterdir() if not temporary(path.name)]
    weighty = suffixes()
    return any(
        path.name in _MARKS
        or path.name.endswith(".index.json")
        or path.suffix in weighty
        or (path / _MARKS[0]).is_file()
        for path in inside
    )


def split(text: str | PathLike[str]) -> tuple[str, str | None]:
    """Splits a text into a path and a choice of checkpoints.

    Args:
      text: A path, or a path and a choice with "@" between them.

    Returns:
      The path or pattern, and the choice (None without one). An existing path is not split.

    >>> split("run@last:10"), split("run@v1.0")
    (('run', 'last:10'), ('run@v1.0', None))
    """
    text = fspath(text)
    path, at, choice = text.rpartition("@")
    if at and path and _CHOICE.fullmatch(choice) and not os.path.exists(text):
        return path, choice
    return text, None


def several(text: str | PathLike[str]) -> bool:
    """Checks whether a text may choose more than one checkpoint.

    Args:
      text: A path, a pattern, or either with a choice of steps.

    Returns:
      True for patterns, and for choices such as "last:10" and "1000:"; False for an existing path.
      A run without a choice stands for its newest checkpoint.

    >>> several("run@last:10"), several("run/checkpoint-*"), several("run@1000"), several("run")
    (True, True, False, False)
    """
    path, choice = split(text)
    if os.path.exists(text):
        return False
    return ":" in (choice or "") or (_PATTERN.search(path) is not None and not os.path.exists(path))


def named(text: str | PathLike[str]) -> tuple[Step, ...]:
    """Finds the checkpoints that a text chooses; this module's docstring lists the forms.

    Args:
      text: A run, a pattern, or either with a choice of steps after "@"; or one checkpoint.

    Returns:
      The checkpoints, the oldest first; at least one.

    Raises:
      CheckpointError: If no checkpoint matches, or a chosen one is missing.

    >>> import numpy as np, tempfile
    >>> from sail_jax.checkpoint import save_checkpoint
    >>> run = tempfile.mkdtemp()
    >>> for step in (100, 200, 300):
    ...     save_checkpoint(f"{run}/ckpt_{step}", {"w": np.zeros(2, np.float32)})
    >>> [step.number for step in named(f"{run}@last:2")]
    [200, 300]
    >>> [step.path.name for step in named(f"{run}/ckpt_*@100:300:200")]
    ['ckpt_100', 'ckpt_300']
    """
    text = fspath(text)
    if hub.is_name(text):
        return (Step(None, Path(text)),)
    path, choice = split(text)
    if os.path.exists(path):
        found = steps(path) if Path(path).is_dir() else ()
        if not found and choice is not None:
            raise CheckpointError(f"{path} holds no numbered checkpoints: '@{choice}' matches none")
        found = found or (_step(Path(path)),)
    elif _PATTERN.search(path):
        with reading(path):
            paths = [Path(name) for name in glob.glob(path)]
        found = [_step(p) for p in paths if not temporary(p.name)]
        found = tuple(step for step in found if step.path.is_file() or _finished(step.path))
        if not found:
            raise CheckpointError(f"no checkpoint matches {path}")
        # Names without numbers are sorted by name.
        numbered = all(step.number is not None for step in found)
        found = tuple(sorted(found, key=lambda s: (s.number if numbered else 0, s.path)))
    else:
        # The path may also be inaccessible or too long.
        with reading(path), contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
            os.stat(path)
        # For example gpt2, an alias of a model on the Hub.
        hint = "; a model on the Hub is org/name" if re.fullmatch(r"[\w-]+", path) else ""
        raise CheckpointError(f"{path} does not exist{hint}")
    return found if choice is None else _chosen(found, choice, path)


def _step(path: Path) -> Step:
    """Makes the step of a checkpoint from the last number in its name or its parent's name."""
    for name in (path.stem if path.is_file() else path.name, path.parent.name):
        if numbers := _NUMBER.findall(name):
            return Step(int(numbers[-1]), path)
    return Step(None, path)


def _chosen(found: Sequence[Step], choice: str, path: str) -> tuple[Step, ...]:
    """Returns the checkpoints that a choice such as "last:10" selects."""
    match = _CHOICE.fullmatch(choice)
    assert match is not None
    last, one, first, end, stride = match.groups()
    if choice.startswith("last"):
        count = int(last or 1)
        if not 0 < count <= len(found):
            here = f"{path} has {_counted(found)}"
            raise CheckpointError(f"{here}: expected 1 to {len(found)} of them, got '@{choice}'")
        return tuple(found[-count:])
    by_number = {step.number: step for step in found}
    if None in by_number or len(by_number) < len(found):
        raise CheckpointError(f"{path}: '@{choice}' needs steps, but these names have no numbers")
    numbers = [number for number in by_number if number is not None]
    if one is not None:
        wanted = [int(one)]
    else:
        low, high = int(first or numbers[0]), int(end or numbers[-1])
        wanted = [number for number in numbers if low <= number <= high]
        if stride is not None:
            if not int(stride):
                raise CheckpointError(f"{path}: '@{choice}' has a stride of 0")
            # A range may be much longer than the run, so the loop ends at the first missing step.
            wanted = range(low, high + 1, int(stride))
    for number in wanted:
        if number not in by_number:
            raise CheckpointError(f"{path}: step {number} is missing: it has {_counted(found)}")
    if not wanted:
        raise CheckpointError(f"{path} has {_counted(found)}: '@{choice}' matches none")
    return tuple(by_number[number] for number in wanted)


def _counted(found: Sequence[Step]) -> str:
    """Describes the number of checkpoints, and their first and last steps."""
    if len(found) == 1:
        return "1 checkpoint" if found[0].number is None else f"step {found[0].number} alone"
    return f"{len(found)} checkpoints" + (
        "" if found[0].number is None else f", steps {found[0].number} to {found[-1].number}"
    )


def latest(run: Path) -> tuple[Step, str] | None:
    """Finds the newest checkpoint of a run.

    Args:
      run: The folder.

    Returns:
      The checkpoint, and a sentence for messages; None if the folder is not a run.

    Raises:
      CheckpointError: As `steps` does.
    """
    found = steps(run)
    if not found:
        return None
    return found[-1], f"step {found[-1].number} is read, of {_counted(found)}"
