"""Fingerprints of code: the result of a search expires when the code of its bound changes.

A fingerprint covers functions and everything that they use inside `theory`, found by name without
running it. It does not change with comments, docstrings or line breaks, nor with code outside
`theory`.
"""

import ast
import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent

# The position of a statement at the top level of a module, by the module's name.
Place = tuple[str, int]


@dataclass(frozen=True)
class _Module:
    """A parsed module.

    Attributes:
      body: The statements of its top level.
      bound: The positions in `body` of the statements that bind a name.
      imported: The full names of imported names, such as "theory.linearity.bounds.spread".
    """

    body: list[ast.stmt]
    bound: Mapping[str, list[int]]
    imported: Mapping[str, str]


@functools.cache
def _module(name: str) -> _Module | None:
    """Parses a module of `theory`; None for other names."""
    package, *parts = name.split(".")
    files = (ROOT.joinpath(*parts, "__init__.py"), ROOT.joinpath(*parts).with_suffix(".py"))
    file = next((file for file in files if file.is_file()), None)
    if package != ROOT.name or file is None:
        return None
    tree = ast.parse(file.read_text(encoding="utf-8"))
    bound: dict[str, list[int]] = {}
    for position, statement in enumerate(tree.body):
        for local in _bindings(statement):
            bound.setdefault(local, []).append(position)
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return _Module(tree.body, bound, imported)


def _bindings(statement: ast.stmt) -> set[str]:
    """Finds the names that a statement of the top level binds, without imported ones."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, ast.Store)}


def _first(statement: ast.stmt) -> int:
    """Returns the first line of a statement, or of its first decorator."""
    return min(node.lineno for node in (statement, *getattr(statement, "decorator_list", ())))


def _binding(path: str) -> Iterator[Place]:
    """Finds the statements that bind a full name, through imports."""
    home, _, name = path.rpartition(".")
    if module := _module(home):
        yield from ((home, position) for position in module.bound.get(name, ()))
        if module.imported.get(name, path) != path:
            yield from _binding(module.imported[name])


def _listed(part: Any) -> list[Any]:
    return part if isinstance(part, list) else [part]


@functools.cache
def _uses(place: Place) -> frozenset[Place]:
    """Finds the statements that bind the names in a statement."""
    home, position = place
    module = _module(home)
    assert module is not None
    paths, open_ = set(), [module.body[position]]
    while open_:
        node = open_.pop()
        if isinstance(node, ast.Name):
            paths.add(f"{home}.{node.id}")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            paths.add(f"{module.imported.get(node.value.id)}.{node.attr}")
        for name, part in ast.iter_fields(node):
            if name not in ("annotation", "returns"):
                open_ += [n for n in _listed(part) if isinstance(n, ast.AST)]
    return frozenset(found for path in paths for found in _binding(path))


@functools.cache
def _hash(place: Place) -> str:
    """Computes the hash of a statement."""
    module = _module(place[0])
    assert module is not None
    return hashlib.sha256(_written(module.body[place[1]]).encode()).hexdigest()


def _written(part: Any) -> str:
    """Writes a tree of code without docstrings, the same in all versions of Python."""
    if isinstance(part, list):
        return f"[{','.join(map(_written, part))}]"
    if not isinstance(part, ast.AST):
        return repr(part)
    named = dict(ast.iter_fields(part))
    if isinstance(part, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(part):
        named["body"] = part.body[1:]
    texts = (
        f"{name}={_written(value)}" for name, value in named.items() if value not in (None, [])
    )
    return f"{type(part).__name__}({','.join(texts)})"


def _statement(function: Any) -> Place | None:
    """Finds the statement of the top level in which a function of `theory` is written."""
    module, code = _module(function.__module__), function.__code__
    for position, statement in enumerate(module.body if module else ()):
        if _first(statement) <= code.co_firstlineno <= (statement.end_lineno or 0):
            return function.__module__, position
    return None


def _parts(value: Any) -> Iterator[Place | str]:
    """Splits a value into statements and text: functions, with their values, and data."""
    if isinstance(value, functools.partial):
        yield from _parts((value.func, value.args, value.keywords))
    elif hasattr(value, "__wrapped__"):
        yield from _parts(value.__wrapped__)
    elif hasattr(value, "__code__"):
        yield _statement(value) or f"{value.__module__}.{value.__qualname__}"
        cells = (cell.cell_contents for cell in value.__closure__ or ())
        yield from _parts((value.__defaults__, tuple(cells)))
    elif isinstance(value, Mapping):
        yield from _parts(tuple(value.items()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _parts(part)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _parts(tuple(getattr(value, field.name) for field in fields(value)))
    elif isinstance(value, str | bool | None):
        yield repr(value)
    elif isinstance(value, int | float | np.number):
        yield f"{float(value):.9g}"  # the last digits of a computed number depend on the machine
    else:
        named = value if hasattr(value, "__qualname__") else type(value)
        yield f"{named.__qualname__}{getattr(value, 'shape', '')}"


def forget() -> None:
    """Clears the cache of sources, for a package that has changed since."""
    for cached in (_module, _uses, _hash):
        cached.cache_clear()


def fingerprint(value: Any) -> str:
    """Computes the fingerprint of the functions and the data of a value.

    Args:
      value: A function, or data with functions in it, such as a `theory.adversary.Domain`.

    Returns:
      A string of 16 hexadecimal digits, the same on all machines.
    """
    parts = list(_parts(value))
    found, open_ = set(), {part for part in parts if isinstance(part, tuple)}
    while open_:
        found |= open_
        open_ = {use for place in open_ for use in _uses(place)} - found
    data = [part for part in parts if isinstance(part, str)]
    whole = "\n".join((*data, *sorted(map(_hash, found))))
    return hashlib.sha256(whole.encode()).hexdigest()[:16]
