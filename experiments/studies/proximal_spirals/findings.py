"""Tests the claims of SAIL's App. K on a finished run of `proximal_spirals`; summarises it."""

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, judged, stated
from experiments.studies.proximal_spirals.training import LABELS
from experiments.studies.shared import gamma_sweep as line

PREDICTED = "mmd"  # SAIL's distance, in its eq. 11
SOURCES = {
    "classes": "one spiral each",
    "radii": "inner and outer parts",
    "random": "random parts",
}


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Tests the claims of SAIL's App. K on its start, for every kind of sources.

    They are tested for the first kind of start.

    Returns four findings for each kind of sources: loss, accuracy and gradient from the predicted
    gamma, and the final loss from the best one, each compared with training from scratch.
    """
    at = dataset.isel(start=0)
    return [
        finding
        for how in dataset["sources"].values.astype(str)
        for finding in _of_sources(at.sel(sources=how), SOURCES[how])
    ]


def _of_sources(case: xr.Dataset, sources: str) -> list[Finding]:
    """Returns the four findings for one kind of sources."""
    loss, accuracy, gradient = (_predicted(case, n) for n in ("loss", "accuracy", "gradient"))
    early, end = case["epoch"] <= case["epoch"][-1] / 2, {"epoch": -1}
    ratio = case["scratch_gradient"] / gradient
    smaller = ratio.copy(data=np.log(ratio.values)).where(early).mean("epoch")
    best = f"the best start on the line (chosen on the other seeds; sources: {sources})"
    start = f"SAIL's start (eq. 11, MMD; sources: {sources})"
    claims = (  # figure, claim, the paper's result, margins, their unit
        (
            "8",
            f"{start} has a lower training loss along training than scratch",
            "a lower loss significantly faster, as curves",
            (case["scratch_loss"] - loss).mean("epoch"),
            "nats",
        ),
        (
            "8",
            f"{start} ends at a higher test accuracy than scratch",
            "a higher final accuracy, as curves",
            100 * (accuracy - case["scratch_accuracy"]).isel(end),
            "points",
        ),
        (
            "9",
            f"{start} has a smaller gradient in the first half of training than scratch",
            "a smaller norm earlier in training, as curves",
            smaller,
            "in its logarithm",
        ),
        (
            "8",
            f"{best} ends at a lower training loss than scratch",
            "curves by gamma, compared with scratch",
            line.lead(case["loss"].isel(end), case["scratch_loss"].isel(end)),
            "nats",
        ),
    )
    return [
        judged(f"SAIL, App. K, Fig. {number}", claim, paper, _here(margins, unit), margins.values)
        for number, claim, paper, margins, unit in claims
    ]


def _predicted(case: xr.Dataset, measure: str) -> xr.DataArray:
    """Returns a measure along training from the predicted gamma, by interpolation between runs."""
    values = case[measure].transpose("seed", "epoch", "gamma")
    where = np.broadcast_to(case["predicted"].sel(way=PREDICTED).values[:, None], values.shape[:2])
    values_there = line.at(case["gamma"].values, values.values.astype(float), where)
    return values.isel(gamma=0, drop=True).copy(data=values_there)


def _here(margins: xr.DataArray, unit: str) -> str:
    """Formats the margins, and the number of seeds in which they are defined."""
    count = int(np.isfinite(margins).sum())
    defined = "" if count == margins.size else f"; defined in {count} of {margins.size} seeds"
    return f"by {stated(margins, 3)} {unit}{defined}"


def summary(dataset: xr.Dataset) -> str:
    """Describes where the best gamma is, and which predictions agree with it."""
    looks = dataset["look"].values
    cases = {
        f"{h}, {s} start": dataset.sel(sources=h, start=s)
        for h in dataset["sources"].values
        for s in dataset["start"].values
    }
    best = line.by_case(cases, looks, lambda case, n: line.stated_best(case.sel(look=n)))
    sharp = [(case, n) for case in cases.values() for n in looks if line.is_known(case.sel(look=n))]
    met = ", ".join(
        f"{LABELS[way]} {line.met(sharp, way)}" for way in dataset["way"].values.astype(str)
    )
    when = ", ".join(map(str, looks))
    return (
        f"Best gamma (weight of theta_1; mean ± s.e. over {dataset.sizes['seed']} seeds) after "
        f"{when} epochs, by sources: {best}. Predictions are compared with it in the {len(sharp)} "
        f"cases where it is known to ± {line.SHARP:g}. Within {line.DECIDED:g} s.e. of it are: "
        f"{met}."
    )
