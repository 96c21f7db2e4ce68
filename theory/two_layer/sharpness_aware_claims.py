"""Sharpness-aware minimisation of two-layer linear networks, modes against whole matrices.

The simulator integrates the flow of whole matrices, or descends step by step (`matrices`).
"""

from math import exp

import numpy as np

from theory.claims import Simulate
from theory.two_layer import matrices, sharpness_aware
from theory.two_layer.tasks import claim, deterministic, rotations

SIGMA = np.array([2.0, 1.0, 0.6, 0.3])
IMBALANCE = np.array([1.5, 1.0, 0.5, 0.8])
D, RHO, TAU = 4, 0.06, 3.0
SETTING = f"d={D}, σ={tuple(SIGMA.tolist())}, U ≠ V"
UNBALANCED = f"{SETTING}, a²-b²={tuple(IMBALANCE.tolist())}, ab=.01"
SOURCE = "Section 4.2, beyond: pre-training by SAM"
INTEGRATED = 1e-7  # errors of the integrators


def _unbalanced(y: float = 0.01) -> tuple[np.ndarray, np.ndarray]:
    """Returns a and b with ab = y and given imbalances."""
    size = np.hypot(IMBALANCE, 2 * y)
    a = np.sqrt((size + IMBALANCE) / 2)
    return a, y / a


def _whole(a: np.ndarray, b: np.ndarray) -> matrices.Pair:
    """Returns matrices with these diagonals, in general position."""
    u, v = rotations()
    turn = np.linalg.qr(np.cos(np.outer(np.arange(D), np.arange(D)) + 1.0))[0]
    return (u * a) @ turn, turn.T @ (b[:, None] * v.T)


def _target() -> np.ndarray:
    u, v = rotations()
    return (u * SIGMA) @ v.T


def _imbalances(pair: matrices.Pair) -> np.ndarray:
    """Computes |W_1^T u|^2 - |W_2 v|^2 for each pair of singular vectors."""
    u, v = rotations()
    return np.sum((pair[0].T @ u) ** 2, 0) - np.sum((pair[1] @ v) ** 2, 0)


def _sharpness(time: float, rho: float) -> float:
    """Computes the trace of the Hessian by second differences. The loss is quadratic in each
    weight.
    """
    pair = matrices.pre_train(*_whole(*_unbalanced()), _target(), time, rho=rho).at(time)
    flat = np.concatenate([w.ravel() for w in pair])

    def loss(flat: np.ndarray) -> float:
        w1, w2 = flat.reshape(2, D, D)
        return float(np.sum((w1 @ w2 - _target()) ** 2))

    steps = np.eye(flat.size)
    return sum(loss(flat + s) + loss(flat - s) - 2 * loss(flat) for s in steps)


@claim("SAM-trace/ours")
def _(time=20.0):
    """The trace of the Hessian is 2d Σ(a² + b²). Each mode has two equations, da/dt = -2r'b' and
    db/dt = -2r'a' at a' = a + 2ρrb, b' = b + 2ρra

    Source: {SOURCE}
    Domain: {UNBALANCED}, ρ={RHO}, t={time:g}
    """
    a, b = sharpness_aware.flow(*_unbalanced(), SIGMA, RHO, [0.0, time])
    predicted = 2 * D * np.sum(a[-1] ** 2 + b[-1] ** 2)
    return predicted, deterministic(lambda: _sharpness(time, RHO), INTEGRATED)


@claim("SAM-imbalance/limit")
def _(rho=1e-4, mode=1, time=20.0):
    """SAM lowers log|a²-b²| by 4ρ∫(σ-y)/√((a²-b²)²+4y²) dy until a mode is learned, as ρ → 0

    Gradient flow conserves it. The tolerance covers the next order in ρ.

    Source: {SOURCE}
    Domain: {UNBALANCED}, ρ={rho}, mode {mode}, t={time:g}
    """
    start, size = _imbalances(_whole(*_unbalanced())), IMBALANCE[mode - 1]

    def lost() -> float:
        pair = matrices.pre_train(*_whole(*_unbalanced()), _target(), time, rho=rho).at(time)
        return float(np.log(start / _imbalances(pair))[mode - 1]) / rho

    return sharpness_aware.imbalance_loss(0.01, size, SIGMA[mode - 1]), deterministic(lost, 0.01)


def _balanced(time: float, rho: float) -> np.ndarray:
    """Computes the modes after training from a small aligned start."""
    start = np.full(D, np.exp(-TAU))
    u, v = rotations()
    pair = matrices.pre_train(*_whole(start, start), _target(), time, rho=rho).at(time)
    return np.einsum("oi,op,pi->i", u, pair[0] @ pair[1], v)


@claim("SAM-time-{mode}/ours", each=((1, 0.06), (2, 0.15)))
def _(mode, rho):
    """From a balanced start a mode reaches y after the time ∫dy/(4yk(σ-yk²)) with k = 1 + 2ρ(y-σ),
    here σ/2

    SAM slows large modes down, at first by the factor (1-2ρσ).

    Source: {SOURCE}
    Domain: {SETTING}, τ={TAU:g}, ρ={rho}
    """
    sigma = float(SIGMA[mode - 1])
    time = sharpness_aware.learning_time(sigma / 2, exp(-2 * TAU), sigma, rho)
    return sigma / 2, deterministic(lambda: float(_balanced(time, rho)[mode - 1]), INTEGRATED)


@claim("SAM-trap/ours")
def _(rho=0.3, time=20.0):
    """Without normalisation an aligned mode with σ - e^(-2τ) > 1/(2ρ) is not learned. A loss of σ²
    remains

    Rounding leaves this saddle later, along hidden units that have learned another mode.

    Source: {SOURCE}
    Domain: {SETTING}, τ={TAU:g}, ρ={rho}, t={time:g}, loss
    """
    start = exp(-2 * TAU)
    times = [sharpness_aware.learning_time(s / 2, start, s, rho) for s in SIGMA.tolist()]
    left = deterministic(lambda: float(np.sum((_balanced(time, rho) - SIGMA) ** 2)), 1e-4)
    return np.sum(SIGMA[np.isinf(times)] ** 2), left


RATE, STEPS, LENGTH = 0.004, 3_000, 0.1
BOUNCING = f"{SETTING}, a minimum, a²-b²={tuple(IMBALANCE.tolist())}, ρ={LENGTH}, η={RATE}"


def _bounced(mode: int) -> Simulate:
    """Measures the fall of log|D| of a mode at a minimum, by descent of whole matrices."""
    size = np.hypot(IMBALANCE, 2 * SIGMA)
    a = np.sqrt((size + IMBALANCE) / 2)

    def rate() -> float:
        first = _whole(a * (1 + 1e-3), SIGMA / a)
        # The first steps reach the sharpest direction.
        first = matrices.sharpness_aware(first, _target(), LENGTH, RATE, 300)
        last = matrices.sharpness_aware(first, _target(), LENGTH, RATE, STEPS)
        fall = np.log(np.abs(_imbalances(first) / _imbalances(last)))[mode - 1]
        return float(fall) / (STEPS * RATE)

    return deterministic(rate, 0.02 * 4 * LENGTH**2)


@claim("SAM-sharpest/limit")
def _():
    """Normalised SAM oscillates along the sharpest mode, and lowers its log|a²-b²| at the rate
    4ρ²(1 + 2η(a²+b²))

    The tolerance covers the next order in ρ.

    Source: {SOURCE}
    Domain: {BOUNCING}
    """
    size = float(np.hypot(IMBALANCE[0], 2 * SIGMA[0]))
    return sharpness_aware.sharpest_decay(LENGTH, RATE, size), _bounced(1)


@claim("SAM-others/limit", effect=0.05 * 4 * LENGTH**2)
def _(mode=2):
    """Meanwhile the other modes keep their imbalance

    The test detects 5 % of the rate of the sharpest mode.

    Source: {SOURCE}
    Domain: {BOUNCING}, mode {mode}
    """
    return 0.0, _bounced(mode)


MIXED, SHORT, FINE, UNTIL = np.array([0.2, 3.0, -2.5, 0.1]), 0.05, 0.001, 6.0


APART = tuple(MIXED.tolist())


@claim("SAM-mixed-{mode}/limit", each=((2,), (3,)))
def _(mode):
    """Normalised SAM lowers the largest a_i² + b_j², with d(a_i²-b_i²)/dt = -4ρ²a_i², and 4ρ²b_j²
    for mode j. The change of mode {mode} is compared

    The tolerance covers the next orders in ρ and η.

    Source: {SOURCE}
    Domain: {SETTING}, a minimum, a²-b²={APART}, ρ={SHORT}, η={FINE}, t={UNTIL:g}
    """
    predicted = sharpness_aware.bouncing_drift(MIXED, SIGMA, SHORT, UNTIL) - MIXED

    def change() -> float:
        a = np.sqrt((np.hypot(MIXED, 2 * SIGMA) + MIXED) / 2)
        first = _whole(a * (1 + 1e-3), SIGMA / a)
        first = matrices.sharpness_aware(first, _target(), SHORT, FINE, 1_000)
        steps = round(UNTIL / FINE)
        last = matrices.sharpness_aware(first, _target(), SHORT, FINE, steps)
        return float((_imbalances(last) - _imbalances(first))[mode - 1])

    expected = float(predicted[mode - 1])
    return expected, deterministic(change, 0.02 * abs(expected))
