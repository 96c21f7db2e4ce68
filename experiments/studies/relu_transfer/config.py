"""What `relu_transfer` can be told, and its presets."""

from dataclasses import dataclass, replace

from experiments.lab import validate


@dataclass(frozen=True)
class Config:
    """Target teachers, the sources cut from them, and samples of the target."""

    d: int = 30
    """Input dimension."""
    m: int = 200
    """Neurons of the student."""
    m_star: int = 30
    """Neurons of the target teacher."""
    mus: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    """Fractions of the target's neurons that the source lacks; each times m_star is whole. None:
    scratch training alone."""
    ns: tuple[int, ...] = (20, 40, 80, 160, 320, 640, 1280)
    """Target samples."""
    teachers: int = 5
    """Independent teachers (and students)."""
    draws: int = 4
    """Target data sets per teacher and n."""
    rate: float = 1.0
    """Learning rate in units of the width; time is rate x steps."""
    steps: int = 4000
    """Largest number of steps of a descent."""
    tolerance: float = 1e-6
    """Loss at which a descent stops."""
    cutoff: float = 1e-3
    """Eigenvalues of a kernel below this fraction of the largest (about 0.2) are dropped, in the
    projection and in the fit of the output layer: what descent on that layer for the same
    rate x steps would not learn, 1 / (0.2 x 4000) or so."""
    chunk: int = 5
    """Networks between two points at which a run can be resumed."""
    side_by_side: int = 1
    """Networks trained at once: 1 on a CPU, `chunk` on an accelerator."""
    seed: int = 0
    """Seed of teachers, students and samples."""

    def __post_init__(self):
        validate.at_least(self, d=2, m=2, m_star=2, teachers=2, draws=1, steps=1)
        validate.at_least(self, chunk=1, side_by_side=1)
        validate.positive(self, "rate", "tolerance")
        if not 0 <= self.cutoff < 1:
            raise ValueError(f"cutoff must be a fraction in [0, 1); got {self.cutoff}")
        if len(self.ns) < 3 or list(self.ns) != sorted(set(self.ns)) or self.ns[0] < 1:
            raise ValueError(f"ns must be at least 3 increasing sizes >= 1; got {self.ns}")
        if len(self.mus) == 1 or list(self.mus) != sorted(set(self.mus)):
            raise ValueError(f"mus must be none or 2 and more increasing fractions; got {self.mus}")
        for mu in self.mus:
            whole = abs(mu * self.m_star - round(mu * self.m_star)) < 1e-6 * self.m_star
            if not (0 <= mu < 1 and whole):
                raise ValueError(
                    f"mus must be in [0, 1) and give whole numbers of the {self.m_star} neurons "
                    f"(m_star); got {mu}"
                )

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        return cls(
            d=5, m=12, m_star=5, mus=(0.2, 0.6), ns=(10, 20, 40), teachers=2, draws=2, steps=200
        )

    @classmethod
    def figure_4(cls) -> "Config":
        """The paper's sizes: for an accelerator (hours)."""
        return cls(
            d=100,
            m=1000,
            m_star=100,
            ns=(100, 140, 200, 280, 400, 560, 800, 1000),
            teachers=10,
            draws=100,
            rate=0.01,
            steps=100_000,
            cutoff=5e-3,
            chunk=10,
            side_by_side=10,
        )

    @classmethod
    def figure_4c(cls) -> "Config":
        """The scratch law at the paper's sizes and training time, in steps ten times as long."""
        return replace(cls.figure_4(), mus=(), draws=1, rate=0.1, steps=10_000, side_by_side=1)


PRESETS = {
    "default": Config(),
    "figure_4": Config.figure_4(),
    "figure_4c": Config.figure_4c(),
    "tiny": Config.tiny(),
}
