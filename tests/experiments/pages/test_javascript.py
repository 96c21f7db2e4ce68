"""Functions of JAX in JavaScript, beside JAX."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from browser import browse

from experiments.pages.explorer.javascript import COMPLEX, ELEMENTWISE, PRELUDE, javascript

lax = jax.lax


def unit(x):
    """Numbers in (0, 1), which all functions take."""
    return 1 / (1.01 + x * x)


def one(name, make=lambda x: x):
    return lambda x, y: getattr(lax, name)(make(x))


def two(name):
    return lambda x, y: getattr(lax, name)(x, y)


def loop(x):
    """State of a number, an array and a pair that change places, and rows read and written."""

    def step(state, row):
        s, (a, b), c = state
        z = (a + 1j * b[::-1]) / (c + row.sum() * 1j + 3)
        return (s + row[0], (b, a + row), z.conj()), (row[::-1] * s, z.real)

    start = jnp.float64(0.5), (x[0], x[1]), 1j * x[2]
    end, rows = lax.scan(step, start, x, reverse=True)
    return end[0] + end[1][0] + end[2].imag, rows[0], rows[1], lax.fori_loop(0, 5, lambda _, v: v * x[0], x[1])


def parted(x):
    """Views of views, of which some are copied."""
    wide = jnp.broadcast_to(x[:, None, :], (4, 2, 5))
    return wide.transpose(2, 0, 1).reshape(10, 4)[::-1, 1:4:2].sum(0), wide[:, 1, ::2].T, x[1:2, 2:3] - x


COMPLEXES = {
    "complex mul": lambda a, b: a * b, "complex div": lambda a, b: a / (b + 2),
    "complex integer_pow": lambda a, b: a**3 + (b + 2) ** -2, "complex square": lambda a, b: jnp.square(a),
    "complex exp": lambda a, b: jnp.exp(a), "complex abs": lambda a, b: jnp.abs(a),
    "complex conj": lambda a, b: a.conj() - b, "complex dot_general": lambda a, b: a @ b.T,
    "complex real": lambda a, b: a.real, "complex imag": lambda a, b: b.imag,
    "complex complex": lambda a, b: lax.complex(a.real, b.real),
    "complex where": lambda a, b: jnp.where(a.real > b.real, a, b).sum(0).T,
}  # fmt: skip
UNITS = ("acos", "asin", "log", "sqrt", "rsqrt")
TWO = ("rem", "add", "sub", "mul", "div", "max", "min", "atan2", "eq", "ne", "lt", "le", "gt", "ge")
CASES = {
    **{name: one(name, unit) for name in UNITS},
    **{name: two(name) for name in TWO},
    **{name: one(name) for name in (
        "neg", "abs", "atan", "ceil", "cos", "cosh", "exp", "expm1", "floor", "sign", "sin", "sinh",
        "square", "stop_gradient", "tan", "tanh",
    )},
    "pow": lambda x, y: (unit(x) ** y, (x > 0) ** jnp.float64(jnp.inf)),
    "integer_pow": lambda x, y: (x**2, x**3, x**-3),
    "copy": lambda x, y: jnp.copy(x),
    "clamp": lambda x, y: lax.clamp(-0.3, x, 0.4), "log1p": lambda x, y: jnp.log1p(unit(x) - 0.5),
    "and": lambda x, y: (x > 0) & (y > 0), "or": lambda x, y: (x > 0) | (y > 0), "not": lambda x, y: ~(x > 0),
    "is_finite": lambda x, y: jnp.isfinite(jnp.where(x > 0, x, jnp.where(y > 0, jnp.inf, jnp.nan))),
    "max of NaN": lambda x, y: jnp.maximum(jnp.where(x > 0, jnp.nan, x), y),
    "convert_element_type": lambda x, y: ((3 * x).astype(int), (x > y).astype(float), (jnp.floor(x) + 0.0).astype(bool)),
    "select_n": lambda x, y: (jnp.where(x > y, x, 2.0), lax.select_n((3 * unit(x)).astype(jnp.int32), x, y, -x)),
    "integer div": lambda x, y: (7 * x).astype(int) // 2 + lax.div((9 * x).astype(int), -2),
    "broadcast_in_dim": lambda x, y: x[:, None] * y[None] + x[0, 0],
    "transpose": lambda x, y: x.T @ y, "parts": lambda x, y: parted(x),
    "rev": lambda x, y: x[::-1] - y[:, ::-1], "squeeze": lambda x, y: x[:1, 1:2].squeeze() * y - x[:1].squeeze(0),
    "concatenate": lambda x, y: jnp.concatenate([x, y[:, :2], jnp.zeros((4, 1))], 1),
    "iota": lambda x, y: jnp.arange(5) * x + lax.broadcasted_iota(float, (4, 5), 0),
    "reduce": lambda x, y: (x.sum(), x.sum(0), y.prod(1), x.max((0, 1)), y.min(1), (x > 0).any(0), (x > -9).all(), (x + 0 * y[:1]).sum(1)),
    "argmin": lambda x, y: (x[0].argmin(), y.argmax(1), x.argmin(0), jnp.where(x > 0.5, jnp.nan, x).argmax(1)),
    "dot_general": lambda x, y: (x[0] @ y[0], x @ y.T, jnp.einsum("bij,bkj->bik", x.reshape(2, 2, 5), y.reshape(2, 2, 5))),
    "scan": lambda x, y: loop(x), "custom_jvp": lambda x, y: jax.nn.relu(x) + jax.jit(jnp.hypot)(x, y),
    "twice": lambda x, y: (jnp.exp(x) - jnp.exp(x) * y, 3.0, jnp.array([1.0, 2.0])),
    **{name: (lambda f: lambda x, y: f(x + 1j * y, y - 0.5j * x))(f) for name, f in COMPLEXES.items()},
}  # fmt: skip


def flat(case):
    """The case with its results by name, complex ones in two parts."""

    def parts(x, y):
        found = jax.tree.leaves(case(x, y))
        halves = [h for v in map(jnp.asarray, found) for h in ([v.real, v.imag] if jnp.iscomplexobj(v) else [v])]
        return {f"{k:02}": half for k, half in enumerate(halves)}

    return parts


def test_every_rule_has_a_case():
    assert {*ELEMENTWISE, *(f"complex {name}" for name in COMPLEX)} <= {*CASES}


@pytest.mark.slow
def test_javascript_computes_what_jax_does(tmp_path):
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(4, 5)) for _ in range(2)]
    inputs[1][0, :2] = inputs[0][0, :2]  # where two numbers are equal
    codes = [javascript(flat(case), (4, 5), (4, 5)) for case in CASES.values()]
    script = f"""{PRELUDE}
      const inputs = {json.dumps([x.ravel().tolist() for x in inputs])}.map((x) => Float64Array.from(x))
      const all = [{", ".join(codes)}]
      // Twice: arrays that are kept from the first call must not matter.
      return all.map((f) => [f(...inputs.map((x) => x.map((v) => v / 2))), f(...inputs)][1]).map((found) =>
        Object.values(found).map((x) => Array.from(typeof x === "number" ? [x] : x).map(String)))
    """
    found, said = browse("<body></body>", tmp_path, script)
    assert not said
    with jax.enable_x64(True):
        for (name, case), values in zip(CASES.items(), found, strict=True):
            expected = flat(case)(*map(jnp.asarray, inputs))
            assert len(expected) == len(values)
            for want, value in zip(expected.values(), values, strict=True):
                got = np.array([float(v.replace("Infinity", "inf")) for v in value])
                np.testing.assert_allclose(
                    got, np.ravel(np.asarray(want, float)), rtol=1e-12, atol=1e-14, err_msg=name
                )


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: jnp.sort(x), "sort"),
        (lambda x: jnp.sin(1j * x).real, "complex sin"),
        (lambda x: jax.lax.while_loop(lambda v: v.sum() < 9, lambda v: v + 1, x), "while"),
        (lambda x: x.astype(int) & 3, "and"),
    ],
)
def test_what_has_no_translation_is_named(function, name):
    with pytest.raises(NotImplementedError, match=f"^{name} has no translation into JavaScript"):
        javascript(lambda x: {"found": function(x)}, (3,))
