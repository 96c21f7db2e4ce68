"""The figures of `trajectory_averaging`. Colours distinguish averages from decays in all of
them."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.bands import legend
from experiments.lab.findings import mean_and_error
from experiments.studies.trajectory_averaging.findings import TASKS
from sail_jax.drawing import style

MARKERS = "osD^v"
AVERAGES, DECAYS = style.PALETTE[0], style.PALETTE[1]
SHADES = (1.0, 0.6, 0.35, 0.25, 0.2)


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws the figures of a finished run."""
    return {"windows": _windows(dataset), "break_even": _break_even(dataset)}


def _windows(dataset: xr.Dataset) -> Figure:
    """Draws a row for each task: measurements on the left, predictions on the right."""
    tasks = dataset["task"].values.astype(str)
    fig, axes = style.figure(len(tasks), 2, width=4.6, height=3.1, sharex=True, sharey="row")
    for i, task in enumerate(tasks):
        of, (left, right) = dataset.sel(task=task), axes[i]
        _ways(left, of, measured=True)
        _ways(right, of, measured=False)
        seeds = dataset.sizes["seed"]
        left.set_title(f"{TASKS[task]}: measured (± s.e., {seeds} seeds)")
        right.set_title(f"{TASKS[task]}: predicted, quadratics fitted to averages")
        left.set_ylabel("held-out loss (nats)")
        style.logarithmic(left, "x")
        left.set_xticks(dataset["window"].values, dataset["window"].values)
        left.minorticks_off()
    for ax in axes[-1]:
        ax.set_xlabel("window: steps averaged, or decayed")
    legend(fig, axes[0, 0], ncols=3)
    return fig


def _ways(ax: Axes, of: xr.Dataset, *, measured: bool) -> None:
    windows = of["window"].values
    for kind, ways, colour in (("averaged", "shape", AVERAGES), ("decayed", "decay", DECAYS)):
        for k, way in enumerate(of[ways].values.astype(str)):
            look = {"color": colour, "marker": MARKERS[k], "ms": 5, "alpha": SHADES[k]}
            pick = {ways: way}
            name = f"{way} average" if kind == "averaged" else f"{way} decay"
            if measured:
                mean, error = mean_and_error(of[kind].sel(pick).sel(half="test"))
                ax.errorbar(windows, mean, error, capsize=2, lw=1.4, label=name, **look)
            else:
                guess = (of[f"predicted_{kind}"].sel(pick) + of["offset"]).mean("seed")
                ax.plot(windows, guess, ls=(0, (4, 2)), mfc="none", lw=1.2, label=name, **look)
    if measured:
        last = mean_and_error(of["curve"].isel(step=-1).sel(half="test"))
        mean, error = map(float, last)
        ax.axhspan(mean - error, mean + error, color=style.FAINT, alpha=0.3, lw=0)
        ax.axhline(mean, color=style.FAINT, lw=1, label="last checkpoint, constant rate")


def _break_even(dataset: xr.Dataset) -> Figure:
    """Draws the lines on which both have the same loss, by the number of checkpoints."""
    fig, axes = style.figure(width=6.2, height=4.0)
    ax = axes[0, 0]
    time, lines = dataset["time"].values, dataset["break_even"]
    low, high = 0.1, 100.0
    whole = lines.sel(checkpoints=0).values
    ax.fill_between(time, low, whole, color=AVERAGES, alpha=0.12, lw=0)
    ax.fill_between(time, whole, high, color=DECAYS, alpha=0.12, lw=0)
    counts = dataset["checkpoints"].values
    for k, count in enumerate(counts):
        edge = lines.sel(checkpoints=count).values
        shown = np.where(edge > 0, edge, np.nan)
        label = "every iterate, in closed form" if count == 0 else f"{count} checkpoints"
        look = {"lw": 2.2, "color": style.INK, "ls": (0, (4, 2))}
        if count:
            look |= {"lw": 1.3, "color": style.PALETTE[1 + k]}
        ax.plot(time, shown, label=label, **look)
    ax.axhline(0.2**0.5, color=style.FAINT, lw=1, ls=":")
    ax.text(time[-1], 0.2**0.5, r"$\sqrt{1/5}$ ", ha="right", va="bottom", fontsize=style.points(9))
    style.logarithmic(ax, "x", "y")
    ax.set(xlim=(time[0], time[-1]), ylim=(low, high))
    ax.text(
        0.13, 0.14, "the uniform average has less loss", color=AVERAGES, fontsize=style.points(9)
    )
    ax.text(0.13, 30, "linear decay has less loss", color=DECAYS, fontsize=style.points(9))
    ax.set_xlabel("window: rate × curvature × steps")
    ax.set_ylabel("distance at its start,\nin stationary standard deviations")
    legend(fig, ncols=3, where="upper center")
    return fig
