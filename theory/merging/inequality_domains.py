"""Problems that attack the inequalities of unified-merging on gradients, sizes and constants.

They do not require experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from theory.adversary import Box, Domain, Problem
from theory.merging.bounds import Constants, excess_risk_bound, surrogate_gradient
from theory.merging.followed import epsilon_sgd
from theory.merging.heterogeneity import heterogeneity
from theory.merging.tasks import Training

# --- gradients of several tasks (eq. 7, Lemma 4) --------------------------------------------------

Sides = Callable[[Any], tuple[Any, dict[str, Any]]]


def _squares(p: Problem) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Computes |grad f|^2, |grad f~|^2, sum w |grad f_i|^2, sum w zeta^2, and both chi-squares."""
    g, w = p["gradients"], p["weights"] / p["weights"].sum()
    plain, weighted = g.mean(0), w @ g
    zeta2, away = w @ ((g - plain) ** 2).sum(1), (1 / w.size - w) ** 2
    each = w @ (g**2).sum(1)
    return (
        (plain**2).sum(), (weighted**2).sum(), each, zeta2, (away / w**2).sum(), (away / w).sum()
    )  # fmt: skip


def _squares_again(p: Problem) -> tuple[float, float, float, float, float, float]:
    """Computes the same by central differences of losses, with chi-squares as mean squares."""
    g, w = np.asarray(p["gradients"]), np.asarray(p["weights"]) / np.sum(p["weights"])
    curvatures = 1.0 + np.arange(len(g))

    def loss(i: int, x: np.ndarray) -> float:
        return float(g[i] @ x + curvatures[i] * (x @ x) / 2)

    def square(coefficients: Any) -> float:
        """Computes |grad sum_i a_i f_i|^2 at 0."""
        axes = np.eye(g.shape[1])
        mixed = [
            sum(a * loss(i, s * e) for i, a in enumerate(coefficients))
            for e in axes
            for s in (0.5, -0.5)
        ]
        return float(
            sum((up - down) ** 2 for up, down in zip(mixed[::2], mixed[1::2], strict=True))
        )

    units, even = np.eye(len(w)), np.full(len(w), 1 / len(w))
    each = sum(a * square(e) for a, e in zip(w, units, strict=True))
    zeta2 = sum(a * square(e - even) for a, e in zip(w, units, strict=True))
    printed = sum((1 - p / a) ** 2 for a, p in zip(w, even, strict=True))
    divergence = sum(p**2 / a for a, p in zip(w, even, strict=True)) - 1
    return square(even), square(w), each, zeta2, printed, divergence


Six = tuple[Any, Any, Any, Any, Any, Any]


def _lemma_4(squares: Six) -> tuple[Any, dict[str, Any]]:
    _, weighted, each, zeta2, _, _ = squares
    return each, {"|∇f̃|²": weighted, "Σλζ²": zeta2}


def _eq_7(squares: Six) -> tuple[Any, dict[str, Any]]:
    plain, weighted, _, zeta2, chi, _ = squares
    return plain, {
        "2|∇f̃|²": 2 * weighted,
        "2χ²|∇f̃|²": 2 * chi * weighted,
        "2χ²Σλζ²": 2 * chi * zeta2,
    }


def _eq_7_tight(squares: Six) -> tuple[Any, dict[str, Any]]:
    plain, weighted, _, zeta2, _, chi2 = squares
    return plain, {"2|∇f̃|²": 2 * weighted, "2χ²Σλζ²": 2 * chi2 * zeta2}


def _of(sides: Callable[[Six], tuple[Any, dict[str, Any]]], lacking: str, p: Problem) -> Any:
    left, terms = sides(_squares(p))
    return left / sum(term for name, term in terms.items() if name != lacking)


def _of_again(sides: Callable[[Six], tuple[Any, dict[str, Any]]], p: Problem) -> float:
    left, terms = sides(_squares_again(p))
    return float(left / sum(terms.values()))


def _gradients(sides: Callable[[Six], tuple[Any, dict[str, Any]]], *terms: str) -> Domain:
    return Domain(
        "4 gradients in 3 dimensions, weights down to .01 of one another",
        {"gradients": Box(-1.0, 1.0, (4, 3)), "weights": Box(0.01, 1.0, (4,), log=True)},
        partial(_of, sides, ""),
        partial(_of_again, sides),
        without={term: partial(_of, sides, term) for term in terms},
    )


LEMMA_4 = _gradients(_lemma_4, "|∇f̃|²", "Σλζ²")
EQ_7 = _gradients(_eq_7, "2|∇f̃|²", "2χ²|∇f̃|²", "2χ²Σλζ²")
EQ_7_TIGHT = _gradients(_eq_7_tight, "2|∇f̃|²", "2χ²Σλζ²")


# --- Bernoulli's inequality (proof of Lemma 3) ----------------------------------------------------

_GROWTH = 2 * (np.exp(0.5) - 1)


def _grown(constant: float, p: Problem) -> Any:
    steps = jnp.floor(p["steps"])
    return jnp.expm1(steps * jnp.log1p(p["product"] / steps)) / (constant * p["product"])


def _grown_again(constant: float, p: Problem) -> float:
    """Computes the same step by step."""
    grown, steps = 0.0, int(p["steps"])
    for _ in range(steps):
        grown += (1 + grown) * float(p["product"]) / steps
    return grown / (constant * float(p["product"]))


def bernoulli(corrected: bool) -> Domain:
    """Returns the problems of the step of the proof that bounds (1 + 4 eta L)^K.

    Args:
      corrected: Whether the bound is the corrected one.

    Returns:
      The domain.
    """
    constant = _GROWTH if corrected else 1.0
    return Domain(
        "1 to 10,000 steps, 4ηLK ≤ 1/2",
        {"steps": Box(1, 1e4, log=True), "product": Box(1e-3, 0.5)},
        partial(_grown, constant),
        partial(_grown_again, constant),
    )


# --- which task is perturbed (eq. 13) -------------------------------------------------------------


def _mixture_terms(p: Problem) -> tuple[Any, dict[str, Any]]:
    """Computes the mixture over the perturbed task, and the bound."""
    n, weights = jnp.floor(p["samples"]), jnp.stack([p["weight"], 1 - p["weight"]])
    scale, seen = weights * p["steps"], n / n.sum()
    with_it = (p["variance"] + 3 * p["batch"] * p["zeta2"]) / n
    mixed = seen * with_it + (1 - seen) * p["variance"] / n
    first, second = p["variance"] / n, 3 * p["batch"] * p["zeta2"] / n
    return (scale * mixed).sum(), {"σ²/n": (scale * first).sum(), "3bζ²/n": (scale * second).sum()}


def _mixture(lacking: str, p: Problem) -> Any:
    left, terms = _mixture_terms(p)
    return left / sum(term for name, term in terms.items() if name != lacking)


def _mixture_again(p: Problem) -> float:
    """Computes the same sample by sample. Each sample is replaced with equal probability."""
    n, total, bound = np.floor(p["samples"]), 0.0, 0.0
    for i, weight in enumerate((float(p["weight"]), 1 - float(p["weight"]))):
        noise = float(p["variance"][i]) / n[i]
        more = 3 * float(p["batch"][i]) * float(p["zeta2"][i]) / n[i]
        scale = weight * float(p["steps"][i])
        added = [noise + (more if j == i else 0.0) for j in range(2) for _ in range(int(n[j]))]
        total += scale * np.mean(added)
        bound += scale * (noise + more)
    return float(total / bound)


_TWO = (2,)
MIXTURE = Domain(
    "two tasks of 2 to 100 samples",
    {
        "samples": Box(2, 100, _TWO, log=True),
        "steps": Box(1, 100, _TWO, log=True),
        "batch": Box(1, 32, _TWO, log=True),
        "variance": Box(1e-2, 10.0, _TWO, log=True),
        "zeta2": Box(1e-2, 10.0, _TWO, log=True),
        "weight": Box(0.0, 1.0),
    },
    partial(_mixture, ""),
    _mixture_again,
    without={term: partial(_mixture, term) for term in ("σ²/n", "3bζ²/n")},
)


# --- eq. (24) -------------------------------------------------------------------------------------

_GAMMAS = np.logspace(-8, 8, 1601)  # with 1


def _given(p: Problem) -> tuple[Constants, Training]:
    weights = jnp.stack([p["weight"], 1 - p["weight"]])
    variance, zeta2 = p["variance"], p["zeta2"]
    constants = Constants(p["smoothness"], p["share"] / p["smoothness"], variance, zeta2, p["gap"])
    return constants, Training(p["samples"], p["steps"], p["batch"], p["rate"], weights)


def _relaxed(lacking: str, p: Problem) -> Any:
    """Divides the smallest value of eq. (23) over many gammas by its relaxation."""
    given = _given(p)
    found = excess_risk_bound(*given)
    S, (smoothness, pl) = found.stability / 16, given[0][:2]
    gammas = jnp.asarray(_GAMMAS)
    values = 8 * (smoothness + gammas) * S + (1 / gammas + 2 * pl) * found.gradient / 2
    terms = {"8(L+1)η²S": 8 * (smoothness + 1) * S, "(2C+1)B": (2 * pl + 1) * found.gradient / 2}
    return values.min() / sum(term for name, term in terms.items() if name != lacking)


def _relaxed_again(p: Problem) -> float:
    """Computes the same at the gamma with two equal terms, in NumPy."""
    N, w = 2, np.array([float(p["weight"]), 1 - float(p["weight"])])
    n, k, b, s2, z2 = (
        np.asarray(p[name]) for name in ("samples", "steps", "batch", "variance", "zeta2")
    )
    L, gap, rate = (float(p[name]) for name in ("smoothness", "gap", "rate"))
    C, noise = float(p["share"]) / L, s2.max() / b.min()
    epsilon = epsilon_sgd(L, gap, noise, z2.max(), k, w)
    chi = np.sum((1 / N - w) ** 2 / w**2)
    B, S = chi * (w @ z2) + (chi + 1) * epsilon, rate**2 * np.sum(w * k * (s2 + 3 * b * z2) / n)
    least = 8 * L * S + 2 * C * B + 2 * np.sqrt(8 * S * B)
    return float(least / (8 * (L + 1) * S + (2 * C + 1) * B))


RELAXED = Domain(
    "two tasks, any constants with C ≥ 1/2L; the least over γ of 1,601 from 1e-8 to 1e8",
    {
        **{name: box for name, box in MIXTURE.boxes.items() if name != "weight"},
        "weight": Box(0.02, 0.98),
        "smoothness": Box(0.1, 10.0, log=True),
        "share": Box(0.5, 50.0, log=True),
        "gap": Box(1e-2, 10.0, log=True),
        "rate": Box(1e-3, 1.0, log=True),
    },
    partial(_relaxed, ""),
    _relaxed_again,
    without={term: partial(_relaxed, term) for term in ("8(L+1)η²S", "(2C+1)B")},
)


# --- laws in K and N (Section V-B) ----------------------------------------------------------------

_ONES = {name: Box(1e-2, 10.0, log=True) for name in ("variance", "zeta2", "gap", "smoothness")}
_TASKS = 8


def _epsilon(p: Problem, steps: Any) -> Any:
    given = Constants(p["smoothness"], 1.0 / p["smoothness"], p["variance"], p["zeta2"], p["gap"])
    even = jnp.full(_TASKS, 1 / _TASKS)
    samples, k, batch = (jnp.full(_TASKS, size) for size in (100.0, steps, p["batch"]))
    training = Training(samples, k, batch, jnp.sqrt(_TASKS / steps), even)
    return surrogate_gradient(given, training, coefficient=12.0)


def _more_steps(p: Problem) -> Any:
    few = jnp.floor(p["steps"])
    return _epsilon(p, jnp.floor(few * p["more"])) / _epsilon(p, few)


def _more_steps_again(p: Problem) -> float:
    few, w, found = np.floor(p["steps"]), np.full(_TASKS, 1 / _TASKS), []
    for steps in (np.floor(few * p["more"]), few):
        noise, k = p["variance"] / p["batch"], np.full(_TASKS, steps)
        found.append(epsilon_sgd(p["smoothness"], p["gap"], noise, p["zeta2"], k, w, 12.0))
    return float(found[0] / found[1])


MORE_STEPS = Domain(
    f"{_TASKS} tasks of equal sizes, any constants, 2 to 20 times as many steps",
    {
        **_ONES,
        "steps": Box(1, 100, log=True),
        "more": Box(2.0, 20.0, log=True),
        "batch": Box(1, 32, log=True),
    },
    _more_steps,
    _more_steps_again,
)


def _fewer_tasks(p: Problem) -> Any:
    c = p["centres"][:, None]
    few, many = (heterogeneity(c[:n], jnp.full(n, 1 / n)) for n in (_TASKS // 4, _TASKS))
    return 4 * few / many


def _fewer_tasks_again(p: Problem) -> float:
    """Computes the same by pairs of tasks."""
    few, many = (
        np.mean([(a - b) ** 2 for a in p["centres"][:n] for b in p["centres"][:n]]) / 2
        for n in (_TASKS // 4, _TASKS)
    )
    return float(4 * few / many)


MORE_TASKS = Domain(
    f"centres of {_TASKS} tasks, and of the first quarter of them",
    {"centres": Box(-1.0, 1.0, (_TASKS,))},
    _fewer_tasks,
    _fewer_tasks_again,
)
