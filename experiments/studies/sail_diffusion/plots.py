"""The figures of `sail_diffusion`. Each training has one colour and one marker in all of them."""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D

from experiments.lab.bands import band, legend
from experiments.lab.findings import mean_and_error
from experiments.studies.sail_diffusion.networks import WAYS
from experiments.studies.sail_diffusion.quality import MEASURES
from sail_jax.drawing import style

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {
    "sit": "SiT",
    "repa": "+ REPA",
    "sail": "+ SAIL",
    "sail_clean": "+ SAIL, targets of the data",
    "sail_start": "+ REPA, SAIL's start",
    "sail_loss": "+ SAIL, usual start",
}
LOOKS = dict(
    zip(
        NAMES,
        zip(
            (style.FAINT, style.PALETTE[0], style.PALETTE[1], *style.PALETTE[2:5]),
            "osD^vP",
            strict=True,
        ),
        strict=True,
    )
)
TERMS = {
    "velocity": "velocity loss",
    "repa": "REPA's loss (− cosine)",
    "align": "alignment loss",
}


def plot(dataset: "xr.Dataset") -> "dict[str, Figure]":
    """Draws the figures of a finished run.

    It returns `distance` and `measures`, quality against training steps; `losses`, the loss terms;
    and `samples`, generated images and real ones.
    """
    return {
        "distance": _distance(dataset),
        "measures": _measures(dataset),
        "losses": _losses(dataset),
        "samples": _samples(dataset),
    }


def _ways(dataset: "xr.Dataset") -> list[str]:
    """Returns the names of the trainings, in the dataset's order."""
    return list(dataset["way"].values.astype(str))


def _points(ax: "Axes", dataset: "xr.Dataset", ways: list[str], measure: "xr.DataArray") -> None:
    """Draws one measure of some trainings against steps, without the evaluation before training."""
    steps = dataset["step"].values[1:]
    # Points are shifted sideways, so that error bars do not overlap.
    shift = 0.008 * steps[-1]
    for i, way in enumerate(ways):
        mean, error = mean_and_error(measure.sel(way=way).isel(step=slice(1, None)))
        color, marker = LOOKS[way]
        at = steps + shift * (i - (len(ways) - 1) / 2)
        ax.errorbar(at, mean, yerr=error, color=color, marker=marker, ms=4, lw=1.2, capsize=2)
    ax.set_xlabel("steps")


def _curve(ax: "Axes", dataset: "xr.Dataset", measure: str) -> None:
    """Draws one measure of every training, and of real images."""
    _points(ax, dataset, _ways(dataset), dataset[measure])
    ax.axhline(dataset[f"{measure}_real"].values.mean(), color=style.INK, lw=0.9, ls="--")


def _legend(fig: "Figure", dataset: "xr.Dataset", *, real: bool) -> None:
    """Adds the legend of the trainings above the figure, with a line of real images if `real`."""
    lines = [
        Line2D([], [], color=LOOKS[way][0], marker=LOOKS[way][1], ms=4, label=NAMES[way])
        for way in _ways(dataset)
    ]
    if real:
        label = "training images"
        lines.append(Line2D([], [], color=style.INK, lw=0.9, ls="--", label=label))
    data = style.literal(dataset.attrs["data"])
    title = f"{data}: mean ± s.e. over {dataset.sizes['seed']} seeds"
    columns = len(lines) if len(lines) < 6 else 3
    legend(
        fig,
        also=lines,
        title=title,
        ncols=columns,
        title_fontsize=style.points(9),
        where="upper center",
    )


def _distance(dataset: "xr.Dataset") -> "Figure":
    """Draws the Fréchet distance by steps, and its ratio to REPA's, paired seed by seed."""
    fig, axes = style.figure(1, 2, width=4.0, height=3.6)
    left, right = axes[0]
    _curve(left, dataset, "fd")
    left.set_yscale("log")
    left.set_ylabel("Fréchet distance to held-out images")
    right.axhline(0, color=LOOKS["repa"][0], lw=1)
    ratio = dataset["fd"] / dataset["fd"].sel(way="repa")
    others = [way for way in _ways(dataset) if way != "repa"]
    _points(right, dataset, others, ratio.copy(data=np.log2(ratio.values)))
    right.set_ylabel("log₂ of the distance / REPA's")
    _legend(fig, dataset, real=True)
    return fig


def _measures(dataset: "xr.Dataset") -> "Figure":
    """Draws the other measures of the paper's table, and recall."""
    others = [name for name in MEASURES if name != "fd"]
    fig, axes = style.figure(2, 2, width=4.0, height=2.7, sharex=True)
    for ax, name in zip(axes.flat, others, strict=True):
        _curve(ax, dataset, name)
        ax.set_ylabel(MEASURES[name])
        if name == "sfd":
            ax.set_yscale("log")
    for ax in axes[0]:
        ax.set_xlabel("")
    _legend(fig, dataset, real=True)
    return fig


def _losses(dataset: "xr.Dataset") -> "Figure":
    """Draws the loss terms on minibatches of the trainings that use them, and the alignment
    phase's.
    """
    phases = "start_loss" in dataset
    fig, axes = style.figure(1, 3 + phases, width=3.0, height=3.4)
    for ax, (term, label) in zip(axes[0], TERMS.items(), strict=False):
        trained = [w for w in _ways(dataset) if term == "velocity" or getattr(WAYS[w], term)]
        for way in trained:
            loss = dataset[f"{term}_loss"].sel(way=way)
            band(ax, dataset["logged"].values, loss, color=LOOKS[way][0], lw=1.3)
        ax.set_xlabel("steps")
        ax.set_ylabel(label)
    if phases:
        ax = axes[0, 3]
        for target in dataset["target"].values.astype(str):
            loss = dataset["start_loss"].sel(target=target)
            color = LOOKS["sail" if target == "noised latents" else "sail_clean"][0]
            band(ax, dataset["start_step"].values, loss, color=color, lw=1.3)
        ax.set_xlabel("steps of the alignment phase")
        ax.set_ylabel("alignment loss")
    _legend(fig, dataset, real=False)
    return fig


def _samples(dataset: "xr.Dataset") -> "Figure":
    """Draws samples of every training, class by class from the same noise, and real images
    below."""
    rows = {NAMES[way]: dataset["samples"].sel(way=way).values for way in _ways(dataset)}
    rows["images"] = dataset["images"].values
    low, high = np.quantile(rows["images"], [0, 1])
    fig, axes = style.figure(len(rows), 1, width=8.4, height=1.25)
    for ax, (name, images) in zip(axes[:, 0], rows.items(), strict=True):
        ax.imshow(_sheet(images), cmap="gray_r", vmin=low, vmax=high, interpolation="nearest")
        ax.set_title(name, loc="left")
        ax.set_axis_off()
    return fig


def _sheet(images: np.ndarray) -> np.ndarray:
    """Arranges images in two rows, with a border between them."""
    half = len(images) // 2
    framed = np.pad(images[: 2 * half], ((0, 0), (0, 1), (0, 1)), constant_values=images.min())
    return np.block([list(framed[:half]), list(framed[half:])])
