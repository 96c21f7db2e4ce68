"""The config of `cross_task_linearity` and its presets."""

from typing import Annotated, Literal, get_args

from annotated_types import Ge, Interval, MinLen, MultipleOf

from experiments.data import image_tasks
from experiments.data.registry import OFFLINE, ImagePool
from experiments.lab.config import Different, Natural, Positive, Seed, Some, config, varied
from experiments.studies.shared.checking import must

OnRotations = Literal["rotated", "scratch", "averaging", "arithmetic", "stitching"]
OnResnet = Literal["split_classes", "random_labels"]
Part = Literal[OnRotations, OnResnet, "theorem"]
ON_ROTATIONS: tuple[Part, ...] = get_args(OnRotations)
RESNET: tuple[Part, ...] = get_args(OnResnet)
PARTS: tuple[Part, ...] = get_args(Part)
Angle = Annotated[float, Interval(gt=-1000, lt=1000), MultipleOf(0.5)]
LEAST = 174  # images in the rarest class of the digits


@config
class Network:
    """A network, and its training at a constant learning rate."""

    widths: Some[Natural]
    """Units of the MLP's layers; channels of the ResNet's stages."""
    steps: Natural
    """Steps of pre-training; fine-tuning takes as many."""
    batch: Natural
    """Images per step, drawn with replacement."""
    rate: Positive
    """Learning rate."""
    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """Momentum of gradient descent: the share of a step that the next one repeats."""


@config
class Residual(Network):
    """A ResNet, and its training at a constant learning rate."""

    blocks: Natural = 1
    """Blocks of each stage."""


@config
class Theorem:
    """The checkpoints at which Theorem 1 is tested."""

    network: Literal["mlp", "resnet"] = "mlp"
    """The network of the checkpoints."""
    task: Literal["rotated", "upright"] = "rotated"
    """Whether models are fine-tuned on rotated images, or on the upright ones of pre-training."""
    tuned_on: Literal["learn", "test"] = "learn"
    """The part of the images on which models are fine-tuned. The loss uses the other part."""
    checkpoints: Natural = 4
    """Number of checkpoints, each trained for twice the steps of the previous one."""
    steps: Natural = 100
    """Steps of training up to the first checkpoint."""
    members: Annotated[int, Ge(2)] = 3
    """Number of models fine-tuned from each checkpoint, each at its own learning rate."""
    lanczos_steps: Natural = 10
    """Steps of Lanczos' iteration, which estimates the norm of a Hessian."""


@config
class Config:
    """The parts of the study to run, and their networks and images."""

    seed: Seed = 0
    """Seed of the splits, initial weights, minibatches and random labels."""
    replicates: Annotated[int, Ge(3)] = 5
    """Number of independent repetitions, each with its own split; at least 3, for the spread."""
    data: ImagePool = ImagePool()
    parts: Different[Part] = PARTS
    """The experiments to run, in this order."""
    angles: Annotated[Different[Angle], MinLen(2)] = (22, 45, 68, 90)
    """Rotations of the images in the MLP's fine-tuning tasks, in degrees."""
    splits: Annotated[image_tasks.Tasks, MinLen(3)] = (
        "classes 0-3",
        "classes 4-5",
        "classes 6-7",
        "classes 8-9",
    )
    """The ResNet's tasks: the first for pre-training, the others for fine-tuning."""
    learn: Natural | None = 120
    """Training images of each class; None for all of the publisher's training images."""
    test: Natural | None = 50
    """Test images of each class; None, together with `learn`, for all of the publisher's test
    images.
    """
    mlp: Network = Network(widths=(100, 100, 100), steps=900, batch=64, rate=0.1)
    resnet: Residual = Residual(widths=(8, 16), steps=200, batch=32, rate=0.05, momentum=0.9)
    memorise: Natural = 4
    """Factor on the steps of pre-training in `random_labels`, to memorise the labels."""
    alphas: Different[Annotated[float, Interval(ge=0, le=1)]] = (0.25, 0.5, 0.75)
    """Weights of the first of two models in interpolations; one must be 0.5."""
    line_points: Annotated[int, Ge(2)] = 11
    """Points on the line between two models, including the ends, for comparing accuracies."""
    scales: Different[Positive] = (0.1, 0.2, 0.4, 0.8)
    """Scales of the task vectors in `arithmetic`."""
    stitch_scales: Different[Positive] = (0.25, 0.5, 0.75, 1.0)
    """Scales of the task vectors in `stitching`."""
    members: Annotated[int, Ge(3)] = 8
    """Number of models fine-tuned on one task in `averaging`, at different rates. For up to 10
    models all sets are averaged, otherwise the sets of two, of three, and of all."""
    rates: tuple[Positive, Positive] = (0.01, 0.1)
    """The least and the largest learning rate of fine-tuning in `averaging` and `theorem`."""
    theorem: Theorem = Theorem()

    def __post_init__(self) -> None:
        image_tasks.check_classes("splits", self.splits, self.data.classes)
        both = (self.learn is None) == (self.test is None)
        must(self, "test", both, "be None if and only if learn is None")
        published = self.data.name != OFFLINE and self.data.examples is None
        given = self.learn is not None or published
        must(self, "learn", given, "be a number if the publisher's split is not used")
        if self.data == ImagePool():
            self.check_left(LEAST)
        must(self, "alphas", 0.5 in self.alphas, "include 0.5")
        must(self, "rates", self.rates[0] < self.rates[1], "be increasing")

    def check_left(self, least: int) -> None:
        """Checks that the rarest class has enough images for training and test."""
        needed = (self.learn or 0) + (self.test or 0)
        must(self, "test", needed <= least, f"be at most {least} - learn")


DEFAULT = Config()
_MNIST = varied(
    DEFAULT,
    data=ImagePool("mnist"),
    replicates=3,  # the paper has one; three is the minimum here
    angles=(22.5, 45.0, 67.5, 90.0),
    # 60 000 training images, 10 000 test images
    learn=None,
    test=None,
    # 4 linear layers by the count of B.1.1, "hidden layers with 100 units"; one epoch in batches of
    # 64 at rate .1, without momentum, our interpretation of "default" SGD
    mlp={"widths": (100, 100, 100), "steps": 938, "batch": 64, "rate": 0.1},
)
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # The parts without a ResNet, with more repetitions.
    "mlp": varied(DEFAULT, replicates=10, parts=(*ON_ROTATIONS, "theorem")),
    # Models fine-tuned at up to three times the rate of pre-training end far apart.
    "far": varied(DEFAULT, parts=("averaging", "theorem"), rates=(0.03, 0.3)),
    # The ResNet's parts, larger and with more steps.
    "resnet": varied(DEFAULT, parts=RESNET, resnet={"widths": (16, 32), "steps": 600, "batch": 64}),
    # Rotated MNIST, B.1.1 (Figs. 2 and 3) and B.3 (Fig. 11: its angles are 45 and 90)
    "paper_mnist": varied(_MNIST, parts=("rotated", "scratch")),
    # As many models and sets as Fig. 4, 20 and 1140, on Rotated MNIST. The paper's are published
    # CLIP ViT-B/32s fine-tuned on ImageNet with varied hyperparameters; here the rates vary (our
    # choice)
    "paper_averaging": varied(_MNIST, parts=("averaging",), members=20),
    # Split CIFAR-100, B.1.1 (Figs. 2 and 3): splits of 5 classes, 10 epochs of 2500 images
    "paper_split_cifar100": varied(
        DEFAULT,
        data=ImagePool("cifar-100"),
        replicates=3,
        parts=("split_classes",),
        splits=tuple(f"classes {first}-{first + 4}" for first in range(0, 25, 5)),
        learn=None,
        test=None,  # 1000 images of two splits; the paper's 20 000 do not fit so few classes
        resnet={
            "widths": (64, 128, 256, 512),  # ResNet-18
            "blocks": 2,
            "steps": 400,
            "batch": 64,
            "rate": 0.05,
            "momentum": 0.0,
        },
    ),
    # ResNet-20 on CIFAR-10, B.2 and B.3 (Fig. 12). Neither describes the training: here it is as
    # above, with fine-tuning on the images of pre-training, which Fig. 12 calls "the same dataset"
    "paper_cifar10": varied(
        DEFAULT,
        data=ImagePool("cifar-10"),
        replicates=3,
        parts=("random_labels", "theorem"),
        learn=5000,
        test=100,  # of each class (our choice): whole batches pass through the Hessian at once
        resnet={
            "widths": (16, 32, 64),
            "blocks": 3,
            "steps": 7820,  # 10 epochs
            "batch": 64,
            "rate": 0.05,
            "momentum": 0.0,
        },
        # Our choice: checkpoints after 1, 2, 4, 8 epochs, with 4 models each at rates like the
        # ResNet's.
        theorem={
            "network": "resnet",
            "task": "upright",
            "steps": 782,
            "members": 4,
            "lanczos_steps": 30,
        },
        rates=(0.005, 0.05),
    ),
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        replicates=3,
        angles=(45, 90),
        splits=("classes 0-3", "classes 4-5", "classes 6-7"),
        learn=12,
        test=6,
        mlp={"widths": (16, 16), "steps": 30, "batch": 16},
        resnet={"widths": (4,), "steps": 4, "batch": 8},
        memorise=2,
        line_points=3,
        scales=(0.2, 0.4),
        stitch_scales=(1.0,),
        members=3,
        theorem={"checkpoints": 2, "steps": 10, "lanczos_steps": 4},
    ),
}
