"""Does SAIL's start, between models trained on other texts, save training a language model?

SAIL, Sec. 4.4 and App. I: a text is split by the mean token value of its blocks into D_1, D_2 and
D_t; GPTs are trained on D_1 and D_2, and one on D_t starts from gamma theta_1 + (1 - gamma)
theta_2, with gamma by eq. 11 from the distances between the texts, or by the held-out loss before
training. Beside it, on the same minibatches: training from scratch, LiGO (Wang et al. 2023), the
uniform and the greedy soup (Wortsman et al. 2022), and SAIL from a narrower and a shallower source
that are grown. Also the mean of several checkpoints of one run (as of OLMo's) beside the last.

What the paper leaves open: LiGO's source (here the narrow one, of D_2, which is nearer D_t), if
sources share their initial weights (`start`), which features the distance is of (`distance`), how
many steps sources take (here as many as the target). Sources of other shapes are brought to the
target's by the `grow` method. Weights are chosen on text that nothing is judged on. Its questions
come as files; offline, held-out text asks how it goes on, and generated arithmetic is at chance for
networks that have seen none.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from experiments import validate
from experiments.data import text
from experiments.data.files import refused
from experiments.findings import Finding
from experiments.models import presets
from experiments.progress import Stage
from experiments.sail_language import checkpoints, data, parts
from experiments.savings import savings
from experiments.store import direct
from experiments.training.sharding import Shard, layout
from sail_jax.checks import nearest

Start = Literal["shared", "independent"]
Compute = Literal["float32", "bfloat16"]
GPT2_VOCAB = 50257


@dataclass(frozen=True)
class Config:
    """Train on two texts, merge, train on a third; the defaults are what two cores finish."""

    seed: int = 0
    """Seed of the sources, initial weights, minibatches and what is held out."""
    replicates: int = 4
    """Independent repetitions, each with its own sources and models; at least 3, for the spread."""
    ways: tuple[str, ...] = tuple(parts.WAYS)
    """How training on D_t begins; the first is from scratch."""
    data: str | None = None
    """Folder of a text as nanoGPT prepares it (train and val, .bin or .npy); none: the source of
    Python's standard library, character by character."""
    vocab: int | None = None
    """Tokens of that text's vocabulary, if the folder does not say."""
    model: str | None = None
    """A preset of `experiments.models.presets` for the target, instead of the sizes below."""
    context: int = 48
    """Tokens of a block, which is what a network sees."""
    width: int = 32
    """Units of the target's stream, and of its sources'."""
    layers: int = 2
    """Blocks of the target."""
    heads: int = 2
    """Attention heads of the target."""
    narrow_heads: int = 1
    """Heads of the narrower source (of D_2), of the target's size; its stream is as narrow."""
    shallow_layers: int = 1
    """Blocks of the shallower source (of D_1)."""
    start: Start = "shared"
    """Whether theta_1 and theta_2 start from 'shared' or from 'independent' initial weights."""
    grow: str = "lemon"
    """How sources of other shapes are brought to the target's (`sail_jax.growth.METHODS`)."""
    alpha: float = 0.0
    """Overlap of the sources' texts with each other."""
    beta: float = 0.0
    """Overlap of both with the target's."""
    source_blocks: int = 12000
    """Blocks of a source's text."""
    distance: Literal["mmd", "w1", "tv"] = "mmd"
    """Distance of texts in eq. 11: of block means ('mmd', 'w1'), or of token frequencies ('tv')."""
    distance_blocks: int = 800
    """Blocks that stand for a text in it; at most `source_blocks`."""
    gammas: int = 31
    """Values of gamma, evenly spaced from -1 to 2 (the paper says 30, in steps of 0.1)."""
    source_steps: int = 1000
    """Steps of training a source."""
    steps: int = 1000
    """Steps of training on the target."""
    every: int = 25
    """Steps between two evaluations there."""
    batch: int = 16
    """Blocks per step."""
    rate: float = 1e-2
    """AdamW's highest learning rate, for all training. Of 1, 3, 10 and 20 e-3 the last two are the
    best, from scratch as from a source."""
    warmup: int = 50
    """Steps over which the rate rises; then it falls as a cosine."""
    floor: float = 0.1
    """The rate in the end, as a share of the highest."""
    weight_decay: float = 0.01
    """AdamW's."""
    clip: float = 1.0
    """Largest global norm of a gradient."""
    compute: Compute = "float32"
    """Type that training computes in."""
    learn_steps: int = 100
    """Steps of learning LiGO's maps, counted as steps of the target."""
    learn_rate: float = 3e-3
    """Adam's learning rate for them."""
    series: tuple[float, ...] = (0.68, 0.81, 0.95)
    """Checkpoints of the first source's run, as shares of its steps (OLMo-1B's 500, 600 and 700 of
    738 thousand), whose mean is compared with the last of them."""
    validation: int = 64
    """Held-out blocks of D_t for choosing weights."""
    held_out: int = 256
    """Held-out blocks of D_t, others, for all that is reported."""
    items: int = 200
    """Questions of each kind, at most."""
    choices: int = 4
    """Choices of a generated question."""
    ending: int = 16
    """Tokens of a choice of how held-out text goes on."""
    questions: str | None = None
    """A file of multiple choice in JSON lines."""
    tokenizer: str | None = None
    """The tokenizer.json of byte-level BPE by which questions become tokens (GPT-2's, OLMo's)."""
    checkpoints: tuple[str, ...] | None = None
    """Folders of checkpoints (GPT-2, Llama, OLMo of Hugging Face) to merge, instead of training:
    the first is theta_1, the mean of the others theta_2; the text at `data` is the target."""
    at_once: int = 32
    """Blocks evaluated side by side: memory."""
    shard: Shard = "data"
    """With several devices: 'no', batches shared out ('data'), or weights too ('full')."""

    def __post_init__(self) -> None:
        validate.at_least(self, replicates=3, gammas=3, context=2, width=1, layers=1, heads=1)
        validate.at_least(self, narrow_heads=1, shallow_layers=1, distance_blocks=4, every=1)
        validate.at_least(self, batch=1, warmup=0, learn_steps=1, validation=1, held_out=2)
        validate.at_least(self, items=1, choices=2, ending=1, at_once=1, steps=self.warmup + 1)
        validate.at_least(self, source_blocks=self.distance_blocks, source_steps=self.warmup + 1)
        validate.positive(self, "rate", "clip", "learn_rate")
        validate.positive(self, "weight_decay", zero=True)
        validate.different(self, "ways", "series")
        for field, known in (
            ("start", get_args(Start)), ("distance", data.DISTANCES), ("shard", get_args(Shard)),
            ("compute", get_args(Compute)),
        ):  # fmt: skip
            if getattr(self, field) not in known:
                raise ValueError(
                    f"{field} must be one of {', '.join(known)}; got {getattr(self, field)}"
                )
        for way in self.ways:
            if way not in parts.WAYS:
                raise ValueError(f"ways: unknown '{way}'{nearest(way, parts.WAYS)}")
        sizes = self._target(text.VOCAB)
        shares = self.series
        checks = [
            ("ways", self.ways[0] == parts.SCRATCH, f"'{parts.SCRATCH}' and others"),
            ("steps", self.steps % self.every == 0, f"a multiple of every = {self.every}"),
            ("floor", 0 <= self.floor <= 1, "in [0, 1], a share of the rate"),
            ("heads", self.model or self.width % self.heads == 0, f"a divisor of {self.width}"),
            ("narrow_heads", "narrow" not in self.sources or self.narrow_heads < sizes["heads"],
             f"below {sizes['heads']}, the target's"),
            ("shallow_layers", "shallow" not in self.sources
             or self.shallow_layers < sizes["layers"], f"below {sizes['layers']}, the target's"),
            ("ending", self.ending < self.context, f"below context = {self.context}"),
            ("context", self.context <= sizes["context"],
             f"at most {sizes['context']}, the positions of {self.model}"),
            ("series", len(shares) > 1 and shares[0] > 0 and list(shares) == sorted(shares)
             and shares[-1] < 1 and len(set(self.series_steps)) == len(shares),
             "two or more shares between 0 and 1 that rise, of different steps"),
            ("tokenizer", self.tokenizer or not (self.questions and self.data),
             "the one that made data, given beside questions"),
            ("alpha", 0 <= self.alpha <= 1, "in [0, 1]"),
            ("beta", 0 <= self.beta <= 1, "in [0, 1]"),
        ]  # fmt: skip
        for field, holds, what in checks:
            if not holds:
                raise ValueError(f"{field} must be {what}; got {getattr(self, field)}")

    @property
    def sources(self) -> tuple[str, ...]:
        """Those that the ways are made of."""
        needed = {name for way in self.ways for name in parts.MADE_OF[way]}
        return tuple(name for name in parts.SOURCES if name in needed | {"one", "two"})

    @property
    def pairs(self) -> tuple[str, ...]:
        """The lines that are swept: through theta_1 and theta_2, and through grown sources."""
        return ("sweep", "grown") if "grown" in self.ways else ("sweep",)

    @property
    def series_steps(self) -> tuple[int, ...]:
        return tuple(max(1, round(share * self.source_steps)) for share in self.series)

    def gamma(self) -> np.ndarray:
        return np.linspace(-1, 2, self.gammas)

    def _target(self, vocab: int) -> dict[str, Any]:
        if self.model is not None:
            found = presets.config(self.model)
            if found["model_type"] != "flax_gpt":
                raise ValueError(f"model must be a GPT; got {self.model}")
            return {**found, "vocab": vocab, "context": max(found["context"], self.context)}
        sizes = {"width": self.width, "layers": self.layers, "heads": self.heads}
        each = {"head_dim": self.width // self.heads, "hidden": 4 * self.width}
        return {"model_type": "flax_gpt", "vocab": vocab, "context": self.context, **sizes, **each}

    def network(self, name: str) -> dict[str, Any]:
        """The configuration of the 'target' (and of the sources of its shape), of the 'narrow' or
        the 'shallow' source."""
        sizes = self._target(self.vocab or text.VOCAB)
        if name == "narrow":
            width = self.narrow_heads * sizes["head_dim"]
            return {**sizes, "heads": self.narrow_heads, "width": width, "hidden": 4 * width}
        return {**sizes, "layers": self.shallow_layers} if name == "shallow" else sizes

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        sizes: dict[str, Any] = {"context": 16, "width": 8, "batch": 4, "ending": 4, "at_once": 8}
        short: dict[str, Any] = {"source_steps": 40, "steps": 40, "every": 10, "warmup": 5}
        few: dict[str, Any] = {"items": 16, "validation": 8, "held_out": 16, "gammas": 7}
        less: dict[str, Any] = {"source_blocks": 200, "distance_blocks": 40, "learn_steps": 5}
        ways = tuple(way for way in parts.WAYS if way not in ("ligo", "grown"))
        return cls(replicates=3, ways=ways, layers=1, **sizes, **short, **few, **less)

    @classmethod
    def paper(cls) -> "Config":
        """nanoGPT of 6 layers and width 384 on GPT-2's tokens (give `data`), by Table 1: batch 16,
        4e-4, AdamW with decay 0.01, clipping at 1, cosine after 2000 steps. Not printed, and chosen
        here: the number of steps, the sizes of what is held out, and the smaller sources."""
        sizes: dict[str, Any] = {"model": "nanogpt-6x384", "vocab": GPT2_VOCAB, "context": 256}
        small: dict[str, Any] = {"narrow_heads": 3, "shallow_layers": 3}
        long: dict[str, Any] = {"source_steps": 50000, "steps": 20000, "every": 500}
        table: dict[str, Any] = {"batch": 16, "rate": 4e-4, "warmup": 2000, "floor": 0.0}
        many: dict[str, Any] = {"source_blocks": 500000, "items": 1000, "held_out": 2000}
        rest: dict[str, Any] = {"validation": 256, "distance_blocks": 2000, "ending": 64}
        return cls(**sizes, **small, **long, **table, **many, **rest, compute="bfloat16")

    @classmethod
    def of_checkpoints(cls) -> "Config":
        """Checkpoints on disk, merged: give `checkpoints`, a `data` tokenised for them, and for
        `questions` their `tokenizer`. Repetitions draw the held-out blocks anew."""
        sizes: dict[str, Any] = {"context": 256, "ending": 64, "validation": 32, "held_out": 64}
        return cls(checkpoints=(), items=100, at_once=4, **sizes)


PRESETS: dict[str, Callable[[], Config]] = {
    "default": Config,
    "paper": Config.paper,
    "checkpoints": Config.of_checkpoints,
    "tiny": Config.tiny,
}


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Sources, weights, and training on the target: stages for each seed and way."""
    if config.checkpoints is not None:
        return checkpoints.run(config, stage)
    with refused():
        corpus = data.load(config, config.network("target")["vocab"])
        _check(config, corpus)
    learners = parts.learners(config)
    found: list[dict[str, Any]] = []
    for seed in range(config.replicates):
        learn = partial(parts.learn_sources, config, learners, corpus, seed)
        sources = stage(f"sources, seed {seed}", learn, folder=True)
        target = learners["target"]
        chosen = stage(
            f"weights, seed {seed}", partial(parts.choose, config, target, corpus, sources, seed)
        )
        ways = {
            way: stage(
                f"{way}, seed {seed}",
                partial(parts.follow, config, way, target, corpus, sources, chosen, seed),
                folder=True,
            )
            for way in config.ways
        }
        found.append({"series": sources["series_loss"], "chosen": chosen, "ways": ways})
    return _dataset(config, corpus, parts.costs(config, learners), found)


def _check(config: Config, corpus: data.Corpus) -> None:
    """What only the text and the devices tell, before any training."""
    one, two, target = map(len, corpus.parts)
    data.sources(config, corpus, 0)  # names what the overlaps leave too few blocks of
    if config.distance_blocks > min(config.source_blocks, target):
        raise ValueError(
            f"distance_blocks must be at most {min(config.source_blocks, target)}; got "
            f"{config.distance_blocks} (parts of {one}, {two} and {target} blocks)"
        )
    layout(config.shard).check(batch=config.batch)


def _dataset(
    config: Config, corpus: data.Corpus, cost: parts.Costs, found: list[dict[str, Any]]
) -> xr.Dataset:
    over = lambda pick: np.stack([pick(one) for one in found])  # noqa: E731
    ways, tasks = list(config.ways), list(corpus.questions)
    loss = np.stack([over(lambda one, w=w: one["ways"][w]["loss"]) for w in ways]).astype(float)
    right = np.stack([over(lambda one, w=w: one["ways"][w]["accuracy"]) for w in ways])
    each, step = config.source_steps, cost.step["target"]
    made = lambda way: sum(cost.step[parts.SHAPE[n]] for n in parts.MADE_OF[way])  # noqa: E731
    # before training: FLOPs of the sources, and of what is done with them
    search = {
        "ligo": config.learn_steps * step,
        "greedy": 3 * cost.validation,
        "sweep": config.gammas * cost.validation,
        "grown": config.gammas * cost.validation,
    }
    earlier = np.array([each * made(way) for way in ways]) / step
    ahead = np.array([search.get(way, 0.0) for way in ways]) / step
    saved = savings(loss, config.every, ahead=ahead)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = 1 - saved.steps / saved.scratch_steps
        whole = 1 - (saved.steps + earlier[:, None]) / saved.scratch_steps
    per_seed, kinds = ("way", "seed"), config.pairs
    chosen = lambda name: over(lambda one: one["chosen"][name]).astype(float)  # noqa: E731
    return xr.Dataset(
        {
            "loss": ((*per_seed, "step"), loss, {"units": "nats"}),
            "accuracy": ((*per_seed, "when", "task"), right.astype(float), {"units": "1"}),
            "level": (per_seed, saved.level),
            "reached": (per_seed, saved.reached),
            "steps": (per_seed, saved.steps),
            "scratch_steps": (per_seed, saved.scratch_steps),
            "saved": (per_seed, saved.saved, {"units": "steps"}),
            "compute_saved": (per_seed, share, {"units": "1"}),
            "compute_saved_with_sources": (per_seed, whole, {"units": "1"}),
            "ahead": ("way", ahead, {"long_name": "steps' worth of compute before training"}),
            "source_cost": ("way", earlier, {"long_name": "the same, of training the sources"}),
            "gamma_loss": (
                ("pair", "seed", "text", "gamma"),
                np.stack([chosen(f"{name} loss") for name in kinds]),
            ),
            "gamma_swept": (("pair", "seed"), np.stack([chosen(name) for name in kinds])),
            "gamma_distance": ("seed", chosen("distance")),
            "taken": (("seed", "source"), chosen("taken") > 0),
            "series_loss": (
                ("seed", "checkpoint", "of"),
                over(lambda one: one["series"]).astype(float),
            ),
            "step_flops": ("network", list(cost.step.values())),
        },
        {
            "way": ways,
            "seed": np.arange(config.replicates),
            "step": np.arange(0, config.steps + 1, config.every),
            "when": ["before", "after"],
            "task": tasks,
            "gamma": ("gamma", config.gamma(), {"long_name": "weight of the first source"}),
            "pair": list(kinds),
            "text": ["validation", "held out"],
            "checkpoint": [*map(str, config.series_steps), "mean"],
            "of": ["D_1", "D_t"],
            "network": list(cost.step),
            "source": ["one", "two"],
        },
        {
            "text": "the source of Python's standard library" if config.data is None else "files",
            "vocab": corpus.vocab,
            "choices": config.choices,
            "source_steps": config.source_steps,
            "start": config.start,
            "distance": config.distance,
            "items": config.items,
        },
    )


def _told(dataset: xr.Dataset) -> ModuleType:
    if "model" in dataset.coords:
        return checkpoints
    return importlib.import_module("experiments.sail_language.claims")


def findings(dataset: xr.Dataset) -> list[Finding]:
    """The paper's claims that this tests."""
    return _told(dataset).findings(dataset)


def summary(dataset: xr.Dataset) -> str:
    """Losses, steps saved, answers and weights."""
    return _told(dataset).summary(dataset)


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Perplexity by step; loss by gamma; steps and compute saved; answers; the checkpoints."""
    from experiments.sail_language import plots

    return plots.draw(dataset)
