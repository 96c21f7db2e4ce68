"""Problems that attack the bounds of cross-task linearity.

They are polynomials of degree three in two parameters, logits of two classes, and linear models.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sail_jax import linalg
from theory.adversary import Box, Domain, Problem, Ratio
from theory.linearity import bounds, networks, trees

POWERS = ((2, 0), (1, 1), (0, 2), (3, 0), (2, 1), (1, 2), (0, 3))


def _polynomial(theta: Any, coefficients: Any) -> Any:
    terms = [theta[0] ** i * theta[1] ** j for i, j in POWERS]
    return sum(c * term for c, term in zip(coefficients, terms, strict=True))


def _hessian(theta: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """Computes derivatives by the power rule, in NumPy."""
    found, (x, y) = np.zeros((2, 2)), theta
    for c, (i, j) in zip(coefficients, POWERS, strict=True):
        found[0, 0] += c * i * (i - 1) * x ** max(i - 2, 0) * y**j
        found[1, 1] += c * j * (j - 1) * x**i * y ** max(j - 2, 0)
        found[0, 1] += c * i * j * x ** max(i - 1, 0) * y ** max(j - 1, 0)
    found[1, 0] = found[0, 1]
    return found


def _weights(p: Problem) -> Any:
    return jnp.stack([p["share"], 1 - p["share"]])


def _gap(p: Problem) -> Any:
    return jnp.abs(networks.gap(_polynomial, p["models"], _weights(p), p["coefficients"]))


def _supremum(p: Problem) -> Any:
    bound = bounds.supremum_bound(_polynomial, p["models"], _weights(p), p["coefficients"], nodes=4)
    return _gap(p) / bound


def _gap_again(p: Problem) -> tuple[float, np.ndarray, np.ndarray]:
    a, models = np.array([p["share"], 1 - p["share"]]), np.asarray(p["models"])
    middle = a @ models
    values = [_polynomial(theta, p["coefficients"]) for theta in (middle, *models)]
    return abs(values[0] - a @ values[1:]), a, middle


def _supremum_again(p: Problem) -> float:
    """Computes the supremum over 1,001 points of each segment."""
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


def _apart(p: Problem) -> Any:
    return jnp.sum((p["models"][0] - p["models"][1]) ** 2) - 0.01


SUPREMUM = Domain(
    f"polynomials of degree 3 in 2 parameters, {_APART}",
    BOXES,
    _supremum,
    _supremum_again,
    allowed=_apart,
)


def _of_cubes(ratio: Ratio) -> Ratio:
    """Evaluates a ratio at polynomials without squares, which have Hessian 0 at 0."""
    no_squares = [0.0, 0.0, 0.0]
    return lambda p: ratio({**p, "coefficients": [*no_squares, *p["cubes"]]})


SUPREMUM_CUBE = replace(
    SUPREMUM,
    problems=f"polynomials in 2 parameters of cubic terms alone, θ₀ = 0, {_APART}",
    boxes={"models": BOXES["models"], "cubes": Box(-1.0, 1.0, (4,)), "share": BOXES["share"]},
    ratio=_of_cubes(_supremum),
    again=_of_cubes(_supremum_again),
)


def _third(coefficients: Any) -> Any:
    """Computes the Frobenius norm of D^3 f, an upper bound along any unit vector."""
    xxx, xxy, xyy, yyy = coefficients[3:]
    return jnp.sqrt(36 * xxx**2 + 12 * xxy**2 + 12 * xyy**2 + 36 * yyy**2)


def _taylor(p: Problem, main: bool = True, rest: bool = True) -> Any:
    a, origin = _weights(p), p["origin"]
    norm = bounds.curvature(_polynomial, origin, p["coefficients"])
    first = bounds.main_term(norm, p["models"], a) if main else 0.0
    last = bounds.remainder(_third(p["coefficients"]), p["models"], a, origin) if rest else 0.0
    return _gap(p) / (first + last)


def _taylor_again(p: Problem) -> float:
    """Computes the bound as it is stated, in NumPy."""
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
    """Computes the cross-entropy of one example of the first of two classes."""
    return jnp.logaddexp(0.0, logits[1] - logits[0])


def _loss(p: Problem, members: bool = True, lipschitz: bool = True) -> Any:
    a = _weights(p)
    merged = _cross_entropy(a @ p["logits"] + p["gap"])
    losses = jax.vmap(_cross_entropy)(p["logits"])
    size = jnp.sqrt(jnp.sum(p["gap"] ** 2))
    steep = 2**0.5 if lipschitz else 0.0
    return merged / bounds.loss_bound(losses if members else 0 * losses, a, size, steep)


def _loss_again(p: Problem) -> float:
    """Computes the same by probabilities, in long double."""
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


def _growth(p: Problem) -> Any:
    """Divides the gap of all models by growth x the largest gap of a pair, merged one by one."""
    a, models, pairs = p["parts"] / jnp.sum(p["parts"]), p["models"], []
    middle, total, growth = models[0], a[0], 0.0
    for weight, theta in zip(a[1:], models[1:], strict=True):
        share = jnp.stack([total, weight]) / (total + weight)
        both = jnp.stack([middle, theta])
        pairs.append(jnp.abs(networks.gap(_polynomial, both, share, p["coefficients"])))
        middle, total = share @ both, total + weight
        growth += total
    whole = jnp.abs(networks.gap(_polynomial, models, a, p["coefficients"]))
    return whole / (growth * jnp.max(jnp.stack(pairs)))


def _growth_again(p: Problem) -> float:
    """Computes the same by sums over the models merged so far, with the growth of `trees`."""
    a, models = np.asarray(p["parts"]) / np.sum(p["parts"]), np.asarray(p["models"])
    means = [a[:k] @ models[:k] / a[:k].sum() for k in range(1, 4)]
    values = [float(_polynomial(theta, p["coefficients"])) for theta in models]
    at_means = [float(_polynomial(theta, p["coefficients"])) for theta in means]
    pairs = [
        abs(at_means[k] - (a[:k].sum() * at_means[k - 1] + a[k] * values[k]) / a[: k + 1].sum())
        for k in range(1, 3)
    ]
    growth = trees.growth(a, trees.chain(3))
    return abs(at_means[-1] - a @ values) / (growth * max(pairs))


GROWTH = Domain(
    "3 models of any weights merged one by one, polynomials of degree 3 in 2 parameters",
    {
        "models": Box(-2.0, 2.0, (3, 2)),
        "coefficients": BOXES["coefficients"],
        "parts": Box(0.05, 1.0, (3,)),
    },
    _growth,
    _growth_again,
)


def _readouts(p: Problem) -> tuple[Any, Any]:
    """Returns two linear models of equal loss, and the loss."""
    x, y = p["inputs"], p["labels"]
    (a, b), (_, d) = gram = x.T @ x
    turned = jnp.stack([jnp.stack([d, -b]), jnp.stack([-b, a])])
    least = turned @ (x.T @ y) / (a * d - b * gram[1][0])
    floor = jnp.mean((x @ least - y) ** 2)
    steps = jnp.sqrt(p["rise"] / jnp.mean((x @ p["away"].T) ** 2, 0))
    return least + steps[:, None] * p["away"], floor + p["rise"]


def _equal_losses(p: Problem) -> Any:
    both, level = _readouts(p)
    return jnp.mean((p["inputs"] @ (_weights(p) @ both) - p["labels"]) ** 2) / level


def _readouts_apart(p: Problem) -> Any:
    """Keeps the models separated, and the inputs away from a line."""
    (first, second), _ = _readouts(p)
    spread = linalg.det(p["inputs"].T @ p["inputs"])
    return jnp.minimum(spread, jnp.sum((first - second) ** 2)) - 0.01


def _equal_losses_again(p: Problem) -> float:
    """Computes the same by least squares in NumPy, at the larger loss of the two models."""
    x, y = np.asarray(p["inputs"]), np.asarray(p["labels"])
    least = np.linalg.lstsq(x, y)[0]
    both = []
    for way in np.asarray(p["away"]):
        both.append(least + way * np.sqrt(p["rise"] * len(y)) / np.linalg.norm(x @ way))
    losses = [np.square(x @ w - y).mean() for w in both]
    merged = p["share"] * both[0] + (1 - p["share"]) * both[1]
    return float(np.square(x @ merged - y).mean() / max(losses))


EQUAL_LOSSES = Domain(
    "linear models of 2 inputs on 3 examples, squared loss, two readouts of one loss, apart by .1",
    {
        "inputs": Box(-1.0, 1.0, (3, 2)),
        "labels": Box(-1.0, 1.0, (3,)),
        "away": Box(-1.0, 1.0, (2, 2)),
        "rise": Box(0.01, 1.0, log=True),
        "share": BOXES["share"],
    },
    _equal_losses,
    _equal_losses_again,
    allowed=_readouts_apart,
)


def _symmetric(p: Problem) -> Any:
    (a, b), c = p["diagonal"], p["between"]
    return jnp.stack([jnp.stack([a, c]), jnp.stack([c, b])])


def _extremes(p: Problem) -> tuple[Any, Any]:
    """Computes the smallest and the largest absolute value of the two eigenvalues."""
    (a, b), c = p["diagonal"], p["between"]
    half, root = jnp.abs(a + b) / 2, jnp.sqrt((a - b) ** 2 / 4 + c**2 + 1e-30)
    return jnp.abs(half - root), half + root


def _form(p: Problem) -> Any:
    return p["offset"] @ _symmetric(p) @ p["offset"]


def _least_form(p: Problem) -> Any:
    return _extremes(p)[0] * jnp.sum(p["offset"] ** 2) / _form(p)


def _largest_form(p: Problem) -> Any:
    return -_form(p) / (_extremes(p)[1] * jnp.sum(p["offset"] ** 2))


def _forms_again(printed: bool, p: Problem) -> float:
    (a, b), c, v = p["diagonal"], p["between"], np.asarray(p["offset"])
    form = a * v[0] ** 2 + 2 * c * v[0] * v[1] + b * v[1] ** 2
    sizes = np.linalg.svd(np.array([[a, c], [c, b]]), compute_uv=False) * (v @ v)
    return float(sizes[-1] / form if printed else -form / sizes[0])


FORM = Domain(
    "symmetric Hessians 2 x 2, any θ - θ₀ of length .1 or more",
    {"diagonal": Box(-2.0, 2.0, (2,)), "between": Box(-2.0, 2.0), "offset": Box(-1.0, 1.0, (2,))},
    _largest_form,
    partial(_forms_again, False),
    allowed=lambda p: jnp.sum(p["offset"] ** 2) - 0.01,
)
FORM_PRINTED = replace(FORM, ratio=_least_form, again=partial(_forms_again, True))
