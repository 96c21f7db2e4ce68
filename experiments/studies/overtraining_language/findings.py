"""Verdicts on the paper's claims about overtrained language models, from the dataset."""

from typing import Any

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, corrected, judged, mean_and_error, stated
from experiments.studies.shared.language_rates import (
    at_best,
    at_chosen,
    best_rate,
    chosen,
    count,
    kept_rates,
    last_costs,
    left_out,
    log2,
    rates_by_others,
    slope,
    tuned,
)

PAPER = "overtrained"
SCALE = "OLMo-30M, 4B to 128B tokens of C4; curves, no printed numbers"
# The difference of the exponent allowed by "approximately proportional".
NEAR = 0.1
# The ratio allowed by "independent".
SAME = 1.25


def perturbed(dataset: xr.Dataset) -> xr.DataArray:
    """Computes the pre-training loss under noise."""
    return dataset["base"] + dataset["noise_increase"]


def falls_with(loss: xr.DataArray, dim: str) -> xr.DataArray:
    """Computes how fast the budget with the smallest loss decreases as another quantity grows."""
    return -slope(log2(loss.idxmin("budget")), dim)


def _judged(where: str, claim: str, paper: str, ours: str, margins: xr.DataArray) -> Finding:
    """Judges the claim that the margins, one for each seed, are positive on average."""
    return judged(where, claim, paper, ours, margins.values)


def _spelt(values: xr.DataArray, unit: str, digits: int = 3) -> str:
    """Formats a mean with its standard error and a unit."""
    return f"{stated(values, digits)} {unit}"


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Judges the paper's claims on noise, fine-tuning and the Hessian.

    There is one margin for each seed. General claims on fine-tuning are averaged over tasks.
    """
    return [*_noise(dataset), *_fixed(dataset), *_tuned_rate(dataset), *_hessian(dataset)]


def _noise(dataset: xr.Dataset) -> list[Finding]:
    """Judges the claims on Gaussian noise."""
    small, large = (float(dataset["noise"][k]) for k in (0, -1))
    increase, loss = dataset["noise_increase"], perturbed(dataset)
    steepness = slope(increase) / increase.mean("budget")
    least = steepness.min("noise")
    step = increase.diff("budget").min("budget") / increase.mean("budget")
    low, high = (last_costs(loss.sel(noise=size)) for size in (small, large))
    falls = falls_with(loss, "noise")
    where = f"{PAPER}, Fig. 3"
    doubling = "of its mean per doubling of the budget"
    return [
        _judged(
            f"{where} left",
            "Noise of any fixed size raises the loss more, the longer pre-training was",
            f"at every size; {SCALE}",
            "at the size with the least growth, the increase grows by "
            f"{_spelt(100 * least, '%', 1)} "
            f"{doubling}",
            least,
        ),
        _judged(
            f"{where} left",
            "The increase grows from each budget to the next, at every size of noise",
            f"monotone; {SCALE}",
            f"the smallest step is {_spelt(100 * step.min('noise'), '% of the mean increase', 1)}",
            step.min("noise"),
        ),
        _judged(
            f"{where} right",
            f"Under large noise (lambda = {large:g}) the longest pre-training ends above the best "
            "budget before it",
            f"U-shapes; {SCALE}",
            f"loss at the last budget minus the least before: {_spelt(high, 'nats')}",
            high,
        ),
        _judged(
            f"{where} right; Prop. 4.3",
            f"Under small noise (lambda = {small:g}) more pre-training still helps: there is a "
            "threshold, as in two-layer networks",
            f"lowest curves fall throughout; {SCALE}",
            f"loss at the last budget minus the least before: {_spelt(low, 'nats')}",
            -low,
        ),
        _judged(
            f"{where} right; Sec. 3.3",
            "The inflection budget falls as the noise grows",
            f"'an inflection point at a lower token budget'; {SCALE}",
            f"by {_spelt(falls, 'doublings per doubling of lambda', 2)}",
            falls,
        ),
    ]


def _fixed(dataset: xr.Dataset) -> list[Finding]:
    """Judges the claims on fine-tuning at a fixed learning rate, and on the distance moved."""
    increase, loss = dataset["tuned_increase"].sel(scale=1.0, drop=True), tuned(dataset)
    distance, declared = log2(dataset["tuned_distance"]), []
    for task in dataset["task"].values:
        top = rates_by_others(dataset).sel(task=task)
        of = f"on {task} at the largest rate that retains the text ({chosen(top)})"
        last = f"{task}: loss at the last budget minus the least"
        here = lambda x: x.sel(task=task, drop=True)  # noqa: B023, E731
        grows = at_chosen(here(increase), top, slope)
        cost, own = (at_chosen(here(x), top, last_costs) for x in (loss, dataset["tuned_test"]))
        # Only rates that retain the text for every seed; NaN without such a rate.
        kept = here(loss).sel(rate=slice(None, float(top.fillna(float(dataset["rate"][0])).min())))
        falls = falls_with(kept, "rate").where(top.notnull().all())
        declared += [
            _judged(
                f"{PAPER}, Fig. 4",
                f"Fine-tuning {of} raises the pre-training loss more, the longer pre-training was",
                f"on GSM8k, Starcoder-Python and SIQA; {SCALE}",
                _spelt(grows, "nats per doubling of the budget"),
                grows,
            ),
            _judged(
                f"{PAPER}, Fig. 5 top",
                f"After fine-tuning {of}, the pre-training loss at the last budget exceeds the "
                "least before",
                f"U-shapes at large rates; {SCALE}",
                f"{last} before: {_spelt(cost, 'nats')}",
                cost,
            ),
            _judged(
                f"{PAPER}, Fig. 5 bottom",
                f"After fine-tuning {of}, the task's own loss at the last budget exceeds the least "
                "before",
                f"at sufficiently large rates; {SCALE}",
                f"{last} before: {_spelt(own, 'nats')}",
                own,
            ),
            _judged(
                f"{PAPER}, Sec. 3.4.1",
                f"The inflection budget of the pre-training loss falls as the rate on {task} grows",
                f"'at lower token budgets'; {SCALE}",
                f"by {_spelt(falls, 'doublings per doubling of the rate', 2)}",
                falls,
            ),
        ]
    power = slope(distance, "rate").mean(("task", "budget"))
    ratio = 2 ** (distance.isel(budget=-1) - distance.isel(budget=0)).mean(("task", "rate"))
    apart = abs(log2(ratio))
    where = f"{PAPER}, Fig. 8"
    return [
        *declared,
        _judged(
            where,
            f"The distance moved is nearly proportional to the rate: rate^p with |p - 1| < {NEAR}",
            f"'not exactly, but approximately'; {SCALE}",
            f"p = {stated(power, 2, sign=False)}",
            NEAR - abs(power - 1),
        ),
        _judged(
            where,
            f"The distance moved does not depend on the budget: less than a factor {SAME} "
            "between the first and the last",
            f"'independent of the amount of pre-training'; {SCALE}",
            f"after the longest pre-training {stated(ratio, 2, sign=False)} times that after the "
            "shortest",
            np.log2(SAME) - apart,
        ),
    ]


def _tuned_rate(dataset: xr.Dataset) -> list[Finding]:
    """Judges the claims on fine-tuning at the best learning rate for each budget."""
    declared = []
    rates, where = best_rate(dataset), f"{PAPER}, Fig. 6"
    loss, own = (at_best(dataset, x) for x in (tuned(dataset), dataset["tuned_test"]))
    for task in dataset["task"].values:
        falls = -slope(log2(rates.sel(task=task)))
        cost, itself = (last_costs(x.sel(task=task)) for x in (loss, own))
        declared += [
            _judged(
                f"{PAPER}, Figs. 34, 59; Sec. 3.4.2",
                f"The tuned rate on {task} falls with the budget",
                f"constant, falling slowly or quickly by task; {SCALE}",
                f"by {_spelt(falls, 'doublings per doubling of the budget', 2)}",
                falls,
            ),
            _judged(
                f"{where} top",
                f"At the tuned rate on {task}, the pre-training loss at the last budget exceeds "
                "the "
                "least before",
                f"on GSM8k, Starcoder-Python, MR and RTE; {SCALE}",
                _spelt(cost, "nats"),
                cost,
            ),
            _judged(
                f"{where} bottom",
                f"At the tuned rate on {task}, the task's own loss at the last budget exceeds the "
                "least before",
                f"on RTE and TREC, not on the others; {SCALE}",
                _spelt(itself, "nats"),
                itself,
            ),
        ]
    return declared


def _hessian(dataset: xr.Dataset) -> list[Finding]:
    """Judges the claims on the predictions of second derivatives.

    Ratios are ratios of means over budgets, because single increases may be near 0.
    """
    small, large = (float(dataset["noise"][k]) for k in (0, -1))
    near, rates = float(dataset["scale"][0]), rates_by_others(dataset)

    def ratio(name: str, at: dict[str, Any], top: xr.DataArray | None = None) -> xr.DataArray:
        mean: Any = lambda x: x.mean("budget")  # noqa: E731
        values = [dataset[f"{name}_{k}"].sel(at, drop=True) for k in ("increase", "predicted")]
        increase, predicted = (mean(x) if top is None else at_chosen(x, top, mean) for x in values)
        return increase / predicted

    # predicted = lambda^2 tr(H Sigma) / 2.
    trace = (2 * dataset["noise_predicted"].sel(noise=small) / small**2).transpose("budget", "seed")
    growth = trace.isel(budget=-1, drop=True) / trace.isel(budget=0, drop=True)
    times = lambda x: f"increase / prediction {stated(x, 2, sign=False)}"  # noqa: E731
    declared = [
        _judged(
            f"{PAPER}, App. D",
            "The curvature along the noise, tr(H Sigma), grows with pre-training",
            f"progressive sharpening; {SCALE}",
            f"{stated(growth, 1, sign=False)} times as large at the last budget as at the first",
            log2(growth),
        )
    ]
    noise = [ratio("noise", {"noise": size}) for size in (small, large)]
    kinds = [("Fig. 9", "noise", noise, (f"lambda = {small:g}", f"lambda = {large:g}"))]
    for task in dataset["task"].values:
        top = rates.sel(task=task)
        line = [ratio("tuned", {"task": task, "scale": s}, top) for s in (near, 1.0)]
        kind = f"fine-tuning on {task} at the largest rate that retains the text ({chosen(top)})"
        kinds.append(("Fig. 10", kind, line, (f"{near:g} of the way", "its end")))
    for figure, what, (low, high), of in kinds:
        declared += [
            _judged(
                f"{PAPER}, {figure} left",
                f"The Hessian predicts the increase under small {what} ({of[0]}) up to 10 %",
                "'well-approximated'; OLMo-30M, 32B to 128B tokens",
                times(low),
                0.1 - abs(low - 1),
            ),
            _judged(
                f"{PAPER}, {figure} right",
                f"Large {what} ({of[1]}) raises the loss by more than the Hessian predicts",
                "'substantially higher'; OLMo-30M, 32B to 128B tokens",
                times(high),
                high - 1,
            ),
        ]
    return declared


def summary(dataset: xr.Dataset) -> str:
    """Describes the base models and the effects of noise and fine-tuning on them."""
    budget = dataset["budget"].values
    first, last = (stated(dataset["base"].isel(budget=k), sign=False) for k in (0, -1))
    sizes = []
    for noise in dataset["noise"].values:
        mean = mean_and_error(perturbed(dataset).sel(noise=noise))[0]
        at = int(mean.argmin())
        sizes.append(f"{noise:g}: {count(budget[at])}")
    forgotten = dataset["tuned_increase"].sel(scale=1.0, drop=True)
    kept, rates = kept_rates(dataset), best_rate(dataset)
    tasks = []
    for task in dataset["task"].values:
        top = float(kept.sel(task=task))
        ends = ["no rate retains it"]
        if np.isfinite(top):
            at = forgotten.sel(task=task, rate=top)
            ends = [stated(at.isel(budget=k)) for k in (0, -1)]
        best = [float(np.exp(np.log(rates.sel(task=task).isel(budget=k)).mean())) for k in (0, -1)]
        tasks.append(f"{task} {' to '.join(ends)} (tuned rate {best[0]:.2g} to {best[1]:.2g})")
    lacking = left_out(dataset, [f"{count(b)} tokens" for b in budget])
    without = f"{lacking} " if lacking else ""
    verdicts = [finding.verdict for finding in corrected(findings(dataset))]
    counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("holds", "fails", "undecided"))
    return (
        f"From {count(budget[0])} to {count(budget[-1])} tokens of pre-training, the held-out "
        f"loss of {dataset.attrs['parameters']} parameters falls from {first} to {last} nats. "
        f"Best budget under noise of size lambda: {', '.join(sizes)}. Increase after fine-tuning "
        "at the largest rate that retains the text, first to last budget: "
        f"{'; '.join(tasks)}. {without}Claims: {counts}."
    )
