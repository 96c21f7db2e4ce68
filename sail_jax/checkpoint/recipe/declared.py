"""Reads a mapping of a recipe by its declaration. Errors contain the position and the remedy.

A declaration is a pydantic model: its fields are the keys of the mapping, under their names or
aliases. Excluded fields are not keys. They contain the position of the mapping, or data derived
from its keys. `parts` contains the declarations of a recipe, and `tables` the declaration of a
table of spaces.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails

from sail_jax.checkpoint.recipe.published import without_effect
from sail_jax.checkpoint.recipe.yaml_tree import Node, RecipeError, Where
from sail_jax.checks import mistyped, nearest

T = TypeVar("T", bound=BaseModel)


_TYPES = {
    **{"float": "a number", "int": "an integer", "bool": "true or false", "string": "a text"},
    **{"list": "a list", "finite": "a finite number"},
}
_BOUNDS = {"ge": "greater than or equal to", "gt": "greater than", "lt": "less than"}
_BOUNDS |= {"le": "less than or equal to"}


class Given(dict[str, Any]):
    """A mapping of a recipe as a dict of plain values, which also stores the positions of its keys.

    Attributes:
      node: The node that the mapping was read from.
    """

    def __init__(self, node: Node, values: Mapping[str, Any]):
        super().__init__(values)
        self.node = node

    def only(self, *keys: str) -> str:
        """Returns the only one of several keys that is given.

        Args:
          *keys: Keys that exclude one another. Exactly one of them must be given.

        Returns:
          The key that is given.

        Raises:
          RecipeError: If none of the keys is given, or more than one.
        """
        given = [key for key in keys if key in self.node.value]
        if len(given) != 1:
            where = self.node.value[given[1]].key if given else self.node.where
            got = " and ".join(given) or "none"
            raise RecipeError(where, f"expected exactly one of {', '.join(keys)}; got {got}")
        return given[0]

    def within(self, key: str, *outer: str) -> "Given":
        """Moves the value of a key below other keys.

        Args:
          key: A key of this mapping.
          *outer: The keys to put it under, the outermost first.

        Returns:
          The mapping `{outer[0]: {outer[1]: ... self[key]}}`, with the positions of `key`.
        """
        node, value = self.node.value[key], self[key]
        for name in reversed(outer):
            node = Node({name: node}, node.key, node.key)
            value = Given(node, {name: value})
        return value


def plain(node: Node) -> Any:
    """Converts a node to a plain value.

    Args:
      node: A part of a recipe.

    Returns:
      A `Given` for a mapping, a list for a list, else the scalar itself.
    """
    if isinstance(node.value, dict):
        return Given(node, {key: plain(part) for key, part in node.value.items()})
    return [plain(part) for part in node.value] if isinstance(node.value, list) else node.value


def kind(value: object) -> str:
    """Describes a value for an error message, such as "a mapping" or "an empty list".

    Args:
      value: The value that was found instead of the expected one.

    Returns:
      A few words; the first 80 characters of its `repr` for a scalar, "nothing" for None.
    """
    if isinstance(value, (dict, list)):
        name = "mapping" if isinstance(value, dict) else "list"
        return f"a {name}" if value else f"an empty {name}"
    return "nothing" if value is None else repr(value)[:80]


class Note(NamedTuple):
    """A part of a recipe that is allowed but has no effect.

    Attributes:
      where: Its position in the recipe.
      text: A sentence about the part and the reason.
    """

    where: Where
    text: str


@dataclass(kw_only=True)
class Reading:
    """The context of validators (`info.context`); some declarations require a subclass of it.

    Attributes:
      notes: The parts without effect that were found so far.
    """

    notes: list[Note] = field(default_factory=list)


def remark(info: ValidationInfo, where: Where, text: str) -> None:
    """Adds a note to the notes in the context."""
    assert isinstance(info.context, Reading)
    info.context.notes.append(Note(where, text))


class Declared(BaseModel):
    """The base class of declarations: a mapping with these keys and no others.

    A key without a value counts as missing.
    """

    # Validators are built when a recipe needs them, not for all declarations: building them takes
    # longer than reading the recipe.
    model_config = ConfigDict(frozen=True, validate_by_name=True, defer_build=True)

    @classmethod
    def what(cls) -> str:
        """Returns the name of the mapping in error messages, such as "a slice"."""
        name = cls.__name__.lower()
        return f"an {name}" if name[0] in "aeiou" else f"a {name}"

    @classmethod
    def keys(cls, given: Given) -> list[str]:
        """Lists the keys that the mapping may have.

        Args:
          given: The mapping that is being read. In some declarations its values determine further
            keys.

        Returns:
          The names and aliases of all fields that are keys.
        """
        keys: list[str] = []
        for name, about in cls.model_fields.items():
            alias = about.validation_alias or name
            if not about.exclude:
                keys += map(str, alias.choices if isinstance(alias, AliasChoices) else [alias])
        return keys

    @classmethod
    def ignores(cls, key: str, keys: Collection[str]) -> str | None:
        """Explains why an unknown key is allowed in the mapping."""
        del key, keys
        return None

    @model_validator(mode="wrap")
    @classmethod
    def _declared(
        cls, given: object, handler: Callable[[object], "Declared"], info: ValidationInfo
    ) -> "Declared":
        """Refuses unknown keys, drops keys without a value, and rewords pydantic's errors."""
        if not isinstance(given, Given):
            # The recipe was made in Python, not read from a file.
            if isinstance(given, (cls, dict)):
                return handler(given)
            raise ValueError(f"expected {cls.what()}, a mapping; got {kind(given)}")
        keys = cls.keys(given)
        for key, part in given.node.value.items():
            ignored = None if key in keys else cls.ignores(key, keys)
            if ignored is not None:
                remark(info, part.key, ignored)
            elif key not in keys:
                hint = nearest(mistyped(key, keys) or key, keys)
                raise RecipeError(part.key, f"unknown key {key!r} in {cls.what()}{hint}")
            if part.value is None or ignored is not None:
                del given[key]
        # This is set for all declarations; those without this field ignore it.
        given["where"] = given.node.where
        try:
            return handler(given)
        except ValidationError as error:
            raise _in_our_words(cls, given.node, error.errors()[0]) from None


class Placed(Declared):
    """A mapping with its position.

    Attributes:
      where: Its place in the recipe.
    """

    where: Where = Field(Where(), exclude=True)


class Lenient(Declared):
    """A mapping of a recipe in which an unknown key causes a note.

    mergekit ignores such a key. A key that is one typo away from a valid one is an error.
    """

    @classmethod
    def here(cls) -> str:
        """Returns the position of the mapping's keys, in words."""
        return f"in {cls.what()}"

    @classmethod
    def ignores(cls, key: str, keys: Collection[str]) -> str | None:
        return None if mistyped(key, keys) else without_effect(key, cls.here())


def read(declaration: type[T], node: Node, context: Reading | None = None) -> T:
    """Reads a node by a declaration.

    Args:
      declaration: The pydantic model with the allowed contents.
      node: The part of the recipe to read.
      context: The context of validators.

    Returns:
      An instance of the declaration.

    Raises:
      RecipeError: If the node has contents that the declaration does not allow.
    """
    try:
        return declaration.model_validate(plain(node), context=context)
    except ValidationError as error:
        raise _in_our_words(declaration, node, error.errors()[0]) from None


def _in_our_words(declaration: type[BaseModel], node: Node, error: ErrorDetails) -> RecipeError:
    """Converts a pydantic error to a RecipeError at the position of the error."""
    cause = error.get("ctx", {}).get("error")
    # This error already has a position, deeper in the recipe.
    if isinstance(cause, RecipeError):
        return cause
    # The path from pydantic may have steps that are not in the recipe, such as the member of a
    # union that failed. They are skipped, and the error gets the position of the nearest parent
    # node.
    for step in error["loc"]:
        if isinstance(node.value, dict):
            node = node.value.get(step, node)
        elif isinstance(node.value, list) and isinstance(step, int):
            node = node.value[step]
    if error["type"] == "value_error":
        return RecipeError(node.where, str(cause))
    if error["type"] == "missing":
        what = declaration.what() if issubclass(declaration, Declared) else "it"
        return RecipeError(node.where, f"{what} needs {error['loc'][-1]!r}, which is missing")
    return RecipeError(
        node.where, f"expected {expected(declaration, error)}; got {kind(plain(node))}"
    )


def expected(declaration: type[BaseModel], error: ErrorDetails) -> str:
    """Describes what pydantic expected, from the kind of its error and the types of fields.

    Args:
      declaration: The model that was read.
      error: The error, of any kind except "value_error" and "missing".

    Returns:
      The expectation, such as "one of tensor, tree".
    """
    context, last = error.get("ctx", {}), error["loc"][-1] if error["loc"] else ""
    if bounds := [f"{words} {context[key]}" for key, words in _BOUNDS.items() if key in context]:
        return bounds[0]
    match error["type"]:
        case "literal_error":
            field = declaration.model_fields[str(error["loc"][0])]
            options = _options(field.annotation)
            return f"one of {', '.join(options)}" if len(options) > 1 else options[0]
        case "tuple_type":
            return f"a list of {last}"
        case "too_short":  # a list or a mapping
            return f"{context['min_length']} or more {last}"
        case "dict_type":
            return "a mapping"
        case other:
            return _TYPES.get(other.partition("_")[0], other.replace("_", " "))


def _options(annotation: object) -> list[str]:
    """Returns the words that the `Literal`s in a type allow."""
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    return [word for part in get_args(annotation) for word in _options(part)]
