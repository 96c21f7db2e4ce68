"""Draws random inputs for networks, two of each kind.

A kind is a function `(config, rng) -> inputs`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Inputs = Callable[[Mapping[str, Any], np.random.Generator], Any]


def tokens(config: Mapping[str, Any], rng: np.random.Generator) -> np.ndarray:
    """Draws two sequences of at most 16 random tokens.

    They are two tokens shorter than the number of positions, if that is less than 16.

    Args:
      config: A configuration with `vocab_size`. It may have `max_position_embeddings` or
        `n_positions` (default: 16).
      rng: A generator of random numbers.

    Returns:
      Token numbers, `(2, length)`.
    """
    longest = config.get("max_position_embeddings") or config.get("n_positions") or 16
    # RoBERTa counts positions from 2, after the padding position, so it takes two tokens fewer.
    # This does not matter for other networks.
    length = max(1, min(16, longest - 2))
    return rng.integers(0, config["vocab_size"], (2, length))


def images(config: Mapping[str, Any], rng: np.random.Generator) -> np.ndarray:
    """Draws two random images of normal pixels.

    Args:
      config: A configuration. It may have `image_size` (default: 224) and `num_channels` (default:
        3).
      rng: A generator of random numbers.

    Returns:
      Images, `(2, channel, side, side)`, float32.
    """
    side = config.get("image_size", 224)
    return rng.standard_normal((2, config.get("num_channels", 3), side, side), np.float32)


def vectors(config: Mapping[str, Any], rng: np.random.Generator) -> np.ndarray:
    """Draws two random vectors of normal numbers.

    Args:
      config: A configuration with `inputs`, their length.
      rng: A generator of random numbers.

    Returns:
      Vectors, `(2, inputs)`, float32.
    """
    return rng.standard_normal((2, config["inputs"]), np.float32)


def both(*kinds: Inputs) -> Inputs:
    """Makes the inputs of a network that takes several.

    Args:
      *kinds: The function that draws each of them.

    Returns:
      A function that draws a tuple of inputs.
    """
    return lambda config, rng: tuple(kind(config, rng) for kind in kinds)


def of_part(part: str, kind: Inputs) -> Inputs:
    """Makes the inputs of a part of a network, which has its own configuration.

    Args:
      part: The entry with the configuration of the part.
      kind: The function that draws the inputs from that configuration.

    Returns:
      A function that draws them from the whole configuration.
    """
    return lambda config, rng: kind(config[part], rng)
