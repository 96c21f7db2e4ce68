"""What `overtraining_language` can be told."""

import dataclasses
from typing import Any

from experiments.data import text
from experiments.lab import validate
from experiments.models import presets
from experiments.studies.overtraining_language import tasks
from experiments.studies.overtraining_language.training import Shard
from experiments.training.step import Compute
from sail_jax.checks import nearest


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
    rates: tuple[float, ...] = tuple(0.00025 * 2**k for k in range(8))
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
    at_once: int = 16
    """Sequences that losses are measured on together, to save memory."""
    micro_batches: int = 1
    """Parts of a batch whose gradients are averaged, one after the other, to save memory."""
    compute: Compute = "float32"
    """Type to compute with in training."""
    save_every: int = 1000
    """Steps between checkpoints of a training."""
    shard: Shard = "members"
    """What several devices share: the networks that are trained side by side ('members'), the
    examples ('data'), these and the parameters ('full'), or nothing ('no')."""

    def __post_init__(self) -> None:
        validate.at_least(self, replicates=3, width=1, layers=1, heads=1, hidden=1, context=2)
        validate.at_least(self, batch=1, draws=2, held_out=1, examples=1, tune_batch=1, epochs=1)
        validate.at_least(self, task_held_out=1, at_once=1, micro_batches=1, save_every=1)
        validate.positive(self, "rate", "budgets", "noise", "rates", "scales")
        validate.different(self, "tasks", "budgets", "noise", "rates", "scales")
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
        validate.one_of(self, shard=Shard, compute=Compute)
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
        """The better part of an hour: 8 times the tokens, twice the examples to tune on."""
        return cls(
            budgets=tuple(2**k for k in range(17, 26)),
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


PRESETS: dict[str, Config] = {
    "default": Config(),
    "longer": Config.longer(),
    "tiny": Config.tiny(),
    "paper": Config.paper(),
    "paper_15m": Config.paper("olmo-15m"),
    "paper_90m": Config.paper("olmo-90m"),
}
