"""The figures of `transfer_scales`."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.findings import mean_and_error
from experiments.studies.transfer_scales.findings import boundary
from sail_jax.drawing import style


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws the figures of the study.

    Returns two figures. "scales" shows risks of diagonal networks by scale, and where transfer
    helps. "layers" shows risks by the imbalance of two layers.
    """
    scales, ((left, right),) = style.figure(1, 2, width=4.8, height=4.2)
    _risks(left, dataset)
    _regions(right, dataset)
    layers, ((ax,),) = style.figure(width=6.0, height=4.2)
    _layers(ax, dataset)
    return {"scales": scales, "layers": layers}


def _points(ax: Axes, x: np.ndarray, drawn: xr.DataArray, color: str, **look) -> None:
    mean, error = mean_and_error(drawn, "draw")
    ax.errorbar(x, mean, error, fmt="o", ms=3.5, lw=1, color=color, **look)


def _key(dataset: xr.Dataset, sigma: str) -> dict[str, Any]:
    """Returns options of a legend; its title has the numbers of the problem."""
    noise, d = dataset.attrs[sigma], dataset.attrs["d"]
    title = f"$n/d$ = {dataset.attrs['load']:g}, $σ$ = {noise:g}, $d$ = {d}"
    size = style.points(8)
    return {"frameon": False, "fontsize": size, "title": title, "title_fontsize": size}


def _risks(ax: Axes, dataset: xr.Dataset) -> None:
    for i, overlap in enumerate(dataset.overlap.values[[0, len(dataset.overlap) // 2, -1]]):
        color = style.PALETTE[i]
        ax.plot(dataset.fine, dataset.fine_tuning.sel(share=overlap), color=color)
        drawn = dataset.fine_tuned.sel(overlap=overlap)
        _points(ax, dataset.scale.values, drawn, color, label=f"{overlap:.0%} of features shared")
    ax.plot(dataset.fine, dataset.scratch, color=style.INK)
    _points(ax, dataset.scale.values, dataset.from_scratch, style.INK, label="from scratch")
    ax.set(
        xscale="log",
        ylim=(0, None),
        xlabel="scale $\\sqrt{d}\\,|u^2 - v^2|$ (rich to lazy)",
        ylabel="risk",
        title="Diagonal networks: limit (lines),\n"
        f"{dataset.attrs['draws']} data sets (± 1 s.e.), shared by the colours",
    )
    ax.legend(**_key(dataset, "sigma"), ncols=2, loc="upper left")
    ax.set_ylim(0, 1.25 * ax.get_ylim()[1])


def _regions(ax: Axes, dataset: xr.Dataset) -> None:
    gains = (dataset.scratch - dataset.fine_tuning).transpose("fine", "share").values
    reach = np.abs(gains).max()
    fine, share = dataset.fine.values, dataset.share.values
    drawn = ax.pcolormesh(
        share, fine, gains, cmap=style.DIVERGING, vmin=-reach, vmax=reach, shading="gouraud"
    )
    ax.figure.colorbar(drawn, ax=ax, label="transferability, in the limit")
    ax.plot(boundary(dataset), fine, color=style.INK, ls="--", label="limit")
    measured = (dataset.from_scratch - dataset.fine_tuned).transpose("scale", "overlap", "draw")
    mean, error = mean_and_error(measured, "draw")
    for scale, gain, wrong in zip(dataset.scale.values, mean, error, strict=True):
        overlaps = dataset.overlap.values
        zero, low, high = (np.interp(0.0, gain + k * wrong, overlaps) for k in (0, 1, -1))
        bars = [[abs(zero - low)], [abs(high - zero)]]
        label = "own data sets (± 1 s.e.)" if scale == dataset.scale.values[0] else None
        ax.errorbar(
            zero, scale, xerr=bars, fmt="o", ms=4, color=style.INK, label=label, clip_on=False
        )
    ax.set(
        yscale="log",
        xlabel="share of the target's features that the source has",
        ylabel="scale $\\sqrt{d}\\,|u^2 - v^2|$",
        title="Transfer helps (orange) or hurts (purple);\nneither on the line",
    )
    ax.grid(visible=False)
    ax.legend(framealpha=0.9, fontsize=style.points(8), loc="lower right")


def _layers(ax: Axes, dataset: xr.Dataset) -> None:
    for i, theta in enumerate(dataset.theta.values):
        color = style.PALETTE[i]
        ax.plot(dataset.r, dataset.layers.sel(theta=theta), color=color)
        drawn = dataset.layers_drawn.sel(theta=theta)
        _points(ax, dataset.imbalance.values, drawn, color, label=f"$θ$ = {theta:g}°")
    scratch = float(dataset.layers_scratch)
    ax.axhline(scratch, color=style.INK, ls="--", label="from scratch, in the limit")
    ax.axvline(0, color=style.FAINT, lw=0.8)
    ax.set(
        xlabel="imbalance $r = |w_2|^2 - |W_1|^2$ (features fixed to lazy)",
        ylabel="risk",
        title="Two layers: limit (lines),\n"
        f"{dataset.attrs['draws']} data sets (± 1 s.e.), shared by all points",
    )
    ax.legend(**_key(dataset, "layers_sigma"), loc="upper right")
