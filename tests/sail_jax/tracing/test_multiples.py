"""Numbers that depend on a size, and gains that only matrices read, in small networks by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sail_jax import spec_of
from sail_jax.tracing.multiples import Number, changed

TOKENS = np.array([[1, 4, 2]])


def params(width, size):
    shapes = {
        "embed": (5, width), "gain": (width,), "q": (width, size), "k": (width, size),
        "v": (width, size), "head": (size, 3),
    }  # fmt: skip
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def rms(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def attention(p, tokens, *, scaled, embedded):
    x = p["embed"][tokens]
    if embedded:
        x = x * jnp.sqrt(jnp.float32(x.shape[-1]))
    x = rms(x) * p["gain"]
    q, k, v = (x @ p[name] for name in "qkv")
    scores = q @ k.swapaxes(-1, -2)
    if scaled:
        scores = scores / np.sqrt(q.shape[-1])
    return jax.nn.softmax(scores, -1) @ v @ p["head"]


def numbers(width, size, *, scaled=True, embedded=True):
    def apply(p, x):
        return attention(p, x, scaled=scaled, embedded=embedded)

    return spec_of(apply, params(width, size), TOKENS).multiples.numbers


def test_numbers_that_follow_from_a_size_change_with_it():
    base = numbers(16, 4)
    ((wide, ratio),) = changed(base, numbers(64, 4)) or ()
    assert (wide.leaf, ratio) == ("embed", pytest.approx(2))  # the root of 64/16
    ((deep, ratio),) = changed(base, numbers(16, 36)) or ()
    assert (deep.leaf, ratio) == ("", pytest.approx(1 / 3))  # one over the root of 36/4


def test_a_mean_is_no_number():
    """The width is what the mean square is divided by, and nothing else uses it."""
    assert changed(numbers(16, 4, embedded=False), numbers(64, 4, embedded=False)) == []
    assert changed(numbers(16, 4, scaled=False), numbers(16, 36, scaled=False)) == []


def test_numbers_differ_by_more_than_rounding():
    one = [Number("mul", 1.0)]
    assert changed(one, [Number("mul", 1.01)]) == [(one[0], 1.01)]
    assert changed(one, [Number("mul", 1.0 + 2.0**-23)]) == []


def test_other_operations_are_not_compared():
    assert changed(numbers(16, 4), numbers(16, 4, scaled=False)) is None
    assert changed([Number("mul", 2.0)], [Number("add", 2.0)]) is None


@pytest.mark.parametrize("within", [lambda f: f, jax.jit, jax.checkpoint])
def test_gains_that_matrices_alone_read(within):
    def apply(p, x):
        return within(lambda p: attention(p, x, scaled=True, embedded=False))(p)

    found = spec_of(apply, params(8, 4), TOKENS).multiples
    assert found.readers == {"gain": ("k", "q", "v")}


@pytest.mark.parametrize(
    "after",
    [
        lambda y, p: y @ p["q"] + y.sum(-1, keepdims=True),  # read by a sum too
        lambda y, p: (y + 1) @ p["q"],
        lambda y, p: (y @ p["q"], y),  # handed out
        lambda y, p: jax.nn.relu(y) @ p["q"],
    ],
)
def test_gains_that_something_else_reads_are_not_listed(after):
    def apply(p, x):
        return after(rms(p["embed"][x]) * p["gain"], p)

    assert "gain" not in spec_of(apply, params(8, 4), TOKENS).multiples.readers


def test_a_split_of_a_number_has_parts():
    """An LSTM of torch begins with parts of zeros."""

    def apply(params, x):
        first, second = jnp.split(jnp.zeros(4), 2)
        return jnp.tanh(x @ params["in"] + first) @ params["out"] + second

    params = {"in": np.ones((3, 2), np.float32), "out": np.ones((2, 2), np.float32)}
    axes = dict(spec_of(apply, params, np.ones((1, 3), np.float32)).spec.leaves)
    assert axes["out"][0][0].space == axes["in"][1][0].space
