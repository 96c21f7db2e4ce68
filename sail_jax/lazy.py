"""Lazy imports of a package's names, which let commands start fast."""

# Every command imports this module before it can handle signals, so it imports little. Importing
# `typing` would take as long as everything else.
import importlib
import sys
from collections.abc import Callable, Mapping


def listed(package: str) -> Callable[[], list[str]]:
    """Makes the `__dir__` of a package: its exported names, without its private imports.

    Args:
      package: The package's name, its `__name__`. Its `__all__` lists the names.

    Returns:
      The function.
    """

    def names() -> list[str]:
        own = vars(sys.modules[package])
        return sorted({*own["__all__"], *(name for name in own if name.startswith("__"))})

    return names


def lazily(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Makes the `__getattr__` and `__dir__` of a package that imports its names on first use.

    A name must differ from the name of its module. Otherwise the imported module would replace it.

    Args:
      package: The package's name, its `__name__`. Its `__all__` lists all names.
      modules: The location of each name, relative to the package. For a function or class this is
        its module. For a module it is the surrounding package with a dot at the end ("" for this
        package).

    Returns:
      The two functions.
    """

    def get(name: str) -> object:
        """The `__getattr__` of the package."""
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        where = modules[name]
        if not where or where.endswith("."):
            return importlib.import_module(f"{package}.{where}{name}")
        return getattr(importlib.import_module(f"{package}.{where}"), name)

    return get, listed(package)
