"""The ledger is complete: each statement has a claim or a reason, each claim a statement."""

import re
from pathlib import Path

import pytest

from theory import claims, coverage
from theory.coverage import EQUATIONS, STATEMENTS

IDS = [c.id for c in claims.all_claims()]


def test_nothing_is_missing():
    assert coverage.gaps(IDS) == {}


def test_every_claim_answers_to_a_statement():
    assert coverage.orphans(IDS) == []


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda s: f"{s.paper}: {s.name}")
def test_claims_or_a_reason(statement):
    assert bool(statement.claims) != bool(statement.reason)
    assert bool(statement.answers(IDS)) == bool(statement.claims)
    assert all(1 <= n <= EQUATIONS[statement.paper] for n in statement.equations)


def test_statements_and_equations_are_listed_once():
    names = [(s.paper, s.name) for s in STATEMENTS]
    assert len(set(names)) == len(names)
    numbers = [(s.paper, n) for s in STATEMENTS for n in s.equations]
    assert len(set(numbers)) == len(numbers)


def test_what_is_missing_is_named():
    """A ledger without one theorem, a table without it, one that promises nothing, and a claim on
    nothing."""
    without = [i for i in IDS if not i.startswith("sail/T2-")]
    assert coverage.gaps(without) == {"sail": ["Theorem 2, Appendix B: T2-*"]}
    table = [s for s in STATEMENTS if (s.paper, s.equations) != ("sail", (6, 7))]
    assert coverage.gaps(IDS, table) == {"sail": ["eq. (6)", "eq. (7)"]}
    assert {i for i in IDS if i.startswith("sail/T2-")} == set(coverage.orphans(IDS, table))
    bare = coverage.Statement("overtrained", "Theorem 9", (), ())
    assert coverage.gaps(IDS, [*STATEMENTS, bare]) == {"overtrained": ["Theorem 9"]}
    assert coverage.orphans(["sail/T9/exact", "elsewhere/T9/exact", IDS[0]]) == ["sail/T9/exact"]


def test_the_report_names_every_claim_and_every_reason():
    found = coverage.report(IDS)
    text = " ".join(found.split())
    for statement in STATEMENTS:
        assert statement.name in text
        assert statement.reason in text
        for name in statement.answers(IDS):
            assert name.removeprefix(f"{statement.paper}/") in text
    assert max(map(len, found.splitlines())) <= 100
    assert "Gaps" not in found
    assert text.endswith("every claim on them answers to a statement.")


def test_the_report_ends_with_what_is_missing():
    without = [i for i in IDS if not i.startswith("sail/T2-")]
    found = coverage.report([*without, "sail/T9/exact"])
    assert found.endswith(
        "Gaps:\n  sail: Theorem 2, Appendix B: T2-*\n\n"
        "Claims that answer to no statement:\n  sail/T9/exact"
    )


@pytest.mark.parametrize("text", ["1", "1-3", "1-3 7", "4 6 8-9"])
def test_equations_are_spelt_as_the_table_does(text):
    assert coverage._spelt(coverage._numbers(text)) == text


def test_the_papers_can_be_cited_by_the_names_of_their_claims():
    entries = (Path(__file__).parents[2] / "docs" / "papers.bib").read_text()
    assert set(re.findall(r"^@\w+\{(.*),$", entries, re.MULTILINE)) == {
        name.split("/")[0] for name in IDS
    }
