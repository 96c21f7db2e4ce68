"""Draws the figures of a report: by depth, by kind of tensor, and by pair of models."""

from collections.abc import Sequence
from itertools import combinations, groupby
from typing import Any

import numpy as np
from matplotlib.artist import getp
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sail_jax.cli.merge_report.measures import KINDS, Bin, Measured, Total, by_depth, kind
from sail_jax.cli.merge_report.words import lettered, short
from sail_jax.drawing import style

_MARKERS = "os^Dv*PX"


def draw(data: Measured, total: Total) -> dict[str, tuple[str, bytes]]:
    """Draws all pictures of a report.

    Args:
      data: The measurements of each tensor.
      total: The sums over all tensors.

    Returns:
      An alternative text and a PNG for each section: "moved", "agree" (with two models or more) and
      "merged".
    """
    bins = by_depth(data.names)
    totals = [data.total(part.members) for part in bins]
    figures = {"moved": _moved(data, bins, totals)}
    if len(data.models) > 1:
        figures["agree"] = _agree(data, total, bins, totals)
    figures["merged"] = _merged(data, bins, totals)
    return {key: (style.describe(fig), style.png(fig)) for key, fig in figures.items()}


def _look(k: int) -> dict[str, Any]:
    """Returns the colour and marker of model k."""
    colours = (*style.PALETTE, style.FAINT)
    return {"color": colours[k % len(colours)], "marker": _MARKERS[k % len(_MARKERS)]}


def _depth(ax: Axes, bins: Sequence[Bin], room: int = 14) -> None:
    """Labels the axis of layers: ticks at some layers, and a stack's name below its first layer."""
    stacks = list(dict.fromkeys(part.run for part in bins if part.run))
    layered = stacks != ["modules"]
    step, named = -(-len(bins) // room), layered or len(bins) <= 10
    ticks, texts, count, run = [], [], 0, ""
    for i, part in enumerate(bins):
        count = 0 if part.run != run else count
        if part.run and run and part.run != run:
            ax.axvline(i - 0.5, color="#8C8C8C", linewidth=0.8)
        close = bool(ticks) and i - ticks[-1] < len(bins) / (2 * room)
        if close and not part.run and ticks[-1]:
            ticks, texts = ticks[:-1], texts[:-1]
        if not part.run or (count % step == 0 and not close):
            first = len(stacks) > 1 and part.run and count == 0
            below = "\n" + style.literal(short(part.run, 14)) if first else ""
            ticks.append(i)
            texts.append((style.literal(short(part.label, 20)) if named else str(i + 1)) + below)
        count, run = count + 1, part.run
    aslant = not layered and max(map(len, texts)) > 4
    ax.set_xticks(ticks, texts, **({"rotation": 45, "ha": "right"} if aslant else {}))
    ax.set_xlim(-0.6, len(bins) - 0.4)
    ax.set_xlabel("layer" if layered else "module" if named else "modules, in their order")


def _line(ax: Axes, bins: Sequence[Bin], values: np.ndarray, label: str, **look: Any) -> None:
    """Draws `values [bin]`: a line within every stack of layers, single marks elsewhere."""
    at = 0
    for run, group in groupby(bins, lambda part: part.run):
        span = range(at, at := at + len(list(group)))
        own = look if run and run != "modules" else {**look, "linestyle": "none"}
        ax.plot(span, values[span], linewidth=1.4, markersize=4, label=style.literal(label), **own)


def _lines(ax: Axes, bins: Sequence[Bin], values: np.ndarray, labels: Sequence[str]) -> None:
    """Draws `values [bin, model]`, a line for each model."""
    for k, label in enumerate(labels):
        _line(ax, bins, values[:, k], label, **_look(k))


def _scaled(ax: Axes, values: np.ndarray) -> None:
    """Makes an axis logarithmic if its values span a wide range."""
    positive = values[np.isfinite(values) & (values > 0)]
    if positive.size and positive.max() > 30 * positive.min():
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, 1.1 * positive.max() if positive.size else 1)


def _legend(fig: Figure, *panels: Axes) -> None:
    """Draws one legend above the figure, with as many columns as fit."""
    parts = [ax.get_legend_handles_labels() for ax in panels]
    marks = [mark for own, _ in parts for mark in own]
    names = [name for _, own in parts for name in own]
    # If several entries have the same name, the last one is kept: a line, if there is one.
    pairs = zip(names, marks, strict=True)
    lines = sorted(pairs, key=lambda pair: getp(pair[1], "linestyle") != "None")
    order = {name: k for k, name in enumerate(names)}
    handles = dict(sorted(dict(lines).items(), key=lambda pair: order[pair[0]]))
    wide = 0.6 + 0.085 * max(map(len, handles), default=0)  # inches of a label with its mark
    columns = max(1, min(len(handles), int(fig.get_figwidth() / wide)))
    fig.legend(
        handles.values(),
        handles.keys(),
        loc="outside upper center",
        frameon=False,
        fontsize=style.points(9),
        ncols=columns,
    )


def _moved(data: Measured, bins: Sequence[Bin], totals: Sequence[Total]) -> Figure:
    """Draws how far each model moved: by depth, and by kind of tensor."""
    fig, axes = style.figure(1, 2, width=4.8, width_ratios=[1.6, 1])
    left, right = axes[0]
    labels = lettered(data.models)
    norms = np.array([subtotal.norms for subtotal in totals])
    _lines(left, bins, norms, labels)
    _scaled(left, norms)
    _depth(left, bins)
    left.set_title("By depth")
    left.set_ylabel("norm of the task vector" if data.deltas else "norm of the weights")
    kinds = [kind(name) for name in data.names]
    shown = [name for name in KINDS if name in kinds]
    rms = np.array(
        [data.total([i for i, own in enumerate(kinds) if own == name]).rms for name in shown]
    )
    offsets = (np.arange(len(labels)) - (len(labels) - 1) / 2) * 0.6 / max(3, len(labels))
    for k, label in enumerate(labels):
        x = np.arange(len(shown)) + offsets[k]
        right.plot(x, rms[:, k], ls="", label=style.literal(label), **_look(k))
    _scaled(right, rms)
    right.set_xticks(range(len(shown)), shown, rotation=25, ha="right")
    right.set_xlim(-0.6, len(shown) - 0.4)
    right.set_title("By kind of tensor")
    right.set_ylabel("root mean square per entry")
    _legend(fig, left)
    return fig


def _agree(data: Measured, total: Total, bins: Sequence[Bin], totals: Sequence[Total]) -> Figure:
    """Draws the cosines between models: over all tensors, and for each pair by depth."""
    m = len(data.models)
    letters = [label.split(" ")[0] for label in lettered(data.models)]
    pairs = list(combinations(range(m), 2))
    tall = max(3.4, 1.6 + 0.16 * len(pairs))
    fig, axes = style.figure(1, 2, width=5.2, height=tall, width_ratios=[1, 1.7])
    left, right = axes[0]
    apart = np.where(np.eye(m, dtype=bool), np.nan, total.cosines)
    by_bin = np.array([[subtotal.cosines[i, j] for subtotal in totals] for i, j in pairs])
    seen = np.abs(np.concatenate([apart.ravel(), by_bin.ravel()]))
    # Half of the largest possible cosine at least, so that small cosines look small.
    limit = min(1, max(0.5, np.nanmax(seen))) if np.isfinite(seen).any() else 1
    options = {"cmap": style.DIVERGING, "vmin": -limit, "vmax": limit}
    # The diagonal is 1 by definition. It is grey, so the colours can show differences of the rest.
    left.imshow(apart, **options)
    left.set_facecolor(style.NOTHING)
    left.grid(visible=False)
    size = style.points(9 if m < 6 else 7)
    for i in range(m):
        for j in range(m):
            text = "–" if np.isnan(total.cosines[i, j]) else f"{total.cosines[i, j]:.2f}"
            dark = i != j and abs(total.cosines[i, j]) > 0.6 * limit
            left.text(j, i, text, ha="center", va="center", fontsize=size,
                      color="white" if dark else style.INK)  # fmt: skip
    left.set_xticks(range(m), letters)
    left.set_yticks(range(m), letters)
    left.set_title("Whole model")
    left.set_xlabel("model")
    left.set_ylabel("model")
    shown = right.imshow(by_bin, aspect="auto", interpolation="nearest", **options)
    bar = fig.colorbar(shown, ax=right, label="cosine (grey: 1 by definition, or undefined)")
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    right.set_facecolor(style.NOTHING)
    right.grid(visible=False)
    right.set_yticks(range(len(pairs)), [f"{letters[i]} {letters[j]}" for i, j in pairs])
    right.tick_params(axis="y", labelsize=style.points(9 if len(pairs) < 12 else 7))
    _depth(right, bins)
    right.set_xlim(-0.5, len(bins) - 0.5)
    right.set_title("By depth")
    right.set_ylabel("pair of models")
    return fig


def _merged(data: Measured, bins: Sequence[Bin], totals: Sequence[Total]) -> Figure:
    """Draws sign conflicts, kept and changed shares, and the update's direction, by depth."""
    labels = lettered(data.models)
    fig, axes = style.figure(1, 3, width=3.4)
    for ax, title in zip(
        axes[0],
        ("Sign conflicts", "Kept (of moved), changed (of all)", "Alignment"),
        strict=True,
    ):
        ax.set_title(title)
        _depth(ax, bins, 8)
    left, middle, right = axes[0]
    shares = 100 * np.array([[part.conflicts, part.changed, part.chance] for part in totals])
    ink = {"color": style.INK, "marker": ".", "linestyle": "--"}
    _line(left, bins, shares[:, 0], "", **{**ink, "linestyle": "-"})
    grey = {"color": style.FAINT, "marker": "_", "linestyle": ":"}
    _line(left, bins, shares[:, 2], "conflicts by chance", **grey)
    left.set_ylabel("% of entries")
    left.set_ylim(-3, 103)
    _lines(middle, bins, 100 * np.array([subtotal.kept for subtotal in totals]), labels)
    _line(middle, bins, shares[:, 1], "changed by the merge", **ink)
    middle.set_ylabel("% of entries")
    middle.set_ylim(-3, 103)
    _lines(right, bins, np.array([subtotal.alignment for subtotal in totals]), labels)
    right.set_ylabel("cosine with the update")
    right.axhline(0, color=style.FAINT, linewidth=0.8)
    low = np.nanmin([np.append(subtotal.alignment, 0.0) for subtotal in totals])
    right.set_ylim(min(-0.05, 1.1 * low), 1.05)
    _legend(fig, middle, left)
    return fig
