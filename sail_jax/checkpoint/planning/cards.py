"""Describes plans and methods: as plain data, as text for a terminal, and as a model card."""

import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from sail_jax.checkpoint.contents.layers import position
from sail_jax.checkpoint.formats import hub
from sail_jax.checkpoint.planning.plan import InputSummary, Plan, Treatment
from sail_jax.checkpoint.recipe import mergekit
from sail_jax.checkpoint.recipe.parts import Recipe
from sail_jax.checks import escaped, storage
from sail_jax.merging.merge import Merge
from sail_jax.merging.tensors import bytes_of
from sail_jax.merging.work import Work, passes, tree_bits
from sail_jax.methods.registry import example, get, options_of

Passes = Mapping[str, int]
"""The number of times that the inputs of each tensor are read, by its name; the default is one."""


def describe(plan: Plan, passes: Passes = MappingProxyType({})) -> dict[str, Any]:
    """Describes a plan as plain data, for JSON.

    Args:
      plan: The plan.
      passes: The number of times that the inputs of each tensor are read, by its name; the default
        is one.

    Returns:
      A dictionary of the inputs, reads, writes and losses, with sizes in bytes. `read` counts all
      passes. `largest` is the tensor with the largest `working`: the bytes of its inputs and its
      output in float32 (in float64 if an input is). It bounds the memory of methods that work on
      whole tensors.

    Raises:
      ValueError: If the plan contains no tensors.
    """
    tensors = [_described(treatment, passes) for treatment in plan.treatments]
    return {
        "method": plan.method,
        "compat": plan.compat,
        "seed": plan.seed,
        "read": sum(t["read"] for t in tensors),
        "write": sum(t["write"] for t in tensors),
        "passes": max(t["passes"] for t in tensors),
        "largest": max(tensors, key=lambda t: t["working"]),
        "inputs": [model._asdict() for model in plan.inputs],
        "aliases": dict(plan.aliases),
        "files": {
            name: "written" if isinstance(data, bytes) else "copied"
            for name, data in plan.extras.items()
        },
        "notes": list(plan.notes),
        "losses": list(plan.losses),
        "tensors": tensors,
    }


def _described(t: Treatment, passes: Passes) -> dict[str, Any]:
    inputs = [*t.models, *([] if t.base is None else [t.base])]
    times = passes.get(t.name, 1)
    wide = 8 if any(x.dtype.itemsize == 8 for x in inputs) else 4
    # A model that is listed twice, or is also the base, is read once.
    unique = {id(x): x for x in inputs}.values()
    return {
        "name": t.name,
        "shape": list(t.shape),
        "dtype": str(t.dtype),
        "method": t.method,
        "inputs": [x.source for x in inputs],
        "weights": None if t.weights is None else list(t.weights),
        "options": {k: list(v) if isinstance(v, tuple) else v for k, v in t.options.items()},
        "group": t.group,
        "note": t.note,
        "passes": times,
        "read": times * sum(map(bytes_of, unique)),
        "write": bytes_of(t),
        "working": wide * (math.prod(t.shape) + sum(math.prod(x.shape) for x in inputs)),
    }


def render(plan: Plan, full: bool = False, passes: Passes = MappingProxyType({})) -> str:
    """Describes a plan as text.

    Args:
      plan: The plan.
      full: Whether every tensor has its own line; by default tensors with equal treatment in all
        layers share one.
      passes: The number of times that the inputs of each tensor are read, by its name; the default
        is one.

    Returns:
      A summary, a line per tensor or per kind of tensor, and the notes.

    Raises:
      ValueError: If the plan contains no tensors.
    """
    data = describe(plan, passes)
    largest = data["largest"]
    lines = [f"{plan.method} ({plan.compat}), seed {plan.seed}"]
    for model in plan.inputs:
        lines.append(
            f"  {model.role:<9} {model.name}: {model.tensors} tensors, {storage(model.size)}"
        )
    passes_ = f"{data['passes']} pass{'es' * (data['passes'] > 1)}"
    written = f"writes {storage(data['write'])} in {len(plan.treatments)} tensors"
    lines += [f"reads {storage(data['read'])} in {passes_}, {written}"]
    working = f"{storage(largest['working'])} with its inputs in the dtype of the arithmetic"
    lines += [f"largest tensor: {largest['name']} {largest['shape']}, {working}", ""]
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for tensor in data["tensors"]:
        groups.setdefault(_kind(tensor, full), []).append(tensor)
    lines += [_line(group) for group in groups.values()]
    lines += [f"{name} is tied to {other} and not written" for name, other in plan.aliases.items()]
    if plan.extras:
        files = ", ".join(f"{name} ({how})" for name, how in sorted(data["files"].items()))
        lines += ["", f"files: {files}"]
    lines += [f"lost: {loss}" for loss in plan.losses]
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(map(escaped, lines)) + "\n"


def methods() -> str:
    """Lists every method that a recipe may use, as text.

    Returns:
      For each method: its first sentence, its models and base, the number of times and the pieces
      in which it reads a tensor, and its parameters with their defaults.
    """
    examples = {name: example(name) for name in mergekit.names()}
    return "\n".join(
        _method(name, mergekit.entry(name), merge) for name, merge in examples.items() if merge
    )


def _method(name: str, entry: mergekit.Entry, merge: Merge) -> str:
    """Describes one method, in a few lines."""
    least, most = entry.least, entry.most
    count = (
        f"{least} or more"
        if most is None
        else f"{least}"
        if least == most
        else f"{least} to {most}"
    )
    asks = [f"{count} model{'s' * (most != 1)}", _BASES[entry.base], _reading(merge)]
    given = [
        p.name if p.default in (None, mergekit.REQUIRED) else f"{p.name}={p.default}"
        for p in entry.parameters.values()
    ]
    above = [
        f"{key}: {what}"
        for option, key, what in (("key", "seed", "0"), ("scope", "scope", "tensor or tree"))
        if option in options_of(name)
    ]
    lines = [f"{name}: {inspect.getdoc(get(name))}".splitlines()[0], "; ".join(asks)]
    if given:
        lines.append("parameters: " + ", ".join(given))
    if above:
        lines.append("at the top level: " + ", ".join(above))
    return "\n    ".join(lines) + "\n"


_BASES = {
    "required": "a base",
    "optional": "a base if task vectors are meant",
    "first": "base_model is the first of them",
    "input": "no base",
    "joins": "base_model may be one more of them",
}


def _reading(merge: Merge) -> str:
    """Describes how many times a method reads a large tensor, and how much of it at once."""
    # Large enough to be read in several pieces, because a tensor of one piece is read only once.
    large = Work("", (1 << 12, 1 << 12), np.dtype(np.float32), (), None, np.ones(0), merge)
    times = passes(large, tree_bits([large]))
    unit = {"entry": "in pieces", "row": "in rows", "tensor": "whole matrices"}[merge.needs]
    return f"{times} pass{'es' * (times > 1)}, {unit}"


def _kind(tensor: Mapping[str, Any], full: bool) -> tuple:
    """Returns the key of tensors that share a line: everything except numbers and the layer."""
    place = None if full else position(tensor["name"])
    name = tensor["name"] if place is None else (place.stack, place.joint, place.rest)
    note = re.sub(r"\d+", "#", tensor["note"])
    options = tuple(sorted(tensor["options"]))
    return (name, tuple(tensor["shape"]), tensor["dtype"], tensor["method"], options, note)


def _line(group: list[dict[str, Any]]) -> str:
    """Describes the tensors that share a line, with the ranges of their numbers."""
    first = group[0]
    name = first["name"]
    place = position(name)
    if len(group) > 1 and place is not None:
        layers = sorted(layer.index for t in group if (layer := position(t["name"])))
        runs = f"{layers[0]}-{layers[-1]}"
        if layers != list(range(layers[0], layers[-1] + 1)):
            runs = f"{len(layers)} of {runs}"
        name = f"{place.stack}{place.joint}{{{runs}}}{place.rest}"
    shape = "x".join(map(str, first["shape"])) or "scalar"
    settings = []
    if first["weights"] is not None:
        columns = zip(*(t["weights"] for t in group), strict=False)
        settings.append(f"weights {' '.join(map(_range, columns))}")
    for option in first["options"]:
        if option != "compat":
            settings.append(f"{option} {_range([t['options'][option] for t in group])}")
    said = f"  [{first['note']}]" if first["note"] else ""
    return f"{name}  {shape} {first['dtype']}  {first['method']}  {', '.join(settings)}{said}"


def _range(values: Iterable[object]) -> str:
    """Formats numbers as a range, and other values as the first of them."""
    values = list(values)
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if len(numbers) == len(values):
        low, high = min(numbers), max(numbers)
        return f"{low:g}" if low == high else f"{low:g}..{high:g}"
    texts = list(dict.fromkeys(str(v) for v in values))
    return texts[0] if len(texts) == 1 else f"{texts[0]}.. ({len(texts)} values)"


def model_card(recipe: Recipe, plan: Plan, name: str = "merged model") -> str:
    """Writes the model card (README.md) of a merged checkpoint.

    Args:
      recipe: The recipe.
      plan: The plan that was made from it.
      name: The title of the card.

    Returns:
      Markdown with the front matter that the Hugging Face Hub reads, the method and its source, the
      inputs, the notes and the recipe. The licence of all inputs is the card's, if it is the same.
    """
    entry, brief = recipe.entry, _brief(recipe)
    title = f"[{entry.title}]({entry.reference})" if entry.reference else entry.title
    models = [model for model in plan.inputs if model.role != "tokenizer"]
    base = next((model.name for model in models if model.role == "base"), None)
    # The Hub refuses a card unless base_model is a name such as owner/model, so paths and revisions
    # are left out. There, an adapter is a model too.
    named = dict.fromkeys(
        name.partition("@")[0]
        for model in models
        for name in model.name.split("+")
        if hub.is_name(name)
    )
    front = ["base_model:", *(f"- {_quoted(name)}" for name in named)] if named else []
    licences = dict.fromkeys(model.licence for model in models)
    front += [f"license: {licence}" for licence in licences if licence and len(licences) == 1]
    front += ["library_name: transformers"] if "config.json" in plan.extras else []
    front += ["tags:", "- merge", "- sail-jax"]
    body = [
        f"# {_text(name)}",
        "",
        "A merge of trained models, made with sail-jax.",
        "",
        "## How",
        "",
        f"Method: {title} (`{recipe.method}`, compat `{plan.compat}`, seed {plan.seed}).",
        *([] if base is None else [f"Base: {_code(brief(base))}."]),
        "",
        "Models:",
        "",
        *(f"- {_code(brief(model.name))}" for model in models if model.name != base),
        *_licences(models, brief),
    ]
    copied = sum(t.method == "copy" for t in plan.treatments)
    body += ["", f"{len(plan.treatments)} tensors, {copied} of them copied."]
    for title, lines in (("Lost", plan.losses), ("Notes", plan.notes)):
        if lines:
            body += ["", f"{title}:", "", *(f"- {_text(brief(line))}" for line in lines)]
    if recipe.text:
        text = brief(recipe.text)
        ticks = _ticks(text, 3)
        body += ["", "## Recipe", "", f"{ticks}yaml", text.strip("\n"), ticks]
    return "\n".join(["---", *front, "---", "", *body]) + "\n"


def _licences(models: Iterable[InputSummary], brief: Callable[[str], str]) -> list[str]:
    """Lists the licences of inputs if they differ, or if only some are stated."""
    stated = {model.name: model.licence for model in models}
    if len({*stated.values()}) < 2:
        return []
    lines = (f"- {_code(brief(name))}: {has or 'none stated'}" for name, has in stated.items())
    return ["", "Licences of the inputs, which this model has to respect:", "", *lines]


def _brief(recipe: Recipe) -> Callable[[str], str]:
    """Makes the function that shortens absolute paths in a text to the ends of their names.

    A card is for other people: it contains the names in the recipe, but no folders of this machine.
    """
    models = recipe.models()
    words = {word for ref in models for word in (ref.path, ref.lora) if word is not None}
    # The text may contain comments and operations on models; words end as in YAML.
    for text in (recipe.text, *map(str, models)):
        words |= {*re.split(r"[@+\s\"'(){},\[\]]", text)}
    words = {word.rstrip("/") for word in words}
    paths = {w: Path(w) for w in words if os.path.isabs(w) and os.path.exists(w)}
    ends = {word: _end(path, {*paths.values()}) for word, path in paths.items()}

    def brief(text: str) -> str:
        for word in sorted(ends, key=len, reverse=True):
            text = text.replace(word, ends[word])
        return text

    return brief


def _end(path: Path, paths: Collection[Path]) -> str:
    """Returns the shortest end of a path that distinguishes it from the others, usually one part.

    The number of a step alone is not a name, so its run is included.
    """
    for count in range(1 + path.name.isdecimal(), len(path.parts)):
        end = path.parts[-count:]
        if [other.parts[-count:] for other in paths].count(end) == 1:
            return "/".join(end)
    return path.name


def growth_card(
    about: Mapping[str, Any], name: str, transformers: bool, *, prunes: bool = False
) -> str:
    """Writes the model card (README.md) of a grown checkpoint.

    Args:
      about: The record of the growth, `Growing.about` in `sail_jax.checkpoint.operations.growing`,
        with "agreement".
      name: The title of the card.
      transformers: Whether the library transformers can load the checkpoint. If so, the front
        matter states it.
      prunes: Whether the method makes a network smaller.

    Returns:
      Markdown with the source, the method, what changed in the configuration, and whether a run
      shows that the function is preserved.
    """
    front = ["library_name: transformers"] if transformers else []
    options = "".join(f", {key} {value}" for key, value in about["options"].items())
    how = f"`{about['method']}`, seed {about['seed']}{_text(options)}"
    source = _own(str(about["source"]))
    lost = [row for row in about["spaces"] if row["lost"]]
    tag, origin = ("pruned", "larger") if prunes else ("grown", "smaller")
    body = [
        f"# {_text(name)}",
        "",
        f"A network {tag} from a {origin} one, made with sail-jax.",
        "",
        f"Source: {_code(source)}. Method: {how}.",
        "",
        *(f"- {_text(f'{key}: {old} to {new}')}" for key, (old, new) in about["changes"].items()),
        "",
        f"Exactness: {_text(about['exactness'])}.",
        *(f"- lost by the axes of {_code(row['space'])}: {_text(row['lost'])}" for row in lost),
    ]
    return _made(front, tag, [*body, *_agreement(about)])


def mixture_card(about: Mapping[str, Any], name: str) -> str:
    """Writes the model card (README.md) of a mixture of experts.

    Args:
      about: The record of the upcycling, `Upcycling.about` in
        `sail_jax.checkpoint.operations.upcycling`, with "agreement" and "exactness".
      name: The title of the card.

    Returns:
      Markdown with the networks, the routers, and whether a run shows that the function of the
      dense network is preserved.
    """
    of = f"{about['experts_per_token']} of {len(about['experts'])}"
    drawn = f"{about['gate_mode']}, seed {about['seed']}"
    experts = [(f"expert {k}", expert) for k, expert in enumerate(about["experts"])]
    experts += [("shared expert", expert) for expert in about["shared_experts"]]
    body = [
        f"# {_text(name)}",
        "",
        "A mixture of experts made of dense networks with sail-jax.",
        "",
        f"Base: {_code(_own(about['base']))}. Each token uses {of} experts. Routers: {drawn}.",
        "",
        *(f"- {who}: {_code(_own(expert['source_model']))}" for who, expert in experts),
        "",
        f"Exactness: {_text(about['exactness'])}.",
    ]
    return _made(["library_name: transformers"], "moe", [*body, *_agreement(about)])


def _own(name: str) -> str:
    """Returns the name of an input without the folders of this machine."""
    return hub.shortened([name])[0] if os.path.isabs(name) else name


def _agreement(about: Mapping[str, Any]) -> Iterator[str]:
    """Describes the runs of both networks, and the notes, in lines."""
    for run in about["agreement"]:
        found = "not finite, or different in shape"
        if run["largest"] is not None:
            found = (
                f"largest difference {run['largest']:.3g}, mean {run['mean']:.3g}, largest output "
                f"{run['scale']:.3g} (rounding allows {run['tolerance']:.3g})"
            )
        yield f"- outputs on probe inputs in {run['dtype']}: {found}"
    if about["notes"]:
        yield from ("", "Notes:", "", *(f"- {_text(note)}" for note in about["notes"]))


def _made(front: Iterable[str], tag: str, body: Iterable[str]) -> str:
    """Makes the card of a network that was made from others, with its front matter."""
    return "\n".join(["---", *front, "tags:", f"- {tag}", "- sail-jax", "---", "", *body]) + "\n"


def _text(text: str) -> str:
    r"""Escapes text of unknown origin for Markdown: never as HTML, a link or an image.

    >>> print(_text("<b>![x](y)"))
    \<b\>!\[x\](y)
    """
    return re.sub(r"([\\`<>&\[\]])", r"\\\1", escaped(text))


def _code(text: str) -> str:
    """Formats text of unknown origin as code in Markdown."""
    line = escaped(text)
    ticks = _ticks(line, 1)
    space = " " * (line[:1] == "`" or line[-1:] == "`")  # Markdown removes one at both ends
    return f"{ticks}{space}{line}{space}{ticks}"


def _ticks(text: str, least: int) -> str:
    """Returns a fence of at least `least` backticks, longer than any run of them in the text."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))


def _quoted(text: str) -> str:
    """Quotes a text for YAML."""
    return "'" + text.replace("'", "''") + "'"
