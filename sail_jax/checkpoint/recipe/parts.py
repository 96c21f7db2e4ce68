"""Declares all mappings that a recipe may contain, one class for each.

`declared` reads YAML with these classes, and `recipes` makes and checks whole recipes from them.
The parameters that a mapping may set depend on the method; `mergekit` lists them.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
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

from sail_jax.checkpoint.formats import hub, runs
from sail_jax.checkpoint.recipe import mergekit
from sail_jax.checkpoint.recipe.declared import (
    Declared,
    Given,
    Lenient,
    Note,
    Placed,
    Reading,
    kind,
    plain,
    read,
    remark,
)
from sail_jax.checkpoint.recipe.patterns import renaming
from sail_jax.checkpoint.recipe.published import OF_MIXTURES, PARAMETERS, without_effect
from sail_jax.checkpoint.recipe.settings import Integer, Natural, Setting, setting
from sail_jax.checkpoint.recipe.yaml_tree import Node, RecipeError, Where
from sail_jax.checks import mistyped, nearest
from sail_jax.merging.integers import Integers
from sail_jax.merging.merge import Merge

ALIGNMENT = (
    "method", "family", "spaces", "within", "normalize", "weights", "seed", "max_sweeps",
)  # fmt: skip
"""The options of an alignment in a recipe: `align_maps` without the options of a run."""
DTYPES = ("float64", "float32", "float16", "bfloat16")
TEMPLATES = ("auto", "alpaca", "chatml", "exaone", "llama3", "mistral")

_PATH = r"([^@+\0]+)(?:@([^@+\0]+))?"


def _at(path: str, revision: str | None) -> str:
    return path if revision is None else f"{path}@{revision}"


class Ref(NamedTuple):
    """A checkpoint in a recipe, in mergekit's notation path[@revision][+lora[@revision]].

    Attributes:
      path: The folder or file.
      revision: The revision, or the step of a run; None without one. It is also None if the whole
        text, including "@", is the name of a folder.
      lora: The path of an adapter that is added to the checkpoint; None without one.
      lora_revision: The revision of the adapter; None without one.
      steps: The operations on the checkpoint before it is merged, in this order.
    """

    path: str
    revision: str | None = None
    lora: str | None = None
    lora_revision: str | None = None
    steps: tuple["Growth | Alignment", ...] = ()

    @property
    def checkpoint(self) -> str:
        """The checkpoint as path[@revision], without its adapter."""
        return _at(self.path, self.revision)

    @property
    def adapter(self) -> str | None:
        """The adapter as path[@revision], None without one."""
        return self.lora and _at(self.lora, self.lora_revision)

    def __str__(self) -> str:
        names = [hub.called(path) for path in (self.checkpoint, self.adapter) if path is not None]
        return "+".join(names) + "".join(f" ({step})" for step in self.steps)


@dataclass(kw_only=True)
class Document(Reading):
    """The context of validators for a document, and their findings.

    Attributes:
      others: The names of all documents of the file, if there are several.
      uses: The names of the documents that are inputs of this one, with repetitions.
      entry: The method; None before it is read, or if it was refused.
    """

    others: Collection[str] = ()
    uses: list[str] = field(default_factory=list)
    entry: mergekit.Entry | None = None


def _document(info: ValidationInfo) -> Document:
    """Returns the document that is being read."""
    assert isinstance(info.context, Document)
    return info.context


def _ref(given: object, info: ValidationInfo) -> Ref:
    """Reads a model that is given as a single word or as a mapping."""
    if isinstance(given, Given):
        ref = read(Model, given.node, info.context).ref()
    elif isinstance(given, str) and (parts := re.fullmatch(f"{_PATH}(?:[+]{_PATH})?", given)):
        ref = Ref(parts[1], parts[2], parts[3], parts[4])
    elif isinstance(given, Ref):
        return given
    else:
        raise ValueError(f"expected path[@revision][+lora[@revision]]; got {kind(given)}")
    document = _document(info)
    if ref.path in document.others:
        document.uses.append(ref.path)
        if ref.revision is not None:
            text = f"revision {ref.revision} has no effect: {ref.path} is another document"
            remark(info, Where(), text)
        return ref._replace(revision=None)
    return ref


def _location(given: object) -> object:
    """Splits path[@revision]; values other than text are left to the validator."""
    if not isinstance(given, str):
        return given
    parts = re.fullmatch(r"([^@\0]+)(?:@([^@\0]+))?", given)
    if parts is None:
        raise ValueError(f"expected path[@revision]; got {given!r}")
    return {"path": parts[1], "revision": parts[2]}


def _layers(layers: tuple[int, ...]) -> tuple[int, ...]:
    """Checks a range of layers; an empty range stands for the tensors outside the layers."""
    if len(layers) != 2:
        raise ValueError(f"expected [first, last + 1]; got {len(layers)} numbers")
    if not 0 <= layers[0] <= layers[1]:
        raise ValueError(f"expected 0 <= first <= last + 1; got {list(layers)}")
    # The planner iterates over the range, and a number this large is a typo.
    if layers[1] > 1_000_000:
        raise ValueError(f"no model has {layers[1]} layers")
    return layers


def _dtype(name: str) -> str:
    """Checks the name of an output dtype, and drops "torch." from it."""
    name = name.removeprefix("torch.")
    if name not in DTYPES:
        why = "; whole numbers would cut the weights" if name.startswith("int") else ""
        raise ValueError(f"expected a floating dtype, got {name!r}{nearest(name, DTYPES)}{why}")
    return name


def _name(given: object) -> object:
    """Reads the name of a document; numbers and booleans become text."""
    return str(given) if isinstance(given, (bool, int, float)) else given


def _template(template: str) -> str:
    """Checks a chat template: a name, or a text long enough to be Jinja."""
    if template not in TEMPLATES and not (len(template) >= 20 and "{" in template):
        hint = nearest(template[:40], TEMPLATES)
        raise ValueError(f"expected a name or a Jinja template{hint}")
    return template


def _renames(patterns: Mapping[str, str]) -> Mapping[str, str]:
    """Checks the regular expressions and replacements under rename."""
    for pattern, replacement in patterns.items():
        renaming(pattern, replacement)
    return patterns


def _settings(
    given: object, info: ValidationInfo, *, of_model: bool = False
) -> Mapping[str, Setting]:
    """Reads the parameters of a mapping for the method of the recipe."""
    if not isinstance(given, Given):
        raise ValueError(f"expected parameters, a mapping; got {kind(given)}")
    document = _document(info)
    entry, settings, first = document.entry, {}, dict[str, str]()
    # The method itself was refused, and that error is reported.
    if entry is None:
        return {}
    for name, node in given.node.value.items():
        parameter = entry.parameter(name)
        if parameter is None:
            known = [word for p in entry.parameters.values() for word in (p.name, p.theirs) if word]
            if near := mistyped(name, known):
                message = f"unknown parameter {name!r} of {entry.name} (nearest: {near!r})"
                raise RecipeError(node.key, message)
            here = f"under {entry.name}"
            remark(info, node.key, without_effect(name, here, of_method=True))
        elif of_model and not parameter.per_model:
            remedy = "set it for the slice, the module or the recipe"
            theirs = mergekit.MERGEKIT[entry.name].parameters if entry.published else {}
            if parameter.name not in theirs:
                raise RecipeError(
                    node.key, f"{entry.name} does not read {name!r} per model; {remedy}"
                )
            remark(
                info, node.key, f"{name} of one model has no effect under {entry.name}; {remedy}"
            )
        elif (other := first.setdefault(parameter.name, name)) == name:
            settings[name] = setting(node, parameter.type, document.notes)
        elif plain(node) != plain(given.node.value[other]):
            same = f"{other} and {name} are the same parameter, but their values differ"
            raise RecipeError(node.key, f"{same}: set only one of them")
    return settings


def _entry(given: str | Merge | mergekit.Entry, info: ValidationInfo) -> mergekit.Entry:
    """Looks up the method, and stores it in the context for later validators."""
    entry = given if isinstance(given, mergekit.Entry) else mergekit.entry(given)
    _document(info).entry = entry
    return entry


Reference = Annotated[Ref, PlainValidator(_ref)]
Layers = Annotated[tuple[Integer, ...], AfterValidator(_layers)]
Dtype = Annotated[str, AfterValidator(_dtype)]
Parameters = Annotated[Mapping[str, Setting], PlainValidator(_settings)]
OwnParameters = Annotated[Mapping[str, Setting], PlainValidator(partial(_settings, of_model=True))]


class Options(dict[str, Any]):
    """Immutable options by name, in the order of the names.

    A `Ref` contains its steps and is a key of dictionaries, so options are hashable.
    """

    def __init__(self, given: Mapping[str, Any] = MappingProxyType({})) -> None:
        super().__init__(sorted(given.items()))

    def __hash__(self) -> int:  # type: ignore[override]
        # Hashes only the names, because values may be lists and mappings.
        return hash(tuple(self))


class Step(Declared):
    """An operation on a model before it is merged, which mergekit does not have: unknown keys are
    errors.

    Attributes:
      options: All keys that are not fields, with their values.
    """

    options: Annotated[Options, PlainValidator(Options)] = Field(Options(), exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _rest(cls, given: Given) -> Given:
        fields = {*super().keys(given), "where"}
        given["options"] = {key: given[key] for key in given if key not in fields}
        return given


def _target(given: object) -> str | Options:
    """Reads the target of a growth: a path, or a mapping."""
    if not isinstance(given, (str, dict)) or not given:
        raise ValueError(f"expected a config.json, factors or entries of one; got {kind(given)}")
    return given if isinstance(given, str) else Options(given)


class Growth(Step):
    """The growth of a model before it is merged.

    Attributes:
      to: The target: the path of a config.json, factors such as {"width": 2}, or entries of a
        configuration.
      method: The name of a growth method.
      seed: The seed of the method's random draws.
      options: The method's options.
    """

    to: Annotated[str | Options, PlainValidator(_target)]
    method: str = "lemon"
    seed: Natural = 0

    def __str__(self) -> str:
        return f"grown by {self.method}"

    @classmethod
    def keys(cls, given: Given) -> list[str]:
        from sail_jax.growth.named import METHODS

        for key in ("method", "depth_method"):
            # This is a list because the value may be a mapping, which cannot be looked up in a
            # dict.
            if given.get(key) is not None and given[key] not in [*METHODS]:
                where = given.node.value[key].where
                expected = ", ".join(METHODS)
                raise RecipeError(where, f"expected one of {expected}; got {kind(given[key])}")
        method = METHODS[given.get("method") or "lemon"]
        deepens_by = given.get("depth_method") or method.deepens_by
        taken = {*method.options, *(METHODS[deepens_by].options if deepens_by else ())}
        return [*super().keys(given), "depth_method", "untie", "require_lossless", *sorted(taken)]


class Alignment(Step):
    """The alignment of a model to another one before it is merged.

    Attributes:
      to: The model that it is aligned to.
      options: The options of `align_maps`; see `ALIGNMENT`.
    """

    to: Reference

    def __str__(self) -> str:
        return f"aligned to {self.to}"

    @classmethod
    def keys(cls, given: Given) -> list[str]:
        return [*super().keys(given), *ALIGNMENT]


class Stepped(Lenient):
    """A mapping with a model and its operations: it is first grown, then aligned.

    Attributes:
      grow: The growth of the model; None for no growth.
      align: The alignment of the model; None for no alignment.
    """

    grow: Growth | None = None
    align: Alignment | None = None

    @property
    def steps(self) -> tuple[Growth | Alignment, ...]:
        """The operations on the model, in order."""
        return tuple(filter(None, (self.grow, self.align)))


class Location(Lenient):
    """path[@revision] as a mapping.

    Attributes:
      path: The path.
      revision: The revision; None without one.
    """

    path: str
    revision: str | None = None


class Model(Stepped):
    """A model as a mapping.

    Attributes:
      model: The checkpoint.
      lora: The adapter that is added to it; None without one.
      grow: The growth of the model; None for no growth.
      align: The alignment of the model; None for no alignment.
    """

    model: Annotated[Location, BeforeValidator(_location)]
    lora: Annotated[Location, BeforeValidator(_location)] | None = None

    def ref(self) -> Ref:
        """Returns the model as a `Ref`."""
        lora = (None, None) if self.lora is None else (self.lora.path, self.lora.revision)
        return Ref(self.model.path, self.model.revision, *lora, self.steps)


class Source(Stepped, Placed):
    """A model that is merged, or a range of its layers, with its own parameters.

    Attributes:
      model: The model.
      layers: The layers (first, last + 1); None for all. The key is layer_range.
      parameters: The parameters set for this model alone.
      grow: The growth of the model; None for no growth.
      align: The alignment of the model; None for no alignment.
      where: Its position in the recipe.
    """

    model: Reference
    layers: Layers | None = Field(None, validation_alias="layer_range")
    parameters: OwnParameters = Field(default_factory=dict)

    @model_validator(mode="after")
    def _stepped(self) -> "Source":
        if not self.steps:
            return self
        if self.model.steps:
            message = f"{self.model} has these operations already, inside of model"
            raise RecipeError(self.where, message)
        return self.model_copy(update={"model": self.model._replace(steps=self.steps)})


class Slice(Lenient, Placed):
    """A run of layers of the output, merged layer by layer from equally many layers of each source.

    A recipe with whole models has one slice, with all their layers and all other tensors.

    Attributes:
      whole: Whether the sources are whole models, not ranges of layers.
      sources: The models, with the layers that are merged.
      base_model: The base in this slice; None for the recipe's.
      parameters: The parameters set for this slice.
      where: Its position in the recipe.
    """

    # This precedes `sources`, because fields are validated in order and `_alike` requires it.
    whole: bool = Field(False, exclude=True)
    sources: tuple[Source, ...]
    base_model: Reference | None = None
    parameters: Parameters = Field(default_factory=dict)

    @field_validator("sources")
    @classmethod
    def _several(cls, sources: tuple[Source, ...]) -> tuple[Source, ...]:
        """Replaces a text for several checkpoints of a run by these checkpoints."""
        each: list[Source] = []
        for source in sources:
            model = source.model
            if not runs.several(model.checkpoint):
                each.append(source)
                continue
            for step in runs.named(model.checkpoint):
                ref = model._replace(path=str(step.path), revision=None)
                each.append(source.model_copy(update={"model": ref}))
        return tuple(each)

    @field_validator("sources")
    @classmethod
    def _alike(cls, sources: tuple[Source, ...], info: ValidationInfo) -> tuple[Source, ...]:
        if info.data["whole"]:
            for source in sources:
                if source.layers is not None:
                    remark(info, source.where, "layer_range has no effect outside of slices")
            return tuple(source.model_copy(update={"layers": None}) for source in sources)
        for source in sources:
            if source.layers is None:
                raise RecipeError(source.where, "a source needs 'layer_range', which is missing")
        lengths = [source.layers[1] - source.layers[0] for source in sources if source.layers]
        if len(set(lengths)) > 1:
            raise ValueError(f"all sources of a slice need equally many layers; got {lengths}")
        return sources


class Module(Lenient, Placed):
    """A part of the output, such as the text tower, made of slices one after another.

    Attributes:
      slices: The slices, in the order of their layers in the output.
      parameters: The parameters set for this module.
      name: Its name; "" if the recipe has no modules, and this is the whole output.
      where: Its position in the recipe.
    """

    slices: tuple[Slice, ...] = Field(
        validation_alias=AliasChoices("slices", "models"), min_length=1
    )
    parameters: Parameters = Field(default_factory=dict)
    name: str = Field("", exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _one_slice(cls, given: Given) -> Given:
        """Reads models without slices as a single slice of whole models."""
        if given.only("models", "slices") == "models":
            single = given.within("models", "sources")
            single["whole"] = True
            given["slices"] = [single]
        return given


class Row(Lenient):
    """The source of an embedding row.

    Attributes:
      kind: "zero" for a row of zeros, "model_token" for a row of a model.
      model: The model that provides the row; None for a row of zeros.
      token: The row's token in that model.
      token_id: The token's id, instead of its name. Without either, the row belongs to the token
        with the same name.
    """

    kind: Literal["zero", "model_token"]
    model: Reference | None = None
    token: str | None = None
    token_id: Natural | None = None


def _row(given: object, info: ValidationInfo) -> Row:
    """Reads a row that is given as a mapping, or only as a model."""
    if not isinstance(given, Given) or "kind" not in given:
        return Row(kind="model_token", model=_ref(given, info))
    row = read(Row, given.node, info.context)
    says = [key for key in ("model", "token", "token_id") if getattr(row, key) is not None]
    if row.kind == "zero" and says:
        raise ValueError(f"a row of zeros cannot have {says[0]}")
    if row.kind == "model_token" and row.model is None:
        raise ValueError("a row of a model needs 'model', which is missing")
    if row.kind == "model_token" and len(says) != 2:
        raise ValueError("expected one of token, token_id")
    return row


class Token(Lenient, Placed):
    """The source of a token's row in the merged embeddings.

    Attributes:
      source: The row.
      force: Whether all models get this row, or only those without the token.
      where: Its position in the recipe.
    """

    source: Annotated[Row, PlainValidator(_row)]
    force: bool = False


def _tokenizer_source(given: object, info: ValidationInfo) -> str | Ref:
    return given if given in ("union", "base") else _ref(given, info)


class Tokenizer(Lenient, Placed):
    """The vocabulary of the output.

    Attributes:
      source: "base" for the base model's, "union" for the base model's with the tokens that others
        added, or the model that provides the vocabulary.
      tokens: The rows of single tokens, by token.
      pad_to_multiple_of: The number of embedding rows is rounded up to a multiple of this; None to
        keep rows without a token.
      transplant: The method that makes rows for tokens that are missing in a model: "omp" or
        "nearest", both of `sail_jax.transplant`, the "mean" of its other rows, or "zero". None for
        copies of the other models' rows.
      k: The largest number of rows from which one row is made, by "omp" and "nearest".
      where: Its position in the recipe.
    """

    source: Annotated[str | Ref, PlainValidator(_tokenizer_source)] = "union"
    tokens: dict[str, Token] = Field(default_factory=dict)
    pad_to_multiple_of: Annotated[Integer, Field(ge=1, le=1 << 20)] | None = None
    transplant: Literal["omp", "nearest", "mean", "zero"] | None = None
    k: Annotated[Integer, Field(ge=1, le=1 << 12)] = 64


def _modules(given: object) -> list[object]:
    """Lists the modules, each with its name."""
    if not isinstance(given, Given) or not given:
        raise ValueError(f"expected modules by name; got {'none' if given == {} else kind(given)}")
    for name, module in given.items():
        if isinstance(module, Given):
            module["name"] = name
    return list(given.values())


class Recipe(Lenient):
    """A recipe, after all checks that do not require its checkpoints.

    Attributes:
      entry: The method. The key is merge_method.
      modules: The parts of the output; models or slices at the top level form one module.
      base_model: The base; None without one.
      parameters: The parameters set for the whole recipe.
      dtype: The dtype of the output, unless `out_dtype` is given. None for the base's dtype, or
        without a base the first model's.
      out_dtype: The dtype of the output; None for `dtype`.
      requantize: "fp8" to write weights in FP8 again, in the base's scheme, or without a base in
        the first model's; None for plain weights.
      tokenizer: The vocabulary of the output; None to match rows by their numbers.
      chat_template: The name of a conversation format, "auto" for the models' most frequent one, or
        a template in Jinja; None to keep the existing one.
      compat: The origin of the defaults and variants of methods.
      scope: Whether thresholds are taken per "tensor" or over the whole "tree", for methods with
        this choice; None for their default.
      seed: The seed of methods that draw random numbers.
      rename: Regular expressions and their replacements, applied to the tensor names of every
        input, and to weights of an adapter that are missing in its base.
      select: Patterns of the tensors that are merged; None for the weights of a known training
        state, and for all tensors of anything else.
      rest: The source of tensors that are not selected: the "last" or the "first" model; "drop"
        omits them, "error" refuses them.
      missing: The treatment of a tensor that is missing in a model: "error", "skip" to omit the
        model, or "base" to use the base's tensor.
      extra: The treatment of tensors that are not in the output: "error" or "ignore".
      integers: The source of integers, bools or keys that differ: the base or else the "first"
        model, the "last" model, or the largest value ("max"); "refuse" makes it an error.
      name: The name of the result in other documents of the same file; None without a name.
      notes: The parts without effect, which mergekit ignores.
      uses: The names of other documents of the same file that are inputs.
      text: The YAML text; "" if the recipe was made in Python.
      node: The YAML tree, for the positions of keys.
    """

    # This precedes all fields with parameters, because fields are validated in order and
    # `_settings` requires it.
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
    requantize: Literal["fp8"] | None = None
    tokenizer: Tokenizer | None = Field(
        None, validation_alias=AliasChoices("tokenizer", "tokenizer_source")
    )
    chat_template: Annotated[str, AfterValidator(_template)] | None = None
    compat: Literal["mergekit", "paper"] = "mergekit"
    scope: Literal["tensor", "tree"] | None = None
    seed: Natural = 0
    rename: Annotated[dict[str, str], AfterValidator(_renames)] = Field(default_factory=dict)
    select: str | None = None
    rest: Literal["last", "first", "drop", "error"] = "last"
    missing: Literal["error", "skip", "base"] = "error"
    extra: Literal["error", "ignore"] = "error"
    integers: Integers = "first"
    name: Annotated[str | None, BeforeValidator(_name)] = None
    notes: tuple[Note, ...] = Field((), exclude=True)
    uses: tuple[str, ...] = Field((), exclude=True)
    text: str = Field("", exclude=True)
    node: SkipValidation[Node] = Field(exclude=True, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _one_module(cls, given: Given) -> Given:
        """Reads models or slices at the top level as one module without a name."""
        given["node"] = given.node
        mixture = next((key for key in given.node.value if key in OF_MIXTURES), None)
        if mixture is not None and not {"models", "slices", "modules"} & {*given.node.value}:
            where = given.node.value[mixture].key
            raise RecipeError(where, "a file of mergekit-moe is for sail-jax upcycle")
        form = given.only("models", "slices", "modules")
        if form != "modules":
            given["modules"] = given.within(form, "", form)
        if "tokenizer_source" in given and "tokenizer" in given:
            where = given.node.value["tokenizer_source"].key
            raise RecipeError(where, "not allowed with tokenizer; move it to its source")
        if "tokenizer_source" in given:
            given["tokenizer"] = given.within("tokenizer_source", "source")
        return given

    @classmethod
    def here(cls) -> str:
        return "at the top"

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.entry.name

    def read(self) -> Mapping[str, mergekit.Parameter]:
        """Lists the parameters of the method that have an effect under the recipe's conventions.

        Returns:
          The parameters by their names in YAML. Under mergekit's conventions, karcher does not
          take our optional weights.
        """
        every = self.entry.parameters
        if self.compat != "mergekit" or not self.entry.published:
            return every
        theirs = mergekit.MERGEKIT[self.method].parameters
        return {name: p for name, p in every.items() if name in theirs or name not in PARAMETERS}

    def at(self, key: str) -> Where:
        """Finds the position of a top-level key, for an error message."""
        given = self.node.value.get(key)
        return self.node.where._replace(path=key) if given is None else given.key

    def place_of(self, ref: Ref) -> Where:
        """Finds the position of a model: its first source, or else that of the base."""
        named = [source.where for source in self.sources() if source.model == ref]
        return named[0] if named else self.at("base_model")

    def settings(self) -> list[tuple[str, Setting]]:
        """Lists all parameters that are set in the recipe and have an effect there."""
        read = {key for p in self.read().values() for key in (p.name, p.theirs)}
        return [(name, setting) for name, setting in self.given() if name in read]

    def given(self) -> list[tuple[str, Setting]]:
        """Lists all parameters that are set in the recipe.

        Returns:
          Pairs of a parameter's name and its setting, with the name as written: first the recipe's,
          then those in each module, its slices and their sources.
        """
        scopes: list[Parameters] = [self.parameters]
        for module in self.modules:
            scopes.append(module.parameters)
            for part in module.slices:
                scopes += [part.parameters, *(source.parameters for source in part.sources)]
        return [pair for scope in scopes for pair in scope.items()]

    def slices(self) -> list[Slice]:
        """Lists the slices of all modules."""
        return [part for module in self.modules for part in module.slices]

    def sources(self) -> list[Source]:
        """Lists the sources of all slices."""
        return [source for part in self.slices() for source in part.sources]

    def merged(self) -> list[Ref]:
        """Lists the checkpoints that are merged, and bases; not those for a tokenizer alone.

        Returns:
          Each once: the base first, then the models and the bases of slices in their order.
        """
        named = [self.base_model]
        for part in self.slices():
            named += [*[source.model for source in part.sources], part.base_model]
        return list(dict.fromkeys(filter(None, named)))

    def models(self) -> list[Ref]:
        """Lists every checkpoint that is an input of the recipe, each once.

        Returns:
          Those of `merged`, then models for the tokenizer alone.
        """
        if self.tokenizer is None:
            return self.merged()
        tokens = [token.source.model for token in self.tokenizer.tokens.values()]
        named = [*self.merged(), self.tokenizer.source, *tokens]
        return list(dict.fromkeys(ref for ref in named if isinstance(ref, Ref)))
