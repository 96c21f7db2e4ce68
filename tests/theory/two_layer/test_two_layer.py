"""Exact dynamics of two-layer linear networks against high-order integration and closed forms."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy.integrate import solve_ivp

from theory import two_layer as tl
from theory.two_layer import modes, networks

TIMES = np.array([0.1, 1.0, 5.0, 15.0, 30.0, 80.0, 300.0, 1000.0])


pytestmark = pytest.mark.usefixtures("float64")


def balanced(rng, o, h, i, balance, rank) -> tl.Layers:
    """A start of the given rank with W_1^T W_1 - W_2 W_2^T = balance I."""
    s = np.where(np.arange(h) < rank, rng.uniform(0.1, 0.5, h), 0.0)
    first, second = np.zeros((o, h)), np.zeros((h, i))
    np.fill_diagonal(first, np.sqrt(s**2 + max(balance, 0)))
    np.fill_diagonal(second, np.sqrt(s**2 + max(-balance, 0)))
    U, R, V = (np.linalg.qr(rng.normal(size=(n, n)))[0] for n in (o, h, i))
    return tl.Layers(jnp.asarray(U @ first @ R.T), jnp.asarray(R @ second @ V.T))


def matrix(rng, o, i, values):
    """A random matrix with the given singular values."""
    U, V = (np.linalg.qr(rng.normal(size=(n, n)))[0] for n in (o, i))
    return (U[:, : len(values)] * values) @ V[:, : len(values)].T


def integrate(start, target, times, anchor=0.0):
    """DOP853 at rtol 1e-13 for W_1 and W_2 themselves."""
    (o, h), i = start.w1.shape, start.w2.shape[1]
    centre = np.asarray(start.w1 @ start.w2)

    def split(y):
        return y[: o * h].reshape(o, h), y[o * h :].reshape(h, i)

    def speed(_, y):
        w1, w2 = split(y)
        pull = (w1 @ w2 - target) + anchor * (w1 @ w2 - centre)
        return -2 * np.concatenate([(pull @ w2.T).ravel(), (w1.T @ pull).ravel()])

    # From time to time, because interpolation between steps is a thousand times less accurate.
    y, found = np.concatenate([np.ravel(w) for w in start]), []
    for before, after in itertools.pairwise([0.0, *times]):
        if after > before:
            leg = solve_ivp(speed, (before, after), y, "DOP853", rtol=1e-13, atol=1e-15)
            y = leg.y[:, -1]
        found.append(split(y))
    return [np.stack(w) for w in zip(*found, strict=True)]


def stacked(w1, w2):
    """P = Q Q^T, all that is invariant under rotations of the hidden space."""
    q = np.concatenate([w1, np.swapaxes(w2, -1, -2)], axis=-2)
    return q @ np.swapaxes(q, -1, -2)


# o, h, i, balance, rank of the start, singular values of the target
SUBJECTS = {
    "square": (5, 5, 5, 0.0, 5, (1.0, 0.9, 0.5, 0.3, 0.2)),
    "bottleneck": (5, 2, 4, 0.0, 2, (1.0, 0.8, 0.5, 0.3)),
    "wide": (3, 8, 4, 0.0, 3, (1.0, 0.7, 0.4)),
    "wide, rank-deficient": (3, 8, 4, 0.0, 2, (1.0, 0.7, 0.4)),
    "rank-deficient target": (5, 5, 5, 0.0, 5, (1.0, 0.5)),
    "no target": (4, 3, 4, 0.0, 3, (0.0,)),
    "equal singular values": (4, 4, 4, 0.0, 4, (1.0, 1.0, 0.5, 0.5)),
    "W_1 heavier": (6, 3, 4, 0.7, 3, (1.0, 0.6, 0.3)),
    "W_2 heavier, rank one": (2, 3, 5, -0.5, 1, (1.0, 0.6)),
    "W_1 heavier, equal": (4, 4, 4, 0.3, 2, (1.0, 1.0, 0.4, 0.4)),
}


def problem(subject):
    o, h, i, balance, rank, values = subject
    rng = np.random.default_rng(0)
    start, target = balanced(rng, o, h, i, balance, rank), matrix(rng, o, i, values)
    return (start if balance or rank >= min(o, h, i) else tl.thin(start, rank)), target


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_flow_against_high_order_integration(subject):
    """Up to t = 300. Tolerance 1e-10: rtol 1e-13 of the integrator, amplified by growing modes."""
    start, target = problem(SUBJECTS[subject])
    path = tl.flow(start, target, TIMES)
    expected = stacked(*integrate(start, target, TIMES[:-1]))
    found = stacked(*map(np.asarray, path))
    np.testing.assert_allclose(found[:-1], expected, rtol=0, atol=1e-10)
    assert np.isfinite(found).all()


@pytest.mark.slow
def test_textbook_form_fails_where_the_flow_does_not():
    """The same closed form in one piece loses all digits once 4 sigma_1 t > log(1/eps) = 36."""
    rng = np.random.default_rng(0)
    start, target = balanced(rng, 4, 4, 4, 0.0, 4), matrix(rng, 4, 4, (1.0, 0.9, 0.5, 0.3))
    F = np.block([[np.zeros((4, 4)), 2 * target], [2 * target.T, np.zeros((4, 4))]])
    f, O = np.linalg.eigh(F)
    q0 = np.concatenate([start.w1, start.w2.T])

    def textbook(t):
        grown = O @ np.diag(np.exp(f * t)) @ O.T @ q0
        integral = O @ np.diag(np.expm1(2 * f * t) / (2 * f)) @ O.T
        return grown @ np.linalg.inv(np.eye(4) + 2 * q0.T @ integral @ q0) @ grown.T

    expected = stacked(*map(np.asarray, tl.flow(start, target, [2.0, 80.0])))
    np.testing.assert_allclose(textbook(2.0), expected[0], atol=1e-10)
    assert np.abs(textbook(80.0) - expected[1]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("subject", ["square", "wide, rank-deficient", "W_1 heavier", "no target"])
def test_float32_at_long_times(subject):
    """Error model: 20 eps. On an uneven grid short increments take few substeps."""
    start, target = problem(SUBJECTS[subject])
    expected = stacked(*map(np.asarray, tl.flow(start, target, TIMES)))
    with jax.enable_x64(False):
        single = tl.Layers(*(jnp.asarray(w, jnp.float32) for w in start))
        path = tl.flow(single, jnp.asarray(target, jnp.float32), TIMES)
        assert path.w1.dtype == jnp.float32
    found = stacked(*map(np.asarray, path))
    np.testing.assert_allclose(found, expected, atol=float(20 * np.finfo(np.float32).eps))


@pytest.mark.slow
def test_rank_deficient_starts():
    """Two modes out of three: the flow ends at the best approximation of rank 2. Without `thin`,
    rounding brings in the third one, after t = 15 (e^{0.8 t} eps = 4e-11)."""
    rng = np.random.default_rng(0)
    wide, target = balanced(rng, 3, 8, 4, 0.0, 2), matrix(rng, 3, 4, (1.0, 0.7, 0.4))
    start = tl.thin(wide, 2)
    assert start.w1.shape == (3, 2)
    np.testing.assert_allclose(stacked(*start), stacked(*wide), atol=1e-14)
    path, leaking = tl.flow(start, target, [10.0, 200.0]), tl.flow(wide, target, [10.0, 200.0])
    np.testing.assert_allclose(stacked(*path)[0], stacked(*leaking)[0], atol=1e-10)
    losses = np.array([tl.loss(path, target)[1], tl.loss(leaking, target)[1]])
    np.testing.assert_allclose(losses, [0.4**2, 0.0], atol=1e-12)
    with pytest.raises(ValueError, match="rank is at least 2"):
        tl.thin(wide, 1)


@pytest.mark.slow
def test_tasks_chain_and_the_grid_does_not_matter():
    rng = np.random.default_rng(1)
    start = balanced(rng, 5, 5, 5, 0.0, 5)
    tasks = [matrix(rng, 5, 5, (1.0, 0.8, 0.6, 0.4, 0.2)) for _ in range(3)]
    numeric = exact = start
    for target, anchor in zip(tasks, (0.0, 0.5, 2.0), strict=True):
        w1, w2 = integrate(numeric, target, [7.0], anchor)
        numeric = tl.Layers(jnp.asarray(w1[0]), jnp.asarray(w2[0]))
        path = tl.flow(exact, target, [0.0, 1e-3, 0.5, 0.5, 7.0], anchor=anchor, steps=64)
        np.testing.assert_allclose(path.w1[0] @ path.w2[0], tl.theta(exact), atol=1e-14)
        np.testing.assert_array_equal(path.w1[2], path.w1[3])
        whole = tl.flow(exact, target, [7.0], anchor=anchor, steps=64)
        exact = jax.tree.map(lambda w: w[-1], path)
        np.testing.assert_allclose(tl.theta(whole)[0], tl.theta(exact), atol=1e-12)
    np.testing.assert_allclose(stacked(*exact), stacked(*numeric), atol=1e-10)


@pytest.mark.slow
def test_what_the_flow_conserves_and_how_theta_moves():
    """The imbalance is conserved; d theta/dt = -2 (W_1 W_1^T R + R W_2^T W_2), R = theta - A."""
    rng = np.random.default_rng(2)
    start, target = balanced(rng, 6, 3, 4, 0.7, 3), matrix(rng, 6, 4, (1.0, 0.6, 0.3))
    times = jnp.array([0.5, 2.0])
    path, speed = jax.jvp(lambda t: tl.flow(start, target, t, steps=64), (times,), (jnp.ones(2),))
    np.testing.assert_allclose(tl.imbalance(path), 0.7 * np.eye(3)[None].repeat(2, 0), atol=1e-12)
    left, right = tl.grams(path)
    error = tl.theta(path) - target
    moved = speed.w1 @ path.w2 + path.w1 @ speed.w2
    np.testing.assert_allclose(moved, -2 * (left @ error + error @ right), atol=1e-10)
    # The tangent kernel, by autodiff of the outputs.
    x, y = rng.normal(size=(2, 4)), rng.normal(size=(3, 4))
    flat, unravel = ravel_pytree(start)

    def jacobian(points):
        return jax.jacobian(lambda flat: points @ tl.theta(unravel(flat)).T)(flat)

    kernel = jnp.einsum("nop,mqp->nmoq", jacobian(x), jacobian(y))
    np.testing.assert_allclose(
        tl.tangent_kernel(start, jnp.asarray(x), jnp.asarray(y)), kernel, atol=1e-12
    )


@pytest.mark.slow
def test_derivatives_where_singular_values_coincide():
    """Central differences of step 1e-5: relative error 1e-8."""
    start, target = tl.identity_start(3, 1.0), jnp.diag(jnp.array([1.0, 1.0, 0.5]))
    weights = jnp.arange(9.0).reshape(3, 3)
    direction = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)))

    @jax.jit
    def value(shift, time, scale, anchor):
        layers = jax.tree.map(lambda w: scale * w, start)
        times = jnp.array([1.0, time])
        path = tl.flow(layers, target + shift * direction, times, anchor=anchor, steps=32)
        return jnp.sum(weights * tl.theta(path)[-1] ** 2)

    at = (0.0, 3.0, 1.0, 0.2)
    slopes = jax.grad(value, (0, 1, 2, 3))(*at)
    for k, slope in enumerate(slopes):
        up, down = (value(*(x + s * (j == k) for j, x in enumerate(at))) for s in (1e-5, -1e-5))
        assert float(slope) == pytest.approx(float(up - down) / 2e-5, rel=1e-6, abs=1e-8)


@pytest.mark.slow
def test_flow_vectorises_and_compiles_once():
    rng = np.random.default_rng(3)
    start = balanced(rng, 4, 4, 4, 0.0, 4)
    targets = np.stack([matrix(rng, 4, 4, (1.0, 0.6, 0.4, 0.2)) for _ in range(3)])
    batched = jax.vmap(lambda a: tl.theta(tl.flow(start, a, [2.0], steps=8)))(targets)
    for target, found in zip(targets, batched, strict=True):
        expected = tl.theta(tl.flow(start, target, [2.0]))
        np.testing.assert_allclose(found, expected, atol=1e-12)
    assert tl.substeps(start, targets[0], [1.9]) == tl.substeps(start, targets[0], [1.5]) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": np.eye(3)}, r"expected W_1 \[o h\]"),
        ({"target": np.full((4, 4), np.nan)}, "target must be finite"),
        (
            {"start": tl.Layers(jnp.diag(jnp.array([1.0, 2, 3, 4])), jnp.eye(4))},
            r"needs W_1\^T W_1",
        ),
        ({"times": [1.0, 0.5]}, "times must be ascending"),
        ({"times": [-1.0]}, "times must be ascending"),
        ({"times": []}, "non-empty vector"),
        ({"anchor": -0.5}, "anchor must be finite and >= 0"),
        ({"steps": 1, "times": [50.0]}, "steps must be at least 128"),
    ],
)
def test_bad_input_is_named(change, message):
    given = {"start": tl.identity_start(4, 1.0), "target": np.eye(4), "times": [1.0], **change}
    with pytest.raises(ValueError, match=message):
        tl.flow(given.pop("start"), given.pop("target"), given.pop("times"), **given)


@pytest.mark.slow
def test_traced_problems_need_steps():
    few = jax.jit(lambda a: tl.flow(tl.identity_start(2, 1.0), a, [1.0, 9.0], steps=4).w1)
    found = few(jnp.eye(2))  # |F| = 2: 2 substeps, then 16
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()
    with pytest.raises(ValueError, match="steps must be given"):
        jax.jit(lambda a: tl.flow(tl.identity_start(2, 1.0), a, [1.0]))(jnp.eye(2))


# --- aligned modes and incremental learning -------------------------------------------------------


@pytest.mark.slow
def test_sigmoid_law_is_the_aligned_case():
    sigma, start = np.array([2.0, 1.2, 0.5, 0.0]), np.array([1e-3, 1e-6, 0.7, 0.4])
    root = jnp.diag(jnp.sqrt(start))
    times = np.array([0.5, 2.0, 50.0])
    path = tl.flow(tl.Layers(root, root), np.diag(sigma), times)
    law = modes.mode(times[:, None], start, sigma)
    np.testing.assert_allclose(np.diagonal(tl.theta(path), 0, 1, 2), law, rtol=1e-11)
    np.testing.assert_allclose(modes.mode(3.0, 0.2, -0.5), 0.0, atol=0.2 * np.exp(-6) * 1.0001)


def test_a_mode_crosses_a_level_at_its_time():
    level = 0.3
    time = modes.crossing_time(level, 1e-6, 1.2)
    assert float(modes.mode(time, 1e-6, 1.2)) == pytest.approx(level, rel=1e-12, abs=0)


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [False, True])
def test_staircase_and_its_error_in_tau(symmetric):
    """theta(t_i) is the rank-i truncation up to e^{-C_i tau}; rates between tau = 8 and 12, to 2 %
    (next order e^{-2 C_i tau})."""
    rng = np.random.default_rng(5)
    sigma = np.array([3.0, 1.5, 0.5])
    U, V = (np.linalg.qr(rng.normal(size=(3, 3)))[0] for _ in range(2))
    V[:, -1] *= np.linalg.det(U) * np.linalg.det(V)
    V = U if symmetric else V
    target = (U * sigma) @ V.T
    assert modes.learned_modes(target).all()
    logs = []
    for tau in (8.0, 12.0):
        path = tl.flow(tl.identity_start(3, tau), target, modes.plateau_times(sigma, tau))
        cut = [(U[:, : n + 1] * sigma[: n + 1]) @ V[:, : n + 1].T for n in range(3)]
        logs.append(np.log(np.linalg.norm(tl.theta(path) - np.array(cut), axis=(1, 2))))
    np.testing.assert_allclose((logs[0] - logs[1]) / 4, modes.plateau_rates(sigma), rtol=0.02)


def test_layers_do_not_converge_to_the_printed_ones():
    """Theorem A.1 for the layers: at U = V, W_1 tends to U Sigma^{1/2} U^T."""
    U = np.linalg.qr(np.random.default_rng(6).normal(size=(3, 3)))[0]
    sigma = np.array([3.0, 2.0, 1.0])
    target = (U * sigma) @ U.T
    path = networks.gradient_flow(
        tl.identity_start(3, 8.0), jnp.asarray(target), jnp.array([8.0, 16.0]), 2000
    )
    np.testing.assert_allclose(path.w1[-1], (U * np.sqrt(sigma)) @ U.T, atol=1e-8)
    assert np.linalg.norm(path.w1[-1] - U * np.sqrt(sigma)) > 1


@pytest.mark.parametrize("seed", range(6))
def test_half_of_all_targets_stall_at_a_saddle(seed):
    """Independent: the flow itself, stopped before rounding lets go (e^{2 sigma t} eps << 1)."""
    rng = np.random.default_rng(seed)
    sign = -1 if seed % 2 else 1
    target = matrix(rng, 4, 4, (2.0, 1.5, 1.0, 0.5))
    target *= np.array([sign * np.sign(np.linalg.det(target)), 1, 1, 1])[:, None]
    learned = modes.learned_modes(target)
    assert learned.all() == (sign > 0)
    left = np.sum(np.array([2.0, 1.5, 1.0, 0.5])[~learned] ** 2)
    path = tl.flow(tl.identity_start(4, 1.0), target, [14.0])
    assert float(tl.loss(path, target)[0]) == pytest.approx(left, abs=1e-3)


@pytest.mark.slow
def test_two_stalled_modes():
    target = np.diag([2.0, -1.5, -1.0])
    assert modes.learned_modes(target).tolist() == [True, False, False]
    swap = np.array([[0, 2.0, 0], [2.0, 0, 0], [0, 0, 1.0]])
    path = tl.flow(tl.identity_start(3, 1.0), swap, [6.0])
    left = np.linalg.svd(swap)[1][~modes.learned_modes(swap)] ** 2
    assert float(tl.loss(path, swap)[0]) == pytest.approx(left.sum(), abs=1e-6)


def test_definitions_of_the_inflection_point():
    assert modes.inflection(np.array([5.0, 4, 3])) is None
    assert modes.monotone_from(np.array([5.0, 4, 3])) is None
    assert modes.inflection(np.array([5.0, 4, 6, 5, 7])) == 1
    assert modes.monotone_from(np.array([5.0, 4, 6, 5, 7])) == 3
    assert modes.inflection(np.array([1.0, 2]), first=0) == 0
    assert modes.monotone_from(np.array([1.0, 2])) == 0
    with pytest.raises(ValueError, match="sorted downwards"):
        modes.plateau_times(np.array([1.0, 2.0]), 3.0)
    with pytest.raises(ValueError, match="square matrix"):
        modes.learned_modes(np.ones((2, 3)))
