"""The figures of `merge_choice`."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.lab.bands import legend
from experiments.studies.merge_choice.findings import winners
from sail_jax.drawing import style

COLORS = {
    "average": style.PALETTE[5],
    "trim": style.PALETTE[4],
    "ties": style.PALETTE[2],
    "base": "#D9D9D9",
    "task arithmetic": style.PALETTE[0],
    "dare": style.PALETTE[3],
}
NAMES = {"trim": "trimmed average", "ties": "TIES", "base": "the base: all merges are worse"}
NAMES |= {"dare": "DARE"}
TITLES = {
    "dense": "all entries used by all tasks",
    "own curvature": "{support:.0%} used, no curvature elsewhere",
    "common curvature": "{support:.0%} used, curvature everywhere",
}


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws which merge wins, and excess risk along the noise.

    Returns "diagram", with theory as colours and drawn task vectors as dots; and "excess", with
    best scales and densities. There theory is dashed, and drawn task vectors have standard errors.
    """
    return {"diagram": _diagram(dataset), "excess": _excess(dataset)}


def _title(dataset: xr.Dataset, bed: str) -> str:
    return TITLES[bed].format(support=dataset.attrs["support"])


def _diagram(dataset: xr.Dataset) -> Figure:
    """Draws the winners. Rows are numbers of tasks at the best, then at the published settings."""
    rows = [("best", n) for n in dataset.tasks.values]
    rows += [("published", n) for n in dataset.tasks.values[-1:]]
    beds = dataset.bed.values
    figure, axes = style.figure(
        len(rows), len(beds), width=3.3, height=2.5, sharex=True, sharey=True
    )
    shown = set()
    for row, (kind, n) in zip(axes, rows, strict=True):
        for ax, bed in zip(row, beds, strict=True):
            at = dataset.sel(bed=bed, tasks=n)
            shown |= _winners(ax, at, kind)
            if ax is axes[0, list(beds).index(bed)]:
                ax.set_title(_title(dataset, str(bed)))
        words = "best settings" if kind == "best" else "published settings"
        row[0].set_ylabel(f"{n} tasks, {words}\nheterogeneity")
    for ax in axes[-1]:
        ax.set_xlabel("noise of experts")
    handles = [
        Line2D([], [], marker="s", ls="", ms=9, color=COLORS[name], label=NAMES.get(name, name))
        for name in COLORS
        if name in shown
    ]
    handles += [
        Line2D([], [], marker="o", ls="", ms=6, mfc="white", mec=style.INK, label="measured winner")
    ]
    legend(figure, also=handles, ncols=4)
    return figure


def _winners(ax: Axes, at: xr.Dataset, kind: str) -> set[str]:
    """Draws the winners of one panel, and returns their names."""
    least = at.attrs["least"]
    if kind == "best":
        names = [str(name) for name in at.algorithm.values]
        exact, drawn = winners(at.best, least), winners(at.best_measured.mean("part"), least)
    else:
        names = ["base", *(str(name) for name in at.setting.values)]
        exact, drawn = (
            np.concatenate([np.ones((*x.shape[:-1], 1)), x.values], -1).argmin(-1)
            for x in (at.published, at.published_measured.mean("part"))
        )
    colors = ListedColormap([COLORS[name] for name in names])
    ax.pcolormesh(
        at.noise, at.share, exact, cmap=colors, vmin=-0.5, vmax=len(names) - 0.5, shading="nearest"
    )
    x, y = np.meshgrid(at.at_noise, at.at_share)
    ax.scatter(
        x, y, c=drawn, cmap=colors, vmin=-0.5, vmax=len(names) - 0.5, s=30,
        edgecolors=style.INK, linewidths=0.8,
    )  # fmt: skip
    ax.set_xscale("log")
    ax.set_xticks([0.1, 1.0], ["0.1", "1"])
    ax.minorticks_off()
    ax.grid(False)
    return {names[i] for i in np.union1d(exact, drawn)}


def _excess(dataset: xr.Dataset) -> Figure:
    """Draws excess, best scale and best density along the noise, for the largest number of
    tasks."""
    beds, share = dataset.bed.values, dataset.at_share.values[len(dataset.at_share) // 2]
    figure, axes = style.figure(3, len(beds), width=3.5, height=2.4, sharex=True, sharey="row")
    at = dataset.isel(tasks=-1)
    for (risk, scale, density), bed in zip(axes.T, beds, strict=True):
        here = at.sel(bed=bed)
        for name in here.algorithm.values:
            best = here.sel(algorithm=name)
            color, label = COLORS[str(name)], f"{NAMES.get(str(name), name)}, best settings"
            _along(risk, best, "best", share, color, label)
            _along(scale, best, "scale", share, color)
            density.plot(best.noise, best.density.sel(share=share), "--", lw=1.4, color=color)
        ties = here.sel(setting="ties")
        _along(risk, ties, "published", share, style.PALETTE[1], "TIES, published settings")
        risk.axhline(1.0, color=style.FAINT, lw=1, label="the base")
        risk.set_title(_title(dataset, str(bed)))
        density.set_xlabel("noise of experts")
        for ax in (risk, scale, density):
            style.logarithmic(ax, "x")
        risk.set_yscale("log")
        style.logarithmic(density, "y")
    for row, words in zip(axes, ("excess (base = 1)", "best scale", "best density"), strict=True):
        for ax in row:
            ax.set_ylabel(words)
    title = f"{int(at.tasks)} tasks, heterogeneity {share:g}; "
    title += "dots: task vectors shared by all merges (± s.e.)"
    theory = Line2D([], [], ls="--", color=style.INK, label="theory")
    legend(figure, axes[0, 0], also=[theory], ncols=3, title=title)
    return figure


def _along(
    ax: Axes, at: xr.Dataset, name: str, share: float, color: str, label: str | None = None
) -> None:
    """Draws theory along the noise, dashed, and the mean over parts with its error."""
    exact, drawn = at[name].sel(share=share), at[f"{name}_measured"].sel(at_share=share)
    ax.plot(exact.noise, exact, "--", lw=1.4, color=color)
    error = drawn.std("part", ddof=1) / drawn.sizes["part"] ** 0.5
    ax.errorbar(drawn.at_noise, drawn.mean("part"), error, fmt="o", ms=4, color=color, label=label)
