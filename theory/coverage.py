"""A table of every numbered statement of the papers, with the claims that test it.

A statement is a theorem, lemma, proposition, corollary or definition, or a displayed equation that
states a result. Equations are listed by their numbers, so that none can go missing. A statement
without claims has a reason instead. `gaps` and `orphans` are both empty for a complete ledger.
"""

import fnmatch
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# How many equations each paper numbers; its papers are those accounted for here.
EQUATIONS = {
    "features-are-fate": 159,
    "overtrained": 20,
    "cross-task-linearity": 4,
    "sail": 13,
    "unified-merging": 24,
}


@dataclass(frozen=True)
class Statement:
    """One statement of a paper, with the claims that test it or the reason why none does.

    Attributes:
      paper: Key of the paper in `EQUATIONS`.
      name: What the statement is called, as "Theorem 3.6".
      equations: Numbers of the displayed equations that belong to it.
      claims: Glob patterns over the ids of the paper's claims, without "paper/". Each must match at
        least one claim of a complete ledger.
      reason: Why there are no claims; empty if there are.
    """

    paper: str
    name: str
    equations: tuple[int, ...]
    claims: tuple[str, ...]
    reason: str = ""

    def answers(self, ids: Iterable[str]) -> list[str]:
        """Selects the claims that belong to this statement.

        Args:
          ids: Ids of claims, "paper/name".

        Returns:
          The ids that match one of the patterns, in their order.
        """
        return [
            name for name in ids if any(_matches(name, glob, self.paper) for glob in self.claims)
        ]


def _matches(name: str, glob: str, paper: str) -> bool:
    return fnmatch.fnmatchcase(name, f"{paper}/{glob}")


def _numbers(text: str) -> tuple[int, ...]:
    """Expands "1-3 7" to 1, 2, 3, 7."""
    ranges = (part.split("-") for part in text.split())
    return tuple(n for r in ranges for n in range(int(r[0]), int(r[-1]) + 1))


def _table(
    paper: str, rows: Mapping[str, tuple[str, str] | tuple[str, str, str]]
) -> list[Statement]:
    """Builds statements from rows of (equations, globs), or (equations, "", reason)."""
    return [
        Statement(paper, name, _numbers(row[0]), tuple(row[1].split()), *row[2:])
        for name, row in rows.items()
    ]


_DEFINES, _ASSUMES = "defines, and states nothing", "an assumption of the statements below it"
_MEASURES = "a measurement on networks of the paper's own: an experiment, not a claim"
_INTERPRETS = "reads the statements beside it, whose claims judge it"
_BEYOND = "Beyond the paper"

_FATE = {
    "Tasks, losses, flows, transferability": ("1-9", "", _DEFINES),
    "Assumptions 2.1, 3.1, 3.2": ("", "", _ASSUMES),
    "Dudley metric": ("23 24", "", _DEFINES),
    "Theorem 2.2": ("25-34", "T2.2-*"),
    "Figure 5, Section 3.3": ("", "Fig5-*"),
    "Assumption (22), Appendix D.1": ("22", "eq22-*"),
    "Conservation law": ("35", "eq35/*"),
    "Lemma 3.3": ("36-41 47-49", "L3.3/* eq48/*"),
    "Lemma 3.3, the bound of singular values": ("42-46", "eq44/* eq46/*"),
    "Lemma B.1": ("50-70", "LB.1-* eq54/* eq59/* eq60/* eq62/* eq69/*"),
    "Theorem 3.4": ("71-77", "T3.4/* T3.4-norm/* eq71/*"),
    "Theorem 3.5": ("78-90", "T3.5/* eq87/* eq90/*"),
    "Theorem 3.6": ("10 91-103", "T3.6-* eq96/* eq102/*"),
    "Objectives of the last layer": ("11 14", "", _DEFINES),
    "Theorem 3.7": ("12 104-120", "T3.7/* eq113/* eq120/*"),
    "Transferability of the last layer": ("13", "eq13/* eq13-*"),
    "Theorem 3.8": ("15 121-141", "T3.8/* T3.8-monotone/* eq138/* eq139/* eq140/*"),
    "Theorem 3.9": ("16 17 142-144", "T3.9-* eq17-* eq144/*"),
    "Student and teacher": ("18-20 145-149 154-156", "", _DEFINES),
    "Section 4, Figure 4": ("21", "S4-* F4* eq21-*"),
    "Figure 4c": ("", "", f"the exponent -1.18 is {_MEASURES}"),
    "Appendix C": ("150-153 157-159", "eq150/* eq151/* eq153-* eq157/* eq158/* eq159/*"),
    _BEYOND: ("", "covariance-* flow-network/* finite-source-* rank-k-* penalised-*"),
}

_OVERTRAINED = {
    "Sections 2 and 3": ("1", "", _MEASURES),
    "Losses, ideal starts, constants": ("3 4 7-9 12 13", "", _DEFINES),
    "Theorems 4.1 and A.1": ("5 6", "A.1-*"),
    "Definition 4.2": ("", "D4.2/* D4.2-*"),
    "Proposition 4.3 and Lemma A.4": ("2 14 15", "P4.3/* P4.3-* A.4-first/*"),
    "Theorems 4.4 and A.3": ("", "T4.4/* T4.4-*"),
    "Definition 4.5": ("", "", f"{_DEFINES}: Theorem 4.7 has its sharp threshold"),
    "Theorems 4.6 and A.24": ("", "T4.6/* T4.6-*"),
    "Theorems 4.7 and A.25": ("", "T4.7-* A.25-*"),
    "Lemma A.5": ("", "A.5/*"),
    "Assumption A.2 and Lemma A.6": ("", "A.6/*"),
    "Gradient descent": ("10 11", "eq10/* eq11/*"),
    "Infinite batches": ("16 17", "eq16/*"),
    "The map f": ("18", "eq18/*"),
    "Lemma A.7": ("", "A.7/* A.7-flow/*"),
    "Assumption A.8 and Lemma A.9": ("", "A.9/*"),
    "Assumption A.10 and Lemma A.11": ("", "A.10/* A.11/*"),
    "Lemmas A.12, A.14 and Assumption A.13": ("", "A.13/*"),
    "Lemma A.15": ("", "A.15/*"),
    "Lemma A.16": ("", "A.16/*"),
    "Lemma A.17": ("", "A.17/*"),
    "Lemma A.18": ("", "A.18/*"),
    "Lemma A.19": ("", "A.19/*"),
    "Lemmas A.20 and A.22": ("", "A.20/* A.22/* A.22-bound/*"),
    "Assumption A.21": ("", "A.21-steps/* A.13/*"),
    "Lemma A.23": ("", "A.23/*"),
    "Lemma A.26": ("", "A.26/*"),
    "Lemma A.27": ("", "A.27-*"),
    "Lemma A.28": ("", "A.28-*"),
    "Proposition D.1": ("19 20", "D.1/* D.1-*"),
}

_LINEARITY = {
    "Definition 1": ("", "L1-LMC/*"),
    "Definition 2": ("", "L1/*"),
    "Lemma 1": ("", "L1/* L1-*"),
    "Averages of features": ("1", "eq1-*"),
    "Lemma 2": ("", "L2/* L2-*"),
    "Addition": ("2", "eq2/* eq2-*"),
    "Negation": ("3 4", "eq3/* eq3-* eq4/* eq4-*"),
    "Theorem 1, Remarks, Appendix A.3": ("", "T1/* T1-*"),
    "Appendix B.2": ("", "B.2-*"),
    "Sections 3 to 5, Figures": ("", "", _MEASURES),
}

_SAIL = {
    "Proposition 1": ("1", "P1/*"),
    "Optimal parameters": ("2", "", _DEFINES),
    "Definition 1": ("3 4", "T3a/* T3b/*"),
    "Assumptions 1 to 8": ("", "", _ASSUMES),
    "Theorem 1, Appendix A": ("5", "T1/* T1-*"),
    "Theorem 2, Appendix B": ("6 7", "T2-*"),
    "Appendix C": ("", "C-*"),
    "Maps of width and depth, Appendix F": ("8 9", "F1-* F2-*"),
    "Theorem 3, Appendix E": ("10-13", "T3a/* T3a-* T3b/* T3b-* T3-order/* E-lda/*"),
    "Lemma 2": ("", "L2/* L2-*"),
    "Section 4.4, the weight by MMD": ("", "S4.4-*"),
    "Definition 2": ("", "D2-thresholds/*"),
    "Lemma 1": ("", "L1/* L1-mean/*"),
    "Theorem 4, Appendix D": ("", "T4/* T4-*"),
    "Sections 4.3 to 4.5, Appendices H to K": ("", "", _MEASURES),
}

_MERGING = {
    "Population and empirical risk": ("1 2", "", _DEFINES),
    "Excess error": ("3", "excess/* generalisation/* optimisation/*"),
    "Definition 1": ("", "", _DEFINES),
    "Definition 2": ("4", "T1/ours"),
    "Assumptions 1 to 5": ("", "", _ASSUMES),
    "Lemma 1 (= Lemma 2)": ("5", "L1-* eq5-*"),
    "Theorem 1": ("13", "T1/* T1-*"),
    "Theorem 2": ("6 7", "T2/* T2-* surrogate-gradient/* chi-square/* eq7/* eq7-*"),
    "Theorem 3": ("23 24", "T3/* T3-* step-sizes/*"),
    "Corollary 1": ("8-10", "C1-* eq9/* eq10/*"),
    "Lemma 3": ("11 12", "L3-*"),
    "Effective steps and weights": ("14", "eq14-*"),
    "Assumption 6 and Lemma 4": ("15-18", "L4/* eq17/*"),
    "Theorem 4": ("19 20", "C2/* C2-* chi-square/* eq7/* eq14-*"),
    "Corollary 2": ("21 22", "C2/* C2-* chi-square/* eq7/*"),
    "Remark 5, Appendix A-A1": ("", "law-*"),
    "Remarks 1 to 4": ("", "", _INTERPRETS),
    "Remark 6, Adam": ("", "eq14-adam/* eq14-adam-*"),
    "Section V, Appendices B and C": ("", "", _MEASURES),
}

STATEMENTS = (
    *_table("features-are-fate", _FATE),
    *_table("overtrained", _OVERTRAINED),
    *_table("cross-task-linearity", _LINEARITY),
    *_table("sail", _SAIL),
    *_table("unified-merging", _MERGING),
)


def gaps(ids: Iterable[str], statements: Sequence[Statement] = STATEMENTS) -> dict[str, list[str]]:
    """Lists what a set of claims leaves uncovered.

    Args:
      ids: Ids of all claims.
      statements: The table to compare with.

    Returns:
      For each paper with gaps: the statements that have neither claims nor a reason, the patterns
      that match no id, and the equations that no statement lists.
    """
    ids, missing = list(ids), {paper: [] for paper in EQUATIONS}
    for statement in statements:
        uncovered = missing[statement.paper]
        if not statement.claims and not statement.reason:
            uncovered.append(statement.name)
        for glob in statement.claims:
            if not any(_matches(name, glob, statement.paper) for name in ids):
                uncovered.append(f"{statement.name}: {glob}")
    for paper, count in EQUATIONS.items():
        listed = {n for s in statements if s.paper == paper for n in s.equations}
        missing[paper] += [f"eq. ({n})" for n in range(1, count + 1) if n not in listed]
    return {paper: uncovered for paper, uncovered in missing.items() if uncovered}


def orphans(ids: Iterable[str], statements: Sequence[Statement] = STATEMENTS) -> list[str]:
    """Lists the claims on these papers that belong to no statement.

    Args:
      ids: Ids of all claims.
      statements: The table to compare with.

    Returns:
      The ids without a statement; ids on papers outside of the table are ignored.
    """
    return [
        name
        for name in ids
        if name.split("/")[0] in EQUATIONS and not any(s.answers([name]) for s in statements)
    ]


def report(ids: Iterable[str], statements: Sequence[Statement] = STATEMENTS) -> str:
    """Describes, paper by paper, which claims test each statement.

    Args:
      ids: Ids of all claims.
      statements: The table to report on.

    Returns:
      A text of several lines. A statement without claims shows its reason. Gaps and claims without
      a statement come last, or a sentence that there are none.

    >>> only = [Statement("sail", "Definition 1", (3, 4), ("T3a/*",))]
    >>> print(report(["sail/T3a/exact", "sail/T4/exact"], only).partition("Gaps:")[0].rstrip())
    sail: 13 numbered equations, 1 statement, 1 claim
      Definition 1, eqs. 3-4: T3a/exact
    """
    ids, blocks = list(ids), []
    for paper, equations in EQUATIONS.items():
        own = [s for s in statements if s.paper == paper]
        if own:
            claims = {name for s in own for name in s.answers(ids)}
            head = f"{paper}: {equations} numbered equations"
            counts = f"{_count(len(own), 'statement')}, {_count(len(claims), 'claim')}"
            lines = [f"{head}, {counts}", *(_line(s, s.answers(ids)) for s in own)]
            blocks.append("\n".join(lines))
    missing, astray = gaps(ids, statements), orphans(ids, statements)
    if missing:
        lines = (f"  {paper}: {'; '.join(names)}" for paper, names in missing.items())
        blocks.append("\n".join(["Gaps:", *lines]))
    if astray:
        blocks.append(
            "\n".join(["Claims that answer to no statement:", *(f"  {i}" for i in astray)])
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
