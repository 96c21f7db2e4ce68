"""Stacks piece by piece: the new jaxpr computes the same, and keeps the units of slices apart."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import slow_unless
from jax import lax
from jax.extend.core import jaxpr_as_fun
from permutations import free, labelled, moved, orders_of
from rule_cases import LACKING

from sail_jax import align, change_basis, check_spec, spec_of, stack, unstack
from sail_jax.basis.families import Family
from sail_jax.basis.maps import select
from sail_jax.tracing import pieces
from sail_jax.tracing.pieces import Pieces, in_pieces
from sail_jax.trees import leaf_paths

# Three slices [w, h] and three [h, o]: each pair has its own h, and all share w and o.
APART = "ab ac ad be ce de"
# The same where an operation needs the order of w.
ORDERED = "_a _b _c ad bd cd"


X = jnp.asarray(np.random.default_rng(9).normal(size=(5, 3)), jnp.float32)


def drawn(**shapes):
    rng = np.random.default_rng(3)
    return {
        k: jnp.asarray(rng.normal(size=s) / (s[-2] if len(s) > 1 else 1) ** 0.5, jnp.float32)
        for k, s in shapes.items()
    }


class Case(NamedTuple):
    """A function of two stacks, of three slices each, and of more arrays.

    Attributes:
      f: The function.
      free: The spaces of all slices afterwards, as in `rule_cases`; then those of more arrays.
      more: The shapes of the other arrays.
      stack: Makes a stack.
    """

    f: Any
    free: str = APART
    more: tuple[tuple[int, ...], ...] = ()
    stack: Any = jnp.stack


def _on(f, free=APART, **more):
    """A function of the first stack, which is then multiplied with the second slice by slice."""
    return Case(lambda w, u, *rest: jnp.einsum("ewh,eho->wo", f(w, *rest), u), free, **more)


def _in_order(f, free=ORDERED, **more):
    """The same, of a function of the order of w."""
    return _on(f, free, **more)


def _numbers(x):
    """Integers from 0 to 2, none of which is the number of a unit."""
    return (jnp.abs(x) * 7).astype(jnp.int32) % 3


def _looked_up(w, u, x):
    index = _numbers(x[:, 0])
    hidden = jnp.tanh(jnp.einsum("nw,nwh->nh", x, w[index]))
    return jnp.einsum("nh,nho->no", hidden, u[index])


def _looked_up_and_summed(w, u, x):
    index = _numbers(x)
    return jnp.einsum("nk,nkwh,nkho->nwo", x, w[index], u[index])


def _layers(carry, layer):
    w, u = layer
    return carry + jnp.tanh(carry @ w) @ u, carry.sum(0)


def _numbered_layers(w, u, x):
    def step(carry, k):
        return carry + jnp.tanh(carry @ w[k]) @ u[k], None

    return lax.scan(step, x, jnp.arange(3))[0]


def _nested(w, u, x):
    """Each layer of a scan has two experts."""

    def step(carry, layer):
        w, u = layer
        return carry + jnp.einsum("beh,eho->bo", jnp.einsum("bw,ewh->beh", carry, w), u), None

    w, u = (jnp.stack([y, 2 * y], 1) for y in (w, u))
    return lax.scan(step, x, (w, u))[0]


LAYERS = "ab ac ad ba ca da ea"
CASES = {
    "tanh": _on(lambda w: jnp.tanh(w) * 2 + 1),
    "a function": _on(lambda w: jax.nn.gelu(jax.checkpoint(jax.nn.relu)(w))),
    "another axis": _on(lambda w: w, stack=lambda xs: jnp.moveaxis(jnp.stack(xs, 2), 2, 0)),
    "concatenated": _on(lambda w: w, stack=lambda xs: jnp.concatenate([x[None] for x in xs])),
    "broadcast_in_dim": _on(lambda w: lax.broadcast_in_dim(w, (3, 2, 4, 5), (0, 1, 2))[..., 0]),
    "transpose": _on(lambda w: jnp.tanh(w.transpose(2, 1, 0)).transpose(2, 1, 0)),
    "squeeze": _on(lambda w: lax.squeeze(lax.expand_dims(w, (0,)), (0,))),
    "reshape": _on(lambda w: jnp.tanh(w.reshape(3, 2, 1, 4).reshape(6, 4)).reshape(3, 2, 4)),
    "reduce_sum": _on(lambda w: w * w.sum(1, keepdims=True)),
    "reduce_max": _on(lambda w: w * w.max(1, keepdims=True)),
    "reduce_min": _on(lambda w: w * w.min(1, keepdims=True)),
    "reduce_prod": _on(lambda w: w * w.prod(1, keepdims=True)),
    "reduce_and": _on(lambda w: w * (w > 0).all(1, keepdims=True)),
    "reduce_or": _on(lambda w: w * (w > 0).any(1, keepdims=True)),
    "argmax": _in_order(lambda w: w * w.argmax(1, keepdims=True)),
    "argmin": _in_order(lambda w: w * w.argmin(1, keepdims=True)),
    "cumsum": _in_order(lambda w: lax.cumsum(w, 1)),
    "cumprod": _in_order(lambda w: lax.cumprod(w, 1)),
    "cummax": _in_order(lambda w: lax.cummax(w, 1)),
    "cummin": _in_order(lambda w: lax.cummin(w, 1)),
    "cumlogsumexp": _in_order(lambda w: lax.cumlogsumexp(w, 1)),
    "sort": _in_order(lambda w: lax.sort(w, dimension=1)),
    "top_k": _on(
        lambda w: lax.top_k(w.transpose(0, 2, 1), 2)[0].transpose(0, 2, 1), "ab cd ef bg dg fg"
    ),
    "concatenate": _in_order(lambda w: jnp.concatenate([w, w * 2], 1)[:, 1:3]),
    "rev": _in_order(lambda w: w[:, ::-1]),
    "dynamic_slice": _in_order(
        lambda w, x: lax.dynamic_slice_in_dim(w, _numbers(x[0]), 1, 1) * w,
        ORDERED + " (_+e)",
        more=((3,),),
    ),
    "pad": _on(lambda w: jnp.pad(w, ((0, 0), (1, 0), (0, 0)))[:, 1:]),
    "split": _in_order(lambda w: w * jnp.split(w, 2, 1)[0]),
    "stack": _on(lambda w, x: jnp.stack([w, w * x], 1)[:, 1], APART + " _", more=((1,),)),
    "unstack": _in_order(lambda w: w * jnp.unstack(w, axis=1)[0][:, None]),
    "dot_general, batch": Case(lambda w, u: (w @ u).sum(0)),
    "dot_general, contracted": Case(
        lambda w, u: w.transpose(1, 0, 2).reshape(2, 12) @ u.reshape(12, 2)
    ),
    "dot_general, free": Case(
        lambda w, u, x: jnp.einsum("beh,eho->bo", jnp.tanh(jnp.einsum("bw,ewh->beh", x, w)), u),
        APART + " fa",
        ((5, 2),),
    ),
    "slice": Case(
        lambda w, u: w[1] @ u[1] + jnp.einsum("ewh,eho->wo", w[1:], u[1:]), "ab cd ce fg dh eh"
    ),
    "split along the axis": Case(
        lambda w, u: sum(a[0] @ b[0] for a, b in zip(jnp.split(w, 3), jnp.split(u, 3), strict=True))
    ),
    "unstack along the axis": Case(
        lambda w, u: sum(a @ b for a, b in zip(jnp.unstack(w), jnp.unstack(u), strict=True))
    ),
    "gather": Case(_looked_up, ORDERED + " e_", ((5, 2),)),
    "gather, summed": Case(_looked_up_and_summed, APART + " fg", ((5, 2),)),
    "scan": Case(lambda w, u, x: lax.scan(_layers, x, (w, u)), LAYERS, ((5, 2),)),
    "scan, reversed": Case(
        lambda w, u, x: lax.scan(_layers, x, (w, u), reverse=True), LAYERS, ((5, 2),)
    ),
    "scan over numbers": Case(_numbered_layers, LAYERS, ((5, 2),)),
    "scan over layers of experts": Case(_nested, LAYERS, ((5, 2),)),
    "no rule": _on(
        lambda w: lax.reduce_window(w, 0.0, lax.add, (1, 1, 1), (1, 1, 1), "SAME"),
        "ab ab ab bc bc bc",
    ),
}
SIZES = ((2, 4),) * 3 + ((4, 2),) * 3


def _prepared(case):
    """The network of slices, their values, and its jaxpr in pieces."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=size)) for size in (*SIZES, *case.more)]

    def net(*xs):
        return case.f(case.stack(xs[:3]), case.stack(xs[3:6]), *xs[6:])

    return net, arrays, in_pieces(jax.make_jaxpr(net)(*arrays), 6)


def _word(case):
    _, arrays, jaxpr = _prepared(case)
    letters = {}
    return " ".join(free(own, letters) for own in labelled(jaxpr, *arrays)[0])


# every other case is quick
@pytest.mark.parametrize("name", [slow_unless(i % 2 == 0, name) for i, name in enumerate(CASES)])
def test_pieces_compute_the_same_and_keep_units_apart(name):
    """Sums in another order differ by their rounding, in float64 1e-12 of numbers of order one."""
    case = CASES[name]
    with jax.enable_x64(True):
        net, arrays, jaxpr = _prepared(case)
        _, values, outs, _ = labelled(jaxpr, *arrays)
        run = jax.jit(net)
        want = jax.tree.leaves(run(*arrays))
        got = jax.jit(jaxpr_as_fun(jaxpr))(*arrays)
        orders = orders_of(
            np.random.default_rng(1), [t for x in (*values, *outs) for t in x.axes if t is not None]
        )
        shuffled = [moved(x, v, orders) for x, v in zip(arrays, values, strict=True)]
        after = jax.tree.leaves(run(*map(jnp.asarray, shuffled)))
    for x, y, z, out in zip(want, got, after, outs, strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(z, moved(x, out, orders), rtol=1e-12, atol=1e-12)
    assert _word(case) == case.free


@pytest.mark.parametrize("name", sorted({*pieces._PLANNERS, *pieces._SPECIAL} - LACKING))
def test_each_rule_keeps_some_units_apart(name, monkeypatch):
    """Without it units are joined that the case has apart."""
    for rules in (pieces._PLANNERS, pieces._SPECIAL):
        cases = [case for key, case in CASES.items() if name in key or name == _ALSO.get(key)]
        if name in rules:
            with monkeypatch.context() as without:
                without.delitem(rules, name)
                assert any(_word(case) != case.free for case in cases), name


# Cases by what they need in addition to what they are called by.
_ALSO = {"concatenated": "concatenate", "scan over numbers": "dynamic_slice", "tanh": "stack"}


@pytest.mark.parametrize("wrong", ["axis", "order"])
def test_a_wrong_plan_is_noticed(wrong, monkeypatch):
    """Pieces that are laid along another axis, or in another order, compute something else."""
    run, made = pieces._Run._by_pieces, pieces._PLANNERS["dot_general"]

    def mixed(self, primitive, *rest):
        outs = run(self, primitive, *rest)
        if primitive.name != "dot_general":
            return outs
        return [x._replace(parts=x.parts[::-1]) if isinstance(x, Pieces) else x for x in outs]

    if wrong == "axis":
        monkeypatch.setitem(
            pieces._PLANNERS, "dot_general", lambda *args: made(*args)._replace(outs=(0,))
        )
    else:
        monkeypatch.setattr(pieces._Run, "_by_pieces", mixed)
    with pytest.raises((AssertionError, TypeError)):
        test_pieces_compute_the_same_and_keep_units_apart("dot_general, free")


def test_what_stacks_nothing_stays_as_it_is():
    def net(p, x):
        return jnp.concatenate([x @ p["a"], x @ p["b"]], -1) @ p["c"]

    jaxpr = jax.make_jaxpr(net)(drawn(a=(3, 2), b=(3, 2), c=(4, 2)), X)
    assert in_pieces(jaxpr, 3) is jaxpr


def _router(p, x):
    return jax.nn.softmax(x @ p["router"], -1)


def _dense(p, x):
    y = jax.nn.relu(jnp.einsum("bd,edh->beh", x, p["up"]))
    return jnp.einsum("beh,eho,be->bo", y, p["down"], _router(p, x))


def _dispatched(p, x):
    """Each expert has room for all inputs."""
    weight = _router(p, x)
    mask = jax.nn.one_hot(weight.argmax(-1), 3)
    place = ((jnp.cumsum(mask, 0) - 1) * mask).sum(-1)
    mask = mask[..., None] * jax.nn.one_hot(place.astype(int), len(x))[:, None]
    y = jax.nn.relu(jnp.einsum("bec,bd->ecd", mask, x) @ p["up"]) @ p["down"]
    return jnp.einsum("eco,bec,be->bo", y, mask, weight)


def _gathered(p, x):
    weight, chosen = lax.top_k(_router(p, x), 2)
    y = jax.nn.relu(jnp.einsum("ni,nkih->nkh", x, p["up"][chosen]))
    return jnp.einsum("nk,nkh,nkho->no", weight, y, p["down"][chosen])


@pytest.mark.parametrize("net", [_dense, _dispatched, _gathered])
def test_hidden_units_of_each_expert_are_a_space(net):
    """The experts themselves are permuted by the coarse spec, of the stacks as they are."""
    params = drawn(router=(3, 3), up=(3, 3, 5), down=(3, 5, 2))
    coarse = spec_of(net, params, X).spec
    (experts,), _, (hidden,) = coarse.axes("up")
    assert [experts.space] == [factor.space for factor in coarse.axes("router")[1]]
    assert (coarse.space(experts.space).size, coarse.space(hidden.space).size) == (3, 5)
    parts = unstack(params, {"up": 0, "down": 0})
    found = spec_of(lambda p, x: net(stack(p), x), parts, X[:3])
    assert found.rules == {"router": "_ _"} | {
        f"{leaf}/{e}": text.format(f"up/{e}")
        for e in range(3)
        for leaf, text in (("up", "_ {}"), ("down", "{}* _"))
    }
    assert {space.nonlinearity for space in found.spec.spaces} == {"relu"}
    read = "the order of the network's input: dot_general (test_pieces.py:"
    assert found.why["up/0", 0].startswith(read)


def _scanned(p, x):
    """Layers of attention and of gated units, in one scan."""

    def layer(h, w):
        q, k, v = (jnp.tanh(h @ w[name]).reshape(-1, 2, 2) for name in "qkv")
        mix = jax.nn.softmax(jnp.einsum("shd,thd->hst", q, k), -1)
        h = h + jnp.einsum("hst,thd->shd", mix, v).reshape(-1, 4) @ w["o"]
        return h + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

    h, _ = lax.scan(jax.checkpoint(layer), x @ p["in"], p["layers"])
    return h @ p["out"]


def test_stacks_are_taken_apart_and_put_together():
    params = {"layers": {"up": np.arange(24.0).reshape(2, 3, 4), "gain": np.ones(2)}, "in": X}
    parts = unstack(params, {"*/up": (-1, 0), "*/gain": 0})
    shapes = {
        path: np.shape(x) for path, x in zip(leaf_paths(parts), jax.tree.leaves(parts), strict=True)
    }
    assert shapes == {"in": X.shape, "layers/gain/0": (), "layers/gain/1": ()} | {
        f"layers/up/{k}/{n}": (3,) for k in range(4) for n in range(2)
    }
    jax.tree.map(np.testing.assert_array_equal, stack(parts), params)
    like = unstack(jax.eval_shape(lambda: params), {"*/up": (2, 0), "*/gain": 0})
    assert jax.tree.structure(like) == jax.tree.structure(parts)
    assert [x.shape for x in jax.tree.leaves(like)] == list(shapes.values())


def test_what_cannot_be_taken_apart_is_named():
    params = {"up": np.ones((2, 3)), "gain": np.ones(2)}
    with pytest.raises(ValueError, match=r"each\['ups'\] matches no leaf \(nearest: 'up'\)"):
        unstack(params, {"ups": 0})
    for axes in (2, (0, 0), (0, -2)):
        with pytest.raises(
            ValueError, match=r"'up' of shape \(2, 3\) must have the axes of `each`"
        ):
            unstack(params, {"up": axes})
    parts = unstack(params, {"up": 0})
    parts["up"].slices = (np.ones(3), np.ones(4))
    with pytest.raises(
        ValueError, match=r"slices of 'up' must have one shape .* \(3,\) and \(4,\)"
    ):
        stack(parts)


@pytest.mark.soak
def test_scanned_networks_are_aligned_layer_by_layer():
    """A permutation for each layer, of another network's units, is found exactly."""
    sizes = {**dict.fromkeys("qkv", (2, 6, 4)), "o": (2, 4, 6), "down": (2, 5, 6)}
    sizes |= {"gate": (2, 6, 5), "up": (2, 6, 5)}
    params = {"layers": drawn(**sizes), **drawn(**{"in": (3, 6), "out": (6, 2)})}
    parts = unstack(params, {"layers/*": 0})

    def net(p, x):
        return _scanned(stack(p), x)

    found = spec_of(net, parts, X)
    # In each layer hidden units, heads, and units of queries and of values.
    names = ["up/{}", "q/{}", "q/{}:2", "v/{}"]
    inner = {f"layers/{name.format(k)}" for k in (0, 1) for name in names}
    assert {space.name for space in found.spec.spaces} == {"in", *inner}
    rng = np.random.default_rng(2)
    maps = {
        space.name: select(rng.permutation(space.size), space.size, family=Family.PERMUTATION)
        for space in found.spec.spaces
    }
    other = change_basis(parts, found.spec, maps)
    run = jax.jit(net)
    np.testing.assert_allclose(run(other, X), run(parts, X), rtol=1e-4, atol=1e-5)
    back = change_basis(other, found.spec, align.weight_matching(parts, other, found.spec))
    assert all(map(np.array_equal, jax.tree.leaves(back), jax.tree.leaves(parts)))


@pytest.mark.slow
@pytest.mark.parametrize("net", [_dispatched, _gathered])
def test_a_network_of_experts_is_the_same_in_every_basis_of_each(net):
    parts = unstack(drawn(router=(3, 3), up=(3, 3, 5), down=(3, 5, 2)), {"up": 0, "down": 0})

    def own(p, x):
        return net(stack(p), x)

    found = spec_of(own, parts, X)
    checked = check_spec(found.spec, own, parts, X[:3], resized=lambda _: own)
    assert {trial.space for trial in checked.trials} == {"", "up/0", "up/1", "up/2"}
    assert not checked.failed
