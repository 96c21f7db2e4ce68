"""Small functions for each rule: the computation, the shapes, and the parts that must
remain free."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

# Primitives that came after JAX 0.10.0 and that the installed JAX lacks. It uses others for them.
LATER = ("stack", "unstack", "log2", "one_minus_square", "polynomial")
LACKING = frozenset(name for name in LATER if not hasattr(lax, name))


class Case(NamedTuple):
    """A function of arrays whose axes are all free.

    Attributes:
      f: The function.
      shapes: The shapes of its arguments.
      free: The free parts of the arguments' axes after the forward pass, "_" for fixed ones: one
        word per axis, in which a letter is a space. Pins the exact result, not only its
        correctness.
    """

    f: Any
    shapes: tuple[tuple[int, ...], ...]
    free: str


def _elementwise(f, free="ab"):
    return Case(f, ((3, 4),), free)


def _on(name, change=lambda x: x):
    f = getattr(lax, name)
    return _elementwise(lambda x: f(change(x)))


def _of_two(name, change=lambda x: x):
    f = getattr(lax, name)
    return Case(lambda x, y: f(change(x), change(y)), TWO, "ab ab")


def _whole(x):
    return (jnp.abs(x) * 2).astype(jnp.int32)


def _convolve(groups):
    numbers = ("NWC", "WIO", "NWC")

    def f(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    return f


def _grouped(x):
    return x[:, :2] + 1, x[:, 2] * 2, x[:, 3] * 3


def _beside(x):
    return x[:3] + 1, x[3] * 2, x[4] * 3


TWO = ((3, 4), (3, 4))
UNARY = {
    **{
        name: _on(name)
        for name in (
            "neg", "cos", "exp", "exp2", "log1p", "expm1", "logistic", "erfc", "tanh", "sin", "tan",
            "asinh", "atan", "sinh", "erf", "sign", "abs", "square", "cbrt", "floor", "ceil",
            "is_finite", "cosh", "stop_gradient", "lgamma", "digamma",
            "bessel_i0e", "bessel_i1e",
        )
    },
    **{name: _on(name, lambda x: jnp.abs(x) + 0.5) for name in ("log", "sqrt", "rsqrt")},
    "log2": _elementwise(lambda x: jnp.log2(jnp.abs(x) + 0.5)),
    "one_minus_square": _elementwise(jax.vmap(jax.vmap(jax.grad(jnp.atanh)))),
    **{name: _on(name, lambda x: x / 9) for name in ("asin", "acos", "atanh", "erf_inv")},
    "acosh": _elementwise(lambda x: lax.acosh(jnp.abs(x) + 2)),
    **{name: _on(name, lambda x: lax.complex(x, x * x)) for name in ("real", "imag", "conj")},
    "round": _elementwise(lax.round),
    "not": _elementwise(lambda x: ~(x > 0)),
    "population_count": _elementwise(lambda x: lax.population_count((x > 0).astype(jnp.int32))),
    "clz": _elementwise(lambda x: lax.clz((x > 0).astype(jnp.int32))),
    "integer_pow": _elementwise(lambda x: x**3),
    "pow": _elementwise(lambda x: jnp.abs(x) ** 1.7),
    "pow, whole": _elementwise(lambda x: lax.pow(x, 3.0)),
    "convert_element_type": _elementwise(lambda x: x.astype(jnp.int32)),
    "reduce_precision": _elementwise(lambda x: lax.reduce_precision(x, 8, 3)),
    "optimization_barrier": _elementwise(lax.optimization_barrier),
    "copy": _elementwise(jnp.copy),
    "name": _elementwise(lambda x: checkpoint_name(x, "x")),
    "clamp": _elementwise(lambda x: lax.clamp(-0.5, x, 0.5)),
}  # fmt: skip

BINARY = {
    **{
        name: _of_two(name)
        for name in ("add", "sub", "mul", "div", "max", "min", "atan2", "nextafter", "complex")
    },
    "rem": Case(lambda x, y: lax.rem(x, jnp.abs(y) + 1), TWO, "ab ab"),
    "igamma": Case(lambda x, y: lax.igamma(jnp.abs(x) + 1, jnp.abs(y)), TWO, "ab ab"),
    "igammac": Case(lambda x, y: lax.igammac(jnp.abs(x) + 1, jnp.abs(y)), TWO, "ab ab"),
    **{name: _of_two(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{
        name: _of_two(f"bitwise_{name}", lambda x: x > 0) for name in ("and", "or", "xor")
    },
    **{
        name: _of_two(name, _whole)
        for name in ("shift_left", "shift_right_logical", "shift_right_arithmetic")
    },
    "polynomial": Case(lambda x, y: jnp.polyval(jnp.stack([x, y, x]), y), TWO, "ab ab"),
    "select_n": Case(lambda x, y: lax.select_n(x > 0, x, y), TWO, "ab ab"),
    "add, broadcast": Case(lambda x, y: x + y, ((3, 4), (4,)), "ab b"),
    "mul, by a row": Case(lambda x, y: x * y[:, None], ((3, 4), (3,)), "ab a"),
}  # fmt: skip

SHAPES = {
    "broadcast_in_dim": Case(lambda x: jnp.broadcast_to(x[:, None], (3, 5, 4)), ((3, 4),), "ab"),
    "squeeze": Case(lambda x: lax.squeeze(x, (1,)), ((3, 1, 4),), "a_b"),
    "transpose": Case(lambda x: x.transpose(2, 0, 1), ((2, 3, 4),), "abc"),
    "reshape, split": Case(lambda x: x.reshape(3, 2, 4) + 1, ((3, 8),), "a(bc)"),
    "reshape, join": Case(lambda x: x.reshape(3, 8) * 2, ((3, 2, 4),), "abc"),
    "reshape, across": Case(lambda x: x.reshape(8, 3), ((3, 8),), "__"),
    "reshape, repeat": Case(
        lambda x: jnp.broadcast_to(x[:, :, None], (3, 4, 2)).reshape(3, 8), ((3, 4),), "ab"
    ),
    "reshape, cut": Case(
        lambda x: (x.reshape(2, 3, 4)[:, 0] + 1, x.reshape(2, 3, 4)[:, 2].reshape(2, 2, 2) * 3),
        ((2, 12),),
        "a(b+c+(de))",
    ),
    "split, parts": Case(
        lambda x: tuple(jnp.split(x.reshape(3, 2, 4).transpose(1, 0, 2), 2)), ((3, 8),), "a(b+c)"
    ),
    "reshape, cut inside": Case(
        lambda x: tuple(jnp.split(x.reshape(2, 3, 4).transpose(1, 2, 0), 3)), ((24,),), "(a(b+c+d))"
    ),
    "reshape, cut twice": Case(lambda x: _grouped(x.reshape(3, 4, 2)), ((24,),), "(a((bc)+d+e))"),
    "reshape, cut beside": Case(lambda x: _beside(x.reshape(5, 3)), ((15,),), "((ab)+c+d)"),
    "reshape, joined again": Case(
        lambda x: x.reshape(2, 3, 4).reshape(6, 2, 2)[:, 0].reshape(2, 6)[0] + 1, ((24,),),
        "(_a(b+c))",
    ),
    "slice": Case(lambda x: x[:, 1:3], ((3, 5),), "a(_+b+c)"),
    "slice, strided": Case(lambda x: x[:, 1::2], ((3, 6),), "a(b_)"),
    "split": Case(lambda x: tuple(jnp.split(x, [2, 5], axis=1)), ((3, 8),), "a(b+c+d)"),
    "rev": Case(lambda x: jnp.flip(x, 0), ((3, 4),), "_a"),
    "concatenate": Case(lambda x, y: jnp.concatenate([x, y], 1), ((3, 4), (3, 2)), "ab ac"),
    "stack": Case(lambda x, y: jnp.stack([x, y], 1), TWO, "ab ab"),
    "unstack": Case(lambda x: jnp.unstack(x, axis=1)[1], ((3, 2, 4),), "a_b"),
    "pad": Case(lambda x: jnp.pad(x, ((0, 0), (2, 1))), ((3, 4),), "ab"),
    "pad, inside": Case(lambda x: lax.pad(x, 0.0, ((0, 0, 0), (0, 0, 1))), ((3, 4),), "a_"),
    "tile": Case(lambda x: lax.tile(x, (1, 2)) if hasattr(lax, "tile") else jnp.tile(x, (1, 2)),
                 ((3, 4),), "ab"),
    "iota": Case(
        lambda x: (
            (lax.iota(jnp.int32, 4)[:, None] == lax.iota(jnp.int32, 4)) * x[:, :, None]
        ).sum(1),
        ((3, 4),), "ab",
    ),
}  # fmt: skip

SUMS = {
    "reduce_sum": Case(lambda x: x.sum(1), ((3, 4),), "ab"),
    "reduce_max": Case(lambda x: x.max(1), ((3, 4),), "ab"),
    "reduce_min": Case(lambda x: x.min(0), ((3, 4),), "ab"),
    "reduce_prod": Case(lambda x: x.prod(1), ((3, 4),), "ab"),
    "reduce_and": Case(lambda x: (x > -1).all(1), ((3, 4),), "ab"),
    "reduce_or": Case(lambda x: (x > 1).any(1), ((3, 4),), "ab"),
    "reduce_xor": Case(lambda x: lax.reduce_xor(x > 0, axes=(1,)), ((3, 4),), "ab"),
    "argmax": Case(lambda x: jax.nn.one_hot(x.argmax(1), 4), ((3, 4),), "ab"),
    "argmin": Case(lambda x: jax.nn.one_hot(x.argmin(1), 4), ((3, 4),), "ab"),
    "cumsum": Case(lambda x: jnp.cumsum(x, 0), ((3, 4),), "_a"),
    "cumprod": Case(lambda x: jnp.cumprod(x, 0), ((3, 4),), "_a"),
    "cummax": Case(lambda x: lax.cummax(x, 0), ((3, 4),), "_a"),
    "cummin": Case(lambda x: lax.cummin(x, 0), ((3, 4),), "_a"),
    "cumlogsumexp": Case(lambda x: lax.cumlogsumexp(x, 0), ((3, 4),), "_a"),
    "dot_general": Case(lambda x, y: x @ y, ((3, 4), (4, 5)), "ab bc"),
    "dot_general, batch": Case(
        lambda x, y: jnp.einsum("bij,bjk->bik", x, y), ((2, 3, 4), (2, 4, 5)), "abc acd"
    ),
    "conv_general_dilated": Case(
        _convolve(1), ((2, 6, 3), (3, 3, 4)), "a_b _bc",
    ),
    "conv_general_dilated, grouped": Case(
        _convolve(2), ((2, 6, 4), (3, 2, 6)), "a_(bc) _c(bd)",
    ),
    "conv_general_dilated, depthwise": Case(
        _convolve(4), ((2, 6, 4), (3, 1, 4)), "a_b __b",
    ),
    "reduce_window_sum": Case(
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "VALID"), ((3, 4),), "a_"
    ),
    "reduce_window_max": Case(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"), ((3, 4),), "a_"
    ),
    "reduce_window_min": Case(
        lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2), (1, 2), "VALID"), ((3, 4),), "a_"
    ),
    "sort": Case(lambda x: jnp.sort(x, 1), ((3, 4),), "a_"),
    "top_k": Case(lambda x: lax.top_k(x, 2)[0], ((3, 4),), "ab"),
}  # fmt: skip

INDEXED = {
    "cut, at one place": Case(
        lambda x: (x.reshape(3, 2, 4)[:, [0]] + 1, x.reshape(3, 2, 4)[:, [-1]] * 2), ((24,),),
        "(a(b+c))",
    ),
    "cut, at a constant": Case(
        lambda x: lax.dynamic_slice(x, (0, 1), (3, 2)) + 1, ((3, 4),), "a(_+b+_)"
    ),
    "gather, by number": Case(lambda x: x[jnp.array([0, 2])], ((3, 4),), "_a"),
    "gather, by unit": Case(
        lambda x, y: jnp.take(y, x.argmax(1), axis=0), ((3, 4), (4, 5)), "ab bc"
    ),
    "gather, batched": Case(
        lambda x, y: jnp.take_along_axis(y, x.argmax(1)[:, None], axis=1), ((3, 4), (3, 4)), "ab ab"
    ),
    "gather, by two units": Case(
        lambda x, y: y[lax.iota(jnp.int32, 3), x.argmax(1)], ((3, 4), (3, 4)), "ab ab"
    ),
    "gather, by columns in another order": Case(
        lambda x, y: _crossed(x, y), ((4, 4), (4, 4)), "__ __"
    ),
    "scatter-add": Case(lambda x, y: x.at[jnp.array([0, 2])].add(y), ((3, 4), (2, 4)), "_a _a"),
    "scatter-add, each unit": Case(
        lambda x, y: x.at[jnp.array([0, 2])[:, None], _each(x, 1)].add(y), ((3, 4), (2, 4)), "_a _a"
    ),
    "scatter-max, each unit": Case(
        lambda x, y: x.at[_each(x, 0)[:, None], jnp.array([1, 3])].max(y), ((3, 4), (3, 2)), "a_ a_"
    ),
    "scatter-add, each unit backwards": Case(
        lambda x, y: x.at[jnp.array([0, 2])[:, None], _each(x, 1)[::-1]].add(y),
        ((3, 4), (2, 4)), "__ __",
    ),
    "scatter-add, fewer units": Case(
        lambda x, y: x.at[jnp.array([0, 2])[:, None], _each(y, 1)].add(y),
        ((3, 5), (2, 4)), "__ __",
    ),
    "scatter-add, by another unit": Case(
        lambda x, y: x.at[jnp.array([0, 2])[:, None], (y.T @ y).argmin(1)].add(y),
        ((3, 4), (2, 4)), "__ __",
    ),
    "scatter": Case(lambda x, y: x.at[jnp.array([1])].set(y), ((3, 4), (1, 4)), "_a _a"),
    "scatter-mul": Case(lambda x, y: x.at[jnp.array([1])].multiply(y), ((3, 4), (1, 4)), "_a _a"),
    "scatter-min": Case(lambda x, y: x.at[jnp.array([1])].min(y), ((3, 4), (1, 4)), "_a _a"),
    "scatter-max": Case(lambda x, y: x.at[jnp.array([1])].max(y), ((3, 4), (1, 4)), "_a _a"),
    "dynamic_slice": Case(
        lambda x, i: lax.dynamic_slice(x, (i.sum().astype(int), 0), (2, 4)),
        ((3, 4), (2,)), "_a b",
    ),
    "dynamic_update_slice": Case(
        lambda x, y: lax.dynamic_update_slice(x, y, (y.sum().astype(int), 0)),
        ((3, 4), (2, 4)), "_a _a",
    ),
}  # fmt: skip


def _each(x, axis):
    return lax.iota(jnp.int32, x.shape[axis])


def _crossed(x, y):
    rows = lax.iota(jnp.int32, 4)[:, None]
    index = jnp.concatenate([rows, x.argmax(1)[:, None]], 1)
    return lax.gather(y, index[:, ::-1], lax.GatherDimensionNumbers((), (0, 1), (0, 1)), (1, 1))


def _recurrent(w, x):
    def step(h, row):
        h = jnp.tanh(w @ h + row)
        return h, h

    return lax.scan(step, jnp.zeros(4), x)[1]


@jax.checkpoint
def _differentiated(x):
    return lax.scan(lambda c, row: (jnp.sin(c * row), row), 1.0, x)[0]


CONTROL = {
    "jit": Case(lambda x: jax.jit(lambda y: y * 2)(x), ((3, 4),), "ab"),
    "remat2": Case(lambda x: jax.checkpoint(lambda y: y * 2)(x), ((3, 4),), "ab"),
    "custom_jvp_call": Case(lambda x: jax.nn.relu(x), ((3, 4),), "ab"),
    "custom_vjp_call": Case(lambda x: _with_vjp(x), ((3, 4),), "ab"),
    "closed_call": Case(lambda x: jax.vmap(jax.grad(_differentiated))(x), ((3, 4),), "a_"),
    "scan": Case(_recurrent, ((4, 4), (5, 4)), "aa _a"),
    "while": Case(
        lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] / 2), (0, x))[1],
        ((3, 4),), "ab",
    ),
    "cond": Case(
        lambda x, y: lax.cond(x.sum() > 0, lambda a, b: a + b, lambda a, b: a * b, x, y),
        TWO, "ab ab",
    ),
}  # fmt: skip


@jax.custom_vjp
def _with_vjp(x):
    return x * 2


_with_vjp.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))

CASES = UNARY | BINARY | SHAPES | SUMS | INDEXED | CONTROL
