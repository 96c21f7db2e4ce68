"""The two small languages of a spec: axes strings and path patterns.

A `Spec` (`sail_jax.basis.spaces`) consists of rules. Each rule pairs a path pattern, which selects
leaves, with an axes string, which assigns feature spaces to their axes.

An *axes string* gives the space of each array axis, in order, separated by spaces:

    "resid* hidden"      a matrix that reads `resid` (a star: the axis is contracted against the
                         activation) and writes `hidden`
    "hidden"             a bias: it writes `hidden`
    "diag(resid)"        a gain (the scale of a norm, LayerScale, a depthwise kernel): it
                         multiplies the space unit by unit, the diagonal of "resid resid*"
    "resid* (head v)"    one array axis that is the row-major product of two spaces; each factor may
    have a star, or the group has one: "(head v)* resid" "resid* (head qk + head qk* + head v)"
                         fused matrices: one array axis that contains several, end to end
    "resid* (diag(hidden) + hidden)"
                         a gate, fused with the matrix that it multiplies
    "resid* (head (qk + qk* + v))"
                         blocks within a product: each head's queries, keys and values; groups may
                         be nested to any depth
    "_ hidden"           an axis without a space
    "vocab* resid | vocab resid*"
                         a tied leaf, used in both ways
    ""                   a scalar

A group of blocks in front of a factor is multiplied out, since both forms mean the same entries in
the same order: "((head + kv) v)" is read as "(head v + kv v)". Blocks within a product therefore
always come last.

A gain is not a writer. Under a map of x, `g * x` keeps its meaning only if g is gathered, without
sign or scale. A gain cannot represent a map that mixes units, unless the gain is constant. A
rotation of an "rmsnorm" space is therefore exact only for a spec without a `diag` leaf on it.
Multiply the scale into the leaves that read the norm first. Then leave it out of the tree, or keep
it at one and write "_". A norm's bias writes its space like any other bias.

A *path pattern* must match the whole "/"-joined path of a leaf. `*` stands for one or more
characters other than "/" and ".", `**` for anything, and `{q,k,v}` for alternatives. `{i}` matches
like `*`, and captures the text for use in the axes string.
"""

import math
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

Role = Literal["write", "read", "gain"]
"""The role of an axis for a space: it writes it, reads it (a star), or multiplies it unit by unit
(`diag`).
"""


class Factor(NamedTuple):
    """A space and the role of one axis of a leaf for it.

    Attributes:
      space: The name of the space.
      role: Whether the axis writes, reads or multiplies the space; for a tied leaf, its first use.
      tied: Whether the leaf is used a second time, with another role for this space.
      block: The number of the factor's block in each group of blocks around it, the outermost
        first; () outside blocks.
    """

    space: str
    role: Role
    tied: bool = False
    block: tuple[int, ...] = ()


Axis = tuple[Factor, ...]
"""The factors of one array axis, row-major; empty for an axis without a space.

An axis is a small tree: a product with several axes laid end to end as its last factor, if it has
blocks. Its factors are listed from left to right, and `Factor.block` holds the position of each in
the tree.
"""


def parts(axis: Axis) -> tuple[Axis, tuple[Axis, ...]]:
    """Splits an axis into the factors in front of its blocks, and the blocks.

    Args:
      axis: The factors of one array axis.

    Returns:
      The factors that multiply all blocks, and each block as a separate axis; no blocks for an axis
      that is not fused.

    >>> lead, inner = parts(parse_axes("(head (qk + v))")[0])
    >>> format_axes([lead]), [format_axes([block]) for block in inner]
    ('head', ['qk', 'v'])
    """
    lead = tuple(f for f in axis if not f.block)
    inner = groupby(axis[len(lead) :], key=lambda f: f.block[0])
    return lead, tuple(tuple(f._replace(block=f.block[1:]) for f in block) for _, block in inner)


def blocks(axis: Axis) -> tuple[Axis, ...]:
    """Lists the blocks of a fused axis, multiplied out.

    Args:
      axis: The factors of one array axis.

    Returns:
      One `Axis` per block, in order, none of them fused. Blocks within a product get the factors in
      front of them. An axis that is not fused is its own only block, even without a space.

    >>> [[f.space for f in block] for block in blocks(parse_axes("(head qk + v)")[0])]
    [['head', 'qk'], ['v']]
    >>> [[f.space for f in block] for block in blocks(parse_axes("(head (qk + v))")[0])]
    [['head', 'qk'], ['head', 'v']]
    """
    lead, inner = parts(axis)
    return tuple(lead + block for part in inner for block in blocks(part)) or (lead,)


def end_to_end(axes: Sequence[Axis]) -> Axis:
    """Lays axes end to end.

    Args:
      axes: The axes, none of them empty.

    Returns:
      The fused axis. An already fused axis contributes its blocks.

    >>> format_axes([end_to_end(parse_axes("a (b + c d)"))])
    '(a + b + c d)'
    """
    inner: list[Axis] = []
    for axis in axes:
        lead, own = parts(axis)
        inner.extend(own if own and not lead else (axis,))
    return inner[0] if len(inner) == 1 else _joined(inner)


def times(axes: Sequence[Axis]) -> Axis:
    """Multiplies axes, row-major.

    Args:
      axes: The axes, none of them empty, the slowest first.

    Returns:
      The product. The blocks of an axis are multiplied out with the axes after it.

    >>> format_axes([times(parse_axes("a (b + c) d"))])
    '(a (b d + c d))'
    """
    first, *rest = axes
    lead, inner = parts(first)
    if not rest:
        return first
    if not inner:
        return lead + times(rest)
    return lead + end_to_end([times([block, *rest]) for block in inner])


def _joined(inner: Sequence[Axis]) -> Axis:
    """Makes one axis of these blocks."""
    return tuple(f._replace(block=(k, *f.block)) for k, block in enumerate(inner) for f in block)


# A parenthesis (possibly with diag or a star), a plus, or a name. The lookahead rejects text that
# directly follows one.
_TOKEN = re.compile(r"\s*((?:diag)?\(|\+|(?:\)|[\w./:-]+)\*?(?=[\s()+]|$))")
# The largest number of wildcards between two separators, and of all wildcards that cross
# separators. Matching tries every distribution of the text over the wildcards. If none matches, the
# time is the length of the path to the power of the number of wildcards, and patterns may come from
# untrusted files.
_WIDE, _DEEP = 3, 2
# The largest number of groups around a name, and of factors of one axis. Products of groups are
# multiplied out, so a short text could otherwise produce any number of factors.
_NESTED, _FACTORS = 8, 1000


def parse_axes(text: str) -> tuple[Axis, ...]:
    """Parses an axes string.

    Args:
      text: An axes string, such as "resid* (head v) _"; the module's docstring defines them.

    Returns:
      The factors of each array axis, in order: one `Axis` per axis. For a tied leaf, the factors of
      its first use, with `tied` set if a later use has another role.

    Raises:
      ValueError: If the text cannot be parsed, a group is empty, groups are nested too deep or give
        too many factors, a factor has two roles, or the uses of a tied leaf have different spaces.
        The message quotes the invalid part.

    >>> parse_axes("resid* (head v) _")[0]
    (Factor(space='resid', role='read', tied=False, block=()),)
    """
    first, *others = [_parse_use(use, text) for use in text.split("|")]
    for other in others:
        names = [[[(f.space, f.block) for f in axis] for axis in use] for use in (first, other)]
        if names[0] != names[1]:
            raise ValueError(f"the uses of a tied leaf must have the same spaces: {text!r}")
        merged = [
            tuple(f._replace(tied=f.tied or f.role != g.role) for f, g in zip(a, b, strict=True))
            for a, b in zip(first, other, strict=True)
        ]
        first = tuple(merged)
    return first


def _parse_use(text: str, rule: str) -> tuple[Axis, ...]:
    """Parses the axes of one use of a leaf; `rule` is the whole axes string, for messages."""
    axes, position, text = [], 0, text.rstrip()
    while position < len(text):
        axis, end = _parse_word(text, position, rule)
        if axis is None or (end < len(text) and not text[end].isspace()):
            # A word is read as a whole, because text that directly follows it is also an error.
            raise ValueError(f"cannot read {text[position:].strip()!r} in the axes {rule!r}")
        axes.append(axis)
        position = end
    return tuple(axes)


def _parse_word(text: str, at: int, rule: str, depth: int = 0) -> tuple[Axis | None, int]:
    """Parses a name or a group at a position; returns it and its end, or None if there is none."""
    token = _TOKEN.match(text, at)
    word = token[1] if token else ""
    if token is None or word in ("+", ")", ")*"):
        return None, at
    at = token.end()
    if not word.endswith("("):
        if word == "_" and not depth:
            return (), at
        return (_factor(word, rule),), at
    if depth == _NESTED:
        raise ValueError(f"more than {_NESTED} nested groups in the axes {rule!r}")
    rows: list[list[Axis]] = [[]]
    while (close := _TOKEN.match(text, at)) is not None and close[1] not in (")", ")*"):
        if close[1] == "+":
            rows.append([])
            at = close.end()
            continue
        axis, end = _parse_word(text, at, rule, depth + 1)
        if axis is None:
            return None, at
        rows[-1].append(axis)
        at = end
    if close is None:
        return None, at
    if not all(rows):
        raise ValueError(f"empty group in the axes {rule!r}")
    if sum(math.prod(map(len, row)) * len(row) for row in rows) > _FACTORS:
        raise ValueError(f"more than {_FACTORS} factors, multiplied out, in the axes {rule!r}")
    axis = end_to_end([times(row) for row in rows])
    diag, star = word == "diag(", close[1] == ")*"
    if diag or star:
        if any(f.role != "write" for f in axis) or (diag and star):
            raise ValueError(f"two roles for one factor in the axes {rule!r}")
        axis = tuple(f._replace(role="gain" if diag else "read") for f in axis)
    return axis, close.end()


def _factor(name: str, rule: str) -> Factor:
    """Makes the factor of a name, with or without a star."""
    space, star = (name[:-1], True) if name.endswith("*") else (name, False)
    if space == "_":
        raise ValueError(f"{name!r} is not the name of a space, in the axes {rule!r}")
    return Factor(space, "read" if star else "write")


def format_axes(axes: Iterable[Axis]) -> str:
    """Writes axes as an axes string, the inverse of `parse_axes`.

    Args:
      axes: The factors of each array axis.

    Returns:
      The axes string. The second use of a tied leaf reads the spaces that the first one writes, and
      writes the spaces that the first one reads.

    >>> format_axes(parse_axes("resid*   (head v)* _"))
    'resid* (head* v*) _'
    >>> format_axes(parse_axes("resid* (head (qk + qk* + v))"))
    'resid* (head (qk + qk* + v))'
    >>> format_axes(parse_axes("resid* (diag(hidden) + hidden)"))
    'resid* (diag(hidden) + hidden)'
    >>> format_axes(parse_axes("vocab* resid | vocab resid*"))
    'vocab* resid | vocab resid*'
    """
    axes = list(axes)
    if any(f.tied for axis in axes for f in axis):
        swap: dict[Role, Role] = {"write": "read", "read": "write", "gain": "write"}
        uses = ([f._replace(tied=False) for f in axis] for axis in axes)
        other = (
            [f._replace(tied=False, role=swap[f.role] if f.tied else f.role) for f in axis]
            for axis in axes
        )
        return " | ".join(format_axes(map(tuple, use)) for use in (uses, other))
    words = []
    for axis in axes:
        gains = [f.role == "gain" for f in axis]
        mixed = any(gains) and not all(gains)
        names = _format_axis(axis, mixed)
        group = "diag" * (any(gains) and not mixed)
        words.append(f"{group}({names})" if group or len(axis) > 1 else names or "_")
    return " ".join(words)


def _format_axis(axis: Axis, mixed: bool) -> str:
    """Writes an axis without the parentheses around it."""
    lead, inner = parts(axis)
    names = [_word(f, mixed) for f in lead]
    group = " + ".join(_format_axis(block, mixed) for block in inner)
    return " ".join([*names, f"({group})" if names else group] if inner else names)


def _word(factor: Factor, mixed: bool) -> str:
    """Writes a factor; `mixed` if only some factors of its axis are gains."""
    if factor.role == "gain":
        return f"diag({factor.space})" if mixed else factor.space
    return factor.space + "*" * (factor.role == "read")


def path_pattern(text: str, *, stars: bool = True) -> re.Pattern[str]:
    """Compiles a path pattern into a regular expression.

    Args:
      text: A path pattern; the module's docstring defines the language. A repeated capture must
        match the same text each time.
      stars: Whether `*` and `**` are allowed. They are not allowed in patterns of space names,
        where a star would mean the dual role.

    Returns:
      The compiled pattern, for `fullmatch`; its named groups are the captures.

    Raises:
      ValueError: If the pattern has too many wildcards, unbalanced or empty braces, a capture with
        an invalid name, or a star without `stars`. The message quotes the pattern.

    >>> path_pattern("blocks/{i}/*").fullmatch("blocks/3/in").groupdict()
    {'i': '3'}
    """
    # `wide` counts wildcards since the last separator, `deep` those that may cross separators.
    out, seen, wide, deep = "", set(), 0, 0
    for part in re.findall(r"\{[^{}]*\}|\*\*|.", text, re.DOTALL):
        inner = part[1:-1]
        if part in "/.":
            # `*` and captures stop here, so their counts do not multiply across it.
            wide = 0
        elif part == "**" or ("," in inner and re.search("[/.]", inner)):
            deep += 1
        elif part[0] in "*{":
            wide += 1
        if wide > _WIDE or deep > _DEEP:
            raise ValueError(
                f"the pattern {text!r} is too loose: at most {_WIDE} of *, {{name}} and {{a,b}} "
                f"between two dots or slashes, and {_DEEP} of ** and {{a.b,c}} in all"
            )
        if part in ("{", "}") or (len(part) > 1 and part != "**" and not inner):
            raise ValueError(f"unbalanced or empty braces in the pattern {text!r}")
        if part[0] == "*":
            if not stars:
                raise ValueError(
                    f"{text!r}: a star marks the dual role of an axis; for several spaces "
                    f"write {text.replace('*', '{i}')!r}"
                )
            out += ".*" if part == "**" else "[^/.]+"
        elif part[0] != "{":
            out += re.escape(part)
        elif "," in inner:
            out += f"(?:{'|'.join(map(re.escape, inner.split(',')))})"
        elif not inner.isidentifier():
            raise ValueError(f"{part} in the pattern {text!r} is not the name of a capture")
        elif inner in seen:
            # A repeated capture must match the same text again.
            out += f"(?P={inner})"
        else:
            seen.add(inner)
            out += f"(?P<{inner}>[^/.]+)"
    return re.compile(out, re.DOTALL)


_WILD = re.compile(r"[*{}]")
_Node = tuple[dict[str | None, Any], list[tuple[int, re.Pattern[str]]]]


class Patterns:
    """Many path patterns at once, with a fast search for those that match a path.

    Checkpoints may have 10^5 tensors, and as many rules.
    """

    def __init__(self, texts: Iterable[str], *, stars: bool = True) -> None:
        """Compiles the patterns.

        Args:
          texts: The patterns; see `path_pattern`.
          stars: See `path_pattern`.

        Raises:
          ValueError: As `path_pattern` does.
        """
        self._exact: dict[str, list[int]] = {}
        # Patterns by their parts between dots and slashes; None stands for a part with wildcards.
        self._tree: _Node = ({}, [])
        # The patterns with wildcards that may cross dots and slashes.
        self._deep: list[tuple[int, re.Pattern[str]]] = []
        for number, text in enumerate(texts):
            if not _WILD.search(text):
                self._exact.setdefault(text, []).append(number)
                continue
            entry, node = (number, path_pattern(text, stars=stars)), self._tree
            if "**" in text or re.search(r"\{[^{}]*[/.][^{}]*\}", text):
                self._deep.append(entry)
                continue
            for part in re.split(r"[/.]", text):
                node = node[0].setdefault(None if _WILD.search(part) else part, ({}, []))
            node[1].append(entry)

    def matches(self, path: str) -> list[tuple[int, dict[str, str]]]:
        """Finds the patterns that match a path.

        Args:
          path: The path.

        Returns:
          The number of each, in order, with its captures.

        >>> Patterns(["a/{i}", "a/0", "**/0"]).matches("a/0")
        [(0, {'i': '0'}), (1, {}), (2, {})]
        """
        nodes = [self._tree]
        for part in re.split(r"[/.]", path):
            nodes = [
                child for below, _ in nodes for key in (part, None) if (child := below.get(key))
            ]
        tried = [*(entry for _, ends in nodes for entry in ends), *self._deep]
        found = [(k, m.groupdict()) for k, pattern in tried if (m := pattern.fullmatch(path))]
        found += [(k, {}) for k in self._exact.get(path, ())]
        return sorted(found, key=lambda match: match[0])
