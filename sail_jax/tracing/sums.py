"""Rules of primitives that compute sums or extremes over axes."""

import math

from sail_jax.jax_internals import JaxprEqn, operation
from sail_jax.tracing.terms import Fixed, Label, product, solid, split
from sail_jax.tracing.values import (
    Pending,
    Tracer,
    Value,
    opaque,
    parametric,
    rule,
    settled,
    shape,
)


@rule("reduce_sum", lazy=True)
def _summed(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    (x,), algebra = ins, tracer.algebra
    if x.pending is not None:
        x = settled(tracer, x)
    over, size = operation(eqn).removed_axes, shape(eqn.invars[0])
    # The sum along an axis with equal entries is a multiple.
    labels = tuple(x.axes[k] for k in over if x.axes[k] is not None)
    rest = [t for k, t in enumerate(x.axes) if k not in over]
    if x.square:
        rest = [algebra.multiplied([(t, 2)], [x.parametric]) for t in rest]
    count = math.prod(size[k] for k in over)
    pending = Pending(labels, count, x.square, x) if labels else None
    return [
        Value(
            tuple(rest),
            parametric=x.parametric,
            pending=pending,
            positive=x.positive,
            nonzero=x.positive and x.nonzero,
        )
    ]


@rule("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor")
def _reduced(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    (x,), extreme = ins, eqn.primitive.name in ("reduce_max", "reduce_min")
    over = operation(eqn).removed_axes
    for k, label in enumerate(x.axes):
        tracer.algebra.curved(label, x.parametric, scale=extreme and k not in over)
        if not extreme and k in over:
            tracer.algebra.counted(label)
    rest = [t for k, t in enumerate(x.axes) if k not in over]
    return [Value(tuple(rest), parametric=x.parametric, positive=x.positive)]


@rule("argmax", "argmin")
def _place(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """Returns the number of the largest unit, which moves with the unit, except for ties."""
    (x,), (axis,) = ins, operation(eqn).removed_axes
    for k, label in enumerate(x.axes):
        tracer.algebra.curved(label, x.parametric, scale=k != axis)
    units = x.axes[axis]
    tracer.algebra.counted(units)
    rest = [tracer.algebra.renewed(t) for k, t in enumerate(x.axes) if k != axis]
    for label in rest:
        tracer.algebra.curved(label, x.parametric)
    size = shape(eqn.invars[0])[axis]
    return [Value(tuple(rest), numbers=Fixed(size) if units is None else units, positive=True)]


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    (x,), axis = ins, operation(eqn).axis
    linear = eqn.primitive.name == "cumsum"
    for k, label in enumerate(x.axes):
        if k == axis:
            tracer.algebra.fixed(label, "accumulated along it")
        elif not linear:
            scale = eqn.primitive.name in ("cummax", "cummin")
            tracer.algebra.curved(label, x.parametric, scale=scale)
    return [Value(x.axes, parametric=x.parametric)]


@rule("dot_general")
def _contracted(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    algebra, (a, b) = tracer.algebra, ins
    (left, right), (left_batch, right_batch) = operation(eqn).contraction
    flags = (a.parametric, b.parametric)
    for i, j in zip(left, right, strict=True):
        algebra.contracted(a.axes[i], b.axes[j], flags)
    axes: list[Label] = [
        algebra.multiplied([(a.axes[i], 1), (b.axes[j], 1)], flags)
        for i, j in zip(left_batch, right_batch, strict=True)
    ]
    axes += [t for k, t in enumerate(a.axes) if k not in (*left, *left_batch)]
    axes += [t for k, t in enumerate(b.axes) if k not in (*right, *right_batch)]
    return [Value(tuple(axes), parametric=parametric(ins))]


@rule("conv_general_dilated")
def _convolved(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    algebra, (x, kernel) = tracer.algebra, ins
    numbers, groups, batch_groups = operation(eqn).convolution
    if batch_groups != 1:
        return opaque(tracer, eqn, ins)
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    sizes = [shape(v) for v in eqn.invars]
    features = solid(x.axes[lhs[1]], sizes[0][lhs[1]])
    reads = solid(kernel.axes[rhs[1]], sizes[1][rhs[1]])
    writes = solid(kernel.axes[rhs[0]], sizes[1][rhs[0]])
    flags = (x.parametric, kernel.parametric)
    for value, spec in ((x, lhs), (kernel, rhs)):
        for k in spec[2:]:
            algebra.fixed(value.axes[k], "a window slides along it")
    written: Label = writes
    if groups == 1:
        algebra.contracted(features, reads, flags)
    else:
        inside, outside = split(features, groups), split(writes, groups)
        if inside is None or outside is None:
            return opaque(tracer, eqn, ins)
        algebra.contracted(inside[1], reads, flags)
        group = algebra.multiplied([(inside[0], 1), (outside[0], 1)], flags)
        assert group is not None
        written = product(group, outside[1])
    size = shape(eqn.outvars[0])
    axes: list[Label] = [None] * len(size)
    axes[out[0]], axes[out[1]] = x.axes[lhs[0]], written
    for k in out[2:]:
        axes[k] = Fixed(size[k])
    return [Value(tuple(axes), parametric=parametric(ins))]


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window")
def _pooled(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    if eqn.primitive.name == "reduce_window":
        return opaque(tracer, eqn, ins)
    x, window, size = ins[0], operation(eqn).window, shape(eqn.outvars[0])
    axes: list[Label] = []
    for k, label in enumerate(x.axes):
        alone = window.sizes[k] == 1 and window.strides[k] == 1
        if alone and tuple(window.padding[k]) == (0, 0):
            if eqn.primitive.name != "reduce_window_sum":
                tracer.algebra.curved(label, x.parametric, scale=True)
            axes.append(label)
        else:
            tracer.algebra.fixed(label, "a window slides along it")
            axes.append(Fixed(size[k]))
    return [Value(tuple(axes), parametric=x.parametric)]


@rule("sort")
def _sorted(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    axis, size = operation(eqn).axis, shape(eqn.outvars[0])
    axes: list[Label] = []
    for k in range(len(size)):
        if k == axis:
            # Equal units keep their order.
            for x in ins:
                tracer.algebra.fixed(x.axes[k], "sorted along it")
            label = Fixed(size[k])
        else:
            label = tracer.algebra.same(*(x.axes[k] for x in ins))
            tracer.algebra.curved(label, False)
        axes.append(label)
    return [Value(tuple(axes)) for _ in ins]


@rule("top_k")
def _largest(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    x, size = ins[0], shape(eqn.invars[0])
    axis = operation(eqn).axis % len(size)
    for label in x.axes:
        tracer.algebra.curved(label, x.parametric)
    units = x.axes[axis]
    tracer.algebra.counted(units)
    axes = list(x.axes)
    axes[axis] = Fixed(shape(eqn.outvars[0])[axis])
    numbers = Fixed(size[axis]) if units is None else units
    return [Value(tuple(axes)), Value(tuple(axes), numbers=numbers, positive=True)]
