"""What `ridge_transfer` found: from the stored dataset alone."""

from typing import TYPE_CHECKING

import numpy as np

from experiments.lab.findings import Finding, judged, mean_and_error

if TYPE_CHECKING:
    import xarray as xr


PRINTED = {
    "best": "the best ridge is 0 (n → ∞)",
    "largest": "the risk strictly increases, from 0.15 to 0.24 (γ = 0.5, θ = π/8, ridge to 0.5)",
}


def findings(dataset: "xr.Dataset") -> list[Finding]:
    """Whether a ridge raises the risk: the one that is best in closed form, and the largest."""
    if "added" not in dataset:  # a run of a version that kept no data set by itself
        return []
    cases = (dataset.isel(case=i) for i in range(dataset.sizes["case"]))
    return [_raised(case, strength) for case in cases for strength in PRINTED]


def _raised(case: "xr.Dataset", strength: str) -> Finding:
    added = case.added.sel(strength=strength)
    ridge = case.best_ridge if strength == "best" else case.ridge[-1]
    mean, error = mean_and_error(added, "draw")
    return judged(
        "features are fate, Theorem 3.8, Fig. 2",
        f"with n = {int(case.n)} at {np.degrees(float(case.theta)):.1f}° a ridge of "
        f"{float(ridge):.3g} ({strength}) raises the risk of linear transfer",
        PRINTED[strength],
        f"by {mean:+.2g} ± {error:.1g}, of {float(case.exact[0]):.3g} without a ridge",
        added.values,
    )


def summary(dataset: "xr.Dataset") -> str:
    """What the best ridge gains in each case, and how well the two sides agree."""
    sentences = []
    for i in range(dataset.sizes["case"]):
        case = dataset.isel(case=i)
        plain, best = float(case.exact[0]), float(case.best_risk)
        z = (case["mean"] - case.exact) / case["std"] * np.sqrt(dataset.attrs["draws"])
        sentences.append(
            f"With n = {int(case.n)} samples at {np.degrees(float(case.theta)):.1f}° the best "
            f"ridge is {float(case.best_ridge):.3g} and lowers the risk from {plain:.4f} to "
            f"{best:.4f} ({1 - best / plain:.1%}); simulation and exact mean differ by at most "
            f"{float(np.abs(z).max()):.1f} standard errors."
        )
    return " ".join(sentences)
