"""Problems on which the bounds of Lemmas A.15 to A.28 of overtrained are attacked.

Both sides are written out here for small layers; `again` uses the networks of the claims.
"""

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from theory.adversary import Box, Domain
from theory.two_layer import networks
from theory.two_layer.layers import Layers, ideal

# --- one step (A.15, A.16, A.18) -----------------------------------------------------------------


def _top(matrix: Any) -> Any:
    """The operator norm of a 2 x 2 matrix, smooth but where its singular values meet."""
    square = jnp.sum(matrix**2)
    det = matrix[0, 0] * matrix[1, 1] - matrix[0, 1] * matrix[1, 0]
    return jnp.sqrt((square + jnp.sqrt(jnp.maximum(square**2 - 4 * det**2, 1e-30))) / 2)


def _within(matrix: Any, radius: float) -> Any:
    """The matrix, shrunk to an operator norm of at most `radius`."""
    return matrix * radius / jnp.maximum(_top(matrix), radius)


def _symmetric(matrix: Any) -> Any:
    """Its symmetric part, of operator norm 1."""
    half = matrix + matrix.T
    return half / _top(half)


def _deviating(p: Any) -> tuple[Any, Any, Any, Any]:
    """Layers of norm <= 2, a target of norm <= 1 and the direction in which a batch is off."""
    first, second = _within(p["w1"], 2.0), _within(p["w2"], 2.0)
    return first, second, _within(p["target"], 1.0), _symmetric(p["batch"])


def _deviation(constant: float, p: Any) -> Any:
    """Of one step of rate 1 with the batch from that with all data, eps = Gamma = 1."""
    w1, w2, target, off = _deviating(p)
    wrong = (w1 @ w2 - target) @ off
    return 2 * jnp.maximum(_top(wrong @ w2.T), _top(w1.T @ wrong)) / constant


def _deviation_again(constant: float, p: Any, eps: float = 0.5) -> float:
    """By autodiff of the loss of a batch with that covariance."""
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


def _moved(p: Any) -> tuple[Layers, Layers, Any, Any]:
    """Layers of norm <= 2, the direction of their difference, the target and the anchored map."""
    layers = Layers(_within(p["w1"], 2.0), _within(p["w2"], 2.0))
    way = Layers(p["v1"], p["v2"])
    size = jnp.maximum(_top(way.w1), _top(way.w2))
    anchored = _within(p["anchored"], 1.0)
    return layers, Layers(way.w1 / size, way.w2 / size), _within(p["target"], 1.0), anchored


def _stepped(layers: Layers, target: Any, anchored: Any, p: Any) -> Layers:
    """One step, Sigma_k = I, written out."""
    rate, anchor = p["rate"], p["anchor"]
    pull = layers.w1 @ layers.w2 - target + anchor * (layers.w1 @ layers.w2 - anchored)
    first = layers.w1 - 2 * rate * pull @ layers.w2.T
    return Layers(first, layers.w2 - 2 * rate * layers.w1.T @ pull)


def _growth(bound: Callable[[Any], Any], p: Any) -> Any:
    """Of a small difference of two networks in one step, less 1, beside a bound of it: without
    the 1 the bound would be attained by steps that are small."""
    layers, way, target, anchored = _moved(p)
    _, change = jax.jvp(lambda at: _stepped(at, target, anchored, p), (layers,), (way,))
    return (jnp.maximum(_top(change.w1), _top(change.w2)) - 1) / bound(p)


def _growth_again(bound: Callable[[Any], Any], p: Any, apart: float = 1e-6) -> float:
    """By gradient descent of two networks that are apart, both inside of the ball."""
    layers, way, target, anchored = _moved(p)
    shrunk = Layers(*((1 - apart) * w for w in layers))
    ends = []
    for near in (0.0, apart):
        w = Layers(*(a + near * v for a, v in zip(shrunk, way, strict=True)))
        slope = jax.grad(networks.objective)(w, target, p["anchor"], anchored)
        ends.append([np.asarray(a - p["rate"] * g) for a, g in zip(w, slope, strict=True)])
    gaps = [np.linalg.norm(a - b, 2) for a, b in zip(*ends, strict=True)]
    return float(max(gaps) / apart - 1) / float(bound(p))


def _corrected(p: Any) -> Any:
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


# --- many steps from ideal starts (A.17) ----------------------------------------------------------

RUN = 12  # steps
TINY = 1e-6  # |Sigma_k - I|


def _run(p: Any) -> tuple[Any, Any, Any, Any]:
    """The start, the target and the batches' directions of a run, and Gamma."""
    start, target = jnp.diag(jnp.sqrt(p["pre"])), jnp.diag(p["ft"])
    off = jax.vmap(_symmetric)(p["batches"])
    return start, target, off, jnp.maximum(p["pre"].max(), p["ft"].max())


def _drift(bound: Callable[[Any, Any], Any], p: Any) -> Any:
    """Of the run with batches from that with all data, per unit of eps, to first order."""
    start, target, off, size = _run(p)

    def end(eps: Any) -> Layers:
        def step(w: Layers, s: Any) -> tuple[Layers, None]:
            theta = w.w1 @ w.w2
            pull = (theta - target) @ (jnp.eye(2) + eps * s) + p["anchor"] * (theta - start**2)
            first = w.w1 - 2 * p["rate"] * pull @ w.w2.T
            return Layers(first, w.w2 - 2 * p["rate"] * w.w1.T @ pull), None

        return jax.lax.scan(step, Layers(start, start), off)[0]

    _, drift = jax.jvp(end, (0.0,), (1.0,))
    return jnp.maximum(_top(drift.w1), _top(drift.w2)) / bound(p, size)


def _drift_again(bound: Callable[[Any, Any], Any], p: Any) -> float:
    """By stochastic gradient descent with two inputs a batch."""
    _, target, off, size = _run(p)
    start = ideal(jnp.diag(jnp.asarray(p["pre"])), 2)
    values, vectors = np.linalg.eigh(np.eye(2) + TINY * np.asarray(off))
    x = sqrt(2) * np.sqrt(values)[:, :, None] * vectors.swapaxes(1, 2)
    plain = np.broadcast_to(sqrt(2) * np.eye(2), x.shape)
    ends = [
        networks.sgd(start, target, jnp.asarray(batches), p["rate"], anchor=p["anchor"])
        for batches in (x, plain)
    ]
    gaps = [np.linalg.norm(np.asarray(a - b), 2) for a, b in zip(*ends, strict=True)]
    return float(max(gaps)) / TINY / float(bound(p, size))


def _drift_printed(p: Any, size: Any) -> Any:
    return 2 * (1 + 16 * p["rate"] * size) ** RUN * jnp.sqrt(size)


def _drift_corrected(p: Any, size: Any) -> Any:
    growth = 26 * (1 + p["anchor"])
    return 20 / growth * ((1 + growth * p["rate"] * size) ** RUN - 1) * jnp.sqrt(size)


def batches(corrected: bool) -> Domain:
    """Returns the problems of Lemma A.17.

    Args:
      corrected: Whether the bound is the corrected one.

    Returns:
      The domain.
    """
    bound = _drift_corrected if corrected else _drift_printed
    return Domain(
        f"d = 2, ideal starts, {RUN} steps, any small ϵ, 4η(λ+2)Γ < 1",
        {
            "pre": Box(0.01, 3.0, (2,)),
            "ft": Box(0.01, 3.0, (2,)),
            "batches": Box(-1.0, 1.0, (RUN, 2, 2)),
            "rate": Box(1e-4, 0.12, log=True),
            "anchor": Box(0.0, 10.0),
        },
        partial(_drift, bound),
        partial(_drift_again, bound),
        allowed=lambda p: (
            1 - 4 * p["rate"] * (p["anchor"] + 2) * jnp.maximum(p["pre"].max(), p["ft"].max())
        ),
    )


# --- the recursion of one mode (A.21, A.28) -------------------------------------------------------

FEW = 5  # steps


def _end(p: Any, steps: int) -> tuple[Any, Any]:
    """The layers' mode after some steps, and its limit."""
    pre, ft, rate, anchor = (p[name] for name in ("pre", "ft", "rate", "anchor"))
    x = pre**0.5
    for _ in range(steps):
        x = x + 2 * rate * x * (ft - x**2 + anchor * (pre - x**2))
    return x, ((ft + anchor * pre) / (1 + anchor)) ** 0.5


def _contracted(factor: Callable[[Any], Any], p: Any) -> Any:
    """The share by which a step must bring the mode nearer beside that by which steps do."""
    x, limit = _end(p, FEW)
    left = jnp.abs(x - limit) / jnp.abs(p["pre"] ** 0.5 - limit)
    least = factor(p) * p["rate"] * jnp.minimum(p["pre"], p["ft"])
    return least / (1 - left ** (1 / FEW))


def _contracted_again(factor: Callable[[Any], Any], p: Any) -> float:
    """By gradient descent of a network of one unit."""
    one = jnp.ones((1, 1))
    start = Layers(*(float(p["pre"]) ** 0.5 * one for _ in range(2)))
    options = {"anchor": float(p["anchor"]), "anchored_to": float(p["pre"]) * one, "every": FEW}
    path = networks.descend(start, float(p["ft"]) * one, float(p["rate"]), FEW, **options)
    x, limit = float(path.w1[-1, 0, 0]), float(_end(p, 0)[1])
    left = abs(x - limit) / abs(p["pre"] ** 0.5 - limit)
    return float(factor(p) * p["rate"] * min(p["pre"], p["ft"])) / (1 - left ** (1 / FEW))


def contraction(ours: bool) -> Domain:
    """Returns the problems of the rate of Lemma A.28.

    Args:
      ours: Whether the bound is the sharper one.

    Returns:
      The domain.
    """
    factor = (lambda p: 4 * (1 + p["anchor"])) if ours else (lambda p: 2.0)
    return Domain(
        f"one mode, {FEW} steps, 4η(λ+2)Γ < 1, σ_0² and σ² apart by 1 % or more",
        {
            "pre": Box(0.01, 3.0),
            "ft": Box(0.01, 3.0),
            "rate": Box(1e-4, 0.12, log=True),
            "anchor": Box(0.0, 10.0),
        },
        partial(_contracted, factor),
        partial(_contracted_again, factor),
        allowed=lambda p: jnp.minimum(
            1 - 4 * p["rate"] * (p["anchor"] + 2) * jnp.maximum(p["pre"], p["ft"]),
            jnp.abs(p["pre"] / p["ft"] - 1) - 0.01,
        ),
    )


def _steps_enough(p: Any) -> int:
    size = max(p["pre"], p["ft"])
    least = min(p["pre"], p["ft"])
    near = (p["pre"] - p["ft"]) ** 2 / ((1 + p["anchor"]) ** 2 * size)
    epsilon = p["share"] * near / (4000 * size)
    pace = 4 * p["rate"] * (1 + p["anchor"]) * least
    return int(np.ceil(np.log(100 * size / epsilon) / pace))


def _left(p: Any) -> float:
    """The distance that is left after as many steps as asked for, beside the precision."""
    x, limit = _end(p, _steps_enough(p))
    near = (p["pre"] - p["ft"]) ** 2 / ((1 + p["anchor"]) ** 2 * max(p["pre"], p["ft"]))
    return float(abs(x**2 - limit**2) / (near / 500))


def _left_again(p: Any) -> float:
    """In long double."""
    return _left({name: np.longdouble(value) for name, value in p.items()})


STEPS = Domain(
    "d = n = 1, λ_0 = λ, ϵ at most that of A.21, 4η(λ+2)Γ < 1, up to 20,000 steps",
    {
        "pre": Box(0.05, 3.0),
        "ft": Box(0.05, 3.0),
        "rate": Box(1e-2, 0.2, log=True),
        "anchor": Box(0.0, 5.0),
        "share": Box(1e-3, 1.0, log=True),
    },
    _left,
    _left_again,
    allowed=lambda p: min(
        1 - 4 * p["rate"] * (p["anchor"] + 2) * max(p["pre"], p["ft"]),
        abs(p["pre"] / p["ft"] - 1) - 0.01,
        1 - _steps_enough(p) / 20_000,
    ),
    smooth=False,
)
