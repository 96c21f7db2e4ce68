"""Adapters from B = 0 with a random A, adapters on every layer, and lambda-balanced starts.

The ledger and the sweep compare them with training; these tests compare them with one another.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from theory import two_layer as tl
from theory.two_layer import adapters, low_rank, networks

pytestmark = pytest.mark.usefixtures("float64")

TIMES = np.array([0.0, 0.2, 1.0, 5.0, 300.0])
RHO = np.array([1.4, -0.6, 0.0])[:, None]


@pytest.mark.slow
def test_a_direction_within_the_rows_is_an_aligned_mode():
    found = adapters.learned(TIMES, RHO, 1.7, row=0.3, overlap=1.0)
    expected = low_rank.displacement(TIMES, RHO, 1.7, b=0.0, a=np.sqrt(0.3))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.slow
def test_a_direction_outside_of_the_rows_is_never_learned_and_any_other_is_in_the_end():
    assert not np.any(adapters.learned(TIMES, RHO, row=0.3, overlap=0.0))
    ends = adapters.learned(1e6, RHO, row=np.array([1e-9, 1.0, 30.0]), overlap=1e-9)
    np.testing.assert_allclose(ends, np.broadcast_to(RHO, (3, 3)), rtol=1e-12)


def test_large_rows_learn_their_share_at_once():
    assert float(adapters.learned(1e-2, 1.0, row=1e4, overlap=0.3)) == pytest.approx(0.3, rel=1e-3)


def test_random_rows_are_equivalent_to_orthogonal_ones_that_start_alike():
    """B(t) = 2 rho t p - 2 rho t^2 A A^T p has the same two terms along p."""
    a, v = np.random.default_rng(0).standard_normal((3, 5)), np.eye(5)[1]
    row, overlap = adapters.equivalent(a, v)
    p = a @ v
    assert float(row * overlap) == pytest.approx(p @ p)
    assert float(row**2 * overlap) == pytest.approx(p @ a @ a.T @ p)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(6, 5), (2, 7)])
def test_the_reduced_adapter_is_the_whole_one(shape):
    rng = np.random.default_rng(1)
    o, i = shape
    residual = jnp.asarray(rng.standard_normal((o, 1)) @ rng.standard_normal((1, i)))
    start = tl.Layers(jnp.zeros((o, 2)), jnp.asarray(0.4 * rng.standard_normal((2, i))))
    small, target, left, right = adapters.reduced(start, residual)
    assert small.w2.shape == (2, 3)
    np.testing.assert_allclose(left @ target @ right, residual, atol=1e-14)
    times = jnp.array([0.3])
    whole, part = (
        networks.gradient_flow(*pair, times, 50) for pair in ((start, residual), (small, target))
    )
    np.testing.assert_allclose(left @ part.w1[0], whole.w1[0], atol=1e-13)
    np.testing.assert_allclose(part.w2[0] @ right, whole.w2[0], atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("target", [2.5, 0.2])
def test_an_adapter_on_one_layer_is_a_mode(target):
    """Of a network of one layer, whose adapter is on the map."""
    level = 0.9 + 0.7 * (target - 0.9)
    time = adapters.layer_time(level, target, [0.9], [0.4], 1.3)
    moved = low_rank.displacement(time, target - 0.9, 1.3, b=0.0, a=0.4)
    assert float(0.9 + moved) == pytest.approx(level, rel=1e-12)


@pytest.mark.slow
def test_layers_have_the_product_and_one_integral():
    weights, starts = np.array([0.5, 2.0, 1.5]), np.array([0.2, 0.01, 0.0])
    for level in (0.1, 1.5, 30.0):
        found = np.asarray(adapters.layer_weights(level, weights, starts, 0.7))
        assert found.prod() == pytest.approx(level, rel=1e-13)
        assert found[2] == weights[2]
        kappa = 0.7 * starts[:2] ** 2
        angle = np.arcsinh(2 * (found - weights)[:2] / kappa) / 2
        one, other = weights[:2] * angle + kappa / 2 * np.sinh(angle) ** 2
        assert one == pytest.approx(other, rel=1e-9)


def test_small_adapters_move_the_smaller_layer_alone_unless_layers_are_equal():
    shares = []
    for first in (0.5, 1.0, 2.0):
        moved = adapters.layer_weights(4.0, [first, 1 / first], [1e-6] * 2) - jnp.array(
            [first, 1 / first]
        )
        shares.append(float(moved[0] / moved.sum()))
    np.testing.assert_allclose(shares, [1.0, 0.5, 0.0], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "balance"),
    [
        ((2, 3, 4), -0.7),
        ((5, 2, 3), 0.7),
        ((2, 5, 3), 0.0),
        ((3, 3, 1), 0.7),
        ((1, 1, 1), -2.0),
    ],
)
def test_balanced_starts(widths, balance):
    start = tl.balanced_start(jax.random.key(0), widths, balance, 0.5)
    np.testing.assert_allclose(
        tl.imbalance(start), balance * np.eye(widths[1]), atol=1e-14 * (1 + abs(balance))
    )
    assert np.linalg.matrix_rank(tl.theta(start)) == min(widths)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda: adapters.learned(1.0, 1.0, row=0.0, overlap=0.5), "row must be positive"),
        (lambda: adapters.learned(1.0, 1.0, row=1.0, overlap=1.5), r"overlap must be in \[0, 1\]"),
        (lambda: adapters.learned(np.inf, 1.0, row=1.0, overlap=0.5), "time must be finite"),
        (lambda: adapters.equivalent(np.zeros((1, 2)), np.eye(2)[0]), "must be a number"),
        (lambda: adapters.layer_weights(0.0, [1.0], [1.0]), "level must be finite and positive"),
        (lambda: adapters.layer_weights(2.0, [1.0], [0.0]), "starts must be positive in one"),
        (lambda: adapters.layer_weights(2.0, [1.0], [1.0, 1.0]), "one number for each layer"),
        (lambda: adapters.layer_time(5.0, 4.0, [1.0], [1.0]), "level must be between"),
        (lambda: tl.balanced_start(jax.random.key(0), (2, 3, 4), 1.0), "h must be at most 2"),
        (lambda: tl.balanced_start(jax.random.key(0), (2, 0, 4)), "shape must be widths >= 1"),
    ],
)
def test_what_is_refused(compute, message):
    with pytest.raises(ValueError, match=message):
        compute()
