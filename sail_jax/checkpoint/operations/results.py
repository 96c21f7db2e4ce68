"""The results of operations that write a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sail_jax.checkpoint.executor import Record
from sail_jax.checkpoint.sources.requantised import CodingError
from sail_jax.views import view


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """The result of an operation.

    Attributes:
      out: The path of the output.
      tensors: The number of its tensors.
      notes: Notes for the user, a sentence each.
      seconds: The time that it took, starting with opening the inputs.
      unchanged: Whether an earlier call had finished this output.
      requantized: The error of each weight that is written in FP8, by name; empty unless
        `requantize`.
      records: The measurements of each tensor, by name; empty unless a merge measures them.
    """

    out: Path
    tensors: int
    notes: tuple[str, ...]
    seconds: float
    unchanged: bool
    requantized: Mapping[str, CodingError] = field(default_factory=dict)
    records: Mapping[str, Record] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        rows = [("tensors", self.tensors), ("seconds", f"{self.seconds:.1f}")]
        if self.unchanged:
            rows.append(("unchanged", "an earlier call had finished it"))
        return view(str(self.out), [*rows, *(("note", note) for note in self.notes)])

    def __repr__(self) -> str:
        """Returns one line, because plans and measurements may have thousands of lines."""
        out = self.out and str(self.out)
        return f"{type(self).__name__}(out={out!r}, tensors={self.tensors})"
