"""Methods that look at entries, or at a few numbers of a tensor: SCE, RAM, MagMax, NearSwap, Arcee
Fusion, PCB, ExPO, passthrough."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, UInt

from sail_jax.checks import concrete
from sail_jax.merging import ranking
from sail_jax.merging.arithmetic import beside, number, task_sum
from sail_jax.merging.combining import Transform, chain, reduce, transform
from sail_jax.merging.merge import Compat, Merge, choose, method
from sail_jax.merging.ranking import MAGNITUDES, Found, Order, Wide
from sail_jax.merging.reductions import weighted_mean
from sail_jax.merging.steps import Fold, Piece, kernel
from sail_jax.merging.task_vectors import check_scalar
from sail_jax.merging.transforms import TieSign, elect, mask

__all__ = [
    "arcee_fusion",
    "expo",
    "magmax",
    "nearswap",
    "passthrough",
    "pcb",
    "ram",
    "ramplus_tl",
    "sce",
]

Scalar = Float[ArrayLike, ""]
Vectors = tuple[Array, Array]


@method
def passthrough(*, scale: Scalar = 1.0) -> Merge:
    """scale * theta of the one model there is.

    A base given only says the output's dtypes. Leaves that are not floating are copied, not scaled.

    Args:
      scale: What multiplies the model.

    >>> passthrough(scale=0.5)([{"a": 3.0}])
    {'a': Array(1.5, dtype=float32)}
    """
    return Merge(scale=scale, base="unused", models=(1, 1))


@method
def expo(*, alpha: Scalar = 0.1) -> Merge:
    """ExPO: theta + alpha (theta - base), beyond the one model given.

    The base is the weaker model (before alignment), the model the stronger one. alpha 0 is the
    model, -1 the base.

    Args:
      alpha: How far beyond. The authors choose it in 0.1 to 0.5 on held-out data.

    References:
      Zheng et al., Model Extrapolation Expedites Alignment, 2024 (arXiv 2404.16792), Sec. 3.

    >>> expo(alpha=0.5)([{"a": 3.0}], {"a": 1.0})
    {'a': Array(4., dtype=float32...)}
    """
    check_scalar("alpha", alpha, np.isfinite, "a finite number")
    return Merge(scale=1 + number(alpha), models=(1, 1))


@method
def magmax(*, scale: Scalar = 1.0) -> Merge:
    """MagMax: base + scale * that w_k delta_k of largest magnitude, entry by entry.

    Of equal magnitudes the later model's. The order of models matters only where magnitudes are
    equal and signs are not.

    Args:
      scale: What multiplies the update; the authors, and fusion_bench, use 0.5.

    References:
      Marczak et al., MagMax, 2024 (arXiv 2407.06322), Sec. 4.

    >>> magmax()([{"a": 3.0}, {"a": -4.0}], {"a": 0.0})
    {'a': Array(-4., dtype=float32)}
    """
    return Merge(reduction=reduce(kernel(_largest)), scale=scale)


def _largest(piece: Piece, delta: Array, weight: Array) -> Array:
    weighted = weight * delta
    later = lambda a, b: jnp.where(jnp.abs(b) >= jnp.abs(a), b, a)  # noqa: E731
    return functools.reduce(later, [weighted[k] for k in range(len(weighted))])


@method
def nearswap(*, t: Scalar) -> Merge:
    """NearSwap: the base moved towards the one model by at most t per entry.

    base + clip(delta, -t, t). That is base + w delta with w = min(1, t / |delta|), as it was
    published, at every delta != 0. mergekit divides by max(|delta|, 1e-6) instead, which differs,
    by less than 1e-6, only for t < 1e-6.

    Args:
      t: Not negative; 0 is the base. mergekit takes a negative t for 0.

    References:
      alchemonaut, QuartetAnemoi, 2024.

    >>> nearswap(t=0.5)([{"a": jnp.array([0.25, -2.0])}], {"a": jnp.zeros(2)})["a"].tolist()
    [0.25, -0.5]
    """
    check_scalar("t", t, lambda t: np.isfinite(t) & (t >= 0), "a finite number >= 0")
    return Merge(transform(kernel(_clip, number(t))), models=(1, 1))


def _clip(t: Array, piece: Piece, delta: Array, weight: Array) -> Vectors:
    t = jnp.asarray(t, delta.dtype)
    return jnp.clip(delta, -t, t), weight


@method
def ram(*, epsilon: Scalar = 1e-5) -> Merge:
    """RAM: base + the mean, entry by entry, of the delta_k that are active, |delta_k| > epsilon.

    The base where none is. A lone active delta_k is taken whole, which is what the mean of one is.
    Weighted, the mean is sum_k w_k delta_k / sum_k w_k over the active.

    Args:
      epsilon: Absolute: entries tuned by less count as untouched, in models with deltas about 1e-5
        most of them. 0 takes every change for active.

    References:
      Reinforced agent merging, 2026 (arXiv 2601.13572), Sec. 3.

    >>> models = [{"a": jnp.array([1.0, 0.0])}, {"a": jnp.array([3.0, 4.0])}]
    >>> ram()(models, {"a": jnp.zeros(2)})["a"].tolist()
    [2.0, 4.0]
    """
    return Merge(_active(epsilon), weighted_mean)


def _active(epsilon: Scalar) -> Transform:
    check_scalar("epsilon", epsilon, lambda e: np.isfinite(e) & (e >= 0), "a finite number >= 0")
    return transform(kernel(_mask_inactive, number(epsilon)))


def _mask_inactive(epsilon: Array, piece: Piece, delta: Array, weight: Array) -> Vectors:
    return delta, jnp.where(jnp.abs(delta) > jnp.asarray(epsilon, delta.dtype), weight, 0)


@method
def ramplus_tl(*, epsilon: Scalar = 1e-5, r: Scalar = 0.1, alpha: Scalar = 0.2) -> Merge:
    """RAM+ (tensor-local): `ram`, with what only one model changed amplified.

    A lone active delta_k is multiplied by lambda_k = 1 + r clip(rho_k, 0, alpha), where rho_k is
    the number of entries of the tensor that model k changed along with others, over the number
    that it changed alone (alpha where it changed none alone).

    Args:
      epsilon: See `ram`.
      r: How strongly.
      alpha: The largest rho that counts.

    References:
      Reinforced agent merging, 2026 (arXiv 2601.13572), Sec. 3.

    >>> models = [{"a": jnp.array([1.0, 0.0])}, {"a": jnp.array([3.0, 4.0])}]
    >>> ramplus_tl(r=1.0, alpha=0.5)(models, {"a": jnp.zeros(2)})["a"].tolist()
    [2.0, 6.0]
    """
    check_scalar("r", r, np.isfinite, "a finite number")
    check_scalar("alpha", alpha, lambda a: np.isfinite(a) & (a >= 0), "a finite number >= 0")
    changed = Fold(kernel(_shared_and_alone), add=_add_pair)
    amplified = transform(kernel(_amplify, number(r), number(alpha)), changed)
    return Merge(chain(_active(epsilon), amplified), weighted_mean)


def _add_pair(a: tuple[Wide, Wide], b: tuple[Wide, Wide]) -> tuple[Wide, Wide]:
    return ranking.add(a[0], b[0]), ranking.add(a[1], b[1])


def _active_models(delta: Array, weight: Array) -> tuple[Array, Array]:
    """Which models are active at an entry, and how many."""
    active = jnp.broadcast_to(weight != 0, delta.shape)
    return active, task_sum(active.astype(jnp.int32))


def _shared_and_alone(piece: Piece, delta: Array, weight: Array) -> tuple[Wide, Wide]:
    # padding is of zero deltas, which are not active
    active, count = _active_models(delta, weight)
    return ranking.occurrences(active & (count > 1)), ranking.occurrences(active & (count == 1))


def _amplify(
    r: Array, alpha: Array, counts: tuple[Wide, Wide], piece: Piece, delta: Array, weight: Array
) -> Vectors:
    shared, alone = (n.hi.astype(jnp.float32) * 65536 + n.lo.astype(jnp.float32) for n in counts)
    r, alpha = (jnp.asarray(x, jnp.float32) for x in (r, alpha))
    rho = jnp.where(alone > 0, shared / jnp.maximum(alone, 1), alpha)
    gain = beside(1 + r * jnp.clip(rho, 0, alpha), delta)
    _, count = _active_models(delta, weight)
    return jnp.where(count == 1, gain * delta, delta), weight


@method
def sce(*, select_topk: float = 1.0, tie: TieSign | None = None, compat: Compat = "paper") -> Merge:
    """SCE, per tensor: select, calculate, erase.

    1. Of the entries whose delta_k vary over the models the fraction `select_topk` of largest
       variance is kept (rounded down; 1, the default, keeps every entry, varying or not).
    2. c_k = sum over the tensor of delta_k^2 over that of all models.
    3. For each entry the sign of sum_k delta_k is elected; base + sum_k c_k delta_k / sum_k c_k
       over the k of that sign.

    Below select_topk 1, entries in which all models agree have no variance and are the base's, so a
    tensor that is the same in all models is (there, mergekit writes a tensor with one axis too
    many). Equal variances rank by position. Weights multiply c_k; deltas of any size have their
    c_k, which are equal where all deltas are 0.

    Args:
      select_topk: In (0, 1], static.
      tie: What is elected where the sum is 0, "none" by default; see `elect`.
      compat: mergekit takes equal c_k where sum_k mean(delta_k^2) < 1e-6, which is an absolute
        threshold: deltas of usual size (2e-4) lose step 2. It elects + where the sum is 0, and
        divides by at least 1e-6.

    References:
      Wan et al., FuseChat, 2024 (arXiv 2408.07990), Sec. 3.3.
    """
    default = choose(compat)
    fraction = concrete(select_topk)
    if fraction is None:
        raise TypeError("select_topk: expected a static number, got a traced one")
    check_scalar("select_topk", select_topk, lambda k: (k > 0) & (k <= 1), "a number in (0, 1]")
    select = Transform() if fraction == 1 else _most_varying(float(fraction))
    floor = 1e-6 if compat == "mergekit" else 0.0
    energies = Fold(kernel(_energy), kernel(_beside_size), _add_energies, sized=np.float32)
    calculate = transform(kernel(_weigh, np.float32(floor)), energies)
    erase = elect("mass", default(tie, "none", "positive"))
    mean = reduce(kernel(_floored_mean, np.float32(floor))) if floor else weighted_mean
    return Merge(chain(select, calculate, erase), mean)


def _most_varying(part: float) -> Transform:
    varying = Fold(kernel(_count_varying), add=ranking.add)
    rank = kernel(_rank_of_part, ranking.fraction(part))
    order = Order(kernel(_variance_keys), ranks=rank, tasks=1, ties=True)
    return transform(kernel(_keep_varying), varying, order)


def _variance(delta: Array, weight: Array) -> Float[Array, "..."]:
    """Over models, as a sum over pairs: exactly 0 where they are equal."""
    delta = jnp.where(weight != 0, delta, 0)
    pairs = [delta[i] - delta[j] for i in range(len(delta)) for j in range(i)]
    return sum((x * x for x in pairs), jnp.zeros_like(delta[0])) / len(delta) ** 2


def _count_varying(piece: Piece, delta: Array, weight: Array) -> Wide:
    # padding is of equal deltas, which do not vary
    return ranking.occurrences((_variance(delta, weight) != 0)[None])


def _variance_keys(*args: Any) -> UInt[Array, "1 ..."]:
    *_, delta, weight = args
    variance = _variance(delta, weight)[None]
    return ranking.magnitude(variance, jnp.ones_like(variance))


def _rank_of_part(fraction: Any, varying: Wide) -> tuple[Wide, ...]:
    return (fraction(varying),)


def _keep_varying(
    varying: Wide, thresholds: tuple[Found, ...], before: tuple[Wide, ...],
    in_rows: tuple[Any, ...], piece: Piece, delta: Array, weight: Array,
) -> Vectors:  # fmt: skip
    keys = _variance_keys(delta, weight)
    return delta, mask(ranking.take(keys, thresholds[0], before[0], in_rows[0]), weight)


def _energy(piece: Piece, delta: Array, weight: Array) -> Vectors:
    """sum of delta_k^2 as `most**2 * rest`, which neither overflows nor underflows."""
    size = jnp.where(weight != 0, jnp.abs(delta), 0)
    axes = range(1, delta.ndim)
    most = lax.stop_gradient(size.max(axes, initial=0))
    rest = jnp.square(size / beside(jnp.where(most > 0, most, 1), delta)).sum(axes)
    return most, rest


def _add_energies(a: Vectors, b: Vectors) -> Vectors:
    most = jnp.maximum(a[0], b[0])
    safe = jnp.where(most > 0, most, 1)
    return most, jnp.square(a[0] / safe) * a[1] + jnp.square(b[0] / safe) * b[1]


def _beside_size(size: Array, energy: Vectors) -> tuple[Array, Array, Array]:
    return *energy, jnp.asarray(size)


def _weigh(
    floor: Array, energy: tuple[Array, Array, Array], piece: Piece, delta: Array, weight: Array
) -> Vectors:
    most, rest, size = energy
    top = most.max()
    c = jnp.square(most / jnp.where(top > 0, top, 1)) * rest
    mass = c.sum()
    uniform = (mass == 0) | (jnp.square(top) * mass / size < floor)
    c = jnp.where(uniform, 1 / len(delta), c / jnp.where(uniform, 1, mass))
    return delta, weight * beside(c, delta)


def _floored_mean(floor: Array, piece: Piece, delta: Array, weight: Array) -> Array:
    return task_sum(weight * delta) / jnp.maximum(task_sum(weight), floor)


@method
def arcee_fusion() -> Merge:
    """Arcee Fusion: of one model, take the entries that matter; the base elsewhere.

    The importance of an entry is |delta| KL(softmax(theta) || softmax(base)), softmaxes over the
    last axis (of a vector: all of it) with 1e-8 added to each probability. Taken are the entries of
    importance >= median + 1.5 (third - first quartile) over the tensor, quartiles being the
    entries of rank floor(q (n - 1)) in ascending order, from 0.

    Exact at any size; mergekit, whose method it is, estimates the quartiles of tensors above 1e6
    entries from a random sample, and writes float32 whatever the dtype. A divergence that rounding
    makes negative counts as 0. Where three quarters of the importances are 0 so is the threshold,
    and the whole model is taken.

    References:
      Arcee AI, mergekit 0.1.4, method `arcee_fusion`.
    """
    order = Order(kernel(_importance_keys), _quartile_ranks, tasks=1)
    return Merge(reduction=reduce(kernel(_fuse), order, needs="row"), base="merged", models=(1, 1))


def _quartile_ranks(size: int) -> tuple[Wide, ...]:
    return tuple(ranking.wide(size - q * (size - 1) // 4) for q in (1, 2, 3))


def _importance(delta: Array) -> Float[Array, "..."]:
    """Of base and model, `[2, ...]`."""
    rows = delta[..., None] if delta.ndim == 1 else delta
    q, p = jax.nn.softmax(rows, axis=-1) + 1e-8
    divergence = jnp.maximum((p * jnp.log(p / q)).sum(-1, keepdims=True), 0)
    return (jnp.abs(rows[1] - rows[0]) * divergence).reshape(delta.shape[1:])


def _importance_keys(piece: Piece, delta: Array, weight: Array) -> UInt[Array, "1 ..."]:
    size = _importance(delta)[None]
    return ranking.magnitude(size, jnp.ones_like(size))


def _fuse(quartiles: tuple[Found, ...], piece: Piece, delta: Array, weight: Array) -> Array:
    low, median, high = (ranking.float_of_key(quartile.key)[0] for quartile in quartiles)
    threshold = median + 1.5 * (high - low)
    taken = lax.stop_gradient(_importance(delta)) >= threshold.astype(delta.dtype)
    return jnp.where(taken, delta[1], delta[0])


@method
def pcb(*, ratio: float = 0.1, scale: Scalar = 1.0) -> Merge:
    """PCB-Merging: parameters compete within a task and across tasks.

    Over the whole tree, for each of M models:
    1. a_k = |delta_k| clamped between its 1e-4 and 1 - 1e-4 quantiles, and s_k = minmax(a_k) in
       [0, 1];
    2. the score exp(M s_k^2) tanh(delta_k sum_j delta_j), balancing within and across tasks;
    3. b_k = minmax of the scores clamped to the largest fraction `ratio` of them: 0 for all others.
    base + scale * sum_k w_k b_k sign(delta_k) a_k / sum_k b_k; where no b_k > 0, the base.

    Where all a_k are equal s_k is 1, where all that compete are equal b_k is 1 (there, the authors'
    code gives NaN). Quantiles are the entries floor(n / 1e4) from either end, in their code the
    upper one is one further; they are constants to `grad`.

    Args:
      ratio: In (0, 1], static; the authors use 0.05 to 0.2.
      scale: What multiplies the update; the authors use about 1.2, or weights (their lambda_k) by
        evolution.

    References:
      Du et al., Parameter Competition Balancing, 2024 (arXiv 2410.02396), Sec. 3.
    """
    check_scalar("ratio", ratio, lambda r: (r > 0) & (r <= 1), "a number in (0, 1]")
    fraction = concrete(ratio)
    if fraction is None:
        raise TypeError("ratio: expected a static number, got a traced one")
    bounds = Order(MAGNITUDES, _quantile_ranks)
    limits = Order(kernel(_score_keys), functools.partial(_best_ranks, float(fraction)))
    return Merge(reduction=reduce(kernel(_compete), bounds, limits, scope="tree"), scale=scale)


def _quantile_ranks(size: int) -> tuple[Wide, ...]:
    cut = size // 10000
    return ranking.wide(size - cut), ranking.wide(1 + cut)


def _best_ranks(part: float, size: int) -> tuple[Wide, ...]:
    count = size - int(size * (1 - part))
    return ranking.wide(min(max(count, 1), size)), ranking.wide(1)


def _score(bounds: tuple[Found, ...], delta: Array, weight: Array) -> tuple[Array, Array]:
    """The clamped deltas and their scores, times exp(-M), which cancels and cannot overflow."""
    delta = jnp.where(weight != 0, delta, 0)
    least, most = (beside(ranking.float_of_key(bound.key), delta) for bound in bounds)
    size, differ = jnp.clip(jnp.abs(delta), least, most), most > least
    within = jnp.where(differ, (size - least) / jnp.where(differ, most - least, 1), 1)
    score = jnp.exp(len(delta) * (within**2 - 1)) * jnp.tanh(delta * task_sum(delta))
    return jnp.sign(delta) * size, score


def _score_keys(
    bounds: tuple[Found, ...], piece: Piece, delta: Array, weight: Array
) -> UInt[Array, "task ..."]:
    return ranking.key_of_float(lax.stop_gradient(_score(bounds, delta, weight)[1]))


def _compete(
    bounds: tuple[Found, ...], limits: tuple[Found, ...], piece: Piece, delta: Array, weight: Array
) -> Array:
    clamped, score = _score(bounds, delta, weight)
    low, high = (beside(ranking.float_of_key(limit.key, signed=True), delta) for limit in limits)
    # The score that sets `low` is computed here anew, in another program, whose exp and tanh may
    # round otherwise. It loses against itself, as does all that rounding cannot tell from it:
    # alone at its entry, a balance of 1e-7 in place of 0 would carry the whole update.
    rounding = 64 * jnp.finfo(score.dtype).eps * jnp.maximum(jnp.abs(low), jnp.abs(high))
    differ = high - low > rounding
    balance = (jnp.clip(score, low, high) - low) / jnp.where(differ, high - low, 1)
    balance = jnp.where(differ, balance * (score - low > rounding), score >= low - rounding)
    mass = task_sum(balance)
    won = mass > 0
    total = task_sum(weight * balance * clamped)
    return jnp.where(won, total / jnp.where(won, mass, 1), 0)
