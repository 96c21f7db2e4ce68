"""The figures of `transfer_factors`, drawn by functions of `transfer_phase.plots`."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure


def plot(dataset: "xr.Dataset") -> "dict[str, Figure]":
    """Draws the figures of the study.

    Args:
      dataset: The study's dataset.

    Returns:
      The figures by name: the diagrams of both ways of transfer where there is a theory of
      fine-tuning, and the risk of fine-tuning against the load ("stopped") where training time
      varies.
    """
    from experiments.studies.transfer_phase import plots

    figures = {}
    if not bool(np.isnan(dataset.fine_tune_theory).any()):
        figures[f"transfer_by_{dataset.attrs['factor']}"] = plots.by_factor(dataset)
    if dataset.attrs["factor"] == "time":
        figures["stopped"] = plots.stopped(dataset)
    return figures
