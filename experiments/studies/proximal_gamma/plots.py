"""The figures of `proximal_gamma` (SAIL, Fig. 2).

`experiments.studies.shared.gamma_plots` has the elements shared with `proximal_spirals`.
"""

import itertools
from typing import Any

import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.lab.bands import band, legend
from experiments.lab.findings import mean_and_error
from experiments.studies.proximal_gamma.training import DISTANCES, LABELS
from experiments.studies.shared.gamma_plots import (
    GAMMA,
    look,
    mark_best,
    mark_scratch,
    weights,
)
from experiments.studies.shared.gamma_sweep import PUBLISHED
from sail_jax.drawing import style

PAPER = "mmd_mean"  # the paper's prediction
STEP_LABEL = "held-out loss (nats)"
PART_LABELS = ("D₁", "D₂", "Dₜ")
PAIR_LABELS = {"1-target": "D₁ to Dₜ", "2-target": "D₂ to Dₜ", "1-2": "D₁ to D₂"}


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws the figures of a finished run.

    Returns `gamma`, loss against gamma; `weights`, measured and predicted gammas; `distances`
    between the parts; `overlap`, loss against gamma for every overlap; and `map` of the parts, if
    it was computed.
    """
    figures = {
        "gamma": _loss(dataset),
        "weights": _weights(dataset),
        "distances": _distances(dataset),
        "overlap": _overlap(dataset),
    }
    return figures | {"map": _map(dataset)} if "map" in dataset else figures


def _map(dataset: xr.Dataset) -> Figure:
    """Draws blocks of the three parts in the plane (Figs. 2a and 4)."""
    fig, axes = style.figure(width=4.6, height=4.2)
    ax = axes[0, 0]
    for k, (part, label) in enumerate(zip(dataset["map"].values, PART_LABELS, strict=True)):
        look = {"color": style.PALETTE[k], "ms": 4, "mec": "none", "alpha": 0.7}
        ax.plot(*part.T, "osD"[k], label=label, **look)
    ax.set(xticks=[], yticks=[], title=f"t-SNE of unigrams, {dataset.sizes['placed']} blocks each")
    legend(fig, ncols=3)
    return fig


def _loss(dataset: xr.Dataset) -> Figure:
    """Draws loss against gamma (Fig. 2b), a column for each kind of start.

    Looks before training have a row of their own, because their losses differ in size. Only the
    weight that the paper predicts is drawn; the figure `weights` has all of them.
    """
    starts, looks = dataset["start"].values.astype(str), list(dataset["look"].values)
    early, late = looks[: looks.count(0)], looks[looks.count(0) :]
    groups = [g for g in ((early, "before training"), (late, "after training")) if g[0]]
    fig, axes = style.figure(
        len(groups), len(starts), width=4.8, height=2.6, sharex=True, sharey="row"
    )
    grid, parts = dataset["gamma"].values, itertools.product(groups, starts)
    for ax, ((shown, words), start) in zip(axes.flat, parts, strict=True):
        at = dataset.sel(start=start)
        for n in shown:
            i, values = looks.index(n), at["loss"].sel(look=n)
            band(ax, grid, values, lw=1.5, color=look(i)["color"])
            mark_scratch(ax, at["scratch_loss"].sel(look=n), i)
            mark_best(ax, values, at["best"].sel(look=n), i)
        ax.set_xlim(grid[0], grid[-1])
        x, _ = mean_and_error(at["predicted"].sel(way=PAPER))
        if grid[0] < x < grid[-1]:
            ax.axvline(float(x), color=style.INK, lw=1.2, ls="--", zorder=1)
        ax.set_title(f"{start} initial weights, {words}")
    for ax in axes[:, 0]:
        ax.set_ylabel("held-out loss (nats)")
    for ax in axes[-1]:
        ax.set_xlabel(GAMMA)
    lines = [
        Line2D([], [], label=f"after {n} steps", color=look(i)["color"])
        for i, n in enumerate(looks)
    ]
    lines += [
        Line2D([], [], ls="", marker="o", color=style.INK, mec="white", label="lowest, by seed"),
        Line2D([], [], ls="", marker="<", color=style.INK, label="from scratch"),
        Line2D([], [], color=style.INK, lw=1.2, ls="--", label=f"predicted: {LABELS[PAPER]}"),
    ]
    title = f"held-out loss, mean ± s.e. over {dataset.sizes['seed']} seeds"
    legend(fig, also=lines, title=title, ncols=2 * len(starts))
    return fig


def _weights(dataset: xr.Dataset) -> Figure:
    """Draws measured and predicted gammas, with the printed formula and the published number."""
    starts, looks = dataset["start"].values.astype(str), dataset["look"].values
    height = 1.5 + 0.24 * (len(looks) + len(LABELS) + 1)
    width = max(4.8, 8.0 / len(starts))
    fig, axes = style.figure(1, len(starts), width=width, height=height, sharey=True)
    span = dataset["gamma"].values[[0, -1]]
    for ax, start in zip(axes[0], starts, strict=True):
        at = dataset.sel(start=start)
        rows = {f"best, after {n} steps": at["best"].sel(look=n) for n in looks}
        rows |= {LABELS[w]: at["predicted"].sel(way=w) for w in dataset["way"].values.astype(str)}
        rows["as printed in Sec. 4.4, MMD, means"] = 1 - at["predicted"].sel(way=PAPER)
        weights(ax, rows, len(looks), span)
        ax.axvline(PUBLISHED, color=style.INK, lw=1, ls=":")
        ax.set_title(f"{start} initial weights")
        ax.set_xlabel(f"{GAMMA} (mean ± s.e.; ticks: seeds)")
    note = (
        f"dotted: the published γ* = {PUBLISHED}, on another text. The formula printed with it is\n"
        f"the weight of θ₂ (last row, as a weight of θ₁) and would give {1 - PUBLISHED:+.4f}; "
        "eq. 11 is the weight of θ₁."
    )
    fig.supxlabel(note, fontsize=style.points(9))
    return fig


def _distances(dataset: xr.Dataset) -> Figure:
    """Draws distances between the parts as fractions of the largest, with mean standard errors."""
    at = dataset.isel(alpha=0, beta=0)
    names = dataset["distance"].values.astype(str)
    fig, axes = style.figure(width=6.4, height=1.2 + 0.42 * len(names))
    ax = axes[0, 0]
    for i, name in enumerate(names):
        value = at["distance_value"].sel(distance=name).mean("seed")
        error = at["distance_error"].sel(distance=name).mean("seed")
        unit = float(value.max())
        for k, pair in enumerate(dataset["pair"].values.astype(str)):
            y = len(names) - 1 - i + 0.22 * (1 - k)
            x, dx = float(value.sel(pair=pair)) / unit, float(error.sel(pair=pair)) / unit
            color, label = style.PALETTE[k], PAIR_LABELS[pair] if i == 0 else None
            ax.errorbar(x, y, xerr=dx, fmt="osD"[k], color=color, ms=5, capsize=3, label=label)
    squared = [" (squared)" if DISTANCES[n][0] else "" for n in names]
    labels = [DISTANCES[n][1] + s for n, s in zip(names, squared, strict=True)]
    ax.set_yticks(range(len(names)), labels[::-1])
    ax.set_xlim(left=min(0.0, ax.get_xlim()[0]))
    ax.set_xlabel("distance as a share of the largest (± its standard error)")
    legend(fig, ncols=3)
    return fig


def _overlap(dataset: xr.Dataset) -> Figure:
    """Draws loss against gamma (Fig. 2c), a panel for each overlap with the target."""
    betas, alphas = dataset["beta"].values, dataset["alpha"].values
    columns = min(4, len(betas))
    rows = -(-len(betas) // columns)
    fig, axes = style.figure(
        rows, columns, width=max(3.8, 7.0 / columns), height=3.2, sharex=True, sharey=True
    )
    grid = dataset["gamma"].values
    colors = colormaps[style.SEQUENTIAL](np.linspace(0, 0.9, len(alphas)))
    for ax, beta in zip(axes.flat, betas, strict=False):
        for i, alpha in enumerate(alphas):
            at = dataset.sel(alpha=alpha, beta=beta)
            drawn = look(i) if len(alphas) <= 4 else {"color": colors[i], "ls": "-"}
            band(ax, grid, at["overlap_loss"], lw=1.5, **drawn)
            heights = at["overlap_loss"].min("gamma")
            ax.plot(at["overlap_best"], heights, "o", ms=4, mec="white", color=drawn["color"])
            x, _ = mean_and_error(at["overlap_predicted"].sel(distance="mmd"))
            if grid[0] < x < grid[-1]:
                ax.axvline(float(x), color=drawn["color"], ls=drawn["ls"], lw=0.9)
            elif np.isfinite(x):
                place, marker = (0.0, "<") if x < grid[0] else (1.0, ">")
                inside = {"transform": ax.transAxes, "clip_on": False, "color": drawn["color"]}
                ax.plot(place, 0.9 - 0.07 * i, marker, ms=6, **inside)
        ax.set_title(f"share β = {beta:g} of either source from Dₜ")
    for ax in axes.flat[len(betas) :]:
        ax.set_axis_off()
    for ax in axes[-1]:
        ax.set_xlabel(GAMMA)
    for ax in axes[:, 0]:
        ax.set_ylabel(STEP_LABEL)
    lines = [
        Line2D([], [], label=f"α = {alpha:g}", **look(i)) if len(alphas) <= 4
        else Line2D([], [], label=f"α = {alpha:g}", color=colors[i])
        for i, alpha in enumerate(alphas)
    ]  # fmt: skip
    dot: dict[str, Any] = {"marker": "o", "mec": "white", "color": style.INK}
    lines += [
        Line2D([], [], ls="", label="lowest, by seed", **dot),
        Line2D([], [], color=style.INK, lw=0.9, label="predicted, MMD of unigrams (◂ beyond)"),
    ]
    title = (
        f"after {dataset.attrs['overlap_steps']} steps, {dataset['start'].values[0]} start, mean ± "
        f"s.e. over {dataset.sizes['seed']} seeds; α: share common to D₁ and D₂"
    )
    legend(fig, also=lines, title=title, ncols=min(3, len(lines)))
    return fig
