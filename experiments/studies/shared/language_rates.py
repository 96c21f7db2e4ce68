"""Chooses learning rates of fine-tuning, and selects the results at chosen rates.

`overtraining_language` and `overtraining_checkpoints` choose rates by the same rules.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xarray as xr


def tuned(dataset: xr.Dataset) -> xr.DataArray:
    """Computes the pre-training loss after fine-tuning.

    Args:
      dataset: A finished run.

    Returns:
      The loss in nats per token, [task, budget, seed, rate].
    """
    return dataset["base"] + dataset["tuned_increase"].sel(scale=1.0, drop=True)


def keeping_loss(dataset: xr.Dataset) -> float:
    """Computes the loss below which a network is considered to retain the pre-training text.

    Args:
      dataset: A finished run.

    Returns:
      The loss in nats per token: the logarithm of the run's perplexity for it
      (`Config.kept_perplexity`), or else the loss of predicting each token from its frequency.
    """
    stated_perplexity = dataset.attrs.get("kept_perplexity")
    return float(dataset["unigram"] if stated_perplexity is None else np.log(stated_perplexity))


def known_before(dataset: xr.Dataset) -> xr.DataArray:
    """Returns the budgets after which models retain the text before fine-tuning."""
    return dataset["base"].mean("seed") < keeping_loss(dataset)


def best_rate(dataset: xr.Dataset) -> xr.DataArray:
    """Finds the learning rate with the smallest validation loss.

    Args:
      dataset: A finished run.

    Returns:
      The rate, [task, budget, seed].
    """
    return dataset["tuned_validation"].idxmin("rate")


def kept_rates(dataset: xr.Dataset, after: xr.DataArray | None = None) -> xr.DataArray:
    """Finds the largest learning rate at which models still retain the pre-training text.

    They retain the text if their mean loss afterwards, over seeds, is below `keeping_loss` after
    every budget. Models that were not below it before are excluded, because no rate can preserve
    what they never learned. `left_out` lists them. The paper draws rates "where the maximum
    pre-training perplexity, over all token budgets, is less than 6", "where the model is still
    retaining pre-training capability" (App. C.1).

    Args:
      dataset: A finished run.
      after: The pre-training loss after fine-tuning, [task, budget, seed, rate]; None for `tuned`
        of the dataset.

    Returns:
      The rate of each task, [task]; NaN without such a rate.
    """
    after = tuned(dataset) if after is None else after
    worst = after.mean("seed").where(known_before(dataset)).max("budget")
    return dataset["rate"].where(worst < keeping_loss(dataset)).max("rate")


def left_out(dataset: xr.Dataset, names: Sequence[str]) -> str:
    """Lists the models that do not retain the text even before they are fine-tuned.

    Args:
      dataset: A finished run.
      names: The names of its budgets.

    Returns:
      A sentence; empty if all models retain the text.
    """
    lacking = [n for n, known in zip(names, known_before(dataset).values, strict=True) if not known]
    if not lacking:
        return ""
    return (
        f"Already before fine-tuning, the perplexity at {', '.join(lacking)} is not below "
        f"{np.exp(keeping_loss(dataset)):.3g}. These models do not count in the choice of rates."
    )


def rates_by_others(
    dataset: xr.Dataset, choose: Callable[[xr.Dataset], xr.DataArray] = kept_rates
) -> xr.DataArray:
    """Chooses a rate for each seed from all other seeds.

    No seed is therefore evaluated at a rate that was chosen on it.

    Args:
      dataset: A finished run of two or more seeds.
      choose: Computes the rate of each task from a run.

    Returns:
      The rate, [seed, task]; NaN if `choose` finds no rate.
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
      measure: Computes a measurement from the values at the rates; it keeps the dimension "seed".

    Returns:
      The measurements; NaN for the seeds without a rate.
    """
    found = rates.notnull()
    # Any rate can be used for a seed without a valid result.
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
    """Computes the logarithm to base 2.

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
      dim: Name of a dimension with a positive coordinate.

    Returns:
      The slopes, without that dimension; NaN for a single value.

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
    """Computes the cost of the last budget: its loss minus the loss at the best earlier budget.

    The best earlier budget of a seed is the one with the smallest mean loss over the other seeds,
    so that noise alone does not make the cost positive.

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


def chosen(rates: xr.DataArray) -> str:
    """Formats learning rates that were chosen for each seed on the others.

    Args:
      rates: The rates, [seed]; NaN if no rate retains the text.

    Returns:
      The smallest and the largest rate, or a note that there is none.
    """
    if not bool(rates.notnull().any()):
        return "no such rate"
    low, high = float(rates.min()), float(rates.max())
    spelt = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    some = "" if bool(rates.notnull().all()) else "; for some seeds there is none"
    return f"{spelt}, chosen for each seed on the others{some}"


def count(tokens: float) -> str:
    """Formats a number of tokens with two significant digits and a unit.

    Args:
      tokens: The number, >= 0.

    Returns:
      Text such as "4.2M". Numbers of 100 units or more are rounded to whole units.

    >>> count(131072), count(4194304), count(4e9)
    ('131k', '4.2M', '4B')
    """
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= unit:
            size = tokens / unit
            return f"{size:.2g}{name}" if size < 100 else f"{size:.0f}{name}"
    return f"{tokens:.0f}"
