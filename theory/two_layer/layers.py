"""Weights, loss and invariants of two-layer linear networks, with the conventions.

The map is theta = W_1 W_2 and the loss is |W_1 W_2 - A|_F^2, without a factor 1/2 (Springer et al.
2025, arXiv 2503.19206, eqs. 1 and 4). Gradient flow runs at unit rate: dW_1/dt = -2 (theta - A)
W_2^T, dW_2/dt = -2 W_1^T (theta - A). Shapes are W_1 `(o, h)`, W_2 `(h, i)`, A `(o, i)`. Singular
values are called sigma. gamma is the standard deviation of the noise on the weights, and e^{-tau}
the scale of the initialisation. The strength lambda of the anchor |theta - theta(0)|_F^2 is called
`anchor` in code.

(W_1 R, R^T W_2) is the same network for every rotation R of the hidden space. All functions of this
module are invariant under R, except `imbalance`, which becomes R^T (...) R.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from sail_jax.checks import concrete
from theory import problems


class Layers(NamedTuple):
    """The two weight matrices of a network; leading axes (times, draws) are allowed.

    Attributes:
      w1: Second layer W_1 `(..., o, h)`, applied last.
      w2: First layer W_2 `(..., h, i)`.
    """

    w1: Float[Array, "*b o h"]
    w2: Float[Array, "*b h i"]


@problems.defined
def theta(layers: Layers) -> Float[Array, "*b o i"]:
    """Computes the map W_1 W_2 of a network.

    Args:
      layers: The weights.

    Returns:
      The map `(..., o, i)`.

    >>> theta(Layers(jnp.array([[2.0]]), jnp.array([[3.0]]))).tolist()
    [[6.0]]
    """
    return layers.w1 @ layers.w2


@problems.defined
def loss(layers: Layers, target: Float[ArrayLike, "o i"]) -> Float[Array, "*b"]:
    """Computes the loss |W_1 W_2 - A|_F^2.

    Args:
      layers: The weights.
      target: Target map A `(o, i)`.

    Returns:
      The losses, one per network.

    >>> float(loss(Layers(jnp.array([[2.0]]), jnp.array([[3.0]])), jnp.array([[4.0]])))
    4.0
    """
    return jnp.sum((theta(layers) - target) ** 2, axis=(-2, -1))


@problems.defined
def size(layers: Layers) -> Float[Array, "*b"]:
    """Computes the squared norm of all weights, |W_1|_F^2 + |W_2|_F^2.

    Args:
      layers: The weights.

    Returns:
      The squared norms, one per network.

    >>> float(size(Layers(jnp.array([[2.0]]), jnp.array([[3.0]]))))
    13.0
    """
    return jnp.sum(layers.w1**2, axis=(-2, -1)) + jnp.sum(layers.w2**2, axis=(-2, -1))


@problems.defined
def grams(layers: Layers) -> tuple[Float[Array, "*b o o"], Float[Array, "*b i i"]]:
    """Computes the two Gram matrices W_1 W_1^T and W_2^T W_2.

    Together with theta, they determine its motion:

        d theta/dt = -2 (W_1 W_1^T (theta - A) + (theta - A) W_2^T W_2)

    Args:
      layers: The weights.

    Returns:
      W_1 W_1^T `(..., o, o)` and W_2^T W_2 `(..., i, i)`.

    >>> [gram.tolist() for gram in grams(Layers(jnp.array([[2.0]]), jnp.array([[3.0]])))]
    [[[4.0]], [[9.0]]]
    """
    return layers.w1 @ layers.w1.mT, layers.w2.mT @ layers.w2


@problems.defined
def tangent_kernel(
    layers: Layers, x: Float[Array, "n i"], y: Float[ArrayLike, "m i"]
) -> Float[Array, "*b n m o o"]:
    """Computes the neural tangent kernel of f(x) = W_1 W_2 x.

        (x.y) W_1 W_1^T + (x^T W_2^T W_2 y) I

    Args:
      layers: The weights.
      x: Inputs `(n, i)`.
      y: Other inputs `(m, i)`.

    Returns:
      The kernel between all pairs of inputs and outputs, `(..., n, m, o, o)`.

    >>> one = jnp.ones((1, 1))
    >>> float(tangent_kernel(Layers(2 * one, 3 * one), one, one)[0, 0, 0, 0])
    13.0
    """
    left, right = grams(layers)
    first = jnp.einsum("ni,mi,...op->...nmop", x, y, left)
    second = jnp.einsum("ni,...ij,mj->...nm", x, right, y)
    return first + second[..., None, None] * jnp.eye(left.shape[-1], dtype=left.dtype)


@problems.defined
def imbalance(layers: Layers) -> Float[Array, "*b h h"]:
    """Computes W_1^T W_1 - W_2 W_2^T, which gradient flow conserves.

    Args:
      layers: The weights.

    Returns:
      The imbalance `(..., h, h)`.

    >>> imbalance(Layers(jnp.array([[2.0]]), jnp.array([[3.0]]))).tolist()
    [[-5.0]]
    """
    return layers.w1.mT @ layers.w1 - layers.w2 @ layers.w2.mT


@problems.defined
def identity_start(d: int, tau: ArrayLike) -> Layers:
    """Returns the initial weights W_1 = W_2 = e^{-tau} I.

    Args:
      d: Width of the square layers.
      tau: Negative logarithm of the scale, a scalar > -inf.

    Returns:
      The weights.

    Raises:
      ValueError: If tau is -inf or NaN.

    References:
      Springer et al., 2025 (arXiv 2503.19206), before Theorem A.1.

    >>> identity_start(1, 0.0).w1.tolist()
    [[1.0]]
    """
    problems.check("tau", tau, lambda t: t > -np.inf, "a number > -inf")
    scale = jnp.exp(-jnp.asarray(tau, dtype=float)) * jnp.eye(d)
    return Layers(scale, scale)


@problems.defined
def balanced_start(
    key: Array, shape: tuple[int, int, int], balance: float = 0.0, scale: ArrayLike = 1.0
) -> Layers:
    """Draws a lambda-balanced start for layers of any widths, W_1^T W_1 - W_2 W_2^T = lambda I.

    The singular vectors of both layers are uniform. With g the absolute values of min(o, h, i)
    standard normal numbers and zeros after them, the singular values are

        sqrt((scale g)^2 + max(lambda, 0)) of W_1,   sqrt((scale g)^2 + max(-lambda, 0)) of W_2.

    A positive lambda requires h <= o and a negative one h <= i, because the larger layer then has
    full rank h.

    Args:
      key: Random key.
      shape: Widths (o, h, i).
      balance: The imbalance lambda.
      scale: Size of the singular values of the smaller layer, >= 0.

    Returns:
      W_1 `(o, h)` and W_2 `(h, i)`.

    Raises:
      ValueError: If a number is out of range, or the hidden layer is too wide for lambda.

    References:
      Domine et al., From Lazy to Rich: Exact Learning Dynamics in Deep Linear Networks, 2024 (arXiv
      2409.14623). Their W_2 is applied last, so lambda has the same sign.

    >>> start = balanced_start(jax.random.key(0), (5, 2, 3), balance=0.5)
    >>> [[round(float(x), 3) + 0.0 for x in row] for row in imbalance(start)]
    [[0.5, 0.0], [0.0, 0.5]]
    """
    o, h, i = shape
    problems.check("shape", shape, lambda n: n >= 1, "widths >= 1")
    problems.check_squares("balance", balance)
    problems.check("scale", scale, lambda s: (s >= 0) & (s < np.inf), "finite and >= 0")
    widest = o if balance > 0 else i if balance < 0 else h
    problems.check("h", h, lambda h: h <= widest, f"at most {widest} where lambda is {balance:g}")
    drawn, *keys = jax.random.split(key, 4)
    left, middle, right = (linalg.orthogonal(k, n) for k, n in zip(keys, shape, strict=True))
    few = min(shape)
    small = jnp.zeros(h).at[:few].set(scale * jnp.abs(jax.random.normal(drawn, (few,))))

    def layer(size: Array, rows: Array, columns: Array) -> Array:
        n = min(rows.shape[0], columns.shape[0])
        return (rows[:, :n] * size[:n]) @ columns[:, :n].T

    w1, w2 = (jnp.sqrt(small**2 + max(c, 0.0)) for c in (balance, -balance))
    return Layers(layer(w1, left, middle), layer(w2, middle, right))


@problems.defined
def ideal(target: Float[ArrayLike, "o i"], rank: int) -> Layers:
    """Returns the balanced network that has learned only the first n singular directions.

    W_1 = U (Sigma^n)^{1/2} and W_2 = (Sigma^n)^{1/2} V^T, with the singular values after the n-th
    set to 0. The hidden width is min(o, i).

    Args:
      target: Target map A = U Sigma V^T, `(o, i)`.
      rank: Number n of learned directions, from 0 to min(o, i).

    Returns:
      W_1 `(o, min(o, i))` and W_2 `(min(o, i), i)`.

    Raises:
      ValueError: If `rank` is out of range.

    References:
      Springer et al., 2025 (arXiv 2503.19206), eqs. (7), (8).

    >>> one_mode = theta(ideal(jnp.diag(jnp.array([3.0, 1.0])), 1))
    >>> [[round(abs(float(y)), 3) for y in row] for row in one_mode]
    [[3.0, 0.0], [0.0, 0.0]]
    """
    top = min(jnp.shape(target))
    problems.check("rank", rank, lambda n: (n >= 0) & (n <= top), f"a rank in 0..{top}")
    return _ideal(target, rank)


@jax.jit
def _ideal(target: Array, rank: ArrayLike) -> Layers:
    u, s, vt = linalg.svd(target, full_matrices=False)
    # A mask instead of a slice, so that shapes and compiled programs do not depend on the rank.
    root = jnp.sqrt(s) * (jnp.arange(s.size) < rank)
    return Layers(u * root, root[:, None] * vt)


@problems.defined
def thin(layers: Layers, rank: int) -> Layers:
    """Rewrites a network of a given rank on as few hidden units, with the same theta and Grams.

    Gradient flow conserves the rank, but in floating point only the width enforces it. Otherwise,
    missing modes grow from rounding errors as eps e^{2 sigma t}.

    Args:
      layers: Weights W_1 `(o, h)` and W_2 `(h, i)`.
      rank: Rank of the network, which becomes the hidden width.

    Returns:
      W_1 `(o, rank)` and W_2 `(rank, i)`.

    Raises:
      ValueError: If `rank` is out of range, or more than rounding would be lost.

    >>> thin(Layers(jnp.eye(2).at[1, 1].set(0.0), jnp.eye(2).at[1, 1].set(0.0)), 1).w1.shape
    (2, 1)
    """
    o = layers.w1.shape[0]
    # Q = [W_1; W_2^T] and U diag(s) have the same Q Q^T, which contains theta and both Grams.
    u, s, _ = linalg.svd(jnp.concatenate([layers.w1, layers.w2.T]), full_matrices=False)
    problems.check("rank", rank, lambda n: (n >= 1) & (n <= s.size), f"a rank in 1..{s.size}")
    q = u[:, :rank] * s[:rank]
    lost, allowed = concrete(s[rank:]), 1e3 * jnp.finfo(s.dtype).eps * s[0]
    if lost is not None and (lost > allowed).any():
        raise ValueError(f"rank is at least {rank + 1}: singular value {lost[0]:g} is left out")
    return Layers(q[:o], q[o:].T)


def check_shapes(layers: Layers, target: ArrayLike) -> None:
    """Raises an error unless weights and target conform and are finite.

    Args:
      layers: Weights, which must be W_1 `(o, h)` and W_2 `(h, i)`.
      target: Target map, which must be `(o, i)`.

    Raises:
      ValueError: If shapes do not conform, an axis is empty or a value is not finite.
    """
    w1, w2, a = jnp.shape(layers.w1), jnp.shape(layers.w2), jnp.shape(target)
    if len(w1) != 2 or len(w2) != 2 or w1[1] != w2[0] or a != (w1[0], w2[1]) or 0 in (*w1, *a):
        raise ValueError(f"expected W_1 [o h], W_2 [h i] and target [o i]; got {w1}, {w2} and {a}")
    for name, value in (("w1", layers.w1), ("w2", layers.w2), ("target", target)):
        problems.check_squares(name, value)


def check_spectrum(name: str, value: ArrayLike | Sequence[float]) -> np.ndarray:
    """Checks singular values and returns them as a NumPy array.

    Args:
      name: The argument's name, for the message.
      value: Values that must be `(n,)`, finite, >= 0 and descending.

    Returns:
      The values.

    Raises:
      ValueError: If they are anything else.
    """
    values = np.asarray(value)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"{name} must be a vector of singular values; got shape {values.shape}")
    problems.check(name, values, lambda s: (s >= 0) & (s < np.inf), "finite and >= 0")
    problems.check(f"-diff({name})", -np.diff(values), lambda s: s >= 0, ">= 0: sorted downwards")
    return values


def check_balanced(layers: Layers) -> None:
    """Raises an error unless W_1^T W_1 - W_2 W_2^T is a multiple of I, up to rounding.

    The tolerance is 1000 eps (|W_1|^2 + |W_2|^2). Traced weights are not checked.

    Args:
      layers: Weights W_1 `(o, h)` and W_2 `(h, i)`.

    Raises:
      ValueError: If an entry deviates by more.
    """
    matrix = concrete(imbalance(layers))
    if matrix is not None:
        mean = matrix.trace() / matrix.shape[0]
        gap = abs(matrix - mean * np.eye(matrix.shape[0])).max()
        if not gap <= 1e3 * np.finfo(matrix.dtype).eps * size(layers):
            raise ValueError(
                "the exact flow needs W_1^T W_1 - W_2 W_2^T = c I at the start; the largest entry "
                f"off c I is {gap:g} (networks.gradient_flow integrates any start)"
            )
