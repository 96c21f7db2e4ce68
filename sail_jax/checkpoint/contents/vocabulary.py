"""The vocabulary of a model, read from the files of its tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sail_jax.checkpoint.formats.extras import config_of

PLAIN = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
    "special": False,
}
"""The settings of an added token that says nothing of them."""


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
      ValueError: If a file is not a tokenizer's, or if ids are invalid or used twice; the message
        names the file.
    """
    if "tokenizer.json" in extras:
        file, document = extras["tokenizer.json"], config_of(extras, "tokenizer.json")
        # What an earlier step made has content, and no path.
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
    """Checks that a vocabulary has tokens, and that each has an id of its own."""
    seen: dict[int, str] = {}
    for text, i in vocabulary.ids.items():
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < 1 << 31:
            raise ValueError(f"{vocabulary.source}: the token {text!r} has no valid id, but {i!r}")
        if seen.setdefault(i, text) != text:
            raise ValueError(
                f"{vocabulary.source}: the tokens {seen[i]!r} and {text!r} share the id {i}"
            )
    if not vocabulary.ids:
        raise ValueError(f"{vocabulary.source}: an empty vocabulary")
    return vocabulary
