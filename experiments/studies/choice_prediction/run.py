"""The run of `choice_prediction`: settings, forecasts, and outcomes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from experiments.data.files import refused
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.lab.sweep import sweep
from experiments.studies.choice_prediction import forecasts, networks
from experiments.studies.choice_prediction.config import Config
from experiments.studies.choice_prediction.networks import CLASSES, Examples, Family, How, Problem
from theory import merging

OPTIONS = ("base", *forecasts.MERGES)


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Draws settings, forecasts the best choice in each, and trains and merges the networks.

    It returns the test losses `loss` over (setting, seed, choice) and `merged_loss` over (merge,
    seed, option); the probabilities `chance` (with an axis theory) and `merged_chance`; the
    numbers that theory measured; and the factors of each setting.
    """
    with refused():
        subjects = {name: load(name, config) for name in config.families}
    parts = {
        "transfer": [_part(config, k, subjects, _transfers, stage) for k in subjects],
        "merge": [_part(config, k, subjects, _merges, stage) for k in subjects],
    }
    join = lambda *x: np.concatenate(x)  # noqa: E731
    transfer, merge = (jax.tree.map(join, *part) for part in parts.values())
    repeated = (*("setting", "seed"),)
    data: dict[str, Any] = {
        "loss": ((*repeated, "choice"), transfer["loss"]),
        "chance": ((*repeated, "theory", "choice"), transfer["chance"]),
        "merged_loss": (("merge", "seed", "option"), merge["loss"]),
        "merged_chance": (("merge", "seed", "option"), merge["chance"]),
        **{name: (repeated, values) for name, values in transfer["numbers"].items()},
        **{name: ("setting", values) for name, values in transfer["factors"].items()},
        **{f"merged_{k}": (("merge", "seed"), x) for k, x in merge["numbers"].items()},
        **{f"merged_{k}": ("merge", x) for k, x in merge["factors"].items()},
    }
    coords = {
        "choice": list(networks.CHOICES),
        "theory": list(forecasts.THEORIES),
        "option": list(OPTIONS),
    }
    about = {"draws": config.draws, "seed": config.seed, "families": list(config.families)}
    return xr.Dataset(data, coords, about)


def load(name: str, config: Config) -> tuple[Family, Examples]:
    """Reads the data of a family, and describes its network.

    It raises `DataError` if the data cannot be read or are not sufficient.
    """
    if name == "images":
        return networks.of_images(config.data.pool(config.seed))
    return networks.of_text(config.text.read("text"), config.seed)


def _part(
    config: Config,
    name: str,
    subjects: Mapping[str, tuple[Family, Examples]],
    compute: Callable[..., dict[str, Any]],
    stage: Stage,
) -> dict[str, Any]:
    """Computes the transfers or the merges of one family, with axes (setting, seed, ...)."""
    kind = "transfers" if compute is _transfers else "merges"
    number = ("images", "text").index(name)
    family, data = subjects[name]
    rng = np.random.default_rng([config.seed, number, kind == "merges"])
    factors = settings(config, name, rng, getattr(config, kind))
    groups = factors["experts"] if kind == "merges" else np.ones(getattr(config, kind), int)
    results: dict[int, Any] = {}
    for tasks in np.unique(groups):
        (chosen,) = np.nonzero(groups == tasks)
        problems = _problems(config, rng, data, factors, np.repeat(chosen, config.seeds), tasks)
        found = sweep(
            lambda i, p=problems: compute(config, family, data, jax.tree.map(lambda x: x[i], p)),
            np.arange(len(problems.key)),
            stage,
            f"{name}: {kind} of {tasks}" if kind == "merges" else f"{name}: {kind}",
            chunk=config.chunk,
        )
        split = lambda x: x.reshape(-1, config.seeds, *x.shape[1:])  # noqa: E731
        found = jax.tree.map(split, found)
        results |= {
            k: jax.tree.map(lambda x, j=j: x[j], found) for j, k in enumerate(map(int, chosen))
        }
    ordered = [results[k] for k in range(len(groups))]
    about = {**factors, "family": np.full(len(groups), number)}
    return {**jax.tree.map(lambda *x: np.stack(x), *ordered), "factors": about}


def settings(
    config: Config, name: str, rng: np.random.Generator, count: int
) -> dict[str, np.ndarray]:
    """Draws the factors of a family's settings: every level occurs equally often, up to one."""
    levels = {**vars(config.levels), "shift": (0, 1)}
    of_text = {k: levels.pop(f"text_{k}") for k in ("samples", "source")}
    levels |= of_text if name == "text" else {}
    return {k: np.asarray(x)[rng.permutation(count) % len(x)] for k, x in levels.items()}


def _problems(
    config: Config,
    rng: np.random.Generator,
    data: Examples,
    factors: Mapping[str, np.ndarray],
    chosen: np.ndarray,
    tasks: int,
) -> Problem:
    """Draws the data of repetitions of settings."""
    rows: list[Problem] = []
    most, total = max(factors["samples"]), max(factors["source"])
    cuts = np.cumsum([total, tasks * most, config.validation, config.test])
    if cuts[-1] > len(data.classes):
        raise ValueError(f"test must leave examples: {cuts[-1]} of {len(data.classes)} are needed")
    for k in chosen:
        at = {name: values[k] for name, values in factors.items()}
        order = rng.permutation(len(data.classes))
        source, examples, validation, test = np.split(order, cuts)[:4]
        signs = rng.permutation(np.repeat([1.0, -1.0], CLASSES // 2))
        flipped = [rng.permutation(CLASSES) < at["flips"] for _ in range(tasks)]
        wrong = np.where(rng.random((tasks, most)) < at["noises"], -1.0, 1.0)
        # Experts of one merge have the same inputs.
        shift = at["shift"] * (tasks == 1)
        rows.append(
            Problem(
                rng.integers(2**31), shift, source, at["source"], signs,
                examples.reshape(tasks, most), at["samples"], wrong,
                np.where(flipped, -signs, signs), validation, test,
            )
        )  # fmt: skip
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def _how(config: Config) -> How:
    how = config.training
    return How(**vars(how))


def _transfers(config: Config, family: Family, data: Examples, problems: Problem) -> dict[str, Any]:
    """Trains networks in some repetitions, and forecasts their order."""
    found = jax.tree.map(np.asarray, networks.transfers(family, _how(config), data, problems))
    rows = []
    for i, n in enumerate(problems.count):
        at = {name: np.asarray(x[i], float) for name, x in found.items() if name != "loss"}
        at = {name: x[(slice(n),) * x.ndim] for name, x in at.items()}
        labels, source = at["labels"], at["source_output"]
        risks, numbers = forecasts.by_numbers(at["source_gram"], labels, source)
        first, head, later = (at[f"{name}_gram"] for name in ("start", "head", "source"))
        others = forecasts.by_kernels(first, head, later, labels, at["start_output"], source)
        chance = partial(forecasts.chances, rng=_rng(problems, i), draws=config.draws)
        both = np.stack([chance(risks), chance(others)])
        rows.append({"loss": found["loss"][i], "chance": both, "numbers": numbers})
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def _rng(problems: Problem, i: int) -> np.random.Generator:
    return np.random.default_rng(int(problems.key[i]))


def _merges(config: Config, family: Family, data: Examples, problems: Problem) -> dict[str, Any]:
    """Trains and merges experts in some repetitions, and forecasts the order of the merges."""
    found = jax.tree.map(np.asarray, networks.experts(family, _how(config), data, problems))
    rows, flat = [], []
    for i, base in enumerate(found["base"]):
        vectors, halves = (np.asarray(found[k][i], float) for k in ("vectors", "halves"))
        risks, fit = forecasts.by_spread(vectors, halves)
        updates = [np.zeros_like(vectors[0])]
        for name, (method, density, scale) in forecasts.MERGES.items():
            update = merging.merge_drawn(jax.random.key(0), vectors, method, density)
            updates.append(forecasts.scale_of(name, scale, len(vectors)) * update)
        flat.append(base + np.stack(updates))
        chance = forecasts.chances(risks, _rng(problems, i), config.draws)
        names = "shared", "heterogeneity", "noise", "support"
        numbers = {name: np.asarray(getattr(fit, name)) for name in names}
        rows.append({"chance": chance, "numbers": numbers})
    weights = jnp.asarray(np.stack(flat), found["base"].dtype)
    loss = np.asarray(networks.merged_losses(family, data, problems, weights))
    return {"loss": loss, **jax.tree.map(lambda *x: np.stack(x), *rows)}
