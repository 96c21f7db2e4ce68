"""The quickstart page shows a verdict of each study, and figures of one panel each."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from experiments.lab.bands import legend
from experiments.studies.ledger import findings as ledger
from experiments.studies.merge_digits.findings import own_accuracy
from experiments.studies.shared import transfer_regions as regions
from experiments.studies.shared.transfer_plots import limits
from sail_jax.drawing import style

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 3.7, 3.0  # inches of a figure: legible on a phone


class Shown(NamedTuple):
    """The verdict and the figures of a study on the page.

    Attributes:
      verdict: Summarises a dataset in one or two sentences.
      figures: Draws a dataset as figures of one panel each.
    """

    verdict: "Callable[[xr.Dataset], str]"
    figures: "Callable[[xr.Dataset], Sequence[Figure]]"


def _transfer(dataset: "xr.Dataset") -> str:
    at = dataset.sel(sigma=dataset.sigma.max())
    theory, mean = at.linear_theory.values, at.linear_mean.values
    error = at.linear_std.values / np.sqrt(at.attrs["draws"])
    clear = np.abs(theory) > 4 * np.maximum(error, regions.ROUNDING)
    agree = np.mean(np.sign(theory[clear]) == np.sign(mean[clear]))
    return (
        f"Transfer hurts in {100 * np.mean(theory < -regions.ROUNDING):.0f} % of the map. Formula "
        f"and simulation agree on the sign of the gain at {100 * agree:.1f} % of the points with a "
        "gain above 4 standard errors."
    )


def _draw_transfer(dataset: "xr.Dataset") -> "list[Figure]":
    at = dataset.sel(sigma=dataset.sigma.max())
    x, y = at["load"].values, at.theta.values
    theory, mean = at.linear_theory.values, at.linear_mean.values
    reach, figures = limits(at, theory, mean), []
    titles = (
        "Formula (dashed: no gain)",
        f"Mean over {at.attrs['draws']} data sets (solid: no gain)",
    )
    far = np.abs(at.n.values - at.attrs["d"]) >= regions.FAR
    signed = np.where(far[:, None] & (np.abs(mean) > regions.ROUNDING), mean, np.nan)
    for values, title in zip((theory, mean), titles, strict=True):
        fig, ((ax,),) = style.figure(width=WIDTH, height=HEIGHT)
        look = {"cmap": style.DIVERGING, "vmin": -reach, "vmax": reach}
        style.heatmap(ax, values.T, x=x, y=y, label="gain", **look)
        zero = at.linear_zero
        ax.plot(zero[zero.dims[0]].values, zero.values, color=style.INK, lw=1.6, ls="--")
        if values is mean and np.nanmin(signed) < 0 < np.nanmax(signed):
            ax.contour(x, y, np.ma.masked_invalid(signed).T, [0], colors=style.INK, linewidths=1.4)
        ax.set(xlim=x[[0, -1]], ylim=y[[0, -1]], title=title)
        ax.set(xlabel="load (samples per dimension)", ylabel="angle between tasks (rad)")
        figures.append(fig)
    return figures


def _merging(dataset: "xr.Dataset") -> str:
    mean = dataset["accuracy"].mean("task")
    own, base = float(own_accuracy(dataset).mean()), float(mean.sel(model="base").mean())
    scores = {m: float(mean.sel(model=m).mean()) for m in _merges(dataset)}
    best = max(scores, key=lambda name: scores[name])
    text = (
        f"The best merge, {best}, has a test accuracy of {100 * scores[best]:.1f} % over all "
        f"tasks. The base has {100 * base:.1f} %, and the experts {100 * own:.1f} % on their own "
        "tasks."
    )
    share = f" The merge keeps {100 * (scores[best] - base) / (own - base):.0f} % of their gain."
    return text + share * (own > base)


def _merges(dataset: "xr.Dataset") -> list[str]:
    return ["soup", *map(str, dataset["merge"].values)]


def _draw_merging(dataset: "xr.Dataset") -> "list[Figure]":
    models = list(map(str, dataset["model"].values))
    accuracy = dataset["accuracy"].mean("task")
    at = np.arange(len(models))[::-1]
    fig, ((ax,),) = style.figure(width=WIDTH, height=1.2 + 0.24 * len(models))
    spread = accuracy.std("replicate", ddof=1)
    ax.errorbar(accuracy.mean("replicate"), at, xerr=spread, fmt="o", capsize=3,
                color=style.PALETTE[0], label="measured (± s.d.)")  # fmt: skip
    ax.plot(dataset["predicted"].mean(("task", "replicate")), at, "D", ms=9, mfc="none",
            color=style.PALETTE[1], label="predicted")  # fmt: skip
    own = float(own_accuracy(dataset).mean())
    ax.axvline(own, color=style.FAINT, ls="--", lw=1, label="experts, own task")
    ax.set_yticks(at, models)
    ax.set(xlim=(0, 1.02), xlabel="test accuracy, mean over tasks", title="Accuracy of each model")
    legend(fig, ax, ncols=2)
    curves, ((scales,),) = style.figure(width=WIDTH, height=1.2 + 0.24 * len(models))
    for colour, merge in zip(style.PALETTE, dataset["merge"].values.astype(str), strict=False):
        values = dataset["validation"].sel(merge=merge)
        mean, spread = values.mean("replicate"), values.std("replicate", ddof=1)
        scales.plot(values["scale"], mean, color=colour, label=merge)
        scales.fill_between(values["scale"], mean - spread, mean + spread, color=colour, alpha=0.2,
                            lw=0)  # fmt: skip
    scales.set(ylim=(0, 1.02), xlabel="scale of the merged task vector")
    scales.set(ylabel="validation accuracy (± s.d.)", title="Choice of the scale")
    legend(curves, scales, ncols=2)
    return [fig, curves]


SHOWN: Mapping[str, Shown] = {
    "transfer_phase": Shown(_transfer, _draw_transfer),
    "merge_digits": Shown(_merging, _draw_merging),
    "ledger": Shown(ledger.summary, lambda _: []),
}
