"""Problems that attack Lemmas A.13 to A.18 of overtrained, on batches and single steps.

Both sides are written out here for small layers. `again` uses the networks of the claims.
"""

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from theory.adversary import Box, Domain, Problem, quadrature
from theory.two_layer import networks
from theory.two_layer.layers import Layers
from theory.two_layer.planes import symmetric, top, within

# --- one step (A.15, A.16, A.18) -----------------------------------------------------------------


def _deviating(p: Problem) -> tuple[Any, Any, Any, Any]:
    """Returns layers of norm <= 2, a target of norm <= 1 and the direction of a batch's error."""
    first, second = within(p["w1"], 2.0), within(p["w2"], 2.0)
    return first, second, within(p["target"], 1.0), symmetric(p["batch"])


def _deviation(constant: float, p: Problem) -> Any:
    """Computes the deviation of one step of rate 1 with a batch from the step with all data, eps =
    Gamma = 1.
    """
    w1, w2, target, off = _deviating(p)
    wrong = (w1 @ w2 - target) @ off
    return 2 * jnp.maximum(top(wrong @ w2.T), top(w1.T @ wrong)) / constant


def _deviation_again(constant: float, p: Problem, eps: float = 0.5) -> float:
    """Computes the same by autodiff of the loss of a batch with this covariance."""
    w1, w2, target, off = _deviating(p)
    values, vectors = np.linalg.eigh(np.eye(2) + eps * np.asarray(off))
    x = sqrt(2) * np.sqrt(values)[:, None] * vectors.T
    layers = Layers(w1, w2)
    noisy = jax.grad(networks.batch_objective)(layers, jnp.asarray(x), target, 0.0, target)
    exact = jax.grad(networks.objective)(layers, target, 0.0, target)
    size = max(np.linalg.norm(np.asarray(a - b), 2) for a, b in zip(noisy, exact, strict=True))
    return float(size) / (constant * eps)


MATRIX = Box(-2.0, 2.0, (2, 2))


def batch_step(constant: float) -> Domain:
    """Returns the problems of Lemma A.15.

    Args:
      constant: The bound is this times eta eps Gamma^(3/2).

    Returns:
      The domain.
    """
    return Domain(
        "2 x 2 layers of norm <= 2√Γ, |A| <= Γ, any batch",
        dict.fromkeys(("w1", "w2", "target", "batch"), MATRIX),
        partial(_deviation, constant),
        partial(_deviation_again, constant),
    )


def _moved(p: Problem) -> tuple[Layers, Layers, Any, Any]:
    """Returns layers of norm <= 2, the direction of their difference, the target and the anchored
    map.
    """
    layers = Layers(within(p["w1"], 2.0), within(p["w2"], 2.0))
    way = Layers(p["v1"], p["v2"])
    size = jnp.maximum(top(way.w1), top(way.w2))
    anchored = within(p["anchored"], 1.0)
    return layers, Layers(way.w1 / size, way.w2 / size), within(p["target"], 1.0), anchored


def _stepped(layers: Layers, target: Any, anchored: Any, p: Problem) -> Layers:
    """Makes one step with Sigma_k = I, written out."""
    rate, anchor = p["rate"], p["anchor"]
    pull = layers.w1 @ layers.w2 - target + anchor * (layers.w1 @ layers.w2 - anchored)
    first = layers.w1 - 2 * rate * pull @ layers.w2.T
    return Layers(first, layers.w2 - 2 * rate * layers.w1.T @ pull)


def _growth(bound: Callable[[Any], Any], p: Problem) -> Any:
    """Divides growth - 1 of a small difference of two networks in one step by its bound - 1.
    Without the 1 small steps would attain the bound.
    """
    layers, way, target, anchored = _moved(p)
    _, change = jax.jvp(lambda at: _stepped(at, target, anchored, p), (layers,), (way,))
    return (jnp.maximum(top(change.w1), top(change.w2)) - 1) / bound(p)


def _growth_again(bound: Callable[[Any], Any], p: Problem, apart: float = 1e-6) -> float:
    """Computes the same by gradient descent of two different networks inside of the ball."""
    layers, way, target, anchored = _moved(p)
    shrunk = Layers(*((1 - apart) * w for w in layers))
    ends = []
    for near in (0.0, apart):
        w = Layers(*(a + near * v for a, v in zip(shrunk, way, strict=True)))
        slope = jax.grad(networks.objective)(w, target, p["anchor"], anchored)
        ends.append([np.asarray(a - p["rate"] * g) for a, g in zip(w, slope, strict=True)])
    gaps = [np.linalg.norm(a - b, 2) for a, b in zip(*ends, strict=True)]
    return float(max(gaps) / apart - 1) / float(bound(p))


def _corrected(p: Problem) -> Any:
    return 26 * p["rate"] * (1 + p["anchor"])


def growth(constant: float | None = None) -> Domain:
    """Returns the problems of Lemmas A.16 and A.18, with batches as good as all data.

    Args:
      constant: c of the bound 1 + c eta Gamma as printed; None for the corrected bound.

    Returns:
      The domain.
    """
    bound = _corrected if constant is None else lambda p: constant * p["rate"]
    return Domain(
        "2 x 2 layers of norm <= 2√Γ, Γ = 1, |A|, |θ(0)| <= 1, 4η(λ+2) < 1",
        {
            **dict.fromkeys(("w1", "w2", "v1", "v2", "target", "anchored"), MATRIX),
            "rate": Box(1e-3, 0.12, log=True),
            "anchor": Box(0.0, 10.0),
        },
        partial(_growth, bound),
        partial(_growth_again, bound),
        allowed=lambda p: 1 - 4 * p["rate"] * (p["anchor"] + 2),
    )


# --- the size of a batch (A.13) -------------------------------------------------------------------

CONSTANT = 6.0  # C_1


def _batch_size(corrected: bool, p: Problem) -> int:
    """Returns the fewest samples that this lemma and Lemma A.12 allow."""
    steps, delta = int(p["steps"]), float(p["delta"])
    log = np.log(2 * steps / delta) if corrected else -np.log(10 * steps * delta)
    asked = CONSTANT**2 * (1 + log) / float(p["eps"]) ** 2
    return int(np.ceil(max(asked, 1 - np.log(delta))))


def _chance(single: float, p: Problem) -> float:
    """Divides the probability that some batch is off by the allowed one."""
    return float(-np.expm1(int(p["steps"]) * np.log1p(-single)) / p["delta"])


def _failing(corrected: bool, p: Problem) -> float:
    from scipy.special import gammainc, gammaincc

    half, eps = _batch_size(corrected, p) / 2, float(p["eps"])
    below = gammainc(half, half * (1 - eps)) if eps < 1 else 0.0
    return _chance(below + gammaincc(half, half * (1 + eps)), p)


def _failing_again(corrected: bool, p: Problem) -> float:
    """Computes the same by quadrature of the density of the mean square of normal numbers."""
    from scipy.integrate import quad
    from scipy.special import gammaln

    half, eps = _batch_size(corrected, p) / 2, float(p["eps"])

    def density(x: float) -> float:
        return float(
            np.exp(half * np.log(half) + (half - 1) * np.log(x) - half * x - gammaln(half))
        )

    far = 1 + eps + 60 / half + 60 / np.sqrt(half)
    above = quad(density, 1 + eps, far, limit=500, epsabs=0.0)[0]
    below = quad(density, 0.0, 1 - eps, limit=500, epsabs=0.0)[0] if eps < 1 else 0.0
    return _chance(above + below, p)


def batch_size(corrected: bool) -> Domain:
    """Returns the problems of Assumption A.13.

    Args:
      corrected: Whether the size is the corrected one.

    Returns:
      The domain.
    """
    return Domain(
        f"d = 1, C_1 = {CONSTANT:g}, m as small as allowed, and at least that of Lemma A.12",
        {
            "steps": Box(1, 1e5, log=True),
            "delta": Box(1e-3, 0.99, log=True),
            "eps": Box(0.2, 5.0, log=True),
        },
        partial(_failing, corrected),
        partial(_failing_again, corrected),
        smooth=False,
    )


# --- the law of a batch (A.12) --------------------------------------------------------------------

NODES, LEAST = 300, 1e-10  # of each quadrature; the least probability


def off_probability(batch: int, d: int, eps: float) -> float:
    """Bounds the probability that a batch of Gaussian inputs is off, |Sigma_k - I| > eps.

    The joint density of the eigenvalues of m Sigma_k has a factor |a - b| for each pair. If it is
    replaced by max(a, b) for the pairs of the largest one, or of the smallest one, the integral
    over all others is a constant.

    Args:
      batch: Batch size m, at least d.
      d: The dimension of the inputs.
      eps: The distance from the identity.

    Returns:
      The bound. It is exact for d = 1.

    References:
      Chen & Dongarra, Condition numbers of Gaussian random matrices, 2005.
    """
    from scipy.special import gammainc, gammaincc, gammaln

    more, fewer, unit = (batch + d - 1) / 2, (batch - d + 1) / 2, gammaln(0.5) - gammaln(d / 2)
    above = np.exp(unit + gammaln(more) - gammaln(batch / 2))
    below = np.exp(unit + gammaln((batch + 1) / 2) - gammaln(fewer + 0.5))
    low, high = batch / 2 * max(1 - eps, 0.0), batch / 2 * (1 + eps)
    return float(above * gammaincc(more, high) + below * gammainc(fewer, low))


def _bound(p: Problem) -> float:
    return off_probability(int(p["batch"]), 2, float(p["eps"]))


def _range(p: Problem) -> tuple[float, float, float]:
    """Returns m/2, and the range of half an eigenvalue of m Sigma_k that is not off."""
    half, eps = int(p["batch"]) / 2, float(p["eps"])
    return half, half * max(1 - eps, 0.0), half * (1 + eps)


def _off(p: Problem) -> float:
    """Integrates over the larger eigenvalue 2x. The smaller one is at most 2 min(x, y)."""
    from scipy.special import gammainc, gammaln

    (half, low, high), (nodes, weights) = _range(p), quadrature(NODES)
    order, far, off = half - 0.5, high + 10 * np.sqrt(high) + 60, 0.0
    for start, end, y in ((0.0, low, low), (low, high, low), (high, far, far)):
        x = np.maximum(start + (end - start) * nodes, 1e-300)
        smaller = [gammainc(order + i, np.minimum(x, y)) for i in range(2)]
        density = x ** (order - 1) * np.exp(-x) * (x * smaller[0] - order * smaller[1])
        off += (end - start) * weights @ density
    return float(np.exp(gammaln(0.5) - gammaln(half)) * off) / _bound(p)


def _off_again(p: Problem) -> float:
    """Computes the same from Bartlett's decomposition, of a chi-square 2x, a normal number z and
    another chi-square.
    """
    from scipy.special import gammainc, gammaincc, gammaln

    (half, low, high), (nodes, weights) = _range(p), quadrature(NODES)
    turn, z = np.pi / 2 * nodes, 12 * nodes**2  # which leave no singular ends
    x = low + (high - low) * np.sin(turn) ** 2
    measures = [(high - low) * np.sin(2 * turn) * np.pi / 2 * weights, 24 * nodes * weights]
    measures[0] *= np.exp((half - 1) * np.log(x) - x - gammaln(half))
    measures[1] *= np.exp(-(z**2) / 2) * sqrt(2 / np.pi)
    least = low * (1 + z**2 / 2 / (x - low)[:, None])
    most = np.maximum(high * (1 - z**2 / 2 / (high - x)[:, None]), 0.0)
    given = np.where(least < most, gammainc(half - 0.5, least) + gammaincc(half - 0.5, most), 1.0)
    inside = measures[0] @ given @ measures[1]
    return float(inside + gammainc(half, low) + gammaincc(half, high)) / _bound(p)


BATCH = Domain(
    f"d = 2, one batch of 2 to 50 inputs, probabilities of {LEAST:g} or more",
    {"batch": Box(2, 50, log=True), "eps": Box(0.2, 20.0, log=True)},
    _off,
    _off_again,
    allowed=lambda p: _bound(p) - LEAST,
    smooth=False,
)
