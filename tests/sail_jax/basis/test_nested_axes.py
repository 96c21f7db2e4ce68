"""An axis is a tree of products and sums: its maps are Kronecker products and direct sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import block_diag

from sail_jax import align, growth, unfuse
from sail_jax.basis.axes import blocks, format_axes, parse_axes
from sail_jax.basis.change_basis import by_block, change_basis
from sail_jax.basis.maps import SpaceMap
from sail_jax.basis.spaces import Leaf, Space, Spec, spec

SIZES = {"a": 2, "b": 3, "c": 1, "d": 2}
NEW = {"a": 3, "b": 2, "c": 2, "d": 2}


def text_of(tree):
    """A tree is a word such as "a*", or ("*" or "+", trees)."""
    if isinstance(tree, str):
        return tree
    return f"({(' + ' if tree[0] == '+' else ' ').join(map(text_of, tree[1]))})"


def matrix(tree, of):
    """The matrix along an axis, from one for each word: by definition, in float64."""
    if isinstance(tree, str):
        return of[tree]
    out, *rest = (matrix(part, of) for part in tree[1])
    for other in rest:
        out = np.kron(out, other) if tree[0] == "*" else block_diag(out, other)
    return out


def drawn(rng, depth=3):
    if depth == 0 or rng.random() < 0.2:
        return str(rng.choice(list(SIZES))) + rng.choice(["", "*"])
    return (str(rng.choice(["*", "+"])), [drawn(rng, depth - 1) for _ in range(rng.integers(1, 4))])


def maps_of(rng):
    return {
        n: SpaceMap(*(rng.normal(size=s).astype(np.float32) for s in ((NEW[n], k), (k, NEW[n]))))
        for n, k in SIZES.items()
    }


TREES = {
    "(h, 3, d)": ("*", ["a", ("+", ["b", "b*", "d"])]),
    "(h + 2, d)": ("*", [("+", ["a", "c", "c"]), "d*"]),
    "grouped": ("*", ["a*", ("+", [("*", ["d", "b"]), "b*", "d"])]),
    "sums beside sums": ("*", [("+", ["a", "d"]), ("+", ["b*", "c"]), "d"]),
    "blocks of blocks": ("+", ["b", ("*", ["a", ("+", ["c", ("*", ["d", ("+", ["a", "b"])])])])]),
    **{f"drawn {k}": drawn(np.random.default_rng(k)) for k in range(12)},
}


def case(name):
    return pytest.param(name, marks=pytest.mark.slow) if name.startswith("drawn") else name


@pytest.mark.parametrize("name", [case(name) for name in TREES])
@pytest.mark.parametrize("kind", ["params", "gradients"])
def test_a_nested_axis_moves_by_its_matrix(name, kind):
    rng = np.random.default_rng(0)
    tree, maps = TREES[name], maps_of(rng)
    (axis,) = parse_axes(text_of(tree))
    assert parse_axes(format_axes([axis])) == (axis,)
    spaces = tuple(Space(n, k, "") for n, k in SIZES.items())
    s = Spec((Leaf("w", ((), axis)),), spaces)
    word = {}
    for n, m in maps.items():
        sides = [np.asarray(x, float) for x in (m.write, m.read.T)]
        word[n], word[f"{n}*"] = sides if kind == "params" else sides[::-1]
    dense = matrix(tree, word)
    ones = {w: np.ones(1) for w in word}
    x = rng.normal(size=(2, dense.shape[1])).astype(np.float32)
    assert s.shape("w")[1] == x.shape[1]
    assert len(blocks(axis)) >= (len(matrix(tree, ones)) > 1)
    new = np.asarray(jax.jit(lambda x: change_basis({"w": x}, s, maps, kind=kind)["w"])(x))
    assert new.shape[1] == s.resized(maps).shape("w")[1]
    # A product of up to five roundings, each of sums of a few entries of order ten.
    scale = np.abs(x).astype(float) @ np.abs(dense).T
    assert np.all(np.abs(new - x @ dense.T) <= 1e-6 * scale + 1e-6)


def test_blocks_within_a_product_are_taken_apart_and_joined():
    """By hand: two heads, each with a query of 1 unit and a value of 2."""
    x = np.arange(12).reshape(2, 6)
    s = spec({"w": x * 1.0}, {"w": "x* (h (q + v))"}, spaces={"{x,h,q,v}": "outer"},
             sizes={"h": 2, "q": 1})  # fmt: skip
    apart, parts = unfuse({"w": x}, s)
    assert {k: y.tolist() for k, y in apart.items()} == {
        "w[0]": [[0, 3], [6, 9]],
        "w[1]": [[1, 2, 4, 5], [7, 8, 10, 11]],
    }
    assert [format_axes(leaf.axes) for leaf in parts.leaves] == ["x* (h q)", "x* (h v)"]
    seen = []
    same = by_block(jnp.asarray(x), s.axes("w"), s, lambda y, of: seen.append(y.tolist()) or y)
    assert seen == [y.tolist() for y in apart.values()]
    assert same.tolist() == x.tolist()
    # Both axes of one array, with a block along one of them that covers the whole axis.
    twice = {"w": np.arange(36).reshape(6, 6)}
    s = Spec((Leaf("w", parse_axes("(h (q + v))* (h (q + v))")),), s.spaces)
    assert unfuse(twice, s)[0]["w[1,0]"].tolist() == [[6, 9], [12, 15], [24, 27], [30, 33]]


@pytest.mark.slow
def test_rates_and_fresh_units_along_a_nested_axis():
    """Two heads become three, of which the last copies the first."""
    net = {"in": jnp.ones((1, 6)), "out": jnp.ones((4, 1))}
    s = spec(net, {"in": "x* (h (q + v))", "out": "(h v)* y"}, sizes={"h": 2},
             spaces={"{x,y,q}": "outer", "h": "odd", "v": "linear"})  # fmt: skip
    maps = {"h": growth.widen(2, 3)}
    large = change_basis(net, s, maps)
    rates = growth.learning_rates(large, s, maps, "sgd")
    assert rates["in"].tolist() == [[2, 2, 2, 1, 1, 1, 2, 2, 2]]
    assert rates["out"].ravel().tolist() == [0.5, 0.5, 1, 1, 0.5, 0.5]
    drawn = growth.fresh_units(large, s, maps, jax.random.key(0))
    kept = (drawn["in"] == 1)[0].tolist()
    assert kept == [True] * 6 + [False] * 3


def test_a_nested_axis_says_its_sizes():
    rules = {"in": "x* (kv (group q + q* + v))", "out": "(kv group v)* y"}
    params = {"in": jnp.ones((3, 2 * (3 * 4 + 4 + 5))), "out": jnp.ones((30, 2))}
    words = {"{x,y}": "outer", "q": "dot", "{kv,group,v}": "linear"}
    s = spec(params, rules, spaces=words, sizes={"kv": 2, "group": 3})
    assert {x.name: x.size for x in s.spaces} == {
        "group": 3, "kv": 2, "q": 4, "v": 5, "x": 3, "y": 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"30 units of .*, .v. has 1 in leaf .in."):
        spec(params, rules, spaces=words, sizes={"kv": 2, "group": 3, "q": 5})


@pytest.mark.slow
def test_every_block_that_writes_a_space_is_repaired():
    """Two layers are stored in one matrix; one of them has the statistics of its endpoint."""
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(64, 3)).astype(np.float32)]
    good = {"w": rng.normal(size=(3, 6)), "b": rng.normal(size=2), "out": np.ones((2, 1))}
    good = {k: x.astype(np.float32) for k, x in good.items()}
    spaces = {"{x,y,c}": "outer", "a": "linear"}
    s = spec(good, {"w": "x* (c + a)", "b": "a", "out": "a* y"}, spaces=spaces, sizes={"c": 4})

    def seen(p, x):
        return {"a": x @ p["w"][:, 4:] + p["b"]}

    fixed = align.repair(good | {"w": 0.1 * good["w"]}, [good], s, seen, data, ["a"])
    np.testing.assert_allclose(fixed["w"][:, 4:], good["w"][:, 4:], rtol=1e-4)
    np.testing.assert_array_equal(fixed["w"][:, :4], np.float32(0.1) * good["w"][:, :4])


def test_a_factor_of_width_widens_the_second_of_two_blocks():
    net = {"in": np.ones((3, 6), np.float32), "a": np.ones((2, 1), np.float32)}
    net["b"] = np.ones((4, 1), np.float32)
    s = spec(net, {"in": "x* (a + b)", "a": "a* y", "b": "b* y"},
             spaces={"{x,y}": "outer", "{a,b}": "relu"})  # fmt: skip
    grown = growth.plan(net, {}, {"width": "2x"}, "hypercloning", rules=s)
    assert {name: m.new for name, m in grown.maps.items()} == {"a": 4, "b": 8}
