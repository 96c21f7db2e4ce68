"""The figures of `merge_digits`."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.bands import legend
from experiments.studies.merge_digits.findings import own_accuracy
from sail_jax.drawing import style


def _label(name: str) -> str:
    """Formats a model's or task's name for figures, with a degree sign for rotations."""
    return f"{name}°" if "rotate" in name else name


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Draws the figures of a finished run.

    It returns `accuracy` of every model on every task; `scale`, the validation accuracy that
    chooses the scales; and `line`, accuracies between two experts.
    """
    return {
        "accuracy": _plot_accuracy(dataset),
        "scale": _plot_scale(dataset),
        "line": _plot_line(dataset),
    }


def _plot_accuracy(dataset: xr.Dataset) -> Figure:
    """Draws the accuracy of every model by task, and its mean with the prediction."""
    models, tasks = dataset["model"].values.astype(str), dataset["task"].values.astype(str)
    size = {"width": 2.2 + 0.55 * len(tasks), "height": 1.4 + 0.4 * len(models)}
    fig, axes = style.figure(1, 2, **size, sharey=True, width_ratios=[len(tasks), 2.4])
    ax, side = axes[0]
    mean, spread = _mean_and_spread(dataset["accuracy"])
    floor = np.floor(10 * mean.min()) / 10
    mesh = ax.pcolormesh(mean, cmap=style.SEQUENTIAL, vmin=floor, vmax=1, edgecolors="white")
    ax.grid(visible=False)
    centred = {"ha": "center", "va": "center", "fontsize": style.points(8), "linespacing": 0.95}
    for (i, j), value in np.ndenumerate(mean):
        ink = "white" if mesh.norm(value) < 0.55 else "black"
        ax.text(j + 0.5, i + 0.5, f"{value:.2f}\n±{spread[i, j]:.2f}", color=ink, **centred)
    names = [_label(task).replace(" ", "\n", 1) for task in tasks]
    ax.set_xticks(np.arange(len(tasks)) + 0.5, names)
    y = np.arange(len(models)) + 0.5
    ax.set_yticks(y, [_label(model) for model in models])
    ax.invert_yaxis()
    ax.set_title("test accuracy by task (± s.d.)")

    average, error = _mean_and_spread(dataset["accuracy"].mean("task"))
    bars = {"fmt": "o", "color": style.PALETTE[0], "capsize": 3}
    side.errorbar(average, y, xerr=error, label="measured (± s.d.)", **bars)
    predicted = dataset["predicted"].mean("task").mean("replicate")
    hollow = {"mfc": "none", "color": style.PALETTE[1], "ms": 9}
    side.plot(predicted, y, "D", label="predicted: outputs added", **hollow)
    own = float(own_accuracy(dataset).mean())
    side.axvline(own, color=style.FAINT, ls="--", lw=1, label="expert, own task")
    side.set_title(f"mean over the {len(tasks)} tasks")
    side.set_xlabel("test accuracy")
    side.tick_params(left=False)
    legend(fig, side, ncols=3)
    return fig


def _plot_scale(dataset: xr.Dataset) -> Figure:
    """Draws validation accuracy against the scale, and marks the chosen scales."""
    fig, axes = style.figure(width=6.2, height=3.8)
    ax = axes[0, 0]
    for i, merge in enumerate(dataset["merge"].values.astype(str)):
        curve = dataset["validation"].sel(merge=merge)
        _band(ax, curve["scale"], curve, style.PALETTE[i], merge)
        chosen = dataset["chosen_scale"].sel(merge=merge)
        ax.plot(chosen, curve.sel(scale=chosen), "o", color=style.PALETTE[i], mec="white", ms=6)
    count = dataset.sizes["task"]
    ax.axvline(1 / count, color=style.FAINT, ls="--", lw=1, label=f"soup: scale 1/{count}")
    ax.plot([], [], "o", color=style.FAINT, label="chosen, by split")
    ax.set_xlabel("scale of the merged task vector")
    ax.set_ylabel("mean validation accuracy (± s.d.)")
    legend(fig, ax, ncols=4, where="upper center")
    return fig


def _plot_line(dataset: xr.Dataset) -> Figure:
    """Draws accuracy along the line between two experts, measured and predicted."""
    ends = dataset["end"].values.astype(str)
    fig, axes = style.figure(1, 3, width=3.1, height=3.5, sharey=True)
    panels = {f"on {_label(end)}": dataset.sel(end=end) for end in ends}
    panels["mean of the two"] = dataset.mean("end")
    dashed = {"color": style.PALETTE[1], "ls": (0, (4, 2))}
    dotted = {"color": style.FAINT, "lw": 1, "ls": ":"}
    for ax, (title, panel) in zip(axes[0], panels.items(), strict=True):
        w, mean = dataset["weight"], panel.mean("replicate")
        _band(ax, w, panel["line_accuracy"], style.PALETTE[0], "weights interpolated (± s.d.)")
        ax.plot(w, mean["line_predicted"], label="predicted: outputs interpolated", **dashed)
        ax.plot(w, mean["line_chord"], label="accuracies interpolated", **dotted)
        ax.set_title(title)
        ax.set_xlabel(f"weight of the expert {_label(ends[1])}")
    axes[0, 0].set_ylabel("test accuracy")
    legend(fig, axes[0, 0], ncols=3, where="upper center")
    return fig


def _mean_and_spread(values: xr.DataArray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard deviation over repetitions."""
    return values.mean("replicate").values, values.std("replicate", ddof=1).values


def _band(ax: Axes, x: xr.DataArray, values: xr.DataArray, colour: str, label: str) -> None:
    """Draws the mean over repetitions as a line, and its standard deviation as a band."""
    mean, spread = _mean_and_spread(values)
    ax.plot(x, mean, color=colour, label=label)
    ax.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.2, lw=0)
