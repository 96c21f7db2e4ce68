"""Weights of the proximal parameter against quadratic programmes, geometry and each other."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import diagonal
from scipy.optimize import minimize

from sail_jax import distances, proximal

EPS = np.finfo(float).eps


def cloud(n=4, dim=6, seed=0):
    """Models, a target, and the distances between them."""
    rng = np.random.default_rng(seed)
    models, target = rng.normal(size=(n, dim)), 0.3 * rng.normal(size=dim)
    between = np.linalg.norm(models[:, None] - models, axis=-1)
    return models, target, np.linalg.norm(models - target, axis=1), between


def over_supports(H):
    """The least w^T H w / 2 over the simplex: the best affine minimiser, among all supports, that
    is positive."""
    n, best = len(H), (math.inf, np.zeros(len(H)))
    for size in range(1, n + 1):
        for kept in map(list, itertools.combinations(range(n), size)):
            K = np.block([[H[np.ix_(kept, kept)], np.ones((size, 1))], [np.ones((1, size)), 0]])
            if np.linalg.cond(K) > 1e10:
                continue
            w = np.zeros(n)
            w[kept] = np.linalg.solve(K, np.r_[np.zeros(size), 1])[:size]
            if (w >= 0).all():
                best = min(best, (w @ H @ w / 2, w), key=lambda found: found[0])
    return best


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("n", "dim"), [(2, 1), (3, 2), (4, 6), (6, 5)])
def test_affine_weights_project_the_target(n, dim, seed):
    models, target, to_target, between = cloud(n, dim, seed)
    found = proximal.affine_weights(proximal.gram_from_distances(to_target, between))
    assert found.condition is not None
    slack = 100 * EPS * found.condition
    assert found.weights.sum() == pytest.approx(1, abs=slack)
    # the residual is orthogonal to the hull
    residual = found.weights @ models - target
    assert abs((models - models[0]) @ residual).max() < slack * abs(models).max() ** 2
    assert found.objective == pytest.approx(residual @ residual, abs=slack)


def test_affine_weights_are_equation_12_where_it_holds_and_go_on_where_it_does_not():
    _, _, to_target, between = cloud(4, 6)
    H = proximal.gram_from_distances(to_target, between)
    ratio = np.linalg.solve(H, np.ones(4))
    assert proximal.affine_weights(H).weights == pytest.approx(ratio / ratio.sum(), rel=1e-12)
    # a target that a combination attains: H is singular, the weights unique
    models, *_ = cloud(3, 5)
    w = np.array([0.5, -0.3, 0.8])
    found = proximal.from_parameters(list(models), w @ models, constraint="affine")
    assert found.weights == pytest.approx(w, abs=1e-13)
    assert found.objective == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("n", "dim"), [(1, 3), (2, 3), (4, 6), (5, 4), (7, 9)])
def test_simplex_weights_solve_the_quadratic_programme(n, dim, seed):
    *_, to_target, between = cloud(n, dim, seed)
    H = proximal.gram_from_distances(to_target, between)
    found = proximal.simplex_weights(H)
    value, w = over_supports(H)
    assert found.objective == pytest.approx(value, abs=1e-12)
    assert found.weights == pytest.approx(w, abs=1e-8)
    assert (found.weights >= 0).all()
    assert found.weights.sum() == pytest.approx(1, abs=8 * EPS)
    if (w > 0).all():
        assert found.weights == pytest.approx(proximal.affine_weights(H).weights, abs=1e-12)


def test_simplex_weights_against_slsqp_with_many_models():
    models, target, *_ = cloud(30, 40)
    D = models + 1.0 - target
    H = 2 * D @ D.T
    found = proximal.simplex_weights(H)
    other = minimize(
        lambda w: w @ H @ w / 2,
        np.full(30, 1 / 30),
        jac=lambda w: H @ w,
        bounds=[(0, 1)] * 30,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(30)},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    assert found.objective <= other.fun + 1e-12
    assert found.weights == pytest.approx(other.x, abs=1e-5)  # its value to 1e-10, its root here
    # what proves it: the slope is least, and equal, where weights are positive
    slope = H @ found.weights
    assert abs(slope[found.weights > 0] - 2 * found.objective).max() < 1e-12 * abs(H).max()
    assert slope.min() > 2 * found.objective - 1e-12 * abs(H).max()


def test_simplex_weights_of_more_models_than_dimensions():
    models, target, *_ = cloud(9, 2, 3)  # the target lies within the hull
    found = proximal.from_parameters(list(models), target, constraint="simplex")
    assert found.condition == math.inf
    assert found.weights @ models == pytest.approx(target, abs=1e-7)
    same = proximal.simplex_weights(np.zeros((3, 3)))
    assert same.weights.sum() == 1
    assert same.objective == 0


LAWS = [proximal.affine_weights, proximal.simplex_weights]


@pytest.mark.parametrize("weights", LAWS)
def test_laws_of_weights(weights):
    *_, d, D = cloud(5, 7)
    H = proximal.gram_from_distances(d, D)
    w = weights(H).weights
    order = np.random.default_rng(0).permutation(5)
    same = pytest.approx(w[order], abs=1e-12)
    assert weights(H[np.ix_(order, order)]).weights == same
    scaled = weights(proximal.gram_from_distances(1e3 * d, 1e3 * D))
    assert scaled.weights == pytest.approx(w, abs=1e-11)
    assert scaled.objective == pytest.approx(1e6 * weights(H).objective, rel=1e-11)
    # the target's distance from the hull does not matter
    higher = proximal.gram_from_distances(np.sqrt(d**2 + 9), D)
    assert weights(higher).weights == pytest.approx(w, abs=1e-11)


def test_a_ridge_pulls_towards_equal_weights():
    *_, d, D = cloud(4, 6)
    H = proximal.gram_from_distances(d, D)
    norms = [np.linalg.norm(proximal.affine_weights(H, ridge=r).weights) for r in (0, 0.1, 1, 1e9)]
    assert norms == sorted(norms, reverse=True)
    assert norms[-1] == pytest.approx(0.5, abs=1e-8)
    twice = np.ones((3, 3)) + np.diag([0, 0, 4.0])  # two models that are one
    found = proximal.affine_weights(twice, ridge=1e-6).weights
    assert found == pytest.approx([0.5, 0.5, 0], abs=1e-5)  # of order ridge + eps / ridge


def test_a_ridge_is_relative_to_the_form():
    *_, d, D = cloud(4, 6)
    H = proximal.gram_from_distances(d, D)
    one, many = (proximal.affine_weights(c * H, ridge=0.1).weights for c in (1, 1000))
    assert one == pytest.approx(many, abs=1e-12)


# Two models


def test_pair_weight_is_the_affine_weight_of_model_1():
    _, _, d, D = cloud(2, 3)
    w = proximal.affine_weights(proximal.gram_from_distances(d, D)).weights
    assert float(proximal.pair_weight(d[0], d[1], D[0, 1])) == pytest.approx(w[0], abs=1e-14)
    second = proximal.pair_weight(d[0], d[1], D[0, 1], model=2)
    assert float(second) == pytest.approx(w[1], abs=1e-14)
    squares = proximal.pair_weight(d[0] ** 2, d[1] ** 2, D[0, 1] ** 2, squared=True)
    assert float(squares) == pytest.approx(w[0], abs=1e-14)
    H = proximal.gram_from_distances(d**2, D**2, squared=True)
    assert np.abs(H - proximal.gram_from_distances(d, D)).max() < 1e-14


def test_pair_weight_is_unbounded_and_its_clipping_is_the_simplex():
    beyond = float(proximal.pair_weight(5.0, 1.0, 4.0))  # on a line, past model 2
    assert beyond == -0.25
    H = proximal.gram_from_distances([5.0, 1.0], [[0.0, 4.0], [4.0, 0.0]])
    assert proximal.simplex_weights(H).weights.tolist() == [0.0, 1.0]
    # nearer models weigh more, of two
    assert (proximal.pair_weight([1.0, 2.0], [2.0, 1.0], 2.5) > 0.5).tolist() == [True, False]


def test_nearer_models_need_not_weigh_more_among_three():
    models = np.array([[1.0, 0.0], [1.1, 0.2], [-1.5, -0.1]])
    order = np.linalg.norm(models, axis=1).argsort()
    weights = proximal.from_parameters(list(models), np.zeros(2), constraint="simplex").weights
    assert order.tolist() == [0, 1, 2]
    assert weights[2] > weights[1]


@pytest.mark.parametrize("size", [1e-2, 3e-2])
def test_the_bias_of_total_variation_to_leading_order(size):
    d1, d2, d12 = size * np.array([1.0, 2.0, 2.5])
    a, b, c = d1**2, d2**2, d12**2
    leading = (b - a) * (c - a - b) / (24 * c)
    # the next order is smaller by a factor of order size^2
    assert float(proximal.tv_bias(d1, d2, d12)) == pytest.approx(leading, rel=size)
    assert abs(float(proximal.tv_bias(3.0, 4.0, 5.0))) > 1e-3  # exact at right angles only as -> 0
    assert abs(float(proximal.tv_bias(2.0, 2.0, 3.0))) < 1e-15


def test_far_apart_total_variation_says_half_and_its_inverse_does_not():
    d = np.array([6.0, 9.0, 10.0])
    right = proximal.pair_weight(*d)
    with jax.enable_x64(True):
        tv = distances.total_variation_gaussian(d[:, None])
        back = np.asarray(distances.gaussian_separation(tv))
        tv = np.asarray(tv)
    assert float(proximal.pair_weight(*tv)) == pytest.approx(0.5, abs=3e-3)
    assert float(right) == pytest.approx(0.725, abs=1e-12)
    # eps of a TV, over the normal density at 5, times d: 1e-9
    assert float(proximal.pair_weight(*back)) == pytest.approx(float(right), abs=1e-8)
    assert float(proximal.tv_bias(*d)) == pytest.approx(
        float(proximal.pair_weight(*tv)) - float(right), abs=1e-14
    )


@pytest.mark.soak
def test_weights_of_gaussian_tasks_from_their_samples():
    """Unbiased squared distances of linear kernels are those of means: weights follow."""
    rng, runs, n = np.random.default_rng(0), 400, 200
    means = np.array([[0.0, 0.0], [3.0, 0.0], [1.0, 1.0]])
    keys = rng.normal(size=(runs, 3, n, 2)) + means[:, None]
    inner = lambda x, y: jnp.sum(x * y)  # noqa: E731
    square = jax.jit(jax.vmap(lambda x, y: distances.mmd(x, y, kernel=inner).value))
    one, two, both = (
        np.asarray(square(keys[:, i], keys[:, j])) for i, j in ((0, 2), (1, 2), (0, 1))
    )
    w = proximal.pair_weight(one, two, both, squared=True)
    # null: the mean weight is 2/3, but for the ratio's bias, of order var(d12^2)/d12^4 = 1e-3
    assert abs(w.mean() - 2 / 3) < 4 * w.std(ddof=1) / math.sqrt(runs) + 1e-3


# From models


def trees(n=3, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)

    def make():
        return {"a": rng.normal(size=(3, 2)).astype(dtype), "b": [rng.normal(size=4).astype(dtype)]}

    return [make() for _ in range(n)], make()


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]).astype(float)


def test_from_parameters_is_least_squares():
    models, target = trees()
    A, b = np.stack([flat(m) for m in models]).T, flat(target)
    w, residual, *_ = np.linalg.lstsq(A, b)
    found = proximal.from_parameters(models, target)
    assert found.weights == pytest.approx(w, abs=1e-13)
    assert found.objective == pytest.approx(residual[0], rel=1e-12)
    assert found.condition == pytest.approx(np.linalg.cond(A) ** 2, rel=1e-10)
    d = np.linalg.norm(A - b[:, None], axis=0)
    between = np.linalg.norm(A[:, :, None] - A[:, None], axis=0)
    H = proximal.gram_from_distances(d, between)
    for constraint, weights in (("affine", LAWS[0]), ("simplex", LAWS[1])):
        constrained = proximal.from_parameters(models, target, constraint=constraint)
        assert constrained.weights == pytest.approx(weights(H).weights, abs=1e-12)
        assert constrained.objective >= found.objective - 1e-12


def quadratic(params, batch):
    return 0.5 * sum(
        jnp.sum((x - y) ** 2) for x, y in zip(*map(jax.tree.leaves, (params, batch)), strict=True)
    )


@pytest.mark.parametrize(("steps", "constraint"), diagonal([3, 0], ["none", "affine", "simplex"]))
def test_from_loss_finds_the_proximal_parameter_of_a_quadratic(steps, constraint):
    """SGD shrinks the distance from the optimum by (1 - eta)^k: the best weights are eq. 4's."""
    models, target = trees(dtype=np.float64)
    train = jax.tree.map(lambda x: np.stack([x] * steps), target) if steps else None
    with jax.enable_x64(True):
        found = proximal.from_loss(
            models,
            quadratic,
            train,
            target,
            optimizer=optax.sgd(0.1),
            constraint=constraint,
            steps=400,
            descent=optax.sgd(0.05),
        )
    expected = proximal.from_parameters(models, target, constraint=constraint)
    assert found.weights == pytest.approx(expected.weights, abs=1e-6)
    shrunk = 0.5 * 0.9 ** (2 * steps) * expected.objective
    assert found.objective == pytest.approx(shrunk, rel=1e-9)
    assert found.condition is None


@pytest.mark.slow
def test_sweep_and_gradient_of_the_loss_after_training():
    models, target = trees(2, dtype=np.float64)
    other, _ = trees(3, seed=1, dtype=np.float64)
    train = jax.tree.map(lambda *x: np.stack(x), *other)
    with jax.enable_x64(True):
        objective = jax.jit(
            proximal.after_training(models, quadratic, train, target, optimizer=optax.adam(0.1))
        )
        g = np.linspace(-1, 2, 7)
        grid = np.stack([g, 1 - g], 1)
        values = proximal.sweep(objective, grid, batch_size=3)
        assert np.asarray(values) == pytest.approx([float(objective(w)) for w in grid], rel=1e-12)
        # by hand: merge, then three steps of Adam
        params = jax.tree.map(lambda a, b: grid[2, 0] * a + grid[2, 1] * b, *models)
        optimizer = optax.adam(0.1)
        memory = optimizer.init(params)
        for batch in other:
            gradient = jax.tree.map(jnp.subtract, params, batch)
            updates, memory = optimizer.update(gradient, memory, params)
            params = optax.apply_updates(params, updates)
        assert float(values[2]) == pytest.approx(float(quadratic(params, target)), rel=1e-12)
        w, along, step = jnp.array([0.3, 0.6]), jnp.array([1.0, -2.0]), 1e-5
        slope = (objective(w + step * along) - objective(w - step * along)) / (2 * step)
        # central differences: step^2 + eps / step
        assert float(jax.grad(objective)(w) @ along) == pytest.approx(float(slope), rel=1e-7)
        best = proximal.from_loss(
            models, quadratic, train, target, optimizer=optax.adam(0.1), grid=grid
        )
        values = np.asarray(values)
    assert best.weights.tolist() == grid[values.argmin()].tolist()
    assert best.objective == pytest.approx(values.min(), rel=1e-12)


def test_models_in_bfloat16_are_merged_in_float32_and_stay_what_they_are():
    models = [{"a": jnp.full(2, v, jnp.bfloat16)} for v in (256.0, 2.0)]
    seen = lambda params, _: jnp.where(params["a"].dtype == jnp.bfloat16, params["a"][0], jnp.nan)  # noqa: E731
    objective = proximal.after_training(models, seen, None, None)
    # 256.896 + 0.2 is nearer 258 than 256 (8 bits); in bfloat16 the weight 1.0035 would be 1
    assert float(objective([1.0035, 0.1])) == 258.0


A, B = {"a": np.zeros(2)}, {"a": np.ones(2)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: proximal.pair_weight(1, 1, 0), "d12 must be > 0"),
        (lambda: proximal.pair_weight(1, 1, 3), r"d12 must be at most d1_target \+ d2_target"),
        (lambda: proximal.pair_weight(9, 1, 3), r"d1_target must be at most d12 \+ d2_target"),
        (lambda: proximal.pair_weight(1, -1, 3), "d2_target must be >= 0"),
        (lambda: proximal.pair_weight(1, np.nan, 3), "d2_target must be finite"),
        (lambda: proximal.pair_weight(1, 2, 3, model=0), "model: expected one of 1, 2"),  # type: ignore
        (lambda: proximal.pair_weight([1, 2], [1, 2, 3], 3), "must fit: "),
        (
            lambda: proximal.gram_from_distances([1, 9], [[0, 2], [2, 0]]),
            r"to_target\[1\] = 9 must be at most .* = 3 \(triangle inequality",
        ),
        (
            lambda: proximal.gram_from_distances([5, 5, 5], [[0, 1, 9], [1, 0, 1], [9, 1, 0]]),
            r"between\[0, 2\] = 9 must be at most between\[0, 1\] \+ between\[1, 2\] = 2",
        ),
        (lambda: proximal.gram_from_distances([1, 1], [[0, 1], [2, 0]]), "must be symmetric"),
        (lambda: proximal.gram_from_distances([1, 1], [[0, 1, 1]]), r"must be \[n\] and \[n, n\]"),
        (lambda: proximal.affine_weights(np.ones((2, 2))), "h is singular .* leave one out"),
        (lambda: proximal.affine_weights([[0, 1], [1, 0]]), "positive semi-definite"),
        (lambda: proximal.simplex_weights([[0, 1], [1, 0]]), "positive semi-definite"),
        (lambda: proximal.simplex_weights([[1, 1], [1, 1]] @ np.diag([1, 3])), "symmetric"),
        (lambda: proximal.simplex_weights([[1, 2], [2, 3]]), "without curvature"),
        (lambda: proximal.affine_weights(np.eye(2), ridge=-1), "ridge must be"),
        (lambda: proximal.from_parameters([A, B], B), "linearly independent"),
        (lambda: proximal.from_parameters([], B), "at least one"),
        (lambda: proximal.from_parameters([{"b": 1.0}], B), r"models\[0\]: .*'a', 'b'"),
        (lambda: proximal.from_parameters([{"a": np.ones(3)}], B), r"models\[0\], 'a': .*\(2,\)"),
        (lambda: proximal.from_parameters([B], {"a": [np.inf]}), "target, 'a/0': expected finite"),
        (lambda: proximal.from_parameters([B], B, constraint="simples"), "nearest: 'simplex'"),  # type: ignore
        (lambda: proximal.from_loss([A, B], quadratic, None, B, start=[1]), "start: expected one"),
        (lambda: proximal.from_loss([A, B], quadratic, None, B, grid=[1.0]), "grid: expected"),
        (lambda: proximal.from_loss([A, B], quadratic, None, B, grid=[[1.0]]), "weights: expected"),
        (
            lambda: proximal.from_loss([A, B], lambda p, b: jnp.nan, None, B, grid=[[1, 0]]),  # type: ignore
            "none of 1 values on the grid was finite",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_noise_allows_what_it_says():
    assert float(proximal.pair_weight(1.0, 1.0, 2.1, noise=0.11)) == 0.5
    with pytest.raises(ValueError, match=r"exceeds it by 0\.1, noise allowed 0\.09"):
        proximal.pair_weight(1.0, 1.0, 2.1, noise=0.09)
    proximal.gram_from_distances([1.0, 1.0], [[0.0, 2.1], [2.1, 0.0]], noise=0.11)


def test_bad_types():
    with pytest.raises(TypeError, match="d12 is traced"):
        jax.jit(lambda d: proximal.pair_weight(1.0, 1.0, d))(1.0)
    with pytest.raises(TypeError, match="'a': expected floating numbers, got int"):
        proximal.from_parameters([{"a": np.arange(2)}], B)
