"""Studies from Python: run one, look at its dataset, figures and findings, and save it.

The command `sail-jax run` does the same in a folder, and can resume.
"""

import builtins
import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from experiments.lab import registry, stages, store
from experiments.lab.callbacks import Callback, logged
from experiments.lab.config import AnyConfig, varied
from experiments.lab.findings import Finding, told
from experiments.lab.progress import reporting
from sail_jax.checks import as_path, one_of
from sail_jax.cli.kernels import compiled_quickly
from sail_jax.views import view

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
        """Its figures by name, drawn at each access. A notebook shows each."""
        return self.draw()

    def draw(
        self,
        *,
        width: Literal["single", "double"] | None = None,
        style: "str | Mapping[str, Any] | None" = None,
    ) -> "dict[str, Figure]":
        """Draws its figures.

        Args:
          width: "single" or "double" for the width of a journal's column; None for the width that
            a figure was designed with.
          style: A style of Matplotlib: a name, the path of a file, or a mapping of `rcParams`; None
            for the current `rcParams`.

        Returns:
          The figures by name.

        Raises:
          ValueError: If the width or the style is unknown.
        """
        from sail_jax.drawing.printing import Looks

        return Looks(width=width, style=style).checked().draw(self.study.plot, self.dataset)

    @functools.cached_property
    def findings(self) -> builtins.list[Finding]:
        """The claims that it tested, judged together; empty if it tests none."""
        return self.study.findings(self.dataset)

    @property
    def summary(self) -> str:
        """A description of the dataset in sentences."""
        return self.study.summary(self.dataset)

    def to_dataframe(self, variable: str | Sequence[str] | None = None) -> "pd.DataFrame":
        """Returns variables of the dataset as a table with a row for each entry.

        Args:
          variable: The name of a variable, or of several with the same axes; None for all.

        Returns:
          The table. Its other columns are the coordinates of the entries.

        Raises:
          ValueError: If a variable is unknown, or the variables have different axes.

        >>> result = run("ridge_transfer", preset="tiny", seed=1)
        >>> result.to_dataframe(["ridge", "exact"]).columns.tolist()
        ['case', 'step', 'n', 'theta', 'ridge', 'exact']
        """
        return tidy(self.dataset, variable)

    def save(
        self,
        out: str | PathLike[str],
        *,
        formats: Sequence[str] = ("png",),
        width: Literal["single", "double"] | None = None,
        style: "str | Mapping[str, Any] | None" = None,
    ) -> "Result":
        """Writes the dataset, the figures and the record of the run to a folder.

        The folder has the same layout as that of `sail-jax run NAME --out FOLDER`, so that
        `sail-jax plot` and `sail-jax report` can read it.

        Args:
          out: The folder, new or empty.
          formats: The formats of the figures: "png", "svg" and "pdf".
          width: As for `draw`.
          style: As for `draw`.

        Returns:
          The same result.

        Raises:
          RefusedError: If the folder is not empty.
          StoreError: If it cannot be written.
          ValueError: If a format, the width or the style is unknown.
        """
        from sail_jax.drawing.printing import Looks

        looks = Looks(tuple(formats), width, style).checked()
        with store.Run.open(as_path("out", out), self.study.name, self.config) as run:
            run.finish(self.dataset, self.seconds)
            store.redraw(run, self.study, looks=looks)
        return self

    def _repr_html_(self) -> str:
        rows = [(f.verdict, f.claim, f.here) for f in self.findings]
        header = ("verdict", "claim", "here") if rows else ()
        rows = rows or [("figures", ", ".join(self.figures))]
        return view(f"{self.study.name}: {self.study.question}\n{self.summary}", rows, header)

    def __repr__(self) -> str:
        lines = [f"{self.study.name}: {self.study.question}", self.summary]
        return "\n".join([*lines, *filter(None, [told(self.findings)])])


def tidy(dataset: "xr.Dataset", variable: str | Sequence[str] | None = None) -> "pd.DataFrame":
    """Returns variables of a dataset as a table with a row for each entry.

    Args:
      dataset: The dataset.
      variable: As for `Result.to_dataframe`.

    Returns:
      The table. Its other columns are the coordinates of the entries.

    Raises:
      ValueError: As `Result.to_dataframe`.
    """
    known = [str(name) for name in dataset.data_vars]
    names = (
        [variable] if isinstance(variable, str) else [*(known if variable is None else variable)]
    )
    for name in names:
        one_of("variable", name, known)
    axes = {name: ", ".join(map(str, dataset[name].dims)) or "none" for name in names}
    if len({*axes.values()}) > 1:
        some = "; ".join(f"{name}: {text}" for name, text in [*axes.items()][:4])
        raise ValueError(
            "variable: expected variables of the same axes, because a table has a row for each "
            f"entry; got {some}{'; ...' * (len(names) > 4)}"
        )
    table = dataset[names].to_dataframe().reset_index()
    return table.reindex(columns=[*(name for name in table if name not in names), *names])


def run(
    name: str,
    *,
    preset: str = "default",
    progress: bool = False,
    callback: Callback | None = None,
    **fields: Any,
) -> Result:
    """Runs a study in this process and writes no files.

    Args:
      name: The name of the study; see `list`.
      preset: The config that supplies the default values. "tiny" takes seconds, "default" minutes
        at most, and some studies have presets with the settings of their paper.
      progress: Whether stages are reported on the standard error.
      callback: A function of a step and its numbers by name. It is called for each row of metrics
        of a training, and for each finished stage.
      **fields: Values of fields of the config that replace the preset's. Lists become tuples. The
        value of a group of fields may be a mapping.

    Returns:
      The result.

    Raises:
      ValueError: For an unknown study, preset or field, or a value that is not allowed. The message
        contains the closest name.
      TypeError: If `callback` is not a function of a step and its numbers.
      CallbackError: If `callback` raised an exception.

    >>> result = run("ridge_transfer", preset="tiny", seed=1)
    >>> result.config.seed, sorted(result.figures)[0]
    (1, 'ridge')
    """
    study = registry.load(name)
    one_of("preset", preset, study.presets)
    config = varied(study.presets[preset], **with_tuples(fields))
    began = time.perf_counter()
    stage = logged(reporting(stages.direct) if progress else stages.direct, None, callback)
    with compiling(preset):
        dataset = study.run(config, stage)
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
