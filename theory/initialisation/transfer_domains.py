"""Problems that attack the bounds of SAIL's Lemma 1 and Theorem 4.

The samples of `N` points come from a finite set, with exact probabilities. A point is the first
atom, where all predictors have the same loss, or one of many atoms of equal probability, where a
predictor has the low or the high loss. Every combination is a predictor, so this is the richest
class with such losses.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from math import comb, factorial, log, prod
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from scipy import special

from theory.adversary import Box, Domain, Problem
from theory.initialisation import transfer

N = 8
TINY = 1e-9  # of a bound without all of its terms


def _partitions(n: int, largest: int) -> Iterator[tuple[int, ...]]:
    if n == 0:
        yield ()
    for part in range(min(n, largest), 0, -1):
        for rest in _partitions(n - part, part):
            yield part, *rest


@cache
def _samples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lists all patterns of coinciding points: the number of points on the first atom, the numbers
    on the others `[ways N]`, and the number of orders of the points.
    """
    first, others, orders = [], [], []
    for c in range(N + 1):
        for parts in _partitions(N - c, N):
            alike = [parts.count(size) for size in set(parts)]
            first.append(c)
            others.append(np.pad(parts, (0, N - len(parts))))
            ways = comb(N, c) * factorial(N - c) // prod(map(factorial, parts))
            orders.append(ways / prod(map(factorial, alike)))
    return np.array(first), np.array(others, int), np.array(orders)


@cache
def _half_walk() -> np.ndarray:
    """Computes E max(S, 0) of the sum S of 0 to N signs."""
    return np.array(
        [np.mean([max(sum(s), 0) for s in product((-1, 1), repeat=c)]) for c in range(N + 1)]
    )


def _laws(p: Problem) -> tuple[int, float, float, float, float]:
    """Returns the number of atoms, the probability of the first one at the source and at the
    target, and two losses.
    """
    low = float(p["low"])
    source = float(p["first"])
    target = float(p.get("target", source))
    return int(p["atoms"]), source, target, low, low + float(p["gap"]) * (1 - low)


def _by_sample(p: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes each sample's probability, sup (J - J^) and Rademacher complexity."""
    atoms, source, target, low, high = _laws(p)
    first, others, orders = _samples()
    seen = (others > 0).sum(1)
    free = np.cumprod(np.concatenate([[1.0], 1 - np.arange(N) / atoms]))  # atoms not yet used
    each = ((1 - source) / atoms) ** (N - first) * float(atoms) ** seen
    chance = orders * free[seen] * each * source**first
    share = (1 - target) / atoms
    gaps = share - others / N
    worst = np.where(others > 0, np.where(gaps > 0, high, low) * gaps, 0.0).sum(1)
    unseen = (atoms - seen) * high * share
    worst += unseen + p["same"] * (target - first / N)
    return chance, worst, (high - low) * _half_walk()[others].sum(1) / N


def _by_sample_again(p: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes the same point by point, with all signs and all predictors on the observed atoms."""
    atoms, source, target, low, high = _laws(p)
    laws: dict[tuple[int, tuple[int, ...]], float] = {(0, ()): 1.0}
    for _ in range(N):
        after: dict[tuple[int, tuple[int, ...]], float] = {}

        def reach(c: int, parts: list[int], chance: float, after: Any = after) -> None:
            key = c, tuple(sorted(parts))
            after[key] = after.get(key, 0.0) + chance

        for (c, parts), chance in laws.items():
            reach(c + 1, [*parts], chance * source)
            each = chance * (1 - source) / atoms
            reach(c, [*parts, 1], each * (atoms - len(parts)))
            for k in range(len(parts)):
                reach(c, [*parts[:k], parts[k] + 1, *parts[k + 1 :]], each)
        laws = after
    signs, found = np.array([*product((-1, 1), repeat=N)]), []
    for (c, parts), chance in laws.items():
        atom = np.repeat(np.arange(len(parts) + 1), [c, *parts])
        predictors = np.array([(p["same"], *v) for v in product((low, high), repeat=len(parts))])
        losses = predictors[:, atom]
        rest = (atoms - len(parts)) * high
        risks = (predictors[:, 1:].sum(1) + rest) * (1 - target) / atoms + p["same"] * target
        worst = (risks - losses.mean(1)).max()
        found.append((chance, worst, (signs @ losses.T / N).max(1).mean()))
    chance, worst, complexity = np.array(found).T
    return chance, worst, complexity


Term = Literal["complexity", "confidence", "variation"]


def _quantile(chance: np.ndarray, shares: np.ndarray, delta: float) -> float:
    """Computes the smallest number that values exceed with a probability of at most delta."""
    largest = np.argsort(-shares)
    within = np.cumsum(chance[largest]) <= delta
    return float(shares[largest][min(within.sum(), len(shares) - 1)])


def _share(left_out: Term | None, p: Problem) -> float:
    """Computes this quantile of sup (J - J^) divided by its bound. It is at most 1 if the bound
    holds.
    """
    chance, worst, complexity = _by_sample(p)
    _, source, target, *_ = _laws(p)
    bound = np.full_like(worst, TINY if left_out == "variation" else abs(source - target))
    if left_out != "complexity":
        bound += 2 * complexity
    if left_out != "confidence":
        bound += 3 * np.sqrt(log(2 / p["delta"]) / (2 * N))
    return _quantile(chance, worst / np.maximum(bound, TINY), p["delta"])


def _share_again(p: Problem) -> float:
    """Computes the same with the bounds of `transfer`."""
    chance, worst, complexity = _by_sample_again(p)
    _, source, target, *_ = _laws(p)
    at = complexity, N, float(p["delta"])
    bound = transfer.rademacher_bound(0.0, *at)
    if "target" in p:
        bound = transfer.transfer_bound(0.0, abs(source - target), *at)
    return _quantile(chance, worst / np.asarray(bound), p["delta"])


def _in_the_mean(again: bool, left_out: Term | None, p: Problem) -> float:
    chance, worst, complexity = (_by_sample_again if again else _by_sample)(p)
    _, source, target, *_ = _laws(p)
    bound = 0.0 if left_out == "variation" else abs(source - target)
    bound += 0.0 if left_out == "complexity" else 2 * chance @ complexity
    return float(chance @ worst / max(bound, TINY))


BOXES = {
    "atoms": Box(N, 1e4, log=True),
    "first": Box(0.0, 0.9),
    "same": Box(0.0, 1.0),
    "low": Box(0.0, 1.0),
    "gap": Box(0.01, 1.0),
}
_WORDS = f"all samples of {N} points, the richest class of losses in [0, 1]"
_MOVED = {"target": Box(0.0, 1.0)}
_DELTA = {"delta": Box(0.01, 0.99)}
_TERMS: dict[str, Term] = {"2R̂": "complexity", "3C√(ln(2/δ)/2n)": "confidence"}
_VARIATION: dict[str, Term] = {"C D_TV": "variation"}

LEMMA = Domain(
    _WORDS,
    BOXES | _DELTA,
    partial(_share, None),
    _share_again,
    smooth=False,
    without={name: partial(_share, term) for name, term in _TERMS.items()},
)
THEOREM = replace(
    LEMMA,
    problems=f"{_WORDS}, of another law",
    boxes=BOXES | _MOVED | _DELTA,
    without={name: partial(_share, t) for name, t in (_TERMS | _VARIATION).items()},
)
LEMMA_MEAN = Domain(
    _WORDS, BOXES, partial(_in_the_mean, False, None), partial(_in_the_mean, True, None),
    smooth=False,
)  # fmt: skip
THEOREM_MEAN = replace(
    LEMMA_MEAN,
    problems=f"{_WORDS}, of another law",
    boxes=BOXES | _MOVED,
    without={
        "C D_TV": partial(_in_the_mean, False, "variation"),
        "2E R̂": partial(_in_the_mean, False, "complexity"),
    },
)


def _law(parts: Any) -> Any:
    return parts / parts.sum()


def _moved(p: Problem) -> Any:
    """Computes |J* - J_i| / (2 C D_TV)."""
    change = _law(p["target"]) - _law(p["source"])
    return abs((change * p["losses"]).sum()) * p["largest"] / (p["largest"] * abs(change).sum())


def _moved_again(p: Problem) -> float:
    """Computes D_TV as the largest difference of probabilities of an event."""
    source, target = (np.asarray(p[name]) / np.sum(p[name]) for name in ("source", "target"))
    events = np.array([*product((0, 1), repeat=len(source))])
    risks = [np.average(p["largest"] * p["losses"], weights=law) for law in (source, target)]
    return float(abs(risks[1] - risks[0]) / (2 * p["largest"] * (events @ (target - source)).max()))


_PARTS = Box(0.01, 1.0, (4,))
CHANGE = Domain(
    "two laws on 4 atoms, D_TV of .01 or more, any losses in [0, C]",
    {
        "source": _PARTS,
        "target": _PARTS,
        "losses": Box(0.0, 1.0, (4,)),
        "largest": Box(0.1, 3.0, log=True),
    },
    _moved,
    _moved_again,
    allowed=lambda p: abs(_law(p["target"]) - _law(p["source"])).sum() / 2 - 0.01,
)

_SIGNS = np.array([*product((-1.0, 1.0), repeat=4)])


def _contracted(constant: bool, p: Problem) -> Any:
    """Divides the complexity of the losses L |phi - y| by the predictors' complexity, or by L times
    it.
    """
    signs, steep = jnp.asarray(_SIGNS), p["steep"]

    def complexity(values: Any) -> Any:
        return jnp.max(signs @ values.T, 1).mean()

    losses = steep * jnp.abs(p["predictors"] - p["labels"])
    return complexity(losses) / (complexity(p["predictors"]) * (steep if constant else 1.0))


def _contracted_again(constant: bool, p: Problem) -> float:
    steep, found = float(p["steep"]), [0.0, 0.0]
    losses = steep * abs(np.asarray(p["predictors"]) - p["labels"])
    for signs in product((-1, 1), repeat=4):
        for k, values in enumerate((losses, p["predictors"])):
            found[k] += max(sum(s * v for s, v in zip(signs, row, strict=True)) for row in values)
    return found[0] / (found[1] * (steep if constant else 1.0))


def contraction(constant: bool) -> Domain:
    """Returns the problems of Theorem 4's step 5.

    Args:
      constant: Whether the bound has the constant L.

    Returns:
      The domain.
    """
    return Domain(
        "3 predictors on 4 points, losses L|φ - y|, L from .1 to 4",
        {
            "predictors": Box(-1.0, 1.0, (3, 4)),
            "labels": Box(-1.0, 1.0, (4,)),
            "steep": Box(0.1, 4.0, log=True),
        },
        partial(_contracted, constant),
        partial(_contracted_again, constant),
        allowed=lambda p: ((p["predictors"][0] - p["predictors"][1]) ** 2).sum() - 0.01,
    )


def _right_side(p: Problem) -> float:
    """Computes the corrected right side of Theorem 4, relative to C = 1."""
    n, variation = int(p["points"]), 2 * special.ndtr(p["apart"] / 2) - 1
    complexity = transfer.threshold_complexity(n)
    return float(transfer.transfer_bound(0.0, variation, complexity, n, p["delta"]))


def _right_side_again(p: Problem) -> float:
    """Computes the same with the walk's law and the variation as an integral."""
    n = int(p["points"])
    heads = np.arange(n + 1)
    chance, walk = special.binom(n, heads) * 0.5**n, 2 * heads - n
    complexity = (chance @ abs(walk) - chance[walk > 0].sum()) / n
    x = np.linspace(-10, 10 + p["apart"], 20_001)
    laws = (np.exp(-((x - middle) ** 2) / 2) / np.sqrt(2 * np.pi) for middle in (0, p["apart"]))
    apart = abs(np.subtract(*laws)).sum() * (x[1] - x[0]) / 2
    confidence = 3 * np.sqrt(np.log(2 / p["delta"]) / (2 * n))
    return float(apart + 2 * complexity + confidence)


INFORMATIVE = Domain(
    "n from 400 to 1000, δ ≥ .01, classes moved by up to 1.5",
    {
        "points": Box(400, 1000, log=True),
        "delta": Box(0.01, 0.99),
        "apart": Box(0.0, 1.5),
    },
    _right_side,
    _right_side_again,
    smooth=False,
)
