"""Rules of primitives that read or write entries by integer indices."""

from sail_jax.jax_internals import JaxprEqn, operation
from sail_jax.tracing.terms import Fixed, Label, Variable, resolve
from sail_jax.tracing.values import Tracer, Value, parametric, rule, shape, whole


@rule("gather", numbered=True)
def _gathered(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    (x, index), algebra = ins, tracer.algebra
    (old, indices), new = map(shape, eqn.invars), shape(eqn.outvars[0])
    numbers, sizes = operation(eqn).index_axes, operation(eqn).sizes
    window = [
        k
        for k in range(len(old))
        if k not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    axes: list[Label] = [None] * len(new)
    batch = [k for k in range(len(new)) if k not in numbers.offset_dims]
    for at, k in zip(batch, range(len(indices) - 1), strict=True):
        axes[at] = index.axes[k]
    # The result of a look-up along an axis has the order of this axis, but not its exponents.
    for k, label in enumerate(axes):
        axes[k] = algebra.renewed(label)
        algebra.curved(axes[k], False)
    batched = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    for mine, its in batched:
        at = batch[its]
        flags = (x.parametric, index.parametric)
        axes[at] = algebra.multiplied([(x.axes[mine], 1), (axes[at], 1)], flags)
    algebra.fixed(index.axes[-1], "which axis an index is for")
    for at, k in zip(numbers.offset_dims, window, strict=True):
        if sizes[k] == old[k]:
            # For the whole axis, any start is clamped to 0.
            axes[at] = x.axes[k]
        else:
            algebra.fixed(x.axes[k], "a part of it is looked up")
            axes[at] = Fixed(sizes[k])
    columns = _columns(tracer, index, len(numbers.start_index_map))
    for k, column in zip(numbers.start_index_map, columns, strict=True):
        label, units, one = x.axes[k], column.numbers, sizes[k] == 1 < old[k]
        if one and label is not None and units is not None and units.size == old[k]:
            algebra.counted(algebra.same(label, units))
            continue
        if units is not None:
            algebra.fixed(units, "units are numbered")
        if sizes[k] != old[k]:
            algebra.fixed(label, "looked up by number")
    return [
        Value(
            tuple(axes),
            numbers=x.numbers,
            positive=x.positive,
            parametric=parametric(ins),
        )
    ]


def _columns(tracer: Tracer, index: Value, count: int) -> tuple[Value, ...]:
    """The integers for each of the indexed axes."""
    if index.columns or count == 1:
        return index.columns or (index,)
    # The axis of an index is unknown here.
    whole(tracer, index)
    return (Value(()),) * count


@rule("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", numbered=True)
def _scattered(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    (x, index, updates), algebra = ins, tracer.algebra
    (old, indices, pieces) = map(shape, eqn.invars)
    numbers = operation(eqn).index_axes
    whole(tracer, x, updates)
    algebra.fixed(index.axes[-1], "which axis an index is for")
    window = [
        k
        for k in range(len(old))
        if k not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    ]
    linear = eqn.primitive.name in ("scatter", "scatter-add")
    axes: list[Label] = [
        Variable(n) if label is None else label for label, n in zip(x.axes, old, strict=True)
    ]
    batch = [k for k in range(len(pieces)) if k not in numbers.update_window_dims]
    columns = _columns(tracer, index, len(numbers.scatter_dims_to_operand_dims))
    # Units that are written each to its own place, and the axis of the updates along them.
    each = {
        k: at
        for k, column in zip(numbers.scatter_dims_to_operand_dims, columns, strict=True)
        for at, label in zip(batch, index.axes[:-1], strict=True)
        if k in numbers.inserted_window_dims and column.each and _are(column, label)
    }
    for at, k in zip(batch, range(len(indices) - 1), strict=True):
        algebra.same(updates.axes[at], index.axes[k])
        algebra.curved(updates.axes[at], False)
    for k, at in each.items():
        axes[k] = algebra.same(axes[k], updates.axes[at])
    batched = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    for mine, its in batched:
        axes[mine] = algebra.same(axes[mine], index.axes[its], updates.axes[batch[its]])
    whole_axes = set()
    for at, k in zip(numbers.update_window_dims, window, strict=True):
        if pieces[at] == old[k]:
            whole_axes.add(k)
            if updates.axes[at] is None and not updates.zero:
                algebra.curved(axes[k], False)
            axes[k] = algebra.same(axes[k], updates.axes[at])
        else:
            algebra.fixed(axes[k], "a part of it is written")
            algebra.fixed(updates.axes[at], "a part of it is written")
    for k, column in zip(numbers.scatter_dims_to_operand_dims, columns, strict=True):
        if k in each:
            continue
        if column.numbers is not None:
            algebra.fixed(column.numbers, "units are numbered")
        if k not in whole_axes:
            algebra.fixed(axes[k], "written by number")
    for label in axes:
        if not linear:
            algebra.curved(label, False)
    return [Value(tuple(axes))]


def _are(numbers: Value, label: Label) -> bool:
    """Checks whether integers number the units of an axis."""
    units = numbers.numbers
    return units is not None and label is not None and resolve(units) is resolve(label)


@rule("dynamic_slice", numbered=True)
def _dynamically_sliced(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    x = ins[0]
    whole(tracer, *ins[1:])
    axes: list[Label] = []
    for label, old, new in zip(x.axes, shape(eqn.invars[0]), operation(eqn).sizes, strict=True):
        if old == new or label is None:
            axes.append(label)
        else:
            tracer.algebra.fixed(label, "a part of it is looked up")
            axes.append(Fixed(new))
    return [Value(tuple(axes), numbers=x.numbers, positive=x.positive, parametric=parametric(ins))]


@rule("dynamic_update_slice")
def _dynamically_updated(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    x, update = ins[:2]
    axes: list[Label] = []
    for k, (old, new) in enumerate(zip(shape(eqn.invars[0]), shape(eqn.invars[1]), strict=True)):
        if old == new:
            label = tracer.algebra.same(x.axes[k], update.axes[k])
            pairs = ((x, x.axes[k]), (update, update.axes[k]))
            if label is not None and any(t is None and not v.zero for v, t in pairs):
                tracer.algebra.curved(label, False)
            axes.append(label)
        else:
            tracer.algebra.fixed(x.axes[k], "a part of it is written")
            tracer.algebra.fixed(update.axes[k], "a part of it is written")
            axes.append(Fixed(old))
    return [Value(tuple(axes))]
