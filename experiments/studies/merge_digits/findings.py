"""What `merge_digits` found: from the stored dataset alone."""

import numpy as np
import xarray as xr


def own_accuracy(dataset: xr.Dataset) -> xr.DataArray:
    """Each expert on its own task, averaged over the tasks: `[replicate]`."""
    experts = dataset["accuracy"][:, 1 : 1 + dataset.sizes["task"]]
    return xr.DataArray(np.diagonal(experts, axis1=1, axis2=2).mean(-1), dims="replicate")


def _pm(values: xr.DataArray) -> str:
    return f"{float(values.mean()):.3f} ± {float(values.std(ddof=1)):.3f}"


def summary(dataset: xr.Dataset) -> str:
    """Who keeps most, and how far adding weights is from adding outputs."""
    mean = dataset["accuracy"].mean("task")
    own, base = own_accuracy(dataset), mean.sel(model="base")
    merges = ["soup", *map(str, dataset["merge"].values)]
    second, best = sorted(merges, key=lambda m: float(mean.sel(model=m).mean()))[-2:]
    ahead = mean.sel(model=best) - mean.sel(model=second)
    error = float(ahead.std(ddof=1)) / ahead.size**0.5
    gained, kept = float((own - base).mean()), float((mean.sel(model=best) - base).mean())
    share = f" and keeps {kept / gained:.0%} of what the experts gained" if gained > 0 else ""
    listed = ", ".join(f"{m} {_pm(mean.sel(model=m))}" for m in merges)
    output = dataset["line_predicted"] - dataset["line_accuracy"]
    chord = dataset["line_chord"] - dataset["line_accuracy"]
    return (
        f"Test accuracy, mean over {dataset.sizes['task']} tasks (± s.d. over "
        f"{dataset.sizes['replicate']} splits): base {_pm(base)}, {listed}; an expert on its own "
        f"task {_pm(own)}. {best[:1].upper()}{best[1:]} has the highest mean, "
        f"{float(ahead.mean()):.3f} ± {error:.3f} (s.e., paired) ahead of {second}{share}. "
        "Along the line between two experts, adding their outputs predicts "
        f"the accuracy of adding their weights to {float((output**2).mean() ** 0.5):.3f} (r.m.s.), "
        f"interpolating their accuracies to {float((chord**2).mean() ** 0.5):.3f}."
    )
