"""Learned maps: SAIL's and LiGO's, their tying, their gradients by hand, and training them."""

from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sail_jax import growth
from sail_jax.basis.certificate import certificate, exactness
from sail_jax.basis.change_basis import change_basis
from sail_jax.basis.spaces import spec
from sail_jax.growth import learned

KEY = jax.random.key(17)
EPS = float(np.finfo(np.float32).eps)
L, D, H, V = 2, 4, 6, 3


def draw(*shape, seed=0):
    x = np.random.default_rng(seed).normal(size=shape) / shape[-1] ** 0.5
    return x.astype(np.float32)


PARAMS = {
    "embed": draw(V, D, seed=1),
    "head": draw(D, 2, seed=2),
    "layers": {
        "scale": 1 + 0.2 * draw(L, D, seed=3),
        "in": draw(L, D, H, seed=4),
        "bias": draw(L, H, seed=5),
        "out": draw(L, H, D, seed=6),
    },
}
RULES = {
    "embed": "x* resid",
    "head": "resid* y",
    "layers/scale": "layer diag(resid)",
    "layers/in": "layer resid* hidden",
    "layers/bias": "layer hidden",
    "layers/out": "layer hidden* resid",
}
SPACES = {"layer": "stack", "resid": "rmsnorm", "hidden": "relu", "{x,y}": "outer"}
SPEC = spec(PARAMS, RULES, spaces=SPACES)
SIZES = {"resid": 6, "hidden": 9, "layer": 3}


grow = jax.jit(change_basis, static_argnums=1)  # eagerly, each shape would compile by itself


@jax.jit
def forward(params, x):
    def block(x, p):
        h = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-3) * p["scale"]
        return x + jax.nn.relu(h @ p["in"] + p["bias"]) @ p["out"], None

    return jax.lax.scan(block, x @ params["embed"], params["layers"])[0] @ params["head"]


X = draw(16, V, seed=7)


@cache
def batches():
    x = draw(5, 16, V, seed=8)
    return {"x": x, "y": jax.vmap(partial(forward, PARAMS))(x)}


def loss(params, batch):
    return jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2)


# The printed formulas


@pytest.mark.parametrize("shape", [(4, 3, 6, 5), (4, 4, 4, 4)])
def test_gradients_of_width(shape):
    """Autodiff agrees with G C_out theta^T and G^T C_in theta, not with SAIL's App. F.1."""
    n, m, new_n, new_m = shape
    theta, c_in, c_out = draw(n, m), draw(new_n, n, seed=1), draw(new_m, m, seed=2)
    target = draw(new_n, new_m, seed=3)
    f = lambda w: jnp.sum(jnp.tanh(w) * target)  # noqa: E731
    whole = lambda a, b: f(a @ theta @ b.T)  # noqa: E731
    want = jax.jit(jax.grad(whole, argnums=(0, 1)))(c_in, c_out)
    G = jax.jit(jax.grad(f))(c_in @ theta @ c_out.T)
    chex.assert_trees_all_close(learned.width_gradients(theta, c_in, c_out, G), want, atol=20 * EPS)
    printed = (lambda: G @ (theta @ c_out.T), lambda: G @ (c_in @ theta).T)
    for formula, right in zip(printed, want, strict=True):
        if n != new_n:
            with pytest.raises(TypeError, match="contracting dimensions"):
                formula()
        else:  # where all shapes are alike it conforms, and is wrong
            assert np.abs(np.asarray(formula()) - np.asarray(right)).max() > 0.1


@pytest.mark.slow
def test_gradients_through_change_basis():
    """The formulas hold for the C of a leaf inside a whole network."""
    wide = learned.sail_spec(SPEC)
    free = learned.sail_init(PARAMS, SPEC, {"hidden": 9}, key=KEY)
    new = grow(PARAMS, wide, learned.sail_maps(free))
    batch = jax.tree.map(lambda x: x[0], batches())
    G = np.asarray(jax.jit(jax.grad(loss))(new, batch)["layers"]["in"])
    through = jax.grad(lambda free: loss(grow(PARAMS, wide, learned.sail_maps(free)), batch))
    of_free = jax.jit(through)(free)
    c, eye = free["layers/in@2.0"]["c"], np.eye(D, dtype=np.float32)
    by_layer = [
        learned.width_gradients(PARAMS["layers"]["in"][k], eye, c, G[k])[1] for k in range(L)
    ]
    # sums of up to 32 products, relative to the largest
    got = np.asarray(of_free["layers/in@2.0"]["c"])
    want = sum(map(np.asarray, by_layer))
    chex.assert_trees_all_close(got, want, atol=100 * EPS * np.abs(got).max())


# SAIL


@pytest.mark.slow
def test_sail_frees_every_use():
    wide = learned.sail_spec(SPEC)
    free = learned.sail_init(PARAMS, SPEC, SIZES)
    # eight uses of resid and hidden, and one depth for all
    uses = sum(len(SPEC.uses(name)) for name in ("resid", "hidden"))
    assert len(free) == uses + 1 == 9
    new = grow(PARAMS, wide, learned.sail_maps(free))
    shapes = jax.tree.map(jnp.shape, new["layers"])
    assert shapes == {"scale": (3, 6), "in": (3, 6, 9), "bias": (3, 9), "out": (3, 9, 6)}
    assert new["embed"].shape == (V, 6)
    W = PARAMS["layers"]["in"]
    d = np.asarray(jax.nn.softmax(free["layer"]["logits"], axis=-1))
    c_in, c_out = (np.asarray(free[f"layers/in@{k}.0"]["c"]) for k in (1, 2))
    want = [c_in @ sum(d[k, i] * W[i] for i in range(L)) @ c_out.T for k in range(3)]
    chex.assert_trees_all_close(new["layers"]["in"], np.stack(want), atol=20 * EPS)


@pytest.mark.slow
def test_sail_starts_from_the_singular_vectors():
    """For a matrix: the C of `singular`, as products; for the network: padding, repeated layers."""
    net = {"w": PARAMS["embed"]}
    s = spec(net, {"w": "x* y"}, spaces={"{x,y}": "outer"})
    for sizes in ({"x": 5, "y": 6}, {"x": 2, "y": 7}, {"x": 2, "y": 3}):
        free = learned.sail_init(net, s, sizes)
        new = grow(net, learned.sail_spec(s), learned.sail_maps(free))
        c_in, c_out = map(np.asarray, growth.singular(net["w"], sizes["x"], sizes["y"]))
        chex.assert_trees_all_close(new["w"], c_in @ net["w"] @ c_out.T, atol=20 * EPS)
    free = learned.sail_init(PARAMS, SPEC, SIZES, sharpness=100.0)
    new = grow(PARAMS, learned.sail_spec(SPEC), learned.sail_maps(free))
    pads = {n: growth.pad(SPEC.space(n).size, SIZES[n]) for n in ("resid", "hidden")}
    want = grow(PARAMS, SPEC, pads | {"layer": growth.deepen(L, 3, "interpolate")})
    chex.assert_trees_all_close(new, want, atol=20 * EPS)


@pytest.mark.slow
def test_sail_starts_fewer_layers_near_means_of_neighbours():
    """Eq. (9) for 4 layers and 2: with large logits half of each of two, otherwise nearly so."""
    four = jax.tree.map(np.array, PARAMS)
    four["layers"] = {name: draw(4, *x.shape[1:], seed=9) for name, x in PARAMS["layers"].items()}
    s = spec(four, RULES, spaces=SPACES)
    for sharpness, error in ((4.0, 0.02), (50.0, EPS)):
        free = learned.sail_init(four, s, {"layer": 2}, sharpness=sharpness)
        d = np.asarray(learned.sail_maps(free)["layer"].write)
        np.testing.assert_allclose(d, [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]], atol=error)
        np.testing.assert_allclose(d.sum(1), 1, atol=4 * EPS)
    new = change_basis(four, learned.sail_spec(s), learned.sail_maps(free))
    want = four["layers"]["in"].reshape(2, 2, D, H).mean(1)
    np.testing.assert_allclose(new["layers"]["in"], want, atol=4 * EPS)
    # Shares that are not alike: 2/3 and 1/3, up to the logits of the others.
    uneven = learned.sail_init(four, s, {"layer": 3}, sharpness=50.0)["layer"]["logits"]
    np.testing.assert_allclose(jax.nn.softmax(uneven)[0], [0.75, 0.25, 0, 0], atol=4 * EPS)


# LiGO


@pytest.mark.slow
def test_ligo_is_tied_as_published():
    """W' = B W A^T with A the B of what is read, layers mixed first, leaf by leaf."""
    free = learned.ligo_init(SPEC, SIZES, KEY)
    s = learned.ligo_spec(SPEC)
    new = grow(PARAMS, s, learned.ligo_maps(free))
    B = {
        n: np.concatenate([np.eye(SPEC.space(n).size, dtype=np.float32), free[n]["rows"]])
        for n in ("resid", "hidden")
    }
    mixed = {
        n: np.tensordot(np.asarray(free[f"layer@layers/{n}"]["depth"]), x, 1)
        for n, x in PARAMS["layers"].items()
    }
    want = {
        "embed": PARAMS["embed"] @ B["resid"].T,
        "head": B["resid"] @ PARAMS["head"],
        "layers": {
            "scale": mixed["scale"] @ B["resid"].T,
            "in": np.einsum("lij,ai,bj->lab", mixed["in"], B["resid"], B["hidden"]),
            "bias": mixed["bias"] @ B["hidden"].T,
            "out": np.einsum("lij,ai,bj->lab", mixed["out"], B["hidden"], B["resid"]),
        },
    }
    chex.assert_trees_all_close(new, want, atol=30 * EPS)
    # not function-preserving, and reported so: A has no count of copies
    maps = {n: m for n, m in learned.ligo_maps(free).items() if "@" not in n}
    assert all(s.lost for s in exactness(SPEC, maps).spaces)
    assert not certificate(forward, PARAMS, grow(PARAMS, SPEC, maps), X).preserved


@pytest.mark.slow
@pytest.mark.parametrize("width", ["rand", "sel"])
@pytest.mark.parametrize("depth", ["stack", "interlace", "rand"])
def test_ligo_initialisation(width, depth):
    free = learned.ligo_init(SPEC, SIZES, KEY, width=width, depth=depth)
    assert set(free) == {"resid", "hidden"} | {f"layer@layers/{n}" for n in PARAMS["layers"]}
    for value in free.values():
        rows = np.asarray(*value.values())
        chex.assert_trees_all_close(rows.sum(1), np.ones(len(rows), np.float32), atol=4 * EPS)
        assert (rows >= 0).all()
    if width == "sel":
        assert ((np.asarray(free["resid"]["rows"]) == 1).sum(1) == 1).all()
    picked = np.argmax(free["layer@layers/in"]["depth"], axis=1).tolist()
    if depth != "rand":
        assert picked == ([0, 1, 0] if depth == "stack" else [0, 0, 1])
    one, two = (free[f"layer@layers/{n}"]["depth"] for n in ("in", "out"))
    assert not np.array_equal(one, two)  # own coefficients


# Training

METHODS = {
    "SAIL": (
        learned.sail_spec(SPEC),
        lambda: learned.sail_init(PARAMS, SPEC, SIZES, key=KEY),
        learned.sail_maps,
    ),
    "LiGO": (
        learned.ligo_spec(SPEC),
        lambda: learned.ligo_init(SPEC, SIZES, KEY),
        learned.ligo_maps,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optax.adam(1e-2), id="adam"),
        pytest.param(optax.sgd(1e-2, momentum=0.9), id="sgd"),
    ],
)
def test_learning_lowers_the_loss_with_the_source_frozen(name, optimizer):
    s, init, maps = METHODS[name]
    free, data, before = init(), batches(), jax.tree.map(np.copy, PARAMS)
    train = jax.jit(
        lambda free: learned.learn_maps(
            loss, PARAMS, s, free, maps, data, steps=100, optimizer=optimizer
        )
    )
    got = train(free)
    assert float(got.losses[-5:].mean()) < 0.5 * float(got.losses[:5].mean())
    chex.assert_trees_all_equal(PARAMS, before)
    # what is returned is the source seen through the learned maps, and nothing else
    again = grow(PARAMS, s, maps(got.coefficients))
    chex.assert_trees_all_close(got.params, again, atol=30 * EPS)
    moved = jax.tree.map(
        lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), free, got.coefficients
    )
    assert min(jax.tree.leaves(moved)) > 0  # each coefficient takes part


@pytest.mark.slow
def test_errors():
    with pytest.raises(ValueError, match="no space 'hiden'"):
        learned.sail_init(PARAMS, SPEC, {"hiden": 8})
    with pytest.raises(ValueError, match="0 < old <= new"):
        learned.ligo_init(SPEC, {"hidden": 2}, KEY)
    with pytest.raises(ValueError, match="width: expected one of 'rand', 'sel'; got 'random'"):
        learned.ligo_init(SPEC, SIZES, KEY, width="random")
    s, init, maps = METHODS["LiGO"]
    free = init()
    with pytest.raises(ValueError, match="loss: expected finite values"):
        learned.learn_maps(
            lambda p, b: loss(p, b) * jnp.nan, PARAMS, s, free, maps, batches(), steps=2
        )
