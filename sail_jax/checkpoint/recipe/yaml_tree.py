"""Reads YAML into a tree in which every part has a line and a key path.

The rest of the package turns this tree into recipes and tables. YAML may be untrusted, so only
plain values are made from it, and its size is bounded.
"""

from typing import Any, NamedTuple

from sail_jax.checks import escaped

LIMIT = 1 << 20
"""The longest text that is read, in bytes."""

# Aliases can make a small file large (each may stand for a list of aliases), so the nodes are
# counted after expansion.
_NODES, _DEPTH = 100_000, 40
_KINDS = {"str", "int", "float", "bool", "null", "timestamp", "value"}


class Where(NamedTuple):
    """A position in a recipe.

    Attributes:
      path: The key path, such as `models[1].parameters`; "" for the top.
      file: The file, or the caller's name for the text; "" if the recipe was made in Python.
      line: The line, counted from 1; 0 if the recipe was made in Python.
      column: The column, counted from 1; 0 if the recipe was made in Python.
    """

    path: str = ""
    file: str = ""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return ": ".join(part for part in (place, self.path) if part)


class RecipeError(ValueError):
    """Raised if a part of a recipe is invalid, or does not match the recipe's inputs.

    The message begins with the position, if it is known.

    Attributes:
      where: The position of the error in the recipe.
    """

    def __init__(self, where: Where, message: str):
        super().__init__(escaped(f"{where}: {message}" if str(where) else message))
        self.where = where


class Node(NamedTuple):
    """A part of a YAML document, with its position.

    Attributes:
      value: A dict or a list of nodes, or a str, int, float, bool or None.
      where: The position of the value.
      key: The position of the value's key; equal to `where` for a part without a key, such as an
        item of a list.
    """

    value: Any
    where: Where
    key: Where


def compose(text: str | bytes, file: str = "recipe") -> Node:
    """Reads the one YAML document in a text into a tree of nodes.

    Only text, numbers, bools, None, lists and mappings are made: tags build no other objects. A
    timestamp stays text. The tree is at most 40 levels deep and has at most 100 000 nodes, with
    aliases and merge keys ("<<") expanded.

    Args:
      text: The YAML text, in UTF-8 if it is bytes; at most `LIMIT` bytes.
      file: The name of the text in error messages, such as its path.

    Returns:
      The root node.

    Raises:
      RecipeError: If the text is too long, empty, not UTF-8 or not YAML; if a mapping has a key
        twice, or a key that is not a scalar; if a tag is not allowed; or if the tree exceeds the
        bounds above.

    >>> compose("models: [a, 1e-3]").value["models"].value[1].where
    Where(path='models[1]', file='recipe', line=1, column=13)
    """
    first, *others = compose_all(text, file)
    if others:
        raise RecipeError(others[0].where, "another document; expected one")
    return first


def compose_all(text: str | bytes, file: str = "recipe") -> list[Node]:
    """Reads the YAML documents in a text into trees of nodes, as `compose` does with one.

    The bounds apply to all of them together.

    Args:
      text: The YAML text, in UTF-8 if it is bytes; at most `LIMIT` bytes.
      file: The name of the text in error messages, such as its path.

    Returns:
      The root node of each document that is not empty; at least one.

    Raises:
      RecipeError: As `compose` does.

    >>> [root.where.line for root in compose_all("a: 1\\n---\\nb: 2\\n---\\n")]
    [1, 3]
    """
    import yaml

    top = Where("", file)
    if isinstance(text, bytes):
        try:
            # Windows editors begin files with a byte order mark, which "utf-8-sig" drops.
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise RecipeError(top, f"expected text in UTF-8: {error}") from error
    if len(text.encode("utf-8", "replace")) > LIMIT:
        raise RecipeError(top, f"longer than {LIMIT} bytes")
    left = _NODES

    class Loader(yaml.SafeLoader):
        """Stops at too many nodes, because PyYAML takes seconds for a text of maximal length."""

        def compose_node(self, *place: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise RecipeError(top, f"more than {_NODES} nodes")
            return super().compose_node(*place)

    try:
        roots = list(yaml.compose_all(text, Loader=Loader))
    except RecipeError:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = top if mark is None else Where("", file, mark.line + 1, mark.column + 1)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise RecipeError(at, f"not YAML: {problem}") from error
    # PyYAML's composer is recursive, and runs before the depth can be checked here.
    except RecursionError as error:
        raise RecipeError(top, "nested too deeply") from error
    except ValueError as error:
        raise RecipeError(top, f"not YAML: {error}") from error
    walk = _Walk(file)
    nodes = [walk.node(root, "", None, 0) for root in roots]
    if nodes := [node for node in nodes if node.value is not None]:
        return nodes
    raise RecipeError(top, "empty; expected a mapping with merge_method")


class _Walk:
    """Converts PyYAML's nodes to ours, and counts them against the bounds."""

    def __init__(self, file: str):
        from yaml.constructor import SafeConstructor

        self.file, self.left, self.scalars = file, _NODES, SafeConstructor()

    def node(self, raw: Any, path: str, key: Where | None, depth: int) -> Node:
        """Converts a node and its children; `path` is its key path, `key` its key's position."""
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
        """Returns the short name of a node's tag; RecipeError unless it is one of `kinds`."""
        kind = raw.tag.removeprefix("tag:yaml.org,2002:")
        if kind not in kinds:
            raise RecipeError(at, f"the tag {raw.tag!r} is not allowed here")
        return kind

    def scalar(self, raw: Any, at: Where) -> Any:
        """Converts a scalar; text other than a number, a bool or null stays unchanged."""
        kind = self.tag(raw, at, *_KINDS)
        # PyYAML's own constructors parse all numbers of YAML 1.1, such as 0x1F and 1_000.
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
        """Converts a mapping; its own keys take precedence over those that "<<" merges into it."""
        own, merged = {}, {}
        for name, part in raw.value:
            at = self.at(name, path)
            if name.tag == "tag:yaml.org,2002:merge":
                for parent in part.value if part.id == "sequence" else [part]:
                    if parent.id != "mapping":
                        raise RecipeError(at, "<<: expected a mapping, or a list of mappings")
                    # If there are several parents, the first one takes precedence, according to the
                    # specification of "<<".
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
