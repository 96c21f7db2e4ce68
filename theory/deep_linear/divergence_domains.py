"""Problems on which the bounds of distances between two linear tasks are attacked.

A distance is a supremum over witnesses or an infimum over couplings. It is not computed; instead,
the search chooses the witness or the coupling as a part of the problem. Points are (x_1, x_2, y),
with x in the plane of the two tasks.
"""

from collections.abc import Callable
from itertools import product
from math import pi, sqrt
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erfc
from scipy import integrate, linalg, optimize, special

from theory.adversary import Box, Domain, Problem, quadrature
from theory.deep_linear import divergences

MEAN = sqrt(2 / pi)  # of |N(0, 1)|


def _factor(beta: Any, sigma: Any) -> Any:
    """Returns F with (x_1, x_2, y) = F z."""
    rows = [jnp.array([1.0, 0.0, 0.0]), jnp.array([0.0, 1.0, 0.0]), jnp.stack([*beta, sigma])]
    return jnp.stack(rows)


def _factors(p: Problem) -> list[Any]:
    return [_factor(p[name], p["sigma"]) for name in ("source", "target")]


def _covariances(p: Problem) -> list[np.ndarray]:
    """Returns F of both laws, in NumPy."""
    found = []
    for name in ("source", "target"):
        beta = np.asarray(p[name])
        size = beta @ beta + p["sigma"] ** 2
        found.append(np.block([[np.eye(2), beta[:, None]], [beta[None], np.array([[size]])]]))
    return found


def _unit(w: Any) -> Any:
    return w / jnp.sqrt(jnp.sum(w**2, -1, keepdims=True))


def _gain(p: Problem) -> Any:
    """Computes E_s h - E_t h for h = +-min(|w.z|, |w'.z|), w and w' of norm 1."""
    w, other = _unit(p["witness"])
    spreads = [
        jnp.sqrt(jnp.sum((F.T @ (w + other)) ** 2)) - jnp.sqrt(jnp.sum((F.T @ (w - other)) ** 2))
        for F in _factors(p)
    ]
    return MEAN / 2 * (spreads[0] - spreads[1])


def _gain_again(p: Problem) -> float:
    """Computes the same by quadrature of +-min(|a|, |b|) over the angle of normals a and b."""
    w = np.asarray(p["witness"]) / np.linalg.norm(p["witness"], axis=1, keepdims=True)
    angles = (np.arange(100_000) + 0.5) * 2 * pi / 100_000
    circle, found = np.stack([np.cos(angles), np.sin(angles)]), []
    for covariance in _covariances(p):
        joint = w @ covariance @ w.T
        values, basis = np.linalg.eigh(joint)
        a, b = basis * np.sqrt(np.maximum(values, 0)) @ circle
        # The mean radius of two normals is sqrt(pi / 2).
        found.append(sqrt(pi / 2) * np.mean(np.sign(a * b) * np.minimum(abs(a), abs(b))))
    return float(found[0] - found[1])


def _upper(p: Problem) -> Any:
    return divergences.wasserstein1_bounds(p["source"], p["target"], p["sigma"]).upper


def _mean_length_again(covariance: np.ndarray) -> float:
    """Computes E|v| of a normal v by quadrature over the sphere."""
    values, basis = np.linalg.eigh(covariance)
    root = basis * np.sqrt(np.maximum(values, 0))
    phi, (nodes, weights) = np.arange(400) * 2 * pi / 400, quadrature(200)
    height = 2 * nodes[:, None] - 1
    across = np.sqrt(1 - height**2)
    sphere = np.stack([across * np.cos(phi), across * np.sin(phi), height + 0 * phi])
    lengths = np.linalg.norm(np.einsum("ij,jkl->ikl", root, sphere), axis=0)
    # 2 MEAN is E|z| in three dimensions.
    return float(2 * MEAN * (weights @ lengths.mean(1)))


def _upper_again(p: Problem) -> float:
    """Computes the mean displacement of two couplings and takes the smaller one. One coupling
    shares x and the noise, and the other is optimal for W_2.
    """
    source, target = _covariances(p)
    root = np.real(linalg.sqrtm(source))
    inverse = np.linalg.inv(root)
    transport = inverse @ np.real(linalg.sqrtm(root @ target @ root)) @ inverse
    moved = np.eye(3) - transport
    shared = MEAN * np.linalg.norm(np.subtract(p["source"], p["target"]))
    return min(float(shared), _mean_length_again(moved @ source @ moved.T))


_TASKS = {
    "source": Box(-1.5, 1.5, (2,)),
    "target": Box(-1.5, 1.5, (2,)),
    "sigma": Box(0.02, 2.0, log=True),
}
_WITNESS = {"witness": Box(-1.0, 1.0, (2, 3))}


def _apart(p: Problem) -> Any:
    return jnp.sum((p["source"] - p["target"]) ** 2) - 0.01


UPPER = Domain(
    "two tasks of any norm, apart by .1 or more; witnesses ±min(|w·z|, |w'·z|)",
    _TASKS | _WITNESS,
    lambda p: jnp.abs(_gain(p)) / _upper(p),
    lambda p: abs(_gain_again(p)) / _upper_again(p),
    allowed=_apart,
)


def _turned(angles: Any) -> Any:
    """Returns a rotation in three dimensions by Euler's angles."""
    found = jnp.eye(3)
    for angle, (i, j) in zip(angles, ((0, 1), (1, 2), (0, 1)), strict=True):
        c, s = jnp.cos(angle) - 1, jnp.sin(angle)
        plane = jnp.zeros((3, 3)).at[jnp.array([i, j]), jnp.array([i, j])].set(c)
        found = found @ (jnp.eye(3) + plane.at[i, j].set(-s).at[j, i].set(s))
    return found


def _cost(p: Problem) -> Any:
    """Computes E|F_s z - F_t Q z|, the mean displacement of the coupling by the rotation Q.

    It integrates E sqrt(X) = int (1 - E exp(-r^2 X)) dr / (r^2 sqrt(pi)) over r = e^x by the
    trapezoidal rule.
    """
    source, target = _factors(p)
    moved = source - target @ _turned(p["turn"])
    A = moved @ moved.T
    size = jnp.trace(A)
    A = A / size
    second = (1 - jnp.sum(A * A)) / 2
    third = A[0] @ jnp.cross(A[1], A[2])
    x = jnp.arange(-24.0, 24.0, 0.25)
    t = 2 * jnp.exp(2 * x)
    missing = -jnp.expm1(-jnp.log1p(t + second * t**2 + third * t**3) / 2)
    return jnp.sqrt(size / pi) * 0.25 * jnp.sum(missing * jnp.exp(-x))


def _cost_again(p: Problem) -> float:
    source, target = map(np.asarray, _factors(p))
    moved = source - target @ np.asarray(_turned(p["turn"]))
    return _mean_length_again(moved @ moved.T)


def _lower(p: Problem) -> Any:
    return divergences.wasserstein1_bounds(p["source"], p["target"], p["sigma"]).lower


def _lower_again(p: Problem) -> float:
    """Computes the same from both spreads, in coordinates along the tasks' difference."""
    delta = np.subtract(p["source"], p["target"])
    along = delta / np.linalg.norm(delta)
    frame = np.array([[*along, 0.0], [-along[1], along[0], 0.0], [0.0, 0.0, 1.0]])
    source, target = (frame @ c @ frame.T for c in _covariances(p))
    angles = np.linspace(-pi / 2, pi / 2, 97)
    best = 0.0
    for first, second in product(angles, angles):
        w = np.array([np.cos(first), 0.0, np.sin(first)])
        other = np.array([0.0, np.cos(second), np.sin(second)])
        spreads = [[np.sqrt(a @ c @ a) for c in (source, target)] for a in (w + other, w - other)]
        best = max(best, abs(spreads[0][0] - spreads[0][1] - spreads[1][0] + spreads[1][1]) / 2)
    return float(MEAN * best)


LOWER = Domain(
    "two tasks of any norm, apart by .1 or more; couplings by any rotation of the noise",
    _TASKS | {"turn": Box(-pi, pi, (3,))},
    lambda p: _lower(p) / _cost(p),
    lambda p: _lower_again(p) / _cost_again(p),
    allowed=_apart,
)

REACH, AXIS = 2 * MEAN, 526.0


def _unit_tasks(of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Evaluates a ratio at tasks of norm 1 at an angle."""

    def computed(p: Problem) -> Any:
        one = jnp.ones_like(p["theta"])
        target = jnp.stack([jnp.cos(p["theta"]), jnp.sin(p["theta"])])
        return of({**p, "source": jnp.stack([one, 0 * one]), "target": target})

    return computed


_ANGLE = {"theta": Box(0.05, pi), "sigma": _TASKS["sigma"]}
REACHED = Domain(
    "two tasks of norm 1; witnesses ±min(|w·z|, |w'·z|)",
    _ANGLE | _WITNESS,
    _unit_tasks(lambda p: jnp.abs(_gain(p)) / REACH),
    _unit_tasks(lambda p: abs(_gain_again(p)) / REACH),
)
PLOTTED = Domain(
    "two tasks of norm 1; couplings by any rotation of the noise",
    _ANGLE | {"turn": Box(-pi, pi, (3,))},
    _unit_tasks(lambda p: AXIS / _cost(p)),
    _unit_tasks(lambda p: AXIS / _cost_again(p)),
)


def _clipped(spread: Any, clip: Any) -> Any:
    """Computes E min(|N(0, spread^2)|, clip)."""
    r = clip / (sqrt(2) * spread)
    return MEAN * spread * -jnp.expm1(-(r**2)) + clip * erfc(r)


def _clipped_again(spread: float, clip: float) -> float:
    def survival(x: float) -> float:
        return float(2 * special.ndtr(-x / spread))

    # The density beyond 9 deviations is negligible.
    end = min(clip, 9 * spread)
    return integrate.quad(survival, 0, end, epsabs=0, epsrel=1e-10)[0]


def _dudley_gain(p: Problem) -> Any:
    """Computes E_s h - E_t h of the witness h = M - min(L |a.z|, 2 M), M = 1 - L."""
    a, L = _unit(p["witness"]), p["slope"]
    spreads = [jnp.sqrt(jnp.sum((F.T @ a) ** 2)) for F in _factors(p)]
    means = [L * _clipped(s, 2 * (1 - L) / L) for s in spreads]
    return jnp.abs(means[0] - means[1])


def _dudley(p: Problem) -> Any:
    """Divides the witness by the bound max_L E min(L |delta.x|, 2 (1 - L))."""
    upper = divergences.dudley_bounds(p["source"], p["target"], p["sigma"]).upper
    return _dudley_gain(p) / upper


def _dudley_again(p: Problem) -> float:
    a, L = np.asarray(p["witness"]) / np.linalg.norm(p["witness"]), float(p["slope"])
    spreads = [sqrt(a @ c @ a) for c in _covariances(p)]
    means = [L * _clipped_again(s, 2 * (1 - L) / L) for s in spreads]
    return abs(means[0] - means[1]) / dudley_upper(p)


def dudley_upper(p: Problem) -> float:
    """Computes the bound of the Dudley metric by quadrature and search, in NumPy.

    Args:
      p: The tasks `source` and `target`, and `sigma`.

    Returns:
      The bound.
    """
    gap = float(np.linalg.norm(np.subtract(p["source"], p["target"])))

    def falling(log_slope: float) -> float:
        slope = float(np.exp(log_slope))
        return -slope * _clipped_again(gap, 2 * (1 - slope) / slope)

    optimum: Any = optimize.minimize_scalar(falling, bounds=(-25, -1e-9), method="bounded")
    shared = -float(optimum.fun)
    w1, tv = _upper_again(p), 2 / pi * np.arctan(gap / (2 * p["sigma"]))
    return float(min(shared, 2 * w1 * tv / (w1 + 2 * tv)))


def _far_apart(of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Evaluates a ratio at tasks a given distance apart, in some direction."""
    return lambda p: of({**p, "target": p["source"] + p["far"] * _unit(p["way"])})


DUDLEY = Domain(
    "two tasks of norms up to 1e6, apart by .1 or more; witnesses M - min(L|a·z|, 2M)",
    {
        "source": _TASKS["source"],
        "way": Box(-1.0, 1.0, (2,)),
        "far": Box(0.1, 1e6, log=True),
        "sigma": _TASKS["sigma"],
        "witness": Box(-1.0, 1.0, (3,)),
        "slope": Box(1e-6, 0.9, log=True),
    },
    _far_apart(_dudley),
    _far_apart(_dudley_again),
)

FAR, SLOPE, REACHED_DELTA = 1e6, 2e-4, 1.97


def _reach(p: Problem) -> Any:
    """Divides 1.97 by the value of the witness M - min(L |y|, 2 M) at |g| = 1e6."""
    near, far = (jnp.sqrt(size**2 + p["sigma"] ** 2) for size in (p["f"], FAR))
    means = [_clipped(s, 2 * (1 - SLOPE) / SLOPE) for s in (near, far)]
    return REACHED_DELTA / (SLOPE * (means[1] - means[0]))


def _reach_again(p: Problem) -> float:
    spreads = [float(np.hypot(size, p["sigma"])) for size in (p["f"], FAR)]
    means = [_clipped_again(s, 2 * (1 - SLOPE) / SLOPE) for s in spreads]
    return REACHED_DELTA / (SLOPE * (means[1] - means[0]))


DUDLEY_REACH = Domain(
    "|f| and σ up to 1.5, |g| = 1e6",
    {"f": Box(0.0, 1.5), "sigma": Box(0.0, 1.5)},
    _reach,
    _reach_again,
)


def _far_task(p: Problem) -> Any:
    """Returns a |g| that is large enough for delta: E|y| / sqrt(2/pi) is at least |g| at g, and at
    most |f| + σ at f.
    """
    return p["delta"] / MEAN + p["f"] + p["sigma"]


def _any_delta(p: Problem) -> Any:
    spreads = [jnp.sqrt(size**2 + p["sigma"] ** 2) for size in (_far_task(p), p["f"])]
    return p["delta"] / (MEAN * (spreads[0] - spreads[1]))


def _any_delta_again(p: Problem) -> float:
    sizes = [float(np.hypot(size, p["sigma"])) for size in (_far_task(p), p["f"])]
    means = [_clipped_again(size, 12 * size) for size in sizes]
    return float(p["delta"] / (means[0] - means[1]))


W1_REACH = Domain(
    "any δ from .1 to 1e4, |f| and σ from .01 to 3; g = -(√(π/2) δ + |f| + σ) f/|f|, h = |y|",
    {
        "delta": Box(0.1, 1e4, log=True),
        "f": Box(0.01, 3.0, log=True),
        "sigma": Box(0.01, 3.0, log=True),
    },
    _any_delta,
    _any_delta_again,
)
