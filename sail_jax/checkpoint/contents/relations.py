"""Compares the statements in config.json and the tokenizer with the tensors.

The other files of a checkpoint may contradict its tensors. For example, a config.json may be
outdated because the embedding was resized, or a quantization_config because the weights were
dequantised. A library that loads such a checkpoint fails or computes a different function.

`RELATIONS` defines each relation once. `contradictions` finds those that an input violates.
`following` corrects the entries of an output that the tensors determine, and returns the others.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from sail_jax.checkpoint.contents.layers import role, stacks
from sail_jax.checkpoint.contents.vocabulary import Vocabulary
from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.formats.quantized import KEYS, quantization
from sail_jax.checks import shortened
from sail_jax.configurations import LAYER_KEYS, Config, class_of, look_up
from sail_jax.merging.tensors import Like, Tensors, same_entries

TOKENIZER = "the tokenizer"
"""The key of a contradiction between the tokenizer and the embedding."""


Likes = Mapping[str, Like]


class Contradiction(NamedTuple):
    """A statement of another file that the tensors of a checkpoint contradict.

    Attributes:
      key: The entry of config.json with its dotted path, or the file, that makes the statement.
      stated: The stated value.
      shown: What the tensors show instead, in words.
      repair: The entries of config.json that agree with the tensors, by key within the same
        mapping; None removes an entry. Empty if the tensors do not determine the right value.
    """

    key: str
    stated: object
    shown: str
    repair: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        said = self.key if self.stated is None else f"{self.key} {_short(self.stated)}"
        return f"config.json states {said}, but {self.shown}"


class _Facts(NamedTuple):
    """The facts that a relation uses.

    Attributes:
      config: The mapping that describes the text tower: config.json, or its text_config.
      whole: All of config.json.
      kinds: The tower's tensors by their names with 0 for every number, so a pattern is tried once
        for all layers. A copy of a tied embedding is left out.
      everything: All tensors, by name.
    """

    config: Config
    whole: Config
    kinds: Mapping[str, list[Like]]
    everything: Likes

    def number(self, *keys: str) -> tuple[str, int] | None:
        """Returns the first of several entries that holds a whole number."""
        for key in keys:
            if type(value := self.config.get(key)) is int:
                return key, value
        return None

    def shapes(self, pattern: str, dimensions: int) -> list[Like]:
        """Returns the tensors with this number of dimensions and this pattern in their name."""
        found = re.compile(pattern).search
        kinds = (xs for kind, xs in self.kinds.items() if found(kind))
        return [x for xs in kinds for x in xs if len(x.shape) == dimensions]

    def tables(self, part: str) -> list[Like]:
        """Returns the matrices over tokens: "embedding" or "head"."""
        kinds = (xs for kind, xs in self.kinds.items() if role(kind) == part)
        return [x for xs in kinds for x in xs if len(x.shape) == 2]

    def names(self) -> Iterator[str]:
        """Returns the names of the tower's tensors."""
        return (x.name for xs in self.kinds.values() for x in xs)


Relation = Callable[[_Facts], Iterator[Contradiction]]
"""Yields the contradictions of one kind."""


def _rows(facts: _Facts) -> Iterator[Contradiction]:
    """Checks the vocabulary: `vocab_size` is the number of rows of embedding and head."""
    if (said := facts.number("vocab_size")) is None:
        return
    # A head without the embedding's padding has its own entry for the number of rows.
    if facts.number("unpadded_vocab_size") is not None:
        return
    for part in ("embedding", "head"):
        yield from _size(said, facts.tables(part), 0, "rows")


def _width(facts: _Facts) -> Iterator[Contradiction]:
    """Checks the width: `hidden_size` is the number of columns of the embedding."""
    # In some families the embedding's width differs from the stream's.
    if any(re.search(r"embed\w*_(size|dim|rank)$", key) for key in facts.config):
        return
    if (said := facts.number("hidden_size", "n_embd", "d_model", "dim")) is not None:
        yield from _size(said, facts.tables("embedding"), 1, "columns", repaired=False)


def _layers(facts: _Facts) -> Iterator[Contradiction]:
    """Checks the depth: `num_hidden_layers` counts the layers, and `layer_types` lists them."""
    counted = stacks(facts.names())
    if len(counted) != 1:
        return
    ((stack, layers),) = counted.items()
    # Layers in groups share their parameters.
    if re.search(r"\d", stack):
        return
    said = facts.number(*LAYER_KEYS)
    if said is not None and said[1] != layers:
        yield Contradiction(*said, f"{stack} has {layers} layers", {said[0]: layers})
    kinds = facts.config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) != layers:
        shown = f"{stack} has {layers} layers"
        yield Contradiction("layer_types", f"of {len(kinds)} layers", shown)


def _positions(facts: _Facts) -> Iterator[Contradiction]:
    """Positions: the entry counts the rows of a learned table of positions."""
    if (said := facts.number("n_positions", "max_position_embeddings")) is None:
        return
    names = r"(^|[./])(wpe|embed_positions|embeddings[./]position_embeddings?)[./]weight$"
    # Some families keep two rows before the first position, and do not count them.
    tables = facts.shapes(names, 2)
    if all(x.shape[0] - 2 != said[1] for x in tables):
        yield from _size(said, tables, 0, "rows")


def _segments(facts: _Facts) -> Iterator[Contradiction]:
    """Segments: `type_vocab_size` counts the rows of their table."""
    if (said := facts.number("type_vocab_size")) is not None:
        tables = facts.shapes(r"embeddings[./]token_type_embeddings[./]weight$", 2)
        yield from _size(said, tables, 0, "rows")


def _labels(facts: _Facts) -> Iterator[Contradiction]:
    """Checks labels: `id2label` lists, or `num_labels` counts, the outputs of a classifier."""
    kinds = ("ForSequenceClassification", "ForTokenClassification", "ForImageClassification")
    if not class_of(facts.whole).endswith(kinds):
        return
    names, count = facts.whole.get("id2label"), facts.whole.get("num_labels")
    # Without either, loaders assume two labels.
    said = len(names) if isinstance(names, Mapping) else count if type(count) is int else 2
    head = r"^(score|classifier|classifier[./]out_proj|classification_head[./]out_proj)[./]weight$"
    found = re.compile(head).search
    heads = [x for n, x in facts.everything.items() if found(n) and len(x.shape) == 2]
    if heads and all(x.shape[0] != said for x in heads):
        n = heads[0].shape[0]
        key = "id2label" if isinstance(names, Mapping) else "num_labels"
        labels = {str(i): f"LABEL_{i}" for i in range(n)} if n <= 1 << 16 else None
        repair = labels and {
            "id2label": labels,
            "label2id": {label: int(i) for i, label in labels.items()},
            **({"num_labels": n} if "num_labels" in facts.whole else {}),
        }
        stated = f"of {said} labels" if isinstance(names, Mapping) else said
        yield Contradiction(key, stated, f"{heads[0].name!r} has {n} rows", repair)


def _heads(facts: _Facts) -> Iterator[Contradiction]:
    """Heads: the rows of queries, keys and values are the number of heads times the head size."""
    said = facts.number("num_attention_heads")
    if said is None:
        return
    shared = facts.number("num_key_value_heads") or said
    size, width = facts.number("head_dim"), facts.number("hidden_size")
    # Some families have several sizes of heads, for kinds of layers or for values.
    several = any(re.search(r".head_dim$|attention_hidden_size", key) for key in facts.config)
    if several or (size is None and (width is None or said[1] < 1 or width[1] % said[1])):
        return
    for part, (key, heads) in (("q", said), ("k", shared), ("v", shared)):
        tables = facts.shapes(rf"(^|[./])self_attn[./]{part}_proj[./]weight$", 2)
        if not tables or heads < 1 or (size is not None and size[1] < 1):
            continue
        stated = f"{key} {heads}"
        if size is not None:
            each, stated = size[1], f"{stated} and head_dim {size[1]}"
        elif width is not None:
            each, stated = width[1] // said[1], f"{stated} and hidden_size {width[1]}"
        # Some families store a gate of equal size with the queries.
        fits = {heads * each, 2 * heads * each} if part == "q" else {heads * each}
        odd = [x for x in tables if x.shape[0] not in fits]
        if len(odd) == len(tables):
            n = odd[0].shape[0]
            yield Contradiction(stated, None, f"{odd[0].name!r} has {n} rows")


def _hidden(facts: _Facts) -> Iterator[Contradiction]:
    """Checks hidden units: `intermediate_size` is the number of units of the layers' MLPs."""
    if (said := facts.number("intermediate_size")) is not None:
        pattern = (
            r"([Ll]ayers?|h)[./]\d+[./](mlp[./](up|gate)_proj|intermediate[./]dense)[./]weight$"
        )
        tables = [x for x in facts.shapes(pattern, 2) if x.shape[0] != 2 * said[1]]
        yield from _size(said, tables, 0, "rows", repaired=False)


def _experts(facts: _Facts) -> Iterator[Contradiction]:
    """Experts: the entry counts the experts of a layer."""
    said = facts.number("num_local_experts", "num_experts", "n_routed_experts")
    if said is None:
        return
    counts: dict[str, int] = {}
    numbered = re.compile(r"(.*[./]experts)[./](\d{1,6})[./]")
    for name in facts.names():
        if match := numbered.match(name):
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    stacked = facts.shapes(r"[./]experts[./](gate_up_proj|down_proj|up_proj)$", 3)
    shown = {*counts.values(), *(x.shape[0] for x in stacked)}
    if shown and said[1] not in shown:
        n = min(shown)
        where = next(iter(counts), stacked[0].name if stacked else "")
        repair = {said[0]: n} if len(shown) == 1 else None
        yield Contradiction(*said, f"{where} has {n} experts", repair)


def _biases(facts: _Facts) -> Iterator[Contradiction]:
    """Biases: `attention_bias` and `mlp_bias` state whether projections have biases."""
    for key, module in (("attention_bias", "self_attn[./]q_proj"), ("mlp_bias", "mlp[./]up_proj")):
        stated = facts.config.get(key)
        weights = facts.shapes(rf"(^|[./]){module}[./]weight$", 2)
        biases = facts.shapes(rf"(^|[./]){module}[./]bias$", 1)
        if isinstance(stated, bool) and weights and bool(biases) != stated:
            shown = f"{weights[0].name!r} {'has a' if biases else 'lacks its'} bias"
            yield Contradiction(key, stated, shown, {key: bool(biases)})


def _tie(facts: _Facts) -> Iterator[Contradiction]:
    """Checks the tie: with `tie_word_embeddings`, the head equals the embedding.

    An untied head must be stored.
    """
    key, stated = "tie_word_embeddings", facts.whole.get("tie_word_embeddings")
    stated = facts.config.get(key) if stated is None else stated
    heads = facts.tables("head")
    if stated is True and heads:
        yield Contradiction(key, True, f"{heads[0].name!r} has its own values", {key: False})
    causal = class_of(facts.whole).endswith(("ForCausalLM", "LMHeadModel"))
    embeddings = facts.tables("embedding")
    # A missing entry has the default of its family.
    if stated is False and causal and embeddings and not heads:
        # Other families use other names for their heads.
        known = re.compile(r"head|logits|output|proj_out|generator").search
        if not any(known(kind) and not re.search(r"[./]0[./]", kind) for kind in facts.kinds):
            yield Contradiction(key, False, "no head is stored")


def _dtype(facts: _Facts) -> Iterator[Contradiction]:
    """Checks the dtype: the entry is the dtype of most floating-point entries."""
    sizes: dict[str, int] = {}
    for x in facts.everything.values():
        if x.dtype.kind == "f" or x.dtype.name.startswith(("bfloat", "float")):
            sizes[x.dtype.name] = sizes.get(x.dtype.name, 0) + math.prod(x.shape)
    for key in ("dtype", "torch_dtype"):
        stated = {
            part[key] for part in (facts.whole, facts.config) if isinstance(part.get(key), str)
        }
        most = max(sizes, key=sizes.__getitem__, default="")
        other = sorted(s for s in stated if s.removeprefix("torch.") not in (most, "auto"))
        if most and other:
            yield Contradiction(key, other[0], f"most numbers are {most}", {key: most})


def _quantized(facts: _Facts) -> Iterator[Contradiction]:
    """Checks quantisation: an entry describes codes, but the tensors are plain values."""
    for key in KEYS:
        about = facts.whole.get(key)
        if isinstance(about, Mapping) and about and not quantization(facts.everything, facts.whole):
            method = about.get("quant_method") or about.get("format")
            stated = f"of {method!r}" if isinstance(method, str) else None
            yield Contradiction(key, stated, "the tensors are values, not codes", {key: None})


RELATIONS: tuple[Relation, ...] = (
    _rows, _width, _layers, _positions, _segments, _labels, _heads, _hidden, _experts, _biases,
    _tie, _dtype, _quantized,
)  # fmt: skip
"""Every relation between config.json and tensors; their docstrings state them."""


def contradictions(
    config: Config, tensors: Likes, vocabulary: Vocabulary | None = None
) -> tuple[Contradiction, ...]:
    """Finds statements of config.json and the tokenizer that the tensors contradict.

    A relation counts as violated only if every tensor of its kind violates it, because some
    families use the same names for other things.

    Args:
      config: The content of config.json; empty without one.
      tensors: The tensors by name; only shapes and dtypes are used. A stored copy of a tied
        embedding must not be among them.
      vocabulary: The vocabulary of the tokenizer; None if it is unknown.

    Returns:
      The contradictions, in the order of `RELATIONS`.

    >>> from sail_jax.checkpoint.formats.open import open_checkpoint
    >>> import numpy as np, tempfile
    >>> from sail_jax.checkpoint import save_checkpoint
    >>> path = f"{tempfile.mkdtemp()}/model.safetensors"
    >>> save_checkpoint(path, {"model.embed_tokens.weight": np.ones((67, 4), np.float32)})
    >>> with open_checkpoint(path) as checkpoint:
    ...     print(*contradictions({"vocab_size": 64}, checkpoint.tensors))
    config.json states vocab_size 64, but 'model.embed_tokens.weight' has 67 rows
    """
    found: list[Contradiction] = []
    if config:
        inner = config.get("text_config")
        part = inner if isinstance(inner, Mapping) else config
        by_kind: dict[str, list[Like]] = {}
        for name, x in tensors.items():
            by_kind.setdefault(re.sub(r"\d+", "0", name), []).append(x)
        own = {kind: xs for kind, xs in by_kind.items() if not _OTHER.search(kind)}
        facts = _Facts(part, config, own, tensors)
        families = {str(x.get("model_type")) for x in (config, part)}
        for relation in RELATIONS:
            if not families & _OTHERWISE.get(relation, set()):
                found += relation(facts)
    tables = [x for n, x in tensors.items() if role(n) == "embedding" and len(x.shape) == 2]
    if vocabulary is not None and vocabulary.ids and tables:
        last = max(vocabulary.ids, key=vocabulary.ids.__getitem__)
        rows = max(x.shape[0] for x in tables)
        if vocabulary.ids[last] >= rows:
            shown = f"{tables[0].name!r} has {rows} rows"
            found.append(_Beyond(TOKENIZER, f"{last!r} = {vocabulary.ids[last]}", shown))
    return tuple(found)


def contradictions_of(
    checkpoint: Checkpoint, vocabulary: Vocabulary | None = None
) -> tuple[Contradiction, ...]:
    """Finds statements in an open checkpoint's files that its tensors contradict.

    Args:
      checkpoint: The checkpoint. Only a head that its config.json calls tied is read.
      vocabulary: The vocabulary of its tokenizer; None if it is unknown.

    Returns:
      The contradictions.

    Raises:
      ValueError: If config.json cannot be read.
    """
    config, tensors = config_of(checkpoint.extras), checkpoint.tensors
    if tied(config, tensors):
        tensors = {n: x for n, x in tensors.items() if role(n) != "head"}
    return contradictions(config, tensors, vocabulary)


def tied(config: Config, tensors: Tensors) -> bool | None:
    """Determines whether the head of a checkpoint is its embedding.

    If config.json states a tie but a head with other values is stored, the stored head is used.
    transformers loads such a checkpoint in the same way.

    Args:
      config: The content of config.json.
      tensors: The tensors, by name.

    Returns:
      The decision; None if the configuration does not state it.
    """
    stated = look_up(config, "tie_word_embeddings")
    heads = [n for n in tensors if role(n) == "head" and n.endswith("weight")]
    if stated is not True or not heads:
        return stated
    # If there are several tables, the head can only be a copy of one with its shape.
    head = tensors[heads[0]]
    tables = [x for n, x in tensors.items() if role(n) == "embedding" and x.shape == head.shape]
    return not tables or any(same_entries(head, table) for table in tables)


class _Beyond(Contradiction):
    """A tokenizer with tokens beyond the last row."""

    def __str__(self) -> str:
        return f"{self.key} has the token {self.stated}, but {self.shown}"


# Tensors of other towers than the text tower.
_OTHER = re.compile(r"vision|visual|image|img|audio|speech|video|qformer|timestamp", re.I)
# Families that define an entry differently, among the 580 of transformers 5.24.
_OTHERWISE: dict[Relation, set[str]] = {
    _rows: {
        *("mllama", "mllama_text_model", "moshi", "csm", "kyutai_speech_to_text", "molmo2"),
        *("molmo2_text", "blip-2"),
    },
    _positions: {"blip-2"},
    _layers: {"dory", "efficientnet", "xlstm"},
    _biases: {"fun_asr_nano", "granite_speech5_encoder"},
    _tie: {"bigbird_pegasus", "cpmant", "luke", "csm"},
}


def following(
    config: Config, tensors: Likes, vocabulary: Vocabulary | None = None
) -> tuple[dict[str, Any], tuple[Contradiction, ...]]:
    """Corrects the entries of a config.json that the tensors determine.

    Args:
      config: The content of config.json.
      tensors: The tensors of the output by name, as `contradictions` takes them.
      vocabulary: The vocabulary of the output's tokenizer; None if it is unknown.

    Returns:
      The new content, and the remaining contradictions.

    >>> import numpy as np
    >>> class Wte: name, shape, dtype = "wte.weight", (5, 2), np.dtype("float32")
    >>> following({"vocab_size": 4, "n_embd": 2}, {"wte.weight": Wte})
    ({'vocab_size': 5, 'n_embd': 2}, ())
    """
    new: dict[str, Any] = dict(config)
    inner = new.get("text_config")
    repairs: dict[str, Any] = {}
    for found in contradictions(config, tensors):
        # The first relation takes precedence: the embedding, if the head has another number of
        # rows.
        repairs = {**(found.repair or {}), **repairs}
    for key, value in repairs.items():
        # The entry is corrected in place.
        if isinstance(inner, Mapping) and key in inner:
            new["text_config"] = _put(new["text_config"], key, value)
        if not isinstance(inner, Mapping) or key in new or key not in inner:
            new = _put(new, key, value)
    return new, contradictions(new, tensors, vocabulary)


def _put(config: Config, key: str, value: Any) -> dict[str, Any]:
    """Returns a copy with a new value for an entry, or without the entry if the value is None."""
    if value is None:
        return {k: v for k, v in config.items() if k != key}
    return {**config, key: value}


def _size(
    said: tuple[str, int], tables: list[Any], axis: int, what: str, *, repaired: bool = True
) -> Iterator[Contradiction]:
    """Returns a contradiction if an entry states a size that no tensor has."""
    key, stated = said
    sizes = {x.shape[axis] for x in tables}
    if tables and stated not in sizes:
        n = tables[0].shape[axis]
        repair = {key: n} if repaired and len(sizes) == 1 else None
        yield Contradiction(key, stated, f"{tables[0].name!r} has {n} {what}", repair)


def _short(value: object) -> str:
    """Returns a value of config.json, for messages."""
    text = value if isinstance(value, str) and value.startswith("of ") else repr(value)
    return shortened(text, 60)
