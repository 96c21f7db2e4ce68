"""The primitive: a table of networks x a table of maps, and the laws that must hold for each."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import slow_unless

from sail_jax import growth
from sail_jax.basis.certificate import certificate, exactness
from sail_jax.basis.change_basis import change_basis, unfuse
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, compose, defect, identity, invert
from sail_jax.basis.spaces import Spec, spec

KEY = jax.random.key(3)
N = 4  # of every inner space: few shapes, few compilations


def normal(*shapes):
    random = np.random.default_rng(3)  # compiles nothing
    return [np.float32(random.normal(size=s) / s[0] ** 0.5) for s in shapes]


# Networks: parameters, a pure function, rules, spaces.


class Net(NamedTuple):
    params: Any
    apply: Callable[[Any, Any], Any]
    rules: Mapping[str, str]
    spaces: Mapping[str, str]
    inputs: Any = None

    @property
    def spec(self) -> Spec:
        return spec(self.params, self.rules, spaces={"{x,y}": "outer"} | dict(self.spaces))


X = np.random.default_rng(5).normal(size=(5, 3)).astype(np.float32)


def mlp(f, word):
    """Two hidden layers in a list, each with a separate space."""
    w = normal((3, N), (N,), (N, N), (N,), (N, 2))
    params = {
        "layers": [{"kernel": w[0], "bias": w[1]}, {"kernel": w[2], "bias": w[3]}],
        "head": w[4],
    }

    def apply(params, x):
        for layer in params["layers"]:
            x = f(x @ layer["kernel"] + layer["bias"])
        return x @ params["head"]

    rules = {
        "layers/0/kernel": "x* hidden0",
        "layers/1/kernel": "hidden0* hidden1",
        "layers/{i}/bias": "hidden{i}",
        "head": "hidden1* y",
    }
    return Net(params, apply, rules, {"hidden{i}": word}, X)


def rms(x):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def layernorm(x):
    return rms(x - x.mean(-1, keepdims=True))


def normed(norm, word, *, gain):
    """A residual stream under a norm with (or without) a learned scale, and with a bias."""
    w = normal((3, N), (N, N), (N, N), (N, 2), (N,), (N,))
    params = {"embed": w[0], "in": w[1], "out": w[2], "head": w[3], "bias": w[5]}
    if gain:
        params["scale"] = 1 + w[4]

    def apply(params, x):
        def f(x):
            return norm(x) * params.get("scale", 1) + params["bias"]

        x = x @ params["embed"]
        x = x + jax.nn.gelu(f(x) @ params["in"]) @ params["out"]
        return f(x) @ params["head"]

    rules = {"embed": "x* resid", "in": "resid* hidden", "out": "hidden* resid"}
    rules |= {"head": "resid* y", "bias": "resid"} | ({"scale": "diag(resid)"} if gain else {})
    return Net(params, apply, rules, {"resid": word, "hidden": "elementwise"}, X)


def attention(*, grouped):
    """One block with heads; grouped: kernels whose head axes are merged, biases that split them."""
    w = normal((3, N), (N, N, N), (N, N, N), (N, N, N), (N, N, N), (N, 2), (N, N), (N, N))
    names = ("embed", "q", "k", "v", "o", "head", "q_bias", "v_bias")
    params = dict(zip(names, w, strict=True))
    if grouped:
        params |= {name: params[name].reshape(N, N * N) for name in "qkv"}
        params["o"] = params["o"].reshape(N * N, N)

    def apply(params, x):
        x = x[None] @ params["embed"]
        h = rms(x)
        heads, d = params["q_bias"].shape
        dv = params["v_bias"].shape[1]
        size = h.shape[-1]
        q = h @ params["q"].reshape(size, -1)
        k = h @ params["k"].reshape(size, -1)
        v = h @ params["v"].reshape(size, -1)
        q = q.reshape(1, -1, heads, d) + params["q_bias"]
        k = k.reshape(1, -1, heads, d)
        v = v.reshape(1, -1, heads, dv) + params["v_bias"]
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k), axis=-1)
        mixed = jnp.einsum("bhts,bshd->bthd", weights, v)
        x = x + mixed.reshape(1, -1, heads * dv) @ params["o"].reshape(-1, size)
        return rms(x) @ params["head"]

    merge = (lambda a, b: f"({a} {b})") if grouped else (lambda a, b: f"{a} {b}")
    rules = {
        "embed": "x* resid",
        "q": "resid* " + merge("head", "qk"),
        "k": "resid* " + merge("head", "qk*"),
        "v": "resid* " + merge("head", "v"),
        "o": merge("head*", "v*") + " resid",
        "{q,v}_bias": "head qk",
        "head": "resid* y",
    }
    rules |= {"q_bias": rules.pop("{q,v}_bias"), "v_bias": "head v"}
    spaces = {"resid": "rmsnorm", "head": "odd", "{qk,v}": "linear"}
    return Net(params, apply, rules, spaces, X)


def stacked():
    """Residual layers stacked on one axis and scanned; gains after the nonlinearity."""
    w = normal((3, N), (2, N, N), (2, N), (2, N, N), (N, 2), (2, N))
    names = ("embed", "in", "bias", "out", "head", "scale")
    params = dict(zip(names, w, strict=True))

    def apply(params, x):
        def layer(x, p):
            h = jax.nn.relu(x @ p["in"] + p["bias"])
            return x + (h @ p["out"]) * p["scale"], None

        layers = {k: params[k] for k in ("in", "bias", "out", "scale")}
        return jax.lax.scan(layer, x @ params["embed"], layers)[0] @ params["head"]

    rules = {
        "embed": "x* resid",
        "in": "layer resid* hidden",
        "bias": "layer hidden",
        "out": "layer hidden* resid",
        "scale": "layer diag(resid)",
        "head": "resid* y",
    }
    return Net(params, apply, rules, {"layer": "stack", "hidden": "relu", "resid": "linear"}, X)


def recurrent():
    """The same space on both axes of a leaf."""
    w = normal((3, N), (N, N), (N, 2))
    params = dict(zip(("in", "cell", "out"), w, strict=True))

    def apply(params, x):
        h = jnp.zeros(params["cell"].shape[0])
        for row in x:
            h = jnp.tanh(row @ params["in"] + h @ params["cell"])
        return h @ params["out"]

    return Net(params, apply, {"in": "x* h", "cell": "h* h", "out": "h* y"}, {"h": "odd"}, X)


def tied():
    """One table is used for embeddings and for the output."""
    w = normal((6, N), (N, N), (N, N))
    params = dict(zip(("table", "in", "out"), w, strict=True))

    def apply(params, tokens):
        x = params["table"][tokens]
        x = x + jnp.tanh(rms(x) @ params["in"]) @ params["out"]
        return rms(x) @ params["table"].T

    rules = {"table": "x* resid | x resid*", "in": "resid* hidden", "out": "hidden* resid"}
    return Net(params, apply, rules, {"resid": "rmsnorm", "hidden": "odd"}, TOKENS)


TOKENS = np.array([0, 3, 5, 1])
NETS = {
    "relu": mlp(jax.nn.relu, "relu"),
    "tanh": mlp(jnp.tanh, "odd"),
    "gelu": mlp(jax.nn.gelu, "elementwise"),
    "sigmoid": mlp(jax.nn.sigmoid, "elementwise"),
    "deep linear": mlp(lambda x: x, "linear"),
    "rmsnorm": normed(rms, "rmsnorm", gain=True),
    "rmsnorm, folded": normed(rms, "rmsnorm", gain=False),
    "layernorm": normed(layernorm, "layernorm", gain=True),
    "attention": attention(grouped=False),
    "grouped": attention(grouped=True),
    "stacked": stacked(),
    "recurrent": recurrent(),
}
NETS = {name: net._replace(apply=jax.jit(net.apply)) for name, net in NETS.items()}
TIED = tied()

(Z,) = normal((N, N))
Q = np.linalg.qr(Z)[0]
GENERAL = np.eye(N, dtype=np.float32) + np.float32(0.6) * Z
MAPS = {
    "permute": growth.permute([2, 0, 3, 1]),
    "widen even": growth.widen(N, 2 * N),
    "widen uneven": growth.widen(N, 2 * N, key=jax.random.key(1)),
    "pad": growth.pad(N, 2 * N),
    "prune": compose(growth.pad(N - 1, N), growth.prune(np.arange(N - 1), N)),
    "flip": growth.flip([1, -1, -1, 1]),
    "rescale": growth.rescale([0.5, 2.0, 3.0, 1.5]),
    "rotate": growth.rotate(Q),
    "general": SpaceMap(GENERAL, np.linalg.inv(GENERAL)),
}


def inner(net):
    """Returns the spaces of size N on which maps are tried, without "outer" and the stack."""
    words = ("outer", "stack")
    return [s.name for s in net.spec.spaces if s.nonlinearity not in words]


# the same space of the same network
ALIKE = {("tanh", "hidden0"), ("gelu", "hidden1"), ("sigmoid", "hidden1")}
ALIKE |= {("deep linear", "hidden1"), ("rmsnorm, folded", "hidden"), ("layernorm", "hidden")}
CASES = [
    (name, space, m)
    for name, net in NETS.items()
    for space in inner(net)
    for m in MAPS
    if (name, space) not in ALIKE
]
# the same properties for more cases of the same kind
SLOW = {"attention", "sigmoid", "deep linear", "rmsnorm, folded", "recurrent"}


nets = pytest.mark.parametrize("name", [slow_unless(name not in SLOW, name) for name in NETS])


def cases(of):
    """Yields a diagonal of networks and makers, for each space of a network."""
    names, makers = [name for name in NETS if name not in SLOW], [*MAPS]
    return pytest.mark.parametrize(
        ("name", "space", "maker"),
        [
            slow_unless(
                name in names and names.index(name) % 4 == makers.index(maker) % 4,
                *(name, space, maker),
            )
            for name, space, maker in of
        ],
    )


@cases(CASES)
def test_exact_is_preserved_and_inexact_is_not(name, space, maker):
    net, maps = NETS[name], {space: MAPS[maker]}
    report = exactness(net.spec, maps)
    new = change_basis(net.params, net.spec, maps)
    seen = certificate(net.apply, net.params, new, net.inputs)
    assert (not report.lost) == seen.preserved, (str(report), seen)
    if report.lost:
        assert seen.relative > 1e-3  # not a matter of rounding, which is 1e-6 here
        assert report.spaces[0].lost


# The exact pairs (space, map) that the table above must find; a check of `exactness`.
EVERY = {"permute", "widen even", "widen uneven", "pad", "flip", "rescale", "rotate", "general"}
SELECTIONS = {"permute", "widen even", "widen uneven", "pad"}
EXACT = {
    ("relu", "hidden0"): SELECTIONS | {"rescale"},
    ("tanh", "hidden1"): SELECTIONS | {"flip"},
    ("gelu", "hidden0"): SELECTIONS,
    ("sigmoid", "hidden0"): SELECTIONS,
    ("deep linear", "hidden0"): EVERY,
    ("rmsnorm", "resid"): {"permute", "widen even", "flip"},
    ("rmsnorm, folded", "resid"): {"permute", "widen even", "flip", "rotate"},
    ("layernorm", "resid"): {"permute", "widen even"},
    ("attention", "head"): SELECTIONS | {"flip"},
    ("attention", "qk"): EVERY,
    ("grouped", "v"): EVERY,
    ("stacked", "resid"): EVERY - {"rotate", "general"},
    ("recurrent", "h"): SELECTIONS | {"flip"},
}


@pytest.mark.parametrize(("name", "space"), EXACT)
def test_exact_maps(name, space):
    found = {k for k, m in MAPS.items() if not exactness(NETS[name].spec, {space: m}).lost}
    assert found == EXACT[name, space]


def test_zero_defect_is_not_preservation():
    net, maps = NETS["relu"], {"hidden0": MAPS["rotate"]}
    assert defect(maps["hidden0"]) < 1e-6
    new = change_basis(net.params, net.spec, maps)
    seen = certificate(net.apply, net.params, new, net.inputs)
    assert seen.absolute > 0.1 * seen.scale
    (report,) = exactness(net.spec, maps).spaces
    assert "nonlinearity (relu) commutes with positive monomial maps" in report.lost
    with pytest.raises(ValueError, match="'hidden0': its nonlinearity"):
        change_basis(net.params, net.spec, maps, require_exact=True)


def test_rotation_needs_the_gain_folded():
    net, maps = NETS["rmsnorm"], {"resid": MAPS["rotate"]}
    (report,) = exactness(net.spec, maps).spaces
    assert "the gain 'scale' multiplies it unit by unit" in report.lost
    # fold: (norm(x) * scale + bias) W = (norm(x) + bias / scale) (scale W), leaving the gain at one
    scale = net.params["scale"]
    folded = net.params | {
        "scale": jnp.ones(N),
        "bias": net.params["bias"] / scale,
        "in": scale[:, None] * net.params["in"],
        "head": scale[:, None] * net.params["head"],
    }
    assert certificate(net.apply, net.params, folded, net.inputs).preserved
    new = change_basis(folded, net.spec, maps)
    assert certificate(net.apply, folded, new, net.inputs).preserved
    constant = spec(
        folded,
        dict(net.rules) | {"scale": "_"},
        spaces={"resid": "rmsnorm", "hidden": "elementwise", "{x,y}": "outer"},
    )
    change_basis(folded, constant, maps, require_exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("maker", MAPS)
def test_tied_leaves_allow_orthogonal_maps_only(maker):
    maps = {"resid": MAPS[maker]}
    report = exactness(TIED.spec, maps)
    assert (not report.lost) == (maker in ("permute", "flip", "rotate"))
    new = change_basis(TIED.params, TIED.spec, maps)
    assert certificate(TIED.apply, TIED.params, new, TIED.inputs).preserved != bool(report.lost)
    if maker == "widen even":
        assert "the tied leaf 'table' both writes and reads it" in report.spaces[0].lost


@pytest.mark.slow
def test_stack_and_outer_are_never_exact():
    net = NETS["stacked"]
    for how in ("stack", "interpolate"):
        maps = {"layer": growth.deepen(2, 4, how)}
        assert "does not preserve functions" in exactness(net.spec, maps).spaces[0].lost
        new = change_basis(net.params, net.spec, maps)
        chex.assert_shape([new["in"], new["scale"]], [(4, N, N), (4, N)])
        assert not certificate(net.apply, net.params, new, net.inputs).preserved
    D = jnp.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    new = change_basis(net.params, net.spec, {"layer": growth.deepen(2, 3, matrix=D)})
    chex.assert_trees_all_close(new["in"], jnp.einsum("ki,iab->kab", D, net.params["in"]))
    maps = {"y": growth.flip([1, -1]), "layer": identity(2)}
    report = exactness(net.spec, maps)
    assert [not r.lost for r in report.spaces] == [False, True]
    assert "input or output itself" in report.spaces[0].lost


# Algebra.


def full(net, prefer):
    """A map for every inner space, dense and index forms in turn."""
    return {s: MAPS[prefer[k % len(prefer)]] for k, s in enumerate(inner(net))}


def close(a, b):
    # float32 sums of at most 8 terms, twice
    chex.assert_trees_all_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_functor(name):
    net = NETS[name]
    first, second = full(net, ["rescale", "permute", "flip"]), full(net, ["widen uneven", "pad"])
    once = {s: compose(second[s], first[s]) for s in first}
    middle = change_basis(net.params, net.spec, first)
    twice = change_basis(middle, net.spec.resized(first), second)
    close(change_basis(net.params, net.spec, once), twice)
    for kind in ("gradients", "second_moments"):
        middle = change_basis(net.params, net.spec, first, kind=kind)
        twice = change_basis(middle, net.spec.resized(first), second, kind=kind)
        close(change_basis(net.params, net.spec, once, kind=kind), twice)


@nets
def test_functor_for_dense_maps(name):
    net = NETS[name]
    # gains are exempt: diagonal operators are not closed under dense maps
    spaces = [s for s in inner(net) if not any(u.role == "gain" for u in net.spec.uses(s))]
    first, second = dict.fromkeys(spaces, MAPS["general"]), dict.fromkeys(spaces, MAPS["rotate"])
    once = {s: compose(second[s], first[s]) for s in spaces}
    twice = change_basis(change_basis(net.params, net.spec, first), net.spec, second)
    close(change_basis(net.params, net.spec, once), twice)


@pytest.mark.slow
@nets
def test_identity_and_round_trip(name):
    net = NETS[name]
    same = change_basis(net.params, net.spec, {s: identity(N) for s in inner(net)})
    assert all(map(lambda a, b: a is b, jax.tree.leaves(same), jax.tree.leaves(net.params)))
    for prefer in (["permute", "rescale", "flip"], ["widen uneven", "pad"]):
        maps = full(net, prefer)
        back = {s: invert(m) for s, m in maps.items()}
        new = change_basis(net.params, net.spec, maps)
        close(change_basis(new, net.spec.resized(maps), back), net.params)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_index_form_is_its_dense_form(name):
    net = NETS[name]
    for prefer in (["permute", "rescale"], ["widen even", "flip"], ["pad", "widen uneven"]):
        maps = full(net, prefer)
        dense = {s: m.dense() for s, m in maps.items()}
        for kind in ("params", "gradients"):
            close(
                change_basis(net.params, net.spec, maps, kind=kind),
                change_basis(net.params, net.spec, dense, kind=kind),
            )


def test_one_axis_is_one_contraction():
    """Against einsum, written out."""
    net = NETS["grouped"]
    m = {"resid": MAPS["general"], "head": MAPS["widen uneven"], "qk": MAPS["rotate"]}
    new = change_basis(net.params, net.spec, m)
    (r, h, c) = (m[s].dense() for s in ("resid", "head", "qk"))
    q = net.params["q"].reshape(N, N, N)
    expected = jnp.einsum("rhc,rR,Hh,Cc->RHC", q, r.read, h.write, c.write)
    close(new["q"], expected.reshape(N, -1))
    k = net.params["k"].reshape(N, N, N)
    expected = jnp.einsum("rhc,rR,Hh,cC->RHC", k, r.read, h.write, c.read)
    close(new["k"], expected.reshape(N, -1))
    assert new["head"].shape == (N, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["params", "gradients"])
def test_fused_axes_move_block_by_block(kind):
    params = dict(zip(("in", "out", "both"), normal((3, 20), (8, 5), (11, 5)), strict=True))
    rules = {"in": "x* (h q + h q* + h v)", "out": "(h v)* y", "both": "(x + h v)* (h + x)"}
    spaces = {"{x,y}": "outer", "h": "odd", "{q,v}": "linear"}
    s = spec(params, rules, spaces=spaces, sizes={"h": 2})
    maps = {
        "h": growth.widen(2, 3),
        "q": growth.rotate(np.linalg.qr(normal((3, 3))[0])[0]),
        "v": growth.pad(4, 5),
        "x": growth.permute([1, 2, 0]),
    }
    apart, parts = unfuse(params, s)
    assert sorted(apart) == [
        *("both[0,0]", "both[0,1]", "both[1,0]", "both[1,1]", "in[0]", "in[1]", "in[2]", "out"),
    ]
    assert apart["both[1,0]"].shape == parts.shape("both[1,0]") == (8, 2)
    change = jax.jit(change_basis, static_argnums=1, static_argnames="kind")
    new = change(params, s, maps, kind=kind)
    moved = change(apart, parts, maps, kind=kind)
    close(new["in"], np.concatenate([moved[f"in[{k}]"] for k in range(3)], axis=1))
    both = [[moved[f"both[{k},{l}]"] for l in range(2)] for k in range(2)]
    close(new["both"], np.block([[np.asarray(x) for x in row] for row in both]))
    assert new["in"].shape == s.resized(maps).shape("in") == (3, 9 + 9 + 15)
    with pytest.raises(ValueError, match=r"'in' has shape \[3, 12\], .* \[3, 20\] \(x\* \(h q \+"):
        change_basis({"in": params["in"][:, :12]}, s, maps)
    assert change_basis(params, s, {"y": identity(5)})["in"] is params["in"]


def test_partial_trees_and_untouched_leaves():
    net = NETS["relu"]
    maps = {"hidden0": MAPS["widen even"]}
    whole = change_basis(net.params, net.spec, maps)
    assert whole["head"] is net.params["head"]
    assert whole["layers"][1]["bias"] is net.params["layers"][1]["bias"]
    leaf = {"layers/1/kernel": net.params["layers"][1]["kernel"]}  # as streamed, leaf by leaf
    one = change_basis(leaf, net.spec, maps)
    chex.assert_trees_all_equal(one["layers/1/kernel"], whole["layers"][1]["kernel"])


# Gradients and moments.


def loss(net):
    return lambda params: jnp.sum(jnp.sin(net.apply(params, net.inputs)))


GRADIENTS = {name: jax.jit(jax.grad(loss(net))) for name, net in NETS.items()}


@cases(
    [
        (name, space, maker)
        for name, space, maker in CASES
        if not exactness(NETS[name].spec, {space: MAPS[maker]}).lost
        # a padded sigmoid is one half: what would read it has a gradient of its own
        and (name, maker) != ("sigmoid", "pad")
    ]
)
def test_gradients_move_dually(name, space, maker):
    net, maps = NETS[name], {space: MAPS[maker]}
    new = change_basis(net.params, net.spec, maps)
    moved = change_basis(GRADIENTS[name](net.params), net.spec, maps, kind="gradients")
    close(moved, GRADIENTS[name](new))


@nets
def test_second_moments_are_squares_of_gradients(name):
    net = NETS[name]
    g = GRADIENTS[name](net.params)
    for prefer in (["permute"], ["rescale", "flip", "widen even"], ["pad", "widen uneven"]):
        maps = full(net, prefer)
        nu = change_basis(jax.tree.map(jnp.square, g), net.spec, maps, kind="second_moments")
        moved = change_basis(g, net.spec, maps, kind="gradients")
        close(nu, jax.tree.map(jnp.square, moved))
    with pytest.raises(ValueError, match=r"second moments cannot .* dense map of '"):
        change_basis(g, net.spec, full(net, ["rotate"]), kind="second_moments")


@pytest.mark.slow
def test_maps_can_be_learned():
    """LiGO: the gradient of a loss in the map equals the one through the contractions by hand."""
    net = NETS["gelu"]

    def through_maps(m):
        new = change_basis(net.params, net.spec, {"hidden0": m})
        return loss(net)(new)

    def by_hand(m):
        first, second = net.params["layers"]
        first = {"kernel": first["kernel"] @ m.write.T, "bias": m.write @ first["bias"]}
        second = second | {"kernel": m.read.T @ second["kernel"]}
        return loss(net)(net.params | {"layers": [first, second]})

    m = MAPS["widen uneven"].dense()
    close(jax.grad(through_maps)(m), jax.grad(by_hand)(m))
    index = MAPS["rescale"]
    g = jax.grad(through_maps, allow_int=True)(index)
    dense = jax.grad(by_hand)(index.dense())
    close(g.write.scale, jnp.diagonal(dense.write))
    close(g.read.scale, jnp.diagonal(dense.read))


# Transformations, dtypes.


@pytest.mark.slow
def test_jit_compiles_once():
    net = NETS["attention"]
    traces = []

    def f(params, spec, maps):
        traces.append(1)
        return change_basis(params, spec, maps, require_exact=True)

    jitted = jax.jit(f, static_argnames="spec")
    for shift in range(3):
        order = jnp.roll(jnp.arange(N), shift)
        maps = {"resid": growth.permute(order), "v": MAPS["general"]}
        close(jitted(net.params, net.spec, maps), change_basis(net.params, net.spec, maps))
    assert len(traces) == 1
    with pytest.raises(ValueError, match="'head': its nonlinearity"):
        jitted(net.params, net.spec, {"head": MAPS["rotate"]})
    # constants of a traced function are concrete
    constant = jax.jit(
        lambda p: change_basis(p, net.spec, {"qk": MAPS["general"]}, require_exact=True)
    )
    chex.assert_shape(constant(net.params)["q"], (N, N, N))
    with pytest.raises(ValueError, match=r"'qk': read @ write differs .* by 1"):
        jax.jit(lambda p: change_basis(p, net.spec, {"qk": MAPS["prune"]}, require_exact=True))(
            net.params
        )


@pytest.mark.slow
def test_vmap_over_networks_and_over_maps():
    net = NETS["stacked"]
    many = jax.tree.map(lambda x: jnp.stack([x, 2 * x, x - 1]), net.params)
    orders = jnp.stack([jnp.roll(jnp.arange(N), k) for k in range(3)])

    def move(params, order):
        return change_basis(params, net.spec, {"hidden": growth.permute(order)})

    both = jax.vmap(move)(many, orders)
    for k in range(3):
        one = move(jax.tree.map(lambda x, k=k: x[k], many), orders[k])
        chex.assert_trees_all_equal(jax.tree.map(lambda x, k=k: x[k], both), one)
    maps = {"hidden": jax.vmap(growth.permute)(orders)}
    over_maps = jax.vmap(lambda m: change_basis(net.params, net.spec, m))(maps)
    close(over_maps["bias"], net.params["bias"][:, np.asarray(orders)].swapaxes(0, 1))
    with pytest.raises(ValueError, match="map of 'hidden' is batched"):
        change_basis(net.params, net.spec, maps)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("maker", ["general", "permute", "widen uneven"])
def test_dtype_is_kept_and_sums_are_float32(dtype, maker):
    net = NETS["attention"]
    maps = dict.fromkeys(inner(net), MAPS[maker])
    low = jax.tree.map(lambda x: x.astype(dtype), net.params)
    exact = change_basis(jax.tree.map(lambda x: x.astype(jnp.float32), low), net.spec, maps)
    new = change_basis(low, net.spec, maps)
    chex.assert_trees_all_equal_dtypes(low, new)
    # cast once: the float32 result rounded, to the bit
    chex.assert_trees_all_equal(new, jax.tree.map(lambda x: x.astype(dtype), exact))
    # maps of low precision do not lower that of the sums

    def rounded(x, to):
        return x.astype(dtype).astype(to) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    low_maps, high_maps = (
        jax.tree.map(lambda x, to=to: rounded(x, to), maps) for to in (dtype, jnp.float32)
    )
    chex.assert_trees_all_equal(
        change_basis(low, net.spec, low_maps), change_basis(low, net.spec, high_maps)
    )


@pytest.mark.slow
def test_low_precision_certificates():
    net = NETS["relu"]
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), net.params)
    x = net.inputs.astype(jnp.bfloat16)
    for maker, preserved in {"widen uneven": True, "rescale": True, "rotate": False}.items():
        new = change_basis(low, net.spec, {"hidden0": MAPS[maker]})
        assert certificate(net.apply, low, new, x).preserved == preserved
    # bfloat16 inside a float32 function: its rounding must be reported

    def inside(params, x):
        low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, x))
        return net.apply(*low).astype(jnp.float32)

    new = change_basis(net.params, net.spec, {"hidden0": MAPS["rescale"]})
    seen = certificate(inside, net.params, new, net.inputs, dtype=jnp.bfloat16)
    assert seen.preserved
    assert seen.tolerance < seen.scale


@pytest.mark.slow
def test_double_precision():
    with jax.enable_x64(True):
        net = NETS["rmsnorm"]
        params = jax.tree.map(lambda x: x.astype(jnp.float64), net.params)
        m = growth.widen(N, 12)
        new = change_basis(params, net.spec, {"resid": m, "hidden": growth.widen(N, 7)})
        seen = certificate(net.apply, params, new, net.inputs.astype(jnp.float64))
        assert seen.preserved
        assert seen.absolute < 1e-14 * seen.scale * 100
        chex.assert_trees_all_equal_dtypes(params, new)


def test_integers_and_scalars_pass():
    params = {"w": jnp.ones((2, 3)), "step": jnp.array(3), "t": jnp.array(0.5)}
    s = spec(params, {"w": "x* y", "{step,t}": ""}, spaces={"{x,y}": "outer"})
    new = change_basis(params, s, {"y": growth.permute([2, 1, 0])})
    assert new["step"] is params["step"]
    assert new["t"] is params["t"]
    whole = jax.tree.map(lambda x: x.astype(int), params)
    with pytest.raises(TypeError, match="leaf 'w' is int32: only floating"):
        change_basis(whole, s, {"y": growth.permute([2, 1, 0])})


# Errors and reports.


@pytest.mark.parametrize(
    ("maps", "options", "match"),
    [
        ({"hiden0": identity(N)}, {}, r"no space 'hiden0' \(nearest: 'hidden0'"),
        (
            {"hidden0": identity(5)},
            {},
            r"space 'hidden0' has 4 units \(leaf 'layers/0/bias'\), .* 5 to 5",
        ),
        ({"hidden0": identity(N)}, {"kind": "grads"}, "kind must be one of .* got 'grads'"),
        (
            {"hidden0": MAPS["prune"]},
            {"require_exact": True},
            "'hidden0': read @ write differs from the identity by 1: something is lost",
        ),
    ],
)
def test_bad_maps_are_named(maps, options, match):
    net = NETS["relu"]
    with pytest.raises(ValueError, match=match):
        change_basis(net.params, net.spec, maps, **options)


def test_bad_leaves_are_named():
    net = NETS["relu"]
    maps = {"hidden0": MAPS["widen even"]}
    with pytest.raises(TypeError, match=r"maps\['hidden0'\] must be a SpaceMap, got list"):
        change_basis(net.params, net.spec, {"hidden0": [0, 1, 2, 3]})
    with pytest.raises(ValueError, match=r"the spec has no leaf 'layers/0/weight'.*kernel"):
        change_basis({"layers": [{"weight": X}]}, net.spec, maps)
    again = change_basis(net.params, net.spec, maps)
    with pytest.raises(ValueError, match=r"'layers/0/bias' has shape \[8\], .* \[4\] \(hidden0\)"):
        change_basis(again, net.spec, maps)
    stack = jax.tree.map(lambda x: x[None], net.params)
    with pytest.raises(ValueError, match=r"\[4, 2\] \(hidden1\* y\).*use jax.vmap"):
        change_basis({"head": stack["head"]}, net.spec, maps)


def test_false_claims_are_reported():
    net = NETS["relu"]
    claim = SpaceMap(Q, Q.T, Family.PERMUTATION)
    (report,) = exactness(net.spec, {"hidden0": claim}).spaces
    assert report.lost == "it claims to be a permutation map, but its entries are orthogonal"
    lossy = SpaceMap(Q, np.where(np.eye(N) == 1, np.nan, Q.T), Family.ORTHOGONAL)
    assert exactness(net.spec, {"hidden0": lossy}).lost
    unstated = spec(net.params, net.rules, spaces={"{x,y}": "outer"})
    assert not exactness(unstated, {"hidden0": MAPS["permute"]}).lost
    (report,) = exactness(unstated, {"hidden0": MAPS["widen even"]}).spaces
    assert "(not stated, so treated as softmax) commutes with permutation maps" in report.lost


def test_reports_are_tables():
    report = exactness(NETS["relu"].spec, {"hidden0": MAPS["rescale"], "hidden1": MAPS["rotate"]})
    assert report.lost
    lines = str(report).splitlines()
    assert lines[1].startswith("hidden0  positive monomial")
    assert lines[1].endswith("none")
    assert lines[2].endswith(report.spaces[1].lost)
    said = []
    jax.jit(lambda m: said.append(exactness(NETS["relu"].spec, m)))({"hidden0": MAPS["permute"]})
    assert not said[0].lost
    assert "traced" in str(said[0])


def test_certificates():
    def f(params, x):
        w = np.asarray(params["w"])
        return {"a": w * x, "n": np.argmax(w)}

    one = {"w": np.float32([1.0, 2.0])}
    x = np.float32([1.0, 4.0])
    same = certificate(f, one, one, x)
    assert same.preserved
    assert same[1:4] == (0, 0, 8)
    # the error model, written out: ten times one relative eps of the largest entry
    assert same.tolerance == pytest.approx(10 * np.finfo(np.float32).eps * 8, rel=1e-3)
    other = certificate(f, one, {"w": np.float32([1.0, 2.5])}, x)
    assert not other.preserved
    assert other[1:4] == (2.0, 0.25, 8.0)
    assert other.leaf == "a"
    flipped = certificate(f, one, {"w": np.float32([2.0, 1.0])}, x)
    assert not flipped.preserved
    broken = certificate(f, one, {"w": np.float32([np.nan, 2.0])}, x)
    assert not broken.preserved
    assert broken.absolute == np.inf
    infinite = {"w": np.float32([np.inf, 2.0])}
    assert not certificate(f, infinite, infinite, x).preserved
    shorter = certificate(f, one, {"w": np.float32([1.0])}, np.float32(2))
    assert (shorter.preserved, shorter.absolute) == (False, np.inf)
    with pytest.raises(ValueError, match=r"differ in structure: only one has \['v'\]"):
        certificate(lambda p, x: p, one, {"w": x, "v": x}, None)
    with pytest.raises(ValueError, match="no outputs"):
        certificate(lambda p, x: [], one, one, None)
