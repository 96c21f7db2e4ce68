"""The configuration of `trajectory_averaging` and its presets."""

from typing import Annotated, Any, Literal

from annotated_types import Ge

from experiments.data import image_tasks, text
from experiments.data.registry import ImagePool
from experiments.lab.config import (
    Count,
    Different,
    Increasing,
    Natural,
    Positive,
    Seed,
    config,
    varied,
)

Task = Literal["text", "images"]
Rule = Literal["adam", "sgd"]
Shape = Literal["uniform", "cosine", "1-sqrt", "1-square", "wma"]
Decay = Literal["linear", "cosine", "1-sqrt", "1-square"]


@config
class Training:
    """The training of a task's networks."""

    rule: Rule
    """The optimiser: 'adam', or 'sgd' without momentum."""
    rate: Positive
    """The constant learning rate."""
    batch: Natural
    """Windows or images per step, drawn with replacement."""
    warmup: Count = 20
    """Steps over which the learning rate rises from 0."""
    held_out: Annotated[int, Ge(2)] = 512
    """Number of held-out windows or images. The quadratic is fitted and windows are chosen on half
    of them. All other measurements use the other half."""


@config
class Config:
    """Train at a constant rate, average the last checkpoints, and compare with decayed rates."""

    tasks: Different[Task] = ("text", "images")
    """The tasks: 'text', the source of Python's standard library, for a GPT; 'images', for a
    ResNet."""
    data: ImagePool = ImagePool()
    """The images."""
    seed: Seed = 0
    """Seed of the initial weights, minibatches and splits."""
    replicates: Annotated[int, Ge(3)] = 6
    """Number of independent repetitions, at least 3, for the spread."""
    steps: Natural = 1200
    """Steps of every run, averaged or decayed."""
    windows: Increasing[Natural] = (50, 100, 200, 400, 800)
    """Windows: the last steps, over which checkpoints are averaged or the rate is decayed."""
    spacing: Natural = 10
    """Steps between two checkpoints."""
    shapes: Different[Shape] = ("uniform", "cosine", "1-sqrt")
    """The weights of the averages; see `sail_jax.trajectory.weights`."""
    decays: Different[Decay] = ("linear", "cosine")
    """The decays of the rate, to 0."""
    width: Natural = 32
    """Units of the GPT's stream."""
    context: Annotated[int, Ge(2)] = 64
    """Number of characters in the GPT's context."""
    layers: Natural = 2
    """Layers of the GPT."""
    channels: Natural = 8
    """Channels of the ResNet's first stage; the second has twice as many."""
    text: Training = Training(rule="adam", rate=1e-2, batch=8)
    """The training of the GPT."""
    images: Training = Training(rule="sgd", rate=0.1, batch=8)
    """The training of the ResNet."""

    def __post_init__(self) -> None:
        for name, steps in (("steps", self.steps), *(("windows", w) for w in self.windows)):
            if steps % self.spacing:
                raise ValueError(
                    f"{name} must be multiples of spacing = {self.spacing}; got {steps}"
                )
        most = self.steps - max(self.text.warmup, self.images.warmup)
        if self.windows[-1] > most:
            raise ValueError(
                f"windows must leave the warm-up out, {most} steps at most; got {self.windows[-1]}"
            )
        if "images" in self.tasks:
            self.check_left(self.data.size)

    def check_left(self, examples: int | None) -> None:
        """Checks that some images remain for training, in addition to the held-out ones."""
        held_out = self.images.held_out
        image_tasks.check_left("images.held_out", held_out, 0, examples, "to learn from")

    def training(self, task: Task) -> Training:
        """Returns the training settings of a task's networks."""
        return self.text if task == "text" else self.images

    def network(self, task: Task) -> dict[str, Any]:
        """Builds the configuration of a task's network.

        Returns a configuration for `experiments.models.presets.build`.
        """
        if task == "text":
            return {
                "model_type": "flax_gpt",
                "vocab": text.VOCAB,
                "context": self.context,
                "width": self.width,
                "layers": self.layers,
                "heads": 2,
                "head_dim": max(1, self.width // 2),
                "hidden": 4 * self.width,
            }
        widths = [self.channels, 2 * self.channels]
        return {
            "model_type": "flax_resnet",
            "widths": widths,
            "inner": widths,
            "blocks": 1,
            "outputs": self.data.classes,
        }


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    "text": varied(DEFAULT, tasks=("text",)),
    "text_sgd": varied(DEFAULT, tasks=("text",), text={"rule": "sgd", "rate": 0.5}),
    "digits": varied(DEFAULT, tasks=("images",)),
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        tasks=("images",),
        replicates=3,
        steps=40,
        windows=(10, 20),
        spacing=5,
        shapes=("uniform", "cosine"),
        channels=2,
        images={"warmup": 5, "held_out": 100},
        text={"warmup": 5},
    ),
}
