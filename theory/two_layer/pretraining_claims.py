"""Overtrained, Theorems 4.1 and A.1 on pre-training, as printed and corrected.

The simulator is Runge-Kutta gradient flow of the network by autodiff (`networks`).
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import Simulate
from theory.two_layer import riccati
from theory.two_layer.layers import Layers, ideal, identity_start, loss, theta
from theory.two_layer.tasks import (
    PRE,
    SIZES,
    SUBSTEPS,
    D,
    at,
    claim,
    deterministic,
    fixed,
    mode_path,
    rotations,
    task,
    trained,
)

LEGS = ((0, 0.0), (1, 0.5), (2, 0.0))  # seed of the target, anchor
TIMES = [0.5, 1.0, 1.5, 2.0]
RATE = 2 * (PRE[1] - PRE[2]) / (PRE[1] + PRE[2])
PLATEAU = f"{SIZES}, U ≠ V, i=2, τ=8 and 12"
IMBALANCE = 0.3


def _quarters(time: float) -> list[float]:
    return [time / 4, time / 2, 3 * time / 4, time]


def _rate(of: Callable[[float], float], *taus: float) -> Simulate:
    """Computes the rate at which a distance falls with tau."""

    def rate() -> float:
        first, second = map(of, taus)
        return float(np.log(first / second)) / (taus[1] - taus[0])

    return deterministic(rate, 0.02)


def _from_plateau(of: Callable[[Layers], Array]) -> Callable[[float], float]:
    """Computes the distance of a function of networks to its value at the rank-2 plateau."""

    def distance(tau: float) -> float:
        times = _quarters(tau / (PRE[1] + PRE[2]))
        end = at(trained(identity_start(D, tau), task(), times), -1)
        return float(np.linalg.norm(np.asarray(of(end) - of(ideal(task(), 2)))))

    return distance


@claim("A.1-plateau/printed")
def _():
    """For W_i(0)=e^(-τ)I, |W_1(t_i) - U(Σ^i)^½|_F ≤ e^(-Cτ) for some C > 0. The decay in τ is
    compared

    W_1 tends to U(Σ^i)^½ R with a rotation R. The prediction is the product's C.

    Source: Theorem A.1 (Appendix A.1)
    Domain: {PLATEAU}
    """
    return RATE, _rate(_from_plateau(lambda layers: layers.w1), 8.0, 12.0)


@claim("A.1-plateau/corrected")
def _():
    """|θ(t_i) - UΣ^iVᵀ|_F ~ e^(-Cτ) with t_i = τ/(σ_i+σ_{{i+1}}) and C = 2(σ_i-σ_{{i+1}}) t_i/τ

    It is about the product, not the layers. The tolerance covers the next order in e^(-Cτ).

    Source: Theorem 4.1 (Section 4.1) and Theorem A.1 (Appendix A.1)
    Domain: {PLATEAU}
    """
    return RATE, _rate(_from_plateau(theta), 8.0, 12.0)


@claim("A.1-rank/corrected")
def _(sigma=(*PRE[:2], 0, 0), early=5.0, late=7.0):
    """For A of rank R < d, |θ(t_R) - A|_F ~ e^(-Cτ) with t_R = τ/σ_R and C = 2

    It is about the product, not the layers. The tolerance covers the next order in e^(-τ).

    Source: Theorem A.1 (Appendix A.1), R < d
    Domain: d={D}, σ={sigma}, U ≠ V, τ={early:g} and {late:g}
    """
    target = task(sigma)

    def left(tau: float) -> float:
        end = at(trained(identity_start(D, tau), target, _quarters(tau / sigma[1])), -1)
        return float(np.linalg.norm(np.asarray(theta(end)) - np.asarray(target)))

    return 2.0, _rate(left, early, late)


def _unbalanced() -> Layers:
    """Returns a start with W_1^T W_1 - W_2 W_2^T = `IMBALANCE` I."""
    a, b, c = np.linalg.qr(fixed(3, 3, D, D))[0]
    s = np.array([0.5, 0.4, 0.2, 0.0])
    return Layers(jnp.asarray((a * np.sqrt(s**2 + IMBALANCE)) @ c.T), jnp.asarray((c * s) @ b.T))


def _last_entry(exact: bool) -> float:
    """Computes theta_11 after three chained tasks, by the Riccati flow or by Runge-Kutta."""
    layers = _unbalanced()
    for seed, anchor in LEGS:
        target = fixed(seed, D, D) / 2
        path = (
            riccati.flow(layers, target, TIMES, anchor=anchor, steps=SUBSTEPS)
            if exact
            else trained(layers, jnp.asarray(target), TIMES, anchor)
        )
        layers = at(path, -1)
    return float(theta(layers)[0, 0])


ANCHORS = ", ".join(f"{anchor:g}" for _, anchor in LEGS)


@claim("A.1-flow/ours")
def _():
    """The square-root Riccati flow gives θ_11 at the end

    The tolerance covers the error of the Runge-Kutta scheme.

    Source: eqs. (5), (6), (9) (Appendix A.1), solved
    Domain: d={D}, W_1ᵀW_1 - W_2W_2ᵀ = {IMBALANCE} I, three targets one after the other,
      λ = {ANCHORS}
    """
    return _last_entry(exact=True), deterministic(lambda: _last_entry(exact=False), 1e-8)


@claim("A.1-sigmoid/ours")
def _():
    """For U = V, θ_i(t) = σ_i/(1 + (σ_i e^(2τ) - 1) e^(-4σ_i t))

    The tolerance covers the error of the Runge-Kutta scheme.

    Source: eqs. (5), (6) (Appendix A.1), solved
    Domain: {SIZES}, τ=2, i=2, t=1
    """

    def mode() -> float:
        path = trained(identity_start(D, 2.0), task(symmetric=True), TIMES)
        u, v = rotations(symmetric=True)
        return float(u[:, 1] @ np.asarray(theta(path))[1] @ v[:, 1])

    return mode_path([1.0])[0, 1], deterministic(mode, 1e-8)


@claim("A.1-saddle/printed")
def _printed_saddle(tau=4.0):
    """For W_i(0)=e^(-τ)I and A of rank d, θ(t_d) → A with τ. The loss is compared

    det θ keeps its initial sign, at every time and for every τ.

    Source: Theorem A.1 (Appendix A.1)
    Domain: {SIZES}, det A < 0, τ={tau:g}, t = 2τ/σ_d
    """
    u, v = rotations()
    target = jnp.asarray((u * PRE) @ (v * [-1, 1, 1, 1]).T)
    times = _quarters(2 * tau / PRE[-1])  # twice the time at which the theorem has all learned
    return 0.0, deterministic(
        lambda: float(loss(at(trained(identity_start(D, tau), target, times), -1), target)), 1e-6
    )


@_printed_saddle.beside("corrected")
def _():
    """The flow stops at a saddle with loss σ_d²"""
    return PRE[-1] ** 2
