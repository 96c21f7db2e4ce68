"""The figures of `overtraining_checkpoints`: means over repetitions, bars of standard errors."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from experiments.lab.bands import legend
from experiments.lab.findings import mean_and_error
from experiments.studies.overtraining_checkpoints.findings import forgotten, increase, named
from experiments.studies.shared.language_rates import at_best, best_rate
from sail_jax.drawing import style


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws the effects of noise and fine-tuning on each checkpoint."""
    figures = {"noise": _noise(dataset), "fine_tuning": _fine_tuning(dataset)}
    return figures | ({"benchmarks": _benchmarks(dataset)} if "answers" in dataset else {})


def _shades(count: int) -> list[Any]:
    """Lists colours from dark to light, for small to large sizes or rates, as in the paper."""
    return [colormaps[style.SEQUENTIAL](x) for x in np.linspace(0.0, 0.88, count)]


def _checkpoints(ax: Axes, dataset: xr.Dataset) -> None:
    """Marks the checkpoints along x; a few have labels, including the last one."""
    values, labels = dataset["budget"].values, named(dataset)
    if dataset.attrs["unit"] == "tokens":
        ax.set_xscale("log")
        # Of labels closer than a quarter of the axis, one is sufficient.
        place, least = np.log(values), np.log(values[-1] / values[0]) / 4
    else:
        place, least = values, (values[-1] - values[0]) / 4
    kept = [len(values) - 1]
    for k in range(len(values) - 2, -1, -1):
        if place[kept[-1]] - place[k] >= least:
            kept.append(k)
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.xaxis.set_minor_locator(FixedLocator(list(values)))
    ax.set_xticks(values[kept], [labels[k] for k in kept])
    what = "tokens" if dataset.attrs["unit"] == "tokens" else "order of the checkpoints"
    ax.set_xlabel(f"pre-training ({what})")


def _curve(ax: Axes, values: xr.DataArray, **look: Any) -> None:
    """Draws the mean over repetitions by checkpoint, with its standard error."""
    mean, error = mean_and_error(values.transpose("seed", "budget"))
    look = {"capsize": 2, "ms": 3, "lw": 1.3, "fmt": "o-", **look}
    ax.errorbar(values["budget"].values, mean, error, **look)


def _perplexity(ax: Axes, values: xr.DataArray, **look: Any) -> None:
    """Draws a curve of perplexities, exp(loss)."""
    # The clip keeps the perplexity of a diverged network finite.
    _curve(ax, xr.apply_ufunc(np.exp, values.clip(max=80)), **look)


def _log_y(ax: Axes) -> None:
    """Makes y logarithmic, with plain numbers at its ticks."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(10, (1, 2, 5), numticks=8))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _noise(dataset: xr.Dataset) -> Figure:
    """Draws the perplexity under noise (Figure 65), and the increase of the loss (as in Figure
    3)."""
    figure, axes = style.figure(1, 2, width=4.0, height=3.2)
    left, right = axes[0]
    gammas = dataset["gamma"].values
    for gamma, color in zip(gammas, _shades(len(gammas)), strict=True):
        label = f"{gamma:g}"
        _curve(left, increase(dataset).sel(gamma=gamma), color=color)
        _perplexity(right, dataset["noisy"].sel(gamma=gamma), color=color, label=label)
    _perplexity(right, dataset["base"], color=style.INK, fmt="s--", label="none")
    left.set(ylabel="increase of the loss (nats)", title="progressive sensitivity")
    right.set(ylabel="perplexity", title="under noise (Fig. 65)")
    _log_y(right)
    for ax in (left, right):
        _checkpoints(ax, dataset)
    legend(figure, right, title="noise gamma", **_small())
    return figure


def _fine_tuning(dataset: xr.Dataset) -> Figure:
    """Draws for each task the increase of the pre-training loss, the perplexity and the task's
    loss.

    Each has a line for every learning rate. The last two also show the checkpoints before
    fine-tuning and at the tuned rate.
    """
    tasks, rates = dataset["task"].values, dataset["rate"].values
    figure, axes = style.figure(len(tasks), 3, width=3.7, height=3.1)
    best = best_rate(dataset)
    for row, task in zip(axes, tasks, strict=True):
        at = dataset.sel(task=task)
        for rate, color in zip(rates, _shades(len(rates)), strict=True):
            of = at.sel(rate=rate)
            _curve(row[0], forgotten(of), color=color, label=f"{rate:g}")
            _perplexity(row[1], of["tuned_base"], color=color)
            _curve(row[2], of["tuned_test"], color=color)
        _perplexity(row[1], dataset["base"], color=style.INK, fmt="s--", label="before")
        _curve(row[2], at["before"], color=style.INK, fmt="s--")
        tuned = {"color": style.PALETTE[1], "fmt": "D-", "lw": 1.8, "label": "tuned"}
        _perplexity(row[1], at_best(dataset, dataset["tuned_base"]).sel(task=task), **tuned)
        _curve(row[2], at_best(dataset, dataset["tuned_test"]).sel(task=task), **tuned)
        row[0].set(
            ylabel=f"{style.literal(task)}: increase of the loss\non pre-training text (nats)"
        )
        row[1].set(ylabel="perplexity afterwards")
        row[2].set(ylabel="the task's loss (nats)")
        _log_y(row[1])
        for ax in row:
            _checkpoints(ax, dataset)
    axes[0, 0].set_title("forgetting")
    axes[0, 1].set_title("pre-training text")
    chosen = sorted({float(rate) for rate in np.unique(best)})
    spelt = " to ".join(f"{rate:g}" for rate in dict.fromkeys((chosen[0], chosen[-1])))
    axes[0, 2].set_title(f"the task (tuned rates: {spelt})")
    legend(figure, *axes[0, :2], title="rate", **_small())
    return figure


def _benchmarks(dataset: xr.Dataset) -> Figure:
    """Draws the fraction of correct answers before and after tuned fine-tuning (Figure 2)."""
    names, tasks = dataset["benchmark"].values, dataset["task"].values
    figure, axes = style.figure(1, len(names), width=3.7, height=3.1)
    after = at_best(dataset, dataset["tuned_answers"])
    for ax, name in zip(axes[0], names, strict=True):
        x = dataset["budget"].values
        before = 100 * dataset["answers"].sel(benchmark=name)
        ax.plot(x, before, "s--", color=style.INK, ms=3, label="before")
        for task, color in zip(tasks, style.PALETTE, strict=False):
            values = 100 * after.sel(task=task, benchmark=name)
            _curve(ax, values, color=color, label=f"taught {style.literal(task)}")
        ax.set(title=style.literal(name), ylabel="right answers (%)")
        _checkpoints(ax, dataset)
    legend(figure, axes[0, 0], **_small())
    return figure


def _small() -> dict[str, Any]:
    """Returns the options of a legend beside the panels."""
    size = style.points(8)
    return {"where": "right upper", "fontsize": size, "title_fontsize": size}
