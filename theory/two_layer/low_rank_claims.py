"""Overtrained, Theorems 4.6 and 4.7 for low-rank adapters (LoRA), which are not in the paper.

Simulators train the adapter's factors by autodiff (`networks`), by Runge-Kutta steps or by
stochastic gradient descent on random inputs.
"""

from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy.interpolate import CubicSpline

from theory.claims import Estimate, generator
from theory.two_layer import fine_tuning, low_rank, modes, networks
from theory.two_layer import low_rank_domains as domains
from theory.two_layer.layers import Layers, ideal, identity_start, theta
from theory.two_layer.tasks import (
    BOTH,
    PRE,
    TARGET,
    D,
    at,
    claim,
    deterministic,
    distance2,
    fixed,
    rotations,
    task,
    trained,
)

SOURCE = "Theorem 4.6 (Section 4.3), for a low-rank adapter"
ADAPTED = f"{BOTH}, adapter on W_1"
SCALE = 1.5
STEPS = 2000  # of Runge-Kutta: errors below 1e-11 at the times used
EXACT = 1e-10
END, ENOUGH = 30.0, 1e-8  # when training ends, and what it leaves
CLOSE = (2.1, 2.9, 2.45, 1.3)  # its residuals .1 and 1.4 of the first two modes
SLOW, QUICK = 0.5, 1.9  # pre-trained modes y < sigma_ft = 2.2


def _first(rank: int, b: float, a: float) -> Layers:
    """Returns B and A in the first modes of an ideal network. Its hidden units are the modes."""
    left = np.asarray(ideal(task(), D).w1) / np.sqrt(PRE)
    return _aligned(rank, b, a, left, np.eye(D))


def _aligned(rank: int, b: float, a: float, left: np.ndarray, right: np.ndarray) -> Layers:
    """Returns B and A in the first modes, given the left and right vectors of modes in columns."""
    return Layers(jnp.asarray(b * left[:, :rank]), jnp.asarray(a * right[:, :rank].T))


def _small(rank: int, scale: float = 0.05) -> Layers:
    """Returns a start in general position, which is not balanced."""
    return Layers(jnp.asarray(scale * fixed(1, D, rank)), jnp.asarray(scale * fixed(2, rank, D)))


def _adapted(frozen: Layers, start: Layers, target: Array, time: float) -> np.ndarray:
    """Computes the map after training an adapter."""
    path = networks.adapter_flow(frozen, start, target, jnp.array([time]), STEPS, scale=SCALE)
    return np.asarray(theta(networks.adapted(frozen, at(path, -1), SCALE)))


def _raised(frozen: Layers, start: Layers, target: Array, time: float) -> float:
    """Computes the increase of the pre-training loss by training an adapter."""
    after = _adapted(frozen, start, target, time)
    return distance2(after, task()) - distance2(theta(frozen), task())


def _on_layer(n: int, rank: int, sigma_ft: tuple[float, ...] = TARGET) -> float:
    """Computes the degradation at the end of training an adapter on W_1, from n ideal modes."""
    return _raised(ideal(task(), n), _small(rank), task(sigma_ft), END)


@claim(
    "LoRA-mode-{name}/ours",
    each=(("balanced", 0.05, 0.05), ("zero", 0.0, 0.1), ("against", -0.08, 0.1)),
)
def _(name, b, a, time=0.5):
    """Δ(n, r, t) = Σ z (z + 2(y-σ_pre)) with z = P - K²/P and dP/dt = 4g(K² + ρP - P²). Here g =
    s√y, ρ = σ_ft - y, and at the start P = g(b+a)²/4 and K = g|b²-a²|/4

    The tolerance covers the error of the Runge-Kutta scheme.

    Source: {SOURCE}
    Domain: {ADAPTED}, s={SCALE}, n=3, r=2, B={b}, A={a} in its modes, t={time}
    """
    del name
    first, y = jnp.arange(D) < 2, jnp.array(PRE) * (jnp.arange(D) < 3)
    predicted = jax.jit(low_rank.degradation)(
        time, y, PRE, TARGET, SCALE * jnp.sqrt(y), b=b * first, a=a * first
    )
    start = _first(2, b, a)
    frozen = ideal(task(), 3)
    return predicted, deterministic(lambda: _raised(frozen, start, task(TARGET), time), EXACT)


@claim("LoRA-real/ours")
def _(pre=1.5, time=0.5):
    """After unfinished pre-training Δ(t) has y = y(t_pre) in the same formula

    The tolerance covers the error of the Runge-Kutta scheme.

    Source: {SOURCE}
    Domain: {BOTH}, U = V, start e^-3 I, pre-training until {pre}, adapter on W_1, s={SCALE}, r=2,
      B=0, A=.1, t={time}
    """
    y = modes.mode(pre, np.exp(-6.0), np.array(PRE))
    first = jnp.arange(D) < 2
    predicted = low_rank.degradation(
        time, y, PRE, TARGET, SCALE * jnp.sqrt(y), b=0.0, a=0.1 * first
    )

    def simulate() -> float:
        of_pre, of_ft = (task(sigma, symmetric=True) for sigma in (PRE, TARGET))
        frozen = at(trained(identity_start(D, 3.0), of_pre, [pre]), -1)
        u = rotations()[0]
        after = _adapted(frozen, _aligned(2, 0.0, 0.1, u, u), of_ft, time)
        return distance2(after, of_pre) - distance2(theta(frozen), of_pre)

    return predicted, deterministic(simulate, EXACT)


@claim(
    "LoRA-flow-{name}/ours",
    each=(
        ("balanced", "BᵀB = AAᵀ"),
        ("zero", "B = 0, AAᵀ = .04 I"),
        ("random", "B = 0, A random"),
    ),
)
def _(name, what, time=0.6):
    """√s B and √s A follow the flow of a two-layer network towards A_ft - θ. Δ(t) is compared

    It is solved exactly where BᵀB - AAᵀ = cI, and integrated for a random A. The tolerance covers
    the error of the Runge-Kutta scheme.

    Source: {SOURCE}
    Domain: d={D}, σ_pre={PRE}, any A_ft, adapter on the map, s={SCALE}, r=2, {what}, t={time}
    """
    del what
    target = jnp.asarray(fixed(3, D, D))
    q = np.linalg.qr(fixed(4, 2 * D, 2))[0]
    # B^T B and A A^T are both I if each half is orthonormal.
    left, right = (0.2 * np.linalg.qr(half)[0] for half in (q[:D], q[D:]))
    right = 0.2 * fixed(5, D, 2) if name == "random" else right
    start = Layers(jnp.asarray(left * (name == "balanced")), jnp.asarray(right.T))
    frozen = Layers(task(), jnp.eye(D))
    steps = None if name == "random" else 32
    moved = theta(at(low_rank.flow(start, target - task(), [time], scale=SCALE, steps=steps), -1))
    predicted = SCALE**2 * distance2(moved, np.zeros((D, D)))
    return predicted, deterministic(lambda: _raised(frozen, start, target, time), EXACT)


@claim("LoRA-end/ours")
def _():
    """Δ(n, r) is the sum of the r largest (σ_ft-σ_pre)² with i ≤ n

    The tolerance covers what remains at the end of training.

    Source: {SOURCE}
    Domain: {ADAPTED}, small random B and A, n=3, r=2, t → ∞
    """
    predicted = low_rank.losses(PRE, TARGET, 2)[0][3]
    return predicted, deterministic(lambda: _on_layer(3, 2), ENOUGH)


@claim("LoRA-threshold/ours")
def _():
    """Mode n > r is learned at no cost to the pre-training loss at σ_ft/σ_pre = 1 + √(1 +
    ρ²/σ_pre²), where ρ is the r-th largest |σ_ft-σ_pre| before it. Full fine-tuning has 2

    The tolerance covers what remains at the end of training.

    Source: Theorem 4.7 (Section 4.3) and Lemma A.26, for a low-rank adapter
    Domain: d={D}, σ_pre={PRE}, r=1, σ_ft,1={TARGET[0]} and σ_ft,2 at the threshold, t → ∞
    """
    ratio = low_rank.harm_thresholds(PRE, TARGET, 1)[1]
    at_threshold = (TARGET[0], float(ratio) * PRE[1], *TARGET[2:])
    before = low_rank.losses(PRE, at_threshold, 1)[1][1]
    rest = sum(s**2 for s in PRE[2:])
    return before, deterministic(lambda: _on_layer(2, 1, at_threshold) + rest, ENOUGH)


@claim("LoRA-less/ours", "<=", attack=domains.LESS)
def _():
    """For aligned tasks Δ(n, r) ≤ Δ_pre(n) of full fine-tuning

    Source: {SOURCE}
    Domain: d={D}, σ_pre={PRE}, σ_ft={CLOSE}, adapter on W_1, n=2, r=1, t → ∞
    """
    full = fine_tuning.degradations(jnp.array(PRE), jnp.array(CLOSE))[2]
    return full, deterministic(lambda: _on_layer(2, 1, CLOSE), ENOUGH)


@claim("LoRA-unaligned/ours")
def _(sigma=(1.0, 2.0, 0.6, 0.3), degrees=60):
    """With other singular vectors an adapter on W_1 ends at the best approximation of rank r of
    (A_ft - θ)P, where P projects on the rows of θ. It may do more harm than full fine-tuning. Δ(n,
    r) - Δ_pre(n) is compared

    The tolerance covers what remains at the end of training.

    Source: {SOURCE}
    Domain: d={D}, σ_pre={PRE}, σ_ft={sigma}, right vectors 1, 2 turned by {degrees}°, n=1, r=1
    """
    u, v = rotations()
    c, s = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    turn = np.eye(D)
    turn[:2, :2] = [[c, -s], [s, c]]
    target, frozen = jnp.asarray((u * np.array(sigma)) @ (v @ turn).T), ideal(task(), 1)
    full = fine_tuning.unaligned_losses(task(), target)[0][1]
    moved = low_rank.update(frozen, target, 1)

    def simulate() -> float:
        thin = Layers(frozen.w1[:, :1], frozen.w2[:1])
        tuned = np.asarray(theta(at(trained(thin, target, [END]), -1)))
        adapted = _adapted(frozen, _small(1), target, END)
        return distance2(adapted, task()) - distance2(tuned, task())

    return distance2(theta(frozen) + moved, task()) - full, deterministic(simulate, ENOUGH)


@claim("LoRA-rate/ours", "<=", attack=domains.RATE)
def _(f=2.2, s=SCALE):
    """An adapter on W_1 grows in a mode y < σ_ft at a rate of at most 8s(σ_ft/3)^{{3/2}}, attained
    at y = σ_ft/3. More pre-training slows it down. Full fine-tuning has 4σ_ft at every y

    Source: {SOURCE}
    Domain: one mode, σ_ft={f}, y=σ_ft/3, adapter on W_1, s={s}, from 1e-12
    """

    def simulate() -> float:
        one = jnp.ones((1, 1))
        frozen, small = Layers(one * sqrt(f / 3), one * sqrt(f / 3)), Layers(1e-6 * one, 1e-6 * one)
        times = jnp.array([0.2, 0.4])
        path = networks.adapter_flow(frozen, small, f * one, times, STEPS, scale=s)
        return float(np.diff(np.log(np.asarray(path.w1 * path.w2).ravel()))[0]) / 0.2

    return low_rank.fastest_rate(f, s), deterministic(simulate)


@claim("LoRA-search/ours")
def _(f=2.2, small=0.05):
    """On the map half of the way takes log(ρ/z_0 - 1)/(4sρ) with ρ = σ_ft - y. More pre-training
    delays the adapter, while full fine-tuning gets faster

    The tolerance covers the error of the interpolation.

    Source: {SOURCE}
    Domain: one mode, σ_ft={f}, y={SLOW} and {QUICK}, adapter on the map, s={SCALE}, b=a={small}
    """
    z0 = SCALE * small**2

    def halfway(y: float) -> float:
        return float(modes.crossing_time((f - y) / 2, z0, f - y)) / SCALE

    def found(y: float) -> float:
        one, times = jnp.ones((1, 1)), np.linspace(0.01, 4.0, 400)
        start = Layers(small * one, small * one)
        path = networks.adapter_flow(
            Layers(y * one, one), start, f * one, jnp.asarray(times), 20, scale=SCALE
        )
        moved = SCALE * np.asarray(path.w1 * path.w2).ravel()
        return float(CubicSpline(times, moved - (f - y) / 2).roots(extrapolate=False)[0])

    predicted = halfway(QUICK) - halfway(SLOW)
    return predicted, deterministic(lambda: found(QUICK) - found(SLOW), 1e-6)


@claim("LoRA-halved/ours", "<=", attack=domains.HALVED)
def _(rho=0.3, s=SCALE, a=0.2, time=0.005):
    """The start B = 0, A = a moves a mode like the balanced start a/2, a/2, up to sa²/4

    Source: {SOURCE}
    Domain: one mode, ρ={rho}, s={s}, a={a}, t={time}
    """

    def simulate() -> float:
        one, found = jnp.ones((1, 1)), []
        for start in (Layers(0 * one, a * one), Layers(a / 2 * one, a / 2 * one)):
            path = networks.adapter_flow(
                Layers(0 * one, one), start, rho * one, jnp.array([time]), STEPS, scale=s
            )
            found.append(s * float(path.w1[0, 0, 0] * path.w2[0, 0, 0]))
        return abs(found[0] - found[1])

    return s * a**2 / 4, deterministic(simulate)


@claim("LoRA-SGD/ours")
def _(time=0.5, few=200):
    """E Δ(n, r, t) by SGD on x ~ N(0, I) as the learning rate → 0

    Source: {SOURCE}
    Domain: {ADAPTED}, s={SCALE}, n=3, r=2, B=0, A=.1, t={time}; batches of 16, steps
      {few} and twice as many, extrapolated
    """
    first, y = jnp.arange(D) < 2, jnp.array(PRE) * (jnp.arange(D) < 3)
    predicted = jax.jit(low_rank.degradation)(
        time, y, PRE, TARGET, SCALE * jnp.sqrt(y), b=0.0, a=0.1 * first
    )

    def simulate(key: Array, quick: bool) -> Estimate:
        rng, draws = generator(key), 100 if quick else 1_000
        frozen, target = ideal(task(), 3), task(TARGET)
        start = _first(2, 0.0, 0.1)
        before = distance2(theta(frozen), task())

        def raised(x: np.ndarray) -> np.ndarray:
            def one(x: Array) -> Array:
                adapter = networks.adapter_sgd(
                    frozen, start, target, x, time / x.shape[0], scale=SCALE
                )
                return theta(networks.adapted(frozen, adapter, SCALE))

            after = np.asarray(jax.jit(jax.vmap(one))(x))
            return np.sum((after - np.asarray(task())) ** 2, (1, 2)) - before

        coarse, fine = (
            raised(rng.standard_normal((draws, steps, 16, D))) for steps in (few, 2 * few)
        )
        return Estimate.mean(2 * fine - coarse)

    return predicted, simulate
