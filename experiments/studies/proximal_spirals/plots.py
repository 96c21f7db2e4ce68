"""The figures of `proximal_spirals` (SAIL, Figs. 8 and 9).

`experiments.studies.shared.gamma_plots` has the elements shared with `proximal_gamma`.
"""

import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.lab.bands import band, legend
from experiments.studies.proximal_spirals.findings import SOURCES
from experiments.studies.proximal_spirals.training import LABELS
from experiments.studies.shared.gamma_plots import (
    GAMMA,
    look,
    mark_best,
    mark_predicted,
    mark_scratch,
    predicted_handles,
    weights,
)
from sail_jax.drawing import style

MEASURES = {
    "loss": "training loss (nats)",
    "accuracy": "test accuracy",
    "gradient": "norm of the gradient",
}


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws the figures of a finished run."""
    figures = {f"gamma_{s}": _gamma(dataset, s) for s in dataset["start"].values.astype(str)}
    return {**figures, "weights": _weights(dataset), "epochs": _epochs(dataset)}


def _panels(dataset: xr.Dataset) -> tuple[Figure, np.ndarray]:
    """Creates an empty figure with a row for each kind of sources and a column for each measure."""
    how = dataset["sources"].values.astype(str)
    fig, axes = style.figure(len(how), 3, width=3.2, height=2.4, sharex=True)
    for row, name in zip(axes, how, strict=True):
        for ax, (measure, label) in zip(row, MEASURES.items(), strict=True):
            ax.set_title(f"sources: {SOURCES[name]}", pad=9)
            ax.set_ylabel(label)
            if measure != "accuracy":
                ax.set_yscale("log")
    return fig, axes


def _gamma(dataset: xr.Dataset, start: str) -> Figure:
    """Draws every measure against gamma, at the looks, for one kind of start."""
    fig, axes = _panels(dataset)
    gamma, looks = dataset["gamma"].values, dataset["look"].values
    for row, how in zip(axes, dataset["sources"].values, strict=True):
        at = dataset.sel(sources=how, start=start)
        for ax, measure in zip(row, MEASURES, strict=True):
            for i, n in enumerate(looks):
                values = at[measure].sel(epoch=n)
                band(ax, gamma, values, lw=1.5, **look(i))
                mark_scratch(ax, at[f"scratch_{measure}"].sel(epoch=n), i)
                if measure == "loss":
                    mark_best(ax, values, at["best"].sel(look=n), i)
            ax.set_xlim(gamma[0], gamma[-1])
            mark_predicted(ax, at["predicted"])
    for ax in axes[-1]:
        ax.set_xlabel(GAMMA)
    lines = [Line2D([], [], label=f"after {n} epochs", **look(i)) for i, n in enumerate(looks)]
    lines += [
        Line2D(
            [], [], ls="", marker="o", color=style.INK, mec="white", label="lowest loss, by seed"
        ),
        Line2D([], [], ls="", marker="<", color=style.INK, label="from scratch"),
        *predicted_handles([LABELS[w] for w in dataset["way"].values.astype(str)]),
    ]
    title = f"{start} initial weights; mean ± s.e. over {dataset.sizes['seed']} seeds"
    legend(fig, also=lines, title=title, ncols=3)
    return fig


def _weights(dataset: xr.Dataset) -> Figure:
    """Draws measured and predicted gammas, a panel for each kind of sources and of start."""
    how, starts = dataset["sources"].values.astype(str), dataset["start"].values.astype(str)
    looks, ways = dataset["look"].values, dataset["way"].values.astype(str)
    height = 0.9 + 0.22 * (len(looks) + len(ways))
    fig, axes = style.figure(
        len(how), len(starts), width=4.6, height=height, sharex=True, sharey=True
    )
    span = dataset["gamma"].values[[0, -1]]
    for row, name in zip(axes, how, strict=True):
        for ax, start in zip(row, starts, strict=True):
            at = dataset.sel(sources=name, start=start)
            rows = {f"best, after {n} epochs": at["best"].sel(look=n) for n in looks}
            rows |= {LABELS[w]: at["predicted"].sel(way=w) for w in ways}
            weights(ax, rows, len(looks), span)
            ax.set_title(f"{SOURCES[name]}, {start} start")
    for ax in axes[-1]:
        ax.set_xlabel(f"{GAMMA} (mean ± s.e.; ticks: seeds)")
    return fig


def _epochs(dataset: xr.Dataset) -> Figure:
    """Draws every measure during training, a line for each gamma, for the first kind of start."""
    fig, axes = _panels(dataset)
    start = dataset["start"].values[0]
    gamma = dataset["gamma"].values
    norm, cmap = Normalize(gamma[0], gamma[-1]), colormaps[style.SEQUENTIAL]
    for row, how in zip(axes, dataset["sources"].values, strict=True):
        at = dataset.sel(sources=how, start=start)
        for ax, measure in zip(row, MEASURES, strict=True):
            mean = at[measure].mean("seed")
            for k, g in enumerate(gamma):
                ax.plot(at["epoch"], mean.isel(gamma=k), color=cmap(norm(g)), lw=0.8)
            scratch = at[f"scratch_{measure}"]
            band(ax, at["epoch"], scratch, color=style.PALETTE[1], ls="--", lw=1.5)
    for ax in axes[-1]:
        ax.set_xlabel("epochs on the target")
    bar = fig.colorbar(ScalarMappable(norm, cmap), ax=axes, label=GAMMA, shrink=0.6)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    handles = [
        Line2D([], [], color=style.PALETTE[1], ls="--", label="from scratch, mean ± s.e."),
        Line2D([], [], color=cmap(0.5), lw=0.8, label="from γ θ₁ + (1 − γ) θ₂, mean"),
    ]
    title = f"{start} initial weights, {dataset.sizes['seed']} seeds"
    legend(fig, also=handles, title=title, ncols=2)
    return fig
