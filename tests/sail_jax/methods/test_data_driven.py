"""Fisher, RegMean and greedy soups compared with closed forms in NumPy, and their common laws."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sail_jax import Merge
from sail_jax.methods import linear
from sail_jax.methods.fisher import fisher, fisher_diagonal
from sail_jax.methods.regmean import gram_mean, grams, regmean, regmean_plus_plus
from sail_jax.methods.soups import greedy_soup

EPS = float(jnp.finfo(jnp.float32).eps)
M = 3
WEIGHTS = [0.5, 1.0, 1.5]
SHAPES = {"kernel": (5, 4), "heads": (2, 3, 4), "bias": (4,), "gain": (), "empty": (0, 3)}


def tree(seed, dtype=jnp.float32):
    random = np.random.default_rng(seed)
    leaves = {name: jnp.asarray(random.normal(size=s), dtype) for name, s in SHAPES.items()}
    return {"block": leaves, "steps": jnp.arange(3)}


def positive(seed):
    return {"block": {n: jnp.asarray(np.square(x)) for n, x in tree(seed)["block"].items()}}


def gram(seed):
    """Grams of 20 inputs for the two kernels, and one of no size."""
    random = np.random.default_rng(seed)
    X = {"block/kernel": random.normal(size=(20, 5)), "block/heads": random.normal(size=(20, 6))}
    G = {path: jnp.asarray(x.T @ x / 20, jnp.float32) for path, x in X.items()}
    return G | {"block/empty": jnp.zeros((0, 0))}


def models(dtype=jnp.float32):
    return [tree(1 + k, dtype) for k in range(M)]


METHODS = {"fisher": (fisher, "fishers", positive), "regmean": (regmean, "grams", gram)}
each_method = pytest.mark.parametrize("name", METHODS)


def call(name, ms, base=None, seeds=(11, 12, 13), *, weights=None, **options):
    method, argument, make = METHODS[name]
    merge = method(**{argument: [make(s) for s in seeds[: len(ms)]], **options})
    return merge(ms, base, weights=weights)


def assert_close(got, want, atol):
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    chex.assert_trees_all_close(got, want, rtol=0, atol=atol)


# --- laws


@pytest.mark.slow
@each_method
def test_identical_models_are_the_merge(name):
    """A mean of equals of size below 4, whatever the weights: 4 ulp."""
    got = call(name, models()[:1] * M, weights=WEIGHTS)
    assert_close(got, models()[0], 4 * 4 * EPS)


@pytest.mark.slow
@each_method
def test_one_model_is_the_merge(name):
    assert_close(call(name, models()[:1]), models()[0], 4 * EPS)


@pytest.mark.slow
@each_method
def test_order_of_models_does_not_matter(name):
    """Sums of three reordered, a condition number below 50 for the Grams."""
    order = [2, 0, 1]
    got = call(
        name,
        [models()[k] for k in order],
        seeds=[11 + k for k in order],
        weights=[WEIGHTS[k] for k in order],
    )
    assert_close(got, call(name, models(), weights=WEIGHTS), 200 * EPS)


@pytest.mark.slow
@each_method
def test_weights_have_no_scale_and_zero_is_absence(name):
    got = call(name, models(), weights=WEIGHTS)
    assert_close(call(name, models(), weights=[3 * w for w in WEIGHTS]), got, 200 * EPS)
    absent = call(name, models(), weights=[1.0, 2.0, 0.0])
    assert_close(absent, call(name, models()[:2], weights=[1.0, 2.0]), 200 * EPS)
    alone = call(name, models(), weights=[0.0, 2.0, 0.0])
    assert_close(alone, models()[1], 20 * EPS)


@pytest.mark.slow
@each_method
def test_dtypes_are_the_bases_and_integers_are_copied(name):
    base = tree(0, jnp.bfloat16)
    got = call(name, models(), base)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, base)
    chex.assert_trees_all_equal(got["steps"], base["steps"])
    want = call(name, models())
    rounded = jax.tree.map(lambda x, y: x.astype(y.dtype), want, base)
    chex.assert_trees_all_equal(got, rounded)  # one cast, of the same float32 numbers


@pytest.mark.slow
@each_method
def test_jit_equals_eager(name):
    _, argument, make = METHODS[name]
    data = [make(11 + k) for k in range(M)]
    method = METHODS[name][0]
    jitted = jax.jit(lambda ms, data, w: method(**{argument: data})(ms, weights=w))
    got = jitted(models(), data, jnp.array(WEIGHTS))
    assert_close(got, call(name, models(), weights=WEIGHTS), 200 * EPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_gradient_in_weights_and_statistics(name):
    """Against central differences in float64: truncation h^2, rounding 1e-16 * 1e2 / h."""
    method, argument, make = METHODS[name]
    with jax.enable_x64(True):
        wide = lambda t: jax.tree.map(np.float64, t)  # noqa: E731
        ms = [wide({"block": m["block"]}) for m in models()]
        data = [wide(make(11 + k)) for k in range(M)]
        probe = wide(tree(9))["block"]

        @jax.jit
        @functools.partial(jax.value_and_grad, argnums=(0, 1))
        def loss(w, s):
            scaled = [jax.tree.map(lambda x: x * s, data[0]), *data[1:]]
            merged = method(**{argument: scaled})(ms, weights=w)["block"]
            return sum(jnp.vdot(jnp.sin(merged[k]), probe[k]) for k in probe)

        w, s, h = np.array(WEIGHTS), 1.0, 1e-5
        got = loss(w, s)[1]
        unit = np.eye(M) * h
        want = [(loss(w + u, s)[0] - loss(w - u, s)[0]) / (2 * h) for u in unit]
        assert np.abs(got[0]).max() > 1e-3
        np.testing.assert_allclose(got[0], want, rtol=1e-6, atol=1e-6)
        want = (loss(w, s + h)[0] - loss(w, s - h)[0]) / (2 * h)
        assert abs(want) > 1e-3
        np.testing.assert_allclose(got[1], want, rtol=1e-6, atol=1e-6)


def test_weights_that_say_nothing_are_refused():
    for name in METHODS:
        with pytest.raises(ValueError, match="weights: expected finite values >= 0"):
            call(name, models(), weights=[1.0, 1.0, -0.5])
        with pytest.raises(ValueError, match="sum to 0"):
            call(name, models(), weights=[0.0, 0.0, 0.0])
        with pytest.raises(ValueError, match=r"model 1 .* missing 'block/gain'"):
            call(name, [tree(0), {"block": {**tree(1)["block"], "gain": None}, "steps": 0}])
        with pytest.raises(ValueError, match="models: expected at least"):
            call(name, [])


# --- Fisher


@pytest.mark.slow
def test_fisher_is_the_weighted_mean_with_diagonal_weights():
    """In float64 by NumPy; ratios of positive sums, values below 4: 10 ulp."""
    F = [positive(11 + k)["block"] for k in range(M)]
    ms = [m["block"] for m in models()]
    got = call("fisher", models(), weights=WEIGHTS)["block"]
    for path in SHAPES:
        top = sum(w * np.float64(f[path]) * m[path] for w, f, m in zip(WEIGHTS, F, ms, strict=True))
        bottom = sum(w * np.float64(f[path]) for w, f in zip(WEIGHTS, F, strict=True))
        np.testing.assert_allclose(got[path], top / bottom, rtol=0, atol=40 * EPS)


@pytest.mark.slow
def test_fishers_of_any_size_count_by_their_ratios():
    """1e-30 and 1e30 times the same Fishers, whose products would leave float32: the same merge."""
    F = [positive(11 + k) for k in range(M)]
    want = fisher(fishers=F)(models())
    for size in (2.0**-100, 2.0**100):
        scaled = [jax.tree.map(lambda x: x * size, f) for f in F]  # noqa: B023
        for normalize in (False, True):
            got = fisher(fishers=scaled, normalize_fishers=normalize)(models())
            same = fisher(fishers=F, normalize_fishers=normalize)(models())
            assert_close(got, same, 20 * EPS)
    assert_close(fisher(fishers=scaled)(models()), want, 0)


@pytest.mark.slow
def test_fisher_of_nothing_is_the_mean():
    F = [positive(11 + k) for k in range(M)]
    F = [{"block": {**f["block"], "kernel": f["block"]["kernel"].at[1].set(0.0)}} for f in F]
    got = fisher(fishers=F)(models(), weights=WEIGHTS)
    mean = linear()(models(), weights=WEIGHTS)["block"]["kernel"]
    assert_close(got["block"]["kernel"][1], mean[1], 8 * EPS)
    assert np.abs(got["block"]["kernel"][0] - mean[0]).max() > 0.01
    kernel = lambda w: fisher(fishers=F)(models(), weights=w)["block"]["kernel"]  # noqa: E731
    gradient = jax.jit(jax.grad(lambda w: kernel(w).sum()))(np.array(WEIGHTS))
    chex.assert_tree_all_finite(gradient)
    # a model of weight 0 does not decide either, though its Fisher is the only one
    F[0]["block"]["kernel"] = F[0]["block"]["kernel"].at[1].set(5.0)
    got = fisher(fishers=F)(models(), weights=[0.0, 1.0, 1.0])["block"]["kernel"][1]
    assert_close(got, linear()(models()[1:])["block"]["kernel"][1], 8 * EPS)


def test_floor_and_norms_by_hand():
    ms, F = (
        [{"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 1.0}],
        [{"a": 3.0, "b": 4.0}, {"a": 0.0, "b": 1.0}],
    )
    assert fisher(fishers=F)(ms) == {"a": 0.0, "b": pytest.approx(1 / 5)}
    assert fisher(fishers=F, floor=1.0)(ms)["a"] == pytest.approx(1 / 4)
    got = fisher(fishers=F, normalize_fishers=True)(ms)  # norms 5 and 1
    assert got == {"a": 0.0, "b": pytest.approx(1 / (1 + 4 / 5))}
    nothing = fisher(fishers=[F[0], {"a": 0.0, "b": 0.0}], normalize_fishers=True)(ms)
    assert nothing == {"a": 0.0, "b": 0.0}


FISHER_BAD = {
    "missing": (lambda f: {"block": {**f["block"], "gain": None}}, "leaf 'block/gain': .*got none"),
    "integer": (lambda f: {**f, "steps": jnp.ones(3)}, "fishers: no such floating leaf 'steps'"),
    "shape": (
        lambda f: {"block": {**f["block"], "bias": jnp.ones(3)}},
        r"leaf 'block/bias': fishers\[1\]: expected shape \(4,\), got \(3,\)",
    ),
    "negative": (
        lambda f: {"block": {**f["block"], "bias": -jnp.ones(4)}},
        r"fishers\[1\], leaf 'block/bias': expected finite values >= 0",
    ),
    "nan": (lambda f: {"block": {**f["block"], "gain": jnp.nan}}, "'block/gain': expected finite"),
}


@pytest.mark.parametrize("case", FISHER_BAD)
def test_refuses_fishers_by_name(case):
    change, message = FISHER_BAD[case]
    with pytest.raises(ValueError, match=message):
        fisher(fishers=[positive(1), change(positive(2))])(models()[:2])


def test_refuses_other_arguments_of_fisher():
    with pytest.raises(ValueError, match="fishers: expected one per model, 3, got 2"):
        fisher(fishers=[positive(1)] * 2)(models())
    with pytest.raises(ValueError, match="floor"):
        fisher(fishers=[positive(1)], floor=-1.0)(models()[:1])


# --- the Fisher diagonal


def softmax(x):
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def classifier():
    """Logits x W + b, whose score for label c is x (e_c - p)^T for W and e_c - p for b."""
    random = np.random.default_rng(0)
    params = {
        "W": jnp.asarray(random.normal(size=(4, 3)), jnp.float32),
        "b": jnp.asarray(random.normal(size=3), jnp.float32),
        "calls": jnp.array(3),
    }
    x = random.normal(size=(10, 4)).astype(np.float32)
    p = softmax(x @ np.float64(params["W"]) + np.float64(params["b"]))
    return params, x, p, random.integers(0, 3, 10)


def predict(params, x):
    return x @ params["W"] + params["b"]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_exact_diagonal_of_a_linear_classifier(batch_size):
    """E (e_y - p)_c^2 = p_c (1 - p_c), so F_W = mean x^2 p (1 - p); sums of 30: 40 ulp."""
    params, x, p, _ = classifier()
    got = fisher_diagonal(predict, params, x, batch_size=batch_size)
    want = {"W": (x**2).T @ (p * (1 - p)) / 10, "b": (p * (1 - p)).mean(0)}
    assert got["calls"] is None
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=40 * EPS, atol=EPS)
        assert got[name].dtype == jnp.float32


@pytest.mark.slow
def test_empirical_diagonal_and_the_batch_summed_one():
    """Squares are per example; the squared gradient of a batch is a different matrix."""
    params, x, p, y = classifier()
    score = np.eye(3)[y] - p
    got = fisher_diagonal(predict, params, x, targets=y)
    want = (x**2).T @ score**2 / 10
    np.testing.assert_allclose(got["W"], want, rtol=40 * EPS, atol=EPS)
    summed = (x.T @ score) ** 2 / 10
    assert np.abs(summed / want - 1).max() > 0.5
    for example in range(3):  # they agree for a single example
        one = slice(example, example + 1)
        alone = fisher_diagonal(predict, params, x[one], targets=y[one])
        np.testing.assert_allclose(
            alone["W"], (x[one].T @ score[one]) ** 2, rtol=40 * EPS, atol=EPS
        )


@pytest.mark.slow
def test_sampled_diagonal_is_unbiased_and_does_not_depend_on_batches():
    """Null: E = exact. 2000 draws for each of 10 examples, 12 entries, |z| < 4, in 20 parts."""
    params, x, *_ = classifier()
    exact = np.asarray(fisher_diagonal(predict, params, x)["W"])
    keys = jax.random.split(jax.random.key(3), 20)
    draw = jax.jit(lambda key: fisher_diagonal(predict, params, x, key=key, samples=100)["W"])
    draws = np.stack([draw(key) for key in keys])
    z = (draws.mean(0) - exact) / (draws.std(0, ddof=1) / np.sqrt(20))
    assert np.abs(z).max() < 4
    sampled = [fisher_diagonal(predict, params, x, key=keys[0], batch_size=b)["W"] for b in (1, 7)]
    np.testing.assert_allclose(*sampled, rtol=20 * EPS)


@pytest.mark.slow
def test_diagonal_of_sequences_and_of_regression():
    """Positions add up, and for unit-variance Gaussians F is the squared Jacobian."""
    params, x, p, _ = classifier()
    got = fisher_diagonal(predict, params, x.reshape(5, 2, 4))
    want = (x**2).T @ (p * (1 - p)) / 5
    np.testing.assert_allclose(got["W"], want, rtol=40 * EPS, atol=EPS)
    got = fisher_diagonal(predict, params, x, likelihood="gaussian")
    want = np.repeat((x**2).mean(0)[:, None], 3, 1)
    np.testing.assert_allclose(got["W"], want, rtol=20 * EPS)
    keyed = fisher_diagonal(
        predict, params, x, likelihood="gaussian", key=jax.random.key(0), samples=4000
    )
    # a mean of 40,000 squared normals per entry: relative deviation below sqrt(2 / 4000) * 4
    np.testing.assert_allclose(keyed["W"], want, rtol=4 * np.sqrt(2 / 4000))
    y = np.ones((10, 3), np.float32)
    residual = y - np.asarray(predict(params, x), float)
    got = fisher_diagonal(predict, params, x, targets=y, likelihood="gaussian")
    np.testing.assert_allclose(got["W"], (x**2).T @ residual**2 / 10, rtol=1e-5)


def test_diagonal_refuses():
    params, x, _, y = classifier()
    with pytest.raises(ValueError, match="at most one"):
        fisher_diagonal(predict, params, x, targets=y, key=jax.random.key(0))
    with pytest.raises(ValueError, match="inputs: expected leaves of one length"):
        fisher_diagonal(predict, params, x, targets=y[:5])
    with pytest.raises(ValueError, match="inputs: expected leaves of one length"):
        fisher_diagonal(predict, params, x[:0])
    with pytest.raises(ValueError, match="likelihood"):
        fisher_diagonal(predict, params, x, likelihood="poisson")
    with pytest.raises(ValueError, match=r"predict: expected outputs \[example"):
        fisher_diagonal(lambda p, x: jnp.sum(x), params, x)
    with pytest.raises(ValueError, match=r"targets: expected shape \(\) per example, got \(1,\)"):
        fisher_diagonal(predict, params, x, targets=y[:, None])


def tasks(seed=0, features=6, outputs=2, rows=200):
    """Makes three linear regressions with inputs of different scales, and their solutions."""
    random = np.random.default_rng(seed)
    X, W = [], []
    for _ in range(M):
        mix = np.eye(features) + 0.5 * random.normal(size=(features, features))
        scales = np.exp(random.normal(size=features))
        X.append(random.normal(size=(rows, features)) * scales @ mix)
        W.append(random.normal(size=(features, outputs)))
    return X, W


def regression_loss(W, X, targets):
    return sum(np.square(x @ W - x @ w).mean() for x, w in zip(X, targets, strict=True))


@pytest.mark.slow
def test_fisher_merging_improves_on_the_mean():
    """For uncorrelated inputs, the diagonal is the Hessian, so the loss is minimal."""
    random = np.random.default_rng(5)
    scales = np.exp(random.normal(size=(M, 6)))
    Q = [np.linalg.qr(random.normal(size=(60, 6)))[0] for _ in range(M)]
    X = [q * s * np.sqrt(60) for q, s in zip(Q, scales, strict=True)]
    W = tasks()[1]
    ms = [{"W": jnp.asarray(w, jnp.float32), "b": jnp.zeros(2)} for w in W]
    F = [
        fisher_diagonal(predict, m, np.float32(x), likelihood="gaussian")
        for m, x in zip(ms, X, strict=True)
    ]
    got = np.asarray(fisher(fishers=F)(ms)["W"], float)
    best = np.linalg.lstsq(np.concatenate(X), np.concatenate(list(map(np.matmul, X, W))))[0]
    np.testing.assert_allclose(got, best, atol=100 * EPS)
    mean = np.mean(W, 0)
    assert regression_loss(got, X, W) < 0.7 * regression_loss(mean, X, W)


# --- RegMean


def moments(X):
    return [{"W": jnp.asarray(x.T @ x / len(x), jnp.float32)} for x in X]


@pytest.mark.slow
@pytest.mark.parametrize("input_axes", ["first", "last"])
def test_regmean_is_the_least_squares_fit(input_axes):
    """Against lstsq on all rows, weighted; damping 1e-7 of the mean eigenvalue, condition < 1e3."""
    X, W = tasks()
    rows = [np.sqrt(w / len(x)) * x for w, x in zip(WEIGHTS, X, strict=True)]
    fits = list(map(np.matmul, rows, W))
    best, *_, values = np.linalg.lstsq(np.concatenate(rows), np.concatenate(fits))
    assert (values[0] / values[-1]) ** 2 < 1e3
    side = (lambda w: w.T) if input_axes == "last" else (lambda w: w)
    ms = [{"W": jnp.asarray(side(w), jnp.float32)} for w in W]
    got = regmean(grams=moments(X), off_diagonal=1.0, damping=1e-7, input_axes=input_axes)(
        ms, weights=WEIGHTS
    )
    got = side(np.asarray(got["W"], float))
    np.testing.assert_allclose(got, best, atol=1e3 * 4 * EPS)
    normal = sum(a.T @ (a @ got - b) for a, b in zip(rows, fits, strict=True))
    size = sum(np.linalg.norm(a.T @ b) for a, b in zip(rows, fits, strict=True))
    assert np.abs(normal).max() < 100 * EPS * size
    mean = np.average(W, axis=0, weights=WEIGHTS)
    assert regression_loss(got, X, W) < 0.7 * regression_loss(mean, X, W)


def test_regmean_agrees_with_its_formula_with_shrinking_and_damping():
    """In float64 by NumPy, kernels of three axes included; condition number below 100."""
    ms, G = [m["block"] for m in models()], [gram(11 + k) for k in range(M)]
    got = call("regmean", models(), weights=WEIGHTS, off_diagonal=0.6, damping=0.01)["block"]
    w = np.array(WEIGHTS) / sum(WEIGHTS)
    for name, n in (("kernel", 5), ("heads", 6)):
        shrunk = [np.float64(g[f"block/{name}"]) * (0.6 + 0.4 * np.eye(n)) for g in G]
        total = np.einsum("k,kij->ij", w, shrunk)
        shrunk = [g + 0.01 * np.trace(total) / n * np.eye(n) for g in shrunk]
        right = sum(
            a * g @ np.float64(m[name]).reshape(n, -1)
            for a, g, m in zip(w, shrunk, ms, strict=True)
        )
        want = np.linalg.solve(np.einsum("k,kij->ij", w, shrunk), right).reshape(SHAPES[name])
        np.testing.assert_allclose(got[name], want, atol=100 * EPS)
    for name in ("bias", "gain"):
        assert_close(got[name], linear()(ms, weights=WEIGHTS)[name], 8 * EPS)


def test_regmean_commutes_with_a_change_of_base():
    """Models moved by a common amount move the merge by it: 100 * eps * values below 10."""
    shift = lambda m: jax.tree.map(lambda x: x + 2 if x.dtype != int else x, m)  # noqa: E731
    got = call("regmean", [shift(m) for m in models()], weights=WEIGHTS)
    assert_close(got, shift(call("regmean", models(), weights=WEIGHTS)), 1000 * EPS)


@pytest.mark.slow
def test_gram_mean_does_not_see_the_scale_of_weights():
    """As a separate reduction, with weights that are not normalised, and with damping."""
    base = tree(0)
    merge = Merge(reduction=gram_mean([gram(11 + k) for k in range(M)], damping=0.1))
    got = [merge(models(), base, weights=w) for w in (WEIGHTS, [8 * w for w in WEIGHTS])]
    assert_close(got[0], got[1], 200 * EPS)
    want = call("regmean", models(), weights=WEIGHTS, damping=0.1)
    assert_close(got[0], want, 200 * EPS)


@pytest.mark.slow
def test_dead_features_take_the_mean():
    """The peers' `inverse` fails or explodes here: a feature that is 0 in all data, and no data."""
    X, W = tasks()
    X = [x * (np.arange(6) != 2) for x in X]
    ms = [{"W": jnp.asarray(w, jnp.float32)} for w in W]
    mean = linear()(ms)["W"]
    for off_diagonal in (0.9, 1.0):
        got = regmean(grams=moments(X), off_diagonal=off_diagonal)(ms)["W"]
        assert_close(got[2], mean[2], 4 * EPS)  # two programs round on their own
        assert float(np.abs(got - mean).max()) > 0.1
        assert float(np.abs(got).max()) < 10
    none = [{"W": jnp.zeros((6, 6))}] * M
    assert_close(regmean(grams=none)(ms)["W"], mean, 4 * EPS)
    gradient = jax.grad(lambda g: regmean(grams=[{"W": g}, *none[1:]])(ms)["W"].sum())(none[0]["W"])
    chex.assert_tree_all_finite(gradient)


def test_fewer_data_than_features():
    """Three rows in all for six features: defined, small, and still a fit to the data."""
    X, W = tasks()
    X = [x[:1] for x in X]
    ms = [{"W": jnp.asarray(w, jnp.float32)} for w in W]
    got = regmean(grams=moments(X), off_diagonal=1.0, damping=1e-4)(ms)["W"]
    assert float(np.abs(got).max()) < 20
    mean = np.mean(W, 0)
    assert regression_loss(np.asarray(got), X, W) < 1e-3 * regression_loss(mean, X, W)


@pytest.mark.slow
def test_the_scale_of_grams_and_of_weights_does_not_meet():
    """Their products exceed float32; only the ratios of Grams matter."""
    random = np.random.default_rng(2)
    W, X = random.normal(size=(2, 3, 2)), random.normal(size=(2, 5, 3))
    outcomes = []
    for k in (0, -70, 80):
        grams = [{"w": np.ldexp(x.T @ x, k).astype(np.float32)} for x in X]
        got = regmean(grams=grams)([{"w": np.ldexp(x, k).astype(np.float32)} for x in W])
        outcomes.append(np.ldexp(got["w"], -k))
    for got in outcomes[1:]:
        np.testing.assert_array_equal(got, outcomes[0])


GRAM_BAD = {
    "path": (
        {"block/kernle": jnp.eye(5)},
        "grams: no such floating leaf 'block/kernle' .*'block/kern",
    ),
    "integer leaf": ({"steps": jnp.eye(3)}, "no such floating leaf 'steps'"),
    "size": (
        {"block/kernel": jnp.eye(4)},
        r"'block/kernel': grams: expected a square .* \(5, 4\), got \(4",
    ),
    "vector": ({"block/kernel": jnp.ones(5)}, r"'block/kernel': expected a square .*got \(5,\)"),
    "nan": ({"block/kernel": jnp.eye(5) * jnp.nan}, "'block/kernel': expected finite"),
    "negative": ({"block/kernel": -jnp.eye(5)}, "'block/kernel': expected finite .*diagonal >= 0"),
    "indefinite": (
        {"block/kernel": jnp.eye(5) + 9 * (1 - jnp.eye(5))},
        "'block/kernel': the Grams may not add up to a positive definite",
    ),
}


@pytest.mark.parametrize("case", GRAM_BAD)
def test_refuses_grams_by_name(case):
    bad, message = GRAM_BAD[case]
    with pytest.raises(ValueError, match=message):
        regmean(grams=[bad] * M)(models())


def test_refuses_other_arguments_of_regmean():
    for options, message in (
        ({"grams": [gram(1)] * 2}, "grams: expected one mapping per model, 3, got 2"),
        ({"grams": [gram(1), gram(2), {}]}, r"grams\[2\]: expected the paths of grams\[0\]"),
        ({"damping": 0.0}, "damping: expected a finite number > 0"),
        ({"off_diagonal": 1.5}, r"off_diagonal: expected a number in \[0, 1\]"),
        ({"input_axes": "middle"}, "input_axes: expected one of"),
    ):
        with pytest.raises(ValueError, match=message):
            regmean(**{"grams": [gram(1)] * M, **options})(models())


def test_grams_stream():
    """Batches of any size give the mean over all rows: sums of 30 products below 10."""
    x = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    batches = [x[:7], x[7:8], x[8:].reshape(2, 11, 4)]
    got = grams(lambda params, x: {"W": params * x}, 2.0, iter(batches))["W"]
    np.testing.assert_allclose(got, 4 * x.T @ x / 30, atol=100 * EPS)
    half = grams(lambda params, x: {"W": x}, None, [jnp.asarray(x, jnp.bfloat16)])["W"]
    assert half.dtype == jnp.float32
    for broken, message in (
        ([], "batches: expected at least one input"),
        ([x[:0]], r"batches: expected at least one input for \['W'\]"),
        ([x[0]], r"'W': expected \[..., in\], got shape \(4,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            grams(lambda params, x: {"W": x}, None, broken)
    with pytest.raises(ValueError, match="batch 1 differs from batch 0 in the paths"):
        grams(lambda params, b: {b: x}, None, ["a", "b"])


DEPTH = 6
GROUPS = [f"l{i}/*" for i in range(DEPTH)]


def layers(params, x):
    """The inputs of every layer, and the output."""
    inputs = {}
    for i in range(DEPTH):
        inputs[f"l{i}/W"] = x
        x = x @ params[f"l{i}"]["W"] + params[f"l{i}"]["b"]
        x = jax.nn.relu(x) if i < DEPTH - 1 else x
    return inputs, x


mlp_inputs = jax.jit(lambda params, x: layers(params, x)[0])
mlp = jax.jit(lambda params, x: layers(params, x)[1])


def mlps(seed):
    """Three ReLU networks near a common base, each with 800 inputs in a plane of its own."""
    random = np.random.default_rng(seed)
    sizes = [8, *[16] * (DEPTH - 1), 2]

    def draw(scale):
        shapes = enumerate(itertools.pairwise(sizes))
        return {
            f"l{i}": {
                "W": scale * np.sqrt(2 / m) * random.normal(size=(m, n)),
                "b": 0.3 * scale * random.normal(size=n),
            }
            for i, (m, n) in shapes
        }

    base = draw(1.0)
    moved = [jax.tree.map(np.add, base, draw(0.5)) for _ in range(M)]
    X = [random.normal(size=(800, 2)) @ random.normal(size=(2, 8)) for _ in range(M)]
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (moved, X))


@pytest.mark.slow
def test_regmean_plus_plus_sees_merged_inputs():
    """One layer at a time by hand; the second group's inputs are those of the merged first."""
    ms, X = mlps(0)
    batches = [[x[:400]] for x in X]
    options = {"off_diagonal": 1.0, "damping": 1e-4}
    got = regmean_plus_plus(ms, activations=mlp_inputs, batches=batches, groups=GROUPS, **options)
    merged = {}
    for i in range(DEPTH):
        here = [{f"l{i}": m[f"l{i}"]} for m in ms]
        G = [grams(mlp_inputs, {**m, **merged}, x) for m, x in zip(ms, batches, strict=True)]
        merged |= regmean(grams=[{f"l{i}/W": g[f"l{i}/W"]} for g in G], **options)(here)
    chex.assert_trees_all_equal(got, merged)
    G = [grams(mlp_inputs, m, x) for m, x in zip(ms, batches, strict=True)]
    plain = regmean(grams=G, **options)(ms)
    chex.assert_trees_all_equal(got["l0"], plain["l0"])
    assert float(np.abs(got["l1"]["W"] - plain["l1"]["W"]).max()) > 0.01


@pytest.mark.slow
def test_regmean_improves_on_the_mean_and_plus_plus_on_it():
    """Held-out outputs against each model's own. Null: no change of the log error over 12 problems,
    paired; the first rejected at z < -4, the second at z < -3."""
    errors, options = [], {"off_diagonal": 1.0, "damping": 1e-4}
    for seed in range(12):
        ms, X = mlps(seed)
        seen = [[x[:400]] for x in X]
        G = [grams(mlp_inputs, m, x) for m, x in zip(ms, seen, strict=True)]
        merged = (
            linear()(ms),
            regmean(grams=G, **options)(ms),
            regmean_plus_plus(ms, activations=mlp_inputs, batches=seen, groups=GROUPS, **options),
        )
        pairs = [(m, x[400:]) for m, x in zip(ms, X, strict=True)]
        errors.append(
            [sum(jnp.square(mlp(c, x) - mlp(m, x)).mean() for m, x in pairs) for c in merged]
        )
    change = np.diff(np.log(np.array(errors, float)), axis=1)
    z = change.mean(0) / (change.std(0, ddof=1) / np.sqrt(12))
    assert z[0] < -4
    assert z[1] < -3


@pytest.mark.slow
def test_regmean_plus_plus_laws_and_refusals():
    ms, X = mlps(0)
    data = [[x[:400]] for x in X]

    def run(ms, groups=GROUPS, data=data, base=None, activations=mlp_inputs):
        return regmean_plus_plus(ms, base, activations=activations, batches=data, groups=groups)

    assert_close(run(ms[:1] * M), ms[0], 16 * EPS)
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), ms[0])
    chex.assert_trees_all_equal_shapes_and_dtypes(run(ms, base=base), base)
    mean = run(ms, groups=[])
    chex.assert_trees_all_equal(mean, linear()(ms))
    for options, message in (
        ({"groups": ["l7/*"]}, r"groups\[0\]: 'l7/\*' matches no leaf"),
        ({"groups": ["l0/*", ["l1/W", "l0/b"]]}, r"groups\[1\]: leaf 'l0/b' is in groups\[0\]"),
        ({"groups": ["l0/b"]}, r"groups\[0\]: activations returned none of its leaves"),
        ({"data": data[:2]}, "batches: expected one per model, 3, got 2"),
        ({"data": [[]] * M}, "batches: expected at least one input"),
    ):
        with pytest.raises(ValueError, match=message):
            run(ms, **options)


# --- soups


def test_greedy_soup_by_hand():
    """Scores are distances of the mean from 0, exact in float32."""
    ms = [{"a": jnp.array(v)} for v in (4.0, -2.0, 8.0, 2.0)]
    score = lambda params: -abs(float(params["a"]))  # noqa: E731
    soup = greedy_soup(ms, score)  # order 1 3 0 2: -2, then 0; adding 4 makes 4/3, adding 8 8/3
    assert soup.taken == (1, 3)
    assert soup.scores == (-4.0, -2.0, -8.0, -2.0)
    assert float(soup.params["a"]) == 0.0
    assert [i for i, _ in soup.trials] == [1, 3, 0, 2]
    assert soup.trials[1] == (3, 0.0)


def test_equal_scores_do_not_join_unless_asked():
    ms = [{"a": jnp.array(v)} for v in (1.0, 3.0, 5.0)]
    assert greedy_soup(ms, lambda p: 1.0).taken == (0,)
    loose = greedy_soup(ms, lambda p: 1.0, strict=False)
    assert loose.taken == (0, 1, 2)
    assert_close(loose.params, linear()(ms), 8 * EPS)


@pytest.mark.slow
def test_greedy_soup_improves_on_the_uniform_one_and_on_the_best_model():
    """A target behind nine noisy models, four of them far off; a held-out linear regression."""
    random = np.random.default_rng(1)
    target, X = random.normal(size=20), random.normal(size=(200, 20))
    noise = [0.3] * 5 + [3.0] * 4
    ms = [{"w": jnp.asarray(target + s * random.normal(size=20), jnp.bfloat16)} for s in noise]

    def loss(params, X):
        return np.square(X @ (np.asarray(params["w"], float) - target)).mean()

    soup = greedy_soup(ms, lambda params: -loss(params, X))
    assert set(soup.taken) <= set(range(5))
    assert len(soup.taken) >= 3
    assert soup.params["w"].dtype == jnp.bfloat16
    fresh = random.normal(size=(2000, 20))
    assert loss(soup.params, fresh) < 0.5 * loss(linear()(ms), fresh)
    assert loss(soup.params, fresh) < 0.6 * min(loss(m, fresh) for m in ms)
    best = linear()([ms[i] for i in soup.taken])
    chex.assert_trees_all_equal(soup.params, best)  # one rounding to bfloat16 of a float32 mean
    order = random.permutation(9)
    again = greedy_soup([ms[i] for i in order], lambda params: -loss(params, X))
    assert [order[i] for i in again.taken] == list(soup.taken)


class Lazy(list):
    """Models that are created on request, with the number of requests."""

    def __init__(self, values):
        super().__init__(values)
        self.loads = [0] * len(values)

    def __getitem__(self, i):
        self.loads[i] += 1
        return {"a": jnp.full(3, super().__getitem__(i)), "n": jnp.array(2)}


def test_greedy_soup_loads_models_one_at_a_time_and_takes_known_scores():
    lazy = Lazy([1.0, 2.0, 3.0])
    soup = greedy_soup(lazy, lambda p: float(p["a"][0]), scores=[1.0, 2.0, 3.0])
    assert lazy.loads == [1, 1, 1]
    assert soup.taken == (2,)
    assert int(soup.params["n"]) == 2


def test_scores_that_are_no_numbers():
    ms = [{"a": jnp.array(v)} for v in (1.0, 2.0, 4.0)]
    score = lambda p: np.nan if float(p["a"]) in (1.0, 3.0) else float(p["a"])  # noqa: E731
    soup = greedy_soup(ms, score)  # the soup of 4 and 2 is NaN, that of 4 and 1 is worse
    assert soup.taken == (2,)
    with pytest.raises(ValueError, match="NaN for all"):
        greedy_soup(ms, lambda p: np.nan)
    with pytest.raises(ValueError, match="scores: expected one per model, 3, got 1"):
        greedy_soup(ms, score, scores=[1.0])
    with pytest.raises(ValueError, match="models: expected at least"):
        greedy_soup([], score)
    with pytest.raises(ValueError, match=r"model 1 .*missing 'a'"):
        greedy_soup([ms[0], {"b": 1.0}], lambda p: 0.0)
