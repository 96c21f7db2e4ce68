"""Finds tables of architectures by building networks with other sizes and settings.

*The difficulty.* A table states that `hidden_size` is the stream, and that the size of a head is
`hidden_size` over `num_attention_heads`. For most architectures this is not documented, but it is
implemented in their class: another entry gives other tensors. The class is therefore built with one
entry changed at a time. Every space then has as many sizes as there are networks. An entry, or a
quotient or product of entries, with the same values determines the space's size. If an entry
changes which tensors exist, these tensors are optional. If it changes their axes, the table is
valid only for its present value.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations, permutations
from typing import Any, NamedTuple

from sail_jax.architectures.files import Table
from sail_jax.architectures.table import look, put
from sail_jax.basis.axes import Axis, Factor, blocks, format_axes
from sail_jax.basis.spaces import Spec
from sail_jax.interop.naming import Place, named
from sail_jax.tracing.multiples import Multiples, changed

Config = Mapping[str, Any]
Axes = dict[str, tuple[Axis, ...]]


class Network(NamedTuple):
    """The network that a class makes from a configuration.

    Attributes:
      spec: The spaces of its tensors.
      shapes: The shapes of its tensors, by name.
      multiples: The factors in its forward pass; None if they are unknown.
    """

    spec: Spec
    shapes: Mapping[str, tuple[int, ...]]
    multiples: Multiples | None = None

    @property
    def axes(self) -> Axes:
        """The axes of each leaf."""
        return dict(self.spec.leaves)


Probe = Callable[[Config], Network]

TIE = "tie_word_embeddings"

ENDS = {
    "vocab_size": "vocab", "max_position_embeddings": "position", "n_positions": "position",
    "type_vocab_size": "segment", "num_channels": "channel",
    "relative_attention_num_buckets": "bucket", "pooler_output_size": "pooled",
}  # fmt: skip
"""Entries for the sizes of inputs and outputs, with the names of their axes in tables."""

_LAYERS = re.compile(
    r"(.*\.)?(num_(hidden_|encoder_|decoder_)?layers|n_layers?|(encoder|decoder)_layers)"
)
# Whole-number entries that do not count units, tokens among them.
_OTHERS = re.compile(r".*(_token_id|_idx)|(.*\.)?(image_size|patch_size|torch_dtype)")


def probed(
    config: Config,
    probe: Probe,
    *,
    only: Collection[str] | None = None,
    names: Mapping[str, str] | None = None,
) -> "Probed":
    """Builds networks of other sizes and of another number of layers, and compares them.

    Args:
      config: A configuration of the architecture.
      probe: Infers the network of a configuration; raises ValueError if that is impossible.
      only: The entries that are sizes, if they are known; None to try all.
      names: Axes strings of a table by pattern, which provide the names of spaces.

    Returns:
      What the networks have in common. Its table holds for configurations that differ in sizes
      and in the number of layers.

    Raises:
      ValueError: If the network of the configuration itself, with two layers, cannot be built.
    """
    flat = dict(entries_of(config))
    counts = [k for k, n in flat.items() if _LAYERS.fullmatch(k) and is_count(n)]
    # Lists with an entry for each layer use the defaults, which fit any number of layers.
    depths = {flat[key] for key in counts}
    small: Config = {
        k: v
        for k, v in config.items()
        if k == "architectures" or not (isinstance(v, list) and len(v) in depths)
    }
    for key in counts:
        small = put(small, key, 2)
    base, loose = _loose(small, probe)
    # A tied head joins spaces that are otherwise separate, so its results also hold for untied
    # heads.
    small = small | ({TIE: True} if loose else {})
    instead = {
        key: n for key in flat if flat[key] is None and (n := _unstated(small, key, base, probe))
    }
    layers, deep = {}, {}
    for key in counts:
        start, found = _prefix(small, key, base, probe)
        if start:
            layers[key], deep[key] = start, found
    entries = {
        k: n
        for k, n in flat.items()
        if is_count(n) and k not in counts and not _OTHERS.fullmatch(k)
        if only is None or k in only or k.rpartition(".")[2] in ENDS
    }
    configs, networks = _resized(small, base, entries, probe)
    made = Probed(base, layers, deep, configs, networks, entries, names or {})
    if loose:
        made.untie(loose)
    made.instead = instead
    return made


def table_by_probing(config: Config, probe: Probe) -> Table:
    """Finds the table of an architecture that holds for other sizes, with arguments of `probed`."""
    return probed(config, probe).table()


def entries_of(config: Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of a configuration by dotted key."""
    for key, value in config.items():
        if isinstance(value, Mapping) and (key.endswith("_config") or key == "rope_parameters"):
            yield from entries_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _loose(small: Config, probe: Probe) -> tuple[Network, Network | None]:
    """Returns the network, tied if possible, and then the network with a separate head."""
    own = probe(small)
    try:
        other = probe({**small, TIE: small.get(TIE) is not True})
    except ValueError:
        return own, None
    tied, loose = (own, other) if len(own.shapes) < len(other.shapes) else (other, own)
    return (tied, loose) if len(tied.shapes) < len(loose.shapes) else (own, None)


def _unstated(small: Config, key: str, base: Network, probe: Probe) -> tuple[str, ...]:
    """Returns the spaces with the size of an entry that is missing in the configuration."""
    size = 36
    if not re.search(r"(size|dim|inner|width|hidden)$", key):
        return ()
    try:
        other = probe(put(small, key, size))
    except ValueError:
        return ()
    if other.axes != base.axes:
        return ()
    changed = [s for s in base.spec.spaces if other.spec.space(s.name).size != s.size]
    fits = all(other.spec.space(space.name).size == size for space in changed)
    return tuple(space.name for space in changed) if fits else ()


def _prefix(small: Config, key: str, base: Network, probe: Probe) -> tuple[str, Network]:
    """Returns the prefix of a layer's tensors, with a placeholder, and a network of 3 layers."""
    try:
        more = probe(put(small, key, 3))
    except ValueError:
        return "", base
    new = [path for path in more.shapes if path not in base.shapes]
    starts = {match[1] for path in new if (match := re.match(r"(.*?[./])2(?=[./])", path))}
    if len(starts) != 1 or not all(path.startswith(f"{min(starts)}2") for path in new):
        return "", base
    return f"{min(starts)}{{i}}.", more


def _resized(
    small: Config, base: Network, entries: Mapping[str, int], probe: Probe
) -> tuple[list[Config], list[Network]]:
    """Yields networks with the same axes and other sizes, one for each possible entry."""
    configs, networks = [small], [base]

    def changed(change: Mapping[str, int]) -> Config:
        out = small
        for key, n in change.items():
            out = put(out, key, n)
        return out

    for key, value in entries.items():
        alone = [{key: n} for n in (2 * value, value + 1, 3 * value)]
        # Some entries must divide others, in which case two are doubled, or all.
        pairs = [{key: 2 * value, other: 2 * n} for other, n in entries.items() if other != key]
        for change in (*alone, *pairs, {k: 2 * n for k, n in entries.items()}):
            try:
                other = probe(changed(change))
            except ValueError:
                continue
            if other.axes == base.axes:
                configs.append(changed(change))
                networks.append(other)
                break
    return configs, networks


class Probed:
    """Collects the common properties of networks, and makes the table."""

    def __init__(
        self,
        base: Network,
        layers: Mapping[str, str],
        deep: Mapping[str, Network],
        configs: Sequence[Config],
        networks: Sequence[Network],
        entries: Mapping[str, int],
        names: Mapping[str, str],
    ) -> None:
        self.base, self.layers = base, layers
        self.starts = [prefix.partition("{i}")[0] for prefix in layers.values()]
        self.values = {key: tuple(look(c, key) for c in configs) for key in entries}
        self.configs = configs
        self.shapes = [network.shapes for network in networks]
        self.axes = self._ended(base)
        self.words = {space.name: space.nonlinearity for space in base.spec.spaces}
        self.sizes = {
            name: tuple(network.spec.space(name).size for network in networks)
            for name in self.words
        }
        for key, name in ENDS.items():
            sizes = [self.values[k] for k in self.values if k.rpartition(".")[2] == key]
            if sizes:
                self.words[name], self.sizes[name] = "outer", sizes[0]
        # The size in one of the networks; some spaces may be missing in networks of other sizes.
        self.once = {name: sizes[0] for name, sizes in self.sizes.items()}
        self.optional: set[str] = set()
        self.tied: Axes = {}
        self.head: tuple[str, ...] = ()
        self.readers = dict(base.multiples.readers) if base.multiples else {}
        self.overrides: dict[str, dict[str, dict[str, str]]] = {}
        self.holds: dict[str, tuple[Any, ...]] = {}
        # Entries that are not stated, and the spaces that have their size.
        self.instead: dict[str, tuple[str, ...]] = {}
        self.names = names
        self.free, self.scales = self._numbers(networks)
        for network in deep.values():
            self.add(network)
        self._layered(deep)

    def _ended(self, network: Network) -> Axes:
        """Returns the axes of a network; inputs and outputs get the name of their entry."""
        moving = {
            ENDS[key.rpartition(".")[2]]: values
            for key, values in self.values.items()
            if key.rpartition(".")[2] in ENDS and len(set(values)) > 1
        }

        def end(path: str, k: int) -> str:
            known = [shapes[path][k] for shapes in self.shapes if path in shapes]
            fitting = (name for name, values in moving.items() if list(values) == known)
            return next(fitting, "")

        out: Axes = {}
        for path, axes in network.axes.items():
            tied = any(f.tied for axis in axes for f in axis)
            # If a leaf writes a space, its other axis reads an input; otherwise it writes an
            # output.
            writes = any(f.role == "write" for axis in axes for f in axis)
            role = "read" if writes else "write"
            out[path] = tuple(
                (Factor(name, role, tied),) if not axis and (name := end(path, k)) else axis
                for k, axis in enumerate(axes)
            )
        return out

    def _numbers(
        self, networks: Sequence[Network]
    ) -> tuple[set[str], dict[str, tuple[str, float]]]:
        """Returns the spaces whose sizes are not used as numbers, and the leaves that are
        multiplied.

        A leaf is multiplied by a power of the size of one of its spaces.
        """
        free: set[str] = set()
        scales: dict[str, tuple[str, float]] = {}
        for k, network in enumerate(networks[1:], 1):
            ratios = {n: own[k] / own[0] for n, own in self.sizes.items() if own[k] != own[0]}
            if self.base.multiples is None or network.multiples is None:
                return set(), {}
            found = changed(self.base.multiples.numbers, network.multiples.numbers)
            if found == []:
                free.update(ratios)
            for number, ratio in found or ():
                for axis in self.axes.get(number.leaf, ()):
                    for f in axis:
                        if f.space in ratios and ratio > 0 and self.words[f.space] != "outer":
                            power = math.log(ratio) / math.log(ratios[f.space])
                            scales[number.leaf] = (f.space, round(power, 6))
        return free, scales

    def _layered(self, deep: Mapping[str, Network]) -> None:
        """Finds the leaves that are missing in some layers."""
        self.single: set[str] = set()
        for key, prefix in self.layers.items():
            start = prefix.partition("{i}")[0]
            by_layer: dict[str, set[str]] = {}
            for path in deep[key].shapes:
                if path.startswith(start):
                    number, _, rest = path[len(start) :].partition(".")
                    by_layer.setdefault(number, set()).add(rest)
            common = set.intersection(*by_layer.values())
            for rest in set.union(*by_layer.values()) - common:
                pattern = prefix + rest
                self.optional.add(pattern)
                first = by_layer.get("0", set())
                if rest in first and all(own < first for n, own in by_layer.items() if n != "0"):
                    self.single.add(pattern)

    def add(self, network: Network, *, joins: bool = False) -> dict[str, str] | None:
        """Adds the leaves of another network, and returns None if its axes differ from the base's.

        Returns the names of the base's spaces by the network's names. With `joins`, spaces that are
        separate in the network may be one in the base, and tied leaves have only their first use.
        """
        renaming: dict[str, str] = {}
        axes = self._ended(network)
        for path, own in axes.items():
            known = self.tied.get(path, self.axes.get(path, own))
            if _pattern(own, joins) != _pattern(known, joins):
                return None
            for a, b in zip(own, known if path in self.axes else (), strict=False):
                for f, g in zip(a, b, strict=True):
                    if renaming.setdefault(f.space, g.space) != g.space:
                        return None
        if not joins and len(set(renaming.values())) < len(renaming):
            return None
        for space in network.spec.spaces:
            name = renaming.setdefault(space.name, space.name)
            if joins:
                self.words[name] = both(self.words.get(name, ""), space.nonlinearity)
            self.words.setdefault(name, space.nonlinearity)
            self.once.setdefault(name, space.size)
        for path, own in axes.items():
            if joins or path not in self.axes:
                self.axes[path] = _renamed(own, renaming)
        return renaming

    def untie(self, network: Network) -> None:
        """Adds the network with a separate head."""
        tied = {p: own for p, own in self.axes.items() if any(f.tied for a in own for f in a)}
        if self.add(network, joins=True) is None:
            raise ValueError("a tied head changes the axes of other tensors")
        self.tied = tied
        # A gain is not multiplied into the table of the embeddings.
        self.readers = dict(network.multiples.readers) if network.multiples else {}
        self.head = tuple(path for path in network.shapes if path not in self.base.shapes)
        count = self.sizes.get("vocab", (0,))[0]
        for path in self.head:
            ended = zip(self.axes[path], network.shapes[path], strict=True)
            self.axes[path] = tuple(
                (Factor("vocab", "write"),) if not axis and n == count else axis
                for axis, n in ended
            )
        self.optional |= {*self.head}

    def opened(self, path: str) -> str:
        """Returns a path with {i} for the number of its layer."""
        return self._open(path)[0]

    def _open(self, path: str) -> tuple[str, str]:
        """Returns a path with placeholders for its numbers, and its part up to the last of them."""
        layer = ""
        pattern = path
        for start in self.starts:
            match = re.match(rf"{re.escape(start)}(\d+)(?=[./])", path)
            if match:
                layer, pattern = match[0], f"{start}{{i}}{path[match.end() :]}"
                break
        expert = re.search(r"(?<=[./])experts[./]\d+(?=[./])", pattern)
        if expert:
            number = re.search(r"\d+$", expert[0])
            assert number
            at = expert.start() + number.start()
            pattern = f"{pattern[:at]}{{e}}{pattern[expert.end() :]}"
            layer = path[: len(path) - len(pattern) + at + len("{e}")]
        return pattern, layer

    def table(self) -> Table:
        """Makes the table."""
        places: dict[str, list[Place]] = {}
        for path, own in self.axes.items():
            pattern, layer = self._open(path)
            for k, axis in enumerate(own):
                for n, f in enumerate(axis):
                    names = [[g.space for g in block] for block in blocks(axis)]
                    block = next(own for own in names if f.space in own)
                    at = (block.index(f.space), len(block))
                    others = [g.role for m, other in enumerate(own) if m != k for g in other]
                    where = Place(path, pattern, layer, k, n, *at, f.role, "write" in others)
                    places.setdefault(f.space, []).append(where)
        ends = {*ENDS.values()} - {space.name for space in self.base.spec.spaces}
        prefixes = tuple(self.layers.values())
        called = named(places, self.words, self.once, prefixes, self.names, ends)
        axes: dict[str, str] = {}
        resized = self._resized(called)
        for path, own in self.axes.items():
            pattern = self.opened(path)
            fixed = resized.get(pattern, {})
            text = format_axes(
                [
                    (Factor(fixed[k], "gain"),) if k in fixed and not axis else axis
                    for k, axis in enumerate(_renamed(own, called))
                ]
            )
            if axes.setdefault(pattern, text) != text:
                raise ValueError(
                    f"the layers of {pattern!r} differ: {axes[pattern]!r} and {text!r}"
                )
        # A tensor that occurs only in some networks does not determine a size.
        optional = {*map(self.opened, self.optional)}
        alone = {
            called[name]
            for name, where in places.items()
            if any(p.count == 1 and p.n == 0 and p.pattern not in optional for p in where)
        }
        sizes = {}
        for name, own in self.sizes.items():
            text = self.stated(own) if name in called else ""
            # If a space has an axis to itself, its shape is the size, and `settings` has its entry.
            if text and (" " in text or called[name] not in alone):
                sizes[called[name]] = text
        together = {
            tuple(called[f.space] for f in block)
            for own in self.axes.values()
            for axis in own
            for block in blocks(axis)
            if len(block) > 1
        }
        by_name = {called[name]: own for name, own in self.sizes.items() if name in called}
        settings = tuple(
            (key, " ".join(names))
            for key, own in self.values.items()
            if len(set(own)) > 1
            for names in _products(own, by_name, together)
        )
        for key, spaces in self.instead.items():
            for name in dict.fromkeys(called[space] for space in spaces):
                settings += ((key, name),)
                sizes[name] = " | ".join(filter(None, (key, sizes.get(name, ""))))
        words: dict[str, str] = {}
        for name, own in self.words.items():
            # The base's layers are used, because others may have been tried with only one
            # activation.
            if name in called and (name in self.sizes or called[name] not in words):
                words[called[name]] = both(words.get(called[name], ""), own)
        for name in self.free:
            # Logits that are not divided by the root of the size are an ordinary sum.
            if name in called and words[called[name]] == "dot":
                words[called[name]] = "linear"
        folds: dict[str, dict[str, None]] = {}
        for gain, readers in self.readers.items():
            if any(f.role == "gain" for axis in self.axes.get(gain, ()) for f in axis):
                into = folds.setdefault(self.opened(gain), {})
                into |= dict.fromkeys(map(self.opened, readers))
        rms = {name for name, word in words.items() if word.split() == ["rmsnorm"]}
        made = Table(
            folds={
                gain: tuple(readers)
                for gain, readers in folds.items()
                if axes[gain] in {f"diag({name})" for name in rms}
            },
            axes=_sorted(axes),
            spaces={name: word for name, word in words.items() if word},
            scales={
                self.opened(path): (called[name], power)
                for path, (name, power) in self.scales.items()
            },
            sizes=sizes,
            settings=settings,
            layers=self.layers,
            optional=tuple(sorted(optional)),
            single=tuple(sorted(self.single)),
            tied={
                self.opened(p): format_axes(_renamed(own, called)) for p, own in self.tied.items()
            },
            head=self.head,
            words={
                key: {
                    value: {called[n]: word for n, word in words.items() if n in called}
                    for value, words in values.items()
                }
                for key, values in self.overrides.items()
            },
            holds=self.holds,
        )
        return made

    def _resized(self, called: Mapping[str, str]) -> dict[str, dict[int, str]]:
        """Finds axes without a space that are resized with one, such as the gains of a norm over a
        head with rotary positions.

        If a space has one size in all networks, these axes are taken from an earlier table.

        Returns the names of these spaces by pattern and axis.
        """
        outer = {
            called[name]: own
            for name, own in self.sizes.items()
            if name in called and self.words[name] == "outer"
        }
        found: dict[str, dict[int, str]] = {}
        for path, own in self.axes.items():
            known = [shapes[path] for shapes in self.shapes if path in shapes]
            if len(known) < len(self.shapes):
                continue
            pattern = self.opened(path)
            for k, axis in enumerate(own):
                sizes = tuple(shape[k] for shape in known)
                names = [
                    name for name, n in outer.items()
                    if n == sizes and ("{i}" in name) == ("{i}" in pattern)
                    if len(set(n)) > 1 or f"diag({name})" in self.names.get(pattern, "")
                ]  # fmt: skip
                if not axis and len(names) == 1:
                    found.setdefault(pattern, {})[k] = names[0]
        return found

    def stated(self, sizes: Sequence[int]) -> str:
        """The rule that computes sizes from the configurations; "" without one."""
        if len(set(sizes)) == 1:
            return str(sizes[0])
        moving = {key: own for key, own in self.values.items() if len(set(own)) > 1}
        for key, own in moving.items():
            if tuple(own) == tuple(sizes):
                return key
        ones = [1] * len(sizes)
        for (a, above), (b, below) in permutations([*moving.items(), ("", ones)], 2):
            ratios = {Fraction(s * y, x) for x, y, s in zip(above, below, sizes, strict=True)}
            if len(ratios) == 1 and a:
                (ratio,) = ratios
                times = f"{ratio.numerator} * " if ratio.numerator > 1 else ""
                over = f" / {ratio.denominator}" if ratio.denominator > 1 else ""
                return f"{times}{a}{f' / {b}' if b else ''}{over}"
        return ""


def _pattern(axes: tuple[Axis, ...], loose: bool) -> list[list[Factor]]:
    """Returns axes without the names of spaces; `loose` also ignores the effects of a tied head."""
    return [[f._replace(space="", tied=f.tied and not loose) for f in axis] for axis in axes]


def _renamed(axes: tuple[Axis, ...], names: Mapping[str, str]) -> tuple[Axis, ...]:
    return tuple(
        tuple(f._replace(space=names.get(f.space, f.space)) for f in axis) for axis in axes
    )


def _sorted(axes: Mapping[str, str]) -> dict[str, str]:
    return dict(sorted(axes.items(), key=lambda item: ("{i}" in item[0], item[0])))


def _products(
    values: Sequence[int], sizes: Mapping[str, Sequence[int]], together: set[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Yields spaces, alone or on one axis, with sizes that multiply to these values."""
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


def both(first: str, second: str) -> str:
    """Combines two statements about the nonlinearity of a space."""
    return " ".join(dict.fromkeys([*first.split(), *second.split()]))
