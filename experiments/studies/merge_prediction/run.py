"""Runs `merge_prediction` family by family and gathers the results in one dataset.

`tasks` trains base models and experts, `probes` measures merges, `ranking` compares predictors with
results.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import PyTree

from experiments.data import image_tasks
from experiments.data.files import refused
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.lab.sweep import sweep
from experiments.studies.merge_prediction import probes, ranking, tasks
from experiments.studies.merge_prediction.config import Config

OUTCOMES = (*probes.METHODS, "averaging, relative", "averaging, accuracy")


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Trains base models and experts, merges them, and ranks the predictors.

    Each family has a stage for the distances between its tasks, one for its networks, and one for
    every chunk of merges. The ranking is a separate stage.

    It returns a dataset over merges: the predictors (`value`), the results (`result`, the loss or
    accuracy that merging costs), `kept` (accuracy relative to the experts' own) and the parts of
    each merge. Over scope, outcome and predictor it has the correlation `rho` with its interval
    from `low` to `high`. `passes` is the cost of each predictor.
    """
    with refused():
        subjects = [load(name, config) for name in config.families]
    parts = [_family(config, i, *subject, stage) for i, subject in enumerate(subjects)]
    results = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    about, predictors = results["about"], results["predictor"]
    own, merged = results["own"], results["merged"]
    excess = merged["loss"] - own["loss"][:, None]
    outcome = np.concatenate(
        [
            excess,
            excess[:, :1] / own["loss"][:, None],
            own["accuracy"][:, None] - merged["accuracy"][:, :1],
        ],
        1,
    )
    x = np.stack([predictors[name] for name in probes.PREDICTORS], 1)
    scopes = ranking.scopes(config.families, about)
    ranked = stage(
        "rank the predictors",
        lambda: ranking.rank(
            x, outcome, about["cluster"], about["family"], list(scopes.values()), config.draws,
            config.seed,
        )._asdict(),
    )  # fmt: skip
    shape = ("scope", "outcome", "predictor")
    return xr.Dataset(
        {
            "value": (("merge", "predictor"), x),
            "result": (("merge", "outcome"), outcome),
            "kept": (("merge", "rule"), merged["accuracy"] / own["accuracy"][:, None]),
            "own_loss": ("merge", own["loss"]),
            "base_loss": ("merge", results["base"]["loss"]),
            "passes": (
                ("predictor", "size"),
                np.array([[p.passes(k) for k in config.sizes] for p in probes.PREDICTORS.values()]),
            ),
            "within": (("scope", "merge"), np.stack(list(scopes.values()))),
            **{name: (shape, ranked[name]) for name in ranking.Ranking._fields},
            **{name: ("merge", about[name]) for name in about},
        },
        {
            "predictor": list(probes.PREDICTORS),
            "outcome": list(OUTCOMES),
            "rule": list(probes.METHODS),
            "scope": list(scopes),
            "size": list(config.sizes),
            "learned": list(config.families),
        },
    )


def load(learned: tasks.Learned, config: Config) -> tuple[tasks.Family, tasks.Data]:
    """Reads the data of one family, and describes its network.

    It raises `DataError` if the data cannot be read or are not sufficient.
    """
    each, seed = tasks.Examples(config.learn, config.held_out), config.seed
    if learned == "images":
        classes, train = config.data.classes, config.train
        family, pool = tasks.of_images(classes), config.data.pool(seed)
        image_tasks.check_left("train", train, 0, len(pool.labels))
        return family, tasks.rotations_and_classes(pool, classes, train, seed, family.tasks, each)
    corpus = config.text.read("text")
    family = tasks.of_text(corpus.vocab)
    return family, tasks.quantiles_of_text(corpus, seed, family.tasks, each)


def _family(
    config: Config, number: int, family: tasks.Family, data: tasks.Data, stage: Stage
) -> dict[str, Any]:
    """Trains and measures all networks of one family."""
    name, key = config.families[number], jax.random.fold_in(jax.random.key(config.seed), number)
    far = stage(f"{name}: distances of tasks", partial(probes.apart, data.points, key))
    trained = stage(f"{name}: bases and experts", lambda: _train(config, family, data, key))
    parts = []
    for k, (merges, related) in _merges(config, family, number).items():
        measured = sweep(
            lambda i, m=merges: probes.measure(
                family, trained["base"], trained["expert"], data, probes.at(m, i), key
            ),
            np.arange(len(merges.base)),
            stage,
            f"{name}: merges of {k}",
            chunk=config.chunk,
        )
        for label, table in far.items():
            measured["predictor"][label] = probes.over_pairs(table, merges.task)
        about = {
            "family": np.full(len(merges.base), number),
            "related": related,
            "models": np.full(len(merges.base), k),
            "pretrain": np.asarray(config.pretrain)[merges.base // config.bases],
            "rate": merges.rate,
            "steps": merges.steps,
            "cluster": merges.base + number * len(config.pretrain) * config.bases,
        }
        parts.append({**measured, "about": about})
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def _train(
    config: Config, family: tasks.Family, data: tasks.Data, key: jax.Array
) -> dict[str, PyTree]:
    """Trains the base models and their experts.

    Base models are ordered by length of pre-training; experts by base, rate, task and steps.
    """
    learn = jax.tree.map(jnp.asarray, data.learn)
    upright, steps = jax.tree.map(jnp.asarray, data.base), jnp.asarray(config.steps)

    def of_base(i: int) -> tuple[PyTree, PyTree]:
        first, *rest = jax.random.split(jax.random.fold_in(key, i), 1 + len(family.rates))
        base = tasks.pretrain(family, upright, first, config.pretrain[i // config.bases])
        tuned = [
            tasks.tune(family, base, learn, rate, k, steps)
            for rate, k in zip(family.rates, rest, strict=True)
        ]
        return base, jax.tree.map(lambda *x: jnp.stack(x), *tuned)

    # The first call compiles. The others run in parallel, because each of these networks uses only
    # one core.
    first = jax.block_until_ready(of_base(0))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = [first, *pool.map(of_base, range(1, len(config.pretrain) * config.bases))]
    bases, experts = jax.tree.map(lambda *x: np.stack(x), *results)
    # `_merges` computes the same position of an expert in the flat axis.
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[4:]), experts)
    return {"base": bases, "expert": flat}


def _merges(
    config: Config, family: tasks.Family, number: int
) -> dict[int, tuple[probes.Merges, np.ndarray]]:
    """Chooses the merges of a family.

    There are `config.merges` merges of a base's experts for every base model, learning rate and
    number of steps. Every base model and rate has one more merge. Its other experts come from other
    base models with the same length of pre-training. The numbers of experts alternate.

    Returns, by the number of experts: the merges, and whether their experts share a base model.
    """
    rng = np.random.default_rng([config.seed, number])
    R, T, S = len(family.rates), len(family.tasks), len(config.steps)
    rows: dict[int, list[tuple[Any, ...]]] = {k: [] for k in config.sizes}
    turn = 0

    def add(b: int, r: int, s: int, related: bool) -> None:
        nonlocal turn
        k = config.sizes[turn % len(config.sizes)]
        turn += 1
        first, i = b - b % config.bases, b % config.bases
        # Unrelated experts come from the next base models with the same length of pre-training,
        # cyclically.
        owners = np.array([first + (i + (0 if related else j)) % config.bases for j in range(k)])
        chosen = rng.choice(T, k, replace=False)
        expert = ((owners * R + r) * T + chosen) * S + s
        rows[k].append((expert, chosen, b, family.rates[r], config.steps[s], related))

    for b in range(len(config.pretrain) * config.bases):
        for r in range(R):
            for s in range(S):
                for _ in range(config.merges):
                    add(b, r, s, True)
            add(b, r, int(rng.integers(S)), False)
    by_count = {}
    for k, entries in rows.items():
        if entries:
            *merges, related = (np.stack(column) for column in zip(*entries, strict=True))
            by_count[k] = probes.Merges(*merges), related
    return by_count
