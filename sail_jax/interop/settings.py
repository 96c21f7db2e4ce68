"""Which entries of a configuration state which spaces, found by building a network of other sizes.

What makes it hard: a table of known architectures states that `hidden_size` is the stream, and
that the size of a head is `hidden_size` over `num_attention_heads`. For other architectures nobody
has written that down, but their class knows it: with another entry it makes other tensors. So the
class is built with one entry changed at a time. Every space then has as many sizes as there are
networks, and an entry, a quotient or a product of entries that has the same values states it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import combinations, permutations
from typing import Any, TypeGuard

from sail_jax.architectures import Rules
from sail_jax.basis.axes import Axis, Factor, blocks, format_axes
from sail_jax.basis.spaces import Leaf, Spec
from sail_jax.configurations import LAYER_KEYS

__all__ = ["rules_by_probing"]

Config = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
Probe = Callable[[Config], tuple[Spec, Shapes]]

TIE, VOCAB = "tie_word_embeddings", "vocab_size"

# Entries that count something else than units, tokens among them, though they are whole numbers.
_OTHERS = re.compile(
    r"(_token_id|_idx)$|^(vocab_size|max_position_embeddings|image_size|patch_size)$"
)


def rules_by_probing(config: Config, probe: Probe) -> Callable[[Config], Rules]:
    """Finds rules of an architecture that no table describes, for every configuration of it.

    Args:
      config: A configuration of the architecture.
      probe: Infers the spec of a configuration, and the shapes of its tensors; raises ValueError
        where there is no such network.

    Returns:
      A function from a configuration to its rules, for `sail_jax.growth`.

    Raises:
      ValueError: If the network of the configuration itself, with two layers, cannot be built.
    """
    counts = [key for key in LAYER_KEYS if _is_count(config.get(key))]
    # Lists with an entry for each layer are left to the defaults, which fit any number of layers.
    depths = {config[key] for key in counts}
    small: dict[str, Any] = {
        k: v for k, v in config.items() if not (isinstance(v, list) and len(v) in depths)
    }
    small |= dict.fromkeys(counts, 2)
    base, shapes = probe(small)
    layers = {key: prefix for key in counts if (prefix := _prefix(small, key, base, probe))}
    heads = _head(small, base, probe)
    table = _Table(base, shapes, layers, heads, small.get(VOCAB))
    entries = {
        k: int(v)
        for k, v in small.items()
        if _is_count(v) and k not in counts and not _OTHERS.search(k)
    }
    configs, specs = [small], [base]
    for key, value in entries.items():
        alone = [{key: n} for n in (2 * value, value + 1, 3 * value)]
        # Some entries have to divide others: two are doubled then, or all.
        pairs = [{key: 2 * value, other: 2 * n} for other, n in entries.items() if other != key]
        for change in (*alone, *pairs, {k: 2 * n for k, n in entries.items()}):
            try:
                other, _ = probe(small | change)
            except ValueError:
                continue
            if [leaf.axes for leaf in other.leaves] == [leaf.axes for leaf in base.leaves]:
                configs.append(small | change)
                specs.append(other)
                break
    sizes = {
        name: tuple(spec.space(one).size for spec in specs) for name, one in table.members.items()
    }
    values = {key: tuple(int(c[key]) for c in configs) for key in entries}
    moving = {key: v for key, v in values.items() if len(set(v)) > 1}
    derived = {
        name: _stated(own, moving)
        or _proportional(own, moving)
        # The shapes show the size of a space with an axis to itself; that of a part they may not.
        or (None if name in table.alone else _constant(own))
        for name, own in sizes.items()
    }
    settings = tuple(
        (key, " ".join(names))
        for key, own in moving.items()
        for names in _products(own, sizes, table.together)
    )

    def rules(config: Config) -> Rules:
        found = {name: of(config) for name, of in derived.items() if of is not None}
        known = {name: n for name, n in found.items() if n is not None}
        optional = frozenset(heads)
        made = Rules(table.axes, table.spaces, known, optional, settings=settings, layers=layers)
        return made if config.get(TIE) is True else made.loose()

    return rules


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _head(small: Config, base: Spec, probe: Probe) -> dict[str, tuple[Axis, ...]]:
    """The tensors that a network has when its table is not tied, which it is here."""
    if small.get(TIE) is not True:
        return {}
    try:
        loose, _ = probe(dict(small) | {TIE: False})
    except ValueError:
        return {}
    own = {leaf.path for leaf in base.leaves}
    return {leaf.path: leaf.axes for leaf in loose.leaves if leaf.path not in own}


def _prefix(small: Config, key: str, base: Spec, probe: Probe) -> str:
    """The prefix of the tensors of a layer, with a place for its number; "" if there is none."""
    try:
        more, _ = probe(dict(small) | {key: 3})
    except ValueError:
        return ""
    own = {leaf.path for leaf in base.leaves}
    new = [leaf.path for leaf in more.leaves if leaf.path not in own]
    starts = {match[1] for path in new if (match := re.match(r"(.*?[./])2(?=[./])", path))}
    if len(starts) != 1 or not all(path.startswith(f"{min(starts)}2") for path in new):
        return ""
    return f"{min(starts)}{{i}}."


class _Table:
    """The axes and spaces of a spec, with the numbers of layers left open."""

    def __init__(
        self,
        spec: Spec,
        shapes: Shapes,
        layers: Mapping[str, str],
        heads: Mapping[str, tuple[Axis, ...]],
        vocabulary: Any,
    ) -> None:
        self.starts = [prefix.partition("{i}")[0] for prefix in layers.values()]
        # Spaces by their name with an open number, and one of each.
        self.members: dict[str, str] = {}
        self.spaces: dict[str, str] = {}
        self.together: set[tuple[str, ...]] = set()
        self.alone: set[str] = set()
        axes: dict[str, str] = {}
        for leaf in (*spec.leaves, *(Leaf(path, axes) for path, axes in heads.items())):
            pattern, number = self._open(leaf.path, None)
            names = {f.space: self._open(f.space, number)[0] for axis in leaf.axes for f in axis}
            for one, name in names.items():
                self.members.setdefault(name, one)
                self.spaces[name] = spec.space(one).nonlinearity
            tied = any(f.tied for axis in leaf.axes for f in axis)
            opened = tuple(
                tuple(f._replace(space=names[f.space]) for f in axis) for axis in leaf.axes
            )
            if tied or leaf.path in heads:
                # The table and the head that it may become have one vocabulary.
                opened = _with_vocabulary(opened, shapes.get(leaf.path), vocabulary)
                self.spaces["vocabulary"] = "outer"
            self.alone |= {axis[0].space for axis in opened if len(axis) == 1}
            self.together |= {tuple(f.space for f in blocks(axis)[0]) for axis in opened}
            text = format_axes(opened)
            if axes.setdefault(pattern, text) != text:
                raise ValueError(
                    f"the layers of {pattern!r} differ: {axes[pattern]!r} and {text!r}"
                )
        self.axes = tuple(axes.items())

    def _open(self, path: str, number: str | None) -> tuple[str, str | None]:
        """A path or a name with {i} for the number of its layer, if that is the one expected."""
        for start in self.starts:
            match = re.match(rf"{re.escape(start)}(\d+)(?=[./])", path)
            if match and number in (None, match[1]):
                return f"{start}{{i}}{path[match.end() :]}", match[1]
        return path, None


def _with_vocabulary(
    axes: tuple[Axis, ...], shape: tuple[int, ...] | None, vocabulary: Any
) -> tuple[Axis, ...]:
    """Axes of a table, of which the one without a space is the vocabulary."""
    free = [k for k, axis in enumerate(axes) if not axis]
    if len(free) != 1 or (shape is not None and shape[free[0]] != vocabulary):
        return axes
    tied = any(f.tied for axis in axes for f in axis)
    role = "read" if tied and axes[1 - free[0]][0].role == "read" else "write"
    new = (Factor("vocabulary", role),)
    return tuple(new if k == free[0] else axis for k, axis in enumerate(axes))


def _stated(
    sizes: Sequence[int], values: Mapping[str, Sequence[int]]
) -> Callable[[Config], int | None] | None:
    """What computes the size of a space from a configuration; None if nothing does."""
    if len(set(sizes)) == 1:
        return None
    for key, own in values.items():
        if tuple(own) == tuple(sizes):
            return lambda config: config.get(key)
    for above, below in combinations(values, 2):
        for a, b in ((above, below), (below, above)):
            if all(x == s * y for x, y, s in zip(values[a], values[b], sizes, strict=True)):
                return lambda config: _quotient(config.get(a), config.get(b))
    return None


def _proportional(
    sizes: Sequence[int], values: Mapping[str, Sequence[int]]
) -> Callable[[Config], int | None] | None:
    """As `_stated`, for a size in proportion to an entry or a quotient: a quarter of a head's."""
    if len(set(sizes)) == 1:
        return None
    own = {**values, "": [1] * len(sizes)}
    for a, b in permutations(own, 2):
        ratios = {Fraction(s * y, x) for x, y, s in zip(own[a], own[b], sizes, strict=True)}
        if len(ratios) == 1:
            (ratio,) = ratios

            def size(config: Config, a: str = a, b: str = b, ratio: Fraction = ratio) -> int | None:
                above, below = (config.get(key) if key else 1 for key in (a, b))
                if not (_is_count(above) and _is_count(below)):
                    return None
                found = ratio * above / below
                return int(found) if found.denominator == 1 else None

            return size
    return None


def _constant(sizes: Sequence[int]) -> Callable[[Config], int | None] | None:
    """As `_stated`, for a size that no entry changes."""
    return (lambda config: sizes[0]) if len(set(sizes)) == 1 else None


def _quotient(a: Any, b: Any) -> int | None:
    return a // b if _is_count(a) and _is_count(b) and a % b == 0 else None


def _products(
    values: Sequence[int], sizes: Mapping[str, Sequence[int]], together: set[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Spaces, alone or of one axis, the product of whose sizes has these values."""
    found: list[tuple[str, ...]] = [
        (name,) for name, own in sizes.items() if tuple(own) == tuple(values)
    ]
    for axis in sorted(together):
        for count in range(2, len(axis) + 1):
            for names in combinations(axis, count):
                products = [1] * len(values)
                for name in names:
                    products = [p * n for p, n in zip(products, sizes[name], strict=True)]
                if tuple(products) == tuple(values) and names not in found:
                    found.append(names)
    return found
