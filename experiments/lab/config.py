"""Configs: frozen dataclasses whose annotations say what a field may be, and are checked when one
is made; groups of fields that several studies share are configs themselves."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, dataclass_transform

from annotated_types import Ge, Gt, Interval, Lt, MinLen
from pydantic import AfterValidator, AllowInfNan, ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from sail_jax.checks import nearest

T = TypeVar("T")
C = TypeVar("C")


def _different(values: tuple[T, ...]) -> tuple[T, ...]:
    if not values or len(set(values)) < len(values):
        raise ValueError("must be one or more values, all different")
    return values


def _increasing(values: tuple[T, ...]) -> tuple[T, ...]:
    if not values or any(a >= b for a, b in itertools.pairwise(values)):  # type: ignore[operator]
        raise ValueError("must be one or more increasing values")
    return values


Seed = Annotated[int, Interval(ge=0, lt=2**31)]
Natural = Annotated[int, Ge(1)]
Count = Annotated[int, Ge(0)]
Finite = Annotated[float, AllowInfNan(False)]
Positive = Annotated[float, Gt(0), AllowInfNan(False)]
NotNegative = Annotated[float, Ge(0), AllowInfNan(False)]
Share = Annotated[float, Gt(0), Lt(1)]
"""Strictly between 0 and 1."""
Some = Annotated[tuple[T, ...], MinLen(1)]
"""One value or more."""
Different = Annotated[tuple[T, ...], AfterValidator(_different)]
"""One value or more, no two of them equal."""
Increasing = Annotated[tuple[T, ...], AfterValidator(_increasing)]
"""One value or more, each greater than the one before."""
Rising = Annotated[Increasing[T], MinLen(2)]
"""Two values or more, each greater than the one before."""


@dataclass_transform(frozen_default=True)
def config(cls: type[C]) -> type[C]:
    """Makes a frozen dataclass whose fields are checked against their annotations.

    What is wrong is raised as a `ValueError`, "field must be ...; got ...", one sentence for each
    field; a `__post_init__` checks what concerns several. Numbers are not read from text, nor
    tuples from lists.

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
            checked(self, *args, **fields)
        except ValidationError as error:
            raise ValueError("; ".join(map(_told, error.errors()))) from None

    made.__init__ = init
    return made


def varied(config: C, **changes: Any) -> C:
    """The config with some fields changed; those of a group are given as a mapping.

    >>> @config
    ... class Budget:
    ...     steps: Natural = 3
    ...     batch: Natural = 8
    >>> @config
    ... class Run:
    ...     budget: Budget = Budget()
    >>> varied(Run(), budget={"steps": 5}).budget
    Budget(steps=5, batch=8)

    Raises `ValueError` for an unknown field, with the nearest known one, and for a value that is
    not allowed.
    """
    names = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    fields: dict[str, Any] = {}
    for name, value in changes.items():
        if name not in names:
            raise ValueError(f"no field is called '{name}'{nearest(name, names)}")
        fields[name] = value
        if isinstance(value, Mapping):
            try:
                fields[name] = varied(getattr(config, name), **value)
            except ValueError as error:
                raise ValueError(f"{name}.{error}") from None
    return dataclasses.replace(config, **fields)  # type: ignore[type-var]


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
}


def _told(error: Mapping[str, Any]) -> str:
    """What pydantic found, as a sentence of ours."""
    why = error.get("ctx", {})
    name = "".join(f"[{at}]" if isinstance(at, int) else str(at) for at in error["loc"])
    if "error" in why:  # raised by a check of several fields, which names them, or of one
        own = str(why["error"])
        return f"{name} {own}; got {error['input']}" if name else own
    if error["type"] not in _MUST:
        return f"{name}: {error['msg']}"
    must = _MUST[error["type"]].format(**{k: _plain(v) for k, v in why.items()})
    return f"{name} must {must}; got {error['input']}"


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("'", "").replace(" or ", ", ")
    return int(value) if isinstance(value, float) and value.is_integer() else value
