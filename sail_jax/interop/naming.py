"""Names of feature spaces that people know: resid, head, qk, v, hidden, with the layer they are in.

Inference calls a space after the first tensor that writes it. That is exact, and long. A table has
short names: what a space is for is seen in how its axes are made of it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sail_jax.basis.axes import parse_axes


class Place(NamedTuple):
    """Where a space stands.

    Attributes:
      path: The path of the leaf.
      pattern: The path with {i} for the number of its layer, and {e} for that of its expert.
      layer: The path up to the last such number, "" outside of layers.
      axis: The number of the axis.
      factor: The number of the factor on the axis.
      n: The number of the factor in its block.
      count: How many factors the block has.
      role: What the axis does with the space.
      writes: Whether another axis of the leaf writes a space.
    """

    path: str
    pattern: str
    layer: str
    axis: int
    factor: int
    n: int
    count: int
    role: str
    writes: bool


def named(
    places: Mapping[str, Sequence[Place]],
    words: Mapping[str, str],
    sizes: Mapping[str, int],
    prefixes: Sequence[str],
    known: Mapping[str, str],
    ends: Iterable[str] = (),
) -> dict[str, str]:
    """Names the spaces of an architecture, alike in all of its layers.

    Args:
      places: Where each space stands, by its present name.
      words: What is applied to each.
      sizes: The size of each.
      prefixes: The prefixes of layers.
      known: Axes strings of an earlier table by pattern; its names are kept.
      ends: Names that stay as they are.

    Returns:
      The new name of each space, with {i} for the number of its layer. Spaces of two layers have
      one name then, and so have parts of one size that cannot change.
    """
    kept = _kept(places, words, known)
    towers = _towers(prefixes)
    wanted: dict[str, list[str]] = {}
    for name, where in places.items():
        if name in kept or name in ends:
            wanted[name] = [kept.get(name, name)]
            continue
        layers = {place.layer for place in where}
        inner = len(layers) == 1 and layers != {""}
        tag = _tag(where[0]) if inner else ""
        tower = _tower(where, towers)
        kind = _kind(name, where, words.get(name, ""), inner)
        choices = [f"{part}{kind}{tag}" for part in (tower, *_modules(where, tower, inner))]
        wanted[name] = [*choices, f"{_opened(name, where)}"]
    return _apart(wanted, places, words, sizes, {*ends, *kept.values()})


def _tag(place: Place) -> str:
    """The numbers of the layer and of the expert that a space is in, left open."""
    return "".join(f".{number}" for number in re.findall(r"\{[ie]\}", place.pattern))


def _kept(
    places: Mapping[str, Sequence[Place]], words: Mapping[str, str], known: Mapping[str, str]
) -> dict[str, str]:
    """The names that an earlier table has in most of the same places."""
    axes = {pattern: parse_axes(_plain(text)) for pattern, text in known.items()}
    votes: Counter[tuple[str, str, str]] = Counter()
    for name, where in places.items():
        for place in where:
            own = axes.get(place.pattern, ())
            if place.axis < len(own) and place.factor < len(own[place.axis]):
                old = own[place.axis][place.factor].space
                old = old.replace(":i:", "{i}").replace(":e:", "{e}")
                votes[name, old, place.layer if "{" in old else ""] += 1
    out: dict[str, str] = {}
    taken: set[tuple[str, str]] = set()
    for (name, old, layer), _ in votes.most_common():
        # Within a layer a name is of one space, but for parts that cannot change.
        if name not in out and ((old, layer) not in taken or words.get(name) == "outer"):
            out[name] = old
            taken.add((old, layer))
    return out


def _plain(text: str) -> str:
    """An axes string without braces, which stand for numbers."""
    return text.replace("{i}", ":i:").replace("{e}", ":e:")


def _towers(prefixes: Sequence[str]) -> dict[str, str]:
    """What distinguishes the prefixes of several stacks of layers."""
    parts = {prefix: re.split(r"[./]", prefix) for prefix in prefixes}
    if len(parts) < 2:
        return dict.fromkeys(prefixes, "")
    out = {}
    for prefix, own in parts.items():
        others = [set(p) for other, p in parts.items() if other != prefix]
        alone = [word for word in own if not any(word in other for other in others)]
        out[prefix] = f"{alone[0].removesuffix('_model')}." if alone and alone[0] else ""
    return out


def _tower(where: Sequence[Place], towers: Mapping[str, str]) -> str:
    """The stack of layers that a space is in, if it is one alone."""
    found = {
        tower
        for prefix, tower in towers.items()
        if any(place.pattern.startswith(prefix) for place in where)
    }
    return min(found) if len(found) == 1 else ""


def _kind(name: str, where: Sequence[Place], words: str, inner: bool) -> str:
    """What a space is for."""
    first = [place for place in where if place.count > 1 and place.n == 0]
    between = [place for place in where if 0 < place.n < place.count - 1]
    last = [place for place in where if place.count > 1 and place.n == place.count - 1]
    if first:
        return "head"
    if between:
        return "group"
    if last:
        return "v" if any(p.role == "read" and p.writes for p in last) else "qk"
    if inner:
        return "hidden"
    if len({place.layer for place in where}) > 1:
        return "resid"
    writer = min(where, key=lambda place: place.role != "write")
    module = re.sub(r"[./](weight|bias|kernel)$", "", writer.path)
    parts = re.split(r"[./]", module)
    return "pooled" if "pooler" in parts else "_".join(parts[-2:])


def _modules(where: Sequence[Place], tower: str, inner: bool) -> list[str]:
    """Longer and longer parts of the path of the module that a space is in."""
    place = min(where, key=lambda place: place.role != "write")
    rest = place.path[len(place.layer) :].strip("./") if inner else place.path
    parts = re.split(r"[./]", rest)[:-1]
    return [f"{tower}{'.'.join(part)}." for part in (parts[:1], parts[:-1], parts) if part]


def _opened(name: str, where: Sequence[Place]) -> str:
    """The present name, with its numbers left open."""
    place = where[0]
    inner = {p.layer for p in where} == {place.layer} and place.layer
    start = place.pattern[: len(place.pattern) - len(place.path) + len(place.layer)]
    return name.replace(place.layer, start, 1) if inner else name


def _apart(
    wanted: dict[str, list[str]],
    places: Mapping[str, Sequence[Place]],
    words: Mapping[str, str],
    sizes: Mapping[str, int],
    taken: set[str],
) -> dict[str, str]:
    """The first name of each list that no other space of the same layer wants."""
    level = dict.fromkeys(wanted, 0)

    def now(name: str) -> str:
        return wanted[name][min(level[name], len(wanted[name]) - 1)]

    def alike(a: str, b: str) -> bool:
        """Whether two spaces may have one name: those of two layers, and parts that are fixed."""
        layers = [{p.layer for p in places[name]} for name in (a, b)]
        if all(len(own) == 1 and own != {""} for own in layers) and layers[0] != layers[1]:
            return True
        return words.get(a) == words.get(b) == "outer" and sizes.get(a) == sizes.get(b)

    while True:
        groups: dict[str, list[str]] = {}
        for name in wanted:
            groups.setdefault(now(name), []).append(name)
        moved = False
        for group in groups.values():
            clash = {
                name
                for k, name in enumerate(group)
                for other in group[:k] + group[k + 1 :]
                if not alike(name, other)
            }
            for name in clash:
                if level[name] < len(wanted[name]) - 1:
                    level[name] += 1
                    moved = True
        if not moved:
            return {name: now(name) for name in wanted}
