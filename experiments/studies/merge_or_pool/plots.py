"""The figures of `merge_or_pool`."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.bands import legend
from experiments.lab.findings import mean_and_error
from sail_jax.drawing import style

REACH = 2.0
LABELS = {
    "average": "average",
    "own data": "RegMean, experts' data: pooled training",
    "other data": "RegMean, other data",
}


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws where averaged experts are better than pooled training, and three weights.

    Returns the figures "diagram" and "weights". Colours and dashed lines are theory, and dots are
    random data.
    """
    diagram, ((left, right),) = style.figure(1, 2, width=4.8, height=4.1)
    _map(left, dataset, "plain", "load", "(a) least squares")
    left.plot(dataset.fine_load, dataset.line, "--", color=style.INK, lw=1.6,
              label="average = pooled, in theory")  # fmt: skip
    _map(right, dataset, "tuned", "few_load", "(b) best penalties, best scale")
    x, y = dataset.fine_few_load, dataset.fine_spread
    right.contour(x, y, dataset.tuned_map.T, levels=[0], colors=style.INK, linestyles="--")
    right.contour(
        x, y, dataset.tuned_experts.T, levels=[0], colors=style.PALETTE[2], linestyles=":",
        linewidths=2,
    )  # fmt: skip
    right.plot([], [], ":", lw=2, color=style.PALETTE[2], label="expert = pooled model, own task")
    weights, ((ax,),) = style.figure(width=6.4, height=4.2)
    _curved(ax, dataset)
    about = dataset.attrs
    title = (
        f"$d$ = {about['d']}, {about['tasks']} tasks, $σ$ = {about['sigma']:g}; dots: "
        f"{about['draws']} data sets each, shared by both sides of a dot"
    )
    legend(diagram, left, right, ncols=2, title=title)
    legend(weights, ncols=2)
    return {"diagram": diagram, "weights": weights}


def _map(ax: Axes, dataset: xr.Dataset, name: str, load: str, title: str) -> None:
    """Draws log2(pooled / average): theory as colours, random data as dots of the same colours."""
    looks = {"cmap": style.DIVERGING, "vmin": -REACH, "vmax": REACH}
    x, y = dataset[f"fine_{load}"].values, dataset.fine_spread.values
    style.heatmap(
        ax, dataset[f"{name}_map"].values.T, x=x, y=y, label="log2 (pooled / average)", **looks
    )
    mean = dataset[name].mean("draw")
    ratio = np.log2(mean.sel(way="pooled") / mean.sel(way="average"))
    places = np.meshgrid(dataset[load], dataset.spread, indexing="ij")
    ax.scatter(
        *places,
        c=ratio,
        s=45,
        edgecolors=style.INK,
        linewidths=0.9,
        zorder=3,
        clip_on=False,
        **looks,
    )
    style.logarithmic(ax, "x", "y")
    ax.set(
        xlabel="samples of an expert per dimension $n/d$",
        ylabel="spread of teachers / $σ^2$",
        title=title,
        ylim=(y[0], y[-1]),
    )


def _curved(ax: Axes, dataset: xr.Dataset) -> None:
    mean, error = mean_and_error(dataset.curved, "draw")
    angle = np.degrees(dataset.angle.values)
    for i, weights in enumerate(dataset.weights.values):
        color = style.PALETTE[i]
        ax.plot(angle, dataset.curved_theory[:, i], "--", lw=1.3, color=color)
        ax.errorbar(
            angle, mean[:, i], error[:, i], fmt="o", ms=4, lw=1, color=color,
            label=LABELS[str(weights)],
        )  # fmt: skip
    about = dataset.attrs
    ax.set(
        ylim=(0, None),
        xlabel="angle between curvatures (degrees)",
        ylabel="mean excess risk",
        title=f"$n/d$ = {about['curved_load']:g}, spread {about['curved_spread']:g} $σ^2$; "
        f"dashed: theory; dots: {about['draws']} data sets\n(± 1 s.e.), shared by the weights",
    )
