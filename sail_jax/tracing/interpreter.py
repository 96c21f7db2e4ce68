"""Runs a jaxpr on labels, in one pass with a rule for each primitive."""

import math
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sail_jax import jax_internals
from sail_jax.jax_internals import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from sail_jax.tracing import control, elementwise, indexing, shapes, sums
from sail_jax.tracing.algebra import Algebra
from sail_jax.tracing.terms import Fixed, Label, atoms
from sail_jax.tracing.values import (
    RULES,
    Value,
    constant,
    joined,
    opaque,
    opened,
    settled,
    shape,
    whole,
)

# The imports register their rules.
_ROOMS = (control, elementwise, indexing, shapes, sums)
# Frames in these packages are not the user's source of an operation.
_LIBRARIES = ("jax", "jaxlib", "flax", "equinox", "torchax", "torch")


class Interpreter:
    """Labels of every value of a forward pass.

    Attributes:
      algebra: The algebra that unifies labels.
      unknown: Names of primitives without a rule.
      seen: Names of all requested rules: primitives, and "cut".
      uses: For each atom of a parameter, the atoms of the operations that use it.
      trail: The results of all equations in order, if kept.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self.algebra = Algebra()
        self.unknown: set[str] = set()
        self.seen: set[str] = set()
        self.uses: dict[int, list[int]] = {}
        self.trail: list[tuple[JaxprEqn, list[Value]]] | None = [] if keep else None
        self._roots: dict[int, int] = {}
        self._line = ""

    def run(self, jaxpr: Jaxpr | ClosedJaxpr, values: Sequence[Value]) -> list[Value]:
        """Runs a jaxpr.

        `jaxpr` may be closed or not. Returns its result; squares and sums may be unsettled.
        """
        jaxpr, known, read = opened(jaxpr, values, constant)
        where = self.algebra.where
        for eqn in alive(jaxpr)[0]:
            # Cached traces have no source line and get the line of their caller.
            line, self._line = self._line, source(eqn) or self._line
            self.algebra.where = f"{eqn.primitive.name} ({self._line or 'no source'})"
            ins = [read(v) for v in eqn.invars]
            name = "cut" if shapes.is_cut(eqn, ins) else eqn.primitive.name
            self.seen.add(name)
            if not name.startswith(("gather", "scatter")):
                ins = [self._apart(x) for x in ins]
            if name not in RULES.lazy:
                ins = [settled(self, x) for x in ins]
            elif name not in RULES.views and name not in control.CALLS:
                ins = [joined(self, x) for x in ins]
            if name not in RULES.views and name not in _INSIDE:
                ins = [self._used(x) for x in ins]
            outs = _computed(eqn, ins) or self._outcome(name, eqn, ins)
            self._line = line
            for variable, out in zip(eqn.outvars, outs, strict=True):
                sizes = shape(variable)
                axes = (
                    None if n == 1 else self._ordered(t)
                    for t, n in zip(out.axes, sizes, strict=True)
                )
                known[variable] = out.shaped(tuple(axes))
            if self.trail is not None and name not in _INSIDE:
                self.trail.append((eqn, [known[v] for v in eqn.outvars]))
        self.algebra.where = where
        return [self._apart(read(v)) for v in jaxpr.outvars]

    def _outcome(self, name: str, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
        rule = RULES.rules.get(name)
        if rule is None:
            self.unknown.add(name)
            return opaque(self, eqn, ins)
        if name not in RULES.numbered:
            whole(self, *ins)
        outs = rule(self, eqn, ins)
        return outs if name in _INSIDE else [replace(out, number=None) for out in outs]

    def _ordered(self, label: Label) -> Label:
        """Records the current primitive as the origin of an order."""
        if isinstance(label, Fixed) and not label.origin:
            return Fixed(label.size, self.algebra.where)
        return label

    def _apart(self, value: Value) -> Value:
        """Joins integers along an axis, for an operation that does not expect separate ones."""
        if not value.columns:
            return value
        whole(self, value)
        return replace(value, columns=())

    def _used(self, value: Value) -> Value:
        """Makes a use of a parameter; two uses may treat its units differently."""
        if not value.view:
            return value
        axes = []
        for label in value.axes:
            new = self.algebra.renewed(label)
            for mine, its in zip(atoms(new), atoms(label), strict=True):
                root = self._roots.get(its.slot, its.slot)
                self._roots[mine.slot] = root
                self.uses.setdefault(root, []).append(mine.slot)
            axes.append(new)
        return replace(value, axes=tuple(axes), view=False)


# These pass their operands to other jaxprs unchanged.
_INSIDE = frozenset((*control.CALLS, "scan", "while", "cond"))


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "gt": np.greater, "lt": np.less,
    "ge": np.greater_equal, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal,
    "select_n": lambda which, *cases: cases[int(which)],
    "convert_element_type": lambda x: x, "broadcast_in_dim": lambda x: x,
    "reshape": lambda x: x, "squeeze": lambda x: x,
}  # fmt: skip


def _computed(eqn: JaxprEqn, ins: list[Value]) -> list[Value] | None:
    """Returns the result if it is a number. JAX computes divisors such as counts in this way."""
    act = _ARITHMETIC.get(eqn.primitive.name)
    numbers = [x.number for x in ins]
    size = shape(eqn.outvars[0]) if eqn.outvars else (0,)
    if act is None or None in numbers or math.prod(size) != 1:
        return None
    dtypes: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    known = (np.asarray(x, of.dtype) for x, of in zip(numbers, dtypes, strict=False))
    value = constant(np.asarray(act(*known)).astype(dtypes[-1].dtype).reshape(size))
    return None if value.number is None else [value]


def alive(jaxpr: Jaxpr) -> tuple[list[JaxprEqn], set[Var]]:
    """Finds the equations and variables that the result of a jaxpr depends on.

    `jaxpr` is not closed. Returns the equations in order, and the variables including arguments.
    """
    wanted = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if wanted.isdisjoint(eqn.outvars):
            continue
        kept.append(eqn)
        wanted |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return kept[::-1], wanted


def source(eqn: JaxprEqn) -> str:
    """Finds the source line of an equation."""
    trace = eqn.source_info.traceback
    return "" if trace is None else _line(trace)


@lru_cache(1 << 12)  # replaced equations share one
def _line(trace: Any) -> str:
    """Returns the innermost source line outside libraries among frames, or ""."""
    found = ""
    for name, line in _frames(trace):
        # The outermost frames come first.
        if short := _file(name):
            found = f"{short}:{line}"
    return found


@cache  # every equation has dozens of frames, of the same few files
def _file(path: str) -> str:
    """Returns the name of a source file; "" for libraries and this package."""
    file = Path(path)
    if "site-packages" in file.parts:
        package = file.parts[file.parts.index("site-packages") + 1]
        library = package in _LIBRARIES
    else:
        library = file.is_relative_to(sysconfig.get_path("stdlib"))
    here = Path(__file__).parent
    own = file.parent in (here, here.parent / "interop") or file == Path(jax_internals.__file__)
    return "" if own or library else file.name


def _frames(trace: Any) -> Iterable[tuple[str, int]]:
    python = trace.as_python_traceback()
    while python is not None:
        yield python.tb_frame.f_code.co_filename, python.tb_lineno
        python = python.tb_next
