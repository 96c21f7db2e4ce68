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
RECORDS = {"0.5b": "0.5 B parameters in bfloat16, a base and three models, two cores"}
"""The sizes of the record of merges that pages quote, and what they are."""


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


@cache
def advice() -> Mapping[str, Advice]:
    """Reads `methods.yaml`."""
    text = (HERE / "methods.yaml").read_text(encoding="utf-8")
    return {
        name: Advice(**{key: " ".join(value.split()) for key, value in entry.items()})
        for name, entry in yaml.safe_load(text).items()
    }


def pages(cards: Mapping[str, str]) -> dict[str, str]:
    """Makes the page of each method that has an entry in `methods.yaml`.

    Args:
      cards: What `sail-jax merge --methods` prints of a method, by its name.

    Returns:
      The pages in Markdown, by file name.
    """
    return {f"{stem(name)}.md": _page(name, cards.get(name, "")) for name in advice()}


def stem(name: str) -> str:
    """The file name of a method's page, without its suffix."""
    return f"method-{name}"


def _page(name: str, card: str) -> str:
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
    """The recipe of the examples, and the call in Python."""
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
        if run["size"] in RECORDS:
            for track, row in run["tracks"].items():
                who, _, method = track.rpartition(" ")
                rows.setdefault(method, {})[who] = row
    return rows


def _cost(name: str, card: str) -> str:
    """What the method needs and reads, and what a merge of half a billion parameters took."""
    needs, *more = (line.strip() for line in card.splitlines()[1:])
    models, base, reads = needs.split("; ")
    lines = [("models", models), ("base", base), ("reads each large tensor", reads)]
    for line in more:
        key, _, value = line.partition(": ")
        title = "options in a recipe" if key == "parameters" else "keys at the top level"
        lines.append((title, ", ".join(f"`{option}`" for option in value.split(", "))))
    for who, title in (("ours", "measured"), ("peer", "mergekit, measured")):
        row = _measured().get(name, {}).get(who)
        if row:
            cost = row["seconds"], row["cpu_seconds"], row["peak_bytes"] / 1e9
            lines.append((title, "{:.1f} s, {:.1f} CPU-s, {:.2f} GB".format(*cost)))
    size = f"\n\nMeasured: {RECORDS['0.5b']}; see [Performance](../performance.md)."
    about = size if lines[-1][0].endswith("measured") else ""
    return f"## What it needs\n\n{table(('', ''), lines)}{about}"
