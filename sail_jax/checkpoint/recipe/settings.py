"""Parameters of a recipe: conditions on tensor names, and values interpolated over the layers."""

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationInfo

from sail_jax.checkpoint.recipe.declared import Placed, read
from sail_jax.checkpoint.recipe.patterns import compiled
from sail_jax.checkpoint.recipe.yaml_tree import Node, RecipeError, Where
from sail_jax.checks import nearest

__all__ = [
    "Condition",
    "Integer",
    "Ledger",
    "Natural",
    "Number",
    "Scalar",
    "Setting",
    "between",
    "interpolate",
    "matcher",
    "setting",
]


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"expected a number; got {value}")
    return value


def _scalar(value: Any) -> Any:
    if not isinstance(value, (bool, int, float, str)) or value in (math.inf, -math.inf):
        raise ValueError("expected a finite number, a text, true or false")
    return value


# Text such as 1e-5, which YAML 1.1 does not take for a number, is one where a number is expected.
Number = Annotated[float, BeforeValidator(_no_flag), Field(allow_inf_nan=False)]
Integer = Annotated[int, BeforeValidator(_no_flag)]
Natural = Annotated[Integer, Field(ge=0, lt=2**63)]
Scalar = Annotated[Any, AfterValidator(_scalar)]


def between(low: float, high: float = math.inf, *, above: bool = False) -> Any:
    """The type of numbers from `low` to `high`, or from above `low`."""
    interval = f"{'(' if above else '['}{low}, {high}{')' if high == math.inf else ']'}"

    def check(value: float) -> float:
        if not low <= value <= high or (above and value == low):
            raise ValueError(f"expected a number in {interval}, got {value}")
        return value

    return Annotated[Number, AfterValidator(check)]


_adapter = cache(TypeAdapter)


def _filter(filter: str) -> str:
    if not filter:
        raise ValueError("an empty filter; leave it out to fit everything")
    matcher(filter)
    return filter


def _values(given: Any) -> Any:
    values = given if isinstance(given, (list, tuple)) else [given]
    if not values:
        raise ValueError("expected a value; got none")
    return values


def _value(given: Any, info: ValidationInfo) -> Any:
    return given if info.context is None else _adapter(info.context).validate_python(given)


class Condition(Placed):
    """`values` for tensors whose name fits `filter` (None: for all), along the layers.

    The context of reading one is the type of a value.
    """

    filter: Annotated[str, AfterValidator(_filter)] | None = Field(None, coerce_numbers_to_str=True)
    values: Annotated[
        tuple[Annotated[Any, BeforeValidator(_value)], ...], BeforeValidator(_values)
    ] = Field((), validation_alias="value", validate_default=True)


Setting = tuple[Condition, ...]
"""Conditions; the first that fits decides."""


def setting(node: Node, type: Any) -> Setting:
    """What is a value of this type, values along the layers, a condition or conditions."""
    several = isinstance(node.value, list) and any(isinstance(p.value, dict) for p in node.value)
    if not several and not isinstance(node.value, dict):
        node = node._replace(value={"value": node})
    conditions = tuple(read(Condition, p, type) for p in (node.value if several else [node]))
    for earlier, later in pairwise(conditions):
        if earlier.filter in (None, "*"):
            message = "never reached: the condition before it fits everything"
            raise RecipeError(later.where, message)
    return conditions


def interpolate(values: Sequence[Any], t: float) -> Any:
    """The value at t in [0, 1]: piecewise linear for numbers, the last step reached otherwise.

    >>> interpolate([0.0, 1.0, 0.0], 0.25), interpolate([True, False], 0.9)
    (0.5, True)
    """
    if any(isinstance(v, (bool, str)) for v in values):
        return values[int(t * (len(values) - 1))]
    place = t * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    part = place - low
    return (1 - part) * values[low] + part * values[high] if part else values[low]


def matcher(filter: str | None) -> Callable[[str], bool]:
    """Whether a tensor name fits: all for None and "*", else by substring as in mergekit; "re:..."
    searches a regular expression and "glob:..." matches the whole name, here only."""
    if filter is None or filter == "*":
        return lambda name: True
    if filter.startswith("re:"):
        pattern = compiled(filter[3:])
        return lambda name: pattern.search(name) is not None
    if filter.startswith("glob:"):
        match = re.compile(fnmatch.translate(filter[5:])).match
        return lambda name: match(name) is not None
    return lambda name: filter in name


class Ledger:
    """Resolves settings and remembers which conditions decided anything."""

    def __init__(self) -> None:
        self._fits: dict[Where, Callable[[str], bool]] = {}
        self._asked: dict[Setting, dict[str, None]] = {}
        self._decided: dict[Where, dict[str, None]] = {}

    def resolve(self, scopes: Iterable[Setting | None], name: str, t: float) -> Any:
        """The value for tensor `name` at t: of the first scope in which a condition fits, by the
        first condition that does; None without one."""
        for setting in scopes:
            if setting is None:
                continue
            self._asked.setdefault(setting, {})[name] = None
            for condition in setting:
                if self._matches(condition, name):
                    self._decided.setdefault(condition.where, {})[name] = None
                    return interpolate(condition.values, t)
        return None

    def _matches(self, condition: Condition, name: str) -> bool:
        if condition.where not in self._fits:
            self._fits[condition.where] = matcher(condition.filter)
        return self._fits[condition.where](name)

    def check(self, settings: Iterable[tuple[str, Setting]]) -> list[str]:
        """RecipeError for a filter that decides nothing or reads two ways; notes on what is set
        but overridden everywhere. To be called once all tensors are resolved."""
        notes = []
        for parameter, setting in settings:
            asked = self._asked.get(setting, {})
            for condition in setting:
                names = self._decided.get(condition.where, {})
                if condition.filter is None or condition.filter == "*":
                    if not asked:
                        notes.append(f"{condition.where.path}: overridden wherever it applies")
                elif not names:
                    raise RecipeError(
                        condition.where, self._unreached(parameter, setting, condition)
                    )
                else:
                    _unambiguous(condition, names)
        return notes

    def _unreached(self, parameter: str, setting: Setting, condition: Condition) -> str:
        asked = self._asked.get(setting, {})
        fitting = [name for name in asked if self._matches(condition, name)]
        if fitting:
            earlier = next(c for c in setting if self._matches(c, fitting[0]))
            return (
                f"the filter {condition.filter!r} is never reached: an earlier condition"
                f" ({earlier.filter!r}) takes all {len(fitting)} tensors it fits, as {fitting[0]!r}"
            )
        if not asked:
            return f"never reached: {parameter} is set closer to the tensors wherever it applies"
        parts = {part for name in asked for part in re.split(r"[./]", name) if not part.isdigit()}
        return f"the filter {condition.filter!r} fits no tensor" + nearest(
            str(condition.filter), sorted(parts)
        )


def _unambiguous(condition: Condition, names: Iterable[str]) -> None:
    """RecipeError if a substring that ends (or begins) in a digit stops within a longer number."""
    text = condition.filter or ""
    if text.startswith(("re:", "glob:")) or not (text[:1].isdigit() or text[-1:].isdigit()):
        return
    before = r"(?:^|\D)" if text[0].isdigit() else ""
    after = r"(?:\D|$)" if text[-1].isdigit() else ""
    exact = compiled(before + re.escape(text) + after)
    longer = [name for name in names if not exact.search(name)]
    if longer:
        alone = [name for name in names if exact.search(name)]
        raise RecipeError(
            condition.where,
            f"the filter {text!r} is ambiguous: as a substring it fits {len(longer)} tensors in"
            f" which the number is longer (as {longer[0]!r}) and {len(alone)} in which it is not"
            + (f" (as {alone[0]!r})" if alone else "")
            + f"; write {'re:' + exact.pattern!r} for the number alone, or"
            f" {'re:' + re.escape(text)!r} for all of them",
        )
