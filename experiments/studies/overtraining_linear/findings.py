"""The summary of a finished run of `overtraining_linear`."""

import numpy as np
import xarray as xr

COSTS = 1e-3
"""The least increase of the loss by the last of pre-training that counts as a cost, of |A|^2."""


def best_times(dataset: xr.Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds the times after which the loss of trained networks no longer decreases.

    Returns for each row of networks the computed time with the smallest mean loss. It also returns
    the closest times before and after it with a significantly larger loss (by more than the
    standard error of the difference), or the ends of the range. The result is NaN if the last loss
    is the smallest one, so that more pre-training did not hurt.
    """
    times, mean = dataset.cell_x.values, dataset.loss_mean.values
    error = dataset.loss_std.values / np.sqrt(dataset.attrs["seeds"])
    best = mean.argmin(1)
    out = np.full((3, len(mean)), np.nan)
    for row, i in enumerate(best):
        if i == len(times) - 1:
            continue
        worse = np.flatnonzero(mean[row] - mean[row, i] > np.hypot(error[row], error[row, i]))
        before, after = worse[worse < i].max(initial=0), worse[worse > i]
        out[:, row] = times[[i, before, after.min(initial=len(times) - 1)]]
    return out[0], out[1], out[2]


def summary(dataset: xr.Dataset) -> str:
    """Describes when more pre-training hurts, and how far networks are from the theory."""
    theory = dataset.loss_theory.interp(x=dataset.cell_x.values, row=dataset.cell_row.values)
    scale = float(np.abs(dataset.loss_theory).max())
    gap = np.abs(dataset.loss_mean.values - theory.values) / scale
    agree = (
        "Networks trained by stochastic gradient descent differ from theory by a median of "
        f"{np.median(gap):.1%} of the largest value, and by at most {gap.max():.1%}."
    )
    if dataset.attrs["diagram"] == "misalignment":
        harmed = (dataset.loss_theory.values > COSTS).mean()
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
            f"The quadratic prediction explains at least 90 % of the sensitivity in "
            f"{(share > 0.9).mean():.0%} of the plane, and less than half in "
            f"{(share < 0.5).mean():.0%}. The largest curvature ends at "
            f"{float(dataset.sharpness_theory[-1]):.3g} (4 σ_1). {agree}"
        )
    inflection = dataset.inflection.values
    hurt = np.isfinite(inflection)
    when = f", first at time {np.nanmin(inflection):.2f}" if hurt.any() else ""
    return (
        f"More pre-training hurts in {hurt.mean():.0%} of the rows{when}. "
        f"The range of times ends at {float(dataset.x[-1]):.1f}. {agree}"
    )
