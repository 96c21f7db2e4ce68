"""Tables of spaces as files: YAML or JSON, for networks that no table of an architecture knows.

axes:                              # see `sail_jax.basis.axes`: a pattern of paths, and spaces
  blocks.{i}.in.weight: hidden.{i} resid*
  blocks.{i}.out.weight: resid hidden.{i}*
spaces: {"hidden.{i}": relu}       # what is applied to a space
sizes: {"head.{i}": 4}             # of those that no tensor settles
settings: {hidden_size: resid}     # which entry of config.json states which spaces
layers: {num_layers: "blocks.{i}."}    # which entry counts the layers, and their prefix
optional: ["*.bias"]               # patterns that need not match
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from sail_jax import disk
from sail_jax.architectures import Rules, draft
from sail_jax.basis.axes import parse_axes, path_pattern
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.recipe import nodes
from sail_jax.checkpoint.recipe.yaml_tree import LIMIT, Node, RecipeError, Where, compose
from sail_jax.checks import nearest

__all__ = ["draft_table", "read_table"]

_KEYS = ("axes", "spaces", "sizes", "settings", "layers", "optional")


def read_table(path: str | Path) -> Rules:
    """The rules in a file; RecipeError, with the line, for what is not one of the keys above, axes
    that cannot be read and sizes that are no whole numbers."""
    root = compose(disk.read_bytes(Path(path), LIMIT), str(path))
    top = nodes.mapping(root, _KEYS, "a table of spaces", "axes")

    def part(key: str) -> dict[str, Node]:
        return nodes.optional(top, key, lambda n: nodes.mapping(n, None, key)) or {}

    axes = []
    for pattern, node in part("axes").items():
        try:
            path_pattern(pattern)
            text = "" if node.value is None else nodes.text(node)
            parse_axes(text.replace("{", "").replace("}", ""))
        except RecipeError:
            raise
        except ValueError as error:
            raise RecipeError(node.key, str(error)) from error
        axes.append((pattern, text))
    if not axes:
        raise RecipeError(root.where, "axes: expected at least one pattern and its axes")
    listed = nodes.optional(top, "optional", lambda n: nodes.sequence(n, "patterns")) or []
    for node in listed:
        if nodes.text(node) not in dict(axes):
            raise RecipeError(node.where, f"{node.value!r} is none of the patterns of axes")
    words = {word.rstrip("*") for _, text in axes for word in re.findall(r"[\w./:{}-]+\*?", text)}
    names = sorted(words - {"_", "diag"})
    settings = []
    for key, node in part("settings").items():
        several = node.value if isinstance(node.value, list) else [node]
        for one in several:
            for name in nodes.text(one).split():
                _named(name, names, one.where)
        settings += [(key, nodes.text(one)) for one in several]
    spaces, sizes = (
        {name: node for key, node in part(what).items() for name in _named(key, names, node.key)}
        for what in ("spaces", "sizes")
    )
    return Rules(
        tuple(axes),
        {name: nodes.text(node) for name, node in spaces.items()},
        {name: nodes.natural(node) for name, node in sizes.items()},
        frozenset(nodes.text(node) for node in listed),
        settings=tuple(settings),
        layers={key: nodes.text(node) for key, node in part("layers").items()},
    )


def _named(key: str, names: list[str], where: Where) -> list[str]:
    """The names of spaces, as they stand in the axes, that a key stands for."""
    if key in names:
        return [key]
    try:
        found = [name for name in names if path_pattern(key, stars=False).fullmatch(name)]
    except ValueError as error:
        raise RecipeError(where, str(error)) from error
    if not found:
        raise RecipeError(where, f"no space of the axes is called {key!r}{nearest(key, names)}")
    return found


def draft_table(checkpoint: Checkpoint, *, heads: int | None = None) -> str:
    """A table to start from, as YAML: the drafted rules, and what they leave open as comments."""
    shapes: Mapping[str, Any] = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in checkpoint.tensors.items()
    }
    found = draft(shapes, heads=heads)
    lines = ["axes:", *(f"  {_quoted(p)}: {_quoted(text)}" for p, text in found.rules.axes)]
    for key in ("spaces", "sizes"):
        if table := getattr(found.rules, key):
            lines += [f"{key}:", *(f"  {_quoted(k)}: {_quoted(v)}" for k, v in table.items())]
    if found.questions:
        lines.append("# Open, and in no space until it is settled above:")
    for question in found.questions:
        lines.append(f"# {question.path}: {question.text}")
        lines += [f"#     {option}" for option in question.options]
    return "\n".join(lines) + "\n"


def _quoted(value: Any) -> str:
    return str(value) if isinstance(value, int) else '"' + str(value).replace('"', '\\"') + '"'
