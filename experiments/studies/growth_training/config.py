"""The configuration of `growth_training` and its presets.

`shared.growth_ways` lists the growth methods for `Config.methods`.
"""

from typing import Annotated, Any, Literal

from annotated_types import Ge

from experiments.data import image_tasks, text
from experiments.data.registry import ImagePool
from experiments.lab.config import Different, Natural, Positive, Seed, config, varied
from experiments.studies.shared import growth_tasks as tasks
from experiments.studies.shared import growth_ways as ways
from experiments.training.groups import LearnedMaps
from sail_jax.checks import nearest

Task = Literal["text", "images_mlp", "images_resnet"]


@config
class Sizes:
    """The units and layers of a network."""

    width: Natural
    """Units of the GPT's stream, of the MLP's layers, or of the ResNet's stem."""
    layers: Natural
    """Layers of the GPT or the MLP; blocks per stage of the ResNet."""


@config
class Budget:
    """The length of the large networks' training, and the interval of evaluations."""

    steps: Natural
    """Steps to train a large network, grown or from scratch."""
    batch: Natural
    """Windows or images per step, drawn with replacement."""
    every: Natural
    """Steps between two evaluations."""


@config
class Adam:
    """The training of every network: Adam, with a warmup and a constant learning rate."""

    rate: Positive
    """The highest learning rate."""
    warmup: Natural = 20
    """Steps over which the learning rate rises from 0."""
    state: Literal["move", "restart"] = "move"
    """Whether Adam's moments move to the grown network ('move') if the growth method has a law for
    them, or begin anew ('restart')."""


@config
class Config:
    """Train a small network, grow it by every method, train on, and compare with scratch."""

    task: Task = "text"
    """The task: 'text', the source of Python's standard library, for a GPT; or images, for an MLP
    ('images_mlp') or a ResNet ('images_resnet')."""
    data: ImagePool = ImagePool()
    """The images, for the two tasks on images."""
    seed: Seed = 0
    """Seed of the initial weights, minibatches, splits and growth."""
    replicates: Annotated[int, Ge(3)] = 5
    """Number of independent repetitions, each with its own small network; at least 3, for the
    spread."""
    methods: Different[str] = (*ways.WIDTH, ways.MSG, *ways.LEARNED)
    """The growth methods to compare with training from scratch."""
    source: Sizes = Sizes(width=32, layers=2)
    """The small network."""
    large: Sizes = Sizes(width=64, layers=2)
    """The grown network: wider or deeper than the small one, not both."""
    head_dim: Natural = 16
    """Units of an attention head, in both networks."""
    context: Annotated[int, Ge(2)] = 64
    """Number of characters in the GPT's context."""
    source_steps: Natural = 600
    """Steps to train the small network."""
    budget: Budget = Budget(steps=400, batch=16, every=10)
    """The training of the large networks."""
    held_out: Natural = 64
    """Number of held-out windows of `context` characters (the same for every repetition), or of
    held-out images (a new split for each)."""
    optimizer: Adam = Adam(rate=3e-3)
    """The optimiser of every network."""
    maps: LearnedMaps = LearnedMaps(steps=50)
    """How the maps of LiGO and SAIL are learned. For 'transport', the steps of the large network
    before its units are matched."""
    ramp: Natural = 200
    """Steps over which masked structural growth activates its units."""

    def __post_init__(self) -> None:
        small, large = self.source, self.large
        for field in ("width", "layers"):
            least, size = getattr(small, field), getattr(large, field)
            if size < least:
                raise ValueError(
                    f"large.{field} must be at least source.{field} = {least}; got {size}"
                )
        if (small.width == large.width) == (small.layers == large.layers):
            raise ValueError(
                "large.width, large.layers: exactly one must exceed the small network's; got "
                f"{small.width} to {large.width} units and {small.layers} to {large.layers} layers"
            )
        way, methods = "depth" if self.deepens else "width", self._known()
        for method in self.methods:
            if method not in methods:
                raise ValueError(
                    f"methods: no method for {self.task} to grow in {way} is called "
                    f"'{method}'{nearest(method, methods)}"
                )
        every = self.budget.every
        for field, steps in (
            ("source_steps", self.source_steps),
            ("budget.steps", self.budget.steps),
        ):
            if steps % every:
                raise ValueError(
                    f"{field} must be a multiple of budget.every = {every}; got {steps}"
                )
        if self.task != "text":
            return self.check_left(self.data.size)
        if self.data != ImagePool():
            raise ValueError(
                "data must be left out if task is text; the tasks on images are images_mlp and "
                "images_resnet"
            )
        if small.width % self.head_dim or large.width % self.head_dim:
            raise ValueError(
                f"head_dim must divide {small.width} and {large.width}; got {self.head_dim}"
            )

    def check_left(self, examples: int | None) -> None:
        """Checks that some images remain for training, in addition to the held-out ones."""
        image_tasks.check_left("held_out", self.held_out, 0, examples, "to learn from")

    @property
    def deepens(self) -> bool:
        """Whether the large network is deeper than the small one, not wider."""
        return self.source.layers < self.large.layers

    def _known(self) -> tuple[str, ...]:
        """Returns the growth methods for the task and the direction of growth."""
        learned = ways.LEARNED
        # A mixture of running variances may be negative. Layers of different shapes cannot be
        # mixed.
        if self.task == "images_resnet" or (self.deepens and self.task != "text"):
            learned = ()
        if self.deepens:
            return (*ways.DEPTH, *learned)
        # Units of a GPT's head are permuted with their head, but a coupling of units would separate
        # them.
        coupled = (ways.TRANSPORT,) if self.task != "text" else ()
        return (*ways.WIDTH, ways.MSG, *learned, *coupled)

    def network(self, *, large: bool) -> dict[str, Any]:
        """Builds the configuration of the small or the large network.

        Args:
          large: Whether to describe the large network.

        Returns:
          A configuration for `experiments.models.presets.build`.
        """
        sizes = self.large if large else self.source
        n, layers = sizes.width, sizes.layers
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
            "images_mlp": {"widths": [n] * layers, "outputs": self.data.classes},
            "images_resnet": {
                "widths": [n, 2 * n],
                "inner": [n, 2 * n],
                "blocks": layers,
                "outputs": self.data.classes,
            },
        }
        return {"model_type": tasks.TASKS[self.task], **fields[self.task]}

    def schedule(self, steps: int) -> tasks.Schedule:
        """Builds the schedule of a training."""
        budget, adam = self.budget, self.optimizer
        return tasks.Schedule(steps, budget.every, budget.batch, adam.rate, adam.warmup, self.ramp)


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    "text": DEFAULT,
    "digits_mlp": varied(
        DEFAULT,
        task="images_mlp",
        methods=(*ways.WIDTH, ways.MSG, *ways.LEARNED, ways.TRANSPORT),
        source_steps=300,
        budget={"steps": 300, "batch": 64, "every": 5},
        held_out=797,
        optimizer={"rate": 1e-3},
    ),
    "digits_resnet": varied(
        DEFAULT,
        task="images_resnet",
        methods=(*ways.WIDTH, ways.MSG, ways.TRANSPORT),
        source={"width": 8, "layers": 1},
        large={"width": 16, "layers": 1},
        source_steps=200,
        budget={"steps": 200, "batch": 32, "every": 5},
        held_out=797,
        optimizer={"rate": 1e-3},
        ramp=100,
    ),
    "depth": varied(
        DEFAULT,
        methods=(*ways.DEPTH, *ways.LEARNED),
        source={"width": 48, "layers": 3},
        large={"width": 48, "layers": 6},
    ),
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        task="images_mlp",
        replicates=3,
        methods=("hypercloning", "sail_random", "msg", "ligo"),
        source={"width": 8},
        large={"width": 16},
        source_steps=60,
        budget={"steps": 30},
        held_out=200,
        optimizer={"warmup": 5},
        maps={"steps": 5},
        ramp=10,
    ),
}
