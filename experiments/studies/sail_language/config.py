"""What `sail_language` can be told."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from experiments.data import text
from experiments.lab import validate
from experiments.models import presets
from experiments.training.gamma_sweep import Start
from experiments.training.sharding import Shard
from experiments.training.step import Compute
from sail_jax.checks import nearest

Distance = Literal["mmd", "w1", "tv"]
GPT2_VOCAB = 50257
SCRATCH = "scratch"
# how a training on D_t begins, and what it is called
WAYS = {
    SCRATCH: "from scratch",
    "ligo": "LiGO (narrow source)",
    "uniform": "uniform soup",
    "greedy": "greedy soup",
    "distance": "SAIL, γ by eq. 11",
    "sweep": "SAIL, γ by sweep",
    "grown": "SAIL, other shapes",
}
MADE_OF = {
    SCRATCH: (),
    "ligo": ("narrow",),
    **dict.fromkeys(("uniform", "greedy", "distance", "sweep"), ("one", "two")),
    "grown": ("shallow", "narrow"),
}
SOURCES = ("one", "two", "narrow", "shallow")


@dataclass(frozen=True)
class Config:
    """Train on two texts, merge, train on a third; the defaults are what two cores finish."""

    seed: int = 0
    """Seed of the sources, initial weights, minibatches and what is held out."""
    replicates: int = 4
    """Independent repetitions, each with its own sources and models; at least 3, for the spread."""
    ways: tuple[str, ...] = tuple(WAYS)
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
    distance: Distance = "mmd"
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
        validate.one_of(self, start=Start, distance=Distance, shard=Shard, compute=Compute)
        for way in self.ways:
            if way not in WAYS:
                raise ValueError(f"ways: unknown '{way}'{nearest(way, WAYS)}")
        sizes = self._target(text.VOCAB)
        shares = self.series
        checks = [
            ("ways", self.ways[0] == SCRATCH, f"'{SCRATCH}' and others"),
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
        validate.holds(self, checks)

    @property
    def sources(self) -> tuple[str, ...]:
        """Those that the ways are made of."""
        needed = {name for way in self.ways for name in MADE_OF[way]}
        return tuple(name for name in SOURCES if name in needed | {"one", "two"})

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
        ways = tuple(way for way in WAYS if way not in ("ligo", "grown"))
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


PRESETS: dict[str, Config] = {
    "default": Config(),
    "paper": Config.paper(),
    "checkpoints": Config.of_checkpoints(),
    "tiny": Config.tiny(),
}
