"""Names of a package: imported when first asked for, so that commands start fast, and listed."""

# Whatever this imports, every command does before it can handle signals: `typing` takes as long as
# all else.
import importlib
import sys
from collections.abc import Callable, Mapping


def listed(package: str) -> Callable[[], list[str]]:
    """Makes the `__dir__` of a package: the names it hands on, without those it only uses itself.

    Args:
      package: The package's name, its `__name__`. Its `__all__` has the names.

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
    """Makes the `__getattr__` and `__dir__` of a package whose names are imported on first use.

    Not for a name that equals the name of the module it lives in: as soon as that module is
    imported, it would take the name's place.

    Args:
      package: The package's name, its `__name__`. Its `__all__` has all names.
      modules: Where each name lives, relative to the package. For a function or class it is the
        module that has it. For a name that is a module itself it is the package around it, with a
        dot at the end ("" for this package).

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
