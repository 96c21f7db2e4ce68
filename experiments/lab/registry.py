"""The registry of studies. Each study is a folder of `experiments.studies`, found by its name.

The files of a study are:

    __init__.py   a docstring that begins with the study's question
    config.py     `Config`, all its settings, and `PRESETS`, configs by name
    run.py        `run(config, stage)`, which returns the dataset
    findings.py   `summary(dataset)`, and optionally `findings` (tested claims) and `table`
    plots.py      `plot(dataset)`, which returns figures by name
"""

import ast
import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from experiments.lab.config import AnyConfig
from sail_jax.checks import nearest

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

    from experiments.lab.findings import Finding

FOLDER = Path(__file__).parents[1] / "studies"


@dataclasses.dataclass(frozen=True)
class Study:
    """One study. Its files are imported on first use.

    Attributes:
      name: The name of its folder.
      question: The question that it answers, with its question mark.
    """

    name: str
    question: str

    @property
    def config(self) -> type[AnyConfig]:
        """The class of its configs."""
        return self._in("config").Config

    @property
    def presets(self) -> Mapping[str, AnyConfig]:
        """Its configs by name, "default" first."""
        return self._in("config").PRESETS

    @property
    def run(self) -> "Callable[..., xr.Dataset]":
        """The function `run(config, stage)` that computes the dataset."""
        return self._in("run").run

    @property
    def summary(self) -> "Callable[[xr.Dataset], str]":
        """The function that describes in sentences what a dataset shows."""
        return self._in("findings").summary

    @property
    def findings(self) -> "Callable[[xr.Dataset], list[Finding]]":
        """The function that tests the claims of the study on a dataset and judges them together.

        It returns a list of `Finding`, which is empty if the study tests no claim.
        """
        declared = getattr(self._in("findings"), "findings", lambda dataset: [])

        def judged(dataset: "xr.Dataset") -> "list[Finding]":
            from experiments.lab.findings import corrected  # slow to import

            return corrected(declared(dataset))

        return judged

    @property
    def tables(self) -> "Callable[[xr.Dataset], list[Sequence[tuple[str, ...]]]]":
        """The function that lists a dataset's tables; the first row of each names its columns."""
        table = getattr(self._in("findings"), "table", None)

        def rows(dataset: "xr.Dataset") -> list[Sequence[tuple[str, ...]]]:
            found = None if table is None else table(dataset)
            return [] if found is None else [found]

        return rows

    @property
    def plot(self) -> "Callable[[xr.Dataset], dict[str, Figure]]":
        """The function that draws a dataset: Matplotlib figures by name.

        Names are made safe for files: a character other than a letter, a digit, "_" or "-" becomes
        "_", for example the point in a number.
        """
        drawn = self._in("plots").plot

        def safely_named(dataset: "xr.Dataset") -> "dict[str, Figure]":
            return {re.sub(r"[^\w-]", "_", name): fig for name, fig in drawn(dataset).items()}

        return safely_named

    def _in(self, file: str) -> ModuleType:
        """Imports one file of the study."""
        return importlib.import_module(f"experiments.studies.{self.name}.{file}")


@functools.cache
def studies() -> Mapping[str, Study]:
    """Lists all studies, without importing them.

    Returns:
      The studies by name, in alphabetical order. Each process searches for them only once.

    Raises:
      ValueError: If the docstring of a study does not contain a question.
    """
    by_name = {}
    for config in sorted(FOLDER.glob("*/config.py")):
        file = config.with_name("__init__.py")
        text = ast.get_docstring(ast.parse(file.read_text()))
        question, mark, _ = (text or "").partition("?")
        if not mark:
            raise ValueError(f"{file}: expected a docstring that begins with a question")
        by_name[file.parent.name] = Study(file.parent.name, " ".join(question.split()) + "?")
    return by_name


def load(name: str) -> Study:
    """Looks up a study by its name.

    Args:
      name: The name of its folder in `experiments.studies`.

    Returns:
      The study. Nothing of it is imported yet.

    Raises:
      ValueError: If there is no such study. The message contains the closest name.
    """
    if name not in studies():
        raise ValueError(f"unknown study '{name}'{nearest(name, studies())}")
    return studies()[name]
