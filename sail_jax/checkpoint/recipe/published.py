"""Keys without effect that recipes may have, because mergekit 0.1.5 ignores them, too.

mergekit ignores every key that a mapping does not read, and every parameter that the method does
not read. Here such a word gives a note if mergekit has it elsewhere: as a key of one of its
mappings (`KEYS`) or as a parameter of one of its methods (`PARAMETERS`). Any other word is an
error, since it may be a typing error. `mergekit.MERGEKIT` lists the parameters of each method.
"""

import difflib
from collections.abc import Collection

from sail_jax.checks import nearest

KEYS = {
    "at the top": (
        *("merge_method", "models", "slices", "modules", "base_model", "parameters", "dtype"),
        *("out_dtype", "tokenizer_source", "tokenizer", "chat_template", "name"),
    ),
    "in a module": ("models", "slices", "parameters"),
    "in a slice": ("sources", "base_model", "parameters"),
    "in a source": ("model", "layer_range", "parameters"),
    "in model: {model: ...}": ("model", "lora"),
    "in model: {model: {path: ...}}": ("path", "revision"),
    "in a condition": ("value", "filter"),
    "in tokenizer": ("source", "tokens", "pad_to_multiple_of"),
    "in tokenizer.tokens": ("source", "force"),
    "in the source of a token": ("kind", "model", "token", "token_id"),
}
"""The keys of mergekit's mappings, by the place where they are read."""

OF_MIXTURES = ("gate_mode", "experts", "experts_per_token", "shared_experts")
"""Keys that only mergekit-moe's files have."""

PARAMETERS = (
    *("alpha", "density", "eps", "epsilon", "filter_wise", "gamma", "int8_mask", "lambda"),
    *("max_iter", "normalize", "normalize_weights", "nuslerp_flatten", "nuslerp_row_wise", "r"),
    *("rescale", "scale", "select_topk", "t", "tol", "weight"),
)
"""The parameters of mergekit's methods."""

_READ_BY_NONE = ("int_space", "override_architecture", "residual_weight")
"""Words in published recipes that no program reads. Tensors are matched by name here, whatever the
architecture is called.
"""


def without_effect(word: str, here: str, *, of_method: bool = False) -> str | None:
    """Explains why a word has no effect in a place, if recipes may have it there.

    Args:
      word: A key, or the name of a parameter.
      here: The place, in words.
      of_method: Whether it is one of a method's parameters. Then its place is right, but the method
        does not read it.

    Returns:
      A sentence with the place where mergekit reads the word; None if the word is unknown.

    >>> without_effect("pad_to_multiple_of", "at the top")
    'pad_to_multiple_of has no effect at the top; it belongs in tokenizer'
    >>> without_effect("t", "under ties", of_method=True)
    't has no effect under ties'
    >>> without_effect("wieght", "under ties", of_method=True)
    """
    places = _places(word)
    if not places and word not in _READ_BY_NONE:
        return None
    in_place = of_method and word in PARAMETERS
    remedy = f"; it belongs {' or '.join(places)}" if places and not in_place else ""
    return f"{word} has no effect {here}{remedy}"


def nearest_word(word: str, keys: Collection[str]) -> str:
    """Suggests the nearest known word for an unknown one, for a message.

    Args:
      word: A key of a mapping, unknown everywhere.
      keys: The keys that the mapping has.

    Returns:
      A text in brackets, as from `checks.nearest`. If the nearest word belongs in another place,
      the text contains this place.

    >>> nearest_word("wieght", ["models", "seed"])
    " (nearest: 'weight', which belongs in parameters)"
    >>> nearest_word("modles", ["models", "seed"])
    " (nearest: 'models')"
    """
    words = [*(w for known in KEYS.values() for w in known), *PARAMETERS]
    # Stricter than `nearest`: a word of another place is a guess about the place, too.
    own, near = (
        difflib.get_close_matches(word[:100], among, n=1, cutoff=0.75) for among in (keys, words)
    )
    if own or not near:
        return nearest(word, keys)
    return f" (nearest: {near[0]!r}, which belongs {' or '.join(_places(near[0]))})"


def _places(word: str) -> list[str]:
    """The places where mergekit reads a word; empty if it reads it nowhere."""
    places = [place for place, keys in KEYS.items() if word in keys]
    return ["in parameters"] if word in PARAMETERS else places
