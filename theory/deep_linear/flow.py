"""Predictors during training: gradient flow at finite times, on one given data set.

From a rank-one balanced pretrained state, the network is determined by its predictor b = W_1 ...
W_L, which satisfies

    db/dt = -|b|^{2-2/L} [g + (L-1) b (b.g)/|b|^2],  g = C b - X^T y/n,  C = X^T X/n.

The part of b outside the row space of the data keeps its direction. In the eigenbasis of C, the
state therefore consists of min(n, d) + 1 numbers, and no weight matrix is stored. The limit t ->
inf is `estimators.fine_tuning_limit`. Near n = d it is reached late, because directions of small
eigenvalues are slow. `training_time` computes mean risks of linear models over time.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from sail_jax.deprecated import former
from theory import problems
from theory.deep_linear.estimators import check_data

__getattr__ = former(__name__, {"fine_tune_flow": "fine_tuning_flow"}, until="0.4")

# Step of the Runge-Kutta scheme in units of the fastest time scale. Near the data this is 1/(L
# |b|^{2-2/L} lambda_max), and the scheme is stable up to 2.8. Where b is small and grows it is 1/(L
# |b|^{1-2/L} |X^T y/n|). Local errors are of order STEP^5 / 120.
STEP = 0.25


@problems.defined
def fine_tuning_flow(
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    beta_s: Float[Array, " d"],
    times: Sequence[float] | Array,
    depth: ArrayLike = 2,
) -> Float[Array, "times d"]:
    """Integrates the fine-tuning of all layers and returns the predictor at given times.

    The integrator is the classical fourth-order Runge-Kutta scheme, with a step proportional to the
    fastest time scale of the equation.

    Args:
      x: Inputs `(n, d)`.
      y: Labels `(n,)`.
      beta_s: Predictor of the pretrained network `(d,)`, nonzero.
      times: Ascending times `(times,)`, >= 0, of gradient flow at unit rate on the loss |y - X
        beta|^2 / (2n).
      depth: Number of weight matrices, in [1, inf).

    Returns:
      The predictors `(times, d)`.

    Raises:
      ValueError: If shapes do not conform, a value is not finite, beta_s is 0, depth is out of
        range, or times are not ascending and >= 0.

    >>> x, y = jnp.array([[2.0, 0.0]]), jnp.array([4.0])
    >>> path = fine_tuning_flow(x, y, jnp.array([1.0, 3.0]), [0.0, 50.0], depth=1)
    >>> [[round(float(b), 3) for b in beta] for beta in path]
    [[1.0, 3.0], [2.0, 3.0]]
    """
    check_data(x, y, beta_s)
    problems.check(
        "depth", depth, lambda L: (L >= 1) & (np.inf > L), "a finite number of layers >= 1"
    )
    problems.check_times(times)
    return _flow(x, y, beta_s, jnp.asarray(times, dtype=float), jnp.asarray(depth, dtype=float))


@problems.defined
def linear_flow(
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    beta_0: Float[Array, " d"],
    times: Float[ArrayLike, " times"],
) -> Float[Array, "times d"]:
    """Computes the predictor of linear regression under gradient flow, exactly.

    With singular values s of X,

        b(t) = beta_0 + X^+ diag(1 - e^{-t s^2/n}) (y - X beta_0),

    in the basis of the left singular vectors. beta_0 = 0 corresponds to training from scratch.

    Args:
      x: Inputs `(n, d)`.
      y: Labels `(n,)`.
      beta_0: Predictor at time 0, `(d,)`.
      times: Times `(times,)`, >= 0, in any order, inf allowed; units as in `fine_tuning_flow`.

    Returns:
      The predictors `(times, d)`.

    Raises:
      ValueError: If shapes do not conform, a value is not finite, or a time is negative.

    >>> x, y = jnp.array([[3.0, 4.0]]), jnp.array([25.0])
    >>> [round(float(b), 3) for b in linear_flow(x, y, jnp.zeros(2), jnp.array([0.0, jnp.inf]))[1]]
    [3.0, 4.0]
    """
    check_data(x, y)
    if beta_0.shape != x.shape[1:]:
        raise ValueError(f"beta_0 must have shape {x.shape[1:]} to match x; got {beta_0.shape}")
    problems.check_squares("beta_0", beta_0)
    problems.check("times", times, lambda t: t >= 0, ">= 0")
    u, s, vt = linalg.svd(x, full_matrices=False)
    seen = s > max(x.shape) * jnp.finfo(s.dtype).eps * s[0]
    # expm1 keeps the digits of slow directions, where 1 - e^{-t s^2 / n} is small.
    grown = -jnp.expm1(-jnp.asarray(times)[..., None] * jnp.where(seen, s**2 / x.shape[0], 1.0))
    pull = u.T @ (y - x @ beta_0) / jnp.where(seen, s, 1.0)
    return beta_0 + (grown * jnp.where(seen, pull, 0.0)) @ vt


@jax.jit
def _flow(x: Array, y: Array, beta_s: Array, times: Array, depth: Array) -> Array:
    n = x.shape[0]
    u, s, vt = linalg.svd(x, full_matrices=False)
    curvature, pull = s**2 / n, s * (u.T @ y) / n
    seen = vt @ beta_s
    unseen = beta_s - seen @ vt
    size = jnp.linalg.norm(unseen)
    # The last coordinate is the norm of the unseen part, which has gradient 0.
    curvature, pull = jnp.append(curvature, 0.0), jnp.append(pull, 0.0)
    z = jnp.append(seen, size)
    power = 1 - 1 / depth
    drive = jnp.linalg.norm(pull)

    def speed(z: Array) -> Array:
        gradient = curvature * z - pull
        size, direction = _polar(z)
        radial = (depth - 1) * direction * (direction @ gradient)
        return -(size ** (2 * power)) * (gradient + radial)

    def advance(state: tuple[Array, Array], until: Array) -> tuple[tuple[Array, Array], Array]:
        def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
            t, z = state
            size, _ = _polar(z)
            growth = jnp.where(depth < 2, 0.0, drive * size ** jnp.maximum(2 * power - 1, 0.0))
            fastest = depth * jnp.maximum(curvature.max() * size ** (2 * power), growth)
            # The step depends on the state, because time scales change with |b| by orders of
            # magnitude.
            h = jnp.minimum(STEP / fastest, until - t)
            a = speed(z)
            b = speed(z + h / 2 * a)
            c = speed(z + h / 2 * b)
            d = speed(z + h * c)
            # The last step ends exactly at `until`, because rounding could leave a tiny remainder.
            t = jnp.where(h < until - t, t + h, until)
            return t, z + h / 6 * (a + 2 * b + 2 * c + d)

        state = jax.lax.while_loop(lambda state: state[0] < until, step, state)
        return state, state[1]

    _, path = jax.lax.scan(advance, (jnp.zeros((), z.dtype), z), times)
    direction = unseen / jnp.where(size > 0, size, 1.0)
    return path[:, :-1] @ vt + path[:, -1:] * direction


def _polar(z: Array) -> tuple[Array, Array]:
    """Computes |z| and z/|z| without squares of small entries; the direction of 0 is 0.

    On a line with a source of the wrong sign z only decays. If |z|^2 underflowed, z would cross 0.
    """
    largest = jnp.abs(z).max()
    scaled = z / jnp.where(largest > 0, largest, 1.0)
    size = jnp.linalg.norm(scaled)
    return largest * size, scaled / jnp.where(size > 0, size, 1.0)
