"""Weights from distances, by a quadratic form of distances; on the host, in float64."""

from typing import Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import ArrayLike, Float

from sail_jax.checks import concrete, one_of
from sail_jax.distances import total_variation_gaussian


class Weights(NamedTuple):
    """Merging weights and their conditioning.

    Attributes:
      weights: One per model, `[model]`.
      objective: The minimised quantity at `weights`.
      condition: The condition number of the quadratic form along the free directions of the
        weights; None without a form.
    """

    weights: Float[np.ndarray, "model"]
    objective: float
    condition: float | None


def pair_weight(
    d1_target: Float[ArrayLike, "*batch"],
    d2_target: Float[ArrayLike, "*batch"],
    d12: Float[ArrayLike, "*batch"],
    *,
    model: Literal[1, 2] = 1,
    squared: bool = False,
    noise: float = 0.0,
) -> Float[np.ndarray, "*batch"]:
    """Computes the weight of a model in the combination of two models closest to the target.

    The combination has the weights w and 1 - w. For model 1, w is (d2*^2 + d12^2 - d1*^2) / (2
    d12^2), SAIL's eq. 11. For model 2, w is (d1*^2 + d12^2 - d2*^2) / (2 d12^2). The paper states
    this in Appendix E and uses it in Section 4.4, also as gamma.

    The weight is not clipped. If it is below 0 or above 1, the closest combination lies beyond one
    of the models. Eq. 10 excludes this: clip to [0, 1], as in `simplex_weights`.

    Args:
      d1_target: Distance d1* of model 1 from the target. All distances may be arrays that
        broadcast.
      d2_target: Distance d2* of model 2 from the target.
      d12: Distance between the models, > 0.
      model: The model of the weight, 1 or 2.
      squared: Whether the distances are given as squares. Squares may violate the triangle
        inequality, and unbiased estimates of squares to the target may be negative.
      noise: The allowed violation of the triangle inequality, in the unit of distances.

    Returns:
      The weight, of the broadcast shape.

    Raises:
      ValueError: For shapes that do not broadcast, an unknown `model`, a d12 that is not > 0, or
        values that are not finite. For distances that are negative or violate the triangle
        inequality by more than `noise`.
      TypeError: For values that are not real numbers, or are traced.

    References:
      SAIL (Structured-Initialization Learning), eq. 10 and 11.

    >>> float(pair_weight(1.0, 3.0, 4.0))
    0.75
    """
    given = {"d1_target": d1_target, "d2_target": d2_target, "d12": d12}
    d1, d2, between = (host(name, value) for name, value in given.items())
    try:
        np.broadcast_shapes(d1.shape, d2.shape, between.shape)
    except ValueError as error:
        raise ValueError(
            f"d1_target, d2_target and d12 must fit: {d1.shape}, {d2.shape}, {between.shape}"
        ) from error
    one_of("model", model, (1, 2))
    if not (between > 0).all():
        raise ValueError(
            f"d12 must be > 0 (at distance 0 any weight is the same); got {between.min()}"
        )
    if not squared:
        for name, d in (("d1_target", d1), ("d2_target", d2)):
            if (d < 0).any():
                raise ValueError(f"{name} must be >= 0; got {d.min()}")
        for longest, d, others, rest in (
            ("d12", between, "d1_target + d2_target", d1 + d2),
            ("d1_target", d1, "d12 + d2_target", between + d2),
            ("d2_target", d2, "d12 + d1_target", between + d1),
        ):
            if (excess := (d - rest).max()) > _slack(d.max(), noise):
                raise ValueError(
                    f"{longest} must be at most {others} (triangle inequality); exceeds it by "
                    f"{excess:.6g}, noise allowed {noise}"
                )
        # Only distances satisfy the triangle inequality. Estimates of squares may be negative or
        # violate it.
        d1, d2, between = d1**2, d2**2, between**2
    own, other = (d1, d2) if model == 1 else (d2, d1)
    return np.asarray((other + between - own) / (2 * between))


def tv_bias(
    d1_target: Float[ArrayLike, "*batch"],
    d2_target: Float[ArrayLike, "*batch"],
    d12: Float[ArrayLike, "*batch"],
) -> Float[np.ndarray | np.generic, "*batch"]:
    """Computes the error of model 1's weight from total variation distances in eq. 11.

    The tasks are Gaussians with one covariance. Their means have the given Mahalanobis distances.
    The result is the weight from total variation distances minus the correct weight from these
    distances.

    With a, b, c the squares of d1*, d2*, d12, the error is (b - a)(c - a - b) / (24 c) to leading
    order. It vanishes for a target at equal distances from both models, or at the vertex of a right
    angle between them. Otherwise it is of the order of the squared distances. At large distances
    all TV are 1, and the weight is 1/2 for any correct weight.

    Args:
      d1_target: The Mahalanobis distance d1* between the means of task 1 and the target. All
        distances may be arrays that broadcast.
      d2_target: The distance d2* between task 2 and the target.
      d12: The distance between tasks 1 and 2, > 0.

    Returns:
      The error, of the broadcast shape.

    Raises:
      ValueError: As in `pair_weight`.
      TypeError: As in `pair_weight`.

    >>> round(float(tv_bias(1.0, 3.0, 4.0)), 3)
    0.081
    """
    right = pair_weight(d1_target, d2_target, d12)
    # The error is a difference of nearly equal weights, which float32 would lose.
    with jax.enable_x64(True):
        tv = [
            np.asarray(total_variation_gaussian(np.asarray(d, np.float64)[..., None]))
            for d in (d1_target, d2_target, d12)
        ]
    return pair_weight(*tv) - right


def gram_from_distances(
    to_target: Float[ArrayLike, "model"],
    between: Float[ArrayLike, "model model"],
    *,
    squared: bool = False,
    noise: float = 0.0,
) -> Float[np.ndarray, "model model"]:
    """Computes the quadratic form H of weights from distances (SAIL's eq. 13).

    H_ij = d_i*^2 + d_j*^2 - d_ij^2. The entries are twice the inner products of theta_i - theta*
    and theta_j - theta*.

    Args:
      to_target: Distances d_i* of the models from the target, `[model]`.
      between: Distances d_ij between the models, `[model, model]`, symmetric with a diagonal of 0.
      squared: Whether both contain squared distances. Squares may violate the triangle inequality,
        and unbiased estimates of squares to the target may be negative.
      noise: The allowed violation of the triangle inequality, in the unit of distances.

    Returns:
      H, symmetric.

    Raises:
      ValueError: For inconsistent shapes, values that are not finite, and a `between` that is
        not symmetric with a diagonal of 0. For distances that are negative or violate the triangle
        inequality by more than `noise`. The message contains the three distances.
      TypeError: For values that are not real numbers, or are traced.

    >>> gram_from_distances(np.array([3.0, 4.0]), np.array([[0.0, 5.0], [5.0, 0.0]]))
    array([[18.,  0.],
           [ 0., 32.]])
    """
    d, D = host("to_target", to_target), host("between", between)
    n = len(d) if d.ndim == 1 else 0
    if not n or D.shape != (n, n):
        raise ValueError(
            f"to_target and between must be [n] and [n, n], n >= 1; got {d.shape}, {D.shape}"
        )
    slack = _slack(np.abs(D).max(), noise)
    if np.abs(D - D.T).max() > slack or np.abs(np.diagonal(D)).max() > slack:
        raise ValueError("between must be symmetric with a diagonal of 0")
    if not squared:
        if min(d.min(), D.min()) < 0:
            raise ValueError("distances must be >= 0 (squared=True for estimates of squares)")
        # With the target as one more point, one expression checks every triangle.
        full = np.block([[D, d[:, None]], [d[None], np.zeros((1, 1))]])
        excess = full[:, :, None] - (full[:, None, :] + full.T[None])  # d_ij - d_ik - d_kj
        i, j, k = map(int, np.unravel_index(excess.argmax(), excess.shape))
        if excess[i, j, k] > _slack(full.max(), noise):
            raise ValueError(
                f"{_side(i, j, n)} = {full[i, j]:.6g} must be at most "
                f"{_side(i, k, n)} + {_side(k, j, n)} = "
                f"{full[i, k] + full[k, j]:.6g} (triangle inequality, noise allowed {noise})"
            )
        d, D = d**2, D**2
    D = (D + D.T) / 2
    return d[:, None] + d - D


def affine_weights(h: Float[ArrayLike, "model model"], *, ridge: float = 0.0) -> Weights:
    """Finds the weights with sum 1, of either sign, that minimise w^T H w / 2.

    If H is regular, the weights are H^-1 e / (e^T H^-1 e) with e = (1, ..., 1), SAIL's eq. 12. If
    some combination attains the target, H is singular, and the weights are still found. Only the
    restriction of H to weights with sum 0 must be positive definite. This form depends only on
    -d_ij^2, that is on the models and not on the target. `condition` is its condition number.

    Args:
      h: H, symmetric, as from `gram_from_distances`.
      ridge: A number >= 0. ridge times the mean eigenvalue of this form is added to it, which pulls
        the result towards equal weights.

    Returns:
      The weights, the minimum, and the condition number.

    Raises:
      ValueError: If H is not a symmetric matrix, or is singular or indefinite along weights with
        sum 0. For an invalid ridge, and for values that are not finite.
      TypeError: For values that are not real numbers, or are traced.

    >>> affine_weights(np.diag([2.0, 6.0])).weights.round(12).tolist()
    [0.75, 0.25]
    """
    H = _form(h)
    if not (np.isfinite(ridge) and ridge >= 0):
        raise ValueError(f"ridge must be a finite number >= 0; got {ridge}")
    n = len(H)
    Z, M, slope = _reduced(H)
    if n > 1:
        # The ridge is relative to the mean eigenvalue of the inverted form.
        M = M + ridge * np.trace(M) / (n - 1) * np.eye(n - 1)
    spread = np.linalg.eigvalsh(M) if n > 1 else np.ones(1)
    if spread[0] < -tiny(H):
        raise ValueError(_indefinite(spread[0]))
    if spread[0] <= tiny(H):
        raise ValueError(
            "h is singular along weights of sum 0, so the weights are not unique: some model is an "
            "affine combination of others (or occurs twice); leave one out, give ridge > 0, "
            f"or use simplex_weights (eigenvalues {spread[0]:.3g} to {spread[-1]:.3g})"
        )
    # w = e / n + Z y has sum 1 for every y; the minimum over y solves M y = -slope.
    w = np.full(n, 1 / n) - Z @ np.linalg.solve(M, slope) if n > 1 else np.ones(1)
    return Weights(w, float(w @ H @ w) / 2, float(spread[-1] / spread[0]))


def simplex_weights(h: Float[ArrayLike, "model model"]) -> Weights:
    """Finds the weights >= 0 with sum 1 (SAIL's eq. 10) that minimise w^T H w / 2.

    They are w / sum(w) for the w >= 0 that minimises |A w|^2 + (sum(w) - 1)^2 with A^T A = H. An
    active-set method solves this least squares problem exactly (Lawson and Hanson). The weights of
    the remaining models are then solved for again. If H is singular, the result is one of the
    minimisers, and the condition is infinite.

    Args:
      h: H, symmetric, as from `gram_from_distances`.

    Returns:
      The weights, the minimum, and the condition number of H along weights of sum 0.

    Raises:
      ValueError: If H is not a symmetric matrix, or has values that are not finite. If H has
        negative curvature, or slope without curvature, along weights with sum 0. The distances then
        do not belong to points in a Euclidean space.
      TypeError: For values that are not real numbers, or are traced.

    References:
      Lawson and Hanson, Solving Least Squares Problems, 1974.

    >>> simplex_weights(np.array([[2.0, 4.0], [4.0, 10.0]])).weights.tolist()
    [1.0, 0.0]
    """
    from scipy.optimize import nnls

    H = _form(h)
    n, least = len(H), tiny(H)
    if n == 1:
        return Weights(np.ones(1), float(H[0, 0]) / 2, 1.0)
    Z, M, slope = _reduced(H)
    values, vectors = np.linalg.eigh(M)
    along = vectors.T @ slope
    if values[0] < -least:
        raise ValueError(_indefinite(values[0]))
    flat = values <= least
    if (np.abs(along[flat]) > least).any():
        raise ValueError(
            "h is linear along weights without curvature: the models' distances to the "
            "target contradict the distances between models"
        )
    # The factor A contains coordinates of the models relative to the projection of the target onto
    # their affine hull. A constant added to H does not change the minimiser, so the target's
    # distance from the hull is omitted.
    root = np.sqrt(np.where(flat, 0.0, values))
    A = root[:, None] * (vectors.T @ Z.T)
    A += np.where(flat, 0.0, along / np.where(flat, 1.0, root))[:, None]
    # Both parts of the least squares problem get one scale. The minimiser w / sum(w) does not
    # depend on it.
    unit = np.abs(A).max() or 1.0
    w, _ = nnls(np.vstack([A / unit, np.ones(n)]), np.r_[np.zeros(len(A)), 1.0], maxiter=100 * n)
    w /= w.sum()
    support = np.flatnonzero(w)
    try:
        exact = affine_weights(H[np.ix_(support, support)]).weights
    except ValueError:  # not unique on the kept models
        exact = w[support]
    if (exact >= 0).all():
        w[support] = exact
    condition = float("inf") if flat.any() else float(values[-1] / values[0])
    return Weights(w, float(w @ H @ w) / 2, condition)


def _form(h: ArrayLike) -> np.ndarray:
    """Checks that H is a symmetric matrix; returns it in float64, exactly symmetric."""
    H = host("h", h)
    if H.ndim != 2 or H.shape[0] != H.shape[1] or not H.size:
        raise ValueError(f"h must be a matrix [n, n], n >= 1; got {H.shape}")
    if np.abs(H - H.T).max() > 1e3 * np.finfo(np.float32).eps * np.abs(H).max():
        raise ValueError("h must be symmetric")
    return (H + H.T) / 2


def _reduced(H: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns an orthonormal basis Z of weights with sum 0, and H and its slope there."""
    n = len(H)
    # QR makes the other columns orthogonal to the first column, which is constant.
    Z = np.linalg.qr(np.column_stack([np.ones(n), np.eye(n)[:, 1:]]))[0][:, 1:]
    return Z, Z.T @ H @ Z, Z.T @ H.mean(1)


def _side(i: int, j: int, n: int) -> str:
    """Returns the name of the distance between i and j in messages; n is the target."""
    i, j = min(i, j), max(i, j)
    return f"to_target[{i}]" if j == n else f"between[{i}, {j}]"


def tiny(H: np.ndarray) -> float:
    """Computes the size below which an eigenvalue of a matrix counts as 0."""
    return 16 * len(H) * np.finfo(np.float64).eps * float(np.abs(H).max())


def _indefinite(least: float) -> str:
    """Makes the message for a form that is not positive semi-definite."""
    return (
        "h must be positive semi-definite along weights of sum 0 (distances between models must be "
        f"between points in a Euclidean space); its smallest eigenvalue there is {least:.6g}"
    )


def _slack(size: float, noise: float) -> float:
    """Computes the tolerance for violated inequalities at this size: `noise` plus rounding."""
    # Values may be in float32.
    return noise + 16 * float(np.finfo(np.float32).eps) * float(size)


def host(name: str, value: ArrayLike) -> np.ndarray:
    """Converts a value to a finite float64 array on the host.

    Raises a TypeError if the value is traced or not real, and a ValueError if a number is not
    finite.
    """
    array = concrete(value)
    if array is None:
        raise TypeError(f"{name} is traced: weights are found outside jax.jit")
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name} must be real numbers; got {array.dtype}")
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite")
    return array
