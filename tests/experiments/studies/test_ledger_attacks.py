"""The ledger shows what the last search for problems that break its bounds found."""

import json
import math

import pytest

from experiments.studies.ledger import attacks, findings
from experiments.studies.ledger.config import Config
from experiments.studies.ledger.run import run
from theory import claims
from theory.adversary import Attack
from theory.claims import Claim, Estimate

FOUND = Attack(
    "p/a/ours", "x, y", 0.9, 0.8, {"x": 0.25, "y": [[1.0, 2.0]], "z": [0.0] * 6}, 7, {"c": math.inf}
)


def _claim(name, relation, attack=None):
    simulate = lambda key, quick: Estimate(0.5, tolerance=1e-9)  # noqa: E731
    return Claim(name, "s", "src", "dom", lambda: 1.0, simulate, relation, attack=attack)


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    file = tmp_path / "attacks.json"
    file.write_bytes(attacks.as_json([FOUND], {"seed": 3}))
    found = attacks.read(file)
    monkeypatch.setattr(attacks, "read", lambda: found)
    return file


def test_what_is_written_is_read(recorded):
    assert attacks.read() == {"p/a/ours": FOUND}
    kept = json.loads(recorded.read_text())
    assert list(kept) == ["schema", "seed", "attacks"]
    assert (kept["attacks"][0]["kind"], kept["attacks"][0]["finding"]) == (
        "within 2",
        "within 1.25 x",
    )


def test_sharpness_in_words(recorded):
    assert attacks.sharpness("p/a/ours", True) == "within 1.25 x"
    assert attacks.sharpness("p/a/ours", False) == "within 1.25 x"  # a misprint that was attacked
    assert attacks.sharpness("p/b/ours", True) == "not attacked"
    attacks.read()["p/a/ours"].terms["e"] = 0.5  # a term that no problem needs
    assert attacks.sharpness("p/a/ours", True) == "within 1.25 x; holds without e"
    assert attacks.sharpness("p/b/ours", True, "a limit") == "not attacked: a limit"
    assert attacks.sharpness("p/b/exact", False) == ""


def test_points_in_words():
    assert attacks.point(FOUND) == "x=0.25, y=[[1. 2.]], z=(6 numbers)"


def test_the_ledger_shows_how_sharp_its_bounds_are(recorded, monkeypatch):
    made = [
        _claim("p/a/ours", "<="),
        _claim("p/b/ours", "<="),
        _claim("p/c/exact", "<=", "a limit"),
        _claim("p/d/printed", ">="),
    ]
    monkeypatch.setattr(claims, "select", lambda globs: made)
    dataset = run(Config())
    names, *rows = findings.table(dataset)
    shown = [row[names.index("sharpness")] for row in rows]
    assert shown == ["within 1.25 x", "not attacked", "not attacked: a limit", ""]
    verdicts = json.loads(findings.as_json(dataset, {}))["verdicts"]
    assert [v["sharpness"] for v in verdicts] == shown
    assert [v["nearest"] for v in verdicts] == [attacks.point(FOUND), "", "", ""]
    assert b"within 1.25 x & holds" in findings.as_latex(dataset)
    assert findings.as_csv(dataset).splitlines()[0].endswith(b"sharpness,nearest")
    assert findings.sharpness(dataset) == "Bounds: 1 within 2, 2 not attacked."
    text, sound = findings.attacked([FOUND], made)
    assert sound
    assert "Not attacked: p/b/ours.\nNot attacked: p/c/exact: a limit." in text
