"""Determines the weights of an output that are written as FP8 codes again, and their layout.

An output has the config.json of one input, and uses its scheme: the same weights are codes,
with scales of the same names, for the same blocks. Layers that are missing in this input are
treated like its other layers.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.formats.quantized import Layout, Scheme
from sail_jax.merging.work import Work

RECORD = "requantization.json"
"""The file of an output with the error of each weight."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class CodingError(NamedTuple):
    """The difference between a weight and the value of its codes and scales.

    Attributes:
      relative: The Frobenius norm of the difference, divided by the weight's norm; 0 for a weight
        of zeros.
      largest: The largest difference of an entry.
    """

    relative: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class Requantisation:
    """The weights of an output that are written in codes, and their layout.

    Attributes:
      source: The checkpoint that provides the scheme.
      scheme: The scheme.
      layouts: The layout of each weight that is written in codes, by its name.
      errors: The error of each of these weights, filled by the writer.
    """

    source: str
    scheme: Scheme
    layouts: Mapping[str, Layout]
    errors: dict[str, CodingError] = field(default_factory=dict)

    def note(self) -> str:
        """Describes the weights that are written in codes.

        Returns:
          A sentence, for notes.
        """
        blocks = {
            "tensor" if x.rows is x.columns is None
            else "row" if (x.rows, x.columns) == (1, None)
            else f"block of {x.rows or 'all'} by {x.columns or 'all'}"
            for x in self.layouts.values()
        }  # fmt: skip
        count = len(self.layouts)
        return (
            f"{count} weight{'s are' if count > 1 else ' is'} written in float8_e4m3fn, with one "
            f"scale for each {' or '.join(sorted(blocks))}, as in {self.source}"
        )

    def config(self, extras: Mapping[str, Any]) -> bytes:
        """Adds the entries about codes to the config.json of an output.

        Args:
          extras: The files of the output, by name.

        Returns:
          The new content of config.json.
        """
        config = config_of(extras)
        for (*place, key), stated in self.scheme.entries.items():
            part = config
            for name in place:
                part = part.setdefault(name, {})
            part[key] = dict(stated)
        return json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"

    def record(self) -> bytes:
        """Writes the errors of all weights as JSON.

        Returns:
          The content of `RECORD`, the largest error first.
        """
        rows = sorted(self.errors.items(), key=lambda x: (-x[1].relative, x[0]))
        about = {
            "codes": "float8_e4m3fn",
            "source": self.source,
            "tensors": {name: error._asdict() for name, error in rows},
        }
        return json.dumps(about, indent=2).encode() + b"\n"


def requantised(checkpoint: Checkpoint, works: Sequence[Work]) -> Requantisation:
    """Determines the weights of an output that are written in codes of FP8.

    Args:
      checkpoint: The checkpoint that provides the scheme.
      works: The work for each tensor of the output.

    Returns:
      The decision.

    Raises:
      CheckpointError: If the checkpoint is not in FP8, its scheme cannot be written, or the output
        has none of its weights.
    """
    scheme, path = checkpoint.scheme, checkpoint.path
    if scheme is None:
        raise CheckpointError(f"{path} is not quantised; expected a checkpoint in FP8")
    if scheme.refused:
        raise CheckpointError(f"{path} cannot be written in FP8 again: {scheme.refused}")
    alike = {_NUMBER.sub("*", name): layout for name, layout in scheme.layouts.items()}
    layouts = {}
    for work in works:
        layout = scheme.layouts.get(work.name)
        if layout is None and work.name not in scheme.plain:
            layout = alike.get(_NUMBER.sub("*", work.name))
        if layout is None:
            continue
        if len(work.shape) < 2:
            raise CheckpointError(f"'{work.name}' has shape {list(work.shape)}; expected a matrix")
        layouts[work.name] = layout
    if not layouts:
        raise CheckpointError(f"no weight that {path} has in FP8 is in the output")
    written = {work.name for work in works}
    if taken := sorted(written & {layout.scales_of(name) for name, layout in layouts.items()}):
        raise CheckpointError(f"'{taken[0]}' is a tensor with the name of a weight's scales")
    return Requantisation(source=str(path), scheme=scheme, layouts=layouts)


def summary(errors: Mapping[str, CodingError]) -> str:
    """Describes the errors of all weights briefly.

    Args:
      errors: The errors by the names of the weights.

    Returns:
      A clause with the median and the largest; "" without errors.
    """
    if not errors:
        return ""
    name = max(errors, key=lambda name: errors[name].relative)
    middle = float(np.median([error.relative for error in errors.values()]))
    return (
        f"FP8 changes weights by {middle:.3g} of their norm (median of {len(errors)}), at most "
        f"{errors[name].relative:.3g} ({name})"
    )
