"""Writes a page for each merging method: when to use it, its options, its cost, its docstring."""

import inspect
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from markup import table

HERE = Path(__file__).parent
SIZE = "0.5b"
"""The size in the record of merges that pages quote."""
MEASURED = "Measured: 0.5 B parameters in bfloat16, a base and three models, two cores; see"


class Advice(NamedTuple):
    """What `methods.yaml` holds of a method.

    Attributes:
      use: When to use the method.
      knobs: The options that change results most, with typical values.
      differ: How other programs differ, where the docstring does not list it.
    """

    use: str
    knobs: str
    differ: str = ""


class Card(NamedTuple):
    """What `sail-jax merge --methods` prints of a method.

    Attributes:
      about: Its first sentence.
      models: How many models it takes.
      base: What a base is to it.
      reads: How often and in what parts it reads a large tensor.
      parameters: Its parameters in a recipe, with defaults.
      keys: What else a recipe may set, at its top level.
    """

    about: str
    models: str
    base: str
    reads: str
    parameters: str = ""
    keys: str = ""


@cache
def cards() -> Mapping[str, Card]:
    """Reads what `sail-jax merge --methods` prints, by the name of the method."""
    from sail_jax.checkpoint.planning import cards

    found = {}
    for block in cards.methods().rstrip().split("\n\n"):
        first, needs, *more = (line.strip() for line in block.splitlines())
        name, about = first.split(": ", 1)
        options = dict(line.split(": ", 1) for line in more)
        parameters = options.pop("parameters", "")
        found[name] = Card(about, *needs.split("; "), parameters, *options.values())
    return found


def code(options: str) -> str:
    """Marks options that commas separate as code."""
    return ", ".join(f"`{option}`" for option in options.split(", "))


@cache
def advice() -> Mapping[str, Advice]:
    """Reads `methods.yaml`."""
    text = (HERE / "methods.yaml").read_text(encoding="utf-8")
    return {
        name: Advice(**{key: " ".join(value.split()) for key, value in entry.items()})
        for name, entry in yaml.safe_load(text).items()
    }


def pages() -> dict[str, str]:
    """Makes the page of each method that has an entry in `methods.yaml`.

    Returns:
      The pages in Markdown, by file name.
    """
    return {f"{stem(name)}.md": _page(name, cards().get(name)) for name in advice()}


def stem(name: str) -> str:
    """The file name of a method's page, without its suffix."""
    return f"method-{name}"


def _page(name: str, card: Card | None) -> str:
    from sail_jax import methods

    about = inspect.getdoc(getattr(methods, name)) or ""
    found = advice()[name]
    docstring = f".. currentmodule:: sail_jax.methods\n\n.. autofunction:: {name}\n   :no-index:"
    parts = [
        f"# `{name}`",
        about.splitlines()[0],
        f"**When.** {found.use}",
        f"**Options that matter.** {found.knobs}",
        f"**Elsewhere.** {found.differ}" if found.differ else "",
        _recipe(name) if card else "It takes arrays or functions, and is called from Python.",
        _cost(name, card) if card else "",
        f"## What it computes\n\n```{{eval-rst}}\n{docstring}\n```",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


@cache
def _recipes() -> Mapping[str, str]:
    from experiments.data.example_checkpoints import recipes

    return recipes(Path("ex"))


def _recipe(name: str) -> str:
    """The recipe of the examples, if there is one."""
    text = _recipes().get(name)
    if text is None:
        return ""
    return (
        f"## In a recipe\n\n`sail-jax examples ex` writes this one as `ex/recipes/{name}.yaml`; "
        f"`sail-jax merge ex/recipes/{name}.yaml out` runs it.\n\n```yaml\n{text.rstrip()}\n```"
    )


@cache
def _measured() -> Mapping[str, Mapping[str, Any]]:
    """The rows of the record of merges, by method."""
    record = json.loads((HERE / "performance" / "merge.json").read_text(encoding="utf-8"))
    rows: dict[str, dict[str, Any]] = {}
    for run in record["speed"]:
        if run["size"] == SIZE:
            for track, row in run["tracks"].items():
                who, _, method = track.rpartition(" ")
                rows.setdefault(method, {})[who] = row
    return rows


def _cost(name: str, card: Card) -> str:
    """What the method needs and reads, and what a merge of half a billion parameters took."""
    lines = [
        ("models", card.models),
        ("base", card.base),
        ("reads each large tensor", card.reads),
    ]
    recipe = {"options in a recipe": card.parameters, "keys at the top level": card.keys}
    lines += [(title, code(options)) for title, options in recipe.items() if options]
    measured = False
    for who, title in (("ours", "measured"), ("peer", "mergekit, measured")):
        if row := _measured().get(name, {}).get(who):
            cost = row["seconds"], row["cpu_seconds"], row["peak_bytes"] / 1e9
            lines.append((title, "{:.1f} s, {:.1f} CPU-s, {:.2f} GB".format(*cost)))
            measured = True
    about = f"\n\n{MEASURED} [Performance](../performance.md)." * measured
    return f"## What it needs\n\n{table(('', ''), lines)}{about}"
