"""The ledger shows what the last search for problems that break its bounds found."""

import dataclasses
import json
import math

import pytest

from experiments.studies.ledger import attacks, findings
from experiments.studies.ledger.config import Config
from experiments.studies.ledger.run import run
from theory import claims
from theory.adversary import Attack, Box, Domain
from theory.claims import Claim, Estimate
from theory.fingerprints import fingerprint


def _ratio(value):
    return lambda p: value + 0 * p["x"]


def _domain(ratio=0.9, again=0.9, **more):
    boxes = {"x": Box(0.0, 1.0), "y": Box(0.0, 3.0, (1, 2)), "z": Box(0.0, 1.0, (6,))}
    return Domain("x, y", boxes, _ratio(ratio), _ratio(again), **more)


DOMAIN = _domain()
FOUND = Attack(
    "p/a/ours", "x, y", 0.8, 0.8, {"x": 0.25, "y": [[1.0, 2.0]], "z": [0.0] * 6}, 7,
    {"c": math.inf}, fingerprint(DOMAIN),
)  # fmt: skip


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
    assert attacks.sharpness(_claim("p/a/ours", "<=", DOMAIN)) == "within 1.25 x"
    attacks.read()["p/a/ours"].terms["e"] = 0.5  # a term that no problem needs
    assert attacks.sharpness(_claim("p/a/ours", "<=", DOMAIN)) == "within 1.25 x; holds without e"
    assert attacks.sharpness(_claim("p/b/ours", ">=", DOMAIN)) == "not searched"
    assert attacks.sharpness(_claim("p/b/ours", ">=")) == "not attacked"
    assert attacks.sharpness(_claim("p/b/ours", ">=", "a limit")) == "not attacked: a limit"
    assert attacks.sharpness(_claim("p/b/exact", "=")) == ""


@pytest.mark.parametrize(
    ("changed", "kind", "text", "sound"),
    [
        (_domain(0.7, 0.7), "not searched", "its code changed; at the former problem within", True),
        (_domain(1.5, 1.5), "broken", "broken (1.5)", False),
        (_domain(1.053, 1.0), "not confirmed", "not confirmed (ratio 1.053, again 1)", False),
        (_domain(0.7, 0.6), "not confirmed", "not confirmed (ratio 0.7, again 0.6)", False),
        (_domain(allowed=lambda p: -1.0), "not searched", "not searched", True),
    ],
)
def test_an_outcome_expires_with_the_code_of_its_bound(recorded, changed, kind, text, sound):
    """The printed ratio is computed at the former problem with the changed code."""
    claim = _claim("p/a/ours", "<=", changed)
    found = attacks.known(claim)
    assert not attacks.current(claim)
    assert attacks.kind(claim) == kind
    assert text in attacks.sharpness(claim)
    assert attacks.sound(claim, found) is sound


def test_a_bound_that_a_search_contradicts_is_not_ok(recorded, monkeypatch):
    """The check of the claim itself passes."""
    made = [_claim("p/a/ours", "<=", _domain(1.053, 1.0)), _claim("p/b/ours", "<=")]
    monkeypatch.setattr(claims, "select", lambda globs: made)
    dataset = run(Config())
    assert dataset["holds"].values.tolist() == [True, True]
    assert dataset["ok"].values.tolist() == [False, True]
    assert [row[-1] for row in findings.table(dataset)[1:]] == ["NOT CONFIRMED", "holds"]


def test_a_renewed_search_replaces_its_outcomes_alone(recorded, monkeypatch):
    other = dataclasses.replace(FOUND, id="p/b/ours")
    made = [_claim(f"p/{name}/ours", "<=", DOMAIN) for name in "bca"]
    monkeypatch.setattr(claims, "all_claims", lambda: made)
    assert attacks.renewed([other]) == [other, FOUND]
    again = dataclasses.replace(FOUND, ratio=0.9)
    assert attacks.renewed([again]) == [again]


def test_points_in_words():
    assert attacks.point(FOUND) == "x=0.25, y=[[1. 2.]], z=(6 numbers)"


def test_the_ledger_shows_how_sharp_its_bounds_are(recorded, monkeypatch):
    made = [
        _claim("p/a/ours", "<=", DOMAIN),
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
