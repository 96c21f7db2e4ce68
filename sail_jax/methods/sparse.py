"""Sums and means of task vectors, sparsified: soups, task arithmetic, TIES, DARE, DELLA,
breadcrumbs."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from sail_jax.merging.arithmetic import PerModel
from sail_jax.merging.combining import Reduction, Transform, chain
from sail_jax.merging.merge import Compat, Merge, choose, method
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

__all__ = [
    "breadcrumbs",
    "breadcrumbs_ties",
    "dare_linear",
    "dare_ties",
    "della",
    "della_linear",
    "linear",
    "task_arithmetic",
    "ties",
]

Scalar = Float[ArrayLike, ""]


@method
def linear(*, normalize: bool = True) -> Merge:
    """The weighted mean of parameters: a model soup.

    sum_k w_k theta_k / sum_k w_k; the uniform soup for the default weights, which are equal. No
    base is needed; one given only says the output's dtypes. Weights may be negative (extrapolation)
    if their sum is not 0.

    Elsewhere: mergekit rounds the weights to the tensors' dtype (0.3 is 0.3008 in bfloat16), sums
    in that dtype, and gives infinities where the weights sum to 0; fusion_bench averages integer
    buffers too.

    Args:
      normalize: Whether weights are divided by their sum; the plain sum if not.

    References:
      Wortsman et al., Model soups, 2022 (arXiv 2203.05482), Sec. 2.

    >>> linear()([{"a": 1.0}, {"a": 4.0}], weights=[2, 1])
    {'a': Array(2., dtype=float32)}
    """
    return Merge(normalize=normalize, base="unused")


@method
def task_arithmetic(*, normalize: bool = False, scale: Scalar = 1.0) -> Merge:
    """base + scale * sum_k w_k delta_k, with weights 1.

    A negative weight forgets a task; with bases of their own, analogies are sums of task vectors:
    `weights=[1, 1, -1]` is a + b - c. The sum is not divided by M: M copies of one model add up to
    base + scale * M * delta.

    Args:
      normalize: Whether the sum is divided by sum_k w_k.
      scale: The authors choose it on held-out data, often near 0.3, which is the default of
        fusion_bench; mergekit's is 1.

    References:
      Ilharco et al., Editing Models with Task Arithmetic, 2023 (arXiv 2212.04089), Sec. 2.
    """
    return Merge(normalize=normalize, scale=scale)


@method
def ties(
    *,
    density: float | Sequence[float] | None = None,
    scope: Scope | None = None,
    elect_by: ElectBy | None = None,
    tie: TieSign | None = None,
    normalize: bool = True,
    scale: Scalar = 1.0,
    compat: Compat = "paper",
) -> Merge:
    """TIES: trim, elect a sign, average those who agree with it.

    1. Of each delta_k the fraction `density` of largest magnitude stays.
    2. For each entry the sign of sum_k delta_k over what is left is elected.
    3. base + scale * sum_k w_k delta_k / sum_k w_k over the k that kept the entry and have that
       sign (the paper's disjoint mean); where there are none, the base.

    Programs of this name differ. Yadav et al. and MergeLM trim over the whole model, elect by
    mass, average, and give an entry whose sum is exactly 0 the sign of the majority of entries:
    `scope="tree", elect_by="mass", tie="majority"` up to what they keep at the threshold (all
    equal entries, one entry more than k). fusion_bench does the same but sums, at scale 0.3:
    `normalize=False, scale=0.3`. mergekit trims each tensor, elects by weighted mass with 0
    counting as +, and trims nothing by default: `compat="mergekit"` is
    `density=1.0, scope="tensor", elect_by="weighted", tie="positive"` with k rounded down; it
    fails where that gives 0, where here one entry stays.

    Args:
      density: In (0, 1], one number or one per model, static; 0.2 by default.
      scope: Whether thresholds are of the "tree" (the default) or of each "tensor"; see `trim`.
      elect_by: Whose sign is elected, "mass" by default; see `elect`.
      tie: What is elected where the sum is 0, "none" by default; see `elect`.
      normalize: Whether the sum is divided by the weights of those who agree.
      scale: What multiplies the update.
      compat: Whose defaults count.

    References:
      Yadav et al., TIES-Merging, 2023 (arXiv 2306.01708), Algorithm 1.
    """
    default = choose(compat)
    trimmed = trim(
        default(density, 0.2, 1.0), default(scope, "tree", "tensor"), floor=compat == "mergekit"
    )
    return Merge(
        chain(trimmed, _elected(elect_by, tie, compat)), _mean_or_sum(normalize),
        normalize=normalize, scale=scale,
    )  # fmt: skip


def _mean_or_sum(normalize: bool) -> Reduction:
    return weighted_mean if normalize else weighted_sum


def _elected(by: ElectBy | None, tie: TieSign | None, compat: Compat) -> Transform:
    default = choose(compat)
    return elect(default(by, "mass", "weighted"), default(tie, "none", "positive"))


@method
def dare_linear(
    *,
    key: Array,
    density: PerModel | None = None,
    rescale: bool = True,
    normalize: bool = False,
    scale: Scalar = 1.0,
    compat: Compat = "paper",
) -> Merge:
    """DARE, then task arithmetic: base + scale * sum_k w_k m_k delta_k / density.

    The masks m_k ~ Bernoulli(density) are independent over entries and models; the paper's drop
    rate is p = 1 - density. The mean over masks is that of task arithmetic without them.

    Elsewhere: mergekit divides by the achieved ratio of L1 norms per tensor instead of by density,
    which is biased where few entries dominate, and drops nothing by default (`compat="mergekit"`);
    fusion_bench's scale is 0.5 and its drop rate 1 gives NaN.

    Args:
      key: One PRNG key.
      density: In (0, 1], one number or one per model; 0.5 by default.
      rescale: Whether what is kept is divided by the density.
      normalize: Whether the sum is divided by sum_k w_k of all models, which keeps the mean.
      scale: What multiplies the update.
      compat: Whose defaults and rescaling count.

    References:
      Yu et al., Language Models are Super Mario, 2024 (arXiv 2311.03099), Sec. 3.2.
    """
    dropped = _dare(density, key, compat, rescale)
    return Merge(dropped, weighted_sum, normalize=normalize, scale=scale)


@method
def dare_ties(
    *,
    key: Array,
    density: PerModel | None = None,
    rescale: bool = True,
    elect_by: ElectBy | None = None,
    tie: TieSign | None = None,
    normalize: bool | None = None,
    scale: Scalar = 1.0,
    compat: Compat = "paper",
) -> Merge:
    """DARE in place of the trimming of TIES: drop, elect, average.

    1. Each entry of each delta_k is kept with probability `density` and divided by it.
    2. and 3. as in `ties`, over what is left.

    Elsewhere: mergekit elects by weighted mass with 0 counting as +, sums instead of averaging
    (`elect_by="weighted", tie="positive", normalize=False`) and rescales by L1 norms (see
    `dare_linear`), which `compat="mergekit"` does as well; MergeLM and fusion_bench trim to the top
    20 % between the two steps: `Merge(chain(drop(rate, key), trim(0.2), elect()), weighted_mean)`.

    Args:
      key: One PRNG key.
      density: In (0, 1], one number or one per model; 0.5 by default.
      rescale: Whether what is kept is divided by the density.
      elect_by: See `elect`.
      tie: See `elect`.
      normalize: Whether the sum is divided by the weights of those who agree; by default it is.
      scale: What multiplies the update.
      compat: Whose defaults and rescaling count.

    References:
      Yu et al., Language Models are Super Mario, 2024 (arXiv 2311.03099), Sec. 4.
    """
    normalize = choose(compat)(normalize, True, False)
    dropped = chain(_dare(density, key, compat, rescale), _elected(elect_by, tie, compat))
    return Merge(dropped, _mean_or_sum(normalize), normalize=normalize, scale=scale)


def _dare(density: PerModel | None, key: Array, compat: Compat, rescale: bool) -> Transform:
    density = choose(compat)(density, 0.5, 1.0)
    values = check_per_model("density", density, lambda d: (d > 0) & (d <= 1), "in (0, 1]")
    rate = 1 - (jnp.asarray(density, jnp.float32) if values is None else values)
    dropped = drop(rate, key, rescale=rescale)
    return rescale_l1(dropped) if rescale and compat == "mergekit" else dropped


@method
def della_linear(
    *,
    key: Array,
    density: PerModel | None = None,
    epsilon: PerModel | None = None,
    rank_by: RankBy = "rank",
    rescale: bool = True,
    normalize: bool = False,
    scale: Scalar = 1.0,
    compat: Compat = "paper",
) -> Merge:
    """DELLA without its election: base + scale * sum_k w_k m_k delta_k / p_k.

    The masks m_k ~ Bernoulli(p_k) are independent; p_k grows with the rank of |delta_k| in its row
    (the last axis, of a vector all of it) from density - epsilon to density + epsilon: see
    `transforms.drop_by_magnitude`. The mean over masks is that of task arithmetic without them.

    Both the authors' code and mergekit fail for density + epsilon > 1, mergekit also at 1 (so for
    densities above 0.85), where here the window shrinks to fit around the density; and for rows of
    length 1, where here p is the density.

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
      compat: Whose defaults count. "mergekit" multiplies the deltas of a model in a tensor by the
        ratio of their L1 norms before and after, instead of dividing by p.

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
    density: PerModel | None = None,
    epsilon: PerModel | None = None,
    rank_by: RankBy = "rank",
    rescale: bool = True,
    elect_by: ElectBy | None = None,
    tie: TieSign | None = None,
    normalize: bool = True,
    scale: Scalar = 1.0,
    compat: Compat = "paper",
) -> Merge:
    """DELLA: drop by rank, elect, average.

    1. Entries of each delta_k are kept with a probability p that grows with their magnitude, and
       divided by p, as in `della_linear`.
    2. and 3. as in `ties`, over what is left.

    Args:
      key: One PRNG key.
      density: See `della_linear`.
      epsilon: See `della_linear`.
      rank_by: See `della_linear`.
      rescale: Whether what is kept is divided by p.
      elect_by: See `elect`.
      tie: See `elect`.
      normalize: Whether the sum is divided by the weights of those who agree.
      scale: What multiplies the update; the authors use 1.1.
      compat: Whose sparsifier and defaults count; mergekit elects by weighted mass, 0 counting as
        +.

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
    default = choose(compat)
    density, epsilon = default(density, 0.7, 1.0), default(epsilon, 0.07, 0.15)
    how = ("probability" if compat == "paper" else "l1") if rescale else None
    return drop_by_magnitude(density, epsilon, key, rank_by, rescale=how)


@method
def breadcrumbs(
    *,
    density: float | Sequence[float] | None = None,
    gamma: float | Sequence[float] | None = None,
    scope: Scope = "tensor",
    normalize: bool = False,
    scale: Scalar = 1.0,
    compat: Compat = "paper",
) -> Merge:
    """Breadcrumbs: task arithmetic without the largest and the smallest changes.

    base + scale * sum_k w_k m_k delta_k. Of each tensor the mask m_k leaves out the fraction
    `gamma` of largest |delta_k|, then keeps the fraction `density` next in magnitude. Exactly,
    whatever is equal; at least one entry; and where density + gamma > 1 fewer of the largest are
    left out.

    The authors' code takes the fractions of every row instead of the tensor. Where gamma rounds
    down to no entry (tensors below 100 of them), mergekit 0.1.4 reverts the whole tensor to the
    base, where here none of the largest is left out.

    Args:
      density: In (0, 1], one number or one per model, static. 0.15 by default, where the authors'
        search begins; mergekit's is 1, which drops nothing.
      gamma: In [0, 1), likewise. 0.006 by default; mergekit's is 0.01.
      scope: Whether fractions are of each "tensor" or of the whole "tree".
      normalize: Whether the sum is divided by sum_k w_k.
      scale: What multiplies the update.
      compat: Whose defaults count; mergekit rounds down.

    References:
      Davari and Belilovsky, Model Breadcrumbs, 2023 (arXiv 2312.06795), Sec. 3.

    >>> one, base = {"a": jnp.array([1.0, -9.0, 2.0, 0.5])}, {"a": jnp.zeros(4)}
    >>> breadcrumbs(density=0.5, gamma=0.25)([one], base)["a"].tolist()
    [1.0, 0.0, 2.0, 0.0]
    """
    thinned = _thinned(density, gamma, scope, compat)
    return Merge(thinned, weighted_sum, normalize=normalize, scale=scale)


@method
def breadcrumbs_ties(
    *,
    density: float | Sequence[float] | None = None,
    gamma: float | Sequence[float] | None = None,
    scope: Scope = "tensor",
    elect_by: ElectBy | None = None,
    tie: TieSign | None = None,
    normalize: bool | None = None,
    scale: Scalar = 1.0,
    compat: Compat = "paper",
) -> Merge:
    """The masks of `breadcrumbs` in place of the trimming of TIES: mask, elect, average.

    Args:
      density: See `breadcrumbs`.
      gamma: See `breadcrumbs`.
      scope: See `breadcrumbs`.
      elect_by: See `elect`.
      tie: See `elect`.
      normalize: Whether the sum is divided by the weights of those who agree; by default it is.
      scale: What multiplies the update.
      compat: Whose defaults count. mergekit, which introduced it, elects by weighted mass with 0
        counting as +, and sums instead of averaging.

    References:
      Davari and Belilovsky, Model Breadcrumbs, 2023 (arXiv 2312.06795); Yadav et al., TIES-Merging,
      2023 (arXiv 2306.01708).
    """
    normalize = choose(compat)(normalize, True, False)
    thinned = chain(_thinned(density, gamma, scope, compat), _elected(elect_by, tie, compat))
    return Merge(thinned, _mean_or_sum(normalize), normalize=normalize, scale=scale)


def _thinned(
    density: float | Sequence[float] | None,
    gamma: float | Sequence[float] | None,
    scope: Scope,
    compat: Compat,
) -> Transform:
    default = choose(compat)
    density, gamma = default(density, 0.15, 1.0), default(gamma, 0.006, 0.01)
    return keep_between(density, gamma, scope, floor=compat == "mergekit")
