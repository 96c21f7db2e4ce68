"""The ledger is complete: each statement has a claim or a reason, and each claim a statement."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from theory import claims, coverage
from theory.coverage import EQUATIONS, STATEMENTS

CLAIMS = claims.all_claims()


def claim(name: str, source: str) -> claims.Claim:
    return replace(CLAIMS[0], id=name, source=source)


def test_nothing_is_missing():
    assert coverage.gaps(CLAIMS) == {}


def test_every_claim_answers_to_a_statement():
    assert coverage.orphans(CLAIMS) == []


def test_statements_and_equations_are_listed_once():
    names = [(s.paper, s.name) for s in STATEMENTS]
    assert len(set(names)) == len(names)
    numbers = [(s.paper, n) for s in STATEMENTS for n in s.equations]
    assert len(set(numbers)) == len(numbers)
    assert all(1 <= n <= EQUATIONS[paper] for paper, n in numbers)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("overtrained Theorem 4.1 (Section 4.1) and Theorem A.1", ["Theorems 4.1 and A.1"]),
        ("overtrained eqs. (16)-(18) (Appendix A.3)", ["Infinite batches", "The map f"]),
        ("overtrained Lemmas A.20 and A.22, sharpened", ["Lemmas A.20 and A.22"]),
        ("overtrained Appendix D, solved", ["Proposition D.1, Appendix D"]),
        ("sail Appendix C.2 (pp. 24-25)", ["Appendix C"]),
        ("sail Theorem 3's proof (Appendix E), by Lemma 2", ["Theorem 3", "Lemma 2"]),
        ("features-are-fate Fig. 5b, p. 28", ["Figure 5, Section 3.3"]),
        ("features-are-fate Fig. 50", []),
        ("beyond features-are-fate: Thm 3.9 in finite time", ["Beyond the paper"]),
        ("unified-merging Section V-B4, which has n", ["Remark 5, Section V-B, Appendix A-A1"]),
        ("sail Theorem 99, p. 6", []),
        ("sail, as said in words", []),
    ],
)
def test_a_source_decides_which_statements_are_answered(source, names):
    paper = next(paper for paper in EQUATIONS if paper in source)
    answered = coverage.answers([claim(f"{paper}/new/exact", source)])
    found = [s.name for s, ids in answered.items() if ids]
    assert len(found) == len(names)
    assert all(name in " ".join(found) for name in names)


@pytest.mark.slow
def test_what_is_missing_is_named():
    """A ledger without one theorem, a table without it, one that promises nothing, a reason that is
    none, and a claim on nothing."""
    of_theorem = [c for c in CLAIMS if c.id.startswith("sail/T2-")]
    without = [c for c in CLAIMS if c not in of_theorem]
    lost = {"sail": ["Theorem 2, Appendix B: no claim's source names Theorem 2"]}
    assert coverage.gaps(without) == lost
    table = [s for s in STATEMENTS if (s.paper, s.equations) != ("sail", (6, 7))]
    assert coverage.gaps(CLAIMS, table) == {"sail": ["eq. (6)", "eq. (7)"]}
    assert [line.split(":")[0] for line in coverage.orphans(CLAIMS, table)] == [
        c.id for c in of_theorem
    ]
    bare = coverage.Statement("overtrained", "Theorem 9", ())
    missing = coverage.gaps(CLAIMS, [*STATEMENTS, bare])
    assert missing == {"overtrained": ["Theorem 9: no claim's source names Theorem 9"]}
    excused = [replace(s, reason="defines") if s.name == "Lemma 2" else s for s in STATEMENTS]
    assert "has a reason to have no claims, and sail/L2-TV/printed" in str(
        coverage.gaps(CLAIMS, excused)
    )
    astray = [claim("sail/T9/exact", "sail Theorem 9"), claim("elsewhere/T9/exact", "elsewhere")]
    assert coverage.orphans([*astray, CLAIMS[0]]) == [
        "sail/T9/exact: its source, 'sail Theorem 9', names no statement of theory/coverage.py"
    ]


def test_the_report_names_every_claim_and_every_reason():
    found = coverage.report(CLAIMS)
    text = " ".join(found.split())
    for statement, ids in coverage.answers(CLAIMS).items():
        assert statement.name in text
        assert statement.reason in text
        for name in ids:
            assert name.removeprefix(f"{statement.paper}/") in text
    assert max(map(len, found.splitlines())) <= 100
    assert "Gaps" not in found
    assert text.endswith("every claim on them answers to a statement.")


def test_the_report_ends_with_what_is_missing():
    without = [c for c in CLAIMS if not c.id.startswith("sail/T2-")]
    found = coverage.report([*without, claim("sail/T9/exact", "sail Theorem 9")])
    assert found.endswith(
        "Gaps:\n  sail: Theorem 2, Appendix B: no claim's source names Theorem 2\n\n"
        "Claims that answer to no statement:\n  sail/T9/exact: its source, 'sail Theorem 9', names "
        "no statement of theory/coverage.py"
    )


@pytest.mark.parametrize("text", ["1", "1-3", "1-3 7", "4 6 8-9"])
def test_equations_are_spelt_as_the_table_does(text):
    assert coverage._spelt(coverage._numbers(text)) == text


def test_the_papers_can_be_cited_by_the_names_of_their_claims():
    entries = (Path(__file__).parents[2] / "docs" / "papers.bib").read_text()
    assert set(re.findall(r"^@(?!software)\w+\{(.*),$", entries, re.MULTILINE)) == {
        c.id.split("/")[0] for c in CLAIMS
    }
