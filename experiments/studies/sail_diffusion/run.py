"""Runs `sail_diffusion` stage by stage and gathers the results in one dataset.

`training.Laboratory` does the trainings of each stage.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from experiments.data.files import refused
from experiments.data.latents import Latents
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.measures.savings import savings
from experiments.studies.sail_diffusion import data, quality
from experiments.studies.sail_diffusion.config import Config
from experiments.studies.sail_diffusion.networks import WAYS
from experiments.studies.sail_diffusion.training import TERMS, Laboratory, Repetition
from experiments.training import sharding

SHOWN = 40  # samples of each training, from the first seed, in the dataset


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Trains and measures all networks of the study.

    The measuring classifier is trained once, unless a function measures. Each seed has an encoder
    (unless the data have features, or a function computes them), the aligned starts, and a SiT for
    each kind of training. Each training is one stage, which is kept if a run is killed.

    It returns a dataset with the measures of `quality.MEASURES` over way, seed and step, and
    `<measure>_real` of the training images; `<term>_loss` over way, seed and logged step; for `sit`
    and `repa` as the baseline, `level_*`, `steps_*` and `saved_*` (see `savings`); `align_steps` by
    way; `start_loss` if there was an alignment phase, `encoder_accuracy` on held-out images if an
    encoder was trained; and `samples` of the first seed with real `images`.

    It raises `DataError` if data are missing or damaged, do not match the model, or cannot be
    shared by the devices.
    """
    with refused():
        images = loaded(config)
    lab = Laboratory(config, images)
    everything = np.arange(len(images.labels))
    measure = None
    if config.functions.measure is None:
        learn = partial(lab.classifier, "measure", everything, 0)
        measure = stage("measure", learn, folder=True)["variables"]
    results: dict[str, list[Any]] = {way: [] for way in config.ways}
    starts: dict[bool, list[Any]] = {}
    floors, accuracy = [], []
    for seed in range(config.replicates):
        split = data.split(config.seed, seed, len(images.labels), config.held_out)
        encoder, encodings = None, images
        if lab.encoder is not None:
            learn = partial(lab.classifier, "encoder", split.learn, seed)
            encoder = stage(f"encoder, seed {seed}", learn, folder=True)["variables"]
            encodings, right = lab.encoding(encoder, split.held_out)
            accuracy.append(right.mean())
        real = quality.reference(lab.see(measure, split.held_out))
        of = Repetition(seed, encodings, split, encoder, measure, real)
        # The same number of images as of samples, because the number of points biases the Fréchet
        # distance.
        floors.append(quality.scores(lab.see(measure, split.learn[: config.samples]), real))
        aligned = {}
        for clean in sorted({WAYS[way].clean for way in config.ways if WAYS[way].start}):
            name = f"align{' clean' * clean}, seed {seed}"
            aligned[clean] = stage(name, partial(lab.align, of, clean), folder=True)
            starts.setdefault(clean, []).append(aligned[clean]["loss"])
        for way in config.ways:
            start = aligned[WAYS[way].clean]["params"] if WAYS[way].start else None
            train = partial(lab.generate, way, of, start)
            trained = stage(f"{way}, seed {seed}", train, folder=True)
            # The trained weights are stored in the stage, not in the dataset.
            results[way].append({k: v for k, v in trained.items() if k != "weights"})
    real_images = lab.shown(_by_class(images.labels, config.sample_batch))
    return _dataset(config, results, starts, floors, accuracy, real_images)


def loaded(config: Config) -> Latents:
    """Reads the data and checks the config against data and devices, before anything is computed.

    It raises `DataError` if a file is missing or damaged (a `ValueError` too).

    It raises `ValueError` if the data do not match the model, the devices cannot share a batch
    evenly, or functions of the config are missing or have invalid results.
    """
    batches = {"budget.batch": config.budget.batch, "sample_batch": config.sample_batch}
    sharding.layout(config.shard).check(**batches)
    return data.load(config)


def _by_class(labels: np.ndarray, count: int) -> np.ndarray:
    """Returns indices of `count` images whose classes alternate, like those of the samples."""
    classes = [np.flatnonzero(labels == k) for k in range(labels.max() + 1)]
    classes = [indices for indices in classes if len(indices)]
    return np.array([classes[i % len(classes)][i // len(classes)] for i in range(count)])


def _dataset(
    config: Config,
    runs: dict[str, list[Any]],
    starts: dict[bool, list[Any]],
    floors: list[dict[str, float]],
    accuracy: list[float],
    real: np.ndarray,
) -> xr.Dataset:
    """Builds the labelled dataset of all results; `run` describes its content."""
    stacked = lambda name: np.array([[row[name] for row in runs[w]] for w in runs], float)  # noqa: E731
    names, per_seed = list(runs), ("way", "seed")
    ahead = np.array([config.alignment.steps * WAYS[way].start for way in names])
    log, shown = config.log_every, min(SHOWN, config.sample_batch)
    samples = np.stack([runs[w][0]["samples"][:shown] for w in names])
    variables: dict[str, Any] = {}
    for name, label in quality.MEASURES.items():
        variables[name] = ((*per_seed, "step"), stacked(name), {"long_name": label})
        variables[f"{name}_real"] = ("seed", [floor[name] for floor in floors])
    for term in TERMS:
        variables[f"{term}_loss"] = ((*per_seed, "logged"), stacked(term))
    for against in ("sit", "repa"):
        how = savings(stacked("fd"), config.every, scratch=names.index(against), ahead=ahead)
        level = {"long_name": f"lowest Fréchet distance that it and {against} reach"}
        variables[f"level_{against}"] = (per_seed, how.level, level)
        variables[f"steps_{against}"] = (per_seed, how.scratch_steps, {"units": "steps"})
        variables[f"saved_{against}"] = (per_seed, how.saved, {"units": "steps"})
    if starts:
        losses = np.array(list(starts.values()), float)
        variables["start_loss"] = (("target", "seed", "start_step"), losses)
        targets = ["data" if clean else "noised latents" for clean in starts]
        variables["target"] = ("target", targets)
    if accuracy:
        variables["encoder_accuracy"] = ("seed", accuracy)
    grey = {"long_name": "first channel"}
    return xr.Dataset(
        {
            **variables,
            "align_steps": ("way", ahead),
            "samples": (("way", "shown", "row", "column"), samples[..., 0], grey),
            "images": (("shown", "row", "column"), real[:shown, ..., 0], grey),
        },
        {
            "way": names,
            "seed": np.arange(config.replicates),
            "step": np.arange(0, config.budget.steps + 1, config.every),
            "logged": np.arange(0, config.budget.steps, log),
            **({"start_step": np.arange(0, config.alignment.steps, log)} if starts else {}),
        },
        {"steps": config.budget.steps, "data": Path(config.data.file or config.data.name).stem},
    )
