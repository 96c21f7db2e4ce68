"""Problems on which the corrected bounds of unified-merging are attacked: quadratic tasks.

The ratio is that of closed forms; `again` follows the steps of the experts one by one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from theory.adversary import Box, Domain
from theory.merging.bounds import local_stability, surrogate_gradient
from theory.merging.quadratic import constants, exact
from theory.merging.tasks import QuadraticTasks

_constants = jax.jit(constants)
_LARGEST = 200  # steps


def _tasks(p: Any) -> QuadraticTasks:
    """Two tasks; sizes are rounded, and the rate is a share of 1 / L."""
    h, first = np.asarray(p["curvature"]), float(p["weight"])
    samples, steps, batch = (np.floor(p[name]) for name in ("samples", "steps", "batch"))
    rate, noise = float(p["pace"] / h.max()), float(p["noise"])
    weights, start = [first, 1 - first], p["start"]
    return QuadraticTasks(h, p["centres"], noise, samples, steps, batch, rate, weights, start)


BOXES = {
    "curvature": Box(0.05, 1.0, (2,), log=True),
    "centres": Box(-1.0, 1.0, (2, 2)),
    "start": Box(-3.0, 3.0, (2,)),
    "noise": Box(1e-3, 2.0, log=True),
    "samples": Box(2, 100, (2,), log=True),
    "steps": Box(1, _LARGEST, (2,), log=True),
    "batch": Box(1, 32, (2,), log=True),
    "pace": Box(1e-3, 1.0, log=True),
    "weight": Box(0.0, 1.0),
}
_WORDS = "two quadratic tasks of one curvature in 2 dimensions, 2 to 100 samples, 1 to {} steps"


def _moments(task: QuadraticTasks, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What is left of the start, the mean and the square of the pull of one sample, by steps."""
    u = float(task.rate) * np.asarray(task.curvature, np.longdouble)
    left, pull, square = (np.full_like(u, value) for value in (1, 0, 0))
    for _ in range(int(task.steps[i])):
        pull, square = (1 - u) * pull + u, (1 - u) ** 2 * square + u**2
        left = (1 - u) * left
    return left, pull, square


def _stability(p: Any) -> float:
    tasks = _tasks(p)
    bound = local_stability(_constants(tasks), tasks.training, form="corrected")
    return float(np.max(np.asarray(exact(tasks).local_stability) / np.asarray(bound)))


def _stability_again(p: Any) -> float:
    """Of each step a share c / b of the replaced sample, c binomial (b, 1/n), enters."""
    tasks, found = _tasks(p), []
    bound = local_stability(_constants(tasks), tasks.training, form="corrected")
    for i in range(2):
        _, pull, square = _moments(tasks, i)
        n, b = float(tasks.samples[i]), float(tasks.batch[i])
        moved = pull**2 / n**2 + square * (1 - 1 / n) / (n * b)
        found.append(2 * float(tasks.noise) ** 2 * moved.sum() / float(bound[i]))
    return float(max(found))


STABILITY = Domain(
    _WORDS.format(_LARGEST) + ", η ≤ 1/L",
    BOXES,
    _stability,
    _stability_again,
    smooth=False,
)


def _surrogate(p: Any, lacking: str = "") -> float:
    tasks = _tasks(p)
    given = _constants(tasks)
    if lacking:
        given = given._replace(**{lacking: 0.0 * getattr(given, lacking)})
    bound = surrogate_gradient(given, tasks.training, form="corrected")
    return float(exact(tasks).surrogate_gradient / bound)


def _surrogate_again(p: Any) -> float:
    tasks = _tasks(p)
    bound = surrogate_gradient(_constants(tasks), tasks.training, form="corrected")
    mean, spread, s2 = np.zeros(2), np.zeros(2), float(tasks.noise) ** 2
    for i, w in enumerate(np.asarray(tasks.weights)):
        left, _, square = _moments(tasks, i)
        n, b = float(tasks.samples[i]), float(tasks.batch[i])
        mean = mean + w * left * np.asarray(tasks.start - tasks.centres[i])
        spread = spread + w**2 * s2 * (left**2 / n + square * (1 - 1 / n) / b)
    h = np.asarray(tasks.curvature)
    return float(np.sum(h**2 * (mean**2 + spread))) / float(bound)


SURROGATE = Domain(
    _WORDS.format(_LARGEST) + ", η ≤ 1/L",
    BOXES,
    _surrogate,
    _surrogate_again,
    smooth=False,
    without={
        "2L gap": lambda p: _surrogate(p, "gap"),
        "Σλζ²": lambda p: _surrogate(p, "heterogeneity"),
        "ηLΣλ²σ²/b": lambda p: _surrogate(p, "variance"),
    },
)


# --- gradients of several tasks (eq. 7, Lemma 4) --------------------------------------------------

Sides = Callable[[Any], tuple[Any, dict[str, Any]]]


def _squares(p: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
    """|grad f|^2, |grad f~|^2, sum w |grad f_i|^2, sum w zeta^2, and both chi-squares."""
    g, w = p["gradients"], p["weights"] / p["weights"].sum()
    plain, weighted = g.mean(0), w @ g
    zeta2, away = w @ ((g - plain) ** 2).sum(1), (1 / w.size - w) ** 2
    each = w @ (g**2).sum(1)
    return (
        (plain**2).sum(), (weighted**2).sum(), each, zeta2, (away / w**2).sum(), (away / w).sum()
    )  # fmt: skip


def _lemma_4(p: Any) -> tuple[Any, dict[str, Any]]:
    _, weighted, each, zeta2, _, _ = _squares(p)
    return each, {"|∇f̃|²": weighted, "Σλζ²": zeta2}


def _eq_7(p: Any) -> tuple[Any, dict[str, Any]]:
    plain, weighted, _, zeta2, printed, _ = _squares(p)
    return plain, {"2(χ²+1)|∇f̃|²": 2 * (printed + 1) * weighted, "2χ²Σλζ²": 2 * printed * zeta2}


def _eq_7_tight(p: Any) -> tuple[Any, dict[str, Any]]:
    plain, weighted, _, zeta2, _, chi2 = _squares(p)
    return plain, {"2|∇f̃|²": 2 * weighted, "2χ²Σλζ²": 2 * chi2 * zeta2}


def _of(sides: Sides, lacking: str, p: Any) -> Any:
    left, terms = sides(p)
    return left / sum(term for name, term in terms.items() if name != lacking)


def _of_again(sides: Sides, p: Any) -> float:
    """In long double."""
    left, terms = sides({name: np.asarray(v, np.longdouble) for name, v in p.items()})
    return float(left / sum(terms.values()))


def _gradients(sides: Sides, *terms: str) -> Domain:
    return Domain(
        "4 gradients in 3 dimensions, weights down to .01 of one another",
        {"gradients": Box(-1.0, 1.0, (4, 3)), "weights": Box(0.01, 1.0, (4,), log=True)},
        partial(_of, sides, ""),
        partial(_of_again, sides),
        without={term: partial(_of, sides, term) for term in terms},
    )


LEMMA_4 = _gradients(_lemma_4, "|∇f̃|²", "Σλζ²")
EQ_7 = _gradients(_eq_7, "2(χ²+1)|∇f̃|²", "2χ²Σλζ²")
EQ_7_TIGHT = _gradients(_eq_7_tight, "2|∇f̃|²", "2χ²Σλζ²")
