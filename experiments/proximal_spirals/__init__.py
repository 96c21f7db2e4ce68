"""Where between two models should training start, on two spirals?

SAIL, App. K: theta_1 and theta_2 are trained on parts of the spirals, and training on all of them
starts from gamma theta_1 + (1 - gamma) theta_2. Loss, accuracy and norm of the gradient against
gamma, before training and along it; the gamma that SAIL predicts from distances of the data (eq.
11), from the parameters (eq. 4) and from the loss (eq. 3), beside the one that is best.

Two things the paper leaves open are shown side by side. "Points exclusively from the first spiral"
make sources of one class each; sources cut by radius know both classes, and random ones are all
alike. And the two models may start from the same initial weights or each from its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
import xarray as xr
from jaxtyping import PyTree
from matplotlib.figure import Figure

from experiments import validate
from experiments.data import spirals
from experiments.data.spirals import Sources
from experiments.progress import Stage
from experiments.proximal import sweep as line
from experiments.proximal_spirals import training
from experiments.store import direct

DISTANCES = tuple(training.DISTANCES)
PREDICTED = (*DISTANCES, "parameters", "loss")
LABELS = {
    "mmd": "MMD",
    "energy": "energy distance",
    "tv": "total variation",
    "w1": "Wasserstein-1",
    "parameters": "parameters (eq. 4)",
    "loss": "loss (eq. 3)",
}
MEASURED = ("loss", "accuracy", "gradient")
# whose initial weights theta_1, theta_2 and the model trained on the target alone have
STARTS = {"shared": [0, 0, 0], "independent": [0, 1, 2]}

Start = Literal["shared", "independent"]


@dataclass(frozen=True)
class Config:
    """Train two models on parts of the spirals, merge at every gamma, train on all of them."""

    seed: int = 0
    """Seed of the points, initial weights and minibatches."""
    replicates: int = 8
    """Independent repetitions, each with its own points and models; at least 2, for the spread."""
    sources: tuple[Sources, ...] = ("classes", "radii", "random")
    """How the two sources are cut out: 'classes' (App. K), 'radii' or 'random'."""
    starts: tuple[Start, ...] = ("shared", "independent")
    """Whether the two models start from the 'shared' or from 'independent' initial weights."""
    points: int = 500
    """Training points, half on each spiral; even."""
    test: int = 1000
    """Fresh points for the accuracy; even."""
    share: float = 0.4
    """Share of the training points in each source, at most 0.5."""
    turns: float = 1.0
    """Turns of a spiral."""
    noise: float = 0.05
    """Standard deviation of the points about it (the radius is 1)."""
    hidden: int = 50
    """Hidden ReLU units."""
    rate: float = 5e-3
    """Adam's learning rate, for all training."""
    batch: int = 100
    """Points per step; divides the training points and those of a source."""
    epochs: int = 300
    """Epochs of training, on the sources and on the target."""
    every: int = 10
    """Epochs between two measurements; divides `epochs`."""
    looks: tuple[int, ...] = (0, 10, 50, 300)
    """Epochs at which loss is shown against gamma and the best gamma is sought."""
    gammas: int = 31
    """Values of gamma, evenly spaced."""
    gamma_min: float = -1.0
    """Smallest gamma."""
    gamma_max: float = 2.0
    """Largest gamma."""
    loss_epochs: int = 10
    """Epochs of training through which eq. 3 is descended."""
    loss_steps: int = 100
    """Steps of that descent."""

    def __post_init__(self) -> None:
        validate.at_least(self, replicates=2, points=20, test=2, hidden=1, batch=1, gammas=3)
        validate.at_least(self, epochs=1, every=1, loss_epochs=1, loss_steps=1)
        validate.positive(self, "turns", "rate", "share")
        validate.positive(self, "noise", zero=True)
        validate.different(self, "sources", "starts", "looks")
        for field, known in (("sources", spirals.SOURCES), ("starts", tuple(STARTS))):
            if odd := [name for name in getattr(self, field) if name not in known]:
                raise ValueError(f"{field} must be among {', '.join(known)}; got '{odd[0]}'")
        allowed = range(0, self.epochs + 1, self.every)
        checks = [
            ("points", self.points % 2 == 0, "even"),
            ("test", self.test % 2 == 0, "even"),
            ("share", self.share <= 0.5, "at most 0.5"),
            ("epochs", self.epochs % self.every == 0, f"a multiple of every = {self.every}"),
            ("test", self.test >= self.count, f"at least {self.count}, the points of a source"),
            ("loss_epochs", self.loss_epochs <= self.epochs, f"at most epochs = {self.epochs}"),
            (
                "looks",
                set(self.looks) <= set(allowed) and list(self.looks) == sorted(self.looks),
                f"increasing multiples of every = {self.every} up to epochs = {self.epochs}",
            ),
            ("gamma_max", self.gamma_max > self.gamma_min, f"above gamma_min = {self.gamma_min}"),
            (
                "batch",
                self.points % self.batch == self.count % self.batch == 0,
                f"a divisor of {self.points} training points and of {self.count} in a source",
            ),
        ]
        for field, holds, what in checks:
            if not holds:
                raise ValueError(f"{field} must be {what}; got {getattr(self, field)}")

    @property
    def count(self) -> int:
        """Points of a source."""
        return round(self.share * self.points)

    def gamma(self) -> np.ndarray:
        return np.linspace(self.gamma_min, self.gamma_max, self.gammas)

    def epoch(self) -> np.ndarray:
        """Epochs at which everything is measured."""
        return np.arange(0, self.epochs + 1, self.every)

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        sizes: dict[str, Any] = {"points": 40, "test": 40, "batch": 8, "hidden": 8, "gammas": 7}
        short: dict[str, Any] = {"epochs": 8, "every": 4, "looks": (0, 8)}
        one: dict[str, Any] = {"sources": ("classes", "radii"), "starts": ("shared",)}
        return cls(replicates=2, loss_epochs=1, loss_steps=3, **sizes, **short, **one)

    @classmethod
    def paper(cls) -> "Config":
        """More of everything that the paper leaves open: an accelerator, or half an hour."""
        return cls(replicates=32, points=1000, every=5, gammas=61, loss_steps=300)


PRESETS: dict[str, Callable[[], Config]] = {
    "default": Config,
    "paper": Config.paper,
    "tiny": Config.tiny,
}


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Trains, merges, trains on and predicts; two stages per way of cutting and of starting."""
    data = {how: training.load(config, how) for how in config.sources}
    initial = jax.device_get(training.initial(config))

    def weights_of(which: Any) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[:, which], initial)

    scratch = {
        start: stage(
            f"train from scratch, {start}",
            lambda s=start: training.scratch(
                config, weights_of(STARTS[s][2]), data[config.sources[0]]
            ),
        )
        for start in config.starts
    }
    apart = {
        how: stage(f"distances, {how}", lambda h=how: training.apart(config, data[h]))
        for how in config.sources
    }
    swept, weights = {}, {}
    for how in config.sources:
        for start in config.starts:
            where = how, start
            name = f"sources by {how}, {start} start"
            swept[where] = stage(
                f"sweep, {name}",
                lambda h=how, s=start: training.sweep(config, weights_of(STARTS[s][:2]), data[h]),
            )
            weights[where] = stage(
                f"weights, {name}",
                lambda h=how, s=start, w=where: training.weights(
                    config, data[h], swept[w]["models"], scratch[s]["model"]
                ),
            )
    return _dataset(config, scratch, apart, swept, weights)


def _dataset(
    config: Config, scratch: Mapping, apart: Mapping, swept: Mapping, weights: Mapping
) -> xr.Dataset:
    gamma, looks = config.gamma(), [config.epoch().tolist().index(n) for n in config.looks]

    def over(fn: Callable[[Sources, Start], Any]) -> np.ndarray:
        return np.array([[fn(how, start) for start in config.starts] for how in config.sources])

    def way(name: str, how: Sources, start: Start) -> np.ndarray:
        if name in DISTANCES:
            return apart[how]["weight"][:, DISTANCES.index(name)]
        return weights[how, start][name]

    places = ("sources", "start")
    found: dict[str, Any] = {
        name: (
            (*places, "seed", "epoch", "gamma"),
            over(lambda h, s, n=name: swept[h, s][n].swapaxes(1, 2)),
        )
        for name in MEASURED
    }
    loss = found["loss"][1][..., looks, :].astype(float)
    best = line.lowest(gamma, loss)
    predicted = over(lambda h, s: [way(name, h, s) for name in PREDICTED])
    where = np.broadcast_to(predicted[..., None], (*predicted.shape, len(looks)))
    several = np.broadcast_to(loss[:, :, None], (*where.shape, len(gamma)))
    per_seed = ("sources", "distance", "pair", "seed")
    found |= {
        **{
            f"scratch_{name}": (
                ("start", "seed", "epoch"),
                np.array([scratch[s][name] for s in config.starts]),
            )
            for name in MEASURED
        },
        "best": ((*places, "seed", "look"), best),
        "predicted": ((*places, "way", "seed"), predicted),
        "excess": (
            (*places, "way", "seed", "look"),
            line.at(gamma, several, where) - loss.min(-1)[:, :, None],
            {"long_name": "loss at the predicted gamma above the lowest", "units": "nats"},
        ),
        "end_excess": (
            (*places, "seed", "look", "end"),
            line.ends(gamma, loss) - loss.min(-1)[..., None],
            {"long_name": "loss at gamma = 0, 1/2, 1 above the lowest", "units": "nats"},
        ),
        "distance_value": (
            per_seed,
            np.array([apart[h]["value"].transpose(1, 2, 0) for h in config.sources]),
        ),
        "distance_error": (
            per_seed,
            np.array([apart[h]["error"].transpose(1, 2, 0) for h in config.sources]),
        ),
    }
    return xr.Dataset(
        found,
        {
            "sources": list(config.sources),
            "start": list(config.starts),
            "way": list(PREDICTED),
            "distance": list(DISTANCES),
            "pair": list(line.PAIRS),
            "seed": np.arange(config.replicates),
            "epoch": config.epoch(),
            "look": list(config.looks),
            "end": list(line.ENDS),
            "gamma": ("gamma", gamma, {"long_name": "weight of the first model", "units": "1"}),
        },
    )


def summary(dataset: xr.Dataset) -> str:
    """Where the best gamma lies, which predictions meet it, and whether the start pays."""
    looks = dataset["look"].values
    cases = {
        f"{h}, {s} start": dataset.sel(sources=h, start=s)
        for h in dataset["sources"].values
        for s in dataset["start"].values
    }
    best = "; ".join(
        f"{name}: " + ", ".join(line.stated_best(one.sel(look=n)) for n in looks)
        for name, one in cases.items()
    )
    known = [(one, n) for one in cases.values() for n in looks if line.is_known(one.sel(look=n))]
    met = ", ".join(
        f"{LABELS[way]} {line.met(known, way)}" for way in dataset["way"].values.astype(str)
    )
    said = {-1: "lower", 0: "undecided", 1: "higher"}
    ahead = "; ".join(
        f"{name}: "
        + ", ".join(
            said[line.decided((one["loss"].min("gamma") - one["scratch_loss"]).sel(epoch=n))]
            for n in looks
        )
        for name, one in cases.items()
    )
    when = ", ".join(map(str, looks))
    return (
        f"Best gamma (weight of theta_1; mean ± s.e. over {dataset.sizes['seed']} seeds) after "
        f"{when} epochs, by sources: {best}. The predicted gamma is within {line.DECIDED:g} s.e. "
        f"of it, among the {len(known)} cases in which it is known to ± {line.SHARP:g}: {met}. "
        f"Training loss from the best start on the line (chosen in hindsight), beside that from "
        f"scratch, after {when} epochs: {ahead}."
    )


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """All against gamma, for each start; the weights; and along training (SAIL, Figs. 8 and 9)."""
    from experiments.proximal import plots

    return plots.spirals(dataset)
