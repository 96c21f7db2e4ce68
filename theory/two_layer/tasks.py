"""The tasks, training runs and random numbers of this room's ledger: one size, so that all claims
share their compilations. What is done to results is done in NumPy, which compiles nothing."""

from collections.abc import Callable
from functools import partial
from math import exp

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from theory.claims import Estimate, Simulate
from theory.two_layer import modes, networks
from theory.two_layer.layers import Layers, ideal, theta

PAPER = "overtrained"

D = 4
PRE = (2.0, 1.5, 0.6, 0.3)
TARGET = (3.2, 2.9, 2.45, 1.3)  # (4, 2)-misaligned with PRE: ratios 1.6, 1.93, 4.08, 4.33
SIZES = f"d={D}, σ={PRE}"

SUBSTEPS = 16  # of the exact flow
RUNGE_KUTTA = 1000  # steps between times: errors below 1e-9 at the times used
RATE, STEPS, EVERY = 0.01, 1000, 20
ROUNDING = 1e-9  # of hundreds of steps in float64, and what they leave


def rotations(symmetric: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Fixed U and V in general position with det U V^T = 1; U = V if symmetric."""
    n = np.arange(1, D + 1)
    u, v = (np.linalg.qr(a)[0] for a in (np.vander(n / D), np.cos(np.outer(n, n))))
    v[:, -1] *= np.linalg.det(u) * np.linalg.det(v)
    return u, u if symmetric else v


def task(sigma: tuple[float, ...] = PRE, symmetric: bool = False) -> Float[Array, "d d"]:
    """U diag(sigma) V^T."""
    u, v = rotations(symmetric)
    return jnp.asarray((u * np.array(sigma)) @ v.T)


def diagonal(theta: Float[Array, "*b d d"]) -> np.ndarray:
    """diag(U^T theta V)."""
    u, v = rotations()
    return np.einsum("oi,...op,pi->...i", u, theta, v)


def draws(quick: bool) -> int:
    return 10_000 if quick else 160_000


@partial(jax.jit, static_argnames="quick")
def normals(key: Array, quick: bool) -> Float[Array, "two draws d d"]:
    """Two sets of standard normal matrices."""
    return jax.random.normal(key, (2, draws(quick), D, D))


def trained(start: Layers, target: Array, times: list[float], anchor: float = 0.0) -> Layers:
    """Gradient flow at four times."""
    return networks.gradient_flow(start, target, jnp.array(times), RUNGE_KUTTA, anchor=anchor)


def tuned(
    n: int,
    sigma_ft: tuple[float, ...] = TARGET,
    anchor: float = 0.0,
    rate: float = RATE,
    anchored_to: Array | None = None,
    target: Array | None = None,
) -> Layers:
    """Gradient descent of the network from n ideal modes: the path after every 20 steps."""
    start = ideal(task(), n)
    return networks.descend(
        start,
        task(sigma_ft) if target is None else target,
        rate,
        STEPS,
        anchor=anchor,
        anchored_to=theta(start) if anchored_to is None else anchored_to,
        every=EVERY,
    )


def at(path: Layers, k: int) -> Layers:
    """The k-th network of a path."""
    return Layers(*(jnp.asarray(np.asarray(w)[k]) for w in path))


def losses(
    of: Array,
    sigma_ft: tuple[float, ...] = TARGET,
    anchor: float = 0.0,
    target: Array | None = None,
) -> np.ndarray:
    """|theta - of|^2 after fine-tuning from n = 0, ..., d ideal modes."""
    ends = [at(tuned(n, sigma_ft, anchor, target=target), -1) for n in range(D + 1)]
    return np.array([distance2(theta(end), of) for end in ends])


def distance2(one: Array, other: Array) -> float:
    return float(np.sum((np.asarray(one) - np.asarray(other)) ** 2))


def deterministic(value: Callable[[], float], tolerance: float = ROUNDING) -> Simulate:
    def simulate(key: Array, quick: bool) -> Estimate:
        del key, quick
        return Estimate(float(value()), tolerance=tolerance)

    return simulate


def mode_path(times: list[float]) -> Array:
    """The sigmoid law from e^{-2} I."""
    return jax.jit(modes.mode)(jnp.array(times)[:, None], exp(-4.0), jnp.array(PRE))
