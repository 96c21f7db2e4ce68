"""Distances between token streams, by the frequencies of their n-grams; on the host."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Int

from sail_jax.checks import concrete, integer
from sail_jax.distances.estimates import Distance

Sentence = Int[ArrayLike, "position"] | Sequence[int]
Tokens = Int[ArrayLike, "sequence position"] | Sequence[Sentence]


def total_variation_tokens(x: Tokens, y: Tokens, *, n: int = 1) -> Distance:
    """Estimates the total variation distance of the n-gram frequencies of two streams.

    The estimate is biased upwards: for two samples of one distribution it is positive, and near 1
    if most n-grams are rare. The bias grows with n.

    The standard error treats sequences as independent, but not the tokens within one. It is
    linearised: n-grams that are more frequent in x are called positive. The number of positive
    n-grams in a sequence deviates from the prediction by their share in the whole stream. The
    standard error is the spread of these deviations over sequences.

    Args:
      x: Integers `[sequence, position]`, or several sequences of any lengths. At least 2 sequences
        have n-grams.
      y: Likewise.
      n: Tokens in a gram, at least 1.

    Returns:
      The distance in [0, 1] and its standard error, as floats.

    Raises:
      ValueError: For another n, and for fewer than 2 sequences with n-grams.
      TypeError: For values that are not integers, or are traced.

    >>> total_variation_tokens([[1, 1], [1, 2]], [[2, 2], [1, 2]]).value
    0.5
    """
    return _distance(x, y, n, _total_variation)


def jensen_shannon_tokens(x: Tokens, y: Tokens, *, n: int = 1) -> Distance:
    """Estimates the Jensen-Shannon divergence of the n-gram frequencies of two streams, in nats.

    It is at most log 2, and its square root is a metric. See `total_variation_tokens` for its bias
    and standard error.

    Args:
      x: Integers `[sequence, position]`, or several sequences of any lengths. At least 2 sequences
        have n-grams.
      y: Likewise.
      n: Tokens in a gram, at least 1.

    Returns:
      The divergence in [0, log 2] and its standard error, as floats.

    Raises:
      ValueError: For another n, and for fewer than 2 sequences with n-grams.
      TypeError: For values that are not integers, or are traced.

    >>> jensen_shannon_tokens([[1, 1], [1]], [[2], [2]]).value == math.log(2)
    True
    """
    return _distance(x, y, n, _jensen_shannon)


def _total_variation(p: np.ndarray, q: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Computes the value and its derivatives by p and q."""
    # Sum |p - q| / 2 = sum sign (p - q) / 2: the derivative is the sign if p != q.
    sign = np.sign(p - q) / 2
    return float(sign @ (p - q)), sign, -sign


def _jensen_shannon(p: np.ndarray, q: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Computes the value and its derivatives by p and q."""
    middle = (p + q) / 2

    def slope(r: np.ndarray) -> np.ndarray:  # 0 if r is 0: no sequence contains it
        return 0.5 * np.log(np.where(r > 0, r, middle) / middle)

    by_p, by_q = slope(p), slope(q)
    return float(by_p @ p + by_q @ q), by_p, by_q


def _distance(x: Tokens, y: Tokens, n: int, divergence) -> Distance:
    """Computes a divergence of two streams, with the error of `total_variation_tokens`."""
    (a, of_a), (b, of_b), grams = _indexed(x, y, n)
    p, q = (np.bincount(g, minlength=len(grams)) / len(g) for g in (a, b))
    value, by_p, by_q = divergence(p, q)
    variance = 0.0
    for name, gram, sequence, slope in (("x", a, of_a, by_p), ("y", b, of_b, by_q)):
        influence = slope[gram]
        # The influence of a sequence is the sum over its n-grams, each minus the mean.
        totals = np.bincount(sequence, influence - influence.mean())
        count = len(np.unique(sequence))
        if count < 2:
            raise ValueError(f"{name} must have at least 2 sequences with {n}-grams; got {count}")
        # Sequences are the independent units. Bessel's correction for them is count / (count - 1).
        variance += float(totals @ totals) / len(gram) ** 2 * count / (count - 1)
    return Distance(value, math.sqrt(variance))


Indexed = tuple[
    np.ndarray, np.ndarray
]  # for every n-gram in the stream: its index, and its sequence


def _indexed(x: Tokens, y: Tokens, n: int) -> tuple[Indexed, Indexed, np.ndarray]:
    """Returns the index and the sequence of each n-gram in a stream, and the distinct n-grams."""
    integer("n", n)
    a, of_a = _windows("x", x, n)
    b, of_b = _windows("y", y, n)
    grams = np.concatenate([a, b])
    # Each gram gets one number: the number of its first tokens, times the number of tokens, plus
    # its next token. Numbers are reassigned in order after each step. No product then exceeds
    # len(grams)^2, while powers of the vocabulary would overflow.
    tokens, digit = np.unique(grams, return_inverse=True)
    digit = digit.reshape(grams.shape)
    code = digit[:, 0]
    for k in range(1, n):
        code = np.unique(code * len(tokens) + digit[:, k], return_inverse=True)[1]
    _, first, code = np.unique(code, return_index=True, return_inverse=True)
    return (code[: len(a)], of_a), (code[len(a) :], of_b), grams[first]


def _windows(name: str, stream: Tokens, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the n-grams of a stream, `[place, n]`, and the sequence of each."""
    # An array is copied to the host at once, unless it is traced.
    if isinstance(stream, jax.Array):
        array = concrete(stream)
        stream = stream if array is None else array
    sequences = []
    for i in range(len(stream)):  # type: ignore[arg-type]
        ids = concrete(stream[i])  # type: ignore[index]
        if ids is None:
            raise TypeError(f"{name} is traced: distances of tokens are computed outside jax.jit")
        if ids.ndim != 1 or (ids.size and not jnp.issubdtype(ids.dtype, jnp.integer)):
            raise TypeError(
                f"{name}[{i}] must be a sequence of integers; got {ids.dtype} {ids.shape}"
            )
        sequences.append(ids.astype(np.int64))
    windows = [np.lib.stride_tricks.sliding_window_view(s, n) for s in sequences if len(s) >= n]
    if not windows:
        raise ValueError(f"{name} must have sequences of at least {n} tokens; got none")
    return np.concatenate(windows), np.repeat(np.arange(len(windows)), [len(w) for w in windows])
