"""Recognition of quantised checkpoints: their tensors are codes, which need scales to be values."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from sail_jax.configurations import Config
from sail_jax.merging.tensors import Like, Shape


class Layout(NamedTuple):
    """How a weight lies in codes of float8_e4m3fn, which are multiplied by scales.

    Attributes:
      scale: The name of the scales after the weight's, such as "_scale_inv"; from the end of the
        module's name where `replaces` is set.
      replaces: What of the weight's name `scale` takes the place of; "" for nothing.
      dtype: The dtype of the scales.
      axes: How many axes the tensor of scales has.
      rows: How many rows share a scale; None for all.
      columns: How many columns share a scale; None for all.
    """

    scale: str
    replaces: str
    dtype: np.dtype
    axes: int
    rows: int | None
    columns: int | None

    def scales_of(self, name: str) -> str:
        """The name of the scales of a weight."""
        return name.removesuffix(self.replaces) + self.scale

    def grid(self, shape: Shape) -> Shape:
        """The shape of the scales of a weight."""
        if self.rows is self.columns is None and self.axes != len(shape):
            return (1,) * self.axes
        *lead, rows, columns = shape
        down = 1 if self.rows is None else -(-rows // self.rows)
        across = 1 if self.columns is None else -(-columns // self.columns)
        return (down,) if self.axes == 1 else (*lead, down, across)


class Scheme(NamedTuple):
    """How the weights of a checkpoint lie in codes, for an output that is written in the same way.

    Attributes:
      entries: What config.json states about the codes, by the keys that lead to it.
      layouts: How each weight lies, by its name.
      plain: The names of all other tensors.
      refused: Why no output is written in this way; "" if it can be.
      powers: Whether scales are powers of 2.
    """

    entries: Mapping[tuple[str, ...], Mapping[str, Any]]
    layouts: Mapping[str, Layout]
    plain: frozenset[str] = frozenset()
    refused: str = ""
    powers: bool = False


# Scheme, how the names of its codes end, and how those of the scales (or the like) beside them do.
# In the order in which they are tried: names that several schemes use come after those that tell
# one from the others (GPTQ has g_idx, AWQ has not).
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
    """Names the quantisation scheme of a checkpoint, if its tensors are codes.

    Numbers of few bits alone do not make a checkpoint quantised: a network may be kept in float8,
    and buffers may count. There must also be a tensor of scales beside one of them, or a
    `quantization_config` in config.json. That entry alone does not count either, since it often
    stays behind when the tensors have been dequantised.

    Args:
      tensors: The tensors of the checkpoint, by name; none is read.
      config: The content of its config.json; empty if there is none.

    Returns:
      The scheme and how it shows, for messages; "" if the tensors are values.
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
                # A network kept in float8 as a whole has its own scales in float8, too.
                if scale in tensors and (integral or tensors[scale].dtype != tensor.dtype):
                    called = "integers with scales" if integral and scheme == "FP8" else scheme
                    return f"{called} ({_told(tensor)} beside '{scale}')"
    return ""


def _narrow(tensor: Like) -> bool:
    """Whether the entries have a type that codes have: a float8, or integers of up to 4 bytes."""
    return tensor.dtype.name.startswith("float8") or (
        tensor.dtype.kind in "iu" and tensor.dtype.itemsize <= 4
    )


def _told(tensor: Like) -> str:
    """Names a tensor and its dtype."""
    return f"{tensor.dtype} in '{tensor.name}'"


def method(config: Config) -> str:
    """Finds the scheme that a configuration names.

    Args:
      config: The content of config.json.

    Returns:
      The name; "" if it names none.
    """
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(about := part.get(key), Mapping) and about:
                return str(about.get("quant_method") or about.get("format") or "an unnamed scheme")
    return ""
