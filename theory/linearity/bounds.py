"""How far cross-task linearity can fail: Theorem 1, Lemma 1 and equations 2-4 of arXiv 2402.03660,
for k models and any weights that sum to one.

All follow from Taylor's theorem about the mean, where first orders cancel:

    gap = -sum_i a_i int_0^1 (1 - t) D^2 f(mean + t d_i)[d_i, d_i] dt.

Sizes of parameters are Euclidean over all leaves. Conventions: `identities`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems
from theory.linearity.identities import Weights, check_weights, deviations, mean
from theory.linearity.networks import Model, hessian, stack

NODES = 16  # of Gauss-Legendre quadrature: exact to degree 31


def _add(theta: Any, direction: Any, scale: ArrayLike = 1.0) -> Any:
    return jax.tree.map(lambda t, d: t + scale * d, theta, direction)


def second_derivative(f: Model, theta: Any, direction: Any, *args: Any) -> Array:
    """D^2 f(theta)[d, d], without forming a Hessian."""

    def along(s: Array) -> Array:
        return f(_add(theta, direction, s), *args)

    zero, one = jnp.zeros(()), jnp.ones(())
    return jax.jvp(lambda s: jax.jvp(along, (s,), (one,))[1], (zero,), (one,))[1]


def second_order_gap(f: Model, thetas: Any, weights: Weights, *args: Any, at: Any = None) -> Array:
    """-1/2 sum_i a_i D^2 f(at)[d_i, d_i], the gap up to third orders; `at` is the mean, or given.

    Exact for f quadratic in theta, such as two-layer linear networks.
    """
    a = check_weights(thetas, weights)
    point = mean(thetas, a) if at is None else at
    curved = jax.vmap(lambda d: second_derivative(f, point, d, *args))(deviations(thetas, a))
    return -jnp.tensordot(a, curved, 1) / 2


def _on_rays(quantity: Any, thetas: Any, weights: Array, nodes: int) -> tuple[Array, Array]:
    """quantity(mean + t d_i, d_i) [k nodes *out], and weights (1 - t) dt of the nodes t."""
    t, dt = np.polynomial.legendre.leggauss(nodes)
    t, dt = jnp.asarray((t + 1) / 2, dtype=float), jnp.asarray(dt / 2, dtype=float)
    middle = mean(thetas, weights)

    def at(d: Any) -> Array:
        return jax.vmap(lambda s: quantity(_add(middle, d, s), d))(t)

    return jax.vmap(at)(deviations(thetas, weights)), (1 - t) * dt


def integral_gap(f: Model, thetas: Any, weights: Weights, *args: Any, nodes: int = NODES) -> Array:
    """The gap by curvature alone, with no remainder: for f of degree 2 nodes - 1 exact to rounding.

    f must be twice differentiable on the segments from the mean to the models.
    """
    a = check_weights(thetas, weights)
    curved, w = _on_rays(lambda p, d: second_derivative(f, p, d, *args), thetas, a, nodes)
    return -jnp.einsum("k,t,kt...->...", a, w, curved)


def curvature(f: Model, theta: Any, *args: Any) -> Float[Array, ""]:
    """The spectral norm of the Hessian; for several outputs the root of the sum of squares, which
    is no less than sup |D^2 f[u, u]| over unit u. Forms the p x p Hessians."""
    H = hessian(f, theta, *args)
    norms = jnp.abs(jnp.linalg.eigvalsh(H)).max(-1)
    return jnp.linalg.norm(norms.ravel())


def spread(thetas: Any, weights: Weights) -> Float[Array, ""]:
    """sum_i a_i |d_i|^2; a (1 - a) |theta_1 - theta_2|^2 for two models."""
    a = check_weights(thetas, weights)
    return jnp.tensordot(a, sizes(deviations(thetas, a)) ** 2, 1)


def _check_mean(weights: Weights) -> None:
    problems.check("weights", jnp.asarray(weights), lambda a: a >= 0, ">= 0 for this bound")


def sizes(stacked: Any) -> Float[Array, " k"]:
    """The Euclidean size of each stacked pytree."""
    return jax.vmap(lambda theta: jnp.linalg.norm(ravel_pytree(theta)[0]))(stacked)


def main_term(norm: ArrayLike, thetas: Any, weights: Weights) -> Float[Array, ""]:
    """lambda spread / 2, with lambda a norm of the Hessian; Theorem 1 without its remainder:
    a (1 - a) lambda |theta_1 - theta_2|^2 / 2. Alone it bounds the gap only if lambda is a bound
    wherever `supremum_bound` looks."""
    _check_mean(weights)
    problems.check("norm", norm, lambda x: (x >= 0) & (x < np.inf), "a finite norm >= 0")
    return jnp.asarray(norm) * spread(thetas, weights) / 2


def remainder(third: ArrayLike, thetas: Any, weights: Weights, at: Any = None) -> Float[Array, ""]:
    """Theorem 1's script E, explicit: (M / 6) (|mean - theta_0|^3 + sum_i a_i |theta_i -
    theta_0|^3) with M >= sup |D^3 f| on the convex hull of theta_0 (`at`) and the models.

    With theta_0 the mean, the default, its own term vanishes."""
    a = check_weights(thetas, weights)
    _check_mean(a)
    problems.check("third", third, lambda m: (m >= 0) & (m < np.inf), "a finite bound >= 0")
    middle = mean(thetas, a)
    origin = middle if at is None else at
    far = sizes(jax.tree.map(lambda t, o: t - o, thetas, origin))
    near = sizes(jax.tree.map(lambda t, o: (t - o)[None], middle, origin))[0]
    return jnp.asarray(third) / 6 * (near**3 + jnp.tensordot(a, far**3, 1))


def supremum_bound(
    f: Model, thetas: Any, weights: Weights, *args: Any, nodes: int = NODES
) -> Float[Array, ""]:
    """Theorem 1 with no remainder: 1/2 sum_i |a_i| |d_i|^2 sup |D^2 f|, over the segments from the
    mean to model i; for two models at most a (1 - a) / 2 |theta_1 - theta_2|^2 sup |D^2 f|.

    The supremum is the largest value at Gauss-Legendre nodes, so the bound on |gap| is rigorous up
    to the error of that quadrature in `integral_gap`. Forms p x p Hessians.
    """
    a = check_weights(thetas, weights)
    norms, _ = _on_rays(lambda p, _: curvature(f, p, *args), thetas, a, nodes)
    return jnp.sum(jnp.abs(a) * sizes(deviations(thetas, a)) ** 2 * norms.max(-1)) / 2


def loss_bound(
    losses: Float[Array, " k"], weights: Weights, gap: ArrayLike = 0.0, lipschitz: ArrayLike = 0.0
) -> Float[Array, ""]:
    """sum_i a_i loss_i + lipschitz |gap| for a loss convex and Lipschitz in the outputs: Lemma 1
    where linearity holds up to `gap`; the losses need not be equal. `lipschitz` is for the same
    norm as `gap`: sqrt(2) for the cross-entropy of one example in the Euclidean norm of its logits.
    """
    a = check_weights(losses, weights)
    _check_mean(a)
    problems.check("gap", gap, np.isfinite, "finite")
    steep = lambda x: (x >= 0) & (x < np.inf)  # noqa: E731
    problems.check("lipschitz", lipschitz, steep, "a finite constant >= 0")
    return jnp.tensordot(a, jnp.asarray(losses), 1) + jnp.asarray(lipschitz) * jnp.abs(gap)


# Task arithmetic as gaps: (models, weights) for `gap`, `second_order_gap` and the rest.


def addition(theta: Any, first: Any, second: Any, scale: ArrayLike) -> tuple[Any, Array]:
    """Equation 2: theta + s (u + v) against the mean of theta + 2 s u and theta + 2 s v.

    To second order the gap is -(s^2 / 2) D^2 f[u - v, u - v]."""
    models = (_add(theta, t, 2 * jnp.asarray(scale)) for t in (first, second))
    return stack(*models), jnp.array([0.5, 0.5])


def negation(theta: Any, task: Any, scale: ArrayLike) -> tuple[Any, Array]:
    """Equation 3: theta against the mean of theta + s u and theta - s u.

    To second order the gap is -(s^2 / 2) D^2 f[u, u]; the remainder is of order 4, not 3."""
    models = (_add(theta, task, sign * jnp.asarray(scale)) for sign in (1, -1))
    return stack(*models), jnp.array([0.5, 0.5])


def forgetting(theta: Any, task: Any, scale: ArrayLike) -> tuple[Any, Array]:
    """Equation 4: theta - s u against 2 f(theta) - f(theta + s u).

    Its gap is minus twice that of equation 3: s^2 D^2 f[u, u] to second order."""
    return stack(theta, _add(theta, task, scale)), jnp.array([2.0, -1.0])


def superposition(theta: Any, tasks: Any, scale: ArrayLike) -> tuple[Any, Array]:
    """theta + s sum_i u_i against f(theta) + sum_i (f(theta + s u_i) - f(theta)), for k stacked
    tasks: what equation 2 leaves out is s^2 sum_{i<j} D^2 f[u_i, u_j], the interference."""
    k = jax.tree.leaves(tasks)[0].shape[0]
    moved = jax.tree.map(lambda t, u: t + jnp.asarray(scale) * u, theta, tasks)
    models = jax.tree.map(lambda t, m: jnp.concatenate([t[None], m]), theta, moved)
    return models, jnp.ones(k + 1).at[0].set(1.0 - k)
