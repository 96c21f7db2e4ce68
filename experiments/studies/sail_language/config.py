"""The config of `sail_language` and its presets."""

from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Interval
from pydantic import AfterValidator

from experiments.data import text
from experiments.data.benchmarks import BENCHMARKS, Scoring
from experiments.data.registry import OFFLINE_TEXT, TextData
from experiments.lab.config import (
    Different,
    Increasing,
    Natural,
    Rising,
    Seed,
    Share,
    config,
    varied,
)
from experiments.models import presets
from experiments.studies.shared.checking import must
from experiments.studies.shared.gamma_sweep import Start
from experiments.training.groups import Budget, Descent, LearnedMaps
from experiments.training.sharding import Shard
from experiments.training.step import Compute
from sail_jax.checks import one_of

Distance = Literal["mmd", "w1", "tv"]
SCRATCH, RETRAINED = "scratch", "retrained"
# The starts of a training on D_t, and their names in texts and figures.
WAYS = {
    SCRATCH: "from scratch",
    "ligo": "LiGO (narrow source)",
    "uniform": "uniform soup",
    "greedy": "greedy soup",
    "distance": "SAIL, γ by eq. 11",
    "sweep": "SAIL, γ by sweep",
    "grown": "SAIL, other shapes",
    RETRAINED: "SAIL, γ by retraining",
}
# The sources of each start.
MADE_OF = {
    SCRATCH: (),
    "ligo": ("narrow",),
    **dict.fromkeys(("uniform", "greedy", "distance", "sweep", RETRAINED), ("one", "two")),
    "grown": ("shallow", "narrow"),
}
SOURCES = ("one", "two", "narrow", "shallow")
# The starts for checkpoints on disk. The checkpoints' own texts, which eq. 11 needs, are not known,
# and those of other shapes are always grown.
OF_CHECKPOINTS = (SCRATCH, "ligo", "uniform", "greedy", "sweep", RETRAINED)


@config
class Model:
    """The shape of the target's network, and of smaller sources."""

    preset: Annotated[str, AfterValidator(presets.of_type("flax_gpt"))] | None = None
    """A GPT of `experiments.models.presets`, instead of the width, layers and heads below."""
    context: Annotated[int, Ge(2)] = 48
    """Tokens of a block, which is a network's input."""
    width: Natural = 32
    """Units of the residual stream of the target, and of sources of its shape."""
    layers: Natural = 2
    """Transformer blocks of the target."""
    heads: Natural = 2
    """Attention heads of the target, a divisor of the width."""
    narrow_heads: Natural = 1
    """Number of attention heads of the narrower source (of D_2), each as large as the target's."""
    shallow_layers: Natural = 1
    """Number of transformer blocks of the shallower source (of D_1)."""

    def target(self, vocab: int) -> dict[str, Any]:
        """Returns the configuration of the target's network."""
        if self.preset is not None:
            preset = presets.config(self.preset)
            return {**preset, "vocab": vocab, "context": max(preset["context"], self.context)}
        sizes = {"width": self.width, "layers": self.layers, "heads": self.heads}
        derived = {"head_dim": self.width // self.heads, "hidden": 4 * self.width}
        return {
            "model_type": "flax_gpt",
            "vocab": vocab,
            "context": self.context,
            **sizes,
            **derived,
        }


@config
class Source:
    """The texts of the two sources, and the sources' training."""

    start: Start = "shared"
    """Whether the two sources begin with 'shared' or 'independent' initial weights."""
    alpha: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Share of a source's text that the other source also has."""
    beta: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Share of a source's text that comes from the target's text."""
    blocks: Natural = 12000
    """Blocks of a source's text."""
    steps: Natural = 1000
    """Steps to train a source."""
    series: Rising[Share] = (0.68, 0.81, 0.95)
    """Checkpoints of the first source's training, as shares of its steps. Their mean is compared
    with the last of them (SAIL uses OLMo-1B's of 500, 600 and 700 of 738 thousand steps)."""


@config
class Weight:
    """The choice of the weight gamma of the first source."""

    distance: Distance = "mmd"
    """Distance of texts in eq. 11: of block means ('mmd', 'w1'), or of token frequencies ('tv')."""
    blocks: Annotated[int, Ge(4)] = 800
    """Number of blocks sampled from each text to estimate that distance, at most a source's."""
    gammas: Annotated[int, Ge(3)] = 31
    """Number of gammas to try, evenly spaced from -1 to 2 (the paper: 30, in steps of 0.1)."""
    retrain: Increasing[Natural] = (50, 100, 200)
    """Numbers of steps on D_t after which the gammas are compared (eq. 3), if 'retrained' is one of
    the ways. The chosen gamma has the least validation loss after the most steps (the paper: 50,
    100 and 200)."""


@config
class Questions:
    """The multiple-choice questions that networks answer."""

    items: Natural = 200
    """Maximum number of questions of each kind."""
    choices: Annotated[int, Ge(2)] = 4
    """Choices of a generated question."""
    ending: Natural = 16
    """Tokens of each choice in questions on how held-out text continues."""
    file: str | None = None
    """A file of further multiple-choice questions in JSON lines."""
    tokenizer: str | None = None
    """The tokenizer.json that encodes the files."""
    tasks: tuple[str, ...] = ()
    """Further benchmarks, such as 'piqa' and 'arc_easy' (`experiments.data.benchmarks`)."""
    folder: str | None = None
    """The folder of the benchmarks' files: piqa.jsonl and so on."""
    scoring: Scoring = "character"
    """The divisor of a benchmark choice's log-likelihood: its length in characters ('character') or
    tokens ('token'), 1 ('sum'), or as in OLMo's tools, which divide by characters only for PIQA and
    HellaSwag ('olmo')."""

    def __post_init__(self) -> None:
        for name in self.tasks:
            one_of("tasks", name, BENCHMARKS)
        must(self, "tasks", len(set(self.tasks)) == len(self.tasks), "all be different")


@config
class Config:
    """Train on two texts, merge, and train on a third; the defaults suit two CPU cores."""

    data: TextData = TextData()
    seed: Seed = 0
    """Seed of the sources, initial weights, minibatches and held-out text."""
    replicates: Annotated[int, Ge(3)] = 5
    """Number of independent repetitions, each with its own sources and models; at least 3."""
    ways: Different[str] = tuple(way for way in WAYS if way != RETRAINED)
    """Starts of the training on D_t; the first must be scratch."""
    model: Model = Model()
    source: Source = Source()
    grow: str = "lemon"
    """The method that grows sources of other shapes to the target's (`sail_jax.growth.METHODS`)."""
    weight: Weight = Weight()
    budget: Budget = Budget(steps=1000, batch=16, every=25)
    # Among rates of 1, 3, 10 and 20 e-3 the last two are the best, from scratch and from a source.
    optimizer: Descent = Descent(rate=1e-2, warmup=50, floor=0.1, weight_decay=0.01, clip=1.0)
    maps: LearnedMaps = LearnedMaps(steps=100)
    validation: Natural = 64
    """Number of held-out blocks of D_t for choosing weights."""
    held_out: Annotated[int, Ge(2)] = 256
    """Number of other held-out blocks of D_t, for all results."""
    questions: Questions = Questions()
    checkpoints: tuple[str, ...] | None = None
    """Folders of checkpoints (GPT-2, Llama, OLMo of Hugging Face) to merge, instead of training.
    The first is theta_1, the mean of the others theta_2, and the data are the target's text."""
    retrain: bool = False
    """Whether to also train networks on that text, from merges of the checkpoints and the other
    ways: the columns of Table 2."""
    smaller: str | None = None
    """Folder of a smaller checkpoint of the same kind and tokens, which 'ligo' grows to the shape
    of the first."""
    at_once: Natural = 32
    """Number of blocks evaluated side by side; fewer need less memory."""
    compute: Compute = "float32"
    """Floating-point type of the training's computation."""
    micro_batches: Natural = 1
    """Number of parts of a minibatch. Their gradients are computed one after the other, which saves
    memory."""
    shard: Shard = "data"
    """The work that several devices share: nothing ('no'), the examples of a batch ('data'), or
    examples and parameters ('full')."""

    def __post_init__(self) -> None:
        for way in self.ways:
            one_of("ways", way, WAYS)
        model, source, asked = self.model, self.source, self.questions
        sizes, every, warmup = model.target(text.VOCAB), self.budget.every, self.optimizer.warmup
        above = f"greater than optimizer.warmup = {warmup}"
        trains = self.checkpoints is None  # its own sources
        checks = [
            ("ways", self.ways[0] == SCRATCH, f"'{SCRATCH}' and others"),
            ("budget.steps", self.budget.steps > warmup, above),
            ("budget.steps", self.budget.steps % every == 0,
             f"a multiple of budget.every = {every}"),
            ("source.steps", source.steps > warmup or not trains, above),
            ("source.blocks", source.blocks >= self.weight.blocks,
             f"at least weight.blocks = {self.weight.blocks}"),
            ("source.series", len(set(self.series_steps)) == len(source.series),
             "shares of different steps"),
            ("model.heads", model.preset or model.width % model.heads == 0,
             f"a divisor of model.width = {model.width}"),
            ("model.narrow_heads",
             "narrow" not in self.sources or model.narrow_heads < sizes["heads"],
             f"below {sizes['heads']}, the target's"),
            ("model.shallow_layers",
             "shallow" not in self.sources or model.shallow_layers < sizes["layers"],
             f"below {sizes['layers']}, the target's"),
            ("model.context", model.context <= sizes["context"],
             f"at most {sizes['context']}, the positions of {model.preset}"),
            ("questions.ending", asked.ending < model.context,
             f"below model.context = {model.context}"),
            ("questions.tokenizer",
             asked.tokenizer or not asked.file or self.data.name == OFFLINE_TEXT,
             "the one that made data, given together with questions.file"),
            ("questions.tokenizer",
             asked.tokenizer or not asked.tasks or self.data.name == OFFLINE_TEXT,
             "the one that made data, given together with questions.tasks"),
            ("weight.retrain",
             RETRAINED not in self.ways or self.weight.retrain[-1] <= self.budget.steps,
             f"at most budget.steps = {self.budget.steps}"),
            ("retrain", not (trains and self.retrain), "false without checkpoints"),
            ("ways", not self.retrain or set(self.ways) <= set(OF_CHECKPOINTS),
             f"some of {', '.join(OF_CHECKPOINTS)} for checkpoints"),
            ("micro_batches", self.budget.batch % self.micro_batches == 0,
             f"a divisor of budget.batch = {self.budget.batch}"),
        ]  # fmt: skip
        for field, true, allowed in checks:
            must(self, field, true, f"be {allowed}")

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources to train: the sources of all starts, and always "one" and "two"."""
        needed = {name for way in self.ways for name in MADE_OF[way]}
        return tuple(name for name in SOURCES if name in needed | {"one", "two"})

    @property
    def pairs(self) -> tuple[str, ...]:
        """The lines on which gamma is swept, through theta_1 and theta_2 or grown sources."""
        return ("sweep", "grown") if "grown" in self.ways else ("sweep",)

    @property
    def series_steps(self) -> tuple[int, ...]:
        """The steps after which checkpoints of the first source are kept, for `series`."""
        return tuple(max(1, round(share * self.source.steps)) for share in self.source.series)

    def gamma(self) -> np.ndarray:
        """Lists the values of gamma to try."""
        return np.linspace(-1, 2, self.weight.gammas)

    def network(self, name: str, vocab: int) -> dict[str, Any]:
        """Returns the configuration of a network."""
        sizes, model = self.model.target(vocab), self.model
        if name == "narrow":
            width = model.narrow_heads * sizes["head_dim"]
            return {**sizes, "heads": model.narrow_heads, "width": width, "hidden": 4 * width}
        return {**sizes, "layers": model.shallow_layers} if name == "shallow" else sizes


DEFAULT = Config()
# Merging of checkpoints on disk. They need a text with their tokens, and, for files of questions,
# their tokenizer. Repetitions draw different held-out blocks
CHECKPOINTS = varied(
    DEFAULT,
    data={"name": "tokens"},
    model={"context": 256},
    validation=32,
    held_out=64,
    questions={"items": 100, "ending": 64},
    checkpoints=(),
    at_once=4,
)
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # The loop of eq. 3 next to gammas chosen before training: 31 gammas as in Sec. 4.4, retrained
    # for 50, 100 and 200 steps. Minutes on two cores.
    "eq_3": varied(DEFAULT, ways=(SCRATCH, "uniform", "distance", "sweep", RETRAINED)),
    # nanoGPT with 6 layers and width 384 on GPT-2's tokens of OpenWebText. Secs. 4.3 and 4.4 print
    # nothing else about this model's training. Table 1 is in App. I, on OLMo, and names no model.
    # Its rate of 4e-4, AdamW and cosine after 2000 steps match the pre-training of OLMo-1B
    # (official-0724/OLMo-1B.yaml of its code; OLMo-7B's are 3e-4 and 5000 steps). For nanoGPT all
    # of these are our choice: batch 16, 4e-4, AdamW with decay 0.01, clipping at 1, cosine after
    # 2000 steps. So are the number of steps, the sizes of held-out data, blocks of 256 tokens (App.
    # H.1 sorts blocks of 1024, as `proximal_gamma` does), and the smaller sources
    "paper": varied(
        DEFAULT,
        data={"name": "openwebtext"},
        model={"preset": "nanogpt-6x384", "context": 256, "narrow_heads": 3, "shallow_layers": 3},
        source={"blocks": 500_000, "steps": 50_000},
        weight={"blocks": 2000},
        budget={"steps": 20_000, "every": 500},
        optimizer={"rate": 4e-4, "warmup": 2000, "floor": 0.0},
        validation=256,
        held_out=2000,
        questions={"items": 1000, "ending": 64},
        compute="bfloat16",
    ),
    "checkpoints": CHECKPOINTS,
    # Table 2 and Fig. 7: OLMo-1B from merges of its checkpoints (steps 500, 600 and 700 thousand),
    # compared with scratch, LiGO and soups on the six benchmarks. Table 1: batch 16, 4e-4, AdamW
    # with decay 0.01, clipping at 1, cosine after 2000 steps, one epoch. Not printed, and our
    # choice: the data, and so the length of an epoch, 10,000 steps; that the cosine ends at 0;
    # blocks of 2048 tokens, OLMo's context; the network that LiGO grows (`smaller`); the choice of
    # gamma (by validation loss before training), and the held-out text. Hours on a large
    # accelerator
    "table_2": varied(
        CHECKPOINTS,
        retrain=True,
        ways=(SCRATCH, "ligo", "uniform", "greedy", "sweep"),
        model={"context": 2048},
        budget={"steps": 10_000, "batch": 16, "every": 500},
        optimizer={"rate": 4e-4, "warmup": 2000, "floor": 0.0},
        questions={"tasks": tuple(BENCHMARKS), "items": 500, "tokenizer": "tokenizer.json"},
        compute="bfloat16",
        micro_batches=4,
        shard="full",
    ),
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        replicates=3,
        ways=(SCRATCH, "uniform", "greedy", "distance", "sweep"),
        model={"context": 16, "width": 8, "layers": 1},
        source={"blocks": 200, "steps": 40},
        weight={"blocks": 40, "gammas": 7},
        budget={"steps": 40, "batch": 4, "every": 10},
        optimizer={"warmup": 5},
        maps={"steps": 5},
        validation=8,
        held_out=16,
        questions={"items": 16, "ending": 4},
        at_once=8,
    ),
}
