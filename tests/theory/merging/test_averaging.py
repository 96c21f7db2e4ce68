"""Averages of checkpoints and decayed rates on a noisy quadratic, against SGD that is unrolled.

What is compared with NumPy is exact up to rounding (1e-10); draws have z < 4 with fixed seeds.
"""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from cells import soak

from theory.claims import Z_MAX
from theory.merging import averaging
from theory.merging.averaging import NoisyQuadratic

close = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-13)
FAR = NoisyQuadratic(1.0, rate=0.1, noise=1.0, spacing=7, mean=3.0)
UNIFORM = np.full(13, 1 / 13)


pytestmark = pytest.mark.usefixtures("float64")


def unrolled(problem, rates, after):
    """Mean and variance of sum_t after_t x_t, from the covariance of x_0 and of all noises."""
    h, sigma, v = problem.curvature, problem.noise, float(problem.start)
    x = np.eye(1 + len(rates))[0]  # coefficients of x_0 and of each step's noise
    total = after[0] * x
    for t, rate in enumerate(rates):
        x = (1 - rate * h) * x
        x[1 + t] -= rate * sigma
        total = total + after[t + 1] * x
    return problem.mean * total[0], v * total[0] ** 2 + np.sum(total[1:] ** 2)


@pytest.mark.parametrize("rate", [0.1, 1.3])
@pytest.mark.parametrize("variance", [None, 0.0, 2.0])
def test_closed_forms_are_those_of_unrolled_sgd(rate, variance):
    """Increasing weights, one of them 0, at rates below and above 1 / h."""
    problem = NoisyQuadratic(0.8, rate, 0.7, 3, -1.5, variance)
    weights = np.array([0.0, 0.1, 0.2, 0.3, 0.4])
    after = np.zeros(13)
    after[::3] = weights
    decay = np.repeat([weights[i:].sum() for i in range(1, 5)], 3)
    last = np.eye(13)[-1]
    for found, expected in (
        (averaging.averaged(problem, weights), unrolled(problem, np.full(12, rate), after)),
        (averaging.decayed(problem, weights), unrolled(problem, rate * decay, last)),
    ):
        close((found.bias, found.variance), expected)
        close(found.loss, 0.4 * (expected[0] ** 2 + expected[1]))


@pytest.mark.slow
def test_the_average_is_not_the_decay():
    """The numbers of the text: averages keep old bias, and have less noise."""
    average, decay = (f(FAR, UNIFORM) for f in (averaging.averaged, averaging.decayed))
    last = averaging.averaged(FAR, np.eye(13)[-1])
    found = [(float(m.bias), float(m.variance)) for m in (average, decay, last)]
    expected = [(0.442, 0.0104), (0.039, 0.0151), (0.0004, 0.0526)]
    np.testing.assert_allclose(found, expected, atol=5e-4)
    close(last.variance, FAR.stationary)


@pytest.mark.slow
def test_draws_have_the_moments():
    runs = 4000
    draws = averaging.simulate_average(jax.random.key(1), FAR, UNIFORM, runs)
    again = averaging.simulate_average(jax.random.key(1), FAR, UNIFORM, runs)
    np.testing.assert_array_equal(draws.averaged, again.averaged)
    for field, weights, moments in (
        ("averaged", UNIFORM, averaging.averaged),
        ("decayed", UNIFORM, averaging.decayed),
        ("last", np.eye(13)[-1], averaging.averaged),
    ):
        x, exact = np.asarray(getattr(draws, field)), moments(FAR, weights)
        assert abs(x.mean() - exact.bias) < Z_MAX * x.std() / runs**0.5
        assert abs(x.var() / exact.variance - 1) < Z_MAX * (2 / runs) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("variance", [0.0, None])
def test_at_the_break_even_neither_is_better(variance):
    problem = replace(FAR, variance=variance)
    edge = float(averaging.break_even(problem, UNIFORM))
    for mean, better in ((0.9 * edge, True), (1.1 * edge, False)):
        given = replace(problem, mean=mean)
        average, decay = (f(given, UNIFORM).loss for f in (averaging.averaged, averaging.decayed))
        assert bool(average < decay) is better
    given = replace(problem, mean=edge)
    close(averaging.averaged(given, UNIFORM).loss, averaging.decayed(given, UNIFORM).loss)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [[0.0, 1.0, 0.0], [1.0], [0.0, 1.0]])
def test_one_checkpoint_is_its_own_decay(weights):
    assert averaging.break_even(FAR, weights) == 0


@pytest.mark.slow
def test_decay_always_wins_against_checkpoints_far_apart():
    """They are independent, and decay ends with less than their mean's variance; one curvature per
    entry gives one distance per entry."""
    curvatures = np.array([1.0, 0.001])
    problems = NoisyQuadratic(curvatures, 0.5, 1.0, 40)
    found = averaging.break_even(problems, np.full(4, 0.25))
    assert found[0] == 0
    close(found[1], averaging.break_even(replace(problems, curvature=0.001), np.full(4, 0.25)))
    assert found[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("time", [0.3, *soak(5.0)])
def test_dense_averages_are_the_limit_of_many_steps(time):
    """The error falls as the rate: twice as many steps halve it, to 10 %."""
    errors = []
    for steps in (200, 400):
        problem = NoisyQuadratic(1.0, time / steps, 1.0, 1)
        edge = averaging.break_even(problem, np.full(steps + 1, 1 / (steps + 1)))
        errors.append(
            float(edge / problem.stationary**0.5) - float(averaging.dense_break_even(time))
        )
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.1)
    assert abs(errors[1]) < 0.02


def test_series_and_formula_meet():
    below, above = map(float, averaging.dense_break_even(np.array([1 - 1e-12, 1 + 1e-12])))
    assert below == pytest.approx(above, rel=1e-11)
    assert float(averaging.dense_break_even(1e-9)) == pytest.approx(averaging.LEAST**0.5)


@pytest.mark.parametrize("distance", [0.5, 3.0, 26.0])
def test_windows_are_roots(distance):
    window = averaging.dense_window(distance)
    assert float(averaging.dense_break_even(window)) == pytest.approx(distance, rel=1e-9)
    assert averaging.dense_window(averaging.LEAST**0.5) == 0


@pytest.mark.parametrize("beyond", [1e-15, 1e-11, 1e-6])
def test_short_windows_grow_in_proportion(beyond):
    """T is 3.5 times the share by which the distance is beyond the least; its rounding is 2e-16."""
    least = averaging.LEAST**0.5
    distance = least * (1 + beyond)
    found = averaging.dense_window(distance)
    assert found == pytest.approx(3.5 * (distance - least) / least, rel=1e-5, abs=1e-15)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rate": 2.0}, r"rate \* curvature must be in \(0, 2\); got 2"),
        ({"curvature": 0.0}, "curvature must be > 0; got 0"),
        ({"noise": -1.0}, "noise must be finite and >= 0; got -1"),
        ({"spacing": 1.5}, "spacing must be whole, >= 1; got 1.5"),
        ({"spacing": np.inf}, "spacing must be whole, >= 1; got inf"),
        ({"mean": np.nan}, "mean must be finite; got nan"),
        ({"variance": np.inf}, "variance must be finite and >= 0; got inf"),
        ({"curvature": np.float32(-1)}, "curvature must be > 0; got -1"),
    ],
)
def test_bad_problems(fields, says):
    with pytest.raises(ValueError, match=says):
        replace(FAR, **fields)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"weights must sum to 1; got 0\.5"):
        averaging.averaged(FAR, [0.5])
    with pytest.raises(ValueError, match=r"one for each checkpoint; got shape \(\)"):
        averaging.decayed(FAR, 1.0)
    with pytest.raises(ValueError, match="runs must be >= 1; got 0"):
        averaging.simulate_average(jax.random.key(0), FAR, UNIFORM, 0)
    with pytest.raises(ValueError, match="time must be finite and > 0; got 0"):
        averaging.dense_break_even(0.0)
    with pytest.raises(ValueError, match="distance must be finite and >= 0; got inf"):
        averaging.dense_window(np.inf)
