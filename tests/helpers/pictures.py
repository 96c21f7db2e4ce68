"""Finds flaws of a drawn figure: texts that overlap or leave it, legends that cover data."""

from collections.abc import Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox

SMALLEST = 8  # points


def texts(figure: Figure) -> Iterator[tuple[str, Text]]:
    """Returns the texts of a drawn figure, with their positions."""
    shown = {text for ax in figure.axes for axis in (ax.xaxis, ax.yaxis) for text in _ticks(axis)}
    hidden = {
        text
        for ax in figure.axes
        for axis in (ax.xaxis, ax.yaxis)
        for text in axis.findobj(Text)
        if text not in shown and text is not axis.label and text is not axis.offsetText
    }
    for text in figure.findobj(Text):
        if text.get_text().strip() and text not in hidden and _visible(text):
            yield text.get_text(), text


def _visible(artist) -> bool:
    """Checks whether an artist and its axes are drawn."""
    return artist.get_visible() and (artist.axes is None or artist.axes.get_visible())


def _ticks(axis) -> Iterator[Text]:
    """The labels of the ticks within the view."""
    if not axis.get_visible() or not axis.axes.axison:
        return
    low, high = sorted(axis.get_view_interval())
    for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
        if low <= tick.get_loc() <= high:
            yield from (text for text in (tick.label1, tick.label2) if text.get_visible())


def flaws(figure: Figure) -> list[str]:
    """Lists what is wrong with a figure at the size at which it is saved."""
    figure.draw_without_rendering()
    page = Bbox([[0, 0], figure.canvas.get_width_height()])
    named = [(name, text.get_window_extent(), text) for name, text in texts(figure)]
    found = []
    for name, box, text in named:
        if text.get_fontsize() < SMALLEST:
            found.append(f"{name!r} has {text.get_fontsize():g} pt")
        if min(box.x0 - page.x0, box.y0 - page.y0, page.x1 - box.x1, page.y1 - box.y1) < -1:
            found.append(f"{name!r} leaves the figure")
    low, high = (
        np.array([corner(box) for _, box, _ in named]).reshape(-1, 2)
        for corner in (lambda box: box.min, lambda box: box.max)
    )
    # For every two boxes. They have margins: letters touch only if more than a pixel is shared each
    # way.
    shared = np.minimum(high[:, None], high) - np.maximum(low[:, None], low)
    for i, j in np.argwhere(np.tril((shared > 1).all(-1), -1)):
        found.append(f"{named[i][0]!r} overlaps {named[j][0]!r}")
    for ax in figure.axes:
        found += _covered(ax)
    return found


def _covered(ax: Axes) -> Iterator[str]:
    legend = ax.get_legend()
    if legend is None:
        return
    box = legend.get_window_extent()
    for line in ax.lines:
        if not isinstance(line, Line2D) or not line.get_visible():
            continue
        at = line.get_transform().transform(np.column_stack(line.get_data()).astype(float))
        inside = (at > (box.x0, box.y0)).all(1) & (at < (box.x1, box.y1)).all(1)
        if inside.any():
            yield f"the legend covers {inside.sum()} points of {line.get_label()!r}"
