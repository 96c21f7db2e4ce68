"""The figure of `several_sources`."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.findings import mean_and_error
from sail_jax.drawing import style

WAYS = {
    "best": "best weights",
    "proximal": "SAIL's, sum 1",
    "equal": "equal",
    "first": "first source alone",
    "none": "from scratch",
}
ORDERS = {"random": "random subspace", "first": "largest parts first"}


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws risks by the weights, by the covariance of the source and by the moving directions.

    Returns the figure "sources": dashed lines are theory, and points are means over draws with
    their standard errors.
    """
    figure, ((left, middle, right),) = style.figure(1, 3, width=4.3, height=4.0)
    for i, (way, label) in enumerate(WAYS.items()):
        at = dataset.sel(way=way)
        _pair(left, at.noise.values, at.mixed_theory.values, at.noise.values, at.mixed, i, label)
    left.set(
        ylim=(0, 1.3),
        xlabel="noise of the second source",
        ylabel="risk after fine-tuning",
        title="(a) two weighted sources",
    )
    for i, load in enumerate(dataset.source_load.values):
        for when, words, face in (("before", "start", "white"), ("after", "fine-tuned", None)):
            at, x = dataset.sel(source_load=load, when=when), np.degrees(dataset.angle.values)
            words = f"{words}, $n_s/d$ = {load:g}"
            _pair(middle, x, at.turned_theory.values, x, at.turned, i, words, face)
    middle.set(
        xlabel="angle between the inputs' directions (degrees)",
        ylabel="risk",
        ylim=(0, None),
        title="(b) a source with another covariance",
    )
    for i, (order, label) in enumerate(ORDERS.items()):
        at = dataset.sel(order=order)
        theory = np.where(np.isfinite(at.ranked_theory), at.ranked_theory, np.nan)
        x = at["rank"].values
        _pair(right, at.every_rank.values, theory, x, at.ranked, i, label)
    right.axhline(1.0, color=style.FAINT, lw=1, label="no fine-tuning")
    n = dataset.attrs["n"]
    right.axvline(n, color=style.FAINT, lw=1, ls=":", label=f"$k = n$ = {n}")
    right.set(
        xlabel="directions that move, $k$",
        ylabel="risk",
        title="(c) fine-tuning of rank $k$",
    )
    style.logarithmic(left, "x")
    style.logarithmic(right, "y")
    right.set_ylim(0.1, 30)
    for ax in (left, middle, right):
        ax.legend(frameon=False, fontsize=style.points(8))
    figure.suptitle(
        f"$d$ = {dataset.attrs['d']}, $σ$ = {dataset.attrs['sigma']:g}; dashed: theory; points:\n"
        f"least squares on {dataset.attrs['draws']} data sets (± 1 s.e.), "
        "shared at each noise in (a) and by the ordered directions in (c)",
        fontsize=style.points(10),
    )
    return {"sources": figure}


def _pair(
    ax: Axes,
    x: np.ndarray,
    theory: np.ndarray,
    places: np.ndarray,
    values: xr.DataArray,
    i: int,
    label: str,
    face: str | None = None,
) -> None:
    """Draws theory as a dashed line and measured means as points with their errors."""
    look: dict[str, Any] = {"color": style.PALETTE[i]}
    ax.plot(x, theory, ls="--", lw=1.3, **look)
    mean, error = mean_and_error(values, "draw")
    ax.errorbar(places, mean, error, fmt="o", ms=4, lw=1, mfc=face, label=label, **look)
