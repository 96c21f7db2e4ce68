"""Depth: makers of layers, listed and stacked layers, and insertions that preserve the function."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sail_jax import growth
from sail_jax.basis.certificate import certificate, exactness
from sail_jax.basis.change_basis import change_basis
from sail_jax.basis.maps import along, classify
from sail_jax.basis.spaces import spec

KEY = jax.random.key(13)
EPS = float(np.finfo(np.float32).eps)
TOLERANCE = 10 * EPS**0.5  # on outputs of order one
D, L = 4, 3


def draw(*shape, seed=0):
    x = np.random.default_rng(seed).normal(size=shape) / shape[-1] ** 0.5
    return x.astype(np.float32)


def residual(container):
    """A residual network whose layers are in a list, in one of the forms used by frameworks."""
    layers = [
        {"in": draw(D, D, seed=k), "bias": draw(D, seed=k + 10), "out": draw(D, D, seed=k + 20)}
        for k in range(L)
    ]
    outer = {"embed": draw(3, D, seed=30), "head": draw(D, 2, seed=31)}
    if container == "list":
        return outer | {"layers": layers}
    if container == "names":
        return outer | {f"layer_{k}": layer for k, layer in enumerate(layers)}
    if container == "dict":
        return outer | {"layers": {str(k): layer for k, layer in enumerate(layers)}}
    flat = {f"model.layers.{k}.{n}": x for k, layer in enumerate(layers) for n, x in layer.items()}
    return outer | flat


NAMES = {
    "list": "layers/{i}",
    "names": "layer_{i}",
    "dict": "layers/{i}",
    "flat": "model.layers.{i}",
}


def block(x, p):
    h = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-3)
    return x + jax.nn.gelu(h @ p["in"] + p["bias"]) @ p["out"]


@jax.jit
def scanned(params, x):
    layers = params["layers"]["stack"]
    x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x @ params["embed"], layers)
    return x @ params["head"]


def looped(params, x):
    x = x @ params["embed"]
    for p in params["layers"]:
        x = block(x, p)
    return x @ params["head"]


X = draw(5, 3, seed=40)
RULES = {
    "embed": "x* resid",
    "head": "resid* y",
    "layers/stack/in": "layer resid* hidden",
    "layers/stack/bias": "layer hidden",
    "layers/stack/out": "layer hidden* resid",
}
SPACES = {"layer": "stack", "hidden": "elementwise", "resid": "rmsnorm", "{x,y}": "outer"}
STACKED = residual("list")
STACKED["layers"] = {
    "stack": {n: np.stack([layer[n] for layer in STACKED["layers"]]) for n in ("in", "bias", "out")}
}
SPEC = spec(STACKED, RULES, spaces=SPACES)

INDICES = {
    "StackBERT": (growth.deepen(3, 7), [0, 1, 2, 0, 1, 2, 0]),
    "G_stack": (growth.deepen(3, 6, "stack"), [0, 1, 2, 0, 1, 2]),
    "bert2BERT": (growth.deepen(3, 8, "stack_top"), [0, 1, 2, 0, 1, 2, 1, 2]),
    "interpolate": (growth.deepen(3, 6, "interpolate"), [0, 0, 1, 1, 2, 2]),
    "interpolate, uneven": (growth.deepen(3, 5, "interpolate"), [0, 0, 1, 1, 2]),
    "SOLAR": (growth.depth_up_scale(6, 2), [0, 1, 2, 3, 2, 3, 4, 5]),
    "SOLAR, drop half": (growth.depth_up_scale(4, 2), [0, 1, 2, 3]),
    "LLaMA-Pro": (growth.interleave(4, [1, 3]), [0, 1, 1, 2, 3, 3]),
    "LLaMA-Pro, two each": (growth.interleave(2, [1, 0, 1]), [0, 0, 1, 1, 1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INDICES)
def test_index_makers(name):
    m, index = INDICES[name]
    assert m.index.tolist() == index
    assert m.family in classify(m)
    layers = jnp.asarray(draw(m.old, 2))
    chex.assert_trees_all_equal(along(m.write, layers, 0), np.asarray(layers)[index])
    # read is the left inverse: a layer's copies share its gradient
    read, write = np.asarray(m.dense().read), np.asarray(m.dense().write)
    chex.assert_trees_all_close(read @ write, np.eye(m.old, dtype=np.float32), atol=2 * EPS)


@pytest.mark.slow
def test_dense_depth():
    """SAIL: layer k is a softmax-weighted mean of layers; sharp logits select."""
    logits = np.float32([[9.0, 0, 0], [0, 0, 0], [0, 2, 1], [0, 0, 50]])
    m = growth.mix_layers(logits)
    new = change_basis(STACKED, SPEC, {"layer": m})["layers"]["stack"]
    D = np.exp(np.float64(logits)) / np.exp(np.float64(logits)).sum(1, keepdims=True)
    for leaf, x in STACKED["layers"]["stack"].items():
        want = np.tensordot(D, np.float64(x), 1)
        np.testing.assert_allclose(new[leaf], want, atol=20 * EPS)
    middle = change_basis(STACKED, SPEC, {"layer": growth.interpolate(L, 2 * L - 1)})
    w = STACKED["layers"]["stack"]["in"]
    between = np.asarray(middle["layers"]["stack"]["in"])[1]
    chex.assert_trees_all_close(between, (w[0] + w[1]) / 2, atol=4 * EPS)
    for mixed in (m, growth.interpolate(L, 2 * L - 1), growth.deepen(3, 7)):
        assert exactness(SPEC, {"layer": mixed}).lost


def test_gradient_of_logits_by_hand():
    """d sum_k <G_k, sum_i d_ki W_i> / d gamma_ki = d_ki (<G_k, W_i> - sum_j d_kj <G_k, W_j>)."""
    W, G = draw(3, 5, seed=1), draw(4, 5, seed=2)
    logits = draw(4, 3, seed=3)
    loss = lambda g: jnp.sum(G * along(growth.mix_layers(g).write, W, 0))  # noqa: E731
    D, inner = np.exp(logits) / np.exp(logits).sum(1, keepdims=True), G @ W.T
    want = D * (inner - np.sum(D * inner, 1, keepdims=True))
    chex.assert_trees_all_close(jax.jit(jax.grad(loss))(logits), want, atol=20 * EPS)


@pytest.mark.parametrize("container", NAMES)
def test_round_trip_of_listed_layers(container):
    params, name = residual(container), NAMES[container]
    stacked = growth.stack_layers(params, name)
    kept = growth.unstack_layers(stacked, name, container=list if container == "list" else dict)
    chex.assert_trees_all_equal(kept, params)
    assert jax.tree.structure(kept) == jax.tree.structure(params)
    got = {k.rsplit(".", 1)[-1]: v for k, v in stacked.items() if hasattr(v, "shape")}
    if container != "flat":
        got = stacked["layer_stack"] if container == "names" else stacked["layers"]["stack"]
    for leaf, want in STACKED["layers"]["stack"].items():
        chex.assert_trees_all_equal(got[leaf], want)


def test_ten_layers_and_more_keep_their_order():
    params = {f"layer_{k}": {"w": jnp.full(2, float(k))} for k in range(12)}
    stacked = growth.stack_layers(params, "layer_{i}")
    assert stacked["layer_stack"]["w"][:, 0].tolist() == list(range(12))
    chex.assert_trees_all_equal(growth.unstack_layers(stacked, "layer_{i}"), params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stack", "interpolate"])
def test_listed_layers_grow_as_stacked_ones(name):
    new = change_basis(STACKED, SPEC, {"layer": growth.deepen(L, 2 * L, name)})
    listed = growth.unstack_layers(new, "layers/{i}", container=list)
    assert len(listed["layers"]) == 2 * L
    chex.assert_trees_all_close(jax.jit(looped)(listed, X), scanned(new, X), atol=100 * EPS)
    assert not certificate(scanned, STACKED, new, X).preserved


@pytest.mark.slow
@pytest.mark.parametrize(
    "m", [growth.interleave(L, [0, 2]), growth.deepen(L, 2 * L, "interpolate")]
)
def test_inserted_layers_with_zero_output_preserve(m):
    """LLaMA-Pro; without the zeros, the same insertion does not preserve the function."""
    new = change_basis(STACKED, SPEC, {"layer": m})
    assert not certificate(scanned, STACKED, new, X).preserved
    pro = growth.overwrite(new, {"**/out": "zeros"}, growth.inserted(m))
    seen = certificate(scanned, STACKED, pro, X)
    assert seen.preserved
    assert seen.absolute < TOLERANCE
    chex.assert_trees_all_equal(pro["layers"]["stack"]["in"], new["layers"]["stack"]["in"])
    # the inserted layers are not stuck: their output projections have a gradient
    g = jax.jit(jax.grad(lambda p: jnp.sum(scanned(p, X) ** 2)))(pro)["layers"]["stack"]["out"]
    assert (np.abs(g).max((1, 2)) > 1e-4).all()


@pytest.mark.slow
@pytest.mark.parametrize(("f", "idempotent"), [(jax.nn.relu, True), (jax.nn.gelu, False)])
def test_identity_insertion(f, idempotent):
    """Net2DeeperNet: exact iff f(f(x)) == f(x)."""
    params = {"in": draw(3, D), "w": draw(L, D, D), "b": draw(L, D, seed=1), "out": draw(D, 2)}
    rules = {"in": "x* h", "w": "layer h* h", "b": "layer h", "out": "h* y"}
    s = spec(params, rules, spaces={"layer": "stack", "h": "relu", "{x,y}": "outer"})

    def apply(p, x):
        step = lambda x, wb: (f(x @ wb[0] + wb[1]), None)  # noqa: E731
        return jax.lax.scan(step, f(x @ p["in"]), (p["w"], p["b"]))[0] @ p["out"]

    m = growth.interleave(L, [0, 1, 1])
    new = change_basis(params, s, {"layer": m})
    new = growth.overwrite(new, {"w": "identity", "b": "zeros"}, growth.inserted(m))
    seen = certificate(jax.jit(apply), params, new, X)
    assert seen.preserved == idempotent
    assert (seen.absolute < TOLERANCE) if idempotent else (seen.relative > 1e-3)


def test_overwrite_along_another_axis_and_with_ones():
    new = growth.overwrite({"scale": jnp.zeros((2, 3))}, {"scale": "ones"}, [1], axis=1)
    assert new["scale"].tolist() == [[0, 1, 0], [0, 1, 0]]


@pytest.mark.slow
def test_depth_and_width_commute():
    """LiGO mixes layers before it widens; the order is of no consequence, axes being distinct."""
    deep = {"layer": growth.mix_layers(draw(5, L))}
    wide = {"hidden": growth.tile(D, 6, "average"), "resid": growth.project(D, 6, KEY)}
    change = jax.jit(change_basis, static_argnums=1)
    one = change(change(STACKED, SPEC, deep), SPEC.resized(deep), wide)
    two = change(STACKED, SPEC, deep | wide)
    chex.assert_trees_all_close(one, two, atol=50 * EPS)


def test_traced_makers():
    f = jax.jit(lambda g: along(growth.mix_layers(g).write, jnp.ones((2, 3)), 0))
    chex.assert_trees_all_close(f(draw(4, 2)), jnp.ones((4, 3)), atol=4 * EPS)
    with pytest.raises(TypeError, match="cannot be traced"):
        jax.jit(lambda a: growth.interleave(3, a).write.index)(jnp.array([1]))
    fill = jax.jit(partial(growth.overwrite, rules={"a": "zeros"}))
    assert fill({"a": jnp.ones(3)}, layers=jnp.array([1]))["a"].tolist() == [1, 0, 1]


def shares(old, new):
    """Eq. (9) by counting: each layer is cut into as many equal pieces as there are new ones."""
    pieces = np.repeat(np.arange(old), new).reshape(new, old)
    return np.stack([np.bincount(row, minlength=old) for row in pieces]) / old


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [(4, 2), (3, 2), (5, 3), (4, 1), (2, 6), (3, 4), (3, 3)])
def test_means_of_neighbours(old, new):
    np.testing.assert_allclose(growth.deepen(old, new, "mean").write, shares(old, new), atol=EPS)


@pytest.mark.parametrize(
    ("how", "kept"), [("stack", [0, 1]), ("stack_top", [2, 3]), ("interpolate", [0, 2])]
)
def test_orders_leave_layers_out(how, kept):
    m = growth.deepen(4, 2, how)
    assert m.index.tolist() == kept
    assert exactness(SPEC.resized({"layer": growth.deepen(L, 4)}), {"layer": m}).lost


@pytest.mark.slow
def test_fewer_layers_and_what_is_lost():
    """By eq. (9) in NumPy, and by running both networks."""
    maps = {"layer": growth.deepen(L, 2, "mean")}
    new = change_basis(STACKED, SPEC, maps)
    for leaf, x in STACKED["layers"]["stack"].items():
        want = np.einsum("ki,i...->k...", shares(L, 2), x)
        np.testing.assert_allclose(new["layers"]["stack"][leaf], want, atol=4 * EPS)
    seen = certificate(scanned, STACKED, new, X)
    moved = np.abs(np.asarray(scanned(new, X)) - np.asarray(scanned(STACKED, X))).max()
    assert not seen.preserved
    assert seen.absolute == pytest.approx(moved, rel=1e-5)
    assert moved > 0.1


STACKS = {"a": np.zeros((2, 3, 4))}
ERRORS = [
    (lambda: growth.deepen(3, 0), "layers must be 1 or more, got old=3, new=0"),
    (
        lambda: growth.deepen(2, 4, "top"),
        "how: expected one of 'stack', 'stack_top', .*; got 'top'",
    ),
    (lambda: growth.deepen(2, 2, matrix=jnp.eye(2) * 2), "rows of matrix must sum to one"),
    (lambda: growth.mix_layers(np.ones(3)), "must be a matrix"),
    (lambda: growth.depth_up_scale(5, 3), "between 0 and old / 2"),
    (lambda: growth.interleave(3, [3]), r"layers of range\(3\), got \[3\]"),
    (lambda: growth.interleave(3, [0.5]), "layers of range"),
    (lambda: growth.inserted(growth.mix_layers(np.ones((2, 2)))), "index form"),
    (lambda: growth.overwrite(STACKS, {"b": "zeros"}, [0]), "matches no leaf"),
    (lambda: growth.overwrite(STACKS, {"a": "ones?"}, [0]), "expected one of 'zeros', 'ones'"),
    (lambda: growth.overwrite(STACKS, {"a": "identity"}, [0]), r"'a', a layer of it: must end in"),
    (lambda: growth.overwrite(STACKS, {"a": "zeros"}, [2]), r"layers must lie in range\(2\)"),
    (lambda: growth.stack_layers({"a": np.ones(2)}, "layers/{i}"), "no leaf starts with"),
    (lambda: growth.stack_layers({"a": np.ones(2)}, "layers"), "must hold {i} once"),
    (
        lambda: growth.stack_layers({"l": [{"w": np.ones(2)}, {"w": np.ones(3)}]}, "l/{i}"),
        "layers of 'l/stack/w' differ in shape",
    ),
    (
        lambda: growth.stack_layers({"l_0": np.ones(2), "l_2": np.ones(2)}, "l_{i}"),
        r"layers \[1\] of the 3 .* are missing",
    ),
    (
        lambda: growth.unstack_layers(
            {"l": {"stack": {"a": np.ones(2), "b": np.ones(3)}}}, "l/{i}"
        ),
        "differ in length",
    ),
    (lambda: growth.unstack_layers({"a": {"b": np.ones(2)}}, "l/{i}"), "no leaf starts with"),
    (
        lambda: growth.unstack_layers({"x": {"l_stack": X}}, "x/l_{i}", container=list),
        "can be a list",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
