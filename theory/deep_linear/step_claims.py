"""features-are-fate (arXiv 2410.08194): sizes of layers in Lemma B.1, and what the paper reads off
eq. (13) beyond gamma = 1.

Networks are gradient descent. The claims about eq. (13) are about its sign: their other side is a
scan of (13), which `eq13/ours` and `eq13-lower` check on data.
"""

from collections.abc import Callable
from functools import partial
from math import cos, pi, sin

import jax
import jax.numpy as jnp
from jaxtyping import Array

from theory import problems
from theory.claims import Claim, Estimate, Simulate
from theory.deep_linear import networks, risks
from theory.deep_linear.proof_claims import row
from theory.deep_linear.sparsification_claims import conserved

PAPER = "features-are-fate"
D, DEPTH, ALPHA, RATE = 6, 3, 0.3, 0.005


def _columns(weights: networks.Weights) -> list[Array]:
    return [*weights[:-1], weights[-1][:, None]]


def _pretraining(key: Array, scale: float = 1.0) -> tuple[list[Array], list[list[Array]]]:
    """W-bar, which satisfies (22) with lambda = scale^2, and the layers at ten times."""
    beta_s, _ = problems.tasks(D, 0.0)
    weights = networks.small_weights(key, D, DEPTH, ALPHA * scale)
    bars, times = [w / ALPHA for w in _columns(weights)], []
    for _ in range(10):
        times.append(_columns(weights))
        weights = networks.pretrain(weights, beta_s, RATE, 400).weights
    return bars, times


def _over_training(
    of: Callable[[list[Array], list[Array]], list[Array]], scale: float = 1.0, tolerance: float = 0
) -> Simulate:
    """The least, over times and layers, of a function of W-bar and the layers."""

    def simulate(key: Array, quick: bool) -> Estimate:
        del quick
        bars, times = _pretraining(key, scale)
        return Estimate(
            float(jnp.min(jnp.stack([jnp.stack(of(bars, layers)) for layers in times]))),
            tolerance=tolerance,
        )

    return simulate


def _whole(w: Array) -> Array:
    return jnp.sum(w**2)


def _top(w: Array) -> Array:
    return jnp.linalg.norm(w, 2) ** 2


def _traces(bars: list[Array], layers: list[Array]) -> list[Array]:
    """Minus the error of (54)."""
    return [
        -jnp.abs(_whole(w) - _whole(layers[-1]) - ALPHA**2 * (_whole(b) - _whole(bars[-1])))
        for w, b in zip(layers[:-1], bars[:-1], strict=True)
    ]


def _tops(bars: list[Array], layers: list[Array], *, printed: bool) -> list[Array]:
    """Left less right side of (59)."""
    last = bars[-1] if printed else layers[-1]
    return [
        _top(w) - _top(last) - ALPHA**2 * (_top(bars[-1]) - _top(b))
        for w, b in zip(layers[:-1], bars[:-1], strict=True)
    ]


def _invariants(bars: list[Array], layers: list[Array], *, power: int) -> list[Array]:
    """alpha^2 |D|_op^power - v.D(t) v, with v the top right singular vectors of the layers."""
    pairs = zip(
        conserved((*bars[:-1], bars[-1][:, 0])),
        conserved((*layers[:-1], layers[-1][:, 0])),
        layers[:-1],
        strict=True,
    )
    invariants = []
    for first, current, layer in pairs:
        v = jnp.linalg.svd(layer)[2][0]
        invariants.append(ALPHA**2 * jnp.linalg.norm(first, 2) ** power - v @ current @ v)
    return invariants


def _bounded_away(key: Array, quick: bool) -> Estimate:
    """prod_l s_l^2 |X|_op^2 / |y-hat|^2 after training from scratch, L = 3."""
    del quick
    key_weights, key_data = jax.random.split(key)
    sample = problems.draw(key_data, 4, D, 0.8, 0.5)
    start = networks.small_weights(key_weights, D, DEPTH, ALPHA)
    layers = networks.fine_tune(start, sample.x, sample.y, 0.02, 4_000).weights
    fitted = sample.x @ networks.predictor(layers)
    product = jnp.prod(jnp.stack([_top(w) for w in _columns(layers)]))
    return Estimate(float(product * _top(sample.x) / _whole(fitted)), tolerance=1e-9)


def _scan(
    lower: float, upper: float, theta: float, sigma: float, *, hurts: bool = True
) -> Simulate:
    """Length of the loads in [lower, upper] at which T_lt < 0 (or > 0): error at most two steps."""

    def simulate(key: Array, quick: bool) -> Estimate:
        del key, quick
        steps = 20_000
        gamma = lower + (upper - lower) * (jnp.arange(steps) + 0.5) / steps
        gains = risks.transferability_limit("linear", gamma, theta, sigma)
        share = float(((gains < 0) if hurts else (gains > 0)).mean())
        return Estimate((upper - lower) * share, tolerance=2 * (upper - lower) / steps)

    return simulate


_DRIFT = "tolerance: descent of rate .005 leaves the flow by O(rate)"
_AT = f"d={D}, L={DEPTH}, α={ALPHA}, pretraining at 10 times"

CLAIMS: tuple[Claim, ...] = (
    row(
        "eq54/exact",
        "|W_l|²_F - |W_L|²_F = α²(|W̄_l|²_F - |W̄_L|²_F): minus the largest error",
        "eqs. (52)-(54), p. 18",
        _AT,
        0.0,
        _over_training(_traces, tolerance=RATE),
        note=_DRIFT,
    ),
    row(
        "eq59/printed",
        "|W_l|²_op ≥ |W̄_L|²_op + α²(|W̄_L|²_op - |W̄_l|²_op): least excess",
        "eq. (59), p. 18",
        _AT,
        0.0,
        _over_training(partial(_tops, printed=True), tolerance=RATE),
        relation=">=",
        note="W̄_L for W_L: at the start every layer is of order α",
    ),
    row(
        "eq59/corrected",
        "|W_l|²_op ≥ |W_L|²_op + α²(|W̄_L|²_op - |W̄_l|²_op): least excess",
        "eqs. (55)-(59), p. 18",
        _AT,
        0.0,
        _over_training(partial(_tops, printed=False), tolerance=RATE),
        relation=">=",
        note=_DRIFT,
    ),
    row(
        "eq62/printed",
        "v_lᵀD_l v_l ≤ α²|D̄_l|²_op: least excess of the right side",
        "eqs. (62), (65), (66), (68), (70), pp. 18-19",
        f"{_AT}, W̄ of half the size",
        0.0,
        _over_training(partial(_invariants, power=2), 0.5, RATE / 4),
        relation=">=",
        note="a norm is squared that is not",
    ),
    row(
        "eq62/corrected",
        "v_lᵀD_l v_l ≤ α²|D̄_l|_op: least excess of the right side",
        "eqs. (61)-(68), (70), pp. 18-19, corrected",
        f"{_AT}, W̄ of half the size",
        0.0,
        _over_training(partial(_invariants, power=1), 0.5, RATE / 4),
        relation=">=",
        note=_DRIFT,
    ),
    row(
        "eq71/exact",
        "Π s_l² ≥ |ŷ|²/|X|²_op > 0 at the end of training: their ratio",
        "eqs. (71), (72), p. 19",
        f"n=4, d={D}, L={DEPTH}, from scratch",
        1.0,
        _bounded_away,
        relation=">=",
    ),
    row(
        "eq13-over/limit",
        "γ > 1: linear transfer hurts iff γ - 1 > σ²/sin²θ",
        "after eq. (13), p. 8",
        "θ=π/4, σ=.5: length of the loads in [1, 3] at which it does",
        3 - float(1 + 0.5**2 / sin(pi / 4) ** 2),
        _scan(1.0, 3.0, pi / 4, 0.5),
    ),
    row(
        "eq13-noiseless/limit",
        "σ = 0: linear transfer hurts iff cos²θ < γ < 1, of loads below 1",
        "after eq. (13), p. 8",
        "θ=1: length of the loads in [0, 1] at which it does",
        1 - cos(1.0) ** 2,
        _scan(0.0, 1.0, 1.0, 0.0),
    ),
    row(
        "eq13-anomalous/reading",
        "θ = π/2: transfer is positive all the same, for γ within σ² of 1",
        "after eq. (13), p. 8",
        "σ=.5: length of the loads in [.5, 2] at which it is",
        2 * 0.5**2,
        _scan(0.5, 2.0, pi / 2, 0.5, hurts=False),
    ),
)
