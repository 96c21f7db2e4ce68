"""Runs `trajectory_averaging`, a stage for each task and repetition, and gathers the results."""

from functools import partial
from typing import Any

import jax
import numpy as np
import xarray as xr

from experiments.data.files import refused
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.shared import growth_tasks as tasks
from experiments.studies.trajectory_averaging import prediction
from experiments.studies.trajectory_averaging.config import Config, Task
from experiments.studies.trajectory_averaging.training import Halves, measure
from sail_jax.trajectory import weights
from theory.merging.averaging import NoisyQuadratic, break_even, dense_break_even

# The grid of the map "average or decay".
TIMES = np.logspace(-1, 2, 61)
CHECKPOINTS = (3, 5, 10, 30)
SMALL = 1e-3  # the rate times the curvature


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Trains at constant and at decayed rates, averages, and predicts.

    Returns losses over task, seed and half of the held-out examples ("fit" or "test"): `curve`, by
    the steps of the checkpoints of the longest window; `averaged`, by shape and window; `decayed`,
    by decay and window. Without the halves, it returns `predicted_averaged` and `predicted_decayed`
    of quadratics fitted to the curve and the averages on "fit"; `level`, `bias` and `noise` of that
    fit, the last two by `pace`; `fitted_decayed` of quadratics also fitted to the decayed runs; and
    `offset`, the loss of averages on "test" minus "fit", which is added to predictions. For theory
    it returns `break_even` of linear decay and uniform averages, by `time` and number of
    `checkpoints` (0 for an average of all iterates), in stationary standard deviations.
    """
    data = {task: load(config, task) for task in config.tasks}
    found = {
        task: [
            stage(f"{task}, repetition {k + 1}", partial(measure, config, task, data[task][k], k))
            for k in range(config.replicates)
        ]
        for task in config.tasks
    }
    losses = {
        name: np.array([[np.asarray(of[name], float) for of in found[task]] for task in found])
        for name in ("curve", "averaged", "decayed")
    }
    known = prediction.design(config)
    each = _predicted(config, known, losses["curve"], losses["averaged"])
    most = _predicted(config, known, *losses.values())
    per, nats = ("task", "seed"), {"units": "nats"}
    offset = np.diff(losses["averaged"], axis=-1).mean((2, 3, 4))
    variables: dict[str, Any] = {
        "curve": ((*per, "step", "half"), losses["curve"], nats),
        "averaged": ((*per, "shape", "window", "half"), losses["averaged"], nats),
        "decayed": ((*per, "decay", "window", "half"), losses["decayed"], nats),
        "predicted_averaged": ((*per, "shape", "window"), each["averaged"], nats),
        "predicted_decayed": ((*per, "decay", "window"), each["decayed"], nats),
        "fitted_decayed": ((*per, "decay", "window"), most["decayed"], nats),
        "offset": (per, offset, nats),
        "level": (per, each["level"], nats),
        "bias": ((*per, "pace"), each["bias"], nats),
        "noise": ((*per, "pace"), each["noise"], nats),
        "break_even": (("checkpoints", "time"), _boundaries()),
    }
    first = config.steps - config.windows[-1]
    return xr.Dataset(
        variables,
        {
            "task": list(config.tasks),
            "seed": np.arange(config.replicates),
            "step": np.arange(first, config.steps + 1, config.spacing),
            "half": ["fit", "test"],
            "shape": list(config.shapes),
            "decay": list(config.decays),
            "window": list(config.windows),
            "pace": prediction.PACES,
            "checkpoints": [0, *CHECKPOINTS],
            "time": TIMES,
        },
        {"steps": config.steps, "spacing": config.spacing, "data": config.data.name},
    )


def _predicted(
    config: Config, known: prediction.Known, *losses: np.ndarray
) -> dict[str, np.ndarray]:
    """Computes predictions of quadratics fitted to a task's losses on "fit" in one repetition."""
    grid = [
        [prediction.predict(known, *(of[i, k, ..., 0] for of in losses))
         for k in range(config.replicates)]
        for i in range(len(config.tasks))
    ]  # fmt: skip
    return {name: np.array([[of[name] for of in row] for row in grid]) for name in grid[0][0]}


def load(config: Config, task: Task) -> list[Halves]:
    """Loads the data of every repetition.

    Returns the data, one entry for each repetition. Text is the same for all. Images have a new
    split for each.

    Raises `DataError` if the data cannot be read, or are not sufficient.
    """
    held_out = config.training(task).held_out
    with refused():
        if task == "text":
            sizes = {"context": config.context, "held_out": held_out}
            return [Halves.of(tasks.of_text(config.seed, **sizes))] * config.replicates
        pool = config.data.pool(config.seed)
        config.check_left(len(pool.labels))
        how = config.seed, config.replicates
        splits = tasks.of_images(pool, *how, held_out=held_out, rows=False)
        return [Halves.of(split) for split in splits]


def _boundaries() -> np.ndarray:
    """Finds where uniform averages and linear decay have the same loss, for small rates."""
    with jax.enable_x64(True):
        lines = [np.asarray(dense_break_even(TIMES))]
        for count in CHECKPOINTS:
            # One curvature for each time, because only rate x curvature x steps matters.
            spacing = round(1 / SMALL)
            paces = TIMES / (count - 1) / spacing
            problem = NoisyQuadratic(paces, 1.0, 1.0, spacing)
            edge = break_even(problem, weights("uniform", count))
            lines.append(np.asarray(edge / problem.stationary**0.5))
    return np.stack(lines)
