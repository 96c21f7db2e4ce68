"""What operations that write a checkpoint return."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """What an operation did.

    Attributes:
      out: Where the output is.
      tensors: How many tensors it has.
      notes: What a user should know, a sentence each.
      seconds: How long it took, from opening the inputs on.
      unchanged: Whether an earlier call had finished this output.
    """

    out: Path
    tensors: int
    notes: tuple[str, ...]
    seconds: float
    unchanged: bool

    def __repr__(self) -> str:
        """What was made, in one line: plans and measurements may have thousands."""
        out = self.out and str(self.out)
        return f"{type(self).__name__}(out={out!r}, tensors={self.tensors})"
