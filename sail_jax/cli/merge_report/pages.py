"""Writes the report as one HTML page, with the texts of `words` and the figures of `figures`."""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from sail_jax.checkpoint.executor import Record
from sail_jax.checkpoint.planning.plan import Plan, Treatment
from sail_jax.checks import storage
from sail_jax.cli.merge_report.figures import draw
from sail_jax.cli.merge_report.measures import Measured, Total, by_depth, measured
from sail_jax.cli.merge_report.record import SCHEMA, plain, row_of
from sail_jax.cli.merge_report.words import (
    conflicts,
    few,
    lettered,
    many,
    number,
    percent,
    warnings,
    weights_of,
)
from sail_jax.drawing.pages import render

Cell = str | tuple[str, float | None]
Table = tuple[Sequence[str], Sequence[Sequence[Cell]]]


def page(plan: Plan, records: Mapping[str, Record], about: Mapping[str, Any]) -> str:
    """Writes the report as one HTML document without links to other files.

    Args:
      plan: The plan of the merge.
      records: The measurements, by tensor name.
      about: Facts about the run, as JSON data: recipe, versions, wall time.

    Returns:
      The document. All text in it is escaped.
    """
    data = measured(plan, records)
    total = data.total() if data.names else None
    pictures = draw(data, total) if total is not None else {}
    tied = [f"{name} is tied to {other} and not stored." for name, other in plan.aliases.items()]
    facts = {str(key): _text(value) for key, value in about.items()}
    facts["files"] = ", ".join(sorted(plan.extras)) or "only the tensors"
    return render(
        "merge",
        title=f"Merge report: {plan.method}",
        generator=SCHEMA,
        styles=("page", "merge"),
        scripts=("merge",),
        lead=_lead(plan, data),
        warnings=warnings(plan, records, data),
        inputs=_inputs(plan, data, total),
        measures=_measures(data, total, pictures),
        treated=_treated(plan),
        notes=[*tied, *(f"Lost: {loss}" for loss in plan.losses), *plan.notes],
        tensors=_tensors(plan, records, data),
        about={key: text for key, text in facts.items() if "\n" not in text},
        folded={key: text for key, text in facts.items() if "\n" in text},
    )


def _lead(plan: Plan, data: Measured) -> str:
    """Describes the merge in two sentences."""
    models = [model.name for model in plan.inputs if model.role == "model"] or list(data.models)
    base = next((model.name for model in plan.inputs if model.role == "base"), None)
    settings = _common(plan)
    facts = [
        f"{many(len(models), 'model')}" + (f" merged onto {base}" if base else " merged"),
        f"by {plan.method} ({plan.compat})",
        "settings vary (see the table)" if settings is None else settings,
        f"seed {plan.seed}",
    ]
    copied = sum(t.method == "copy" for t in plan.treatments)
    return (
        f"{', '.join(filter(None, facts))}. The output has {many(len(plan.treatments), 'tensor')}:"
        f" {copied:,} copied, {len(data.names):,} measured ({int(data.size.sum()):,} entries)."
    )


def _inputs(plan: Plan, data: Measured, total: Total | None) -> Table:
    """Makes a table of the inputs and of their effect over the whole model."""
    labels = dict(zip(data.models, lettered(data.models), strict=True))
    weights = dict(zip(data.models, weights_of(plan, data.models), strict=True))
    start = "task vector" if data.deltas else "weights"
    header = ["letter", "input", "role", "tensors", "size", "weight", f"norm of the {start}",
              "rms per entry", "kept", "cosine with the update"]  # fmt: skip
    rows = []
    roles = {model.name: model for model in plan.inputs}
    for name in dict.fromkeys([*roles, *data.models]):
        model, k = roles.get(name), data.models.index(name) if name in labels else None
        numbers = ["–", "–", "–", "–"]
        if k is not None and total is not None:
            numbers = [number(total.norms[k]), number(total.rms[k]), percent(total.kept[k]),
                       number(total.alignment[k])]  # fmt: skip
        low, high = (min(w), max(w)) if (w := weights.get(name)) else (None, None)
        weight = number(low) if low == high else f"{number(low)} to {number(high)}"
        about = ("–", "–", "–")
        if model is not None:
            about = (model.role, f"{model.tensors:,}", storage(model.size))
        letter = labels[name].split(" ")[0] if name in labels else ""
        row = [letter, name, *about, weight, *numbers]
        rows.append([*row[:3], *((text, None) for text in row[3:])])
    if total is not None:
        numbers = [number(total.update), number(total.update / math.sqrt(data.size.sum())), "–"]
        rows.append(["", "the merge", "output", *(("–", None),) * 3,
                     *((text, None) for text in numbers), ("1", None)])  # fmt: skip
    return header, rows


def _measures(
    data: Measured, total: Total | None, pictures: Mapping[str, tuple[str, bytes]]
) -> list[tuple[str, str, list[tuple[str, bytes]]]]:
    """Collects the heading, text and pictures of each section of measurements."""
    if total is None:
        return [("How far each model moved", "Nothing was measured.", [])]
    sections = {
        "moved": ("How far each model moved", _on_distances),
        "agree": ("How the models agree", _on_agreement),
        "merged": ("What the merge kept and changed", _on_outcome),
    }
    return [
        (heading, text(data, total), [pictures[key]] if key in pictures else [])
        for key, (heading, text) in sections.items()
    ]


def _on_distances(data: Measured, total: Total) -> str:
    """Describes which model moved farthest, and in which layer."""
    labels = lettered(data.models)
    what = "moved farthest from the base" if data.deltas else "has the largest weights"
    far = int(np.argmax(np.nan_to_num(total.norms)))
    text = f"{labels[far]} {what}, by a norm of {number(total.norms[far])}"
    text = text if data.deltas else text.replace(", by", ", with")
    bins = [part for part in by_depth(data.names) if part.run]
    if len(bins) > 1:
        peak = max(bins, key=lambda part: np.nan_to_num(data.total(part.members).norms[far]))
        layer = peak.run != "modules"
        several = len({part.run for part in bins}) > 1
        place = peak.label + f" of {peak.run}" * (several and layer)
        most = "It moved most in" if data.deltas else "Its weights are largest in"
        text += f" in total. {most} {'layer ' * layer}{place}"
    start = (
        "A task vector is a model minus the base."
        if data.deltas
        else "Without a base, the weights of the models are compared."
    )
    ends = any(not part.run for part in by_depth(data.names)) and bins
    outside = " The plots collect the tensors before the layers as in, after the layers as out."
    return f"{text}. {start}{outside * bool(ends)}"


def _on_agreement(data: Measured, total: Total) -> str:
    """Describes which models agree best, and how often signs conflict."""
    labels, m = lettered(data.models), len(data.models)
    if m < 2:
        return "One model was merged, so there is nothing to compare."
    pairs = [p for p in combinations(range(m), 2) if math.isfinite(total.cosines[p])]
    text = conflicts(total)
    if pairs:
        i, j = max(pairs, key=lambda p: total.cosines[p])
        text = (
            f"{labels[i]} and {labels[j]} agree best, with a cosine of"
            f" {number(total.cosines[i, j])}. {text}"
        )
    return (
        f"{text} The cosine is 0 for unrelated directions, 1 for equal and -1 for opposite ones."
        " Chance means the same number of moved entries, at random places and with random signs."
    )


def _on_outcome(data: Measured, total: Total) -> str:
    """Describes how much the merge changed, and how much it kept of each model."""
    labels = lettered(data.models)
    shares = sorted((x, label) for x, label in zip(total.kept, labels, strict=True) if x >= 0)
    ends = [shares[0], shares[-1]] if len(shares) > 1 else shares
    kept = " to ".join(f"{percent(x)} ({label})" for x, label in ends) or "none"
    start = "of the base" if data.deltas else "from 0"
    return (
        f"The merge changed {percent(total.changed)} of the entries {start}, by a norm of"
        f" {number(total.update)}. It kept {kept} of the entries that a model moved."
    )


def _treated(plan: Plan) -> Table:
    """Makes a table of tensors by method and note, ignoring numbers in the notes."""
    groups: dict[tuple[str, str], list[Treatment]] = {}
    for t in plan.treatments:
        groups.setdefault((t.method, re.sub(r"\d+", "#", t.note)), []).append(t)
    rows = []
    for (method, _), ts in sorted(groups.items(), key=lambda item: -len(item[1])):
        size = sum(math.prod(t.shape) * t.dtype.itemsize for t in ts)
        note = ts[0].note or ("unchanged" if method == "copy" else "")
        counts = [(f"{len(ts):,}", len(ts)), (storage(size), size)]
        rows.append([method, *counts, note, few([t.name for t in ts])])
    return ["method", "tensors", "size", "reason", "names"], rows


def _tensors(plan: Plan, records: Mapping[str, Record], data: Measured) -> Table:
    """Makes a table of all tensors with their measurements."""
    letters = {n: label.split(" ")[0] for n, label in zip(data.models, lettered(data.models),
                                                          strict=True)}  # fmt: skip
    header = ["tensor", "shape", "dtype", "method"]
    varied = _common(plan) is None
    header += ["settings"] * varied
    header += [f"norm {x}" for x in letters.values()] + ["norm of update"]
    header += [f"cos {x}" for x in letters.values()] + ["conflicts", "changed"]
    header += [f"kept {x}" for x in letters.values()] + ["note"]
    rows = []
    for t in plan.treatments:
        row = plain(row_of(plan, t, records.get(t.name)))
        columns = {name: k for k, name in enumerate(row["models"])}

        def cells(field: str, show: Any, row: Any = row, columns: Any = columns) -> list[Any]:
            # The tensor may come from only some of the models, in another order.
            values = row[field] or []
            at = [columns.get(name, len(values)) for name in letters]
            aligned = [values[k] if k < len(values) else None for k in at]
            return [(show(x), x) for x in aligned]

        settings = [_settings(t)] * varied
        shape = "×".join(map(str, t.shape)) or "scalar"
        rows.append([
            t.name, (shape, math.prod(t.shape)), str(t.dtype), t.method, *settings,
            *cells("norms", number), (number(row["update"]), row["update"]),
            *cells("alignment", number), *((percent(row[x]), row[x]) for x in
                                           ("conflicts", "changed")),
            *cells("kept", percent), t.note,
        ])  # fmt: skip
    return header, rows


def _common(plan: Plan) -> str | None:
    """Returns the settings that all merged tensors share, or None if they differ."""
    settings = {_settings(t) for t in plan.treatments if t.method != "copy"}
    return settings.pop() if len(settings) == 1 else None


def _settings(t: Treatment) -> str:
    """Formats the weights and hyperparameters of a tensor."""

    def text(value: object) -> str:
        if isinstance(value, tuple | list):
            return " ".join(map(text, value))
        return f"{value:g}" if isinstance(value, float) else str(value)

    options = {"weights": t.weights, **t.options} if t.weights is not None else t.options
    return ", ".join(f"{key} {text(value)}" for key, value in options.items() if key != "compat")


def _text(value: object) -> str:
    """Formats JSON data as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
