"""The figures of `overtraining_language`: lines are means over seeds, bars standard errors."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator

from experiments.lab.bands import legend
from experiments.lab.findings import mean_and_error
from experiments.studies.overtraining_language.findings import perturbed
from experiments.studies.shared.language_rates import (
    at_best,
    best_rate,
    count,
    keeping_loss,
    kept_rates,
    log2,
    tuned,
)
from sail_jax.drawing import style

BUDGET = "pre-training (tokens)"
FINE_TUNED = {
    "forgotten": "pre-training loss:\nincrease (nats)",
    "loss": "pre-training loss\nafterwards (nats)",
    "own": "the task's loss\nafterwards (nats)",
}


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws the paper's Figures 3 to 6 and 8 to 10 for this run, and its inflection points."""
    return {
        "perturbation": _perturbation(dataset),
        "fine_tuning": _fine_tuning(dataset),
        "tuned_rate": _tuned_rate(dataset),
        "inflection": _inflection(dataset),
        "distance": _distance(dataset),
        "hessian": _hessian(dataset),
    }


def _shades(count: int) -> list[Any]:
    """Lists colours from dark to light, for small to large sizes or rates, as in the paper."""
    return [colormaps[style.SEQUENTIAL](x) for x in np.linspace(0.0, 0.88, count)]


def _log(
    ax: Axes, which: str, values: np.ndarray | None = None, labels: Sequence[str] = ()
) -> None:
    """Makes an axis, "x" or "y", logarithmic and labels some of its values.

    At most 4 of the given values are labelled, including the last.
    """
    style.logarithmic(ax, which)
    if values is None:
        return
    axis = ax.xaxis if which == "x" else ax.yaxis
    stride = -(-len(values) // 4)  # rounded up
    at = slice((len(values) - 1) % stride, None, stride)
    axis.set_major_locator(FixedLocator([float(x) for x in values[at]]))
    axis.set_major_formatter(FixedFormatter(list(labels[at])))
    axis.set_minor_locator(FixedLocator([float(x) for x in values]))


def _tokens(ax: Axes, dataset: xr.Dataset, which: str = "x") -> None:
    """Makes the axis of budgets logarithmic and labels it in tokens."""
    budgets = dataset["budget"].values
    _log(ax, which, budgets, [count(b) for b in budgets])


def _sizes(ax: Axes, dataset: xr.Dataset, dim: str, which: str = "x") -> None:
    """Makes the axis of a dimension logarithmic and labels it with its values."""
    values = dataset[dim].values
    _log(ax, which, values, [f"{x:g}" for x in values])


def _curve(ax: Axes, values: xr.DataArray, dim: str, **look: Any) -> None:
    """Draws the mean over seeds and its standard error against `dim`."""
    mean, error = mean_and_error(values.transpose("seed", dim))
    ax.errorbar(values[dim].values, mean, error, **{"capsize": 2, "ms": 3, "lw": 1.3, **look})


def _legend(figure: Figure, lines: Iterable[Any], title: str) -> None:
    """Adds a legend on the right of the figure."""
    look = {"where": "right upper", "fontsize": style.points(8), "title_fontsize": style.points(8)}
    legend(figure, also=list(lines), title=title, **look)


def _lines(colors: Iterable[Any], labels: Iterable[str], **look: Any) -> list[Line2D]:
    """Makes the entries of a legend, one for each colour."""
    style_ = {"marker": "o", "ms": 3, **look}
    return [Line2D([], [], color=c, label=t, **style_) for c, t in zip(colors, labels, strict=True)]


def _heading(dataset: xr.Dataset) -> str:
    """Returns the size of the networks and the number of seeds, as text."""
    return f"{count(dataset.attrs['parameters'])} parameters, {dataset.sizes['seed']} seeds ± s.e."


def _perturbation(dataset: xr.Dataset) -> Figure:
    """Draws losses under noise (Figure 3), and below them two-layer linear networks' losses."""
    figure, ((left, right), (under, beside)) = style.figure(2, 2, width=4.0, height=3.0)
    sizes = dataset["noise"].values
    shades, loss = _shades(len(sizes)), perturbed(dataset)
    for size, color in zip(sizes, shades, strict=True):
        _curve(left, dataset["noise_increase"].sel(noise=size), "budget", color=color, fmt="o-")
        _curve(right, loss.sel(noise=size), "budget", color=color, fmt="o-")
    _curve(right, dataset["base"], "budget", color=style.INK, fmt="s--")
    left.set(ylabel="increase of the loss (nats)", title="progressive sensitivity (Fig. 3 left)")
    right.set(ylabel="loss under noise (nats)", title="the loss itself (Fig. 3 right)")
    theory = dataset["theory_noise_loss"]
    time = theory["theory_noise_time"].values
    rows = np.linspace(0, theory.sizes["theory_noise"] - 1, len(sizes) + 1).astype(int)
    for row, color in zip(rows, [style.INK, *shades], strict=True):
        curve = theory.isel(theory_noise=row)
        if row:
            under.plot(time, curve - theory.isel(theory_noise=0), color=color, lw=1.3)
        beside.plot(time, curve, color=color, lw=1.3, ls="-" if row else "--")
    under.set(ylabel="increase of the loss", title="two-layer linear networks (Prop. 4.3, exact)")
    beside.set(ylabel="loss under noise", title="the loss itself; its inflection moves left")
    for ax in (left, right):
        ax.set_xlabel(BUDGET)
        _tokens(ax, dataset)
    for ax in (under, beside):
        ax.set_xlabel("pre-training time")
        _log(ax, "x")
    _log(left, "y")
    _log(under, "y")
    gammas = theory["theory_noise"].values[rows[1:]]
    lines = _lines(shades, [f"{s:g} ({g:.2f})" for s, g in zip(sizes, gammas, strict=True)])
    lines += _lines([style.INK], ["none"], ls="--", marker="s")
    _legend(figure, lines, f"noise $λ$\n(below: $γ$)\n\n{_wrapped(_heading(dataset))}")
    return figure


def _wrapped(words: str) -> str:
    """Breaks a line at every comma."""
    return words.replace(", ", ",\n")


def _fine_tuning(dataset: xr.Dataset) -> Figure:
    """Draws losses after fine-tuning (Figures 4 and 5), also for two-layer linear networks."""
    names = dataset["task"].values
    columns = len(names) + 1
    figure, axes = style.figure(3, columns, width=2.7, height=2.3, sharex="col")
    rates = dataset["rate"].values
    shades = _shades(len(rates))
    forgotten = dataset["tuned_increase"].sel(scale=1.0, drop=True)
    rows = dict(zip(FINE_TUNED, (forgotten, tuned(dataset), dataset["tuned_test"]), strict=True))
    for column, name in enumerate(names):
        for ax, (row, values) in zip(axes[:, column], rows.items(), strict=True):
            for rate, color in zip(rates, shades, strict=True):
                measured = values.sel(task=name, rate=rate)
                _curve(ax, measured, "budget", color=color, fmt="o-")
            if row == "loss":
                ax.axhline(keeping_loss(dataset), color=style.FAINT, ls=":", lw=1)
                _curve(ax, dataset["base"], "budget", color=style.INK, fmt="s--")
            if row == "own":
                before = dataset["tuned_before"].sel(task=name).isel(rate=0)
                mean = mean_and_error(before.transpose("seed", "budget"))[0]
                # The loss before may be much larger: it gets at most as much space as the others.
                low, high = ax.get_ylim()
                ax.plot(dataset["budget"], mean, color=style.INK, ls="--", marker="s", ms=3, lw=1.3)
                ax.set_ylim(low, min(ax.get_ylim()[1], high + (high - low)))
            _tokens(ax, dataset)
            ax.set_ylabel(FINE_TUNED[row] if column == 0 else "")
            ax.set_title(str(name))
        axes[-1, column].set_xlabel(BUDGET)
    theory = dataset["theory_rate_loss"]
    time, base = theory["theory_rate_time"], theory.isel(theory_rate=0)
    at = np.linspace(0, theory.sizes["theory_rate"] - 1, len(rates) + 1).astype(int)
    for row, color in zip(at[1:], shades, strict=True):
        curve = theory.isel(theory_rate=row)
        axes[0, -1].plot(time, curve - base, color=color, lw=1.3)
        axes[1, -1].plot(time, curve, color=color, lw=1.3)
    axes[1, -1].plot(time, base, color=style.INK, ls="--", lw=1.3)
    axes[1, -1].set(xlabel="pre-training time")
    axes[1, -1].tick_params(labelbottom=True)
    figure.delaxes(axes[2, -1])
    for ax in axes[:2, -1]:
        _log(ax, "x")
        ax.set_title("two-layer linear networks")
    etas = theory["theory_rate"].values[at[1:]]
    labels = [f"{r:.2g} ({e:.2g})" for r, e in zip(rates, etas, strict=True)]
    lines = _lines(shades, labels) + _lines([style.INK], ["before"], ls="--", marker="s")
    bound = dataset.attrs.get("kept_perplexity")
    label = "token frequencies" if bound is None else f"perplexity {bound:g}"
    lines.append(Line2D([], [], color=style.FAINT, ls=":", label=label))
    title = f"fine-tuning rate\n(of the linear\nnetworks)\n\n{_wrapped(_heading(dataset))}"
    _legend(figure, lines, title)
    return figure


def _tuned_rate(dataset: xr.Dataset) -> Figure:
    """Draws losses at the tuned rate (Figure 6), and that rate (Figures 34 and 59)."""
    names = dataset["task"].values
    figure, axes = style.figure(3, len(names), width=2.9, height=2.3, sharex=True)
    best = best_rate(dataset)
    loss, own = (at_best(dataset, x) for x in (tuned(dataset), dataset["tuned_test"]))
    colors = style.PALETTE[:3]
    for column, name in enumerate(names):
        top, middle, low = axes[:, column]
        _curve(top, loss.sel(task=name), "budget", color=colors[0], fmt="o-")
        _curve(top, dataset["base"], "budget", color=style.INK, fmt="s--")
        _curve(middle, own.sel(task=name), "budget", color=colors[1], fmt="o-")
        centre, reach = _geometric(best.sel(task=name).transpose("seed", "budget"))
        look = {"fmt": "o-", "capsize": 2, "ms": 3, "lw": 1.3}
        low.errorbar(dataset["budget"], centre, reach, color=colors[2], **look)
        for seed in dataset["seed"].values:
            low.plot(dataset["budget"], best.sel(task=name, seed=seed), "_", color=style.FAINT)
        rates = dataset["rate"].values
        _sizes(low, dataset, "rate", "y")
        low.set(ylim=(rates[0] / 1.3, rates[-1] * 1.3), xlabel=BUDGET)
        for ax in axes[:, column]:
            _tokens(ax, dataset)
            ax.set_title(str(name))
    words = ("pre-training loss\nat the tuned rate", "the task's loss\nat the tuned rate")
    for ax, label in zip(axes[:, 0], (*words, "tuned rate"), strict=True):
        ax.set_ylabel(label)
    lines = _lines([style.INK, style.FAINT], ["before", "each seed"], ls="--", marker="s")
    lines[1].set(linestyle="", marker="_", markersize=6)
    _legend(figure, lines, _wrapped(_heading(dataset)))
    return figure


def _inflection(dataset: xr.Dataset) -> Figure:
    """Draws the budget with the smallest loss by the size of noise and by the rate of fine-tuning.

    Below is the corresponding time of two-layer linear networks.
    """
    figure, ((left, right), (under, beside)) = style.figure(2, 2, width=3.6, height=2.7)
    _budgets(left, perturbed(dataset), "noise", style.PALETTE[0], "o-")
    after = tuned(dataset)
    for k, name in enumerate(dataset["task"].values):
        _budgets(right, after.sel(task=name), "rate", style.PALETTE[k], "osD^v"[k % 5] + "-")
    last = float(dataset["budget"][-1])
    for ax, dim in ((left, "noise"), (right, "rate")):
        ax.axhline(last, color=style.FAINT, ls="--", lw=1)
        _sizes(ax, dataset, dim)
        _tokens(ax, dataset, "y")
        ax.set_ylim(0.8 * float(dataset["budget"][0]), 1.25 * last)
        ax.set_ylabel("budget of least loss (tokens)")
    left.set(xlabel="noise $λ$", title="Gaussian noise")
    right.set(xlabel="fine-tuning rate", title="fine-tuning")
    for ax, name, label in ((under, "noise", "noise $γ$"), (beside, "rate", "fine-tuning rate")):
        inflection = dataset[f"theory_{name}_inflection"]
        end = float(dataset[f"theory_{name}_time"][-1])
        ax.plot(
            inflection[f"theory_{name}"],
            inflection.where(inflection > 0),
            color=style.PALETTE[6],
            lw=1.5,
        )
        ax.axhline(end, color=style.FAINT, ls="--", lw=1)
        _log(ax, "y")
        ax.set(xlabel=label, ylabel="time of least loss")
    under.set_title("two-layer linear networks")
    beside.set_title("two-layer linear networks")
    names = [str(name) for name in dataset["task"].values]
    lines = [
        Line2D([], [], color=style.PALETTE[k], marker="osD^v"[k % 5], ms=3, label=name)
        for k, name in enumerate(names)
    ]
    lines.append(Line2D([], [], color=style.FAINT, ls="--", label="end of the range"))
    _legend(figure, lines, _wrapped(_heading(dataset)))
    return figure


def _budgets(ax: Axes, loss: xr.DataArray, dim: str, color: str, fmt: str) -> None:
    """Draws the budget of least loss against `dim`."""
    centre, reach = _geometric(loss.idxmin("budget").transpose("seed", dim))
    ax.errorbar(loss[dim], centre, reach, color=color, fmt=fmt, capsize=2, ms=4, lw=1.3)


def _geometric(values: xr.DataArray) -> tuple[np.ndarray, np.ndarray]:
    """Computes the geometric mean over seeds, and one standard error below and above it."""
    mean, error = mean_and_error(log2(values))
    return 2**mean, np.stack([2**mean - 2 ** (mean - error), 2 ** (mean + error) - 2**mean])


def _distance(dataset: xr.Dataset) -> Figure:
    """Draws the distance that fine-tuning moves the parameters, by its rate (Figure 8)."""
    names = dataset["task"].values
    figure, axes = style.figure(1, len(names), width=3.2, height=2.9, sharey=True)
    budgets = dataset["budget"].values
    shades = _shades(len(budgets))
    for ax, name in zip(axes[0], names, strict=True):
        for budget, color in zip(budgets, shades, strict=True):
            distances = dataset["tuned_distance"].sel(task=name, budget=budget)
            _curve(ax, distances, "rate", color=color, fmt="o-")
        mean = dataset["tuned_distance"].sel(task=name).mean(("budget", "seed")).values
        rates = dataset["rate"].values
        ax.plot(rates, mean[0] * rates / rates[0], color=style.INK, ls=":", lw=1.2)
        _sizes(ax, dataset, "rate")
        _log(ax, "y")
        ax.set(xlabel="fine-tuning rate", title=str(name))
    axes[0, 0].set_ylabel("distance moved (L2)")
    lines = _lines(shades, [count(b) for b in budgets])
    lines += _lines([style.INK], ["∝ rate"], ls=":", marker="")
    _legend(figure, lines, "tokens of\npre-training")
    return figure


def _tuned_to(task: str, rate: float, kept: bool) -> str:
    """Formats the title of a task's column in the figure of the Hessian."""
    return f"{task}, rate {rate:g} (Fig. 10)" + ("" if kept else "\nno rate retains the text")


def _hessian(dataset: xr.Dataset) -> Figure:
    """Draws the effects of noise and fine-tuning with the Hessian's predictions (Figures 9 and 10).

    It shows the last three budgets, and below them the ratio of the two.
    """
    latest = dataset.isel(budget=slice(-3, None))
    kept = kept_rates(dataset)
    top = kept.fillna(float(dataset["rate"][0]))
    kinds = (
        ("noise", "noise", "noise $λ$", latest, "Gaussian noise (Fig. 9)"),
        *(
            (
                "tuned",
                "scale",
                "share of the way",
                latest.sel(task=t, rate=top.sel(task=t)),
                _tuned_to(t, float(top.sel(task=t)), bool(kept.sel(task=t).notnull())),
            )
            for t in dataset["task"].values
        ),
    )
    figure, axes = style.figure(2, len(kinds), width=2.9, height=2.6)
    colors = [style.PALETTE[k] for k in (5, 0, 1)][-latest.sizes["budget"] :]
    for column, (name, dim, label, part, title) in enumerate(kinds):
        upper, lower = axes[:, column]
        for budget, color in zip(latest["budget"].values, colors, strict=True):
            at = part.sel(budget=budget)
            increase, predicted = (at[f"{name}_{k}"] for k in ("increase", "predicted"))
            _curve(upper, increase, dim, color=color, fmt="o-")
            _curve(upper, predicted, dim, color=color, fmt="--")
            ratio = increase.mean("seed") / predicted.mean("seed")
            lower.plot(at[dim], ratio, "o-", color=color, ms=3, lw=1.3)
        highest = float(part[f"{name}_increase"].mean("seed").max())
        lowest = min(0.0, float(part[f"{name}_increase"].mean("seed").min()))
        # The axis is chosen for the increases; predictions far above them are clipped.
        upper.set(ylim=(1.4 * lowest, 1.6 * highest), title=title)
        lower.axhline(1, color=style.INK, lw=0.8)
        lower.set(xlabel=label, ylim=(0, 3))
        # Shares of the path near 0 would be one point on an axis that is not logarithmic.
        if name == "noise" or part[dim].values[-1] > 20 * part[dim].values[0]:
            _sizes(upper, dataset, dim)
            _sizes(lower, dataset, dim)
    axes[0, 0].set_ylabel("increase of the\npre-training loss (nats)")
    axes[1, 0].set_ylabel("increase / prediction\n(ratio of means)")
    lines = _lines(colors, [count(b) for b in latest["budget"].values])
    lines += _lines([style.INK], ["Hessian"], ls="--", marker="")
    _legend(figure, lines, "tokens of\npre-training")
    return figure
