"""What `transfer_phase` found: from the stored dataset alone."""

from typing import TYPE_CHECKING

import numpy as np

from experiments.studies.transfer_phase.plots import layers

if TYPE_CHECKING:
    import xarray as xr


def summary(dataset: "xr.Dataset") -> str:
    """How much of the plane transfer hurts, and how well the two sides agree."""

    sigma = float(dataset.sigma.max())
    depth = 2 if 2 in dataset.depth else float(dataset.depth[-1])
    at = dataset.sel(sigma=sigma)
    names = {"linear": "Linear transfer", "fine_tune": f"Fine-tuning ({layers(depth)})"}
    sentences = []
    for mode, name in names.items():
        if f"{mode}_theory" not in dataset:
            continue
        one = at.sel(depth=depth) if mode == "fine_tune" else at
        theory, mean = one[f"{mode}_theory"].values, one[f"{mode}_mean"].values
        stderr = one[f"{mode}_std"].values / np.sqrt(at.attrs["draws"])
        # From n = d on fine-tuning equals scratch training: no sign there, up to rounding.
        decided = np.abs(theory) > 4 * np.maximum(stderr, 1e-9)
        agree = np.mean(np.sign(theory[decided]) == np.sign(mean[decided]))
        z = (mean - theory)[stderr > 1e-9] / stderr[stderr > 1e-9]
        sentences.append(
            f"{name} hurts in {np.mean(theory < -1e-9):.0%} of the (γ, θ) plane at σ = {sigma:g}; "
            f"where |T| exceeds 4 standard errors, theory and simulation agree on the sign in "
            f"{agree:.1%} of the points, and the median |z| over all points is "
            f"{np.median(np.abs(z)):.2f}."
        )
    return " ".join(sentences)
