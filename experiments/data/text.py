"""Text that every installation has: the source of Python's own standard library."""

import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

VOCAB = 97  # 95 printable ASCII characters, the newline, and one for all others
HELD_OUT = 10  # every tenth module is kept from training


class Text(NamedTuple):
    """Characters as tokens: of the modules to learn from, and of those held out."""

    train: UInt8[np.ndarray, " train"]
    held_out: UInt8[np.ndarray, " held_out"]


def encode(source: bytes) -> UInt8[np.ndarray, " n"]:
    """Tokens 0 to 94 for the characters from space to ~, 95 for a newline, 96 for all others.

    >>> encode(b" a~\\n\\t").tolist()
    [0, 65, 94, 95, 96]
    """
    code = np.arange(256)
    table = np.where((code >= 32) & (code < 127), code - 32, 96)
    table[ord("\n")] = 95
    return table.astype(np.uint8)[np.frombuffer(source.replace(b"\r\n", b"\n"), np.uint8)]


def load() -> Text:
    """The top-level modules of the standard library in alphabetical order, every tenth held out.

    What it holds depends on the version of Python alone. Raises FileNotFoundError where the
    library comes without its source.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    modules = [path.read_bytes() for path in sorted(folder.glob("[a-z]*.py"))]
    if len(modules) < HELD_OUT:
        raise FileNotFoundError(f"{folder} holds no source of the standard library to learn from")
    held_out = modules[::HELD_OUT]
    del modules[::HELD_OUT]
    return Text(encode(b"".join(modules)), encode(b"".join(held_out)))


def blocks(tokens: UInt8[np.ndarray, " n"], length: int) -> UInt8[np.ndarray, "block length"]:
    """The text cut into blocks of `length` tokens, without the rest.

    >>> blocks(np.arange(7, dtype=np.uint8), 3).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    if not 1 <= length <= len(tokens):
        raise ValueError(f"length must be from 1 to {len(tokens)} tokens; got {length}")
    return tokens[: len(tokens) // length * length].reshape(-1, length)


Parts = tuple[Int[np.ndarray, " low"], Int[np.ndarray, " middle"], Int[np.ndarray, " high"]]


def by_mean(some: UInt8[np.ndarray, "block length"], thresholds: Float[np.ndarray, " 2"]) -> Parts:
    """Which blocks have a mean token value below, between (ends included) and above the thresholds:
    D_1, D_2 and D_t of SAIL, App. H.1, where those are the 33rd and 66th percentiles.

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
    """Two sources of `count` blocks each, of which a share alpha is common to both and a share beta
    comes from the target, the third part (SAIL, Sec. 4.4, which leaves the construction open).

    Of the common blocks and of each source's own, a share beta is the target's; the rest of a
    source's own blocks are of its own part, of the common ones half of either part. Up to rounding.
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
    mixed = np.concatenate([a[: halves[0]], b[: halves[1]], target[:shared]])
    first = [mixed, a[halves[0] :], target[shared : shared + own]]
    second = [mixed, b[halves[1] :], target[shared + own :]]
    return np.stack([np.concatenate(first), np.concatenate(second)])
