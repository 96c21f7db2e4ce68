"""Tables of architectures for files: entries vary that are no sizes, and defaults are known.

`sail_jax.interop.settings` varies sizes. A table in a file also states which tensors are optional,
and for which values of other entries it holds.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sail_jax.architectures.files import Table
from sail_jax.architectures.table import look, put
from sail_jax.interop.settings import (
    TIE,
    Config,
    Network,
    Probe,
    Probed,
    entries_of,
    is_count,
    probed,
)

_ACTIVATIONS = re.compile(r"(.*\.)?(hidden_act|hidden_activation|activation(_function)?)")
_ANY = "gelu"
# Real numbers that only scale the network's values, or that only training uses.
_SCALES = re.compile(
    r".*(eps|epsilon|theta|drop|initializer|std|coef|prob|rate|decay|factor|range|scal|alpha|bias|"
    r"temperature|cap|limit|multiplier).*"
)
_TRAINING = re.compile(
    r"(.*\.)?(use_cache|return_dict|output_.*|tie_encoder_decoder|is_encoder_decoder|is_decoder|"
    r"add_cross_attention|gradient_checkpointing|torchscript|use_bfloat16|.*chunk_size.*|pruned.*)"
)


def varied_table(
    config: Config,
    probe: Probe,
    *,
    vary: bool = False,
    only: Collection[str] | None = None,
    prefixes: Sequence[str] = (),
    resolve: Callable[[Config], Config] | None = None,
    names: Mapping[str, str] | None = None,
) -> Table:
    """Finds the table of an architecture, for configurations of its class.

    Args:
      config: A configuration of the architecture.
      probe: Infers the network of a configuration; raises ValueError if that is impossible.
      vary: Whether entries other than sizes are varied.
      only: The entries that are sizes, if they are known; None to try all.
      prefixes: A prefix of names that networks without a head lack, such as "model.", and its
        replacement in other classes.
      resolve: Adds default entries to a configuration; None if they are unknown.
      names: Axes strings of a table by pattern, which provide the names of spaces.

    Returns:
      The table.

    Raises:
      ValueError: If the network of the configuration itself, with two layers, cannot be built, or
        layers differ.
    """
    either = f"{{{','.join(prefixes)},}}" if prefixes else ""
    known = {
        p.replace(either, prefixes[0]) if prefixes else p: text for p, text in (names or {}).items()
    }
    made = probed(config, probe, only=only, names=known)
    if vary:
        _vary(made, probe)
    table = made.table()
    if resolve is not None:
        sizes, defaults = _absent(made, table.sizes, resolve)
        table = table._replace(sizes=sizes, defaults=defaults)
        if table.head:
            untied = {k: v for k, v in config.items() if k != TIE}
            table = table._replace(ties=resolve(untied).get(TIE) is True)
    return _prefixed(table, prefixes[0], either) if prefixes else table


def _vary(made: Probed, probe: Probe) -> None:
    """Varies the entries that are not sizes: booleans, activations, and real numbers."""
    small = made.configs[0]
    # Activations come last: the others are compared with the unchanged network.
    for key, value in sorted(
        entries_of(small), key=lambda item: bool(_ACTIVATIONS.fullmatch(item[0]))
    ):
        if key == TIE or _TRAINING.fullmatch(key):
            continue
        others: list[Any] = []
        if isinstance(value, bool):
            others = [not value]
        elif isinstance(value, str) and _ACTIVATIONS.fullmatch(key):
            others = [name for name in (_ANY, "relu") if name != value]
        elif isinstance(value, float) and ("rotary" in key or not _SCALES.fullmatch(key)):
            others = [value / 2 if value else 0.5]
        for other in others:
            try:
                network = probe(put(small, key, other))
            except ValueError:
                continue
            _add(made, key, other, value, network)


def _add(made: Probed, key: str, value: Any, old: Any, network: Network) -> None:
    """Adds a network with another value of an entry."""
    renaming = made.add(network)
    if renaming is None:
        # The symmetries that all activations have belong to this one, too.
        if value != "relu":
            made.holds[key] = (old,)
        return
    made.optional |= made.base.shapes.keys() ^ network.shapes.keys()
    words = {
        renaming[space.name]: space.nonlinearity
        for space in network.spec.spaces
        if made.words[renaming[space.name]] != space.nonlinearity
    }
    if not words:
        return
    if value == _ANY:
        # Results for an activation without symmetries hold for activations that are not tried.
        own = {name: made.words[name] for name in words}
        made.overrides.setdefault(key, {})[str(old)] = own
        made.words |= words
    else:
        made.overrides.setdefault(key, {})[str(value)] = words


def _absent(
    made: Probed, sizes: Mapping[str, str], resolve: Callable[[Config], Config]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Adds sizes for configurations without an entry. Returns them, and the defaults of entries."""
    into: dict[str, Any] = {}
    keys = {
        key for text in sizes.values() for key in re.split(r" [*/] ", text) if not key.isdigit()
    }
    instead: dict[str, str] = {}
    for key in sorted(keys):
        values = []
        for config in made.configs:
            without = {k: v for k, v in config.items() if k != key}
            try:
                values.append(look(resolve(without), key))
            except ValueError:
                break
        if len(values) < len(made.configs) or not all(map(is_count, values)):
            continue
        if len(set(values)) == 1:
            into[key] = values[0]
        elif text := made.stated(values):
            instead[key] = text
    out = {}
    for name, text in sizes.items():
        choices = [text]
        for key, other in instead.items():
            parts = text.split(" ")
            if key in parts and (text == key or " " not in other):
                choices.append(" ".join(other if p == key else p for p in parts))
            elif parts[:1] == [key]:
                choices.append(" ".join([other, *parts[1:]]))
        out[name] = " | ".join(dict.fromkeys(choices))
    return out, into


def _prefixed(table: Table, prefix: str, instead: str) -> Table:
    """The table with patterns that match names with or without a prefix."""

    def either(pattern: str) -> str:
        own = pattern.startswith(prefix)
        return f"{instead}{pattern[len(prefix) :]}" if own else pattern

    return table._replace(
        axes={either(p): text for p, text in table.axes.items()},
        tied={either(p): text for p, text in table.tied.items()},
        scales={either(p): own for p, own in table.scales.items()},
        folds={either(p): tuple(map(either, own)) for p, own in table.folds.items()},
        layers={key: either(p) for key, p in table.layers.items()},
        optional=tuple(map(either, table.optional)),
        single=tuple(map(either, table.single)),
    )
