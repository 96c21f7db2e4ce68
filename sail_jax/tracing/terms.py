"""Terms describe the permutable structure along one axis of a value.

An axis of eight units may be free, or a product of two heads with four units each, or two
concatenated blocks. A forward pass reveals this step by step, and a term therefore has variables.
Unifying two terms binds the variables of one to parts of the other, as in type inference:

- `Variable`: units that may be permuted freely.
- `Atom`: a variable at one position in the network, with an exponent (see
  `sail_jax.tracing.algebra`).
- `Fixed`: units in a fixed order.
- `Product`: the row-major product of its parts. `Sum`: the concatenation of its parts.

None instead of a term means that the value is constant along the axis.

Terms are refined as late as possible. Consider 24 units of queries, keys and values with two heads.
One network cuts them into 3 blocks of 8, which makes a sum of three parts. Another network reshapes
them to (2, 3, 4) and cuts along the 3. An immediate product of 2, 3 and 4 units would force one
order of units on queries, keys and values, and fix the 3. Instead, a reshape makes a `Fold` of the
whole term, and each axis becomes a `Face`. A cut along a face splits the whole term only as far as
necessary, here into two heads, each a sum of three blocks of 4. Only another use of an axis makes
the product. Bindings are final.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(eq=False, slots=True)
class Variable:
    """Units that may be permuted, until something binds them.

    Attributes:
      size: The number of units.
      bound: The term that it is bound to; None while free.
      why: The reason why it was fixed; "" if not fixed.
      became: The first term that it was bound to, for finding reasons.
      cut: The primitive that cut it out of other units, with its source line; "" if none did.
    """

    size: int
    bound: "Term | None" = None
    why: str = ""
    became: "Term | None" = None
    cut: str = ""


@dataclass(eq=False, slots=True)
class Atom:
    """A free variable at one position in the network.

    Attributes:
      space: The variable.
      slot: The number of the unknown exponent at this position.
    """

    space: Variable
    slot: int

    @property
    def size(self) -> int:
        """The number of units."""
        return self.space.size


@dataclass(frozen=True, slots=True)
class Fixed:
    """Units in an order that matters.

    Attributes:
      size: The number of units.
      origin: What ordered them, for reasons: a primitive with its source line, or an input; "" if
        unknown.
    """

    size: int
    origin: str = field(default="", compare=False)


@dataclass(frozen=True, eq=False, slots=True)
class Product:
    """The row-major product of its parts.

    Attributes:
      parts: The factors.
      size: The product of their sizes.
    """

    parts: "tuple[Term, ...]"
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", math.prod(part.size for part in self.parts))


@dataclass(frozen=True, eq=False, slots=True)
class Sum:
    """The concatenation of its parts.

    Attributes:
      parts: The blocks.
      size: The sum of their sizes.
    """

    parts: "tuple[Term, ...]"
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(part.size for part in self.parts))


class Fold:
    """A term that was reshaped to several axes, and may still be cut along any of them.

    A matrix of queries, keys and values is often reshaped to (heads, 3, width) and then cut along
    the 3. Its term is then a product of heads and a sum of three parts. An immediate product of
    three factors would give queries, keys and values one order of units.

    Attributes:
      whole: The term before.
      sizes: The size of each axis, all larger than one.
    """

    def __init__(self, whole: "Term", sizes: tuple[int, ...]) -> None:
        self.whole = whole
        self.sizes = sizes
        self._factors: tuple[Term, ...] = ()

    def at(self, axis: int, start: int, stop: int, why: str) -> "list[Label]":
        """Cuts the term along one axis.

        Args:
          axis: The number of the axis.
          start: The first position along the axis.
          stop: The position after the last.
          why: The reason for fixing units that cannot be cut at these positions.

        Returns:
          The label of each axis after the cut.
        """
        outer, inner = self.sizes[:axis], self.sizes[axis + 1 :]
        before, after = math.prod(outer), math.prod(inner)
        halves = split(self.whole, before)
        if halves is None:
            fix(self.whole, why)
            halves = Fixed(before), Fixed(self.sizes[axis] * after)
        part = cut(halves[1], start * after, stop * after, why)
        return [*faces(halves[0], outer), *faces(part, (stop - start, *inner))]

    def factors(self, why: str) -> "tuple[Term, ...]":
        """Splits the term into a product.

        `why` is the reason for fixing units if this is impossible.
        """
        if not self._factors:
            self._factors = self._split(why)
        return self._factors

    def _split(self, why: str) -> "tuple[Term, ...]":
        found, rest = [], self.whole
        for size in self.sizes[:-1]:
            halves = split(rest, size)
            if halves is None:
                fix(self.whole, f"a reshape across its parts: {why}")
                return tuple(map(Fixed, self.sizes))
            found.append(halves[0])
            rest = halves[1]
        return (*found, rest)


@dataclass(frozen=True, eq=False)
class Face:
    """One axis of a `Fold`.

    Attributes:
      fold: The fold.
      axis: The number of the axis.
    """

    fold: Fold
    axis: int

    @property
    def size(self) -> int:
        """The number of units."""
        return self.fold.sizes[self.axis]


def faces(whole: "Term", sizes: "tuple[int, ...]") -> "list[Label]":
    """Reshapes a term, which may then be cut along any of its axes.

    Returns the label of each axis; None for an axis of one unit.
    """
    if 0 in sizes:
        return [Fixed(size) for size in sizes]
    kept = tuple(size for size in sizes if size > 1)
    if len(kept) < 2:
        return [whole if size > 1 else None for size in sizes]
    fold = Fold(whole, kept)
    own = iter(Face(fold, k) for k in range(len(kept)))
    return [next(own) if size > 1 else None for size in sizes]


Term: TypeAlias = Variable | Atom | Fixed | Product | Sum | Face
Label: TypeAlias = Term | None


def resolve(term: Term) -> Term:
    """Follows bindings; returns the unique normal form of a term.

    Products within products and sums within sums are flattened. Fixed neighbours are joined. Parts
    of one unit (in a sum, of zero units) are dropped. Bound variables are replaced.
    """
    if isinstance(term, Variable):
        seen = []
        end: Term = term
        while isinstance(end, Variable) and end.bound is not None:
            seen.append(end)
            end = end.bound
        if not isinstance(end, Variable):
            end = resolve(end)
        for variable in seen:
            variable.bound = end
        return Fixed(1, end.cut) if isinstance(end, Variable) and end.size == 1 else end
    if isinstance(term, Atom | Fixed | Face):
        return term
    parts: list[Term] = []
    for part in map(resolve, term.parts):
        if isinstance(part, type(term)):
            new = part.parts
        elif part.size == (1 if isinstance(term, Product) else 0):
            continue
        else:
            new = (part,)
        for one in new:
            before = parts[-1] if parts else None
            if isinstance(one, Fixed) and isinstance(before, Fixed):
                joined = before.size * one.size if isinstance(term, Product) else 0
                parts[-1] = Fixed(joined or before.size + one.size, before.origin or one.origin)
            else:
                parts.append(one)
    if not parts:
        return Fixed(term.size)
    return parts[0] if len(parts) == 1 else type(term)(tuple(parts))


def leaves(label: Label) -> Iterator[Variable | Atom]:
    """Lists the free parts of a label.

    `label` is a term, or None. Yields its free variables and its atoms, from left to right.
    """
    if label is None:
        return
    term = resolve(label)
    if isinstance(term, Variable | Atom):
        yield term
    elif isinstance(term, Product | Sum):
        for part in term.parts:
            yield from leaves(part)


def atoms(label: Label) -> list[Atom]:
    """Lists the atoms of a label."""
    return [leaf for leaf in leaves(label) if isinstance(leaf, Atom)]


def solid(label: Label, size: int) -> Term:
    """Converts a label to a term. Units of a constant axis may be permuted freely."""
    return Variable(size) if label is None else label


def product(*parts: Term) -> Term:
    """Multiplies terms."""
    return resolve(Product(parts))


def total(*parts: Term) -> Term:
    """Concatenates terms."""
    return resolve(Sum(parts))


def fix(label: Label, why: str) -> None:
    """Fixes the order of units.

    `label` is the label to fix; None does not change. `why` is the reason, as text.
    """
    for leaf in list(leaves(label)):
        space = leaf.space if isinstance(leaf, Atom) else leaf
        if not space.why:
            space.why = why
        if isinstance(leaf, Variable):
            # The last part of a reason is the primitive with its source line.
            leaf.bound = Fixed(leaf.size, why.rpartition(": ")[2])


def reason(variable: Variable) -> str:
    """Finds the reason why units are fixed.

    `variable` is the original, unbound variable. Returns the reason why a part of it was fixed, or
    "".
    """
    return _earliest(variable, lambda part: part.why)


def cutter(variable: Variable) -> str:
    """Finds the primitive that first cut units, with its source line, or ""."""
    return _earliest(variable, lambda part: part.cut)


def _earliest(variable: Variable, text: Callable[[Variable], str]) -> str:
    """The text of a variable, or of the first one with a text among those that it became."""
    waiting: list[Term] = [variable]
    while waiting:
        term = waiting.pop(0)
        if isinstance(term, Product | Sum):
            waiting.extend(term.parts)
        elif isinstance(term, Variable):
            if found := text(term):
                return found
            if term.became is not None:
                waiting.append(term.became)
    return ""


def split(term: Term, first: int) -> tuple[Term, Term] | None:
    """Splits a term into a product of two factors, and refines its variables if necessary.

    Returns both factors, or None if this is impossible.
    """
    term = resolve(term)
    if first < 1 or term.size % first:
        return None
    if first == term.size:
        return term, Fixed(1)
    if first == 1:
        return Fixed(1), term
    rest = term.size // first
    match term:
        case Variable():
            outer, inner = Variable(first), Variable(rest)
            _refine(term, Product((outer, inner)))
            return outer, inner
        case Fixed():
            return Fixed(first, term.origin), Fixed(rest, term.origin)
        case Product():
            return _split_product(term, first)
        case Sum():
            return _split_sum(term, rest)
    return None


def _split_product(term: Product, first: int) -> tuple[Term, Term] | None:
    taken = 1
    for k, part in enumerate(term.parts):
        need = first // taken
        if part.size >= need:
            halves = split(part, need) if first % taken == 0 else None
            if halves is None:
                return None
            return product(*term.parts[:k], halves[0]), product(halves[1], *term.parts[k + 1 :])
        taken *= part.size
    return None


def _split_sum(term: Sum, rest: int) -> tuple[Term, Term] | None:
    """Rewrites blocks (a, r), (b, r), ... as ((a + b + ...), r), if r is the same for all."""
    if any(part.size % rest for part in term.parts):
        return None
    outer, inner = [], None
    for part in term.parts:
        halves = split(part, part.size // rest)
        if halves is None:
            return None
        outer.append(halves[0])
        if inner is not None and not _same_space(inner, halves[1]):
            return None
        inner = halves[1]
    assert inner is not None
    return total(*outer), inner


def _same_space(a: Term, b: Term) -> bool:
    """Binds variables; returns whether they become one free space or are both fixed."""
    if atoms(a) or atoms(b):
        # Two positions with separate exponents cannot become one here.
        return resolve(a) is resolve(b)
    align(a, b, "equal blocks")
    return True


def _refine(variable: Variable, term: Term) -> None:
    variable.bound = variable.became = term


def cut(term: Term, start: int, stop: int, why: str) -> Term:
    """Takes some units of a term, and refines its variables if necessary.

    `why` is the reason for fixing units that cannot be cut at these positions.
    """
    term = resolve(term)
    if (start, stop) == (0, term.size):
        return term
    if stop <= start:
        return Fixed(0)
    match term:
        case Fixed():
            return Fixed(stop - start, term.origin)
        case Variable():
            sizes = start, stop - start, term.size - stop
            before, middle, after = (Variable(n, cut=why) for n in sizes)
            _refine(term, Sum((before, middle, after)))
            return middle
        case Sum():
            taken, at = [], 0
            for part in term.parts:
                low, high = max(start, at), min(stop, at + part.size)
                if low < high:
                    taken.append(cut(part, low - at, high - at, why))
                at += part.size
            return total(*taken)
        case Product():
            first, rest = term.parts[0], product(*term.parts[1:])
            if start % rest.size == 0 and stop % rest.size == 0:
                outer = cut(first, start // rest.size, stop // rest.size, why)
                return product(outer, rest)
            if start // rest.size == (stop - 1) // rest.size:
                one = start // rest.size
                cut(first, one, one + 1, why)
                return cut(rest, start % rest.size, start % rest.size + stop - start, why)
    fix(term, f"{why}: units {start} to {stop} of {term.size} cut across its parts")
    return Fixed(stop - start)


Invariant = Callable[[Variable], Atom]


def _no_atoms(space: Variable) -> Atom:
    raise AssertionError(f"an atom of {space} where there should be none")


def align(a: Term, b: Term, why: str, invariant: Invariant = _no_atoms) -> None:
    """Unifies two terms, which then have the same structure.

    Args:
      a: A term.
      b: Another term of the same size.
      why: The reason for fixing units if the structures contradict each other.
      invariant: A function that makes an atom for a position where only the order of units can
        change. A variable that is unified with atoms is bound to such an atom.
    """
    a, b = resolve(a), resolve(b)
    if a is b:
        return
    match a, b:
        case (Fixed(), _) | (_, Fixed()):
            _exclude(a, b, why)
        case (Variable(), _):
            _bind(a, b, invariant)
        case (_, Variable()):
            _bind(b, a, invariant)
        case (Atom(), Atom()):
            if a.space is not b.space:
                # The units are not free. The caller starts again with both fixed.
                _exclude(a, b, why)
        case (Product(), Product()):
            _align_products(a, b, why, invariant)
        case (Sum(), Sum()):
            _align_sums(a, b, why, invariant)
        case (Sum(), _):
            _align_blocks(a, b, why, invariant)
        case (_, Sum()):
            _align_blocks(b, a, why, invariant)
        case _:
            # An atom is already refined, which contradicts a product.
            _exclude(a, b, why)


def _exclude(a: Term, b: Term, why: str) -> None:
    for one, other in ((a, b), (b, a)):
        ordered = isinstance(other, Fixed) and other.origin
        fix(one, f"the order of {ordered}: {why}" if ordered else why)


def _bind(variable: Variable, term: Term, invariant: Invariant) -> None:
    if any(leaf is variable for leaf in leaves(term)):
        fix(term, "a space within itself")
        return
    _refine(variable, _invariant(term, invariant) if atoms(term) else term)


def _invariant(term: Term, invariant: Invariant) -> Term:
    """Returns the same term at a position where only the order of its units can change."""
    if isinstance(term, Atom):
        return invariant(term.space)
    if isinstance(term, Product | Sum):
        return type(term)(tuple(_invariant(part, invariant) for part in term.parts))
    return term


def _align_products(a: Product, b: Product, why: str, invariant: Invariant) -> None:
    left, right = list(a.parts), list(b.parts)
    while left and right:
        p, q = resolve(left[0]), resolve(right[0])
        if p.size == q.size:
            align(p, q, why, invariant)
            del left[0], right[0]
            continue
        big, small, parts = (p, q, left) if p.size > q.size else (q, p, right)
        halves = split(big, small.size)
        if halves is None:
            fix(Product((*left, *right)), f"{why}: the products do not fit")
            return
        parts[0:1] = halves


def _align_sums(a: Sum, b: Sum, why: str, invariant: Invariant) -> None:
    left, right = list(a.parts), list(b.parts)
    while left and right:
        p, q = resolve(left[0]), resolve(right[0])
        if p.size == q.size:
            align(p, q, why, invariant)
            del left[0], right[0]
            continue
        big, small, parts = (p, q, left) if p.size > q.size else (q, p, right)
        parts[0:1] = [cut(big, 0, small.size, why), cut(big, small.size, big.size, why)]


def _align_blocks(blocks: Sum, other: Term, why: str, invariant: Invariant) -> None:
    # The positions are listed before any refinement.
    at, places = 0, []
    for part in blocks.parts:
        places.append((part, at, at + part.size))
        at += part.size
    for part, start, stop in places:
        piece = cut(other, start, stop, why)
        align(part, piece, why, invariant)
