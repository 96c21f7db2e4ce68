"""Rules of primitives that move entries: reshape, transpose, slice, concatenate and others."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from sail_jax.jax_internals import JaxprEqn, operation
from sail_jax.tracing.terms import (
    Face,
    Fixed,
    Label,
    Variable,
    cut,
    faces,
    product,
    solid,
    split,
    total,
)
from sail_jax.tracing.values import Tracer, Value, joined, parametric, rule, settled, shape, whole


@rule("broadcast_in_dim", view=True)
def _broadcast(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    x, old, new = ins[0], shape(eqn.invars[0]), shape(eqn.outvars[0])
    axes: list[Label] = [None] * len(new)
    for k, axis in enumerate(operation(eqn).broadcast.axes):
        axes[axis] = x.axes[k] if old[k] == new[axis] else None
    return [x.shaped(axes)]


@rule("squeeze", view=True)
def _squeezed(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    x, gone = ins[0], operation(eqn).removed_axes
    return [x.shaped([t for k, t in enumerate(x.axes) if k not in gone])]


@rule("transpose", view=True)
def _transposed(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    return [ins[0].shaped([ins[0].axes[k] for k in operation(eqn).permutation])]


@rule("reshape", view=True)
def _reshaped(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    x = ins[0]
    if operation(eqn).reorders:
        x = settled(tracer, x)
        whole(tracer, x)
        for label in x.axes:
            tracer.algebra.fixed(label, "a reshape in another order")
        return [Value(tuple(map(Fixed, shape(eqn.outvars[0]))))]
    old, new = shape(eqn.invars[0]), shape(eqn.outvars[0])
    both = runs(old, new)
    if not all(_adjacent([x.axes[k] for k in source if old[k] != 1]) for source, _ in both):
        x = joined(tracer, x)
    axes: list[Label] = []
    rest = list(x.axes)
    for source, target in both:
        taken = [(rest[k], old[k]) for k in source if old[k] != 1]
        sizes = tuple(new[k] for k in target)
        first = taken[0][0] if taken else None
        if isinstance(first, Face):
            made, again = _refolded(first, len(taken), sizes)
            axes, rest = [*map(again, axes), *made], list(map(again, rest))
        elif len(taken) == 1 and first is not None:
            axes += faces(first, sizes)
        else:
            axes += _run(tracer, taken, sizes)
    return [x.shaped(axes)]


def _adjacent(labels: Sequence[Label]) -> bool:
    """Checks whether labels are neighbours in one fold, or are all outside folds."""
    folded = [label for label in labels if isinstance(label, Face)]
    return not folded or (
        len(folded) == len(labels)
        and all(
            label.fold is folded[0].fold and label.axis == folded[0].axis + k
            for k, label in enumerate(folded)
        )
    )


def _refolded(
    first: Face, count: int, sizes: tuple[int, ...]
) -> tuple[list[Label], Callable[[Label], Label]]:
    """Reshapes neighbours in a fold, and updates the fold's other faces."""
    fold, start, stop = first.fold, first.axis, first.axis + count
    every = faces(fold.whole, (*fold.sizes[:start], *sizes, *fold.sizes[stop:]))

    def again(label: Label) -> Label:
        if not isinstance(label, Face) or label.fold is not fold:
            return label
        return every[label.axis if label.axis < start else label.axis + len(sizes) - count]

    return every[start : start + len(sizes)], again


def runs(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Splits a reshape into runs of axes with equal products.

    Args:
      old: The shape before.
      new: The shape after.

    Returns:
      The axes before and after, for each run.
    """
    found = []
    i = j = 0
    while i < len(old) or j < len(new):
        source, target = [i][: len(old) - i], [j][: len(new) - j]
        i, j = i + len(source), j + len(target)
        have, want = math.prod(old[k] for k in source), math.prod(new[k] for k in target)
        while have != want:
            if have < want:
                source.append(i)
                have, i = have * old[i], i + 1
            else:
                target.append(j)
                want, j = want * new[j], j + 1
        found.append((source, target))
    return found


def _run(tracer: Tracer, source: Sequence[tuple[Label, int]], target: Sequence[int]) -> list[Label]:
    """Returns the labels of several axes outside folds, in another shape."""
    if all(label is None for label, _ in source):
        return [None] * len(target)
    axes: list[Label] = []
    # A repeated axis stays constant if the factors match.
    rest = list(source)
    for place, size in enumerate(target):
        if size == 1:
            axes.append(None)
            continue
        taken: list[tuple[Label, int]] = []
        count = 1
        while count < size and rest and size % (count * rest[0][1]) == 0:
            taken.append(rest.pop(0))
            count *= taken[-1][1]
        if count < size:
            label, extent = rest.pop(0)
            need = size // count
            halves = None
            if size % count == 0 and extent % need == 0:
                halves = (None, None) if label is None else split(label, need)
            if halves is None:
                everything = [*taken, (label, extent), *rest]
                for one, _ in everything:
                    tracer.algebra.fixed(one, "a reshape across its parts")
                return [*axes, *(Fixed(n) for n in target[place:])]
            taken.append((halves[0], need))
            rest.insert(0, (halves[1], extent // need))
        if all(one is None for one, _ in taken):
            axes.append(None)
        elif len(taken) == 1:
            axes.append(taken[0][0])
        else:
            axes.append(product(*(solid(one, n) for one, n in taken)))
    return axes


def _cut(tracer: Tracer, x: Value, axis: int, start: int, stop: int) -> Value:
    """Cuts a value between two positions along an axis."""
    label, axes = x.axes[axis], list(x.axes)
    if label is None:
        return x
    if isinstance(label, Face):
        parts = label.fold.at(label.axis, start, stop, tracer.algebra.where)
        for k, other in enumerate(axes):
            if isinstance(other, Face) and other.fold is label.fold:
                axes[k] = parts[other.axis]
    else:
        axes[axis] = cut(label, start, stop, tracer.algebra.where)
    return x.shaped(axes)


@rule("slice", view=True)
def _sliced(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    x, old, new = ins[0], shape(eqn.invars[0]), shape(eqn.outvars[0])
    starts, limits, strides = operation(eqn).slice
    cuts = [k for k in range(len(new)) if new[k] != old[k]]
    if any(strides[k] != 1 and isinstance(x.axes[k], Face) for k in cuts):
        x = joined(tracer, x)
    for k in cuts:
        if strides[k] == 1:
            x = _cut(tracer, x, k, starts[k], limits[k])
        elif x.axes[k] is not None:
            axes = list(x.axes)
            axes[k] = _every(tracer, axes[k], starts[k], strides[k], old[k], new[k])
            x = x.shaped(axes)
    return [x]


def is_cut(eqn: JaxprEqn, ins: Sequence[Value]) -> bool:
    """Checks whether an operation cuts its first operand at constant positions.

    Returns True if the rule "cut" applies.
    """
    if eqn.primitive.name == "dynamic_slice":
        return all(x.number is not None for x in ins[1:])
    if eqn.primitive.name != "gather" or ins[1].number is None:
        return False
    numbers, sizes = operation(eqn).index_axes, operation(eqn).sizes
    if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        return False
    (axis,), old = numbers.start_index_map, shape(eqn.invars[0])
    rest = [k for k in range(len(old)) if k != axis]
    inside = 0 <= ins[1].number <= old[axis] - sizes[axis]
    collapsed = set(numbers.collapsed_slice_dims) <= {axis}
    return inside and collapsed and all(sizes[k] == old[k] for k in rest)


@rule("cut", view=True)
def _taken(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    x, old, sizes = ins[0], shape(eqn.invars[0]), operation(eqn).sizes
    if eqn.primitive.name == "dynamic_slice":
        axes: Sequence[int] = range(len(old))
    else:
        axes = operation(eqn).index_axes.start_index_map
    for k, place in zip(axes, ins[1:], strict=True):
        assert place.number is not None
        if sizes[k] != old[k]:
            start = min(max(int(place.number), 0), old[k] - sizes[k])
            x = _cut(tracer, x, k, start, start + sizes[k])
    if eqn.primitive.name == "dynamic_slice":
        return [x]
    numbers, labels = operation(eqn).index_axes, list(x.axes)
    out: list[Label] = [None] * len(shape(eqn.outvars[0]))
    kept = (k for k in range(len(old)) if k not in numbers.collapsed_slice_dims)
    for at, k in zip(numbers.offset_dims, kept, strict=True):
        out[at] = labels[k]
    return [x.shaped(out)]


def _every(tracer: Tracer, label: Label, start: int, stride: int, old: int, new: int) -> Label:
    """Returns every stride-th unit: one inner unit, if the axis is a product with this number of
    inner units.
    """
    assert label is not None
    if old % stride == 0 and new == old // stride and start < stride:
        halves = split(label, new)
        if halves is not None:
            cut(halves[1], start, start + 1, tracer.algebra.where)
            return halves[0]
    tracer.algebra.fixed(label, "every other unit")
    return Fixed(new)


@rule("split", view=True)
def _split(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    x, axis, at, outs = ins[0], operation(eqn).axis, 0, []
    for size in operation(eqn).sizes:
        outs.append(_cut(tracer, x, axis, at, at + size))
        at += size
    return outs


@rule("rev", numbered=True)
def _reversed(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    x, axes = ins[0], list(ins[0].axes)
    for k in operation(eqn).reversed_axes:
        tracer.algebra.fixed(axes[k], "its units are reversed")
    return [replace(x, view=False, axes=tuple(axes))]


@rule("concatenate", numbered=True)
def _joined(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    axis, columns = operation(eqn).axis, tuple(ins)
    if axis + 1 < len(ins[0].axes) or any(shape(v)[axis] != 1 for v in eqn.invars):
        columns = ()
        whole(tracer, *ins)
    parts = [solid(x.axes[axis], shape(v)[axis]) for x, v in zip(ins, eqn.invars, strict=True)]
    axes = _common(tracer, ins, skipped=axis)
    axes[axis] = None if all(x.zero for x in ins) else total(*parts)
    zero = all(x.zero for x in ins)
    return [Value(tuple(axes), columns=columns, zero=zero, parametric=parametric(ins))]


@rule("stack")
def _stacked(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    zero = all(x.zero for x in ins)
    axes = _common(tracer, ins)
    axes.insert(operation(eqn).axis, None if zero else Fixed(len(ins)))
    return [Value(tuple(axes), zero=zero, parametric=parametric(ins))]


@rule("unstack", view=True)
def _unstacked(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    x, axis = ins[0], operation(eqn).axis
    if isinstance(x.axes[axis], Face):
        cuts = [_cut(tracer, x, axis, k, k + 1) for k in range(len(eqn.outvars))]
    else:
        tracer.algebra.fixed(x.axes[axis], "its units are used one by one")
        cuts = [x] * len(eqn.outvars)
    return [y.shaped([*y.axes[:axis], *y.axes[axis + 1 :]]) for y in cuts]


def _common(tracer: Tracer, ins: Sequence[Value], skipped: int = -1) -> list[Label]:
    """Unifies the labels of the shared axes of concatenated arrays."""
    axes: list[Label] = []
    for k in range(len(ins[0].axes)):
        if k == skipped:
            axes.append(None)
            continue
        label = tracer.algebra.same(*(x.axes[k] for x in ins))
        if label is not None and any(x.axes[k] is None and not x.zero for x in ins):
            tracer.algebra.curved(label, parametric(ins))
        axes.append(label)
    return axes


@rule("pad", numbered=True)
def _padded(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    x, filling = ins
    whole(tracer, x)
    axes: list[Label] = []
    padding = operation(eqn).padding
    padded = any(c != (0, 0, 0) for c in padding)
    for label, n, (low, high, inner), new in zip(
        x.axes,
        shape(eqn.invars[0]),
        padding,
        shape(eqn.outvars[0]),
        strict=True,
    ):
        if (low, high, inner) == (0, 0, 0):
            if label is not None and padded and not filling.zero:
                tracer.algebra.curved(label, x.parametric)
            axes.append(label)
        elif inner or low < 0 or high < 0:
            tracer.algebra.fixed(label, "padded between or before its units")
            axes.append(Fixed(new))
        else:
            axes.append(total(Variable(low), solid(label, n), Variable(high)))
    return [Value(tuple(axes), parametric=x.parametric)]


@rule("tile", numbered=True)
def _tiled(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    axes = [
        label if times == 1 or label is None else product(Variable(times), label)
        for label, times in zip(ins[0].axes, operation(eqn).repeats, strict=True)
    ]
    return [replace(ins[0], view=False, axes=tuple(axes))]


@rule("iota")
def _iota(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    size, axis = shape(eqn.outvars[0]), operation(eqn).axis
    units = Variable(size[axis])
    axes = [units if k == axis else None for k in range(len(size))]
    # A permutation moves the entries and renumbers the units that they number.
    return [Value(tuple(axes), numbers=units, each=True, positive=True, parametric=True)]
