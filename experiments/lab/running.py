"""Studies from Python: run one, look at its dataset, figures and findings, and save it.

The command `sail-jax run` does the same in a folder, and can resume.
"""

import builtins
import contextlib
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from experiments.lab import registry, stages, store
from experiments.lab.config import AnyConfig, varied
from experiments.lab.findings import Finding, told
from experiments.lab.progress import reporting
from sail_jax.checks import as_path, one_of
from sail_jax.cli.kernels import compiled_quickly

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Result:
    """The result of one run of a study.

    Attributes:
      study: The study.
      config: The config of the run.
      dataset: Its dataset, with theory and measurement as variables on the same coordinates.
      seconds: The duration of the run.
    """

    study: registry.Study
    config: AnyConfig
    dataset: "xr.Dataset"
    seconds: float

    @property
    def figures(self) -> "dict[str, Figure]":
        """Its figures by name, drawn at each access."""
        return self.study.plot(self.dataset)

    @functools.cached_property
    def findings(self) -> builtins.list[Finding]:
        """The claims that it tested, judged together; empty if it tests none."""
        return self.study.findings(self.dataset)

    @property
    def summary(self) -> str:
        """A description of the dataset in sentences."""
        return self.study.summary(self.dataset)

    def save(self, out: str | PathLike[str]) -> "Result":
        """Writes the dataset, the figures and the record of the run to a folder.

        The folder has the same layout as that of `sail-jax run NAME --out FOLDER`, so that
        `sail-jax plot` and `sail-jax report` can read it.

        Args:
          out: The folder, new or empty.

        Returns:
          The same result.

        Raises:
          RefusedError: If the folder is not empty.
          StoreError: If it cannot be written.
        """
        with store.Run.open(as_path("out", out), self.study.name, self.config) as run:
            run.finish(self.dataset, self.seconds)
            store.redraw(run, self.study)
        return self

    def __repr__(self) -> str:
        lines = [f"{self.study.name}: {self.study.question}", self.summary]
        return "\n".join([*lines, *filter(None, [told(self.findings)])])


def run(name: str, *, preset: str = "default", progress: bool = False, **fields: Any) -> Result:
    """Runs a study in this process and writes no files.

    Args:
      name: The name of the study; see `list`.
      preset: The config that supplies the default values. "tiny" takes seconds, "default" minutes
        at most, and some studies have presets with the settings of their paper.
      progress: Whether stages are reported on the standard error.
      **fields: Values of fields of the config that replace the preset's. Lists become tuples. The
        value of a group of fields may be a mapping.

    Returns:
      The result.

    Raises:
      ValueError: For an unknown study, preset or field, or a value that is not allowed. The message
        contains the closest name.

    >>> result = run("ridge_transfer", preset="tiny", seed=1)
    >>> result.config.seed, sorted(result.figures)[0]
    (1, 'ridge')
    """
    study = registry.load(name)
    one_of("preset", preset, study.presets)
    config = varied(study.presets[preset], **with_tuples(fields))
    began = time.perf_counter()
    with compiling(preset):
        dataset = study.run(config, reporting(stages.direct) if progress else stages.direct)
    return Result(study, config, dataset, time.perf_counter() - began)


def compiling(preset: str) -> contextlib.AbstractContextManager[None]:
    """Creates the context in which a preset runs.

    Args:
      preset: The name of the preset.

    Returns:
      A context that disables compiler optimisations for "tiny", because its runs are too short to
      benefit.
    """
    return compiled_quickly() if preset == "tiny" else contextlib.nullcontext()


def with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces lists in the fields of a config by tuples, as configs need them.

    Args:
      fields: The fields by name. The value of a group is a mapping.

    Returns:
      The same fields.
    """

    def converted(x: Any) -> Any:
        if isinstance(x, Mapping):
            return with_tuples(x)
        return tuple(x) if isinstance(x, builtins.list) else x

    return {name: converted(x) for name, x in fields.items()}


def list() -> "pd.DataFrame":
    """Lists the studies.

    Returns:
      A table with a row for each study: its question, and the names of its presets.

    >>> "transfer_phase" in list().index
    True
    """
    import pandas as pd

    rows = {
        name: {"question": study.question, "presets": ", ".join(study.presets)}
        for name, study in registry.studies().items()
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("study")
