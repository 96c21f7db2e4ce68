"""The run of `regularised_transfer`: its stages, and the resulting dataset."""

from functools import partial
from math import pi

import jax
import numpy as np
import xarray as xr

from experiments.lab.config import picked
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.regularised_transfer.config import Config
from theory import deep_linear as dl
from theory.deep_linear import penalised, regularised, risks, wishart

WAYS = ("linear transfer", "L2-SP", "direction")
FITS = ("least norm", "best ridge")
GROUPS = 10  # of data sets, each with its own boundary
FINE = 61  # angles of the maps


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Computes the gain of each strategy over ridge regression at its best penalty.

    Returns a dataset. `theory` has gains over (way, n, fine_theta), exact at this n and d, and
    `line` the angles beyond which each strategy hurts. `gain` has the gains on random data, over
    (load, draw, way, theta). `boundary` has the measured angle beyond which L2-SP hurts, over
    (source_load, fit, group), and `boundary_theory` the predicted angle. `unequal` has gains of
    L2-SP for inputs with unequal variances, and `unequal_theory` their limits.
    """
    given = {
        "theory": stage("theory", partial(_in_float64, _theory, config)),
        "measured": [
            stage(f"load {load:g}", partial(_in_float64, _measured, config, i))
            for i, load in enumerate(config.loads)
        ],
        "sources": [
            stage(f"source load {load:g}", partial(_in_float64, _sources, config, i))
            for i, load in enumerate(config.source_loads)
        ],
    }
    theory = given["theory"]

    def stacked(of: str, name: str) -> np.ndarray:
        return np.stack([part[name] for part in given[of]])

    curve = ("way", "n")
    return xr.Dataset(
        {
            "theory": (("way", "n", "fine_theta"), theory["gain"]),
            "line": (curve, theory["line"], {"units": "rad"}),
            "line_limit": ("fine_theta", theory["line_limit"], {"long_name": "load"}),
            "line_printed": ("n", theory["line_printed"], {"units": "rad"}),
            "gain": (("load", "draw", "way", "theta"), stacked("measured", "gain")),
            "gain_theory": (("load", "way", "theta"), stacked("measured", "theory")),
            "unequal": (("load", "draw"), stacked("measured", "unequal")),
            "unequal_theory": ("n", theory["unequal"]),
            "boundary": (("source_load", "fit", "group"), stacked("sources", "boundary")),
            "boundary_theory": (("fit", "source_n"), theory["boundary"], {"units": "rad"}),
        },
        {
            "way": list(WAYS),
            "fit": list(FITS),
            "n": ("n", theory["n"], {"long_name": "target samples"}),
            "load": ("load", stacked("measured", "load"), {"long_name": "load n / d"}),
            "source_load": ("source_load", stacked("sources", "load"), {"long_name": "n_s / d"}),
            "source_n": ("source_n", theory["source_n"], {"long_name": "source samples"}),
            "theta": ("theta", _angles(config), {"units": "rad"}),
            "fine_theta": ("fine_theta", _fine(), {"units": "rad"}),
        },
        {
            **picked(config, "d", "sigma", "source_sigma", "draws"),
            "variances": list(config.variances),
        },
    )


def _in_float64(compute, *given) -> dict[str, np.ndarray]:
    with jax.enable_x64(True):
        return {name: np.asarray(value) for name, value in compute(*given).items()}


def _angles(config: Config) -> np.ndarray:
    return np.linspace(0, pi / 2, config.angles)


def _fine() -> np.ndarray:
    return np.linspace(0, pi / 2, FINE)


def _samples(config: Config, load: float) -> int:
    return max(3, round(load * config.d))


# --- theory ---------------------------------------------------------------------------------------


def _penalties(config: Config, n: int, theta: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the best penalty of each strategy by angle; the direction's penalty uses n
    samples."""
    across = np.maximum(np.sin(theta), 1e-6)  # at 0 every large penalty is equally good
    between = np.maximum(2 * np.sin(theta / 2), 1e-6)
    best, d = partial(penalised.best_penalty, sigma=config.sigma), config.d
    return {
        "ridge": np.asarray(best(n=n, d=d, distance=1.0)),
        "L2-SP": np.asarray(best(n=n, d=d, distance=between)),
        "direction": np.asarray(best(n=n - 1, d=d - 1, distance=across)) * (n - 1) / n,
    }


def _gains(config: Config, n: int, theta: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns the risk of ridge regression, and each strategy's gain `[way, theta]`, exactly."""
    d, sigma, penalty = config.d, config.sigma, _penalties(config, n, theta)
    ridge = float(wishart.ridge_risk(n=n, d=d, distance=1.0, sigma=sigma, penalty=penalty["ridge"]))
    # Linear transfer learns only along the source's direction: its penalty elsewhere is infinite.
    across = np.stack([np.full(theta.size, np.inf), penalty["direction"] * n / (n - 1)])
    rest = wishart.ridge_risk(n=n - 1, d=d - 1, distance=np.sin(theta), sigma=sigma, penalty=across)
    linear, free = np.asarray(risks.refitted_risk(n=n, rest=rest, sigma=sigma))
    tuned = np.asarray(
        wishart.ridge_risk(
            n=n, d=d, distance=2 * np.sin(theta / 2), sigma=sigma, penalty=penalty["L2-SP"]
        )
    )
    return ridge, ridge - np.stack([linear, tuned, free])


def _theory(config: Config) -> dict[str, np.ndarray]:
    """Computes gains and boundaries for all numbers of samples."""
    d, sigma, theta = config.d, config.sigma, _fine()
    drawn = [_samples(config, load) for load in config.loads]
    n = np.union1d(np.arange(3, 2 * d + 1, config.step), drawn)
    ridge, gain = zip(*(_gains(config, int(k), theta) for k in n), strict=True)
    allowed = np.asarray(risks.rest_allowed(n=n, risk=np.array(ridge), sigma=sigma))
    lines = (
        np.arcsin(np.sqrt(np.minimum(allowed, 1))),
        np.full(n.size, pi / 3),
        np.arcsin(np.sqrt(np.asarray(regularised.direction_sin2(n=n, d=d, sigma=sigma)))),
    )
    sources = np.unique(np.geomspace(2, 4 * d, 60).round().astype(int))
    return {
        "n": n,
        "gain": np.stack(gain, 1),
        "line": np.stack(lines),
        "line_limit": np.asarray(regularised.linear_transfer_load(theta=theta, sigma=sigma)),
        "line_printed": np.arcsin(
            np.sqrt(np.asarray(dl.linear_transfer_sin2(n=n, d=d, sigma=sigma)))
        ),
        "source_n": sources,
        "boundary": np.array([[_boundary(config, fit, int(k)) for k in sources] for fit in FITS]),
        "unequal": np.array([_unequal(config, float(k))[1] for k in n]),
    }


def _boundary(config: Config, fit: str, n: int) -> float:
    """Returns the angle beyond which L2-SP hurts, by how the source was fitted."""
    if fit == "least norm" and abs(n - config.d) <= 1:
        return 0.0  # the mean norm of the source is infinite
    learned = wishart.learned(
        n=n, d=config.d, sigma=config.source_sigma, penalty=_source_penalty(config, fit, n)
    )
    return float(regularised.l2sp_boundary(learned))


def _source_penalty(config: Config, fit: str, n: int) -> float:
    if fit == "least norm":
        return 0.0
    return float(penalised.best_penalty(n=n, d=config.d, distance=1.0, sigma=config.source_sigma))


def _unequal_tasks(config: Config) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns variances, source and target. The tasks agree in the first half of the directions."""
    half = config.d // 2
    s = np.repeat(config.variances, (half, config.d - half))
    target = np.ones(config.d) / config.d**0.5
    return s, target * np.where(np.arange(config.d) < half, 1.0, -1.0), target


def _unequal(config: Config, n: float) -> tuple[tuple[float, float], float]:
    """Returns the best penalties of ridge regression and L2-SP, and the gain, in the limit."""
    s, source, target = _unequal_tasks(config)
    found = [
        _best(s, offset, n=float(n), sigma=config.sigma) for offset in (target, target - source)
    ]
    (ridge, scratch), (towards, tuned) = found
    return (float(ridge), float(towards)), float(scratch - tuned)


_best = jax.jit(penalised.best_risk_of)


# --- random data ----------------------------------------------------------------------------------


def _solved(gram: np.ndarray, pulled: np.ndarray, penalty: np.ndarray) -> np.ndarray:
    """Returns (X^T X + penalty)^-1 X^T y for a diagonal penalty `[d]`."""
    return np.linalg.solve(gram + np.diag(penalty), pulled)


def _measured(config: Config, i: int) -> dict[str, np.ndarray]:
    """Measures each strategy's gains on data of one load, and L2-SP's with unequal variances."""
    n, d, sigma = _samples(config, config.loads[i]), config.d, config.sigma
    theta, rng = _angles(config), np.random.default_rng((config.seed, 0, i))
    penalty, basis = _penalties(config, n, theta), np.eye(d)
    targets = np.cos(theta)[:, None] * basis[0] + np.sin(theta)[:, None] * basis[1]
    x = rng.standard_normal((config.draws, n, d))
    noise = sigma * rng.standard_normal((config.draws, n, 1))
    xt = x.swapaxes(1, 2)
    y, z, gram = x @ targets.T + noise, x[..., :1], xt @ x
    pulled, pulled_source = xt @ y, xt @ z

    def risk(fits: np.ndarray) -> np.ndarray:
        """Computes the risk of fits `[draw d theta]`."""
        return np.sum((fits - targets.T) ** 2, 1)

    scale = np.sum(z * y, 1, keepdims=True) / np.sum(z**2, 1, keepdims=True)
    tuned, free = np.empty_like(pulled), np.empty_like(pulled)
    for j in range(theta.size):
        left = pulled[..., j : j + 1]
        towards = np.full(d, n * penalty["L2-SP"][j])
        tuned[..., j : j + 1] = basis[:, :1] + _solved(gram, left - pulled_source, towards)
        across = n * penalty["direction"][j] * (1 - basis[0])
        free[..., j : j + 1] = _solved(gram, left, across)
    ridge = risk(_solved(gram, pulled, np.full(d, n * penalty["ridge"])))
    fits = (basis[:, :1] * scale, tuned, free)
    return {
        "load": np.array(n / d),
        "gain": np.stack([ridge - risk(fit) for fit in fits], 1),
        "theory": _gains(config, n, theta)[1],
        "unequal": _measured_unequal(config, rng, n),
    }


def _measured_unequal(config: Config, rng: np.random.Generator, n: int) -> np.ndarray:
    """Returns L2-SP's gain by draw, where the tasks differ in directions of small variance."""
    s, source, target = _unequal_tasks(config)
    x = rng.standard_normal((config.draws, n, config.d)) * np.sqrt(s)
    y = x @ target + config.sigma * rng.standard_normal(x.shape[:2])
    found, xt = [], x.swapaxes(1, 2)
    for penalty, start in zip(_unequal(config, n)[0], (0 * source, source), strict=True):
        left = xt @ (y - x @ start)[..., None]
        # Unlike inf, no finite penalty keeps the source exactly.
        fit = start + _solved(xt @ x, left, np.full(config.d, n * min(penalty, 1e12)))[..., 0]
        found.append(np.sum(s * (fit - target) ** 2, -1))
    return found[0] - found[1]


def _sources(config: Config, i: int) -> dict[str, np.ndarray]:
    """Finds the angles at which L2-SP towards fitted sources stops helping, one for each group.

    The target has d / 2 samples. Both sides use the penalty that is best from scratch.
    """
    n, d, theta = _samples(config, config.source_loads[i]), config.d, _angles(config)
    rng, basis, own = np.random.default_rng((config.seed, 1, i)), np.eye(d), d // 2
    targets = np.stack([np.cos(theta), np.sin(theta)], -1) @ basis[:2]
    penalty = own * float(penalised.best_penalty(n=own, d=d, distance=1.0, sigma=config.sigma))
    found = []
    for _ in range(GROUPS):
        draws = config.source_draws // GROUPS
        x = rng.standard_normal((draws, n, d))
        labels = x[..., :1] + config.source_sigma * rng.standard_normal((draws, n, 1))
        data = rng.standard_normal((draws, own, d))
        noise = config.sigma * rng.standard_normal((draws, own, 1))
        xt, dt = x.swapaxes(1, 2), data.swapaxes(1, 2)
        if n < d:
            least = xt @ np.linalg.solve(x @ xt, labels)
        else:
            least = np.linalg.solve(xt @ x, xt @ labels)
        own_ridge = n * _source_penalty(config, "best ridge", n)
        ridge = _solved(xt @ x, xt @ labels, np.full(d, own_ridge))
        # Both problems are linear in the target, so one solve is sufficient for all of its parts.
        seen = np.concatenate([data[..., :2], noise, data @ least, data @ ridge], -1)
        parts = dt @ seen
        parts = _solved(dt @ data, parts, np.full(d, penalty))
        scratch = parts[..., :2] @ np.stack([np.cos(theta), np.sin(theta)]) + parts[..., 2:3]
        risk = np.sum((scratch - targets.T) ** 2, 1)
        gains = []
        for k, start in enumerate((least, ridge)):
            fit = start + scratch - parts[..., 3 + k : 4 + k]
            gains.append((risk - np.sum((fit - targets.T) ** 2, 1)).mean(0))
        found.append([_crossing(theta, gain) for gain in gains])
    return {"load": np.array(n / d), "boundary": np.array(found).T}


def _crossing(theta: np.ndarray, gain: np.ndarray) -> float:
    """Finds the angle at which a mean gain becomes negative, by interpolation linear in cos."""
    if gain[0] <= 0:
        return 0.0
    if (gain > 0).all():
        return float(theta[-1])
    k = int(np.argmax(gain <= 0))
    share = gain[k - 1] / (gain[k - 1] - gain[k])
    return float(np.arccos((1 - share) * np.cos(theta[k - 1]) + share * np.cos(theta[k])))
