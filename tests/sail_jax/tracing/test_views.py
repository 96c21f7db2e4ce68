"""Random programs that only move entries: a permutation of free units is preserved exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from permutations import moved, orders_of

from sail_jax.tracing.interpreter import Interpreter
from sail_jax.tracing.terms import Variable, leaves
from sail_jax.tracing.values import Value, settled


def drawn(rng):
    """A shape, steps that each make an array of an earlier one, and which arrays are returned."""
    shapes, steps = [tuple(rng.choice([12, 24, 36], 2).tolist())], []
    for _ in range(rng.integers(3, 8)):
        # Mostly the newest array: chains of steps are what may go wrong.
        at = len(shapes) - 1 if rng.random() < 0.7 else int(rng.integers(len(shapes)))
        old = shapes[at]
        k = int(rng.integers(len(old)))
        kind = str(
            rng.choice(
                ["split", "split", "cut", "cut", "cut", "take", "join", "turn", "compute", "twice"]
            )
        )
        if kind == "split":
            first = int(rng.choice([n for n in range(2, old[k]) if old[k] % n == 0] or [1]))
            arg = (*old[:k], first, old[k] // first, *old[k + 1 :])
        elif kind == "join":
            arg = (*old[:k], int(np.prod(old[k : k + 2])), *old[k + 2 :])
        elif kind == "cut":
            start, stop = sorted(rng.choice(old[k] + 1, 2, replace=False).tolist())
            arg = (slice(None),) * k + (slice(start, stop, int(rng.choice([1, 1, 1, 2]))),)
        elif kind == "take":
            arg = (slice(None),) * k + ([int(rng.integers(-old[k], old[k]))],)
        else:
            arg = tuple(rng.permutation(len(old)).tolist()) if kind == "turn" else k
        steps.append((at, kind, arg))
        shapes.append(stepped(np.empty(old), kind, arg, np).shape)
    return shapes[0], steps, [k for k in range(1, len(shapes)) if rng.random() < 0.3] or [-1]


def stepped(x, kind, arg, xp):
    if kind in ("split", "join"):
        return x.reshape(arg)
    if kind in ("cut", "take"):
        return x[tuple(xp.asarray(i) if isinstance(i, list) else i for i in arg)]
    if kind == "turn":
        return xp.transpose(x, arg)
    return xp.concatenate([x, -x], arg) if kind == "twice" else 2 * x + 1


def run(steps, kept, x, xp):
    made = [x]
    for at, kind, arg in steps:
        made.append(stepped(made[at], kind, arg, xp))
    return [made[k] for k in kept]


@pytest.mark.slow
def test_permutations_go_through_whatever_is_reshaped_and_cut():
    free = 0
    for seed in range(80):
        rng = np.random.default_rng(seed)
        shape, steps, kept = drawn(rng)
        x = rng.normal(size=shape)
        jaxpr = jax.make_jaxpr(lambda x, s=steps, k=kept: run(s, k, x, jnp))(np.float32(x))
        value, tracer = Value(tuple(map(Variable, shape))), Interpreter()
        outs = [settled(tracer, out) for out in tracer.run(jaxpr, [value])]
        every = [t for v in (value, *outs) for t in v.axes if t is not None]
        if any(leaf.size == 1 for t in every for leaf in leaves(t)):
            continue
        free += any(True for t in value.axes for _ in leaves(t))
        orders = orders_of(rng, every)
        after = run(steps, kept, moved(x, value, orders), np)
        for before, y, out in zip(run(steps, kept, x, np), after, outs, strict=True):
            np.testing.assert_array_equal(y, moved(before, out, orders), err_msg=str(steps))
    assert free > 40
