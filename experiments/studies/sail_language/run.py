"""The run of `sail_language`, with networks that it trains or with checkpoints on disk.

It defines the stages and makes the dataset of their results. `checkpoints` contains the run on
checkpoints.
"""

from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from experiments.data.files import refused
from experiments.data.registry import OFFLINE_TEXT
from experiments.lab.config import picked
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.measures.savings import savings
from experiments.studies.sail_language import checkpoints, costs, data, parts, retraining
from experiments.studies.sail_language.config import MADE_OF, RETRAINED, Config
from experiments.studies.shared.checking import must
from experiments.training.sharding import layout


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Trains the sources, chooses weights and trains on the target, stages for each repetition.

    It returns the dataset:
    - `loss` in nats on held-out text of D_t, `(way, seed, step)`, and `accuracy`,
      `(way, seed, when, task)`.
    - `saved`, `compute_saved` and `compute_saved_with_sources`, `(way, seed)`: steps and fractions
      of compute that a start saves against scratch until the smallest loss that both reach.
    - `gamma_loss`, `(pair, seed, text, gamma)`: the loss between two sources before training.
    - `gamma_swept`, `(pair, seed)`, the gamma with the smallest validation loss, and
      `gamma_distance`, `(seed,)`, the gamma of eq. 11.
    - `retrained_loss`, `(seed, text, look, gamma)`: the loss after retraining from each gamma,
      and `gamma_retrained`, `(seed, look)`, the gamma with the smallest validation loss then; only
      if the ways include it.
    - `taken`, `(seed, source)`: whether the greedy soup has taken each source.
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
        choose = partial(parts.choose, config, target, corpus, sources, seed)
        chosen = stage(f"weights, seed {seed}", choose)
        lesson = parts.on_target(config, target, corpus, seed)
        if RETRAINED in config.ways:
            pair = sources["one"], sources["two"]
            chosen = chosen | retraining.sweep(stage, f"seed {seed}", lesson, pair)
        ways = {}
        for way in config.ways:
            start = partial(parts.started, config, way, target, corpus, sources, chosen, seed)
            follow = partial(parts.follow, lesson, start)
            ways[way] = stage(f"{way}, seed {seed}", follow, folder=True)
        results.append({"series": sources["series_loss"], "chosen": chosen, "ways": ways})
    return _dataset(config, corpus, costs.costs(config, learners), results)


def _check(config: Config, corpus: data.Corpus) -> None:
    """Checks the conditions that depend on the text and the devices, before any training."""
    a, b, target = map(len, corpus.parts)
    # Called only for its error, which names the part with too few blocks after the overlaps.
    data.sources(config, corpus, 0)
    few = f"be at most {target} (parts of {a}, {b} and {target} blocks)"
    must(config, "weight.blocks", config.weight.blocks <= target, few)
    layout(config.shard).check(**{"budget.batch": config.budget.batch // config.micro_batches})


def _dataset(
    config: Config, corpus: data.Corpus, cost: costs.Costs, results: list[dict[str, Any]]
) -> xr.Dataset:
    """Stacks the results of the repetitions and computes each start's savings."""
    ways, kinds, tasks = list(config.ways), config.pairs, list(corpus.questions)
    over = lambda name: np.stack([[r["ways"][w][name] for r in results] for w in ways])  # noqa: E731
    chosen = lambda name: np.stack([r["chosen"][name] for r in results]).astype(float)  # noqa: E731
    of_pairs = lambda end: np.stack([chosen(f"{name}{end}") for name in kinds])  # noqa: E731
    loss, right = over("loss").astype(float), over("accuracy").astype(float)
    series = np.array([r["series"] for r in results], float)
    source_steps, step = config.source.steps, cost.step["target"]
    made = lambda way: sum(cost.step[parts.SHAPE[n]] for n in MADE_OF[way])  # noqa: E731
    earlier = np.array([source_steps * made(way) for way in ways]) / step
    ahead = costs.ahead(config, cost)
    saved = savings(loss, config.budget.every, ahead=ahead)
    share, with_sources = costs.share(saved), costs.share(saved, earlier[:, None])
    per_seed = ("way", "seed")
    dataset = xr.Dataset(
        {
            "loss": ((*per_seed, "step"), loss, {"units": "nats"}),
            "accuracy": ((*per_seed, "when", "task"), right, {"units": "1"}),
            "level": (per_seed, saved.level),
            "reached": (per_seed, saved.reached),
            "steps": (per_seed, saved.steps),
            "scratch_steps": (per_seed, saved.scratch_steps),
            "saved": (per_seed, saved.saved, {"units": "steps"}),
            "compute_saved": (per_seed, share, {"units": "1"}),
            "compute_saved_with_sources": (per_seed, with_sources, {"units": "1"}),
            "ahead": ("way", ahead, {"long_name": "compute before training, in steps"}),
            "source_cost": ("way", earlier, {"long_name": "compute of the sources, in steps"}),
            "gamma_loss": (("pair", "seed", "text", "gamma"), of_pairs(" loss")),
            "gamma_swept": (("pair", "seed"), of_pairs("")),
            "gamma_distance": ("seed", chosen("distance")),
            "taken": (("seed", "source"), chosen("taken") > 0),
            "series_loss": (("seed", "checkpoint", "of"), series),
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
            **picked(config, "source.start", "weight.distance", "questions.items"),
        },
    )
    return retraining.noted(dataset, config, [r["chosen"] for r in results])
