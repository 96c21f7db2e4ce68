"""What recipes are made of: one declaration for each mapping that may stand in one."""

import json
import re
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    PlainValidator,
    SkipValidation,
    ValidationInfo,
    field_validator,
    model_validator,
)

from sail_jax.checkpoint.recipe import mergekit
from sail_jax.checkpoint.recipe.declared import Declared, Given, Placed, kind, read
from sail_jax.checkpoint.recipe.patterns import renaming
from sail_jax.checkpoint.recipe.settings import Integer, Natural, Setting, setting
from sail_jax.checkpoint.recipe.yaml_tree import Node, RecipeError, Where
from sail_jax.checks import nearest

__all__ = [
    "Alignment",
    "Growth",
    "Module",
    "Recipe",
    "Ref",
    "Slice",
    "Source",
    "Token",
    "Tokenizer",
]

ALIGNMENT = ("method", "family", "spaces", "within", "weights", "seed", "max_sweeps")
"""What a recipe may say of an alignment: the options of `align_maps` that are not of a run."""
DTYPES = ("float64", "float32", "float16", "bfloat16")
TEMPLATES = ("auto", "alpaca", "chatml", "exaone", "llama3", "mistral")

_PATH = r"([^@+\0]+)(?:@([^@+\0]+))?"


class Ref(NamedTuple):
    """A checkpoint: a path, and in mergekit's notation path[@revision][+lora[@revision]]; `steps`
    are what is done to it before it is merged, in this order."""

    path: str
    revision: str | None = None
    lora: str | None = None
    lora_revision: str | None = None
    steps: tuple["Growth | Alignment", ...] = ()

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
            done = (
                f"grown by {step.method}" if isinstance(step, Growth) else f"aligned to {step.to}"
            )
            name = f"{name} ({done})"
        return name


def _ref(given: Any) -> Ref:
    """A model in one word or as a mapping."""
    if isinstance(given, Given):
        return read(Model, given.node).ref()
    if isinstance(given, str) and (parts := re.fullmatch(f"{_PATH}(?:[+]{_PATH})?", given)):
        return Ref(parts[1], parts[2], parts[3], parts[4])
    if not isinstance(given, Ref):
        raise ValueError(f"expected path[@revision][+lora[@revision]]; got {kind(given)}")
    return given


def _location(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    parts = re.fullmatch(r"([^@\0]+)(?:@([^@\0]+))?", given)
    if parts is None:
        raise ValueError(f"expected path[@revision]; got {given!r}")
    return {"path": parts[1], "revision": parts[2]}


def _layers(layers: tuple[int, ...]) -> tuple[int, ...]:
    if len(layers) != 2:
        raise ValueError(f"expected [first, last + 1]; got {len(layers)} numbers")
    if not 0 <= layers[0] < layers[1]:
        raise ValueError(f"expected 0 <= first < last + 1; got {list(layers)}")
    if layers[1] > 1_000_000:
        raise ValueError(f"no model has {layers[1]} layers")
    return layers


def _dtype(name: str) -> str:
    name = name.removeprefix("torch.")
    if name not in DTYPES:
        why = "; whole numbers would cut the weights" if name.startswith("int") else ""
        raise ValueError(f"no dtype to merge in: {name!r}{nearest(name, DTYPES)}{why}")
    return name


def _template(template: str) -> str:
    if template not in TEMPLATES and not (len(template) >= 20 and "{" in template):
        hint = nearest(template[:40], TEMPLATES)
        raise ValueError(f"expected a name or a Jinja template{hint}")
    return template


def _renames(patterns: Mapping[str, str]) -> Mapping[str, str]:
    for pattern, replacement in patterns.items():
        renaming(pattern, replacement)
    return patterns


def _settings(given: Any, info: ValidationInfo, *, of_model: bool = False) -> Mapping[str, Setting]:
    """The parameters of a mapping, as the method that the recipe names has them."""
    if not isinstance(given, Given):
        raise ValueError(f"expected parameters, a mapping; got {kind(given)}")
    context: Any = info.context
    if "entry" not in context:  # which is the error
        return {}
    entry, settings = context["entry"], {}
    for name, node in given.node.value.items():
        parameter = entry.parameters.get(name)
        if parameter is None:
            hint = nearest(name, entry.parameters)
            raise RecipeError(node.key, f"{name!r} is no parameter of {entry.name}{hint}")
        if of_model and not parameter.per_model:
            raise RecipeError(
                node.key,
                f"{entry.name} does not read {name!r} per model; set it for the slice,"
                " the module or the recipe",
            )
        settings[name] = setting(node, parameter.type)
    return settings


def _entry(given: Any, info: ValidationInfo) -> mergekit.Entry:
    """The method, which says to what is read after it which parameters there are."""
    entry = given if isinstance(given, mergekit.Entry) else mergekit.entry(given)
    context: Any = info.context
    context["entry"] = entry
    return entry


def _without_effect(given: Any) -> None:
    raise ValueError("has no effect, in mergekit either; tensors are matched by name")


Reference = Annotated[Ref, PlainValidator(_ref)]
Layers = Annotated[tuple[Integer, ...], AfterValidator(_layers)]
Dtype = Annotated[str, AfterValidator(_dtype)]
Parameters = Annotated[Mapping[str, Setting], PlainValidator(_settings)]
OwnParameters = Annotated[Mapping[str, Setting], PlainValidator(partial(_settings, of_model=True))]
WithoutEffect = Annotated[None, BeforeValidator(_without_effect)]


class Step(Declared):
    """Something done to a model; hyperparameters: what else is said of it, as JSON."""

    hyperparameters: str = Field("{}", exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _rest(cls, given: Given) -> Given:
        fields = {*super().keys(given), "where"}
        rest = {key: given[key] for key in given if key not in fields}
        given["hyperparameters"] = json.dumps(rest, sort_keys=True)
        return given


def _target(given: Any) -> str:
    if not isinstance(given, (str, dict)) or not given:
        raise ValueError(f"expected a config.json, factors or entries of one; got {kind(given)}")
    return json.dumps(given, sort_keys=True)


class Growth(Step):
    """A model made larger before it is merged; `to` (a path or a mapping) as JSON."""

    to: Annotated[str, BeforeValidator(_target)]
    method: str = "lemon"
    seed: Natural = 0

    @classmethod
    def keys(cls, given: Given) -> list[str]:
        from sail_jax.growth.named import METHODS

        for key in ("method", "depth_method"):
            if given.get(key) is not None and given[key] not in [*METHODS]:  # it may be a mapping
                where = given.node.value[key].where
                expected = ", ".join(METHODS)
                raise RecipeError(where, f"expected one of {expected}; got {kind(given[key])}")
        method = METHODS[given.get("method") or "lemon"]
        deepens_by = given.get("depth_method") or method.deepens_by
        taken = {*method.options, *(METHODS[deepens_by].options if deepens_by else ())}
        return [*super().keys(given), "depth_method", "untie", "require_lossless", *sorted(taken)]


class Alignment(Step):
    """A model put into the basis of another before it is merged."""

    to: Reference

    @classmethod
    def keys(cls, given: Given) -> list[str]:
        return [*super().keys(given), *ALIGNMENT]


class Stepped(Declared):
    """What is done to a model is said beside it: it is grown first, then aligned."""

    grow: Growth | None = None
    align: Alignment | None = None

    @property
    def steps(self) -> tuple[Growth | Alignment, ...]:
        return tuple(step for step in (self.grow, self.align) if step is not None)


class Location(Declared):
    """path[@revision] as a mapping."""

    path: str
    revision: str | None = None


class Model(Stepped):
    """A `Ref` as a mapping."""

    model: Annotated[Location, BeforeValidator(_location)]
    lora: Annotated[Location, BeforeValidator(_location)] | None = None
    override_architecture: WithoutEffect = None

    def ref(self) -> Ref:
        lora = (None, None) if self.lora is None else (self.lora.path, self.lora.revision)
        return Ref(self.model.path, self.model.revision, *lora, self.steps)


class Source(Stepped, Placed):
    """A model, or layers a to b - 1 of it, with its own parameters."""

    model: Reference
    layers: Layers | None = Field(None, validation_alias="layer_range")
    parameters: OwnParameters = Field(default_factory=dict)

    @model_validator(mode="after")
    def _stepped(self) -> "Source":
        if not self.steps:
            return self
        if self.model.steps:
            message = f"{self.model} already says what is done to it, inside of model"
            raise RecipeError(self.where, message)
        return self.model_copy(update={"model": self.model._replace(steps=self.steps)})


class Slice(Placed):
    """Layers of the output, merged from those of the sources one by one; or all layers, if the
    sources are whole models."""

    whole: bool = Field(False, exclude=True)
    sources: tuple[Source, ...]
    base_model: Reference | None = None
    parameters: Parameters = Field(default_factory=dict)
    residual_weight: WithoutEffect = None

    @field_validator("sources")
    @classmethod
    def _alike(cls, sources: tuple[Source, ...], info: ValidationInfo) -> tuple[Source, ...]:
        whole = info.data["whole"]
        for source in sources:
            if whole != (source.layers is None):
                fault = "is for slices only" if whole else "is missing, which a source needs"
                raise RecipeError(source.where, f"'layer_range' {fault}")
        lengths = [source.layers[1] - source.layers[0] for source in sources if source.layers]
        if len(set(lengths)) > 1:
            raise ValueError(f"all sources of a slice need equally many layers; got {lengths}")
        return sources


class Module(Placed):
    """A tower of the output (name "": all of it) as slices one after another."""

    slices: tuple[Slice, ...] = Field(
        validation_alias=AliasChoices("slices", "models"), min_length=1
    )
    parameters: Parameters = Field(default_factory=dict)
    name: str = Field("", exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _one_slice(cls, given: Given) -> Given:
        if given.only("models", "slices") == "models":
            single = given.within("models", "sources")
            single["whole"] = True
            given["slices"] = [single]
        return given


class Row(Declared):
    """A row of an embedding: zeros, or in `model` that of a token, by name, id or its own name."""

    kind: Literal["zero", "model_token"]
    model: Reference | None = None
    token: str | None = None
    token_id: Natural | None = None


def _row(given: Any) -> Row:
    if not isinstance(given, Given) or "kind" not in given:
        return Row(kind="model_token", model=_ref(given))
    row = read(Row, given.node)
    says = [key for key in ("model", "token", "token_id") if getattr(row, key) is not None]
    if row.kind == "zero" and says:
        raise ValueError(f"a row of zeros has no {says[0]}")
    if row.kind == "model_token" and row.model is None:
        raise ValueError("a row of a model needs 'model', which is missing")
    if row.kind == "model_token" and len(says) != 2:
        raise ValueError("expected one of token, token_id")
    return row


class Token(Placed):
    """Where a token's row comes from; forced on every model, or only on those that lack it."""

    source: Annotated[Row, PlainValidator(_row)]
    force: bool = False


def _tokenizer_source(given: Any) -> str | Ref:
    return given if given in ("union", "base") else _ref(given)


class Tokenizer(Placed):
    """source: "union", "base" or a model."""

    source: Annotated[str | Ref, PlainValidator(_tokenizer_source)] = "union"
    tokens: dict[str, Token] = Field(default_factory=dict)
    pad_to_multiple_of: Annotated[Integer, Field(ge=1, le=1 << 20)] | None = None


def _modules(given: Any) -> list[Any]:
    """Modules, each with its name."""
    if not isinstance(given, Given) or not given:
        raise ValueError(f"expected modules by name; got {'none' if given == {} else kind(given)}")
    for name, module in given.items():
        if isinstance(module, Given):
            module["name"] = name
    return list(given.values())


class Recipe(Declared):
    """A recipe that has been checked as far as it can be without its checkpoints."""

    entry: Annotated[mergekit.Entry, PlainValidator(_entry)] = Field(
        validation_alias="merge_method"
    )
    modules: Annotated[tuple[Module, ...], BeforeValidator(_modules)] = Field(
        validation_alias=AliasChoices("modules", "models", "slices")
    )
    base_model: Reference | None = None
    parameters: Parameters = Field(default_factory=dict)
    dtype: Dtype | None = None
    out_dtype: Dtype | None = None
    tokenizer: Tokenizer | None = Field(
        None, validation_alias=AliasChoices("tokenizer", "tokenizer_source")
    )
    chat_template: Annotated[str, AfterValidator(_template)] | None = None
    compat: Literal["mergekit", "paper"] = "mergekit"
    scope: Literal["tensor", "tree"] | None = None
    seed: Natural = 0
    rename: Annotated[dict[str, str], AfterValidator(_renames)] = Field(default_factory=dict)
    missing: Literal["error", "skip", "base"] = "error"
    extra: Literal["error", "ignore"] = "error"
    text: str = Field("", exclude=True)
    node: SkipValidation[Node] = Field(exclude=True, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _one_module(cls, given: Given) -> Given:
        """Models and slices are those of a module without a name."""
        given["node"] = given.node
        form = given.only("models", "slices", "modules")
        if form != "modules":
            given["modules"] = given.within(form, "", form)
        if "tokenizer_source" in given and "tokenizer" in given:
            where = given.node.value["tokenizer_source"].key
            raise RecipeError(where, "not beside tokenizer; move it to its source")
        if "tokenizer_source" in given:
            given["tokenizer"] = given.within("tokenizer_source", "source")
        return given

    @property
    def method(self) -> str:
        return self.entry.name

    def at(self, key: str) -> Where:
        """Where a top-level key was given."""
        given = self.node.value.get(key)
        return self.node.where._replace(path=key) if given is None else given.key

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
        refs = [] if self.base_model is None else [self.base_model]
        for module in self.modules:
            for part in module.slices:
                refs += [source.model for source in part.sources]
                refs += [] if part.base_model is None else [part.base_model]
        if self.tokenizer is not None:
            tokens = self.tokenizer.tokens.values()
            named = [self.tokenizer.source, *(token.source.model for token in tokens)]
            refs += [model for model in named if isinstance(model, Ref)]
        return list(dict.fromkeys(refs))
