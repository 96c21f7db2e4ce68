"""Stacked layers in a forward pass: parameters that `jax.lax.scan` takes layer by layer.

Growth adds layers whose outputs are zero. Such a layer does nothing only if its result is then the
carried value itself, as in `h + f(h)`. `tanh(h + f(h))` and `norm(h + f(h))` still change it. A
walk through the body of the scan shows which case it is. Every value is known to be zero, or known
to be a carried value, or unknown:

    y = w * x, w @ x     zero if w or x is zero
    y = a + b            b if a is zero, and a if b is zero
    y = tanh(a), |a|     zero if a is zero

Operations that may be infinite at zero, and operations without a rule, end the walk. The layer is
then treated as one that changes its input, which is always safe.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from sail_jax.jax_internals import CALLS, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Scan, operation
from sail_jax.tracing.values import opened

ZERO = -1
"""A value that is zero. Numbers from 0 on stand for carried values, None for unknown values."""

_LINEAR = {
    *("neg", "transpose", "reshape", "broadcast_in_dim", "squeeze", "slice", "rev", "copy"),
    *("reduce_sum", "reduce_max", "reduce_min", "cumsum", "concatenate", "convert_element_type"),
    *("pad", "select_n", "max", "min", "add", "add_any", "sub", "reduce_precision", "real", "imag"),
}
_THROUGH_ZERO = {
    *("abs", "sqrt", "cbrt", "sign", "sin", "tan", "tanh", "asin", "atan", "sinh", "asinh"),
    *("expm1", "log1p", "square", "erf", "floor", "ceil", "round"),
}
_PRODUCTS = {"mul", "dot_general", "conv_general_dilated"}
_UNCHANGED = {"copy", "name", "sharding_constraint", "optimization_barrier"}
# Their results are finite at zero, whatever they are.
_FINITE = {
    *("exp", "exp2", "cos", "cosh", "logistic", "erfc", "clamp", "stop_gradient", "is_finite"),
    *("eq", "ne", "lt", "le", "gt", "ge", "argmax", "argmin", "sort", "top_k", "gather"),
    *("dynamic_slice", "dynamic_update_slice", "split", "iota"),
}


class Stack(NamedTuple):
    """Layers under one scan.

    Attributes:
      parameters: The numbers of the parameters with a layer for each step, in the order of the
        scan.
      scan: The scan.
    """

    parameters: tuple[int, ...]
    scan: Scan

    def residual(self, outputs: Collection[int]) -> bool:
        """Checks whether a layer whose outputs are zero returns the carried values.

        Args:
          outputs: The numbers of the parameters that are zero in this layer.

        Returns:
          Whether the equations of the layer show it.
        """
        carried = list(range(self.scan.carries))
        layer = [ZERO if number in outputs else None for number in self.parameters]
        try:
            outs = _run(self.scan.body, [*[None] * self.scan.constants, *carried, *layer])
            return outs == carried
        except _InfiniteError:
            return False


class _InfiniteError(Exception):
    """An operation on zeros whose result may be infinite."""


def stacks(traced: ClosedJaxpr, count: int) -> list[Stack]:
    """Finds the scans that only go along parameters, which nothing else uses.

    A scan along inputs or numbered steps has a length that parameters do not determine. So has a
    scan with a result for each step.

    Args:
      traced: The forward pass.
      count: The number of parameters, which are its first arguments.

    Returns:
      The stacks, in the order of the forward pass.
    """
    numbers: list[int | None] = [k if k < count else None for k in range(len(traced.jaxpr.invars))]
    found: list[Stack] = []
    uses: Counter[int | None] = Counter()
    _search(traced, numbers, found, uses)
    return [stack for stack in found if all(uses[number] == 1 for number in stack.parameters)]


def _search(
    jaxpr: Jaxpr | ClosedJaxpr,
    numbers: Sequence[int | None],
    found: list[Stack],
    uses: Counter[int | None],
) -> None:
    """Collects scans along parameters, and counts the uses of each parameter."""
    jaxpr, known, read = opened(jaxpr, numbers, lambda _: None)
    for eqn in jaxpr.eqns:
        known |= dict.fromkeys(eqn.outvars)
        ins = [read(v) for v in eqn.invars]
        of = operation(eqn)
        if of.name in CALLS:
            _search(of.called, ins, found, uses)
            continue
        uses.update(ins)
        if of.name == "scan":
            layers = of.scan.parted(ins)[2]
            if layers and None not in layers and len(eqn.outvars) == of.scan.carries:
                found.append(Stack(tuple(layers), of.scan))
    uses.update(read(v) for v in jaxpr.outvars if not isinstance(v, Literal))


def _run(jaxpr: Jaxpr | ClosedJaxpr, values: Sequence[int | None]) -> list[int | None]:
    jaxpr, known, read = opened(jaxpr, values, _constant)
    for eqn in jaxpr.eqns:
        outs = _outcome(eqn, [read(v) for v in eqn.invars])
        known |= zip(eqn.outvars, outs, strict=True)
    return [read(v) for v in jaxpr.outvars]


def _constant(value: Any) -> int | None:
    return None if np.any(value) else ZERO


def _outcome(eqn: JaxprEqn, ins: list[int | None]) -> list[int | None]:
    """The known facts about the results of an operation."""
    of, unknown = operation(eqn), list[int | None]([None] * len(eqn.outvars))
    name = of.name
    if name in CALLS:
        return _run(of.called, ins)
    if name in _UNCHANGED:
        return ins
    if name in ("add", "add_any", "sub") and ins[1] == ZERO:
        return ins[:1]
    if name in ("add", "add_any") and ins[0] == ZERO:
        return ins[1:]
    if ZERO not in ins:
        return unknown
    # The other operands of these are indices, a predicate, or the size of a step.
    entries = ins[1:] if name == "select_n" else ins[:1] if name in ("gather", "split") else ins
    zero = all(x == ZERO for x in entries)
    if name in _PRODUCTS or name in _THROUGH_ZERO or (name in _LINEAR and zero):
        return [ZERO]
    if name == "div" and ins[0] == ZERO and ins[1] is None:
        return [ZERO]
    if name == "integer_pow" and of.exponent > 0:
        return [ZERO]
    if name in _LINEAR or name in _FINITE:
        return unknown
    raise _InfiniteError
