"""Sums and means of task vectors, often after masking: soups, TIES, DARE, DELLA, breadcrumbs.

Each method is one expression: transforms from `merging.transforms`, then the weighted sum or mean.
"""

from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from sail_jax.merging.arithmetic import PerModel
from sail_jax.merging.combining import Reduction, Transform, chain
from sail_jax.merging.merge import Merge
from sail_jax.merging.reductions import weighted_mean, weighted_sum
from sail_jax.merging.transforms import (
    ElectBy,
    RankBy,
    Scope,
    TieSign,
    check_per_model,
    drop,
    drop_by_magnitude,
    elect,
    keep_between,
    rescale_l1,
    trim,
)
from sail_jax.methods.registry import DENSITY, Compat, Range, Scale, choose, method

Scalar = Float[ArrayLike, ""]


@method
def linear(*, normalize: bool = True) -> Merge:
    r"""Averages the parameters of the models, with weights (a model soup).

    .. math:: \theta = \frac{\sum_k w_k \theta_k}{\sum_k w_k}

    Without weights the result is the uniform soup. Weights may be negative (extrapolation) if their
    sum is not 0.

    Other programs differ. mergekit returns infinities where the weights sum to 0. Up to 0.1.4 it
    rounded the weights to the tensors' dtype (0.3 became 0.3008 in bfloat16) and summed in that
    dtype. fusion_bench also averages integer buffers.

    Args:
      normalize: Whether the sum is divided by the sum of the weights.

    Returns:
      A merge of one or more models. A base is optional and only determines the output's dtypes.

    References:
      Wortsman et al., Model soups, 2022 (arXiv 2203.05482), Sec. 2.

    >>> linear()([{"a": 1.0}, {"a": 4.0}], weights=[2, 1])
    {'a': Array(2., dtype=float32)}
    """
    return Merge(normalize=normalize, base="unused")


@method
def task_arithmetic(*, normalize: bool = False, scale: Scale = 1.0) -> Merge:
    r"""Adds the weighted task vectors to the base (task arithmetic).

    .. math:: \theta = \theta_0 + \lambda \sum_k w_k \delta_k

    A negative weight removes a task. With three models fine-tuned from one base,
    `weights=[1, 1, -1]` computes the analogy a + b - c. The sum is not divided by M. M copies of
    one model give :math:`\theta_0 + \lambda M \delta`.

    Args:
      normalize: Whether the sum is divided by :math:`\sum_k w_k`.
      scale: The factor :math:`\lambda` on the merged task vector. The authors choose it on held-out
        data, often near 0.3 (the default of fusion_bench). mergekit's default is 1.

    Returns:
      A merge of one or more models. It requires a base.

    Raises:
      ValueError: Unless `scale` is a finite number.

    References:
      Ilharco et al., Editing Models with Task Arithmetic, 2023 (arXiv 2212.04089), Sec. 2.

    >>> task_arithmetic(scale=0.5)([{"a": 3.0}, {"a": 5.0}], {"a": 1.0}, weights=[1.0, -1.0])
    {'a': Array(0., dtype=float32...)}
    """
    return Merge(normalize=normalize, scale=scale)


@method
def ties(
    *,
    density: Annotated[PerModel | None, DENSITY] = None,
    scope: Scope | None = None,
    rescale: bool = False,
    elect_by: ElectBy | None = None,
    tie: TieSign | None = None,
    normalize: bool = True,
    scale: Scale = 1.0,
    compat: Compat = "paper",
) -> Merge:
    r"""Averages the large changes that agree with an elected sign (TIES-Merging).

    1. Trim. The fraction `density` of largest magnitude is kept of each :math:`\delta_k`.
    2. Elect. For each entry, the sign of :math:`\sum_k \delta_k` over the kept changes is elected.
    3. Merge. The result is the mean over the set A of models that kept the entry and have the
       elected sign (the paper's disjoint mean). Where A is empty, the result is the base.

    .. math:: \theta = \theta_0 + \lambda \frac{\sum_{k \in A} w_k \delta_k}{\sum_{k \in A} w_k}

    Programs of this name differ:

    - Yadav et al. and MergeLM trim over the whole model, elect by mass and average. If the sum of
      an entry is exactly 0, they use the sign that won more entries of the model. Here this is
      `scope="tree", elect_by="mass", tie="majority"`. One difference remains: they keep one entry
      more than k, and all entries equal to the threshold.
    - fusion_bench does the same, but sums and uses scale 0.3: `normalize=False, scale=0.3`.
    - mergekit trims each tensor separately, elects by weighted mass with 0 counting as +, rounds k
      down, and by default trims nothing. `compat="mergekit"` is
      `density=1.0, scope="tensor", elect_by="weighted", tie="positive"` with k rounded down. If k
      becomes 0, mergekit fails; here one entry is kept.

    Args:
      density: The fraction of entries to keep, in (0, 1], one number or one per model. 0.2 by
        default. It may be traced, see `trim`.
      scope: Whether one threshold covers the whole "tree" (the default) or each "tensor" has its
        own; see `trim`.
      rescale: Whether the kept deltas of a model are multiplied by one number that restores their
        L1 norm over the `scope`. This is mergekit's rescaling.
      elect_by: How the sign is elected, "mass" by default; see `elect`.
      tie: The sign that is elected where the sum is exactly 0, "none" by default; see `elect`.
      normalize: Whether the sum is divided by the weights of the models in A.
      scale: The factor :math:`\lambda` on the merged task vector. The authors search 0.8 to 2.5; 1
        is a common choice.
      compat: The defaults for hyperparameters that are None: "paper" or "mergekit".

    Returns:
      A merge of one or more models. It requires a base.

    Raises:
      ValueError: For a density outside (0, 1], an unknown `scope`, `elect_by`, `tie` or `compat`,
        or a `scale` that is not finite.

    References:
      Yadav et al., TIES-Merging, 2023 (arXiv 2306.01708), Algorithm 1.

    >>> models = [{"a": jnp.array([4.0, 1.0])}, {"a": jnp.array([2.0, -3.0])}]
    >>> ties(density=1.0)(models, {"a": jnp.zeros(2)})["a"].tolist()
    [3.0, -3.0]
    """
    default = choose(compat)
    scope = default(scope, "tree", "tensor")
    trimmed = trim(default(density, 0.2, 1.0), scope, floor=compat == "mergekit")
    elected = chain(_restored(trimmed, rescale, scope), _elected(elect_by, tie, compat))
    return Merge(elected, _mean_or_sum(normalize), normalize=normalize, scale=scale)


def _restored(masks: Transform, rescale: bool, scope: Scope = "tensor") -> Transform:
    """Makes the masks, followed by a rescaling to the original L1 norms if `rescale`."""
    return chain(masks, rescale_l1(scope)) if rescale else masks


def _mean_or_sum(normalize: bool) -> Reduction:
    """Makes the weighted mean, or the weighted sum without normalisation."""
    return weighted_mean if normalize else weighted_sum


def _elected(by: ElectBy | None, tie: TieSign | None, compat: Compat) -> Transform:
    """Makes the election of signs with the defaults of `compat`."""
    default = choose(compat)
    return elect(default(by, "mass", "weighted"), default(tie, "none", "positive"))


@method
def dare_linear(
    *,
    key: Array,
    density: Annotated[PerModel | None, DENSITY] = None,
    rescale: bool = True,
    normalize: bool = False,
    scale: Scale = 1.0,
    compat: Compat = "paper",
) -> Merge:
    r"""Drops changes at random, rescales the others and adds them up (DARE, then task arithmetic).

    .. math::

        \theta = \theta_0 + \lambda \sum_k w_k \frac{m_k \delta_k}{p},
        \qquad m_k \sim \mathrm{Bernoulli}(p)

    p is the `density` and 1 - p is the paper's drop rate. The masks are independent over entries
    and models. The expected result is the result of task arithmetic without masks.

    Other programs differ. mergekit rescales by the ratio of L1 norms per tensor instead of by the
    density, and drops nothing by default (`compat="mergekit"`). Its rescaling is biased where few
    entries dominate a tensor. fusion_bench uses scale 0.5 by default, and returns NaN for a drop
    rate of 1.

    Args:
      key: One PRNG key.
      density: The probability of keeping an entry, in (0, 1], one number or one per model. 0.5 by
        default. The paper drops 90 % and more in large models (density 0.1).
      rescale: Whether kept entries are divided by the density.
      normalize: Whether the sum is divided by :math:`\sum_k w_k` over all models.
      scale: The factor :math:`\lambda` on the merged task vector. 1 keeps the sum.
      compat: The defaults and the rescaling: "paper" or "mergekit".

    Returns:
      A merge of one or more models. It requires a base.

    Raises:
      ValueError: For a density outside (0, 1], an unknown `compat`, or a `scale` that is not
        finite.
      TypeError: If `key` is not a PRNG key.

    References:
      Yu et al., Language Models are Super Mario, 2024 (arXiv 2311.03099), Sec. 3.2.

    >>> one, base = {"a": jnp.ones(4)}, {"a": jnp.zeros(4)}
    >>> merged = dare_linear(density=0.5, key=jnp.array([0, 1], "uint32"))([one], base)
    >>> bool(jnp.isin(merged["a"], jnp.array([0.0, 2.0])).all())  # dropped or doubled
    True
    """
    dropped = _dare(density, key, compat, rescale)
    return Merge(dropped, weighted_sum, normalize=normalize, scale=scale)


@method
def dare_ties(
    *,
    key: Array,
    density: Annotated[PerModel | None, DENSITY] = None,
    rescale: bool = True,
    elect_by: ElectBy | None = None,
    tie: TieSign | None = None,
    normalize: bool | None = None,
    scale: Scale = 1.0,
    compat: Compat = "paper",
) -> Merge:
    r"""Drops changes at random, then elects signs and averages agreeing changes (DARE, TIES).

    Random masks replace the trimming of `ties`:

    1. Each entry of each :math:`\delta_k` is kept with probability `density` and divided by it.
    2. A sign is elected for each entry, as in `ties`.
    3. The kept changes with the elected sign are averaged, as in `ties`.

    Other programs differ. mergekit elects by weighted mass with 0 counting as +, and sums instead
    of averaging (`elect_by="weighted", tie="positive", normalize=False`). It rescales by L1 norms
    (see `dare_linear`). `compat="mergekit"` does all three. MergeLM and fusion_bench trim to the
    top 20 % between the first two steps:
    `Merge(chain(drop(rate, key), trim(0.2), elect()), weighted_mean)`.

    Args:
      key: One PRNG key.
      density: The probability of keeping an entry, in (0, 1], one number or one per model. 0.5 by
        default.
      rescale: Whether kept entries are divided by the density.
      elect_by: How the sign is elected, "mass" by default; see `elect`.
      tie: The sign that is elected where the sum is exactly 0, "none" by default; see `elect`.
      normalize: Whether the sum is divided by the weights of the models that agree; True by
        default.
      scale: The factor :math:`\lambda` on the merged task vector. 1 keeps the mean.
      compat: The defaults and the rescaling: "paper" or "mergekit".

    Returns:
      A merge of one or more models. It requires a base.

    Raises:
      ValueError: For a density outside (0, 1], an unknown `elect_by`, `tie` or `compat`, or a
        `scale` that is not finite.
      TypeError: If `key` is not a PRNG key.

    References:
      Yu et al., Language Models are Super Mario, 2024 (arXiv 2311.03099), Sec. 4.
    """
    normalize = choose(compat)(normalize, True, False)
    dropped = chain(_dare(density, key, compat, rescale), _elected(elect_by, tie, compat))
    return Merge(dropped, _mean_or_sum(normalize), normalize=normalize, scale=scale)


def _dare(density: PerModel | None, key: Array, compat: Compat, rescale: bool) -> Transform:
    """Makes the random masks of DARE, with the rescaling of `compat`."""
    density = choose(compat)(density, 0.5, 1.0)
    values = check_per_model("density", density, lambda d: (d > 0) & (d <= 1), "in (0, 1]")
    rate = 1 - (jnp.asarray(density, jnp.float32) if values is None else values)
    by_norm = rescale and compat == "mergekit"
    return _restored(drop(rate, key, rescale=rescale and not by_norm), by_norm)


@method
def della_linear(
    *,
    key: Array,
    density: Annotated[PerModel | None, DENSITY] = None,
    epsilon: PerModel | None = None,
    rank_by: RankBy = "rank",
    rescale: bool = True,
    normalize: bool = False,
    scale: Scale = 1.0,
    compat: Compat = "paper",
) -> Merge:
    r"""Drops changes at random, small ones more often, and adds up the others (DELLA, no election).

    .. math::

        \theta = \theta_0 + \lambda \sum_k w_k \frac{m_k \delta_k}{p_k},
        \qquad m_k \sim \mathrm{Bernoulli}(p_k)

    The masks are independent. The probability :math:`p_k` grows from density - epsilon to density +
    epsilon with the rank of :math:`|\delta_k|` in its row. A row runs along the last axis, and a
    vector is one row; see `transforms.drop_by_magnitude`. The expected result is the result of task
    arithmetic without masks.

    Other programs fail in some cases. The authors' code and mergekit fail for density + epsilon >
    1. mergekit also fails at exactly 1, that is for densities from 0.85 to below 1 with its default
    epsilon. Here epsilon shrinks to 1 - density. Both programs fail for rows of length 1. Here p is
    the density in these rows.

    Args:
      key: One PRNG key.
      density: The mean probability of keeping an entry, in (0, 1], one number or one per model. 0.7
        by default, the authors' drop rate of 0.3. mergekit's default is 1, which drops nothing.
      epsilon: The half-width of the range of probabilities, in [0, density), one number or one per
        model. 0.07 by default, the authors' window of 0.14. mergekit's default is 0.15.
      rank_by: Whether p grows with the "rank" or with the "magnitude" of a change.
      rescale: Whether kept entries are divided by p.
      normalize: Whether the sum is divided by :math:`\sum_k w_k`.
      scale: The factor :math:`\lambda` on the merged task vector. 1 keeps the sum.
      compat: The defaults: "paper" or "mergekit". "mergekit" also rescales differently. Instead of
        dividing by p, it restores the L1 norm of each model's deltas in each tensor.

    Returns:
      A merge of one or more models. It requires a base.

    Raises:
      ValueError: Unless 0 <= epsilon < density <= 1, for an unknown `rank_by` or `compat`, or a
        `scale` that is not finite.
      TypeError: If `key` is not a PRNG key.

    References:
      Deep et al., DELLA-Merging, 2024 (arXiv 2406.11617), Sec. 3.1.

    >>> one, base = {"a": jnp.array([[1.0, -2.0]])}, {"a": jnp.zeros((1, 2))}
    >>> della_linear(density=1.0, key=jnp.array([0, 1], "uint32"))([one], base)["a"].tolist()
    [[1.0, -2.0]]
    """
    dropped = _della(density, epsilon, key, rank_by, compat, rescale)
    return Merge(dropped, weighted_sum, normalize=normalize, scale=scale)


@method
def della(
    *,
    key: Array,
    density: Annotated[PerModel | None, DENSITY] = None,
    epsilon: PerModel | None = None,
    rank_by: RankBy = "rank",
    rescale: bool = True,
    elect_by: ElectBy | None = None,
    tie: TieSign | None = None,
    normalize: bool = True,
    scale: Scale = 1.0,
    compat: Compat = "paper",
) -> Merge:
    r"""Drops changes at random, small ones more often, then elects signs and averages (DELLA).

    1. Each entry of each :math:`\delta_k` is kept with a probability p that grows with its
       magnitude, and divided by p, as in `della_linear`.
    2. A sign is elected for each entry, as in `ties`.
    3. The kept changes with the elected sign are averaged, as in `ties`.

    Args:
      key: One PRNG key.
      density: The mean probability of keeping an entry, 0.7 by default; see `della_linear`.
      epsilon: The half-width of the range of probabilities, 0.07 by default; see `della_linear`.
      rank_by: Whether p grows with the "rank" or with the "magnitude" of a change.
      rescale: Whether kept entries are divided by p.
      elect_by: How the sign is elected, "mass" by default; see `elect`.
      tie: The sign that is elected where the sum is exactly 0, "none" by default; see `elect`.
      normalize: Whether the sum is divided by the weights of the models that agree.
      scale: The factor :math:`\lambda` on the merged task vector. The authors use 1.1.
      compat: The defaults and the rescaling: "paper" or "mergekit". mergekit elects by weighted
        mass, with 0 counting as +.

    Returns:
      A merge of one or more models. It requires a base.

    Raises:
      ValueError: Unless 0 <= epsilon < density <= 1, for an unknown `rank_by`, `elect_by`, `tie` or
        `compat`, or a `scale` that is not finite.
      TypeError: If `key` is not a PRNG key.

    References:
      Deep et al., DELLA-Merging, 2024 (arXiv 2406.11617), Sec. 3.
    """
    dropped = _della(density, epsilon, key, rank_by, compat, rescale)
    return Merge(
        chain(dropped, _elected(elect_by, tie, compat)), _mean_or_sum(normalize),
        normalize=normalize, scale=scale,
    )  # fmt: skip


def _della(
    density: PerModel | None,
    epsilon: PerModel | None,
    key: Array,
    rank_by: RankBy,
    compat: Compat,
    rescale: bool,
) -> Transform:
    """Makes the random masks of DELLA, with the defaults and the rescaling of `compat`."""
    default = choose(compat)
    density, epsilon = default(density, 0.7, 1.0), default(epsilon, 0.07, 0.15)
    how = ("probability" if compat == "paper" else "l1") if rescale else None
    return drop_by_magnitude(density, epsilon, key, rank_by, rescale=how)


@method
def breadcrumbs(
    *,
    density: Annotated[PerModel | None, DENSITY] = None,
    gamma: Annotated[PerModel | None, Range(0.0, 0.2)] = None,
    scope: Scope = "tensor",
    rescale: bool = False,
    normalize: bool = False,
    scale: Scale = 1.0,
    compat: Compat = "paper",
) -> Merge:
    r"""Adds up task vectors without their largest and their smallest entries (breadcrumbs).

    .. math:: \theta = \theta_0 + \lambda \sum_k w_k m_k \delta_k

    In each tensor, the mask :math:`m_k` removes the fraction `gamma` of largest :math:`|\delta_k|`
    and keeps the fraction `density` that follows in magnitude. The number of kept entries is exact,
    even with equal magnitudes, and at least 1. Where density + gamma > 1, fewer of the largest
    entries are removed.

    Other programs differ. The authors' code applies the fractions to every row instead of the
    tensor. If gamma rounds down to 0 entries, mergekit 0.1.4 returns the base for the whole tensor.
    This happens for tensors below 100 entries with its default gamma. Here no large entry is
    removed in that case.

    Args:
      density: The fraction of entries to keep, in (0, 1], one number or one per model. It may be
        traced. 0.15 by default, where the authors' search begins. mergekit's default is 1, which
        drops nothing.
      gamma: The fraction of largest entries to remove, in [0, 1), one number or one per model. It
        may be traced. 0.006 by default; mergekit's default is 0.01.
      scope: Whether fractions refer to each "tensor" or to the whole "tree".
      rescale: Whether the kept deltas of a model are multiplied by one number that restores their
        L1 norm over the `scope`. This is mergekit's rescaling.
      normalize: Whether the sum is divided by :math:`\sum_k w_k`.
      scale: The factor :math:`\lambda` on the merged task vector, to be chosen on held-out data.
      compat: The defaults: "paper" or "mergekit". "mergekit" also rounds down.

    Returns:
      A merge of one or more models. It requires a base.

    Raises:
      ValueError: For a density outside (0, 1], a gamma outside [0, 1), an unknown `scope` or
        `compat`, or a `scale` that is not finite.

    References:
      Davari and Belilovsky, Model Breadcrumbs, 2023 (arXiv 2312.06795), Sec. 3.

    >>> one, base = {"a": jnp.array([1.0, -9.0, 2.0, 0.5])}, {"a": jnp.zeros(4)}
    >>> breadcrumbs(density=0.5, gamma=0.25)([one], base)["a"].tolist()
    [1.0, 0.0, 2.0, 0.0]
    """
    thinned = _thinned(density, gamma, scope, rescale, compat)
    return Merge(thinned, weighted_sum, normalize=normalize, scale=scale)


@method
def breadcrumbs_ties(
    *,
    density: Annotated[PerModel | None, DENSITY] = None,
    gamma: Annotated[PerModel | None, Range(0.0, 0.2)] = None,
    scope: Scope = "tensor",
    rescale: bool = False,
    elect_by: ElectBy | None = None,
    tie: TieSign | None = None,
    normalize: bool | None = None,
    scale: Scale = 1.0,
    compat: Compat = "paper",
) -> Merge:
    r"""Masks the largest and smallest changes, then elects signs and averages (breadcrumbs, TIES).

    The masks of `breadcrumbs` replace the trimming of `ties`. The other steps stay the same.

    Args:
      density: The fraction of entries to keep, 0.15 by default; see `breadcrumbs`.
      gamma: The fraction of largest entries to remove, 0.006 by default; see `breadcrumbs`.
      scope: Whether fractions refer to each "tensor" or to the whole "tree".
      rescale: Whether the kept deltas of a model are multiplied by one number that restores their
        L1 norm over the `scope`. This is mergekit's rescaling.
      elect_by: How the sign is elected, "mass" by default; see `elect`.
      tie: The sign that is elected where the sum is exactly 0, "none" by default; see `elect`.
      normalize: Whether the sum is divided by the weights of the models that agree; True by
        default.
      scale: The factor :math:`\lambda` on the merged task vector. 1 keeps the mean.
      compat: The defaults: "paper" or "mergekit". mergekit introduced the method. It elects by
        weighted mass with 0 counting as +, and sums instead of averaging.

    Returns:
      A merge of one or more models. It requires a base.

    Raises:
      ValueError: For a density outside (0, 1], a gamma outside [0, 1), an unknown `scope`,
        `elect_by`, `tie` or `compat`, or a `scale` that is not finite.

    References:
      Davari and Belilovsky, Model Breadcrumbs, 2023 (arXiv 2312.06795); Yadav et al., TIES-Merging,
      2023 (arXiv 2306.01708).
    """
    normalize = choose(compat)(normalize, True, False)
    thinned = chain(
        _thinned(density, gamma, scope, rescale, compat), _elected(elect_by, tie, compat)
    )
    return Merge(thinned, _mean_or_sum(normalize), normalize=normalize, scale=scale)


def _thinned(
    density: PerModel | None,
    gamma: PerModel | None,
    scope: Scope,
    rescale: bool,
    compat: Compat,
) -> Transform:
    """Makes the masks of breadcrumbs, with the defaults of `compat`."""
    default = choose(compat)
    density, gamma = default(density, 0.15, 1.0), default(gamma, 0.006, 0.01)
    masks = keep_between(density, gamma, scope, floor=compat == "mergekit")
    return _restored(masks, rescale, scope)
