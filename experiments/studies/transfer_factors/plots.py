"""The figures of `transfer_factors`."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.bands import legend
from experiments.studies.shared.transfer_plots import (
    DOTS,
    NAMES,
    NEAR,
    heat,
    layers,
    limits,
    points,
)
from sail_jax.drawing import style

FACTORS = {
    "spectrum": "decay exponent of the input spectrum",
    "time": "training time $t$",
    "source": "source load $n_s/d$",
}


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws the figures of the study.

    Returns the figures by name: the diagrams of both modes of transfer if there is a theory of
    fine-tuning, and "stopped", the risk of fine-tuning against the load, if training time varies.
    """
    figures = {}
    if not bool(np.isnan(dataset.fine_tuning_theory).any()):
        figures[f"transfer_by_{dataset.attrs['factor']}"] = _by_factor(dataset)
    if dataset.attrs["factor"] == "time":
        figures["stopped"] = _stopped(dataset)
    return figures


def _by_factor(dataset: xr.Dataset) -> Figure:
    """Draws transferability over the load and one more factor, for both modes of transfer.

    Args:
      dataset: The dataset of `transfer_factors`.

    Returns:
      The figure: a map of theory, and curves of theory with measured points.
    """
    factor, values = dataset.attrs["factor"], dataset.value.values
    figure, axes = style.figure(2, 2, width=4.8, height=3.7)
    rows = np.arange(values.size)
    d, draws = dataset.attrs["d"], dataset.attrs["draws"]
    for (left, right), mode in zip(axes, NAMES, strict=True):
        name, dots = NAMES[mode], DOTS[mode]
        if mode == "fine_tuning" and dataset.attrs["factor"] == "time":
            dots = "gradient flow"
        if mode == "fine_tuning":
            name += f" {layers(dataset.attrs['depth'])}"
        theory = dataset[f"{mode}_theory"].values
        heat(left, dataset["load"].values, rows, theory, limits(dataset, theory))
        left.set_yticks(rows, [_value(v) for v in values])
        left.set(xlabel="load $n/d$", ylabel=FACTORS[factor], title=f"{name}\ntheory, $d$ = {d}")
        for i, value in enumerate(values):
            color = style.PALETTE[i % len(style.PALETTE)]
            at = dataset.isel(value=i)
            _broken(right, at["load"].values, at[f"{mode}_theory"].values, color)
            points(right, at, mode, "load", color=color, label=_value(value))
        right.axhline(0, color=style.INK, lw=0.8)
        far = np.abs(dataset["load"].values - 1) > NEAR
        reach = 1.3 * np.abs(dataset[f"{mode}_mean"].values[:, far]).max()
        right.set(
            xlabel="load $n/d$",
            ylabel="transferability $T$",
            ylim=(-reach, reach),
            title=f"theory (lines), {dots} on {draws} data sets\n"
            "(± 1 s.e.; colours share data; open: median)",
        )
    legend(figure, axes[0, 1], title=FACTORS[factor], ncols=len(values))
    return figure


def _stopped(dataset: xr.Dataset) -> Figure:
    """Draws the risk of fine-tuning against the load, one colour for each training time.

    Lines are theory, if there is one. Points are means over the draws. Near n = d risks have heavy
    tails, and points are open.

    Args:
      dataset: The dataset of `transfer_factors` with varying training time.

    Returns:
      The figure.
    """
    figure, ((ax,),) = style.figure(1, 1, width=6.4, height=4.4)
    at = dataset.sel(way="fine_tuning")
    near = np.abs(at["load"].values - 1) < NEAR
    for i, time in enumerate(at.value.values):
        color = style.PALETTE[i % len(style.PALETTE)]
        at_time = at.isel(value=i)
        mean, spread = (
            at_time.risk_mean.values,
            at_time.risk_std.values / np.sqrt(at.attrs["draws"]),
        )
        _broken(ax, at_time["load"].values, at_time.risk_theory.values, color)
        look: dict[str, Any] = {"fmt": "o", "ms": 4, "lw": 1, "color": color}
        ax.errorbar(
            at_time["load"].values[~near], mean[~near], spread[~near], label=_value(time), **look
        )
        ax.errorbar(at_time["load"].values[near], mean[near], spread[near], mfc="white", **look)
    theta, sigma = np.degrees(at.attrs["theta"]), at.attrs["sigma"]
    ax.set(
        xlabel="load $n/d$",
        ylabel="risk after fine-tuning",
        yscale="log",
        title=f"Fine-tuning {layers(at.attrs['depth'])}, stopped at $t$; $θ$ = {theta:g}°, "
        f"$σ$ = {sigma:g}\n(lines: theory; points: mean ± 1 s.e. of {at.attrs['draws']} draws "
        "shared by the colours, open near $n/d$ = 1: heavy tails)",
    )
    ax.legend(title="training time $t$", frameon=False, fontsize=style.points(9), loc="best")
    return figure


def _broken(ax: Axes, x: np.ndarray, y: np.ndarray, color: str) -> None:
    """Draws a curve in two pieces, so that it does not cross the divergence at load = 1."""
    for side in (x < 1, x > 1):
        ax.plot(x[side], y[side], color=color, lw=1.4)


def _value(value: float) -> str:
    """Formats a value of a factor."""
    return "∞" if np.isinf(value) else f"{value:g}"
