"""Growth of networks without a table, from the spec that their forward pass gives."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sail_jax import certificate, growth, spec, spec_of
from sail_jax.growth import plan

TOKENS = jnp.array([[1, 2, 3]])
KEY = jax.random.key(5)
X = jax.random.normal(jax.random.key(9), (2, 6, 7))


def drawn(**shapes):
    """Made by NumPy, because JAX compiles a program for each shape."""
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(0.5 * rng.normal(size=shape), jnp.float32)
        for name, shape in shapes.items()
    }


def _normed(x):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def _centred(x):
    return _normed(x - x.mean(-1, keepdims=True))


def language(p, tokens):
    """A tied table under a norm."""
    x = p["emb"][tokens]
    x = x + jax.nn.silu(x @ p["up"]) @ p["down"]
    x = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["gain"]
    return x @ p["emb"].T


def autoencoder(p, x):
    """A decoder with the transposed weights of the encoder, without operations that depend
    on the number of units."""
    return jax.nn.relu(jax.nn.relu(x @ p["w"]) @ p["in"]) @ p["out"] @ p["w"].T


def latents(p, x):
    """Latents read the input, and the input reads them. No leaf depends on their number."""
    mixed = jax.nn.softmax(p["latent"] @ (x @ p["k"]).swapaxes(-1, -2), -1)
    z = p["latent"] + mixed @ (x @ p["v"])
    z = z + jax.nn.gelu(z @ p["up"]) @ p["down"]
    return jax.nn.softmax((x @ p["q"]) @ z.swapaxes(-1, -2), -1) @ z @ p["head"]


LANGUAGE = drawn(emb=(11, 8), gain=(8,), up=(8, 5), down=(5, 8))
AUTOENCODER = drawn(w=(7, 5), out=(4, 5), **{"in": (5, 4)})
LATENTS = drawn(
    latent=(5, 8), k=(7, 8), v=(7, 8), up=(8, 9), down=(9, 8), q=(7, 8), head=(8, 3)
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "params", "inputs", "space"),
    [
        (language, LANGUAGE, TOKENS, "up"),
        (autoencoder, AUTOENCODER, X, "in"),
        (latents, LATENTS, X, "up"),
    ],
)
@pytest.mark.parametrize("kind", [int, np.int64, np.uint8])
def test_a_space_grows_whatever_the_other_spaces_are(net, params, inputs, space, kind):
    spec = spec_of(net, params, inputs).spec
    assert all(type(s.size) is int for s in spec.spaces)
    large, grown = growth.grow(params, {}, {space: kind(12)}, "lemon", rules=spec)
    assert not grown.report.lost
    assert certificate(net, params, large, inputs).preserved
    rules = grown.spec.resized(grown.maps)
    old = {space: kind(spec.space(space).size)}
    small, pruned = growth.grow(large, {}, old, "magnitude", rules=rules)
    assert not pruned.report.lost
    assert certificate(net, params, small, inputs).preserved


def tailed(tail):
    """A language model with a tied table under this tail."""

    def net(p, tokens):
        x = p["emb"][tokens]
        x = x + jax.nn.silu(_normed(x) * p["inner"] @ p["up"]) @ p["down"]
        return tail(x, p["emb"].T, p)

    params = LANGUAGE | drawn(inner=(8,), shift=(8,), bias=(11,), size=())
    unused = spec_of(net, params, TOKENS).unused
    return net, {name: w for name, w in params.items() if name not in unused}


TAILS = {
    "gain": lambda x, t, p: _normed(x) * p["gain"] @ t,
    "gain and bias": lambda x, t, p: (_centred(x) * p["gain"] + p["shift"]) @ t + p["bias"],
    "scale": lambda x, t, p: jax.nn.softmax(p["size"] * (_normed(x) @ t)),
    "scale in front": lambda x, t, p: jnp.dot(_centred(x) / p["size"], t),
    "masked": lambda x, t, p: jnp.where(jnp.arange(11) < 9, _normed(x) * p["gain"] @ t, -jnp.inf)[
        ..., :9
    ],
    "one of two": lambda x, t, p: p["size"] * (_normed(x) * p["gain"] @ t),
    "no norm": lambda x, t, p: x @ t * p["size"],
    "none": lambda x, t, p: _normed(x) @ t,
    "used before": lambda x, t, p: _normed(x) * p["inner"] @ t,
    "not alone": lambda x, t, p: _normed(x) * p["gain"] @ t + p["size"] * x.mean(-1, keepdims=True),
    "twice": lambda x, t, p: (_normed(x) * p["gain"]) @ t + _normed(x) @ t,
    "squared": lambda x, t, p: p["size"] * (_normed(x) @ t @ t.T @ t),
}
SCALES = {
    "gain": ("gain",),
    "gain and bias": ("gain", "shift"),
    "scale": ("size",),
    "masked": ("gain",),
    "one of two": ("size",),
    "no norm": ("size",),
    "not alone": ("gain",),
}


@pytest.mark.parametrize("tail", list(TAILS))
def test_leaves_that_scale_what_a_tied_table_reads_are_divided(tail):
    net, params = tailed(TAILS[tail])
    spec = spec_of(net, params, TOKENS).spec
    assert [tie.scales for tie in spec.ties] == ([SCALES[tail]] if tail in SCALES else [])
    if tail not in SCALES:
        with pytest.raises(ValueError, match="'emb' is tied"):
            plan(params, {}, {"emb": 16}, "lemon", rules=spec)
        return
    large, grown = growth.grow(params, {}, {"emb": 16}, "lemon", rules=spec)
    assert not grown.report.lost
    assert certificate(net, params, large, TOKENS).preserved


FRONT = [
    lambda x, p: x,
    lambda x, p: x * p["gain"],
    lambda x, p: x * p["gain"] + p["shift"],
    lambda x, p: x * p["inner"],
    lambda x, p: x / p["size"],
    lambda x, p: jax.nn.relu(x),
]
BEHIND = [
    lambda y, p: y,
    lambda y, p: y * p["size"],
    lambda y, p: y + p["bias"],
    lambda y, p: jnp.tanh(y) * p["size"],
    lambda y, p: jax.nn.softmax(y / p["size"]),
    lambda y, p: y[..., :4] - y.max(-1, keepdims=True),
    lambda y, p: jax.nn.relu(y) * p["bias"],
    lambda y, p: jax.lax.scan(lambda c, row: (c, row * p["size"]), 0, y)[1],
]


def check_tail(seed):
    """Whether a random tied network grows; it then computes the same."""
    rng = np.random.default_rng(seed)
    norm = (lambda x: x, _normed, _centred)[rng.integers(3)]
    front, behind = FRONT[rng.integers(len(FRONT))], BEHIND[rng.integers(len(BEHIND))]
    net, params = tailed(lambda x, t, p: behind(front(norm(x), p) @ t, p))
    spec = spec_of(net, params, TOKENS).spec
    try:
        large, grown = growth.grow(params, {}, {"emb": 16}, "hypercloning", rules=spec)
    except ValueError as error:
        return str(error)
    if not grown.report.lost:
        assert certificate(net, params, large, TOKENS).preserved, (seed, spec.ties)
    return grown.report.lost


@pytest.mark.slow
def test_tied_tables_of_many_random_networks():
    found = [check_tail(seed) for seed in range(100)]
    assert 20 < found.count("") < 80


@pytest.mark.slow
def test_a_tied_table_grows_twice():
    spec = spec_of(language, LANGUAGE, TOKENS).spec
    large, grown = growth.grow(LANGUAGE, {}, {"emb": 24}, "hypercloning", rules=spec)
    assert grown.notes == ("'gain' times 0.333333: the tied leaf reads 'emb' as it writes it",)
    rules = grown.spec.resized(grown.maps)
    large, grown = growth.grow(large, {}, {"emb": 30, "up": 7}, "msg", rules=rules, key=KEY)
    assert not grown.report.lost
    assert certificate(language, LANGUAGE, large, TOKENS).preserved


@pytest.mark.slow
def test_a_tied_table_grows_exactly_or_the_reason_is_given():
    """A copy that is written by half and read by half would need another table for each use."""
    net, params = tailed(TAILS["none"])
    spec = spec_of(net, params, TOKENS).spec
    reason = (
        r"'emb' is tied.*an orthogonal map.*by a parameter that growth can divide, use two leaves"
    )
    with pytest.raises(ValueError, match=reason):
        plan(params, {}, {"emb": 16}, "lemon", rules=spec)
    with pytest.raises(ValueError, match="the head of 'emb': give a network with a separate head"):
        plan(params, {}, {"emb": 16}, "lemon", rules=spec, untie=True)
    large, grown = growth.grow(params, {}, {"emb": 16}, "lemon", rules=spec, untie=False)
    assert "tied leaf 'emb'" in grown.report.lost
    assert not certificate(net, params, large, TOKENS).preserved

    spec = spec_of(autoencoder, AUTOENCODER, X).spec
    large, grown = growth.grow(AUTOENCODER, {}, {"w": 8}, "pad", rules=spec)
    assert not grown.report.lost
    assert certificate(autoencoder, AUTOENCODER, large, X).preserved


@pytest.mark.slow
def test_a_set_that_no_leaf_reads_is_grown_with_its_loss():
    """A copied latent gets twice the attention that it had, and the others keep theirs."""
    spec = spec_of(latents, LATENTS, X).spec
    large, grown = growth.grow(LATENTS, {}, {"latent": 7}, "lemon", rules=spec)
    assert grown.report.lost.startswith("'latent': its nonlinearity (softmax) commutes with")
    assert not certificate(latents, LATENTS, large, X).preserved


# Depth: layers under a scan.


def _unit(x):
    return x / jnp.sqrt((x**2).sum(-1, keepdims=True))


BEFORE = [lambda x: x, _normed, _centred, jnp.tanh]
ACTS = [jax.nn.relu, jax.nn.gelu, jnp.tanh, jnp.cos, jax.nn.softmax]
BRANCHES = {
    "plain": lambda y, w, act: act(y @ w["in"]) @ w["out"],
    "biased": lambda y, w, act: act(y @ w["in"] + w["mid"]) @ w["out"] + w["bias"],
    "gated": lambda y, w, act: (act(y @ w["in"]) * (y @ w["up"])) @ w["out"],
    "scaled": lambda y, w, act: w["gain"] * (act(y @ w["in"]) @ w["out"]),
    "after": lambda y, w, act: _normed(act(y @ w["in"]) @ w["out"]) * w["gain"],
    "unit": lambda y, w, act: _unit(act(y @ w["in"]) @ w["out"]),
    "outside": lambda y, w, act: act(act(y @ w["in"]) @ w["out"]),
    "square": lambda y, w, act: act(y @ w["own"]),
}
SUMS = {
    "sum": lambda h, f, w: h + f,
    "difference": lambda h, f, w: h - f,
    "norm": lambda h, f, w: _normed(h + f) * w["gain"],
    "layernorm": lambda h, f, w: _centred(h + f),
    "tanh": lambda h, f, w: jnp.tanh(h + f),
    "none": lambda h, f, w: f,
    "half": lambda h, f, w: (h + f) / 2,
    "product": lambda h, f, w: h * (1 + f),
    "share": lambda h, f, w: h + jax.nn.sigmoid(w["gain"]) * (f - h),
    "twice": lambda h, f, w: h + f + jax.nn.relu(h @ w["in"]) @ w["out"],
    "bias": lambda h, f, w: h + f + w["bias"],
}
LAYERS = drawn(**{
    "in": (3, 6, 5), "up": (3, 6, 5), "out": (3, 5, 6), "own": (3, 6, 6),
    "mid": (3, 5), "bias": (3, 6), "gain": (3, 6),
})  # fmt: skip
DEEP = drawn(enter=(7, 6), leave=(6, 2)) | {"layers": LAYERS}


def layered(seed):
    """A random layer, and the network that scans it; parameters without a use are left out."""
    rng = np.random.default_rng(seed)
    before, act = BEFORE[rng.integers(len(BEFORE))], ACTS[rng.integers(len(ACTS))]
    branch = list(BRANCHES)[rng.integers(len(BRANCHES))]
    total = list(SUMS)[rng.integers(len(SUMS))] if rng.integers(2) else "sum"

    def body(h, w, change=lambda f: f):
        return SUMS[total](h, change(BRANCHES[branch](before(h), w, act)), w), None

    def net(p, x):
        return jax.lax.scan(body, x @ p["enter"], p["layers"])[0] @ p["leave"]

    unused = {path.removeprefix("layers/") for path in spec_of(net, DEEP, X).unused}
    own = {name: w for name, w in LAYERS.items() if name not in unused}
    return net, DEEP | {"layers": own}, (branch, total), body


def check_depth(seed):
    """What a report says of depth is what the networks compute."""
    net, params, kind, _ = layered(seed)
    spec = spec_of(net, params, X).spec
    assert all(path.axes[0][0].space == "layer" for path in spec.leaves if "layers" in path.path)
    method = ("llama_pro", "identity", "pairs")[seed % 3]
    key = jax.random.key(seed)
    large, grown = growth.grow(params, {}, {"depth": 2}, method, rules=spec, key=key)
    assert large["layers"][next(iter(large["layers"]))].shape[0] == 6
    if not grown.report.lost:
        assert certificate(net, params, large, X).preserved, kind
    return kind, grown.report.lost


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 4])
def test_depth_without_a_loss_in_the_report_keeps_the_outputs(seed):
    check_depth(seed)


@pytest.mark.soak
def test_depth_of_many_random_networks():
    """Residual sums of branches that end with a matrix are exact, by any method."""
    found = [check_depth(seed) for seed in range(300)]
    exact = {kind for kind, lost in found if not lost}
    assert exact >= {(branch, "sum") for branch in ("plain", "biased", "gated", "scaled", "after")}
    assert not {total for _, total in exact} & {"norm", "layernorm", "tanh", "none", "half"}


def test_a_stack_that_a_spec_only_declares_is_not_taken_for_residual():
    net, params, *_ = layered(0)
    spec = spec_of(net, params, X, names={"layers/in": "depth _ _"}).spec
    assert spec.space("depth").nonlinearity in ("stack", "stack residual")
    plain = [s._replace(nonlinearity=s.nonlinearity.removesuffix(" residual")) for s in spec.spaces]
    grown = plan(params, {}, {"depth": 6}, "llama_pro", rules=replace(spec, spaces=tuple(plain)))
    assert "does not state that a layer with zero output is the identity" in grown.report.lost


# Depth: layers in a list.

LOOPS = {
    "plain": lambda f, k, n: f,
    "count": lambda f, k, n: f / n**0.5,
    "alternate": lambda f, k, n: jnp.tanh(f) if k % 2 else f,
    "first": lambda f, k, n: f if k else jnp.tanh(f),
    "last": lambda f, k, n: f if k < n - 1 else jnp.tanh(f),
    "number": lambda f, k, n: 0.9**k * f,
}


def looped(seed):
    """The layers of `layered` in a list, under a loop that may depend on their numbers."""
    _, params, kind, body = layered(seed)
    loop = list(LOOPS)[seed // 2 % len(LOOPS)] if seed % 2 else "plain"
    params = params | {"layers": [{k: w[n] for k, w in params["layers"].items()} for n in range(2)]}

    def net(p, x):
        h = x @ p["enter"]
        for k, w in enumerate(p["layers"]):
            h, _ = body(h, w, partial(LOOPS[loop], k=k, n=len(p["layers"])))
        return h @ p["leave"]

    return net, params, (*kind, loop)


def blocks():
    """Two blocks of an MLP, in a list."""
    shapes = {"up": (6, 5), "mid": (5,), "down": (5, 6), "bias": (6,)}
    ends = drawn(enter=(7, 6), leave=(6, 2))
    keys = jax.random.split(jax.random.key(1), 2)
    return ends | {
        "blocks": [{n: jax.random.normal(key, s) for n, s in shapes.items()} for key in keys]
    }


def through(layers, h):
    for w in layers:
        h = h + jax.nn.gelu(_normed(h) @ w["up"] + w["mid"]) @ w["down"] + w["bias"]
    return h


def residual(p, x):
    return through(p["blocks"], x @ p["enter"]) @ p["leave"]


def check_list(seed):
    """What a report says of listed layers is what the networks compute."""
    net, params, kind = looped(seed)
    spec = spec_of(net, params, X, layers="layers.*").spec
    method, new = ("llama_pro", "identity", "pairs", "lemon")[seed % 4], 3 + seed % 5
    large, grown = growth.grow(
        params, {}, {"layer": new}, method, rules=spec, key=jax.random.key(seed)
    )
    assert len(large["layers"]) == new
    if not grown.report.lost:
        assert certificate(net, params, large, X).preserved, kind
    return kind, grown.report.lost


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 4, 5, 7])
def test_listed_layers_without_a_loss_in_the_report_keep_the_outputs(seed):
    check_list(seed)


@pytest.mark.soak
def test_listed_layers_of_many_random_networks():
    found = [check_list(seed) for seed in range(300)]
    exact = {kind for kind, lost in found if not lost}
    plain = {branch for branch, total, loop in exact if (total, loop) == ("sum", "plain")}
    assert plain >= {"plain", "biased", "gated", "scaled", "after"}
    assert not {total for _, total, _ in exact} & {"norm", "layernorm", "tanh", "none", "half"}
    assert {loop for _, _, loop in exact} == {"plain", "first"}


@pytest.mark.slow
def test_a_longer_list_is_one_of_the_same_network_wider_and_grown_again():
    params = blocks()
    found = spec_of(residual, params, X, layers="blocks.*")
    assert found.spec.layers == (("layer", "blocks/{i}", ""),)
    assert "layer        2     stack residual  blocks/{i}" in str(found)
    to = {"layer": 3, "blocks/1/up": 9, "enter": 12}
    large, grown = growth.grow(params, {}, to, "lemon", rules=found.spec)
    # The new layer repeats the last one, with its new size.
    assert [w["mid"].shape for w in large["blocks"]] == [(5,), (9,), (9,)]
    assert not large["blocks"][2]["down"].any()
    assert not grown.report.lost
    assert certificate(residual, params, large, X).preserved
    rules = grown.spec.resized(grown.maps)
    more, again = growth.grow(large, grown.config, {"depth": 2}, "identity", rules=rules, key=KEY)
    assert len(more["blocks"]) == 6
    assert not again.report.lost
    assert certificate(residual, params, more, X).preserved
    fewer, halved = growth.grow(more, {}, {"layer": 2}, "mean_depth", rules=again.spec)
    assert "6 layers become 2" in halved.report.lost
    # The first layer has another width, so it stays.
    mean = sum(w["mid"] for w in more["blocks"][1:]) / 5
    np.testing.assert_allclose(fewer["blocks"][1]["mid"], mean, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", list(growth.METHODS))
def test_every_method_takes_layers_in_a_list(method):
    params, of = blocks(), growth.METHODS[method]
    spec = spec_of(residual, params, X, layers="blocks/*").spec
    to = {} if of.prunes else {"layer": 4}
    to |= {"blocks/{i}/up": 4 if of.prunes else 10} if of.widens or of.prunes else {}
    large, grown = growth.grow(params, {}, to, method, rules=spec, key=KEY)
    assert len(large["blocks"]) == to.get("layer", 2)
    same = certificate(residual, params, large, X).preserved
    assert same == (not grown.report.lost)


@pytest.mark.parametrize("loop", list(LOOPS))
def test_the_code_of_a_layer_may_depend_on_whether_it_is_the_first(loop):
    def net(p, x):
        h = x @ p["enter"]
        for k, w in enumerate(p["blocks"]):
            f = jax.nn.gelu(h @ w["up"] + w["mid"]) @ w["down"] + w["bias"]
            h = h + LOOPS[loop](f, k, len(p["blocks"]))
        return h @ p["leave"]

    found = spec_of(net, blocks(), X, layers="blocks/*").spec
    assert (not found.layers[0].loss) == (loop in ("plain", "first"))


class Sum(NamedTuple):
    """A tree with the blocks in a tuple."""

    enter: Any
    blocks: tuple
    leave: Any


def named(p):
    """Flat parameters with dotted names, as of torch."""
    flat = {f"net.b{k}.{n}": x for k, w in enumerate(p["blocks"]) for n, x in w.items()}
    return {"enter": p["enter"], "leave": p["leave"]} | flat


def unnamed(p):
    count = (len(p) - 2) // 4
    names = ("up", "mid", "down", "bias")
    return p | {"blocks": [{n: p[f"net.b{k}.{n}"] for n in names} for k in range(count)]}


def with_values(p):
    """The paths of NNX: numbers as keys, and a "value" below the name of a parameter."""

    def block(w):
        down = {"kernel": {"value": w["down"]}, "bias": {"value": w["bias"]}}
        return {"up": w["up"], "mid": w["mid"], "down": down}

    return p | {"blocks": dict(enumerate(map(block, p["blocks"])))}


def without_values(p):
    def block(w):
        return w | {"down": w["down"]["kernel"]["value"], "bias": w["down"]["bias"]["value"]}

    return p | {"blocks": [block(p["blocks"][k]) for k in range(len(p["blocks"]))]}


@pytest.mark.parametrize(
    ("made", "back", "layers"),
    [
        (lambda p: p | {"blocks": tuple(p["blocks"])}, lambda p: p, "blocks/*"),
        (lambda p: Sum(**p), lambda p: p._asdict(), "blocks/*"),
        (named, unnamed, "net/b*"),
        (with_values, without_values, "blocks.*"),
    ],
)
def test_layers_are_listed_in_any_tree(made, back, layers):
    def net(p, x):
        return residual(back(p), x)

    params = made(blocks())
    spec = spec_of(net, params, X, layers={"blocks": layers}).spec
    large, grown = growth.grow(params, {}, {"blocks": 5}, "llama_pro", rules=spec)
    assert type(large) is type(params)
    assert not grown.report.lost
    assert certificate(net, params, large, X).preserved
    assert growth.plan(large, {}, {"depth": 2}, rules=grown.spec).config == {"blocks": 10}


@pytest.mark.slow
@pytest.mark.parametrize("to", [{"depth": 2}, {"encoder": 3}, {"layer": 3, "blocks": 4}])
@pytest.mark.parametrize("method", ["llama_pro", "identity"])
def test_lists_and_scans_grow_together(to, method):
    """New layers keep no bias, whatever else grows with them."""
    scanned = drawn(up=(2, 6, 3), down=(2, 3, 6), bias=(2, 6))
    params = blocks() | {"encoder": blocks()["blocks"], "layer": scanned}

    def body(h, w):
        return h + jnp.tanh(_centred(h) @ w["up"]) @ w["down"] + w["bias"], None

    def net(p, x):
        h = through(p["blocks"], _centred(through(p["encoder"], x @ p["enter"])))
        return jax.lax.scan(body, h, p["layer"])[0] @ p["leave"]

    lists = {"encoder": "encoder/*", "blocks": "blocks/*"}
    spec = spec_of(net, params, X, layers=lists).spec
    large, grown = growth.grow(params, {}, to, method, rules=spec, key=KEY)
    assert not grown.report.lost
    assert certificate(net, params, large, X).preserved


def test_a_result_of_each_layer_is_a_loss():
    def net(p, x):
        h, kept = x @ p["enter"], 0
        for w in p["blocks"]:
            h = h + jnp.tanh(h @ w["up"] + w["mid"]) @ w["down"] + w["bias"]
            kept = kept + h
        return kept @ p["leave"]

    assert "do not show" in spec_of(net, blocks(), X, layers="blocks/*").spec.layers[0].loss


class Pair(NamedTuple):
    b0: Any
    b1: Any


def test_a_container_of_fixed_size_is_no_list():
    pair = Pair(jnp.ones(3), jnp.ones(3))
    with pytest.raises(ValueError, match=r"'b\*' are in a Pair, which holds no other number"):
        spec_of(lambda p, x: x[..., :3] * p.b0 + p.b1, pair, X, layers="b*")


def test_what_is_not_known_of_listed_layers_is_a_loss():
    params = blocks()
    found = spec_of(residual, params, X)
    words = {s.name: s.nonlinearity for s in found.spec.spaces}
    own = spec(params, found.rules, spaces=words, layers="blocks/*")
    grown = plan(params, {}, {"layer": 4}, "llama_pro", rules=own)
    assert grown.report.lost.startswith("'layer': without the forward pass it is not known whether")

    def two(p, x):
        first, second = p["blocks"]
        return residual(p | {"blocks": [second, first]}, x)

    grown = plan(params, {}, {"depth": 2}, rules=spec_of(two, params, X, layers="blocks/*").spec)
    assert "the forward pass fails with 6 layers instead of 2: too many values" in grown.report.lost

    def first(p, x):
        return residual(p | {"blocks": p["blocks"][:2]}, x)

    found = spec_of(first, params, X, layers="blocks/*").spec
    assert "does not use 'blocks/5' of 6 layers: it must loop" in found.layers[0].loss


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("block/*", r"'block/\*' matches no leaf \(known: blocks/0/bias"),
        ("", "'' must end with"),
        ("blocks", r"'blocks' must end with \*"),
        ({"depth": "blocks/*"}, "'depth' is a factor in growth"),
        ({"a": "blocks/*", "b": "blocks/*"}, "leaf 'blocks/0/bias' is in two lists, 'a' and 'b'"),
        ({"blocks/0/up": "blocks/*"}, "'blocks/0/up' is the name of a space"),
    ],
)
def test_wrong_names_of_lists_are_refused(layers, message):
    params = blocks()
    with pytest.raises(ValueError, match=message):
        spec(params, spec_of(residual, params, X).rules, layers=layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mid": jnp.zeros(4)},
            r"'blocks/0/mid' has shape \(5,\) and 'blocks/1/mid' has shape \(4,",
        ),
        ({"gain": jnp.zeros(6)}, "'blocks/0/gain' is missing and 'blocks/1/gain' has shape"),
    ],
)
def test_layers_of_one_list_are_alike(change, message):
    params = blocks()
    params["blocks"][1] |= change
    with pytest.raises(ValueError, match=message):
        spec_of(residual, params, X, layers="blocks/*")
    named = {"b0": jnp.zeros(3), "b2": jnp.zeros(3)}
    with pytest.raises(ValueError, match="'b2' exists, but not 'b1'"):
        spec_of(lambda p, x: x, named, X, layers="b*")


def test_a_network_without_layers_cannot_be_deepened():
    spec = spec_of(autoencoder, AUTOENCODER, X).spec
    with pytest.raises(ValueError, match=r"no layers are known to deepen.*jax.lax.scan"):
        plan(AUTOENCODER, {}, {"depth": 4}, rules=spec)


@pytest.mark.slow
def test_a_factor_of_width_does_not_change_the_number_of_averaged_latents():
    def net(p, x):
        mixed = jax.nn.softmax(p["latent"] @ (x @ p["k"]).swapaxes(-1, -2), -1)
        return (jnp.tanh(p["latent"] @ p["up"]) + mixed @ (x @ p["v"])).mean(1) @ p["head"]

    params = drawn(latent=(5, 8), k=(7, 8), v=(7, 9), up=(8, 9), head=(9, 3))
    found = spec_of(net, params, X)
    assert found.spec.space("latent").nonlinearity == "softmax"
    large = plan(params, {}, {"width": 2}, "pad", rules=found.spec).leaves
    assert large["latent"].shape == (5, 8)
    assert large["head"].shape == (18, 3)
