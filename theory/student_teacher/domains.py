"""Problems that attack the bounds of Section 4 of features-are-fate, with inputs in the plane.

There E f g = 2 mean f g over the circle for sums of ReLU neurons, which `again` uses.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from theory.adversary import Box, Domain, Problem
from theory.student_teacher import arc_cosine

_PHI = (np.arange(20_000) + 0.5) * 2 * np.pi / 20_000
_CIRCLE = np.stack([np.cos(_PHI), np.sin(_PHI)], 1)


def _moments(p: Problem, kept: int) -> tuple[Any, Any, Any]:
    """Computes E phi phi^T and E phi f of the first neurons, and E f^2."""
    w, target = p["neurons"][:kept], p["target"]
    overlap = arc_cosine.gram(w, target) @ p["output"]
    norm = p["output"] @ arc_cosine.gram(target, target) @ p["output"]
    return arc_cosine.gram(w, w), overlap, norm


def _outside(p: Problem, kept: int) -> Any:
    """Computes |P_perp f|^2 for the first neuron, or for the first two."""
    gram, overlap, norm = _moments(p, kept)
    return norm - overlap @ _solve(gram, overlap)


def _solve(square: Any, right: Any) -> Any:
    """Computes the same by Cramer's rule."""
    if len(right) == 1:
        return right / square[0, 0]
    (a, b), (c, d) = square
    return jnp.stack([d * right[0] - b * right[1], a * right[1] - c * right[0]]) / (a * d - b * c)


def _on_circle(p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Evaluates the neurons and the target, times the root of each point's weight."""
    root = np.sqrt(2 / len(_CIRCLE))
    target = np.maximum(_CIRCLE @ np.asarray(p["target"]).T, 0) @ p["output"]
    return root * np.maximum(_CIRCLE @ np.asarray(p["neurons"]).T, 0), root * target


def _outside_again(p: Problem, kept: int) -> float:
    phi, target = _on_circle(p)
    phi = phi[:, :kept]
    return float(np.sum((target - phi @ np.linalg.lstsq(phi, target)[0]) ** 2))


def _own(p: Problem) -> Any:
    """Uses the target's neurons."""
    return {**p, "neurons": p["target"]}


def _increase(p: Problem) -> Any:
    """Divides the part of the target outside two neurons' span by that outside one's."""
    return _outside(_own(p), 2) / _outside(_own(p), 1)


def _increase_again(p: Problem) -> float:
    return _outside_again(_own(p), 2) / _outside_again(_own(p), 1)


def _learnable(p: Problem) -> Any:
    """Requires neurons in different directions that do not span the target."""
    gram, _, norm = _moments(p, 2)
    apart = gram[0, 0] * gram[1, 1] - gram[0, 1] ** 2
    return jnp.minimum(apart - 0.01, _outside(p, 2) - 0.01 * norm)


_TARGET = {"target": Box(-1.5, 1.5, (3, 2)), "output": Box(-1.0, 1.0, (3,))}
NESTED = Domain(
    "a target of 3 neurons of 2 inputs, features of 2 and of 1 of them",
    _TARGET,
    _increase,
    _increase_again,
    allowed=lambda p: _learnable(_own(p)),
)


def _floor(p: Problem) -> Any:
    """Divides |P_perp f|^2 by the risk of least squares on a sample."""
    phi = jnp.maximum(p["sample"] @ p["neurons"].T, 0)
    f = jnp.maximum(p["sample"] @ p["target"].T, 0) @ p["output"]
    c = _solve(phi.T @ phi, phi.T @ f)
    gram, overlap, norm = _moments(p, 2)
    return _outside(p, 2) / (c @ gram @ c - 2 * c @ overlap + norm)


def _floor_again(p: Problem) -> float:
    phi, f = (
        np.maximum(np.asarray(p["sample"]) @ np.asarray(p[name]).T, 0)
        for name in ("neurons", "target")
    )
    c = np.linalg.lstsq(phi, f @ p["output"])[0]
    everywhere, target = _on_circle(p)
    return _outside_again(p, 2) / float(np.sum((target - everywhere @ c) ** 2))


def _fitted(p: Problem) -> Any:
    """Requires a sample that determines both weights."""
    phi = jnp.maximum(p["sample"] @ p["neurons"].T, 0)
    (a, b), (_, d) = phi.T @ phi
    return jnp.minimum(a * d - b**2 - 0.01, _learnable(p))


FLOOR = Domain(
    "2 neurons of 2 inputs, a target of 3 others, any sample of 4",
    {**_TARGET, "neurons": Box(-1.5, 1.5, (2, 2)), "sample": Box(-2.0, 2.0, (4, 2))},
    _floor,
    _floor_again,
    allowed=_fitted,
)
