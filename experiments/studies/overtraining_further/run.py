"""The run of `overtraining_further`: modes in closed form, and whole matrices."""

from functools import partial
from math import sqrt

import jax
import numpy as np
import xarray as xr

from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.overtraining_further.config import Config
from theory.claims import Estimate
from theory.two_layer import best_time, matrices, modes, perturbation, quantised

# How weights are rounded, and whether the layers share their singular vectors.
WAYS = {"shifted": (True, False), "nearest": (False, False), "mirrored": (False, True)}


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Computes all parts, each by theory and by simulation.

    Returns the dataset. Times are of gradient flow at unit rate; `*_error` are standard errors.
    - `decay_time_theory` and `decay_modes_theory`, `(decay,)`: the best time to stop, and the
      number of modes worth learning. `decay_time`, `decay_time_error` and `decay_modes`,
      `(cell_decay,)`: the same by simulation.
    - `bits_time_theory`, `(law, real_bits)`: the best time for independent and for mirrored errors.
      `bits_time` and `bits_time_error`, `(way, bits)`: by simulation.
    - `rise` and `rise_error`, `(way, shown_bits, time)`: by how much rounding raises the loss, in
      units of what independent uniform errors would.
    """
    data = {
        **stage("decay, theory", partial(_decay_theory, config)),
        **stage("decay, networks", partial(_decay, config)),
        **stage("bits, theory", partial(_bits_theory, config)),
        **stage("bits, best times", partial(_bits, config)),
        **stage("bits, along training", partial(_along, config)),
    }
    axes = {
        "decay_time_theory": ("decay",),
        "decay_modes_theory": ("decay",),
        "decay_time": ("cell_decay",),
        "decay_time_error": ("cell_decay",),
        "decay_modes": ("cell_decay",),
        "bits_time_theory": ("law", "real_bits"),
        "bits_time": ("way", "bits"),
        "bits_time_error": ("way", "bits"),
        "rise": ("way", "shown_bits", "time"),
        "rise_error": ("way", "shown_bits", "time"),
    }
    coords = {
        "decay": ("decay", _decays(config), {"long_name": "decay of the spectrum"}),
        "cell_decay": ("cell_decay", np.array(config.decay.decays)),
        "law": ("law", ["independent", "mirrored"]),
        "way": ("way", list(WAYS)),
        "bits": ("bits", np.array(config.bits.bits)),
        "real_bits": ("real_bits", _real_bits(config), {"long_name": "bits of a weight"}),
        "shown_bits": ("shown_bits", np.array(config.bits.shown)),
        "time": ("time", _times(config), {"long_name": "pre-training time"}),
    }
    level = config.decay.threshold
    about = {
        "tau": config.tau,
        "scale": config.scale,
        "d": config.decay.d,
        "width": config.bits.d,
        "threshold": level,
        "noise_time": best_time.noise_time(config.decay.d, _gamma(config), config.tau),
    }
    return xr.Dataset({name: (axes[name], data[name]) for name in axes}, coords, about)


def _spectrum(config: Config, d: int, decay: float) -> np.ndarray:
    return config.scale * np.arange(1, d + 1.0) ** -decay


def _gamma(config: Config) -> float:
    return sqrt(config.decay.threshold / (2 * config.decay.d))


def _decays(config: Config) -> np.ndarray:
    return np.linspace(config.decay.decays[0], config.decay.decays[-1], config.points)


def _real_bits(config: Config) -> np.ndarray:
    return np.linspace(config.bits.bits[0], config.bits.bits[-1], config.points)


def _span(config: Config) -> float:
    """The range of the weights: none exceeds sqrt(sigma_1)."""
    return 2 * sqrt(config.scale)


def _generator(config: Config, *salts: int) -> np.random.Generator:
    return np.random.default_rng((config.seed, *salts))


def _trained(config: Config, d: int, decay: float, end: float, mirrored: bool) -> matrices.Run:
    """Pre-trains from an aligned start, on a target with random singular vectors."""
    sigma = _spectrum(config, d, decay)
    u, v = matrices.rotations(_generator(config, 0, d), 2, d)
    v = u if mirrored else v
    start = np.exp(-config.tau)
    return matrices.pre_train(start * u, start * v.T, (u * sigma) @ v.T, end)


def _decay_theory(config: Config) -> dict[str, np.ndarray]:
    d, gamma = config.decay.d, _gamma(config)
    times = [
        best_time.best_time(_spectrum(config, d, decay), d, gamma, config.tau)
        for decay in _decays(config)
    ]
    counts = [
        best_time.power_law_index(d, scale=config.scale, decay=decay, gamma=gamma)
        for decay in _decays(config)
    ]
    return {"decay_time_theory": np.array(times), "decay_modes_theory": np.array(counts)}


def _decay(config: Config) -> dict[str, np.ndarray]:
    """Looks for the best times of networks, and counts modes on networks that have learned some."""
    d, gamma, times, counts = config.decay.d, _gamma(config), [], []
    for i, decay in enumerate(config.decay.decays):
        sigma = _spectrum(config, d, decay)
        # Until a mode at the threshold is learned, and half as long again.
        end = 0.75 * config.tau / min(config.decay.threshold, config.scale)
        run = _trained(config, d, decay, end, mirrored=False)
        after = matrices.add_noise(_generator(config, 1, i), run, gamma, config.decay.draws)
        times.append(matrices.least(run, after, points=240, few=config.decay.draws))
        u, v = matrices.rotations(_generator(config, 0, d), 2, d)
        roots = [np.sqrt(sigma * (np.arange(d) < n)) for n in range(d + 1)]
        losses = [after((u * r, r[:, None] * v.T), slice(None)).mean() for r in roots]
        found = modes.inflection(np.array(losses), first=0)
        counts.append(d if found is None else found)
    return {**_estimates("decay_time", times), "decay_modes": np.array(counts)}


def _estimates(name: str, found: list[Estimate]) -> dict[str, np.ndarray]:
    errors = [e.stderr if e.stderr is not None else e.tolerance for e in found]
    return {name: np.array([e.value for e in found]), f"{name}_error": np.array(errors, float)}


def _bits_theory(config: Config) -> dict[str, np.ndarray]:
    d, decay = config.bits.d, config.bits.decay
    sigma, rows = _spectrum(config, d, decay), []
    with jax.enable_x64(True):
        noise = np.asarray(quantised.rounding_noise(_real_bits(config), _span(config)))
    # Mirrored errors count as independent ones of 4d + 2 in place of 2d times their variance.
    for factor in (1.0, sqrt(2 + 1 / d)):
        rows.append([best_time.best_time(sigma, d, float(factor * g), config.tau) for g in noise])
    return {"bits_time_theory": np.array(rows)}


def _bits(config: Config) -> dict[str, np.ndarray]:
    """Looks for the best times of networks that are rounded."""
    d, found = config.bits.d, []
    for j, (dither, mirrored) in enumerate(WAYS.values()):
        for bits in config.bits.bits:
            # Modes of a third of the threshold are learned by then.
            level = d * _span(config) ** 2 * 4.0**-bits / 6
            end = 1.5 * config.tau / min(level, config.scale)
            run = _trained(config, d, config.bits.decay, end, mirrored)
            after = matrices.round_off(
                _generator(config, 2, j, bits), run, bits, _span(config), config.bits.draws,
                dither=dither, mirrored=mirrored,
            )  # fmt: skip
            found.append(matrices.least(run, after, points=150, few=config.bits.draws))
    shape = (len(WAYS), len(config.bits.bits))
    return {name: values.reshape(shape) for name, values in _estimates("bits_time", found).items()}


def _times(config: Config) -> np.ndarray:
    least = config.scale * config.bits.d**-config.bits.decay
    return np.geomspace(0.6 * config.tau / config.scale, config.tau / least, config.bits.times)


def _along(config: Config) -> dict[str, np.ndarray]:
    """Rounds networks along pre-training."""
    d, times = config.bits.d, _times(config)
    shape = (len(WAYS), len(config.bits.shown), times.size)
    rise, error = np.zeros(shape), np.zeros(shape)
    for j, (dither, mirrored) in enumerate(WAYS.values()):
        run = _trained(config, d, config.bits.decay, times[-1], mirrored)
        for k, bits in enumerate(config.bits.shown):
            gamma = float(quantised.rounding_noise(bits, _span(config)))
            after = matrices.round_off(
                _generator(config, 3, j, bits), run, bits, _span(config), config.bits.draws,
                dither=dither, mirrored=mirrored,
            )  # fmt: skip
            for i, time in enumerate(times):
                pair = run.at(time)
                calm = np.sum((pair[0] @ pair[1] - run.target) ** 2)
                with jax.enable_x64(True):
                    noisy = float(perturbation.perturbed_loss(*pair, run.target, gamma))
                estimate = Estimate.mean((after(pair, slice(None)) - calm) / (noisy - calm))
                rise[j, k, i], error[j, k, i] = estimate.value, estimate.stderr or np.nan
    return {"rise": rise, "rise_error": error}
