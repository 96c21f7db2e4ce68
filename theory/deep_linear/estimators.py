"""The predictor at the end of each kind of training, on one given data set (X, y).

These are limits of gradient flow from small weights (scratch) or from rank-one pretrained weights.
They hold for any design X of any rank, without assumptions about its distribution. `networks`
trains real networks towards the same limits.
"""

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from sail_jax.deprecated import former
from theory import problems
from theory.deep_linear.overlaps import null_scale

__getattr__ = former(__name__, {"fine_tune_limit": "fine_tuning_limit"}, until="0.4")

Design = Float[Array, "n d"]
Labels = Float[Array, " n"]
Vector = Float[Array, " d"]


@problems.defined
def scratch_fit(x: Design, y: Labels) -> Vector:
    """Computes X^+ y, the least-squares fit of minimum norm, the limit of training from scratch.

    Args:
      x: Inputs `(n, d)`.
      y: Labels `(n,)`.

    Returns:
      The fitted weight vector `(d,)`.

    Raises:
      ValueError: If shapes do not conform or a value is not finite.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), Thm 3.5.

    >>> [round(float(b), 3) for b in scratch_fit(jnp.array([[3.0, 4.0]]), jnp.array([25.0]))]
    [3.0, 4.0]
    """
    check_data(x, y)
    return _fit(x, y)[0]


@problems.defined
def linear_transfer_fit(x: Design, y: Labels, beta_s: Vector, ridge: ArrayLike = 0.0) -> Vector:
    """Computes the best-fitting multiple of beta_s, the limit of training only the last layer.

    One coefficient w is fitted on the unit feature beta_s / |beta_s|, by the loss

        |y - w X beta_s / |beta_s||^2 / (2n) + ridge w^2 / 2.

    It is 0 if X beta_s = 0.

    Args:
      x: Inputs `(n, d)`.
      y: Labels `(n,)`.
      beta_s: Source weight vector `(d,)`, nonzero.
      ridge: Ridge penalty >= 0.

    Returns:
      The fitted weight vector `(d,)`, parallel to beta_s.

    Raises:
      ValueError: If shapes do not conform, a value is not finite, beta_s is 0 or ridge < 0.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), eqs. (11) and (14), with the
      sparsified features of Thm 3.4.

    >>> x, y = jnp.array([[1.0, 0.0], [1.0, 1.0]]), jnp.array([3.0, 7.0])
    >>> [round(float(b), 3) for b in linear_transfer_fit(x, y, jnp.array([6.0, 8.0]))]
    [3.0, 4.0]
    """
    check_data(x, y, beta_s)
    problems.check_ridge(ridge)
    unit = beta_s / jnp.linalg.norm(beta_s)
    feature = x @ unit
    # The loss is divided by n but the penalty is not, so n ridge is added to |feature|^2.
    size2 = feature @ feature + x.shape[0] * jnp.asarray(ridge, dtype=x.dtype)
    return unit * jnp.where(size2 > 0, (feature @ y) / jnp.where(size2 > 0, size2, 1.0), 0.0)


@problems.defined
def fine_tuning_limit(x: Design, y: Labels, beta_s: Vector, depth: ArrayLike = 2) -> Vector:
    """Computes X^+ y + c (I - P) beta_s, the limit of fine-tuning all layers.

    P projects on the row space of x, and c is `null_scale` in units of |beta_s|. The pretrained
    weights are rank one and balanced with predictor beta_s. Depth 1 is linear regression started at
    beta_s, with c = 1. For d = 1 and more than one layer, a predictor of the wrong sign ends at the
    saddle 0, which the flow cannot pass.

    Args:
      x: Inputs `(n, d)`.
      y: Labels `(n,)`.
      beta_s: Predictor of the pretrained network `(d,)`, nonzero.
      depth: Number of weight matrices, >= 1, inf allowed.

    Returns:
      The fitted weight vector `(d,)`.

    Raises:
      ValueError: If shapes do not conform, a value is not finite, beta_s is 0 or depth < 1.

    References:
      Corrects Tahir et al., Features are fate, 2024 (arXiv 2410.08194), Thm 3.9, eq. (142).

    >>> x, y = jnp.array([[2.0, 0.0]]), jnp.array([4.0])
    >>> [round(float(b), 3) for b in fine_tuning_limit(x, y, jnp.array([0.0, 3.0]), depth=1)]
    [2.0, 3.0]
    """
    check_data(x, y, beta_s)
    fitted, projected = _fit(x, y, beta_s)
    unseen = beta_s - projected
    size2 = beta_s @ beta_s
    c = null_scale(fitted @ fitted / size2, unseen @ unseen / size2, depth)
    stuck = (x.shape[1] == 1) & (jnp.asarray(depth) > 1) & (fitted @ beta_s < 0)
    return jnp.where(stuck, 0.0, fitted + c * unseen)


def _fit(x: Design, y: Labels, beta: Vector | None = None) -> tuple[Vector, Vector]:
    """Returns X^+ y and P beta; relative singular values below max(n, d) eps count as zero."""
    # An SVD determines the rank. Normal equations would square the condition number.
    u, s, vt = linalg.svd(x, full_matrices=False)
    seen = s > max(x.shape) * jnp.finfo(s.dtype).eps * s[0]
    vt = jnp.where(seen[:, None], vt, 0.0)
    fitted = (u.T @ y / jnp.where(seen, s, 1.0)) @ vt
    return fitted, fitted if beta is None else (vt @ beta) @ vt


def check_data(x: Array, y: Array, beta: Array | None = None) -> None:
    """Raises an error with the argument's name unless data and source conform.

    Args:
      x: Inputs, which must be `(n, d)` with n, d >= 1.
      y: Labels, which must be `(n,)`.
      beta: Source, which must be `(d,)` and nonzero; not checked if None.

    Raises:
      ValueError: If shapes do not conform, a value is not finite, or the source has norm 0.
    """
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x must have shape [n, d] with n, d >= 1; got {x.shape}")
    if y.shape != x.shape[:1]:
        raise ValueError(f"y must have shape {x.shape[:1]} to match x {x.shape}; got {y.shape}")
    if beta is not None and beta.shape != x.shape[1:]:
        raise ValueError(f"beta_s must have shape {x.shape[1:]} to match x; got {beta.shape}")
    problems.check_squares("x", x)
    problems.check_squares("y", y)
    if beta is not None:
        size = jnp.linalg.norm(beta)
        problems.check("|beta_s|", size, lambda s: (s > 0) & (s < np.inf), "positive and finite")
