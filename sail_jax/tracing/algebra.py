"""The effect of operations on the units of an axis: axes in one space, and changes beyond order.

A network may allow changes of units other than permutations. For one space, multiply the entries of
unit i in every array that has an axis in this space by c_i^e. Here e is the *exponent* of the array
at this axis. The network computes the same function for every c if the exponents satisfy:

    y = a * b               e(y) = e(a) + e(b)
    y = a + b, max(a, b)    e(y) = e(a) = e(b)
    sum_i a_i b_i           e(a) + e(b) = 0
    y = exp(a), sum_i a_i   e(a) = 0

These are linear equations for exponents of arrays. Three kinds of change have such equations. They
differ in their domain and in a few rules:

- *scale*: c_i > 0. Exponents are rational numbers.
- *sign*: c_i = +-1. Exponents are 0 or 1, and 1 + 1 = 0. An even function removes signs.
- *share*: a unit i becomes several copies, with shares c that sum to 1. Exponent 0 copies an entry,
  and exponent 1 divides it. The exponents in a sum of products over units then sum to 1 instead of
  0. All other equations are the same as for scale.

An `Algebra` unifies the terms of a forward pass. For terms with atoms, it also collects their
equations, which `sail_jax.tracing.roles` solves.
"""

import enum
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from sail_jax.basis.families import Family
from sail_jax.tracing.terms import (
    Atom,
    Label,
    Product,
    Sum,
    Term,
    Variable,
    align,
    atoms,
    fix,
    resolve,
)


class Change(enum.Flag):
    """The kinds of change of an equation."""

    SCALE = 1
    SIGN = 2
    SHARE = 4
    ALL = SCALE | SIGN | SHARE


class Equation(NamedTuple):
    """A linear equation for the exponents of one space: the sum of factor * exponent is a constant.

    Attributes:
      slots: The numbers of the exponents.
      factors: The factor of each exponent.
      change: The kinds of change to which the equation applies.
      share: The constant for shares. It is 0 for scales and signs.
    """

    slots: tuple[int, ...]
    factors: tuple[Fraction, ...]
    change: Change = Change.ALL
    share: int = 0


class Event(NamedTuple):
    """An operation without equations, which limits the family of maps of a space.

    Attributes:
      slots: The exponents of the arrays in the operation.
      parametric: For each array, whether it depends only on parameters. Such an array with exponent
        0 is a gain and is ignored.
      family: The required family of maps, if two of the arrays count (or the only array).
      unitwise: Whether a function acts unit by unit.
      averaged: The value of which the mean over units is taken, if the operation is such a mean.
    """

    slots: tuple[int, ...]
    parametric: tuple[bool, ...]
    family: Family
    unitwise: bool = False
    averaged: object = None


class Algebra:
    """Unifies terms, and collects equations and events for terms with atoms.

    Attributes:
      where: The current primitive and its source line, for reasons.
      spaces: The space of each slot.
      equations: The equations, in order.
      events: The events.
    """

    def __init__(self) -> None:
        self.where = ""
        self.spaces: list[Variable] = []
        self.equations: list[Equation] = []
        self.events: list[Event] = []

    def atom(self, space: Variable) -> Atom:
        """Makes an atom with a separate exponent."""
        self.spaces.append(space)
        return Atom(space, len(self.spaces) - 1)

    def invariant(self, space: Variable) -> Atom:
        """Makes an atom with exponent 0."""
        new = self.atom(space)
        self._state([new], [1])
        return new

    def renewed(self, label: Label) -> Label:
        """Copies a label with new exponents."""
        if label is None:
            return None
        term = resolve(label)
        if isinstance(term, Atom):
            return self.atom(term.space)
        if isinstance(term, Product | Sum) and atoms(term):
            parts = (self.renewed(part) for part in term.parts)
            return type(term)(tuple(part for part in parts if part is not None))
        return term

    def fixed(self, label: Label, what: str = "") -> None:
        """Fixes the order of units."""
        fix(label, f"{what}: {self.where}" if what else self.where)

    def same(self, *labels: Label) -> Label:
        """Unifies labels, for example of the operands of a sum.

        Args:
          *labels: The labels; None for values that are constant along the axis.

        Returns:
          The label of the result, or None.
        """
        given, columns = self._matched(labels)
        for column in columns:
            for other in column[1:]:
                if other is not column[0]:
                    self._state([column[0], other], [1, -1])
        return given[0] if given else None

    def multiplied(
        self,
        factors: Sequence[tuple[Label, Fraction | int]],
        parametric: Sequence[bool],
        *,
        finite: bool = False,
    ) -> Label:
        """Multiplies powers unit by unit.

        Args:
          factors: The labels with their powers; None for constant values.
          parametric: For each array, whether it depends only on parameters.
          finite: Whether the divisor cannot be 0.

        Returns:
          The label of the result.
        """
        kept = [k for k, (label, _) in enumerate(factors) if label is not None]
        given, columns = self._matched([factors[k][0] for k in kept])
        if not given:
            return None
        powers = [Fraction(factors[k][1]) for k in kept]
        if len(given) == 1 and powers[0] == 1:
            return given[0]
        out = self.renewed(given[0])
        for new, column in zip(atoms(out), columns, strict=False):
            rational, sign = [Fraction(-1), *powers], Change.SIGN
            self._state([new, *column], rational, Change.SCALE | Change.SHARE)
            whole = [power.denominator == 1 for power in powers]
            if all(whole):
                self._state([new, *column], [1, *powers], sign)
            else:
                # The argument and the result of a root are never negative.
                for atom in (new, *column):
                    self._state([atom], [1], sign)
            family = Family.MONOMIAL
            if min(powers) < 0 and not finite:
                # Added units of zeros would cause a division by zero.
                family |= Family.INVERTIBLE
            self._event(column, [parametric[k] for k in kept], family)
        return out

    def curved(
        self,
        label: Label,
        parametric: bool,
        *,
        scale: bool = False,
        sign: bool = False,
        finite: bool = True,
        shift: bool = False,
    ) -> None:
        """Records a function that acts unit by unit.

        Args:
          label: The label of its argument.
          parametric: Whether the argument depends only on parameters.
          scale: Whether f(c x) = c f(x) for positive c.
          sign: Whether f(-x) = -f(x).
          finite: Whether f(0) is a number.
          shift: Whether the function adds one number to all units, such as the mean in a norm.
        """
        change = Change.ALL
        if scale:
            change &= ~(Change.SCALE | Change.SHARE)
        if sign:
            change &= ~Change.SIGN
        for atom in atoms(label):
            if change:
                self._state([atom], [1], change)
            family = Family.MONOMIAL if finite else Family.MONOMIAL | Family.INVERTIBLE
            self._event([atom], [parametric], family, unitwise=not shift)

    def magnitude(self, label: Label, parametric: bool, *, of_sign: bool) -> Label:
        """Splits units into magnitude and sign.

        Args:
          label: The label of the argument.
          parametric: Whether it depends only on parameters.
          of_sign: Whether to return the sign; if not, the magnitude.

        Returns:
          The label of the result.
        """
        out = self.renewed(label)
        for new, old in zip(atoms(out), atoms(label), strict=True):
            lost = Change.SCALE | Change.SHARE if of_sign else Change.SIGN
            self._state([new], [1], lost)
            self._state([new, old], [1, -1], Change.ALL & ~lost)
            self._event([old], [parametric], Family.MONOMIAL, unitwise=True)
        return out

    def contracted(self, a: Label, b: Label, parametric: tuple[bool, bool]) -> None:
        """Sums products over units.

        `parametric` states for each array whether it depends only on parameters.
        """
        given, columns = self._matched([a, b])
        if len(given) < 2:
            if given:
                self.summed(given[0], parametric[a is None])
            return
        for column in columns:
            self._state(column, [1, 1], share=1)
            if not any(parametric):
                # Such a product is often divided by a number that depends on the number of units,
                # as in attention. It stays correct if the number of units does not change.
                self._event(column, parametric, Family.INVERTIBLE)

    def summed(self, label: Label, parametric: bool) -> None:
        """Sums over units."""
        for atom in atoms(label):
            self._state([atom], [1], share=1)
            self._event([atom], [parametric], Family.MONOMIAL)

    def averaged(self, label: Label, parametric: bool, of: object) -> None:
        """Takes the mean over units.

        Args:
          label: The label of the units.
          parametric: Whether their array depends only on parameters.
          of: The value of which the mean is taken.
        """
        for atom in atoms(label):
            self._state([atom], [1])
            self._event([atom], [parametric], Family.MONOMIAL | Family.ISOMETRIC, averaged=of)

    def squares(self, label: Label, parametric: bool, *, mean: bool) -> None:
        """Takes the sum or the mean of squares over units.

        `label` is the label of the units before squaring. `mean` is True if the sum is divided by
        the number of units.
        """
        for atom in atoms(label):
            self._state([atom], [1], Change.SHARE)
            family = Family.ISOMETRIC if mean else Family.ORTHOGONAL
            self._event([atom], [parametric], family)

    def counted(self, label: Label) -> None:
        """Records that an integer numbers the units."""
        for atom in atoms(label):
            self._state([atom], [1])
            self._event([atom], [False], Family.PERMUTATION)

    def _matched(self, labels: Sequence[Label]) -> tuple[list[Term], list[list[Atom]]]:
        """Aligns the given terms; returns them and the atoms at equal places."""
        given = [label for label in labels if label is not None]
        for label in given[1:]:
            align(given[0], label, self.where, self.invariant)
        # A later term may have refined the first.
        for label in given[1:]:
            align(given[0], label, self.where, self.invariant)
        return given, [list(c) for c in zip(*map(atoms, given), strict=False)]

    def _state(
        self,
        of: Sequence[Atom],
        factors: Sequence[Fraction | int],
        change: Change = Change.ALL,
        share: int = 0,
    ) -> None:
        slots = tuple(atom.slot for atom in of)
        self.equations.append(Equation(slots, tuple(map(Fraction, factors)), change, share))

    def _event(
        self,
        of: Sequence[Atom],
        parametric: Sequence[bool],
        family: Family,
        *,
        unitwise: bool = False,
        averaged: object = None,
    ) -> None:
        slots = tuple(atom.slot for atom in of)
        self.events.append(Event(slots, tuple(parametric), family, unitwise, averaged))
