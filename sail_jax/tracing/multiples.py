"""Finds the factors in a forward pass: numbers, and the gains of norms.

Attention divides by the square root of a head's size. Some networks multiply embeddings by the
square root of their width. In a jaxpr, both are numbers. If the network is traced at another size,
the numbers that depend on the size change. A gain that only matrices read can be folded into these
matrices.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike

from sail_jax.jax_internals import CALLS, ClosedJaxpr, Jaxpr, JaxprEqn, Var, operation
from sail_jax.tracing.values import is_floating, is_key, opened, shape

# These return their operand in another form.
_SAME = {
    *("convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze", "copy"),
    *("gather", "stop_gradient", "sharding_constraint"),
}
_ROOTS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0}


class Number(NamedTuple):
    """A number that a value is multiplied by, added to, or compared with.

    Attributes:
      primitive: The primitive; a division is a multiplication.
      value: The number.
      leaf: The path of the multiplied parameter, if it is looked up or used unchanged.
    """

    primitive: str
    value: float
    leaf: str = ""


class Multiples(NamedTuple):
    """The factors in a forward pass.

    Attributes:
      numbers: The numbers, in the order of operations.
      readers: By the path of a gain, the paths of the matrices that read the scaled values, if only
        matrices read them.
    """

    numbers: tuple[Number, ...] = ()
    readers: Mapping[str, tuple[str, ...]] = {}


class _Seen(NamedTuple):
    """Facts about a value: its number, its parameter, its gain, and its number of summed terms."""

    number: float | None = None
    leaf: str = ""
    gain: str = ""
    count: int = 0


_NOTHING = _Seen()


def multiples(traced: ClosedJaxpr, paths: Sequence[str]) -> Multiples:
    """Finds the factors in a forward pass.

    A sum divided by its number of terms is a mean and is not listed.

    `traced` is the closed jaxpr, with parameters before inputs. Returns the numbers and the readers
    of gains.
    """
    walk = _Walk()
    rest = len(traced.jaxpr.invars) - len(paths)
    outs = walk.run(traced, [*(_Seen(leaf=path) for path in paths), *[_NOTHING] * rest])
    walk.read({out.gain for out in outs}, "")
    readers = {g: tuple(sorted(r)) for g, r in walk.readers.items() if g and "" not in r}
    return Multiples(tuple(walk.numbers), readers)


def changed(first: Sequence[Number], second: Sequence[Number]) -> list[tuple[Number, float]] | None:
    """Compares the numbers of a network at two sizes.

    Args:
      first: The numbers at one size.
      second: The numbers at another size.

    Returns:
      Each number that differs, with its ratio between the second and the first size. None if the
      operations differ.
    """
    if [(a.primitive, a.leaf) for a in first] != [(b.primitive, b.leaf) for b in second]:
        return None
    return [
        (a, b.value / a.value if a.value else math.inf)
        for a, b in zip(first, second, strict=True)
        if not math.isclose(a.value, b.value, rel_tol=1e-6, abs_tol=1e-30)
    ]


class _Walk:
    """A walk through a jaxpr and its inner jaxprs."""

    def __init__(self) -> None:
        self.numbers: list[Number] = []
        self.readers: dict[str, set[str]] = {}

    def read(self, gains: set[str], by: str) -> None:
        """Records the reader of scaled values: a matrix, or anything else ("")."""
        for gain in gains - {""}:
            self.readers.setdefault(gain, set()).add(by)

    def run(self, jaxpr: Jaxpr | ClosedJaxpr, values: Sequence[_Seen]) -> list[_Seen]:
        """Visits the equations of a jaxpr."""
        jaxpr, known, read = opened(jaxpr, values, _constant)
        for eqn in jaxpr.eqns:
            outs = self._outcome(eqn, [read(v) for v in eqn.invars])
            known |= zip(eqn.outvars, outs or [_NOTHING] * len(eqn.outvars), strict=True)
        return [read(v) for v in jaxpr.outvars]

    def _outcome(self, eqn: JaxprEqn, ins: list[_Seen]) -> list[_Seen] | None:
        name, of = eqn.primitive.name, operation(eqn)
        if name in _SAME:
            return [ins[0]]
        if name in CALLS:
            return self.run(of.called, ins)
        numbers = [x.number for x in ins]
        known = [n for n in numbers if n is not None]
        if ins and len(known) == len(ins):
            return [_Seen(_computed(name, known))] * len(eqn.outvars)
        self.read({x.gain for x in ins}, self._matrix(name, ins))
        for inner in of.inner_jaxprs:
            # A scatter stores the constants of its jaxpr elsewhere.
            if isinstance(inner, ClosedJaxpr) or not inner.constvars:
                self.run(inner, [_NOTHING] * len(_arguments(inner)))
        if name == "reduce_sum":
            sizes = shape(eqn.invars[0])
            return [_Seen(count=math.prod(sizes[k] for k in of.removed_axes))]
        if len(ins) != 2:
            return None
        if known:
            at = 0 if numbers[0] is not None else 1
            if is_floating(eqn.invars[at]):
                self._by(name, known[0], ins[1 - at], divides=at == 1)
        elif name == "mul" and bool(ins[0].leaf) != bool(ins[1].leaf):
            return [_Seen(gain=ins[0].leaf or ins[1].leaf)]
        return None

    def _matrix(self, name: str, ins: list[_Seen]) -> str:
        """Finds the parameter that a value is contracted with, if any."""
        return (ins[0].leaf or ins[1].leaf) if name == "dot_general" else ""

    def _by(self, name: str, number: float, x: _Seen, *, divides: bool) -> None:
        if name == "div" and divides and number:
            name, number = "mul", 1 / number
        mean = name == "mul" and x.count and math.isclose(number * x.count, 1, rel_tol=1e-5)
        if not mean:
            self.numbers.append(Number(name, number, x.leaf if name == "mul" else ""))


def _constant(value: ArrayLike) -> _Seen:
    if is_key(value):
        return _NOTHING
    array = np.asarray(value)
    plain = array.size == 1 and (
        array.dtype.kind in "iu" or np.issubdtype(array.dtype, np.floating)
    )
    return _Seen(float(array.reshape(()))) if plain else _NOTHING


def _arguments(jaxpr: Jaxpr | ClosedJaxpr) -> list[Var]:
    return jaxpr.jaxpr.invars if isinstance(jaxpr, ClosedJaxpr) else jaxpr.invars


def _computed(name: str, numbers: list[float]) -> float | None:
    if name in _ROOTS and numbers[0] > 0:
        return numbers[0] ** _ROOTS[name]
    if len(numbers) == 2:
        a, b = numbers
        if name == "div":
            return a / b if b else None
        return {"mul": a * b, "add": a + b, "sub": a - b}.get(name)
    return None
