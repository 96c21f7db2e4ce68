"""Low-rank adapters on two-layer networks: limits of their closed forms, and errors.

The ledger compares the closed forms with training; these tests compare them with one another.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate

from theory import two_layer as tl
from theory.two_layer import fine_tuning, low_rank, modes, networks

PRE, FT = np.array([2.0, 1.5, 0.6, 0.3]), np.array([3.2, 0.4, 2.45, 1.3])
LOSSES = "degradations", "pretraining_losses", "fine_tuning_losses"


pytestmark = pytest.mark.usefixtures("float64")


def test_a_balanced_start_is_a_sigmoid():
    times, gain = np.array([0.0, 0.3, 1.0, 4.0]), 1.7
    found = low_rank.displacement(times, 1.4, gain, b=0.1, a=0.1)
    np.testing.assert_allclose(found, modes.mode(gain * times, gain * 0.01, 1.4), rtol=1e-13)


@pytest.mark.slow
def test_the_flow_of_matrices_contains_that_of_modes():
    """B = 0, and rows of A that are axes: modes stay apart."""
    times, rho = np.array([0.4, 1.1]), np.array([1.3, -0.7])
    start = tl.Layers(jnp.zeros((2, 2)), 0.2 * jnp.eye(2))
    path = tl.theta(low_rank.flow(start, np.diag(rho), times, scale=2.0))
    expected = low_rank.displacement(times[:, None], rho, 2.0, b=0.0, a=0.2)
    np.testing.assert_allclose(2.0 * np.diagonal(path, axis1=1, axis2=2), expected, rtol=1e-12)
    np.testing.assert_allclose(path[:, 0, 1], 0, atol=1e-15)


@pytest.mark.slow
def test_the_flow_from_b_zero_and_a_random_a_is_that_of_the_adapter():
    """The usual start of LoRA has no closed form; SciPy integrates B and A themselves."""
    rng = np.random.default_rng(3)
    a, residual, scale = 0.3 * rng.standard_normal((2, 4)), rng.standard_normal((3, 4)), 1.7

    def speed(_, flat):
        b, a = flat[:6].reshape(3, 2), flat[6:].reshape(2, 4)
        off = 2 * (residual - scale * b @ a)
        return np.concatenate([(off @ a.T).ravel(), (b.T @ off).ravel()])

    first = np.concatenate([np.zeros(6), a.ravel()])
    end = integrate.solve_ivp(speed, (0, 3 * scale), first, "DOP853", rtol=1e-12, atol=1e-13)
    times = jnp.array([0.4, 3.0])
    path = low_rank.flow(tl.Layers(jnp.zeros((3, 2)), jnp.asarray(a)), residual, times, scale=scale)
    flat = end.y[:, -1]
    np.testing.assert_allclose(path.w1[-1], flat[:6].reshape(3, 2), atol=1e-9)
    np.testing.assert_allclose(path.w2[-1], flat[6:].reshape(2, 4), atol=1e-9)


def test_an_adapter_of_full_rank_ends_as_full_fine_tuning():
    full = [getattr(fine_tuning, of)(PRE, FT) for of in LOSSES]
    np.testing.assert_allclose(low_rank.losses(PRE, FT, 4), full, rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(low_rank.harm_thresholds(PRE, FT, 4), 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_end_for_any_target_is_that_of_modes_where_tasks_are_aligned(rank):
    frozen = tl.ideal(jnp.diag(PRE), 3)
    end = tl.theta(frozen) + low_rank.update(frozen, jnp.diag(FT), rank)
    assert float(jnp.sum((end - jnp.diag(PRE)) ** 2)) == pytest.approx(
        float(low_rank.losses(PRE, FT, rank)[1][3]), rel=1e-12
    )


def test_the_thresholds_are_where_losses_begin_to_rise():
    """Tests both sides of the threshold of each mode."""
    for rank in (1, 2, 3):
        for n, threshold in enumerate(low_rank.harm_thresholds(PRE, FT, rank)):
            for factor in (0.99, 1.01):
                ft = FT.copy()
                ft[n] = factor * threshold * PRE[n]
                losses = low_rank.losses(PRE, ft, rank)[1]
                assert (losses[n + 1] > losses[n]) == (factor > 1), (rank, n, factor)


def test_adapted_networks():
    frozen = tl.Layers(jnp.ones((2, 3)), jnp.ones((3, 2)))
    adapter = tl.Layers(jnp.ones((2, 1)), jnp.ones((1, 3)))
    found = networks.adapted(frozen, adapter, 0.5)
    assert found.w1.tolist() == [[1.5] * 3] * 2
    assert found.w2 is frozen.w2


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda: low_rank.displacement(np.inf, 1.0, 1.0, b=0.0, a=1.0), "time must be finite"),
        (lambda: low_rank.displacement(1.0, 1.0, -1.0, b=0.0, a=1.0), "gain must be finite and"),
        (lambda: low_rank.displacement(1.0, 1.0, 1.0, b=np.nan, a=1.0), "b must be finite"),
        (lambda: low_rank.losses(PRE, FT[:2], 1), r"sigma_ft must have shape \(4,\)"),
        (lambda: low_rank.losses(PRE[::-1], FT, 1), "sigma_pre.* sorted downwards"),
        (lambda: low_rank.losses(PRE, FT, -1), "rank must be >= 0; got -1"),
        (lambda: low_rank.harm_thresholds(PRE, FT, 0), "rank must be >= 1; got 0"),
        (lambda: low_rank.harm_thresholds([1.0, 0.0], [1.0, 1.0], 1), "sigma_pre must be positive"),
        (lambda: low_rank.fastest_rate(-1.0), "sigma_ft must be finite and >= 0"),
        (
            lambda: low_rank.flow(
                tl.Layers(jnp.zeros((2, 2)), jnp.diag(jnp.array([1.0, 2.0]))), jnp.eye(3), [1.0]
            ),
            r"target \[o i\]; got",
        ),
    ],
)
def test_what_is_refused(compute, message):
    with pytest.raises(ValueError, match=message):
        compute()
