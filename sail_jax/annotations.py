"""Checks the types of arguments against the annotations of their function.

Only the kind of a value is checked here. Its range and shape are left to the function.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import AbstractArray, PyTree

from sail_jax.checks import concrete, described, nearest, one_key, one_of


class Accepted(NamedTuple):
    """The values that an annotation accepts.

    Attributes:
      text: Describes them, for a message.
      numbers: Whether real numbers and arrays of them are accepted. Arrays of JAX may have any
        type, because keys are such arrays.
      functions: Whether functions are accepted.
      classes: Classes whose instances are accepted.
      words: The values of a `Literal`; others are accepted if there are none.
      arrays: Whether arrays and lists of numbers are accepted, too, and not only single numbers.
    """

    text: str
    numbers: bool
    functions: bool
    classes: tuple[type, ...]
    words: tuple[Any, ...] = ()
    arrays: bool = True

    def fits(self, value: object) -> bool:
        """Checks whether a value is accepted."""
        if isinstance(value, self.classes):
            # A text is a sequence, but none of ours.
            return not isinstance(value, str) or str in self.classes
        if self.functions and callable(value):
            return True
        return self.numbers and is_real(value) and (self.arrays or not _has_axes(value))


def check_types(function: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Raises an error for an argument that does not have the type of its annotation.

    Args:
      function: The function that is called with the arguments.
      args: The positional arguments.
      kwargs: The other arguments by name.

    Raises:
      TypeError: If an argument has another type. The message contains its name, the expected type,
        its value and its type. Also for an unknown argument, with the nearest names.
      ValueError: If an argument is not one of the words of a `Literal`.

    >>> def half(x: float) -> float:
    ...     return x / 2
    >>> check_types(half, ("3",), {})
    Traceback (most recent call last):
    TypeError: x must be a real number; got '3' (str)
    """
    signature, known = accepted(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        parameters = signature.parameters
        open_ended = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())
        if (unknown := [word for word in kwargs if word not in parameters]) and not open_ended:
            names = nearest(unknown[0], parameters)
            raise TypeError(f"{function.__name__} has no argument {unknown[0]!r}{names}") from error
        return  # the call itself raises a better message
    for name, expected in known.items():
        several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        values = given.get(name, ()) if several else (given[name],) if name in given else ()
        for value in values:
            _check(name, value, expected)


def _check(name: str, value: object, expected: Accepted) -> None:
    """Raises an error for a value that is not accepted."""
    if expected.words:
        one_of(name, value, expected.words)
    elif name == "key" and not isinstance(value, jax.Array):
        one_key(value)
    elif not expected.fits(value):
        raise TypeError(f"{name} must be {expected.text}; got {described(value)}")


@functools.lru_cache(maxsize=1024)
def accepted(
    function: Callable[..., Any],
) -> tuple[inspect.Signature, Mapping[str, Accepted]]:
    """Reads the annotations of a function.

    Args:
      function: The function.

    Returns:
      Its signature, and what each parameter accepts, by name. Parameters whose annotation accepts
      anything, such as a pytree, are missing.
    """
    signature = inspect.signature(function)
    found = {name: read(given.annotation) for name, given in signature.parameters.items()}
    return signature, {name: kind for name, kind in found.items() if kind is not None}


def read(annotation: object) -> Accepted | None:
    """Reads an annotation.

    Args:
      annotation: The annotation of a parameter.

    Returns:
      What it accepts; None if it accepts anything.
    """
    union = get_origin(annotation) in (typing.Union, types.UnionType)
    texts: dict[str, None] = {}
    classes: list[type] = []
    for part in get_args(annotation) if union else (annotation,):
        origin = get_origin(part) or part
        if origin is Literal:
            return Accepted("", False, False, (), get_args(part))
        if not isinstance(origin, type) or origin in (Any, PyTree):
            return None
        if origin is Callable:
            texts["a function"] = None
        elif text := _number(part):
            texts[text] = None
        else:
            classes.append(origin)
            if inspect.isfunction(getattr(origin, "__call__", None)):  # noqa: B004
                texts["a function"] = None  # any function has its interface
    named = [kind.__name__ for kind in classes if kind is not types.NoneType]
    text = " or ".join([*sorted(texts), *named])
    numbers = bool(texts.keys() - {"a function"})
    kinds = tuple(classes)
    return Accepted(text, numbers, "a function" in texts, kinds, arrays="an array" in texts)


def _number(part: Any) -> str:
    """Describes an annotation of numbers; empty for another annotation."""
    if inner := get_args(part):  # of a sequence, or of a union in it
        return "an array" if all(x is ... or _number(x) for x in inner) else ""
    if not isinstance(part, type):
        return ""
    if issubclass(part, bool | int | float | complex | np.generic):
        return "a real number"
    return "an array" if issubclass(part, jax.Array | np.ndarray | AbstractArray) else ""


def _has_axes(value: object) -> bool:
    """Whether a value is a list, or a known array with axes; traced arrays may be mapped."""
    several = isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0
    return several and concrete(value) is not None


def is_real(value: object) -> bool:
    """Checks whether a value consists of real numbers.

    Args:
      value: Any value. Arrays of JAX pass, whatever their type, because keys are such arrays.

    Returns:
      Whether it is a real number, or an array or a list of them.
    """
    if isinstance(value, Real | jax.Array | np.bool):
        return True
    if isinstance(value, list | tuple):
        return all(map(is_real, value))
    known = concrete(value)
    kinds = (jnp.floating, jnp.integer, jnp.bool)
    return known is None or any(jnp.issubdtype(known.dtype, kind) for kind in kinds)
