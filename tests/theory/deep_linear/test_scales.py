"""Fine-tuning at any scale of the layers: limits compared with other minimisers, and errors.

The simulations are in the ledger: trained networks, averages over data sets and linear programs.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, optimize, stats

from theory.deep_linear import diagonal, overlaps, risks, scales

P, Q = np.array([0.02, 0.5, 0.9, 4.0]), np.array([0.9, 0.5, 0.3, 0.1])


pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imbalance", "depth", "error"), [(0.0, 2.0, 1e-14), (1e8, 1.0, 1e-7), (-1e8, np.inf, 1e-7)]
)
def test_the_imbalance_of_two_layers_spans_all_depths(imbalance, depth, error):
    """At 0 it is depth 2 to rounding; the ends are reached as 1 / |imbalance|."""
    found = scales.unbalanced_scale(P, Q, imbalance)
    np.testing.assert_allclose(found, overlaps.null_scale(P, Q, depth), rtol=error)


def followed(x, y, source, r):
    """One neuron's predictor at the end of its flow, by SciPy."""
    size = np.linalg.norm(source)
    last = ((r + np.hypot(r, 2)) * size / 2) ** 0.5

    def speed(_, at):
        slope = x.T @ (x @ at[:-1] * at[-1] - y)
        return -np.r_[at[-1] * slope, at[:-1] @ slope]

    first = np.r_[source / last, last]
    end = integrate.solve_ivp(speed, (0, 2000), first, "LSODA", rtol=1e-8, atol=1e-10).y[:, -1]
    return end[:-1] * end[-1], end[-1] < 0


@pytest.mark.slow
def test_the_limit_is_the_end_of_the_flow_on_either_branch():
    """Draws data with different singular values and labels; half of the neurons change sign."""
    rng, turned = np.random.default_rng(5), []
    for r in (-6.0, -3.0, -2.0, -1.0, -0.3, 2.0) * 4:
        n, d = rng.integers(1, 4), 5
        x = np.linalg.qr(rng.standard_normal((d, n)))[0].T * rng.uniform(0.5, 2.0, (n, 1))
        source, y = rng.standard_normal(d), x @ rng.standard_normal(d)
        y = y if len(turned) % 2 else -x @ source + 0.3 * y
        end, crossed = followed(x, y, source, r)
        turned.append(crossed)
        np.testing.assert_allclose(scales.unbalanced_limit(x, y, source, r), end, atol=1e-4)
    assert 6 <= sum(turned) <= 18


@pytest.mark.slow
def test_the_opposite_task_helps_beyond_the_crossing_and_where_the_part_is_not_too_large():
    """At each border the difference to training from scratch changes its sign."""
    load, sigma = 0.4, np.array([[0.0], [0.3], [0.8]])
    r = np.array([-6.0, -2.0, -0.5])
    scratch = risks.scratch_limit(load=load, sigma=sigma)
    for border, worse in ((scales.unbalanced_boundary, 1), (scales.opposite_boundary, -1)):
        angle = np.asarray(border(load=load, sigma=sigma, imbalance=r))
        for side in (-1, 1):
            theta = np.minimum(angle + side * 1e-3, np.pi)
            risk = scales.unbalanced_risk(load=load, theta=theta, sigma=sigma, imbalance=r)
            assert (((risk > scratch) == (side == worse)) | (angle == np.pi)).all()
    assert (angle[:, 2] == np.pi).all()
    assert (angle[:, :2] < np.pi).any()


@pytest.mark.slow
def test_the_end_of_a_diagonal_network_is_the_nearest_interpolator():
    """Nearest in the divergence of q, by a minimiser over the null space, one scale per entry."""
    rng = np.random.default_rng(0)
    x, y, start = rng.standard_normal((2, 5)), rng.standard_normal(2), rng.standard_normal(5)
    start[:2] = 0.0
    scale = np.array([0.1, 1.0, 0.3, 2.0, 0.05])
    null = np.linalg.svd(x)[2][2:]

    def beta(free):
        return np.linalg.pinv(x) @ y + free @ null

    def divergence(free):
        b = beta(free)
        q = b * np.arcsinh(2 * b / scale) - np.sqrt(b**2 + scale**2 / 4)
        return np.sum(q - np.arcsinh(2 * start / scale) * b) / 2

    least = optimize.minimize(divergence, np.zeros(3), method="BFGS", options={"gtol": 1e-9})
    found = diagonal.diagonal_limit(jnp.asarray(x), jnp.asarray(y), jnp.asarray(start), scale)
    np.testing.assert_allclose(found, beta(least.x), atol=1e-6)


def test_lazy_diagonal_networks_have_the_risk_of_regression_from_the_source():
    share, source, target = np.array([0.2, 0.3, 0.5]), np.array([1.0, -2, 0]), np.array([1.0, 1, 0])
    gamma, sigma = 0.3, 0.4
    distance2 = share @ (source - target) ** 2
    found = diagonal.diagonal_risk(share, source, target, load=gamma, sigma=sigma, scale=1e6)
    assert found == pytest.approx((1 - gamma) * distance2 + gamma * sigma**2 / (1 - gamma))


def test_rich_diagonal_networks_find_the_target_beyond_the_load_of_recovery():
    """A tenth below and above it, at a scale that leaves less than the load's own width."""
    share, source, target = [0.05, 0.05, 0.05, 0.85], [1.0, 1, 0, 0], [1.0, 0, 1, 0]
    load = float(diagonal.recovery_load(share[0], share[1], 0.0, share[2]))
    below, above = (
        float(diagonal.diagonal_risk(share, source, target, load=load * by, sigma=0.0, scale=1e-40))
        for by in (0.9, 1.1)
    )
    assert below > 0.005
    assert above < 1e-6


@pytest.mark.parametrize(
    "shares", [(0.05, 0.1, 0.0, 0.1), (0.0, 0.05, 0.1, 0.0), (0.1, 0.2, 0.05, 0.15)]
)
def test_the_recovery_load_is_its_stated_minimum(shares):
    kept, dropped, flipped, new = shares

    def above(t):
        return (1 + t**2) * stats.norm.sf(t) - t * stats.norm.pdf(t)

    def cost(t):
        both = kept + new * (1 + t**2) + flipped * (1 + 4 * t**2)
        return both + dropped * (0.5 + above(2 * t)) + 2 * (1 - sum(shares)) * above(t)

    least = optimize.minimize_scalar(cost, bounds=(0, 5), options={"xatol": 1e-8}).fun
    assert float(diagonal.recovery_load(*shares)) == pytest.approx(least, rel=1e-9)


def test_a_flipped_feature_costs_more_than_a_new_one_and_a_kept_one_less():
    kept = diagonal.recovery_load(0.1, 0.0, 0.0, 0.1)
    flipped = diagonal.recovery_load(0.0, 0.0, 0.1, 0.1)
    new = diagonal.recovery_load(0.0, 0.0, 0.0, 0.2)
    assert kept < new < flipped
    assert diagonal.recovery_load(0.1, 0.2, 0.0, 0.0) == pytest.approx(0.2)  # of each dropped half


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scales.unbalanced_scale(-1.0, 0.5, 0.0), "p must be finite and >= 0; got -1"),
        (lambda: scales.unbalanced_scale(1.0, 0.5, np.inf), "imbalance must be finite; got inf"),
        (
            lambda: scales.unbalanced_risk(load=1.0, theta=0.1, sigma=0.1, imbalance=0.0),
            r"load must be a load in \[0, 1\)",
        ),
        (
            lambda: diagonal.diagonal_limit(jnp.ones((2, 3)), jnp.ones(2), jnp.ones(2), 1.0),
            r"start must have shape \(3,\)",
        ),
        (
            lambda: diagonal.diagonal_limit(jnp.ones((2, 3)), jnp.ones(2), jnp.ones(3), 0.0),
            "scale must be positive and finite",
        ),
        (
            lambda: diagonal.diagonal_risk(
                [0.5], [1.0], [1.0, 2.0], load=0.5, sigma=0.1, scale=1.0
            ),
            "vectors of one length",
        ),
        (
            lambda: diagonal.diagonal_risk([0.5], [1.0], [0.0], load=0.5, sigma=0.1, scale=1.0),
            "the sum of share must be 1; got 0.5",
        ),
        (lambda: diagonal.recovery_load(0.5, 0.5, 0.1, 0.1), "the sum of all shares must be"),
    ],
)
def test_what_is_out_of_range_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
