"""The summary of a finished run of `overtraining_lora`."""

import numpy as np
import xarray as xr


def summary(dataset: xr.Dataset) -> str:
    """Describes how much pre-training to the end costs whole networks and adapters."""
    rises = []
    for name in dataset.tuned.values:
        curve = dataset.lost_theory.sel(tuned=name).values
        what = "full fine-tuning" if name == "full" else f"rank {name}"
        rises.append(f"{curve[-1] - curve.min():.2f} with {what}")
    fine = {"cell_time": "time", "cell_share": "share"}
    gaps = []
    for name in ("lost", "end", "half"):
        found, theory = dataset[name], dataset[f"{name}_theory"]
        found = found.mean("seed") if "seed" in found.dims else found
        at = {fine[str(cell)]: dataset[cell].values for cell in found.dims if cell in fine}
        gaps.append(float(np.median(np.abs(found.values / theory.interp(at).values - 1))))
    layer = dataset.half_theory.sel(place="layer").values
    return (
        f"From its least value to the end of pre-training, the loss afterwards increases by "
        f"{', '.join(rises)}. An adapter on a layer is fastest if the mode was pre-trained to "
        f"{dataset.share.values[layer.argmin()]:.2f} of its target. Training differs from "
        f"theory by medians of {gaps[0]:.1%} (losses), {gaps[1]:.1%} (ends) and {gaps[2]:.1%} "
        "(times)."
    )
