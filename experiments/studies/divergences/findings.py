"""The findings of `divergences`, computed from the stored dataset alone."""

from math import pi

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, judged, stated
from experiments.studies.divergences.config import NORMS

CASES = {  # the trained part in words, its name, and the largest angle
    "linear transfer at angles up to 90 degrees": ("linear", pi / 2),
    "linear transfer up to 180 degrees": ("linear", pi),
    "fine-tuning up to 180 degrees": ("fine_tuning", pi),
}
# A weaker correlation cannot be seen in a figure.
NONE = -0.1
FIG_5 = "features are fate, Fig. 5"


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Judges whether distance and transfer are unrelated, as the paper's figure suggests.

    It also judges whether the paper's estimate of W_1 from samples distinguishes two laws.

    Returns the findings. Datasets of an older version contain no values of single draws, and give
    no findings.
    """
    # Runs of earlier versions did not store single data sets.
    if "gain" not in dataset:
        return []
    declared = [
        judged(
            FIG_5,
            f"transferability is not negatively correlated with {name} for {words} (above {NONE})",
            "points without figures",
            f"{stated(correlation)} over {correlation.size} data sets",
            correlation.values - NONE,
        )
        for words, case in CASES.items()
        for name, correlation in _by_draw(dataset, *case).items()
    ]
    largest = float(dataset["w1_bounds"].max())
    for norm in NORMS:
        same = dataset["sampled_w1"].sel(norm=norm).isel(theta=0)
        declared.append(
            judged(
                FIG_5,
                f"estimates of W1 ({norm}) from samples distinguish two laws: samples of one law "
                "are closer than samples of laws at 180 degrees",
                "526 to 529",
                f"{stated(same, 1, sign=False)} for one law, where W1 is 0; for two at most "
                f"{largest:.2f}",
                largest - same.values,
            )
        )
    return declared


def _axes(dataset: xr.Dataset, within: np.ndarray) -> dict[str, np.ndarray]:
    """Returns each distance at the chosen angles."""
    return {
        "KL": np.interp(dataset.theta, dataset.fine_theta, dataset.kl)[within],
        "W1": dataset.w1_mean.values[within],
        "Dudley": dataset.dudley_mean.values[within],
    }


def _up_to(dataset: xr.Dataset, end: float) -> np.ndarray:
    """Returns which angles lie in [0, end]."""
    # Rounding must not exclude the end point.
    return dataset["theta"].values <= end + 1e-6


def _by_draw(dataset: xr.Dataset, mode: str, end: float) -> dict[str, xr.DataArray]:
    """Correlates each draw's transferability with the distances of the paper's figure.

    It does so over the angles in [0, end], at the first load.
    """
    within = _up_to(dataset, end)
    gain = dataset["gain"].isel(load=0, theta=within).sel(mode=mode).values
    axes = _axes(dataset, within)
    return {
        name: xr.DataArray([np.corrcoef(axes[name], row)[0, 1] for row in gain], dims="draw")
        for name in ("KL", "W1")
    }


def correlations(dataset: xr.Dataset, mode: str, end: float) -> dict[str, float]:
    """Correlates the mean simulated transferability with each distance, over angles.

    Args:
      dataset: The study's dataset. Its first load is used.
      mode: "linear" or "fine_tuning".
      end: The largest angle, in radians.

    Returns:
      Pearson's correlations by name: "KL", "W1" and "Dudley" for the laws. Estimates of W_1 from
      samples have the names of their norms.
    """
    first, within = dataset.isel(load=0).sel(mode=mode), _up_to(dataset, end)
    gain = first.gain_mean.values[within]
    axes = _axes(dataset, within)
    by_distance = {name: float(np.corrcoef(axis, gain)[0, 1]) for name, axis in axes.items()}
    for norm in NORMS:
        estimates = first.sampled_w1.sel(norm=norm).values[:, within]
        repeated = np.broadcast_to(gain, estimates.shape)
        by_distance[norm] = float(np.corrcoef(estimates.ravel(), repeated.ravel())[0, 1])
    return by_distance


def summary(dataset: xr.Dataset) -> str:
    """Summarises the dataset in a few sentences.

    Returns the correlation of distance and transferability, the values of estimated W_1, and the
    range of transferability at one distance.
    """
    # attrs["n"] is a list, but a list with one entry is read back from a file as a number.
    attrs, first = dataset.attrs, dataset.isel(load=0)
    cases = {words: correlations(dataset, *case) for words, case in CASES.items()}
    up_to_180 = cases["linear transfer up to 180 degrees"]
    listed = "; ".join(
        f"{', '.join(f'{case[k]:+.2f} ({k})' for k in ('KL', 'W1', 'Dudley'))} for {words}"
        for words, case in cases.items()
    )
    estimates, floor = dataset.sampled_w1, dataset.sampled_w1.isel(theta=0)
    samples = "; ".join(
        f"{float(estimates.sel(norm=k).min()):.1f} to {float(estimates.sel(norm=k).max()):.1f} "
        f"({k}; two samples of one law: {float(floor.sel(norm=k).mean()):.1f}; correlation with T "
        f"{up_to_180[k]:+.2f})"
        for k in NORMS
    )
    middle = dataset.theory.sel(mode="linear").interp(fine_theta=pi / 4)
    return (
        f"At load {float(first['load']):g}, the correlation of transferability T with distance is "
        f"{listed}. "
        f"W1 of the laws is at most {float(first.w1_bounds.max()):.2f}. Estimates from "
        f"{np.ravel(attrs['n'])[0]} samples in {attrs['d']} dimensions give {samples}. They show "
        "mostly the error of the estimate. "
        "Yet no distance determines T: at 180 degrees T is "
        f"{float(first.theory.sel(mode='linear')[-1]):+.2f} for linear transfer and "
        f"{float(first.theory.sel(mode='fine_tuning')[-1]):+.2f} for fine-tuning. At 45 degrees "
        f"linear transfer has T from {float(middle.min()):+.2f} to {float(middle.max()):+.2f}, by "
        "load alone."
    )
