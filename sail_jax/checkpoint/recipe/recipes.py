"""Makes recipes, the descriptions of merges, from mergekit's YAML or from Python.

The grammar is mergekit's. A key or parameter without effect causes a note, because mergekit ignores
it. If it is one typo away from a valid one, it is an error (`published`). So is an unknown method,
or a filter without effect. An error contains the line and the nearest valid name. At the top level
a recipe may also have:

    compat: mergekit | paper        the origin of defaults and variants; in a file mergekit
    scope: tensor | tree            for methods with this choice
    seed: 0                         for methods that draw random numbers
    rename: {pattern: replacement}  regular expressions, applied to the tensor names of every input
    select: params/*                patterns of the tensors that are merged, "," between them; by
                                    default the weights of a known training state
    rest: last | first | drop | error    the source of tensors that are not selected
    missing: error | skip | base    a tensor is missing in an input: omit the input, or use the base
    extra: error | ignore           tensors that are not in the output's model
    integers: first | last | max | refuse    the source of integers and keys that differ
    requantize: fp8                 weights are written in FP8 again, in the scheme of the base

A model, in any place (`models`, `sources`, or base_model: {model: ...}), may also have:

    grow: {to: config.json, factors {width: 2} or entries, method: lemon, seed: 0, ...}
    align: {to: model, ...}         permuted to match another model, after it has grown

Filters may be "re:..." or "glob:..." patterns. All regular expressions are RE2's. Recipes are
interpreted differently where mergekit fails or is unsound: a single {filter, value} mapping is a
setting; lists of bools are steps, not interpolated numbers; `dtype` is only the output's dtype
(arithmetic is in float32 or better), and `out_dtype` takes precedence over it.
"""

import graphlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from sail_jax import disk
from sail_jax.checkpoint.formats.table import of_output
from sail_jax.checkpoint.recipe import mergekit
from sail_jax.checkpoint.recipe.declared import Note, kind, read
from sail_jax.checkpoint.recipe.parts import Document, Module, Recipe, Ref, Slice, Source
from sail_jax.checkpoint.recipe.yaml_tree import Node, RecipeError, Where, compose, compose_all
from sail_jax.checks import described, nearest
from sail_jax.merging.merge import Merge

_TOP = [
    "dtype",
    "out_dtype",
    "scope",
    "seed",
    "rename",
    "rest",
    "missing",
    "extra",
    "integers",
    "tokenizer",
    "chat_template",
]
"""The keys of a recipe that `simple` takes as options besides hyperparameters."""


def parse(text: str | bytes, file: str = "recipe") -> Recipe:
    """Reads a recipe from YAML.

    >>> recipe = parse('''
    ... merge_method: linear
    ... models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: [0, 1]}}]
    ... ''')
    >>> recipe.method, [str(ref) for ref in recipe.models()]
    ('linear', ['a', 'b'])
    """
    return _parsed(compose(text, file), text)


def parse_all(text: str | bytes, file: str = "recipe") -> tuple[Recipe, ...]:
    """Reads all recipes of a file: one, or several documents that refer to each other by name.

    Args:
      text: The recipes, in UTF-8 if it is bytes.
      file: The name of the text in error messages, such as its path.

    Returns:
      The recipes, each after the recipes that it uses. Those that are not used by others are the
      outputs of the file; see `finals`.

    Raises:
      RecipeError: As `parse` does. Also if several documents share a name or form a cycle, or if
        one of several outputs has no name.

    >>> text = "name: b\\nmerge_method: passthrough\\nmodels: [{model: NEXT}]\\n"
    >>> several = text.replace("NEXT", "a") + "---\\n" + text.replace("b", "a", 1)
    >>> [(recipe.name, recipe.uses) for recipe in parse_all(several)]
    [('a', ()), ('b', ('a',))]
    """
    roots = compose_all(text, file)
    if len(roots) == 1:
        return (_parsed(roots[0], text),)
    names: dict[str, Node] = {}
    for root in roots:
        given = root.value.get("name") if isinstance(root.value, dict) else None
        if given is None or given.value is None:
            continue
        name = str(given.value)
        if not _NAME.fullmatch(name) or of_output(Path(name)) is not None:
            raise RecipeError(given.where, f"expected a name for a folder; got {kind(given.value)}")
        if name in names:
            raise RecipeError(given.where, f"another document is called {name!r}, too")
        names[name] = given
    recipes = [_parsed(root, text, names) for root in roots]
    places = {recipe.name: i for i, recipe in enumerate(recipes) if recipe.name is not None}
    needs = {i: [places[name] for name in recipe.uses] for i, recipe in enumerate(recipes)}
    try:
        ordered = [recipes[i] for i in graphlib.TopologicalSorter(needs).static_order()]
    except graphlib.CycleError as error:
        circle = [recipes[i] for i in reversed(error.args[1])]
        words = " needs ".join(str(recipe.name) for recipe in circle)
        raise RecipeError(circle[0].at("name"), f"documents need each other: {words}") from None
    last = finals(recipes)
    for recipe in last if len(last) > 1 else ():
        if recipe.name is None:
            who = ", ".join(repr(x.name) for x in last if x is not recipe and x.name) or "another"
            raise RecipeError(
                recipe.node.where,
                f"needs a name, since this and {who} are both outputs",
            )
    return tuple(ordered)


# The largest number of bytes of a file of recipes.
_MOST = 1 << 20


def read_file(path: str | PathLike[str]) -> tuple[Recipe, ...]:
    """Reads the recipes in a file.

    Args:
      path: A YAML file of at most 1 MiB.

    Returns:
      The recipes, as `parse_all` orders them.

    Raises:
      RecipeError: If the file contains no valid recipe.
      StoreError: If it cannot be read, or is too long.
    """
    return parse_all(disk.read_bytes(Path(path), _MOST), str(path))


# One part of a path, without characters that have a special meaning in the name of a model.
_NAME = re.compile(r"[^\\/@+*?\[\]\0.][^\\/@+*?\[\]\0]{0,199}")


def finals(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Lists the recipes of a file that no other recipe uses.

    Args:
      recipes: The recipes of a file.

    Returns:
      Those recipes, in their order.
    """
    used = {name for recipe in recipes for name in recipe.uses}
    return [recipe for recipe in recipes if recipe.name not in used]


def _parsed(root: Node, text: str | bytes, names: Collection[str] | None = None) -> Recipe:
    """Makes the recipe of one document; `names` are all documents' names, if there are several."""
    document = Document(others=names or ())
    recipe = read(Recipe, root, document)
    if recipe.name is not None and names is None:
        remark = Note(recipe.at("name"), "name has no effect in a file of one document")
        document.notes.append(remark)
    text = text if isinstance(text, str) else text.decode("utf-8-sig")
    uses = tuple(dict.fromkeys(document.uses))
    return check(recipe.model_copy(update={"text": text, "uses": uses}), document.notes)


def simple(
    models: Sequence[str | PathLike | Ref],
    base: str | PathLike | Ref | None = None,
    method: str | Merge = "linear",
    *,
    weights: Sequence[float] | None = None,
    compat: str | None = None,
    **options: Any,
) -> Recipe:
    """Makes the recipe of one merge of whole models, without YAML.

    Args:
      models: The checkpoints. Text is a plain path, even if it contains "+" or "@".
      base: The base; None without one.
      method: A merge, or the name of a method.
      weights: One weight per model; None for the method's default, which is 1 each where mergekit
        requires weights.
      compat: The origin of defaults and variants, "mergekit" or "paper"; None means the paper's,
        unlike in YAML.
      **options: Hyperparameters of a method, under our names or mergekit's. Each is one value or,
        if models may have their own (such as density), a sequence with one value per model. Also
        keys of the recipe: dtype, out_dtype, scope, seed, rename, rest, missing, extra, integers,
        tokenizer ("union", "base", a model, or a mapping as in YAML), chat_template.

    Returns:
      The recipe, after all checks that do not require its checkpoints.

    Raises:
      RecipeError: If the method or an option is unknown, or if a value is invalid.

    >>> simple(["a", "b"], "base", "ties", density=[0.2, 0.5]).modules[0].slices[0].sources[1].model
    Ref(path='b', revision=None, lora=None, lora_revision=None, steps=())
    """
    try:
        entry = mergekit.entry(method)
    except ValueError as error:
        raise RecipeError(Where("method"), str(error)) from error
    if isinstance(models, (str, PathLike)) or not isinstance(models, Sequence):
        raise RecipeError(Where("models"), f"expected a sequence of paths, got {described(models)}")
    weight = entry.parameters.get("weight")
    if weights is None and compat != "paper" and weight and weight.required:
        # mergekit requires weights in every recipe; here they default to 1.
        weights = [1.0] * len(models)
    if weights is not None:
        options["weight"] = list(weights)
    top = {key: _node(options.pop(key), key) for key in _TOP if key in options}
    if "tokenizer" in top and not isinstance(top["tokenizer"].value, Mapping):
        top["tokenizer_source"] = top.pop("tokenizer")
    given: dict[str, Node] = {}
    by_model: list[dict[str, Node]] = [{} for _ in models]
    for key, value in options.items():
        own = key if entry.parameter(key) else entry.keys.get(key)
        if own is None:
            names = sorted(p.option or p.name for p in entry.parameters.values())
            hint = nearest(key, [*names, *_TOP])
            raise RecipeError(Where(key), f"unknown hyperparameter {key!r} of {entry.name}{hint}")
        if not isinstance(value, Sequence) or isinstance(value, str):
            given[own] = _node(value, key)
            continue
        parameter = entry.parameter(own)
        per_model = parameter is not None and parameter.per_model
        if not per_model or len(value) != len(models):
            expected = f"one number per model ({len(models)})" if per_model else "one value"
            raise RecipeError(Where(key), f"expected {expected}, got {len(value)}")
        for i, part in enumerate(value):
            by_model[i][own] = _node(part, f"{key}[{i}]")
    sources = []
    for i, model in enumerate(models):
        sources.append({"model": _path(model, f"models[{i}]"), "parameters": by_model[i]})
    top |= {
        "merge_method": _node(entry, "method"),
        "models": _node(sources, "models"),
        "base_model": _node(None if base is None else _path(base, "base"), "base"),
        "parameters": _node(given, "parameters"),
    }
    if compat is not None:
        top["compat"] = _node(compat, "compat")
    document = Document()
    recipe = read(Recipe, Node(top, Where(), Where()), document)
    # Set after reading: a `compat` among the keys would count as the user's choice.
    named = recipe if compat else recipe.model_copy(update={"compat": "paper"})
    return check(named, document.notes)


def _path(model: object, path: str) -> Ref:
    """Converts a path to a `Ref`, without parsing "@" and "+" in it."""
    if isinstance(model, Ref):
        return model
    if not isinstance(model, (str, PathLike)):
        advice = "; pytrees are merged by method(models, base)"
        raise RecipeError(Where(path), f"expected a path, got {described(model)}{advice}")
    return Ref(str(fspath(model)))


def _node(value: object, path: str) -> Node:
    """Converts a Python value to a node, as if a recipe contained it."""
    if isinstance(value, Node):
        return value
    if isinstance(value, Mapping):
        value = {str(key): _node(part, f"{path}.{key}") for key, part in value.items()}
    elif isinstance(value, list):
        value = [_node(part, f"{path}[{i}]") for i, part in enumerate(value)]
    elif isinstance(value, PathLike):
        value = fspath(value)
    return Node(value, Where(path), Where(path))


def check(recipe: Recipe, notes: Iterable[Note] = ()) -> Recipe:
    """Checks that a recipe's method can be applied to its models with its parameters.

    Args:
      recipe: The recipe.
      notes: The parts without effect that were found while reading.

    Returns:
      The recipe without these parts, and with a note for each of them.

    Raises:
      RecipeError: If there are too few or too many models, if a base or a parameter is missing, or
        if the recipe sets a scope for a method without scopes.
    """
    entry = recipe.entry
    recipe, passed = _without_bases(recipe)
    for module in recipe.modules:
        for part in module.slices:
            _check_inputs(recipe, module, part)
    own = entry.merge is None and mergekit.accepts(recipe.method, "scope")
    if recipe.scope is not None and not own:
        raise RecipeError(recipe.at("scope"), f"{recipe.method} does not have a scope")
    passed = {note.text: note for note in (*notes, *passed, *_unread(recipe))}
    return recipe.model_copy(update={"notes": tuple(passed.values())})


def _without_bases(recipe: Recipe) -> tuple[Recipe, list[Note]]:
    """Drops the parameters of bases that are not merged: no method reads them."""
    notes: list[Note] = []

    def bare(source: Source) -> Source:
        for name, setting in source.parameters.items():
            text = f"{name} of the base has no effect under {recipe.method}"
            notes.append(Note(setting[0].where, text))
        return source.model_copy(update={"parameters": {}})

    modules = []
    for module in recipe.modules:
        parts = []
        for part in module.slices:
            sources, base = merged_sources(recipe, part)
            aside = None if base is None or base in sources else base.model
            parts.append(part.model_copy(update={"sources": tuple(
                bare(x) if x.model == aside else x for x in part.sources
            )}))  # fmt: skip
        modules.append(module.model_copy(update={"slices": tuple(parts)}))
    return recipe.model_copy(update={"modules": tuple(modules)}), notes


def _unread(recipe: Recipe) -> Iterator[Note]:
    """Yields a note for each known parameter that has no effect in this recipe."""
    read = recipe.read()
    for name, setting in recipe.given():
        # int8_mask is the dtype of mergekit's masks, which does not affect the result.
        parameter = recipe.entry.parameter(name)
        if parameter is None:
            continue
        inert = parameter.option is None and name != "int8_mask"
        if inert or parameter.name not in read:
            where = setting[0].where
            more = "" if inert else "; compat: paper reads it"
            yield Note(where, f"{name} has no effect under {recipe.method}{more}")
    if recipe.entry.base != "joins" or recipe.compat != "mergekit":
        return
    for part in recipe.slices():
        base = part.base_model or recipe.base_model
        sources, _ = merged_sources(recipe, part)
        if base is not None and all(source.model != base for source in sources):
            text = f"base_model has no effect under {recipe.method}: it is not among the models"
            yield Note(recipe.at("base_model"), text)


def merged_sources(recipe: Recipe, part: Slice) -> tuple[list[Source], Source | None]:
    """Divides the sources of a slice into the merged ones and the base.

    Args:
      recipe: The recipe.
      part: One of its slices.

    Returns:
      The sources that are merged, and the base as a source. The base is the listed source, with its
      own parameters. If it is not listed, it is made from the path if task vectors start at the
      base, and is None otherwise.

    Raises:
      RecipeError: If the base is not listed, and its layers are ambiguous.
    """
    entry = recipe.entry
    base = part.base_model or recipe.base_model
    listed = next((source for source in part.sources if source.model == base), None)
    others = [source for source in part.sources if source.model != base]
    if base is None or entry.base == "input":
        return list(part.sources), listed
    ranges = list(dict.fromkeys(source.layers for source in part.sources))
    if listed is None and len(ranges) > 1:
        raise RecipeError(part.where, f"the layers of {base} are ambiguous; list it in sources")
    unlisted = Source(model=base, layers=next(iter(ranges), None), where=recipe.at("base_model"))
    if entry.base == "first":
        return [listed or unlisted, *others], listed
    if entry.base == "joins":
        # In mergekit the base of whole models is one of the merged models. A base without a weight
        # is refused there; older versions ignored it, as is done here.
        outer = {*part.parameters, *recipe.parameters}
        within = [m for m in recipe.modules if any(part is x for x in m.slices)]
        outer |= {name for module in within for name in module.parameters}
        needs = {p.name for p in entry.parameters.values() if p.required}
        joins = recipe.compat == "mergekit" and part.whole and needs <= outer and listed is None
        return [*part.sources, *([unlisted] if joins else [])], listed
    return others, listed or unlisted


def _check_inputs(recipe: Recipe, module: Module, part: Slice) -> None:
    """Checks the number of models of a slice, its base and the parameters that must be set."""
    entry = recipe.entry
    base = part.base_model or recipe.base_model
    first = entry.base == "first" and recipe.compat == "mergekit"
    if base is None and (entry.base == "required" or first):
        raise RecipeError(part.where, f"{entry.name} needs base_model, which is missing")
    sources, _ = merged_sources(recipe, part)
    # The published way to merge an adapter into its model: the base is also the only model.
    if part.sources and not sources and entry.alone:
        return
    if not part.sources or not entry.least <= len(sources) <= (entry.most or len(sources)):
        expected = f"{entry.least}" if entry.most == entry.least else f"at least {entry.least}"
        besides = " besides base_model" if entry.base in ("required", "optional") else ""
        besides = ", base_model included" if entry.base == "first" else besides
        raise RecipeError(
            part.where, f"{entry.name} merges {expected} model(s){besides}; got {len(sources)}"
        )
    # Under the papers' conventions, weights are optional; but if one model has a weight, every
    # model needs one. Other parameters without a default are checked when tensors are planned.
    outer = {*part.parameters, *module.parameters, *recipe.parameters}
    every = outer.union(*[source.parameters for source in sources])
    if recipe.compat != "mergekit" and "weight" not in every:
        return
    for parameter in recipe.read().values():
        by_paper = parameter.name == "weight" and recipe.compat != "mergekit"
        required = parameter.required or by_paper
        for source in sources if required else ():
            own = source.parameters if parameter.per_model else {}
            if parameter.name in outer or parameter.name in own:
                continue
            who = f" for {source.model}" if parameter.per_model else ""
            where = source.where if parameter.per_model else recipe.at("merge_method")
            raise RecipeError(where, f"missing: {entry.name} requires {parameter.name!r}{who}")
