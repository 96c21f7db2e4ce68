"""The report of a merge: what was measured of every tensor, as JSON and as one page to read.

Task vectors are what the models' deltas from the base are, or the models themselves where a method
takes no base. Whole-model and per-layer numbers follow exactly from those of the tensors: squares
of norms and inner products add, fractions of entries are weighted by size. Only the kept fraction
is an average over tensors, weighted by size.
"""

import base64
import functools
import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from itertools import chain, combinations, groupby
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

SCHEMA = "sail-jax merge report 1"
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
    known = tuple(one.name for one in inputs)
    found = [_owner(tensor.source, known) for tensor in t.models]
    if None in found or len(set(found)) < len(found):
        found = [one.name for one in inputs if one.role == "model"]
    names = [*first, *(name for name in found if name is not None)]
    distinct = len(names) == votes == len(set(names))
    return tuple(names) if distinct else tuple(f"vote {k + 1}" for k in range(votes))


@functools.lru_cache(maxsize=1024)
def _owner(source: str, names: tuple[str, ...]) -> str | None:
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
    merged = [list(chain(*runs[i : i + step])) for i in range(0, len(runs), step)]
    return [Bin(parents[run[0]] + " and on" * (step > 1), "modules", run) for run in merged]


# --- in words


def _number(x: float | None) -> str:
    return "–" if x is None or not math.isfinite(x) else f"{x:.3g}"


def _percent(x: float | None) -> str:
    if x is None or not math.isfinite(x):
        return "–"
    return f"{100 * x:.0f} %" if x in (0, 1) else f"{100 * x:.{1 if x >= 0.001 else 4}f} %"


def _size(size: float) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def _many(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'s' * (count != 1)}"


def _were(some: Collection[Any]) -> str:
    return "was" if len(some) == 1 else "were"


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
            f"NaN or infinity in {_many(len(wild), 'tensor')}, left out of every total and plot:"
            f" {_some(wild)}."
        )
    unseen = [t.name for t in merged if t.name not in records]
    if unseen and records:
        found.append(
            f"{_many(len(unseen), 'merged tensor')} {_were(unseen)} not measured, as in a run that"
            f" was resumed: {_some(unseen)}."
        )
    other = {t.name for t in merged if t.name in records} - {*wild, *data.names}
    if other:
        found.append(
            f"{_many(len(other), 'tensor')} {_were(other)} merged without the base: in the table,"
            " but not in the totals and plots."
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
        elif k in moved and total.alignment[k] < -0.1 and min(weights, default=0) >= 0:
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
    dumps = functools.partial(json.dumps, allow_nan=False, ensure_ascii=False)
    head = dumps(_plain({"schema": SCHEMA, "about": about, "summary": summary}), indent=1)
    rows = (dumps(_plain(_row(plan, t, records.get(t.name)))) for t in plan.treatments)
    tensors = ",\n  ".join(rows)
    text = f'{head[:-2]},\n "tensors": [\n  {tensors}\n ]\n}}\n'
    return text.encode("utf-8", "backslashreplace")


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


# --- pictures


def _figures(data: Measured, total: Total) -> dict[str, tuple[str, bytes]]:
    """(alternative text, PNG) by section."""
    from experiments import style

    bins = _bins(data.names)
    totals = [data.total(one.members) for one in bins]
    figures = {"moved": _moved(data, bins, totals)}
    if len(data.models) > 1:
        figures["agree"] = _agree(data, total, bins, totals)
    figures["merged"] = _merged(data, bins, totals)
    return {key: (style.describe(fig), style.png(fig)) for key, fig in figures.items()}


def _drawn(label: str) -> str:
    """Text that is safe to draw: no mathematics, no glyphs that the font lacks."""
    plain = "".join(c if c.isprintable() and (ord(c) < 0x590 or c in "…–") else "?" for c in label)
    return plain.replace("$", r"\$")


_MARKERS = "os^Dv*PX"


def _look(k: int) -> dict[str, Any]:
    from experiments import style

    colours = (*style.PALETTE, style.FAINT)
    return {"color": colours[k % len(colours)], "marker": _MARKERS[k % len(_MARKERS)]}


def _depth(ax: Any, bins: Sequence[Bin], room: int = 14) -> None:
    """The axis of layers: a tick at every few, the name of a stack below its first."""
    stacks = list(dict.fromkeys(one.run for one in bins if one.run))
    layered = stacks != ["modules"]
    step, named = -(-len(bins) // room), layered or len(bins) <= 10
    ticks, texts, count, run = [], [], 0, ""
    for i, one in enumerate(bins):
        count = 0 if one.run != run else count
        if one.run and run and one.run != run:
            ax.axvline(i - 0.5, color="#8C8C8C", linewidth=0.8)
        close = bool(ticks) and i - ticks[-1] < len(bins) / (2 * room)
        if close and not one.run and ticks[-1]:
            ticks, texts = ticks[:-1], texts[:-1]
        if not one.run or (count % step == 0 and not close):
            first = len(stacks) > 1 and one.run and count == 0
            below = "\n" + _drawn(_short(one.run, 14)) if first else ""
            ticks.append(i)
            texts.append((_drawn(_short(one.label, 20)) if named else str(i + 1)) + below)
        count, run = count + 1, one.run
    aslant = not layered and max(map(len, texts)) > 4
    ax.set_xticks(ticks, texts, **({"rotation": 45, "ha": "right"} if aslant else {}))
    ax.set_xlim(-0.6, len(bins) - 0.4)
    ax.set_xlabel("layer" if layered else "module" if named else "modules, in their order")


def _line(ax: Any, bins: Sequence[Bin], values: np.ndarray, label: str, **look: Any) -> None:
    """`values [bin]` as a line within every stack of layers, and as marks beside them."""
    at = 0
    for run, group in groupby(bins, lambda one: one.run):
        span = range(at, at := at + len(list(group)))
        look = {**look, "linewidth": 1.4 if run and run != "modules" else 0}
        ax.plot(span, values[span], markersize=4, label=_drawn(label), **look)


def _lines(ax: Any, bins: Sequence[Bin], values: np.ndarray, labels: Sequence[str]) -> None:
    for k, label in enumerate(labels):
        _line(ax, bins, values[:, k], label, **_look(k))


def _scaled(ax: Any, values: np.ndarray) -> None:
    """A logarithmic axis where values span much."""
    positive = values[np.isfinite(values) & (values > 0)]
    if positive.size and positive.max() > 30 * positive.min():
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, 1.1 * positive.max() if positive.size else 1)


def _legend(fig: Any, ax: Any) -> None:
    marks, names = ax.get_legend_handles_labels()
    lines = sorted(zip(names, marks, strict=True), key=lambda one: one[1].get_linewidth())
    order = {name: k for k, name in enumerate(names)}
    handles = dict(sorted(dict(lines).items(), key=lambda one: order[one[0]]))
    wide = 0.6 + 0.085 * max(map(len, handles), default=0)  # inches of a label, with its mark
    columns = max(1, min(len(handles), int(fig.get_figwidth() / wide)))
    fig.legend(
        handles.values(),
        handles.keys(),
        loc="outside upper center",
        frameon=False,
        fontsize=9,
        ncols=columns,
    )


def _moved(data: Measured, bins: Sequence[Bin], totals: Sequence[Total]) -> Any:
    from experiments import style

    fig, axes = style.figure(1, 2, width=4.8, width_ratios=[1.6, 1])
    left, right = axes[0]
    labels = _labels(data.models)
    norms = np.array([one.norms for one in totals])
    _lines(left, bins, norms, labels)
    _scaled(left, norms)
    _depth(left, bins)
    left.set_title("By depth")
    left.set_ylabel("norm of the task vector" if data.deltas else "norm of the weights")
    kinds = [kind(name) for name in data.names]
    shown = [one for one in KINDS if one in kinds]
    rms = np.array(
        [data.total([i for i, found in enumerate(kinds) if found == one]).rms for one in shown]
    )
    offsets = (np.arange(len(labels)) - (len(labels) - 1) / 2) * 0.6 / max(3, len(labels))
    for k, label in enumerate(labels):
        right.plot(
            np.arange(len(shown)) + offsets[k], rms[:, k], ls="", label=_drawn(label), **_look(k)
        )
    _scaled(right, rms)
    right.set_xticks(range(len(shown)), shown, rotation=25, ha="right")
    right.set_xlim(-0.6, len(shown) - 0.4)
    right.set_title("By kind of tensor")
    right.set_ylabel("root mean square per entry")
    _legend(fig, left)
    return fig


def _agree(data: Measured, total: Total, bins: Sequence[Bin], totals: Sequence[Total]) -> Any:
    from experiments import style

    m = len(data.models)
    letters = [label.split(" ")[0] for label in _labels(data.models)]
    pairs = list(combinations(range(m), 2))
    tall = max(3.4, 1.6 + 0.16 * len(pairs))
    fig, axes = style.figure(1, 2, width=5.2, height=tall, width_ratios=[1, 1.7])
    left, right = axes[0]
    apart = np.where(np.eye(m, dtype=bool), np.nan, total.cosines)
    by_bin = np.array([[one.cosines[i, j] for one in totals] for i, j in pairs])
    seen = np.abs(np.concatenate([apart.ravel(), by_bin.ravel()]))
    limit = min(1, max(0.05, np.nanmax(seen))) if np.isfinite(seen).any() else 1
    options = {"cmap": style.DIVERGING, "vmin": -limit, "vmax": limit}
    # the diagonal is 1 by definition: left out, so that the colours tell the rest apart
    left.imshow(apart, **options)
    left.grid(visible=False)
    for i in range(m):
        for j in range(m):
            text = "–" if np.isnan(total.cosines[i, j]) else f"{total.cosines[i, j]:.2f}"
            dark = i != j and abs(total.cosines[i, j]) > 0.6 * limit
            left.text(j, i, text, ha="center", va="center", fontsize=9 if m < 6 else 7,
                      color="white" if dark else style.INK)  # fmt: skip
    left.set_xticks(range(m), letters)
    left.set_yticks(range(m), letters)
    left.set_title("Whole model")
    left.set_xlabel("model")
    left.set_ylabel("model")
    shown = right.imshow(by_bin, aspect="auto", interpolation="nearest", **options)
    fig.colorbar(shown, ax=right, label="cosine").outline.set_visible(False)  # pyright: ignore
    right.set_facecolor("#E4E4E4")
    right.grid(visible=False)
    right.set_yticks(range(len(pairs)), [f"{letters[i]} {letters[j]}" for i, j in pairs])
    right.tick_params(axis="y", labelsize=9 if len(pairs) < 12 else 7)
    _depth(right, bins)
    right.set_xlim(-0.5, len(bins) - 0.5)
    right.set_title("By depth")
    right.set_ylabel("pair of models")
    return fig


def _merged(data: Measured, bins: Sequence[Bin], totals: Sequence[Total]) -> Any:
    from experiments import style

    labels = _labels(data.models)
    fig, axes = style.figure(1, 3, width=3.4)
    for ax, title in zip(
        axes[0],
        ("Conflicts of signs", "Kept (of moved), changed (of all)", "Alignment"),
        strict=True,
    ):
        ax.set_title(title)
        _depth(ax, bins, 8)
    left, middle, right = axes[0]
    shares = 100 * np.array([[one.conflicts, one.changed] for one in totals])
    ink = {"color": style.INK, "marker": ".", "linestyle": "--"}
    _line(left, bins, shares[:, 0], "", **{**ink, "linestyle": "-"})
    left.set_ylabel("% of entries")
    left.set_ylim(-3, 103)
    _lines(middle, bins, 100 * np.array([one.kept for one in totals]), labels)
    _line(middle, bins, shares[:, 1], "changed by the merge", **ink)
    middle.set_ylabel("% of entries")
    middle.set_ylim(-3, 103)
    _lines(right, bins, np.array([one.alignment for one in totals]), labels)
    right.set_ylabel("cosine with the update")
    right.axhline(0, color=style.FAINT, linewidth=0.8)
    low = np.nanmin([np.append(one.alignment, 0.0) for one in totals])
    right.set_ylim(min(-0.05, 1.1 * low), 1.05)
    _legend(fig, middle)
    return fig


# --- the page

STYLE = (
    report.STYLE
    + """
body { max-width: 76rem; } h3 { font-size: 1rem; margin: 1.2rem 0 .2rem; }
code, pre { font-family: ui-monospace, monospace; font-size: .85em; overflow-wrap: anywhere; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
      padding: .7rem; overflow-x: auto; white-space: pre-wrap; }
table { min-width: 0; width: 100%; } td.n, th.n { text-align: right; white-space: nowrap; }
.wide { max-height: 42rem; overflow: auto; } thead th { position: sticky; top: 0;
        background: var(--card); box-shadow: 0 1px var(--line); white-space: nowrap; }
#tensors td:first-child { min-width: 18rem; overflow-wrap: anywhere; }
#tensors td.t { min-width: 14rem; overflow-wrap: anywhere; }
ul.alert { list-style: none; padding: 0; } ul.alert li { border-left: .3rem solid #D55E00;
        background: var(--card); padding: .45rem .8rem; margin: .4rem 0; max-width: 60rem; }
.lead { font-size: 1.1rem; max-width: 60rem; overflow-wrap: anywhere; }
.bar { display: flex; gap: .6rem; align-items: center; flex-wrap: wrap; margin: .5rem 0; }
input, button { font: inherit; color: inherit; background: var(--card);
        border: 1px solid var(--line); border-radius: .3rem; padding: .2rem .5rem; }
input { min-width: 18rem; } th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid; } th[aria-sort=ascending] button::after
        { content: " ▲"; } th[aria-sort=descending] button::after { content: " ▼"; }
summary { cursor: pointer; } @media print { .wide { max-height: none; } .bar { display: none; } }
@media (prefers-color-scheme: dark) { img { filter:
        brightness(.9); } }
"""
)

SCRIPT = r"""
const table = document.getElementById('tensors'), size = 100;
const all = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells];
const bar = document.createElement('div'), find = document.createElement('input');
const said = document.createElement('span'), back = document.createElement('button');
const next = document.createElement('button');
let rows = all, page = 0;
bar.className = 'bar'; find.type = 'search'; find.placeholder = 'filter: words of a row';
find.setAttribute('aria-label', 'filter the tensors'); said.setAttribute('aria-live', 'polite');
back.textContent = 'previous'; next.textContent = 'next';
bar.append(find, said, back, next); table.parentNode.before(bar);
function show() {
  const last = Math.max(0, Math.ceil(rows.length / size) - 1);
  page = Math.min(Math.max(page, 0), last);
  const part = rows.slice(page * size, (page + 1) * size);
  table.tBodies[0].replaceChildren(...part);
  const from = rows.length ? page * size + 1 : 0;
  said.textContent = `${from}–${page * size + part.length} of ${rows.length}`;
  back.disabled = page === 0; next.disabled = page === last;
}
const texts = new Map(all.map(row => [row, row.textContent.toLowerCase()]));
let order = all;
function filter() {
  const words = find.value.toLowerCase().split(/\s+/);
  rows = order.filter(row => words.every(word => texts.get(row).includes(word)));
  page = 0; show();
}
function value(row, k) {
  const cell = row.cells[k], v = cell.dataset.v;
  return v === undefined ? cell.textContent : v === '' ? null : Number(v);
}
heads.forEach((head, k) => {
  const button = document.createElement('button');
  button.textContent = head.textContent; head.replaceChildren(button);
  button.addEventListener('click', () => {
    const down = head.getAttribute('aria-sort') !== 'descending';
    heads.forEach(one => one.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    order = [...all].sort((p, q) => {
      const a = value(p, k), b = value(q, k);
      if (a === null || b === null) return (a === null) - (b === null);
      const less = typeof a === 'number' ? a - b : a.localeCompare(b, 'en', {numeric: true});
      return down ? -less : less;
    });
    filter();
  });
});
find.addEventListener('input', filter);
back.addEventListener('click', () => { page -= 1; show(); });
next.addEventListener('click', () => { page += 1; show(); });
show();
"""


def page(plan: "Plan", records: Mapping[str, "Record"], about: Mapping[str, Any]) -> str:
    """The report as one HTML document that fetches nothing; every text is escaped."""
    data = _measured(plan, records)
    total = data.total() if data.names else None
    pictures = _figures(data, total) if total is not None else {}
    title = f"Merge report: {plan.method}"
    models = [one.name for one in plan.inputs if one.role == "model"] or list(data.models)
    base = next((one.name for one in plan.inputs if one.role == "base"), None)
    settings = _common(plan)
    facts = [
        f"{_many(len(models), 'model')}" + (f" merged onto {base}" if base else " merged"),
        f"by {plan.method} ({plan.compat})",
        "settings that vary (see the table)" if settings is None else settings,
        f"seed {plan.seed}",
    ]
    facts = [fact for fact in facts if fact]
    copied = sum(t.method == "copy" for t in plan.treatments)
    counts = (
        f"{_many(len(plan.treatments), 'tensor')}, {copied:,} of them copied;"
        f" {len(data.names):,} measured, with {int(data.size.sum()):,} entries."
    )
    found = _warnings(plan, records, data)
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
            text, number = value
            exact = "" if number is None or not math.isfinite(number) else f"{number:.9g}"
            return f'<td class="n" data-v="{exact}">{escape(text)}</td>'
        wide = ' class="t"' * (len(value) > 16 and column > 0)
        return f"<td{wide}>{escape(value)}</td>"

    lines = [[cell(value, k) for k, value in enumerate(row)] for row in rows]
    number = ' class="n"'
    right = [bool(lines) and number in lines[0][k] for k in range(len(header))]
    head = "".join(
        f'<th scope="col"{number * one}>{escape(text)}</th>'
        for text, one in zip(header, right, strict=True)
    )
    body = "".join(f"<tr>{''.join(line)}</tr>\n" for line in lines)
    return (
        f'<div class="wide"><table{mark}><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>'
        "</table></div>\n"
    )


def _inputs(plan: "Plan", data: Measured, total: Total | None) -> str:
    """What was merged: a row per input, with what the whole model did."""
    labels = dict(zip(data.models, _labels(data.models), strict=True))
    weights = dict(zip(data.models, _weights(plan, data.models), strict=True))
    start = "task vector" if data.deltas else "weights"
    header = ["", "input", "role", "tensors", "size", "weight", f"norm of the {start}",
              "rms per entry", "kept", "cosine with the update"]  # fmt: skip
    rows = []
    roles = {one.name: one for one in plan.inputs}
    for name in dict.fromkeys([*roles, *data.models]):
        one, k = roles.get(name), data.models.index(name) if name in labels else None
        numbers = ["–", "–", "–", "–"]
        if k is not None and total is not None:
            numbers = [_number(total.norms[k]), _number(total.rms[k]), _percent(total.kept[k]),
                       _number(total.alignment[k])]  # fmt: skip
        low, high = (min(w), max(w)) if (w := weights.get(name)) else (None, None)
        weight = _number(low) if low == high else f"{_number(low)} to {_number(high)}"
        known = ("–", "–", "–")
        if one is not None:
            known = (one.role, f"{one.tensors:,}", _size(one.size))
        letter = labels[name].split(" ")[0] if name in labels else ""
        row = [letter, name, *known, weight, *numbers]
        rows.append([*row[:3], *((text, None) for text in row[3:])])
    if total is not None:
        numbers = [_number(total.update), _number(total.update / math.sqrt(data.size.sum())), "–"]
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
    labels = _labels(data.models)
    what = "moved farthest from the base" if data.deltas else "has the largest weights"
    far = int(np.argmax(np.nan_to_num(total.norms)))
    text = f"{labels[far]} {what}: a norm of {_number(total.norms[far])}"
    bins = [one for one in _bins(data.names) if one.run]
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
    ends = any(not one.run for one in _bins(data.names)) and bins
    beside = " In the plots, in and out are what comes before and after the layers." * bool(ends)
    return f"{text}. {start}{beside}"


def _say_agree(data: Measured, total: Total) -> str:
    labels, m = _labels(data.models), len(data.models)
    if m < 2:
        return "There is one model: nothing to agree or conflict with."
    pairs = [p for p in combinations(range(m), 2) if math.isfinite(total.cosines[p])]
    text = f"Signs conflict at {_percent(total.conflicts)} of the entries."
    if pairs:
        i, j = max(pairs, key=lambda p: total.cosines[p])
        text = (
            f"{labels[i]} and {labels[j]} agree best, with a cosine of"
            f" {_number(total.cosines[i, j])}. {text}"
        )
    return f"{text} 0 is what unrelated directions have, 1 the same and -1 opposite ones."


def _say_merged(data: Measured, total: Total) -> str:
    labels = _labels(data.models)
    kept = sorted((x, label) for x, label in zip(total.kept, labels, strict=True) if x >= 0)
    ends = [kept[0], kept[-1]] if len(kept) > 1 else kept
    said = " to ".join(f"{_percent(x)} ({label})" for x, label in ends) or "none"
    start = "of the base" if data.deltas else "from 0"
    return (
        f"The merge changed {_percent(total.changed)} of the entries {start}, by a norm of"
        f" {_number(total.update)}. Kept, of the entries that a model moved: {said}"
        " (mean over tensors, weighted by size)."
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
        counts = [(f"{len(ts):,}", len(ts)), (_size(size), size)]
        rows.append([method, *counts, note, _some([t.name for t in ts])])
    header = ["method", "tensors", "size", "why", "which"]
    tied = [f"{name} is tied to {other} and not stored." for name, other in plan.aliases.items()]
    items = "".join(f"<li>{escape(one)}</li>" for one in [*tied, *plan.notes])
    notes = f"<ul>{items}</ul>\n" if items else ""
    return f"<h2>Copied, cropped, skipped</h2>\n{_html_table(header, rows)}{notes}"


def _tensors(plan: "Plan", records: Mapping[str, "Record"], data: Measured) -> str:
    letters = {n: label.split(" ")[0] for n, label in zip(data.models, _labels(data.models),
                                                          strict=True)}  # fmt: skip
    header = ["tensor", "shape", "dtype", "method"]
    varied = _common(plan) is None
    header += ["settings"] * varied
    header += [f"norm {x}" for x in letters.values()] + ["norm of update"]
    header += [f"cos {x}" for x in letters.values()] + ["conflicts", "changed"]
    header += [f"kept {x}" for x in letters.values()] + ["note"]
    rows = []
    for t in plan.treatments:
        row = _plain(_row(plan, t, records.get(t.name)))
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
            *each("norms", _number), (_number(row["update"]), row["update"]),
            *each("alignment", _number), *((_percent(row[x]), row[x]) for x in
                                           ("conflicts", "changed")),
            *each("kept", _percent), t.note,
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

    knobs = {"weights": t.weights, **t.knobs} if t.weights is not None else t.knobs
    return ", ".join(f"{key} {text(value)}" for key, value in knobs.items() if key != "compat")


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


# --- files


def admit(folder: str | Path) -> None:
    """Makes the folder of a report, or raises `RefusedError`: a report may replace a report,
    nothing else. To be found out before the merge starts."""
    from experiments import store

    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise disk.RefusedError(f"{folder} is not a directory; choose another --report")
    for name, mark in FILES.items():
        path = folder / name
        if path.exists() and mark.encode() not in disk.read_bytes(path, 1 << 30)[:200]:
            raise disk.RefusedError(
                f"{path} exists and is no report of a merge; choose another --report"
            )
    with disk.explained("write to", folder):
        folder.mkdir(parents=True, exist_ok=True)
    store.probe(folder)


def write(
    folder: str | Path, plan: "Plan", records: Mapping[str, "Record"], about: Mapping[str, Any]
) -> list[Path]:
    """Writes report.json and report.html, each whole or not at all; gives their paths.

    RefusedError as `admit`; StoreError if they cannot be written.
    """
    folder = Path(folder)
    admit(folder)
    html = page(plan, records, about).encode("utf-8", "replace")
    texts = dict(zip(FILES, (as_json(plan, records, about), html), strict=True))
    for name, data in texts.items():
        disk.write_atomic(folder / name, data)
    return [folder / name for name in FILES]
