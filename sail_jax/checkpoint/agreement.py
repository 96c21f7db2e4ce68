"""How far two networks agree: their outputs on probe inputs, for checkpoints that were changed."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from sail_jax.certificate import certificate

__all__ = ["Agreement", "agreement", "probes"]


class Agreement(NamedTuple):
    """How far the outputs of the grown network are from those of the one before, on probe inputs:
    max and mean |new - old|, max |old|, and the tolerance of `sail_jax.certificate`."""

    dtype: str
    largest: float
    mean: float
    scale: float
    tolerance: float
    preserved: bool


def agreement(
    logits: Any, old: Any, config: Any, new: Any, new_config: Any, inputs: Any, dtype: Any
) -> Agreement:
    run = {0: jax.jit(lambda p, x: logits(p, config, x))}
    run[1] = jax.jit(lambda p, x: logits(p, new_config, x))
    outputs: list[np.ndarray] = []

    def forward(which: tuple[int, Any], inputs: Any) -> Any:
        y = run[which[0]](which[1], inputs)
        outputs.append(np.asarray(y, np.float64))
        return y

    found = certificate(forward, (0, old), (1, new), inputs, dtype=dtype)
    mean = float(np.mean(np.abs(outputs[1] - outputs[0])))
    return Agreement(
        str(dtype), found.absolute, mean, found.scale, found.tolerance, found.preserved
    )


def probes(family: str, config: Mapping[str, Any]) -> Any:
    """Random inputs: two sequences of sixteen tokens, or two images."""
    rng = np.random.default_rng(0)

    def tokens(config: Mapping[str, Any]) -> np.ndarray:
        longest = config.get("max_position_embeddings") or config.get("n_positions") or 16
        length = max(1, min(16, longest - 2))
        return rng.integers(0, config["vocab_size"], (2, length))

    def images(config: Mapping[str, Any]) -> np.ndarray:
        side = config.get("image_size", 224)
        shape = (2, config.get("num_channels", 3), side, side)
        return rng.standard_normal(shape, np.float32)

    if family == "vit":
        return images(config)
    if family == "clip":
        return tokens(config["text_config"]), images(config["vision_config"])
    return (tokens(config), tokens(config)) if family == "t5" else tokens(config)
