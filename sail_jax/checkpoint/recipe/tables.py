"""Reads and drafts tables of spaces, in YAML or JSON, for networks of unknown architecture.

A table lists the feature space of each axis of each tensor:

axes:                              # see `sail_jax.basis.axes`: a pattern of paths, and spaces
  blocks.{i}.in.weight: hidden.{i} resid*
  blocks.{i}.out.weight: resid hidden.{i}*
spaces: {"hidden.{i}": relu}       # the nonlinearity of a space
sizes: {"head.{i}": 4}             # sizes that no shape determines
settings: {hidden_size: resid}     # the spaces of an entry of config.json
layers: {num_layers: "blocks.{i}."}    # the entry that counts the layers, and their prefix
optional: ["*.bias"]               # patterns that need not match
open: [...]                        # questions of a draft, to be answered and removed
scales: {embed.weight: resid^0.5}  # the network multiplies by this power of a size
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from sail_jax import disk
from sail_jax.architectures import Rules, draft
from sail_jax.basis.axes import parse_axes, path_pattern
from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.recipe.declared import Declared, read
from sail_jax.checkpoint.recipe.settings import Natural
from sail_jax.checkpoint.recipe.yaml_tree import LIMIT, RecipeError, compose
from sail_jax.checks import nearest
from sail_jax.configurations import Config


def _pattern(text: str) -> str:
    """Checks a pattern of paths."""
    path_pattern(text)
    return text


def _prefix(text: str) -> str:
    """Checks that the prefix of a layer's tensors contains a placeholder for its number."""
    if "i" not in path_pattern(text).groupindex:
        raise ValueError(f"expected a prefix with {{i}} for the number of a layer, got {text!r}")
    return text


def _axes(text: object) -> object:
    """Checks an axes string; an empty value stands for a tensor without axes."""
    # Without its braces, a name with a placeholder, "hidden.{i}", parses like any other name.
    parse_axes(str(text or "").replace("{", "").replace("}", ""))
    return "" if text is None else text


def _of_axes(pattern: str, info: ValidationInfo) -> str:
    """Checks that a pattern is one of those under axes."""
    if pattern not in info.data.get("axes", [pattern]):
        raise ValueError(f"{pattern!r} is not one of the patterns of axes")
    return pattern


def _product(text: str) -> str:
    """Checks that a setting is the product of at least one space."""
    if not text.split():
        raise ValueError("expected the names of spaces")
    return text


def _power(text: object) -> tuple[str, float]:
    """Splits "resid^0.5" into the name of a size and its power."""
    size, _, power = str(text).rpartition("^")
    if not size or not re.fullmatch(r"-?(\d+(\.\d*)?|\.\d+)", power):
        raise ValueError(f"expected a size and its power, such as resid^0.5, got {text!r}")
    return size, float(power)


_Product = Annotated[str, AfterValidator(_product)]


class Table(Declared):
    """A table of spaces in a file; see the top of this module.

    Attributes:
      axes: The axes strings, by pattern of tensor paths.
      spaces: The nonlinearity of a space, such as relu, by its name or a pattern of names.
      sizes: The sizes of spaces, by name or pattern.
      settings: The spaces whose sizes multiply to an entry of config.json, by entry; or a list of
        such products.
      layers: The prefix of a layer's tensors, by the entry of config.json that counts the layers.
      optional: The patterns under axes that need not match a tensor.
      open: The questions of a draft that are not answered yet.
      scales: The size and its power by which the network multiplies a tensor's result, by pattern.
    """

    axes: dict[Annotated[str, AfterValidator(_pattern)], Annotated[str, BeforeValidator(_axes)]] = (
        Field(min_length=1)
    )
    spaces: dict[str, str] = Field(default_factory=dict)
    sizes: dict[str, Natural] = Field(default_factory=dict)
    settings: dict[str, _Product | list[_Product]] = Field(default_factory=dict)
    layers: dict[str, Annotated[str, AfterValidator(_prefix)]] = Field(default_factory=dict)
    optional: tuple[Annotated[str, AfterValidator(_of_axes)], ...] = ()
    open: tuple[str, ...] = ()
    scales: dict[
        Annotated[str, AfterValidator(_of_axes)], Annotated[Any, AfterValidator(_power)]
    ] = Field(default_factory=dict)


def read_table(path: str | Path) -> Rules:
    """Reads the table of spaces in a file.

    Args:
      path: A YAML or JSON file.

    Returns:
      The rules of the architecture, like those of known ones in `sail_jax.architectures`.

    Raises:
      RecipeError: If a key is unknown, axes cannot be parsed, a size is not a whole number, a name
        is not a space of the axes, or questions of a draft are open; the message contains the line.
      StoreError: If the file is missing or too long.
    """
    root = compose(disk.read_bytes(Path(path), LIMIT), str(path))
    table = read(Table, root)
    # A draft must not be used before its open questions are answered, because a wrong guess would
    # silently change the function.
    if table.open:
        raise RecipeError(
            root.value["open"].key,
            f"{len(table.open)} of a draft's questions are open, such as {table.open[0]!r}: answer "
            "them in the table, and remove them from 'open'",
        )
    words = {word for text in table.axes.values() for word in re.findall(r"[\w./:{}-]+\*?", text)}
    names = sorted({word.rstrip("*") for word in words} - {"_", "diag"})

    def named(part: str, key: str, name: str) -> list[str]:
        """Returns the spaces in the axes that a name or pattern stands for."""
        if name in names:
            return [name]
        where = root.value[part].value[key].key
        try:
            fitting = [n for n in names if path_pattern(name, stars=False).fullmatch(n)]
        except ValueError as error:
            raise RecipeError(where, str(error)) from error
        if not fitting:
            hint = nearest(name, names)
            raise RecipeError(where, f"the axes lack the space {name!r}{hint}")
        return fitting

    for key, (size, _) in table.scales.items():
        if size not in table.layers:
            named("scales", key, size)
    settings = [
        (key, text)
        for key, texts in table.settings.items()
        for text in ([texts] if isinstance(texts, str) else texts)
    ]
    for key, text in settings:
        for name in text.split():
            named("settings", key, name)
    return Rules(
        tuple(table.axes.items()),
        {n: text for key, text in table.spaces.items() for n in named("spaces", key, key)},
        {n: size for key, size in table.sizes.items() for n in named("sizes", key, key)},
        frozenset(table.optional),
        settings=tuple(settings),
        layers=table.layers,
        scales=table.scales,
    )


def draft_table(checkpoint: Checkpoint, config: Config | None = None) -> str:
    """Drafts a table of spaces for a checkpoint, from names and shapes.

    Args:
      checkpoint: The open checkpoint; no tensor is read.
      config: The configuration; None for the checkpoint's config.json.

    Returns:
      The table as YAML, with the questions that names and shapes leave open. `read_table` refuses
      it until they are answered and removed.
    """
    shapes: Mapping[str, Any] = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in checkpoint.tensors.items()
    }
    drafted = draft(shapes, config=config_of(checkpoint.extras) if config is None else config)
    rules = drafted.rules
    settings: dict[str, str | list[str]] = {}
    for key, names in rules.settings:
        settings[key] = [*settings[key], names] if key in settings else [names]
    parts = {"axes": dict(rules.axes), "spaces": rules.spaces, "sizes": rules.sizes}
    parts |= {"settings": settings, "layers": rules.layers}
    lines: list[str] = [*_UNSEEN.splitlines()]
    for key, table in parts.items():
        if table:
            # JSON strings are valid YAML for any characters in a name.
            lines += [f"{key}:", *(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in table.items())]
    if drafted.questions:
        lines.append("open:  # answer these questions in the table, then remove them")
    for question in drafted.questions:
        lines.append(f"  - {json.dumps(f'{question.path}: {question.text}')}")
        lines += [f"    #   {json.dumps(option)[1:-1]}" for option in question.options]
    return "\n".join(lines) + "\n"


_UNSEEN = """\
# Drafted from names, shapes and config.json. They do not show the nonlinearity of a space: state it
# in spaces (relu, elementwise, layernorm, rmsnorm); without it, only permutations are exact. They
# do not show factors that depend on a size: state them in scales. "outer" spaces stay unchanged.
"""
