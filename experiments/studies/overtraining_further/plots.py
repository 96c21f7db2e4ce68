"""The figure of `overtraining_further`."""

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
    return {"further": figure}


def _modes(ax: Axes, dataset: xr.Dataset) -> None:
    ax.plot(dataset.decay, dataset.decay_modes_theory, "--", label="theory")
    ax.plot(dataset.cell_decay, dataset.decay_modes, "o", ms=4, color=style.PALETTE[0])
    ax.set(
        xlabel=dataset.decay.attrs["long_name"],
        ylabel="modes",
        ylim=(0, None),
        title="modes worth learning if noise follows",
    )
    ax.legend(frameon=False, fontsize=8)


def _decay(ax: Axes, dataset: xr.Dataset) -> None:
    ax.plot(dataset.decay, dataset.decay_time_theory, "--", label="theory")
    ax.axhline(
        dataset.attrs["noise_time"],
        color=style.FAINT,
        ls=":",
        label="set by noise: $\\log(c\\,e^{2τ} - 1)/4c$",
    )
    bars = 2 * dataset.decay_time_error
    ax.errorbar(
        dataset.cell_decay, dataset.decay_time, bars, fmt="o", ms=4, lw=1, color=style.PALETTE[0]
    )
    ax.set(
        xlabel=dataset.decay.attrs["long_name"],
        ylabel="pre-training time",
        ylim=(0, None),
        title="best time to stop if noise follows",
    )
    ax.legend(frameon=False, fontsize=8)


def _turned(ax: Axes, dataset: xr.Dataset) -> None:
    for start, line, color, words in (
        ("aligned", ":", style.FAINT, "theory, $U = V$"),
        ("limit", "--", style.PALETTE[1], "theory, $U ≠ V$, $τ → ∞$"),
        ("exact", "--", style.PALETTE[0], "theory, $U ≠ V$"),
    ):
        theory = dataset.turned_time_theory.sel(start=start)
        ax.plot(dataset.tau, theory, line, color=color, label=words)
    bars = 2 * dataset.turned_time_error
    ax.errorbar(dataset.tau, dataset.turned_time, bars, fmt="o", ms=4, lw=1, color=style.PALETTE[0])
    ax.set(
        xlabel=dataset.tau.attrs["long_name"],
        ylabel="pre-training time",
        ylim=(0, None),
        title="best time to stop, other singular vectors",
    )
    ax.legend(frameon=False, fontsize=8)


def _bits(ax: Axes, dataset: xr.Dataset) -> None:
    for law, color in (("independent", 0), ("mirrored", 2)):
        theory = dataset.bits_time_theory.sel(law=law)
        ax.plot(dataset.real_bits, theory, "--", color=style.PALETTE[color], label=f"theory, {law}")
    for i, (way, (marker, color, words)) in enumerate(LOOKS.items()):
        at = dataset.sel(way=way)
        ax.errorbar(
            dataset.bits + 0.04 * (i - 1),
            at.bits_time,
            2 * at.bits_time_error,
            fmt=marker,
            ms=4,
            lw=1,
            color=style.PALETTE[color],
            label=words,
        )
    ax.set(
        xlabel=dataset.real_bits.attrs["long_name"],
        ylabel="pre-training time",
        xticks=dataset.bits.values,
        title="best time to stop if rounding follows",
    )
    style.logarithmic(ax, "y")
    ax.legend(frameon=False, fontsize=8)


def _rise(ax: Axes, dataset: xr.Dataset) -> None:
    ax.axhline(1, color=style.INK, ls="--", lw=1, label="independent uniform errors")
    for k, bits in enumerate(dataset.shown_bits.values):
        for way, line in (("nearest", "-"), ("mirrored", ":")):
            at = dataset.sel(way=way, shown_bits=bits)
            bars, color = 2 * at.rise_error, style.PALETTE[k]
            words = f"{bits} bits" + (", mirrored" if way == "mirrored" else "")
            marker = LOOKS[way][0]
            ax.errorbar(
                dataset.time, at.rise, bars, fmt=marker + line, ms=3, lw=0.8, color=color,
                label=words,
            )  # fmt: skip
    shown = dataset.rise.sel(way=["nearest", "mirrored"]).values
    ax.set(
        xlabel=dataset.time.attrs["long_name"],
        ylabel="rise / rise by uniform errors",
        ylim=(1.1 * min(np.nanmin(shown), 0), 1.4 * np.nanmax(shown)),
        title="what rounding to nearest adds to the loss",
    )
    style.logarithmic(ax, "x")
    ax.legend(frameon=False, fontsize=8, ncols=2)


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
    ax.legend(frameon=False, fontsize=8)


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
    ax.legend(frameon=False, fontsize=8)


def _labels(ax: Axes, dataset: xr.Dataset) -> None:
    for i, schedule in enumerate(dataset.schedule.values):
        color, at = style.PALETTE[i], dataset.sel(schedule=schedule)
        ax.plot(dataset.step, at.trace_theory, "--", color=color)
        ax.errorbar(
            dataset.step, at.trace, 2 * at.trace_error, fmt="o", ms=4, lw=1, color=color,
            label=str(schedule),
        )  # fmt: skip
    ax.set(
        xlabel=dataset.step.attrs["long_name"],
        ylabel="trace of the Hessian",
        title="label noise balances, and a decay ends that",
    )
    ax.legend(frameon=False, fontsize=8)


def _anneal(ax: Axes, dataset: xr.Dataset) -> None:
    ax.plot(dataset.rate, dataset.anneal_theory, "--", label="theory")
    bars = 2 * dataset.anneal_error
    ax.errorbar(
        dataset.cell_rate, dataset.anneal, bars, fmt="o", ms=4, lw=1, color=style.PALETTE[0]
    )
    ax.set(
        xlabel=dataset.rate.attrs["long_name"],
        ylabel="rise of $a^2 + b^2$",
        title="what a decay adds at one balanced mode",
    )
    ax.legend(frameon=False, fontsize=8)
