"""Theory of structured initialisation in the SAIL paper, in exactly solvable models.

`proximity` computes how close a pre-trained model is to the target. `descent` computes how much of
this advantage remains after gradient descent. `discriminant` relates distances between tasks to
distances between parameters. `transfer` bounds the risk on one task by the risk on another.
`sail_jax.proximal` computes the weights of several pre-trained models.
"""

from sail_jax.lazy import listed
from theory.initialisation.descent import (
    contraction,
    descend,
    excess,
    excess_bound,
    excess_ratio,
)
from theory.initialisation.discriminant import (
    lda_constant,
    lda_distance,
    lda_parameters,
    lda_total_variation,
    symmetric,
)
from theory.initialisation.proximity import (
    distance_cdf,
    mean_distance,
    mean_inverse_distance,
    tail,
    tail_bound,
)
from theory.initialisation.transfer import (
    empirical_risks,
    empirical_total_variation,
    rademacher_bound,
    threshold_complexity,
    threshold_risk,
    transfer_bound,
    worst_gap,
)

__dir__ = listed(__name__)

__all__ = [
    "contraction",
    "descend",
    "distance_cdf",
    "empirical_risks",
    "empirical_total_variation",
    "excess",
    "excess_bound",
    "excess_ratio",
    "lda_constant",
    "lda_distance",
    "lda_parameters",
    "lda_total_variation",
    "mean_distance",
    "mean_inverse_distance",
    "rademacher_bound",
    "symmetric",
    "tail",
    "tail_bound",
    "threshold_complexity",
    "threshold_risk",
    "transfer_bound",
    "worst_gap",
]
