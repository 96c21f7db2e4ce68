"""Unites the tables of all classes of an architecture: one body, with one of several heads."""

import re
from collections.abc import Iterable, Mapping, Sequence

from sail_jax.architectures.files import Table
from sail_jax.interop.settings import ENDS, both

# These axes are states that a network returns, and their size may change.
_STATES = {"pooled"}


def united(table: Table, heads: Mapping[str, Table], bare: Sequence[Table]) -> Table:
    """Unites the tables of the classes of one architecture: one body, with one of several heads.

    `heads` are the tables of classes with other heads, by class, with the names of spaces in
    `table`. `bare` are the tables of classes without a head, which return the body's states.
    Returns the table of all of them. Tensors that only some classes have are optional.
    """
    heads = {name: _ended_as(table, other) for name, other in heads.items()}
    bare = [_ended_as(table, other) for other in bare]
    known = (table, *heads.values(), *bare)
    axes: dict[str, str] = {}
    uses: dict[str, set[str]] = {}
    for other in known:
        axes |= {p: text for p, text in other.axes.items() if p not in axes}
        for p, text in other.axes.items():
            uses.setdefault(p, set()).update(text.split())
    missing = {p for p in axes for other in known if p not in other.axes}
    # Without a head a space is the output, which keeps its order, unless a head reads it, or reads
    # a space that the body makes from it.
    ends: dict[str, tuple[str, ...]] = {}
    for other in bare:
        # It returns states under the name of an entry, and no class reads them.
        ends |= {name: () for name in _STATES if other.spaces.get(name) == "outer"}
        inner = _spaces(axes[p] for p in other.axes) - _spaces(other.axes.values())
        inner = {n for n in inner if any(t.spaces.get(n, "outer") != "outer" for t in known)}
        for name in sorted(inner):
            read = {name}
            for used in (uses[p] for p in other.axes):
                read |= (used & inner) if f"{name}*" in used else set()
            stars = {f"{x}*" for x in read}
            ends[name] = tuple(p for p in axes if p not in other.axes and uses[p] & stars)
    spaces: dict[str, str] = {}
    sizes = dict(table.sizes)
    words: dict[str, dict[str, str]] = {}
    for name, other in ({"": table} | dict(heads)).items():
        for space, word in other.spaces.items():
            # The symmetries of an activation are already contained.
            if any(word == own.get(space) for v in table.words.values() for own in v.values()):
                continue
            if not {*word.split()} <= {*spaces.setdefault(space, word).split()}:
                words.setdefault(name, {})[space] = both(spaces[space], word)
    own = _spaces(table.axes.values())
    for other in known:
        spaces = {**other.spaces, **spaces}
        # For other classes few entries were varied, so sizes by a number are omitted.
        sizes = {**{name: n for name, n in other.sizes.items() if name not in own}, **sizes}
    settings = dict.fromkeys(one for other in known for one in other.settings)
    folds = {
        gain: tuple(dict.fromkeys(p for other in known for p in other.folds.get(gain, ())))
        for gain in table.folds
        if all(gain in other.folds for other in heads.values() if gain in other.axes)
    }
    # A tied head may be the only difference between the main class and its body.
    implied = all(
        p in (*table.head, *table.optional, *other.axes) for other in bare for p in table.axes
    ) and bool(table.tied)
    optional = missing.union(*(other.optional for other in known))
    # Some classes use a tensor with the same name in different ways.
    classes = {
        name: own
        for name, other in heads.items()
        if (own := {p: text for p, text in other.axes.items() if text != axes[p]})
    }
    return table._replace(
        words={**table.words, **({"class": words} if words else {})},
        classes=classes, implied=implied, folds=folds, axes=axes, spaces=spaces, sizes=sizes,
        settings=tuple(settings), ends=ends, optional=tuple(sorted(optional)),
    )  # fmt: skip


def _ended_as(table: Table, other: Table) -> Table:
    """Returns another table with the first table's names of inputs and outputs."""

    def alike(pattern: str, text: str) -> str:
        named = table.axes.get(pattern, text)
        ends = re.sub(rf"\b({'|'.join({*ENDS.values()})})\b\*?", "_", named)
        return named if text == ends else text

    return other._replace(axes={p: alike(p, text) for p, text in other.axes.items()})


def _spaces(texts: Iterable[str]) -> set[str]:
    words = {word for text in texts for word in re.findall(r"[\w./:{}-]+", text)}
    return words - {"_", "diag"}
