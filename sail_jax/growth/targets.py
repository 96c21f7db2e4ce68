"""Reads the target of growth, a configuration, into layers and sizes of spaces.

`sail_jax.growth.networks.plan` uses these functions. They check the configuration against the
tensors, read the target, and find the new size of every space.
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
"""The entries of a configuration that tie its input and output tables."""

# Growth computes with these entries. Their types are checked here, because a forward pass may not
# run.
_READ = (*EPSILONS, "rope_scaling", "rope_parameters", "max_window_layers")

# A configuration may contain any number. Sizes of spaces must be below this limit, so that a typo
# causes an error instead of a huge allocation.
_MOST = 1 << 24
# Each tensor of each layer is planned separately, in milliseconds. A mistyped depth would take
# hours.
_MOST_LAYERS = 1 << 10

# Words of spaces that a factor of width does not change: inputs and outputs of the network, the
# units inside a head (growth adds heads and keeps their size), and the axis of stacked layers.
_KEPT = {"outer", "dot", "linear", "stack"}


def rules_of(
    config: Config, rules: Rules | Callable[[Config], Rules] | None
) -> Callable[[Config], Rules]:
    """Finds the function from a network's configuration to its rules.

    `rules` is None for the rules of the configuration's architecture, `Rules` that apply to every
    configuration, or a function that makes them. Raises a TypeError if `rules` is neither `Rules`
    nor callable, and a ValueError if it is None and the architecture is unknown.
    """
    if rules is None:
        return architectures.of(config).rules
    if isinstance(rules, Rules):
        return lambda _: rules
    if not callable(rules):
        raise TypeError(f"rules must be Rules or make them, got {type(rules).__name__}")
    return cast(Callable[[Config], Rules], rules)


def layer_of(rules: Rules, path: str) -> tuple[str, int, tuple[int, int]] | None:
    """Finds the layer of a leaf.

    Returns the configuration's entry for these layers, the number of the layer, and the position of
    this number in the path (start, stop). Returns None for a leaf outside the layers, or a leaf
    that only one layer has.
    """
    for key, prefix in rules.layers.items():
        match = path_pattern(f"{prefix}**").fullmatch(path)
        # `{i}` captures any text, but only decimals are layer numbers. The limit on their length
        # protects against hostile names with huge numbers.
        if match and re.fullmatch("[0-9]{1,9}", match["i"]):
            alone = any(path_pattern(pattern).fullmatch(path) for pattern in rules.single)
            return None if alone else (key, int(match["i"]), match.span("i"))
    return None


def layer_count(rules: Rules, paths: Iterable[str]) -> dict[str, int]:
    """Counts the layers of a network.

    Args:
      rules: The rules of the architecture.
      paths: The paths of all leaves.

    Returns:
      The number of layers, by the entry of the configuration that counts them.

    Raises:
      ValueError: If a layer is missing, or a leaf is missing in a layer but present in another by
        the same rule.
    """
    by_key: dict[str, dict[tuple[str, str], set[int]]] = {}
    for path in paths:
        if layer := layer_of(rules, path):
            key, number, (start, stop) = layer
            by_key.setdefault(key, {}).setdefault((path[:start], path[stop:]), set()).add(number)
    counts = {}
    for key, names in by_key.items():
        indices = set[int]().union(*names.values())
        # The count matches the largest number only if no number is missing. The message contains
        # the leaf with the largest number.
        if len(indices) <= max(indices):
            (before, after), numbers = max(names.items(), key=lambda item: max(item[1]))
            lost = next(n for n in range(max(indices)) if n not in indices)
            raise ValueError(
                f"the checkpoint has {before + str(max(numbers)) + after!r}, but no layer {lost}"
            )
        # A leaf with a rule for all layers must be in all layers. Rules for one numbered layer do
        # not start with the prefix, so their leaves may be in some layers only (such as the
        # projections between the stages of a ResNet).
        alike = [p for p, _ in rules.axes if p.startswith(rules.layers[key])]
        for (before, after), numbers in names.items():
            have = f"{before}{min(numbers)}{after}"
            if numbers != indices and any(path_pattern(p).fullmatch(have) for p in alike):
                lost = f"{before}{min(indices - numbers)}{after}"
                raise ValueError(f"the checkpoint has {have!r}, but {lost!r} is missing")
        counts[key] = len(indices)
    return counts


def check_stated(config: Config, rules: Rules, spec: Spec, counts: Mapping[str, int]) -> None:
    """Checks a configuration against the tensors.

    Args:
      config: The configuration.
      rules: The rules of the architecture.
      spec: The spec of the tensors.
      counts: The number of layers, by the entry that counts them.

    Raises:
      ValueError: If an entry contradicts the tensors or has an invalid type. The message contains
        the entry.
    """
    _check_read(config)
    # The configuration according to the tensors, in which every entry is the product of its sizes.
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
            f"the configuration's 'layer_types' must list the kind of each of {layers} layers, "
            f"got {kinds!r}"
        )


def _check_read(config: Config, prefix: str = "") -> None:
    """Raises a ValueError for an entry with an invalid type that growth reads, including nested
    entries.
    """
    for key, value in config.items():
        if key in _READ:
            stated({key: value}, prefix)
        elif isinstance(value, Mapping):
            _check_read(value, f"{prefix}{key}.")


def _check_entry(key: str, said: object, actual: object) -> None:
    """Raises a ValueError if an entry contradicts the size of the tensors."""
    if said is not None and (isinstance(said, bool) or said != actual):
        raise ValueError(f"the configuration states {key!r}: {said!r}, but the tensors {actual}")


def target(
    config: Config, to: Any, rules: Rules, spec: Spec, counts: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Reads the target of growth.

    Args:
      config: The configuration of the network.
      to: A whole configuration (with a "model_type" or "architectures"), or the entries and spaces
        that change, or the factors {"width": 2, "depth": 4}. The value "2x" means twice the old
        value.
      rules: The rules of the architecture.
      spec: The spec of the network.
      counts: The number of layers, by the entry that counts them.

    Returns:
      The new configuration with unchecked sizes, and the sizes that were given for spaces.

    Raises:
      TypeError: If `to` is not a mapping, or has a key that is not a string.
      ValueError: If `to` is empty, changes an entry that growth keeps, has an unknown entry or
        space, or an invalid value.
    """
    if not isinstance(to, Mapping):
        raise TypeError(
            f"to must be a configuration, entries of one, or factors of width and depth, got "
            f"{type(to).__name__}"
        )
    for key in to:
        if not isinstance(key, str):
            raise TypeError(f"the keys of to must be strings, got {key!r}")
    if not to:
        raise ValueError("to is empty: expected at least one entry")
    new = rules.resized(config, spec)
    for key, count in counts.items():
        # The tensors determine the number of layers, which growth can multiply even if the
        # configuration relies on a default.
        if not isinstance(look(new, key), list | tuple):
            new = put(new, key, count)
    if set(to) <= {"width", "depth"}:
        return _scaled(new, to, rules, spec, counts)
    # Only a whole configuration states its architecture. These two entries therefore distinguish it
    # from a list of changes.
    if "model_type" in to or "architectures" in to:
        return _whole(config, to, rules, counts), {}
    sizes: dict[str, int] = {}
    entries = dict(_flat(to, new))
    changes = {*TIES, *rules.layers, *(key for key, _ in rules.settings)}
    # The whole list "widths" may be given to change an entry such as "widths.1".
    changes |= {key.rpartition(".")[0] for key in changes}
    # Entries of the configuration take precedence over names of spaces. "hidden_size" is therefore
    # never a space, even if a space has this name.
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
                f"the configuration has no entry {key!r}, and it is not a space"
                f"{nearest(key, [*new, *(s.name for s in spec.spaces)])}"
            )
    return new, sizes


def _flat(to: Mapping[str, Any], config: Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Returns entries by dotted key, so that a nested configuration changes entry by entry."""
    for key, value in to.items():
        inner = look(config, prefix + key)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            yield from _flat(value, config, f"{prefix}{key}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            if not isinstance(inner, Sequence) or isinstance(inner, str):
                raise ValueError(f"{prefix + key} is {inner!r}, not a list; got {value!r}")
            # The lists may differ in length, because a list of layers grows with them. Factors
            # apply to the old value at the same position, and new positions require numbers.
            numbers = [_times(key, n, x) for n, x in zip(inner, value, strict=False)]
            yield prefix + key, [*numbers, *value[len(numbers) :]]
        else:
            yield prefix + key, value


def _times(key: str, old: Any, value: Any) -> Any:
    """Returns the value, or a multiple of the old value: "2x" of 8 is 16."""
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
    """Multiplies a whole number by a factor; the result must be a whole number below 2^31."""
    if isinstance(factor, str) and factor.endswith("x"):
        return _times(key, old, factor)
    if type(old) is not int:
        raise ValueError(f"{key} is {old!r}, not a whole number, and cannot be multiplied")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
        raise ValueError(f"the factor of {key} must be a positive number, got {factor!r}")
    if factor >= 2**31 or old * factor >= 2**31:
        raise ValueError(f"{short(factor)} times {key} = {old} is more than an array can have")
    new = old * factor
    # A float factor such as 4/3 gives a whole number only up to rounding.
    if abs(new - round(new)) > 1e-6:
        raise ValueError(
            f"{factor:g} times {key} = {old} is {new:g}, not a whole number: state {key} itself"
        )
    return round(new)


def _scaled(
    config: dict[str, Any],
    to: Mapping[str, Any],
    rules: Rules,
    spec: Spec,
    counts: Mapping[str, int],
) -> tuple[dict[str, Any], dict[str, int]]:
    """Multiplies widths and depths by their factors, and the number of heads, not their size."""
    sizes = {}
    grouped = {
        f.space
        for leaf in spec.leaves
        for axis in leaf.axes
        for block in blocks(axis)
        for f in block[1:]
    }
    if "width" in to:
        # Flax configurations have an entry `width`, so {"width": 64} could mean a size or a factor.
        # A number at least as large as the width is assumed to be a size.
        own = look(config, "width")
        if isinstance(own, int) and isinstance(to["width"], int) and to["width"] >= own:
            raise ValueError(
                f"width={to['width']} alone or with depth is a factor, and the network has "
                f"width {own}: state a size together with another entry, or write '2x'"
            )
        # The first pair of an entry is used (`dict` keeps the last of equal keys, hence the
        # reversal). In a product, the first factor grows: if num_attention_heads is key heads times
        # queries per key head, the key heads grow.
        first = {key: text.split()[0] for key, text in reversed(rules.settings)}
        wide = [
            s.name
            for s in spec.spaces
            if not _KEPT & set(s.nonlinearity.split()) and not _is_set(spec, s.name)
        ]
        for key, text in first.items():
            if any(map(path_pattern(text).fullmatch, wide)):
                config = put(config, key, _multiple(key, look(config, key), to["width"]))
        # Spaces without an entry are given by name. Spaces that follow another space on an axis are
        # its units, whose number does not change.
        stated = [path_pattern(name) for _, text in rules.settings for name in text.split()]
        for name in wide:
            if name not in grouped and not any(p.fullmatch(name) for p in stated):
                sizes[name] = _multiple(name, spec.space(name).size, to["width"])
        for s in spec.spaces:
            # A norm multiplies the stream, so an outer space with a gain is the stream of a model
            # without a head. Users of the model depend on its width.
            if ends(spec, s.name) and any(use.role == "gain" for use in spec.uses(s.name)):
                raise ValueError(
                    f"a base model returns its stream {s.name!r}, which a factor of width keeps "
                    f"at {s.size} units: grow the model with its head, or state the entries that "
                    "change, which gives outputs of another size"
                )
        if not wide:
            raise ValueError("no space inside this network can be widened")
    if "depth" in to:
        stacks = [s for s in spec.spaces if "stack" in s.nonlinearity.split()]
        if not counts and not stacks:
            raise ValueError(
                "no layers are known to deepen: the rules list none, and no space is a 'stack', as "
                "spec_of finds it for jax.lax.scan over layers; name layers in a list by "
                "spec_of(..., layers='blocks/*')"
            )
        for key, old in counts.items():
            new, listed = _multiple(key, old, to["depth"]), look(config, key)
            check_depth(key, old, new)
            if isinstance(listed, list | tuple):  # layers with separate widths: repeated in place
                config = put(config, key, [listed[k * old // new] for k in range(new)])
            else:
                config = put(config, key, new)
        sizes |= {s.name: _multiple(s.name, s.size, to["depth"]) for s in stacks}
    return config, sizes


def _is_set(spec: Spec, name: str) -> bool:
    """Checks whether leaves only write or only read a space, such as averaged latents."""
    uses = spec.uses(name)
    return len({use.role for use in uses} - {"gain"}) < 2 and not any(use.tied for use in uses)


def check_depth(key: str, old: int, new: object) -> None:
    """Checks a new number of layers.

    `key` is the entry that counts the layers, for messages. Raises a ValueError unless `new` is a
    whole number from 1 to the limit of growth.
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
    """Reads a whole configuration as the target, which must keep the other entries."""
    # Families are compared instead of model types, because several types share a table (mistral,
    # llama).
    old, new = _family(config), _family(to)
    if old != new:
        raise ValueError(f"a network grows within its architecture: it is {old!r}, to is {new!r}")
    sizes = {key for key, _ in rules.settings} | {*counts, *TIES}
    sizes |= {key.rpartition(".")[0] for key in sizes if key.rpartition(".")[2].isdigit()}  # lists
    for key, (was, now) in differences(config, to).items():
        if key not in sizes:
            raise ValueError(f"growth keeps {key!r}: it is {was!r}, to states {now!r}")
    # Entries that are missing in the target keep their values, instead of taking defaults.
    out = {key: config[key] for key in KEPT_ENTRIES if key in config} | dict(to)
    for key in counts:
        # A target may omit the depth of a tower.
        if look(out, key) is None:
            # In T5, the decoder is then as deep as the encoder.
            out = put(out, key, look(out, "num_layers") or counts[key])
    return out


def ends(spec: Spec, name: str) -> bool:
    """Checks whether a space is the network's input or output.

    Spaces within a head may also be "outer", because rotary positions distinguish their units. They
    do not count.

    Args:
      spec: The spec of the network.
      name: The name of the space.

    Returns:
      Whether the space is "outer" and never follows another space on an axis.

    Raises:
      ValueError: For an unknown space.
    """
    # A space that follows another space on an axis contains the units within a head.
    inner = any(
        f.space == name
        for use in spec.uses(name)
        for block in blocks(spec.axes(use.path)[use.axis])
        for f in block[1:]
    )
    return "outer" in spec.space(name).nonlinearity.split() and not inner


def _family(config: Config) -> Any:
    """Returns the architecture of a configuration, or its "model_type" if it is unknown."""
    try:
        return architectures.of(config).name
    except ValueError:  # the caller passed rules
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
      spec: The spec of the network with its new layers.
      given: Sizes that were given for spaces. They take precedence.
      pruning: The name of the method, if it makes spaces smaller.

    Returns:
      The new size, by space.

    Raises:
      ValueError: If a size is not a whole number or too large, a space would shrink, or the space
        is the network's input or output. When pruning, if a space would grow, vanish, or lose
        layers or distinguished units. The output states of a network without a head may change.
    """
    single = [(key, text) for key, text in new_rules.settings if len(text.split()) == 1]
    out = {}
    for space in spec.spaces:
        # Sizes given by name come first, then sizes that the table derives from the new
        # configuration (the size of a head), then the entry for this single space. Entries for a
        # product do not determine one factor.
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
                f"space {space.name!r} is the network's input or output, which growth keeps at "
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
    """Raises a ValueError if a space cannot be pruned to a new size."""
    said = f"space {space.name!r} (leaf {spec.uses(space.name)[0].path!r}) has {space.size} units"
    words = space.nonlinearity.split()
    if new > space.size:
        raise ValueError(f"{method!r} removes units, but {said} and would have {new}")
    if new < 1:
        raise ValueError(f"{said}: expected to keep at least 1, not {new}")
    if "stack" in words:
        raise ValueError(f"{method!r} removes units of layers, but {said}, which are layers")
    if "outer" in words and not ends(spec, space.name):
        raise ValueError(
            f"{said} that the network distinguishes (such as rotary pairs), and {method!r} "
            "cannot remove them: state fewer heads instead"
        )


def other_outputs(rules: Rules, spec: Spec, sizes: Mapping[str, int]) -> dict[str, str]:
    """Lists the outputs of a network whose size changes.

    `spec` is the spec of the network with its new layers. Returns a sentence with the entry that
    states the size, for each such output space.
    """
    out = {}
    for name, new in sizes.items():
        if ends(spec, name):
            keys = (k for k, text in rules.settings if path_pattern(text).fullmatch(name))
            key = next(keys, name)
            out[name] = f"outputs of another size: {key} {spec.space(name).size} to {new}"
    return out
