"""Recipes: what is to be merged and how, from mergekit's YAML or from Python.

The grammar is mergekit's, read strictly: a key, method, parameter or filter that would have no
effect is an error with its line and the nearest valid name. Beyond it, at the top level:

    compat: mergekit | paper        whose defaults and variants; mergekit's in a recipe
    scope: tensor | tree            of methods that have one
    seed: 0                         of methods that draw
    rename: {pattern: replacement}  regular expressions, applied to the tensor names of every input
    missing: error | skip | base    where an input lacks a tensor: left out, or counted as base
    extra: error | ignore           tensors that the output's model lacks

at a model, whatever names it (`models`, `sources`, or base_model: {model: ...}):

    grow: {to: config.json, factors {width: 2} or entries, method: lemon, seed: 0, ...}
    align: {to: model, ...}         permuted to match another model, after it has grown

and filters may be "re:..." or "glob:..." patterns. Where mergekit fails or is unsound we differ: a
single {filter, value} mapping is a setting; lists of bools are steps, not interpolated numbers;
`dtype` only says what is written (arithmetic is in float32 and better), and `out_dtype` wins.
"""

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from sail_jax.checkpoint.recipe import mergekit, nodes
from sail_jax.checkpoint.recipe.parts import (
    Module,
    Parameters,
    Recipe,
    Ref,
    Slice,
    Source,
    Token,
    Tokenizer,
    read_dtype,
    read_layers,
    read_path,
    read_ref,
    read_renames,
    read_steps,
    read_tokenizer,
    read_tokenizer_source,
)
from sail_jax.checkpoint.recipe.settings import Condition, Setting
from sail_jax.checkpoint.recipe.yaml_tree import Node, RecipeError, Where, compose
from sail_jax.checks import nearest
from sail_jax.merging.merge import Merge

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

_TOP = (
    *("merge_method", "models", "slices", "modules", "base_model", "dtype", "out_dtype"),
    *("parameters", "tokenizer_source", "tokenizer", "chat_template"),
    *("compat", "scope", "seed", "rename", "missing", "extra"),
)


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
    top = nodes.mapping(root, _TOP, "a recipe", "merge_method")
    name = nodes.text(top["merge_method"])
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
        base_model=nodes.optional(top, "base_model", read_ref),
        parameters=reader.parameters(top, False),
        dtype=nodes.optional(top, "dtype", read_dtype),
        out_dtype=nodes.optional(top, "out_dtype", read_dtype),
        tokenizer=nodes.optional(top, "tokenizer", read_tokenizer)
        or nodes.optional(top, "tokenizer_source", read_tokenizer_source),
        chat_template=nodes.optional(top, "chat_template", nodes.text),
        compat=nodes.optional(top, "compat", nodes.one_of("mergekit", "paper")) or "mergekit",
        scope=nodes.optional(top, "scope", nodes.one_of("tensor", "tree")),
        seed=nodes.optional(top, "seed", nodes.natural) or 0,
        rename=nodes.optional(top, "rename", read_renames) or {},
        missing=nodes.optional(top, "missing", nodes.one_of("error", "skip", "base")) or "error",
        extra=nodes.optional(top, "extra", nodes.one_of("error", "ignore")) or "error",
        text=text if isinstance(text, str) else text.decode("utf-8-sig"),
        where=root.where,
        places={key: node.key for key, node in top.items()},
    )
    return check(recipe)


def simple(
    models: Sequence[str | PathLike | Ref],
    base: str | PathLike | Ref | None = None,
    method: str | Merge = "linear",
    *,
    weights: Sequence[float] | None = None,
    compat: str = "paper",
    **options: Any,
) -> Recipe:
    """The recipe of one merge over whole models, without YAML.

    method: a merge, or the name of a method. options: of the method, if it is a name (its own names
    or mergekit's): a number or, for density, gamma, epsilon and scale where models have their own,
    a sequence with one per model; and of the recipe: dtype, out_dtype, scope, seed, rename,
    missing, extra, tokenizer ("union", "base" or a model), chat_template. Paths are taken as they
    are, "+" and "@" included. RecipeError for what is unknown or does not fit.

    >>> simple(["a", "b"], "base", "ties", density=[0.2, 0.5]).modules[0].slices[0].sources[1].model
    Ref(path='b', revision=None, lora=None, lora_revision=None, steps=())
    """
    merge = method if isinstance(method, Merge) else None
    try:
        entry = mergekit.entry(method) if isinstance(method, str) else mergekit.entry_of(method)
    except ValueError as error:
        raise RecipeError(Where("method"), str(error)) from error
    name = entry.name
    if isinstance(models, (str, PathLike)) or not isinstance(models, Sequence):
        raise RecipeError(Where("models"), f"expected a sequence of paths, got {models!r}")
    refs = [read_path(model, f"models[{i}]") for i, model in enumerate(models)]
    top = {
        "dtype": read_dtype,
        "out_dtype": read_dtype,
        "chat_template": nodes.text,
        "scope": nodes.one_of("tensor", "tree"),
        "seed": nodes.natural,
        "rename": read_renames,
        "missing": nodes.one_of("error", "skip", "base"),
        "extra": nodes.one_of("error", "ignore"),
        "tokenizer": read_tokenizer_source,
    }
    fields = {
        key: top[key](_node(options.pop(key), key))
        if options[key] is not None
        else options.pop(key)
        for key in list(options)
        if key in top
    }
    fields = {key: value for key, value in fields.items() if value is not None}
    weight = entry.parameters.get("weight")
    if weights is None and compat == "mergekit" and weight and weight.default is mergekit.REQUIRED:
        weights = [1.0] * len(refs)  # what mergekit asks for in every recipe is the default here
    if weights is not None:
        options["weight"] = list(weights)
    by_option = {p.option: p.name for p in entry.parameters.values() if p.option is not None}
    given: dict[str, Setting] = {}
    each: list[dict[str, Setting]] = [{} for _ in refs]
    for key, value in options.items():
        own = key if key in entry.parameters else by_option.get(key)
        if own is None:
            known = sorted(p.option or p.name for p in entry.parameters.values())
            hint = nearest(key, [*known, *top])
            raise RecipeError(Where(key), f"{name} has no hyperparameter of this name{hint}")
        parameter = entry.parameters[own]
        if not isinstance(value, Sequence) or isinstance(value, str):
            given[own] = (
                Condition(None, (nodes.checked(value, parameter, Where(key)),), Where(key)),
            )
            continue
        if not parameter.per_model or len(value) != len(refs):
            expected = f"one number per model ({len(refs)})" if parameter.per_model else "one value"
            raise RecipeError(Where(key), f"expected {expected}, got {len(value)}")
        for i, one in enumerate(value):
            where = Where(f"{key}[{i}]")
            each[i][own] = (Condition(None, (nodes.checked(one, parameter, where),), where),)
    sources = tuple(Source(ref, None, each[i], Where(f"models[{i}]")) for i, ref in enumerate(refs))
    whole = Slice(sources, None, {}, Where("models"))
    base_model = None if base is None else read_path(base, "base")
    places = {"base_model": Where("base"), "merge_method": Where("method")}
    compat = nodes.one_of("mergekit", "paper")(_node(compat, "compat"))
    module = Module("", (whole,), {}, Where("models"))
    recipe = Recipe(
        name, (module,), base_model, given, compat=compat, places=places, merge=merge, **fields
    )
    return check(recipe)


def check(recipe: Recipe) -> Recipe:
    """The recipe, if its method can be applied to as many models with what is set; RecipeError."""
    entry = recipe.entry
    for module in recipe.modules:
        for part in module.slices:
            _check_inputs(recipe, entry, module, part)
    used = {}
    for name, setting in recipe.settings():
        option = entry.parameters[name].option
        if option is not None and used.setdefault(option, name) != name:
            where = setting[0].where
            other = used[option]
            raise RecipeError(where, f"{name} and {other} are one parameter; set one of them")
    own = recipe.merge is None and mergekit.accepts(recipe.method, "scope")
    if recipe.scope is not None and not own:
        raise RecipeError(recipe.at("scope"), f"{recipe.method} has no scope")
    template = recipe.chat_template
    literal = template is not None and len(template) >= 20 and "{" in template
    if template is not None and not literal and template not in TEMPLATES:
        hint = nearest(template[:40], TEMPLATES)
        raise RecipeError(recipe.at("chat_template"), f"expected a name or a Jinja template{hint}")
    return recipe


TEMPLATES = ("auto", "alpaca", "chatml", "exaone", "llama3", "mistral")


def merged_sources(recipe: Recipe, part: Slice) -> tuple[list[Source], Source | None]:
    """Those of a slice whose tensors are merged, and what their base_model is as a source."""
    entry = recipe.entry
    base = part.base_model or recipe.base_model
    listed = next((source for source in part.sources if source.model == base), None)
    others = [source for source in part.sources if source.model != base]
    if base is None or entry.base == "input":
        return list(part.sources), listed
    ranges = list(dict.fromkeys(source.layers for source in part.sources))
    if listed is None and len(ranges) > 1:
        raise RecipeError(part.where, f"which layers of {base}? list it among the sources")
    unlisted = Source(base, next(iter(ranges), None), {}, recipe.at("base_model"))
    if entry.base == "first":
        return [listed or unlisted, *others], listed
    if entry.base == "joins":
        joins = recipe.compat == "mergekit" and listed is None
        return [*part.sources, *([unlisted] if joins else [])], listed
    return others, listed or unlisted


def _check_inputs(recipe: Recipe, entry: mergekit.Entry, module: Module, part: Slice) -> None:
    base = part.base_model or recipe.base_model
    first = entry.base == "first" and recipe.compat == "mergekit"
    if base is None and (entry.base == "required" or first):
        raise RecipeError(part.where, f"{entry.name} needs base_model, which is missing")
    sources, listed = merged_sources(recipe, part)
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
                f"{name} of the base model is not read by {entry.name}: the base is not merged",
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
        for name, part in nodes.mapping(node, None, "modules by name").items():
            inside = nodes.mapping(part, ["models", "slices", "parameters"], "a module")
            if ("models" in inside) == ("slices" in inside):
                raise RecipeError(part.key, "expected one of models, slices")
            slices = self.models(inside["models"]) if "models" in inside else None
            slices = slices or self.slices(inside["slices"])
            found.append(Module(name, slices, self.parameters(inside, False), part.key))
        if not found:
            raise RecipeError(node.where, "expected modules by name; got none")
        return tuple(found)

    def models(self, node: Node) -> tuple[Slice, ...]:
        sources = []
        for part in nodes.sequence(node, "models"):
            keys = ["model", "parameters", "grow", "align"]
            inside = nodes.mapping(part, keys, "a model", "model")
            ref = read_steps(read_ref(inside["model"]), inside)
            sources.append(Source(ref, None, self.parameters(inside, True), part.where))
        return (Slice(tuple(sources), None, {}, node.key),)

    def slices(self, node: Node) -> tuple[Slice, ...]:
        found = []
        for part in nodes.sequence(node, "slices"):
            keys = ["sources", "base_model", "parameters", "residual_weight"]
            inside = nodes.mapping(part, keys, "a slice", "sources")
            if "residual_weight" in inside:
                raise RecipeError(
                    inside["residual_weight"].key, "has no effect, in mergekit either"
                )
            sources = []
            for source in nodes.sequence(inside["sources"], "sources"):
                keys = ["model", "layer_range", "parameters", "grow", "align"]
                given = nodes.mapping(source, keys, "a source", "model", "layer_range")
                layers = read_layers(given["layer_range"])
                parameters = self.parameters(given, True)
                ref = read_steps(read_ref(given["model"]), given)
                sources.append(Source(ref, layers, parameters, source.where))
            lengths = [b - a for a, b in (source.layers for source in sources)]
            if len(set(lengths)) > 1:
                raise RecipeError(
                    inside["sources"].key,
                    f"all sources of a slice need equally many layers; got {lengths}",
                )
            base = nodes.optional(inside, "base_model", read_ref)
            parameters = self.parameters(inside, False)
            found.append(Slice(tuple(sources), base, parameters, part.where))
        return tuple(found)

    def parameters(self, parent: dict[str, Node], of_model: bool) -> dict[str, Setting]:
        if "parameters" not in parent or parent["parameters"].value is None:
            return {}
        known = self.entry.parameters
        what = f"{self.entry.name}, a parameter"
        found = {}
        for name, node in nodes.mapping(parent["parameters"], known, what).items():
            if of_model and not known[name].per_model:
                raise RecipeError(
                    node.key,
                    f"{self.entry.name} does not read {name!r} per model; set it for the slice,"
                    " the module or the recipe",
                )
            found[name] = nodes.setting(node, known[name])
        return found


def _node(value: Any, path: str) -> Node:
    """A Python value as if it had been written in a recipe."""
    where = Where(path)
    if isinstance(value, Mapping):
        return Node({str(k): _node(v, f"{path}.{k}") for k, v in value.items()}, where, where)
    return Node(fspath(value) if isinstance(value, PathLike) else value, where, where)
