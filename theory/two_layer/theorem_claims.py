"""Overtrained, Theorems 4.6 and 4.7 (A.24, A.25) and Lemmas A.26 and A.27: as printed, and as true.

Simulators are gradient descent of the network by autodiff, with infinite batches from ideal starts.
"""

from collections.abc import Callable
from math import sqrt

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import Claim
from theory.two_layer import fine_tuning, modes
from theory.two_layer.layers import ideal, theta
from theory.two_layer.tasks import (
    PAPER,
    PRE,
    TARGET,
    D,
    deterministic,
    distance2,
    losses,
    rotations,
    task,
)

STEEP = (5.0, 4.0, 2.5, 1.5)  # ratios to PRE 2.5, 2.67, 4.17, 5
MIXED = (2.5, 1.4, 0.9, 0.2)  # above and below PRE


def _degradation(anchor: float, sigma_ft: tuple[float, ...] = TARGET) -> np.ndarray:
    """Delta_pre(n), n = 0, ..., d, by training."""
    before = [distance2(theta(ideal(task(), n)), task()) for n in range(D + 1)]
    return losses(task(), sigma_ft, anchor) - before


def _rises(anchor: float) -> np.ndarray:
    """L_pre(n) - L_pre(n-1), n = 1, ..., d, by training."""
    return np.diff(losses(task(), TARGET, anchor))


def _trained_inflection(anchor: float) -> int:
    inflection = modes.inflection(losses(task(), STEEP, anchor))
    if inflection is None:
        raise RuntimeError("no inflection: choose a smaller anchor")
    return inflection


def _exact_inflection(anchor: float) -> int:
    return fine_tuning.inflection(jnp.array(PRE), jnp.array(STEEP), anchor) or 0


def _at_threshold() -> float:
    """Largest |L_pre(n) - L_pre(n-1)| with sigma_ft = (2 + lambda) sigma_pre, lambda = 1."""
    ratio = float(fine_tuning.misalignment_threshold(1.0))
    curve = losses(task(), tuple(ratio * s for s in PRE), 1.0)
    return float(np.abs(np.diff(curve)).max())


def _turned_target() -> Array:
    """A_ft whose first two singular pairs are those of A_pre turned by 60 degrees."""
    u, v = rotations()
    turn = np.eye(D)
    turn[:2, :2] = [[0.5, -sqrt(0.75)], [sqrt(0.75), 0.5]]
    return jnp.asarray((u @ turn * np.array((2.5, 1.5, 0.9, 0.4))) @ (v @ turn).T)


def _unaligned_step() -> float:
    """Delta_pre(2) - Delta_pre(1) by the closed form: Delta = L_pre(after) - L_pre(before)."""
    after, _ = fine_tuning.unaligned_losses(task(), _turned_target())
    return float(after[2] - after[1]) + PRE[1] ** 2


def _unaligned_gain() -> float:
    """Smallest growth over n >= 1 of |theta - A_ft|^2 from lambda = 0 to 1/2."""
    target = _turned_target()
    free, tied = (losses(target, anchor=anchor, target=target) for anchor in (0.0, 0.5))
    return float((tied - free)[1:].min())


def _closed(form: Callable[..., Array], anchor: float = 1.0) -> np.ndarray:
    return np.asarray(form(jnp.array(PRE), jnp.array(TARGET), anchor))


def _tuning_loss_gain() -> float:
    """Smallest growth over n >= 1 of |theta - A_ft|^2 from lambda = 1/2 to 1."""
    low, high = (losses(task(TARGET), TARGET, anchor) for anchor in (0.5, 1.0))
    return float((high - low)[1:].min())


def _claims() -> list[Claim]:
    at_one = f"d={D}, σ_pre={PRE}, σ_ft={TARGET}, λ=1"
    at_zero = f"d={D}, σ_pre={PRE}, σ_ft={TARGET}, (4,2)-misaligned, λ=0"
    steep = f"d={D}, σ_pre={PRE}, σ_ft={STEEP}, λ = 0 and 2"
    turned = f"d={D}, σ_pre={PRE}, σ_ft=(2.5,1.5,.9,.4), singular pairs 1, 2 turned by 60°"

    return [
        Claim(
            f"{PAPER}/T4.6/exact",
            "Δ_pre(n) = Σ_{i≤n} ((σ_ft-σ_pre)/(1+λ))²",
            f"{PAPER} Thms 4.6 and A.24",
            f"{at_one}, n=3",
            lambda: _closed(fine_tuning.degradations)[3],
            deterministic(lambda: _degradation(1.0)[3]),
        ),
        Claim(
            f"{PAPER}/T4.6-monotone/exact",
            "Δ_pre(n) never falls: smallest increment",
            f"{PAPER} Thms 4.6 and A.24",
            f"d={D}, σ_pre={PRE}, σ_ft={MIXED}, λ=1",
            lambda: 0.0,
            deterministic(lambda: np.diff(_degradation(1.0, MIXED)).min()),
            relation=">=",
            note="needs neither α > 1 nor misalignment",
        ),
        Claim(
            f"{PAPER}/T4.6-sketch/printed",
            "Δ_pre(n) - Δ_pre(n-1) = (σ_ft-σ_pre)²",
            f"{PAPER} proof sketch of Thm 4.6",
            f"{at_one}, n=3",
            lambda: (TARGET[2] - PRE[2]) ** 2,
            deterministic(lambda: np.diff(_degradation(1.0))[2]),
            note="right for λ = 0 only",
        ),
        Claim(
            f"{PAPER}/T4.6-sketch/corrected",
            "Δ_pre(n) - Δ_pre(n-1) = ((σ_ft-σ_pre)/(1+λ))²",
            f"{PAPER} proof of Thm A.24",
            f"{at_one}, n=3",
            lambda: ((TARGET[2] - PRE[2]) / 2) ** 2,
            deterministic(lambda: np.diff(_degradation(1.0))[2]),
        ),
        Claim(
            f"{PAPER}/A.25-index/printed",
            "L_pre(n) - L_pre(n-1) > 0 for n ≤ r: smallest increment",
            f"{PAPER} Thm A.25, item 1",
            at_zero,
            lambda: 0.0,
            deterministic(lambda: _rises(0.0)[:2].min()),
            relation=">=",
            note="Definition 4.5 speaks of n > r",
        ),
        Claim(
            f"{PAPER}/A.25-index/corrected",
            "L_pre(n) - L_pre(n-1) > 0 for n > r: smallest increment",
            f"{PAPER} Thms 4.7 and A.25, item 1, and Lemma A.26",
            at_zero,
            lambda: 0.0,
            deterministic(lambda: _rises(0.0)[2:].min()),
            relation=">=",
        ),
        Claim(
            f"{PAPER}/A.26/ours",
            "L_pre(n) = Σ_{i≤n} ((σ_ft-σ_pre)/(1+λ))² + Σ_{i>n} σ_pre²",
            f"{PAPER} Lemma A.26",
            f"{at_one}, n=2",
            lambda: _closed(fine_tuning.pretraining_losses)[2],
            deterministic(lambda: losses(task(), TARGET, 1.0)[2]),
        ),
        Claim(
            f"{PAPER}/T4.7-threshold/ours",
            "the sharp threshold is σ_ft/σ_pre = 2+λ (printed: 4 at λ = 0): L_pre stays put there",
            f"{PAPER} Thm 4.7 and Lemma A.26, sharpened",
            f"d={D}, σ_ft=3σ_pre, λ=1",
            lambda: 0.0,
            deterministic(_at_threshold),
        ),
        Claim(
            f"{PAPER}/T4.7-inflection/ours",
            "r(λ) = number of leading modes with σ_ft ≤ (2+λ) σ_pre: growth from λ = 0 to 2",
            f"{PAPER} Thm 4.7, item 2",
            steep,
            lambda: float(_exact_inflection(2.0) - _exact_inflection(0.0)),
            deterministic(lambda: _trained_inflection(2.0) - _trained_inflection(0.0)),
        ),
        Claim(
            f"{PAPER}/A.25-direction/printed",
            "r(λ_1) ≤ r(λ_2) for λ_1 > λ_2: r(2) - r(0)",
            f"{PAPER} Thm A.25, item 2, and Lemma A.27",
            steep,
            lambda: 0.0,
            deterministic(lambda: _trained_inflection(2.0) - _trained_inflection(0.0)),
            relation="<=",
            note="reversed; Theorem 4.7 has it right",
        ),
        Claim(
            f"{PAPER}/A.25-direction/corrected",
            "r(λ_1) ≥ r(λ_2) for λ_1 > λ_2: r(2) - r(0)",
            f"{PAPER} Thm A.25, item 2, and Lemma A.27, corrected",
            steep,
            lambda: 0.0,
            deterministic(lambda: _trained_inflection(2.0) - _trained_inflection(0.0)),
            relation=">=",
        ),
        Claim(
            f"{PAPER}/A.27-loss/ours",
            "|θⁿ - A_ft|² = (λ/(1+λ))² Σ_{i≤n}(σ_ft-σ_pre)² + Σ_{i>n}σ_ft²: least gain as λ grows",
            f"{PAPER} Thms 4.7 and A.25, item 2, and Lemma A.27",
            f"d={D}, σ_pre={PRE}, σ_ft={TARGET}, λ from 1/2 to 1, n ≥ 1",
            lambda: float(
                np.min(
                    _closed(fine_tuning.fine_tuning_losses, 1.0)[1:]
                    - _closed(fine_tuning.fine_tuning_losses, 0.5)[1:]
                )
            ),
            deterministic(_tuning_loss_gain),
        ),
        Claim(
            f"{PAPER}/A.27-unaligned/ours",
            "other singular vectors: |θⁿ - A_ft|² still grows with λ: least gain",
            f"{PAPER} Thm 4.7 and Lemma A.27, without their assumption on A_ft",
            f"{turned}, λ from 0 to 1/2, n ≥ 1",
            lambda: 0.0,
            deterministic(_unaligned_gain),
            relation=">=",
        ),
        Claim(
            f"{PAPER}/T4.6-unaligned/ours",
            "other singular vectors: Δ_pre may fall, by σ_ft² + σ_pre² - 2σ_ft u_ftᵀA_pre v_ft",
            f"{PAPER} Thm 4.6, without its assumption on A_ft",
            f"{turned}, λ=0, n=2",
            _unaligned_step,
            deterministic(
                lambda: np.diff(losses(task(), target=_turned_target()))[1] + PRE[1] ** 2, 1e-6
            ),
            note="tolerance: what gradient descent leaves after 1000 steps",
        ),
    ]


CLAIMS: tuple[Claim, ...] = tuple(_claims())
