"""Rules: who votes on which entry, and with what. Each is a `TaskVectors -> TaskVectors`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Bool, Float

from sail_jax.checks import concrete
from sail_jax.merging import random_bits
from sail_jax.merging import ranking as selection
from sail_jax.merging.order import Found, magnitudes, order_statistics, placed
from sail_jax.merging.task_vectors import Each, Fold, Leafwise, Place, Rule, by_task, sums, tally

__all__ = [
    "ElectBy",
    "PerModel",
    "Scope",
    "Tie",
    "check_per_model",
    "drawn",
    "drop",
    "elect",
    "largest",
    "lengths",
    "once",
    "one_of",
    "per_model",
    "rescaled",
    "scoped",
    "standing",
    "trim",
]

Scope = Literal["tensor", "tree"]
ElectBy = Literal["mass", "weighted", "count"]
Tie = Literal["abstain", "positive", "majority"]
PerModel = Float[ArrayLike, ""] | Float[ArrayLike, "task"] | Sequence[float]
Votes = tuple[Array, Array]


def trim(density: float | Sequence[float], scope: Scope = "tree", *, floor: bool = False) -> Rule:
    """Of each model the k = max(1, floor(density * n + 1/2)) entries of largest |delta| still vote.

    scope "tree": n counts all leaves, one threshold per model (TIES, Yadav et al. 2023).
    scope "tensor": n counts one leaf, one threshold per leaf and model (mergekit, which also
    rounds down: `floor`, max(1, floor(density * n))).

    Exactly k are kept, of equal magnitudes those first in (sorted path, row-major index), which
    depends neither on the order of leaves in the tree nor on sharding. Those who abstain already
    rank last. `density`, one number or one per model, is static; a leaf has fewer than 2**32
    entries, a tree fewer than 2**48. ValueError for a density outside (0, 1] or another scope.

    >>> from sail_jax import TaskVectors
    >>> votes = TaskVectors({"a": jnp.array([[1.0, -3.0, 2.0, 0.0]])}, {"a": jnp.ones((1, 1))})
    >>> trim(0.5)(votes).weight["a"].tolist()
    [[0.0, 1.0, 1.0, 0.0]]
    """
    known = check_per_model("density", density, lambda d: (d > 0) & (d <= 1), "in (0, 1]")
    if known is None:
        raise TypeError("density: expected static numbers, got traced ones")
    half = 0.0 if floor else 0.5

    def rank(size: int) -> selection.Wide:
        k = np.floor(known * size + half).astype(int)
        return selection.wide(np.clip(k, min(1, size), size))

    return scoped(scope, largest(rank))


def scoped(scope: Scope, rule: Any) -> Any:
    """A rule (or count) over the whole tree, or over each tensor alone."""
    one_of("scope", scope, Scope)
    return rule if scope == "tree" else Each(rule)


def largest(rank: Callable[[int], selection.Wide]) -> Rule:
    """The rank(size) entries of largest magnitude of each model, over all leaves, still vote: the
    threshold digit by digit, then those equal to it in path order."""
    keys = Partial(magnitudes)

    def then(found: list[Found], size: int) -> Rule:
        kernel = Partial(_take, found[0][0])
        return placed(keys, found, lambda cuts: Leafwise(kernel, cuts))

    return order_statistics(keys, lambda size: [rank(size)], then, after=1)


def _take(threshold: Array, cut: selection.Cut, place: Place, delta: Array, weight: Array) -> Votes:
    keys = selection.magnitude(delta, weight)
    return delta, standing(selection.take(keys, threshold, cut), weight)


def standing(kept: Bool[Array, "task ..."], weight: Float[Array, "task ..."]) -> Array:
    """The weights of the votes that are kept; 0 elsewhere."""
    return by_task(lambda stays, w: jnp.where(stays, w, 0), kept, weight)


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
    one_of("elect_by", by, ElectBy)
    one_of("tie", tie, Tie)

    def settle(default: ArrayLike) -> Rule:
        return Leafwise(Partial(_settle(by), jnp.asarray(default, jnp.float32)))

    def by_majority(signs: tuple[selection.Wide, selection.Wide], size: int) -> Rule:
        positive, negative = signs
        ahead, behind = selection.less(negative, positive), selection.less(positive, negative)
        return settle(jnp.asarray(ahead, jnp.float32) - behind)

    if tie == "majority":
        add = lambda a, b: tuple(map(selection.add, a, b))  # noqa: E731
        return Fold(Partial(_signs(by)), by_majority, add)
    return settle(1 if tie == "positive" else 0)


def _ballots(by: ElectBy, delta: Array, weight: Array) -> Array:
    def one(d: Array, w: Array) -> Array:
        if by == "weighted":
            return w * d
        return jnp.where(w != 0, d if by == "mass" else jnp.sign(d), 0)

    return by_task(one, delta, weight)


@functools.cache
def _settle(by: ElectBy) -> Any:
    def kernel(default: Array, place: Place, delta: Array, weight: Array) -> Votes:
        votes = _ballots(by, delta, weight)
        mass = tally(votes)
        elected = jnp.where(mass == 0, default, jnp.sign(mass))
        return delta, by_task(lambda v, w: jnp.where(v * elected > 0, w, 0), votes, weight)

    return kernel


@functools.cache
def _signs(by: ElectBy) -> Any:
    def summary(place: Place, delta: Array, weight: Array) -> tuple[selection.Wide, selection.Wide]:
        mass = tally(_ballots(by, delta, weight))
        return selection.occurrences(mass > 0), selection.occurrences(mass < 0)

    return summary


def drop(rate: PerModel, key: Array | None, *, rescale: bool = True) -> Leafwise:
    """DARE (Yu et al. 2024): every entry abstains with probability `rate`, else delta / (1 - rate)
    (or delta, without `rescale`).

    The expected vote is unchanged and gains the variance rate / (1 - rate) * delta^2. Whether an
    entry is kept depends on the key, its path, the place k of its model and its row-major index
    (`random_bits`), on nothing else: neither on the order of leaves nor on what else is in the
    tree, on sharding or on pieces.

    rate: one number, or one per model. key: one PRNG key, typed or raw. ValueError for a rate
    outside [0, 1), TypeError without a key.
    """
    check_per_model("rate", rate, lambda p: (p >= 0) & (p < 1), "in [0, 1)")
    random_bits.check_key(key, "the masks of DARE")
    keep = 1 - jnp.asarray(rate, jnp.float32)
    return Leafwise(Partial(_drop, keep, keep if rescale else jnp.ones_like(keep), key))


def _drop(
    keep: Array, divisor: Array, key: Array, place: Place, delta: Array, weight: Array
) -> Votes:
    kept = drawn(jnp.less, key, place, delta, per_model(keep, delta))
    votes = by_task(jnp.divide, delta, per_model(divisor, delta))
    return votes, standing(kept, weight)


def once(compute: Callable[[], Array], like: Array) -> Array:
    """compute(), kept as an array under `jit`: XLA would repeat the computation for every reader of
    every entry, and there are many (twenty times slower on CPUs). It does not look into branches,
    of which this one is always taken; `like` is any array without infinities."""
    first = like.reshape(-1)[0]
    if like.size == 0 or concrete(first) is not None:
        return compute()
    shape = jax.eval_shape(compute)
    return lax.cond(first != jnp.inf, compute, lambda: jnp.zeros(shape.shape, shape.dtype))


def drawn(
    f: Callable[..., Array], key: Array, place: Place, delta: Array, *arrays: Array
) -> Float[Array, "task ..."]:
    """f(u, *entries of each array), model by model: u is uniform in [0, 1), drawn for every vote
    apart, float32 whatever the dtype of the votes."""
    models = lax.iota(jnp.uint32, len(delta)).reshape(-1, *(1,) * (delta.ndim - 1))
    streams = random_bits.stream(key, place.name, models)
    index = place.index(delta.shape[1:])

    def one(low: Array, high: Array, *entries: Array) -> Array:
        return f(random_bits.uniform((low, high), index), *entries)

    return by_task(one, *streams, *arrays)


def rescaled(rule: Leafwise) -> Rule:
    """`rule`, then every vote times the ratio of the L1 norms over its tensor that the votes of its
    model had before and have after: how mergekit rescales what it drops from.

    What `rule` itself multiplies delta by cancels. Where either norm is 0 there is nothing to do.
    """

    def then(norms: Votes, size: int) -> Rule:
        return Leafwise(Partial(_rescale, rule.kernel, *norms), grain=rule.grain)

    return Each(Fold(Partial(_norms, rule.kernel), then, grain=rule.grain))


def _norms(rule: Any, place: Place, delta: Array, weight: Array) -> Votes:
    return lengths(delta, weight, *rule(place, delta, weight))


def lengths(delta: Array, weight: Array, after: Array, kept: Array) -> Votes:
    """The L1 norms of votes before and after a rule, [task] each, scaled so that no sum of < 2**32
    terms overflows: only their ratio matters."""

    def size(votes: Array, w: Array, k: int) -> Array:
        entries = jnp.broadcast_to(w, votes.shape)[k] != 0
        return jnp.where(entries, jnp.abs(votes[k]) * 2.0**-32, 0)

    pairs = [sums(size(delta, weight, k), size(after, kept, k)) for k in range(len(delta))]
    before, rest = zip(*pairs, strict=True)
    return jnp.stack(before), jnp.stack(rest)


def _rescale(
    rule: Any, before: Array, after: Array, place: Place, delta: Array, weight: Array
) -> Votes:
    delta, weight = rule(place, delta, weight)
    exists = (before > 0) & (after > 0)
    factor = jnp.where(exists, before / jnp.where(exists, after, 1), 1)
    return by_task(jnp.multiply, per_model(factor, delta), delta), weight


def per_model(value: PerModel, delta: Float[Array, "task ..."]) -> Array:
    """One number or one per model, in delta's dtype, beside its entries: [#task, 1, ...]."""
    value = jnp.asarray(value, delta.dtype)
    return value.reshape(-1, *(1,) * (delta.ndim - 1))


def check_per_model(
    name: str, value: PerModel, holds: Callable[[Any], Any], expected: str
) -> np.ndarray | None:
    """The values as float64, None while traced; ValueError unless one finite number or one per
    model, of all of which `holds`."""
    numbers = "a number or one per model"
    known = concrete(value)
    if np.ndim(value if known is None else known) > 1:
        raise ValueError(f"{name}: expected {numbers}, got {value!r}")
    if known is None:
        return None
    if known.dtype.kind not in "fiub" or not (np.isfinite(known) & holds(known)).all():
        raise ValueError(f"{name}: expected {numbers}, {expected}; got {value!r}")
    return known.astype(float)


def one_of(name: str, value: str, options: object) -> None:
    """ValueError unless `value` is one of the strings of a Literal."""
    if value not in get_args(options):
        raise ValueError(f"{name}: expected one of {get_args(options)}, got {value!r}")
