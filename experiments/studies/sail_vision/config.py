"""The config of `sail_vision` and its presets."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge

from experiments.data.registry import ImageData
from experiments.lab.config import Natural, Positive, Seed, Share, config, varied
from experiments.models.resnet import Stem
from experiments.studies.shared.checking import must
from experiments.training.groups import Budget, Descent, LearnedMaps
from experiments.training.sharding import Shard
from sail_jax.checks import one_of

Origin = Literal["common", "own", "aligned"]
Paradigm = Literal["supervised", "byol"]
PARADIGMS: tuple[Paradigm, ...] = get_args(Paradigm)
Recipe = Literal["none", "digits", "crop_flip", "byol"]
SCRATCH, SAIL, LIGO, OTHER = "scratch", "sail", "ligo", "other"
# By their names here: a method of `growth.grow` and its options.
TRANSFORMATIONS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "sail_random": ("sail_random", {}),
    "sail_svd": ("sail_svd", {"random": True}),
    "interpolate": ("interpolate", {}),
    "pad": ("pad", {}),
    "net2net": ("net2net", {}),
    "hypercloning": ("hypercloning", {}),
    "lemon": ("lemon", {}),
}
MERGES = ("uniform_soup", "first", "second")
WAYS = (SCRATCH, SAIL, *MERGES, OTHER, LIGO, *TRANSFORMATIONS)


@config
class Sizes:
    """The channels and blocks of a ResNet."""

    width: Natural
    """Channels of the first stage. They double from stage to stage."""
    blocks: tuple[Natural, ...]
    """Number of residual blocks in each stage."""


@config
class Byol:
    """BYOL's training of an encoder without labels (Grill et al. 2020)."""

    rate: Positive = 1e-2
    """Highest learning rate of BYOL, for every start."""
    target_decay: Share = 0.9
    """Initial decay of the target network's moving average; it rises to 1."""
    hidden: Natural = 64
    """Hidden units of the projector and of the predictor."""
    outputs: Natural = 32
    """Outputs of the projector and of the predictor."""
    views: Recipe = "digits"
    """Random changes of an image that make its two views."""


@config
class Probe:
    """The evaluation of features that were learned without labels."""

    ridge: Positive = 1e-3
    """Penalty of the linear classifier on the features."""
    neighbours: Natural = 20
    """Number of nearest neighbours that predict the class of an image."""


@config
class Config:
    """Train two small ResNets on parts of the classes, and a large one on all, from several
    starts."""

    data: ImageData = ImageData()
    """The images. All repetitions standardise them by the mean and the deviation of each channel in
    the first repetition's training images. Splits of the digits differ between repetitions, so a
    few of these images are test images in others."""
    seed: Seed = 0
    """Seed of the initial weights, minibatches, augmentations, splits and transformations."""
    replicates: Annotated[int, Ge(3)] = 6
    """Number of independent repetitions, each with its own sources; at least 3, for the spread."""
    supervised: tuple[str, ...] = (
        *(SCRATCH, SAIL, *MERGES, OTHER),
        *("sail_random", "pad", "net2net", LIGO),
    )
    """Starts of training with labels, scratch and sail first; empty to leave this training out."""
    byol: tuple[str, ...] = (
        *(SCRATCH, SAIL, "first", "second", OTHER),
        *("sail_random", "pad"),
    )
    """Starts of BYOL, scratch and sail first; empty to leave this training out."""
    transformation: str = "interpolate"
    """SAIL's method to widen the sources; the default performed best of the three in SAIL."""
    origin: Origin = "common"
    """Whether the two sources start from 'common' weights or each from its 'own'. 'aligned' is
    'own' with weight matching before the merge, which SAIL does not do."""
    share: Share = 0.7
    """Share of the classes that the first source learns; the second learns the others."""
    source: Sizes = Sizes(width=8, blocks=(1, 1))
    large: Sizes = Sizes(width=16, blocks=(1, 1))
    stem: Stem = "small"
    """First layers of both networks: 'small' ("modified"), or 'standard' for large images."""
    source_steps: Natural = 120
    """Steps to train each source."""
    budget: Budget = Budget(steps=120, batch=64, every=10)
    held_out: Natural = 597
    """Number of test images among the 1797 digits; other data have a test set."""
    optimizer: Descent = Descent(rate=1e-2, warmup=10, weight_decay=1e-4)
    contrast: Byol = Byol()
    probe: Probe = Probe()
    statistics: Annotated[int, Ge(2)] = 500
    """Number of images for BatchNorm's statistics, if a start is made from sources."""
    maps: LearnedMaps = LearnedMaps(steps=30)
    augment: Recipe = "digits"
    """Random changes of the images in supervised training."""
    shard: Shard = "data"
    """The work that several devices share: nothing ('no'), the examples of a batch ('data'), or
    examples and parameters ('full')."""

    def __post_init__(self) -> None:
        one_of("transformation", self.transformation, TRANSFORMATIONS)
        self._check_ways()
        whole = f"be a multiple of budget.every = {self.budget.every}"
        must(self, "source_steps", self.source_steps % self.budget.every == 0, whole)
        must(self, "budget.steps", self.budget.steps % self.budget.every == 0, whole)
        small, large = self.source, self.large
        wide = f"be at least source.width = {small.width}"
        must(self, "large.width", large.width >= small.width, wide)
        same = small.blocks and len(large.blocks) == len(small.blocks)
        must(self, "large.blocks", same, f"name as many stages as source.blocks = {small.blocks}")
        pairs = list(zip(small.blocks, large.blocks, strict=True))
        deep = all(new >= old for old, new in pairs)
        must(self, "large.blocks", deep, f"be at least source.blocks = {small.blocks}")
        for stage, (old, new) in enumerate(pairs):
            # A last block that projects cannot be repeated.
            repeats = new == old or stage == 0 or old >= 2
            why = "its first block projects and its last block is repeated"
            must(self, "source.blocks", repeats, f"be 2 or more in stage {stage}, because {why}")

    def _check_ways(self) -> None:
        """Checks the names of the starts, and that scratch and sail come first."""
        if not self.supervised and not self.byol:
            raise ValueError("supervised, byol: one of them must name starts; got none")
        for field in self.paradigms():
            ways = self.ways(field)
            for way in ways:
                one_of(field, way, WAYS)
            must(self, field, len(set(ways)) == len(ways), "be all different")
            must(self, field, ways[:2] == (SCRATCH, SAIL), "begin with scratch, sail")
            if self.transformation in ways:
                raise ValueError(
                    f"{field}: {self.transformation} is the transformation of sail already"
                )
        if LIGO in self.byol:
            raise ValueError("byol: ligo learns its maps with labels, so use it in supervised")

    def network(self, *, large: bool) -> dict[str, Any]:
        """Returns the configuration of a source or of the large network.

        It returns the configuration for `experiments.models.presets.build`. Its outputs are the
        classes of the data.
        """
        sizes = self.large if large else self.source
        widths = [sizes.width * 2**s for s in range(len(sizes.blocks))]
        return {
            "model_type": "flax_resnet",
            "widths": widths,
            "inner": widths,
            "blocks": list(sizes.blocks),
            "stem": self.stem,
            "outputs": self.data.classes,
        }

    def ways(self, paradigm: str) -> tuple[str, ...]:
        """Returns the starts of one kind of training."""
        return getattr(self, paradigm)

    def paradigms(self) -> list[Paradigm]:
        """Lists the kinds of training of the large network."""
        return [p for p in PARADIGMS if self.ways(p)]

    def sources(self) -> list[Paradigm]:
        """Lists the kinds of training for which small networks are required.

        These are "supervised" and "byol" if a start uses their own small networks, and each of them
        if the other kind uses its small networks for the start `other`.
        """
        return [
            p
            for p in PARADIGMS
            if set(self.ways(p)) - {SCRATCH, OTHER}
            or any(OTHER in self.ways(q) for q in PARADIGMS if q != p)
        ]


DEFAULT = Config()
# ResNet-18 modified on CIFAR-10 (Fig. 3a)
PAPER = Config(
    data=ImageData("cifar-10"),
    replicates=3,
    source=Sizes(width=32, blocks=(2, 2, 2, 2)),
    large=Sizes(width=64, blocks=(2, 2, 2, 2)),
    source_steps=39_000,
    budget=Budget(steps=78_000, batch=128, every=1950, save_every=2000),
    optimizer=Descent(rule="sgd", rate=0.1, warmup=1950, weight_decay=5e-4),
    contrast=Byol(rate=0.1, target_decay=0.996, hidden=1024, outputs=256, views="byol"),
    probe=Probe(neighbours=200),
    statistics=5000,
    maps=LearnedMaps(steps=100),
    augment="crop_flip",
)
_FEW = (SCRATCH, SAIL, *MERGES)
_RESNET34 = varied(
    PAPER,
    supervised=(*_FEW, OTHER),
    byol=(*_FEW, OTHER),
    source={"width": 64},
    large={"blocks": (3, 4, 6, 3)},
)
# 200 epochs of 100 000 images
_TINY_IMAGENET: dict[str, Any] = {
    "data": {"name": "tiny-imagenet"},
    "source_steps": 78_000,
    "budget": {"steps": 156_000, "every": 3900},
    "optimizer": {"warmup": 3900},
}
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # Digits, with more blocks and the same number of channels.
    "depth": varied(
        DEFAULT,
        supervised=_FEW,
        byol=_FEW,
        source={"blocks": (1, 2)},
        large={"width": 8, "blocks": (2, 3)},
        replicates=5,
    ),
    "paper": PAPER,
    # Standard ResNet-18 on CIFAR-10 (Fig. 3b).
    "paper_standard": varied(PAPER, stem="standard"),
    # ResNet-34 modified on CIFAR-10 (Fig. 3c), from two with ResNet-18's depth and its width
    "paper_resnet34": _RESNET34,
    # ResNet-18 modified on CIFAR-100 (Fig. 5a)
    "paper_cifar100": varied(PAPER, data={"name": "cifar-100"}),
    # Standard ResNet-18 and ResNet-34 modified on CIFAR-100 (Figs. 5b and 5c).
    "paper_cifar100_standard": varied(PAPER, data={"name": "cifar-100"}, stem="standard"),
    "paper_cifar100_resnet34": varied(_RESNET34, data={"name": "cifar-100"}),
    # ResNet-18 modified, standard ResNet-18 and ResNet-34 modified on Tiny ImageNet (Figs. 6a to
    # 6c)
    "paper_tiny_imagenet": varied(PAPER, **_TINY_IMAGENET),
    "paper_tiny_imagenet_standard": varied(PAPER, **_TINY_IMAGENET, stem="standard"),
    "paper_tiny_imagenet_resnet34": varied(_RESNET34, **_TINY_IMAGENET),
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        supervised=("scratch", "sail", "first", "second"),
        byol=("scratch", "sail", "other"),
        replicates=3,
        source={"width": 4, "blocks": (1,)},
        large={"width": 4, "blocks": (1,)},
        source_steps=8,
        budget={"steps": 8, "batch": 16, "every": 4},
        held_out=1497,
        optimizer={"rule": "sgd", "warmup": 2},
        contrast={"hidden": 8, "outputs": 4},
        probe={"neighbours": 5},
        statistics=64,
        augment="none",
    ),
}
