"""Factors that qwix stores next to weights: their product added, in every layout that it makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sail_jax import lora, methods
from sail_jax.basis.spaces import spec

# The sizes of: stream, layers, heads, head, hidden, rank.
SIZES = dict(zip("elnhfr", (6, 3, 4, 5, 7, 2), strict=True))
# Axes of the weight, of both factors as qwix makes them, and whether these join their axes.
LAYOUTS = {
    "a Linear": ("ef", "er", "rf", False),
    "an einsum of queries": ("enh", "er", "rnh", False),
    "an einsum with heads in front": ("neh", "er", "rnh", False),
    "an einsum of outputs": ("nhe", "nhr", "re", False),
    "a DenseGeneral": ("enh", "er", "rnh", True),
    "a DenseGeneral of outputs": ("nhe", "nhr", "re", True),
    "stacked on axis 1": ("elnh", "elr", "rlnh", False),
    "stacked on axis 0": ("lenh", "ler", "lrnh", False),
    "outputs stacked on axis 1": ("nlhe", "nlhr", "rle", False),
    "a batch of experts": ("lef", "ler", "lrf", False),
}


def array(rng, axes, joined, at):
    shape = [SIZES[x] for x in axes]
    x = rng.standard_normal(shape).astype(np.float32)
    if not joined:
        return x, x
    rank = axes.index("r")
    return x, x.reshape((-1, shape[rank]) if at == "a" else (shape[rank], -1))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_product_is_added(name):
    w_axes, a_axes, b_axes, joined = LAYOUTS[name]
    rng = np.random.default_rng(0)
    weight, _ = array(rng, w_axes, False, "")
    a, stored_a = array(rng, a_axes, joined, "a")
    b, stored_b = array(rng, b_axes, joined, "b")
    product = np.einsum(f"{a_axes},{b_axes}->{w_axes}", a.astype(float), b.astype(float))
    params = {"m": {"w": weight, "w_lora_a": stored_a, "w_lora_b": stored_b, "bias": np.ones(2)}}
    out = lora.fold(jax.tree.map(jnp.asarray, params), alpha=3.0)
    assert out["m"].keys() == {"w", "bias"}
    np.testing.assert_allclose(out["m"]["w"], weight + 3.0 / 2 * product, rtol=1e-5, atol=1e-5)


def test_square_weights_ask_for_their_spaces():
    rng = np.random.default_rng(0)
    w, a, b = (rng.standard_normal(s).astype(np.float32) for s in ((4, 4, 4), (4, 2), (2, 4, 4)))
    params = {"q": {"w": w, "w_lora_a": a, "w_lora_b": b}}
    with pytest.raises(ValueError, match=r"'q/w' of shape \(4, 4, 4\).*are ambiguous.*give `spec`"):
        lora.fold(params, 2.0)
    spaces = spec(
        {"q": {"w": w}}, {"q/w": "heads resid* size"}, spaces={"{heads,resid,size}": "outer"}
    )
    out = lora.fold(params, 2.0, spec=spaces)["q"]["w"]
    np.testing.assert_allclose(out, w + np.einsum("er,rnh->neh", a, b), atol=1e-5)


def test_states_of_nnx_stay_states():
    class Layer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.zeros((3, 2), jnp.bfloat16))
            self.w_lora_a = nnx.LoRAParam(jnp.ones((3, 1)))
            self.w_lora_b = nnx.LoRAParam(jnp.ones((1, 2)))

    state = nnx.state({"layers": [Layer(), Layer()]})
    out = lora.fold(state, alpha=2.0)
    assert isinstance(out, nnx.State)
    assert isinstance(out["layers"][1]["w"], nnx.Param)
    assert out["layers"][1]["w"].get_value().tolist() == [[2.0, 2.0]] * 3
    assert out["layers"][1]["w"].get_value().dtype == jnp.bfloat16
    assert len(jax.tree.leaves(out)) == 2


W = {"w": np.ones((3, 2))}
A, B = {"w_lora_a": np.ones((3, 1))}, {"w_lora_b": np.ones((1, 2))}


@pytest.mark.parametrize(
    ("params", "alpha", "message"),
    [
        (W, 1.0, "such as 'kernel_lora_a' of qwix, got none"),
        (W | A, 1.0, "'w_lora_a': the other factor of 'w' is missing"),
        (A | B, 1.0, "its weight 'w' is missing; dequantise quantised weights"),
        (
            W | A | {"w_lora_b": np.ones((1, 5))},
            1.0,
            r"'w' of shape \(3, 2\): factors",
        ),
        ({"w": np.ones((1,) * 30)} | A | B, 1.0, "do not fit it"),
        (W | A | B, float("nan"), "alpha: expected a finite number, got nan"),
    ],
)
def test_what_does_not_fit_is_named(params, alpha, message):
    with pytest.raises(ValueError, match=message):
        lora.fold(params, alpha)


def test_factors_of_runs_are_not_merged_apart():
    runs = [{"m": {**W, **A, **B}}] * 2
    with pytest.raises(ValueError, match=r"leaf 'm/w_lora_a'.*product of averages.*lora\.fold"):
        methods.linear()(runs)
    folded = [lora.fold(jax.tree.map(jnp.asarray, run), 1.0) for run in runs]
    assert methods.linear()(folded)["m"]["w"].tolist() == [[2.0, 2.0]] * 3
