"""What a recipe may say about each method: mergekit's names and parameters, and ours.

mergekit's methods keep its names, its defaults (under `compat="mergekit"`) and its reading of who
the inputs are. Ours that it lacks go by their own names, with the options of their signatures.
"""

import inspect
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from sail_jax import methods
from sail_jax.checkpoint.recipe.settings import Kind, check_value
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

    `default` is mergekit's. per_model: read from `parameters` of a model first, else only from
    those of the slice, module and recipe. low, high: what it has to lie between; `open_low`: above.
    """

    name: str
    option: str | None
    kind: Kind = "number"
    default: Any = REQUIRED
    per_model: bool = False
    low: float | None = None
    high: float | None = None
    open_low: bool = False

    def checked(self, value: Any) -> Any:
        """A value that the parameter may have; ValueError for any other."""
        value = check_value(value, self.kind)
        low, high = self.low, self.high
        below = low is not None and (value < low or (self.open_low and value == low))
        if below or (high is not None and value > high):
            left = "(" if self.open_low or low is None else "["
            right = "inf)" if high is None else f"{high}]"
            interval = f"{left}{'-inf' if low is None else low}, {right}"
            raise ValueError(f"{self.name}: expected a number in {interval}, got {value}")
        return value


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
_DENSITY = Parameter("density", "density", "number", 1.0, True, 0, 1, True)
_GAMMA = Parameter("gamma", "gamma", "number", 0.01, True, 0, 1)
_EPSILON = Parameter("epsilon", "epsilon", "number", 0.15, True, 0, 1)
_MASK = Parameter("int8_mask", None, "boolean", False)
_LAMBDA = Parameter("lambda", "scale", "number", 1.0)


def _deltas(normalize: bool, rescale: bool, *more: Parameter) -> tuple[Parameter, ...]:
    return (
        _WEIGHT,
        _DENSITY,
        _LAMBDA,
        Parameter("normalize", "normalize", "boolean", normalize),
        Parameter("rescale", "rescale", "boolean", rescale),
        _MASK,
        *more,
    )


def _without_effect(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """Nothing is trimmed: mergekit takes density and rescale, and does nothing with them."""
    return tuple(
        p._replace(option=None) if p.name in ("density", "rescale") else p for p in parameters
    )


def _number(
    name: str,
    default: Any,
    option: str | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Parameter:
    return Parameter(name, option or name, "number", default, low=low, high=high)


def _bool(name: str, default: bool, option: str | None = None) -> Parameter:
    return Parameter(name, option or name, "boolean", default)


def _table() -> dict[str, Entry]:
    required: Base = "required"
    ta, ties = "https://arxiv.org/abs/2212.04089", "https://arxiv.org/abs/2306.01708"
    dare, della = "https://arxiv.org/abs/2311.03099", "https://arxiv.org/abs/2406.11617"
    crumbs, ram = "https://arxiv.org/abs/2312.06795", "https://arxiv.org/abs/2601.13572"
    rows: list[tuple[str, Base, int, int | None, tuple[Parameter, ...], str, str]] = [
        (
            "linear",
            "input",
            1,
            None,
            (_WEIGHT, _bool("normalize", True)),
            "Linear (model soup)",
            "https://arxiv.org/abs/2203.05482",
        ),
        ("slerp", "first", 2, 2, (_number("t", REQUIRED),), "SLERP", ""),
        (
            "nuslerp",
            "optional",
            2,
            2,
            (
                _WEIGHT,
                _bool("nuslerp_flatten", True, "flatten"),
                _bool("nuslerp_row_wise", False, "row_wise"),
            ),
            "NuSLERP",
            "",
        ),
        (
            "multislerp",
            "optional",
            1,
            None,
            (_WEIGHT, _bool("normalize_weights", True, "normalize"), _number("eps", 1e-8)),
            "Multi-SLERP",
            "",
        ),
        (
            "karcher",
            "joins",
            1,
            None,
            (
                Parameter("max_iter", "max_iterations", "integer", 10, low=1),
                _number("tol", 1e-5, "tolerance", low=0),
            ),
            "Karcher mean",
            "",
        ),
        (
            "task_arithmetic",
            required,
            1,
            None,
            _without_effect(_deltas(False, False)),
            "Task arithmetic",
            ta,
        ),
        ("ties", required, 1, None, _deltas(True, False), "TIES", ties),
        ("dare_linear", required, 1, None, _deltas(False, True), "DARE, linear", dare),
        ("dare_ties", required, 1, None, _deltas(False, True), "DARE, TIES", dare),
        ("breadcrumbs", required, 1, None, _deltas(False, False, _GAMMA), "Breadcrumbs", crumbs),
        (
            "breadcrumbs_ties",
            required,
            1,
            None,
            _deltas(False, False, _GAMMA),
            "Breadcrumbs, TIES",
            crumbs,
        ),
        ("della", required, 1, None, _deltas(True, True, _EPSILON), "DELLA", della),
        (
            "della_linear",
            required,
            1,
            None,
            _deltas(False, True, _EPSILON),
            "DELLA, linear",
            della,
        ),
        (
            "model_stock",
            required,
            2,
            None,
            (_bool("filter_wise", False),),
            "Model stock",
            "https://arxiv.org/abs/2403.19522",
        ),
        ("nearswap", required, 1, 1, (_number("t", REQUIRED, low=0),), "NearSwap", ""),
        ("arcee_fusion", required, 1, 1, (), "Arcee fusion", ""),
        (
            "sce",
            required,
            1,
            None,
            (_number("select_topk", 1.0, low=0, high=1), _MASK),
            "SCE",
            "https://arxiv.org/abs/2408.07990",
        ),
        ("ram", required, 1, None, (_number("epsilon", 1e-5, low=0),), "RAM", ram),
        (
            "ramplus_tl",
            required,
            1,
            None,
            (_number("r", 0.1), _number("alpha", 0.2, low=0), _number("epsilon", 1e-5, low=0)),
            "RAM+ (tensor-local)",
            ram,
        ),
        (
            "passthrough",
            "input",
            1,
            1,
            (Parameter("scale", "scale", "number", 1.0, True),),
            "Passthrough",
            "",
        ),
    ]
    return {
        name: Entry(name, base, least, most, {p.name: p for p in ps}, title, reference)
        for name, base, least, most, ps, title, reference in rows
    }


MERGEKIT: dict[str, Entry] = _table()
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
    found = MERGEKIT.get(method) or _entry_of(example)
    parameters = dict(found.parameters)
    taken = {p.option for p in parameters.values()}
    if method == "karcher":  # mergekit's is unweighted; ours may be given weights
        parameters["weight"] = _WEIGHT._replace(default=None)
    for option in methods.options_of(method).values():
        if option.name not in taken | _ELSEWHERE and option.name not in parameters:
            parameters[option.name] = _own(option)
    return found._replace(parameters=parameters, merge=None)


def _entry_of(merge: Merge) -> Entry:
    known = MERGEKIT.get(merge.name)
    title, reference = (known.title, known.reference) if known else (merge.name, "")
    base = _BASES[merge.base]
    parameters = {"weight": _WEIGHT._replace(default=None)}
    return Entry(merge.name, base, *merge.models, parameters, title, reference, merge)


def _own(argument: inspect.Parameter) -> Parameter:
    default = REQUIRED if argument.default is argument.empty else argument.default
    kinds: dict[type, Kind] = {bool: "boolean", int: "integer", float: "number", str: "text"}
    kind = kinds.get(type(default), "any")
    annotation = str(argument.annotation)
    if kind == "integer" and "float" in annotation.lower():
        kind = "number"
    many = argument.name in _PER_MODEL or "Sequence[float]" in annotation
    return Parameter(argument.name, argument.name, kind, default, per_model=many)
