"""Problems on which the bounds of unified-merging are attacked: two quadratic tasks.

The ratio is that of closed forms; `again` follows the steps of the experts one by one
(`followed`). Sizes are whole numbers, with the slope of real ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from theory.adversary import Box, Domain
from theory.merging.bounds import Form, excess_risk_bound, local_stability, surrogate_gradient
from theory.merging.followed import Followed
from theory.merging.quadratic import constants, exact
from theory.merging.tasks import QuadraticTasks

STEPS, MANY = 200, 700
UNTRAINED = 1e-12  # a rate

Tasks = Callable[[Any], QuadraticTasks]


def _whole(size: Any) -> Any:
    return size + jax.lax.stop_gradient(jnp.floor(size) - size)


def _sizes(p: Any) -> tuple[Any, Any, Any]:
    return _whole(p["samples"]), _whole(p["steps"]), _whole(p["batch"])


def _built(p: Any, curvature: Any, rate: Any, sizes: tuple[Any, Any, Any]) -> QuadraticTasks:
    weights = jnp.stack([p["weight"], 1 - p["weight"]])
    return QuadraticTasks(curvature, p["centres"], p["noise"], *sizes, rate, weights, p["start"])


def _paced(p: Any) -> QuadraticTasks:
    """The rate is a share of 1 / L."""
    return _built(p, p["curvature"], p["pace"] / jnp.max(p["curvature"]), _sizes(p))


def _slow(p: Any) -> QuadraticTasks:
    """The rate is a share of 1 / (8 K L), K the larger number of steps."""
    sizes = _sizes(p)
    rate = p["pace"] / (8 * jnp.max(p["curvature"]) * jnp.max(sizes[1]))
    return _built(p, p["curvature"], rate, sizes)


def _minimised(p: Any) -> QuadraticTasks:
    """Experts at the minimisers of their empirical risks."""
    samples = _whole(p["samples"])
    return _built(p, p["curvature"], 1 / p["curvature"][0], (samples, 1, jnp.inf))


def _tied(p: Any) -> QuadraticTasks:
    """The rate is sqrt(N / mean K), and below 2 / L by a share of it."""
    sizes = _sizes(p)
    rate = jnp.sqrt(2 / jnp.mean(sizes[1]))
    steepest = 2 * (1 - p["below"]) / rate
    return _built(p, p["curvature"] / jnp.max(p["curvature"]) * steepest, rate, sizes)


def _admissible(p: Any) -> QuadraticTasks:
    """The rate is sqrt(N / mean K), and at most 1 / (8 K L) for both K."""
    sizes = _sizes(p)
    rate = jnp.sqrt(2 / jnp.mean(sizes[1]))
    steepest = p["pace"] / (8 * jnp.max(sizes[1]) * rate)
    return _built(p, p["curvature"] / jnp.max(p["curvature"]) * steepest, rate, sizes)


BOXES = {
    "curvature": Box(0.05, 1.0, (2,), log=True),
    "centres": Box(-1.0, 1.0, (2, 2)),
    "start": Box(-3.0, 3.0, (2,)),
    "noise": Box(1e-3, 2.0, log=True),
    "samples": Box(2, 100, (2,), log=True),
    "steps": Box(1, STEPS, (2,), log=True),
    "batch": Box(1, 32, (2,), log=True),
    "pace": Box(1e-3, 1.0, log=True),
    "weight": Box(0.0, 1.0),
}
_ONE = {"curvature": Box(0.1, 1.0, (1,)), "centres": Box(-1.0, 1.0, (2, 1))}
_ONE |= {"start": Box(-3.0, 3.0, (1,))}
_MINIMISED = {n: BOXES[n] for n in ("noise", "samples", "weight")} | _ONE
_LONG = {**BOXES, "steps": Box(1, MANY, (2,), log=True), "pace": Box(1e-4, 1.0, log=True)}
_TIED = {
    **BOXES,
    "below": Box(1e-5, 1.0 - 1e-3, log=True),
    "centres": Box(-0.01, 0.01, (2, 2)),
    "noise": Box(1e-4, 1.0, log=True),
}
_WORDS = "two quadratic tasks of one curvature in {} dimensions, 2 to 100 samples, "
_PACED = _WORDS.format(2) + f"1 to {STEPS} steps, η ≤ 1/L"
_ROOT = _WORDS.format(2) + f"1 to {STEPS} steps, η = √(N/K̄) "


Side = Callable[[QuadraticTasks], Any]


def _ratio(tasks: Tasks, left: Side, right: Side, p: Any) -> Any:
    built = tasks(p)
    return jnp.max(left(built) / right(built))


def _domain(
    words: str,
    boxes: Mapping[str, Box],
    tasks: Tasks,
    left: Side,
    right: Side,
    again: Callable[[Followed], Any],
    without: Mapping[str, Side] | None = None,
    allowed: Callable[[Any], Any] | None = None,
) -> Domain:
    """Compares two sides; `without` has the right side without each of its terms."""
    return Domain(
        words,
        boxes,
        partial(_ratio, tasks, left, right),
        lambda p: float(np.max(again(Followed(tasks(p))))),
        allowed,
        without={
            name: partial(_ratio, tasks, left, rest) for name, rest in (without or {}).items()
        },
    )


def _quantity(name: str) -> Side:
    return lambda tasks: getattr(exact(tasks), name)


def _bound(name: str, form: Form, **options: Any) -> Side:
    return lambda tasks: getattr(
        excess_risk_bound(constants(tasks), tasks.training, form=form, **options), name
    )


def _local(form: Form) -> Side:
    return lambda tasks: local_stability(constants(tasks), tasks.training, form=form)


# --- stability (Lemma 3, Theorem 1) ---------------------------------------------------------------


def _local_without(term: str, tasks: QuadraticTasks) -> Any:
    """The corrected bound of Lemma 3 without a term."""
    n, k, b = tasks.samples, tasks.steps, tasks.batch
    each = {"(ηK)²/(n(n-1))": k**2 / (n * (n - 1)), "η²K/(bn)": k / (b * n)}
    variance = constants(tasks).variance
    return _local("corrected")(tasks) - 2 * variance * tasks.rate**2 * each[term]


LOCAL_TERMS = ("(ηK)²/(n(n-1))", "η²K/(bn)")
STABILITY = _domain(
    _PACED,
    BOXES,
    _paced,
    _quantity("local_stability"),
    _local("corrected"),
    lambda f: f.local / f.local_bound,
    {term: partial(_local_without, term) for term in LOCAL_TERMS},
)
STABILITY_PRINTED = _domain(
    _WORDS.format(2) + f"1 to {MANY} steps, η ≤ 1/(8KL)",
    _LONG,
    _slow,
    _quantity("local_stability"),
    _local("printed"),
    lambda f: f.local / f.local_printed,
)


def _few(p: Any) -> Any:
    """Whether K <= (8 - 1/b) (n - 1) for both tasks."""
    n, k, b = _sizes(p)
    return jnp.min((8 - 1 / b) * (n - 1) - k)


STABILITY_FEW = replace(
    STABILITY_PRINTED,
    problems=_WORDS.format(2) + "η ≤ 1/(8KL), K ≤ (8 - 1/b)(n - 1)",
    allowed=_few,
)
MERGED = _domain(
    _PACED,
    BOXES,
    _paced,
    _quantity("stability"),
    _bound("stability", "corrected"),
    lambda f: f.stability / f.stability_bound,
    {
        term: lambda tasks, term=term: jnp.mean(tasks.weights**2 * _local_without(term, tasks))
        for term in LOCAL_TERMS
    },
)
MERGED_PRINTED = _domain(
    _WORDS.format(2) + f"1 to {MANY} steps, η ≤ 1/(8KL)",
    _LONG,
    _slow,
    _quantity("stability"),
    _bound("stability", "printed"),
    lambda f: f.stability / float(f.w @ f.local_printed),
)


def _all_samples(tasks: QuadraticTasks) -> QuadraticTasks:
    return replace(tasks, batch=jnp.full(tasks.number, jnp.inf))


SMALL_BATCHES = replace(
    _domain(
        _PACED + "; all samples in a batch, against smaller batches",
        BOXES,
        _paced,
        _quantity("stability"),
        lambda tasks: exact(_all_samples(tasks)).stability,
        lambda f: f.stability,
    ),
    again=lambda p: Followed(_paced(p)).stability / Followed(_all_samples(_paced(p))).stability,
)


# --- Lemma 1 and equation (5) ---------------------------------------------------------------------


def _lemma_1(square: str, of_optimisation: bool, lacking: str, tasks: QuadraticTasks) -> Any:
    """The right side at the best gamma, at which its two terms in gamma are equal."""
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
      square: Which squared gradient the bound has: a field of `Quantities`.
      of_optimisation: Whether it is eq. (5), with C|grad f|^2 in the bound.
      minimisers: Whether experts are minimisers of their empirical risks.

    Returns:
      The domain.
    """
    right = partial(_lemma_1, square, of_optimisation)
    terms = ("L/2 stability", "the gradient", "C|∇f|²")[: 2 + of_optimisation]
    field = "excess" if of_optimisation else "generalisation"
    return _domain(
        _WORDS.format(1) + "experts at empirical minimisers" if minimisers else _PACED,
        _MINIMISED if minimisers else BOXES,
        _minimised if minimisers else _paced,
        _quantity(field),
        partial(right, ""),
        lambda f: getattr(f, field) / f.lemma_1(getattr(f, square), of_optimisation),
        {term: partial(right, term) for term in terms},
    )


# --- the gradient of the surrogate (Theorems 2 and 4, Corollary 2) --------------------------------


def _surrogate_without(name: str, tasks: QuadraticTasks) -> Any:
    given = constants(tasks)
    given = given._replace(**{name: 0.0 * getattr(given, name)})
    return surrogate_gradient(given, tasks.training, form="corrected")


SURROGATE = _domain(
    _PACED,
    BOXES,
    _paced,
    _quantity("surrogate_gradient"),
    _bound("surrogate", "corrected"),
    lambda f: f.surrogate / f.surrogate_bound,
    {
        "2L gap": partial(_surrogate_without, "gap"),
        "Σλζ²": partial(_surrogate_without, "heterogeneity"),
        "ηLΣλ²σ²/b": partial(_surrogate_without, "variance"),
    },
)


def surrogate_printed(coefficient: float, *, admissible: bool) -> Domain:
    """Returns the problems of the printed bound.

    Args:
      coefficient: Of its last term.
      admissible: Whether the rate is at most 1 / (8 K L), too.

    Returns:
      The domain.
    """
    return _domain(
        _ROOT + ("≤ 1/(8KL)" if admissible else "< 2/L, centres within .01"),
        BOXES if admissible else _TIED,
        _admissible if admissible else _tied,
        _quantity("surrogate_gradient"),
        _bound("surrogate", "printed", coefficient=coefficient),
        lambda f: f.surrogate / f.surrogate_printed(coefficient),
    )


def _at_start(tasks: QuadraticTasks) -> Any:
    """16 |grad f~|^2 of a model that is all but untrained."""
    return 16 * exact(replace(tasks, rate=jnp.asarray(UNTRAINED))).surrogate_gradient


VACUOUS_SURROGATE = _domain(
    _ROOT + "≤ 1/(8KL)",
    BOXES,
    _admissible,
    _at_start,
    _bound("surrogate", "printed"),
    lambda f: 16 * f.start_gradient / f.surrogate_printed(5.0),
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
EXCESS = _domain(
    _PACED,
    BOXES,
    _paced,
    _quantity("excess"),
    _bound("least", "corrected"),
    lambda f: f.excess / f.excess_bound,
    {term: partial(_excess_without, term) for term in EXCESS_TERMS},
)


def excess_printed(*, admissible: bool) -> Domain:
    """Returns the problems of Theorem 3 as printed.

    Args:
      admissible: Whether the rate is at most 1 / (8 K L), too.

    Returns:
      The domain.
    """
    return _domain(
        _ROOT + ("≤ 1/(8KL)" if admissible else "< 2/L, centres within .01"),
        BOXES if admissible else _TIED,
        _admissible if admissible else _tied,
        _quantity("excess"),
        _bound("excess", "printed"),
        lambda f: f.excess / f.excess_printed,
    )


VACUOUS_EXCESS = _domain(
    _ROOT + "≤ 1/(8KL)",
    BOXES,
    _admissible,
    lambda tasks: 32 * exact(tasks).gap,
    _bound("excess", "printed"),
    lambda f: 32 * f.gap / f.excess_printed,
)
