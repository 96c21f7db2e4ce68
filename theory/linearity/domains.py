"""Problems on which the bounds of cross-task linearity are attacked.

They are polynomials of degree three in two parameters, and logits of two classes.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from theory.adversary import Box, Domain
from theory.linearity import bounds, networks

POWERS = ((2, 0), (1, 1), (0, 2), (3, 0), (2, 1), (1, 2), (0, 3))


def _polynomial(theta: Any, coefficients: Any) -> Any:
    terms = [theta[0] ** i * theta[1] ** j for i, j in POWERS]
    return sum(c * term for c, term in zip(coefficients, terms, strict=True))


def _hessian(theta: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """By the rules of powers, in NumPy."""
    found, (x, y) = np.zeros((2, 2)), theta
    for c, (i, j) in zip(coefficients, POWERS, strict=True):
        found[0, 0] += c * i * (i - 1) * x ** max(i - 2, 0) * y**j
        found[1, 1] += c * j * (j - 1) * x**i * y ** max(j - 2, 0)
        found[0, 1] += c * i * j * x ** max(i - 1, 0) * y ** max(j - 1, 0)
    found[1, 0] = found[0, 1]
    return found


def _weights(p: Any) -> Any:
    return jnp.stack([p["share"], 1 - p["share"]])


def _gap(p: Any) -> Any:
    return jnp.abs(networks.gap(_polynomial, p["models"], _weights(p), p["coefficients"]))


def _supremum(p: Any) -> Any:
    bound = bounds.supremum_bound(_polynomial, p["models"], _weights(p), p["coefficients"], nodes=4)
    return _gap(p) / bound


def _gap_again(p: Any) -> tuple[float, np.ndarray, np.ndarray]:
    a, models = np.array([p["share"], 1 - p["share"]]), np.asarray(p["models"])
    middle = a @ models
    values = [_polynomial(theta, p["coefficients"]) for theta in (middle, *models)]
    return abs(values[0] - a @ values[1:]), a, middle


def _supremum_again(p: Any) -> float:
    """The supremum over 1,001 places of each segment."""
    gap, a, middle = _gap_again(p)
    bound = 0.0
    for weight, theta in zip(a, np.asarray(p["models"]), strict=True):
        places = (middle + t * (theta - middle) for t in np.linspace(0, 1, 1001))
        norms = (np.linalg.norm(_hessian(at, p["coefficients"]), 2) for at in places)
        bound += weight * np.sum((theta - middle) ** 2) * max(norms) / 2
    return gap / bound


BOXES = {
    "models": Box(-2.0, 2.0, (2, 2)),
    "coefficients": Box(-1.0, 1.0, (len(POWERS),)),
    "share": Box(0.02, 0.98),
}
_APART = "models apart by .1 or more"


def _apart(p: Any) -> Any:
    return jnp.sum((p["models"][0] - p["models"][1]) ** 2) - 0.01


SUPREMUM = Domain(
    f"polynomials of degree 3 in 2 parameters, {_APART}",
    BOXES,
    _supremum,
    _supremum_again,
    allowed=_apart,
)


def _third(coefficients: Any) -> Any:
    """The Frobenius norm of D^3 f, no less than its largest value along a unit vector."""
    xxx, xxy, xyy, yyy = coefficients[3:]
    return jnp.sqrt(36 * xxx**2 + 12 * xxy**2 + 12 * xyy**2 + 36 * yyy**2)


def _taylor(p: Any, main: bool = True, rest: bool = True) -> Any:
    a, origin = _weights(p), p["origin"]
    norm = bounds.curvature(_polynomial, origin, p["coefficients"])
    first = bounds.main_term(norm, p["models"], a) if main else 0.0
    last = bounds.remainder(_third(p["coefficients"]), p["models"], a, origin) if rest else 0.0
    return _gap(p) / (first + last)


def _taylor_again(p: Any) -> float:
    """The bound as it is stated, in NumPy."""
    gap, a, middle = _gap_again(p)
    models, origin = np.asarray(p["models"]), np.asarray(p["origin"])
    first = np.linalg.norm(_hessian(origin, p["coefficients"]), 2) * a[0] * a[1] / 2
    far = [np.linalg.norm(theta - origin) ** 3 for theta in (middle, *models)]
    rest = float(_third(p["coefficients"])) / 6 * (far[0] + a @ far[1:])
    return float(gap / (first * np.sum((models[0] - models[1]) ** 2) + rest))


TAYLOR = Domain(
    f"polynomials of degree 3 in 2 parameters, any θ₀, {_APART}",
    {**BOXES, "origin": Box(-2.0, 2.0, (2,))},
    _taylor,
    _taylor_again,
    allowed=_apart,
    without={
        "the Hessian": partial(_taylor, main=False),
        "ℰ": partial(_taylor, rest=False),
    },
)


def _cross_entropy(logits: Any) -> Any:
    """Of one example of the first of two classes."""
    return jnp.logaddexp(0.0, logits[1] - logits[0])


def _loss(p: Any, members: bool = True, lipschitz: bool = True) -> Any:
    a = _weights(p)
    merged = _cross_entropy(a @ p["logits"] + p["gap"])
    losses = jax.vmap(_cross_entropy)(p["logits"])
    size = jnp.sqrt(jnp.sum(p["gap"] ** 2))
    steep = 2**0.5 if lipschitz else 0.0
    return merged / bounds.loss_bound(losses if members else 0 * losses, a, size, steep)


def _loss_again(p: Any) -> float:
    """By probabilities, in long double."""
    logits = np.asarray(p["logits"], np.longdouble)
    a = np.array([p["share"], 1 - p["share"]], np.longdouble)

    def loss(z: np.ndarray) -> np.longdouble:
        shifted = np.exp(z - z.max())
        return -np.log(shifted[0] / shifted.sum())

    bound = a @ np.array([loss(z) for z in logits]) + np.sqrt(2 * np.sum(p["gap"] ** 2))
    return float(loss(a @ logits + p["gap"]) / bound)


LOSS = Domain(
    "one example of two classes, logits up to 8, a gap of up to 60",
    {
        "logits": Box(-8.0, 8.0, (2, 2)),
        "gap": Box(-60.0, 60.0, (2,)),
        "share": Box(0.02, 0.98),
    },
    _loss,
    _loss_again,
    without={
        "Σ aᵢLᵢ": partial(_loss, members=False),
        "√2 |gap|": partial(_loss, lipschitz=False),
    },
)
