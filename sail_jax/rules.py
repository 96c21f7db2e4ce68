"""Rules: who votes on which entry, and with what. Each is a `TaskVectors -> TaskVectors`."""

import functools
import math
import operator
import zlib
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float

from sail_jax import selection
from sail_jax.checks import concrete
from sail_jax.task_vectors import Fold, Leafwise, Rule, TaskVectors, check_scalar, tally

__all__ = ["ElectBy", "Scope", "Tie", "check_density", "drop", "elect", "trim"]

Scope = Literal["tensor", "tree"]
ElectBy = Literal["mass", "weighted", "count"]
Tie = Literal["abstain", "positive", "majority"]


def trim(density: float, scope: Scope = "tree") -> Rule:
    """Of each model the k = max(1, floor(density * n + 1/2)) entries of largest |delta| still vote.

    scope "tree": n counts all leaves, one threshold per model (TIES, Yadav et al. 2023).
    scope "tensor": n counts one leaf, one threshold per leaf and model (mergekit).

    Exactly k are kept, of equal magnitudes those first in (sorted path, row-major index), which
    depends neither on the order of leaves in the tree nor on sharding. Those who abstain already
    rank last. `density` is static; a leaf has fewer than 2**32 entries, a tree fewer than 2**48.
    ValueError for a density outside (0, 1] or another scope.

    >>> votes = TaskVectors({"a": jnp.array([[1.0, -3.0, 2.0, 0.0]])}, {"a": jnp.ones((1, 1))})
    >>> trim(0.5)(votes).weight["a"].tolist()
    [[0.0, 1.0, 1.0, 0.0]]
    """
    _choice("scope", scope, Scope)
    check_density(density)
    if concrete(density) is None:
        raise TypeError("density: expected a static number, got a traced one")
    rule = _largest(float(density))
    return rule if scope == "tree" else Leafwise(functools.partial(_alone, rule))


def _alone(rule: Rule, path: str, delta: Array, weight: Array) -> tuple[Array, Array]:
    votes = rule(TaskVectors({path: delta}, {path: weight}))
    return votes.delta[path], votes.weight[path]


def _largest(density: float) -> Rule:
    """trim over all leaves: the threshold digit by digit, then the ties at it in path order."""

    def digits(shift: int, prefix: Array, rank: selection.Wide | None) -> Rule:
        def summary(path: str, delta: Array, weight: Array) -> tuple[int, selection.Wide]:
            keys = selection.magnitude(delta, weight)
            return math.prod(delta.shape[1:]), selection.histogram(keys, prefix, shift)

        def then(total: tuple[int, selection.Wide]) -> Rule:
            size, counts = total
            k = min(size, max(1, math.floor(density * size + 0.5)))
            found = selection.locate(counts, prefix, selection.wide(k) if rank is None else rank)
            return digits(shift - 16, *found) if shift else ties(*found)

        return Fold(summary, lambda a, b: (a[0] + b[0], selection.add(a[1], b[1])), then)

    def ties(threshold: Array, left: selection.Wide) -> Rule:
        def summary(path: str, delta: Array, weight: Array) -> dict[str, selection.Wide]:
            return {path: selection.equal(selection.magnitude(delta, weight), threshold)}

        def then(counts: dict[str, selection.Wide]) -> Rule:
            quota, rest = {}, left
            for path in sorted(counts):
                quota[path] = selection.least(counts[path], rest)
                rest = selection.subtract(rest, quota[path])

            def leaf(path: str, delta: Array, weight: Array) -> tuple[Array, Array]:
                keys = selection.magnitude(delta, weight)
                return delta, jnp.where(selection.take(keys, threshold, quota[path]), weight, 0)

            return Leafwise(leaf)

        return Fold(summary, operator.or_, then)

    prefix, shift = selection.start()
    return digits(shift, prefix, None)


def elect(by: ElectBy = "mass", tie: Tie = "abstain") -> Rule:
    """Per entry a sign is elected, and those of another sign abstain; zeros never vote.

    by "mass": the sign of sum_k delta_k over those who vote (TIES, Yadav et al. 2023);
    "weighted": of sum_k w_k delta_k, where the sign of w_k delta_k is what has to agree (mergekit);
    "count": of sum_k sign(delta_k).

    tie, where that sum is exactly 0: "abstain" elects nobody, so the base stays and the rule keeps
    commuting with delta -> -delta; "positive" elects + (mergekit); "majority" elects the sign that
    won more entries of the whole tree, nobody if there is none (the code of Yadav et al., which
    then keeps negative entries).

    ValueError for other values of `by` and `tie`.
    """
    _choice("elect_by", by, ElectBy)
    _choice("tie", tie, Tie)

    def ballots(delta: Array, weight: Array) -> Array:
        if by == "weighted":
            return weight * delta
        return jnp.where(weight != 0, delta if by == "mass" else jnp.sign(delta), 0)

    def settle(default: ArrayLike) -> Rule:
        def leaf(path: str, delta: Array, weight: Array) -> tuple[Array, Array]:
            votes = ballots(delta, weight)
            mass = tally(votes)
            elected = jnp.where(mass == 0, default, jnp.sign(mass))
            return delta, jnp.where(votes * elected > 0, weight, 0)

        return Leafwise(leaf)

    def signs(path: str, delta: Array, weight: Array) -> tuple[selection.Wide, selection.Wide]:
        mass = tally(ballots(delta, weight))
        return selection.occurrences(mass > 0), selection.occurrences(mass < 0)

    def by_majority(signs: tuple[selection.Wide, selection.Wide]) -> Rule:
        positive, negative = signs
        ahead, behind = selection.less(negative, positive), selection.less(positive, negative)
        return settle(ahead.astype(jnp.float32) - behind)

    if tie == "majority":
        return Fold(signs, lambda a, b: tuple(map(selection.add, a, b)), by_majority)
    return settle(1 if tie == "positive" else 0)


def drop(rate: Float[ArrayLike, ""], key: Array) -> Rule:
    """DARE (Yu et al. 2024): every entry abstains with probability `rate`, else delta / (1 - rate).

    The expected vote is unchanged and gains the variance rate / (1 - rate) * delta^2. The draws for
    a leaf of model k come from fold_in(fold_in(key, crc32(path)), k), so they depend neither on
    the order of leaves nor on what else is in the tree.

    key: one PRNG key, typed or raw. ValueError for a rate outside [0, 1), TypeError without a key.
    """
    check_scalar("rate", rate, lambda p: 0 <= p < 1, "a number in [0, 1)")
    try:
        jax.random.fold_in(key, 0)
    except (TypeError, ValueError) as error:
        raise TypeError(f"key: expected one PRNG key, got {key!r}") from error

    def leaf(path: str, delta: Array, weight: Array) -> tuple[Array, Array]:
        here = jax.random.fold_in(key, np.uint32(zlib.crc32(path.encode())))
        keep = jnp.asarray(1 - rate, delta.dtype)
        return delta / keep, jnp.where(_bernoulli(here, keep, delta.shape), weight, 0)

    return Leafwise(leaf)


@functools.partial(jax.jit, static_argnames="shape")
def _bernoulli(
    key: Array, keep: Float[Array, ""], shape: tuple[int, ...]
) -> Bool[Array, "task ..."]:
    def one(task: Array) -> Array:
        # float32 draws whatever the dtype: float64 models see the same masks
        return jax.random.bernoulli(
            jax.random.fold_in(key, task), keep.astype(jnp.float32), shape[1:]
        )

    # one task at a time: under vmap not every generator draws what it draws alone
    return lax.map(one, jnp.arange(shape[0], dtype=jnp.uint32))


def check_density(density: Float[ArrayLike, ""]) -> None:
    check_scalar("density", density, lambda d: 0 < d <= 1, "a number in (0, 1]")


def _choice(name: str, value: str, options: object) -> None:
    if value not in get_args(options):
        raise ValueError(f"{name}: expected one of {get_args(options)}, got {value!r}")
