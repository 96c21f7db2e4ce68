"""What `sail_diffusion` can be told."""

import dataclasses
import math
from typing import Any

from experiments.lab import validate
from experiments.models import presets
from experiments.studies.sail_diffusion.networks import WAYS
from experiments.studies.sail_diffusion.sampling import Method
from experiments.training.sharding import Shard
from experiments.training.step import Compute
from sail_jax.checks import nearest

EVALUATIONS = 8  # so that an eighth, a quarter and a half of the training are among them


@dataclasses.dataclass(frozen=True)
class Config:
    """Train SiTs with the velocity loss, with REPA's loss too, and as SAIL does."""

    seed: int = 0
    """Seed of the splits, initial weights, minibatches and samples."""
    replicates: int = 4
    """Independent repetitions, each with its own split, encoder and initial weights."""
    ways: tuple[str, ...] = ("sit", "repa", "sail", "sail_clean")
    """What to train: 'sit' and 'repa', which the others are compared with, and of 'sail',
    'sail_clean', 'sail_start' (REPA's loss from aligned weights) and 'sail_loss' (both losses from
    the usual ones)."""
    data: str | None = None
    """Latents [n, channel, side, side], a .npy or .npz; the digits if left out."""
    labels: str | None = None
    """Their classes, a .npy; `labels.npy` beside `data` if left out."""
    features: str | None = None
    """An encoder's features [n, patch, d] of the same images, a .npy; left out, a classifier is
    trained to be the encoder."""
    model: str = "sit-tiny"
    """The SiT, a preset of `experiments.models.presets`."""
    align_layer: int = 1
    """Blocks before the hidden states that are aligned."""
    projector: int = 64
    """Hidden units of the projectors."""
    encoder_layers: int = 2
    """Blocks of the encoder, where it is trained."""
    encoder_steps: int = 300
    """Steps of training it."""
    measure: str = "resnet-tiny"
    """The classifier whose features samples are measured in, a preset."""
    measure_steps: int = 300
    """Steps of training it."""
    classifier_rate: float = 3e-3
    """Adam's learning rate for both, which falls to 0 along a cosine."""
    steps: int = 1200
    """Steps of training each SiT; a multiple of 8, after every eighth of which it is sampled."""
    align_steps: int = 300
    """Steps of minimising the alignment loss alone."""
    batch: int = 64
    """Images per step of any training, drawn with replacement."""
    rate: float = 1e-2
    """AdamW's learning rate for SiTs, constant after the warm-up."""
    warmup: int = 20
    """Steps over which it rises."""
    weight_decay: float = 0.01
    """AdamW's."""
    clip: float = 1.0
    """Largest norm of a SiT's gradient."""
    ema: float = 0.99
    """Decay of the average of the weights that is sampled."""
    class_drop: float = 0.1
    """Share of examples whose class is not shown."""
    repa_weight: float = 0.5
    """Weight of REPA's loss in eq. (15)."""
    align_weight: float = 0.5
    """Weight of the alignment loss."""
    held_out: int = 901
    """Images that samples are compared with; the others are learned from."""
    samples: int = 896
    """Samples per evaluation, and images of those learned from that are measured likewise."""
    sample_batch: int = 128
    """Samples made at once, a divisor of `samples`."""
    sampler: Method = "heun"
    """'euler' or 'heun' along the flow, or 'sde', the reverse diffusion."""
    sampling_steps: int = 12
    """Its steps."""
    guidance: float = 1.0
    """Classifier-free guidance; 1 is none."""
    precision: Compute = "float32"
    """Type that SiTs are computed in."""
    save_every: int = 600
    """Steps between two checkpoints of a training."""
    shard: Shard = "data"
    """Over several devices: 'no', 'data' (batches) or 'full' (parameters too)."""

    def __post_init__(self) -> None:
        validate.at_least(self, replicates=2, align_layer=1, projector=1, encoder_layers=1)
        validate.at_least(self, encoder_steps=1, measure_steps=1, steps=1, align_steps=1, batch=1)
        validate.at_least(self, warmup=0, held_out=2, samples=2, sample_batch=1, sampling_steps=1)
        validate.at_least(self, save_every=1, guidance=0)
        validate.positive(self, "classifier_rate", "rate", "clip")
        validate.positive(self, "weight_decay", "repa_weight", "align_weight", zero=True)
        validate.different(self, "ways")
        for way in self.ways:
            if way not in WAYS:
                raise ValueError(f"ways: none is called '{way}'{nearest(way, WAYS)}")
        if not {"sit", "repa"} <= set(self.ways):
            raise ValueError(f"ways must hold 'sit' and 'repa'; got {self.ways}")
        for field in ("ema", "class_drop"):
            if not 0 <= getattr(self, field) < 1:
                raise ValueError(f"{field} must be in [0, 1); got {getattr(self, field)}")
        validate.one_of(self, sampler=Method, precision=Compute, shard=Shard)
        if not math.isfinite(self.guidance):
            raise ValueError(f"guidance must be finite; got {self.guidance}")
        if self.steps % EVALUATIONS:
            raise ValueError(f"steps must be a multiple of {EVALUATIONS}; got {self.steps}")
        if self.warmup >= self.steps:
            raise ValueError(f"warmup must be below steps = {self.steps}; got {self.warmup}")
        if self.samples % self.sample_batch:
            raise ValueError(
                f"sample_batch must divide samples = {self.samples}; got {self.sample_batch}"
            )
        for field, kind in (("model", "flax_sit"), ("measure", "flax_resnet")):
            found = presets.config(getattr(self, field))["model_type"]
            if found != kind:
                raise ValueError(f"{field} must be a {kind}; '{getattr(self, field)}' is {found}")
        layers = presets.config(self.model)["layers"]
        if self.align_layer > layers:
            raise ValueError(
                f"align_layer must be at most the {layers} of {self.model}; got {self.align_layer}"
            )
        if self.features is not None and (wrong := [w for w in self.ways if self._noised(w)]):
            raise ValueError(
                f"ways: '{wrong[0]}' needs an encoder's features of noised latents, which those by "
                "path are not; 'sail_clean' does without"
            )

    @staticmethod
    def _noised(way: str) -> bool:
        return (WAYS[way].start or WAYS[way].align) and not WAYS[way].clean

    @property
    def every(self) -> int:
        return self.steps // EVALUATIONS

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        short: dict[str, Any] = {"encoder_steps": 20, "measure_steps": 20, "align_steps": 8}
        sizes: dict[str, Any] = {"batch": 16, "held_out": 1600, "samples": 64, "sample_batch": 32}
        return cls(
            replicates=2, ways=("sit", "repa", "sail"), steps=16, warmup=2, sampling_steps=2,
            projector=16, encoder_layers=1, save_every=8, **short, **sizes,
        )  # fmt: skip

    @classmethod
    def parts(cls) -> "Config":
        """What of SAIL does it: the start, or the loss."""
        return cls(ways=("sit", "repa", "sail", "sail_start", "sail_loss"))

    @classmethod
    def paper(cls) -> "Config":
        """SAIL's Table 3: B/2 on latents of ImageNet, 400K steps of 256 at a constant 1e-4.

        SiT's and REPA's where the table is silent: averages of 0.9999, the fourth block, projectors
        of 2048, a tenth of the classes not shown, 50 000 samples by 250 steps of the diffusion. The
        alignment phase takes a quarter of the steps, as in `Config`. Without `features` a ViT as
        deep as the SiT is trained to be the encoder. Three seeds, where the paper has one.
        """
        return cls(
            replicates=3, ways=("sit", "repa", "sail_clean"), model="sit-b/2", align_layer=4,
            projector=2048, encoder_layers=12, encoder_steps=50_000, measure="resnet18-modified",
            measure_steps=50_000, classifier_rate=1e-3, steps=400_000, align_steps=100_000,
            batch=256, rate=1e-4, warmup=0, ema=0.9999, held_out=50_000, samples=50_000,
            sample_batch=500, sampler="sde", sampling_steps=250, precision="bfloat16",
            save_every=5000,
        )  # fmt: skip


PRESETS: dict[str, Config] = {
    "default": Config(),
    "parts": Config.parts(),
    "paper": Config.paper(),
    "tiny": Config.tiny(),
}
