"""Layers in a forward pass, under `jax.lax.scan` or in a list, and whether new ones do nothing.

Growth adds layers whose outputs are zero. Such a layer does nothing only if its result is then its
input, as in `h + f(h)`. `tanh(h + f(h))` and `norm(h + f(h))` still change it. A walk through the
equations shows which case it is. Every value gets a number, and values with one number are equal:

    y = w * x, w @ x     zero if w or x is zero
    y = a + b            b if a is zero, and a if b is zero
    y = tanh(a), |a|     zero if a is zero
    y = f(a, b)          the number of every other f(a, b)

A layer of a scan does nothing if its result has the number of the carried value. The equations of
listed layers stand one after the other. The network is therefore traced again, with layers of zero
outputs between and after its own. They do nothing if all outputs keep their numbers. This also
finds code that depends on the number of a layer, or on how many there are.

Operations that may be infinite at zero, and operations without a rule for zeros, end the walk. The
layer is then treated as one that changes its input, which is always safe.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from sail_jax.basis.listed import Layers, layer_at
from sail_jax.jax_internals import CALLS, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Scan, operation
from sail_jax.tracing.interpreter import alive
from sail_jax.tracing.values import dtype_of, is_key, opened, shape
from sail_jax.trees import leaf_paths, with_layers

ZERO, CONSTANT_ZERO = -1, -2
"""The numbers of values that are zero: in a new layer, and in every network."""
_ZEROS = {ZERO, CONSTANT_ZERO}

LINEAR = {
    *("neg", "transpose", "reshape", "broadcast_in_dim", "squeeze", "slice", "rev", "copy"),
    *("reduce_sum", "reduce_max", "reduce_min", "cumsum", "concatenate", "convert_element_type"),
    *("pad", "select_n", "max", "min", "add", "add_any", "sub", "reduce_precision", "real", "imag"),
}
_THROUGH_ZERO = {
    *("abs", "sqrt", "cbrt", "sign", "sin", "tan", "tanh", "asin", "atan", "sinh", "asinh"),
    *("expm1", "log1p", "square", "erf", "floor", "ceil", "round"),
}
PRODUCTS = {"mul", "dot_general", "conv_general_dilated"}
UNCHANGED = {"copy", "name", "sharding_constraint", "optimization_barrier"}
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
        walk = _Walk()
        constants = [walk.number("constant", k) for k in range(self.scan.constants)]
        carried = [walk.number("carried", k) for k in range(self.scan.carries)]
        layer = [ZERO if n in outputs else walk.number("layer", n) for n in self.parameters]
        try:
            return walk.run(self.scan.body, [*constants, *carried, *layer]) == carried
        except _InfiniteError:
            return False


class _InfiniteError(Exception):
    """An operation on zeros whose result may be infinite."""


def stacks(traced: ClosedJaxpr, count: int) -> list[Stack]:
    """Finds the scans that iterate over parameters only, which nothing else uses.

    Excluded are scans along inputs or numbered steps, whose length does not depend on parameters,
    and scans with a result for each step.

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


def change_of_layers(
    apply: Callable[..., Any],
    params: PyTree,
    inputs: Sequence[PyTree],
    traced: ClosedJaxpr,
    layers: Layers,
    outputs: Collection[str],
) -> str:
    """Checks whether new layers of a list do nothing if their outputs are zero.

    Args:
      apply: The network, called as `apply(params, *inputs)`.
      params: The parameters, any pytree of arrays or ShapeDtypeStructs.
      inputs: The inputs.
      traced: The forward pass.
      layers: The list.
      outputs: The paths of the leaves that are zero in a new layer, for every layer of the list.

    Returns:
      Why new layers may change the function; "" if the equations show that they do nothing.
    """
    paths = leaf_paths(params)
    old = 1 + max(layer[1] for path in paths if (layer := layer_at([layers], path)))
    # Growth keeps the first layer in its place. The others move, and new layers follow each of
    # them.
    new = 2 * old + 2
    before = layers.start.removesuffix("{i}")
    deep = with_layers(params, before, [min(k // 2, old - 1) for k in range(new)])
    try:
        deeper = jax.make_jaxpr(apply)(deep, *inputs)
    except Exception as error:  # any exception of the network's own code
        line = next(iter(str(error).splitlines()), type(error).__name__)
        return f"the forward pass fails with {new} layers instead of {old}: {line}"
    _, used = alive(deeper.jaxpr)
    last = f"{before}{new - 1}"
    on_top = [
        v
        for v, path in zip(deeper.jaxpr.invars, leaf_paths(deep), strict=False)
        if path.startswith(last)
    ]
    if not used & {*on_top}:
        return f"the forward pass does not use {last!r} of {new} layers: it must loop over the list"
    walk = _Walk()
    rest = [walk.number("input", k) for k in range(len(jax.tree.leaves(tuple(inputs))))]

    def leaf(path: str) -> int:
        """The number of a leaf of the deeper network."""
        layer = layer_at([layers], path)
        if layer is None:
            return walk.number("leaf", path)
        end = path[len(f"{before}{layer[1]}") :]
        own = f"{before}{layer[1] // 2}{end}"
        if layer[1] % 2 == 0 and layer[1] // 2 < old:
            return walk.number("leaf", own)
        return ZERO if f"{before}0{end}" in outputs else walk.number("new leaf", path)

    try:
        outs = walk.run(deeper, [*map(leaf, leaf_paths(deep)), *rest])
    except _InfiniteError:
        outs = []
    if outs == walk.run(traced, [*(walk.number("leaf", path) for path in paths), *rest]):
        return ""
    return (
        f"the equations with {new} layers do not show that a layer with zero output is the "
        "identity, as in h + f(h)"
    )


class _Walk:
    """Numbers the values of forward passes. Values with one number are equal."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, *key: Hashable) -> int:
        """The number of all values that this key determines."""
        return self._numbers.setdefault(key, len(self._numbers))

    def run(self, jaxpr: Jaxpr | ClosedJaxpr, values: Sequence[int]) -> list[int]:
        """The numbers of the results, from the numbers of the arguments."""
        jaxpr, known, read = opened(jaxpr, values, self._constant)
        for eqn in jaxpr.eqns:
            known |= zip(eqn.outvars, self._outcome(eqn, list(map(read, eqn.invars))), strict=True)
        return [read(v) for v in jaxpr.outvars]

    def _constant(self, value: Any) -> int:
        if is_key(value):
            return self.number("key", id(value))
        array = np.asarray(value)
        if not np.any(array):
            return CONSTANT_ZERO
        content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
        return self.number(array.dtype.name, array.shape, content)

    def _function(self, jaxpr: Jaxpr | ClosedJaxpr) -> Hashable:
        """A jaxpr among the parameters of an operation, by the numbers of its results."""
        inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
        return tuple(
            self.run(jaxpr, [self.number("argument", k) for k in range(len(inner.invars))])
        )

    def _outcome(self, eqn: JaxprEqn, ins: list[int]) -> list[int]:
        of = operation(eqn)
        if of.name in CALLS:
            return self.run(of.called, ins)
        known = _known(eqn, ins)
        if known is not None:
            return known
        shapes = tuple((shape(v), str(dtype_of(v))) for v in eqn.invars)
        key = (of.key(self._function), tuple(ins), shapes)
        return [self.number(*key, k) for k in range(len(eqn.outvars))]


def _known(eqn: JaxprEqn, ins: list[int]) -> list[int] | None:
    """The numbers of results that are zero, or equal to an operand; None for other results."""
    of = operation(eqn)
    name = of.name
    if name in UNCHANGED:
        return ins
    if name in ("add", "add_any", "sub"):
        # A number may be added to all entries of an array, and then has another shape.
        same = [shape(v) == shape(eqn.outvars[0]) for v in eqn.invars]
        if ins[1] in _ZEROS and same[0]:
            return ins[:1]
        if name != "sub" and ins[0] in _ZEROS and same[1]:
            return ins[1:]
    if not _ZEROS & {*ins}:
        return None
    zero = ZERO if ZERO in ins else CONSTANT_ZERO
    # The other operands of these are indices, a predicate, or the size of a step.
    entries = ins[1:] if name == "select_n" else ins[:1] if name in ("gather", "split") else ins
    every = all(x in _ZEROS for x in entries)
    if name in PRODUCTS or name in _THROUGH_ZERO or (name in LINEAR and every):
        return [zero]
    if name == "div" and ins[0] in _ZEROS and ins[1] not in _ZEROS:
        return [zero]
    if name == "integer_pow" and of.exponent > 0:
        return [zero]
    if name in LINEAR or name in _FINITE or zero == CONSTANT_ZERO:
        return None
    raise _InfiniteError
