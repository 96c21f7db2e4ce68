"""Transfer learning between two-layer ReLU networks, a student and a teacher.

The subject is Tahir et al., Features are fate, 2024 (arXiv 2410.08194), Section 4. `arc_cosine`
computes the Gaussian integrals, and `networks` defines the networks and their training.
`projection` computes the part of a target that frozen features can express. `transfer` compares
linear transfer with training from scratch.
"""

from sail_jax.lazy import listed
from theory.student_teacher.arc_cosine import coactivation, gram, relu_mean
from theory.student_teacher.networks import (
    Descent,
    Network,
    ablate,
    features,
    inner,
    kernel,
    predict,
    pretrain,
    risk,
    scratch,
    student,
    teacher,
    variance,
)
from theory.student_teacher.projection import Mercer, Projection, mercer, project
from theory.student_teacher.transfer import (
    Interval,
    PowerLaw,
    boundary,
    crossing,
    descended_transfer,
    fit_power_law,
    interval,
    linear_transfer,
)

__dir__ = listed(__name__)

__all__ = [
    "Descent",
    "Interval",
    "Mercer",
    "Network",
    "PowerLaw",
    "Projection",
    "ablate",
    "boundary",
    "coactivation",
    "crossing",
    "descended_transfer",
    "features",
    "fit_power_law",
    "gram",
    "inner",
    "interval",
    "kernel",
    "linear_transfer",
    "mercer",
    "predict",
    "pretrain",
    "project",
    "relu_mean",
    "risk",
    "scratch",
    "student",
    "teacher",
    "variance",
]
