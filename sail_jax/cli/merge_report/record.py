"""Writes the report as JSON, for other programs."""

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sail_jax.checkpoint.executor import Record
from sail_jax.checkpoint.planning.plan import Plan, Treatment
from sail_jax.cli.merge_report.measures import Total, from_base, kind, measured, owners_of
from sail_jax.cli.merge_report.words import warnings

SCHEMA = "sail-jax merge report 1"


def as_json(plan: Plan, records: Mapping[str, Record], about: Mapping[str, Any]) -> bytes:
    """Writes the report as JSON: facts about the run, a summary, and a row for each tensor.

    A null stands for a value that was not measured (in copied tensors), is undefined (such as the
    cosine of a zero vector), or is not finite.

    Args:
      plan: The plan of the merge.
      records: The measurements, by tensor name.
      about: Facts about the run, as JSON data: recipe, versions, wall time.

    Returns:
      The document in UTF-8, with the tensors in the order of the output.
    """
    data = measured(plan, records)
    methods = [t.method for t in plan.treatments]
    summary = {
        "method": plan.method,
        "compat": plan.compat,
        "seed": plan.seed,
        "inputs": [model._asdict() for model in plan.inputs],
        "tensors": len(methods),
        "copied": methods.count("copy"),
        "measured": sum(t.name in records for t in plan.treatments),
        "aliases": dict(plan.aliases),
        "files": sorted(plan.extras),
        "losses": list(plan.losses),
        "notes": list(plan.notes),
        "warnings": warnings(plan, records, data),
        "total": {
            "models": list(data.models),
            "from": "base" if data.deltas else "zero",
            "tensors": len(data.names),
            "size": int(data.size.sum()),
            **(data.total()._asdict() if data.names else dict.fromkeys(Total._fields)),
        },
    }
    dumps = functools.partial(json.dumps, allow_nan=False, ensure_ascii=False)
    head = dumps(plain({"schema": SCHEMA, "about": about, "summary": summary}), indent=1)
    rows = (dumps(plain(row_of(plan, t, records.get(t.name)))) for t in plan.treatments)
    tensors = ",\n  ".join(rows)
    text = f'{head[:-2]},\n "tensors": [\n  {tensors}\n ]\n}}\n'
    return text.encode("utf-8", "backslashreplace")


def row_of(plan: Plan, t: Treatment, record: Record | None) -> dict[str, Any]:
    """Describes the treatment and the measurements of a tensor.

    Args:
      plan: The plan of the merge.
      t: The treatment of the tensor.
      record: The measurements; None if there are none.

    Returns:
      The row of the tensor. Its arrays have an entry for each of "models", NaN for undefined
      values. They are None without measurements.
    """
    models = len(t.models) if record is None else len(record.norms)
    row = {
        "name": t.name,
        "shape": list(t.shape),
        "dtype": str(t.dtype),
        "size": math.prod(t.shape),
        "kind": kind(t.name),
        "method": t.method,
        "options": dict(t.options),
        "weights": t.weights,
        "group": t.group,
        "note": t.note,
        "base": None if t.base is None else t.base.source,
        "sources": [tensor.source for tensor in t.models],
        "models": owners_of(plan, t, models),
    }
    fields = ("norms", "cosines", "update", "alignment", "conflicts", "changed", "moved", "kept")
    if record is None:
        return {**row, "from": None, **dict.fromkeys(fields)}
    norms, update = np.asarray(record.norms, float), record.update
    long = norms > 0
    cosines = np.where(np.outer(long, long), record.cosines, np.nan)
    alignment = np.where(long & (update > 0), record.alignment, np.nan)
    kept = np.where(np.asarray(record.moved) > 0, record.kept, np.nan)
    values = (
        norms, cosines, update, alignment, record.conflicts, record.changed, record.moved, kept
    )  # fmt: skip
    start = "base" if from_base(t, record) else "zero"
    return {**row, "from": start, **dict(zip(fields, values, strict=True))}


def plain(value: object) -> Any:
    """Turns nested arrays, tuples and scalars into JSON data.

    Args:
      value: The value.

    Returns:
      Dictionaries, lists and scalars. Non-finite numbers become None. Values of other types become
      text.

    >>> plain({"norms": (1.0, float("nan"))})
    {'norms': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
