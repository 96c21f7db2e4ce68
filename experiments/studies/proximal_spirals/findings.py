"""What `proximal_spirals` found, from its dataset alone."""

import xarray as xr

from experiments.studies.proximal_spirals.training import LABELS
from experiments.training import gamma_sweep as line


def summary(dataset: xr.Dataset) -> str:
    """Where the best gamma lies, which predictions meet it, and whether the start pays."""
    looks = dataset["look"].values
    cases = {
        f"{h}, {s} start": dataset.sel(sources=h, start=s)
        for h in dataset["sources"].values
        for s in dataset["start"].values
    }
    best = line.by_case(cases, looks, lambda one, n: line.stated_best(one.sel(look=n)))
    known = [(one, n) for one in cases.values() for n in looks if line.is_known(one.sel(look=n))]
    met = ", ".join(
        f"{LABELS[way]} {line.met(known, way)}" for way in dataset["way"].values.astype(str)
    )
    gap = lambda one: one["loss"].min("gamma") - one["scratch_loss"]  # noqa: E731
    ahead = line.by_case(cases, looks, lambda one, n: line.stated_sign(gap(one).sel(epoch=n)))
    when = ", ".join(map(str, looks))
    return (
        f"Best gamma (weight of theta_1; mean ± s.e. over {dataset.sizes['seed']} seeds) after "
        f"{when} epochs, by sources: {best}. The predicted gamma is within {line.DECIDED:g} s.e. "
        f"of it, among the {len(known)} cases in which it is known to ± {line.SHARP:g}: {met}. "
        f"Training loss from the best start on the line (chosen in hindsight), beside that from "
        f"scratch, after {when} epochs: {ahead}."
    )
