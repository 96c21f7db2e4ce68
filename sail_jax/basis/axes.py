"""The two small languages of a spec: axes strings and path patterns.

An *axes string* names the space of each array axis, in order, separated by spaces:

    "resid* hidden"      a matrix that reads `resid` (a star: the axis is contracted against the
                         activation) and writes `hidden`
    "hidden"             a bias: it writes `hidden`
    "diag(resid)"        a gain (the scale of a norm, LayerScale, a depthwise kernel): it
                         multiplies the space unit by unit, the diagonal of "resid resid*"
    "resid* (head v)"    one array axis that is the row-major product of two spaces; each factor
                         may have its star, or the group has one: "(head v)* resid"
    "resid* (head qk + head qk* + head v)"
                         fused matrices: one array axis that is several, laid end to end
    "_ hidden"           an axis in no space
    "vocab* resid | vocab resid*"
                         a tied leaf, used in both ways
    ""                   a scalar

A gain is not a writer. `g * x` keeps its meaning under a map of x if g is gathered along, with
neither sign nor scale, and mixing units under a gain is not expressible at all unless the gain is
constant. So a rotation of an "rmsnorm" space is exact only for a spec without a `diag` leaf on it:
fold the scale into the leaves that read the norm, and leave it out (or at one, as "_"). A norm's
bias writes its space like any other bias.

A *path pattern* must match the whole "/"-joined path of a leaf: `*` is one or more characters other
than "/" and ".", `**` anything, `{q,k,v}` alternatives, and `{i}` captures like `*`, for use in an
axes string.
"""

import re
from collections.abc import Iterable
from itertools import groupby
from typing import Literal, NamedTuple

__all__ = ["Axis", "Factor", "Role", "blocks", "format_axes", "parse_axes", "path_pattern"]

Role = Literal["write", "read", "gain"]


class Factor(NamedTuple):
    """A space and what an axis does with it; `tied` if the leaf also does the opposite.

    `block` counts the blocks of a fused axis: factors of one block multiply, blocks add up.
    """

    space: str
    role: Role
    tied: bool = False
    block: int = 0


Axis = tuple[Factor, ...]
"""The spaces of one array axis, block by block, row-major; none for an axis in no space."""


def blocks(axis: Axis) -> tuple[Axis, ...]:
    """The axis of each block: of one that is not fused, itself.

    >>> [[f.space for f in block] for block in blocks(parse_axes("(head qk + v)")[0])]
    [['head', 'qk'], ['v']]
    """
    return tuple(tuple(group) for _, group in groupby(axis, key=lambda f: f.block)) or ((),)


_TOKEN = re.compile(
    r"\s*(?:(?P<diag>diag)?\((?P<group>[^()]*)\)(?P<stars>\*?)|(?P<name>[\w./:-]+\*?))(?=\s|$)"
)
_NAME = re.compile(r"[\w./:-]+")
# wildcards within a part and in all: matching takes time to the power of their number
_WIDE, _DEEP = 3, 2


def parse_axes(text: str) -> tuple[Axis, ...]:
    """An axes string as factors per axis; ValueError, quoting the part at fault.

    >>> parse_axes("resid* (head v) _")[0]
    (Factor(space='resid', role='read', tied=False, block=0),)
    """
    first, *others = [_parse_use(use, text) for use in text.split("|")]
    for other in others:
        names = [[[(f.space, f.block) for f in axis] for axis in use] for use in (first, other)]
        if names[0] != names[1]:
            raise ValueError(f"the uses of a tied leaf must name the same spaces: {text!r}")
        merged = [
            tuple(f._replace(tied=f.tied or f.role != g.role) for f, g in zip(a, b, strict=True))
            for a, b in zip(first, other, strict=True)
        ]
        first = tuple(merged)
    return first


def _parse_use(text: str, rule: str) -> tuple[Axis, ...]:
    axes, position, text = [], 0, text.rstrip()
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise ValueError(f"cannot read {text[position:].strip()!r} in the axes {rule!r}")
        position = token.end()
        if token["name"] is not None:
            axes.append(() if token["name"] == "_" else (_factor(token["name"], rule),))
            continue
        parts = [part.split() for part in token["group"].split("+")]
        if not all(parts):
            raise ValueError(f"empty group in the axes {rule!r}")
        factors = tuple(_factor(name, rule, k) for k, part in enumerate(parts) for name in part)
        if token["diag"] or token["stars"]:
            if any(f.role != "write" for f in factors) or (token["diag"] and token["stars"]):
                raise ValueError(f"two roles for one factor in the axes {rule!r}")
            factors = tuple(f._replace(role="gain" if token["diag"] else "read") for f in factors)
        axes.append(factors)
    return tuple(axes)


def _factor(name: str, rule: str, block: int = 0) -> Factor:
    space, star = (name[:-1], True) if name.endswith("*") else (name, False)
    if space == "_" or not _NAME.fullmatch(space):
        raise ValueError(f"{name!r} is not the name of a space, in the axes {rule!r}")
    return Factor(space, "read" if star else "write", block=block)


def format_axes(axes: Iterable[Axis]) -> str:
    """The axes string, up to ties: the inverse of `parse_axes`."""
    words = []
    for axis in axes:
        parts = ([f.space + "*" * (f.role == "read") for f in part] for part in blocks(axis))
        names = " + ".join(map(" ".join, parts))
        gain = any(f.role == "gain" for f in axis)
        words.append(f"diag({names})" if gain else f"({names})" if len(axis) > 1 else names or "_")
    return " ".join(words)


def path_pattern(text: str, *, stars: bool = True) -> re.Pattern[str]:
    """A path pattern compiled, for `fullmatch`; ValueError, quoting it, if it is malformed.

    Without `stars`, for names of spaces, where a star would be taken for the dual role.

    >>> path_pattern("blocks/{i}/*").fullmatch("blocks/3/in").groupdict()
    {'i': '3'}
    """
    out, seen, wide, deep = "", set(), 0, 0
    for part in re.findall(r"\{[^{}]*\}|\*\*|.", text, re.DOTALL):
        inner = part[1:-1]
        if part in "/.":
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
                    f"{text!r}: a star marks the dual role of an axis; for a family of spaces "
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
            out += f"(?P={inner})"
        else:
            seen.add(inner)
            out += f"(?P<{inner}>[^/.]+)"
    return re.compile(out, re.DOTALL)
