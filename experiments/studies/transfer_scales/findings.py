"""The findings of `transfer_scales`, computed from the stored dataset alone."""

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, judged

WHERE = "beyond features are fate"
PRINTED = "whether transfer helps depends only on the angle: below 60° (overlap 0.5)"


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Judges whether transfer that hurts lazy networks helps rich ones.

    It tests every overlap that, in theory, helps at the smallest scale and hurts at the largest.
    """
    return [
        _judged(dataset.sel(overlap=overlap), i)
        for overlap in dataset.overlap.values[_between(dataset)]
        for i in (0, -1)
    ]


def _between(dataset: xr.Dataset) -> np.ndarray:
    """Returns which overlaps help at the smallest scale and hurt at the largest, in theory."""
    gains = (dataset.scratch - dataset.fine_tuning).sel(share=dataset.overlap.values)
    return ((gains.isel(fine=0) > 0) & (gains.isel(fine=-1) < 0)).values


def _judged(at: xr.Dataset, i: int) -> Finding:
    """Judges one overlap at the smallest (0) or the largest (-1) scale."""
    gains = (at.from_scratch - at.fine_tuned).isel(scale=i).values
    word = "helps" if i == 0 else "hurts"
    return judged(
        WHERE,
        f"with {float(at.overlap):.3g} of the features, transfer {word} at scale "
        f"{float(at.scale[i]):g}",
        PRINTED,
        f"by {gains.mean():+.3f} ± {gains.std(ddof=1) / np.sqrt(gains.size):.3f}",
        gains if i == 0 else -gains,
    )


def boundary(dataset: xr.Dataset) -> np.ndarray:
    """Interpolates, for each fine scale, the smallest overlap at which transfer helps."""
    gains = (dataset.scratch - dataset.fine_tuning).transpose("fine", "share").values
    return np.array([np.interp(0.0, gain, dataset.share.values) for gain in gains])


def summary(dataset: xr.Dataset) -> str:
    """Describes how the boundary moves with the scale, and how far theory is from the draws."""
    first, *_, last = boundary(dataset)
    low, high = float(dataset.fine[0]), float(dataset.fine[-1])
    ends = (dataset.scale.values[[0, -1]], dataset.fine_tuned.mean("draw").isel(scale=[0, -1]))
    theory = dataset.fine_tuning.sel(share=dataset.overlap.values).isel(fine=[0, -1]).values
    off = float(np.abs(ends[1].values - theory).max())
    return (
        f"Transfer helps diagonal networks from an overlap of {first:.2f} at scale {low:g}, and "
        f"from {last:.2f} at scale {high:g}. At these scales, mean risks at "
        f"d = {dataset.attrs['d']} differ from the limit by at most {off:.2f}."
    )
