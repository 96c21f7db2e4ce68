"""The config of `merge_choice`, and its presets."""

from typing import Annotated

from annotated_types import Ge, Interval, Le

from experiments.lab.config import Increasing, Natural, NotNegative, Positive, Seed, config, varied

Share = Annotated[float, Interval(gt=0, lt=1)]
Density = Annotated[float, Interval(gt=0, le=1)]


@config
class Published:
    """Settings of papers and programs."""

    arithmetic: Positive = 0.3
    """Scale of task arithmetic, which multiplies the sum of task vectors."""
    dare: Density = 0.5
    """Share of entries that DARE keeps; the scale of the mean is 1."""
    trim: Density = 0.2
    """Share of entries that trimming keeps; the scale of the mean is 1."""
    ties: Density = 0.2
    """Share of entries that TIES keeps; the scale is 1."""


@config
class Config:
    """The beds, tasks, heterogeneities and noises over which merges are compared."""

    tasks: Increasing[Annotated[int, Ge(1), Le(64)]] = (2, 8)
    """Numbers of tasks T."""
    support: Share = 0.1
    """Share of entries that a task uses, on the two sparse beds."""
    shares: Increasing[Share] = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
    """Heterogeneity: a task's own share of the variance of its optimum."""
    noises: Increasing[Positive] = (0.03, 0.055, 0.1, 0.18, 0.32, 0.56, 1.0, 1.8, 3.2)
    """Noise of experts, in standard deviations of the optimum."""
    measured_shares: Natural = 3
    """Simulate every how many-th share, from the first."""
    measured_noises: Natural = 2
    """Simulate every how many-th noise, from the first."""
    parts: Annotated[int, Ge(2)] = 8
    """Number of tensors of each task vector in a simulation. They are merged separately, as
    repetitions."""
    entries: Annotated[int, Ge(100)] = 8_000
    """Entries of each tensor."""
    published: Published = Published()
    """Published settings, for comparison with the best ones."""
    cells: Annotated[float, Ge(1)] = 3.0
    """Cells of the lattice for TIES; more cells are more exact."""
    seed: Seed = 0
    """Seed of the simulations."""
    least: NotNegative = 0.005
    """A merge wins if its excess is less than the average's by at least this share."""


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    # The diagram for many tasks.
    "many": varied(DEFAULT, tasks=(4, 16)),
    # A second, for tests.
    "tiny": varied(
        DEFAULT,
        tasks=(2,),
        shares=(0.3, 0.7),
        noises=(0.1, 1.0),
        measured_shares=1,
        measured_noises=1,
        parts=4,
        entries=500,
        cells=1.0,
    ),
}
