"""What makes matching cheap leaves its outcome as it is: norms, pieces, spaces without a choice,
NumPy in place of compiled programs."""

import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import slow
from merge_cases import compilations

from sail_jax import align
from sail_jax.align import problem
from sail_jax.align.nuclear import nuclear_norms
from sail_jax.basis.change_basis import change_basis
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
    """Makes two networks with one hidden layer; the second is a permuted copy with noise."""
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
@pytest.mark.parametrize("keep", [0, None])
@pytest.mark.parametrize("family", [Family.PERMUTATION, {"h": Family.POSITIVE_MONOMIAL}])
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


def tower(layers):
    """A network of equal layers with a gain each, a shuffled copy under noise, and their spec."""
    rng = np.random.default_rng(layers)
    shapes, axes, spaces = {"in": (3, 6)}, {"in": "x* s"}, {"{x,y}": "outer", "s": "linear"}
    for k in range(layers):
        shapes |= {f"{k}/gain": (7,), f"{k}/up": (6, 7), f"{k}/down": (7, 6)}
        axes |= {f"{k}/gain": f"diag(h{k})", f"{k}/up": f"s* h{k}", f"{k}/down": f"h{k}* s"}
        spaces[f"h{k}"] = "relu"
    a = {path: rng.normal(size=shape).astype("f4") for path, shape in shapes.items()}
    s = spec(a, axes, spaces=spaces)
    order = {f"h{k}": rng.permutation(7) for k in range(layers)} | {"s": rng.permutation(6)}
    b = {}
    for path, x in a.items():
        for axis, factors in enumerate(s.axes(path)):
            for factor in factors:
                x = x.take(order.get(factor.space, np.arange(x.shape[axis])), axis)
        b[path] = (x + rng.normal(size=x.shape) / 8).astype("f4")
    return a, b, s


@pytest.mark.slow
@pytest.mark.parametrize("small", [problem.SMALL, 0])
def test_more_layers_of_the_same_shapes_compile_nothing(caplog, monkeypatch, small):
    monkeypatch.setattr(problem, "SMALL", small)

    def aligned(layers):
        a, b, s = tower(layers)
        moved = change_basis(b, s, align.match_weights(a, b, s).maps)
        assert all(np.abs(a[path] - np.asarray(moved[path])).max() < 1 for path in a)
        return moved

    jax.clear_caches()  # another test may have compiled for these shapes
    programs = len(compilations(caplog, lambda: aligned(4)))
    assert programs
    if small:
        # Composed maps of two sizes, and a move of each of the four kinds of leaves.
        assert programs <= 6
    assert not compilations(caplog, lambda: aligned(7))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"family": {"h{i}": Family.POSITIVE_MONOMIAL}},
        {"family": {"h{i}": Family.SIGNED_PERMUTATION}},
        {"family": {"s": Family.ORTHOGONAL}},
        {"family": {"s": Family.LINEAR}},
    ],
)
def test_numpy_and_compiled_programs_agree(monkeypatch, options):
    a, b, s = tower(3)
    s = replace(
        s,
        spaces=tuple(
            x._replace(nonlinearity="linear") if x.name[0] == "h" else x for x in s.spaces
        ),
    )
    found = align.match_weights(a, b, s, **options)
    monkeypatch.setattr(problem, "SMALL", 0)
    expected = align.match_weights(a, b, s, **options)
    assert found.converged == expected.converged
    np.testing.assert_allclose(found.distance, expected.distance, rtol=1e-5)
    for name, m in expected.maps.items():
        np.testing.assert_allclose(found.maps[name].dense().write, m.dense().write, atol=1e-4)


@pytest.mark.parametrize("axes", [("x* v head", "head* v* y"), ("x* head v", "v* head* y")])
def test_small_leaves_move_by_a_map_for_each_block(axes):
    rng = np.random.default_rng(4)
    shape = {"x*": 5, "v": 4, "head": 3, "v*": 4, "head*": 3, "y": 5}
    shapes = [[shape[axis] for axis in leaf.split()] for leaf in axes]
    a = {k: rng.normal(size=n).astype("f4") for k, n in zip(("in", "out"), shapes, strict=True)}
    orders = [rng.permutation(4) for _ in range(3)]
    b = {k: x.copy() for k, x in a.items()}
    b |= {"out": 0 * b["out"], "in": 0 * b["in"]}
    for k, leaf in zip(("in", "out"), axes, strict=True):
        names = [axis.strip("*") for axis in leaf.split()]
        one, two = (
            np.moveaxis(x[k], [names.index(n) for n in ("head", "v")], (0, 1)) for x in (a, b)
        )
        for head, order in enumerate(orders):
            two[head] = one[head][order]
    s = spec(a, dict(zip(a, axes, strict=True)), spaces={"{x,y}": "outer", "{head,v}": "linear"})
    found = align.match_weights(a, b, s, within={"v": "head"})
    assert found.distance[-1] < 1e-9
    assert [m.tolist() for m in found.maps["v"].index] == [np.argsort(o).tolist() for o in orders]


def test_a_small_leaf_of_zeros_counts_nothing():
    a, b, s = networks()
    for side in (a, b):
        side["out"] = 0 * side["out"]
    assert np.isfinite(align.match_weights(a, b, s).distance[-1])


class Stored:
    """A tensor that counts how many of its entries are read."""

    name, source = "x", "memory"

    def __init__(self, x, read):
        self.x, self.read_of = x, read
        self.shape, self.dtype = x.shape, x.dtype

    def read(self, out, start=0):
        self.read_of.append(out.size)
        out[...] = self.x.reshape(-1)[start : start + out.size]


@pytest.mark.slow
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


def test_spaces_that_share_no_tensor_are_solved_at_once(monkeypatch):
    rng = np.random.default_rng(0)
    shapes = {"g_in": (4, 5), "g_out": (5, 4), "h_in": (4, 6), "h_out": (6, 4)}
    a = {name: rng.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    orders = {"g": rng.permutation(5), "h": rng.permutation(6)}
    b = {k: x[:, orders[k[0]]] if k.endswith("in") else x[orders[k[0]]] for k, x in a.items()}
    axes = {"g_in": "x* g", "g_out": "g* y", "h_in": "x* h", "h_out": "h* y"}
    s = spec(a, axes, spaces={"{x,y}": "outer", "{g,h}": "relu"})
    monkeypatch.setattr(problem, "ASIDE", 1)
    both = threading.Barrier(2, timeout=20)

    def assign(benefit):
        both.wait()
        return align.hungarian(benefit)

    found = align.match_weights(a, b, s, assignment=assign).maps
    for name, order in orders.items():
        assert found[name].index.tolist() == np.argsort(order).tolist()


@pytest.mark.parametrize("family", [None, *slow({"h{i}": Family.POSITIVE_MONOMIAL})])
def test_other_threads_do_not_change_the_maps(monkeypatch, family):
    a, b, s = tower(3)
    noise = np.random.default_rng(1)
    b = {k: x + noise.normal(size=x.shape).astype("f4") for k, x in b.items()}
    here = align.match_weights(a, b, s, family=family)
    monkeypatch.setattr(problem, "ASIDE", 1)
    aside = align.match_weights(a, b, s, family=family)
    assert len(here.distance) > 1, "a sweep has changed a map"
    assert aside.distance == here.distance
    for name, m in here.maps.items():
        assert aside.maps[name].index.tolist() == m.index.tolist()
