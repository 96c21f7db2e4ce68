"""The findings of `merge_or_pool`, computed from the stored dataset alone."""

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, agrees, judged, mean_and_error, stated

HERE = "experts fitted to data, ours"


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Judges both sides of the boundary, the cost of different curvatures, and agreement."""
    plain = dataset.plain
    gain = np.log(plain.sel(way="pooled") / plain.sel(way="average"))
    line = np.interp(dataset["load"], dataset.fine_load, dataset.line)
    beyond = dataset.spread.values > line[:, None]
    turned = dataset.curved.isel(angle=-1)
    return [
        _more(
            "without penalties the average has less risk than pooled training at larger spreads "
            "than the boundary",
            _over(gain, beyond),
        ),
        _more(
            "without penalties pooled training has less risk at smaller spreads",
            -_over(gain, ~beyond),
        ),
        _more(
            "if curvatures are most different, the average has more risk than RegMean with the "
            "experts' own Gram matrices",
            turned.sel(weights="average") - turned.sel(weights="own data"),
        ),
        _more(
            "RegMean with Gram matrices of other data has less risk than with those of the "
            "experts' data, at the spread of the panel",
            turned.sel(weights="own data") - turned.sel(weights="other data"),
        ),
        agrees(
            HERE,
            "the mean excess without penalties equals the exact one",
            "exact",
            (plain / dataset.plain_theory).mean(("load", "spread", "way")).values,
            1.0,
        ),
        agrees(
            HERE,
            "the mean excess with the best penalties equals the limit",
            "the limit of large n and d",
            (dataset.tuned / dataset.tuned_theory).mean(("few_load", "spread", "way")).values,
            1.0,
        ),
    ]


def _over(gain: xr.DataArray, where: np.ndarray) -> xr.DataArray:
    """Averages over some of the points, for each draw."""
    return gain.where(xr.DataArray(where, dims=("load", "spread"))).mean(("load", "spread"))


def _more(claim: str, margins: xr.DataArray) -> Finding:
    return judged(HERE, claim, "derived, not printed", f"by {stated(margins)}", margins.values)


def summary(dataset: xr.Dataset) -> str:
    """Summarises how well simulation and theory agree, and on which side the points lie."""
    sentences = []
    for name in ("plain", "tuned", "curved"):
        mean, error = mean_and_error(dataset[name], "draw")
        theory = dataset[f"{name}_theory"].values
        z, off = np.abs(mean - theory) / error, np.abs(mean / theory - 1)
        sentences.append(
            f"Risks of '{name}' differ from theory by up to {off.max():.1%}, or {z.max():.1f} "
            "standard errors."
        )
    for name, words in (("plain", "Without penalties"), ("tuned", "With the best penalties")):
        measured, theory = (
            data.sel(way="average") < data.sel(way="pooled")
            for data in (dataset[name].mean("draw"), dataset[f"{name}_theory"])
        )
        sentences.append(
            f"{words} the average has less risk at {int(measured.sum())} of {measured.size} "
            f"points; theory is right about {int((measured == theory).sum())}."
        )
    same = (dataset.tuned_map > 0) == (dataset.tuned_experts > 0)
    sentences.append(
        f"At {float(same.mean()):.1%} of the map, the average is better exactly where the best "
        "experts have less risk on their own tasks than the best pooled model."
    )
    return " ".join(sentences)
