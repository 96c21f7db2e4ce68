"""Two quadratic tasks that attack Lemmas 1 and 3 and Theorem 1 of unified-merging.

Equation (5) is included; it is Lemma 1 with one more term.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from theory.adversary import Domain, Problem
from theory.merging.bounds import Form, local_stability
from theory.merging.followed import Followed
from theory.merging.quadratic import constants, exact
from theory.merging.task_domains import (
    BOXES,
    LONG,
    MANY,
    MINIMISED,
    PACED,
    WORDS,
    Side,
    bound,
    domain,
    minimised,
    paced,
    quantity,
    sizes,
    slow,
)
from theory.merging.tasks import QuadraticTasks


def _local(form: Form) -> Side:
    return lambda tasks: local_stability(constants(tasks), tasks.training, form=form)


# --- stability (Lemma 3, Theorem 1) ---------------------------------------------------------------


def _local_without(term: str, tasks: QuadraticTasks) -> Any:
    """Computes the corrected bound of Lemma 3 without a term."""
    n, k, b = tasks.samples, tasks.steps, tasks.batch
    each = {"(ηK)²/(n(n-1))": k**2 / (n * (n - 1)), "η²K/(bn)": k / (b * n)}
    variance = constants(tasks).variance
    return _local("corrected")(tasks) - 2 * variance * tasks.rate**2 * each[term]


LOCAL_TERMS = ("(ηK)²/(n(n-1))", "η²K/(bn)")
STABILITY = domain(
    PACED,
    BOXES,
    paced,
    quantity("local_stability"),
    _local("corrected"),
    lambda f: f.local / f.local_bound,
    {term: partial(_local_without, term) for term in LOCAL_TERMS},
)
STABILITY_PRINTED = domain(
    WORDS.format(2) + f"1 to {MANY} steps, η ≤ 1/(8KL)",
    LONG,
    slow,
    quantity("local_stability"),
    _local("printed"),
    lambda f: f.local / f.local_printed,
)


def _few(p: Problem) -> Any:
    """Checks K <= (8 - 1/b) (n - 1) for both tasks."""
    n, k, b = sizes(p)
    return jnp.min((8 - 1 / b) * (n - 1) - k)


def _printed_without(name: str, tasks: QuadraticTasks) -> Any:
    """Computes the printed bound of Lemma 3 without the terms of a constant."""
    given = constants(tasks)
    given = given._replace(**{name: 0.0 * getattr(given, name)})
    return local_stability(given, tasks.training, form="printed")


STABILITY_FEW = replace(
    domain(
        WORDS.format(2) + "η ≤ 1/(8KL), K ≤ (8 - 1/b)(n - 1)",
        LONG,
        slow,
        quantity("local_stability"),
        _local("printed"),
        lambda f: f.local / f.local_printed,
        {
            "σ²/n": partial(_printed_without, "variance"),
            "3bζ²/n": partial(_printed_without, "heterogeneity"),
        },
    ),
    allowed=_few,
)
MERGED = domain(
    PACED,
    BOXES,
    paced,
    quantity("stability"),
    bound("stability", "corrected"),
    lambda f: f.stability / f.stability_bound,
    {
        term: lambda tasks, term=term: jnp.mean(tasks.weights**2 * _local_without(term, tasks))
        for term in LOCAL_TERMS
    },
)
MERGED_PRINTED = domain(
    WORDS.format(2) + f"1 to {MANY} steps, η ≤ 1/(8KL)",
    LONG,
    slow,
    quantity("stability"),
    bound("stability", "printed"),
    lambda f: f.stability / float(f.w @ f.local_printed),
)


def _all_samples(tasks: QuadraticTasks) -> QuadraticTasks:
    return replace(tasks, batch=jnp.full(tasks.number, jnp.inf))


SMALL_BATCHES = replace(
    domain(
        PACED + "; all samples in a batch, against smaller batches",
        BOXES,
        paced,
        quantity("stability"),
        lambda tasks: exact(_all_samples(tasks)).stability,
        lambda f: f.stability,
    ),
    again=lambda p: Followed(paced(p)).stability / Followed(_all_samples(paced(p))).stability,
)


# --- Lemma 1 and equation (5) ---------------------------------------------------------------------


def _lemma_1(square: str, of_optimisation: bool, lacking: str, tasks: QuadraticTasks) -> Any:
    """Computes the right side at the best gamma, where its two terms in gamma are equal."""
    found, given = exact(tasks), constants(tasks)
    terms = {
        "L/2 stability": given.smoothness / 2 * found.stability,
        "the gradient": jnp.sqrt(getattr(found, square) * found.stability),
        "C|∇f|²": given.pl * found.gradient if of_optimisation else 0.0,
    }
    return sum(term for name, term in terms.items() if name != lacking)


def lemma_1(square: str, *, of_optimisation: bool = False, minimisers: bool = False) -> Domain:
    """Returns the problems of Lemma 1, or of eq. (5).

    Args:
      square: The squared gradient in the bound, a field of `Quantities`.
      of_optimisation: Whether it is eq. (5), with C|grad f|^2 in the bound.
      minimisers: Whether experts are minimisers of their empirical risks.

    Returns:
      The domain.
    """
    right = partial(_lemma_1, square, of_optimisation)
    terms = ("L/2 stability", "the gradient", "C|∇f|²")[: 2 + of_optimisation]
    field = "excess" if of_optimisation else "generalisation"
    return domain(
        WORDS.format(1) + "experts at empirical minimisers" if minimisers else PACED,
        MINIMISED if minimisers else BOXES,
        minimised if minimisers else paced,
        quantity(field),
        partial(right, ""),
        lambda f: getattr(f, field) / f.lemma_1(getattr(f, square), of_optimisation),
        {term: partial(right, term) for term in terms},
    )
