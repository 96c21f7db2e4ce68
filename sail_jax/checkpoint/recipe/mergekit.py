"""What a recipe may say about each method: mergekit's names and parameters, and ours.

mergekit's methods keep its names, its defaults (under `compat="mergekit"`) and its reading of who
the inputs are. Ours that it lacks go by their own names, with the options of their signatures.
"""

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from sail_jax import methods
from sail_jax.checkpoint.recipe.settings import Integer, Number, Scalar, between
from sail_jax.checks import nearest
from sail_jax.merging.merge import Merge

__all__ = [
    "MERGEKIT",
    "REQUIRED",
    "Base",
    "Entry",
    "Parameter",
    "accepts",
    "entry",
    "names",
]

REQUIRED = object()
"""The default of a parameter without one."""

Base = Literal["required", "optional", "first", "input", "joins"]
"""What `base_model` is to a method: "required" or "optional" for deltas, and then never an input;
"first" of the inputs (slerp's t=0); an "input" only if it is listed; one that "joins" the inputs
listed or not (mergekit's karcher)."""


class Parameter(NamedTuple):
    """A parameter as YAML names it; `option` is ours, None if it changes no number.

    `default` is mergekit's, `type` what pydantic takes it for. per_model: read from `parameters` of
    a model first, else only from those of the slice, module and recipe.
    """

    name: str
    option: str | None
    type: Any = Number
    default: Any = REQUIRED
    per_model: bool = False


class Entry(NamedTuple):
    """A method: its name in a recipe, what its inputs are, and its parameters by YAML name.

    merge: of all tensors, if it was given as a value instead of a name and parameters.
    """

    name: str
    base: Base
    least: int
    most: int | None
    parameters: Mapping[str, Parameter]
    title: str
    reference: str
    merge: Merge | None = None


_WEIGHT = Parameter("weight", "weights", per_model=True)
_DENSITY = Parameter("density", "density", between(0, 1, above=True), 1.0, True)
_GAMMA = Parameter("gamma", "gamma", between(0, 1), 0.01, True)
_EPSILON = Parameter("epsilon", "epsilon", between(0, 1), 0.15, True)
_MASK = Parameter("int8_mask", None, bool, False)
_LAMBDA = Parameter("lambda", "scale", Number, 1.0)


def _deltas(normalize: bool, rescale: bool, *more: Parameter) -> tuple[Parameter, ...]:
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
    """Nothing is trimmed: mergekit takes density and rescale, and does nothing with them."""
    return tuple(
        p._replace(option=None) if p.name in ("density", "rescale") else p for p in parameters
    )


def _number(name: str, default: Any, option: str | None = None, type: Any = Number) -> Parameter:
    return Parameter(name, option or name, type, default)


def _bool(name: str, default: bool, option: str | None = None) -> Parameter:
    return Parameter(name, option or name, bool, default)


_ANY = (1, None)
_FLOOR = _number("epsilon", 1e-5, type=between(0))
_ROWS: list[tuple[str, Base, tuple[int, int | None], str, str, tuple[Parameter, ...]]] = [
    (
        "linear",
        "input",
        _ANY,
        "Linear (model soup)",
        "2203.05482",
        (_WEIGHT, _bool("normalize", True)),
    ),
    ("slerp", "first", (2, 2), "SLERP", "", (_number("t", REQUIRED),)),
    (
        "nuslerp",
        "optional",
        (2, 2),
        "NuSLERP",
        "",
        (
            _WEIGHT,
            _bool("nuslerp_flatten", True, "flatten"),
            _bool("nuslerp_row_wise", False, "row_wise"),
        ),
    ),
    (
        "multislerp",
        "optional",
        _ANY,
        "Multi-SLERP",
        "",
        (_WEIGHT, _bool("normalize_weights", True, "normalize"), _number("eps", 1e-8)),
    ),
    (
        "karcher",
        "joins",
        _ANY,
        "Karcher mean",
        "",
        (
            Parameter("max_iter", "max_iterations", Annotated[Integer, Field(ge=1)], 10),
            _number("tol", 1e-5, "tolerance", between(0)),
        ),
    ),
    (
        "task_arithmetic",
        "required",
        _ANY,
        "Task arithmetic",
        "2212.04089",
        _without_effect(_deltas(False, False)),
    ),
    ("ties", "required", _ANY, "TIES", "2306.01708", _deltas(True, False)),
    ("dare_linear", "required", _ANY, "DARE, linear", "2311.03099", _deltas(False, True)),
    ("dare_ties", "required", _ANY, "DARE, TIES", "2311.03099", _deltas(False, True)),
    ("breadcrumbs", "required", _ANY, "Breadcrumbs", "2312.06795", _deltas(False, False, _GAMMA)),
    (
        "breadcrumbs_ties",
        "required",
        _ANY,
        "Breadcrumbs, TIES",
        "2312.06795",
        _deltas(False, False, _GAMMA),
    ),
    ("della", "required", _ANY, "DELLA", "2406.11617", _deltas(True, True, _EPSILON)),
    (
        "della_linear",
        "required",
        _ANY,
        "DELLA, linear",
        "2406.11617",
        _deltas(False, True, _EPSILON),
    ),
    (
        "model_stock",
        "required",
        (2, None),
        "Model stock",
        "2403.19522",
        (_bool("filter_wise", False),),
    ),
    ("nearswap", "required", (1, 1), "NearSwap", "", (_number("t", REQUIRED, type=between(0)),)),
    ("arcee_fusion", "required", (1, 1), "Arcee fusion", "", ()),
    (
        "sce",
        "required",
        _ANY,
        "SCE",
        "2408.07990",
        (_number("select_topk", 1.0, type=between(0, 1)), _MASK),
    ),
    ("ram", "required", _ANY, "RAM", "2601.13572", (_FLOOR,)),
    (
        "ramplus_tl",
        "required",
        _ANY,
        "RAM+ (tensor-local)",
        "2601.13572",
        (_number("r", 0.1), _number("alpha", 0.2, type=between(0)), _FLOOR),
    ),
    (
        "passthrough",
        "input",
        (1, 1),
        "Passthrough",
        "",
        (Parameter("scale", "scale", Number, 1.0, True),),
    ),
]
MERGEKIT = {
    name: Entry(
        name,
        base,
        *models,
        {p.name: p for p in ps},
        title,
        paper and f"https://arxiv.org/abs/{paper}",
    )
    for name, base, models, title, paper, ps in _ROWS
}
"""mergekit's methods. Where ours has no such option, a parameter can only have its default."""

_ELSEWHERE = frozenset({"key", "compat", "scope"})
"""Hyperparameters that a recipe sets at its top level: `key` is made of its seed."""
_PER_MODEL = frozenset({"density", "gamma", "epsilon"})
_BASES: Mapping[str, Base] = {
    "required": "required",
    "optional": "optional",
    "unused": "input",
    "merged": "required",
}


def names() -> list[str]:
    """Every name a recipe's merge_method may have: no recipe can hold arrays."""
    return sorted(name for name in methods.METHODS if methods.example(name) is not None)


def accepts(name: str, option: str) -> bool:
    """Whether a method takes a hyperparameter; a merge that was given as a value takes none."""
    return name in methods.METHODS and option in methods.options_of(name)


def entry(method: str | Merge) -> Entry:
    """What is known of a method: mergekit's table, and the rest of its options from its signature;
    of a merge that is given as a value: it has no parameters but weights.

    ValueError with the nearest names for an unknown one.

    >>> entry("ties").parameters["lambda"].option, entry("ties").parameters["density"].default
    ('scale', 1.0)
    """
    if isinstance(method, Merge):
        return _entry_of(method)
    is_method = isinstance(method, str) and method in methods.METHODS
    example = methods.example(method) if is_method else None
    if example is None:
        why = "; its hyperparameters are arrays" if is_method else ""
        raise ValueError(f"no merging method {method!r}{nearest(str(method), names())}{why}")
    record = MERGEKIT.get(method) or _entry_of(example)
    parameters = dict(record.parameters)
    taken = {p.option for p in parameters.values()}
    if method == "karcher":  # mergekit's is unweighted; ours may be given weights
        parameters["weight"] = _WEIGHT._replace(default=None)
    for option in methods.options_of(method).values():
        if option.name not in taken | _ELSEWHERE and option.name not in parameters:
            parameters[option.name] = _own(option)
    return record._replace(parameters=parameters, merge=None)


def _entry_of(merge: Merge) -> Entry:
    listed = MERGEKIT.get(merge.name)
    title, reference = (listed.title, listed.reference) if listed else (merge.name, "")
    base = _BASES[merge.base]
    parameters = {"weight": _WEIGHT._replace(default=None)}
    return Entry(merge.name, base, *merge.models, parameters, title, reference, merge)


def _own(argument: inspect.Parameter) -> Parameter:
    default = REQUIRED if argument.default is argument.empty else argument.default
    types = {bool: bool, int: Integer, float: Number, str: str}
    kind = types.get(type(default), Scalar)
    annotation = str(argument.annotation)
    if kind is Integer and "float" in annotation.lower():
        kind = Number
    per_model = argument.name in _PER_MODEL or "Sequence[float]" in annotation
    return Parameter(argument.name, argument.name, kind, default, per_model=per_model)
