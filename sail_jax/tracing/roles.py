"""Finds the role of each parameter in a space, and the allowed maps of the space (its family).

The equations of `sail_jax.tracing.algebra` are solved space by space.

1. *Readers* are divided when units are duplicated, and everything else is copied. The equations for
   shares need a solution in 0 and 1. Without a solution, units cannot be duplicated.
2. *Writers* carry scale and sign into the space, and *gains* only multiply it. With exponent -1 at
   readers, the equations for scales need a solution in 0 and 1. Otherwise the equations for signs
   need one.
3. Equations without a solution, and all events, reduce the family of maps.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from sail_jax.basis.axes import Role
from sail_jax.basis.families import NONLINEARITIES, Family
from sail_jax.tracing.algebra import Change, Equation, Event
from sail_jax.tracing.equations import Solver


class Place(NamedTuple):
    """A use of a parameter in a space.

    Attributes:
      slot: The number of its exponent.
      root: The number of the parameter's axis. Several uses of one axis share a root.
      matrix: Whether the parameter has another axis of several units.
    """

    slot: int
    root: int
    matrix: bool


class Found(NamedTuple):
    """The solution for a space.

    Attributes:
      roles: The role of each root, from its first use. Matrices come first, in order of use.
      tied: Roots with several roles.
      family: The allowed maps of the space.
      unitwise: Whether an operation other than gains and the mean of a norm acts unit by unit.
      uncentred: Whether a mean of squares may be of values whose mean is not subtracted, as in
        RMSNorm.
    """

    roles: dict[int, Role]
    tied: frozenset[int]
    family: Family
    unitwise: bool = False
    uncentred: bool = False

    @property
    def words(self) -> str:
        """Returns the family in words of `NONLINEARITIES`; "layernorm" if nothing else acts."""
        words = words_of(self.family)
        if words != "layernorm":
            return words
        # Copies and averages keep LayerNorm alone. They change the mean of squares, and functions
        # of single units.
        return words + " rmsnorm" * self.uncentred + " elementwise" * self.unitwise


def solve(places: Sequence[Place], equations: Sequence[Equation], events: Sequence[Event]) -> Found:
    """Finds the roles and the family of one space.

    Returns the roles and the family. The family never includes a map that the equations exclude.
    """
    slots = [place.slot for place in places]
    family = Family.LINEAR
    # 1. Readers.
    share = _system(equations, Change.SHARE)
    shares = share.choose(slots, (0, 1)) if share.consistent else None
    if shares is None:
        family |= Family.INVERTIBLE
        shares = _guessed(places, equations, events)
    readers = {slot for slot, value in shares.items() if value == 1}
    # 2. Writers and gains.
    writers, allowed = _writers(places, equations, events, readers)
    family |= allowed
    roles: dict[int, Role] = {
        slot: "read" if slot in readers else "write" if slot in writers else "gain"
        for slot in slots
    }
    # 3. Events with more than gains.
    sizes = _exponents(equations, roles, Change.SIGN)
    scales = _exponents(equations, roles, Change.SCALE)
    unitwise = False
    for event in events:
        counted = [
            not parametric or sizes.get(slot, 1) != 0
            for slot, parametric in zip(event.slots, event.parametric, strict=True)
        ]
        if sum(counted) >= min(2, len(counted)):
            family |= event.family
            unitwise |= event.unitwise
            if event.family & Family.ORTHOGONAL == Family.ISOMETRIC and any(
                abs(scales.get(slot, 0)) != 1 for slot in event.slots
            ):
                # A mean over units allows copies without scaling only if all units have the same
                # number of copies.
                family |= Family.SIGNED_EVEN_DUPLICATION
    if Family.NONNEGATIVE in family:
        family |= Family.MONOMIAL
    if Family.MONOMIAL not in family and Family.UNIT in family:
        # If nothing acts unit by unit and only scales are excluded, rotations remain.
        family = (family & ~Family.UNIT) | Family.ORTHOGONAL
    if (Family.SIGNED_SELECTION | Family.INVERTIBLE) in family:
        family |= Family.SIGNED_PERMUTATION
    by_root: dict[int, list[Role]] = {}
    for place in places:
        by_root.setdefault(place.root, []).append(roles[place.slot])
    tied = frozenset(root for root, uses in by_root.items() if len(set(uses)) > 1)
    if any("gain" in by_root[root] for root in tied):
        family |= Family.PERMUTATION
    vectors = {place.root: not place.matrix for place in places}
    order = sorted(by_root, key=lambda root: vectors[root])
    # A LayerNorm takes a mean, perhaps twice, and a mean of squares.
    means = {id(event.averaged) for event in events if event.averaged is not None}
    squares = sum(event.family == Family.ISOMETRIC for event in events)
    return Found(
        {root: by_root[root][0] for root in order}, tied, family, unitwise, squares > len(means)
    )


def _terms(of: Equation) -> dict[int, Fraction]:
    out: dict[int, Fraction] = {}
    for slot, factor in zip(of.slots, of.factors, strict=True):
        out[slot] = out.get(slot, Fraction(0)) + factor
    return out


def _guessed(
    places: Sequence[Place], equations: Sequence[Equation], events: Sequence[Event]
) -> dict[int, int]:
    """Guesses the readers if units cannot be duplicated: uses that scale inversely."""
    scale = _system(equations, Change.SCALE)
    gains = _gains(places, events)
    slots = [place.slot for place in places]
    for multiply in (gains, set[int]()):
        trial = scale.copy()
        fits = [trial.add({slot: 1}, 0) for slot in multiply]
        rest = [slot for slot in slots if slot not in multiply]
        chosen = trial.choose(rest, (1, -1)) if all(fits) else None
        if chosen:
            return {slot: int(chosen.get(slot) == -1) for slot in slots}
    # Returns consistent equations for shares; sums over units have the lowest priority.
    order = sorted(equations, key=lambda of: (of.share == 1 and len(of.slots) == 1, -of.share))
    share = _system(order, Change.SHARE)
    found: dict[int, int] = {}
    for slot in slots:
        if share.value(slot) is None:
            share.add({slot: 1}, 0)
        found[slot] = int(share.value(slot) == 1)
    return found


def _writers(
    places: Sequence[Place],
    equations: Sequence[Equation],
    events: Sequence[Event],
    readers: set[int],
) -> tuple[set[int], Family]:
    """Finds the other uses that carry scale and sign, and the required family if some cannot."""
    others = [place for place in places if place.slot not in readers]
    matrices = {place.slot for place in others if place.matrix}
    found: list[set[int]] = []
    for change in (Change.SCALE, Change.SIGN):
        solver = _system(equations, change)
        fits = [solver.add({slot: 1}, -1) for slot in readers]
        chosen = solver.choose([p.slot for p in others], (1, 0)) if all(fits) else None
        found.append({slot for slot, value in (chosen or {}).items() if value})
    # A larger number of writing matrices has priority over a larger family: queries, keys and
    # values write heads.
    writers = max(found, key=lambda slots: len(slots & matrices))
    if not writers & matrices:
        writers = {place.slot for place in others} - _gains(others, events)
    # An axis has one role. A head is used three times, by queries, keys and values.
    written = {place.root for place in others if place.slot in writers}
    writers |= {place.slot for place in others if place.root in written}
    family = Family.LINEAR
    for change, lost in ((Change.SCALE, Family.UNIT), (Change.SIGN, Family.NONNEGATIVE)):
        solver = _system(equations, change)
        exponents = {p.slot: int(p.slot in writers) for p in others} | dict.fromkeys(readers, -1)
        fits = [solver.add({slot: 1}, value) for slot, value in exponents.items()]
        if not all(fits):
            family |= lost
    return writers, family


def _system(equations: Sequence[Equation], change: Change) -> Solver:
    """Returns the equations for one kind of change; only equations for shares have constants."""
    solver = Solver(2 if change is Change.SIGN else 0)
    for of in equations:
        if of.change & change:
            solver.add(_terms(of), of.share if change is Change.SHARE else 0)
    return solver


def _gains(places: Sequence[Place], events: Sequence[Event]) -> set[int]:
    """Finds the uses of vectors as factors of unit-wise products."""
    factors = {
        slot
        for event in events
        if len(event.slots) > 1
        for slot, parametric in zip(event.slots, event.parametric, strict=True)
        if parametric
    }
    return {place.slot for place in places if not place.matrix and place.slot in factors}


def _exponents(
    equations: Sequence[Equation], roles: Mapping[int, Role], change: Change
) -> dict[int, int]:
    """Returns the exponents of scale or sign at every slot that the roles determine."""
    solver = _system(equations, change)
    for slot, role in roles.items():
        solver.add({slot: 1}, {"gain": 0, "write": 1, "read": -1}[role])
    found = {}
    for slot in {slot for of in equations for slot in of.slots}:
        value = solver.value(slot)
        if value is not None:
            found[slot] = int(value)
    return found


def words_of(family: Family) -> str:
    """Expresses a family in words of `NONLINEARITIES`.

    Returns one or two words with the largest set of maps within the family.
    """
    best: tuple[int, int, str] | None = None
    positions = ("outer", "stack", "residual")
    usable = [(word, of) for word, of in NONLINEARITIES.items() if word not in positions]
    for k, (word, of) in enumerate(usable):
        for other, more in [("", Family.LINEAR), *usable[k + 1 :]]:
            both = of | more
            if family in both:
                score = both.value.bit_count(), bool(other), f"{word} {other}".strip()
                best = min(best, score) if best else score
    assert best is not None
    return best[2]
