"""Problems that attack overtrained's theorems on the end of fine-tuning.

The ratio compares minima of the objective. `again` trains the network to its end.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from sail_jax import linalg
from theory.adversary import Box, Domain, Problem
from theory.two_layer import networks
from theory.two_layer.layers import Layers

DESCENT = 4000  # steps at most


def _sorted(p: Problem) -> tuple[Any, Any]:
    """Returns both spectra, descending."""
    pre, ft = (-jnp.sort(-jnp.asarray(p[name])) for name in ("pre", "ft"))
    return pre, ft


def _ends(p: Problem, anchor: Any) -> tuple[Any, Any, Any]:
    """Returns both spectra and the minimum of (y - ft)^2 + lambda (y - pre)^2 in each mode."""
    pre, ft = _sorted(p)
    return pre, ft, (ft + anchor * pre) / (1 + anchor)


def _minima(p: Problem, anchor: Any) -> tuple[Any, Any, Any]:
    """Computes |theta - A_pre|^2 and |theta - A_ft|^2 from n = 0, ..., d modes, and the first one
    before fine-tuning.
    """
    pre, ft, end = _ends(p, anchor)
    lost, left, before = (
        jnp.stack(
            [
                ((jnp.arange(pre.size) < n) * y - of) @ ((jnp.arange(pre.size) < n) * y - of)
                for n in range(pre.size + 1)
            ]
        )
        for y, of in ((end, pre), (end, ft), (pre, pre))
    )
    return lost, left, before


def _descend(w1: np.ndarray, w2: np.ndarray, target: np.ndarray, anchor: float) -> np.ndarray:
    """Computes the map at the end of gradient descent."""
    start = Layers(jnp.asarray(w1), jnp.asarray(w2))
    rate = 0.9 * networks.stable_rate(start, jnp.asarray(target), anchor)
    end = networks.descend(start, jnp.asarray(target), rate, DESCENT, anchor=anchor)
    return np.asarray(end.w1) @ np.asarray(end.w2)


def _trained(p: Problem, anchor: Any) -> tuple[Any, Any, Any]:
    """Computes the same as `_minima` from a trained network with turned singular vectors."""
    pre, ft = (np.asarray(s) for s in _sorted(p))
    d = pre.size
    grid = np.arange(1.0, d + 1)
    u, v = (np.linalg.qr(m)[0] for m in (np.vander(grid / d), np.cos(np.outer(grid, grid))))
    of_pre, of_ft = (u * pre) @ v.T, (u * ft) @ v.T
    lost, left, before = [], [], []
    for n in range(d + 1):
        root = np.sqrt(pre) * (np.arange(d) < n)
        w1, w2 = u * root, root[:, None] * v.T
        # With as many hidden units as modes, unlearned modes stay unlearned.
        end = _descend(w1[:, :n], w2[:n], of_ft, float(anchor)) if n else np.zeros((d, d))
        lost.append(np.sum((end - of_pre) ** 2))
        left.append(np.sum((end - of_ft) ** 2))
        before.append(np.sum((w1 @ w2 - of_pre) ** 2))
    return np.array(lost), np.array(left), np.array(before)


Minima = Callable[[Any, Any], tuple[Any, Any, Any]]
_SPECTRA = {"pre": Box(0.3, 3.0, (2,)), "ft": Box(0.3, 3.0, (2,))}


def _monotone(minima: Minima, p: Problem) -> Any:
    lost, _, before = minima(p, p["anchor"])
    degraded = lost - before
    return degraded[1] / degraded[2]


MONOTONE = Domain(
    "d = 2, aligned tasks, n = 2; spectra apart by .1",
    {**_SPECTRA, "anchor": Box(0.0, 5.0)},
    partial(_monotone, _minima),
    partial(_monotone, _trained),
    allowed=lambda p: jnp.abs(_sorted(p)[0] - _sorted(p)[1]).min() - 0.1,
)


def _harm(minima: Minima, n: int, p: Problem) -> Any:
    """Divides the decrease of the loss by mode n by the increase of the added term."""
    lost, _, before = minima(p, 0.0)
    degraded = lost - before
    return (before[n - 1] - before[n]) / (degraded[n] - degraded[n - 1])


def misaligned(n: int, times: int = 4) -> Domain:
    """Returns the problems of Theorem A.25, item 1, (`times`, 1)-misaligned.

    Args:
      n: The mode, 1 or 2.
      times: The least ratio of the second modes.

    Returns:
      The domain.
    """
    return Domain(
        f"d = 2, aligned and ({times}, 1)-misaligned tasks, λ = 0, n = {n}; spectra apart by .1",
        {"pre": Box(0.1, 1.0, (2,)), "ft": Box(0.3, 6.0, (2,))},
        partial(_harm, _minima, n),
        partial(_harm, _trained, n),
        allowed=lambda p: jnp.minimum(
            _sorted(p)[1][1] - times * _sorted(p)[0][1],
            jnp.abs(_sorted(p)[0] - _sorted(p)[1]).min() - 0.1,
        ),
    )


def _inflection(lost: Any) -> int:
    """Returns the number of modes after which the loss first rises, or all of them."""
    return next((n for n in range(len(lost) - 1) if lost[n + 1] > lost[n]), len(lost) - 1)


def _direction(minima: Minima, reverse: bool, p: Problem) -> float:
    weak = float(p["anchor"])
    strong = weak + float(p["more"])
    small, large = (_inflection(minima(p, anchor)[0]) for anchor in (weak, strong))
    return (large + 1) / (small + 1) if reverse else (small + 1) / (large + 1)


def direction(printed: bool) -> Domain:
    """Returns the problems of Theorem A.25, item 2.

    Args:
      printed: Whether the direction is the printed one.

    Returns:
      The domain.
    """
    return Domain(
        "d = 3, aligned tasks, two anchors; 1 more than the inflection points, 0 to 3",
        {
            "pre": Box(0.3, 1.5, (3,)),
            "ft": Box(0.3, 5.0, (3,)),
            "anchor": Box(0.01, 2.0),
            "more": Box(0.1, 2.0),
        },
        partial(_direction, _minima_again, printed),
        partial(_direction, _trained, printed),
        smooth=False,
    )


def _minima_again(p: Problem, anchor: Any) -> tuple[Any, Any, Any]:
    """Computes `_minima` in NumPy, which is faster to call."""
    pre, ft = (np.sort(p[name])[::-1] for name in ("pre", "ft"))
    end, n = (ft + anchor * pre) / (1 + anchor), np.arange(pre.size + 1)[:, None]
    learned = np.arange(pre.size) < n
    of = ((learned * end, pre), (learned * end, ft), (learned * pre, pre))
    lost, left, before = (((y - target) ** 2).sum(1) for y, target in of)
    return lost, left, before


def _anchors(p: Problem) -> tuple[Any, Any]:
    return p["anchor"], p["anchor"] + p["more"]


def _left(minima: Minima, p: Problem) -> Any:
    weak, strong = (minima(p, anchor)[1][1] for anchor in _anchors(p))
    return weak / strong


_TWO_ANCHORS = {"anchor": Box(0.01, 2.0), "more": Box(0.01, 2.0, log=True)}
ANCHORS = Domain(
    "d = 2, aligned tasks, n = 1, two anchors",
    {**_SPECTRA, **_TWO_ANCHORS},
    partial(_left, _minima),
    partial(_left, _trained),
)


def _rank_1(matrix: Any) -> Any:
    """Returns the closest matrix of rank 1."""
    u, s, vt = linalg.svd(matrix)
    return s[0] * jnp.outer(u[:, 0], vt[0])


def _unaligned(p: Problem) -> Any:
    start, left = _rank_1(p["of_pre"]), []
    for anchor in _anchors(p):
        end = _rank_1((p["of_ft"] + anchor * start) / (1 + anchor))
        left.append(((end - p["of_ft"]) ** 2).sum())
    return left[0] / left[1]


def _unaligned_again(p: Problem) -> float:
    u, s, vt = np.linalg.svd(np.asarray(p["of_pre"]))
    root, left = np.sqrt(s[0]), []
    for anchor in _anchors(p):
        target = np.asarray(p["of_ft"])
        end = _descend(root * u[:, :1], root * vt[:1], target, float(anchor))
        left.append(np.sum((end - target) ** 2))
    return float(left[0] / left[1])


UNALIGNED = Domain(
    "d = 2, any two tasks, n = 1, two anchors",
    {**dict.fromkeys(("of_pre", "of_ft"), Box(-2.0, 2.0, (2, 2))), **_TWO_ANCHORS},
    _unaligned,
    _unaligned_again,
)
