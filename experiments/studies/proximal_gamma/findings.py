"""Tests the claims of SAIL's Sec. 4.4 on a finished run of `proximal_gamma`, and summarises it."""

import xarray as xr

from experiments.lab.findings import Finding, judged, stated
from experiments.studies.proximal_gamma.training import LABELS
from experiments.studies.shared import gamma_sweep as line


def summary(dataset: xr.Dataset) -> str:
    """Describes the best gamma, the distances that predict it, and the effect of overlap.

    Returns a paragraph: the best gammas, the predicted ones with the loss that they cost, the best
    gamma by overlap, and the result of the formula printed in Sec. 4.4.
    """
    looks, starts = dataset["look"].values, dataset["start"].values.astype(str)
    last, cases = looks[-1], {f"{s} start": dataset.sel(start=s) for s in starts}
    when = ", ".join(map(str, looks))
    best = line.by_case(cases, looks, lambda case, n: line.stated_best(case.sel(look=n)))
    sharp = [(case, n) for case in cases.values() for n in looks if line.is_known(case.sel(look=n))]
    told = []
    for way in dataset["way"].values.astype(str):
        of_way = dataset.sel(way=way, look=last)
        shown = starts if way == "parameters" else starts[:1]
        weight = " and ".join(stated(of_way["predicted"].sel(start=s)) for s in shown)
        cost = " and ".join(stated(of_way["excess"].sel(start=s), 3) for s in starts)
        told.append(f"{LABELS[way]} {weight} (meets {line.met(sharp, way)}, costs {cost})")
    plain = ", ".join(
        f"{end:g} "
        + " and ".join(
            stated(case["end_excess"].sel(look=last, end=end), 3) for case in cases.values()
        )
        for end in line.ENDS
    )
    mmd = dataset["overlap_predicted"].sel(distance="mmd")
    by_overlap = "; ".join(
        f"alpha {a:g}, beta {b:g}: {stated(dataset['overlap_best'].sel(alpha=a, beta=b))}"
        f" (MMD of unigrams: {stated(mmd.sel(alpha=a, beta=b))})"
        for a in dataset["alpha"].values
        for b in dataset["beta"].values
    )
    means = dataset["predicted"].sel(way="mmd_mean")[0]
    return (
        f"Best gamma (weight of theta_1; mean ± s.e. over {dataset.sizes['seed']} seeds) after "
        f"{when} steps: {best}. Predicted by eq. 11: {'; '.join(told)}. The brackets have two "
        f"numbers. The first counts the cases within {line.DECIDED:g} s.e. of the best gamma, "
        "among "
        f"the cases where it is known to ± {line.SHARP:g}. The second is the loss after {last} "
        "steps "
        f"above the lowest, with {' and '.join(starts)} initial weights. "
        f"Without prediction, gamma = {plain}. By overlap, "
        f"after {dataset.attrs['overlap_steps']} steps, best (and predicted): "
        f"{by_overlap}. The formula printed in Sec. 4.4 is the weight of theta_2: with MMD of "
        "block means it is "
        f"{stated(1 - means)} here. Eq. 11, the weight of theta_1, is {stated(means)}. "
        f"The published {line.PUBLISHED} supports eq. 11: the printed formula "
        f"would have given {1 - line.PUBLISHED:+.4f}."
    )


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Tests the claims of Sec. 4.4 and Fig. 2.

    They are tested for the first kind of start, after the largest number of steps.

    Returns four findings: the sign of the best gamma, the sign of the predicted one, and whether
    training from the line is better in the end than training from the mean of the models and from
    scratch.
    """
    at = dataset.isel(start=0, look=-1)
    told, means = int(dataset["look"][-1]), at["predicted"].sel(way="mmd_mean")
    rank = dataset.attrs.get("text", "the source of Python's standard library")
    lead = line.lead(at["loss"], at["scratch_loss"])
    excess, ends = at["excess"].sel(way="mmd_mean"), at["end_excess"]
    return [
        judged(
            "SAIL, Sec. 4.4",
            "the best gamma lies outside [0, 1], below 0",
            f"gamma* = {line.PUBLISHED} (GPT-2's tokens)",
            f"{stated(at['best'])} after {told} steps ({rank})",
            -at["best"].values,
        ),
        judged(
            "SAIL, Sec. 4.4 and eq. 11",
            "eq. 11 on the MMD of block means gives a gamma below 0",
            f"{line.PUBLISHED}",
            stated(means),
            -means.values,
        ),
        judged(
            "SAIL, Fig. 2",
            "training from the predicted gamma is better than from the mean of the models",
            "loss 10.8866 to 4.9782, compared with an untrained network",
            f"above the lowest loss by {stated(excess, 3)}, the mean by "
            f"{stated(ends.sel(end=0.5), 3)} nats",
            (ends.sel(end=0.5) - excess).values,
        ),
        judged(
            "SAIL, Fig. 2",
            "the best start on the line (chosen on the other seeds) reaches a lower loss than "
            "training from scratch",
            "loss 10.8866 to 4.9782, compared with an untrained network",
            f"lower by {stated(lead, 3)} nats after {told} steps",
            lead.values,
        ),
    ]
