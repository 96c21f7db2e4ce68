"""The figures of `sail_language`; each start has the same colour in all of them."""

from typing import TYPE_CHECKING

import numpy as np

from experiments.data.benchmarks import BENCHMARKS
from experiments.lab.bands import band, legend
from experiments.lab.findings import mean_and_error
from experiments.studies.sail_language import merges
from experiments.studies.sail_language.claims import COLUMNS, TABLE_2, perplexity
from experiments.studies.sail_language.config import RETRAINED, SCRATCH, WAYS
from experiments.studies.shared.gamma_sweep import PUBLISHED
from experiments.studies.shared.panels import point, rows
from sail_jax.drawing import style

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {
    SCRATCH: style.FAINT,
    "ligo": style.PALETTE[3],
    "uniform": style.PALETTE[5],
    "greedy": style.PALETTE[2],
    "distance": style.PALETTE[4],
    "sweep": style.PALETTE[0],
    "grown": style.PALETTE[1],
    RETRAINED: style.PALETTE[6],
}
MARKERS = dict(zip(WAYS, "svoD^PX*", strict=True))


def plot(dataset: "xr.Dataset") -> "dict[str, Figure]":
    """Draws perplexity, the loss by gamma, savings, answers and the checkpoints' mean.

    For checkpoints on disk there is one figure of merges, and two of trainings that continue from
    them: perplexity during training (Fig. 7), and answers with Table 2's. If gamma is also chosen
    by retraining, one figure has the loss by gamma after retraining (Fig. 2b).
    """
    again = {"retrained": _retrained(dataset)} if "retrained_loss" in dataset else {}
    if not merges.is_of(dataset):
        return {
            "perplexity": _perplexity(dataset),
            "gamma": _gamma(dataset),
            "saved": _saved(dataset),
            "answers": _answers(dataset),
            "series": _series(dataset),
            **again,
        }
    figures = {"checkpoints": _checkpoints(dataset)}
    if not merges.is_trained(dataset):
        return figures
    return figures | {"training": _training(dataset), "table_2": _table_2(dataset), **again}


def _ways(dataset: "xr.Dataset") -> list[str]:
    """Lists the starts of a run."""
    return list(dataset["way"].values.astype(str))


def _seeds(dataset: "xr.Dataset") -> str:
    """Returns the drawn statistics and the number of seeds, as text."""
    return f"mean ± s.e. of {dataset.sizes['seed']} seeds"


def _perplexity(dataset: "xr.Dataset") -> "Figure":
    """Draws the perplexity during training.

    From scratch, it starts far above the others; the right panel omits these values.
    """
    fig, axes = style.figure(1, 2, width=4.4, height=3.9)
    steps, value = dataset["step"].values, perplexity(dataset)
    for ax in axes[0]:
        for way in _ways(dataset):
            band(ax, steps, value.sel(way=way), color=COLORS[way], label=WAYS[way], lw=1.6)
        ax.set_xlabel("steps on the target D$_t$")
        ax.set_ylabel("held-out perplexity per token")
    style.logarithmic(axes[0, 0], "y")
    axes[0, 0].set_title("all of it")
    final = value.isel(step=-1)
    low, high = float(final.min()), float(final.max())
    late = value.isel(step=slice(dataset.sizes["step"] // 3, None))  # the last two thirds
    top = max(high, float(late.max()))
    axes[0, 1].set_ylim(low - 0.08 * (top - low), top + 0.05 * (top - low))
    axes[0, 1].set_title("the end")
    legend(fig, axes[0, 0], title=_seeds(dataset), ncols=4, where="upper center")
    return fig


def _gamma(dataset: "xr.Dataset") -> "Figure":
    """Draws the loss before training along the line through two sources."""
    pairs = dataset["pair"].values.astype(str)
    titles = {"sweep": "θ$_1$, θ$_2$ of the target's shape", "grown": "shallow and narrow, grown"}
    fig, axes = style.figure(1, len(pairs), width=5.0, height=3.9)
    gamma = dataset["gamma"].values
    for ax, pair in zip(axes[0], pairs, strict=True):
        loss = dataset["gamma_loss"].sel(pair=pair, text="held out")
        band(ax, gamma, loss, color=COLORS[pair], label="held-out loss", lw=1.6)
        mean = loss.mean("seed").values
        i = int(mean.argmin())
        ax.plot(gamma[i], mean[i], "*", ms=11, color=style.INK, label="lowest")
        if pair == "sweep":
            value, error = map(float, mean_and_error(dataset["gamma_distance"]))
            if np.isfinite(value):
                color = COLORS["distance"]
                ax.axvspan(value - error, value + error, color=color, alpha=0.3, lw=0)
                ax.axvline(value, color=color, lw=1.4, label="eq. 11 ± s.e.")
            ax.axvline(PUBLISHED, color=style.INK, lw=0.9, ls=":", label="published γ* = −0.1244")
        ax.set_xlabel("γ, weight of the first source")
        ax.set_ylabel("loss on D$_t$ before training (nats)")
        ax.set_title(titles[pair])
    legend(fig, axes[0, 0], title=_seeds(dataset), ncols=2 * len(pairs), where="upper center")
    return fig


def _saved(dataset: "xr.Dataset") -> "Figure":
    """Draws steps and compute saved: each seed as a tick, mean and standard error."""
    ways = [way for way in _ways(dataset) if way != SCRATCH]
    panels = {
        "saved": (1, "steps saved"),
        "compute_saved": (100, "compute saved (%),\nwithout the sources'"),
        "compute_saved_with_sources": (100, "compute saved (%),\nwith the sources'"),
    }
    fig, axes = style.figure(1, 3, width=3.2, height=1.6 + 0.3 * len(ways), sharey=True)
    for ax, (name, (scale, label)) in zip(axes[0], panels.items(), strict=True):
        ax.axvline(0, color=style.INK, lw=0.8)
        for y, way in enumerate(reversed(ways)):
            values = scale * dataset[name].sel(way=way)
            point(ax, y, values, ticks=8, fmt=MARKERS[way], color=COLORS[way], ms=6)
        ax.set_xlabel(label)
    rows(axes[0, 0], [WAYS[way] for way in ways])
    fig.suptitle(
        f"To the lowest loss that both reach, compared with scratch: {_seeds(dataset)}",
        fontsize=style.points(10),
    )
    return fig


def _answers(dataset: "xr.Dataset") -> "Figure":
    """Draws correct answers here, and Table 2's for networks of a different scale."""
    tasks, ways = dataset["task"].values.astype(str), _ways(dataset)
    height = 1.9 + 0.34 * len(ways)
    fig, axes = style.figure(1, len(tasks) + 1, width=3.3, height=height)
    right = 100 * dataset["accuracy"]
    for ax, task in zip(axes[0], tasks, strict=False):
        for y, way in enumerate(reversed(ways)):
            _before_and_after(ax, y, way, right.sel(way=way, task=task))
        if task != "file":
            ax.axvline(100 / dataset.attrs["choices"], color=style.INK, lw=0.9, ls="--")
        rows(ax, [WAYS[way] for way in ways])
        ax.set_xlabel("right answers (%)")
        ax.set_title(f"here: {style.literal(task)}")
    for ax in axes[0, 1:-1]:
        ax.tick_params(labelleft=False)
    ax = axes[0, -1]
    for i, (name, row) in enumerate(TABLE_2.items()):
        places = range(len(COLUMNS) - 1, -1, -1)
        ax.plot(row, places, "o-", ms=3.5, lw=0.9, color=style.PALETTE[i], label=name)
    ax.set_yticks(range(len(COLUMNS)), ["SAIL", *(WAYS[w].split(" (")[0] for w in COLUMNS[-2::-1])])
    ax.set_xlabel("right answers (%)")
    ax.set_title("printed, other scale: Table 2")
    title = "hollow: before training, filled: after it; dashed: chance; lines: Table 2's rows"
    legend(fig, ax, title=title, ncols=6, where="upper center")
    return fig


def _before_and_after(ax: "Axes", y: int, way: str, right: "xr.DataArray") -> None:
    """Draws correct answers before and after training, slightly above and below a height."""
    for when, fill, up in (("before", "white", 0.14), ("after", COLORS[way], -0.14)):
        look = {"fmt": MARKERS[way], "color": COLORS[way], "mfc": fill, "ms": 5}
        point(ax, y + up, right.sel(when=when), **look)


def _series(dataset: "xr.Dataset") -> "Figure":
    """Draws losses of the checkpoints of the first source's training, and of their mean."""
    names = dataset["checkpoint"].values.astype(str)
    titles = {"D_1": "on D$_1$, its own text", "D_t": "on D$_t$, the target's"}
    fig, axes = style.figure(1, 2, width=3.8, height=3.4)
    for ax, of in zip(axes[0], dataset["of"].values.astype(str), strict=True):
        loss = dataset["series_loss"].sel(of=of)
        # Differences between seeds are larger than between their checkpoints, so each is compared
        # with itself.
        loss = loss - loss.isel(checkpoint=-2)
        mean, error = mean_and_error(loss)
        for i in range(len(names)):
            color = style.PALETTE[1] if names[i] == "mean" else style.PALETTE[0]
            per_seed = loss.isel(checkpoint=i).values
            ax.plot([i] * per_seed.size, per_seed, "_", color=style.FAINT, ms=10)
            ax.errorbar(i, mean[i], yerr=error[i], fmt="o", color=color, capsize=3)
        ax.axhline(0, color=style.INK, lw=0.8)
        ax.set_xticks(range(len(names)), list(map(style.literal, names)))
        ax.set_xlabel("checkpoint (steps), and their mean")
        ax.set_ylabel("loss minus the last one's (nats)")
        ax.set_title(titles[of])
    fig.suptitle(f"θ$_1$'s run: {_seeds(dataset)}", fontsize=style.points(10))
    return fig


def _checkpoints(dataset: "xr.Dataset") -> "Figure":
    """Draws perplexity and answers of checkpoints and their merges, and the loss by gamma."""
    names = dataset["model"].values.astype(str)
    tasks = dataset["task"].values.astype(str)
    height = max(3.2, 1.2 + 0.34 * len(names))
    fig, axes = style.figure(1, 2 + len(tasks), width=3.6, height=height)
    quantities = [("held-out perplexity per token", perplexity(dataset))]
    quantities += [
        (f"right answers, {style.literal(task)} (%)", 100 * dataset["accuracy"].sel(task=task))
        for task in tasks
    ]
    for ax, (label, values) in zip(axes[0], quantities, strict=False):
        for y, name in enumerate(names[::-1]):
            point(ax, y, values.sel(model=name), color=COLORS.get(name, style.INK))
        ax.set_yticks(range(len(names)), list(map(style.literal, names[::-1])))
        ax.set_xlabel(label)
    ax, loss = axes[0, -1], dataset["gamma_loss"].sel(text="held out")
    band(ax, dataset["gamma"].values, loss, color=COLORS["sweep"], lw=1.6)
    ax.set_xlabel("γ, weight of the first checkpoint")
    ax.set_ylabel("held-out loss (nats)")
    fig.suptitle(
        f"Merged without training: {_seeds(dataset)} (draws of text)", fontsize=style.points(10)
    )
    return fig


def _retrained(dataset: "xr.Dataset") -> "Figure":
    """Draws the loss by gamma before training, and after each number of steps (Fig. 2b)."""
    looks, gamma = dataset["look"].values, dataset["gamma"].values
    fig, axes = style.figure(1, 2, width=4.4, height=3.6)
    first = dataset["gamma_loss"].sel(text="held out")
    first = first.sel(pair="sweep") if "pair" in first.dims else first
    lines = {"before training": first}
    after = dataset["retrained_loss"].sel(text="held out")
    lines |= {f"after {n} steps": after.sel(look=n) for n in looks}
    # Training flattens the line. The second panel shows the losses after training, and clips
    # earlier ones.
    top = 1.2 * float((after - after.min("gamma")).max())
    for k, (label, loss) in enumerate(lines.items()):
        loss, color = loss.transpose("seed", "gamma"), style.PALETTE[k % len(style.PALETTE)]
        band(axes[0, 0], gamma, loss, color=color, label=label, lw=1.5)
        band(axes[0, 1], gamma, loss - loss.min("gamma"), color=color, lw=1.5)
        best = gamma[loss.values.argmin(-1)]
        height = np.full(len(best), -0.05 * top * (k + 1))
        axes[0, 1].plot(best, height, "|", color=color, ms=9)
    for ax, label in zip(axes[0], ("held-out loss (nats)", "above each seed's least"), strict=True):
        ax.set_xlabel("γ, weight of the first")
        ax.set_ylabel(label)
    axes[0, 1].set_ylim(-0.05 * top * (len(lines) + 1), top)
    axes[0, 1].set_title("ticks: each seed's best γ", fontsize=style.points(9))
    legend(fig, axes[0, 0], title=_seeds(dataset), ncols=len(lines), where="upper center")
    return fig


def _training(dataset: "xr.Dataset") -> "Figure":
    """Draws perplexity during training, of the text and of correct choices (Fig. 7)."""
    tasks, step = dataset["task"].values.astype(str), dataset["step"].values
    columns = min(4, len(tasks) + 1)
    lines = -(-(len(tasks) + 1) // columns)
    fig, axes = style.figure(lines, columns, width=3.0, height=2.6)
    panels = {"held-out text": dataset["trained_loss"]}
    panels |= {f"right choices, {_title(t)}": dataset["answer_loss"].sel(task=t) for t in tasks}
    for ax, (title, nats) in zip(axes.flat, panels.items(), strict=False):
        for way in _ways(dataset):
            loss = nats.sel(way=way).transpose("seed", "step")
            values = loss.copy(data=np.exp(loss.values))
            band(ax, step, values, color=COLORS[way], label=merges.named(way), lw=1.4)
        ax.set_yscale("log")
        ax.set_title(title, fontsize=style.points(9))
        ax.set_xlabel("steps")
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    axes[0, 0].set_ylabel("perplexity per token")
    legend(fig, axes[0, 0], title=_seeds(dataset), ncols=3, where="upper center")
    return fig


def _table_2(dataset: "xr.Dataset") -> "Figure":
    """Draws correct answers before and after training, with Table 2's for comparison."""
    run, tasks, ways = merges.trained(dataset), dataset["task"].values.astype(str), _ways(dataset)
    columns = min(4, len(tasks))
    lines = -(-len(tasks) // columns)
    fig, axes = style.figure(lines, columns, width=3.0, height=1.2 + 0.3 * len(ways))
    for i, (ax, task) in enumerate(zip(axes.flat, tasks, strict=False)):
        for y, way in enumerate(reversed(ways)):
            _before_and_after(ax, y, way, 100 * run["accuracy"].sel(way=way, task=task))
            if task in BENCHMARKS and way in COLUMNS:
                printed = TABLE_2[BENCHMARKS[task].title][COLUMNS.index(way)]
                ax.plot(printed, y, "|", color=style.INK, ms=11)
        ax.axvline(100 * float(dataset["chance"].sel(task=task)), color=style.INK, lw=0.9, ls="--")
        labels = [merges.named(way) for way in reversed(ways)] if i % columns == 0 else []
        ax.set_yticks(range(len(ways)) if labels else [], labels)
        ax.set_ylim(-0.6, len(ways) - 0.4)
        ax.set_title(_title(task), fontsize=style.points(9))
        ax.set_xlabel("right answers (%)")
    for ax in axes.flat[len(tasks) :]:
        ax.set_axis_off()
    fig.suptitle(
        "hollow: before training, filled: after it; bars: printed of OLMo-1B; dashed: chance",
        fontsize=style.points(10),
    )
    return fig


def _title(task: str) -> str:
    """Formats the name of a kind of question; benchmarks have the paper's names."""
    return BENCHMARKS[task].title if task in BENCHMARKS else style.literal(task)
