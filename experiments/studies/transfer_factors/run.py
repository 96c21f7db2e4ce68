"""The run of `transfer_factors`: its stages, and the resulting dataset."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from experiments.lab.config import picked
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.lab.sweep import over_devices, sweep
from experiments.studies.shared import transfer_regions as regions
from experiments.studies.transfer_factors.config import Config
from theory import deep_linear as dl
from theory.deep_linear import covariance, training_time

WAYS = ("scratch", "linear", "fine_tuning")
# The number of draws between two points at which a run can be resumed.
CHUNK = 2


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Computes risks of training from scratch and of transfer, in theory and by simulation.

    Returns a dataset over way ("scratch", "linear", "fine_tuning"), value (of the factor) and load
    (n/d). `risk_*` are risks. `linear_*` and `fine_tuning_*` are transferabilities R_scratch -
    R_transfer: theory, mean and standard deviation over draws, and the 16, 50 and 84 % quantiles.
    `*_region` are means over `regions.REGIONS`, and `risk_near` is the risk of fine-tuning at the
    load closest to 1, draw by draw.
    """
    keys = jax.random.split(jax.random.key(config.seed), config.draws + 1)
    theory = stage("theory", lambda: _theory(config, keys[0]))["risk"]
    simulate = over_devices(partial(_simulate, config))
    draws = partial(_draws, config=config, keys=keys, simulate=simulate)
    risks = sweep(draws, np.arange(config.draws) + 1, stage, "draws", chunk=CHUNK)["risk"]
    grid = ("way", "value", "load")
    data: dict[str, Any] = {
        "risk_theory": (grid, theory),
        "risk_mean": (grid, risks.mean(0)),
        "risk_std": (grid, risks.std(0, ddof=1)),
        "n": ("load", config.counts(), {"long_name": "target samples"}),
    }
    shares = {"low": 0.16, "median": 0.5, "high": 0.84}
    for i, mode in enumerate(WAYS[1:], 1):
        gain = risks[:, 0] - risks[:, i]
        data[f"{mode}_theory"] = (grid[1:], theory[0] - theory[i])
        data[f"{mode}_mean"] = (grid[1:], gain.mean(0))
        data[f"{mode}_std"] = (grid[1:], gain.std(0, ddof=1))
        for name, share in shares.items():
            data[f"{mode}_{name}"] = (grid[1:], np.quantile(gain, share, axis=0))
        expected = theory[0] - theory[i]
        parts = regions.split(expected, np.abs(config.counts() - config.d) >= regions.FAR)
        data[f"{mode}_region"] = (("region", "draw"), regions.means(gain, parts))
        data[f"{mode}_region_theory"] = ("region", regions.means(expected[None], parts)[:, 0])
    nearest = np.abs(config.counts() - config.d).argmin()
    data["risk_near"] = (("draw", "value"), risks[:, WAYS.index("fine_tuning"), :, nearest])
    coords = {
        "way": list(WAYS),
        "region": list(regions.REGIONS),
        "value": ("value", list(config.values), {"long_name": config.factor}),
        "load": ("load", config.counts() / config.d, {"long_name": "load n/d", "units": "1"}),
    }
    about = picked(config, "d", "draws", "depth", "sigma", "theta", "factor")
    return xr.Dataset(data, coords, about)


@jax.jit
def _tasks(key: jax.Array, s: jax.Array, theta: float) -> tuple[jax.Array, jax.Array]:
    """Draws source and target, with components in all directions.

    In the inner product of the covariance diag(s) they have norm 1 and angle theta.
    """
    source, other = jax.random.normal(key, (2, s.size))

    def unit(v: jax.Array) -> jax.Array:
        return v / jnp.sqrt(jnp.sum(s * v**2))

    source = unit(source)
    other = unit(other - jnp.sum(s * other * source) * source)
    return source, jnp.cos(theta) * source + jnp.sin(theta) * other


def _spectra(config: Config) -> jax.Array:
    """Returns eigenvalues [value or 1, d], all equal to 1 unless the spectrum varies."""
    exponents = config.values if config.factor == "spectrum" else (0.0,)
    return jnp.stack([covariance.power_law(config.d, a) for a in exponents])


def _theory(config: Config, key: jax.Array) -> dict[str, jax.Array]:
    """Computes expected risks [way, value, load]; NaN without a theory."""
    with jax.enable_x64(True):
        n = jnp.asarray(config.counts(), dtype=float)
        load, theta, sigma = n / config.d, config.theta, config.sigma
        values, depth = jnp.asarray(config.values), config.depth
        flat = jnp.ones((values.size, 1))
        if config.factor == "source":
            source = dl.source_limit(load=values[:, None], theta=theta, sigma=sigma)
            gain = dl.transferability(
                "fine_tuning",
                n=n,
                d=config.d,
                theta=source.theta,
                sigma=sigma,
                depth=depth,
                size=source.size,
            )
            scratch = dl.scratch_risk(n=n, d=config.d, sigma=sigma) * flat
            linear = dl.linear_transfer_risk(n=n, theta=source.theta, sigma=sigma)
            return {"risk": jnp.stack([scratch, linear, scratch - gain])}
        spectra, rows = _spectra(config), []
        for i in range(values.size):
            s = spectra[min(i, len(spectra) - 1)]
            a, b = _tasks(key, s, theta)
            time = values[i] if config.factor == "time" else jnp.inf
            if np.isinf(time):
                scratch, linear, tuned = _converged(s, a, b, n, sigma, depth)
            else:
                at = partial(
                    training_time.flow_risk, s, n=n, sigma=sigma, times=jnp.atleast_1d(time)
                )
                linear = training_time.linear_transfer_flow_risk(
                    n=n, theta=theta, sigma=sigma, times=time
                )
                nothing = jnp.full_like(load, jnp.nan)
                scratch = at(offset=b)[:, 0] if depth == 1 else nothing
                tuned = at(offset=b - a)[:, 0] if depth == 1 else nothing
            rows.append(jnp.stack([scratch, linear, tuned]))
        return {"risk": jnp.stack(rows, axis=1)}


@partial(jax.jit, static_argnums=5)
def _converged(
    s: jax.Array, a: jax.Array, b: jax.Array, n: jax.Array, sigma: float, depth: float
) -> tuple[jax.Array, ...]:
    """Computes the risks of converged training: from scratch, by transfer, by fine-tuning."""
    return (
        covariance.scratch_risk(s, b, n=n, sigma=sigma),
        covariance.linear_transfer_risk(s, a, b, n=n, sigma=sigma),
        covariance.fine_tuning_risk(s, a, b, n=n, sigma=sigma, depth=depth),
    )


def _draws(
    index: np.ndarray, *, config: Config, keys: jax.Array, simulate: Callable[..., jax.Array]
) -> dict[str, np.ndarray]:
    """Simulates the risks [draw, way, value, load] of some draws."""
    with jax.enable_x64(True):
        n = jnp.asarray(config.counts())
        risks = simulate(keys[index], keys[0], n, _spectra(config))
    return {"risk": np.asarray(risks)}


@partial(jax.jit, static_argnums=0)
def _simulate(config: Config, keys: jax.Array, key: jax.Array, ns: jax.Array, spectra: jax.Array):
    """Simulates the risks [draw, way, value, load] of one draw for each key.

    `key` is the key of the tasks, which all draws share.
    """
    most = int(config.counts().max())
    sigma, depth, d = config.sigma, config.depth, config.d

    def data(key: jax.Array, n: jax.Array, s: jax.Array, beta: jax.Array, rows: int = most):
        """Draws n samples in an array of `rows` rows, so that every load has the same shape.

        The other rows are 0. The scale makes X^T X / rows equal to the usual X^T X / n.
        """
        scale = jnp.where(jnp.arange(rows) < n, jnp.sqrt(rows / n), 0.0)
        x = jax.random.normal(key, (rows, d)) * jnp.sqrt(s) * scale[:, None]
        noise = jax.random.normal(jax.random.fold_in(key, 1), (rows,)) * scale
        return x, x @ beta + sigma * noise

    def risks(s: jax.Array, beta_t: jax.Array, fits: list[jax.Array]) -> jax.Array:
        return jnp.stack([jnp.sum(s * (fit - beta_t) ** 2, axis=-1) for fit in fits])

    def spectrum(key: jax.Array, n: jax.Array) -> jax.Array:
        def of_spectrum(s: jax.Array) -> jax.Array:
            beta_s, beta_t = _tasks(key_tasks, s, config.theta)
            x, y = data(key, n, s, beta_t)
            fits = [
                dl.scratch_fit(x, y),
                dl.linear_transfer_fit(x, y, beta_s),
                dl.fine_tuning_limit(x, y, beta_s, depth),
            ]
            return risks(s, beta_t, fits)

        return jnp.moveaxis(jax.lax.map(of_spectrum, spectra), 0, 1)

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
        tuned = dl.fine_tuning_flow(x, y, beta_s, finite, depth) if finite else jnp.zeros((0, d))
        if len(finite) < times.size:
            limit = dl.fine_tuning_limit(x, y, beta_s, depth)
            tuned = jnp.concatenate([tuned, limit[None]])
        # Small weights need a time of log(1/alpha) to leave 0, so deep scratch training is not
        # timed.
        scratch = jnp.broadcast_to(dl.scratch_fit(x, y), tuned.shape)
        return risks(s, beta_t, [scratch, linear, tuned])

    def source(key: jax.Array, n: jax.Array) -> jax.Array:
        s = spectra[0]
        beta_s, beta_t = _tasks(key_tasks, s, config.theta)
        x, y = data(key, n, s, beta_t)
        scratch = dl.scratch_fit(x, y)
        # An infinite load means the population: the fit is the source task itself. Its number of
        # rows exceeds `limit`, which `of_value` uses to recognise it.
        rows = np.array([min(load, 1e6) * d for load in config.values])

        def of_value(value: tuple[jax.Array, jax.Array]) -> jax.Array:
            """Calls `data` for the source task: the same number of rows for every load, in turn."""
            i, n_s = value
            # From 2 on, because the target's noise has folded 1 into the same key.
            z, labels = data(jax.random.fold_in(key, i + 2), n_s, s, beta_s, limit)
            learned = jnp.where(n_s > limit, beta_s, dl.scratch_fit(z, labels))
            linear = dl.linear_transfer_fit(x, y, learned)
            tuned = dl.fine_tuning_limit(x, y, learned, depth)
            return risks(s, beta_t, [scratch, linear, tuned])

        limit = int(np.ceil(rows[np.isfinite(config.values)].max(initial=d)))
        values = (jnp.arange(rows.size), jnp.asarray(rows))
        return jnp.moveaxis(jax.lax.map(of_value, values), 0, 1)

    key_tasks = key
    at_load = {"spectrum": spectrum, "time": time, "source": source}[config.factor]

    def draw(key: jax.Array) -> jax.Array:
        over_loads = lambda n: at_load(jax.random.fold_in(key, n), n)  # noqa: E731
        return jnp.moveaxis(jax.lax.map(over_loads, ns, batch_size=4), 0, -1)

    return jax.lax.map(draw, keys)
