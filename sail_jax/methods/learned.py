"""Merging coefficients learned on data: AdaMerging, the learned soup, the concrete subspace.

Each function minimises a loss of the merged model by gradient descent through the merge
(`learning.learn`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from sail_jax.checks import one_of, scalar
from sail_jax.learning import Learned, learn
from sail_jax.merging.combining import Transform
from sail_jax.merging.reductions import weighted_sum
from sail_jax.merging.steps import fingerprint
from sail_jax.merging.task_vectors import (
    TaskVectors,
    Weights,
    apply,
    in_float64,
    origin,
    task_vectors,
)
from sail_jax.trees import leaf_paths

By = Literal["task", "leaf"]
Predict = Callable[[PyTree, PyTree], Array]
_NOTHING = Transform()


def entropy(logits: Float[Array, "... class"]) -> Float[Array, ""]:
    """Computes the mean entropy of predictions in nats.

    Args:
      logits: Unnormalised log-probabilities. A class with logit -inf is masked and adds 0.

    Returns:
      The mean over all leading axes, a scalar.

    >>> round(float(entropy(jnp.array([[0.0, 0.0, -jnp.inf]]))), 4)
    0.6931
    """
    possible = logits > -jnp.inf
    # Both wheres are needed: the gradient of 0 * -inf is NaN even in a discarded branch.
    logp = jnp.where(possible, jax.nn.log_softmax(logits), 0)
    return -jnp.where(possible, jnp.exp(logp) * logp, 0).sum(-1).mean()


def cross_entropy(logits: Float[Array, "... class"], labels: Int[Array, "..."]) -> Float[Array, ""]:
    """Computes the mean of -log p(label) in nats.

    Args:
      logits: Unnormalised log-probabilities.
      labels: The index of the right class.

    Returns:
      The mean over all leading axes, a scalar.
    """
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@in_float64("models", "base")
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
    r"""Learns task-arithmetic coefficients that make predictions most certain (AdaMerging).

    .. math::

        \min_\lambda \sum_k H(\mathrm{predict}_k(\theta, x_k)),
        \qquad \theta = \theta_0 + \sum_k \lambda_k \delta_k

    H is the entropy of the predictions on inputs of task k. It requires no labels.

    Args:
      models: M pytrees, one per task; see `task_vectors`.
      base: The pytree that they were fine-tuned from.
      predict: `predict(params, inputs)` returns logits `[..., class]`. One function for all tasks,
        or one per task if each has its own head.
      batches: For each task, unlabelled inputs with leaves `[n, batch, ...]`. Step t uses batch t
        mod n of each task.
      by: One coefficient per "task", or one per task and "leaf" (the authors' layer-wise variant).
      transform: Applied to the task vectors once, at the start. `chain(trim(0.2), elect())` gives
        AdaMerging++.
      init: The initial coefficients, one number or one per model. The authors use 0.3.
      steps: The number of steps of gradient descent.
      optimizer: Adam at 1e-3 by default.
      clamp: The interval to which coefficients are projected after each step, or None for no
        limits. (The authors' code clips to (0, 1) inside the forward pass. A coefficient outside
        then gets gradient 0. fusion_bench does not clip.)

    Returns:
      The merged model, the coefficients, and the losses. The coefficients have shape `[task]`. By
      "leaf" they are a tree of such arrays, None at leaves that are not floating.

    Raises:
      ValueError: For an unknown `by`, a number of batches or predictors that differs from M, an
        invalid `init` or `clamp`, a loss that is not finite, and as in `task_vectors`.
      TypeError: As in `task_vectors`.

    References:
      Yang et al., AdaMerging: Adaptive Model Merging for Multi-Task Learning, 2024 (arXiv
      2310.02575).

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

    The same in Flax NNX, where the graph is split from the parameters:

    >>> from flax import nnx
    >>> make = lambda seed: nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(seed)))
    >>> graph, base = make(0)
    >>> predict = lambda params, inputs: nnx.merge(graph, params)(inputs)
    >>> got = adamerging([make(1)[1], make(2)[1]], base, predict, list(x))
    >>> nnx.merge(graph, got.params)(x[0, 0]).shape, got.coefficients.shape
    ((8, 2), (2,))
    """
    one_of("by", by, By)
    # Computed once, outside the loss: only the coefficients change during learning.
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


@in_float64("models", "base")
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
    r"""Learns the convex combination of models with the smallest held-out loss (learned soup).

    .. math::

        \min_{\alpha, \beta} \ell(\beta \, \mathrm{predict}(\theta, x), y),
        \qquad \theta = \sum_k \operatorname{softmax}(\alpha)_k \, \theta_k

    Learning starts at the uniform soup, alpha = 0. The factor beta > 0 multiplies the logits and
    starts at 1. It adjusts the confidence of the predictions independently of the mixture.

    Args:
      models: M pytrees of the same leaf paths and shapes.
      base: Optional. It only determines the output's structure and dtypes.
      predict: `predict(params, inputs)` returns logits `[..., class]`, or any input of `loss`.
      batches: The pair (inputs, targets) of held-out data with leaves `[n, batch, ...]`. Step t
        uses batch t mod n.
      by: One alpha per model ("task"), or one per model and "leaf".
      loss: `loss(outputs, targets)`, a scalar.
      temperature: Whether beta is learned. If not, it stays 1.
      steps: The number of steps of gradient descent.
      optimizer: Adam at 0.05 by default.

    Returns:
      The soup, its coefficients and the losses. The coefficients are {"weights": softmax(alpha),
      "scale": beta}. The weights have shape `[task]`; by "leaf" they are a tree of such arrays.

    Raises:
      ValueError: For an unknown `by`, batches that are not a pair, a loss that is not finite, and
        as in `task_vectors`.
      TypeError: As in `task_vectors`.

    References:
      Wortsman et al., Model soups, 2022 (arXiv 2203.05482).

    >>> models = [{"w": jnp.array([0.0])}, {"w": jnp.array([1.0])}]
    >>> data = jnp.ones((1, 1, 1)), jnp.full((1, 1, 1), 0.75)  # one batch of one pair x, y
    >>> error = lambda y, target: jnp.mean((y - target) ** 2)
    >>> got = learned_soup(
    ...     models, predict=lambda p, x: x * p["w"], batches=data, loss=error, temperature=False
    ... )
    >>> got.coefficients["weights"].round(2).tolist()
    [0.25, 0.75]
    """
    one_of("by", by, By)
    if len(batches) != 2:
        raise ValueError(f"batches: expected the pair (inputs, targets), got {len(batches)} parts")
    like = origin(next(iter(models or ()), None) if base is None else base)
    vectors = task_vectors(models, like)

    def merge(coefficients: PyTree, key: Array | None) -> tuple[PyTree, Array]:
        # The logarithm of the scale is learned, so the scale stays positive.
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


@in_float64("models", "base")
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
    r"""Learns one mask on all task vectors that makes predictions most certain (Concrete).

    .. math:: \theta = \theta_0 + \lambda \, \frac{m}{\operatorname{mean}(m)} \sum_k w_k \delta_k

    The mask m contains a number in (0, 1) for each entry, and its mean is taken over each leaf. It
    minimises the loss of `adamerging`, which requires no labels. In each learning step, m is a new
    draw from the relaxed Bernoulli (Concrete) distribution, sigmoid((logit + noise) / temperature).
    The final merge uses the median sigmoid(logit / temperature) and draws nothing. (fusion_bench
    draws once more.)

    With the coefficients of `adamerging` as `weights` and scale 1, this is Concrete AdaMerging,
    with the two parts learned one after another.

    Args:
      models: M pytrees, one per task; see `task_vectors`.
      base: The pytree that they were fine-tuned from.
      predict: One function for all tasks, or one per task; see `adamerging`.
      batches: For each task, unlabelled inputs; see `adamerging`.
      key: The PRNG key for the draws of all steps.
      transform: Applied to the task vectors once, at the start.
      weights: One per model; 1 by default.
      scale: The factor :math:`\lambda` on the merged task vector. The authors use 0.3.
      temperature: The temperature of the relaxed Bernoulli distribution, > 0.
      init: The initial value of every logit.
      steps: The number of steps of gradient descent.
      optimizer: Adam at 1e-3 by default.

    Returns:
      The merged model, the logits as its coefficients (a tree like the base, None at leaves that
      are not floating), and the losses.

    Raises:
      ValueError: Unless `temperature` is > 0, for a number of batches or predictors that differs
        from M, a loss that is not finite, and as in `task_vectors`.
      TypeError: As in `task_vectors`.

    References:
      Tang et al., Concrete Subspace Learning based Interference Elimination for Multi-task Model
      Fusion, 2023 (arXiv 2312.06173).
    """
    scalar("temperature", temperature, lambda x: 0 < x < math.inf, "a number > 0")
    update = weighted_sum(transform(task_vectors(models, base, weights)))
    loss = _entropies(predict, batches, len(models))

    def merge(logits: PyTree, key: Array | None) -> PyTree:
        def masked(path: str, change: Array, logit: Array) -> Array:
            if key is not None:
                # The key depends on the path, so the noise of a leaf does not depend on the order
                # of leaves.
                leaf_key = key
                for word in fingerprint(path):
                    leaf_key = jax.random.fold_in(leaf_key, word)
                logit = logit + jax.random.logistic(leaf_key, logit.shape, logit.dtype)
            mask = jax.nn.sigmoid(logit / temperature)
            # Division by the mean keeps the size of the update as the mask shrinks.
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
    """Multiplies weights by coefficients `[task]`, shared by all leaves or one array per leaf."""

    def scaled(weight: Array, c: Array) -> Array:
        return weight * c.astype(weight.dtype).reshape(-1, *(1,) * (weight.ndim - 1))

    by_leaf = coefficients if by == "leaf" else jax.tree.map(lambda _: coefficients, vectors.weight)
    return vectors._replace(weight=jax.tree.map(scaled, vectors.weight, by_leaf))


def _spread(value: ArrayLike, vectors: TaskVectors, by: By, tasks: int) -> PyTree:
    """Makes the initial coefficients: `[task]`, or a tree of such arrays by "leaf"."""
    try:
        per_task = jnp.broadcast_to(jnp.asarray(value, jnp.result_type(float)), (tasks,))
    except (TypeError, ValueError) as error:
        raise ValueError(f"init: expected a number or {tasks}, got {value!r}") from error
    return per_task if by == "task" else jax.tree.map(lambda _: per_task, vectors.delta)


def _entropies(
    predict: Predict | Sequence[Predict], batches: Sequence[PyTree], tasks: int
) -> Callable[[PyTree, Sequence[PyTree]], Float[Array, ""]]:
    """Computes the loss of AdaMerging: the sum over tasks of the entropy of predictions."""
    heads = [predict] * tasks if callable(predict) else list(predict)
    for name, given in (("predict", heads), ("batches", batches)):
        if len(given) != tasks:
            raise ValueError(f"{name}: expected one per model, {tasks}, got {len(given)}")

    def loss(params: PyTree, inputs: Sequence[PyTree]) -> Float[Array, ""]:
        pairs = zip(heads, inputs, strict=True)
        return jnp.stack([entropy(head(params, x)) for head, x in pairs]).sum()

    return loss
