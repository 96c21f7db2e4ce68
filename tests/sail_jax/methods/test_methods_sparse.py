"""Breadcrumbs and DELLA: exact ranks, unbiased masks, and errors of other programs."""

import math
import os
import subprocess
import sys
from fractions import Fraction

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import slow_unless

from sail_jax import methods
from sail_jax.merging import counting
from sail_jax.merging.row_ranks import host_ranks, row_ranks
from sail_jax.merging.task_vectors import TaskVectors
from sail_jax.merging.transforms import drop_by_magnitude, keep_between

KEY = jax.random.key(5)
EPS = float(jnp.finfo(jnp.float32).eps)


def vectors(*rows):
    delta = jnp.asarray(rows, jnp.float32)
    return TaskVectors({"w": delta}, {"w": jnp.ones((len(delta), *[1] * (delta.ndim - 1)))})


def kept(edited):
    weight = np.broadcast_to(edited.weight["w"], edited.delta["w"].shape)
    return weight != 0


def stable_ranks(x):
    order = np.argsort(x, axis=-1, kind="stable")
    return np.argsort(order, axis=-1, kind="stable")


# --- ranks


ROWS = {
    "random": np.random.default_rng(0).normal(size=(5, 33)),
    "bfloat16": np.random.default_rng(1).integers(0, 6, (7, 40)) / 4,
    "equal": np.zeros((3, 10)),
    # Keys of few digits beside longer ones, with zeros and ties, in one block of rows.
    "long and short": np.random.default_rng(5).integers(0, 9, (6, 50)) / 512
    + np.array([0, 0, 1e-3, 0, 1e-9, 0])[:, None],
    # Codes of 16 bits do not tell the larger keys of a row from one another.
    "close": np.insert(1 + np.random.default_rng(7).integers(0, 99, (3, 40)) / 2**20, 0, 1e-9, 1),
    "long": np.random.default_rng(2).integers(0, 999, (2, 70000)),
    "cubes": np.random.default_rng(3).normal(size=(2, 3, 4, 5)),
    "columns": np.random.default_rng(4).normal(size=(40000, 1)),
    "huge": np.array([[3e38, 1e-45, 0.0, 1e-38, 3e38]]),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("by", "dtype"),
    [("digits", "f4"), ("digits", "f8"), ("comparison", "f4"), ("comparison", "f8"), ("xla", "f4")],
)
def test_row_ranks_are_those_of_a_stable_sort(rows, by, dtype, monkeypatch):
    faster = "sail_jax.merging.row_ranks._digits_are_faster"
    monkeypatch.setattr(faster, lambda: by == "digits")
    x = np.abs(ROWS[rows]).astype(dtype)
    got = row_ranks(jnp.asarray(x)) if by == "xla" else host_ranks(x)
    np.testing.assert_array_equal(got, stable_ranks(x))


@pytest.mark.slow
def test_row_ranks_in_float64_under_vmap_jit_and_grad():
    with jax.enable_x64(True):
        x = jnp.asarray(np.abs(ROWS["cubes"]) * (1 + 1e-12))
        np.testing.assert_array_equal(row_ranks(x), stable_ranks(np.asarray(x)))
    x = jnp.asarray(np.abs(ROWS["random"]), jnp.float32)
    np.testing.assert_array_equal(jax.vmap(row_ranks)(x), stable_ranks(np.asarray(x)))
    assert float(jnp.abs(jax.grad(lambda x: row_ranks(x).astype(float).sum())(x)).max()) == 0
    assert row_ranks(jnp.zeros((0, 4))).shape == (0, 4)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from sail_jax import methods
from sail_jax.merging.row_ranks import row_ranks
x = np.abs(np.random.default_rng(6).normal(size=(8, 16))).astype(np.float32)
want = np.argsort(np.argsort(x, axis=1, kind="stable"), axis=1)
key = jax.random.key(0)
models, base = [{"w": jnp.asarray(x)}, {"w": jnp.asarray(-x[::-1])}], {"w": jnp.zeros((8, 16))}
options = {"della": {"key": key, "density": 0.5}, "sce": {"select_topk": 0.5}}
single = {name: methods.get(name)(**k)(models, base)["w"] for name, k in options.items()}
cases = [(AxisType.Auto, P(None, "d"), ["della"]), (AxisType.Explicit, P("d"), ["sce"])]
for kind, spec, names in cases:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    place = lambda t: jax.device_put(t, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        assert (np.asarray(row_ranks(place(jnp.asarray(x)))) == want).all()
        for name in names:
            merge = jax.jit(methods.get(name)(**options[name]))
            got = merge([jax.tree.map(place, m) for m in models], jax.tree.map(place, base))
            assert float(np.abs(np.asarray(got["w"]) - np.asarray(single[name])).max()) < 1e-5
print("agreed")
"""


@pytest.mark.slow
def test_sharded_arrays_merge_as_on_one_device():
    """Two forced host devices, rows or columns sharded, both kinds of mesh: up to the order of
    sums (1e-5 of values below 10)."""
    flags = "--xla_force_host_platform_device_count=2"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SHARDED]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "agreed", done.stderr[-2000:]


@pytest.mark.parametrize("part", [0.1, 0.29, 0.5, 0.7, 0.999, 1 / 3])
def test_fraction_floors_decimals_as_written(part):
    for count in (0, 1, 3, 10, 100, 65536, 999_999, 2**31, 2**32 - 1):
        got = counting.fraction(part)(counting.wide(np.array([count])))
        value = (int(got.hi[0]) << 16) + int(got.lo[0])
        assert value == math.floor(Fraction(part).limit_denominator(1000) * count)


# --- rescaling


def rescaled(deltas, name, scope, w, density=0.3, gamma=0.2):
    """Computes the change of the base by each method's definition: lists of vectors by
    model, float64."""
    restored = []
    for tensors in deltas:
        parts = [np.concatenate(tensors)] if scope == "tree" else tensors
        whole = []
        for x in parts:
            count = int(density * x.size)
            top = 0 if name == "ties" else int(gamma * x.size)
            rank = stable_ranks(-np.abs(x))
            left = np.where((rank >= top) & (rank < top + count), x, 0)
            whole.append(left * (np.abs(x).sum() / np.abs(left).sum()))
        restored.append(np.concatenate(whole))
    terms = np.array(w)[:, None] * restored
    if name == "breadcrumbs":
        return terms.sum(0)
    agree = np.sign(terms) == np.where(terms.sum(0) >= 0, 1, -1)
    mass = (np.array(w)[:, None] * agree).sum(0)
    return (terms * agree).sum(0) / (np.where(mass == 0, 1, mass) if name == "ties" else 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("ties", "tensor"),
        slow_unless(False, "breadcrumbs", "tensor"),
        slow_unless(False, "breadcrumbs_ties", "tree"),
    ],
)
def test_rescale_restores_l1_norms(name, scope):
    """The tensors' deltas differ in size, so the norm of the tree differs from those of tensors."""
    random = np.random.default_rng(8)
    deltas = [[random.normal(size=20), 5 * random.normal(size=30)] for _ in range(2)]
    base, w = {"a": jnp.zeros(20), "b": jnp.zeros(30)}, [0.6, 0.3]
    models = [dict(zip("ab", map(jnp.float32, tensors), strict=True)) for tensors in deltas]
    options = {} if name == "ties" else {"gamma": 0.2}
    merge = methods.get(name)(
        density=0.3, rescale=True, scope=scope, compat="mergekit", **options
    )  # fmt: skip
    got = np.concatenate(list(merge(models, base, weights=w).values()))
    np.testing.assert_allclose(got, rescaled(deltas, name, scope, w), rtol=0, atol=60 * EPS)


# --- breadcrumbs


@pytest.mark.parametrize("floor", [False, True])
@pytest.mark.parametrize(
    "n",
    [1, 3, 101, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 7, 99, 100, 1000))],
)
def test_keep_between_keeps_exactly_the_stated_number(n, floor):
    """Ties do not matter: here there are only four different magnitudes."""
    delta = np.random.default_rng(n).integers(-3, 4, n)
    for density, gamma in ((0.5, 0.01), (0.2, 0.0), (0.9, 0.5), (1.0, 0.3), (0.001, 0.9)):
        half = 0.0 if floor else 0.5
        want = max(1, math.floor(density * n + half))
        top = min(math.floor(gamma * n + half), n - want)
        got = kept(keep_between(density, gamma, floor=floor)(vectors(delta)))[0]
        assert got.sum() == want
        rank = stable_ranks(-np.abs(delta))
        np.testing.assert_array_equal(got, (rank >= top) & (rank < top + want))


@pytest.mark.parametrize("compat", ["paper", "mergekit"])
@pytest.mark.parametrize("gamma", [None, 0.0])
def test_breadcrumbs_do_not_revert_small_tensors(gamma, compat):
    """mergekit zeroes every delta where int(gamma * numel) = 0: below 100 entries by default, and
    always for gamma 0."""
    base, model = {"w": jnp.zeros(64)}, {"w": jnp.arange(1.0, 65.0)}
    got = methods.breadcrumbs(density=0.5, gamma=gamma, compat=compat)([model], base)["w"]
    assert int((got != 0).sum()) == 32
    assert got[-1] == 64.0
    one = methods.breadcrumbs(compat=compat)([{"w": jnp.array(3.0)}], {"w": jnp.array(1.0)})
    assert float(one["w"]) == 3.0


# --- DELLA


@pytest.mark.slow
@pytest.mark.parametrize("rank_by", ["rank", "magnitude"])
def test_drop_by_magnitude_is_unbiased_and_keeps_as_often_as_stated(rank_by):
    """400 independent masks of 3 rows of 40: |z| < 4 for the number kept in all, and for the mean
    outcome, each against the exact variance of Bernoulli(p), p by a formula of its own."""
    delta = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
    if rank_by == "rank":
        x = stable_ranks(np.abs(delta)) / 39
    else:
        least, most = (f(np.abs(delta), axis=1, keepdims=True) for f in (np.min, np.max))
        x = (np.abs(delta) - least) / (most - least)
    p = 0.5 - 0.2 + 0.4 * x

    @jax.jit
    def mask(key):
        edited = drop_by_magnitude(0.5, 0.2, key, rank_by)(vectors(delta))
        return edited.weight["w"][0], edited.weight["w"][0] * edited.delta["w"][0]

    masks, outcomes = jax.vmap(mask)(jax.random.split(KEY, 400))
    z = (masks.sum() - 400 * p.sum()) / np.sqrt(400 * (p * (1 - p)).sum())
    assert abs(float(z)) < 4
    error = np.asarray(outcomes, float).mean(0) - delta
    z = error / np.sqrt(delta**2 * (1 - p) / p / 400)
    # 120 entries: the largest |z| of so many exceeds 4.5 with a chance of 1e-3
    assert np.abs(z).max() < 4.5
    total = (error.sum()) / np.sqrt((delta**2 * (1 - p) / p / 400).sum())
    assert abs(total) < 4
    # and the probabilities do follow the rank: 400 trials an entry, large against small
    often = np.asarray(masks, float).mean(0)
    assert often[x > 0.75].mean() - often[x < 0.25].mean() > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("compat", ["paper", "mergekit"])
@pytest.mark.parametrize("density", [0.86, 0.95, 1.0])
def test_della_at_high_density(density, compat):
    """mergekit raises for density + 0.15 >= 1. At density 1 everything is kept."""
    base, model = {"w": jnp.zeros((20, 50))}, {"w": jnp.ones((20, 50))}
    got = methods.della_linear(density=density, epsilon=0.15, key=KEY, compat=compat)(
        [model], base
    )["w"]
    share = float((got != 0).mean())
    # 1000 draws of variance below p (1 - p)
    assert abs(share - density) <= 4 * np.sqrt(density * (1 - density) / 1000)
    if density == 1:
        chex.assert_trees_all_equal(got, model["w"])


@pytest.mark.slow
@pytest.mark.parametrize("compat", ["paper", "mergekit"])
@pytest.mark.parametrize("shape", [(400, 1), (), (1,)])
def test_della_of_rows_of_one_keeps_with_the_density(shape, compat):
    """0 / 0 in the code of the authors and of mergekit."""
    base, model = {"w": jnp.zeros(shape)}, {"w": jnp.ones(shape)}
    for method in (methods.della, methods.della_linear):
        merge = method(density=0.5, epsilon=0.1, key=KEY, compat=compat)
        got = merge([model], base)["w"]
        chex.assert_tree_all_finite(got)
        if shape == (400, 1):  # |z| < 4 of 400 fair coins
            assert abs(float((got != 0).mean()) - 0.5) < 4 * 0.5 / 20


@pytest.mark.slow
@pytest.mark.parametrize("method", ["della_linear", "dare_linear"])
@pytest.mark.parametrize(("dtype", "size"), [(jnp.float16, 1.0), (jnp.bfloat16, 1e36)])
def test_l1_norms_do_not_overflow(method, dtype, size):
    """A float16 sum of 1e6 ones is infinite, so is a float32 sum of 1e3 times 1e36."""
    x = {"w": jnp.full((1000, 100), size, dtype)}
    base = {"w": jnp.zeros((1000, 100), dtype)}
    got = methods.get(method)(density=0.5, key=KEY, compat="mergekit")([x], base)["w"]
    values = np.unique(np.asarray(got, float))
    assert len(values) == 2
    assert values[0] == 0
    # one factor for the tensor, about 1 / density: |z| < 4 of 1e5 fair coins
    assert abs(values[1] / size - 2) < 2 * 4 / np.sqrt(1e5) + 2**-7


@pytest.mark.slow
def test_l1_rescaling_is_biased_and_the_papers_is_not():
    """One entry of 1000 among 99 of 1, density 0.5: mergekit's rescaling halves the large one's
    mean (0.50) and multiplies that of the others; 1 / density does neither. 2000 masks: |z| < 4
    for the large entry, which becomes 0 or 2 times it with equal chances."""
    x, base = {"w": jnp.ones(100).at[7].set(1000.0)}, {"w": jnp.zeros(100)}
    keys = jax.random.split(KEY, 2000)

    def mean(compat):
        dare = lambda key: methods.dare_linear(density=0.5, key=key, compat=compat)([x], base)["w"]  # noqa: E731
        return np.asarray(jax.jit(jax.vmap(dare))(keys), float).mean(0)

    paper, peer = mean("paper"), mean("mergekit")
    assert abs(paper[7] / 1000 - 1) < 4 / np.sqrt(2000)
    assert abs(np.delete(paper, 7).mean() - 1) < 4 / np.sqrt(2000 * 99)
    # kept half of the time, times 1099 / 1049.5; the others times about 1099 / 49.5 when it is not
    assert abs(peer[7] / 1000 - 0.5 * 1099 / 1049.5) < 4 * 0.55 / np.sqrt(2000)
    assert np.delete(peer, 7).mean() > 4


@pytest.mark.slow
@pytest.mark.parametrize("compat", ["paper", "mergekit"])
def test_della_elects_and_della_linear_does_not(compat):
    base = {"w": jnp.zeros(2)}
    models = [{"w": jnp.array([1.0, 3.0])}, {"w": jnp.array([-2.0, 1.0])}]
    options = {"density": 1.0, "key": KEY, "compat": compat}
    assert methods.della(**options)(models, base)["w"].tolist() == [-2.0, 2.0]
    assert methods.della_linear(**options)(models, base)["w"].tolist() == [-1.0, 4.0]


@pytest.mark.slow
def test_masks_do_not_depend_on_what_else_is_in_the_tree():
    x = {"w": jax.random.normal(KEY, (6, 30))}
    base = jax.tree.map(jnp.zeros_like, x)
    more = {"v": x["w"], **x}
    for compat in ("paper", "mergekit"):
        della = methods.della_linear(density=0.5, key=KEY, compat=compat)
        alone = della([x], base)["w"]
        beside = della([more], jax.tree.map(jnp.zeros_like, more))
        chex.assert_trees_all_equal(alone, beside["w"])
        assert bool((beside["v"] != beside["w"]).any())  # and paths have masks of their own


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"density": 0.3, "epsilon": 0.3}, ValueError, "epsilon: expected less than the density"),
        ({"key": None}, TypeError, "key: expected a PRNG key, for the masks of DELLA"),
        ({"rank_by": "size"}, ValueError, "rank_by: expected one of .*'magnitude'.*; got 'size'"),
    ],
)
def test_della_refuses_by_name(options, error, message):
    x = {"w": jnp.ones(4)}
    with pytest.raises(error, match=message):
        methods.della(**{"key": KEY, **options})([x], x)


# --- what others get wrong in TIES, DARE and task arithmetic


def test_ties_in_tensors_of_less_than_one_over_density_entries():
    """mergekit's assertion fails there; one entry stays."""
    got = methods.ties(density=0.1, compat="mergekit")(
        [{"w": jnp.array([1.0, 3.0])}], {"w": jnp.zeros(2)}
    )
    assert got["w"].tolist() == [0.0, 3.0]


def test_dare_refuses_to_drop_everything():
    """A drop rate of 1 gives NaN in fusion_bench."""
    x = {"w": jnp.ones(4)}
    with pytest.raises(ValueError, match="density: expected"):
        methods.dare_linear(density=0.0, key=KEY)([x], x)


def test_negative_weights_amplify_as_in_mergekit():
    """delta = (1, -1), w = (1, -0.9), normalised: 1.9 / 0.1. 16 ulp of it, times 1 / 0.1."""
    models = [{"w": jnp.array([1.0])}, {"w": jnp.array([-1.0])}]
    got = methods.ties(compat="mergekit")(models, {"w": jnp.zeros(1)}, weights=[1.0, -0.9])["w"]
    np.testing.assert_allclose(got, [19.0], rtol=160 * EPS)


def test_weights_are_not_rounded_to_the_dtype_of_the_tensors():
    """0.3 is 0.30078125 in bfloat16, and 1000 times the difference is 0.78."""
    x, base = {"w": jnp.full(3, 1000.0, jnp.bfloat16)}, {"w": jnp.zeros(3, jnp.bfloat16)}
    got = methods.task_arithmetic()([x], base, weights=[0.3])["w"]
    assert got.tolist() == [300.0] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("dare_linear", "della_linear"),
        "dare_ties",
        "della",
    ],
)
@pytest.mark.parametrize("compat", ["paper", "mergekit"])
def test_what_is_kept_can_be_left_as_it_is(name, compat):
    """Without `rescale`, entries are delta or 0, for the same masks as with it."""
    base = {"a": np.zeros((50, 40), np.float32)}
    one = {"a": np.float32(np.random.default_rng(0).normal(size=(50, 40)))}
    key = jax.random.key(0)
    options = {"density": 0.5, "key": key, "compat": compat}
    plain = np.asarray(methods.get(name)(rescale=False, **options)([one], base)["a"])
    scaled = np.asarray(methods.get(name)(**options)([one], base)["a"])
    np.testing.assert_array_equal(plain != 0, scaled != 0)
    kept = plain != 0
    np.testing.assert_array_equal(plain[kept], np.asarray(one["a"])[kept])
    assert (np.abs(scaled[kept]) > 1.2 * np.abs(plain[kept])).all()
