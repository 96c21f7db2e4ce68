"""The examples of a training step, as a pure function of the step.

A resumed run requires no stored state: step t uses the same examples, even if other processes
computed the earlier steps.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

ROUNDS = 8


def permuted(
    index: Int64[np.ndarray, " k"], n: int, seed: Sequence[int]
) -> Int64[np.ndarray, " k"]:
    """Applies a pseudo-random permutation of 0 to n - 1 to some indices.

    Time and memory grow with the number of indices, not with n. The permutation is a Feistel
    network on the smallest sufficient even number of bits. An index that becomes n or larger is
    permuted again until it is below n.

    Args:
      index: The indices, int64 `(k,)`, each from 0 to n - 1.
      n: The number of permuted values, >= 1.
      seed: Integers >= 0; different ones give different permutations.

    Returns:
      The permuted indices, int64 `(k,)`.

    References:
      Black and Rogaway, Ciphers with arbitrary finite domains, 2002.

    >>> sorted(permuted(np.arange(5), 5, [0]).tolist())
    [0, 1, 2, 3, 4]
    """
    # Two halves of equal size represent at most 4 n numbers, so on average at most four steps lead
    # back below n.
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence(tuple(seed)).generate_state(ROUNDS, np.uint64)

    def once(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for key in keys:
            # Each round can be undone for any `_mixed`, because `right` is kept, so the whole is a
            # permutation.
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return left << half | right

    out = once(index.astype(np.uint64))
    # Following the cycle keeps this a permutation: values that began below n return below n.
    while len(outside := np.flatnonzero(out >= n)):
        out[outside] = once(out[outside])
    return out.astype(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """Mixes the bits of 64-bit numbers, by splitmix64's finaliser (Steele, Lea and Flood, 2014)."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def indices(step: int, *, examples: int, size: int, seed: int) -> Int64[np.ndarray, " size"]:
    """Returns the examples in the batch of one training step.

    Each epoch uses every example once, in a new order. A batch may span two epochs, so that every
    batch is full.

    Args:
      step: The number of the step, >= 0.
      examples: The number of examples, >= 1.
      size: The number of examples in a batch, >= 1.
      seed: Seed of the orders, >= 0.

    Returns:
      Indices from 0 to `examples - 1`, int64 `(size,)`.

    Raises:
      ValueError: If an argument is below its minimum.

    >>> sum((indices(s, examples=6, size=4, seed=0).tolist() for s in range(3)), []).count(2)
    2
    """
    for name, value, least in (
        ("step", step, 0), ("examples", examples, 1), ("size", size, 1), ("seed", seed, 0)
    ):  # fmt: skip
        if value < least:
            raise ValueError(f"{name} must be at least {least}; got {value}")
    at = step * size + np.arange(size, dtype=np.int64)
    epoch, place = at // examples, at % examples
    out = np.empty(size, np.int64)
    for e in np.unique(epoch).tolist():
        # A batch is in one epoch, or in two if it spans their boundary.
        out[epoch == e] = permuted(place[epoch == e], examples, [seed, e])
    return out
