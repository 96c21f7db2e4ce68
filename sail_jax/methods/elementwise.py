"""Methods that look at entries, or at a few numbers of a tensor: SCE, RAM, MagMax, NearSwap, Arcee
Fusion, PCB, ExPO, passthrough."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Float, UInt

from sail_jax.checks import concrete
from sail_jax.merging import ranking as selection
from sail_jax.merging.merge import Compat, Expression, default, method
from sail_jax.merging.order import Found, magnitudes, order_statistics, placed
from sail_jax.merging.reductions import average, total
from sail_jax.merging.sparsifiers import fraction
from sail_jax.merging.task_vectors import (
    Count,
    Each,
    Fold,
    Leafwise,
    Place,
    Rule,
    chain,
    check_scalar,
    everybody,
    tally,
)
from sail_jax.merging.transforms import Tie, elect, per_model, standing

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
Votes = tuple[Array, Array]


@method
def passthrough(*, key: Array | None = None, scale: Scalar = 1.0) -> Expression:
    """scale * theta of the one model there is; a base given only says the output's dtypes.

    ValueError for more models. Integer and bool leaves are copied, not scaled.

    >>> passthrough([{"a": 3.0}], scale=0.5)
    {'a': Array(1.5, dtype=float32)}
    """
    return Expression(total, scale=scale, base="unused", models=(1, 1))


@method
def expo(*, key: Array | None = None, alpha: Scalar = 0.1) -> Expression:
    """ExPO (Zheng et al. 2024): theta + alpha (theta - base), beyond the one model given.

    The base is the weaker model (before alignment), the model the stronger one. alpha 0 is the
    model, -1 the base. The authors choose alpha in 0.1 to 0.5 on held-out data.

    >>> expo([{"a": 3.0}], {"a": 1.0}, alpha=0.5)
    {'a': Array(4., dtype=float32...)}
    """
    check_scalar("alpha", alpha, np.isfinite, "a finite number")
    return Expression(total, scale=1 + alpha, models=(1, 1))


@method
def magmax(*, key: Array | None = None, scale: Scalar = 1.0) -> Expression:
    """MagMax (Marczak et al. 2024): base + scale * that w_k delta_k of largest magnitude, entry by
    entry; of equal magnitudes the later model's.

    The authors, and fusion_bench, use scale 0.5. The order of models matters only where magnitudes
    are equal and signs are not.

    >>> magmax([{"a": 3.0}, {"a": -4.0}], {"a": 0.0})
    {'a': Array(-4., dtype=float32)}
    """
    return Expression(Leafwise(Partial(_largest)), scale=scale)


def _largest(place: Place, delta: Array, weight: Array) -> Array:
    votes = weight * delta
    later = lambda a, b: jnp.where(jnp.abs(b) >= jnp.abs(a), b, a)  # noqa: E731
    return functools.reduce(later, [votes[k] for k in range(len(votes))])


@method
def nearswap(*, key: Array | None = None, t: Scalar) -> Expression:
    """NearSwap (alchemonaut 2024): the base moved towards the one model by at most t per entry,
    base + clip(delta, -t, t).

    That is base + w delta with w = min(1, t / |delta|), as it was published, at every delta != 0.
    mergekit divides by max(|delta|, 1e-6) instead, which differs, by less than 1e-6, only for
    t < 1e-6. t 0 is the base; ValueError for a negative t, which mergekit takes for 0.

    >>> nearswap([{"a": jnp.array([0.25, -2.0])}], {"a": jnp.zeros(2)}, t=0.5)["a"].tolist()
    [0.25, -0.5]
    """
    check_scalar("t", t, lambda t: np.isfinite(t) & (t >= 0), "a finite number >= 0")
    rule = Leafwise(Partial(_near, jnp.asarray(t, jnp.result_type(float))))
    return Expression(total, rule, models=(1, 1))


def _near(t: Array, place: Place, delta: Array, weight: Array) -> Votes:
    t = t.astype(delta.dtype)
    return jnp.clip(delta, -t, t), weight


@method
def ram(*, key: Array | None = None, epsilon: Scalar = 1e-5) -> Expression:
    """RAM (reinforced agent merging, arXiv 2601.13572): base + the mean, entry by entry, of the
    delta_k that are active, |delta_k| > epsilon; the base where none is.

    A lone active delta_k is taken whole, which is what the mean of one is. Weighted, the mean is
    sum_k w_k delta_k / sum_k w_k over the active. epsilon is absolute: entries tuned by less count
    as untouched, in models with deltas about 1e-5 most of them; 0 takes every change for active.

    >>> models = [{"a": jnp.array([1.0, 0.0])}, {"a": jnp.array([3.0, 4.0])}]
    >>> ram(models, {"a": jnp.zeros(2)})["a"].tolist()
    [2.0, 4.0]
    """
    return Expression(average, _active(epsilon))


def _active(epsilon: Scalar) -> Leafwise:
    check_scalar("epsilon", epsilon, lambda e: np.isfinite(e) & (e >= 0), "a finite number >= 0")
    return Leafwise(Partial(_take_active, jnp.asarray(epsilon, jnp.result_type(float))))


def _take_active(epsilon: Array, place: Place, delta: Array, weight: Array) -> Votes:
    return delta, jnp.where(jnp.abs(delta) > epsilon.astype(delta.dtype), weight, 0)


@method
def ramplus_tl(
    *,
    key: Array | None = None,
    epsilon: Scalar = 1e-5,
    r: Scalar = 0.1,
    alpha: Scalar = 0.2,
) -> Expression:
    """RAM+ (tensor-local; arXiv 2601.13572): `ram`, with what only one model changed amplified.

    A lone active delta_k is multiplied by lambda_k = 1 + r clip(rho_k, 0, alpha), where rho_k is
    the number of entries of the tensor that model k changed along with others, over the number
    that it changed alone (alpha where it changed none alone).

    >>> models = [{"a": jnp.array([1.0, 0.0])}, {"a": jnp.array([3.0, 4.0])}]
    >>> ramplus_tl(models, {"a": jnp.zeros(2)}, r=1.0, alpha=0.5)["a"].tolist()
    [2.0, 6.0]
    """
    finite = lambda x: np.isfinite(x) & (x >= 0)  # noqa: E731
    check_scalar("r", r, np.isfinite, "a finite number")
    check_scalar("alpha", alpha, finite, "a finite number >= 0")
    args = jnp.asarray(r, jnp.float32), jnp.asarray(alpha, jnp.float32)

    def then(counts: tuple[selection.Wide, selection.Wide], size: int) -> Rule:
        return Leafwise(Partial(_amplify, *args, *counts))

    return Expression(average, chain(_active(epsilon), Each(Fold(Partial(_overlap), then, _pair))))


def _pair(a: Any, b: Any) -> tuple[selection.Wide, selection.Wide]:
    return selection.add(a[0], b[0]), selection.add(a[1], b[1])


def _company(delta: Array, weight: Array) -> tuple[Array, Array]:
    """Who votes at an entry, and how many."""
    votes = jnp.broadcast_to(weight != 0, delta.shape)
    return votes, tally(votes.astype(jnp.int32))


def _overlap(place: Place, delta: Array, weight: Array) -> tuple[selection.Wide, selection.Wide]:
    # padding is of zero deltas, which are not active
    votes, many = _company(delta, weight)
    axes = range(1, delta.ndim)
    return tuple(selection.occurrences(votes & n, axes) for n in (many > 1, many == 1))  # type: ignore[return-value]


def _amplify(
    r: Array,
    alpha: Array,
    shared: selection.Wide,
    unique: selection.Wide,
    place: Place,
    delta: Array,
    weight: Array,
) -> Votes:
    together, alone = (n.hi.astype(jnp.float32) * 65536 + n.lo for n in (shared, unique))
    rho = jnp.where(alone > 0, together / jnp.maximum(alone, 1), alpha)
    gain = per_model(1 + r * jnp.clip(rho, 0, alpha), delta)
    _, many = _company(delta, weight)
    return jnp.where(many == 1, gain * delta, delta), weight


@method
def sce(
    *,
    key: Array | None = None,
    select_topk: float = 1.0,
    tie: Tie | None = None,
    compat: Compat = "paper",
) -> Expression:
    """SCE (FuseChat, Wan et al. 2024), per tensor: select, calculate, erase.

    1. of the entries whose delta_k vary over the models keep the fraction `select_topk` of largest
       variance (rounded down; 1, the default, keeps every entry, varying or not);
    2. c_k = sum over the tensor of delta_k^2 over that of all models;
    3. per entry elect the sign of sum_k delta_k; base + sum_k c_k delta_k / sum_k c_k over the k of
       that sign.

    Below select_topk 1, entries in which all models agree have no variance and are the base's, so a
    tensor that is the same in all models is (there, mergekit writes a tensor with one axis too
    many). Equal variances rank by position. Weights multiply c_k; deltas of any size have their
    c_k, which are equal where all deltas are 0.

    mergekit (`compat="mergekit"`) takes equal c_k where sum_k mean(delta_k^2) < 1e-6, which is
    an absolute threshold: deltas of usual size (2e-4) lose step 2. It elects + where the sum is 0,
    and divides by at least 1e-6.
    """
    paper = default(compat)
    known = concrete(select_topk)
    if known is None:
        raise TypeError("select_topk: expected a static number, got a traced one")
    check_scalar("select_topk", select_topk, lambda k: (k > 0) & (k <= 1), "a number in (0, 1]")
    select = everybody if known == 1 else _select(float(known))
    floor = 1e-6 if compat == "mergekit" else 0.0
    erase = elect("mass", paper(tie, "abstain", "positive"))
    count = Leafwise(Partial(_floored, jnp.float32(floor))) if floor else average
    return Expression(count, chain(select, _calculate(floor), erase))


def _select(part: float) -> Rule:
    keys = Partial(_spread)

    def ranks(size: int, varying: selection.Wide) -> list[selection.Wide]:
        return [fraction(part, varying)]

    def keep(found: list[Found], size: int) -> Rule:
        kernel = Partial(_varying, found[0][0])
        return placed(keys, found, lambda cuts: Leafwise(kernel, cuts))

    return Each(order_statistics(keys, ranks, keep, nonzero=True, after=1))


def _spread(place: Place, delta: Array, weight: Array) -> UInt[Array, "1 ..."]:
    """The variance over models as a sum over pairs: exactly 0 where they are equal."""
    delta = jnp.where(weight != 0, delta, 0)
    pairs = [delta[i] - delta[j] for i in range(len(delta)) for j in range(i)]
    spread = sum((x * x for x in pairs), jnp.zeros_like(delta[0])) / len(delta) ** 2
    return selection.magnitude(spread[None], jnp.ones_like(spread[None]))


def _varying(
    threshold: Array, cut: selection.Cut, place: Place, delta: Array, weight: Array
) -> Votes:
    keys = _spread(place, delta, weight)
    return delta, standing(selection.take(keys, threshold, cut), weight)


def _calculate(floor: float) -> Rule:
    def then(energy: Votes, size: int) -> Rule:
        return Leafwise(Partial(_weigh, *energy, jnp.float32(size), jnp.float32(floor)))

    return Each(Fold(Partial(_energy), then, _add_energies))


def _energy(place: Place, delta: Array, weight: Array) -> Votes:
    """sum of delta_k^2 as `most**2 * rest`, which neither overflows nor underflows."""
    size = jnp.where(weight != 0, jnp.abs(delta), 0)
    axes = range(1, delta.ndim)
    most = lax.stop_gradient(size.max(axes, initial=0))
    rest = jnp.square(size / per_model(jnp.where(most > 0, most, 1), delta)).sum(axes)
    return most, rest


def _add_energies(a: Votes, b: Votes) -> Votes:
    most = jnp.maximum(a[0], b[0])
    safe = jnp.where(most > 0, most, 1)
    return most, jnp.square(a[0] / safe) * a[1] + jnp.square(b[0] / safe) * b[1]


def _weigh(
    most: Array, rest: Array, size: Array, floor: Array, place: Place, delta: Array, weight: Array
) -> Votes:
    top = most.max()
    c = jnp.square(most / jnp.where(top > 0, top, 1)) * rest
    mass = c.sum()
    uniform = (mass == 0) | (jnp.square(top) * mass / size < floor)
    c = jnp.where(uniform, 1 / len(delta), c / jnp.where(uniform, 1, mass))
    return delta, weight * per_model(c, delta)


def _floored(floor: Array, place: Place, delta: Array, weight: Array) -> Array:
    return tally(weight * delta) / jnp.maximum(tally(weight), floor)


@method
def arcee_fusion(*, key: Array | None = None) -> Expression:
    """Arcee Fusion: of one model, take the entries that matter; the base elsewhere.

    The importance of an entry is |delta| KL(softmax(theta) || softmax(base)), softmaxes over the
    last axis (of a vector: all of it) with 1e-8 added to each probability. Taken are the entries of
    importance >= median + 1.5 (third - first quartile) over the tensor, quartiles being the
    entries of rank floor(q (n - 1)) in ascending order, from 0.

    Exact at any size; mergekit, whose method it is, estimates the quartiles of tensors above 1e6
    entries from a random sample, and writes float32 whatever the dtype. A divergence that rounding
    makes negative counts as 0. Where three quarters of the importances are 0 so is the threshold,
    and the whole model is taken.
    """
    keys = Partial(_importances)

    def quartiles(size: int) -> list[selection.Wide]:
        return [selection.wide(size - q * (size - 1) // 4) for q in (1, 2, 3)]

    def then(found: list[Found], size: int) -> Count:
        low, median, high = (_value(bits)[0] for bits, _ in found)
        return Leafwise(Partial(_fuse, median + 1.5 * (high - low)), grain="row")

    count = Each(order_statistics(keys, quartiles, then, "row"))
    return Expression(count, base="votes", models=(1, 1))


def _importance(delta: Array) -> Float[Array, "..."]:
    """delta: base and model, [2, ...]."""
    rows = delta[..., None] if delta.ndim == 1 else delta
    q, p = jax.nn.softmax(rows, axis=-1) + 1e-8
    divergence = jnp.maximum((p * jnp.log(p / q)).sum(-1, keepdims=True), 0)
    return (jnp.abs(rows[1] - rows[0]) * divergence).reshape(delta.shape[1:])


def _importances(place: Place, delta: Array, weight: Array) -> UInt[Array, "1 ..."]:
    size = _importance(delta)[None]
    return selection.magnitude(size, jnp.ones_like(size))


def _fuse(threshold: Array, place: Place, delta: Array, weight: Array) -> Array:
    taken = lax.stop_gradient(_importance(delta)) >= threshold.astype(delta.dtype)
    return jnp.where(taken, delta[1], delta[0])


def _value(bits: UInt[Array, "..."]) -> Float[Array, "..."]:
    return lax.bitcast_convert_type(bits, jnp.result_type(float))


@method
def pcb(*, key: Array | None = None, ratio: float = 0.1, scale: Scalar = 1.0) -> Expression:
    """PCB-Merging (Du et al. 2024): parameters compete within a task and across tasks.

    Over the whole tree, for each of M models:
    1. a_k = |delta_k| clamped between its 1e-4 and 1 - 1e-4 quantiles, and s_k = minmax(a_k) in
       [0, 1];
    2. the score exp(M s_k^2) tanh(delta_k sum_j delta_j), balancing within and across tasks;
    3. b_k = minmax of the scores clamped to the largest fraction `ratio` of them: 0 for all others.
    base + scale * sum_k w_k b_k sign(delta_k) a_k / sum_k b_k; where no b_k > 0, the base.

    The authors use ratio 0.05 to 0.2 and scale about 1.2, or weights (their lambda_k) by evolution.
    Where all a_k are equal s_k is 1, where all that compete are equal b_k is 1 (there, their code
    gives NaN). Quantiles are the entries floor(n / 1e4) from either end, in their code the upper
    one is one further; they are constants to `grad`.
    """
    check_scalar("ratio", ratio, lambda r: (r > 0) & (r <= 1), "a number in (0, 1]")
    known = concrete(ratio)
    if known is None:
        raise TypeError("ratio: expected a static number, got a traced one")
    part = float(known)

    def ends(size: int) -> list[selection.Wide]:
        cut = size // 10000
        return [selection.wide(rank) for rank in (size - cut, 1 + cut)]

    def clamped(found: list[Found], size: int) -> Count:
        bounds = tuple(_value(bits) for bits, _ in found)

        def best(size: int) -> list[selection.Wide]:
            kept = size - int(size * (1 - part))
            return [selection.wide(rank) for rank in (min(max(kept, 1), size), 1)]

        def then(found: list[Found], size: int) -> Count:
            limits = tuple(_unordered(bits) for bits, _ in found)
            return Leafwise(Partial(_compete, *bounds, *limits))

        return order_statistics(Partial(_scores, *bounds), best, then)  # type: ignore[return-value]

    digits = selection.start()[1] // 16 + 1
    count = order_statistics(Partial(magnitudes), ends, clamped, after=digits)
    return Expression(count, scale=scale)  # type: ignore[arg-type]


def _score(least: Array, most: Array, delta: Array, weight: Array) -> tuple[Array, Array]:
    """The clamped deltas and their scores, times exp(-M), which cancels and cannot overflow."""
    delta = jnp.where(weight != 0, delta, 0)
    least, most = per_model(least, delta), per_model(most, delta)
    size, differ = jnp.clip(jnp.abs(delta), least, most), most > least
    within = jnp.where(differ, (size - least) / jnp.where(differ, most - least, 1), 1)
    score = jnp.exp(len(delta) * (within**2 - 1)) * jnp.tanh(delta * tally(delta))
    return jnp.sign(delta) * size, score


def _scores(
    least: Array, most: Array, place: Place, delta: Array, weight: Array
) -> UInt[Array, "task ..."]:
    return _ordered(lax.stop_gradient(_score(least, most, delta, weight)[1]))


def _compete(
    least: Array,
    most: Array,
    low: Array,
    high: Array,
    place: Place,
    delta: Array,
    weight: Array,
) -> Array:
    votes, score = _score(least, most, delta, weight)
    low, high = per_model(low, delta), per_model(high, delta)
    differ = high > low
    balance = (jnp.clip(score, low, high) - low) / jnp.where(differ, high - low, 1)
    balance = jnp.where(differ, balance, score >= low)
    mass = tally(balance)
    won = mass > 0
    return jnp.where(won, tally(weight * balance * votes) / jnp.where(won, mass, 1), 0)


def _ordered(x: Float[Array, "..."]) -> UInt[Array, "..."]:
    """Floats of both signs as unsigned integers in the same order."""
    bits = lax.bitcast_convert_type(x.astype(jnp.result_type(float)), selection.start()[0].dtype)
    sign = jnp.asarray(1 << 8 * bits.dtype.itemsize - 1, bits.dtype)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _unordered(key: UInt[Array, "..."]) -> Float[Array, "..."]:
    sign = jnp.asarray(1 << 8 * key.dtype.itemsize - 1, key.dtype)
    return _value(jnp.where(key >= sign, key ^ sign, ~key))
