"""The figure of `ledger`: the score of every claim."""

import math
from functools import partial

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.lab.bands import legend
from sail_jax.drawing import style
from theory import claims

# For each kind of score: its name on an axis, and the allowed distance from 0.
SCORES = {
    "z": ("z = (simulated - predicted) / s.e.", claims.Z_MAX),
    "err/tol": ("(simulated - predicted) / tolerance", 1.0),
}


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws every claim's score, with the band in which it must lie.

    Args:
      dataset: The dataset of `run`.

    Returns:
      `ledger`, a figure with a panel for each kind of score.
    """
    names = dataset["score_name"].values.astype(str)
    kinds = [kind for kind in SCORES if (names == kind).any()]
    counts = [int((names == kind).sum()) for kind in kinds]
    fig, axes = style.figure(
        len(kinds), 1, width=7.2, height=1.1 + 0.21 * max(counts), height_ratios=counts
    )
    fig.set_figheight(1.2 + 0.8 * len(kinds) + 0.21 * sum(counts))
    for ax, kind in zip(axes.flat, kinds, strict=True):
        _dots(ax, dataset.isel(claim=np.flatnonzero(names == kind)), *SCORES[kind])
    dot = partial(Line2D, [], [], marker="o", ls="")
    handles = [
        Patch(color=style.PALETTE[2], alpha=0.15, label="allowed"),
        dot(color=style.PALETTE[0], label="should hold"),
        dot(color=style.PALETTE[1], label="wrong as printed: should fail"),
    ]
    if (dataset["relation"] != "=").any():
        bound = "bound: allowed beyond on this side"
        handles.append(dot(color=style.FAINT, marker="<", label=bound))
    legend(fig, also=handles, ncols=2, where="upper center")
    return {"ledger": fig}


def _dots(ax: Axes, dataset: xr.Dataset, label: str, limit: float) -> None:
    """Draws one row for each claim; the axis is linear near the band and logarithmic outside."""
    score = np.clip(dataset["score"].values, -1e6 * limit, 1e6 * limit)
    ax.axvspan(-limit, limit, color=style.PALETTE[2], alpha=0.15, lw=0)
    for y, (x, relation, expected) in enumerate(
        zip(score, dataset["relation"].values, dataset["expected"].values, strict=True)
    ):
        marker = {"=": "o", "<=": "<", ">=": ">"}[str(relation)]
        ax.plot(x, y, marker, color=style.PALETTE[0 if expected else 1], ms=5)
    ax.set_xscale("symlog", linthresh=2 * limit, linscale=2)
    reach = max(2 * limit, 2 * np.abs(score).max())
    ax.set_xlim(-reach, reach)
    powers = np.arange(1, math.ceil(math.log10(reach / limit)))
    outer = 10.0 ** np.unique(powers[[(len(powers) - 1) // 2, -1]] if len(powers) else powers)
    ticks = limit * np.concatenate([-outer[::-1], [-1, 0, 1], outer])
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    names = [str(name) for name in dataset["claim"].values]
    ax.set_yticks(np.arange(len(names)), names, fontsize=style.points(8))
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlabel(label)
