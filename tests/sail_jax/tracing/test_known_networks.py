"""Inferred specs beside the hand-written tables, and both against runs of the networks."""

from functools import reduce
from operator import or_

import jax
import known_networks
import numpy as np
import pytest

from sail_jax import check_spec, spec_of
from sail_jax.basis.families import NONLINEARITIES, Family

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


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.slow
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


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "flax resnet"])
def test_the_same_spec_comes_from_another_batch(name):
    model = known_networks.model(name)
    apply = model.apply(model.spec)
    one = jax.tree.map(lambda x: np.asarray(x)[:1], model.inputs)
    assert spec_of(apply, model.params, one).spec == spec_of(apply, model.params, model.inputs).spec
