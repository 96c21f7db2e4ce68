"""Solves adapters from the usual start, B = 0 and a random A, on one layer or on every layer.

Adapters are those of `low_rank`, with its loss and time. Gradient flow of B and A conserves
B^T B - A A^T, which is -A A^T at the start B = 0. It is exactly solvable if this matrix is -c I,
thus if the rows of A are orthogonal with the squared norm c. A Gaussian A has such rows up to
errors of order sqrt(r / i). `learned` solves one direction of such an adapter. `equivalent` returns
the c and the overlap for which `learned` describes any other A approximately, and `reduced`
describes every A exactly by fewer numbers.

One direction. The residual is rho u v^T, and q = |A v|^2 / c is the part of v in the rows of A.
B stays in the direction A v of the hidden space. The adapter therefore has one hidden unit, and the
state of this unit is Q = (b, p, a), where p is along v and a across v. It obeys

    dQ/dt = F Q - |Q|^2 Q,   F = [[-c, 2 rho, 0], [2 rho, c, 0], [0, 0, c]].

Hence Q(t) = e^{Ft} Q(0) / sqrt(N). The conserved p^2 + a^2 - b^2 = c determines N, and z = b p.

Adapters on every layer. Let a mode have the frozen weights w_l, one for each layer, and adapters
from b_l = 0 and a_l. Then x_l = w_l + s b_l a_l, and y is the product of all x_l. With
kappa_l = s a_l(0)^2 there are angles with

    x_l = w_l + kappa_l/2 sinh(2 angle_l),   d angle_l/dt = 2 s (y / x_l) (f - y),

because b_l + a_l grows by the factor e^{angle_l} and b_l - a_l shrinks by it. So x_l d angle_l is
the same for every layer l, and all layers have one common integral

    h = w_l angle_l + kappa_l/2 sinh^2(angle_l),   dh/dt = 2 s y (f - y).

A mode of any depth is thus described by one number h, from h = 0.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from theory import problems
from theory.two_layer.layers import Layers, check_shapes

Layerwise = Sequence[float] | Float[ArrayLike, " layers"]

# Bisections, enough for float64.
HALVINGS = 64
# The panels of the integral over h halve towards its ends. A weight may be small at the first end,
# and f - y at the last.
PANELS, NODES = 40, 12


@problems.in_float64
def learned(
    time: ArrayLike,
    residual: ArrayLike,
    scale: ArrayLike = 1.0,
    *,
    row: ArrayLike,
    overlap: ArrayLike,
) -> Array:
    """Computes how much of one direction an adapter on the map has learned from B = 0.

    The residual is rho u v^T, and the rows of A are orthogonal with the squared norm c. With q the
    overlap, c' = s c, R = sqrt(c'^2 + 4 rho^2), S = sinh(R s t) / R and C = cosh(R s t),

        z = 2 c' q rho S (C + c' S) / (q ((C + c' S)^2 - 4 rho^2 S^2) + (1 - q) e^{2 c' s t}).

    At first only B learns, with A fixed, and z approaches q rho if c' is large. Then the rows of A
    rotate towards v, and z grows as e^{2 s (R - c') t}.

    Args:
      time: Times >= 0, finite.
      residual: rho, of either sign.
      scale: The scale s > 0.
      row: Squared norm c > 0 of each row of A at the start.
      overlap: Squared norm q of the projection of v on the rows of A, in [0, 1].

    Returns:
      z = s u^T B A v, with the broadcast shape of the arguments. It ends at rho unless q is 0.

    Raises:
      ValueError: If an argument is out of range.

    >>> [round(float(learned(t, 1.0, row=1.0, overlap=0.1)), 3) for t in (0.0, 1.0, 3.0, 9.0)]
    [0.0, 0.294, 0.984, 1.0]
    """
    time, rho, scale, row, q = (
        jnp.asarray(x, float) for x in (time, residual, scale, row, overlap)
    )
    problems.check("time", time, lambda t: (t >= 0) & (t < np.inf), "finite and >= 0")
    problems.check_squares("residual", rho)
    for name, value in (("scale", scale), ("row", row)):
        problems.check(name, value, lambda x: x > 0, "positive")
        problems.check_squares(name, value)
    problems.check("overlap", q, lambda q: (q >= 0) & (q <= 1), "in [0, 1]")
    sign, rho, c, time = jnp.sign(rho), abs(rho), scale * row, scale * time
    root = jnp.hypot(c, 2 * rho)
    # Everything is divided by e^{R t}, or by e^{2 R t} where it is a product of two.
    left = jnp.exp(-2 * root * time)
    sinh, cosh = -jnp.expm1(-2 * root * time) / 2, (1 + left) / 2
    fast, bent = c / root, 2 * rho / root
    low = fast * c / (root + 2 * rho)  # 1 - bent, without the cancellation
    short = (low + (1 + bent) * left) / 2 + fast * sinh  # cosh + fast sinh - bent sinh
    high = cosh + (fast + bent) * sinh
    waiting = (1 - q) * jnp.exp(-8 * rho * (rho / (root + c)) * time)
    nothing = q == 0
    grown = c * bent * sinh * (cosh + fast * sinh)
    return sign * jnp.where(
        nothing, 0.0, q * grown / jnp.where(nothing, 1.0, q * short * high + waiting)
    )


@problems.defined
def equivalent(
    a: Float[ArrayLike, "*b r i"], direction: Float[ArrayLike, " i"]
) -> tuple[Float[Array, "*b"], Float[Array, "*b"]]:
    """Computes the row and the overlap for which `learned` describes any A approximately.

        row = |A^T p|^2 / |p|^2,   overlap = |p|^2 / row,   where p = A v

    `learned` with these numbers has the first two terms of the growth of B in t. It is exact if the
    rank is 1, or if the rows of A are orthogonal and of equal norm. For independent normal entries
    of variance a^2, the overlap is distributed as Beta(r/2, (i - 1)/2) with the mean r/(r + i - 1),
    and row / a^2 as chi-squared with r + i - 1 degrees of freedom.

    Args:
      a: A at the start, `(..., r, i)`.
      direction: The direction v `(i,)` of the residual, a unit vector with A v != 0.

    Returns:
      The row and the overlap, each with the leading shape of A.

    >>> found = equivalent(jnp.array([[0.6, 0.8]]), jnp.array([1.0, 0.0]))
    >>> [round(float(x), 3) for x in found]
    [1.0, 0.36]
    """
    a, v = jnp.asarray(a, float), jnp.asarray(direction, float)
    p = a @ v
    seen = jnp.sum(p**2, -1)
    row = jnp.sum(jnp.einsum("...ri,...r->...i", a, p) ** 2, -1) / seen
    return row, jnp.minimum(seen / row, 1.0)  # 1 at most, but for rounding


@problems.defined
def reduced(
    start: Layers, residual: Float[ArrayLike, "o i"]
) -> tuple[Layers, Float[Array, "k m"], Float[Array, "o k"], Float[Array, "m i"]]:
    """Rewrites an adapter and its target in the few directions in which they can move.

    The gradient keeps the columns of B in the span of those of B and the residual, and the rows of
    A in the span of those of A and the residual. Both spans have at most rank(residual) + r
    dimensions. The flow in their bases is exact, for every A and at every width o and i.

    Args:
      start: B `(o, r)` and A `(r, i)` at the start.
      residual: A_ft - theta of the frozen network `(o, i)`. It must not be traced.

    Returns:
      B `(k, r)` and A `(r, m)`, the residual `(k, m)`, and the orthonormal bases L `(o, k)` and
      R `(m, i)`. The residual is L (k, m) R, and the adapter is L B and A R at every time.

    Raises:
      ValueError: If shapes do not conform or a value is not finite.

    >>> one = jnp.zeros((9, 9)).at[0, 0].set(1.0)
    >>> [w.shape for w in reduced(Layers(jnp.zeros((9, 1)), jnp.ones((1, 9))), one)[0]]
    [(2, 1), (1, 2)]
    """
    check_shapes(start, residual)
    residual = jnp.asarray(residual, float)
    u, size, vt = linalg.svd(residual, full_matrices=False)
    rank = int(jnp.sum(size > 10 * max(residual.shape) * jnp.finfo(size.dtype).eps * size[0]))
    left, _ = linalg.qr(jnp.concatenate([u[:, :rank], start.w1], 1))
    right, _ = linalg.qr(jnp.concatenate([vt[:rank].T, start.w2.T], 1))
    small = Layers(left.T @ start.w1, start.w2 @ right)
    return small, left.T @ residual @ right, left, right.T


@problems.in_float64
def layer_weights(
    level: ArrayLike,
    weights: Layerwise,
    starts: Layerwise,
    scale: ArrayLike = 1.0,
) -> Float[Array, " layers"]:
    """Computes the weights of all layers in a mode when their product has a given value.

    It may be any value on the way to the target, or the target. The layers are solutions of one
    equation, so they depend on neither time nor target.

    Args:
      level: The product y > 0 of all layers.
      weights: Frozen weights w_l > 0 of the mode `(layers,)`.
      starts: Entries of A in the mode `(layers,)`, with B = 0. 0 for a layer without an adapter.
      scale: The scale s > 0 of every adapter.

    Returns:
      x_l = w_l + s b_l a_l, `(layers,)`.

    Raises:
      ValueError: If an argument is out of range, or no layer has an adapter.

    >>> [round(float(x), 3) for x in layer_weights(4.0, [1.0, 1.0], [0.1, 0.1])]
    [2.0, 2.0]
    >>> [round(float(x), 3) for x in layer_weights(4.0, [1.0, 2.0], [0.1, 0.1])]
    [1.929, 2.074]
    """
    y, w, kappa = _checked(level, weights, starts, scale)
    return _positions(_integral(y, w, kappa), w, kappa)


@problems.in_float64
def layer_time(
    level: ArrayLike,
    target: ArrayLike,
    weights: Layerwise,
    starts: Layerwise,
    scale: ArrayLike = 1.0,
) -> Array:
    """Computes when the product of all layers in a mode has a given value.

        t = int_0^h dh' / (2 s y (f - y)),   where y(h') is the product

    The integral is computed by Gauss-Legendre quadrature.

    Args:
      level: The product y, from the product of the weights to the target, exclusively.
      target: The target f > 0 of the mode.
      weights: Frozen weights w_l > 0 of the mode `(layers,)`.
      starts: Entries of A in the mode `(layers,)`, with B = 0. 0 for a layer without an adapter.
      scale: The scale s > 0 of every adapter.

    Returns:
      The time, a scalar.

    Raises:
      ValueError: If an argument is out of range, or no layer has an adapter.

    >>> round(float(layer_time(2.0, 4.0, [1.0, 1.0], [0.1, 0.1])), 3)
    0.422
    """
    last, w, kappa = _checked(level, weights, starts, scale)
    target = jnp.asarray(target, float)
    problems.check("target", target, lambda f: (f > 0) & (f < np.inf), "finite and positive")
    way = (last - jnp.prod(w)) / (target - jnp.prod(w))
    problems.check("level", way, lambda x: (x >= 0) & (x < 1), "between the start and the target")
    end = _integral(last, w, kappa)
    nodes, masses = np.polynomial.legendre.leggauss(NODES)
    first = np.append(0.0, 0.5 ** np.arange(PANELS, 0, -1))
    edges = np.append(first, 1 - first[-2::-1])
    widths = np.diff(edges)[:, None]
    share = (edges[:-1, None] + widths * (nodes + 1) / 2).ravel()
    mass = (widths * masses / 2).ravel()
    y = jnp.prod(jax.vmap(partial(_positions, weights=w, kappa=kappa))(end * share), -1)
    return jnp.sum(mass * end / (2 * jnp.asarray(scale, float) * y * (target - y)))


def _checked(level: ArrayLike, weights: Layerwise, starts: Layerwise, scale: ArrayLike) -> tuple:
    """Checks the arguments of a mode, and returns level, weights and kappa = s a^2."""
    level, w, a, s = (jnp.asarray(x, float) for x in (level, weights, starts, scale))
    if w.ndim != 1 or w.shape != a.shape or not w.size:
        raise ValueError(
            f"weights and starts must be one number for each layer; got {w.shape}, {a.shape}"
        )
    for name, value in (("level", level), ("weights", w), ("scale", s)):
        problems.check(name, value, lambda x: (x > 0) & (x < np.inf), "finite and positive")
    problems.check("starts", a, lambda a: (a >= 0) & (a < np.inf), "finite and >= 0")
    problems.check("starts", a.max(), lambda a: a > 0, "positive in one layer at least")
    return level, w, s * a**2


def _angle(moved: Array, kappa: Array) -> Array:
    """Inverts x - w = kappa/2 sinh(2 angle)."""
    return jnp.arcsinh(2 * moved / kappa) / 2


def _potential(angle: Array, weights: Array, kappa: Array) -> Array:
    return weights * angle + kappa / 2 * jnp.sinh(angle) ** 2


@jax.jit
def _integral(level: Array, weights: Array, kappa: Array) -> Array:
    """Finds h at which the product of all layers is `level`. The product increases with h."""
    # If one layer moves alone, it has to move further than together with the others.
    alone = weights * (level / jnp.prod(weights) - 1)
    has = kappa > 0
    one = jnp.where(has, kappa, 1.0)
    reach = jnp.where(has, _potential(_angle(alone, one), weights, one), jnp.inf)
    bound = reach[jnp.argmin(jnp.abs(reach))]

    def too_far(h: Array) -> Array:
        return jnp.prod(_positions(h, weights, kappa)) > level

    return _bisect(too_far, jnp.minimum(bound, 0.0), jnp.maximum(bound, 0.0))


@jax.jit
def _positions(h: Array, weights: Array, kappa: Array) -> Array:
    """Computes x_l at h. The integral increases with each angle while x_l > 0."""
    has = kappa > 0
    one = jnp.where(has, kappa, 1.0)
    low = jnp.where(h < 0, _angle(-weights, one), 0.0)
    # Each of the two terms of h is at most h.
    high = jnp.clip(h, 0.0)
    high = jnp.minimum(high / weights, jnp.arcsinh(jnp.sqrt(2 * high / one)))
    angle = _bisect(lambda x: _potential(x, weights, one) > h, low, high)
    return weights + jnp.where(has, kappa / 2 * jnp.sinh(2 * angle), 0.0)


def _bisect(too_far: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """Halves intervals until their ends are neighbours."""

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        beyond = too_far(middle)
        return jnp.where(beyond, low, middle), jnp.where(beyond, middle, high)

    low, high = jax.lax.fori_loop(0, HALVINGS, halve, (low, high))
    return (low + high) / 2
