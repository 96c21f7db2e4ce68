"""What recipes are made of, and how the smaller of these are read."""

import json
import re
from collections.abc import Mapping
from itertools import chain
from os import PathLike, fspath
from typing import Any, NamedTuple

from sail_jax.checkpoint.recipe import mergekit, nodes
from sail_jax.checkpoint.recipe.settings import Setting, check_value
from sail_jax.checkpoint.recipe.yaml_tree import Node, RecipeError, Where
from sail_jax.checks import nearest
from sail_jax.merging.merge import Merge

__all__ = [
    "Align",
    "Grow",
    "Module",
    "Recipe",
    "Ref",
    "Slice",
    "Source",
    "Token",
    "Tokenizer",
    "read_dtype",
    "read_layers",
    "read_path",
    "read_ref",
    "read_renames",
    "read_steps",
    "read_tokenizer",
    "read_tokenizer_source",
]

ALIGNMENT = ("method", "family", "spaces", "within", "weights", "seed", "max_sweeps")
"""What a recipe may say of an alignment: the options of `align_maps` that are not of a run."""
DTYPES = ("float64", "float32", "float16", "bfloat16")


class Grow(NamedTuple):
    """A model made larger before it is merged; `to` (a path or a mapping) and knobs as JSON."""

    to: str
    method: str
    seed: int
    knobs: str


class Align(NamedTuple):
    """A model put into the basis of another before it is merged; knobs as JSON."""

    to: "Ref"
    knobs: str


class Ref(NamedTuple):
    """A checkpoint: a path, and in mergekit's notation path[@revision][+lora[@revision]]; `steps`
    are what is done to it before it is merged, in this order."""

    path: str
    revision: str | None = None
    lora: str | None = None
    lora_revision: str | None = None
    steps: tuple[Grow | Align, ...] = ()

    @property
    def checkpoint(self) -> str:
        return self.path if self.revision is None else f"{self.path}@{self.revision}"

    @property
    def adapter(self) -> str | None:
        if self.lora is None or self.lora_revision is None:
            return self.lora
        return f"{self.lora}@{self.lora_revision}"

    def __str__(self) -> str:
        name = self.checkpoint if self.adapter is None else f"{self.checkpoint}+{self.adapter}"
        for step in self.steps:
            done = f"grown by {step.method}" if isinstance(step, Grow) else f"aligned to {step.to}"
            name = f"{name} ({done})"
        return name


Parameters = Mapping[str, Setting]


class Source(NamedTuple):
    """A model, or layers a to b - 1 of it, with its own parameters."""

    model: Ref
    layers: tuple[int, int] | None
    parameters: Parameters
    where: Where


class Slice(NamedTuple):
    """Layers of the output, merged from those of the sources one by one."""

    sources: tuple[Source, ...]
    base_model: Ref | None
    parameters: Parameters
    where: Where


class Module(NamedTuple):
    """A tower of the output (name "": all of it) as slices one after another."""

    name: str
    slices: tuple[Slice, ...]
    parameters: Parameters
    where: Where


class Token(NamedTuple):
    """Where a token's rows come from: `kind` "zero", or "model" with the token (None: itself) or
    the row in `model`; forced on every model, or only on those that lack it."""

    kind: str
    model: Ref | None
    token: str | None
    token_id: int | None
    force: bool
    where: Where


class Tokenizer(NamedTuple):
    """source: "union", "base" or a model."""

    source: str | Ref
    tokens: Mapping[str, Token]
    pad_to_multiple_of: int | None
    where: Where


class Recipe(NamedTuple):
    """A recipe that has been checked as far as it can be without its checkpoints.

    merge: of all tensors, if it was given as a value instead of a name and parameters.
    """

    method: str
    modules: tuple[Module, ...]
    base_model: Ref | None
    parameters: Parameters
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    compat: str = "mergekit"
    scope: str | None = None
    seed: int = 0
    rename: Mapping[str, str] = {}
    missing: str = "error"
    extra: str = "error"
    text: str = ""
    where: Where = Where()
    places: Mapping[str, Where] = {}
    merge: Merge | None = None

    @property
    def entry(self) -> mergekit.Entry:
        """What is known of the method."""
        return mergekit.entry(self.method) if self.merge is None else mergekit.entry_of(self.merge)

    def at(self, key: str) -> Where:
        """Where a top-level key was given."""
        return self.places.get(key, self.where._replace(path=key))

    def settings(self) -> list[tuple[str, Setting]]:
        """All parameters set anywhere."""
        scopes: list[Parameters] = [self.parameters]
        for module in self.modules:
            scopes.append(module.parameters)
            for part in module.slices:
                scopes += [part.parameters, *(source.parameters for source in part.sources)]
        return list(chain.from_iterable(scope.items() for scope in scopes))

    def models(self) -> list[Ref]:
        """Every checkpoint named, the base first, then as listed."""
        found = [] if self.base_model is None else [self.base_model]
        for module in self.modules:
            for part in module.slices:
                found += [source.model for source in part.sources]
                found += [] if part.base_model is None else [part.base_model]
        if self.tokenizer is not None:
            named = [self.tokenizer.source, *(t.model for t in self.tokenizer.tokens.values())]
            found += [model for model in named if isinstance(model, Ref)]
        return list(dict.fromkeys(found))


def read_dtype(node: Node) -> str:
    name = nodes.text(node).removeprefix("torch.")
    if name not in DTYPES:
        why = "; whole numbers would cut the weights" if name.startswith("int") else ""
        raise RecipeError(node.where, f"no dtype to merge in: {name!r}{nearest(name, DTYPES)}{why}")
    return name


def read_renames(node: Node) -> dict[str, str]:
    found = {}
    for pattern, part in nodes.mapping(node, None, "patterns and their replacements").items():
        text = nodes.text(part)
        try:
            re.sub(pattern, text, "")
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError, IndexError) as error:
            raise RecipeError(part.key, f"no regular expression: {error}") from error
        found[pattern] = text
    return found


def read_layers(node: Node) -> tuple[int, int]:
    parts = node.value
    if not isinstance(parts, list) or len(parts) != 2:
        raise RecipeError(node.where, f"expected [first, last + 1]; got {nodes.kind(node)}")
    a, b = (check_value(part.value, "integer", part.where) for part in parts)
    if not 0 <= a < b:
        raise RecipeError(node.where, f"expected 0 <= first < last + 1; got [{a}, {b}]")
    if b > 1_000_000:
        raise RecipeError(node.where, f"no model has {b} layers")
    return a, b


def read_ref(node: Node) -> Ref:
    if isinstance(node.value, str):
        path, plus, lora = node.value.partition("+")
        if "+" in lora or node.value.count("@") > 1 + bool(plus):
            raise RecipeError(node.where, "expected path[@revision][+lora[@revision]]")
        found = _revision(lora, node.where) if plus else (None, None)
        return Ref(*_revision(path, node.where), lora=found[0], lora_revision=found[1])
    what = "a model, as path[@revision][+lora] or"
    keys = ["model", "lora", "override_architecture", "grow", "align"]
    inside = nodes.mapping(node, keys, what, "model")
    if inside.get("override_architecture", node._replace(value=None)).value is not None:
        where = inside["override_architecture"].key
        raise RecipeError(where, "not needed and not read: tensors are matched by name")
    lora, revision = nodes.optional(inside, "lora", _path_node) or (None, None)
    ref = Ref(*_path_node(inside["model"]), lora=lora, lora_revision=revision)
    return read_steps(ref, inside)


def read_steps(ref: Ref, inside: Mapping[str, Node]) -> Ref:
    """The model with what its keys `grow` and `align` ask for: growing first, then aligning."""
    found = [
        nodes.optional(inside, key, read) for key, read in (("grow", _grow), ("align", _align))
    ]
    steps = tuple(step for step in found if step is not None)
    if steps and ref.steps:
        where = next(inside[key].key for key in ("grow", "align") if key in inside)
        raise RecipeError(where, f"{ref} already says what is done to it, inside of model")
    return ref._replace(steps=steps) if steps else ref


def _grow(node: Node) -> Grow:
    from sail_jax.growth.named import METHODS

    inside = nodes.mapping(node, None, "a growth", "to")
    method = nodes.optional(inside, "method", nodes.one_of(*METHODS)) or "lemon"
    by = nodes.optional(inside, "depth_method", nodes.one_of(*METHODS))
    others = (by or METHODS[method].deepens_by,)
    knobs = {*METHODS[method].knobs, *(k for m in others if m for k in METHODS[m].knobs)}
    keys = ["to", "method", "depth_method", "seed", "untie", "require_lossless", *sorted(knobs)]
    nodes.mapping(node, keys, f"a growth by {method}")
    given = {k: _plain(part) for k, part in inside.items() if k not in ("to", "method", "seed")}
    to = _plain(inside["to"])
    if not isinstance(to, (str, dict)) or not to:
        raise RecipeError(
            inside["to"].where,
            f"expected a config.json, factors or entries of one; got {nodes.kind(inside['to'])}",
        )
    seed = nodes.optional(inside, "seed", nodes.natural) or 0
    return Grow(_json(to), method, seed, _json(given))


def _align(node: Node) -> Align:
    inside = nodes.mapping(node, ["to", *ALIGNMENT], "an alignment", "to")
    given = {k: _plain(part) for k, part in inside.items() if k != "to"}
    return Align(read_ref(inside["to"]), _json(given))


def _plain(node: Node) -> Any:
    """What a part of a recipe says, without where."""
    if isinstance(node.value, dict):
        return {key: _plain(part) for key, part in node.value.items()}
    return [_plain(part) for part in node.value] if isinstance(node.value, list) else node.value


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _path_node(node: Node) -> tuple[str, str | None]:
    if isinstance(node.value, str):
        return _revision(node.value, node.where)
    inside = nodes.mapping(node, ["path", "revision"], "a path", "path")
    return nodes.text(inside["path"]), nodes.optional(inside, "revision", nodes.text)


def _revision(text: str, where: Where) -> tuple[str, str | None]:
    path, at, revision = text.partition("@")
    if not path or "\0" in text or (at and (not revision or "@" in revision)):
        raise RecipeError(where, f"expected path[@revision]; got {text!r}")
    return path, revision or None


def read_path(model: Any, where: str) -> Ref:
    if isinstance(model, Ref):
        return model
    if not isinstance(model, (str, PathLike)):
        raise RecipeError(Where(where), f"expected a path, got {model!r}")
    return Ref(str(fspath(model)))


def _source(node: Node) -> str | Ref:
    return node.value if node.value in ("union", "base") else read_ref(node)


def read_tokenizer_source(node: Node) -> Tokenizer:
    return Tokenizer(_source(node), {}, None, node.key)


def read_tokenizer(node: Node) -> Tokenizer:
    inside = nodes.mapping(node, ["source", "tokens", "pad_to_multiple_of"], "a tokenizer")
    multiple = nodes.optional(inside, "pad_to_multiple_of", nodes.natural)
    if multiple is not None and not 0 < multiple <= 1 << 20:
        raise RecipeError(inside["pad_to_multiple_of"].where, "expected between 1 and 1048576")
    tokens = {}
    for token, part in (
        nodes.optional(inside, "tokens", lambda n: nodes.mapping(n, None, "tokens")) or {}
    ).items():
        given = nodes.mapping(part, ["source", "force"], "a token", "source")
        force = (
            check_value(given["force"].value, "boolean", part.where) if "force" in given else False
        )
        tokens[token] = _token(given["source"], force)
    return Tokenizer(
        nodes.optional(inside, "source", _source) or "union", tokens, multiple, node.key
    )


def _token(node: Node, force: bool) -> Token:
    if not isinstance(node.value, dict) or "kind" not in node.value:
        return Token("model", read_ref(node), None, None, force, node.where)
    kind = nodes.one_of("zero", "model_token")(node.value["kind"])
    if kind == "zero":
        nodes.mapping(node, ["kind"], "a zero embedding")
        return Token("zero", None, None, None, force, node.where)
    keys = ["kind", "model", "token", "token_id"]
    inside = nodes.mapping(node, keys, "a token of a model", "model")
    token, token_id = (
        nodes.optional(inside, "token", nodes.text),
        nodes.optional(inside, "token_id", nodes.natural),
    )
    if (token is None) == (token_id is None):
        raise RecipeError(node.where, "expected one of token, token_id")
    return Token("model", read_ref(inside["model"]), token, token_id, force, node.where)
