"""Closed forms from theory papers, with simulators of the same quantities.

Every folder covers one paper or topic. Its `claims` modules compare predictions with
simulations, or with averages of an estimator over random data; `sail-jax verify` runs all of these
comparisons.
"""

from typing import TYPE_CHECKING

from sail_jax.lazy import lazily

if TYPE_CHECKING:
    from theory import (
        adversary,
        claims,
        coverage,
        deep_linear,
        fingerprints,
        initialisation,
        linearity,
        merging,
        problems,
        student_teacher,
        sweep,
        two_layer,
    )

__all__ = [
    "adversary",
    "claims",
    "coverage",
    "deep_linear",
    "fingerprints",
    "initialisation",
    "linearity",
    "merging",
    "problems",
    "student_teacher",
    "sweep",
    "two_layer",
]

__getattr__, __dir__ = lazily(__name__, dict.fromkeys(__all__, ""))
