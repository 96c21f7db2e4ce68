"""The figure of `lora_start`."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.findings import mean_and_error
from sail_jax.drawing import style

DOT = {"fmt": "o", "ms": 4, "lw": 1}
LINE = {"ls": "--", "lw": 1.4}


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws curves of learning, times by rows and by singular values, and the part of two layers.

    Returns the figure "start": theory is dashed, and dots are trained adapters with one standard
    error over seeds.
    """
    figure, axes = style.figure(2, 2, width=4.6, height=3.6)
    kind = f"rank {dataset.attrs['rank']}"
    for i, row in enumerate(dataset.shown.values):
        at, label = dataset.sel(shown=row), f"$c$ = {row:g}"
        _pair(axes[0, 0], dataset.time, at.learned_theory, dataset.time, at.learned, i, label)
        size = dataset.direction
        _pair(axes[1, 0], size, at.together_theory, size, at.together, i, label)
    for i, rank in enumerate(dataset["rank"].values):
        at = dataset.sel(rank=rank)
        x = dataset.every_row, at.half_theory, dataset.row, at.half
        _pair(axes[0, 1], *x, i, f"rank {rank}")
    for i, start in enumerate(dataset.start.values):
        at, color = dataset.sel(start=start), style.PALETTE[i]
        axes[1, 1].plot(dataset.every_ratio, at.moved_theory, color=color, **LINE)
        axes[1, 1].plot(dataset.ratio, at.moved, "o", ms=4, color=color, label=f"$a$ = {start:g}")
    axes[0, 0].set(xlabel="time", title=f"(a) learned part of a direction, {kind}")
    axes[0, 1].set(
        xlabel="squared norm of a row of $A$, $c$ ($ρ$ = 1)",
        title="(b) time until half of a direction is learned",
    )
    axes[1, 0].set(
        xlabel="singular value $ρ$ of the residual",
        title=f"(c) the same, directions together, {kind}",
    )
    axes[1, 1].set(
        xlabel="frozen weight of layer 1 / of layer 2",
        ylim=(0, 1),
        title="(d) adapters on both layers: part of layer 1",
    )
    for ax in axes.flat:
        style.logarithmic(ax, *("xy" if ax in (axes[0, 1], axes[1, 0]) else "x"))
        ax.legend(frameon=False, fontsize=style.points(8))
    drawn = "each dot has its own $A$, but a curve of (a) and a colour of (c) share theirs"
    figure.suptitle(
        f"$B$ = 0, $A$ Gaussian with {dataset.attrs['width']} inputs; dashed: closed forms; dots: "
        f"{dataset.attrs['seeds']} adapters\ntrained by gradient flow (± 1 s.e.); {drawn}",
        fontsize=style.points(10),
    )
    return {"start": figure}


def _pair(
    ax: Axes,
    x: xr.DataArray,
    theory: xr.DataArray,
    places: xr.DataArray,
    values: xr.DataArray,
    i: int,
    label: str,
) -> None:
    """Draws theory as a dashed line and means over seeds as points with their errors."""
    ax.plot(x, theory, color=style.PALETTE[i], **LINE)
    mean, error = mean_and_error(values)
    every = np.s_[:: max(1, len(mean) // 20)]
    ax.errorbar(
        places[every], mean[every], error[every], color=style.PALETTE[i], label=label, **DOT
    )
