"""Compares the bounds of a unified theory of model merging with the exact risk of merged experts.

The subject is Li et al., A Unified Generalization Framework for Model Merging, 2026 (arXiv
2601.21690). `tasks`, `quadratic` and `simulation` define a testbed that is solved exactly and
simulated. `bounds` contains the bounds as printed and as corrected. `heterogeneity` covers
sparsification, and `scaling` the dependence on each hyperparameter. `effective_steps` computes the
weights that optimizers give to gradients. `measure` estimates the constants of real training runs.
`averaging` compares the average of one run's checkpoints with learning-rate decay (Tian et al.,
WSM, arXiv 2507.17634). `gaussian` computes the exact excess risk of averages, DARE, trimming and
TIES on Gaussian task vectors, and `gaussian_simulation` merges random ones. `experts` compares
merges of experts that are fitted to data with training on the pooled data, for any curvatures.
"""

from sail_jax.lazy import listed
from theory.merging.averaging import (
    Dense,
    Draws,
    Moments,
    NoisyQuadratic,
    averaged,
    break_even,
    decayed,
    dense,
    dense_break_even,
    dense_window,
    simulate_average,
)
from theory.merging.bounds import (
    Bound,
    Constants,
    chi_square,
    excess_risk_bound,
    local_stability,
    surrogate_gradient,
)
from theory.merging.effective_steps import (
    EffectiveSteps,
    adam_steps,
    effective_steps,
    simulate_movement,
)
from theory.merging.experts import (
    Compared,
    RegressionTasks,
    compared,
    curvature_weights,
    expert_fits,
    merge_excess,
    pooled_excess,
    pooled_least_squares,
    spread_boundary,
)
from theory.merging.experts_simulation import (
    FittedExperts,
    fit_experts,
    least_risk,
    mean_risks,
)
from theory.merging.gaussian import (
    BestMerge,
    GaussianTasks,
    MergeMoments,
    best_merge,
    dense_moments,
    merge_moments,
    trim_threshold,
)
from theory.merging.gaussian_simulation import Drawn, draw_tasks, merge_drawn
from theory.merging.heterogeneity import (
    Effect,
    dare_heterogeneity,
    effect,
    heterogeneity,
    updates,
)
from theory.merging.measure import Measured, measure_constants
from theory.merging.quadratic import Dropped, Quantities, constants, dare, exact
from theory.merging.scaling import Laws, scaling
from theory.merging.simulation import simulate
from theory.merging.tasks import QuadraticTasks, Training

__dir__ = listed(__name__)

__all__ = [
    "BestMerge",
    "Bound",
    "Compared",
    "Constants",
    "Dense",
    "Drawn",
    "Draws",
    "Dropped",
    "Effect",
    "EffectiveSteps",
    "FittedExperts",
    "GaussianTasks",
    "Laws",
    "Measured",
    "MergeMoments",
    "Moments",
    "NoisyQuadratic",
    "QuadraticTasks",
    "Quantities",
    "RegressionTasks",
    "Training",
    "adam_steps",
    "averaged",
    "best_merge",
    "break_even",
    "chi_square",
    "compared",
    "constants",
    "curvature_weights",
    "dare",
    "dare_heterogeneity",
    "decayed",
    "dense",
    "dense_break_even",
    "dense_moments",
    "dense_window",
    "draw_tasks",
    "effect",
    "effective_steps",
    "exact",
    "excess_risk_bound",
    "expert_fits",
    "fit_experts",
    "heterogeneity",
    "least_risk",
    "local_stability",
    "mean_risks",
    "measure_constants",
    "merge_drawn",
    "merge_excess",
    "merge_moments",
    "pooled_excess",
    "pooled_least_squares",
    "scaling",
    "simulate",
    "simulate_average",
    "simulate_movement",
    "spread_boundary",
    "surrogate_gradient",
    "trim_threshold",
    "updates",
]
