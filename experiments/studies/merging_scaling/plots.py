"""The figures of `merging_scaling`, with panels for each law."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import LogLocator

from experiments.lab.bands import legend
from experiments.lab.findings import mean_and_error
from experiments.studies.merging_scaling.findings import NAMES
from sail_jax.drawing import style

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot(dataset: "xr.Dataset") -> "dict[str, Figure]":
    """Draws the figures of a finished run.

    It returns `excess`, the excess in the testbed; `loss` and `accuracy` of networks; and
    `stability` in both.
    """
    if "network" in dataset.attrs:
        return {"experts": _experts_figure(dataset)}
    return {
        "excess": _laws(dataset, "excess risk", _excess),
        "loss": _laws(dataset, "test loss", _loss),
        "accuracy": _laws(dataset, "test accuracy", partial(_merges, name="accuracy")),
        "stability": _stability_figure(dataset),
    }


def _experts_figure(dataset: "xr.Dataset") -> "Figure":
    """Draws accuracy and loss of merges of pre-trained networks by law (Figs. 2 and 3)."""
    laws = dataset["law"].values.astype(str)
    figure, axes = style.figure(2, len(laws), width=2.9, height=2.5)
    for column, law in zip(axes.T, laws, strict=True):
        at = dataset.sel(law=law)
        at = at.isel(point=np.flatnonzero(np.isfinite(at["value"].values)))
        x = at["value"].values
        for ax, name in zip(column, ("accuracy", "loss"), strict=True):
            for i, merge in enumerate(dataset["merge"].values.astype(str)):
                _bars(ax, x, at[name].sel(merge=merge), style.PALETTE[i], merge)
            ax.set_xticks(x, [f"{v:g}" for v in x])
            ax.set_xlabel(NAMES[law])
        column[0].set_ylabel("test accuracy")
        column[1].set_ylabel("test loss")
    title = f"{dataset.attrs['network']}, mean ± s.e. over groups of tasks"
    legend(figure, axes[0, 0], title=title, ncols=4, where="upper center")
    return figure


def _laws(
    dataset: "xr.Dataset", label: str, draw: "Callable[[Axes, xr.Dataset], None]"
) -> "Figure":
    """Draws a panel for each law, with the quantity `label` along y."""
    laws = dataset["law"].values.astype(str)
    figure, axes = style.panels(len(laws), 3, width=3.2, height=2.7)
    for ax, law in zip(axes, laws, strict=True):
        at = dataset.sel(law=law)
        draw(ax, at)
        _dress(ax, law, at["value"].values)
        ax.set_ylabel(label)
    legend(figure, axes[0], ncols=5, where="upper center")
    return figure


def _excess(ax: "Axes", at: "xr.Dataset") -> None:
    """Draws the excess of the testbed's merges, and their bounds."""
    _testbed_lines(ax, at, "excess")
    dare = at["testbed_dare_excess"]
    ax.plot(at["value"], dare, color=style.PALETTE[2], ls="--", label="exact, DARE")


def _loss(ax: "Axes", at: "xr.Dataset") -> None:
    """Draws the loss of merged networks, and says how large the bound is."""
    _merges(ax, at, "loss")
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    ax.yaxis.set_major_formatter("{x:g}")
    ends = np.log10(at["network_bound_excess"].values[[0, -1]])
    words = "Theorem 3, off the scale: $10^{{{:.1f}}}$ to $10^{{{:.1f}}}$".format(*ends)
    ax.set_title(words, fontsize=style.points(8))


def _merges(ax: "Axes", at: "xr.Dataset", name: str) -> None:
    """Draws loss or accuracy of merged networks."""
    for i, merge in enumerate(at["merge"].values.astype(str)):
        of_merge = at[name].sel(merge=merge)
        _bars(ax, at["value"].values, of_merge, style.PALETTE[i], f"{merge} (± s.e.)")


def _stability_figure(dataset: "xr.Dataset") -> "Figure":
    """Draws stability of the testbed and of networks, with the bound of Theorem 1, by law."""
    laws = dataset["law"].values.astype(str)
    figure, axes = style.figure(len(laws), 2, width=4.2, height=2.5)
    for (bed, network), law in zip(axes, laws, strict=True):
        at = dataset.sel(law=law)
        x = at["value"].values
        _testbed_lines(bed, at, "stability")
        _bars(network, x, at["stability"], style.PALETTE[0], "measured, average (± s.e.)")
        bound = at["network_bound_stability"]
        network.plot(x, bound, color=style.PALETTE[6], ls=":", label="Theorem 1")
        network.set_yscale("log")
        for ax in (bed, network):
            _dress(ax, law, x)
            ax.set_ylabel("$E|x - x'|^2$")
    axes[0, 0].set_title("quadratics, one sample replaced")
    axes[0, 1].set_title("networks, one sample replaced")
    legend(figure, *axes[0], ncols=4, where="upper center")
    return figure


def _testbed_lines(ax: "Axes", at: "xr.Dataset", name: str) -> None:
    """Draws exact values, both bounds and simulations of the testbed."""
    x = at["value"].values
    printed = "Theorem 3" if name == "excess" else "Theorem 1"
    ax.plot(x, at[f"testbed_exact_{name}"], color=style.PALETTE[0], label="exact, average")
    ax.plot(x, at[f"testbed_bound_{name}"], color=style.PALETTE[6], ls=":", label=printed)
    repaired = at[f"testbed_corrected_{name}"]
    ax.plot(x, repaired, color=style.FAINT, ls="-.", label="corrected bound")
    if f"testbed_simulated_{name}" in at:
        error = at[f"testbed_simulated_{name}_error"]
        dots = {"fmt": "o", "ms": 3.5, "color": style.PALETTE[0], "label": "simulated (± s.e.)"}
        ax.errorbar(x, at[f"testbed_simulated_{name}"], error, **dots)
    ax.set_yscale("log")


def _bars(ax: "Axes", x: np.ndarray, values: "xr.DataArray", color: str, label: str) -> None:
    """Draws means over repetitions with their standard errors."""
    mean, error = mean_and_error(values, "replicate")
    line = {"fmt": "o-", "ms": 3.5, "lw": 1, "capsize": 2, "color": color}
    ax.errorbar(x, mean, np.nan_to_num(error), label=label, **line)


def _dress(ax: "Axes", law: str, x: np.ndarray) -> None:
    """Sets a law's logarithmic axis, with a tick at each value."""
    ax.set_xscale("log")
    ax.set_xticks(x, [f"{v:g}" for v in x])
    ax.minorticks_off()
    ax.set_xlabel(NAMES[law])
