"""What inference returns, every operation takes: each space is permuted, aligned back, grown and
pruned back, and the network computes the same; or one sentence names the space and the reason."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import slow_unless, soak_unless
from own_kinds import KINDS
from random_networks import random_network

from sail_jax import align, certificate, change_basis, growth, spec_of
from sail_jax.growth.named import METHODS

PRESERVE = [n for n, m in METHODS.items() if m.lossless and not (m.layers or m.prunes)]
COUNT, KEY = 500, jax.random.key(0)


# Their code states sizes: of heads, of the first state, of groups, and that all experts are alike.
STATED = ("attention", "lstm", "recurrence", "grouped", "depthwise", "each expert")


def stated(network, paths):
    """Whether the code itself states the size of a space."""
    blocks = {path.split("/")[0] for path in paths}
    own = [text for k, text in enumerate(network.blocks) if f"{k}" in blocks]
    normed = "in" in paths or any(".g" in path for path in paths)
    return any(word in text for word in STATED for text in own) or (
        "groupnorm" in str(network.blocks) and normed
    )


def distance(a, b):
    return sum(
        float(jnp.sum((x - y) ** 2)) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


def kept(net, params, new, inputs):
    return certificate(lambda p, x: net(p, *x), params, new, inputs).preserved


def law(net, params, inputs, rng, sizes_stated=lambda paths: False):
    """Checks all spaces, each by a random method. Returns how many grew without a loss, how many
    were refused, and whether the planted order was found."""
    spec = spec_of(net, params, *inputs).spec
    inner = [s for s in spec.spaces if not {"outer", "stack"} & {*s.nonlinearity.split()}]
    maps = {s.name: growth.permute(jnp.asarray(rng.permutation(s.size))) for s in inner}
    moved, back_again = change_basis(params, spec, maps), True
    assert kept(net, params, moved, inputs)
    if inner:
        back = change_basis(moved, spec, align.match_weights(params, moved, spec).maps)
        assert kept(net, params, back, inputs)
        before, after = (distance(params, other) for other in (moved, back))
        assert after <= before
        back_again = after <= 1e-3 * before
    grown_spaces = refused = 0
    for k, space in enumerate(inner):
        if sizes_stated({use.path for use in spec.uses(space.name)}):
            continue
        method = PRESERVE[int(rng.integers(len(PRESERVE)))]
        size = int(space.size * (1.5, 2)[k % 2] + 0.5)
        asked = {space.name: size}
        try:
            large, made = growth.grow(params, {}, asked, method, rules=spec, key=KEY)
        except ValueError as error:
            # It names the space, and no other one.
            assert space.name in re.findall(r"'([^']+)'", str(error)), error  # noqa: PT017
            refused += 1
            continue
        if made.report.lost:
            continue
        assert kept(net, params, large, inputs), (space, method, size)
        grown_spaces += 1
        rules = made.spec.resized(made.maps)
        small, pruned = growth.grow(large, {}, {space.name: space.size}, "magnitude", rules=rules)
        if not pruned.report.lost:
            assert kept(net, params, small, inputs), (space, method, size)
    return grown_spaces, refused, back_again


def random_law(seed):
    network, rng = random_network(seed), np.random.default_rng([seed, 7])
    x = jnp.asarray(rng.normal(size=(2, 5, 3)), jnp.float32)
    if not jnp.isfinite(network.apply(network.params, x)).all():
        return 0, 0, True  # it overflows in float32
    return law(network.apply, network.params, [x], rng, lambda paths: stated(network, paths))


@pytest.mark.parametrize("kind", [slow_unless(k == "hyper_network", k) for k in KINDS])
def test_spaces_of_networks_of_many_kinds_are_moved_grown_and_pruned(kind):
    net, params, inputs, fixed = KINDS[kind]()
    rng = np.random.default_rng([5, len(kind)])
    law(net, params, inputs, rng, lambda paths: bool(paths & {*fixed}))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [soak_unless(seed < 6, seed) for seed in range(12)])
def test_spaces_of_a_random_network_are_moved_grown_and_pruned(seed):
    random_law(seed)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))
def test_spaces_of_many_random_networks_are_moved_grown_and_pruned(part):
    """Of 500 networks; coordinate descent may end elsewhere than in the planted order."""
    counts = [random_law(seed) for seed in range(part * COUNT // 10, (part + 1) * COUNT // 10)]
    grown, refused, back_again = np.sum(counts, 0)
    assert grown > refused
    assert back_again >= 0.95 * len(counts)
