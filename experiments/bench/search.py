"""Searches for a merge on artificial test beds, compared with a loop that picks the best score.

Each bed has three experts of quadratic tasks, and noisy examples of them. There are three kinds:
beds with a planted best weighted mean, beds in which no merge is better than the first expert, and
beds with gains of stated sizes. `sail_jax.searching` and the loop of mergekit-evolve (CMA-ES on the
score of all examples; the best one is used) get the same examples and the same budget. The value of
a recommendation is computed from the beds' definition, not from examples.
"""

import argparse
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from experiments.bench._measuring import Table
from sail_jax import methods
from sail_jax.cli.options import Parser, natural
from sail_jax.methods.evolution import search as evolve
from sail_jax.searching import Arm, Outcome, search_with

EXPERTS = 3
LEVEL = 0.05
WEIGHTS = Arm("weights", methods.linear, {"weights": ((0.0, 1.0),) * EXPERTS})
Array = np.ndarray


class Bed(NamedTuple):
    """Experts, and examples z of a task: the score of theta on z is -|theta - z|^2 / 2.

    Attributes:
      experts: `(expert, d)`.
      optimum: The mean of the examples' distribution, `(d,)`.
      examples: `(n, d)`.
    """

    experts: Array
    optimum: Array
    examples: Array

    def model(self, k: int, examples: Array) -> Array:
        return self.score(self.experts[k], examples)

    def merge(self, arm: Arm, options: Mapping[str, Any], examples: Array) -> Array:
        return self.score(self.mean(options), examples)

    def mean(self, options: Mapping[str, Any]) -> Array:
        """Computes the weighted mean of the experts; the uniform one without weights."""
        weights = np.asarray(options.get("weights", np.ones(EXPERTS)), float)
        return weights @ self.experts / weights.sum()

    def score(self, theta: Array, examples: Array) -> Array:
        return -0.5 * ((self.examples[examples] - theta) ** 2).sum(-1)

    def loss(self, theta: Array) -> float:
        """Returns the expected score of the optimum minus the expected score of theta."""
        return 0.5 * float(((theta - self.optimum) ** 2).sum())

    @property
    def single(self) -> float:
        """The loss of the best expert."""
        return min(map(self.loss, self.experts))


def bed(seed: int, optimum: Array, n: int, noise: float, d: int = 20) -> Bed:
    """Draws experts and examples; `optimum` has the weights of the planted mean."""
    rng = np.random.default_rng(seed)
    experts = rng.normal(size=(EXPERTS, d)) / math.sqrt(d)
    planted = optimum @ experts
    return Bed(experts, planted, planted + noise * rng.normal(size=(n, d)))


def searched(made: Bed, budget: int, seed: int) -> Outcome:
    """Returns the result of `sail_jax.searching`."""
    names = [f"expert {k}" for k in range(EXPERTS)]
    options: dict[str, Any] = {"with_base": False, "budget": budget, "seed": seed}
    return search_with(made, len(made.examples), [WEIGHTS], names, **options)


def used(made: Bed, outcome: Outcome) -> float:
    """Returns the loss of a result's recommendation."""
    if outcome.is_merge:
        return made.loss(made.mean(outcome.options))
    return made.loss(made.experts[int(outcome.recommended.split()[1])])


def taken(made: Bed, budget: int, seed: int) -> tuple[bool, float]:
    """Runs the loop that picks the best score; returns whether it is a merge, and its loss."""
    every = np.arange(len(made.examples))
    singles = [float(made.model(k, every).mean()) for k in range(EXPERTS)]
    found = evolve(
        lambda options: -float(made.score(made.mean(options), every).mean()),
        WEIGHTS.bounds, budget=budget - EXPERTS, seed=seed,
    )  # fmt: skip
    if -found.value > max(singles):
        return True, made.loss(made.mean(found.best))
    return False, made.loss(made.experts[int(np.argmax(singles))])


def interval(hits: int, count: int) -> tuple[float, float]:
    """Returns the 95 % interval of Clopper and Pearson."""
    found = stats.binomtest(hits, count).proportion_ci(0.95)
    return float(found.low), float(found.high)


def options(parser: Parser) -> None:
    """Adds the options of the benchmark."""
    add = parser.add_argument
    add("--beds", type=natural, default=400, help="beds without gain; default: %(default)s")
    add("--planted", type=natural, default=100, help="beds with a planted mean")
    add("--examples", type=natural, default=400, help="examples of a bed; default: %(default)s")
    add("--budget", type=natural, default=40, help="scores of all examples; default: %(default)s")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Prints the results, and returns the record."""
    n, budget = args.examples, args.budget
    planted = _planted(args.planted, n, budget)
    none = _no_gain(args.beds, n, budget)
    curve = _power(args.planted, n, budget)
    good = none["interval"][0] <= LEVEL
    return {"planted": planted, "no gain": none, "power": curve, "good": good}


def _planted(beds: int, n: int, budget: int) -> dict[str, Any]:
    """Measures how often the planted mean is found, up to the error of the examples.

    The search uses n / 2 examples of variance s^2 in each direction. The best weights on these have
    an expected loss of (experts - 1) s^2 / n: half a chi-square of 2 degrees of freedom, scaled.
    """
    noise = 0.5
    bound = 0.5 * stats.chi2.ppf(0.999, EXPERTS - 1) * noise**2 / (n / 2)
    hits = 0
    for seed in range(beds):
        weights = np.random.default_rng([seed, 1]).dirichlet(np.full(EXPERTS, 3.0))
        made = bed(seed, weights, n, noise)
        hits += int(used(made, searched(made, budget, seed)) <= bound)
    low, high = interval(hits, beds)
    print(f"planted mean found within {bound:.2g}: {hits} of {beds} [{low:.3f}, {high:.3f}]")
    return {"bound": bound, "found": hits, "beds": beds, "interval": (low, high)}


def _no_gain(beds: int, n: int, budget: int) -> dict[str, Any]:
    """Measures how often a merge is recommended although the first expert is the optimum.

    The noise is chosen to make the uniform mean worse by a stated number of standard errors.
    """
    only, wrong, loop, counts = np.eye(EXPERTS)[0], 0, 0, []
    table = Table("loss of the mean / error  ", "merge recommended  ", "by the loop")
    for size in (0.25, 0.5, 1.0, 2.0):
        ours = theirs = 0
        for seed in range(beds // 4):
            made = bed(seed, only, n, _noise(bed(seed, only, 2, 1.0), size, n))
            ours += searched(made, budget, seed).is_merge
            theirs += taken(made, budget, seed)[0]
        table.row(size, f"{ours / (beds // 4):.1%}", f"{theirs / (beds // 4):.1%}")
        counts.append({"size": size, "ours": ours, "loop": theirs})
        wrong, loop = wrong + ours, loop + theirs
    count = 4 * (beds // 4)
    low, high = interval(wrong, count)
    print(
        f"no gain: a merge is recommended in {wrong} of {count} beds, {wrong / count:.1%} "
        f"[{low:.1%}, {high:.1%}]; the loop takes one in {loop / count:.1%}"
    )
    return {
        "wrong": wrong / count, "loop": loop / count, "interval": (low, high), "sizes": counts
    }  # fmt: skip


def _noise(made: Bed, size: float, n: int) -> float:
    """Returns the noise for which mean and best expert differ by `size` standard errors.

    The difference of their scores on z is (z - midpoint) . (mean - expert), with a standard
    deviation of noise times their distance. Half of the examples are used for the comparison.
    """
    mean = made.mean({})
    best = min(made.experts, key=made.loss)
    gap = abs(made.loss(mean) - made.loss(best))
    return gap * math.sqrt(n / 2) / size / float(np.linalg.norm(mean - best))


def _chance(made: Bed, error: float, seed: int) -> float:
    """Returns the probability that the mean beats each expert, drawn from its normal law.

    With e the error of the examples' mean along each axis, the difference to expert k has the
    expectation of its loss and moves with e . (mean - expert k). The mean is therefore rarely
    better than experts on opposite sides at once.
    """
    apart = made.mean({}) - made.experts
    gains = np.array([made.loss(expert) for expert in made.experts])
    draws = error * np.random.default_rng([seed, 2]).normal(size=(2000, apart.shape[1])) @ apart.T
    z = (gains + draws) / (error * np.linalg.norm(apart, axis=1))
    return float((z > stats.norm.ppf(1 - LEVEL)).all(1).mean())


def _power(beds: int, n: int, budget: int) -> list[dict[str, float]]:
    """Measures how often a gain of a given size is found, and the value of the recommendations.

    The noise of the examples determines the size: the gain of the planted mean over the best
    expert, in standard errors of their difference on the examples of the comparison.
    """
    table = Table(
        "gain / error  ", "found  ", "by theory  ", "loss / best expert's  ", "the loop's"
    )
    rows = []
    for size in (0.5, 1.0, 2.0, 3.0, 4.0):
        hits, worth, loop, chances = 0, [], [], []
        for seed in range(beds):
            even = np.full(EXPERTS, 1 / EXPERTS)
            noise = _noise(bed(seed, even, 2, 1.0), size, n)
            made = bed(seed, even, n, noise)
            gain = made.single
            outcome = searched(made, budget, seed)
            hits += outcome.is_merge
            chances.append(_chance(made, noise * math.sqrt(2 / n), seed))
            worth.append(used(made, outcome) / gain)
            loop.append(taken(made, budget, seed)[1] / gain)
        theory = float(np.mean(chances))
        row = {
            "size": size, "found": hits / beds, "by theory": theory,
            "loss": float(np.mean(worth)), "loop": float(np.mean(loop)),
        }  # fmt: skip
        table.row(size, *(f"{value:.2f}" for value in list(row.values())[1:]))
        rows.append(row)
    return rows
