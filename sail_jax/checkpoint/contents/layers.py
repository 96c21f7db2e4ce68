"""Reads layer numbers and vocabulary roles from tensor names, without a list of architectures.

A *stack* is the name before the first layer number: `model.layers` in
`model.layers.12.mlp.up_proj.weight`, `h` in `h/3/attn/kernel`, `Block` in `Block_3/Dense_0/kernel`.
Only components called (or ending in) layer(s), block(s), resblocks or h count. So numbered parts
inside a block (experts) or outside the stack (projectors) are not counted as layers.
"""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

Role = Literal["embedding", "head", ""]

_LAYER = re.compile(
    r"(?P<stack>(?:|.*?[./])(?:[A-Za-z_]*(?:[Ll]ayers?|[Bb]locks?)|h))(?P<joint>[./_])"
    r"(?P<index>\d+)(?P<rest>$|[./].*)",
    re.DOTALL,
)
_EMBEDDING = re.compile(
    r"(?:^|[./])(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|shared|"
    r"token_embedd(?:ing|er)|embedder|backbone[./]embeddings)[./](?:weight|embedding|input_embedding)$"
)
_HEAD = re.compile(
    r"(?:^|[./])(?:(?:generator_)?lm_head|embed_out|output_layer|vocab_projector|"
    r"lm_head[./](?:linear|decoder)|predictions[./]decoder)[./](?:weight|bias)$|"
    r"^output\.weight$|(?:^|\.)predictions\.bias$"
)
_EARLY = re.compile(r"emb|wte|wpe|(?:^|[./])(?:shared|patch|stem|conv1|class_token|cls_token)")


class Position(NamedTuple):
    """A tensor's position in a stack of layers.

    The parts, joined again, are the tensor's name.

    Attributes:
      stack: The name up to the layer's number, such as "model.layers".
      joint: The text between the stack and the number: ".", "/" or "_".
      index: The number of the layer, from 0.
      rest: The name of the tensor within the layer, such as ".mlp.up_proj.weight".
    """

    stack: str
    joint: str
    index: int
    rest: str

    def at(self, index: int) -> str:
        """Returns the name of the same tensor in another layer."""
        return f"{self.stack}{self.joint}{index}{self.rest}"


def position(name: str) -> Position | None:
    """Finds a tensor's position in a stack of layers.

    Args:
      name: The name of the tensor, with dots or slashes.

    Returns:
      Its position; None outside the layers.

    >>> position("model.layers.12.mlp.experts.3.w1.weight")
    Position(stack='model.layers', joint='.', index=12, rest='.mlp.experts.3.w1.weight')
    >>> position("layers.1.weight").at(7), position("visual.merger.mlp.0.weight")
    ('layers.7.weight', None)
    """
    match = _LAYER.match(name)
    # A layer's number has at most nine digits, and `stacks` would count that many layers.
    if match is None or len(match["index"]) > 9:
        return None
    return Position(match["stack"], match["joint"], int(match["index"]), match["rest"])


def stacks(names: Iterable[str]) -> dict[str, int]:
    """Counts the layers of every stack: its largest index plus one.

    Args:
      names: Names of tensors.

    Returns:
      The number of layers by stack, in the order of first mention.

    >>> stacks(["enc.layers.0.w", "enc.layers.1.w", "dec.layers.0.w", "norm.w"])
    {'enc.layers': 2, 'dec.layers': 1}
    """
    depths: dict[str, int] = {}
    for place in map(position, names):
        if place is not None:
            depths[place.stack] = max(depths.get(place.stack, 0), place.index + 1)
    return depths


def role(name: str) -> Role:
    """Checks whether the rows (axis 0) of a tensor belong to input tokens or output tokens.

    Args:
      name: The name of the tensor.

    Returns:
      "embedding" for input tokens, "head" for output tokens (a weight or a bias), else "".

    >>> role("model.embed_tokens.weight"), role("lm_head.weight"), role("model.norm.weight")
    ('embedding', 'head', '')
    """
    return "embedding" if _EMBEDDING.search(name) else "head" if _HEAD.search(name) else ""


def is_early(name: str) -> bool:
    """Checks whether a tensor outside the layers comes before them, as embeddings do.

    Args:
      name: The name of the tensor.

    Returns:
      True if it comes before the layers, False if after them, as the last norm and the head do.

    >>> is_early("transformer.wpe.weight"), is_early("lm_head.weight")
    (True, False)
    """
    return role(name) != "head" and _EARLY.search(name) is not None
