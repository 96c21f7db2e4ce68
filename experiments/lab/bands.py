"""What figures of studies have in common: curves with error bands, and legends beside the axes."""

from typing import Any

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import ColorType
from numpy.typing import ArrayLike

from experiments.lab.findings import mean_and_error


def band(
    ax: Axes,
    x: ArrayLike,
    values: xr.DataArray,
    *,
    color: ColorType,
    alpha: float = 0.25,
    **look: Any,
) -> None:
    """Draws the mean over seeds as a line, and its standard error as a band around it.

    Args:
      ax: The axes that are drawn on.
      x: The horizontal positions, `(n,)`.
      values: The measurements, with a dimension "seed" and one of length n. Values that are not
        finite are left out; where fewer than two remain there is no band.
      color: The colour of the line and of the band, in any form that Matplotlib takes.
      alpha: The opacity of the band, from 0 to 1.
      **look: Further options of the line, for `ax.plot`.
    """
    mean, error = mean_and_error(values)
    ax.plot(x, mean, color=color, **look)
    ax.fill_between(x, mean - error, mean + error, color=color, alpha=alpha, lw=0)


def legend(figure: Figure, *entries: Any, where: str = "lower center", **options: Any) -> None:
    """Adds a legend outside of the axes.

    Args:
      figure: The figure.
      *entries: The handles and their labels; without them, what the axes have.
      where: Where it stands, as `Figure.legend` spells it after "outside".
      **options: Further options of `Figure.legend`.
    """
    look = {"loc": f"outside {where}", "frameon": False, "fontsize": 9}
    figure.legend(*entries, **{**look, **options})
