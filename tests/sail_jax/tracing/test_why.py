"""`Inferred.why` on small networks with one known equation that fixes an axis, marked `# fixes`."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sail_jax import spec_of

UNITS = 6
X = jax.ShapeDtypeStruct((4, 3), jnp.float32)
WEIGHTS = np.arange(1.0, 1.0 + UNITS).astype("f4")
ORDER = np.array([2, 0, 1, 5, 4, 3])
CASES = []


def case(reason, at="in", axis=1, inputs=(X,), **shapes):
    """A network that fixes an axis of a parameter, and the reason without the line.

    Its parameters are `in` (3, 6) and `out` (6, 2), or have the given shapes.
    """
    shapes = shapes or {"in": (3, UNITS), "out": (UNITS, 2)}

    def register(net):
        CASES.append(pytest.param(net, reason, (at, axis), inputs, shapes, id=net.__name__))
        return net

    return register


def marked(net, mark="# fixes"):
    """The number of the marked line of a function."""
    lines, first = inspect.getsourcelines(net)
    (line,) = (first + k for k, text in enumerate(lines) if text.rstrip().endswith(mark))
    return line


@pytest.mark.parametrize(("net", "reason", "where", "inputs", "shapes"), CASES)
def test_the_equation_that_fixed_an_axis(net, reason, where, inputs, shapes):
    params = {k: jax.ShapeDtypeStruct(size, jnp.float32) for k, size in shapes.items()}
    found = spec_of(net, params, *inputs)
    line = f" ({Path(__file__).name}:{marked(net)})"
    assert found.why[where] == reason.replace(" @", line)


def test_an_order_is_passed_on_with_the_equation_that_passed_it_on():
    def net(p, x):
        h = jnp.cumsum(x @ p["in"], -1)  # fixes
        return jnp.tanh(h) @ p["out"]  # passes on

    params = {"in": jnp.zeros((3, UNITS)), "out": jnp.zeros((UNITS, 2))}
    lines = (marked(net, mark) for mark in ("# fixes", "# passes on"))
    first, second = (f"(test_why.py:{line})" for line in lines)
    found = spec_of(net, params, X)
    assert found.why["out", 0] == f"the order of cumsum {first}: dot_general {second}"


def test_there_are_forty_networks():
    assert len(CASES) >= 40


@case("the order of the network's input: dot_general @", axis=0)
def reads_the_input(p, x):
    h = x @ p["in"]  # fixes
    return jnp.tanh(h) @ p["out"]


@case("the order of the network's input: dot_general @", axis=0, **{"in": (6, 4), "out": (4, 2)})
def reads_two_inputs_end_to_end(p, x):
    both = jnp.concatenate([x, x], -1)
    h = both @ p["in"]  # fixes
    return jnp.tanh(h) @ p["out"]


@case("the network's output", at="out")
def is_the_output(p, x):
    return jnp.tanh(x @ p["in"]) @ p["out"]  # fixes


@case("units are numbered: the network's output")
def numbers_the_largest_unit(p, x):
    return jnp.argmax(x @ p["in"], -1)  # fixes


@case("units are numbered: the network's output")
def numbers_the_largest_units(p, x):
    return lax.top_k(x @ p["in"], 2)[1]  # fixes


@case("accumulated along it: cumsum @")
def cumulative_sum(p, x):
    h = x @ p["in"]
    h = jnp.cumsum(h, -1)  # fixes
    return h @ p["out"]


@case("accumulated along it: cumprod @")
def cumulative_product(p, x):
    h = x @ p["in"]
    h = jnp.cumprod(h, -1)  # fixes
    return h @ p["out"]


@case("accumulated along it: cummax @")
def running_maximum(p, x):
    h = x @ p["in"]
    h = lax.cummax(h, 1)  # fixes
    return h @ p["out"]


@case("accumulated along it: cumlogsumexp @")
def running_log_sum(p, x):
    h = x @ p["in"]
    h = lax.cumlogsumexp(h, 1)  # fixes
    return h @ p["out"]


@case("sorted along it: sort @")
def sorted_units(p, x):
    h = x @ p["in"]
    h = jnp.sort(h, -1)  # fixes
    return h @ p["out"]


@case("sorted along it: sort @")
def ranks(p, x):
    h = x @ p["in"]
    h = jnp.argsort(h, -1).astype(float)  # fixes
    return h @ p["out"]


@case("its units are used one by one: slice @")
def shifted(p, x):
    h = x @ p["in"]
    h += jnp.roll(h, 1, -1)  # fixes
    return h @ p["out"]


@case("its units are used one by one: slice @", **{"in": (3, UNITS), "out": (UNITS - 1, 2)})
def differences(p, x):
    h = x @ p["in"]
    h = jnp.diff(h, axis=-1)  # fixes
    return h @ p["out"]


@case("its units are reversed: rev @")
def reversed_units(p, x):
    h = x @ p["in"]
    h += h[:, ::-1]  # fixes
    return h @ p["out"]


@case("the order of a constant: mul @")
def constant_factors(p, x):
    h = x @ p["in"]
    h *= WEIGHTS  # fixes
    return h @ p["out"]


@case("the order of a constant: add @")
def constant_offsets(p, x):
    h = x @ p["in"]
    h += WEIGHTS  # fixes
    return h @ p["out"]


@case("the order of a constant: add @")
def softmax_with_a_constant_bias(p, x):
    h = x @ p["in"]
    h = jax.nn.softmax(h + WEIGHTS, -1)  # fixes
    return h @ p["out"]


@case("the order of a constant: pow @")
def constant_powers(p, x):
    h = x @ p["in"]
    h = h**WEIGHTS  # fixes
    return h @ p["out"]


@case("the order of a constant: max @")
def constant_bounds(p, x):
    h = x @ p["in"]
    h = jnp.maximum(h, WEIGHTS)  # fixes
    return h @ p["out"]


@case("the order of a constant: div @")
def constant_divisors(p, x):
    h = x @ p["in"]
    h /= WEIGHTS  # fixes
    return h @ p["out"]


@case("the order of a constant: select_n @")
def constant_mask(p, x):
    h = x @ p["in"]
    h = jnp.where(WEIGHTS > 3, h, 0)  # fixes
    return h @ p["out"]


@case("the order of a constant: dot_general @", **{"in": (3, UNITS)})
def sum_weighted_by_position(p, x):
    h = x @ p["in"]
    return h @ WEIGHTS  # fixes


@case("the order of a constant: dot_general @")
def constant_matrix(p, x):
    h = x @ p["in"]
    h = h @ np.eye(UNITS, dtype="f4")  # fixes
    return h @ p["out"]


@case("the order of a constant: mul @")
def rotary_halves(p, x):
    h = x @ p["in"]
    turned = jnp.concatenate([-h[:, 3:], h[:, :3]], -1)
    h = h + turned * WEIGHTS  # fixes
    return h @ p["out"]


@case("the order of eq @: mul @")
def one_hot_mask(p, x):
    h = x @ p["in"]
    h *= jax.nn.one_hot(2, UNITS)  # fixes
    return h @ p["out"]


@case("looked up by number: gather @")
def reordered_by_a_constant(p, x):
    h = x @ p["in"]
    h = h[:, ORDER]  # fixes
    return h @ p["out"]


@case("looked up by number: gather @", "table", 0, (jax.ShapeDtypeStruct((4,), jnp.int32),),
      table=(7, 5), out=(5, 2))  # fmt: skip
def embedding(p, tokens):
    h = p["table"][tokens]  # fixes
    return h @ p["out"]


@case("a part of it is looked up: dynamic_slice @", **{"in": (3, UNITS), "out": (2, 2)})
def part_at_a_computed_place(p, x):
    h = x @ p["in"]
    h = lax.dynamic_slice_in_dim(h, x.sum().astype(int), 2, 1)  # fixes
    return h @ p["out"]


@case("a part of it is written: dynamic_update_slice @")
def part_is_overwritten(p, x):
    h = x @ p["in"]
    h = lax.dynamic_update_slice_in_dim(h, h[:, :2], x.sum().astype(int), 1)  # fixes
    return h @ p["out"]


@case("written by number: scatter @")
def entries_are_overwritten(p, x):
    h = x @ p["in"]
    h = h.at[:, np.array([1, 3])].set(0.0)  # fixes
    return h @ p["out"]


@case("a window slides along it: conv_general_dilated @")
def convolution_over_units(p, x):
    h = (x @ p["in"])[:, None]
    h = lax.conv_general_dilated(h, np.ones((1, 1, 3), "f4"), (1,), "SAME")  # fixes
    return h[:, 0] @ p["out"]


@case("a window slides along it: conv_general_dilated @", "kernel", 0, kernel=(3, 3, 5), out=(5, 2))
def taps_of_a_convolution(p, x):
    size = ("NWC", "WIO", "NWC")
    h = lax.conv_general_dilated(x[None], p["kernel"], (1,), "SAME", None, None, size)  # fixes
    return h @ p["out"]


@case("a window slides along it: reduce_window_max @")
def maximum_pooling(p, x):
    h = x @ p["in"]
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME")  # fixes
    return h @ p["out"]


@case("a window slides along it: reduce_window_sum @")
def mean_pooling(p, x):
    h = x @ p["in"]
    h = lax.reduce_window(h, 0.0, lax.add, (1, 3), (1, 1), "SAME")  # fixes
    return h @ p["out"]


@case("a reshape across its parts: reshape @", **{"in": (3, UNITS), "out": (8, 2)})
def samples_and_units_are_mixed(p, x):
    h = x @ p["in"]
    h = h.reshape(-1, 8)  # fixes
    return h @ p["out"]


@case("a reshape in another order: reshape @")
def reshaped_in_column_order(p, x):
    h = x @ p["in"]
    h = lax.reshape(h, (4, UNITS), (1, 0))  # fixes
    return h @ p["out"]


@case("no rule for this primitive: fft @", **{"in": (3, UNITS), "out": (4, 2)})
def fourier_transform(p, x):
    h = x @ p["in"]
    h = jnp.fft.rfft(h, axis=-1).real  # fixes
    return h @ p["out"]


@case("no rule for this primitive: pure_callback @")
def function_of_the_host(p, x):
    h = x @ p["in"]
    size = jax.ShapeDtypeStruct((4, UNITS), jnp.float32)
    h = jax.pure_callback(lambda h: h, size, h)  # fixes
    return h @ p["out"]


@case("no rule for this primitive: cholesky @", **{"in": (3, UNITS)})
def factor_of_a_covariance(p, x):
    h = x @ p["in"]
    h = lax.linalg.cholesky(h.T @ h, symmetrize_input=False)  # fixes
    return jnp.sum(h)


@case("a scan goes along it: scan @")
def recurrence_over_units(p, x):
    h = x @ p["in"]
    h = lax.scan(lambda c, u: (c / 2 + u, c), jnp.zeros(4), h.T)[1].T  # fixes
    return h @ p["out"]


@case("the order of the network's input: add @", **{"in": (3, 3), "out": (3, 2)})
def residual_of_the_input(p, x):
    h = x @ p["in"]
    h = jnp.tanh(h) + x  # fixes
    return h @ p["out"]


@case("the order of the network's input: sub @", inputs=(X, X), **{"in": (3, 3)})
def distance_to_targets(p, x, y):
    h = x @ p["in"]
    return jnp.mean((h - y) ** 2)  # fixes


@case("the order of the network's input: add @", "place", 0, place=(4, 3), out=(3, 2))
def learned_positions(p, x):
    h = x + p["place"]  # fixes
    return h @ p["out"]


@case("the order of the network's input: add @", **{"in": (3, 4)})
def sum_with_its_transpose(p, x):
    h = x @ p["in"]
    return jnp.sum(jnp.tanh(h + h.T))  # fixes
