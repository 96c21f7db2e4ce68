"""Simulates a whole phase diagram from one factorisation per data set.

The data sets are nested: n samples are the first n rows of X. Let X_d = L Q with L lower
triangular, from one QR factorisation. The first n rows of B = L^{-1} [X beta_s, X nu, noise] are
X_n^+ [...] in the basis of Q's rows. The Gram matrices of all n <= d are therefore cumulative sums
of 3 x 3 outer products. For n > d only the noise matters: X^T X grows block by block, with one
Cholesky factorisation per requested n. Additional angles, noise levels and depths are free (see
`overlaps`).

Draws are independent. They share their data along load, theta, sigma and depth, so neighbouring
points of a curve are correlated.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sail_jax import linalg
from theory.deep_linear.overlaps import Overlaps, bordered
from theory.problems import defined


@defined
def simulate_overlaps(keys: Array, ns: Sequence[int], d: int) -> Overlaps:
    """Simulates Gaussian data sets and computes their overlaps at several numbers of samples.

    The result is in float64 regardless of the caller's precision, because the Gram matrix squares
    the condition number, which is large near n = d. A draw depends on its own key and on max(ns)
    alone.

    Args:
      keys: One typed random key per draw, `jax.random.split(key, draws)`.
      ns: Numbers of samples, integers >= 1, in any order.
      d: Dimension, at least 2.

    Returns:
      Overlaps with leading axes `(keys, ns)`, in the order given.

    Raises:
      ValueError: If `ns` is empty or contains anything but integers >= 1, d < 2, or `keys` is not a
        vector of typed keys.
    """
    counts = np.asarray(ns)
    if counts.ndim != 1 or counts.size == 0 or counts.dtype.kind not in "iu" or (counts < 1).any():
        raise ValueError(f"ns must be a non-empty list of integers >= 1; got {ns}")
    if d < 2:
        raise ValueError(f"d must be at least 2 (source and target span a plane); got {d}")
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.ndim != 1 or keys.size == 0:
        raise ValueError(
            "keys must be an array of one typed key per draw, jax.random.split(key, draws); "
            f"got {keys.dtype} of shape {keys.shape}"
        )
    order = np.argsort(counts, kind="stable")
    with jax.enable_x64(True):
        ordered = _simulate(keys, tuple(int(n) for n in counts[order]), d)
        if (order == np.arange(order.size)).all():
            return Overlaps(ordered.gram, ordered.source, jnp.asarray(counts))
        # The simulation takes ascending n. This restores the caller's order.
        back = np.argsort(order, kind="stable")
        return Overlaps(ordered.gram[:, back], ordered.source[:, back], jnp.asarray(counts))


@partial(jax.jit, static_argnums=(1, 2))
def _simulate(keys: Array, ns: tuple[int, ...], d: int) -> Overlaps:
    def overlaps(key: Array) -> Overlaps:
        key_x, key_noise = jax.random.split(key)
        # The largest n determines the shape of the random arrays, and so every number in them.
        x, noise = jax.random.normal(key_x, (ns[-1], d)), jax.random.normal(key_noise, (ns[-1],))
        return nested_overlaps(x, noise, jnp.eye(d, 2), ns)

    # One data set after another, because all at once would keep every X in memory.
    return jax.lax.map(overlaps, keys)


@defined
def nested_overlaps(
    x: Float[Array, "m d"],
    noise: Float[Array, " m"],
    tasks: Float[Array, "d 2"],
    ns: Sequence[int],
) -> Overlaps:
    """Computes the overlaps of the first n rows of given data, for several n.

    The first min(n, d) rows of x must be linearly independent. In float32, expect errors of order
    eps cond(x)^2 near n = d.

    Args:
      x: Inputs `(m, d)`, m >= max(ns).
      noise: Unit noise of the labels, `(m,)`.
      tasks: Orthonormal columns (beta_s, nu), `(d, 2)`.
      ns: Numbers of samples, ascending.

    Returns:
      Overlaps with a leading axis `ns`.
    """
    d = x.shape[1]
    below = np.array([n for n in ns if n <= d], dtype=int)
    above = np.array([n for n in ns if n > d], dtype=int)
    # [X beta_s, X nu, noise]: three columns of m rows each.
    images = jnp.concatenate([x @ tasks, noise[:, None]], axis=-1)
    source = jnp.cumsum(images[:, :1] * images, axis=0)[np.asarray(ns) - 1]
    grams = []
    if below.size:
        rows = below.max()
        # X = L Q by the QR factorisation of X^T. Signs on the diagonal of L cancel in outer
        # products.
        root = linalg.qr(x[:rows].T, mode="r").T
        b = linalg.solve_triangular(root, images[:rows], lower=True)
        # Row n of L^-1 depends on the first n rows of L alone, so the sum of the first n outer
        # products is the Gram matrix of the first n samples.
        grams.append(jnp.cumsum(b[:, :, None] * b[:, None, :], axis=0)[below - 1])
    if above.size:
        fits = _noise_fits(x, noise, above)
        # Above n = d the data determine everything: X^+ X is the identity, and only the noise is
        # fitted.
        seen = jnp.broadcast_to(jnp.eye(2, dtype=x.dtype), (above.size, 2, 2))
        grams.append(bordered(seen, fits @ tasks, jnp.sum(fits**2, axis=-1)))
    return Overlaps(jnp.concatenate(grams), source, jnp.asarray(ns))


def _noise_fits(x: Array, noise: Array, ns: np.ndarray) -> Float[Array, "ns d"]:
    """Computes X_n^+ noise for ascending n > d, from one growing Gram matrix."""
    # Every step adds the rows between two requested n, padded to one shape and masked.
    offsets = np.arange(np.diff(ns).max(initial=0))
    rows = ns[:-1, None] + offsets
    used = jnp.asarray(rows < ns[1:, None])
    rows = jnp.asarray(np.minimum(rows, ns[-1] - 1))

    def fit(moment: Array, image: Array) -> Array:
        return linalg.cho_solve(linalg.cholesky(moment), image)

    def step(state: tuple[Array, Array], block: tuple[Array, Array]):
        moment, image = state
        index, mask = block
        new = jnp.where(mask[:, None], x[index], 0.0)
        moment, image = moment + new.T @ new, image + noise[index] @ new
        return (moment, image), fit(moment, image)

    head = x[: ns[0]]
    start = head.T @ head, noise[: ns[0]] @ head
    _, later = jax.lax.scan(step, start, (rows, used))
    return jnp.concatenate([fit(*start)[None], later])
