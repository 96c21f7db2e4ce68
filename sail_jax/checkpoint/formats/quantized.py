"""Detects quantised checkpoints, whose tensors are codes that are multiplied by scales."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from sail_jax.configurations import Config
from sail_jax.merging.tensors import Like, Shape


class Layout(NamedTuple):
    """How a weight is stored: codes of float8_e4m3fn, to be multiplied by scales.

    Attributes:
      scale: The suffix that the scales add to the weight's name, such as "_scale_inv". If
        `replaces` is set, the suffix replaces that end of the name.
      replaces: The end of the weight's name that `scale` replaces; "" for nothing.
      dtype: The dtype of the scales.
      axes: The number of axes of the tensor of scales.
      rows: The number of rows that share a scale; None for all.
      columns: The number of columns that share a scale; None for all.
    """

    scale: str
    replaces: str
    dtype: np.dtype
    axes: int
    rows: int | None
    columns: int | None

    def scales_of(self, name: str) -> str:
        """Returns the name of the scales of a weight."""
        return name.removesuffix(self.replaces) + self.scale

    def grid(self, shape: Shape) -> Shape:
        """Returns the shape of the scales of a weight."""
        if self.rows is self.columns is None and self.axes != len(shape):
            return (1,) * self.axes
        *lead, rows, columns = shape
        down = 1 if self.rows is None else -(-rows // self.rows)
        across = 1 if self.columns is None else -(-columns // self.columns)
        return (down,) if self.axes == 1 else (*lead, down, across)


class Scheme(NamedTuple):
    """How a checkpoint's weights are stored as codes, for an output with the same encoding.

    Attributes:
      entries: The entries of config.json about the codes, by the keys that lead to them.
      layouts: The layout of each weight, by its name.
      plain: The names of all other tensors.
      refused: The reason why no output can have this encoding; "" if an output can.
      powers: Whether scales are powers of 2.
    """

    entries: Mapping[tuple[str, ...], Mapping[str, Any]]
    layouts: Mapping[str, Layout]
    plain: frozenset[str] = frozenset()
    refused: str = ""
    powers: bool = False


KEYS = ("quantization_config", "compression_config")
"""The entries of config.json about codes."""
# Each scheme with the suffixes of its codes and of the scales (or similar tensors) that belong to
# them. The order matters: a suffix that belongs to one scheme alone comes before suffixes that
# several schemes share (GPTQ has g_idx, AWQ does not).
_PAIRS = (
    ("FP8", "", ("_scale_inv", "_scale")),
    ("FP8", "weight", ("scale_inv", "scale_weight", "scale")),
    ("GPTQ", "qweight", ("g_idx",)),
    ("AWQ or GPTQ", "qweight", ("qzeros", "scales")),
    ("bitsandbytes", "", (".absmax", ".quant_map")),
    ("bitsandbytes", "weight", ("SCB",)),
    ("compressed-tensors", "weight_packed", ("weight_scale",)),
    ("MXFP4", "_blocks", ("_scales",)),
    ("EETQ", "weight", ("weight_scales",)),
    ("NVFP4", "weight", ("weight_scale_2",)),
    ("quanto", "_data", ("_scale",)),
    ("HQQ", "W_q", ("scale",)),
)


def quantization(tensors: Mapping[str, Like], config: Config) -> str:
    """Finds the quantisation scheme of a checkpoint, if its tensors are codes.

    A narrow dtype is not sufficient evidence: a network may be stored in float8, and a buffer may
    contain integer counts. A tensor of scales must accompany the codes, or config.json must contain
    a `quantization_config`. That entry alone is not sufficient either, because it often remains
    after the tensors have been dequantised.

    Args:
      tensors: The tensors of the checkpoint, by name; none is read.
      config: The content of its config.json; empty if there is none.

    Returns:
      The scheme and its evidence, for messages; "" if the tensors are plain values.
    """
    narrow = {name: tensor for name, tensor in tensors.items() if _narrow(tensor)}
    named = method(config)
    if named and narrow:
        return f"{named} (quantization_config, and {_told(next(iter(narrow.values())))})"
    for name, tensor in narrow.items():
        for scheme, end, others in _PAIRS:
            if not name.endswith(end):
                continue
            for scale in (name.removesuffix(end) + other for other in others):
                integral = tensor.dtype.kind in "iu"
                # If a whole network is stored in float8, its own scales are also float8.
                if scale in tensors and (integral or tensors[scale].dtype != tensor.dtype):
                    called = "integers with scales" if integral and scheme == "FP8" else scheme
                    return f"{called} ({_told(tensor)} next to '{scale}')"
    return ""


def _narrow(tensor: Like) -> bool:
    """Checks whether the entries have a dtype of codes: a float8, or integers of up to 4 bytes."""
    return tensor.dtype.name.startswith("float8") or (
        tensor.dtype.kind in "iu" and tensor.dtype.itemsize <= 4
    )


def _told(tensor: Like) -> str:
    """Formats a tensor's name and dtype."""
    return f"{tensor.dtype} in '{tensor.name}'"


def method(config: Config) -> str:
    """Reads the scheme's name from a configuration.

    Args:
      config: The content of config.json.

    Returns:
      The name; "" if there is none.
    """
    for about in statements(config).values():
        return str(about.get("quant_method") or about.get("format") or "an unnamed scheme")
    return ""


def statements(config: Config) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """Finds the entries about codes in a configuration and its text tower.

    Args:
      config: The content of config.json.

    Returns:
      The entries that are mappings with content, by the keys that lead to them.
    """
    parts = {(): config, ("text_config",): config.get("text_config")}
    return {
        (*place, key): about
        for place, part in parts.items()
        for key in KEYS
        if isinstance(part, Mapping) and isinstance(about := part.get(key), Mapping) and about
    }
