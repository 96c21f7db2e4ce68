"""Sparse linear equations over the rational numbers, and over the integers modulo 2."""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

Number: TypeAlias = int | Fraction


class Solver:
    """Equations in solved form: some unknowns are expressed by the other, free unknowns.

    Attributes:
      modulus: 2 for the numbers 0 and 1, 0 for rational numbers.
      consistent: Whether the equations so far have a solution.
    """

    def __init__(self, modulus: int = 0) -> None:
        self.modulus = modulus
        self.consistent = True
        # unknown -> ({free unknown: factor}, constant)
        self._solved: dict[int, tuple[dict[int, Number], Number]] = {}
        # free unknown -> the solved unknowns that contain it
        self._within: dict[int, set[int]] = {}

    def copy(self) -> "Solver":
        """Copies the equations."""
        other = Solver(self.modulus)
        other.consistent = self.consistent
        other._solved = {k: (dict(terms), c) for k, (terms, c) in self._solved.items()}
        other._within = {k: set(v) for k, v in self._within.items()}
        return other

    def _number(self, value: Number) -> Number:
        if not self.modulus:
            return Fraction(value)
        value = Fraction(value)
        return value.numerator * pow(value.denominator, -1, self.modulus) % self.modulus

    def reduced(
        self, terms: Mapping[int, Number], constant: Number
    ) -> tuple[dict[int, Number], Number]:
        """Expresses a sum by free unknowns.

        Returns the factors of free unknowns, without zeros, and the constant.
        """
        out: dict[int, Number] = {}
        total = self._number(constant)
        for unknown, factor in terms.items():
            factor = self._number(factor)
            inner, inner_constant = self._solved.get(unknown, ({unknown: 1}, 0))
            total += factor * inner_constant
            for free, inside in inner.items():
                out[free] = out.get(free, 0) + factor * inside
        if self.modulus:
            total %= self.modulus
            out = {k: v % self.modulus for k, v in out.items()}
        return {k: v for k, v in out.items() if v}, total

    def add(self, terms: Mapping[int, Number], constant: Number = 0) -> bool:
        """Adds the equation that the sum of factor * unknown is the constant.

        Returns whether the equations still have a solution. A contradicting equation is not added.
        """
        left, total = self.reduced(terms, -self._number(constant))
        if not left:
            if total:
                self.consistent = False
            return not total
        # The newest unknown is expressed by older ones, which appear first in the network.
        pivot = max(left)
        factor = left.pop(pivot)
        inverse = pow(int(factor), -1, self.modulus) if self.modulus else 1 / Fraction(factor)
        solution = {k: self._number(-v * inverse) for k, v in left.items()}
        value = self._number(-total * inverse)
        for outer in self._within.pop(pivot, ()):
            inside, constant = self._solved[outer]
            times = inside.pop(pivot)
            constant = constant + times * value
            for k, v in solution.items():
                new = inside.get(k, 0) + times * v
                new = new % self.modulus if self.modulus else new
                if new:
                    inside[k] = new
                    self._within.setdefault(k, set()).add(outer)
                elif k in inside:
                    del inside[k]
                    self._within[k].discard(outer)
            self._solved[outer] = (inside, constant % self.modulus if self.modulus else constant)
        self._solved[pivot] = (solution, value)
        for k in solution:
            self._within.setdefault(k, set()).add(pivot)
        return True

    def value(self, unknown: int) -> Number | None:
        """Looks up the value of a determined unknown."""
        terms, constant = self.reduced({unknown: 1}, 0)
        return None if terms else constant

    def choose(self, unknowns: Iterable[int], values: Sequence[Number]) -> dict[int, Number] | None:
        """Finds a solution in which given unknowns have allowed values.

        `values` lists the allowed values of each, the preferred value first. Returns a value for
        each, or None. The search assigns unknowns in order without backtracking, except where the
        last unknowns of an equation are determined.
        """
        trial = self.copy()
        order = list(unknowns)
        allowed = [self._number(value) for value in values]
        for unknown in order:
            if trial.value(unknown) is None:
                for value in allowed:
                    further = trial.copy()
                    further.add({unknown: 1}, value)
                    if _possible(further, order, allowed):
                        trial = further
                        break
                else:
                    return None
        found = {}
        for unknown in order:
            value = trial.value(unknown)
            if value is None or value not in allowed:
                return None
            found[unknown] = values[allowed.index(value)]
        return found


def _possible(solver: Solver, unknowns: Iterable[int], allowed: Sequence[Number]) -> bool:
    """Checks whether every determined unknown has an allowed value."""
    return all((value := solver.value(u)) is None or value in allowed for u in unknowns)
