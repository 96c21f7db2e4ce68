"""The findings of `merge_choice`, computed from the stored dataset alone."""

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, agrees, judged

SPARSIFIED = "unified merging, Corollary 1 and Section V-B5"
STUDY = "arXiv 2511.21437, abstract"
ONLY = "task arithmetic is the only merge that reliably gains"
NAMES = {"average": "the average", "trim": "trimming", "ties": "TIES"}


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Judges both papers on each bed, and whether the risk of drawn merges agrees with theory.

    Repetitions are parts of the entries. Each one is a mean over all simulated points; comparisons
    of two merges use means of logarithms.
    """
    best, published = dataset.best_measured, dataset.published_measured
    found = []
    for bed in dataset.bed.values:
        at = best.sel(bed=bed)
        found.append(
            _better(
                SPARSIFIED, f"on the bed '{bed}' TIES at its best has less risk than the average",
                "sparsifying strictly tightens the bound", at.sel(algorithm="average"),
                at.sel(algorithm="ties"),
            )
        )  # fmt: skip
    for bed in dataset.bed.values:
        at = published.sel(bed=bed)
        for setting in ("average", "ties"):
            found.append(
                _better(
                    STUDY, f"on the bed '{bed}' {NAMES[setting]} gains over the base, at scale 1",
                    ONLY, xr.ones_like(at.sel(setting=setting)), at.sel(setting=setting),
                )
            )  # fmt: skip
    theory = dataset.best.sel(share=dataset.at_share, noise=dataset.at_noise)
    for merge in dataset.algorithm.values:
        ratio = (best / theory).sel(algorithm=merge)
        found.append(
            agrees(
                "theory.merging.gaussian",
                f"the measured excess of {NAMES[str(merge)]} equals the exact one on average",
                "1", _by_part(ratio), 1.0,
            )
        )  # fmt: skip
    return found


def _by_part(values: xr.DataArray) -> np.ndarray:
    """Returns the mean over all points, for each part of the entries."""
    return np.asarray(values.mean([dim for dim in values.dims if dim != "part"]))


def _better(where: str, claim: str, paper: str, other: xr.DataArray, one: xr.DataArray) -> Finding:
    """Judges whether one excess is less than another, by means of logarithms over points."""
    first, second = (float(np.exp(np.log(x).mean())) for x in (one, other))
    less = (one.mean("part") < other.mean("part")).mean()
    return judged(
        where,
        claim,
        paper,
        f"{first:.3f} against {second:.3f} of the base's excess (geometric means), and less "
        f"at {float(less):.0%} of the points",
        _by_part(xr.ufuncs.log(other / one)),
    )


def summary(dataset: xr.Dataset) -> str:
    """Describes how often each merge wins on each bed in theory, and TIES at its defaults."""
    sentences = []
    for bed in dataset.bed.values:
        wins = winners(dataset.best.sel(bed=bed), dataset.attrs["least"])
        parts = [
            f"{NAMES[str(merge)]} in {float((wins == k).mean()):.0%}"
            for k, merge in enumerate(dataset.algorithm.values)
        ]
        ties = dataset.published.sel(bed=bed, setting="ties")
        sentences.append(
            f"On the bed '{bed}' the best merge is {', '.join(parts)} of the diagram. TIES at its "
            f"published settings beats the base in {float((ties < 1).mean()):.0%} of it."
        )
    return " ".join(sentences)


def winners(excess: xr.DataArray, least: float) -> np.ndarray:
    """Finds the merge with the smallest excess: 0 (the average) unless another is clearly smaller.

    - `excess`: The excess over algorithm, the last dimension, and others.
    - `least`: The fraction of the average's excess by which another must be smaller.
    """
    values = np.array(excess.values)
    values[..., 1:] *= 1 / (1 - least)
    return values.argmin(-1)
