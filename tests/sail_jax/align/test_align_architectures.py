"""Whole networks of every known architecture: hidden transformations are recovered.

The models are those of `test_architectures`: a configuration, tensors by name, a forward pass.
"""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import slow, soak, soak_unless
from known_networks import BASES, HEADS, NAMES, certify, inner, model

from sail_jax import align, growth
from sail_jax.align.blocks import nested
from sail_jax.basis.change_basis import unfused
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap
from sail_jax.basis.spaces import spec

O = Family.ORTHOGONAL


# One head of each kind.
SLOW_HEADS = ["LlamaForSequenceClassification", "BertForSequenceClassification"]
SLOW_HEADS += ["RobertaForSequenceClassification", "CLIPModel", "ViTForMaskedImageModeling"]


def silent(s):
    """Leaves that read and write the same space, such as BERT's head, which have no influence."""
    new, _ = unfused(s)
    return {
        path: 0.0
        for path, axes in new.leaves
        for names in [[f.space for axis in axes for f in axis]]
        if len(names) > len(set(names))
    }


def draw(random, n, rotate) -> SpaceMap:
    if rotate:
        return growth.rotate(np.linalg.qr(random.normal(size=(n, n)))[0].astype(np.float32))
    return growth.permute(random.permutation(n))


def hide(m, within, rotated=(), seed=0):
    """Transforms every inner space, and those within blocks differently in each block."""
    random, maps = np.random.default_rng(seed), {}
    for space in inner(m):
        count = m.spec.space(within[space.name]).size if space.name in within else 0
        each = [draw(random, space.size, space.name in rotated) for _ in range(count or 1)]
        maps[space.name] = jax.tree.map(lambda *x: np.stack(x), *each) if count else each[0]
    return maps, change_blocks(m.params, m.spec, maps, within)


def change_blocks(params, s, maps, within):
    """Changes the basis of blocks, as one program."""
    return jax.jit(lambda p, maps: align.change_blocks(p, s, maps, within))(params, maps)


def undone(found, hidden):
    """Returns, for each unit, the unit in its position after both permutations."""
    return np.asarray(hidden.index)[np.asarray(found.index)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(soak_unless(n in ("gpt2", "flax mlp"), n) for n in NAMES),
        *(soak_unless(n in SLOW_HEADS, n) for n in HEADS if n not in BASES),
    ],
)
def test_hidden_permutations_are_recovered(name):
    """Permutations of hidden units, channels, heads, kv groups, units within each head, and
    the stream."""
    m = model(name)
    within = nested(m.spec)
    hidden, moved = hide(m, within)
    differs = jax.tree.map(lambda a, b: np.any(a != np.asarray(b)), m.params, moved)
    assert any(jax.tree.leaves(differs))
    assert certify(name, m.params, m.spec, moved, m.spec).preserved
    found = align.match_weights(m.params, moved, m.spec, within=within, weights=silent(m.spec))
    for space in inner(m):
        if space.name not in within and space.name not in within.values():
            index = undone(found.maps[space.name], hidden[space.name])
            np.testing.assert_array_equal(index, np.arange(space.size))
    back = change_blocks(moved, m.spec, found.maps, within)
    chex.assert_trees_all_equal(back, m.params)  # gathers: to the last bit


WITHIN = {
    "gpt2": {"qk.0": "head.0", "v.0": "head.0"},
    "llama": {"group.0": "head.0", "v.0": "head.0"},  # rotary positions: units of qk stay
    "qwen3": {"group.0": "head.0", "v.0": "head.0"},
    "bert": {"qk.0": "head.0", "v.0": "head.0"},
    "vit": {"qk.0": "head.0", "v.0": "head.0"},
    "clip": {f"{t}.{s}.0": f"{t}.head.0" for t in ("text", "vision") for s in ("qk", "v")},
    "t5": {
        **{f"{t}.{s}.0": f"{t}.head" for t in ("encoder", "decoder") for s in ("qk", "v")},
        **{f"cross.{s}.0": "cross.head.0" for s in ("qk", "v")},
    },
    "flax gpt": {"qk.0": "head.0", "v.0": "head.0"},
    "flax mlp": {},
    "flax resnet": {},
}


@pytest.mark.parametrize("name", WITHIN)
def test_what_lies_within_what_is_derived(name):
    found = nested(model(name).spec)
    assert {k: v for k, v in found.items() if re.search(r"\.0$", k)} == WITHIN[name]


def test_a_stack_and_experts_are_blocks():
    shapes = {"in": (3, 2, 4, 6), "out": (3, 2, 6, 4), "router": (3, 4, 2)}
    shapes |= {"embed": (5, 4), "head": (4, 5)}
    axes = {"in": "layer expert resid* hidden", "out": "layer expert hidden* resid"}
    axes |= {"router": "layer resid* expert", "embed": "x* resid", "head": "resid* x"}
    spaces = {"x": "outer", "layer": "stack"}
    s = spec({k: np.zeros(v) for k, v in shapes.items()}, axes, spaces=spaces | {"expert": "stack"})
    assert nested(s) == {"hidden": "layer"}


ROTATED = {
    "gpt2": ["qk.0", "v.1"],
    "llama": ["v.0", "v.1"],
    "t5": ["encoder.qk.0", "cross.v.1"],
    "flax gpt": ["qk.0", "v.0"],
    "clip": ["text.v.0", "vision.v.0"],
}


@pytest.mark.parametrize("name", [*slow("gpt2"), *soak(*(n for n in ROTATED if n != "gpt2"))])
def test_hidden_rotations_are_recovered(name):
    """Head by head, if the computation of a head commutes with rotations."""
    m, rotated = model(name), ROTATED[name]
    within = nested(m.spec)
    _, moved = hide(m, within, rotated)
    assert certify(name, m.params, m.spec, moved, m.spec).preserved
    family = dict.fromkeys(rotated, O)
    found = align.match_weights(m.params, moved, m.spec, within=within, family=family)
    back = change_blocks(moved, m.spec, found.maps, within)
    assert found.distance[-1] < 1e-8  # relative to norms: float32 products, errors of eps
    assert certify(name, moved, m.spec, back, m.spec).preserved


def test_rotary_units_are_told_apart():
    m = model("llama")
    for family in (Family.PERMUTATION, O, Family.LINEAR):
        with pytest.raises(ValueError, match=r"'qk.0' cannot be matched by .*rotary"):
            align.weight_matching(m.params, m.params, m.spec, spaces=["qk.0"], family=family)


@pytest.mark.slow
def test_scales_of_queries_and_keys():
    """An invertible map of a head's queries, with its inverse in the keys, preserves logits."""
    m = model("gpt2")
    A = np.eye(4) + 0.2 * np.random.default_rng(0).normal(size=(4, 4))
    hidden = {"qk.0": SpaceMap(jnp.asarray(A), jnp.asarray(np.linalg.inv(A)), Family.INVERTIBLE)}
    moved = change_blocks(m.params, m.spec, hidden, {})
    assert certify("gpt2", m.params, m.spec, moved, m.spec).preserved
    options = {"spaces": ["qk.0"], "family": Family.LINEAR}
    found = align.match_weights(m.params, moved, m.spec, **options)
    back = change_blocks(moved, m.spec, found.maps, {})
    assert found.distance[-1] < 1e-8
    assert certify("gpt2", moved, m.spec, back, m.spec).preserved
    with pytest.raises(ValueError, match=r"'hidden.0' cannot be matched"):
        align.match_weights(m.params, moved, m.spec, spaces=["hidden.0"], family=Family.LINEAR)


@pytest.mark.slow
def test_rotation_of_a_stream_whose_scales_are_folded():
    m = model("llama")
    params, rules = m.rules.fold(m.params)
    s = rules.spec(params)
    random = np.random.default_rng(3)
    hidden = {"resid": draw(random, s.space("resid").size, True)}
    moved = change_blocks(params, s, hidden, {})
    assert certify("llama", m.params, m.spec, moved, s).preserved
    found = align.match_weights(params, moved, s, family={"resid": O})
    assert found.distance[-1] < 1e-8
    with pytest.raises(ValueError, match=r"the gain .* fold the gain"):
        align.match_weights(m.params, m.params, m.spec, family={"resid": O})
    tied = model("qwen2")
    scales = {"resid": Family.POSITIVE_MONOMIAL}
    with pytest.raises(ValueError, match="'resid' cannot be matched by positive monomial"):
        align.match_weights(tied.params, tied.params, tied.spec, family=scales)


def test_scales_fold_into_fused_readers():
    random = np.random.default_rng(0)
    shapes = {"embed": (5, 4), "norm": (4,), "fused": (4, 6), "head": (6, 5)}
    params = {k: np.float32(random.normal(size=v)) for k, v in shapes.items()}
    axes = {"embed": "x* resid", "norm": "diag(resid)", "fused": "resid* (a + b)"}
    axes |= {"head": "(a + b)* x"}
    spaces = {"x": "outer", "resid": "rmsnorm", "{a,b}": "linear"}
    s = spec(params, axes, spaces=spaces, sizes={"a": 2})
    folded, free = align.fold_scales(params, s)
    chex.assert_trees_all_equal(folded["fused"], params["norm"][:, None] * params["fused"])
    assert not [use for use in free.uses("resid") if use.role == "gain"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_head_that_reads_and_writes_the_stream_counts_for_both(name):
    m = model(name)
    maps, moved = hide(m, {})
    found = align.weight_matching(m.params, moved, m.spec)
    chex.assert_trees_all_equal(change_blocks(moved, m.spec, found, {}), m.params)
    assert set(found) == set(maps)


@pytest.mark.slow
def test_weights_name_fused_leaves_whole_or_by_block():
    m = model("gpt2")
    path = next(p for p in m.params if p.endswith("0.attn.c_attn.weight"))
    _, moved = hide(m, {})
    whole = align.match_weights(m.params, moved, m.spec, weights={path: 2.0}, max_sweeps=0)
    parts = {f"{path}[{k}]": 2.0 for k in range(3)}
    apart = align.match_weights(m.params, moved, m.spec, weights=parts, max_sweeps=0)
    other = align.match_weights(m.params, moved, m.spec, max_sweeps=0, init={})
    assert whole.distance == apart.distance
    assert other.distance[0] > 0
    with pytest.raises(ValueError, match="the spec has no leaf 'c_attn'"):
        align.match_weights(m.params, moved, m.spec, weights={"c_attn": 1.0})


@pytest.mark.soak
def test_fused_leaves_in_the_other_aligners():
    m = model("gpt2")
    maps, moved = hide(m, {})
    common = align.match_many([m.params, moved], m.spec)
    for name, one in common.maps[1].items():
        np.testing.assert_array_equal(undone(one, maps[name]), np.arange(one.old))
    x = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    index = np.asarray(maps["resid"].index)
    found = align.activation_matching({"resid": x}, {"resid": x[:, index]}, m.spec)
    np.testing.assert_array_equal(undone(found["resid"], maps["resid"]), np.arange(8))

    def loss(params, x):
        del x
        return jnp.sum(jnp.stack([jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)]))

    learnt = align.straight_through(m.params, moved, m.spec, loss, [None], within=nested(m.spec))
    back = change_blocks(moved, m.spec, learnt.maps, nested(m.spec))
    chex.assert_trees_all_equal(back, m.params)


class Unread:
    """A leaf that counts how often it is read."""

    def __init__(self, x, counts, name):
        self.x, self.shape, self.dtype = np.asarray(x), x.shape, x.dtype
        self.counts, self.name = counts, name

    def __array__(self, dtype=None, copy=None):
        self.counts[self.name] = self.counts.get(self.name, 0) + 1
        return self.x.astype(dtype or self.dtype)

    def __getitem__(self, index):
        return Unread(self.x[index], self.counts, self.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [soak_unless(n == "gpt2", n) for n in ("gpt2", "llama", "flax resnet")]
)
def test_leaves_that_are_read_when_needed(name):
    m = model(name)
    within = nested(m.spec)
    _, moved = hide(m, within)
    expected = align.match_weights(m.params, moved, m.spec, within=within)
    for keep in (None, 0, 1000):
        counts = {}
        lazy = [
            jax.tree.map_with_path(
                lambda p, x, k=k, c=counts: Unread(x, c, f"{k}{jax.tree_util.keystr(p)}"), tree
            )
            for k, tree in enumerate((m.params, moved))
        ]
        found = align.match_weights(lazy[0], lazy[1], m.spec, within=within, keep=keep)
        chex.assert_trees_all_equal(found.maps, expected.maps)
        assert (max(counts.values()) > 5) == (keep is not None)
