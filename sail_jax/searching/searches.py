"""The search: candidates, budgets and stopping.

The score of a merge has noise from the examples, and the best of 60 scores is biased by selection.
With standard errors of 0.01, the best of 60 equal merges appears better than it is by 0.023. The
examples are therefore divided. One part is used to choose merges, as greedily as desired. The
chosen merge is scored once on the other part, together with its references, which requires no
correction for the number of merges.

A merge is recommended if it is better than *every* single model, in one-sided tests at 5 % each. If
some model is at least as good as the merge, the test against this model alone fails with
probability 95 %. A wrong recommendation therefore has probability 5 % at most, for any number of
models (an intersection-union test). The best single model need not be known.

The search uses successive halving, then CMA-ES. Many hyperparameters are scored on few examples,
the best third on three times as many, and so on. The smaller sets of examples are subsets of the
larger ones. Of 60 points, 20 remain after 1/9 of the examples and 7 after 1/3. This costs 60/9 +
20/3 + 7 = 20 scores of the whole part instead of 60. CMA-ES refines the best remaining arm with the
rest of the budget.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from sail_jax import methods
from sail_jax.checks import integer, one_of, static
from sail_jax.learning import learn
from sail_jax.methods.evolution import search as evolve
from sail_jax.searching.arms import Arm, affine, arms, usual
from sail_jax.searching.evidence import LEVEL, Comparison, compare, means, task_numbers
from sail_jax.searching.outcome import Outcome, Trial, front
from sail_jax.searching.prediction import Prediction, Quadratic, fit

Score = Callable[[PyTree, PyTree], Float[Array, "n"]]
"""`score(params, batch)` returns a number for each example of a batch; larger is better."""

Refine = Literal["cmaes", "gradient"]
"""The refinement of the best arm: by scores only, or by the gradient of the score."""
Descend = Callable[[Arm, Mapping[str, Any], Int[np.ndarray, "n"], float], dict[str, Any]]
"""A function that improves hyperparameters by gradients, at the cost of some scores."""

_HALVED = 3
_LEAST = 16
"""The smallest number of examples for comparing hyperparameters."""


@runtime_checkable
class Measure(Protocol):
    """Scores candidates on examples."""

    def model(self, k: int, examples: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        """Scores the k-th model; the base comes after the models."""
        ...

    def merge(
        self, arm: Arm, options: Mapping[str, Any], examples: Int[np.ndarray, "n"]
    ) -> Float[np.ndarray, "n"]:
        """Scores a merge."""
        ...


class Wanted(NamedTuple):
    """A score that a search will ask for.

    Attributes:
      who: The number of a model; or an arm, with its hyperparameters.
      options: The hyperparameters; empty for a model.
      examples: The positions of the examples.
    """

    who: int | Arm
    options: Mapping[str, Any]
    examples: Int[np.ndarray, "n"]

    def by(self, measure: Measure) -> Float[np.ndarray, "n"]:
        """Scores the candidate."""
        if isinstance(self.who, Arm):
            return measure.merge(self.who, self.options, self.examples)
        return measure.model(self.who, self.examples)

    def same(self, other: "Wanted") -> bool:
        """Whether both are the same score."""
        mine, others = (x.name if isinstance(x, Arm) else x for x in (self.who, other.who))
        return (
            mine == others
            and self.options.keys() == other.options.keys()
            and all(np.array_equal(self.options[k], other.options[k]) for k in self.options)
            and np.array_equal(self.examples, other.examples)
        )


class InMemory(Measure):
    """Scores pytrees.

    Args:
      models: The models.
      base: Their base; None without one.
      score: `score(params, batch)`; it is compiled once.
      data: A pytree of arrays `[n, ...]`.
      batch: The number of examples to score at a time.
    """

    def __init__(
        self, models: Sequence[PyTree], base: PyTree | None, score: Score, data: PyTree, batch: int
    ):
        self._models, self._base, self._data = models, base, jax.tree.map(np.asarray, data)
        self._points = [*models] if base is None else [*models, base]
        self._score, self._batch = jax.jit(score), batch
        self.examples = len(jax.tree.leaves(self._data)[0])

    def model(self, k: int, examples: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        return self.scores(self._points[k], examples)

    def merge(
        self, arm: Arm, options: Mapping[str, Any], examples: Int[np.ndarray, "n"]
    ) -> Float[np.ndarray, "n"]:
        return self.scores(arm.apply(self._models, self._base, options), examples)

    def descend(
        self, arm: Arm, options: Mapping[str, Any], examples: Int[np.ndarray, "n"], cost: float
    ) -> dict[str, Any]:
        """Improves hyperparameters by following the gradient of the mean score.

        Args:
          arm: The arm. Its merge must be differentiable with respect to the searched
            hyperparameters.
          options: The initial hyperparameters.
          examples: The examples.
          cost: The budget in scores of all examples. A gradient costs three scores.

        Returns:
          The hyperparameters, within the bounds.

        Raises:
          TypeError: If a hyperparameter cannot be traced, or the gradient with respect to it
            vanishes.
        """
        size = min(self._batch, len(examples))
        places = examples[: len(examples) // size * size].reshape(-1, size)
        batches = jax.tree.map(lambda x: x[places], self._data)
        low = {name: np.asarray(pair, float).T[0] for name, pair in arm.bounds.items()}
        high = {name: np.asarray(pair, float).T[1] for name, pair in arm.bounds.items()}
        try:
            learned = learn(
                lambda params, batch: -self._score(params, batch).mean(),
                lambda coefficients, _: arm.apply(self._models, self._base, coefficients),
                dict(options),
                batches,
                steps=max(1, int(cost * len(places) / 3)),
                optimizer=optax.adam(0.02),
                project=lambda c: {
                    name: jnp.clip(x, low[name], high[name]) for name, x in c.items()
                },
            )
        except TypeError as error:
            raise TypeError(
                f"refine: {arm.name} cannot be refined by gradients: {error}"
            ) from error
        found = {name: np.asarray(x, float) for name, x in learned.coefficients.items()}
        for name, x in found.items():
            inside = ((low[name] < x) & (x < high[name])).all()
            # Adam moves every hyperparameter with a gradient. A density has no gradient, because
            # entries are either kept or dropped.
            if inside and (x == np.asarray(options[name], np.float32)).all():
                raise TypeError(
                    f"refine: {arm.name} cannot be refined by gradients: {name} has none"
                )
        return {name: float(x) if x.ndim == 0 else x for name, x in found.items()}

    def scores(self, params: PyTree, examples: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        """Scores a pytree on given examples.

        Args:
          params: The pytree.
          examples: The positions of the examples in the data.

        Returns:
          The score of each.

        Raises:
          ValueError: If the score has another shape.
        """
        # The last batch is padded with the first example, so that all batches use the same program.
        rows = -(-len(examples) // self._batch) * self._batch
        filled = np.concatenate([examples, np.full(rows - len(examples), examples[0])])
        scores = []
        for places in filled.reshape(-1, self._batch):
            batch = jax.tree.map(lambda x, at=places: x[at], self._data)
            got = self._score(params, batch)
            if np.shape(got) != (self._batch,):
                raise ValueError(
                    f"score: expected a number for each of {self._batch} examples, got shape "
                    f"{list(np.shape(got))}"
                )
            scores.append(np.asarray(got, float))
        return np.concatenate(scores)[: len(examples)]


def search(
    models: Sequence[PyTree],
    base: PyTree | None = None,
    *,
    score: Score,
    data: PyTree,
    candidates: Iterable[str | Arm] | None = None,
    tasks: Sequence[Any] | None = None,
    names: Sequence[str] | None = None,
    groups: Sequence[str] = (),
    refine: Refine = "cmaes",
    budget: int = 60,
    seconds: float = math.inf,
    judge: float = 0.5,
    batch_size: int = 64,
    seed: int = 0,
    history: Sequence[Trial] = (),
    on_trial: Callable[[Trial], None] | None = None,
) -> Outcome:
    """Searches for a merge that is better than every single model, on held-out examples.

    Args:
      models: M pytrees of the same leaf paths and shapes, M >= 2.
      base: The pytree that they were fine-tuned from, if any.
      score: `score(params, batch)` returns a number for each example of a batch. Larger is better,
        so return the negative of a loss. It is compiled once.
      data: Examples outside the training data of all models, a pytree of arrays `[n, ...]`.
      candidates: Names of methods, "weights", and custom arms. By default all methods applicable to
        the models, and "weights".
      tasks: The task of each example, for several tasks. All tasks count equally.
      names: The names of the models; "model 0" and so on by default.
      groups: Patterns of leaf paths, for an arm with a scale for each pattern; see `arms`.
      refine: "cmaes" refines the best arm using only scores. "gradient" follows the gradient of the
        score with respect to weights and scales. It requires a differentiable score.
      budget: The number of scorings of all examples for choosing merges, more than M. Scoring a
        fraction of them counts as this fraction.
      seconds: A time limit for new trials. The final comparison still runs.
      judge: The fraction of examples that only the final comparison uses, in (0, 1).
      batch_size: The number of examples to score at a time.
      seed: The seed of the division of the examples and of all draws.
      history: The trials of an interrupted search with the same arguments. The search continues
        after them.
      on_trial: A function that is called with each new trial, for instance to record it for
        `history`.

    Returns:
      What to use, with the evidence.

    Raises:
      ValueError: For inconsistent arguments, scores that are not finite or have another shape, and
        methods that are unknown or not applicable to the models.

    >>> data = {"y": np.random.default_rng(0).normal(0.5, 1, (400, 1))}
    >>> models = [{"w": np.zeros(1, np.float32)}, {"w": np.ones(1, np.float32)}]
    >>> error = lambda params, batch: -((batch["y"] - params["w"]) ** 2).sum(-1)
    >>> found = search(models, score=error, data=data, candidates=["linear"], budget=6)
    >>> found.is_merge, found.p < 0.01
    (True, True)
    """
    one_of("refine", refine, Refine)
    sizes = {np.shape(x)[:1] for x in jax.tree.leaves(data)}
    if len(sizes) != 1 or sizes == {()}:
        raise ValueError(f"data: expected leaves [n, ...] of one length n, got {sorted(sizes)}")
    ((n,),) = sizes
    measure = InMemory(models, base, score, data, integer("batch_size", batch_size))
    return search_with(
        measure,
        n,
        arms(len(models), base is not None, candidates, groups=groups, seed=seed),
        names or [f"model {k}" for k in range(len(models))],
        with_base=base is not None,
        tasks=tasks,
        descend=measure.descend if refine == "gradient" else None,
        budget=budget,
        seconds=seconds,
        judge=judge,
        seed=seed,
        history=history,
        on_trial=on_trial,
    )


def search_with(
    measure: Measure,
    n: int,
    candidates: Sequence[Arm],
    names: Sequence[str],
    *,
    with_base: bool,
    tasks: Sequence[Any] | None = None,
    whole: bool = False,
    descend: Descend | None = None,
    budget: int = 60,
    seconds: float = math.inf,
    judge: float = 0.5,
    seed: int = 0,
    history: Sequence[Trial] = (),
    on_trial: Callable[[Trial], None] | None = None,
) -> Outcome:
    """Runs `search` with scores from any source.

    Args:
      measure: An object that scores models and merges on examples.
      n: The number of examples.
      candidates: The arms.
      names: The names of the models.
      with_base: Whether there is a base. Task arithmetic is then one of the references.
      tasks: The task of each example; one task by default.
      whole: Whether every candidate is scored on all examples for choosing merges. This is useful
        if scoring a few examples costs as much as scoring all.
      descend: A function that refines the best arm by gradients. By default CMA-ES refines it.
      budget: As in `search`.
      seconds: As in `search`.
      judge: As in `search`.
      seed: As in `search`.
      history: As in `search`.
      on_trial: As in `search`.

    Returns:
      What to use, with the evidence.

    Raises:
      ValueError: As in `search`.
    """
    static("judge", judge, lambda x: 0 < x < 1, "a number in (0, 1)")
    taken = [*names, "base", *(arm.name for arm in (*_references(with_base), *candidates))]
    if len(names) < 2 or len(set(taken)) < len(taken):
        raise ValueError(
            f"names: expected two or more models with unique names, got {list(names)}; "
            f"the arms are {', '.join(taken[len(names) :])}"
        )
    numbers, task_names = task_numbers(tasks, n)
    first, second = parts(numbers, judge, seed)
    references = _references(with_base)
    until = time.monotonic() + seconds
    run = _Run(measure, names, with_base, numbers, first, history, on_trial, until)
    integer("budget", budget, len(run.names) + len(references) + 1)

    points: list[tuple[int | Arm, dict[str, Any]]] = [(k, {}) for k in range(len(run.names))]
    points += [(arm, {}) for arm in references]
    run.ahead(points, first)
    for k in range(len(run.names)):
        run.model(k, first)
    for arm in references:
        run.merge(arm, {}, first)
    quadratic = _fitted(run, budget)
    if quadratic is not None:
        _try_optimum(run, quadratic)
    tried = _halve(run, _in_order(run, candidates, quadratic), budget, seed, whole)
    _refine(run, budget, seed, descend)

    merges = [trial for trial in run.complete if trial.name in run.arms]
    best = max(merges, key=lambda trial: trial.score)
    predictions = () if quadratic is None else _predicted(run, quadratic, merges)
    on_front, evaluations = front(run.complete), run.evaluations
    p, single, comparisons, models = _judged(run, best, references, second)
    better = p <= LEVEL
    return Outcome(
        recommended=best.name if better else single,
        options=best.options if better else {},
        found=best,
        arm=run.arms[best.name],
        p=p,
        comparisons=comparisons,
        models=models,
        predictions=predictions,
        front=on_front,
        tasks=task_names,
        trials=tuple(run.trials),
        searched=len(first),
        judged=len(second),
        evaluations=evaluations,
        untried=tuple(arm.name for arm in candidates if arm.name not in tried),
    )


def _references(with_base: bool) -> tuple[Arm, ...]:
    """Returns the reference arms, which require no search."""
    soup = usual(False)
    return (soup, usual(True)) if with_base else (soup,)


def parts(
    tasks: Int[np.ndarray, "n"], judge: float, seed: int
) -> tuple[Int[np.ndarray, "a"], Int[np.ndarray, "b"]]:
    """Divides the examples into a part for choosing merges and a part for the comparison.

    Each task is divided in the same proportion. The order within the first part alternates between
    tasks, so each prefix is a small version of the part.

    Args:
      tasks: The number of each example's task, from 0.
      judge: The fraction of examples for the comparison.
      seed: The seed of the division.

    Returns:
      The positions of the examples in both parts.

    Raises:
      ValueError: If a part has fewer than two examples of a task.
    """
    rng = np.random.default_rng([seed, 0])
    first, second = [], []
    for task in range(tasks.max(initial=0) + 1):
        own = rng.permutation(np.flatnonzero(tasks == task))
        cut = len(own) - round(judge * len(own))
        if min(cut, len(own) - cut) < 2:
            raise ValueError(
                f"data: expected two or more examples of each task in both parts, got {len(own)} "
                f"of task {task}"
            )
        # Evenly spaced positions in [0, 1) make tasks of any size alternate.
        first += [((k + 0.5) / cut, task, example) for k, example in enumerate(own[:cut])]
        second += own[cut:].tolist()
    return np.array([example for *_, example in sorted(first)]), np.array(sorted(second))


class _Run:
    """The trials of a search so far, computed or from a history."""

    def __init__(
        self,
        measure: Measure,
        names: Sequence[str],
        with_base: bool,
        tasks: Int[np.ndarray, "n"],
        first: Int[np.ndarray, "a"],
        history: Sequence[Trial],
        on_trial: Callable[[Trial], None] | None,
        until: float,
    ):
        self.measure, self.tasks = measure, tasks
        self.count, self.with_base = len(names), with_base
        self.names = [*names, "base"] if with_base else list(names)
        self.first, self.until = first, until
        self.trials: list[Trial] = []
        self.spent = 0.0  # by gradients, which do not count as trials
        self.arms: dict[str, Arm] = {}
        self._history, self._on_trial = history, on_trial

    @property
    def complete(self) -> list[Trial]:
        """Returns the trials on the whole first part."""
        return [trial for trial in self.trials if len(trial.examples) == len(self.first)]

    @property
    def evaluations(self) -> float:
        """Returns the number of scorings of the whole first part."""
        return self.spent + sum(len(x.examples) for x in self.trials) / len(self.first)

    @property
    def over(self) -> bool:
        """Checks whether the time limit has passed; replaying a history does not count."""
        return len(self.trials) >= len(self._history) and time.monotonic() > self.until

    def ahead(self, wanted: Sequence[tuple[int | Arm, Mapping[str, Any]]], examples: Any) -> None:
        """Announces the next trials, which a measure with `ahead` may score at the same time."""
        known = max(0, len(self._history) - len(self.trials))
        new = [Wanted(who, options, examples) for who, options in wanted[known:]]
        if hasattr(self.measure, "ahead") and new and not self.over:
            self.measure.ahead(new)  # pyright: ignore[reportAttributeAccessIssue]

    def model(self, k: int, examples: Int[np.ndarray, "n"]) -> Trial:
        """Scores a model."""
        return self._trial(self.names[k], {}, examples, lambda: self.measure.model(k, examples))

    def merge(self, arm: Arm, options: Mapping[str, Any], examples: Any) -> Trial:
        """Scores a merge."""
        self.arms[arm.name] = arm
        measure = self.measure
        return self._trial(
            arm.name, options, examples, lambda: measure.merge(arm, options, examples)
        )

    def _trial(
        self,
        name: str,
        options: Mapping[str, Any],
        examples: Int[np.ndarray, "n"],
        scores: Callable[[], Float[np.ndarray, "n"]],
    ) -> Trial:
        place = len(self.trials)
        if place < len(self._history):
            trial = self._history[place]
            if trial.name != name or not _same(trial, options, examples):
                raise ValueError(
                    f"history[{place}]: expected a trial of {name} with {dict(options)}, got "
                    f"{trial.name} with {dict(trial.options)}"
                )
        else:
            got = np.asarray(scores(), float)
            if got.shape != examples.shape or np.isnan(got).any():
                raise ValueError(
                    f"score of {name}: expected {len(examples)} numbers, got shape "
                    f"{list(got.shape)}{', with NaN' * bool(np.isnan(got).any())}"
                )
            by_task, _ = means(got, self.tasks[examples])
            trial = Trial(name, dict(options), examples, got, by_task)
            if self._on_trial is not None:
                self._on_trial(trial)
        self.trials.append(trial)
        return trial


def _same(trial: Trial, options: Mapping[str, Any], examples: Int[np.ndarray, "n"]) -> bool:
    return (
        trial.options.keys() == options.keys()
        and all(np.array_equal(trial.options[key], options[key]) for key in options)
        and np.array_equal(trial.examples, examples)
    )


def _halve(run: _Run, ready: Sequence[Arm], budget: int, seed: int, whole: bool) -> set[str]:
    """Compares many hyperparameters on few examples, then fewer on more; returns tried arms."""
    n = len(run.first)
    rungs = [n]
    least = _LEAST * (run.tasks.max(initial=0) + 1)
    while not whole and rungs[0] // _HALVED >= least and len(rungs) < 3:
        rungs.insert(0, rungs[0] // _HALVED)
    # Half of the remaining budget. Each rung costs the same, count x its examples.
    rounds = (budget - run.evaluations) / 2 / len(rungs)
    count = max(1, int(rounds * n / rungs[0]))
    points = [(arm, arm.first()) for arm in ready[:count]]
    searched = [arm for arm in ready if arm.bounds]
    more = max(0, count - len(points)) // max(len(searched), 1)
    rng = np.random.default_rng([seed, 1])
    for arm in searched:
        points += [(arm, options) for options in arm.spread(more, rng)]
    tried = set()
    for k, rung in enumerate(rungs):
        scored = []
        run.ahead(points, run.first[:rung])
        for arm, options in points:
            if run.over:
                break
            tried.add(arm.name)
            scored.append((run.merge(arm, options, run.first[:rung]).score, arm, options))
        scored.sort(key=lambda one: -one[0])
        kept = len(scored) if k == len(rungs) - 1 else max(1, len(scored) // _HALVED)
        points = [(arm, options) for _, arm, options in scored[:kept]]
    return tried


def _in_order(run: _Run, candidates: Sequence[Arm], quadratic: Quadratic | None) -> list[Arm]:
    """Puts weighted means first, or last if there is a barrier between the models.

    The order matters if the budget does not reach all arms. The score half-way between two models
    shows whether there is a barrier between them. With a barrier, means of models are bad.
    """
    if quadratic is None:
        return list(candidates)
    count = run.count
    barrier = (quadratic.curvature[:count, :count] < 0).sum() > count * (count - 1) / 2
    means = [affine(arm, arm.first(), count, run.with_base) is not None for arm in candidates]
    ranked = sorted(zip(means, candidates, strict=True), key=lambda one: one[0] == barrier)
    return [arm for _, arm in ranked]


def _fitted(run: _Run, budget: int) -> Quadratic | None:
    """Fits a quadratic score to the models and the means of each pair.

    It does so only if this takes at most a fifth of the budget.
    """
    points = len(run.names)
    if points * (points - 1) / 2 > budget / 5:
        return None
    scores = np.array([trial.score for trial in run.trials[:points]])
    gains = np.zeros((points, points))
    pairs = [*itertools.combinations(range(points), 2)]
    halves = [_half(run, i, j) for i, j in pairs]
    run.ahead(halves, run.first)
    for (i, j), (arm, options) in zip(pairs, halves, strict=True):
        if run.over:
            return None
        middle = run.merge(arm, options, run.first).score
        gains[i, j] = gains[j, i] = middle - (scores[i] + scores[j]) / 2
    return fit(scores, gains)


def _half(run: _Run, i: int, j: int) -> tuple[Arm, dict[str, Any]]:
    """The mean of two models, or of a model and the base."""
    weights = np.zeros(len(run.names))
    weights[[i, j]] = 0.5
    return _mean(run, f"half of {run.names[i]}, {run.names[j]}", weights)


def _mean(run: _Run, name: str, weights: Float[np.ndarray, "p"]) -> tuple[Arm, dict[str, Any]]:
    """A weighted mean of models, and of the base if given."""
    make = methods.task_arithmetic if run.with_base else methods.linear
    return Arm(name, make), {"weights": weights[: run.count]}


def _try_optimum(run: _Run, quadratic: Quadratic) -> None:
    """Tries the best weighted mean according to the quadratic score."""
    if not run.over:
        run.merge(*_mean(run, "quadratic optimum", quadratic.best()), run.first)


def _predicted(run: _Run, quadratic: Quadratic, merges: Sequence[Trial]) -> tuple[Prediction, ...]:
    """Predicts the score of each measured weighted mean that was not used in the fit."""
    found = []
    for trial in merges:
        weights = affine(run.arms[trial.name], trial.options, run.count, run.with_base)
        # Means of two points were used in the fit, whatever their name.
        if weights is not None and not np.isin(weights, (0.0, 0.5)).all():
            found.append(Prediction(trial.name, quadratic.at(weights), trial.score))
    return tuple(found)


def _refine(run: _Run, budget: int, seed: int, descend: Descend | None) -> None:
    """Refines the best arm with hyperparameters, using the rest of the budget."""
    open_ones = [t for t in run.complete if t.name in run.arms and run.arms[t.name].bounds]
    left = int(budget - run.evaluations)
    if not open_ones or left < 2:
        return
    best = max(open_ones, key=lambda trial: trial.score)
    arm = run.arms[best.name]
    if descend is not None:
        if not run.over:
            run.merge(arm, descend(arm, best.options, run.first, left - 1), run.first)
            run.spent += left - 1
        return

    def objective(options: dict[str, Any]) -> float:
        # After the time limit nothing is computed, and CMA-ES ends soon.
        return math.inf if run.over else -run.merge(arm, options, run.first).score

    evolve(objective, arm.bounds, budget=left, seed=seed, start=best.options, spread=1 / 8)


def _judged(
    run: _Run, best: Trial, references: Sequence[Arm], second: Int[np.ndarray, "b"]
) -> tuple[float, str, tuple[Comparison, ...], dict[str, float]]:
    """Compares the chosen merge with the models and the references, on held-out examples.

    Returns the p value of the merge against all models, the best model, the comparisons, and the
    score of each model.
    """
    tasks = run.tasks[second]
    arms = [(arm, {}) for arm in references]
    if best.name not in [arm.name for arm in references]:
        arms.append((run.arms[best.name], dict(best.options)))
    run.ahead([*((k, {}) for k in range(len(run.names))), *arms], second)
    models = [run.model(k, second) for k in range(len(run.names))]
    others = [run.merge(arm, {}, second) for arm in references]
    same = [other for other in others if other.name == best.name]
    merge = same[0] if same else run.merge(run.arms[best.name], best.options, second)
    p = max(compare(m.name, merge.scores, m.scores, tasks).p for m in models)
    # The best model has the best score on all examples.
    weight = len(second) / (len(second) + len(run.first))
    overall = [
        (1 - weight) * a.score + weight * b.score
        for a, b in zip(run.trials[: len(models)], models, strict=True)
    ]
    single = models[int(np.argmax(overall))]
    against = [single, *(other for other in others if other is not merge)]
    confidence = 1 - LEVEL / len(against)
    comparisons = tuple(
        compare(one.name, merge.scores, one.scores, tasks, confidence=confidence) for one in against
    )
    return p, single.name, comparisons, {m.name: m.score for m in models}
