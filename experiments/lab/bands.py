"""Elements shared by the figures of studies: curves with error bands, and legends."""

from collections.abc import Mapping, Sequence
from typing import Any

import xarray as xr
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import ColorType
from numpy.typing import ArrayLike

from experiments.lab.findings import mean_and_error
from sail_jax.drawing import style


def band(
    ax: Axes,
    x: ArrayLike,
    values: xr.DataArray,
    *,
    color: ColorType,
    alpha: float = 0.25,
    **look: Any,
) -> None:
    """Draws the mean over seeds as a line, and its standard error as a band.

    Args:
      ax: The axes to draw on.
      x: The horizontal positions, `(n,)`.
      values: The measurements, with a dimension "seed" and one of length n. Values that are not
        finite are excluded. A point with fewer than two finite values gets no band.
      color: The colour of the line and the band, in any form that Matplotlib accepts.
      alpha: The opacity of the band, from 0 to 1.
      **look: Further options of the line, for `ax.plot`.
    """
    mean, error = mean_and_error(values)
    ax.plot(x, mean, color=color, **look)
    ax.fill_between(x, mean - error, mean + error, color=color, alpha=alpha, lw=0)


def legend(
    figure: Figure,
    *panels: Axes,
    also: Sequence[Artist] | Mapping[str, Any] = (),
    where: str = "lower center",
    **options: Any,
) -> None:
    """Adds one legend outside the axes, without repeated labels.

    Args:
      figure: The figure.
      *panels: The axes with the curves; all axes if neither these nor `also` are given.
      also: Handles with their own labels, or handles by their labels. They come last.
      where: The position, as for `Figure.legend` after "outside".
      **options: Further options of `Figure.legend`, such as `title` and `ncols`.
    """
    entries: dict[str, Any] = {}
    for ax in panels if panels or also else figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    labelled = isinstance(also, Mapping)
    entries |= also if labelled else {str(handle.get_label()): handle for handle in also}
    look = {"loc": f"outside {where}", "frameon": False, "fontsize": style.points(9)}
    figure.legend(list(entries.values()), list(entries), **look | options)
