"""The run of `overtraining_further`: modes in closed form, and whole matrices."""

from functools import partial
from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from experiments.lab.config import picked
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.overtraining_further.config import Config, Labels, Sam
from theory.claims import Estimate
from theory.two_layer import (
    best_time,
    label_noise,
    matrices,
    modes,
    perturbation,
    quantised,
    sharpness_aware,
)
from theory.two_layer.layers import identity_start

# The learning rate in units of the initial one, by the share of all steps.
SCHEDULES = {
    "constant rate": np.ones_like,
    "linear decay": lambda share: 1 - share,
}
# The kinds of rounding, and whether the layers share their singular vectors.
WAYS = {"shifted": (True, False), "nearest": (False, False), "mirrored": (False, True)}


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Computes all parts, each by theory and by simulation.

    Returns the dataset. Times are of gradient flow at unit rate; `*_error` are standard errors.
    - `decay_time_theory` and `decay_modes_theory`, `(decay,)`: the best time to stop, and the
      number of modes worth learning. `decay_time`, `decay_time_error` and `decay_modes`,
      `(cell_decay,)`: the same by simulation.
    - `turned_time_theory`, `(start, tau)`: the best time for U = V, for U != V in the limit of
      large tau, and for U != V exactly. `turned_time` and `turned_time_error`, `(tau,)`: by
      simulation.
    - `bits_time_theory`, `(law, real_bits)`: the best time for independent and for mirrored errors.
      `bits_time` and `bits_time_error`, `(way, bits)`: by simulation.
    - `rise` and `rise_error`, `(way, shown_bits, time)`: the increase of the loss by rounding, in
      units of the increase by independent uniform errors.
    - `sam_time_theory`, `(rho, mode)`, and `sam_time`, `(cell_rho, mode)`: when half of each mode
      is learned by SAM; inf if this does not happen by the last time.
    - `sam_imbalance_theory` and `sam_imbalance`, `(sam_step, mode)`: a^2 - b^2 under normalised
      SAM.
    - `trace_theory`, `trace` and `trace_error`, `(schedule, step)`: the trace of the Hessian under
      label noise; theory's is for the minimum near the networks.
    - `anneal_theory`, `(rate,)`, `anneal` and `anneal_error`, `(cell_rate,)`: the increase of
      a^2 + b^2 by a decay.
    """
    data = {
        **stage("decay, theory", partial(_decay_theory, config)),
        **stage("decay, networks", partial(_decay, config)),
        **stage("other singular vectors", partial(_turned, config)),
        **stage("bits, theory", partial(_bits_theory, config)),
        **stage("bits, best times", partial(_bits, config)),
        **stage("bits, along training", partial(_along, config)),
        **stage("SAM", partial(_sam, config)),
        **stage("SAM, normalised", partial(_bouncing, config)),
        **stage("label noise", partial(_labels, config)),
        **stage("label noise, one mode", partial(_anneal, config)),
    }
    axes = {
        "decay_time_theory": ("decay",),
        "decay_modes_theory": ("decay",),
        "decay_time": ("cell_decay",),
        "decay_time_error": ("cell_decay",),
        "decay_modes": ("cell_decay",),
        "turned_time_theory": ("start", "tau"),
        "turned_time": ("tau",),
        "turned_time_error": ("tau",),
        "bits_time_theory": ("law", "real_bits"),
        "bits_time": ("way", "bits"),
        "bits_time_error": ("way", "bits"),
        "rise": ("way", "shown_bits", "time"),
        "rise_error": ("way", "shown_bits", "time"),
        "sam_time_theory": ("rho", "mode"),
        "sam_time": ("cell_rho", "mode"),
        "sam_imbalance_theory": ("sam_step", "mode"),
        "sam_imbalance": ("sam_step", "mode"),
        "trace_theory": ("schedule", "step"),
        "trace": ("schedule", "step"),
        "trace_error": ("schedule", "step"),
        "anneal_theory": ("rate",),
        "anneal": ("cell_rate",),
        "anneal_error": ("cell_rate",),
    }
    coords = {
        "decay": ("decay", _decays(config), {"long_name": "decay of the spectrum"}),
        "cell_decay": ("cell_decay", np.array(config.decay.decays)),
        "start": ("start", ["aligned", "limit", "exact"]),
        "tau": ("tau", np.array(config.turned.taus), {"long_name": "$τ$ of initial $e^{-τ} I$"}),
        "law": ("law", ["independent", "mirrored"]),
        "way": ("way", list(WAYS)),
        "bits": ("bits", np.array(config.bits.bits)),
        "real_bits": ("real_bits", _real_bits(config), {"long_name": "bits of a weight"}),
        "shown_bits": ("shown_bits", np.array(config.bits.shown)),
        "time": ("time", _times(config), {"long_name": "pre-training time"}),
        "rho": ("rho", _rhos(config), {"long_name": "ascent $ρ$, in units of the gradient"}),
        "cell_rho": ("cell_rho", np.array(config.sam.rhos)),
        "mode": ("mode", np.array(config.sam.sigma)),
        "sam_step": ("sam_step", _points(config.sam), {"long_name": "steps of normalised SAM"}),
        "schedule": ("schedule", list(SCHEDULES)),
        "step": ("step", _points(config.labels), {"long_name": "steps with label noise"}),
        "rate": ("rate", _anneal_rates(config), {"long_name": "learning rate before the decay"}),
        "cell_rate": ("cell_rate", np.array(config.labels.rates)),
    }
    level = config.decay.threshold
    about = {
        **picked(config, "tau", "scale", "decay.d"),
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
    """Returns the range of the weights, at most sqrt(sigma_1) in size."""
    return 2 * sqrt(config.scale)


def _generator(config: Config, *salts: int) -> np.random.Generator:
    return np.random.default_rng((config.seed, *salts))


def _trained(config: Config, d: int, decay: float, end: float, mirrored: bool) -> matrices.Run:
    """Pre-trains from aligned initial weights, on a target with random singular vectors."""
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
    """Finds the best times of networks, and counts modes on networks that have learned some."""
    d, gamma, times, counts = config.decay.d, _gamma(config), [], []
    for i, decay in enumerate(config.decay.decays):
        sigma = _spectrum(config, d, decay)
        # 1.5 times the time until a mode at the threshold is learned.
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


def _turned(config: Config) -> dict[str, np.ndarray]:
    """Finds the best times of networks with initial weights e^{-tau} I, for a target with U !=
    V."""
    part = config.turned
    sigma, d = np.array(part.sigma), len(part.sigma)
    u, v = matrices.rotations(_generator(config, 7), 2, d)
    # Otherwise the smallest mode would not be learned.
    v[:, -1] *= np.linalg.det(u) * np.linalg.det(v)
    target, theory, found = (u * sigma) @ v.T, [], []
    for i, tau in enumerate(part.taus):
        late = best_time.mode_taus(target, tau)
        # Until the last mode is learned, even if late.
        end = float(np.max(1.2 * late / (2 * sigma))) + 1 / sigma[-1]
        with jax.enable_x64(True):
            start = identity_start(d, tau)
            exact = best_time.best_time_of(start, jnp.asarray(target), part.gamma, end)
        taus = (np.full(d, tau), late)
        theory.append([*(best_time.best_time(sigma, d, part.gamma, t) for t in taus), exact])
        one = np.exp(-tau) * np.eye(d)
        run = matrices.pre_train(one, one, target, end)
        after = matrices.add_noise(_generator(config, 8, i), run, part.gamma, part.draws)
        found.append(matrices.least(run, after, points=240, few=part.draws))
    return {"turned_time_theory": np.array(theory).T, **_estimates("turned_time", found)}


def _bits_theory(config: Config) -> dict[str, np.ndarray]:
    d, decay = config.bits.d, config.bits.decay
    sigma, rows = _spectrum(config, d, decay), []
    with jax.enable_x64(True):
        noise = np.asarray(quantised.rounding_noise(_real_bits(config), _span(config)))
    # Mirrored errors are equivalent to independent ones with 4d + 2 instead of 2d times their
    # variance.
    for factor in (1.0, sqrt(2 + 1 / d)):
        rows.append([best_time.best_time(sigma, d, float(factor * g), config.tau) for g in noise])
    return {"bits_time_theory": np.array(rows)}


def _bits(config: Config) -> dict[str, np.ndarray]:
    """Finds the best times of rounded networks."""
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
                    w1, w2 = (jnp.asarray(w) for w in pair)
                    noisy = float(perturbation.perturbed_loss(w1, w2, run.target, gamma))
                estimate = Estimate.mean((after(pair, slice(None)) - calm) / (noisy - calm))
                rise[j, k, i], error[j, k, i] = estimate.value, estimate.stderr or np.nan
    return {"rise": rise, "rise_error": error}


def _rhos(config: Config) -> np.ndarray:
    return np.linspace(config.sam.rhos[0], config.sam.rhos[-1], config.points)


def _points(part: Sam | Labels) -> np.ndarray:
    """Returns the steps after which measurements are made, including 0."""
    return np.arange(0, part.steps + 1, part.every)


def _aligned(
    config: Config, sigma: np.ndarray, a: np.ndarray, b: np.ndarray
) -> tuple[matrices.Pair, np.ndarray, np.ndarray, np.ndarray]:
    """Returns matrices with these singular values in a random basis, the target, and its
    vectors."""
    u, v, turn = matrices.rotations(_generator(config, 4, sigma.size), 3, sigma.size)
    pair = (u * a) @ turn, turn.T @ (b[:, None] * v.T)
    return pair, (u * sigma) @ v.T, u, v


def _minimum(sigma: np.ndarray, imbalance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns a and b with ab = sigma and the given a^2 - b^2."""
    a = np.sqrt((np.hypot(imbalance, 2 * sigma) + imbalance) / 2)
    return a, sigma / a


def _sam(config: Config) -> dict[str, np.ndarray]:
    """Computes times when half of each mode is learned: by quadrature, and for whole matrices."""
    sigma = np.array(config.sam.sigma)
    start = np.exp(-config.sam.tau)
    theory = [
        [sharpness_aware.learning_time(s / 2, start**2, s, float(rho)) for s in config.sam.sigma]
        for rho in _rhos(config)
    ]
    small = np.full(sigma.size, start)
    end, found = 4 * config.sam.tau / sigma[-1], []
    for rho in config.sam.rhos:
        pair, target, u, v = _aligned(config, sigma, small, small)
        run = matrices.pre_train(*pair, target, end, rho=rho)
        times = np.linspace(0, end, 4000)
        products = np.stack([np.matmul(*run.at(t)) for t in times])
        shares = np.einsum("oi,top,pi->ti", u, products, v) / sigma
        found.append([float(np.interp(0.5, s, times)) if s[-1] > 0.5 else np.inf for s in shares.T])
    return {"sam_time_theory": np.array(theory), "sam_time": np.array(found)}


def _bouncing(config: Config) -> dict[str, np.ndarray]:
    """Simulates imbalances under normalised SAM at a minimum."""
    part = config.sam
    sigma, imbalance = np.array(part.sigma), np.array(part.imbalance)
    a, b = _minimum(sigma, imbalance)
    # Slightly off the minimum, because the gradient vanishes on it.
    pair, target, u, v = _aligned(config, sigma, a * (1 + 1e-3), b)
    found, theory, now = [], [], imbalance.copy()
    for k in range(len(_points(part))):
        left, right = pair[0].T @ u, pair[1] @ v
        found.append(np.sum(left**2, 0) - np.sum(right**2, 0))
        theory.append(now.copy())
        if k + 1 < len(_points(part)):
            pair = matrices.sharpness_aware(pair, target, part.length, part.rate, part.every)
            for _ in range(part.every):
                size = float(np.hypot(now[0], 2 * sigma[0]))
                fall = sharpness_aware.sharpest_decay(part.length, part.rate, size)
                now[0] *= np.exp(-fall * part.rate)
    return {"sam_imbalance": np.array(found), "sam_imbalance_theory": np.array(theory)}


def _labels(config: Config) -> dict[str, np.ndarray]:
    """Simulates traces of the Hessian under label noise, by the schedule."""
    part = config.labels
    sigma, imbalance = np.array(part.sigma), np.array(part.imbalance)
    d, at = sigma.size, _points(part)
    pair, target, _, _ = _aligned(config, sigma, *_minimum(sigma, imbalance))
    first, second = (np.tile(w, (part.networks, 1, 1)) for w in pair)
    found: dict[str, list] = {"trace_theory": [], "trace": [], "trace_error": []}
    for i, shape in enumerate(SCHEDULES.values()):
        rates = part.rate * shape(np.arange(part.steps) / part.steps)
        path = np.vstack([imbalance, label_noise.drift(imbalance, sigma, part.noise, rates)])
        found["trace_theory"].append(2 * d * np.hypot(path[at], 2 * sigma).sum(-1))
        kept = [(first, second)]

        def watch(step: int, pair: matrices.Pair, kept: list = kept) -> None:
            if step % part.every == 0:
                kept.append(pair)

        rng = _generator(config, 5, i)
        matrices.label_noise(rng, (first, second), target, part.noise, rates, watch)
        traces = [sum(np.sum(w**2, (1, 2)) for w in pair) for pair in kept]
        means = 2 * d * np.stack([matrices.paired(np.asarray(t)) for t in traces])
        found["trace"].append(means.mean(1))
        found["trace_error"].append(means.std(1, ddof=1) / np.sqrt(means.shape[1]))
    return {name: np.array(values) for name, values in found.items()}


def _anneal_rates(config: Config) -> np.ndarray:
    return np.linspace(config.labels.rates[0], config.labels.rates[-1], config.points)


def _anneal(config: Config) -> dict[str, np.ndarray]:
    """Simulates how far label noise holds a^2 + b^2 of a balanced mode of size 1 below 2."""
    part = config.labels
    theory = [label_noise.annealing_rise(float(r), 1.0, 0.0, 1.0) for r in _anneal_rates(config)]
    found, one = [], np.ones((part.singles, 1, 1))
    for i, rate in enumerate(part.rates):
        # Twenty times the time in which the fluctuations, of rate 4 rate, forget the initial state.
        skipped = int(np.ceil(5 / rate))
        rates = np.full(skipped + part.averaged, rate)
        sums = np.zeros(part.singles)

        def watch(step: int, pair: matrices.Pair, sums=sums, skipped=skipped) -> None:
            if step > skipped:
                sums += (pair[0] ** 2 + pair[1] ** 2)[:, 0, 0]

        rng = _generator(config, 6, i)
        matrices.label_noise(rng, (one, one), np.eye(1), 1.0, rates, watch)
        found.append(Estimate.mean(matrices.paired(2 - sums / part.averaged)))
    return {"anneal_theory": np.array(theory), **_estimates("anneal", found)}
