"""What `ridge_transfer` found: from the stored dataset alone."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import xarray as xr


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
