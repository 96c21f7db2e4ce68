"""The search for violations of bounds finds known maxima, and confirms its findings."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import one_of_every, slow_unless

from experiments.studies.ledger import attacks
from theory import adversary, claims
from theory.adversary import Attack, Box, Domain


def product(p):
    """At most 1 where x + y <= 1, and there at x = y = 1/2."""
    return 4 * p["xy"][0] * p["xy"][1]


KNOWN = Domain(
    "x, y in [0, 1], x + y <= 1",
    {"xy": Box(0.0, 1.0, (2,))},
    product,
    lambda p: float(4 * np.prod(p["xy"])),
    allowed=lambda p: 1 - p["xy"][0] - p["xy"][1],
)


@pytest.mark.slow
@pytest.mark.parametrize("smooth", [True, False])
def test_the_search_finds_a_known_maximum_inside_of_the_domain(smooth):
    found = adversary.attack("a/b/ours", replace(KNOWN, smooth=smooth), seconds=60)
    assert found.kind == "attained"
    assert found.ratio == pytest.approx(1, abs=0.02)
    assert found.ratio <= 1 + 1e-9
    assert sum(found.at["xy"]) <= 1
    assert found.again == pytest.approx(found.ratio)


@pytest.mark.slow
@pytest.mark.parametrize("smooth", [True, False])
def test_a_bound_that_fails_is_broken_and_what_other_code_denies_is_not(smooth, monkeypatch):
    """The search is short, because nearly every start violates the bound."""
    monkeypatch.setattr(adversary, "STEPS", 3)
    wrong = Domain(
        "x in [0, 1]", {"x": Box(0.0, 1.0)}, lambda p: p["x"] + 0.9, lambda p: p["x"] + 0.9,
        smooth=smooth, without={"x": lambda p: 0.5 + 0 * p["x"]},
    )  # fmt: skip
    found = adversary.attack("a/b/ours", wrong, seconds=0)
    assert found.broken
    assert found.kind == "broken"
    assert found.finding.startswith("broken (1.")
    assert found.terms == {"x": 0.5}
    denied = adversary.attack("a/b/ours", replace(wrong, again=lambda p: 0.99), seconds=0)
    assert denied.kind == "not confirmed"
    assert denied.finding == f"not confirmed (ratio {denied.ratio:.4g}, again 0.99)"
    assert jnp.ones(()).dtype == jnp.float32  # the search's float64 is its own


@pytest.mark.parametrize(
    ("ratio", "finding"),
    [
        (1.0, "attained (1)"),
        (0.96, "attained (0.96)"),
        (0.8, "within 1.25 x"),
        (0.5, "within 2 x"),
        (0.5 - 1e-12, "within 2 x"),
        (0.05, "slack 20: not sharp"),
        (-1.0, "never near: the sides have opposite signs"),
        (1.5, "broken (1.5)"),
    ],
)
def test_findings_in_words(ratio, finding):
    assert Attack("a/b/ours", "any", ratio, ratio, {}, 1).finding == finding


@pytest.mark.parametrize(
    ("ratio", "again", "confirmed"),
    [
        (0.5, 0.5004, True),
        (0.5, 0.5006, False),
        (60.0, 0.23, False),
        (3.0, 2.0, False),  # both break the bound
        (1e-9, 2e-9, True),
        (math.inf, math.inf, True),
        (math.inf, 1e9, False),
        (math.nan, math.nan, False),
    ],
)
def test_two_evaluations_agree_or_nothing_is_confirmed(ratio, again, confirmed):
    found = Attack("a/b/ours", "any", ratio, again, {}, 1)
    assert found.confirmed is confirmed
    assert (found.kind == "not confirmed") is not confirmed


def test_logarithmic_boxes_span_orders_of_magnitude():
    box = Box(1e-4, 1.0, log=True)
    assert [box.place(s) for s in (0.0, 0.5, 1.0)] == pytest.approx([1e-4, 1e-2, 1.0])
    assert Box(-1.0, 3.0).place(0.25) == 0.0


ATTACKED = [claim for claim in claims.all_claims() if isinstance(claim.attack, Domain)]
RECORDED = attacks.read()
SEARCHED = [claim for claim in ATTACKED if claim.id in RECORDED]


def each(attacked, share=3):
    """Parametrises over claims, one of every few of them. The others soak."""
    claims = one_of_every(share, attacked)
    return pytest.mark.parametrize("claim", claims, ids=lambda claim: claim.id)


def test_only_inequalities_are_attacked():
    assert {claim.relation for claim in ATTACKED} <= {"<=", ">="}


@pytest.mark.slow
def test_what_was_found_is_recorded_for_every_bound_that_is_attacked():
    """If this fails: sail-jax verify --attack --renew"""
    assert list(RECORDED) == [claim.id for claim in ATTACKED]
    assert [claim.id for claim in ATTACKED if not attacks.current(claim)] == []
    for claim in ATTACKED:
        found = RECORDED[claim.id]
        assert found.problems == claim.attack.problems
        assert set(found.at) == set(claim.attack.boxes)
        assert set(found.terms) == set(claim.attack.without)


# Each of these takes .3 CPU-seconds or more.
DEAR = {
    "cross-task-linearity/T1-supremum-cube/ours", "cross-task-linearity/T1-supremum/ours",
    "cross-task-linearity/T1/ours",
    "cross-task-linearity/L2-growth/ours", "overtrained/D.1-sharpening/ours",
    "overtrained/A.25-direction/printed", "overtrained/LoRA-less/ours", "overtrained/A.17/open",
    "overtrained/A.22-bound/open", "overtrained/A.17/corrected",
    "overtrained/A.25-direction/corrected", "overtrained/A.6/printed",
    "unified-merging/merge-bayes/ours", "unified-merging/C1-trim/printed",
    "unified-merging/C1-dare/printed", "features-are-fate/T2.2-W1-lower/ours",
    "features-are-fate/Fig5-W1-axis/printed", "features-are-fate/F4d-ideal/reading",
}  # fmt: skip
assert {claim.id for claim in SEARCHED} >= DEAR


@pytest.mark.parametrize(
    "claim",
    [slow_unless(claim.id not in DEAR, claim) for claim in SEARCHED],
    ids=lambda claim: claim.id,
)
def test_recorded_problems_have_the_recorded_ratio(claim):
    """An error in a formula or a domain is noticed without a search."""
    found = RECORDED[claim.id]
    now = replace(adversary.evaluated(found, claim.attack), searched=True)
    assert now.again == pytest.approx(found.again, rel=adversary.AGREES, abs=adversary.AGREES / 10)
    assert now.kind == found.kind
    assert now.kind == "broken" if not claim.expected else attacks.sound(claim, now)


def test_a_bound_without_a_domain_has_a_reason():
    bounds = [c for c in claims.all_claims() if c.relation != "=" and c.expected]
    assert [c.id for c in bounds if c.attack is None] == []
    reasons = {c.id: c.attack for c in bounds if isinstance(c.attack, str)}
    assert len(reasons) < len(bounds) / 10
    assert all(reason.startswith("a ") and len(reason) < 100 for reason in reasons.values())


@pytest.mark.slow
def test_the_alignment_of_layers_is_within_2_percent_of_its_bound():
    """Where W_2 is nearly isotropic, D_1 is small and turns the top singular vector of W_1."""
    (domain,) = (c.attack for c in ATTACKED if c.id == "features-are-fate/eq69/corrected")
    last = np.array([1.5, 1.5])
    across, along = np.outer([1, -1], [1, -1]) / 2, np.outer([1, 1], [1, 1]) / 2
    more = np.stack([1.0002 * np.linalg.norm(last) * across, 0.05 * along])
    problem = {"last": last, "start": last, "more": more, "angles": np.zeros(2), "least": 0.01}
    with jax.enable_x64(True):
        ratios = [float(domain.ratio(problem)), float(domain.again(problem))]
        left_out = {name: float(ratio(problem)) for name, ratio in domain.without.items()}
    assert ratios == pytest.approx([0.98, 0.98], abs=0.005)
    assert {name for name, ratio in left_out.items() if ratio > 1} == {"|W̄|_F"}


@pytest.mark.slow
def test_two_starts_part_within_2_percent_of_their_bound():
    """The residual of the first mode and half of the curvature of the other turn W_1 and W_2."""
    (domain,) = (c.attack for c in ATTACKED if c.id == "overtrained/A.19/ours")
    corner = np.array([[0.0, 1.0], [0.0, 0.0]])
    problem = {"pre": np.array([1, 0.25]), "ft": np.array([0.01, 0.25]), "anchor": np.array(0.0)}
    problem |= {"v1": corner, "v2": -corner - corner.T, "rate": np.array(1e-4)}
    with jax.enable_x64(True):
        ratios = [float(domain.ratio(problem)), float(domain.again(problem))]
    assert ratios == pytest.approx([0.989, 0.989], abs=0.002)


@pytest.mark.slow
@each(ATTACKED)
def test_both_evaluations_of_an_attack_agree(claim):
    """At drawn problems of the domain; differences of networks 1e-6 apart are good to 1e-4."""
    domain, rng, agreed = claim.attack, np.random.default_rng(1), 0
    size = sum(box.size for box in domain.boxes.values())
    with jax.enable_x64(True):
        for _ in range(200):
            problem = {k: np.asarray(v) for k, v in domain.at(rng.uniform(size=size)).items()}
            if domain.allowed is not None and domain.allowed(problem) < 0:
                continue
            expected = float(domain.ratio(problem))
            assert float(domain.again(problem)) == pytest.approx(
                expected, rel=adversary.AGREES, abs=adversary.AGREES / 10
            )
            agreed += 1
            if agreed == 4:
                break
    assert agreed == 4


@pytest.mark.slow
@each(SEARCHED, 24)
def test_bounds_are_as_sharp_as_recorded(claim):
    """A search finds the recorded result. The code is the same, so a few searches are enough."""
    found = adversary.attack(claim.id, replace(claim.attack, without={}))
    assert found.kind == RECORDED[claim.id].kind
    assert math.isfinite(found.ratio)


def test_a_corrected_bound_that_is_not_attained_says_so():
    own = [c for c in ATTACKED if c.status == "corrected"]
    loose = [c for c in own if RECORDED[c.id].kind != "attained"]
    assert loose
    assert [c.id for c in loose if not re.search("(not|never) sharp|within", c.note)] == []


def test_a_bound_that_is_not_sharp_has_a_sharper_one_or_a_reason():
    kinds = {claim.id: RECORDED[claim.id].kind for claim in ATTACKED if claim.expected}
    far = {c.id: c.sharper for c in ATTACKED if kinds.get(c.id) == "not sharp"}
    assert {c.id: c.sharper for c in claims.all_claims() if c.sharper} == far
    named = {name: f"{name.split('/')[0]}/{s}" for name, s in far.items() if " " not in s}
    assert {kinds.get(sharper) for sharper in named.values()} == {"attained", "within 2"}
    assert len(named) > len(far) / 2


def test_a_term_that_never_matters_is_named_in_its_row():
    rows = {claim.id: claim for claim in ATTACKED}
    idle = [
        name
        for name, found in RECORDED.items()
        if any(ratio <= 1 + adversary.ROUNDING for ratio in found.terms.values())
    ]
    assert idle
    assert [name for name in idle if "never matter" not in rows[name].note] == []
