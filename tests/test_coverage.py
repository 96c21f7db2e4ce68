"""The ledger is complete: each statement has a claim or a reason, each claim a statement."""

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
    table = [s for s in STATEMENTS if s.equations != (6, 7)]
    assert coverage.gaps(IDS, table) == {"sail": ["eq. (6)", "eq. (7)"]}
    assert {i for i in IDS if i.startswith("sail/T2-")} == set(coverage.orphans(IDS, table))
    bare = coverage.Statement("overtrained", "Theorem 9", (), ())
    assert coverage.gaps(IDS, [*STATEMENTS, bare]) == {"overtrained": ["Theorem 9"]}
    assert coverage.orphans(["sail/T9/exact", "elsewhere/T9/exact", IDS[0]]) == ["sail/T9/exact"]
