"""Learned merges compared with their descent in NumPy, their common laws, and their gains."""

import functools
import hashlib
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import slow_unless, soak_unless
from jax import lax

from sail_jax import Merge, methods, transforms
from sail_jax.learning import learn
from sail_jax.merging.combining import chain
from sail_jax.methods.learned import (
    adamerging,
    concrete_subspace,
    cross_entropy,
    entropy,
    learned_soup,
)
from sail_jax.methods.surgery import Surgery, representation_surgery

EPS = float(jnp.finfo(jnp.float32).eps)
KEY = jax.random.key(5)
SGD = optax.sgd(0.1)
T, N, B, F, C = 3, 4, 6, 5, 3  # tasks, batches, examples in each, features, classes


def predict(params, x):
    return x @ params["W"] + params["b"]


def params(seed, dtype=jnp.float32):
    random = np.random.default_rng(seed)
    return {
        "W": random.normal(size=(F, C)).astype(dtype),
        "b": random.normal(size=C).astype(dtype),
        "steps": np.arange(2, dtype=np.int32),
    }


def inputs():
    x = np.random.default_rng(77).normal(size=(T, N, B, F))
    return x.astype(np.float32)


def labels():
    return np.random.default_rng(78).integers(0, C, (N, B))


def problem(dtype=jnp.float32):
    return [params(1 + k, dtype) for k in range(T)], params(0, dtype)


# by leaf, with Adam; the comparisons with NumPy are by task too
LEARN = {
    "adamerging": lambda ms, base, **options: adamerging(
        ms, base, predict, inputs()[: len(ms)], **{"by": "leaf", "steps": 5, **options}
    ),
    "learned_soup": lambda ms, base, **options: learned_soup(
        ms,
        predict=predict,
        batches=(inputs()[0], labels()),
        **{"by": "leaf", "steps": 5, **options},
    ),
    "concrete_subspace": lambda ms, base, **options: concrete_subspace(
        ms, base, predict, inputs()[: len(ms)], key=KEY, **{"steps": 5, **options}
    ),
}
each = pytest.mark.parametrize("name", LEARN)
QUICK, SLOW = (True, "leaf", (0.25, 0.4)), (False, "task", None)


def assert_close(got, want, atol):
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    chex.assert_trees_all_close(got, want, rtol=0, atol=atol)


# --- the loop


def test_learn_is_projected_descent_with_batches_in_turn():
    """Against the same loop in NumPy; six float32 operations per step on values below 10."""
    targets = np.array([1.0, 5.0, -3.0])
    got = learn(
        lambda params, y: (params - y) ** 2,
        lambda c, key: 2 * c,
        1.0,
        jnp.array(targets),
        steps=7,
        optimizer=SGD,
        project=lambda c: jnp.clip(c, 0.0, 1.5),
    )
    c, losses = 1.0, []
    for t in range(7):
        losses.append((2 * c - targets[t % 3]) ** 2)
        c = np.clip(c - 0.1 * 4 * (2 * c - targets[t % 3]), 0.0, 1.5)
    np.testing.assert_allclose(got.losses, losses, rtol=40 * EPS)
    np.testing.assert_allclose([got.coefficients, got.params], [c, 2 * c], rtol=20 * EPS)


def test_learn_gives_each_step_a_key_and_the_end_none():
    def merge(c, key):
        return c + (10.0 if key is None else jax.random.uniform(key))

    got = learn(
        lambda p, _: p, merge, 0.0, jnp.zeros(1), steps=3, optimizer=optax.sgd(0.0), key=KEY
    )
    want = [jax.random.uniform(jax.random.fold_in(KEY, t)) for t in range(3)]
    chex.assert_trees_all_equal(got.losses, jnp.stack(want))
    assert float(got.params) == 10.0


def test_learn_does_not_copy_what_the_merge_closes_over():
    """The compiled loop carries the coefficients alone: temporaries far below the task vectors."""
    big = jnp.ones((8, 2**18))

    def run(big):
        loss = lambda p, x: jnp.sum(p[:8] * x)  # noqa: E731
        return learn(
            loss, lambda c, key: c @ big, jnp.ones(8), jnp.ones((50, 8)), steps=50
        ).coefficients

    memory = jax.jit(run).lower(big).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.5 * big.nbytes


def test_learn_refuses():
    go = functools.partial(learn, lambda p, x: p * x, lambda c, key: c, 1.0)
    with pytest.raises(ValueError, match="got nan in step 2 of 5"):
        go(jnp.array([1.0, 1.0, jnp.nan]), steps=5, optimizer=SGD)
    for batches in ((), jnp.float32(1), jnp.zeros((0, 2))):
        with pytest.raises(ValueError, match="batches: expected leaves"):
            go(batches, steps=1)
    for steps in (-1, 2.0):
        with pytest.raises(ValueError, match="steps: expected an integer >= 0"):
            go(jnp.ones(1), steps=steps)


@pytest.mark.slow
def test_entropy_and_cross_entropy():
    """Follows the definitions in float64; masked classes add 0 and keep gradients finite."""
    z = np.random.default_rng(0).normal(size=(2, 7, 4)) * 3
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    np.testing.assert_allclose(jax.jit(entropy)(z), -(p * np.log(p)).sum(-1).mean(), rtol=1e-6)
    y = np.arange(14).reshape(2, 7) % 4
    want = -np.log(np.take_along_axis(p, y[..., None], -1)).mean()
    np.testing.assert_allclose(jax.jit(cross_entropy)(z, y), want, rtol=1e-6)
    both = jax.jit(jax.value_and_grad(entropy))
    masked, gradient = jax.jit(jax.value_and_grad(lambda z: entropy(z.at[1].set(-jnp.inf))))(
        np.array([0.5, 0.0, 1.5])
    )
    chex.assert_trees_all_close(masked, both(np.array([0.5, 1.5]))[0], rtol=1e-6)
    chex.assert_tree_all_finite(gradient)
    value, gradient = both(np.array([0.0, 1e4]))  # p underflows: 0 log 0 = 0
    assert float(value) == 0.0
    chex.assert_tree_all_finite(gradient)


# --- references


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def wide(tree):
    return {n: np.asarray(x, float) for n, x in tree.items() if n != "steps"}


def entropy_gradient(merged, x):
    """The mean entropy and its gradient in W and b: dH/dz_c = -p_c (log p_c + H)."""
    p = softmax(x @ merged["W"] + merged["b"])
    H = -(p * np.log(p)).sum(-1, keepdims=True)
    dz = -p * (np.log(p) + H) / len(x)
    return H.mean(), {"W": x.T @ dz, "b": dz.sum(0)}


def adamerging_in_numpy(deltas, base, by, steps, rate, clamp):
    lam = {n: np.full(T, 0.3) for n in ("W", "b")}
    x, losses = np.asarray(inputs(), float), []
    for t in range(steps):
        merged = {
            n: base[n] + sum(c * d[n] for c, d in zip(lam[n], deltas, strict=True)) for n in lam
        }
        results = [entropy_gradient(merged, x[k, t % N]) for k in range(T)]
        losses.append(sum(value for value, _ in results))
        g = {
            n: np.array([sum((r[n] * d[n]).sum() for _, r in results) for d in deltas]) for n in lam
        }
        if by == "task":
            g = dict.fromkeys(g, g["W"] + g["b"])
        lam = {n: np.clip(lam[n] - rate * g[n], *clamp) for n in lam}
    merged = {n: base[n] + sum(c * d[n] for c, d in zip(lam[n], deltas, strict=True)) for n in lam}
    return lam, merged, losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plus", "by", "clamp"),
    [
        slow_unless(case == QUICK, *case) if case in (QUICK, SLOW) else soak_unless(False, *case)
        for case in itertools.product((False, True), ("task", "leaf"), (None, (0.25, 0.4)))
    ],
)
def test_adamerging_descends_the_entropy(by, clamp, plus):
    """Eight steps against NumPy in float64; float32 errors below 1e-6 a step on values below 10."""
    ms, base = problem()
    sparse = chain(transforms.trim(0.5), transforms.elect()) if plus else chain()
    deltas = [{n: wide(m)[n] - wide(base)[n] for n in ("W", "b")} for m in ms]
    if plus:
        flat = np.stack([np.concatenate([d["W"].ravel(), d["b"]]) for d in deltas])
        kept = np.abs(flat) >= np.sort(np.abs(flat), 1)[:, [-9]]  # half of 18
        flat = flat * kept
        flat *= np.sign(flat) == np.sign(flat.sum(0))
        deltas = [{"W": f[: F * C].reshape(F, C), "b": f[F * C :]} for f in flat]
    lam, merged, losses = adamerging_in_numpy(
        deltas, wide(base), by, 8, 0.1, clamp or (-np.inf, np.inf)
    )
    got = adamerging(
        ms, base, predict, inputs(), by=by, transform=sparse, clamp=clamp, steps=8, optimizer=SGD
    )
    coefficients = (
        {"W": got.coefficients, "b": got.coefficients} if by == "task" else got.coefficients
    )
    for n in ("W", "b"):
        np.testing.assert_allclose(coefficients[n], lam[n], atol=1e-5)
        np.testing.assert_allclose(got.params[n], merged[n], atol=1e-4)
    assert np.abs(lam["W"] - 0.3).max() > 0.05
    np.testing.assert_allclose(got.losses, losses, atol=1e-4)
    if clamp:
        assert 0.25 <= lam["W"].min() <= lam["W"].max() <= 0.4
        assert {0.25, 0.4} & set(np.concatenate([lam["W"], lam["b"]]))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [True, False])
def test_learned_soup_descends_the_supervised_loss(temperature):
    """Eight steps against NumPy in float64, softmax and log scale differentiated by hand."""
    ms, _ = problem()
    W, b = (np.stack([wide(m)[n] for m in ms]) for n in ("W", "b"))
    x, y = np.asarray(inputs()[0], float), np.eye(C)[np.asarray(labels())]
    alpha, s = np.zeros(T), 0.0
    for t in range(8):
        w, x_t = softmax(alpha), x[t % N]
        z = x_t @ np.tensordot(w, W, 1) + w @ b
        dz = (softmax(np.exp(s) * z) - y[t % N]) / B
        each = np.array([(np.exp(s) * dz * (x_t @ W[k] + b[k])).sum() for k in range(T)])
        alpha = alpha - 0.1 * w * (each - w @ each)
        s = s - 0.1 * temperature * np.exp(s) * (dz * z).sum()
    got = learned_soup(
        ms,
        predict=predict,
        batches=(inputs()[0], labels()),
        temperature=temperature,
        steps=8,
        optimizer=SGD,
    )
    np.testing.assert_allclose(got.coefficients["weights"], softmax(alpha), atol=1e-5)
    np.testing.assert_allclose(got.coefficients["scale"], np.exp(s), atol=1e-5)
    assert temperature == (abs(s) > 0.01)
    want = methods.linear()(ms, weights=got.coefficients["weights"])
    assert_close(got.params, want, 20 * EPS)


@pytest.mark.slow
def test_concrete_subspace_descends_through_its_draws():
    """One step: documented noise, gradient by central differences of NumPy's entropy in float64."""
    ms, base = problem()
    update = {n: sum(wide(m)[n] for m in ms) - T * wide(base)[n] for n in ("W", "b")}
    here = jax.random.fold_in(KEY, 0)

    def drawn(name, shape):
        digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
        key = here
        for i in range(0, 16, 4):
            key = jax.random.fold_in(key, int.from_bytes(digest[i : i + 4], "little"))
        return np.asarray(jax.random.logistic(key, shape, jnp.float32), float)

    noise = {n: drawn(n, u.shape) for n, u in update.items()}

    def merged(logits, noise):
        m = {n: 1 / (1 + np.exp(-(logits[n] + noise[n]) / 0.5)) for n in update}
        return {n: wide(base)[n] + 0.3 * m[n] / m[n].mean() * u for n, u in update.items()}

    def loss(logits):
        p = merged(logits, noise)
        return sum(entropy_gradient(p, np.asarray(x[0], float))[0] for x in inputs())

    zero = {n: np.zeros_like(u) for n, u in update.items()}
    want = {n: np.zeros_like(u) for n, u in update.items()}
    for n, u in update.items():
        for i in np.ndindex(u.shape):
            up, down = ({**zero, n: zero[n].copy()} for _ in range(2))
            up[n][i], down[n][i] = 1e-4, -1e-4
            want[n][i] = -(loss(up) - loss(down)) / 2e-4
    got = concrete_subspace(ms, base, predict, inputs(), key=KEY, steps=1, optimizer=optax.sgd(1.0))
    np.testing.assert_allclose(got.losses[0], loss(zero), rtol=1e-5)
    for n in update:
        np.testing.assert_allclose(got.coefficients[n], want[n], atol=2e-6)
        assert np.abs(want[n]).max() > 1e-3
        median = merged(want, dict.fromkeys(update, 0.0))[n]
        np.testing.assert_allclose(got.params[n], median, atol=1e-5)


@pytest.mark.slow
def test_surgery_descends_the_distance_of_features():
    """One step from known weights: dL/d up = -ReLU(f down)^T sign(f' - f_k) / size."""
    ms, base = problem()
    x = inputs()[0]
    got = representation_surgery(
        predict, base, ms[0], x, key=KEY, rank=2, steps=1, optimizer=optax.sgd(1.0)
    )
    start = representation_surgery(predict, base, ms[0], x, key=KEY, rank=2, steps=0).params
    f, own = (np.asarray(predict(p, x[0]), float) for p in (base, ms[0]))
    hidden = np.maximum(f @ np.asarray(start.down, float), 0)
    np.testing.assert_allclose(got.params.up, hidden.T @ np.sign(f - own) / f.size, atol=100 * EPS)
    chex.assert_trees_all_equal(got.params.down, start.down)  # up was 0
    np.testing.assert_allclose(got.losses, [np.abs(f - own).mean()], rtol=1e-5)


# --- laws


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARN)
def test_identical_models(name):
    """A convex mean of equals is that model; task vectors of equals add up."""
    ms, base = problem()
    got = LEARN[name](ms[:1] * T, base)
    if name == "learned_soup":
        assert_close(got.params, ms[0], 8 * EPS * 4)
    elif name == "adamerging":
        for n in "Wb":
            want = base[n] + got.coefficients[n].sum() * (ms[0][n] - base[n])
            assert_close(got.params[n], want.astype(base[n].dtype), 32 * EPS)
    else:
        alone = concrete_subspace(
            ms[:1], base, lambda p, x: jnp.zeros(3), inputs()[:1], key=KEY, scale=0.9, steps=0
        )
        assert_close(LEARN[name](ms[:1] * T, base, steps=0).params, alone.params, 32 * EPS)


@pytest.mark.slow
@each
def test_models_equal_to_the_base_give_the_base(name):
    _, base = problem()
    got = LEARN[name]([base] * T, base)
    chex.assert_trees_all_close(got.params, base, atol=8 * EPS)


@pytest.mark.slow
@each
def test_zero_steps_is_the_data_free_counterpart(name):
    ms, base = problem()
    got = LEARN[name](ms, base, steps=0)
    if name == "learned_soup":
        want = methods.linear()(ms)
    else:
        want = methods.task_arithmetic(scale=0.3)(ms, base)
    assert got.losses.shape == (0,)
    assert_close(got.params, want, 32 * EPS)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["task", "leaf"])
def test_coefficients_of_zero_are_the_base(by):
    ms, base = problem()
    got = adamerging(ms, base, predict, inputs(), by=by, init=0.0, steps=0)
    chex.assert_trees_all_equal(got.params, base)
    got = adamerging(ms, base, predict, inputs(), init=[0.0, 1.0, 0.0], steps=0)
    assert_close(got.params, ms[1], 4 * EPS * 4)


@pytest.mark.slow
def test_order_of_models_permutes_the_coefficients():
    ms, base = problem()
    order = [2, 0, 1]
    options = {"by": "leaf", "steps": 5, "optimizer": SGD}
    got = adamerging(ms, base, predict, inputs(), **options)
    other = adamerging([ms[k] for k in order], base, predict, inputs()[np.array(order)], **options)
    assert_close(other.params, got.params, 1e-5)
    moved = jax.tree.map(lambda c: c[np.array(order)], got.coefficients)
    assert_close(other.coefficients, moved, 1e-5)
    one, two = (
        concrete_subspace(
            [ms[k] for k in o], base, predict, [inputs()[k] for k in o], key=KEY, steps=5
        )
        for o in ([0, 1, 2], order)
    )
    assert_close(one.params, two.params, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [soak_unless(n != "concrete_subspace", n) for n in LEARN])
def test_one_model(name):
    ms, base = problem()
    got = LEARN[name](ms[:1], base)
    chex.assert_tree_all_finite((got.params, got.losses))
    if name == "learned_soup":
        assert_close(got.params, ms[0], 8 * EPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARN)
def test_dtypes_are_the_bases_and_integers_are_copied(name):
    ms, base = problem(jnp.bfloat16)
    got = LEARN[name](ms, base)
    chex.assert_trees_all_equal_shapes_and_dtypes(got.params, base)
    chex.assert_trees_all_equal(got.params["steps"], base["steps"])
    numbers = jnp.float32, jnp.result_type(float)
    assert all(x.dtype in numbers for x in jax.tree.leaves(got.coefficients))


@pytest.mark.slow
@pytest.mark.parametrize("name", [soak_unless(n == "learned_soup", n) for n in LEARN])
def test_jit_equals_eager_and_repeats(name):
    ms, base = problem()
    got = LEARN[name](ms, base)
    chex.assert_trees_all_equal(LEARN[name](ms, base), got)
    assert_close(jax.jit(LEARN[name])(ms, base), got, 1e-5)


@pytest.mark.soak
@each
def test_gradient_through_the_learning(name):
    """d/ds of the merge of models base + s delta, through five steps; central differences in
    float64: truncation h^2, rounding 1e-16 * 1e2 / h."""
    with jax.enable_x64(True):
        ms, base = problem()
        to64 = lambda t: jax.tree.map(  # noqa: E731
            lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, t
        )
        ms, base = to64((ms, base))

        @jax.jit
        def f(s):
            moved = [{**m, "W": base["W"] + s * (m["W"] - base["W"])} for m in ms]
            return jnp.sin(LEARN[name](moved, base).params["W"]).sum()

        h = 1e-5
        want = (f(1 + h) - f(1 - h)) / (2 * h)
        assert abs(want) > 1e-2
        np.testing.assert_allclose(jax.grad(f)(1.0), want, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_keys_decide_the_draws():
    ms, base = problem()
    go = lambda key: concrete_subspace(ms, base, predict, inputs(), key=key, steps=5)  # noqa: E731
    one, other = (go(jax.random.key(seed)).coefficients["W"] for seed in (1, 2))
    assert float(np.abs(other - one).max()) > 1e-4  # Adam moves each logit by up to 5e-3


@pytest.mark.slow
def test_tasks_may_have_heads_and_batches_of_their_own():
    """A list of equal `predict`s gives the same as one; batches may differ in number and size."""
    ms, base = problem()
    got = adamerging(ms, base, [predict] * T, list(inputs()), steps=3)
    chex.assert_trees_all_equal(got, adamerging(ms, base, predict, inputs(), steps=3))
    wide_head = lambda p, x: jnp.concatenate([predict(p, x)] * 2, -1)  # noqa: E731
    unlike = [inputs()[0], inputs()[1, :2], inputs()[2, :3, :4]]
    got = adamerging(ms, base, [predict, wide_head, predict], unlike, steps=5)
    chex.assert_tree_all_finite(got.params)


# --- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "layer"}, "by: expected one of .*; got 'layer'"),
        ({"init": [0.3, 0.3]}, "init: expected a number or 3"),
        ({"init": "much"}, "init: expected a number or 3"),
        ({"clamp": (1.0, 0.0)}, "clamp: expected an interval"),
        ({"batches": inputs()[:2]}, "batches: expected one per model, 3, got 2"),
        ({"predict": [predict]}, "predict: expected one per model, 3, got 1"),
        ({"models": [params(1), params(2), {"W": 1.0}]}, "model 2 .*missing"),
    ],
)
def test_adamerging_refuses(options, message):
    ms, base = problem()
    given = {"models": ms, "base": base, "predict": predict, "batches": inputs(), "steps": 1}
    with pytest.raises(ValueError, match=message):
        adamerging(**{**given, **options})


def test_others_refuse():
    ms, base = problem()
    with pytest.raises(ValueError, match="by: expected one of"):
        learned_soup(ms, predict=predict, batches=(inputs()[0], labels()), by="model", steps=1)
    with pytest.raises(ValueError, match="batches: expected the pair"):
        learned_soup(ms, predict=predict, batches=(inputs()[0],), steps=1)
    with pytest.raises(ValueError, match="temperature: expected a number > 0"):
        concrete_subspace(ms, base, predict, inputs(), key=KEY, temperature=0.0)
    with pytest.raises(TypeError, match="base: expected the pytree"):
        adamerging(ms, None, predict, inputs(), steps=1)
    with pytest.raises(ValueError, match="rank: expected at least 1"):
        representation_surgery(predict, base, ms[0], inputs()[0], key=KEY, rank=0)
    with pytest.raises(ValueError, match="features: expected one shape, got"):
        representation_surgery(
            lambda p, x: x @ p, jnp.ones((F, 2)), jnp.ones((F, 3)), inputs()[0], key=KEY
        )
    with pytest.raises(ValueError, match="batches: expected leaves"):
        representation_surgery(predict, base, ms[0], (), key=KEY)


@pytest.mark.slow
def test_surgery_starts_as_the_identity():
    ms, base = problem()
    got = representation_surgery(predict, base, ms[0], inputs()[0], key=KEY, steps=0).params
    f = predict(base, inputs()[0, 0])
    chex.assert_trees_all_equal(got(f), f)
    assert (got.down.shape, got.up.shape) == ((C, 16), (16, C))
    assert isinstance(got, Surgery)


# --- what is gained


def tasks(examples, seed):
    """Three ways to label inputs that are mostly in three of nine dimensions each."""
    own = np.eye(9).reshape(3, 3, 9)
    A = np.random.default_rng(99).normal(size=(3, 9, 3))
    random = np.random.default_rng(seed)
    x = np.einsum("knr,krf->knf", random.normal(size=(3, examples, 3)), own)
    x += 0.1 * random.normal(size=x.shape)
    return x.astype(np.float32), np.argmax(x @ A, -1)


@functools.partial(jax.jit, static_argnames="steps")
def tuned(params, x, y, steps):
    def step(params, _):
        gradient = jax.grad(lambda p: cross_entropy(predict(p, x), y))(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient), None

    return lax.scan(step, params, None, length=steps)[0]


@functools.cache
def trained():
    """A base trained briefly on every task, and three models fine-tuned on one task each."""
    x, y = tasks(200, 0)
    start = {"W": np.zeros((9, 3), np.float32), "b": np.zeros(3, np.float32)}
    base = tuned(start, x[:, :20].reshape(-1, 9), y[:, :20].reshape(-1), 20)
    return [tuned(base, x[k], y[k], 60) for k in range(3)], base


def gain(new, old):
    """z of the drop of the mean cross-entropy on 1500 new examples, and the ratio of the means."""
    x, y = tasks(500, 1)
    loss = lambda p: np.asarray(  # noqa: E731
        optax.softmax_cross_entropy_with_integer_labels(predict(p, x), y), float
    ).ravel()
    a, b = loss(new), loss(old)
    return (b - a).mean() / (b - a).std(ddof=1) * np.sqrt(a.size), a.mean() / b.mean()


def unlabelled():
    return tasks(320, 2)[0].reshape(3, 10, 32, 9)


@pytest.mark.slow
@pytest.mark.parametrize("options", [soak_unless(False, {}), {"by": "leaf", "steps": 100}])
def test_adamerging_improves_on_task_arithmetic(options):
    """Null: no drop of the loss on new examples; rejected at z > 4; and it drops by a twentieth."""
    ms, base = trained()
    got = adamerging(ms, base, predict, unlabelled(), **{"steps": 300, **options})
    z, ratio = gain(got.params, methods.task_arithmetic(scale=0.3)(ms, base))
    assert z > 4
    assert ratio < 0.95


@pytest.mark.slow
def test_adamerging_plus_plus_improves_on_ties_deltas():
    ms, base = trained()
    sparse = chain(transforms.trim(0.5), transforms.elect())
    got = adamerging(ms, base, predict, unlabelled(), transform=sparse, steps=300)
    z, ratio = gain(got.params, Merge(sparse, scale=0.3)(ms, base))
    assert z > 4
    assert ratio < 0.95


@pytest.mark.slow
def test_concrete_subspace_improves_on_task_arithmetic():
    ms, base = trained()
    got = concrete_subspace(
        ms, base, predict, unlabelled(), key=KEY, steps=200, optimizer=optax.adam(1e-2)
    )
    z, ratio = gain(got.params, methods.task_arithmetic(scale=0.3)(ms, base))
    assert z > 4
    assert ratio < 0.95


@pytest.mark.slow
def test_learned_soup_improves_on_the_uniform_one():
    """One of four models is spoiled; 300 held-out examples, then new ones."""
    ms, base = trained()
    random = np.random.default_rng(3)
    ms = [*ms, jax.tree.map(lambda p: jnp.asarray(random.normal(size=p.shape), p.dtype), base)]
    x, y = tasks(100, 3)
    batches = x.reshape(1, -1, 9), y.reshape(1, -1)
    got = learned_soup(ms, predict=predict, batches=batches, steps=200)
    z, ratio = gain(got.params, methods.linear()(ms))
    assert z > 4
    assert ratio < 0.9
    assert float(got.losses[-1]) < float(got.losses[0])


@pytest.mark.slow
def test_surgery_brings_features_back():
    """Hidden features of new inputs, of one task: nearer to those of the task's own model."""
    random = np.random.default_rng(4)
    draw = lambda s: jnp.asarray(s * random.normal(size=(9, 24)), jnp.float32)  # noqa: E731
    features = lambda W, x: jax.nn.relu(x @ W)  # noqa: E731
    base = draw(1.0)
    ms = [base + draw(0.5) for _ in range(3)]
    merged = methods.linear()(ms)
    x, fresh = unlabelled(), tasks(500, 1)[0]
    got = representation_surgery(
        features, merged, ms[1], x[1], key=KEY, steps=300, optimizer=optax.adam(1e-2)
    )
    before, own = features(merged, fresh[1]), features(ms[1], fresh[1])
    error = lambda f: np.abs(np.asarray(f - own, float)).mean(-1)  # noqa: E731
    drop = error(before) - error(got.params(before))
    assert drop.mean() / drop.std(ddof=1) * np.sqrt(drop.size) > 4
    assert error(got.params(before)).mean() < 0.8 * error(before).mean()
