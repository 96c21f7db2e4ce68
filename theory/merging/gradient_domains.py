"""Two quadratic tasks that attack Theorems 2 to 4 and Corollary 2 of unified-merging."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from theory.adversary import Box, Domain
from theory.merging.bounds import chi_square, excess_risk_bound, surrogate_gradient
from theory.merging.followed import Followed
from theory.merging.quadratic import constants, exact
from theory.merging.task_domains import (
    BOXES,
    PACED,
    ROOT,
    TIED,
    Side,
    admissible,
    bound,
    domain,
    paced,
    quantity,
    tied,
)
from theory.merging.tasks import QuadraticTasks

UNTRAINED = 1e-12  # a rate


# --- the gradient of the surrogate (Theorems 2 and 4, Corollary 2) --------------------------------


def _surrogate_without(name: str, tasks: QuadraticTasks, **options: Any) -> Any:
    """Computes the bound without the terms of a constant."""
    given = constants(tasks)
    given = given._replace(**{name: 0.0 * getattr(given, name)})
    return surrogate_gradient(given, tasks.training, **options)


def _surrogate_terms(**options: Any) -> dict[str, Side]:
    named = {"gap": "gap", "σ²": "variance", "ζ²": "heterogeneity"}
    return {
        term: partial(_surrogate_without, constant, **options) for term, constant in named.items()
    }


SURROGATE = domain(
    PACED,
    BOXES,
    paced,
    quantity("surrogate_gradient"),
    bound("surrogate", "corrected"),
    lambda f: f.surrogate / f.surrogate_bound,
    _surrogate_terms(form="corrected"),
)


def _rooted(
    restricted: bool,
) -> tuple[str, Mapping[str, Box], Callable[[Any], QuadraticTasks]]:
    """Returns problems at the rate sqrt(N / mean K), with a description, boxes and a builder of
    tasks.
    """
    if restricted:
        return ROOT + "≤ 1/(8KL)", BOXES, admissible
    return ROOT + "< 2/L, centres within .01", TIED, tied


def surrogate_printed(coefficient: float, *, restricted: bool) -> Domain:
    """Returns the problems of the printed bound.

    Args:
      coefficient: The coefficient of its last term.
      restricted: Whether the rate is also at most 1 / (8 K L).

    Returns:
      The domain.
    """
    return domain(
        *_rooted(restricted),
        quantity("surrogate_gradient"),
        bound("surrogate", "printed", coefficient=coefficient),
        lambda f: f.surrogate / f.surrogate_printed(coefficient),
        _surrogate_terms(coefficient=coefficient) if restricted else None,
    )


def few_steps(tasks: QuadraticTasks) -> Any:
    """Computes a bound on E|grad f~|^2 that is sharp for few or small steps, at rates <= 1 / L.

    Expert i keeps a share (1 - rate h)^K_i of the gradient of f_i at the start. The shares have the
    weighted standard deviation rate L (max K - min K) / 2 at most. So the gradient of f~ is the
    mean share of its start, and a rest that Cauchy and Schwarz bound by heterogeneity.

    Args:
      tasks: The testbed.

    Returns:
      The bound, a scalar.
    """
    given, w, k = constants(tasks), tasks.weights, tasks.steps
    pace = tasks.rate * given.smoothness
    start = jnp.sqrt(2 * given.smoothness * given.gap)
    apart = pace * (k.max() - k.min()) / 2 * jnp.sqrt(w @ given.heterogeneity)
    return (start + apart) ** 2 + pace**2 * jnp.sum(w**2 * k * given.variance / tasks.batch)


def _few_steps_again(f: Followed) -> float:
    """Computes the same from the moments of followed experts."""
    pace, spread = f.rate * f.smoothness, np.ptp(f.k) / 2
    start = np.sqrt(2 * f.smoothness * f.gap)
    noise = pace**2 * float(np.sum(f.w**2 * f.k * f.variance / f.b))
    return float((start + pace * spread * np.sqrt(f.weighted_zeta2)) ** 2 + noise)


def few_steps_excess(tasks: QuadraticTasks) -> Any:
    """Computes the bound on the excess risk that follows from `few_steps`.

    It is eq. (5) with |grad f| <= |grad f~| + sqrt(chi sum_i w_i zeta_i^2), not with twice the
    squares, and with the corrected stability.

    Args:
      tasks: The testbed.

    Returns:
      The bound, a scalar.
    """
    given, w = constants(tasks), tasks.weights
    rest = jnp.sqrt(chi_square(w) * (w @ given.heterogeneity))
    gradient = (jnp.sqrt(few_steps(tasks)) + rest) ** 2
    sample = gradient + jnp.mean(given.heterogeneity + given.variance)
    S = bound("stability", "corrected")(tasks)
    return given.smoothness / 2 * S + jnp.sqrt(S * sample) + given.pl * gradient


def _few_steps_excess_again(f: Followed) -> float:
    """Computes the same from the moments of followed experts."""
    rest = np.sqrt((np.sum(f.even**2 / f.w) - 1) * f.weighted_zeta2)
    gradient, S = (np.sqrt(_few_steps_again(f)) + rest) ** 2, f.stability_bound
    sample = gradient + np.mean(f.zeta2 + f.variance)
    return float(f.smoothness / 2 * S + np.sqrt(S * sample) + f.pl * gradient)


_FEW = (ROOT + "≤ 1/(8KL)", BOXES, admissible)
FEW_STEPS = domain(
    *_FEW,
    quantity("surrogate_gradient"),
    few_steps,
    lambda f: f.surrogate / _few_steps_again(f),
)
FEW_STEPS_EXCESS = domain(
    *_FEW,
    quantity("excess"),
    few_steps_excess,
    lambda f: f.excess / _few_steps_excess_again(f),
)


def _at_start(tasks: QuadraticTasks) -> Any:
    """Computes 16 |grad f~|^2 of an almost untrained model."""
    return 16 * exact(replace(tasks, rate=jnp.asarray(UNTRAINED))).surrogate_gradient


VACUOUS_SURROGATE = domain(
    ROOT + "≤ 1/(8KL)",
    BOXES,
    admissible,
    _at_start,
    bound("surrogate", "printed"),
    lambda f: 16 * f.start_gradient / f.surrogate_printed(5.0),
    _surrogate_terms(),
)

# --- the excess risk (Theorem 3) ------------------------------------------------------------------


def _excess_without(term: str, tasks: QuadraticTasks) -> Any:
    found = excess_risk_bound(constants(tasks), tasks.training, form="corrected")
    terms = {
        "(L/2)S": constants(tasks).smoothness / 2 * found.stability,
        "√(S(B + mean(ζ²+σ²)))": jnp.sqrt(found.stability * found.sample_gradient),
        "CB": constants(tasks).pl * found.gradient,
    }
    return found.least - terms[term]


EXCESS_TERMS = ("(L/2)S", "√(S(B + mean(ζ²+σ²)))", "CB")
EXCESS = domain(
    PACED,
    BOXES,
    paced,
    quantity("excess"),
    bound("least", "corrected"),
    lambda f: f.excess / f.excess_bound,
    {term: partial(_excess_without, term) for term in EXCESS_TERMS},
)


def _excess_printed_without(term: str, tasks: QuadraticTasks) -> Any:
    given = constants(tasks)
    found = excess_risk_bound(given, tasks.training)
    # The printed B is half of the bound of |grad f|^2.
    terms = {
        "8(L+1)η²S": (given.smoothness + 1) / 2 * found.stability,
        "(2C+1)B": (given.pl + 0.5) * found.gradient,
    }
    return found.excess - terms[term]


_EXCESS_PRINTED = {
    term: partial(_excess_printed_without, term) for term in ("8(L+1)η²S", "(2C+1)B")
}


def excess_printed(*, restricted: bool) -> Domain:
    """Returns the problems of Theorem 3 as printed.

    Args:
      restricted: Whether the rate is also at most 1 / (8 K L).

    Returns:
      The domain.
    """
    return domain(
        *_rooted(restricted),
        quantity("excess"),
        bound("excess", "printed"),
        lambda f: f.excess / f.excess_printed,
        _EXCESS_PRINTED if restricted else None,
    )


VACUOUS_EXCESS = domain(
    ROOT + "≤ 1/(8KL)",
    BOXES,
    admissible,
    lambda tasks: 32 * exact(tasks).gap,
    bound("excess", "printed"),
    lambda f: 32 * f.gap / f.excess_printed,
    _EXCESS_PRINTED,
)
