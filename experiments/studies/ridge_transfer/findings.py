"""The findings of `ridge_transfer`, computed from the stored dataset alone."""

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, judged, mean_and_error

PRINTED = {
    "best": "the best ridge is 0 (n → ∞)",
    "largest": "the risk strictly increases, from 0.15 to 0.24 (load 0.5, θ = π/8, ridge to 0.5)",
}


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Judges whether a ridge increases the risk of linear transfer, as the paper claims.

    Two ridges are judged in each case: the best one by the closed form, and the largest.

    Returns the findings. Datasets of an older version contain no values of single draws, and give
    no findings.
    """
    # Runs of earlier versions did not store single data sets.
    if "added" not in dataset:
        return []
    cases = (dataset.isel(case=i) for i in range(dataset.sizes["case"]))
    return [_raised(case, strength) for case in cases for strength in PRINTED]


def _raised(case: xr.Dataset, strength: str) -> Finding:
    """Judges whether the "best" or the "largest" ridge of a case increases the risk."""
    added = case.added.sel(strength=strength)
    ridge = case.best_ridge if strength == "best" else case.ridge[-1]
    mean, error = mean_and_error(added, "draw")
    return judged(
        "features are fate, Theorem 3.8, Fig. 2",
        f"with n = {int(case.n)} at {np.degrees(float(case.theta)):.1f}°, the {strength} ridge of "
        f"{float(ridge):.3g} raises the risk of linear transfer",
        PRINTED[strength],
        f"by {mean:+.2g} ± {error:.1g}, from {float(case.exact[0]):.3g} without a ridge",
        added.values,
    )


def summary(dataset: xr.Dataset) -> str:
    """Summarises the dataset in a few sentences.

    Returns the gain of the best ridge in each case, and how well exact and simulated means agree.
    """
    sentences = []
    for i in range(dataset.sizes["case"]):
        case = dataset.isel(case=i)
        plain, best = float(case.exact[0]), float(case.best_risk)
        z = (case["mean"] - case.exact) / case["std"] * np.sqrt(dataset.attrs["draws"])
        sentences.append(
            f"With n = {int(case.n)} samples at {np.degrees(float(case.theta)):.1f}°, the best "
            f"ridge is {float(case.best_ridge):.3g}. It lowers the risk from {plain:.4f} to "
            f"{best:.4f} ({1 - best / plain:.1%}). Simulation and exact mean differ by at most "
            f"{float(np.abs(z).max()):.1f} standard errors."
        )
    return " ".join(sentences)
