"""Which merge keeps what the experts know, on real data?

A network is pre-trained on upright handwritten digits and copies of it are fine-tuned on tasks made
of the same digits: rotations of all of them, or some of the classes. The copies are merged by a
uniform soup (Wortsman et al. 2022), by task arithmetic (Ilharco et al. 2023) and by TIES (Yadav et
al. 2023), whose scale is chosen on held-out digits. The prediction beside the measurement is
cross-task linearity (arXiv 2402.03660): weights that are added act as if the outputs were added.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr
from jaxtyping import Array, Float, PyTree
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.data import digits
from experiments.data.digits import Task
from experiments.lab import validate
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.models.mlp import MLP
from sail_jax import Merge, methods
from sail_jax.drawing import style

CLASSES = 10
SWEPT = ("task arithmetic", "TIES")
POSITIVE = ("base_rate", "tune_rate", "max_scale")


@dataclasses.dataclass(frozen=True)
class Config:
    """Pre-train on upright digits, fine-tune on each task, merge."""

    seed: int = 0
    """Seed of the splits, initial weights and minibatches."""
    replicates: int = 5
    """Independent repetitions, each with its own split; at least 2, for the spread."""
    tasks: tuple[str, ...] = ("rotate -20", "rotate 20", "digits 0-4", "digits 5-9")
    """What the experts learn: 'rotate <degrees>', 'digits <first>-<last>' or 'upright'."""
    widths: tuple[int, ...] = (256,)
    """Units of each hidden layer."""
    train: int = 1000
    """Digits to learn from, of 1797."""
    validation: int = 300
    """Digits to choose the scales with; the rest are the test set."""
    batch: int = 64
    """Digits per step, drawn with replacement."""
    base_steps: int = 300
    """Steps of pre-training."""
    tune_steps: int = 200
    """Steps of fine-tuning, for each expert."""
    base_rate: float = 0.1
    """Learning rate of pre-training (decays to 0 along a cosine)."""
    tune_rate: float = 0.1
    """Learning rate of fine-tuning (decays to 0 along a cosine)."""
    momentum: float = 0.9
    """Momentum of both."""
    density: float = 0.2
    """Fraction of each task vector that TIES keeps."""
    scales: int = 20
    """Scales tried, evenly spaced up to `max_scale`."""
    max_scale: float = 2.0
    """Largest scale tried for task arithmetic and TIES."""
    line_points: int = 21
    """Points on the line between the first two experts, ends included."""

    def __post_init__(self) -> None:
        validate.at_least(self, replicates=2, scales=2, line_points=2)
        validate.at_least(self, train=1, validation=1, batch=1, base_steps=1, tune_steps=1)
        validate.positive(self, *POSITIVE)
        room = digits.EXAMPLES - self.train
        checks = [
            ("momentum", 0 <= self.momentum < 1, "in [0, 1)"),
            ("density", 0 < self.density <= 1, "in (0, 1]"),
            ("widths", self.widths and min(self.widths) >= 1, "one or more, each at least 1"),
            ("validation", self.validation < room, f"below {room}, to leave digits for the test"),
            ("tasks", len(set(self.tasks)) == len(self.tasks) >= 2, "two or more, all different"),
        ]
        for field, holds, allowed in checks:
            if not holds:
                raise ValueError(f"{field} must be {allowed}, got {getattr(self, field)}")
        for task in self.tasks:
            try:
                digits.parse(task)
            except ValueError as exc:
                raise ValueError(f"tasks: {exc}") from exc

    @classmethod
    def tiny(cls) -> "Config":
        small = {"replicates": 2, "widths": (8,), "base_steps": 20, "tune_steps": 10}
        return cls(tasks=("rotate -20", "digits 0-4"), scales=3, line_points=3, **small)

    @classmethod
    def quick(cls) -> "Config":
        return cls(replicates=3, widths=(128,), base_steps=200, tune_steps=100, scales=10)


PRESETS = {"default": Config, "quick": Config.quick, "tiny": Config.tiny}


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Trains, merges and measures; everything is repeated over the leading axis `replicate`."""
    sizes = {"train": config.train, "validation": config.validation}
    split = digits.split(config.seed, config.replicates, **sizes)
    tasks = [digits.load(task) for task in config.tasks]
    upright = digits.pick([digits.load()], split.train)
    learn, choose, test = (digits.pick(tasks, index) for index in split)
    keys = jax.random.split(jax.random.key(config.seed), (config.replicates, 2))

    base = stage("pre-train the base", lambda: _pretrain(config, upright, keys[:, 0]))
    experts = stage("fine-tune the experts", lambda: _finetune(config, base, learn, keys[:, 1]))
    tried = stage("try every scale", lambda: _try_scales(config, base, experts, choose))
    scale = np.asarray(_scales(config))
    chosen = scale[tried["accuracy"].argmax(-1)]
    tested = stage("test the merged models", lambda: _test(config, base, experts, chosen, test))
    line = stage("walk from one expert to another", lambda: _walk(config, experts, test))
    by_model, by_end = ("replicate", "model", "task"), ("replicate", "weight", "end")
    return xr.Dataset(
        {
            "accuracy": (by_model, tested["accuracy"]),
            "predicted": (by_model, tested["predicted"]),
            "validation": (("replicate", "merge", "scale"), tried["accuracy"]),
            "chosen_scale": (("replicate", "merge"), chosen),
            "line_accuracy": (by_end, line["accuracy"]),
            "line_predicted": (by_end, line["predicted"]),
            "line_chord": (by_end, line["chord"]),
        },
        {
            "model": ["base", *(f"expert: {task}" for task in config.tasks), "soup", *SWEPT],
            "task": list(config.tasks),
            "merge": list(SWEPT),
            "scale": scale,
            "weight": np.asarray(_weights(config)),
            "end": list(config.tasks[:2]),
        },
    )


def _scales(config: Config) -> Array:
    return jnp.linspace(0, config.max_scale, config.scales + 1)[1:]


def _weights(config: Config) -> Array:
    return jnp.linspace(0, 1, config.line_points)


def _replicated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn(config, ...)` of one replicate, compiled for all of them at once."""
    return jax.jit(
        lambda config, *args: jax.vmap(functools.partial(fn, config))(*args), static_argnums=0
    )


def _apply(config: Config, params: PyTree, images: digits.Array) -> Any:
    return MLP(config.widths, CLASSES).apply(params, images)


@_replicated
def _pretrain(config: Config, exam: Task, key: Array) -> PyTree:
    first, rest = jax.random.split(key)
    params = MLP(config.widths, CLASSES).init(first, exam.images[0])
    (exam,) = _split(exam, 1)
    return _train(config, config.base_steps, config.base_rate, params, exam, rest)


@_replicated
def _finetune(config: Config, base: PyTree, exam: Task, key: Array) -> PyTree:
    train = functools.partial(_train, config, config.tune_steps, config.tune_rate, base)
    return jax.vmap(train)(exam, jax.random.split(key, len(config.tasks)))


def _train(
    config: Config, steps: int, rate: float, params: PyTree, exam: Task, key: Array
) -> PyTree:
    """Stochastic gradient descent on the cross-entropy of one task's members."""
    optimizer = optax.sgd(optax.cosine_decay_schedule(rate, steps), momentum=config.momentum)

    def loss(params: PyTree, some: Task) -> Array:
        logits = _apply(config, params, some.images)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, some.labels)
        return (each * some.member).sum() / jnp.maximum(some.member.sum(), 1)

    def step(state: tuple, key: Array) -> tuple[tuple, None]:
        params, memory = state
        drawn = jax.random.randint(key, (config.batch,), 0, exam.labels.shape[0])
        gradient = jax.grad(loss)(params, jax.tree.map(lambda x: x[drawn], exam))
        update, memory = optimizer.update(gradient, memory)
        return (optax.apply_updates(params, update), memory), None

    start = (params, optimizer.init(params))
    return jax.lax.scan(step, start, jax.random.split(key, steps))[0][0]


def _grade(logits: Float[Array, "task example class"], exam: Task) -> Float[Array, " task"]:
    """Accuracy on each task."""
    right = (logits.argmax(-1) == exam.labels) & exam.member
    return right.sum(-1) / exam.member.sum(-1)


def _split(stacked: PyTree, count: int) -> list[PyTree]:
    """The first `count` trees of a stacked one."""
    return [jax.tree.map(operator.itemgetter(i), stacked) for i in range(count)]


def _merges(config: Config, scale: Array) -> tuple[Merge, ...]:
    """In the order of `SWEPT`."""
    return methods.task_arithmetic(scale=scale), methods.ties(density=config.density, scale=scale)


@_replicated
def _try_scales(config: Config, base: PyTree, experts: PyTree, exam: Task) -> dict[str, Array]:
    """Mean accuracy over the tasks for every merge and scale: `[merge, scale]`."""
    models = _split(experts, len(config.tasks))

    def means(scale: Array) -> Array:
        merged = [merge(models, base) for merge in _merges(config, scale)]
        return jnp.stack(
            [_grade(_apply(config, params, exam.images), exam).mean() for params in merged]
        )

    return {"accuracy": jax.vmap(means, out_axes=1)(_scales(config))}


@_replicated
def _test(
    config: Config, base: PyTree, experts: PyTree, chosen: Array, exam: Task
) -> dict[str, Array]:
    """Accuracy `[model, task]` of every model, and what adding outputs would give (or NaN)."""
    models = _split(experts, len(config.tasks))
    merged = [_merges(config, scale)[i](models, base) for i, scale in enumerate(chosen)]
    everyone = [base, *models, methods.linear()(models), *merged]
    outputs = [_apply(config, params, exam.images) for params in everyone]
    tuned = sum(output - outputs[0] for output in outputs[1 : 1 + len(models)])
    unknown = jnp.full((len(models),), jnp.nan)
    predicted = [
        *[unknown] * (1 + len(models)),
        _grade(outputs[0] + tuned / len(models), exam),
        _grade(outputs[0] + chosen[0] * tuned, exam),
        unknown,
    ]
    accuracy = [_grade(output, exam) for output in outputs]
    return {"accuracy": jnp.stack(accuracy), "predicted": jnp.stack(predicted)}


@_replicated
def _walk(config: Config, experts: PyTree, exam: Task) -> dict[str, Array]:
    """From the first expert to the second: `[weight, task]` for their two tasks.

    Of the interpolated weights; of the interpolated outputs; and the straight line.
    """
    exam = jax.tree.map(lambda leaf: leaf[:2], exam)
    models = _split(experts, 2)
    outputs = [_apply(config, model, exam.images) for model in models]
    ends = [_grade(output, exam) for output in outputs]

    def at(w: Array) -> dict[str, Array]:
        between = methods.linear()(models, weights=jnp.stack([1 - w, w]))
        return {
            "accuracy": _grade(_apply(config, between, exam.images), exam),
            "predicted": _grade((1 - w) * outputs[0] + w * outputs[1], exam),
            "chord": (1 - w) * ends[0] + w * ends[1],
        }

    return jax.vmap(at)(_weights(config))


def _own(dataset: xr.Dataset) -> xr.DataArray:
    """Each expert on its own task, averaged over the tasks: `[replicate]`."""
    experts = dataset["accuracy"][:, 1 : 1 + dataset.sizes["task"]]
    return xr.DataArray(np.diagonal(experts, axis1=1, axis2=2).mean(-1), dims="replicate")


def _label(name: str) -> str:
    return f"{name}°" if "rotate" in name else name


def _pm(values: xr.DataArray) -> str:
    return f"{float(values.mean()):.3f} ± {float(values.std(ddof=1)):.3f}"


def summary(dataset: xr.Dataset) -> str:
    """Who keeps most, and how far adding weights is from adding outputs."""
    mean = dataset["accuracy"].mean("task")
    own, base = _own(dataset), mean.sel(model="base")
    merges = ["soup", *map(str, dataset["merge"].values)]
    second, best = sorted(merges, key=lambda m: float(mean.sel(model=m).mean()))[-2:]
    ahead = mean.sel(model=best) - mean.sel(model=second)
    error = float(ahead.std(ddof=1)) / ahead.size**0.5
    gained, kept = float((own - base).mean()), float((mean.sel(model=best) - base).mean())
    share = f" and keeps {kept / gained:.0%} of what the experts gained" if gained > 0 else ""
    listed = ", ".join(f"{m} {_pm(mean.sel(model=m))}" for m in merges)
    output = dataset["line_predicted"] - dataset["line_accuracy"]
    chord = dataset["line_chord"] - dataset["line_accuracy"]
    return (
        f"Test accuracy, mean over {dataset.sizes['task']} tasks (± s.d. over "
        f"{dataset.sizes['replicate']} splits): base {_pm(base)}, {listed}; an expert on its own "
        f"task {_pm(own)}. {best[:1].upper()}{best[1:]} has the highest mean, "
        f"{float(ahead.mean()):.3f} ± {error:.3f} (s.e., paired) ahead of {second}{share}. "
        "Along the line between two experts, adding their outputs predicts "
        f"the accuracy of adding their weights to {float((output**2).mean() ** 0.5):.3f} (r.m.s.), "
        f"interpolating their accuracies to {float((chord**2).mean() ** 0.5):.3f}."
    )


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Every model on every task; how the scale is chosen; the line between two experts."""
    return {
        "accuracy": _plot_accuracy(dataset),
        "scale": _plot_scale(dataset),
        "line": _plot_line(dataset),
    }


def _plot_accuracy(dataset: xr.Dataset) -> Figure:
    models, tasks = dataset["model"].values.astype(str), dataset["task"].values.astype(str)
    size = {"width": 2.2 + 0.55 * len(tasks), "height": 1.4 + 0.4 * len(models)}
    fig, axes = style.figure(1, 2, **size, sharey=True, width_ratios=[len(tasks), 2.4])
    ax, side = axes[0]
    mean, spread = _mean_and_spread(dataset["accuracy"])
    floor = np.floor(10 * mean.min()) / 10
    mesh = ax.pcolormesh(mean, cmap=style.SEQUENTIAL, vmin=floor, vmax=1, edgecolors="white")
    ax.grid(visible=False)
    centred = {"ha": "center", "va": "center", "fontsize": 7.5, "linespacing": 0.95}
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
    own = float(_own(dataset).mean())
    side.axvline(own, color=style.FAINT, ls="--", lw=1, label="expert, own task")
    side.set_title(f"mean over the {len(tasks)} tasks")
    side.set_xlabel("test accuracy")
    side.tick_params(left=False)
    fig.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return fig


def _plot_scale(dataset: xr.Dataset) -> Figure:
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
    fig.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return fig


def _plot_line(dataset: xr.Dataset) -> Figure:
    ends = dataset["end"].values.astype(str)
    fig, axes = style.figure(1, 3, width=3.1, height=3.5, sharey=True)
    panels = {f"on {_label(end)}": dataset.sel(end=end) for end in ends}
    panels["mean of the two"] = dataset.mean("end")
    dashed = {"color": style.PALETTE[1], "ls": (0, (4, 2))}
    dotted = {"color": style.FAINT, "lw": 1, "ls": ":"}
    for ax, (title, some) in zip(axes[0], panels.items(), strict=True):
        w, mean = dataset["weight"], some.mean("replicate")
        _band(ax, w, some["line_accuracy"], style.PALETTE[0], "weights interpolated (± s.d.)")
        ax.plot(w, mean["line_predicted"], label="predicted: outputs interpolated", **dashed)
        ax.plot(w, mean["line_chord"], label="accuracies interpolated", **dotted)
        ax.set_title(title)
        ax.set_xlabel(f"weight of the expert {_label(ends[1])}")
    axes[0, 0].set_ylabel("test accuracy")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return fig


def _mean_and_spread(values: xr.DataArray) -> tuple[np.ndarray, np.ndarray]:
    return values.mean("replicate").values, values.std("replicate", ddof=1).values


def _band(ax: Axes, x: xr.DataArray, values: xr.DataArray, colour: str, label: str) -> None:
    mean, spread = _mean_and_spread(values)
    ax.plot(x, mean, color=colour, label=label)
    ax.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.2, lw=0)
