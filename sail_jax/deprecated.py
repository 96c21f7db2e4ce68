"""Names that were changed: for one more release the former ones work, and warn."""

# Whatever this imports, every command does before it can handle signals.
import sys
import warnings
from collections.abc import Callable, Mapping

TYPE_CHECKING = False  # as that of `typing`, which takes as long to import as all else
if TYPE_CHECKING:
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")


UNTIL: dict[str, str] = {}
"""The release in which each former name goes. A test fails as soon as that release is this one."""


def former(
    package: str,
    names: Mapping[str, str],
    until: str,
    get: "Callable[[str], object] | None" = None,
) -> Callable[[str], object]:
    """Makes the `__getattr__` of a module that also has names it changed.

    Args:
      package: The module's name, its `__name__`.
      names: The new name of each former one.
      until: The release in which the former names go, such as "0.3".
      get: The `__getattr__` that the module has without them, as `lazily` makes it; None for none.

    Returns:
      The function. Former names are not listed by `dir`.
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
    """Makes a function take keyword arguments by their former names, too.

    Args:
      until: The release in which the former names go, such as "0.3".
      **names: The new name of each argument, by its former one.

    Returns:
      A decorator of functions. A call with a former name and with its new one is a TypeError.

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
    """Warns at the line that uses a former name: two calls above."""
    warnings.warn(
        f"{old} is now {new}; the old name goes in {until}", DeprecationWarning, stacklevel=3
    )
