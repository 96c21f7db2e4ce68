"""Studies of the papers' claims, with their data, models, training, storage and commands.

`experiments.run(name)` runs a study and returns its dataset, figures and findings.
`experiments.run_grid(name, axes, out=...)` runs it at every combination of values of some fields of
its config. `experiments.list()` lists all studies. A study is a folder of `experiments.studies`.
Its `run` takes its config and returns a dataset. Its findings and its plots are computed from that
dataset alone.
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
    from experiments.lab.grid import GridResult, run_grid
    from experiments.lab.running import Result, list, run

__all__ = [
    "GridResult",
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
    "run_grid",
    "studies",
    "training",
]

_rooms = dict.fromkeys(__all__, "")
_rooms |= dict.fromkeys(("Result", "list", "run"), "lab.running")
_rooms |= dict.fromkeys(("GridResult", "run_grid"), "lab.grid")

__getattr__, __dir__ = lazily(__name__, _rooms)
