"""Values of a forward pass on labels, and the registry of rules for primitives."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
from jaxtyping import ArrayLike

from sail_jax.jax_internals import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from sail_jax.tracing.algebra import Algebra
from sail_jax.tracing.terms import Face, Fixed, Label, Term, leaves

T = TypeVar("T")


class Pending(NamedTuple):
    """A sum that may become a mean.

    Attributes:
      labels: The labels of the summed axes; for a sum of squares, the labels before squaring.
      count: The number of summed entries.
      squares: Whether squares were summed.
      of: The summed value.
    """

    labels: tuple[Label, ...]
    count: int
    squares: bool
    of: object = None


@dataclass(frozen=True, eq=False)
class Value:
    """The labels of a value in the forward pass.

    Attributes:
      axes: A label for each axis; None if all entries along the axis are equal.
      numbers: The units that its integers number, or None.
      each: Whether these are the numbers of the units along an axis, in their order.
      columns: For such integers concatenated along the last axis, the concatenated values. Only the
        next operation may use them.
      beyond: Whether the number of units was added to such integers, as for negative indices.
      number: Its real number, if it depends only on constants and is a scalar or one integer.
      zero: Whether it is known to be 0, or False.
      positive: Whether it is known to be at least 0.
      nonzero: Whether it is known to be nonzero for all parameters.
      parametric: Whether its variation along free axes depends only on parameters and constants. It
        may be multiplied by a value without free axes.
      view: Whether it is a parameter, or a reshaped part of one.
      square: Whether it is the square of a value with these labels. It keeps them until the next
        operation, which may sum the squares.
      pending: A sum over units, if the value is a multiple of one.
    """

    axes: tuple[Label, ...]
    numbers: Term | None = None
    each: bool = False
    columns: tuple["Value", ...] = ()
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
        """Returns the same entries with other axes."""
        return replace(self, axes=tuple(axes))


@runtime_checkable
class Tracer(Protocol):
    """The interface of the interpreter for rules.

    Attributes:
      algebra: The algebra that unifies labels.
    """

    algebra: Algebra

    def run(self, jaxpr: Jaxpr | ClosedJaxpr, values: Sequence[Value]) -> list[Value]:
        """Runs a jaxpr."""
        ...


Rule = Callable[[Tracer, JaxprEqn, list[Value]], list[Value]]


@dataclass
class _Registry:
    """Rules by the name of their primitive, with flags for inputs beyond settled labels."""

    rules: dict[str, Rule] = field(default_factory=dict)
    lazy: set[str] = field(default_factory=set)
    numbered: set[str] = field(default_factory=set)
    views: set[str] = field(default_factory=set)


RULES = _Registry()


def rule(
    *names: str, lazy: bool = False, view: bool = False, numbered: bool = False
) -> Callable[[Rule], Rule]:
    """Registers a rule for some primitives.

    A `lazy` rule accepts unsettled squares and sums. The result of a `view` rule has the entries of
    its operand in another shape. A `numbered` rule uses integers that number units. For all other
    rules these units are fixed first, because their integers are used in arithmetic.
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
    jaxpr: Jaxpr | ClosedJaxpr, values: Sequence[T], constant: Callable[[Any], T]
) -> tuple[Jaxpr, dict[Any, T], Callable[[Any], T]]:
    """Binds the arguments of a jaxpr.

    Returns the jaxpr (not closed), the known values of its variables, and a function that reads a
    variable or a literal. `constant` describes constants.
    """
    closed = isinstance(jaxpr, ClosedJaxpr)
    inner, consts = (jaxpr.jaxpr, jaxpr.consts) if closed else (jaxpr, ())
    known: dict[Any, T] = dict(zip(inner.constvars, map(constant, consts), strict=True))
    known |= zip(inner.invars, values, strict=True)

    def read(variable: Var | Literal) -> T:
        return constant(variable.val) if isinstance(variable, Literal) else known[variable]

    return inner, known, read


def shape(variable: Any) -> tuple[int, ...]:
    """Looks up the shape of a variable of a jaxpr."""
    return tuple(variable.aval.shape)


def dtype_of(variable: Any) -> np.dtype:
    """Looks up the dtype of a variable of a jaxpr."""
    return variable.aval.dtype


def is_floating(variable: Any) -> bool:
    """Checks whether a variable of a jaxpr is real or complex."""
    return jax.numpy.issubdtype(dtype_of(variable), jax.numpy.inexact)


def is_key(value: Any) -> bool:
    """Checks whether a constant is a PRNG key, which NumPy cannot read."""
    return jax.numpy.issubdtype(getattr(value, "dtype", np.float64), jax.dtypes.extended)


def constant(array: ArrayLike) -> Value:
    """Describes a constant.

    It is treated as varying along every axis. A table of cosines has equal entries for one
    position, but not for two. A single integer in an array is an index.
    """
    axes = tuple(None if n == 1 else Fixed(n, "a constant") for n in np.shape(array))
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
    """Settles a value that is used directly: its sum is not a mean, and its square is a
    nonlinearity.

    Returns the value with separate labels.
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
    """Joins the parts of a value that were kept separate for a cut, if some were not cut.

    Returns the value with one term for each axis.
    """
    where = tracer.algebra.where

    def whole_term(label: Label) -> Label:
        return label.fold.factors(where)[label.axis] if isinstance(label, Face) else label

    if not any(isinstance(label, Face) for label in value.axes):
        return value
    return value.shaped([whole_term(label) for label in value.axes])


def parametric(values: Sequence[Value]) -> bool:
    """Checks whether all values are parametric, which makes the result parametric."""
    return all(value.parametric for value in values)


def scaled(values: Sequence[Value]) -> bool:
    """Checks whether a product of values is parametric."""
    free = [value for value in values if any(True for t in value.axes for _ in leaves(t))]
    return parametric(free if free else values)


def whole(tracer: Tracer, *values: Value) -> None:
    """Fixes the units that integers number, because the integers are used in arithmetic."""
    for value in values:
        for units in (value.numbers, *(column.numbers for column in value.columns)):
            if units is not None:
                tracer.algebra.fixed(units, "units are numbered")


def opaque(tracer: Tracer, eqn: JaxprEqn, values: Sequence[Value]) -> list[Value]:
    """Fixes every axis: the default for primitives without a rule, correct for any computation."""
    whole(tracer, *values)
    for value in values:
        for label in value.axes:
            tracer.algebra.fixed(label, "no rule for this primitive")
    return [Value(tuple(map(Fixed, shape(v)))) for v in eqn.outvars]
