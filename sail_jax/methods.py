"""Merging methods by name: one expression each, one signature for all.

    method(models, base=None, *, weights=None, key=None, **knobs) -> merged

models: sequence of M pytrees; base: the pytree they were tuned from, of the same leaf paths and
shapes; weights: [M], finite; key: a PRNG key, ignored by methods that draw nothing. Floating leaves
are merged in float32 (float64 where a model has it) and cast once to the dtype of the base's leaf
(of the first model's, without a base); integer and bool leaves have to agree and are copied.

Below, delta_k = theta_k - base and w_k are the weights. All methods are pure, can be transformed by
`jit`, `vmap` and `grad` over arrays (not over strings, bools and the density of `ties`), and raise
as `task_vectors`, `apply` and their rules do. Under a transformation, values that are traced cannot
be checked and are taken on trust. Called eagerly, a method compiles once per shape of leaf; under
`jit`, which fuses its passes, once per leaf.
"""

from collections.abc import Callable, Sequence

from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.checks import nearest
from sail_jax.counts import average, total
from sail_jax.rules import ElectBy, Scope, Tie, check_density, drop, elect, trim
from sail_jax.task_vectors import Count, Rule, Weights, apply, chain, origin, task_vectors

__all__ = [
    "METHODS",
    "Method",
    "dare_linear",
    "dare_ties",
    "get",
    "linear",
    "merge",
    "task_arithmetic",
    "ties",
]

Method = Callable[..., PyTree]
Scalar = Float[ArrayLike, ""]
_everybody: Rule = chain()


def merge(
    models: Sequence[PyTree],
    base: PyTree | None,
    *,
    rule: Rule = _everybody,
    count: Count = total,
    weights: Weights = None,
    normalize: bool = False,
    scale: Scalar = 1.0,
) -> PyTree:
    """base + scale * count(rule(votes of the models)): what every method here is.

    `normalize` divides the weights by their sum over all models, before any rule sees them.
    """
    return apply(base, count(rule(task_vectors(models, base, weights, normalize))), scale)


def linear(
    models: Sequence[PyTree],
    base: PyTree | None = None,
    *,
    weights: Weights = None,
    key: Array | None = None,
    normalize: bool = True,
) -> PyTree:
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
    like = next(iter(models or ()), None) if base is None else base
    return merge(models, origin(like), weights=weights, normalize=normalize)


def task_arithmetic(
    models: Sequence[PyTree],
    base: PyTree | None = None,
    *,
    weights: Weights = None,
    key: Array | None = None,
    scale: Scalar = 1.0,
) -> PyTree:
    """base + scale * sum_k w_k delta_k, with weights 1 (Ilharco et al. 2023).

    A negative weight forgets a task. The sum is not divided by M: M copies of one model add up to
    base + scale * M * delta. Ilharco et al. choose `scale` on held-out data, often near 0.3, which
    is the default of fusion_bench; mergekit's is 1.
    """
    return merge(models, base, weights=weights, scale=scale)


def ties(
    models: Sequence[PyTree],
    base: PyTree | None = None,
    *,
    weights: Weights = None,
    key: Array | None = None,
    density: float = 0.2,
    scope: Scope = "tree",
    elect_by: ElectBy = "mass",
    tie: Tie = "abstain",
    normalize: bool = True,
    scale: Scalar = 1.0,
) -> PyTree:
    """TIES (Yadav et al. 2023): trim, elect a sign, average those who agree with it.

    1. of each delta_k keep the fraction `density` of largest magnitude;
    2. per entry elect the sign of sum_k delta_k over what is left;
    3. base + scale * sum_k w_k delta_k / sum_k w_k over the k that kept the entry and have that
       sign (their "disjoint mean"); where there are none, the base. With `normalize=False` the sum.

    Programs of this name differ. Yadav et al. and MergeLM trim over the whole model, elect by
    mass, average, and give an entry whose sum is exactly 0 the sign of the majority of entries:
    `scope="tree", elect_by="mass", tie="majority"` up to what they keep at the threshold (all
    equals, one entry more than k). fusion_bench does the same but sums, at scale 0.3:
    `normalize=False, scale=0.3`. mergekit trims each tensor, elects by weighted mass with 0
    counting as +, and trims nothing by default:
    `density=1.0, scope="tensor", elect_by="weighted", tie="positive"`; its k rounds down, and it
    fails where that gives 0, where here one entry stays.
    """
    return merge(
        models,
        base,
        rule=chain(trim(density, scope), elect(elect_by, tie)),
        count=average if normalize else total,
        weights=weights,
        normalize=normalize,
        scale=scale,
    )


def dare_linear(
    models: Sequence[PyTree],
    base: PyTree | None = None,
    *,
    weights: Weights = None,
    key: Array | None = None,
    density: Scalar = 0.5,
    normalize: bool = False,
    scale: Scalar = 1.0,
) -> PyTree:
    """DARE (Yu et al. 2024), then task arithmetic: base + scale * sum_k w_k m_k delta_k / density.

    The masks m_k ~ Bernoulli(density) are independent over entries and models and come from `key`,
    which is required; drop rate p = 1 - density. The mean over masks is that of task arithmetic
    without them. `normalize` divides by sum_k w_k (of all models, which keeps the mean).

    Elsewhere: mergekit divides by the achieved ratio of L1 norms per tensor instead of by density,
    which is biased where few entries dominate; fusion_bench's scale is 0.5 and its drop rate 1
    gives NaN.
    """
    rule = _dare(density, key)
    return merge(models, base, rule=rule, weights=weights, normalize=normalize, scale=scale)


def dare_ties(
    models: Sequence[PyTree],
    base: PyTree | None = None,
    *,
    weights: Weights = None,
    key: Array | None = None,
    density: Scalar = 0.5,
    elect_by: ElectBy = "mass",
    tie: Tie = "abstain",
    normalize: bool = True,
    scale: Scalar = 1.0,
) -> PyTree:
    """DARE (Yu et al. 2024) in place of the trimming of TIES: drop, elect, average.

    1. each entry of each delta_k is kept with probability `density` and divided by it, with masks
       from `key`, which is required;
    2. and 3. as in `ties`, over what is left.

    Elsewhere: mergekit elects by weighted mass with 0 counting as +, sums instead of averaging
    (`elect_by="weighted", tie="positive", normalize=False`) and rescales by L1 norms (see
    `dare_linear`); MergeLM and fusion_bench trim to the top 20 % as well between the two steps:
    `merge(models, base, rule=chain(drop(rate, key), trim(0.2), elect()), count=average)`.
    """
    return merge(
        models,
        base,
        rule=chain(_dare(density, key), elect(elect_by, tie)),
        count=average if normalize else total,
        weights=weights,
        normalize=normalize,
        scale=scale,
    )


def _dare(density: Scalar, key: Array | None) -> Rule:
    check_density(density)
    if key is None:
        raise TypeError("key: expected a PRNG key, for the masks of DARE, got None")
    return drop(1 - density, key)


METHODS: dict[str, Method] = {
    method.__name__: method for method in (linear, task_arithmetic, ties, dare_linear, dare_ties)
}


def get(name: str) -> Method:
    """The method called `name`; ValueError with the nearest name for an unknown one.

    >>> get("ties") is ties
    True
    """
    if name not in METHODS:
        raise ValueError(f"no merging method {name!r}{nearest(str(name), METHODS)}")
    return METHODS[name]
