"""Checked configs: frozen dataclasses whose annotations define the allowed values.

The values are checked when a config is created. Several studies can share a group of fields: the
group is itself a config, and a field of other configs.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import ModuleType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Protocol,
    TypeVar,
    dataclass_transform,
    runtime_checkable,
)

from annotated_types import Ge, Gt, Interval, Lt, MinLen
from pydantic import AfterValidator, AllowInfNan, ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from sail_jax import deprecated
from sail_jax.checks import described, nearest

UNTIL = "0.4"
"""The release in which former names of fields go."""

T = TypeVar("T")


@runtime_checkable
class AnyConfig(Protocol):
    """The interface of all configs: they are dataclasses."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


C = TypeVar("C", bound=AnyConfig)


def _different(values: tuple[T, ...]) -> tuple[T, ...]:
    """Checks that there is at least one value and that all values differ."""
    if not values or len(set(values)) < len(values):
        raise ValueError("must be one or more values, all different")
    return values


def _increasing(values: tuple[T, ...]) -> tuple[T, ...]:
    """Checks that there is at least one value, and that each is greater than the one before."""
    if not values or any(a >= b for a, b in itertools.pairwise(values)):  # type: ignore[operator]
        raise ValueError("must be one or more increasing values")
    return values


Seed = Annotated[int, Interval(ge=0, lt=2**31)]
"""A seed of random numbers, from 0 to 2**31 - 1."""
Natural = Annotated[int, Ge(1)]
"""A whole number, at least 1."""
Count = Annotated[int, Ge(0)]
"""A whole number, at least 0."""
Finite = Annotated[float, AllowInfNan(False)]
"""A number that is neither infinite nor NaN."""
Positive = Annotated[float, Gt(0), AllowInfNan(False)]
"""A finite number above 0."""
NotNegative = Annotated[float, Ge(0), AllowInfNan(False)]
"""A finite number, at least 0."""
Share = Annotated[float, Gt(0), Lt(1)]
"""A number strictly between 0 and 1."""
Some = Annotated[tuple[T, ...], MinLen(1)]
"""One value or more."""
Different = Annotated[tuple[T, ...], AfterValidator(_different)]
"""One value or more, no two of them equal."""
Increasing = Annotated[tuple[T, ...], AfterValidator(_increasing)]
"""One value or more, each greater than the one before."""
Rising = Annotated[Increasing[T], MinLen(2)]
"""Two values or more, each greater than the one before."""
Function = Callable[..., Any]
"""A function of the user's own code. Python code can pass it, and so can the command line, which
imports MODULE:FUNCTION. Text in a file is never turned into a function."""


@dataclass_transform(frozen_default=True)
def config(cls: type[T]) -> type[T]:
    """Turns a class into a frozen dataclass that checks its fields against their annotations.

    An instance with an unknown field or a forbidden value raises `ValueError`. The message has one
    sentence for each wrong field: "field must be ...; got ...". The check is strict: it does not
    convert text to numbers or lists to tuples. A `__post_init__` checks conditions on several
    fields at once.

    Args:
      cls: The class. Each field has an annotation, such as `Natural` or `Increasing[float]`.

    Returns:
      The dataclass.

    >>> @config
    ... class Walk:
    ...     steps: Natural = 3
    >>> Walk(steps=0)
    Traceback (most recent call last):
    ValueError: steps must be at least 1; got 0
    """
    made: Any = dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))(cls)
    checked = made.__init__

    @functools.wraps(checked)
    def init(self: Any, *args: Any, **fields: Any) -> None:
        try:
            checked(self, *args, **_present(cls, fields))
        except ValidationError as error:
            raise ValueError("; ".join(_told(e, made) for e in error.errors())) from None

    # Wrapped because pydantic's errors take several lines for each field.
    made.__init__ = init
    whole = f"{cls.__module__}.{cls.__qualname__}"
    former = deprecated.spellings(getattr(cls, "FORMER", {}))
    deprecated.UNTIL.update({f"{whole}({old})": UNTIL for old in former})
    return made


def _present(cls: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces former names of fields and former words among their values, with a warning.

    A config class may declare them as `FORMER`, in the form that `deprecated.renamed` takes.
    """
    try:
        found, changes = deprecated.present(cls.__name__, fields, getattr(cls, "FORMER", {}))
    except TypeError as error:
        raise ValueError(str(error)) from None
    for name, old, new in changes:
        change = f"{name}={old!r} is now {new!r}" if name else f"field {old} is now {new}"
        warnings.warn(f"{change}; the old name goes in {UNTIL}", DeprecationWarning, stacklevel=3)
    return found


def varied(config: C, **changes: Any) -> C:
    """Copies a config with new values for some of its fields.

    Args:
      config: The config, which is not changed.
      **changes: The new values by field. The value of a group may be a mapping of some of its
        fields. The group's other fields keep their values.

    Returns:
      The new config, of the same class.

    Raises:
      ValueError: If a field is unknown (the message contains the closest known name) or a value is
        not allowed.

    >>> @config
    ... class Budget:
    ...     steps: Natural = 3
    ...     batch: Natural = 8
    >>> @config
    ... class Run:
    ...     budget: Budget = Budget()
    >>> varied(Run(), budget={"steps": 5}).budget
    Budget(steps=5, batch=8)
    """
    names = {field.name for field in dataclasses.fields(config)}
    fields: dict[str, Any] = {}
    for name, value in _present(type(config), changes).items():
        if name not in names:
            raise ValueError(f"no field is called '{name}'{nearest(name, names)}")
        fields[name] = value
        if isinstance(value, Mapping):
            try:
                fields[name] = varied(getattr(config, name), **value)
            except ValueError as error:
                raise ValueError(f"{name}.{error}") from None
    return dataclasses.replace(config, **fields)


def picked(config: AnyConfig, *fields: str) -> dict[str, Any]:
    """Reads some fields of a config, for the attributes of a dataset.

    Args:
      config: The config.
      *fields: The fields; those of a group with its name, such as "budget.steps".

    Returns:
      The values by the fields' names, without groups.
    """
    return {field.rpartition(".")[2]: attrgetter(field)(config) for field in fields}


def fields(config: AnyConfig, group: str = "") -> dict[str, Any]:
    """Reads all fields of a config and of its groups.

    Args:
      config: The config.
      group: The group's name if `config` is a group; empty for a whole config.

    Returns:
      The values by name. The name of a field within a group begins with the group's name, such as
      "budget.steps".
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        name, value = f"{group}.{field.name}".lstrip("."), getattr(config, field.name)
        found |= fields(value, name) if isinstance(value, AnyConfig) else {name: value}
    return found


def grouped(values: Mapping[str, Any]) -> dict[str, Any]:
    """Puts values by names such as "budget.steps" in the form of changes for `varied`.

    Args:
      values: The values by name.

    Returns:
      The values by field, with a mapping for each group.

    >>> grouped({"budget.steps": 5, "seed": 1})
    {'budget': {'steps': 5}, 'seed': 1}
    """
    changes: dict[str, Any] = {}
    for name, value in values.items():
        *groups, field = name.split(".")
        node = changes
        for group in groups:
            node = node.setdefault(group, {})
        node[field] = value
    return changes


def documentation(config: type) -> dict[str, str]:
    """Collects the text under each field in the source of a config class, and of its parents.

    Args:
      config: The class.

    Returns:
      The texts by field, each as one line.
    """
    texts: dict[str, str] = {}
    for part in reversed(config.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        body = definition.body if isinstance(definition, ast.ClassDef) else []
        for field, after in itertools.pairwise(body):
            match field, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split())
    return texts


# Pydantic's names of the errors, and the requirement on the field; {ge} etc. are in their context.
_MUST: Mapping[str, str] = {
    "greater_than_equal": "be at least {ge}",
    "greater_than": "be greater than {gt}",
    "less_than_equal": "be at most {le}",
    "less_than": "be less than {lt}",
    "multiple_of": "be a multiple of {multiple_of}",
    "finite_number": "be finite",
    "literal_error": "be one of {expected}",
    "int_type": "be a whole number",
    "float_type": "be a number",
    "bool_type": "be true or false",
    "string_type": "be text",
    "tuple_type": "be a tuple",
    "too_short": "be {min_length} or more values",
    "dataclass_exact_type": "be a {class_name}",
    "callable_type": "be a function",
}


def named(function: Function) -> str:
    """Returns the name of a function, for records of runs.

    Args:
      function: The function. For a `functools.partial`, the inner function is used.

    Returns:
      The name "MODULE:FUNCTION". The name of a method begins with its object's class. For a
      callable object, it is the name of its class.

    >>> named(functools.partial(varied, seed=1))
    'experiments.lab.config:varied'
    """
    while isinstance(function, functools.partial):
        function = function.func
    of = getattr(function, "__self__", None)
    if of is not None and not isinstance(of, ModuleType | type):
        return f"{type(of).__module__}:{type(of).__qualname__}.{function.__name__}"
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}:{owner.__qualname__}"


def _told(error: Mapping[str, Any], of: type) -> str:
    """Turns an error of pydantic into a sentence: "field must be ...; got ..."."""
    why = error.get("ctx", {})
    name = "".join(f"[{at}]" if isinstance(at, int) else str(at) for at in error["loc"])
    # For arguments without a name, pydantic gives their positions.
    for k, field in enumerate(dataclasses.fields(of)):
        name = re.sub(rf"^\[{k}\]", field.name, name)
    # A check of several fields contains their names already; a check of one field does not.
    if "error" in why:
        own = str(why["error"])
        return f"{name} {own}; got {error['input']}" if name else own
    if error["type"] not in _MUST:
        return f"{name}: {error['msg']}"
    must = _MUST[error["type"]].format(**{k: _plain(v) for k, v in why.items()})
    # The type matters if it is wrong: "60" is printed like 60.
    got = described(error["input"]) if error["type"].endswith("_type") else error["input"]
    return f"{name} must {must}; got {got}"


def _plain(value: object) -> object:
    """Simplifies a value of pydantic's error context: no quotation marks, 1.0 becomes 1."""
    if isinstance(value, str):
        return value.replace("'", "").replace(" or ", ", ")
    return int(value) if isinstance(value, float) and value.is_integer() else value
