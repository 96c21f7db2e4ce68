"""Problems that attack the bounds on low-rank adapters."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from sail_jax import linalg
from theory.adversary import Box, Domain, Problem
from theory.two_layer import networks
from theory.two_layer.layers import Layers

STEPS = 4000  # of Runge-Kutta


def _spectra(p: Problem) -> tuple[Any, Any]:
    pre, ft = jnp.asarray(p["pre"]), jnp.asarray(p["ft"])
    return -jnp.sort(-pre), ft


def _less(p: Problem) -> Any:
    """Compares the ends. Full fine-tuning moves two modes, a rank-1 adapter the larger one."""
    pre, ft = _spectra(p)
    moved = (ft - pre) ** 2
    return moved.max() / moved.sum()


def _less_again(p: Problem) -> float:
    pre, ft = (np.asarray(s) for s in _spectra(p))
    root, target = np.diag(np.sqrt(pre)), jnp.diag(jnp.asarray(ft))
    layers = Layers(jnp.asarray(root), jnp.asarray(root))
    times = jnp.array([40.0])
    tuned = networks.gradient_flow(layers, target, times, STEPS)
    small = Layers(jnp.array([[0.1], [0.07]]), jnp.array([[0.08, -0.11]]))
    # On either side of 0, because an adapter grows from both.
    adapter = networks.adapter_flow(layers, small, target, times, STEPS)
    ends = (
        np.asarray(tuned.w1[0] @ tuned.w2[0]),
        root @ root + np.asarray(adapter.w1[0] @ adapter.w2[0]) @ root,
    )
    full, adapted = (float(np.sum((end - np.diag(pre)) ** 2)) for end in ends)
    return adapted / full


LESS = Domain(
    "d = 2, aligned tasks, n = 2 learned modes, rank 1; residuals apart by .2",
    {"pre": Box(0.5, 3.0, (2,)), "ft": Box(0.5, 3.0, (2,))},
    _less,
    _less_again,
    allowed=lambda p: jnp.abs(jnp.subtract(*jnp.abs(_spectra(p)[1] - _spectra(p)[0]))) - 0.2,
)


def _rate(p: Problem) -> Any:
    """Computes the growth rate linearised in B and A, twice the largest eigenvalue of their driving
    matrix.
    """
    f, y, s = p["ft"], p["share"] * p["ft"], p["scale"]
    entry = 2 * s * jnp.sqrt(y) * (f - y)
    rate = 2 * jnp.abs(linalg.eigvalsh(entry * jnp.array([[0.0, 1.0], [1.0, 0.0]]))[-1])
    return rate / (8 * s * (f / 3) ** 1.5)


def _rate_again(p: Problem) -> float:
    f, y, s = (float(x) for x in (p["ft"], p["share"] * p["ft"], p["scale"]))
    one = jnp.ones((1, 1))
    frozen, small = Layers(one * y**0.5, one * y**0.5), Layers(1e-6 * one, 1e-6 * one)
    fastest = 8 * s * (f / 3) ** 1.5
    times = jnp.array([1.0, 2.0]) / fastest
    path = networks.adapter_flow(frozen, small, one * f, times, STEPS, scale=s)
    grown = np.log(np.asarray(path.w1 * path.w2).ravel())
    return float(np.diff(grown)[0] / np.diff(np.asarray(times))[0] / fastest)


RATE = Domain(
    "one mode; pre-trained to a share from 0.01 to 1 of the fine-tuning target",
    {"ft": Box(0.1, 10.0, log=True), "share": Box(0.01, 1.0), "scale": Box(0.1, 10.0, log=True)},
    _rate,
    _rate_again,
)


def _starts(p: Problem) -> tuple[Any, Any, Any, Any]:
    return p["residual"], p["scale"], p["a"], p["time"]


def _halved(p: Problem) -> Any:
    """Computes |z - z'| from the squares of B + A and B - A, each by its own equation."""
    rho, s, a, time = _starts(p)
    k = s * a**2 / 4
    root = jnp.sqrt(rho**2 + 4 * k**2)
    tanh = jnp.tanh(2 * s * root * time)
    plus = (k * (root + rho * tanh) + 2 * k**2 * tanh) / (root + (2 * k - rho) * tanh)
    balanced = rho / (1 + (rho / k - 1) * jnp.exp(-4 * s * rho * time))
    return jnp.abs(plus - k**2 / plus - balanced) / k


def _halved_again(p: Problem) -> float:
    rho, s, a, time = (float(x) for x in _starts(p))
    one = jnp.ones((1, 1))
    found = []
    for start in (Layers(0 * one, a * one), Layers(a / 2 * one, a / 2 * one)):
        path = networks.adapter_flow(
            Layers(0 * one, one), start, rho * one, jnp.array([time]), STEPS, scale=s
        )
        found.append(s * float(path.w1[0, 0, 0] * path.w2[0, 0, 0]))
    return abs(found[0] - found[1]) / (s * a**2 / 4)


HALVED = Domain(
    "one mode, s a² up to 36",
    {
        "residual": Box(0.05, 3.0),
        "scale": Box(0.2, 4.0),
        "a": Box(0.05, 3.0, log=True),
        "time": Box(0.0, 3.0),
    },
    _halved,
    _halved_again,
)
