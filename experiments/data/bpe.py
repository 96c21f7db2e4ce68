"""Byte-level byte-pair encoding: learned from text, applied, and stored.

`train` learns the merges, `encode` and `decode` apply them, `save` and `load` use a file.
`gpt2_tokens` reads tokenizers from other projects.

References:
  Sennrich et al., Neural machine translation of rare words with subword units, 2016. Radford et
  al., Language models are unsupervised multitask learners, 2019.
"""

import heapq
import re
from collections import Counter, defaultdict
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32, UInt16

from experiments.data.files import DataError, reading
from sail_jax import disk

MAX_VOCAB = 1 << 16
# Merges do not cross these: words, numbers, signs, white space. They cover every byte, and none is
# longer than 33, which bounds the work and the length of a token.
_WORD = re.compile(
    rb" ?[A-Za-z\x80-\xff]{1,32}| ?[0-9]{1,3}| ?[^\sA-Za-z0-9\x80-\xff]{1,32}|\s{1,32}(?!\S)|\s"
)
# The maximum number of bytes of a token.
MAX_TOKEN = 33
_SCHEMA = "byte-level BPE"


class Bpe(NamedTuple):
    """A vocabulary of byte-level byte-pair encoding.

    Tokens 0 to 255 are the bytes. Token 256 + k represents the concatenation of the two tokens of
    row k.

    Attributes:
      merges: The pairs of tokens, in the order in which they were learnt: int32 `(k, 2)`. Row k has
        tokens below 256 + k.
    """

    merges: Int32[np.ndarray, "k 2"]

    @property
    def vocab(self) -> int:
        """The number of tokens: 256 bytes and one for each merge."""
        return 256 + len(self.merges)


def _joined(word: list[int], pair: tuple[int, int], token: int) -> list[int]:
    """Replaces each occurrence of the pair in the word by `token`, from left to right."""
    out, k, last = [], 0, len(word) - 1
    first, second = pair
    while k <= last:
        if k < last and word[k] == first and word[k + 1] == second:
            out.append(token)
            k += 2
        else:
            out.append(word[k])
            k += 1
    return out


def train(text: bytes, merges: int) -> Bpe:
    """Learns byte-pair merges from a text.

    Each merge joins the most frequent pair of adjacent tokens at that point, and the lowest of
    equally frequent pairs. Pairs are counted within words, runs of digits, runs of signs and white
    space, never across them. The result depends only on the arguments.

    Args:
      text: The bytes to learn from; all bytes are allowed.
      merges: The number of merges to learn, from 0 to 65280 (tokens then fit into 16 bits).

    Returns:
      The learnt vocabulary. It has fewer merges if no pair of tokens is left to join.

    Raises:
      ValueError: If `merges` is outside its range.

    References:
      Sennrich et al., Neural machine translation of rare words with subword units, 2016.

    >>> train(b"aaab aaab", 2).merges.tolist()
    [[97, 97], [97, 98]]
    """
    if not 0 <= merges <= MAX_VOCAB - 256:
        raise ValueError(f"merges must be from 0 to {MAX_VOCAB - 256}; got {merges}")
    # Merges do not cross words, so each distinct word is processed once, with its count as weight.
    frequencies = Counter(_WORD.findall(text))
    words, weights = [list(word) for word in frequencies], list(frequencies.values())
    # Invariant: `counts` has the weighted number of every adjacent pair, and `where` at least the
    # words that contain it. A merge therefore only touches these words, not the whole text.
    counts: dict[tuple[int, int], int] = defaultdict(int)
    where: dict[tuple[int, int], set[int]] = defaultdict(set)
    for k, word in enumerate(words):
        for pair in pairwise(word):
            counts[pair] += weights[k]
            where[pair].add(k)
    # Counts may decrease while a pair is in the heap, and changing an entry there would be slow.
    # The heap therefore has upper bounds, and an entry above its count is put back with the count.
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    out: list[tuple[int, int]] = []
    while heap and len(out) < merges:
        least, best = heapq.heappop(heap)
        if counts[best] != -least:
            if counts[best]:
                heapq.heappush(heap, (-counts[best], best))
            continue
        token, grown = 256 + len(out), set()
        out.append(best)
        # A word that no longer contains the pair after an earlier merge is still listed. Joining
        # does not change it, and the subtracted counts are added again.
        for k in where.pop(best):
            old = words[k]
            words[k] = new = _joined(old, best, token)
            for pair in pairwise(old):
                counts[pair] -= weights[k]
            for pair in pairwise(new):
                counts[pair] += weights[k]
                if token in pair:
                    where[pair].add(k)
                    grown.add(pair)
        for pair in grown:
            heapq.heappush(heap, (-counts[pair], pair))
    return Bpe(np.array(out, np.int32).reshape(-1, 2))


def encode(bpe: Bpe, text: bytes) -> UInt16[np.ndarray, " n"]:
    """Turns bytes into tokens; `decode` returns exactly those bytes.

    Args:
      bpe: The vocabulary.
      text: The bytes; all bytes are allowed.

    Returns:
      The tokens, uint16 `(n,)`.

    >>> encode(train(b"aaab aaab", 2), b"aab").tolist()
    [256, 98]
    """
    ranks = {(a, b): k for k, (a, b) in enumerate(bpe.merges.tolist())}
    encoded: dict[bytes, list[int]] = {}
    words = _WORD.findall(text)
    for word in words:
        if word not in encoded:
            encoded[word] = _encoded(list(word), ranks)
    # MAX_VOCAB tokens fit into 16 bits.
    return np.fromiter(chain.from_iterable(map(encoded.__getitem__, words)), np.uint16)


def _encoded(word: list[int], ranks: dict[tuple[int, int], int]) -> list[int]:
    """Applies merges to one word, the earliest learned first, until none applies."""
    none = len(ranks)
    while len(word) > 1:
        best = min(pairwise(word), key=lambda pair: ranks.get(pair, none))
        if best not in ranks:
            break
        word = _joined(word, best, 256 + ranks[best])
    return word


def _table(bpe: Bpe) -> list[bytes]:
    """Returns the bytes of each token."""
    table = [bytes([k]) for k in range(256)]
    for a, b in bpe.merges.tolist():
        table.append(table[a] + table[b])
    return table


def decode(bpe: Bpe, tokens: Int[np.ndarray, " n"]) -> bytes:
    """Turns tokens into their bytes.

    Args:
      bpe: The vocabulary.
      tokens: Integers `(n,)` from 0 to `bpe.vocab - 1`.

    Returns:
      The bytes.

    Raises:
      ValueError: If a token is not in the vocabulary.

    >>> bpe = train(b"the theory", 3)
    >>> decode(bpe, encode(bpe, b"other \\xff"))
    b'other \\xff'
    """
    tokens = np.asarray(tokens)
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < bpe.vocab:
        raise ValueError(
            f"tokens must be from 0 to {bpe.vocab - 1}; got {tokens.min()} to {tokens.max()}"
        )
    return b"".join(map(_table(bpe).__getitem__, tokens.tolist()))


def save(path: str | Path, bpe: Bpe) -> None:
    """Writes a vocabulary to a file, as JSON with a checksum.

    Equal vocabularies give equal bytes.
    """
    record = {"format": disk.FORMAT, "schema": _SCHEMA, "merges": bpe.merges.tolist()}
    disk.write_record(Path(path), record)


def load(path: str | Path) -> Bpe:
    """Reads a vocabulary that `save` wrote.

    Returns the vocabulary.

    Raises `DataError` if the file is missing or damaged, or contains anything else, such as merges
    of later tokens, or tokens of more than 33 bytes. It is a `ValueError`.
    """
    path = Path(path)
    with reading(path):
        record = disk.read_record(path, {"schema": str, "merges": list})
    if record["schema"] != _SCHEMA:
        raise DataError(f"{path} holds {record['schema'][:99]!r}; expected {_SCHEMA!r}")
    merges, lengths = record["merges"], [1] * 256
    if len(merges) > MAX_VOCAB - 256:
        raise DataError(f"{path} has {len(merges)} merges; expected at most {MAX_VOCAB - 256}")
    for k, pair in enumerate(merges):
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(type(token) is int and 0 <= token < 256 + k for token in pair)
        ):
            raise DataError(f"{path}: merge {k} is {repr(pair)[:99]}; expected two earlier tokens")
        lengths.append(lengths[pair[0]] + lengths[pair[1]])
        if lengths[-1] > MAX_TOKEN:
            raise DataError(f"{path}: merge {k} has {lengths[-1]} bytes; expected {MAX_TOKEN}")
    if len(set(map(tuple, merges))) != len(merges):
        raise DataError(f"{path} has a merge twice")
    return Bpe(np.array(merges, np.int32).reshape(-1, 2))
