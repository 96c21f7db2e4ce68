"""Unifies the vocabularies of several models, and determines the source of each token's rows.

Hugging Face's files are read: tokenizer.json, or vocab.json with added_tokens.json if nothing has
to be written. The output has the ids of one tokenizer, the donor, so the donor's tokens keep their
rows. For "base" and "union" the donor is `base_model`, or without one the first model; otherwise it
is the given model.

"union" appends tokens that other models *added* to their tokenizers. It does not merge cores:
entries of another BPE, WordPiece or Unigram core, appended as added tokens, would match raw text
that the core never saw in this form. A core with entries that are missing in the donor is therefore
refused.

If a model has no row for a token, the rules are mergekit's. The first of these applies: the entry
in `tokens`; the row of the only model with one; the base's row; the mean over the models with one;
zeros. A token with an id beyond a model's embedding has no row there. If no model has a row for
such a token of the donor, the token is omitted if it was added; if it belongs to the core, the
merge is refused.

With `transplant`, such a row is made for the model instead: from rows of tokens that it shares with
a donor of the row, as the mean of its own rows, or as zeros. The donor may then be a network of
another width that is not merged. `vocabulary.counterparts` matches equivalent tokens.

Rows without a token (padding to a round number) are kept, unless `pad_to_multiple_of` is given.
In that case rows are added after the last token up to the multiple, each the mean of the model's
other rows. mergekit always drops rows without a token. The padding of a donor that is not merged is
not in the output.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sail_jax.checkpoint.contents.vocabulary import PLAIN, Vocabulary, counterparts
from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.recipe.parts import Ref, Tokenizer
from sail_jax.checkpoint.recipe.yaml_tree import RecipeError
from sail_jax.checkpoint.sources.rows import FILL, ZERO
from sail_jax.checkpoint.sources.transplanted import Making


class Rowing(NamedTuple):
    """The source of each row of the output's vocabulary, for one model; see `rows.Rows`.

    Attributes:
      part: For each output row, the index of the model that provides it, or `ZERO` or `FILL`;
        `[rows]`.
      row: For each output row, the row in that model's tensor; `[rows]`.
      means: The output rows that are instead the mean of several (part, row).
      made: The rows made from a donor's rows, with the donor. They are additional parts, with
        indices after the models'.
    """

    part: np.ndarray
    row: np.ndarray
    means: Mapping[int, tuple[tuple[int, int], ...]]
    made: tuple[tuple[Ref, Making], ...] = ()


class OutputVocabulary(NamedTuple):
    """The vocabulary of the output, and how the models' vocabularies relate to it.

    Attributes:
      ids: The id of each token in the output.
      rows: The number of rows of the embedding of the output.
      fill: The first row that is a mean of the others; `rows` if there is none.
      donor: The model whose tokenizer is the basis of the output's.
      base: The base; None without one.
      same: Whether all vocabularies agree and the recipe requests no change, so every row keeps its
        position.
      vocabularies: The vocabulary of each model.
      found: The ids of the output's tokens in each model.
      spec: The tokenizer of the recipe.
      files: The tokenizer files of the output that differ from the donor's, by name.
      notes: Notes for the user, a sentence each.
    """

    ids: Mapping[str, int]
    rows: int
    fill: int
    donor: Ref
    base: Ref | None
    same: bool
    vocabularies: Mapping[Ref, Vocabulary]
    found: Mapping[Ref, Mapping[str, int]]
    spec: Tokenizer
    files: Mapping[str, bytes]
    notes: tuple[str, ...]

    def rowings(
        self, sizes: Mapping[Ref, int], donors: Mapping[Ref, int] | None = None
    ) -> dict[Ref, Rowing]:
        """Lists for each model the rows of its tensor over the output's vocabulary.

        Args:
          sizes: The number of rows of each model's tensor; `Rowing.part` numbers the models in this
            order.
          donors: The same for models that only provide rows for transplants. None if no rows can
            be made, for example for tensors that are not matrices.

        Returns:
          The rows of each model.

        Raises:
          RecipeError: If the recipe takes a token's row from a model that is not merged or has no
            such row. Also if a row must be made and no token is shared.
        """
        merged = list(sizes)
        transplanted = self.spec.transplant is not None and donors is not None
        sizes = {**sizes, **(donors or {})}
        keys = list(sizes)
        # own[k, i]: the row of model k for row i of the output, or -1.
        own = np.full((len(keys), self.rows), -1, np.int64)
        for k, key in enumerate(keys):
            ids = self.found[key]
            for token, i in self.ids.items():
                j = ids.get(token, -1)
                own[k, i] = j if j < sizes[key] else -1
        token_rows = np.zeros(self.rows, bool)
        token_rows[list(self.ids.values())] = True
        # Rows without a token keep their number if they have no token in the model either.
        pads = np.flatnonzero(~token_rows[: self.fill])
        for k, key in enumerate(keys):
            taken = np.array(list(self.vocabularies[key].ids.values()), np.int64)
            free = np.setdiff1d(pads[pads < sizes[key]], taken)
            own[k, free] = free
        part, row, means = self._defaults(own, keys)
        chosen, everywhere = self._chosen(merged, sizes)
        rowings = {}
        for k, key in enumerate(merged):
            present = own[k] >= 0
            parts, rows = np.where(present, k, part), np.where(present, own[k], row)
            mine = {i: m for i, m in means.items() if not present[i]}
            made: list[tuple[Ref, Making]] = []
            if transplanted:
                # Padding that is missing in a model cannot be made.
                lacks, mine = ~present & token_rows, {}
                made = self._made(own, k, keys, len(merged), lacks, part, row, parts, rows)
            for i, (p, r) in chosen.items():
                if not present[i] or i in everywhere:
                    parts[i], rows[i] = p, r
                    mine.pop(i, None)
            parts[self.fill :] = FILL
            rowings[key] = Rowing(parts, rows, mine, tuple(made))
        return rowings

    def _made(
        self, own: np.ndarray, k: int, keys: list[Ref], count: int, lacks: np.ndarray,
        part: np.ndarray, row: np.ndarray, parts: np.ndarray, rows: np.ndarray,
    ) -> list[tuple[Ref, Making]]:  # fmt: skip
        """Inserts rows made for tokens that are missing in model k, and lists them.

        `part` and `row` locate a token's row, and `parts` and `rows` of the model are updated.
        """
        method, made = self.spec.transplant, []
        if method in ("mean", "zero"):
            parts[lacks] = FILL if method == "mean" else ZERO
            return made
        assert method is not None
        for donor in np.unique(part[lacks & (part >= 0)]):
            new = np.flatnonzero(lacks & (part == donor))
            # Padding in both models is not a token.
            shared = np.intersect1d(
                np.flatnonzero((own[k] >= 0) & (own[donor] >= 0)), list(self.ids.values())
            )
            if not len(shared):
                who = f"{keys[k]} and {keys[donor]} share no token that has a row in both"
                raise RecipeError(self.spec.where, f"transplant: {who}")
            making = Making(row[new], own[donor, shared], own[k, shared], method, self.spec.k)
            parts[new], rows[new] = count + len(made), np.arange(len(new))
            made.append((keys[donor], making))
        return made

    def _defaults(
        self, own: np.ndarray, keys: list[Ref]
    ) -> tuple[np.ndarray, np.ndarray, dict[int, tuple[tuple[int, int], ...]]]:
        """Finds the rows for models without a token: parts, rows, and which rows are means."""
        has = own >= 0
        first = has.argmax(0)
        # Later ones take precedence: the base's row, else the donor's, else the first model's.
        for key in (self.donor, self.base):
            if key is not None and key in keys:
                k = keys.index(key)
                first = np.where(has[k], k, first)
        row = np.take_along_axis(own, first[None], 0)[0]
        part = np.where(has.any(0), first, ZERO)
        # Only tokens of at least two models require a mean; for a single model, its row was used
        # above.
        shared = has.sum(0) > 1
        # If the base has the token, its row is used instead of a mean.
        if self.base is not None and self.base in keys:
            shared &= ~has[keys.index(self.base)]
        # If all models have the token, each keeps its own row, and no default is needed.
        partial = shared & ~has.all(0)
        means = {
            int(i): tuple((int(k), int(own[k, i])) for k in np.flatnonzero(has[:, i]))
            for i in np.flatnonzero(partial)
        }
        return part, row, means

    def _chosen(
        self, keys: list[Ref], sizes: Mapping[Ref, int]
    ) -> tuple[dict[int, tuple[int, int]], set[int]]:
        """Finds the rows that the recipe sets for tokens, and that replace a model's own rows."""
        chosen: dict[int, tuple[int, int]] = {}
        tokens = self.spec.tokens
        for text, token in tokens.items():
            i = self.ids[text]
            source = token.source
            if source.kind == "zero":
                chosen[i] = (ZERO, 0)
                continue
            if source.model is None or source.model not in keys:
                who = f"{source.model} does not take part in the merge of every embedding"
                raise RecipeError(token.where, f"no row for the token {text!r}: {who}")
            k = keys.index(source.model)
            row = source.token_id
            if row is None:
                row = self.vocabularies[source.model].ids.get(source.token or text, -1)
            if not 0 <= row < sizes[source.model]:
                name = repr(source.token or text) if source.token_id is None else f"id {row}"
                raise RecipeError(token.where, f"{source.model}: the row of {name} is missing")
            chosen[i] = (k, row)
        return chosen, {self.ids[text] for text, token in tokens.items() if token.force}


def output_vocabulary(
    spec: Tokenizer,
    models: Sequence[Ref],
    base: Ref | None,
    vocabularies: Mapping[Ref, Vocabulary | None],
    sizes: Mapping[Ref, int],
    extras: Mapping[str, Path | bytes],
    names: Mapping[Ref, Mapping[str, str]],
) -> OutputVocabulary:
    """Makes the vocabulary of the output from the models' vocabularies.

    Args:
      spec: The tokenizer of the recipe.
      models: The models that are merged, with the base.
      base: The base; None without one.
      vocabularies: The vocabulary of each model; None if it cannot be read, in which case the
        donor's is assumed.
      sizes: The number of rows of the embedding of each model.
      extras: The plain files of the donor, by name.
      names: The special tokens of each model by their roles; used only with `transplant`.

    Returns:
      The vocabulary, with its files and the means to match rows.

    Raises:
      RecipeError: If there is no tokenizer to start from, if cores differ under "union", if a model
        and the donor share no token, if a token of the donor's core has no row, or if tokens are
        added without a tokenizer.json.
    """
    donor = spec.source if isinstance(spec.source, Ref) else base or models[0]
    notes: list[str] = []
    if base is None and not isinstance(spec.source, Ref):
        notes.append(f"tokenizer: no base_model is given, so the ids come from {donor}")
    start = vocabularies.get(donor)
    if start is None:
        raise RecipeError(
            spec.where, f"{donor} has neither tokenizer.json nor vocab.json to start from"
        )
    resolved: dict[Ref, Vocabulary] = {}
    for ref in models:
        vocabulary = vocabularies.get(ref)
        if vocabulary is None:
            notes.append(f"tokenizer: {ref} has none that can be read; {donor}'s is assumed")
        resolved[ref] = vocabulary or start
    resolved[donor] = start
    ids, added = dict(start.ids), dict(start.added)
    _drop_rowless(ids, added, donor, resolved, sizes, spec.where, notes)
    if spec.source == "union":
        for ref in models:
            _append(ids, added, ref, donor, resolved[ref], start, sizes[ref], spec.where, notes)
    for text, token in spec.tokens.items():
        if text not in ids:
            _add(ids, added, text, {"content": text, **PLAIN}, start)
        elif not token.force and all(text in resolved[ref].ids for ref in models):
            notes.append(f"{token.where}: every model has {text!r}; it has no effect without force")
    found = {ref: vocabulary.ids for ref, vocabulary in resolved.items()}
    if spec.transplant is not None:
        output = Vocabulary(ids, added, start.document, start.source)
        found = {
            ref: counterparts(output, vocabulary, names[donor], names[ref])
            for ref, vocabulary in resolved.items()
        }
    for ref in models:
        common = len({found[ref][text] for text in ids if text in found[ref]})
        if not common:
            raise RecipeError(spec.where, f"{ref} and {donor} share no token")
        if common < len(resolved[ref].ids):
            lost = len(resolved[ref].ids) - common
            notes.append(f"tokenizer: {lost} tokens of {ref} are not in the output")
        lacks = sum(text not in found[ref] for text in ids)
        if lacks and spec.transplant is not None:
            how = spec.transplant + f", k {spec.k}" * (spec.transplant in ("omp", "nearest"))
            notes.append(f"tokenizer: {ref} gets rows for {lacks} tokens ({how}); {common} shared")
    used = max(ids.values()) + 1
    if spec.pad_to_multiple_of is None:
        # The padding of a network that is not merged has no meaning in the merged ones.
        own = spec.transplant is None or donor in models
        rows = fill = max(used, sizes.get(donor, 0) if own else 0)
    else:
        fill, multiple = used, spec.pad_to_multiple_of
        rows = -(-used // multiple) * multiple  # rounded up
    same = spec.pad_to_multiple_of is None and not spec.tokens
    same = same and all(resolved[ref].ids == ids for ref in models)
    if not same:
        notes.append(f"tokenizer: {len(ids)} tokens in {rows} rows, by token")
    changed = ids != start.ids
    files = _files(ids, added, start, extras, spec.where) if changed else {}
    return OutputVocabulary(
        ids, rows, fill, donor, base, same, resolved, found, spec, files, tuple(notes)
    )


def _drop_rowless(ids, added, donor, resolved, sizes, where, notes) -> None:
    """Removes the donor's added tokens without a row; refuses such tokens of its core."""
    beyond = [
        text
        for text, i in ids.items()
        if i >= sizes.get(donor, i + 1)
        and not any(
            resolved[ref].ids.get(text, n) < n for ref, n in sizes.items() if ref in resolved
        )
    ]
    core = [text for text in beyond if text not in added]
    if core:
        raise RecipeError(
            where,
            f"{donor}: {len(core)} tokens of the tokenizer's core, such as {core[0]!r}, have ids"
            f" beyond the {sizes[donor]} rows of the embedding",
        )
    for text in beyond:
        notes.append(f"tokenizer: {text!r} (id {ids[text]}) has no row anywhere and is left out")
        del ids[text], added[text]


def _append(ids, added, ref, donor, vocabulary, start, size, where, notes) -> None:
    """Adds the tokens that a model added to its tokenizer; refuses a core with other entries."""
    new = [text for text, i in vocabulary.ids.items() if text not in ids and i < size]
    core = [text for text in new if text not in vocabulary.added and text not in start.ids]
    if core:
        raise RecipeError(
            where,
            f"union: the core of {ref}'s tokenizer has {len(core)} entries that {donor}'s lacks,"
            f" such as {core[0]!r}. As added tokens they would match other texts; choose one"
            " tokenizer (source: base, or a model), and the other rows are matched by token",
        )
    for text in sorted(new, key=vocabulary.ids.__getitem__):
        _add(ids, added, text, vocabulary.added[text], start)
    for text, entry in vocabulary.added.items():
        existing = added.get(text)
        if existing is not None and any(existing.get(k) != entry.get(k) for k in PLAIN):
            notes.append(f"tokenizer: {text!r} is added with other settings in {ref}; first kept")


def _add(ids, added, text, entry, start) -> None:
    """Adds a token under the next free id, after the core's."""
    core = sum(token not in start.added for token in start.ids)
    i = max(max(ids.values(), default=-1) + 1, core)
    ids[text] = i
    added[text] = {**entry, "id": i}


def _files(ids, added, start, extras, where) -> dict[str, bytes]:
    """Writes the donor's tokenizer files after adding or removing tokens."""
    if start.document is None:
        raise RecipeError(where, f"adding tokens needs a tokenizer.json next to {start.source}")
    entries = sorted(added.values(), key=lambda entry: entry["id"])
    files = {"tokenizer.json": dump({**start.document, "added_tokens": entries})}
    if "tokenizer_config.json" in extras:
        config = config_of(extras, "tokenizer_config.json")
        if "added_tokens_decoder" in config:
            config["added_tokens_decoder"] = {
                str(entry["id"]): {k: v for k, v in entry.items() if k != "id"} for entry in entries
            }
            files["tokenizer_config.json"] = dump(config)
    if "added_tokens.json" in extras:
        files["added_tokens.json"] = dump({text: entry["id"] for text, entry in added.items()})
    return files


def dump(document: Mapping[str, Any]) -> bytes:
    """Writes a JSON object as the bytes of a file."""
    return json.dumps(document, ensure_ascii=False, indent=2).encode() + b"\n"
