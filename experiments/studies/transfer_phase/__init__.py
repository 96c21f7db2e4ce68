"""When does transfer beat training from scratch? Phase diagrams over load and angle.

Figures 1, 3, 6 and 7 of features-are-fate (arXiv 2410.08194): transferability of linear transfer
and of fine-tuning over (gamma = n/d, theta), closed form beside simulation, with the line on which
transfer neither helps nor hurts (in the limit n, d -> inf). Linear transfer: exact at finite n and
d. Fine-tuning: the limit, with the depth- and noise-dependent correction of Thm 3.9. Past the
figures: the diagram for every depth from 1 to infinity, and for noise from none to as much as
signal.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import pi
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from experiments.lab import validate
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.lab.sweep import over_devices, sweep
from theory import deep_linear as dl

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

FINE = 600  # points of a closed-form curve
QUANTILES = {"low": 0.16, "median": 0.5, "high": 0.84}
CHUNK = 5  # draws between two points at which a run can be resumed


@dataclass(frozen=True)
class Config:
    """Target data sets of n = gamma d samples in d dimensions, from a source at angle theta."""

    d: int = 500
    """Input dimension."""
    draws: int = 20
    """Independent target data sets per point."""
    gammas: int = 40
    """Number of loads gamma = n/d, evenly spaced midpoints of (0, gamma_max)."""
    gamma_max: float = 2.0
    """Largest load."""
    thetas: int = 41
    """Number of angles from 0 to pi/2; 8 k + 1 puts the slices on the grid."""
    sigmas: tuple[float, ...] = (0.0, 0.2)
    """Standard deviations of the label noise."""
    depths: tuple[float, ...] = (1, 2, 4)
    """Numbers of layers of the fine-tuned network; inf is allowed."""
    modes: tuple[Literal["linear", "fine_tune"], ...] = ("linear", "fine_tune")
    """Ways of transfer to show."""
    seed: int = 0
    """Seed of the simulated data sets."""

    def __post_init__(self):
        validate.at_least(self, d=4, draws=2, gammas=2, thetas=9)
        validate.positive(self, "gamma_max")
        validate.positive(self, "sigmas", zero=True)
        validate.different(self, "sigmas", "depths", "modes")
        if self.thetas % 8 != 1:
            raise ValueError(f"thetas must be 8 k + 1 (9, 17, ..., 41, ...); got {self.thetas}")
        if not all(depth >= 1 for depth in self.depths):
            raise ValueError(f"depths must be at least 1; got {self.depths}")
        if not set(self.modes) <= {"linear", "fine_tune"}:
            raise ValueError(f"modes must be linear or fine_tune, or both; got {self.modes}")
        n = self.counts()
        if n[0] <= 2:
            raise ValueError(
                f"the smallest load gives n = {n[0]} samples; linear transfer has a finite mean "
                "from n = 3 on: raise d or gamma_max, or lower gammas"
            )
        if len(np.unique(n)) < len(n):
            raise ValueError(
                f"{self.gammas} loads up to {self.gamma_max} coincide at d = {self.d}; raise d or "
                "lower gammas"
            )
        if max(self.sigmas) > 0 and (near := n[np.abs(n - self.d) <= 1]).size:
            raise ValueError(
                f"n = {near[0]} is within 1 of d = {self.d}, where the mean risk is infinite for "
                "sigma > 0: change gammas or gamma_max"
            )

    def counts(self) -> np.ndarray:
        """Samples n at each load."""
        midpoints = (np.arange(self.gammas) + 0.5) / self.gammas * self.gamma_max
        return np.round(midpoints * self.d).astype(int)

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        return cls(d=24, draws=4, gammas=8, thetas=9, depths=(1, 2))

    @classmethod
    def quick(cls) -> "Config":
        """A coarser diagram in a smaller dimension."""
        return cls(d=200, draws=10, gammas=20, thetas=25)


# The paper's figures; figure 7 is figure 6 beside its simulation, which ours always shows.
_NOISELESS = partial(Config, sigmas=(0.0,), modes=("linear",))

PRESETS: dict[str, Callable[[], Config]] = {
    "default": Config,
    "figure_1": partial(Config, sigmas=(0.2,), modes=("linear",)),
    "figure_3": partial(Config, sigmas=(0.2,), modes=("fine_tune",), depths=(2,)),
    "figure_6": _NOISELESS,
    "figure_7": _NOISELESS,
    "depth": partial(
        Config, sigmas=(0.5,), modes=("fine_tune",), depths=(1, 2, 3, 4, np.inf), gamma_max=1.2
    ),
    "noise": partial(Config, sigmas=(0.0, 0.2, 0.5, 1.0), depths=(2,)),
    "quick": Config.quick,
    "tiny": Config.tiny,
}


def run(config: Config, stage: Stage = direct) -> "xr.Dataset":
    """Transferability (eq. 7) in theory and in simulation on one grid.

    Simulated values are means over draws of the paired difference R_sc - R_tx; `*_std` is their
    standard deviation over draws, `*_low`, `*_median` and `*_high` are quantiles (16, 50, 84 %),
    which exist where moments do not: near n = d.
    """
    found = simulate(config, stage)
    return _dataset(config, found, stage("closed forms", partial(_closed_forms, config)))


def simulate(config: Config, stage: Stage = direct) -> dict[str, np.ndarray]:
    """Paired differences R_sc - R_tx of every draw: arrays [draw, gamma, theta, sigma(, depth)]."""
    keys = jax.random.split(jax.random.key(config.seed), config.draws)
    gains = over_devices(partial(_gains, config))
    draws = partial(_draws, keys=keys, gains=gains)
    return sweep(draws, np.arange(config.draws), stage, "draws", chunk=CHUNK)


def _angles(config: Config) -> np.ndarray:
    return np.linspace(0, pi / 2, config.thetas)


def _draws(
    index: np.ndarray, *, keys: jax.Array, gains: Callable[[jax.Array], Any]
) -> dict[str, np.ndarray]:
    with jax.enable_x64(True):
        linear, tuned = gains(keys[index])
    return {"linear": np.asarray(linear), "fine_tune": np.asarray(tuned)}


def _gains(config: Config, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    overlaps = dl.simulate_overlaps(keys, config.counts().tolist(), config.d)
    return _differences(overlaps, _angles(config), config.sigmas, config.depths)


@jax.jit
def _differences(overlaps: dl.Overlaps, theta, sigma, depth) -> tuple[jax.Array, jax.Array]:
    theta, sigma, depth = (jax.numpy.asarray(v, dtype=float) for v in (theta, sigma, depth))

    def at(theta, sigma):
        scratch = overlaps.scratch(theta, sigma)
        tuned = jax.vmap(lambda L: overlaps.fine_tune(theta, sigma, L), out_axes=-1)(depth)
        return scratch - overlaps.linear_transfer(theta, sigma), scratch[..., None] - tuned

    over_sigma = jax.vmap(at, (None, 0), 2)
    return jax.vmap(over_sigma, (0, None), 2)(theta, sigma)


def _closed_forms(config: Config) -> dict[str, np.ndarray]:
    """Everything the theory says: on the grid, along fine curves, and the boundaries."""
    curve = np.linspace(3 / config.d, config.gamma_max, FINE)
    # Between n = d-1 and d+1 the mean is infinite (with noise): leave a gap in the curve.
    curve = curve[np.abs(curve * config.d - config.d) > 1]
    below, edge = curve[curve < 1], np.linspace(0, pi / 2, FINE)
    theta = _angles(config)
    slices = theta[list(_slice_index(config))]

    @jax.jit  # everything an argument: XLA would spend a minute folding constants
    def evaluate(n, theta, n_curve, slices, edge, below, sigma, depth):
        def gains(n, theta):
            n, theta = n[:, None, None], theta[:, None]
            tuned = dl.transferability(
                "fine_tune", n[..., None], config.d, theta[..., None], sigma[:, None], depth=depth
            )
            return dl.transferability("linear", n, config.d, theta, sigma), tuned

        on_grid, on_curve = gains(n, theta), gains(n_curve, slices)
        edges = dl.linear_transfer_boundary(edge[:, None], sigma)
        return {
            "linear_theory": on_grid[0],
            "fine_tune_theory": on_grid[1],
            "linear_curve": on_curve[0],
            "fine_tune_curve": on_curve[1],
            "linear_lower": edges.lower,
            "linear_upper": edges.upper,
            "linear_over": edges.over,
            "fine_tune_edge": dl.fine_tune_boundary(below[:, None, None], sigma[:, None], depth),
        }

    with jax.enable_x64(True):
        sigma, depth = np.array(config.sigmas), np.array(config.depths, dtype=float)
        n, n_curve = config.counts().astype(float), curve * config.d
        found = evaluate(n, theta, n_curve, slices, edge, below, sigma, depth)
    coordinates = {"curve": curve, "below": below, "edge": edge}
    return coordinates | {name: np.asarray(value) for name, value in found.items()}


def _slice_index(config: Config) -> tuple[int, ...]:
    """Where pi/8, pi/4 and 3 pi/8 lie on the grid of angles."""
    step = (config.thetas - 1) // 4
    return step, 2 * step, 3 * step


def _dataset(config: Config, found: Mapping, theory: Mapping) -> "xr.Dataset":
    import xarray as xr

    n = config.counts()
    grid = ("gamma", "theta", "sigma")
    data: dict[str, Any] = {"n": ("gamma", n, {"long_name": "target samples"})}
    for mode in config.modes:
        dims = grid if mode == "linear" else (*grid, "depth")
        data[f"{mode}_theory"] = (dims, theory[f"{mode}_theory"])
        data[f"{mode}_mean"] = (dims, found[mode].mean(axis=0))
        data[f"{mode}_std"] = (dims, found[mode].std(axis=0, ddof=1))
        data[f"{mode}_curve"] = (("curve", "slice", *dims[2:]), theory[f"{mode}_curve"])
        for name, share in QUANTILES.items():
            data[f"{mode}_{name}"] = (dims, np.quantile(found[mode], share, axis=0))
    if "linear" in config.modes:
        for edge in ("lower", "upper", "over"):
            data[f"linear_{edge}"] = (("edge", "sigma"), theory[f"linear_{edge}"])
    if "fine_tune" in config.modes:
        data["fine_tune_edge"] = (("below", "sigma", "depth"), theory["fine_tune_edge"])
    angles = _angles(config)
    coords = {
        "gamma": ("gamma", n / config.d, {"long_name": "load n/d", "units": "1"}),
        "theta": ("theta", angles, {"long_name": "source-target angle", "units": "rad"}),
        "sigma": ("sigma", list(config.sigmas), {"long_name": "noise standard deviation"}),
        "depth": ("depth", list(config.depths), {"long_name": "layers"}),
        "curve": ("curve", theory["curve"], {"long_name": "load n/d", "units": "1"}),
        "slice": ("slice", angles[list(_slice_index(config))], {"units": "rad"}),
        "edge": ("edge", theory["edge"], {"long_name": "angle", "units": "rad"}),
        "below": ("below", theory["below"], {"long_name": "load n/d < 1", "units": "1"}),
    }
    return xr.Dataset(data, coords, {"draws": config.draws, "d": config.d})


def plot(dataset: "xr.Dataset") -> "dict[str, Figure]":
    """The diagram of each way of transfer, at the largest noise and without; where several depths
    or noises were asked for, all of them side by side."""
    from experiments.studies.transfer_phase import plots

    return plots.draw(dataset)


def summary(dataset: "xr.Dataset") -> str:
    """How much of the plane transfer hurts, and how well the two sides agree."""
    from experiments.studies.transfer_phase.plots import layers

    sigma = float(dataset.sigma.max())
    depth = 2 if 2 in dataset.depth else float(dataset.depth[-1])
    at = dataset.sel(sigma=sigma)
    names = {"linear": "Linear transfer", "fine_tune": f"Fine-tuning ({layers(depth)})"}
    sentences = []
    for mode, name in names.items():
        if f"{mode}_theory" not in dataset:
            continue
        one = at.sel(depth=depth) if mode == "fine_tune" else at
        theory, mean = one[f"{mode}_theory"].values, one[f"{mode}_mean"].values
        stderr = one[f"{mode}_std"].values / np.sqrt(at.attrs["draws"])
        # From n = d on fine-tuning equals scratch training: no sign there, up to rounding.
        decided = np.abs(theory) > 4 * np.maximum(stderr, 1e-9)
        agree = np.mean(np.sign(theory[decided]) == np.sign(mean[decided]))
        z = (mean - theory)[stderr > 1e-9] / stderr[stderr > 1e-9]
        sentences.append(
            f"{name} hurts in {np.mean(theory < -1e-9):.0%} of the (γ, θ) plane at σ = {sigma:g}; "
            f"where |T| exceeds 4 standard errors, theory and simulation agree on the sign in "
            f"{agree:.1%} of the points, and the median |z| over all points is "
            f"{np.median(np.abs(z)):.2f}."
        )
    return " ".join(sentences)
