"""Rules of primitives that run other jaxprs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sail_jax.jax_internals import CALLS, JaxprEqn, operation
from sail_jax.tracing.terms import Fixed, Label, Variable
from sail_jax.tracing.values import Tracer, Value, rule, settled, shape, whole


@rule(*CALLS, lazy=True, numbered=True)
def _call(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    return tracer.run(operation(eqn).called, ins)


def _carried(values: Sequence[Value], variables: Sequence[Any]) -> list[Value]:
    """Returns the carried values of a loop, which may vary along any axis after one iteration."""
    return [
        Value(tuple(
            Variable(n) if t is None and n > 1 else t
            for t, n in zip(x.axes, shape(v), strict=True)
        ))
        for x, v in zip(values, variables, strict=True)
    ]  # fmt: skip


def _closed(tracer: Tracer, before: Sequence[Value], after: Sequence[Value]) -> None:
    """Unifies the carried values before and after each iteration."""
    for a, b in zip(before, after, strict=True):
        for label, other in zip(a.axes, b.axes, strict=True):
            if other is None:
                tracer.algebra.curved(label, False)
            tracer.algebra.same(label, other)


@rule("scan", numbered=True)
def _scanned(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    scan = operation(eqn).scan
    constants, carry, xs = scan.parted(ins)
    whole(tracer, *carry, *xs)
    carry = _carried(carry, scan.parted(eqn.invars)[1])
    for x in xs:
        tracer.algebra.fixed(x.axes[0], "a scan goes along it")
    slices = [replace(x, numbers=None, axes=x.axes[1:]) for x in xs]
    outs = [settled(tracer, y) for y in tracer.run(scan.body, [*constants, *carry, *slices])]
    whole(tracer, *outs)
    _closed(tracer, carry, outs[: scan.carries])
    rows = outs[scan.carries :]
    stacked = [Value((Fixed(scan.length), *y.axes), parametric=y.parametric) for y in rows]
    return [*carry, *stacked]


@rule("while", numbered=True)
def _repeated(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    loop = operation(eqn).loop
    first, second, carry = loop.parted(ins)
    whole(tracer, *carry)
    carry = _carried(carry, loop.parted(eqn.invars)[2])
    for y in tracer.run(loop.condition, [*first, *carry]):
        settled(tracer, y)
    outs = [settled(tracer, y) for y in tracer.run(loop.body, [*second, *carry])]
    whole(tracer, *outs)
    _closed(tracer, carry, outs)
    return carry


@rule("cond")
def _branched(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    branches = [
        [settled(tracer, y) for y in tracer.run(branch, ins[1:])]
        for branch in operation(eqn).branches
    ]
    merged = []
    for outs in zip(*branches, strict=True):
        whole(tracer, *outs)
        axes: list[Label] = []
        for labels in zip(*(y.axes for y in outs), strict=True):
            label = tracer.algebra.same(*labels)
            if label is not None and any(
                t is None and not y.zero for t, y in zip(labels, outs, strict=True)
            ):
                tracer.algebra.curved(label, False)
            axes.append(label)
        merged.append(Value(tuple(axes)))
    return merged
