"""What a network is to become: a target configuration, read into layers and sizes of spaces.

`sail_jax.growth.networks.plan` uses these functions to check what a configuration states against
the tensors, to read the target, and to find the new size of every space.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from reprlib import repr as short
from typing import Any, cast

from sail_jax import architectures
from sail_jax.architectures.table import Config, Rules, look, put, stated
from sail_jax.basis.axes import blocks, path_pattern
from sail_jax.basis.spaces import Space, Spec
from sail_jax.checks import argument, nearest
from sail_jax.configurations import EPSILONS, KEPT_ENTRIES, differences

TIES = ("tie_word_embeddings", "tied")
"""The entries by which a configuration ties its input and output tables."""

# Entries that growth itself computes with: their kind is checked here, as no forward pass may run.
_READ = (*EPSILONS, "rope_scaling", "rope_parameters", "max_window_layers")

# A configuration may state any number. Sizes of spaces stay below this, so that a typing error is
# refused with a sentence instead of an attempt to allocate it.
_MOST = 1 << 24
# Each tensor of each layer is planned by itself, which takes milliseconds, so that a mistyped depth
# would plan for hours.
_MOST_LAYERS = 1 << 10

# Words of spaces that a factor of width leaves alone: inputs and outputs of the network, the units
# inside a head (growth adds heads and keeps their size), and the axis of stacked layers.
_KEPT = {"outer", "dot", "linear", "stack"}


def rules_of(
    config: Config, rules: Rules | Callable[[Config], Rules] | None
) -> Callable[[Config], Rules]:
    """Finds what makes the rules of a network from its configuration.

    `rules` is None for the rules of the configuration's architecture; or `Rules` for every
    configuration; or a function that makes them. Returns a function from a configuration to
    `Rules`. TypeError if `rules` is neither `Rules` nor callable. ValueError if `rules` is None and
    the architecture is not known.
    """
    if rules is None:
        return architectures.of(config).rules
    if isinstance(rules, Rules):
        return lambda _: rules
    if not callable(rules):
        raise TypeError(f"rules must be Rules or make them, got {type(rules).__name__}")
    return cast(Callable[[Config], Rules], rules)


def layer_of(rules: Rules, path: str) -> tuple[str, int, tuple[int, int]] | None:
    """Finds which layer a leaf belongs to.

    Returns the entry of the configuration that counts these layers, the number of the layer, and
    where in the path that number stands (start, stop). None for a leaf outside of the layers, or
    one that a single layer has.
    """
    for key, prefix in rules.layers.items():
        match = path_pattern(f"{prefix}**").fullmatch(path)
        # `{i}` captures any text, of which only decimals number a layer. The bound on their length
        # keeps hostile names from making numbers that nothing could have as many layers as.
        if match and re.fullmatch("[0-9]{1,9}", match["i"]):
            alone = any(path_pattern(pattern).fullmatch(path) for pattern in rules.single)
            return None if alone else (key, int(match["i"]), match.span("i"))
    return None


def layer_count(rules: Rules, paths: Iterable[str]) -> dict[str, int]:
    """Counts the layers that are there.

    Args:
      rules: The rules of the architecture.
      paths: The paths of all leaves.

    Returns:
      The number of layers, by the entry of the configuration that counts them.

    Raises:
      ValueError: If a layer is missing, or lacks a leaf that another has by the same rule.
    """
    by_key: dict[str, dict[tuple[str, str], set[int]]] = {}
    for path in paths:
        if layer := layer_of(rules, path):
            key, number, (start, stop) = layer
            by_key.setdefault(key, {}).setdefault((path[:start], path[stop:]), set()).add(number)
    counts = {}
    for key, names in by_key.items():
        indices = set[int]().union(*names.values())
        # There are as many distinct numbers as the largest one says only if none from 0 on is
        # missing. The message names the leaf that proves that there should be more.
        if len(indices) <= max(indices):
            (before, after), numbers = max(names.items(), key=lambda item: max(item[1]))
            lost = next(n for n in range(max(indices)) if n not in indices)
            raise ValueError(
                f"the checkpoint has {before + str(max(numbers)) + after!r}, but no layer {lost}"
            )
        # A leaf that a rule gives to all layers alike must be in all of them. Rules for one
        # numbered layer do not begin with the prefix, so their leaves may be in some layers only
        # (the projections between the stages of a ResNet).
        alike = [p for p, _ in rules.axes if p.startswith(rules.layers[key])]
        for (before, after), numbers in names.items():
            have = f"{before}{min(numbers)}{after}"
            if numbers != indices and any(path_pattern(p).fullmatch(have) for p in alike):
                lost = f"{before}{min(indices - numbers)}{after}"
                raise ValueError(f"the checkpoint has {have!r}, but lacks {lost!r}")
        counts[key] = len(indices)
    return counts


def check_stated(config: Config, rules: Rules, spec: Spec, counts: Mapping[str, int]) -> None:
    """Checks what a configuration states against the tensors.

    Args:
      config: The configuration.
      rules: The rules of the architecture.
      spec: The spec of the tensors.
      counts: The number of layers, by the entry that counts them.

    Raises:
      ValueError: If an entry contradicts the tensors, or is not of the kind that it is read as; the
        message names the entry.
    """
    _check_read(config)
    # The configuration as the tensors would have it, in which every entry is the product of the
    # sizes it stands for.
    resized = rules.resized(config, spec)
    for key in dict.fromkeys(key for key, _ in rules.settings):
        _check_entry(key, look(config, key), look(resized, key))
    for key, n in counts.items():
        listed = look(config, key)
        _check_entry(key, len(listed) if isinstance(listed, list | tuple) else listed, n)
    kinds, layers = config.get("layer_types"), max(counts.values(), default=0)
    listed = isinstance(kinds, list | tuple) and all(isinstance(k, str) for k in kinds)
    if kinds is not None and counts and not (listed and len(kinds) == layers):
        raise ValueError(
            f"the configuration's 'layer_types' must name the kind of each of {layers} layers, "
            f"got {kinds!r}"
        )


def _check_read(config: Config, prefix: str = "") -> None:
    """ValueError for an entry that growth reads and that is of another kind, nested ones too."""
    for key, value in config.items():
        if key in _READ:
            stated({key: value}, prefix)
        elif isinstance(value, Mapping):
            _check_read(value, f"{prefix}{key}.")


def _check_entry(key: str, said: object, actual: object) -> None:
    """Raises ValueError if an entry states another size than the tensors have."""
    if said is not None and (isinstance(said, bool) or said != actual):
        raise ValueError(f"the configuration states {key!r}: {said!r}, but the tensors {actual}")


def target(
    config: Config, to: Any, rules: Rules, spec: Spec, counts: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Reads what a network shall become.

    Args:
      config: The configuration of the network.
      to: A whole configuration (it has a "model_type" or "architectures"); or the entries that
        change, "2x" standing for twice what an entry is, names of spaces among them; or the factors
        {"width": 2, "depth": 4}.
      rules: The rules of the architecture.
      spec: The spec of the network.
      counts: The number of layers, by the entry that counts them.

    Returns:
      The new configuration, its sizes not yet checked, and the sizes that were given by the name of
      a space.

    Raises:
      TypeError: If `to` is no mapping, or has a key that is no text.
      ValueError: If `to` is empty, changes what growth keeps, names an entry or space that is not
        there, or has a value that is no size, factor or list where one is needed.
    """
    if not isinstance(to, Mapping):
        raise TypeError(
            f"to must be a configuration, entries of one, or factors of width and depth, got "
            f"{type(to).__name__}"
        )
    for key in to:
        if not isinstance(key, str):
            raise TypeError(f"the entries of to are named by texts, got {key!r}")
    if not to:
        raise ValueError("to is empty: nothing was asked for")
    new = rules.resized(config, spec)
    for key, count in counts.items():
        # The tensors say how many layers there are even where the configuration leaves the number
        # to a default, and then growth has something to multiply.
        if not isinstance(look(new, key), list | tuple):
            new = put(new, key, count)
    if set(to) <= {"width", "depth"}:
        return _scaled(new, to, rules, spec, counts)
    # Only a whole configuration says what it is of, so these two entries tell it from a list of
    # changes.
    if "model_type" in to or "architectures" in to:
        return _whole(config, to, rules, counts), {}
    sizes: dict[str, int] = {}
    entries = dict(_flat(to, new))
    changes = {*TIES, *rules.layers, *(key for key, _ in rules.settings)}
    # An entry such as "widths.1" may be changed by giving the whole list "widths".
    changes |= {key.rpartition(".")[0] for key in changes}
    # Entries of the configuration come before names of spaces, so that "hidden_size" is never taken
    # for a space even where one is called like it.
    for key, value in entries.items():
        if value is None:
            raise ValueError(f"to states {key!r} without a value")
        if key not in changes and look(new, key) not in (None, value):
            raise ValueError(f"growth keeps {key!r}: it is {look(new, key)!r}, to states {value!r}")
        if isinstance(value, list):
            new = put(new, key, value)
            continue
        spaces = [s for s in spec.spaces if path_pattern(key, stars=False).fullmatch(s.name)]
        if look(new, key) is not None or key in TIES:
            new = put(new, key, _times(key, look(new, key), value))
        elif spaces:
            sizes |= {s.name: _times(key, s.size, value) for s in spaces}
        else:
            raise ValueError(
                f"the configuration has no entry {key!r}, nor is it a space"
                f"{nearest(key, [*new, *(s.name for s in spec.spaces)])}"
            )
    return new, sizes


def _flat(to: Mapping[str, Any], config: Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Entries by dotted key: those of a nested configuration are changed one by one."""
    for key, value in to.items():
        inner = look(config, prefix + key)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            yield from _flat(value, config, f"{prefix}{key}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            if not isinstance(inner, Sequence) or isinstance(inner, str):
                raise ValueError(
                    f"{prefix + key} is {inner!r}, no list to be replaced by {value!r}"
                )
            # The lists may differ in length, as one that lists layers grows with them. Factors
            # apply to what was at the same place, and new places must state numbers.
            numbers = [_times(key, n, x) for n, x in zip(inner, value, strict=False)]
            yield prefix + key, [*numbers, *value[len(numbers) :]]
        else:
            yield prefix + key, value


def _times(key: str, old: Any, value: Any) -> Any:
    """The value, or that many times the old one: "2x" of 8 is 16."""
    if not isinstance(value, str) or not value.endswith("x"):
        return value
    try:
        factor = float(value[:-1])
    except ValueError:
        raise ValueError(
            f"{key} must be a number or a factor such as '2x', got {value!r}"
        ) from None
    return _multiple(key, old, factor)


def _multiple(key: str, old: Any, factor: Any) -> int:
    """A whole number times a factor; ValueError unless that is a whole number below 2^31."""
    if isinstance(factor, str) and factor.endswith("x"):
        return _times(key, old, factor)
    if type(old) is not int:
        raise ValueError(f"{key} is {old!r}, no whole number to be multiplied")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
        raise ValueError(f"the factor of {key} must be a positive number, got {factor!r}")
    if factor >= 2**31 or old * factor >= 2**31:
        raise ValueError(f"{short(factor)} times {key} = {old} is more than an array can have")
    new = old * factor
    # A factor such as 4/3, given as a float, makes a whole number only up to rounding.
    if abs(new - round(new)) > 1e-6:
        raise ValueError(
            f"{factor:g} times {key} = {old} is {new:g}, no whole number: state {key} itself"
        )
    return round(new)


def _scaled(
    config: dict[str, Any],
    to: Mapping[str, Any],
    rules: Rules,
    spec: Spec,
    counts: Mapping[str, int],
) -> tuple[dict[str, Any], dict[str, int]]:
    """Every width and depth times its factor; heads are multiplied, and keep their size."""
    sizes = {}
    grouped = {
        f.space
        for leaf in spec.leaves
        for axis in leaf.axes
        for block in blocks(axis)
        for f in block[1:]
    }
    if "width" in to:
        # Flax configurations have an entry `width` of their own, so {"width": 64} could mean a size
        # as well as a factor. A factor as large as the width itself is surely meant as a size.
        own = look(config, "width")
        if isinstance(own, int) and isinstance(to["width"], int) and to["width"] >= own:
            raise ValueError(
                f"width={to['width']} beside nothing but depth is a factor, and the network has "
                f"width {own}: state a size beside another entry, or write '2x'"
            )
        # The first pair of an entry decides what it is multiplied for (`dict` keeps the last of
        # equal keys, hence the reversal). Of a product the first factor is the one that grows:
        # where num_attention_heads is heads of keys times queries for each, the heads grow.
        first = {key: text.split()[0] for key, text in reversed(rules.settings)}
        wide = [s.name for s in spec.spaces if not _KEPT & set(s.nonlinearity.split())]
        for key, text in first.items():
            if any(map(path_pattern(text).fullmatch, wide)):
                config = put(config, key, _multiple(key, look(config, key), to["width"]))
        # Spaces that no entry states are given by name. Those that share an axis with another space
        # in front of them are its units, which keep their number.
        stated = [path_pattern(name) for _, text in rules.settings for name in text.split()]
        for name in wide:
            if name not in grouped and not any(p.fullmatch(name) for p in stated):
                sizes[name] = _multiple(name, spec.space(name).size, to["width"])
        for s in spec.spaces:
            # A norm multiplies the stream, so an outer space with a gain is the stream of a model
            # without head. Its width is what users of the model see.
            if ends(spec, s.name) and any(use.role == "gain" for use in spec.uses(s.name)):
                raise ValueError(
                    f"a base model hands out its stream {s.name!r}, which a factor of width leaves "
                    f"at {s.size} units: grow the model with its head, or state the entries that "
                    "change, which gives outputs of another size"
                )
        if not wide:
            raise ValueError("no space inside this network can be widened")
    if "depth" in to:
        stacks = [s for s in spec.spaces if "stack" in s.nonlinearity.split()]
        if not counts and not stacks:
            raise ValueError("the table of this architecture names no layers to deepen")
        for key, old in counts.items():
            new, listed = _multiple(key, old, to["depth"]), look(config, key)
            check_depth(key, old, new)
            if isinstance(listed, list | tuple):  # layers of a width each: repeated in place
                config = put(config, key, [listed[k * old // new] for k in range(new)])
            else:
                config = put(config, key, new)
        sizes |= {s.name: _multiple(s.name, s.size, to["depth"]) for s in stacks}
    return config, sizes


def check_depth(key: str, old: int, new: object) -> None:
    """Checks a new number of layers.

    `key` is the entry that counts the layers, for messages. ValueError if `new` is no whole number,
    is below 1, or is more than growth makes.
    """
    if isinstance(new, bool) or not isinstance(new, int) or new < 1:
        raise ValueError(f"{key!r} is {old}, and must become 1 layer or more, not {short(new)}")
    if new > max(old, _MOST_LAYERS):
        raise ValueError(
            f"{key!r} would be {short(new)}: growth makes at most {_MOST_LAYERS} layers"
        )


def _whole(
    config: Config, to: Mapping[str, Any], rules: Rules, counts: Mapping[str, int]
) -> dict[str, Any]:
    """A whole configuration as the target; ValueError where it changes what growth keeps."""
    # Families are compared and not model types, since several types share a table (mistral, llama).
    old, new = _family(config), _family(to)
    if old != new:
        raise ValueError(f"a network grows within its architecture: it is {old!r}, to is {new!r}")
    sizes = {key for key, _ in rules.settings} | {*counts, *TIES}
    sizes |= {key.rpartition(".")[0] for key in sizes if key.rpartition(".")[2].isdigit()}  # lists
    for key, (was, now) in differences(config, to).items():
        if key not in sizes:
            raise ValueError(f"growth keeps {key!r}: it is {was!r}, to states {now!r}")
    # What the target does not state stays as it was, lest a default take its place.
    out = {key: config[key] for key in KEPT_ENTRIES if key in config} | dict(to)
    for key in counts:
        # A target may leave the depth of a tower out.
        if look(out, key) is None:
            # In T5 the decoder is then as deep as the encoder.
            out = put(out, key, look(out, "num_layers") or counts[key])
    return out


def ends(spec: Spec, name: str) -> bool:
    """Tells whether a space is the network's input or output.

    Spaces within a head may be "outer" as well, since rotary positions tell their units apart; they
    do not count.

    Args:
      spec: The spec of the network.
      name: The name of the space.

    Returns:
      Whether the space is "outer" and never stands after another space on one axis.

    Raises:
      ValueError: If the spec has no such space.
    """
    # Where it stands after another space on one axis, it holds the units within a head.
    inner = any(
        f.space == name
        for use in spec.uses(name)
        for block in blocks(spec.axes(use.path)[use.axis])
        for f in block[1:]
    )
    return "outer" in spec.space(name).nonlinearity.split() and not inner


def _family(config: Config) -> Any:
    """The architecture of a configuration, or what it says of itself if that is not known."""
    try:
        return architectures.of(config).name
    except ValueError:  # the caller gave rules of their own
        return config.get("model_type")


def new_sizes(
    new_rules: Rules,
    new_config: Config,
    spec: Spec,
    given: Mapping[str, int],
    pruning: str = "",
) -> dict[str, int]:
    """Finds the new size of every space that changes.

    Args:
      new_rules: The rules of the architecture at the new configuration.
      new_config: The new configuration.
      spec: The spec of the network, with its layers as they will be.
      given: Sizes that were given by the name of a space; they come first.
      pruning: The name of the method, if it makes spaces smaller.

    Returns:
      The new size, by space.

    Raises:
      ValueError: If a size is no whole number or too large, a space would shrink (when pruning:
        grow, vanish, or lose layers or units told apart), or the space is the network's input or
        output. States that a network without a head hands out may change.
    """
    single = [(key, text) for key, text in new_rules.settings if len(text.split()) == 1]
    out = {}
    for space in spec.spaces:
        # What was given by name comes first, then the sizes that the table derives from the new
        # configuration (the size of a head), then the entry that states this space alone. Entries
        # that state a product say nothing of one factor.
        new = given.get(space.name)
        for text, n in new_rules.sizes.items():
            if new is None and path_pattern(text).fullmatch(space.name):
                new = n
        for key, text in single:
            if new is None and path_pattern(text).fullmatch(space.name):
                new = look(new_config, key)
        if new is None or new == space.size:
            continue
        if isinstance(new, bool) or not isinstance(new, int) or new >= _MOST:
            raise ValueError(
                f"the size of {space.name!r} must be a whole number below {_MOST}, got {short(new)}"
            )
        if ends(spec, space.name) and space.name not in new_rules.ends:
            raise ValueError(
                f"space {space.name!r} is the network's input or output, which growth leaves at "
                f"{space.size} units, not {new}"
            )
        if pruning:
            _check_pruned(pruning, spec, space, new)
        elif new < space.size and "stack" not in space.nonlinearity.split():
            raise ValueError(
                f"growth was asked for, but space {space.name!r} (leaf "
                f"{spec.uses(space.name)[0].path!r}) has {space.size} units and would have {new}: "
                f"to shrink it, give {argument('method')} magnitude"
            )
        out[space.name] = new
    return out


def _check_pruned(method: str, spec: Spec, space: Space, new: int) -> None:
    """ValueError if a space cannot be pruned to a new size."""
    said = f"space {space.name!r} (leaf {spec.uses(space.name)[0].path!r}) has {space.size} units"
    words = space.nonlinearity.split()
    if new > space.size:
        raise ValueError(f"{method!r} removes units, but {said} and would have {new}")
    if new < 1:
        raise ValueError(f"{said}, and at least 1 has to stay, not {new}")
    if "stack" in words:
        raise ValueError(f"{method!r} removes units of layers, but {said}, which are layers")
    if "outer" in words and not ends(spec, space.name):
        raise ValueError(
            f"{said} that the network tells apart (such as rotary pairs), of which {method!r} "
            "removes none: state fewer heads instead"
        )


def other_outputs(rules: Rules, spec: Spec, sizes: Mapping[str, int]) -> dict[str, str]:
    """Says which outputs of a network get another size.

    `spec` is the spec of the network, with its layers as they will be. Returns for each such space
    that the network hands out, a sentence that names the entry which states its size.
    """
    out = {}
    for name, new in sizes.items():
        if ends(spec, name):
            keys = (k for k, text in rules.settings if path_pattern(text).fullmatch(name))
            key = next(keys, name)
            out[name] = f"outputs of another size: {key} {spec.space(name).size} to {new}"
    return out
