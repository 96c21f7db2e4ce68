"""Problems that attack Lemmas A.17 to A.22 of overtrained, runs of several steps.

Both sides are written out here for small layers, to first order in small differences. `again` takes
differences of networks trained by stochastic gradient descent.
"""

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from theory.adversary import Box, Domain, Problem
from theory.two_layer import networks
from theory.two_layer.layers import Layers, ideal
from theory.two_layer.planes import symmetric, top

# --- many steps from ideal starts (A.17) ----------------------------------------------------------

Form = Literal["printed", "corrected", "ours"]
RUN = 12  # steps
TINY = 1e-6  # |Sigma_k - I|


def _run(p: Problem) -> tuple[Any, Any, Any, Any]:
    """Returns the start, the target and the batches' directions of a run, and Gamma."""
    start, target = jnp.diag(jnp.sqrt(p["pre"])), jnp.diag(p["ft"])
    all_data = jnp.zeros((RUN, *start.shape))
    off = jax.vmap(symmetric)(p["batches"]) if "batches" in p else all_data
    return start, target, off, jnp.maximum(p["pre"].max(), p["ft"].max())


def _drift(bound: Callable[[Any, Any], Any], p: Problem) -> Any:
    """Computes the deviation of the run with batches from the run with all data, per unit of eps,
    to first order.
    """
    start, target, off, size = _run(p)

    def end(eps: Any) -> Layers:
        def step(w: Layers, s: Any) -> tuple[Layers, None]:
            theta = w.w1 @ w.w2
            pull = (theta - target) @ (jnp.eye(2) + eps * s) + p["anchor"] * (theta - start**2)
            first = w.w1 - 2 * p["rate"] * pull @ w.w2.T
            return Layers(first, w.w2 - 2 * p["rate"] * w.w1.T @ pull), None

        return jax.lax.scan(step, Layers(start, start), off)[0]

    _, drift = jax.jvp(end, (0.0,), (1.0,))
    return jnp.maximum(top(drift.w1), top(drift.w2)) / bound(p, size)


def _drift_again(bound: Callable[[Any, Any], Any], p: Problem) -> float:
    """Computes the same by stochastic gradient descent with two inputs per batch."""
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


def _drift_printed(p: Problem, size: Any) -> Any:
    return 2 * (1 + 16 * p["rate"] * size) ** RUN * jnp.sqrt(size)


def _drift_corrected(p: Problem, size: Any) -> Any:
    growth = 26 * (1 + p["anchor"])
    return 20 / growth * ((1 + growth * p["rate"] * size) ** RUN - 1) * jnp.sqrt(size)


def pace(rate: Any, anchor: Any, size: Any) -> Any:
    """Computes g. A step takes a distance e of two runs near the ideal one to at most (1 + g) e."""
    # e is the larger operator norm of the differences of the layers. Let b be Gamma^(-1/2) |W_2^T
    # w| for a unit vector w. The pull of the map changes the difference of W_1 at w by at most
    # 2 pull (b - (1 - pull) b^2) e. The residual adds at most 2 eta Gamma e.
    pull = rate * (1 + anchor) * size
    return 2 * rate * size + pull / (2 * (1 - pull))


def _drift_ours(p: Problem, size: Any) -> Any:
    growth = pace(p["rate"], p["anchor"], size)
    return 2 * p["rate"] * size**1.5 * jnp.expm1(RUN * jnp.log1p(growth)) / growth


def _drift_linear(constant: float, p: Problem, size: Any) -> Any:
    """Computes a bound without the growth of earlier contributions."""
    return constant * RUN * p["rate"] * size**1.5


_DRIFT = {"printed": _drift_printed, "corrected": _drift_corrected, "ours": _drift_ours}
_LINEAR = {"corrected": partial(_drift_linear, 20.0), "ours": partial(_drift_linear, 2.0)}


def batches(form: Form) -> Domain:
    """Returns the problems of Lemma A.17.

    Args:
      form: The bound as printed, corrected, or the sharper one.

    Returns:
      The domain.
    """
    bound = _DRIFT[form]
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
        without={"growth": partial(_drift, _LINEAR[form])} if form in _LINEAR else {},
    )


# --- many steps from real starts (A.19, A.20, A.22) -----------------------------------------------

_RUNS = {
    "pre": Box(0.01, 3.0, (2,)),
    "ft": Box(0.01, 3.0, (2,)),
    **dict.fromkeys(("v1", "v2"), Box(-2.0, 2.0, (2, 2))),
    "batches": Box(-1.0, 1.0, (RUN, 2, 2)),
    "rate": Box(1e-3, 0.12, log=True),
    "anchor": Box(0.0, 10.0),
    "share": Box(0.0, 1.0),
}


def _way(p: Problem) -> Layers:
    """Returns the direction of the difference of two starts, of operator norm 1."""
    size = jnp.maximum(top(p["v1"]), top(p["v2"]))
    return Layers(p["v1"] / size, p["v2"] / size)


def _trained(p: Problem, apart: Any, eps: Any) -> Layers:
    """Computes the end of a run near the ideal start, anchored to its own start."""
    start, target, off, _ = _run(p)
    first, second = (start + apart * v for v in _way(p))
    anchored, unit = first @ second, jnp.eye(len(start))

    def step(w: Layers, s: Any) -> tuple[Layers, None]:
        theta = w.w1 @ w.w2
        pull = (theta - target) @ (unit + eps * s) + p["anchor"] * (theta - anchored)
        return Layers(
            w.w1 - 2 * p["rate"] * pull @ w.w2.T, w.w2 - 2 * p["rate"] * w.w1.T @ pull
        ), None

    return jax.lax.scan(step, Layers(first, second), off)[0]


def _trained_again(p: Problem, apart: float, eps: float) -> list[np.ndarray]:
    """Computes the same by stochastic gradient descent with d inputs per batch."""
    start, target, off, _ = _run(p)
    layers = Layers(*(jnp.asarray(start + apart * v) for v in _way(p)))
    values, vectors = np.linalg.eigh(np.eye(len(start)) + eps * np.asarray(off))
    x = sqrt(len(start)) * np.sqrt(values)[:, :, None] * vectors.swapaxes(1, 2)
    end = networks.sgd(layers, target, jnp.asarray(x), float(p["rate"]), anchor=float(p["anchor"]))
    return [np.asarray(w) for w in end]


def _allowed(p: Problem) -> Any:
    size = jnp.maximum(p["pre"].max(), p["ft"].max())
    return 1 - 4 * p["rate"] * (p["anchor"] + 2) * size


def _power(constant: Any, p: Problem) -> Any:
    return (1 + constant * p["rate"] * _run(p)[3]) ** RUN


def _same_eps(p: Problem) -> Any:
    """Returns the deviation of the common batches, a share of the allowed one."""
    return p.get("share", 0.0) / (4 * _power(32, p))


def _start(form: Form, p: Problem, eps: Any, anchors: bool = True) -> Any:
    """Computes a bound of the growth of the distance of two starts."""
    if form == "printed":
        return _power(32, p)
    size, growth, anchored = _run(p)[3], 26 * (1 + eps + p["anchor"]), 16 * p["anchor"]
    if form == "ours":
        growth = pace(p["rate"], p["anchor"], size) / (p["rate"] * size)
        anchored = 4 * p["anchor"]
    h = anchored / growth if anchors else 0.0
    return _power(growth, p) * (1 + h) - h


def _apart(bound: Callable[[Any], Any], p: Problem) -> Any:
    """Divides growth - 1 of a small difference of starts by its bound - 1."""
    eps = _same_eps(p)
    _, way = jax.jvp(lambda apart: _trained(p, apart, eps), (0.0,), (1.0,))
    return (jnp.maximum(top(way.w1), top(way.w2)) - 1) / (bound(p) - 1)


def _apart_again(bound: Callable[[Any], Any], p: Problem) -> float:
    ends = [_trained_again(p, apart, float(_same_eps(p))) for apart in (TINY, -TINY)]
    gaps = [np.linalg.norm(a - b, 2) / (2 * TINY) for a, b in zip(*ends, strict=True)]
    return float((max(gaps) - 1) / (bound(p) - 1))


def starts(form: Form) -> Domain:
    """Returns the problems of Lemma A.19.

    Args:
      form: The bound as printed, corrected, or the sharper one, which is for all data.

    Returns:
      The domain.
    """

    def bound(p: Problem, anchors: bool = True) -> Any:
        return _start(form, p, _same_eps(p), anchors)

    all_data = {name: _RUNS[name] for name in ("pre", "ft", "v1", "v2", "anchor")}
    all_data["rate"] = Box(1e-4, 0.12, log=True)
    eps = "all data" if form == "ours" else "ϵ as allowed"
    return Domain(
        f"d = 2, near ideal starts, {RUN} steps, {eps}, 4η(λ+2)Γ < 1; both sides less 1",
        all_data if form == "ours" else _RUNS,
        partial(_apart, bound),
        partial(_apart_again, bound),
        allowed=_allowed,
        without={} if form == "printed" else {"h": partial(_apart, partial(bound, anchors=False))},
    )


def _terms(form: Form, p: Problem) -> tuple[Any, Any]:
    """Computes the bounds of Lemmas A.19 and A.17, one share for the start, the rest for eps."""
    size, apart, eps = _run(p)[3], p["share"], 1 - p["share"]
    return apart * _start(form, p, 0.0), eps * _DRIFT[form](p, size)


def _real(p: Problem) -> Any:
    """Computes the deviation of a real run from the ideal one, to first order."""
    way = p["share"], 1 - p["share"]
    _, change = jax.jvp(lambda apart, eps: _trained(p, apart, eps), (0.0, 0.0), way)
    return jnp.maximum(top(change.w1), top(change.w2))


def _both(form: Form, p: Problem) -> Any:
    return (_real(p) - p["share"]) / (sum(_terms(form, p)) - p["share"])


def _only(form: Form, which: int, p: Problem) -> Any:
    return _real(p) / _terms(form, p)[which]


def _both_again(form: Form, p: Problem) -> float:
    apart, eps = TINY * float(p["share"]), TINY * (1 - float(p["share"]))
    ends = [_trained_again(p, sign * apart, sign * eps) for sign in (1, -1)]
    gaps = [np.linalg.norm(a - b, 2) / (2 * TINY) for a, b in zip(*ends, strict=True)]
    return float((max(gaps) - p["share"]) / (sum(_terms(form, p)) - p["share"]))


def both(form: Form) -> Domain:
    """Returns the problems of Lemma A.20.

    Args:
      form: The bound as printed, corrected, or the sharper one.

    Returns:
      The domain.
    """
    return Domain(
        f"d = 2, near ideal starts, {RUN} steps, any small ϵ, 4η(λ+2)Γ < 1;"
        " both sides less the distance of the starts",
        _RUNS,
        partial(_both, form),
        partial(_both_again, form),
        allowed=_allowed,
        without={"e^(-Cτ)": partial(_only, form, 1), "ϵ": partial(_only, form, 0)},
    )


def _precision(p: Problem) -> tuple[Any, Any]:
    """Computes min |sigma_pre - sigma_ft|^2 / ((lambda_0 + 1)^2 Gamma), and epsilon below it."""
    near = ((p["pre"] - p["ft"]) ** 2).min() / ((1 + p["anchor"]) ** 2 * _run(p)[3])
    return near, near / (4000 * p["pre"].size * _run(p)[3])


def _product(p: Problem) -> Any:
    """Divides |theta - theta_ideal|_F by its bound. Both are linear in a small epsilon."""
    size, (near, epsilon) = _run(p)[3], _precision(p)
    shrunk = epsilon / _power(32, p)
    way = jnp.sqrt(size) * shrunk, shrunk
    _, change = jax.jvp(lambda apart, eps: jnp.matmul(*_trained(p, apart, eps)), (0.0, 0.0), way)
    return jnp.sqrt(jnp.sum(change**2)) / (near / 1000)


def _product_again(p: Problem) -> float:
    size, (near, epsilon) = _run(p)[3], _precision(p)
    ratio = float(epsilon / _power(32, p)) / TINY
    apart = TINY * float(jnp.sqrt(size))
    ends = [np.matmul(*_trained_again(p, sign * apart, sign * TINY)) for sign in (1, -1)]
    return float(np.linalg.norm(ends[0] - ends[1]) / 2 * ratio / (near / 1000))


def _enough(p: Problem) -> Any:
    """Computes by how much the steps exceed the printed item 3 of Assumption A.21."""
    least = jnp.minimum(p["pre"].min(), p["ft"].min())
    return RUN - jnp.log(100 * _run(p)[3] / _precision(p)[1]) / least


PRODUCT = Domain(
    f"d = 1, λ_0 = λ, {RUN} steps, as many as item 3 asks for; ϵ and the start as far as allowed",
    {
        **dict.fromkeys(("pre", "ft"), Box(1.0, 6.0, (1,))),
        **dict.fromkeys(("v1", "v2"), Box(-2.0, 2.0, (1, 1))),
        "batches": Box(-1.0, 1.0, (RUN, 1, 1)),
        "rate": Box(1e-6, 0.02, log=True),
        "anchor": Box(0.0, 5.0),
    },
    _product,
    _product_again,
    allowed=lambda p: jnp.minimum(_allowed(p), _enough(p)),
)
