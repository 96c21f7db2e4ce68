"""Common elements of the figures of `proximal_spirals` and `proximal_gamma`.

Both show losses along the line gamma theta_1 + (1 - gamma) theta_2 through two models.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D

from experiments.lab.findings import mean_and_error
from experiments.studies.shared import panels
from sail_jax.drawing import style

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

MARKERS = "sDv^P*Xo<>"
DASHES = ("-", (0, (5, 1.5)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (6, 1, 1, 1, 1, 1)))
GAMMA = "γ, weight of θ₁"


def look(i: int) -> dict[str, Any]:
    """Returns the look of the i-th curve of a figure.

    Args:
      i: The number of the curve, from 0.

    Returns:
      The colour and the dashes, as options of `Axes.plot`.
    """
    return {"color": style.PALETTE[i % len(style.PALETTE)], "ls": DASHES[i % len(DASHES)]}


def mark_best(ax: "Axes", values: "xr.DataArray", best: "xr.DataArray", i: int) -> None:
    """Marks the best gamma of every seed, at the height of its lowest loss.

    Args:
      ax: The axes, with gamma along x and the loss along y.
      values: The loss, with dimensions "seed" and "gamma".
      best: The best gamma of each seed.
      i: The number of the curve, which gives the colour.
    """
    heights = values.min("gamma").transpose(*best.dims)
    color = look(i)["color"]
    ax.plot(best, heights, "o", ms=4, mec="white", mew=0.6, color=color, zorder=4, clip_on=False)


def mark_scratch(ax: "Axes", values: "xr.DataArray", i: int) -> None:
    """Marks the mean of training from scratch at the right edge.

    Args:
      ax: The axes.
      values: The values of training from scratch along y, with the dimension "seed".
      i: The number of the curve, which gives the colour.
    """
    mean, _ = mean_and_error(values)
    edge = {"transform": ax.get_yaxis_transform(), "clip_on": False}
    ax.plot(1.0, mean, "<", color=look(i)["color"], ms=5, **edge)


def mark_predicted(ax: "Axes", predicted: "xr.DataArray") -> None:
    """Draws a vertical line at each mean predicted gamma that is in view, with a marker on top.

    Set the range of x first, because it determines which lines are in view.

    Args:
      ax: The axes, with gamma along x.
      predicted: The predicted gammas, with dimensions "way" (the kind of prediction) and "seed".
    """
    low, high = ax.get_xlim()
    for i, way in enumerate(predicted["way"].values):
        x, _ = mean_and_error(predicted.sel(way=way))
        if low < x < high:
            ax.axvline(float(x), color=style.FAINT, lw=0.9, zorder=1)
            at = {"transform": ax.get_xaxis_transform(), "clip_on": False, "zorder": 5}
            ax.plot(x, 1.02, MARKERS[i], ms=5, mfc="white", mec=style.INK, **at)


def predicted_handles(labels: Sequence[str]) -> list[Line2D]:
    """Makes the entries of a legend for the lines of `mark_predicted`.

    Args:
      labels: The names of the kinds of prediction, in order.

    Returns:
      One entry for each kind.
    """
    return [
        Line2D([], [], marker=MARKERS[i], color=style.FAINT, mfc="white", mec=style.INK, ms=5,
               lw=0.9, label=f"predicted: {label}")
        for i, label in enumerate(labels)
    ]  # fmt: skip


def weights(ax: "Axes", rows: Mapping[str, "xr.DataArray"], solid: int, span: np.ndarray):
    """Draws a row for each kind of weight: mean ± standard error over seeds, and each seed as a
    tick.

    A mean outside `span` becomes an arrow at the edge, next to its value.

    Args:
      ax: The axes, with gamma along x.
      rows: The weights by the label of their row, from top to bottom, each with the dimension
        "seed".
      solid: The number of rows, from the first, that are measured. The others are predicted.
      span: The range of gamma that is drawn, `(2,)`.
    """
    ax.axvspan(0, 1, color=style.FAINT, alpha=0.12, lw=0)
    ax.axhline(len(rows) - solid - 0.5, color=style.FAINT, lw=0.8)
    for i, values in enumerate(rows.values()):
        y = len(rows) - 1 - i
        mean, error = map(float, mean_and_error(values))
        color = style.PALETTE[0] if i < solid else style.PALETTE[1]
        if not np.isfinite(mean):
            ax.text(0.5, y, "undefined: sources too alike", ha="center", va="center",
                    fontsize=style.points(8), color=style.INK)  # fmt: skip
        elif not span[0] <= mean <= span[1]:
            edge = span[0] if mean < span[0] else span[1]
            ax.plot(edge, y, "<" if mean < span[0] else ">", color=color, ms=7, clip_on=False)
            inwards = {
                "ha": "left" if mean < span[0] else "right",
                "va": "center",
                "fontsize": style.points(8),
            }
            text = f"{mean:+.1f} ± {error:.1f}"
            ax.annotate(text, (edge, y), (9 if mean < span[0] else -9, 0),
                        textcoords="offset points", **inwards)  # fmt: skip
        else:
            inside = values.values[(values.values >= span[0]) & (values.values <= span[1])]
            ax.plot(inside, [y] * len(inside), "|", color=style.FAINT, ms=7)
            ax.errorbar(mean, y, xerr=error, fmt="o" if i < solid else "D", color=color, ms=5,
                        capsize=3)  # fmt: skip
    panels.rows(ax, list(rows))
    ax.set_xlim(span[0] - 0.1, span[1] + 0.1)
