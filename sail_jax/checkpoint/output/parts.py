"""Makes an output in parts, each by a process, possibly on its own host.

A part consists of whole files of the output. Two processes never write to one file, because shared
file systems guarantee little in that case. Parts are consecutive runs of files of about equal size.
All parts work in the folder of unfinished work, which must be visible to all hosts:

- `data/`: the files of all parts.
- `parts/N/journal`: the header of part N, its finished tensors, and whether it is complete.
- `parts/N/alive`: a file that part N touches while it runs.
- `parts/N/statistics/`: part N's share of statistics over the whole tree.
- `parts/N/errors`, `parts/N/measured`: the files that `writer` describes.

A merge with statistics over the tree, such as TIES, continues in each part once all parts have
written theirs. A waiting part reports what it waits for. It stops if the other part is inactive.
"""

import contextlib
import hashlib
import io
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sail_jax import disk
from sail_jax.checkpoint.formats.files import CheckpointError, explained
from sail_jax.checkpoint.formats.layout import Layout
from sail_jax.checkpoint.output.journal import Journal
from sail_jax.checks import argument

FOLDER = "parts"
"""The folder of all parts, within the folder of unfinished work."""
ALIVE, STATISTICS = "alive", "statistics"
# Seconds between two updates of `alive`, and between two checks of the other parts.
_SIGN, _LOOK = 5.0, 1.0
# The bytes of the checksum that precedes arrays.
_SEAL = hashlib.sha256().digest_size


class Part(NamedTuple):
    """One of the parts of an output.

    Attributes:
      number: Its number, from 1.
      count: The number of parts.
    """

    number: int
    count: int

    def __str__(self) -> str:
        return f"part {self.number} of {self.count}"


class WaitedError(CheckpointError):
    """Raised when a part has waited too long for other parts."""


def checked(part: Sequence[int]) -> Part:
    """Checks the number of a part.

    Args:
      part: The number of the part, from 1, and the number of parts.

    Returns:
      The part.

    Raises:
      ValueError: Unless the first number lies between 1 and the second.
    """
    whole = len(part) == 2 and all(isinstance(n, int) for n in part)
    if not whole or not 1 <= part[0] <= part[1]:
        raise ValueError(
            f"{argument('part')}: expected a number from 1 and the number of parts, such as 1 and "
            f"4; got {tuple(part)}"
        )
    return Part(*part)


def divided(sizes: Sequence[int], count: int) -> list[int]:
    """Divides files into runs of about equal bytes, with the largest run as small as possible.

    Args:
      sizes: The size of each file.
      count: The number of runs, at most the number of files.

    Returns:
      The number of the run, from 0, for each file. No run is empty.

    >>> divided([5, 5, 5, 1], 2), divided([9, 1, 1], 3)
    ([0, 0, 1, 1], [0, 1, 2])
    """

    def filled(most: int) -> list[int]:
        """Divides into runs of at most this many bytes, each as long as possible."""
        runs, run, room = [], 0, most
        for place, size in enumerate(sizes):
            # Each later run gets at least one file.
            enough = len(sizes) - place > count - 1 - run
            if place and (size > room or not enough):
                run, room = run + 1, most
            room -= size
            runs.append(run)
        return runs

    least, most = max(sizes), sum(sizes)
    while least < most:
        half = (least + most) // 2
        least, most = (least, half) if filled(half)[-1] < count else (half + 1, most)
    return filled(most)


def groups(layout: Layout, belongs: Mapping[str, str]) -> list[list[str]]:
    """Lists the files of an output that must be written by one part.

    Args:
      layout: The layout of the whole output.
      belongs: Tensors that must be in the same part as another one, such as the scales of a
        weight, by name.

    Returns:
      Groups of files, in the order of the output. Files that share a tensor, or tensors made
      together, are in one group. One group of all files for a format that is written as one.
    """
    files = _files(layout)
    order = {
        file: place for place, file in enumerate(dict.fromkeys(itertools.chain(*files.values())))
    }
    if layout.convert is not None:
        return [[*order]]
    # A group runs from the first file with such a tensor to the last one.
    spans: dict[str, tuple[int, int]] = {}
    for name, own in files.items():
        places = [order[file] for file in own] or [0]
        first, last = spans.get(belongs.get(name, name), (len(order), 0))
        spans[belongs.get(name, name)] = min(first, *places), max(last, *places)
    joined = set().union(*(range(first + 1, last + 1) for first, last in spans.values()))
    found: list[list[str]] = []
    for file, place in order.items():
        if place in joined:
            found[-1].append(file)
        else:
            found.append([file])
    return found


def owners(layout: Layout, out: Path, count: int, belongs: Mapping[str, str]) -> dict[str, int]:
    """Assigns the files of an output to parts.

    Args:
      layout: The layout of the whole output.
      out: The output, for messages.
      count: The number of parts.
      belongs: As for `groups`.

    Returns:
      The index of its part, from 0, for each tensor.

    Raises:
      CheckpointError: If there are fewer files than parts.
    """
    found, files = groups(layout, belongs), _files(layout)
    if layout.convert is not None or len(found) < count:
        one = layout.convert is not None or sum(map(len, found)) == 1
        shape = "is written as one" if one else f"has {len(found)} files that can be parted"
        raise CheckpointError(
            f"{argument('part')} divides the files of an output, but {out} {shape}: write "
            f"safetensors to a folder, with smaller files ({argument('shard_bytes', '...')}) or "
            "fewer parts"
        )
    runs = divided([sum(layout.sizes[file] for file in group) for group in found], count)
    of_file = {file: run for group, run in zip(found, runs, strict=True) for file in group}
    return {name: of_file[own[0]] if own else 0 for name, own in files.items()}


def _files(layout: Layout) -> dict[str, list[str]]:
    """The files that hold each tensor, by name."""
    return {name: [run.file for run in runs] for name, runs in layout.regions.items()}


def narrowed(layout: Layout, names: Collection[str]) -> Layout:
    """Restricts a layout to the files of some tensors.

    Args:
      layout: The layout of a whole output.
      names: The tensors of some of its files; empty for the files without tensors.

    Returns:
      The layout of these files.
    """
    with_tensors = {run.file for runs in layout.regions.values() for run in runs}
    regions = {name: runs for name, runs in layout.regions.items() if name in names}
    files = {run.file for runs in regions.values() for run in runs}
    if not names:
        files = layout.sizes.keys() - with_tensors
    return layout._replace(
        regions=regions,
        fixed=[entry for entry in layout.fixed if entry[0] in files],
        sizes={file: size for file, size in layout.sizes.items() if file in files},
    )


def place(partial: Path, number: int) -> Path:
    """Returns the folder of a part within the folder of unfinished work."""
    return partial / FOLDER / str(number)


@contextlib.contextmanager
def alive(folder: Path) -> Iterator[None]:
    """Touches a part's `alive` file regularly while the block runs.

    Args:
      folder: The folder.

    Yields:
      Nothing.
    """
    path, over = folder / ALIVE, threading.Event()

    def beat() -> None:
        while not over.wait(_SIGN):
            with contextlib.suppress(OSError):
                os.utime(path)

    with explained("write", path):
        os.close(disk.create(path))
    thread = threading.Thread(target=beat, name="alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def check_joined(partial: Path, out: Path, head: Mapping[str, Any], layout: Layout) -> None:
    """Checks that all parts of an output exist, are complete, and belong to this output.

    Args:
      partial: The folder of unfinished work.
      out: The output, for messages.
      head: The journal header of this output.
      layout: The layout of the whole output.

    Raises:
      CheckpointError: If a part is missing, unfinished, or belongs to another output.
    """
    heads: dict[int, dict[str, Any]] = {}
    whole: set[int] = set()
    with explained("read", partial):
        folders = [*(partial / FOLDER).iterdir()] if (partial / FOLDER).is_dir() else []
    for folder in folders:
        if folder.name.isdecimal() and (folder / "journal").is_file():
            about, _, finished = Journal.read(folder / "journal")
            heads[int(folder.name)] = about
            if finished is not None:
                whole.add(int(folder.name))
    if not heads:
        raise CheckpointError(
            f"{argument('join', 'True')}: {partial} holds no part of {out.name}; make the parts "
            f"first ({argument('part', '...')})"
        )
    first = Part(min(heads), count := _count(heads[min(heads)]))
    _check_same(heads[first.number], head, str(first), partial)
    for number in sorted(heads):
        _check_together(heads[number], number, heads[first.number], first, partial)
    lacking = [number for number in range(1, count + 1) if number not in heads]
    unfinished = [number for number in sorted(heads) if number not in whole]
    if lacking or unfinished:
        said = [(lacking, "missing"), (unfinished, "unfinished")]
        text = ", ".join(f"{why}: {several(numbers, count)}" for numbers, why in said if numbers)
        raise CheckpointError(
            f"{out.name} cannot be joined yet ({text}): make each with {argument('part', '...')}, "
            f"and add {argument('resume', 'True')} if it was begun"
        )
    for file, size in narrowed(layout, layout.regions.keys()).sizes.items():
        path = partial / "data" / file
        with explained("read", path):
            if path.is_symlink() or path.stat().st_size != size:
                raise CheckpointError(f"{path} is damaged: expected {size} bytes; remove {partial}")


def several(numbers: Sequence[int], count: int) -> str:
    """Formats the numbers of some parts.

    >>> several([2], 4), several([2, 3], 4)
    ('part 2 of 4', 'parts 2, 3 of 4')
    """
    listed = ", ".join(map(str, numbers[:8])) + ", ..." * (len(numbers) > 8)
    return f"part{'s' * (len(numbers) > 1)} {listed} of {count}"


def _check_same(head: Mapping[str, Any], other: Mapping[str, Any], who: str, partial: Path) -> None:
    """Raises a CheckpointError if two headers belong to different outputs."""
    if any(other.get(key) != head[key] for key in ("format", "fingerprint", "layout")):
        raise CheckpointError(
            f"{who} belongs to another run: the recipe, the files or an input differ; remove "
            f"{partial} to start again"
        )


def _check_together(
    other: Mapping[str, Any], number: int, head: Mapping[str, Any], part: Part, partial: Path
) -> None:
    """Raises CheckpointError if two parts, with these headers, do not belong to one output."""
    count = _count(other)
    _check_same(other, head, f"part {number} of {count}", partial)
    if count != part.count or other.get("versions") != head.get("versions"):
        what = _unlike(other, head) or f"of {count} and of {part.count} parts"
        raise CheckpointError(
            f"part {number} and {part} do not belong together ({what}); remove "
            f"{place(partial, number)} and make it again, or remove {partial} to start again"
        )


def check_beside(partial: Path, number: int, part: Part, head: Mapping[str, Any]) -> None:
    """Checks that another part and this one may write to the same folder.

    Args:
      partial: The folder of unfinished work.
      number: The other part.
      part: This part.
      head: The header of this part's journal.

    Raises:
      CheckpointError: If it belongs to another output or another number of parts, or was made with
        other versions.
    """
    path = place(partial, number) / "journal"
    if path.is_file():
        _check_together(Journal.read(path)[0], number, head, part, partial)


def begun(partial: Path) -> bool:
    """Checks whether an earlier run has begun a part.

    Args:
      partial: The folder of unfinished work.

    Returns:
      Whether a part has a journal.
    """
    return any((partial / FOLDER).glob("*/journal"))


def joining(partial: Path) -> bool:
    """Checks whether an earlier run has begun to join the parts.

    Args:
      partial: The folder of unfinished work.

    Returns:
      Whether the whole output has a journal, and the parts, or only the journal, are left.
    """
    beside = (partial / FOLDER).is_dir() or not (partial / "data").exists()
    return (partial / "journal").exists() and beside


def forget(partial: Path) -> None:
    """Removes statistics of parts that were only compared with a finished output.

    Args:
      partial: The folder of unfinished work.
    """
    for folder in (partial / FOLDER).glob("*"):
        if not (folder / "journal").exists():
            with contextlib.suppress(OSError):
                shutil.rmtree(folder / STATISTICS)
                folder.rmdir()
    for folder in (partial / FOLDER, partial):
        with contextlib.suppress(OSError):
            folder.rmdir()


def others(partial: Path, part: Part) -> list[int]:
    """Lists the numbers of the other parts that have a folder."""
    found = [path.name for path in (partial / FOLDER).iterdir() if path.name.isdecimal()]
    return sorted({*map(int, found)} - {part.number})


def _count(head: Mapping[str, Any]) -> int:
    """Returns the number of parts, from a part's journal."""
    match head.get("part"):
        case [int(), int(count)]:
            return count
    return 0


def _unlike(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Returns the versions in which two headers differ."""
    one, other = (x.get("versions") or {} for x in (a, b))
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return ", ".join(f"{name} {one.get(name)} and {other.get(name)}" for name in names)


class Gathering:
    """Exchanges arrays with other parts through files (see `merging.sharing.Sharing`).

    Attributes:
      mine: The index of this part, from 0.
    """

    def __init__(
        self,
        partial: Path,
        part: Part,
        owners: Mapping[str, int],
        head: Mapping[str, Any],
        patience: float,
        waiting: Callable[[str], None],
    ) -> None:
        """Stores the arguments, without reading any files.

        Args:
          partial: The folder of unfinished work.
          part: This part.
          owners: The index of its part for each tensor.
          head: The header of this part's journal.
          patience: The number of seconds that it waits for an inactive part.
          waiting: Called regularly with the missing parts.
        """
        self._partial, self._part, self._owners, self._head = partial, part, owners, head
        self._patience, self._waiting = patience, waiting
        self._trusted: set[int] = set()
        # Arrays of another output, or of other versions, are not read.
        of = [head.get(key) for key in ("fingerprint", "layout", "versions")]
        self._mark = repr([*of, part.count]).encode()
        self.mine = part.number - 1

    def owner(self, name: str) -> int:
        """Returns the index of the part that writes a tensor.

        Args:
          name: The tensor.

        Returns:
          The index, from 0.
        """
        return self._owners[name]

    def gather(
        self, what: str, among: Collection[int], compute: Callable[[], list[np.ndarray]]
    ) -> dict[int, list[np.ndarray]]:
        """Writes this part's arrays and waits for the others'; see `Sharing.gather`.

        Args:
          what: The name of the file, equal in all parts.
          among: The parts that contribute.
          compute: Makes this part's arrays.

        Returns:
          The arrays of each part, by its index.

        Raises:
          WaitedError: If another part was inactive for too long.
          CheckpointError: If another part belongs to another output, or writing fails.
        """
        brought: dict[int, list[np.ndarray]] = {}
        if self.mine in among:
            path = self._path(self.mine, what)
            arrays = self._read(path)
            if arrays is None:
                arrays = compute()
                with explained("write", path):
                    path.parent.mkdir(exist_ok=True)
                disk.write_atomic(path, self._packed(arrays))
            brought[self.mine] = arrays
        others = sorted({*among} - {self.mine})
        signs: dict[int, tuple[int | None, float]] = {}
        while missing := [k for k in others if k not in brought]:
            for k in missing:
                arrays = self._read(self._path(k, what))
                if arrays is not None:
                    self._check(k)
                    brought[k] = arrays
            if missing := [k for k in missing if k not in brought]:
                self._wait(missing, signs)
        return brought

    def _path(self, k: int, what: str) -> Path:
        """Returns the file with a part's arrays."""
        return place(self._partial, k + 1) / STATISTICS / what

    def _check(self, k: int) -> None:
        """Raises CheckpointError if a part and this one do not belong together."""
        if k not in self._trusted:
            check_beside(self._partial, k + 1, self._part, self._head)
            self._trusted.add(k)

    def _wait(self, missing: Iterable[int], signs: dict[int, tuple[int | None, float]]) -> None:
        """Waits a moment; raises a WaitedError if a part was inactive for too long."""
        now, lost = time.monotonic(), []
        for k in missing:
            try:
                sign = os.stat(place(self._partial, k + 1) / ALIVE).st_mtime_ns
            except OSError:
                sign = None
            # Only this host's clock is used, because other hosts' clocks may differ.
            if k not in signs or signs[k][0] != sign:
                signs[k] = sign, now
            if now - signs[k][1] >= self._patience:
                lost.append(k + 1)
        if lost:
            who = several(lost, self._part.count)
            raise WaitedError(
                f"{self._part} has written its statistics and waits for the others; not "
                f"running: {who}; start the missing parts, then {argument('resume', 'True')} "
                "continues this one"
            )
        self._waiting(several([k + 1 for k in missing], self._part.count))
        time.sleep(min(_LOOK, self._patience / 4))

    def _packed(self, arrays: Sequence[np.ndarray]) -> bytes:
        """Arrays as bytes, after a checksum that also covers the identity of the output."""
        data = io.BytesIO()
        np.savez(data, *arrays)
        content = data.getvalue()
        return hashlib.sha256(self._mark + content).digest() + content

    def _read(self, path: Path) -> list[np.ndarray] | None:
        """The arrays in a file; None if it is not there, damaged, or of another output."""
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if hashlib.sha256(self._mark + data[_SEAL:]).digest() != data[:_SEAL]:
            return None
        with np.load(io.BytesIO(data[_SEAL:]), allow_pickle=False) as arrays:
            return [arrays[f"arr_{i}"] for i in range(len(arrays.files))]
