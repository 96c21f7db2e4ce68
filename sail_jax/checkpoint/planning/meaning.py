"""Checks that the inputs of a merge have the same architectures, configurations and tokens.

Tensors with equal names and shapes may belong to different architectures, and rows with equal
numbers to different tokens. Such a merge runs, but its result is useless as a network. So
different architectures and tokens are refused, and other differences are listed.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from sail_jax.checkpoint.contents.vocabulary import Vocabulary, read_vocabulary
from sail_jax.checkpoint.formats.extras import content
from sail_jax.checkpoint.planning.inputs import Input
from sail_jax.checkpoint.recipe.parts import Recipe, Ref
from sail_jax.checkpoint.recipe.yaml_tree import RecipeError
from sail_jax.checks import argument
from sail_jax.configurations import LAYER_KEYS, Config, class_of, differences
from sail_jax.disk import StoreError

# Entries that are compared with the tensors instead, or derived from them in the output.
_FOLLOWS = {"vocab_size", "tie_word_embeddings", "num_labels", *LAYER_KEYS}


class Vocabularies:
    """The vocabularies of inputs. Each file is read once, even if several inputs share it.

    Args:
      notes: A list that collects the tokenizers that cannot be read.
    """

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes
        self._by_content: dict[bytes, Vocabulary | None] = {}
        self._by_ref: dict[Ref, Vocabulary | None] = {}

    def __call__(self, model: Input) -> Vocabulary | None:
        """Returns the vocabulary of an input.

        Args:
          model: The input.

        Returns:
          The vocabulary; None if no readable file contains one.
        """
        if model.ref not in self._by_ref:
            self._by_ref[model.ref] = None
            try:
                self._by_ref[model.ref] = self.read(model)
            except (StoreError, ValueError) as error:
                self._notes.append(f"{model.ref}: its tokenizer is not compared: {error}")
        return self._by_ref[model.ref]

    def read(self, model: Input) -> Vocabulary | None:
        """Returns the vocabulary of an input for a merge that requires it.

        Args:
          model: The input.

        Returns:
          The vocabulary; None without such a file.

        Raises:
          StoreError: If a file of the tokenizer cannot be read.
          ValueError: If it does not contain a vocabulary.
        """
        extras = model.opened.extras
        digest = hashlib.sha256()
        for name in _FILES:
            if name in extras:
                digest.update(b"%s\0%s\0" % (name.encode(), content(extras[name])))
        key = digest.digest()
        if key not in self._by_content:
            self._by_content[key] = read_vocabulary(extras)
        return self._by_content[key]


_FILES = ("tokenizer.json", "vocab.json", "added_tokens.json")


def compare(first: Input, others: Iterable[Input], recipe: Recipe, allow_crimes: bool) -> list[str]:
    """Compares the configuration of each input with the first one.

    Args:
      first: The input that provides the output's config.json.
      others: The inputs that are merged with it.
      recipe: The recipe, for places in messages.
      allow_crimes: Whether different architectures may be merged.

    Returns:
      One sentence for each difference that may change the function of networks with equal tensors.

    Raises:
      RecipeError: If an input has a different architecture, unless `allow_crimes`.
    """
    notes = []
    for model in others:
        if not first.config or not model.config:
            continue
        mine, other = _family(first.config), _family(model.config)
        if mine and other and mine != other:
            message = f"{model.ref} has the architecture {other!r}, but {first.ref} has {mine!r}"
            if not allow_crimes:
                raise RecipeError(
                    recipe.place_of(model.ref),
                    f"{message}; use {argument('allow_crimes', 'True')} to merge them regardless",
                )
            notes.append(message)
        for key, (stated, otherwise) in differences(first.config, model.config).items():
            last = key.rpartition(".")[2]
            if last in _FOLLOWS or "quantization_config" in key or key.startswith("compression_"):
                continue
            notes.append(
                f"{key} is {_short(otherwise)} in {model.ref} and {_short(stated)} in {first.ref}: "
                "the output has the latter"
            )
    return notes


def _family(config: Config) -> str:
    """Returns the architecture in a config.json: its model_type, else its first class."""
    family = config.get("model_type") or class_of(config)
    return family if isinstance(family, str) else ""


def match_tokens(
    rows: int,
    tables: Mapping[Ref, int],
    donor: Input,
    inputs: Mapping[Ref, Input],
    vocabularies: Vocabularies,
    recipe: Recipe,
) -> tuple[list[str], list[str]]:
    """Checks that rows that are merged by their numbers belong to the same tokens.

    Args:
      rows: The number of rows of the output.
      tables: The inputs that provide rows, with the number of rows of each.
      donor: The input that provides the output's tokenizer.
      inputs: All inputs.
      vocabularies: Their vocabularies.
      recipe: The recipe, for places in messages.

    Returns:
      Sentences about rows with a token in only one tokenizer, and about tokens that are missing in
      the output.

    Raises:
      RecipeError: If a row belongs to different tokens.
    """
    own = vocabularies(donor)
    notes: list[str] = []
    losses: list[str] = []
    if own is None:
        return notes, losses
    token_at = {i: token for token, i in own.ids.items()}
    for ref, size in tables.items():
        theirs = vocabularies(inputs[ref])
        if theirs is None or theirs is own:
            continue
        merged = sorted((i, token) for token, i in theirs.ids.items() if i < min(rows, size))
        other = [(i, token) for i, token in merged if token_at.get(i, token) != token]
        if other:
            i, token = other[0]
            core = any(t not in own.ids and t not in theirs.added for t in theirs.ids)
            raise RecipeError(
                recipe.place_of(ref),
                f"{_count(len(other), 'row')} would be merged with rows of other tokens, such as "
                f"{i}: {token!r} here, {token_at[i]!r} in {donor.ref}; write "
                f"tokenizer: {{source: {'base' if core else 'union'}}} to match rows by token",
            )
        extra = [token for i, token in merged if i not in token_at]
        if extra:
            notes.append(
                f"{_count(len(extra), 'token')} of {ref}, such as {extra[0]!r}, have rows that are "
                f"merged, but are not in the output's tokenizer ({donor.ref}'s)"
            )
        ends = {i for i, _ in merged}
        lacking = [t for t, i in own.ids.items() if i < min(rows, size) and i not in ends]
        if lacking:
            notes.append(
                f"{ref} lacks {_count(len(lacking), 'token')} of {donor.ref}, such as "
                f"{lacking[0]!r}: its rows of these numbers are merged with theirs"
            )
        cut = sorted((i, token) for token, i in theirs.ids.items() if rows <= i < size)
        if cut:
            losses.append(
                f"{_count(len(cut), 'token')} of {ref}, such as {cut[0][1]!r}, have rows beyond "
                f"the {rows} of the output"
            )
    return notes, losses


def _count(n: int, what: str) -> str:
    """Returns a number with its noun."""
    return f"{n} {what}{'s' * (n != 1)}"


def _short(value: object) -> str:
    """Returns a value of config.json, for messages."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def sentences(losses: Mapping[str, Sequence[str]]) -> list[str]:
    """Writes losses as one sentence for each kind.

    Args:
      losses: The names of tensors, by the loss that they share.

    Returns:
      The sentences.
    """
    out = []
    for text, names in losses.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        out.append(f"{names[0]}{more}: {text}" if names else text)
    return out
