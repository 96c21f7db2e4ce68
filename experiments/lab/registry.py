"""The registry of studies. Each study is a folder of `experiments.studies`, found by its name.

Other packages declare studies as entry points of the group `sail_jax.studies`. The files of a study
are:

    __init__.py   a docstring that begins with the study's question
    config.py     `Config`, all its settings, and `PRESETS`, configs by name
    run.py        `run(config, stage)`, which returns the dataset
    findings.py   `summary(dataset)`, and optionally `findings` (tested claims) and `table`
    plots.py      `plot(dataset)`, which returns figures by name

A study of another package may also have all of this in one module.
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
from sail_jax import extensions
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
      name: The name of its folder, or of its entry point.
      question: The question that it answers, with its question mark.
      module: Its package, or the module that contains all of it.
    """

    name: str
    question: str
    module: str

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
        """Imports one file of the study, or the module that contains all of it."""
        whole = importlib.import_module(self.module)
        inside = hasattr(whole, "__path__")
        return importlib.import_module(f"{self.module}.{file}") if inside else whole


@functools.cache
def studies() -> Mapping[str, Study]:
    """Lists all studies, without importing them.

    Returns:
      The studies by name: ours in alphabetical order, then those of other packages. Each process
      searches for them only once.

    Raises:
      ValueError: If the docstring of a study does not contain a question, or a study of another
        package cannot be found or has the name of another study.
    """
    by_name = {}
    for config in sorted(FOLDER.glob("*/config.py")):
        name = config.parent.name
        by_name[name] = _read(name, f"experiments.studies.{name}", config.with_name("__init__.py"))
    for name, entry in extensions.declared("studies").items():
        if name in by_name:
            raise ValueError(f"{extensions.described(entry)}: there is a study of this name")
        by_name[name] = _read(name, entry.module, extensions.source(entry))
    return by_name


def _read(name: str, module: str, file: Path) -> Study:
    """Reads the question of a study from the docstring of a file, which is not run."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    question, mark, _ = (text or "").partition("?")
    if not mark:
        raise ValueError(f"{file}: expected a docstring that begins with a question")
    return Study(name, " ".join(question.split()) + "?", module)


def load(name: str) -> Study:
    """Looks up a study by its name.

    Args:
      name: The name of its folder in `experiments.studies`, or of its entry point.

    Returns:
      The study. Nothing of it is imported yet.

    Raises:
      ValueError: If there is no such study. The message contains the closest name.
    """
    if name not in studies():
        raise ValueError(f"unknown study '{name}'{nearest(name, studies())}")
    return studies()[name]
