"""Exact gradient flow of a balanced two-layer linear network, at any time and for any shapes.

If W_1^T W_1 - W_2 W_2^T = c I at the start, and therefore always, Q = [W_1; W_2^T] obeys

    dQ/dt = F Q - Q Q^T Q,   F = [[c I, 2A], [2A^T, -c I]].

P = Q Q^T contains W_1 W_1^T, W_2^T W_2 and theta. It solves a matrix Riccati equation (Fukumizu
1998):

    P(t) = e^{Ft} Q_0 [I + 2 Q_0^T Phi(t) Q_0]^{-1} Q_0^T e^{Ft},   Phi(t) = int_0^t e^{2Fs} ds.

Why it can be solved. P = Y N^{-1} Y^T solves its equation dP/dt = F P + P F - 2 P^2 with dY/dt = F
Y and dN/dt = 2 Y^T Y. The equation for Y is linear, so Y = e^{Ft} Q_0. N is an integral of Y^T Y
and equals the bracket above. It limits the growth of Y to the size of A.

Why it is not used in this form. Bracket and e^{Ft} both grow as e^{2 sigma_1 t} or its square, and
their quotient is of order one. The bracket therefore loses all digits if 4 sigma_1 t > log(1/eps),
and e^{Ft} overflows later. For a 4 x 4 target of sigma_1 = 2 and the start e^{-3} I, the errors of
theta in float64 are, by the formula above and by `flow`,

    t             2        3        4        5       6       100
    as above    2e-15    1e-11    7e-8     1e-4     0.2      NaN
    `flow`      1e-15    2e-15    1e-15    7e-16   2e-15    2e-15

The reference has 400 digits. For U = V the modes do not mix, and digits are lost only by overflow.
An integrator has the opposite problem. It requires small steps while modes grow, and has truncation
errors.

Here the formula is applied over substeps h with |F| h <= 1, in square-root form:

    M = I + 2 Q^T Phi(h) Q = L L^T,   Q <- e^{Fh} Q L^{-T}.

Every substep is exact, so their number affects the result only through rounding. The square root is
essential: an iteration of P = Q Q^T would square the condition number, and rounding would make it
indefinite. M is well conditioned, unless |Q_0|^2 is 10^4 times |A| or more. F may be singular and A
rectangular, and the width may be too small for A or larger than necessary.

P is exact, and with it every function in `layers`. Q is one representative. The true W_1 and W_2
equal the returned ones up to a common rotation, (W_1 R, R^T W_2), where R depends on the whole
path. A start without some modes of A is a saddle, where rounding errors grow as eps e^{2 sigma t},
as with any integrator. For a rank-deficient start, `thin` avoids this.
"""

from collections.abc import Sequence
from functools import partial
from math import ceil, log2
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from sail_jax.checks import concrete
from theory import problems
from theory.two_layer.layers import (
    Layers,
    check_balanced,
    check_shapes,
    grams,
    imbalance,
    loss,
    theta,
)

# Terms of the series of (e^z - 1)/z. 1/20! is below the float64 unit for |z| <= 1.
TERMS = 19


@problems.defined
def flow(
    start: Layers,
    target: Float[ArrayLike, "o i"],
    times: Sequence[float] | ArrayLike,
    *,
    anchor: ArrayLike = 0.0,
    steps: int | None = None,
) -> Layers:
    """Solves gradient flow of a balanced network and returns the network at given times.

    It minimises |theta - A|^2 + anchor |theta - theta(0)|^2. This is the flow towards (A + anchor
    theta(0)) / (1 + anchor), 1 + anchor times as fast. Any returned network can be the start of the
    next flow, for example for fine-tuning after pre-training. Derivatives in all arguments exist,
    forward and backward, even where singular values coincide.

    Args:
      start: Initial weights W_1 `(o, h)` and W_2 `(h, i)`, with W_1^T W_1 - W_2 W_2^T = c I.
      target: Target map A `(o, i)`.
      times: Ascending times `(times,)`, >= 0, of gradient flow at unit rate (see `layers`).
      anchor: Strength of the penalty on the distance from the initial map, >= 0.
      steps: Largest number of substeps between neighbouring times. None uses `substeps`. It is
        required when an argument is traced. The result is NaN if it is too small by more than a
        factor of 2.

    Returns:
      The weights with a leading axis `times`, up to a common rotation (W_1 R, R^T W_2).

    Raises:
      ValueError: If shapes do not conform, the start is not balanced, times or anchor are out of
        range, or `steps` is too small, or missing where it must be given.

    References:
      Springer et al., Overtrained Language Models Are Harder to Fine-Tune, 2025 (arXiv 2503.19206),
      eq. (9).

    >>> start = Layers(0.1 * jnp.eye(2), 0.1 * jnp.eye(2))
    >>> path = flow(start, jnp.diag(jnp.array([2.0, 1.0])), [0.0, 0.7, 20.0])
    >>> [[round(float(y), 2) for y in jnp.diag(m)] for m in theta(path)]
    [[0.01, 0.01], [1.15, 0.14], [2.0, 1.0]]
    """
    check_shapes(start, target)
    check_balanced(start)
    increments = problems.check_times(times)
    problems.check("anchor", anchor, lambda x: (x >= 0) & (x < np.inf), "finite and >= 0")
    # Shapes inside the compiled flow depend on this number, so it must be known before.
    least = substeps(start, target, times, anchor=anchor)
    if steps is None:
        if least is None:
            raise ValueError("steps must be given when target, times, anchor or start are traced")
        steps = least
    elif steps < 1 or (least is not None and steps < least / 2):  # `least` is a power of 2
        raise ValueError(f"steps must be at least {least or 1}; got {steps}")
    return _flow(start, jnp.asarray(target, float), increments, jnp.asarray(anchor, float), steps)


class Trajectory(NamedTuple):
    """A network along training time, with everything that gradient flow determines about it.

    The matrices are computed on demand: at width 512 and 1000 times, each requires 1 GiB.

    Attributes:
      layers: W_1 and W_2 with a leading axis `times`, up to a common rotation (W_1 R, R^T W_2) that
        depends on the path.
      target: The target map A `(o, i)`.
    """

    layers: Layers
    target: Float[Array, "o i"]

    @property
    def product(self) -> Float[Array, "times o i"]:
        """The maps W_1 W_2, `(times, o, i)`."""
        return theta(self.layers)

    @property
    def left_gram(self) -> Float[Array, "times o o"]:
        """The Gram matrices W_1 W_1^T, `(times, o, o)`."""
        return grams(self.layers)[0]

    @property
    def right_gram(self) -> Float[Array, "times i i"]:
        """The Gram matrices W_2^T W_2, `(times, i, i)`."""
        return grams(self.layers)[1]

    @property
    def loss(self) -> Float[Array, " times"]:
        """The losses |W_1 W_2 - A|_F^2, `(times,)`, without the anchor's term."""
        return jax.lax.map(lambda layers: loss(layers, self.target), self.layers, batch_size=16)

    @property
    def end(self) -> Layers:
        """The last network, a start for the next phase: `trajectory(*path.end, target, times)`."""
        return Layers(self.layers.w1[-1], self.layers.w2[-1])


@problems.defined
def trajectory(
    w1: Float[ArrayLike, "o h"],
    w2: Float[ArrayLike, "h i"],
    target: Float[ArrayLike, "o i"],
    times: Sequence[float] | ArrayLike,
    *,
    anchor: ArrayLike = 0.0,
    steps: int | None = None,
) -> Trajectory:
    """Solves gradient flow of |W_1 W_2 - A|^2 exactly, with derived quantities.

    This is `flow` with separate weight matrices as arguments and more quantities in the result.

    Args:
      w1: Initial W_1 `(o, h)`.
      w2: Initial W_2 `(h, i)`, with W_1^T W_1 - W_2 W_2^T = c I.
      target: Target map A `(o, i)`.
      times: Ascending times `(times,)`, >= 0, of gradient flow at unit rate (see `layers`).
      anchor: Strength of the penalty |theta - theta(0)|^2, >= 0.
      steps: Largest number of substeps between neighbouring times; see `flow`.

    Returns:
      The trajectory, with a leading axis `times`.

    Raises:
      ValueError: As `flow`.

    References:
      Springer et al., 2025 (arXiv 2503.19206), eqs. (5), (6), have the same unit of time.

    >>> path = trajectory(0.1 * jnp.eye(2), 0.1 * jnp.eye(2), jnp.diag(jnp.array([2.0, 1.0])), [20])
    >>> tuned = trajectory(*path.end, jnp.eye(2), [20.0])
    >>> [round(float(loss), 4) for loss in (path.loss[-1], tuned.loss[-1])]
    [0.0, 0.0]
    """
    target = jnp.asarray(target, dtype=float)
    start = Layers(jnp.asarray(w1, dtype=float), jnp.asarray(w2, dtype=float))
    return Trajectory(flow(start, target, times, anchor=anchor, steps=steps), target)


@problems.defined
def substeps(
    start: Layers,
    target: Float[ArrayLike, "o i"],
    times: Sequence[float] | ArrayLike,
    *,
    anchor: ArrayLike = 0.0,
) -> int | None:
    """Computes the number of substeps for |F| h <= 1 in `flow` between times.

    Args:
      start: Initial weights W_1 `(o, h)` and W_2 `(h, i)`.
      target: Target map A `(o, i)`.
      times: Ascending times `(times,)`, >= 0.
      anchor: Strength of the penalty |theta - theta(0)|^2, >= 0.

    Returns:
      A power of 2, which keeps the number of compilations small. None while an argument is traced.

    >>> start = Layers(0.1 * jnp.eye(2), 0.1 * jnp.eye(2))
    >>> substeps(start, jnp.eye(2), np.array([0.1, 3.0]))
    8
    """
    given = [concrete(x) for x in (*start, target, times, anchor)]
    values = [x for x in given if x is not None]
    if len(values) < len(given):
        return None
    w1, w2, a, t, strength = values
    # With the anchor, the flow is towards A_eff = (A + anchor theta(0)) / (1 + anchor), 1 + anchor
    # times as fast. Both numbers below have this factor.
    pull = np.linalg.norm(a + strength * w1 @ w2, 2)  # |A_eff| (1 + anchor)
    balance = np.trace(w1.T @ w1 - w2 @ w2.T) / w1.shape[1] * (1 + strength)
    # The spectral norm of F, with eigenvalues +-sqrt(c^2 + 4 sigma^2).
    speed = float(np.hypot(balance, 2 * pull))
    widest = float(np.diff(t, prepend=0.0).max())
    # A power of two, so that nearby targets and times share a compiled program.
    return 2 ** max(0, ceil(log2(max(speed * widest, 1.0))))


@partial(jax.jit, static_argnames="steps")
def _flow(start: Layers, target: Array, increments: Array, anchor: Array, steps: int) -> Layers:
    # From here on, the anchor only changes the target, and multiplies the speed by 1 + anchor.
    target = (target + anchor * theta(start)) / (1 + anchor)
    (o, i), n = target.shape, min(target.shape)
    balance = jnp.trace(imbalance(start)) / start.w1.shape[1]

    # In the eigenbasis of F the modes stay separate, so small ones keep their relative accuracy.
    # The basis is U and V, the singular vectors of A, and a rotation in the plane of each pair (u,
    # v), in which F is [[c, 2 sigma], [2 sigma, -c]]. A constant basis is sufficient. It is not
    # differentiated, because an SVD has no derivative where singular values coincide. Off-diagonal
    # entries of F are rounding in value, but not in derivative.
    U, sigma, Vt = linalg.svd(jax.lax.stop_gradient(target), full_matrices=True)
    # [[c, 2 sigma], [2 sigma, -c]] has eigenvectors at half of the angle of (c, 2 sigma).
    angle = jnp.arctan2(2 * sigma, jax.lax.stop_gradient(balance))[:, None] / 2
    cosine, sine = jnp.cos(angle), jnp.sin(angle)

    def to_modes(q: Array) -> Array:
        """Changes from the coordinates U, V to F's eigenvectors."""
        a, b = q[:o], q[o:]
        plus, minus = cosine * a[:n] + sine * b[:n], cosine * b[:n] - sine * a[:n]
        return jnp.concatenate([plus, a[n:], minus, b[n:]])

    def from_modes(q: Array) -> Layers:
        plus, minus = q[:n], q[o : o + n]
        a = jnp.concatenate([cosine * plus - sine * minus, q[n:o]])
        b = jnp.concatenate([sine * plus + cosine * minus, q[o + n :]])
        return Layers(U @ a, b.T @ Vt)

    T = U.T @ target @ Vt.T
    F = jnp.block([[balance * jnp.eye(o), 2 * T], [2 * T.T, -balance * jnp.eye(i)]])
    # The change of basis from both sides. F is symmetric, so the order of the two does not matter.
    F = to_modes(to_modes(F).T)
    F = F - jax.lax.stop_gradient(F - jnp.diag(jnp.diag(F)))
    speed = jax.lax.stop_gradient(jnp.abs(jnp.diag(F)).max())

    def advance(q: Array, increment: Array) -> tuple[Array, Layers]:
        time = increment * (1 + anchor)
        # As few substeps as this increment requires, because rounding errors grow with their
        # number.
        needed = jnp.ceil(speed * jax.lax.stop_gradient(time))
        count = jnp.clip(needed, 1, steps)
        # Under tracing too few substeps cannot raise an error. NaN is better than wrong numbers.
        h = jnp.where(needed > 2 * steps, jnp.nan, time / count)

        def substep(q: Array) -> Array:
            grown, integrated = _propagate(F, h, q)
            # M = I + 2 Q^T Phi(h) Q and Q <- e^{Fh} Q L^{-T}, as in the module's docstring.
            M = jnp.eye(q.shape[1], dtype=q.dtype) + 2 * q.T @ integrated
            return grown @ _inverse_root(M).T

        def body(q: Array, k: Array) -> tuple[Array, None]:
            # A scan of fixed length can be differentiated backward. Surplus rounds have no effect.
            return jax.lax.cond(k < count, substep, lambda q: q, q), None

        q, _ = jax.lax.scan(body, q, jnp.arange(steps))
        return q, from_modes(q)

    q = to_modes(jnp.concatenate([U.T @ start.w1, Vt @ start.w2.T]))
    return jax.lax.scan(advance, q, increments)[1]


def _inverse_root(M: Array) -> Array:
    """Computes L^{-1} of M = L L^T, recursively by halves down to blocks of 64.

    Matrix products take half the time of one triangular solve with many right-hand sides.
    """
    n = M.shape[0]
    if n <= 64:
        root = linalg.cholesky(M, symmetrize_input=False)
        return linalg.solve_triangular(root, jnp.eye(n, dtype=M.dtype), lower=True)
    h = n // 2
    first = _inverse_root(M[:h, :h])
    # The blocks of Cholesky's factor are L_21 = M_21 L_11^-T, and L_22 from the Schur complement.
    below = M[h:, :h] @ first.T
    second = _inverse_root(M[h:, h:] - below @ below.T)
    corner = jnp.zeros((h, n - h), M.dtype)
    return jnp.block([[first, corner], [-second @ below @ first, second]])


@jax.custom_jvp
def _propagate(F: Array, h: Array, q: Array) -> tuple[Array, Array]:
    """Computes e^{Fh} q and int_0^h e^{2Fs} ds q, for F diagonal in value and |F| h <= 1.

    The derivative must not assume a diagonal F, hence the separate rule `_propagate_dense`.
    """
    z = jnp.diagonal(F) * h
    flat = z == 0
    phi = jnp.where(flat, 1.0, jnp.expm1(2 * z) / jnp.where(flat, 1.0, 2 * z))
    return jnp.exp(z)[:, None] * q, (h * phi)[:, None] * q


@_propagate.defjvp
def _propagate_jvp(primals, tangents):
    return jax.jvp(_propagate_dense, primals, tangents)


def _propagate_dense(F: Array, h: Array, q: Array) -> tuple[Array, Array]:
    """Computes the same as `_propagate` for any F, from phi(z) = (e^z - 1)/z, which is entire."""
    identity = jnp.eye(F.shape[0], dtype=F.dtype)

    def horner(series: Array, k: Array) -> tuple[Array, None]:
        return identity + h * F @ series / k, None

    phi, _ = jax.lax.scan(horner, identity, jnp.arange(TERMS, 1, -1, dtype=F.dtype))
    grow = identity + h * F @ phi
    return grow @ q, h * phi @ (grow + identity) @ q / 2  # phi(2z) = phi(z) (e^z + 1)/2
