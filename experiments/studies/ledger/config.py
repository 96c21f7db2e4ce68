"""The configuration of `ledger` and its presets."""

from experiments.lab.config import Seed, config, varied
from theory import claims

# The main theorems of each paper, next to their misprints.
MAIN = (
    "features-are-fate/T2.2-Dudley/*",
    "features-are-fate/T3.6-under/ours",
    "features-are-fate/T3.6-over/ours",
    "features-are-fate/T3.7/exact",
    "features-are-fate/T3.8/exact",
    "features-are-fate/T3.9-estimator-L2/*",
    "features-are-fate/eq17-boundary/*",
    "overtrained/T4.4/exact",
    "overtrained/T4.4-sharp/ours",
    "overtrained/T4.6/exact",
    "overtrained/T4.7-threshold/ours",
    "cross-task-linearity/L1/*",
    "cross-task-linearity/T1/ours",
    "sail/T1/*",
    "sail/T2-eq6/exact",
    "sail/T3a/reading",
    "sail/T4/corrected",
    "unified-merging/T1/printed",
    "unified-merging/T1/corrected",
    "unified-merging/T2-admissible/reading",
    "unified-merging/C1-dare/*",
)
THEOREMS, FEW = "*/T*", "features-are-fate/eq44/*"
# Claims of presets are not checked, because this would import every claim.
OWN = ("*", ",".join(MAIN), THEOREMS, FEW)


@config
class Config:
    """The claims to check, and the size of the simulations."""

    claims: str = "*"
    """Globs over claim names, separated by commas; `*` selects all claims."""
    seed: Seed = 0
    """Seed of every simulation."""
    quick: bool = False
    """Use smaller simulations, with larger standard errors."""

    def __post_init__(self) -> None:
        if self.claims in OWN:
            return
        try:
            claims.select(self.claims)
        except ValueError as exc:
            raise ValueError(f"claims: {exc}") from exc


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    "quick": varied(DEFAULT, quick=True),
    "main": varied(DEFAULT, claims=",".join(MAIN)),
    "main_quick": varied(DEFAULT, claims=",".join(MAIN), quick=True),
    "theorems": varied(DEFAULT, claims=THEOREMS),
    "tiny": varied(DEFAULT, claims=FEW, quick=True),
}
