"""Reading the parts of a YAML tree, with errors that say what was expected and what came."""

from collections.abc import Callable, Mapping
from typing import Any

from sail_jax.checkpoint.recipe.mergekit import Parameter
from sail_jax.checkpoint.recipe.settings import Condition, Setting, check_value, matcher
from sail_jax.checkpoint.recipe.yaml_tree import Node, RecipeError, Where
from sail_jax.checks import nearest

__all__ = [
    "checked",
    "kind",
    "mapping",
    "natural",
    "one_of",
    "optional",
    "sequence",
    "setting",
    "text",
]


def mapping(node: Node, keys: Any, what: str, *required: str) -> dict[str, Node]:
    """The parts of a mapping with these keys (any, for None); RecipeError."""
    if not isinstance(node.value, dict):
        raise RecipeError(node.where, f"expected {what}, a mapping; got {kind(node)}")
    for key, part in node.value.items():
        if keys is not None and key not in keys:
            raise RecipeError(part.key, f"{key!r} is no key of {what}{nearest(key, keys)}")
    for key in required:
        if key not in node.value:
            raise RecipeError(node.where, f"{what} needs {key!r}, which is missing")
    return node.value


def sequence(node: Node, what: str) -> list[Node]:
    if not isinstance(node.value, list) or not node.value:
        raise RecipeError(node.where, f"expected a list of {what}; got {kind(node)}")
    return node.value


def kind(node: Node) -> str:
    value = node.value
    if isinstance(value, (dict, list)):
        name = "mapping" if isinstance(value, dict) else "list"
        return f"a {name}" if value else f"an empty {name}"
    return "nothing" if value is None else repr(value)[:80]


def optional(parent: Mapping[str, Node], key: str, read: Callable[[Node], Any]) -> Any:
    return None if key not in parent or parent[key].value is None else read(parent[key])


def text(node: Node) -> str:
    return check_value(node.value, "text", node.where)


def one_of(*options: str) -> Callable[[Node], str]:
    def read(node: Node) -> str:
        if node.value not in options:
            expected = ", ".join(options)
            raise RecipeError(node.where, f"expected one of {expected}; got {kind(node)}")
        return node.value

    return read


def natural(node: Node) -> int:
    value = check_value(node.value, "integer", node.where)
    if not 0 <= value < 2**63:
        raise RecipeError(node.where, f"expected a whole number from 0 on, got {value}")
    return value


def setting(node: Node, parameter: Parameter) -> Setting:
    value = node.value
    if isinstance(value, list) and not value:
        raise RecipeError(node.where, "expected a value; got an empty list")
    conditions = value if isinstance(value, list) else [value and node]
    if isinstance(value, dict):
        conditions = [node]
    elif not isinstance(value, list) or not any(isinstance(p.value, dict) for p in value):
        return (Condition(None, _values(node, parameter), node.where),)
    found: list[Condition] = []
    for part in conditions:
        if not isinstance(part.value, dict):
            raise RecipeError(part.where, "expected {filter, value}, as beside it")
        inside = mapping(part, ["filter", "value"], "a condition", "value")
        if found and found[-1].filter in (None, "*"):
            raise RecipeError(part.where, "never reached: the condition before it fits everything")
        filter = None
        if "filter" in inside and inside["filter"].value is not None:
            node_ = inside["filter"]
            filter = str(node_.value) if not isinstance(node_.value, (dict, list)) else text(node_)
            matcher(filter, node_.where)
            if not filter:
                raise RecipeError(node_.where, "an empty filter; leave it out to fit everything")
        found.append(Condition(filter, _values(inside["value"], parameter), part.where))
    return tuple(found)


def _values(node: Node, parameter: Parameter) -> tuple[Any, ...]:
    parts = node.value if isinstance(node.value, list) else [node]
    if not parts:
        raise RecipeError(node.where, "expected a value; got an empty list")
    return tuple(checked(part.value, parameter, part.where) for part in parts)


def checked(value: Any, parameter: Parameter, where: Where) -> Any:
    value = check_value(value, parameter.kind, where)
    low, high = parameter.low, parameter.high
    below = low is not None and (value < low or (parameter.open_low and value == low))
    if below or (high is not None and value > high):
        left = "(" if parameter.open_low or low is None else "["
        right = "inf)" if high is None else f"{high}]"
        interval = f"{left}{'-inf' if low is None else low}, {right}"
        raise RecipeError(where, f"{parameter.name}: expected a number in {interval}, got {value}")
    return value
