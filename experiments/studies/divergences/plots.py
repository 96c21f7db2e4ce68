"""The figures of `divergences`."""

from math import pi

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.bands import legend
from experiments.studies.divergences.config import MODES, NORMS
from sail_jax.drawing import style


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws transferability against each distance.

    Returns two figures. "divergences" shows distances of the laws, and in one panel all loads.
    "samples" shows estimates of W_1 from samples.
    """
    laws, axes = style.panels(4, 2, width=4.8, height=3.4)
    _against(axes[0], dataset, "kl", "(a) KL divergence, exact")
    _against(axes[1], dataset, "w1", "(b) Wasserstein-1 of the laws")
    _against(axes[2], dataset, "dudley", "(c) Dudley metric of the laws")
    _loads(axes[3], dataset)
    legend(laws, axes[1], ncols=2)
    samples, axes = style.panels(len(NORMS), 2, width=4.8, height=3.6)
    for ax, letter, norm in zip(axes, "ab", NORMS, strict=True):
        _against_samples(ax, dataset, norm, letter)
    legend(samples, axes[0], ncols=4)
    return {"divergences": laws, "samples": samples}


def _simulated(ax: Axes, x: np.ndarray, dataset: xr.Dataset, x_error=None) -> None:
    """Draws simulated transferability against x; open markers mean angles above 90 degrees."""
    first = dataset.isel(load=0)
    wide = first.theta.values > pi / 2 + 1e-6
    for i, (mode, words) in enumerate(MODES.items()):
        at, color = first.sel(mode=mode), style.PALETTE[i]
        for mask, face, range_ in ((~wide, color, "θ ≤ 90°"), (wide, "white", "θ > 90°")):
            ax.errorbar(
                x[mask],
                at.gain_mean[mask],
                at.gain_std[mask],
                None if x_error is None else x_error[mask],
                fmt="o",
                ms=4,
                lw=0.8,
                color=color,
                mfc=face,
                label=f"{words}, simulated (± 1 s.d.), {range_}",
            )


def _against(ax: Axes, dataset: xr.Dataset, name: str, title: str) -> None:
    """Draws theory and simulation against a distance of the laws."""
    first = dataset.isel(load=0)
    if name == "kl":
        bounds = np.stack([first.kl, first.kl])
        x, error = np.interp(first.theta, first.fine_theta, first.kl), None
    else:
        bounds, x = first[f"{name}_bounds"].values, first[f"{name}_mean"].values
        error = first[f"{name}_std"].values / np.sqrt(dataset.attrs["matchings"])
    for i, (mode, words) in enumerate(MODES.items()):
        theory, color = first.theory.sel(mode=mode), style.PALETTE[i]
        ax.fill_betweenx(theory, *bounds, color=color, alpha=0.25, lw=0)
        for bound in bounds:
            ax.plot(bound, theory, color=color, lw=1)
        ax.plot([], [], color=color, lw=3, alpha=0.6, label=f"{words}, theory (bounds of distance)")
    _simulated(ax, x, dataset, error)
    _finish(ax, title, first[name if name == "kl" else f"{name}_bounds"].attrs["long_name"])


def _against_samples(ax: Axes, dataset: xr.Dataset, norm: str, letter: str) -> None:
    """Draws simulated transferability against estimates of W_1 from samples in d dimensions."""
    first = dataset.isel(load=0)
    estimates = first.sampled_w1.sel(norm=norm)
    wide = np.broadcast_to(first.theta > pi / 2 + 1e-6, estimates.shape)
    for i, (mode, words) in enumerate(MODES.items()):
        gain = np.broadcast_to(first.gain_mean.sel(mode=mode), estimates.shape)
        look = {"ms": 3.5, "mew": 0.8, "color": style.PALETTE[i]}
        for mask, face, range_ in ((~wide, style.PALETTE[i], "≤"), (wide, "white", ">")):
            x, label = estimates.values[mask], f"{words}, θ {range_} 90°"
            ax.plot(x, gain[mask], "o", mfc=face, label=label, **look)
    floor = estimates.isel(theta=0)
    ax.axvspan(float(floor.min()), float(floor.max()), color=style.FAINT, alpha=0.25, lw=0)
    low, high = ax.get_ylim()  # leaves space for the note below all points
    ax.set_ylim(low - 0.12 * (high - low), high)
    ax.annotate(
        "two samples of ONE law",
        (float(floor.min() + floor.max()) / 2, 0.02),
        xycoords=("data", "axes fraction"),
        ha="center",
        fontsize=style.points(8),
        color=style.INK,
    )
    ax.locator_params("x", nbins=5)  # their labels have many digits
    n, d = np.ravel(dataset.attrs["n"])[0], dataset.attrs["d"]
    _finish(
        ax, f"({letter}) $W_1$ of {n} samples in $d$ = {d}", f"estimate of $W_1$, {norm} metric"
    )


def _loads(ax: Axes, dataset: xr.Dataset) -> None:
    """Draws the theory at every load against the KL divergence."""
    for i, load in enumerate(dataset["load"].values):
        for mode, dashes in zip(MODES, ("-", "--"), strict=True):
            theory = dataset.theory.sel(mode=mode, load=load)
            label = f"$n/d$ = {load:g}" if mode == "linear" else None
            ax.plot(dataset.kl, theory, dashes, color=style.PALETTE[2 + i % 5], label=label)
    ax.plot([], [], "-", color=style.INK, label=MODES["linear"])
    ax.plot([], [], "--", color=style.INK, label=MODES["fine_tuning"])
    ax.legend(fontsize=style.points(8), frameon=False, loc="lower left")
    _finish(ax, "(d) one distance, either sign", dataset.kl.attrs["long_name"])


def _finish(ax: Axes, title: str, xlabel: str) -> None:
    """Draws the line T = 0, and sets titles."""
    ax.axhline(0, color=style.INK, lw=0.8, zorder=1)
    ax.set(title=title, xlabel=xlabel, ylabel="transferability $T$")
