"""Tasks, training runs and random numbers that the claims of this package share.

There is one size, so that all claims share their compilations. Results are processed in NumPy,
which compiles nothing.
"""

from collections.abc import Callable
from functools import partial
from math import exp

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from theory import claims
from theory.claims import Simulate, generator, measured
from theory.two_layer import modes, networks
from theory.two_layer.layers import Layers, ideal, theta

# Sources refer to sections, because the HTML edition has no page numbers.
PAPER = "overtrained"
claim = partial(claims.claim, PAPER)

D = 4
PRE = (2.0, 1.5, 0.6, 0.3)
TARGET = (3.2, 2.9, 2.45, 1.3)  # (4, 2)-misaligned with PRE: ratios 1.6, 1.93, 4.08, 4.33
SIZES = f"d={D}, σ={PRE}"
BOTH = f"d={D}, σ_pre={PRE}, σ_ft={TARGET}"
GAMMA = max(*PRE, *TARGET)

SUBSTEPS = 16  # of the exact flow
RUNGE_KUTTA = 1000  # steps between times: errors below 1e-9 at the times used
RATE, STEPS, EVERY = 0.01, 1000, 20
ROUNDING = 1e-9  # of hundreds of steps in float64, and what they leave


def rotations(symmetric: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Returns fixed orthogonal U and V in general position, with det U V^T = 1.

    Args:
      symmetric: Whether V is equal to U.

    Returns:
      U and V, each `(D, D)`.
    """
    n = np.arange(1, D + 1)
    u, v = (np.linalg.qr(a)[0] for a in (np.vander(n / D), np.cos(np.outer(n, n))))
    # With det theta < 0 the smallest mode would never be learned (`modes.learned_modes`).
    v[:, -1] *= np.linalg.det(u) * np.linalg.det(v)
    return u, u if symmetric else v


def task(sigma: tuple[float, ...] = PRE, symmetric: bool = False) -> Float[Array, "d d"]:
    """Returns the target map U diag(sigma) V^T."""
    u, v = rotations(symmetric)
    return jnp.asarray((u * np.array(sigma)) @ v.T)


def diagonal(theta: Float[Array, "*b d d"]) -> np.ndarray:
    """Returns the modes diag(U^T theta V) of a map."""
    u, v = rotations()
    return np.einsum("oi,...op,pi->...i", u, theta, v)


def fixed(seed: int, *shape: int) -> np.ndarray:
    """Draws standard normal numbers that are the same in every check."""
    return np.random.default_rng(seed).normal(size=shape)


def draws(quick: bool) -> int:
    """Returns the number of draws of a Monte Carlo simulation."""
    return 10_000 if quick else 160_000


def normals(key: Array, quick: bool) -> Float[np.ndarray, "two draws d d"]:
    """Draws two sets of standard normal matrices, in NumPy."""
    return generator(key).standard_normal((2, draws(quick), D, D))


def trained(start: Layers, target: Array, times: list[float], anchor: float = 0.0) -> Layers:
    """Integrates gradient flow numerically, up to given times."""
    return networks.gradient_flow(start, target, jnp.array(times), RUNGE_KUTTA, anchor=anchor)


def tuned(
    n: int,
    sigma_ft: tuple[float, ...] = TARGET,
    anchor: float = 0.0,
    rate: float = RATE,
    anchored_to: Array | None = None,
    target: Array | None = None,
) -> Layers:
    """Fine-tunes the network with n ideal modes by gradient descent.

    Args:
      n: Number of learned modes of the pre-training task at the start.
      sigma_ft: Singular values of the fine-tuning task. `target` overrides them.
      anchor: Strength of the anchor.
      rate: Learning rate.
      anchored_to: Anchored map `(D, D)`. None is the map of the start.
      target: Fine-tuning target `(D, D)`. None is the task with `sigma_ft`.

    Returns:
      The path of the weights, one network after every 20 steps.
    """
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


def _product(layers: Layers) -> np.ndarray:
    """Returns the map of a network, in NumPy."""
    return np.asarray(layers.w1) @ np.asarray(layers.w2)


def at(path: Layers, k: int) -> Layers:
    """Selects the k-th network of a path."""
    return Layers(*(jnp.asarray(np.asarray(w)[k]) for w in path))


def losses(
    of: Array,
    sigma_ft: tuple[float, ...] = TARGET,
    anchor: float = 0.0,
    target: Array | None = None,
) -> np.ndarray:
    """Computes |theta - of|^2 after fine-tuning from n = 0, ..., D ideal modes."""
    ends = [at(tuned(n, sigma_ft, anchor, target=target), -1) for n in range(D + 1)]
    return np.array([distance2(_product(end), of) for end in ends])


def distance2(one: Array | np.ndarray, other: Array | np.ndarray) -> float:
    """Computes the squared Frobenius distance between two matrices."""
    return float(np.sum((np.asarray(one) - np.asarray(other)) ** 2))


def deterministic(value: Callable[[], float], tolerance: float = ROUNDING) -> Simulate:
    """Makes a simulator of a deterministic computation, which ignores the key and `quick`."""
    return measured(value, tolerance)


def mode_path(times: list[float]) -> Array:
    """Computes the sigmoid law of the modes from the start e^{-2} I."""
    return jax.jit(modes.mode)(jnp.array(times)[:, None], exp(-4.0), jnp.array(PRE))
