"""What `overtraining_checkpoints` can be told."""

from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge

from experiments.data.registry import TextData
from experiments.lab.config import Count, Different, Natural, Positive, Rising, Seed, config, varied
from experiments.studies.overtraining_language.config import Memory, Model
from experiments.studies.overtraining_language.training import Shard
from experiments.training.step import Compute

QUESTIONS = "questions"
Deviation = Literal["module", "stated"]


@config
class Series:
    """The checkpoints that are trained where none are given: of one run, whose rate falls to 0."""

    budgets: Rising[Natural] = tuple(2**k for k in range(16, 22))
    """Tokens after which a checkpoint is written, ascending."""
    batch: Natural = 16
    """Sequences per step."""
    rate: Positive = 0.02
    """Highest learning rate."""
    folder: str | None = None
    """Where the checkpoints are kept; None for a temporary folder."""


@config
class Tuning:
    """What the checkpoints are taught, and how."""

    tasks: Different[str] = (QUESTIONS,)
    """Files of instructions in JSON lines (Anthropic-HH, TULU, Alpaca and their like), or
    'questions', which are generated for networks of characters."""
    tokenizer: str | None = None
    """The tokenizer.json of byte-level BPE by which text becomes tokens (GPT-2's, OLMo's); None
    for examples that are tokens already."""
    rates: Rising[Positive] = tuple(0.0005 * 2**k for k in range(8))
    """Highest learning rates, ascending; the best on validation is the tuned one."""
    examples: Natural = 128
    """Examples to fine-tune on."""
    batch: Natural = 8
    """Examples per step."""
    epochs: Natural = 4
    """How often each example is seen."""
    warmup: Count = 6
    """Steps below the highest rate."""
    held_out: Annotated[int, Ge(2)] = 128
    """Examples of a task to tune the rate by, and as many to report."""
    rank: Natural | None = None
    """Rank of adapters (LoRA) of the blocks' matrices; None teaches all weights."""
    alpha: Positive = 16.0
    """Adapters are added times alpha / rank."""

    def __post_init__(self) -> None:
        for name in self.tasks:
            if name != QUESTIONS and Path(name).suffix not in (".jsonl", ".json"):
                raise ValueError(
                    f"tasks must be '{QUESTIONS}' or files in JSON lines (.jsonl); got {name}"
                )
        if self.steps <= self.warmup:
            raise ValueError(
                "epochs: fine-tuning must take more steps, epochs * examples / batch, than warmup "
                f"= {self.warmup}; got {self.steps}"
            )

    @property
    def steps(self) -> int:
        return self.epochs * self.examples // self.batch


@config
class Benchmarks:
    """Multiple choice that networks answer before and after, beside the task (OOD)."""

    files: tuple[str, ...] = ()
    """Files of questions in JSON lines: ARC, PIQA, HellaSwag and their like."""
    items: Natural = 500
    """Questions of a file, at most."""
    shots: Count = 0
    """Questions with their answers before each: the first of its file, which are not asked."""


@config
class Config:
    """Perturb and fine-tune a series of checkpoints, measure what was forgotten."""

    checkpoints: tuple[str, ...] | None = None
    """Folders of checkpoints (GPT-2, Llama, OLMo of Hugging Face), from the first of a training to
    the last; None trains a series of tiny ones."""
    tokens: Rising[Natural] | None = None
    """Tokens that each was trained on; None for what the folders' names say ('tokens41B'), or else
    their order."""
    data: TextData = TextData()
    seed: Seed = 0
    """Seed of everything."""
    replicates: Annotated[int, Ge(3)] = 5
    """Repetitions, each with noise, minibatches and held-out text and examples of its own."""
    model: Model = Model()
    series: Series = Series()
    gammas: Rising[Positive] = (0.02, 0.05, 0.1, 0.2, 0.5)
    """Sizes of Gaussian noise, ascending, in standard deviations of the initial weights."""
    draws: Natural = 4
    """Draws of noise in each repetition; the same for all checkpoints and sizes."""
    deviation: Deviation = "module"
    """Which standard deviations: those of our modules' initial weights ('module'), or the
    initializer_range that config.json states ('stated')."""
    held_out: Natural = 128
    """Sequences on which the perplexity is measured."""
    tune: Tuning = Tuning()
    benchmarks: Benchmarks = Benchmarks()
    memory: Memory = Memory()
    compute: Compute = "float32"
    """Type to compute with in training."""
    save_every: Natural = 1000
    """Steps between two states of a training that are stored, from which a killed one goes on."""
    shard: Shard = "members"
    """What several devices share: the networks that are trained side by side ('members'), the
    examples ('data'), these and the parameters ('full'), or nothing ('no')."""

    def __post_init__(self) -> None:
        count = len(self.series.budgets if self.checkpoints is None else self.checkpoints)
        if self.checkpoints is not None and 0 < count < 3:
            raise ValueError(f"checkpoints must be 3 or more folders; got {count}")
        if self.tokens is not None and count and len(self.tokens) != count:
            raise ValueError(f"tokens must be one number for each of {count} checkpoints")
        if self.checkpoints is None:
            step = self.series.batch * self.model.context
            if self.series.budgets[0] < 10 * step:
                raise ValueError(
                    f"series.budgets must be at least 10 steps of {step} tokens; got "
                    f"{self.series.budgets[0]}"
                )
        parts = self.memory.micro_batches
        for field, size in (("series", self.series.batch), ("tune", self.tune.batch)):
            if size % parts and (field == "tune" or self.checkpoints is None):
                raise ValueError(
                    f"memory.micro_batches must divide {field}.batch = {size}; got {parts}"
                )


DEFAULT = Config()
# Table 2. Not printed, and chosen here: one epoch (of about 160 thousand pairs that Anthropic-HH
# has, less what is held out), examples of 512 tokens (most are shorter), the sizes of the noise
# (Fig. 65 shows colours only), its draws, and how much text is held out
PAPER = varied(
    DEFAULT,
    checkpoints=(),
    data={"name": "c4"},
    replicates=3,
    model={"context": 512},
    deviation="stated",
    draws=1,
    held_out=512,
    tune={
        "tasks": ("hh-rlhf.jsonl",),
        "tokenizer": "tokenizer.json",
        "rates": (1e-6, 5e-6, 1e-5, 5e-5, 8e-5, 1e-4, 2e-4),
        "examples": 158_000,
        "batch": 256,
        "epochs": 1,
        "warmup": 20,
        "held_out": 1000,
    },
    benchmarks={"items": 1000, "shots": 5},
    memory={"together": 1, "at_once": 8, "micro_batches": 16},
    compute="bfloat16",
    shard="full",
)
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # checkpoints on disk: give them, a text that is tokenised for them, instructions and their
    # tokenizer; sizes for a few minutes of an accelerator and 100 million weights
    "checkpoints": varied(
        PAPER,
        data={"name": "tokens"},
        model={"context": 256},
        held_out=64,
        tune={
            "rates": (1e-5, 5e-5, 2e-4),
            "examples": 4096,
            "batch": 64,
            "warmup": 6,
            "held_out": 200,
        },
        memory={"at_once": 16, "micro_batches": 1},
        benchmarks={"items": 200},
    ),
    "paper": PAPER,
    # 7 billion weights (Amber): adapters, since all weights and Adam's moments are 112 GB. The
    # paper trains all weights; rank and alpha are chosen here. Its tokenizer is not of byte pairs:
    # examples are to be lists of tokens
    "paper_7b": varied(PAPER, tune={"rank": 64, "alpha": 128.0, "tokenizer": None}),
    # seconds, for tests
    "tiny": varied(
        DEFAULT,
        replicates=3,
        model={"context": 24, "width": 8, "layers": 1, "heads": 1, "hidden": 16},
        series={"budgets": (1000, 2000, 4000), "batch": 4},
        gammas=(0.02, 0.3),
        draws=1,
        held_out=16,
        tune={"rates": (0.002, 0.02), "examples": 20, "held_out": 8, "epochs": 2, "batch": 4,
              "warmup": 2},
    ),
}  # fmt: skip
