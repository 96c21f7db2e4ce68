"""What `transfer_factors` found: from the stored dataset alone."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import xarray as xr


def summary(dataset: "xr.Dataset") -> str:
    """Agreement of theory and simulation, and what the factor does."""
    factor, sentences = dataset.attrs["factor"], []
    names = {"linear": "Linear transfer", "fine_tune": "Fine-tuning"}
    for mode, name in names.items():
        theory, mean = dataset[f"{mode}_theory"].values, dataset[f"{mode}_mean"].values
        z = (mean - theory) / (dataset[f"{mode}_std"].values / np.sqrt(dataset.attrs["draws"]))
        hurts = {
            float(value): f"{np.mean(row < -1e-9):.0%} of the loads at {factor} {value:g}"
            for value, row in zip(dataset.value.values, theory, strict=True)
            if np.isfinite(row).all()
        }
        ends = " and ".join(dict.fromkeys([*hurts.values()][i] for i in (0, -1)))
        z = np.abs(z[np.isfinite(z)])
        sentences.append(
            f"{name} hurts at {ends}; median |z| of simulation against theory {np.median(z):.2f}."
        )
    if factor == "time" and np.isinf(dataset.value[-1]) and dataset.sizes["value"] > 1:
        nearest = int(np.abs(dataset.gamma.values - 1).argmin())
        risk = dataset.risk_mean.sel(way="fine_tune").isel(gamma=nearest).values
        stopped = ", ".join(
            f"{r / risk[-1]:.0%} at t = {t:g}"
            for t, r in zip(dataset.value.values[:-1], risk[:-1], strict=True)
        )
        sentences.append(
            f"Nearest to n = d (γ = {float(dataset.gamma[nearest]):.2f}) stopping leaves this much "
            f"of the risk of training to the end: {stopped}."
        )
    return " ".join(sentences)
