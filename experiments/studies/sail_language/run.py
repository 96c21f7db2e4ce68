"""The run of `sail_language`, of networks that it trains or of checkpoints on disk.

It names the stages and makes the dataset of their results. `checkpoints` has the run of those.
"""

from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from experiments.data.files import refused
from experiments.data.registry import OFFLINE_TEXT
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.measures.savings import savings
from experiments.studies.sail_language import checkpoints, costs, data, parts, retraining
from experiments.studies.sail_language.config import MADE_OF, RETRAINED, Config
from experiments.training.sharding import layout


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Trains the sources, chooses weights and trains on the target, stages for each replicate.

    It returns the dataset:
    - `loss` in nats on held-out text of D_t, `(way, seed, step)`, and `accuracy`,
      `(way, seed, when, task)`;
    - `saved`, `compute_saved` and `compute_saved_with_sources`, `(way, seed)`: steps and shares
      of compute that a start saves against scratch until the least loss that both reach;
    - `gamma_loss`, `(pair, seed, text, gamma)`: the loss between two sources before training;
    - `gamma_swept`, `(pair, seed)`, the gamma of least validation loss, and `gamma_distance`,
      `(seed,)`, that of eq. 11;
    - `retrained_loss`, `(seed, text, look, gamma)`: the loss after retraining from each gamma,
      and `gamma_retrained`, `(seed, look)`, that of least validation loss then; only if the ways
      have it;
    - `taken`, `(seed, source)`: whether the greedy soup has taken each source;
    - `series_loss`, `(seed, checkpoint, of)`: the losses of the first source's checkpoints.

    It raises `DataError` if data are missing or too few, or devices cannot share the batch.
    """
    if config.checkpoints is not None:
        return checkpoints.run(config, stage)
    with refused():
        corpus = data.load(config)
        _check(config, corpus)
    learners = parts.learners(config, corpus.vocab)
    results: list[dict[str, Any]] = []
    for seed in range(config.replicates):
        learn = partial(parts.learn_sources, config, learners, corpus, seed)
        sources = stage(f"sources, seed {seed}", learn, folder=True)
        target = learners["target"]
        chosen = stage(
            f"weights, seed {seed}", partial(parts.choose, config, target, corpus, sources, seed)
        )
        if RETRAINED in config.ways:
            pair, exams = (sources["one"], sources["two"]), (corpus.validation, corpus.held_out)
            along = parts.on_target(config, corpus, seed)
            chosen = chosen | retraining.sweep(
                config, stage, f"seed {seed}", target, pair, *along, exams
            )
        ways = {
            way: stage(
                f"{way}, seed {seed}",
                partial(parts.follow, config, way, target, corpus, sources, chosen, seed),
                folder=True,
            )
            for way in config.ways
        }
        results.append({"series": sources["series_loss"], "chosen": chosen, "ways": ways})
    return _dataset(config, corpus, costs.costs(config, learners), results)


def _check(config: Config, corpus: data.Corpus) -> None:
    """Checks what only the text and the devices can tell, before any training."""
    a, b, target = map(len, corpus.parts)
    # Called for its error alone, which names what the overlaps leave too few blocks of.
    data.sources(config, corpus, 0)
    if config.weight.blocks > target:
        raise ValueError(
            f"weight.blocks must be at most {target}; got {config.weight.blocks} (parts of {a}, "
            f"{b} and {target} blocks)"
        )
    layout(config.shard).check(**{"budget.batch": config.budget.batch // config.micro_batches})


def _dataset(
    config: Config, corpus: data.Corpus, cost: costs.Costs, results: list[dict[str, Any]]
) -> xr.Dataset:
    """Stacks the results of the replicates and computes what each start saves."""
    over = lambda pick: np.stack([pick(result) for result in results])  # noqa: E731
    ways, tasks = list(config.ways), list(corpus.questions)
    loss = np.stack([over(lambda result, w=w: result["ways"][w]["loss"]) for w in ways]).astype(
        float
    )
    right = np.stack([over(lambda result, w=w: result["ways"][w]["accuracy"]) for w in ways])
    source_steps, step = config.source.steps, cost.step["target"]
    made = lambda way: sum(cost.step[parts.SHAPE[n]] for n in MADE_OF[way])  # noqa: E731
    earlier = np.array([source_steps * made(way) for way in ways]) / step
    ahead = costs.ahead(config, cost)
    saved = savings(loss, config.budget.every, ahead=ahead)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = 1 - saved.steps / saved.scratch_steps
        with_sources = 1 - (saved.steps + earlier[:, None]) / saved.scratch_steps
    per_seed, kinds = ("way", "seed"), config.pairs
    chosen = lambda name: over(lambda result: result["chosen"][name]).astype(float)  # noqa: E731
    dataset = xr.Dataset(
        {
            "loss": ((*per_seed, "step"), loss, {"units": "nats"}),
            "accuracy": ((*per_seed, "when", "task"), right.astype(float), {"units": "1"}),
            "level": (per_seed, saved.level),
            "reached": (per_seed, saved.reached),
            "steps": (per_seed, saved.steps),
            "scratch_steps": (per_seed, saved.scratch_steps),
            "saved": (per_seed, saved.saved, {"units": "steps"}),
            "compute_saved": (per_seed, share, {"units": "1"}),
            "compute_saved_with_sources": (per_seed, with_sources, {"units": "1"}),
            "ahead": ("way", ahead, {"long_name": "steps' worth of compute before training"}),
            "source_cost": ("way", earlier, {"long_name": "the same, of training the sources"}),
            "gamma_loss": (
                ("pair", "seed", "text", "gamma"),
                np.stack([chosen(f"{name} loss") for name in kinds]),
            ),
            "gamma_swept": (("pair", "seed"), np.stack([chosen(name) for name in kinds])),
            "gamma_distance": ("seed", chosen("distance")),
            "taken": (("seed", "source"), chosen("taken") > 0),
            "series_loss": (
                ("seed", "checkpoint", "of"),
                over(lambda result: result["series"]).astype(float),
            ),
            "step_flops": ("network", list(cost.step.values())),
        },
        {
            "way": ways,
            "seed": np.arange(config.replicates),
            "step": np.arange(0, config.budget.steps + 1, config.budget.every),
            "when": ["before", "after"],
            "task": tasks,
            "gamma": ("gamma", config.gamma(), {"long_name": "weight of the first source"}),
            "pair": list(kinds),
            "text": ["validation", "held out"],
            "checkpoint": [*map(str, config.series_steps), "mean"],
            "of": ["D_1", "D_t"],
            "network": list(cost.step),
            "source": ["one", "two"],
        },
        {
            "text": config.data.source.name if config.data.name == OFFLINE_TEXT else "files",
            "vocab": corpus.vocab,
            "choices": config.questions.choices,
            "source_steps": config.source.steps,
            "start": config.source.start,
            "distance": config.weight.distance,
            "items": config.questions.items,
        },
    )
    if RETRAINED not in ways:
        return dataset
    losses, best = chosen("retrained loss"), chosen("retrained by look")
    return dataset.assign(
        retrained_loss=(("seed", "text", "look", "gamma"), losses),
        gamma_retrained=(("seed", "look"), best),
    ).assign_coords(look=list(config.weight.retrain))
