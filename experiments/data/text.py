"""Text that is part of every installation: the source of Python's standard library, by character.

`overlapping` cuts pairs of source sets from such a text, for SAIL's experiments on language.
`tokens` reads larger texts that other programs tokenised.
"""

import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

from experiments.data.files import DataSet, Source

NAME = "python"
VOCAB = 97  # 95 printable ASCII characters, the newline, and one for all others
# Every tenth module is held out.
HELD_OUT = 10
_SOURCE = Source("the source of Python's standard library", "python.org", "itself")
TEXTS = {NAME: DataSet(_SOURCE, VOCAB)}


class Text(NamedTuple):
    """A text as tokens, one for each character.

    Attributes:
      train: The modules to train on, uint8 `(train,)`.
      held_out: The modules held out, uint8 `(held_out,)`.
    """

    train: UInt8[np.ndarray, " train"]
    held_out: UInt8[np.ndarray, " held_out"]


def encode(source: bytes) -> UInt8[np.ndarray, " n"]:
    """Turns text into tokens, one for each byte.

    Tokens 0 to 94 are the characters from space to ~. Token 95 is a newline (also the two bytes of
    Windows). Token 96 is every other byte.

    Args:
      source: The text.

    Returns:
      The tokens, uint8 `(n,)`.

    >>> encode(b" a~\\n\\t").tolist()
    [0, 65, 94, 95, 96]
    """
    code = np.arange(256)
    table = np.where((code >= 32) & (code < 127), code - 32, 96)
    table[ord("\n")] = 95
    return table.astype(np.uint8)[np.frombuffer(source.replace(b"\r\n", b"\n"), np.uint8)]


def load() -> Text:
    """Loads the source of Python's standard library.

    The top-level modules are taken in alphabetical order. Every tenth, including the first, is held
    out. The result depends only on the version of Python.

    Returns:
      The tokens of the training modules, and of the held-out ones.

    Raises:
      FileNotFoundError: If Python is installed without the source of its library.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    modules = [path.read_bytes() for path in sorted(folder.glob("[a-z]*.py"))]
    if len(modules) < HELD_OUT:
        raise FileNotFoundError(f"{folder} holds no source of the standard library to learn from")
    held_out = modules[::HELD_OUT]
    del modules[::HELD_OUT]
    return Text(encode(b"".join(modules)), encode(b"".join(held_out)))


def blocks(tokens: UInt8[np.ndarray, " n"], length: int) -> UInt8[np.ndarray, "block length"]:
    """Cuts a text into blocks of equal length, and drops the remainder.

    Args:
      tokens: The text, uint8 `(n,)`.
      length: The number of tokens in a block, from 1 to n.

    Returns:
      The blocks `(block, length)`.

    Raises:
      ValueError: If `length` is out of range.

    >>> blocks(np.arange(7, dtype=np.uint8), 3).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    if not 1 <= length <= len(tokens):
        raise ValueError(f"length must be from 1 to {len(tokens)} tokens; got {length}")
    return tokens[: len(tokens) // length * length].reshape(-1, length)


Parts = tuple[Int[np.ndarray, " low"], Int[np.ndarray, " middle"], Int[np.ndarray, " high"]]


def by_mean(some: UInt8[np.ndarray, "block length"], thresholds: Float[np.ndarray, " 2"]) -> Parts:
    """Splits blocks by their mean token value: below, between and above two thresholds.

    The ends belong to the middle part. With the 33rd and 66th percentiles as thresholds, the parts
    are D_1, D_2 and D_t of SAIL.

    Args:
      some: The blocks, uint8 `(block, length)`.
      thresholds: The two thresholds `(2,)`, the first not above the second.

    Returns:
      The indices of the blocks below, between and above.

    Raises:
      ValueError: If the thresholds are not in order, or one is NaN.

    References:
      SAIL, App. H.1.

    >>> some = np.array([[5, 5], [1, 0], [3, 4]], np.uint8)
    >>> [part.tolist() for part in by_mean(some, np.percentile(some.mean(1), (33, 66)))]
    [[1], [2], [0]]
    """
    low, high = map(float, thresholds)
    if not low <= high:
        raise ValueError(f"thresholds must be two increasing numbers; got {low}, {high}")
    mean = some.mean(1)
    below, above = mean < low, mean > high
    return tuple(np.flatnonzero(part) for part in (below, ~below & ~above, above))  # type: ignore[return-value]


def overlapping(
    rng: np.random.Generator, parts: Parts, count: int, *, alpha: float, beta: float
) -> Int[np.ndarray, "2 count"]:
    """Draws two source sets that share some blocks, and that contain some blocks of the target.

    A fraction alpha of each source is common to both. Among the common blocks, and among each
    source's own blocks, a fraction beta is from the target's part. The other own blocks of a source
    are from its part, and the other common blocks are from both parts in equal numbers. Fractions
    are rounded to whole blocks.

    Args:
      rng: The source of random numbers.
      parts: The blocks of the first source, of the second source and of the target, as indices.
      count: The number of blocks in each source.
      alpha: The fraction of blocks that is common, in [0, 1].
      beta: The fraction of blocks from the target, in [0, 1].

    Returns:
      The indices of the blocks in either source `(2, count)`, the common ones first.

    Raises:
      ValueError: If a fraction is outside [0, 1], or a part has too few blocks.

    References:
      SAIL, Sec. 4.4, has alpha and beta, and leaves open how the sets are made.

    >>> parts = (np.arange(4), np.arange(4, 8), np.arange(8, 12))
    >>> overlapping(np.random.default_rng(0), parts, 4, alpha=0.5, beta=0.5).shape
    (2, 4)
    """
    for name, share in (("alpha", alpha), ("beta", beta)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name} must be in [0, 1]; got {share}")
    common = round(alpha * count)
    shared, own = (round(beta * n) for n in (common, count - common))
    halves = [(common - shared + k) // 2 for k in (0, 1)]
    rest = count - common - own
    needed = (*(half + rest for half in halves), shared + 2 * own)
    for part, need in zip(parts, needed, strict=True):
        if need > len(part):
            raise ValueError(
                f"count must leave each part enough blocks: {count} with alpha = {alpha}, beta = "
                f"{beta} need {need} of {len(part)}"
            )
    a, b, target = (rng.permutation(part)[:need] for part, need in zip(parts, needed, strict=True))
    # All parts are consecutive slices of permutations, so no block is taken twice.
    mixed = np.concatenate([a[: halves[0]], b[: halves[1]], target[:shared]])
    first = [mixed, a[halves[0] :], target[shared : shared + own]]
    second = [mixed, b[halves[1] :], target[shared + own :]]
    return np.stack([np.concatenate(first), np.concatenate(second)])
