"""The paper's claims about overtrained language models, judged from the stored dataset alone."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, corrected, judged, mean_and_error, stated

PAPER = "overtrained"
SCALE = "OLMo-30M, 4B to 128B tokens of C4; curves, no printed numbers"
# What "approximately proportional" allows the exponent to be off.
NEAR = 0.1
# What "independent" allows as a ratio.
SAME = 1.25


def perturbed(dataset: xr.Dataset) -> xr.DataArray:
    """Computes the pre-training loss under noise.

    Args:
      dataset: A finished run.

    Returns:
      The loss in nats per token, [budget, seed, noise].
    """
    return dataset["base"] + dataset["noise_increase"]


def tuned(dataset: xr.Dataset) -> xr.DataArray:
    """Computes the pre-training loss after fine-tuning.

    Args:
      dataset: A finished run.

    Returns:
      The loss in nats per token, [task, budget, seed, rate].
    """
    return dataset["base"] + dataset["tuned_increase"].sel(scale=1.0, drop=True)


def best_rate(dataset: xr.Dataset) -> xr.DataArray:
    """Finds the learning rate with the least validation loss.

    Args:
      dataset: A finished run.

    Returns:
      The rate, [task, budget, seed].
    """
    return dataset["tuned_validation"].idxmin("rate")


def keeping_loss(dataset: xr.Dataset) -> float:
    """Computes the loss below which a network counts as retaining the pre-training text.

    Args:
      dataset: A finished run.

    Returns:
      The loss in nats per token: the logarithm of the perplexity that the run was given for it
      (`Config.kept_perplexity`), or else the loss of predicting each token by its frequency.
    """
    stated_perplexity = dataset.attrs.get("kept_perplexity")
    return float(dataset["unigram"] if stated_perplexity is None else np.log(stated_perplexity))


def known_before(dataset: xr.Dataset) -> xr.DataArray:
    """Says after which budgets models retain the text before they are fine-tuned.

    Args:
      dataset: A finished run.

    Returns:
      Whether the mean loss over seeds is below `keeping_loss`, [budget].
    """
    return dataset["base"].mean("seed") < keeping_loss(dataset)


def kept_rates(dataset: xr.Dataset, after: xr.DataArray | None = None) -> xr.DataArray:
    """Finds the largest learning rate at which models still retain the pre-training text.

    They do if their loss afterwards, in the mean over seeds, is below `keeping_loss` after every
    budget. Models that were not below it before are left out: no rate can keep what they never
    knew. `left_out` says which. The paper draws rates "where the maximum pre-training perplexity,
    over all token budgets, is less than 6", "where the model is still retaining pre-training
    capability" (App. C.1).

    Args:
      dataset: A finished run.
      after: The pre-training loss after fine-tuning, [task, budget, seed, rate]; None for `tuned`
        of the dataset.

    Returns:
      The rate of each task, [task]; NaN if none will do.
    """
    after = tuned(dataset) if after is None else after
    worst = after.mean("seed").where(known_before(dataset)).max("budget")
    return dataset["rate"].where(worst < keeping_loss(dataset)).max("rate")


def left_out(dataset: xr.Dataset, names: Sequence[str]) -> str:
    """Names the models that do not retain the text even before they are fine-tuned.

    Args:
      dataset: A finished run.
      names: What its budgets are called.

    Returns:
      A sentence; empty if there is no such model.
    """
    lacking = [n for n, known in zip(names, known_before(dataset).values, strict=True) if not known]
    if not lacking:
        return ""
    return (
        f"Before fine-tuning already the perplexity at {', '.join(lacking)} is not below "
        f"{np.exp(keeping_loss(dataset)):.3g}: these have no say in which rates keep the text."
    )


def rates_by_others(
    dataset: xr.Dataset, choose: Callable[[xr.Dataset], xr.DataArray] = kept_rates
) -> xr.DataArray:
    """Chooses a rate for each seed from all other seeds.

    So nothing is judged on the seeds that it was chosen by.

    Args:
      dataset: A finished run of two or more seeds.
      choose: Computes the rate of each task from a run.

    Returns:
      The rate, [seed, task]; NaN where `choose` finds none.
    """
    seeds = dataset["seed"].values
    return xr.concat([choose(dataset.sel(seed=seeds != s)) for s in seeds], dataset["seed"])


def at_chosen(
    values: xr.DataArray, rates: xr.DataArray, measure: Callable[[xr.DataArray], xr.DataArray]
) -> xr.DataArray:
    """Measures values at chosen learning rates, such as those of `rates_by_others`.

    Args:
      values: Values with the dimensions "rate" and "seed".
      rates: The rate of each seed, [seed]; NaN if none was found for it.
      measure: What is computed of the values at the rates; it keeps the dimension "seed".

    Returns:
      What `measure` gives; NaN for the seeds without a rate.
    """
    found = rates.notnull()
    # Any rate will do for a seed whose result is thrown away.
    at = values.sel(rate=rates.fillna(float(values["rate"][0]))).drop_vars("rate")
    return measure(at).where(found)


def at_best(dataset: xr.Dataset, values: xr.DataArray) -> xr.DataArray:
    """Selects values at the tuned learning rate.

    Args:
      dataset: A finished run.
      values: Values with a dimension "rate".

    Returns:
      The values at `best_rate`, without that dimension.
    """
    return values.sel(rate=best_rate(dataset)).drop_vars("rate")


def log2(values: xr.DataArray) -> xr.DataArray:
    """Computes the logarithm to the base 2.

    Args:
      values: Positive numbers.

    Returns:
      Their logarithms, with the same dimensions.
    """
    return xr.apply_ufunc(np.log2, values.astype(float))


def slope(values: xr.DataArray, dim: str = "budget") -> xr.DataArray:
    """Computes the least-squares slope per doubling of a coordinate.

    Args:
      values: Values along the dimension `dim`, and others.
      dim: Name of a dimension whose coordinate is positive.

    Returns:
      The slopes, without that dimension; NaN of a single value.

    >>> x = xr.DataArray([1.0, 3.0, 5.0], {"budget": [100, 200, 400]}, "budget")
    >>> float(slope(x))
    2.0
    """
    x = log2(values[dim]).drop_vars(dim)
    x = x - x.mean()
    values = values.drop_vars(dim)
    # Differences from the first value give a constant the slope 0 without rounding. The slope of a
    # single value is undefined.
    with np.errstate(invalid="ignore"):
        return (x * (values - values.isel({dim: 0}))).sum(dim) / (x**2).sum()


def last_costs(loss: xr.DataArray) -> xr.DataArray:
    """Computes what the last budget costs: its loss less that at the best earlier budget.

    The best earlier budget of a seed is the one with the least mean loss over the other seeds. So
    noise alone does not make the cost positive.

    Args:
      loss: Losses [budget, seed, ...], of two or more budgets and seeds.

    Returns:
      The costs, [seed, ...].
    """
    loss = loss.transpose("budget", "seed", ...)
    seeds = loss.sizes["seed"]
    cost = []
    for k in range(seeds):
        others = loss.isel(seed=[s for s in range(seeds) if s != k]).mean("seed")
        best = others.isel(budget=slice(None, -1)).argmin("budget")
        own = loss.isel(seed=k)
        cost.append(own.isel(budget=-1, drop=True) - own.isel(budget=best).drop_vars("budget"))
    together: Any = xr.concat(cost, "seed")
    return together


def falls_with(loss: xr.DataArray, dim: str) -> xr.DataArray:
    """Computes how fast the budget of least loss falls as another quantity grows.

    Args:
      loss: Losses with the dimensions "budget" and `dim`.
      dim: The quantity, such as "noise" or "rate".

    Returns:
      Halvings of the budget per doubling of the quantity, without the two dimensions.
    """
    return -slope(log2(loss.idxmin("budget")), dim)


def _judged(where: str, claim: str, paper: str, ours: str, margins: xr.DataArray) -> Finding:
    """Judges the claim that the margins, one for each seed, are positive in the mean."""
    return judged(where, claim, paper, ours, margins.values)


def _spelt(values: xr.DataArray, unit: str, digits: int = 3) -> str:
    """Formats a mean with its standard error and a unit."""
    return f"{stated(values, digits)} {unit}"


def chosen(rates: xr.DataArray) -> str:
    """Formats learning rates that were chosen for each seed by the others.

    Args:
      rates: The rates, [seed]; NaN where none keeps the text.

    Returns:
      The least and the largest of them, or that there is none.
    """
    if not bool(rates.notnull().any()):
        return "there is none"
    low, high = float(rates.min()), float(rates.max())
    spelt = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    some = "" if bool(rates.notnull().all()) else "; for some there is none"
    return f"{spelt}, for each seed as the others tell it{some}"


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Judges the paper's claims on noise, fine-tuning and the Hessian.

    There is one margin per seed. Claims on fine-tuning in general are averaged over tasks.

    Args:
      dataset: A finished run.

    Returns:
      The findings. Verdicts are not yet corrected for their number.
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
            "Noise of any fixed size raises the loss more the longer pre-training was",
            f"at every size; {SCALE}",
            f"at the size where it grows least the increase grows by {_spelt(100 * least, '%', 1)} "
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
            f"loss at the last budget less the least before {_spelt(high, 'nats')}",
            high,
        ),
        _judged(
            f"{where} right; Prop. 4.3",
            f"Under small noise (lambda = {small:g}) more pre-training still helps: there is a "
            "threshold, as in two-layer networks",
            f"lowest curves fall throughout; {SCALE}",
            f"loss at the last budget less the least before {_spelt(low, 'nats')}",
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
        of = f"on {task} at the largest rate that keeps the text ({chosen(top)})"
        last = f"{task}: loss at the last budget less the least"
        here = lambda x: x.sel(task=task, drop=True)  # noqa: B023, E731
        grows = at_chosen(here(increase), top, slope)
        cost, own = (at_chosen(here(x), top, last_costs) for x in (loss, dataset["tuned_test"]))
        # Among rates that keep the text by every seed's account; NaN if one finds none.
        kept = here(loss).sel(rate=slice(None, float(top.fillna(float(dataset["rate"][0])).min())))
        falls = falls_with(kept, "rate").where(top.notnull().all())
        declared += [
            _judged(
                f"{PAPER}, Fig. 4",
                f"Fine-tuning {of} raises the pre-training loss more the longer pre-training was",
                f"on GSM8k, Starcoder-Python and SIQA; {SCALE}",
                _spelt(grows, "nats per doubling of the budget"),
                grows,
            ),
            _judged(
                f"{PAPER}, Fig. 5 top",
                f"After fine-tuning {of} the pre-training loss at the last budget exceeds the "
                "least before",
                f"U-shapes at large rates; {SCALE}",
                f"{last} before {_spelt(cost, 'nats')}",
                cost,
            ),
            _judged(
                f"{PAPER}, Fig. 5 bottom",
                f"After fine-tuning {of} the task's own loss at the last budget exceeds the least "
                "before",
                f"at sufficiently large rates; {SCALE}",
                f"{last} before {_spelt(own, 'nats')}",
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
    """Judges the claims on fine-tuning at the learning rate that is best for each budget."""
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
                f"At the tuned rate on {task} the pre-training loss at the last budget exceeds the "
                "least before",
                f"on GSM8k, Starcoder-Python, MR and RTE; {SCALE}",
                _spelt(cost, "nats"),
                cost,
            ),
            _judged(
                f"{where} bottom",
                f"At the tuned rate on {task} the task's own loss at the last budget exceeds the "
                "least before",
                f"on RTE and TREC, not on the others; {SCALE}",
                _spelt(itself, "nats"),
                itself,
            ),
        ]
    return declared


def _hessian(dataset: xr.Dataset) -> list[Finding]:
    """Judges the claims on what second derivatives predict.

    Ratios are of means over budgets, because single increases may be near 0.
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
            "The curvature that noise meets, tr(H Sigma), grows with pre-training",
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
        kind = f"fine-tuning on {task} at the largest rate that keeps the text ({chosen(top)})"
        kinds.append(("Fig. 10", kind, line, (f"{near:g} of the way", "its end")))
    for figure, what, (low, high), of in kinds:
        declared += [
            _judged(
                f"{PAPER}, {figure} left",
                f"The Hessian tells the increase under small {what} ({of[0]}) up to 10 %",
                "'well-approximated'; OLMo-30M, 32B to 128B tokens",
                times(low),
                0.1 - abs(low - 1),
            ),
            _judged(
                f"{PAPER}, {figure} right",
                f"Large {what} ({of[1]}) raises the loss by more than the Hessian tells",
                "'substantially higher'; OLMo-30M, 32B to 128B tokens",
                times(high),
                high - 1,
            ),
        ]
    return declared


def summary(dataset: xr.Dataset) -> str:
    """Describes the base models and what noise and fine-tuning do to them.

    Args:
      dataset: A finished run.

    Returns:
      A few sentences, the last one with the number of verdicts of each kind.
    """
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
        ends = ["none keeps it"]
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
        f"From {count(budget[0])} to {count(budget[-1])} tokens of pre-training the held-out "
        f"loss of {dataset.attrs['parameters']} parameters falls from {first} to {last} nats. "
        f"Best budget under noise of size lambda: {', '.join(sizes)}. Increase after fine-tuning "
        "at the largest rate that keeps the text, first to last budget: "
        f"{'; '.join(tasks)}. {without}Claims: {counts}."
    )


def count(tokens: float) -> str:
    """Formats a number of tokens with two significant digits and a unit.

    Args:
      tokens: The number, >= 0.

    Returns:
      Text such as "4.2M". From 100 of a unit on it is rounded to whole ones.

    >>> count(131072), count(4194304), count(4e9)
    ('131k', '4.2M', '4B')
    """
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= unit:
            size = tokens / unit
            return f"{size:.2g}{name}" if size < 100 else f"{size:.0f}{name}"
    return f"{tokens:.0f}"
