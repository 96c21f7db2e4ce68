"""Two-layer linear networks, and every convention of this room.

theta = W_1 W_2, the loss is |W_1 W_2 - A|_F^2 (no factor 1/2; overtrained eqs. 1, 4), gradient flow
runs at unit rate: dW_1/dt = -2 (theta - A) W_2^T, dW_2/dt = -2 W_1^T (theta - A). Shapes:
W_1 [o h], W_2 [h i], A [o i]. Singular values are called sigma, noise and initialisation scales
gamma and e^{-tau}, the strength of the anchor |theta - theta(0)|_F^2 lambda ("anchor" in code).

The hidden space has no preferred axes: (W_1 R, R^T W_2) is the same network for every rotation R.
All that this file computes is invariant under R.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax.checks import concrete
from theory import problems


class Layers(NamedTuple):
    """The two weight matrices; leading axes (times, draws) are allowed."""

    w1: Float[Array, "*b o h"]
    w2: Float[Array, "*b h i"]


def theta(layers: Layers) -> Float[Array, "*b o i"]:
    """The network map W_1 W_2."""
    return layers.w1 @ layers.w2


def loss(layers: Layers, target: Float[ArrayLike, "o i"]) -> Float[Array, "*b"]:
    """|W_1 W_2 - A|_F^2."""
    return jnp.sum((theta(layers) - target) ** 2, axis=(-2, -1))


def size(layers: Layers) -> Float[Array, "*b"]:
    """|W_1|_F^2 + |W_2|_F^2."""
    return jnp.sum(layers.w1**2, axis=(-2, -1)) + jnp.sum(layers.w2**2, axis=(-2, -1))


def grams(layers: Layers) -> tuple[Float[Array, "*b o o"], Float[Array, "*b i i"]]:
    """W_1 W_1^T and W_2^T W_2. d theta/dt = -2 (W_1 W_1^T (theta - A) + (theta - A) W_2^T W_2)."""
    return layers.w1 @ layers.w1.mT, layers.w2.mT @ layers.w2


def tangent_kernel(
    layers: Layers, x: Float[Array, "n i"], y: Float[ArrayLike, "m i"]
) -> Float[Array, "*b n m o o"]:
    """Neural tangent kernel of f(x) = W_1 W_2 x: (x.y) W_1 W_1^T + (x^T W_2^T W_2 y) I."""
    left, right = grams(layers)
    first = jnp.einsum("ni,mi,...op->...nmop", x, y, left)
    second = jnp.einsum("ni,...ij,mj->...nm", x, right, y)
    return first + second[..., None, None] * jnp.eye(left.shape[-1], dtype=left.dtype)


def imbalance(layers: Layers) -> Float[Array, "*b h h"]:
    """W_1^T W_1 - W_2 W_2^T, which gradient flow conserves."""
    return layers.w1.mT @ layers.w1 - layers.w2 @ layers.w2.mT


def identity_start(d: int, tau: ArrayLike) -> Layers:
    """W_1 = W_2 = e^{-tau} I (overtrained, before Theorem A.1)."""
    problems.check("tau", tau, lambda t: t > -np.inf, "a number > -inf")
    scale = jnp.exp(-jnp.asarray(tau, dtype=float)) * jnp.eye(d)
    return Layers(scale, scale)


def ideal(target: Float[ArrayLike, "o i"], rank: int) -> Layers:
    """U (Sigma^n)^{1/2} and (Sigma^n)^{1/2} V^T: the first n singular directions learned, no others
    (overtrained eqs. 7, 8). The hidden width is min(o, i)."""
    top = min(jnp.shape(target))
    problems.check("rank", rank, lambda n: (n >= 0) & (n <= top), f"a rank in 0..{top}")
    return _ideal(target, rank)


@jax.jit
def _ideal(target: Array, rank: ArrayLike) -> Layers:
    u, s, vt = jnp.linalg.svd(target, full_matrices=False)
    root = jnp.sqrt(s) * (jnp.arange(s.size) < rank)
    return Layers(u * root, root[:, None] * vt)


def thin(layers: Layers, rank: int) -> Layers:
    """The same network (theta, both Grams) on `rank` hidden units, for one of that rank.

    The flow conserves rank, but rounding does so only where width enforces it: otherwise modes that
    the start lacks grow as eps e^{2 sigma t}. Raises ValueError if more than rounding is lost.
    """
    o = layers.w1.shape[0]
    u, s, _ = jnp.linalg.svd(jnp.concatenate([layers.w1, layers.w2.T]), full_matrices=False)
    problems.check("rank", rank, lambda n: (n >= 1) & (n <= s.size), f"a rank in 1..{s.size}")
    q = u[:, :rank] * s[:rank]
    lost, allowed = concrete(s[rank:]), 1e3 * jnp.finfo(s.dtype).eps * s[0]
    if lost is not None and (lost > allowed).any():
        raise ValueError(f"rank is at least {rank + 1}: singular value {lost[0]:g} is left out")
    return Layers(q[:o], q[o:].T)


def check_shapes(layers: Layers, target: ArrayLike) -> None:
    """Raise ValueError unless W_1 [o h], W_2 [h i] and A [o i] fit and are finite."""
    w1, w2, a = jnp.shape(layers.w1), jnp.shape(layers.w2), jnp.shape(target)
    if len(w1) != 2 or len(w2) != 2 or w1[1] != w2[0] or a != (w1[0], w2[1]) or 0 in (*w1, *a):
        raise ValueError(f"expected W_1 [o h], W_2 [h i] and target [o i]; got {w1}, {w2} and {a}")
    for name, value in (("w1", layers.w1), ("w2", layers.w2), ("target", target)):
        problems.check(name, value, np.isfinite, "finite")


def check_spectrum(name: str, value: ArrayLike | Sequence[float]) -> np.ndarray:
    """The values, or ValueError unless they are finite, >= 0 and descending."""
    values = np.asarray(value)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"{name} must be a vector of singular values; got shape {values.shape}")
    problems.check(name, values, lambda s: (s >= 0) & (s < np.inf), "finite and >= 0")
    problems.check(f"-diff({name})", -np.diff(values), lambda s: s >= 0, ">= 0: sorted downwards")
    return values


def check_balanced(layers: Layers) -> None:
    """Raise ValueError unless W_1^T W_1 - W_2 W_2^T is a multiple of I, up to rounding: 1000 eps
    (|W_1|^2 + |W_2|^2)."""
    matrix = concrete(imbalance(layers))
    if matrix is not None:
        mean = matrix.trace() / matrix.shape[0]
        gap = abs(matrix - mean * np.eye(matrix.shape[0])).max()
        if not gap <= 1e3 * np.finfo(matrix.dtype).eps * size(layers):
            raise ValueError(
                "the exact flow needs W_1^T W_1 - W_2 W_2^T = c I at the start; the largest entry "
                f"off c I is {gap:g} (networks.gradient_flow integrates any start)"
            )
