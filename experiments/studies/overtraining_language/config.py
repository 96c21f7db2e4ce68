"""The config of `overtraining_language` and its presets."""

from typing import Annotated, Any

from annotated_types import Ge, Gt, Interval, Le
from pydantic import AllowInfNan

from experiments.data.registry import TextData
from experiments.lab.config import Different, Natural, Positive, Rising, Seed, config, varied
from experiments.studies.shared import language_tasks as tasks
from experiments.studies.shared.language_config import Memory, Model
from experiments.training.groups import Epochs
from experiments.training.schedules import Decay
from experiments.training.sharding import Several
from experiments.training.step import Compute

Warmup = Annotated[float, Interval(ge=0, lt=1)]
"""Share of the steps before the learning rate reaches its highest value."""
Cooldown = Annotated[float, Gt(0), Le(1)]
"""Share of the steps over which the learning rate falls at the end."""


@config
class Pretraining:
    """The training of models before they are perturbed."""

    budgets: Rising[Natural] = tuple(2**k for k in range(17, 23))
    """Tokens to pre-train on, ascending; each budget has its own training."""
    batch: Natural = 16
    """Sequences per step."""
    rate: Positive = 0.02
    """Highest learning rate."""
    decay: Decay = "cosine"
    """The decay of the rate: 'cosine' or 'linear' to 0, 'constant', or 'wsd' (constant, then
    linear)."""
    warmup: Warmup = 0.1
    """Share of the steps before the learning rate reaches its highest value."""
    cooldown: Cooldown = 0.1
    """Share of the steps over which 'wsd' falls; other decays ignore it."""


@config
class Tuning(Epochs):
    """The fine-tuning of models."""

    tasks: Different[str] = tasks.TASKS
    """The tasks: 'shifted', 'rotated', 'questions', the path of a tokenised text (.bin, .npy), or
    of texts in JSON lines, with or without classes (.jsonl)."""
    tokenizer: str | None = None
    """The tokenizer.json that encodes texts in JSON lines; None for networks of characters."""
    rates: Rising[Positive] = tuple(0.00025 * 2**k for k in range(8))
    """Highest learning rates to try, ascending; the tuned one has the least validation loss."""
    examples: Natural = 128
    """Number of examples to fine-tune on; for a file in JSON lines the maximum."""
    decay: Decay = "cosine"
    """The decay of the rate: 'cosine' or 'linear' to 0, 'constant', or 'wsd' (constant, then
    linear)."""
    warmup: Warmup = 0.1
    """Share of the steps before the learning rate reaches its highest value."""
    cooldown: Cooldown = 0.1
    """Share of the steps over which 'wsd' falls; other decays ignore it."""
    early_stopping: bool = False
    """Whether the model after the epoch of least validation loss is used, instead of the last
    one."""
    held_out: Natural = 128
    """Number of a task's examples to tune the rate with, and of as many others for the results."""
    scales: Different[Positive] = (0.1, 0.25, 0.5, 0.75, 1.0)
    """Shares of the path to the fine-tuned model (Fig. 10), ascending. They include 1, its end."""

    def __post_init__(self) -> None:
        tasks.check(self.tasks)
        if list(self.scales) != sorted(self.scales) or 1 not in self.scales:
            raise ValueError(
                "scales must ascend and have 1, the fine-tuned model, among them; got "
                f"{self.scales}"
            )
        self.check_steps()

    def check_steps(self, examples: int | None = None) -> None:
        """Checks that training is long enough, and that an epoch has a step if training may stop
        early.

        Args:
          examples: The number of available examples, which replaces the field if given.

        Raises:
          ValueError: If there are fewer steps than 10, or the first epoch has none.
        """
        if self.steps(examples) < tasks.LEAST_STEPS:
            raise ValueError(
                f"epochs: fine-tuning must take at least {tasks.LEAST_STEPS} steps, epochs * "
                f"examples / batch; got {self.steps(examples)}"
            )
        if self.early_stopping and self.batch > (count := examples or self.examples):
            raise ValueError(
                f"batch: early_stopping needs a step in every epoch of {count} examples; got "
                f"{self.batch}"
            )


@config
class Config:
    """Pre-train models for several budgets, perturb and fine-tune them, and measure the losses."""

    data: TextData = TextData()
    seed: Seed = 0
    """Seed of initial weights, minibatches, noise and the choice of held-out sequences."""
    replicates: Annotated[int, Ge(3)] = 5
    """Number of repetitions, each with its own initial weights, minibatches and noise; at least
    3."""
    model: Model = Model()
    pretrain: Pretraining = Pretraining()
    noise: Rising[Positive] = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
    """Sizes lambda of Gaussian noise, ascending, in standard deviations of the initial weights."""
    draws: Annotated[int, Ge(2)] = 4
    """Number of pairs +epsilon and -epsilon of noise; the same for all budgets and sizes."""
    held_out: Natural = 128
    """Number of sequences on which the pre-training loss is measured."""
    tune: Tuning = Tuning()
    kept_perplexity: Annotated[float, Gt(1), AllowInfNan(False)] | None = None
    """Perplexity of pre-training text below which a fine-tuned model counts as retaining it. Claims
    are judged at the largest rate that retains the text after every budget. None uses the
    perplexity of predicting each token from its frequency."""
    memory: Memory = Memory()
    compute: Compute = "float32"
    """Floating-point type of the training's computation."""
    save_every: Natural = 1000
    """Steps between two checkpoints of a training, from which a killed one continues."""
    shard: Several = "members"
    """The work that several devices share: the networks trained side by side ('members'), the
    examples ('data'), examples and parameters ('full'), or nothing ('no')."""

    def __post_init__(self) -> None:
        least = self.pretrain.budgets[0]
        if self.steps(least) < 10:
            raise ValueError(
                "pretrain.budgets must be at least 10 steps of "
                f"{self.pretrain.batch * self.model.context} tokens; got {least}"
            )
        self.memory.check(pretrain=self.pretrain.batch, tune=self.tune.batch)

    @property
    def network(self) -> dict[str, Any]:
        """The configuration of the network for `experiments.models.presets.build`."""
        return self.model.network()

    def steps(self, budget: int) -> int:
        """Computes the number of steps of a pre-training."""
        return budget // (self.pretrain.batch * self.model.context)


DEFAULT = Config()
# App. C.1: two sets that are learned as text, and eight with classes
_TASKS = tuple(
    f"{name}.jsonl"
    for name in (
        *("gsm8k", "starcoder-python"),
        *("siqa", "mr", "rte", "trec", "subj", "boolq", "cr", "tweet"),
    )
)
# Tables 3 and 4. The tokens of C4, the tasks and the tokenizer must be given by path. Not printed,
# and our choice: the largest number of a task's examples (5000, printed only for Starcoder), the
# number of held-out ones, prompts and words of classes, early stopping within one training instead
# of one training for each number of epochs, and the width at which muP is the standard
# parametrisation: OLMo-15M's, the smallest
PAPER = varied(
    DEFAULT,
    data={"name": "c4"},
    replicates=3,
    model={"preset": "olmo-30m", "context": 1024, "mup": 192},
    pretrain={
        "budgets": tuple(k * 10**9 for k in (4, 8, 16, 32, 64, 128)),
        "batch": 256,
        "rate": 3e-4,
    },
    held_out=1024,
    tune={
        "tasks": _TASKS,
        "tokenizer": "tokenizer.json",
        "early_stopping": True,
        "rates": (
            *(4e-6, 8e-6, 1e-5, 2e-5, 4e-5, 5e-5, 6e-5, 7e-5, 8e-5, 9e-5, 1e-4, 1.1e-4),
            *(1.2e-4, 1.4e-4, 1.6e-4, 1.8e-4, 2e-4, 2.4e-4, 4e-4, 5e-4, 6e-4, 8e-4),
            *(1e-3, 2e-3, 3e-3, 4e-3, 6e-3),
        ),
        "examples": 5000,
        "batch": 64,
        "held_out": 500,
    },
    memory={"together": 1, "micro_batches": 8},
    # App. C.1, "where the maximum pre-training perplexity, over all token budgets, is less than 6".
    # Nothing else in the paper shows whether 6 is exp of the loss in nats, as here, or the loss
    # itself; for the loss, give 403, exp(6)
    kept_perplexity=6.0,
    compute="bfloat16",
    shard="data",
)
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # Almost an hour: 8 times the tokens, twice the examples to tune on.
    "longer": varied(
        DEFAULT,
        pretrain={"budgets": tuple(2**k for k in range(17, 26))},
        tune={"examples": 256},
    ),
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        replicates=3,
        model={"context": 24, "width": 8, "layers": 1, "heads": 1, "hidden": 16},
        pretrain={"budgets": (1200, 4800), "batch": 4},
        noise=(0.02, 0.3),
        draws=2,
        held_out=16,
        tune={
            "tasks": ("shifted", "questions"),
            "rates": (0.002, 0.02),
            "examples": 20,
            "held_out": 16,
            "scales": (0.1, 1.0),
        },
    ),
    "paper": PAPER,
    "paper_15m": varied(PAPER, model={"preset": "olmo-15m"}),
    "paper_90m": varied(PAPER, model={"preset": "olmo-90m"}),
    # Fig. 10: from a model to the one fine-tuned on AG News and beyond, "extremely close to zero"
    # and "with a wider range"; scales, rates and the share of AG News are not printed, and our
    # choice
    "paper_figure_10": varied(
        PAPER,
        pretrain={"budgets": tuple(k * 10**9 for k in (32, 64, 128))},
        tune={
            "tasks": ("ag_news.jsonl",),
            "rates": (1e-5, 1e-4, 1e-3),
            "scales": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0),
        },
    ),
    # Table 6: batches (Figs. 30 to 39) and schedules of fine-tuning (Figs. 40 to 49)
    "paper_batch_256": varied(PAPER, tune={"batch": 256}),
    "paper_batch_32": varied(PAPER, tune={"batch": 32}),
    "paper_constant": varied(PAPER, tune={"decay": "constant", "warmup": 0.0}),
    "paper_constant_warmup": varied(PAPER, tune={"decay": "constant"}),
}
