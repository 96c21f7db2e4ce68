"""Numbers that a forward pass multiplies by, so that those which follow from a size can be found.

Attention divides by the root of a head's size, some networks multiply embeddings by the root of
their width. In a jaxpr both are numbers. Traced at another size the same operations have other
numbers where they follow from that size.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

__all__ = ["Number", "changed", "numbers_of"]

# These hand on what they are given, in another form.
_SAME = {
    *("convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze", "copy"),
    *("expand_dims", "gather", "stop_gradient", "sharding_constraint"),
}
_ROOTS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0}


class Number(NamedTuple):
    """A number that a value is multiplied by, added to, or compared with.

    Attributes:
      primitive: The primitive; a division is a multiplication.
      value: The number.
      leaf: The path of the parameter that is multiplied, if it is looked up or used as it is.
    """

    primitive: str
    value: float
    leaf: str = ""


class _Seen(NamedTuple):
    """What is known of a value: its number, the parameter it is, how many entries it sums."""

    number: float | None = None
    leaf: str = ""
    count: int = 0


def numbers_of(traced: Any, paths: Sequence[str]) -> tuple[Number, ...]:
    """Lists the numbers of a forward pass, in the order of its operations.

    A division of a sum by the number of its terms is a mean, and not listed.

    Args:
      traced: The closed jaxpr, its parameters before its inputs.
      paths: The paths of the parameters.

    Returns:
      The numbers.
    """
    found: list[Number] = []
    rest = len(traced.jaxpr.invars) - len(paths)
    _walk(traced, [*(_Seen(leaf=path) for path in paths), *[_Seen()] * rest], found)
    return tuple(found)


def changed(first: Sequence[Number], second: Sequence[Number]) -> list[tuple[Number, float]] | None:
    """Compares the numbers of a network at two sizes.

    Args:
      first: Those at one size.
      second: Those at another.

    Returns:
      Each that differs, with what it is multiplied by from the first to the second size; None if
      the two do not have the same operations.
    """
    if [(a.primitive, a.leaf) for a in first] != [(b.primitive, b.leaf) for b in second]:
        return None
    return [
        (a, b.value / a.value if a.value else math.inf)
        for a, b in zip(first, second, strict=True)
        if not math.isclose(a.value, b.value, rel_tol=1e-6, abs_tol=1e-30)
    ]


def _walk(jaxpr: Any, values: Sequence[_Seen], found: list[Number]) -> list[_Seen]:
    consts: Sequence[Any] = ()
    if hasattr(jaxpr, "jaxpr"):
        jaxpr, consts = jaxpr.jaxpr, jaxpr.consts
    known: dict[Any, _Seen] = dict(zip(jaxpr.constvars, map(_constant, consts), strict=True))
    known |= zip(jaxpr.invars, values, strict=True)

    def read(variable: Any) -> _Seen:
        if isinstance(variable, core.Literal):
            return _constant(variable.val)
        return known.get(variable, _Seen())

    for eqn in jaxpr.eqns:
        ins = [read(v) for v in eqn.invars]
        for variable, out in zip(eqn.outvars, _outcome(eqn, ins, found), strict=False):
            known[variable] = out
    return [read(v) for v in jaxpr.outvars]


def _constant(value: Any) -> _Seen:
    array = np.asarray(value)
    real = array.size == 1 and np.issubdtype(array.dtype, np.floating)
    return (
        _Seen(float(array.reshape(())))
        if real or (array.size == 1 and array.dtype.kind in "iu")
        else _Seen()
    )


def _outcome(eqn: Any, ins: list[_Seen], found: list[Number]) -> list[_Seen]:
    name, params = eqn.primitive.name, eqn.params
    inner: Mapping[str, Any] = {
        key: params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params
    }
    if name in ("scan", "while", "cond"):
        for sub in (params[k] for k in ("jaxpr", "cond_jaxpr", "body_jaxpr") if k in params):
            _walk(sub, [_Seen()] * len(_inputs(sub)), found)
        for sub in params.get("branches", ()):
            _walk(sub, [_Seen()] * len(_inputs(sub)), found)
        return [_Seen()] * len(eqn.outvars)
    if inner:
        (sub,) = [*inner.values()][:1]
        values = ins[len(ins) - len(_inputs(sub)) :]
        return _walk(sub, values, found)
    if name in _SAME:
        return [ins[0]]
    numbers = [x.number for x in ins]
    if all(n is not None for n in numbers) and numbers:
        return [_Seen(_computed(name, [n for n in numbers if n is not None]))]
    if name == "reduce_sum":
        sizes = eqn.invars[0].aval.shape
        return [_Seen(count=math.prod(sizes[k] for k in params["axes"]))]
    real = any(
        n is not None and np.issubdtype(v.aval.dtype, np.floating)
        for n, v in zip(numbers, eqn.invars, strict=True)
    )
    if real and len(ins) == 2:
        at = 0 if numbers[0] is not None else 1
        number, x = float(numbers[at] or 0.0), ins[1 - at]
        if name == "div" and at == 1 and number:
            name, number = "mul", 1 / number
        if name == "mul" and x.count and math.isclose(number * x.count, 1, rel_tol=1e-5):
            return [_Seen()]
        found.append(Number(name, number, x.leaf if name == "mul" else ""))
        # A sum that is scaled twice may be a mean in two steps; that is not followed.
    return [_Seen()] * len(eqn.outvars)


def _inputs(jaxpr: Any) -> Sequence[Any]:
    return jaxpr.jaxpr.invars if hasattr(jaxpr, "jaxpr") else jaxpr.invars


def _computed(name: str, numbers: list[float]) -> float | None:
    if name in _ROOTS and numbers[0] > 0:
        return numbers[0] ** _ROOTS[name]
    if len(numbers) == 2:
        a, b = numbers
        if name == "div":
            return a / b if b else None
        return {"mul": a * b, "add": a + b, "sub": a - b}.get(name)
    return None
