"""The figure of a grid: every measurement over the axes."""

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.bands import legend
from experiments.lab.findings import mean_and_interval
from sail_jax.drawing import style

REPEATED = "seed"
"""The dimension of repetitions, over which means and intervals are drawn."""
COLUMNS, PANELS, LABELS = 3, 30, 12
"""The largest numbers of panels in a row, of panels, and of lines in the legend."""


class _Roles(NamedTuple):
    """What is drawn along which axis.

    Attributes:
      across: The axis along the horizontal direction.
      lines: The axes with a line for each combination of their values.
      repeated: Whether lines are means over `REPEATED`.
    """

    across: str
    lines: list[str]
    repeated: bool


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws a panel for each of the first numeric variables that differ between points.

    The first axis is horizontal. There is a line for each combination of values of the other axes,
    except "seed". Over seeds, the figure shows the mean with Student's 95 % interval. A variable
    with further dimensions is averaged over them, as its label says.

    Args:
      dataset: The result of a grid (`grid_dataset.combined`).

    Returns:
      The figure "sweep"; nothing if no variable differs between points.
    """
    measures, roles = _measures(dataset), _roles(dataset)
    if not measures:
        return {}
    figure, axes = style.panels(len(measures), COLUMNS, width=3.8, height=3.0)
    for ax, (name, values) in zip(axes, measures.items(), strict=True):
        _panel(ax, dataset, values, roles)
        ax.set(title=style.literal(name), ylabel=_label(dataset[name], values))
    if roles.repeated:
        count = dataset.sizes[REPEATED]
        figure.suptitle(f"means over {count} seeds, with 95 % intervals", fontsize=style.points(10))
    if roles.lines:
        legend(figure, *axes, ncols=min(4, len(axes[0].get_lines())))
    return {"sweep": figure}


def summary(dataset: xr.Dataset) -> str:
    """Describes the axes of a grid, and the variables that the figure shows.

    Args:
      dataset: The result of a grid.

    Returns:
      A few sentences.
    """
    axes = _axes(dataset)
    count = np.prod([dataset.sizes[axis] for axis in axes])
    spelt = "; ".join(f"{axis} = {_spelt(dataset[axis].values)}" for axis in axes)
    lines = [f"{count} points: {spelt}."]
    measures = _measures(dataset)
    if measures:
        alike: dict[tuple[str, ...], list[str]] = {}
        for name in measures:
            alike.setdefault(tuple(_averaged(dataset, dataset[name])), []).append(name)
        drawn = [_described(", ".join(names), averaged) for averaged, names in alike.items()]
        lines.append(f"Drawn: {'; '.join(drawn)}.")
    else:
        lines.append("No number differs between points, so there is no figure.")
    if "left_out" in dataset.attrs:
        lines.append(
            "Left out, since their dimensions differ between points: "
            f"{dataset.attrs['left_out']}. The runs of the points have them."
        )
    return "\n".join(lines)


def _axes(dataset: xr.Dataset) -> list[str]:
    """Returns the names of the axes. The file may come from someone else."""
    axes = dataset.attrs["axes"].split(", ")
    if not {*axes} <= {*dataset.dims}:
        raise ValueError(f"{axes} are not its dimensions")
    return axes


def _spelt(values: np.ndarray) -> str:
    """Lists values, or the first and last of many."""
    words = [f"{value:g}" if values.dtype.kind in "iuf" else str(value) for value in values]
    if len(words) <= 8:
        return ", ".join(words)
    return f"{words[0]}, {words[1]}, ..., {words[-1]} ({len(words)} values)"


def _described(name: str, averaged: Sequence[str]) -> str:
    """Names a variable with the dimensions over which it is averaged."""
    return f"{name} (mean over {', '.join(averaged)})" if averaged else name


def _averaged(dataset: xr.Dataset, values: xr.DataArray) -> list[str]:
    """Lists the dimensions of a variable over which it is averaged."""
    kept = {*_axes(dataset), REPEATED}
    return [str(dim) for dim in values.dims if dim not in kept]


def _measures(dataset: xr.Dataset) -> dict[str, xr.DataArray]:
    """Reduces numeric variables to the axes. Those that differ nowhere are left out."""
    measures = {}
    for name, values in dataset.data_vars.items():
        if values.dtype.kind not in "biuf":
            continue
        means = values.astype(float).mean(_averaged(dataset, values))
        finite = means.values[np.isfinite(means.values)]
        # Sums in another order differ in their last bits.
        if finite.size and np.ptp(finite) > 1e-12 * np.abs(finite).max():
            measures[str(name)] = means
        if len(measures) == PANELS:
            break
    return measures


def _roles(dataset: xr.Dataset) -> _Roles:
    """Chooses what is drawn along which axis."""
    across, *lines = [axis for axis in _axes(dataset) if axis != REPEATED] or [REPEATED]
    return _Roles(across, lines, REPEATED in dataset.dims and across != REPEATED)


def _panel(ax: Axes, dataset: xr.Dataset, values: xr.DataArray, roles: _Roles) -> None:
    """Draws one variable."""
    across = dataset[roles.across]
    numeric = across.dtype.kind in "iuf"
    x = across.values if numeric else np.arange(len(across))
    order = np.argsort(x)
    combinations = list(itertools.product(*(range(dataset.sizes[k]) for k in roles.lines)))
    colors = _colors(len(combinations))
    labelled = {*np.linspace(0, len(combinations) - 1, LABELS).round().astype(int)}
    for k, place in enumerate(combinations):
        at = dict(zip(roles.lines, place, strict=True))
        line = values.isel(at).transpose(roles.across, ...)
        mean, half = line.values, None
        if REPEATED in line.dims and roles.repeated:
            mean, half = mean_and_interval(line, REPEATED)
        named = len(combinations) <= LABELS or k in labelled
        look = {"color": colors[k], "label": _at(dataset, at) if named and at else None}
        ax.plot(x[order], mean[order], "o-", ms=3.5, lw=1.3, **look)
        if half is not None and numeric and len(x) > 1:
            low, high = (mean - half)[order], (mean + half)[order]
            ax.fill_between(x[order], low, high, color=colors[k], alpha=0.2, lw=0)
        elif half is not None:
            ax.errorbar(x, mean, half, fmt="none", color=colors[k], capsize=3, lw=1)
    if not numeric:
        ax.set_xticks(x, [style.literal(str(value), 20) for value in across.values])
    elif len(x) > 2 and x.min() > 0 and x.max() >= 30 * x.min():
        style.logarithmic(ax, "x")
    about = across.attrs.get("long_name")
    ax.set_xlabel(_wrapped(f"{roles.across}: {about}" if about else roles.across))


def _colors(count: int) -> list[Any]:
    """Returns colours that are safe for colour blindness. Many colours are in order."""
    if count <= len(style.PALETTE):
        return list(style.PALETTE[:count])
    return list(colormaps[style.SEQUENTIAL](np.linspace(0, 0.9, count)))


def _at(dataset: xr.Dataset, place: Mapping[str, int]) -> str:
    """Names a combination of values."""
    words = [f"{axis} = {_spelt(dataset[axis].values[[k]])}" for axis, k in place.items()]
    return style.literal(", ".join(words))


def _label(variable: xr.DataArray, values: xr.DataArray) -> str:
    """Names a variable, its unit, and the dimensions over which it was averaged."""
    name = str(variable.attrs.get("long_name", variable.name))
    units = str(variable.attrs.get("units", "1"))
    text = name if units == "1" else f"{name} [{units}]"
    return _wrapped(_described(text, [str(k) for k in variable.dims if k not in values.dims]))


def _wrapped(text: str) -> str:
    """Breaks a label into lines."""
    return textwrap.fill(style.literal(text, 100), 34)
