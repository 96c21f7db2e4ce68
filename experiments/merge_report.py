"""The report of a merge: what was measured of every tensor, as JSON and as one page to read.

Task vectors are what the models' deltas from the base are, or the models themselves where a method
takes no base. Whole-model and per-layer numbers follow exactly from those of the tensors: squares
of norms and inner products add, fractions of entries are weighted by size. Only the kept fraction
is an average over tensors, weighted by size.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import combinations, groupby
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from experiments import report
from sail_jax import disk
from sail_jax.checkpoint.layers import is_early, position, role

if TYPE_CHECKING:
    from sail_jax.checkpoint.executor import Record
    from sail_jax.checkpoint.plan import Plan, Treatment

__all__ = ["admit", "as_json", "kind", "page", "write"]

SCHEMA, VERSION = "sail-jax/merge-report", 1
FILES = {
    "report.json": f'"schema": "{SCHEMA}"',
    "report.html": f'<meta name="generator" content="{SCHEMA}',
}
_NORM = re.compile(r"norm|(?:^|[._/])(?:ln|bn)(?:_|\d|[._/]|$)", re.IGNORECASE)
_ATTENTION = re.compile(
    r"att|(?:^|[._/])(?:[qkvo]_proj|qkv|query|key|value|wq|wk|wv|wo)(?:[._/]|$)", re.IGNORECASE
)
_MLP = re.compile(
    r"mlp|ffn|feed_?forward|experts?|intermediate|dense|(?:gate|up|down)_proj"
    r"|(?:^|[._/])(?:fc|w|linear)_?\d*(?:[._/]|$)|output[._/]",
    re.IGNORECASE,
)
KINDS = ("embedding", "attention", "MLP", "norm", "head", "other")


def kind(name: str) -> str:
    """What a tensor is in a transformer, by its name: one of `KINDS`.

    >>> [kind(f"model.layers.3.{x}.weight") for x in ("self_attn.q_proj", "input_layernorm")]
    ['attention', 'norm']
    >>> kind("model.embed_tokens.weight"), kind("h.0.mlp.c_fc.bias"), kind("conv.kernel")
    ('embedding', 'MLP', 'other')
    """
    place = position(name)
    if role(name) == "head":
        return "head"
    if _NORM.search(name if place is None else place.rest):
        return "norm"
    if role(name) or (place is None and is_early(name)):
        return "embedding"
    rest = name if place is None else place.rest
    return "attention" if _ATTENTION.search(rest) else "MLP" if _MLP.search(rest) else "other"


# --- what was measured, as arrays


class Total(NamedTuple):
    """Sums over some tensors, as `Record` has them for one; NaN where undefined.

    rms `[model]`: root mean square of a task vector's entries.
    """

    norms: np.ndarray
    rms: np.ndarray
    cosines: np.ndarray
    update: float
    alignment: np.ndarray
    conflicts: float
    changed: float
    kept: np.ndarray


class Measured(NamedTuple):
    """All finite records of one sort, with a column for every model; absent models have moved by 0.

    deltas: whether task vectors start at a base. names `[tensor]`; sizes (0 where absent), gram
    `[tensor, model, model]`, cross `[tensor, model]` (inner products with the update), kept (NaN
    where undefined), and of the update: square, conflicts, changed (counts) `[tensor]`.
    """

    models: tuple[str, ...]
    deltas: bool
    names: tuple[str, ...]
    size: np.ndarray
    sizes: np.ndarray
    gram: np.ndarray
    cross: np.ndarray
    kept: np.ndarray
    square: np.ndarray
    conflicts: np.ndarray
    changed: np.ndarray

    def total(self, members: Sequence[int] | None = None) -> Total:
        """The sum over the tensors `members`, or all."""
        at = slice(None) if members is None else np.asarray(members, int)
        size, sizes, gram = self.size[at].sum(), self.sizes[at].sum(0), self.gram[at].sum(0)
        norms, update = np.sqrt(np.diag(gram)), float(np.sqrt(self.square[at].sum()))
        weight = np.where(np.isnan(self.kept[at]), 0, self.sizes[at])
        kept = (weight * np.nan_to_num(self.kept[at])).sum(0)
        return Total(
            np.where(sizes > 0, norms, np.nan),
            _ratio(norms, np.sqrt(sizes)),
            np.clip(_ratio(gram, np.outer(norms, norms)), -1, 1),
            update,
            np.clip(_ratio(self.cross[at].sum(0), norms * update), -1, 1),
            float(_ratio(self.conflicts[at].sum(), size)),
            float(_ratio(self.changed[at].sum(), size)),
            _ratio(kept, weight.sum(0)),
        )


def _ratio(a: Any, b: Any) -> np.ndarray:
    a, b = np.broadcast_arrays(np.asarray(a, float), np.asarray(b, float))
    return np.divide(a, b, out=np.full(a.shape, np.nan), where=b > 0)


def _from_base(t: "Treatment", record: "Record") -> bool:
    return t.base is not None and len(record.norms) == len(t.models)


def _voters(plan: "Plan", t: "Treatment", votes: int) -> tuple[str, ...]:
    """The inputs behind a tensor's votes: by where the tensors lie, else in the recipe's order."""
    inputs = [one for one in plan.inputs if one.role != "tokenizer"]
    base = [one.name for one in inputs if one.role == "base"]
    first = base[:1] if votes == len(t.models) + 1 else []
    found = [_owner(tensor.source, [one.name for one in inputs]) for tensor in t.models]
    if None in found or len(set(found)) < len(found):
        found = [one.name for one in inputs if one.role == "model"]
    names = [*first, *(name for name in found if name is not None)]
    distinct = len(names) == votes == len(set(names))
    return tuple(names) if distinct else tuple(f"vote {k + 1}" for k in range(votes))


def _owner(source: str, names: Sequence[str]) -> str | None:
    parts = PurePath(source).parts

    def inside(name: str) -> int:
        own = PurePath(name).parts
        starts = range(len(parts) - len(own) + 1)
        return len(own) if any(parts[i : i + len(own)] == own for i in starts) else 0

    depth = [inside(name) for name in names]
    best = max(depth, default=0)
    return names[depth.index(best)] if best and depth.count(best) == 1 else None


def _finite(record: "Record") -> bool:
    numbers = [record.norms, record.cosines, record.alignment, record.kept, record.update]
    return all(np.isfinite(np.asarray(x, float)).all() for x in numbers)


def _measured(plan: "Plan", records: Mapping[str, "Record"]) -> Measured:
    pairs = [(t, records[t.name]) for t in plan.treatments if t.name in records]
    pairs = [(t, record) for t, record in pairs if _finite(record)]
    deltas = any(_from_base(t, record) for t, record in pairs)
    pairs = [(t, record) for t, record in pairs if _from_base(t, record) == deltas]
    voters = [_voters(plan, t, len(record.norms)) for t, record in pairs]
    order = [one.name for one in plan.inputs]
    found = dict.fromkeys(name for names in voters for name in names)
    models = tuple(sorted(found, key=lambda n: order.index(n) if n in order else len(order)))
    n, m = len(pairs), len(models)
    sizes, kept, cross = np.zeros((n, m)), np.full((n, m), np.nan), np.zeros((n, m))
    gram = np.zeros((n, m, m))
    for k, ((_, record), names) in enumerate(zip(pairs, voters, strict=True)):
        at, norms = [models.index(name) for name in names], np.asarray(record.norms)
        sizes[k, at] = record.size
        cosines = np.array(record.cosines, float).reshape(len(at), len(at))
        np.fill_diagonal(cosines, 1)
        gram[k][np.ix_(at, at)] = cosines * np.outer(norms, norms)
        cross[k, at] = np.asarray(record.alignment) * norms * record.update
        kept[k, at] = np.where(norms > 0, record.kept, np.nan)
    size = np.array([record.size for _, record in pairs], float)
    square, conflicts, changed = (
        np.array([getattr(record, field) for _, record in pairs], float)
        for field in ("update", "conflicts", "changed")
    )
    names = tuple(t.name for t, _ in pairs)
    return Measured(
        models, deltas, names, size, sizes, gram, cross, kept, square**2, conflicts * size,
        changed * size,
    )  # fmt: skip


class Bin(NamedTuple):
    """Tensors that a plot by depth shows as one: a layer of `run` (its stack), or what is beside
    the layers (run "")."""

    label: str
    run: str
    members: list[int]


def _bins(names: Sequence[str], most: int = 48) -> list[Bin]:
    """Layers in order, with what comes before and after them; else modules, at most `most`."""
    places = [position(name) for name in names]
    layers: dict[tuple[str, int], list[int]] = {}
    early, late = [], []
    for i, (name, place) in enumerate(zip(names, places, strict=True)):
        if place is None:
            (early if is_early(name) else late).append(i)
        else:
            layers.setdefault((place.stack, place.index), []).append(i)
    if layers:
        stacks = list(dict.fromkeys(stack for stack, _ in layers))
        order = sorted(layers, key=lambda key: (stacks.index(key[0]), key[1]))
        inner = [Bin(str(key[1]), key[0] or "layers", layers[key]) for key in order]
        ends = [Bin("in", "", early)] * bool(early), [Bin("out", "", late)] * bool(late)
        return [*ends[0], *inner, *ends[1]]
    parents = [re.sub(r"[./][^./]*$", "", name) for name in names]
    runs = [list(g) for _, g in groupby(range(len(names)), lambda i: parents[i])]
    step = -(-len(runs) // most) or 1
    merged = [sum(runs[i : i + step], []) for i in range(0, len(runs), step)]
    return [Bin(parents[run[0]] + " …" * (step > 1), "modules", run) for run in merged]


# --- in words


def _number(x: float | None) -> str:
    return "–" if x is None or not math.isfinite(x) else f"{x:.3g}"


def _percent(x: float | None) -> str:
    if x is None or not math.isfinite(x):
        return "–"
    return f"{100 * x:.1f} %" if 0.001 <= x <= 0.999 or x in (0, 1) else f"{100 * x:.2g} %"


def _size(size: float) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def _many(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'s' * (count != 1)}"


def _short(name: str, limit: int = 26) -> str:
    last = PurePath(name.rstrip("/")).name or name
    return last if len(last) <= limit else f"{last[: limit // 2]}…{last[-limit // 2 + 1 :]}"


def _labels(models: Sequence[str]) -> list[str]:
    letters = [chr(ord("A") + i) if i < 26 else str(i + 1) for i in range(len(models))]
    return [f"{letter} · {_short(name)}" for letter, name in zip(letters, models, strict=True)]


def _weights(plan: "Plan", models: Sequence[str]) -> list[list[float]]:
    """The weights that each model has, over all tensors."""
    found: list[list[float]] = [[] for _ in models]
    for t in plan.treatments:
        if t.weights is not None and len(t.weights) == len(t.models):
            for name, weight in zip(_voters(plan, t, len(t.models)), t.weights, strict=True):
                if name in models:
                    found[list(models).index(name)].append(float(weight))
    return found


def _warnings(plan: "Plan", records: Mapping[str, "Record"], data: Measured) -> list[str]:
    """What the user should look at, in plain sentences."""
    found = []
    merged = [t for t in plan.treatments if t.method != "copy"]
    wild = [t.name for t in merged if t.name in records and not _finite(records[t.name])]
    if wild:
        found.append(
            f"{_many(len(wild), 'tensor')} hold NaN or infinity and are left out of every"
            f" number here: {_some(wild)}."
        )
    unseen = [t.name for t in merged if t.name not in records]
    if unseen and records:
        found.append(
            f"{_many(len(unseen), 'merged tensor')} were not measured, as in a run that was"
            f" resumed: {_some(unseen)}."
        )
    other = len(records.keys() & {t.name for t in merged}) - len(wild) - len(data.names)
    if other:
        found.append(
            f"{_many(other, 'tensor')} were merged without the base and are left out of the"
            " totals and plots: only the table has them."
        )
    if not data.names:
        return found
    total, names = data.total(), _labels(data.models)
    norms, what = total.norms, "moved from the base" if data.deltas else "differs from 0"
    still = [k for k, norm in enumerate(norms) if norm == 0]
    found += [f"{names[k]} has not {what} in any merged tensor: it adds nothing." for k in still]
    for i, j in combinations(range(len(names)), 2):
        cosine = total.cosines[i, j]
        near = 0.999 if data.deltas else 1 - 1e-12
        if cosine > near and (data.deltas or abs(norms[i] / norms[j] - 1) < 1e-9):
            found.append(
                f"{names[i]} and {names[j]} are duplicates, or nearly (cosine {cosine:.4f}):"
                " what they agree on counts twice."
            )
        elif cosine < -0.5:
            found.append(
                f"{names[i]} and {names[j]} pull in opposite directions (cosine {cosine:.2f}):"
                " much of both cancels."
            )
    if total.conflicts > 0.5:
        voters = len(names) - len(still)
        chance = _percent(1 - 2.0 ** (1 - voters)) if voters > 1 else "–"
        found.append(
            f"Signs conflict at {_percent(total.conflicts)} of all entries (unrelated signs of"
            f" {voters} models would at {chance})."
        )
    moved = [k for k in range(len(names)) if norms[k] > 0]
    if moved and data.deltas:
        far, near = max(moved, key=lambda k: norms[k]), min(moved, key=lambda k: norms[k])
        if norms[far] > 10 * norms[near]:
            found.append(
                f"{names[far]} moved {norms[far] / norms[near]:.0f} times as far from the base as"
                f" {names[near]}: with like weights it drowns the other."
            )
        if total.update > 2 * norms[far]:
            found.append(
                f"The merged model is {total.update / norms[far]:.1f} times as far from the base as"
                " the farthest input: look at weights and scale."
            )
        if total.update == 0:
            found.append("The merged model equals the base in every tensor measured.")
    for k, weights in enumerate(_weights(plan, data.models)):
        if k in moved and total.kept[k] == 0:
            found.append(f"Nothing of {names[k]} survives.")
        elif k in moved and total.alignment[k] < 0 and min(weights, default=0) >= 0:
            found.append(
                f"The update points away from {names[k]} (cosine {total.alignment[k]:.2f}),"
                " whose weight is not negative."
            )
    return found


def _some(names: Sequence[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


# --- JSON


def as_json(plan: "Plan", records: Mapping[str, "Record"], about: Mapping[str, Any]) -> bytes:
    """The report for other programs, headed by `about` (JSON data: recipe, versions, wall time).

    One row per tensor in the output's order. null: not measured (copied tensors), or undefined, as
    is the cosine of a zero vector, or not finite.
    """
    data = _measured(plan, records)
    methods = [t.method for t in plan.treatments]
    summary = {
        "method": plan.method,
        "compat": plan.compat,
        "seed": plan.seed,
        "inputs": [one._asdict() for one in plan.inputs],
        "tensors": len(methods),
        "copied": methods.count("copy"),
        "measured": sum(t.name in records for t in plan.treatments),
        "aliases": dict(plan.aliases),
        "files": sorted(plan.extras),
        "notes": list(plan.notes),
        "warnings": _warnings(plan, records, data),
        "total": {
            "models": list(data.models),
            "from": "base" if data.deltas else "zero",
            "tensors": len(data.names),
            "size": int(data.size.sum()),
            **(data.total()._asdict() if data.names else dict.fromkeys(Total._fields)),
        },
    }
    rows = [_row(plan, t, records.get(t.name)) for t in plan.treatments]
    whole = {"schema": SCHEMA, "version": VERSION, "about": about, "summary": summary}
    text = json.dumps(_plain({**whole, "tensors": rows}), indent=1, allow_nan=False,
                      ensure_ascii=False)  # fmt: skip
    return (text + "\n").encode("utf-8", "backslashreplace")


def _row(plan: "Plan", t: "Treatment", record: "Record | None") -> dict[str, Any]:
    votes = len(t.models) if record is None else len(record.norms)
    row = {
        "name": t.name,
        "shape": list(t.shape),
        "dtype": str(t.dtype),
        "size": math.prod(t.shape),
        "kind": kind(t.name),
        "method": t.method,
        "knobs": dict(t.knobs),
        "weights": t.weights,
        "group": t.group,
        "note": t.note,
        "base": None if t.base is None else t.base.source,
        "sources": [tensor.source for tensor in t.models],
        "models": _voters(plan, t, votes),
    }
    fields = ("norms", "cosines", "update", "alignment", "conflicts", "changed", "kept")
    if record is None:
        return {**row, "from": None, **dict.fromkeys(fields)}
    norms, update = np.asarray(record.norms, float), record.update
    moved = norms > 0
    cosines = np.where(np.outer(moved, moved), record.cosines, np.nan)
    alignment = np.where(moved & (update > 0), record.alignment, np.nan)
    kept = np.where(moved, record.kept, np.nan)
    values = (norms, cosines, update, alignment, record.conflicts, record.changed, kept)
    start = "base" if _from_base(t, record) else "zero"
    return {**row, "from": start, **dict(zip(fields, values, strict=True))}


def _plain(value: Any) -> Any:
    """JSON data of nested arrays, tuples and scalars; numbers that are not finite are None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
