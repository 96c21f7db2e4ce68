"""How a mapping of a recipe is declared, and read: errors name the place, and what may stand there.

A declaration is a pydantic model. Its fields are the keys of the mapping, under their names or
aliases; fields that are excluded are no keys: where the mapping stands, or what follows from keys.
"""

import re
from typing import Any, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from sail_jax.checkpoint.recipe.yaml_tree import Node, RecipeError, Where
from sail_jax.checks import nearest

__all__ = ["Declared", "Given", "Placed", "kind", "read"]

T = TypeVar("T", bound=BaseModel)


_TYPES = {"float": "a number", "int": "an integer", "bool": "true or false", "string": "a text"}


class Given(dict[str, Any]):
    """A mapping as plain values, and the node that knows their places."""

    def __init__(self, node: Node):
        super().__init__((key, plain(part)) for key, part in node.value.items())
        self.node = node

    def only(self, *keys: str) -> str:
        """The one of these keys that is given; RecipeError for none and for several."""
        given = [key for key in keys if key in self.node.value]
        if len(given) != 1:
            where = self.node.value[given[1]].key if given else self.node.where
            got = " and ".join(given) or "none"
            raise RecipeError(where, f"expected exactly one of {', '.join(keys)}; got {got}")
        return given[0]

    def within(self, key: str, *outer: str) -> "Given":
        """What stands under a key, as if under those others, each within the one before."""
        node = self.node.value[key]
        for name in reversed(outer):
            node = Node({name: node}, node.key, node.key)
        return Given(node)


def plain(node: Node) -> Any:
    """What a part of a recipe says, without its places but for those of mappings."""
    if isinstance(node.value, dict):
        return Given(node)
    return [plain(part) for part in node.value] if isinstance(node.value, list) else node.value


def kind(value: Any) -> str:
    """What came, in an error."""
    if isinstance(value, (dict, list)):
        name = "mapping" if isinstance(value, dict) else "list"
        return f"a {name}" if value else f"an empty {name}"
    return "nothing" if value is None else repr(value)[:80]


class Declared(BaseModel):
    """A mapping that has these keys and no others. A key without a value is as good as none."""

    model_config = ConfigDict(frozen=True, validate_by_name=True)

    @classmethod
    def what(cls) -> str:
        """What errors call it."""
        name = cls.__name__.lower()
        return f"an {name}" if name[0] in "aeiou" else f"a {name}"

    @classmethod
    def keys(cls, given: Given) -> list[str]:
        """The keys that there may be, some of which can depend on others."""
        fields = [(name, field) for name, field in cls.model_fields.items() if not field.exclude]
        aliases = [field.validation_alias or name for name, field in fields]
        choices = [a.choices if isinstance(a, AliasChoices) else [a] for a in aliases]
        return [str(key) for alternatives in choices for key in alternatives]

    @model_validator(mode="wrap")
    @classmethod
    def _declared(cls, given: Any, handler: Any) -> Any:
        if not isinstance(given, Given):
            if isinstance(given, (cls, dict)):  # made in Python
                return handler(given)
            raise ValueError(f"expected {cls.what()}, a mapping; got {kind(given)}")
        keys = cls.keys(given)
        for key, part in given.node.value.items():
            if key not in keys:
                hint = nearest(key, keys)
                raise RecipeError(part.key, f"{key!r} is no key of {cls.what()}{hint}")
            if part.value is None:
                del given[key]
        given["where"] = given.node.where
        try:
            return handler(given)
        except ValidationError as error:
            raise _in_our_words(cls.what(), given.node, error.errors()[0]) from None


class Placed(Declared):
    """A mapping that remembers where it stands."""

    where: Where = Field(Where(), exclude=True)


def read(declaration: type[T], node: Node, context: Any = None) -> T:
    """What a node says, by its declaration; RecipeError where it says something else."""
    try:
        return declaration.model_validate(plain(node), context=context)
    except ValidationError as error:
        raise _in_our_words("", node, error.errors()[0]) from None


def _in_our_words(what: str, node: Node, error: ErrorDetails) -> RecipeError:
    """An error of pydantic's, at the place where it happened."""
    context = error.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, RecipeError):
        return cause
    for step in error["loc"]:
        if isinstance(node.value, dict):
            node = node.value.get(step, node)
        elif isinstance(node.value, list) and isinstance(step, int):
            node = node.value[step]
    last = error["loc"][-1] if error["loc"] else ""
    match error["type"]:
        case "value_error":
            return RecipeError(node.where, str(cause))
        case "missing":
            return RecipeError(node.where, f"{what} needs {last!r}, which is missing")
        case "literal_error":
            options = re.findall(r"'(.*?)'", context["expected"])
            expected = f"one of {', '.join(options)}"
        case "tuple_type" | "too_short":
            expected = f"a list of {last}"
        case "dict_type":
            expected = f"{last}, a mapping"
        case other:
            message = error["msg"].removeprefix("Input should be ")
            expected = _TYPES.get(other.partition("_")[0], message)
    return RecipeError(node.where, f"expected {expected}; got {kind(plain(node))}")
