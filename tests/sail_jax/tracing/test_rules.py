"""Each rule separately: operands permuted as labels allow give a result permuted in the
same way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from permutations import free, labelled, moved, orders_of
from rule_cases import CASES, LACKING

from sail_jax.tracing.interpreter import Interpreter
from sail_jax.tracing.terms import Fixed
from sail_jax.tracing.values import RULES, Value


@pytest.mark.parametrize("name", CASES)
def test_a_rule_says_how_permutations_pass_through(name):
    """Sums in another order differ by their rounding, in float64 1e-12 of numbers of order one."""
    case = CASES[name]
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        arrays = [jnp.asarray(rng.normal(size=shape)) for shape in case.shapes]
        labels, values, outs, interpreter = labelled(jax.make_jaxpr(case.f)(*arrays), *arrays)
        letters = {}
        assert " ".join(free(own, letters) for own in labels) == case.free
        assert not interpreter.unknown
        # the outcome's own parts, such as the units of an iota, follow the arguments' or are free
        orders = orders_of(rng, [t for x in (*values, *outs) for t in x.axes if t is not None])
        for out in outs:
            if out.numbers is not None:
                orders = orders_of(rng, [out.numbers]) | orders
        run = jax.jit(case.f)
        before = jax.tree.leaves(run(*arrays))
        shuffled = [moved(x, v, orders) for x, v in zip(arrays, values, strict=True)]
        after = jax.tree.leaves(run(*map(jnp.asarray, shuffled)))
    assert len(before) == len(outs)
    for x, y, out in zip(before, after, outs, strict=True):
        np.testing.assert_allclose(y, moved(x, out, orders), rtol=1e-12, atol=1e-12)


def seen(case):
    jaxpr = jax.make_jaxpr(case.f)(*(jnp.ones(shape) for shape in case.shapes))
    interpreter = Interpreter()
    interpreter.run(jaxpr, [Value(tuple(map(Fixed, s))) for s in case.shapes])
    return interpreter.seen


# Primitives of another version of JAX, and those that no case has.
ELSEWHERE = LACKING | {
    "closed_call", "eval_jaxpr",
    "sharding_constraint", "device_put", "pvary", "reshard", "add_any", "reduce_window",
}  # fmt: skip


def test_every_rule_has_a_case():
    covered = set().union(*(seen(case) for case in CASES.values()))
    assert set(RULES.rules) - covered <= ELSEWHERE


@pytest.mark.parametrize("name", sorted(set(RULES.rules) - ELSEWHERE))
def test_a_rule_that_is_wrong_is_noticed(name, monkeypatch):
    """Without its rule a primitive fixes all axes: some case then keeps less than it should.

    A rule that frees too much is noticed by the permutations of the cases.
    """
    monkeypatch.delitem(RULES.rules, name)
    cases = {k: case for k, case in CASES.items() if k.split(",")[0] == name or name in seen_in(k)}
    assert cases
    wrong = []
    for case in cases.values():
        arrays = [jnp.ones(shape) for shape in case.shapes]
        labels, *_ = labelled(jax.make_jaxpr(case.f)(*arrays), *arrays)
        letters = {}
        wrong.append(" ".join(free(own, letters) for own in labels) != case.free)
    assert any(wrong)


SEEN = {}


def seen_in(k):
    if k not in SEEN:
        jaxpr = jax.make_jaxpr(CASES[k].f)(*(jnp.ones(shape) for shape in CASES[k].shapes))
        SEEN[k] = {eqn.primitive.name for eqn in jaxpr.jaxpr.eqns}
    return SEEN[k]
