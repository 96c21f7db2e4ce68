"""Renamed names: the former names work for one more release, and warn."""

# Every command imports this module before it can handle signals, so imports here must be fast.
import sys
import warnings
from collections.abc import Callable, Mapping

TYPE_CHECKING = False  # like the one in `typing`, which imports slowly
if TYPE_CHECKING:
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")


UNTIL: dict[str, str] = {"sail_jax.cli.commands.align(weigh)": "0.3"}
"""The release that removes each former name. A test fails as soon as this is that release."""


def former(
    package: str,
    names: Mapping[str, str],
    until: str,
    get: "Callable[[str], object] | None" = None,
) -> Callable[[str], object]:
    """Makes the `__getattr__` of a module that has renamed names.

    Args:
      package: The module's name, its `__name__`.
      names: The new name of each former name.
      until: The release that removes the former names, such as "0.3".
      get: The module's `__getattr__` for its other names, as `lazily` makes it; None for none.

    Returns:
      The function. `dir` does not list the former names.
    """
    UNTIL.update({f"{package}.{name}": until for name in names})

    def look_up(name: str) -> object:
        """The `__getattr__` of the module."""
        if name in names:
            _warn(f"{package}.{name}", f"{package}.{names[name]}", until)
            return getattr(sys.modules[package], names[name])
        if get is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return get(name)

    return look_up


def renamed(*, until: str, **names: str) -> "Callable[[Callable[P, T]], Callable[P, T]]":
    """Makes a function also accept keyword arguments under their former names.

    Args:
      until: The release that removes the former names, such as "0.3".
      **names: The new name of each argument, by its former name.

    Returns:
      A decorator of functions. A call with both names of an argument raises a TypeError.

    >>> @renamed(until="99.0", ratio="density")
    ... def trim(density: float) -> float:
    ...     return density
    >>> with warnings.catch_warnings(record=True, action="always") as seen:
    ...     trim(ratio=0.5)
    0.5
    >>> print(seen[0].message)
    ratio of sail_jax.deprecated.trim is now density; the old name goes in 99.0
    """
    import functools

    def decorate(function: "Callable[P, T]") -> "Callable[P, T]":
        whole = f"{function.__module__}.{function.__qualname__}"
        UNTIL.update({f"{whole}({old}=)": until for old in names})

        @functools.wraps(function)
        def called(*args: "P.args", **options: "P.kwargs") -> "T":
            for old in names.keys() & options.keys():
                new = names[old]
                if new in options:
                    raise TypeError(f"{function.__name__}: {old} is now {new}, expected only one")
                _warn(f"{old} of {whole}", new, until)
                options[new] = options.pop(old)
            return function(*args, **options)

        return called

    return decorate


def _warn(old: str, new: str, until: str) -> None:
    """Warns at the line that uses a former name, two calls up the stack."""
    warnings.warn(
        f"{old} is now {new}; the old name goes in {until}", DeprecationWarning, stacklevel=3
    )
