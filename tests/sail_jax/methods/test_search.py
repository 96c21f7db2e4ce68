"""The search over coefficients finds known minima, is reproducible, resumes, and handles
bad values."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from sail_jax import methods
from sail_jax.methods.evolution import Evaluation, search

BOUNDS = {"scale": (0.0, 2.0), "weights": [(-1.0, 1.0), (0.0, 4.0)]}


def bowl(options):
    """An objective with minimum 0 at scale 0.7 and weights (-0.5, 3), narrow in one direction."""
    a, (b, c) = options["scale"] - 0.7, options["weights"] - np.array([-0.5, 3.0])
    return float(a**2 + 10 * (a + b) ** 2 + 0.1 * (c - b) ** 2)


def same(one, two):
    assert len(one.history) == len(two.history)
    for (a, u), (b, v) in zip(one.history, two.history, strict=True):
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[name], b[name]) for name in a)
        assert u == v or (math.isnan(u) and math.isnan(v))


def test_finds_the_minimum_of_a_bowl_for_any_seed():
    for seed in range(5):
        found = search(bowl, BOUNDS, budget=600, seed=seed)
        assert found.value < 1e-6
        assert abs(found.best["scale"] - 0.7) < 0.01
        np.testing.assert_allclose(found.best["weights"], [-0.5, 3.0], atol=0.02)
        assert found.value == min(value for _, value in found.history)
        assert bowl(found.best) == found.value


def test_options_stay_within_bounds_and_a_minimum_outside_is_met_at_the_edge():
    found = search(lambda options: -options["scale"], {"scale": (0.1, 0.4)}, budget=80)
    values = [options["scale"] for options, _ in found.history]
    assert 0.1 <= min(values) <= max(values) <= 0.4
    assert found.best["scale"] > 0.399


@pytest.mark.parametrize("budget", [1, 7, 10, 23])
def test_budget_is_kept_and_seeds_repeat(budget):
    one = search(bowl, BOUNDS, budget=budget, seed=3)
    assert len(one.history) == budget
    same(one, search(bowl, BOUNDS, budget=budget, seed=3))
    longer = search(bowl, BOUNDS, budget=23, seed=3)
    same(one, longer._replace(history=longer.history[:budget]))
    other = search(bowl, BOUNDS, budget=budget, seed=4)
    assert other.history[0].options["scale"] != one.history[0].options["scale"]


def test_only_the_order_of_values_matters():
    """CMA-ES uses ranks: any increasing function of the objective gives the same search."""
    one = search(bowl, BOUNDS, budget=60)
    other = search(lambda options: math.log(bowl(options) + 1e-3) * 7 - 100, BOUNDS, budget=60)
    for (a, _), (b, _) in zip(one.history, other.history, strict=True):
        assert a["scale"] == b["scale"]


def test_values_that_are_not_finite_count_as_the_worst():
    def broken(options):
        if options["weights"][0] > -0.3:
            return [math.nan, math.inf, -math.inf][int(1000 * options["scale"]) % 3]
        return bowl(options)

    found = search(broken, BOUNDS, budget=600)
    assert any(not math.isfinite(value) for _, value in found.history)
    assert found.value < 1e-6
    with pytest.raises(ValueError, match="none of 9 values was finite"):
        search(lambda options: math.nan, BOUNDS, budget=9)


def test_resumes_where_it_was_interrupted():
    whole = search(bowl, BOUNDS, budget=40, seed=1)
    log = []

    def dies(options):
        if len(log) == 17:
            raise KeyboardInterrupt
        return bowl(options)

    with pytest.raises(KeyboardInterrupt):
        search(dies, BOUNDS, budget=40, seed=1, on_evaluation=log.append)
    assert len(log) == 17
    calls = []
    resumed = search(
        lambda options: calls.append(0) or bowl(options), BOUNDS, budget=40, seed=1, history=log
    )
    same(resumed, whole)
    assert len(calls) == 23
    plain = [
        Evaluation({k: np.asarray(v).tolist() for k, v in e.options.items()}, e.value) for e in log
    ]
    same(search(bowl, BOUNDS, budget=40, seed=1, history=plain), whole)  # as read from JSON
    with pytest.raises(ValueError, match=r"history\[0\]: expected the options"):
        search(bowl, BOUNDS, budget=40, seed=2, history=log)


def test_start_and_spread():
    start = {"scale": 0.7, "weights": [-0.5, 3.0]}
    found = search(bowl, BOUNDS, budget=20, start=start, spread=1e-4)
    assert max(value for _, value in found.history) < 1e-4
    centre = search(bowl, BOUNDS, budget=20, spread=1e-4).history[0].options
    np.testing.assert_allclose(centre["weights"], [0.0, 2.0], atol=0.01)


def test_stops_once_converged():
    found = search(lambda options: 1.0, {"scale": (0.0, 1.0)}, budget=5000)
    assert len(found.history) < 1000


def test_an_objective_cannot_change_the_record():
    def vandal(options):
        value = bowl(options)
        options["scale"] = 99.0
        options["weights"][:] = 99.0
        return value

    same(search(vandal, BOUNDS, budget=20), search(bowl, BOUNDS, budget=20))


@pytest.mark.slow
def test_searched_coefficients_improve_on_the_defaults_of_a_merge():
    """With models of different quality, the searched soup beats the uniform one on new data."""
    random = np.random.default_rng(0)
    target = random.normal(size=30)
    noise = [0.2, 1.0, 3.0]
    models = [{"w": jnp.asarray(target + s * random.normal(size=30), jnp.float32)} for s in noise]
    X, fresh = random.normal(size=(2, 400, 30))

    def loss(params, X):
        return float(np.square(X @ (np.asarray(params["w"], float) - target)).mean())

    found = search(
        lambda found: loss(methods.linear()(models, **found), X),
        {"weights": [(0.01, 1.0)] * 3},
        budget=120,
    )
    merged = methods.linear()(models, **found.best)
    assert loss(merged, fresh) < 0.2 * loss(methods.linear()(models), fresh)
    assert loss(merged, fresh) < 1.1 * min(loss(m, fresh) for m in models)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bounds": {}}, "bounds: expected at least one name"),
        ({"bounds": {"scale": 1.0}}, r"bounds, 'scale': expected \(low, high\)"),
        ({"bounds": {"scale": (1.0, 1.0)}}, "bounds, 'scale': expected finite low < high"),
        ({"bounds": {"scale": (0.0, math.inf)}}, "bounds, 'scale': expected finite low < high"),
        ({"bounds": {"w": []}}, r"bounds, 'w': expected \(low, high\)"),
        ({"bounds": {"w": [("a", "b")]}}, "bounds, 'w': expected numbers"),
        ({"budget": 0}, "expected budget >= 1"),
        ({"population": 1}, "population >= 2"),
        ({"spread": 0.0}, "spread > 0"),
        ({"start": {"scale": 0.5}}, "start: expected one value per bound"),
        ({"start": {"scale": 3.0, "weights": [0.0, 1.0]}}, "start: expected values within"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        search(bowl, **{"bounds": BOUNDS, "budget": 10, **options})
