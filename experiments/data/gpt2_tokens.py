"""Text in the tokens of a Hugging Face checkpoint: byte-level BPE as of GPT-2, GPT-NeoX and OLMo,
from its own tokenizer.json (Radford et al., 2019)."""

import re
import unicodedata
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from experiments.data.files import DataError, reading
from sail_jax import disk
from sail_jax.checkpoint.formats.files import strict_json

MAX_FILE = 1 << 27  # bytes
_SPACE = "\t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_SHORT = re.compile("'(?:s|t|re|ve|m|ll|d)")
# of a text's shape: letters L, numbers N, a space, other white space w, all else O
_WORD = re.compile(" ?L+| ?N+| ?O+|[ w]+(?![^ w])|[ w]+")

Encode = Callable[[bytes], Int32[np.ndarray, " n"]]


def load(path: str | Path) -> Encode:
    """What turns UTF-8 into tokens. `DataError` (a `ValueError`) for another kind of tokenizer.

    Text is text: what was added to the vocabulary (such as <|endoftext|>) is not looked for.
    """
    path = Path(path)
    with reading(path):
        record = strict_json(disk.read_bytes(path, MAX_FILE), path)
    model = record.get("model")
    model = model if isinstance(model, dict) else {}
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
        raise DataError(f"{path}: expected byte-level BPE as GPT-2 and OLMo have it")
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


def byte_table() -> dict[int, str]:
    """The character that stands for each byte: itself where it can be seen, else one from 256 on.

    >>> byte_table()[ord("a")], byte_table()[ord(" ")]
    ('a', 'Ġ')
    """
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in seen]
    return {b: chr(b) for b in seen} | {b: chr(256 + k) for k, b in enumerate(hidden)}


def words(text: str) -> Iterator[str]:
    """What merges stay within.

    >>> list(words("It's 10  o'clock"))
    ['It', "'s", ' 10', ' ', ' o', "'", 'clock']
    """
    shape, at = "".join(map(_shape, text)), 0
    while at < len(text):
        match = _SHORT.match(text, at) or _WORD.match(shape, at)
        assert match is not None  # every shape begins one
        yield text[at : match.end()]
        at = match.end()


def _shape(char: str) -> str:
    if char == " ":
        return " "
    if char in _SPACE:
        return "w"
    kind = unicodedata.category(char)[0]
    return kind if kind in "LN" else "O"


def _merged(parts: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
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
