"""The figures of `overtraining_further`, one for each message."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.bands import legend
from sail_jax.drawing import style

MARKERS = "os^D"
WAYS = {
    "shifted": ("o", 0, "grids shifted at random"),
    "nearest": ("s", 1, "to nearest"),
    "mirrored": ("^", 2, "to nearest, mirrored layers"),
}
TIME = "pre-training time"


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws a figure for each message, with panels one above the other.

    Dashed lines are theory. Points are simulations of whole matrices. Bars are two standard errors.
    """
    return {
        "best_time": _best_time(dataset),
        "turned": _turned(dataset),
        "rounding": _rounding(dataset),
        "rise": _rise(dataset),
        "sam": _sam(dataset),
        "label_noise": _label_noise(dataset),
    }


def _figure(rows: int, height: float = 2.7, **options: Any) -> tuple[Figure, list[Axes]]:
    """Makes a column of panels that is legible on a phone."""
    figure, axes = style.figure(rows, 1, width=4.8, height=height, **options)
    return figure, list(axes[:, 0])


def _points(ax: Axes, x: xr.DataArray, y: xr.DataArray, error: Any = None, **look: Any) -> None:
    """Draws measurements with two standard errors."""
    look = {"fmt": "o", "ms": 4.5, "lw": 1.2, "color": style.PALETTE[0]} | look
    ax.errorbar(x, y, None if error is None else 2 * error, **look)


def _legend(ax: Axes, **options: Any) -> None:
    ax.legend(**{"frameon": False, "fontsize": style.points(9), **options})


def _best_time(dataset: xr.Dataset) -> Figure:
    """Draws the number of modes worth learning, and when to stop, by the decay of the spectrum."""
    figure, (modes, time) = _figure(2, sharex=True)
    look: dict[str, Any] = {"color": style.PALETTE[0], "label": "theory"}
    modes.plot(dataset.decay, dataset.decay_modes_theory, "--", **look)
    _points(modes, dataset.cell_decay, dataset.decay_modes, label="networks")
    modes.set(ylabel="modes", ylim=(0, None), title="modes worth learning if noise follows")
    time.plot(dataset.decay, dataset.decay_time_theory, "--", **look)
    _points(time, dataset.cell_decay, dataset.decay_time, dataset.decay_time_error)
    latest = dataset.attrs["noise_time"]
    set_by_noise = "latest, set by noise: $\\log(c\\,e^{2τ} - 1)/4c$"
    line = time.axhline(latest, color=style.FAINT, ls=":", label=set_by_noise)
    highest = max(latest, float(dataset.decay_time_theory.max()))
    time.set(
        xlabel=dataset.decay.attrs["long_name"], ylabel=TIME, ylim=(0, 1.3 * highest),
        title="best time to stop if noise follows",
    )  # fmt: skip
    _legend(modes)
    _legend(time, handles=[line], loc="upper left")
    return figure


def _turned(dataset: xr.Dataset) -> Figure:
    """Draws when to stop for a target with U != V."""
    figure, (ax,) = _figure(1, 3.2)
    for start, line, color, words in (
        ("exact", "--", style.PALETTE[0], "theory, $U ≠ V$"),
        ("limit", (0, (1, 2)), style.PALETTE[1], "theory, $U ≠ V$, as $τ → ∞$"),
        ("aligned", "-.", style.FAINT, "theory, $U = V$"),
    ):
        theory = dataset.turned_time_theory.sel(start=start)
        ax.plot(dataset.tau, theory, ls=line, color=color, label=words)
    networks = dataset.turned_time, dataset.turned_time_error
    _points(ax, dataset.tau, *networks, label="networks, $U ≠ V$")
    ax.set(
        xlabel=dataset.tau.attrs["long_name"], ylabel=TIME, ylim=(0, None),
        title="best time to stop, by the initial scale",
    )  # fmt: skip
    _legend(ax)
    return figure


def _rounding(dataset: xr.Dataset) -> Figure:
    """Draws when to stop if weights are rounded, by their bits."""
    figure, (ax,) = _figure(1, 3.6)
    for law, color in (("independent", 0), ("mirrored", 2)):
        theory = dataset.bits_time_theory.sel(law=law)
        ax.plot(dataset.real_bits, theory, "--", color=style.PALETTE[color], label=f"theory, {law}")
    for i, (way, (marker, color, words)) in enumerate(WAYS.items()):
        at = dataset.sel(way=way)
        look = {"fmt": marker, "color": style.PALETTE[color], "label": words}
        _points(ax, dataset.bits + 0.04 * (i - 1), at.bits_time, at.bits_time_error, **look)
    ax.set(
        xlabel=dataset.real_bits.attrs["long_name"], ylabel=TIME, xticks=dataset.bits.values,
        title="best time to stop if rounding follows",
    )  # fmt: skip
    style.logarithmic(ax, "y")
    legend(figure, ncols=2)
    return figure


def _rise(dataset: xr.Dataset) -> Figure:
    """Draws how much rounding to nearest adds to the loss, a panel for each number of bits."""
    bits = dataset.shown_bits.values
    figure, axes = _figure(len(bits), 1.9, sharex=True)
    for ax, shown in zip(axes, bits, strict=True):
        ax.axhline(1, color=style.INK, ls="--", lw=1.2, label="theory: independent errors")
        for way in ("nearest", "mirrored"):
            marker, color, words = WAYS[way]
            at = dataset.sel(way=way, shown_bits=shown)
            look = {"fmt": marker + "-", "lw": 1, "color": style.PALETTE[color], "label": words}
            _points(ax, dataset.time, at.rise, at.rise_error, **look)
        ax.set_title(f"{shown} bits")
        ax.set_ylabel("rise / theory's")
        style.logarithmic(ax, "x")
    axes[-1].set_xlabel(dataset.time.attrs["long_name"])
    legend(figure, axes[0], ncols=2)
    return figure


def _sam(dataset: xr.Dataset) -> Figure:
    """Draws the effect of SAM on modes: when they are learned, and how their layers are
    balanced."""
    figure, (times, balance) = _figure(2, 3.0)
    for i, sigma in enumerate(dataset.mode.values):
        at, color = dataset.sel(mode=sigma), style.PALETTE[i % len(style.PALETTE)]
        drawn = {"fmt": MARKERS[i % len(MARKERS)], "color": color}
        theory = at.sam_time_theory.where(np.isfinite(at.sam_time_theory))
        times.plot(dataset.rho, theory, "--", color=color)
        measured = at.sam_time.where(np.isfinite(at.sam_time))
        _points(times, dataset.cell_rho, measured, **drawn, label=f"mode $σ$ = {sigma:g}")
        balance.plot(dataset.sam_step, at.sam_imbalance_theory, "--", color=color)
        _points(balance, dataset.sam_step, at.sam_imbalance, **drawn)
    times.set(
        xlabel=dataset.rho.attrs["long_name"], ylabel=TIME,
        title="SAM, not normalised: when half of a mode is learned",
    )  # fmt: skip
    balance.set(
        xlabel=dataset.sam_step.attrs["long_name"], ylabel="imbalance $a^2 - b^2$", ylim=(0, None),
        title="normalised SAM at a minimum",
    )  # fmt: skip
    style.logarithmic(times, "y")
    times.plot([], [], "--", color=style.INK, label="theory")
    legend(figure, ncols=4, columnspacing=1)
    return figure


def _label_noise(dataset: xr.Dataset) -> Figure:
    """Draws the effect of label noise on the trace of the Hessian, and the effect of a decay."""
    figure, (trace, anneal) = _figure(2, 3.0)
    for i, schedule in enumerate(dataset.schedule.values.astype(str)):
        color, at = style.PALETTE[i], dataset.sel(schedule=schedule)
        trace.plot(dataset.step, at.trace_theory, "--", color=color)
        look = {"color": color, "fmt": MARKERS[i % len(MARKERS)], "label": f"networks, {schedule}"}
        _points(trace, dataset.step, at.trace, at.trace_error, **look)
    trace.set(
        xlabel=dataset.step.attrs["long_name"], ylabel="trace of the Hessian",
        title="label noise flattens, and a decay ends the flattening",
    )  # fmt: skip
    anneal.plot(dataset.rate, dataset.anneal_theory, "--", color=style.PALETTE[0], label="theory")
    _points(anneal, dataset.cell_rate, dataset.anneal, dataset.anneal_error, label="networks")
    anneal.set(
        xlabel=dataset.rate.attrs["long_name"], ylabel="rise of $a^2 + b^2$", ylim=(0, None),
        title="increase by a decay, for one balanced mode",
    )  # fmt: skip
    trace.plot([], [], "--", color=style.INK, label="theory, at the minimum")
    _legend(trace)
    _legend(anneal)
    return figure
