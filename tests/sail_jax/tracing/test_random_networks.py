"""Random small networks: the inferred spec must be correct, and equal the known one.

Each equation is necessary: without it, an allowed map changes some network.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from cells import slow_unless, soak_unless
from random_networks import random_network

from sail_jax import check_spec, spec, spec_of
from sail_jax.basis.families import Family
from sail_jax.tracing.algebra import Algebra, Change

SEEDS = range(60)


def inferred(network, seed):
    """The spec from one batch and length, and inputs of another."""
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(2, 5, 3)), jnp.float32)
    return spec_of(network.apply, network.params, x[:1, :4]), x


def is_free(found, path, axis):
    spaces = (found.spec.space(f.space) for f in found.spec.axes(path)[axis])
    return any("outer" not in space.nonlinearity for space in spaces)


@pytest.mark.parametrize("seed", [slow_unless(seed < 10, seed) for seed in SEEDS])
def test_axes_that_are_free_are_found_free(seed):
    network = random_network(seed)
    found, _ = inferred(network, seed)
    assert found.unknown == found.unused == ()
    fixed = [where for where in network.free if not is_free(found, *where)]
    assert not fixed, network.blocks
    for group in network.apart:
        spaces = [{f.space for f in found.spec.axes(path)[axis]} for path, axis in group]
        assert len(set().union(*spaces)) == sum(map(len, spaces)), (network.blocks, group)
    words = {space.name: space.nonlinearity for space in found.spec.spaces}
    sizes = {space.name: space.size for space in found.spec.spaces}
    # What undoes the factor of a tied leaf is only known from the equations.
    known = replace(found.spec, ties=())
    assert spec(network.params, found.rules, spaces=words, sizes=sizes) == known


@pytest.mark.slow
@pytest.mark.parametrize("seed", [soak_unless(seed < 10, seed) for seed in SEEDS])
def test_a_random_network_computes_the_same_in_every_basis_that_its_spec_allows(seed):
    """The tolerance is the certificate's: ten times the change when every parameter is rounded."""
    network = random_network(seed)
    found, x = inferred(network, seed)
    checked = check_spec(found.spec, network.apply, network.params, x, seed=seed)
    assert checked.trials
    assert not checked.failed, (network.blocks, checked.failed)
    # Heads and groups are numbers in its code, so that copies of them would be a different network.
    plain = "attention" not in str(network.blocks) and "groupnorm" not in str(network.blocks)
    if plain:
        copied = check_spec(
            found.spec, network.apply, network.params, x, resized=lambda _: network.apply, seed=seed
        )
        assert not copied.failed, (network.blocks, copied.failed)


def drawn(**shapes):
    rng = np.random.default_rng(3)
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def one_layer(act, **more):
    """A network of which one space goes through a function."""

    def net(p, x):
        return act(p, x @ p["in"]) @ p["out"]

    return net, drawn(**{"in": (3, 6), "out": (6, 2)}, **more)


# For each part of an equation or event, the network that requires it.
NEEDED = {
    "scale of a curve": one_layer(lambda p, h: jnp.tanh(h)),
    "sign of a curve": one_layer(lambda p, h: jnp.maximum(h, 0)),
    "sum": one_layer(lambda p, h: h * h.sum(-1, keepdims=True)),
    "mean": one_layer(lambda p, h: h - h.mean(-1, keepdims=True)),
    "square": one_layer(lambda p, h: h * (h * h).mean(-1, keepdims=True)),
    "norm": one_layer(lambda p, h: h / jnp.sqrt((h * h).sum(-1, keepdims=True))),
    "product": one_layer(lambda p, h: h * (h @ p["w"]), w=(6, 6)),
    "number": one_layer(lambda p, h: h * (h.argmax(-1)[:, None] == jnp.arange(h.shape[-1]))),
    "magnitude": one_layer(lambda p, h: jnp.abs(h)),
    "quotient": one_layer(lambda p, h: h / (h @ p["w"]), w=(6, 6)),
}


def failures(net, params, **change):
    x = jnp.asarray(np.random.default_rng(4).normal(size=(7, 3)), jnp.float32)
    found = spec_of(net, params, x[:2])
    return check_spec(found.spec, net, params, x, resized=lambda _: net).failed


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDED)
def test_networks_that_need_an_equation_are_right_with_it(name):
    net, params = NEEDED[name]
    assert not failures(net, params)


def without_change(change):
    state = Algebra._state

    def weaker(self, of, factors, change_=Change.ALL, share=0):
        kept = change_ & ~change if len(of) == 1 else change_
        if kept:
            state(self, of, factors, kept, share)

    return {"_state": weaker}


def without_events(family):
    event = Algebra._event

    def weaker(self, of, parametric, needed, **more):
        event(self, of, parametric, needed & ~family, **more)

    return {"_event": weaker}


def nothing(*names):
    return dict.fromkeys(names, lambda self, *args, **more: args[0] if args else None)


BROKEN = {
    "scale of a curve": (without_change(Change.SCALE), "scale of a curve"),
    "sign of a curve": (without_change(Change.SIGN), "sign of a curve"),
    "events of curves": (without_events(Family.MONOMIAL), "scale of a curve"),
    "sums": (nothing("summed"), "sum"),
    "means": (nothing("averaged"), "mean"),
    "means of squares": (nothing("squares"), "square"),
    "norms": (without_events(Family.ISOMETRIC), "norm"),
    "numbers of units": (nothing("counted"), "number"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_network_is_changed_where_an_equation_is_missing(name, monkeypatch):
    change, needed = BROKEN[name]
    for method, weaker in change.items():
        monkeypatch.setattr(Algebra, method, weaker)
    net, params = NEEDED[needed]
    assert failures(net, params)
