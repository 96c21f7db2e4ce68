"""Methods that merge entry by entry, with at most a few statistics of the tensor or the tree.

This module contains SCE, RAM, MagMax, NearSwap, Arcee Fusion, PCB, ExPO and passthrough. Methods
that mask task vectors and then add them up are in `sparse`.
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
    """Multiplies a single model by a number.

    The result is scale * theta. Leaves that are not floating are copied and not scaled.

    Args:
      scale: The factor on the model, a finite number. It may be traced.

    Returns:
      A merge of exactly one model. A base is optional and only determines the output's dtypes.

    Raises:
      ValueError: Unless `scale` is a finite number.

    >>> passthrough(scale=0.5)([{"a": 3.0}])
    {'a': Array(1.5, dtype=float32)}
    """
    return Merge(scale=scale, base="unused", models=(1, 1))


@method
def expo(*, alpha: Scalar = 0.1) -> Merge:
    r"""Extrapolates from the base through one model to a point beyond it (ExPO).

    .. math:: \theta = \theta_1 + \alpha (\theta_1 - \theta_0)

    The model is the stronger one, for example after preference training. The base is the weaker
    one, before that training. alpha = 0 gives the model and alpha = -1 gives the base.

    Args:
      alpha: The distance beyond the model, as a fraction of its distance from the base. The authors
        choose it between 0.1 and 0.5 on held-out data.

    Returns:
      A merge of exactly one model. It requires a base.

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
    r"""Keeps, for each entry, the change of largest magnitude (MagMax).

    .. math:: \theta = \theta_0 + \lambda w_j \delta_j, \qquad j = \arg\max_k |w_k \delta_k|

    The model j is chosen for each entry. Where magnitudes are equal, the later model wins. The
    order of the models therefore matters only where changes of equal magnitude have different
    signs.

    Args:
      scale: The factor :math:`\lambda` on the merged task vector. The authors and fusion_bench use
        0.5.

    Returns:
      A merge of one or more models. It requires a base.

    Raises:
      ValueError: Unless `scale` is a finite number.

    References:
      Marczak et al., MagMax, 2024 (arXiv 2407.06322), Sec. 4.

    >>> magmax()([{"a": 3.0}, {"a": -4.0}], {"a": 0.0})
    {'a': Array(-4., dtype=float32)}
    """
    return Merge(reduction=reduce(kernel(_largest)), scale=scale)


def _largest(piece: Piece, delta: Array, weight: Array) -> Array:
    """Returns the weighted delta of largest magnitude at each entry; the later model wins ties."""
    weighted = weight * delta
    # With >= the later model wins where magnitudes are equal.
    later = lambda a, b: jnp.where(jnp.abs(b) >= jnp.abs(a), b, a)  # noqa: E731
    return functools.reduce(later, jnp.unstack(weighted))


@method
def nearswap(*, t: Scalar) -> Merge:
    r"""Moves the base towards one model, by at most `t` in each entry (NearSwap).

    .. math:: \theta = \theta_0 + \operatorname{clip}(\delta, -t, t)

    The published form is :math:`\theta_0 + w \delta` with :math:`w = \min(1, t / |\delta|)`, which
    is equal wherever delta is not 0. mergekit divides by :math:`\max(|\delta|, 10^{-6})`. Its
    results differ by less than 1e-6, and only for t < 1e-6.

    Args:
      t: The largest change of an entry, at least 0. 0 gives the base. (mergekit treats a negative t
        as 0.)

    Returns:
      A merge of exactly one model. It requires a base.

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
    """Clips the deltas to [-t, t]."""
    t = jnp.asarray(t, delta.dtype)
    return jnp.clip(delta, -t, t), weight


@method
def ram(*, epsilon: Scalar = 1e-5) -> Merge:
    r"""Averages, for each entry, the changes of the models that changed it (RAM).

    A model is active at an entry if :math:`|\delta_k| > \epsilon`. The result is a mean over the
    set A of active models, and the base where no model is active:

    .. math:: \theta = \theta_0 + \frac{\sum_{k \in A} w_k \delta_k}{\sum_{k \in A} w_k}

    If only one model is active, its whole change is kept.

    Args:
      epsilon: The largest magnitude that counts as no change. This threshold is absolute. If a
        model's deltas are about 1e-5, the default ignores most of them. 0 counts every change.

    Returns:
      A merge of one or more models. It requires a base.

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
    """Makes a transform that masks every entry with |delta| <= epsilon."""
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
    r"""Averages changes as `ram` does, and amplifies changes that only one model made (RAM+).

    Where model k is the only active one, its change is multiplied by

    .. math:: \lambda_k = 1 + r \operatorname{clip}(\rho_k, 0, \alpha)

    :math:`\rho_k` is a ratio of two counts over the tensor ("TL" means tensor-local). It divides
    the number of entries that model k changed together with other models by the number that it
    changed alone. If model k changed no entry alone, :math:`\rho_k = \alpha`.

    Args:
      epsilon: The largest magnitude that counts as no change; see `ram`.
      r: The strength of the amplification.
      alpha: The upper limit of the ratio :math:`\rho_k`, at least 0.

    Returns:
      A merge of one or more models. It requires a base.

    Raises:
      ValueError: Unless all three are finite, `epsilon` >= 0 and `alpha` >= 0.

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
    """Returns the active (unmasked) models per entry, `[task, ...]`, and their number."""
    active = jnp.broadcast_to(weight != 0, delta.shape)
    return active, task_sum(active.astype(jnp.int32))


def _shared_and_alone(piece: Piece, delta: Array, weight: Array) -> tuple[Wide, Wide]:
    """Counts, for each model, the entries that it changed together with others, and alone."""
    # Padding consists of zero deltas, which are not active.
    active, count = _active_models(delta, weight)
    return counting.occurrences(active & (count > 1)), counting.occurrences(active & (count == 1))


def _amplify(
    r: Array, alpha: Array, counts: tuple[Wide, Wide], piece: Piece, delta: Array, weight: Array
) -> Vectors:
    """Multiplies the changes that one model made alone by its lambda_k."""
    # Counts are hi * 2**16 + lo (`counting.Wide`). float32 is sufficient for their ratio.
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
    r"""Averages the entries that vary most, with energy weights and elected signs (SCE).

    The three steps work on each tensor separately:

    1. Select. Among the entries that differ between models, the fraction `select_topk` of largest
       variance is kept. The number is rounded down, and equal variances rank by position. With
       `select_topk=1` (the default) every entry is kept, even if it does not vary.
    2. Calculate. Model k gets the coefficient
       :math:`c_k = \sum \delta_k^2 / \sum_j \sum \delta_j^2`, summed over the kept entries. If all
       deltas are 0, the coefficients are equal. The weights :math:`w_k` multiply the coefficients.
    3. Erase. The sign of :math:`\sum_k \delta_k` is elected for each entry. The result is the mean
       over the set A of models with that sign:

    .. math:: \theta = \theta_0 + \frac{\sum_{k \in A} w_k c_k \delta_k}{\sum_{k \in A} w_k c_k}

    With `select_topk` < 1, an entry that is equal in all models becomes the base's entry, because
    its variance is 0. A tensor that is equal in all models becomes the base's tensor. (mergekit
    writes this tensor with one axis too many.)

    Args:
      select_topk: The fraction of varying entries to keep, in (0, 1], static.
      tie: The sign that is elected where the sum of step 3 is exactly 0, "none" by default; see
        `elect`.
      compat: "mergekit" differs in three ways. It uses equal c_k where sum_k mean(delta_k^2) <
        1e-6. This threshold is absolute: deltas of usual size (2e-4) are below it and lose step 2.
        It elects + where the sum is 0. It divides by at least 1e-6.

    Returns:
      A merge of one or more models. It requires a base.

    Raises:
      ValueError: If `select_topk` is outside (0, 1], or for an unknown `tie` or `compat`.
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
    """Makes a transform that keeps the fraction of varying entries with the largest variance."""
    varying = Fold(kernel(_count_varying), add=_add_varying)
    rank = kernel(_rank_of_part, counting.fraction(part))
    # One ranking of variances serves all models, because they share the mask.
    order = Order(kernel(_variance_keys), ranks=rank, tasks=1, ties=True)
    return transform(kernel(_keep_varying), varying, order)


def _differences(delta: Array, weight: Array) -> list[Array]:
    """Computes the differences between all pairs of models."""
    delta = jnp.where(weight != 0, delta, 0)
    return [delta[i] - delta[j] for i in range(len(delta)) for j in range(i)]


Varying = tuple[Wide, Array]
"""The number of entries that vary over the models, and the unit of their differences."""


def _count_varying(piece: Piece, delta: Array, weight: Array) -> Varying:
    """Counts the varying entries of a piece, and computes their variances."""
    pairs = _differences(delta, weight)
    # Padding consists of equal deltas, which do not vary.
    varies = functools.reduce(jnp.logical_or, [x != 0 for x in pairs], delta[0] != delta[0])
    units = units_of(pairs) if pairs else jnp.ones(1, delta.dtype)
    return counting.occurrences(varies[None]), units.max()


def _add_varying(a: Varying, b: Varying) -> Varying:
    return counting.add(a[0], b[0]), common_unit(a[1], b[1])[0]


def _variance_keys(
    varying: Varying, piece: Piece, delta: Array, weight: Array
) -> UInt[Array, "1 ..."]:
    """Returns the variances as unsigned integers in the same order, for `ranking`.

    The variance is computed as a sum over pairs. It is 0 only where all models are equal.
    """

    def variances() -> Array:
        unit = varying[1].astype(delta.dtype)
        pairs = [x * (1 / unit) for x in _differences(delta, weight)]
        return sum((x * x for x in pairs), jnp.zeros_like(delta[0]))[None] / len(delta) ** 2

    # The step that counts keys and the step that selects them must use the same keys. If the sums
    # were fused into both steps, they would round differently.
    variance = computed_once(variances, weight)
    return ranking.magnitude(variance, jnp.ones_like(variance))


def _rank_of_part(fraction: Kernel, varying: Varying) -> tuple[Wide, ...]:
    """Computes the rank of the last kept entry, a fraction of the number of varying entries."""
    return (fraction(varying[0]),)


def _keep_varying(
    varying: Varying, thresholds: tuple[Bound], before: tuple[Earlier],
    piece: Piece, delta: Array, weight: Array,
) -> Vectors:  # fmt: skip
    """Masks all entries whose variance ranks below the threshold."""
    keys = _variance_keys(varying, piece, delta, weight)
    return delta, mask(ranking.take(keys, thresholds[0], before[0]), weight)


def _energy(piece: Piece, delta: Array, weight: Array) -> Products:
    """Computes the sum of delta_k^2 of each model."""
    size = jnp.where(weight != 0, jnp.abs(delta), 0)
    axes = range(1, delta.ndim)
    # The unit need not be a power of two, because no product of two models must be exact.
    most = lax.stop_gradient(size.max(axes, initial=0))
    rest = jnp.square(size / beside(jnp.where(most > 0, most, 1), delta)).sum(axes)
    return Products(most[:, None], rest[:, None, None])


def _beside_size(size: Array, energy: Products) -> tuple[Products, Array]:
    """Returns an energy, and the number of entries in its sum."""
    return energy, jnp.asarray(size)


def _weigh(
    floor: Array, energy: tuple[Products, Array], piece: Piece, delta: Array, weight: Array
) -> Vectors:
    """Multiplies the weights by c_k, or by equal numbers if the mean energy is below `floor`."""
    (most, rest), size = energy
    most, rest = most[:, 0], rest[:, 0, 0]
    top = most.max()
    # Only ratios of energies matter. Dividing by the largest model's energy prevents overflow.
    c = jnp.square(most / jnp.where(top > 0, top, 1)) * rest
    mass = c.sum()
    # mergekit compares the mean energy with 1e-6. In other conventions `floor` is 0.
    uniform = (mass == 0) | (jnp.square(top) * mass / size < floor)
    c = jnp.where(uniform, 1 / len(delta), c / jnp.where(uniform, 1, mass))
    return delta, weight * beside(c, delta)


def _floored_mean(floor: Array, piece: Piece, delta: Array, weight: Array) -> Array:
    """Computes the weighted mean with a divisor of at least `floor` (mergekit)."""
    return task_sum(weight * delta) / jnp.maximum(task_sum(weight), floor)


@method
def arcee_fusion() -> Merge:
    r"""Takes the entries that the model changed most, and the base elsewhere (Arcee Fusion).

    The importance of an entry is

    .. math::

        |\delta| \, \mathrm{KL}(\operatorname{softmax}(\theta_1)
        \,\|\, \operatorname{softmax}(\theta_0))

    The softmax runs over the last axis (over all entries of a vector), and 1e-8 is added to each
    probability. The model's entry is taken where the importance is at least

    .. math:: \mathrm{median} + 1.5 \, (Q_3 - Q_1)

    over the tensor. :math:`Q_i` is the importance with index floor(i (n - 1) / 4), from 0, when the
    n importances are in ascending order. A softmax depends on the size of its inputs. Multiplying
    both models by a number can therefore change the selection.

    The result is exact at any size. mergekit introduced the method. It estimates the quartiles of
    tensors above 1e6 entries from a random sample and always writes float32. A divergence that is
    negative from rounding counts as 0. Where three quarters of the importances are 0, the threshold
    is 0 and the whole tensor of the model is taken.

    Returns:
      A merge of exactly one model. It requires a base.

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
    """Returns the ranks of the three quartiles in ascending order; the largest entry has rank 1."""
    return tuple(counting.wide(size - q * (size - 1) // 4) for q in (1, 2, 3))


def _importance(delta: Array) -> Float[Array, "..."]:
    """Computes the importance of each entry, `[...]`, from base and model as `[2, ...]`."""
    rows = delta[..., None] if delta.ndim == 1 else delta
    # With `base="merged"` the first entry is the base, and the "deltas" are parameters.
    q, p = jax.nn.softmax(rows, axis=-1) + 1e-8
    divergence = jnp.maximum((p * jnp.log(p / q)).sum(-1, keepdims=True), 0)
    return (jnp.abs(rows[1] - rows[0]) * divergence).reshape(delta.shape[1:])


def _importance_keys(piece: Piece, delta: Array, weight: Array) -> UInt[Array, "1 ..."]:
    """Returns the importances as unsigned integers in the same order, for `ranking`."""
    size = _importance(delta)[None]
    return ranking.magnitude(size, jnp.ones_like(size))


def _fuse(quartiles: tuple[Bound, ...], piece: Piece, delta: Array, weight: Array) -> Array:
    """Takes the model's entry if its importance reaches the threshold, else the base's."""
    low, median, high = (ranking.float_of_key(quartile.key)[0] for quartile in quartiles)
    threshold = median + 1.5 * (high - low)
    # A choice is not differentiable. The gradient treats the selection as constant.
    taken = lax.stop_gradient(_importance(delta)) >= threshold.astype(delta.dtype)
    return jnp.where(taken, delta[1], delta[0])


@method
def pcb(*, ratio: Annotated[float, Range(0.02, 0.5)] = 0.1, scale: Scale = 1.0) -> Merge:
    r"""Merges the entries that win a competition within and between tasks (PCB-Merging).

    For each of the M models, over the whole tree:

    1. :math:`a_k = |\delta_k|`, clamped between its quantiles of 1e-4 and 1 - 1e-4. :math:`s_k` is
       :math:`a_k` rescaled linearly to [0, 1].
    2. The score of an entry is :math:`\exp(M s_k^2) \tanh(\delta_k \sum_j \delta_j)`. The first
       factor compares the entry with other entries of the same task. The second factor compares it
       with the same entry of other tasks. The tanh has an absolute scale: it saturates for products
       of deltas above 1 and is linear for deltas below 1e-6.
    3. :math:`b_k` is 0 for all entries except the fraction `ratio` of largest scores. Those scores
       are rescaled linearly to [0, 1].

    The result is the base where every :math:`b_k` is 0, and elsewhere

    .. math::

        \theta = \theta_0
        + \lambda \frac{\sum_k w_k b_k \operatorname{sign}(\delta_k) a_k}{\sum_k b_k}

    Where all :math:`a_k` are equal, :math:`s_k` is 1. Where all competing scores are equal,
    :math:`b_k` is 1. (The authors' code returns NaN in both cases.) The quantiles are the entries
    floor(n / 10000) places from either end of the n magnitudes. In the authors' code the upper
    quantile lies one place further.

    `grad` treats four numbers of each model as constants: both quantiles, and the smallest and
    largest competing score. The derivative is therefore exact for all entries except the entries
    that set these numbers.

    Args:
      ratio: The fraction of entries that compete, in (0, 1], static. The authors use 0.05 to 0.2.
      scale: The factor :math:`\lambda` on the merged task vector. The authors use about 1.2, or
        search for one weight per model (their lambda_k) with an evolutionary algorithm.

    Returns:
      A merge of one or more models. It requires a base.

    Raises:
      ValueError: If `ratio` is outside (0, 1], or `scale` is not finite.
      TypeError: If `ratio` is traced.

    References:
      Du et al., Parameter Competition Balancing, 2024 (arXiv 2410.02396), Sec. 3.
    """
    fraction = static("ratio", ratio, lambda r: 0 < r <= 1, "a number in (0, 1]")
    bounds = Order(MAGNITUDES, sized=kernel(_quantile_ranks))
    limits = Order(kernel(_score_keys), sized=kernel(_best_ranks, fraction))
    return Merge(reduction=reduce(kernel(_compete), bounds, limits, scope="tree"), scale=scale)


LINEAR = 2.0**-20
"""For up to 2^10 models, tanh(x y) equals x y up to rounding if both are below twice this value."""


def _quantile_ranks(size: int) -> tuple[Wide, ...]:
    """Returns the ranks of the upper and lower quantiles of n entries (1: largest)."""
    cut = size // 10000
    return counting.wide(size - cut), counting.wide(1 + cut)


def _best_ranks(part: float, size: int) -> tuple[Wide, ...]:
    """Returns the ranks of the smallest and the largest competing score."""
    count = size - int(size * (1 - part))
    return counting.wide(min(max(count, 1), size)), counting.wide(1)


def _score(bounds: tuple[Bound, ...], delta: Array, weight: Array) -> tuple[Array, Array]:
    """Computes the clamped deltas, and their scores up to a common factor."""
    delta = jnp.where(weight != 0, delta, 0)
    least, most = (beside(ranking.float_of_key(bound.key), delta) for bound in bounds)
    size, differ = _between(jnp.abs(delta), least, most), most > least
    within = jnp.where(differ, (size - least) / jnp.where(differ, most - least, 1), 1)
    total, unit = task_sum(delta), unit_of(most)
    # Where all deltas are this small, tanh(x) equals x up to rounding. The products would
    # underflow, so they are divided by the square of the unit. The rescaling of scores removes this
    # factor.
    between = jnp.where(
        unit < LINEAR, delta * (1 / unit) * (total * (1 / unit)), jnp.tanh(delta * total)
    )
    # `within` is at most 1, so the exponent is at most 0. The constant factor exp(-M) cancels when
    # scores are rescaled to [0, 1].
    score = jnp.exp(len(delta) * (within**2 - 1)) * between
    return jnp.sign(delta) * size, score


def _between(x: Array, low: Array, high: Array) -> Array:
    """Clips x to [low, high]. Unlike `jnp.clip`, the gradient at both ends is 1."""
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


def _score_keys(
    bounds: tuple[Bound, ...], piece: Piece, delta: Array, weight: Array
) -> UInt[Array, "task ..."]:
    """Returns the scores as unsigned integers in the same order, for `ranking`."""
    return ranking.key_of_float(lax.stop_gradient(_score(bounds, delta, weight)[1]))


def _compete(
    bounds: tuple[Bound, ...],
    limits: tuple[Bound, ...],
    piece: Piece,
    delta: Array,
    weight: Array,
) -> Array:
    """Computes the mean of the clamped deltas, with the weights b_k of `pcb`."""
    clamped, score = _score(bounds, delta, weight)
    low, high = (beside(ranking.float_of_key(limit.key, signed=True), delta) for limit in limits)
    # The score that sets `low` is recomputed here in another program, which may round exp and tanh
    # differently. This score, and any score equal to it up to rounding, must get balance 0. If it
    # is the only score at its entry, a balance of 1e-7 would give it the whole update.
    rounding = 64 * jnp.finfo(score.dtype).eps * jnp.maximum(jnp.abs(low), jnp.abs(high))
    differ = high - low > rounding
    balance = (_between(score, low, high) - low) / jnp.where(differ, high - low, 1)
    balance = jnp.where(differ, balance * (score - low > rounding), score >= low - rounding)
    mass = task_sum(balance)
    won = mass > 0
    total = task_sum(weight * balance * clamped)
    return jnp.where(won, total / jnp.where(won, mass, 1), 0)
