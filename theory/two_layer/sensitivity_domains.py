"""Problems that attack the bounds of overtrained on the loss under noise and its curvature.

The loss is of degree two in each weight. Its mean under Gaussian noise is therefore its mean over
all signs of noise of that size, and its mean over the nodes of a Gaussian quadrature.
"""

from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from theory.adversary import Box, Domain, Problem
from theory.two_layer.planes import turn

# --- noise on layers that have learned n of two modes (Proposition 4.3, Theorem 4.4) --------------

TWO = 2
_ANGLE = Box(0.0, 6.3)


def _learned(p: Problem, n: int) -> tuple[Any, Any, Any]:
    """Returns layers that have learned the first n modes, and the target."""
    u, v, hidden = (turn(p[name]) for name in ("left", "right", "hidden"))
    root = jnp.sqrt(p["sigma"]) * (jnp.arange(TWO) < n)
    return (u * root) @ hidden, hidden.T @ (root[:, None] * v.T), (u * p["sigma"]) @ v.T


def _loss(w1: Any, w2: Any, target: Any) -> Any:
    return ((w1 @ w2 - target) ** 2).sum((-2, -1))


def _by_signs(p: Problem, n: int) -> tuple[Any, Any]:
    """Computes the loss with n modes and its increase by noise."""
    w1, w2, target = _learned(p, n)
    signs = jnp.array(list(product((-1.0, 1.0), repeat=2 * TWO**2))).reshape(-1, 2, TWO, TWO)
    noisy = _loss(w1 + p["gamma"] * signs[:, 0], w2 + p["gamma"] * signs[:, 1], target)
    loss = _loss(w1, w2, target)
    return loss, noisy.mean() - loss


def _by_quadrature(p: Problem, n: int) -> tuple[Any, Any]:
    """Computes the same by three nodes for each weight, in NumPy."""
    w1, w2, target = (np.asarray(x) for x in _learned(p, n))
    nodes, weights = np.polynomial.hermite_e.hermegauss(3)
    weights = weights / weights.sum()
    z = np.array(list(product(nodes, repeat=2 * TWO**2))).reshape(-1, 2, TWO, TWO)
    chance = np.prod(list(product(weights, repeat=2 * TWO**2)), 1)
    noisy = _loss(w1 + p["gamma"] * z[:, 0], w2 + p["gamma"] * z[:, 1], target)
    loss = _loss(w1, w2, target)
    return loss, chance @ noisy - loss


def _change(raised: Any, p: Problem) -> tuple[Any, Any]:
    """Computes the decrease of the loss by the last mode, and of the noise term's increase."""
    (more, noisy), (fewer, less_noisy) = (raised(p, n) for n in (TWO, TWO - 1))
    return fewer - more, noisy - less_noisy


def _increment(raised: Any, fall: bool, p: Problem) -> Any:
    lowered, rise = _change(raised, p)
    sigma = p["sigma"][TWO - 1]
    bound = (2 * TWO * p["gamma"] ** 2 - (sigma if fall else 0.0)) * sigma
    return (bound + lowered) / rise


_MODES = {
    "sigma": Box(0.05, 3.0, (TWO,)),
    "gamma": Box(0.1, 2.0, log=True),
    **dict.fromkeys(("left", "right", "hidden"), _ANGLE),
}
INCREMENT = Domain(
    "d = n = 2, any singular vectors; both sides and the fall of the loss without noise",
    _MODES,
    partial(_increment, _by_signs, True),
    partial(_increment, _by_quadrature, True),
    without={"-σ_n²": partial(_increment, _by_signs, False)},
)


def _harmful(raised: Any, p: Problem) -> Any:
    lowered, rise = _change(raised, p)
    return lowered / rise


HARMFUL = Domain(
    "d = n = 2, γ² ≥ σ_d/d; the fall of the loss relative to the rise of the noise term",
    _MODES,
    partial(_harmful, _by_signs),
    partial(_harmful, _by_quadrature),
    allowed=lambda p: p["gamma"] ** 2 - p["sigma"][TWO - 1] / TWO,
)

# --- real starts (Assumption A.2, Lemma A.6) ------------------------------------------------------

THREE = 3


def _radius(corrected: bool, p: Problem) -> Any:
    sigma, gamma2 = p["sigma"], p["gamma"] ** 2
    first, last = sigma.max(), sigma.min()
    if not corrected:
        bound = last**2 / (16 * THREE * first * (2 * first + gamma2))
        return jnp.minimum(jnp.minimum(first / 2, 0.25), bound)
    size, norm = jnp.sqrt(sigma.sum()), jnp.sqrt((sigma**2).sum())
    bound = last**2 / (size * (18 * norm + 12 * THREE * gamma2))
    return jnp.minimum(jnp.minimum(size, norm / (3 * size)), bound)


def _networks(corrected: bool, p: Problem) -> tuple[Any, Any]:
    """Returns the ideal layers of three modes, and others at the largest distance."""
    ideal = jnp.diag(jnp.sqrt(p["sigma"]))
    ways = (p[name] / jnp.sqrt((p[name] ** 2).sum()) for name in ("v1", "v2"))
    return jnp.stack([ideal, ideal]), jnp.stack(
        [ideal + _radius(corrected, p) * way for way in ways]
    )


def _noisy(p: Problem, layers: Any) -> Any:
    """Computes the mean loss under noise up to a constant, by second differences in each weight."""
    target, size = jnp.diag(p["sigma"]), 2 * THREE**2
    steps = p["gamma"] * jnp.eye(size).reshape(size, 2, THREE, THREE)
    up, down = (_loss(layers[0] + s[:, 0], layers[1] + s[:, 1], target) for s in (steps, -steps))
    plain = _loss(layers[0], layers[1], target)
    return plain + (up + down - 2 * plain).sum() / 2


def _gap(corrected: bool, p: Problem) -> Any:
    ideal, real = _networks(corrected, p)
    return jnp.abs(_noisy(p, real) - _noisy(p, ideal)) / (p["sigma"].min() ** 2 / 2)


def _gap_again(corrected: bool, p: Problem) -> float:
    """Computes the same by all signs of the noise on one layer, and the variance from the other."""
    target, gamma = np.diag(p["sigma"]), float(p["gamma"])
    signs = np.array(list(product((-1.0, 1.0), repeat=THREE**2))).reshape(-1, THREE, THREE)
    means = []
    for w1, w2 in (np.asarray(pair) for pair in _networks(corrected, p)):
        second = w2 + gamma * signs
        means.append(
            np.mean(_loss(w1, second, target) + gamma**2 * THREE * (second**2).sum((1, 2)))
        )
    return float(abs(means[1] - means[0]) / (min(p["sigma"]) ** 2 / 2))


def real_starts(corrected: bool) -> Domain:
    """Returns the problems of Lemma A.6.

    Args:
      corrected: Whether the radius is the corrected one.

    Returns:
      The domain.
    """
    return Domain(
        "d = n = 3, layers at the edge of the ball around the ideal ones",
        {
            "sigma": Box(0.01, 3.0, (THREE,), log=True),
            "gamma": Box(0.05, 20.0, log=True),
            **dict.fromkeys(("v1", "v2"), Box(-1.0, 1.0, (THREE, THREE))),
        },
        partial(_gap, corrected),
        partial(_gap_again, corrected),
    )


# --- the trace of the Hessian (Appendix D) --------------------------------------------------------

SPANS, EVERY = 12, 3  # steps of Runge and Kutta, in all and between two times


def _speed(layers: Any, target: Any) -> Any:
    w1, w2 = layers
    off = w1 @ w2 - target
    return jnp.stack([-2 * off @ w2.T, -2 * w1.T @ off])


def _symmetric(p: Problem) -> Any:
    u = turn(p["left"])
    return (u * p["sigma"]) @ u.T


def _path(p: Problem) -> Any:
    """Computes networks along gradient flow from a multiple of the identity."""
    start, target = jnp.stack([jnp.eye(TWO)] * 2) * jnp.exp(-p["tau"]), _symmetric(p)
    h = p["time"] / SPANS

    def step(w: Any, _: None) -> tuple[Any, Any]:
        a = _speed(w, target)
        b = _speed(w + h / 2 * a, target)
        c = _speed(w + h / 2 * b, target)
        d = _speed(w + h * c, target)
        w = w + h / 6 * (a + 2 * b + 2 * c + d)
        return w, w

    return jnp.concatenate([start[None], jax.lax.scan(step, start, None, SPANS)[1]])


def _curvature(layers: Any, target: Any) -> Any:
    """Computes the trace of the Hessian by the second difference in each weight."""
    size = 2 * TWO**2
    steps = jnp.eye(size).reshape(size, 2, TWO, TWO)
    up, down = (_loss(layers[0] + s[:, 0], layers[1] + s[:, 1], target) for s in (steps, -steps))
    return (up + down - 2 * _loss(layers[0], layers[1], target)).sum()


def _sharpened(p: Problem) -> Any:
    """Computes the largest ratio of the trace at neighbouring times, earlier to later."""
    traces = jax.vmap(lambda layers: _curvature(layers, _symmetric(p)))(_path(p)[::EVERY])
    return (traces[:-1] / traces[1:]).max()


def _sharpened_again(p: Problem) -> float:
    """Computes the same by a scheme of SciPy, and the Hessian by autodiff."""
    from scipy.integrate import solve_ivp

    target = np.asarray(_symmetric(p))

    def speed(_: float, flat: np.ndarray) -> np.ndarray:
        w1, w2 = flat.reshape(2, TWO, TWO)
        off = w1 @ w2 - target
        return -2 * np.concatenate([(off @ w2.T).ravel(), (w1.T @ off).ravel()])

    start = np.concatenate([np.eye(TWO).ravel()] * 2) * np.exp(-p["tau"])
    times = np.linspace(0.0, float(p["time"]), SPANS // EVERY + 1)
    path = solve_ivp(speed, times[[0, -1]], start, "DOP853", times, rtol=1e-10, atol=1e-12).y.T

    def loss(flat: Any) -> Any:
        w1, w2 = flat.reshape(2, TWO, TWO)
        return _loss(w1, w2, target)

    curvature = jax.jit(lambda flat: jnp.trace(jax.hessian(loss)(flat)))
    traces = np.array([curvature(jnp.asarray(flat)) for flat in path])
    return float((traces[:-1] / traces[1:]).max())


SHARPENING = Domain(
    f"d = 2, U = V, starts e^(-τ)I, σ_d ≥ e^(-2τ), {SPANS // EVERY} spans of time",
    {
        "sigma": Box(0.05, 3.0, (TWO,)),
        "left": _ANGLE,
        "tau": Box(0.5, 4.0),
        "time": Box(0.05, 0.6, log=True),
    },
    _sharpened,
    _sharpened_again,
    allowed=lambda p: p["sigma"].min() - jnp.exp(-2 * p["tau"]),
)
