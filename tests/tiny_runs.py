"""The tiny run of each study, computed once for all tests that look at it."""

import functools
from typing import Any, NamedTuple

import pytest
import xarray as xr

from experiments.lab import registry, store

# of 5 s and more, most of them compiling: only the slow tests run these
DEAR = (
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
)

STUDIES = [
    pytest.param(name, marks=pytest.mark.slow) if name in DEAR else name
    for name in registry.studies()
]


class TinyRun(NamedTuple):
    """What the preset `tiny` gives: shared, so that whoever changes it copies it first."""

    dataset: xr.Dataset
    stages: dict[str, dict[str, Any]]  # the arrays of each, by its name


@functools.cache
def tiny_run(name: str) -> TinyRun:
    stages = {}

    def stage(stage_name, compute, *, folder=False):
        stages[stage_name] = store.direct(stage_name, compute, folder=folder)
        return stages[stage_name]

    study = registry.load(name)
    return TinyRun(study.run(study.presets["tiny"], stage), stages)
