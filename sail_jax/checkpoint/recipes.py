"""Recipes: what is to be merged and how, from mergekit's YAML or from Python.

The grammar is mergekit's, read strictly: a key, method, parameter or filter that would have no
effect is an error with its line and the nearest valid name. Beyond it, at the top level:

    compat: mergekit | paper        whose defaults and variants; mergekit's in a recipe
    scope: tensor | tree            of methods that have one
    seed: 0                         of methods that draw
    rename: {pattern: replacement}  regular expressions, applied to the tensor names of every input
    missing: error | skip | base    where an input lacks a tensor: it abstains, or counts as base
    extra: error | ignore           tensors that the output's model lacks

and filters may be "re:..." or "glob:..." patterns. Where mergekit fails or is unsound we differ: a
single {filter, value} mapping is a setting; lists of bools are steps, not interpolated numbers;
`dtype` only says what is written (arithmetic is in float32 and better), and `out_dtype` wins.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from os import PathLike, fspath
from typing import Any, NamedTuple

from sail_jax.checkpoint import mergekit
from sail_jax.checkpoint.settings import Condition, Setting, check_value, matcher
from sail_jax.checkpoint.yaml_tree import Node, RecipeError, Where, compose
from sail_jax.checks import nearest

__all__ = [
    "Module",
    "Recipe",
    "RecipeError",
    "Ref",
    "Slice",
    "Source",
    "Token",
    "Tokenizer",
    "parse",
    "simple",
]

DTYPES = ("float64", "float32", "float16", "bfloat16")
_TOP = (
    *("merge_method", "models", "slices", "modules", "base_model", "dtype", "out_dtype"),
    *("parameters", "tokenizer_source", "tokenizer", "chat_template"),
    *("compat", "scope", "seed", "rename", "missing", "extra"),
)


class Ref(NamedTuple):
    """A checkpoint: a path, and in mergekit's notation path[@revision][+lora[@revision]]."""

    path: str
    revision: str | None = None
    lora: str | None = None
    lora_revision: str | None = None

    @property
    def checkpoint(self) -> str:
        return self.path if self.revision is None else f"{self.path}@{self.revision}"

    @property
    def adapter(self) -> str | None:
        if self.lora is None or self.lora_revision is None:
            return self.lora
        return f"{self.lora}@{self.lora_revision}"

    def __str__(self) -> str:
        return self.checkpoint if self.adapter is None else f"{self.checkpoint}+{self.adapter}"


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
    """A recipe that has been checked as far as it can be without its checkpoints."""

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


def parse(text: str | bytes, file: str = "recipe") -> Recipe:
    """The recipe in a YAML text; RecipeError, with line, key path and remedy, for anything else.

    `file` is what errors call it.

    >>> recipe = parse('''
    ... merge_method: linear
    ... models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: [0, 1]}}]
    ... ''')
    >>> recipe.method, [str(ref) for ref in recipe.models()]
    ('linear', ['a', 'b'])
    """
    root = compose(text, file)
    top = _mapping(root, _TOP, "a recipe", "merge_method")
    name = _text(top["merge_method"])
    try:
        entry = mergekit.entry(name)
    except ValueError as error:
        raise RecipeError(top["merge_method"].where, str(error)) from error
    forms = [form for form in ("models", "slices", "modules") if form in top]
    if len(forms) != 1:
        where = top[forms[1]].key if forms else root.where
        got = " and ".join(forms) or "none"
        raise RecipeError(where, f"expected exactly one of models, slices, modules; got {got}")
    reader = _Reader(entry)
    modules = reader.modules(top, forms[0])
    if "tokenizer" in top and "tokenizer_source" in top:
        raise RecipeError(
            top["tokenizer_source"].key, "not beside tokenizer; move it to its source"
        )
    recipe = Recipe(
        method=name,
        modules=modules,
        base_model=_optional(top, "base_model", _ref),
        parameters=reader.parameters(top, False),
        dtype=_optional(top, "dtype", _dtype),
        out_dtype=_optional(top, "out_dtype", _dtype),
        tokenizer=_optional(top, "tokenizer", _tokenizer)
        or _optional(top, "tokenizer_source", _tokenizer_source),
        chat_template=_optional(top, "chat_template", _text),
        compat=_optional(top, "compat", _one_of("mergekit", "paper")) or "mergekit",
        scope=_optional(top, "scope", _one_of("tensor", "tree")),
        seed=_optional(top, "seed", _natural) or 0,
        rename=_optional(top, "rename", _renames) or {},
        missing=_optional(top, "missing", _one_of("error", "skip", "base")) or "error",
        extra=_optional(top, "extra", _one_of("error", "ignore")) or "error",
        text=text if isinstance(text, str) else text.decode("utf-8-sig"),
        where=root.where,
        places={key: node.key for key, node in top.items()},
    )
    return check(recipe)


def simple(
    models: Sequence[str | PathLike | Ref],
    base: str | PathLike | Ref | None = None,
    method: str = "linear",
    *,
    weights: Sequence[float] | None = None,
    compat: str = "paper",
    **knobs: Any,
) -> Recipe:
    """The recipe of one method over whole models, without YAML.

    knobs: those of the method (its own names or mergekit's), a number or, for density, gamma,
    epsilon and scale where models have their own, a sequence with one per model; and of the
    recipe: dtype, out_dtype, scope, seed, rename, missing, extra, tokenizer ("union", "base" or a
    model), chat_template. Paths are taken as they are, "+" and "@" included. RecipeError for what
    is unknown or does not fit.

    >>> simple(["a", "b"], "base", "ties", density=[0.2, 0.5]).modules[0].slices[0].sources[1].model
    Ref(path='b', revision=None, lora=None, lora_revision=None)
    """
    try:
        entry = mergekit.entry(method)
    except ValueError as error:
        raise RecipeError(Where("method"), str(error)) from error
    if isinstance(models, (str, PathLike)) or not isinstance(models, Sequence):
        raise RecipeError(Where("models"), f"expected a sequence of paths, got {models!r}")
    refs = [_path(model, f"models[{i}]") for i, model in enumerate(models)]
    top = {
        "dtype": _dtype,
        "out_dtype": _dtype,
        "chat_template": _text,
        "scope": _one_of("tensor", "tree"),
        "seed": _natural,
        "rename": _renames,
        "missing": _one_of("error", "skip", "base"),
        "extra": _one_of("error", "ignore"),
        "tokenizer": _tokenizer_source,
    }
    fields = {
        key: top[key](_node(knobs.pop(key), key)) if knobs[key] is not None else knobs.pop(key)
        for key in list(knobs)
        if key in top
    }
    fields = {key: value for key, value in fields.items() if value is not None}
    if weights is not None:
        knobs["weight"] = list(weights)
    by_knob = {p.knob: p.name for p in entry.parameters.values() if p.knob is not None}
    given: dict[str, Setting] = {}
    each: list[dict[str, Setting]] = [{} for _ in refs]
    for key, value in knobs.items():
        name = key if key in entry.parameters else by_knob.get(key)
        if name is None:
            known = sorted(p.knob or p.name for p in entry.parameters.values())
            raise RecipeError(Where(key), f"unknown knob of {method}{nearest(key, [*known, *top])}")
        parameter = entry.parameters[name]
        if not isinstance(value, Sequence) or isinstance(value, str):
            given[name] = (Condition(None, (_checked(value, parameter, Where(key)),), Where(key)),)
            continue
        if not parameter.per_model or len(value) != len(refs):
            expected = f"one number per model ({len(refs)})" if parameter.per_model else "one value"
            raise RecipeError(Where(key), f"expected {expected}, got {len(value)}")
        for i, one in enumerate(value):
            where = Where(f"{key}[{i}]")
            each[i][name] = (Condition(None, (_checked(one, parameter, where),), where),)
    sources = tuple(Source(ref, None, each[i], Where(f"models[{i}]")) for i, ref in enumerate(refs))
    whole = Slice(sources, None, {}, Where("models"))
    base_model = None if base is None else _path(base, "base")
    places = {"base_model": Where("base"), "merge_method": Where("method")}
    compat = _one_of("mergekit", "paper")(_node(compat, "compat"))
    module = Module("", (whole,), {}, Where("models"))
    recipe = Recipe(method, (module,), base_model, given, compat=compat, places=places, **fields)
    return check(recipe)


def check(recipe: Recipe) -> Recipe:
    """The recipe, if its method can be applied to as many models with what is set; RecipeError."""
    entry = mergekit.entry(recipe.method)
    for module in recipe.modules:
        for part in module.slices:
            _check_inputs(recipe, entry, module, part)
    used = {}
    for name, setting in recipe.settings():
        knob = entry.parameters[name].knob
        if knob is not None and used.setdefault(knob, name) != name:
            where = setting[0].where
            raise RecipeError(where, f"{name} and {used[knob]} are one parameter; set one of them")
    if recipe.scope is not None and mergekit.accepts(recipe.method, "scope") is False:
        raise RecipeError(recipe.at("scope"), f"{recipe.method} has no scope")
    template = recipe.chat_template
    literal = template is not None and len(template) >= 20 and "{" in template
    if template is not None and not literal and template not in TEMPLATES:
        hint = nearest(template[:40], TEMPLATES)
        raise RecipeError(recipe.at("chat_template"), f"expected a name or a Jinja template{hint}")
    return recipe


TEMPLATES = ("auto", "alpaca", "chatml", "exaone", "llama3", "mistral")


def voters(recipe: Recipe, part: Slice) -> tuple[list[Source], Source | None]:
    """Those of a slice whose tensors are merged, and what their base_model is as a source."""
    entry = mergekit.entry(recipe.method)
    base = part.base_model or recipe.base_model
    listed = next((source for source in part.sources if source.model == base), None)
    others = [source for source in part.sources if source.model != base]
    if base is None or entry.base == "input":
        return list(part.sources), listed
    ranges = list(dict.fromkeys(source.layers for source in part.sources))
    if listed is None and len(ranges) > 1:
        raise RecipeError(part.where, f"which layers of {base}? list it among the sources")
    unlisted = Source(base, *ranges or [None], {}, recipe.at("base_model"))
    if entry.base == "first":
        return [listed or unlisted, *others], listed
    if entry.base == "joins":
        joins = recipe.compat == "mergekit" and listed is None
        return [*part.sources, *([unlisted] if joins else [])], listed
    return others, listed or unlisted


def _check_inputs(recipe: Recipe, entry: mergekit.Entry, module: Module, part: Slice) -> None:
    base = part.base_model or recipe.base_model
    if base is None and entry.base in ("required", "first"):
        raise RecipeError(part.where, f"{entry.name} needs base_model, which is missing")
    sources, listed = voters(recipe, part)
    if not entry.least <= len(sources) <= (entry.most or len(sources)):
        expected = f"{entry.least}" if entry.most == entry.least else f"at least {entry.least}"
        besides = " besides base_model" if entry.base in ("required", "optional") else ""
        besides = ", base_model included" if entry.base == "first" else besides
        raise RecipeError(
            part.where, f"{entry.name} merges {expected} model(s){besides}; got {len(sources)}"
        )
    if listed is not None and listed not in sources:
        for name, setting in listed.parameters.items():
            raise RecipeError(
                setting[0].where,
                f"{name} of the base model is not read by {entry.name}: the base has no vote",
            )
    if recipe.compat != "mergekit" and not any(
        "weight" in scope for scope in _scopes(recipe, module, part, sources)
    ):
        return
    for parameter in entry.parameters.values():
        required = parameter.default is mergekit.REQUIRED or (
            parameter.name == "weight" and recipe.compat != "mergekit"
        )
        for source in sources if required else ():
            own = [source.parameters] if parameter.per_model else []
            if any(parameter.name in s for s in own + _scopes(recipe, module, part, [])):
                continue
            who = f" for {source.model}" if parameter.per_model else ""
            where = source.where if parameter.per_model else recipe.at("merge_method")
            raise RecipeError(
                where, f"{entry.name} needs the parameter {parameter.name!r}, missing{who}"
            )


def _scopes(
    recipe: Recipe, module: Module, part: Slice, sources: Sequence[Source]
) -> list[Parameters]:
    outer = [part.parameters, module.parameters, recipe.parameters]
    return [*(source.parameters for source in sources), *outer]


class _Reader:
    """Reads what depends on the method: models, slices, modules and their parameters."""

    def __init__(self, entry: mergekit.Entry):
        self.entry = entry

    def modules(self, top: dict[str, Node], form: str) -> tuple[Module, ...]:
        node = top[form]
        if form != "modules":
            slices = self.models(node) if form == "models" else self.slices(node)
            return (Module("", slices, {}, node.key),)
        found = []
        for name, part in _mapping(node, None, "modules by name").items():
            inside = _mapping(part, ["models", "slices", "parameters"], "a module")
            if ("models" in inside) == ("slices" in inside):
                raise RecipeError(part.key, "expected one of models, slices")
            slices = self.models(inside["models"]) if "models" in inside else None
            slices = slices or self.slices(inside["slices"])
            found.append(Module(name, slices, self.parameters(inside, False), part.key))
        return tuple(found)

    def models(self, node: Node) -> tuple[Slice, ...]:
        sources = []
        for part in _sequence(node, "models"):
            inside = _mapping(part, ["model", "parameters"], "a model", "model")
            ref = _ref(inside["model"])
            sources.append(Source(ref, None, self.parameters(inside, True), part.where))
        return (Slice(tuple(sources), None, {}, node.key),)

    def slices(self, node: Node) -> tuple[Slice, ...]:
        found = []
        for part in _sequence(node, "slices"):
            keys = ["sources", "base_model", "parameters", "residual_weight"]
            inside = _mapping(part, keys, "a slice", "sources")
            if "residual_weight" in inside:
                raise RecipeError(
                    inside["residual_weight"].key, "has no effect, in mergekit either"
                )
            sources = []
            for source in _sequence(inside["sources"], "sources"):
                keys = ["model", "layer_range", "parameters"]
                given = _mapping(source, keys, "a source", "model", "layer_range")
                layers = _layers(given["layer_range"])
                parameters = self.parameters(given, True)
                sources.append(Source(_ref(given["model"]), layers, parameters, source.where))
            lengths = [b - a for a, b in (source.layers for source in sources)]
            if len(set(lengths)) > 1:
                raise RecipeError(
                    inside["sources"].key,
                    f"all sources of a slice need equally many layers; got {lengths}",
                )
            base = _optional(inside, "base_model", _ref)
            parameters = self.parameters(inside, False)
            found.append(Slice(tuple(sources), base, parameters, part.where))
        return tuple(found)

    def parameters(self, parent: dict[str, Node], of_model: bool) -> dict[str, Setting]:
        if "parameters" not in parent or parent["parameters"].value is None:
            return {}
        known = self.entry.parameters
        what = f"{self.entry.name}, a parameter"
        found = {}
        for name, node in _mapping(parent["parameters"], known, what).items():
            if of_model and not known[name].per_model:
                raise RecipeError(
                    node.key,
                    f"{self.entry.name} does not read {name!r} per model; set it for the slice,"
                    " the module or the recipe",
                )
            found[name] = _setting(node, known[name])
        return found


def _setting(node: Node, parameter: mergekit.Parameter) -> Setting:
    value = node.value
    if isinstance(value, list) and not value:
        raise RecipeError(node.where, "expected a value; got an empty list")
    conditions = value if isinstance(value, list) else [value and node]
    if isinstance(value, dict):
        conditions = [node]
    elif not isinstance(value, list) or not any(isinstance(p.value, dict) for p in value):
        return (Condition(None, _values(node, parameter), node.where),)
    found: list[Condition] = []
    for part in conditions:
        if not isinstance(part.value, dict):
            raise RecipeError(part.where, "expected {filter, value}, as beside it")
        inside = _mapping(part, ["filter", "value"], "a condition", "value")
        if found and found[-1].filter in (None, "*"):
            raise RecipeError(part.where, "never reached: the condition before it fits everything")
        filter = None
        if "filter" in inside and inside["filter"].value is not None:
            node_ = inside["filter"]
            filter = str(node_.value) if not isinstance(node_.value, (dict, list)) else _text(node_)
            matcher(filter, node_.where)
            if not filter:
                raise RecipeError(node_.where, "an empty filter; leave it out to fit everything")
        found.append(Condition(filter, _values(inside["value"], parameter), part.where))
    return tuple(found)


def _values(node: Node, parameter: mergekit.Parameter) -> tuple[Any, ...]:
    parts = node.value if isinstance(node.value, list) else [node]
    if not parts:
        raise RecipeError(node.where, "expected a value; got an empty list")
    return tuple(_checked(part.value, parameter, part.where) for part in parts)


def _checked(value: Any, parameter: mergekit.Parameter, where: Where) -> Any:
    value = check_value(value, parameter.kind, where)
    low, high = parameter.low, parameter.high
    below = low is not None and (value < low or (parameter.open_low and value == low))
    if below or (high is not None and value > high):
        left = "(" if parameter.open_low or low is None else "["
        right = "inf)" if high is None else f"{high}]"
        interval = f"{left}{'-inf' if low is None else low}, {right}"
        raise RecipeError(where, f"{parameter.name}: expected a number in {interval}, got {value}")
    return value


def _mapping(node: Node, keys: Any, what: str, *required: str) -> dict[str, Node]:
    """The parts of a mapping with these keys (any, for None); RecipeError."""
    if not isinstance(node.value, dict):
        raise RecipeError(node.where, f"expected {what}, a mapping; got {_kind(node)}")
    for key, part in node.value.items():
        if keys is not None and key not in keys:
            raise RecipeError(part.key, f"{key!r} is no key of {what}{nearest(key, keys)}")
    for key in required:
        if key not in node.value:
            raise RecipeError(node.where, f"{what} needs {key!r}, which is missing")
    if not node.value:
        raise RecipeError(node.where, f"expected {what}; got an empty mapping")
    return node.value


def _sequence(node: Node, what: str) -> list[Node]:
    if not isinstance(node.value, list) or not node.value:
        raise RecipeError(node.where, f"expected a list of {what}; got {_kind(node)}")
    return node.value


def _kind(node: Node) -> str:
    value = node.value
    if isinstance(value, (dict, list)):
        name = "mapping" if isinstance(value, dict) else "list"
        return f"a {name}" if value else f"an empty {name}"
    return "nothing" if value is None else repr(value)[:80]


def _optional(parent: Mapping[str, Node], key: str, read: Callable[[Node], Any]) -> Any:
    return None if key not in parent or parent[key].value is None else read(parent[key])


def _text(node: Node) -> str:
    return check_value(node.value, "text", node.where)


def _one_of(*options: str) -> Callable[[Node], str]:
    def read(node: Node) -> str:
        if node.value not in options:
            expected = ", ".join(options)
            raise RecipeError(node.where, f"expected one of {expected}; got {_kind(node)}")
        return node.value

    return read


def _natural(node: Node) -> int:
    value = check_value(node.value, "integer", node.where)
    if not 0 <= value < 2**63:
        raise RecipeError(node.where, f"expected a whole number from 0 on, got {value}")
    return value


def _dtype(node: Node) -> str:
    name = _text(node).removeprefix("torch.")
    if name not in DTYPES:
        why = "; whole numbers would cut the weights" if name.startswith("int") else ""
        raise RecipeError(node.where, f"no dtype to merge in: {name!r}{nearest(name, DTYPES)}{why}")
    return name


def _renames(node: Node) -> dict[str, str]:
    found = {}
    for pattern, part in _mapping(node, None, "patterns and their replacements").items():
        text = _text(part)
        try:
            re.sub(pattern, text, "")
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError, IndexError) as error:
            raise RecipeError(part.key, f"no regular expression: {error}") from error
        found[pattern] = text
    return found


def _layers(node: Node) -> tuple[int, int]:
    parts = node.value
    if not isinstance(parts, list) or len(parts) != 2:
        raise RecipeError(node.where, f"expected [first, last + 1]; got {_kind(node)}")
    a, b = (check_value(part.value, "integer", part.where) for part in parts)
    if not 0 <= a < b:
        raise RecipeError(node.where, f"expected 0 <= first < last + 1; got [{a}, {b}]")
    if b > 1_000_000:
        raise RecipeError(node.where, f"no model has {b} layers")
    return a, b


def _ref(node: Node) -> Ref:
    if isinstance(node.value, str):
        path, plus, lora = node.value.partition("+")
        if "+" in lora or node.value.count("@") > 1 + bool(plus):
            raise RecipeError(node.where, "expected path[@revision][+lora[@revision]]")
        return Ref(*_revision(path, node.where), *(_revision(lora, node.where) if plus else ()))
    what = "a model, as path[@revision][+lora] or"
    inside = _mapping(node, ["model", "lora", "override_architecture"], what, "model")
    if inside.get("override_architecture", node._replace(value=None)).value is not None:
        where = inside["override_architecture"].key
        raise RecipeError(where, "not needed and not read: tensors are matched by name")
    return Ref(*_path_node(inside["model"]), *(_optional(inside, "lora", _path_node) or ()))


def _path_node(node: Node) -> tuple[str, str | None]:
    if isinstance(node.value, str):
        return _revision(node.value, node.where)
    inside = _mapping(node, ["path", "revision"], "a path", "path")
    return _text(inside["path"]), _optional(inside, "revision", _text)


def _revision(text: str, where: Where) -> tuple[str, str | None]:
    path, at, revision = text.partition("@")
    if not path or "\0" in text or (at and (not revision or "@" in revision)):
        raise RecipeError(where, f"expected path[@revision]; got {text!r}")
    return path, revision or None


def _path(model: Any, where: str) -> Ref:
    if isinstance(model, Ref):
        return model
    if not isinstance(model, (str, PathLike)):
        raise RecipeError(Where(where), f"expected a path, got {model!r}")
    return Ref(str(fspath(model)))


def _source(node: Node) -> str | Ref:
    return node.value if node.value in ("union", "base") else _ref(node)


def _tokenizer_source(node: Node) -> Tokenizer:
    return Tokenizer(_source(node), {}, None, node.key)


def _tokenizer(node: Node) -> Tokenizer:
    inside = _mapping(node, ["source", "tokens", "pad_to_multiple_of"], "a tokenizer")
    multiple = _optional(inside, "pad_to_multiple_of", _natural)
    if multiple is not None and not 0 < multiple <= 1 << 20:
        raise RecipeError(inside["pad_to_multiple_of"].where, "expected between 1 and 1048576")
    tokens = {}
    for token, part in (
        _optional(inside, "tokens", lambda n: _mapping(n, None, "tokens")) or {}
    ).items():
        given = _mapping(part, ["source", "force"], "a token", "source")
        force = (
            check_value(given["force"].value, "boolean", part.where) if "force" in given else False
        )
        tokens[token] = _token(given["source"], force)
    return Tokenizer(_optional(inside, "source", _source) or "union", tokens, multiple, node.key)


def _token(node: Node, force: bool) -> Token:
    if not isinstance(node.value, dict) or "kind" not in node.value:
        return Token("model", _ref(node), None, None, force, node.where)
    kind = _one_of("zero", "model_token")(node.value["kind"])
    if kind == "zero":
        _mapping(node, ["kind"], "a zero embedding")
        return Token("zero", None, None, None, force, node.where)
    keys = ["kind", "model", "token", "token_id"]
    inside = _mapping(node, keys, "a token of a model", "model")
    token, token_id = _optional(inside, "token", _text), _optional(inside, "token_id", _natural)
    if (token is None) == (token_id is None):
        raise RecipeError(node.where, "expected one of token, token_id")
    return Token("model", _ref(inside["model"]), token, token_id, force, node.where)


def _node(value: Any, path: str) -> Node:
    """A Python value as if it had been written in a recipe."""
    where = Where(path)
    if isinstance(value, Mapping):
        return Node({str(k): _node(v, f"{path}.{k}") for k, v in value.items()}, where, where)
    return Node(fspath(value) if isinstance(value, PathLike) else value, where, where)
