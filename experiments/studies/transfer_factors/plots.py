"""The figures of `transfer_factors`."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure


def plot(dataset: "xr.Dataset") -> "dict[str, Figure]":
    """The diagram of both ways of transfer where there is a theory of it; fine-tuned risks against
    the load where training was stopped."""
    from experiments.studies.transfer_phase import plots

    figures = {}
    if not bool(np.isnan(dataset.fine_tune_theory).any()):
        figures[f"transfer_by_{dataset.attrs['factor']}"] = plots.by_factor(dataset)
    if dataset.attrs["factor"] == "time":
        figures["stopped"] = plots.stopped(dataset)
    return figures
