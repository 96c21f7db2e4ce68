"""The few inner products that determine every risk on one data set.

Let nu be the unit vector orthogonal to beta_s with beta_t = cos beta_s + sin nu. Let B = X^+ [X
beta_s, X nu, noise] and G = B^T B. The scratch and fine-tuning risks of one data set are functions
of the 3 x 3 matrix G, for every angle, noise level and depth. Linear transfer requires three more
inner products. `grid` computes these numbers from simulated data, `laws` draws them from their
exact distribution.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems


class Overlaps(NamedTuple):
    """The statistics of a data set (X, unit noise) that determine transfer from beta_s.

    Attributes:
      gram: B^T B `(..., 3, 3)`, rows and columns in the order (beta_s, nu, noise). For n >= d its
        upper 2 x 2 block is the identity.
      source: Inner products `(..., 3)` of X beta_s with (X beta_s, X nu, noise).
      n: Number of samples.
    """

    gram: Float[Array, "*b 3 3"]
    source: Float[Array, "*b 3"]
    n: Array

    def scratch(self, theta: ArrayLike, sigma: ArrayLike) -> Array:
        """Computes the risk |X^+ y - beta_t|^2 of training from scratch.

        X^+ y is the limit of gradient flow from small weights (Tahir et al., Features are fate, Thm
        3.5).
        """
        return _unlearned(self.gram, -jnp.cos(theta), -jnp.sin(theta)) + self._noise(sigma)

    def fine_tune(
        self, theta: ArrayLike, sigma: ArrayLike, depth: ArrayLike, size: ArrayLike = 1.0
    ) -> Array:
        """Computes the risk |X^+ y + c (I - P) beta_s - beta_t|^2 of fine-tuning all layers.

        This is a corrected form of Thm 3.9 of Features are fate; `null_scale` defines c.

        Args:
          theta: Angle between source and target in radians.
          sigma: Standard deviation of the label noise.
          depth: Number of weight matrices, >= 1, inf allowed.
          size: Norm |beta_s| of the pretrained predictor; the target has norm 1.

        Returns:
          One risk per data set; the arguments broadcast against the leading axes.
        """
        # The labels as coefficients of [X beta_s, X nu, noise]: |X^+ y|^2 = y^T G y.
        y = jnp.stack(jnp.broadcast_arrays(jnp.cos(theta), jnp.sin(theta), sigma), axis=-1)
        p = jnp.einsum("...i,...ij,...j->...", y, self.gram, y)
        scale = size * null_scale(p / size**2, 1 - self.gram[..., 0, 0], depth)
        return _unlearned(self.gram, scale - jnp.cos(theta), -jnp.sin(theta)) + self._noise(sigma)

    def linear_transfer(self, theta: ArrayLike, sigma: ArrayLike, ridge: ArrayLike = 0.0) -> Array:
        """Computes the risk of refitting only the scale of beta_s.

        Args:
          theta: Angle between source and target in radians.
          sigma: Standard deviation of the label noise.
          ridge: Ridge penalty >= 0, scaled by n as in the training loss of `problems`.

        Returns:
          One risk per data set; the arguments broadcast against the leading axes.

        References:
          Tahir et al., Features are fate, 2024 (arXiv 2410.08194), eqs. (11) and (14).
        """
        uu, uv, ue = jnp.moveaxis(self.source, -1, 0)
        scale = (uu * jnp.cos(theta) + uv * jnp.sin(theta) + sigma * ue) / (uu + self.n * ridge)
        return (scale - jnp.cos(theta)) ** 2 + jnp.sin(theta) ** 2

    def _noise(self, sigma: ArrayLike) -> Array:
        return jnp.asarray(sigma) ** 2 * self.gram[..., 2, 2]


@problems.defined
def bordered(
    seen: Float[Array, "*b 2 2"], cross: Float[Array, "*b 2"], size2: Float[Array, "*b"]
) -> Float[Array, "*b 3 3"]:
    """Assembles the 3 x 3 Gram matrix from its blocks.

    Args:
      seen: Inner products among the two task columns, `(..., 2, 2)`.
      cross: Inner products of the task columns with the noise column, `(..., 2)`.
      size2: Squared norm of the noise column, `(...)`.

    Returns:
      The Gram matrices `(..., 3, 3)`.
    """
    upper = jnp.concatenate([seen, cross[..., :, None]], axis=-1)
    lower = jnp.concatenate([cross, size2[..., None]], axis=-1)
    return jnp.concatenate([upper, lower[..., None, :]], axis=-2)


def _unlearned(gram: Array, a: ArrayLike, b: ArrayLike) -> Array:
    """Computes |(I - P)(a beta_s + b nu)|^2, the part of the risk that the data cannot reduce."""
    # beta_s and nu are orthonormal, so (I - P) has the Gram matrix I - G in their plane.
    quadratic = a * a * (1 - gram[..., 0, 0]) + b * b * (1 - gram[..., 1, 1])
    # This is a square, but may be negative due to rounding of the Gram matrix.
    return jnp.maximum(quadratic - 2 * a * b * gram[..., 0, 1], 0.0)


@problems.defined
def null_scale(p: ArrayLike, q: ArrayLike, depth: ArrayLike) -> Array:
    """Computes the factor by which fine-tuning rescales the part of the source outside the row
    space.

    Gradient flow from a rank-one balanced pretrained network freezes (I - P) W_1 but not the later
    layers, which grow with |beta|. Therefore (I - P) beta_s is multiplied by the solution c of

        c = N^{1 - 1/depth},  N^2 = p + q c^2.

    The paper has c = 1, which is correct only for depth 1, or if |X^+ y| = |P beta_s|.

    Args:
      p: |X^+ y|^2 / |beta_s|^2, >= 0.
      q: |(I - P) beta_s|^2 / |beta_s|^2 in [0, 1]; rounding beyond is cut off.
      depth: Number of weight matrices, >= 1, inf allowed.

    Returns:
      The factors c, with the broadcast shape of the arguments.

    Raises:
      ValueError: If a depth is below 1, or p is negative or infinite.

    References:
      Corrects Tahir et al., Features are fate, 2024 (arXiv 2410.08194), Thm 3.9, eq. (142).

    >>> null_scale(0.5, 0.5, jnp.array([1.0, 2.0, jnp.inf]))
    Array([1., 1., 1.], dtype=float32)
    """
    problems.check_depth(depth)
    problems.check("p", p, lambda p: (p >= 0) & (p < np.inf), "finite and >= 0")
    q = jnp.clip(jnp.asarray(q, dtype=float), 0.0, 1.0)
    return _scale(p, 1 - q, q, depth)


@problems.defined
def scale_by_seen(p: ArrayLike, seen: ArrayLike, depth: ArrayLike) -> Array:
    """Computes `null_scale` at q = 1 - seen, accurately also where `seen` is tiny.

    The unknown is x = log N^2. With b = 1/depth it solves p e^{-x} = seen - q (e^{-bx} - 1).
    Newton's method runs from below either on the difference of the logarithms of both sides or on
    -log(p e^{-x} + q e^{-bx}). Both are concave and increasing, so no step overshoots.

    Args:
      p: |X^+ y|^2 / |beta_s|^2, >= 0.
      seen: |P beta_s|^2 / |beta_s|^2 in [0, 1].
      depth: Number of weight matrices, >= 1, inf allowed.

    Returns:
      The factors c, with the broadcast shape of the arguments.

    Raises:
      ValueError: If a depth is below 1.
    """
    problems.check_depth(depth)
    seen = jnp.clip(jnp.asarray(seen, dtype=float), 0.0, 1.0)
    return _scale(p, seen, 1 - seen, depth)


def _scale(p: ArrayLike, seen: Array, q: Array, depth: ArrayLike) -> Array:
    """Takes both seen and q = 1 - seen, because the larger one does not resolve a tiny one."""
    values = (jnp.asarray(v, dtype=float) for v in (p, seen, q, depth))
    return _solved_scale(*jnp.broadcast_arrays(*values))


@jax.jit  # compiled once, unlike a loop over a local function in every caller
def _solved_scale(p: Array, seen: Array, q: Array, depth: Array) -> Array:
    b, tiny = 1 / depth, jnp.finfo(p.dtype).tiny
    # With p = 0 the equation is e^{-bx} = q. With b = 0 and seen = 0 it cannot be solved.
    partly, empty, endless = q > 0, p <= 0, (b == 0) & (seen == 0)
    log_q = jnp.where(
        seen < 0.5, problems.log1p(-jnp.minimum(seen, 0.5)), jnp.log(jnp.where(partly, q, 1.0))
    )
    emptied = jnp.where(partly, log_q / jnp.maximum(b, tiny), jnp.finfo(p.dtype).min)
    p, seen = jnp.maximum(p, tiny), jnp.maximum(seen, tiny)
    # p < seen means N < 1 at the root, and otherwise N >= 1. This selects the function for Newton's
    # method.
    log_p, shorter = jnp.log(p), p < seen

    def newton(x: Array) -> Array:
        # p / N^2 and q c^2 / N^2. Their sum is 1 at the root.
        fitted, retained = jnp.exp(log_p - x), q * jnp.exp(-b * x)
        right = seen - q * jnp.expm1(-b * x)
        below = -jnp.log1p(fitted - right) / ((fitted + b * retained) / (fitted + retained))
        right = jnp.where(shorter, 1.0, right)
        above = (x - log_p + jnp.log(right)) / (1 + b * retained / right)
        return x - jnp.where(shorter, below, above)

    # Bounds from below. q e^{-bx} <= 1. The right side is at most seen where x < 0, and at most
    # seen + q b x where 0 <= x <= 1.
    lowest = jnp.where(partly, log_q, -jnp.inf) / jnp.maximum(b, tiny)
    start = jnp.clip((p / np.e - seen) / jnp.maximum(b * q, tiny), 0.0, 1.0)
    start = jnp.where(shorter, jnp.maximum(log_p - jnp.log(seen), lowest), start)
    x = jax.lax.fori_loop(0, 16, lambda _, x: newton(x), start)
    # One more step from the frozen root has the derivative of the implicit function.
    x = newton(jax.lax.stop_gradient(x))
    x = jnp.where(empty, emptied, jnp.where(endless, jnp.inf, x))
    return jnp.exp((1 - b) / 2 * x)
