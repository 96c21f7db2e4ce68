"""Claims, studies and methods of other packages, which they declare as entry points.

A package declares modules in its pyproject.toml, such as

    [project.entry-points."sail_jax.methods"]
    mine = "my_package.methods"

Entry points are only read when these kinds are listed or looked up, and not when sail-jax is
imported. An entry point is code of an installed package.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Literal

Kind = Literal["claims", "studies", "methods"]


def declared(kind: Kind) -> dict[str, EntryPoint]:
    """Lists what installed packages declare, without importing them.

    Args:
      kind: The kind of extension.

    Returns:
      The entry points by name, sorted.

    Raises:
      ValueError: If two packages declare the same name.
    """
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=f"sail_jax.{kind}"), key=lambda entry: entry.name):
        if found.setdefault(entry.name, entry).value != entry.value:
            raise ValueError(f"{described(entry)}: {described(found[entry.name])} has this name")
    return found


def loaded(entry: EntryPoint) -> ModuleType:
    """Imports the module that an entry point names.

    Args:
      entry: The entry point.

    Returns:
      The module.

    Raises:
      ValueError: If it cannot be imported. The message contains the package to mend or remove.
    """
    with _told(entry):
        return importlib.import_module(entry.module)


def source(entry: EntryPoint) -> Path:
    """Finds the file of the module that an entry point names, without running it.

    Args:
      entry: The entry point.

    Returns:
      The file; for a package, its `__init__.py`.

    Raises:
      ValueError: If it is missing, or the package around it cannot be imported.
    """
    with _told(entry):
        spec = importlib.util.find_spec(entry.module)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no file {entry.module}")
        return Path(spec.origin)


@contextlib.contextmanager
def _told(entry: EntryPoint) -> Iterator[None]:
    """Turns any error of an import, which runs code of the package, into a ValueError."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise ValueError(f"{described(entry)} cannot be imported: {text}") from error


def described(entry: EntryPoint) -> str:
    """Describes an entry point for a message.

    Args:
      entry: The entry point.

    Returns:
      Its group, name and value, and the package that declares it.
    """
    package = f" of the package {entry.dist.name}" if entry.dist else ""
    return f"{entry.group} {entry.name} = {entry.value}{package}"
