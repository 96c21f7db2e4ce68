"""Transforms entry by entry: exact counts, ties, elections, masks, and how they combine."""

import functools
import math
import os
import random
import subprocess
import sys
import textwrap
from fractions import Fraction

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import of_law
from merge_cases import compilations, streamed

from sail_jax import Merge
from sail_jax.merging import (
    arithmetic,
    combining,
    counting,
    engine,
    leafwise,
    random_bits,
    ranking,
    reductions,
    work,
)
from sail_jax.merging.combining import chain, from_function, masked
from sail_jax.merging.leafwise import Binned, Whole
from sail_jax.merging.steps import Piece, kernel
from sail_jax.merging.task_vectors import TaskVectors
from sail_jax.merging.transforms import drop, elect, keep_between, rescale_l1, trim

KEY = jax.random.key(0)
M = 3
SCOPES = ["tree", "tensor"]
TRANSFORMS = {
    "trim tree": trim(0.4),
    "trim tensor": trim(0.4, "tensor"),
    "elect": elect(),
    "elect weighted +": elect("weighted", "positive"),
    "elect count majority": elect("count", "majority"),
    "drop": drop(0.3, KEY),
    "masked": masked(trim(0.3), "b*"),
    "chain": chain(drop(0.2, KEY), trim(0.5), elect(tie="majority")),
}


def law(i):
    """Parametrises the i-th of three laws over the names of transforms."""
    return pytest.mark.parametrize("name", of_law(i, 3, TRANSFORMS))


def vectors(coarse=False, weights=(1.0, 2.0, 0.5)):
    """Leaves "a", "b/c", "b/d"; coarse deltas lie on a grid of nine values, so ties abound."""
    shapes = {"a": (5, 4), "b": {"c": (5, 4), "d": (4,)}}
    rng = np.random.default_rng(1)

    def draw(shape):
        x = rng.integers(-4, 5, (M, *shape)) / 8 if coarse else rng.normal(size=(M, *shape))
        return jnp.asarray(x, jnp.float32)

    delta = jax.tree.map(draw, shapes, is_leaf=lambda s: isinstance(s, tuple))
    w = jnp.array(weights)
    weight = jax.tree.map(lambda d: w.reshape(M, *(1,) * (d.ndim - 1)), delta)
    return TaskVectors(delta, weight)


def full(vectors):
    """[task, entries] of delta and of weight, leaves in path order."""
    d = jax.tree.leaves(vectors.delta)
    w = [
        jnp.broadcast_to(w, x.shape)
        for w, x in zip(jax.tree.leaves(vectors.weight), d, strict=True)
    ]
    return tuple(np.concatenate([np.asarray(x).reshape(M, -1) for x in xs], 1) for xs in (d, w))


# --- trim


@pytest.mark.slow
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("coarse", [False, True])
def test_trim_keeps_exactly_k_the_largest_first_come_first_kept(scope, coarse):
    before = vectors(coarse)
    for density in (0.001, 0.1, 0.2, 0.5, 0.57, 0.99, 1.0):
        got = trim(density, scope)(before)
        leaves = [got] if scope == "tree" else [TaskVectors(d, w) for d, w in zip(
            jax.tree.leaves(got.delta), jax.tree.leaves(got.weight), strict=True)]  # fmt: skip
        for leaf in leaves:
            delta, weight = full(leaf)
            k = max(1, int(np.floor(density * delta.shape[1] + 0.5)))
            order = np.argsort(-np.abs(delta), axis=1, kind="stable")[:, :k]
            kept = np.zeros(delta.shape, bool)
            np.put_along_axis(kept, order, True, axis=1)
            assert (kept.sum(1) == k).all()
            np.testing.assert_array_equal(weight != 0, kept)
            np.testing.assert_array_equal(
                weight[:, :1][kept[:, :1]], np.array([1, 2, 0.5])[kept[:, 0]]
            )
        chex.assert_trees_all_equal(got.delta, before.delta)


@pytest.mark.slow
def test_ties_go_by_path_as_a_string_then_by_index():
    """All entries are equal: "10" precedes "2", and "a" precedes "a/b", in any tree."""
    delta = {"2": jnp.ones((1, 2)), "10": jnp.ones((1, 3)), "a": {"b": jnp.ones((1, 2, 2))}}
    kept = trim(6 / 9)(TaskVectors(delta, jax.tree.map(jnp.ones_like, delta))).weight
    assert kept["10"].tolist() == [[1, 1, 1]]
    assert kept["2"].tolist() == [[1, 1]]
    assert kept["a"]["b"].tolist() == [[[1, 0], [0, 0]]]


def test_masked_entries_take_no_place():
    delta = {"a": jnp.array([[9.0, 8.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]])}
    weight = {"a": jnp.array([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])}
    kept = trim(0.25)(TaskVectors(delta, weight)).weight["a"]
    assert kept.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]


def test_negative_weights_count_too():
    kept = trim(0.5)(TaskVectors({"a": jnp.array([[1.0, -2.0]])}, {"a": jnp.array([[-1.0]])}))
    assert kept.weight["a"].tolist() == [[0, -1]]


def test_special_magnitudes():
    """-0, subnormals, powers of two and the largest float are ordered like numbers."""
    tiny, big = np.float32(1e-45), np.finfo(np.float32).max
    values = np.array([[-0.0, tiny, -3 * tiny, 1e-30, 1.0, -2.0, 2.5, -big]], np.float32)
    for k in range(1, 9):
        kept = trim(k / 8)(TaskVectors({"a": jnp.array(values)}, {"a": jnp.ones((1, 1))}))
        assert kept.weight["a"].tolist() == [[0.0] * (8 - k) + [1.0] * k]


@pytest.mark.slow
def test_float64_magnitudes_are_not_rounded():
    """1 + 1e-12 exceeds 1, even if 1 is in a float32 leaf that comes first."""
    with jax.enable_x64(True):
        delta = {"a": jnp.ones((1, 3), jnp.float32), "b": jnp.array([[1.0, 1.0 + 1e-12]])}
        kept = trim(1 / 5)(TaskVectors(delta, jax.tree.map(lambda d: jnp.ones((1, 1)), delta)))
        assert kept.weight["a"].tolist() == [[0, 0, 0]]
        assert kept.weight["b"].tolist() == [[0, 1]]


def test_trim_refuses():
    for density in (0, 1.5, np.nan, None):
        with pytest.raises(ValueError, match=r"density: expected .* in \(0, 1\]"):
            trim(density)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"scope: expected one of .* got 'global'"):
        trim(0.5, "global")  # pyright: ignore[reportArgumentType]


# --- ranking


def value(w):
    assert int(w.lo) < 2**16
    return int(w.hi) * 2**16 + int(w.lo)


def test_wide_counts_agree_with_integers():
    draw = random.Random(0)
    numbers = [0, 1, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**40 + 5]
    numbers += [draw.randrange(2**47) for _ in range(20)]
    for a in numbers:
        assert value(counting.wide(a)) == a
        for b in numbers:
            x, y = counting.wide(a), counting.wide(b)
            with np.errstate(over="ignore"):  # words without a sign wrap
                assert value(counting.add(x, y)) == a + b
                assert bool(counting.less(x, y)) == (a < b)
                assert a < b or value(counting.subtract(x, y)) == a - b


def test_numbers_of_entries_of_traced_fractions_are_exact():
    """Fractions in float32, compared with rational arithmetic and with static ones in float64."""
    draw = random.Random(0)
    some = [1.0, 0.5, 0.3, 0.7, 1e-7, 1e-30, *((k + 0.5) / 999 for k in range(9))]
    parts = np.array([*some, *(draw.random() * 2.0 ** -(k % 40) for k in range(80))], np.float32)
    for size, half in ((999, True), (2**29 - 3, False), (2**48 - 1, True), (2**31 + 11, False)):
        got = jax.device_get(counting.of_size(jnp.asarray(parts), size, half))
        want = [math.floor(Fraction(float(x)) * size + Fraction(half, 2)) for x in parts]
        assert (got.hi.astype(int) * 2**16 + got.lo).tolist() == want
        if size < 2**29:  # the products of float64 are exact
            chex.assert_trees_all_equal(got, counting.of_size(parts.astype(float), size, half))


def ranked(keys, ranks, visit=Whole, ties=True):
    """Returns the thresholds of some ranks, and the keys that they select."""
    order = ranking.Order(
        kernel(lambda piece, delta, weight: delta),
        sized=kernel(lambda size: tuple(counting.wide(rank) for rank in ranks)),
        ties=ties,
    )

    @jax.jit
    def found(keys):
        leaf = visit(Piece(np.zeros(4, np.uint32)), keys, jnp.ones(1))
        thresholds, own = order.find(leaf, (), order.prepare(keys[0].size))
        pairs = zip(thresholds, *own, strict=True)
        return thresholds, [ranking.take(keys, *pair) for pair in pairs if ties]

    return jax.device_get(found(np.asarray(keys, np.uint32)))


@pytest.mark.slow
def test_the_example_of_the_module():
    (found,), (taken,) = ranked([[0b0110, 0b1001, 0b0110, 0b0101]], [2], Binned)
    assert (found.key.item(), found.rank.hi.item(), found.rank.lo.item()) == (0b0110, 0, 1)
    assert taken.tolist() == [[True, True, False, False]]


@pytest.mark.slow
@pytest.mark.parametrize("visit", [Whole, Binned], ids=["bit by bit", "in bins"])
def test_thresholds_are_those_of_a_sort(visit):
    """Tests few keys with many ties, and keys over the whole range, for two tasks at once."""
    size = leafwise.SMALL + 1 if visit is Binned else 999
    rng = np.random.default_rng(8)
    keys = np.stack([rng.integers(7, 10, size), rng.integers(0, 2**32, size)]).astype(np.uint32)
    ranks = [1, size // 2, size]
    found, _ = ranked(keys, ranks, visit, ties=False)
    _, taken = ranked(keys, ranks, visit)
    order = np.argsort(-keys.astype(np.int64), axis=1, kind="stable")
    for rank, threshold, mask in zip(ranks, found, taken, strict=True):
        for task in range(2):
            assert threshold.key[task] == keys[task, order[task, rank - 1]]
            np.testing.assert_array_equal(np.flatnonzero(mask[task]), np.sort(order[task, :rank]))


@pytest.mark.soak
def test_another_traced_density_compiles_nothing(caplog):
    """Nor do other static ones outside of `jit`. Both keep the same entries, as does `vmap`."""
    given = vectors(coarse=True)

    def kept(density, gamma):
        return chain(trim(density), keep_between(density, gamma))(given).weight

    program = jax.jit(kept)
    for first, points in ((True, [0.5, 0.25]), (False, [0.1, 0.0]), (False, [1.0, 0.75])):
        density, gamma = points
        traced, static = [], []
        compiled = compilations(caplog, lambda: traced.append(program(density, gamma)))  # noqa: B023
        assert len(compiled) == first
        assert first == bool(compilations(caplog, lambda: static.append(kept(density, gamma))))  # noqa: B023
        chex.assert_trees_all_equal(traced, static)
    several = jnp.array([0.5, 0.1, 1.0])
    mapped = jax.vmap(lambda density: kept(density, 0.0))(several)
    for k, density in enumerate(several):
        chex.assert_trees_all_equal(jax.tree.map(lambda x, k=k: x[k], mapped), kept(density, 0.0))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 16])
def test_histogram_counts_digits_under_a_head(bits):
    top = 2 ** (bits + 2)
    keys = np.random.default_rng(0).integers(0, top, (2, 30, 50)).astype(np.uint32)
    count = functools.partial(ranking.histogram, jnp.array(keys), bits=bits)
    high = count(jnp.zeros(2, jnp.uint32), jnp.uint32(bits))
    low = count(jnp.array([1, 3], jnp.uint32), jnp.uint32(0))
    for task, head in enumerate([1, 3]):
        flat = keys[task].ravel()
        np.testing.assert_array_equal(high.lo[task], np.bincount(flat >> bits, minlength=2**bits))
        under = flat[flat >> bits == head] & (2**bits - 1)
        np.testing.assert_array_equal(low.lo[task], np.bincount(under, minlength=2**bits))


@pytest.mark.slow
def test_histogram_by_sorting_is_that_by_scattering():
    """Runs the algorithm for accelerators on the CPU."""
    digit = jnp.asarray(np.random.default_rng(1).integers(0, 256, 5000), jnp.int32)
    counts = digit % 3 != 0
    np.testing.assert_array_equal(
        ranking._sorted_counts(digit, counts, 256), ranking._scattered(digit, counts, 256)
    )


@pytest.mark.slow
def test_next_digit_beyond_32_bits():
    """A model of 10^13 entries: the digit of rank k and the rank left, against int64."""
    rng = np.random.default_rng(2)
    counts = rng.integers(0, 2**28, (1, 2**16))
    split = counting.Wide(*map(jnp.asarray, counting.wide(counts)))
    reach = np.cumsum(counts[0, ::-1])[::-1]
    assert reach[0] > 2**42
    for k in (1, 10**6, 2**32, 2**32 + 1, 5 * 10**12, int(reach[0])):
        rank = counting.Wide(*map(jnp.asarray, counting.wide(np.array([k]))))
        found = ranking._next_digit(ranking.Threshold(jnp.zeros(1, jnp.uint32), rank), split)
        digit = np.flatnonzero(reach >= k).max()
        assert int(found.key[0]) == digit
        left = jax.tree.map(lambda x: x[0], found.rank)
        assert value(left) == k - (reach[digit] - counts[0, digit])


def test_leaves_too_large_to_count_are_refused():
    leaf = jax.ShapeDtypeStruct((1, 2**16, 2**16), jnp.uint32)
    with pytest.raises(ValueError, match=r"expected < 2\*\*32 entries"):
        jax.eval_shape(lambda k: ranking.histogram(k, jnp.zeros(1, "uint32"), jnp.uint32(0)), leaf)


@pytest.mark.slow
def test_the_first_of_equal_keys_are_taken():
    """Equal keys in several leaves, as many as are wanted in order, against a running sum."""
    rng, take = np.random.default_rng(5), jax.jit(ranking.take)
    leaves = [rng.integers(0, 3, (2, rows, 7)) for rows in (1, 4, 3)]
    leaves += [rng.integers(0, 3, (2, n)) for n in (1, 5, 2**14)]
    flat = np.concatenate([(leaf == 1).reshape(2, -1) for leaf in leaves], 1)
    for wanted in ([0, 1], [3, 8], flat.sum(1).tolist(), [*flat.sum(1)[:1], flat[1].sum() + 5]):
        rank = counting.Wide(*map(jnp.asarray, counting.wide(np.array(wanted))))
        found, before, taken = (
            ranking.Threshold(jnp.ones(2, jnp.uint32), rank),
            np.zeros(2, int),
            [],
        )
        for leaf in leaves:
            earlier = counting.Wide(*map(jnp.asarray, counting.wide(before)))
            got = take(leaf.astype(np.uint32), found, earlier)
            np.testing.assert_array_equal(np.asarray(got)[leaf == 2], True)
            taken.append((np.asarray(got) & (leaf == 1)).reshape(2, -1))
            before += (leaf == 1).reshape(2, -1).sum(1)
        first = flat & (flat.cumsum(1) <= np.array(wanted)[:, None])
        np.testing.assert_array_equal(np.concatenate(taken, 1), first)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 16])
def test_digits_of_any_width_find_the_same(bits, monkeypatch):
    """Pieces one after another with histograms, against the loop of a trace bit by bit. Quarters
    below 2 and 64 times as much add up exactly."""
    delta = np.random.default_rng(7).integers(-5, 6, (2, 3000)).astype(np.float32) / 4
    merge, weights = Merge(trim([0.3, 0.6])), [1.0, 64.0]
    models, base = [{"a": x} for x in delta], {"a": np.zeros(3000, np.float32)}
    want = jax.jit(lambda *given: merge(*given, weights=weights))(models, base)
    monkeypatch.setattr(engine, "tree_bits", lambda works: bits)
    for name, value in {"ENTRIES": 1024, "SOME": 512, "FEW": 256}.items():
        monkeypatch.setattr(work, name, value)
    got, _ = streamed(merge, models, base, weights)
    np.testing.assert_array_equal(got["a"], want["a"])
    assert len(np.unique(want["a"])) > 40


@pytest.mark.parametrize("seed", [0, 7, 2**31 - 1])
def test_keys_are_those_of_jax(seed):
    """Records of outputs contain a seed, so its draws must never change."""
    found, known = random_bits.key(seed), jax.random.key(seed)
    assert found.dtype == known.dtype
    assert jax.random.key_data(found).tolist() == jax.random.key_data(known).tolist()
    with pytest.raises(ValueError, match=r"seed: expected 0 <= seed < 2\*\*64, got -1"):
        random_bits.key(-1)


@pytest.mark.parametrize("size", [1.0, 2.0**-30, 2.0**30])
def test_weights_cancel_against_their_own_size(size):
    """At any size, 1 + 3 is a sum, and what 1 + eps leaves of 1 is a rounding error."""
    delta = {"a": jnp.array([[3.0, 3.0], [7.0, 7.0]])}
    weight = {"a": size * jnp.array([[1, 1 + jnp.finfo(jnp.float32).eps], [3, -1]])}
    assert reductions.weighted_mean(TaskVectors(delta, weight))["a"].tolist() == [6, 0]


def test_l1_norms_are_restored_over_a_tensor_or_over_the_tree():
    delta = {"a": jnp.array([[1.0, 3.0]]), "z": jnp.array([[4.0, 8.0]])}
    weight = {"a": jnp.array([[0.0, 1.0]]), "z": jnp.array([[1.0, 0.0]])}
    vectors = TaskVectors(delta, weight)
    alone, together = (rescale_l1(scope)(vectors).delta for scope in ("tensor", "tree"))
    assert [alone["a"][0, 1], alone["z"][0, 0]] == [4.0, 12.0]  # by 4 / 3 and by 12 / 4
    np.testing.assert_allclose([together["a"][0, 1], together["z"][0, 0]], [48 / 7, 64 / 7], 1e-6)


# --- elect


def election(columns, weights=None, **options):
    """Returns the remaining weights, for one column of deltas per entry."""
    delta = jnp.array(columns, jnp.float32).T
    weight = jnp.ones((delta.shape[0], 1)) if weights is None else jnp.array(weights)[:, None]
    return elect(**options)(TaskVectors({"a": delta}, {"a": weight})).weight["a"].T.tolist()


def test_elect_by_hand():
    one = [[3, -1, -1]]
    assert election(one, by="mass") == [[1, 0, 0]]
    assert election(one, by="count") == [[0, 1, 1]]
    assert election(one, [1, 2, 2], by="mass") == [[1, 0, 0]]
    assert election(one, [1, 2, 2], by="weighted") == [[0, 2, 2]]
    assert election(one, [0, 1, 1], by="mass") == [[0, 1, 1]]  # weight 0: does not count
    assert election(one, [-1, 1, 1], by="weighted") == [[-1, 1, 1]]  # w delta agree
    assert election([[0, 0, 2]]) == [[0, 0, 1]]  # zeros never count
    assert election([[0, 0, 0]], tie="positive") == [[0, 0, 0]]


@pytest.mark.slow
def test_exact_ties_by_hand():
    tied = [[1, -1]]
    assert election(tied) == [[0, 0]]
    assert election(tied, tie="positive") == [[1, 0]]
    assert election([*tied, [-1, -1]], tie="majority") == [[0, 1], [1, 1]]
    assert election([*tied, [2, 1]], tie="majority") == [[1, 0], [1, 1]]
    assert election(tied, tie="majority") == [[0, 0]]
    assert election([*tied, [1, 1], [-1, -1]], tie="majority")[0] == [0, 0]


def test_the_majority_is_that_of_the_whole_tree():
    delta = {"a": jnp.array([[1.0], [-1.0]]), "z": -jnp.ones((2, 5))}
    weight = jax.tree.map(jnp.ones_like, delta)
    assert elect(tie="majority")(TaskVectors(delta, weight)).weight["a"].tolist() == [[0], [1]]


def test_elect_refuses():
    with pytest.raises(ValueError, match="elect_by: expected one of"):
        elect("sum")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="tie: expected one of"):
        elect(tie="+")  # pyright: ignore[reportArgumentType]


# --- drop


@pytest.mark.slow
def test_masks_depend_on_key_path_and_model_alone():
    some = vectors()
    got = drop(0.5, KEY)(some)
    alone = drop(0.5, KEY)(TaskVectors(*({"b": {"d": t["b"]["d"][:2]}} for t in some)))
    chex.assert_trees_all_equal(alone.weight["b"]["d"], got.weight["b"]["d"][:2])
    raw = drop(0.5, jax.random.PRNGKey(0))(some)
    chex.assert_trees_all_equal(raw, got)
    with jax.enable_x64(True):
        wide = drop(0.5, KEY)(jax.tree.map(lambda x: x.astype(jnp.float64), some))
        chex.assert_trees_all_equal(
            *(jax.tree.map(lambda w: w != 0, v.weight) for v in (wide, got))
        )


@pytest.mark.slow
def test_rate_zero_drops_nothing():
    _, weight = full(drop(0.0, KEY)(vectors()))
    np.testing.assert_array_equal(weight, full(vectors())[1])
    chex.assert_trees_all_equal(drop(0.0, KEY)(vectors()).delta, vectors().delta)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_every_generator_draws_alike_whatever_the_number_of_models(impl):
    key = jax.random.key(3, impl=impl)
    delta = jnp.ones((4, 4096))
    weight = drop(0.3, key)(TaskVectors({"a": delta}, {"a": jnp.ones((4, 1))})).weight["a"]
    two = drop(0.3, key)(TaskVectors({"a": delta[:2]}, {"a": jnp.ones((2, 1))})).weight["a"]
    chex.assert_trees_all_equal(two, weight[:2])
    # null: Bernoulli(.7) per model, independent between models: six pairs, |z| < 4
    x = np.asarray(weight)
    assert np.abs((x.mean(1) - 0.7) / np.sqrt(0.21 / 4096)).max() < 4
    assert np.abs(np.corrcoef(x)[np.triu_indices(4, 1)]).max() * np.sqrt(4096) < 4


def test_drop_refuses():
    for rate in (1.0, -0.1, np.nan, [0.1, 1.0], [[0.1, 0.2]]):
        with pytest.raises(ValueError, match="rate: expected a number or one per model"):
            drop(rate, KEY)  # pyright: ignore[reportArgumentType]
    for key in (None, 1, jnp.zeros(2), jax.random.split(KEY)):
        with pytest.raises(TypeError, match=r"key: expected (one|a) PRNG key"):
            drop(0.5, key)  # pyright: ignore[reportArgumentType]


# --- laws of all transforms


@pytest.mark.slow
@law(1)
def test_transforms_keep_structure_shapes_and_masks(name):
    transform = TRANSFORMS[name]
    before = vectors()._replace(weight=vectors(weights=(1.0, 0.0, -2.0)).weight)
    after = transform(before)
    chex.assert_trees_all_equal_shapes_and_dtypes(after.delta, before.delta)
    old, new = full(before)[1], full(after)[1]
    assert ((new == old) | (new == 0)).all()  # what is masked stays so
    with_copies = TaskVectors(*({**t, "step": None} for t in before))
    chex.assert_trees_all_equal(
        transform(with_copies), TaskVectors(*({**t, "step": None} for t in after))
    )


@pytest.mark.slow
@law(0)
def test_transforms_under_jit(name):
    """Loops over bits and loops over digits select the same entries."""
    transform = TRANSFORMS[name]
    eager, jitted = transform(vectors(coarse=True)), jax.jit(transform)(vectors(coarse=True))
    chex.assert_trees_all_equal(jitted.weight, eager.weight)
    chex.assert_trees_all_close(jitted.delta, eager.delta, rtol=2 * jnp.finfo(jnp.float32).eps)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", of_law(2, 3, TRANSFORMS, [n for n in TRANSFORMS if n not in ("drop", "chain")])
)
def test_transforms_without_draws_are_idempotent(name):
    once = TRANSFORMS[name](vectors(coarse=True))
    chex.assert_trees_all_equal(TRANSFORMS[name](once), once)


def test_transforms_leave_an_empty_tree_alone():
    empty = TaskVectors({"step": None}, {"step": None})
    for transform in (trim(0.5), elect(tie="majority"), drop(0.5, KEY)):
        assert transform(empty) == empty


@pytest.mark.slow
def test_leaves_without_entries_are_left_alone():
    some = vectors()
    more = TaskVectors(
        some.delta | {"e": jnp.zeros((M, 0, 2))}, some.weight | {"e": jnp.ones((M, 1, 1))}
    )
    got = trim(0.4)(more)
    assert got.delta["e"].shape == (M, 0, 2)
    chex.assert_trees_all_equal(got.weight["a"], trim(0.4)(some).weight["a"])


@pytest.mark.slow
def test_chain_is_composition():
    a, b, c = trim(0.7), elect("weighted"), trim(0.5, "tensor")
    want = c(b(a(vectors())))
    for transform in (
        chain(a, b, c),
        chain(chain(a, b), c),
        chain(a, chain(b, c)),
        chain(chain(), a, b, c),
    ):
        chex.assert_trees_all_equal(transform(vectors()), want)
    chex.assert_trees_all_equal(chain()(vectors()), vectors())
    with pytest.raises(TypeError, match=r"chain: expected transforms, got .* see `from_function`"):
        chain(a, lambda vectors: vectors)  # pyright: ignore[reportArgumentType]


def _clip(limit, delta, weight):
    return jnp.clip(delta, -limit, limit), weight


@pytest.mark.slow
def test_functions_of_ones_own_are_transforms():
    got = chain(from_function(_clip, jnp.float32(0.3)), trim(0.5))(vectors())
    clipped = vectors()._replace(
        delta=jax.tree.map(lambda d: jnp.clip(d, -0.3, 0.3), vectors().delta)
    )
    chex.assert_trees_all_equal(got, trim(0.5)(clipped))
    limits = jax.vmap(lambda x: from_function(_clip, x)(vectors()).delta["a"].max())
    np.testing.assert_allclose(limits(jnp.array([0.1, 0.2])), [0.1, 0.2], rtol=1e-6)


@pytest.mark.slow
def test_masked_sees_only_the_chosen_leaves():
    some = vectors(coarse=True)
    for predicate in ("b/*", "b*", lambda path: path.startswith("b")):
        got = masked(trim(0.3), predicate)(some)
        chex.assert_trees_all_equal(
            (got.delta["a"], got.weight["a"]), (some.delta["a"], some.weight["a"])
        )
        inner = trim(0.3)(TaskVectors(*({"b": t["b"]} for t in some)))
        chex.assert_trees_all_equal(got.weight["b"], inner.weight["b"])
    everywhere = masked(trim(0.3), "*")(some)
    chex.assert_trees_all_equal(everywhere, trim(0.3)(some))
    twice = masked(masked(trim(0.3), "b*"), "*c")(some)
    chex.assert_trees_all_equal(twice, masked(trim(0.3), "b/c")(some))
    with pytest.raises(ValueError, match="chooses none of the leaves 'a', 'b/c', 'b/d'"):
        masked(trim(0.3), "B/*")(some)


@pytest.mark.soak
def test_results_do_not_depend_on_sharding():
    """Two host devices, leaves split along either axis, against one device: bit for bit."""
    program = """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from sail_jax.merging.transforms import chain, drop, elect, trim
        from sail_jax.merging.task_vectors import TaskVectors
        grid = jnp.float32(np.random.default_rng(0).integers(-4, 5, (2, 3, 8, 8)) / 8)
        vectors = TaskVectors(dict(zip("ab", grid)), dict.fromkeys("ab", jnp.ones((3, 1, 1))))
        transform = chain(drop(0.2, jax.random.key(0)), trim(0.4), elect(tie="majority"))
        want = jax.block_until_ready(jax.jit(transform)(vectors))
        for kind in (AxisType.Auto, AxisType.Explicit):
            mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
            specs = {"a": P(None, "x"), "b": P(None, None, "x")}
            shardings = {k: NamedSharding(mesh, spec) for k, spec in specs.items()}
            split = jax.block_until_ready(jax.device_put(vectors.delta, shardings))
            got = jax.block_until_ready(jax.jit(transform)(vectors._replace(delta=split)))
            assert len(got.weight["a"].sharding.device_set) == 2
            jax.tree.map(np.testing.assert_array_equal, got, want)
        print("equal")
    """
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, **flags}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr


def test_transforms_and_reductions_read_as_they_were_written():
    written = [
        "chain(masked(trim(density=0.2), 'b*'), elect(tie='positive'))",
        "chain()",
        "drop(rate=[0.1, 0.2], key=key<fry>[], rescale=False)",
        "weighted_mean",
        "combination(coefficients=_clip, args=(1.0,), scope='row')",
        "Step(_clip(float32[2], limit=3), needs='row')",
        "chain(Step(_without_piece(function=<lambda>)), trim(density=0.5, scope='tensor'))",
    ]
    made = [
        chain(masked(trim(0.2, "tree"), "b*"), elect(tie="positive")),
        chain(),
        drop([0.1, 0.2], KEY, rescale=False),
        reductions.weighted_mean,
        reductions.combination(_clip, np.float32(1.0), scope="row"),
        combining.transform(kernel(_clip, np.ones(2, np.float32), limit=3), needs="row"),
        chain(from_function(lambda delta, weight: (delta, weight)), trim(0.5, "tensor")),
    ]
    assert list(map(repr, made)) == written


@pytest.mark.parametrize("make", [lambda: trim(0.5), lambda: keep_between(0.5, 0.1)])
def test_a_transform_made_in_another_precision_is_the_same(make):
    made = make()
    some = TaskVectors({"a": np.arange(8.0).reshape(1, 8)}, {"a": np.ones((1, 1))})
    with jax.enable_x64(True):
        chex.assert_trees_all_equal(made(some), make()(some))


@pytest.mark.parametrize("size", [1, 4095, 4096, 4159, 20_000])
def test_a_total_has_every_entry_once(size):
    """Sums of integers are exact. Each entry has derivative 1, and each row of a batch its own."""
    x = np.random.default_rng(size).integers(-9, 9, [2, size]).astype(np.float32)
    assert jax.vmap(arithmetic.total)(x).tolist() == x.sum(1).tolist()
    assert jax.grad(arithmetic.total)(x[0]).tolist() == [1] * size
