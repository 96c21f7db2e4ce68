"""Reads the list of the papers' figures, tables and settings, for the papers' pages."""

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

HOW_FAR = {
    "faithful": "computed or run as in the paper, at the paper's sizes if it prints them",
    "reduced": "the same question with smaller networks, other data, fewer repetitions, coarser "
    "steps, a special case or a corrected formula. A listed preset with the paper's own setting "
    "was not run to its end",
    "needs files": "a command exists, and needs data or checkpoints from you. It was tested only "
    "on tiny files of the same formats",
    "not done": "missing, or different from the paper",
    "nothing to run": "a sketch, or a table of words",
}
"""The statuses of a line, in the order of the pages."""


@dataclass(frozen=True)
class Line:
    """One figure, table or setting of a paper, or a range of them.

    Attributes:
      item: Its number, panel or section.
      shows: Its subject.
      how_far: Its status, a key of `HOW_FAR`.
      here: The commands of `sail-jax` that were run, without `run`.
      own: The commands that run the paper's own setting, if they differ.
      claims: Globs over the claims of the paper.
      why: The difference from the paper, or the reason why it is missing.
    """

    item: str
    shows: str
    how_far: str
    here: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    why: str = ""

    @property
    def numbers(self) -> list[tuple[str, int]]:
        """The numbered figures and tables of the line, such as ("Figure", 3)."""
        found = re.match(r"(Figure|Table)s? ([IVX]+|\d+)(?:-(\d+))?", self.item)
        if not found:
            return []
        kind, first, last = found.groups()
        low = int(first) if first.isdigit() else ["I", "II", "III", "IV"].index(first) + 1
        return [(kind, number) for number in range(low, int(last or low) + 1)]

    @property
    def count(self) -> int:
        """The number of figures, tables or settings of the line."""
        return len(self.numbers) or 1


@dataclass(frozen=True)
class Paper:
    """The list of one paper.

    Attributes:
      figures: The number of its numbered figures.
      tables: The number of its numbered tables.
      lines: The lines of the list.
    """

    figures: int
    tables: int
    lines: tuple[Line, ...]

    def counts(self) -> dict[str, int]:
        """Counts figures, tables and settings by their status.

        Returns:
          The counts in the order of `HOW_FAR`.
        """
        found = Counter[str]()
        for line in self.lines:
            found[line.how_far] += line.count
        return {status: found[status] for status in HOW_FAR}


def read() -> dict[str, Paper]:
    """Reads the list of all papers, `figures.yaml`.

    Returns:
      The papers by their keys in the ledger.

    Raises:
      TypeError: If an entry has an unknown field, or lacks one.
    """
    text = Path(__file__).with_name("figures.yaml").read_text(encoding="utf-8")
    papers = yaml.safe_load(text)
    return {
        key: Paper(
            entry["figures"],
            entry["tables"],
            tuple(
                Line(**{k: tuple(v) if isinstance(v, list) else v for k, v in line.items()})
                for line in entry["lines"]
            ),
        )
        for key, entry in papers.items()
    }


def command(text: str) -> list[str]:
    """Splits a command of the list into the arguments of `sail-jax`.

    Args:
      text: A study or another command, with options.

    Returns:
      The arguments. For a study they begin with `run`.
    """
    from sail_jax.cli.finder import commands

    words = text.split()
    return words if words[0] in commands() else ["run", *words]


def statements(line: Line, ids: Iterable[str]) -> list[str]:
    """Selects the claims of a line, one for each statement.

    Args:
      line: The line.
      ids: The ids of the paper's claims, without its key.

    Returns:
      The first id of each statement with claims that match one of the line's globs.
    """
    first: dict[str, str] = {}
    for name in ids:
        if any(fnmatch.fnmatchcase(name, glob) for glob in line.claims):
            first.setdefault(name.rsplit("/", 1)[0], name)
    return list(first.values())
