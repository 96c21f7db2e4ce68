"""Verdicts on SAIL's claims about vision, from the stored dataset of `sail_vision`."""

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, judged, stated

NAMES = {"supervised": "supervised training", "byol": "BYOL"}
PRINTED = "curves of top-1 without figures, ResNet-18 and -34 on CIFAR-10 (Fig. 3)"
# Not other methods, but the ingredients of SAIL's start, or a variant of its sources.
OWN = ("scratch", "sail", "first", "second", "other")


def ways(dataset: xr.Dataset, paradigm: str) -> list[str]:
    """Lists the starts of one kind of training."""
    return dataset[f"{paradigm}_way"].values.astype(str).tolist()


def paradigms(dataset: xr.Dataset) -> list[str]:
    """Lists the kinds of training in a run."""
    return dataset.attrs["paradigms"].split()


def of(dataset: xr.Dataset, paradigm: str, name: str, way: str | None = None) -> xr.DataArray:
    """Selects a variable of one kind of training."""
    array = dataset[f"{paradigm}_{name}"].rename({f"{paradigm}_way": "way"})
    return array if way is None else array.sel(way=way)


def final(dataset: xr.Dataset, paradigm: str, way: str | None = None) -> xr.DataArray:
    """Selects the top-1 accuracy at the end of training."""
    return 100 * of(dataset, paradigm, "top1", way)[..., -1]


def along(dataset: xr.Dataset, paradigm: str, way: str) -> xr.DataArray:
    """Computes the top-1 accuracy averaged over training.

    Early accuracy has more weight. Steps before the training, such as learning maps, delay a
    start's curve.

    It returns the average in percent, [seed].
    """
    curve, steps = 100 * of(dataset, paradigm, "top1", way), dataset["step"].values
    delayed = steps + int(of(dataset, paradigm, "ahead", way))
    means = [np.interp(steps, delayed, row).mean() for row in curve.values]
    return xr.DataArray(means, dims="seed")


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Judges SAIL's claims about vision, each with labels and without.

    It returns the findings, "not tested" if a training is missing. Verdicts are not yet
    corrected for their number.
    """
    declared = [finding for p in NAMES for finding in _of_paradigm(dataset, p)]
    claim = "SAIL's start adds more to the final top-1 in supervised training than in BYOL"
    if len(paradigms(dataset)) < len(NAMES):
        return [*declared, _untested("4.5", claim)]
    gains = [final(dataset, p, "sail") - final(dataset, p, "scratch") for p in NAMES]
    ours = f"{stated(gains[0])} and {stated(gains[1])} points"
    return [*declared, judged("SAIL, 4.5", claim, PRINTED, ours, (gains[0] - gains[1]).values)]


def _of_paradigm(dataset: xr.Dataset, paradigm: str) -> list[Finding]:
    """Judges the claims about one kind of training."""
    name = NAMES[paradigm]
    claims = {
        "sooner": f"{name} from SAIL's start needs fewer steps to the lowest {_fallen(paradigm)} "
        "that training from scratch also reaches",
        "ahead": f"{name} from SAIL's start has a higher top-1 during training than from scratch",
        "higher": f"{name} from SAIL's start ends at a higher top-1 than from scratch",
        "faster": f"{name} from SAIL's start has a higher top-1 during training than from every "
        "other transformation and merge",
        "better": f"{name} from SAIL's start ends at a higher top-1 than from every other "
        "transformation and merge",
        "merged": f"{name} has a higher top-1 during training from the merge of both sources than "
        "from either alone",
    }
    if paradigm not in paradigms(dataset):
        return [_untested("4.5, Fig. 3", claim) for claim in claims.values()]
    where, trained = "SAIL, 4.5, Fig. 3", ways(dataset, paradigm)
    saved = of(dataset, paradigm, "saved", "sail")
    declared = [judged(where, claims["sooner"], PRINTED, _saved(dataset, paradigm), saved.values)]
    for key, measure in (("ahead", along), ("higher", final)):
        usual = measure(dataset, paradigm, "scratch")
        gain = measure(dataset, paradigm, "sail") - usual
        text = f"{stated(gain)} points, from {stated(usual, 1, sign=False)} % from scratch"
        declared.append(judged(where, claims[key], PRINTED, text, gain.values))
    others = [way for way in trained if way not in OWN]
    alone = [way for way in ("first", "second") if way in trained]
    for key, measure, rivals in (
        ("faster", along, others),
        ("better", final, others),
        ("merged", along, alone if len(alone) == 2 else []),
    ):
        if not rivals:
            declared.append(_untested("4.5, Fig. 3", claims[key]))
            continue
        ours = measure(dataset, paradigm, "sail")
        ahead = [ours - measure(dataset, paradigm, way) for way in rivals]
        # The start with the smallest mean lead of SAIL, so that every seed is compared with the
        # same one.
        least = int(np.argmin([float(margin.mean()) for margin in ahead]))
        text = f"{stated(ahead[least])} points above the best of them, {rivals[least]}"
        declared.append(judged(where, claims[key], PRINTED, text, ahead[least].values))
    return declared


def _untested(where: str, claim: str) -> Finding:
    """Creates the finding of a claim that the run does not test."""
    ours = "this preset lacks the training for it"
    return Finding(f"SAIL, {where}", claim, PRINTED, ours, "not tested")


def _fallen(paradigm: str) -> str:
    """Returns the quantity for `savings`: it decreases during training, and less is better."""
    return "held-out loss" if paradigm == "supervised" else "error of a linear probe"


def _saved(dataset: xr.Dataset, paradigm: str) -> str:
    """Describes the steps and the compute that SAIL's start saves."""
    saved = of(dataset, paradigm, "saved", "sail")
    scratch = of(dataset, paradigm, "scratch_steps", "sail")
    spent, before, earlier = (
        float(of(dataset, paradigm, name, "sail").mean())
        for name in ("compute", "scratch_compute", "sources_compute")
    )
    text = f"{stated(saved, 0)} steps saved of {stated(scratch, 0, sign=False)}"
    if before:
        share, with_sources = (100 * (1 - cost / before) for cost in (spent, spent + earlier))
        text += (
            f", {share:+.0f} % of the compute on average ({with_sources:+.0f} % with the sources')"
        )
    return text


def summary(dataset: xr.Dataset) -> str:
    """Ranks the starts of each kind of training by their final accuracy."""
    lines = []
    for paradigm in paradigms(dataset):
        end = final(dataset, paradigm)
        order = np.argsort(-end.mean("seed").values)
        names = ways(dataset, paradigm)
        listed = ", ".join(f"{names[i]} {stated(end[i], 1, sign=False)}" for i in order)
        kind = "" if paradigm == "supervised" else " of a linear probe"
        lines.append(
            f"Top-1{kind} in % after {dataset.attrs['steps']} steps of {NAMES[paradigm]} "
            f"({end.sizes['seed']} seeds, mean ± s.e.), by start: {listed}."
        )
    return "\n".join(lines)
