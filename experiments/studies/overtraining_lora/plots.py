"""The figure of `overtraining_lora`."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.lab.bands import legend
from experiments.lab.findings import mean_and_error
from sail_jax.drawing import style

PLACES = {"full": "all weights", "layer": "adapter on a layer", "map": "adapter on the map"}
LINE = {"ls": "--", "lw": 1.4}
DOT = {"fmt": "o", "ms": 4, "lw": 1}


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws both losses over pre-training, the ends of fine-tuning, and the time of the search.

    Theory is dashed. Dots are trained networks, with one standard error over seeds.
    """
    figure, axes = style.figure(2, 2, width=4.6, height=3.5)
    time = f"after a time of {dataset.attrs['time']:g}"
    _by_time(axes[0, 0], dataset, "lost", f"(a) pre-training loss {time}")
    _by_time(axes[0, 1], dataset, "left", f"(b) fine-tuning loss {time}")
    _ends(axes[1, 0], dataset)
    _halves(axes[1, 1], dataset)
    labels = ["all weights" if n == "full" else f"adapter, r = {n}" for n in dataset.tuned.values]
    looks = {
        label: Line2D([], [], color=color, marker="o", ms=4, ls="")
        for label, color in zip(labels, style.PALETTE, strict=False)
    }
    looks["closed form"] = Line2D([], [], color=style.INK, **LINE)
    legend(figure, also=looks, ncols=len(looks))
    return {"lora": figure}


def _by_time(ax: Axes, dataset: xr.Dataset, name: str, title: str) -> None:
    """Draws a loss against the pre-training time."""
    for i, tuned in enumerate(dataset.tuned.values):
        at, color = dataset.sel(tuned=tuned), style.PALETTE[i]
        ax.plot(dataset.time, at[f"{name}_theory"], color=color, **LINE)
        ax.errorbar(dataset.cell_time, *mean_and_error(at[name]), color=color, **DOT)
    style.logarithmic(ax, "x")
    ax.set(xlabel="pre-training time", ylim=(0, None), title=title)


def _ends(ax: Axes, dataset: xr.Dataset) -> None:
    """Draws the pre-training loss at the end of fine-tuning, by the number of learned modes."""
    for i, tuned in enumerate(dataset.tuned.values):
        ax.plot(
            dataset.learned, dataset.end_theory.sel(tuned=tuned), color=style.PALETTE[i], **LINE
        )
        mean, error = mean_and_error(dataset.end.sel(tuned=tuned))
        ax.errorbar(dataset.learned, mean, error, color=style.PALETTE[i], **DOT)
    ax.set(
        xlabel="learned modes $n$",
        ylim=(0, None),
        title="(c) pre-training loss at the end, random $A$",
    )


def _halves(ax: Axes, dataset: xr.Dataset) -> None:
    """Draws the time until half of the change is learned, by how far a mode was pre-trained."""
    markers = ("s", "o", "^")
    for i, (place, words) in enumerate(PLACES.items()):
        color = style.PALETTE[-1 - i]
        ax.plot(dataset.share, dataset.half_theory.sel(place=place), color=color, **LINE)
        measured = dataset.half.sel(place=place)
        ax.plot(dataset.cell_share, measured, markers[i], ms=4, color=color, label=words)
    ax.set(
        xlabel="pre-trained mode $y / σ^{ft}$",
        yscale="log",
        title="(d) time until half of the change (line: $y = σ^{ft}/3$)",
    )
    low, at = float(np.min(dataset.half)) / 2, 1 / 3
    layer = np.interp(at, dataset.share, dataset.half_theory.sel(place="layer"))
    ax.plot([at, at], [low, layer], color=style.FAINT, lw=0.8)
    ax.set_ylim(low, None)
    ax.legend(frameon=False, fontsize=style.points(8))
