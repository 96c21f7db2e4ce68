"""Transforms of task vectors, which mask entries or change their values.

A transform keeps the task axis. Reductions (`reductions`) remove it. Published methods
(`sail_jax.methods`) combine transforms with a reduction.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, UInt

from sail_jax.checks import concrete, one_of
from sail_jax.lazy import listed
from sail_jax.merging import counting, random_bits, ranking
from sail_jax.merging.arithmetic import (
    Norms,
    PerModel,
    add_norms,
    beside,
    computed_once,
    l1_norms,
    number,
    per_task,
    task_sum,
)
from sail_jax.merging.combining import (
    Transform,
    chain,
    from_function,
    masked,
    shown,
    transform,
)
from sail_jax.merging.counting import Wide
from sail_jax.merging.ranking import MAGNITUDES, Bound, Earlier, Order
from sail_jax.merging.row_ranks import row_ranks
from sail_jax.merging.steps import Fold, Piece, Scope, kernel

__all__ = [
    "ElectBy",
    "RankBy",
    "Scope",
    "TieSign",
    "chain",
    "check_per_model",
    "drop",
    "drop_by_magnitude",
    "elect",
    "from_function",
    "keep_between",
    "mask",
    "masked",
    "rescale_l1",
    "trim",
]
__dir__ = listed(__name__)

ElectBy = Literal["mass", "weighted", "count"]
"""The quantity that decides the sign of an entry; see `elect`."""
TieSign = Literal["none", "positive", "majority"]
"""The sign that is elected where the sum is 0; see `elect`."""
RankBy = Literal["rank", "magnitude"]
"""The quantity that decides the probability of an entry; see `drop_by_magnitude`."""
Vectors = tuple[Array, Array]
"""(delta, weight) of one leaf or of a piece of it."""


def mask(kept: Bool[Array, "task ..."], weight: Float[Array, "task ..."]) -> Array:
    """Sets the weights of entries that are not kept to 0.

    Args:
      kept: Shape `[task, ...]`.
      weight: Broadcasts with `kept`.

    Returns:
      The weights, of the shape of `kept`.
    """
    return per_task(lambda stays, w: jnp.where(stays, w, 0), kept, weight)


# --- by rank


@shown
def trim(density: PerModel, scope: Scope = "tree", *, floor: bool = False) -> Transform:
    """Keeps, for each model, the `density` fraction of entries of largest magnitude.

    This is the first step of TIES. Every other entry gets weight 0. Exactly k = max(1,
    round(density * n)) entries are kept, with halves rounded up. Entries equal to the threshold are
    kept in order of (path, row-major index). The result therefore does not depend on the order of
    leaves or on sharding. Entries that are already masked rank last.

    Args:
      density: Fraction in (0, 1], one for all models or one per model. It may be traced (see
        `counting.of_size`), in which case other densities share the compiled program.
      scope: "tree" counts all leaves together, one threshold per model (the paper); "tensor" counts
        each leaf alone (mergekit). A leaf has fewer than 2**32 entries, a tree fewer than 2**48.
      floor: Whether density * n is rounded down (mergekit).

    Returns:
      A transform of task vectors with leaves `[task, ...]`: deltas are unchanged, weights masked.

    Raises:
      ValueError: If a density lies outside (0, 1], or for another scope.

    References:
      Yadav et al., TIES-Merging, 2023 (arXiv 2306.01708), Sec. 4.

    >>> from sail_jax import TaskVectors
    >>> vectors = TaskVectors({"a": jnp.array([[1.0, -3.0, 2.0, 0.0]])}, {"a": jnp.ones((1, 1))})
    >>> trim(0.5)(vectors).weight["a"].tolist()
    [[0.0, 1.0, 1.0, 0.0]]
    """
    _check_density(density)
    one_of("scope", scope, Scope)
    ranks = kernel(_trim_ranks, number(density), floor=floor)
    return transform(kernel(_keep_largest), Order(MAGNITUDES, sized=ranks, ties=True), scope=scope)


def _check_density(density: PerModel) -> None:
    """Checks densities; raises a ValueError unless they lie in (0, 1]."""
    check_per_model("density", density, lambda d: (d > 0) & (d <= 1), "in (0, 1]")


def _trim_ranks(density: counting.Numbers, size: int, *, floor: bool) -> tuple[Wide, ...]:
    """Returns the rank of the last kept entry."""
    return (_how_many(density, floor, size),)


def _how_many(density: counting.Numbers, floor: bool, size: int) -> Wide:
    """Counts the kept entries: at least one, unless the tensor is empty."""
    count = counting.of_size(density, size, half=not floor)
    return counting.smaller(count, counting.wide(min(1, size)), larger=True)


def _keep_largest(
    thresholds: tuple[Bound], before: tuple[Earlier], piece: Piece, delta: Array, weight: Array
) -> Vectors:
    """The kernel of `trim`."""
    keys = ranking.magnitude(delta, weight)
    return delta, mask(ranking.take(keys, thresholds[0], before[0]), weight)


@shown
def keep_between(
    density: PerModel,
    gamma: PerModel,
    scope: Scope = "tensor",
    *,
    floor: bool = False,
) -> Transform:
    """Masks, for each model, the largest and the smallest entries (the masks of Breadcrumbs).

    The min(round(gamma * n), n - k) largest of n entries are masked, and the next k = max(1,
    round(density * n)) are kept. Exactly k are kept even with equal magnitudes, because equal
    entries rank by (path, row-major index), as in `trim`.

    Args:
      density: The fraction of entries to keep, in (0, 1]; one number or one per model. It may be
        traced.
      gamma: The fraction of largest entries to mask, in [0, 1); one number or one per model. It may
        be traced.
      scope: Whether n counts each "tensor" (the paper's layers) or the whole "tree".
      floor: Whether products are rounded down instead of to the nearest.

    Returns:
      A transform of task vectors with leaves `[task, ...]`: deltas are unchanged, weights masked.

    Raises:
      ValueError: For invalid densities, gammas or scopes.

    References:
      Davari and Belilovsky, Model Breadcrumbs, 2023 (arXiv 2312.06795), Sec. 3.

    >>> from sail_jax import TaskVectors
    >>> vectors = TaskVectors({"a": jnp.array([[1.0, -9.0, 2.0, 0.0]])}, {"a": jnp.ones((1, 1))})
    >>> keep_between(0.5, 0.25)(vectors).weight["a"].tolist()
    [[1.0, 0.0, 1.0, 0.0]]
    """
    _check_density(density)
    check_per_model("gamma", gamma, lambda g: (g >= 0) & (g < 1), "in [0, 1)")
    one_of("scope", scope, Scope)
    ranks = kernel(_between_ranks, number(density), number(gamma), floor=floor)
    return transform(kernel(_keep_between), Order(MAGNITUDES, sized=ranks, ties=True), scope=scope)


def _between_ranks(
    density: counting.Numbers, gamma: counting.Numbers, size: int, *, floor: bool
) -> tuple[Wide, ...]:
    """Returns the ranks of the last masked large entry and of the last kept entry."""
    count = _how_many(density, floor, size)
    above = counting.of_size(gamma, size, half=not floor)
    # `density` takes precedence over `gamma`: if both exceed the size, fewer large entries are
    # masked.
    above = counting.smaller(above, counting.subtract(counting.wide(size), count))
    return above, counting.add(above, count)


def _keep_between(
    thresholds: tuple[Bound, Bound], before: tuple[Earlier, Earlier],
    piece: Piece, delta: Array, weight: Array,
) -> Vectors:  # fmt: skip
    """The kernel of `keep_between`."""
    keys = ranking.magnitude(delta, weight)
    largest, leading = (ranking.take(keys, *args) for args in zip(thresholds, before, strict=True))
    # The first k + m entries without the first m.
    return delta, mask(per_task(lambda a, b: a & ~b, leading, largest), weight)


# --- by sign


@shown
def elect(by: ElectBy = "mass", tie: TieSign = "none") -> Transform:
    """Elects a sign for each entry, and masks the models with another sign.

    This is the second step of TIES. A model with the entry 0 is masked too.

    Args:
      by: The sum that gives the elected sign, over unmasked models. "mass" is sum_k delta_k (Yadav
        et al.). "weighted" is sum_k w_k delta_k, and the sign of w_k delta_k must agree (mergekit).
        "count" is sum_k sign(delta_k).
      tie: The sign that is elected where the sum is exactly 0. "none" masks all models: the base
        stays, and the transform commutes with delta -> -delta. "positive" elects + (mergekit).
        "majority" elects the sign that won more entries of the whole tree, as in the code of Yadav
        et al. If both signs won equally many, all models are masked (their code keeps negative
        entries).

    Returns:
      A transform of task vectors with leaves `[task, ...]`: deltas are unchanged, weights masked.

    Raises:
      ValueError: For unknown values of `by` and `tie`.

    References:
      Yadav et al., TIES-Merging, 2023 (arXiv 2306.01708), Sec. 4.

    >>> from sail_jax import TaskVectors
    >>> delta = {"a": jnp.array([[3.0, -1.0], [-2.0, -1.0]])}
    >>> elect()(TaskVectors(delta, {"a": jnp.ones((2, 1))})).weight["a"].tolist()
    [[1.0, 1.0], [0.0, 1.0]]
    """
    one_of("elect_by", by, ElectBy)
    one_of("tie", tie, TieSign)
    if tie == "majority":
        signs = Fold(kernel(_count_signs, by=by), kernel(_majority), counting.add)
        return transform(kernel(_keep_elected, by=by), signs, scope="tree")
    return transform(kernel(_keep_elected, np.float32(tie == "positive"), by=by))


def _counted(by: ElectBy, delta: Array, weight: Array) -> Array:
    """Computes the terms of the sum that elects a sign."""

    def counted(d: Array, w: Array) -> Array:
        if by == "weighted":
            return w * d
        return jnp.where(w != 0, d if by == "mass" else jnp.sign(d), 0)

    return per_task(counted, delta, weight)


def _keep_elected(
    default: ArrayLike, piece: Piece, delta: Array, weight: Array, *, by: ElectBy
) -> Vectors:
    """The kernel of `elect`; `default` is the sign elected where the sum is 0 (0 for none)."""
    counted = _counted(by, delta, weight)
    mass = task_sum(counted)
    elected = jnp.where(mass == 0, jnp.asarray(default, mass.dtype), jnp.sign(mass))
    # The comparison is strict: an entry that is 0 or already masked never agrees.
    return delta, per_task(lambda c, w: jnp.where(c * elected > 0, w, 0), counted, weight)


def _count_signs(piece: Piece, delta: Array, weight: Array, *, by: ElectBy) -> tuple[Wide, Wide]:
    """Counts the entries of a piece for which each sign is elected."""
    # A leading axis of one task, which `occurrences` expects.
    mass = task_sum(_counted(by, delta, weight))[None]
    return counting.occurrences(mass > 0), counting.occurrences(mass < 0)


def _majority(prepared: tuple[()], signs: tuple[Wide, Wide]) -> Array:
    """Returns the sign that won more entries, 0 if neither did."""
    positive, negative = signs
    ahead, behind = counting.less(negative, positive), counting.less(positive, negative)
    return (ahead.astype(jnp.float32) - behind.astype(jnp.float32))[0]


# --- at random


@shown
def drop(rate: PerModel, key: Array | None, *, rescale: bool = True) -> Transform:
    """Masks every entry with probability `rate` and divides the others by 1 - rate (DARE).

    With `rescale` the expected delta is unchanged, and its variance is rate / (1 - rate) * delta^2.
    The mask of an entry depends only on the key, the path of its leaf, the index k of its model and
    its row-major index (`random_bits`). It does not depend on the order of leaves, other leaves,
    sharding or pieces.

    Args:
      rate: In [0, 1), one number or one per model; may be traced.
      key: One PRNG key, typed or raw.
      rescale: Whether deltas are divided by 1 - rate.

    Returns:
      A transform of task vectors with leaves `[task, ...]`.

    Raises:
      ValueError: For a rate outside [0, 1).
      TypeError: Without a key.

    References:
      Yu et al., Language Models are Super Mario, 2024 (arXiv 2311.03099), Sec. 3.2.

    >>> import jax
    >>> from sail_jax import TaskVectors
    >>> vectors = TaskVectors({"a": jnp.ones((1, 10_000))}, {"a": jnp.ones((1, 1))})
    >>> dropped = drop(0.5, jax.random.key(0))(vectors)
    >>> dropped.delta["a"].max().item(), round(dropped.weight["a"].mean().item(), 1)
    (2.0, 0.5)
    """
    check_per_model("rate", rate, lambda p: (p >= 0) & (p < 1), "in [0, 1)")
    words = random_bits.key_words(key, "the masks of DARE")
    return transform(kernel(_drop, 1 - _float32(rate), words, rescale=rescale))


def _drop(
    keep: Array, words: Array, piece: Piece, delta: Array, weight: Array, *, rescale: bool
) -> Vectors:
    """The kernel of `drop`; `keep` is 1 - rate."""
    chance = beside(keep, delta)
    kept = _drawn(words, piece, delta, chance)
    return per_task(jnp.divide, delta, chance) if rescale else delta, mask(kept, weight)


def uniform(
    words: UInt[Array, "words"], piece: Piece, shape: Sequence[int]
) -> Callable[[int], Float[Array, "..."]]:
    """Makes a function that returns the random draws of a piece, uniform in [0, 1).

    Args:
      words: The words of a PRNG key (`random_bits.key_words`).
      piece: The entries of a leaf to draw for.
      shape: The shape of the deltas, `[task, ...]`.

    Returns:
      Function from the index of a model to its draws, float32 `[...]`.
    """
    tasks, *rest = shape
    models = lax.iota(jnp.uint32, tasks)
    low, high = random_bits.stream(words, *(piece.name[i] for i in range(4)), models)
    index = piece.index(tuple(rest))
    # A function instead of a stack: XLA fuses the bits of one model with the comparison that uses
    # them.
    return lambda k: random_bits.uniform((low[k], high[k]), index)


def _drawn(
    words: Array, piece: Piece, delta: Array, chance: Float[Array, "#task ..."]
) -> Bool[Array, "task ..."]:
    """Draws masks that are True with given probabilities, independently for entries and models."""
    draw = uniform(words, piece, delta.shape)
    return jnp.stack([draw(k) < chance[k if len(chance) > 1 else 0] for k in range(len(delta))])


@shown
def drop_by_magnitude(
    density: PerModel,
    epsilon: PerModel,
    key: Array | None,
    rank_by: RankBy = "rank",
    *,
    rescale: Literal["probability", "l1"] | None = "probability",
) -> Transform:
    """Masks entries with a probability that falls with their magnitude (DELLA's MAGPRUNE).

    An entry is kept with probability p = density - epsilon + 2 epsilon x, and is divided by p. This
    keeps the expected delta. x in [0, 1] is the position of the entry in its row (the last axis; a
    vector is one row). Where x is 0 / 0, p is the density. This happens in rows of length 1, and
    for "magnitude" in rows of equal magnitudes. If density + epsilon > 1, epsilon becomes 1 -
    density. Density 1 keeps everything. Draws are reproducible as in `drop`, and each row is ranked
    separately.

    Args:
      density: In (0, 1], one number or one per model. With "rank" it is the mean of p over a row.
      epsilon: In [0, density), one number or one per model.
      key: One PRNG key, typed or raw.
      rank_by: "rank" uses x = (r - 1) / (n - 1), with r = 1 for the smallest |delta| of n and equal
        entries in order of position. "magnitude" uses x = (|delta| - min) / (max - min).
      rescale: "probability" divides by p. "l1" instead restores the L1 norm of each model's deltas
        over the tensor (mergekit). None does not rescale.

    Returns:
      A transform of task vectors with leaves `[task, ...]`.

    Raises:
      ValueError: Unless 0 <= epsilon < density <= 1, and for an unknown `rank_by`.
      TypeError: Without a key.

    References:
      Deep et al., DELLA-Merging, 2024 (arXiv 2406.11617), Sec. 3.1.

    >>> import jax
    >>> from sail_jax import TaskVectors
    >>> vectors = TaskVectors({"a": jnp.array([[1.0, -2.0]])}, {"a": jnp.ones((1, 1))})
    >>> drop_by_magnitude(1.0, 0.1, jax.random.key(0))(vectors).delta["a"].tolist()
    [[1.0, -2.0]]
    """
    densities = check_per_model("density", density, lambda d: (d > 0) & (d <= 1), "in (0, 1]")
    epsilons = check_per_model("epsilon", epsilon, lambda e: e >= 0, "not negative")
    if densities is not None and epsilons is not None and not (epsilons < densities).all():
        raise ValueError(f"epsilon: expected less than the density {density!r}, got {epsilon!r}")
    one_of("rank_by", rank_by, RankBy)
    words = random_bits.key_words(key, "the masks of DELLA")
    numbers = _float32(density), _float32(epsilon), words
    ranked = kernel(_sizes) if rank_by == "rank" else None
    if rescale != "l1":
        divided = rescale is not None
        masks = kernel(_drop_by_magnitude, *numbers, rank_by=rank_by, rescale=divided)
        return transform(masks, needs="row", ranked=ranked)
    # The masks are kept as one bit per entry, because ranking again would cost far more.
    sample = kernel(_sample, *numbers, rank_by=rank_by)
    norms = Fold(sample, kernel(_ratio), add_norms, kept=1 / 8)
    return transform(kernel(_masked_before), norms, needs="row", ranked=ranked)


def _drop_by_magnitude(
    density: Array, epsilon: Array, words: Array, piece: Piece, delta: Array, weight: Array,
    *, rank_by: RankBy, rescale: bool,
) -> Vectors:  # fmt: skip
    """The kernel of `drop_by_magnitude` without norms."""
    p = _probability(density, epsilon, piece, delta, weight, rank_by)
    kept = computed_once(lambda: _drawn(words, piece, delta, p), weight)
    # Entries with p = 0 are masked. Division by 0 would leave NaN or infinity in them.
    divisor = jnp.where(p > 0, p, 1) if rescale else 1
    return delta / divisor, mask(kept, weight)


def _probability(
    density: Array, epsilon: Array, piece: Piece, delta: Array, weight: Array, rank_by: RankBy
) -> Float[Array, "task ..."]:
    """Computes the probability of keeping each entry."""
    density, epsilon = beside(density, delta), beside(epsilon, delta)
    # Keeps the smallest and the largest p, density - epsilon and density + epsilon, in [0, 1].
    epsilon = jnp.minimum(epsilon, jnp.minimum(density, 1 - density))
    size = _sizes(piece, delta, weight)
    if rank_by == "magnitude":
        return density + epsilon * _place_by_magnitude(size)
    return density + epsilon * _place_by_rank(size, piece.local)


def _sizes(piece: Piece, delta: Array, weight: Array) -> Float[Array, "task ..."]:
    """Computes magnitudes, 0 where an entry is masked."""
    return jnp.where(weight != 0, jnp.abs(delta), 0)


def _place_by_rank(
    size: Float[Array, "task ..."], ranks: UInt[Array, "task ..."] | None
) -> Float[Array, "task ..."]:
    """Computes the position of each entry in its row by rank, from -1 to 1 for the largest.

    `ranks` comes from `row_ranks`; None computes it here.
    """
    n = size.shape[-1] if size.ndim > 1 else 1
    if n == 1:
        return jnp.zeros_like(size)
    ranks = row_ranks(size) if ranks is None else ranks
    return ranks.astype(jnp.int32).astype(size.dtype) * (2 / (n - 1)) - 1


def _place_by_magnitude(size: Float[Array, "task ..."]) -> Float[Array, "task ..."]:
    """Computes the position of each entry in its row by magnitude, from -1 to 1 for the largest.

    It is 0 where all entries are equal.
    """
    if size.ndim == 1:
        return jnp.zeros_like(size)
    least, most = size.min(-1, keepdims=True), size.max(-1, keepdims=True)
    # The inner where keeps 0 / 0 out of the discarded branch, for finite gradients.
    differ = most > least
    return jnp.where(differ, 2 * (size - least) / jnp.where(differ, most - least, 1) - 1, 0)


def _sample(
    density: Array, epsilon: Array, words: Array, piece: Piece, delta: Array, weight: Array,
    *, rank_by: RankBy,
) -> tuple[Norms, Array]:  # fmt: skip
    """Computes L1 norms before and after, and the masks as bits."""
    p = _probability(density, epsilon, piece, delta, weight, rank_by)
    # Otherwise norms and bits would each draw again.
    kept = computed_once(lambda: _drawn(words, piece, delta, p), weight)
    return _norms(piece, delta, mask(kept, weight)), _packed(kept)


def _masked_before(
    factor: Array, bits: Array, piece: Piece, delta: Array, weight: Array
) -> Vectors:
    """Applies stored masks, and a factor for each model."""
    kept = _unpacked(bits, delta.shape, weight)
    return per_task(jnp.multiply, beside(factor, delta), delta), mask(kept, weight)


WORD = 32
"""The number of bits of a word of packed masks."""


def _packed(kept: Bool[Array, "task ..."]) -> UInt[Array, "task words"]:
    """Packs masks into 32-bit words, `[task, words]`."""
    flat = kept.reshape(len(kept), -1)
    # Bit i of word j is entry i * words + j. Words then combine whole slices instead of neighbours.
    flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % WORD))).reshape(len(kept), WORD // 8, 8, -1)
    # Bytes first: twice as fast as shifts of 32 bits for every entry.
    bits = flat.astype(jnp.uint8)
    parts = functools.reduce(lax.bitwise_or, [bits[:, :, i] << i for i in range(8)])
    words = parts.astype(jnp.uint32)
    return functools.reduce(lax.bitwise_or, [words[:, i] << 8 * i for i in range(WORD // 8)])


def _unpacked(
    words: UInt[Array, "task words"], shape: Sequence[int], like: Array
) -> Bool[Array, "task ..."]:
    """Unpacks the masks of `_packed`; `like` is an argument of `computed_once`."""
    places = jnp.arange(WORD, dtype=jnp.uint32)[:, None]
    # The bits are computed in the order of words. Otherwise XLA would divide each entry's index to
    # find its word.
    bits = computed_once(lambda: (words[:, None] >> places) & 1 != 0, like)
    size = int(np.prod(shape[1:]))
    return bits.reshape(shape[0], -1)[:, :size].reshape(shape)


# --- by length


@shown
def rescale_l1(scope: Scope = "tensor") -> Transform:
    """Restores the L1 norms that masks have reduced (mergekit's rescaling).

    The deltas of a model are multiplied by the L1 norm of all entries divided by the L1 norm of
    unmasked entries. If either norm is 0, the factor is 1. (In mergekit it is also 1 below 1e-7.)

    Args:
      scope: Whether norms are taken over each "tensor" (mergekit) or over the whole "tree".

    Returns:
      A transform of task vectors with leaves `[task, ...]`. In a `chain` it follows a masking
      transform.

    Raises:
      ValueError: For another scope.

    >>> from sail_jax import TaskVectors
    >>> vectors = TaskVectors({"a": jnp.array([[1.0, 3.0]])}, {"a": jnp.array([[0.0, 1.0]])})
    >>> rescale_l1()(vectors).delta["a"][:, 1].tolist()
    [4.0]
    """
    one_of("scope", scope, Scope)
    norms = Fold(kernel(_norms), kernel(_ratio), add_norms)
    return transform(kernel(_rescaled), norms, scope=scope)


def _norms(piece: Piece, delta: Array, weight: Array) -> Norms:
    """Computes the L1 norms of all entries of a piece, and of unmasked entries."""
    left = jnp.broadcast_to(weight, delta.shape)
    kept = [jnp.where(w != 0, x, 0) for x, w in zip(delta, left, strict=True)]
    return l1_norms(list(delta), kept, piece.at_scale_1)


def _ratio(prepared: tuple[()], norms: Norms) -> Float[Array, "task"]:
    """Returns the ratio of the norms, 1 where either is 0."""
    return norms.ratio


def _rescaled(factor: Array, piece: Piece, delta: Array, weight: Array) -> Vectors:
    """Applies a factor for each model."""
    return per_task(jnp.multiply, beside(factor, delta), delta), weight


# --- checks


def check_per_model(
    name: str, value: PerModel, holds: Callable[[Any], Any], expected: str
) -> np.ndarray | None:
    """Checks that a hyperparameter is one finite number or one per model.

    Args:
      name: The name in the message.
      value: The value, possibly traced.
      holds: The condition on every number, a function of an array that returns an array.
      expected: The condition in words for the message, such as "in (0, 1]".

    Returns:
      The values as float64; None if they are traced.

    Raises:
      ValueError: If the value is invalid, or a number violates the condition.
    """
    numbers = "a number or one per model"
    values = concrete(value)
    if np.ndim(value if values is None else values) > 1:
        raise ValueError(f"{name}: expected {numbers}, got {value!r}")
    if values is None:
        return None
    if values.dtype.kind not in "fiub" or not (np.isfinite(values) & holds(values)).all():
        raise ValueError(f"{name}: expected {numbers}, {expected}; got {value!r}")
    return values.astype(float)


def _float32(x: PerModel) -> Array | np.ndarray:
    """Converts a hyperparameter to float32, with NumPy if its value is known."""
    values = concrete(x)
    return jnp.asarray(x, jnp.float32) if values is None else values.astype(np.float32)
