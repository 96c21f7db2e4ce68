"""Translates functions of JAX into JavaScript, so that a page computes the same formulas as Python.

The translation traces a function, inlines its calls, and turns complex numbers into pairs of real
ones. Each remaining step becomes part of a loop over Float64Arrays. Arrays are views, as in NumPy:
broadcast, sliced or transposed arrays are not copied, and repeated entries are computed once.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from sail_jax.checks import concrete
from sail_jax.jax_internals import CALLS, Contraction, Literal, Operation, Scan, operation

# Elementwise steps in JavaScript. Truth values are the numbers 0 and 1.
ELEMENTWISE = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "neg": "-{0}",
    "max": "Math.max({0}, {1})", "min": "Math.min({0}, {1})", "square": "{0} * {0}",
    "pow": "pow({0}, {1})", "integer_pow": "Math.pow({0}, {y})", "atan2": "Math.atan2({0}, {1})",
    "eq": "+({0} === {1})", "ne": "+({0} !== {1})", "lt": "+({0} < {1})", "le": "+({0} <= {1})",
    "gt": "+({0} > {1})", "ge": "+({0} >= {1})", "and": "{0} & {1}", "or": "{0} | {1}",
    "not": "1 - {0}", "clamp": "Math.min(Math.max({1}, {0}), {2})", "stop_gradient": "{0}",
    "is_finite": "+Number.isFinite({0})",
    **{name: f"Math.{name}({{0}})" for name in (
        "abs", "acos", "asin", "atan", "ceil", "cos", "exp", "expm1", "floor", "log", "log1p",
        "sign", "sin", "sqrt", "tan", "tanh",
    )},
}  # fmt: skip
TRUTHS = {"and", "or", "not"}  # for integers they would mean bits
# The initial value of a reduction, and its step for each entry v at position i.
REDUCTIONS = {
    "reduce_sum": ("let s = 0", "s += v"),
    "reduce_max": ("let s = -Infinity", "s = Math.max(s, v)"),
    "reduce_min": ("let s = Infinity", "s = Math.min(s, v)"),
    # The first NaN wins, as in NumPy.
    "argmin": ("let s = 0, b = Infinity", "if (v < b || (v !== v && b === b)) { b = v; s = i }"),
}
# Steps that only view an array differently, as NumPy does.
VIEWS: dict[str, Callable[[np.ndarray, Operation], np.ndarray]] = {
    "broadcast_in_dim": lambda m, of: _broadcast(m, *of.broadcast),
    "transpose": lambda m, of: m.transpose(of.permutation),
    "slice": lambda m, of: m[tuple(map(slice, *of.slice))],
    "rev": lambda m, of: np.flip(m, of.reversed_axes),
    "squeeze": lambda m, of: m.squeeze(of.removed_axes),
    "reshape": lambda m, of: m.reshape(of.sizes),
}
# In JavaScript, 1 to the power of infinity is NaN.
PRELUDE = "const pow = (x, y) => x === 1 ? 1 : Math.pow(x, y)\n"


def javascript(function: Callable[..., Mapping[str, Any]], *shapes: tuple[int, ...]) -> str:
    """Translates a function of arrays into JavaScript.

    Args:
      function: A function that JAX can trace. It returns arrays by name.
      *shapes: The shape of each argument, `()` for a number.

    Returns:
      An expression: a function of numbers and Float64Arrays (flat, in C order). It returns an
      object of them. The code that contains it must begin with `PRELUDE`.

    Raises:
      NotImplementedError: If a step of the function has no translation. The message contains its
        name.
      ValueError: If this version of JAX describes a step in an unknown way (`UnknownLayoutError`).

    >>> print(javascript(lambda x: {"twice": 2 * x}, ()))
    (() => {
    return (z0) => {
    const x0 = 2 * z0
    return {"twice": x0}
    }
    })()
    """
    with jax.enable_x64(True):
        arguments = [jax.ShapeDtypeStruct(shape, float) for shape in shapes]
        names = [*jax.eval_shape(function, *arguments)]

        def flat(*values: Any) -> list[Any]:
            traced = jax.make_jaxpr(function)(*values)
            return _real(traced.jaxpr, traced.consts, *values)

        closed = jax.make_jaxpr(flat)(*arguments)
    code = _Code()
    inputs = [_View.whole(f"z{k}", shape) for k, shape in enumerate(shapes)]
    results = code.block(closed.jaxpr, closed.consts, inputs)
    texts = [x.at([]) if x.size == 1 else f"{code.copied(x).name}.slice()" for x in results]
    entries = ", ".join(f'"{name}": {text}' for name, text in zip(names, texts, strict=True))
    buffers, lines = code.text()
    head = f"return ({', '.join(x.name for x in inputs)}) => {{"
    returned = f"return {{{entries}}}"
    return "\n".join(["(() => {", *buffers, head, *lines, returned, "}", "})()"])


class _Pair(NamedTuple):
    """A complex array."""

    re: jax.Array
    im: jax.Array


def _times(x: _Pair, y: _Pair) -> _Pair:
    return _Pair(x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re)


def _over(x: _Pair, y: _Pair) -> _Pair:
    # Scaled, because the square of a large number could overflow.
    scale = jnp.maximum(jnp.abs(y.re), jnp.abs(y.im))
    re, im = y.re / scale, y.im / scale
    found, size = _times(x, _Pair(re, -im)), (re * re + im * im) * scale
    return _Pair(found.re / size, found.im / size)


def _power(x: _Pair, y: int) -> _Pair:
    if y < 1:
        raise NotImplementedError(f"complex integer_pow of {y} cannot be translated to JavaScript")
    return x if y == 1 else _times(x, _power(x, y - 1))


def _product(x: _Pair, y: _Pair, over: Contraction) -> _Pair:
    (re, one), (two, im) = ([jax.lax.dot_general(a, b, over) for b in y] for a in x)
    return _Pair(re - im, one + two)


COMPLEX: dict[str, Callable[..., Any]] = {
    "mul": lambda _, x, y: _times(x, y),
    "div": lambda _, x, y: _over(x, y),
    "integer_pow": lambda of, x: _power(x, of.exponent),
    "dot_general": lambda of, x, y: _product(x, y, of.contraction),
    "conj": lambda _, x: _Pair(x.re, -x.im),
    "real": lambda _, x: x.re,
    "abs": lambda _, x: jnp.hypot(x.re, x.im),
}
# These steps act on each half of a pair separately.
HALVED = {"add", "sub", "concatenate", "reduce_sum", *VIEWS}


def _broadcast(m: np.ndarray, shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.expand_dims(m, tuple({*range(len(shape))} - {*axes})), shape)


def _is_complex(kind: Any) -> bool:
    return jnp.issubdtype(kind.dtype, jnp.complexfloating)


def _pair(x: Any) -> _Pair:
    """Splits a complex array into halves; a pair is returned as it is."""
    if isinstance(x, _Pair):
        return x
    known: Any = concrete(x)
    return _Pair(x, jnp.zeros_like(x)) if known is None else _Pair(known.real, known.imag)


def _real(jaxpr: Any, consts: Any, *values: Any) -> list[Any]:
    """Evaluates a jaxpr without calls and without complex numbers."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
    for eqn in jaxpr.eqns:
        of, name = operation(eqn), eqn.primitive.name
        given = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        is_complex = any(_is_complex(v.aval) for v in (*eqn.invars, *eqn.outvars))
        if name in CALLS:
            found = _real(of.called.jaxpr, of.called.consts, *given)
        elif name == "scan":
            found = _scanned(of.scan, given)
        elif not is_complex:
            found = of.bind(*given)
        elif name == "convert_element_type":
            found = [_pair(given[0])]
        elif name in HALVED:
            halves = zip(*map(_pair, given), strict=True)
            found = [_Pair(*(of.bind(*half)[0] for half in halves))]
        elif name in COMPLEX:
            found = [COMPLEX[name](of, *map(_pair, given))]
        else:
            raise NotImplementedError(f"complex {name} cannot be translated to JavaScript")
        env.update(zip(eqn.outvars, found, strict=True))
    return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]


def _scanned(scan: Scan, given: list[Any]) -> list[Any]:
    """Evaluates a loop with a state that may contain pairs."""
    inner, (fixed, carry, rows) = scan.body, scan.parted(given)
    if rows or len(inner.out_avals) > len(carry):
        raise NotImplementedError("scan over rows cannot be translated to JavaScript")
    state = [
        _pair(x) if _is_complex(kind) else x
        for x, kind in zip(carry, scan.parted(inner.in_avals)[1], strict=True)
    ]

    def step(state: list[Any], _: None) -> tuple[list[Any], None]:
        return _real(inner.jaxpr, inner.consts, *fixed, *state), None

    return jax.lax.scan(step, state, length=scan.length)[0]


class _View(NamedTuple):
    """An array in JavaScript, or a part of one. A single entry is a number."""

    name: str
    memory: (
        np.ndarray
    )  # as many bytes as `base` has: its strides and offset are equal to the strides of `name`
    base: np.ndarray

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> "_View":
        base = np.zeros(shape, np.int8)
        return cls(name, base, base)

    @property
    def size(self) -> int:
        return self.memory.size

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(s if n > 1 else 0 for n, s in zip(*self._axes(), strict=True))

    @property
    def offset(self) -> int:
        first, start = (x.__array_interface__["data"][0] for x in (self.memory, self.base))
        return first - start

    @property
    def key(self) -> Any:
        return self.name, self.memory.shape, self.strides, self.offset

    def _axes(self) -> Any:
        return self.memory.shape, self.memory.strides

    def to(self, shape: tuple[int, ...]) -> "_View":
        return self._replace(memory=np.broadcast_to(self.memory, shape))

    def at(self, index: list[str]) -> str:
        """The entry at an index, in JavaScript."""
        if self.base.size == 1:
            return self.name
        terms = [str(self.offset)] if self.offset else []
        terms += [i if s == 1 else f"{s} * {i}" for s, i in zip(self.strides, index) if s]  # noqa: B905
        return f"{self.name}[{' + '.join(terms) or 0}]"


def _loops(sizes: Iterable[tuple[str, int]], body: list[str]) -> str:
    heads = [f"for (let {i} = 0; {i} < {n}; {i}++)" for i, n in sizes if n > 1]
    return " ".join([*heads, "{", "; ".join(body), "}"])


class _Loop(NamedTuple):
    """A loop of steps. Each step defines a number, which is stored if other loops need it."""

    sizes: tuple[int, ...]
    steps: dict[str, str]

    def text(self, used: set[str]) -> str:
        places = [f"j{k}" for k in range(len(self.sizes))]
        body = []
        for name, step in self.steps.items():
            body.append(f"const {_local(name)} = {step}")
            if name in used:
                body.append(f"{_View.whole(name, self.sizes).at(places)} = {_local(name)}")
        return _loops(zip(places, self.sizes, strict=True), body)


def _local(name: str) -> str:
    return name.replace("x", "y")


class _Code:
    """Lines of JavaScript, and their arrays, which are created once for all calls."""

    def __init__(self) -> None:
        self.lines: list[str | _Loop] = []
        self.buffers: dict[str, str] = {}
        self.constants: dict[tuple[str, tuple[int, ...]], _View] = {}
        self.count = itertools.count()

    def text(self) -> tuple[list[str], list[str]]:
        """Returns the arrays and the lines, without arrays that nothing reads."""
        every = [x if isinstance(x, str) else "; ".join(x.steps.values()) for x in self.lines]
        used = set(re.findall(r"\bx\d+\b", "\n".join(every)))
        lines = [x if isinstance(x, str) else x.text(used) for x in self.lines]
        return [text for name, text in self.buffers.items() if name in used], lines

    def array(self, shape: tuple[int, ...], values: str = "") -> _View:
        """Creates an array, or a number, which is not yet declared."""
        view = _View.whole(f"x{next(self.count)}", shape)
        if view.size > 1:
            self.buffers[view.name] = f"const {view.name} = new Float64Array({values or view.size})"
        return view

    def constant(self, value: ArrayLike, shape: tuple[int, ...]) -> _View:
        values = np.broadcast_to(np.asarray(value, float), shape).ravel()
        texts = [re.sub("inf", "Infinity", repr(v)).replace("nan", "NaN") for v in values.tolist()]
        if len(set(texts)) == 1:
            return _View.whole(texts[0].removesuffix(".0"), ()).to(shape)
        text = f"[{', '.join(texts)}]"
        if (text, shape) not in self.constants:
            self.constants[text, shape] = self.array(shape, text)
        return self.constants[text, shape]

    def fill(self, shape: tuple[int, ...], views: list[_View], expression: str) -> _View:
        """Computes an expression of views of one shape, once for repeated entries."""
        views = [v.to(shape) for v in views]
        moving = [k for k in range(len(shape)) if any(v.strides[k] for v in views)]
        sizes = tuple(shape[k] for k in moving)
        places = [f"j{moving.index(k)}" if k in moving else "" for k in range(len(shape))]
        out = self.array(sizes)
        still = tuple(k for k in range(len(shape)) if k not in moving)
        found = out._replace(memory=np.expand_dims(out.memory, still)).to(shape)
        # Results of the loop that is still open need not be stored and read again.
        loop = self.lines[-1] if self.lines and isinstance(self.lines[-1], _Loop) else None
        inside = [loop is not None and v.name in loop.steps for v in views]
        same = [(v.offset, v.strides) == (0, found.strides) for v in views]
        if loop and any(inside) and (loop.sizes != sizes or any(map(np.less, same, inside))):
            loop, inside = None, [False] * len(views)
        entries = [
            _local(v.name) if i else v.at(places) for v, i in zip(views, inside, strict=True)
        ]
        text = expression.format(*(f"({e})" if e.startswith("-") else e for e in entries))
        if not moving:
            self.lines.insert(len(self.lines) - (loop is not None), f"const {out.name} = {text}")
            return found
        if loop is None or loop.sizes != sizes:
            loop = _Loop(sizes, {})
            self.lines.append(loop)
        loop.steps[out.name] = text
        return found

    def copy(self, view: _View, out: _View) -> None:
        """Copies entries into an existing array or number."""
        places = [f"j{k}" for k in range(view.memory.ndim)]
        body = [f"{out.at(places)} = {view.at(places)}"]
        self.lines.append(_loops(zip(places, view.memory.shape, strict=True), body))

    def copied(self, view: _View) -> _View:
        """Returns a copy in C order."""
        out = self.array(view.memory.shape)
        self.lines += [f"let {out.name}"] if out.size == 1 else []
        self.copy(view, out)
        return out

    def block(self, jaxpr: Any, consts: Any, inputs: list[_View]) -> list[_View]:
        """Translates all steps that affect the results."""
        env: dict[Any, _View] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.constant(value, var.aval.shape)

        def read(v: Any) -> _View:
            return self.constant(v.val, np.shape(v.val)) if isinstance(v, Literal) else env[v]

        needed, steps = {v for v in jaxpr.outvars if not isinstance(v, Literal)}, []
        for eqn in reversed(jaxpr.eqns):
            if needed.intersection(eqn.outvars):
                steps.append(eqn)
                needed.update(v for v in eqn.invars if not isinstance(v, Literal))
        done: dict[
            Any, list[_View]
        ] = {}  # values that are computed twice, as both sides of a difference
        for eqn in reversed(steps):
            views = [read(v) for v in eqn.invars]
            key = str(operation(eqn)), *(v.key for v in views)
            if key not in done:
                done[key] = self.step(eqn, views)
            env.update(zip(eqn.outvars, done[key], strict=True))
        return [read(v) for v in jaxpr.outvars]

    def step(self, eqn: Any, views: list[_View]) -> list[_View]:
        of, name, shape = operation(eqn), eqn.primitive.name, eqn.outvars[0].aval.shape
        whole = all(v.aval.dtype.kind in "biu" for v in eqn.invars)
        if name in CALLS:  # of the rules for complex numbers
            return self.block(of.called.jaxpr, of.called.consts, views)
        if name in VIEWS:
            return [self.viewed(views[0], lambda memory: VIEWS[name](memory, of))]
        if name in REDUCTIONS:
            return [self.reduced(name, views[0], of.removed_axes)]
        if name == "iota":
            places = np.arange(shape[of.axis])
            rest = tuple(k for k in range(len(shape)) if k != of.axis)
            return [self.constant(np.expand_dims(places, rest), shape)]
        if name in ("scan", "dot_general", "concatenate"):
            return getattr(self, name)(of, views, [v.aval.shape for v in eqn.outvars])
        if name == "convert_element_type":
            kind = of.new_dtype.kind
            text = {"b": "+({0} !== 0)", "i": "Math.trunc({0})", "u": "Math.trunc({0})"}.get(
                kind, "{0}"
            )
        elif name == "select_n":
            text = "{1}"
            for k in range(2, len(views)):
                text = f"({{0}} === {k - 1} ? {{{k}}} : {text})"
        elif name not in ELEMENTWISE or (name in TRUTHS and eqn.invars[0].aval.dtype != bool):
            raise NotImplementedError(f"{name} cannot be translated to JavaScript: {eqn}")
        else:
            power = of.exponent if name == "integer_pow" else None
            text = ELEMENTWISE["square" if power == 2 else name].replace("{y}", str(power))
            text = f"Math.trunc({text})" if name == "div" and whole else text
        return [self.fill(shape, views, text)]

    def viewed(self, view: _View, look: Callable[[np.ndarray], np.ndarray]) -> _View:
        memory = look(view.memory)
        if view.base.size == 1:  # a number has no strides, whatever NumPy copies
            memory = np.broadcast_to(view.base.reshape(()), memory.shape)
        elif not np.may_share_memory(memory, view.base):  # as a transposed array of another shape
            view = self.copied(view)
            memory = look(view.memory)
        return view._replace(memory=memory)

    def reduced(self, name: str, view: _View, axes: tuple[int, ...]) -> _View:
        sizes = view.memory.shape
        if math.prod(sizes[k] for k in axes) == 1 and name != "argmin":
            return self.viewed(view, lambda memory: memory.squeeze(tuple(axes)))
        places, rest = [f"j{k}" for k in range(len(sizes))], sorted({*range(len(sizes))} - {*axes})
        out, kept = self.array(tuple(sizes[k] for k in rest)), [places[k] for k in rest]
        start, step = REDUCTIONS[name]
        each = [f"const v = {view.at(places)}, i = {places[axes[0]] if sizes[axes[0]] > 1 else 0}"]
        inner = _loops([(places[k], sizes[k]) for k in axes], [*each, step])
        self.lines += [f"let {out.name}"] if out.size == 1 else []
        body = [start, inner, f"{out.at(kept)} = s"]
        self.lines.append(_loops(zip(kept, out.memory.shape, strict=True), body))
        return out

    def dot_general(self, of: Operation, views: list[_View], _: Any) -> list[_View]:
        (left, right), (one, two) = of.contraction
        a, b = (v.memory for v in views)
        free = [
            [k for k in range(m.ndim) if k not in {*gone, *batch}]
            for m, gone, batch in ((a, left, one), (b, right, two))
        ]
        # Both sides get the axes: batch, free ones of the left, free ones of the right, summed.
        start, middle = len(one), len(one) + len(free[0])
        end = middle + len(free[1])
        a = np.expand_dims(a.transpose(*one, *free[0], *left), tuple(range(middle, end)))
        b = np.expand_dims(b.transpose(*two, *free[1], *right), tuple(range(start, middle)))
        wide = [v._replace(memory=m) for v, m in zip(views, (a, b), strict=True)]
        products = self.fill(np.broadcast_shapes(a.shape, b.shape), wide, "{0} * {1}")
        return [self.reduced("reduce_sum", products, tuple(range(end, end + len(left))))]

    def concatenate(self, of: Operation, views: list[_View], shapes: Any) -> list[_View]:
        out, axis, start = self.array(shapes[0]), of.axis, 0
        for view in views:
            part = range(start, start := start + view.memory.shape[axis])
            memory = out.memory[(slice(None),) * axis + (slice(part.start, part.stop),)]
            self.copy(view, out._replace(memory=memory))
        return [out]

    def scan(self, of: Operation, views: list[_View], _: Any) -> list[_View]:
        inner, (fixed, carry, _) = of.scan.body, of.scan.parted(views)
        state = [self.copied(v) for v in carry]
        count = f"k{next(self.count)}"
        self.lines.append(f"for (let {count} = 0; {count} < {of.scan.length}; {count}++) {{")
        results = self.block(inner.jaxpr, inner.consts, [*fixed, *state])
        # All parts are copied first, because a part may become the old value of another.
        for x, new in zip(state, [self.copied(v) for v in results], strict=True):
            self.copy(new, x)
        self.lines.append("}")
        return state
