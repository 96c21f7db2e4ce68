"""Queries, keys and values in one array: the spec is the one that people would write by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sail_jax import align, check_spec, growth, spec_of
from sail_jax.basis.certificate import certificate
from sail_jax.basis.change_basis import change_basis
from sail_jax.basis.families import Family
from sail_jax.basis.maps import select
from sail_jax.basis.spaces import spec

HEADS, KV, WIDTH, D = 4, 2, 6, 3
X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


def three_first(y, heads, _):
    y = y.reshape(-1, 3, heads, D)
    return y[:, 0], y[:, 1], y[:, 2]


def three_inside(y, heads, _):
    y = y.reshape(-1, heads, 3, D)
    return y[..., 0, :], y[..., 1, :], y[..., 2, :]


def three_widths(y, heads, _):
    return jnp.split(y.reshape(-1, heads, 3 * D), 3, axis=-1)


def one_key(y, heads, _):
    y = y.reshape(-1, heads + 2, D)
    k, v = (jnp.broadcast_to(y[:, [at]], y[:, :-2].shape) for at in (-2, -1))
    return y[:, :-2], k, v


def grouped(y, heads, kv):
    y = y.reshape(-1, kv, heads // kv + 2, D)
    q = y[:, :, :-2]
    k, v = (jnp.broadcast_to(y[:, :, [at]], q.shape) for at in (-2, -1))
    return (x.reshape(-1, heads, D) for x in (q, k, v))


# The splitting of the array, its units, its axis, and the reader of the heads' output.
LAYOUTS = {
    "(3, h, d)": (three_first, 3 * HEADS, "(head qk + head qk* + head v)", "(head* v*)"),
    "(h, 3, d)": (three_inside, 3 * HEADS, "(head (qk + qk* + v))", "(head* v*)"),
    "(h, 3 d)": (three_widths, 3 * HEADS, "(head (qk + qk* + v))", "(head* v*)"),
    "(h + 2, d)": (one_key, HEADS + 2, "(head qk + qk* + v)", "(head* v*)"),
    "(kv, g + 2, d)": (grouped, HEADS + 4, "(kv (group qk + qk* + v))", "(kv* group* v*)"),
}  # fmt: skip


def network(layout, heads=HEADS, kv=KV):
    """A network with one layer of attention, its parameters, and its rules by hand."""
    apart, units, axis, reads = LAYOUTS[layout]

    def apply(p, x):
        x = x @ p["in"]
        q, k, v = apart(x @ p["qkv"] + p["bias"], heads, kv)
        weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k), -1)
        y = jnp.einsum("hqk,khd->qhd", weights, v).reshape(-1, heads * D)
        return (x + y @ p["o"]) @ p["out"]

    rng = np.random.default_rng(1)
    shapes = {"in": (3, WIDTH), "qkv": (WIDTH, units * D), "bias": (units * D,)}
    shapes |= {"o": (HEADS * D, WIDTH), "out": (WIDTH, 2)}
    p = {k: rng.normal(size=s).astype(np.float32) / s[0] ** 0.5 for k, s in shapes.items()}
    rules = {
        "bias": axis, "in": "_ resid", "o": f"{reads} resid", "out": "resid* _",
        "qkv": f"resid* {axis}",
    }  # fmt: skip
    return apply, p, rules


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_spec_is_the_one_by_hand(layout):
    apply, p, rules = network(layout)
    found = spec_of(apply, p, X, names={"qkv": rules["qkv"]})
    assert found.rules == rules
    stated = {s.name: s.nonlinearity for s in found.spec.spaces}
    sizes = {s.name: s.size for s in found.spec.spaces}
    assert spec(p, rules, spaces=stated, sizes=sizes) == found.spec
    # Signs of a head of queries, keys and values cancel; of one that shares its key they do not.
    outer = "elementwise" if layout == "(h + 2, d)" else "odd"
    words = {"resid": "linear", "qk": "dot", "v": "linear", "head": outer, "kv": "odd"}
    assert stated == {k: words.get(k, "elementwise") for k in stated}


def test_a_factor_of_three_uses_has_one_role():
    """The matrix is cut before it is used, and only its values carry the sign of a head."""

    def apply(p, x):
        q, k, v = (jnp.einsum("qi,ihd->qhd", x, w) for w in three_inside(p["qkv"], HEADS, KV))
        weights = jnp.einsum("qhd,khd->hqk", jax.nn.relu(q), jax.nn.relu(k))
        return jnp.einsum("hqk,khd->qhd", weights, v).reshape(-1, HEADS * D) @ p["o"]

    p = {"qkv": np.ones((3, 9 * HEADS)), "o": np.ones((HEADS * D, 2))}
    found = spec_of(apply, p, X, names={"qkv": "x* (head (qk + qk* + v))"})
    assert found.rules["qkv"] == "_ (head (qk + qk* + v))"
    # Heads may be copied.
    assert found.spec.space("head").nonlinearity == "elementwise"


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["(h, 3, d)", "(h + 2, d)", "(kv, g + 2, d)"])
def test_a_fused_layer_is_checked_grown_and_aligned(layout):
    apply, p, rules = network(layout)
    s = spec_of(apply, p, X, names={"qkv": rules["qkv"]}).spec
    checked = check_spec(s, apply, p, X[:4])
    assert len(checked.trials) > 8
    assert not checked.failed
    # More heads, each with its queries, keys and values, or more groups of them.
    name = "kv" if "kv" in rules["o"] else "head"
    n = s.space(name).size
    large, _ = network(layout, 2 * HEADS, 2 * KV)[:2]
    grown = change_basis(p, s, {name: growth.widen(n, 2 * n)}, require_exact=True)
    both = lambda pair, x: (large if pair[0] else apply)(pair[1], x)  # noqa: E731
    assert certificate(both, (False, p), (True, grown), X).preserved
    # A hidden order is found again; heads with a key of their own have each its own.
    rng = np.random.default_rng(2)
    within = align.nested(s)
    inner = set() if layout == "(h + 2, d)" else {"qk", "v", "group"} & {x.name for x in s.spaces}
    assert within == dict.fromkeys(inner, name)
    hidden = {x.name: order(rng, x.size, n if x.name in within else None) for x in s.spaces}
    moved = align.change_blocks(p, s, hidden, within)
    assert certificate(apply, p, moved, X).preserved
    assert all(np.abs(moved[k] - p[k]).max() > 0.1 for k in p)
    found = align.match_weights(p, moved, s, family=Family.PERMUTATION, within=within)
    back = align.change_blocks(moved, s, found.maps, within)
    assert all((back[k] == p[k]).all() for k in p)


def order(rng, size, count):
    """A permutation of units, or one for each block."""
    one = [
        select(rng.permutation(size), size, family=Family.PERMUTATION) for _ in range(count or 1)
    ]
    return one[0] if count is None else jax.tree.map(lambda *x: np.stack(x), *one)
