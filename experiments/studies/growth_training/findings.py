"""What `growth_training` found: from the stored dataset alone."""

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from experiments.lab.findings import mean_and_error
from experiments.studies.growth_training import ways

if TYPE_CHECKING:
    import xarray as xr


def table(dataset: xr.Dataset) -> list[tuple[str, ...]]:
    """By method, most steps saved first: loss after growth less the small network's, steps saved,
    in how many seeds the lowest loss from scratch was reached, compute saved with the small
    network's counted, and the lowest loss."""
    mean, error = mean_and_error(dataset["saved"])
    excess = dataset["step0_excess"].mean("seed").values
    share = 100 * dataset["compute_saved_with_source"].mean("seed").values
    lowest, spread = mean_and_error(dataset["loss"].min("step"))
    rows = [("method", "step 0 - source", "steps saved", "reached", "compute", "lowest loss")]
    for i in np.argsort(-mean):
        reached = dataset["reached"].values[i]
        cells = (
            f"{excess[i]:+.2g}",
            f"{mean[i]:.0f} ± {error[i]:.0f}",
            f"{reached.sum()}/{reached.size}",
            f"{share[i]:+.0f} %",
            f"{lowest[i]:.3f} ± {spread[i]:.3f}",
        )
        rows.append((str(dataset["way"].values[i]), *cells))
    return rows


def summary(dataset: xr.Dataset) -> str:
    """Who saves steps, who loses, and what the losses after growth say."""
    mean, error = mean_and_error(dataset["saved"])
    name = dataset["way"].values.astype(str)
    order = [i for i in np.argsort(-mean) if name[i] != ways.SCRATCH]
    clear = [i for i in order if abs(mean[i]) > 2 * error[i]]
    said = {
        "Saved": [i for i in clear if mean[i] > 0],
        "Lost": [i for i in clear if mean[i] < 0][::-1],
        "Undecided": [i for i in order if i not in clear],
    }
    listed = "; ".join(
        f"{word.lower()}: " + ", ".join(f"{name[i]} {mean[i]:.0f} ± {error[i]:.0f}" for i in some)
        for word, some in said.items()
        if some
    )
    exact = dataset["exact"].values & (name != ways.SCRATCH)
    excess = np.abs(dataset["step0_excess"].values[exact])
    kept = f"; function-preserving growth moved the loss by {excess.max(initial=0):.1g} at most"
    level = dataset["level"].sel(way=ways.SCRATCH)
    value, spread = map(float, mean_and_error(level))
    return (
        f"From scratch the held-out loss falls to {value:.3f} ± {spread:.3f} nats in "
        f"{dataset.attrs['steps']} steps. Steps saved to the lowest loss that both reach (mean ± "
        f"s.e. of paired differences over {level.size} seeds; undecided within 2 s.e.): "
        f"{listed}{kept if exact.any() else ''}."
    )
