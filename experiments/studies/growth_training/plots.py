"""The figures of `growth_training`. In all but "loss", colours mean kinds of growth."""

import itertools
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.lab.bands import legend
from experiments.lab.findings import mean_and_error
from experiments.studies.shared.growth_ways import LEARNED, SCRATCH
from experiments.studies.shared.panels import LOOKS, below
from sail_jax.drawing import style

KINDS = {
    "preserves the function": style.PALETTE[0],
    "does not preserve it": style.PALETTE[1],
    "learned maps": style.PALETTE[2],
}


MARKERS = dict(zip(KINDS, "oDs", strict=True))
EPS = float(np.finfo(np.float32).eps)


TASKS = {
    "text": "GPT on Python source",
    "images_mlp": "MLP on {data}",
    "images_resnet": "ResNet on {data}",
}


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws the figures of a finished run."""
    return {"loss": _loss(dataset), "saved": _saved(dataset), "step0": _step0(dataset)}


def _methods(dataset: xr.Dataset) -> list[str]:
    """Returns the growth methods of the run, without training from scratch."""
    return [m for m in dataset["way"].values.astype(str) if m != SCRATCH]


def _kind(dataset: xr.Dataset, method: str) -> str:
    """Returns the kind of a method, one of `KINDS`."""
    if method in LEARNED:
        return "learned maps"
    return "preserves the function" if dataset["exact"].sel(way=method) else "does not preserve it"


def _kinds(dataset: xr.Dataset) -> list[str]:
    """Returns the kinds that occur in this run, in the order of `KINDS`."""
    kinds = {_kind(dataset, method) for method in _methods(dataset)}
    return [kind for kind in KINDS if kind in kinds]


def _label(method: str) -> str:
    return method.replace("_", " ")


def _heading(dataset: xr.Dataset) -> str:
    """Returns the task, its data and the number of seeds, for titles."""
    task, data = str(dataset.attrs["task"]), style.literal(dataset.attrs.get("data", ""))
    # In a run of an earlier version, the name of the task includes the data.
    return f"{TASKS.get(task, task).format(data=data)}, {dataset.sizes['seed']} seeds"


def _loss(dataset: xr.Dataset) -> Figure:
    """Draws learning curves: a panel for each kind of growth, with training from scratch."""
    kinds = _kinds(dataset)
    fig, axes = style.panels(len(kinds), 3, width=3.2, height=4.2, sharex=True, sharey=True)
    start = float(dataset["source_loss"][:, -1].mean())
    level = float(dataset["level"].sel(way=SCRATCH).mean())
    low, common = float(dataset["loss"].min()), {}
    for ax, kind in zip(axes, kinds, strict=True):
        common = {
            "from scratch": _band(ax, dataset, SCRATCH, color=style.FAINT),
            "lowest from scratch": ax.axhline(level, color=style.INK, lw=0.8, ls="--"),
            "the small network": ax.axhline(start, color=style.FAINT, lw=1, ls=":"),
        }
        of_kind = [method for method in _methods(dataset) if _kind(dataset, method) == kind]
        for method, look in zip(of_kind, itertools.cycle(LOOKS), strict=False):
            _band(ax, dataset, method, label=_label(method), **look)
        ax.set(title=kind, xlabel="steps of the large network")
        below(ax, ncols=1)
    # From scratch, the initial loss is much larger. The axis shows its later course, and all grown
    # networks.
    scratch = dataset["loss"].sel(way=SCRATCH).mean("seed").values
    top = max(start + 0.8 * (start - low), float(scratch[len(scratch) // 3])) + 1e-3
    axes[0].set(ylim=(low - 0.08 * (top - low), top), ylabel="held-out loss (nats)")
    title = f"{_heading(dataset)}: mean ± s.d."
    legend(fig, also=common, title=title, ncols=3, where="upper center")
    return fig


def _band(ax: Axes, dataset: xr.Dataset, method: str, **look: Any) -> Line2D:
    """Draws a method's mean loss over seeds, with its standard deviation as a band.

    Steps for learning maps are included: they shift the curve to the right. It returns the line.
    """
    of_method = dataset.sel(way=method)
    steps = of_method["step"].values + int(of_method["learning_steps"])
    mean, spread = (
        of_method["loss"].mean("seed").values,
        of_method["loss"].std("seed", ddof=1).values,
    )
    (line,) = ax.plot(steps, mean, lw=1.4, **look)
    ax.fill_between(steps, mean - spread, mean + spread, color=look["color"], alpha=0.2, lw=0)
    return line


def _saved(dataset: xr.Dataset) -> Figure:
    """Draws steps and compute saved, for each seed and as a mean with its standard error."""
    methods = _methods(dataset)
    shown = dataset.sel(way=methods)
    order = np.argsort(shown["saved"].mean("seed").values)
    panels = {
        "saved": "steps saved (± s.e.)",
        "compute_saved": "compute saved, without\nthe small network's",
        "compute_saved_with_source": "compute saved, with\nthe small network's",
    }
    fig, axes = style.figure(1, 3, width=3.2, height=1.4 + 0.27 * len(methods), sharey=True)
    for ax, (name, label) in zip(axes[0], panels.items(), strict=True):
        scale = 1 if name == "saved" else 100
        values = scale * shown[name]
        mean, error = mean_and_error(values)
        ax.axvline(0, color=style.INK, lw=0.8)
        for y, i in enumerate(order):
            kind = _kind(dataset, methods[i])
            per_seed = values.isel(way=i).values
            ax.plot(per_seed, [y] * per_seed.size, "|", color=style.FAINT, ms=7)
            look = {"fmt": MARKERS[kind], "color": KINDS[kind], "capsize": 3, "ms": 5}
            ax.errorbar(mean[i], y, xerr=error[i], **look)
        ax.set_xlabel(label if name == "saved" else f"{label} (%, ± s.e.)")
    axes[0, 0].set_yticks(range(len(order)), [_label(methods[i]) for i in order])
    axes[0, 0].set_ylim(-0.6, len(order) - 0.4)
    _legend(fig, dataset, f"{_heading(dataset)} (ticks), to the lowest loss that both reach")
    return fig


def _legend(fig: Figure, dataset: xr.Dataset, title: str) -> None:
    """Adds the legend of the kinds of growth above the figure."""
    handles = [
        Line2D([], [], ls="", marker=MARKERS[kind], color=KINDS[kind], label=kind)
        for kind in _kinds(dataset)
    ]
    legend(fig, also=handles, title=title, ncols=3, where="upper center")


def _step0(dataset: xr.Dataset) -> Figure:
    """Draws the change of the loss by growth on a log scale, next to the size of rounding
    errors."""
    methods = _methods(dataset)
    moved = abs(dataset["step0_excess"].sel(way=methods))
    order = np.argsort(-moved.mean("seed").values, kind="stable")
    floor = EPS / 10
    fig, axes = style.figure(width=6.2, height=1.4 + 0.27 * len(methods))
    ax = axes[0, 0]
    ax.axvspan(floor, 10 * EPS**0.5, color=style.FAINT, alpha=0.15, lw=0)
    for y, i in enumerate(order):
        kind = _kind(dataset, methods[i])
        # A logarithmic axis cannot show zeros, which are drawn at its lower end.
        per_seed = np.maximum(moved.isel(way=i).values, floor)
        ax.plot(per_seed, [y] * per_seed.size, MARKERS[kind], color=KINDS[kind], ms=5, alpha=0.7)
    ax.set_xscale("log")
    ax.set_xlim(left=floor / 2)
    ax.set_yticks(range(len(order)), [_label(methods[i]) for i in order])
    ax.set_ylim(-0.6, len(order) - 0.4)
    ax.set_xlabel("|loss right after growth − loss of the small network| (nats)")
    ax.set_title("shaded: up to 10 √ε of float32 (zeros at ε/10)")
    _legend(fig, dataset, f"{_heading(dataset)}, one point each")
    return fig
