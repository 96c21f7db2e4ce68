"""The table of an architecture (`Rules`), and helpers that read configurations."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from reprlib import repr as short
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from sail_jax.basis.axes import Patterns, format_axes, path_pattern
from sail_jax.basis.spaces import Spec, spec
from sail_jax.checks import nearest
from sail_jax.configurations import EPSILONS
from sail_jax.trees import leaf_paths, path_str

Config = Mapping[str, Any]


class Rules(NamedTuple):
    """The table of an architecture for one configuration; `rules.spec(params)` applies it.

    Attributes:
      axes: A pattern of paths and an axes string (see `sail_jax.basis.axes`) for each tensor.
      spaces: The nonlinearities of each space, as in `sail_jax.spec`.
      sizes: The sizes of spaces that tensors do not show, as in `sail_jax.spec`.
      optional: Patterns that need not match: biases, heads, buffers of some releases.
      ends: Spaces that are the network's output, unless one of these patterns (of a head) matches.
        Outputs grow only if a target gives their size.
      settings: Pairs of an entry of the configuration and space names, separated by blanks. The
        entry is the product of the spaces' sizes.
      folds: Patterns of the tensors that read each norm, by the norm's scale.
      layers: The prefix of the layers' tensors, with `{i}` for the number of the layer, for each
        entry that counts layers or lists a value per layer.
      single: Patterns under such a prefix that only one layer has.
      head_power: The network multiplies its outputs by this power of the width while its head is
        the tied table.
      untied: Further entries of the configuration after the head has become a separate tensor, in
        addition to the entry for tying.
      post_norm: Whether norms come after the sums. A layer with zero output is then not the
        identity.
      scales: A size and a power, by pattern: the network multiplies the tensor's result by
        size^power. The size is the name of a space, or an entry that counts layers.
      either: Two groups of patterns, such as separate experts and stacked experts. If the first
        pattern of the second group matches, the first group is ignored. Otherwise the second group
        is ignored.
      given: The spec, if these are its rules. No table then tells how to untie a leaf, and only the
        spec states that a layer with zero output is the identity.
    """

    axes: tuple[tuple[str, str], ...]
    spaces: Mapping[str, str]
    sizes: Mapping[str, int] = {}
    optional: frozenset[str] = frozenset()
    ends: Mapping[str, tuple[str, ...]] = {}
    settings: tuple[tuple[str, str], ...] = ()
    folds: Mapping[str, tuple[str, ...]] = {}
    layers: Mapping[str, str] = {}
    single: frozenset[str] = frozenset()
    head_power: float = 0.0
    untied: Mapping[str, Any] = {}
    scales: Mapping[str, tuple[str, float]] = {}
    post_norm: bool = False
    either: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    given: Spec | None = None

    @classmethod
    def of(cls, spec: Spec) -> "Rules":
        """Makes the rules of one network from its spec.

        Args:
          spec: A spec, such as the result of `sail_jax.spec_of`.

        Returns:
          Rules that reproduce this spec. They contain no entries of a configuration, so growth
          takes new sizes by the names of spaces.
        """
        return cls(
            axes=tuple((leaf.path, format_axes(leaf.axes)) for leaf in spec.leaves),
            spaces={space.name: space.nonlinearity for space in spec.spaces if space.nonlinearity},
            sizes={space.name: space.size for space in spec.spaces},
            layers={name: start for name, start, _ in spec.layers},
            given=spec,
        )

    @property
    def inferred(self) -> bool:
        """Whether these are the rules of a spec."""
        return self.given is not None

    def spec(self, params: PyTree) -> Spec:
        """Applies the rules to parameters.

        Args:
          params: The parameters, arrays or ShapeDtypeStructs.

        Returns:
          The checked spec.

        Raises:
          ValueError: If the parameters do not match the rules; see `sail_jax.spec`.
        """
        one, other = self.either
        heads = (head for heads in self.ends.values() for head in heads)
        asked = [*self.optional, *heads, *other[:1]]
        patterns = Patterns(asked)
        there = {asked[k] for path in leaf_paths(params) for k, _ in patterns.matches(path)}
        # `spec` rejects rules without a matching leaf, so optional rules are only passed if they
        # match.
        absent = self.optional - there | {*(other if there.isdisjoint(other) else one)}
        present = [(p, axes) for p, axes in self.axes if p not in absent]
        words = {word for _, axes in present for word in re.findall(r"[\w./:{}-]+\*?", axes)}
        # Without a head these spaces are the network's outputs, so they cannot change basis. Their
        # nonlinearities inside the network stay.
        unread = {name for name, heads in self.ends.items() if there.isdisjoint(heads)}
        names = {word.rstrip("*") for word in words}
        spaces = {k: f"outer {v}" if k in unread else v for k, v in self.spaces.items()}
        spaces = {k: v for k, v in spaces.items() if k in names}
        sizes = {k: v for k, v in self.sizes.items() if k in names}
        out = spec(params, present, spaces=spaces, sizes=sizes)
        if self.given is None:
            return out
        given = self.given
        return replace(out, layers=given.layers, ties=given.ties, undivided=given.undivided)

    def loose(self) -> "Rules":
        """Returns the rules of the network untied."""
        axes = tuple((p, text.split("|")[0].strip()) for p, text in self.axes)
        return self._replace(axes=axes)

    def resized(self, config: Config, spec: Spec) -> dict[str, Any]:
        """Writes the sizes of a spec into a configuration.

        Args:
          config: The configuration of the original network.
          spec: The new spec, such as `spec.resized(maps)`.

        Returns:
          The new configuration.

        Raises:
          ValueError: If one entry would require two sizes: unequal layers, or a head size that the
            architecture derives from the width.
        """
        sizes: dict[str, tuple[int, str]] = {}
        for key, text in self.settings:
            for names in _instances(text.split(), spec):
                n = 1
                for name in names:
                    n *= spec.space(name).size
                said = " x ".join(names)
                # One entry may equal several products (n_embd is the stream's width, and heads
                # times their size), in every layer: all must agree.
                if sizes.setdefault(key, (n, said))[0] != n:
                    raise ValueError(
                        f"the configuration has one {key!r}, but the sizes need "
                        f"{sizes[key][0]} ({sizes[key][1]}) and {n} ({said}): map them alike"
                    )
        out = dict(config)
        for key, (n, _) in sizes.items():
            out = put(out, key, n)
        return out

    def fold(self, params: PyTree) -> tuple[PyTree, "Rules"]:
        """Multiplies norm scales into the tensors that read the norm, and sets them to one.

        The function of the network stays the same, up to one rounding per entry. With the returned
        rules, the normalised spaces may be rotated, since scales of one have no space.

        Args:
          params: The parameters.

        Returns:
          The new parameters, and their rules.

        Raises:
          ValueError: If there are no norms to fold, or only a tied table reads a norm.
        """
        if not self.folds:
            raise ValueError("only scales of RMSNorm can be folded; this table has none")
        before = self.spec(params)
        paths = leaf_paths(params)
        leaves = dict(zip(paths, jax.tree.leaves(params), strict=True))
        for pattern, readers in self.folds.items():
            for path, captures in _matches(pattern, paths):
                # The product is rounded once, to the dtype of the reader: a bfloat16 scale is
                # multiplied in float32.
                scale = leaves[path].astype(jnp.promote_types(leaves[path].dtype, jnp.float32))
                # The readers in the same layer, found by the captures of the scale's pattern.
                targets = [r for p in readers for r, _ in _matches(fill(p, captures), paths)]
                if not targets:
                    raise ValueError(
                        f"the scale {path!r} cannot be folded: only a tied table reads its norm "
                        f"(expected {' or '.join(readers)}); untie the table first"
                    )
                (space,) = (f.space for f in before.axes(path)[0])
                for target in targets:
                    leaves[target] = _scaled(leaves[target], before, target, space, scale)
                leaves[path] = jnp.ones_like(leaves[path])
        folded = jax.tree.map_with_path(lambda path, _: leaves[path_str(path)], params)
        axes = tuple((p, "_" if p in self.folds else text) for p, text in self.axes)
        return folded, self._replace(axes=axes, folds={})


def pairs(
    table: Mapping[str, str],
) -> tuple[tuple[tuple[str, str], ...], frozenset[str]]:
    """Splits a table into its rules and the optional patterns."""
    optional = frozenset(p[1:] for p in table if p[0] == "?")
    return tuple((p.removeprefix("?"), text) for p, text in table.items()), optional


def setting(config: Config, *keys: str, default: Any = None) -> Any:
    """Returns the first of several entries that a configuration contains.

    Args:
      config: The configuration.
      *keys: Names of entries. A null entry counts as missing.
      default: The result if all are missing. None raises an error instead.

    Returns:
      The entry's value.

    Raises:
      ValueError: If all entries are missing and there is no default.
      TypeError: If `config` is not a mapping.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"config: expected a mapping (config.json), got {type(config).__name__}")
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    if default is None:
        raise ValueError(f"the configuration has no {keys[0]!r}{nearest(keys[0], config)}")
    return default


def count(config: Config, *keys: str, default: int | None = None) -> int:
    """Returns the first of several entries that a configuration contains, a positive integer.

    Args:
      config: The configuration.
      *keys: Names of entries.
      default: The result if all are missing. None raises an error instead.

    Returns:
      The number.

    Raises:
      ValueError: If all entries are missing and there is no default, or the value is invalid.
    """
    value = setting(config, *keys, default=default)
    # The default may be outside the allowed range: 0 stands for a missing entry.
    if value is not default and (
        isinstance(value, bool) or not isinstance(value, int) or value < 1
    ):
        key = next(key for key in keys if config.get(key) is not None)
        raise ValueError(f"the configuration's {key!r} must be a whole number >= 1, got {value!r}")
    return value


def flag(config: Config, key: str, *, default: bool) -> bool:
    """Returns a boolean entry of a configuration.

    Args:
      config: The configuration.
      key: The name of the entry.
      default: The result if it is missing.

    Returns:
      The value.

    Raises:
      ValueError: If the value is not a boolean.
    """
    value = setting(config, key, default=default)
    if not isinstance(value, bool):
        raise ValueError(f"the configuration's {key!r} must be true or false, got {value!r}")
    return value


def _is_number(x: object) -> bool:
    """Checks whether x is a non-negative number that fits a float."""
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= sys.float_info.max


def _is_token(x: object) -> bool:
    """Checks whether x is a token id; old configurations use -1 for no token."""
    return isinstance(x, int) and not isinstance(x, bool) and -1 <= x < 1 << 31


def _is_whole(x: object) -> bool:
    """Checks whether x is a whole number that fits 31 bits."""
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 1 << 31


# The types that tables and forward passes require of the configuration's entries, if present. A
# wrong type would otherwise cause an error much later, inside a forward pass or in XLA.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        (
            *(*EPSILONS, "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
            *("embedding_multiplier", "attention_multiplier", "residual_multiplier"),
        ),
        (_is_number, "a finite number >= 0"),
    ),
    "logits_scaling": (lambda x: _is_number(x) and x > 0, "a finite number > 0"),
    **dict.fromkeys(
        (
            *("vocab_size", "max_position_embeddings", "n_positions", "image_size", "patch_size"),
            *("num_channels", "inputs", "sliding_window", "max_window_layers"),
            *("relative_attention_num_buckets", "relative_attention_max_distance"),
            *("original_max_position_embeddings", "encoder_stride"),
        ),
        (_is_whole, "a whole number below 2^31"),
    ),
    **dict.fromkeys(
        (
            *("hidden_act", "activation_function", "feed_forward_proj", "rope_type"),
            *("summary_type", "summary_activation", "pooler_act"),
        ),
        (lambda x: isinstance(x, str), "a text"),
    ),
    **dict.fromkeys(
        (
            *("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "use_sliding_window"),
            *("scale_decoder_outputs", "tie_word_embeddings", "tied", "is_decoder"),
        ),
        (lambda x: isinstance(x, bool), "true or false"),
    ),
    "pad_token_id": (_is_token, "a whole number below 2^31"),
    "eos_token_id": (
        lambda x: all(map(_is_token, x)) if isinstance(x, list | tuple) else _is_token(x),
        "a whole number below 2^31, or a list of them",
    ),
    **dict.fromkeys(
        ("rope_scaling", "rope_parameters", "text_config", "vision_config"),
        (lambda x: isinstance(x, Mapping), "a mapping"),
    ),
}


class _Stated(dict[str, Any]):
    """A dictionary that raises a readable ValueError for missing keys."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"the configuration has no {key!r}{nearest(key, self)}")


def stated(config: Config, prefix: str = "") -> dict[str, Any]:
    """Returns the checked entries of a configuration, without null entries.

    Args:
      config: The configuration.
      prefix: The prefix of entry names in error messages.

    Returns:
      The entries. Numbers are floats if forward passes use them as real numbers. Reading a missing
      entry raises a ValueError with its name.

    Raises:
      ValueError: If an entry has the wrong type for tables and forward passes.

    >>> stated({"vocab_size": 5, "head_dim": None})
    {'vocab_size': 5}
    """
    out = _Stated()
    for key, value in config.items():
        fits, kind = _KINDS.get(key, (None, ""))
        if value is None:
            continue
        if fits is not None and not fits(value):
            raise ValueError(
                f"the configuration's {prefix + key!r} must be {kind}, got {short(value)}"
            )
        if fits is _is_number:
            # JSON's whole numbers are unbounded, but XLA's are not.
            out[key] = float(value)
        else:
            out[key] = stated(value, f"{prefix}{key}.") if isinstance(value, Mapping) else value
    return out


def look(config: Config, key: str) -> Any:
    """Returns the entry of a configuration at a dotted key.

    Args:
      config: The configuration.
      key: Names joined by dots; a number is a position in a list.

    Returns:
      The value, or None if it is missing.

    >>> look({"text_config": {"hidden_size": 8}, "widths": [4, 6]}, "widths.1")
    6
    """
    inside: Any = config
    for part in key.split("."):
        if isinstance(inside, Mapping):
            inside = inside.get(part)
        else:
            listed = isinstance(inside, list | tuple) and part.isdigit() and int(part) < len(inside)
            inside = inside[int(part)] if listed else None
    return inside


def put(config: Config, key: str, value: Any) -> dict[str, Any]:
    """Returns a configuration with a new value at a dotted key.

    Args:
      config: The configuration, which stays unchanged.
      key: Names joined by dots; a number is a position in a list.
      value: The new value.

    Returns:
      The new configuration; tuples on the path to the key become lists.

    >>> put({"widths": (4, 6)}, "widths.1", 12)
    {'widths': [4, 12]}
    """
    out = dict(config)
    inside: Any = out
    *outer, last = key.split(".")
    for part in outer:
        place: Any = part if isinstance(inside, dict) else int(part)
        old = look({"at": inside}, f"at.{part}")
        # A missing list is filled from its front, so entries 0, 1, ... may be put one after the
        # other.
        new = dict(old) if isinstance(old, Mapping) else list(old or ())
        inside[place] = inside = new
    if isinstance(inside, list):
        inside[int(last) : int(last) + 1] = [value]
    else:
        inside[last] = value
    return out


def divided(whole: int, parts: int, what: str) -> int:
    """Divides two whole numbers without a remainder.

    Args:
      whole: The dividend.
      parts: The divisor.
      what: The description of the two in error messages.

    Returns:
      The quotient.

    Raises:
      ValueError: If there is a remainder, or `parts` is less than 1.
    """
    if parts < 1 or whole % parts:
        raise ValueError(f"{what}: {parts} does not divide {whole}")
    return whole // parts


def _matches(pattern: str, paths: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Returns the paths that match a pattern, each with its captures."""
    compiled = path_pattern(pattern)
    for path in paths:
        if match := compiled.fullmatch(path):
            yield path, match.groupdict()


def fill(pattern: str, captures: Mapping[str, str]) -> str:
    """Inserts captures into a pattern or an axes string.

    Args:
      pattern: Text with names in braces, such as `{i}`.
      captures: The replacement of each name.

    Returns:
      The text with these names replaced.
    """
    for name, value in captures.items():
        pattern = pattern.replace(f"{{{name}}}", value)
    return pattern


def _instances(templates: list[str], spec: Spec) -> Iterator[tuple[str, ...]]:
    """Returns the names of spaces that the templates match, with equal captures."""
    names = [space.name for space in spec.spaces]
    for name, captures in _matches(templates[0], names):
        rest = tuple(fill(template, captures) for template in templates[1:])
        if all(other in names for other in rest):
            yield (name, *rest)


def _scaled(x: Array, spec: Spec, path: str, space: str, scale: Array) -> Array:
    """Multiplies x by the scale along the axis that reads the space."""
    for k, axis in enumerate(spec.axes(path)):
        if any(f.space == space and f.role == "read" for f in axis):
            column = [1] * x.ndim
            column[k] = -1
            return (x * scale.reshape(column)).astype(x.dtype)
    raise ValueError(f"leaf {path!r} does not read {space!r}")
