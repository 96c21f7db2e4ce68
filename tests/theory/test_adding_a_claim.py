"""The page "Add a claim" is correct: its claim is added in a folder, checked and covered."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from experiments.studies.ledger.config import Config
from experiments.studies.ledger.run import run
from theory import claims, coverage

PAGE = (Path(__file__).parents[2] / "docs" / "how_to" / "add_a_claim.md").read_text()
(CODE,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
ROOM = "scratch_claims"


@pytest.fixture
def add(tmp_path, monkeypatch):
    """Adds a module of claims, which is the only one."""

    def added(code: str):
        (tmp_path / f"{ROOM}.py").write_text(code)
        importlib.invalidate_caches()
        return claims.select("*")

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(claims, "rooms", lambda: (ROOM,))
    monkeypatch.setattr(claims, "_STATED", {})
    monkeypatch.delitem(sys.modules, ROOM, raising=False)
    yield added
    sys.modules.pop(ROOM, None)


def test_the_claim_of_the_page_is_in_the_ledger_and_accounted_for(add):
    found = add(CODE)
    stem = "features-are-fate/T3.6-noiseless"
    assert [c.id for c in found] == [f"{stem}/ours", f"{stem}/limit"]
    assert (found[0].domain, found[0].note) == ("n=5, d=10, σ=0", "The test detects 5 % of it.")
    ledger = run(Config())
    assert ledger["ok"].values.all()
    assert ledger["unnoticed"].values.tolist() == ["", ""]
    assert ledger["predicted"].values.tolist() == [0.5, 0.5]
    # One simulation serves both.
    assert len(set(ledger["simulated"].values.tolist())) == 1
    assert coverage.orphans(found) == []
    answered = {s.name: ids for s, ids in coverage.answers(found).items() if ids}
    assert answered == {"Theorem 3.6": [f"{stem}/ours", f"{stem}/limit"]}


@pytest.mark.parametrize(
    ("piece", "instead", "message"),
    [
        (r'    """n ≤ d.*?"""\n', "", "noiseless/ours: expected a docstring that states"),
        (
            r"\n    Domain: .*?\n",
            "\n",
            "noiseless/ours: expected a docstring that ends with 'Source",
        ),
        (r"d={d}", "d={dim}", r"noiseless/ours: its docstring has {dim}, expected a parameter or"),
        ("noiseless/ours", "noiseless/mine", "expected one of 'exact', .*; got 'mine'"),
        (r'beside\("limit"\)', 'beside("limits")', r"got 'limits' \(nearest: 'limit'\)"),
        ('/ours"', '/ours", "<="', r"noiseless/ours: expected attack=\.\.\., .* got none"),
        (r'beside\("limit"\)', 'beside("ours")', "claims share an id: .*noiseless/ours"),
    ],
)
def test_a_piece_that_is_missing_is_named(add, piece, instead, message):
    code, count = re.subn(piece, instead, CODE, flags=re.DOTALL)
    assert count == 1
    with pytest.raises(ValueError, match=message):
        add(code)


def test_a_source_without_a_statement_is_named(add):
    found = add(CODE.replace("Thm 3.6, eq. (10), p. 6, without noise", "as is well known"))
    (line,) = coverage.orphans(found[:1])
    name, source = "features-are-fate/T3.6-noiseless/ours", "features-are-fate as is well known"
    assert line == f"{name}: its source, '{source}', names no statement of theory/coverage.py"


def test_a_parameter_inside_of_a_value_is_refused(add):
    """It would appear in the ledger unchanged."""
    code = CODE.replace("Domain: n={n}", "Domain: {PLACE}").replace(
        "@claim(", 'PLACE = "n={n}"\n\n\n@claim('
    )
    with pytest.raises(ValueError, match=r"noiseless/ours: \['n'\] in the value of a name is not"):
        add(code)


def test_a_module_that_is_reloaded_states_only_what_it_states_now(add, tmp_path):
    first, second = add(CODE)
    (tmp_path / f"{ROOM}.py").write_text(CODE.replace('beside("limit")', 'beside("reading")'))
    module = importlib.reload(sys.modules[ROOM])
    again = claims.select("*", module)
    assert [c.id for c in again] == [first.id, second.id.replace("limit", "reading")]
    assert again[0] is not first


def test_a_cell_that_runs_again_replaces_its_claims(add):
    """Cells of a notebook, unlike modules, have no spec."""
    cell = {"__name__": "notebook", "__spec__": None}
    names = [c.id for c in add(CODE)]
    for _ in range(2):
        exec(compile(CODE, "cell", "exec"), cell)
    assert [c.id for c in claims._STATED["notebook"]] == names
