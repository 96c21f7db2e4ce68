"""Studies of the papers' claims, and what they share: data, models, training, storage, commands.

A study is a folder of `experiments.studies`. Its config goes to its `run`, which returns a dataset;
its findings and its plots are computed from that dataset alone.
"""

from typing import TYPE_CHECKING

from sail_jax.lazy import lazily

if TYPE_CHECKING:
    from experiments import (
        bench,
        commands,
        data,
        lab,
        measures,
        models,
        pages,
        studies,
        training,
    )

__all__ = [
    "bench",
    "commands",
    "data",
    "lab",
    "measures",
    "models",
    "pages",
    "studies",
    "training",
]

__getattr__, __dir__ = lazily(__name__, dict.fromkeys(__all__, ""))
