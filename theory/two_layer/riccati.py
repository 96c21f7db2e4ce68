"""Exact gradient flow of a balanced two-layer linear network, at any time, in any shape.

If W_1^T W_1 - W_2 W_2^T = c I at the start (then always), Q = [W_1; W_2^T] obeys
dQ/dt = F Q - Q Q^T Q with F = [[c I, 2A], [2A^T, -c I]], and P = Q Q^T, which holds W_1 W_1^T,
W_2^T W_2 and theta, solves a matrix Riccati equation (Fukumizu 1998):

    P(t) = e^{Ft} Q_0 [I + 2 Q_0^T Phi(t) Q_0]^{-1} Q_0^T e^{Ft},   Phi(t) = int_0^t e^{2Fs} ds.

In this form the bracket loses all digits once 4 sigma_1 t > log(1/eps), and e^{Ft} overflows later.
Here it is applied over substeps h with |F| h <= 1, in square-root form: M = I + 2 Q^T Phi(h) Q =
L L^T, Q <- e^{Fh} Q L^{-T}. Every substep is exact, M is well conditioned (unless |Q_0|^2 is 10^4
times |A| or more), and nothing is asked of F (singular, rectangular A) nor of the width
(rank-deficient, overcomplete).

P is exact, and with it every function of `layers`. Q is one representative: the true W_1 and W_2
are those returned up to a common rotation, (W_1 R, R^T W_2), and R depends on the whole path.
A start that lacks modes is a saddle, which rounding leaves as eps e^{2 sigma t}, as it would under
any integrator; on a rank-deficient start this is avoided by `thin`.
"""

from collections.abc import Sequence
from functools import partial
from math import ceil, log2
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike
from jaxtyping import Array, Float

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

# Terms of the series of (e^z - 1)/z: 1/20! is below the float64 unit for |z| <= 1.
TERMS = 19


def flow(
    start: Layers,
    target: Float[ArrayLike, "o i"],
    times: Sequence[float] | ArrayLike,
    *,
    anchor: ArrayLike = 0.0,
    steps: int | None = None,
) -> Layers:
    """The network at ascending times >= 0, with a leading time axis, up to a rotation (see above).

    Minimises |theta - A|^2 + anchor |theta - theta(0)|^2 (overtrained eq. 9): the flow towards
    (A + anchor theta(0)) / (1 + anchor), 1 + anchor times as fast. Any point of it is a start of
    the next flow: pre-train, fine-tune, fine-tune again.

    `steps` is the largest number of substeps between neighbouring times; by default `substeps`. It
    must be given when target, times, anchor or start are traced, and the result is NaN if it turns
    out too small by a factor of 2. Differentiable in all of them, forward and backward, also where
    singular values coincide.

    Raises ValueError unless the start is balanced, W_1^T W_1 - W_2 W_2^T = c I.

    >>> start = Layers(0.1 * jnp.eye(2), 0.1 * jnp.eye(2))
    >>> path = flow(start, jnp.diag(jnp.array([2.0, 1.0])), [0.0, 0.7, 20.0])
    >>> [[round(float(y), 2) for y in jnp.diag(m)] for m in theta(path)]
    [[0.01, 0.01], [1.15, 0.14], [2.0, 1.0]]
    """
    check_shapes(start, target)
    check_balanced(start)
    increments = problems.check_times(times)
    problems.check("anchor", anchor, lambda x: (x >= 0) & (x < np.inf), "finite and >= 0")
    least = substeps(start, target, times, anchor=anchor)
    if steps is None:
        if least is None:
            raise ValueError("steps must be given when target, times, anchor or start are traced")
        steps = least
    elif steps < 1 or (least is not None and steps < least / 2):  # `least` is a power of 2
        raise ValueError(f"steps must be at least {least or 1}; got {steps}")
    return _flow(start, jnp.asarray(target, float), increments, jnp.asarray(anchor, float), steps)


class Trajectory(NamedTuple):
    """A network along time, and all that gradient flow determines of it; leading axis: times.

    The matrices are formed when asked for: at width 512 and 1000 times each takes a gibibyte.
    """

    layers: Layers
    """W_1 and W_2 up to a common rotation (W_1 R, R^T W_2) that depends on the path."""
    target: Float[Array, "o i"]

    @property
    def product(self) -> Float[Array, "times o i"]:
        """W_1 W_2."""
        return theta(self.layers)

    @property
    def left_gram(self) -> Float[Array, "times o o"]:
        """W_1 W_1^T."""
        return grams(self.layers)[0]

    @property
    def right_gram(self) -> Float[Array, "times i i"]:
        """W_2^T W_2."""
        return grams(self.layers)[1]

    @property
    def loss(self) -> Float[Array, " times"]:
        """|W_1 W_2 - A|_F^2, without the anchor's term."""
        return jax.lax.map(lambda layers: loss(layers, self.target), self.layers, batch_size=16)

    @property
    def end(self) -> Layers:
        """The last network: a start of the next phase, `trajectory(*path.end, target, times)`."""
        return Layers(self.layers.w1[-1], self.layers.w2[-1])


def trajectory(
    w1: Float[ArrayLike, "o h"],
    w2: Float[ArrayLike, "h i"],
    target: Float[ArrayLike, "o i"],
    times: Sequence[float] | ArrayLike,
    *,
    anchor: ArrayLike = 0.0,
    steps: int | None = None,
) -> Trajectory:
    """All that gradient flow of |W_1 W_2 - A|^2 determines, exactly, at ascending times >= 0; see
    `flow`, and overtrained eqs. (5), (6) for the unit of time.

    >>> path = trajectory(0.1 * jnp.eye(2), 0.1 * jnp.eye(2), jnp.diag(jnp.array([2.0, 1.0])), [20])
    >>> tuned = trajectory(*path.end, jnp.eye(2), [20.0])
    >>> [round(float(loss), 4) for loss in (path.loss[-1], tuned.loss[-1])]
    [0.0, 0.0]
    """
    target = jnp.asarray(target, dtype=float)
    start = Layers(jnp.asarray(w1, dtype=float), jnp.asarray(w2, dtype=float))
    return Trajectory(flow(start, target, times, anchor=anchor, steps=steps), target)


def substeps(
    start: Layers,
    target: Float[ArrayLike, "o i"],
    times: Sequence[float] | ArrayLike,
    *,
    anchor: ArrayLike = 0.0,
) -> int | None:
    """How many substeps `flow` needs between times so that |F| h <= 1, as a power of 2 (so that few
    are compiled); None while a value is traced."""
    given = [concrete(x) for x in (*start, target, times, anchor)]
    values = [x for x in given if x is not None]
    if len(values) < len(given):
        return None
    w1, w2, a, t, strength = values
    pull = np.linalg.norm(a + strength * w1 @ w2, 2)  # |A_eff| (1 + anchor)
    balance = np.trace(w1.T @ w1 - w2 @ w2.T) / w1.shape[1] * (1 + strength)
    speed = float(np.hypot(balance, 2 * pull))
    widest = float(np.diff(t, prepend=0.0).max())
    return 2 ** max(0, ceil(log2(max(speed * widest, 1.0))))


@partial(jax.jit, static_argnames="steps")
def _flow(start: Layers, target: Array, increments: Array, anchor: Array, steps: int) -> Layers:
    target = (target + anchor * theta(start)) / (1 + anchor)
    (o, i), n = target.shape, min(target.shape)
    balance = jnp.trace(imbalance(start)) / start.w1.shape[1]

    # In the eigenbasis of F the modes stay apart: small ones keep their relative accuracy beside
    # large ones. It is U and V, the singular vectors of A, and a rotation in the plane of each pair
    # (u, v), in which F is [[c, 2 sigma], [2 sigma, -c]]. A constant basis is enough; it carries no
    # derivative (that of an SVD does not exist where singular values coincide), and what F has off
    # the diagonal is rounding in value, not in derivative.
    U, sigma, Vt = jnp.linalg.svd(jax.lax.stop_gradient(target), full_matrices=True)
    angle = jnp.arctan2(2 * sigma, jax.lax.stop_gradient(balance))[:, None] / 2
    cosine, sine = jnp.cos(angle), jnp.sin(angle)

    def to_modes(q: Array) -> Array:
        """From the coordinates U, V to those of F's eigenvectors."""
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
    F = to_modes(to_modes(F).T)
    F = F - jax.lax.stop_gradient(F - jnp.diag(jnp.diag(F)))
    speed = jax.lax.stop_gradient(jnp.abs(jnp.diag(F)).max())

    def advance(q: Array, increment: Array) -> tuple[Array, Layers]:
        time = increment * (1 + anchor)
        # As few substeps as this increment needs: rounding grows with their number.
        needed = jnp.ceil(speed * jax.lax.stop_gradient(time))
        count = jnp.clip(needed, 1, steps)
        h = jnp.where(needed > 2 * steps, jnp.nan, time / count)

        def substep(q: Array) -> Array:
            grown, integrated = _propagate(F, h, q)
            M = jnp.eye(q.shape[1], dtype=q.dtype) + 2 * q.T @ integrated
            return grown @ _inverse_root(M).T

        def body(q: Array, k: Array) -> tuple[Array, None]:
            return jax.lax.cond(k < count, substep, lambda q: q, q), None

        q, _ = jax.lax.scan(body, q, jnp.arange(steps))
        return q, from_modes(q)

    q = to_modes(jnp.concatenate([U.T @ start.w1, Vt @ start.w2.T]))
    return jax.lax.scan(advance, q, increments)[1]


def _inverse_root(M: Array) -> Array:
    """L^{-1} of M = L L^T, by halves down to blocks of 64: matrix products take half the time of
    one triangular solve with many right-hand sides."""
    n = M.shape[0]
    if n <= 64:
        root = jnp.linalg.cholesky(M, symmetrize_input=False)
        return solve_triangular(root, jnp.eye(n, dtype=M.dtype), lower=True)
    h = n // 2
    first = _inverse_root(M[:h, :h])
    below = M[h:, :h] @ first.T
    second = _inverse_root(M[h:, h:] - below @ below.T)
    corner = jnp.zeros((h, n - h), M.dtype)
    return jnp.block([[first, corner], [-second @ below @ first, second]])


@jax.custom_jvp
def _propagate(F: Array, h: Array, q: Array) -> tuple[Array, Array]:
    """e^{Fh} q and int_0^h e^{2Fs} ds q for an F that is diagonal in value, |F| h <= 1."""
    z = jnp.diagonal(F) * h
    flat = z == 0
    phi = jnp.where(flat, 1.0, jnp.expm1(2 * z) / jnp.where(flat, 1.0, 2 * z))
    return jnp.exp(z)[:, None] * q, (h * phi)[:, None] * q


@_propagate.defjvp
def _propagate_jvp(primals, tangents):
    return jax.jvp(_propagate_dense, primals, tangents)


def _propagate_dense(F: Array, h: Array, q: Array) -> tuple[Array, Array]:
    """The same for any F, from phi(z) = (e^z - 1)/z, which is entire."""
    identity = jnp.eye(F.shape[0], dtype=F.dtype)

    def horner(series: Array, k: Array) -> tuple[Array, None]:
        return identity + h * F @ series / k, None

    phi, _ = jax.lax.scan(horner, identity, jnp.arange(TERMS, 1, -1, dtype=F.dtype))
    grow = identity + h * F @ phi
    return grow @ q, h * phi @ (grow + identity) @ q / 2  # phi(2z) = phi(z) (e^z + 1)/2
