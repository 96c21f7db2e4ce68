"""The studies: each a folder of `experiments.studies`, found by its name.

__init__.py   what it is about; its docstring begins with its question
config.py     `Config`, all that it can be told, and `PRESETS`
run.py        `run(config, stage)`, the dataset
findings.py   `summary(dataset)`, and where there are claims or rows `findings` and `table`
plots.py      `plot(dataset)`, figures by name
"""

import ast
import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sail_jax.checks import nearest

FOLDER = Path(__file__).parents[1] / "studies"


@dataclasses.dataclass(frozen=True)
class Study:
    """One study; a file of it is imported when something in it is asked for."""

    name: str
    question: str

    @property
    def config(self) -> type[Any]:
        """The class of its configs."""
        return self._in("config").Config

    @property
    def presets(self) -> Mapping[str, Any]:
        return self._in("config").PRESETS

    @property
    def run(self) -> Callable[..., Any]:
        """`run(config, stage)` gives the dataset."""
        return self._in("run").run

    @property
    def summary(self) -> Callable[[Any], str]:
        """What the dataset says, in sentences."""
        return self._in("findings").summary

    @property
    def findings(self) -> Callable[[Any], list[Any]]:
        """What the dataset says of the claims that the study puts to the test, judged together."""
        declared = getattr(self._in("findings"), "findings", lambda dataset: [])

        def judged(dataset: Any) -> list[Any]:
            from experiments.lab.findings import corrected  # slow to import

            return corrected(declared(dataset))

        return judged

    @property
    def tables(self) -> Callable[[Any], list[Any]]:
        """The dataset as tables, their first rows the names of columns."""
        table = getattr(self._in("findings"), "table", None)

        def rows(dataset: Any) -> list[Any]:
            found = None if table is None else table(dataset)
            return [] if found is None else [found]

        return rows

    @property
    def plot(self) -> Callable[[Any], dict[str, Any]]:
        """The figures of the dataset, by name."""
        return self._in("plots").plot

    def _in(self, file: str) -> Any:
        return importlib.import_module(f"experiments.studies.{self.name}.{file}")


@functools.cache
def studies() -> Mapping[str, Study]:
    """All studies by name; none is imported."""
    by_name = {}
    for file in sorted(FOLDER.glob("*/__init__.py")):
        text = ast.get_docstring(ast.parse(file.read_text()))
        question, mark, _ = (text or "").partition("?")
        if not mark:
            raise ValueError(f"{file}: expected a docstring that begins with a question")
        by_name[file.parent.name] = Study(file.parent.name, " ".join(question.split()) + "?")
    return by_name


def load(name: str) -> Study:
    """The study `name`; `ValueError` with the nearest name if there is none."""
    if name not in studies():
        raise ValueError(f"unknown experiment '{name}'{nearest(name, studies())}")
    return studies()[name]
