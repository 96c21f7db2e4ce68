"""Names of a package that are imported when first asked for: starting is part of every command."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazily"]


def lazily(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of a package, for its submodules and for names in them.

    modules: where each name lives, below the package: the module that has it, or, if it is a module
    itself, the package that it is in with a dot after it ("" for this one). Not for a name that its
    own module has: the module would take its place as soon as it is imported.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        where = modules[name]
        if not where or where.endswith("."):
            return importlib.import_module(f"{package}.{where}{name}")
        return getattr(importlib.import_module(f"{package}.{where}"), name)

    return get, lambda: sorted({*vars(sys.modules[package]), *modules})
