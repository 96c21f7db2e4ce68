"""Encodes text as the tokens of a Hugging Face checkpoint, by its tokenizer.json.

The byte-level byte-pair encoding of GPT-2, GPT-NeoX and OLMo is computed here. All other kinds,
such as those of Llama, Qwen and Mistral, require the package tokenizers. `bpe` learns vocabularies
from text.

References:
  Radford et al., Language models are unsupervised multitask learners, 2019.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from experiments.data.files import DataError, reading
from sail_jax import disk
from sail_jax.checkpoint.contents.encoding import encoder
from sail_jax.checkpoint.contents.vocabulary import byte_table
from sail_jax.checkpoint.formats.files import strict_json

# The maximum number of bytes of a vocabulary file.
MAX_FILE = 1 << 27
_SPACE = "\t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
# The two expressions together are GPT-2's pattern. It has classes of Unicode unknown to `re`. The
# second expression therefore matches a text's shape, with one character for each character of the
# text: L for a letter, N for a number, a space for itself, w for other white space, O for
# everything else.
_SHORT = re.compile("'(?:s|t|re|ve|m|ll|d)")
_WORD = re.compile(" ?L+| ?N+| ?O+|[ w]+(?![^ w])|[ w]+")

Encode = Callable[[bytes], Int32[np.ndarray, " n"]]


@dataclass(frozen=True)
class _Packaged:
    """Encodes with the package tokenizers; `spelled` is the function that `encoder` makes."""

    spelled: Callable[[str, bool], list[int]]

    def __call__(self, text: bytes) -> Int32[np.ndarray, " n"]:
        spelt = text.decode()
        with reading("the text"):
            return np.array(self.spelled(spelt, False), np.int32)


def following(encode: Callable[[bytes], Any], before: bytes, text: bytes) -> Any:
    """Encodes a text that continues another one.

    Some tokenizers, such as Llama 2's, begin every text with a space, or join characters across the
    border. The tokens of the continuation are then those after the tokens of the text before, if
    the joined text begins with these.

    Args:
      encode: A function from bytes in UTF-8 to tokens `(n,)`, such as `load` returns.
      before: The text before.
      text: The continuation.

    Returns:
      The tokens of the continuation `(n,)`.
    """
    if isinstance(encode, _Packaged) and before:
        whole, first = encode(before + text), encode(before)
        if np.array_equal(whole[: len(first)], first):
            return whole[len(first) :]
    return encode(text)


def load(path: str | Path) -> Encode:
    """Reads a tokenizer.json and returns the function that encodes with it.

    Special tokens of the vocabulary, such as <|endoftext|>, are not recognised in text.

    Args:
      path: The file tokenizer.json.

    Returns:
      A function from bytes in UTF-8 to tokens, int32 `(n,)`. It raises `UnicodeDecodeError`, a
      `ValueError`, for other bytes.

    Raises:
      DataError: If the file is missing or damaged, or the package tokenizers is required and not
        installed. It is a `ValueError`.
    """
    path = Path(path)
    with reading(path):
        document = disk.read_bytes(path, MAX_FILE)
        record = strict_json(document, path)
    model = record.get("model")
    if not isinstance(model, dict):
        raise DataError(f"{path}: expected a tokenizer.json, whose model is a mapping")
    before, normal = record.get("pre_tokenizer") or {}, record.get("normalizer") or {}
    vocab: Any = model.get("vocab")
    merges: Any = model.get("merges")
    plain = (
        model.get("type") == "BPE"
        and isinstance(vocab, dict)
        and isinstance(merges, list)
        and not model.get("byte_fallback")
        and before.get("type") == "ByteLevel"
        and before.get("use_regex", True)
        and not before.get("add_prefix_space")
        and normal.get("type", "NFC") == "NFC"
    )
    if not plain:
        with reading(path):
            return _Packaged(encoder(document, str(path)))
    ranks: dict[tuple[str, str], int] = {}
    for k, merge in enumerate(merges):
        pair = tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge)
        if len(pair) != 2 or "".join(pair) not in vocab:
            raise DataError(f"{path}: merge {k} is {str(merge)[:99]!r}; expected two known tokens")
        ranks[pair] = k
    table = byte_table()
    if lost := [b for b, char in table.items() if char not in vocab]:
        raise DataError(f"{path}: the vocabulary has no token for the byte {lost[0]}")
    encoded: dict[str, list[int]] = {}

    def encode(text: bytes) -> Int32[np.ndarray, " n"]:
        spelt, out = text.decode(), []
        if normal:
            spelt = unicodedata.normalize("NFC", spelt)
        for word in words(spelt):
            if word not in encoded:
                chars = [table[b] for b in word.encode()]
                encoded[word] = [vocab[part] for part in _merged(chars, ranks)]
            out += encoded[word]
        return np.array(out, np.int32)

    return encode


def words(text: str) -> Iterator[str]:
    """Splits a text into the words that merges never cross, as GPT-2 does.

    Args:
      text: The text.

    Yields:
      The words in order. Joined, they are the text again. A word includes one space before it.

    >>> list(words("It's 10  o'clock"))
    ['It', "'s", ' 10', ' ', ' o', "'", 'clock']
    """
    # Text and shape have the same number of characters, so a match in one is a position in the
    # other.
    shape, at = "".join(map(_shape, text)), 0
    while at < len(text):
        match = _SHORT.match(text, at) or _WORD.match(shape, at)
        # Every kind of character can begin a word, so there is always a match.
        assert match is not None
        yield text[at : match.end()]
        at = match.end()


def _shape(char: str) -> str:
    """Returns the kind of a character, in the form that `_WORD` matches."""
    if char == " ":
        return " "
    if char in _SPACE:
        return "w"
    kind = unicodedata.category(char)[0]
    return kind if kind in "LN" else "O"


def _merged(parts: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Joins the pair of parts with the earliest merge, until no merge applies."""
    none = len(ranks)
    while len(parts) > 1:
        best = min(pairwise(parts), key=lambda pair: ranks.get(pair, none))
        if best not in ranks:
            break
        out, k = [], 0
        while k < len(parts):
            joined = tuple(parts[k : k + 2]) == best
            out.append("".join(best) if joined else parts[k])
            k += 1 + joined
        parts = out
    return parts
