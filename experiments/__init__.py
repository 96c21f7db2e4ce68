"""Studies of the papers' claims, with their data, models, training, storage and commands.

`experiments.run(name)` runs a study and returns its dataset, figures and findings.
`experiments.list()` lists all studies. A study is a folder of `experiments.studies`. Its `run`
takes its config and returns a dataset. Its findings and its plots are computed from that dataset
alone.
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
    from experiments.lab.running import Result, list, run

__all__ = [
    "Result",
    "bench",
    "commands",
    "data",
    "lab",
    "list",
    "measures",
    "models",
    "pages",
    "run",
    "studies",
    "training",
]

__getattr__, __dir__ = lazily(
    __name__, {name: "lab.running" if name in ("Result", "list", "run") else "" for name in __all__}
)
