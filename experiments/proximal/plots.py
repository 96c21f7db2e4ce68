"""The figures of `proximal_spirals` and `proximal_gamma`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D

from experiments.findings import mean_and_error
from sail_jax.drawing import style

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "sDv^P*Xo<>"
DASHES = ("-", (0, (5, 1.5)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (6, 1, 1, 1, 1, 1)))
GAMMA = "γ, weight of θ₁"
BELOW = {"loc": "outside lower center", "frameon": False, "fontsize": 9}


def band(ax: "Axes", x: Any, values: "xr.DataArray", **look: Any) -> None:
    """Mean over seeds and its standard error."""
    mean, error = mean_and_error(values)
    ax.plot(x, mean, lw=1.5, **look)
    ax.fill_between(x, mean - error, mean + error, color=look["color"], alpha=0.25, lw=0)


def look(i: int) -> dict[str, Any]:
    return {"color": style.PALETTE[i % len(style.PALETTE)], "ls": DASHES[i % len(DASHES)]}


def mark_best(ax: "Axes", values: "xr.DataArray", best: "xr.DataArray", i: int) -> None:
    """The best gamma of every seed, at the height of its lowest loss."""
    heights = values.min("gamma").transpose(*best.dims)
    color = look(i)["color"]
    ax.plot(best, heights, "o", ms=4, mec="white", mew=0.6, color=color, zorder=4, clip_on=False)


def mark_predicted(ax: "Axes", predicted: "xr.DataArray") -> None:
    """A vertical line at each mean prediction, its marker on top."""
    low, high = ax.get_xlim()
    for i, way in enumerate(predicted["way"].values):
        x, _ = mean_and_error(predicted.sel(way=way))
        if low < x < high:
            ax.axvline(float(x), color=style.FAINT, lw=0.9, zorder=1)
            at = {"transform": ax.get_xaxis_transform(), "clip_on": False, "zorder": 5}
            ax.plot(x, 1.02, MARKERS[i], ms=5, mfc="white", mec=style.INK, **at)


def predicted_handles(labels: Sequence[str]) -> list[Line2D]:
    return [
        Line2D([], [], marker=MARKERS[i], color=style.FAINT, mfc="white", mec=style.INK, ms=5,
               lw=0.9, label=f"predicted: {label}")
        for i, label in enumerate(labels)
    ]  # fmt: skip


def weights(ax: "Axes", rows: Mapping[str, "xr.DataArray"], solid: int, span: np.ndarray):
    """A row for each weight, mean ± s.e. over seeds and every seed as a tick; the first `solid` are
    measured. Beyond `span` an arrow at the edge."""
    ax.axvspan(0, 1, color=style.FAINT, alpha=0.12, lw=0)
    ax.axhline(len(rows) - solid - 0.5, color=style.FAINT, lw=0.8)
    for i, values in enumerate(rows.values()):
        y = len(rows) - 1 - i
        mean, error = map(float, mean_and_error(values))
        color = style.PALETTE[0] if i < solid else style.PALETTE[1]
        if not np.isfinite(mean):
            ax.text(0.5, y, "undefined: sources too alike", ha="center", va="center",
                    fontsize=8, color=style.INK)  # fmt: skip
        elif not span[0] <= mean <= span[1]:
            edge = span[0] if mean < span[0] else span[1]
            ax.plot(edge, y, "<" if mean < span[0] else ">", color=color, ms=7, clip_on=False)
            inwards = {"ha": "left" if mean < span[0] else "right", "va": "center", "fontsize": 8}
            text = f"{mean:+.1f} ± {error:.1f}"
            ax.annotate(text, (edge, y), (9 if mean < span[0] else -9, 0),
                        textcoords="offset points", **inwards)  # fmt: skip
        else:
            inside = values.values[(values.values >= span[0]) & (values.values <= span[1])]
            ax.plot(inside, [y] * len(inside), "|", color=style.FAINT, ms=7)
            ax.errorbar(mean, y, xerr=error, fmt="o" if i < solid else "D", color=color, ms=5,
                        capsize=3)  # fmt: skip
    ax.set_yticks(range(len(rows)), list(rows)[::-1])
    ax.set_ylim(-0.6, len(rows) - 0.4)
    ax.set_xlim(span[0] - 0.1, span[1] + 0.1)


SPIRALS = {
    "classes": "one spiral each",
    "radii": "inner and outer parts",
    "random": "random parts",
}
MEASURES = {
    "loss": "training loss (nats)",
    "accuracy": "test accuracy",
    "gradient": "norm of the gradient",
}


def spirals(dataset: "xr.Dataset") -> "dict[str, Figure]":
    found = {f"gamma_{s}": _spirals_gamma(dataset, s) for s in dataset["start"].values.astype(str)}
    return {**found, "weights": _spirals_weights(dataset), "epochs": _spirals_epochs(dataset)}


def _panels(dataset: "xr.Dataset") -> "tuple[Figure, np.ndarray]":
    """A row for every pair of sources, a column for every measure."""
    how = dataset["sources"].values.astype(str)
    fig, axes = style.figure(len(how), 3, width=3.7, height=2.5, sharex=True)
    for row, name in zip(axes, how, strict=True):
        for ax, (measure, label) in zip(row, MEASURES.items(), strict=True):
            ax.set_title(f"sources: {SPIRALS[name]}", pad=9)
            ax.set_ylabel(label)
            if measure != "accuracy":
                ax.set_yscale("log")
    return fig, axes


def _spirals_gamma(dataset: "xr.Dataset", start: str) -> "Figure":
    from experiments.proximal_spirals import LABELS

    fig, axes = _panels(dataset)
    gamma, looks = dataset["gamma"].values, dataset["look"].values
    for row, how in zip(axes, dataset["sources"].values, strict=True):
        one = dataset.sel(sources=how, start=start)
        for ax, measure in zip(row, MEASURES, strict=True):
            for i, n in enumerate(looks):
                values = one[measure].sel(epoch=n)
                band(ax, gamma, values, **look(i))
                scratch, _ = mean_and_error(one[f"scratch_{measure}"].sel(epoch=n))
                edge = {"transform": ax.get_yaxis_transform(), "clip_on": False}
                ax.plot(1.0, scratch, "<", color=look(i)["color"], ms=5, **edge)
                if measure == "loss":
                    mark_best(ax, values, one["best"].sel(look=n), i)
            ax.set_xlim(gamma[0], gamma[-1])
            mark_predicted(ax, one["predicted"])
    for ax in axes[-1]:
        ax.set_xlabel(GAMMA)
    lines = [Line2D([], [], label=f"after {n} epochs", **look(i)) for i, n in enumerate(looks)]
    lines += [
        Line2D(
            [], [], ls="", marker="o", color=style.INK, mec="white", label="lowest loss, by seed"
        ),
        Line2D([], [], ls="", marker="<", color=style.INK, label="from scratch"),
        *predicted_handles([LABELS[w] for w in dataset["way"].values.astype(str)]),
    ]
    title = f"{start} initial weights; mean ± s.e. over {dataset.sizes['seed']} seeds"
    fig.legend(handles=lines, title=title, ncols=4, **BELOW)
    return fig


def _spirals_weights(dataset: "xr.Dataset") -> "Figure":
    from experiments.proximal_spirals import LABELS

    how, starts = dataset["sources"].values.astype(str), dataset["start"].values.astype(str)
    looks, ways = dataset["look"].values, dataset["way"].values.astype(str)
    height = 0.9 + 0.22 * (len(looks) + len(ways))
    fig, axes = style.figure(
        len(how), len(starts), width=4.6, height=height, sharex=True, sharey=True
    )
    span = dataset["gamma"].values[[0, -1]]
    for row, name in zip(axes, how, strict=True):
        for ax, start in zip(row, starts, strict=True):
            one = dataset.sel(sources=name, start=start)
            rows = {f"best, after {n} epochs": one["best"].sel(look=n) for n in looks}
            rows |= {LABELS[w]: one["predicted"].sel(way=w) for w in ways}
            weights(ax, rows, len(looks), span)
            ax.set_title(f"{SPIRALS[name]}, {start} start")
    for ax in axes[-1]:
        ax.set_xlabel(f"{GAMMA} (mean ± s.e.; ticks: seeds)")
    return fig


def _spirals_epochs(dataset: "xr.Dataset") -> "Figure":
    fig, axes = _panels(dataset)
    start = dataset["start"].values[0]
    gamma = dataset["gamma"].values
    norm, cmap = Normalize(gamma[0], gamma[-1]), colormaps[style.SEQUENTIAL]
    for row, how in zip(axes, dataset["sources"].values, strict=True):
        one = dataset.sel(sources=how, start=start)
        for ax, measure in zip(row, MEASURES, strict=True):
            mean = one[measure].mean("seed")
            for k, g in enumerate(gamma):
                ax.plot(one["epoch"], mean.isel(gamma=k), color=cmap(norm(g)), lw=0.8)
            scratch = one[f"scratch_{measure}"]
            band(ax, one["epoch"], scratch, color=style.PALETTE[1], ls="--")
    for ax in axes[-1]:
        ax.set_xlabel("epochs on the target")
    bar = fig.colorbar(ScalarMappable(norm, cmap), ax=axes, label=GAMMA, shrink=0.6)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    handles = [
        Line2D([], [], color=style.PALETTE[1], ls="--", label="from scratch, mean ± s.e."),
        Line2D([], [], color=cmap(0.5), lw=0.8, label="from γ θ₁ + (1 − γ) θ₂, mean"),
    ]
    title = f"{start} initial weights, {dataset.sizes['seed']} seeds"
    fig.legend(handles=handles, title=title, ncols=2, **BELOW)
    return fig


STEP_LABEL = "held-out loss (nats)"
PAIR_LABELS = {"1-target": "D₁ to Dₜ", "2-target": "D₂ to Dₜ", "1-2": "D₁ to D₂"}


def gamma(dataset: "xr.Dataset") -> "dict[str, Figure]":
    return {
        "gamma": _gamma_loss(dataset),
        "weights": _gamma_weights(dataset),
        "distances": _gamma_distances(dataset),
        "overlap": _gamma_overlap(dataset),
    }


def _gamma_loss(dataset: "xr.Dataset") -> "Figure":
    """Figure 2b: a panel for each kind of start."""
    from experiments.proximal_gamma import LABELS

    starts, looks = dataset["start"].values.astype(str), list(dataset["look"].values)
    groups = [some for some in (looks[: looks.count(0)], looks[looks.count(0) :]) if some]
    fig, axes = style.figure(
        len(groups),
        len(starts),
        width=max(5.2, 9.0 / len(starts)),
        height=2.9,
        sharex=True,
        sharey="row",
    )
    grid = dataset["gamma"].values
    for row, some in zip(axes, groups, strict=True):
        for ax, start in zip(row, starts, strict=True):
            one = dataset.sel(start=start)
            for n in some:
                i, values = looks.index(n), one["loss"].sel(look=n)
                band(ax, grid, values, **look(i))
                scratch, _ = mean_and_error(one["scratch_loss"].sel(look=n))
                edge = {"transform": ax.get_yaxis_transform(), "clip_on": False}
                ax.plot(1.0, scratch, "<", color=look(i)["color"], ms=5, **edge)
                mark_best(ax, values, one["best"].sel(look=n), i)
            ax.set_xlim(grid[0], grid[-1])
            mark_predicted(ax, one["predicted"])
            ax.set_title(f"{start} initial weights", pad=9)
        row[0].set_ylabel(STEP_LABEL)
    for ax in axes[-1]:
        ax.set_xlabel(GAMMA)
    lines = [Line2D([], [], label=f"after {n} steps", **look(i)) for i, n in enumerate(looks)]
    lines += [
        Line2D([], [], ls="", marker="o", color=style.INK, mec="white", label="lowest, by seed"),
        Line2D([], [], ls="", marker="<", color=style.INK, label="from scratch"),
        *predicted_handles([LABELS[w] for w in dataset["way"].values.astype(str)]),
    ]
    title = f"mean ± s.e. over {dataset.sizes['seed']} seeds"
    fig.legend(handles=lines, title=title, ncols=3, **BELOW)
    return fig


def _gamma_weights(dataset: "xr.Dataset") -> "Figure":
    """Measured and predicted, with the printed formula and the published number."""
    from experiments.proximal_gamma import LABELS, PUBLISHED

    starts, looks = dataset["start"].values.astype(str), dataset["look"].values
    height = 1.5 + 0.24 * (len(looks) + len(LABELS) + 1)
    width = max(5.2, 8.0 / len(starts))
    fig, axes = style.figure(1, len(starts), width=width, height=height, sharey=True)
    span = dataset["gamma"].values[[0, -1]]
    for ax, start in zip(axes[0], starts, strict=True):
        one = dataset.sel(start=start)
        rows = {f"best, after {n} steps": one["best"].sel(look=n) for n in looks}
        rows |= {LABELS[w]: one["predicted"].sel(way=w) for w in dataset["way"].values.astype(str)}
        rows["as printed in Sec. 4.4, MMD, means"] = 1 - one["predicted"].sel(way="mmd_mean")
        weights(ax, rows, len(looks), span)
        ax.axvline(PUBLISHED, color=style.INK, lw=1, ls=":")
        ax.set_title(f"{start} initial weights")
        ax.set_xlabel(f"{GAMMA} (mean ± s.e.; ticks: seeds)")
    note = (
        f"dotted: the published γ* = {PUBLISHED}, on other text. The formula printed beside it is\n"
        f"the weight of θ₂ (last row, read as θ₁'s) and would give {1 - PUBLISHED:+.4f}; "
        "eq. 11 is the weight of θ₁."
    )
    fig.supxlabel(note, fontsize=9)
    return fig


def _gamma_distances(dataset: "xr.Dataset") -> "Figure":
    """Distances between the parts as shares of the largest, with their mean standard errors."""
    from experiments.proximal_gamma import DISTANCES

    one = dataset.isel(alpha=0, beta=0)
    names = dataset["distance"].values.astype(str)
    fig, axes = style.figure(width=6.4, height=1.2 + 0.42 * len(names))
    ax = axes[0, 0]
    for i, name in enumerate(names):
        value = one["distance_value"].sel(distance=name).mean("seed")
        error = one["distance_error"].sel(distance=name).mean("seed")
        unit = float(value.max())
        for k, pair in enumerate(dataset["pair"].values.astype(str)):
            y = len(names) - 1 - i + 0.22 * (1 - k)
            x, dx = float(value.sel(pair=pair)) / unit, float(error.sel(pair=pair)) / unit
            color, label = style.PALETTE[k], PAIR_LABELS[pair] if i == 0 else None
            ax.errorbar(x, y, xerr=dx, fmt="osD"[k], color=color, ms=5, capsize=3, label=label)
    squared = [" (squared)" if DISTANCES[n][0] else "" for n in names]
    labels = [DISTANCES[n][1] + s for n, s in zip(names, squared, strict=True)]
    ax.set_yticks(range(len(names)), labels[::-1])
    ax.set_xlim(left=min(0.0, ax.get_xlim()[0]))
    ax.set_xlabel("distance as a share of the largest (± its standard error)")
    fig.legend(ncols=3, **BELOW)
    return fig


def _gamma_overlap(dataset: "xr.Dataset") -> "Figure":
    """Figure 2c: a panel for each overlap of the sources with the target."""
    betas, alphas = dataset["beta"].values, dataset["alpha"].values
    columns = min(4, len(betas))
    rows = -(-len(betas) // columns)
    fig, axes = style.figure(
        rows, columns, width=max(3.8, 7.0 / columns), height=3.2, sharex=True, sharey=True
    )
    grid = dataset["gamma"].values
    many = colormaps[style.SEQUENTIAL](np.linspace(0, 0.9, len(alphas)))
    for ax, beta in zip(axes.flat, betas, strict=False):
        for i, alpha in enumerate(alphas):
            one = dataset.sel(alpha=alpha, beta=beta)
            drawn = look(i) if len(alphas) <= 4 else {"color": many[i], "ls": "-"}
            band(ax, grid, one["overlap_loss"], **drawn)
            heights = one["overlap_loss"].min("gamma")
            ax.plot(one["overlap_best"], heights, "o", ms=4, mec="white", color=drawn["color"])
            x, _ = mean_and_error(one["overlap_predicted"].sel(distance="mmd"))
            if grid[0] < x < grid[-1]:
                ax.axvline(float(x), color=drawn["color"], ls=drawn["ls"], lw=0.9)
            elif np.isfinite(x):
                place, marker = (0.0, "<") if x < grid[0] else (1.0, ">")
                inside = {"transform": ax.transAxes, "clip_on": False, "color": drawn["color"]}
                ax.plot(place, 0.9 - 0.07 * i, marker, ms=6, **inside)
        ax.set_title(f"share β = {beta:g} of either source from Dₜ")
    for ax in axes.flat[len(betas) :]:
        ax.set_axis_off()
    for ax in axes[-1]:
        ax.set_xlabel(GAMMA)
    for ax in axes[:, 0]:
        ax.set_ylabel(STEP_LABEL)
    lines = [
        Line2D([], [], label=f"α = {alpha:g}", **look(i)) if len(alphas) <= 4
        else Line2D([], [], label=f"α = {alpha:g}", color=many[i])
        for i, alpha in enumerate(alphas)
    ]  # fmt: skip
    dot: dict[str, Any] = {"marker": "o", "mec": "white", "color": style.INK}
    lines += [
        Line2D([], [], ls="", label="lowest, by seed", **dot),
        Line2D([], [], color=style.INK, lw=0.9, label="predicted, MMD of unigrams (◂ beyond)"),
    ]
    title = (
        f"after {dataset.attrs['overlap_steps']} steps, {dataset['start'].values[0]} start, mean ± "
        f"s.e. over {dataset.sizes['seed']} seeds; α: share common to D₁ and D₂"
    )
    fig.legend(handles=lines, title=title, ncols=min(3, len(lines)), **BELOW)
    return fig
