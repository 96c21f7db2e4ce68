"""Sums and means of votes, thinned out: soups, task arithmetic, TIES, DARE, DELLA, breadcrumbs."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.merging.merge import Compat, Expression, default, method
from sail_jax.merging.reductions import average, total
from sail_jax.merging.sparsifiers import RankBy, magprune, outliers
from sail_jax.merging.task_vectors import Count, Rule, Weights, chain, everybody
from sail_jax.merging.transforms import (
    ElectBy,
    PerModel,
    Scope,
    Tie,
    check_per_model,
    drop,
    elect,
    rescaled,
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
    "merge",
    "task_arithmetic",
    "ties",
]

Scalar = Float[ArrayLike, ""]


def merge(
    models: Sequence[PyTree],
    base: PyTree | None,
    *,
    rule: Rule = everybody,
    count: Count = total,
    weights: Weights = None,
    normalize: bool = False,
    scale: Scalar = 1.0,
) -> PyTree:
    """base + scale * count(rule(votes of the models)): what every method here is.

    `normalize` divides the weights by their sum over all models, before any rule sees them.
    """
    return Expression(count, rule, normalize=normalize, scale=scale).merge(models, base, weights)


@method
def linear(*, key: Array | None = None, normalize: bool = True) -> Expression:
    """Weighted mean of parameters, sum_k w_k theta_k / sum_k w_k: a model soup.

    The uniform soup of Wortsman et al. (2022) for the default weights, which are equal. With
    `normalize=False` the plain sum. No base is needed; one given only says the output's dtypes.
    Weights may be negative (extrapolation) if their sum is not 0.

    Elsewhere: mergekit rounds the weights to the tensors' dtype (0.3 is 0.3008 in bfloat16), sums
    in that dtype, and gives infinities where the weights sum to 0; fusion_bench averages integer
    buffers too.

    >>> linear([{"a": 1.0}, {"a": 4.0}], weights=[2, 1])
    {'a': Array(2., dtype=float32)}
    """
    return Expression(total, normalize=normalize, base="unused")


@method
def task_arithmetic(
    *, key: Array | None = None, normalize: bool = False, scale: Scalar = 1.0
) -> Expression:
    """base + scale * sum_k w_k delta_k, with weights 1 (Ilharco et al. 2023).

    A negative weight forgets a task; with bases of their own, analogies are sums of task vectors:
    `weights=[1, 1, -1]` is a + b - c. The sum is not divided by M: M copies of one model add up to
    base + scale * M * delta, unless `normalize` divides it by sum_k w_k. Ilharco et al. choose
    `scale` on held-out data, often near 0.3, which is the default of fusion_bench; mergekit's is 1.
    """
    return Expression(total, normalize=normalize, scale=scale)


@method
def ties(
    *,
    key: Array | None = None,
    density: float | Sequence[float] | None = None,
    scope: Scope | None = None,
    elect_by: ElectBy | None = None,
    tie: Tie | None = None,
    normalize: bool = True,
    scale: Scalar = 1.0,
    compat: Compat = "paper",
) -> Expression:
    """TIES (Yadav et al. 2023): trim, elect a sign, average those who agree with it.

    1. of each delta_k keep the fraction `density` (0.2) of largest magnitude;
    2. per entry elect the sign of sum_k delta_k over what is left;
    3. base + scale * sum_k w_k delta_k / sum_k w_k over the k that kept the entry and have that
       sign (their "disjoint mean"); where there are none, the base. With `normalize=False` the sum.

    Programs of this name differ. Yadav et al. and MergeLM trim over the whole model, elect by
    mass, average, and give an entry whose sum is exactly 0 the sign of the majority of entries:
    `scope="tree", elect_by="mass", tie="majority"` up to what they keep at the threshold (all
    equals, one entry more than k). fusion_bench does the same but sums, at scale 0.3:
    `normalize=False, scale=0.3`. mergekit trims each tensor, elects by weighted mass with 0
    counting as +, and trims nothing by default: `compat="mergekit"` is
    `density=1.0, scope="tensor", elect_by="weighted", tie="positive"` with k rounded down; it
    fails where that gives 0, where here one entry stays.
    """
    paper = default(compat)
    rule = trim(
        paper(density, 0.2, 1.0), paper(scope, "tree", "tensor"), floor=compat == "mergekit"
    )
    return Expression(
        average if normalize else total,
        chain(rule, _elect(elect_by, tie, compat)),
        normalize=normalize,
        scale=scale,
    )


def _elect(by: ElectBy | None, tie: Tie | None, compat: Compat) -> Rule:
    paper = default(compat)
    return elect(paper(by, "mass", "weighted"), paper(tie, "abstain", "positive"))


@method
def dare_linear(
    *,
    key: Array | None = None,
    density: PerModel | None = None,
    rescale: bool = True,
    normalize: bool = False,
    scale: Scalar = 1.0,
    compat: Compat = "paper",
) -> Expression:
    """DARE (Yu et al. 2024), then task arithmetic: base + scale * sum_k w_k m_k delta_k / density.

    The masks m_k ~ Bernoulli(density), 0.5, are independent over entries and models and come from
    `key`, which is required; drop rate p = 1 - density. The mean over masks is that of task
    arithmetic without them. `normalize` divides by sum_k w_k (of all models, which keeps the mean);
    without `rescale` nothing is divided by the density.

    Elsewhere: mergekit divides by the achieved ratio of L1 norms per tensor instead of by density,
    which is biased where few entries dominate, and drops nothing by default (`compat="mergekit"`);
    fusion_bench's scale is 0.5 and its drop rate 1 gives NaN.
    """
    rule = _dare(density, key, compat, rescale)
    return Expression(total, rule, normalize=normalize, scale=scale)


@method
def dare_ties(
    *,
    key: Array | None = None,
    density: PerModel | None = None,
    rescale: bool = True,
    elect_by: ElectBy | None = None,
    tie: Tie | None = None,
    normalize: bool | None = None,
    scale: Scalar = 1.0,
    compat: Compat = "paper",
) -> Expression:
    """DARE (Yu et al. 2024) in place of the trimming of TIES: drop, elect, average.

    1. each entry of each delta_k is kept with probability `density` and divided by it, with masks
       from `key`, which is required;
    2. and 3. as in `ties`, over what is left.

    Elsewhere: mergekit elects by weighted mass with 0 counting as +, sums instead of averaging
    (`elect_by="weighted", tie="positive", normalize=False`) and rescales by L1 norms (see
    `dare_linear`), which `compat="mergekit"` does as well; MergeLM and fusion_bench trim to the top
    20 % between the two steps:
    `merge(models, base, rule=chain(drop(rate, key), trim(0.2), elect()), count=average)`.
    """
    normalize = default(compat)(normalize, True, False)
    rule = chain(_dare(density, key, compat, rescale), _elect(elect_by, tie, compat))
    return Expression(average if normalize else total, rule, normalize=normalize, scale=scale)


def _dare(density: PerModel | None, key: Array | None, compat: Compat, rescale: bool) -> Rule:
    density = default(compat)(density, 0.5, 1.0)
    check_per_model("density", density, lambda d: (d > 0) & (d <= 1), "in (0, 1]")
    rule = drop(1 - jnp.asarray(density, jnp.float32), key, rescale=rescale)
    return rescaled(rule) if rescale and compat == "mergekit" else rule


@method
def della_linear(
    *,
    key: Array | None = None,
    density: PerModel | None = None,
    epsilon: PerModel | None = None,
    rank_by: RankBy = "rank",
    rescale: bool = True,
    normalize: bool = False,
    scale: Scalar = 1.0,
    compat: Compat = "paper",
) -> Expression:
    """DELLA (Deep et al. 2024) without its election: base + scale * sum_k w_k m_k delta_k / p_k.

    The masks m_k ~ Bernoulli(p_k) are independent and come from `key`, which is required; p_k grows
    with the rank of |delta_k| in its row (the last axis, of a vector all of it) from density -
    epsilon to density + epsilon, or with |delta_k| itself for `rank_by="magnitude"`: see
    `sparsifiers.magprune`. The mean over masks is that of task arithmetic without them.

    Defaults are the authors': density 0.7, epsilon 0.07 (a drop rate of 0.3, a window of 0.14).
    mergekit (`compat="mergekit"`): density 1, epsilon 0.15, and the votes of a model in a tensor
    are multiplied by the ratio of their L1 norms before and after instead of divided by p.
    It drops nothing by default. Both fail for density + epsilon > 1, mergekit also at 1 (so for
    densities above 0.85), where here the window shrinks to fit around the density; and for rows of
    length 1, where here p is the density.

    >>> one, base = {"a": jnp.array([[1.0, -2.0]])}, {"a": jnp.zeros((1, 2))}
    >>> della_linear([one], base, density=1.0, key=jnp.array([0, 1], "uint32"))["a"].tolist()
    [[1.0, -2.0]]
    """
    rule = _della(density, epsilon, key, rank_by, compat, rescale)
    return Expression(total, rule, normalize=normalize, scale=scale)


@method
def della(
    *,
    key: Array | None = None,
    density: PerModel | None = None,
    epsilon: PerModel | None = None,
    rank_by: RankBy = "rank",
    rescale: bool = True,
    elect_by: ElectBy | None = None,
    tie: Tie | None = None,
    normalize: bool = True,
    scale: Scalar = 1.0,
    compat: Compat = "paper",
) -> Expression:
    """DELLA (Deep et al. 2024): drop by rank, elect, average.

    1. of each delta_k entries are kept with a probability p that grows with their magnitude, and
       divided by p, as in `della_linear`, with masks from `key`, which is required;
    2. and 3. as in `ties`, over what is left. The authors use scale 1.1.

    `compat="mergekit"` has the sparsifier of mergekit, elects by weighted mass, and counts 0 as +.
    """
    rule = _della(density, epsilon, key, rank_by, compat, rescale)
    return Expression(
        average if normalize else total,
        chain(rule, _elect(elect_by, tie, compat)),
        normalize=normalize,
        scale=scale,
    )


def _della(
    density: PerModel | None,
    epsilon: PerModel | None,
    key: Array | None,
    rank_by: RankBy,
    compat: Compat,
    rescale: bool,
) -> Rule:
    paper = default(compat)
    density, epsilon = paper(density, 0.7, 1.0), paper(epsilon, 0.07, 0.15)
    how: Any = paper(None, "probability", "l1") if rescale else None
    return magprune(density, epsilon, key, rank_by, rescale=how)


@method
def breadcrumbs(
    *,
    key: Array | None = None,
    density: float | Sequence[float] | None = None,
    gamma: float | Sequence[float] | None = None,
    scope: Scope = "tensor",
    normalize: bool = False,
    scale: Scalar = 1.0,
    compat: Compat = "paper",
) -> Expression:
    """Model breadcrumbs (Davari & Belilovsky 2023): task arithmetic without the largest and the
    smallest changes, base + scale * sum_k w_k m_k delta_k.

    Of each tensor (`scope="tree"`: of the whole model) m_k leaves out the fraction `gamma` of
    largest |delta_k|, then keeps the fraction `density` next in magnitude. Exactly, whatever is
    equal; at least one entry; and where density + gamma > 1 fewer of the largest are left out.

    Defaults: gamma 0.006 and density 0.15, where the authors' search for them begins. Their code
    takes the fractions of every row instead of the tensor. mergekit (`compat="mergekit"`):
    gamma 0.01, density 1, rounded down; it drops nothing by default. Where gamma rounds down to no
    entry (tensors below 100 of them), mergekit 0.1.4 reverts the whole tensor to the base, where
    here none of the largest is left out.

    >>> one, base = {"a": jnp.array([1.0, -9.0, 2.0, 0.5])}, {"a": jnp.zeros(4)}
    >>> breadcrumbs([one], base, density=0.5, gamma=0.25)["a"].tolist()
    [1.0, 0.0, 2.0, 0.0]
    """
    rule = _outliers(density, gamma, scope, compat)
    return Expression(total, rule, normalize=normalize, scale=scale)


@method
def breadcrumbs_ties(
    *,
    key: Array | None = None,
    density: float | Sequence[float] | None = None,
    gamma: float | Sequence[float] | None = None,
    scope: Scope = "tensor",
    elect_by: ElectBy | None = None,
    tie: Tie | None = None,
    normalize: bool | None = None,
    scale: Scalar = 1.0,
    compat: Compat = "paper",
) -> Expression:
    """The masks of `breadcrumbs` in place of the trimming of TIES: thin out, elect, average.

    mergekit (`compat="mergekit"`), which introduced it, elects by weighted mass with 0 counting as
    +, and sums instead of averaging.
    """
    normalize = default(compat)(normalize, True, False)
    rule = chain(_outliers(density, gamma, scope, compat), _elect(elect_by, tie, compat))
    return Expression(average if normalize else total, rule, normalize=normalize, scale=scale)


def _outliers(
    density: float | Sequence[float] | None,
    gamma: float | Sequence[float] | None,
    scope: Scope,
    compat: Compat,
) -> Rule:
    paper = default(compat)
    density, gamma = paper(density, 0.15, 1.0), paper(gamma, 0.006, 0.01)
    return outliers(density, gamma, scope, floor=compat == "mergekit")
