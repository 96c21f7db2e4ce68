"""The figures of `sail_vision`; in all of them colour and line style say which start."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D

from experiments.lab.bands import band
from experiments.studies.sail_vision.config import WAYS
from experiments.studies.sail_vision.findings import OWN, final, of, paradigms, ways
from experiments.studies.shared.panels import point, rows
from sail_jax.drawing import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {"supervised": "supervised", "byol": "BYOL, linear probe"}
SCRATCH, SAIL = style.FAINT, style.PALETTE[0]  # colours
REST = style.PALETTE[1:]


def plot(dataset: xr.Dataset) -> "dict[str, Figure]":
    """Draws accuracy and loss along training, and final accuracy with steps saved, by start."""
    return {"accuracy": _accuracy(dataset), "loss": _loss(dataset), "final": _final(dataset)}


def _groups(dataset: xr.Dataset, paradigm: str) -> list[list[str]]:
    """Lists SAIL's start beside its sources, then beside other transformations and merges."""
    trained = ways(dataset, paradigm)
    split = [w for w in trained if w in OWN[2:]], [w for w in trained if w not in OWN]
    return [["scratch", "sail", *group] for group in split]


def _looks(shown: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Chooses colours and line styles, the same for a start whichever others are shown."""
    looks = {"scratch": {"color": SCRATCH, "ls": "-"}, "sail": {"color": SAIL, "ls": "-"}}
    for i, way in enumerate(way for way in WAYS if way not in looks):
        looks[way] = {"color": REST[i % len(REST)], "ls": ("--", ":", "-.")[i // len(REST)]}
    return {way: looks[way] for way in shown}


def _label(way: str, paradigm: str = "") -> str:
    """Spells the name of a start for axes and legends."""
    if way == "other" and paradigm:
        return "from BYOL's" if paradigm == "supervised" else "from supervised"
    return {"sail": "SAIL", "first": "first source", "second": "second source"}.get(
        way, way.replace("_", " ")
    )


def _heading(dataset: xr.Dataset) -> str:
    """Says which data a run had, and how many seeds."""
    return f"ResNet on {style.literal(dataset.attrs['data'])}, {dataset.sizes['seed']} seeds"


def _accuracy(dataset: xr.Dataset) -> "Figure":
    """Draws top-1 accuracy along training, a row for each kind of training."""
    shown = paradigms(dataset)
    fig, axes = style.figure(len(shown), 2, width=4.6, height=2.9, sharex=True, sharey="row")
    for row, paradigm in zip(axes, shown, strict=True):
        names = ("beside its sources", "beside other transformations and merges")
        for ax, group, name in zip(row, _groups(dataset, paradigm), names, strict=True):
            looks = _looks(group)
            for way in group:
                curve = 100 * of(dataset, paradigm, "top1", way)
                steps = dataset["step"].values + int(of(dataset, paradigm, "ahead", way))
                band(ax, steps, curve, lw=1.4, alpha=0.2, **looks[way])
            ax.set_title(f"{TITLES[paradigm]}: {name}")
            _legend(ax, looks, paradigm)
        row[0].set_ylabel("top-1 (%)")
    for ax in axes[-1]:
        ax.set_xlabel("steps of the large network")
    fig.suptitle(f"{_heading(dataset)}: mean ± s.e.", fontsize=10)
    return fig


def _legend(ax: "Axes", looks: dict[str, dict[str, Any]], paradigm: str) -> None:
    """Adds a legend of the starts on the right of a panel."""
    lines = [Line2D([], [], label=_label(way, paradigm), **look) for way, look in looks.items()]
    ax.legend(handles=lines, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _loss(dataset: xr.Dataset) -> "Figure":
    """Draws the held-out loss of supervised training, and the training loss of BYOL, by start."""
    shown = paradigms(dataset)
    fig, axes = style.figure(1, len(shown), width=5.2, height=3.2)
    for ax, paradigm in zip(axes[0], shown, strict=True):
        looks = _looks(ways(dataset, paradigm))
        held_out = paradigm == "supervised"
        name = "test_loss" if held_out else "train_loss"
        for way, look in looks.items():
            values = of(dataset, paradigm, name, way)
            steps = dataset["step" if held_out else "batch_step"].values
            at = steps + int(of(dataset, paradigm, "ahead", way))
            band(ax, at, values, lw=1.4, alpha=0.2, **look)
        style.logarithmic(ax, "y")
        ax.set_title("supervised" if held_out else "BYOL")
        ax.set_ylabel("held-out loss (nats)" if held_out else "loss of the batch")
        ax.set_xlabel("steps of the large network")
        _legend(ax, looks, paradigm)
    fig.suptitle(f"{_heading(dataset)}: mean ± s.e.", fontsize=10)
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
    fig.suptitle(f"{_heading(dataset)} (ticks), mean ± s.e.", fontsize=10)
    return fig
