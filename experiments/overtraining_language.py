"""Are language models that were trained for longer harder to perturb and to fine-tune?

Past overtrained (Springer et al. 2025), Section 3 and Appendices C and D. Small language models of
OLMo's block are pre-trained on the source of Python's standard library for a series of budgets,
each from the beginning with a cosine that ends at 0, as in the paper. To every one of them

  Gaussian noise of several sizes lambda is added, shaped as the initialisation is (eq. 1, Fig. 3),
  other tasks are taught at several rates, fixed or tuned for each budget (Figs. 4 to 6, 8),

and the loss on held-out text of pre-training is measured afterwards, beside what the Hessian
predicts (Figs. 9, 10) and beside the theory of two-layer linear networks. Losses are in nats per
token, the logarithm of the perplexity.

Not in the text of the paper, and chosen here: the sizes of the noise, its two signs and the number
of draws; Adam's decays in fine-tuning, which are those of pre-training. Its early stopping over
fine-tuning epochs and its muP are not here.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import PyTree
from matplotlib.figure import Figure

from experiments import overtraining_language_tasks as tasks
from experiments import overtraining_language_training as training
from experiments import overtraining_linear, validate
from experiments.data import stream, text
from experiments.models import presets
from experiments.overtraining_language_findings import findings as findings
from experiments.overtraining_language_findings import summary as summary
from experiments.progress import Stage
from experiments.registry import nearest
from experiments.store import direct
from experiments.training import Optimizer, Schedule, Training
from experiments.training.step import Compute
from sail_jax import probe

WARMUP = 0.1  # share of the steps (Tables 3 and 4)
BETAS = {"b1": 0.9, "b2": 0.95}
WEIGHT_DECAY = 0.1  # of pre-training; fine-tuning has none


@dataclasses.dataclass(frozen=True)
class Config:
    """Pre-train for several budgets, perturb and fine-tune each, measure what was forgotten."""

    seed: int = 0
    """Seed of everything."""
    replicates: int = 4
    """Repetitions, each with initial weights, minibatches and noise of its own; at least 3."""
    data: str | None = None
    """Folder with the tokens to pre-train on, as nanoGPT prepares it (train and val, .bin or .npy);
    None for Python's standard library in characters."""
    model: str | None = None
    """Name of a preset of `experiments.models.presets`, such as 'olmo-30m'; None for the sizes
    that follow, with OLMo's LayerNorm without parameters and tied embeddings."""
    width: int = 16
    """Units of the stream."""
    layers: int = 2
    """Blocks."""
    heads: int = 2
    """Attention heads; they divide the width."""
    hidden: int = 48
    """Units of an MLP."""
    context: int = 32
    """Tokens that the network sees (of a preset too)."""
    budgets: tuple[int, ...] = tuple(2**k for k in range(17, 23))
    """Tokens of pre-training, ascending."""
    batch: int = 16
    """Sequences per pre-training step."""
    rate: float = 0.02
    """Highest rate of pre-training."""
    noise: tuple[float, ...] = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
    """Sizes lambda of Gaussian noise, ascending, in standard deviations of the initial weights."""
    draws: int = 4
    """Pairs +epsilon and -epsilon of noise; the same for all budgets and sizes."""
    held_out: int = 128
    """Sequences on which the pre-training loss is measured."""
    tasks: tuple[str, ...] = tasks.TASKS
    """What to fine-tune on: 'shifted', 'rotated', 'questions', or the path of a tokenised text."""
    rates: tuple[float, ...] = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032)
    """Highest rates of fine-tuning, ascending; the best on validation is the tuned one."""
    examples: int = 128
    """Sequences to fine-tune on."""
    tune_batch: int = 8
    """Of them in a step."""
    epochs: int = 4
    """How often each is seen."""
    task_held_out: int = 128
    """Sequences of a task to tune the rate by, and as many to report."""
    scales: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75, 1.0)
    """Shares of the way to the fine-tuned model (Fig. 10), ascending to 1."""
    together: int | None = None
    """Networks that are trained side by side at most; None for all of a budget or task."""
    micro_batches: int = 1
    """Parts of a batch whose gradients are averaged, one after the other, to save memory."""
    compute: Compute = "float32"
    """Type to compute with in training."""
    save_every: int = 1000
    """Steps between checkpoints of a training."""
    shard: training.Shard = "members"
    """What several devices share: the networks ('members'), the examples ('data') or nothing
    ('no'); on one device the same."""

    def __post_init__(self) -> None:
        validate.at_least(self, replicates=3, width=1, layers=1, heads=1, hidden=1, context=2)
        validate.at_least(self, batch=1, draws=2, held_out=1, examples=1, tune_batch=1, epochs=1)
        validate.at_least(self, task_held_out=1, micro_batches=1, save_every=1)
        validate.positive(self, "rate", "budgets", "noise", "rates", "scales")
        validate.different(self, "tasks", "budgets", "noise", "rates", "scales")
        tasks.check(self.tasks)
        for field, least in (("budgets", 2), ("noise", 2), ("rates", 2), ("scales", 1)):
            value = getattr(self, field)
            if list(value) != sorted(value) or len(value) < least:
                raise ValueError(f"{field} must be {least} or more, ascending; got {value}")
        if self.scales[-1] != 1:
            raise ValueError(f"scales must end at 1, the fine-tuned model; got {self.scales}")
        if self.steps(self.budgets[0]) < 10:
            raise ValueError(
                f"budgets must be at least 10 steps of {self.batch * self.context} tokens; got "
                f"{self.budgets[0]}"
            )
        if self.together is not None and self.together < 1:
            raise ValueError(f"together must be at least 1; got {self.together}")
        for field, known in (("shard", training.Shard), ("compute", Compute)):
            if getattr(self, field) not in get_args(known):
                raise ValueError(
                    f"{field} must be one of {', '.join(get_args(known))}; got "
                    f"{getattr(self, field)}"
                )
        if self.tune_steps < 10:
            raise ValueError(
                "epochs: fine-tuning must take at least 10 steps, epochs * examples / tune_batch; "
                f"got {self.tune_steps}"
            )
        for field in ("batch", "tune_batch"):
            if getattr(self, field) % self.micro_batches:
                raise ValueError(
                    f"micro_batches must divide {field} = {getattr(self, field)}; got "
                    f"{self.micro_batches}"
                )
        if self.model is None and self.width % (2 * self.heads):
            raise ValueError(
                f"heads must divide width = {self.width} into heads of an even size; got "
                f"{self.heads}"
            )
        if self.model is not None:
            sizes = presets.config(self.model)
            if sizes["model_type"] != "flax_llama":
                raise ValueError(
                    f"model must be a language model of OLMo's block; {self.model} is none"
                    f"{nearest(self.model, [k for k in presets.PRESETS if 'olmo' in k])}"
                )
            if self.context > sizes["context"]:
                raise ValueError(
                    f"context must be at most {sizes['context']}, the positions of {self.model}; "
                    f"got {self.context}"
                )

    @property
    def network(self) -> dict[str, Any]:
        if self.model is not None:
            return presets.config(self.model)
        return {
            "model_type": "flax_llama",
            "vocab": text.VOCAB,
            "context": self.context,
            "width": self.width,
            "layers": self.layers,
            "heads": self.heads,
            "head_dim": self.width // self.heads,
            "hidden": self.hidden,
            "tied": True,
            "norm": "layernorm",
        }

    def steps(self, budget: int) -> int:
        """Of pre-training on so many tokens."""
        return budget // (self.batch * self.context)

    @property
    def tune_steps(self) -> int:
        return self.epochs * self.examples // self.tune_batch

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        sizes: dict[str, Any] = {"width": 8, "layers": 1, "heads": 1, "hidden": 16, "context": 24}
        few: dict[str, Any] = {"held_out": 16, "examples": 20, "task_held_out": 16, "draws": 2}
        return cls(
            replicates=3,
            **sizes,
            **few,
            batch=4,
            budgets=(1200, 4800),
            noise=(0.02, 0.3),
            tasks=("shifted", "questions"),
            rates=(0.002, 0.02),
            scales=(0.1, 1.0),
        )

    @classmethod
    def longer(cls) -> "Config":
        """About 40 minutes on two cores: 16 times the tokens, more rates."""
        return cls(
            budgets=tuple(2**k for k in range(17, 27)),
            rates=tuple(0.0005 * 2**k for k in range(8)),
            examples=256,
        )

    @classmethod
    def paper(cls, model: str = "olmo-30m") -> "Config":
        """Tables 3 and 4; the tokens of C4 and of the tasks are to be given by path."""
        return cls(
            replicates=3,
            model=model,
            context=1024,
            budgets=tuple(k * 10**9 for k in (4, 8, 16, 32, 64, 128)),
            batch=256,
            rate=3e-4,
            held_out=1024,
            tasks=("gsm8k.npy", "starcoder-python.npy"),
            rates=(
                *(4e-6, 8e-6, 1e-5, 2e-5, 4e-5, 5e-5, 6e-5, 7e-5, 8e-5, 9e-5, 1e-4, 1.1e-4),
                *(1.2e-4, 1.4e-4, 1.6e-4, 1.8e-4, 2e-4, 2.4e-4, 4e-4, 5e-4, 6e-4, 8e-4),
                *(1e-3, 2e-3, 3e-3, 4e-3, 6e-3),
            ),
            examples=5000,
            tune_batch=64,
            task_held_out=500,
            together=1,
            micro_batches=8,
            compute="bfloat16",
            shard="data",
        )


PRESETS: dict[str, Callable[[], Config]] = {
    "default": Config,
    "longer": Config.longer,
    "tiny": Config.tiny,
    "paper": Config.paper,
    "paper_15m": partial(Config.paper, "olmo-15m"),
    "paper_90m": partial(Config.paper, "olmo-90m"),
}


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Pre-trains, perturbs and fine-tunes; a stage for each budget, and for each task."""
    where = training.layout(config.shard)
    batches = {name: getattr(config, name) for name in ("batch", "tune_batch")}
    where.check(**{name: size // config.micro_batches for name, size in batches.items()})
    net = presets.build(config.network)
    corpus = tasks.load(config.data, config.network["vocab"], config.context)
    sizes = (config.examples, config.task_held_out, config.task_held_out)
    taught = [tasks.task(name, corpus, sizes, config.seed) for name in config.tasks]
    held_out = corpus.held_out(config.held_out, config.seed)
    bases: list[PyTree] = []
    for budget in config.budgets:
        for k, some in _parts(config, range(config.replicates)):
            found = stage(
                f"pre-train {budget} tokens{k}",
                partial(_pre_train, config, net, corpus, where, budget, some),
                folder=True,
            )
            bases += _unstacked(found, len(some))
    plan = list(itertools.product(range(len(config.budgets)), range(config.replicates)))
    noisy = _joined(
        stage(f"perturb{k}", partial(_perturb, config, net, where, held_out, bases, some))
        for k, some in _parts(config, range(len(plan)))
    )
    tuned = []
    for i, task in enumerate(taught):
        runs = list(itertools.product(range(len(plan)), range(len(config.rates))))
        name = config.tasks[i] if config.tasks[i] in tasks.TASKS else f"task {i + 1}"
        tune = partial(_fine_tune, config, net, where, held_out, task, bases)
        found = _joined(
            stage(f"fine-tune {name}{k}", partial(tune, some), folder=True)
            for k, some in _parts(config, runs)
        )
        tuned.append(found)
    theory = stage("two-layer theory", _theory)
    return _dataset(config, noisy, tuned, theory)


def _parts(config: Config, members: Sequence[Any]) -> list[tuple[str, list[Any]]]:
    """The members that go together, each time with what their stage's name ends with."""
    size = config.together or len(members)
    starts = range(0, len(members), size)
    parts = [list(members[at : at + size]) for at in starts]
    names = [f" {k + 1}/{len(parts)}" if len(parts) > 1 else "" for k in range(len(parts))]
    return list(zip(names, parts, strict=True))


def _joined(parts: Any) -> dict[str, np.ndarray]:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _unstacked(tree: PyTree, count: int) -> list[PyTree]:
    return [jax.tree.map(lambda x: x[k], tree) for k in range(count)]  # noqa: B023


def _keys(config: Config, replicate: int) -> jax.Array:
    """Of initial weights, of dropout, of noise."""
    return jax.random.split(jax.random.fold_in(jax.random.key(config.seed), replicate), 3)


def _order(config: Config, replicate: int) -> int:
    """The seed of a replicate's minibatches."""
    return int(np.random.SeedSequence((config.seed, replicate)).generate_state(1)[0])


def _initial(config: Config, net: nn.Module, replicates: Sequence[int]) -> list[PyTree]:
    return [jax.device_get(training.first(net, _keys(config, k)[0])) for k in replicates]


def _pre_train(
    config: Config,
    net: nn.Module,
    corpus: tasks.Corpus,
    where: training.Layout,
    budget: int,
    some: Sequence[int],
    folder: Path | None,
) -> PyTree:
    """The parameters of some replicates after a budget, stacked."""
    steps = config.steps(budget)
    schedule = Schedule(config.rate, steps, round(WARMUP * steps))
    how = Training(
        Optimizer(schedule, weight_decay=WEIGHT_DECAY, **BETAS),
        config.micro_batches,
        config.compute,
    )
    orders = [_order(config, k) for k in some]

    def batch(step: int) -> tasks.Batch:
        parts = [corpus.batch(step, seed=order, size=config.batch) for order in orders]
        return jax.tree.map(lambda *leaves: np.stack(leaves, 1), *parts)

    trained = training.together(
        net,
        how,
        _initial(config, net, some),
        batch,
        steps,
        key=_keys(config, some[0])[1],
        where=where,
        directory=folder,
        config=config,
        save_every=config.save_every,
    )
    return training.stacked(trained)


def _perturb(
    config: Config,
    net: nn.Module,
    where: training.Layout,
    held_out: tasks.Batch,
    bases: Sequence[PyTree],
    some: Sequence[int],
) -> dict[str, np.ndarray]:
    """What noise does to some of the models: `gaussian_sensitivity`, [model, noise]."""
    initial = _initial(config, net, range(config.replicates))
    deviations = [jax.tree.map(lambda x: np.float32(x.std()), one) for one in initial]
    of = [k % config.replicates for k in some]
    each = where.lay(
        training.stacked(where.filled([bases[k] for k in some])),
        training.stacked(where.filled([deviations[r] for r in of])),
        jnp.stack(where.filled([_keys(config, r)[2] for r in of])),
    )
    found = _perturbed(
        net, config.draws, _chunk(config), held_out, jnp.asarray(config.noise), *each
    )
    named = {
        "base": found.loss,
        "increase": found.increase.value,
        "predicted": found.predicted.value,
        "draws_error": found.increase.stderr,
    }
    return {name: np.asarray(value)[: len(some)] for name, value in named.items()}


def _chunk(config: Config) -> int | None:
    """Examples that a probe looks at together."""
    return None if config.micro_batches == 1 else config.tune_batch // config.micro_batches


@partial(jax.jit, static_argnums=(0, 1, 2))
def _perturbed(net, draws, chunk, data, scales, params, deviations, keys) -> probe.Sensitivity:
    how: dict[str, Any] = {"draws": draws, "batch_size": chunk}

    def one(params: PyTree, deviation: PyTree, key: jax.Array) -> probe.Sensitivity:
        loss = training.mean_loss(net)
        return probe.gaussian_sensitivity(
            loss, params, data, key, scales, deviation=deviation, **how
        )

    return jax.vmap(one)(params, deviations, keys)


def _fine_tune(
    config: Config,
    net: nn.Module,
    where: training.Layout,
    held_out: tasks.Batch,
    task: tasks.Task,
    bases: Sequence[PyTree],
    some: Sequence[tuple[int, int]],
    folder: Path | None,
) -> dict[str, np.ndarray]:
    """Losses and distances of some (model, rate) after fine-tuning, [run, ...]."""
    steps, top = config.tune_steps, config.rates[-1]
    schedule = Schedule(top, steps, round(WARMUP * steps))
    shares = tuple(config.rates[rate] / top for _, rate in some)
    how = Training(
        Optimizer(schedule, members=shares, **BETAS), config.micro_batches, config.compute
    )
    orders = [_order(config, k) for k in range(config.replicates)]
    of = np.array([model % config.replicates for model, _ in some])

    def batch(step: int) -> tasks.Batch:
        size = {"examples": config.examples, "size": config.tune_batch}
        index = np.stack([stream.indices(step, seed=order, **size) for order in orders], 1)
        return jax.tree.map(lambda x: x[index[:, of]], task.learn)

    before = [bases[model] for model, _ in some]
    after = training.together(
        net,
        how,
        before,
        batch,
        steps,
        key=jax.random.fold_in(_keys(config, 0)[1], some[0][0] * len(config.rates) + some[0][1]),
        where=where,
        directory=folder,
        config=config,
        save_every=config.save_every,
    )
    each = where.lay(
        training.stacked(where.filled(before)), training.stacked(where.filled(after))
    )
    found = _tuned(net, _chunk(config), held_out, task, jnp.asarray(config.scales), *each)
    return {name: np.asarray(value)[: len(some)] for name, value in found.items()}


@partial(jax.jit, static_argnums=(0, 1))
def _tuned(net, chunk, held_out, task, scales, before, after) -> dict[str, jax.Array]:
    loss, count = training.mean_loss(net), len(task.validation.tokens)
    both = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), task.validation, task.test)

    def one(before: PyTree, after: PyTree) -> dict[str, jax.Array]:
        line = probe.fine_tuning_sensitivity(
            loss, before, after, held_out, scales, batch_size=chunk
        )
        apart = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), before, after)
        ends = jax.tree.map(lambda *leaves: jnp.stack(leaves), before, after)
        own = jax.lax.map(lambda p: training.each_nll(net, p, both, chunk), ends)
        return {
            "increase": line.increase,
            "predicted": line.predicted,
            "distance": jnp.sqrt(sum(jax.tree.leaves(apart))),
            "before": own[0, count:].mean(),
            "validation": own[1, :count].mean(),
            "test": own[1, count:].mean(),
        }

    return jax.vmap(one)(before, after)


LINEAR = {  # of the two-layer theory
    "noise": overtraining_linear.Config(points=60),
    "rate": overtraining_linear.Config(diagram="learning_rate", rows=(0.0, 0.003), points=60),
}


def _theory() -> dict[str, Any]:
    """Pre-training loss of two-layer linear networks after noise and after fine-tuning, by its size
    and the pre-training time, and the time after which more hurts (0 where none does)."""
    found = {}
    for name, linear in LINEAR.items():
        forms = overtraining_linear.closed_forms(linear)
        found[name] = {
            "loss": forms["loss"],
            "inflection": np.nan_to_num(forms["inflection"]),
            "row": np.linspace(*linear.rows, linear.points),
            "time": linear.times(linear.spectrum(), linear.points),
        }
    return found


def _dataset(config: Config, noisy: Any, tuned: Sequence[Any], theory: Any) -> xr.Dataset:
    models, runs = ("budget", "seed"), ("task", "budget", "seed", "rate")
    shape = (len(config.budgets), config.replicates)
    base = noisy["base"].reshape(shape)
    nats = {"units": "nats per token"}
    data: dict[str, Any] = {"base": (models, base, nats)}
    for name in ("increase", "predicted", "draws_error"):
        data[f"noise_{name}"] = ((*models, "noise"), noisy[name].reshape(*shape, -1), nats)
    for name, value in tuned[0].items():
        each = np.stack([found[name] for found in tuned])
        dims = runs if value.ndim == 1 else (*runs, "scale")
        each = each.reshape(len(tuned), *shape, len(config.rates), *value.shape[1:])
        data[f"tuned_{name}"] = (dims, each, {} if name == "distance" else nats)
    for name, found in theory.items():
        data[f"theory_{name}_loss"] = ((f"theory_{name}", f"theory_{name}_time"), found["loss"])
        data[f"theory_{name}_inflection"] = (f"theory_{name}", found["inflection"])
    coords = {
        "budget": ("budget", np.asarray(config.budgets), {"units": "tokens"}),
        "seed": np.arange(config.replicates),
        "noise": np.asarray(config.noise),
        "rate": np.asarray(config.rates),
        "scale": np.asarray(config.scales),
        "task": [Path(name).stem for name in config.tasks],
        **{f"theory_{name}": found["row"] for name, found in theory.items()},
        **{f"theory_{name}_time": found["time"] for name, found in theory.items()},
    }
    net = presets.build(config.network)
    params = jax.eval_shape(lambda key: training.first(net, key), jax.random.key(0))
    size = sum(x.size for x in jax.tree.leaves(params))
    return xr.Dataset(data, coords, {"parameters": size, "model": config.model or "small"})


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Figures 3 to 6 and 8 to 10 of the paper, inflection points, and the theory beside."""
    from experiments import overtraining_language_figures

    return overtraining_language_figures.draw(dataset)
