"""Samples `Overlaps` exactly at finite n and d, without building a data matrix.

For Gaussian X, the 3 x 3 Gram matrix of `Overlaps` is a function of chi-squares and normals. With P
the projection on the row space of X, I - P restricted to span(beta_s, nu) is a matrix-variate Beta,
|X^+ noise|^2 is chi^2_min(n, d) / chi^2_{|n - d| + 1}, and the direction of X^+ noise is uniform in
the row space. A draw costs O(1) for any n and d. `grid` simulates the same quantities from actual
data.
"""

from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sail_jax import linalg
from sail_jax.deprecated import renamed
from theory.deep_linear.overlaps import Overlaps, bordered
from theory.problems import defined


@renamed("n", "d", "draws", until="0.4")
@defined
def overlaps_law(key: Array, *, n: int, d: int, draws: int) -> Overlaps:
    """Draws exact samples of the overlaps of n Gaussian samples in d dimensions.

    The Gram matrix has its exact joint law, so scratch and fine-tuning risks may be compared draw
    by draw. `source` has its exact law too, but is drawn independently of `gram`. Do not combine
    the two.

    Args:
      key: Random key.
      n: Number of samples, at least 1.
      d: Dimension, at least 2.
      draws: Number of independent draws, at least 1.

    Returns:
      Overlaps with a leading axis `draws`.

    Raises:
      ValueError: If n < 1, d < 2 or draws < 1.
    """
    if n < 1 or d < 2 or draws < 1:
        raise ValueError(f"need n >= 1, d >= 2, draws >= 1; got n={n}, d={d}, draws={draws}")
    key_seen, key_unseen, key_noise, key_angle, key_source = jax.random.split(key, 5)
    frames = None
    if n < d:
        frames = _bartlett(key_seen, n, draws), _bartlett(key_unseen, d - n, draws)
    top, bottom = jax.random.split(key_noise)
    noise = _chi2(top, min(n, d), draws), _chi2(bottom, abs(n - d) + 1, draws)
    plane = jax.random.normal(key_angle, (draws, 2))
    # With one sample the row space is a line: P beta_s and P nu are parallel.
    if n == 1:
        plane = plane.at[:, 1].set(0.0)
    rest = _chi2(jax.random.fold_in(key_angle, 1), max(min(n, d) - 2, 0), draws)
    first, second = jax.random.split(key_source)
    pair = _chi2(first, n, draws), jax.random.normal(second, (draws, 2))
    return _overlaps(frames, noise, plane, rest, pair, jnp.asarray(n))


@jax.jit
def _overlaps(frames, noise, plane: Array, rest: Array, pair, n: Array) -> Overlaps:
    """Assembles overlaps from independent draws of chi-squares and normals."""
    if frames is not None:
        # An orthonormal 2-frame in R^d is a Gaussian frame times the inverse root of its Gram
        # matrix; by rotation invariance P keeps its first n rows.
        seen, unseen = (_wishart(*frame) for frame in frames)
        root = linalg.cholesky(seen + unseen)
        # R^-1 S R^-T with R R^T = S + S': the matrix-variate Beta, in two triangular solves.
        half = linalg.solve_triangular(root, seen, lower=True)
        projector = linalg.solve_triangular(root, half.mT, lower=True)
    else:
        projector = jnp.broadcast_to(jnp.eye(2), (len(plane), 2, 2))
    size2 = noise[0] / noise[1]
    # The direction of X^+ noise is uniform in the row space, of dimension min(n, d): its inner
    # products with P beta_s and P nu are two coordinates of a uniform direction.
    plane = plane * jnp.sqrt(size2 / (jnp.sum(plane**2, -1) + rest))[:, None]
    # The Cholesky factor of P restricted to the plane gives an orthonormal frame of the row space,
    # in which P beta_s has the coordinates (a, 0) and P nu (b, c).
    a = jnp.sqrt(projector[:, 0, 0])
    b = projector[:, 0, 1] / a
    c = jnp.sqrt(jnp.maximum(projector[:, 1, 1] - b**2, 0.0))
    cross = jnp.stack([a * plane[:, 0], b * plane[:, 0] + c * plane[:, 1]], -1)
    gram = bordered(projector, cross, size2)
    uu, normal = pair
    source = jnp.concatenate([uu[:, None], jnp.sqrt(uu)[:, None] * normal], -1)
    return Overlaps(gram, source, n)


def _chi2(key: Array, degrees: int, draws: int) -> Float[Array, " draws"]:
    """Draws chi-squares; with 0 degrees of freedom they are 0."""
    if degrees == 0:
        return jnp.zeros(draws)
    return cast(Array, jax.random.chisquare(key, degrees, (draws,)))


def _bartlett(key: Array, degrees: int, draws: int) -> tuple[Array, Array, Array]:
    """Draws a triangular root of `_wishart`: the squared diagonal and the other entry."""
    first, second, off = jax.random.split(key, 3)
    diagonal = _chi2(first, degrees, draws), _chi2(second, degrees - 1, draws)
    return *diagonal, jax.random.normal(off, (draws,))


def _wishart(a2: Array, c2: Array, b: Array) -> Float[Array, "draws 2 2"]:
    """Returns G^T G for a Gaussian G `(degrees, 2)`, by Bartlett's decomposition."""
    a = jnp.sqrt(a2)
    return jnp.stack([jnp.stack([a * a, a * b], -1), jnp.stack([a * b, b * b + c2], -1)], -2)
