"""Methods that merge each entry by itself, or with a few statistics of its tensor or tree.

Here are SCE, RAM, MagMax, NearSwap, Arcee Fusion, PCB, ExPO and passthrough. Methods that mask task
vectors and then add them up are in `sparse`.
"""

import functools
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, UInt

from sail_jax.checks import scalar, static
from sail_jax.merging import counting, ranking
from sail_jax.merging.arithmetic import (
    Products,
    add_products,
    beside,
    common_unit,
    computed_once,
    number,
    task_sum,
    unit_of,
    units_of,
)
from sail_jax.merging.combining import Transform, chain, reduce, transform
from sail_jax.merging.counting import Wide
from sail_jax.merging.merge import Merge
from sail_jax.merging.ranking import MAGNITUDES, Bound, Earlier, Order
from sail_jax.merging.reductions import weighted_mean
from sail_jax.merging.steps import Fold, Kernel, Piece, kernel
from sail_jax.merging.transforms import TieSign, Vectors, elect, mask
from sail_jax.methods.registry import DENSITY, Compat, Range, Scale, choose, method

Scalar = Float[ArrayLike, ""]


@method
def passthrough(*, scale: Scalar = 1.0) -> Merge:
    """Multiplies the one model that is given by a number.

    The result is scale * theta. Leaves that are not floating are copied, not scaled.

    Args:
      scale: What multiplies the model; a finite number, which may be traced.

    Returns:
      A merge of exactly one model. It needs no base; one given only decides the output's dtypes.

    Raises:
      ValueError: Unless `scale` is a finite number.

    >>> passthrough(scale=0.5)([{"a": 3.0}])
    {'a': Array(1.5, dtype=float32)}
    """
    return Merge(scale=scale, base="unused", models=(1, 1))


@method
def expo(*, alpha: Scalar = 0.1) -> Merge:
    """Extrapolates from the base through the one model to a point beyond it (ExPO).

    The result is theta + alpha (theta - base). The base is the weaker model (before alignment), the
    model the stronger one. alpha = 0 gives the model, alpha = -1 the base.

    Args:
      alpha: How far to go beyond the model, as a fraction of its distance from the base. The
        authors choose it from 0.1 to 0.5 on held-out data.

    Returns:
      A merge of exactly one model, which needs a base.

    Raises:
      ValueError: Unless `alpha` is a finite number.

    References:
      Zheng et al., Model Extrapolation Expedites Alignment, 2024 (arXiv 2404.16792), Sec. 3.

    >>> expo(alpha=0.5)([{"a": 3.0}], {"a": 1.0})
    {'a': Array(4., dtype=float32...)}
    """
    scalar("alpha", alpha, np.isfinite, "a finite number")
    return Merge(scale=1 + number(alpha), models=(1, 1))


@method
def magmax(*, scale: Scale = 1.0) -> Merge:
    """Keeps, for each entry, the one change that is largest in magnitude (MagMax).

    The result is base + scale * w_j delta_j, where j is the model whose |w_j delta_j| is largest at
    that entry. Where magnitudes are equal, the later model's change is taken. So the order of
    models matters only where changes of equal magnitude have different signs.

    Args:
      scale: What multiplies the change; the authors, and fusion_bench, use 0.5.

    Returns:
      A merge of one or more models, which needs a base.

    Raises:
      ValueError: Unless `scale` is a finite number.

    References:
      Marczak et al., MagMax, 2024 (arXiv 2407.06322), Sec. 4.

    >>> magmax()([{"a": 3.0}, {"a": -4.0}], {"a": 0.0})
    {'a': Array(-4., dtype=float32)}
    """
    return Merge(reduction=reduce(kernel(_largest)), scale=scale)


def _largest(piece: Piece, delta: Array, weight: Array) -> Array:
    """The weighted delta of largest magnitude at each entry; of equal ones the later model's."""
    weighted = weight * delta
    # >= and not >: of equal magnitudes the later one is taken.
    later = lambda a, b: jnp.where(jnp.abs(b) >= jnp.abs(a), b, a)  # noqa: E731
    return functools.reduce(later, [weighted[k] for k in range(len(weighted))])


@method
def nearswap(*, t: Scalar) -> Merge:
    """Moves the base towards the one model, by at most `t` in each entry (NearSwap).

    The result is base + clip(delta, -t, t). For every delta != 0 this equals what was published,
    base + w delta with w = min(1, t / |delta|). mergekit divides by max(|delta|, 1e-6) instead,
    which differs, by less than 1e-6, only for t < 1e-6.

    Args:
      t: The largest change of an entry, not negative; 0 gives the base. (mergekit takes a negative
        t for 0.)

    Returns:
      A merge of exactly one model, which needs a base.

    Raises:
      ValueError: Unless `t` is a finite number >= 0.

    References:
      alchemonaut, QuartetAnemoi, 2024.

    >>> nearswap(t=0.5)([{"a": jnp.array([0.25, -2.0])}], {"a": jnp.zeros(2)})["a"].tolist()
    [0.25, -0.5]
    """
    scalar("t", t, lambda t: np.isfinite(t) & (t >= 0), "a finite number >= 0")
    return Merge(transform(kernel(_clip, number(t))), models=(1, 1))


def _clip(t: Array, piece: Piece, delta: Array, weight: Array) -> Vectors:
    """The deltas limited to [-t, t]."""
    t = jnp.asarray(t, delta.dtype)
    return jnp.clip(delta, -t, t), weight


@method
def ram(*, epsilon: Scalar = 1e-5) -> Merge:
    """Averages, for each entry, the changes of the models that changed it (RAM).

    A model is active at an entry if |delta_k| > epsilon. Over the active models, the result is

        base + sum_k w_k delta_k / sum_k w_k

    and where there are none it is the base. If only one model is active, its change is taken whole.

    Args:
      epsilon: Changes of at most this magnitude count as none. It is absolute: in models whose
        deltas are about 1e-5, the default ignores most of them. 0 takes every change into account.

    Returns:
      A merge of one or more models, which needs a base.

    Raises:
      ValueError: Unless `epsilon` is a finite number >= 0.

    References:
      Reinforced agent merging, 2026 (arXiv 2601.13572), Sec. 3.

    >>> models = [{"a": jnp.array([1.0, 0.0])}, {"a": jnp.array([3.0, 4.0])}]
    >>> ram()(models, {"a": jnp.zeros(2)})["a"].tolist()
    [2.0, 4.0]
    """
    return Merge(_active(epsilon), weighted_mean)


def _active(epsilon: Scalar) -> Transform:
    """The transform that masks every entry with |delta| <= epsilon."""
    scalar("epsilon", epsilon, lambda e: np.isfinite(e) & (e >= 0), "a finite number >= 0")
    return transform(kernel(_mask_inactive, number(epsilon)))


def _mask_inactive(epsilon: Array, piece: Piece, delta: Array, weight: Array) -> Vectors:
    return delta, jnp.where(jnp.abs(delta) > jnp.asarray(epsilon, delta.dtype), weight, 0)


@method
def ramplus_tl(
    *,
    epsilon: Scalar = 1e-5,
    r: Annotated[Scalar, Range(0.0, 0.5)] = 0.1,
    alpha: Annotated[Scalar, Range(0.0, 1.0)] = 0.2,
) -> Merge:
    """Averages changes as `ram` does, and amplifies those that only one model made (RAM+).

    Where exactly one model k is active, its change is multiplied by the factor

        lambda_k = 1 + r clip(rho_k, 0, alpha)

    Here rho_k is a ratio of counts over the tensor ("TL" is tensor-local): how many entries model k
    changed along with other models, over how many it changed alone. If it changed none alone, rho_k
    is alpha.

    Args:
      epsilon: Changes of at most this magnitude count as none; see `ram`.
      r: How strongly changes of one model are amplified.
      alpha: The largest ratio rho that counts, not negative.

    Returns:
      A merge of one or more models, which needs a base.

    Raises:
      ValueError: Unless all three are finite numbers, and `epsilon` and `alpha` not negative.

    References:
      Reinforced agent merging, 2026 (arXiv 2601.13572), Sec. 3.

    >>> models = [{"a": jnp.array([1.0, 0.0])}, {"a": jnp.array([3.0, 4.0])}]
    >>> ramplus_tl(r=1.0, alpha=0.5)(models, {"a": jnp.zeros(2)})["a"].tolist()
    [2.0, 6.0]
    """
    scalar("r", r, np.isfinite, "a finite number")
    scalar("alpha", alpha, lambda a: np.isfinite(a) & (a >= 0), "a finite number >= 0")
    changed = Fold(kernel(_shared_and_alone), add=counting.add)
    amplified = transform(kernel(_amplify, number(r), number(alpha)), changed)
    return Merge(chain(_active(epsilon), amplified), weighted_mean)


def _active_models(delta: Array, weight: Array) -> tuple[Array, Array]:
    """Which models are active (not masked) at an entry, `[task, ...]`, and how many, `[...]`."""
    active = jnp.broadcast_to(weight != 0, delta.shape)
    return active, task_sum(active.astype(jnp.int32))


def _shared_and_alone(piece: Piece, delta: Array, weight: Array) -> tuple[Wide, Wide]:
    """For each model, how many entries it changed along with others, and how many alone."""
    # Padding is of zero deltas, which are not active.
    active, count = _active_models(delta, weight)
    return counting.occurrences(active & (count > 1)), counting.occurrences(active & (count == 1))


def _amplify(
    r: Array, alpha: Array, counts: tuple[Wide, Wide], piece: Piece, delta: Array, weight: Array
) -> Vectors:
    """Multiplies the changes that one model made alone by its lambda_k."""
    # Counts are hi * 2**16 + lo (`counting.Wide`); their ratio needs no more than float32.
    shared, alone = (n.hi.astype(jnp.float32) * 65536 + n.lo.astype(jnp.float32) for n in counts)
    r, alpha = (jnp.asarray(x, jnp.float32) for x in (r, alpha))
    rho = jnp.where(alone > 0, shared / jnp.maximum(alone, 1), alpha)
    gain = beside(1 + r * jnp.clip(rho, 0, alpha), delta)
    _, count = _active_models(delta, weight)
    return jnp.where(count == 1, gain * delta, delta), weight


@method
def sce(
    *,
    select_topk: Annotated[float, DENSITY] = 1.0,
    tie: TieSign | None = None,
    compat: Compat = "paper",
) -> Merge:
    """Averages the entries that vary most, with weights by energy and elected signs (SCE).

    For each tensor by itself:

    1. Select: among the entries whose delta_k differ between models, the fraction `select_topk` of
       largest variance is kept, rounded down. Equal variances rank by position. With 1, the
       default, every entry is kept, whether it varies or not.
    2. Calculate: model k gets the coefficient c_k = sum delta_k^2 / sum_j sum delta_j^2, summed
       over the kept entries of the tensor. Where all deltas are 0, the coefficients are equal. The
       weights w_k multiply them.
    3. Erase: for each entry the sign of sum_k delta_k is elected. The result is
       base + sum_k c_k delta_k / sum_k c_k over the models with that sign.

    With select_topk < 1, entries in which all models agree have no variance and become the base's.
    So does a whole tensor that is the same in all models (where mergekit writes a tensor with one
    axis too many).

    Args:
      select_topk: In (0, 1], static.
      tie: What is elected where the sum of step 3 is exactly 0; "none" by default, see `elect`.
      compat: "mergekit" differs in three ways. It takes equal c_k where
        sum_k mean(delta_k^2) < 1e-6, an absolute threshold under which deltas of usual size (2e-4)
        lose step 2. It elects + where the sum is 0. It divides by at least 1e-6.

    Returns:
      A merge of one or more models, which needs a base.

    Raises:
      ValueError: If `select_topk` lies outside (0, 1], or for another `tie` or `compat`.
      TypeError: If `select_topk` is traced.

    References:
      Wan et al., FuseChat, 2024 (arXiv 2408.07990), Sec. 3.3.

    >>> models = [{"a": jnp.array([3.0, 1.0])}, {"a": jnp.array([3.0, -1.0])}]
    >>> sce()(models, {"a": jnp.zeros(2)})["a"].tolist()  # the second entries cancel: no sign
    [3.0, 0.0]
    """
    default = choose(compat)
    fraction = static("select_topk", select_topk, lambda k: 0 < k <= 1, "a number in (0, 1]")
    select = Transform() if fraction == 1 else _most_varying(fraction)
    floor = 1e-6 if compat == "mergekit" else 0.0
    energies = Fold(kernel(_energy), kernel(_beside_size), add_products, sized=kernel(np.float32))
    calculate = transform(kernel(_weigh, np.float32(floor)), energies)
    erase = elect("mass", default(tie, "none", "positive"))
    mean = reduce(kernel(_floored_mean, np.float32(floor))) if floor else weighted_mean
    return Merge(chain(select, calculate, erase), mean)


def _most_varying(part: float) -> Transform:
    """The transform that keeps a fraction of the varying entries, those of largest variance."""
    varying = Fold(kernel(_count_varying), add=_add_varying)
    rank = kernel(_rank_of_part, counting.fraction(part))
    # One ranking for all models, of variances: the mask is the same for each of them.
    order = Order(kernel(_variance_keys), ranks=rank, tasks=1, ties=True)
    return transform(kernel(_keep_varying), varying, order)


def _differences(delta: Array, weight: Array) -> list[Array]:
    """The differences between every two models."""
    delta = jnp.where(weight != 0, delta, 0)
    return [delta[i] - delta[j] for i in range(len(delta)) for j in range(i)]


Varying = tuple[Wide, Array]
"""How many entries vary over the models, and the unit in which their differences are measured."""


def _count_varying(piece: Piece, delta: Array, weight: Array) -> Varying:
    """How many entries of a piece vary, and how much."""
    pairs = _differences(delta, weight)
    # Padding is of equal deltas, which do not vary.
    varies = functools.reduce(jnp.logical_or, [x != 0 for x in pairs], delta[0] != delta[0])
    units = units_of(pairs) if pairs else jnp.ones(1, delta.dtype)
    return counting.occurrences(varies[None]), units.max()


def _add_varying(a: Varying, b: Varying) -> Varying:
    return counting.add(a[0], b[0]), common_unit(a[1], b[1])[0]


def _variance_keys(
    varying: Varying, piece: Piece, delta: Array, weight: Array
) -> UInt[Array, "1 ..."]:
    """The variances as unsigned integers in the same order, for `ranking`.

    As a sum over pairs a variance is 0 only where all models are equal.
    """

    def variances() -> Array:
        unit = varying[1].astype(delta.dtype)
        pairs = [x * (1 / unit) for x in _differences(delta, weight)]
        return sum((x * x for x in pairs), jnp.zeros_like(delta[0]))[None] / len(delta) ** 2

    # What counts keys and what takes them have to see the same ones. Fused with either, the sums
    # would be rounded in different ways.
    variance = computed_once(variances, weight)
    return ranking.magnitude(variance, jnp.ones_like(variance))


def _rank_of_part(fraction: Kernel, varying: Varying) -> tuple[Wide, ...]:
    """The rank of the last entry that is kept: a fraction of the number of varying entries."""
    return (fraction(varying[0]),)


def _keep_varying(
    varying: Varying, thresholds: tuple[Bound], before: tuple[Earlier],
    piece: Piece, delta: Array, weight: Array,
) -> Vectors:  # fmt: skip
    """Masks all entries whose variance ranks behind the threshold."""
    keys = _variance_keys(varying, piece, delta, weight)
    return delta, mask(ranking.take(keys, thresholds[0], before[0]), weight)


def _energy(piece: Piece, delta: Array, weight: Array) -> Products:
    """The sum of delta_k^2 of each model."""
    size = jnp.where(weight != 0, jnp.abs(delta), 0)
    axes = range(1, delta.ndim)
    # Not a power of two, as no product of two models has to be exact.
    most = lax.stop_gradient(size.max(axes, initial=0))
    rest = jnp.square(size / beside(jnp.where(most > 0, most, 1), delta)).sum(axes)
    return Products(most[:, None], rest[:, None, None])


def _beside_size(size: Array, energy: Products) -> tuple[Products, Array]:
    """An energy together with the number of entries that it was summed over."""
    return energy, jnp.asarray(size)


def _weigh(
    floor: Array, energy: tuple[Products, Array], piece: Piece, delta: Array, weight: Array
) -> Vectors:
    """Multiplies the weights by c_k, or by equal ones if the mean energy is below `floor`."""
    (most, rest), size = energy
    most, rest = most[:, 0], rest[:, 0, 0]
    top = most.max()
    # Energies relative to the largest model's: their ratios are what counts, and nothing overflows.
    c = jnp.square(most / jnp.where(top > 0, top, 1)) * rest
    mass = c.sum()
    # mergekit compares the mean energy with 1e-6; without its convention `floor` is 0.
    uniform = (mass == 0) | (jnp.square(top) * mass / size < floor)
    c = jnp.where(uniform, 1 / len(delta), c / jnp.where(uniform, 1, mass))
    return delta, weight * beside(c, delta)


def _floored_mean(floor: Array, piece: Piece, delta: Array, weight: Array) -> Array:
    """The weighted mean with a divisor of at least `floor`, as mergekit computes it."""
    return task_sum(weight * delta) / jnp.maximum(task_sum(weight), floor)


@method
def arcee_fusion() -> Merge:
    """Takes the entries that the one model changed most, and the base elsewhere (Arcee Fusion).

    The importance of an entry is |delta| KL(softmax(theta) || softmax(base)). The softmaxes are
    over the last axis (over all of a vector), and 1e-8 is added to each probability. The model's
    entry is taken where the importance is at least median + 1.5 (third quartile - first quartile)
    over the tensor. The i-th quartile is the importance with index floor(i (n - 1) / 4), from 0,
    when the n importances of the tensor are in ascending order. Softmaxes depend on the scale of
    parameters: if all models are multiplied by a number, other entries may be taken.

    This is exact at any size. mergekit, whose method it is, estimates the quartiles of tensors
    above 1e6 entries from a random sample, and writes float32 whatever the dtype. A divergence that
    rounding makes negative counts as 0. Where three quarters of the importances are 0, the
    threshold is 0 and the whole tensor of the model is taken.

    Returns:
      A merge of exactly one model, which needs a base.

    References:
      Arcee AI, mergekit 0.1.4, method `arcee_fusion`.

    >>> base = {"a": jnp.zeros(6)}
    >>> model = {"a": jnp.array([1e-3, 0.0, 1e-3, 0.0, 1e-3, 5.0])}
    >>> arcee_fusion()([model], base)["a"].tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 5.0]
    """
    order = Order(kernel(_importance_keys), sized=kernel(_quartile_ranks), tasks=1)
    return Merge(reduction=reduce(kernel(_fuse), order, needs="row"), base="merged", models=(1, 1))


def _quartile_ranks(size: int) -> tuple[Wide, ...]:
    """The ranks, counted from the largest as 1, of the first quartile, the median and the third."""
    return tuple(counting.wide(size - q * (size - 1) // 4) for q in (1, 2, 3))


def _importance(delta: Array) -> Float[Array, "..."]:
    """The importance of each entry, `[...]`, given base and model as `[2, ...]`."""
    rows = delta[..., None] if delta.ndim == 1 else delta
    # With `base="merged"` the first entry is the base, and the "deltas" are the parameters
    # themselves.
    q, p = jax.nn.softmax(rows, axis=-1) + 1e-8
    divergence = jnp.maximum((p * jnp.log(p / q)).sum(-1, keepdims=True), 0)
    return (jnp.abs(rows[1] - rows[0]) * divergence).reshape(delta.shape[1:])


def _importance_keys(piece: Piece, delta: Array, weight: Array) -> UInt[Array, "1 ..."]:
    """The importances as unsigned integers in the same order, for `ranking`."""
    size = _importance(delta)[None]
    return ranking.magnitude(size, jnp.ones_like(size))


def _fuse(quartiles: tuple[Bound, ...], piece: Piece, delta: Array, weight: Array) -> Array:
    """The model's entry where its importance reaches the threshold, the base's elsewhere."""
    low, median, high = (ranking.float_of_key(quartile.key)[0] for quartile in quartiles)
    threshold = median + 1.5 * (high - low)
    # A choice has no gradient; which entries are taken counts as constant.
    taken = lax.stop_gradient(_importance(delta)) >= threshold.astype(delta.dtype)
    return jnp.where(taken, delta[1], delta[0])


@method
def pcb(*, ratio: Annotated[float, Range(0.02, 0.5)] = 0.1, scale: Scale = 1.0) -> Merge:
    """Merges the entries that win a competition within and between tasks (PCB-Merging).

    For each of the M models, over the whole tree:

    1. a_k = |delta_k|, clamped between its quantiles of 1e-4 and 1 - 1e-4. s_k is a_k rescaled
       linearly to [0, 1].
    2. The score of an entry is exp(M s_k^2) tanh(delta_k sum_j delta_j). Its first factor compares
       the entry with others of its own task, the second with the same entry of the other tasks.
       The tanh is an absolute scale: products of deltas above 1 count about the same. Those of
       deltas below 1e-6 are compared as they are.
    3. b_k is 0 for all but the fraction `ratio` of largest scores, which are rescaled linearly to
       [0, 1].

    The result is base + scale * sum_k w_k b_k sign(delta_k) a_k / sum_k b_k, and the base where no
    b_k > 0.

    Where all a_k are equal, s_k is 1. Where all scores that compete are equal, b_k is 1 (the
    authors' code gives NaN in both cases). The quantiles are the entries floor(n / 10000) places
    from either end of the n magnitudes; in the authors' code the upper one lies one place further.

    `grad` treats four numbers for each model as constants: both quantiles, and the least and the
    largest score that compete. So it is the derivative for all entries but those that set them.

    Args:
      ratio: In (0, 1], static; the authors use 0.05 to 0.2.
      scale: What multiplies the update. The authors use about 1.2, or weights (their lambda_k)
        found by an evolutionary search.

    Returns:
      A merge of one or more models, which needs a base.

    Raises:
      ValueError: If `ratio` lies outside (0, 1], or `scale` is not finite.
      TypeError: If `ratio` is traced.

    References:
      Du et al., Parameter Competition Balancing, 2024 (arXiv 2410.02396), Sec. 3.
    """
    fraction = static("ratio", ratio, lambda r: 0 < r <= 1, "a number in (0, 1]")
    bounds = Order(MAGNITUDES, sized=kernel(_quantile_ranks))
    limits = Order(kernel(_score_keys), sized=kernel(_best_ranks, fraction))
    return Merge(reduction=reduce(kernel(_compete), bounds, limits, scope="tree"), scale=scale)


LINEAR = 2.0**-20
"""tanh(x y) is x y, to rounding, if both are below twice this, for up to 2^10 models."""


def _quantile_ranks(size: int) -> tuple[Wide, ...]:
    """The ranks, from the largest as 1, of the upper and the lower quantile of n entries."""
    cut = size // 10000
    return counting.wide(size - cut), counting.wide(1 + cut)


def _best_ranks(part: float, size: int) -> tuple[Wide, ...]:
    """The rank of the least score that competes, and that of the largest."""
    count = size - int(size * (1 - part))
    return counting.wide(min(max(count, 1), size)), counting.wide(1)


def _score(bounds: tuple[Bound, ...], delta: Array, weight: Array) -> tuple[Array, Array]:
    """The clamped deltas and their scores, times a factor that cancels and cannot overflow."""
    delta = jnp.where(weight != 0, delta, 0)
    least, most = (beside(ranking.float_of_key(bound.key), delta) for bound in bounds)
    size, differ = _between(jnp.abs(delta), least, most), most > least
    within = jnp.where(differ, (size - least) / jnp.where(differ, most - least, 1), 1)
    total, unit = task_sum(delta), unit_of(most)
    # tanh(x) is x to rounding where all deltas are as small as this. There the products are taken
    # over the square of the unit, which would underflow, and which rescaling takes out as well.
    between = jnp.where(
        unit < LINEAR, delta * (1 / unit) * (total * (1 / unit)), jnp.tanh(delta * total)
    )
    # `within` is at most 1, so the exponent is at most 0. The factor exp(-M) is the same everywhere
    # and drops out when scores are rescaled to [0, 1].
    score = jnp.exp(len(delta) * (within**2 - 1)) * between
    return jnp.sign(delta) * size, score


def _between(x: Array, low: Array, high: Array) -> Array:
    """x limited to [low, high]; in contrast to `jnp.clip`, with the gradient 1 at both ends."""
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


def _score_keys(
    bounds: tuple[Bound, ...], piece: Piece, delta: Array, weight: Array
) -> UInt[Array, "task ..."]:
    """The scores as unsigned integers in the same order, for `ranking`."""
    return ranking.key_of_float(lax.stop_gradient(_score(bounds, delta, weight)[1]))


def _compete(
    bounds: tuple[Bound, ...],
    limits: tuple[Bound, ...],
    piece: Piece,
    delta: Array,
    weight: Array,
) -> Array:
    """The mean of the clamped deltas, weighted by b_k of `pcb`."""
    clamped, score = _score(bounds, delta, weight)
    low, high = (beside(ranking.float_of_key(limit.key, signed=True), delta) for limit in limits)
    # The score that sets `low` is computed here anew, in another program, whose exp and tanh may
    # round otherwise. It loses against itself, as does all that rounding cannot tell from it:
    # alone at its entry, a balance of 1e-7 in place of 0 would carry the whole update.
    rounding = 64 * jnp.finfo(score.dtype).eps * jnp.maximum(jnp.abs(low), jnp.abs(high))
    differ = high - low > rounding
    balance = (_between(score, low, high) - low) / jnp.where(differ, high - low, 1)
    balance = jnp.where(differ, balance * (score - low > rounding), score >= low - rounding)
    mass = task_sum(balance)
    won = mass > 0
    total = task_sum(weight * balance * clamped)
    return jnp.where(won, total / jnp.where(won, mass, 1), 0)
