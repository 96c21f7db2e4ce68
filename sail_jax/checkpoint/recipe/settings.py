"""Reads the parameters of a recipe, and resolves them for each tensor.

A parameter is set to a value, to values that are interpolated over the layers, or to conditions.
Each condition has a filter of tensor names and such a value. `declared` reads the mappings. A
`Ledger` returns the value for each tensor.
"""

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationInfo

from sail_jax.checkpoint.recipe.declared import Lenient, Note, Placed, Reading, read
from sail_jax.checkpoint.recipe.patterns import compiled
from sail_jax.checkpoint.recipe.yaml_tree import Node, RecipeError, Where
from sail_jax.checks import nearest

Value = bool | int | float | str
"""The value of a parameter for one tensor."""


def _no_flag(value: object) -> object:
    """Refuses true and false, which Python would treat as the numbers 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"expected a number; got {value}")
    return value


def _scalar(value: object) -> Value:
    """Refuses lists, mappings and infinite numbers."""
    if not isinstance(value, (bool, int, float, str)) or value in (math.inf, -math.inf):
        raise ValueError("expected a finite number, a text, true or false")
    return value


# YAML 1.1 reads 1e-5 as text. Such a text is converted if a number is expected.
Number = Annotated[float, BeforeValidator(_no_flag), Field(allow_inf_nan=False)]
Integer = Annotated[int, BeforeValidator(_no_flag)]
Natural = Annotated[Integer, Field(ge=0, lt=2**63)]
Scalar = Annotated[Any, AfterValidator(_scalar)]


def between(low: float, high: float = math.inf, *, above: bool = False) -> Any:
    """Makes a pydantic type of the numbers in an interval.

    Args:
      low: The lower bound.
      high: The upper bound, included; infinite for none.
      above: Whether `low` is excluded.

    Returns:
      A type that refuses all other numbers, including infinite ones.
    """
    interval = f"{'(' if above else '['}{low}, {high}{')' if high == math.inf else ']'}"

    def check(value: float) -> float:
        if not low <= value <= high or (above and value == low):
            raise ValueError(f"expected a number in {interval}, got {value}")
        return value

    return Annotated[Number, AfterValidator(check)]


_adapter = cache(TypeAdapter)


def _filter(filter: str) -> str:
    """Checks a filter of tensor names."""
    if not filter:
        raise ValueError("an empty filter; leave it out to fit everything")
    matcher(filter)
    return filter


def _values(given: object) -> Sequence[object]:
    """Returns a list of values; a single value becomes a list."""
    values = given if isinstance(given, (list, tuple)) else [given]
    if not values:
        raise ValueError("expected a value; got none")
    return values


@dataclass(kw_only=True)
class OfType(Reading):
    """The context for validators of conditions.

    Attributes:
      type: The type of a value, as pydantic takes it.
    """

    type: object


def _value(given: object, info: ValidationInfo) -> object:
    """Validates a value by the type in the context."""
    of_type = info.context
    return _adapter(of_type.type).validate_python(given) if isinstance(of_type, OfType) else given


class Condition(Lenient, Placed):
    """A value of a parameter, for the tensors whose names match a filter.

    The context in which a condition is read, an `OfType`, determines the type of the value.

    Attributes:
      filter: The filter, for `matcher`; None matches all tensors.
      values: The values, spread evenly over the layers; one for all of them. The key is value.
      where: Its place in the recipe.
    """

    filter: Annotated[str, AfterValidator(_filter)] | None = Field(None, coerce_numbers_to_str=True)
    values: Annotated[
        tuple[Annotated[Any, BeforeValidator(_value)], ...], BeforeValidator(_values)
    ] = Field((), validation_alias="value", validate_default=True)

    @cached_property
    def fits(self) -> Callable[[str], bool]:
        """The test of whether a tensor name fits the filter; see `matcher`."""
        return matcher(self.filter)


Setting = tuple[Condition, ...]
"""The conditions of one parameter in one place of a recipe. The first one that fits counts."""


def setting(node: Node, type: object, notes: list[Note]) -> Setting:
    """Reads the setting of one parameter.

    Args:
      node: A value, a list of values along the layers, a condition, or a list of conditions.
      type: The type of a value, as pydantic takes it.
      notes: A list to which notes are added.

    Returns:
      The conditions in their order. A plain value becomes one condition that matches all tensors.

    Raises:
      RecipeError: If a value has another type, or a condition comes after one that matches
        everything.
    """
    several = isinstance(node.value, list) and any(isinstance(p.value, dict) for p in node.value)
    if not several and not isinstance(node.value, dict):
        # A plain value is a condition that matches every tensor.
        node = node._replace(value={"value": node})
    context = OfType(type=type, notes=notes)
    conditions = tuple(read(Condition, p, context) for p in (node.value if several else [node]))
    for earlier, later in pairwise(conditions):
        if earlier.filter in (None, "*"):
            message = "never reached: the condition before it fits everything"
            raise RecipeError(later.where, message)
    return conditions


def interpolate(values: Sequence[Value], t: float) -> Value:
    """Interpolates values that are spread evenly over [0, 1].

    With n values, value i is at i / (n - 1). Numbers are interpolated linearly between these
    points. For bools and texts, the value is that of the last point before.

    Args:
      values: One value or more.
      t: The position, in [0, 1].

    Returns:
      The value at `t`.

    >>> interpolate([0.0, 1.0, 0.0], 0.25), interpolate([True, False], 0.9)
    (0.5, True)
    """
    place = t * (len(values) - 1)
    low = int(place)
    part = place - low
    numbers = [value for value in values if not isinstance(value, (bool, str))]
    # At a point, the value itself is returned, so whole numbers stay whole.
    if len(numbers) < len(values) or not part:
        return values[low]
    return (1 - part) * numbers[low] + part * numbers[low + 1]


def matcher(filter: str | None) -> Callable[[str], bool]:
    """Makes a function that tests whether a tensor name matches a filter.

    Args:
      filter: None or "*" matches every name. "re:..." matches if the regular expression is found.
        "glob:..." must match the whole name. Any other text matches if it is part of the name, as
        in mergekit, which does not have "re:" and "glob:".

    Returns:
      A function from a name to whether it matches.

    Raises:
      ValueError: If the text after "re:" is not a regular expression of RE2.

    >>> matcher("re:mlp|attn")("layers.3.mlp.weight"), matcher("glob:layers.*")("model.layers.3")
    (True, False)
    """
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
    """Resolves settings for tensors, and records which conditions had an effect."""

    def __init__(self) -> None:
        self._asked: dict[Setting, dict[str, None]] = {}
        self._decided: dict[Where, dict[str, None]] = {}

    def resolve(self, scopes: Iterable[Setting | None], name: str, t: float) -> Value | None:
        """Returns the value of a parameter for one tensor.

        Args:
          scopes: The settings of the parameter, the one closest to the tensor first; None where it
            is not set. The first condition that matches is used, of the first setting with such a
            condition.
          name: The name of the tensor.
          t: The position of the tensor in its slice, in [0, 1].

        Returns:
          The value; None if no condition matches.
        """
        for setting in scopes:
            if setting is None:
                continue
            self._asked.setdefault(setting, {})[name] = None
            for condition in setting:
                if condition.fits(name):
                    self._decided.setdefault(condition.where, {})[name] = None
                    return interpolate(condition.values, t)
        return None

    def check(self, settings: Iterable[tuple[str, Setting]]) -> list[str]:
        """Checks that every filter had an effect, after all tensors have been resolved.

        Args:
          settings: All parameters set in the recipe, as `Recipe.settings` lists them.

        Returns:
          A note for each setting without a filter that is overridden everywhere.

        Raises:
          RecipeError: If a filter had no effect, or if it is ambiguous, such as "layers.1" if there
            are tensors of layers 1 and 10.
        """
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
        """Explains why a filter has no effect: it is too late, overridden or matches no tensor."""
        asked = self._asked.get(setting, {})
        fitting = [name for name in asked if condition.fits(name)]
        if fitting:
            earlier = next(c for c in setting if c.fits(fitting[0]))
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
    """Refuses a filter that begins or ends with a digit and matches within a longer number."""
    text = condition.filter or ""
    if text.startswith(("re:", "glob:")) or not (text[:1].isdigit() or text[-1:].isdigit()):
        return
    before = r"(?:^|\D)" if text[0].isdigit() else ""
    after = r"(?:\D|$)" if text[-1].isdigit() else ""
    # The same filter, without an adjacent digit.
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
