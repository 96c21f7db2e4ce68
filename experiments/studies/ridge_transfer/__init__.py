"""Does ridge regularisation help linear transfer? Risk against its strength, exact and simulated.

Figure 2 of features-are-fate (arXiv 2410.08194), and what it leaves out: the paper's statement that
the best ridge is 0 (Thm 3.8) is the limit n -> inf; at every finite n the best is
(sigma^2 + sin^2 theta)/(n cos^2 theta) > 0, which matters when samples are few.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import pi
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lab import validate
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from theory import deep_linear as dl
from theory import problems

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Config:
    """Two cases side by side: the paper's, and one with few samples."""

    d: int = 500
    """Input dimension."""
    ns: tuple[int, int] = (250, 10)
    """Target samples of each case."""
    thetas: tuple[float, float] = (pi / 8, 3 * pi / 8)
    """Source-target angle of each case, in radians."""
    sigma: float = 0.2
    """Standard deviation of the label noise."""
    ridges: int = 21
    """Number of ridge strengths, evenly spaced from 0."""
    ridge_max: tuple[float, float] = (0.5, 2.0)
    """Largest ridge strength of each case."""
    draws: int = 2000
    """Simulated target data sets per case."""
    seed: int = 0
    """Seed of the simulated data sets."""

    def __post_init__(self):
        validate.at_least(self, d=2, draws=2, ridges=2)
        validate.positive(self, "sigma", zero=True)
        validate.positive(self, "ridge_max")
        if min(self.ns) <= 4:
            raise ValueError(
                f"ns must be at least 5 (below, the variance at ridge 0 is infinite); got {self.ns}"
            )
        if not all(0 <= t < pi / 2 for t in self.thetas):
            raise ValueError(f"thetas must be in [0, pi/2); got {self.thetas}")

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        return cls(d=8, ns=(30, 5), ridges=3, draws=50)

    @classmethod
    def figure_2(cls) -> "Config":
        """The paper's 20 draws."""
        return cls(draws=20)


PRESETS: dict[str, Callable[[], Config]] = {
    "default": Config,
    "figure_2": Config.figure_2,
    "tiny": Config.tiny,
}


def run(config: Config, stage: Stage = direct) -> "xr.Dataset":
    """Exact risk, its limit n -> inf, and the simulated mean, `[case, ridge]`."""
    import xarray as xr

    with jax.enable_x64(True):
        found = [stage(f"case {i + 1}/2", partial(_case, config, i)) for i in range(2)]

    def both(name: str) -> np.ndarray:
        return np.stack([case[name] for case in found])

    grid = ("case", "step")
    return xr.Dataset(
        {
            "ridge": (grid, both("ridge"), {"long_name": "ridge strength", "units": "1"}),
            "exact": (grid, both("exact")),
            "limit": (grid, both("limit")),
            "mean": (grid, both("mean")),
            "std": (grid, both("std")),
            "best_ridge": ("case", both("best_ridge")),
            "best_risk": ("case", both("best_risk")),
        },
        {
            "n": ("case", list(config.ns), {"long_name": "target samples"}),
            "theta": ("case", list(config.thetas), {"units": "rad"}),
        },
        {"sigma": config.sigma, "draws": config.draws, "d": config.d},
    )


def _case(config: Config, i: int) -> Mapping[str, jax.Array]:
    n, theta = config.ns[i], config.thetas[i]
    ridge = jnp.linspace(0, config.ridge_max[i], config.ridges)
    key = jax.random.fold_in(jax.random.key(config.seed), i)
    risks = _simulate(key, n, config.d, theta, config.sigma, ridge, config.draws)
    best = dl.optimal_ridge(n, theta, config.sigma)
    return {
        "ridge": ridge,
        "exact": dl.linear_transfer_risk(n, theta, config.sigma, ridge),
        "limit": dl.linear_transfer_limit(theta, ridge),
        "mean": risks.mean(0),
        "std": risks.std(0, ddof=1),
        "best_ridge": best,
        "best_risk": dl.linear_transfer_risk(n, theta, config.sigma, best),
    }


@partial(jax.jit, static_argnums=(1, 2, 6))
def _simulate(key, n: int, d: int, theta, sigma, ridge: jax.Array, draws: int) -> jax.Array:
    def one(key: jax.Array) -> jax.Array:
        sample = problems.draw(key, n, d, theta, sigma)

        def at(ridge: jax.Array) -> jax.Array:
            fit = dl.linear_transfer_fit(sample.x, sample.y, sample.beta_s, ridge)
            return problems.risk(fit, sample.beta_t)

        return jax.vmap(at)(ridge)

    return jax.lax.map(one, jax.random.split(key, draws))


def plot(dataset: "xr.Dataset") -> "dict[str, Figure]":
    """Risk against ridge: exact, limit, simulated; the best ridge marked."""
    from sail_jax.drawing import style

    figure, ((left, right),) = style.figure(1, 2, width=4.6, height=3.8)
    for i, ax in enumerate((left, right)):
        case = dataset.isel(case=i)
        stderr = case["std"] / np.sqrt(dataset.attrs["draws"])
        ax.plot(case.ridge, case.exact, color=style.PALETTE[0], label="exact")
        ax.plot(case.ridge, case.limit, color=style.FAINT, ls="--", label="limit $n → ∞$ (eq. 15)")
        ax.errorbar(
            case.ridge,
            case["mean"],
            stderr,
            fmt="o",
            ms=3.5,
            lw=1,
            color=style.PALETTE[1],
            label=f"simulated, {dataset.attrs['draws']} draws (± 1 s.e.)",
        )
        ax.plot(
            case.best_ridge,
            case.best_risk,
            "*",
            ms=13,
            mfc="none",
            color=style.PALETTE[2],
            label="best ridge, $(σ² + \\sin² θ)/(n \\cos² θ)$",
        )
        ax.set(
            xlabel="ridge strength $λ$",
            ylabel="risk of linear transfer",
            title=f"$n$ = {int(case.n)}, $θ$ = {np.degrees(float(case.theta)):.1f}°, "
            f"$σ$ = {dataset.attrs['sigma']:g}",
        )
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return {"ridge": figure}


def summary(dataset: "xr.Dataset") -> str:
    """What the best ridge gains in each case, and how well the two sides agree."""
    sentences = []
    for i in range(dataset.sizes["case"]):
        case = dataset.isel(case=i)
        plain, best = float(case.exact[0]), float(case.best_risk)
        z = (case["mean"] - case.exact) / case["std"] * np.sqrt(dataset.attrs["draws"])
        sentences.append(
            f"With n = {int(case.n)} samples at {np.degrees(float(case.theta)):.1f}° the best "
            f"ridge is {float(case.best_ridge):.3g} and lowers the risk from {plain:.4f} to "
            f"{best:.4f} ({1 - best / plain:.1%}); simulation and exact mean differ by at most "
            f"{float(np.abs(z).max()):.1f} standard errors."
        )
    return " ".join(sentences)
