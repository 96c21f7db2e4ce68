"""Sums and means of (sparsified) task vectors: soups, TIES, DARE, DELLA, breadcrumbs.

Each method is one expression: transforms of `merging.transforms`, then the weighted sum or mean.
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
    """Averages the parameters of the models, with weights (a model soup).

    The result is sum_k w_k theta_k / sum_k w_k. Without weights it is the uniform soup. Weights may
    be negative (extrapolation) if their sum is not 0.

    Other programs differ. mergekit gives infinities where the weights sum to 0. Up to 0.1.4 it
    rounded the weights to the tensors' dtype (0.3 became 0.3008 in bfloat16) and summed in it.
    fusion_bench averages integer buffers too.

    Args:
      normalize: Whether weights are divided by their sum; if not, the result is the plain sum.

    Returns:
      A merge of one or more models. It needs no base; one given only decides the output's dtypes.

    References:
      Wortsman et al., Model soups, 2022 (arXiv 2203.05482), Sec. 2.

    >>> linear()([{"a": 1.0}, {"a": 4.0}], weights=[2, 1])
    {'a': Array(2., dtype=float32)}
    """
    return Merge(normalize=normalize, base="unused")


@method
def task_arithmetic(*, normalize: bool = False, scale: Scale = 1.0) -> Merge:
    """Adds the weighted task vectors to the base (task arithmetic).

    The result is base + scale * sum_k w_k delta_k. A negative weight removes a task. With models
    tuned from one base, `weights=[1, 1, -1]` is the analogy a + b - c. The sum is not divided by M:
    M copies of one model add up to base + scale * M * delta.

    Args:
      normalize: Whether the sum is divided by sum_k w_k.
      scale: What multiplies the update. The authors choose it on held-out data, often near 0.3,
        which is the default of fusion_bench. mergekit's is 1.

    Returns:
      A merge of one or more models, which needs a base.

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
    """Averages the large changes that agree with an elected sign (TIES-Merging).

    1. Trim: of each delta_k the fraction `density` of largest magnitude stays.
    2. Elect: for each entry, the sign of sum_k delta_k over what is left is elected.
    3. Merge: the result is base + scale * sum_k w_k delta_k / sum_k w_k over the models that kept
       the entry and have the elected sign (the paper's disjoint mean). Where there are none, it is
       the base.

    Programs of this name differ:

    - Yadav et al. and MergeLM trim over the whole model, elect by mass and average. They give an
      entry whose sum is exactly 0 the sign of the majority of entries: `scope="tree",
      elect_by="mass", tie="majority"`. The one difference left is that they keep all entries equal
      to the threshold, and one entry more than k.
    - fusion_bench does the same, but sums, with scale 0.3: `normalize=False, scale=0.3`.
    - mergekit trims each tensor by itself, elects by weighted mass with 0 counting as +, rounds k
      down, and by default trims nothing. `compat="mergekit"` is `density=1.0, scope="tensor",
      elect_by="weighted", tie="positive"` with k rounded down. Where that makes k = 0, mergekit
      fails; here one entry stays.

    Args:
      density: In (0, 1], one number or one per model; 0.2 by default. It may be traced, see `trim`.
      scope: Whether thresholds are of the whole "tree" (the default) or of each "tensor"; see
        `trim`.
      rescale: Whether the deltas of a model that stay are multiplied by one number, which restores
        their L1 norm over the `scope`: mergekit's rescaling.
      elect_by: How the sign is elected, "mass" by default; see `elect`.
      tie: What is elected where the sum is exactly 0, "none" by default; see `elect`.
      normalize: Whether the sum is divided by the weights of the models that agree.
      scale: What multiplies the update.
      compat: Whose defaults are taken for hyperparameters that are None, "paper" or "mergekit".

    Returns:
      A merge of one or more models, which needs a base.

    Raises:
      ValueError: For a density outside (0, 1], another `scope`, `elect_by`, `tie` or `compat`, and
        a `scale` that is not finite.

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
    """Masks, after which L1 norms are restored if `rescale`."""
    return chain(masks, rescale_l1(scope)) if rescale else masks


def _mean_or_sum(normalize: bool) -> Reduction:
    """The weighted mean, or the weighted sum without normalisation."""
    return weighted_mean if normalize else weighted_sum


def _elected(by: ElectBy | None, tie: TieSign | None, compat: Compat) -> Transform:
    """The election of signs with the defaults of `compat`."""
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
    """Drops changes at random, rescales the others, and adds them up (DARE, then task arithmetic).

    The result is base + scale * sum_k w_k m_k delta_k / density. The masks m_k ~ Bernoulli(density)
    are independent over entries and models; the paper's drop rate is p = 1 - density. The expected
    result is that of task arithmetic without masks.

    Other programs differ. mergekit rescales by the ratio of L1 norms per tensor instead of by
    density, which is biased where few entries dominate, and drops nothing by default
    (`compat="mergekit"`). fusion_bench's default scale is 0.5, and its drop rate 1 gives NaN.

    Args:
      key: One PRNG key.
      density: In (0, 1], one number or one per model; 0.5 by default.
      rescale: Whether what is kept is divided by the density.
      normalize: Whether the sum is divided by sum_k w_k of all models, which keeps the mean.
      scale: What multiplies the update.
      compat: Whose defaults and rescaling are taken, "paper" or "mergekit".

    Returns:
      A merge of one or more models, which needs a base.

    Raises:
      ValueError: For a density outside (0, 1], another `compat`, and a `scale` that is not finite.
      TypeError: For a key that is none.

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
    """Drops changes at random, then elects signs and averages what agrees (DARE with TIES).

    The random masks take the place of the trimming of `ties`.

    1. Each entry of each delta_k is kept with probability `density`, and divided by it.
    2. Signs are elected, and 3. what agrees is averaged, as in `ties`.

    Other programs differ. mergekit elects by weighted mass with 0 counting as +, and sums instead
    of averaging (`elect_by="weighted", tie="positive", normalize=False`). It rescales by L1 norms
    (see `dare_linear`). `compat="mergekit"` does all of that. MergeLM and fusion_bench trim to the
    top 20 % between the first two steps: `Merge(chain(drop(rate, key), trim(0.2), elect()),
    weighted_mean)`.

    Args:
      key: One PRNG key.
      density: In (0, 1], one number or one per model; 0.5 by default.
      rescale: Whether what is kept is divided by the density.
      elect_by: How the sign is elected, "mass" by default; see `elect`.
      tie: What is elected where the sum is exactly 0, "none" by default; see `elect`.
      normalize: Whether the sum is divided by the weights of the models that agree; by default it
        is.
      scale: What multiplies the update.
      compat: Whose defaults and rescaling are taken, "paper" or "mergekit".

    Returns:
      A merge of one or more models, which needs a base.

    Raises:
      ValueError: For a density outside (0, 1], another `elect_by`, `tie` or `compat`, and a `scale`
        that is not finite.
      TypeError: For a key that is none.

    References:
      Yu et al., Language Models are Super Mario, 2024 (arXiv 2311.03099), Sec. 4.
    """
    normalize = choose(compat)(normalize, True, False)
    dropped = chain(_dare(density, key, compat, rescale), _elected(elect_by, tie, compat))
    return Merge(dropped, _mean_or_sum(normalize), normalize=normalize, scale=scale)


def _dare(density: PerModel | None, key: Array, compat: Compat, rescale: bool) -> Transform:
    """The random masks of DARE, with the rescaling of `compat`."""
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
    """Drops changes at random, small ones more often, and adds up the others (DELLA, no election).

    The result is base + scale * sum_k w_k m_k delta_k / p_k. The masks m_k ~ Bernoulli(p_k) are
    independent. p_k grows with the rank of |delta_k| in its row (the last axis; a vector is one
    row), from density - epsilon to density + epsilon: see `transforms.drop_by_magnitude`. The
    expected result is that of task arithmetic without masks.

    For density + epsilon > 1 the authors' code and mergekit fail, mergekit also at 1 (so for
    densities from 0.85 to below 1 with its default epsilon). Here the window shrinks to fit around
    the density. They fail for rows of length 1 too, where p is the density here.

    Args:
      key: One PRNG key.
      density: In (0, 1], one number or one per model. 0.7 by default, the authors' drop rate of
        0.3; mergekit's is 1, which drops nothing.
      epsilon: In [0, density), likewise. 0.07 by default, the authors' window of 0.14; mergekit's
        is 0.15.
      rank_by: "rank", or "magnitude" for a p that grows with |delta_k| itself.
      rescale: Whether what is kept is divided by p.
      normalize: Whether the sum is divided by sum_k w_k.
      scale: What multiplies the update.
      compat: Whose defaults are taken, "paper" or "mergekit". "mergekit" also rescales differently:
        it multiplies the deltas of a model in a tensor by the ratio of their L1 norms before and
        after, instead of dividing by p.

    Returns:
      A merge of one or more models, which needs a base.

    Raises:
      ValueError: Unless 0 <= epsilon < density <= 1, for another `rank_by` or `compat`, and a
        `scale` that is not finite.
      TypeError: For a key that is none.

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
    """Drops changes at random, small ones more often, then elects signs and averages (DELLA).

    1. Entries of each delta_k are kept with a probability p that grows with their magnitude, and
       divided by p, as in `della_linear`.
    2. Signs are elected, and 3. what agrees is averaged, as in `ties`.

    Args:
      key: One PRNG key.
      density: The mean probability of being kept; see `della_linear`.
      epsilon: How far p departs from the density; see `della_linear`.
      rank_by: Whether p grows with the "rank" or the "magnitude" of a change; see `della_linear`.
      rescale: Whether what is kept is divided by p.
      elect_by: How the sign is elected, "mass" by default; see `elect`.
      tie: What is elected where the sum is exactly 0, "none" by default; see `elect`.
      normalize: Whether the sum is divided by the weights of the models that agree.
      scale: What multiplies the update; the authors use 1.1.
      compat: Whose defaults and rescaling are taken, "paper" or "mergekit". mergekit elects by
        weighted mass, with 0 counting as +.

    Returns:
      A merge of one or more models, which needs a base.

    Raises:
      ValueError: Unless 0 <= epsilon < density <= 1, for another `rank_by`, `elect_by`, `tie` or
        `compat`, and a `scale` that is not finite.
      TypeError: For a key that is none.

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
    """The random masks of DELLA, with the defaults and the rescaling of `compat`."""
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
    """Adds up task vectors without their largest and their smallest entries (breadcrumbs).

    The result is base + scale * sum_k w_k m_k delta_k. Of each tensor, the mask m_k leaves out the
    fraction `gamma` of largest |delta_k|, and keeps the fraction `density` that follows in
    magnitude. The number kept is exact, also among equal magnitudes, and at least 1. Where density
    + gamma > 1, fewer of the largest are left out.

    Other programs differ. The authors' code takes the fractions of every row instead of the tensor.
    Where gamma rounds down to no entry (tensors below 100 entries, by its default), mergekit 0.1.4
    gives the base for the whole tensor. Here none of the largest is left out then.

    Args:
      density: In (0, 1], one number or one per model, which may be traced. 0.15 by default, where
        the authors' search begins; mergekit's is 1, which drops nothing.
      gamma: In [0, 1), likewise. 0.006 by default; mergekit's is 0.01.
      scope: Whether fractions are of each "tensor" or of the whole "tree".
      rescale: Whether the deltas of a model that stay are multiplied by one number, which restores
        their L1 norm over the `scope`: mergekit's rescaling.
      normalize: Whether the sum is divided by sum_k w_k.
      scale: What multiplies the update.
      compat: Whose defaults are taken, "paper" or "mergekit"; mergekit also rounds down.

    Returns:
      A merge of one or more models, which needs a base.

    Raises:
      ValueError: For a density outside (0, 1], a gamma outside [0, 1), another `scope` or `compat`,
        and a `scale` that is not finite.

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
    """Masks the largest and smallest changes, then elects signs and averages (breadcrumbs, TIES).

    The masks are those of `breadcrumbs`. They take the place of the trimming of `ties`, whose other
    steps follow.

    Args:
      density: The fraction that is kept; see `breadcrumbs`.
      gamma: The fraction of largest entries that is left out; see `breadcrumbs`.
      scope: Whether fractions are of each "tensor" or of the whole "tree".
      rescale: Whether the deltas of a model that stay are multiplied by one number, which restores
        their L1 norm over the `scope`: mergekit's rescaling.
      elect_by: How the sign is elected, "mass" by default; see `elect`.
      tie: What is elected where the sum is exactly 0, "none" by default; see `elect`.
      normalize: Whether the sum is divided by the weights of the models that agree; by default it
        is.
      scale: What multiplies the update.
      compat: Whose defaults are taken, "paper" or "mergekit". mergekit, which introduced the
        method, elects by weighted mass with 0 counting as +, and sums instead of averaging.

    Returns:
      A merge of one or more models, which needs a base.

    Raises:
      ValueError: For a density outside (0, 1], a gamma outside [0, 1), another `scope`, `elect_by`,
        `tie` or `compat`, and a `scale` that is not finite.

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
    """The masks of breadcrumbs, with the defaults of `compat`."""
    default = choose(compat)
    density, gamma = default(density, 0.15, 1.0), default(gamma, 0.006, 0.01)
    masks = keep_between(density, gamma, scope, floor=compat == "mergekit")
    return _restored(masks, rescale, scope)
