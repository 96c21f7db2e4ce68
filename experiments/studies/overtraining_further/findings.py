"""The summary of a finished run of `overtraining_further`."""

import numpy as np
import xarray as xr


def summary(dataset: xr.Dataset) -> str:
    """Describes how far simulations are from theory, and which results deviate from it."""
    theory = dataset.decay_time_theory.interp(decay=dataset.cell_decay.values).values
    gap = np.abs(dataset.decay_time.values / theory - 1)
    bits = dataset.bits_time_theory.sel(law="independent").interp(real_bits=dataset.bits.values)
    shifted = np.abs(dataset.bits_time.sel(way="shifted").values / bits.values - 1)
    nearest = dataset.rise.sel(way="nearest")
    return (
        "Best times under noise differ from theory by a median of "
        f"{np.median(gap):.1%} over decays, and by at most {gap.max():.1%}. Under rounding "
        f"with shifted grids they differ by at most {shifted.max():.1%}. Rounding to nearest "
        "adds up "
        f"to {float(nearest.max()):.3g} times the loss of independent errors, and "
        f"{float(nearest.isel(time=-1).mean()):.3g} times at the end of training."
    )
