"""Maps: a table of makers, and the laws of families, composition, inversion and both forms."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import diagonal

from sail_jax import growth
from sail_jax.basis.families import NONLINEARITIES, Family
from sail_jax.basis.maps import (
    Selection,
    SpaceMap,
    along,
    classify,
    compose,
    defect,
    identity,
    invert,
    measure,
    select,
)

N = 4
KEY = jax.random.key(7)


def normal(*shape):
    """In NumPy, which compiles nothing."""
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


def orthogonal(n):
    return np.linalg.qr(normal(n, n))[0]


def general():
    write = np.eye(N, dtype=np.float32) + np.float32(0.3) * normal(N, N)
    return SpaceMap(write, np.linalg.inv(write))


PERMUTED = growth.permute([2, 0, 3, 1])
EVEN = growth.widen(N, 2 * N)
FLIPPED = growth.flip([1, -1, -1, 1])
ROTATED = growth.rotate(orthogonal(N))
RESCALED = growth.rescale([0.5, 2.0, 3.0, 1.5])

# name -> map, its family's name, and whether it is lossless
MAPS = {
    "identity": (identity(N), "identity", True),
    "permute": (PERMUTED, "permutation", True),
    "widen even": (EVEN, "even duplication", True),
    "widen even, key": (growth.widen(N, 2 * N, key=KEY, even=True), "even duplication", True),
    "widen uneven": (growth.widen(N, 6), "selection", True),
    "widen key": (growth.widen(N, 2 * N, key=jax.random.key(1)), "selection", True),
    "pad": (growth.pad(N, 2 * N), "selection", True),
    "prune": (growth.prune([3, 1], N), "selection", False),
    "flip": (FLIPPED, "signed permutation", True),
    "flip, widen": (compose(EVEN, FLIPPED), "signed even duplication", True),
    "flip, pad": (compose(growth.pad(N, 2 * N), FLIPPED), "signed selection", True),
    "rescale": (RESCALED, "positive monomial", True),
    "rescale, pad": (compose(growth.pad(N, 2 * N), RESCALED), "positive monomial", True),
    "flip, rescale": (compose(RESCALED, FLIPPED), "monomial", True),
    "rotate": (ROTATED, "orthogonal", True),
    "rotate, widen": (compose(EVEN, ROTATED), "isometric", True),
    "rotate, rescale": (compose(RESCALED, ROTATED), "invertible", True),
    "mix layers": (
        growth.deepen(N, 2 * N, matrix=np.full((2 * N, N), 0.1) + 0.6 * np.tile(np.eye(N), (2, 1))),
        "linear",
        True,
    ),
    "general": (general(), "linear", True),
}
subjects = pytest.mark.parametrize("name", MAPS)


@subjects
def test_family_is_stated_and_true(name):
    m, family, lossless = MAPS[name]
    assert str(m.family) == family
    assert m.family in classify(m)
    assert m.family in classify(m.dense())
    # an unpruned map loses nothing beyond rounding, a pruned one a whole unit
    lost, rounding = measure(m)
    assert (lost <= rounding) if lossless else (lost == 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPS)
def test_dense_form_defines_index_form(name):
    m, _, _ = MAPS[name]
    x = jnp.asarray(normal(3, N, 2))
    write, read_t = (m.operator(e) for e in m.entries)
    dense = m.dense()
    assert dense.write.shape == (m.new, m.old)
    assert dense.read.shape == (m.old, m.new)
    chex.assert_trees_all_close(along(write, x, 1), along(dense.write, x, 1), rtol=1e-6)
    chex.assert_trees_all_close(along(read_t, x, 1), along(dense.read.T, x, 1), rtol=1e-6)
    # three times a float32 (or a host) sum of at most 8 terms of order one
    for other in (defect(dense), measure(m)[0], measure(dense)[0]):
        assert abs(float(defect(m)) - float(other)) <= 8 * np.finfo(np.float32).eps


def dense(m):
    """The dense form in NumPy."""
    m = m.dense()
    return np.asarray(m.write), np.asarray(m.read)


SECONDS = {
    "permute": lambda n: growth.permute(np.arange(n)[::-1]),
    "flip": lambda n: growth.flip((-1.0) ** np.arange(n)),
    "rescale": lambda n: growth.rescale(1.0 + np.arange(n)),
    "rotate": lambda n: growth.rotate(orthogonal(n)),
    "widen": lambda n: growth.widen(n, 2 * n),
    "pad": lambda n: growth.pad(n, 2 * n),
    "prune": lambda n: growth.prune([1], n),
}


@pytest.mark.parametrize(
    ("second", "first"), diagonal(SECONDS, [name for name in MAPS if MAPS[name][0].new != 6])
)
def test_composition(second, first):
    a = MAPS[first][0]
    b = SECONDS[second](a.new)
    c = compose(b, a)
    (write_a, read_a), (write_b, read_b), (write, read) = map(dense, (a, b, c))
    # products of three-digit numbers over 4 to 12 terms
    chex.assert_trees_all_close(write, write_b @ write_a, atol=1e-5)
    chex.assert_trees_all_close(read, read_a @ read_b, atol=1e-5)
    assert (c.index is None) == (a.index is None or b.index is None)
    # the join: the composition's family contains both, and its claim is true
    assert c.family in a.family
    assert c.family in b.family
    assert c.family in classify(c)


def test_composition_is_associative():
    a, b, c = (MAPS[k][0] for k in ("flip", "rescale", "widen uneven"))
    chex.assert_trees_all_close(compose(compose(c, b), a), compose(c, compose(b, a)))
    with pytest.raises(ValueError, match="first has 8 new units, but second takes 4"):
        compose(a, MAPS["pad"][0])


@subjects
def test_inversion(name):
    m, _, lossless = MAPS[name]
    back = invert(m)
    assert (back.old, back.new) == (m.new, m.old)
    chex.assert_trees_all_close(back.dense().write, m.dense().read)
    chex.assert_trees_all_close(back.dense().read, m.dense().write)
    invertible = Family.INVERTIBLE in m.family
    assert (back.index is not None) == (m.index is not None and invertible)
    assert back.family == (m.family if invertible else Family.LINEAR)
    assert back.family in classify(back)
    if lossless:
        undone = compose(back, m).dense()
        # a product with its inverse, condition below 10
        chex.assert_trees_all_close(undone.write, np.eye(N, dtype=np.float32), atol=1e-5)


def rms(x):
    return x / np.sqrt(np.mean(x**2, axis=0) + 1e-6)


FUNCTIONS = {
    "linear": [lambda x: -2 * x],
    "rmsnorm": [rms],
    "relu": [lambda x: np.maximum(x, 0), lambda x: np.maximum(x, 0.1 * x)],
    "odd": [np.tanh, lambda x: x**3],
    "elementwise": [lambda x: x / (1 + np.exp(-1.7 * x)), lambda x: 1 / (1 + np.exp(-x))],
    "layernorm": [lambda x: rms(x - x.mean(0))],
    "softmax": [lambda x: np.exp(x) / np.exp(x).sum(0)],
}


@subjects
@pytest.mark.parametrize("nonlinearity", FUNCTIONS)
def test_nonlinearities_commute_with_their_family_only(name, nonlinearity):
    m, _, _ = MAPS[name]
    write, read = dense(m)
    z = normal(N, 16)
    commutes = NONLINEARITIES[nonlinearity] in m.family
    changes = []
    for f in FUNCTIONS[nonlinearity]:
        # as seen by a reader; units without readers are free
        change = read @ (np.asarray(f(write @ z)) - write @ np.asarray(f(z)))
        changes.append(np.abs(change).max())
    if commutes:
        assert max(changes) < 1e-5  # float32 rounding of numbers of order one
    else:
        assert max(changes) > 1e-2


def test_families_form_a_lattice():
    named = set(Family.__members__.values())
    for a, b in itertools.product(named, named):
        assert (a & b) in a
        assert (a & b) in b
    order = [
        ("permutation", "even duplication", "selection", "positive monomial", "monomial"),
        ("permutation", "signed permutation", "signed even duplication", "signed selection"),
        ("signed permutation", "orthogonal", "isometric", "linear"),
        ("even duplication", "signed even duplication", "isometric"),
        ("identity", "permutation", "orthogonal", "invertible", "linear"),
    ]
    by_name = {str(family): family for family in named}
    for chain in order:
        for inner, outer in itertools.pairwise(chain):
            assert by_name[outer] in by_name[inner]
            assert by_name[inner] not in by_name[outer]


def test_false_claims_are_seen():
    write = jnp.array([[1.0, 0.0], [1.0, 1.0]])
    m = SpaceMap(write, jnp.linalg.inv(write))
    assert classify(m) == Family.NONNEGATIVE | Family.INVERTIBLE
    read = jnp.array([[1.0, 0.5], [0.0, 1.0]])  # reads the empty second row
    assert Family.MONOMIAL not in classify(SpaceMap(jnp.array([[1.0, 0.0], [0.0, 0.0]]), read))
    assert Family.MONOMIAL not in classify(select([0, 1], 2, write=[1.0, 0.0]))
    assert classify(select([1, 0], 2)) == Family.PERMUTATION
    assert classify(select([0, 0, 1], 2, read=[0.5, 0.5, 1])) == Family.SELECTION


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPS)
def test_maps_pass_through_transformations(name):
    m, _, _ = MAPS[name]
    chex.assert_trees_all_equal(jax.jit(lambda m: m)(m), m)
    assert jax.jit(lambda m: m)(m).family == m.family
    batch = jax.tree.map(lambda x: np.stack([x, x]), m)
    assert (batch.new, batch.old) == (m.new, m.old)
    both = jax.vmap(defect)(batch)
    chex.assert_trees_all_close(both, np.full(2, defect(m)), atol=1e-6)
    chex.assert_trees_all_close(
        jax.vmap(compose)(batch, jax.tree.map(lambda x: np.stack([x, x]), identity(N))), batch
    )
    chex.assert_trees_all_equal(np.asarray(batch.dense().read)[0], np.asarray(m.dense().read))


def test_gradients_flow_through_scales_and_entries():
    x = jnp.asarray(normal(N))

    def loss(m):
        write, read_t = (m.operator(e) for e in m.entries)
        return jnp.sum(along(write, x, 0) ** 2) + jnp.sum(along(read_t, x, 0) ** 3)

    m = RESCALED
    g = jax.jit(jax.grad(loss, allow_int=True))(m)
    of_dense = jax.jit(jax.grad(loss))(m.dense())
    at = (np.arange(N), np.asarray(m.index))
    chex.assert_trees_all_close(g.write.scale, np.asarray(of_dense.write)[at], rtol=1e-5)
    chex.assert_trees_all_close(g.read.scale, np.asarray(of_dense.read).T[at], rtol=1e-5)


@pytest.mark.slow
def test_makers_work_under_jit():
    def grow(key, order, Q, scale, signs, D):
        maps = (
            growth.widen(N, 6, key=key),
            growth.permute(order),
            growth.rotate(Q),
            growth.rescale(scale),
            growth.flip(signs),
            growth.deepen(N, 6, matrix=D),
            growth.prune(order[:2], N),
        )
        return maps, invert(maps[1])

    D = np.full((6, N), 1 / N)
    arguments = (KEY, PERMUTED.index, ROTATED.write, np.ones(N), np.ones(N), D)
    traced, eager = jax.jit(grow)(*arguments), grow(*arguments)
    chex.assert_trees_all_close(traced, eager, atol=1e-5)
    assert [m.family for m in traced[0]] == [m.family for m in eager[0]]


def test_constants_under_jit_are_concrete():
    def f(x):
        assert classify(ROTATED) == Family.ORTHOGONAL
        assert classify(FLIPPED) == Family.SIGNED_PERMUTATION
        return along(ROTATED.write, x, 0)

    chex.assert_trees_all_close(jax.jit(f)(np.eye(N)), ROTATED.write)
    with pytest.raises(ValueError, match="a traced map cannot be classified"):
        jax.jit(classify)(ROTATED)


@pytest.mark.slow
def test_widening_deals_copies():
    m = growth.widen(3, 12, key=KEY, even=True)
    assert np.bincount(m.index).tolist() == [4, 4, 4]
    assert m.index[:3].tolist() == [0, 1, 2]
    assert m.read.scale.tolist() == [0.25] * 12
    # each of the later copies is a fresh deal: not all alike (chance 1/36)
    deals = {tuple(deal) for deal in np.asarray(m.index[3:]).reshape(3, 3).tolist()}
    assert len(deals) > 1
    random = growth.widen(3, 303, key=KEY)
    # null: 300 uniform draws over 3 units, counts binomial(300, 1/3), |z| < 4
    z = (np.bincount(random.index)[:3] - 1 - 100) / np.sqrt(300 * 2 / 9)
    assert np.abs(z).max() < 4
    for options in ({}, {"key": KEY}, {"key": KEY, "even": True}):
        assert growth.widen(3, 3, **options).family == Family.IDENTITY


def test_depth_makers_are_the_papers():
    assert growth.deepen(2, 6).index.tolist() == [0, 1, 0, 1, 0, 1]
    assert growth.deepen(2, 6).family == Family.SELECTION
    assert growth.deepen(2, 6, "interpolate").index.tolist() == [0, 0, 0, 1, 1, 1]
    layers = np.arange(6.0).reshape(2, 3)
    D = np.array([[1.0, 0.0], [0.25, 0.75]])
    mixed = along(growth.deepen(2, 2, matrix=D).write, layers, 0)
    chex.assert_trees_all_close(mixed, D @ layers)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: growth.permute([0, 0, 2]), ValueError, "permutation of range"),
        (lambda: growth.permute([0.0, 1.0]), TypeError, "index must contain integers, got float32"),
        (lambda: growth.permute([[0, 1]]), ValueError, "index must be a vector"),
        (lambda: growth.widen(4, 3), ValueError, "0 < old <= new, got old=4, new=3"),
        (lambda: growth.widen(4, 6, even=True), ValueError, "multiple of old, got old=4, new=6"),
        (lambda: growth.pad(4, 3), ValueError, "0 < old <= new, got old=4, new=3"),
        (lambda: growth.prune([1, 1], 4), ValueError, "keep must not repeat"),
        (lambda: growth.prune([4], 4), ValueError, r"index must lie in range\(4\), got 4"),
        (lambda: growth.prune(jnp.array([True, False]), 2), TypeError, "got a mask"),
        (lambda: growth.rotate(jnp.ones((2, 3))), ValueError, "Q must be square"),
        (lambda: growth.rotate(2 * jnp.eye(2)), ValueError, "Q must be orthogonal.* 3"),
        (lambda: growth.rotate(jnp.eye(2) * jnp.nan), ValueError, "Q must be orthogonal"),
        (lambda: growth.rescale([1.0, -1.0]), ValueError, "scale must be positive and finite"),
        (lambda: growth.rescale([1.0, jnp.inf]), ValueError, "scale must be positive and finite"),
        (lambda: growth.flip([1.0, 0.5]), ValueError, r"signs must be \+1 or -1"),
        (lambda: growth.deepen(4, 0), ValueError, "layers must be 1 or more"),
        (lambda: growth.deepen(2, 4, "mix"), ValueError, "how: expected one of .* got 'mix'"),
        (lambda: growth.deepen(2, 3, matrix=jnp.eye(2)), ValueError, r"shape \(3, 2\), got"),
        (lambda: growth.deepen(2, 2, matrix=2 * jnp.eye(2)), ValueError, "rows .* sum to one"),
        (lambda: select([-1], 2), ValueError, r"range\(2\), got -1"),
        (lambda: select([0, 1], 2, read=[1.0]), ValueError, r"read must have the shape \(2,\)"),
        (lambda: SpaceMap(jnp.ones((3, 2)), jnp.ones((3, 2))), ValueError, "transposed shapes"),
        (lambda: SpaceMap(jnp.ones((1, 1)) * 1j, jnp.ones((1, 1))), TypeError, "must be real"),
        (
            lambda: SpaceMap(Selection(jnp.array([0]), None, 1), jnp.ones((1, 1))),
            ValueError,
            "both be Selections",
        ),
        (
            lambda: SpaceMap(
                Selection(jnp.array([0]), None, 2), Selection(jnp.array([1]), None, 2)
            ),
            ValueError,
            "share one index",
        ),
    ],
)
def test_bad_arguments_are_named(make, error, match):
    with pytest.raises(error, match=match):
        make()
