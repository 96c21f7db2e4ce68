"""The parameters that a recipe may set for each merging method: mergekit's names, and ours.

Methods of mergekit keep its names, its defaults (under `compat="mergekit"`) and its rule for which
models are inputs; the table `MERGEKIT` lists them. Methods that mergekit does not have use our
names, with the options of their signatures as parameters. The factor on the merged task vector is
`scale`. mergekit's name for it, `lambda`, is read as the same parameter.
"""

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import Field

from sail_jax import methods
from sail_jax.checkpoint.recipe.settings import Integer, Number, Scalar, between
from sail_jax.checks import nearest
from sail_jax.merging.merge import Merge
from sail_jax.methods.registry import Takes, exists, known, takes

T = TypeVar("T")
REQUIRED: Any = object()
"""Marks a parameter without a default, which must be set."""

Base = Literal["required", "optional", "first", "input", "joins"]
"""The role of `base_model` in a method.

- "required", "optional": task vectors start at it, and it is not itself merged, listed or not.
  Without an optional one, they start at 0.
- "first": the first of the merged models (slerp has t = 0 there).
- "input": one of the merged models if it is listed; otherwise it is ignored.
- "joins": like "input". Under mergekit's conventions it also joins whole models without being
  listed, unless it then lacks a weight that the method needs.
"""


class Parameter(NamedTuple):
    """A parameter of a method, as a recipe sets it.

    Attributes:
      name: The name in a recipe.
      option: The name of our hyperparameter; None if the parameter has no effect on the result.
      type: The type of a value, for pydantic.
      default: The default, which is mergekit's for methods that it has; `REQUIRED` if there is
        none.
      per_model: Whether each model may have its own value. If so, the `parameters` of a model are
        read first, then the slice's, the module's and the recipe's; else only the latter three.
      theirs: mergekit's name in a recipe, if it differs; otherwise "".
    """

    name: str
    option: str | None
    type: Any = Number
    default: Any = REQUIRED
    per_model: bool = False
    theirs: str = ""

    @property
    def required(self) -> bool:
        """Whether it must be set."""
        return self.default is REQUIRED

    def of(self, scope: Mapping[str, T]) -> T | None:
        """Returns the value in a mapping of parameters, under either name; None without one."""
        return scope.get(self.name, scope.get(self.theirs) if self.theirs else None)


class Entry(NamedTuple):
    """The properties of a method that a recipe depends on.

    Attributes:
      name: The name in a recipe.
      base: The role of `base_model`; see `Base`.
      least: The smallest number of models that are merged.
      most: The largest number of models that are merged; None for any.
      parameters: The parameters by their names in YAML.
      title: The name in a model card.
      reference: The address of the paper; "" without one.
      merge: The merge of all tensors, if it was given as a value; None if a name and parameters
        define it.
    """

    name: str
    base: Base
    least: int
    most: int | None
    parameters: Mapping[str, Parameter]
    title: str
    reference: str
    merge: Merge | None = None

    @property
    def keys(self) -> dict[str, str]:
        """The names of our hyperparameters, each with the name of the parameter in YAML."""
        return {x.option: x.name for x in self.parameters.values() if x.option is not None}

    def parameter(self, key: str) -> Parameter | None:
        """Returns the parameter that a key of a recipe sets; None for an unknown key."""
        if key in self.parameters:
            return self.parameters[key]
        return next((p for p in self.parameters.values() if p.theirs == key), None)

    @property
    def published(self) -> bool:
        """Whether the method is one of mergekit's, so published recipes may use it."""
        return self.merge is None and self.name in MERGEKIT

    @property
    def alone(self) -> bool:
        """Whether mergekit copies the base unchanged if a recipe lists nothing else."""
        deltas = self.base == "required" and (self.least, self.most) == (1, None)
        return self.published and deltas


_WEIGHT = Parameter("weight", "weights", per_model=True)
_DENSITY = Parameter("density", "density", between(0, 1, above=True), 1.0, True)
_GAMMA = Parameter("gamma", "gamma", between(0, 1), 0.01, True)
_EPSILON = Parameter("epsilon", "epsilon", between(0, 1), 0.15, True)
_MASK = Parameter("int8_mask", None, bool, False)
_SCALE = Parameter("scale", "scale", Number, 1.0, theirs="lambda")


def _deltas(normalize: bool, rescale: bool, *more: Parameter) -> tuple[Parameter, ...]:
    """Returns the parameters of a task vector method, with defaults for normalize and rescale."""
    return (
        _WEIGHT,
        _DENSITY,
        _SCALE,
        Parameter("normalize", "normalize", bool, normalize),
        Parameter("rescale", "rescale", bool, rescale),
        _MASK,
        *more,
    )


def _without_effect(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """Makes density and rescale have no effect, as in mergekit's task arithmetic."""
    return tuple(
        p._replace(option=None) if p.name in ("density", "rescale") else p for p in parameters
    )


def _number(name: str, default: Any, option: str | None = None, type: Any = Number) -> Parameter:
    return Parameter(name, option or name, type, default)


def _bool(name: str, default: bool, option: str | None = None) -> Parameter:
    return Parameter(name, option or name, bool, default)


class Listed(NamedTuple):
    """A method's entry in mergekit.

    Attributes:
      title: The name in a model card.
      reference: The address of the paper; "" without one.
      parameters: The parameters by their names in YAML. Their defaults come from mergekit's code,
        which differs from the papers in places.
    """

    title: str
    reference: str
    parameters: Mapping[str, Parameter]


def _listed(title: str, arxiv: str, *parameters: Parameter) -> Listed:
    reference = arxiv and f"https://arxiv.org/abs/{arxiv}"
    return Listed(title, reference, {parameter.name: parameter for parameter in parameters})


_FLOOR = _number("epsilon", 1e-5, type=between(0))
_BY_WEIGHT = _deltas(True, False)
_DROPPED = _deltas(False, True)
_OUTLIERS = _deltas(False, False, _GAMMA)
MERGEKIT = {
    "linear": _listed("Linear (model soup)", "2203.05482", _WEIGHT, _bool("normalize", True)),
    "slerp": _listed("SLERP", "", _number("t", REQUIRED)),
    "nuslerp": _listed(
        "NuSLERP",
        "",
        _WEIGHT,
        _bool("nuslerp_flatten", True, "flatten"),
        _bool("nuslerp_row_wise", False, "row_wise"),
    ),
    "multislerp": _listed(
        "Multi-SLERP",
        "",
        _WEIGHT,
        _bool("normalize_weights", True, "normalize"),
        _number("eps", 1e-8, type=between(0)),
    ),
    "karcher": _listed(
        "Karcher mean",
        "",
        Parameter("max_iter", "max_iterations", Annotated[Integer, Field(ge=1)], 10),
        _number("tol", 1e-5, "tolerance", between(0)),
    ),
    "task_arithmetic": _listed(
        "Task arithmetic", "2212.04089", *_without_effect(_deltas(False, False))
    ),
    "ties": _listed("TIES", "2306.01708", *_BY_WEIGHT),
    "dare_linear": _listed("DARE, linear", "2311.03099", *_DROPPED),
    "dare_ties": _listed("DARE, TIES", "2311.03099", *_DROPPED),
    "breadcrumbs": _listed("Breadcrumbs", "2312.06795", *_OUTLIERS),
    "breadcrumbs_ties": _listed("Breadcrumbs, TIES", "2312.06795", *_OUTLIERS),
    "della": _listed("DELLA", "2406.11617", *_deltas(True, True, _EPSILON)),
    "della_linear": _listed("DELLA, linear", "2406.11617", *_deltas(False, True, _EPSILON)),
    "model_stock": _listed("Model stock", "2403.19522", _bool("filter_wise", False)),
    "nearswap": _listed("NearSwap", "", _number("t", REQUIRED, type=between(0))),
    "arcee_fusion": _listed("Arcee fusion", ""),
    "sce": _listed("SCE", "2408.07990", _number("select_topk", 1.0, type=between(0, 1)), _MASK),
    "ram": _listed("RAM", "2601.13572", _FLOOR),
    "ramplus_tl": _listed(
        "RAM+ (tensor-local)",
        "2601.13572",
        _number("r", 0.1),
        _number("alpha", 0.2, type=between(0)),
        _FLOOR,
    ),
    "passthrough": _listed("Passthrough", "", Parameter("scale", "scale", Number, 1.0, True)),
}
"""mergekit's methods by name. Our merges define how many models each of them takes."""

# The role of base_model if mergekit's method and our merge differ.
_BASE_MODEL: Mapping[str, Base] = {"linear": "joins", "karcher": "joins", "slerp": "first"}
_ELSEWHERE = frozenset({"key", "compat", "scope"})
"""Hyperparameters that a recipe sets at its top level; `key` is made from its seed."""
_PER_MODEL = frozenset({"density", "gamma", "epsilon"})
_BASES: Mapping[str, Base] = {
    "required": "required",
    "optional": "optional",
    "unused": "input",
    "merged": "required",
}


def names() -> list[str]:
    """Lists the names that a recipe may give as merge_method.

    Methods with arrays as hyperparameters are omitted, because a recipe cannot contain arrays. So
    are methods whose annotations allow values that they refuse (`methods.example`).

    Returns:
      The names, sorted.

    >>> "ties" in names()
    True
    """

    def shows(name: str) -> bool:
        try:
            return methods.example(name) is not None
        except (TypeError, ValueError):
            return False

    return sorted(filter(shows, known()))


def accepts(name: str, option: str) -> bool:
    """Checks whether a method takes a hyperparameter.

    Args:
      name: The name of a method.
      option: The name of one of our hyperparameters.

    Returns:
      Whether it is in the method's signature; False for an unknown name, such as the name of a
      merge given as a value.
    """
    return exists(name) and option in methods.options_of(name)


def entry(method: str | Merge) -> Entry:
    """Looks up the parameters of a method, and its other properties.

    Args:
      method: The name of a method, or a merge.

    Returns:
      For a name, mergekit's row if there is one, with the missing options of our signature.
      `compat`, `scope` and `key` are omitted, because a recipe sets them at its top level. For a
      merge, an entry with the weight as its only parameter.

    Raises:
      ValueError: If no method has the name (the message suggests similar names), if its
        hyperparameters are arrays, or if it refuses values that their annotations allow.

    >>> entry("ties").parameters["density"].default, entry("ties").parameter("lambda").name
    (1.0, 'scale')
    """
    if isinstance(method, Merge):
        return _entry_of(method)
    if callable(method):
        name = getattr(method, "__name__", "method")
        raise ValueError(f"expected a merge, got a function; call it: methods.{name}(...)")
    is_method = isinstance(method, str) and exists(method)
    try:
        example = methods.example(method) if is_method else None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error}; annotations have to exclude refused values") from error
    if example is None:
        why = "; its hyperparameters are arrays" if is_method else ""
        raise ValueError(f"no merging method {method!r}{nearest(str(method), names())}{why}")
    record = _entry_of(example)
    parameters = dict(MERGEKIT[method].parameters if method in MERGEKIT else record.parameters)
    taken = {p.option for p in parameters.values()}
    # mergekit's is unweighted; ours accepts weights.
    if method == "karcher":
        parameters["weight"] = _WEIGHT._replace(default=None)
    accepted = takes(method)
    for option in methods.options_of(method).values():
        if option.name not in taken | _ELSEWHERE and option.name not in parameters:
            parameters[option.name] = _own(option, accepted[option.name])
    base = _BASE_MODEL.get(method, record.base)
    # `example` is an instance with stand-in hyperparameters, and not the requested merge.
    return record._replace(base=base, parameters=parameters, merge=None)


def _entry_of(merge: Merge) -> Entry:
    """Returns the entry of a merge: its number of models, the role of its base, and the weight."""
    title, reference, _ = MERGEKIT.get(merge.name, Listed(merge.name, "", {}))
    parameters = {"weight": _WEIGHT._replace(default=None)}
    return Entry(merge.name, _BASES[merge.base], *merge.models, parameters, title, reference, merge)


def _own(argument: inspect.Parameter, takes: Takes) -> Parameter:
    """Converts an argument of our signature to a parameter, by its default and annotation."""
    required = argument.default is argument.empty
    like = takes.any_value if required else argument.default
    types = {bool: bool, int: Integer, float: Number, str: str}
    kind = types.get(type(like), Scalar)
    # A default such as 1 does not imply whole numbers if the signature has float.
    if kind is Integer and float in takes.plain:
        kind = Number
    per_model = argument.name in _PER_MODEL or takes.per_model
    default = REQUIRED if required else argument.default
    theirs = _SCALE.theirs if argument.name == _SCALE.name else ""
    return Parameter(argument.name, argument.name, kind, default, per_model, theirs)
