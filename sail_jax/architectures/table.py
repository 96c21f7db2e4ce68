"""What a table of an architecture holds, and what is asked of it."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from reprlib import repr as short
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from sail_jax.basis.axes import path_pattern
from sail_jax.basis.spaces import Spec, spec
from sail_jax.checks import nearest
from sail_jax.trees import leaf_paths, path_str

__all__ = [
    "EPSILONS",
    "Rules",
    "count",
    "divided",
    "fill",
    "flag",
    "look",
    "pairs",
    "put",
    "setting",
    "stated",
]

Config = Mapping[str, Any]


class Rules(NamedTuple):
    """The table of one architecture at one configuration; `rules.spec(params)` applies it.

    - axes: path pattern and axes string per tensor, see `sail_jax.basis.axes`;
    - spaces, sizes: as `sail_jax.spec` takes them, keys as they stand in the axes strings;
    - optional: the patterns that need not match (biases, heads, buffers of some releases);
    - ends: spaces that are the network's output, unless one of these patterns matches (a head);
    - settings: which entry of the configuration states the product of which spaces;
    - folds: for each norm scale, the tensors that read the norm it belongs to;
    - layers: which entry of the configuration counts the tensors of which prefix (or lists
      something of each);
    - single: the patterns under such a prefix that one layer alone has;
    - head_power: of the width that outputs are multiplied by, while their head is the tied table;
    - untied: entries of the configuration, beside the one that ties them, of a network whose head
      is a tensor of its own;
    - scales: by pattern, the size ("resid", or the entry that counts layers) and its power that the
      network multiplies by what it makes of the tensor.
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

    def spec(self, params: PyTree) -> Spec:
        """The checked spec of parameters (arrays or ShapeDtypeStructs); raises as `spec` does."""
        paths = leaf_paths(params)

        def there(pattern: str) -> bool:
            return any(map(path_pattern(pattern).fullmatch, paths))

        present = [(p, axes) for p, axes in self.axes if p not in self.optional or there(p)]
        words = {word for _, axes in present for word in re.findall(r"[\w./:{}-]+\*?", axes)}
        unread = {name for name, heads in self.ends.items() if not any(map(there, heads))}
        names = {word.rstrip("*") for word in words}
        spaces = {k: "outer" if k in unread else v for k, v in self.spaces.items() if k in names}
        sizes = {k: v for k, v in self.sizes.items() if k in names}
        return spec(params, present, spaces=spaces, sizes=sizes)

    def loose(self) -> "Rules":
        """The rules of the network untied: each tied leaf is used in the first way alone."""
        axes = tuple((p, text.split("|")[0].strip()) for p, text in self.axes)
        return self._replace(axes=axes)

    def resized(self, config: Config, spec: Spec) -> dict[str, Any]:
        """The configuration with the sizes of a spec, such as `spec.resized(maps)`.

        Raises ValueError if the configuration cannot state them: one number for layers that
        differ, or a head size that the architecture derives from the width.
        """
        sizes: dict[str, tuple[int, str]] = {}
        for key, text in self.settings:
            for names in _instances(text.split(), spec):
                n = 1
                for name in names:
                    n *= spec.space(name).size
                said = " x ".join(names)
                if sizes.setdefault(key, (n, said))[0] != n:
                    raise ValueError(
                        f"the configuration has one {key!r}, but the sizes ask for "
                        f"{sizes[key][0]} ({sizes[key][1]}) and {n} ({said}): map them alike"
                    )
        out = dict(config)
        for key, (n, _) in sizes.items():
            out = put(out, key, n)
        return out

    def fold(self, params: PyTree) -> tuple[PyTree, "Rules"]:
        """Norm scales multiplied into the tensors that read the norm, and left at one.

        The function stays, and the rules returned let the normalised spaces be rotated: a scale
        at one is in no space. Exact up to one rounding per entry.
        Raises ValueError where a norm's reader is a tied table, or norms have more than a scale.
        """
        if not self.folds:
            raise ValueError("only the scale of RMSNorm can be folded: this table has none")
        before = self.spec(params)
        paths = leaf_paths(params)
        leaves = dict(zip(paths, jax.tree.leaves(params), strict=True))
        for pattern, readers in self.folds.items():
            for path, captures in _matches(pattern, paths):
                scale = leaves[path].astype(jnp.promote_types(leaves[path].dtype, jnp.float32))
                targets = [r for p in readers for r, _ in _matches(fill(p, captures), paths)]
                if not targets:
                    raise ValueError(
                        f"the scale {path!r} cannot be folded: nothing but a tied table reads "
                        f"its norm (wanted {' or '.join(readers)}); untie the table first"
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
    """The rules of a table, and which are optional: those whose pattern starts with a "?"."""
    optional = frozenset(p[1:] for p in table if p[0] == "?")
    return tuple((p.removeprefix("?"), text) for p, text in table.items()), optional


def setting(config: Config, *keys: str, default: Any = None) -> Any:
    """The first of the keys that the configuration states; ValueError, naming it, if none does."""
    if not isinstance(config, Mapping):
        raise TypeError(f"a configuration is a mapping (config.json), got {type(config).__name__}")
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    if default is None:
        raise ValueError(f"the configuration does not state {keys[0]!r}{nearest(keys[0], config)}")
    return default


def count(config: Config, *keys: str, default: int | None = None) -> int:
    """As `setting`, of a whole number from 1; ValueError, naming the key, for anything else."""
    value = setting(config, *keys, default=default)
    if value is not default and (
        isinstance(value, bool) or not isinstance(value, int) or value < 1
    ):
        key = next(key for key in keys if config.get(key) is not None)
        raise ValueError(
            f"the configuration's {key!r} must be a whole number from 1, got {value!r}"
        )
    return value


def flag(config: Config, key: str, *, default: bool) -> bool:
    """As `setting`, of true or false; ValueError, naming the key, for anything else."""
    value = setting(config, key, default=default)
    if not isinstance(value, bool):
        raise ValueError(f"the configuration's {key!r} must be true or false, got {value!r}")
    return value


EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps")


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= sys.float_info.max


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 1 << 31


# what tables and forward passes take the entries of a configuration to be, where they are stated
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        (*EPSILONS, "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
        (_is_number, "a finite number, not negative"),
    ),
    **dict.fromkeys(
        (
            *("vocab_size", "max_position_embeddings", "n_positions", "image_size", "patch_size"),
            *("num_channels", "inputs", "sliding_window", "max_window_layers"),
            *("relative_attention_num_buckets", "relative_attention_max_distance"),
            "original_max_position_embeddings",
        ),
        (_is_whole, "a whole number below 2^31"),
    ),
    **dict.fromkeys(
        ("hidden_act", "activation_function", "feed_forward_proj", "rope_type"),
        (lambda x: isinstance(x, str), "a text"),
    ),
    **dict.fromkeys(
        (
            *("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "use_sliding_window"),
            *("scale_decoder_outputs", "tie_word_embeddings", "tied"),
        ),
        (lambda x: isinstance(x, bool), "true or false"),
    ),
    **dict.fromkeys(
        ("rope_scaling", "rope_parameters", "text_config", "vision_config"),
        (lambda x: isinstance(x, Mapping), "a mapping"),
    ),
}


class _Stated(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        raise ValueError(f"the configuration does not state {key!r}{nearest(key, self)}")


def stated(config: Config, prefix: str = "") -> dict[str, Any]:
    """What a configuration states, nulls left out; what is missing when it is asked for is a
    ValueError.

    Raises ValueError, naming the entry, where one is not of the kind that it is read as.

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
            out[key] = float(value)  # an int may be too large for XLA's
        else:
            out[key] = stated(value, f"{prefix}{key}.") if isinstance(value, Mapping) else value
    return out


def look(config: Config, key: str) -> Any:
    """The entry of that dotted key, numbers counting into lists; None where it is not stated.

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
    """The configuration with another value at that dotted key.

    >>> put({"widths": (4, 6)}, "widths.1", 12)
    {'widths': [4, 12]}
    """
    out = dict(config)
    inside: Any = out
    *outer, last = key.split(".")
    for part in outer:
        place: Any = part if isinstance(inside, dict) else int(part)
        old = look({"at": inside}, f"at.{part}")
        # a list that is not stated is filled from its front
        new = dict(old) if isinstance(old, Mapping) else list(old or ())
        inside[place] = inside = new
    if isinstance(inside, list):
        inside[int(last) : int(last) + 1] = [value]
    else:
        inside[last] = value
    return out


def divided(whole: int, parts: int, what: str) -> int:
    """whole / parts; ValueError, saying of what, unless it is an integer."""
    if parts < 1 or whole % parts:
        raise ValueError(f"{what}: {parts} does not divide {whole}")
    return whole // parts


def _matches(pattern: str, paths: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    compiled = path_pattern(pattern)
    for path in paths:
        if match := compiled.fullmatch(path):
            yield path, match.groupdict()


def fill(pattern: str, captures: Mapping[str, str]) -> str:
    """The pattern (or axes string) with what was captured in place."""
    for name, value in captures.items():
        pattern = pattern.replace(f"{{{name}}}", value)
    return pattern


def _instances(templates: list[str], spec: Spec) -> Iterator[tuple[str, ...]]:
    """The names of spaces that the templates stand for, captures alike."""
    names = [space.name for space in spec.spaces]
    for name, captures in _matches(templates[0], names):
        rest = tuple(fill(template, captures) for template in templates[1:])
        if all(other in names for other in rest):
            yield (name, *rest)


def _scaled(x: Any, spec: Spec, path: str, space: str, scale: Any) -> Any:
    """x times the scale along the axis that reads the space."""
    for k, axis in enumerate(spec.axes(path)):
        if any(f.space == space and f.role == "read" for f in axis):
            column = [1] * x.ndim
            column[k] = -1
            return (x * scale.reshape(column)).astype(x.dtype)
    raise ValueError(f"leaf {path!r} does not read {space!r}")
