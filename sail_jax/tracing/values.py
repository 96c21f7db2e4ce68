"""A value of a forward pass on labels, and the rules of primitives that act on such values."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
from jax.extend import core
from jaxtyping import ArrayLike

from sail_jax.tracing.algebra import Algebra
from sail_jax.tracing.terms import Face, Fixed, Label, Term, leaves

T = TypeVar("T")


class Pending(NamedTuple):
    """A sum that may yet turn out to be a mean.

    Attributes:
      labels: Of the axes over which it went; of what was squared, if squares were summed.
      count: How many entries were summed.
      squares: Whether squares were summed.
    """

    labels: tuple[Label, ...]
    count: int
    squares: bool


@dataclass(frozen=True, eq=False)
class Value:
    """A value of the forward pass, as far as its labels go.

    Attributes:
      axes: A label for each axis; None where all entries along the axis are equal.
      numbers: The units that its integers number; None if it numbers none.
      columns: Of such integers side by side along the last axis, the units that each numbers.
        Only the next operation may use them.
      beyond: Whether their count was added to such integers, as is done with negative ones.
      number: The real number that it is, if constants alone make it, and it is a scalar or one
        integer.
      zero: Whether it is known to be 0, or False.
      positive: Whether it is known to be at least 0.
      nonzero: Whether it is known not to be 0, whatever the parameters are.
      parametric: Whether its free axes vary as parameters and constants alone make them: it was
        computed from such, and perhaps multiplied by something without free axes.
      view: Whether it is a parameter, or holds entries of one in another shape.
      square: Whether it is the square of a value with these labels. It keeps them until the next
        operation shows whether the squares are summed.
      pending: A sum over units, if the value is a multiple of one.
    """

    axes: tuple[Label, ...]
    numbers: Term | None = None
    columns: tuple[Term | None, ...] = ()
    beyond: bool = False
    number: float | None = None
    zero: bool = False
    positive: bool = False
    nonzero: bool = False
    parametric: bool = False
    view: bool = False
    square: bool = False
    pending: Pending | None = None

    def shaped(self, axes: Sequence[Label]) -> "Value":
        """Describes the same entries with other axes."""
        return replace(self, axes=tuple(axes))


@runtime_checkable
class Tracer(Protocol):
    """What rules may ask of the interpreter.

    Attributes:
      algebra: What unifies labels.
    """

    algebra: Algebra

    def run(self, jaxpr: core.Jaxpr | core.ClosedJaxpr, values: Sequence[Value]) -> list[Value]:
        """Carries out a jaxpr."""
        ...


Rule = Callable[[Tracer, core.JaxprEqn, list[Value]], list[Value]]


@dataclass
class _Registry:
    """Rules by the name of their primitive, and what they may look at beyond settled labels."""

    rules: dict[str, Rule] = field(default_factory=dict)
    lazy: set[str] = field(default_factory=set)
    numbered: set[str] = field(default_factory=set)
    views: set[str] = field(default_factory=set)


RULES = _Registry()


def rule(
    *names: str, lazy: bool = False, view: bool = False, numbered: bool = False
) -> Callable[[Rule], Rule]:
    """Registers the rule of some primitives.

    `lazy`: it takes squares and sums before it is known what becomes of them. `view`: its outcome
    holds the entries of its operand in another shape. `numbered`: it looks at integers that number
    units; for all other rules these units are fixed before, as their integers are computed with.
    """

    def register(function: Rule) -> Rule:
        for name in names:
            RULES.rules[name] = function
            if lazy or view:
                RULES.lazy.add(name)
            if view:
                RULES.views.add(name)
            if view or numbered:
                RULES.numbered.add(name)
        return function

    return register


def opened(
    jaxpr: core.Jaxpr | core.ClosedJaxpr, values: Sequence[T], constant: Callable[[Any], T]
) -> tuple[core.Jaxpr, dict[Any, T], Callable[[Any], T]]:
    """Gives a jaxpr its arguments.

    Returns the jaxpr, not closed; what is known of its variables so far; and a function that reads
    a variable or a literal. `constant` describes constants.
    """
    closed = isinstance(jaxpr, core.ClosedJaxpr)
    inner, consts = (jaxpr.jaxpr, jaxpr.consts) if closed else (jaxpr, ())
    known: dict[Any, T] = dict(zip(inner.constvars, map(constant, consts), strict=True))
    known |= zip(inner.invars, values, strict=True)

    def read(variable: core.Var | core.Literal) -> T:
        return constant(variable.val) if isinstance(variable, core.Literal) else known[variable]

    return inner, known, read


def shape(variable: Any) -> tuple[int, ...]:
    """Looks up the shape of a variable of a jaxpr."""
    return tuple(variable.aval.shape)


def is_floating(variable: Any) -> bool:
    """Finds out whether a variable of a jaxpr holds real or complex numbers."""
    return jax.numpy.issubdtype(variable.aval.dtype, jax.numpy.inexact)


def constant(array: ArrayLike) -> Value:
    """Describes a constant.

    It counts as varying along every axis: a table of cosines for one position has equal entries,
    and for two it has not. One integer in an array is an index.
    """
    axes = tuple(None if n == 1 else Fixed(n) for n in np.shape(array))
    dtype = jax.numpy.result_type(array)
    real = any(jax.numpy.issubdtype(dtype, kind) for kind in (np.floating, np.integer, np.bool_))
    whole = not jax.numpy.issubdtype(dtype, np.floating) and np.size(array) == 1
    known = real and (whole or np.ndim(array) == 0)
    number = float(np.reshape(array, ())) if known else math.nan
    if math.isnan(number):
        return Value(axes, parametric=True)
    return Value(
        axes,
        number=number,
        zero=number == 0,
        positive=number >= 0,
        nonzero=number != 0,
        parametric=True,
    )


def settled(tracer: Tracer, value: Value) -> Value:
    """Settles a value that is used as it is: a sum that is not a mean, a square that is a curve.

    Returns the value, with labels of its own.
    """
    algebra = tracer.algebra
    value = joined(tracer, value)
    if value.beyond:
        whole(tracer, value)
        value = replace(value, beyond=False, numbers=None)
    if value.pending is not None:
        for label in value.pending.labels:
            if value.pending.squares:
                algebra.squares(label, value.parametric, mean=False)
            else:
                algebra.summed(label, value.parametric)
        value = replace(value, pending=None)
    if value.square:
        axes = (algebra.multiplied([(label, 2)], [value.parametric]) for label in value.axes)
        value = replace(value, square=False, axes=tuple(axes), positive=True)
    return value


def joined(tracer: Tracer, value: Value) -> Value:
    """Joins the parts of a value that were kept apart to be cut: none of them was, or not all.

    Returns the value, with one term for each axis.
    """
    where = tracer.algebra.where

    def whole_term(label: Label) -> Label:
        return label.fold.factors(where)[label.axis] if isinstance(label, Face) else label

    if not any(isinstance(label, Face) for label in value.axes):
        return value
    return value.shaped([whole_term(label) for label in value.axes])


def parametric(values: Sequence[Value]) -> bool:
    """Finds out whether some values are all parametric, and so their outcome."""
    return all(value.parametric for value in values)


def scaled(values: Sequence[Value]) -> bool:
    """Finds out whether a product of some values is parametric."""
    free = [value for value in values if any(True for t in value.axes for _ in leaves(t))]
    return parametric(free if free else values)


def whole(tracer: Tracer, *values: Value) -> None:
    """Fixes the units that integers number, as the integers are computed with."""
    for value in values:
        for units in (value.numbers, *value.columns):
            if units is not None:
                tracer.algebra.fixed(units, "units are numbered")


def opaque(tracer: Tracer, eqn: core.JaxprEqn, values: Sequence[Value]) -> list[Value]:
    """Fixes every axis: the rule of primitives that have none, right whatever they compute."""
    whole(tracer, *values)
    for value in values:
        for label in value.axes:
            tracer.algebra.fixed(label, "no rule for this primitive")
    return [Value(tuple(map(Fixed, shape(v)))) for v in eqn.outvars]
