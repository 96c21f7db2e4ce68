"""The configuration of `sail_diffusion` and its presets.

`WAYS` in `networks` lists the trainings that `Config.ways` can name.
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

EVALUATIONS = 8  # so that an eighth, a quarter and a half of the training are among them
Part = Annotated[float, Ge(0), Lt(1)]


@config
class Changes:
    """Random changes of the images that are learned from; none by default."""

    flip: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Probability of a reflection of left and right."""
    area: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Least share of the image that a random crop has, which is resized to the image's size."""
    shift: Count = 0
    """Pixels of zeros around the image, of which a crop of its own size is taken at random."""

    @property
    def augment(self) -> Augment | None:
        """What `experiments.data.augment` is to do; None for nothing."""
        how = Augment(area=self.area, shift=self.shift, flip=self.flip)
        return None if how == Augment() else how


@config
class Alignment:
    """How a SiT's hidden states are aligned with an encoder's features."""

    layer: Natural = 1
    """Blocks before the hidden states that are aligned."""
    projector: Natural = 64
    """Hidden units of the networks between those states and the features."""
    steps: Natural = 300
    """Steps of minimising the alignment loss alone, from which SAIL starts."""
    weight: NotNegative = 0.5
    """Weight of the alignment loss in eq. (15)."""
    repa_weight: NotNegative = 0.5
    """Weight of REPA's loss in eq. (15)."""
    summed: bool = False
    """Whether the squared norm of eq. (16) is summed over patches and units, as printed, or
    averaged over them, as the other losses are."""


@config
class Classifiers:
    """The networks that are trained to be the encoder, and to measure samples."""

    encoder_layers: Natural = 2
    """Blocks of the encoder; it is trained where the data have no features."""
    encoder_steps: Natural = 300
    """Steps of training the encoder."""
    measure: Annotated[str, AfterValidator(presets.of_type("flax_resnet"))] = "resnet-tiny"
    """The ResNet in whose features samples are measured, of `experiments.models.presets`."""
    measure_steps: Natural = 300
    """Steps of training that ResNet."""
    rate: Positive = 3e-3
    """Adam's highest learning rate for both, which falls to 0 along a cosine."""


@config
class Budget:
    """How long each SiT is trained."""

    steps: Annotated[int, Ge(1), MultipleOf(EVALUATIONS)] = 1200
    """Steps of training; after every eighth of them samples are made and measured."""
    batch: Natural = 64
    """Images per step of any training, drawn with replacement."""
    save_every: Natural = 600
    """Steps between two checkpoints of any training, from which a killed one goes on."""


@config
class Config:
    """Train SiTs with the velocity loss, with REPA's loss too, and as SAIL does."""

    data: LatentData = LatentData()
    """The images or latents, and an encoder's features of them if a file has some."""
    changes: Changes = Changes()
    """Random changes of the images that SiTs and the encoder learn from."""
    functions: Functions = Functions()
    """Functions of yours: an autoencoder, an encoder, and what measures images."""
    seed: Seed = 0
    """Seed of the splits, initial weights, minibatches and samples."""
    replicates: Annotated[int, Ge(2)] = 5
    """Independent repetitions, each with its own split, encoder and initial weights."""
    ways: Different[str] = ("sit", "repa", "sail", "sail_clean")
    """What to train: 'sit' and 'repa', which the others are compared with, and of 'sail',
    'sail_clean', 'sail_start' (REPA's loss from aligned weights) and 'sail_loss' (both losses from
    the usual ones)."""
    model: Annotated[str, AfterValidator(presets.of_type("flax_sit"))] = "sit-tiny"
    """The SiT, of `experiments.models.presets`."""
    alignment: Alignment = Alignment()
    """How hidden states are aligned with an encoder's features."""
    classifiers: Classifiers = Classifiers()
    """The encoder, and the network that measures samples."""
    budget: Budget = Budget()
    """How long each SiT is trained."""
    optimizer: Descent = Descent(
        rate=1e-2, warmup=20, decay="constant", weight_decay=0.01, clip=1.0
    )
    """How SiTs are trained, in the alignment phase too."""
    ema: Part = 0.99
    """Decay of the moving average of the weights, which samples are made with."""
    class_drop: Part = 0.1
    """Share of examples whose class is not shown."""
    held_out: Annotated[int, Ge(2)] = 901
    """Images that samples are compared with; the others are learned from."""
    samples: Annotated[int, Ge(2)] = 896
    """Samples per evaluation, and images of those learned from that are measured likewise."""
    sample_batch: Natural = 128
    """Samples made at once, a divisor of the samples."""
    sampler: Sampler = Sampler()
    """How samples are made from noise."""
    precision: Compute = "float32"
    """Type that SiTs are computed in."""
    shard: Shard = "data"
    """Over several devices: 'no', 'data' (batches) or 'full' (parameters too)."""

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
                "those of a file are not; 'sail_clean' does without"
            )
        self._check_functions()

    def _check_functions(self) -> None:
        """Checks that functions and changes of images fit the data."""
        name, of = self.data.name, self.functions
        if self.changes.augment is not None and name not in (OFFLINE, FOLDERS):
            raise ValueError(
                "changes must be none for data.name latents, whose images are not there; "
                f"'{FOLDERS}' are images that are encoded after their changes"
            )
        if of.encode is not None and name != FOLDERS:
            raise ValueError(f"functions.encode must be None for data.name {name}")
        if of.features is not None and self.data.features is not None:
            raise ValueError("functions.features must be None where data.features names a file")
        if of.measure is not None and of.decode is None and name == FOLDERS:
            raise ValueError(
                f"functions.decode must be given where functions.measure is, for data.name {name}: "
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
# SAIL's Table 3: B/2 on latents of ImageNet, 400K steps of 256 at a constant 1e-4. SiT's and
# REPA's where the table is silent: averages of 0.9999, the fourth block, projectors of 2048, a
# tenth of the classes not shown, 50 000 samples by 250 steps of the diffusion. The alignment phase
# takes a quarter of the steps, as by default. Without features a ViT as deep as the SiT is trained
# to be the encoder. Three seeds, where the paper has one
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
    # what of SAIL does it: the start, or the loss
    "parts": varied(DEFAULT, ways=("sit", "repa", "sail", "sail_start", "sail_loss")),
    "paper": PAPER,
    # eq. (16) to the letter: f_P of the noised latents z_t, which needs the encoder that is trained
    # here, and the square of the whole norm
    "paper_eq16": varied(PAPER, ways=("sit", "repa", "sail"), alignment={"summed": True}),
    # Appendix J.4's flips and crops of images, which are encoded in every step, and f_P of the
    # noised latents. How often and how far is not printed (chosen: half of them, and at least .64
    # of the area, a side of .8). Needs functions.encode, and for the printed measures the others
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
