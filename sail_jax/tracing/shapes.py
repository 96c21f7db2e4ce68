"""Rules of primitives that move entries: they add and drop axes, reorder, cut and join."""

import math
from collections.abc import Sequence
from dataclasses import replace

from jax.extend import core

from sail_jax.tracing.terms import (
    Fixed,
    Index,
    Label,
    Part,
    Product,
    Term,
    Variable,
    cut,
    product,
    resolve,
    split,
    total,
)
from sail_jax.tracing.values import Tracer, Value, joined, parametric, rule, settled, shape, whole

__all__ = ["runs"]

# More parts than queries, keys, values and a gate have are heads, which nothing cuts one by one.
_MANY = 4


def _solid(label: Label, size: int) -> Term:
    """A label as a term: what is constant along an axis may be permuted in any way."""
    return Variable(size) if label is None else label


@rule("broadcast_in_dim", view=True)
def _broadcast(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    x, old, new = ins[0], shape(eqn.invars[0]), shape(eqn.outvars[0])
    axes: list[Label] = [None] * len(new)
    for k, axis in enumerate(eqn.params["broadcast_dimensions"]):
        axes[axis] = x.axes[k] if old[k] == new[axis] else None
    return [x.shaped(axes)]


@rule("squeeze", view=True)
def _squeezed(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    x, gone = ins[0], eqn.params["dimensions"]
    return [x.shaped([t for k, t in enumerate(x.axes) if k not in gone])]


@rule("expand_dims", view=True)
def _expanded(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    old, new = iter(ins[0].axes), eqn.params["dimensions"]
    rank = len(shape(eqn.outvars[0]))
    return [ins[0].shaped([None if k in new else next(old) for k in range(rank)])]


@rule("transpose", view=True)
def _transposed(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    return [ins[0].shaped([ins[0].axes[k] for k in eqn.params["permutation"]])]


@rule("reshape", view=True)
def _reshaped(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    x = ins[0]
    if eqn.params.get("dimensions") is not None:
        x = settled(tracer, x)
        whole(tracer, x)
        for label in x.axes:
            tracer.algebra.fixed(label)
        return [Value(tuple(map(Fixed, shape(eqn.outvars[0]))))]
    old, new = shape(eqn.invars[0]), shape(eqn.outvars[0])
    both = runs(old, new)
    for source, target in both:
        kept = len(source) == 1 and sum(new[k] > 1 for k in target) == 1
        parted = [isinstance(x.axes[k], Index | Part) for k in source]
        if any(parted) and not kept and (len(source) > 1 or isinstance(x.axes[source[0]], Index)):
            x = joined(tracer, x)
    axes: list[Label] = []
    for source, target in both:
        axes += _run(tracer, [(x.axes[k], old[k]) for k in source], [new[k] for k in target])
    return [x.shaped(axes)]


def runs(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Splits a reshape into runs of axes of equal products.

    Args:
      old: The shape before.
      new: The shape after.

    Returns:
      For each run its axes before and after.
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


def _halves(label: Label, size: int, of: int, alone: bool) -> tuple[Label, Label] | None:
    """A label split into a first factor and the rest; `alone` if this is all that is split."""
    if label is None:
        return None, None
    if isinstance(label, Part):
        return label.halves(size)
    if alone and size <= _MANY and size < of and not isinstance(resolve(label), Product):
        # Perhaps it is cut along the first axis.
        index = Index(label, size)
        return index, Part(index, of // size)
    return split(label, size)


def _run(tracer: Tracer, source: Sequence[tuple[Label, int]], target: Sequence[int]) -> list[Label]:
    source = [(label, size) for label, size in source if size != 1]
    if all(label is None for label, _ in source):
        return [None] * len(target)
    if len(source) == 1 and sum(size != 1 for size in target) == 1:
        return [source[0][0] if size != 1 else None for size in target]
    axes: list[Label] = []
    # A repeated axis stays constant where the factors fit.
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
                # Only the first factor of an axis alone may be an index.
                alone = not taken and len(source) == 1
                halves = _halves(label, need, extent, alone)
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
            axes.append(product(*(_solid(one, n) for one, n in taken)))
    return axes


def _place(tracer: Tracer, x: Value, axis: int, place: int) -> Value:
    """A value at one place along an index."""
    index, why = x.axes[axis], tracer.algebra.where
    assert isinstance(index, Index)

    def there(label: Label) -> Label:
        if isinstance(label, Part) and label.index is index:
            return label.of(index.at(place, why), why)
        return None if label is index else label

    return x.shaped([there(label) for label in x.axes])


@rule("slice", view=True)
def _sliced(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    x, old, new = ins[0], shape(eqn.invars[0]), shape(eqn.outvars[0])
    strides = eqn.params["strides"] or [1] * len(new)
    axes: list[Label] = []
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    cuts = [k for k in range(len(new)) if new[k] != old[k]]
    for k in cuts:
        if isinstance(x.axes[k], Index) and new[k] == 1:
            x = _place(tracer, x, k, starts[k])
    if any(isinstance(x.axes[k], Index | Part) for k in cuts):
        x = joined(tracer, x)
    for k, (label, stride) in enumerate(zip(x.axes, strides, strict=True)):
        if label is None or new[k] == old[k]:
            axes.append(label)
        elif stride == 1:
            axes.append(cut(label, starts[k], limits[k], tracer.algebra.where))
        else:
            axes.append(_every(tracer, label, starts[k], stride, old[k], new[k]))
    return [x.shaped(axes)]


def _every(tracer: Tracer, label: Label, start: int, stride: int, old: int, new: int) -> Label:
    """Every stride-th unit: one of the inner units, if the axis is a product with so many."""
    assert label is not None
    if old % stride == 0 and new == old // stride and start < stride:
        halves = split(label, new)
        if halves is not None:
            cut(halves[1], start, start + 1, tracer.algebra.where)
            return halves[0]
    tracer.algebra.fixed(label, "every other unit")
    return Fixed(new)


@rule("split", view=True)
def _split(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    x, axis, at, outs = ins[0], eqn.params["axis"], 0, []
    if isinstance(x.axes[axis], Index) and set(eqn.params["sizes"]) == {1}:
        return [_place(tracer, x, axis, k) for k in range(len(eqn.outvars))]
    if isinstance(x.axes[axis], Index | Part):
        x = joined(tracer, x)
    for size in eqn.params["sizes"]:
        label = x.axes[axis]
        part = label and cut(label, at, at + size, tracer.algebra.where)
        outs.append(x.shaped([*x.axes[:axis], part, *x.axes[axis + 1 :]]))
        at += size
    return outs


@rule("rev")
def _reversed(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    x, axes = ins[0], list(ins[0].axes)
    for k in eqn.params["dimensions"]:
        tracer.algebra.fixed(axes[k])
    return [replace(x, view=False, axes=tuple(axes))]


@rule("concatenate")
def _joined(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    axis, columns = eqn.params["dimension"], tuple(x.numbers for x in ins)
    if axis + 1 < len(ins[0].axes) or any(shape(v)[axis] != 1 for v in eqn.invars):
        columns = ()
        whole(tracer, *ins)
    parts = [_solid(x.axes[axis], shape(v)[axis]) for x, v in zip(ins, eqn.invars, strict=True)]
    axes = _common(tracer, ins, skipped=axis)
    axes[axis] = None if all(x.zero for x in ins) else total(*parts)
    zero = all(x.zero for x in ins)
    return [Value(tuple(axes), columns=columns, zero=zero, parametric=parametric(ins))]


@rule("stack")
def _stacked(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    whole(tracer, *ins)
    zero = all(x.zero for x in ins)
    axes = _common(tracer, ins)
    axes.insert(eqn.params["axis"], None if zero else Fixed(len(ins)))
    return [Value(tuple(axes), zero=zero, parametric=parametric(ins))]


@rule("unstack", view=True)
def _unstacked(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    x, axis = ins[0], eqn.params["axis"]
    if isinstance(x.axes[axis], Index):
        places = (_place(tracer, x, axis, k) for k in range(len(eqn.outvars)))
        return [y.shaped([*y.axes[:axis], *y.axes[axis + 1 :]]) for y in places]
    x = joined(tracer, x)
    tracer.algebra.fixed(x.axes[axis])
    return [x.shaped([*x.axes[:axis], *x.axes[axis + 1 :]]) for _ in eqn.outvars]


def _common(tracer: Tracer, ins: Sequence[Value], skipped: int = -1) -> list[Label]:
    """Labels of arrays that are laid side by side: the axes that they share are alike."""
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


@rule("pad")
def _padded(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    x, filling = ins
    whole(tracer, x)
    axes: list[Label] = []
    padded = any(c != (0, 0, 0) for c in eqn.params["padding_config"])
    for label, n, (low, high, inner), new in zip(
        x.axes,
        shape(eqn.invars[0]),
        eqn.params["padding_config"],
        shape(eqn.outvars[0]),
        strict=True,
    ):
        if (low, high, inner) == (0, 0, 0):
            if label is not None and padded and not filling.zero:
                tracer.algebra.curved(label, x.parametric)
            axes.append(label)
        elif inner or low < 0 or high < 0:
            tracer.algebra.fixed(label)
            axes.append(Fixed(new))
        else:
            axes.append(total(Variable(low), _solid(label, n), Variable(high)))
    return [Value(tuple(axes), parametric=x.parametric)]


@rule("tile")
def _tiled(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    axes = [
        label if times == 1 or label is None else product(Variable(times), label)
        for label, times in zip(ins[0].axes, eqn.params["reps"], strict=True)
    ]
    return [replace(ins[0], view=False, axes=tuple(axes))]


@rule("iota")
def _iota(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    size, axis = shape(eqn.outvars[0]), eqn.params["dimension"]
    units = Variable(size[axis])
    axes = [units if k == axis else None for k in range(len(size))]
    # A permutation moves the entries, and renames the units that they number.
    return [Value(tuple(axes), numbers=units, positive=True, parametric=True)]
