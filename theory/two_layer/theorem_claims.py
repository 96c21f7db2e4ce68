"""Overtrained, Theorems 4.6, 4.7 (A.24, A.25), Lemmas A.26, A.27, as printed and corrected.

Simulators are gradient descent of the network by autodiff, with infinite batches from ideal starts.
"""

from collections.abc import Callable
from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.two_layer import fine_tuning, modes, networks
from theory.two_layer import fine_tuning_domains as domains
from theory.two_layer.layers import ideal, theta
from theory.two_layer.tasks import (
    BOTH,
    EVERY,
    PRE,
    RATE,
    STEPS,
    TARGET,
    D,
    at,
    claim,
    deterministic,
    distance2,
    losses,
    rotations,
    task,
)

STEEP = (5.0, 4.0, 2.5, 1.5)  # ratios to PRE 2.5, 2.67, 4.17, 5
TIGHT, LOOSE = 2.5, 0.55  # lambda_1 > lambda_2 of Theorem A.25
SINGULAR, DEGREES = (2.5, 1.5, 0.9, 0.4), 60  # of a target with other singular vectors
ANCHORED = f"{BOTH}, λ=1"
MISALIGNED = f"{BOTH}, λ=0: (4,2)-misaligned"
SPECTRUM = f"d={D}, σ_pre={PRE}, σ_ft={STEEP}"
TURNED = f"d={D}, σ_pre={PRE}, σ_ft={SINGULAR}, singular pairs 1, 2 turned by {DEGREES}°"


def _closed(
    form: Callable[..., Array], n: int, anchor: float, sigma_ft: tuple[float, ...] = TARGET
) -> float:
    return float(np.asarray(jax.jit(form)(np.array(PRE), np.array(sigma_ft), anchor))[n])


def _degradations(anchor: float, sigma_ft: tuple[float, ...] = TARGET) -> np.ndarray:
    """Measures Delta_pre(n), n = 0, ..., d, by training."""
    before = [distance2(theta(ideal(task(), n)), task()) for n in range(D + 1)]
    return losses(task(), sigma_ft, anchor) - before


def _trained_inflection(anchor: float) -> int:
    inflection = modes.inflection(losses(task(), STEEP, anchor), first=0)
    if inflection is None:
        raise RuntimeError("no inflection: choose a smaller anchor")
    return inflection


def _inflection(anchor: float) -> float:
    return float(fine_tuning.inflection(jnp.array(PRE), jnp.array(STEEP), anchor, first=0) or 0)


def _turned_target() -> Array:
    """Returns A_ft with the first two singular pairs of A_pre turned by `DEGREES`."""
    u, v = rotations()
    turn = np.eye(D)
    turn[:2, :2] = [[0.5, -sqrt(0.75)], [sqrt(0.75), 0.5]]
    return jnp.asarray((u @ turn * np.array(SINGULAR)) @ (v @ turn).T)


def _turned_step(lost: Array | np.ndarray) -> float:
    """Computes Delta_pre(2) - Delta_pre(1) from the losses after fine-tuning."""
    return float(lost[2] - lost[1]) + PRE[1] ** 2


@claim("T4.6/exact")
def _():
    """Δ_pre(n) = Σ_{{i≤n}} ((σ_ft-σ_pre)/(1+λ))²

    Source: proof of Theorem A.24 (Appendix A.4)
    Domain: {ANCHORED}, n=3
    """
    predicted = _closed(fine_tuning.degradations, 3, 1.0)
    return predicted, deterministic(lambda: _degradations(1.0)[3])


@claim("T4.6-monotone/exact", ">=", attack=domains.MONOTONE)
def _(mixed=(2.5, 1.4, 0.9, 0.2)):
    """Δ_pre(n) ≥ Δ_pre(n-1)

    It holds without the misalignment that Theorem 4.6 requires.

    Source: Theorem A.24 (Appendix A.4)
    Domain: d={D}, σ_pre={PRE}, σ_ft={mixed}, λ=1, n=2
    """
    before = _closed(fine_tuning.degradations, 1, 1.0, mixed)
    return before, deterministic(lambda: _degradations(1.0, mixed)[2])


@claim("T4.6-sketch/printed")
def _printed_sketch():
    """Δ_pre(n) - Δ_pre(n-1) ≈ (σ_ft-σ_pre)²

    It is right for λ = 0 only. The proof of Theorem A.24 has the factor.

    Source: Theorem 4.6, proof sketch (Section 4.3)
    Domain: {ANCHORED}, n=3
    """
    return (TARGET[2] - PRE[2]) ** 2, deterministic(lambda: np.diff(_degradations(1.0))[2])


@_printed_sketch.beside("corrected")
def _():
    """Δ_pre(n) - Δ_pre(n-1) = ((σ_ft-σ_pre)/(1+λ))²"""
    return ((TARGET[2] - PRE[2]) / 2) ** 2


@claim("A.25-index/printed", ">=", attack=domains.misaligned(1))
def _(n=2):
    """For (4,r)-misaligned tasks and λ = 0, L_pre(n) > L_pre(n-1) for n ≤ r

    Definition 4.5 is about n > r.

    Source: Theorem A.25, item 1 (Appendix A.5)
    Domain: {MISALIGNED}, n={n}
    """
    before = _closed(fine_tuning.pretraining_losses, n - 1, 0.0)
    return before, deterministic(lambda: losses(task(), TARGET, 0.0)[n])


@claim(
    "A.25-index/corrected",
    ">=",
    attack=domains.misaligned(2),
    overlooks="tightened",
    sharper="A.25-index/ours",
)
def _harmful(n=D):
    """For (4,r)-misaligned tasks and λ = 0, L_pre(n) > L_pre(n-1) for n > r

    The search finds that it is not sharp.

    Source: Theorem 4.7, item 1 (Section 4.3), and Lemma A.26 (Appendix A.5)
    Domain: {MISALIGNED}, n={n}
    """
    before = _closed(fine_tuning.pretraining_losses, n - 1, 0.0)
    return before, deterministic(lambda: losses(task(), TARGET, 0.0)[n])


@_harmful.beside("ours", attack=domains.misaligned(2, 2), overlooks="tightened")
def _(n):
    """For (2,r)-misaligned tasks and λ = 0, L_pre(n) ≥ L_pre(n-1) for n > r

    The last mode changes L_pre by σ_ft(σ_ft - 2σ_pre).
    """
    return _closed(fine_tuning.pretraining_losses, n - 1, 0.0)


@claim("A.26/ours")
def _():
    """L_pre(n) = Σ_{{i≤n}} ((σ_ft-σ_pre)/(1+λ))² + Σ_{{i>n}} σ_pre²

    Source: Lemma A.26 (Appendix A.5), for every λ
    Domain: {ANCHORED}, n=2
    """
    predicted = _closed(fine_tuning.pretraining_losses, 2, 1.0)
    return predicted, deterministic(lambda: losses(task(), TARGET, 1.0)[2])


@claim("T4.7-threshold/ours")
def _():
    """The sharp threshold is σ_ft/σ_pre = 2+λ (printed: 4 at λ = 0). There learning does not change
    the loss, L_pre(d) = L_pre(0) = Σσ_pre²

    Source: Theorem 4.7 and Lemma A.26, sharpened
    Domain: d={D}, σ_pre={PRE}, σ_ft=3σ_pre, λ=1
    """
    threshold = float(fine_tuning.misalignment_threshold(1.0))
    at_threshold = tuple(threshold * s for s in PRE)
    left = deterministic(lambda: losses(task(), at_threshold, 1.0)[-1])
    return sum(s**2 for s in PRE), left


@claim("T4.7-inflection/ours")
def _():
    """r(λ) is the number of leading modes with σ_ft ≤ (2+λ) σ_pre

    Source: Theorem 4.7, item 2 (Section 4.3), solved
    Domain: {SPECTRUM}, λ={TIGHT}
    """
    return _inflection(TIGHT), deterministic(lambda: _trained_inflection(TIGHT))


@claim("A.25-direction/printed", "<=", attack=domains.direction(True))
def _printed_direction():
    """r(λ_1) ≤ r(λ_2) for λ_1 > λ_2 > 0

    It is reversed. Theorem 4.7 has it right.

    Source: Theorem A.25, item 2, and Lemma A.27 (Appendix A.5); Theorem 4.7, item 2
    Domain: {SPECTRUM}, λ_1={TIGHT}, λ_2={LOOSE}
    """
    return _inflection(LOOSE), deterministic(lambda: _trained_inflection(TIGHT))


@_printed_direction.beside(
    "corrected", ">=", attack=domains.direction(False), overlooks="tightened"
)
def _():
    """r(λ_1) ≥ r(λ_2) for λ_1 > λ_2 > 0"""
    return _inflection(LOOSE)


@claim("A.27-loss/exact", ">=", attack=domains.ANCHORS, overlooks="tightened")
def _tuned_loss():
    """|θ_1ⁿ - A_ft|² > |θ_2ⁿ - A_ft|² for λ_1 > λ_2 > 0

    Source: Theorem 4.7, item 2, and Lemma A.27 (Appendix A.5)
    Domain: {BOTH}, n=2, λ=λ_1=1, λ_2=1/2
    """
    looser = _closed(fine_tuning.fine_tuning_losses, 2, 0.5)
    return looser, deterministic(lambda: losses(task(TARGET), TARGET, 1.0)[2])


@_tuned_loss.beside("ours", "=")
def _():
    """|θⁿ - A_ft|² = (λ/(1+λ))² Σ_{{i≤n}}(σ_ft-σ_pre)² + Σ_{{i>n}}σ_ft²"""
    return _closed(fine_tuning.fine_tuning_losses, 2, 1.0)


@claim("A.27-unaligned/ours", ">=", attack=domains.UNALIGNED, overlooks="tightened")
def _():
    """With other singular vectors |θⁿ - A_ft|² still grows with λ

    Source: Lemma A.27 (Appendix A.5), without its assumption on A_ft
    Domain: {TURNED}, λ_1=1/2, λ_2=0, n=2
    """
    target = _turned_target()
    found = deterministic(lambda: losses(target, anchor=0.5, target=target)[2])
    return fine_tuning.unaligned_losses(task(), target)[1][2], found


@claim("T4.6-unaligned/ours")
def _():
    """With other singular vectors Δ_pre(n) - Δ_pre(n-1) = σ_ft² + σ_pre² - 2σ_ft u_ftᵀA_pre v_ft,
    which may be negative

    The tolerance covers what gradient descent leaves after 1000 steps.

    Source: Theorem 4.6 (Section 4.3), without its assumption on A_ft
    Domain: {TURNED}, λ=0, n=2
    """
    target = _turned_target()
    found = deterministic(lambda: _turned_step(losses(task(), target=target)), 1e-6)
    return _turned_step(fine_tuning.unaligned_losses(task(), target)[0]), found


@claim("T4.6-exchanged/ours")
def _(exchanged=(0.5, 2.5, 0.4, 0.3)):
    """A mode orthogonal to the start is never learned, as |θ¹ - A_ft|² = Σ_{{i>1}} σ_ft,i²

    This is a saddle, which `unaligned_losses` excludes by general position.

    Source: Theorem 4.6 (Section 4.3), without an order of the spectrum of A_ft
    Domain: d={D}, σ_pre={PRE}, σ_ft={exchanged}, U = V = I, λ=0, n=1
    """
    # The singular vectors are the axes, since inexact zeros would leave the saddle.
    start, target = ideal(jnp.diag(jnp.array(PRE)), 1), jnp.diag(jnp.array(exchanged))

    def left() -> float:
        path = networks.descend(start, target, RATE, STEPS, anchored_to=theta(start), every=EVERY)
        return distance2(theta(at(path, -1)), target)

    return sum(s**2 for s in exchanged[1:]), deterministic(left, 1e-6)
