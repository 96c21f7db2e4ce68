"""Inferred specs beside the hand-written tables, and both against runs of the networks."""

from functools import reduce
from operator import or_

import jax
import jax.numpy as jnp
import known_networks
import numpy as np
import pytest
from cells import chosen
from permutations import moved, orders_of

from sail_jax import check_spec, spec_of
from sail_jax.basis.families import NONLINEARITIES, Family
from sail_jax.jax_internals import CALLS, Literal, operation
from sail_jax.tracing.infer import _run
from sail_jax.tracing.interpreter import Interpreter, alive
from sail_jax.tracing.terms import Face, Variable
from sail_jax.tracing.values import Value

NAMES = known_networks.NAMES
# What a table states too narrowly, by the beginning of a space's name: its own word, and the
# inferred one. A gate is a gain. The logits of T5 have a bias for each head, and BatchNorm with
# stored statistics is homogeneous. Of T5's queries and keys no size is used as a number, which
# the forward pass of one size does not show.
WIDER = {
    "hidden": {("elementwise", "gated"), ("elementwise", "relu")},
    "decoder.hidden": {("elementwise", "gated")},
    "encoder.hidden": {("elementwise", "gated")},
    "decoder.head": {("elementwise", "odd")},
    "encoder.head": {("elementwise", "odd")},
    "stage": {("elementwise", "relu")},
}
NARROWER = ("decoder.qk", "encoder.qk", "cross.qk")


def family(words):
    return reduce(or_, (NONLINEARITIES[w] for w in words.split() or ["softmax"]), Family.LINEAR)


def free(axis, spec):
    """The factors of an axis that can be permuted."""

    def is_free(factor):
        space = spec.space(factor.space)
        return space.size > 1 and not {"outer", "stack"} & set(space.nonlinearity.split())

    return [factor for factor in axis if is_free(factor)]


@pytest.mark.parametrize("name", chosen(NAMES, "llama"))
def test_the_forward_pass_gives_the_table_again(name):
    """Groups are equal on every axis of every leaf, and names a bijection; so are roles."""
    model = known_networks.model(name)
    found = spec_of(model.apply(model.spec), model.params, model.inputs)
    assert found.unknown == ()
    called, back = {}, {}
    for path, axes in model.spec.leaves:
        for mine, its in zip(found.spec.axes(path), axes, strict=True):
            mine, its = free(mine, found.spec), free(its, model.spec)
            assert len(mine) == len(its), path
            for a, b in zip(mine, its, strict=True):
                assert called.setdefault(a.space, b.space) == b.space, path
                assert back.setdefault(b.space, a.space) == a.space, path
                if (a.role, a.tied) != (b.role, b.tied):
                    # A gate, and the bias of a head's logits, carry neither sign nor scale.
                    assert (a.role, b.role, a.tied) == ("gain", "write", False)
                    assert any(word in path for word in ("gate", "wi_0", "relative_attention_bias"))
    for mine, its in called.items():
        words = found.spec.space(mine).nonlinearity, model.spec.space(its).nonlinearity
        if family(words[0]) != family(words[1]):
            wider = [pairs for stem, pairs in WIDER.items() if its.startswith(stem)]
            if its.startswith(NARROWER):
                assert words == ("dot", "linear")
            else:
                assert (words[1], words[0]) in set().union(*wider), its
                assert family(words[0]) in family(words[1])


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_networks_compute_the_same_in_every_basis_that_a_spec_allows(name):
    """On inputs of another batch than those that were traced; of tables and inferred specs."""
    model = known_networks.model(name)
    apply = model.apply(model.spec)
    one = jax.tree.map(lambda x: np.asarray(x)[:1], model.inputs)
    found = spec_of(apply, model.params, one).spec
    for spec in (found, model.spec):
        checked = check_spec(spec, apply, model.params, model.inputs, seed=1)
        assert checked.trials
        assert not checked.failed, checked


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "flax resnet"])
def test_the_same_spec_comes_from_another_batch(name):
    model = known_networks.model(name)
    apply = model.apply(model.spec)
    one = jax.tree.map(lambda x: np.asarray(x)[:1], model.inputs)
    assert spec_of(apply, model.params, one).spec == spec_of(apply, model.params, model.inputs).spec


def outcomes(jaxpr, values):
    """Every intermediate of a forward pass, in order."""
    known = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    known |= zip(jaxpr.jaxpr.invars, values, strict=True)
    found = []
    for eqn in alive(jaxpr.jaxpr)[0]:
        ins = [v.val if isinstance(v, Literal) else known[v] for v in eqn.invars]
        if eqn.primitive.name in CALLS:
            outs, more = outcomes(operation(eqn).called, ins)
            found += more
        else:
            outs = operation(eqn).bind(*ins)
            found.append(outs)
        known |= zip(eqn.outvars, outs, strict=True)
    last = [v.val if isinstance(v, Literal) else known[v] for v in jaxpr.jaxpr.outvars]
    return last, found


def is_whole(value):
    """Checks whether a value has a term for each axis: others wait for a cut along the
    first of them."""
    return not any(isinstance(label, Face) for label in value.axes)


def doubled(x):
    """In double precision, unless it holds integers."""
    return jnp.asarray(x, float) if jnp.issubdtype(x.dtype, jnp.inexact) else x


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "t5", "vit", "flax resnet"])
def test_every_intermediate_is_permuted_as_its_labels_say(name):
    """In float64, so that a sum in another order differs by 1e-12 of the largest entry at most."""
    model = known_networks.model(name)
    with jax.enable_x64(True):
        params, inputs = (jax.tree.map(doubled, tree) for tree in (model.params, model.inputs))
        traced = jax.make_jaxpr(model.apply(model.spec))(params, inputs)
        leaves = jax.tree.leaves(params)
        labels = [tuple(Variable(n) for n in x.shape) for x in leaves]
        interpreter = Interpreter(keep=True)
        _run(interpreter, traced, labels)
        values = [Value(own) for own in labels]
        trail = [out for _, outs in interpreter.trail for out in outs if is_whole(out)]
        orders = orders_of(np.random.default_rng(0), [t for v in (*values, *trail) for t in v.axes])
        rest = jax.tree.leaves(inputs)
        shuffled = [jnp.asarray(moved(x, v, orders)) for x, v in zip(leaves, values, strict=True)]
        _, before = outcomes(traced, [*leaves, *rest])
        _, after = outcomes(traced, [*shuffled, *rest])
    assert len(before) == len(interpreter.trail)
    for x, y, (eqn, outs) in zip(before, after, interpreter.trail, strict=True):
        for a, b, value in zip(x, y, outs, strict=True):
            if not is_whole(value):
                continue
            expected = moved(a, value, orders)
            scale = np.abs(expected[np.isfinite(expected)]).max(initial=1.0) if a.size else 1.0
            np.testing.assert_allclose(b, expected, rtol=0, atol=1e-11 * scale, err_msg=str(eqn))
