"""What `relu_transfer` found: from the stored dataset alone."""

from typing import TYPE_CHECKING

import numpy as np

from theory import student_teacher as st

if TYPE_CHECKING:
    import xarray as xr


def measured_boundary(dataset: "xr.Dataset") -> np.ndarray:
    """Per mu, where the mean gain turns negative."""
    return np.array([st.crossing(dataset.n.values, row) for row in dataset.gain.values])


def kernel_distance(dataset: "xr.Dataset", name: str) -> float:
    source = dataset.kernel_source.values
    return float(np.linalg.norm(dataset[name].values - source) / np.linalg.norm(source))


def summary(dataset: "xr.Dataset") -> str:
    """The exponent, how straight the law is, and how far the predicted boundary is off."""
    nu, low, high = dataset.exponent.values
    bend = dataset.curvature.values
    straight = "straight" if bend[1] < 0 < bend[2] else f"bent (curvature {bend[0]:+.2f})"
    sentence = (
        f"The scratch risk falls as n^-ν with ν = {nu:.2f} (95 % interval {low:.2f} to {high:.2f} "
        f"over {dataset.sizes['teacher']} teachers; in log-log it is {straight})"
    )
    if "outside" not in dataset:
        return f"{sentence}."
    measured, predicted = measured_boundary(dataset), dataset.boundary.sel(limit="mean").values
    both = np.isfinite(measured)
    sign = np.sign(dataset.gain.values)
    sure = np.abs(dataset.gain.values) > 2 * dataset.gain_stderr.values
    told = np.where(dataset.n.values < predicted[:, None], 1, -1)
    agree = f"{np.mean((sign == told)[sure]):.0%}" if sure.any() else "none"
    sentence += (
        f". The predicted boundary tells the sign of the transferability in {agree} of the "
        f"{int(sure.sum())} points (μ, n) where it exceeds 2 standard errors"
    )
    if both.any():
        ratio = (measured / predicted)[both]
        first, last = dataset.mu.values[both][[0, -1]]
        sentence += (
            f"; the measured boundary lies at {ratio[0]:.2f} times the predicted n for "
            f"μ = {first:g} and at {ratio[-1]:.2f} times for μ = {last:g}"
        )
    worse = (dataset.outside > dataset.outside_untrained).mean("teacher").values > 0.5
    sentence += (
        f". Pretrained features express less of the target than untrained ones for "
        f"{int(worse.sum())} of the {len(worse)} μ"
    )
    return (
        f"{sentence}. Pretraining brings the kernel from "
        f"{kernel_distance(dataset, 'kernel_initial'):.0%} to "
        f"{kernel_distance(dataset, 'kernel_pretrained'):.0%} off the source teacher's "
        f"(μ = {dataset.attrs['kernel_mu']:g})."
    )
