"""Which examples a training step sees: a pure function of the step, so that resuming is free."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

ROUNDS = 8


def permuted(
    index: Int64[np.ndarray, " k"], n: int, seed: Sequence[int]
) -> Int64[np.ndarray, " k"]:
    """Where a pseudo-random permutation of 0 to n - 1 sends some indices, in O(k) time and memory.

    A Feistel network on the least even number of bits that holds n; what falls outside walks its
    cycle until it is back (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    >>> sorted(permuted(np.arange(5), 5, [0]).tolist())
    [0, 1, 2, 3, 4]
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence(tuple(seed)).generate_state(ROUNDS, np.uint64)

    def once(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return left << half | right

    out = once(index.astype(np.uint64))
    while len(outside := np.flatnonzero(out >= n)):
        out[outside] = once(out[outside])
    return out.astype(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def indices(step: int, *, examples: int, size: int, seed: int) -> Int64[np.ndarray, " size"]:
    """The examples of batch `step`: each epoch takes every one once, in an order of its own.

    A batch may end one epoch and begin the next, so every batch is full.

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
        out[epoch == e] = permuted(place[epoch == e], examples, [seed, e])
    return out
