"""Problems on which the bounds of Lemmas A.13 to A.22 of overtrained are attacked.

Both sides are written out here for small layers; `again` uses the networks of the claims.
"""

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from theory.adversary import Box, Domain
from theory.two_layer import networks
from theory.two_layer.layers import Layers, ideal

# --- one step (A.15, A.16, A.18) -----------------------------------------------------------------


def _top(matrix: Any) -> Any:
    """The operator norm of a 2 x 2 matrix, smooth but where its singular values meet."""
    square = jnp.sum(matrix**2)
    det = matrix[0, 0] * matrix[1, 1] - matrix[0, 1] * matrix[1, 0]
    return jnp.sqrt((square + jnp.sqrt(jnp.maximum(square**2 - 4 * det**2, 1e-30))) / 2)


def _within(matrix: Any, radius: float) -> Any:
    """The matrix, shrunk to an operator norm of at most `radius`."""
    return matrix * radius / jnp.maximum(_top(matrix), radius)


def _symmetric(matrix: Any) -> Any:
    """Its symmetric part, of operator norm 1."""
    half = matrix + matrix.T
    return half / _top(half)


def _deviating(p: Any) -> tuple[Any, Any, Any, Any]:
    """Layers of norm <= 2, a target of norm <= 1 and the direction in which a batch is off."""
    first, second = _within(p["w1"], 2.0), _within(p["w2"], 2.0)
    return first, second, _within(p["target"], 1.0), _symmetric(p["batch"])


def _deviation(constant: float, p: Any) -> Any:
    """Of one step of rate 1 with the batch from that with all data, eps = Gamma = 1."""
    w1, w2, target, off = _deviating(p)
    wrong = (w1 @ w2 - target) @ off
    return 2 * jnp.maximum(_top(wrong @ w2.T), _top(w1.T @ wrong)) / constant


def _deviation_again(constant: float, p: Any, eps: float = 0.5) -> float:
    """By autodiff of the loss of a batch with that covariance."""
    w1, w2, target, off = _deviating(p)
    values, vectors = np.linalg.eigh(np.eye(2) + eps * np.asarray(off))
    x = sqrt(2) * np.sqrt(values)[:, None] * vectors.T
    layers = Layers(w1, w2)
    noisy = jax.grad(networks.batch_objective)(layers, jnp.asarray(x), target, 0.0, target)
    exact = jax.grad(networks.objective)(layers, target, 0.0, target)
    size = max(np.linalg.norm(np.asarray(a - b), 2) for a, b in zip(noisy, exact, strict=True))
    return float(size) / (constant * eps)


MATRIX = Box(-2.0, 2.0, (2, 2))


def batch_step(constant: float) -> Domain:
    """Returns the problems of Lemma A.15.

    Args:
      constant: The bound is this times eta eps Gamma^(3/2).

    Returns:
      The domain.
    """
    return Domain(
        "2 x 2 layers of norm <= 2√Γ, |A| <= Γ, any batch",
        dict.fromkeys(("w1", "w2", "target", "batch"), MATRIX),
        partial(_deviation, constant),
        partial(_deviation_again, constant),
    )


def _moved(p: Any) -> tuple[Layers, Layers, Any, Any]:
    """Layers of norm <= 2, the direction of their difference, the target and the anchored map."""
    layers = Layers(_within(p["w1"], 2.0), _within(p["w2"], 2.0))
    way = Layers(p["v1"], p["v2"])
    size = jnp.maximum(_top(way.w1), _top(way.w2))
    anchored = _within(p["anchored"], 1.0)
    return layers, Layers(way.w1 / size, way.w2 / size), _within(p["target"], 1.0), anchored


def _stepped(layers: Layers, target: Any, anchored: Any, p: Any) -> Layers:
    """One step, Sigma_k = I, written out."""
    rate, anchor = p["rate"], p["anchor"]
    pull = layers.w1 @ layers.w2 - target + anchor * (layers.w1 @ layers.w2 - anchored)
    first = layers.w1 - 2 * rate * pull @ layers.w2.T
    return Layers(first, layers.w2 - 2 * rate * layers.w1.T @ pull)


def _growth(bound: Callable[[Any], Any], p: Any) -> Any:
    """Of a small difference of two networks in one step, less 1, beside a bound of it: without
    the 1 the bound would be attained by steps that are small."""
    layers, way, target, anchored = _moved(p)
    _, change = jax.jvp(lambda at: _stepped(at, target, anchored, p), (layers,), (way,))
    return (jnp.maximum(_top(change.w1), _top(change.w2)) - 1) / bound(p)


def _growth_again(bound: Callable[[Any], Any], p: Any, apart: float = 1e-6) -> float:
    """By gradient descent of two networks that are apart, both inside of the ball."""
    layers, way, target, anchored = _moved(p)
    shrunk = Layers(*((1 - apart) * w for w in layers))
    ends = []
    for near in (0.0, apart):
        w = Layers(*(a + near * v for a, v in zip(shrunk, way, strict=True)))
        slope = jax.grad(networks.objective)(w, target, p["anchor"], anchored)
        ends.append([np.asarray(a - p["rate"] * g) for a, g in zip(w, slope, strict=True)])
    gaps = [np.linalg.norm(a - b, 2) for a, b in zip(*ends, strict=True)]
    return float(max(gaps) / apart - 1) / float(bound(p))


def _corrected(p: Any) -> Any:
    return 26 * p["rate"] * (1 + p["anchor"])


def growth(constant: float | None = None) -> Domain:
    """Returns the problems of Lemmas A.16 and A.18, with batches as good as all data.

    Args:
      constant: c of the bound 1 + c eta Gamma as printed; None for the corrected bound.

    Returns:
      The domain.
    """
    bound = _corrected if constant is None else lambda p: constant * p["rate"]
    return Domain(
        "2 x 2 layers of norm <= 2√Γ, Γ = 1, |A|, |θ(0)| <= 1, 4η(λ+2) < 1",
        {
            **dict.fromkeys(("w1", "w2", "v1", "v2", "target", "anchored"), MATRIX),
            "rate": Box(1e-3, 0.12, log=True),
            "anchor": Box(0.0, 10.0),
        },
        partial(_growth, bound),
        partial(_growth_again, bound),
        allowed=lambda p: 1 - 4 * p["rate"] * (p["anchor"] + 2),
    )


# --- many steps from ideal starts (A.17) ----------------------------------------------------------

RUN = 12  # steps
TINY = 1e-6  # |Sigma_k - I|


def _run(p: Any) -> tuple[Any, Any, Any, Any]:
    """The start, the target and the batches' directions of a run, and Gamma."""
    start, target = jnp.diag(jnp.sqrt(p["pre"])), jnp.diag(p["ft"])
    off = jax.vmap(_symmetric)(p["batches"])
    return start, target, off, jnp.maximum(p["pre"].max(), p["ft"].max())


def _drift(bound: Callable[[Any, Any], Any], p: Any) -> Any:
    """Of the run with batches from that with all data, per unit of eps, to first order."""
    start, target, off, size = _run(p)

    def end(eps: Any) -> Layers:
        def step(w: Layers, s: Any) -> tuple[Layers, None]:
            theta = w.w1 @ w.w2
            pull = (theta - target) @ (jnp.eye(2) + eps * s) + p["anchor"] * (theta - start**2)
            first = w.w1 - 2 * p["rate"] * pull @ w.w2.T
            return Layers(first, w.w2 - 2 * p["rate"] * w.w1.T @ pull), None

        return jax.lax.scan(step, Layers(start, start), off)[0]

    _, drift = jax.jvp(end, (0.0,), (1.0,))
    return jnp.maximum(_top(drift.w1), _top(drift.w2)) / bound(p, size)


def _drift_again(bound: Callable[[Any, Any], Any], p: Any) -> float:
    """By stochastic gradient descent with two inputs a batch."""
    _, target, off, size = _run(p)
    start = ideal(jnp.diag(jnp.asarray(p["pre"])), 2)
    values, vectors = np.linalg.eigh(np.eye(2) + TINY * np.asarray(off))
    x = sqrt(2) * np.sqrt(values)[:, :, None] * vectors.swapaxes(1, 2)
    plain = np.broadcast_to(sqrt(2) * np.eye(2), x.shape)
    ends = [
        networks.sgd(start, target, jnp.asarray(batches), p["rate"], anchor=p["anchor"])
        for batches in (x, plain)
    ]
    gaps = [np.linalg.norm(np.asarray(a - b), 2) for a, b in zip(*ends, strict=True)]
    return float(max(gaps)) / TINY / float(bound(p, size))


def _drift_printed(p: Any, size: Any) -> Any:
    return 2 * (1 + 16 * p["rate"] * size) ** RUN * jnp.sqrt(size)


def _drift_corrected(p: Any, size: Any) -> Any:
    growth = 26 * (1 + p["anchor"])
    return 20 / growth * ((1 + growth * p["rate"] * size) ** RUN - 1) * jnp.sqrt(size)


def _drift_linear(p: Any, size: Any) -> Any:
    """The corrected bound without the growth of what earlier steps have added."""
    return 20 * RUN * p["rate"] * size**1.5


def batches(corrected: bool) -> Domain:
    """Returns the problems of Lemma A.17.

    Args:
      corrected: Whether the bound is the corrected one.

    Returns:
      The domain.
    """
    bound = _drift_corrected if corrected else _drift_printed
    return Domain(
        f"d = 2, ideal starts, {RUN} steps, any small ϵ, 4η(λ+2)Γ < 1",
        {
            "pre": Box(0.01, 3.0, (2,)),
            "ft": Box(0.01, 3.0, (2,)),
            "batches": Box(-1.0, 1.0, (RUN, 2, 2)),
            "rate": Box(1e-4, 0.12, log=True),
            "anchor": Box(0.0, 10.0),
        },
        partial(_drift, bound),
        partial(_drift_again, bound),
        allowed=_allowed,
        without={"growth": partial(_drift, _drift_linear)} if corrected else {},
    )


# --- many steps from real starts (A.19, A.20, A.22) -----------------------------------------------

_RUNS = {
    "pre": Box(0.01, 3.0, (2,)),
    "ft": Box(0.01, 3.0, (2,)),
    **dict.fromkeys(("v1", "v2"), MATRIX),
    "batches": Box(-1.0, 1.0, (RUN, 2, 2)),
    "rate": Box(1e-3, 0.12, log=True),
    "anchor": Box(0.0, 10.0),
    "share": Box(0.0, 1.0),
}


def _way(p: Any) -> Layers:
    """The direction of the difference of two starts, of operator norm 1."""
    size = jnp.maximum(_top(p["v1"]), _top(p["v2"]))
    return Layers(p["v1"] / size, p["v2"] / size)


def _trained(p: Any, apart: Any, eps: Any) -> Layers:
    """The end of a run that starts beside the ideal start, anchored to its own start."""
    start, target, off, _ = _run(p)
    first, second = (start + apart * v for v in _way(p))
    anchored = first @ second

    def step(w: Layers, s: Any) -> tuple[Layers, None]:
        theta = w.w1 @ w.w2
        pull = (theta - target) @ (jnp.eye(2) + eps * s) + p["anchor"] * (theta - anchored)
        return Layers(
            w.w1 - 2 * p["rate"] * pull @ w.w2.T, w.w2 - 2 * p["rate"] * w.w1.T @ pull
        ), None

    return jax.lax.scan(step, Layers(first, second), off)[0]


def _trained_again(p: Any, apart: float, eps: float) -> list[np.ndarray]:
    """By stochastic gradient descent with two inputs a batch."""
    start, target, off, _ = _run(p)
    layers = Layers(*(jnp.asarray(start + apart * v) for v in _way(p)))
    values, vectors = np.linalg.eigh(np.eye(2) + eps * np.asarray(off))
    x = sqrt(2) * np.sqrt(values)[:, :, None] * vectors.swapaxes(1, 2)
    end = networks.sgd(layers, target, jnp.asarray(x), float(p["rate"]), anchor=float(p["anchor"]))
    return [np.asarray(w) for w in end]


def _allowed(p: Any) -> Any:
    size = jnp.maximum(p["pre"].max(), p["ft"].max())
    return 1 - 4 * p["rate"] * (p["anchor"] + 2) * size


def _power(constant: Any, p: Any) -> Any:
    return (1 + constant * p["rate"] * _run(p)[3]) ** RUN


def _same_eps(p: Any) -> Any:
    """The deviation of the batches that both runs see: a share of what the lemma allows."""
    return p["share"] / (4 * _power(32, p))


def _start_printed(p: Any) -> Any:
    return _power(32, p)


def _start_corrected(p: Any, eps: Any, anchors: bool = True) -> Any:
    growth = 26 * (1 + eps + p["anchor"])
    h = 16 * p["anchor"] / growth if anchors else 0.0
    return _power(growth, p) * (1 + h) - h


def _apart(bound: Callable[[Any], Any], p: Any) -> Any:
    """The growth of a small difference of starts, less 1, beside its bound less 1."""
    eps = _same_eps(p)
    _, way = jax.jvp(lambda apart: _trained(p, apart, eps), (0.0,), (1.0,))
    return (jnp.maximum(_top(way.w1), _top(way.w2)) - 1) / (bound(p) - 1)


def _apart_again(bound: Callable[[Any], Any], p: Any) -> float:
    ends = [_trained_again(p, apart, float(_same_eps(p))) for apart in (TINY, -TINY)]
    gaps = [np.linalg.norm(a - b, 2) / (2 * TINY) for a, b in zip(*ends, strict=True)]
    return float((max(gaps) - 1) / (bound(p) - 1))


def starts(corrected: bool) -> Domain:
    """Returns the problems of Lemma A.19.

    Args:
      corrected: Whether the bound is the corrected one.

    Returns:
      The domain.
    """

    def bound(p: Any, anchors: bool = True) -> Any:
        return _start_corrected(p, _same_eps(p), anchors) if corrected else _start_printed(p)

    return Domain(
        f"d = 2, near ideal starts, {RUN} steps, ϵ as allowed, 4η(λ+2)Γ < 1; both sides less 1",
        _RUNS,
        partial(_apart, bound),
        partial(_apart_again, bound),
        allowed=_allowed,
        without={"h": partial(_apart, partial(bound, anchors=False))} if corrected else {},
    )


def _terms(corrected: bool, p: Any) -> tuple[Any, Any]:
    """The bounds of Lemmas A.19 and A.17, for a start apart by the share, and the rest for eps."""
    size, apart, eps = _run(p)[3], p["share"], 1 - p["share"]
    if corrected:
        return apart * _start_corrected(p, 0.0), eps * _drift_corrected(p, size)
    return apart * _start_printed(p), eps * _drift_printed(p, size)


def _real(p: Any) -> Any:
    """The deviation of a real run from the ideal one, to first order."""
    way = p["share"], 1 - p["share"]
    _, change = jax.jvp(lambda apart, eps: _trained(p, apart, eps), (0.0, 0.0), way)
    return jnp.maximum(_top(change.w1), _top(change.w2))


def _both(corrected: bool, p: Any) -> Any:
    return (_real(p) - p["share"]) / (sum(_terms(corrected, p)) - p["share"])


def _only(corrected: bool, which: int, p: Any) -> Any:
    return _real(p) / _terms(corrected, p)[which]


def _both_again(corrected: bool, p: Any) -> float:
    apart, eps = TINY * float(p["share"]), TINY * (1 - float(p["share"]))
    ends = [_trained_again(p, sign * apart, sign * eps) for sign in (1, -1)]
    gaps = [np.linalg.norm(a - b, 2) / (2 * TINY) for a, b in zip(*ends, strict=True)]
    return float((max(gaps) - p["share"]) / (sum(_terms(corrected, p)) - p["share"]))


def both(corrected: bool) -> Domain:
    """Returns the problems of Lemma A.20.

    Args:
      corrected: Whether the bound is the corrected one.

    Returns:
      The domain.
    """
    return Domain(
        f"d = 2, near ideal starts, {RUN} steps, any small ϵ, 4η(λ+2)Γ < 1;"
        " both sides less the distance of the starts",
        _RUNS,
        partial(_both, corrected),
        partial(_both_again, corrected),
        allowed=_allowed,
        without={"e^(-Cτ)": partial(_only, corrected, 1), "ϵ": partial(_only, corrected, 0)},
    )


def _precision(p: Any) -> tuple[Any, Any]:
    """min |sigma_pre - sigma_ft|^2 / ((lambda_0 + 1)^2 Gamma), and the epsilon below it."""
    near = ((p["pre"] - p["ft"]) ** 2).min() / ((1 + p["anchor"]) ** 2 * _run(p)[3])
    return near, near / (4000 * 2 * _run(p)[3])


def _product(p: Any) -> Any:
    """|theta - theta_ideal|_F beside its bound; both are linear in a small epsilon."""
    size, (near, epsilon) = _run(p)[3], _precision(p)
    shrunk = epsilon / _power(32, p)
    way = jnp.sqrt(size) * shrunk, shrunk
    _, change = jax.jvp(lambda apart, eps: jnp.matmul(*_trained(p, apart, eps)), (0.0, 0.0), way)
    return jnp.sqrt(jnp.sum(change**2)) / (near / 1000)


def _product_again(p: Any) -> float:
    size, (near, epsilon) = _run(p)[3], _precision(p)
    ratio = float(epsilon / _power(32, p)) / TINY
    apart = TINY * float(jnp.sqrt(size))
    ends = [np.matmul(*_trained_again(p, sign * apart, sign * TINY)) for sign in (1, -1)]
    return float(np.linalg.norm(ends[0] - ends[1]) / 2 * ratio / (near / 1000))


def _enough(p: Any) -> Any:
    """By how much the steps exceed what item 3 of Assumption A.21 asks for, as printed."""
    least = jnp.minimum(p["pre"].min(), p["ft"].min())
    return RUN - jnp.log(100 * _run(p)[3] / _precision(p)[1]) / least


PRODUCT = Domain(
    f"d = 2, λ_0 = λ, {RUN} steps, as many as item 3 asks for; ϵ and the start as far as allowed",
    {
        **{name: box for name, box in _RUNS.items() if name != "share"},
        **dict.fromkeys(("pre", "ft"), Box(1.0, 6.0, (2,))),
        "rate": Box(1e-4, 0.02, log=True),
        "anchor": Box(0.0, 5.0),
    },
    _product,
    _product_again,
    allowed=lambda p: jnp.minimum(_allowed(p), _enough(p)),
)

# --- the size of a batch (A.13) -------------------------------------------------------------------

CONSTANT = 6.0  # C_1


def _batch_size(corrected: bool, p: Any) -> int:
    """As few samples as the lemma allows, and Lemma A.12."""
    steps, delta = int(p["steps"]), float(p["delta"])
    log = np.log(2 * steps / delta) if corrected else -np.log(10 * steps * delta)
    asked = CONSTANT**2 * (1 + log) / float(p["eps"]) ** 2
    return int(np.ceil(max(asked, 1 - np.log(delta))))


def _chance(single: float, p: Any) -> float:
    """Of one of all batches to be off, beside what is allowed."""
    return float(-np.expm1(int(p["steps"]) * np.log1p(-single)) / p["delta"])


def _failing(corrected: bool, p: Any) -> float:
    from scipy.special import gammainc, gammaincc

    half, eps = _batch_size(corrected, p) / 2, float(p["eps"])
    below = gammainc(half, half * (1 - eps)) if eps < 1 else 0.0
    return _chance(below + gammaincc(half, half * (1 + eps)), p)


def _failing_again(corrected: bool, p: Any) -> float:
    """By quadrature of the density of the mean square of normal numbers."""
    from scipy.integrate import quad
    from scipy.special import gammaln

    half, eps = _batch_size(corrected, p) / 2, float(p["eps"])

    def density(x: float) -> float:
        return float(
            np.exp(half * np.log(half) + (half - 1) * np.log(x) - half * x - gammaln(half))
        )

    far = 1 + eps + 60 / half + 60 / np.sqrt(half)
    above = quad(density, 1 + eps, far, limit=500, epsabs=0.0)[0]
    below = quad(density, 0.0, 1 - eps, limit=500, epsabs=0.0)[0] if eps < 1 else 0.0
    return _chance(above + below, p)


def batch_size(corrected: bool) -> Domain:
    """Returns the problems of Assumption A.13.

    Args:
      corrected: Whether the size is the corrected one.

    Returns:
      The domain.
    """
    return Domain(
        f"d = 1, C_1 = {CONSTANT:g}, m as small as allowed, and at least that of Lemma A.12",
        {
            "steps": Box(1, 1e5, log=True),
            "delta": Box(1e-3, 0.99, log=True),
            "eps": Box(0.2, 5.0, log=True),
        },
        partial(_failing, corrected),
        partial(_failing_again, corrected),
        smooth=False,
    )
