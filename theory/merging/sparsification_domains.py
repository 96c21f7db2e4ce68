"""Problems that attack Corollary 1 of unified-merging, three task vectors and weights.

The ratio compares heterogeneities, after a step and before it.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sail_jax.merging.task_vectors import TaskVectors
from sail_jax.merging.transforms import elect, trim
from theory.adversary import Box, Domain, Problem
from theory.merging.heterogeneity import heterogeneity, updates

KEPT = 0.4  # share of entries that trimming keeps: 2 of 5
N, D = 3, 5

BOXES = {"vectors": Box(-1.0, 1.0, (N, D)), "weights": Box(0.02, 1.0, (N,), log=True)}
_WORDS = f"{N} task vectors in {D} dimensions"
Step = Callable[[Any], Any]


def _elected(d: Any) -> Any:
    return _applied(elect(), d)


def _trimmed(d: Any) -> Any:
    return _applied(trim(KEPT), d)


def _ties(d: Any) -> Any:
    return _elected(_trimmed(d))


def _same(d: Any) -> Any:
    return d


def _applied(transform: Any, d: Any) -> Any:
    """Finds the entries that a transform keeps, without derivatives."""
    fixed = jax.lax.stop_gradient(d)
    kept = transform(TaskVectors({"a": fixed}, {"a": jnp.ones((len(d), 1), d.dtype)}))
    return jnp.where(updates(kept)["a"] != 0, d, 0.0)


def _ratio(before: Step, after: Step, p: Problem) -> Any:
    w = p["weights"] / p["weights"].sum()
    d = jnp.asarray(p["vectors"])
    return heterogeneity(after(d), w) / heterogeneity(before(d), w)


# --- the same in NumPy ----------------------------------------------------------------------------


def _elected_again(d: np.ndarray) -> np.ndarray:
    """Returns the part of each entry that has the sign of the sum."""
    sign = np.sign(d.sum(0))
    return np.maximum(sign * d, 0) * sign


def _trimmed_again(d: np.ndarray) -> np.ndarray:
    out = np.zeros_like(d)
    for row, kept in zip(d, out, strict=True):
        for j in sorted(range(len(row)), key=lambda j: -abs(row[j]))[: round(KEPT * len(row))]:
            kept[j] = row[j]
    return out


def _spread(d: np.ndarray, w: np.ndarray) -> float:
    """Computes the spread by pairs of tasks."""
    pairs = product(range(len(w)), repeat=2)
    return float(sum(w[i] * w[j] * np.sum((d[i] - d[j]) ** 2) for i, j in pairs) / 2)


def _ratio_again(before: Any, after: Any, p: Problem) -> float:
    d, w = np.asarray(p["vectors"]), np.asarray(p["weights"]) / np.sum(p["weights"])
    return _spread(after(d), w) / _spread(before(d), w)


def _domain(words: str, before: tuple[Any, Any], after: tuple[Any, Any]) -> Domain:
    return Domain(
        f"{_WORDS}, {words}",
        BOXES,
        partial(_ratio, before[0], after[0]),
        partial(_ratio_again, before[1], after[1]),
    )


_NOTHING = _same, _same
_ELECT, _TRIM = (_elected, _elected_again), (_trimmed, _trimmed_again)
ELECTED = _domain("signs elected", _NOTHING, _ELECT)
TRIMMED = _domain(f"the top {KEPT:.0%} kept", _NOTHING, _TRIM)
TIES = _domain(
    f"the top {KEPT:.0%} kept, then signs elected",
    _NOTHING,
    (_ties, lambda d: _elected_again(_trimmed_again(d))),
)
TIES_ELECTED = _domain(
    f"the top {KEPT:.0%} kept; then signs elected, against before",
    _TRIM,
    (_ties, lambda d: _elected_again(_trimmed_again(d))),
)


# --- DARE -----------------------------------------------------------------------------------------


def _dropped(p: Problem) -> Any:
    """Averages over all masks of one entry of each task."""
    w, d, rate = p["weights"] / p["weights"].sum(), p["entries"], p["rate"]
    masks = jnp.array(list(product((0.0, 1.0), repeat=N)))
    chances = jnp.prod(jnp.where(masks == 1, 1 - rate, rate), 1)
    spreads = jax.vmap(lambda mask: heterogeneity((mask * d / (1 - rate))[:, None], w))(masks)
    return chances @ spreads / heterogeneity(d[:, None], w)


def _dropped_again(p: Problem) -> float:
    """Computes the same by means and mean squares of the kept part of each entry."""
    w, d = np.asarray(p["weights"]) / np.sum(p["weights"]), np.asarray(p["entries"])
    square = w @ (d**2 / (1 - p["rate"]))
    cross = sum(w[i] * w[j] * d[i] * d[j] for i, j in product(range(N), repeat=2) if i != j)
    same = np.sum(w**2 * d**2) / (1 - p["rate"])
    return float((square - cross - same) / _spread(d[:, None], w))


DROPPED = Domain(
    f"an entry of {N} tasks, the mean over masks",
    {"entries": Box(-1.0, 1.0, (N,)), "weights": BOXES["weights"], "rate": Box(0.01, 0.9)},
    _dropped,
    _dropped_again,
)


# --- eq. (10) -------------------------------------------------------------------------------------


def _distances(d: Any) -> tuple[Any, Any]:
    """Computes squared distances from the mean, before and after electing a sign, with equal
    weights.
    """
    elected = _elected(d[:, None])[:, 0]
    return (d - d.mean()) ** 2, (elected - elected.mean()) ** 2


def _distances_again(d: np.ndarray) -> tuple[list[float], list[float]]:
    elected = [x if x * sum(d) > 0 else 0.0 for x in d]
    both = []
    for entries in (list(d), elected):
        mean = sum(entries) / len(entries)
        both.append([float((x - mean) ** 2) for x in entries])
    return both[0], both[1]


def _conflicting(p: Problem) -> Any:
    before, after = _distances(p["entries"])
    return after[-1] / before[-1]


def _conflicting_again(p: Problem) -> float:
    before, after = _distances_again(np.asarray(p["entries"]))
    return after[-1] / before[-1]


def _in_the_mean(p: Problem) -> Any:
    before, after = _distances(p["entries"])
    return after.sum() / before.sum()


def _in_the_mean_again(p: Problem) -> float:
    before, after = _distances_again(np.asarray(p["entries"]))
    return sum(after) / sum(before)


_FOUR = {"entries": Box(-1.0, 1.0, (4,))}
CONFLICTING = Domain(
    "an entry of four tasks of equal weights, the last in conflict with their sum",
    _FOUR,
    _conflicting,
    _conflicting_again,
    allowed=lambda p: jnp.minimum(
        -p["entries"][-1] * p["entries"].sum(),
        jnp.abs(p["entries"][-1] - p["entries"].mean()) - 0.1,
    ),
)
IN_THE_MEAN = Domain(
    "an entry of four tasks of equal weights", _FOUR, _in_the_mean, _in_the_mean_again
)
