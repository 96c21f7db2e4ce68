"""The figures of `merge_prediction`: how well each predictor ranks merges, and examples."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.bands import legend
from experiments.studies.merge_prediction.probes import PREDICTORS
from sail_jax.drawing import style


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws the figures of a finished run."""
    return {"ranking": ranking(dataset), "scatter": scatter(dataset)}


def order(dataset: xr.Dataset) -> list[str]:
    """Sorts the predictors by their rank correlation, the highest first."""
    return [str(dataset["predictor"].values[i]) for i in np.argsort(-dataset["rho"].values)]


def ranking(dataset: xr.Dataset) -> Figure:
    """Draws every predictor's rank correlation with the loss that averaging adds.

    One panel has all merges, the other only experts fine-tuned from one pre-trained model.
    """
    families, outcomes = dataset["learned"].values, dataset.sel(outcome="averaging")
    names = order(outcomes.sel(scope="all"))
    y = np.arange(len(names))
    fig, axes = style.figure(1, 2, width=4.6, height=1.2 + 0.27 * len(names), sharey=True)
    shown = dict.fromkeys([*families, "all"])
    for ax, suffix, title in zip(
        axes[0], ("", ", tuned"), ("all merges", "tuned from one pre-trained model"), strict=True
    ):
        for i, scope in enumerate(shown):
            scores = outcomes.sel(scope=scope + suffix, predictor=names)
            if int(scores["within"].sum()) < 3:
                continue
            at = y + 0.22 * (i - (len(shown) - 1) / 2)
            rho = scores["rho"].values
            error = np.abs([rho - scores["low"].values, scores["high"].values - rho])
            ax.errorbar(
                rho, at, xerr=error, fmt="sDo"[i % 3], ms=3.5, lw=1, color=style.PALETTE[i],
                label=f"{scope} ({int(scores['within'].sum())})",
            )  # fmt: skip
        ax.axvline(0, color=style.FAINT, lw=0.8)
        ax.set_xlim(-1.02, 1.02)
        ax.set_xlabel("rank correlation with the loss added")
        ax.set_title(title)
    axes[0, 0].set_yticks(y, [PREDICTORS[name].label for name in names])
    axes[0, 0].set_ylim(len(names) - 0.4, -0.6)
    axes[0, 0].tick_params(axis="y", labelsize=style.points(8))
    passes = dataset["passes"].sel(predictor=names).values[:, 0]
    side = axes[0, 1].secondary_yaxis("right")
    side.set_yticks(y, [f"{n:.0f}" for n in passes], fontsize=style.points(8))
    side.set_ylabel(
        f"passes forward, {int(dataset['size'].values[0])} models", fontsize=style.points(9)
    )
    side.spines["right"].set_visible(False)
    side.tick_params(length=0)
    legend(fig, axes[0, 0], ncols=3, fontsize=style.points(8))
    return fig


def scatter(dataset: xr.Dataset) -> Figure:
    """Draws the two best predictors and the worst against the loss that averaging adds.

    The choice excludes the merge itself on few examples.
    """
    outcomes = dataset.sel(outcome="averaging")
    names = [p for p in order(outcomes.sel(scope="all")) if p != "sample"]
    fig, axes = style.figure(1, 3, width=3.7, height=3.5, sharey=True)
    for ax, name in zip(axes[0], (names[0], names[1], names[-1]), strict=True):
        _scatter(ax, outcomes, name)
    axes[0, 0].set_ylabel("loss that averaging adds (nats)")
    legend(fig, axes[0, 0], ncols=4, fontsize=style.points(8))
    return fig


def _scatter(ax: Axes, outcomes: xr.Dataset, name: str) -> None:
    """Draws one predictor of all merges against the loss that averaging adds."""
    x, y = outcomes["value"].sel(predictor=name).values, outcomes["result"].values
    for i, family in enumerate(outcomes["learned"].values):
        for related in (True, False):
            at = (outcomes["family"].values == i) & (outcomes["related"].values == related)
            kind = "one base" if related else "unrelated"
            ax.scatter(
                x[at], y[at], s=14 if related else 22, marker="o" if related else "x",
                color=style.PALETTE[i], lw=0 if related else 1, alpha=0.75,
                label=f"{family}, {kind}",
            )  # fmt: skip
    # Values over several magnitudes are drawn on a logarithmic axis. Zeros and negative values need
    # a linear part of it.
    low = np.abs(x[np.isfinite(x) & (x != 0)])
    if low.size and low.max() > 8 * np.median(low):
        if (x > 0).all():
            ax.set_xscale("log")
        else:
            ax.set_xscale("symlog", linthresh=float(np.quantile(low, 0.05)))
    ax.set_yscale("symlog", linthresh=0.1)
    rho = float(outcomes["rho"].sel(scope="all", predictor=name))
    ax.set_title(f"rank correlation {rho:.2f}")
    ax.set_xlabel(PREDICTORS[name].label)
