"""Coefficients learned on data: AdaMerging, the learned soup, the concrete subspace.

Each descends a loss of the merged model through the merge (`learning.learn`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from sail_jax.learning import Learned, learn
from sail_jax.merging.combining import Transform
from sail_jax.merging.reductions import weighted_sum
from sail_jax.merging.steps import fingerprint
from sail_jax.merging.task_vectors import (
    TaskVectors,
    Weights,
    apply,
    check_scalar,
    origin,
    task_vectors,
)
from sail_jax.trees import leaf_paths

__all__ = [
    "By",
    "Predict",
    "adamerging",
    "concrete_subspace",
    "cross_entropy",
    "entropy",
    "learned_soup",
]

By = Literal["task", "leaf"]
Predict = Callable[[PyTree, PyTree], Array]
_NOTHING = Transform()


def entropy(logits: Float[Array, "... class"]) -> Float[Array, ""]:
    """The mean of -sum_c p_c log p_c; classes masked by a logit of -inf count 0.

    >>> round(float(entropy(jnp.array([[0.0, 0.0, -jnp.inf]]))), 4)
    0.6931
    """
    possible = logits > -jnp.inf
    # both wheres: the gradient of 0 * -inf is no number even where it is discarded
    logp = jnp.where(possible, jax.nn.log_softmax(logits), 0)
    return -jnp.where(possible, jnp.exp(logp) * logp, 0).sum(-1).mean()


def cross_entropy(logits: Float[Array, "... class"], labels: Int[Array, "..."]) -> Float[Array, ""]:
    """The mean of -log p(label)."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def adamerging(
    models: Sequence[PyTree],
    base: PyTree,
    predict: Predict | Sequence[Predict],
    batches: Sequence[PyTree],
    *,
    by: By = "task",
    transform: Transform = _NOTHING,
    init: ArrayLike = 0.3,
    steps: int = 500,
    optimizer: optax.GradientTransformation | None = None,
    clamp: tuple[float, float] | None = None,
) -> Learned:
    """AdaMerging (Yang et al. 2024): base + sum_k lambda_k delta_k of least entropy, unlabelled.

    The loss is sum_k entropy(predict_k(merged, inputs of task k)). by: one lambda per "task", or
    per task and "leaf" (their layer-wise variant). transform: what changes the task vectors first,
    once; `chain(trim(0.2), elect())` makes it AdaMerging++. init: lambda at the start, one number
    or one per model. optimizer: Adam at 1e-3 by default.

    predict(params, inputs) -> logits [..., class]: one for all tasks, or one per task (own heads).
    batches: per task, inputs with leaves [n, batch, ...]; step t takes batch t mod n of each.
    clamp: an interval to which lambda is projected after each step. The authors' code has (0, 1),
    clipped inside the forward pass, where a lambda outside gets no gradient any more; fusion_bench
    has none, the default here.

    coefficients: lambda, [task], or by "leaf" a tree of them, None at leaves that do not float.

    Two tiny Flax Linen classifiers that share a base:

    >>> from flax import linen as nn
    >>> x = jax.random.normal(jax.random.key(0), (2, 4, 8, 3))  # [task, n, batch, feature]
    >>> net = nn.Sequential([nn.Dense(5), nn.relu, nn.Dense(2)])
    >>> base = net.init(jax.random.key(1), x[0, 0])
    >>> models = [net.init(jax.random.key(k), x[0, 0]) for k in (2, 3)]
    >>> got = adamerging(models, base, net.apply, list(x), by="leaf", optimizer=optax.adam(0.05))
    >>> bool(got.losses[-1] < 0.3 * got.losses[0])
    True
    >>> jax.tree.map(jnp.shape, got.coefficients)["params"]["layers_0"]
    {'bias': (2,), 'kernel': (2,)}

    and in Flax NNX, where the graph is split from the parameters:

    >>> from flax import nnx
    >>> make = lambda seed: nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(seed)))
    >>> graph, base = make(0)
    >>> predict = lambda params, inputs: nnx.merge(graph, params)(inputs)
    >>> got = adamerging([make(1)[1], make(2)[1]], base, predict, list(x))
    >>> nnx.merge(graph, got.params)(x[0, 0]).shape, got.coefficients.shape
    ((8, 2), (2,))
    """
    _check_by(by)
    vectors = transform(task_vectors(models, base))
    loss = _entropies(predict, batches, len(models))
    if clamp is not None and not (len(clamp) == 2 and clamp[0] <= clamp[1]):
        raise ValueError(f"clamp: expected an interval (low, high), got {clamp!r}")

    def merge(coefficients: PyTree, key: Array | None) -> PyTree:
        return apply(base, weighted_sum(_scaled(vectors, coefficients, by)))

    low, high = clamp or (None, None)

    def project(coefficients: PyTree) -> PyTree:
        return jax.tree.map(lambda c: jnp.clip(c, low, high), coefficients)

    return learn(
        loss,
        merge,
        _spread(init, vectors, by, len(models)),
        tuple(batches),
        steps=steps,
        optimizer=optimizer,
        project=None if clamp is None else project,
    )


def learned_soup(
    models: Sequence[PyTree],
    base: PyTree | None = None,
    *,
    predict: Predict,
    batches: tuple[PyTree, PyTree],
    by: By = "task",
    loss: Callable[[Array, PyTree], Float[Array, ""]] = cross_entropy,
    temperature: bool = True,
    steps: int = 500,
    optimizer: optax.GradientTransformation | None = None,
) -> Learned:
    """The learned soup (Wortsman et al. 2022): a convex mean of least loss on held-out data.

    sum_k softmax(alpha)_k theta_k with alpha = 0 to begin with, which is the uniform soup; by: one
    alpha per model ("task"), or per model and "leaf". The loss is loss(beta * predict(soup, x), y),
    with beta > 0 learned as well, from 1, so that confidence is not bought with the mixture
    (`temperature=False` keeps it 1). optimizer: Adam at 0.05 by default.

    batches: (x, y) with leaves [n, batch, ...]. No base is needed; one given only says the
    output's dtypes.

    coefficients: {"weights": softmax(alpha), as in `adamerging`, "scale": beta}.
    """
    _check_by(by)
    if len(batches) != 2:
        raise ValueError(f"batches: expected the pair (inputs, targets), got {len(batches)} parts")
    like = origin(next(iter(models or ()), None) if base is None else base)
    vectors = task_vectors(models, like)

    def merge(coefficients: PyTree, key: Array | None) -> tuple[PyTree, Array]:
        shares = jax.tree.map(jax.nn.softmax, coefficients["weights"])
        return apply(like, weighted_sum(_scaled(vectors, shares, by))), jnp.exp(
            coefficients["scale"]
        )

    def objective(soup: tuple[PyTree, Array], batch: tuple[PyTree, PyTree]) -> Float[Array, ""]:
        params, scale = soup
        return loss((scale if temperature else 1.0) * predict(params, batch[0]), batch[1])

    got = learn(
        objective,
        merge,
        {"weights": _spread(0.0, vectors, by, len(models)), "scale": 0.0},
        tuple(batches),
        steps=steps,
        optimizer=optax.adam(0.05) if optimizer is None else optimizer,
    )
    shares = jax.tree.map(jax.nn.softmax, got.coefficients["weights"])
    return Learned(got.params[0], {"weights": shares, "scale": got.params[1]}, got.losses)


def concrete_subspace(
    models: Sequence[PyTree],
    base: PyTree,
    predict: Predict | Sequence[Predict],
    batches: Sequence[PyTree],
    *,
    key: Array,
    transform: Transform = _NOTHING,
    weights: Weights = None,
    scale: Float[ArrayLike, ""] = 0.3,
    temperature: float = 0.5,
    init: float = 0.0,
    steps: int = 2000,
    optimizer: optax.GradientTransformation | None = None,
) -> Learned:
    """Concrete subspace learning (Tang et al. 2023): one mask on all deltas, of least entropy.

    base + scale * m / mean(m) * sum_k w_k delta_k with a mask m in (0, 1) per entry, its mean taken
    per leaf. In training m is a relaxed Bernoulli (Concrete) draw, sigmoid((logit + noise) / T),
    new in each step from `key`; merged in the end is its median, sigmoid(logit / T), which draws
    nothing (fusion_bench draws once more). init: every logit at the start.

    predict, batches, transform, loss and optimizer as in `adamerging`; with its lambda for
    `weights` and scale 1 it is Concrete AdaMerging, one after the other. coefficients: the logits,
    as the base.
    """
    check_scalar("temperature", temperature, lambda x: 0 < x < math.inf, "a number > 0")
    update = weighted_sum(transform(task_vectors(models, base, weights)))
    loss = _entropies(predict, batches, len(models))

    def merge(logits: PyTree, key: Array | None) -> PyTree:
        def masked(path: str, change: Array, logit: Array) -> Array:
            if key is not None:
                leaf_key = key
                for word in fingerprint(path):
                    leaf_key = jax.random.fold_in(leaf_key, word)
                logit = logit + jax.random.logistic(leaf_key, logit.shape, logit.dtype)
            mask = jax.nn.sigmoid(logit / temperature)
            return change * mask / mask.mean()

        leaves, treedef = jax.tree.flatten(update)
        entries = zip(leaf_paths(update), leaves, treedef.flatten_up_to(logits), strict=True)
        return apply(base, treedef.unflatten(masked(*entry) for entry in entries), scale)

    return learn(
        loss,
        merge,
        jax.tree.map(lambda change: jnp.full_like(change, init), update),
        tuple(batches),
        steps=steps,
        optimizer=optimizer,
        key=key,
    )


def _scaled(vectors: TaskVectors, coefficients: PyTree, by: By) -> TaskVectors:
    """Task vectors with weights times coefficients, [task] for all leaves or for each."""

    def scaled(weight: Array, c: Array) -> Array:
        return weight * c.astype(weight.dtype).reshape(-1, *(1,) * (weight.ndim - 1))

    by_leaf = coefficients if by == "leaf" else jax.tree.map(lambda _: coefficients, vectors.weight)
    return vectors._replace(weight=jax.tree.map(scaled, vectors.weight, by_leaf))


def _spread(value: ArrayLike, vectors: TaskVectors, by: By, tasks: int) -> PyTree:
    try:
        per_task = jnp.broadcast_to(jnp.asarray(value, jnp.result_type(float)), (tasks,))
    except (TypeError, ValueError) as error:
        raise ValueError(f"init: expected a number or {tasks}, got {value!r}") from error
    return per_task if by == "task" else jax.tree.map(lambda _: per_task, vectors.delta)


def _entropies(
    predict: Predict | Sequence[Predict], batches: Sequence[PyTree], tasks: int
) -> Callable[[PyTree, Sequence[PyTree]], Float[Array, ""]]:
    """The sum over tasks of the entropy of predictions."""
    heads = [predict] * tasks if callable(predict) else list(predict)
    for name, given in (("predict", heads), ("batches", batches)):
        if len(given) != tasks:
            raise ValueError(f"{name}: expected one per model, {tasks}, got {len(given)}")

    def loss(params: PyTree, inputs: Sequence[PyTree]) -> Float[Array, ""]:
        pairs = zip(heads, inputs, strict=True)
        return jnp.stack([entropy(head(params, x)) for head, x in pairs]).sum()

    return loss


def _check_by(by: str) -> None:
    if by not in get_args(By):
        raise ValueError(f"by: expected one of {get_args(By)}, got {by!r}")
