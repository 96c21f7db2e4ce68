"""Exported names of a room describe their arguments, results and exceptions, in Google style.

A room hands on what its `__init__` names, and what other rooms import. Other public names, methods
of protocols, and functions of two lines at most need one sentence. A record that is passed on by
the name of its class needs none.
"""

import ast
import collections
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("sail_jax", "theory", "experiments")
Function = ast.FunctionDef | ast.AsyncFunctionDef
# Parameters that are always the same record: the `Parser` of a command, its `Namespace`, the
# `RunOptions`, and the `Result` or the `Ready` plan of an operation.
PASSED_ON = {"parser", "args", "run", "done", "ready"}
MODULES = [
    str(path.relative_to(ROOT)) for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))
]


def decorators(node: Function) -> set[str]:
    return {
        ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list
    }


def named(module: str) -> str:
    """The dotted name of a file."""
    parts = Path(module).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The folder of a module; the module itself at the top of a package."""
    folder = (ROOT / module.replace(".", "/")).is_dir()
    parent = module if folder else module.rpartition(".")[0]
    return module if parent in PACKAGES else parent


@functools.cache
def handed_on() -> frozenset[tuple[str, str]]:
    """Pairs of a module and a name in it: what other rooms import, and what users are shown.

    Users are shown what an `__init__` imports, and modules that its docstring names, with all
    that is in them; the name is "*" then.
    """
    known, found = {named(file) for file in MODULES}, set()
    for file in MODULES:
        tree, own, shown = parsed(file), named(file), "__init__" in file
        taken = attributes(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                module = whole if whole in known else node.module
                if shown or room(module) != room(own):
                    every = whole in known and shown
                    used = () if every else taken[alias.asname or alias.name]
                    names = used if whole in known else (alias.name,)
                    found |= {(module, name) for name in ("*",) * every + tuple(names)}
        if shown:
            words = re.findall(r"`(\w+)`", ast.get_docstring(tree) or "")
            found |= {(f"{own}.{word}", "*") for word in words if f"{own}.{word}" in known}
    return frozenset(found)


def attributes(tree: ast.Module) -> dict[str, set[str]]:
    """The attributes that a module takes of each plain name, such as that of an imported module."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found[node.value.id].add(node.attr)
    return found


def short(node: Function) -> bool:
    """Checks whether a function has at most two lines, without its docstring."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return not body or (body[-1].end_lineno or 0) - body[0].lineno < 2


def public(tree: ast.Module, module: str) -> Iterator[tuple[str, Function | ast.ClassDef, bool]]:
    """Lists the public names of a module: the name, its definition, and whether its
    parameters are described."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            described = bool({(module, node.name), (module, "*")} & handed_on())
            yield node.name, node, described
            if isinstance(node, ast.ClassDef):
                # A base class, or the protocol, describes what its children do.
                described = described and not node.bases
                for part in node.body:
                    if isinstance(part, Function) and not part.name.startswith("_"):
                        yield f"{node.name}.{part.name}", part, described


def own(node: Function) -> Iterator[ast.AST]:
    """The nodes of a function's own body, without those of functions and classes inside it."""
    todo: list[ast.AST] = list(node.body)
    while todo:
        part = todo.pop()
        yield part
        if not isinstance(part, Function | ast.ClassDef | ast.Lambda):
            todo.extend(ast.iter_child_nodes(part))


def section(text: str, *titles: str) -> str | None:
    found = re.search(rf"^(?:{'|'.join(titles)}):\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    return found and found[1]


def raises(node: Function) -> bool:
    return any(
        isinstance(part, ast.Raise)
        and part.exc is not None
        and not ast.unparse(part.exc).startswith("NotImplementedError")
        for part in own(node)
    )


def lacking(name: str, node: Function | ast.ClassDef, described: bool) -> Iterator[str]:
    """Returns what is missing in the docstring of a definition."""
    text = ast.get_docstring(node)
    if text is None:
        if described or (isinstance(node, Function) and "." not in name and not short(node)):
            yield f"{name} has no docstring"
        return
    if not re.match(r".+?[.:?](\s|$)", text.split("\n\n")[0], re.DOTALL):
        yield f"{name} does not begin with a sentence"
    if isinstance(node, ast.ClassDef) or decorators(node) & {"property", "cached_property"}:
        return
    if short(node) and not described and section(text, "Args", "Returns", "Yields", "Raises"):
        yield f"{name} has two lines, and a docstring of more than a sentence"
    # Sections must be complete; only documented interfaces must have them.
    if not described and not re.search(r"^(Args|Returns|Yields|Raises):$", text, re.MULTILINE):
        return
    arguments = node.args
    named = [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
    named += [a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None]
    if "." in name and "staticmethod" not in decorators(node):
        named = named[1:]
    described = set(
        re.findall(r"^ {2,4}\**(\w+)(?:, \**\w+)*:", section(text, "Args") or "", re.MULTILINE)
    )
    yield from (
        f"{name} does not describe {argument}"
        for argument in named
        if not argument.startswith("_") and argument not in described | PASSED_ON
    )
    gives = node.returns is not None and ast.unparse(node.returns) not in ("None", "Never")
    if gives and section(text, "Returns", "Yields") is None:
        yield f"{name} does not say what it returns"
    if raises(node) and section(text, "Raises") is None:
        yield f"{name} does not say what it raises"


@functools.cache
def parsed(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text())


@pytest.mark.slow  # it parses all modules
def test_public_names_are_described():
    wrong = [
        f"{module}: {line}"
        for module in MODULES
        for name, node, described in public(parsed(module), named(module))
        if not (isinstance(node, Function) and "overload" in decorators(node))
        for line in lacking(name, node, described)
    ]
    assert not wrong, "\n".join(wrong)
