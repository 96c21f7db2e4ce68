"""Overtrained, Theorem 4.6 for adapters from the usual start, which is not in the paper.

The start is B = 0 with a random A, on one layer or on every layer, or lambda-balanced layers of
unequal widths. Simulators train all weights by autodiff and Runge-Kutta steps (`networks`).
"""

from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import Estimate, generator
from theory.two_layer import adapters, layers, networks, riccati
from theory.two_layer.layers import Layers, theta
from theory.two_layer.low_rank import flow
from theory.two_layer.tasks import at, claim, deterministic, distance2, fixed

SOURCE = "Theorem 4.6 (Section 4.3), for a low-rank adapter from B = 0"
RHO, SCALE, RANK = 1.2, 1.5, 2
STEPS = 2000  # of Runge-Kutta: errors below 1e-11 at the times used
EXACT = 1e-10
DEEP = (0.7, 1.6, 1.1), (0.1, 0.3, 0.0)  # weights of a mode, and entries of A
TARGET = 4.0


def _unit(seed: int, n: int) -> np.ndarray:
    drawn = fixed(seed, n)
    return drawn / np.linalg.norm(drawn)


def _trained(a: np.ndarray, residual: np.ndarray, time: float) -> np.ndarray:
    """Returns s B A after training an adapter on the map from B = 0."""
    (o, i), r = residual.shape, len(a)
    frozen = Layers(jnp.zeros((o, i)), jnp.eye(i))
    start = Layers(jnp.zeros((o, r)), jnp.asarray(a))
    times = jnp.array([time])
    path = networks.adapter_flow(frozen, start, jnp.asarray(residual), times, STEPS, scale=SCALE)
    return SCALE * np.asarray(theta(at(path, -1)))


@claim("LoRA-learned-{name}/ours", each=(("early", 0.1), ("late", 0.7)))
def _(name, time, row=0.8, o=3, i=5):
    """From B = 0 and orthogonal rows of A with the squared norm c, a residual ρuvᵀ is learned up to
    z = 2cqρS(C+cS)/(q((C+cS)² - 4ρ²S²) + (1-q)e^{{2ct}}) with q = |Av|²/c, S = sinh(Rt)/R, C =
    cosh(Rt), R = √(c²+4ρ²)

    The unit of time is 1/s, and c is s times the squared norm. The tolerance covers the error of
    the Runge-Kutta scheme.

    Source: {SOURCE}
    Domain: ρ={RHO}, any u and v, s={SCALE}, r={RANK}, c/s={row}, d={o} x {i}, t={time}
    """
    del name
    u, v = _unit(6, o), _unit(7, i)
    a = sqrt(row) * np.linalg.qr(fixed(8, i, RANK))[0].T
    overlap = float(np.sum((a @ v) ** 2)) / row
    predicted = adapters.learned(time, RHO, SCALE, row=row, overlap=overlap)
    return predicted, deterministic(
        lambda: float(u @ _trained(a, RHO * np.outer(u, v), time) @ v), EXACT
    )


@claim("LoRA-equivalent/limit")
def _(time=0.7, i=32, row=0.3):
    """From B = 0 and a Gaussian A, z is nearly that of orthogonal rows with c = |AᵀAv|²/|Av|² and
    cq = |Av|²

    The limit is of small r/i, or of rank 1. The tolerance is the largest error of ten draws of A.

    Source: {SOURCE}
    Domain: ρ={RHO}, s={SCALE}, r={RANK}, i={i}, entries of A of variance {row}/i, t={time}
    """
    a, v = sqrt(row / i) * fixed(9, RANK, i), np.eye(i)[0]
    of_row, overlap = adapters.equivalent(a, v)
    predicted = adapters.learned(time, RHO, SCALE, row=of_row, overlap=overlap)
    return predicted, deterministic(lambda: float(_trained(a, RHO * v[None], time)[0, 0]), 0.013)


@claim("LoRA-speed/ours")
def _(i=6, variance=0.3):
    """At first a Gaussian A learns a direction at the relative rate 2s²·var·χ²_r, with the mean
    2s²·var·r

    Source: {SOURCE}
    Domain: s={SCALE}, r={RANK}, i={i}, entries of A of variance {variance}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        """Takes the derivative of the map along minus the gradient, by autodiff."""
        rng, draws, time = generator(key), 500 if quick else 20_000, 1e-6

        def one(a: Array) -> Array:
            start = Layers(jnp.zeros((1, RANK)), a)
            frozen = Layers(jnp.zeros((1, i)), jnp.eye(i))
            target = RHO * jnp.eye(i)[:1]
            path = networks.adapter_flow(frozen, start, target, jnp.array([time]), 1, scale=SCALE)
            return SCALE * theta(path)[0, 0, 0] / (RHO * time)

        drawn = sqrt(variance) * rng.standard_normal((draws, RANK, i))
        return Estimate.mean(np.asarray(jax.jit(jax.vmap(one))(jnp.asarray(drawn))))

    return 2 * SCALE**2 * variance * RANK, simulate


@claim("LoRA-reduced/ours")
def _(time=0.6, o=7, i=9):
    """Any adapter moves in the span of its start and the residual, rank(residual) + r dimensions at
    either end. |sBA - residual|² is compared

    The tolerance covers the error of the Runge-Kutta scheme.

    Source: {SOURCE}
    Domain: residual of rank 2, {o} x {i}, s={SCALE}, r={RANK}, B = 0, A random, t={time}
    """
    residual = fixed(10, o, 2) @ fixed(11, 2, i) / 4
    a = 0.3 * fixed(12, RANK, i)
    small, target, *_ = adapters.reduced(
        Layers(jnp.zeros((o, RANK)), jnp.asarray(a)), jnp.asarray(residual)
    )
    end = theta(at(flow(small, target, [time], scale=SCALE), -1))
    predicted = distance2(SCALE * end, target)
    return predicted, deterministic(lambda: distance2(_trained(a, residual, time), residual), EXACT)


def _deep(time: float) -> np.ndarray:
    """Returns the weights of the mode in each layer, after training adapters on every layer."""
    n, (weights, starts) = 3, DEEP
    bases = [np.linalg.qr(fixed(20 + k, n, n))[0] for k in range(len(weights) + 1)]
    frozen = [
        w * np.outer(left[:, 0], right[:, 0]) + left[:, 1:] @ right[:, 1:].T
        for w, left, right in zip(weights, bases, bases[1:], strict=False)
    ]
    pairs = [
        Layers(jnp.zeros((n, 1)), jnp.asarray(a * right[:, :1].T))
        for a, right in zip(starts, bases[1:], strict=True)
    ]
    first, last = bases[0], bases[-1]
    target = TARGET * np.outer(first[:, 0], last[:, 0]) + first[:, 1:] @ last[:, 1:].T
    given = [jnp.asarray(w) for w in frozen], pairs, jnp.asarray(target), jnp.array([time])
    ends = networks.layers_flow(*given, STEPS, scale=SCALE)
    return np.array(
        [
            w + SCALE * left[:, 0] @ np.asarray(theta(at(of, -1))) @ right[:, 0]
            for w, of, left, right in zip(weights, ends, bases, bases[1:], strict=False)
        ]
    )


@claim("LoRA-layers-{layer}/ours", each=((1,), (2,)))
def _(layer):
    """With adapters on several layers from B = 0, x_l = w_l + κ_l/2·sinh(2α_l) in an aligned mode,
    where w_l α_l + κ_l/2·sinh²(α_l) is the same for all layers and κ_l = s a_l². x_l is compared at
    the end

    The tolerance covers the error of the Runge-Kutta scheme.

    Source: {SOURCE}, on every layer
    Domain: three layers w={DEEP[0]}, A={DEEP[1]}, s={SCALE}, σ_ft={TARGET}, t → ∞
    """
    predicted = adapters.layer_weights(TARGET, *DEEP, SCALE)[layer - 1]
    return predicted, deterministic(lambda: float(_deep(1.0)[layer - 1]), EXACT)


@claim("LoRA-layers-time/ours")
def _(level=2.5):
    """Then h = w_l α_l + κ_l/2·sinh²(α_l) obeys dh/dt = 2sy(σ_ft - y), where y = Π x_l. y is
    compared

    The tolerance covers the error of the Runge-Kutta scheme.

    Source: {SOURCE}, on every layer
    Domain: three layers w={DEEP[0]}, A={DEEP[1]}, s={SCALE}, σ_ft={TARGET}, when y={level}
    """
    time = float(adapters.layer_time(level, TARGET, *DEEP, SCALE))
    return level, deterministic(lambda: float(np.prod(_deep(time))), EXACT)


@claim(
    "balanced-{name}/ours",
    each=(("positive", (5, 2, 3), 0.8), ("negative", (2, 3, 6), -0.8), ("zero", (2, 5, 3), 0.0)),
)
def _(name, widths, balance, time=0.5):
    """From W_1ᵀW_1 - W_2W_2ᵀ = λI the flow of layers of any widths is exact, bottlenecks included.
    |θ - A|² is compared

    The tolerance covers the error of the Runge-Kutta scheme.

    Source: Theorem A.1 (Appendix A.1), for λ-balanced starts (Dominé et al., 2024)
    Domain: widths (o, h, i)={widths}, λ={balance}, t={time}
    """
    del name
    start = layers.balanced_start(jax.random.key(3), widths, balance, 0.5)
    target = jnp.asarray(fixed(13, widths[0], widths[2]))
    predicted = layers.loss(at(riccati.flow(start, target, [time]), -1), target)

    def simulate() -> float:
        path = networks.gradient_flow(start, target, jnp.array([time]), STEPS)
        return float(layers.loss(at(path, -1), target))

    return predicted, deterministic(simulate, EXACT)
