"""What `sail_vision` is told, and its presets."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from experiments.lab import validate
from experiments.models.resnet import Stem
from experiments.training.optimizers import Rule
from experiments.training.sharding import Shard
from sail_jax.checks import nearest

Dataset = Literal["digits", "mnist", "cifar-10", "cifar-100", "tiny-imagenet"]
Origin = Literal["common", "own", "aligned"]
Paradigm = Literal["supervised", "byol"]
PARADIGMS: tuple[Paradigm, ...] = get_args(Paradigm)
Recipe = Literal["none", "digits", "crop_flip", "byol"]
SCRATCH, SAIL, LIGO, OTHER = "scratch", "sail", "ligo", "other"
# a method of `growth.grow`, and the options it is given, by what it is called here
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


@dataclasses.dataclass(frozen=True)
class Config:
    """Two small ResNets on parts of the classes, and the large one on all, from every start."""

    data: Dataset = "digits"
    """What is learned; all but scikit-learn's digits need `folder`."""
    folder: str | None = None
    """Where the publisher's files of the data lie."""
    seed: int = 0
    """Seed of the initial weights, minibatches, augmentations, splits and transformations."""
    replicates: int = 6
    """Independent repetitions, each with its own sources; at least 3, for the spread."""
    supervised: tuple[str, ...] = (
        *(SCRATCH, SAIL, *MERGES, OTHER),
        *("sail_random", "pad", "net2net", LIGO),
    )
    """Starts of training with labels: scratch first; none to leave this out."""
    byol: tuple[str, ...] = (
        *(SCRATCH, SAIL, "first", "second", OTHER),
        *("sail_random", "pad"),
    )
    """Starts of BYOL: scratch first; none to leave this out."""
    transformation: str = "interpolate"
    """How SAIL makes the sources wider; the default did best of the three that its paper has."""
    origin: Origin = "common"
    """Whether the two sources start from common weights, or from their own; these may be aligned
    before they are merged (weight matching), which SAIL does not do."""
    share: float = 0.7
    """Share of the classes that the first source learns; the second learns the others."""
    width: int = 8
    """Channels of a source's first stage, doubled from stage to stage."""
    new_width: int = 16
    """Channels of the large network's."""
    blocks: tuple[int, ...] = (1, 1)
    """Blocks of each of a source's stages."""
    new_blocks: tuple[int, ...] = (1, 1)
    """Blocks of each of the large network's."""
    stem: Stem = "small"
    """'small' ("modified"), or the 'standard' stem for large images."""
    source_steps: int = 120
    """Steps of training each source."""
    steps: int = 120
    """Steps of training the large network."""
    every: int = 10
    """Steps between two evaluations."""
    save_every: int = 1000
    """Steps between two checkpoints of a training."""
    batch: int = 64
    """Images per step."""
    held_out: int = 597
    """Digits, of the 1797, to test on; other data have a test set."""
    rule: Rule = "adamw"
    """'adamw', 'adam' or 'sgd' (with momentum), for all networks, with a cosine decay to 0."""
    rate: float = 1e-2
    """Highest learning rate of supervised training, from whatever start."""
    byol_rate: float = 1e-2
    """Highest learning rate of BYOL, from whatever start."""
    warmup: int = 10
    """Steps over which the rate rises."""
    weight_decay: float = 1e-4
    """Of the weights of convolutions and linear layers."""
    target_decay: float = 0.9
    """BYOL's first decay of the target network, which rises to 1."""
    projector_hidden: int = 64
    """Hidden units of BYOL's projector and predictor."""
    projection: int = 32
    """Outputs of both."""
    ridge: float = 1e-3
    """Penalty of the linear classifier of BYOL's features."""
    neighbours: int = 20
    """Nearest neighbours that vote on the class of BYOL's features."""
    statistics: int = 500
    """Images over which BatchNorm's statistics are measured at a start."""
    learn_steps: int = 30
    """Steps of learning LiGO's maps, counted as steps of the large network."""
    learn_rate: float = 3e-3
    """Adam's learning rate for them."""
    augment: Recipe = "digits"
    """Random changes of the images in supervised training."""
    views: Recipe = "digits"
    """Random changes that make BYOL's two views."""
    shard: Shard = "data"
    """Over several devices: 'no', 'data' (each takes a share of the batch), or 'full' (and of the
    parameters)."""

    def __post_init__(self) -> None:
        validate.at_least(self, replicates=3, width=1, source_steps=1, steps=1, every=1)
        validate.at_least(self, save_every=1, batch=2, held_out=1, warmup=0, learn_steps=1)
        validate.at_least(self, new_width=self.width, projector_hidden=1, projection=1)
        validate.at_least(self, neighbours=1, statistics=2)
        validate.positive(self, "rate", "byol_rate", "ridge", "learn_rate")
        validate.positive(self, "weight_decay", zero=True)
        self._check_choices()
        self._check_ways()
        for field in ("source_steps", "steps"):
            if getattr(self, field) % self.every:
                raise ValueError(
                    f"{field} must be a multiple of every = {self.every}; got "
                    f"{getattr(self, field)}"
                )
        for field in ("share", "target_decay"):
            if not 0 < getattr(self, field) < 1:
                raise ValueError(f"{field} must be in (0, 1); got {getattr(self, field)}")
        if not self.blocks or len(self.new_blocks) != len(self.blocks):
            raise ValueError(
                f"new_blocks must name as many stages as blocks = {self.blocks}; got "
                f"{self.new_blocks}"
            )
        if min(self.blocks) < 1 or any(
            new < old for old, new in zip(self.blocks, self.new_blocks, strict=True)
        ):
            raise ValueError(
                f"new_blocks must be at least blocks = {self.blocks}, and those at least 1; got "
                f"{self.new_blocks}"
            )
        if stages := self._repeating_projections():
            stage = stages[0]
            raise ValueError(
                f"blocks must be 2 or more in stage {stage}, which deepens by repeating its last "
                f"block, and whose first one projects; got {self.blocks}"
            )

    def _repeating_projections(self) -> list[int]:
        """Stages that deepen although their last block projects, so that it cannot be repeated."""
        pairs = zip(self.blocks, self.new_blocks, strict=True)
        return [s for s, (old, new) in enumerate(pairs) if new > old and s > 0 and old < 2]

    def _check_choices(self) -> None:
        validate.one_of(self, data=Dataset, transformation=TRANSFORMATIONS, origin=Origin)
        validate.one_of(self, stem=Stem, rule=Rule, augment=Recipe, views=Recipe, shard=Shard)
        if self.data == "digits" and self.folder is not None:
            raise ValueError(f"folder must not be given for digits; got {self.folder}")

    def _check_ways(self) -> None:
        if not self.supervised and not self.byol:
            raise ValueError("supervised, byol: one of them must name starts; got none")
        for field in PARADIGMS:
            ways = getattr(self, field)
            for way in ways:
                if way not in WAYS:
                    raise ValueError(f"{field}: no start is called '{way}'{nearest(way, WAYS)}")
            if not ways:
                continue
            validate.different(self, field)
            if ways[:2] != (SCRATCH, SAIL):
                raise ValueError(f"{field} must begin with scratch, sail; got {', '.join(ways)}")
            if self.transformation in ways:
                raise ValueError(
                    f"{field}: {self.transformation} is the transformation of sail already"
                )
        if LIGO in self.byol:
            raise ValueError("byol: ligo learns its maps with labels; it is for supervised alone")

    def network(self, *, large: bool) -> dict[str, Any]:
        """The configuration of a source or of the large network; the classes are the data's."""
        width = self.new_width if large else self.width
        blocks = self.new_blocks if large else self.blocks
        widths = [width * 2**s for s in range(len(blocks))]
        sizes = {"widths": widths, "inner": widths, "blocks": list(blocks), "stem": self.stem}
        classes = {"cifar-100": 100, "tiny-imagenet": 200}.get(self.data, 10)
        return {"model_type": "flax_resnet", **sizes, "outputs": classes}

    def ways(self, paradigm: str) -> tuple[str, ...]:
        return getattr(self, paradigm)

    def paradigms(self) -> list[Paradigm]:
        """Those in which large networks are trained."""
        return [p for p in PARADIGMS if self.ways(p)]

    def sources(self) -> list[Paradigm]:
        """Those in which sources are needed."""
        return [
            p
            for p in PARADIGMS
            if set(self.ways(p)) - {SCRATCH, OTHER}
            or any(OTHER in self.ways(q) for q in PARADIGMS if q != p)
        ]

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        ways: dict[str, Any] = {
            "supervised": ("scratch", "sail", "first", "second"),
            "byol": ("scratch", "sail", "other"),
        }
        sizes: dict[str, Any] = {"blocks": (1,), "new_blocks": (1,), "width": 4, "new_width": 4}
        heads: dict[str, Any] = {"projector_hidden": 8, "projection": 4, "neighbours": 5}
        steps: dict[str, Any] = {"source_steps": 8, "steps": 8, "every": 4, "warmup": 2}
        few: dict[str, Any] = {
            "batch": 16,
            "statistics": 64,
            "held_out": 1497,
            "augment": "none",
            "rule": "sgd",
        }
        return cls(**ways, **sizes, **heads, **steps, **few, replicates=3)

    @classmethod
    def depth(cls) -> "Config":
        """Digits, with more blocks and no more channels."""
        ways = ("scratch", "sail", *MERGES)
        sizes: dict[str, Any] = {"new_width": 8, "blocks": (1, 2), "new_blocks": (2, 3)}
        return cls(supervised=ways, byol=ways, **sizes, replicates=4)

    @classmethod
    def paper(cls) -> "Config":
        """ResNet-18 modified on CIFAR-10 (Fig. 3a)."""
        sizes: dict[str, Any] = {"width": 32, "new_width": 64}
        sizes |= {"blocks": (2, 2, 2, 2), "new_blocks": (2, 2, 2, 2)}
        steps: dict[str, Any] = {"source_steps": 39_000, "steps": 78_000, "every": 1950}
        sgd: dict[str, Any] = {"rule": "sgd", "rate": 0.1, "byol_rate": 0.1, "weight_decay": 5e-4}
        heads: dict[str, Any] = {"projector_hidden": 1024, "projection": 256, "neighbours": 200}
        return cls(
            data="cifar-10",
            replicates=3,
            **sizes,
            **steps,
            **sgd,
            **heads,
            batch=128,
            warmup=1950,
            target_decay=0.996,
            statistics=5000,
            learn_steps=100,
            save_every=2000,
            augment="crop_flip",
            views="byol",
        )

    @classmethod
    def paper_standard(cls) -> "Config":
        """Standard ResNet-18 on CIFAR-10 (Fig. 3b)."""
        return dataclasses.replace(cls.paper(), stem="standard")

    @classmethod
    def paper_resnet34(cls) -> "Config":
        """ResNet-34 modified on CIFAR-10 (Fig. 3c), from two of ResNet-18's depth and its width."""
        sizes: dict[str, Any] = {"width": 64, "new_blocks": (3, 4, 6, 3)}
        ways = ("scratch", "sail", *MERGES, OTHER)
        return dataclasses.replace(cls.paper(), supervised=ways, byol=ways, **sizes)

    @classmethod
    def paper_cifar100(cls) -> "Config":
        """ResNet-18 modified on CIFAR-100 (Fig. 5a)."""
        return dataclasses.replace(cls.paper(), data="cifar-100")

    @classmethod
    def paper_tiny_imagenet(cls) -> "Config":
        """ResNet-18 modified on Tiny ImageNet (Fig. 6a), 200 epochs of 100 000 images."""
        steps: dict[str, Any] = {"source_steps": 78_000, "steps": 156_000, "every": 3900}
        return dataclasses.replace(cls.paper(), data="tiny-imagenet", **steps, warmup=3900)


PRESETS: dict[str, Callable[[], Config]] = {
    "default": Config,
    "depth": Config.depth,
    "paper": Config.paper,
    "paper_standard": Config.paper_standard,
    "paper_resnet34": Config.paper_resnet34,
    "paper_cifar100": Config.paper_cifar100,
    "paper_tiny_imagenet": Config.paper_tiny_imagenet,
    "tiny": Config.tiny,
}
