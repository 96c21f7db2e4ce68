"""Changes during or after pre-training: best times, rounding, SAM and label noise, by hand."""

import numpy as np
import pytest

from theory.two_layer import best_time, label_noise, matrices, perturbation, sharpness_aware

SIGMA = np.array([2.0, 1.2, 0.7, 0.2])


def _losses(times, gamma, tau):
    """The mean loss under noise but for a constant, from the modes."""
    start = np.exp(-2 * tau)
    y = SIGMA / (1 + (SIGMA / start - 1) * np.exp(-4 * SIGMA * times[:, None]))
    return np.sum((y - SIGMA) ** 2 + 2 * len(SIGMA) * gamma**2 * y, 1)


@pytest.mark.parametrize("gamma", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("tau", [0.9, 3.0, 40.0])
def test_the_best_time_is_that_of_a_fine_grid(gamma, tau):
    found = best_time.best_time(SIGMA, len(SIGMA), gamma, tau)
    times = np.linspace(0, 2 * (tau + 3) / SIGMA[-1], 20_001)
    losses = _losses(times, gamma, tau)
    assert found == pytest.approx(times[losses.argmin()], abs=2 * times[1])
    assert _losses(np.array([found]), gamma, tau)[0] <= losses.min() + 1e-12


def test_the_best_time_without_noise_with_much_and_with_bad_input():
    assert best_time.best_time(SIGMA, 4, 0.0, 3.0) == np.inf
    assert best_time.best_time(SIGMA, 4, 5.0, 3.0) == 0.0
    with pytest.raises(ValueError, match="sigma must be above e"):
        best_time.best_time(SIGMA, 4, 0.1, 0.5)
    with pytest.raises(ValueError, match="d must be at least the number of modes, 4; got 3"):
        best_time.best_time(SIGMA, 3, 0.1, 3.0)


@pytest.mark.parametrize("decay", [1e-6, 0.5, 1.0, 7.0])
@pytest.mark.parametrize("gamma", [0.0, 0.01, 0.2, 0.45, 3.0])
def test_modes_of_a_power_law_are_those_of_the_spectrum(decay, gamma):
    sigma = 2 * np.arange(1, 7.0) ** -decay
    counted = perturbation.inflection_index(sigma, 8, gamma, first=0)
    found = best_time.power_law_index(8, scale=2.0, decay=decay, gamma=gamma, modes=6)
    assert found == (6 if counted is None else counted)


def test_a_mode_that_is_never_learned_is_late_forever():
    assert best_time.mode_taus(np.diag([2.0, -1.0]), 3.0).tolist() == [3.0, np.inf]
    with pytest.raises(ValueError, match="target must be a square matrix"):
        best_time.mode_taus(np.ones((2, 3)), 3.0)


def test_rounding_has_as_many_levels_as_bits_allow():
    weights = np.linspace(-2, 2, 1001)
    rounded = matrices.rounded(weights, 3, 2.0)
    assert np.unique(rounded).tolist() == [-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75]
    inside = np.abs(weights) < 0.75
    assert np.abs(rounded - weights)[inside].max() <= 0.125 + 1e-12


def test_without_an_ascent_sam_is_gradient_flow():
    """It keeps a^2 - b^2, and half of a balanced mode is learned at log(sigma/y - 1)/(4 sigma)."""
    a, b = sharpness_aware.flow([0.5, 0.1], [0.1, 0.3], [2.0, 1.0], 0.0, [0.0, 1.0, 30.0])
    np.testing.assert_allclose(a**2 - b**2, [[0.24, -0.08]] * 3, atol=1e-9)
    np.testing.assert_allclose((a * b)[-1], [2.0, 1.0], atol=1e-9)
    found = sharpness_aware.learning_time(1.0, 1e-3, 2.0, 0.0)
    assert found == pytest.approx(np.log(2e3 - 1) / 8, rel=1e-9)


def test_label_noise_moves_one_mode_by_its_recursion():
    """One step of a mode changes a^2 - b^2 by -4 eta^2 E^2 (a^2 - b^2), E^2 = nu^2/(1 - eta S)."""
    after = label_noise.drift([1.5], [1.0], 0.5, [0.01, 0.02])
    size = np.hypot(1.5, 2.0)
    first = 1.5 * (1 - 4e-4 * 0.25 / (1 - 0.01 * size))
    assert after[0, 0] == pytest.approx(first, rel=1e-12)
    assert after[1, 0] < first
    with pytest.raises(ValueError, match=r"rates must be below 0\.4; got 0\.5"):
        label_noise.drift([1.5], [1.0], 0.5, [0.5])
    with pytest.raises(ValueError, match="imbalance must have the shape of sigma"):
        label_noise.drift([1.5, 1.0], [1.0], 0.5, [0.01])


def test_steps_of_label_noise_conserve_imbalance_but_for_their_square():
    """The identity of `label_noise`, on matrices of any shape: no term is of first order."""
    rng = np.random.default_rng(0)
    w1, w2, target = (rng.normal(size=s) for s in ((2, 3, 4), (2, 4, 5), (3, 5)))
    ends = matrices.label_noise(np.random.default_rng(1), (w1, w2), target, 0.7, np.array([0.1]))
    noise = 0.7 * np.random.default_rng(1).standard_normal((1, 3, 5))
    error = w1 @ w2 - target - np.concatenate([noise, -noise])

    def imbalance(w1, w2):
        return w1.mT @ w1 - w2 @ w2.mT

    expected = 0.04 * (w2 @ error.mT @ error @ w2.mT - w1.mT @ error @ error.mT @ w1)
    np.testing.assert_allclose(imbalance(*ends) - imbalance(w1, w2), expected, atol=1e-12)
