"""Curves over seeds as figures draw them."""

from typing import TYPE_CHECKING, Any

from experiments.lab.findings import mean_and_error

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes


def band(
    ax: "Axes", x: Any, values: "xr.DataArray", *, color: Any, alpha: float = 0.25, **look: Any
) -> None:
    """The mean over seeds as a line of that `look`, and its standard error as a band of `alpha`."""
    mean, error = mean_and_error(values)
    ax.plot(x, mean, color=color, **look)
    ax.fill_between(x, mean - error, mean + error, color=color, alpha=alpha, lw=0)
