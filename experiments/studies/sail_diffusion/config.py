"""The configuration of `sail_diffusion` and its presets.

`WAYS` in `networks` lists the trainings for `Config.ways`.
"""

from typing import Annotated

from annotated_types import Ge, Interval, Lt, MultipleOf
from pydantic import AfterValidator

from experiments.data.augment import Augment
from experiments.data.registry import FOLDERS, OFFLINE, LatentData
from experiments.lab.config import (
    Count,
    Different,
    Natural,
    NotNegative,
    Positive,
    Seed,
    config,
    varied,
)
from experiments.models import presets
from experiments.studies.sail_diffusion.functions import Functions
from experiments.studies.sail_diffusion.networks import WAYS
from experiments.studies.sail_diffusion.sampling import Sampler
from experiments.studies.shared.checking import must
from experiments.training.groups import Descent
from experiments.training.sharding import Shard
from experiments.training.step import Compute
from sail_jax.checks import one_of

EVALUATIONS = 8  # includes an eighth, a quarter and a half of the training
Part = Annotated[float, Ge(0), Lt(1)]


@config
class Changes:
    """Random changes of the training images; none by default."""

    flip: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Probability of a reflection of left and right."""
    area: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Least share of the image's area in a random crop, which is resized to the image's size."""
    shift: Count = 0
    """Pixels of zeros around the image, before a crop of the image's own size at a random place."""

    @property
    def augment(self) -> Augment | None:
        """The settings for `experiments.data.augment`; None without changes."""
        how = Augment(area=self.area, shift=self.shift, flip=self.flip)
        return None if how == Augment() else how


@config
class Alignment:
    """The alignment of a SiT's hidden states with an encoder's features."""

    layer: Natural = 1
    """Number of blocks before the aligned hidden states."""
    projector: Natural = 64
    """Hidden units of the networks between those states and the features."""
    steps: Natural = 300
    """Steps that minimise the alignment loss alone; SAIL starts from their result."""
    weight: NotNegative = 0.5
    """Weight of the alignment loss in eq. (15)."""
    repa_weight: NotNegative = 0.5
    """Weight of REPA's loss in eq. (15)."""
    summed: bool = False
    """Whether the squared norm of eq. (16) is summed over patches and units, as printed, or
    averaged over them, as the other losses are."""


@config
class Classifiers:
    """The networks that serve as the encoder and that measure samples."""

    encoder_layers: Natural = 2
    """Number of blocks of the encoder, which is trained if the data have no features."""
    encoder_steps: Natural = 300
    """Steps to train the encoder."""
    measure: Annotated[str, AfterValidator(presets.of_type("flax_resnet"))] = "resnet-tiny"
    """The ResNet of `experiments.models.presets` that measures samples by its features."""
    measure_steps: Natural = 300
    """Steps to train that ResNet."""
    rate: Positive = 3e-3
    """Adam's highest learning rate for both; it falls to 0 along a cosine."""


@config
class Budget:
    """The length of each SiT's training."""

    steps: Annotated[int, Ge(1), MultipleOf(EVALUATIONS)] = 1200
    """Training steps; after every eighth of them samples are made and measured."""
    batch: Natural = 64
    """Images per step of every training, drawn with replacement."""
    save_every: Natural = 600
    """Steps between two checkpoints of every training, from which a killed one continues."""


@config
class Config:
    """Train SiTs with the velocity loss, also with REPA's loss, and as SAIL does."""

    data: LatentData = LatentData()
    """The images or latents, and an encoder's features of them from a file, if given."""
    changes: Changes = Changes()
    """Random changes of the images for training SiTs and the encoder."""
    functions: Functions = Functions()
    """The user's functions: an autoencoder, an encoder, and a measure of images."""
    seed: Seed = 0
    """Seed of the splits, initial weights, minibatches and samples."""
    replicates: Annotated[int, Ge(2)] = 5
    """Number of independent repetitions, each with its own split, encoder and initial weights."""
    ways: Different[str] = ("sit", "repa", "sail", "sail_clean")
    """The trainings: 'sit' and 'repa', the references, and any of 'sail', 'sail_clean',
    'sail_start' (REPA's loss from aligned weights) and 'sail_loss' (both losses from the usual
    weights)."""
    model: Annotated[str, AfterValidator(presets.of_type("flax_sit"))] = "sit-tiny"
    """The SiT, a preset of `experiments.models.presets`."""
    alignment: Alignment = Alignment()
    """The alignment of hidden states with an encoder's features."""
    classifiers: Classifiers = Classifiers()
    """The encoder, and the network that measures samples."""
    budget: Budget = Budget()
    """The length of each SiT's training."""
    optimizer: Descent = Descent(
        rate=1e-2, warmup=20, decay="constant", weight_decay=0.01, clip=1.0
    )
    """The optimiser of SiTs, also in the alignment phase."""
    ema: Part = 0.99
    """Decay of the moving average of the weights. Samples use this average."""
    class_drop: Part = 0.1
    """Share of examples with a hidden class."""
    held_out: Annotated[int, Ge(2)] = 901
    """Number of images to compare samples with; the others are training images."""
    samples: Annotated[int, Ge(2)] = 896
    """Number of samples for each evaluation, and of training images that are also measured."""
    sample_batch: Natural = 128
    """Number of samples made at once, a divisor of the samples."""
    sampler: Sampler = Sampler()
    """The method that makes samples from noise."""
    precision: Compute = "float32"
    """Floating-point type of the SiTs' computation."""
    shard: Shard = "data"
    """The work that several devices share: 'no' (none), 'data' (batches) or 'full' (also
    parameters)."""

    def __post_init__(self) -> None:
        for way in self.ways:
            one_of("ways", way, WAYS)
        must(self, "ways", {"sit", "repa"} <= set(self.ways), "hold 'sit' and 'repa'")
        steps = self.budget.steps
        warm = self.optimizer.warmup < steps
        must(self, "optimizer.warmup", warm, f"be below budget.steps = {steps}")
        whole = self.samples % self.sample_batch == 0
        must(self, "sample_batch", whole, f"divide samples = {self.samples}")
        layers = presets.config(self.model)["layers"]
        deep = self.alignment.layer <= layers
        must(self, "alignment.layer", deep, f"be at most the {layers} of {self.model}")
        if self.data.features is not None and self.noised:
            raise ValueError(
                f"ways: '{self.noised[0]}' needs an encoder's features of noised latents, which "
                "a file cannot have; 'sail_clean' does not need them"
            )
        self._check_functions()

    def _check_functions(self) -> None:
        """Checks that functions and changes of images fit the data."""
        name, of = self.data.name, self.functions
        if self.changes.augment is not None and name not in (OFFLINE, FOLDERS):
            raise ValueError(
                "changes must be none for data.name latents, because its images are not available; "
                f"'{FOLDERS}' are images that are encoded after their changes"
            )
        if of.encode is not None and name != FOLDERS:
            raise ValueError(f"functions.encode must be None for data.name {name}")
        if of.features is not None and self.data.features is not None:
            raise ValueError("functions.features must be None if data.features names a file")
        if of.measure is not None and of.decode is None and name == FOLDERS:
            raise ValueError(
                f"functions.decode must be given with functions.measure, for data.name {name}: "
                "samples are latents"
            )

    @property
    def noised(self) -> tuple[str, ...]:
        """The ways that need the encoder's features of noised latents."""
        return tuple(
            way for way in self.ways if (WAYS[way].start or WAYS[way].align) and not WAYS[way].clean
        )

    @property
    def every(self) -> int:
        """Steps between two evaluations."""
        return self.budget.steps // EVALUATIONS

    @property
    def log_every(self) -> int:
        """Steps between two rows of loss terms."""
        return max(1, self.every // 10)


DEFAULT = Config()
# SAIL's Table 3: B/2 on latents of ImageNet, 400K steps of 256 at a constant 1e-4. Where the table
# is silent, SiT's and REPA's settings: averages of 0.9999, the fourth block, projectors of 2048, a
# tenth of the classes hidden, 50 000 samples by 250 steps of the diffusion. The alignment phase
# takes a quarter of the steps, as by default. Without features a ViT as deep as the SiT is trained
# as the encoder. Three seeds; the paper has one
PAPER = varied(
    DEFAULT,
    data={"name": "latents"},
    replicates=3,
    ways=("sit", "repa", "sail_clean"),
    model="sit-b/2",
    alignment={"layer": 4, "projector": 2048, "steps": 100_000},
    classifiers={
        "encoder_layers": 12,
        "encoder_steps": 50_000,
        "measure": "resnet18-modified",
        "measure_steps": 50_000,
        "rate": 1e-3,
    },
    budget={"steps": 400_000, "batch": 256, "save_every": 5000},
    optimizer={"rate": 1e-4, "warmup": 0},
    ema=0.9999,
    held_out=50_000,
    samples=50_000,
    sample_batch=500,
    sampler={"method": "sde", "steps": 250},
    precision="bfloat16",
)
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # which part of SAIL has the effect: the start, or the loss
    "parts": varied(DEFAULT, ways=("sit", "repa", "sail", "sail_start", "sail_loss")),
    "paper": PAPER,
    # eq. (16) to the letter: f_P of the noised latents z_t, which needs the encoder trained here,
    # and the square of the whole norm
    "paper_eq16": varied(PAPER, ways=("sit", "repa", "sail"), alignment={"summed": True}),
    # Appendix J.4's flips and crops of images, which are encoded in every step, and f_P of the
    # noised latents. Frequency and extent are not printed (our choice: half of them, and at least
    # .64 of the area, a side of .8). Needs functions.encode, and for the printed measures the
    # others
    "paper_images": varied(
        PAPER,
        data={"name": FOLDERS},
        ways=("sit", "repa", "sail"),
        changes={"flip": 0.5, "area": 0.64},
    ),
    # seconds, for tests
    "tiny": varied(
        DEFAULT,
        replicates=2,
        ways=("sit", "repa", "sail"),
        alignment={"projector": 16, "steps": 8},
        classifiers={"encoder_layers": 1, "encoder_steps": 20, "measure_steps": 20},
        budget={"steps": 16, "batch": 16, "save_every": 8},
        optimizer={"warmup": 2},
        held_out=1600,
        samples=64,
        sample_batch=32,
        sampler={"steps": 2},
    ),
}
