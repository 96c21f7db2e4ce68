"""Cross-task linearity: exact gaps, bounds and growth against networks merged and measured.

Unless said otherwise the tolerance is 1e-12: hundreds of operations on numbers of order one in
float64.
"""

import itertools
from functools import partial
from math import comb, log2

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import entropy

from theory import linearity as ctl
from theory.linearity import bounds, correlation, networks, tasks, trees
from theory.linearity.networks import network

ROUNDING = 1e-12
WEIGHTS = {
    "a pair": [0.3, 0.7],
    "a midpoint": [0.5, 0.5],
    "an end": [1.0, 0.0],
    "three": [0.2, 0.5, 0.3],
    "five": [0.1, 0.2, 0.3, 0.15, 0.25],
    "extrapolation": [1.6, -0.9, 0.3],
}
close = partial(np.testing.assert_allclose, rtol=0, atol=ROUNDING)


pytestmark = pytest.mark.usefixtures("float64")


def models(k, sizes, seed=0):
    """k random networks, stacked, in NumPy."""
    rng = np.random.default_rng(seed)
    shapes = zip(sizes[1:], sizes[:-1], strict=True)
    return tuple(rng.normal(size=(k, o, i)) / np.sqrt(i) for o, i in shapes)


def features(layers, x):
    return tuple(networks.features(layers, x))


def measured(f, thetas, weights):
    """The gap in NumPy: f of one model."""
    weights = np.asarray(weights)
    each = [f(*(t[n] for t in thetas)) for n in range(len(weights))]
    whole = f(*(np.tensordot(weights, t, 1) for t in thetas))
    return whole - np.tensordot(weights, np.array(each), 1)


# --- exact gaps -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_quadratic_gap(weights):
    """Compares with the function itself, and with the formula for pairs."""
    rng = np.random.default_rng(1)
    k, a = len(weights), np.array(weights)
    H, g, thetas = rng.normal(size=(3, 4, 4)), rng.normal(size=(3, 4)), rng.normal(size=(k, 4))
    H = H + H.swapaxes(1, 2)

    def f(theta):
        return 0.7 + g @ theta + np.einsum("p,opq,q->o", theta, H, theta) / 2

    found = ctl.quadratic_gap(jnp.asarray(H), jnp.asarray(thetas), weights)
    close(found, measured(f, (thetas,), a))
    d = thetas[:, None] - thetas
    close(found, -np.einsum("i,j,ijp,opq,ijq->o", a, a, d, H, d) / 4)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 4, 3, 2), (3, 4, 2), (2, 3, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_product_gap(weights, sizes):
    """Against products of matrices; its orders against scaled deviations."""
    thetas, a = models(len(weights), sizes), np.array(weights)

    def f(*layers):
        return np.linalg.multi_dot(layers[::-1])

    found = np.asarray(tasks.product_gap(thetas, weights))
    assert found.shape == (len(sizes) - 2, sizes[-1], sizes[0])
    close(found.sum(0), measured(f, thetas, a))
    middle = [np.tensordot(a, t, 1) for t in thetas]
    shrunk = [m + 0.5 * (t - m) for m, t in zip(middle, thetas, strict=True)]
    orders = 0.5 ** np.arange(2, len(sizes))
    close(np.tensordot(orders, found, 1), measured(f, shrunk, a))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.4])
def test_pairs_of_products(alpha):
    """Two layers: -a (1 - a) dW_2 dW_1. Four: order m has the stated factor of a."""
    first, second = (models(2, (3, 4, 2))[n] for n in (0, 1))
    expected = -alpha * (1 - alpha) * (second[0] - second[1]) @ (first[0] - first[1])
    close(tasks.product_gap((first, second), [alpha, 1 - alpha])[0], expected)
    thetas = models(2, (2, 3, 3, 3, 2))
    middle = [alpha * t[0] + (1 - alpha) * t[1] for t in thetas]
    found = tasks.product_gap(thetas, [alpha, 1 - alpha])
    for m in range(2, 5):
        terms = []
        for chosen in itertools.combinations(range(4), m):
            factors = [t[0] - t[1] if n in chosen else middle[n] for n, t in enumerate(thetas)]
            terms.append(np.linalg.multi_dot(factors[::-1]))
        assert len(terms) == comb(4, m)
        factor = alpha * (1 - alpha) * ((1 - alpha) ** (m - 1) + (-1) ** m * alpha ** (m - 1))
        close(found[m - 2], -factor * sum(terms))


@pytest.mark.slow
def test_gap_is_what_networks_do():
    """`gap` on data is the product's gap times the data, layer by layer; and in NumPy."""
    thetas, a = models(3, (3, 4, 5, 2)), np.array([0.2, 0.5, 0.3])
    x = np.random.default_rng(2).normal(size=(6, 3))
    close(tasks.gap(network, thetas, a, x), x @ np.asarray(ctl.product_gap(thetas, a).sum(0)).T)

    def tanh(*layers):
        return np.tanh(np.tanh(x @ layers[0].T) @ layers[1].T) @ layers[2].T

    close(tasks.gap(tasks.tanh_network, thetas, a, x), measured(tanh, thetas, a))
    rests = tasks.gap(features, thetas, a, x)
    close(rests[0], 0.0)
    for depth in (2, 3):
        close(rests[depth - 1], x @ np.asarray(ctl.product_gap(thetas[:depth], a).sum(0)).T)


@pytest.mark.slow
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_squared_loss_of_the_merged(weights):
    rng = np.random.default_rng(3)
    outputs = jnp.asarray(rng.normal(size=(len(weights), 5, 2)))
    y, rest = jnp.asarray(rng.normal(size=(2, 5, 2)))
    merged = np.tensordot(weights, outputs, 1) + rest
    close(ctl.squared_loss(outputs, y, weights, rest), np.sum((merged - y) ** 2))
    members = np.tensordot(weights, np.sum((outputs - y) ** 2, (1, 2)), 1)
    ensemble = np.sum((merged - rest - y) ** 2)
    close(ctl.ambiguity(outputs, weights), members - ensemble)


# --- from pairs to k models -----------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 3, 4, 5, 7, 8, 12])
def test_growth_of_uniform_weights(k):
    a, q = np.full(k, 1 / k), int(log2(k))
    close(ctl.growth(a, ctl.chain(k)), (k + 1) / 2 - 1 / k)
    close(ctl.growth(a), q + 2 - 2 ** (q + 1) / k)
    assert ctl.growth(a) <= ctl.growth(a, ctl.chain(k)) <= k - 1 + ROUNDING


def all_trees(nodes, k):
    """Every binary merge tree on the nodes, as merges."""
    if len(nodes) == 1:
        yield ()
    for m, n in itertools.combinations(nodes, 2):
        rest = [*(v for v in nodes if v not in (m, n)), k]
        for more in all_trees(rest, k + 1):
            yield ((m, n), *more)


@pytest.mark.parametrize("weights", [[0.4, 0.3, 0.2, 0.1], WEIGHTS["five"], [0.9, 0.05, 0.05]])
def test_huffman_is_the_least_growth_of_all_trees(weights):
    k = len(weights)
    least = min(ctl.growth(weights, tree) for tree in all_trees(list(range(k)), k))
    close(ctl.growth(weights), least)
    assert entropy(weights, base=2) <= least + ROUNDING < entropy(weights, base=2) + 1
    close(ctl.growth([0.5, 0.25, 0.125, 0.125]), 1.75)  # dyadic: the entropy itself


@pytest.mark.slow
@pytest.mark.parametrize("weights", [[0.5, 0.0, 0.5, 0.0], WEIGHTS["five"]], ids=["zeros", "five"])
def test_telescope(weights):
    """For every tree the sum is the gap of all, and growth bounds it."""
    k, x = len(weights), np.random.default_rng(4).normal(size=(4, 3))
    thetas = models(k, (3, 3, 1))
    whole = tasks.gap(tasks.tanh_network, thetas, jnp.array(weights), x)
    for merges in (None, ctl.chain(k)):
        found = ctl.telescope(tasks.tanh_network, thetas, weights, x, merges=merges)
        close(found.total, whole)
        largest = np.linalg.norm(found.gaps, axis=(1, 2)).max()
        assert np.linalg.norm(whole) <= ctl.growth(weights, merges) * largest + ROUNDING


def test_linear_on_all_segments_is_not_linear():
    """Lemma 2 without convexity: w_3 w_2 w_1 vanishes between any two of e_1, e_2, e_3."""
    thetas, one = tuple(row.reshape(3, 1, 1) for row in np.eye(3)), np.ones((1, 1))
    for pair in itertools.combinations(range(3), 2):
        for alpha in (0.1, 0.5, 0.8):
            a = np.zeros(3)
            a[list(pair)] = alpha, 1 - alpha
            close(ctl.gap(network, thetas, a, one), 0.0)
    close(ctl.gap(network, thetas, np.full(3, 1 / 3), one), 1 / 27)


# --- bounds on trained networks -------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    """Experts of one tanh checkpoint, and the checkpoint."""
    with jax.enable_x64(True):
        return tasks.tanh_experts(), tasks.pretrained(tasks.tanh_network, tasks.TANH)


SOME = [(0.4, 0.3, 0.2, 0.1), (0.25,) * 4, (0.0, 0.5, 0.5, 0.0), (1.5, -0.2, -0.2, -0.1)]
integral = jax.jit(bounds.integral_gap, static_argnums=0, static_argnames="nodes")


def test_curvature_gives_the_gap_of_a_cube():
    """Which a parabola would not tell from curvature at the other end of each ray."""
    with jax.enable_x64(True):
        found = float(bounds.integral_gap(lambda x: x**3, jnp.array([0.0, 1, 3]), [0.2, 0.3, 0.5]))
    assert found == pytest.approx(1.8**3 - (0.3 + 0.5 * 27), rel=1e-14, abs=0)


@pytest.mark.slow
@pytest.mark.parametrize("weights", SOME, ids=str)
def test_curvature_gives_the_gap(trained, weights):
    """Error of the quadrature: geometric in the nodes, 1e-10 at 40 on the longest rays here."""
    thetas, x = trained[0], tasks.inputs()
    found = tasks.gap(tasks.tanh_network, thetas, weights, x)
    exact = integral(tasks.tanh_network, thetas, weights, x, nodes=40)
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.8])
def test_supremum_bounds_trained_networks(trained, alpha):
    """The bound holds for the loss; the next test shows that it is tight."""
    weights = (alpha, 1 - alpha)
    for pair in ((0, 1), (2, 3)):
        thetas = jax.tree.map(lambda t, pair=pair: t[jnp.array(pair)], trained[0])
        gap = abs(float(tasks.gap(tasks.tanh_loss, thetas, weights)))
        bound = float(tasks.supremum_bound(tasks.tanh_loss, thetas, weights))
        assert 0 < gap <= bound


def half_square(theta):
    return jnp.sum(theta**2) / 2


@pytest.mark.slow
def test_bounds_are_attained():
    """f = |theta|^2 / 2: Hessian 1 everywhere, so that bound, main term and |gap| are one."""
    thetas, weights = jnp.asarray(np.random.default_rng(5).normal(size=(4, 3))), SOME[0]
    found = -float(tasks.gap(half_square, thetas, weights))
    close(tasks.supremum_bound(half_square, thetas, weights), found)
    close(ctl.main_term(tasks.curvature(half_square, thetas[0]), thetas, weights), found)
    close(tasks.second_order_gap(half_square, thetas, weights), -found)
    close(integral(half_square, thetas, weights, nodes=2), -found)
    pair = float(ctl.spread(thetas[:2], [0.3, 0.7]))
    close(pair, 0.21 * np.sum((thetas[0] - thetas[1]) ** 2))


def test_curvature_is_the_norm_of_the_hessian():
    """f = w.(W x): |x|; two independent outputs add in squares."""
    x, theta = np.array([[3.0, 4.0]]), tuple(t[0] for t in models(1, (2, 3, 1)))
    close(tasks.curvature(network, theta, x), 5.0)
    close(tasks.curvature(network, theta, np.concatenate([x, 2 * x])), 5.0 * np.sqrt(5))


def sine(theta, w):
    return jnp.sin(theta @ w)


@jax.jit
@partial(jax.vmap, in_axes=(0, 0, 0, None))
def bound_ratios(thetas, alpha, origin, w):
    """Gap over the bound with its remainder, and without."""
    a = jnp.stack([alpha, 1 - alpha])
    main = bounds.main_term(bounds.curvature(sine, origin, w), thetas, a)
    rest = bounds.remainder(jnp.linalg.norm(w) ** 3, thetas, a, origin)
    return jnp.abs(networks.gap(sine, thetas, a, w)) / jnp.stack([main + rest, main])


@pytest.mark.parametrize("seed", range(3))
def test_theorem_1_with_its_remainder(seed):
    """f = sin(w.theta): |D^3 f| <= |w|^3; random models come within a factor of 20 of the bound,
    and exceed it where its remainder is left out."""
    rng = np.random.default_rng(seed)
    thetas, w = rng.normal(size=(200, 2, 2)), rng.normal(size=2)
    found = bound_ratios(thetas, rng.uniform(size=200), 0.2 * rng.normal(size=(200, 2)), w).max(0)
    assert 0.05 < found[0] <= 1
    assert found[1] > 1


# The remainder of each second-order form is of this order in the step; at the merged model of two
# halves third orders cancel. Between s = .02 and .01 the slope is off by O(s): 0.05.
EDITS = {
    "addition": (lambda p, t, s: bounds.addition(p, pick(t, 0), pick(t, 1), s), 3, 4),
    "negation": (lambda p, t, s: bounds.negation(p, pick(t, 0), s), 4, 4),
    "forgetting": (lambda p, t, s: bounds.forgetting(p, pick(t, 0), s), 4, 3),
    "superposition": (bounds.superposition, 3, 3),
}
pick = tasks.pick


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
def test_task_arithmetic_is_right_to_second_order(trained, edit):
    thetas, start = trained
    vectors = jax.tree.map(lambda t, s: t - s, thetas, start)
    make, *orders = EDITS[edit]
    for at, order in zip((start, None), orders, strict=True):
        left = []
        for step in (0.02, 0.01):
            edited, a = make(start, vectors, step)
            found = tasks.gap(tasks.tanh_network, edited, a, tasks.inputs())
            second = tasks.second_order_gap(tasks.tanh_network, edited, a, tasks.inputs(), at=at)
            left.append(float(jnp.linalg.norm(found - second)))
        assert log2(left[0] / left[1]) == pytest.approx(order, abs=0.05)


@pytest.mark.slow
def test_equation_4_is_minus_twice_equation_3(trained):
    thetas, start = trained
    task = jax.tree.map(lambda t, s: t[0] - s, thetas, start)
    third, fourth = (
        tasks.gap(tasks.tanh_network, *edit(start, task, 0.7), tasks.inputs())
        for edit in (bounds.negation, bounds.forgetting)
    )
    close(fourth, -2 * third)


@pytest.mark.slow
def test_edits_are_the_models_they_say(trained):
    """The weighted means are theta_PT + s (u + v), theta_PT, theta_PT - s u, theta_PT + s sum u."""
    thetas, start = trained
    u = jax.tree.map(lambda t, s: t - s, thetas, start)
    expected = {
        "addition": lambda p, u: p + 0.3 * (u[0] + u[1]),
        "negation": lambda p, u: p,
        "forgetting": lambda p, u: p - 0.3 * u[0],
        "superposition": lambda p, u: p + 0.3 * u.sum(0),
    }
    for name, (make, *_) in EDITS.items():
        merged = ctl.mean(*make(start, u, 0.3))
        jax.tree.map(close, merged, jax.tree.map(expected[name], start, u))


@pytest.mark.slow
def test_loss_bound_under_approximate_linearity(trained):
    """Cross-entropy: merged networks within the bound of their gap, ensembles of that of no gap."""
    thetas, x = trained[0], tasks.inputs()
    labels = jnp.asarray(np.eye(2)[np.arange(tasks.POINTS) % 2])

    @jax.jit
    def compare(weights):
        outputs = jax.vmap(lambda t: tasks.tanh_network(t, x))(thetas)
        losses = jax.vmap(networks.cross_entropy, (0, None))(outputs, labels)
        gap = networks.gap(tasks.tanh_network, thetas, weights, x)
        size = jnp.linalg.norm(gap, axis=1).mean()
        ensemble = ctl.mean(outputs, weights)
        return (
            networks.cross_entropy(ensemble + gap, labels),
            ctl.loss_bound(losses, weights, size, np.sqrt(2)),
            networks.cross_entropy(ensemble, labels),
            ctl.loss_bound(losses, weights),
        )

    for weights in SOME[:3]:
        merged, bound, ensemble, mean = map(float, compare(weights))
        assert merged <= bound
        assert ensemble <= mean + ROUNDING


# --- predictors -----------------------------------------------------------------------------------


def test_r_squared_from_three_coefficients_of_variation():
    """Monte Carlo: 40 batches of 500 independent gammas of unit mean and given variance, |z| < 4
    against the null that the formula is right; the bias of R^2 is below 1 / 500."""
    cv2 = (0.2, 0.1, 0.3)
    rng = np.random.default_rng(6)
    L, S, U = (jnp.asarray(rng.gamma(1 / v, v, size=(40, 500))) for v in cv2)
    expected = ctl.r_squared(*cv2)
    for found, x in zip(expected, (L * S, S, L), strict=True):
        draws = np.asarray(correlation.regression(x, L * S * U))
        error = draws.std(ddof=1) / np.sqrt(draws.size)
        assert abs(draws.mean() - float(found)) < 4 * error + 1 / 500
    assert float(expected.joint) >= float(expected.distance) + float(expected.curvature)
    close(ctl.r_squared(0.2, 0.1, 0.0).joint, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("h", "i"), [(1, 1), (3, 2)])
def test_direction_cv2(h, i):
    """Moments of U over 2e5 directions; |z| < 4 for each of E U and E U^2 by their own spread."""
    dw, dW = correlation.random_differences(jax.random.key(7), 200_000, h, i)
    U = 2 * np.abs(np.einsum("nh,nh->n", dw, dW[:, :, 0]))
    p = h * (i + 1)
    second = 4 * h / (p * (p + 2))
    first = np.sqrt(second / (1 + float(ctl.direction_cv2(h, i))))
    for draws, expected in ((U, first), (U**2, second)):
        assert abs(draws.mean() - expected) < 4 * draws.std() / np.sqrt(U.size)


# --- boundaries -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ctl.mean(np.eye(2), [0.5, 0.6]), "weights must sum to 1; got 1.1"),
        (lambda: ctl.mean(np.eye(2), [0.5, np.nan]), "weights must sum to 1; got nan"),
        (lambda: ctl.mean(np.eye(3), [0.5, 0.5]), "one model per weight"),
        (lambda: ctl.mean({"w": np.ones(())}, [1.0]), "one model per weight.*a scalar"),
        (lambda: ctl.mean(np.eye(2), 1.0), "one model per weight"),
        (lambda: ctl.product_gap((jnp.ones((2, 1, 1)),), [0.5, 0.5]), "got 1 layers"),
        (lambda: ctl.main_term(1.0, np.eye(2), [1.5, -0.5]), ">= 0 for this bound; got -0.5"),
        (lambda: ctl.remainder(-1.0, np.eye(2), [0.5, 0.5]), "third must be a finite bound >= 0"),
        (lambda: ctl.loss_bound(jnp.ones(2), [1.5, -0.5]), ">= 0 for this bound"),
        (lambda: ctl.huffman([1.5, -0.5]), "numbers >= 0"),
        (lambda: ctl.chain(1), "at least 2 models"),
        (lambda: ctl.growth([0.5, 0.5], ()), "0 merges do not join 2 models"),
        (lambda: ctl.growth([0.5, 0.2, 0.3], ((0, 1), (1, 2))), r"merge \(1, 2\) needs"),
        (lambda: ctl.r_squared(0.1, -0.1, 0.1), "distance must be a squared coefficient"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_float32_and_traced_weights():
    """Tolerance: 4 eps of numbers of order one; traced values are not checked."""
    with jax.enable_x64(False):
        thetas = tuple(jnp.asarray(t, jnp.float32) for t in models(3, (3, 4, 2)))
        found = jax.jit(ctl.product_gap)(thetas, jnp.full(3, 1 / 3))
        assert found.dtype == jnp.float32
    expected = ctl.product_gap(models(3, (3, 4, 2)), np.full(3, 1 / 3))
    np.testing.assert_allclose(found, expected, atol=8 * float(np.finfo(np.float32).eps))


# --- the ledger -----------------------------------------------------------------------------------


def test_the_tree_of_the_ledger_grows_slower_than_the_chain():
    assert trees.growth(tasks.WEIGHTS) < tasks.K - 1
