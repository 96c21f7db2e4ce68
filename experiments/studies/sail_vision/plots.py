"""The figures of `sail_vision`; in all of them SAIL's start is blue, and scratch grey."""

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from experiments.lab.bands import band
from experiments.studies.sail_vision.config import MERGES, OTHER
from experiments.studies.sail_vision.findings import final, of, paradigms, ways
from experiments.studies.shared.panels import LOOKS, below, point, rows
from sail_jax.drawing import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {"supervised": "supervised", "byol": "BYOL, linear probe"}
FIGURES = {"supervised": "", "byol": "_byol"}  # endings of their names
PAIR = ("scratch", "sail")  # in all panels
SCRATCH, SAIL = style.FAINT, style.PALETTE[0]  # colours


def plot(dataset: xr.Dataset) -> "dict[str, Figure]":
    """Draws accuracy and loss along training, for each kind of training, and final accuracy."""
    curves = {
        name + suffix: _curves(dataset, paradigm, name)
        for paradigm, suffix in FIGURES.items()
        if paradigm in paradigms(dataset)
        for name in ("accuracy", "loss")
    }
    return {**curves, "final": _final(dataset)}


def _label(way: str, paradigm: str = "") -> str:
    """Formats the name of a start for axes and legends."""
    if way == "other" and paradigm:
        return "from BYOL's" if paradigm == "supervised" else "from supervised"
    return {"sail": "SAIL", "first": "first source", "second": "second source"}.get(
        way, way.replace("_", " ")
    )


def _heading(dataset: xr.Dataset) -> str:
    """Returns the data of a run and the number of seeds, as text."""
    return f"ResNet on {style.literal(dataset.attrs['data'])}, {dataset.sizes['seed']} seeds"


def _curves(dataset: xr.Dataset, paradigm: str, quantity: str) -> "Figure":
    """Draws curves during training: a panel for sources and merges, and one for growth.

    Both have SAIL's start and scratch. The loss is the held-out loss in supervised training, and
    the batch's loss in BYOL.
    """
    others = [way for way in ways(dataset, paradigm) if way not in PAIR]
    models = [way for way in others if way in (*MERGES, OTHER)]
    grown = [way for way in others if way not in models]
    groups = {"sources and merges": models, "growth and other transformations": grown}
    groups = {title: group for title, group in groups.items() if group} or {"": []}
    fig, axes = style.panels(len(groups), 2, width=4.8, height=3.8, sharey=True)
    name, scale, label = {
        "accuracy": ("top1", 100, "top-1 (%)"),
        "loss": ("test_loss", 1, "held-out loss") if paradigm == "supervised" else
                ("train_loss", 1, "loss of the batch"),
    }[quantity]  # fmt: skip
    at = dataset["batch_step" if name == "train_loss" else "step"].values
    for ax, (title, group) in zip(axes, groups.items(), strict=True):
        looks = [{"color": SCRATCH}, {"color": SAIL}, *LOOKS[1:]]
        for way, look in zip((*PAIR, *group), looks, strict=False):
            curve = scale * of(dataset, paradigm, name, way)
            steps = at + int(of(dataset, paradigm, "ahead", way))
            band(ax, steps, curve, lw=1.5, alpha=0.2, label=_label(way, paradigm), **look)
        ax.set(title=title, xlabel="steps")
        below(ax, ncols=3)
        if quantity == "loss":
            style.logarithmic(ax, "y")
    axes[0].set_ylabel(label)
    fig.suptitle(f"{TITLES[paradigm]}: {_heading(dataset)}, mean ± s.e.", fontsize=style.points(10))
    return fig


def _final(dataset: xr.Dataset) -> "Figure":
    """Draws final accuracies and the steps saved against scratch, with a tick for each seed."""
    shown = paradigms(dataset)
    most = max(len(ways(dataset, paradigm)) for paradigm in shown)
    fig, axes = style.figure(len(shown), 3, width=3.2, height=0.9 + 0.27 * most, sharey="row")
    for row, paradigm in zip(axes, shown, strict=True):
        names = ways(dataset, paradigm)
        order = np.argsort(final(dataset, paradigm).mean("seed").values, kind="stable")
        values = {
            f"top-1 (%), {TITLES[paradigm]}": final(dataset, paradigm),
            "top-5 (%)": 100 * of(dataset, paradigm, "top5")[..., -1],
            "steps saved to scratch's best": of(dataset, paradigm, "saved"),
        }
        for ax, (label, array) in zip(row, values.items(), strict=True):
            for y, i in enumerate(order):
                color = {"scratch": SCRATCH, "sail": SAIL}.get(names[i], style.INK)
                point(ax, y, array.isel(way=i), ticks=7, color=color, ms=5)
            ax.set_xlabel(label)
        row[2].axvline(0, color=style.INK, lw=0.8)
        rows(row[0], [_label(names[i], paradigm) for i in order[::-1]])
    fig.suptitle(f"{_heading(dataset)} (ticks), mean ± s.e.", fontsize=style.points(10))
    return fig
