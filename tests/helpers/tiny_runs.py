"""The tiny run of each study, computed once for all tests that look at it."""

import functools
import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import xarray as xr

from experiments.lab import registry, store
from sail_jax import disk

QUICK = ("ledger", "ridge_transfer")
"""What the quick tests run: the others take longer, most of it compiling."""

DEAR = (
    "choice_prediction",
    "cross_task_linearity",
    "growth_training",
    "merge_prediction",
    "merging_scaling",
    "overtraining_checkpoints",
    "overtraining_language",
    "proximal_gamma",
    "proximal_spirals",
    "sail_diffusion",
    "sail_language",
    "sail_vision",
    "trajectory_averaging",
)
"""Of 5 s and more."""

STUDIES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in registry.studies()
]


class TinyRun(NamedTuple):
    """The result of the preset `tiny`. It is shared, so copy it before changing it."""

    dataset: xr.Dataset
    stages: dict[str, dict[str, Any]]  # the arrays of each, by its name


@functools.cache
def tiny_run(name: str) -> TinyRun:
    """A run by one worker is read by the others, because most of its time is compilation."""
    stored = Path(os.environ["TINY_RUNS"]) / f"{name}.pickle"
    if stored.exists():
        return pickle.loads(stored.read_bytes())
    stages = {}

    def stage(stage_name, compute, *, folder=False):
        stages[stage_name] = store.direct(stage_name, compute, folder=folder)
        return stages[stage_name]

    study = registry.load(name)
    run = TinyRun(study.run(study.presets["tiny"], stage), stages)
    disk.write_atomic(stored, pickle.dumps(run))
    return run
