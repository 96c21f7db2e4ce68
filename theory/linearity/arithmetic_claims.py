"""Cross-task linearity (arXiv 2402.03660), equations 2-4, the orders to which task arithmetic
holds.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jaxtyping import Array

from theory.claims import measured
from theory.linearity import bounds, networks
from theory.linearity.networks import network
from theory.linearity.tasks import (
    ORDER,
    SHALLOW,
    TANH,
    K,
    claim,
    gap,
    inputs,
    order,
    pick,
    pretrained,
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


def _curved(coefficient: float, direction: Callable[[Any], Any]) -> float:
    """Computes coefficient x step^2 D^2 f(theta_PT)[d, d], summed over data and outputs."""
    start, tasks = task_vectors(network, SHALLOW)
    derivative = second_derivative(network, start, direction(tasks), inputs())
    return float(coefficient * STEP**2 * derivative.sum())


def _interference() -> float:
    """Computes (|sum|^2 - sum of squares) / 2 of the second derivative."""
    start, tasks = task_vectors(network, SHALLOW)
    together = jax.tree.map(lambda t: t.sum(0), tasks)
    square = partial(second_derivative, network, start)
    alone = sum(square(pick(tasks, n), inputs()) for n in range(K))
    return float(STEP**2 / 2 * (square(together, inputs()) - alone).sum())


for _case in (
    (
        "eq2",
        "f(θ+λ(τᵢ+τⱼ)) - ½f(θ+2λτᵢ) - ½f(θ+2λτⱼ) = -(λ²/2) D²f[τᵢ-τⱼ,τᵢ-τⱼ]",
        _add,
        lambda: _curved(-0.5, lambda t: jax.tree.map(lambda u: u[0] - u[1], t)),
        3.0,
    ),
    (
        "eq3",
        "f(θ) - ½f(θ+λτ) - ½f(θ-λτ) = -(λ²/2) D²f[τ,τ]",
        _negate,
        lambda: _curved(-0.5, lambda t: pick(t, 0)),
        4.0,
    ),
    (
        "eq4",
        "f(θ-λτ) - (2f(θ) - f(θ+λτ)) = +λ² D²f[τ,τ], minus twice the error of eq. (3)",
        _forget,
        lambda: _curved(1.0, lambda t: pick(t, 0)),
        4.0,
    ),
    (
        "eq2-interference",
        "f(θ+λΣτᵢ) - f(θ) - Σ(f(θ+λτᵢ) - f(θ)) = λ² Σ_{i<j} D²f[τᵢ,τⱼ]",
        _superpose,
        _interference,
        3.0,
    ),
):

    @claim("{name}/ours", each=(_case,))
    def _(name, statement, edit, derivative, power):
        """{statement}

        Source: eq. ({name[2]}), Sec. 4.3: the error of its ≈
        Domain: two-layer linear {SHALLOW}, λ={STEP}, experts' task vectors
        """
        del name, statement, power
        # This is the sum over data and outputs.
        found = measured(lambda: gap(network, *edit(network, SHALLOW, STEP), inputs()).sum())
        return derivative(), found

    @claim("{name}-order/ours", each=(_case,))
    def _(name, statement, edit, derivative, power, note=ORDER):
        """{statement} + order {power:.0f} in λ

        {note}

        Source: eq. ({name[2]}), Sec. 4.3: the error of its ≈
        Domain: tanh {TANH}, experts' task vectors
        """
        del name, statement, derivative, note
        start = partial(pretrained, tanh_network, TANH)
        return power, order(partial(edit, tanh_network, TANH), start)
