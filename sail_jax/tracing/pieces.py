"""Rewrites forward passes so that experts or layers on one axis are computed separately.

A label applies to every position along the other axes. All experts of a stack would therefore share
one order of hidden units. To avoid this, a jaxpr is rewritten before labels are made. A stack of
parameters is kept in pieces, and an operation that treats its axis as a batch axis is applied to
each piece. The network computes the same as before, and each piece has separate labels. A rule here
does not depend on labels. It is correct if the new jaxpr has the same result.

Between operations, a value may have one of two special forms:

- `Pieces`: parts that are concatenated along an axis.
- `Choice`: an array of integers picks one of several parts for each entry, for example in a look-up
  of experts.

An operation follows a `Plan`. Without a plan its operands are first joined, which is always
correct.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, ArrayLike

from sail_jax.jax_internals import CALLS, ClosedJaxpr, Jaxpr, Operation, operation, recorded_at
from sail_jax.tracing.elementwise import ENTRY_BY_ENTRY
from sail_jax.tracing.interpreter import source
from sail_jax.tracing.shapes import runs
from sail_jax.tracing.values import dtype_of, is_floating, opened
from sail_jax.tracing.values import shape as shape_of

Shape: TypeAlias = tuple[int, ...]


class Pieces(NamedTuple):
    """A value as pieces of equal size.

    Attributes:
      parts: The pieces. They may themselves be in pieces along another axis.
      axis: The axis of concatenation.
    """

    parts: "tuple[Value, ...]"
    axis: int


class Choice(NamedTuple):
    """A value with entries from several values.

    Attributes:
      parts: The values. Each has the full shape.
      index: Integers that select the part.
      axes: The axes of the value that correspond to the axes of `index`.
    """

    parts: "tuple[Value, ...]"
    index: Array
    axes: tuple[int, ...]


Value: TypeAlias = ArrayLike | Pieces | Choice
Values: TypeAlias = list[Value]


class Plan(NamedTuple):
    """The evaluation of an operation piece by piece.

    Attributes:
      cuts: For each operand, the axis of its pieces; None if each piece needs the whole operand.
      outs: For each result, the axis of concatenation; None if pieces are added.
      of: The operation on one piece.
    """

    cuts: tuple[int | None, ...]
    outs: tuple[int | None, ...]
    of: Operation


class Cut(NamedTuple):
    """An operation on an operand in pieces, as input for a plan.

    Attributes:
      of: The operation.
      shapes: The shapes of its operands.
      at: The index of the operand in pieces.
      axis: The axis of its pieces.
      n: The number of pieces.
    """

    of: Operation
    shapes: Sequence[Shape]
    at: int
    axis: int
    n: int

    def to(self, *outs: int, of: Operation | None = None) -> Plan:
        """Makes a plan that cuts all operands along the axis, with these axes for the results.

        `of` is the operation on one piece, if it differs.
        """
        return Plan((self.axis,) * len(self.shapes), outs, of or self.of)

    def each(self, sizes: Sequence[int], axis: int) -> Shape:
        """Returns the sizes of one piece."""
        return (*sizes[:axis], sizes[axis] // self.n, *sizes[axis + 1 :])


Planner = Callable[[Cut], Plan | None]


def in_pieces(
    traced: ClosedJaxpr, count: int, apart: Mapping[int, int] | None = None
) -> ClosedJaxpr:
    """Rewrites a jaxpr to compute stacks of parameters piece by piece.

    A stack is a parameter that is given in slices, or an array that a network stacks from
    parameters of one shape.

    `apart` contains the numbers of the parameters in slices, with their axes. Returns a closed
    jaxpr of the same function, unchanged without stacks. Slices replace such a parameter. The
    result differs only for a look-up of an expert with a number out of range.
    """
    apart = apart or {}
    if not apart and not _stacks(traced.jaxpr):
        return traced

    def evaluated(args: list[Any]) -> Values:
        run = _Run(jax.tree.leaves(args[:count]))
        values = [
            Pieces(tuple(run.single(x, apart[k]) for x in given), apart[k]) if k in apart else given
            for k, given in enumerate(args)
        ]
        return [run.whole(x) for x in run.run(traced, values)]

    avals: list[Any] = []
    for k, v in enumerate(traced.jaxpr.invars):
        size, axis = shape_of(v), apart.get(k)
        rest = size if axis is None else size[:axis] + size[axis + 1 :]
        one = jax.ShapeDtypeStruct(rest, dtype_of(v))
        avals.append(one if axis is None else [one] * size[axis])
    return jax.make_jaxpr(evaluated)(avals)


def _stacks(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    """Checks whether real arrays of size 1 are concatenated anywhere."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "stack" or (
            name == "concatenate"
            and len(eqn.invars) > 1
            and all(shape_of(v)[operation(eqn).axis] == 1 for v in eqn.invars)
        ):
            if is_floating(eqn.outvars[0]):
                return True
        elif any(map(_stacks, operation(eqn).inner_jaxprs)):
            return True
    return False


def _shape(x: Value) -> Shape:
    if isinstance(x, Choice):
        return _shape(x.parts[0])
    if isinstance(x, Pieces):
        one = _shape(x.parts[0])
        return (*one[: x.axis], one[x.axis] * len(x.parts), *one[x.axis + 1 :])
    return np.shape(x)


def _plain(x: Value) -> TypeGuard[ArrayLike]:
    return not isinstance(x, Pieces | Choice)


class _Run:
    """One run of a jaxpr.

    Attributes:
      own: Arrays that depend only on parameters, by identity.
      same: Results of integer operations, by their operands. Two look-ups with one number then use
        the same array.
    """

    def __init__(self, params: Sequence[Any]) -> None:
        self.own: dict[int, Any] = {id(x): x for x in params}
        self.same: dict[Any, Any] = {}

    def inside(self) -> "_Run":
        """Makes a run of an inner jaxpr with separate values."""
        other = _Run(())
        other.own, other.same = dict(self.own), dict(self.same)
        return other

    def run(self, jaxpr: Jaxpr | ClosedJaxpr, values: Sequence[Value]) -> Values:
        """Runs a jaxpr; values and results may be in pieces."""
        jaxpr, known, read = opened(jaxpr, values, lambda value: value)
        for eqn in jaxpr.eqns:
            # Cached traces lack a source line and get the line of their caller.
            with recorded_at(eqn.source_info.traceback if source(eqn) else None):
                outs = self.act(operation(eqn), [read(v) for v in eqn.invars])
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def act(self, of: Operation, ins: Values) -> Values:
        """Runs one operation."""
        if of.name in CALLS:
            return self.run(of.called, ins)
        special = _SPECIAL.get(of.name)
        outs = special(self, of, ins) if special else None
        if outs is not None:
            return outs
        for at, x in enumerate(ins):
            if isinstance(x, Pieces):
                outs = self._by_pieces(of, ins, at, x)
            elif isinstance(x, Choice):
                outs = self._by_choice(of, ins, at, x)
            else:
                continue
            joined = [*ins[:at], self._joined(x), *ins[at + 1 :]] if outs is None else []
            return self.act(of, joined) if outs is None else outs
        return self._bind(of, ins)

    def whole(self, x: Value) -> ArrayLike:
        """Joins the parts of a value."""
        while isinstance(x, Pieces | Choice):
            x = self._joined(x)
        return x

    def _joined(self, x: Pieces | Choice) -> Value:
        if isinstance(x, Pieces):
            parts = [self.whole(part) for part in x.parts]
            return self._bind(Operation.concatenating(x.axis), parts)[0]
        parts = [self.whole(part) for part in x.parts]
        which = x.index
        if np.ndim(which):
            which = lax.broadcast_in_dim(which, np.shape(parts[0]), x.axes)
        if len(parts) == 2:
            which = lax.eq(which, which.dtype.type(1))
        return lax.select_n(which, *parts)

    def _bind(self, of: Operation, ins: Sequence[Value]) -> Values:
        key: Any = None
        if ins and not any(map(_real, ins)):
            known = (
                (str(jax.numpy.result_type(x)), int(x)) if _is_number(x) else id(x) for x in ins
            )
            key = (str(of), tuple(known))
            if key in self.same:
                return self.same[key][0]
        outs = of.bind(*ins)
        if key is not None:
            # The operands are kept alive, because otherwise other objects could get their `id`.
            self.same[key] = outs, ins
        own = [id(x) in self.own for x in ins]
        if any(own) and all(mine or not _traced(x) for mine, x in zip(own, ins, strict=True)):
            self.own |= {id(x): x for x in outs}
        return outs

    def _mine(self, x: Value) -> bool:
        """Checks whether a value depends only on parameters."""
        if isinstance(x, Pieces | Choice):
            return all(map(self._mine, x.parts))
        return id(x) in self.own

    def single(self, x: Value, axis: int) -> Value:
        """Adds an axis of one unit to a value."""
        size = _shape(x)
        axes = tuple(k + (k >= axis) for k in range(len(size)))
        return self.act(Operation.broadcasting((*size[:axis], 1, *size[axis:]), axes), [x])[0]

    def sliced(self, x: Value, axis: int) -> Values:
        """Returns the units along an axis, one by one, without the axis."""
        squeezing = Operation.squeezing(axis)
        cuts = (self.cut(x, axis, k, k + 1) for k in range(_shape(x)[axis]))
        return [self.act(squeezing, [one])[0] for one in cuts]

    def cut(self, x: Value, axis: int, start: int, stop: int) -> Value:
        """Returns some of the units of a value."""
        size = _shape(x)
        if (start, stop) == (0, size[axis]):
            return x
        if isinstance(x, Pieces) and x.axis == axis:
            each = size[axis] // len(x.parts)
            if start % each or stop % each:
                x = self._joined(x)
            elif stop - start == each:
                return x.parts[start // each]
            else:
                return Pieces(x.parts[start // each : stop // each], axis)
        elif isinstance(x, Choice) and axis in x.axes:
            x = self._joined(x)
        if isinstance(x, Pieces | Choice):
            return x._replace(parts=tuple(self.cut(part, axis, start, stop) for part in x.parts))
        starts, limits = [0] * len(size), list(size)
        starts[axis], limits[axis] = start, stop
        return self._bind(Operation.slicing(tuple(starts), tuple(limits)), [x])[0]

    def _by_pieces(self, of: Operation, ins: Values, at: int, x: Pieces) -> Values | None:
        shapes = list(map(_shape, ins))
        n = len(x.parts)
        plan = _planned(Cut(of, shapes, at, x.axis, n))
        if plan is None:
            return None
        columns = []
        for y, axis in zip(ins, plan.cuts, strict=True):
            if axis is None:
                columns.append([y] * n)
            else:
                each = _shape(y)[axis] // n
                columns.append([self.cut(y, axis, k * each, (k + 1) * each) for k in range(n)])
        rows = [self.act(plan.of, list(row)) for row in zip(*columns, strict=True)]
        return [
            self._added(parts) if out is None else Pieces(tuple(parts), out)
            for out, parts in zip(plan.outs, zip(*rows, strict=True), strict=True)
        ]

    def _added(self, parts: Sequence[Any]) -> Any:
        total = parts[0]
        for part in parts[1:]:
            (total,) = self.act(Operation.adding(), [total, part])
        return total

    def _by_choice(self, of: Operation, ins: Values, at: int, x: Choice) -> Values | None:
        shapes = list(map(_shape, ins))
        if of.name in ("add", "sub", "add_any") and any(
            _plain(y) and size == shapes[at] != () for y, size in zip(ins, shapes, strict=True)
        ):
            # It joins a stream, where all parts have the same units.
            return None
        plans = []
        for axis in x.axes:
            # An operation acts entry by entry along an axis if it can be cut into single units.
            plan = _planned(Cut(of, shapes, at, axis, shapes[at][axis]))
            if plan is None:
                return None
            plans.append(plan)
        rows = [list(ins) for _ in x.parts]
        for k, y in enumerate(ins):
            if not isinstance(y, Choice):
                continue
            mate = (
                y.index is x.index
                and len(y.parts) == len(x.parts)
                and y.axes == tuple(plan.cuts[k] for plan in plans)
            )
            column = y.parts if mate else [self._joined(y)] * len(rows)
            for row, one in zip(rows, column, strict=True):
                row[k] = one
        if all(out is not None for plan in plans for out in plan.outs):
            outs = [self.act(of, row) for row in rows]
            for plan, axis in zip(plans, x.axes, strict=True):
                for out, one in zip(plan.outs, outs[0], strict=True):
                    if _shape(one)[out] != shapes[at][axis]:
                        return None
            return [
                Choice(tuple(parts), x.index, tuple(plan.outs[r] for plan in plans))
                for r, parts in enumerate(zip(*outs, strict=True))
            ]
        # A sum over entries of different parts: the sum of each part's entries, with zeros at the
        # others.
        for e, row in enumerate(rows):
            here = lax.eq(x.index, x.index.dtype.type(e))
            mask = lax.broadcast_in_dim(here, shapes[at], x.axes)
            own = self.whole(row[at])
            row[at] = lax.select_n(mask, lax.full_like(own, 0), own)
        outs = [self.act(of, row)[0] for row in rows]
        return [self._added(outs)]


def _traced(x: Any) -> bool:
    return isinstance(x, Tracer)


def _is_number(x: object) -> TypeGuard[np.integer]:
    return isinstance(x, int | np.generic | np.ndarray) and np.ndim(x) == 0


def _real(x: Any) -> bool:
    return jax.numpy.issubdtype(jax.numpy.result_type(x), jax.numpy.inexact)


# Plans.


def _planned(cut: Cut) -> Plan | None:
    name = cut.of.name
    if name in ENTRY_BY_ENTRY:
        # An operand is a scalar, or has all axes, possibly of length 1.
        units, axis = cut.shapes[cut.at][cut.axis], cut.axis
        cuts = tuple(axis if size and size[axis] == units else None for size in cut.shapes)
        alike = all(size == () or size[axis] in (1, units) for size in cut.shapes)
        return Plan(cuts, (axis,), cut.of) if alike else None
    planner = _PLANNERS.get(name)
    return planner(cut) if planner else None


def _broadcast(cut: Cut) -> Plan | None:
    shape, axes = cut.of.broadcast
    to = axes[cut.axis]
    if shape[to] != cut.shapes[0][cut.axis]:
        return None
    return cut.to(to, of=cut.of.resized(cut.each(shape, to)))


def _transposed(cut: Cut) -> Plan | None:
    return cut.to(cut.of.permutation.index(cut.axis))


def _without(cut: Cut) -> Plan | None:
    """Makes a plan for an operation that removes axes."""
    # If pieces are summed, combining them unifies their labels as much as joining them first.
    gone = [k % len(cut.shapes[0]) for k in cut.of.removed_axes]
    return None if cut.axis in gone else cut.to(cut.axis - sum(k < cut.axis for k in gone))


def _reshaped(cut: Cut) -> Plan | None:
    old, new, axis = cut.shapes[0], cut.of.sizes, cut.axis
    if cut.of.reorders:
        return None
    for before, after in runs(old, new):
        if axis in before:
            # The pieces must be the slowest axis of their run, before and after.
            first = next((k for k in after if new[k] > 1), None)
            if first is None or new[first] % cut.n or any(old[k] > 1 for k in before if k < axis):
                return None
            return cut.to(first, of=cut.of.resized(cut.each(new, first)))
    return None


def _along(outcomes: int | None = 1) -> Planner:
    """Makes plans for operations along one axis, the same for all operands and results."""

    def planner(cut: Cut) -> Plan | None:
        own = cut.of.axis % len(cut.shapes[cut.at])
        count = len(cut.shapes) if outcomes is None else outcomes
        return None if cut.axis == own else cut.to(*[cut.axis] * count)

    return planner


def _reversed(cut: Cut) -> Plan | None:
    return None if cut.axis in cut.of.reversed_axes else cut.to(cut.axis)


def _sliced(cut: Cut) -> Plan | None:
    axis, (starts, limits, strides) = cut.axis, cut.of.slice
    if (starts[axis], limits[axis], strides[axis]) != (0, cut.shapes[0][axis], 1):
        return None
    return cut.to(axis, of=cut.of.moved(starts, cut.each(limits, axis)))


def _dynamically_sliced(cut: Cut) -> Plan | None:
    sizes, axis = cut.of.sizes, cut.axis
    if cut.at or sizes[axis] != cut.shapes[0][axis]:
        return None
    cuts = (axis, *(None for _ in cut.shapes[1:]))
    return Plan(cuts, (axis,), cut.of.resized(cut.each(sizes, axis)))


def _padded(cut: Cut) -> Plan | None:
    alone = cut.at == 0 and tuple(cut.of.padding[cut.axis]) == (0, 0, 0)
    return Plan((cut.axis, None), (cut.axis,), cut.of) if alone else None


def _split(cut: Cut) -> Plan | None:
    return None if cut.axis == cut.of.axis else cut.to(*[cut.axis] * len(cut.of.sizes))


def _stacked(cut: Cut) -> Plan | None:
    return cut.to(cut.axis + (cut.axis >= cut.of.axis))


def _unstacked(cut: Cut) -> Plan | None:
    own = cut.of.axis
    return None if cut.axis == own else cut.to(*[cut.axis - (cut.axis > own)] * cut.shapes[0][own])


def _contracted(cut: Cut) -> Plan | None:
    (over, batch), at, axis = cut.of.contraction, cut.at, cut.axis
    for pairs, added in ((over, True), (batch, False)):
        if axis in pairs[at]:
            place = list(pairs[at]).index(axis)
            outs = (None if added else place,)
            return Plan((pairs[0][place], pairs[1][place]), outs, cut.of)
    free = [
        [k for k in range(len(size)) if k not in (*over[i], *batch[i])]
        for i, size in enumerate(cut.shapes)
    ]
    out = len(batch[0]) + free[at].index(axis) + (len(free[0]) if at else 0)
    return Plan((None, axis) if at else (axis, None), (out,), cut.of)


_PLANNERS: dict[str, Planner] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transposed,
    "squeeze": _without,
    "reshape": _reshaped,
    **dict.fromkeys(
        (
            "reduce_sum",
            "reduce_max",
            "reduce_min",
            "reduce_prod",
            "reduce_and",
            "reduce_or",
            "argmax",
            "argmin",
        ),
        _without,
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along()),
    "sort": _along(None),
    "top_k": _along(2),
    "concatenate": _along(),
    "rev": _reversed,
    "slice": _sliced,
    "dynamic_slice": _dynamically_sliced,
    "pad": _padded,
    "split": _split,
    "stack": _stacked,
    "unstack": _unstacked,
    "dot_general": _contracted,
}


# Operations that make or split pieces.


def _side_by_side(run: _Run, of: Operation, ins: Values) -> Values | None:
    """Keeps a stack of parameters in pieces."""
    new, stacks, axis = ins, of.name == "stack", of.axis
    dtype = jax.numpy.result_type(*[x for x in ins if _plain(x)] or [np.float32])
    if (
        len(ins) < 2
        or not jax.numpy.issubdtype(dtype, jax.numpy.inexact)
        or not all(stacks or _shape(x)[axis] == 1 for x in ins)
        or not all(map(run._mine, ins))
    ):
        return None
    if stacks:
        new = [run.single(x, axis) for x in ins]
    return [Pieces(tuple(new), axis)]


def _cut_out(run: _Run, of: Operation, ins: Values) -> Values | None:
    (x,), (starts, limits, strides) = ins, of.slice
    if not isinstance(x, Pieces) or {*strides} != {1}:
        return None
    start, stop = starts[x.axis], limits[x.axis]
    size, each = _shape(x), _shape(x.parts[0])[x.axis]
    if (start, stop) == (0, size[x.axis]) or start % each or stop % each:
        return None
    starts, limits = list(starts), list(limits)
    starts[x.axis], limits[x.axis] = 0, stop - start
    rest = of.moved(tuple(starts), tuple(limits))
    return run.act(rest, [run.cut(x, x.axis, start, stop)])


def _parted(run: _Run, of: Operation, ins: Values) -> Values | None:
    (x,), axis = ins, of.axis
    if not isinstance(x, Pieces) or x.axis != axis:
        return None
    if of.name == "unstack":
        return run.sliced(x, axis)
    ends = np.cumsum([0, *of.sizes]).tolist()
    return [run.cut(x, axis, a, b) for a, b in itertools.pairwise(ends)]


def _singles(x: Value, axis: int) -> bool:
    """Checks whether a value is in pieces of one unit along an axis, possibly nested."""
    if not isinstance(x, Pieces):
        return False
    if x.axis == axis:
        return len(x.parts) == _shape(x)[axis]
    return all(_singles(part, axis) for part in x.parts)


def _clamped(run: _Run, index: Any, n: int) -> Any:
    """Clamps an index to the numbers of parts."""
    zero, last = (jax.numpy.result_type(index).type(k) for k in (0, n - 1))
    (index,) = run.act(Operation.clamping(), [zero, index, last])
    return run.act(Operation.converting(np.dtype(np.int32)), [index])[0]


def _looked_up(run: _Run, of: Operation, ins: Values) -> Values | None:
    """Looks up single units along one axis by number."""
    x, numbers, size = ins[0], of.index_axes, _shape(ins[0])
    if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        return None
    (axis,) = numbers.start_index_map
    rest = [k for k in range(len(size)) if k != axis]
    if (
        not _singles(x, axis)
        or tuple(numbers.collapsed_slice_dims) != (axis,)
        or any(of.sizes[k] != size[k] for k in rest)
    ):
        return None
    index = run.whole(ins[1])
    (index,) = run.act(Operation.squeezing(np.ndim(index) - 1), [index])
    index = _clamped(run, index, size[axis])
    window = tuple(numbers.offset_dims)
    batch = tuple(k for k in range(len(window) + np.ndim(index)) if k not in window)
    known = dict(zip(window, (size[k] for k in rest), strict=True))
    known |= zip(batch, np.shape(index), strict=True)
    wide = Operation.broadcasting(tuple(known[k] for k in sorted(known)), window)
    parts = (run.act(wide, [y])[0] for y in run.sliced(x, axis))
    return [Choice(tuple(parts), index, batch)]


def _picked(run: _Run, of: Operation, ins: Values) -> Values | None:
    """Looks up a single unit along one axis by a computed number."""
    (x, *starts), sizes, size = ins, of.sizes, _shape(ins[0])
    short = [k for k in range(len(size)) if sizes[k] != size[k]]
    if len(short) != 1 or sizes[short[0]] != 1 or not _singles(x, short[0]):
        return None
    (axis,) = short
    index = _clamped(run, run.whole(starts[axis]), size[axis])
    parts = (run.cut(x, axis, k, k + 1) for k in range(size[axis]))
    return [Choice(tuple(parts), index, ())]


def _scanned(run: _Run, of: Operation, ins: Values) -> Values | None:
    """Unrolls a scan over stacked layers."""
    scan = of.scan
    (fixed, carry, xs), carries, body = scan.parted(ins), scan.carries, scan.body
    if all(map(_plain, ins)) and not _stacks(body.jaxpr):
        return None
    if any(_singles(x, 0) for x in xs):
        order = slice(None, None, -1 if scan.reverse else 1)
        ys = []
        for row in list(zip(*(run.sliced(x, 0) for x in xs), strict=True))[order]:
            outs = run.run(body, [*fixed, *carry, *row])
            carry = outs[:carries]
            ys.append(outs[carries:])
        columns = zip(*ys[order], strict=True)
        return [*carry, *(Pieces(tuple(run.single(y, 0) for y in ys), 0) for ys in columns)]

    def step(carry: Any, row: Any) -> Any:
        inner = run.inside()
        outs = [inner.whole(y) for y in inner.run(body, [*fixed, *carry, *row])]
        return outs[:carries], outs[carries:]

    carry, xs = list(map(run.whole, carry)), list(map(run.whole, xs))
    carry, ys = lax.scan(step, carry, xs, length=scan.length, reverse=scan.reverse)
    return [*carry, *ys]


_SPECIAL: dict[str, Any] = {
    "concatenate": _side_by_side,
    "stack": _side_by_side,
    "slice": _cut_out,
    "split": _parted,
    "unstack": _parted,
    "gather": _looked_up,
    "dynamic_slice": _picked,
    "scan": _scanned,
}
