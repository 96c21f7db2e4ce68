"""The figure of `overtraining_further`."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sail_jax.drawing import style

LOOKS = {
    "shifted": ("o", 0, "grids shifted at random"),
    "nearest": ("s", 1, "to nearest"),
    "mirrored": ("^", 2, "to nearest, mirrored layers"),
}


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws the parts; dashed lines are theory, points are matrices, bars two standard errors."""
    figure, axes = style.figure(3, 3, width=4.8, height=3.6)
    parts = (_modes, _decay, _turned, _bits, _rise, _sam, _bouncing, _labels, _anneal)
    for ax, draw in zip(axes.flat, parts, strict=True):
        draw(ax, dataset)
        ax.legend(frameon=False, fontsize=8, ncols=2 if draw is _rise else 1)
    return {"further": figure}


def _points(ax: Axes, x: xr.DataArray, y: xr.DataArray, error: xr.DataArray, **look: Any) -> None:
    """Draws measurements with two standard errors."""
    ax.errorbar(x, y, 2 * error, **{"fmt": "o", "ms": 4, "lw": 1, "color": style.PALETTE[0]} | look)


def _modes(ax: Axes, dataset: xr.Dataset) -> None:
    ax.plot(dataset.decay, dataset.decay_modes_theory, "--", label="theory")
    ax.plot(dataset.cell_decay, dataset.decay_modes, "o", ms=4, color=style.PALETTE[0])
    ax.set(
        xlabel=dataset.decay.attrs["long_name"],
        ylabel="modes",
        ylim=(0, None),
        title="modes worth learning if noise follows",
    )


def _decay(ax: Axes, dataset: xr.Dataset) -> None:
    ax.plot(dataset.decay, dataset.decay_time_theory, "--", label="theory")
    ax.axhline(
        dataset.attrs["noise_time"],
        color=style.FAINT,
        ls=":",
        label="set by noise: $\\log(c\\,e^{2τ} - 1)/4c$",
    )
    _points(ax, dataset.cell_decay, dataset.decay_time, dataset.decay_time_error)
    ax.set(
        xlabel=dataset.decay.attrs["long_name"],
        ylabel="pre-training time",
        ylim=(0, None),
        title="best time to stop if noise follows",
    )


def _turned(ax: Axes, dataset: xr.Dataset) -> None:
    for start, line, color, words in (
        ("aligned", ":", style.FAINT, "theory, $U = V$"),
        ("limit", "--", style.PALETTE[1], "theory, $U ≠ V$, $τ → ∞$"),
        ("exact", "--", style.PALETTE[0], "theory, $U ≠ V$"),
    ):
        theory = dataset.turned_time_theory.sel(start=start)
        ax.plot(dataset.tau, theory, line, color=color, label=words)
    _points(ax, dataset.tau, dataset.turned_time, dataset.turned_time_error)
    ax.set(
        xlabel=dataset.tau.attrs["long_name"],
        ylabel="pre-training time",
        ylim=(0, None),
        title="best time to stop, other singular vectors",
    )


def _bits(ax: Axes, dataset: xr.Dataset) -> None:
    for law, color in (("independent", 0), ("mirrored", 2)):
        theory = dataset.bits_time_theory.sel(law=law)
        ax.plot(dataset.real_bits, theory, "--", color=style.PALETTE[color], label=f"theory, {law}")
    for i, (way, (marker, color, words)) in enumerate(LOOKS.items()):
        at = dataset.sel(way=way)
        look = {"fmt": marker, "color": style.PALETTE[color], "label": words}
        _points(ax, dataset.bits + 0.04 * (i - 1), at.bits_time, at.bits_time_error, **look)
    ax.set(
        xlabel=dataset.real_bits.attrs["long_name"],
        ylabel="pre-training time",
        xticks=dataset.bits.values,
        title="best time to stop if rounding follows",
    )
    style.logarithmic(ax, "y")


def _rise(ax: Axes, dataset: xr.Dataset) -> None:
    ax.axhline(1, color=style.INK, ls="--", lw=1, label="independent uniform errors")
    for k, bits in enumerate(dataset.shown_bits.values):
        for way, line in (("nearest", "-"), ("mirrored", ":")):
            at = dataset.sel(way=way, shown_bits=bits)
            words = f"{bits} bits" + (", mirrored" if way == "mirrored" else "")
            look = {"fmt": LOOKS[way][0] + line, "ms": 3, "lw": 0.8, "label": words}
            _points(ax, dataset.time, at.rise, at.rise_error, color=style.PALETTE[k], **look)
    shown = dataset.rise.sel(way=["nearest", "mirrored"]).values
    ax.set(
        xlabel=dataset.time.attrs["long_name"],
        ylabel="rise / rise by uniform errors",
        ylim=(1.1 * min(np.nanmin(shown), 0), 1.4 * np.nanmax(shown)),
        title="what rounding to nearest adds to the loss",
    )
    style.logarithmic(ax, "x")


def _sam(ax: Axes, dataset: xr.Dataset) -> None:
    for i, sigma in enumerate(dataset.mode.values):
        color, at = style.PALETTE[i], dataset.sel(mode=sigma)
        theory = at.sam_time_theory.where(np.isfinite(at.sam_time_theory))
        ax.plot(dataset.rho, theory, "--", color=color, label=f"$σ$ = {sigma:g}")
        measured = at.sam_time.where(np.isfinite(at.sam_time))
        ax.plot(dataset.cell_rho, measured, "o", ms=4, color=color)
    ax.set(
        xlabel=dataset.rho.attrs["long_name"],
        ylabel="pre-training time",
        title="SAM, not normalised: when half of a mode is learned",
    )
    style.logarithmic(ax, "y")


def _bouncing(ax: Axes, dataset: xr.Dataset) -> None:
    for i, sigma in enumerate(dataset.mode.values):
        color, at = style.PALETTE[i], dataset.sel(mode=sigma)
        ax.plot(dataset.sam_step, at.sam_imbalance_theory, "--", color=color)
        ax.plot(
            dataset.sam_step, at.sam_imbalance, "o", ms=4, color=color, label=f"$σ$ = {sigma:g}"
        )
    ax.set(
        xlabel=dataset.sam_step.attrs["long_name"],
        ylabel="imbalance $a^2 - b^2$",
        ylim=(0, None),
        title="normalised SAM at a minimum",
    )


def _labels(ax: Axes, dataset: xr.Dataset) -> None:
    for i, schedule in enumerate(dataset.schedule.values):
        color, at = style.PALETTE[i], dataset.sel(schedule=schedule)
        ax.plot(dataset.step, at.trace_theory, "--", color=color)
        _points(ax, dataset.step, at.trace, at.trace_error, color=color, label=str(schedule))
    ax.set(
        xlabel=dataset.step.attrs["long_name"],
        ylabel="trace of the Hessian",
        title="label noise balances, and a decay ends that",
    )


def _anneal(ax: Axes, dataset: xr.Dataset) -> None:
    ax.plot(dataset.rate, dataset.anneal_theory, "--", label="theory")
    _points(ax, dataset.cell_rate, dataset.anneal, dataset.anneal_error)
    ax.set(
        xlabel=dataset.rate.attrs["long_name"],
        ylabel="rise of $a^2 + b^2$",
        title="what a decay adds at one balanced mode",
    )
