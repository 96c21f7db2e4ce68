"""Public functions and classes say what they take, return and raise, in Google style."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("sail_jax", "theory", "experiments")
Function = ast.FunctionDef | ast.AsyncFunctionDef
MODULES = [
    str(path.relative_to(ROOT)) for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))
]


def decorators(node: Function) -> set[str]:
    return {
        ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list
    }


def public(tree: ast.Module) -> Iterator[tuple[str, Function | ast.ClassDef, bool]]:
    """What a module offers: its name, its definition, and whether a base class may describe it."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node, False
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, Function) and not part.name.startswith("_"):
                        yield f"{node.name}.{part.name}", part, bool(node.bases)


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


def lacking(name: str, node: Function | ast.ClassDef, may_inherit: bool) -> Iterator[str]:
    """What the docstring of one definition lacks."""
    text = ast.get_docstring(node)
    if text is None:
        if not may_inherit:
            yield f"{name} has no docstring"
        return
    if not re.match(r".+?[.:?](\s|$)", text.split("\n\n")[0], re.DOTALL):
        yield f"{name} does not begin with a sentence"
    if isinstance(node, ast.ClassDef) or decorators(node) & {"property", "cached_property"}:
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
        if not argument.startswith("_") and argument not in described
    )
    gives = node.returns is not None and ast.unparse(node.returns) not in ("None", "Never")
    if gives and section(text, "Returns", "Yields") is None:
        yield f"{name} does not say what it returns"
    if raises(node) and section(text, "Raises") is None:
        yield f"{name} does not say what it raises"


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_described(module: str):
    tree = ast.parse((ROOT / module).read_text())
    wrong = [
        line
        for name, node, may_inherit in public(tree)
        if not (isinstance(node, Function) and "overload" in decorators(node))
        for line in lacking(name, node, may_inherit)
    ]
    assert not wrong, "\n".join(wrong)
