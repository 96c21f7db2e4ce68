"""Entries of a network's config.json, and differences between two configurations."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

Config = Mapping[str, Any]

EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps")
"""Entries that state the epsilon of a norm."""
LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""Entries that count the layers of a network."""
CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
"""Model types with Conv1D modules, for which transformers stores weights as [in, out]."""

# Entries that determine the function of the tensors. If an entry is missing, the architecture has a
# default, so a target that states the entry may define another function.
KEPT_ENTRIES = (
    *EPSILONS,
    *("vocab_size", "n_positions", "hidden_act", "activation_function", "feed_forward_proj"),
    *("rope_theta", "rope_scaling", "rope_parameters", "sliding_window"),
    *("use_sliding_window", "max_window_layers", "scale_attn_weights"),
    *("scale_attn_by_inverse_layer_idx", "relative_attention_num_buckets"),
    *("relative_attention_max_distance", "scale_decoder_outputs", "pad_token_id"),
    *("type_vocab_size", "image_size", "patch_size", "num_channels"),
)

# Entries that may differ: they only affect training, generation or files, or are compared elsewhere
# (layer_types, model_type).
_FREE_ENTRIES = re.compile(
    r"(.*\.)?(_.*|.*drop.*|.*initializer.*|(torch_)?dtype|transformers_version|use_cache|(id2label|label2id)(\..*)?"
    r"|(bos|eos|sep|cls|mask|decoder_start)_token_id|problem_type|gradient_checkpointing"
    r"|return_dict|output_\w+|task_specific_params|summary_\w+|max_length|pretraining_tp"
    r"|n_ctx|layer_types|model_type|logit_scale_init_value|auto_map)"
)


def look_up(config: Mapping[str, Any], key: str) -> Any:
    """Returns an entry of a configuration, or of its text tower.

    Args:
      config: The content of config.json.
      key: The name of the entry.

    Returns:
      The entry; None if it is missing in both.
    """
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and key in part:
            return part[key]
    return None


def class_of(config: Config) -> str:
    """Returns the class of a network from its configuration.

    Args:
      config: The content of config.json.

    Returns:
      The first entry of `architectures`; "" without one.
    """
    named = config.get("architectures")
    first = named[0] if isinstance(named, list | tuple) and named else ""
    return first if isinstance(first, str) else ""


def differences(first: Config, second: Config) -> dict[str, tuple[Any, Any]]:
    """Lists entries for which two configurations may define different functions of the same
    tensors.

    Entries for training, generation or files do not count. An entry that only `second` states
    counts if `first` has a default for it. An entry that only `first` states does not count.

    Args:
      first: A configuration.
      second: Another configuration.

    Returns:
      Both values, by the dotted key of the entry; None if `first` does not state it.
    """
    flat_first, flat_second = dict(_entries(first)), dict(_entries(second))
    out = {}
    for key in dict.fromkeys([*flat_first, *flat_second]):
        a, b = flat_first.get(key), flat_second.get(key)
        said = a is not None and b is not None
        # An entry counts by its full key, by its group (rope_scaling.factor), or by its last name
        # (text_config.vocab_size).
        kept = {key, key.split(".")[0], key.rpartition(".")[2]} & {*KEPT_ENTRIES}
        if a != b and not _FREE_ENTRIES.fullmatch(key) and (said or (kept and b is not None)):
            out[key] = a, b
    return out


def _entries(config: Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Returns the entries of a configuration by dotted key."""
    for key, value in config.items():
        # Newer configurations use this name for entries that older ones state at the top level and
        # under rope_scaling.
        if key == "rope_parameters" and isinstance(value, Mapping):
            rope = dict(value)
            if rope.get("rope_type") == "default":
                del rope["rope_type"]
            if "rope_theta" in rope:
                yield f"{prefix}rope_theta", rope.pop("rope_theta")
            yield from _entries(rope, f"{prefix}rope_scaling.")
        elif isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{key}.")
        else:
            # JSON has no tuples, but a configuration read from a file must equal the one that was
            # written.
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value
