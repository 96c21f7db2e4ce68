"""What makes matching cheap leaves its outcome as it is: norms, pieces, spaces without a choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import slow

from sail_jax import align
from sail_jax.align import problem
from sail_jax.align.nuclear import nuclear_norms
from sail_jax.basis.families import Family
from sail_jax.basis.spaces import spec
from sail_jax.checkpoint.sources import nearness


@pytest.mark.parametrize(
    ("n", "rest", "free"), [(6, 5, 3), (5, 2, 7), (4, 1, 3), (3, 6, 1), (70, 8, 8)]
)
def test_nuclear_norms_are_sums_of_singular_values(n, rest, free):
    rng = np.random.default_rng(n)
    a, b = rng.normal(size=(2, n, rest, free)).astype(np.float32)
    a[0] = 0  # a matrix of 0
    b[1, :, -1] = 0
    a[-1] = a[-1, :1]  # of rank 1
    pairs = np.einsum("iru,jrv->ijuv", a.astype(np.float64), b)
    expected = np.linalg.svd(pairs, compute_uv=False).sum(-1)
    np.testing.assert_allclose(nuclear_norms(a, b), expected, rtol=2e-6, atol=2e-6)


def test_nuclear_norms_of_singular_values_far_apart():
    values = np.float32([1, 1e-3, 1e-5, 0])
    a = np.diag(values)[None]
    found = nuclear_norms(a, np.eye(4, dtype=np.float32)[None])
    np.testing.assert_allclose(found, [[values.sum()]], rtol=3e-7)


class Rows:
    """A leaf that is read on demand, and counts its rows."""

    def __init__(self, x, read, index=slice(None)):
        self.x, self.read, self.index = x, read, index
        self.shape, self.dtype = x[index].shape, x.dtype

    def __getitem__(self, index):
        return Rows(self.x, self.read, index)

    def __array__(self, dtype=None, copy=None):
        self.read.append(len(self.x[self.index]))
        return np.asarray(self.x[self.index], dtype)


def networks(dtype=np.float32):
    """Tokens, a hidden layer and an output; the second is a hidden copy under noise."""
    rng = np.random.default_rng(0)
    a = {"embed": (23, 6), "in": (6, 5), "out": (5, 6), "head": (29, 6)}
    a = {k: rng.normal(size=shape).astype(dtype) for k, shape in a.items()}
    x, h = rng.permutation(6), rng.permutation(5)
    b = {"embed": a["embed"][:, x], "in": a["in"][x][:, h], "out": a["out"][h][:, x]}
    b["head"] = a["head"][:, x]
    b = {k: (v + rng.normal(size=v.shape) / 4).astype(dtype) for k, v in b.items()}
    axes = {"embed": "t x", "in": "x* h", "out": "h* x", "head": "y x*"}
    return a, b, spec(a, axes, spaces={"{t,y}": "outer", "x": "layernorm", "h": "relu"})


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0, *slow(None)])
@pytest.mark.parametrize("family", [Family.PERMUTATION, *slow({"h": Family.POSITIVE_MONOMIAL})])
def test_pieces_add_up(monkeypatch, keep, family):
    a, b, s = networks()
    expected = align.match_weights(a, b, s, family=family)
    monkeypatch.setattr(problem, "PIECE", 30)  # five rows of six
    read = []
    lazy = [{k: Rows(x, read) for k, x in side.items()} for side in (a, b)]
    found = align.match_weights(*lazy, s, family=family, keep=keep)
    assert (23 in read) == (keep is None), "the leaf of 23 rows is read whole, or in pieces"
    assert {m: v.index.tolist() for m, v in found.maps.items()} == {
        m: v.index.tolist() for m, v in expected.maps.items()
    }
    np.testing.assert_allclose(found.distance, expected.distance, rtol=1e-5)
    # From the definition.
    moved = align.change_blocks(b, s, found.maps, {})
    d = sum(((a[k] - moved[k]) ** 2).sum() / np.linalg.norm(a[k]) / np.linalg.norm(b[k]) for k in a)
    np.testing.assert_allclose(found.distance[-1], d, rtol=1e-5)


def test_a_leaf_is_cut_where_no_matched_space_is():
    *_, s = networks()
    size = problem.PIECE
    assert problem.cuts((size, 1), s.axes("embed"), {"x"}) == [None]
    parts = problem.cuts((size + 1, 6), s.axes("embed"), {"x"})
    assert len(parts) > 6
    assert sum(p.stop - p.start for p in parts) == size + 1
    assert max(p.stop - p.start for p in parts) * 6 <= size
    assert problem.cuts((size + 1, 6), s.axes("in"), {"x"}) == [None]


@pytest.mark.slow
def test_leaves_move_in_the_dtype_that_they_are_stored_in():
    a, b, s = networks()
    half = [{k: jnp.asarray(v, jnp.bfloat16) for k, v in side.items()} for side in (a, b)]
    wide = [jax.tree.map(lambda x: x.astype(jnp.float32), side) for side in half]
    found, expected = (align.match_weights(*sides, s) for sides in (half, wide))
    for name, m in expected.maps.items():
        assert found.maps[name].index.tolist() == m.index.tolist()
    assert found.distance == pytest.approx(expected.distance, rel=1e-6)


@pytest.mark.slow
def test_a_space_of_one_unit_is_not_solved():
    rng = np.random.default_rng(1)
    a = {k: rng.normal(size=n).astype("f4") for k, n in {"in": (4, 3), "mid": (3, 1)}.items()}
    a["out"] = np.float32([[2.0, -1.0]])
    b = {"in": a["in"][:, [2, 0, 1]], "mid": -a["mid"][[2, 0, 1]], "out": -a["out"]}
    axes = {"in": "x* g", "mid": "g* h", "out": "h* y"}
    s = spec(a, axes, spaces={"{x,y}": "outer", "{g,h}": "odd"})
    solved = []

    def assign(benefit):
        solved.append(len(benefit))
        return align.hungarian(benefit)

    found = align.match_weights(a, b, s, assignment=assign).maps
    assert set(solved) == {3}, "h is not solved"
    assert found["g"].index.tolist() == [1, 2, 0]
    assert found["h"].index.tolist() == [0]
    assert found["h"].family == Family.PERMUTATION, "the family that a solver would have given"
    signed = align.match_weights(a, b, s, family=Family.SIGNED_PERMUTATION).maps
    assert signed["h"].write.scale.tolist() == [-1], "a sign is a choice"


class Stored:
    """A tensor that counts the entries that are read of it."""

    name, source = "x", "memory"

    def __init__(self, x, read):
        self.x, self.read_of = x, read
        self.shape, self.dtype = x.shape, x.dtype

    def read(self, out, start=0):
        self.read_of.append(out.size)
        out[...] = self.x.reshape(-1)[start : start + out.size]


def test_nearness_adds_up_pieces(monkeypatch):
    a, b, s = networks()
    maps = align.match_weights(a, b, s).maps
    monkeypatch.setattr(problem, "PIECE", 30)
    read = []
    sides = [{k: nearness.Unread(Stored(x, read)) for k, x in side.items()} for side in (a, b)]
    rows, (before, after) = nearness.compared(*sides, s, maps, {})
    assert max(read) == 30, "no more than a piece, or a leaf of that size"
    moved = align.change_blocks(b, s, maps, {})
    size = sum((x.astype(np.float64) ** 2).sum() for x in a.values())
    for got, other in ((before, b), (after, moved)):
        gap = sum(((a[k] - np.float64(other[k])) ** 2).sum() for k in a)
        assert got == pytest.approx(np.sqrt(gap / size), rel=1e-5)
    row = next(row for row in rows if row.space == "h")
    cosines = [
        (a[k] * moved[k]).sum() / np.linalg.norm(a[k]) / np.linalg.norm(moved[k])
        for k in ("in", "out")
    ]
    assert row.after == pytest.approx(np.mean(cosines), rel=1e-5)
