"""Transforms the entries of config.json that belong to layers for a new order of layers.

Four forms are known: lists with a value for each layer, lists of layers' numbers, lists of periods,
and counts or periods (`SCHEDULES`), which state the kinds of all layers at once. The table was made
from the configuration classes of transformers 5.24.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sail_jax.configurations import Config

NUMBERS = {
    **dict.fromkeys(("cross_attention_layers", "full_attn_idxs", "attn_layer_indices"), 0),
    **dict.fromkeys(("moe_layers", "rope_scaling_layers", "local_layer_ids"), 0),
    **dict.fromkeys(("window_block_indices", "window_block_indexes", "global_attn_indexes"), 0),
    **dict.fromkeys(("residual_block_indices", "fullatt_block_indexes", "subsample_layers"), 0),
    "ple_layer_ids": 1,
}
"""Lists of layers' numbers, and the number of the first layer."""

# Lists and texts whose length equals the number of layers by coincidence.
_OTHER = re.compile(
    r"architectures|.*token.*|keys_to_ignore.*|.*_limit|out_\w+|.*labels?|langu.*|auto_map|_.*|"
    r"(conv|time|patch|image|kernel|block|pool|down|up)_\w*(kernel|stride|dim|size)\w*|tags"
)
# Texts with a letter for each layer.
_TEXTS = ("hybrid_override_pattern",)


class Schedule(NamedTuple):
    """Entries that state the kind of every layer by numbers.

    Attributes:
      keys: The entries. The schedule applies if the configuration contains one of them.
      kind: The kind of layer i of n, from the configuration.
      listed: A list of the kinds. If the configuration contains it, the numbers have no effect.
      names: The values in that list by kind, so that it can be written if the numbers cannot
        express the order; None if it cannot.
    """

    keys: tuple[str, ...]
    kind: Callable[[Config, int, int], Any]
    listed: str = ""
    names: Callable[[Any, Config], Any] | None = None


def _number(config: Config, key: str, default: int = 0) -> int:
    value = config.get(key)
    return value if type(value) is int else default


def _every(key: str, shift: int = 1) -> Callable[[Config, int, int], Any]:
    """Selects every n-th layer, the first of them at n - shift; a text is repeated."""

    def kind(config: Config, i: int, n: int) -> Any:
        value = config.get(key)
        if isinstance(value, str | list):
            return value[i % len(value)] if value else ""
        step = _number(config, key)
        # A period of 0 would cause a division by zero.
        return (i + shift) % step == 0 if step > 0 else None

    return kind


def _named(last: str, other: str) -> Callable[[Any, Config], Any]:
    """Returns the names of kinds for `layer_types`; L stands for local attention in a text."""
    return lambda kind, config: last if kind is True or kind == "G" else other


def _switch(config: Config, i: int, n: int) -> bool:
    """Selects the sparse layers of Switch Transformers and NLLB."""
    step = _number(config, "encoder_sparse_step")
    if config.get("model_type") == "switch_transformers":
        return step == 1 or (step > 0 and i % step == 1)
    return step > 0 and (i + 1) % step == 0


def _deepseek(config: Config, i: int, n: int) -> bool:
    every = config.get("moe_layer_freq")
    sparse = (
        bool(every[i])
        if isinstance(every, list) and len(every) == n
        else (i % (every if type(every) is int and every > 0 else 1) == 0)
    )
    return sparse and i >= _number(config, "first_k_dense_replace")


def _ernie(config: Config, i: int, n: int) -> bool:
    end = _number(config, "moe_layer_end_index", -1)
    within = _number(config, "moe_layer_start_index") <= i <= (n - 1 if end < 0 else end)
    return within and (i + 1) % max(_number(config, "moe_layer_interval", 1), 1) == 0


def _qwen(config: Config, i: int, n: int) -> bool:
    step, dense = max(_number(config, "decoder_sparse_step", 1), 1), config.get("mlp_only_layers")
    if "encoder_sparse_step" in config:  # of another family
        return False
    return not (isinstance(dense, list) and i in dense) and (i + 1) % step == 0


def _sliding(config: Config, i: int, n: int) -> bool:
    used = config.get("use_sliding_window") and config.get("sliding_window")
    return bool(used) and i >= _number(config, "max_window_layers")


def _shared(config: Config, i: int, n: int) -> bool:
    return i >= n - _number(config, "num_kv_shared_layers")


def _fixed(key: str) -> Callable[[Config, int, int], Any]:
    """Gives each layer its own kind, unless the entry is off."""
    return lambda config, i, n: i if config.get(key) else 0


def _phase(period: str, offset: str) -> Callable[[Config, int, int], bool]:
    def kind(config: Config, i: int, n: int) -> bool:
        return i % max(_number(config, period, 1), 1) == _number(config, offset)

    return kind


_ATTENTION = _named("full_attention", "sliding_attention")
SCHEDULES = (
    Schedule(("first_k_dense_replace", "moe_layer_freq"), _deepseek, "mlp_layer_types"),
    Schedule(
        ("num_dense_layers",), lambda c, i, n: i < _number(c, "num_dense_layers"), "mlp_layer_types"
    ),
    Schedule(("moe_layer_end_index", "moe_layer_start_index", "moe_layer_interval"), _ernie),
    Schedule(("mlp_only_layers", "decoder_sparse_step"), _qwen, "mlp_layer_types"),
    Schedule(("encoder_sparse_step",), _switch),
    Schedule(("interleave_moe_layer_step",), _every("interleave_moe_layer_step"), "moe_layers"),
    Schedule(
        ("no_rope_layer_interval",), _every("no_rope_layer_interval"), "no_rope_layers",
        lambda kind, config: int(not kind),
    ),
    Schedule(
        ("attn_layer_period", "attn_layer_offset"),
        _phase("attn_layer_period", "attn_layer_offset"), "layers_block_type",
    ),
    Schedule(
        ("expert_layer_period", "expert_layer_offset"),
        _phase("expert_layer_period", "expert_layer_offset"),
    ),
    *(
        Schedule((key,), _every(key), "layer_types", _ATTENTION)
        for key in ("sliding_window_pattern", "_sliding_window_pattern")
    ),
    Schedule(
        ("global_attn_every_n_layers",),
        lambda c, i, n: _every(
            "global_attn_every_n_layers", int(c.get("model_type") == "afmoe")
        )(c, i, n),
        "layer_types", _ATTENTION,
    ),
    Schedule(
        ("full_attention_interval",), _every("full_attention_interval"), "layer_types",
        _named("full_attention", "linear_attention"),
    ),
    Schedule(
        ("max_window_layers",), _sliding, "layer_types",
        _named("sliding_attention", "full_attention"),
    ),
    Schedule(("layer_group_size",), _every("layer_group_size"), "layer_types"),
    Schedule(("block_types",), _every("block_types", 0), "block_types", lambda kind, config: kind),
    Schedule(("cross_attention_frequency",), _every("cross_attention_frequency", 0)),
    Schedule(
        ("cross_layer_interval",), lambda c, i, n: i if c.get("cross_layer_interval") != 1 else 0
    ),
    Schedule(("num_kv_shared_layers",), _shared),
    Schedule(
        ("loop_layer_index_start", "loop_layer_index_end"),
        lambda c, i, n: _number(c, "loop_layer_index_start") <= i
        < _number(c, "loop_layer_index_end"),
    ),
    Schedule(("n_layers_per_attn_res_block",), _every("n_layers_per_attn_res_block", 0)),
    *(
        Schedule((key,), _fixed(key))
        for key in ("hidden_size_per_layer_input", "scale_attn_by_inverse_layer_idx",
                    "hybrid_layer_ids", "num_layers_per_stack")
    ),
)  # fmt: skip
"""The counts and periods, and the entries under which a layer cannot change its place: there a
tensor outside the layers has a part for each of them, or a layer's number enters what it computes.
"""


def moved(config: Config, old: int, layers: Sequence[int]) -> dict[str, Any]:
    """Returns a configuration, or its text tower, for a new order of its layers.

    Args:
      config: The content of config.json, or of a part of it. The entry that counts the layers is
        not changed.
      old: The old number of layers.
      layers: The number of the old layer, for each of the new ones.

    Returns:
      The configuration with every entry that belongs to layers in the new order.

    Raises:
      ValueError: If an entry cannot state the kinds of the layers in their new order. The message
        contains the entry.

    >>> moved({"no_rope_layers": [1, 1, 0], "moe_layers": [0, 2]}, 3, [0, 1, 1, 2])
    {'no_rope_layers': [1, 1, 1, 0], 'moe_layers': [0, 3]}
    >>> moved({"first_k_dense_replace": 1}, 3, [0, 0, 1, 2])
    {'first_k_dense_replace': 2}
    >>> moved({"first_k_dense_replace": 1}, 3, [0, 1, 0, 2])
    Traceback (most recent call last):
    ...
    ValueError: config.json cannot state the layers in their new order: 'first_k_dense_replace' 1
    """
    new = dict(config)
    if list(layers) == list(range(old)) or not layers or max(layers) >= old:
        return new
    for key, value in config.items():
        if key in NUMBERS and isinstance(value, list):
            own = {x - NUMBERS[key] for x in value if type(x) is int}
            new[key] = [j + NUMBERS[key] for j, i in enumerate(layers) if i in own]
        elif key == "kv_source_layers" and isinstance(value, list) and len(value) == old:
            new[key] = [_source(value, layers, j) for j in range(len(layers))]
        elif isinstance(value, list | tuple) and len(value) == old and not _OTHER.fullmatch(key):
            new[key] = [value[i] for i in layers]
        elif key in _TEXTS and isinstance(value, str) and len(value) == old:
            new[key] = "".join(value[i] for i in layers)
    if "attention_types" in config and isinstance(new.get("attention_layers"), list):
        # GPT-Neo reads only this entry, and derives the other one from it.
        new["attention_types"] = [[new["attention_layers"], 1]]
    for schedule in SCHEDULES:
        if any(config.get(key) is not None for key in schedule.keys):
            new |= _fitted(schedule, config, new, old, layers)
    if _number(config, "num_kv_shared_layers"):
        _check_shared(config, new, old, layers)
    return new


def _fitted(
    schedule: Schedule, config: Config, new: Config, old: int, layers: Sequence[int]
) -> dict[str, Any]:
    """Returns the entries of a schedule that state the kinds of layers in their new order."""
    kinds = [schedule.kind(config, i, old) for i in range(old)]
    wanted, n = [kinds[i] for i in layers], len(layers)

    def states(entries: Mapping[str, Any]) -> bool:
        tried = {**new, **entries}
        return all(schedule.kind(tried, j, n) == wanted[j] for j in range(n))

    for entries in _tries(schedule, config, wanted):
        if states(entries):
            return dict(entries)
    if schedule.listed not in schedule.keys and config.get(schedule.listed):
        return {}  # the list has been moved, and the numbers have no effect
    if schedule.names is not None:
        return {schedule.listed: [schedule.names(kind, config) for kind in wanted]}
    stated = ", ".join(f"{key!r} {config[key]!r}" for key in schedule.keys if key in config)
    raise ValueError(f"config.json cannot state the layers in their new order: {stated}")


def _tries(schedule: Schedule, config: Config, wanted: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yields candidate entries, those of the configuration first."""
    yield {}
    yes = [j for j, kind in enumerate(wanted) if kind is True]
    if schedule.kind is _qwen:
        yield {
            "mlp_only_layers": [j for j in range(len(wanted)) if not wanted[j]],
            "decoder_sparse_step": 1,
        }
    ends = {key.replace("end", "start"): key for key in schedule.keys if "end" in key}
    for start, end in ends.items() if yes else ():
        # Ernie's last layer is one of those with experts.
        yield {start: yes[0], end: yes[-1] + (schedule.kind is not _ernie)}
    for key in schedule.keys:
        if type(config.get(key)) is int:
            yield from ({key: value} for value in range(len(wanted) + 2))


def _source(sources: Sequence[int], layers: Sequence[int], j: int) -> int:
    """Returns the layer from which layer j takes its keys and values, in the new order."""
    own = sources[layers[j]]
    if own == layers[j]:
        return j
    before = [k for k in range(j) if layers[k] == own]
    if not before:
        raise ValueError(
            "config.json cannot state the layers in their new order: 'kv_source_layers' of layer "
            f"{layers[j]} is layer {own}, which does not come before it"
        )
    return before[-1]


def _check_shared(config: Config, new: Config, old: int, layers: Sequence[int]) -> None:
    """Checks that layers share the keys and values of the same layer as before."""

    def source(part: Config, i: int, n: int) -> int:
        """Returns the last layer of the same kind that does not share."""
        kinds = part.get("layer_types") or [""] * n
        own = range(n - _number(part, "num_kv_shared_layers"))
        return i if i in own else max((k for k in own if kinds[k] == kinds[i]), default=-1)

    for j, i in enumerate(layers):
        found = source(new, j, len(layers))
        if (layers[found] if found >= 0 else -1) != source(config, i, old):
            raise ValueError(
                "config.json cannot state the layers in their new order: 'num_kv_shared_layers' "
                f"{config['num_kv_shared_layers']}, as layer {i} shared with another layer"
            )
