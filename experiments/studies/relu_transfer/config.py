"""The config of `relu_transfer`, and its presets."""

from typing import Annotated

from annotated_types import Ge, Interval, Lt, MinLen

from experiments.lab.config import Increasing, Natural, Positive, Seed, config, varied

Neurons = Annotated[int, Ge(2)]


@config
class Sizes:
    """The sizes of the networks."""

    d: Annotated[int, Ge(2)] = 30
    """Input dimension."""
    m: Neurons = 200
    """Neurons of the student."""
    m_star: Neurons = 30
    """Neurons of the target's teacher."""


@config
class GradientDescent:
    """The training of a student: gradient descent on all samples at once."""

    rate: Positive = 1.0
    """Learning rate, in units of the width; training time is rate x steps."""
    steps: Natural = 4000
    """Largest number of steps."""
    tolerance: Positive = 1e-6
    """Loss at which training stops."""


@config
class Config:
    """Target teachers, their sources, and samples of the target.

    A single mu, values that do not increase, or a mu that does not give a whole number of neurons
    raise ValueError.
    """

    sizes: Sizes = Sizes()
    mus: tuple[Annotated[float, Interval(ge=0, lt=1)], ...] = (
        *(0.1, 0.2, 0.3, 0.4, 0.5),
        *(0.6, 0.7, 0.8, 0.9),
    )
    """Fractions of the target's neurons missing in the source: two or more, increasing. Each gives
    a whole number of the sizes.m_star neurons. An empty list only trains from scratch."""
    ns: Annotated[Increasing[Natural], MinLen(3)] = (20, 40, 80, 160, 320, 640, 1280)
    """Numbers of target samples."""
    teachers: Annotated[int, Ge(2)] = 5
    """Independent target teachers, each with its own student."""
    draws: Natural = 4
    """Target data sets for each teacher and n."""
    descent: GradientDescent = GradientDescent()
    cutoff: Annotated[float, Ge(0), Lt(1)] = 1e-3
    """Eigenvalues of a kernel below this fraction of the largest are dropped, in the projection and
    in the fit of the output layer. 1e-3 corresponds to directions that descent on that layer would
    not learn in a time of rate x steps = 4000: about 1 / (0.2 x 4000), where 0.2 is about the
    largest eigenvalue."""
    descend_transfer: bool = False
    """Whether the output layer is also fitted by descent from zero, as students are trained. The
    usual fit solves its equations."""
    chunk: Natural = 5
    """Networks trained between two points at which a run can be resumed; training from scratch uses
    four times as many."""
    side_by_side: Natural = 1
    """Networks trained at once: 1 on a CPU, `chunk` on an accelerator."""
    seed: Seed = 0
    """Seed of teachers, students and samples."""

    def __post_init__(self) -> None:
        if len(self.mus) == 1 or list(self.mus) != sorted(set(self.mus)):
            raise ValueError(f"mus must be none or 2 and more increasing fractions; got {self.mus}")
        for mu in self.mus:
            missing = mu * self.sizes.m_star
            if abs(missing - round(missing)) >= 1e-6 * self.sizes.m_star:
                raise ValueError(
                    f"mus must give whole numbers of the sizes.m_star = {self.sizes.m_star} "
                    f"neurons; got {mu}"
                )


DEFAULT = Config()
# The paper's sizes, which take hours on an accelerator.
FIGURE_4 = varied(
    DEFAULT,
    sizes={"d": 100, "m": 1000, "m_star": 100},
    ns=(100, 140, 200, 280, 400, 560, 800, 1000),
    teachers=10,
    draws=100,
    descent={"rate": 0.01, "steps": 100_000},
    cutoff=5e-3,
    descend_transfer=True,  # as the paper trains; its phase diagram, Fig. 4e, is of this
    chunk=10,
    side_by_side=10,
)
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    "figure_4": FIGURE_4,
    # The scratch law at the paper's sizes and training time, with steps ten times as long.
    "figure_4c": varied(
        FIGURE_4, mus=(), draws=1, descent={"rate": 0.1, "steps": 10_000}, side_by_side=1
    ),
    # Seconds, for tests.
    "tiny": varied(
        DEFAULT,
        sizes={"d": 5, "m": 12, "m_star": 5},
        mus=(0.2, 0.6),
        ns=(10, 20, 40),
        teachers=2,
        draws=2,
        descent={"steps": 200},
    ),
}
