"""SAIL's theory of structured initialisation, where everything in it can be computed.

How near a pre-trained start is (`proximity`), what of that gradient descent keeps (`descent`), what
tasks say of parameters (`discriminant`), what risks carry over (`transfer`), and the ledger
(`claims`). Weights of models are `sail_jax.proximal`'s.
"""

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
