"""Panels shared by several studies: rows of means with error bars, and many curves."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.lab.findings import mean_and_error
from sail_jax.drawing import style

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

LOOKS = [{"color": color, "ls": dashes} for dashes in ("-", "--") for color in style.PALETTE]
"""Looks of curves in one panel: twice as many as there are colours."""


def below(ax: "Axes", *, ncols: int) -> None:
    """Adds a legend below the horizontal axis of a panel.

    Args:
      ax: The axes.
      ncols: The number of columns.
    """
    # The pad, in multiples of the font size, leaves room for ticks and the axis label.
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 4}
    ax.legend(ncols=ncols, frameon=False, fontsize=style.points(9), **place)


def rows(ax: "Axes", names: Sequence[str]) -> None:
    """Labels rows of points, from top to bottom; the last has height 0.

    Args:
      ax: The axes.
      names: The labels; empty strings for rows that another panel labels.
    """
    ax.set_yticks(range(len(names)), list(names)[::-1])
    ax.set_ylim(-0.6, len(names) - 0.4)


def point(ax: "Axes", y: float, values: "xr.DataArray", *, ticks: int = 0, **look: Any) -> None:
    """Draws the mean of repetitions with its standard error, at a height.

    Args:
      ax: The axes.
      y: The height.
      values: The measurements, with only the dimension "seed".
      ticks: The size of a tick for each repetition; 0 draws none.
      **look: Options of `Axes.errorbar`.
    """
    mean, error = map(float, mean_and_error(values))
    if ticks:
        ax.plot(values, [y] * values.size, "|", color=style.FAINT, ms=ticks)
    ax.errorbar(mean, y, xerr=error, **{"fmt": "o", "capsize": 3} | look)
