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
# The starts of a training on D_t, and what they are called in texts and figures.
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
# The sources that each start is made of.
MADE_OF = {
    SCRATCH: (),
    "ligo": ("narrow",),
    **dict.fromkeys(("uniform", "greedy", "distance", "sweep", RETRAINED), ("one", "two")),
    "grown": ("shallow", "narrow"),
}
SOURCES = ("one", "two", "narrow", "shallow")
# The starts that checkpoints on disk have: their own texts, of which eq. 11 has the distances, are
# not known, and those of other shapes are always grown.
OF_CHECKPOINTS = (SCRATCH, "ligo", "uniform", "greedy", "sweep", RETRAINED)


@config
class Model:
    """The shape of the target's network, and of smaller sources."""

    preset: Annotated[str, AfterValidator(presets.of_type("flax_gpt"))] | None = None
    """A GPT of `experiments.models.presets`, instead of the width, layers and heads below."""
    context: Annotated[int, Ge(2)] = 48
    """Tokens of a block, which is what a network sees."""
    width: Natural = 32
    """Units of the residual stream of the target, and of sources of its shape."""
    layers: Natural = 2
    """Transformer blocks of the target."""
    heads: Natural = 2
    """Attention heads of the target, a divisor of the width."""
    narrow_heads: Natural = 1
    """Heads of the narrower source (of D_2), each as large as the target's."""
    shallow_layers: Natural = 1
    """Transformer blocks of the shallower source (of D_1)."""

    def target(self, vocab: int) -> dict[str, Any]:
        """Makes the configuration of the target's network."""
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
    """The texts of the two sources, and how these are trained."""

    start: Start = "shared"
    """Whether the two sources start from 'shared' or from 'independent' initial weights."""
    alpha: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Share of a source's text that the other source has too."""
    beta: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Share of a source's text that is taken from the target's."""
    blocks: Natural = 12000
    """Blocks of a source's text."""
    steps: Natural = 1000
    """Steps of training a source."""
    series: Rising[Share] = (0.68, 0.81, 0.95)
    """Checkpoints of the first source's training, as shares of its steps; their mean is compared
    with the last of them (SAIL takes OLMo-1B's of 500, 600 and 700 of 738 thousand steps)."""


@config
class Weight:
    """How the weight gamma of the first source is chosen."""

    distance: Distance = "mmd"
    """Distance of texts in eq. 11: of block means ('mmd', 'w1'), or of token frequencies ('tv')."""
    blocks: Annotated[int, Ge(4)] = 800
    """Blocks sampled from each text to estimate that distance, at most those of a source."""
    gammas: Annotated[int, Ge(3)] = 31
    """Values of gamma to try, evenly spaced from -1 to 2 (the paper says 30, in steps of 0.1)."""
    retrain: Increasing[Natural] = (50, 100, 200)
    """Numbers of steps of training on D_t after which the gammas are compared (eq. 3), if
    'retrained' is one of the ways; it takes the one of least validation loss after the most steps
    (the paper says 50, 100 and 200)."""


@config
class Questions:
    """The multiple-choice questions that networks answer."""

    items: Natural = 200
    """Questions of each kind, at most."""
    choices: Annotated[int, Ge(2)] = 4
    """Choices of a generated question."""
    ending: Natural = 16
    """Tokens of each choice in questions of how held-out text goes on."""
    file: str | None = None
    """A file of multiple-choice questions in JSON lines, to be asked as well."""
    tokenizer: str | None = None
    """The tokenizer.json of byte-level BPE by which files become tokens (GPT-2's, OLMo's)."""
    tasks: tuple[str, ...] = ()
    """Benchmarks to ask as well, such as 'piqa' and 'arc_easy' (`experiments.data.benchmarks`)."""
    folder: str | None = None
    """The folder of their files: piqa.jsonl and so on."""
    scoring: Scoring = "character"
    """What the log-likelihood of a benchmark's choice is divided by: its length in characters
    ('character') or tokens ('token'), nothing ('sum'), or as OLMo's tools do it, which divide by
    characters for PIQA and HellaSwag alone ('olmo')."""

    def __post_init__(self) -> None:
        for name in self.tasks:
            one_of("tasks", name, BENCHMARKS)
        must(self, "tasks", len(set(self.tasks)) == len(self.tasks), "all be different")


@config
class Config:
    """Training on two texts, a merge, and training on a third; the defaults suit two CPU cores."""

    data: TextData = TextData()
    seed: Seed = 0
    """Seed of the sources, initial weights, minibatches and what is held out."""
    replicates: Annotated[int, Ge(3)] = 5
    """Independent repetitions, each with its own sources and models; at least 3, for the spread."""
    ways: Different[str] = tuple(way for way in WAYS if way != RETRAINED)
    """Starts of the training on D_t; the first must be scratch."""
    model: Model = Model()
    source: Source = Source()
    grow: str = "lemon"
    """How sources of other shapes are grown to the target's (`sail_jax.growth.METHODS`)."""
    weight: Weight = Weight()
    budget: Budget = Budget(steps=1000, batch=16, every=25)
    # Of rates of 1, 3, 10 and 20 e-3 the last two are the best, from scratch as from a source.
    optimizer: Descent = Descent(rate=1e-2, warmup=50, floor=0.1, weight_decay=0.01, clip=1.0)
    maps: LearnedMaps = LearnedMaps(steps=100)
    validation: Natural = 64
    """Held-out blocks of D_t for choosing weights."""
    held_out: Annotated[int, Ge(2)] = 256
    """Other held-out blocks of D_t, for all that is reported."""
    questions: Questions = Questions()
    checkpoints: tuple[str, ...] | None = None
    """Folders of checkpoints (GPT-2, Llama, OLMo of Hugging Face) to merge, instead of training:
    the first is theta_1, the mean of the others theta_2, and the data are the target's text."""
    retrain: bool = False
    """Whether to train networks on that text as well, from merges of the checkpoints and the other
    ways: the columns of Table 2."""
    smaller: str | None = None
    """Folder of a smaller checkpoint of the same kind and tokens, which 'ligo' grows to the shape
    of the first."""
    at_once: Natural = 32
    """Blocks that are evaluated side by side; fewer need less memory."""
    compute: Compute = "float32"
    """Floating-point type that training computes with."""
    micro_batches: Natural = 1
    """Parts of a minibatch whose gradients are computed one after the other, to save memory."""
    shard: Shard = "data"
    """What several devices share: nothing ('no'), the examples of a batch ('data'), or these and
    the parameters ('full')."""

    def __post_init__(self) -> None:
        for way in self.ways:
            one_of("ways", way, WAYS)
        model, source, asked = self.model, self.source, self.questions
        sizes, every, warmup = model.target(text.VOCAB), self.budget.every, self.optimizer.warmup
        above = f"greater than optimizer.warmup = {warmup}"
        trains = self.checkpoints is None  # sources of its own
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
             "the one that made data, given beside questions.file"),
            ("questions.tokenizer",
             asked.tokenizer or not asked.tasks or self.data.name == OFFLINE_TEXT,
             "the one that made data, given beside questions.tasks"),
            ("weight.retrain",
             RETRAINED not in self.ways or self.weight.retrain[-1] <= self.budget.steps,
             f"at most budget.steps = {self.budget.steps}"),
            ("retrain", not (trains and self.retrain), "false where there are no checkpoints"),
            ("ways", not self.retrain or set(self.ways) <= set(OF_CHECKPOINTS),
             f"some of {', '.join(OF_CHECKPOINTS)} for checkpoints"),
            ("micro_batches", self.budget.batch % self.micro_batches == 0,
             f"a divisor of budget.batch = {self.budget.batch}"),
        ]  # fmt: skip
        for field, true, allowed in checks:
            must(self, field, true, f"be {allowed}")

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources to train: those that the starts are made of, and always "one" and "two"."""
        needed = {name for way in self.ways for name in MADE_OF[way]}
        return tuple(name for name in SOURCES if name in needed | {"one", "two"})

    @property
    def pairs(self) -> tuple[str, ...]:
        """The lines that gamma is swept on, through theta_1 and theta_2 or grown sources."""
        return ("sweep", "grown") if "grown" in self.ways else ("sweep",)

    @property
    def series_steps(self) -> tuple[int, ...]:
        """The steps after which checkpoints of the first source are taken, for `series`."""
        return tuple(max(1, round(share * self.source.steps)) for share in self.source.series)

    def gamma(self) -> np.ndarray:
        """Lists the values of gamma that are tried."""
        return np.linspace(-1, 2, self.weight.gammas)

    def network(self, name: str, vocab: int) -> dict[str, Any]:
        """Makes the configuration of a network."""
        sizes, model = self.model.target(vocab), self.model
        if name == "narrow":
            width = model.narrow_heads * sizes["head_dim"]
            return {**sizes, "heads": model.narrow_heads, "width": width, "hidden": 4 * width}
        return {**sizes, "layers": model.shallow_layers} if name == "shallow" else sizes


DEFAULT = Config()
# Checkpoints on disk, merged: give them, a text that is tokenised for them, and with files of
# questions their tokenizer. Repetitions draw the held-out blocks anew
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
    # The loop of eq. 3 beside gammas that are chosen before training: 31 gammas as Sec. 4.4 has
    # them, retrained for 50, 100 and 200 steps. Minutes on two cores.
    "eq_3": varied(DEFAULT, ways=(SCRATCH, "uniform", "distance", "sweep", RETRAINED)),
    # nanoGPT of 6 layers and width 384 on GPT-2's tokens of OpenWebText, which is all that
    # Secs. 4.3 and 4.4 print of how this model is trained. Table 1 is in App. I, on OLMo, and names
    # no model: its rate of 4e-4, AdamW and its cosine after 2000 steps are those with which OLMo-1B
    # was pre-trained (official-0724/OLMo-1B.yaml of its code; OLMo-7B's are 3e-4 and 5000 steps).
    # So for nanoGPT all of it is chosen here, for want of others: batch 16, 4e-4, AdamW with decay
    # 0.01, clipping at 1, cosine after 2000 steps. Chosen as well: the number of steps, the sizes
    # of what is held out, blocks of 256 tokens (App. H.1 sorts blocks of 1024, as `proximal_gamma`
    # does), and the smaller sources
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
    # beside scratch, LiGO and soups, asked the six benchmarks. Table 1: batch 16, 4e-4, AdamW with
    # decay 0.01, clipping at 1, cosine after 2000 steps, one epoch. Not printed, and chosen here:
    # the data, and so the length of an epoch, 10,000 steps; that the cosine ends at 0; blocks of
    # 2048 tokens, which is OLMo's context; what LiGO grows (`smaller`); how gamma is chosen (by
    # validation loss before training), and what is held out. Hours on a large accelerator
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
