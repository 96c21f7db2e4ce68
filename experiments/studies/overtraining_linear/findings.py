"""The summary of a finished run of `overtraining_linear`."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import xarray as xr


def summary(dataset: "xr.Dataset") -> str:
    """Describes when more pre-training hurts, and how far networks are from the theory.

    Args:
      dataset: A finished run.

    Returns:
      Two sentences; the first depends on the diagram.
    """
    theory = dataset.loss_theory.interp(x=dataset.cell_x.values, row=dataset.cell_row.values)
    scale = float(np.abs(dataset.loss_theory).max())
    gap = np.abs(dataset.loss_mean.values - theory.values) / scale
    agree = (
        "Networks trained by stochastic gradient descent differ from theory by "
        f"{np.median(gap):.1%} of the largest value in the median, {gap.max():.1%} at most."
    )
    if dataset.attrs["diagram"] == "misalignment":
        harmed = (dataset.loss_theory.values > 1e-3).mean()
        return f"The last of pre-training costs something in {harmed:.0%} of the plane. {agree}"
    if dataset.attrs["diagram"] == "trade_off":
        rows = []
        for i, power in enumerate(dataset.row.values):
            rises = []
            for kind in ("tuned", "loss"):
                curve = dataset[f"{kind}_theory"].isel(row=i).values
                rises.append(f"{curve[-1] / curve.min() - 1:.0%}")
            rows.append(f"{rises[0]} (ID) and {rises[1]} (OOD) at p = {power:g}")
        return f"From its least value to the end the loss rises by {'; '.join(rows)}. {agree}"
    if dataset.attrs["diagram"] == "sensitivity":
        share = (dataset.tuned_theory / dataset.loss_theory).values
        return (
            f"The quadratic prediction tells at least 90 % of the sensitivity in "
            f"{(share > 0.9).mean():.0%} of the plane and less than half in "
            f"{(share < 0.5).mean():.0%}; the largest curvature ends at "
            f"{float(dataset.sharpness_theory[-1]):.3g} (4 σ_1). {agree}"
        )
    inflection = dataset.inflection.values
    hurt = np.isfinite(inflection)
    when = f", first at time {np.nanmin(inflection):.2f}" if hurt.any() else ""
    return (
        f"More pre-training hurts in {hurt.mean():.0%} of the rows{when}; "
        f"the range of times ends at {float(dataset.x[-1]):.1f}. {agree}"
    )
