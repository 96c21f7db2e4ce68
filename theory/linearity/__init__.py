"""Cross-task linearity: averaging the weights of models averages their features.

The subject is Zhou et al., Cross-Task Linearity Emerges in the Pretraining-Finetuning Paradigm,
2024 (arXiv 2402.03660). `identities` computes exact gaps, and `trees` extends pairs of models to k
models. `bounds` covers bounds and task arithmetic. `correlation` compares predictors of the gap.
`networks` trains, merges and measures small networks.
"""

from sail_jax.lazy import listed
from theory.linearity.bounds import (
    addition,
    curvature,
    forgetting,
    integral_gap,
    loss_bound,
    main_term,
    negation,
    remainder,
    second_derivative,
    second_order_gap,
    spread,
    superposition,
    supremum_bound,
)
from theory.linearity.correlation import RSquared, direction_cv2, r_squared
from theory.linearity.identities import (
    ambiguity,
    deviations,
    mean,
    product_gap,
    quadratic_gap,
    squared_loss,
)
from theory.linearity.networks import gap
from theory.linearity.trees import Telescope, chain, growth, huffman, telescope

__dir__ = listed(__name__)

__all__ = [
    "RSquared",
    "Telescope",
    "addition",
    "ambiguity",
    "chain",
    "curvature",
    "deviations",
    "direction_cv2",
    "forgetting",
    "gap",
    "growth",
    "huffman",
    "integral_gap",
    "loss_bound",
    "main_term",
    "mean",
    "negation",
    "product_gap",
    "quadratic_gap",
    "r_squared",
    "remainder",
    "second_derivative",
    "second_order_gap",
    "spread",
    "squared_loss",
    "superposition",
    "supremum_bound",
    "telescope",
]
