"""Says what a recipe may set for each merging method: mergekit's names and parameters, and ours.

Methods of mergekit keep its names, its defaults (under `compat="mergekit"`) and its reading of
which models are inputs; the table `MERGEKIT` has them. Methods that mergekit lacks go by their own
names, with the options of their signatures as parameters.
"""

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from sail_jax import methods
from sail_jax.checkpoint.recipe.settings import Integer, Number, Scalar, between
from sail_jax.checks import nearest
from sail_jax.merging.merge import Merge
from sail_jax.methods.registry import Takes, takes

REQUIRED: Any = object()
"""Stands for the default of a parameter that has none and must be set."""

Base = Literal["required", "optional", "first", "input", "joins"]
"""What `base_model` is to a method.

- "required", "optional": task vectors start at it, and it is not itself merged, listed or not.
  Without an optional one, they start at 0.
- "first": the first of the merged models (where slerp has t = 0).
- "input": one of the merged models if it is listed, else nothing.
- "joins": as "input"; under mergekit's conventions it joins whole models even if it is not listed,
  unless it then lacks a weight that the method needs.
"""


class Parameter(NamedTuple):
    """A parameter of a method, as YAML names it.

    Attributes:
      name: The name in a recipe.
      option: The name of our hyperparameter; None if the parameter changes no number.
      type: The type of a value, as pydantic takes it.
      default: The default, which is mergekit's for methods that it has; `REQUIRED` without one.
      per_model: Whether each model may have its own value. If so, the `parameters` of a model are
        read first, then those of the slice, the module and the recipe; else only the latter three.
    """

    name: str
    option: str | None
    type: Any = Number
    default: Any = REQUIRED
    per_model: bool = False

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is REQUIRED


class Entry(NamedTuple):
    """What a recipe needs to know of a method.

    Attributes:
      name: The name in a recipe.
      base: What `base_model` is to the method; see `Base`.
      least: The smallest number of models that are merged.
      most: The largest number of models that are merged; None for any.
      parameters: The parameters by their names in YAML.
      title: The name in a model card.
      reference: The address of the paper; "" without one.
      merge: The merge of all tensors, if it was given as a value; None if it is made of a name and
        parameters.
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
        """The parameter in YAML of each hyperparameter, by the name of the latter."""
        return {x.option: x.name for x in self.parameters.values() if x.option is not None}

    @property
    def published(self) -> bool:
        """Whether the method is one of mergekit's, which published recipes may name."""
        return self.merge is None and self.name in MERGEKIT

    @property
    def alone(self) -> bool:
        """Whether mergekit writes the base as it is, where a recipe lists nothing else."""
        deltas = self.base == "required" and (self.least, self.most) == (1, None)
        return self.published and deltas


_WEIGHT = Parameter("weight", "weights", per_model=True)
_DENSITY = Parameter("density", "density", between(0, 1, above=True), 1.0, True)
_GAMMA = Parameter("gamma", "gamma", between(0, 1), 0.01, True)
_EPSILON = Parameter("epsilon", "epsilon", between(0, 1), 0.15, True)
_MASK = Parameter("int8_mask", None, bool, False)
_LAMBDA = Parameter("lambda", "scale", Number, 1.0)


def _deltas(normalize: bool, rescale: bool, *more: Parameter) -> tuple[Parameter, ...]:
    """The parameters of a method of task vectors, with its defaults for normalize and rescale."""
    return (
        _WEIGHT,
        _DENSITY,
        _LAMBDA,
        Parameter("normalize", "normalize", bool, normalize),
        Parameter("rescale", "rescale", bool, rescale),
        _MASK,
        *more,
    )


def _without_effect(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """Makes density and rescale change nothing, as in mergekit's task arithmetic."""
    return tuple(
        p._replace(option=None) if p.name in ("density", "rescale") else p for p in parameters
    )


def _number(name: str, default: Any, option: str | None = None, type: Any = Number) -> Parameter:
    return Parameter(name, option or name, type, default)


def _bool(name: str, default: bool, option: str | None = None) -> Parameter:
    return Parameter(name, option or name, bool, default)


class Listed(NamedTuple):
    """What mergekit has of a method.

    Attributes:
      title: The name in a model card.
      reference: The address of the paper; "" without one.
      parameters: The parameters by their names in YAML. Their defaults are those of mergekit's
        code, which differ from the papers' in places.
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
"""mergekit's methods by name. How many models they merge, our merges state themselves."""

# What base_model is to a method, where mergekit has it otherwise than our merge.
_BASE_MODEL: Mapping[str, Base] = {"linear": "joins", "karcher": "joins", "slerp": "first"}
_ELSEWHERE = frozenset({"key", "compat", "scope"})
"""Hyperparameters that a recipe sets at its top level; `key` is made of its seed."""
_PER_MODEL = frozenset({"density", "gamma", "epsilon"})
_BASES: Mapping[str, Base] = {
    "required": "required",
    "optional": "optional",
    "unused": "input",
    "merged": "required",
}


def names() -> list[str]:
    """Lists the names that a recipe may give as merge_method.

    Methods whose hyperparameters are arrays are left out, as a recipe cannot hold arrays, and those
    whose annotations allow what they refuse (`methods.example`).

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

    return sorted(filter(shows, methods.METHODS))


def accepts(name: str, option: str) -> bool:
    """Tells whether a method takes a hyperparameter.

    Args:
      name: The name of a method.
      option: The name of one of our hyperparameters.

    Returns:
      Whether the method's signature has it; False for a name that is no method's, such as that of a
      merge given as a value.
    """
    return name in methods.METHODS and option in methods.options_of(name)


def entry(method: str | Merge) -> Entry:
    """Looks up what a recipe may say about a method.

    Args:
      method: The name of a method, or a merge.

    Returns:
      For a name, mergekit's row if there is one, with the options of our signature that it lacks;
      `compat`, `scope` and `key` are not among them, as a recipe sets them at its top level. For a
      merge, an entry whose only parameter is the weight.

    Raises:
      ValueError: If no method has the name (the message lists the nearest), if its hyperparameters
        are arrays, or if it refuses what their annotations allow.

    >>> entry("ties").parameters["lambda"].option, entry("ties").parameters["density"].default
    ('scale', 1.0)
    """
    if isinstance(method, Merge):
        return _entry_of(method)
    if callable(method):
        name = getattr(method, "__name__", "method")
        raise ValueError(f"expected a merge, got a function; call it: methods.{name}(...)")
    is_method = isinstance(method, str) and method in methods.METHODS
    try:
        example = methods.example(method) if is_method else None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error}; its annotations allow this: they have to state all") from error
    if example is None:
        why = "; its hyperparameters are arrays" if is_method else ""
        raise ValueError(f"no merging method {method!r}{nearest(str(method), names())}{why}")
    record = _entry_of(example)
    parameters = dict(MERGEKIT[method].parameters if method in MERGEKIT else record.parameters)
    taken = {p.option for p in parameters.values()}
    # mergekit's is unweighted; ours may be given weights.
    if method == "karcher":
        parameters["weight"] = _WEIGHT._replace(default=None)
    for option in methods.options_of(method).values():
        if option.name not in taken | _ELSEWHERE and option.name not in parameters:
            parameters[option.name] = _own(option, takes(method)[option.name])
    base = _BASE_MODEL.get(method, record.base)
    # `example` is an instance with stand-in hyperparameters: not the merge that is asked for.
    return record._replace(base=base, parameters=parameters, merge=None)


def _entry_of(merge: Merge) -> Entry:
    """The entry of a merge: its number of models and its kind of base, and the weight."""
    title, reference, _ = MERGEKIT.get(merge.name, Listed(merge.name, "", {}))
    parameters = {"weight": _WEIGHT._replace(default=None)}
    return Entry(merge.name, _BASES[merge.base], *merge.models, parameters, title, reference, merge)


def _own(argument: inspect.Parameter, takes: Takes) -> Parameter:
    """Makes an argument of our signature a parameter; its default and annotation give the type."""
    required = argument.default is argument.empty
    like = takes.any_value if required else argument.default
    types = {bool: bool, int: Integer, float: Number, str: str}
    kind = types.get(type(like), Scalar)
    # A default such as 1 does not mean whole numbers where the signature says float.
    if kind is Integer and float in takes.plain:
        kind = Number
    per_model = argument.name in _PER_MODEL or takes.per_model
    default = REQUIRED if required else argument.default
    return Parameter(argument.name, argument.name, kind, default, per_model=per_model)
