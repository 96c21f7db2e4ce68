"""Averages of one run's checkpoints, and learning-rate decay (WSM, arXiv 2507.17634).

The paper's identity is exact for the updates that were made. That the average therefore equals
annealing is refuted for SGD on a quadratic; the other rows have what is true there. Simulators are
SGD with constant and with decayed rates, step by step, and Adam.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from theory.claims import Claim, Estimate, Simulate, beside, measured
from theory.merging import averaging_domains
from theory.merging.averaging import (
    LEAST,
    Draws,
    NoisyQuadratic,
    averaged,
    break_even,
    decayed,
    dense_break_even,
    simulate_average,
)
from theory.merging.averaging_domains import followed

PAPER = "wsm"
RUNS = 40_000
UNIFORM = np.full(13, 1 / 13)  # linear decay
SETTING = "h=1, η=.1, σ=1, p=7, n=13"
APART, LOSS = 0.40, 0.0076  # of both biases, and of both losses at the break-even, to two digits
FAR, NEAR = "start 3 from the minimum", "start at the break-even"

Problem = Callable[[], NoisyQuadratic]


def _far() -> NoisyQuadratic:
    return NoisyQuadratic(1.0, 0.1, 1.0, 7, 3.0)


def _ends(problem: Problem, weights: np.ndarray, runs: int, key: jax.Array, quick: bool) -> Draws:
    return simulate_average(key, problem(), weights, runs // 10 if quick else runs)


def _mean(problem: Problem, weights: np.ndarray, field: str, runs: int = RUNS) -> Simulate:
    """Simulates the mean of an end point."""
    return lambda *how: Estimate.mean(getattr(_ends(problem, weights, runs, *how), field))


def _variance(problem: Problem, weights: np.ndarray, field: str, runs: int = RUNS) -> Simulate:
    """Simulates the variance of an end point."""

    def squares(*how: Any) -> Estimate:
        x = np.asarray(getattr(_ends(problem, weights, runs, *how), field))
        return Estimate.mean((x - x.mean()) ** 2 * x.size / (x.size - 1))

    return squares


def _moment(
    moments: Callable[..., Any], problem: Problem, weights: np.ndarray, field: str
) -> Callable[[], float]:
    return lambda: float(getattr(moments(problem(), weights), field))


# --- the identity ---------------------------------------------------------------------------------


def _cosine(n: int) -> tuple[np.ndarray, np.ndarray]:
    """The weights of cosine decay, and the decay d_1 to d_k, each by its own formula."""
    j, i = np.arange(n), np.arange(1, n)
    weights = np.sin(np.pi / (2 * n)) * np.sin(np.pi * (2 * j + 1) / (2 * n))
    return weights, (1 + np.cos(np.pi * i / n)) / 2


STEPS, CHECKPOINTS = 5, 9


def _adam_run() -> np.ndarray:
    """The iterates of Adam on a quartic, from the first checkpoint to the last."""
    adam, x = optax.adam(0.05), jnp.array([1.0, -2.0, 0.5])
    state, path = adam.init(x), [np.asarray(x)]
    slope = jax.jit(jax.grad(lambda x: jnp.sum(x**4) / 4 + jnp.prod(x)))
    for _ in range(STEPS * (CHECKPOINTS - 1)):
        update, state = adam.update(slope(x), state)
        x = optax.apply_updates(x, update)
        path.append(np.asarray(x))
    return np.stack(path)


def _merged() -> float:
    weights, _ = _cosine(CHECKPOINTS)
    return float(np.sum(weights @ _adam_run()[::STEPS]))


def _replayed() -> float:
    """The run's updates again, each scaled by the decay of its interval."""
    path, (_, decay) = _adam_run(), _cosine(CHECKPOINTS)
    x = path[0].copy()
    for step, update in enumerate(np.diff(path, axis=0)):
        x += decay[step // STEPS] * update
    return float(np.sum(x))


def _identity() -> list[Claim]:
    return beside(
        f"{PAPER}/replay",
        "merging as decay, wᵢ = Σ_{j≥i} cⱼ",
        f"Adam on a quartic, p={STEPS}, n={CHECKPOINTS}, cosine; the sum of coordinates",
        measured(_replayed),
        exact=(
            "Σⱼ cⱼθⱼ = θ₀ + Σᵢ dᵢ(θᵢ - θᵢ₋₁), dᵢ = Σ_{j≥i} cⱼ: the updates made, decayed",
            _merged,
            "of any optimiser, as long as the updates stay the same",
        ),
    )


# --- merging is not annealing ---------------------------------------------------------------------


def _annealing() -> list[Claim]:
    place, domain = "merging as decay, read as an equality", f"{SETTING}, {FAR}, stationary"
    claims = []
    for field, simulated, of_average, of_decay, why in (
        (
            "bias",
            _mean,
            "E Σcⱼxⱼ = μ₀Σcⱼρʲ, ρ = (1-ηh)^p",
            "E x_k = μ₀Πᵢ(1-ηdᵢh)^p of decayed SGD",
            "the average keeps old bias",
        ),
        (
            "variance",
            _variance,
            "V Σcⱼxⱼ = vΣcᵢcⱼρ^|i-j| + (v₀-v)(Σcⱼρʲ)², v = ησ²/(h(2-ηh))",
            "v ← (1-ηdᵢh)²v + (ηdᵢσ)², p times for each i, of decayed SGD",
            "the average has less noise",
        ),
    ):
        claims += beside(
            f"{PAPER}/annealing-{field}",
            place,
            domain,
            simulated(_far, UNIFORM, "averaged"),
            printed=(
                f"the average of a constant rate's checkpoints has the {field} of annealing",
                _moment(decayed, _far, UNIFORM, field),
                f"gradients are taken elsewhere: {why}",
            ),
            corrected=(of_average, _moment(averaged, _far, UNIFORM, field)),
        )
        claims += beside(
            f"{PAPER}/decay-{field}",
            place,
            domain,
            simulated(_far, UNIFORM, "decayed"),
            effect=0.05 * APART if field == "bias" else None,
            ours=(
                of_decay,
                _moment(decayed, _far, UNIFORM, field),
                f"seen: 5 % of how far both biases are apart, {APART}" if field == "bias" else "",
            ),
        )
    return claims


# --- which of the two is better -------------------------------------------------------------------

FOUR, SIX = np.full(4, 1 / 4), np.full(6, 1 / 6)
SPARSE = "h=1, η=.5, σ=1, p=40, n=4, stationary"


def _brief() -> NoisyQuadratic:
    return NoisyQuadratic(1.0, 0.05, 1.0, 4, 3.0)


def _every() -> NoisyQuadratic:
    return NoisyQuadratic(1.0, 0.1, 1.0, 1)


def _sparse() -> NoisyQuadratic:
    return NoisyQuadratic(1.0, 0.5, 1.0, 40)


def _even() -> NoisyQuadratic:
    far = _far()
    return NoisyQuadratic(1.0, 0.1, 1.0, 7, float(break_even(far, UNIFORM)))


def _loss_apart(key: jax.Array, quick: bool) -> Estimate:
    """E L of the average minus that of the decay; both runs share their noise."""
    found = _ends(_even, UNIFORM, 2 * RUNS, key, quick)
    return Estimate.mean((found.averaged**2 - found.decayed**2) / 2)


def _followed_break_even(time: float, pace: float) -> float:
    """The dense break-even of SGD with a small rate, by moments that are followed step by step."""
    count = round(time / pace) + 1
    stationary = pace / (2 - pace)
    average, decay = followed(pace, 1, np.full(count, 1 / count), stationary)
    square = (decay[1] - average[1]) / (average[0] ** 2 - decay[0] ** 2)
    return float(np.sqrt(square / stationary))


def _which() -> list[Claim]:
    place = "average or decay, on a quadratic"
    dense = f"{place}, ηh → 0, every iterate averaged"
    (long, pace), (short, slower) = (2.0, 1e-3), (0.05, 1e-4)
    return [
        *beside(
            f"{PAPER}/old-bias",
            place,
            f"h=1, η=.05, p=4, n=4, {FAR}, stationary",
            _mean(_brief, FOUR, "averaged"),
            relation=">=",
            attack={"ours": averaging_domains.SHARE},
            ours=(
                "Σcⱼρʲ ≥ Πᵢ(1-ηdᵢh)^p for 0 ≤ dᵢ ≤ 1, ηh ≤ 1: an average keeps more of its start",
                _moment(decayed, _brief, FOUR, "bias"),
                "(1-ud)^p ≤ 1 - d(1-ρ), then 1 - Π(1-dᵢw) ≥ wΣdᵢ(1-w)^(i-1)",
            ),
        ),
        *beside(
            f"{PAPER}/noise",
            place,
            "h=1, η=.1, σ=1, p=1, n=6, stationary",
            _variance(_every, SIX, "averaged", 4 * RUNS),
            relation="<=",
            attack={"open": averaging_domains.NOISE},
            open=(
                "p=1, ηh ≤ 1: the average of all iterates has at most linear decay's variance",
                _moment(decayed, _every, SIX, "variance"),
                "checkpoints far apart have more: see far-apart",
            ),
        ),
        *beside(
            f"{PAPER}/far-apart",
            f"{place}, checkpoints far apart",
            SPARSE,
            _variance(_sparse, FOUR, "averaged"),
            ours=("ρ → 0: V Σcⱼxⱼ = v/n of a uniform average", lambda: 1 / 3 / 4),
        ),
        *beside(
            f"{PAPER}/far-apart-decay",
            f"{place}, checkpoints far apart",
            SPARSE,
            _variance(_sparse, FOUR, "decayed"),
            ours=(
                "ρ → 0: linear decay ends with v(2-ηh)/(2n-ηh), less than v/n",
                lambda: 1 / 3 * (2 - 0.5) / (2 * 4 - 0.5),
            ),
        ),
        *beside(
            f"{PAPER}/break-even",
            place,
            f"{SETTING}, {NEAR}; the average's loss minus the decay's",
            _loss_apart,
            effect=0.05 * LOSS,
            ours=(
                "the average wins iff μ₀² + v₀ < (N_decay - N_average)/((Σcⱼρʲ)² - Πᵢ(1-ηdᵢh)^2p)",
                lambda: 0.0,
                f"N: noise since x₀. Seen: 5 % of the loss there, {LOSS}. In p, n or ηh a root",
            ),
        ),
        *beside(
            f"{PAPER}/break-even-dense",
            dense,
            f"T=ηhk={long:g}, ηh={pace}",
            measured(partial(_followed_break_even, long, pace), 2 * pace),
            limit=(
                "μ₀²/v = [√(π/T)erf(√T)/2 - 2(T-1+e^-T)/T²] / [((1-e^-T)/T)² - e^-T]",
                lambda: float(dense_break_even(long)),
                "the root of it; the tolerance is 2ηh",
            ),
        ),
        *beside(
            f"{PAPER}/break-even-least",
            dense,
            f"T={short}, ηh={slower}",
            measured(lambda: _followed_break_even(short, slower) ** 2, 4 * slower),
            relation=">=",
            attack={"open": averaging_domains.LEAST_DISTANCE},
            open=(
                "from μ₀² < v/5 the average wins whatever the window",
                lambda: LEAST,
                "short windows attain it; the tolerance is 4ηh",
            ),
        ),
    ]


CLAIMS = (*_identity(), *_annealing(), *_which())
