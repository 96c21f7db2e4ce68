"""Cross-task linearity (arXiv 2402.03660), equations 2-4: to which order task arithmetic holds."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jaxtyping import Array

from theory.claims import Claim, Simulate, measured
from theory.linearity import bounds, networks
from theory.linearity.networks import network
from theory.linearity.tasks import (
    ORDER,
    SHALLOW,
    TANH,
    K,
    gap,
    inputs,
    order,
    pick,
    pretrained,
    row,
    second_derivative,
    tanh_network,
    task_vectors,
)

STEP = 0.4  # λ


def _add(f: networks.Model, sizes: tuple[int, ...], step: float) -> tuple[Any, Array]:
    start, tasks = task_vectors(f, sizes)
    return bounds.addition(start, pick(tasks, 0), pick(tasks, 1), step)


def _negate(f: networks.Model, sizes: tuple[int, ...], step: float) -> tuple[Any, Array]:
    start, tasks = task_vectors(f, sizes)
    return bounds.negation(start, pick(tasks, 0), step)


def _forget(f: networks.Model, sizes: tuple[int, ...], step: float) -> tuple[Any, Array]:
    start, tasks = task_vectors(f, sizes)
    return bounds.forgetting(start, pick(tasks, 0), step)


def _superpose(f: networks.Model, sizes: tuple[int, ...], step: float) -> tuple[Any, Array]:
    return bounds.superposition(*task_vectors(f, sizes), step)


def _total(edit: Callable[..., tuple[Any, Array]]) -> Simulate:
    """Sum of the gap over data and outputs, two-layer linear."""
    return measured(lambda: gap(network, *edit(network, SHALLOW, STEP), inputs()).sum())


def _curved(coefficient: float, direction: Callable[[Any], Any]) -> Callable[[], float]:
    """coefficient x step^2 D^2 f(theta_PT)[d, d], summed over data and outputs."""

    def predict() -> float:
        start, tasks = task_vectors(network, SHALLOW)
        derivative = second_derivative(network, start, direction(tasks), inputs())
        return float(coefficient * STEP**2 * derivative.sum())

    return predict


def _interference() -> float:
    """(|sum|^2 - sum of squares) / 2 of the second derivative."""
    start, tasks = task_vectors(network, SHALLOW)
    together = jax.tree.map(lambda t: t.sum(0), tasks)
    square = partial(second_derivative, network, start)
    alone = sum(square(pick(tasks, n), inputs()) for n in range(K))
    return float(STEP**2 / 2 * (square(together, inputs()) - alone).sum())


def _arithmetic() -> list[Claim]:
    exact, tanh = f"two-layer linear {SHALLOW}, λ={STEP}, experts' task vectors", f"tanh {TANH}"
    rows = [
        (
            "eq2",
            "f(θ+λ(τᵢ+τⱼ)) - ½f(θ+2λτᵢ) - ½f(θ+2λτⱼ) = -(λ²/2) D²f[τᵢ-τⱼ,τᵢ-τⱼ]",
            _add,
            _curved(-0.5, lambda t: jax.tree.map(lambda u: u[0] - u[1], t)),
            3.0,
        ),
        (
            "eq3",
            "f(θ) - ½f(θ+λτ) - ½f(θ-λτ) = -(λ²/2) D²f[τ,τ]",
            _negate,
            _curved(-0.5, lambda t: pick(t, 0)),
            4.0,
        ),
        (
            "eq4",
            "f(θ-λτ) - (2f(θ) - f(θ+λτ)) = +λ² D²f[τ,τ], minus twice that of eq. (3)",
            _forget,
            _curved(1.0, lambda t: pick(t, 0)),
            4.0,
        ),
        (
            "eq2-interference",
            "f(θ+λΣτᵢ) - f(θ) - Σ(f(θ+λτᵢ) - f(θ)) = λ² Σ_{i<j} D²f[τᵢ,τⱼ]",
            _superpose,
            _interference,
            3.0,
        ),
    ]
    claims = []
    for name, statement, edit, predict, power in rows:
        source = f"eq. ({name[2]}), Sec. 4.3: the error of its ≈"
        claims += [
            row(f"{name}/ours", statement, source, exact, predict, _total(edit)),
            row(
                f"{name}-order/ours",
                f"{statement} + order {power:.0f} in λ",
                source,
                f"{tanh}, experts' task vectors",
                power,
                order(partial(edit, tanh_network, TANH), partial(pretrained, tanh_network, TANH)),
                note=ORDER,
            ),
        ]
    return claims


CLAIMS = tuple(_arithmetic())
