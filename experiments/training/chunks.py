"""Evaluation of many examples in chunks."""

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Int, PyTree

from experiments.training.sharding import gathered


def in_chunks(
    fn: Callable[[Int[np.ndarray, " size"]], PyTree], index: Int[np.ndarray, " n"], size: int
) -> PyTree:
    """Applies a function to chunks of examples of equal length, so that it is compiled once.

    Args:
      fn: Maps the indices of some examples to arrays with one leading entry for each example.
      index: The indices of all examples. The last one is repeated to fill the last chunk.
      size: The number of examples in a chunk.

    Returns:
      The arrays of all examples, as NumPy arrays.

    >>> in_chunks(lambda some: jax.numpy.asarray(some) ** 2, np.arange(5), 2)
    array([ 0,  1,  4,  9, 16], dtype=int32)
    """
    padded = np.pad(index, (0, -len(index) % size), mode="edge")
    parts = [fn(padded[i : i + size]) for i in range(0, len(padded), size)]
    joined = lambda *leaves: np.concatenate(leaves)[: len(index)]  # noqa: E731
    return jax.tree.map(joined, *gathered(parts))
