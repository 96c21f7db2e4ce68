"""Solves low-rank adapters (LoRA) on a pre-trained two-layer network.

The pre-trained weights W_1 and W_2 are frozen. Fine-tuning on A_ft trains B `(o, r)` and
A `(r, i)` or `(r, h)` alone, with a fixed scale s. There are two variants:

    on the map      theta = W_1 W_2 + s B A
    on a layer      theta = (W_1 + s B A) W_2

Loss and time are as in `layers`. B A must learn the residual A_ft - W_1 W_2.

If the tasks are aligned, the modes of the residual are rho_i = sigma_ft,i - y_i. An adapter with an
aligned start has one pair of numbers (b, a) in each of r modes. Each pair obeys

    db/dt = 2 g a (rho - z),   da/dt = 2 g b (rho - z),   z = g b a

where z is the displacement of the mode. The gain g is s on the map. On a layer it is s sqrt(y_i),
since W_2 has the root of the mode. `displacement` solves this for any initial b and a.

On the map, B and A are a two-layer network with the residual as its target. `flow` therefore solves
them exactly for any target and any balanced start, and for B = 0 if the rows of A are orthogonal
and of equal norm. It integrates any other start, such as B = 0 with a random A, for which
`adapters` has an approximation. From a small start in general position, they converge to the best
approximation of rank r. `losses` computes its losses.
"""

from collections.abc import Sequence
from math import ceil, log2

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from sail_jax.checks import concrete
from theory import problems
from theory.two_layer import networks, riccati
from theory.two_layer.layers import Layers, check_balanced, check_shapes, check_spectrum, theta

Spectra = Sequence[float] | Float[ArrayLike, " d"]

FINE = 64  # steps of an integration per unit of time and curvature


@problems.defined
def displacement(
    time: ArrayLike, residual: ArrayLike, gain: ArrayLike, *, b: ArrayLike, a: ArrayLike
) -> Array:
    """Computes the displacement of an aligned mode by an adapter under gradient flow.

    With P = g (b + a)^2 / 4 and M = g (b - a)^2 / 4 the displacement is z = P - M, and P M = K^2 is
    conserved. P satisfies dP/dt = 4 g (K^2 + rho P - P^2), and

        P(t) = P_0 D_M / D_P,   M(t) = M_0 D_P / D_M
        D_P = (R - rho + 2 P_0) S + 2 e,   D_M = (R + rho + 2 M_0) S + 2 e

    with R = sqrt(rho^2 + 4 K^2), e = e^{-4 g R t} and S = (1 - e) / R. The code uses P - M
    multiplied out, so that nothing cancels if b a rho >= 0. A balanced start, b = a, has K = 0, and
    z is then the sigmoid `modes.mode`, g times as fast. The start b = 0 of LoRA has P = M = K = g
    a^2 / 4.

    Args:
      time: Times >= 0, finite.
      residual: rho = sigma_ft - y, the distance that the mode must move, of either sign.
      gain: g >= 0, the scale s, times sqrt(y) for an adapter on one layer.
      b: The entry of B in this mode at the start.
      a: The entry of A in this mode at the start.

    Returns:
      z(t), with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    >>> start = {"b": 0.0, "a": 0.1}
    >>> [round(float(displacement(t, 1.0, 1.0, **start)), 4) for t in (0.0, 1.0, 2.0, 9.0)]
    [0.0, 0.1206, 0.8822, 1.0]
    """
    time, rho, gain, b, a = (jnp.asarray(x, float) for x in (time, residual, gain, b, a))
    problems.check("time", time, lambda t: (t >= 0) & (t < np.inf), "finite and >= 0")
    problems.check("residual", rho, np.isfinite, "finite")
    problems.check("gain", gain, lambda g: (g >= 0) & (g < np.inf), "finite and >= 0")
    for name, value in (("b", b), ("a", a)):
        problems.check_squares(name, value)
    # b -> -b turns the flow towards rho into the flow towards -rho.
    sign = jnp.where(rho < 0, -1.0, 1.0)
    rho, b = abs(rho), sign * b
    plus, minus = gain * (b + a) ** 2 / 4, gain * (b - a) ** 2 / 4
    root = jnp.hypot(rho, 2 * jnp.sqrt(plus) * jnp.sqrt(minus))
    long, still = root + rho, root == 0
    # R - rho = 4 K^2 / (R + rho), without the cancellation.
    short = 4 * plus * (minus / jnp.where(still, 1.0, long))
    x = 4 * gain * root * time
    mean = jnp.where(x == 0, 1.0, -jnp.expm1(-x) / jnp.where(x == 0, 1.0, x))
    late = -jnp.expm1(-x) / jnp.where(still, 1.0, root)
    share, left = jnp.where(x < 1, 4 * gain * time * mean, late), 2 * jnp.exp(-x)
    # With P = 0 nothing grows, and D_P = 2 e may be 0.
    none, of_plus = plus == 0, (short + 2 * plus) * share + left
    of_plus, of_minus = jnp.where(none, 1.0, of_plus), (long + 2 * minus) * share + left
    s_plus, e_plus = jnp.where(none, 0.0, share / of_plus), jnp.where(none, 1.0, left / of_plus)
    s_minus, e_minus = share / of_minus, left / of_minus
    start = gain * b * a * e_plus * e_minus
    middle = 2 * s_plus * e_minus * (plus * long - minus * short)
    reached = (plus * s_plus) * (long * s_minus) + (short * s_plus) * (minus + long) * s_minus
    return sign * (start + middle + 2 * rho * reached)


@problems.defined
def degradation(
    time: ArrayLike,
    start: Float[ArrayLike, "*b d"],
    sigma_pre: Spectra,
    sigma_ft: Spectra,
    gain: ArrayLike,
    *,
    b: ArrayLike,
    a: ArrayLike,
) -> Float[Array, "*b"]:
    """Computes the increase of the pre-training loss by an adapter, at any time.

        Delta(t) = sum_i z_i (z_i + 2 (y_i - sigma_pre,i))

    Modes in which b and a are 0 do not contribute.

    Args:
      time: Times >= 0 of fine-tuning, finite.
      start: Modes y of the pre-trained network `(..., d)`.
      sigma_pre: Singular values of A_pre `(d,)`.
      sigma_ft: Singular values of A_ft `(d,)`.
      gain: As for `displacement`, for each mode or for all.
      b: Entries of B in the modes at the start, for each mode or for all.
      a: Entries of A in the modes at the start.

    Returns:
      The differences of |theta - A_pre|^2.

    Raises:
      ValueError: If an argument is out of range.
    """
    start = jnp.asarray(start, float)
    moved = displacement(time, jnp.asarray(sigma_ft) - start, gain, b=b, a=a)
    return jnp.sum(moved * (moved + 2 * (start - jnp.asarray(sigma_pre))), -1)


@problems.defined
def flow(
    start: Layers,
    residual: Float[ArrayLike, "o i"],
    times: Sequence[float] | ArrayLike,
    *,
    scale: float = 1.0,
    steps: int | None = None,
) -> Layers:
    """Solves gradient flow of an adapter on the map, for any target.

    sqrt(s) B and sqrt(s) A follow the flow of a two-layer network towards the residual, s times as
    fast. If B^T B - A A^T = c I, it is solved exactly by `riccati.flow`. Such a start is balanced,
    or has B = 0 and orthogonal rows of A of equal norm, or rank 1. Any other start, such as B = 0
    with a random A, has no such solution and is integrated by `networks.gradient_flow`.

    Args:
      start: B `(o, r)` and A `(r, i)` at the start. While they are traced, they must satisfy B^T B
        - A A^T = c I.
      residual: A_ft - theta of the frozen network, `(o, i)`.
      times: Ascending times `(times,)`, >= 0.
      scale: The scale s > 0.
      steps: Largest number of substeps between neighbouring times, as for `riccati.flow`, or number
        of steps of the integration. None uses enough for an error of about 1e-10 of the residual.

    Returns:
      B and A with a leading axis `times`, up to a common rotation (B R, R^T A).

    Raises:
      ValueError: If shapes do not conform, a number is out of range, or `steps` is missing where it
        must be given.

    >>> start = Layers(jnp.zeros((2, 1)), jnp.array([[0.1, 0.1]]))
    >>> path = flow(start, jnp.diag(jnp.array([2.0, 1.0])), [0.0, 20.0])
    >>> [[round(float(x), 3) for x in row] for row in (path.w1 @ path.w2)[-1]]
    [[2.0, 0.0], [0.0, 0.0]]
    """
    problems.check("scale", scale, lambda s: (s > 0) & (s < np.inf), "finite and > 0")
    root = jnp.sqrt(jnp.asarray(scale, float))
    own = Layers(root * start.w1, root * start.w2)
    times = jnp.asarray(times, float) * scale
    check_shapes(own, residual)
    if _is_balanced(own):
        found = riccati.flow(own, residual, times, steps=steps)
    else:
        problems.check_times(times)
        residual = jnp.asarray(residual, float)
        steps = _steps(own, residual, times) if steps is None else steps
        found = networks.gradient_flow(own, residual, times, steps)
    return Layers(found.w1 / root, found.w2 / root)


def _is_balanced(layers: Layers) -> bool:
    try:
        check_balanced(layers)
    except ValueError:
        return False
    return True


def _steps(start: Layers, residual: Array, times: Array) -> int:
    """Computes the number of Runge and Kutta's steps between times, a power of 2."""
    known = concrete(residual), concrete(times)
    if known[0] is None or known[1] is None:
        raise ValueError("steps must be given when residual or times are traced")
    w1, w2 = (np.asarray(w) for w in start)
    # The loss never increases, so the map remains this small. The Hessian's norm is at most 2
    # (|W_1|^2 + |W_2|^2) plus 2 |map - residual|, and the conserved imbalance and the map bound the
    # weights.
    reach = np.linalg.norm(known[0]) + np.linalg.norm(w1 @ w2 - known[0])
    curvature = 4 * np.hypot(np.linalg.norm(w1.T @ w1 - w2 @ w2.T), 2 * reach)
    widest = float(np.diff(known[1], prepend=0.0).max())
    return 2 ** ceil(log2(max(FINE * float(curvature) * widest, 1.0)))


@problems.defined
def update(frozen: Layers, target: Float[ArrayLike, "o i"], rank: int) -> Float[Array, "o i"]:
    """Computes the displacement of the map by an adapter on W_1 as t -> inf, for any target.

    It is the best approximation of rank r of (A_ft - W_1 W_2) P, where P projects on the rows of
    W_2. A start in general position cannot stop elsewhere, because all other stationary points are
    saddles.

    Args:
      frozen: The pre-trained weights W_1 `(o, h)` and W_2 `(h, i)`. W_2 = I for an adapter on the
        map.
      target: Target map A_ft `(o, i)`.
      rank: Rank r of the adapter, >= 0.

    Returns:
      s B A W_2 at the end.

    Raises:
      ValueError: If shapes do not conform or the rank is negative.
    """
    check_shapes(frozen, target)
    problems.check("rank", rank, lambda r: r >= 0, ">= 0")
    _, size, rows = linalg.svd(frozen.w2, full_matrices=False)
    few = 100 * size.size * jnp.finfo(size.dtype).eps * size[0]
    kept = rows * (size > few)[:, None]
    u, s, vt = linalg.svd((jnp.asarray(target) - theta(frozen)) @ kept.T @ kept)
    n = s.size
    return (u[:, :n] * jnp.where(jnp.arange(n) < rank, s, 0.0)) @ vt[:n]


@problems.defined
def losses(
    sigma_pre: Spectra, sigma_ft: Spectra, rank: int
) -> tuple[Float[Array, " stages"], Float[Array, " stages"], Float[Array, " stages"]]:
    """Computes both losses after an adapter on a layer, trained from n = 0, ..., d learned modes.

    Let S be the r learned modes with the largest |sigma_ft,i - sigma_pre,i|, or all if there are
    fewer. Then

        Delta(n, r) = sum_{i in S} (sigma_ft,i - sigma_pre,i)^2

    is the increase of the pre-training loss. For full fine-tuning, it is the sum over all learned
    modes (`fine_tuning.degradations`). The modes outside S add as much to the fine-tuning loss as
    they save of the pre-training loss. Unlearned modes do not pass W_2, so an adapter on W_1 cannot
    change them.

    Args:
      sigma_pre: Singular values of A_pre `(d,)`, descending.
      sigma_ft: Singular values of A_ft `(d,)`, in the order of their modes.
      rank: Rank r of the adapter, >= 0.

    Returns:
      Delta, the pre-training losses |theta - A_pre|^2 and the fine-tuning losses |theta - A_ft|^2
      as t -> inf, each `(d + 1,)`.

    Raises:
      ValueError: If an argument is out of range.

    >>> [x.tolist() for x in losses([3.0, 2.0, 1.0], [5.0, 5.0, 5.0], 1)]
    [[0.0, 4.0, 9.0, 16.0], [14.0, 9.0, 10.0, 16.0], [75.0, 50.0, 29.0, 13.0]]
    """
    moved, pre, ft = _moved(sigma_pre, sigma_ft, rank)
    left = _learned(pre.size) * (ft - pre) ** 2 - moved
    raised = moved.sum(1)
    lost, tuned = raised + _after(pre**2), left.sum(1) + _after(ft**2)
    return jnp.asarray(raised), jnp.asarray(lost), jnp.asarray(tuned)


@problems.defined
def harm_thresholds(sigma_pre: Spectra, sigma_ft: Spectra, rank: int) -> Float[Array, " d"]:
    """Computes the ratios sigma_ft,n / sigma_pre,n above which learning mode n hurts.

        1 + sqrt(1 + (rho / sigma_pre,n)^2)

    rho is the r-th largest |sigma_ft,i - sigma_pre,i| of the modes before n, or 0 if there are
    fewer. Mode n replaces it in the adapter. Learning mode n increases the pre-training loss of
    the fine-tuned model if and only if its ratio exceeds the threshold. For full fine-tuning it is
    2, the smallest possible value (`fine_tuning.misalignment_threshold`).

    Args:
      sigma_pre: Singular values of A_pre `(d,)`, descending and positive.
      sigma_ft: Singular values of A_ft `(d,)`, in the order of their modes.
      rank: Rank r of the adapter, >= 1.

    Returns:
      The thresholds `(d,)`.

    Raises:
      ValueError: If an argument is out of range.

    >>> [round(x, 3) for x in harm_thresholds([3.0, 2.0, 1.0], [6.0, 7.0, 4.0], 1).tolist()]
    [2.0, 2.803, 6.099]
    """
    problems.check("rank", rank, lambda r: r >= 1, ">= 1")
    problems.check("sigma_pre", sigma_pre, lambda s: s > 0, "positive")
    moved, pre, _ = _moved(sigma_pre, sigma_ft, rank)
    # With r modes in the adapter, the smallest of them is replaced; with fewer, none.
    ordered = -np.sort(-moved, axis=1)[:-1]
    freed = ordered[:, rank - 1] if rank <= pre.size else np.zeros(pre.size)
    return jnp.asarray(1 + np.sqrt(1 + freed / pre**2))


def _moved(
    sigma_pre: Spectra, sigma_ft: Spectra, rank: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes (sigma_ft - sigma_pre)^2 of the adapter's modes, [n, mode], and both spectra."""
    pre, ft = check_spectrum("sigma_pre", sigma_pre), np.asarray(sigma_ft)
    if ft.shape != pre.shape:
        raise ValueError(f"sigma_ft must have shape {pre.shape}; got {ft.shape}")
    problems.check("sigma_ft", ft, lambda s: (s >= 0) & (s < np.inf), "finite and >= 0")
    problems.check("rank", rank, lambda r: r >= 0, ">= 0")
    squares = _learned(pre.size) * (ft - pre) ** 2
    place = np.argsort(np.argsort(-squares, axis=1, kind="stable"), axis=1)
    return np.where(place < rank, squares, 0.0), pre, ft


def _learned(d: int) -> np.ndarray:
    """Returns a mask. Row n has ones for the first n of d modes."""
    return np.tril(np.ones((d + 1, d)), -1)


def _after(squares: np.ndarray) -> np.ndarray:
    """Computes sum_{i>n} squares_i for n = 0, ..., d."""
    return np.append(np.cumsum(squares[::-1])[::-1], 0.0)


@problems.defined
def fastest_rate(sigma_ft: ArrayLike, scale: ArrayLike = 1.0) -> Array:
    """Computes the fastest growth of an adapter on a layer in a mode, over pre-training.

    From a small start the displacement grows as e^{rate t} with rate = 4 s sqrt(y) |sigma_ft - y|.
    While y < sigma_ft, the rate is largest at y = sigma_ft / 3, where it is 8 s (sigma_ft /
    3)^{3/2}. More pre-training slows the adapter down. The rate of full fine-tuning is 4 sigma_ft
    at every y.

    Args:
      sigma_ft: Singular values of A_ft, finite and >= 0.
      scale: The scale s, finite and >= 0.

    Returns:
      The rates, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    >>> float(fastest_rate(3.0))
    8.0
    """
    sigma_ft, scale = jnp.asarray(sigma_ft, float), jnp.asarray(scale, float)
    problems.check("sigma_ft", sigma_ft, lambda s: (s >= 0) & (s < np.inf), "finite and >= 0")
    problems.check("scale", scale, lambda s: (s >= 0) & (s < np.inf), "finite and >= 0")
    return 8 * scale * (sigma_ft / 3) * jnp.sqrt(sigma_ft / 3)
