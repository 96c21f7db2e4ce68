"""Tests the claims of SAIL's Appendix J on a finished run of `sail_diffusion`.

`PRINTED` and `SIT` contain the paper's figures. The margins of each claim are differences between
two trainings of one seed.
"""

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, corrected, judged, stated

TABLE = "SAIL, Table 4"
SCALE = "SiT-B/2, ImageNet 256 x 256"
# REPA's and SAIL's rows of the table, by the fraction of the training: FID, sFID, IS, precision
PRINTED = {
    1 / 8: ((78.2, 67.6), (11.71, 16.19), (17.1, 20.5), (0.33, 0.34)),
    1 / 4: ((49.5, 35.9), (7.00, 7.02), (27.5, 45.1), (0.46, 0.53)),
    1 / 2: ((33.2, 19.8), (6.68, 6.15), (43.7, 81.9), (0.54, 0.64)),
    1: ((24.4, 12.2), (6.40, 5.90), (59.9, 119.4), (0.59, 0.70)),
}
SIT = (33.0, 6.46, 43.7, 0.53)  # after the whole training
MEASURES = {
    "fd": ("Fréchet distance", "FID", 0, -1),
    "sfd": ("spatial Fréchet distance", "sFID", 1, -1),
    "inception": ("inception score", "IS", 2, 1),
    "precision": ("precision", "Prec.", 3, 1),
}
READINGS = {"sail": "SAIL", "sail_clean": "SAIL with targets of the data"}


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Tests every printed comparison of Table 4 on a finished run.

    SAIL is compared with REPA at each printed checkpoint, and REPA with plain SiT at the end of
    training. Fréchet distances are compared at all four checkpoints, other measures at the last.

    It returns one finding for each claim. Claims about SAIL appear once for each of `sail` and
    `sail_clean` in the run. If the run has neither, they are "not tested".
    """
    readings = {way: name for way, name in READINGS.items() if way in dataset["way"]}
    declared = _repa(dataset)
    for way, name in (readings or {"sail": READINGS["sail"]}).items():
        declared += _sail(dataset, way, name) + _sooner(dataset, way, name)
    return declared


def _at(dataset: xr.Dataset, share: float) -> int:
    """Returns the step after this fraction of the training."""
    return round(share * dataset.attrs["steps"])


def _pair(
    dataset: xr.Dataset, share: float, measure: str, ways: tuple[str, str]
) -> tuple[str, np.ndarray]:
    """Returns two trainings' values as text, and how much better the second is, seed by seed."""
    at = dataset[measure].sel(step=_at(dataset, share))
    a, b = (at.sel(way=way) for way in ways)
    digits = 2 if abs(float(a.mean())) >= 1 else 3
    told = f"{stated(a, digits, sign=False)} -> {stated(b, digits, sign=False)}"
    return f"{told} at step {_at(dataset, share)}", MEASURES[measure][3] * (b - a).values


def _missing(where: str, claim: str, paper: str) -> Finding:
    """Creates the finding for a claim about a training that was not run."""
    return Finding(where, claim, paper, "not among the ways of this run", "not tested")


def _repa(dataset: xr.Dataset) -> list[Finding]:
    """Judges REPA against plain SiT at the end of training, one claim for each measure."""
    declared = []
    for measure, (name, printed, column, _) in MEASURES.items():
        claim = f"REPA's loss gives SiT a better {name} at the end of training"
        paper = f"{printed} {SIT[column]:g} -> {PRINTED[1][column][0]:g} after 400K steps, {SCALE}"
        declared.append(judged(TABLE, claim, paper, *_pair(dataset, 1, measure, ("sit", "repa"))))
    return declared


def _sail(dataset: xr.Dataset, way: str, called: str) -> list[Finding]:
    """Judges SAIL, in one interpretation, against REPA, a claim for each printed pair of
    figures."""
    declared = []
    for measure, (name, printed, column, sign) in MEASURES.items():
        for share in PRINTED if measure in ("fd", "sfd") else (1,):
            before, after = PRINTED[share][column]
            better = sign * (after - before) > 0
            word = "better" if better else "worse"
            claim = f"{called} has a {word} {name} than REPA after {_share(share)}"
            paper = f"{printed} {before:g} -> {after:g} after {400 * share:g}K steps, {SCALE}"
            # Table 4 prints sFID 7.00 -> 7.02 with a sign that means decrease.
            if not better and share == 1 / 4:
                paper += ", which is printed as a decrease"
            if way not in dataset["way"]:
                declared.append(_missing(TABLE, claim, paper))
                continue
            ours, margins = _pair(dataset, share, measure, ("repa", way))
            declared.append(judged(TABLE, claim, paper, ours, margins if better else -margins))
    return declared


def _share(share: float) -> str:
    """Formats a fraction of the training."""
    words = {1 / 8: "an eighth of the training", 1 / 4: "a quarter of the training"}
    return {**words, 1 / 2: "half of the training", 1: "the whole training"}[share]


def _sooner(dataset: xr.Dataset, way: str, called: str) -> list[Finding]:
    """Judges whether SAIL needs fewer steps: by half of the training, and including alignment."""
    half = f"{called} is below REPA's last Fréchet distance after half of the training"
    counted = f"{called} saves steps to the lowest distance that it and REPA reach, those of "
    counted += "alignment counted"
    paper = f"FID 24.4 after 400K steps -> 19.8 after 200K, {SCALE}"
    uncounted = "steps of alignment are not stated"
    if way not in dataset["way"]:
        return [_missing(TABLE, half, paper), _missing(TABLE, counted, uncounted)]
    last = dataset["fd"].sel(way="repa").isel(step=-1)
    middle = dataset["fd"].sel(way=way, step=_at(dataset, 1 / 2))
    ours = f"{stated(last, sign=False)} -> {stated(middle, sign=False)}"
    saved = dataset["saved_repa"].sel(way=way)
    free = stated(saved + dataset["align_steps"].sel(way=way), 0)
    steps = f"{stated(saved, 0)} of {dataset.attrs['steps']} steps, {free} if they are not counted"
    return [
        judged(TABLE, half, paper, ours, (last - middle).values),
        judged("SAIL, Appendix J", counted, uncounted, steps, saved.values),
    ]


def summary(dataset: xr.Dataset) -> str:
    """Describes the final Fréchet distances and counts the verdicts.

    It returns two sentences: the final distances of all trainings and of the training images, and
    the number of claims with each verdict.
    """
    last = dataset.isel(step=-1)
    ends = ", ".join(
        f"{way} {stated(last['fd'].sel(way=way), sign=False)}"
        for way in dataset["way"].values.astype(str)
    )
    floor = stated(dataset["fd_real"], sign=False)
    verdicts = [finding.verdict for finding in corrected(findings(dataset))]
    counted = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
    steps, seeds = dataset.attrs["steps"], dataset.sizes["seed"]
    return (
        f"After {steps} steps the Fréchet distances to held-out images are {ends}. For the "
        f"training images it is {floor} (mean ± s.e. over {seeds} seeds). "
        f"Of {len(verdicts)} claims: {counted}."
    )
