"""Estimates the constants of the merging bounds from a real training run.

Every assumption involves a supremum over all parameters. Here it is the largest value at the
visited points. All of these constants are therefore biased downwards, regardless of their standard
errors.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from sail_jax.probe.curvature import lanczos, ritz
from sail_jax.trees import leaf_paths
from theory.merging.bounds import Constants
from theory.merging.tasks import Weights
from theory.problems import check, check_sum, defined

Loss = Callable[[Any, Any], Array]  # (params, batch with a leading axis) -> mean loss of it


class Measured(NamedTuple):
    """Estimated constants at several points of a run, with their errors.

    Attributes:
      values: Constants at each point, leading axis P.
      stderr: Their standard errors, with the data considered as samples of their tasks. For
        `smoothness`, a distance within which there must be an eigenvalue.
    """

    values: Constants
    stderr: Constants

    def worst(self) -> Constants:
        """Returns the largest constants over all points, for use in a bound."""
        most = Constants(*(np.max(np.asarray(x), 0) for x in self.values))
        return most._replace(gap=np.asarray(self.values.gap)[0])


@defined
def measure_constants(
    loss: Loss,
    tasks: Sequence[PyTree],
    points: Sequence[PyTree],
    key: Array,
    *,
    weights: Weights | None = None,
    infimum: ArrayLike = 0.0,
    examples: int = 4,
    iterations: int = 16,
    batch_size: int = 32,
) -> Measured:
    """Estimates L, C, sigma_i^2, zeta_i^2 and the gap at some points of a training run.

    Each constant is estimated as follows, for P points and N tasks:

    * `smoothness` `(P,)` is the largest |eigenvalue| of the Hessian of one example's loss, over a
      few examples of each task, by Lanczos iterations. It is too low, because the examples are few
      and Ritz values are inside the spectrum.
    * `variance` `(P, N)` is the mean of |grad l(x; z_j) - grad f_i(x)|^2 over the data of the task,
      exactly.
    * `heterogeneity` `(P, N)` is |grad f_i - grad f|^2, exactly for these data, with f the plain
      mean of tasks. The bounds require it for other data of the tasks. For these, it is too high by
      the squared mean noise, and its standard error is too high as well.
    * `pl` `(P,)` is (f - infimum) / |grad f|^2. Assumption 5 is for all x, and the worst x is not
      among the points, so this is too low.
    * `gap` `(P,)` is f~ - infimum. `gap` and `pl` are too high if `infimum` is too low, such as 0
      for a loss that cannot reach 0.

    `batch_size` gradients, one gradient per task and `iterations` Lanczos vectors are in memory at
    once.

    Args:
      loss: loss(params, batch), the mean loss over the leading axis of the batch's leaves.
      tasks: Data of each task, a pytree of leaves `(n_i, ...)` with n_i >= 2.
      points: Parameters, the start first. The bounds require C at the merged model, so include it.
      key: Random key of the examples and of the Lanczos iterations.
      weights: Merging weights `(N,)` of sum 1; equal if None.
      infimum: Infimum of the losses, one number, or one for f and one for f~.
      examples: Number of examples of each task for `smoothness`.
      iterations: Number of Lanczos iterations.
      batch_size: Number of gradients of examples in memory at once.

    Returns:
      The constants at each point, and their errors.

    Raises:
      ValueError: If tasks or points are empty, a task has fewer than two samples or uneven leaves,
        the weights do not conform or do not sum to 1, a count is below 1, `infimum` is above the
        loss, or the loss is not a scalar.
      TypeError: If parameters are not floating-point.
    """
    sizes = [_size(i, data) for i, data in enumerate(tasks)]
    points, N = list(points), len(sizes)
    if not points or not sizes:
        raise ValueError(f"tasks and points must not be empty; got {N} and {len(points)}")
    for x in points:
        for path, leaf in zip(leaf_paths(x), jax.tree.leaves(x), strict=True):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise TypeError(f"points must hold floating leaves; {path} is {leaf.dtype}")
    for name, value in (
        ("examples", examples),
        ("iterations", iterations),
        ("batch_size", batch_size),
    ):
        check(name, value, lambda v: v >= 1, ">= 1")
    w = np.full(N, 1 / N) if weights is None else np.asarray(weights, float)
    if w.shape != (N,):
        raise ValueError(f"weights must have one entry per task, {N}; got shape {w.shape}")
    check_sum(jnp.asarray(w))
    least = np.broadcast_to(np.asarray(infimum, float), (2,))
    keys = jax.random.split(key, N)
    rows = [
        _point(loss, tasks, x, w, least, keys, np.array(sizes), examples, iterations, batch_size)
        for x in points
    ]
    values, errors = (
        Constants(*(np.array(column) for column in zip(*half, strict=True)))
        for half in zip(*rows, strict=True)
    )
    return Measured(values, errors)


def _point(
    loss: Loss,
    tasks: Sequence[PyTree],
    x: PyTree,
    w: np.ndarray,
    least: np.ndarray,
    keys: Array,
    n: np.ndarray,
    examples: int,
    iterations: int,
    batch_size: int,
) -> tuple[Constants, Constants]:
    """Estimates the constants and their errors at one point."""
    N = len(tasks)
    means = [_mean(loss, batch_size, x, data) for data in tasks]
    g = jnp.stack([gradient for _, gradient in means])
    ways = jnp.concatenate([g - g.mean(0), g.mean(0)[None]])  # grad f_i - grad f, then grad f
    sides = [
        _sides(loss, batch_size, x, data, gradient, ways)
        for data, (_, gradient) in zip(tasks, means, strict=True)
    ]
    losses = [np.asarray(s[0]) for s in sides]
    squares = [np.asarray(s[1]) for s in sides]
    along = [np.asarray(s[2]) for s in sides]

    variance = np.array([s.mean() for s in squares])
    variance_error = np.array([s.std(ddof=1) for s in squares]) / np.sqrt(n)
    # Variances of the mean gradients, along each direction and in total (the trace of their
    # covariance).
    slopes = np.array([a.var(0, ddof=1) for a in along]) / n[:, None]
    traces = variance / (n - 1)
    # grad f_i - grad f = sum_j (1[i = j] - 1/N) grad f_j, with independent noise between tasks.
    share = (np.eye(N) - 1 / N) ** 2  # [task i, data j]: of grad f_j in grad f_i - grad f
    zeta2 = np.sum(np.asarray(ways[:-1], float) ** 2, 1)
    # For a Gaussian mean m with covariance S, |m|^2 has the variance 4 m.S m + 2 tr S^2. The first
    # term is exact. The second one is too high, by tr S^2 <= (tr S)^2.
    zeta2_error = np.sqrt(
        4 * np.einsum("ij,ji->i", share, slopes[:, :-1]) + 2 * (share @ traces) ** 2
    )

    mean_losses = np.array([values.mean() for values in losses])
    excess, gap = mean_losses.mean() - least[0], w @ mean_losses - least[1]
    # The loss is a mean of rounded numbers, and may be slightly below an infimum that it attains.
    slack = 1e3 * np.finfo(np.asarray(g).dtype).eps * max(1.0, abs(mean_losses).max())
    if min(excess, gap) < -slack:
        raise ValueError(
            f"infimum must be at most the loss; got {least} for {mean_losses.mean():g}"
        )
    square = float(np.sum(np.asarray(ways[-1], float) ** 2))
    with np.errstate(divide="ignore", invalid="ignore"):
        C = np.divide(max(excess, 0.0), square)
        # C = excess / |g|^2 to first order in the noise of each sample, which enters through the
        # loss in the numerator and g in the denominator.
        influence = [
            (values - values.mean()) / square - 2 * C / square * a[:, -1]
            for values, a in zip(losses, along, strict=True)
        ]
        linear = sum(f.var(ddof=1) / size for f, size in zip(influence, n, strict=True)) / N**2
        C_error = np.sqrt(linear + 2 * (C / square * traces.sum() / N**2) ** 2)
    gap_error = np.sqrt(w**2 @ np.array([values.var(ddof=1) for values in losses] / n))

    tops = [
        np.asarray(_tops(loss, iterations, examples, k, x, data))
        for k, data in zip(keys, tasks, strict=True)
    ]
    top, error = max(np.concatenate(tops), key=lambda pair: pair[0])
    return (
        Constants(top, C, variance, zeta2, gap),
        Constants(error, C_error, variance_error, zeta2_error, gap_error),
    )


def _size(i: int, data: PyTree) -> int:
    """Returns the number of samples of a task, after a check of its leaves."""
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(data)}
    if len(lengths) != 1 or () in lengths:
        raise ValueError(f"tasks[{i}] must have leaves of one length; got {sorted(lengths)}")
    (n,) = lengths.pop()
    if n < 2:
        raise ValueError(f"tasks[{i}] must hold at least 2 samples; got {n}")
    return n


def _one(loss: Loss, unravel: Callable[[Array], PyTree], data: PyTree) -> Callable[..., Array]:
    """Returns the loss of example j as a function of flat parameters."""

    def example_loss(flat: Float[Array, " p"], j: Array) -> Array:
        value = loss(unravel(flat), jax.tree.map(lambda leaf: jnp.asarray(leaf)[j][None], data))
        if jnp.shape(value) != ():
            raise ValueError(f"loss must return a scalar; got shape {jnp.shape(value)}")
        return value

    return example_loss


@partial(jax.jit, static_argnums=(0, 1))
def _mean(loss: Loss, size: int, x: PyTree, data: PyTree) -> tuple[Array, Float[Array, " p"]]:
    """Computes the mean loss of a task and its gradient, `size` examples at a time."""
    flat, unravel = ravel_pytree(x)
    example_loss, n = _one(loss, unravel, data), len(jax.tree.leaves(data)[0])
    places = jnp.arange(-(-n // size) * size).reshape(-1, size)

    def add(total: Any, j: Array) -> tuple[Any, None]:
        # The last batch is padded with examples of weight 0.
        def part(flat: Array) -> Array:
            return jnp.sum(jnp.where(j < n, jax.vmap(example_loss, (None, 0))(flat, j % n), 0)) / n

        return jax.tree.map(jnp.add, total, jax.value_and_grad(part)(flat)), None

    return lax.scan(add, (jnp.zeros((), flat.dtype), jnp.zeros_like(flat)), places)[0]


@partial(jax.jit, static_argnums=(0, 1))
def _sides(
    loss: Loss, size: int, x: PyTree, data: PyTree, mean: Array, ways: Float[Array, "ways p"]
) -> tuple[Float[Array, " n"], Float[Array, " n"], Float[Array, "n ways"]]:
    """Computes the loss, |g - mean|^2 and (g - mean).ways of every example with gradient g."""
    flat, unravel = ravel_pytree(x)
    example_loss = _one(loss, unravel, data)

    def side(j: Array) -> tuple[Array, Array, Array]:
        value, g = jax.value_and_grad(example_loss)(flat, j)
        return value, jnp.sum((g - mean) ** 2), ways @ (g - mean)

    return lax.map(side, jnp.arange(len(jax.tree.leaves(data)[0])), batch_size=size)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _tops(
    loss: Loss, iterations: int, examples: int, key: Array, x: PyTree, data: PyTree
) -> Float[Array, "examples 2"]:
    """Computes the largest |Ritz value| of each drawn example's Hessian, and its residual.

    Examples are drawn without replacement.
    """
    flat, unravel = ravel_pytree(x)
    example_loss, n = _one(loss, unravel, data), len(jax.tree.leaves(data)[0])
    pick, begin, fresh = jax.random.split(key, 3)
    drawn = jax.random.permutation(pick, n)[: min(examples, n)]
    first = jax.random.normal(begin, flat.shape, flat.dtype)
    first = first / jnp.linalg.norm(first)

    def top(j: Array) -> Array:
        def product(v: Array) -> Array:
            return jax.jvp(lambda p: jax.grad(example_loss)(p, j), (flat,), (v,))[1]

        values, _, residuals = ritz(*lanczos(product, first, min(iterations, flat.size), fresh))
        # The loss of one example may be non-convex, and its largest curvature negative.
        best = jnp.argmax(jnp.abs(values))
        return jnp.stack([jnp.abs(values[best]), residuals[best]])

    return lax.map(top, drawn)
