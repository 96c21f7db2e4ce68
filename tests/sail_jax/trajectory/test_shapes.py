"""Weights of checkpoints: against the decays that define them, and the merge against a replay."""

import math

import numpy as np
import pytest

from sail_jax import methods, trajectory

SHAPES = [(s, 0.7 if s == "ema" else None) for s in trajectory.SHAPES]
each_shape = pytest.mark.parametrize(("shape", "b"), SHAPES)


def decayed(shape, x, n, b):
    """The decay at the place x of a run, 1 at 0 and 0 at 1."""
    return {
        "uniform": lambda: 1 - x,
        "linear": lambda: 1 - x,
        "cosine": lambda: (1 + math.cos(math.pi * x)) / 2,
        "1-sqrt": lambda: 1 - math.sqrt(x),
        "1-square": lambda: 1 - x**2,
        "ema": lambda: (1 - b ** (n * (1 - x))) / (1 - b**n),
        "wma": lambda: 1 - x * n * (x * n + 1) / (n * (n + 1)),
    }[shape]()


def replayed(start, updates, factors):
    """theta_0 + sum_i d_i U_i."""
    return start + sum(d * u for d, u in zip(factors, updates, strict=True))


@pytest.mark.parametrize("n", [1, 2, 13])
@each_shape
def test_weights_stand_for_their_decay(shape, b, n):
    c = trajectory.weights(shape, n, decay=b)
    d = [decayed(shape, i / n, n, b) for i in range(n)]
    np.testing.assert_allclose(trajectory.decay_of(c), d, rtol=0, atol=1e-14)
    np.testing.assert_allclose(trajectory.weights_of(trajectory.decay_of(c)), c, rtol=0, atol=1e-15)
    assert c.min() > 0


@pytest.mark.slow
@each_shape
def test_the_merge_is_the_replay(shape, b):
    """Iterates of a random walk in float64; the merge rounds to float32."""
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(6, 4))
    iterates = np.cumsum(np.concatenate([rng.normal(size=(1, 4)), updates]), 0)
    d = [decayed(shape, i / 7, 7, b) for i in range(1, 7)]
    want = replayed(iterates[0], updates, d)
    exact = trajectory.weights(shape, 7, decay=b) @ iterates
    np.testing.assert_allclose(exact, want, rtol=0, atol=20 * 2.0**-53 * 10)
    models = [{"w": x.astype(np.float32)} for x in iterates]
    got = methods.trajectory(shape=shape, **({} if b is None else {"decay": b}))(models)["w"]
    # seven weights and values below 10 rounded to float32, and as many sums
    np.testing.assert_allclose(got, want, rtol=0, atol=16 * 2.0**-24 * 10)


def test_weights_of_models_multiply_those_of_the_shape():
    models = [{"w": np.float32(x)} for x in (1, 2, 4)]
    got = methods.trajectory(shape="wma")(models, weights=[1, 0, 1])["w"]
    assert float(got) == pytest.approx((1 * 1 + 3 * 4) / 4, rel=1e-6)


@pytest.mark.parametrize("steps", [[0, 100, 250, 300, 900], [10, 20, 30, 40], [7]])
@pytest.mark.parametrize(("shape", "b"), SHAPES[1:])
def test_weights_at_steps(shape, b, steps):
    n, t = len(steps), np.array(steps, float)
    even = n == 1 or len(set(np.diff(t))) == 1
    points = trajectory.weights_at(steps, shape, decay=b)
    means = trajectory.weights_at(steps, shape, "means", decay=b)
    if even:
        np.testing.assert_allclose(points, trajectory.weights(shape, n, decay=b), atol=1e-14)
    x = (t - t[0]) / max(t[-1] - t[0], 1)
    for i in range(1, n):
        assert trajectory.decay_of(points)[i] == pytest.approx(
            decayed(shape, x[i] * (n - 1) / n, n, b), abs=1e-13
        )
        # the midpoint rule of 4,000 points: its error is largest at the root's corner
        inside = x[i - 1] + (np.arange(4000) + 0.5) / 4000 * (x[i] - x[i - 1])
        mean = np.mean([decayed(shape, y, n, b) for y in inside])
        assert trajectory.decay_of(means)[i] == pytest.approx(mean, abs=2e-6)


def test_uniform_weights_do_not_depend_on_steps():
    for at in ("points", "means"):
        assert trajectory.weights_at([1, 2, 50], "uniform", at).tolist() == [1 / 3] * 3
    trapezoid = trajectory.weights_at([0, 1, 2, 3], "linear", "means")
    np.testing.assert_allclose(trapezoid, [1 / 6, 1 / 3, 1 / 3, 1 / 6], atol=1e-15)


def test_an_exponential_average_of_many_checkpoints_is_finite():
    c = trajectory.weights_at(range(5000), "ema", "means", decay=0.5)
    assert np.isfinite(c).all()
    assert c.sum() == pytest.approx(1)


@each_shape
def test_effective_number_and_age(shape, b):
    c = trajectory.weights(shape, 9, decay=b)
    assert trajectory.effective_number(c) == pytest.approx(1 / sum(x * x for x in c))
    d = [decayed(shape, i / 9, 9, b) for i in range(1, 9)]
    assert trajectory.mean_age(c) == pytest.approx(8 - sum(d))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: trajectory.weights("unifrom", 3), "shape: .*'unifrom'.*nearest: 'uniform'"),
        (lambda: trajectory.weights("wma", 0), "n: expected .* >= 1, got 0"),
        (lambda: trajectory.weights("ema", 3), "decay: .* got None"),
        (lambda: trajectory.weights("ema", 3, decay=1.0), "decay: .* got 1.0"),
        (lambda: trajectory.weights("wma", 3, decay=0.5), "decay: expected none .*'wma', got 0.5"),
        (lambda: trajectory.weights_at([1, 1], "linear"), r"steps: .*rising order, got \[1, 1\]"),
        (lambda: trajectory.weights_at([1, 2], "linear", "ends"), "at: .* got 'ends'"),  # pyright: ignore
        (lambda: trajectory.weights_of([0.5, 0.2]), "factors: expected 1 .* got 0.5"),
        (lambda: trajectory.decay_of([0.5, 0.2]), "weights: expected a sum of 1, got 0.7"),
        (lambda: trajectory.decay_of([float("nan"), 1.0]), "weights: expected finite numbers"),
        (lambda: methods.trajectory(shape="ema"), "trajectory: decay: .* got None"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()
