"""Verdicts on the paper's claims about checkpoints of one training, from the dataset."""

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
)

PAPER = "overtrained"
SCALE = "OLMo-1B, 0.04T to 3.1T tokens; curves, no printed numbers"


def increase(dataset: xr.Dataset) -> xr.DataArray:
    """Computes the increase of the pre-training loss under noise."""
    return dataset["noisy"] - dataset["base"]


def forgotten(dataset: xr.Dataset) -> xr.DataArray:
    """Computes the increase of the pre-training loss by fine-tuning."""
    return dataset["tuned_base"] - dataset["base"]


def named(dataset: xr.Dataset) -> list[str]:
    """Returns names of the checkpoints, by their tokens or by their order."""
    values = dataset["budget"].values
    return [f"{v:g}" if dataset.attrs["unit"] == "order" else count(v) for v in values]


def _steps(dataset: xr.Dataset) -> str:
    """Returns the unit of slopes: a doubling of the tokens, or of the number in the series."""
    return "doubling of the tokens" if dataset.attrs["unit"] == "tokens" else "doubling in order"


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Judges the paper's claims on noise, and on fine-tuning for each task.

    There is one margin per repetition.

    Returns the findings. Verdicts are not yet corrected for their number.
    """
    declared = [*_noise(dataset)]
    for task in dataset["task"].values:
        declared += _tuned(dataset.sel(task=[task]), str(task))
    return declared


def _noise(dataset: xr.Dataset) -> list[Finding]:
    """Judges the claims on the checkpoints themselves, and under noise."""
    base, more, by = dataset["base"], increase(dataset), _steps(dataset)
    small, large = (float(dataset["gamma"][k]) for k in (0, -1))
    falls = -base.diff("budget").max("budget")
    grows = (slope(more) / abs(more).mean("budget")).min("gamma")
    high, low = (last_costs(dataset["noisy"].sel(gamma=g)) for g in (large, small))
    return [
        judged(
            f"{PAPER}, Sec. 2.2",
            "The base model improves from each checkpoint to the next",
            f"'a monotonic improvement'; {SCALE}",
            f"the smallest fall is {stated(falls, 3)} nats",
            falls.values,
        ),
        judged(
            f"{PAPER}, Figs. 3 left, 65",
            "Noise of any fixed size raises the loss more, the longer pre-training was",
            f"at every size; {SCALE}",
            f"at the size with the least growth, by {stated(100 * grows, 1)} % of its mean per "
            f"{by}",
            grows.values,
        ),
        judged(
            f"{PAPER}, Fig. 65",
            f"Under large noise (gamma = {large:g}) the last checkpoint is worse than the best "
            "before",
            f"U-shapes; {SCALE}",
            f"loss at the last minus the least before: {stated(high, 3)} nats",
            high.values,
        ),
        judged(
            f"{PAPER}, Fig. 65",
            f"Under small noise (gamma = {small:g}) more pre-training still helps",
            f"lowest curves fall throughout; {SCALE}",
            f"loss at the last minus the least before: {stated(low, 3)} nats",
            -low.values,
        ),
    ]


def _tuned(dataset: xr.Dataset, task: str) -> list[Finding]:
    """Judges the claims on one task; the dataset's dimension "task" has one entry."""
    one = dataset.isel(task=0, drop=True)
    choose = lambda d: kept_rates(d, d["tuned_base"])  # noqa: E731
    top, by = rates_by_others(dataset, choose).isel(task=0, drop=True), _steps(dataset)
    grows = at_chosen(forgotten(one), top, slope)
    best = best_rate(dataset).isel(task=0, drop=True)
    # The tuned rate is chosen on validation examples and evaluated on others.
    lost, own = (
        last_costs(at_best(dataset, dataset[name]).isel(task=0, drop=True))
        for name in ("tuned_base", "tuned_test")
    )
    falls = -slope(log2(best))
    declared = [
        judged(
            f"{PAPER}, Sec. 2.2; Figs. 4, 12",
            f"Teaching {task} at the largest rate that preserves the text ({chosen(top)}) makes a "
            "model forget more, the longer pre-training was",
            f"at sufficiently large rates; {SCALE}",
            f"the increase of the loss on pre-training text grows by {stated(grows, 3)} nats "
            f"per {by}",
            grows.values,
        ),
        judged(
            f"{PAPER}, Sec. 2.2; Fig. 2 (OOD)",
            f"At the tuned rate on {task}, the loss on pre-training text at the last checkpoint "
            "exceeds the least before",
            f"of benchmarks, beyond 2.5T tokens; {SCALE}",
            f"{stated(lost, 3)} nats",
            lost.values,
        ),
        judged(
            f"{PAPER}, Sec. 2.2; Fig. 2 (ID)",
            f"At the tuned rate, the loss on {task} itself at the last checkpoint exceeds the "
            "least "
            "before",
            f"up to 3 % fewer wins in AlpacaEval, beyond 2.3T tokens; {SCALE}",
            f"{stated(own, 3)} nats",
            own.values,
        ),
        judged(
            f"{PAPER}, Sec. 3.4.2",
            f"The tuned rate on {task} falls with pre-training",
            f"constant, falling slowly or quickly by task; {SCALE}",
            f"by {stated(falls, 2)} doublings per {by}",
            falls.values,
        ),
    ]
    if "answers" in dataset:
        after = at_best(dataset, dataset["tuned_answers"]).isel(task=0, drop=True)
        worse = last_costs(-after.mean("benchmark"))
        declared.append(
            judged(
                f"{PAPER}, Fig. 2 (OOD)",
                f"At the tuned rate on {task}, answers to benchmarks are worse at the last "
                "checkpoint than at the best before",
                f"about 2 % on ARC, PIQA and HellaSwag; {SCALE}",
                f"by {stated(100 * worse, 1)} % of the questions",
                worse.values,
            )
        )
    return declared


def table(dataset: xr.Dataset) -> list[tuple[str, ...]]:
    """Makes a table with a row for each checkpoint.

    Its columns are perplexities on held-out text (unchanged, under noise, and after fine-tuning at
    the tuned rate), the tasks' losses in nats per token, and the tuned rates.

    Returns rows of text, the header first. Tuned rates are geometric means over repetitions.
    """
    gammas = dataset["gamma"].values
    header = [dataset.attrs["unit"], "perplexity", *(f"at gamma = {g:g}" for g in gammas)]
    tasks = [str(t) for t in dataset["task"].values]
    for task in tasks:
        header += [f"taught {task}: perplexity", f"{task}: loss before", "after", "tuned rate"]
    rows = [tuple(header)]
    best = best_rate(dataset)
    base, own = (at_best(dataset, dataset[f"tuned_{k}"]) for k in ("base", "test"))
    for k, name in enumerate(named(dataset)):
        at = dataset.isel(budget=k)
        row = [name, _perplexity(at["base"])]
        row += [_perplexity(at["noisy"].sel(gamma=g)) for g in gammas]
        for i in range(len(tasks)):
            of = {"task": i, "budget": k}
            rate = float(np.exp(np.log(best.isel(of)).mean()))
            row += [_perplexity(base.isel(of)), stated(at["before"].isel(task=i), 3, sign=False)]
            row += [stated(own.isel(of), 3, sign=False), f"{rate:.2g}"]
        rows.append(tuple(row))
    return rows


def _perplexity(loss: xr.DataArray) -> str:
    """Formats the perplexity of a mean loss over repetitions, with its standard error.

    The error is that of the loss times the perplexity, its derivative.
    """
    mean, error = (float(x) for x in mean_and_error(loss))
    # exp(710) is beyond the largest float
    value = float(np.exp(min(mean, 700.0)))
    return f"{value:.4g} ± {value * error:.2g}"


def summary(dataset: xr.Dataset) -> str:
    """Describes the checkpoints and how noise and fine-tuning change them."""
    names, rank = named(dataset), dataset.attrs["rank"]
    ends = [_perplexity(dataset["base"].isel(budget=k)) for k in (0, -1)]
    how = f"adapters of rank {rank}" if rank else "all weights"
    of = "tokens" if dataset.attrs["unit"] == "tokens" else "in order"
    lines = [
        (
            f"{len(names)} checkpoints of {count(dataset.attrs['parameters'])} parameters, "
            f"{names[0]} to {names[-1]} {of}: perplexity {ends[0]} to {ends[1]}, means ± standard "
            f"errors over {dataset.sizes['seed']} repetitions."
        )
    ]
    sizes = []
    for gamma in dataset["gamma"].values:
        least = int(mean_and_error(dataset["noisy"].sel(gamma=gamma))[0].argmin())
        sizes.append(f"{gamma:g}: {names[least]}")
    lines.append(f"The checkpoint with the least perplexity by size of noise: {', '.join(sizes)}.")
    if words := left_out(dataset, names):
        lines.append(words)
    for task in dataset["task"].values:
        of_task = at_best(dataset, dataset["tuned_base"]).sel(task=task)
        least = int(mean_and_error(of_task)[0].argmin())
        own = at_best(dataset, dataset["tuned_test"]).sel(task=task)
        first = int(mean_and_error(own)[0].argmin())
        lines.append(
            f"Taught {task} ({how}) at the tuned rate, the checkpoint at {names[least]} has the "
            f"least loss on pre-training text, and the one at {names[first]} on the task."
        )
    claims = corrected(findings(dataset))
    held = sum(f.verdict == "holds" for f in claims)
    failed = sum(f.verdict == "fails" for f in claims)
    lines.append(
        f"Of {len(claims)} claims, {held} hold here, {failed} fail, and others are undecided."
    )
    return "\n".join(lines)
