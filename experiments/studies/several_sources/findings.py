"""The findings of `several_sources`, computed from the stored dataset alone."""

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, agrees, judged, mean_and_error, stated

HERE = "sources and ranks, ours"


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Judges the order of the weights, the cost of a rotated covariance, and random subspaces."""
    mixed, turned = dataset.mixed, dataset.turned
    noisiest = mixed.isel(noise=-1)
    costs = turned.isel(source_load=-1, angle=-1) - turned.isel(source_load=-1, angle=0)
    random = dataset.ranked.sel(order="random")
    middle = random.isel(rank=slice(0, -1))
    ends = np.minimum(1.0, random.isel(rank=-1))
    return [
        _less(
            f"at noise {float(noisiest.noise):g} SAIL's weights end with less risk than equal ones",
            noisiest.sel(way="equal") - noisiest.sel(way="proximal"),
        ),
        _less(
            f"at noise {float(noisiest.noise):g} the best weights of any sum end with less risk "
            "than SAIL's",
            noisiest.sel(way="proximal") - noisiest.sel(way="best"),
        ),
        _less(
            "the largest angle between the inputs' directions costs less after fine-tuning",
            costs.sel(when="before") - costs.sel(when="after"),
        ),
        _less(
            "a random subspace has more risk than the better of all directions and none, on "
            "average over the numbers of directions",
            middle.mean("rank") - ends,
        ),
        agrees(
            HERE,
            "on average over noises, the risk of the best weights after fine-tuning equals theory's,",
            "(1 - n/d) (|β|² - g.G⁻¹g) + noise",
            mixed.sel(way="best").mean("noise").values,
            float(dataset.mixed_theory.sel(way="best").mean()),
        ),
    ]


def _less(claim: str, margins: xr.DataArray) -> Finding:
    return judged(HERE, claim, "derived, not printed", f"by {stated(margins)}", margins.values)


def summary(dataset: xr.Dataset) -> str:
    """Summarises the dataset in a few sentences.

    Returns how well simulation and theory agree, and the best numbers of directions.
    """
    sentences = []
    near = dataset.ranked_theory.interp(every_rank=dataset["rank"].values)
    pairs = {
        "of weights": (dataset.mixed, dataset.mixed_theory),
        "of covariances": (dataset.turned, dataset.turned_theory),
        "of ranks": (dataset.ranked, near.rename(every_rank="rank")),
    }
    for name, (risk, theory) in pairs.items():
        mean, error = mean_and_error(risk, "draw")
        off, z = np.abs(mean / theory.values - 1), np.abs(mean - theory.values) / error
        sentences.append(
            f"Risks {name} differ from theory by up to {off.max():.1%}, or {z.max():.1f} standard "
            "errors."
        )
    best = dataset.every_rank[dataset.ranked_theory.argmin("every_rank")]
    random, first = (int(best.sel(order=order)) for order in ("random", "first"))
    sentences.append(
        f"With {dataset.attrs['n']} samples in {dataset.attrs['d']} dimensions, the best random "
        f"subspace has {random} directions. Largest parts first, {first} directions are best."
    )
    return " ".join(sentences)
