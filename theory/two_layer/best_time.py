"""Computes the best time to stop pre-training before noise, as a function of the spectrum's decay.

Springer et al., 2025 (arXiv 2503.19206), write after Proposition 4.3 that "smaller or more quickly
decaying features will induce a smaller inflection point". This holds for the number of modes, but
not for the time. Write gamma for the standard deviation of the noise and c = 2 d gamma^2, and let r
be the number of singular values above c. From a start e^{-tau} I, with tau -> inf and distinct
singular values, the best time is the turning time of mode r (`perturbation.turning_times`),

    log((sigma_r e^{2 tau} - 1) (2 sigma_r/c - 1)) / (4 sigma_r) ~ tau / (2 sigma_r) <= tau / (2 c).

While r is constant, a faster decay lowers sigma_r, and the best time increases. Where many modes
are learned at once, r is large compared with tau times the decay. The best time is then
`noise_time` for every decay. For U != V each mode is later (`mode_taus`). `best_time_of` accepts
any balanced start at finite tau. The proofs are in `docs/explanation/overtraining_further.md`.
"""

from collections.abc import Sequence

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float
from scipy.optimize import root_scalar
from scipy.special import expit, log_expit

from theory import problems
from theory.two_layer.layers import Layers, check_spectrum
from theory.two_layer.perturbation import check_gamma, perturbed_loss
from theory.two_layer.riccati import flow

# Log-odds of y / sigma in the grid of each mode, 4 per unit.
_ODDS = np.linspace(-16, 16, 129)
_TIMES, _ROUNDS = 129, 3  # of the grids of `best_time_of`


@problems.defined
def power_law_index(
    d: int, *, scale: float, decay: float, gamma: float, modes: int | None = None
) -> int:
    """Counts the modes that are worth learning for the spectrum sigma_i = scale i^-decay, under
    noise.

    It is the number of singular values above 2 d gamma^2, which for a decay > 0 is

        min(modes, ceil((scale / (2 d gamma^2))^(1/decay)) - 1).

    It decreases with the decay, the noise and the width, and increases with the scale. It equals
    `perturbation.inflection_index` with `first=0`, except that the latter returns None if all modes
    are worth learning.

    Args:
      d: Width of the square layers.
      scale: Largest singular value, > 0.
      decay: Exponent of their decay, > 0.
      gamma: Standard deviation of the noise, finite and >= 0.
      modes: Number of singular values, at most d. None is d.

    Returns:
      The number of modes.

    Raises:
      ValueError: If an argument is out of range.

    References:
      Springer et al., 2025 (arXiv 2503.19206), after Proposition 4.3.

    >>> [power_law_index(4, scale=2.0, decay=decay, gamma=0.35) for decay in (0.6, 1.0, 2.0)]
    [3, 2, 1]
    """
    check_gamma(gamma)
    modes = d if modes is None else modes
    problems.check("d", d, lambda n: n >= 1, ">= 1")
    problems.check("modes", modes, lambda n: (n >= 0) & (n <= d), f"a number in 0..{d}")
    for name, value in (("scale", scale), ("decay", decay)):
        problems.check(name, value, lambda x: (x > 0) & (x < np.inf), "finite and > 0")
    level = 2 * d * float(gamma) ** 2
    if level >= scale:
        return 0
    # In logarithms, because the power overflows for a small decay.
    count = np.log(scale / level) / decay if level > 0 else np.inf
    return modes if count >= np.log(modes + 1) else int(np.ceil(np.exp(count))) - 1


@problems.defined
def best_time(
    sigma: Sequence[float] | Float[ArrayLike, " modes"],
    d: int,
    gamma: float,
    tau: float | Float[ArrayLike, " modes"],
) -> float:
    """Computes the pre-training time with the smallest mean loss under noise, up to rounding.

    The network starts at e^{-tau} I, its target is symmetric, and it is trained by gradient flow.
    The mean loss under noise is a sum over modes,

        sum_i (y_i - sigma_i)^2 + 2 d gamma^2 y_i + constant,

    with y_i of `modes.mode`. The minimum is searched among the times at which one of the modes is
    being learned, and refined as a root of the derivative. With fewer singular values than d, the
    start has as many directions; the others would be forgotten, and matter less the larger tau is.

    Args:
      sigma: Singular values of the target, > 0 and descending, at most d of them.
      d: Width of the square layers.
      gamma: Standard deviation of the noise, finite and >= 0.
      tau: Negative logarithm of the scale of the start, or one for each mode (`mode_taus`). e^{-2
        tau} must be below all singular values.

    Returns:
      The time. It is inf without noise, and 0 if pre-training only increases the loss.

    Raises:
      ValueError: If an argument is out of range or the singular values are not descending.

    >>> [round(best_time([2.0, 1.0, 0.5], 3, gamma, 6.0), 2) for gamma in (0.2, 0.4, 0.7)]
    [6.23, 3.02, 1.46]
    """
    check_gamma(gamma)
    sigma = np.asarray(check_spectrum("sigma", sigma), float)
    tau = np.asarray(tau, float)
    problems.check("sigma", sigma, lambda s: s > np.exp(-2 * tau), "above e^(-2 tau)")
    if not d >= sigma.size:
        raise ValueError(f"d must be at least the number of modes, {sigma.size}; got {d}")
    half = d * float(gamma) ** 2
    if half == 0:
        return float("inf")
    start = _log_odds(sigma, tau)
    # A mode's log-odds grow as 4 sigma t.
    times = (_ODDS[:, None] - start) / (4 * sigma)
    times = np.unique(np.append(times[times > 0], 0.0))
    share = expit(start + 4 * sigma * times[:, None])
    losses = np.sum(sigma**2 * (share - 1) ** 2 + 2 * half * sigma * share, -1)
    least = int(losses.argmin())
    if least == 0:
        return 0.0

    def slope(time: float) -> float:
        odds = start + 4 * sigma * time
        moving = sigma**2 * np.exp(log_expit(odds) + log_expit(-odds))
        return float(np.sum(moving * (half - sigma * expit(-odds))))

    after = times[min(least + 1, times.size - 1)]
    return float(root_scalar(slope, bracket=(times[least - 1], after), rtol=1e-14).root)


@problems.defined
def noise_time(d: int, gamma: float, tau: float) -> float:
    """Computes the time at which a mode at the noise threshold c = 2 d gamma^2 is half learned.

        log(c e^{2 tau} - 1) / (4 c)

    It is the best time of a dense spectrum, for any decay. The modes that are being learned at
    a time t are all near tau / (2t). Their mean share turns where they are near c. For any spectrum
    with distinct singular values, one of them above c, the best time is at most this in the limit
    tau -> inf.

    Args:
      d: Width of the square layers.
      gamma: Standard deviation of the noise, finite and > 0.
      tau: Negative logarithm of the scale of the start. e^{-2 tau} must be below c.

    Returns:
      The time.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(noise_time(4, 0.35, 6.0), 3)
    3.056
    """
    check_gamma(gamma)
    level = 2 * d * float(gamma) ** 2
    problems.check("2 d gamma^2", level, lambda c: c > np.exp(-2 * tau), "above e^(-2 tau)")
    return float(_log_odds(np.array(level), tau) * -1 / (4 * level))


@problems.defined
def mode_taus(target: Float[ArrayLike, "d d"], tau: float) -> Float[np.ndarray, " d"]:
    """Computes the start of each mode for a target with U != V, where the start is e^{-tau} I.

        tau_i = tau - log(p_i) / 2

    p_i is the squared norm of (u_i + v_i)/2 minus its projections on the same vectors of larger
    modes. In the limit tau -> inf, for distinct singular values, mode i follows the law of an
    aligned start at e^{-tau_i}. It is delayed by log(1/p_i) / (4 sigma_i). The product of all p_i
    is det((U + V)/2)^2, so U = V is the fastest.

    Args:
      target: Target map A = U diag(sigma) V^T.
      tau: Negative logarithm of the scale of the start.

    Returns:
      tau_i, the largest singular value first. It is inf for modes that are never learned
      (`modes.learned_modes`).

    Raises:
      ValueError: If the target is not a square matrix.

    >>> turned = np.array([[0.0, -2.0], [1.0, 0.0]])
    >>> (mode_taus(turned, 6.0) - 6.0).round(3).tolist()
    [0.347, 0.347]
    """
    a = np.asarray(target, float)
    if a.ndim != 2 or a.shape[0] != a.shape[1]:
        raise ValueError(f"target must be a square matrix; got shape {a.shape}")
    problems.check_squares("target", a)
    u, _, vt = np.linalg.svd(a)
    left = np.abs(np.diag(np.linalg.qr((u + vt.T) / 2)[1]))
    never = left < a.shape[0] * 100 * np.finfo(float).eps
    return np.where(never, np.inf, tau - np.log(np.where(never, 1.0, left)))


@problems.defined
def best_time_of(start: Layers, target: Float[ArrayLike, "o i"], gamma: float, end: float) -> float:
    """Computes the best time for any balanced start and any target, at finite tau.

    The flow is `riccati.flow`, and the mean loss under noise `perturbation.perturbed_loss`. Both
    are exact. The time is found on increasingly fine grids.

    Args:
      start: Initial weights, balanced.
      target: Target map A `(o, i)`.
      gamma: Standard deviation of the noise, finite and >= 0.
      end: The last time of the search.

    Returns:
      The time, to about 1e-5 of `end`.

    Raises:
      ValueError: As `riccati.flow`.
    """
    check_gamma(gamma)
    problems.check("end", end, lambda t: (t > 0) & (t < np.inf), "finite and > 0")
    low, width = 0.0, float(end)
    for _ in range(_ROUNDS):
        # All rounds lead through as many times, of similar distances, so they share one program. A
        # later network of the path is no start: where the weights fade, it is not balanced enough.
        before = np.linspace(0.0, low, _TIMES, endpoint=False)
        path = flow(start, target, np.append(before, low + np.linspace(0.0, width, _TIMES)))
        losses = perturbed_loss(path.w1[_TIMES:], path.w2[_TIMES:], target, gamma)
        least = max(int(np.argmin(np.asarray(losses))) - 1, 0)
        low += least * width / (_TIMES - 1)
        width = min(2 * width / (_TIMES - 1), end - low)
    return low + width / 2


def _log_odds(sigma: np.ndarray | np.floating, tau: ArrayLike) -> np.ndarray | np.floating:
    """Computes log(y / (sigma - y)) at the start y = e^{-2 tau}."""
    log = np.log(sigma) + 2 * np.asarray(tau)
    # Computes log(e^log - 1) without overflow.
    return -(log + np.log1p(-np.exp(-log)))
