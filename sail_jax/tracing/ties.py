"""Leaves that undo the growth of what a tied leaf reads.

A tied table E writes a space, as `E[tokens]`, and reads it, as `x @ E.T`. A larger table `E @ W.T`
writes with the map W. It should read with the inverse of W, but reads with W itself. If W^T W is c
times the identity, the product becomes c times as large. Other leaves can undo this if they are
divided by c: the gain of the norm in front of the table, or a scale of the outputs.

To find such leaves, every leaf is multiplied by an unknown power of c. Each value then has a power,
a linear form of the unknowns:

    y = a * b, a @ b     the sum of both powers
    y = a + b            both powers must be equal
    y = tanh(a)          the power must be 0
    y = x @ E.T          one more than the power of x

Outputs must have power 0. A solution with powers 0 and -1 names the leaves with power -1.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sail_jax.jax_internals import CALLS, ClosedJaxpr, Jaxpr, JaxprEqn, operation
from sail_jax.tracing.equations import Solver
from sail_jax.tracing.scans import LINEAR, PRODUCTS, UNCHANGED
from sail_jax.tracing.values import is_floating, is_key, opened, shape


class _Table(NamedTuple):
    """The tied leaf, perhaps transposed, with the axis of the space."""

    axis: int


class _Power(NamedTuple):
    """The power of a value: a sum of the powers of leaves, by their numbers, and a number."""

    leaves: Mapping[int, int]
    more: int = 0

    def plus(self, other: "_Power", times: int = 1) -> "_Power":
        numbers = {*self.leaves, *other.leaves}
        leaves = {n: self.leaves.get(n, 0) + times * other.leaves.get(n, 0) for n in numbers}
        return _Power(leaves, self.more + times * other.more)


_ONE = _Power({})
_Known = _Power | _Table | None
"""None stands for constants that are zero or infinite, which have every power."""


class _UnsolvedError(Exception):
    """The equations have no solution, or the tied leaf has a use without a rule."""


def undoing(traced: ClosedJaxpr, count: int, number: int, axis: int) -> tuple[int, ...]:
    """Finds the leaves that undo a factor on everything that a tied leaf reads.

    Args:
      traced: The forward pass.
      count: The number of leaves, which are its first arguments.
      number: The number of the tied leaf.
      axis: Its axis with the tied space.

    Returns:
      The numbers of the leaves that are divided by the factor; empty if there are none.
    """
    leaves = traced.jaxpr.invars[:count]
    free = [n for n, v in enumerate(leaves) if n != number and is_floating(v)]
    values: list[_Known] = [_Power({n: 1}) if n in free else _ONE for n in range(count)]
    values[number] = _Table(axis)
    walk = _Walk()
    try:
        outs = walk.run(traced, [*values, *[_ONE] * (len(traced.jaxpr.invars) - count)])
        walk.all_equal([_ONE, *outs])
    except _UnsolvedError:
        return ()
    # Earlier leaves keep their values if they can. Gains and scales have the fewest axes.
    free.sort(key=lambda n: -len(shape(leaves[n])))
    powers = walk.solver.choose(free, (0, -1)) or {}
    return tuple(sorted(n for n, power in powers.items() if power))


class _Walk:
    """Computes powers, and collects the equations for them."""

    def __init__(self) -> None:
        self.solver = Solver()

    def run(self, jaxpr: Jaxpr | ClosedJaxpr, values: Sequence[_Known]) -> list[_Known]:
        jaxpr, known, read = opened(jaxpr, values, _constant)
        for eqn in jaxpr.eqns:
            known |= zip(eqn.outvars, self._outcome(eqn, list(map(read, eqn.invars))), strict=True)
        return [read(v) for v in jaxpr.outvars]

    def all_equal(self, values: Sequence[_Known]) -> _Known:
        """Adds the equations that values have one power, and returns it."""
        powers = [value for value in values if isinstance(value, _Power)]
        if any(isinstance(value, _Table) for value in values):
            raise _UnsolvedError
        for power in powers:
            difference = power.plus(powers[0], -1)
            if not self.solver.add(difference.leaves, -difference.more):
                raise _UnsolvedError
        return powers[0] if powers else None

    def _outcome(self, eqn: JaxprEqn, ins: list[_Known]) -> list[_Known]:
        of, count = operation(eqn), len(eqn.outvars)
        if of.name in CALLS:
            return self.run(of.called, ins)
        if any(isinstance(x, _Table) for x in ins):
            return [self._use(eqn, ins)]
        if of.name in UNCHANGED:
            return ins
        if of.name in PRODUCTS or of.name == "div":
            return [_product(ins, -1 if of.name == "div" else 1)]
        if of.name in ("gather", "dynamic_slice", "split"):
            self.all_equal([_ONE, *ins[1:]])
            return ins[:1] * count
        if of.name == "select_n":
            self.all_equal([_ONE, ins[0]])
            return [self.all_equal(ins[1:])]
        rounds = of.name == "convert_element_type" and not is_floating(eqn.outvars[0])
        if of.name in LINEAR and not rounds:
            return [self.all_equal(ins)]
        self.all_equal([_ONE, *ins])
        return [_ONE] * count

    def _use(self, eqn: JaxprEqn, ins: list[_Known]) -> _Known:
        """The power of a result of the tied leaf."""
        of = operation(eqn)
        (place, table), *others = ((k, x) for k, x in enumerate(ins) if isinstance(x, _Table))
        if others:
            raise _UnsolvedError
        if of.name == "transpose":
            return _Table(of.permutation.index(table.axis))
        if of.name == "copy" or (of.name == "convert_element_type" and is_floating(eqn.outvars[0])):
            return table
        size = shape(eqn.invars[place])[table.axis]
        if of.name == "gather" and place == 0 and of.sizes[table.axis] == size:
            return _ONE
        if of.name == "dot_general" and table.axis not in of.contraction.batch[place]:
            reads = table.axis in of.contraction.summed[place]
            return _product([ins[1 - place], _Power({}, int(reads))], 1)
        raise _UnsolvedError


def _product(ins: Sequence[_Known], times: int) -> _Known:
    first, second = ins
    if isinstance(first, _Power) and isinstance(second, _Power):
        return first.plus(second, times)
    return None


def _constant(value: Any) -> _Known:
    if is_key(value):
        return _ONE
    array = np.asarray(value)
    real = np.issubdtype(array.dtype, np.number)
    return None if real and np.all((array == 0) | np.isinf(array)) else _ONE
