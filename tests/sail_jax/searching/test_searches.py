"""Searches on planted beds: what is recommended, how often wrongly, and how the work is counted."""

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from sail_jax import methods
from sail_jax.cluster import HERE
from sail_jax.searching import Arm, Outcome, arms, compare, examples_needed, search, search_with
from sail_jax.searching.aside import SideBySide
from sail_jax.searching.evidence import means
from sail_jax.searching.outcome import Trial, front
from sail_jax.searching.prediction import agreement, fit


class Bed:
    """Two models at 0 and 1 of a line; the best point is planted, examples have noise.

    The score of theta on example x is -(x - theta)^2, with x normal about the planted optimum. A
    merge at theta thus gains 1 - ... in the mean, computed by `gain` from the definition.
    """

    def __init__(self, optimum: float, n: int, noise: float, seed: int):
        self.x = optimum + noise * np.random.default_rng(seed).normal(size=n)
        self.optimum, self.calls = optimum, 0

    def at(self, theta: float, examples: np.ndarray) -> np.ndarray:
        self.calls += 1
        return -((self.x[examples] - theta) ** 2)

    def model(self, k: int, examples: np.ndarray) -> np.ndarray:
        return self.at(float(k), examples)

    def merge(self, arm: Arm, options: Mapping[str, Any], examples: np.ndarray) -> np.ndarray:
        weights = np.asarray(options.get("weights", [1.0, 1.0]))
        return self.at(weights[1] / weights.sum(), examples)

    def gain(self, theta: float) -> float:
        """Computes how much better theta is than the better of the two models, in expectation."""
        return min(self.optimum**2, (1 - self.optimum) ** 2) - (self.optimum - theta) ** 2


LINE = Arm("line", methods.linear, {"weights": ((0.0, 1.0), (0.0, 1.0))})


def found(bed: Bed, **options: Any) -> Outcome:
    given = {"budget": 30, "with_base": False, **options}
    return search_with(bed, len(bed.x), [LINE], ["A", "B"], **given)


def test_finds_a_planted_optimum():
    """To 4 standard errors of the mean of the examples on which it searches."""
    for seed in range(8):
        bed = Bed(0.3, 400, 0.5, seed)
        outcome = found(bed, seed=seed)
        assert outcome.is_merge
        weights = outcome.options["weights"]
        reached = weights[1] / weights.sum()
        assert abs(reached - 0.3) < 4 * 0.5 / np.sqrt(outcome.searched)
        assert outcome.evaluations <= 30 + 1e-9
        assert outcome.searched + outcome.judged == 400


@pytest.mark.soak
def test_wrong_recommendations_are_rare():
    """Null: no merge is better than model A. At most 5 % are recommended, over 400 beds.

    The optimum is A itself, where merges come as near to it as they like: the hardest case. 400
    beds reject more than 5 % with probability .95 if the true rate is 8.5 % (binomial).
    """
    wrong = sum(found(Bed(0.0, 200, 1.0, seed), seed=seed).is_merge for seed in range(400))
    assert stats.binomtest(wrong, 400, 0.05, "greater").pvalue > 0.01


@pytest.mark.soak
def test_a_gain_is_found_as_often_as_its_size_predicts():
    """The power of the paired t test at the planted optimum, by the normal approximation.

    The gain on an example is (x^2 - (x - t)^2) = 2 t x - t^2 for the merge at t compared with A,
    of standard deviation 2 t s. The search finds t to about s / sqrt(n), which costs little.
    """
    beds, judged, s = 200, 100, 1.0
    t = 0.25
    power = stats.norm.cdf(t * t / (2 * t * s / np.sqrt(judged)) - stats.norm.ppf(0.95))
    hits = sum(found(Bed(t, 200, s, seed), seed=seed).is_merge for seed in range(beds))
    share, error = hits / beds, np.sqrt(power * (1 - power) / beds)
    assert power - 0.15 < share < power + 4 * error  # choosing with noise loses some of it


def test_the_judging_part_is_never_searched():
    bed, seen = Bed(0.4, 100, 1.0, 0), []
    outcome = found(bed, on_trial=seen.append)
    places = [trial.examples for trial in seen]
    judged = places[-1]
    searching = [p for p in places if not np.array_equal(p, judged)]
    assert len(judged) == outcome.judged == 50
    assert all(not np.intersect1d(p, judged).size for p in searching)
    # Smaller parts are beginnings of larger ones, so that all candidates share examples.
    longest = max(searching, key=len)
    assert all(np.array_equal(p, longest[: len(p)]) for p in searching)
    assert len({len(p) for p in searching}) > 1


def test_an_interrupted_search_goes_on_from_its_history():
    whole, seen = found(Bed(0.4, 100, 1.0, 0)), []

    def stop(trial: Trial) -> None:
        seen.append(trial)
        if len(seen) == 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        found(Bed(0.4, 100, 1.0, 0), on_trial=stop)
    bed = Bed(0.4, 100, 1.0, 0)
    again = found(bed, history=seen)
    assert bed.calls == len(whole.trials) - 17
    assert (again.recommended, again.options, again.p) == (
        whole.recommended, whole.options, whole.p,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"history\[0\]: expected a trial of A"):
        found(Bed(0.4, 100, 1.0, 0), history=seen[1:])


@pytest.mark.parametrize("after", [0, 17])
def test_scores_side_by_side_make_the_same_search(after):
    """In the order of a search here, and with a history; each score is computed once."""
    whole, bed = found(Bed(0.4, 100, 1.0, 0)), Bed(0.4, 100, 1.0, 0)
    measure, sizes = SideBySide(lambda: bed, HERE), []
    real = measure.ahead
    measure.ahead = lambda wanted: sizes.append(len(wanted)) or real(wanted)
    history = whole.trials[:after]
    again = search_with(
        measure, 100, [LINE], ["A", "B"], budget=30, with_base=False, history=history
    )
    assert [(t.name, t.score) for t in again.trials] == [(t.name, t.score) for t in whole.trials]
    assert (again.recommended, again.options, again.p) == (
        whole.recommended, whole.options, whole.p,
    )  # fmt: skip
    assert bed.calls == len(whole.trials) - after
    assert max(sizes) > 4 - 2 * bool(after)


def test_time_ends_the_search_but_not_the_comparison():
    outcome = found(Bed(0.4, 100, 1.0, 0), seconds=0.0)
    # Models and the uniform soup are always scored, on both parts.
    assert [t.name for t in outcome.trials] == ["A", "B", "uniform soup"] * 2
    assert (outcome.found.name, outcome.untried) == ("uniform soup", ("line",))


def test_a_quadratic_score_is_predicted_exactly():
    """Without noise in the examples both sides agree to rounding, as the score is quadratic."""
    rng = np.random.default_rng(0)
    hessian, points, target = rng.normal(size=(4, 4)), rng.normal(size=(3, 4)), rng.normal(size=4)
    hessian = hessian @ hessian.T

    def at(theta: np.ndarray) -> float:
        return float(-0.5 * (theta - target) @ hessian @ (theta - target))

    scores = np.array([at(point) for point in points])
    gains = np.array([[at((a + b) / 2) - (at(a) + at(b)) / 2 for a in points] for b in points])
    quadratic = fit(scores, gains)
    weights = rng.normal(size=3)
    weights /= weights.sum()
    assert quadratic.at(weights) == pytest.approx(at(weights @ points), rel=1e-10)
    # The best mean by a grid of 5,151 points of the simplex, as an independent search.
    grid = [(i, j, 100 - i - j) for i in range(101) for j in range(101 - i)]
    best = max(at(np.array(w) / 100 @ points) for w in grid)
    assert quadratic.at(quadratic.best()) >= best - 1e-9


def test_predictions_stand_beside_what_was_measured():
    outcome = found(Bed(0.3, 400, 0.5, 0))
    error, rank = agreement(outcome.predictions)
    assert len(outcome.predictions) > 0
    assert error < 1e-6
    assert rank > 0.999


def test_tasks_count_alike():
    """A merge that gains on a large task what it loses on a small one gains nothing."""
    scores = np.array([1.0] * 90 + [-1.0] * 10) + np.tile([0.1, -0.1], 50)
    tasks = np.repeat([0, 1], [90, 10])
    assert abs(compare("A", scores, np.zeros(100), tasks).difference) < 1e-12
    assert compare("A", scores, np.zeros(100)).difference == pytest.approx(0.8)
    by_task, squares = means(scores, tasks)
    for k in range(2):
        own = scores[tasks == k]
        assert by_task[k] == pytest.approx(own.mean())
        assert squares[k] == pytest.approx(own.var(ddof=1) / len(own))


def test_one_task_is_students_paired_test():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 25))
    expected = stats.ttest_rel(a, b, alternative="greater")
    got = compare("b", a, b)
    assert got.p == pytest.approx(expected.pvalue, rel=1e-9)
    interval = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert got.interval == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_two_tasks_are_welchs_test():
    """The mean of both gains is above 0 as the first is above minus the second."""
    rng = np.random.default_rng(0)
    first, second = rng.normal(0.2, 1, 12), rng.normal(0.1, 2, 30)
    gains, tasks = np.concatenate([first, second]), np.repeat([0, 1], [12, 30])
    got = compare("b", gains, np.zeros(42), tasks)
    expected = stats.ttest_ind(first, -second, equal_var=False, alternative="greater")
    assert got.p == pytest.approx(expected.pvalue, rel=1e-9)
    interval = stats.ttest_ind(first, -second, equal_var=False).confidence_interval(0.95)
    assert got.interval == pytest.approx((interval.low / 2, interval.high / 2), rel=1e-9)


def test_needed_examples_give_the_stated_power():
    """Simulated with known deviation: power .8 to 4 standard errors of 4,000 draws."""
    n = examples_needed(0.1, 1.0)
    assert n is not None
    rng = np.random.default_rng(0)
    z = rng.normal(0.1 * np.sqrt(n), 1, 4000)
    assert abs((z > stats.norm.ppf(0.95)).mean() - 0.8) < 4 * np.sqrt(0.8 * 0.2 / 4000)
    assert examples_needed(0.0, 1.0) is None


def test_the_front_holds_what_nothing_beats():
    def trial(name: str, *by_task: float) -> Trial:
        return Trial(name, {}, np.arange(1), np.zeros(1), np.array(by_task))

    trials = [trial("a", 1, 0), trial("b", 0, 1), trial("c", 0.5, 0.5), trial("d", 0.4, 0.5)]
    assert [t.name for t in front(trials)] == ["a", "b", "c"]


MODELS = [{"w": np.zeros(2, np.float32)}, {"w": np.array([1.0, 0.5], np.float32)}]
BASE = {"w": np.zeros(2, np.float32)}


def error(params: Any, batch: Any) -> jax.Array:
    return -((batch["x"] - params["w"]) ** 2).sum(-1)


@pytest.mark.slow
def test_pytrees_by_methods_and_groups():
    """Per-group scales reach a planted point that no single scale reaches."""
    models = [{"a": np.ones(1, np.float32), "b": np.ones(1, np.float32)} for _ in range(2)]
    base = {"a": np.zeros(1, np.float32), "b": np.zeros(1, np.float32)}
    x = np.random.default_rng(0).normal([1.0, 0.1], 0.3, (300, 2)).astype(np.float32)

    def score(params: Any, batch: Any) -> jax.Array:
        theta = jnp.concatenate([params["a"], params["b"]])
        return -((batch["x"] - theta) ** 2).sum(-1)

    given: dict[str, Any] = {"score": score, "data": {"x": x}, "budget": 30, "batch_size": 150}
    outcome = search(models, base, candidates=["linear"], groups=["a", "b"], **given)
    assert outcome.recommended == "groups"
    reached = 0.6 * outcome.options["scales"]  # task arithmetic of two equal models at 0.3
    # 4 standard errors of the mean of 150 examples
    np.testing.assert_allclose(reached, [1.0, 0.1], atol=4 * 0.3 / np.sqrt(150))


@pytest.mark.soak
def test_gradients_refine_weights():
    """From the best of a few points, gradients reach the optimum of the examples of the search."""
    x = np.random.default_rng(0).normal([0.8, 0.4], 0.2, (320, 2)).astype(np.float32)
    given: dict[str, Any] = {"score": error, "data": {"x": x}, "budget": 40, "batch_size": 32}
    scale = Arm("scale", methods.task_arithmetic, {"scale": (0.0, 2.0)})
    outcome = search(MODELS, BASE, candidates=[scale], refine="gradient", **given)
    best = max((t for t in outcome.trials if t.name == "scale"), key=lambda t: t.score)
    # The mean of the examples on the line of models, with the standard error of 160 of them; Adam
    # at 0.02 swings about the optimum by about as much.
    assert abs(best.options["scale"] - 0.8) < 4 * 0.2 / np.sqrt(160) + 0.02
    ties = Arm("ties", methods.ties, {"density": (0.1, 1.0)})
    with pytest.raises(TypeError, match="refine: ties cannot be refined by gradients"):
        search(MODELS, BASE, candidates=[ties], refine="gradient", **given)


def test_means_are_tried_last_where_there_is_a_barrier():
    class Ridge(Bed):
        """Both models are good, everything between them is bad."""

        def at(self, theta: float, examples: np.ndarray) -> np.ndarray:
            return -((theta * (1 - theta)) ** 2) + 0.01 * self.x[examples]

    other = Arm("other", methods.magmax)
    for bed, first in ((Ridge(0.5, 60, 1.0, 0), "other"), (Bed(0.5, 60, 1.0, 0), "line")):
        outcome = search_with(bed, 60, [LINE, other], ["A", "B"], with_base=False, budget=30)
        names = [trial.name for trial in outcome.trials]
        assert min(("other", "line"), key=names.index) == first


def test_refusals():
    data = {"x": np.zeros((20, 2), np.float32)}
    for options, message in (
        ({"candidates": ["tise"]}, "no merging method 'tise'.*nearest: 'ties'"),
        ({"candidates": ["slerp"], "models": [*MODELS, MODELS[0]]}, "slerp takes 2 to 2 models"),
        ({"candidates": ["ties"], "base": None}, "ties needs a base"),
        ({"candidates": ["fisher"]}, "fisher needs arrays"),
        ({"judge": 1.0}, r"judge: expected a number in \(0, 1\)"),
        ({"budget": 3}, "budget: expected an integer >= 6"),
        ({"tasks": [0] * 19}, "tasks: expected one for each of 20 examples"),
        ({"tasks": [0] * 19 + [1]}, "two or more examples of each task"),
        ({"data": {"x": np.zeros((3, 2)), "y": np.zeros(4)}}, "data: expected leaves"),
        ({"score": lambda p, b: 0.0}, "score: expected a number for each of 64 examples"),
        ({"score": lambda p, b: b["x"][:, 0] * jnp.nan}, "score of model 0: .*NaN"),
        ({"names": ["linear", "B"]}, "with unique names"),
        ({"models": MODELS[:1]}, "two or more models"),
    ):
        given: dict[str, Any] = {
            "models": MODELS, "base": BASE, "score": error, "data": data,
            "candidates": ["linear"], "budget": 10, **options,
        }  # fmt: skip
        with pytest.raises(ValueError, match=message):
            search(given.pop("models"), given.pop("base"), **given)


def test_arms_begin_at_the_defaults_and_spread_evenly():
    (ties,) = arms(2, True, ["ties"])
    drawn = ties.spread(5, np.random.default_rng(0))
    low, high = np.asarray(ties.bounds["scale"], float)
    parts = sorted(int(5 * (options["scale"] - low) / (high - low)) for options in drawn)
    assert parts == list(range(5))
    assert ties.first()["scale"] == 1.0
    names = [arm.name for arm in arms(3, False)]
    assert {"linear", "weights"} <= set(names)
    assert not {"ties", "slerp"} & set(names)


def test_the_answer_reads_well():
    outcome = found(Bed(0.1, 100, 1.0, 3), seed=3)
    text = str(outcome)
    assert not outcome.is_merge
    assert text.startswith("Use A. No merge is shown to be better")
    assert "more examples would show" in text
    *_, examples, trials = text.split("\n")
    assert examples.endswith("chosen on 50 examples and compared on 50 others.")
    # The models, the base and the references were scored on both parts, the best merge too.
    names = [trial.name for trial in outcome.trials]
    compared = len({*outcome.models, *(names[len(names) - 3 :])})
    assert trials.startswith(f"Trials: {len(names) - compared} to choose the merge (")
    assert trials.endswith(f"{compared} for the comparison, which the budget does not include.")
    json.dumps(outcome.models)
