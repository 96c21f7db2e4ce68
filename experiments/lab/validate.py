"""Checks that configs share; each raises `ValueError("field must be ...; got ...")`."""

import math
from collections.abc import Iterable
from typing import Any, get_args


def at_least(config: Any, **bounds: float) -> None:
    """Every named field is at least its bound, and the seed, which all configs have, in range."""
    for field, bound in bounds.items():
        if not getattr(config, field) >= bound:
            raise ValueError(f"{field} must be at least {bound}; got {getattr(config, field)}")
    if not 0 <= config.seed < 2**31:
        raise ValueError(f"seed must be in [0, 2^31); got {config.seed}")


def positive(config: Any, *fields: str, zero: bool = False) -> None:
    """Every named field, a number or a tuple of them, is finite and > 0 (or >= 0)."""
    for field in fields:
        value = getattr(config, field)
        numbers = value if isinstance(value, tuple) else (value,)
        if not all((x > 0 or (zero and x == 0)) and x < math.inf for x in numbers):
            raise ValueError(f"{field} must be finite and {'>=' if zero else '>'} 0; got {value}")


def different(config: Any, *fields: str) -> None:
    """Every named field is a tuple of one or more values, no two equal."""
    for field in fields:
        value = getattr(config, field)
        if not value or len(set(value)) < len(value):
            raise ValueError(f"{field} must be one or more values, all different; got {value}")


def one_of(config: Any, **allowed: Any) -> None:
    """Every named field is one of the values allowed for it: a `Literal`, or listed."""
    for field, kind in allowed.items():
        values, value = get_args(kind) or tuple(kind), getattr(config, field)
        if value not in values:
            raise ValueError(f"{field} must be one of {', '.join(values)}; got {value}")


def holds(config: Any, checks: Iterable[tuple[str, Any, str]]) -> None:
    """Of every field named what must be true is true; the text says what is allowed."""
    for field, true, allowed in checks:
        if not true:
            raise ValueError(f"{field} must be {allowed}; got {getattr(config, field)}")
