"""The words of mergekit 0.1.5, and the positions where it reads them.

mergekit ignores every key that a mapping does not read, and every parameter that the method does
not read. Here such a word causes a note, which states where it belongs if mergekit reads it
elsewhere. A word that is one typo away from a valid one is an error. `mergekit.MERGEKIT` lists the
parameters of each method.
"""

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


def without_effect(word: str, here: str, *, of_method: bool = False) -> str:
    """Explains that a word has no effect at its position, and where it belongs.

    Args:
      word: A key, or the name of a parameter.
      here: The position, in words.
      of_method: Whether it is one of a method's parameters. In that case its position is valid, but
        the method does not read it.

    Returns:
      A sentence, with the position where mergekit reads the word if there is one.

    >>> without_effect("pad_to_multiple_of", "at the top")
    'pad_to_multiple_of has no effect at the top; it belongs in tokenizer'
    >>> without_effect("t", "under ties", of_method=True)
    't has no effect under ties'
    >>> without_effect("smooth", "under ties", of_method=True)
    'smooth has no effect under ties'
    """
    places = _places(word)
    in_place = of_method and word in PARAMETERS
    remedy = f"; it belongs {' or '.join(places)}" if places and not in_place else ""
    return f"{word} has no effect {here}{remedy}"


def _places(word: str) -> list[str]:
    """Returns the positions where mergekit reads a word; empty if there are none."""
    places = [place for place, keys in KEYS.items() if word in keys]
    return ["in parameters"] if word in PARAMETERS else places
