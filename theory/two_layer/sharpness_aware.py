"""Sharpness-aware minimisation (SAM) of aligned networks, mode by mode.

SAM computes the gradient at W + rho grad L(W), or at W + rho grad L(W) / |grad L(W)| if normalised
(Foret et al., 2020, arXiv 2010.01412). With W_1 = U diag(a) R and W_2 = R^T diag(b) V^T both stay
aligned with A. Without normalisation every mode has its own two equations. With r = ab - sigma they
are

    a' = a + 2 rho r b,  b' = b + 2 rho r a,  r' = a'b' - sigma,
    da/dt = -2 r' b',  db/dt = -2 r' a'.

Gradient flow conserves the imbalance D = a^2 - b^2 of a mode. Under SAM dD/dt = -8 rho r r' D. SAM
can lower only D. At a minimum a^2 + b^2 = sqrt(D^2 + 4 sigma^2), and noise on the weights adds d
gamma^2 times the sum of these to the loss. A balanced start has D = 0 at all times, and SAM then
only changes the times at which modes are learned. The derivations are in
`docs/explanation/overtraining_further.md`.
"""

from collections.abc import Sequence

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float
from scipy.integrate import quad, solve_ivp

from theory import problems


@problems.defined
def flow(
    a: Float[ArrayLike, " d"],
    b: Float[ArrayLike, " d"],
    sigma: Float[ArrayLike, " d"],
    rho: float,
    times: Sequence[float] | Float[ArrayLike, " times"],
) -> tuple[Float[np.ndarray, "times d"], Float[np.ndarray, "times d"]]:
    """Solves the two equations of every mode under SAM without normalisation.

    Args:
      a: Diagonal of W_1 at the start `(d,)`.
      b: Diagonal of W_2 at the start `(d,)`.
      sigma: Singular values of the target `(d,)`.
      rho: The ascent of SAM in units of the gradient, finite and >= 0.
      times: Ascending times >= 0 of the flow at unit rate.

    Returns:
      a and b at these times, each `(times, d)`, with errors of 1e-10 or less.

    Raises:
      ValueError: If an argument is out of range.
    """
    _check_rho(rho)
    ends, sigma = np.asarray(times, float), np.asarray(sigma, float)
    problems.check_times(ends)
    d = sigma.size

    def speed(_: float, pair: np.ndarray) -> np.ndarray:
        a, b = pair[:d], pair[d:]
        ascent = 2 * rho * (a * b - sigma)
        up, down = a + ascent * b, b + ascent * a
        slope = -2 * (up * down - sigma)
        return np.concatenate([slope * down, slope * up])

    start = np.concatenate([np.asarray(a, float), np.asarray(b, float)])
    found = solve_ivp(
        speed, (0.0, max(ends[-1], 1e-300)), start, "DOP853", ends, rtol=1e-11, atol=1e-13
    )
    return found.y[:d].T, found.y[d:].T


@problems.defined
def learning_time(level: float, start: float, sigma: float, rho: float) -> float:
    """Computes the time at which a balanced mode y = a^2 = b^2 reaches a level under SAM.

        dy/dt = 4 y k (sigma - y k^2),  k = 1 + 2 rho (y - sigma)

    The time is computed by quadrature. A small y grows as e^{4 sigma (1 - 2 rho sigma)
    t}. SAM therefore slows large modes down, and the mode with sigma = 1/(4 rho) is learned first.
    A mode that starts below sigma - 1/(2 rho) decays to 0 instead. Normalised SAM avoids this
    through smaller ascents where gradients are large.

    Args:
      level: The level, in [start, sigma).
      start: The mode at the start, > 0.
      sigma: Singular value of the target.
      rho: The ascent of SAM in units of the gradient, finite and >= 0.

    Returns:
      The time. It is inf if the mode is never learned.

    Raises:
      ValueError: If an argument is out of range.

    >>> [round(learning_time(0.5, 1e-4, 1.0, rho), 2) for rho in (0.0, 0.1, 0.6)]
    [2.3, 2.76, inf]
    """
    _check_rho(rho)
    problems.check("start", start, lambda y: (y > 0) & (y < np.inf), "finite and > 0")
    problems.check("level", level, lambda y: (y >= start) & (y < sigma), "in [start, sigma)")
    if 2 * rho * (sigma - start) >= 1:
        return float("inf")

    def pace(log: float) -> float:
        y = np.exp(log)
        k = 1 + 2 * rho * (y - sigma)
        # sigma - y k^2 without cancellation at y = sigma.
        off = y - sigma
        rest = 1 + 4 * rho * sigma + 4 * rho * (1 + rho * sigma) * off + (2 * rho * off) ** 2
        return 1 / (4 * k * -off * rest)

    return float(quad(pace, np.log(start), np.log(level), limit=500, epsabs=0, epsrel=1e-11)[0])


@problems.defined
def imbalance_loss(start: float, imbalance: float, sigma: float) -> float:
    """Computes the decrease of log |D| of a mode by SAM until it is learned, per unit of rho.

        4 int (sigma - y) / sqrt(D^2 + 4 y^2) dy from y = start to sigma

    It is the limit of small rho. To first order r' is r, and gradient flow has dy = 2 (sigma - y)
    sqrt(D^2 + 4 y^2) dt with constant D.

    Args:
      start: The mode y = ab at the start, in [0, sigma].
      imbalance: D = a^2 - b^2 at the start, not 0.
      sigma: Singular value of the target, > 0.

    Returns:
      The decrease of log |D| divided by rho.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(imbalance_loss(0.0, 1.0, 2.0), 3)
    5.256
    """
    problems.check("sigma", sigma, lambda s: (s > 0) & (s < np.inf), "finite and > 0")
    problems.check("start", start, lambda y: (y >= 0) & (y <= sigma), "in [0, sigma]")
    problems.check("imbalance", imbalance, lambda x: (x != 0) & np.isfinite(x), "finite, not 0")
    ends = [
        sigma / 2 * np.arcsinh(2 * y / abs(imbalance)) - np.hypot(imbalance, 2 * y) / 4
        for y in (sigma, start)
    ]
    return float(4 * (ends[0] - ends[1]))


@problems.defined
def bouncing_drift(
    imbalance: Sequence[float] | Float[ArrayLike, " d"],
    sigma: Sequence[float] | Float[ArrayLike, " d"],
    rho: float,
    time: float,
) -> Float[np.ndarray, " d"]:
    """Follows the imbalances of all modes under normalised SAM at a minimum.

    Let (i, j) be the pair with the largest a_i^2 + b_j^2. The iterates oscillate along the entry
    (i, j) of the map. SAM shrinks its factors a_i and b_j at the rate 2 rho^2. Descent then
    restores ab = sigma, which keeps D. So

        dD_i/dt = -4 rho^2 a_i^2,  dD_j/dt = 4 rho^2 b_j^2,

    For i = j both hold, and log D decreases at the rate 4 rho^2 (`sharpest_decay`). This is the
    limit of small rho and rates, as long as one pair is the sharpest.

    Args:
      imbalance: D = a^2 - b^2 of each mode at the start `(d,)`.
      sigma: Singular values of the target `(d,)`, > 0.
      rho: The length of SAM's ascent, finite and >= 0.
      time: The duration, steps times learning rate, finite and >= 0.

    Returns:
      The imbalances at the end `(d,)`, by small steps.

    Raises:
      ValueError: If an argument is out of range.

    >>> bouncing_drift([1.0, -2.0], [1.0, 1.0], 0.1, 1.0).round(3).tolist()
    [0.936, -1.905]
    """
    _check_rho(rho)
    problems.check("time", time, lambda t: (t >= 0) & (t < np.inf), "finite and >= 0")
    problems.check("sigma", sigma, lambda s: (s > 0) & (s < np.inf), "finite and > 0")
    now, sigma = np.array(imbalance, float), np.asarray(sigma, float)
    # A step moves less than a thousandth of D.
    steps = int(np.ceil(4e3 * rho**2 * time)) or 1
    for _ in range(steps):
        size = np.hypot(now, 2 * sigma)
        left, right = (size + now) / 2, (size - now) / 2
        i, j = left.argmax(), right.argmax()
        moved = 4 * rho**2 * time / steps
        fall, rise = moved * left[i], moved * right[j]
        now[i] -= fall
        now[j] += rise
    return now


@problems.defined
def sharpest_decay(rho: float, rate: float = 0.0, size: float = 0.0) -> float:
    """Computes the rate at which normalised SAM lowers log |D| of the sharpest mode at a minimum.

        4 rho^2 (1 + 2 rate size)

    per unit of time (steps times rate), up to terms of fourth order in rho and of second in the
    rate. The iterates oscillate along the sharpest direction. There, r alternates in sign, and
    SAM's ascent of length rho adds rho sqrt(size) to |r|. Other modes do not move and keep their D.
    The mode is the sharpest as long as its size is the largest a_i^2 + b_j^2.

    Args:
      rho: The length of SAM's ascent, finite and >= 0.
      rate: Learning rate, >= 0.
      size: a^2 + b^2 of the mode, >= 0.

    Returns:
      The rate of decay.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(sharpest_decay(0.1), 3)
    0.04
    """
    _check_rho(rho)
    for name, value in (("rate", rate), ("size", size)):
        problems.check(name, value, lambda x: (x >= 0) & (x < np.inf), "finite and >= 0")
    return 4 * rho**2 * (1 + 2 * rate * size)


def _check_rho(rho: float) -> None:
    problems.check("rho", rho, lambda r: (r >= 0) & (r < np.inf), "finite and >= 0")
