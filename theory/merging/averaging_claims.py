"""Averages of one run's checkpoints, and learning-rate decay (WSM, arXiv 2507.17634).

The paper's identity is exact for the past updates. The conclusion that the average equals annealing
is false for SGD on a quadratic. The other claims are corrected statements. Simulators run SGD with
constant and with decayed rates, step by step, and Adam.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from theory import claims
from theory.claims import Estimate, Simulate, measured
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
claim = partial(claims.claim, PAPER)
RUNS = 40_000
UNIFORM = np.full(13, 1 / 13)  # linear decay
SETTING = "h=1, η=.1, σ=1, p=7, n=13"
APART, LOSS = 0.40, 0.0076  # of both biases, and of both losses at the break-even, to two digits
FAR = "start 3 from the minimum"

Problem = Callable[[], NoisyQuadratic]
Moments = Callable[[NoisyQuadratic, np.ndarray], Any]


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


def _moment(moments: Moments, problem: Problem, weights: np.ndarray, field: str) -> float:
    return float(getattr(moments(problem(), weights), field))


# --- the identity ---------------------------------------------------------------------------------


def _cosine(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Computes the weights of cosine decay, and the decay d_1 to d_k, each by its own formula."""
    j, i = np.arange(n), np.arange(1, n)
    weights = np.sin(np.pi / (2 * n)) * np.sin(np.pi * (2 * j + 1) / (2 * n))
    return weights, (1 + np.cos(np.pi * i / n)) / 2


STEPS, CHECKPOINTS = 5, 9


def _adam_run() -> np.ndarray:
    """Computes the iterates of Adam on a quartic, from the first checkpoint to the last."""
    adam, x = optax.adam(0.05), jnp.array([1.0, -2.0, 0.5])
    state, path = adam.init(x), [np.asarray(x)]
    slope = jax.jit(jax.grad(lambda x: jnp.sum(x**4) / 4 + jnp.prod(x)))
    for _ in range(STEPS * (CHECKPOINTS - 1)):
        update, state = adam.update(slope(x), state)
        x = optax.apply_updates(x, update)
        path.append(np.asarray(x))
    return np.stack(path)


@claim("replay/exact")
def _():
    """Σⱼ cⱼθⱼ = θ₀ + Σᵢ dᵢ(θᵢ - θᵢ₋₁) with dᵢ = Σ_{{j≥i}} cⱼ, the past updates scaled by a decay

    It holds for any optimiser, as long as the updates stay the same.

    Source: merging as decay, wᵢ = Σ_{{j≥i}} cⱼ
    Domain: Adam on a quartic, p={STEPS}, n={CHECKPOINTS}, cosine; the sum of coordinates
    """
    path, (weights, decay) = _adam_run(), _cosine(CHECKPOINTS)

    def replayed() -> float:
        """Applies the run's updates again, each scaled by the decay of its interval."""
        x = path[0].copy()
        for step, update in enumerate(np.diff(path, axis=0)):
            x += decay[step // STEPS] * update
        return float(np.sum(x))

    return np.sum(weights @ path[::STEPS]), measured(replayed)


# --- merging is not annealing ---------------------------------------------------------------------


for _field, _simulated, _effect, _texts in (
    (
        "bias",
        _mean,
        0.05 * APART,
        (
            "E Σcⱼxⱼ = μ₀Σcⱼρʲ, ρ = (1-ηh)^p",
            "E x_k = μ₀Πᵢ(1-ηdᵢh)^p of decayed SGD",
            "The average keeps old bias.",
            f"The test detects 5 % of the distance of the biases, {APART}.",
        ),
    ),
    (
        "variance",
        _variance,
        None,
        (
            "V Σcⱼxⱼ = vΣcᵢcⱼρ^|i-j| + (v₀-v)(Σcⱼρʲ)², v = ησ²/(h(2-ηh))",
            "v ← (1-ηdᵢh)²v + (ηdᵢσ)², p times for each i, of decayed SGD",
            "The average has less noise.",
            "",
        ),
    ),
):

    @claim("annealing-{field}/printed", each=((_field, _simulated, *_texts),))
    def _printed_annealing(field, simulated, of_average, of_decay, why, seen):
        """The average of a constant rate's checkpoints has the {field} of annealing

        Annealing computes its gradients elsewhere. {why}

        Source: merging as decay, read as an equality
        Domain: {SETTING}, {FAR}, stationary
        """
        predicted = _moment(decayed, _far, UNIFORM, field)
        return predicted, simulated(_far, UNIFORM, "averaged")

    @_printed_annealing.beside("corrected")
    def _(field, of_average):
        """{of_average}"""
        return _moment(averaged, _far, UNIFORM, field)

    @claim("decay-{field}/ours", effect=_effect, each=((_field, _simulated, *_texts),))
    def _(field, simulated, of_average, of_decay, why, seen):
        """{of_decay}

        {seen}

        Source: merging as decay, read as an equality
        Domain: {SETTING}, {FAR}, stationary
        """
        predicted = _moment(decayed, _far, UNIFORM, field)
        return predicted, simulated(_far, UNIFORM, "decayed")


# --- which of the two is better -------------------------------------------------------------------

FOUR = np.full(4, 1 / 4)
SPARSE = "h=1, η=.5, σ=1, p=40, n=4, stationary"


def _sparse() -> NoisyQuadratic:
    return NoisyQuadratic(1.0, 0.5, 1.0, 40)


def _followed_break_even(time: float, pace: float) -> float:
    """Computes the dense break-even of SGD with a small rate, by moments followed step by step."""
    count = round(time / pace) + 1
    stationary = pace / (2 - pace)
    average, decay = followed(pace, 1, np.full(count, 1 / count), stationary)
    square = (decay[1] - average[1]) / (average[0] ** 2 - decay[0] ** 2)
    return float(np.sqrt(square / stationary))


@claim("old-bias/ours", ">=", attack=averaging_domains.SHARE)
def _():
    """Σcⱼρʲ ≥ Πᵢ(1-ηdᵢh)^p for 0 ≤ dᵢ ≤ 1 and ηh ≤ 1, so an average keeps more of its start

    The proof uses (1-ud)^p ≤ 1 - d(1-ρ) and then 1 - Π(1-dᵢw) ≥ wΣdᵢ(1-w)^(i-1).

    Source: average or decay, on a quadratic
    Domain: h=1, η=.05, p=4, n=4, {FAR}, stationary
    """
    brief = partial(NoisyQuadratic, 1.0, 0.05, 1.0, 4, 3.0)
    return _moment(decayed, brief, FOUR, "bias"), _mean(brief, FOUR, "averaged")


@claim("noise/open", "<=", attack=averaging_domains.NOISE)
def _():
    """For p=1 and ηh ≤ 1 the average of all iterates has at most linear decay's variance

    With checkpoints far apart the average has more (see far-apart).

    Source: average or decay, on a quadratic
    Domain: h=1, η=.1, σ=1, p=1, n=6, stationary
    """
    every, six = partial(NoisyQuadratic, 1.0, 0.1, 1.0, 1), np.full(6, 1 / 6)
    bound = _moment(decayed, every, six, "variance")
    return bound, _variance(every, six, "averaged", 4 * RUNS)


@claim("far-apart/ours")
def _():
    """As ρ → 0, V Σcⱼxⱼ = v/n for a uniform average

    Source: average or decay, on a quadratic, checkpoints far apart
    Domain: {SPARSE}
    """
    return 1 / 3 / 4, _variance(_sparse, FOUR, "averaged")


@claim("far-apart-decay/ours")
def _():
    """As ρ → 0, linear decay ends with v(2-ηh)/(2n-ηh), less than v/n

    Source: average or decay, on a quadratic, checkpoints far apart
    Domain: {SPARSE}
    """
    return 1 / 3 * (2 - 0.5) / (2 * 4 - 0.5), _variance(_sparse, FOUR, "decayed")


@claim("break-even/ours", effect=0.05 * LOSS)
def _(seen=LOSS):
    """The average wins iff μ₀² + v₀ < (N_decay - N_average)/((Σcⱼρʲ)² - Πᵢ(1-ηdᵢh)^2p)

    N is the noise since x₀. The test detects 5 % of the loss there, {seen}. For p, n or ηh it is a
    root.

    Source: average or decay, on a quadratic
    Domain: {SETTING}, start at the break-even; the average's loss minus the decay's
    """
    even = partial(NoisyQuadratic, 1.0, 0.1, 1.0, 7, float(break_even(_far(), UNIFORM)))

    def simulate(key: jax.Array, quick: bool) -> Estimate:
        """Both runs share their noise."""
        found = _ends(even, UNIFORM, 2 * RUNS, key, quick)
        return Estimate.mean((found.averaged**2 - found.decayed**2) / 2)

    return 0.0, simulate


@claim("break-even-dense/limit")
def _(time=2.0, pace=1e-3):
    """μ₀²/v = [√(π/T)erf(√T)/2 - 2(T-1+e^-T)/T²] / [((1-e^-T)/T)² - e^-T]

    The distance is its root. The tolerance is 2ηh.

    Source: average or decay, on a quadratic, ηh → 0, every iterate averaged
    Domain: T=ηhk={time:g}, ηh={pace}
    """
    return dense_break_even(time), measured(lambda: _followed_break_even(time, pace), 2 * pace)


@claim("break-even-least/open", ">=", attack=averaging_domains.LEAST_DISTANCE)
def _(time=0.05, pace=1e-4):
    """For μ₀² < v/5 the average wins at any window

    Short windows attain it. The tolerance is 4ηh.

    Source: average or decay, on a quadratic, ηh → 0, every iterate averaged
    Domain: T={time}, ηh={pace}
    """
    return LEAST, measured(lambda: _followed_break_even(time, pace) ** 2, 4 * pace)
