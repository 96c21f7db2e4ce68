"""The figures of `several_sources`."""

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

    Returns the figures "sources", "covariance" and "rank". Dashed lines are theory, and points are
    means over draws with their standard errors.
    """
    panels = {
        "sources": (_weights, "at each noise"),
        "covariance": (_covariances, "by start and fine-tuned"),
        "rank": (_ranks, "by the ordered directions"),
    }
    figures, about = {}, dataset.attrs
    for name, (draw, sharing) in panels.items():
        figures[name], ((ax,),) = style.figure(width=6.4, height=4.2)
        draw(ax, dataset)
        ax.legend(frameon=False, fontsize=style.points(9))
        ax.set_title(
            f"$d$ = {about['d']}, $σ$ = {about['sigma']:g}; dashed: theory; points: least squares\n"
            f"on {about['draws']} data sets (± 1 s.e.), shared {sharing}"
        )
    return figures


def _weights(ax: Axes, dataset: xr.Dataset) -> None:
    """Draws the risk after fine-tuning by the rule for the weights of two sources."""
    for i, (way, label) in enumerate(WAYS.items()):
        at = dataset.sel(way=way)
        _pair(ax, at.noise.values, at.mixed_theory.values, at.noise.values, at.mixed, i, label)
    ax.set(ylim=(0, 1.3), xlabel="noise of the second source", ylabel="risk after fine-tuning")
    style.logarithmic(ax, "x")


def _covariances(ax: Axes, dataset: xr.Dataset) -> None:
    """Draws the risk before and after fine-tuning, by the rotation of the source's covariance."""
    for i, load in enumerate(dataset.source_load.values):
        for when, words, face in (("before", "start", "white"), ("after", "fine-tuned", None)):
            at, x = dataset.sel(source_load=load, when=when), np.degrees(dataset.angle.values)
            words = f"{words}, $n_s/d$ = {load:g}"
            _pair(ax, x, at.turned_theory.values, x, at.turned, i, words, face)
    label = "angle between the directions of source and target inputs (degrees)"
    ax.set(xlabel=label, ylabel="risk", ylim=(0, None))


def _ranks(ax: Axes, dataset: xr.Dataset) -> None:
    """Draws the risk of fine-tuning by its rank, in both orders of the directions."""
    for i, (order, label) in enumerate(ORDERS.items()):
        at = dataset.sel(order=order)
        theory = np.where(np.isfinite(at.ranked_theory), at.ranked_theory, np.nan)
        _pair(ax, at.every_rank.values, theory, at["rank"].values, at.ranked, i, label)
    ax.axhline(1.0, color=style.FAINT, lw=1, label="no fine-tuning")
    n = dataset.attrs["n"]
    ax.axvline(n, color=style.FAINT, lw=1, ls=":", label=f"$k = n$ = {n}")
    ax.set(xlabel="directions that move, $k$", ylabel="risk after fine-tuning of rank $k$")
    style.logarithmic(ax, "y")
    ax.set_ylim(0.1, 30)


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
