"""The figures of `overtraining_linear`."""

import numpy as np
import xarray as xr
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.lab.bands import legend
from experiments.studies.overtraining_linear.findings import COSTS, best_times
from sail_jax.drawing import style


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws the figure of the run's diagram.

    Most figures show the theory, the simulation, and rows of both in one plot. The figures of
    `trade_off` are the panels of the paper's Figure 7.
    """
    name = dataset.attrs["diagram"]
    draw = {"trade_off": _trade_off, "sensitivity": _sensitivity}.get(name, _diagram)
    return {name: draw(dataset)}


def _diagram(dataset: xr.Dataset) -> Figure:
    """Draws a map of the closed form, one of trained networks, and rows of both.

    Theory's line is dashed on both maps; the networks' line is solid, on their map. Bars are one
    standard error over networks.
    """
    cost = dataset.attrs["diagram"] == "misalignment"
    label = "cost of the last pre-training, of $|A|^2$" if cost else "pre-training loss afterwards"
    figure, (left, right, below) = style.panels(3, 2, wide=True, width=4.8, height=3.7)
    top = float(max(dataset.loss_theory.max(), dataset.loss_mean.max()))
    # Losses range over decades, costs start at 0.
    scale = (
        {"vmin": 0, "vmax": top}
        if cost
        else {"norm": LogNorm(max(1e-3 * top, float(dataset.loss_theory.min()), 1e-9), top)}
    )
    maps = (
        (left, dataset.x, dataset.row, dataset.loss_theory, "closed form", None),
        (right, dataset.cell_x, dataset.cell_row, dataset.loss_mean, _networks(dataset), label),
    )
    for ax, x, y, values, title, bar in maps:
        drawn = {"x": x.values, "y": y.values, "also": dataset.loss_theory.values}
        style.heatmap(ax, values.values, label=bar, **drawn, **scale)
        if cost:
            _contour(ax, dataset.x, dataset.row, dataset.loss_theory, "dashed")
        else:
            ax.plot(dataset.inflection, dataset.row, color="white", lw=1.8, ls="--")
        ax.set(
            xlabel=dataset.x.attrs["long_name"],
            ylabel=dataset.row.attrs["long_name"],
            title=title,
            xlim=(x.values[0], x.values[-1]),
            ylim=(y.values[0], y.values[-1]),
        )
    if cost:
        _contour(right, dataset.cell_x, dataset.cell_row, dataset.loss_mean, "solid")
    else:
        best, low, high = best_times(dataset)
        bars = (best - low, high - best)
        right.errorbar(best, dataset.cell_row, xerr=bars, fmt="o-", ms=4, lw=1.4, color="white")
    _legend(figure, "from here on it costs" if cost else "best time; after it, more hurts", cost)
    for i, row in enumerate(dataset.cell_row.values):
        color = style.PALETTE[i % len(style.PALETTE)]
        curve = dataset.loss_theory.interp(row=row)
        below.plot(dataset.x, curve, color=color, label=f"{row:.3g}")
        at = dataset.sel(cell_row=row)
        bars = at.loss_std / np.sqrt(dataset.attrs["seeds"])
        below.errorbar(dataset.cell_x, at.loss_mean, bars, fmt="o", ms=3.5, lw=1, color=color)
    below.set(
        xlabel=dataset.x.attrs["long_name"],
        ylabel=label,
        title="lines: theory; dots: networks ± 1 s.e., shared by the lines",
        ylim=(0, None),
    )
    if not cost:
        for ax in (left, right, below):
            style.logarithmic(ax, "x")
    below.legend(
        title=dataset.row.attrs["long_name"],
        frameon=False,
        fontsize=style.points(8),
        ncols=2,
        loc="best",
    )
    return figure


def _contour(ax, x, y, values, style: str) -> None:
    """Draws where the last of pre-training begins to cost something."""
    ax.contour(x, y, values, [COSTS], colors="white", linewidths=1.6, linestyles=style)


def _legend(figure: Figure, line: str, cost: bool) -> None:
    """Explains which white line is theory's and which is measured."""
    bars = "" if cost else " (bars: to times with a loss more than 1 s.e. above the least)"
    look = {"color": "white", "lw": 1.6}
    legend = figure.legend(
        [Line2D([], [], ls="--", **look), Line2D([], [], marker="" if cost else "o", **look)],
        [f"{line}: closed form", f"{line}: networks{bars}"],
        loc="outside lower left",
        fontsize=style.points(9),
        facecolor="#8C8C8C",
        labelcolor="white",
    )
    legend.get_frame().set_linewidth(0)


def _networks(dataset: xr.Dataset) -> str:
    """Returns the training method of the networks and their number, as text."""
    return f"SGD, {dataset.attrs['seeds']} networks"


def _trade_off(dataset: xr.Dataset) -> Figure:
    """Draws the losses on both tasks for each schedule of the learning rate, as in Figure 7.

    Dashed lines are fixed learning rates: the final rates of the schedules.
    """
    figure, axes = style.figure(1, 3, width=4.6, height=3.9, sharey=True)
    bars = np.sqrt(dataset.attrs["seeds"])
    for i, (ax, power) in enumerate(zip(axes.flat, dataset.row.values, strict=True)):
        at, cells = dataset.isel(row=i), dataset.isel(cell_row=i)
        for kind, name, color in (
            ("tuned", "fine-tuning task (ID)", style.PALETTE[0]),
            ("loss", "pre-training task (OOD)", style.PALETTE[1]),
        ):
            ax.plot(dataset.x, at[f"{kind}_theory"], color=color, label=name)
            ax.errorbar(
                dataset.cell_x,
                cells[f"{kind}_mean"],
                cells[f"{kind}_std"] / bars,
                fmt="o",
                ms=3.5,
                lw=1,
                color=color,
            )
            fixed = dataset.fixed.isel(kind=0 if kind == "loss" else 1)
            for curve in fixed.values:
                ax.plot(dataset.x, curve, color=color, lw=0.7, ls="--", alpha=0.6)
        words = ("constant rate", "falls slowly", "falls quickly")[i]
        ax.set(
            xlabel=dataset.x.attrs["long_name"],
            ylabel="loss after fine-tuning" if i == 0 else "",
            title=f"{words}: $η ∝ t^{{-{power:g}}}$" if power else words,
        )
        style.logarithmic(ax, "x", "y")
    legend(figure, axes[0, 0], ncols=2)
    return figure


def _sensitivity(dataset: xr.Dataset) -> Figure:
    """Draws the sensitivity to noise with its quadratic prediction, and the loss's curvature."""
    figure, ((left, middle, right),) = style.figure(1, 3, width=4.8, height=3.9)
    share = dataset.tuned_theory / dataset.loss_theory
    x, rows, bars = dataset.x.values, dataset.row.values, np.sqrt(dataset.attrs["seeds"])
    label = "quadratic prediction / sensitivity"
    style.heatmap(left, share.values, x=x, y=rows, vmin=0, vmax=1, label=label)
    left.contour(x, rows, share, [0.5, 0.9], colors="white", linewidths=1.6)
    left.set(ylabel="perturbation $γ$", title="closed form (white: 50 % and 90 %)")
    for i, row in enumerate(dataset.cell_row.values):
        color, at = style.PALETTE[i % len(style.PALETTE)], dataset.sel(cell_row=row)
        exact, predicted = (dataset[f"{k}_theory"].interp(row=row) for k in ("loss", "tuned"))
        middle.plot(x, exact, color=color, label=f"$γ$ = {row:.3g}")
        middle.plot(x, predicted, color=color, ls="--", lw=1)
        spread = at.loss_std / bars
        middle.errorbar(dataset.cell_x, at.loss_mean, spread, fmt="o", ms=3.5, lw=1, color=color)
    low = float(dataset.loss_theory[0].min()) / 3
    middle.set(
        yscale="log", ylim=(low, None), ylabel="sensitivity", title="dashed: quadratic; dots: SGD"
    )
    middle.legend(frameon=False, fontsize=style.points(8), ncols=2, loc="lower right")
    for i, (name, words) in enumerate((("trace", "trace / $d$"), ("sharpness", "largest"))):
        unit, color = dataset.attrs["d"] if name == "trace" else 1, style.PALETTE[i]
        right.plot(x, dataset[f"{name}_theory"] / unit, color=color, label=f"{words} (closed form)")
        mean, spread = (dataset[f"{name}_{k}"].values / unit for k in ("mean", "std"))
        right.errorbar(dataset.cell_x, mean, spread / bars, fmt="o", ms=3.5, lw=1, color=color)
    right.set(
        ylabel="Hessian eigenvalues", ylim=(0, None), title="curvature of the loss; dots: SGD"
    )
    right.legend(frameon=False, fontsize=style.points(8), loc="upper left")
    for ax in (left, middle, right):
        ax.set(xlabel=dataset.x.attrs["long_name"])
        style.logarithmic(ax, "x")
    return figure
