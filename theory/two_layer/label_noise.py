"""Label noise in the descent of aligned networks, and its drift towards balance.

Each step descends |W_1 W_2 - A - nu Xi|^2 at a rate eta, with new standard normal noise Xi on the
labels. One step changes the imbalance Delta = W_1^T W_1 - W_2 W_2^T by

    4 eta^2 (W_2 E^T E W_2^T - W_1^T E E^T W_1),  E = W_1 W_2 - A - nu Xi,

without any other term. Once the map has reached A, the mean of this is -4 eta^2 nu^2 d Delta, up to
higher orders in eta. Descent with label noise therefore lowers the imbalance, and with it the trace
of the Hessian. After rates eta_t, a fraction exp(-4 d nu^2 sum eta_t^2) of it remains. A decaying
schedule stops the drift and ends sharper than a constant rate. `drift` also includes the next
order.
"""

from collections.abc import Sequence

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

from theory import problems
from theory.two_layer.layers import check_spectrum


@problems.defined
def drift(
    imbalance: Sequence[float] | Float[ArrayLike, " d"],
    sigma: Sequence[float] | Float[ArrayLike, " d"],
    noise: float,
    rates: Sequence[float] | Float[ArrayLike, " steps"],
) -> Float[np.ndarray, "steps d"]:
    """Follows the imbalances a^2 - b^2 of all modes at a minimum, with label noise.

        D_k <- D_k - 4 eta^2 nu^2 (a_k^2 sum_j g_kj - b_k^2 sum_i g_ik)

    with ab = sigma in each mode. The entries of the error have the variances nu^2 g with g_ij =
    1/(1 - eta (a_i^2 + b_j^2)), from the noise of the step and of earlier steps.

    Args:
      imbalance: a^2 - b^2 of each mode at the start `(d,)`.
      sigma: Singular values of the target `(d,)`, descending.
      noise: Standard deviation nu of the label noise, finite and >= 0.
      rates: The learning rate of each step, >= 0 and below 1 / (a_i^2 + b_j^2) for all i and j.

    Returns:
      The mean imbalances after each step, up to higher orders in the rate.

    Raises:
      ValueError: If an argument is out of range.

    >>> drift([1.0], [1.0], 0.5, [0.01] * 1000)[-1].round(3).tolist()
    [0.903]
    """
    sigma = np.asarray(check_spectrum("sigma", sigma), float)
    problems.check("noise", noise, lambda x: (x >= 0) & (x < np.inf), "finite and >= 0")
    problems.check("rates", rates, lambda x: (x >= 0) & (x < np.inf), "finite and >= 0")
    now, path = np.asarray(imbalance, float), []
    if now.shape != sigma.shape:
        raise ValueError(f"imbalance must have the shape of sigma, {sigma.shape}; got {now.shape}")
    for rate in np.asarray(rates, float):
        size = np.hypot(now, 2 * sigma)
        left, right = (size + now) / 2, (size - now) / 2
        room = 1 - rate * (left[:, None] + right)
        if not (room > 0).all():
            raise ValueError(f"rates must be below {rate / (1 - room.min()):g}; got {rate:g}")
        step = left * np.sum(1 / room, 1) - right * np.sum(1 / room, 0)
        now = now - 4 * (rate * noise) ** 2 * step
        path.append(now)
    return np.array(path).reshape(-1, sigma.size)


@problems.defined
def annealing_rise(rate: float, noise: float, imbalance: float, sigma: float) -> float:
    """Computes the increase of a^2 + b^2 of a single mode by a decay to 0, for small noise.

        eta nu^2 / (1 - eta S) (8 sigma^2 - 2 D^2) / S^2,  S = sqrt(D^2 + 4 sigma^2)

    At a constant rate ab fluctuates with the variance eta S nu^2 / (1 - eta S) about a mean below
    sigma, and a^2 + b^2 = sqrt(D^2 + 4 (ab)^2). A decay ends both. It increases for a balanced
    mode, and decreases if D > 2 sigma.

    Args:
      rate: The learning rate eta before the decay, >= 0 and below 1 / S.
      noise: Standard deviation nu of the label noise, finite and >= 0.
      imbalance: D = a^2 - b^2.
      sigma: Singular value of the target, > 0.

    Returns:
      The increase of the mean of a^2 + b^2. The trace of the Hessian increases by twice as much.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(annealing_rise(0.01, 1.0, 0.0, 1.0), 5)
    0.02041
    """
    for name, value in (("rate", rate), ("noise", noise)):
        problems.check(name, value, lambda x: (x >= 0) & (x < np.inf), "finite and >= 0")
    problems.check("sigma", sigma, lambda s: (s > 0) & (s < np.inf), "finite and > 0")
    size = float(np.hypot(imbalance, 2 * sigma))
    problems.check("1 - rate S", 1 - rate * size, lambda x: x > 0, "> 0")
    shape = 8 * (sigma / size) ** 2 - 2 * (imbalance / size) ** 2
    return rate * noise**2 / (1 - rate * size) * shape
