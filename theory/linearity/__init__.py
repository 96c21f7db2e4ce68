"""Cross-task linearity (arXiv 2402.03660): when averaging weights averages features.

Exact gaps (`identities`), k models from pairs (`trees`), bounds and task arithmetic (`bounds`), the
comparison of predictors (`correlation`), the real thing (`networks`), and the ledger (`claims`).
"""

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
