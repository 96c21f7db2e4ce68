"""The findings of `lora_start`, computed from the stored dataset alone."""

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, agrees, judged, stated

HERE = "LoRA from B = 0, ours"


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Judges the best rows of A, the gain by the rank, and the delay of small directions."""
    half, first = dataset.half.sel(rank=dataset["rank"][-1]), dataset.half.isel(rank=0)
    theory = dataset.half_theory.isel(rank=-1).sel(every_row=dataset.row.values)
    best = int(np.argmin(theory.values))
    rise, middle = dataset["rank"].values[-1] / dataset["rank"].values[0], len(dataset.row) // 2
    ratio = np.log(dataset.together.isel(direction=0) / dataset.together.isel(direction=-1))
    return [
        _more("rows of the smallest norm are slower than the best", half[0] - half[best]),
        _more("rows of the largest norm are slower than the best", half[-1] - half[best]),
        _more("the largest rank is faster than the smallest", (first - half)[middle]),
        _more(
            f"but {rise:g} times the rank is less than {rise:g} times as fast",
            (rise * half - first)[middle],
        ),
        _more("larger rows delay small directions more than large ones", ratio[-1] - ratio[0]),
        agrees(
            HERE,
            "the time until half is learned equals theory's on average over rows,",
            "the closed form over the law of A",
            half.mean("row").values,
            float(theory.mean()),
        ),
    ]


def _more(claim: str, margins: xr.DataArray) -> Finding:
    return judged(HERE, claim, "derived, not printed", f"by {stated(margins)}", margins.values)


def summary(dataset: xr.Dataset) -> str:
    """States the best rows, the slopes over singular values, and how well training agrees."""
    best = dataset.every_row.values[dataset.half_theory.argmin("every_row")]
    rows = ", ".join(
        f"{row:.2g} at rank {rank}" for rank, row in zip(dataset["rank"].values, best, strict=True)
    )
    size = np.log(dataset.direction.values)
    slopes = [
        f"{np.polyfit(size, np.log(at.mean('seed')), 1)[0]:.2f} with {float(at.shown):g}"
        for at in dataset.together
    ]
    gaps = [
        np.abs(dataset[name].mean("seed").values / theory.values - 1).max()
        for name, theory in (
            ("half", dataset.half_theory.sel(every_row=dataset.row.values)),
            ("together", dataset.together_theory),
        )
    ]
    moved = dataset.moved_theory.sel(every_ratio=dataset.ratio.values).values
    return (
        f"The best squared norm of a row of A is {rows}, in units of the residual. The time to "
        f"learn half of a direction is its singular value to the power {', '.join(slopes)}. "
        f"Training differs from theory by up to {gaps[0]:.0%} (one direction) and {gaps[1]:.0%} "
        f"(together), and by {np.abs(dataset.moved.values - moved).max():.1g} for two layers."
    )
