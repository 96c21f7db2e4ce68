"""The config of `overtraining_checkpoints` and its presets."""

from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge

from experiments.data.registry import TextData
from experiments.lab.config import Count, Different, Natural, Positive, Rising, Seed, config, varied
from experiments.studies.shared.language_config import Memory, Model
from experiments.training.groups import Epochs
from experiments.training.sharding import Several
from experiments.training.step import Compute

QUESTIONS = "questions"  # the generated task, by its name in `Tuning.tasks`
Deviation = Literal["module", "stated"]


@config
class Series:
    """The training of a series of checkpoints if none are given.

    They belong to one training. Its learning rate decays to 0 at the largest budget.
    """

    budgets: Rising[Natural] = tuple(2**k for k in range(16, 22))
    """Tokens after which a checkpoint is written, ascending."""
    batch: Natural = 16
    """Sequences per step."""
    rate: Positive = 0.02
    """The highest learning rate."""
    folder: str | None = None
    """Folder for the checkpoints; None for a temporary one."""


@config
class Tuning(Epochs):
    """The fine-tuning of checkpoints on instructions."""

    tasks: Different[str] = (QUESTIONS,)
    """The tasks: files of instructions in JSON lines (such as Anthropic-HH, TULU or Alpaca), or
    'questions', which are generated for networks of characters."""
    tokenizer: str | None = None
    """The tokenizer.json that encodes text in files; None if examples are tokens already, and for
    networks of characters."""
    rates: Rising[Positive] = tuple(0.0005 * 2**k for k in range(8))
    """Highest learning rates to try, ascending; the tuned one has the least validation loss."""
    warmup: Count = 6
    """Steps before the learning rate reaches its highest value."""
    held_out: Annotated[int, Ge(2)] = 128
    """Number of a task's examples to tune the rate with, and of as many others for the results."""
    rank: Natural | None = None
    """Rank of adapters (LoRA) for the blocks' matrices; None trains all weights."""
    alpha: Positive = 16.0
    """The scale of adapters is alpha / rank. Without a rank, alpha has no effect."""

    def __post_init__(self) -> None:
        for name in self.tasks:
            if name != QUESTIONS and Path(name).suffix not in (".jsonl", ".json"):
                raise ValueError(
                    f"tasks must be '{QUESTIONS}' or files in JSON lines (.jsonl); got {name}"
                )
        if self.steps() <= self.warmup:
            raise ValueError(
                "epochs: fine-tuning must take more steps, epochs * examples / batch, than warmup "
                f"= {self.warmup}; got {self.steps()}"
            )


@config
class Benchmarks:
    """Multiple-choice questions that a network answers before and after fine-tuning.

    They are outside the task's distribution (OOD in the paper).
    """

    files: tuple[str, ...] = ()
    """Files of questions in JSON lines, such as ARC, PIQA or HellaSwag."""
    items: Natural = 500
    """Largest number of questions from a file."""
    shots: Count = 0
    """Number of solved examples before each question. They are the file's first questions, which
    do not count as questions."""


@config
class Config:
    """Perturb and fine-tune a series of checkpoints, and measure how much they forget."""

    checkpoints: tuple[str, ...] | None = None
    """Folders of checkpoints (GPT-2, Llama, OLMo of Hugging Face), from the first of a training to
    the last; None trains a series of tiny ones."""
    tokens: Rising[Natural] | None = None
    """Tokens that each checkpoint was trained on, ascending. None reads them from the folders'
    names ('tokens41B'), or uses the order of the folders if a name has none."""
    data: TextData = TextData()
    seed: Seed = 0
    """Seed of all randomness."""
    replicates: Annotated[int, Ge(3)] = 5
    """Number of repetitions, each with its own noise, minibatches, held-out text and examples."""
    model: Model = Model()
    series: Series = Series()
    gammas: Rising[Positive] = (0.02, 0.05, 0.1, 0.2, 0.5)
    """Sizes of Gaussian noise, ascending, in standard deviations of the initial weights."""
    draws: Natural = 4
    """Number of draws of noise in each repetition; the same for all checkpoints and sizes."""
    deviation: Deviation = "module"
    """The standard deviations of the noise: from this library's initial weights ('module'), or
    the initializer_range in config.json ('stated')."""
    held_out: Natural = 128
    """Number of sequences on which the pre-training loss is measured."""
    tune: Tuning = Tuning()
    benchmarks: Benchmarks = Benchmarks()
    memory: Memory = Memory()
    compute: Compute = "float32"
    """Floating-point type of the training's computation."""
    save_every: Natural = 1000
    """Steps between two stored states of fine-tuning, from which a killed one continues."""
    shard: Several = "members"
    """The work that several devices share: the networks trained side by side ('members'), the
    examples ('data'), examples and parameters ('full'), or nothing ('no')."""

    def __post_init__(self) -> None:
        if self.model.mup is not None:
            raise ValueError(
                "model.mup must be None: the checkpoints' configurations state no scale of logits; "
                f"got {self.model.mup}"
            )
        count = len(self.series.budgets if self.checkpoints is None else self.checkpoints)
        # Presets have an empty tuple, to be replaced by the user. `run` rejects it with an
        # explanation.
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
            self.memory.check(series=self.series.batch)
        self.memory.check(tune=self.tune.batch)


DEFAULT = Config()
# Table 2. Not printed, and chosen here: one epoch (of about 160 thousand pairs in Anthropic-HH,
# minus the held-out ones), examples of 512 tokens (most are shorter), the sizes of the noise (Fig.
# 65 shows only colours), its draws, and the amount of held-out text
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
    # Checkpoints on disk. They need a text with their tokens, instructions and their tokenizer. The
    # sizes suit a few minutes of an accelerator and 100 million weights.
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
    # 7 billion weights (Amber). Adapters, because all weights with Adam's moments need 112 GB. The
    # paper trains all weights; rank and alpha are our choice. Examples are lists of tokens, unless
    # a tokenizer is given.
    "paper_7b": varied(PAPER, tune={"rank": 64, "alpha": 128.0, "tokenizer": None}),
    # Seconds, for tests.
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
