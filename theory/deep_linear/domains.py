"""Problems on which the bounds of Lemma 3.3 and Lemma B.1 of features-are-fate are attacked.

Gradient flow conserves D_l = W_l^T W_l - W_{l+1} W_{l+1}^T. The lemmas assume that D_l is at least
lambda I. The bounds must hold for every network with such D_l.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import jax.numpy as jnp
import numpy as np

from theory.adversary import Box, Domain, Problem

_SQUARE = Box(-1.5, 1.5, (2, 2))


def _root(square: Any) -> Any:
    """Computes the square root of a positive 2 x 2 matrix, by Cayley and Hamilton."""
    det = jnp.sqrt(square[0, 0] * square[1, 1] - square[0, 1] * square[1, 0])
    return (square + det * jnp.eye(2)) / jnp.sqrt(square[0, 0] + square[1, 1] + 2 * det)


def _turn(angle: Any) -> Any:
    c, s = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([jnp.stack([c, -s]), jnp.stack([s, c])])


def layers(p: Problem) -> list[Any]:
    """Builds 2 x 2 layers above a column, with D_l = lambda I + a square.

    Args:
      p: The column `last`, and for each square layer, from the last to the first, one of `more` and
        one of `angles`. `more` is squared, and the layer is turned by the angle. `least` is lambda.

    Returns:
      W_1, ..., W_L.
    """
    found = [p["last"][:, None]]
    for more, angle in zip(p["more"], p["angles"], strict=True):
        upper = found[0]
        square = upper @ upper.T + p["least"] * jnp.eye(2) + more @ more.T
        found.insert(0, _turn(angle) @ _root(square))
    return found


def eigenvalues(square: Any) -> tuple[Any, Any]:
    """Computes the eigenvalues of a symmetric 2 x 2 matrix.

    Args:
      square: The matrix.

    Returns:
      The smaller and the larger one.
    """
    half = (square[0, 0] + square[1, 1]) / 2
    det = square[0, 0] * square[1, 1] - square[0, 1] ** 2
    larger = half + jnp.sqrt(jnp.maximum(half**2 - det, 1e-30))
    return det / larger, larger


def _features(factor: float, p: Problem) -> Any:
    *square, _ = layers(p)
    phi = reduce(jnp.matmul, square)
    return factor * p["least"] ** len(square) / eigenvalues(phi.T @ phi)[0]


def _features_again(factor: float, p: Problem) -> float:
    *square, _ = map(np.asarray, layers(p))
    least = np.linalg.svd(reduce(np.matmul, square), compute_uv=False)[-1]
    return float(factor * p["least"] ** len(square) / least**2)


def boxes(depth: int) -> Mapping[str, Box]:
    """Returns the ranges of the arguments of `layers`.

    Args:
      depth: Number of layers L.

    Returns:
      The boxes.
    """
    return {
        "last": Box(-1.5, 1.5, (2,)),
        "more": Box(-1.5, 1.5, (depth - 1, 2, 2)),
        "angles": Box(0.0, 2 * np.pi, (depth - 1,)),
        "least": Box(1e-2, 1.0, log=True),
    }


_WORDS = "L = {}, 2 x 2 layers, D_l ≽ α²λ I"


def features(factor: float = 1.0, depth: int = 3) -> Domain:
    """Returns the problems of eq. (46).

    Args:
      factor: The bound is this times (alpha^2 lambda)^(L-1).
      depth: Number of layers L.

    Returns:
      The domain.
    """
    return Domain(
        _WORDS.format(depth),
        boxes(depth),
        partial(_features, factor),
        partial(_features_again, factor),
    )


def _power(p: Problem) -> Any:
    """Divides u.(W_{L-1}^T W_{L-1})^(L-1) u by u.Phi^T Phi u, for L = 4."""
    first, second, third, _ = layers(p)
    u = jnp.stack([jnp.cos(p["way"]), jnp.sin(p["way"])])
    left = third @ (third.T @ (third @ u))
    return jnp.sum(left**2) / jnp.sum((first @ (second @ (third @ u))) ** 2)


def _power_again(p: Problem) -> float:
    *square, _ = map(np.asarray, layers(p))
    u, phi = np.array([np.cos(p["way"]), np.sin(p["way"])]), reduce(np.matmul, square)
    power = np.linalg.matrix_power(square[-1].T @ square[-1], 3)
    return float(u @ power @ u / np.linalg.norm(phi @ u) ** 2)


POWER = Domain(
    f"{_WORDS.format(4)}, any u", {**boxes(4), "way": Box(0.0, np.pi)}, _power, _power_again
)


def _difference(p: Problem) -> Any:
    first, _, last = layers(p)
    return 2 * p["least"] / (eigenvalues(first.T @ first)[1] - jnp.sum(last**2))


def _difference_again(p: Problem) -> float:
    first, _, last = map(np.asarray, layers(p))
    norms = [np.linalg.norm(w, 2) ** 2 for w in (first, last)]
    return float(2 * p["least"] / (norms[0] - norms[1]))


DIFFERENCE = Domain(_WORDS.format(3), boxes(3), _difference, _difference_again)


def _both(p: Problem) -> Any:
    """Returns initial weights and a network with the same D_1, for L = 2. Only the last layer
    differs.
    """
    sizes = []
    kept = p["least"] * jnp.eye(2) + p["more"] @ p["more"].T
    for last in (p["last"], p["start"]):
        first = jnp.outer(last, last) + kept
        sizes.append(eigenvalues(first)[1] - jnp.sum(last**2))
    return sizes


def _reversed(p: Problem) -> Any:
    """Divides -(|W_1|^2 - |W_2|^2) by |W_1(0)|^2 - |W_2(0)|^2."""
    now, start = _both(p)
    return -now / start


def _reversed_again(p: Problem) -> float:
    kept = p["least"] * np.eye(2) + p["more"] @ p["more"].T
    now, start = (
        np.linalg.eigvalsh(np.outer(w, w) + kept)[-1] - w @ w for w in (p["last"], p["start"])
    )
    return float(-now / start)


REVERSED = Domain(
    "L = 2, 2 x 2 layers, D_1 ≽ α²λ I, the same at the start",
    {
        "last": Box(-1.5, 1.5, (2,)),
        "start": Box(-1.5, 1.5, (2,)),
        "more": _SQUARE,
        "least": Box(1e-2, 1.0, log=True),
    },
    _reversed,
    _reversed_again,
)


def _top_at_start(p: Problem) -> Any:
    """Divides |W̄_2|^2 + alpha^2 (|W̄_2|^2 - |W̄_1|^2) by |W_1|^2, for initial weights alpha W̄."""
    now, start = _both(p)
    bound = jnp.sum(p["start"] ** 2) / p["alpha"] ** 2 - start
    return bound / (now + jnp.sum(p["last"] ** 2))


def _top_at_start_again(p: Problem) -> float:
    kept = p["least"] * np.eye(2) + p["more"] @ p["more"].T
    now, first = (np.linalg.cholesky(np.outer(w, w) + kept) for w in (p["last"], p["start"]))
    size = p["start"] @ p["start"]
    bound = size / p["alpha"] ** 2 + size - np.linalg.norm(first, 2) ** 2
    return float(bound / np.linalg.norm(now, 2) ** 2)


TOP_PRINTED = replace(
    REVERSED,
    problems=f"{REVERSED.problems}, α from .05 to 1",
    boxes={**REVERSED.boxes, "alpha": Box(0.05, 1.0, log=True)},
    ratio=_top_at_start,
    again=_top_at_start_again,
)


FROBENIUS, OPERATOR = "|W̄|_F", "|W̄|_op"


def _tail(norms: Sequence[str], p: Problem) -> Any:
    """Divides |W_1|_F^2 - |W_1|_op^2 by |W_1(0)|^2 - |W_2(0)|^2, summed over several norms."""
    kept = p["least"] * jnp.eye(2) + p["more"] @ p["more"].T
    lesser, _ = eigenvalues(jnp.outer(p["last"], p["last"]) + kept)
    bounds = {FROBENIUS: kept[0, 0] + kept[1, 1], OPERATOR: _both(p)[1]}
    return lesser / sum(bounds[norm] for norm in norms)


def _tail_again(norms: Sequence[str], p: Problem) -> float:
    kept = p["least"] * np.eye(2) + p["more"] @ p["more"].T
    w, w0 = (np.linalg.cholesky(np.outer(v, v) + kept) for v in (p["last"], p["start"]))
    sizes = {FROBENIUS: np.sum(w0**2), OPERATOR: np.linalg.norm(w0, 2) ** 2}
    bound = sum(float(sizes[norm]) - p["start"] @ p["start"] for norm in norms)
    return float((np.sum(w**2) - np.linalg.norm(w, 2) ** 2) / bound)


def tail(*norms: str) -> Domain:
    """Returns the problems of eq. (60).

    Args:
      *norms: The norms of the initial weights in the bound, of `FROBENIUS` and `OPERATOR`.

    Returns:
      The domain.
    """
    fewer = {norm: tuple(other for other in norms if other != norm) for norm in norms}
    return replace(
        REVERSED,
        ratio=partial(_tail, norms),
        again=partial(_tail_again, norms),
        without={norm: partial(_tail, rest) for norm, rest in fewer.items() if rest},
    )
