"""What `transfer_phase` found: from the stored dataset alone."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from experiments.lab.findings import Finding
from experiments.studies.transfer_phase.plots import layers
from experiments.studies.transfer_phase.regions import ROUNDING, judged_regions

if TYPE_CHECKING:
    import xarray as xr


WHERE = {
    "linear": ("features are fate, eq. 13, Figs. 1 and 6", "the limit n, d → ∞, and slices"),
    "fine_tune": ("features are fate, eq. 17, Fig. 3", "it helps up to 60 degrees, whatever σ"),
}


def _shown(dataset: "xr.Dataset") -> "Iterator[tuple[str, str, xr.Dataset]]":
    """The modes that were run, their names, and the dataset at the most noise and, for fine-tuning,
    at two layers if there are."""
    at = dataset.sel(sigma=dataset.sigma.max())
    depth = 2 if 2 in dataset.depth else float(dataset.depth[-1])
    if "linear_theory" in dataset:
        yield "linear", "linear transfer", at
    if "fine_tune_theory" in dataset:
        yield "fine_tune", f"fine-tuning ({layers(depth)})", at.sel(depth=depth)


def findings(dataset: "xr.Dataset") -> list[Finding]:
    """Whether transfer hurts and helps where it should, at the most noise that was drawn."""
    if "region" not in dataset:  # a run of a version that kept no data set by itself
        return []
    return [
        finding
        for mode, name, at in _shown(dataset)
        for finding in judged_regions(
            f"{name} at σ = {float(at.sigma):g}",
            *WHERE[mode],
            at[f"{mode}_region"],
            at[f"{mode}_region_theory"],
        )
    ]


def summary(dataset: "xr.Dataset") -> str:
    """How much of the plane transfer hurts, and how well the two sides agree."""
    sentences = []
    for mode, name, at in _shown(dataset):
        theory, mean = at[f"{mode}_theory"].values, at[f"{mode}_mean"].values
        stderr = at[f"{mode}_std"].values / np.sqrt(at.attrs["draws"])
        # From n = d on fine-tuning equals scratch training: no sign there, up to rounding.
        decided = np.abs(theory) > 4 * np.maximum(stderr, ROUNDING)
        agree = np.mean(np.sign(theory[decided]) == np.sign(mean[decided]))
        z = (mean - theory)[stderr > ROUNDING] / stderr[stderr > ROUNDING]
        sentences.append(
            f"{name[:1].upper()}{name[1:]} hurts in {np.mean(theory < -ROUNDING):.0%} of the "
            f"(γ, θ) plane at σ = {float(at.sigma):g}; where |T| exceeds 4 standard errors, theory "
            f"and simulation agree on the sign in {agree:.1%} of the points, and the median |z| "
            f"over all points is {np.median(np.abs(z)):.2f}."
        )
    return " ".join(sentences)
