"""Probes against their definitions in NumPy, dense Hessians and closed forms.

Unless said otherwise numbers are float64 and the tolerance is 1e-12: hundreds of operations on
numbers of order one. Statistical tests: unbiased estimates, |z| < 4 at fixed seeds.
"""

import itertools
from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import slow_unless, soak, soak_unless
from jax.flatten_util import ravel_pytree

from experiments.models.gpt import GPT
from experiments.models.mlp import MLP
from experiments.models.resnet import ResNet
from sail_jax import probe
from sail_jax.probe.connectivity import _barrier
from sail_jax.probe.curvature import lanczos, ritz

ROUNDING = 1e-12
EPS32 = float(np.finfo(np.float32).eps)
close = partial(np.testing.assert_allclose, rtol=0, atol=ROUNDING)


pytestmark = pytest.mark.usefixtures("float64")


class Host:
    """The probes with results in NumPy, where slicing compiles nothing."""

    def __getattr__(self, name):
        return lambda *args, **more: jax.tree.map(np.asarray, getattr(probe, name)(*args, **more))


host = Host()


def rng(seed=0):
    return np.random.default_rng(seed)


def tanh_net(params, x):
    """A network with two hidden layers, as a plain function."""
    h1 = jnp.tanh(x @ params["w1"])
    h2 = jnp.tanh(h1 @ params["w2"])
    return h2 @ params["w3"], {"z_first": h1, "a_second": h2}


chained = probe.sequential(
    {
        "z_first": lambda p, x: jnp.tanh(x @ p["w1"]),
        "a_second": lambda p, x: jnp.tanh(x @ p["w2"]),
        "out": lambda p, x: x @ p["w3"],
    }
)


def tanh_models(k, seed=0):
    shapes, random = {"w1": (3, 5), "w2": (5, 4), "w3": (4, 2)}, rng(seed)
    return [{n: random.normal(size=s) for n, s in shapes.items()} for _ in range(k)]


def inputs(n=7, seed=9):
    return rng(seed).normal(size=(n, 3))


def mix(models, w):
    return jax.tree.map(lambda *leaves: sum(c * x for c, x in zip(w, leaves, strict=True)), *models)


def mean_and_error(values):
    """Over the last axis."""
    values = np.asarray(values)
    return values.mean(-1), values.std(-1, ddof=1) / np.sqrt(values.shape[-1])


def by_definition(models, members, shares, x):
    """cosine, coefficient [layer, example] of f(sum s_m theta_m) and sum s_m f(theta_m)."""
    own = [mix(models, w) for w in members]
    left = features(mix(own, shares), x)
    each = [features(m, x) for m in own]
    right = [sum(s * e[n] for s, e in zip(shares, each, strict=True)) for n in range(3)]
    cosine = [np.sum(a * b, 1) / norms(a) / norms(b) for a, b in zip(left, right, strict=True)]
    lengths = [norms(a) / norms(b) for a, b in zip(left, right, strict=True)]
    return np.array(cosine), np.array(cosine) * lengths


def features(params, x):
    h1 = np.tanh(x @ params["w1"])
    h2 = np.tanh(h1 @ params["w2"])
    return h1, h2, h2 @ params["w3"]


def norms(x):
    return np.sqrt(np.sum(x * x, 1))


# --- networks -------------------------------------------------------------------------------------

FLAX = {
    "mlp": (MLP((5, 4), 2), "hidden_0"),
    "gpt": (GPT(11, 6, 8, 1, 2, 4, 8), "block_0/in"),
    "resnet": (ResNet((4, 6), 1, 3), "stage1_block0/conv1"),  # held out: convolutions
}

flax_modules = pytest.mark.parametrize("name", [soak_unless(n == "mlp", n) for n in FLAX])


def flax_case(name, k=2, n=3):
    """Makes a module, k random models, a batch and a layer, in float32."""
    module, layer = FLAX[name]
    random = rng(3)
    tokens, vectors, images = (
        random.integers(0, 11, (n, 6)).astype(np.int32),
        *(random.normal(size=(n, *s)).astype(np.float32) for s in ((6,), (8, 8, 1))),
    )
    batch = {"gpt": tokens, "mlp": vectors}.get(name, images)
    shapes = jax.eval_shape(module.init, jax.random.key(0), batch)

    def draw(path, x):
        spread = 0.1 if path[-1].key == "var" else 0.4
        return (spread * random.normal(size=x.shape) + (spread == 0.1)).astype(np.float32)

    return module, [jax.tree.map_with_path(draw, shapes) for _ in range(k)], batch, layer


@flax_modules
def test_flax_features_in_order_and_overridden(name):
    module, (params, _), batch, layer = flax_case(name)
    net = probe.flax_network(module.apply, intercept=nn.intercept_methods)
    names = []

    @jax.jit
    def run(params, batch):
        found = probe.features(net, params, batch)
        names.extend(found)
        same, _ = net(params, batch, {layer: found[layer]})
        moved = found[layer] + jnp.sin(9 * found[layer])
        other, shown = net(params, batch, {layer: moved})
        return found, same, other, moved, shown[layer], module.apply(params, batch)

    found, same, other, moved, shown, plain = run(params, batch)
    # in the order in which they are computed, which is not that of their names
    assert names[0] in ("hidden_0", "token_embed", "stem")
    assert names[-1] == "output"
    assert layer in names
    # float32, compiled apart
    chex.assert_trees_all_close((found["output"], same), (plain, plain), atol=30 * EPS32)
    chex.assert_trees_all_equal(shown, moved)
    assert np.abs(np.asarray(other) - np.asarray(same)).max() > 1e-3
    one = probe.flax_network(module.apply, layer)
    assert set(jax.eval_shape(partial(probe.features, one), params, batch)) == {layer, "output"}


@pytest.mark.slow
def test_flax_modules_called_twice_and_sown():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(2, name="dense")
            x = nn.relu(dense(x))
            self.sow("intermediates", "relu", x)
            return dense(x)

    x = np.ones((3, 2))
    params = jax.jit(Twice().init)(jax.random.key(0), x)
    net = probe.flax_network(Twice().apply, intercept=nn.intercept_methods)
    found = jax.jit(lambda p: probe.features(net, p, x))(params)
    assert set(found) == {"dense", "dense:1", "relu", "output"}
    chex.assert_trees_all_equal(found["dense:1"], found["output"])
    chex.assert_trees_all_equal(np.maximum(found["dense"], 0), np.asarray(found["relu"]))
    out, _ = jax.jit(net)(params, x, {"dense:1": np.zeros((3, 2))})
    close(out, 0)


def test_sequential_is_the_plain_function():
    (params,), x = tanh_models(1), inputs()
    plain, found = (probe.features(net, params, x) for net in (tanh_net, chained))
    assert list(plain) == ["z_first", "a_second", "output"]
    assert list(found) == ["z_first", "a_second", "out", "output"]
    for name in plain:
        close(plain[name], found[name])


# --- linearity ------------------------------------------------------------------------------------

SIZES = {"all": {}, "chunks": {"batch_size": 3, "chunk_size": 2}}
sizes_of_pieces = pytest.mark.parametrize(
    "sizes", [pytest.param({}, marks=pytest.mark.slow, id="all"), SIZES["chunks"]]
)


def against(found, expected, baseline=None):
    """A probe's estimates [layer, point] beside values [layer, example] point by point."""
    assert found.layers == ("z_first", "a_second", "output")
    for p, (cosine, coefficient) in enumerate(expected):
        for estimate, values in ((found.cosine, cosine), (found.coefficient, coefficient)):
            mean, error = mean_and_error(values)
            close(estimate.value[:, p], mean)
            close(estimate.stderr[:, p], error, atol=1e-10)  # a root


@pytest.mark.slow
@sizes_of_pieces
def test_cross_task_linearity_by_definition(sizes):
    models, x, alphas = tanh_models(2), inputs(), [0.3, 0.5, 1.4]
    found = host.cross_task_linearity(tanh_net, *models, x, alphas, **sizes)
    against(found, [by_definition(models, np.eye(2), (a, 1 - a), x) for a in alphas])
    for n, (a, b) in enumerate(zip(*(features(m, x) for m in models), strict=True)):
        mean, error = mean_and_error(np.sum(a * b, 1) / norms(a) / norms(b))
        close(found.baseline.value[n], [[1, mean], [mean, 1]])
        close(found.baseline.stderr[n], [[0, error], [error, 0]], atol=1e-10)
        alpha = alphas[0]
        merged = features(mix(models, (alpha, 1 - alpha)), x)[n]
        right = alpha * a + (1 - alpha) * b
        close(found.gap[n, 0], np.linalg.norm(merged - right) / np.linalg.norm(right))


@pytest.mark.slow
def test_k_model_linearity_by_definition():
    models, x = tanh_models(3), inputs()
    weights = [[0.2, 0.5, 0.3], [1.0, 0.0, 0.0], [1.6, -0.9, 0.3]]
    found = host.k_model_linearity(tanh_net, models, x, weights)
    against(found, [by_definition(models, np.eye(3), w, x) for w in weights])
    close(found.cosine.value[:, 1], 1)
    close(found.gap[:, 1], 0)
    uniform = host.k_model_linearity(tanh_net, models, x)
    against(uniform, [by_definition(models, np.eye(3), np.full(3, 1 / 3), x)])


@pytest.mark.slow
@pytest.mark.parametrize("k", [soak_unless(False, 1), 3])
def test_addition_by_definition(k):
    base, *models = tanh_models(k + 1)
    x, scales = inputs(), [0.1, 0.4]
    found = host.addition(tanh_net, base, models, x, scales, batch_size=3)
    expected = []
    for s in scales:
        members = [np.eye(k + 1)[0] * (1 - k * s) + k * s * np.eye(k + 1)[i + 1] for i in range(k)]
        expected.append(by_definition([base, *models], members, np.full(k, 1 / k), x))
    against(found, expected)
    assert found.baseline.value.shape == (3, 2, k, k)
    # the combination is theta + s sum tau
    edited = mix([base, *models], [1 - 0.4 * k, *[0.4] * k])
    middle = [mix([base, m], (1 - 0.4 * k, 0.4 * k)) for m in models]
    right = sum(features(m, x)[2] for m in middle) / k
    close(found.gap[2, 1], np.linalg.norm(features(edited, x)[2] - right) / np.linalg.norm(right))


@pytest.mark.parametrize(
    ("form", "members", "shares"),
    [
        ("midpoint", [(0.6, 0.4), (1.4, -0.4)], (0.5, 0.5)),
        slow_unless(False, "reflection", [(1, 0), (0.6, 0.4)], (2, -1)),
    ],
)
def test_negation_by_definition(form, members, shares):
    models, x = tanh_models(2), inputs()
    found = host.negation(tanh_net, *models, x, [0.4, 0.0], form=form, chunk_size=2)
    against(found, [by_definition(models, members, shares, x)])
    close(found.gap[:, 1], 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "probed",
    ["line", *soak("models", "addition", "midpoint", "reflection")],
)
def test_linear_in_parameters_is_exactly_linear(probed):
    """All identities hold for f = x W + b, extrapolated too. Cosines to the square of rounding."""

    def affine(params, x):
        return x @ params["w"] + params["b"]

    random = rng(4)
    models = [{"w": random.normal(size=(3, 4)), "b": random.normal(size=4)} for _ in range(3)]
    x = inputs()
    found = {
        "line": lambda: probe.cross_task_linearity(affine, *models[:2], x, [-1.0, 0.2, 2.0]),
        "models": lambda: probe.k_model_linearity(affine, models, x, [[0.2, 1.1, -0.3]]),
        "addition": lambda: probe.addition(affine, models[0], models[1:], x, [0.3, 1.0]),
        "midpoint": lambda: probe.negation(affine, *models[:2], x, [0.3, 1.0]),
        "reflection": lambda: probe.negation(affine, *models[:2], x, [0.3], form="reflection"),
    }[probed]()
    assert found.layers == ("output",)
    close(found.cosine.value, 1)
    close(found.coefficient.value, 1)
    close(found.gap, 0)
    close(found.cosine.stderr, 0)


@pytest.mark.slow
def test_two_linear_layers_leave_the_product_of_task_vectors():
    """gap = -a (1 - a) dW2 dW1 of the ensemble."""
    one, two = tanh_models(2)
    x, a = inputs(), 0.3

    def net(p, x):
        return x @ p["w1"] @ p["w2"], {"first": x @ p["w1"]}

    found = host.cross_task_linearity(net, one, two, x, [a])
    d1, d2 = one["w1"] - two["w1"], one["w2"] - two["w2"]
    right = a * x @ one["w1"] @ one["w2"] + (1 - a) * x @ two["w1"] @ two["w2"]
    close(found.gap[0], 0)
    expected = a * (1 - a) * np.linalg.norm(x @ d1 @ d2) / np.linalg.norm(right)
    close(found.gap[1, 0], expected)


@pytest.mark.slow
def test_dead_layers_have_cosines_by_convention():
    """The sides agree if both are 0, and disagree if only one is."""

    def net(p, x):
        return x * p, {"dead": 0 * x * p, "relu": jax.nn.relu(x * p)}

    found = host.cross_task_linearity(net, jnp.array(1.0), jnp.array(-1.0), jnp.ones((4, 2)))
    at = {name: found.cosine.value[i].tolist() for i, name in enumerate(found.layers)}
    assert at["dead"] == [1, 1, 1]
    assert at["relu"] == [0, 0, 1]  # relu(2 a - 1), and a
    close(found.coefficient.value[1], [0, 0, 2 / 3])
    close(found.gap[0], 0)


@pytest.mark.slow
@flax_modules
def test_flax_modules_in_jit(name):
    module, models, batch, layer = flax_case(name, n=4)
    net = probe.flax_network(module.apply, [layer])

    def measure(models, batch, **sizes):
        return probe.cross_task_linearity(net, *models, batch, [0.5], **sizes)

    @jax.jit
    def shown(params, batch):
        return probe.features(net, params, batch)[layer].reshape(4, -1)

    found = jax.jit(measure)(models, batch)
    assert found.layers == (layer, "output")
    each = [np.asarray(shown(m, batch)) for m in models]
    merged, right = np.asarray(shown(mix(models, (0.5, 0.5)), batch)), (each[0] + each[1]) / 2
    cosine = np.sum(merged * right, 1) / norms(merged) / norms(right)
    close(found.cosine.value[0, 0], cosine.mean(), atol=30 * EPS32)  # float32


# --- loss barriers --------------------------------------------------------------------------------


def symmetric(p, seed=2):
    H = rng(seed).normal(size=(p, p))
    return (H + H.T) / 2


def quadratic(theta, batch):
    """theta.H.theta / 2 with the mean of H over examples."""
    v = ravel_pytree(theta)[0]
    return v @ (jnp.mean(batch, 0) @ v) / 2


ONES = np.array([0.5, 1.5, 2.0, 0.0, 1.2, 0.8, 1.0])  # of mean 1, batches differ


def examples_of(H):
    return ONES.astype(H.dtype)[:, None, None] * H


@sizes_of_pieces
def test_barrier_of_a_quadratic(sizes):
    """Its excess is -a (1 - a) |theta_a - theta_b|_H^2 / 2."""
    H, (a, b), alphas = symmetric(5), rng(0).normal(size=(2, 5)), np.linspace(-0.5, 1.5, 9)
    found = host.barrier(quadratic, a, b, examples_of(H), alphas, **sizes)
    expected = -alphas * (1 - alphas) * ((a - b) @ H @ (a - b)) / 2
    close(found.excess, expected)
    close(found.endpoints, [a @ H @ a / 2, b @ H @ b / 2])
    close(found.height, max(expected.max(), 0))
    w = found.weights[0]
    close(w, alphas[expected.argmax()] if expected.max() > 0 else 1)


@sizes_of_pieces
def test_barrier_on_a_simplex(sizes):
    """Against -1/4 sum_ij w_i w_j |theta_i - theta_j|_H^2, on a grid and on samples."""
    H, models = symmetric(5), rng(1).normal(size=(3, 5))
    grid = probe.simplex_grid(3, 3)
    w = np.concatenate([grid, rng(0).dirichlet(np.ones(3), 4)])
    found = host.simplex_barrier(quadratic, list(models), examples_of(H), w, **sizes)
    d = models[:, None] - models
    expected = -np.einsum("pi,pj,ija,ab,ijb->p", w, w, d, H, d) / 4
    close(found.excess, expected)
    close(found.height, max(0, expected.max()))


def test_barrier_between_the_wells():
    found = host.barrier(lambda w, x: jnp.mean((w**2 - x) ** 2), 1.0, -1.0, np.ones(3))
    assert found.losses.shape == (11,)
    close(found.height, 1)
    close(found.weights, [0.5, 0.5])


def test_simplex_grid_is_all_of_it():
    for k, n in ((1, 3), (2, 5), (3, 4), (4, 3)):
        grid = probe.simplex_grid(k, n)
        close(grid.sum(1), 1)
        assert (grid >= 0).all()
        every = np.indices([n + 1] * k).reshape(k, -1).T
        assert sorted(map(tuple, np.rint(grid * n).astype(int))) == sorted(
            tuple(row) for row in every.tolist() if sum(row) == n
        )


def test_integer_leaves_and_dtypes_stay():
    """A merge of bfloat16 models is a bfloat16 model; equal counters are kept."""

    def loss(params, x):
        assert params["w"].dtype == jnp.bfloat16
        assert params["step"].dtype == jnp.int32
        return jnp.mean(x) * jnp.sum(params["w"].astype(float)) + params["step"]

    one, two = (
        {"w": jnp.full(3, w, jnp.bfloat16), "step": jnp.array(5, jnp.int32)} for w in (1, 3)
    )
    found = host.barrier(loss, one, two, np.ones(2), [0.5])
    close(found.losses, 11)


# --- outputs and stitches -------------------------------------------------------------------------


def crossentropy(logits, batch):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1)[:, 0]


def labelled(n=7):
    return {"x": inputs(n), "y": rng(5).integers(0, 2, n)}


def on_labelled(apply):
    return lambda params, batch, *override: apply(params, batch["x"], *override)


tanh_labelled, chained_labelled = on_labelled(tanh_net), on_labelled(chained)


@pytest.mark.slow
@sizes_of_pieces
def test_averaging_by_definition(sizes):
    models, batch = tanh_models(3), labelled()
    weights = [[0.2, 0.5, 0.3], [0.0, 1.0, 0.0], [1 / 3] * 3]
    found = host.averaging(tanh_labelled, models, batch, crossentropy, weights, **sizes)
    x = batch["x"]
    logits = [features(m, x)[2] for m in models]
    for k in range(3):
        mean, error = mean_and_error(crossentropy(logits[k], batch))
        close((found.members.value[k], found.members.stderr[k]), (mean, error))
    for p, w in enumerate(weights):
        one, both = features(mix(models, w), x)[2], np.tensordot(w, logits, 1)
        for estimate, out in ((found.average, one), (found.ensemble, both)):
            mean, error = mean_and_error(crossentropy(out, batch))
            close((estimate.value[p], estimate.stderr[p]), (mean, error))
        close(found.agreement.value[p], np.mean(one.argmax(1) == both.argmax(1)))
    assert found.agreement.value[1] == 1
    close(found.average.value[1], found.members.value[1])


@pytest.mark.slow
def test_stitching_by_definition():
    pretrained, one, two = tanh_models(3)
    batch = labelled()

    def expected(sources, weights, layer):
        h = sum(w * features(m, batch["x"])[layer] for w, m in zip(weights, sources, strict=True))
        h = np.tanh(h @ pretrained["w2"]) if layer == 0 else h
        return crossentropy(h @ pretrained["w3"] if layer < 2 else h, batch)

    stitch = partial(host.stitching, chained_labelled, batch_size=3)
    for sources, weights in (
        ([one, two], [0.5, 0.5]),
        ([pretrained, one], [2.0, -1.0]),
    ):
        found = stitch(sources, pretrained, batch, crossentropy, weights)
        assert found.layers == ("z_first", "a_second", "out")
        for layer in range(3):
            mean, error = mean_and_error(expected(sources, weights, layer))
            close((found.stitched.value[layer], found.stitched.stderr[layer]), (mean, error))
    same = stitch([pretrained], pretrained, batch, crossentropy, layers=["a_second"])
    assert same.layers == ("a_second",)
    close(same.stitched.value, same.upper.value)


@pytest.mark.slow
@flax_modules
def test_stitching_flax_modules(name):
    """A network stitched to itself is unchanged; the last layer of another one is its output."""
    module, (one, two), batch, layer = flax_case(name)
    last = {"mlp": "out", "gpt": "unembed"}.get(name, "head")
    net = probe.flax_network(module.apply, [layer, last], intercept=nn.intercept_methods)

    def metric(out, batch):
        return out.reshape(len(out), -1).sum(1)

    same = host.stitching(net, [one], one, batch, metric)
    assert same.layers == (layer, last)
    assert_same = partial(np.testing.assert_allclose, rtol=20 * EPS32, atol=20 * EPS32)
    assert_same(same.stitched.value, jnp.full(2, same.upper.value))
    found = host.stitching(net, [two], one, batch, metric)
    whole = jax.jit(module.apply)(two, batch)
    assert_same(found.stitched.value[1], np.asarray(whole).reshape(len(whole), -1).sum(1).mean())
    assert abs(found.stitched.value[0] - found.stitched.value[1]) > 1e-3


# --- curvature ------------------------------------------------------------------------------------


def spectra(H, **more):
    """In NumPy."""
    theta = {"a": np.zeros((2, 2), H.dtype), "b": np.zeros(len(H) - 4, H.dtype)}
    found = host.hessian_spectrum(quadratic, theta, examples_of(H), jax.random.key(0), **more)
    return jax.tree.map(np.asarray, found)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [soak_unless(False, None), 3])
def test_spectrum_of_a_quadratic_is_exact(batch_size):
    """As many steps as parameters: every Ritz value is an eigenvalue, every residual 0."""
    H = symmetric(12)
    eigenvalues = np.linalg.eigvalsh(H)
    found = spectra(H, top=12, steps=40, probes=3, batch_size=batch_size)
    close(found.largest, eigenvalues[::-1])
    close(found.smallest, eigenvalues)
    close(found.nodes, np.tile(eigenvalues, (3, 1)))
    close(found.largest_residual, 0, atol=1e-10)
    close(found.weights.sum(1), 1)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [4, 1, 8])
def test_eigenvalues_lie_within_their_residuals(steps):
    H = symmetric(12)
    eigenvalues = np.linalg.eigvalsh(H)
    top = min(3, steps)
    found = spectra(H, top=top, steps=steps, probes=5)
    for values, residuals in (
        (found.largest, found.largest_residual),
        (found.smallest, found.smallest_residual),
    ):
        gaps = np.abs(eigenvalues[:, None] - values).min(0)
        assert (gaps <= residuals + ROUNDING).all()
    # interlacing
    assert (found.largest <= eigenvalues[::-1][:top] + ROUNDING).all()
    assert (found.smallest >= eigenvalues[:top] - ROUNDING).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "eigenvalues",
    [np.zeros(9), np.full(9, 2.0), np.r_[np.zeros(7), 3.0, 3.0], np.r_[-1.0, np.ones(8)]],
    ids=["zero", "identity", "low rank", "reflection"],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_krylov_spaces_that_are_exhausted(eigenvalues, dtype):
    """Multiple eigenvalues are found with their multiplicity, given enough steps."""
    Q = np.linalg.qr(rng(6).normal(size=(9, 9)))[0]
    H = ((Q * eigenvalues) @ Q.T).astype(dtype)
    found = spectra(H, top=9, steps=9)
    slack = 100 * float(np.finfo(dtype).eps)  # of products of 9 x 9 matrices of norm <= 3
    close(found.smallest, eigenvalues, atol=slack)
    close(np.sum(found.nodes * found.weights, 1).mean() * 9, found.trace.value, atol=9 * slack)


@pytest.mark.slow
def test_trace_and_moments_within_their_errors():
    H = symmetric(12)
    found = spectra(H, steps=12, probes=100)
    assert abs(found.trace.value - np.trace(H)) < 4 * found.trace.stderr
    for degree in range(1, 6):
        draws = 12 * np.sum(found.weights * found.nodes**degree, 1)
        mean, error = mean_and_error(draws)
        assert abs(mean - np.trace(np.linalg.matrix_power(H, degree))) < 4 * error
    # Hutchinson is exact for a diagonal
    diagonal = spectra(np.diag(np.arange(12.0)), steps=2, probes=3)
    close(diagonal.trace.value, 66, atol=1e-11)
    close(diagonal.trace.stderr, 0, atol=1e-11)


@pytest.mark.slow
def test_spectral_density_is_the_smoothed_histogram():
    H, width = symmetric(12), 0.3
    eigenvalues = np.linalg.eigvalsh(H)
    found = spectra(H, steps=12, probes=100)
    grid = np.linspace(-12, 12, 401)
    density = host.spectral_density(found, grid, width)
    z = (grid[:, None] - eigenvalues) / width
    exact = np.exp(-(z**2) / 2).mean(1) / width / np.sqrt(2 * np.pi)
    at = slice(120, 281, 20)  # where there are eigenvalues
    assert (np.abs(density.value - exact)[at] < 4 * density.stderr[at]).all()
    close(np.trapezoid(density.value, grid), 1, atol=1e-9)


def tanh_outputs(params, batch):
    return tanh_net(params, batch["x"])[0]


def squared_outputs(out, batch):
    return jnp.mean(jnp.sum((out - batch["t"]) ** 2, 1))


def squared(params, batch):
    return squared_outputs(tanh_outputs(params, batch), batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gauss_newton", "batch_size"), [(False, 3), soak_unless(False, True, None)]
)
def test_network_spectrum_against_the_dense_matrix(gauss_newton, batch_size):
    (params,) = tanh_models(1)
    batch = {"x": inputs(), "t": rng(8).normal(size=(7, 2))}
    flat, back = ravel_pytree(params)
    if gauss_newton:
        jacobian = jax.jit(jax.jacobian(lambda t: tanh_net(back(t), batch["x"])[0]))
        J = np.asarray(jacobian(flat)).reshape(14, -1)
        H = 2 / 7 * J.T @ J
        loss, network = squared_outputs, tanh_outputs
    else:
        H = jax.jit(jax.hessian(lambda t: squared(back(t), batch)))(flat)
        loss, network = squared, None
    eigenvalues = np.linalg.eigvalsh(H)
    assert flat.size == 43
    found = host.hessian_spectrum(
        loss, params, batch, jax.random.key(1), top=5, steps=43, probes=2, network=network,
        batch_size=batch_size,
    )  # fmt: skip
    close(found.largest, eigenvalues[:-6:-1], atol=1e-10)
    close(found.smallest, eigenvalues[:5], atol=1e-10)
    if gauss_newton:
        assert found.smallest[0] > -1e-10


@pytest.mark.slow
def test_float32_vectors_stay_orthogonal():
    """Without it copies of the largest eigenvalue appear among the others."""
    eigenvalues = np.r_[np.linspace(0, 1, 60), 50.0].astype(np.float32)
    found = spectra(np.diag(eigenvalues), top=61, steps=61, probes=2)
    # backward error of an eigenproblem of norm 50
    close(found.smallest, eigenvalues, atol=50 * 61 * EPS32)


# --- sensitivity ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_sensitivity_of_a_quadratic():
    """Draw by draw the second-order prediction; on average s^2 tr(H Sigma) / 2."""
    H, scales = symmetric(7) + 2 * np.eye(7), [0.1, 1.0]
    random = rng(3)
    theta = {"a": random.normal(size=(2, 2)), "b": random.normal(size=3)}
    deviation = {"a": np.array([[0.5], [2.0]]), "b": 0.1}
    std = np.r_[0.5, 0.5, 2, 2, 0.1, 0.1, 0.1]
    found = host.gaussian_sensitivity(
        quadratic, theta, examples_of(H), jax.random.key(0), scales, deviation=deviation,
        draws=400, batch_size=3,
    )  # fmt: skip
    close(found.increase.value, found.predicted.value)
    close(found.increase.stderr, found.predicted.stderr)
    v = ravel_pytree(theta)[0]
    close(found.loss, v @ H @ v / 2)
    exact = np.square(scales) * np.trace(H * std**2) / 2
    assert (np.abs(found.increase.value - exact) < 4 * found.increase.stderr).all()


@pytest.mark.slow
def test_sensitivity_beyond_second_order():
    """E (s e)^4 = 3 s^4, of which the Hessian at 0 sees nothing."""
    found = host.gaussian_sensitivity(
        lambda w, x: jnp.mean(x) * w**4, 0.0, ONES, jax.random.key(0), [0.0, 0.5, 1.0], draws=2000
    )
    close(found.predicted.value, 0)
    z = (found.increase.value - 3 * np.array([0, 0.5, 1]) ** 4)[1:] / found.increase.stderr[1:]
    assert (np.abs(z) < 4).all()
    close(found.increase.value[0], 0)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [soak_unless(False, None), 3])
def test_sensitivity_to_fine_tuning(batch_size):
    (one, two), scales = tanh_models(2), np.array([-0.5, 0.0, 0.3, 1.0])
    batch = {"x": inputs(), "t": rng(8).normal(size=(7, 2))}
    found = host.fine_tuning_sensitivity(squared, one, two, batch, scales, batch_size=batch_size)
    flat, back = ravel_pytree(one)
    tau = ravel_pytree(two)[0] - flat

    loss = jax.jit(lambda t: squared(back(t), batch))
    close(found.increase, [loss(flat + s * tau) - loss(flat) for s in scales])
    slope = tau @ jax.jit(jax.grad(loss))(flat)
    curvature = tau @ jax.jit(jax.hessian(loss))(flat) @ tau
    close((found.slope, found.curvature), (slope, curvature), atol=1e-11)
    close(found.predicted, scales * slope + scales**2 * curvature / 2, atol=1e-11)
    H, (a, b) = symmetric(5), rng(0).normal(size=(2, 5))
    exact = host.fine_tuning_sensitivity(quadratic, a, b, examples_of(H), scales)
    close(exact.increase, exact.predicted)


# --- task vectors ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_interference_by_definition():
    random = rng(7)
    base = {"conv": random.normal(size=(2, 3, 5)), "b": random.normal(size=4), "n": np.int32(3)}
    models = [
        {k: v + random.normal(size=v.shape) if k != "n" else v for k, v in base.items()}
        for _ in range(3)
    ]
    weights = np.array([0.2, 0.3, 0.5])
    found = host.interference(base, models, weights, rank=2)
    assert found.leaves == ("b", "conv")
    assert found.matrices == ("conv",)
    deltas = {k: np.array([(m[k] - base[k]).ravel() for m in models]) for k in ("b", "conv")}

    def expected(d):
        size = np.linalg.norm(d, axis=1)
        apart = weights @ np.sum((d - weights @ d) ** 2, 1)
        return size, d @ d.T / np.outer(size, size), np.mean(d.min(0) * d.max(0) < 0), apart

    for i, name in enumerate(found.leaves):
        for part, value in zip(found.each, expected(deltas[name]), strict=True):
            close(part[i], value)
    for part, value in zip(found.total, expected(np.hstack(list(deltas.values()))), strict=True):
        close(part, value)
    sides = [np.linalg.svd(d.reshape(6, 5), full_matrices=False) for d in deltas["conv"]]
    for side, U in enumerate(([s[0][:, :2] for s in sides], [s[2][:2].T for s in sides])):
        for i in range(3):
            for j in range(3):
                close(found.overlap[0, side, i, j], np.sum((U[i].T @ U[j]) ** 2) / 2)
    close(found.chance, [[2 / 6, 2 / 5]])


@pytest.mark.slow
def test_interference_of_known_geometry():
    """Same, opposite, orthogonal and zero task vectors, also of lower rank."""
    u, v = np.eye(4)[0], np.eye(4)[1]
    one = np.outer(u, u)
    models = [{"w": m} for m in (one, -2 * one, np.outer(v, v), 0 * one, one + np.outer(v, v))]
    found = host.interference({"w": 0 * one}, models, rank=3)
    close(found.total.cosines[0, :4], [1, -1, 0, 0])
    close(found.total.norms, [1, 2, 1, 0, np.sqrt(2)])
    close(found.total.sign_conflict, 1 / 16)
    for side in range(2):
        close(found.overlap[0, side, 0], [1, 1, 0, 0, 1])
        close(np.diag(found.overlap[0, side]), [1, 1, 1, 0, 1])


@pytest.mark.soak
def test_interference_at_any_scale_and_its_gradients():
    """Powers of two change no digit. All singular values of one task vector are equal, and those
    of another are 0."""
    base = {"w": np.zeros((3, 2), np.float32)}
    models = [{"w": x.astype(np.float32)} for x in (np.eye(3, 2), *rng(3).normal(size=(2, 3, 2)))]
    models.append(base)

    @jax.jit
    def measured(k):
        scaled = jax.tree.map(lambda x: x * k, models)
        return probe.interference(base, scaled, rank=1)

    want = measured(1.0)
    for k in (-70, 80):
        got = measured(2.0**k)
        np.testing.assert_array_equal(np.ldexp(got.total.norms, -k), want.total.norms)
        np.testing.assert_array_equal(got.each.cosines, want.each.cosines)
        np.testing.assert_array_equal(got.overlap, want.overlap)

    def total(models):
        found = probe.interference(base, models, rank=1)
        return found.total.norms.sum() + found.total.cosines.sum() + found.overlap.sum()

    slopes = jax.grad(total)(models)
    assert all(np.isfinite(x["w"]).all() for x in slopes)
    assert np.abs(slopes[1]["w"]).max() > 0.1


@pytest.mark.slow
def test_overlap_of_random_spans_is_chance():
    random = rng(11)
    models = [{"w": random.normal(size=(30, 20))} for _ in range(6)]
    found = host.interference({"w": np.zeros((30, 20))}, models, rank=5)
    for side in range(2):
        mean, error = mean_and_error(found.overlap[0, side][np.triu_indices(6, 1)])
        assert abs(mean - found.chance[0, side]) < 4 * error  # uniformly distributed spans


# --- all of them ----------------------------------------------------------------------------------

BATCH = {"x": inputs(), "t": rng(8).normal(size=(7, 2)), "y": rng(5).integers(0, 2, 7)}
PROBES = {
    "barrier": lambda a, b, d: probe.barrier(squared, a, b, d, [0.2, 0.7]),
    "cross_task_linearity": lambda a, b, d: probe.cross_task_linearity(tanh_labelled, a, b, d),
    "addition": lambda a, b, d: probe.addition(tanh_labelled, a, [b, a], d, [0.3]),
    "negation": lambda a, b, d: probe.negation(tanh_labelled, a, b, d, [0.3]),
    "averaging": lambda a, b, d: probe.averaging(tanh_labelled, [a, b], d, crossentropy),
    "stitching": lambda a, b, d: probe.stitching(chained_labelled, [a], b, d, crossentropy),
    "hessian_spectrum": lambda a, b, d: probe.hessian_spectrum(
        squared, a, d, jax.random.key(0), steps=5, probes=2
    ),
    "gaussian_sensitivity": lambda a, b, d: probe.gaussian_sensitivity(
        squared, a, d, jax.random.key(0), [0.1], draws=2
    ),
    "fine_tuning_sensitivity": lambda a, b, d: probe.fine_tuning_sensitivity(
        squared, a, b, d, [0.1]
    ),
    "interference": lambda a, b, d: probe.interference(a, [b, b], rank=2),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [soak_unless(n == "barrier", n) for n in PROBES if n not in ("addition", "negation")],
)
def test_inside_jit_as_outside(name):
    a, b = tanh_models(2)
    measure = PROBES[name]
    # eigenvalues and roots of what rounds differently
    chex.assert_trees_all_close(jax.jit(measure)(a, b, BATCH), measure(a, b, BATCH), atol=1e-9)


OF_ONE_MODEL = {"hessian_spectrum", "gaussian_sensitivity"}
UNFIT = [
    # values that are not finite are detected in the results, so the probe is compiled
    soak_unless(fault != "nan" or name in ("barrier", "interference"), name, fault)
    for name in PROBES
    for fault in ("shape", "leaf", "nan")
    if fault == "nan" or name not in OF_ONE_MODEL
]


@pytest.mark.parametrize(("name", "fault"), UNFIT)
def test_models_that_do_not_fit_are_named(name, fault):
    a, b = tanh_models(2)
    if fault == "shape":
        b["w2"] = np.ones((5, 3))
    elif fault == "leaf":
        b["extra"] = np.ones(2)
    else:
        a["w2"] = a["w2"] * np.nan
    with pytest.raises(ValueError, match="extra" if fault == "leaf" else "w2"):
        PROBES[name](a, b, BATCH)


@pytest.mark.parametrize("name", [name for name in PROBES if name != "interference"])
def test_data_that_do_not_fit(name):
    a, b = tanh_models(2)
    empty = jax.tree.map(lambda x: x[:0], BATCH)
    for data in (empty, {}, BATCH | {"t": np.ones((3, 2))}):
        with pytest.raises(ValueError, match="data: expected leaves"):
            PROBES[name](a, b, data)
    if name in ("cross_task_linearity", "addition", "negation", "averaging", "stitching"):
        with pytest.raises(ValueError, match="at least 2 examples"):
            PROBES[name](a, b, jax.tree.map(lambda x: x[:1], BATCH))


def plain(p, x):
    return x @ p["w1"]


def wrong(p, x):
    return x @ p["w1"], {"flat": jnp.sum(x, 0)}


def run_flax(net, *override):
    _, models, batch, _ = flax_case("mlp", 1)
    return jax.eval_shape(net, *models, batch, *override)


A, B = tanh_models(2)
X = inputs()
KEY = np.array([0, 0], np.uint32)
ctl = partial(probe.cross_task_linearity, tanh_net, A, B, X)
FAULTS = [
    (lambda: ctl([]), "alphas: expected a vector"),
    (lambda: ctl([[0.5]]), "alphas: expected a vector"),
    (lambda: ctl([np.nan]), "alphas: expected finite"),
    (lambda: ctl("half"), "alphas: expected numbers"),
    (lambda: ctl([0.5], batch_size=0), "batch_size: expected an integer >= 1"),
    (lambda: ctl([0.5], chunk_size=1.5), "chunk_size: expected an integer"),
    (lambda: probe.k_model_linearity(plain, [], X), "models: expected at least one"),
    (lambda: probe.k_model_linearity(plain, [A], X, [[0.5, 0.5]]), "1 models, got shape"),
    (lambda: probe.k_model_linearity(plain, [A, B], X, [[0.5, 0.6]]), "rows that sum to 1"),
    (lambda: probe.k_model_linearity(wrong, [A], X), "layer 'flat': expected .* 7 examples"),
    (
        lambda: probe.k_model_linearity(lambda p, x: jnp.log(x @ p["w1"]), [A], X),
        "features: expected finite",
    ),
    (lambda: probe.addition(plain, A, [], X, [0.5]), "models: expected at least one"),
    (lambda: probe.addition(plain, A, [B], X, []), "scales: expected a vector"),
    (lambda: probe.negation(plain, A, B, X, [0.5], form="half"), "form: expected"),  # pyright: ignore
    (lambda: probe.simplex_grid(0, 2), "expected >= 1"),
    (
        lambda: probe.barrier(lambda p, x: jnp.sum(jnp.sqrt(p)) * x[0], 4.0, -4.0, X[:, 0]),
        "loss of the models: expected finite",
    ),
    (
        lambda: probe.barrier(lambda p, x: x.mean() / p, 1.0, -1.0, ONES, [0.25, 0.5]),
        None,  # infinite where the barrier is
    ),
    (
        lambda: probe.barrier(lambda p, x: x.mean() * jnp.sqrt(p**2 - 1), 2.0, -2.0, ONES, [0.5]),
        r"loss: NaN at weights \[0.5 0.5\]",
    ),
    (
        lambda: probe.averaging(plain, [A], X, lambda out, x: out),
        "metric: expected a value for each of 7",
    ),
    (lambda: probe.averaging(lambda p, x: x[:, 0], [A], X, lambda out, x: out), "expected logits"),
    (lambda: probe.stitching(plain, [A], B, X, lambda o, x: o[:, 0]), "apply: expected apply"),
    (
        lambda: probe.stitching(chained, [A], B, X, lambda o, x: o[:, 0], layers=["first"]),
        "layers: the network has no 'first' .nearest: 'z_first'",
    ),
    (
        lambda: probe.stitching(chained, [A], B, X, lambda o, x: o[:, 0], [1.0, 2.0]),
        "weights: expected",
    ),
    (lambda: spectra(symmetric(5), probes=1), "probes: expected at least 2"),
    (lambda: spectra(symmetric(5), top=6), "top: expected at most"),
    (lambda: spectra(symmetric(5), steps=0), "steps: expected an integer >= 1"),
    slow_unless(
        False,
        lambda: probe.hessian_spectrum(
            lambda p, x: jnp.sum(jnp.abs(p) ** 1.5) * x.mean(), np.zeros(3), X, jax.random.key(0)
        ),
        "second derivatives: expected finite",
    ),
    (
        lambda: probe.hessian_spectrum(squared, {"n": 3}, X, jax.random.key(0)),
        "params: expected floating leaves",
    ),
    slow_unless(
        False,
        lambda: probe.spectral_density(spectra(symmetric(5)), [0.0], 0.0),
        "width: expected",
    ),
    (
        lambda: probe.gaussian_sensitivity(squared, A, X, KEY, [1.0], draws=1),
        "draws: expected at least 2",
    ),
    (
        lambda: probe.gaussian_sensitivity(
            squared, A, X, KEY, [1.0], deviation={"w1": 1.0, "w2": np.ones(7), "w3": 1.0}
        ),
        "deviation, leaf 'w2': expected a shape that broadcasts",
    ),
    (
        lambda: probe.gaussian_sensitivity(squared, A, X, KEY, [1.0], deviation={"w1": 1.0}),
        "deviation: expected a number or the leaves",
    ),
    (
        lambda: probe.gaussian_sensitivity(squared, A, X, KEY, [1.0], deviation=-1.0),
        "deviation, leaf 'w1': expected finite values >= 0",
    ),
    slow_unless(False, lambda: probe.interference(A, [B], [-1.0]), None),  # divided by their sum
    (lambda: probe.interference(A, [A, B], [-1.0, 2.0]), "weights: expected values >= 0"),
    (lambda: probe.interference(A, [B], rank=0), "rank: expected an integer"),
    (lambda: probe.interference({"n": 1}, [{"n": 1}]), "base: expected floating leaves"),
    (
        lambda: run_flax(probe.flax_network(FLAX["mlp"][0].apply, "nothing*")),
        "layers: none matches",
    ),
    (
        lambda: run_flax(
            probe.flax_network(FLAX["mlp"][0].apply, intercept=nn.intercept_methods), {"hiden": X}
        ),
        "override: no submodule returned",
    ),
    (
        lambda: run_flax(probe.flax_network(FLAX["mlp"][0].apply), {"hidden_0": X}),
        "intercept",
    ),
]


@pytest.mark.parametrize(("call", "message"), FAULTS, ids=range(len(FAULTS)))
def test_faults_are_named(call, message):
    if message is None:
        call()
        return
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def temporary(function, *args, **static):
    return function.lower(*args, **static).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_does_not_grow_with_points_and_batches():
    """Compiled scratch memory is that of a chunk and a batch."""
    random = rng(0)
    shapes = {"w1": (3, 64), "w2": (64, 64), "w3": (64, 2)}
    stacked = {name: random.normal(size=(2, *s)) for name, s in shapes.items()}
    like = jax.tree.map(lambda x: x[0], stacked)

    def loss(params, batch):  # which cannot be fused into one loop
        return jnp.mean(jnp.sort(jnp.sort(batch["x"] @ params["w1"]) @ params["w2"])[:, 0])

    def needs(n, points, batch_size):
        batch = {"x": jnp.ones((n, 3))}
        w = jnp.full((points, 2), 0.5)
        return temporary(_barrier, loss, like, stacked, batch, w, batch_size, 1)

    small = needs(256, 4, 64)
    assert needs(256, 64, 64) < small + 64 * 64  # a few vectors of points
    assert needs(4096, 4, 64) < 1.1 * small
    assert needs(4096, 4, None) > 5 * small


def test_a_residual_is_that_of_its_ritz_vector():
    """|A y - value y| of two steps in three dimensions."""
    A = np.float32([[2, 1, 0], [1, -1, 3], [0, 3, 1]])
    start, second = np.eye(3, dtype=np.float32)[:2]  # A e_1 = 2 e_1 + e_2
    alpha, beta = lanczos(lambda v: A @ v, jnp.asarray(start), 2, jax.random.key(0))
    values, _, residuals = ritz(alpha, beta)
    _, S = np.linalg.eigh(A[:2, :2])
    Y = np.stack([start, second]).T @ S
    np.testing.assert_allclose(residuals, np.linalg.norm(A @ Y - Y * values, axis=0), rtol=1e-5)


@pytest.mark.slow
def test_ritz_values_of_repeated_eigenvalues_and_invariant_subspaces():
    """In exact arithmetic as many steps as dimensions find all; float32, so to 1e-5 of the norm."""
    q = np.linalg.qr(np.random.default_rng(2).normal(size=(6, 6)))[0]

    @jax.jit
    def decomposed(A):
        start = jnp.full(6, 6**-0.5, jnp.float32)
        return ritz(*lanczos(lambda v: A @ v, start, 6, jax.random.key(0)))

    cases = [-5.0, 1, 2, 3, 0.1, 0.2], [4.0, 4, 0, 0, 0, 0]
    for values, k in itertools.product(cases, (0, -70, 80)):  # whose squares are beyond float32
        A = np.ldexp(q * np.array(values) @ q.T, k).astype(np.float32)
        found, first, residuals = map(np.asarray, decomposed(A))
        found, residuals = (np.ldexp(x.astype(float), -k) for x in (found, residuals))
        np.testing.assert_allclose(found, np.sort(values), atol=1e-5 * max(map(abs, values)))
        np.testing.assert_allclose(np.sum(first**2), 1, rtol=1e-5)
        assert residuals.max() < 1e-4 * max(map(abs, values))
