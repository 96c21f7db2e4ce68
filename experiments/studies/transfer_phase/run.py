"""The run of `transfer_phase`: its stages, and the resulting dataset."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import xarray as xr

from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.lab.sweep import over_devices, sweep
from experiments.studies.shared import transfer_regions as regions
from experiments.studies.transfer_phase.config import Config
from experiments.studies.transfer_phase.flowed import flowed
from experiments.studies.transfer_phase.trained import trained
from theory import deep_linear as dl

# The number of points of a closed-form curve.
FINE = 600
QUANTILES = {"low": 0.16, "median": 0.5, "high": 0.84}
# The number of draws between two points at which a run can be resumed.
CHUNK = 5


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Computes transferability in theory and on random data, on one grid of loads and angles.

        T = R_scratch - R_transfer  (eq. 7 of Features are fate)

    Returns a dataset over load (n/d), theta (the angle), sigma (the noise) and, for fine-tuning,
    depth. For each mode, `*_theory` is the closed form and `*_mean` the mean over draws of the
    difference between risks on the same data. `*_std` is its standard deviation. `*_low`,
    `*_median` and `*_high` are quantiles (16, 50 and 84 %), which also exist near n = d, where
    moments do not. `*_curve` are slices along fine curves, `*_zero` the angles at which the closed
    form gains nothing, and `*_region` means over `regions.REGIONS`. `fine_tuning_printed` is eq.
    (17) as printed. The variables of `flowed` are added, and with `config.train` the variables of
    `trained`.
    """
    simulated = simulate(config, stage)
    dataset = _dataset(config, simulated, stage("closed forms", partial(_closed_forms, config)))
    for measured in (flowed, *([trained] if config.train else [])):
        more = measured(config, stage)
        dataset = dataset.merge(more).assign_attrs(more.attrs)
    return dataset


def simulate(config: Config, stage: Stage = direct) -> dict[str, np.ndarray]:
    """Computes the transferability of every draw by the estimators of both methods.

    Args:
      config: The config.
      stage: The stage function, which computes or restores the parts of the run.

    Returns:
      R_scratch - R_transfer of each draw on the same data: "linear" `[draw, load, theta, sigma]`,
      and "fine_tuning" `[draw, load, theta, sigma, depth]`.
    """
    split = jax.random.split(jax.random.key(config.seed), config.draws)
    # Keys are indexed in NumPy, because JAX would compile ten programs for it.
    keys = np.asarray(jax.random.key_data(split))
    gains = over_devices(partial(_gains, config))
    draws = partial(_draws, keys=keys, gains=gains)
    return sweep(draws, np.arange(config.draws), stage, "draws", chunk=CHUNK)


def _draws(
    index: np.ndarray, *, keys: np.ndarray, gains: Callable[[jax.Array], Any]
) -> dict[str, np.ndarray]:
    """Computes the transferability of some draws."""
    with jax.enable_x64(True):
        linear, tuned = gains(jax.random.wrap_key_data(jax.numpy.asarray(keys[index])))
    return {"linear": np.asarray(linear), "fine_tuning": np.asarray(tuned)}


def _gains(config: Config, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws data for each key: transferability by linear transfer, and by fine-tuning."""
    overlaps = dl.simulate_overlaps(keys, config.counts().tolist(), config.d)
    return _differences(overlaps, config.angles(), config.sigmas, config.depths)


@jax.jit
def _differences(overlaps: dl.Overlaps, theta, sigma, depth) -> tuple[jax.Array, jax.Array]:
    """Computes transferability at all angles and noises from the overlaps of each draw."""
    theta, sigma, depth = (jax.numpy.asarray(v, dtype=float) for v in (theta, sigma, depth))

    def at(theta, sigma):
        scratch = overlaps.scratch(theta, sigma)
        tuned = jax.vmap(lambda L: overlaps.fine_tune(theta, sigma, L), out_axes=-1)(depth)
        return scratch - overlaps.linear_transfer(theta, sigma), scratch[..., None] - tuned

    over_sigma = jax.vmap(at, (None, 0), 2)
    return jax.vmap(over_sigma, (0, None), 2)(theta, sigma)


def _closed_forms(config: Config) -> dict[str, np.ndarray]:
    """Computes the closed forms on the grid and along fine curves."""
    curve = np.linspace(3 / config.d, config.load_max, FINE)
    # Between n = d-1 and d+1 the mean is infinite (with noise): leave a gap in the curve.
    curve = curve[np.abs(curve * config.d - config.d) > 1]
    theta = config.angles()
    slices = theta[list(_slice_index(config))]

    # Everything is an argument, because XLA would spend a minute on folding constants.
    @jax.jit
    def evaluate(n, theta, n_curve, slices, sigma, depth):
        def gains(n, theta):
            n, theta = n[:, None, None], theta[:, None]
            tuned = dl.transferability(
                "fine_tuning",
                n=n[..., None],
                d=config.d,
                theta=theta[..., None],
                sigma=sigma[:, None],
                depth=depth,
            )
            return dl.transferability("linear", n=n, d=config.d, theta=theta, sigma=sigma), tuned

        on_grid, on_curve = gains(n, theta), gains(n_curve, slices)
        return {
            "linear_theory": on_grid[0],
            "fine_tuning_theory": on_grid[1],
            "linear_curve": on_curve[0],
            "fine_tuning_curve": on_curve[1],
        }

    with jax.enable_x64(True):
        sigma, depth = np.array(config.sigmas), np.array(config.depths, dtype=float)
        n, n_curve = config.counts().astype(float), curve * config.d
        curves = evaluate(n, theta, n_curve, slices, sigma, depth)
        most = config.load_max
        lines = {
            "linear": regions.zero("linear", config.d, sigma, most=most),
            "fine_tuning": regions.zero("fine_tuning", config.d, sigma[:, None], depth, most=most),
        }
    out = {"curve": curve} | {name: np.asarray(value) for name, value in curves.items()}
    for mode, (load, angle) in lines.items():
        out |= {f"{mode}_line": load, f"{mode}_zero": angle}
    return out


def _slice_index(config: Config) -> tuple[int, ...]:
    """Returns the angles of the grid closest to 1/4, 1/2 and 3/4 of the range."""
    return tuple(round(k * (config.thetas - 1) / 4) for k in (1, 2, 3))


def _printed(config: Config) -> np.ndarray:
    """Computes eq. (17) as printed, [load, theta]: (1 - load)(2 cos theta - 1), 0 from n = d."""
    unseen = np.maximum(1 - config.counts() / config.d, 0.0)
    return np.multiply.outer(unseen, 2 * np.cos(config.angles()) - 1)


def _regions(config: Config, mode: str, theory: np.ndarray) -> np.ndarray:
    """Returns the regions of the grid; the corrected formula of the paper is eq. (17)."""
    rest = [1] * (theory.ndim - 2)
    far = (np.abs(config.counts() - config.d) >= regions.FAR).reshape(-1, 1, *rest)
    eq_17 = _printed(config)
    printed = eq_17.reshape(*eq_17.shape, *rest) if mode == "fine_tuning" else np.nan
    return regions.split(theory, far, printed)


def _dataset(config: Config, simulated: Mapping, theory: Mapping) -> xr.Dataset:
    """Creates the dataset of theory and of the draws' results."""
    n = config.counts()
    grid = ("load", "theta", "sigma")
    data: dict[str, Any] = {"n": ("load", n, {"long_name": "target samples"})}
    for mode in config.modes:
        dims = grid if mode == "linear" else (*grid, "depth")
        data[f"{mode}_theory"] = (dims, theory[f"{mode}_theory"])
        data[f"{mode}_mean"] = (dims, simulated[mode].mean(axis=0))
        data[f"{mode}_std"] = (dims, simulated[mode].std(axis=0, ddof=1))
        data[f"{mode}_curve"] = (("curve", "slice", *dims[2:]), theory[f"{mode}_curve"])
        data[f"{mode}_zero"] = ((f"{mode}_line", *dims[2:]), theory[f"{mode}_zero"])
        for name, share in QUANTILES.items():
            data[f"{mode}_{name}"] = (dims, np.quantile(simulated[mode], share, axis=0))
        parts = _regions(config, mode, theory[f"{mode}_theory"])
        data[f"{mode}_region"] = (
            ("region", "draw", *dims[2:]),
            regions.means(simulated[mode], parts),
        )
        of_theory = regions.means(theory[f"{mode}_theory"][None], parts)[:, 0]
        data[f"{mode}_region_theory"] = (("region", *dims[2:]), of_theory)
    if "fine_tuning" in config.modes:
        data["fine_tuning_printed"] = (("load", "theta"), _printed(config))
    angles = config.angles()
    coords = {
        "load": ("load", n / config.d, {"long_name": "load n/d", "units": "1"}),
        "theta": ("theta", angles, {"long_name": "source-target angle", "units": "rad"}),
        "sigma": ("sigma", list(config.sigmas), {"long_name": "noise standard deviation"}),
        "depth": ("depth", list(config.depths), {"long_name": "layers"}),
        "curve": ("curve", theory["curve"], {"long_name": "load n/d", "units": "1"}),
        "slice": ("slice", angles[list(_slice_index(config))], {"units": "rad"}),
        "region": list(regions.REGIONS),
    }
    for mode in config.modes:
        coords[f"{mode}_line"] = (f"{mode}_line", theory[f"{mode}_line"], {"long_name": "load n/d"})
    about = {"draws": config.draws, "d": config.d}
    limits = {} if config.limits is None else {"limits": config.limits}
    return xr.Dataset(data, coords, about | limits)
