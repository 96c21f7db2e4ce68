"""Panels for several studies: legends over them, and rows of means with error bars."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.lab.findings import mean_and_error
from sail_jax.drawing import style

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def legend(
    fig: "Figure", *panels: "Axes", also: "Sequence[Artist]" = (), below: bool = False, **look: Any
) -> None:
    """Draws one legend above or below a figure, without repeated labels.

    Args:
      fig: The figure.
      *panels: The axes with the curves.
      also: Handles with their own labels, which come last.
      below: Whether the legend is below the figure.
      **look: Further options of `Figure.legend`, such as `title` and `ncols`.
    """
    entries: dict[str, Artist] = {}
    for ax in panels:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    entries |= {str(handle.get_label()): handle for handle in also}
    where = "outside lower center" if below else "outside upper center"
    look = {"frameon": False, "fontsize": 9} | look
    fig.legend(list(entries.values()), list(entries), loc=where, **look)


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
