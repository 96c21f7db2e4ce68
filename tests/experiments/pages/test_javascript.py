"""Functions of JAX translated into JavaScript, compared with JAX."""

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


def of_complex(function):
    return lambda x, y: function(x + 1j * y, y - 0.5j * x)


def elementwise(x, y):
    """Elementwise steps: both branches, NaN, infinite powers."""
    nothing = jnp.where(x > 0, x, jnp.where(y > 0, jnp.inf, jnp.nan))
    kinds = (3 * x).astype(int), (x > y).astype(float), (jnp.floor(x) + 0.0).astype(bool)
    chosen = lax.select_n((3 * unit(x)).astype(jnp.int32), x, y, -x)
    powers = x**2, x**3, x**-3, (x > 0) ** jnp.float64(jnp.inf)
    whole = lax.div((9 * x).astype(int), -2)
    return jnp.isfinite(nothing), jnp.maximum(nothing, y), kinds, chosen, powers, whole, x - (-2.0)


def parted(x, y):
    """Views of views, of which some are copied."""
    wide = jnp.broadcast_to(x[:, None, :], (4, 2, 5))
    flipped = wide.transpose(2, 0, 1).reshape(10, 4)[::-1, 1:4:2].sum(0)
    single = x[:1, 1:2].squeeze() * y - x[:1].squeeze(0), x[1:2, 2:3] - x, x[:, None] * y[None]
    joined = jnp.concatenate([x, y[:, :2], jnp.zeros((4, 1))], 1)
    grown = jnp.exp(x[:, :4])  # read in a different order from that of the computation
    turned = grown + grown[::-1], grown * grown.T, grown + grown[:1]
    return flipped, turned, wide[:, 1, ::2].T, single, joined, x[::-1] - y[:, ::-1] + x[0, 0]


def reduced(x, y):
    """Over some axes or all, of arrays that repeat, and with NaN."""
    sums = x.sum(), x.sum(0), (x + 0 * y[:1]).sum(1), x[:, :1].sum(1), jnp.full((3, 2), 2.0).sum(1)
    same = jnp.full((3, 2), x[0, 0])
    sums += same.T.reshape(3, 2, 1).sum((1, 2)), same[:, :1].sum(1), same.reshape(6)[::2].sum()
    return sums, x.max((0, 1)), y.min(1), jnp.where(x > 0.5, jnp.nan, x).argmin(1), y.argmin(0)


def products(x, y):
    a, b = (v.reshape(2, 2, 5) for v in (x, y))
    return x[0] @ y[0], x @ y.T, x.T @ y, jnp.einsum("bij,bkj->bik", a, b), x[:, :1] @ y[:1]


def looped(x, y):
    """A state of numbers, arrays and pairs that are exchanged."""

    def step(_, state):
        s, a, b, c = state
        z = (a + 1j * b[::-1]) / (c + s * 1j + 3)
        return s + a[0], b, a + z.real, jnp.conj(z) * 0.5

    return [v.real for v in lax.fori_loop(0, 5, step, (0.5, x[0], y[0], 1j * x[1]))]


CASES = {
    **{name: one(name, unit) for name in ("acos", "asin", "log", "sqrt")},
    **{name: one(name) for name in (
        "neg", "abs", "atan", "ceil", "cos", "exp", "expm1", "floor", "sign", "sin", "square",
        "stop_gradient", "tan", "tanh",
    )},
    **{name: two(name) for name in (
        "add", "sub", "mul", "div", "max", "min", "atan2", "eq", "ne", "lt", "le", "gt", "ge",
    )},
    "pow": lambda x, y: unit(x) ** y, "integer_pow": elementwise, "is_finite": elementwise,
    "clamp": lambda x, y: lax.clamp(-0.3, x, 0.4), "log1p": lambda x, y: jnp.log1p(unit(x) - 0.5),
    "and": lambda x, y: (x > 0) & (y > 0), "or": lambda x, y: (x > 0) | (y > 0),
    "not": lambda x, y: ~(x > 0), "views": parted, "reductions": reduced, "products": products,
    "loops": looped, "calls": lambda x, y: jax.nn.relu(x) + jax.jit(jnp.hypot)(x, y),
    "iota": lambda x, y: jnp.arange(5) * x + lax.broadcasted_iota(float, (4, 5), 0),
    "twice": lambda x, y: (jnp.exp(x) - jnp.exp(x) * y, 3.0, jnp.array([1.0, 2.0])),
    "complex mul": of_complex(lambda a, b: a * b), "complex abs": of_complex(lambda a, b: abs(a)),
    "complex div": of_complex(lambda a, b: a / (b + 2)), "complex real": of_complex(jnp.subtract),
    "complex integer_pow": of_complex(lambda a, b: a**3),
    "complex conj": of_complex(lambda a, b: a.conj() - b),
    "complex dot_general": of_complex(lambda a, b: a @ b.T),
    "complex views": of_complex(lambda a, b: jnp.concatenate([a[::-1].T, b.T], 1).sum(0)),
}  # fmt: skip


def flat(case):
    """The case with its results by name, complex ones in two parts."""

    def parts(x, y):
        found = map(jnp.asarray, jax.tree.leaves(case(x, y)))
        halves = [
            h for v in found for h in ([v.real, (-1j * v).real] if jnp.iscomplexobj(v) else [v])
        ]
        return {f"r{k:02}": half for k, half in enumerate(halves)}

    return parts


def test_every_rule_has_a_case():
    assert {*ELEMENTWISE, *(f"complex {name}" for name in COMPLEX)} <= {*CASES}


@pytest.mark.slow
def test_javascript_computes_what_jax_does(tmp_path):
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(4, 5)) for _ in range(2)]
    inputs[1][0, :2] = inputs[0][0, :2]  # where two values are equal
    codes = [javascript(flat(case), (4, 5), (4, 5)) for case in CASES.values()]
    script = f"""{PRELUDE}
      const given = {json.dumps([x.ravel().tolist() for x in inputs])}
      const inputs = given.map((x) => Float64Array.from(x))
      // Arrays that are kept from a first call must not matter.
      const second = (f) => [f(...inputs.map((x) => x.map((v) => v / 2))), f(...inputs)][1]
      const texts = (x) => Array.from(typeof x === "number" ? [x] : x, String)
      return [{", ".join(codes)}].map((f) => Object.values(second(f)).map(texts))
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
        (lambda x: lax.while_loop(lambda v: v.sum() < 9, lambda v: v + 1, x), "while"),
        (lambda x: lax.scan(lambda s, v: (s + v, s), 0.0, x)[1], "scan over rows"),
        (lambda x: x.astype(int) & 3, "and"),
    ],
)
def test_what_has_no_translation_is_named(function, name):
    with pytest.raises(NotImplementedError, match=f"^{name} cannot be translated to JavaScript"):
        javascript(lambda x: {"found": function(x)}, (3,))
