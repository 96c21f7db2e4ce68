"""Weights from the models: for a known target, or from the loss after training.

Weights from distances between tasks, without models, are in `quadratic`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.checks import concrete, one_of
from sail_jax.learning import check_batches, learn
from sail_jax.proximal.quadratic import Weights, affine_weights, host, simplex_weights, tiny
from sail_jax.trees import leaf_paths

Constraint = Literal["none", "affine", "simplex"]
Loss = Callable[[PyTree, Any], Float[Array, ""]]


def from_parameters(
    models: Sequence[PyTree], target: PyTree, *, constraint: Constraint = "none"
) -> Weights:
    """Finds the combination of models closest to a known target.

    The weights minimise |sum_i w_i theta_i - theta*|^2 (SAIL's eq. 4), summed over all leaves in
    float64.

    Args:
      models: At least one pytree of floating leaves.
      target: theta*, with the same leaf paths and shapes.
      constraint: "none" for any weights (eq. 4), "affine" for weights with sum 1, or "simplex" for
        nonnegative weights with sum 1 (eq. 10).

    Returns:
      The weights, with the remaining squared distance as the objective.

    Raises:
      ValueError: If `models` is empty, for an unknown `constraint`, and for leaves that differ or
        are not finite. The message contains the leaf. For "none" and "affine", if the weights are
        not unique.
      TypeError: For leaves that are not floating, or are traced.

    >>> from_parameters([{"a": [1.0, 0.0]}, {"a": [1.0, 1.0]}], {"a": [3.0, 2.0]}).weights.tolist()
    [1.0, 2.0]
    """
    one_of("constraint", constraint, Constraint)
    if not len(models):
        raise ValueError("models: expected at least one, got none")
    names, n = leaf_paths(target), len(models)
    last = _leaves("target", target, names, None)
    shapes = [np.shape(x) for x in last]
    columns = [_leaves(f"models[{i}]", model, names, shapes) for i, model in enumerate(models)]
    # The Gram matrix of the models and (last) the target, in one pass over the leaves.
    G = np.zeros((n + 1, n + 1))
    for leaf in zip(*columns, last, strict=True):
        flat = np.stack([np.asarray(x, np.float64).ravel() for x in leaf])
        if constraint != "none":
            # With weights of sum 1, `|sum w_i theta_i - theta*| = |sum w_i (theta_i - theta*)|`.
            # Differences are computed before squaring, because the models are close together
            # relative to their size.
            flat = np.vstack([flat[:-1] - flat[-1], flat[-1]])
        G += flat @ flat.T
    if constraint != "none":
        H = 2 * G[:-1, :-1]
        return affine_weights(H) if constraint == "affine" else simplex_weights(H)
    G, b, c = G[:-1, :-1], G[:-1, -1], G[-1, -1]
    spread = np.linalg.eigvalsh(G)
    if spread[0] <= tiny(G):
        raise ValueError(
            "models: expected linearly independent ones (leave one out, or constrain them); the "
            f"eigenvalues of their inner products are {spread[0]:.3g} to {spread[-1]:.3g}"
        )
    w = np.linalg.solve(G, b)
    # |sum_i w_i theta_i - theta*|^2 by inner products. Rounding may make it slightly negative.
    return Weights(w, max(float(w @ G @ w - 2 * b @ w + c), 0.0), float(spread[-1] / spread[0]))


def after_training(
    models: Sequence[PyTree],
    loss: Loss,
    train: PyTree | None,
    validation: PyTree,
    *,
    optimizer: optax.GradientTransformation | None = None,
) -> Callable[[Float[ArrayLike, "model"]], Float[Array, ""]]:
    """Makes the loss after training a function of merging weights (SAIL's eq. 3).

    The function merges the models to sum_i w_i theta_i, trains the merge on `train`, and returns
    its loss on `validation`. It is pure, and can be mapped, compiled, and differentiated through
    merge and training. Its gradient keeps one state of training per step in memory.

    An optimizer that divides by the root of a moment (Adam) is not differentiable where a gradient
    is exactly 0, as for dead units. Set its `eps_root` (to 1e-12); otherwise the gradient is NaN.

    Args:
      models: At least one pytree of floating leaves, all of the same paths and shapes.
      loss: `loss(params, batch)`, a scalar.
      train: Batches with leaves `[step, ...]`, one training step each. None for no training.
      validation: The batch for the returned loss.
      optimizer: The optimizer of the training; SGD at 1e-2 by default.

    Returns:
      The function from weights `[model]` to a scalar loss. It raises a ValueError for weights of
      another shape.

    Raises:
      ValueError: If `models` is empty, for leaves that differ or are not finite, and for `train`
        without steps.
      TypeError: For leaves that are not floating.

    >>> models = [{"a": jnp.array([0.0])}, {"a": jnp.array([1.0])}]
    >>> mean = lambda params, batch: jnp.mean((params["a"] - batch) ** 2)
    >>> objective = after_training(models, mean, None, jnp.array([0.5]))
    >>> float(objective(jnp.array([1.0, 0.0]))), float(objective(jnp.array([0.5, 0.5])))
    (0.25, 0.0)
    """
    if not len(models):
        raise ValueError("models: expected at least one, got none")
    names = leaf_paths(models[0])
    shapes = [np.shape(x) for x in _leaves("models[0]", models[0], names, None)]
    columns = [_leaves(f"models[{i}]", model, names, shapes) for i, model in enumerate(models)]
    treedef = jax.tree.structure(models[0])
    if train is not None:
        check_batches(train)
        train = jax.tree.map(jnp.asarray, train)
    optimizer = optax.sgd(1e-2) if optimizer is None else optimizer

    # A gradient then stores only the states between steps, not all activations.
    @jax.checkpoint
    def step(state: tuple[PyTree, Any], batch: PyTree) -> tuple[tuple[PyTree, Any], None]:
        params, memory = state
        updates, memory = optimizer.update(jax.grad(loss)(params, batch), memory, params)
        return (optax.apply_updates(params, updates), memory), None

    def mix(w: Array, leaf: Sequence[Any]) -> Array:
        x, *_ = leaves = [jnp.asarray(value) for value in leaf]
        terms = [w[i] * value for i, value in enumerate(leaves)]  # in float32 at least
        return jnp.asarray(sum(terms)).astype(x.dtype)

    def objective(weights: Float[ArrayLike, "model"]) -> Float[Array, ""]:
        w = jnp.asarray(weights, jnp.result_type(float))
        if w.shape != (len(columns),):
            raise ValueError(f"weights: expected one per model, {len(columns)}, got {w.shape}")
        params = jax.tree.unflatten(treedef, [mix(w, leaf) for leaf in zip(*columns, strict=True)])
        if train is not None:
            (params, _), _ = lax.scan(step, (params, optimizer.init(params)), train)
        return loss(params, validation)

    return objective


def sweep(
    objective: Callable[[Array], Float[Array, ""]],
    grid: Float[ArrayLike, "point model"],
    *,
    batch_size: int | None = None,
) -> Float[Array, "point"]:
    """Evaluates an objective at all weights of a grid.

    For two models, SAIL's Figure 2b is the grid `g = np.linspace(-1, 2, 31)`, `np.stack([g, 1 - g],
    1)`.

    Args:
      objective: A function of weights `[model]`, as from `after_training`.
      grid: Weights, `[point, model]`.
      batch_size: The number of points to evaluate at once; all points by default.

    Returns:
      The objective at each point.

    Raises:
      ValueError: For an empty grid, or a grid with another shape.

    >>> sweep(lambda w: (w**2).sum(), np.array([[1.0, 0.0], [2.0, 1.0]])).tolist()
    [1.0, 5.0]
    """
    points = jnp.asarray(grid, jnp.result_type(float))
    if points.ndim != 2 or 0 in points.shape:
        raise ValueError(f"grid: expected weights [point, model], got {points.shape}")
    return lax.map(objective, points, batch_size=batch_size or len(points))


def from_loss(
    models: Sequence[PyTree],
    loss: Loss,
    train: PyTree | None,
    validation: PyTree,
    *,
    optimizer: optax.GradientTransformation | None = None,
    grid: Float[ArrayLike, "point model"] | None = None,
    constraint: Constraint = "affine",
    start: Float[ArrayLike, "model"] | None = None,
    steps: int = 100,
    descent: optax.GradientTransformation | None = None,
) -> Weights:
    """Finds weights with the smallest loss of the merge after training (SAIL's eq. 3).

    With a `grid`, it chooses the best point of the grid. Otherwise it follows the gradient through
    merge and training, which finds at best a local minimum.

    Args:
      models: At least one pytree of floating leaves; see `after_training`.
      loss: `loss(params, batch)`, a scalar.
      train: Batches for training the merge, or None; see `after_training`.
      validation: The batch for the loss.
      optimizer: The optimizer of the training; SGD at 1e-2 by default.
      grid: Weights `[point, model]` to choose from. With it, the arguments below are not used.
      constraint: The constraint on weights: "none", "affine" (sum 1) or "simplex" (sum 1,
        nonnegative). Weights are projected onto it after each step.
      start: Initial weights, `[model]`; equal weights by default.
      steps: The number of descent steps.
      descent: The optimizer of the weights; Adam at 1e-2 by default.

    Returns:
      The weights, with their loss as the objective and without a condition number.

    Raises:
      ValueError: For an unknown `constraint`, a `start` with another shape, and losses that are not
        finite. As in `after_training` and `sweep`.
      TypeError: For leaves that are not floating.

    >>> mean = lambda params, batch: jnp.mean((params["a"] - batch) ** 2)
    >>> models = [{"a": jnp.array([0.0])}, {"a": jnp.array([1.0])}]
    >>> grid = np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    >>> from_loss(models, mean, None, jnp.array([0.75]), grid=grid).weights.tolist()
    [0.5, 0.5]
    """
    one_of("constraint", constraint, Constraint)
    objective = after_training(models, loss, train, validation, optimizer=optimizer)
    if grid is not None:
        values = np.asarray(sweep(objective, grid), np.float64)
        if not np.isfinite(values).any():
            raise ValueError(f"loss: none of {len(values)} values on the grid was finite")
        # Training may diverge for some weights. These are ignored.
        best = int(np.nanargmin(np.where(np.isfinite(values), values, np.nan)))
        return Weights(np.asarray(grid, np.float64)[best], float(values[best]), None)
    n = len(models)
    first = np.full(n, 1 / n) if start is None else host("start", start)
    if first.shape != (n,):
        raise ValueError(f"start: expected one weight per model, {n}, got {first.shape}")
    project = {
        "none": lambda w: w,
        # The orthogonal projection onto weights with sum 1.
        "affine": lambda w: w - (w.sum() - 1) / n,
        "simplex": optax.projections.projection_simplex,
    }[constraint]
    learned = learn(
        lambda w, _: objective(w),
        lambda w, _: w,
        project(jnp.asarray(first, jnp.result_type(float))),
        # `learn` needs batches, but the objective has its own data.
        jnp.zeros((1, 1)),
        steps=steps,
        optimizer=optax.adam(1e-2) if descent is None else descent,
        project=project,
    )
    value = float(objective(learned.params))
    if not np.isfinite(value):
        raise ValueError(f"loss: expected a finite value at the weights found, got {value}")
    return Weights(np.asarray(learned.params, np.float64), value, None)


def _leaves(
    where: str, tree: PyTree, names: Sequence[str], shapes: Sequence[tuple] | None
) -> list[Any]:
    """Returns the leaves of a tree, with paths, shapes, dtypes and values checked."""
    paths = leaf_paths(tree)
    if paths != list(names):
        odd = sorted(set(paths) ^ set(names)) or paths
        raise ValueError(f"{where}: expected the leaves of the other trees; {odd[:5]} differ")
    leaves = jax.tree.leaves(tree)
    for i, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
        values = concrete(leaf)
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{where}, {name!r}: expected floating numbers, got {dtype}")
        if shapes is not None and np.shape(leaf) != shapes[i]:
            raise ValueError(f"{where}, {name!r}: expected shape {shapes[i]}, got {np.shape(leaf)}")
        if values is not None and not np.isfinite(values.astype(np.float64)).all():
            raise ValueError(f"{where}, {name!r}: expected finite values")
    return leaves
