"""What `ledger` can be told, and its presets."""

from experiments.lab.config import Seed, config, varied
from theory import claims


@config
class Config:
    """Which claims are checked, and how hard."""

    claims: str = "*"
    """Glob over claim names; `*` is all of them."""
    seed: Seed = 0
    """Seed of every simulation."""
    quick: bool = False
    """Smaller simulations, larger standard errors."""

    def __post_init__(self) -> None:
        try:
            claims.select(self.claims)
        except ValueError as exc:
            raise ValueError(f"claims: {exc}") from exc


DEFAULT = Config()
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    "quick": varied(DEFAULT, quick=True),
    "theorems": varied(DEFAULT, claims="*/T*"),
    "theorems_quick": varied(DEFAULT, claims="*/T*", quick=True),
    "tiny": varied(DEFAULT, claims="features-are-fate/eq13-interval/*", quick=True),
}
