"""A table of every numbered statement of the papers, with the claims that test it.

A statement is a theorem, lemma, proposition, corollary or definition, or a displayed equation that
states a result. The table lists equations by number, so that none can be forgotten. A statement
without claims has a reason instead. `gaps` and `orphans` are both empty for a complete ledger.

The source of a claim determines which statements it tests. "Thm 3.6, eq. (10), p. 6" refers to
Theorem 3.6, to which eq. (10) belongs. A source without a theorem or an equation, such as "App.
C.2", is assigned by its appendix, section or figure. Text in brackets, such as "(Section 4.2)", is
ignored. A source with the word "beyond" belongs to the additions to a paper, if the table has a row
for them.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

# The number of numbered equations of each paper in the table.
EQUATIONS = {
    "features-are-fate": 159,
    "overtrained": 20,
    "cross-task-linearity": 4,
    "sail": 13,
    "unified-merging": 24,
}


@runtime_checkable
class Sourced(Protocol):
    """A claim, or the verdict on one."""

    @property
    def id(self) -> str:
        """ "paper/statement/variant"."""
        ...

    @property
    def source(self) -> str:
        """The location of the claim in its paper."""
        ...


@dataclass(frozen=True)
class Statement:
    """One statement of a paper.

    Attributes:
      paper: Key of the paper in `EQUATIONS`.
      name: Its name, such as "Theorem 3.6" or "Figure 5, Section 3.3".
      equations: Numbers of the displayed equations that belong to it.
      reason: The reason why no claim tests it. Empty if claims do.
    """

    paper: str
    name: str
    equations: tuple[int, ...]
    reason: str = ""


_NUMBER = r"(?:[IVX]+|[A-Z]|\d+)(?:[.-]?[A-Z]?\d+)*[a-z]?\b"
_NUMBERS = rf"\.? ({_NUMBER}(?:(?:, and |, | and | to |-){_NUMBER})*)"
_RESULTS = "Theorem|Thm|Lemma|Proposition|Prop|Corollary|Definition|Assumption|Remark"
_PROVED = "Theorem|Lemma|Proposition|Corollary"
_PLACES = "Section|Sec|Appendix|Appendices|App|Figure|Fig"
_SHORT = {"Thm": "Theorem", "Prop": "Proposition", "Sec": "Section", "Fig": "Figure"}
_SHORT |= {"App": "Appendix", "Appendices": "Appendix"}


def _named(text: str, kinds: str) -> set[str]:
    """Finds references of given kinds, such as "Lemma 4", outside brackets.

    >>> sorted(_named("Thms 4.4 and A.3 (Section 2), by Prop 1", _RESULTS))
    ['Proposition 1', 'Theorem 4.4', 'Theorem A.3']
    """
    outside = re.sub(r"\([^()]*[A-Za-z][^()]*\)", "", text)
    found = re.findall(rf"\b({kinds})s?{_NUMBERS}", outside)
    return {
        f"{_SHORT.get(kind, kind)} {number}"
        for kind, numbers in found
        for number in re.findall(_NUMBER, numbers)
    }


def _equations(text: str) -> set[int]:
    """Reads "eqs. (42)-(44)" as 42, 43, 44."""
    found = re.findall(r"\((\d+)\)(?:-\((\d+)\))?", text)
    return {n for first, last in found for n in range(int(first), int(last or first) + 1)}


def _inside(place: str, larger: str) -> bool:
    """Checks whether "Appendix C.2" is in "Appendix C"; "Figure 40" is not in "Figure 4"."""
    after = place.removeprefix(larger)[:1]
    return place == larger or (place.startswith(larger) and not (larger[-1] + after).isdigit())


def _answered(claim: Sourced, statements: Sequence[Statement]) -> list[Statement]:
    """Finds the statements that a claim tests."""
    own = [s for s in statements if s.paper == claim.id.split("/")[0]]
    beyond = [s for s in own if s.name == _BEYOND]
    if beyond and "beyond" in claim.source:
        return beyond
    results, equations = _named(claim.source, _RESULTS), _equations(claim.source)
    found = [
        s for s in own if _named(s.name, _RESULTS) & results or equations.intersection(s.equations)
    ]
    places = _named(claim.source, _PLACES)
    return found or [
        s
        for s in own
        if any(_inside(p, larger) for p in places for larger in _named(s.name, _PLACES))
    ]


def position(claim: Sourced) -> int:
    """Finds the position of a claim in the order of the papers' statements.

    Args:
      claim: The claim.

    Returns:
      The position in `STATEMENTS` of the first statement that it tests. A claim that tests none
      comes last.
    """
    found = map(STATEMENTS.index, _answered(claim, STATEMENTS))
    return min(found, default=len(STATEMENTS))


def answers(
    claims: Iterable[Sourced], statements: Sequence[Statement] | None = None
) -> dict[Statement, list[str]]:
    """Finds the claims that test each statement, by their sources.

    Args:
      claims: The claims.
      statements: The table to compare with; None for `STATEMENTS`.

    Returns:
      The ids of the claims by statement, including statements without claims.
    """
    statements = STATEMENTS if statements is None else statements
    found: dict[Statement, list[str]] = {statement: [] for statement in statements}
    for claim in claims:
        for statement in _answered(claim, statements):
            found[statement].append(claim.id)
    return found


def _numbers(text: str) -> tuple[int, ...]:
    """Expands "1-3 7" to 1, 2, 3, 7."""
    ranges = (part.split("-") for part in text.split())
    return tuple(n for r in ranges for n in range(int(r[0]), int(r[-1]) + 1))


def _table(paper: str, rows: Mapping[str, str | tuple[str, str]]) -> list[Statement]:
    """Builds statements from equations, or from pairs of equations and a reason."""
    pairs = {name: (row, "") if isinstance(row, str) else row for name, row in rows.items()}
    return [
        Statement(paper, name, _numbers(numbers), reason)
        for name, (numbers, reason) in pairs.items()
    ]


_DEFINES, _ASSUMES = "a definition, not a statement", "an assumption of the statements below it"
_MEASURES = "a measurement on the paper's own networks, not a claim"
_INTERPRETS = "interprets neighbouring statements, which have claims"
_BEYOND = "Beyond the paper"

_FATE = {
    "Tasks, losses, flows, transferability": ("1-9", _DEFINES),
    "Assumptions 2.1, 3.1, 3.2": ("", _ASSUMES),
    "Dudley metric": ("23 24", _DEFINES),
    "Theorem 2.2, Section 2.1": "25-34",
    "Figure 5, Section 3.3": "",
    "Assumption (22), Appendix D.1": "22",
    "Conservation law": "35",
    "Lemma 3.3": "36-41 47-49",
    "Bound of singular values": "42-46",
    "Lemma B.1": "50-70",
    "Theorem 3.4": "71-77",
    "Theorem 3.5": "78-90",
    "Theorem 3.6": "10 91-103",
    "Objectives of the last layer": ("11 14", _DEFINES),
    "Theorem 3.7": "12 104-120",
    "Transferability of the last layer": "13",
    "Theorem 3.8": "15 121-141",
    "Theorem 3.9": "16 17 142-144",
    "Student and teacher": ("18-20 145-147 149 154-156", _DEFINES),
    "Section 4, Figure 4": "21",
    "Figure 4c": ("", f"the exponent -1.18 is {_MEASURES}"),
    "Appendix C": "148 150-153 157-159",
    _BEYOND: "",
}

_OVERTRAINED = {
    "Sections 2 and 3": ("1", _MEASURES),
    "Losses, ideal starts, constants": ("3 4 7 8 12 13", _DEFINES),
    "Theorems 4.1 and A.1": "5 6 9",
    "Definition 4.2": "",
    "Proposition 4.3 and Lemma A.4": "2 14 15",
    "Theorems 4.4 and A.3": "",
    "Definition 4.5": ("", f"{_DEFINES}: Theorem 4.7 has its sharp threshold"),
    "Theorems 4.6 and A.24": "",
    "Theorems 4.7 and A.25": "",
    "Lemma A.5": "",
    "Assumption A.2 and Lemma A.6": "",
    "Gradient descent": "10 11",
    "Infinite batches": "16 17",
    "The map f": "18",
    "Lemma A.7": "",
    "Assumption A.8 and Lemma A.9": "",
    "Assumption A.10 and Lemma A.11": "",
    "Lemmas A.12, A.14 and Assumption A.13": "",
    "Lemma A.15": "",
    "Lemma A.16": "",
    "Lemma A.17": "",
    "Lemma A.18": "",
    "Lemma A.19": "",
    "Lemmas A.20 and A.22": "",
    "Assumption A.21": "",
    "Lemma A.23": "",
    "Lemma A.26": "",
    "Lemma A.27": "",
    "Lemma A.28": "",
    "Proposition D.1, Appendix D": "19 20",
    _BEYOND: "",
}

_LINEARITY = {
    "Definition 1": "",
    "Definition 2": "",
    "Lemma 1": "",
    "Averages of features": "1",
    "Lemma 2": "",
    "Addition": "2",
    "Negation": "3 4",
    "Theorem 1, Remarks, Appendix A.3": "",
    "Appendix B.2": "",
    "Sections 3 to 5, Figures": ("", _MEASURES),
}

_SAIL = {
    "Proposition 1": "1",
    "Optimal parameters": ("2", _DEFINES),
    "Assumptions 1 to 8": ("", _ASSUMES),
    "Theorem 1, Appendix A": "5",
    "Theorem 2, Appendix B": "6 7",
    "Appendix C": "",
    "Maps of width and depth, Appendix F": "8 9",
    "Definition 1, Theorem 3, Appendix E": "3 4 10-13",
    "Lemma 2": "",
    "Section 4.4, the weight by MMD": "",
    "Definition 2": "",
    "Lemma 1": "",
    "Theorem 4, Appendix D": "",
    "Sections 4.3 to 4.5, Appendices H to K": ("", _MEASURES),
}

_MERGING = {
    "Population and empirical risk": ("1 2", _DEFINES),
    "Excess error": "3",
    "Definition 1": ("", _DEFINES),
    "Definition 2": "4",
    "Assumptions 1 to 5": ("", _ASSUMES),
    "Lemma 1 (= Lemma 2)": "5",
    "Theorem 1": "13",
    "Theorem 2": "6 7",
    "Theorem 3": "23 24",
    "Corollary 1": "8-10",
    "Lemma 3": "11 12",
    "Effective steps and weights": "14",
    "Assumption 6 and Lemma 4": "15-18",
    "Theorem 4": "19 20",
    "Corollary 2": "21 22",
    "Remark 5, Section V-B, Appendix A-A1": "",
    "Interpretations (Remarks 1 to 4)": ("", _INTERPRETS),
    "Remark 6, Adam": "",
    "Experiments (Section V), Appendices B and C": ("", _MEASURES),
}

STATEMENTS = (
    *_table("features-are-fate", _FATE),
    *_table("overtrained", _OVERTRAINED),
    *_table("cross-task-linearity", _LINEARITY),
    *_table("sail", _SAIL),
    *_table("unified-merging", _MERGING),
)


def gaps(
    claims: Iterable[Sourced], statements: Sequence[Statement] | None = None
) -> dict[str, list[str]]:
    """Lists the statements that a set of claims does not cover.

    Args:
      claims: The claims.
      statements: The table to compare with; None for `STATEMENTS`.

    Returns:
      A list for each paper with gaps. It contains the statements with neither claims nor a reason,
      or with both, the theorems that no source mentions, and the equations that no statement lists.
    """
    claims = list(claims)
    found, sources = answers(claims, statements), {claim.id: claim.source for claim in claims}
    missing: dict[str, list[str]] = {paper: [] for paper in EQUATIONS}
    for statement, ids in found.items():
        named = _named("; ".join(sources[name] for name in ids), _RESULTS)
        unnamed = sorted(_named(statement.name, _PROVED) - named)
        if (unnamed or not ids) and not statement.reason:
            what = ", ".join(unnamed) or "it"
            missing[statement.paper].append(f"{statement.name}: no claim's source names {what}")
        if ids and statement.reason:
            both = f"{statement.name}: has a reason to have no claims, and {', '.join(ids)}"
            missing[statement.paper].append(both)
    for paper, count in EQUATIONS.items():
        listed = {n for s in found if s.paper == paper for n in s.equations}
        missing[paper] += [f"eq. ({n})" for n in range(1, count + 1) if n not in listed]
    return {paper: uncovered for paper, uncovered in missing.items() if uncovered}


def orphans(claims: Iterable[Sourced], statements: Sequence[Statement] | None = None) -> list[str]:
    """Lists the claims on these papers that belong to no statement.

    Args:
      claims: The claims.
      statements: The table to compare with; None for `STATEMENTS`.

    Returns:
      A line for each claim, with its id and its source. Claims on papers outside the table are
      ignored.
    """
    table = STATEMENTS if statements is None else statements
    return [
        f"{claim.id}: its source, '{claim.source}', names no statement of theory/coverage.py"
        for claim in claims
        if claim.id.split("/")[0] in EQUATIONS and not _answered(claim, table)
    ]


def report(claims: Iterable[Sourced], statements: Sequence[Statement] | None = None) -> str:
    """Describes, paper by paper, which claims test each statement.

    Args:
      claims: The claims.
      statements: The table to report on; None for `STATEMENTS`.

    Returns:
      A text of several lines. A statement without claims shows its reason. At the end it lists gaps
      and claims without a statement, or states that there are none.
    """
    claims, blocks = list(claims), []
    found = answers(claims, statements)
    for paper, equations in EQUATIONS.items():
        own = {s: ids for s, ids in found.items() if s.paper == paper}
        if own:
            count = len({name for ids in own.values() for name in ids})
            head = f"{paper}: {equations} numbered equations"
            counts = f"{_count(len(own), 'statement')}, {_count(count, 'claim')}"
            lines = [f"{head}, {counts}", *(_line(s, ids) for s, ids in own.items())]
            blocks.append("\n".join(lines))
    missing, astray = gaps(claims, statements), orphans(claims, statements)
    if missing:
        lines = (f"  {paper}: {'; '.join(names)}" for paper, names in missing.items())
        blocks.append("\n".join(["Gaps:", *lines]))
    if astray:
        blocks.append(
            "\n".join(["Claims that answer to no statement:", *(f"  {line}" for line in astray)])
        )
    if not missing and not astray:
        blocks.append(
            f"Every statement and numbered equation of {len(EQUATIONS)} papers has claims or a\n"
            "reason to have none; every claim on them answers to a statement."
        )
    return "\n\n".join(blocks)


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _line(statement: Statement, answers: Sequence[str]) -> str:
    """Formats one statement with its claims, wrapped to 100 columns."""
    where = ", eq{}. {}".format(
        "s" if len(statement.equations) > 1 else "", _spelt(statement.equations)
    )
    names = [name.removeprefix(f"{statement.paper}/") for name in answers]
    text = ", ".join(names) or f"no claims: {statement.reason or 'and no reason'}"
    entry = f"{statement.name}{where if statement.equations else ''}: {text}"
    return textwrap.fill(
        entry, 100, initial_indent="  ", subsequent_indent=" " * 6, break_on_hyphens=False
    )


def _spelt(numbers: Sequence[int]) -> str:
    """Abbreviates 1, 2, 3, 7 as "1-3 7"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    ends = ("-".join(str(n) for n in sorted({run[0], run[-1]})) for run in runs)
    return " ".join(ends)
