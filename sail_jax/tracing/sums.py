"""Rules of primitives that compute sums or extremes over axes."""

import math

from jax.extend import core

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
def _summed(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    (x,), algebra = ins, tracer.algebra
    if x.pending is not None:
        x = settled(tracer, x)
    over, size = eqn.params["axes"], shape(eqn.invars[0])
    # The sum along an axis with equal entries is a multiple.
    labels = tuple(x.axes[k] for k in over if x.axes[k] is not None)
    rest = [t for k, t in enumerate(x.axes) if k not in over]
    if x.square:
        rest = [algebra.multiplied([(t, 2)], [x.parametric]) for t in rest]
    pending = Pending(labels, math.prod(size[k] for k in over), x.square) if labels else None
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
def _reduced(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    (x,), extreme = ins, eqn.primitive.name in ("reduce_max", "reduce_min")
    for k, label in enumerate(x.axes):
        tracer.algebra.curved(label, x.parametric, scale=extreme and k not in eqn.params["axes"])
        if not extreme and k in eqn.params["axes"]:
            tracer.algebra.counted(label)
    rest = [t for k, t in enumerate(x.axes) if k not in eqn.params["axes"]]
    return [Value(tuple(rest), parametric=x.parametric, positive=x.positive)]


@rule("argmax", "argmin")
def _place(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    """The number of the largest unit. It moves with the unit, except for ties."""
    (x,), (axis,) = ins, eqn.params["axes"]
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
def _cumulative(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    (x,), axis = ins, eqn.params["axis"]
    linear = eqn.primitive.name == "cumsum"
    for k, label in enumerate(x.axes):
        if k == axis:
            tracer.algebra.fixed(label)
        elif not linear:
            scale = eqn.primitive.name in ("cummax", "cummin")
            tracer.algebra.curved(label, x.parametric, scale=scale)
    return [Value(x.axes, parametric=x.parametric)]


@rule("dot_general")
def _contracted(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    algebra, (a, b) = tracer.algebra, ins
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
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
def _convolved(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    algebra, (x, kernel) = tracer.algebra, ins
    if eqn.params["batch_group_count"] != 1:
        return opaque(tracer, eqn, ins)
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
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
def _pooled(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    x, p, size = ins[0], eqn.params, shape(eqn.outvars[0])
    if eqn.primitive.name == "reduce_window":
        return opaque(tracer, eqn, ins)
    axes: list[Label] = []
    for k, label in enumerate(x.axes):
        alone = p["window_dimensions"][k] == 1 and p["window_strides"][k] == 1
        if alone and tuple(p["padding"][k]) == (0, 0):
            if eqn.primitive.name != "reduce_window_sum":
                tracer.algebra.curved(label, x.parametric, scale=True)
            axes.append(label)
        else:
            tracer.algebra.fixed(label, "a window slides along it")
            axes.append(Fixed(size[k]))
    return [Value(tuple(axes), parametric=x.parametric)]


@rule("sort")
def _sorted(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    axis, size = eqn.params["dimension"], shape(eqn.outvars[0])
    axes: list[Label] = []
    for k in range(len(size)):
        label = tracer.algebra.same(*(x.axes[k] for x in ins))
        if k == axis:
            # Equal units keep their order.
            tracer.algebra.fixed(label)
            label = Fixed(size[k])
        else:
            tracer.algebra.curved(label, False)
        axes.append(label)
    return [Value(tuple(axes)) for _ in ins]


@rule("top_k")
def _largest(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    x, size = ins[0], shape(eqn.invars[0])
    axis = eqn.params.get("axis", -1) % len(size)
    for label in x.axes:
        tracer.algebra.curved(label, x.parametric)
    units = x.axes[axis]
    tracer.algebra.counted(units)
    axes = list(x.axes)
    axes[axis] = Fixed(shape(eqn.outvars[0])[axis])
    numbers = Fixed(size[axis]) if units is None else units
    return [Value(tuple(axes)), Value(tuple(axes), numbers=numbers, positive=True)]
