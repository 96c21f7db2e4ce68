"""Checkpoints whose tensors are codes, which mean values only together with their scales."""

from collections.abc import Mapping
from typing import Any

from sail_jax.merging.tensors import Tensor, Tensors

__all__ = ["quantization"]

# How the names of codes end, and what lies beside them with this end exchanged.
_PAIRS = (
    ("FP8", "", ("_scale_inv", "_scale")),
    ("FP8", "weight", ("scale_inv", "scale_weight", "scale")),
    ("GPTQ", "qweight", ("g_idx",)),
    ("AWQ or GPTQ", "qweight", ("qzeros", "scales")),
    ("bitsandbytes", "", (".absmax", ".quant_map")),
    ("bitsandbytes", "weight", ("SCB",)),
    ("compressed-tensors", "weight_packed", ("weight_scale",)),
    ("MXFP4", "_blocks", ("_scales",)),
    ("quanto", "_data", ("_scale",)),
    ("HQQ", "W_q", ("scale",)),
)


def quantization(tensors: Tensors, config: Mapping[str, Any]) -> str:
    """What a checkpoint's tensors are codes of, and how that shows; "" if they are values.

    Numbers of few bits alone are none: a network may be in float8, or keep counts. It takes a scale
    beside them, or the `quantization_config` of config.json. That alone is none either: it is often
    left where the tensors are dequantised.
    """
    narrow = {name: tensor for name, tensor in tensors.items() if _narrow(tensor)}
    method = _method(config)
    if method and narrow:
        return f"{method} (quantization_config, and {_told(next(iter(narrow.values())))})"
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


def _narrow(tensor: Tensor) -> bool:
    """Whether its entries are of a type that codes have."""
    return tensor.dtype.name.startswith("float8") or (
        tensor.dtype.kind in "iu" and tensor.dtype.itemsize <= 4
    )


def _told(tensor: Tensor) -> str:
    return f"{tensor.dtype} in '{tensor.name}'"


def _method(config: Mapping[str, Any]) -> str:
    """What the configuration calls it, "" if it speaks of none."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(about := part.get(key), Mapping) and about:
                return str(about.get("quant_method") or about.get("format") or "an unnamed scheme")
    return ""
