"""Bounds on the gap of cross-task linearity, with task arithmetic as a special case.

The source is Zhou et al., 2024 (arXiv 2402.03660), Theorem 1, Lemma 1 and equations (2) to (4).
They are extended to k models and any weights of sum 1. All follow from Taylor's theorem about the
mean, where the first order cancels:

    gap = -sum_i a_i int_0^1 (1 - t) D^2 f(mean + t d_i)[d_i, d_i] dt.

Norms of parameters are Euclidean over all leaves. `identities` has the other conventions.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from theory import problems
from theory.linearity.identities import Weights, check_weights, deviations, mean
from theory.linearity.networks import Model, hessian, stack

# Nodes of Gauss-Legendre quadrature, which is exact up to degree 31.
NODES = 16


def _add(theta: Any, direction: Any, scale: ArrayLike = 1.0) -> Any:
    return jax.tree.map(lambda t, d: t + scale * d, theta, direction)


@problems.defined
def second_derivative(f: Model, theta: Any, direction: Any, *args: Any) -> Array:
    """Computes the second derivative D^2 f(theta)[d, d] in one direction, without a Hessian.

    Args:
      f: Model f(theta, *args), which returns an array.
      theta: Parameters.
      direction: Direction d, of the structure of the parameters.
      *args: Further arguments of the model.

    Returns:
      The derivative, with the shape of f's output.

    >>> float(second_derivative(lambda t: t**3, jnp.array(2.0), jnp.array(1.0)))
    12.0
    """

    def along(s: Array) -> Array:
        return f(_add(theta, direction, s), *args)

    zero, one = jnp.zeros(()), jnp.ones(())
    # Forward over forward in one scalar costs a few evaluations, independent of the number of
    # parameters.
    return jax.jvp(lambda s: jax.jvp(along, (s,), (one,))[1], (zero,), (one,))[1]


@problems.defined
def second_order_gap(f: Model, thetas: Any, weights: Weights, *args: Any, at: Any = None) -> Array:
    """Computes the gap up to third orders: -1/2 sum_i a_i D^2 f(at)[d_i, d_i].

    It is exact for f quadratic in theta, such as two-layer linear networks.

    Args:
      f: Model f(theta, *args), which returns an array.
      thetas: Pytree of k models stacked along a leading axis.
      weights: Weights `(k,)` of sum 1.
      *args: Further arguments of the model.
      at: The point of the second derivative. None is the mean.

    Returns:
      The approximate gap, with the shape of f's output.

    Raises:
      ValueError: If the weights do not conform or do not sum to 1.

    >>> float(second_order_gap(jnp.square, jnp.array([1.0, 3.0]), [0.5, 0.5]))
    -1.0
    """
    a = check_weights(thetas, weights)
    point = mean(thetas, a) if at is None else at
    curved = jax.vmap(lambda d: second_derivative(f, point, d, *args))(deviations(thetas, a))
    return -jnp.tensordot(a, curved, 1) / 2


def _nodes(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the nodes t of Gauss-Legendre quadrature over [0, 1] and their weights."""
    t, dt = np.polynomial.legendre.leggauss(count)
    # The rule is tabulated on [-1, 1].
    return (t + 1) / 2, dt / 2


def _on_rays(quantity: Any, thetas: Any, weights: Array, t: np.ndarray) -> Array:
    """Evaluates quantity(mean + t d_i, d_i) on each model's ray and returns `(k, t, ...)`."""
    places, middle = jnp.asarray(t, dtype=float), mean(thetas, weights)

    def at(d: Any) -> Array:
        return jax.vmap(lambda s: quantity(_add(middle, d, s), d))(places)

    return jax.vmap(at)(deviations(thetas, weights))


@problems.defined
def integral_gap(f: Model, thetas: Any, weights: Weights, *args: Any, nodes: int = NODES) -> Array:
    """Computes the gap from the curvature only, by quadrature of Taylor's integral.

    f must be twice differentiable on the segments from the mean to the models. For polynomials f of
    degree up to 2 nodes - 1 it is exact up to rounding.

    Args:
      f: Model f(theta, *args), which returns an array.
      thetas: Pytree of k models stacked along a leading axis.
      weights: Weights `(k,)` of sum 1.
      *args: Further arguments of the model.
      nodes: Number of Gauss-Legendre nodes.

    Returns:
      The gap, with the shape of f's output.

    Raises:
      ValueError: If the weights do not conform or do not sum to 1.

    >>> round(float(integral_gap(jnp.square, jnp.array([1.0, 3.0]), [0.5, 0.5])), 4)
    -1.0
    """
    a = check_weights(thetas, weights)
    t, dt = _nodes(nodes)
    curved = _on_rays(lambda p, d: second_derivative(f, p, d, *args), thetas, a, t)
    # The integral at the top of this module, with the factor (1 - t) in the weights.
    return -jnp.einsum("k,t,kt...->...", a, jnp.asarray((1 - t) * dt, dtype=float), curved)


@problems.defined
def curvature(f: Model, theta: Any, *args: Any) -> Float[Array, ""]:
    """Computes the spectral norm of the Hessian of a model.

    For several outputs it is the root of the sum of squared norms, which is at least sup |D^2 f[u,
    u]| over unit vectors u. It forms the p x p Hessians.

    Args:
      f: Model f(theta, *args), which returns an array.
      theta: Parameters.
      *args: Further arguments of the model.

    Returns:
      The norm, a scalar.

    >>> round(float(curvature(lambda t: jnp.sum(t**2), jnp.ones(2))), 4)
    2.0
    """
    H = hessian(f, theta, *args)
    # One Hessian [p, p] for each output; leading axes are outputs.
    norms = jnp.abs(linalg.eigvalsh(H)).max(-1)
    return jnp.linalg.norm(norms.ravel())


@problems.defined
def spread(thetas: Any, weights: Weights) -> Float[Array, ""]:
    """Computes the mean squared deviation sum_i a_i |d_i|^2 of models.

    For two models it is a (1 - a) |theta_1 - theta_2|^2.

    Args:
      thetas: Pytree of k models stacked along a leading axis.
      weights: Weights `(k,)` of sum 1.

    Returns:
      The spread, a scalar.

    Raises:
      ValueError: If the weights do not conform or do not sum to 1.

    >>> float(spread(jnp.array([1.0, 3.0]), [0.5, 0.5]))
    1.0
    """
    a = check_weights(thetas, weights)
    return jnp.tensordot(a, sizes(deviations(thetas, a)) ** 2, 1)


def _check_mean(weights: Weights) -> None:
    problems.check("weights", jnp.asarray(weights), lambda a: a >= 0, ">= 0 for this bound")


@problems.defined
def sizes(stacked: Any) -> Float[Array, " k"]:
    """Computes the Euclidean norm of each of several stacked pytrees.

    Args:
      stacked: Pytree stacked along a leading axis k.

    Returns:
      The norms `(k,)`.
    """
    return jax.vmap(lambda theta: jnp.linalg.norm(ravel_pytree(theta)[0]))(stacked)


@problems.defined
def main_term(norm: ArrayLike, thetas: Any, weights: Weights) -> Float[Array, ""]:
    """Computes the main term of Theorem 1, lambda spread / 2.

    For two models it is a (1 - a) lambda |theta_1 - theta_2|^2 / 2. It bounds the gap only if
    lambda bounds the Hessian on all segments of `supremum_bound`.

    Args:
      norm: A norm lambda of the Hessian, finite and >= 0.
      thetas: Pytree of k models stacked along a leading axis.
      weights: Weights `(k,)`, >= 0, of sum 1.

    Returns:
      The main term, with the shape of `norm`.

    Raises:
      ValueError: If `norm` is out of range, or the weights do not conform, are negative or do not
        sum to 1.

    References:
      Zhou et al., 2024 (arXiv 2402.03660), Theorem 1.

    >>> float(main_term(2.0, jnp.array([1.0, 3.0]), [0.5, 0.5]))
    1.0
    """
    _check_mean(weights)
    problems.check("norm", norm, lambda x: (x >= 0) & (x < np.inf), "a finite norm >= 0")
    return jnp.asarray(norm) * spread(thetas, weights) / 2


@problems.defined
def remainder(third: ArrayLike, thetas: Any, weights: Weights, at: Any = None) -> Float[Array, ""]:
    """Computes an explicit remainder for Theorem 1, for which the paper states only the order.

        (M / 6) (|mean - theta_0|^3 + sum_i a_i |theta_i - theta_0|^3)

    with M >= sup |D^3 f| on the convex hull of theta_0 and the models.

    Args:
      third: The bound M of third derivatives, finite and >= 0.
      thetas: Pytree of k models stacked along a leading axis.
      weights: Weights `(k,)`, >= 0, of sum 1.
      at: theta_0, the point of the main term's Hessian. None is the mean, for which the first term
        is 0.

    Returns:
      The remainder, with the shape of `third`.

    Raises:
      ValueError: If `third` is out of range, or the weights do not conform, are negative or do not
        sum to 1.

    References:
      Zhou et al., 2024 (arXiv 2402.03660), Theorem 1.

    >>> round(float(remainder(6.0, jnp.array([1.0, 3.0]), [0.5, 0.5])), 4)
    1.0
    """
    a = check_weights(thetas, weights)
    _check_mean(a)
    problems.check("third", third, lambda m: (m >= 0) & (m < np.inf), "a finite bound >= 0")
    middle = mean(thetas, a)
    origin = middle if at is None else at
    far = sizes(jax.tree.map(lambda t, o: t - o, thetas, origin))
    near = sizes(jax.tree.map(lambda t, o: (t - o)[None], middle, origin))[0]
    return jnp.asarray(third) / 6 * (near**3 + jnp.tensordot(a, far**3, 1))


@problems.defined
def supremum_bound(
    f: Model, thetas: Any, weights: Weights, *args: Any, nodes: int = NODES
) -> Float[Array, ""]:
    """Computes a bound on the gap without remainder: Theorem 1 with the supremum of the curvature.

        1/2 sum_i |a_i| |d_i|^2 sup |D^2 f|

    where the supremum runs over the segment from the mean to model i. For two models it is at most
    a (1 - a) / 2 |theta_1 - theta_2|^2 sup |D^2 f|. The supremum is taken over Gauss-Legendre nodes
    and both ends, where a monotone curvature attains it. The bound on |gap| is rigorous up to the
    quadrature error of `integral_gap`. It forms p x p Hessians.

    Args:
      f: Model f(theta, *args), which returns an array.
      thetas: Pytree of k models stacked along a leading axis.
      weights: Weights `(k,)` of sum 1, which may be negative.
      *args: Further arguments of the model.
      nodes: Number of Gauss-Legendre nodes within each segment.

    Returns:
      The bound, a scalar.

    Raises:
      ValueError: If the weights do not conform or do not sum to 1.

    References:
      Strengthens Zhou et al., 2024 (arXiv 2402.03660), Theorem 1.

    >>> float(supremum_bound(lambda t: t[0] ** 3, jnp.array([[0.0], [1.0]]), [0.5, 0.5]))
    0.5625
    """
    a = check_weights(thetas, weights)
    t = np.concatenate([[0.0], _nodes(nodes)[0], [1.0]])
    norms = _on_rays(lambda p, _: curvature(f, p, *args), thetas, a, t)
    return jnp.sum(jnp.abs(a) * sizes(deviations(thetas, a)) ** 2 * norms.max(-1)) / 2


@problems.defined
def loss_bound(
    losses: Float[Array, " k"], weights: Weights, gap: ArrayLike = 0.0, lipschitz: ArrayLike = 0.0
) -> Float[Array, ""]:
    """Computes a bound on the merged model's loss from its members' losses.

        sum_i a_i loss_i + lipschitz |gap|

    for a loss that is convex and Lipschitz in the outputs. The paper's Lemma 1 assumes equal
    losses; here they may differ.

    Args:
      losses: Losses of the members, `(k,)`.
      weights: Weights `(k,)`, >= 0, of sum 1.
      gap: Norm of the gap, finite. It is 0 under exact linearity.
      lipschitz: Lipschitz constant of the loss in the same norm, finite and >= 0. For the
        cross-entropy of one example in the Euclidean norm of its logits it is sqrt(2).

    Returns:
      The bound, with the broadcast shape of `gap` and `lipschitz`.

    Raises:
      ValueError: If an argument is out of range, or the weights do not conform, are negative or do
        not sum to 1.

    References:
      Zhou et al., 2024 (arXiv 2402.03660), Lemma 1.

    >>> float(loss_bound(jnp.array([1.0, 3.0]), [0.5, 0.5]))
    2.0
    >>> float(loss_bound(jnp.array([1.0, 3.0]), [0.5, 0.5], gap=-2.0, lipschitz=0.5))
    3.0
    """
    a = check_weights(losses, weights)
    _check_mean(a)
    problems.check("gap", gap, np.isfinite, "finite")
    steep = lambda x: (x >= 0) & (x < np.inf)  # noqa: E731
    problems.check("lipschitz", lipschitz, steep, "a finite constant >= 0")
    return jnp.tensordot(a, jnp.asarray(losses), 1) + jnp.asarray(lipschitz) * jnp.abs(gap)


# Task arithmetic as gaps, with (models, weights) for `gap`, `second_order_gap` and the others.


@problems.defined
def addition(theta: Any, first: Any, second: Any, scale: ArrayLike) -> tuple[Any, Array]:
    """Returns models and weights with a gap equal to the error of task addition.

    The gap is f(theta + s (u + v)) minus the mean of f(theta + 2 s u) and f(theta + 2 s v). To
    second order it is -(s^2 / 2) D^2 f[u - v, u - v].

    Args:
      theta: Parameters of the base model.
      first: Task vector u, of the structure of the parameters.
      second: Task vector v.
      scale: The scale s.

    Returns:
      Two stacked models and their weights, for `gap`, `second_order_gap` and the other functions
      here.

    References:
      Zhou et al., 2024 (arXiv 2402.03660), eq. (2).

    >>> models, weights = addition(jnp.array(0.0), jnp.array(1.0), jnp.array(2.0), 0.5)
    >>> models.tolist(), weights.tolist()
    ([1.0, 2.0], [0.5, 0.5])
    """
    models = (_add(theta, t, 2 * jnp.asarray(scale)) for t in (first, second))
    return stack(*models), jnp.array([0.5, 0.5])


@problems.defined
def negation(theta: Any, task: Any, scale: ArrayLike) -> tuple[Any, Array]:
    """Returns models and weights with a gap equal to the error of task negation.

    The gap is f(theta) minus the mean of f(theta + s u) and f(theta - s u). To second order it is
    -(s^2 / 2) D^2 f[u, u]. The remainder is of order 4, not 3.

    Args:
      theta: Parameters of the base model.
      task: Task vector u, of the structure of the parameters.
      scale: The scale s.

    Returns:
      Two stacked models and their weights, for `gap`, `second_order_gap` and the other functions
      here.

    References:
      Zhou et al., 2024 (arXiv 2402.03660), eq. (3).

    >>> models, weights = negation(jnp.array(0.0), jnp.array(1.0), 0.5)
    >>> models.tolist(), weights.tolist()
    ([0.5, -0.5], [0.5, 0.5])
    """
    models = (_add(theta, task, sign * jnp.asarray(scale)) for sign in (1, -1))
    return stack(*models), jnp.array([0.5, 0.5])


@problems.defined
def forgetting(theta: Any, task: Any, scale: ArrayLike) -> tuple[Any, Array]:
    """Returns models and weights with a gap equal to the error of predicting a forgotten task.

    The gap is f(theta - s u) minus 2 f(theta) - f(theta + s u). This is minus twice the gap of
    `negation`, and s^2 D^2 f[u, u] to second order.

    Args:
      theta: Parameters of the base model.
      task: Task vector u, of the structure of the parameters.
      scale: The scale s.

    Returns:
      Two stacked models and their weights 2 and -1, for `gap`, `second_order_gap` and the other
      functions here.

    References:
      Zhou et al., 2024 (arXiv 2402.03660), eq. (4).

    >>> models, weights = forgetting(jnp.array(0.0), jnp.array(1.0), 0.5)
    >>> models.tolist(), weights.tolist()
    ([0.0, 0.5], [2.0, -1.0])
    """
    return stack(theta, _add(theta, task, scale)), jnp.array([2.0, -1.0])


@problems.defined
def superposition(theta: Any, tasks: Any, scale: ArrayLike) -> tuple[Any, Array]:
    """Returns models and weights with a gap equal to the interference of several task vectors.

    The gap is f(theta + s sum_i u_i) minus f(theta) + sum_i (f(theta + s u_i) - f(theta)). To
    second order it is s^2 sum_{i<j} D^2 f[u_i, u_j], which equation (2) omits.

    Args:
      theta: Parameters of the base model.
      tasks: Task vectors u_i, stacked along a leading axis k.
      scale: The scale s.

    Returns:
      The base and the k moved models, stacked, and their weights 1 - k, 1, ..., 1.

    >>> models, weights = superposition(jnp.array(0.0), jnp.array([1.0, 2.0]), 0.5)
    >>> models.tolist(), weights.tolist()
    ([0.0, 0.5, 1.0], [-1.0, 1.0, 1.0])
    """
    k = jax.tree.leaves(tasks)[0].shape[0]
    # k models and the origin, with weights 1 and 1 - k that sum to one.
    moved = jax.tree.map(lambda t, u: t + jnp.asarray(scale) * u, theta, tasks)
    models = jax.tree.map(lambda t, m: jnp.concatenate([t[None], m]), theta, moved)
    return models, jnp.ones(k + 1).at[0].set(1.0 - k)
