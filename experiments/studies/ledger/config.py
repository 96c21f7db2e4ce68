"""What `ledger` can be told, and its presets."""

import dataclasses

from theory import claims


@dataclasses.dataclass(frozen=True)
class Config:
    """Which claims are checked, and how hard."""

    claims: str = "*"
    """Glob over claim names; `*` is all of them."""
    seed: int = 0
    """Seed of every simulation."""
    quick: bool = False
    """Smaller simulations, larger standard errors."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        try:
            claims.select(self.claims)
        except ValueError as exc:
            raise ValueError(f"claims: {exc}") from exc

    @classmethod
    def tiny(cls) -> "Config":
        return cls(claims="features-are-fate/eq13-interval/*", quick=True)


PRESETS: dict[str, Config] = {
    "default": Config(),
    "quick": Config(quick=True),
    "theorems": Config(claims="*/T*"),
    "theorems_quick": Config(claims="*/T*", quick=True),
    "tiny": Config.tiny(),
}
