"""The report as one page to read."""

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from sail_jax.cli.merge_report.assets import SCRIPT, STYLE
from sail_jax.cli.merge_report.figures import draw
from sail_jax.cli.merge_report.measures import Measured, Total, by_depth, measured
from sail_jax.cli.merge_report.record import SCHEMA, plain, row_of
from sail_jax.cli.merge_report.words import (
    few,
    lettered,
    many,
    number,
    percent,
    storage,
    warnings,
    weights_of,
)

if TYPE_CHECKING:
    from sail_jax.checkpoint.engine.executor import Record
    from sail_jax.checkpoint.planning.plan import Plan, Treatment

__all__ = ["page"]


def page(plan: "Plan", records: Mapping[str, "Record"], about: Mapping[str, Any]) -> str:
    """The report as one HTML document that fetches nothing; every text is escaped."""
    data = measured(plan, records)
    total = data.total() if data.names else None
    pictures = draw(data, total) if total is not None else {}
    title = f"Merge report: {plan.method}"
    models = [one.name for one in plan.inputs if one.role == "model"] or list(data.models)
    base = next((one.name for one in plan.inputs if one.role == "base"), None)
    settings = _common(plan)
    facts = [
        f"{many(len(models), 'model')}" + (f" merged onto {base}" if base else " merged"),
        f"by {plan.method} ({plan.compat})",
        "settings that vary (see the table)" if settings is None else settings,
        f"seed {plan.seed}",
    ]
    facts = [fact for fact in facts if fact]
    copied = sum(t.method == "copy" for t in plan.treatments)
    counts = (
        f"{many(len(plan.treatments), 'tensor')}, {copied:,} of them copied;"
        f" {len(data.names):,} measured, with {int(data.size.sum()):,} entries."
    )
    found = warnings(plan, records, data)
    alerts = "".join(f"<li>{escape(one)}</li>" for one in found)
    parts = [
        f'<h1>{escape(title)}</h1>\n<p class="lead">{escape(", ".join(facts))}. {counts}</p>\n',
        f'<h2>Worth a look</h2>\n<ul class="alert">{alerts}</ul>\n'
        if found
        else "<p>Nothing stands out.</p>\n",
        _inputs(plan, data, total),
        *(_section(key, data, total, pictures) for key in ("moved", "agree", "merged")),
        _treated(plan),
        _tensors(plan, records, data),
        _about(plan, about),
    ]

    def digest(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    policy = (
        f"default-src 'none'; img-src data:; style-src {digest(STYLE)};"
        f" script-src {digest(SCRIPT)}; base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="{SCHEMA}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
{"".join(parts)}<script>{SCRIPT}</script>
</body>
</html>
"""


def _html_table(header: Sequence[str], rows: Iterable[Sequence[Any]], mark: str = "") -> str:
    """A table of texts, and of (text, number or None) which are sorted by the number."""

    def cell(value: Any, column: int) -> str:
        if isinstance(value, tuple):
            text, x = value
            exact = "" if x is None or not math.isfinite(x) else f"{x:.9g}"
            return f'<td class="n" data-v="{exact}">{escape(text)}</td>'
        wide = ' class="t"' * (len(value) > 16 and column > 0)
        return f"<td{wide}>{escape(value)}</td>"

    lines = [[cell(value, k) for k, value in enumerate(row)] for row in rows]
    aligned = ' class="n"'
    right = [bool(lines) and aligned in lines[0][k] for k in range(len(header))]
    head = "".join(
        f'<th scope="col"{aligned * one}>{escape(text)}</th>'
        for text, one in zip(header, right, strict=True)
    )
    body = "".join(f"<tr>{''.join(line)}</tr>\n" for line in lines)
    return (
        f'<div class="wide"><table{mark}><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>'
        "</table></div>\n"
    )


def _inputs(plan: "Plan", data: Measured, total: Total | None) -> str:
    """What was merged: a row per input, with what the whole model did."""
    labels = dict(zip(data.models, lettered(data.models), strict=True))
    weights = dict(zip(data.models, weights_of(plan, data.models), strict=True))
    start = "task vector" if data.deltas else "weights"
    header = ["", "input", "role", "tensors", "size", "weight", f"norm of the {start}",
              "rms per entry", "kept", "cosine with the update"]  # fmt: skip
    rows = []
    roles = {one.name: one for one in plan.inputs}
    for name in dict.fromkeys([*roles, *data.models]):
        one, k = roles.get(name), data.models.index(name) if name in labels else None
        numbers = ["–", "–", "–", "–"]
        if k is not None and total is not None:
            numbers = [number(total.norms[k]), number(total.rms[k]), percent(total.kept[k]),
                       number(total.alignment[k])]  # fmt: skip
        low, high = (min(w), max(w)) if (w := weights.get(name)) else (None, None)
        weight = number(low) if low == high else f"{number(low)} to {number(high)}"
        known = ("–", "–", "–")
        if one is not None:
            known = (one.role, f"{one.tensors:,}", storage(one.size))
        letter = labels[name].split(" ")[0] if name in labels else ""
        row = [letter, name, *known, weight, *numbers]
        rows.append([*row[:3], *((text, None) for text in row[3:])])
    if total is not None:
        numbers = [number(total.update), number(total.update / math.sqrt(data.size.sum())), "–"]
        rows.append(["", "the merge", "output", *(("–", None),) * 3,
                     *((text, None) for text in numbers), ("1", None)])  # fmt: skip
    return f"<h2>What was merged</h2>\n{_html_table(header, rows)}"


HEADINGS = {
    "moved": "How far each model moved",
    "agree": "How the models agree",
    "merged": "What survived, and where the merge went",
}


def _section(
    key: str, data: Measured, total: Total | None, pictures: Mapping[str, tuple[str, bytes]]
) -> str:
    if total is None:
        words = "Nothing was measured." if key == "moved" else ""
    else:
        words = {"moved": _say_moved, "agree": _say_agree, "merged": _say_merged}[key](data, total)
    picture = ""
    if key in pictures:
        text, image = pictures[key]
        picture = (
            f'<figure><img alt="{escape(text)}" src="data:image/png;base64,'
            f'{base64.b64encode(image).decode()}"></figure>\n'
        )
    return f"<h2>{HEADINGS[key]}</h2>\n<p>{escape(words)}</p>\n{picture}" if words else ""


def _say_moved(data: Measured, total: Total) -> str:
    labels = lettered(data.models)
    what = "moved farthest from the base" if data.deltas else "has the largest weights"
    far = int(np.argmax(np.nan_to_num(total.norms)))
    text = f"{labels[far]} {what}: a norm of {number(total.norms[far])}"
    bins = [one for one in by_depth(data.names) if one.run]
    if len(bins) > 1:
        most = max(bins, key=lambda one: np.nan_to_num(data.total(one.members).norms[far]))
        layer = most.run != "modules"
        several = len({one.run for one in bins}) > 1
        place = f"layer {most.label}" + f" of {most.run}" * several if layer else most.label
        text += f" over all, {'among the layers ' * layer}most in {place}"
    start = (
        "A task vector is a model minus the base."
        if data.deltas
        else "There is no base: what is compared are the weights themselves."
    )
    ends = any(not one.run for one in by_depth(data.names)) and bins
    beside = " In the plots, in and out are what comes before and after the layers." * bool(ends)
    return f"{text}. {start}{beside}"


def _say_agree(data: Measured, total: Total) -> str:
    labels, m = lettered(data.models), len(data.models)
    if m < 2:
        return "There is one model: nothing to agree or conflict with."
    pairs = [p for p in combinations(range(m), 2) if math.isfinite(total.cosines[p])]
    text = f"Signs conflict at {percent(total.conflicts)} of the entries."
    if pairs:
        i, j = max(pairs, key=lambda p: total.cosines[p])
        text = (
            f"{labels[i]} and {labels[j]} agree best, with a cosine of"
            f" {number(total.cosines[i, j])}. {text}"
        )
    return f"{text} 0 is what unrelated directions have, 1 the same and -1 opposite ones."


def _say_merged(data: Measured, total: Total) -> str:
    labels = lettered(data.models)
    kept = sorted((x, label) for x, label in zip(total.kept, labels, strict=True) if x >= 0)
    ends = [kept[0], kept[-1]] if len(kept) > 1 else kept
    said = " to ".join(f"{percent(x)} ({label})" for x, label in ends) or "none"
    start = "of the base" if data.deltas else "from 0"
    return (
        f"The merge changed {percent(total.changed)} of the entries {start}, by a norm of"
        f" {number(total.update)}. Kept, of the entries that a model moved: {said}."
    )


def _treated(plan: "Plan") -> str:
    """Tensors by method and by what the plan noted, alike but for numbers together."""
    groups: dict[tuple[str, str], list[Treatment]] = {}
    for t in plan.treatments:
        groups.setdefault((t.method, re.sub(r"\d+", "#", t.note)), []).append(t)
    rows = []
    for (method, _), ts in sorted(groups.items(), key=lambda item: -len(item[1])):
        size = sum(math.prod(t.shape) * t.dtype.itemsize for t in ts)
        note = ts[0].note or ("as it is" if method == "copy" else "")
        counts = [(f"{len(ts):,}", len(ts)), (storage(size), size)]
        rows.append([method, *counts, note, few([t.name for t in ts])])
    header = ["method", "tensors", "size", "why", "which"]
    tied = [f"{name} is tied to {other} and not stored." for name, other in plan.aliases.items()]
    items = "".join(f"<li>{escape(one)}</li>" for one in [*tied, *plan.notes])
    notes = f"<ul>{items}</ul>\n" if items else ""
    return f"<h2>Copied, cropped, skipped</h2>\n{_html_table(header, rows)}{notes}"


def _tensors(plan: "Plan", records: Mapping[str, "Record"], data: Measured) -> str:
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

        def each(field: str, show: Any, row: Any = row, columns: Any = columns) -> list[Any]:
            values = row[field] or []
            at = [columns.get(name, len(values)) for name in letters]
            found = [values[k] if k < len(values) else None for k in at]
            return [(show(x), x) for x in found]

        settings = [_settings(t)] * varied
        shape = "×".join(map(str, t.shape)) or "scalar"
        rows.append([
            t.name, (shape, math.prod(t.shape)), str(t.dtype), t.method, *settings,
            *each("norms", number), (number(row["update"]), row["update"]),
            *each("alignment", number), *((percent(row[x]), row[x]) for x in
                                           ("conflicts", "changed")),
            *each("kept", percent), t.note,
        ])  # fmt: skip
    words = (
        "norm: of a model's task vector; cos: of it and the update; kept: of the entries that the"
        " model moved; –: not measured, or undefined."
    )
    table = _html_table(header, rows, ' id="tensors"')
    return f'<h2>Every tensor</h2>\n<p class="soft">{words}</p>\n{table}'


def _common(plan: "Plan") -> str | None:
    """The settings of all tensors that are merged, if they are the same."""
    found = {_settings(t) for t in plan.treatments if t.method != "copy"}
    return found.pop() if len(found) == 1 else None


def _settings(t: "Treatment") -> str:
    def text(value: Any) -> str:
        if isinstance(value, tuple | list):
            return " ".join(map(text, value))
        return f"{value:g}" if isinstance(value, float) else str(value)

    options = {"weights": t.weights, **t.options} if t.weights is not None else t.options
    return ", ".join(f"{key} {text(value)}" for key, value in options.items() if key != "compat")


def _about(plan: "Plan", about: Mapping[str, Any]) -> str:
    """How it was made: short facts as a list, long ones folded."""

    def text(value: Any) -> str:
        if isinstance(value, Mapping):
            return ", ".join(f"{key} {text(item)}" for key, item in value.items())
        if isinstance(value, list | tuple):
            return ", ".join(map(text, value))
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    said = {str(key): text(value) for key, value in about.items()}
    said["files"] = ", ".join(sorted(plan.extras)) or "none beside the tensors"
    facts = "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>"
        for key, value in said.items()
        if "\n" not in value
    )
    folded = "".join(
        f"<details open><summary>{escape(key)}</summary><pre>{escape(value)}</pre></details>\n"
        for key, value in said.items()
        if "\n" in value
    )
    return f"<footer><h2>How it was made</h2>\n<dl>{facts}</dl>\n{folded}</footer>\n"
