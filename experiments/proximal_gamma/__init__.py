"""Does the distance between texts predict where between two language models to start?

SAIL, Sec. 4.4 and Fig. 2: text is cut into blocks and split by their mean token value into D_1, D_2
and D_t; a GPT is trained on each source, and training on D_t starts from gamma theta_1 +
(1 - gamma) theta_2. The held-out loss on D_t against gamma after a few steps; the best gamma beside
those that eq. 11 predicts from distances between the parts, as the overlap of the sources with each
other (alpha) and with the target (beta) grows. The text is the source of Python's library.

Which distance, of which features, the paper does not say: several are shown. Nor whether the two
models have the same initial weights: both are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, Literal

import jax
import numpy as np
import xarray as xr
from jaxtyping import PyTree
from matplotlib.figure import Figure

from experiments import validate
from experiments.data import text
from experiments.findings import Finding, judged, stated
from experiments.models.gpt import GPT
from experiments.progress import Stage
from experiments.proximal import sweep as line
from experiments.proximal_gamma import training
from experiments.store import direct

PUBLISHED = -0.1244  # gamma* of Sec. 4.4
DISTANCES = training.DISTANCES
LABELS = {**{k: label for k, (_, label) in DISTANCES.items()}, "parameters": "parameters (eq. 4)"}
# whose initial weights theta_1, theta_2 and the model trained on the target have
STARTS = {"shared": [0, 0, 0], "independent": [0, 1, 2]}

Start = Literal["shared", "independent"]


@dataclass(frozen=True)
class Config:
    """Train a GPT on either source, merge at every gamma, train on the target."""

    seed: int = 0
    """Seed of the sources, initial weights and minibatches."""
    replicates: int = 4
    """Independent repetitions, each with its own sources and models; at least 2, for the spread."""
    starts: tuple[Start, ...] = ("shared", "independent")
    """Whether the two models start from the 'shared' or from 'independent' initial weights; the
    first is that of the overlap sweep."""
    alphas: tuple[float, ...] = (0.0, 0.5, 1.0)
    """Overlaps of the sources with each other, the first one 0."""
    betas: tuple[float, ...] = (0.0, 0.5)
    """Overlaps of both with the target, the first one 0."""
    looks: tuple[int, ...] = (0, 50, 100, 200)
    """Steps on the target after which the loss is measured."""
    overlap_steps: int = 50
    """Steps on the target for the overlaps; among `looks`."""
    gammas: int = 31
    """Values of gamma, evenly spaced."""
    gamma_min: float = -1.0
    """Smallest gamma."""
    gamma_max: float = 2.0
    """Largest gamma."""
    block: int = 48
    """Tokens (characters) of a block; the GPT sees all but the last, and predicts the next."""
    source_blocks: int = 6000
    """Blocks of a source."""
    distance_blocks: int = 800
    """Blocks that stand for a part in distances; at least 4 and at most `source_blocks`."""
    held_out: int = 128
    """Blocks for the loss, like the target's, from modules kept from training."""
    width: int = 32
    """Units of the GPT's stream."""
    layers: int = 2
    """Blocks of the GPT."""
    heads: int = 2
    """Attention heads; must divide the width."""
    source_steps: int = 400
    """Steps of training on a source, and on the target from scratch."""
    batch: int = 8
    """Blocks per step, drawn with replacement."""
    rate: float = 3e-3
    """Adam's learning rate, for all training."""
    warmup: int = 20
    """Steps over which the rate rises from 0."""
    at_once: int = 256
    """Networks trained side by side, of all seeds and gammas: memory."""

    def __post_init__(self) -> None:
        validate.at_least(self, replicates=2, gammas=3, block=2, held_out=2, distance_blocks=4)
        validate.at_least(
            self, width=1, layers=1, heads=1, source_steps=1, batch=1, warmup=1, at_once=1
        )
        validate.at_least(self, source_blocks=self.distance_blocks)
        validate.positive(self, "rate")
        validate.different(self, "starts", "alphas", "betas", "looks")
        if odd := [name for name in self.starts if name not in STARTS]:
            raise ValueError(f"starts must be among {', '.join(STARTS)}; got '{odd[0]}'")
        for field in ("alphas", "betas"):
            shares = getattr(self, field)
            if shares[0] != 0 or list(shares) != sorted(shares) or shares[-1] > 1:
                raise ValueError(f"{field} must rise from 0 and not exceed 1; got {shares}")
        if self.looks[0] < 0 or list(self.looks) != sorted(self.looks) or not self.looks[-1]:
            raise ValueError(f"looks must be increasing steps, not all 0; got {self.looks}")
        checks = [
            ("overlap_steps", self.overlap_steps in self.looks, f"among looks = {self.looks}"),
            ("gamma_max", self.gamma_max > self.gamma_min, f"above gamma_min = {self.gamma_min}"),
            ("heads", self.width % self.heads == 0, f"a divisor of width = {self.width}"),
            (
                "source_steps",
                self.source_steps >= self.looks[-1] and self.source_steps % self.every == 0,
                f"a multiple of {self.every} (of which looks are) and at least {self.looks[-1]}",
            ),
        ]
        for field, holds, what in checks:
            if not holds:
                raise ValueError(f"{field} must be {what}; got {getattr(self, field)}")

    @property
    def every(self) -> int:
        """The steps of which all `looks` are multiples."""
        return gcd(*self.looks)

    def gamma(self) -> np.ndarray:
        return np.linspace(self.gamma_min, self.gamma_max, self.gammas)

    def overlaps(self) -> list[tuple[float, float]]:
        return [(alpha, beta) for alpha in self.alphas for beta in self.betas]

    def network(self) -> GPT:
        return GPT(
            vocab=text.VOCAB,
            context=self.block - 1,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            head_dim=self.width // self.heads,
            hidden=4 * self.width,
        )

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        sizes: dict[str, Any] = {"block": 16, "width": 8, "layers": 1, "batch": 4, "gammas": 7}
        blocks: dict[str, Any] = {"source_blocks": 200, "distance_blocks": 40, "held_out": 16}
        short: dict[str, Any] = {"source_steps": 40, "looks": (0, 20, 40), "overlap_steps": 40}
        some: dict[str, Any] = {"alphas": (0.0,), "betas": (0.0, 0.5), "starts": ("shared",)}
        return cls(replicates=2, warmup=5, **sizes, **blocks, **short, **some)

    @classmethod
    def paper(cls) -> "Config":
        """The paper's blocks and a GPT of the size of GPT-2's smallest, on the text there is: hours
        on a large accelerator."""
        shares = (0.0, 0.25, 0.5, 0.75, 1.0)
        blocks: dict[str, Any] = {"block": 1024, "source_blocks": 500, "distance_blocks": 500}
        sizes: dict[str, Any] = {"width": 768, "layers": 12, "heads": 12, "at_once": 2}
        long: dict[str, Any] = {"source_steps": 2000, "rate": 6e-4, "warmup": 100}
        return cls(alphas=shares, betas=shares, **blocks, **sizes, **long)


PRESETS: dict[str, Callable[[], Config]] = {
    "default": Config,
    "paper": Config.paper,
    "tiny": Config.tiny,
}


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Trains, merges, trains on; a stage for each start and each pair of overlaps."""
    data = training.load(config)
    initial = jax.device_get(training.initial(config))

    def weights_of(which: Any) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[:, which], initial)

    def swept(start: str, overlaps: tuple[float, float], steps: int) -> dict[str, Any]:
        parts = training.parts(data, training.sources(config, data, *overlaps))
        learned = training.learn(config, weights_of(STARTS[start]), data, *parts)
        found = training.tune(config, steps, learned["model"], data)
        nearest = training.nearest(jax.device_get(learned["model"]))
        return {"scratch": learned["loss"][:, 2], **found, **nearest}

    apart, found, overlapping = {}, {}, {}
    for overlaps in config.overlaps():
        name = "alpha {:g}, beta {:g}".format(*overlaps)
        apart[overlaps] = stage(
            f"distances, {name}", partial(training.apart, config, data, overlaps)
        )
        if overlaps != (0, 0):
            compute = partial(swept, config.starts[0], overlaps, config.overlap_steps)
            overlapping[overlaps] = stage(f"sweep, {name}", compute)
            continue
        for start in config.starts:
            compute = partial(swept, start, overlaps, config.looks[-1])
            found[start] = stage(f"sweep, {start} start", compute)
    return _dataset(config, apart, found, overlapping)


def _dataset(config: Config, apart: Mapping, found: Mapping, overlapping: Mapping) -> xr.Dataset:
    gamma, main = config.gamma(), apart[0, 0]
    seeds = config.replicates
    loss = np.stack([np.asarray(found[s]["loss"], float) for s in config.starts])
    loss = loss.swapaxes(2, 3)  # [start, seed, look, gamma]
    predicted = np.stack([np.c_[main["weight"], found[s]["parameters"]].T for s in config.starts])
    where = np.broadcast_to(predicted[..., None], (*predicted.shape, len(config.looks)))
    several = np.broadcast_to(loss[:, None], (*where.shape, len(gamma)))
    first = loss[0, :, config.looks.index(config.overlap_steps)]
    by_overlap = {
        (0.0, 0.0): first,
        **{at: np.asarray(part["loss"], float)[..., -1] for at, part in overlapping.items()},
    }
    grid = ("alpha", "beta")

    def over(parts: Mapping[tuple[float, float], np.ndarray]) -> np.ndarray:
        array = np.array([parts[at] for at in config.overlaps()])
        return array.reshape(len(config.alphas), len(config.betas), *array.shape[1:])

    overlap = over(by_overlap)
    values = {
        name: over({at: part[name] for at, part in apart.items()}) for name in ("value", "error")
    }
    weight = over({at: part["weight"] for at, part in apart.items()})
    per_pair = (*grid, "seed", "distance", "pair")
    return xr.Dataset(
        {
            "loss": (("start", "seed", "look", "gamma"), loss, {"units": "nats per character"}),
            "scratch_loss": (
                ("start", "seed", "look"),
                np.stack([found[s]["scratch"] for s in config.starts]).astype(float),
            ),
            "best": (("start", "seed", "look"), line.lowest(gamma, loss)),
            "predicted": (("start", "way", "seed"), predicted),
            "excess": (
                ("start", "way", "seed", "look"),
                line.at(gamma, several, where) - loss.min(-1)[:, None],
                {"long_name": "loss at the predicted gamma above the lowest"},
            ),
            "end_excess": (
                ("start", "seed", "look", "end"),
                line.ends(gamma, loss) - loss.min(-1)[..., None],
                {"long_name": "loss at gamma = 0, 1/2, 1 above the lowest"},
            ),
            "overlap_loss": ((*grid, "seed", "gamma"), overlap),
            "overlap_best": ((*grid, "seed"), line.lowest(gamma, overlap)),
            "overlap_predicted": ((*grid, "seed", "distance"), weight),
            "distance_value": (per_pair, values["value"]),
            "distance_error": (per_pair, values["error"]),
        },
        {
            "start": list(config.starts),
            "seed": np.arange(seeds),
            "look": list(config.looks),
            "gamma": ("gamma", gamma, {"long_name": "weight of the first model", "units": "1"}),
            "way": list(LABELS),
            "distance": list(DISTANCES),
            "pair": list(line.PAIRS),
            "end": list(line.ENDS),
            "alpha": list(config.alphas),
            "beta": list(config.betas),
        },
        {"overlap_steps": config.overlap_steps, "block": config.block},
    )


def summary(dataset: xr.Dataset) -> str:
    """The best gamma, which distances meet it and at what cost, and what overlap does."""
    looks, starts = dataset["look"].values, dataset["start"].values.astype(str)
    last, cases = looks[-1], {f"{s} start": dataset.sel(start=s) for s in starts}
    when = ", ".join(map(str, looks))
    best = "; ".join(
        f"{name}: " + ", ".join(line.stated_best(one.sel(look=n)) for n in looks)
        for name, one in cases.items()
    )
    known = [(one, n) for one in cases.values() for n in looks if line.is_known(one.sel(look=n))]
    told = []
    for way in dataset["way"].values.astype(str):
        of_way = dataset.sel(way=way, look=last)
        some = starts if way == "parameters" else starts[:1]
        weight = " and ".join(stated(of_way["predicted"].sel(start=s)) for s in some)
        cost = " and ".join(stated(of_way["excess"].sel(start=s), 3) for s in starts)
        told.append(f"{LABELS[way]} {weight} (meets {line.met(known, way)}, costs {cost})")
    plain = ", ".join(
        f"{end:g} "
        + " and ".join(
            stated(one["end_excess"].sel(look=last, end=end), 3) for one in cases.values()
        )
        for end in line.ENDS
    )
    said = {-1: "lower", 0: "undecided", 1: "higher"}
    ahead = "; ".join(
        f"{name}: "
        + ", ".join(
            said[line.decided((one["loss"].min("gamma") - one["scratch_loss"]).sel(look=n))]
            for n in looks
        )
        for name, one in cases.items()
    )
    mmd = dataset["overlap_predicted"].sel(distance="mmd")
    by_overlap = "; ".join(
        f"alpha {a:g}, beta {b:g}: {stated(dataset['overlap_best'].sel(alpha=a, beta=b))}"
        f" (MMD of unigrams: {stated(mmd.sel(alpha=a, beta=b))})"
        for a in dataset["alpha"].values
        for b in dataset["beta"].values
    )
    means = dataset["predicted"].sel(way="mmd_mean")[0]
    return (
        f"Best gamma (weight of theta_1; mean ± s.e. over {dataset.sizes['seed']} seeds) after "
        f"{when} steps: {best}. Predicted by eq. 11 (in brackets: in how many of the cases where "
        f"the best is known to ± {line.SHARP:g} it is within {line.DECIDED:g} s.e. of it, and the "
        f"loss after {last} steps above the lowest, {' and '.join(starts)} start): "
        f"{'; '.join(told)}. Without prediction, gamma = {plain}. Loss from the best start on the "
        f"line (chosen in hindsight) beside that from scratch, after {when} steps: {ahead}. By "
        f"overlap, after {dataset.attrs['overlap_steps']} steps, best (and predicted): "
        f"{by_overlap}. The formula that Sec. 4.4 prints is the weight of theta_2: with MMD of "
        "block means it is "
        f"{stated(1 - means)} here, and eq. 11, the weight of theta_1, {stated(means)}; "
        f"the published {PUBLISHED} is on the side of the latter, and the printed formula would "
        f"have given {1 - PUBLISHED:+.4f}."
    )


def findings(dataset: xr.Dataset) -> list[Finding]:
    """What Sec. 4.4 prints, and what became of it."""
    one = dataset.isel(start=0, look=-1)
    told, means = int(dataset["look"][-1]), one["predicted"].sel(way="mmd_mean")
    rank = "the text of Python's library, a small GPT"
    excess, ends = one["excess"].sel(way="mmd_mean"), one["end_excess"]
    return [
        judged(
            "SAIL, Sec. 4.4",
            "the best gamma lies outside [0, 1], below 0",
            f"gamma* = {PUBLISHED} (GPT-2's tokens)",
            f"{stated(one['best'])} after {told} steps ({rank})",
            -one["best"].values,
        ),
        judged(
            "SAIL, Sec. 4.4 and eq. 11",
            "eq. 11 on the MMD of block means gives a gamma below 0",
            f"{PUBLISHED}",
            stated(means),
            -means.values,
        ),
        judged(
            "SAIL, Fig. 2",
            "the predicted gamma starts a better training than the mean of the models does",
            "loss 10.8866 to 4.9782, beside an untrained network",
            f"above the lowest loss by {stated(excess, 3)}, the mean by "
            f"{stated(ends.sel(end=0.5), 3)} nats",
            (ends.sel(end=0.5) - excess).values,
        ),
    ]


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Loss against gamma; measured and predicted weights; distances; overlaps (SAIL, Fig. 2)."""
    from experiments.proximal import plots

    return plots.gamma(dataset)
