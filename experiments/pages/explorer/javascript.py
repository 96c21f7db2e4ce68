"""Functions of JAX in JavaScript: a page computes what Python does, from one formula.

A function is traced; calls inside of it are inlined and complex numbers become pairs of real ones.
Each step that is left becomes a loop over Float64Arrays. Arrays are views, as NumPy's are: what
is broadcast, sliced or transposed is not copied, and is computed once for all of its places.
"""

import collections
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from sail_jax.checks import concrete

__all__ = ["PRELUDE", "javascript"]

# Elementwise steps: what JavaScript has for them. Truth values are the numbers 0 and 1.
ELEMENTWISE = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "neg": "-{0}",
    "max": "Math.max({0}, {1})", "min": "Math.min({0}, {1})", "square": "{0} * {0}",
    "pow": "pow({0}, {1})", "integer_pow": "Math.pow({0}, {y})", "atan2": "Math.atan2({0}, {1})",
    "clamp": "Math.min(Math.max({1}, {0}), {2})", "copy": "{0}", "stop_gradient": "{0}",
    "eq": "+({0} === {1})", "ne": "+({0} !== {1})", "lt": "+({0} < {1})", "le": "+({0} <= {1})",
    "gt": "+({0} > {1})", "ge": "+({0} >= {1})", "and": "{0} & {1}", "or": "{0} | {1}",
    "not": "1 - {0}", "rem": "{0} % {1}", "is_finite": "+Number.isFinite({0})", "rsqrt": "1 / Math.sqrt({0})",
    **{name: f"Math.{name}({{0}})" for name in (
        "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "exp", "expm1", "floor", "log",
        "log1p", "sign", "sin", "sinh", "sqrt", "tan", "tanh",
    )},
}  # fmt: skip
TRUTHS = ("and", "or", "not")  # of integers they would mean their bits
REDUCTIONS = {
    "reduce_sum": ("0", "{0} + {1}"), "reduce_prod": ("1", "{0} * {1}"),
    "reduce_max": ("-Infinity", "Math.max({0}, {1})"),
    "reduce_min": ("Infinity", "Math.min({0}, {1})"),
    "reduce_and": ("1", "{0} & {1}"), "reduce_or": ("0", "{0} | {1}"),
}  # fmt: skip
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
         "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "remat2": "jaxpr",
         "checkpoint": "jaxpr"}  # fmt: skip
# JavaScript's power of 1 to infinity is NaN.
PRELUDE = "const pow = (x, y) => x === 1 ? 1 : Math.pow(x, y)\n"


def javascript(function: Callable[..., Mapping[str, Any]], *shapes: tuple[int, ...]) -> str:
    """Translates a function of arrays into JavaScript.

    Args:
      function: A function that JAX can trace; it returns arrays by name.
      *shapes: The shape of each argument, `()` for a number.

    Returns:
      An expression: a function of numbers and Float64Arrays, flat in C's order, which returns an
      object of them. The code that contains it begins with `PRELUDE`.

    Raises:
      NotImplementedError: If the function has a step that is not translated; the message names it.

    >>> javascript(lambda x: {"twice": 2 * x}, ())
    '(() => {\\nreturn (z0) => {\\nconst x0 = 2 * z0\\nconst x1 = x0\\nreturn {"twice": x1}\\n}\\n})()'
    """
    with jax.enable_x64(True):
        arguments = [jax.ShapeDtypeStruct(shape, float) for shape in shapes]
        names = sorted(jax.eval_shape(function, *arguments))

        def flat(*values: Any) -> list[Any]:
            traced = jax.make_jaxpr(function)(*values)
            return _inlined(traced.jaxpr, traced.consts, *values)

        closed = jax.make_jaxpr(flat)(*arguments)
    code = _Code()
    inputs = [
        _View(f"z{k}", shape, _contiguous(shape), 0, math.prod(shape) == 1)
        for k, shape in enumerate(shapes)
    ]
    results = map(code.whole, code.block(closed.jaxpr, closed.consts, inputs))
    entries = [
        f'"{name}": {x.name}' + ".slice()" * (not x.number)
        for name, x in zip(names, results, strict=True)
    ]
    code.lines.append(f"return {{{', '.join(entries)}}}")
    buffers, lines = code.text()
    head = f"return ({', '.join(x.name for x in inputs)}) => {{"
    return "\n".join(["(() => {", *buffers, head, *lines, "}", "})()"])


class _Pair(NamedTuple):
    """A complex array."""

    re: Any
    im: Any


def _times(x: _Pair, y: _Pair, **_: Any) -> _Pair:
    return _Pair(x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re)


def _over(x: _Pair, y: _Pair, **_: Any) -> _Pair:
    # Scaled, since the square of a large number could overflow.
    scale = jnp.maximum(jnp.abs(y.re), jnp.abs(y.im))
    re, im = y.re / scale, y.im / scale
    found, size = _times(x, _Pair(re, -im)), (re * re + im * im) * scale
    return _Pair(found.re / size, found.im / size)


def _power(x: _Pair, y: int) -> _Pair:
    found = x
    for _ in range(abs(y) - 1):
        found = _times(found, x)
    return found if y > 0 else _over(_Pair(jnp.ones_like(x.re), jnp.zeros_like(x.re)), found)


def _product(x: _Pair, y: _Pair, dimension_numbers: Any, **_: Any) -> _Pair:
    (re, one), (two, im) = ([jax.lax.dot_general(a, b, dimension_numbers) for b in y] for a in x)
    return _Pair(re - im, one + two)


COMPLEX: dict[str, Callable[..., Any]] = {
    "mul": _times, "div": _over, "integer_pow": _power, "dot_general": _product,
    "square": lambda x, **_: _times(x, x), "conj": lambda x, **_: _Pair(x.re, -x.im),
    "real": lambda x, **_: x.re, "imag": lambda x, **_: x.im, "complex": lambda *x, **_: _Pair(*x),
    "abs": lambda x, **_: jnp.hypot(x.re, x.im),
    "exp": lambda x, **_: _Pair(jnp.exp(x.re) * jnp.cos(x.im), jnp.exp(x.re) * jnp.sin(x.im)),
}  # fmt: skip
# These do to a pair what they do to each of its halves.
HALVED = {"add", "sub", "neg", "broadcast_in_dim", "reshape", "squeeze", "slice", "rev",
          "transpose", "concatenate", "reduce_sum", "select_n", "copy"}  # fmt: skip


def _is_complex(kind: Any) -> bool:
    return jnp.issubdtype(kind.dtype, jnp.complexfloating)


def _pair(x: Any) -> Any:
    """Halves a complex array; a pair stays as it is."""
    if isinstance(x, _Pair):
        return x
    known = concrete(x)
    return _Pair(x, jnp.zeros_like(x)) if known is None else _Pair(known.real, known.imag)


def _inlined(jaxpr: Any, consts: Any, *values: Any) -> list[Any]:
    """Computes what a jaxpr does, without calls and without complex numbers."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        given = [v.val if isinstance(v, core.Literal) else env[v] for v in eqn.invars]
        is_complex = any(_is_complex(v.aval) for v in (*eqn.invars, *eqn.outvars))
        if name in CALLS:
            inner = params[CALLS[name]]
            found = _inlined(inner.jaxpr, inner.consts, *given)
        elif name == "scan":
            found = _scanned(params, given)
        elif not is_complex:
            found = eqn.primitive.bind(*given, **params)
        elif name == "convert_element_type":
            found = _pair(given[0])
        elif name in HALVED:  # of `select_n`, the first is no number
            plain = given[:1] if name == "select_n" else []
            halves = zip(*map(_pair, given[len(plain) :]), strict=True)
            found = _Pair(*(eqn.primitive.bind(*plain, *half, **params) for half in halves))
        elif name in COMPLEX:
            wanted = given if name == "complex" else map(_pair, given)
            found = COMPLEX[name](*wanted, **params)
        else:
            raise NotImplementedError(f"complex {name} has no translation into JavaScript")
        several = eqn.primitive.multiple_results
        env.update(zip(eqn.outvars, found if several else [found], strict=True))
    return [v.val if isinstance(v, core.Literal) else env[v] for v in jaxpr.outvars]


def _scanned(params: Mapping[str, Any], given: list[Any]) -> list[Any]:
    """A scan, whose state may hold pairs."""
    inner, fixed, moved = params["jaxpr"], params["num_consts"], params["num_carry"]
    consts, state, each = given[:fixed], given[fixed : fixed + moved], given[fixed + moved :]
    kinds = inner.in_avals[fixed : fixed + moved]
    state = [
        _pair(x) if _is_complex(kind) else x
        for x, kind in zip(state, kinds, strict=True)
    ]

    def step(state: list[Any], each: list[Any]) -> tuple[list[Any], list[Any]]:
        found = _inlined(inner.jaxpr, inner.consts, *consts, *state, *each)
        return found[:moved], found[moved:]

    how = {"length": params["length"], "reverse": params["reverse"]}
    state, out = jax.lax.scan(step, state, each, **how)
    return [*state, *out]


class _View(NamedTuple):
    """An array in JavaScript: entry i is name[offset + sum_k strides_k i_k], or `name` itself if
    the name is a number's."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    number: bool = False

    def at(self, index: list[str]) -> str:
        if self.number:
            return self.name
        axes = zip(self.strides, index, self.shape, strict=True)
        terms = [i if s == 1 else f"{s} * {i}" for s, i, n in axes if s and n > 1]
        return f"{self.name}[{' + '.join(([str(self.offset)] if self.offset else []) + terms) or 0}]"


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(0 if n == 1 else math.prod(shape[k + 1 :]) for k, n in enumerate(shape))


class _Loop(NamedTuple):
    """A loop of steps, each a number's definition, which is stored where others need it."""

    sizes: tuple[int, ...]
    steps: dict[str, str]

    def text(self, used: Mapping[str, int]) -> str:
        places = [f"j{k}" for k in range(len(self.sizes))]
        entry = _View("", self.sizes, _contiguous(self.sizes)).at(places)
        body = [
            f"const {_local(name)} = {step}" + f"; {name}{entry} = {_local(name)}" * (name in used)
            for name, step in self.steps.items()
        ]
        return _loops(zip(places, self.sizes, strict=True), body)


def _local(name: str) -> str:
    return name.replace("x", "y")


def _loops(sizes: Iterable[tuple[str, int]], body: list[str]) -> str:
    heads = [f"for (let {i} = 0; {i} < {n}; {i}++)" for i, n in sizes if n > 1]
    return " ".join([*heads, "{", "; ".join(body), "}"])


class _Code:
    """Lines of JavaScript, and the arrays that they use, made once for all calls."""

    def __init__(self) -> None:
        self.lines: list[str | _Loop] = []
        self.buffers: dict[str, str] = {}
        self.count = itertools.count()

    def text(self) -> tuple[list[str], list[str]]:
        """Returns the arrays and the lines, without arrays that nothing reads."""
        names = re.compile(r"\bx\d+\b")
        every = [x if isinstance(x, str) else "; ".join(x.steps.values()) for x in self.lines]
        used = collections.Counter(names.findall("\n".join(every)))
        lines = [x if isinstance(x, str) else x.text(used) for x in self.lines]
        return [text for name, text in self.buffers.items() if name in used], lines

    def array(self, shape: tuple[int, ...], values: str | None = None) -> _View:
        """A new array, or a new number, which is not yet declared, if there is one entry."""
        name, number = f"x{next(self.count)}", math.prod(shape) == 1
        if not number:
            made = f"new Float64Array({math.prod(shape)})" if values is None else values
            self.buffers[name] = f"const {name} = {made}"
        return _View(name, shape, _contiguous(shape), 0, number)

    def constant(self, value: Any, shape: tuple[int, ...]) -> _View:
        values = np.broadcast_to(np.asarray(value, float), shape).ravel()
        texts = [_spelled(v) for v in values.tolist()]
        if len(set(texts)) == 1:
            return _View(texts[0], shape, (0,) * len(shape), 0, True)
        return self.array(shape, f"Float64Array.of({', '.join(texts)})")

    def fill(self, shape: tuple[int, ...], views: list[_View], expression: str) -> _View:
        """Computes an expression of views of one shape, once where all of them repeat."""
        # A single entry among arrays, of which it may be one, has no axes of its own.
        none = {"shape": shape, "strides": (0,) * len(shape)}
        views = [v if len(v.shape) == len(shape) else v._replace(**none) for v in views]
        moving = [k for k, n in enumerate(shape) if n > 1 and any(v.strides[k] for v in views)]
        sizes = tuple(shape[k] for k in moving)
        places = ["0"] * len(shape)
        for place, k in enumerate(moving):
            places[k] = f"j{place}"
        own = _contiguous(sizes)
        strides = tuple(own[moving.index(k)] if k in moving else 0 for k in range(len(shape)))
        loop = self.lines[-1] if self.lines and isinstance(self.lines[-1], _Loop) else None
        inside = [v for v in views if loop and v.name in loop.steps]
        aligned = all((v.offset, v.strides) == (0, strides) for v in inside)
        if loop and inside and not (loop.sizes == sizes and aligned):
            loop = None  # what is needed was computed there, but in another order
        entries = [_local(v.name) if loop and v in inside else v.at(places) for v in views]
        entries = [f"({entry})" if entry.startswith("-") else entry for entry in entries]
        text = expression.format(*entries)
        if not moving:
            out = self.array(())
            place = len(self.lines) - 1 if loop else len(self.lines)
            self.lines.insert(place, f"const {out.name} = {text}")
            return out._replace(shape=shape, strides=strides)
        if loop is None or loop.sizes != sizes:
            loop = _Loop(sizes, {})
            self.lines.append(loop)
        out = self.array(sizes)
        loop.steps[out.name] = text
        return _View(out.name, shape, strides)

    def copy(self, view: _View, out: _View) -> None:
        """Copies entries into what exists already."""
        places = [f"j{k}" for k in range(len(view.shape))]
        body = [f"{out.at(places)} = {view.at(places)}"]
        self.lines.append(_loops(zip(places, view.shape, strict=True), body))

    def whole(self, view: _View) -> _View:
        """Returns a copy of its own: a number, or an array in C's order."""
        out = self.array(view.shape)
        if out.number:
            self.lines.append(f"const {out.name} = {view.at(['0'] * len(view.shape))}")
        else:
            self.copy(view, out)
        return out

    def block(self, jaxpr: Any, consts: Any, inputs: list[_View]) -> list[_View]:
        """Translates all steps that matter for the results."""
        env: dict[Any, _View] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.constant(value, var.aval.shape)

        def read(v: Any) -> _View:
            is_known = isinstance(v, core.Literal)
            return self.constant(v.val, v.aval.shape) if is_known else env[v]

        needed, steps = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}, []
        for eqn in reversed(jaxpr.eqns):
            if needed.intersection(eqn.outvars):
                steps.append(eqn)
                needed.update(v for v in eqn.invars if not isinstance(v, core.Literal))
        done: dict[Any, list[_View]] = {}  # what is computed twice, as both sides of a difference
        for eqn in reversed(steps):
            views = [read(v) for v in eqn.invars]
            key = eqn.primitive.name, str(eqn.params), *views
            if key not in done:
                done[key] = self.step(eqn, views)
            env.update(zip(eqn.outvars, done[key], strict=True))
        return [read(v) for v in jaxpr.outvars]

    def step(self, eqn: Any, views: list[_View]) -> list[_View]:
        name, params, out = eqn.primitive.name, eqn.params, eqn.outvars[0].aval
        if name in CALLS:  # of the rules for complex numbers
            return self.block(params[CALLS[name]].jaxpr, params[CALLS[name]].consts, views)
        truths = all(v.aval.dtype == bool for v in eqn.invars)
        whole = all(jnp.issubdtype(v.aval.dtype, jnp.integer) for v in eqn.invars)
        if name in ELEMENTWISE and not (name in TRUTHS and not truths):
            squared = name == "integer_pow" and params["y"] == 2
            text = ELEMENTWISE["square" if squared else name].replace("{y}", str(params.get("y")))
            text = f"Math.trunc({text})" if name == "div" and whole else text
        elif name == "convert_element_type":
            kind = params["new_dtype"]
            text = "{0}" if jnp.issubdtype(kind, jnp.floating) or truths or whole else "Math.trunc({0})"
            text = "+({0} !== 0)" if kind == bool else text
        elif name == "select_n":
            text = "{1}"
            for k in range(2, len(views)):
                text = f"({{0}} === {k - 1} ? {{{k}}} : {text})"
        elif method := getattr(self, f"_{name}", None):
            return method(eqn, views)
        elif name in REDUCTIONS or name in ("argmin", "argmax"):
            return [self.reduced(name, views[0], params["axes"])]
        else:
            raise NotImplementedError(f"{name} has no translation into JavaScript: {eqn}")
        return [self.fill(out.shape, views, text)]

    def reduced(self, name: str, view: _View, axes: tuple[int, ...]) -> _View:
        rest = [k for k in range(len(view.shape)) if k not in axes]
        shape, strides = (tuple(x[k] for k in rest) for x in (view.shape, view.strides))
        if all(view.shape[k] == 1 for k in axes) and not name.startswith("arg"):
            return view._replace(shape=shape, strides=strides)
        out, places = self.array(shape), [f"j{k}" for k in range(len(view.shape))]
        entry = view.at(places)
        if name.startswith("arg"):
            (axis,) = axes
            sign = "<" if name == "argmin" else ">"
            first = view.at([p if k != axis else "0" for k, p in enumerate(places)])
            start = f"let b = {first}, s = 0"
            # The first NaN wins, as in NumPy.
            better = f"v {sign} b || (v !== v && b === b)"
            step = [f"const v = {entry}", f"if ({better}) {{ b = v; s = {places[axis]} }}"]
        else:
            first, total = REDUCTIONS[name]
            start, step = f"let s = {first}", [f"s = {total.format('s', entry)}"]
        inner = _loops([(places[k], view.shape[k]) for k in axes], step)
        kept = [places[k] for k in rest]
        self.lines += [f"let {out.name}"] if out.number else []
        body = [start, inner, f"{out.at(kept)} = s"]
        self.lines.append(_loops(zip(kept, shape, strict=True), body))
        return out

    def _dot_general(self, eqn: Any, views: list[_View]) -> list[_View]:
        summed, batch = eqn.params["dimension_numbers"]
        free = [
            [k for k in range(len(v.shape)) if k not in (*summed[i], *batch[i])]
            for i, v in enumerate(views)
        ]
        # Both get the axes: batch, free ones of the left, free ones of the right, summed.
        shape = [views[0].shape[k] for k in (*batch[0], *free[0])]
        shape += [views[1].shape[k] for k in free[1]] + [views[0].shape[k] for k in summed[0]]
        wide = []
        for i, view in enumerate(views):
            left, right = (len(free[0]), 0) if i else (0, len(free[1]))
            order = [*batch[i], *[None] * left, *free[i], *[None] * right, *summed[i]]
            strides = tuple(0 if k is None else view.strides[k] for k in order)
            wide.append(view._replace(shape=tuple(shape), strides=strides))
        products = self.fill(tuple(shape), wide, "{0} * {1}")
        last = tuple(range(len(shape) - len(summed[0]), len(shape)))
        return [self.reduced("reduce_sum", products, last)]

    def _scan(self, eqn: Any, views: list[_View]) -> list[_View]:
        inner, fixed, moved, length = (
            eqn.params[k] for k in ("jaxpr", "num_consts", "num_carry", "length")
        )
        out = [self.array(v.aval.shape) for v in eqn.outvars]
        self.lines += [f"let {x.name}" for x in out if x.number]
        for x, start in zip(out, views[fixed : fixed + moved], strict=False):
            self.copy(start, x)
        count = f"k{next(self.count)}"
        place = f"{length - 1} - {count}" if eqn.params["reverse"] else count
        self.lines.append(f"for (let {count} = 0; {count} < {length}; {count}++) {{")
        each = [self.row(v, place) for v in views[fixed + moved :]]
        results = self.block(inner.jaxpr, inner.consts, [*views[:fixed], *out[:moved], *each])
        # First all are copied, since one part of the state may become what another was.
        for x, new in zip(out, [self.whole(v) for v in results[:moved]], strict=False):
            self.copy(new, x)
        for x, view in zip(out[moved:], results[moved:], strict=True):
            self.copy(view, self.row(x, place))
        self.lines.append("}")
        return out

    def row(self, view: _View, place: str) -> _View:
        """One entry of the first axis, at an index that is known when the code runs."""
        rest = view._replace(shape=view.shape[1:], strides=view.strides[1:])
        if view.number or view.strides[0] == 0:
            return rest
        name = f"r{next(self.count)}"
        end = view.offset + sum(s * (n - 1) for s, n in zip(rest.strides, rest.shape, strict=True)) + 1
        start = f"{view.strides[0]} * ({place})"
        self.lines.append(f"const {name} = {view.name}.subarray({start} + {view.offset}, {start} + {end})")
        return rest._replace(name=name, offset=0)

    def _broadcast_in_dim(self, eqn: Any, views: list[_View]) -> list[_View]:
        shape, axes = eqn.params["shape"], eqn.params["broadcast_dimensions"]
        view, strides = views[0], [0] * len(shape)
        for axis, n, s in zip(axes, view.shape, view.strides, strict=True):
            strides[axis] = s if n == shape[axis] else 0
        return [view._replace(shape=shape, strides=tuple(strides))]

    def _transpose(self, eqn: Any, views: list[_View]) -> list[_View]:
        order, view = eqn.params["permutation"], views[0]
        shape, strides = (tuple(x[k] for k in order) for x in (view.shape, view.strides))
        return [view._replace(shape=shape, strides=strides)]

    def _slice(self, eqn: Any, views: list[_View]) -> list[_View]:
        view, start = views[0], eqn.params["start_indices"]
        by = eqn.params["strides"] or (1,) * len(start)
        offset = view.offset + sum(s * k for s, k in zip(view.strides, start, strict=True))
        strides = tuple(s * k for s, k in zip(view.strides, by, strict=True))
        return [view._replace(shape=eqn.outvars[0].aval.shape, strides=strides, offset=offset)]

    def _rev(self, eqn: Any, views: list[_View]) -> list[_View]:
        view, axes = views[0], eqn.params["dimensions"]
        last = sum(view.strides[k] * (view.shape[k] - 1) for k in axes)
        strides = tuple(-s if k in axes else s for k, s in enumerate(view.strides))
        return [view._replace(strides=strides, offset=view.offset + last)]

    def _squeeze(self, eqn: Any, views: list[_View]) -> list[_View]:
        return self._reshape(eqn, views)

    def _reshape(self, eqn: Any, views: list[_View]) -> list[_View]:
        view, shape = views[0], eqn.outvars[0].aval.shape
        if [n for n in view.shape if n > 1] != [n for n in shape if n > 1] and any(view.strides):
            view = self.whole(view)
            return [view._replace(shape=shape, strides=_contiguous(shape))]
        rest = iter(s for s, n in zip(view.strides, view.shape, strict=True) if n > 1)
        strides = tuple(next(rest, 0) if n > 1 else 0 for n in shape)
        return [view._replace(shape=shape, strides=strides)]

    def _concatenate(self, eqn: Any, views: list[_View]) -> list[_View]:
        out, axis, start = self.array(eqn.outvars[0].aval.shape), eqn.params["dimension"], 0
        for view in views:
            offset = start * out.strides[axis]
            self.copy(view, out._replace(shape=view.shape, offset=offset))
            start += view.shape[axis]
        return [out]

    def _iota(self, eqn: Any, views: list[_View]) -> list[_View]:
        shape, axis = eqn.params["shape"], eqn.params["dimension"]
        places = np.arange(shape[axis]).reshape([-1 if k == axis else 1 for k in range(len(shape))])
        return [self.constant(places, shape)]


def _spelled(value: float) -> str:
    text = {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN" if value != value else repr(value))
    return text.removesuffix(".0")
