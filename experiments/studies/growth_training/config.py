"""What `growth_training` can be told, and its presets."""

import dataclasses
from typing import Any, Literal

from experiments.data import digits, text
from experiments.lab import validate
from experiments.studies.growth_training import tasks, ways
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


PRESETS: dict[str, Config] = {
    "default": Config(),
    "text": Config(),
    "digits_mlp": Config.digits_mlp(),
    "digits_resnet": Config.digits_resnet(),
    "depth": Config.depth(),
    "tiny": Config.tiny(),
}
