"""Width growth: a table of methods x what `exactness` says and what `certificate` measures."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import one_of_every

from sail_jax import growth
from sail_jax.basis.certificate import certificate, exactness
from sail_jax.basis.change_basis import change_basis
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, classify, defect, measure
from sail_jax.basis.spaces import Spec, spec

KEY = jax.random.key(11)
EPS = float(np.finfo(np.float32).eps)
TOLERANCE = 10 * EPS**0.5  # on outputs of order one
EPSILON = 0.05  # of the norms: large, so that forgetting to scale it shows
DEPTH, RESID, HEADS, HEAD, HIDDEN, VOCAB = 2, 6, 2, 3, 5, 7

RULES = {
    "embed": "vocab* resid",
    "layers/q": "layer resid* head qk",
    "layers/k": "layer resid* head qk*",
    "layers/v": "layer resid* head v",
    "layers/o": "layer head* v* resid",
    "layers/in": "layer resid* hidden",
    "layers/in_bias": "layer hidden",
    "layers/out": "layer hidden* resid",
    "layers/out_bias": "layer resid",
    "head": "resid* logits",
}
GAINS = {
    "layers/{scale1,scale2}": "layer diag(resid)",
    "scale": "diag(resid)",
    "layers/{bias1,bias2}": "layer resid",
    "bias": "resid",
}
SPACES = {"{vocab,logits}": "outer", "layer": "stack", "head": "odd", "{qk,v}": "linear"}
SPACES |= {"hidden": "elementwise"}


def draw(*shape):
    fan = shape[-2] if len(shape) > 1 else 1
    seed = np.random.default_rng(sum(k * n for k, n in enumerate(shape, 1)))
    return (seed.normal(size=shape) / fan**0.5).astype(np.float32)


def parameters(*, gains: bool):
    L, D = DEPTH, RESID
    layers = {
        "q": draw(L, D, HEADS, HEAD),
        "k": 1.1 * draw(L, D, HEADS, HEAD)[::-1],
        "v": draw(L, D, HEADS, HEAD)[:, ::-1],
        "o": draw(L, HEADS, HEAD, D),
        "in": draw(L, D, HIDDEN),
        "in_bias": 0.1 * draw(L, HIDDEN),
        "out": draw(L, HIDDEN, D),
        "out_bias": 0.1 * draw(L, D),
    }
    out = {"embed": draw(VOCAB, D), "layers": layers, "head": draw(D, VOCAB)}
    if gains:
        out |= {"scale": 1 + 0.3 * draw(D), "bias": 0.2 * draw(D)}
        layers |= {"scale1": 1 + 0.2 * draw(L, D), "scale2": 1 - 0.2 * draw(L, D)}
        layers |= {"bias1": 0.1 * draw(L, D)[::-1], "bias2": 0.3 * draw(L, D)}
    return out


def normed(kind: str, x, epsilon, mask):
    mask = jnp.ones(x.shape[-1]) if mask is None else mask
    f = growth.masked_layernorm if kind == "layernorm" else growth.masked_rmsnorm
    return f(x, mask, epsilon)


@partial(jax.jit, static_argnames=("kind",))
def forward(params, tokens, epsilon=EPSILON, mask=None, *, kind):
    """A pre-norm transformer, scanned; the logits of attention keep the source's 1/sqrt(HEAD)."""

    def norm(x, p, k):
        x = normed(kind, x, epsilon, mask)
        return x * p.get(f"scale{k}", 1) + p.get(f"bias{k}", 0)

    def block(x, p):
        h = norm(x, p, "1")
        q, k, v = (jnp.einsum("td,dhe->the", h, p[n]) for n in "qkv")
        weights = jax.nn.softmax(jnp.einsum("the,she->hts", q, k) / HEAD**0.5)
        x = x + jnp.einsum("hts,she,hed->td", weights, v, p["o"])
        h = jax.nn.gelu(norm(x, p, "2") @ p["in"] + p["in_bias"])
        return x + h @ p["out"] + p["out_bias"], None

    x = jax.lax.scan(block, params["embed"][tokens], params["layers"])[0]
    return norm(x, params, "") @ params["head"]


TOKENS = np.array([3, 0, 6, 1, 5])


class Model(NamedTuple):
    kind: str
    params: Any
    spec: Spec


def model(kind, *, gains=True):
    params = parameters(gains=gains)
    rules = RULES | (GAINS if gains else {})
    return Model(kind, params, spec(params, rules, spaces=SPACES | {"resid": kind}))


MODELS = {
    "layernorm": model("layernorm"),
    "rmsnorm": model("rmsnorm"),
    "folded": model("rmsnorm", gains=False),
}
DOUBLE = {"resid": 12, "hidden": 10, "head": 4, "qk": 6, "v": 6}
UNEVEN = {"resid": 9, "hidden": 8, "head": 3}
INNER = {"hidden": 8, "head": 3, "v": 4}


def nothing(params, spec, maps):
    return params


def masked_fresh(m, params, spec, maps):
    return growth.mask_units(growth.fresh_units(params, spec, maps, KEY, std=0.5), spec, maps, m)


def noisy(noise):
    return lambda params, spec, maps: noise(params, spec, maps, KEY)


class Case(NamedTuple):
    model: str
    maps: Callable[[Spec], Mapping[str, SpaceMap]]
    maps_exact: bool
    preserved: bool
    then: Callable[[Any, Spec, Mapping[str, SpaceMap]], Any] = nothing
    epsilon: float = EPSILON
    mask: Any = None


def pads(sizes):
    return lambda s: {n: growth.pad(s.space(n).size, k) for n, k in sizes.items()}


def lemon(s):
    return growth.lemon(s, UNEVEN, key=KEY)


ETA = growth.lemon_gain(RESID, UNEVEN["resid"])
fpi = partial(growth.fpi, key=KEY)
CASES = {
    "FPI, inner": Case("layernorm", lambda s: fpi(s, INNER), True, True),
    "FPI, all, layernorm": Case("layernorm", lambda s: fpi(s, UNEVEN), False, False),
    "FPI, all, rmsnorm": Case("rmsnorm", lambda s: fpi(s, UNEVEN), False, False),
    "AKI": Case("layernorm", lambda s: fpi(s, INNER), True, False, growth.aki),
    "HyperCloning, layernorm": Case(
        "layernorm", lambda s: growth.hypercloning(s, DOUBLE), True, True
    ),
    "HyperCloning, rmsnorm": Case("rmsnorm", lambda s: growth.hypercloning(s, DOUBLE), True, True),
    "HyperCloning, noise pairs": Case(
        "layernorm",
        lambda s: growth.hypercloning(s, DOUBLE),
        True,
        True,
        noisy(growth.noise_pairs),
    ),
    "HyperCloning, noise on writers": Case(
        "rmsnorm",
        lambda s: growth.hypercloning(s, DOUBLE),
        True,
        False,
        noisy(growth.break_symmetry),
    ),
    "LEMON, layernorm": Case(
        "layernorm", lemon, False, True, growth.scale_norms, epsilon=ETA**2 * EPSILON
    ),
    "LEMON, gains forgotten": Case("layernorm", lemon, False, False, epsilon=ETA**2 * EPSILON),
    "LEMON, epsilon forgotten": Case("layernorm", lemon, False, False, growth.scale_norms),
    "LEMON, rmsnorm": Case("rmsnorm", lemon, True, True),
    "LEMON, rmsnorm, noise pairs": Case("rmsnorm", lemon, True, True, noisy(growth.noise_pairs)),
    "MSG, mask 0": Case(
        "layernorm", pads(UNEVEN), False, True, partial(masked_fresh, 0.0), mask=0.0
    ),
    "MSG, mask 0, rmsnorm": Case(
        "rmsnorm", pads(UNEVEN), False, True, partial(masked_fresh, 0.0), mask=0.0
    ),
    "MSG, mask 0.5": Case(
        "layernorm", pads(UNEVEN), False, False, partial(masked_fresh, 0.5), mask=0.5
    ),
    "pad, inner": Case("layernorm", pads(INNER), True, True),
    "pad, stream": Case("layernorm", pads({"resid": 9}), False, False),
    "projection, orthogonal": Case(
        "folded", lambda s: {"resid": growth.project(RESID, 9, KEY)}, True, True
    ),
    "projection, orthogonal, gains": Case(
        "rmsnorm", lambda s: {"resid": growth.project(RESID, 9, KEY)}, False, False
    ),
    "projection, gaussian": Case(
        "folded", lambda s: {"resid": growth.project(RESID, 9, KEY, how="gaussian")}, False, False
    ),
    "projection of values": Case(
        "layernorm", lambda s: {"v": growth.project(HEAD, 5, KEY, how="gaussian")}, True, True
    ),
    "interpolation": Case(
        "folded", lambda s: {"resid": growth.interpolate(RESID, 9)}, False, False
    ),
    "interpolation of values": Case(
        "layernorm", lambda s: {"v": growth.interpolate(HEAD, 5)}, True, True
    ),
    "prune": Case("layernorm", lambda s: {"hidden": growth.prune([0, 2, 3], 5)}, False, False),
}


def grown(case):
    _, params, s = MODELS[case.model]
    maps = case.maps(s)
    grow = jax.jit(lambda params, maps: case.then(change_basis(params, s, maps), s, maps))
    return maps, grow(params, maps)


def moved_and(edit, params, s, maps):
    """A network after its change of basis, and after an edit besides; in NumPy, one program."""

    @jax.jit
    def both(params, maps):
        old = change_basis(params, s, maps)
        return old, edit(old, s, maps, KEY)

    return jax.tree.map(np.asarray, both(params, maps))


def measured(case):
    kind, params, _ = MODELS[case.model]
    maps, new = grown(case)
    mask = None
    if case.mask is not None:
        mask = jnp.where(growth.grown(maps["resid"]), case.mask, 1.0)

    def f(which, tokens):
        if which is new:
            return forward(which, tokens, case.epsilon, mask, kind=kind)
        return forward(which, tokens, kind=kind)

    return certificate(f, params, new, TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of_every(2, CASES))
def test_claims_of_preservation(name):
    case = CASES[name]
    report = exactness(MODELS[case.model].spec, case.maps(MODELS[case.model].spec))
    assert (not report.lost) == case.maps_exact, str(report)
    seen = measured(case)
    assert seen.preserved == case.preserved, seen
    if case.preserved:
        assert seen.absolute < TOLERANCE
    else:
        assert seen.relative > 1e-3  # not a matter of rounding


@pytest.mark.parametrize("method", [fpi, growth.hypercloning, growth.lemon])
def test_lossless_is_refused_by_name(method):
    s = MODELS["layernorm"].spec
    sizes = {"hidden": 10, "resid": 9} if method is not growth.hypercloning else {"vocab": 14}
    name = "vocab" if method is growth.hypercloning else "resid"
    with pytest.raises(ValueError, match=f"lossless growth was asked for, but '{name}'"):
        method(s, sizes, lossless=True)
    assert set(method(s, {"hidden": 10}, lossless=True)) == {"hidden"}


@pytest.mark.slow
def test_maps_are_of_their_families_and_lossless():
    for case in CASES.values():
        for m in case.maps(MODELS[case.model].spec).values():
            assert m.family in classify(m)
            lost, rounding = measure(m)
            assert (lost <= rounding) == (m.new >= m.old)


@pytest.mark.slow
def test_lemon_rules_of_layernorm():
    """V_avg: the norm computes copies over eta, and zeros, epsilon being scaled by eta^2."""
    x = draw(4, 5)
    for new in (7, 9, 14):
        m, eta = growth.tile(5, new, "average"), growth.lemon_gain(5, new)
        norm = jax.jit(growth.masked_layernorm)
        old = norm(x, np.ones(5), EPSILON)
        got = np.asarray(norm(x @ np.asarray(m.write).T, np.ones(new), eta**2 * EPSILON))
        want = np.zeros((4, new))
        whole = new - new % 5
        want[:, :whole] = np.tile(old, new // 5)
        chex.assert_trees_all_close(eta * got, want, atol=20 * EPS)


def test_tile_remainders_and_shares():
    circ = growth.tile(3, 5, "circ", weights=[0.3, 0.2, 1.0, 0.7, 0.8])
    assert circ.index.tolist() == [0, 1, 2, 0, 1]
    chex.assert_trees_all_close(circ.read.scale, np.array([0.3, 0.2, 1.0, 0.7, 0.8]), atol=EPS)
    assert circ.family == Family.SELECTION
    zero = growth.tile(3, 8, "zero")
    assert zero.write.scale.tolist() == [1] * 6 + [0] * 2
    assert zero.read.scale.tolist() == [0.5] * 6 + [0] * 2
    # A unit that writes 0 is not read, for any weight: a sigmoid would give 1/2.
    shared = growth.split_readers(zero, np.arange(1.0, 9.0))
    want = [1 / 5, 2 / 7, 3 / 9, 4 / 5, 5 / 7, 6 / 9, 0, 0]
    np.testing.assert_allclose(shared.read.scale, want, rtol=2 * EPS)
    average = growth.tile(3, 8, "average", weights=np.arange(1.0, 9.0))
    np.testing.assert_allclose(np.asarray(average.write)[6:], 1 / 3, rtol=EPS)
    np.testing.assert_allclose(
        np.asarray(average.read)[0], [0.2, 0, 0, 0.8, 0, 0, 0, 0], rtol=2 * EPS
    )
    assert growth.tile(3, 6, "average").family == Family.EVEN_DUPLICATION
    isometric = growth.tile(3, 8, "zero", isometric=True)
    assert Family.ISOMETRIC in classify(isometric)


@pytest.mark.slow
def test_uneven_shares_break_the_symmetry_of_copies():
    """Equal shares give copies equal gradients, for ever; uneven ones tell them apart."""
    _, params, s = MODELS["layernorm"]

    @jax.jit
    def gradient(m):
        new = change_basis(params, s, {"hidden": m})
        loss = lambda p: jnp.sum(forward(p, TOKENS, kind="layernorm") ** 2)  # noqa: E731
        return jax.grad(loss)(new)["layers"]["in"]

    def copies(weights):
        g = np.asarray(gradient(growth.tile(HIDDEN, 2 * HIDDEN, weights=weights)))
        return g[..., :HIDDEN], g[..., HIDDEN:]

    one, two = copies(None)
    chex.assert_trees_all_close(one, two, atol=20 * EPS * np.abs(one).max())
    one, two = copies(np.repeat([0.25, 0.75], HIDDEN))
    chex.assert_trees_all_close(3 * one, two, rtol=1e-3, atol=1e-5 * np.abs(two).max())


@pytest.mark.slow
def test_noise_pairs_as_published():
    _, params, s = MODELS["rmsnorm"]
    maps = {"hidden": growth.widen(HIDDEN, 3 * HIDDEN)}
    old, new = moved_and(partial(growth.noise_pairs, snr_db=12.0), params, s, maps)
    noise = (new["layers"]["out"] - old["layers"]["out"]).reshape(DEPTH, 3, HIDDEN, RESID)
    chex.assert_trees_all_close(noise[:, 0], -noise[:, 1], atol=4 * EPS)
    assert not noise[:, 2].any()  # the odd copy
    rms = np.sqrt(np.mean(old["layers"]["out"] ** 2)) * 10 ** (-12 / 20)
    # null: entries N(0, rms^2), DEPTH * HIDDEN * RESID = 60 of them; a mean of squares
    z = (np.mean(noise[:, 0] ** 2) / rms**2 - 1) / (2 / 60) ** 0.5
    assert abs(z) < 4
    chex.assert_trees_all_equal(new["layers"]["in"], old["layers"]["in"])


@pytest.mark.slow
def test_pairs_follow_a_random_index():
    """Pairs are found for copies in any position, scaled by their `write` factors."""
    m = growth.widen(4, 11, key=KEY)
    write = np.linspace(0.5, 2, 11, dtype=np.float32)
    m = growth.split_readers(
        SpaceMap(*(type(m.write)(m.index, e, 4) for e in (write, m.read.scale))), np.ones(11)
    )
    net = {"in": draw(3, 4), "out": draw(4, 6)}
    s = spec(net, {"in": "x* h", "out": "h* y"}, spaces={"h": "linear", "{x,y}": "outer"})
    old, new = moved_and(partial(growth.noise_pairs, snr_db=0.0), net, s, {"h": m})
    assert np.abs(new["out"] - old["out"]).max() > 0.1
    # a sum of 11 products of order one
    chex.assert_trees_all_close(old["in"] @ new["out"], old["in"] @ old["out"], atol=50 * EPS)


@pytest.mark.slow
def test_fused_matrices_are_edited_block_by_block():
    params = {"x": draw(3, 4), "qkv": draw(4, 9), "o": draw(3, 4), "y": draw(4, 2)}
    rules = {"x": "in* resid", "qkv": "resid* (a + b + v)", "o": "v* resid", "y": "resid* out"}
    spaces = {"v": "linear", "resid": "linear", "{a,b,in,out}": "outer"}
    s = spec(params, rules, spaces=spaces, sizes={"a": 2, "b": 4})
    maps = {"v": growth.pad(3, 5)}
    _, new = moved_and(growth.fresh_units, params, s, maps)
    chex.assert_trees_all_equal(new["qkv"][:, :9], params["qkv"])
    assert (new["qkv"][:, 9:] != 0).all()
    maps = {"resid": growth.widen(4, 8)}
    old, new = moved_and(growth.noise_pairs, params, s, maps)
    noise = new["qkv"] - old["qkv"]
    assert (noise != 0).all()
    chex.assert_trees_all_close(noise[:4], -noise[4:], atol=4 * EPS)
    assert len(np.unique(np.round(noise[0], 6))) == 9  # the blocks' noise differs


def test_aki_takes_outputs_from_the_next_layer():
    _, params, s = MODELS["layernorm"]
    maps = {"hidden": growth.widen(HIDDEN, HIDDEN + 2)}
    plain, new = moved_and(lambda p, s, maps, _: growth.aki(p, s, maps), params, s, maps)
    for leaf in ("in", "in_bias"):
        old, got = plain["layers"][leaf], new["layers"][leaf]
        chex.assert_trees_all_equal(got[..., :HIDDEN], old[..., :HIDDEN])
        chex.assert_trees_all_equal(got[0, ..., HIDDEN:], old[1, ..., HIDDEN:])
        chex.assert_trees_all_equal(got[1], old[1])
    rest = lambda p: {k: v for k, v in p["layers"].items() if k not in ("in", "in_bias")}  # noqa: E731
    chex.assert_trees_all_equal(rest(new), rest(plain))
    with pytest.raises(ValueError, match="'hidden' is not declared 'stack'"):
        growth.aki(plain, s, maps, layers="hidden")


@pytest.mark.slow
def test_mask_one_is_the_fresh_network_and_its_schedule():
    _, params, s = MODELS["layernorm"]
    maps = pads(UNEVEN)(s)
    _, fresh = moved_and(growth.fresh_units, params, s, maps)
    masked = jax.jit(growth.mask_units, static_argnums=1)(fresh, s, maps, 1.0)
    chex.assert_trees_all_equal(masked, fresh)
    grown = fresh["layers"]["in"][:, RESID:, :]
    # null: N(0, 0.02^2), 2 * 3 * 8 = 48 of them
    assert abs(np.mean(grown**2) / 0.02**2 - 1) < 4 * (2 / 48) ** 0.5
    assert (fresh["scale"][RESID:] == 1).all()
    assert not fresh["bias"][RESID:].any()


def test_mask_multiplies_the_activation_once():
    _, params, s = MODELS["layernorm"]
    maps = pads({"head": 3, "v": 4})(s)
    like = jax.eval_shape(lambda maps: change_basis(params, s, maps), maps)
    ones = {"layers": {"o": np.ones(like["layers"]["o"].shape, np.float32)}}
    half = jax.jit(growth.mask_units, static_argnums=1)(ones, s, maps, 0.5)
    o = np.asarray(half["layers"]["o"])[0, :, :, 0]
    want = np.full((3, 4), 0.5)
    want[:HEADS, :HEAD] = 1
    np.testing.assert_array_equal(o, want)


# Shrinking


def relu_net(hidden):
    net = {"in": draw(4, hidden), "bias": 0.3 * draw(hidden), "out": draw(hidden, 3)}
    s = spec(
        net,
        {"in": "x* h", "bias": "h", "out": "h* y"},
        spaces={"h": "relu", "{x,y}": "outer"},
    )
    return net, s


def relu_apply(p, x):
    """In NumPy, where other sizes compile nothing."""
    w = {name: np.asarray(leaf) for name, leaf in p.items()}
    return np.maximum(x @ w["in"] + w["bias"], 0) @ w["out"]


@pytest.mark.slow
def test_compensation_is_least_squares():
    net, s = relu_net(8)
    x = draw(60, 4)
    h = np.maximum(x @ net["in"] + net["bias"], 0)
    keep = np.array([6, 1, 3, 4])
    m = growth.compensate(growth.prune(keep, 8), h.T @ h)
    new = change_basis(net, s, {"h": m})
    want = np.linalg.lstsq(np.float64(h[:, keep]), np.float64(h @ net["out"]))[0]
    # a normal equation: eps times the condition number of the Gram, here below 1e3
    np.testing.assert_allclose(new["out"], want, atol=1e3 * EPS)
    plain = change_basis(net, s, {"h": growth.prune(keep, 8)})
    error = [np.sum((relu_apply(p, x) - relu_apply(net, x)) ** 2) for p in (new, plain)]
    assert error[0] < error[1]
    assert exactness(s, {"h": m}).lost
    with pytest.raises(ValueError, match="something is lost"):
        change_basis(net, s, {"h": m}, require_exact=True)


@pytest.mark.slow
def test_compensation_absorbs_redundant_units_exactly():
    """Pruning back what duplication added, whichever copies are kept."""
    net, s = relu_net(4)
    wide = growth.widen(4, 8)
    big, bigger = change_basis(net, s, {"h": wide}), s.resized({"h": wide})
    big = jax.tree.map(np.asarray, big)
    x = draw(50, 4)
    h = np.maximum(x @ big["in"] + big["bias"], 0)
    for keep in ([4, 1, 6, 3], [7, 6, 5, 4, 0]):
        m = growth.compensate(growth.prune(keep, 8), h.T @ h)
        seen = certificate(relu_apply, big, change_basis(big, bigger, {"h": m}), x)
        assert seen.absolute < TOLERANCE
        cut = change_basis(big, bigger, {"h": growth.prune(keep, 8)})
        assert not certificate(relu_apply, big, cut, x).preserved


def test_ridge_shrinks_the_readers():
    h = draw(40, 6)
    m = growth.prune([0, 1], 6)
    norms = [np.linalg.norm(growth.compensate(m, h.T @ h, ridge=r).read) for r in (0, 0.1, 1.0)]
    assert norms == sorted(norms, reverse=True)


@pytest.mark.slow
def test_principal_axes_lose_least():
    """Eckart-Young: the loss is the sum of the smallest eigenvalues, the least of all."""
    h = draw(50, 6) @ draw(6, 6)
    gram = h.T @ h
    m = growth.principal(gram, 3)

    def lost(m):
        return np.sum((h - h @ np.asarray(m.write).T @ np.asarray(m.read).T) ** 2)

    values = np.linalg.eigvalsh(np.float64(gram))
    assert lost(m) == pytest.approx(values[:3].sum(), rel=1e-4)
    refit = growth.compensate(m, gram)  # already least squares
    chex.assert_trees_all_close(refit.read, m.read, atol=1e-4)
    other = growth.compensate(growth.project(6, 3, KEY), gram)
    assert lost(other) > lost(m)
    whole = growth.principal(gram, 6)
    assert whole.family == Family.ORTHOGONAL
    assert Family.ORTHOGONAL in classify(whole)


@pytest.mark.slow
def test_rotation_of_a_normed_stream_is_exact_and_pruning_it_is_not():
    _, params, s = MODELS["folded"]
    f = partial(forward, kind="rmsnorm")
    gram = draw(RESID, RESID) @ draw(RESID, RESID).T
    for new, exact in ((RESID, True), (RESID - 1, False)):
        maps = {"resid": growth.principal(gram, new)}
        assert (not exactness(s, maps).lost) == exact
        assert certificate(f, params, change_basis(params, s, maps), TOKENS).preserved == exact


# SAIL


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(9, 3), (9, 8), (4, 8), (4, 3), (7, 5)])
def test_singular_value_initialisation(sizes):
    theta = draw(7, 5)
    U, S, Vt = np.linalg.svd(theta, full_matrices=False)
    r = min(*sizes, 5)
    c_in, c_out = growth.singular(theta, *sizes, key=KEY)
    c_in, c_out = np.asarray(c_in), np.asarray(c_out)
    # C_in theta C_out^T = W_in S~ W_out^T, with W recovered as C U~ since U~^T U~ = I
    got = c_in @ theta @ c_out.T
    W_in, W_out = c_in @ U[:, :r], c_out @ Vt[:r].T
    chex.assert_trees_all_close(got, W_in * S[:r] @ W_out.T, atol=30 * EPS)
    assert np.linalg.matrix_rank(got, tol=1e-4) == r
    c_in, c_out = map(np.asarray, growth.singular(theta, *sizes))
    best = U[:, :r] * S[:r] @ Vt[:r]
    want = np.zeros((max(7, sizes[0]), max(5, sizes[1])))
    want[:7, :5] = best
    chex.assert_trees_all_close(
        c_in @ theta @ c_out.T, want[: sizes[0], : sizes[1]].astype(np.float32), atol=30 * EPS
    )


@pytest.mark.slow
def test_gradients_pass_by_singular_vectors_and_principal_axes():
    """With C_in and C_out fixed, that of <1, C_in theta C_out^T> is C_in^T 1 C_out."""

    def total(theta):
        c_in, c_out = growth.singular(theta, 4, 4)
        return jnp.sum(c_in @ theta @ c_out.T) + growth.principal(theta, 2).write.sum()

    c_in, c_out = map(np.asarray, growth.singular(np.eye(3), 4, 4))
    want = np.outer(c_in.sum(0), c_out.sum(0))
    np.testing.assert_allclose(jax.grad(total)(jnp.eye(3)), want, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_random_schemes_keep_the_norm():
    """Null: E |C_in theta C_out^T|^2 = |S~|^2, E |write x|^2 / new = |x|^2 / old; |z| < 4."""
    theta, x = draw(4, 3), draw(6)
    keys = jax.random.split(KEY, 400)

    def norms(key):
        c_in, c_out = growth.singular(theta, 8, 6, key=key)
        gaussian = growth.project(6, 9, key, how="gaussian").write @ x
        down = growth.project(6, 2, key).write @ x
        return (
            jnp.sum((c_in @ theta @ c_out.T) ** 2) / jnp.sum(theta**2),
            jnp.mean(gaussian**2) / jnp.mean(x**2),
            jnp.mean(down**2) / jnp.mean(x**2),
        )

    for ratio in jax.jit(jax.vmap(norms))(keys):
        z = (np.mean(ratio) - 1) / (np.std(ratio) / 20)
        assert abs(z) < 4
        assert np.std(ratio) > 0.01  # it is random
    up = np.asarray(growth.project(6, 9, KEY).write) @ x
    assert np.mean(up**2) == pytest.approx(np.mean(x**2), rel=1e-5)


def test_interpolation_samples_linear_functions():
    m = growth.interpolate(4, 7)
    chex.assert_trees_all_close(
        np.asarray(m.write) @ np.arange(4.0), np.arange(7) / 2, atol=4 * EPS
    )
    assert float(defect(m)) < 20 * EPS
    assert growth.interpolate(4, 2).write.tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]
    assert growth.interpolate(4, 4).family == Family.IDENTITY


@pytest.mark.slow
def test_makers_trace():
    @jax.jit
    def f(gram, weights, key):
        a = growth.compensate(growth.prune(jnp.array([0, 2]), 4), gram)
        b = growth.tile(4, 6, "average", weights=weights)
        c = growth.project(4, 6, key)
        return a.read.sum() + b.read.sum() + c.read.sum() + growth.principal(gram, 2).read.sum()

    assert np.isfinite(f(np.eye(4), np.ones(6), KEY))


S = MODELS["layernorm"].spec
WIDE = {"hidden": growth.widen(HIDDEN, 2 * HIDDEN)}
ERRORS = [
    (lambda: growth.hypercloning(S, {"hidden": 8}), "integer factors, but space 'hidden' goes"),
    (lambda: growth.lemon(S, {"hidden": 3}), r"'hidden' has 5 units \(leaf 'layers/in'"),
    (lambda: growth.lemon(S, {"hiden": 8}), "no space 'hiden' .nearest: 'hidden'"),
    (lambda: growth.tile(4, 6, "mean"), "remainder: expected one of"),
    (lambda: growth.tile(4, 6, "circ", isometric=True), "isometric needs the remainder 'zero'"),
    (lambda: growth.tile(4, 3), "0 < old <= new"),
    (lambda: growth.tile(4, 6, "zero", weights=np.ones(5)), r"weights must have the shape \(6,\)"),
    (lambda: growth.split_readers(WIDE["hidden"], jnp.ones(3)), r"the shape \(10,\), got \(3,\)"),
    (
        lambda: growth.split_readers(WIDE["hidden"], jnp.ones(10).at[jnp.array([1, 6])].set(0)),
        r"copies of units \[1\] must not sum to 0",
    ),
    (lambda: growth.split_readers(growth.rotate(jnp.eye(3)), jnp.ones(3)), "index form"),
    (lambda: growth.project(3, 0, KEY), "sizes must be positive"),
    (lambda: growth.project(3, 4, KEY, how="sparse"), "expected one of 'orthogonal', 'gaussian'"),
    (lambda: growth.interpolate(0, 4), "sizes must be positive"),
    (lambda: growth.compensate(growth.prune([0], 3), jnp.eye(2)), r"shape \(3, 3\)"),
    (lambda: growth.compensate(growth.prune([0], 2), jnp.array([[1.0, 2], [0, 1]])), "symmetric"),
    (lambda: growth.principal(jnp.eye(3), 4), "0 < new <= old"),
    (lambda: growth.singular(jnp.ones(3), 2, 2), "must be a matrix"),
    (lambda: growth.ramp(0, 0, 0), "length must be positive"),
    (
        lambda: growth.noise_pairs(MODELS["layernorm"].params, S, WIDE, KEY),
        "apply change_basis first",
    ),
    (
        lambda: growth.scale_norms(
            {}, S, {"resid": growth.tile(6, 9, "average")}, gains="layers/scal"
        ),
        "'resid' has no gain 'layers/scal'",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
