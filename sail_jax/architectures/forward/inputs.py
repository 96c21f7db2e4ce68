"""Random inputs to run a network on: two of each kind."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["Inputs", "both", "images", "of_part", "tokens", "vectors"]

Inputs = Callable[[Mapping[str, Any], np.random.Generator], Any]


def tokens(config: Mapping[str, Any], rng: np.random.Generator) -> np.ndarray:
    """Sequences of sixteen tokens, or as long as the network takes."""
    longest = config.get("max_position_embeddings") or config.get("n_positions") or 16
    length = max(1, min(16, longest - 2))
    return rng.integers(0, config["vocab_size"], (2, length))


def images(config: Mapping[str, Any], rng: np.random.Generator) -> np.ndarray:
    side = config.get("image_size", 224)
    return rng.standard_normal((2, config.get("num_channels", 3), side, side), np.float32)


def vectors(config: Mapping[str, Any], rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((2, config["inputs"]), np.float32)


def both(*kinds: Inputs) -> Inputs:
    """Of a network that takes several inputs."""
    return lambda config, rng: tuple(kind(config, rng) for kind in kinds)


def of_part(part: str, kind: Inputs) -> Inputs:
    """Of a part of the network, which has a configuration of its own."""
    return lambda config, rng: kind(config[part], rng)
