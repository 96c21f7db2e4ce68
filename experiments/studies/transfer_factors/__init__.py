"""What else decides transfer? Spectrum of the inputs, training time, size of the source data.

Phase diagrams over the load gamma = n/d and one more factor, at a fixed angle between the tasks,
past what features-are-fate (arXiv 2410.08194) could draw:

  spectrum  inputs with power-law eigenvalues i^-value; deterministic equivalents
  time      training stopped at t = value; the two-point equivalent (one layer)
  source    pretraining on value * d samples; limits of the law of the fitted source

Theory beside a simulation of the same data. Preset `early_stopping` asks what stopping does to
fine-tuned two-layer networks near n = d, where the paper's own points are not converged: theory
there is the limit t -> inf alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import pi
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lab import validate
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.lab.sweep import over_devices, sweep
from theory import deep_linear as dl
from theory.deep_linear import covariance, training_time

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

Factor = Literal["spectrum", "time", "source"]
WAYS = ("scratch", "linear", "fine_tune")
CHUNK = 2  # draws between two points at which a run can be resumed


@dataclass(frozen=True)
class Config:
    """Loads x values of one factor, at one angle and noise."""

    factor: Factor = "spectrum"
    """What varies besides the load."""
    values: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0)
    """Its values: exponents >= 0, times >= 0 (inf allowed), or source loads > 0 (inf allowed)."""
    theta: float = pi / 4
    """Angle between the tasks in the inner product of the inputs, in radians."""
    sigma: float = 0.3
    """Standard deviation of the label noise, of source and target data."""
    depth: int = 2
    """Layers of the fine-tuned network."""
    d: int = 160
    """Input dimension."""
    draws: int = 20
    """Independent data sets per point."""
    gammas: int = 16
    """Number of loads gamma = n/d, evenly spaced midpoints of (gamma_min, gamma_max)."""
    gamma_min: float = 0.0
    """Lower end of the loads."""
    gamma_max: float = 2.0
    """Upper end of the loads."""
    seed: int = 0
    """Seed of the tasks and of the simulated data sets."""

    def __post_init__(self):
        validate.at_least(self, d=4, draws=2, gammas=2, depth=1)
        validate.positive(self, "sigma", zero=True)
        allowed = {
            "spectrum": ("finite exponents >= 0", lambda v: 0 <= v < np.inf),
            "time": ("times >= 0", lambda v: v >= 0),
            "source": ("loads > 0", lambda v: v > 0),
        }
        if self.factor not in allowed:
            raise ValueError(f"factor must be one of {', '.join(allowed)}; got {self.factor!r}")
        words, ok = allowed[self.factor]
        ascending = all(a < b for a, b in zip(self.values, self.values[1:], strict=False))
        if not self.values or not all(map(ok, self.values)) or not ascending:
            raise ValueError(f"values must be ascending {words}; got {self.values}")
        if not 0 <= self.theta <= pi:
            raise ValueError(f"theta must be an angle in [0, pi]; got {self.theta}")
        if not 0 <= self.gamma_min < self.gamma_max < np.inf:
            raise ValueError(
                f"need 0 <= gamma_min < gamma_max; got {self.gamma_min} and {self.gamma_max}"
            )
        n = self.counts()
        if n[0] <= 2 or len(np.unique(n)) < len(n):
            raise ValueError(
                f"loads must give different n >= 3; got {n.tolist()}: raise d or lower gammas"
            )
        if (near := n[np.abs(n - self.d) <= 1]).size:
            raise ValueError(
                f"n = {near[0]} is within 1 of d = {self.d}, where the mean risk is infinite: "
                "change gammas, gamma_min or gamma_max"
            )

    def counts(self) -> np.ndarray:
        """Samples n at each load."""
        share = (np.arange(self.gammas) + 0.5) / self.gammas
        load = self.gamma_min + share * (self.gamma_max - self.gamma_min)
        return np.round(load * self.d).astype(int)

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        return cls(values=(0.0, 1.0), d=16, draws=4, gammas=4)


TIMES = (1.0, 3.0, 10.0, 30.0, 100.0, 1000.0, np.inf)
SOURCES = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0, np.inf)

PRESETS: dict[str, Callable[[], Config]] = {
    "default": Config,
    "spectrum": Config,
    "time": partial(Config, factor="time", values=TIMES, depth=1),
    "source": partial(Config, factor="source", values=SOURCES),
    "early_stopping": partial(
        Config,
        factor="time",
        values=(30.0, 100.0, 1000.0, np.inf),
        theta=pi / 8,
        sigma=0.2,
        gamma_min=0.7,
        gamma_max=1.3,
    ),
    "tiny": Config.tiny,
}


def run(config: Config, stage: Stage = direct) -> "xr.Dataset":
    """Risks of scratch training, linear transfer and fine-tuning over (value, gamma), and the
    transferability R_scratch - R_method of the last two; quantiles are 16, 50 and 84 %."""
    import xarray as xr

    keys = jax.random.split(jax.random.key(config.seed), config.draws + 1)
    theory = stage("theory", lambda: _theory(config, keys[0]))["risk"]
    simulate = over_devices(partial(_simulate, config))
    draws = partial(_draws, config=config, keys=keys, simulate=simulate)
    found = sweep(draws, np.arange(config.draws) + 1, stage, "draws", chunk=CHUNK)["risk"]
    grid = ("way", "value", "gamma")
    data: dict[str, Any] = {
        "risk_theory": (grid, theory),
        "risk_mean": (grid, found.mean(0)),
        "risk_std": (grid, found.std(0, ddof=1)),
        "n": ("gamma", config.counts(), {"long_name": "target samples"}),
    }
    shares = {"low": 0.16, "median": 0.5, "high": 0.84}
    for i, mode in enumerate(WAYS[1:], 1):
        gain = found[:, 0] - found[:, i]
        data[f"{mode}_theory"] = (grid[1:], theory[0] - theory[i])
        data[f"{mode}_mean"] = (grid[1:], gain.mean(0))
        data[f"{mode}_std"] = (grid[1:], gain.std(0, ddof=1))
        for name, share in shares.items():
            data[f"{mode}_{name}"] = (grid[1:], np.quantile(gain, share, axis=0))
    coords = {
        "way": list(WAYS),
        "value": ("value", list(config.values), {"long_name": config.factor}),
        "gamma": ("gamma", config.counts() / config.d, {"long_name": "load n/d", "units": "1"}),
    }
    about = {name: getattr(config, name) for name in ("d", "draws", "depth", "sigma", "theta")}
    return xr.Dataset(data, coords, {**about, "factor": config.factor})


def _tasks(key: jax.Array, s: jax.Array, theta: float) -> tuple[jax.Array, jax.Array]:
    """Source and target with weight on all directions, unit norm and angle theta in Sigma's inner
    product."""
    source, other = jax.random.normal(key, (2, s.size))

    def unit(v: jax.Array) -> jax.Array:
        return v / jnp.sqrt(jnp.sum(s * v**2))

    source = unit(source)
    other = unit(other - jnp.sum(s * other * source) * source)
    return source, jnp.cos(theta) * source + jnp.sin(theta) * other


def _spectra(config: Config) -> jax.Array:
    """Eigenvalues [value or 1, d]: white except where the spectrum varies."""
    exponents = config.values if config.factor == "spectrum" else (0.0,)
    return jnp.stack([covariance.power_law(config.d, a) for a in exponents])


def _theory(config: Config, key: jax.Array) -> dict[str, jax.Array]:
    """Expected risks [method, value, gamma]; NaN where there is no theory."""
    with jax.enable_x64(True):
        n = jnp.asarray(config.counts(), dtype=float)
        gamma, theta, sigma = n / config.d, config.theta, config.sigma
        values, depth = jnp.asarray(config.values), config.depth
        flat = jnp.ones((values.size, 1))
        if config.factor == "source":
            source = dl.source_limit(values[:, None], theta, sigma)
            gain = dl.transferability(
                "fine_tune", n, config.d, source.theta, sigma, depth=depth, size=source.size
            )
            scratch = dl.scratch_risk(n, config.d, sigma) * flat
            linear = dl.linear_transfer_risk(n, source.theta, sigma)
            return {"risk": jnp.stack([scratch, linear, scratch - gain])}
        spectra, rows = _spectra(config), []
        for i in range(values.size):
            s = spectra[min(i, len(spectra) - 1)]
            a, b = _tasks(key, s, theta)
            time = values[i] if config.factor == "time" else jnp.inf
            if jnp.isinf(time):
                scratch = covariance.scratch_risk(s, b, n, sigma)
                linear = covariance.linear_transfer_risk(s, a, b, n, sigma)
                tuned = covariance.fine_tune_risk(s, a, b, n, sigma, depth)
            else:
                at = partial(
                    training_time.flow_risk, s, n=n, sigma=sigma, times=jnp.atleast_1d(time)
                )
                linear = training_time.linear_transfer_flow_risk(n, theta, sigma, time)
                nothing = jnp.full_like(gamma, jnp.nan)
                scratch = at(offset=b)[:, 0] if depth == 1 else nothing
                tuned = at(offset=b - a)[:, 0] if depth == 1 else nothing
            rows.append(jnp.stack([scratch, linear, tuned]))
        return {"risk": jnp.stack(rows, axis=1)}


def _draws(
    index: np.ndarray, *, config: Config, keys: jax.Array, simulate: Callable[..., jax.Array]
) -> dict[str, np.ndarray]:
    """Risks [draw, method, value, gamma] of these draws."""
    with jax.enable_x64(True):
        n = jnp.asarray(config.counts())
        found = simulate(keys[index], keys[0], n, _spectra(config))
    return {"risk": np.asarray(found)}


@partial(jax.jit, static_argnums=0)
def _simulate(config: Config, keys: jax.Array, key: jax.Array, ns: jax.Array, spectra: jax.Array):
    most = int(config.counts().max())
    sigma, depth, d = config.sigma, config.depth, config.d

    def data(key: jax.Array, n: jax.Array, s: jax.Array, beta: jax.Array, rows: int = most):
        """n samples in an array of `rows` rows, so that every load has one shape: the others are 0,
        and the scale makes X^T X / rows what X^T X / n is."""
        scale = jnp.where(jnp.arange(rows) < n, jnp.sqrt(rows / n), 0.0)
        x = jax.random.normal(key, (rows, d)) * jnp.sqrt(s) * scale[:, None]
        noise = jax.random.normal(jax.random.fold_in(key, 1), (rows,)) * scale
        return x, x @ beta + sigma * noise

    def risks(s: jax.Array, beta_t: jax.Array, fits: list[jax.Array]) -> jax.Array:
        return jnp.stack([jnp.sum(s * (fit - beta_t) ** 2, axis=-1) for fit in fits])

    def spectrum(key: jax.Array, n: jax.Array) -> jax.Array:
        def one(s: jax.Array) -> jax.Array:
            beta_s, beta_t = _tasks(key_tasks, s, config.theta)
            x, y = data(key, n, s, beta_t)
            fits = [
                dl.scratch_fit(x, y),
                dl.linear_transfer_fit(x, y, beta_s),
                dl.fine_tune_limit(x, y, beta_s, depth),
            ]
            return risks(s, beta_t, fits)

        return jnp.moveaxis(jax.lax.map(one, spectra), 0, 1)

    def time(key: jax.Array, n: jax.Array) -> jax.Array:
        s, times = spectra[0], jnp.array(config.values)
        beta_s, beta_t = _tasks(key_tasks, s, config.theta)
        x, y = data(key, n, s, beta_t)
        # Linear transfer is regression on one feature, of unit second moment.
        feature = (x @ beta_s)[:, None]
        linear = dl.linear_flow(feature, y, jnp.zeros(1), times) * beta_s
        if depth == 1:
            tuned = dl.linear_flow(x, y, beta_s, times)
            return risks(s, beta_t, [dl.linear_flow(x, y, 0 * beta_s, times), linear, tuned])
        finite = [t for t in config.values if t < np.inf]
        tuned = dl.fine_tune_flow(x, y, beta_s, finite, depth) if finite else jnp.zeros((0, d))
        if len(finite) < times.size:
            limit = dl.fine_tune_limit(x, y, beta_s, depth)
            tuned = jnp.concatenate([tuned, limit[None]])
        # Small weights take a time of log(1/alpha) to leave 0: deep scratch training is not timed.
        scratch = jnp.broadcast_to(dl.scratch_fit(x, y), tuned.shape)
        return risks(s, beta_t, [scratch, linear, tuned])

    def source(key: jax.Array, n: jax.Array) -> jax.Array:
        s = spectra[0]
        beta_s, beta_t = _tasks(key_tasks, s, config.theta)
        x, y = data(key, n, s, beta_t)
        scratch = dl.scratch_fit(x, y)
        rows = np.array([min(load, 1e6) * d for load in config.values])

        def one(value: tuple[jax.Array, jax.Array]) -> jax.Array:
            """`data` again, for the source task: as many rows for every load, in turn."""
            i, n_s = value
            z, labels = data(jax.random.fold_in(key, i + 2), n_s, s, beta_s, limit)
            learned = jnp.where(n_s > limit, beta_s, dl.scratch_fit(z, labels))
            linear = dl.linear_transfer_fit(x, y, learned)
            tuned = dl.fine_tune_limit(x, y, learned, depth)
            return risks(s, beta_t, [scratch, linear, tuned])

        limit = int(np.ceil(rows[np.isfinite(config.values)].max(initial=d)))
        values = (jnp.arange(rows.size), jnp.asarray(rows))
        return jnp.moveaxis(jax.lax.map(one, values), 0, 1)

    key_tasks = key
    one = {"spectrum": spectrum, "time": time, "source": source}[config.factor]

    def draw(key: jax.Array) -> jax.Array:
        over_loads = lambda n: one(jax.random.fold_in(key, n), n)  # noqa: E731
        return jnp.moveaxis(jax.lax.map(over_loads, ns, batch_size=4), 0, -1)

    return jax.lax.map(draw, keys)


def plot(dataset: "xr.Dataset") -> "dict[str, Figure]":
    """The diagram of both ways of transfer where there is a theory of it; fine-tuned risks against
    the load where training was stopped."""
    from experiments.studies.transfer_phase import plots

    figures = {}
    if not bool(np.isnan(dataset.fine_tune_theory).any()):
        figures[f"transfer_by_{dataset.attrs['factor']}"] = plots.by_factor(dataset)
    if dataset.attrs["factor"] == "time":
        figures["stopped"] = plots.stopped(dataset)
    return figures


def summary(dataset: "xr.Dataset") -> str:
    """Agreement of theory and simulation, and what the factor does."""
    factor, sentences = dataset.attrs["factor"], []
    names = {"linear": "Linear transfer", "fine_tune": "Fine-tuning"}
    for mode, name in names.items():
        theory, mean = dataset[f"{mode}_theory"].values, dataset[f"{mode}_mean"].values
        z = (mean - theory) / (dataset[f"{mode}_std"].values / np.sqrt(dataset.attrs["draws"]))
        hurts = {
            float(value): f"{np.mean(row < -1e-9):.0%} of the loads at {factor} {value:g}"
            for value, row in zip(dataset.value.values, theory, strict=True)
            if np.isfinite(row).all()
        }
        ends = " and ".join(dict.fromkeys([*hurts.values()][i] for i in (0, -1)))
        z = np.abs(z[np.isfinite(z)])
        sentences.append(
            f"{name} hurts at {ends}; median |z| of simulation against theory {np.median(z):.2f}."
        )
    if factor == "time" and np.isinf(dataset.value[-1]) and dataset.sizes["value"] > 1:
        nearest = int(np.abs(dataset.gamma.values - 1).argmin())
        risk = dataset.risk_mean.sel(way="fine_tune").isel(gamma=nearest).values
        stopped = ", ".join(
            f"{r / risk[-1]:.0%} at t = {t:g}"
            for t, r in zip(dataset.value.values[:-1], risk[:-1], strict=True)
        )
        sentences.append(
            f"Nearest to n = d (γ = {float(dataset.gamma[nearest]):.2f}) stopping leaves this much "
            f"of the risk of training to the end: {stopped}."
        )
    return " ".join(sentences)
