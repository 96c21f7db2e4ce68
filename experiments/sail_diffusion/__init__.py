"""Does aligning a SiT with a frozen encoder, and starting it aligned, speed up its training?

SAIL's Appendix J trains a SiT (Ma et al. 2024) for the velocity of noised latents z_t, adds REPA's
loss (Yu et al. 2024) and an alignment loss (eqs. 15-16), and starts from the weights that minimise
the latter alone (eq. 14). Here that is done on scikit-learn's digits, each image its own latent, or
on latents by path. Samples are measured against held-out images in the features of a classifier
trained on the data at hand, in place of Inception: so no value compares with a printed FID. Beside
them stands what the training images themselves score.

What the paper leaves open, and what is chosen here:

- f_P(z_t), the target of eq. (16): as printed, the frozen encoder's features of the noised latents
  (`sail`), where it can be evaluated there; or those of the data, as in REPA (`sail_clean`), the
  only ones that features by path can give. The norm is averaged over patches and units.
- f_A: three layers, a projector of its own beside REPA's; both read the states after `align_layer`
  blocks (REPA has 4 of B/2's 12).
- Eq. (14): a SiT of the target's shape, trained from its usual initial weights on the alignment
  loss alone, with the same optimiser, over times uniform in [0, 1], for `align_steps`, of which the
  paper says nothing. What it does not reach, later blocks and the velocity's head, stays initial;
  moments and averages begin again. `saved` counts these steps, the table of the paper does not.
- The encoder, frozen: a ViT classifier of the SiT's own sizes, trained on the images that the SiT
  learns from; the measuring classifier is a ResNet trained on all images.
- Averaged weights are sampled, by the flow or the reverse diffusion, without guidance.
- On digits the rate is the best of 1e-3, 4e-3 and 1e-2 for plain SiT (at 800 steps, 2 seeds).
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from experiments import findings as judge
from experiments import validate
from experiments.data import latents
from experiments.data.files import refused
from experiments.models import presets
from experiments.progress import Stage
from experiments.sail_diffusion import data, quality
from experiments.sail_diffusion.networks import WAYS
from experiments.sail_diffusion.sampling import Method
from experiments.sail_diffusion.training import TERMS, Laboratory
from experiments.savings import savings
from experiments.store import direct
from experiments.training import sharding
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
        for field, allowed in (("sampler", Method), ("precision", Compute), ("shard", Shard)):
            if getattr(self, field) not in get_args(allowed):
                raise ValueError(
                    f"{field} must be one of {', '.join(get_args(allowed))}; got "
                    f"{getattr(self, field)}"
                )
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


PRESETS: dict[str, Callable[[], Config]] = {
    "default": Config,
    "parts": Config.parts,
    "paper": Config.paper,
    "tiny": Config.tiny,
}


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Trains the measuring classifier; for every seed an encoder, the aligned starts, the SiTs; one
    stage each."""
    with refused():
        images = loaded(config)
    lab = Laboratory(config, images)
    everything = np.arange(len(images.labels))
    learn = partial(lab.classifier, "measure", everything, 0)
    measure = stage("measure", learn, folder=True)["variables"]
    found: dict[str, list[Any]] = {way: [] for way in config.ways}
    starts: dict[bool, list[Any]] = {}
    floors, accuracy = [], []
    for seed in range(config.replicates):
        split = data.split(config.seed, seed, len(images.labels), config.held_out)
        encoder, encodings = None, images
        if lab.encoder is not None:
            learn = partial(lab.classifier, "encoder", split.learn, seed)
            trained = stage(f"encoder, seed {seed}", learn, folder=True)
            encoder = trained["variables"]
            encodings, right = lab.encoding(encoder)
            accuracy.append(right[split.held_out].mean())
        real = quality.reference(lab.see(measure, split.held_out))
        score = partial(quality.scores, real=real)
        floors.append(score(lab.see(measure, split.learn[: config.samples])))
        aligned = {}
        for clean in sorted({WAYS[way].clean for way in config.ways if WAYS[way].start}):
            name = f"align{' clean' * clean}, seed {seed}"
            phase = partial(lab.align, seed, encodings, split, encoder, clean)
            aligned[clean] = stage(name, phase, folder=True)
            starts.setdefault(clean, []).append(aligned[clean]["loss"])
        for way in config.ways:
            start = aligned[WAYS[way].clean]["params"] if WAYS[way].start else None
            fixed = (way, seed, encodings, split, encoder, start, score, measure)
            trained = stage(f"{way}, seed {seed}", partial(lab.generate, *fixed), folder=True)
            found[way].append({k: v for k, v in trained.items() if k != "weights"})
    real_images = images.batch(_by_class(images.labels, config.sample_batch))["x"]
    return _dataset(config, found, starts, floors, accuracy, real_images)


def loaded(config: Config) -> data.Images:
    """The data, once all that can be refused has been."""
    sharding.layout(config.shard).check(batch=config.batch, sample_batch=config.sample_batch)
    sizes = presets.config(config.model)
    if config.data is None and (sizes["side"], sizes["channels"], sizes["classes"]) != (8, 1, 10):
        source = latents.SOURCE
        raise ValueError(
            f"data: {config.model} learns from {source.name} ({source.home}); give their path, or "
            f"use the preset 'default' for the offline default, {source.offline}"
        )
    images = data.load(config.data, config.labels, config.features, sizes)
    patches = (sizes["side"] // sizes["patch"]) ** 2
    if images.features is not None and images.features.shape[1] != patches:
        raise ValueError(
            f"features: {config.model} has {patches} patches, {config.features} "
            f"{images.features.shape[1]}"
        )
    if config.held_out + config.samples > len(images.labels):
        raise ValueError(
            f"held_out, samples: {config.held_out} and {config.samples} of the "
            f"{len(images.labels)} images"
        )
    return images


def _by_class(labels: np.ndarray, count: int) -> np.ndarray:
    """Examples class by class in turn, as samples are."""
    classes = [np.flatnonzero(labels == k) for k in range(labels.max() + 1)]
    classes = [some for some in classes if len(some)]
    return np.array([classes[i % len(classes)][i // len(classes)] for i in range(count)])


SHOWN = 40  # samples that the dataset keeps of each way, of the first seed


def _dataset(
    config: Config,
    found: dict[str, list[Any]],
    starts: dict[bool, list[Any]],
    floors: list[dict[str, float]],
    accuracy: list[float],
    real: np.ndarray,
) -> xr.Dataset:
    stacked = lambda name: np.array([[one[name] for one in found[w]] for w in found], float)  # noqa: E731
    fd = stacked("fd")
    names = list(found)
    ahead = np.array([config.align_steps * WAYS[way].start for way in names])
    saved = {
        against: savings(fd, config.every, scratch=names.index(against), ahead=ahead)
        for against in ("sit", "repa")
    }
    log, shown = max(1, config.every // 10), min(SHOWN, config.sample_batch)
    samples = np.stack([found[w][0]["samples"][:shown] for w in names])
    variables: dict[str, Any] = {}
    for name, label in quality.MEASURES.items():
        variables[name] = (("way", "seed", "step"), stacked(name), {"long_name": label})
        variables[f"{name}_real"] = ("seed", [one[name] for one in floors])
    for term in TERMS:
        variables[f"{term}_loss"] = (("way", "seed", "logged"), stacked(term))
    for against, how in saved.items():
        level = {"long_name": f"lowest Fréchet distance that it and {against} reach"}
        variables |= {
            f"level_{against}": (("way", "seed"), how.level, level),
            f"steps_{against}": (("way", "seed"), how.scratch_steps, {"units": "steps"}),
            f"saved_{against}": (("way", "seed"), how.saved, {"units": "steps"}),
        }
    if starts:
        target = ["data" if clean else "noised latents" for clean in starts]
        losses = np.array(list(starts.values()), float)
        variables["start_loss"] = (("target", "seed", "start_step"), losses)
        variables["target"] = ("target", target)
    if accuracy:
        variables["encoder_accuracy"] = ("seed", accuracy)
    grey = {"long_name": "first channel"}
    return xr.Dataset(
        {
            **variables,
            "align_steps": ("way", ahead),
            "samples": (("way", "shown", "row", "column"), samples[..., 0], grey),
            "images": (("shown", "row", "column"), real[:shown, ..., 0], grey),
        },
        {
            "way": names,
            "seed": np.arange(config.replicates),
            "step": np.arange(0, config.steps + 1, config.every),
            "logged": np.arange(0, config.steps, log),
            **({"start_step": np.arange(0, config.align_steps, log)} if starts else {}),
        },
        {"steps": config.steps, "data": Path(config.data or "digits").stem},
    )


def findings(dataset: xr.Dataset) -> list[judge.Finding]:
    """The claims of SAIL's Appendix J."""
    from experiments.sail_diffusion import claims

    return claims.findings(dataset)


def summary(dataset: xr.Dataset) -> str:
    """The distances in the end, the floor, and how the claims fared."""
    last = dataset.isel(step=-1)
    ends = ", ".join(
        f"{way} {judge.stated(last['fd'].sel(way=way), sign=False)}"
        for way in dataset["way"].values.astype(str)
    )
    floor = judge.stated(dataset["fd_real"], sign=False)
    verdicts = [one.verdict for one in findings(dataset)]
    counted = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
    steps, seeds = dataset.attrs["steps"], dataset.sizes["seed"]
    return (
        f"After {steps} steps the Fréchet distances to held-out images are {ends}, that of the "
        f"images learned from is {floor} (mean ± s.e. over {seeds} seeds). "
        f"Of {len(verdicts)} claims: {counted}."
    )


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Measures against steps; samples; losses."""
    from experiments.sail_diffusion import plots

    return plots.draw(dataset)
