"""YAML as a tree in which every part knows its line and key path, for errors to act on."""

from typing import Any, NamedTuple

from sail_jax.checks import escaped

__all__ = ["LIMIT", "Node", "RecipeError", "Where", "compose"]

LIMIT = 1 << 20
"""The longest text in bytes."""

_NODES, _DEPTH = 100_000, 40
_KINDS = {"str", "int", "float", "bool", "null", "timestamp", "value"}


class Where(NamedTuple):
    """A place in a recipe: key path, and file, line and column (from 1) if it was a text."""

    path: str = ""
    file: str = ""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return ": ".join(part for part in (place, self.path) if part)


class RecipeError(ValueError):
    """Something in a recipe that is wrong, or does not fit its inputs; `where` it is said."""

    def __init__(self, where: Where, message: str):
        super().__init__(escaped(f"{where}: {message}" if str(where) else message))
        self.where = where


class Node(NamedTuple):
    """`value`: a dict or list of nodes, or a str, int, float, bool or None; `key`: of its key."""

    value: Any
    where: Where
    key: Where


def compose(text: str | bytes, file: str = "recipe") -> Node:
    """The one document of `text`; RecipeError for anything that is not plain YAML.

    Keys are text and occur once, tags build no objects; aliases and merge keys ("<<") expand to at
    most 100 000 nodes, 40 deep. Nothing is constructed but text, numbers, bools and None.

    >>> compose("models: [a, 1e-3]").value["models"].value[1].where
    Where(path='models[1]', file='recipe', line=1, column=13)
    """
    import yaml

    top = Where("", file)
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise RecipeError(top, f"expected text in UTF-8: {error}") from error
    if len(text.encode("utf-8", "replace")) > LIMIT:
        raise RecipeError(top, f"longer than {LIMIT} bytes")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = top if mark is None else Where("", file, mark.line + 1, mark.column + 1)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise RecipeError(at, f"not YAML: {problem}") from error
    except RecursionError as error:
        raise RecipeError(top, "nested too deeply") from error
    except ValueError as error:
        raise RecipeError(top, f"not YAML: {error}") from error
    if root is None:
        raise RecipeError(top, "empty; expected a mapping with merge_method")
    return _Walk(file).node(root, "", None, 0)


class _Walk:
    def __init__(self, file: str):
        from yaml.constructor import SafeConstructor

        self.file, self.left, self.scalars = file, _NODES, SafeConstructor()

    def node(self, raw: Any, path: str, key: Where | None, depth: int) -> Node:
        at = self.at(raw, path)
        self.left -= 1
        if self.left < 0:
            raise RecipeError(at, f"aliases expand to more than {_NODES} nodes")
        if depth > _DEPTH:
            raise RecipeError(at, f"nested deeper than {_DEPTH} (an alias to itself?)")
        if raw.id == "mapping":
            self.tag(raw, at, "map")
            value: Any = self.mapping(raw, path, depth)
        elif raw.id == "sequence":
            self.tag(raw, at, "seq")
            value = [
                self.node(part, f"{path}[{i}]", None, depth + 1) for i, part in enumerate(raw.value)
            ]
        else:
            value = self.scalar(raw, at)
        return Node(value, at, key or at)

    def at(self, raw: Any, path: str) -> Where:
        return Where(path, self.file, raw.start_mark.line + 1, raw.start_mark.column + 1)

    def tag(self, raw: Any, at: Where, *kinds: str) -> str:
        kind = raw.tag.removeprefix("tag:yaml.org,2002:")
        if kind not in kinds:
            raise RecipeError(at, f"the tag {raw.tag!r} is not allowed here")
        return kind

    def scalar(self, raw: Any, at: Where) -> Any:
        kind = self.tag(raw, at, *_KINDS)
        try:
            if kind == "int":
                return self.scalars.construct_yaml_int(raw)
            if kind == "float":
                return self.scalars.construct_yaml_float(raw)
            if kind == "bool":
                return self.scalars.construct_yaml_bool(raw)
        except (ValueError, KeyError, IndexError, OverflowError) as error:
            raise RecipeError(at, f"{raw.value[:40]!r} is not a {kind}") from error
        return None if kind == "null" else raw.value

    def mapping(self, raw: Any, path: str, depth: int) -> dict[str, Node]:
        own, merged = {}, {}
        for name, part in raw.value:
            at = self.at(name, path)
            if name.tag == "tag:yaml.org,2002:merge":
                for parent in part.value if part.id == "sequence" else [part]:
                    if parent.id != "mapping":
                        raise RecipeError(at, "<<: expected a mapping, or a list of mappings")
                    merged = self.node(parent, path, None, depth + 1).value | merged
                continue
            if name.id != "scalar":
                raise RecipeError(at, "expected a key in one word")
            word = self.scalar(name, at)
            word = name.value if word is not None else "null"
            inside = at._replace(path=f"{path}.{word}" if path else word)
            if word in own:
                raise RecipeError(inside, "this key occurs twice in one mapping")
            own[word] = self.node(part, inside.path, inside, depth + 1)
        return merged | own
