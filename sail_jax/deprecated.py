"""Support for renamed names, which still work for one more release with a warning."""

# Every command imports this module before it can handle signals, so imports here must be fast.
import sys
import warnings
from collections.abc import Callable, Mapping

TYPE_CHECKING = False  # like the one in `typing`, which imports slowly
if TYPE_CHECKING:
    from typing import Any, ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")


UNTIL: dict[str, str] = {}
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
            warnings.warn(
                f"{package}.{name} is now {package}.{names[name]}; the old name goes in {until}",
                DeprecationWarning,
                stacklevel=2,
            )
            return getattr(sys.modules[package], names[name])
        if get is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return get(name)

    return look_up


def spellings(names: "Mapping[str, str | Mapping[str, str]]") -> list[str]:
    """Lists what `present` changes.

    Args:
      names: The changes, as for `renamed`.

    Returns:
      For `UNTIL`: `name=` for each former name, and `name='word'` for each former word.
    """
    return [
        text
        for name, new in names.items()
        for text in ([f"{name}="] if isinstance(new, str) else [f"{name}={old!r}" for old in new])
    ]


def present(
    owner: str, options: "Mapping[str, Any]", names: "Mapping[str, str | Mapping[str, str]]"
) -> "tuple[dict[str, Any], list[tuple[str, str, str]]]":
    """Replaces former names of options and former values.

    Args:
      owner: The function or command with the options, for messages.
      options: The options. A value may also be a tuple of words.
      names: The changes, as for `renamed`.

    Returns:
      The options, and the changes. A change is the name of an option, its former word and the
      present one. If a name changed, it is "", the former name and the present one.

    Raises:
      TypeError: If an option is given by two of its names.

    >>> names = {"ratio": "density", "scope": {"leaf": "tensor"}}
    >>> found, changes = present("trim", {"ratio": 0.5, "scope": ("leaf", "tree")}, names)
    >>> found, changes
    ({'density': 0.5, 'scope': ('tensor', 'tree')},
     [('', 'ratio', 'density'), ('scope', 'leaf', 'tensor')])
    """
    found, changes = {}, []
    for name, value in options.items():
        new = names.get(name)
        if isinstance(new, str):
            if new in options or new in found:
                raise TypeError(f"{owner}: {name} is now {new}, expected only one")
            changes.append(("", name, new))
            name = new
        known = names.get(name, "")
        if not isinstance(known, str):
            words = value if isinstance(value, tuple) else (value,)
            new_of = {w: known[w] for w in words if isinstance(w, str) and w in known}
            changes += [(name, *change) for change in new_of.items()]
            if new_of and isinstance(value, tuple):
                value = tuple(new_of.get(w, w) for w in words)
            elif new_of:
                (value,) = new_of.values()
        found[name] = value
    return found, changes


def renamed(
    *order: str, until: str, **names: "str | Mapping[str, str]"
) -> "Callable[[Callable[P, T]], Callable[P, T]]":
    """Makes a function accept its former keywords, positional arguments and values.

    Args:
      *order: Arguments that are keyword-only now, in the order in which they were positional.
      until: The release that removes the former calls, such as "0.3".
      **names: The new name of each argument, by its former one. A mapping gives the new spelling of
        an argument's values, by the former one.

    Returns:
      A decorator of functions. A call with both names of an argument raises a TypeError.

    >>> @renamed("density", until="99.0", ratio="density", scope={"leaf": "tensor"})
    ... def trim(*, density: float, scope: str = "tree") -> tuple:
    ...     return density, scope
    >>> with warnings.catch_warnings(record=True, action="always") as seen:
    ...     trim(ratio=0.5), trim(0.25), trim(density=1, scope="leaf")
    ((0.5, 'tree'), (0.25, 'tree'), (1, 'tensor'))
    >>> for warning in seen:
    ...     print(warning.message)
    ratio of sail_jax.deprecated.trim is now density; the old name goes in 99.0
    density of sail_jax.deprecated.trim is now keyword-only; write trim(density=...) before 99.0
    scope='leaf' of sail_jax.deprecated.trim is now scope='tensor'; the old name goes in 99.0
    """
    import functools
    import inspect
    import types

    words = {name: new for name, new in names.items() if not isinstance(new, str)}

    def decorate(function: "Callable[P, T]") -> "Callable[P, T]":
        whole = f"{function.__module__}.{function.__qualname__}"
        UNTIL.update({f"{whole}({old})": until for old in (*order, *spellings(names))})
        parameters = inspect.signature(function).parameters.values()
        places = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

        def call(args: tuple, options: dict) -> "T":
            more = dict(zip(order, args[len(places) :], strict=False))
            # For other calls, such as one with too many arguments, Python raises the TypeError.
            if more and len(args) <= len(places) + len(order) and not more.keys() & options.keys():
                written = ", ".join(f"{name}=..." for name in more)
                _warn(
                    f"{', '.join(more)} of {whole} is now keyword-only; "
                    f"write {function.__name__}({written}) before {until}"
                )
                args, options = args[: len(places)], {**options, **more}
            placed = dict(zip(places, args, strict=False))
            placed, first = present(function.__name__, placed, words)
            options, then = present(function.__name__, options, names)
            for name, old, new in (*first, *then):
                was, now = (f"{name}={old!r}", f"{name}={new!r}") if name else (old, new)
                _warn(f"{was} of {whole} is now {now}; the old name goes in {until}")
            return function(*placed.values(), *args[len(places) :], **options)

        # A copy with the globals of the function's own module, in which doctest runs its examples.
        called = lambda *args, **options: call(args, options)  # noqa: E731
        scope = getattr(inspect.unwrap(function), "__globals__", {})
        copy = types.FunctionType(called.__code__, scope, closure=called.__closure__)
        return functools.update_wrapper(copy, function)

    return decorate


def _warn(message: str) -> None:
    """Warns at the line of the deprecated call, three frames up."""
    warnings.warn(message, DeprecationWarning, stacklevel=4)
