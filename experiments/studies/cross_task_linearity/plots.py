"""The figures of `cross_task_linearity`, one for each part that was run."""

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D

from experiments.lab.bands import legend
from experiments.studies.cross_task_linearity.answers import PUBLISHED, mean_error
from sail_jax.drawing import style

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TURN = "1 − cosine"
MARKERS = "oDs^v"
# Smaller values of 1 - cosine and gaps are rounding.
EPS = float(np.finfo(np.float32).eps)
KINDS = {"turn": TURN, "coefficient": "coefficient", "gap": "relative gap"}


def plot(dataset: "xr.Dataset") -> "dict[str, Figure]":
    """Draws a figure for each part that was run."""
    # The function with a part's name draws it.
    return {part: globals()[f"_{part}"](dataset) for part in dataset.attrs["parts"].split()}


def _seeds(dataset: "xr.Dataset") -> str:
    """Returns the number of repetitions as text."""
    return f"{dataset.sizes['replicate']} repetitions"


def _steps(ax: "Axes", labels: np.ndarray) -> np.ndarray:
    """Puts layers along the x axis; many blocks get numbers only."""
    x, told = np.arange(len(labels), dtype=float), [str(label) for label in labels]
    if len(told) > 5:
        told = [*(label.split()[-1] for label in told[:-1]), "out"]
        ax.set_xlabel("block")
    ax.set_xticks(x, [label.replace(" ", "\n", 1) for label in told])
    ax.set_xlim(-0.5, len(x) - 0.5)
    return x


def _points(ax: "Axes", x: Any, values: "xr.DataArray", i: int, label: str, **look: Any) -> None:
    """Draws the means over repetitions with standard errors, in the i-th colour and marker."""
    mean, error = mean_error(values)
    look = {"color": style.PALETTE[i], "ls": "-", "capsize": 2, "ms": 4.5, "lw": 1.2} | look
    ax.errorbar(x, mean, yerr=error, marker=MARKERS[i % len(MARKERS)], label=label, **look)


def _interval(ax: "Axes", x: np.ndarray, quantiles: "xr.DataArray", color: str, way: str) -> None:
    """Draws a median, quartiles and the range from 5 to 95 % for each layer.

    Quantiles are over images. The figure shows their means over pairs and repetitions.
    """
    low, first, middle, third, high = mean_error(quantiles)[0].T
    ax.vlines(x, low, high, color=color, lw=1)
    ax.vlines(x, first, third, color=color, lw=5, alpha=0.55)
    ax.plot(x, middle, way, color=color, ms=4.5, mec="white", mew=0.6)


def _rotated(dataset: "xr.Dataset") -> "Figure":
    """Draws the linearity of the MLPs fine-tuned on rotated images."""
    return _line(dataset, {"rotated": "rotated images, MLP"}, "layer")


def _split_classes(dataset: "xr.Dataset") -> "Figure":
    """Draws the linearity of the ResNets fine-tuned on different classes."""
    rows = {
        "split_interpolated": "ResNet, statistics interpolated",
        "split_batch": "ResNet, statistics of the images",
    }
    return _line(dataset, rows, "block")


def _line(dataset: "xr.Dataset", rows: dict[str, str], layer: str) -> "Figure":
    """Draws linearity by layer, a column for each prefix of variables in `rows`.

    From top to bottom: 1 - cosine at each alpha, with its value between the two models; its spread
    over images; and the spread of coefficients.
    """
    fig, axes = style.figure(3, len(rows), width=4.8, height=2.4, sharex="col")
    alphas = dataset["alpha"].values
    for column, (name, words) in zip(axes.T, rows.items(), strict=True):
        mean, spread, coefficient = column
        x = np.arange(dataset.sizes[layer], dtype=float)
        for i, alpha in enumerate(alphas):
            shift = 0.1 * (i - (len(alphas) - 1) / 2)
            values = dataset[f"{name}_turn"].sel(alpha=alpha)
            _points(mean, x + shift, values, i, f"interpolated weights and features, α = {alpha:g}")
        look = {"color": style.INK, "mfc": "none"}
        _points(mean, x, dataset[f"{name}_baseline"], len(alphas), "the two models", **look)
        mean.set_title(f"{words}: direction, mean ± s.e.")
        _interval(spread, x - 0.12, dataset[f"{name}_spread_turn"], style.PALETTE[1], "o")
        _interval(spread, x + 0.12, dataset[f"{name}_spread_baseline"], style.INK, "D")
        spread.set_title("direction by image, α = 0.5")
        for ax in (mean, spread):
            ax.set_yscale("log")
            ax.set_ylabel(TURN)
        coefficient.axhline(1, color=style.FAINT, lw=1, ls="--")
        _interval(coefficient, x, dataset[f"{name}_spread_coefficient"], style.PALETTE[1], "o")
        coefficient.set_ylabel("coefficient")
        coefficient.set_title("length by image, α = 0.5")
        _steps(coefficient, dataset[layer].values)
    title = f"{_seeds(dataset)}; by image: median, quartiles, 5 to 95 %"
    legend(fig, axes[0, 0], title=title, ncols=len(rows))
    return fig


def _scratch(dataset: "xr.Dataset") -> "Figure":
    """Draws linearity by layer, and the loss barrier, for models with and without alignment."""
    settings, ways = (dataset[name].values.astype(str) for name in ("setting", "way"))
    fig, axes = style.figure(len(settings), 4, width=3.0, height=2.8)
    for row, setting in zip(axes, settings, strict=True):
        at = dataset.sel(setting=setting)
        for ax, (kind, words) in zip(row, KINDS.items(), strict=False):
            x = _steps(ax, dataset["layer"].values)
            for i, way in enumerate(ways):
                values, shift = at[f"scratch_{kind}"].sel(way=way), 0.1 * (i - 1.5)
                values = values.clip(min=EPS) if kind != "coefficient" else values
                _points(ax, x + shift, values, i, _unaligned(way))
            ax.set_ylabel(f"{words} (± s.e.)")
            ax.set_title(setting)
        row[0].set_yscale("log")
        # Gaps of pre-trained models may be far below the others.
        if float(at["scratch_gap"].min()) < 0.01:
            row[2].set_yscale("log")
        row[1].axhline(1, color=style.FAINT, lw=1, ls="--")
        for i, way in enumerate(ways):
            _points(row[3], [i], at["scratch_barrier"].sel(way=way), i, "", ls="")
        short = [w.removesuffix(" matching") if w != "none" else "scratch" for w in ways]
        row[3].set_xticks(range(len(ways)), [w.replace("-", "-\n") for w in short])
        row[3].tick_params(axis="x", labelsize=style.points(8))
        row[3].set_xlim(-0.5, len(ways) - 0.5)
        top = max(0.1, 1.1 * float(at["scratch_barrier"].mean("replicate").max()))
        row[3].set_ylim(-0.04 * top, top)
        row[3].set_ylabel("loss barrier (nats, ± s.e.)")
        row[3].set_title(setting)
    title = f"middle of the line (no less than rounding, ε), {_seeds(dataset)}"
    legend(fig, axes[0, 0], title=title, ncols=4, where="upper center")
    return fig


def _unaligned(way: str) -> str:
    """Formats a kind of the part "scratch" for the legend."""
    return "from scratch" if way == "none" else f"from scratch, {way}" if "match" in way else way


def _random_labels(dataset: "xr.Dataset") -> "Figure":
    """Draws linearity by layer half way between models, by the labels of their training."""
    rows = {
        "mlp_interpolated": ("MLP", "layer"),
        "resnet_interpolated": ("ResNet, statistics interpolated", "block"),
        "resnet_batch": ("ResNet, statistics of the images", "block"),
    }
    fig, axes = style.figure(len(rows), len(KINDS), width=3.4, height=2.4)
    for row, (name, (words, layer)) in zip(axes, rows.items(), strict=True):
        for ax, (kind, label) in zip(row, KINDS.items(), strict=True):
            x = _steps(ax, dataset[layer].values)
            for j, target in enumerate(dataset["target"].values.astype(str)):
                look: dict[str, Any] = {"ls": "--", "mfc": "none"} if j else {}
                for i, labels in enumerate(dataset["labels"].values.astype(str)):
                    values = dataset[f"random_{name}_{kind}"].sel(labels=labels, target=target)
                    values = values if kind == "coefficient" else values.clip(min=EPS)
                    told = f"{labels} labels" if labels != "none" else "no pre-training"
                    at = x + 0.1 * (i - 1) + 0.04 * (j - 0.5)
                    _points(ax, at, values, i, f"{told}, {target}", **look)
            ax.set_ylabel(f"{label} (± s.e.)")
            ax.set_title(words)
        row[0].set_yscale("log")
        row[1].axhline(1, color=style.FAINT, lw=1, ls="--")
    told = "labels of pre-training, and fine-tuning images of two models (from rounding, ε)"
    legend(fig, axes[0, 0], title=f"{told}, {_seeds(dataset)}", ncols=3, where="upper center")
    return fig


def _averaging(dataset: "xr.Dataset") -> "Figure":
    """Draws three panels about averaged weights and averaged logits.

    They show the accuracies of both on sets of three models, the gap by the number of models, and
    the accuracies on the line between two tasks.
    """
    fig, axes = style.figure(1, 3, width=4.0, height=3.4)
    ax, by_size, line = axes[0]
    three = dataset.sel(subset=dataset["size"] == 3)
    marks = {"ms": 4, "alpha": 0.6, "ls": ""}
    low, high = 1.0, 0.0  # the range of accuracies, for the diagonal
    for r in range(dataset.sizes["replicate"]):
        x, y = (three[f"averaging_{name}"][r].values for name in ("average", "ensemble"))
        color = style.PALETTE[r % len(style.PALETTE)]
        ax.plot(x, y, MARKERS[r % len(MARKERS)], color=color, mec="none", **marks)
        low, high = min(low, x.min(), y.min()), max(high, x.max(), y.max())
    # Through two different points, even if all accuracies are equal.
    ax.axline((low, low), (high + 1e-6, high + 1e-6), color=style.FAINT, ls="--", lw=1)
    ax.set_xlabel("accuracy of averaged weights")
    ax.set_ylabel("accuracy of averaged logits")
    ax.set_title("sets of three, one task; colour: repetition")

    gap = dataset["averaging_gap"].groupby("size").mean()
    sizes = gap["size"].values
    for i, layer in enumerate(dataset["layer"].values.astype(str)):
        _points(by_size, sizes, gap.sel(layer=layer), i, layer)
    pair = float(gap.sel(layer="output", size=2).mean())
    # For a quadratic function with equal gaps of all pairs of models.
    theory = pair * 2 * (sizes - 1) / sizes
    look = {"color": style.INK, "ls": "--", "lw": 1}
    by_size.plot(sizes, theory, label="output, by 2 (k − 1) / k", **look)
    mean, error = mean_error(gap)
    top = max(float(theory.max()), float((mean + error).max()))
    by_size.set_ylim(0, 1.5 * top)
    by_size.set_xlabel("models averaged, k")
    by_size.set_ylabel("relative gap (± s.e.)")
    by_size.set_title("one task")
    by_size.legend(frameon=False, fontsize=style.points(8), ncols=2, loc="upper left")

    labels = {"average": "weights", "ensemble": "logits", "chord": "accuracies"}
    for i, (name, label) in enumerate(labels.items()):
        ls = {"average": "-", "ensemble": "--", "chord": ":"}[name]
        mean, error = mean_error(dataset[f"line_{name}"])
        line.plot(dataset["weight"], mean, ls, color=style.PALETTE[i], lw=1.5, label=label)
        band = {"color": style.PALETTE[i], "alpha": 0.15, "lw": 0}
        line.fill_between(dataset["weight"], mean - error, mean + error, **band)
    line.set_xlabel("weight α of the first model")
    line.set_ylabel("accuracy on both tasks (± s.e.)")
    line.set_title("two tasks, interpolated:")
    bottom, top = line.get_ylim()
    line.set_ylim(bottom - 0.35 * (top - bottom), top)
    line.legend(frameon=False, fontsize=style.points(8.5), loc="lower center")
    return fig


def _arithmetic(dataset: "xr.Dataset") -> "Figure":
    """Draws how close both sides of equations 2 to 4 are, by layer and by scale."""
    rows = {
        "addition": "equation 2, addition",
        "midpoint": "equation 3, negation",
        "reflection": "equation 4, negation",
    }
    scales = dataset["scale"].values
    near = scales[np.abs(scales - 0.4).argmin()]
    fig, axes = style.figure(len(rows), 3, width=3.5, height=2.5)
    for row, (name, words) in zip(axes, rows.items(), strict=True):
        at = dataset.sel(scale=near)
        x = _steps(row[0], dataset["layer"].values)
        _points(row[0], x - 0.06, at[f"{name}_turn"], 4, "both sides of the equation")
        look = {"color": style.INK, "ls": "--", "mfc": "none"}
        _points(row[0], x + 0.06, at[f"{name}_baseline"], 1, "the models of one side", **look)
        row[0].set_yscale("log")
        row[0].set_ylabel(f"{TURN} (± s.e.)")
        _steps(row[1], dataset["layer"].values)
        _points(row[1], x, at[f"{name}_coefficient"], 4, "")
        row[1].axhline(1, color=style.FAINT, lw=1, ls="--")
        row[1].set_ylabel("coefficient (± s.e.)")
        gap = dataset[f"{name}_gap"]
        for i, layer in enumerate(dataset["layer"].values.astype(str)):
            _points(row[2], scales, gap.sel(layer=layer), i, layer)
        # A guide of slope 2, slightly below the lowest curve.
        start = 0.6 * float(gap.isel(scale=0).mean(["replicate"]).min())
        row[2].plot(scales, start * (scales / scales[0]) ** 2, color=style.INK, ls=":", lw=1)
        row[2].set(xscale="log", yscale="log", xlabel="scale s", ylabel="relative gap (± s.e.)")
        row[2].set_xticks(scales, [f"{s:g}" for s in scales])
        row[2].minorticks_off()
        for ax in row[:2]:
            ax.set_title(f"{words}, s = {near:g}")
        row[2].set_title(words)
    slope = Line2D([], [], color=style.INK, ls=":", lw=1, label="slope 2: second order")
    legend(
        fig,
        axes[0, 0],
        axes[0, 2],
        also=[slope],
        title=_seeds(dataset),
        ncols=4,
        where="upper center",
    )
    return fig


def _stitching(dataset: "xr.Dataset") -> "Figure":
    """Draws accuracies of stitched features by layer, and of added and subtracted ones by scale."""
    fig, axes = style.figure(1, 4, width=3.1, height=3.5, sharey=True)
    plain, added, task, upright = axes[0]
    x = _steps(plain, dataset["hidden"].values)
    _points(plain, x, dataset["stitched_stitched"], 3, "stitched")
    for name, ls, label in (("own", "--", "the lower model"), ("upper", ":", "the upper model")):
        mean = float(mean_error(dataset[f"stitched_{name}"])[0])
        plain.axhline(mean, color=style.INK, ls=ls, lw=1, label=label)
    plain.set_xlabel("stitched after")
    plain.set_ylabel("accuracy (± s.e.)")
    plain.set_title("one model in another,\ntask of the lower")
    middle = dataset["hidden"].values[(dataset.sizes["hidden"] - 1) // 2]
    at, scales = dataset.sel(hidden=middle), dataset["stitch_scale"].values
    sums = {
        "features": "sums of features",
        "weights": "sums of weights",
        "single": "one model alone",
    }
    for i, (name, label) in enumerate(sums.items()):
        look: dict[str, Any] = {"mfc": "none", "ms": 7} if name == "weights" else {}
        _points(added, scales, at[f"stitched_addition_{name}"], i, label, **look)
        if name == "single":
            continue
        for ax, where in ((task, "task"), (upright, "upright")):
            _points(ax, scales, at[f"stitched_negation_{name}_{where}"], i, label, **look)
    for ax, title in (
        (added, "two task vectors added,\nboth tasks"),
        (task, "one subtracted,\nits task"),
        (upright, "one subtracted,\npre-training task"),
    ):
        ax.set_title(title)
        ax.set_xlabel(f"scale, in the base after {middle}")
    legend(fig, plain, added, title=_seeds(dataset), ncols=6, where="upper center")
    return fig


def _theorem(dataset: "xr.Dataset") -> "Figure":
    """Draws the gap of the loss against two predictors, and the R^2 of all of them."""
    fig, axes = style.figure(1, 3, width=3.9, height=3.5, width_ratios=[1, 1, 1.15])
    wanted = {
        "main_term": "Theorem 1's main term (nats)",
        "along_in_middle": "second order along the line,\nat its middle (nats)",
    }
    for ax, (name, label) in zip(axes[0], wanted.items(), strict=False):
        for i, steps in enumerate(dataset["checkpoint"].values):
            at = dataset.sel(checkpoint=steps)
            look = {"color": style.PALETTE[i % len(style.PALETTE)], "ms": 4, "alpha": 0.7}
            mark, told = MARKERS[i % len(MARKERS)], f"{steps} steps"
            ax.plot(
                at[f"theorem_{name}"].values.ravel(), at["theorem_gap"].values.ravel(), mark,
                mec="none", label=told, **look,
            )  # fmt: skip
        ax.set(xscale="log", yscale="log", xlabel=label, ylabel="gap of the loss (nats)")
        ax.axline((1, 1), (10, 10), color=style.FAINT, ls="--", lw=1)
    names = {
        "main_term": "main term",
        "distance": "squared distance",
        "norm": "norm of the Hessian",
        "norm_on_segment": "main term, largest\nnorm on the segment",
        "along_at_base": "along the line,\nat the checkpoint",
        "along_in_middle": "along the line,\nin its middle",
    }
    ax, y = axes[0, 2], np.arange(len(names), dtype=float)
    shown = dataset.sel(predictor=list(names))
    value = shown["r_squared"].values
    whisker = np.abs(np.stack([shown[f"r_squared_{e}"].values for e in ("low", "high")]) - value)
    bars = {"fmt": "o", "color": style.PALETTE[0], "capsize": 3, "ms": 5}
    ax.errorbar(value, y, xerr=whisker, label="measured, 95 %", **bars)
    factors = [list(names).index(str(f)) for f in dataset["factor"].values]
    hollow = {"mfc": "none", "color": style.PALETTE[1], "ms": 6}
    ax.plot(dataset["independent"], y[factors] + 0.22, "D", label="if independent", **hollow)
    cross = {"color": style.INK, "ms": 6}
    ax.plot([*PUBLISHED.values()], y[factors] - 0.22, "x", label="published", **cross)
    ax.set_yticks(y, names.values())
    ax.invert_yaxis()
    ax.set_xlim(-0.03, 1.03)
    ax.set_xlabel("R² of a linear regression of the gap")
    title = f"checkpoints of pre-training, {_seeds(dataset)}; dashed: equal"
    legend(fig, axes[0, 0], ax, title=title, ncols=7, where="upper center")
    return fig
