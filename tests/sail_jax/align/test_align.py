"""Alignment: recovery of hidden symmetries, decreasing distances, restored statistics."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import diagonal, slow_unless

from sail_jax import align, growth, spec_of
from sail_jax.align.matching import families as families_of
from sail_jax.align.solvers import Cost, solver
from sail_jax.basis.certificate import certificate, exactness
from sail_jax.basis.change_basis import change_basis
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, compose, select
from sail_jax.basis.spaces import Spec, spec

P, S, O = Family.PERMUTATION, Family.SIGNED_PERMUTATION, Family.ORTHOGONAL
M, G = Family.POSITIVE_MONOMIAL, Family.LINEAR


class Net(NamedTuple):
    params: Any
    apply: Callable[[Any, Any], Any]
    spec: Spec
    inputs: Any


def make(shapes: Mapping[str, tuple], apply, rules, spaces, inputs, **positive):
    random = np.random.default_rng(7)
    params = {}
    for name, shape in shapes.items():
        x = random.normal(size=shape) / max(shape[0], 1) ** 0.5
        params[name] = np.float32(1 + x**2 if name in positive.get("above", ()) else x)
    spaces = (
        {"x": "outer"}
        | ({"y": "outer"} if "y" in " ".join(rules.values()).split() else {})
        | spaces
    )
    return Net(params, jax.jit(apply), spec(params, rules, spaces=spaces), inputs)


X = np.random.default_rng(5).normal(size=(6, 5)).astype(np.float32)


def mlp(f, word, depth=4, width=16):
    shapes = {"w0": (5, width), f"w{depth}": (width, 4)}
    rules = {"w0": "x* h0", f"w{depth}": f"h{depth - 1}* y"}
    for k in range(depth):
        if k:
            shapes[f"w{k}"], rules[f"w{k}"] = (width, width), f"h{k - 1}* h{k}"
        shapes[f"b{k}"], rules[f"b{k}"] = (width,), f"h{k}"

    def apply(p, x):
        for k in range(depth):
            x = f(x @ p[f"w{k}"] + p[f"b{k}"])
        return x @ p[f"w{depth}"]

    return make(shapes, apply, rules, {"h{i}": word}, X)


def conv():
    """Two convolutions under BatchNorm, with running statistics, and a flattened image."""
    shapes = {"c0": (3, 3, 3, 8), "c1": (3, 3, 8, 12), "head": (4 * 12, 4)}
    rules = {"c0": "_ _ x* c0", "c1": "_ _ c0* c1", "head": "(place c1)* y"}
    for k, n in ((0, 8), (1, 12)):
        shapes |= {f"n{k}/{s}": (n,) for s in ("scale", "bias", "mean", "var")}
        rules |= {f"n{k}/{s}": f"c{k}" for s in ("bias", "mean")}
        rules |= {f"n{k}/{s}": f"diag(c{k})" for s in ("scale", "var")}

    def apply(p, x):
        for k in range(2):
            x = jax.lax.conv_general_dilated(
                x, p[f"c{k}"], (1 + k, 1 + k), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = (x - p[f"n{k}/mean"]) * jax.lax.rsqrt(p[f"n{k}/var"] + 1e-5)
            x = jax.nn.relu(x * p[f"n{k}/scale"] + p[f"n{k}/bias"])
        x = x[:, :2, :2]
        return x.reshape(len(x), -1) @ p["head"]

    inputs = np.random.default_rng(6).normal(size=(2, 7, 7, 3)).astype(np.float32)
    spaces = {"c{i}": "elementwise", "place": "outer"}
    above = ("n0/var", "n1/var", "n0/scale", "n1/scale")
    return make(shapes, apply, rules, spaces, inputs, above=above)


def rms(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def residual():
    shapes = {"embed": (5, 12), "head": (12, 4)}
    rules = {"embed": "x* resid", "head": "resid* y"}
    for k in range(2):
        shapes |= {f"{k}/in": (12, 16), f"{k}/bias": (16,), f"{k}/out": (16, 12)}
        rules |= {f"{k}/in": f"resid* h{k}", f"{k}/bias": f"h{k}", f"{k}/out": f"h{k}* resid"}

    def apply(p, x):
        x = x @ p["embed"]
        for k in range(2):
            x = x + jax.nn.relu(rms(x) @ p[f"{k}/in"] + p[f"{k}/bias"]) @ p[f"{k}/out"]
        return rms(x) @ p["head"]

    return make(shapes, apply, rules, {"resid": "rmsnorm", "h{i}": "relu"}, X)


def attend(q, k, v):
    """q [t, kv, group, qk], k [t, kv, qk], v [t, kv, v]."""
    logits = jnp.einsum("tkgd,skd->kgts", q, k)
    mask = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, logits, -1e9))
    return jnp.einsum("kgts,skv->tkgv", weights, v)


def transformer(layers=2):
    """Multi-head attention and a GELU MLP, with merged head axes and biases."""
    n, h, d, v = 12, 3, 4, 5
    shapes = {"embed": (7, n), "pos": (6, n), "head": (n, 7)}
    rules = {"embed": "x* resid", "pos": "_ resid", "head": "resid* y"}
    spaces = {"resid": "layernorm"}
    for k in range(layers):
        shapes |= {f"{k}/q": (n, h * d), f"{k}/k": (n, h * d), f"{k}/v": (n, h * v)}
        shapes |= {f"{k}/o": (h * v, n), f"{k}/qb": (h, d), f"{k}/norm": (n,)}
        shapes |= {f"{k}/in": (n, 20), f"{k}/bias": (20,), f"{k}/out": (20, n)}
        rules |= {f"{k}/q": f"resid* (head{k} qk{k})", f"{k}/k": f"resid* (head{k} qk{k}*)"}
        rules |= {f"{k}/v": f"resid* (head{k} v{k})", f"{k}/o": f"(head{k} v{k})* resid"}
        rules |= {f"{k}/qb": f"head{k} qk{k}", f"{k}/norm": "diag(resid)"}
        rules |= {f"{k}/in": f"resid* hidden{k}", f"{k}/bias": f"hidden{k}"}
        rules |= {f"{k}/out": f"hidden{k}* resid"}
    spaces |= {"head{i}": "odd", "{qk,v}{i}": "linear", "hidden{i}": "elementwise"}

    def apply(p, tokens):
        x = p["embed"][tokens] + p["pos"]
        for k in range(layers):
            y = rms(x - x.mean(-1, keepdims=True)) * p[f"{k}/norm"]
            q = (y @ p[f"{k}/q"]).reshape(-1, h, 1, d) + p[f"{k}/qb"][:, None]
            a = attend(q, (y @ p[f"{k}/k"]).reshape(-1, h, d), (y @ p[f"{k}/v"]).reshape(-1, h, v))
            x = x + a.reshape(len(x), -1) @ p[f"{k}/o"]
            y = rms(x - x.mean(-1, keepdims=True))
            x = x + jax.nn.gelu(y @ p[f"{k}/in"] + p[f"{k}/bias"]) @ p[f"{k}/out"]
        return x @ p["head"]

    inputs = np.array([0, 3, 5, 1, 6, 2])
    return make(shapes, apply, rules, spaces, inputs)


def llama(layers=2, tied=False):
    """Grouped queries, SwiGLU, RMSNorm with scales, an embedding that may be tied."""
    n, kv, group, d, v, hidden = 12, 3, 2, 4, 5, 20
    shapes: dict[str, tuple] = {"embed": (9, n), "norm": (n,)}
    rules = {"embed": "x* resid | x resid*" if tied else "x* resid", "norm": "diag(resid)"}
    if not tied:
        shapes, rules = shapes | {"lm": (n, 9)}, rules | {"lm": "resid* y"}
    for k in range(layers):
        shapes |= {f"{k}/q": (n, kv, group, d), f"{k}/k": (n, kv, d), f"{k}/v": (n, kv, v)}
        shapes |= {f"{k}/o": (kv * group * v, n), f"{k}/n0": (n,), f"{k}/n1": (n,)}
        shapes |= {f"{k}/gate": (n, hidden), f"{k}/up": (n, hidden), f"{k}/down": (hidden, n)}
        rules |= {f"{k}/q": f"resid* kv{k} group{k} qk{k}", f"{k}/k": f"resid* kv{k} qk{k}*"}
        rules |= {f"{k}/v": f"resid* kv{k} v{k}", f"{k}/o": f"(kv{k} group{k} v{k})* resid"}
        rules |= {f"{k}/n0": "diag(resid)", f"{k}/n1": "diag(resid)"}
        rules |= {f"{k}/{w}": f"resid* hidden{k}" for w in ("gate", "up")}
        rules |= {f"{k}/down": f"hidden{k}* resid"}
    spaces = {"resid": "rmsnorm", "{kv,group}{i}": "odd", "{qk,v}{i}": "linear"}
    spaces |= {"hidden{i}": "elementwise"}

    def apply(p, tokens):
        x = p["embed"][tokens]
        for k in range(layers):
            y = rms(x) * p[f"{k}/n0"]
            q = jnp.einsum("tn,nkgd->tkgd", y, p[f"{k}/q"])
            a = attend(
                q,
                jnp.einsum("tn,nkd->tkd", y, p[f"{k}/k"]),
                jnp.einsum("tn,nkd->tkd", y, p[f"{k}/v"]),
            )
            x = x + a.reshape(len(x), -1) @ p[f"{k}/o"]
            y = rms(x) * p[f"{k}/n1"]
            x = x + (jax.nn.silu(y @ p[f"{k}/gate"]) * (y @ p[f"{k}/up"])) @ p[f"{k}/down"]
        return (rms(x) * p["norm"]) @ p.get("lm", p["embed"].T)

    above = ("norm", *(f"{k}/n{i}" for k in range(layers) for i in range(2)))
    return make(shapes, apply, rules, spaces, np.array([0, 3, 8, 1, 6, 2]), above=above)


NETS = {
    "relu": mlp(jax.nn.relu, "relu"),
    "tanh": mlp(jnp.tanh, "odd"),
    "conv": conv(),
    "residual": residual(),
    "transformer": transformer(layers=1),
    "llama": llama(),
    "tied": llama(layers=1, tied=True),
}
WITHIN = {
    "transformer": {"qk0": "head0", "v0": "head0"},
    "llama": {f"{s}{k}": f"kv{k}" for s in ("qk", "v", "group") for k in range(2)},
}


def inner(net):
    return [s for s in net.spec.spaces if s.nonlinearity not in ("outer", "stack")]


def draw(n, family, random) -> SpaceMap:
    """A random map of a family."""
    if family == O:
        return growth.rotate(np.linalg.qr(random.normal(size=(n, n)))[0].astype(np.float32))
    if family == G:
        A = np.eye(n) + 0.3 * random.normal(size=(n, n)) / n**0.5
        return SpaceMap(A.astype(np.float32), np.linalg.inv(A).astype(np.float32))
    m = growth.permute(random.permutation(n))
    if family == S:
        m = compose(growth.flip(random.choice([-1.0, 1.0], n).astype(np.float32)), m)
    if family == M:
        m = compose(growth.rescale(np.exp(random.normal(size=n)).astype(np.float32)), m)
    return m


def hide(net, families=None, seed=0):
    random = np.random.default_rng(seed)
    maps = {s.name: draw(s.size, (families or {}).get(s.name, P), random) for s in inner(net)}
    return maps, change(net.params, net.spec, maps)


def change(params, s, maps):
    """Computes an exact change of basis, as one program."""
    assert not exactness(s, maps).lost
    return jitted_change(params, s, maps)


jitted_change = jax.jit(change_basis, static_argnums=1)


def undone(found, hidden):
    """Returns, for each unit, the unit in its position after both permutations."""
    return np.asarray(hidden.index)[np.asarray(found.index)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NETS])
def test_recovers_a_hidden_permutation(name):
    net = NETS[name]
    for seed in range(3):
        hidden, moved = hide(net, seed=seed)
        maps = align.weight_matching(net.params, moved, net.spec)
        for space, m in hidden.items():
            np.testing.assert_array_equal(undone(maps[space], m), np.arange(m.old))
        found = change(moved, net.spec, maps)
        chex.assert_trees_all_equal(found, net.params)  # gathers: to the last bit
        assert certificate(net.apply, moved, found, net.inputs).preserved


@pytest.mark.slow
def test_descent_alone_is_stuck_where_the_first_visit_is_not():
    """The example of `sail_jax.align.matching`: 42 + 0 + 34 from w0, w1 and w2."""
    params = {"w0": [[-3, 1], [-1, 1], [-2, -3]], "w1": [[1, -3], [-3, 1]], "w2": [[1, 2], [0, -2]]}
    params = {name: np.array(x, np.float32) for name, x in params.items()}
    rules = {"w0": "x* h0", "w1": "h0* h1", "w2": "h1* y"}
    s = spec(params, rules, spaces={"{x,y}": "outer", "h{i}": "relu"})
    swapped = {
        "w0": params["w0"][:, ::-1],
        "w1": params["w1"][::-1, ::-1],
        "w2": params["w2"][::-1],
    }
    plain = align.match_weights(params, swapped, s, init={}, normalize=False)
    visited = align.match_weights(params, swapped, s, normalize=False)
    assert plain.converged
    assert (plain.distance, visited.distance) == ((76.0,), (0.0,))


FOLDED = {"{i}/n0": "{i}/{q,k,v}", "{i}/n1": "{i}/{gate,up}", "norm": "lm"}


def folded():
    net = NETS["llama"]
    params, new = align.fold_scales(net.params, net.spec, FOLDED)
    return net._replace(params=params, spec=new)


HIDDEN = {
    "relu scales": ("relu", {"h{i}": M}),
    "tanh signs": ("tanh", {"h{i}": S}),
    "residual scales and rotation": ("residual", {"h{i}": M, "resid": O}),
    "queries and keys": ("transformer", {"qk{i}": G, "v{i}": O, "resid": P}),
    "folded": ("folded", {"resid": O, "{qk,v}{i}": O}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HIDDEN)
def test_recovers_beyond_permutations(case):
    name, family = HIDDEN[case]
    net = folded() if name == "folded" else NETS[name]
    _, moved = hide(net, families_of(net.spec, family, None))
    found = align.match_weights(net.params, moved, net.spec, family=family)
    new = change(moved, net.spec, found.maps)
    # the distance is relative to norms: float32 products, an error of eps per step of the descent
    assert found.distance[-1] < 1e-8
    assert certificate(net.apply, moved, new, net.inputs).preserved


def stacked():
    """Residual layers on one axis, under RMSNorm with scales."""
    shapes = {"embed": (5, 12), "scale": (3, 12), "in": (3, 12, 16), "out": (3, 16, 12)}
    rules = {"embed": "x* resid", "scale": "layer diag(resid)", "in": "layer resid* hidden"}
    rules |= {"out": "layer hidden* resid", "head": "resid* y"}

    def apply(p, x):
        def layer(x, p):
            return x + jax.nn.relu((rms(x) * p["scale"]) @ p["in"]) @ p["out"], None

        layers = {k: p[k] for k in ("scale", "in", "out")}
        return jax.lax.scan(layer, x @ p["embed"], layers)[0] @ p["head"]

    spaces = {"resid": "rmsnorm", "hidden": "relu", "layer": "stack"}
    return make(shapes | {"head": (12, 4)}, apply, rules, spaces, X, above=("scale",))


NETS["stacked"], WITHIN["stacked"] = stacked(), {"hidden": "layer"}


def hide_blocks(net, within, families, seed=0):
    """A hidden symmetry whose maps of inner spaces differ from block to block."""
    random = np.random.default_rng(seed)
    maps = {}
    for s in inner(net):
        one = families.get(s.name, P)
        count = net.spec.space(within[s.name]).size if s.name in within else None
        drawn = [draw(s.size, one, random) for _ in range(count or 1)]
        maps[s.name] = drawn[0] if count is None else jax.tree.map(lambda *x: np.stack(x), *drawn)
    return maps, change_blocks(net.params, net.spec, maps, within)


def change_blocks(params, s, maps, within):
    """Changes the basis of blocks, as one program."""
    return jax.jit(lambda p, maps: align.change_blocks(p, s, maps, within))(params, maps)


BLOCKS = {
    "heads": ("transformer", {}),
    "heads, rotated": ("transformer", {"{qk,v}{i}": O}),
    "grouped queries": ("llama", {}),
    "grouped queries, rotated": ("llama", {"v{i}": O}),
    "layers": ("stacked", {"hidden": M}),
}


def test_the_best_linear_map_solves_its_normal_equations():
    """M (b b^T) + (a a^T) M = the sum of both products."""
    rng = np.random.default_rng(0)
    write, read, products = rng.normal(size=(3, 4, 4))
    grams = {"write": write @ write.T, "read": read @ read.T}
    M = np.asarray(
        solver(Family.LINEAR)(Cost({"write": products}, {}, grams), align.hungarian, False).write
    )
    left = M @ grams["write"] + grams["read"] @ M
    rounding = np.finfo(np.float32).eps * np.abs(M).max() * sum(np.trace(G) for G in grams.values())
    np.testing.assert_allclose(left, products, rtol=0, atol=rounding)


def test_a_gain_counts_for_a_pair_of_either_sign():
    """The pairs (0, 0) and (1, 1) win 2 + 2, against 0.5 of the others; 2 - 2 would lose."""
    signed, gain = np.array([[-2, 0.5], [0.5, -2]]), 2 * np.eye(2)
    solve = solver(Family.SIGNED_PERMUTATION)
    found = solve(Cost({"write": signed, "gain": gain}, {}, {}), align.hungarian, False)
    assert found.index.tolist() == [0, 1]
    assert found.write.scale.tolist() == [-1, -1]


@pytest.mark.slow
@pytest.mark.parametrize("case", BLOCKS)
def test_recovers_what_differs_from_head_to_head(case):
    name, family = BLOCKS[case]
    net, within = NETS[name], WITHIN[name]
    _, moved = hide_blocks(net, within, families_of(net.spec, family, None))
    assert certificate(net.apply, net.params, moved, net.inputs).preserved
    found = align.match_weights(net.params, moved, net.spec, family=family, within=within)
    new = change_blocks(moved, net.spec, found.maps, within)
    assert found.distance[-1] < 1e-8
    assert certificate(net.apply, moved, new, net.inputs).preserved
    # one map for all heads cannot undo it
    shared = align.match_weights(net.params, moved, net.spec, family=family)
    assert shared.distance[-1] > 0.1


def another(net, seed=11):
    """An unrelated network with the same shapes."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: random.normal(size=x.shape).astype(x.dtype), net.params)


DESCENTS = [
    ("relu", {}),
    slow_unless(False, "residual", {"h{i}": M, "resid": O}),
    slow_unless(False, "transformer", {"qk{i}": G}),
]


@pytest.mark.parametrize(("name", "family"), DESCENTS)
def test_the_distance_only_falls_and_is_the_distance(name, family):
    net = NETS[name]
    other = another(net)
    options: dict[str, Any] = {"family": family, "weights": dict.fromkeys(net.params, 1.0)}
    apart = align.match_weights(net.params, other, net.spec, init={}, max_sweeps=0, **options)
    first = align.match_weights(net.params, other, net.spec, init={}, **options)
    visited = align.match_weights(net.params, other, net.spec, **options)
    for found in (first, visited):
        assert found.converged
        assert len(found.distance) > 1
        assert np.all(np.diff(found.distance) < 0)
        assert found.distance[-1] < apart.distance[0]
        moved = change(other, net.spec, found.maps)
        touched = [p for p in net.params if any(net.spec.axes(p))]
        direct = sum(np.sum((net.params[p] - np.asarray(moved[p])) ** 2) for p in touched)
        # two float32 sums of a few thousand squares, and maps composed from a few
        assert found.distance[-1] == pytest.approx(direct, rel=1e-4)
    # no further improvement is possible from where it stopped
    again = align.match_weights(net.params, other, net.spec, init=visited.maps, **options)
    assert len(again.distance) == 1


@pytest.mark.slow
def test_the_scale_of_the_networks_changes_no_map():
    """Powers of two change no digit, even if products exceed float32."""
    net = NETS["relu"]
    found = {}
    for k in (0, -70, 80):
        sides = (jax.tree.map(lambda x: np.ldexp(x, k), p) for p in (net.params, another(net)))  # noqa: B023
        found[k] = align.match_weights(*sides, net.spec, weights=dict.fromkeys(net.params, 1.0))
    for k, got in found.items():
        assert np.ldexp(got.distance, -2 * k).tolist() == list(found[0].distance)
        chex.assert_trees_all_equal(got.maps, found[0].maps)


@pytest.mark.slow
def test_the_same_arguments_give_the_same_maps():
    net = NETS["relu"]
    other = another(net)
    one, two = (align.weight_matching(net.params, other, net.spec) for _ in range(2))
    chex.assert_trees_all_equal(one, two)
    options: dict[str, Any] = {"init": {}, "normalize": False}
    keyed = [
        align.match_weights(net.params, other, net.spec, key=jax.random.key(k), **options)
        for k in (0, 0, 1, 2, 3)
    ]
    chex.assert_trees_all_equal(keyed[0].maps, keyed[1].maps)
    assert len({k.distance[-1] for k in keyed}) > 1  # another order, another local minimum


def test_normalized_costs_do_not_depend_on_the_scale_of_a_tensor():
    net = NETS["relu"]
    hidden, moved = hide(net)
    noise = another(net)["b1"]

    def right(scale, normalize):
        """Units are found despite a tensor without information about them."""
        a, b = net.params | {"b1": scale * noise}, moved | {"b1": scale * noise[::-1]}
        maps = align.weight_matching(a, b, net.spec, normalize=normalize)
        return int(np.sum(undone(maps["h1"], hidden["h1"]) == np.arange(16)))

    assert right(1e-3, True) == right(1e3, True) > 10
    assert right(1e-3, False) == 16
    assert right(1e3, False) < 4  # as published, the large tensor decides


@pytest.mark.slow
def test_a_low_precision_copy_is_recovered():
    net = NETS["residual"]
    hidden, moved = hide(net)
    half = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), moved)
    maps = align.weight_matching(net.params, half, net.spec)
    for name, m in hidden.items():
        np.testing.assert_array_equal(undone(maps[name], m), np.arange(m.old))
    found = change(half, net.spec, maps)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
def test_some_spaces_only():
    net = NETS["relu"]
    _, moved = hide(net)
    maps = align.weight_matching(net.params, moved, net.spec, spaces=["h2"])
    assert list(maps) == ["h2"]
    auction = align.weight_matching(net.params, moved, net.spec, assignment=align.auction)
    chex.assert_trees_all_equal(
        change(moved, net.spec, auction), net.params
    )  # generic weights: the best assignment is better than the second by more than the gap


def recurrent():
    params = {"in": np.ones((3, 4)), "cell": np.eye(4), "out": np.ones((4, 2))}
    s = spec(
        params,
        {"in": "x* h", "cell": "h* h", "out": "h* y"},
        spaces={"h": "odd", "{x,y}": "outer"},
    )
    return params, s


def gru(p, x):
    """A gated recurrent unit over the second axis; its output weights read the last state."""

    def step(h, row):
        r, z, n = jnp.split(row @ p["in"] + p["bias"], 3, -1)
        a, b, c = jnp.split(h @ p["cell"], 3, -1)
        z = jax.nn.sigmoid(z + b)
        return (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + a) * c) + z * h, None

    start = jnp.zeros((len(x), p["out"].shape[0]))
    return jax.lax.scan(step, start, x.swapaxes(0, 1))[0] @ p["out"]


def gru_weights(seed, n=8):
    random = np.random.default_rng(seed)
    shapes = {"in": (3, 3 * n), "bias": (3 * n,), "cell": (n, 3 * n), "out": (n, 2)}
    return {k: np.float32(random.normal(size=v) / v[0] ** 0.5) for k, v in shapes.items()}


def test_a_recurrent_network_is_aligned():
    """The order of the units of a GRU is found, with a spec that nobody wrote."""
    params, x = gru_weights(0), np.ones((4, 6, 3), np.float32)
    found = spec_of(gru, params, x, names={"out": "memory* y"}).spec
    order = np.random.default_rng(1).permutation(8)
    moved = change(params, found, {"memory": growth.permute(order)})
    matching = align.match_weights(params, moved, found)
    chex.assert_trees_all_equal(change(moved, found, matching.maps), params)
    assert matching.distance == (0.0,)
    assert matching.converged


@pytest.mark.slow
@pytest.mark.parametrize("family", [P, S])
def test_a_step_of_a_recurrent_space_brings_networks_nearer(family):
    """No order or sign of 4 units is closer than the best of 24 or 384, and no step increases the
    distance.
    """
    random = np.random.default_rng(0)
    _, s = recurrent()
    a, b = (
        {"in": random.normal(size=(3, 4)), "cell": random.normal(size=(4, 4))}
        | {"out": random.normal(size=(4, 2))}
        for _ in range(2)
    )
    a, b = (jax.tree.map(np.float32, x) for x in (a, b))
    matching = align.match_weights(a, b, s, family=family, normalize=False, init={})

    def distance(maps):
        moved = change(b, s, maps)
        return sum(float(((a[k] - moved[k]) ** 2).sum()) for k in a)

    assert list(matching.distance) == sorted(matching.distance, reverse=True)
    np.testing.assert_allclose(matching.distance[-1], distance(matching.maps), rtol=1e-5)
    signs = list(itertools.product((1.0, -1.0), repeat=4)) if family == S else [(1.0,) * 4]
    best = min(
        distance({"h": select(np.array(order), 4, write=sign, read=sign, family=family)})
        for order in itertools.permutations(range(4))
        for sign in map(np.array, signs)
    )
    assert matching.converged
    assert best <= matching.distance[-1] * (1 + 1e-5)
    assert matching.distance[-1] < matching.distance[0]


def test_refusals():
    net = NETS["relu"]
    match, a, s = align.weight_matching, net.params, net.spec
    with pytest.raises(
        ValueError, match=r"params leaf 'w1' has shape \[3\], but the spec requires"
    ):
        match(a, a | {"w1": jnp.ones(3)}, s)
    with pytest.raises(ValueError, match="reference has no leaf 'b0'"):
        match({k: v for k, v in a.items() if k != "b0"}, a, s)
    with pytest.raises(ValueError, match="'b0' has values that are not finite"):
        match(a, a | {"b0": np.where(np.arange(16) == 3, np.nan, a["b0"])}, s)
    with pytest.raises(ValueError, match="'h0' cannot be matched by orthogonal maps: its nonlin"):
        match(a, a, s, family=O)
    with pytest.raises(ValueError, match=r"family\['h9'\] names no space .nearest: 'h"):
        match(a, a, s, family={"h9": S})
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(lambda p: match(p, a, s))(a)
    with pytest.raises(ValueError, match="no space 'h7'"):
        match(a, a, s, spaces=["h7"])
    with pytest.raises(ValueError, match="init has a map of 'x'"):
        match(a, a, s, init={"x": growth.permute(range(5))})
    net = NETS["llama"]
    with pytest.raises(ValueError, match=r"the gain '0/n0' multiplies it unit by unit.*fold"):
        match(net.params, net.params, net.spec, family={"resid": O})
    net = NETS["transformer"]
    with pytest.raises(ValueError, match="leaf '0/qb' has 'head0' but not 'resid'"):
        match(net.params, net.params, net.spec, within={"head0": "resid"})
    rope = {"q": np.ones((3, 2, 4)), "k": np.ones((3, 2, 4)), "o": np.ones((2, 3))}
    rules = {"q": "x* head qk", "k": "x* head qk*", "o": "head* y"}
    rotary = spec(rope, rules, spaces={"{x,y,qk}": "outer", "head": "odd"})
    with pytest.raises(ValueError, match="'qk' cannot be matched by orthogonal maps: the network"):
        match(rope, rope, rotary, spaces=["qk"], family=O)


def test_a_scale_is_folded_into_its_reader_by_hand():
    net = {"in": jnp.ones((1, 2)), "gain": jnp.array([2.0, -3.0])}
    net["out"] = jnp.arange(6.0).reshape(2, 3)
    rules = {"in": "x* h", "gain": "diag(h)", "out": "h* y"}
    s = spec(net, rules, spaces={"h": "rmsnorm", "{x,y}": "outer"})
    params, _ = align.fold_scales(net, s)
    assert params["gain"].tolist() == [1, 1]
    assert params["out"].tolist() == [[0, 2, 4], [-9, -12, -15]]


@pytest.mark.slow
def test_fold_scales():
    net, new = NETS["llama"], folded()
    assert certificate(net.apply, net.params, new.params, net.inputs).preserved
    for path in ("0/n0", "1/n1", "norm"):
        chex.assert_trees_all_equal(new.params[path], jnp.ones(12))
    rotation = {"resid": draw(12, O, np.random.default_rng(0))}
    moved = change(new.params, new.spec, rotation)
    assert certificate(net.apply, net.params, moved, net.inputs).preserved
    net = NETS["stacked"]
    params, free = align.fold_scales(net.params, net.spec, {"scale": "in"}, unscaled=["head"])
    moved = change(params, free, rotation)
    assert certificate(net.apply, net.params, moved, net.inputs).preserved
    assert not np.array_equal(params["in"], net.params["in"])
    net, fold = NETS["llama"], align.fold_scales
    with pytest.raises(ValueError, match="5 scales multiply 'resid', including '0/n0'"):
        fold(net.params, net.spec)
    with pytest.raises(ValueError, match="must contain the scale 'norm'"):
        fold(net.params, net.spec, {k: v for k, v in FOLDED.items() if k != "norm"})
    with pytest.raises(ValueError, match=r"leaf '0/v' reads 'resid' after none of its scales"):
        fold(net.params, net.spec, FOLDED | {"{i}/n0": "{i}/{q,k}"})
    with pytest.raises(ValueError, match=r"leaf '0/q' reads after both '0/n0' and '0/n1'"):
        fold(net.params, net.spec, FOLDED | {"{i}/n1": "{i}/{q,gate,up}"})
    with pytest.raises(ValueError, match="tied leaf 'embed'"):
        fold(NETS["tied"].params, NETS["tied"].spec, FOLDED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "n"), diagonal(["random", "copies", "multiplication", "ties"], [40, 7, 2, 1])
)
def test_auction_is_optimal(kind, n):
    random = np.random.default_rng(n)
    x = random.normal(size=(n, 3))
    a = {
        "random": random.normal(size=(n, n)),
        "copies": x @ x[random.permutation(n)].T,
        "multiplication": np.outer(np.arange(n), np.arange(n)),
        "ties": random.integers(0, 3, (n, n)),
    }[kind].astype(np.float32)
    index = np.asarray(AUCTION(a))
    assert sorted(index) == list(range(n))

    def total(index):
        return a.astype(np.float64)[np.arange(n), index].sum()

    best = align.hungarian(a)
    assert total(best) - align.auction_gap(a) <= total(index) <= total(best) + 1e-12 * n
    if kind == "random":
        chex.assert_trees_all_equal(index, best)


AUCTION = jax.jit(align.auction)


@pytest.mark.slow
def test_nothing_to_assign_has_no_gap():
    assert align.auction_gap(np.zeros((0, 0))) == 0.0


@pytest.mark.slow
def test_auction_under_transformations():
    a = np.random.default_rng(0).normal(size=(3, 7, 7)).astype(np.float32)
    together = jax.jit(jax.vmap(align.auction))(a)
    chex.assert_trees_all_equal(together, np.stack([align.hungarian(x) for x in a]))
    cut = align.auction(a[0], max_rounds=1)  # a permutation even after one round
    assert sorted(np.asarray(cut)) == list(range(7))
    loose = align.auction(a[0], gap=1.0, bidders=1)
    assert sorted(np.asarray(loose)) == list(range(7))
    best = a[0][np.arange(7), align.hungarian(a[0])].sum()
    assert a[0][np.arange(7), np.asarray(loose)].sum() >= best - align.auction_gap(a[0], 1.0)


def test_assignments_refuse():
    with pytest.raises(ValueError, match="square"):
        align.auction(np.zeros((3, 7, 7)))
    with pytest.raises(ValueError, match="finite"):
        align.hungarian(np.full((2, 2), np.nan))
    with pytest.raises(ValueError, match="gap must be finite"):
        align.auction(np.eye(7), gap=-1)


def hiddens(net):
    """The activations of the first two hidden layers."""

    def activations(p, x):
        out = {}
        for k in range(2):
            x = jax.nn.relu(x @ p[f"w{k}"] + p[f"b{k}"])
            out[f"h{k}"] = x
        return out

    return jax.jit(activations)


BATCHES = list(np.random.default_rng(3).normal(size=(3, 40, 5)).astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["correlation", "covariance"])
def test_activations_recover_a_hidden_permutation(how):
    net = NETS["relu"]
    hidden, moved = hide(net)
    f = hiddens(net)
    match = align.activation_matching
    maps = match(net.params, moved, net.spec, activations=f, batches=BATCHES, how=how)
    for name in ("h0", "h1"):
        index = undone(maps[name], hidden[name])
        a = np.concatenate([f(net.params, b)[name] for b in BATCHES])
        alive = a.std(0) > 0  # units that never fire are all alike
        assert alive.sum() > 8
        chex.assert_trees_all_equal(index[alive], np.arange(16)[alive])
    x = np.concatenate(BATCHES)
    at_once = match(f(net.params, x), f(moved, x), net.spec, how=how)
    chex.assert_trees_all_equal(at_once, maps)


@pytest.mark.slow
def test_activations_beyond_permutations():
    random = np.random.default_rng(1)
    x = random.normal(size=(200, 16)).astype(np.float32) @ random.normal(size=(16, 16))
    x = x.astype(np.float32)
    for name, family in (("relu", M), ("tanh", S), ("residual", O)):
        net = NETS[name]
        space = "resid" if name == "residual" else "h0"
        n = net.spec.space(space).size
        hidden = draw(n, family, random)
        y = x[:, :n] @ np.asarray(hidden.dense().write, np.float32).T
        (m,) = align.activation_matching(
            {space: x[:, :n]}, {space: y}, net.spec, family={space: family}
        ).values()
        found = y @ np.asarray(m.dense().write).T
        # a float64 SVD of float32 moments with condition numbers up to 1e4
        np.testing.assert_allclose(found, x[:, :n], atol=1e-3 * np.abs(x).max())
    # the scale of a unit does not change its correlation, but it does change the covariance
    scaled = x * np.where(np.arange(16) == 3, 100, 1).astype(np.float32)
    spec_ = NETS["relu"].spec
    (m,) = align.activation_matching({"h0": x}, {"h0": scaled}, spec_).values()
    chex.assert_trees_all_equal(m.index, jnp.arange(16))
    with pytest.raises(ValueError, match="no space 'h9'"):
        align.activation_matching({"h9": x}, {"h9": x}, spec_)
    with pytest.raises(ValueError, match="'h0' has 16 units"):
        align.activation_matching({"h0": x[:, :3]}, {"h0": x[:, :3]}, spec_)
    with pytest.raises(ValueError, match="only one network has activations of"):
        align.activation_matching({"h0": x}, {}, spec_)
    with pytest.raises(ValueError, match="give both activations"):
        align.activation_matching({}, {}, spec_, batches=[])


def test_moments_are_stable_and_pool():
    random = np.random.default_rng(2)
    # means a thousand deviations away: the textbook formula loses all of a float32 variance
    x = (1000 + random.normal(size=(999, 4))).astype(np.float32)
    y = (x @ random.normal(size=(4, 4)) / 100 + random.normal(size=(999, 4))).astype(np.float32)
    parts = [align.moments(x[k : k + 111], y[k : k + 111]) for k in range(0, 999, 111)]
    total = parts[0]
    for part in parts[1:]:
        total = align.pool(total, part)
    wide = x.astype(np.float64), y.astype(np.float64)
    cov = np.cov(*wide, rowvar=False, bias=True)
    # each mean is rounded to eps * 1000 = 1e-4 deviations, which enters twice
    np.testing.assert_allclose(total.cov, cov[:4, 4:], atol=1e-3)
    np.testing.assert_allclose(total.var_x, np.diag(cov)[:4], rtol=1e-3)
    assert total.count == 999
    naive = (x**2).mean(0) - x.mean(0) ** 2
    assert np.abs(naive - np.diag(cov)[:4]).max() > 0.01


@pytest.mark.soak
def test_many_models_in_the_frame_of_the_first():
    net = NETS["residual"]
    models = [net.params] + [hide(net, seed=k)[1] for k in range(1, 4)]
    found = align.match_many(models, net.spec)
    assert found.converged
    assert found.distance[-1] < 1e-10
    for model, maps in zip(models, found.maps, strict=True):
        new = change(model, net.spec, maps)
        chex.assert_trees_all_equal(new, net.params)
    merged = align.merge_many(models, net.spec)
    chex.assert_trees_all_close(merged, net.params, rtol=1e-6)  # a float32 mean of equals
    rotated = align.match_many(models, net.spec, family={"resid": O}, key=jax.random.key(0))
    assert rotated.distance[-1] < 1e-8
    strangers = [net.params, *(another(net, seed) for seed in (1, 2, 3))]
    found = align.match_many(strangers, net.spec)
    assert len(found.distance) > 1
    assert np.all(np.diff(found.distance) < 0)
    with pytest.raises(ValueError, match="only be matched by isometric maps"):
        align.match_many(models, net.spec, family={"h{i}": M})
    with pytest.raises(ValueError, match="at least two models"):
        align.match_many(models[:1], net.spec)


def test_repair_of_one_unit_by_hand():
    """Inputs of mean 3 and deviation 2; the endpoints' slopes are 2 and 4, the merge's is 1."""
    nets = [{"w": jnp.array([[w]]), "b": jnp.array([b])} for w, b in ((2.0, 1.0), (4.0, 3.0))]
    merged = {"w": jnp.ones((1, 1)), "b": jnp.array([7.0])}
    s = spec(merged, {"w": "x* h", "b": "h"}, spaces={"{x,h}": "outer"})
    unit = lambda p, x: {"h": x @ p["w"] + p["b"]}  # noqa: E731
    repaired = align.repair(merged, nets, s, unit, [jnp.array([[1.0], [5.0]])], ["h"])
    chex.assert_trees_all_close(repaired, {"w": jnp.array([[3.0]]), "b": jnp.array([2.0])})


@pytest.mark.slow
def test_repair_undoes_the_collapse_of_variances():
    net = mlp(jax.nn.relu, "relu", depth=4, width=32)
    random = np.random.default_rng(0)

    def network():
        return {
            k: np.float32(random.normal(size=v.shape) * (2 / len(v)) ** 0.5)
            * np.float32(0.1 if v.ndim == 1 else 1)
            for k, v in net.params.items()
        }

    @jax.jit
    def preactivations(p, x):
        out = {}
        for k in range(4):
            out[f"h{k}"] = x @ p[f"w{k}"] + p[f"b{k}"]
            x = jax.nn.relu(out[f"h{k}"])
        return out

    a, b = network(), network()
    b = change(b, net.spec, align.weight_matching(a, b, net.spec))
    b = jax.tree.map(np.asarray, b)
    merged = jax.tree.map(lambda x, y: np.float32(0.25) * x + np.float32(0.75) * y, a, b)
    args = ([a, b], net.spec, preactivations, BATCHES, [f"h{k}" for k in range(4)])
    fixed = align.repair(merged, *args, weights=[0.25, 0.75])
    x = np.concatenate(BATCHES)
    one, two, before, after = (
        jax.tree.map(np.asarray, preactivations(p, x)) for p in (a, b, merged, fixed)
    )
    for name in one:
        mean = 0.25 * one[name].mean(0) + 0.75 * two[name].mean(0)
        std = 0.25 * one[name].std(0) + 0.75 * two[name].std(0)
        # float32 means over 120 samples, through a few layers
        np.testing.assert_allclose(after[name].mean(0), mean, atol=1e-4)
        np.testing.assert_allclose(after[name].std(0), std, rtol=1e-3, atol=1e-5)
    assert before["h3"].std(0).mean() < 0.7 * std.mean()  # the change that had to be undone
    same = align.repair(a, [a, a], *args[1:])
    chex.assert_trees_all_close(same, a, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="'resid' needs exactly one bias"):
        align.repair(a, [a], NETS["residual"].spec, preactivations, BATCHES, ["resid"])
    with pytest.raises(ValueError, match="'n0/scale' multiplies 'c0': reset"):
        align.repair(a, [a], NETS["conv"].spec, preactivations, BATCHES, ["c0"])
    with pytest.raises(ValueError, match="with sum one"):
        align.repair(merged, *args, weights=[1, 1])


@pytest.mark.slow
def test_running_statistics_are_reset():
    net = NETS["conv"]

    def inputs(p, x):
        out = {}
        for k in range(2):
            x = jax.lax.conv_general_dilated(
                x, p[f"c{k}"], (1 + k, 1 + k), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            out[f"n{k}"] = x
            x = (x - p[f"n{k}/mean"]) * jax.lax.rsqrt(p[f"n{k}/var"] + 1e-5)
            x = jax.nn.relu(x * p[f"n{k}/scale"] + p[f"n{k}/bias"])
        return out

    leaves = {f"n{k}": (f"n{k}/mean", f"n{k}/var") for k in range(2)}
    batches = [net.inputs[:1], net.inputs[1:]]
    new = align.reset_statistics(net.params, jax.jit(inputs), batches, leaves)
    seen = jax.jit(inputs)(new, net.inputs)
    for name, (mean, var) in leaves.items():
        flat = np.asarray(seen[name]).reshape(-1, seen[name].shape[-1])
        np.testing.assert_allclose(new[mean], flat.mean(0), atol=1e-5)
        np.testing.assert_allclose(new[var], flat.var(0), rtol=1e-4)
    chex.assert_trees_all_equal(new["c1"], net.params["c1"])
    # aligning and resetting commute: the statistics are permuted by the spec
    hidden, moved = hide(net)
    again = align.reset_statistics(moved, jax.jit(inputs), batches, leaves)
    chex.assert_trees_all_close(again, change(new, net.spec, hidden), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="no leaf 'n0/men'"):
        align.reset_statistics(net.params, inputs, batches, {"n0": ("n0/men", "n0/var")})


# Digits: networks trained from different seeds.

WIDTH, PAIRS = 128, 6


@pytest.fixture(scope="module")
def digits():
    import optax
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = jnp.asarray(data.data / 16.0, jnp.float32), jnp.asarray(data.target)

    def apply(p, x):
        for k in range(2):
            x = jax.nn.relu(x @ p[f"w{k}"] + p[f"b{k}"])
        return x @ p["w2"] + p["b2"]

    def loss(p, batch):
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(apply(p, x), y).mean()

    optimizer = optax.adam(3e-3)

    @jax.jit
    @jax.vmap
    def train(key):
        sizes = (64, WIDTH, WIDTH, 10)
        keys = jax.random.split(key, 4)
        p = {}
        for k in range(3):
            draws = jax.random.normal(keys[k], sizes[k : k + 2])
            p |= {f"w{k}": draws * (2 / sizes[k]) ** 0.5, f"b{k}": jnp.zeros(sizes[k + 1])}

        def step(carry, key):
            p, state = carry
            pick = jax.random.choice(key, len(x), (128,))
            change, state = optimizer.update(jax.grad(loss)(p, (x[pick], y[pick])), state, p)
            return (optax.apply_updates(p, change), state), None

        return jax.lax.scan(step, (p, optimizer.init(p)), jax.random.split(keys[3], 100))[0][0]

    trained = train(jax.random.split(jax.random.key(0), 2 * PAIRS))
    trained = jax.tree.map(np.asarray, trained)
    models = [jax.tree.map(lambda v, k=k: v[k], trained) for k in range(2 * PAIRS)]
    rules = {"w0": "x* h0", "w1": "h0* h1", "w2": "h1* y", "b0": "h0", "b1": "h1", "b2": "y"}
    s = spec(models[0], rules, spaces={"{x,y}": "outer", "h{i}": "relu"})
    return models, s, jax.jit(loss), (x, y)


@pytest.mark.soak
def test_matching_lowers_the_barrier_between_trained_networks(digits):
    models, s, loss, data = digits

    def barrier(a, b):
        middle = jax.tree.map(lambda x, y: (np.asarray(x) + np.asarray(y)) / 2, a, b)
        return float(loss(middle, data) - (loss(a, data) + loss(b, data)) / 2)

    gains = []
    for a, b in zip(models[::2], models[1::2], strict=True):
        new = change(b, s, align.weight_matching(a, b, s))
        assert barrier(a, b) > 0.1  # there is a barrier to lower
        gains.append(barrier(a, b) - barrier(a, new))
    # null: no difference on average over independent pairs
    z = np.mean(gains) / (np.std(gains, ddof=1) / PAIRS**0.5)
    assert min(gains) > 0
    assert z > 4


def test_a_space_that_a_leaf_has_twice_is_matched_by_activations():
    params, s = recurrent()
    x = np.random.default_rng(0).normal(size=(9, 4))
    found = align.activation_matching({"h": x}, {"h": x[:, [2, 0, 3, 1]]}, s)
    np.testing.assert_array_equal(found["h"].index, [1, 3, 0, 2])
    np.testing.assert_array_equal(change(params, s, found)["cell"], np.eye(4))


@pytest.mark.parametrize(
    ("goal", "rate", "text"),
    [
        (
            9.0,
            1e38,
            "the proxy is not finite after batch 0.*an optimizer with a lower learning rate",
        ),
        (np.nan, 0.1, "it is NaN on batch 0"),
    ],
)
def test_a_descent_that_diverges_is_said(goal, rate, text):
    import optax

    net = {"in": jnp.ones((1, 2)), "out": jnp.ones((2, 1))}
    s = spec(net, {"in": "x* h", "out": "h* y"}, spaces={"h": "relu", "{x,y}": "outer"})
    loss = lambda p, batch: ((p["in"] @ p["out"]).sum() - goal) ** 2  # noqa: E731
    with pytest.raises(ValueError, match=text):
        align.straight_through(net, net, s, loss, range(2), optimizer=optax.sgd(rate))


@pytest.mark.slow
def test_straight_through_lowers_the_loss_of_the_midpoint(digits):
    import optax

    models, s, loss, data = digits
    a, b = models[:2]
    optimizer = optax.adam(1e-2)
    found = align.straight_through(a, b, s, loss, [data] * 10, optimizer=optimizer)
    matched = change(b, s, align.weight_matching(a, b, s))
    middle = jax.tree.map(lambda x, y: (x + np.asarray(y)) / 2, a, matched)
    # the first step is weight matching, and the best one better
    assert found.loss[0] == pytest.approx(float(loss(middle, data)), rel=1e-5)
    moved = change(b, s, found.maps)
    middle = jax.tree.map(lambda x, y: (x + np.asarray(y)) / 2, a, moved)
    assert float(loss(middle, data)) == pytest.approx(min(found.loss), rel=1e-5)
    assert min(found.loss) < 0.95 * found.loss[0]
    with pytest.raises(ValueError, match="no batches"):
        align.straight_through(a, b, s, loss, [])
