"""Problems on which the steps of Lemma B.1 and the convergence of features-are-fate are attacked.

`domains` makes the networks. A Runge-Kutta scheme solves gradient flow.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from scipy import integrate

from sail_jax import linalg
from theory.adversary import Box, Domain, Problem
from theory.deep_linear.domains import boxes, eigenvalues, layers

# --- Lemma B.1 ------------------------------------------------------------------------------------


def _turn_of(square: Any) -> Any:
    """Computes (cos, sin) of twice the angle of a symmetric 2 x 2 matrix's top eigenvector."""
    way = jnp.stack([square[0, 0] - square[1, 1], 2 * square[0, 1]])
    return way / jnp.sqrt(jnp.sum(way**2) + 1e-30)


def _form(printed: bool, p: Problem) -> Any:
    """Divides v_1.D_1 v_1 by alpha^2 |D̄_1|_op, or by its square, where D_1 = alpha^2 D̄_1."""
    first, last = layers(p)
    square = first.T @ first
    D = square - last @ last.T
    turn = jnp.sum(_turn_of(square) * jnp.stack([D[0, 0] - D[1, 1], 2 * D[0, 1]]))
    form, size = (jnp.trace(D) + turn) / 2, eigenvalues(D)[1]
    return form * p["alpha"] ** 2 / size**2 if printed else form / size


def _form_again(printed: bool, p: Problem) -> float:
    first, last = map(np.asarray, layers(p))
    D, v = first.T @ first - last @ last.T, np.linalg.svd(first)[2][0]
    size = np.linalg.norm(D, 2)
    return float(v @ D @ v / (size**2 / p["alpha"] ** 2 if printed else size))


FORM = Domain(
    "L = 2, 2 x 2 layers, D_1 ≽ α²λ I, α from .05 to 1",
    {**boxes(2), "alpha": Box(0.05, 1.0, log=True)},
    partial(_form, False),
    partial(_form_again, False),
)
FORM_PRINTED = replace(FORM, ratio=partial(_form, True), again=partial(_form_again, True))

Term = Literal["2|D̄|", "|W̄|_F", "|W̄|_op"]


def _starts(p: Problem) -> tuple[list[Any], list[Any]]:
    """Returns a network and initial weights with the same D_l."""
    return layers(p), layers({**p, "last": p["start"]})


def _alignment(left_out: Term | None, p: Problem) -> Any:
    """Divides 1 - (v_1.u_2)^2 by alpha^2 C_1 / s_2^2."""
    (first, second, _), (start, _, last) = _starts(p)
    upper = second @ second.T
    apart = (1 - _turn_of(first.T @ first) @ _turn_of(upper)) / 2
    terms = {
        "2|D̄|": 2 * eigenvalues(first.T @ first - upper)[1],
        "|W̄|_F": jnp.sum(start**2) - jnp.sum(last**2),
        "|W̄|_op": eigenvalues(start.T @ start)[1] - jnp.sum(last**2),
    }
    constant = sum(term for name, term in terms.items() if name != left_out)
    return apart * eigenvalues(upper)[1] / constant


def _alignment_again(p: Problem) -> float:
    network, at_start = ([np.asarray(w) for w in weights] for weights in _starts(p))
    first, second, _ = network
    v, u = np.linalg.svd(first)[2][0], np.linalg.svd(second)[0][:, 0]
    gap = np.linalg.norm(first.T @ first - second @ second.T, 2)
    norms = [np.linalg.norm(at_start[0], kind) ** 2 for kind in ("fro", 2)]
    constant = 2 * gap + sum(norms) - 2 * np.sum(at_start[-1] ** 2)
    return float((1 - (v @ u) ** 2) * np.linalg.norm(second, 2) ** 2 / constant)


TERMS: tuple[Term, ...] = ("2|D̄|", "|W̄|_F", "|W̄|_op")
ALIGNMENT = Domain(
    "L = 3, 2 x 2 layers, D_l ≽ α²λ I, the same at the start",
    {**boxes(3), "start": Box(-1.5, 1.5, (2,))},
    partial(_alignment, None),
    _alignment_again,
    without={term: partial(_alignment, term) for term in TERMS},
)


def _product(p: Problem) -> Any:
    """Divides (|X beta| / |X|_op)^2 by the product of s_l^2, for a network that fits X beta."""
    square, last = p["square"], p["last"]
    fit = p["inputs"] @ (square[0] @ (square[1] @ last))
    size = eigenvalues(p["inputs"].T @ p["inputs"])[1]
    sizes = [eigenvalues(w.T @ w)[1] for w in square]
    return jnp.sum(fit**2) / (size * sizes[0] * sizes[1] * jnp.sum(last**2))


def _product_again(p: Problem) -> float:
    x, (first, second), last = p["inputs"], p["square"], p["last"]
    norms = [np.linalg.norm(w, 2) for w in (x, first, second, last[:, None])]
    return float(np.linalg.norm(x @ first @ second @ last) / np.prod(norms)) ** 2


PRODUCT = Domain(
    "L = 3, any 2 x 2 layers and inputs",
    {
        "inputs": Box(-1.5, 1.5, (2, 2)),
        "square": Box(-1.5, 1.5, (2, 2, 2)),
        "last": Box(-1.5, 1.5, (2,)),
    },
    _product,
    _product_again,
    allowed=lambda p: jnp.sum(p["last"] ** 2) - 0.01,
)

# --- gradient flow --------------------------------------------------------------------------------

STEPS = 24


def _data(p: Problem) -> tuple[Any, Any]:
    """Returns inputs and labels of two examples. For the population loss the inputs are sqrt(2)
    e_i.
    """
    if "inputs" in p:
        return p["inputs"], p["labels"]
    return 2**0.5 * jnp.eye(2), 2**0.5 * p["task"]


def _log_fall(p: Problem) -> Any:
    """Computes log L(0) / L(t) of two layers on the loss |y - X beta|^2 / 2n."""
    (x, y), (first, last) = _data(p), layers(p)

    def left(w: Any) -> Any:
        return x @ (w[0] @ w[1][:, 0]) - y

    def change(w: Any) -> Any:
        slope = (x.T @ left(w) / 2)[:, None]
        return -slope @ w[1].T, -w[0].T @ slope

    def moved(w: Any, by: Any, step: Any) -> Any:
        return jax.tree.map(lambda a, b: a + step * b, w, by)

    def step(w: Any, _: None) -> tuple[Any, None]:
        dt = p["time"] / STEPS
        one = change(w)
        two = change(moved(w, one, dt / 2))
        three = change(moved(w, two, dt / 2))
        four = change(moved(w, three, dt))
        mean = jax.tree.map(lambda a, b, c, d: (a + 2 * b + 2 * c + d) / 6, one, two, three, four)
        return moved(w, mean, dt), None

    end, _ = jax.lax.scan(step, (first, last), None, STEPS)
    return jnp.log(jnp.sum(left((first, last)) ** 2) / jnp.sum(left(end) ** 2))


def _log_fall_again(p: Problem) -> float:
    """Computes the same by an adaptive solver."""
    (x, y), weights = map(np.asarray, _data(p)), [np.asarray(w) for w in layers(p)]
    start = np.concatenate([w.ravel() for w in weights])

    def change(_: float, w: np.ndarray) -> np.ndarray:
        first, last = w[:4].reshape(2, 2), w[4:]
        slope = x.T @ (x @ first @ last - y) / len(y)
        return -np.concatenate([np.outer(slope, last).ravel(), first.T @ slope])

    end = integrate.solve_ivp(
        change, (0, float(p["time"])), start, "DOP853", rtol=1e-11, atol=1e-13
    )
    losses = [np.sum((x @ w[:4].reshape(2, 2) @ w[4:] - y) ** 2) for w in (start, end.y[:, -1])]
    return float(np.log(losses[0] / losses[1]))


def _pace(p: Problem) -> Any:
    """Divides 2 alpha^2 lambda lambda_min(X X^T) t / n by the fall of log L."""
    x, _ = _data(p)
    return p["least"] * eigenvalues(x @ x.T)[0] * p["time"] / _log_fall(p)


def _pace_again(p: Problem) -> float:
    x = np.asarray(_data(p)[0])
    least = np.linalg.svd(x, compute_uv=False)[-1] ** 2
    return float(p["least"] * least * p["time"] / _log_fall_again(p))


def _far_from_fit(p: Problem) -> Any:
    """Excludes losses so near 0 that they are rounding."""
    (x, y), (first, last) = _data(p), layers(p)
    return jnp.sum((x @ (first @ last[:, 0]) - y) ** 2) - 0.01


_TIME = {"time": Box(0.01, 1.0, log=True)}
POPULATION = Domain(
    "L = 2, 2 x 2 layers, D_1 ≽ α²λ I, any source task, t up to 1",
    {**boxes(2), **_TIME, "task": Box(-1.5, 1.5, (2,))},
    _pace,
    _pace_again,
    allowed=_far_from_fit,
)
SAMPLE = Domain(
    "L = 2, 2 x 2 layers, D_1 ≽ α²λ I, two examples, t up to 1",
    {**boxes(2), **_TIME, "inputs": Box(-1.0, 1.0, (2, 2)), "labels": Box(-1.5, 1.5, (2,))},
    _pace,
    _pace_again,
    allowed=lambda p: jnp.minimum(_far_from_fit(p), linalg.det(p["inputs"]) - 0.01),
)
SAMPLE_PRINTED = replace(SAMPLE, ratio=lambda p: 2 * _pace(p), again=lambda p: 2 * _pace_again(p))
