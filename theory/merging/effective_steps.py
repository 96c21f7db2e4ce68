"""Effective local steps and weights (eq. 14 of Li et al., 2026, arXiv 2601.21690), and Adam's.

An optimizer applies the stochastic gradients g_0, ..., g_{K-1} with effective step sizes a_0, ...,
a_{K-1}, in units of the learning rate. The expert then moves by

    x_K - x_0 = -rate sum_t a_t g_t.

For SGD a_t = 1. By Remark 6, Adam also has such step sizes, but the paper does not state them. Adam
divides each coordinate by its own root mean square, so its a_t has an entry for every coordinate.
One number per step, as in eq. (14), is not sufficient.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory.problems import check, check_squares, defined

if TYPE_CHECKING:
    import optax  # not at run time, because closed forms do not use it


class EffectiveSteps(NamedTuple):
    """The effective steps and weights of averaged experts by eq. (14).

    Attributes:
      steps: tau_eff, the mean over experts of the sums of their step sizes, `(*d)`.
      weights: lambda_i, the weight with which each expert's normalised gradient moves the average,
        `(N, *d)`, of sum 1 over the experts.
    """

    steps: Float[Array, "*d"]
    weights: Float[Array, "N *d"]


@defined
def adam_steps(
    gradients: Float[ArrayLike, "K *d"],
    *,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
) -> Float[Array, "K *d"]:
    """Computes the effective step sizes of Adam on a sequence of gradients.

        a_t = sum_{s >= t} (1 - b1) b1^(s-t) / ((1 - b1^(s+1)) (sqrt(v_s) + eps))
        v_s = sum_{r <= s} (1 - b2) b2^(s-r) g_r^2 / (1 - b2^(s+1))

    A gradient acts at its own step and, through momentum, at all later ones. The sizes depend on
    the gradients through v. For constant gradients they sum to K / (|g| + eps).

    Args:
      gradients: The gradients of one expert, step by step `(K, *d)`.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: The number added to the root of the second moment, > 0.

    Returns:
      The step sizes in units of the learning rate, one for each step and coordinate `(K, *d)`.

    Raises:
      ValueError: If `gradients` is empty, or an argument is out of range.

    References:
      Kingma and Ba, 2015 (arXiv 1412.6980), Algorithm 1; Li et al., 2026 (arXiv 2601.21690),
      Remark 6 and eq. (14).

    >>> constant = adam_steps(jnp.full((4, 1), 2.0))
    >>> round(float(constant.sum()), 6)
    2.0
    """
    g = jnp.asarray(gradients, float)
    if not g.ndim or not len(g):
        raise ValueError(f"gradients must be [steps, ...] with at least one step; got {g.shape}")
    check_squares("gradients", g)
    for name, decay in (("b1", b1), ("b2", b2)):
        check(name, decay, lambda b: (b >= 0) & (b < 1), "in [0, 1)")
    check("eps", eps, lambda e: e > 0, "> 0")
    return _adam_steps(g, *(jnp.asarray(x, float) for x in (b1, b2, eps)))


@jax.jit
def _adam_steps(g: Array, b1: Array, b2: Array, eps: Array) -> Array:
    counts = jnp.arange(1, len(g) + 1)

    def second_moment(v: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        gradient, count = at
        v = b2 * v + (1 - b2) * gradient**2
        # 1 - b^k by expm1 keeps its digits for b near 1. log 0 = -inf gives 1, as it should.
        unbiased = v / -jnp.expm1(count * jnp.log(b2))
        return v, -1 / (jnp.expm1(count * jnp.log(b1)) * (jnp.sqrt(unbiased) + eps))

    _, divisors = jax.lax.scan(second_moment, jnp.zeros_like(g[0]), (g, counts))

    # a_t is the sum over all later steps s of b1^(s-t) times the divisor of step s. This is a
    # recursion backward in time.
    def later(total: Array, here: Array) -> tuple[Array, Array]:
        total = b1 * total + (1 - b1) * here
        return total, total

    return jax.lax.scan(later, jnp.zeros_like(g[0]), divisors, reverse=True)[1]


@defined
def effective_steps(step_sizes: Sequence[Float[ArrayLike, "_ *d"]]) -> EffectiveSteps:
    """Computes effective steps and weights of averaged experts from their step sizes.

        tau_eff = (1/N) sum_i |a_i|_1,    lambda_i = |a_i|_1 / sum_j |a_j|_1

    Args:
      step_sizes: For each expert, its step sizes `(K_i, *d)`, >= 0 and not all 0. There is one
        number for each step, or one for each coordinate, as from `adam_steps`.

    Returns:
      The steps and weights, for each coordinate where the step sizes differ between coordinates.

    Raises:
      ValueError: If `step_sizes` is empty, coordinates differ, or sizes are negative or all 0.

    References:
      Li et al., 2026 (arXiv 2601.21690), eq. (14).

    >>> found = effective_steps([jnp.ones(2), jnp.ones(6)])
    >>> float(found.steps), found.weights.tolist()
    (4.0, [0.25, 0.75])
    """
    sizes = [jnp.asarray(a, float) for a in step_sizes]
    shapes = [a.shape for a in sizes]
    if not sizes or any(not s or s[1:] != shapes[0][1:] for s in shapes):
        raise ValueError(
            f"step_sizes must be [steps, ...] for each expert, of equal coordinates; got {shapes}"
        )
    for a in sizes:
        check("step_sizes", a, lambda x: (x >= 0) & (x < jnp.inf), "finite and >= 0")
    sums = jnp.stack([a.sum(0) for a in sizes])
    total = sums.sum(0)
    check("step_sizes", total, lambda x: x > 0, "not all 0")
    return EffectiveSteps(total / len(sizes), sums / total)


@defined
def simulate_movement(
    optimizer: "optax.GradientTransformation", gradients: Float[ArrayLike, "K *d"]
) -> Float[Array, "*d"]:
    """Runs an optimizer on a sequence of gradients and returns its movement.

    Effective step sizes are compared with this simulator, which does not use them.

    Args:
      optimizer: Any optimizer of Optax that works without parameters.
      gradients: The gradients, step by step `(K, *d)`.

    Returns:
      x_K - x_0, `(*d)`.
    """
    return _simulate_movement(optimizer, jnp.asarray(gradients, float))


@partial(jax.jit, static_argnums=0)
def _simulate_movement(optimizer: "optax.GradientTransformation", gradients: Array) -> Array:
    import optax

    start = jnp.zeros_like(gradients[0])

    def step(state: tuple, gradient: Array) -> tuple[tuple, None]:
        x, inner = state
        update, inner = optimizer.update(gradient, inner)
        return (optax.apply_updates(x, update), inner), None

    return jax.lax.scan(step, (start, optimizer.init(start)), gradients)[0][0]
