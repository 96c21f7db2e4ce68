"""The findings of `transfer_factors`, computed from the stored dataset alone."""

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, judged, stated
from experiments.studies.shared.transfer_regions import ROUNDING, judged_regions

NAMES = {"linear": "linear transfer", "fine_tuning": "fine-tuning"}


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Judges whether transfer hurts and helps as predicted, and whether stopping early is better.

    Returns the findings. Datasets of an older version contain no values of single draws, and give
    no findings.
    """
    # Runs of earlier versions did not store single data sets.
    if "region" not in dataset:
        return []
    where = "features are fate, Sec. 3", "white inputs, trained to the end from a known source"
    declared = [
        finding
        for mode, name in NAMES.items()
        for finding in judged_regions(
            f"{name} ({_source(dataset, mode)}) by load and {dataset.attrs['factor']}",
            *where,
            dataset[f"{mode}_region"],
            dataset[f"{mode}_region_theory"],
        )
    ]
    return [*declared, _stopping(dataset)] if _stops(dataset) else declared


def _source(dataset: xr.Dataset, mode: str) -> str:
    """Describes the quantity that was averaged over random data."""
    if mode == "linear":
        return "least squares on random data"
    # The last time may be infinite, in which case the estimator replaces the flow.
    timed = dataset.attrs["factor"] == "time"
    return "gradient flow on random data" if timed else "estimator, averaged over data"


def _stops(dataset: xr.Dataset) -> bool:
    """Returns whether some trainings were stopped early, and one was not."""
    unlimited = dataset.attrs["factor"] == "time" and np.isinf(dataset.value[-1])
    return bool(unlimited) and dataset.sizes["value"] > 1


def _stopping(dataset: xr.Dataset) -> Finding:
    """Judges whether stopping early lowers the risk of fine-tuning at the load nearest to 1.

    The time is chosen on the first half of the draws and evaluated on the others. On the same
    draws, a chosen time would appear better than it is.
    """
    log_risk = np.log(dataset["risk_near"].values)
    lower = log_risk[:, -1:] - log_risk[:, :-1]
    half = len(lower) // 2
    best = int(lower[:half].mean(0).argmax())
    margins = xr.DataArray(lower[half:, best], dims="draw")
    return judged(
        "features are fate, Fig. 3",
        "stopping early lowers the risk of fine-tuning nearest to n = d (time chosen on other "
        "data sets)",
        "all training ends at a loss of 1e-6 or after 1e5 steps",
        f"log of the risk lower by {stated(margins)} at t = {float(dataset.value[best]):g}",
        margins.values,
    )


def summary(dataset: xr.Dataset) -> str:
    """Summarises the dataset in a few sentences.

    Returns where transfer hurts at the ends of the factor's range, and how far measurements are
    from theory. With stopped trainings, it also returns how stopping changes the risk.
    """
    factor, sentences = dataset.attrs["factor"], []
    for mode, name in NAMES.items():
        theory, mean = dataset[f"{mode}_theory"].values, dataset[f"{mode}_mean"].values
        z = (mean - theory) / (dataset[f"{mode}_std"].values / np.sqrt(dataset.attrs["draws"]))
        hurts = {
            float(value): f"{np.mean(row < -ROUNDING):.0%} of the loads at {factor} {value:g}"
            for value, row in zip(dataset.value.values, theory, strict=True)
            if np.isfinite(row).all()
        }
        ends = " and ".join(dict.fromkeys([*hurts.values()][i] for i in (0, -1)))
        z = np.abs(z[np.isfinite(z)])
        sentences.append(
            f"{name[:1].upper()}{name[1:]} hurts at {ends}. The median |z| of "
            f"{_source(dataset, mode)} against theory is {np.median(z):.2f}."
        )
    if _stops(dataset):
        nearest = int(np.abs(dataset["load"].values - 1).argmin())
        risk = dataset.risk_mean.sel(way="fine_tuning").isel(load=nearest).values
        stopped = ", ".join(
            f"{r / risk[-1]:.0%} at t = {t:g}"
            for t, r in zip(dataset.value.values[:-1], risk[:-1], strict=True)
        )
        sentences.append(
            f"Nearest to n = d (n/d = {float(dataset['load'][nearest]):.2f}), the risk as a share "
            f"of the risk of training to the end: {stopped}."
        )
    return " ".join(sentences)
