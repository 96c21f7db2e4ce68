"""Formats numbers and names for the report, and lists what a user should check."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from pathlib import PurePath
from typing import Any

from sail_jax.checkpoint.executor import Record
from sail_jax.checkpoint.formats.hub import shortened
from sail_jax.checkpoint.planning.plan import Plan
from sail_jax.cli.merge_report.measures import Measured, Total, finite, owners_of


def number(x: float | None) -> str:
    """Formats a number in three digits.

    Args:
      x: The number; None and non-finite numbers count as undefined.

    Returns:
      The number; a dash if it is undefined.

    >>> number(0.123456), number(None)
    ('0.123', '–')
    """
    return "–" if x is None or not math.isfinite(x) else f"{x:.3g}"


def percent(x: float | None) -> str:
    """Formats a fraction as a percentage.

    Args:
      x: The fraction; None and non-finite numbers count as undefined.

    Returns:
      The percentage, with more digits below 0.1 %; a dash if it is undefined.

    >>> percent(0.257), percent(1)
    ('25.7 %', '100 %')
    """
    if x is None or not math.isfinite(x):
        return "–"
    return f"{100 * x:.0f} %" if x in (0, 1) else f"{100 * x:.{1 if x >= 0.001 else 4}f} %"


def many(count: int, thing: str) -> str:
    """Formats a count of things.

    Args:
      count: The number of things.
      thing: Their name in the singular.

    Returns:
      The count and the name, with an s unless the count is 1.

    >>> many(1, "tensor"), many(1200, "tensor")
    ('1 tensor', '1,200 tensors')
    """
    return f"{count:,} {thing}{'s' * (count != 1)}"


def _were(items: Collection[Any]) -> str:
    return "was" if len(items) == 1 else "were"


def few(names: Sequence[str], limit: int = 3) -> str:
    """Lists the first few names.

    Args:
      names: The names.
      limit: The number of names to list.

    Returns:
      The listed names, and the number of further names.

    >>> few(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def short(name: str, limit: int = 26) -> str:
    """Shortens the name of a part of a network to its last part.

    Args:
      name: A name, which may have slashes.
      limit: The largest length of the result, in characters.

    Returns:
      The last part, shortened in its middle if it is too long.

    >>> short("params/decoder/")
    'decoder'
    """
    return cut(PurePath(name.rstrip("/")).name or name, limit)


def cut(text: str, limit: int = 26) -> str:
    """Shortens a text in its middle.

    Args:
      text: The text.
      limit: The largest length of the result, in characters.

    Returns:
      The text, or its beginning and end.

    >>> cut("llama-math", 7)
    'lla…ath'
    """
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-limit // 2 + 1 :]}"


def lettered(models: Sequence[str]) -> list[str]:
    """Assigns a letter to every model, for tables and figures.

    Args:
      models: The names of the models.

    Returns:
      A letter and the name without folders for each model; after the 26th, a number.

    >>> lettered(["models/math", "models/base@v1+models/code"])
    ['A · math', 'B · base@v1+code']
    """
    letters = [chr(ord("A") + i) if i < 26 else str(i + 1) for i in range(len(models))]
    names = map(cut, shortened(models))
    return [f"{letter} · {name}" for letter, name in zip(letters, names, strict=True)]


def weights_of(plan: Plan, models: Sequence[str]) -> list[list[float]]:
    """Collects the weights of each model over all tensors.

    Args:
      plan: The plan of the merge.
      models: The names of the models.

    Returns:
      A list of weights for each model; empty if none were set.
    """
    weights: list[list[float]] = [[] for _ in models]
    for t in plan.treatments:
        if t.weights is not None and len(t.weights) == len(t.models):
            for name, weight in zip(owners_of(plan, t, len(t.models)), t.weights, strict=True):
                if name in models:
                    weights[list(models).index(name)].append(float(weight))
    return weights


# Fractions of conflicts that differ by less count as equal.
NEAR_CHANCE = 0.01


def conflicts(total: Total) -> str:
    """Compares the fraction of entries with sign conflicts with chance.

    Args:
      total: The measurements of the whole model.

    Returns:
      One sentence.
    """
    apart = total.conflicts - total.chance
    than = "more than" if apart > 0 else "less than"
    than = "about as often as" if abs(apart) <= NEAR_CHANCE else than
    return (
        f"Signs conflict at {percent(total.conflicts)} of the entries, {than} by chance"
        f" (chance: {percent(total.chance)})."
    )


def warnings(plan: Plan, records: Mapping[str, Record], data: Measured) -> list[str]:
    """Lists what a user should check: unmeasured tensors, duplicates, conflicts, odd weights.

    Args:
      plan: The plan of the merge.
      records: The measurements, by tensor name.
      data: The finite records as arrays.

    Returns:
      One sentence per fact; empty if nothing is unusual.
    """
    lines = []
    merged = [t for t in plan.treatments if t.method != "copy"]
    wild = [t.name for t in merged if t.name in records and not finite(records[t.name])]
    if wild:
        lines.append(
            f"NaN or infinity in {many(len(wild), 'tensor')}, excluded from all totals and plots:"
            f" {few(wild)}."
        )
    unseen = [t.name for t in merged if t.name not in records]
    if unseen and records:
        lines.append(
            f"{many(len(unseen), 'merged tensor')} {_were(unseen)} not measured (this is normal in"
            f" a resumed run): {few(unseen)}."
        )
    other = {t.name for t in merged if t.name in records} - {*wild, *data.names}
    if other:
        lines.append(
            f"{many(len(other), 'tensor')} {_were(other)} merged without the base. The table"
            " includes them; the totals and plots do not."
        )
    if not data.names:
        return lines
    total, names = data.total(), lettered(data.models)
    norms, what = total.norms, "equals the base" if data.deltas else "is 0"
    still = [k for k, norm in enumerate(norms) if norm == 0]
    lines += [f"{names[k]} {what} in every merged tensor. It adds nothing." for k in still]
    for i, j in combinations(range(len(names)), 2):
        cosine = total.cosines[i, j]
        # Models fine-tuned from one another have cosines of whole weights near 1 without being
        # duplicates.
        near = 0.999 if data.deltas else 1 - 1e-12
        if cosine > near and (data.deltas or abs(norms[i] / norms[j] - 1) < 1e-9):
            lines.append(
                f"{names[i]} and {names[j]} are duplicates, or nearly (cosine {cosine:.4f})."
                " Their common changes count twice."
            )
        elif cosine < -0.5:
            lines.append(
                f"{names[i]} and {names[j]} point in opposite directions (cosine {cosine:.2f})."
                " Most of both cancels."
            )
    if total.conflicts > total.chance + NEAR_CHANCE:
        lines.append(conflicts(total))
    moved = [k for k in range(len(names)) if norms[k] > 0]
    if moved and data.deltas:
        far, near = max(moved, key=lambda k: norms[k]), min(moved, key=lambda k: norms[k])
        if norms[far] > 10 * norms[near]:
            lines.append(
                f"{names[far]} moved {norms[far] / norms[near]:.0f} times as far from the base as"
                f" {names[near]}. With similar weights it dominates the merge."
            )
        if total.update > 2 * norms[far]:
            lines.append(
                f"The merged model is {total.update / norms[far]:.1f} times as far from the base as"
                " the farthest input. Check the weights and the scale."
            )
        if total.update == 0:
            lines.append("The merged model equals the base in every measured tensor.")
    for k, weights in enumerate(weights_of(plan, data.models)):
        if k in moved and total.kept[k] == 0:
            lines.append(f"The merge kept no entry that {names[k]} moved.")
        elif k in moved and total.alignment[k] < -0.1 and min(weights, default=0) >= 0:
            lines.append(
                f"The update points away from {names[k]} (cosine {total.alignment[k]:.2f}),"
                " although the model's weight is not negative."
            )
    return lines
