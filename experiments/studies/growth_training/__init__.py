"""Does growing a trained network save training, and by which method?

A small network is trained, made larger by each method of `sail_jax.growth`, and trained on, beside
the larger network trained from scratch on the same minibatches: a GPT on the source text of
Python's standard library, an MLP or a ResNet on scikit-learn's digits. Measured are the held-out
loss right after growth, which function-preserving methods leave at the small network's, and the
steps and the compute that are saved. LiGO's and SAIL's maps are learned first (Wang et al. 2023;
SAIL, App. F); masked structural growth (Yao et al. 2023) brings its units in along a ramp.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
import xarray as xr
from jaxtyping import PyTree
from matplotlib.figure import Figure

from experiments.data import digits, text
from experiments.lab import validate
from experiments.lab.findings import mean_and_error
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.models import presets
from experiments.studies.growth_training import tasks, ways
from experiments.training.savings import savings
from sail_jax.checks import nearest

CLASSES = 10
Task = Literal["text", "digits_mlp", "digits_resnet"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a small network, grow it by every method, train on; the larger one from scratch."""

    task: Task = "text"
    """What is learned: 'text' (a GPT), 'digits_mlp' or 'digits_resnet'."""
    seed: int = 0
    """Seed of the initial weights, minibatches, splits and growth."""
    replicates: int = 4
    """Independent repetitions, each with its own small network; at least 3, for the spread."""
    methods: tuple[str, ...] = (*ways.WIDTH, ways.MSG, *ways.LEARNED)
    """How to grow, beside training from scratch."""
    width: int = 32
    """Units of the small network: of the GPT's stream, the MLP's layers, the ResNet's stem."""
    new_width: int = 64
    """Units of the large one."""
    layers: int = 2
    """Layers of the small network (blocks per stage of the ResNet)."""
    new_layers: int = 2
    """Layers of the large one; either the width or the depth grows."""
    head_dim: int = 16
    """Units of an attention head, in both."""
    context: int = 64
    """Characters that the GPT sees."""
    source_steps: int = 600
    """Steps of training the small network."""
    steps: int = 400
    """Steps of training the large one, grown or from scratch."""
    every: int = 10
    """Steps between two evaluations."""
    held_out: int = 64
    """Held-out windows of `context` characters (the same for every repetition), or digits of the
    1797 (a split for each)."""
    batch: int = 16
    """Windows or digits per step, drawn with replacement."""
    rate: float = 3e-3
    """Adam's learning rate, for every network."""
    warmup: int = 20
    """Steps over which the rate rises from 0, for every network."""
    optimizer_state: Literal["move", "restart"] = "move"
    """Whether Adam's moments grow with the parameters, where a law says how; else they restart."""
    learn_steps: int = 50
    """Steps of learning LiGO's and SAIL's maps, counted as steps of the large network."""
    learn_rate: float = 3e-3
    """Adam's learning rate for them."""
    ramp: int = 200
    """Steps over which masked structural growth brings its units in."""

    def __post_init__(self) -> None:
        validate.at_least(self, replicates=3, width=1, layers=1, head_dim=1, context=2)
        validate.at_least(self, source_steps=1, steps=1, every=1, held_out=1, batch=1, warmup=1)
        validate.at_least(self, new_width=self.width, new_layers=self.layers)
        validate.at_least(self, learn_steps=1, ramp=1)
        validate.positive(self, "rate", "learn_rate")
        validate.different(self, "methods")
        validate.one_of(self, task=Task, optimizer_state=("move", "restart"))
        if (self.width == self.new_width) == (self.layers == self.new_layers):
            raise ValueError(
                "new_width, new_layers: exactly one must exceed the small network's; got "
                f"{self.width} to {self.new_width} units and {self.layers} to {self.new_layers} "
                "layers"
            )
        way, known = "depth" if self.deepens else "width", self._known()
        for method in self.methods:
            if method not in known:
                raise ValueError(
                    f"methods: no way for {self.task} to grow in {way} is called "
                    f"'{method}'{nearest(method, known)}"
                )
        for field in ("source_steps", "steps"):
            if getattr(self, field) % self.every:
                raise ValueError(
                    f"{field} must be a multiple of every = {self.every}; got "
                    f"{getattr(self, field)}"
                )
        if self.task == "text" and (self.width % self.head_dim or self.new_width % self.head_dim):
            raise ValueError(
                f"head_dim must divide {self.width} and {self.new_width}; got {self.head_dim}"
            )
        if self.task != "text" and self.held_out >= digits.EXAMPLES:
            raise ValueError(f"held_out must be below {digits.EXAMPLES}; got {self.held_out}")

    @property
    def deepens(self) -> bool:
        return self.layers < self.new_layers

    def _known(self) -> tuple[str, ...]:
        learned = ways.LEARNED
        # a mix of running variances may be negative; layers of unlike shapes cannot be mixed
        if self.task == "digits_resnet" or (self.deepens and self.task != "text"):
            learned = ()
        return (*ways.DEPTH, *learned) if self.deepens else (*ways.WIDTH, ways.MSG, *learned)

    def network(self, *, large: bool) -> dict[str, Any]:
        """The configuration of the small or the large network."""
        n, layers = (self.new_width, self.new_layers) if large else (self.width, self.layers)
        fields: dict[str, Any] = {
            "text": {
                "vocab": text.VOCAB,
                "context": self.context,
                "width": n,
                "layers": layers,
                "heads": n // self.head_dim,
                "head_dim": self.head_dim,
                "hidden": 4 * n,
            },
            "digits_mlp": {"widths": [n] * layers, "outputs": CLASSES},
            "digits_resnet": {
                "widths": [n, 2 * n],
                "inner": [n, 2 * n],
                "blocks": layers,
                "outputs": CLASSES,
            },
        }
        return {"model_type": tasks.TASKS[self.task], **fields[self.task]}

    def schedule(self, steps: int) -> tasks.Schedule:
        return tasks.Schedule(steps, self.every, self.batch, self.rate, self.warmup, self.ramp)

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        methods = ("hypercloning", "sail_random", "msg", "ligo")
        short: dict[str, Any] = {
            "source_steps": 60,
            "steps": 30,
            "every": 10,
            "learn_steps": 5,
            "ramp": 10,
        }
        sizes: dict[str, Any] = {"width": 8, "new_width": 16, "held_out": 200, "warmup": 5}
        return cls(task="digits_mlp", replicates=3, methods=methods, **sizes, **short)

    @classmethod
    def digits_mlp(cls) -> "Config":
        sizes: dict[str, Any] = {"width": 32, "new_width": 64, "held_out": 797, "batch": 64}
        return cls(task="digits_mlp", **sizes, source_steps=300, steps=300, every=5, rate=1e-3)

    @classmethod
    def digits_resnet(cls) -> "Config":
        sizes: dict[str, Any] = {
            "width": 8,
            "new_width": 16,
            "layers": 1,
            "new_layers": 1,
            "held_out": 797,
        }
        methods = (*ways.WIDTH, ways.MSG)
        steps: dict[str, Any] = {
            "source_steps": 200,
            "steps": 200,
            "every": 5,
            "ramp": 100,
            "batch": 32,
        }
        return cls(task="digits_resnet", methods=methods, **sizes, **steps, rate=1e-3)

    @classmethod
    def depth(cls) -> "Config":
        methods = (*ways.DEPTH, *ways.LEARNED)
        return cls(methods=methods, width=48, new_width=48, layers=3, new_layers=6)


PRESETS: dict[str, Callable[[], Config]] = {
    "default": Config,
    "text": Config,
    "digits_mlp": Config.digits_mlp,
    "digits_resnet": Config.digits_resnet,
    "depth": Config.depth,
    "tiny": Config.tiny,
}


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Trains the small networks, grows them, trains the large ones; one stage per method."""
    load = partial(tasks.load, config.task, config.seed, config.replicates)
    data = load(context=config.context, held_out=config.held_out)
    source = stage("train the source", lambda: _seeds(config, partial(_source, config, data)))
    found = {
        method: stage(
            f"train {method}",
            lambda m=method: _seeds(config, partial(_large, config, data, source, m)),
        )
        for method in (ways.SCRATCH, *config.methods)
    }
    return _dataset(config, source, found)


def _seeds(config: Config, fn: Callable[[int], PyTree]) -> PyTree:
    """`fn` of every repetition, stacked: the first, which compiles, then the others side by side,
    as networks this small fill one core."""
    first = jax.block_until_ready(fn(0))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [first, *pool.map(fn, range(1, config.replicates))]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *found)


def _keys(config: Config, seed: int) -> jax.Array:
    """Of the small network: initial weights, minibatches; of the large one: both; growth."""
    return jax.random.split(jax.random.fold_in(jax.random.key(config.seed), seed), 5)


def _source(config: Config, data: list[tasks.Data], seed: int) -> dict[str, Any]:
    first, batches = _keys(config, seed)[:2]
    net = presets.build(config.network(large=False))
    variables = tasks.init(net, data[seed], first)
    state = tasks.ADAM.init(variables["params"])
    schedule = config.schedule(config.source_steps)
    trained = tasks.train(net, schedule, variables, state, data[seed], batches, None)
    variables, state, loss = trained
    return {"variables": variables, **state._asdict(), "loss": loss}


def _large(
    config: Config, data: list[tasks.Data], source: Mapping[str, Any], method: str, seed: int
) -> dict[str, Any]:
    """Grows a small network by a method, or starts from scratch, and trains the large one."""
    first, batches, grow = _keys(config, seed)[2:]
    small, large = config.network(large=False), config.network(large=True)
    net = presets.build(large)
    one = jax.tree.map(lambda leaf: leaf[seed], dict(source))
    kept = type(tasks.ADAM.init({}))(*(one[k] for k in ("count", "mu", "nu")))
    if method == ways.SCRATCH:
        start = ways.restarted(tasks.init(net, data[seed], first))
    elif method in ways.LEARNED:
        how = ways.Learning(method, config.learn_steps, config.batch, config.learn_rate)
        start = ways.learn(how, one["variables"], small, large, data[seed], grow)
    else:
        move = config.optimizer_state == "move"
        start = ways.grow(method, one["variables"], kept, small, large, grow, move=move)
    schedule = config.schedule(config.steps)
    _, _, loss = tasks.train(net, schedule, *start[:2], data[seed], batches, start.masked)
    return {"loss": loss, "exact": start.exact, "moved": start.moved}


def _dataset(config: Config, source: Mapping[str, Any], found: Mapping[str, Any]) -> xr.Dataset:
    methods = list(found)
    loss = np.stack([found[m]["loss"] for m in methods]).astype(float)
    ahead = np.array([config.learn_steps if m in ways.LEARNED else 0 for m in methods])
    level, reached, steps, scratch = savings(loss, config.every, ahead=ahead)
    cost = [
        tasks.flops(presets.build(sizes), ways.shapes(sizes), config.batch)
        for sizes in (config.network(large=False), config.network(large=True))
    ]
    spent, earlier = cost[1] * scratch, cost[0] * config.source_steps
    before = np.where(np.arange(len(methods)) == 0, 0.0, earlier)[:, None]
    per_seed = ("way", "seed")
    with np.errstate(divide="ignore", invalid="ignore"):
        saved = {
            "compute_saved": 1 - cost[1] * steps / spent,
            "compute_saved_with_source": 1 - (cost[1] * steps + before) / spent,
        }
    return xr.Dataset(
        {
            "loss": (("way", "seed", "step"), loss, {"units": "nats"}),
            "source_loss": (("seed", "source_step"), np.asarray(source["loss"], float)),
            "step0_excess": (per_seed, loss[..., 0] - np.asarray(source["loss"], float)[:, -1]),
            "level": (per_seed, level, {"long_name": "lowest held-out loss that both reach"}),
            "reached": (per_seed, reached),
            "steps": (per_seed, steps),
            "scratch_steps": (per_seed, scratch),
            "saved": (per_seed, scratch - steps, {"units": "steps"}),
            **{name: (per_seed, value, {"units": "1"}) for name, value in saved.items()},
            "learning_steps": ("way", ahead),
            "exact": ("way", [bool(found[m]["exact"].all()) for m in methods]),
            "moved": ("way", [bool(found[m]["moved"].all()) for m in methods]),
            "flops": ("network", cost, {"long_name": "of one training step"}),
        },
        {
            "way": methods,
            "seed": np.arange(config.replicates),
            "step": np.arange(0, config.steps + 1, config.every),
            "source_step": np.arange(0, config.source_steps + 1, config.every),
            "network": ["small", "large"],
        },
        {"task": config.task, "steps": config.steps},
    )


def table(dataset: xr.Dataset) -> list[tuple[str, ...]]:
    """By method, most steps saved first: loss after growth less the small network's, steps saved,
    in how many seeds the lowest loss from scratch was reached, compute saved with the small
    network's counted, and the lowest loss."""
    mean, error = mean_and_error(dataset["saved"])
    excess = dataset["step0_excess"].mean("seed").values
    share = 100 * dataset["compute_saved_with_source"].mean("seed").values
    lowest, spread = mean_and_error(dataset["loss"].min("step"))
    rows = [("method", "step 0 - source", "steps saved", "reached", "compute", "lowest loss")]
    for i in np.argsort(-mean):
        reached = dataset["reached"].values[i]
        cells = (
            f"{excess[i]:+.2g}",
            f"{mean[i]:.0f} ± {error[i]:.0f}",
            f"{reached.sum()}/{reached.size}",
            f"{share[i]:+.0f} %",
            f"{lowest[i]:.3f} ± {spread[i]:.3f}",
        )
        rows.append((str(dataset["way"].values[i]), *cells))
    return rows


def summary(dataset: xr.Dataset) -> str:
    """Who saves steps, who loses, and what the losses after growth say."""
    mean, error = mean_and_error(dataset["saved"])
    name = dataset["way"].values.astype(str)
    order = [i for i in np.argsort(-mean) if name[i] != ways.SCRATCH]
    clear = [i for i in order if abs(mean[i]) > 2 * error[i]]
    said = {
        "Saved": [i for i in clear if mean[i] > 0],
        "Lost": [i for i in clear if mean[i] < 0][::-1],
        "Undecided": [i for i in order if i not in clear],
    }
    listed = "; ".join(
        f"{word.lower()}: " + ", ".join(f"{name[i]} {mean[i]:.0f} ± {error[i]:.0f}" for i in some)
        for word, some in said.items()
        if some
    )
    exact = dataset["exact"].values & (name != ways.SCRATCH)
    excess = np.abs(dataset["step0_excess"].values[exact])
    kept = f"; function-preserving growth moved the loss by {excess.max(initial=0):.1g} at most"
    level = dataset["level"].sel(way=ways.SCRATCH)
    value, spread = map(float, mean_and_error(level))
    return (
        f"From scratch the held-out loss falls to {value:.3f} ± {spread:.3f} nats in "
        f"{dataset.attrs['steps']} steps. Steps saved to the lowest loss that both reach (mean ± "
        f"s.e. of paired differences over {level.size} seeds; undecided within 2 s.e.): "
        f"{listed}{kept if exact.any() else ''}."
    )


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Loss against steps; steps saved; the loss right after growth."""
    from experiments.studies.growth_training import plots

    return plots.draw(dataset)
