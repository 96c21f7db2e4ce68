"""What each way of training ends at on one given data set (X, y), as vectors.

Limits of gradient flow from small (scratch) or rank-one pretrained weights (features-are-fate Thms
3.5, 3.7 and 3.9, the last corrected). Any design X of any rank; no distributional assumption.
"""

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems
from theory.deep_linear.overlaps import null_scale

Design = Float[Array, "n d"]
Labels = Float[Array, " n"]
Vector = Float[Array, " d"]


def scratch_fit(x: Design, y: Labels) -> Vector:
    """X^+ y: the interpolant (or least-squares fit) of minimum norm."""
    check_data(x, y)
    return _fit(x, y)[0]


def linear_transfer_fit(x: Design, y: Labels, beta_s: Vector, ridge: ArrayLike = 0.0) -> Vector:
    """The multiple of beta_s that fits best: one coefficient, penalised by n ridge |w|^2 on unit
    features (the sparsified features of Thm 3.4); 0 where the data see nothing of beta_s."""
    check_data(x, y, beta_s)
    problems.check_ridge(ridge)
    unit = beta_s / jnp.linalg.norm(beta_s)
    feature = x @ unit
    size2 = feature @ feature + x.shape[0] * jnp.asarray(ridge, dtype=x.dtype)
    return unit * jnp.where(size2 > 0, (feature @ y) / jnp.where(size2 > 0, size2, 1.0), 0.0)


def fine_tune_limit(x: Design, y: Labels, beta_s: Vector, depth: ArrayLike = 2) -> Vector:
    """X^+ y + c (I - P) beta_s: where a depth-layer network started from beta_s ends.

    P projects on the row space of x; c = `null_scale` in units of |beta_s|. Rank-one balanced
    pretrained weights; depth 1 is linear regression started at beta_s (c = 1).
    """
    check_data(x, y, beta_s)
    fitted, projected = _fit(x, y, beta_s)
    unseen = beta_s - projected
    size2 = beta_s @ beta_s
    c = null_scale(fitted @ fitted / size2, unseen @ unseen / size2, depth)
    return fitted + c * unseen


def _fit(x: Design, y: Labels, beta: Vector | None = None) -> tuple[Vector, Vector]:
    """X^+ y and P beta; relative singular values below max(n, d) eps count as zero."""
    u, s, vt = jnp.linalg.svd(x, full_matrices=False)
    seen = s > max(x.shape) * jnp.finfo(s.dtype).eps * s[0]
    vt = jnp.where(seen[:, None], vt, 0.0)
    fitted = (u.T @ y / jnp.where(seen, s, 1.0)) @ vt
    return fitted, fitted if beta is None else (vt @ beta) @ vt


def check_data(x: Array, y: Array, beta: Array | None = None) -> None:
    """ValueError, naming the argument, for shapes that do not conform, non-finite values and a
    source of norm zero."""
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x must have shape [n, d] with n, d >= 1; got {x.shape}")
    if y.shape != x.shape[:1]:
        raise ValueError(f"y must have shape {x.shape[:1]} to match x {x.shape}; got {y.shape}")
    if beta is not None and beta.shape != x.shape[1:]:
        raise ValueError(f"beta_s must have shape {x.shape[1:]} to match x; got {beta.shape}")
    problems.check("x", x, np.isfinite, "finite")
    problems.check("y", y, np.isfinite, "finite")
    if beta is not None:
        size = jnp.linalg.norm(beta)
        problems.check("|beta_s|", size, lambda s: (s > 0) & (s < np.inf), "positive and finite")
