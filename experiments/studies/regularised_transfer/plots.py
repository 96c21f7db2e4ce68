"""The figures of `regularised_transfer`."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.bands import legend
from experiments.lab.findings import mean_and_error
from experiments.studies.shared.transfer_plots import heat
from sail_jax.drawing import style

DOTS: dict[str, Any] = {"fmt": "o", "ms": 3.5, "lw": 1}
LINE: dict[str, Any] = {"color": style.INK, "lw": 1.6, "ls": "--"}


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws which strategies gain over ridge regression, and where.

    Returns two figures. "regularised" shows a map for each strategy, and slices of all maps.
    "sources" shows the boundary of L2-SP by the number of the source's samples, and a source
    that helps only if samples are few.
    """
    maps, (*axes, last) = style.panels(dataset.sizes["way"] + 1, 2, width=4.8, height=3.6)
    for ax, way in zip(axes, dataset.way.values, strict=True):
        _map(ax, dataset, str(way))
    _slices(last, dataset)
    legend(maps, axes[0], ncols=2)
    sources, ((left, right),) = style.figure(1, 2, width=4.8, height=3.8)
    _sources(left, dataset)
    _unequal(right, dataset)
    return {"regularised": maps, "sources": sources}


def _map(ax: Axes, dataset: xr.Dataset, way: str) -> None:
    """Draws the gain of one strategy, and the angle beyond which it hurts, in theory and
    measured."""
    at, d = dataset.sel(way=way), dataset.attrs["d"]
    x, y = dataset.n.values / d, np.degrees(dataset.fine_theta.values)
    heat(ax, x, y, at.theory.values.T, 0.5)
    ax.plot(x, np.degrees(at.line), **LINE, label="equal to ridge regression, in theory")
    if way == "linear transfer":
        ax.plot(
            x,
            np.degrees(dataset.line_printed),
            color=style.INK,
            lw=1.2,
            ls=":",
            label="equal to training without a penalty",
        )
        shown = (dataset.line_limit.values > x[0]) & (dataset.line_limit.values < x[-1])
        ax.plot(
            dataset.line_limit.values[shown],
            y[shown],
            color=style.PALETTE[2],
            lw=1.4,
            label="$n/d = \\cos^2 θ\\,(1 + σ^2 / \\sin^2 θ)$, the limit",
        )
    angles, errors = _crossings(at)
    ax.errorbar(
        at["load"],
        angles,
        errors,
        color=style.INK,
        label="equal to ridge regression, own data at each load (± 1 s.e.)",
        **DOTS,
    )
    names = {"linear transfer": "Linear transfer", "direction": "Free direction"}
    sigma = dataset.attrs["sigma"]
    ax.set(
        xlabel="load $n/d$",
        ylabel="angle $θ$ (degrees)",
        title=f"{names.get(way, way)}: gain over ridge\n$σ$ = {sigma:g}, $d$ = {d}",
        xlim=(x[0], x[-1]),
        ylim=(0, 90),
    )
    ax.set_yticks([0, 30, 60, 90])


def _crossings(at: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Finds where measured mean gains change sign, in degrees; NaN without a change.

    The error is the gain's error divided by its slope.
    """
    mean, error = mean_and_error(at.gain, "draw")
    theta, found = np.degrees(at.theta.values), []
    for row, spread in zip(mean, error, strict=True):
        k = int(np.argmax(row <= 0))
        if k == 0:
            found.append((np.nan, np.nan))
            continue
        slope = (row[k - 1] - row[k]) / (theta[k] - theta[k - 1])
        found.append((theta[k - 1] + row[k - 1] / slope, spread[k - 1 : k + 1].mean() / slope))
    angles, errors = np.array(found).T
    return angles, errors


def _slices(ax: Axes, dataset: xr.Dataset) -> None:
    """Draws gains by angle at the load nearest to 1/2."""
    at = dataset.sel(load=0.5, method="nearest")
    theory = dataset.theory.sel(n=round(float(at["load"]) * dataset.attrs["d"]))
    mean, error = mean_and_error(at.gain, "draw")
    for i, way in enumerate(dataset.way.values):
        color = style.PALETTE[i]
        ax.plot(np.degrees(dataset.fine_theta), theory.sel(way=way), color=color)
        shift = 0.6 * (i - 1)  # degrees, because some points coincide
        angles = np.degrees(at.theta.values) + shift
        ax.errorbar(angles, mean[i], error[i], color=color, label=way, **DOTS)
    ax.axhline(0, color=style.INK, lw=0.8)
    ax.set(
        xlabel="angle $θ$ (degrees)",
        ylabel="gain over ridge regression",
        title=f"$n/d$ = {float(at['load']):.2g}: exact (lines),\n"
        f"{dataset.attrs['draws']} data sets shared by all points (± 1 s.e.)",
    )
    ax.set_xticks([0, 30, 60, 90])
    ax.set_ylim(ax.get_ylim()[0] * 1.9, None)
    ax.legend(frameon=False, fontsize=style.points(9), loc="lower left")


def _sources(ax: Axes, dataset: xr.Dataset) -> None:
    """Draws the angle up to which L2-SP helps by the number of source samples."""
    ratio = dataset.source_n.values / dataset.attrs["d"]
    labels = {"least norm": "least-norm source", "best ridge": "source with its best ridge"}
    for i, fit in enumerate(dataset.fit.values):
        at, color = dataset.sel(fit=fit), style.PALETTE[i]
        mean, error = mean_and_error(np.degrees(at.boundary), "group")
        ax.plot(ratio, np.degrees(at.boundary_theory), color=color)
        ax.errorbar(dataset.source_load, mean, error, color=color, label=labels[str(fit)], **DOTS)
    style.logarithmic(ax, "x")
    ax.set(
        xlabel="load of the source $n_s/d$",
        ylabel="L2-SP helps up to this angle (degrees)",
        title=f"Source noise $σ_s$ = {dataset.attrs['source_sigma']:g}:\n"
        "exact (lines), shared data (± 1 s.e.)",
        ylim=(-3, 88),
    )
    ax.set_yticks([0, 15, 30, 45, 60])
    ax.legend(frameon=False, fontsize=style.points(9), loc="upper left")


def _unequal(ax: Axes, dataset: xr.Dataset) -> None:
    """Draws L2-SP's gain by load, where the tasks differ in directions of small variance."""
    mean, error = mean_and_error(dataset.unequal, "draw")
    x = dataset.n.values / dataset.attrs["d"]
    ax.plot(x, dataset.unequal_theory, color=style.PALETTE[0], label="limit $n, d → ∞$")
    ax.errorbar(
        dataset["load"],
        mean,
        error,
        color=style.PALETTE[1],
        label="own data at each load (± 1 s.e.)",
        **DOTS,
    )
    ax.axhline(0, color=style.INK, lw=0.8)
    large, small = dataset.attrs["variances"]
    ax.set(
        xlabel="load $n/d$",
        ylabel="gain of L2-SP over ridge regression",
        title=f"Variance {large:g} where tasks agree,\n{small:g} where they are opposite",
    )
    ax.set_ylim(None, ax.get_ylim()[1] * 1.5)
    ax.legend(frameon=False, fontsize=style.points(9), loc="upper right")
