"""Reads the vocabulary of a model from the files of its tokenizer, and finds equivalent tokens."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sail_jax.checkpoint.formats.extras import config_of

PLAIN = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
    "special": False,
}
"""The default settings of an added token."""


class Vocabulary(NamedTuple):
    """The vocabulary of a tokenizer.

    Attributes:
      ids: The id of each token, added ones included.
      added: The entries of the tokens that were added to the core, by token.
      document: The parsed tokenizer.json; None if it was not read from one.
      source: The path of the file, for messages.
    """

    ids: Mapping[str, int]
    added: Mapping[str, Mapping[str, Any]]
    document: Mapping[str, Any] | None
    source: str


def read_vocabulary(extras: Mapping[str, Path | bytes]) -> Vocabulary | None:
    """Reads the vocabulary from the files of a tokenizer.

    Args:
      extras: The files, by name.

    Returns:
      The vocabulary; None if there is neither tokenizer.json nor vocab.json.

    Raises:
      ValueError: If a file does not belong to a tokenizer, or if ids are invalid or used twice; the
        message contains the path of the file.
    """
    if "tokenizer.json" in extras:
        file, document = extras["tokenizer.json"], config_of(extras, "tokenizer.json")
        # A file made by an earlier step has contents but no path.
        path = "tokenizer.json" if isinstance(file, bytes) else file
        model = document.get("model")
        core = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(core, list):
            if not all(isinstance(e, list) and e and isinstance(e[0], str) for e in core):
                raise ValueError(f"{path}: expected [token, score] in the list model.vocab")
            # Unigram models list their tokens in the order of the ids.
            core = {e[0]: i for i, e in enumerate(core)}
        added = document.get("added_tokens") or []
        if not isinstance(core, dict) or not isinstance(added, list):
            raise ValueError(f"{path}: expected model.vocab and added_tokens of a tokenizer")
        entries: dict[str, Mapping[str, Any]] = {}
        for entry in added:
            if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
                raise ValueError(f"{path}: expected added_tokens with id and content")
            entries[entry["content"]] = entry
        ids: dict[str, Any] = {**core}
        ids |= {text: entry.get("id") for text, entry in entries.items()}
        return _checked(Vocabulary(ids, entries, document, str(path)))
    if "vocab.json" in extras:
        added = config_of(extras, "added_tokens.json")
        ids = config_of(extras, "vocab.json") | added
        entries = {text: {"id": i, "content": text, **PLAIN} for text, i in added.items()}
        return _checked(Vocabulary(ids, entries, None, str(extras["vocab.json"])))
    return None


def _checked(vocabulary: Vocabulary) -> Vocabulary:
    """Checks that a vocabulary has tokens, and that their ids are valid and unique."""
    seen: dict[int, str] = {}
    for text, i in vocabulary.ids.items():
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < 1 << 31:
            raise ValueError(f"{vocabulary.source}: the token {text!r} has the invalid id {i!r}")
        if seen.setdefault(i, text) != text:
            raise ValueError(
                f"{vocabulary.source}: the tokens {seen[i]!r} and {text!r} share the id {i}"
            )
    if not vocabulary.ids:
        raise ValueError(f"{vocabulary.source}: an empty vocabulary")
    return vocabulary


ROLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""The roles of special tokens, by their keys in a tokenizer's files."""

Style = Literal["bytes", "words", ""]


def roles(extras: Mapping[str, Path | bytes]) -> dict[str, str]:
    """Reads the special tokens from the files of a tokenizer.

    Args:
      extras: The files, by name.

    Returns:
      The text of each token, by its role, such as "eos_token".

    Raises:
      ValueError: If a file is not a JSON object.
    """
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        stated = config_of(extras, file)
        for role in ROLES:
            token = stated.get(role)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                found[role] = text
    return found


def counterparts(
    tokens: Vocabulary,
    own: Vocabulary,
    names: Mapping[str, str],
    own_names: Mapping[str, str],
) -> dict[str, int]:
    """Finds the tokens of one vocabulary that mean the same as another vocabulary's tokens.

    Tokens with equal text are the same. If one vocabulary spells bytes (like GPT-2's) and the other
    marks the beginnings of words (like SentencePiece's), tokens with equal bytes are the same. A
    special token without an equal text corresponds to the token with its role.

    Args:
      tokens: The vocabulary.
      own: The vocabulary that is searched.
      names: The special tokens of `tokens`, by their roles.
      own_names: The special tokens of `own`, by their roles.

    Returns:
      The ids in `own`, by the text of the equivalent token in `tokens`.
    """
    # A token with several roles is listed under the first of them.
    named = {names[role]: role for role in reversed(ROLES) if role in names}
    styles = {_style(tokens), _style(own)}
    spelled: dict[bytes, int] = {}
    if styles == {"bytes", "words"}:
        for text, i in own.ids.items():
            if text not in own.added:
                word = _bytes(text, _style(own))
                # A letter takes precedence over the token of its byte.
                if word not in spelled or not _BYTE.fullmatch(text):
                    spelled[word] = i
    found: dict[str, int] = {}
    for text in tokens.ids:
        special = text in named or text in tokens.added
        if spelled and not special:
            i = spelled.get(_bytes(text, _style(tokens)))
        else:
            i = own.ids.get(text)
        if i is None and text in named:
            i = own.ids.get(own_names.get(named[text], ""))
        if i is not None:
            found[text] = i
    return found


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_table() -> dict[int, str]:
    """Lists the character that stands for each byte in a vocabulary like GPT-2's.

    A byte that is a visible character of Latin-1 stands for itself. The others, such as the space,
    have the characters from 256 on, in order.

    Returns:
      The characters by bytes, 0 to 255.

    >>> byte_table()[ord("a")], byte_table()[ord(" ")]
    ('a', 'Ġ')
    """
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in seen]
    return {b: chr(b) for b in seen} | {b: chr(256 + k) for k, b in enumerate(hidden)}


_LETTERS = {letter: byte for byte, letter in byte_table().items()}


def _bytes(text: str, style: Style) -> bytes:
    """Returns the bytes that a token of a core stands for."""
    if style == "bytes" and all(letter in _LETTERS for letter in text):
        return bytes(_LETTERS[letter] for letter in text)
    if style == "words" and (byte := _BYTE.fullmatch(text)):
        return bytes([int(byte[1], 16)])
    return text.replace("\u2581", " ").encode("utf-8", "surrogatepass")


def _style(vocabulary: Vocabulary) -> Style:
    """Returns how a core spells: GPT-2's bytes, or words after a mark; "" if unknown."""
    document = vocabulary.document or {}
    steps = [document.get(key) for key in ("pre_tokenizer", "decoder", "normalizer")]
    kinds = {kind for step in steps for kind in _kinds(step)}
    if "ByteLevel" in kinds:
        return "bytes"
    return "words" if any(text.startswith("\u2581") for text in vocabulary.ids) else ""


def _kinds(step: object) -> Iterator[object]:
    """Returns the types of a tokenizer's step, and of the steps in a sequence."""
    if isinstance(step, dict):
        yield step.get("type")
        for key in ("pretokenizers", "decoders", "normalizers"):
            inner = step.get(key)
            for part in inner if isinstance(inner, list) else []:
                if isinstance(part, dict):
                    yield part.get("type")
