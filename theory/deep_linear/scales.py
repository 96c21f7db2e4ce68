"""Fine-tuning of two layers of unequal size, from fixed features to kernel regression.

A network W_1 w_2 with one output conserves D = W_1^T W_1 - w_2 w_2^T under gradient flow. Its
imbalance is the number r for which, in units of |beta_s|, one of these is true:

    D = r I                      a first layer of full rank (r >= 0)
    |w_2|^2 - |W_1|^2 = r        a network of rank one, as pre-training from small weights makes it

The predictor b obeys the same flow in both:

    db/dt = -[a g + (2a - r) unit (unit.g)],  a = (r + sqrt(r^2 + 4 |b|^2)) / 2,  unit = b/|b|

with a where the gradient g is orthogonal to b, and a + (a - r) = 2a - r along b. At r = 0 this is
the network of the paper, which begins at small weights. As r -> inf, a is constant, and the network
is linear regression. As r -> -inf, b turns more and more slowly relative to its growth.
"""

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax.deprecated import renamed
from theory import problems
from theory.deep_linear.estimators import check_data, scratch_fit


@problems.in_float64
def unbalanced_scale(p: ArrayLike, q: ArrayLike, imbalance: ArrayLike) -> Array:
    """Computes the factor by which fine-tuning rescales what the data cannot see of the source.

    Gradient flow moves b / sqrt(a) along X^T residual, so it conserves (I - P) b / sqrt(a). The
    factor is c = sqrt(a / a_s), and a solves a (a - r) = |b|^2 = p + q c^2, a quadratic equation:

        a = (B + sqrt(B^2 + 4 p)) / 2,  B = (1 - q) r + q a_s,  a_s = (r + sqrt(r^2 + 4)) / 2.

    It is `overlaps.null_scale` for depth 2 at r = 0, for depth 1 as r -> inf, and for infinite
    depth as r -> -inf.

    Args:
      p: |X^+ y|^2 / |beta_s|^2, >= 0.
      q: |(I - P) beta_s|^2 / |beta_s|^2 in [0, 1]; rounding beyond is cut off.
      imbalance: r, of either sign, finite.

    Returns:
      The factors c, with the broadcast shape of the arguments.

    Raises:
      ValueError: If p is negative or a value is not finite.

    References:
      Azulay et al., On the implicit bias of initialization shape, 2021 (arXiv 2102.09769), have
      potentials of this kind for training from small and from unbalanced starts.

    >>> [round(float(c), 3) for c in unbalanced_scale(2.0, 0.5, jnp.array([-1e3, 0.0, 1e3]))]
    [2.0, 1.299, 1.0]
    """
    problems.check("p", p, lambda p: (p >= 0) & (p < np.inf), "finite and >= 0")
    problems.check("imbalance", imbalance, lambda r: abs(r) < np.inf, "finite")
    q = jnp.clip(jnp.asarray(q, dtype=float), 0.0, 1.0)
    return _scale(jnp.asarray(p, dtype=float), 1 - q, q, jnp.asarray(imbalance, dtype=float))


def _scale(p: Array, seen: Array, q: Array, r: Array) -> Array:
    """Takes both seen and q = 1 - seen, since the larger one loses the digits of a tiny one."""
    # a and a - r have the product 1. The one that does not cancel gives the other.
    larger = (abs(r) + jnp.hypot(r, 2.0)) / 2
    grows = r >= 0
    start = jnp.where(grows, larger, 1 / larger)
    b = seen * r + q * start
    root = jnp.hypot(b, 2 * jnp.sqrt(p))
    falls = b < 0
    a = jnp.where(falls, 2 * p / jnp.where(falls, root - b, 1.0), (b + root) / 2)
    return jnp.sqrt(jnp.where(grows, a / larger, a * larger))


@problems.defined
def unbalanced_limit(
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    beta_s: Float[Array, " d"],
    imbalance: ArrayLike,
) -> Float[Array, " d"]:
    """Computes X^+ y + c (I - P) beta_s, where fine-tuning of an unbalanced network ends.

    Args:
      x: Inputs `(n, d)`.
      y: Labels `(n,)`.
      beta_s: Predictor of the pre-trained network `(d,)`, nonzero.
      imbalance: r in units of |beta_s|, as in `unbalanced_scale`; one number.

    Returns:
      The fitted weight vector `(d,)`.

    Raises:
      ValueError: If shapes do not conform, a value is not finite, or beta_s is 0.

    >>> x, y = jnp.array([[2.0, 0.0]]), jnp.array([4.0])
    >>> [round(float(b), 3) for b in unbalanced_limit(x, y, jnp.array([0.0, 3.0]), 1e9)]
    [2.0, 3.0]
    """
    check_data(x, y, beta_s)
    fitted, seen = scratch_fit(x, y), scratch_fit(x, x @ beta_s)
    unseen, size2 = beta_s - seen, beta_s @ beta_s
    c = unbalanced_scale(fitted @ fitted / size2, unseen @ unseen / size2, imbalance)
    return fitted + c * unseen


@renamed("load", "theta", "sigma", "imbalance", until="0.4", gamma="load")
@problems.in_float64
def unbalanced_risk(
    *, load: ArrayLike, theta: ArrayLike, sigma: ArrayLike, imbalance: ArrayLike
) -> Array:
    """Computes the limiting risk of fine-tuning an unbalanced network, as n, d -> inf.

        (1 - load)(1 - 2 c cos + c^2) + load sigma^2 / (1 - load)

    with c of `unbalanced_scale` at p = load (1 + sigma^2/(1 - load)), q = 1 - load. As
    imbalance -> inf it is eq. (16) of the paper, which has c = 1.

    Args:
      load: Load n / d, in [0, 1).
      theta: Angle between source and target in radians, in [0, pi]; both have norm 1.
      sigma: Standard deviation of the label noise, >= 0.
      imbalance: As in `unbalanced_scale`.

    Returns:
      The limiting risk, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    References:
      Generalises Tahir et al., Features are fate, 2024 (arXiv 2410.08194), Thm 3.9.

    >>> risk = unbalanced_risk(load=0.5, theta=0.0, sigma=0.0, imbalance=-3.0)  # no noise
    >>> round(float(risk), 4)  # the same task
    0.0
    """
    problems.check_theta(theta)
    c = _limit_scale(load, sigma, imbalance)
    load, cos = jnp.asarray(load, dtype=float), problems.cos_sin(theta)[0]
    missed = (c - cos) ** 2 + problems.cos_sin(theta)[1] ** 2
    return (1 - load) * missed + load * jnp.asarray(sigma) ** 2 / (1 - load)


@renamed("load", "sigma", "imbalance", until="0.4", gamma="load")
@problems.in_float64
def unbalanced_boundary(*, load: ArrayLike, sigma: ArrayLike, imbalance: ArrayLike) -> Array:
    """Computes the angle beyond which fine-tuning hurts, arccos(c / 2), in the limit.

    Args:
      load: Load n / d, in [0, 1).
      sigma: Standard deviation of the label noise, >= 0.
      imbalance: As in `unbalanced_scale`.

    Returns:
      Angles in radians; 0 where fine-tuning always hurts.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(float(unbalanced_boundary(load=0.5, sigma=0.5, imbalance=1e6) / jnp.pi), 4)
    0.3333
    """
    c = _limit_scale(load, sigma, imbalance)
    return jnp.arccos(jnp.minimum(c / 2, 1.0))


def _limit_scale(load: ArrayLike, sigma: ArrayLike, imbalance: ArrayLike) -> Array:
    """The factor c in the limit of large n and d, for tasks of norm 1."""
    allowed = "a load in [0, 1): from n = d on fine-tuning equals scratch training"
    problems.check("load", load, lambda g: (g >= 0) & (g < 1), allowed)
    problems.check_sigma(sigma)
    problems.check("imbalance", imbalance, lambda r: abs(r) < np.inf, "finite")
    load, sigma, r = (jnp.asarray(v, dtype=float) for v in (load, sigma, imbalance))
    return _scale(load * (1 + sigma**2 / (1 - load)), load, 1 - load, r)
