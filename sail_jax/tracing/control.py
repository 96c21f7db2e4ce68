"""Rules of primitives that run other jaxprs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.extend import core

from sail_jax.tracing.terms import Fixed, Label, Variable
from sail_jax.tracing.values import Tracer, Value, opaque, rule, settled, shape, whole


def called(params: Mapping[str, Any]) -> Any:
    """Finds the jaxpr that a primitive only calls."""
    keys = ("jaxpr", "call_jaxpr", "fun_jaxpr")
    return next((params[key] for key in keys if key in params), None)


CALLS = (
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call",
    "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin",
)  # fmt: skip


@rule(*CALLS, lazy=True, numbered=True)
def _call(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    inner = called(eqn.params)
    if inner is None:
        return opaque(tracer, eqn, [settled(tracer, x) for x in ins])
    return tracer.run(inner, ins)


def _carried(values: Sequence[Value], variables: Sequence[Any]) -> list[Value]:
    """The carried values of a loop, which may vary along any axis after one iteration."""
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
def _scanned(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    p = eqn.params
    constants, carries = p["num_consts"], p["num_carry"]
    whole(tracer, *ins[constants:])
    carry = _carried(ins[constants : constants + carries], eqn.invars[constants:][:carries])
    xs = ins[constants + carries :]
    for x in xs:
        tracer.algebra.fixed(x.axes[0], "a scan goes along it")
    slices = [replace(x, numbers=None, axes=x.axes[1:]) for x in xs]
    outs = [settled(tracer, y) for y in tracer.run(p["jaxpr"], [*ins[:constants], *carry, *slices])]
    whole(tracer, *outs)
    _closed(tracer, carry, outs[:carries])
    stacked = [
        Value((Fixed(p["length"]), *y.axes), parametric=y.parametric) for y in outs[carries:]
    ]
    return [*carry, *stacked]


@rule("while", numbered=True)
def _repeated(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    p = eqn.params
    first, second = p["cond_nconsts"], p["body_nconsts"]
    whole(tracer, *ins[first + second :])
    carry = _carried(ins[first + second :], eqn.invars[first + second :])
    for y in tracer.run(p["cond_jaxpr"], [*ins[:first], *carry]):
        settled(tracer, y)
    outs = [
        settled(tracer, y)
        for y in tracer.run(p["body_jaxpr"], [*ins[first : first + second], *carry])
    ]
    whole(tracer, *outs)
    _closed(tracer, carry, outs)
    return carry


@rule("cond")
def _branched(tracer: Tracer, eqn: core.JaxprEqn, ins: list[Value]) -> list[Value]:
    branches = [
        [settled(tracer, y) for y in tracer.run(branch, ins[1:])]
        for branch in eqn.params["branches"]
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
