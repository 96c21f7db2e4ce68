"""Merging on real digits, against a NumPy reference and the laws of the merges."""

import numpy as np
import pytest
from tiny_runs import tiny_run

from experiments.data import digits, image_tasks
from experiments.lab import registry

pytestmark = pytest.mark.slow
md = registry.load("merge_digits")

TINY = md.presets["tiny"]
ONE = 1.5 / 200  # accuracies may differ by one near-tied digit of at least 200


@pytest.fixture(scope="module")
def ran():
    return tiny_run("merge_digits")


def _forward(params, x):
    layers = params["params"]
    for name in sorted(layers):
        x = x @ layers[name]["kernel"] + layers[name]["bias"]
        x = x if name == "out" else np.maximum(x, 0)
    return x


def _map(fn, *trees):
    if isinstance(trees[0], dict):
        return {key: _map(fn, *(tree[key] for tree in trees)) for key in trees[0]}
    return fn(*trees)


def _leaves(tree):
    return [x for key in tree for x in _leaves(tree[key])] if isinstance(tree, dict) else [tree]


def _accuracy(params, task, index):
    chosen = index[task.member[index]]
    return (_forward(params, task.images[chosen]).argmax(-1) == task.labels[chosen]).mean()


def _ties(base, experts, density, scale):
    deltas = [_map(np.subtract, expert, base) for expert in experts]
    size = sum(x.size for x in _leaves(base))
    kept = []
    for delta in deltas:
        flat = np.concatenate([np.abs(x).ravel() for x in _leaves(delta)])
        threshold = np.sort(flat)[size - round(density * size)]
        kept.append(_map(lambda x, t=threshold: np.where(np.abs(x) >= t, x, 0), delta))

    def merge(b, *vectors):
        vectors = np.stack(vectors)
        agree = (np.sign(vectors) == np.sign(vectors.sum(0))) & (vectors != 0)
        return b + scale * (vectors * agree).sum(0) / np.maximum(agree.sum(0), 1)

    return _map(merge, base, *kept)


def test_every_model_is_graded_as_numpy_does(ran):
    dataset, stages = ran
    pool = TINY.data.pool(TINY.seed)
    tasks = [image_tasks.of(pool, task) for task in TINY.tasks]
    how = {"examples": digits.EXAMPLES, "train": TINY.train, "validation": 300}
    split = image_tasks.split(TINY.seed, TINY.replicates, **how)
    k = len(tasks)
    for r in range(TINY.replicates):
        base = _map(lambda x, r=r: x[r], stages["pre-train the base"])
        experts = [
            _map(lambda x, r=r, i=i: x[r, i], stages["fine-tune the experts"]) for i in range(k)
        ]
        scale = dict(zip(dataset["merge"].values, dataset["chosen_scale"].values[r], strict=True))
        arithmetic = _map(
            lambda b, *e, s=scale["task arithmetic"]: b + s * (np.sum(e, axis=0) - k * b),
            base,
            *experts,
        )
        models = {
            "base": base,
            **{f"expert: {t}": e for t, e in zip(TINY.tasks, experts, strict=True)},
            "soup": _map(lambda *e: np.mean(e, axis=0), *experts),
            "task arithmetic": arithmetic,
            "TIES": _ties(base, experts, TINY.merging.density, scale["TIES"]),
        }
        assert list(models) == list(dataset["model"].values)
        for name, params in models.items():
            for task, name_of_task in zip(tasks, TINY.tasks, strict=True):
                found = dataset["accuracy"].sel(model=name, task=name_of_task)[r]
                assert abs(found - _accuracy(params, task, split.test[r])) < ONE
        middle = _map(lambda *e: np.mean(e, axis=0), *experts[:2])
        for task, end in zip(tasks[:2], TINY.tasks, strict=False):
            found = dataset["line_accuracy"].sel(weight=0.5, end=end)[r]
            assert abs(found - _accuracy(middle, task, split.test[r])) < ONE


def test_the_chosen_scale_is_the_best_one(ran):
    dataset, _ = ran
    best = dataset["validation"].max("scale")
    chosen = dataset["validation"].sel(scale=dataset["chosen_scale"])
    np.testing.assert_array_equal(best, chosen)


def test_the_line_starts_and_ends_at_the_experts(ran):
    dataset, _ = ran
    for i, weight in enumerate((0, -1)):
        expert = f"expert: {TINY.tasks[i]}"
        accuracy = dataset["accuracy"].sel(model=expert, task=list(TINY.tasks[:2])).values
        for line in ("line_accuracy", "line_predicted", "line_chord"):
            found = dataset[line].isel(weight=weight).values
            np.testing.assert_allclose(found, accuracy, atol=ONE)


def test_experts_learn_their_task(ran):
    dataset, _ = ran
    mean = dataset["accuracy"].mean("replicate")
    for task in TINY.tasks:
        own = float(mean.sel(model=f"expert: {task}", task=task))
        assert own > 0.8  # chance is 0.1 (0.2 among five classes known to be given)
        if task.startswith("rotate"):
            assert own > float(mean.sel(model="base", task=task)) + 0.1


def test_only_linear_merges_are_predicted(ran):
    dataset, _ = ran
    known = np.isfinite(dataset["predicted"]).all(("replicate", "task"))
    assert list(dataset["model"].values[known]) == ["soup", "task arithmetic"]
