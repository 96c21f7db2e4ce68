"""Transfer from a source of rank k to m outputs, where the features span a subspace.

The pretrained features are an orthonormal basis U `(d, k)` and the target is a matrix B `(d, m)`,
with x ~ N(0, I) and y = B^T x + sigma noise. Only the part of B in the span of U can be learned.
The rest acts as noise. The law is therefore that of regression in k dimensions with signal |U^T
B|^2 and noise m sigma^2 + |B - U U^T B|^2. It has a second peak of double descent at n = k. This
extends Thm 3.7 of Features are fate (arXiv 2410.08194), the case k = m = 1.

No closed form is known for fine-tuning from rank k > 1. For two layers, (I - P) W_1 is frozen, so
(I - P) B stays in the span of the columns of (I - P) B_s. Balancedness, W_1^T W_1 = W_2 W_2^T,
makes (I - P)(B B^T)^{1/2}(I - P) a constant. For k = 1 this fixes the limit (`fine_tuning_limit`).
For k > 1 it leaves a rotation in O(k) that depends on the path. `simulate_fine_tuning` trains the
network and measures how well both laws hold. Fine-tuning that moves only k given directions is
linear, and is covered in `ranks`.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from sail_jax.checks import concrete
from sail_jax.deprecated import renamed
from theory import problems
from theory.deep_linear import networks
from theory.deep_linear.risks import scratch_risk


class Overlap(NamedTuple):
    """The position of a target relative to a feature space.

    Attributes:
      explained: Squared Frobenius norm of the part of the target inside the feature space.
      missed: Squared Frobenius norm of the part outside.
      k: Number of features.
      m: Number of outputs.
    """

    explained: Array
    missed: Array
    k: int | Array
    m: int


@problems.defined
def overlap(features: Float[Array, "d k"], target: Float[Array, "d m"]) -> Overlap:
    """Computes the overlap of a target with orthonormal features.

    Args:
      features: Feature basis `(d, k)` with orthonormal columns, k <= d.
      target: Target map `(d, m)`.

    Returns:
      The overlap.

    Raises:
      ValueError: If shapes do not conform, the target is not finite, or the columns of `features`
        are not orthonormal.
    """
    U, B = jnp.asarray(features, dtype=float), jnp.asarray(target, dtype=float)
    if U.ndim != 2 or B.ndim != 2 or U.shape[0] != B.shape[0] or U.shape[1] > U.shape[0]:
        raise ValueError(
            "features and target must be matrices [d, k] and [d, m] with one d >= k; got shapes "
            f"{U.shape} and {B.shape}"
        )
    problems.check_squares("target", B)
    slack = 100 * U.shape[0] ** 0.5 * float(jnp.finfo(U.dtype).eps)
    basis = concrete(U)
    if basis is not None and not np.abs(basis.T @ basis - np.eye(U.shape[1])).max() <= slack:
        raise ValueError("features must have orthonormal columns; orthonormalise them (QR) first")
    inside = U.T @ B
    return Overlap(jnp.sum(inside**2), jnp.sum((B - U @ inside) ** 2), U.shape[1], B.shape[1])


@problems.defined
def overlap_from_angles(angles: Float[Array, " r"], k: int, m: int) -> Overlap:
    """Computes the overlap of m orthonormal targets with k features from principal angles.

    Args:
      angles: Principal angles `(min(k, m),)` in radians, in [0, pi/2].
      k: Number of features, at least 1.
      m: Number of outputs, at least 1.

    Returns:
      The overlap.

    Raises:
      ValueError: If a count is below 1, or the angles have another shape or range.
    """
    if k < 1 or m < 1 or jnp.shape(angles) != (min(k, m),):
        raise ValueError(
            f"need k, m >= 1 and min(k, m) angles; got k={k}, m={m}, {jnp.shape(angles)}"
        )
    problems.check("angles", angles, lambda t: (t >= 0) & (t <= np.pi / 2 + 1e-6), "in [0, pi/2]")
    angles = jnp.asarray(angles, dtype=float)
    missed = jnp.sum(jnp.sin(angles) ** 2) + max(m - k, 0)
    return Overlap(jnp.sum(jnp.cos(angles) ** 2), missed, k, m)


@problems.defined
def principal_angles(
    features: Float[Array, "d k"], target: Float[Array, "d m"]
) -> Float[Array, " r"]:
    """Computes the principal angles between the spans of two orthonormal bases.

    Args:
      features: Orthonormal columns `(d, k)`.
      target: Orthonormal columns `(d, m)`.

    Returns:
      The angles `(min(k, m),)` in radians, ascending.

    References:
      Björck and Golub, Numerical methods for computing angles between linear subspaces, 1973.
    """
    U, V = jnp.asarray(features, dtype=float), jnp.asarray(target, dtype=float)
    # Cosines are accurate at large angles and sines at small ones, so each angle is computed from
    # the better of the two. There are min(k, m) sines only if the larger basis comes first.
    if U.shape[1] < V.shape[1]:
        U, V = V, U
    inside = U.T @ V
    cosines = linalg.svd(inside, compute_uv=False)
    sines = linalg.svd(V - U @ inside, compute_uv=False)[::-1]
    return jnp.where(
        cosines**2 < 0.5,
        jnp.arccos(jnp.clip(cosines, -1, 1)),
        jnp.arcsin(jnp.clip(sines, -1, 1)),
    )


@renamed("n", "of", "sigma", until="0.4")
@problems.in_float64
def linear_transfer_risk(
    *, n: ArrayLike, of: Overlap, sigma: ArrayLike, allow_infinite: bool = False
) -> Array:
    """Computes the expected risk |B_hat - B|_F^2 of refitting the last layer on n samples, exactly.

        missed + explained (1 - n/k)_+ + (missed + m sigma^2) min(n, k) / (|n - k| - 1)

    Args:
      n: Number of samples, >= 0.
      of: Overlap of the target with the features.
      sigma: Standard deviation of the label noise of each output, >= 0.
      allow_infinite: Whether to return inf where the mean is infinite.

    Returns:
      The expected risk, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range, or `allow_infinite` is False and |n - k| <= 1
        where there is label noise or a missed part.
    """
    problems.check_sigma(sigma)
    explained, missed = (jnp.asarray(v, dtype=float) for v in (of.explained, of.missed))
    # In units of |U^T B|, because `scratch_risk` has a target of norm one.
    size = jnp.maximum(explained, 1e-100)
    noise = jnp.sqrt((missed + of.m * jnp.asarray(sigma, dtype=float) ** 2) / size)
    learned = scratch_risk(n=n, d=of.k, sigma=noise, allow_infinite=allow_infinite)
    return missed + size * learned


class RankK(NamedTuple):
    """A fine-tuned network of two layers, with measurements of how well two conservation laws hold.

    Attributes:
      predictor: The map B `(d, m)` of the fine-tuned network.
      outside: Norm of the part of (I - P) B outside the columns of (I - P) B_s, relative to the
        norm of (I - P) B. It vanishes as alpha -> 0.
      drift: Norm of the change of (I - P)(B B^T)^{1/2}(I - P) by fine-tuning, relative to its norm
        after pretraining. It vanishes as alpha -> 0.
      gradient: Largest gradient entry that either training phase left; 0 when converged.
    """

    predictor: Array
    outside: Array
    drift: Array
    gradient: Array


@problems.defined
def simulate_fine_tuning(
    key: Array,
    x: Float[Array, "n d"],
    y: Float[Array, "n m"],
    source: Float[Array, "d m"],
    *,
    alpha: float = 1e-3,
    rate: float = 0.02,
    time: float = 1000.0,
) -> RankK:
    """Pretrains two layers on a map, then fine-tunes both on a data set, by gradient descent.

    It trains one network on one data set, without averaging. Pretraining uses the population loss
    of `source` and starts from `networks.small_weights`.

    Args:
      key: Random key of the initial weights.
      x: Inputs `(n, d)`.
      y: Labels `(n, m)`.
      source: Map to pretrain on, `(d, m)`.
      alpha: Scale of the initial weights, > 0.
      rate: Learning rate.
      time: Duration of each phase, which takes `time / rate` steps.

    Returns:
      The fine-tuned network and its measurements.

    Raises:
      ValueError: If shapes do not conform or a value is not finite.
    """
    if x.ndim != 2 or y.ndim != 2 or source.shape != (x.shape[1], y.shape[1]) or len(x) != len(y):
        raise ValueError(
            "x [n, d], y [n, m] and source [d, m] must conform; "
            f"got {x.shape}, {y.shape} and {source.shape}"
        )
    for name, value in (("x", x), ("y", y), ("source", source)):
        problems.check_squares(name, value)
    steps = round(time / rate)
    start = networks.small_weights(key, x.shape[1], 2, alpha, y.shape[1])
    pretrained = networks.pretrain(start, source, rate, steps)
    trained = networks.fine_tune(pretrained.weights, x, y, rate, steps)
    before, after = (networks.predictor(run.weights) for run in (pretrained, trained))

    _, s, vt = linalg.svd(x, full_matrices=False)
    seen = jnp.where((s > s[0] * max(x.shape) * jnp.finfo(s.dtype).eps)[:, None], vt, 0.0)

    def unseen(b: Array) -> Array:
        return b - seen.T @ (seen @ b)

    def root(b: Array) -> Array:
        u, s, _ = linalg.svd(b, full_matrices=False)
        # (B B^T)^(1/2) = U sqrt(S) (U sqrt(S))^T for the singular value decomposition of B.
        half = unseen(u * jnp.sqrt(s))
        return half @ half.T

    columns = linalg.svd(unseen(before), full_matrices=False)
    # Singular vectors of values that are 0 up to rounding are arbitrary and are excluded.
    basis = jnp.where(columns[1] > 1e-8 * columns[1][0], columns[0], 0.0)
    left = unseen(after)
    outside = jnp.linalg.norm(left - basis @ (basis.T @ left)) / jnp.linalg.norm(left)
    drift = jnp.linalg.norm(root(after) - root(before)) / jnp.linalg.norm(root(before))
    return RankK(after, outside, drift, jnp.maximum(pretrained.gradient, trained.gradient))
