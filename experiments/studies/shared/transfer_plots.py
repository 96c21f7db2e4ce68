"""Common elements of the figures of transfer: words, colours, and measured points.

`transfer_phase` and `transfer_factors` draw with them.
"""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from experiments.studies.shared.transfer_regions import ROUNDING
from sail_jax.drawing import style

NAMES = {"linear": "Linear transfer", "fine_tuning": "Fine-tuning"}
MEASURED = {
    "linear": "simulation: least squares",
    # The averaged estimator also uses the theoretical scale c, so it does not test c.
    "fine_tuning": "estimator, averaged over data",
}
DOTS = {"linear": "least squares", "fine_tuning": "estimator"}
CLOSED = {"linear": "closed form", "fine_tuning": "closed form (limit)"}
NEAR = 0.1  # |load - 1| below which rare draws dominate means, and quantiles are shown


def layers(depth: float) -> str:
    """Formats a number of layers.

    Args:
      depth: The number; inf is allowed.

    Returns:
      The words.

    >>> layers(1), layers(float("inf"))
    ('1 layer', '∞ layers')
    """
    return "∞ layers" if np.isinf(depth) else f"{depth:g} layer{'s' if depth > 1 else ''}"


def heat(ax: Axes, x: np.ndarray, y: np.ndarray, values: np.ndarray, reach: float = 1.0) -> None:
    """Draws transferability as colours: orange if transfer helps, purple if it hurts.

    Args:
      ax: The axes.
      x: Columns of the map.
      y: Rows of the map.
      values: Transferability, `(y, x)`.
      reach: The value at the ends of the colour scale.
    """
    looks: dict[str, Any] = {"cmap": style.DIVERGING, "vmin": -reach, "vmax": reach}
    style.heatmap(ax, values, x=x, y=y, label="$T$", **looks)


def limits(at: xr.Dataset, *maps: np.ndarray) -> float:
    """Chooses the value at the ends of the colour scale.

    Args:
      at: The dataset. Its attribute `limits` is the value if it exists.
      *maps: The shown values, from which the value is chosen otherwise.

    Returns:
      The value.
    """
    return at.attrs.get("limits") or _reach(*maps)


def _reach(*maps: np.ndarray) -> float:
    """Returns the value at the ends of the colour scale, chosen from the data.

    It exceeds 95 % of the values of the sign with smaller values, and 75 % of all values.
    Near n = d gains are unbounded, and losses would be invisible at their scale. Values beyond it
    are clipped, and the bar has a pointed end.
    """
    values = np.concatenate([np.ravel(values) for values in maps])
    some = values[np.isfinite(values) & (np.abs(values) > ROUNDING)]
    if not some.size:
        return 1.0
    signs = [np.abs(side) for side in (some[some > 0], some[some < 0]) if side.size]
    smaller = min(float(np.quantile(side, 0.95)) for side in signs)
    return max(smaller, float(np.quantile(np.abs(some), 0.75)))


def points(
    ax: Axes,
    at: xr.Dataset,
    mode: str,
    x: str,
    *,
    color: str,
    label: str | None = None,
    quantiles: bool = True,
) -> None:
    """Draws measured means with standard errors.

    Near load = 1, where the variance is infinite, open markers show the median and the central 68 %
    of the draws instead.

    Args:
      ax: The axes.
      at: The dataset with a single value of all dimensions but the horizontal one.
      mode: "linear" or "fine_tuning".
      x: The name of the horizontal coordinate.
      color: The colour of markers and bars.
      label: The entry in the legend; None for no entry.
      quantiles: Whether medians are shown near load = 1. If not, means are shown everywhere.
    """
    near = quantiles & (np.abs(at["load"].values - 1) < NEAR) & np.ones(at[x].size, bool)
    stderr = at[f"{mode}_std"].values / np.sqrt(at.attrs["draws"])
    look: dict[str, Any] = {"fmt": "o", "ms": 3.5, "lw": 1, "color": color}
    mean = at[f"{mode}_mean"].values
    ax.errorbar(at[x].values[~near], mean[~near], stderr[~near], label=label, **look)
    low, middle, high = (at[f"{mode}_{name}"].values[near] for name in ("low", "median", "high"))
    if near.any():
        ax.errorbar(at[x].values[near], middle, (middle - low, high - middle), mfc="white", **look)
