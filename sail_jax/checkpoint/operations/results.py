"""What operations that write a checkpoint return."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sail_jax.checkpoint.sources.requantised import CodingError


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """What an operation did.

    Attributes:
      out: Where the output is.
      tensors: How many tensors it has.
      notes: What a user should know, a sentence each.
      seconds: How long it took, from opening the inputs on.
      unchanged: Whether an earlier call had finished this output.
      requantized: How far each weight that is written in FP8 lies from what was computed, by name;
        empty unless `requantize`.
    """

    out: Path
    tensors: int
    notes: tuple[str, ...]
    seconds: float
    unchanged: bool
    requantized: Mapping[str, CodingError] = field(default_factory=dict)

    def __repr__(self) -> str:
        """What was made, in one line: plans and measurements may have thousands."""
        out = self.out and str(self.out)
        return f"{type(self).__name__}(out={out!r}, tensors={self.tensors})"
