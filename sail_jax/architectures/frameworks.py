"""Tables for the parameter trees of MaxText and Tunix: spaces of axes, and names at Hugging Face.

A row has one kind of leaf: its path in a layer, the tensors of Hugging Face that it holds, how the
axes of one such tensor become those of the leaf, and the spaces of the leaf. Both the specs here
and the conversions of `sail_jax.interop.layouts` are read from these rows.

Axes are letters, as in einops: `e` stream, `f` hidden units of the MLP, `h` heads of queries, `k`
heads of keys and values, `d` units of a head, `v` vocabulary. The units of a rotated head are
(p j) at Hugging Face, the first halves of all pairs and then the second halves, and (j p) where
pairs lie side by side.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from sail_jax.architectures.detect import architecture
from sail_jax.architectures.table import Config, Rules, flag, pairs, setting
from sail_jax.checks import nearest
from sail_jax.trees import leaf_paths

__all__ = ["FAMILIES", "Place", "Row", "maxtext", "of_tree", "places", "rows", "tunix"]


class Row(NamedTuple):
    """One kind of leaf.

    Attributes:
      leaf: Its path inside of a layer, or inside of the tree.
      tensors: The names of the tensors that it holds, inside of a layer or of the model. Several
        are stacked on a new first axis.
      layout: How the axes of each tensor become those of the leaf, as in "(h d) e -> e h d".
      axes: The spaces of the leaf's axes, as `sail_jax.basis.axes` defines them.
      optional: Whether trees may lack it.
    """

    leaf: str
    tensors: tuple[str, ...]
    layout: str
    axes: str
    optional: bool = False


class Place(NamedTuple):
    """Where some layers lie in a tree.

    Attributes:
      folder: The path of a layer, with `{i}` for what tells such layers apart.
      suffix: What the first name of a leaf's path has at its end.
      tag: What the names of inner spaces have at their end.
      stacked: Whether several layers are stacked on one axis.
    """

    folder: str
    suffix: str
    tag: str
    stacked: bool

    def path(self, leaf: str) -> str:
        """Writes the path of a leaf.

        Args:
          leaf: Its path inside of a layer.

        Returns:
          Its path inside of the tree, with `{i}`.

        >>> Place("decoder/layers_{i}/", "_local", "", False).path("mlp/wo/kernel")
        'decoder/layers_{i}/mlp_local/wo/kernel'
        """
        first, _, rest = leaf.partition("/")
        return f"{self.folder}{first}{self.suffix}/{rest}"


# The decoders of each framework, and which of the tables below are theirs, by the model types of
# Hugging Face.
FAMILIES = {
    "maxtext": {
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "llama"),
        **{"gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3"},
    },
    "tunix": {
        **dict.fromkeys(("llama", "qwen2", "qwen3"), "llama"),
        **{"gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3"},
    },
}

_NORM = "e -> e", "diag(resid)"


def _row(leaf: str, tensors: str, layout: str, axes: str) -> Row:
    """A row, whose leaf is optional if a "?" stands in front of it."""
    return Row(leaf.removeprefix("?"), tuple(tensors.split()), layout, axes, leaf[0] == "?")


_MAXTEXT_BLOCK = (
    _row("self_attention/query/kernel", "self_attn.q_proj.weight", "(h d) e -> e h d", "resid* (head group) qk"),
    _row("self_attention/key/kernel", "self_attn.k_proj.weight", "(k d) e -> e k d", "resid* head qk*"),
    _row("self_attention/value/kernel", "self_attn.v_proj.weight", "(k d) e -> e k d", "resid* head v"),
    _row("self_attention/out/kernel", "self_attn.o_proj.weight", "e (h d) -> h d e", "(head group)* v* resid"),
    _row("?self_attention/query/bias", "self_attn.q_proj.bias", "(h d) -> h d", "(head group) qk"),
    _row("?self_attention/key/bias", "self_attn.k_proj.bias", "(k d) -> k d", "head qk*"),
    _row("?self_attention/value/bias", "self_attn.v_proj.bias", "(k d) -> k d", "head v"),
    _row("?self_attention/query_norm/scale", "self_attn.q_norm.weight", "d -> d", "diag(qk)"),
    _row("?self_attention/key_norm/scale", "self_attn.k_norm.weight", "d -> d", "diag(qk)"),
    _row("mlp/wi_0/kernel", "mlp.gate_proj.weight", "f e -> e f", "resid* hidden"),
    _row("mlp/wi_1/kernel", "mlp.up_proj.weight", "f e -> e f", "resid* hidden"),
    _row("mlp/wo/kernel", "mlp.down_proj.weight", "e f -> f e", "hidden* resid"),
)  # fmt: skip
_MAXTEXT_ENDS = (
    _row("token_embedder/embedding", "model.embed_tokens.weight", "v e -> v e", "vocab* resid"),
    _row("decoder/decoder_norm/scale", "model.norm.weight", *_NORM),
    _row("?decoder/logits_dense/kernel", "lm_head.weight", "v e -> e v", "resid* vocab"),
)
_TUNIX_MLP = (
    _row("mlp/gate_proj/kernel", "mlp.gate_proj.weight", "f e -> e f", "resid* hidden"),
    _row("mlp/up_proj/kernel", "mlp.up_proj.weight", "f e -> e f", "resid* hidden"),
    _row("mlp/down_proj/kernel", "mlp.down_proj.weight", "e f -> f e", "hidden* resid"),
)
_TUNIX_LLAMA = (
    _row("attn/q_proj/w", "self_attn.q_proj.weight", "(h d) e -> e h d", "resid* (head group) qk"),
    _row("attn/k_proj/w", "self_attn.k_proj.weight", "(k d) e -> e k d", "resid* head qk*"),
    _row("attn/v_proj/w", "self_attn.v_proj.weight", "(k d) e -> e k d", "resid* head v"),
    _row("attn/o_proj/w", "self_attn.o_proj.weight", "e (h d) -> h d e", "(head group)* v* resid"),
    _row("?attn/q_bias", "self_attn.q_proj.bias", "(h d) -> (h d)", "(head group qk)"),
    _row("?attn/k_bias", "self_attn.k_proj.bias", "(k d) -> (k d)", "(head qk*)"),
    _row("?attn/v_bias", "self_attn.v_proj.bias", "(k d) -> (k d)", "(head v)"),
    _row("?attn/q_norm/w", "self_attn.q_norm.weight", "d -> d", "diag(qk)"),
    _row("?attn/k_norm/w", "self_attn.k_norm.weight", "d -> d", "diag(qk)"),
    *_TUNIX_MLP,
    _row("input_layernorm/w", "input_layernorm.weight", *_NORM),
    _row("post_attention_layernorm/w", "post_attention_layernorm.weight", *_NORM),
)
# Keys and values share an array, with a space each on its last axis. What cannot be told from the
# other is in no space.
_K_V = "self_attn.k_proj.weight self_attn.v_proj.weight"
_TUNIX_GEMMA = (
    _row("?attn/qkv_einsum/w", f"self_attn.q_proj.weight {_K_V}", "(k d) e -> k e d", "_ head resid* _"),
    _row("?attn/q_einsum/w", "self_attn.q_proj.weight", "(h d) e -> h e d", "(head group) resid* _"),
    _row("?attn/kv_einsum/w", _K_V, "(k d) e -> k e d", "_ head resid* _"),
    _row("attn/attn_vec_einsum/w", "self_attn.o_proj.weight", "e (h d) -> h d e", "(head group)* _ resid"),
    _row("?attn/_query_norm/scale", "self_attn.q_norm.weight", "d -> d", "_"),
    _row("?attn/_key_norm/scale", "self_attn.k_norm.weight", "d -> d", "_"),
    *_TUNIX_MLP,
)  # fmt: skip


def _norms(names: str, leaf: str = "{}/scale") -> tuple[Row, ...]:
    """The rows of norms, from pairs of their names in a tree and at Hugging Face."""
    words = names.split()
    both = zip(words[::2], words[1::2], strict=True)
    return tuple(_row(leaf.format(ours), f"{theirs}.weight", *_NORM) for ours, theirs in both)


_PRE, _POST = "pre_self_attention_norm", "post_self_attention_norm"
_AROUND = "pre_ffw_norm pre_feedforward_layernorm post_ffw_norm post_feedforward_layernorm"
_LAYERS = {
    "maxtext": {
        "llama": _MAXTEXT_BLOCK + _norms(
            "pre_self_attention_layer_norm input_layernorm "
            "post_self_attention_layer_norm post_attention_layernorm"
        ),
        "gemma": _MAXTEXT_BLOCK
        + _norms(f"{_PRE} input_layernorm pre_ffw_norm post_attention_layernorm"),
        "gemma2": _MAXTEXT_BLOCK
        + _norms(f"{_PRE} input_layernorm {_POST} post_attention_layernorm {_AROUND}"),
    },
    "tunix": {
        "llama": _TUNIX_LLAMA,
        "gemma": _TUNIX_GEMMA
        + _norms("pre_attention_norm input_layernorm pre_ffw_norm post_attention_layernorm"),
        "gemma2": _TUNIX_GEMMA + _norms(
            f"pre_attention_norm input_layernorm post_attn_norm post_attention_layernorm {_AROUND}"
        ),
        "gemma3": _TUNIX_GEMMA + _norms(
            "pre_attention_norm input_layernorm "
            f"post_attention_norm post_attention_layernorm {_AROUND}"
        ),
    },
}  # fmt: skip
_LAYERS["maxtext"]["gemma3"] = _LAYERS["maxtext"]["gemma2"]
# Gemma 3 has five layers that attend nearby for one that attends to everything.
GEMMA3_PATTERN = 6


def rows(framework: str, family: str) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Returns the rows of a family of trees.

    Args:
      framework: "maxtext" or "tunix".
      family: One of the values of `FAMILIES`.

    Returns:
      The rows of a layer, and those of leaves outside of layers.
    """
    ends = _MAXTEXT_ENDS
    if framework == "tunix":
        norm = "final_norm/w" if family == "llama" else "final_norm/scale"
        ends = (
            _row("embedder/input_embedding", *ends[0].tensors, *ends[0][2:4]),
            _row(norm, *ends[1].tensors, *_NORM),
            _row("?lm_head/w", *ends[2].tensors, *ends[2][2:4]),
        )
    return _LAYERS[framework][family], ends


def places(framework: str, family: str, scanned: bool) -> tuple[Place, ...]:
    """Returns where the layers of a family of trees lie.

    Args:
      framework: "maxtext" or "tunix".
      family: One of the values of `FAMILIES`.
      scanned: Whether layers are stacked.

    Returns:
      The places.
    """
    if framework == "tunix":
        return (Place("layers/{i}/", "", ".{i}", False),)
    if family == "gemma2":
        # A layer of MaxText is two here: one attends nearby, one to everything.
        kinds = "local", "global"
        if scanned:
            return tuple(Place("decoder/layers/", f"_{k}", f".{k}", True) for k in kinds)
        return tuple(Place("decoder/layers_{i}/", f"_{k}", f".{{i}}.{k}", False) for k in kinds)
    if not scanned:
        return (Place("decoder/layers_{i}/", "", ".{i}", False),)
    if family == "gemma3":
        return (
            Place("decoder/layers/layers_{i}/", "", ".{i}", True),
            Place("decoder/layers_remainder/layers_{i}/", "", ".remainder.{i}", False),
        )
    return (Place("decoder/layers/", "", "", True),)


_INNER = {
    "head": "odd",
    "group": "elementwise",
    # Rotary positions tell the units of a query apart.
    "qk": "outer",
    "v": "linear",
    "hidden": "elementwise",
}


def _rules(framework: str, family: str, scanned: bool, axis: int, tied: bool) -> Rules:
    """The rules of a family of trees."""
    block, (embedding, *ends) = rows(framework, family)
    table = {f"**{embedding.leaf}": f"{embedding.axes}{' | vocab resid*' if tied else ''}"}
    spaces = {"resid": "rmsnorm", "vocab": "outer", "layer": "stack", "layer.{i}": "stack"}
    for row in ends:
        table[f"{'?' if row.optional else ''}**{row.leaf}"] = row.axes
    for place in places(framework, family, scanned):
        # The last layers of Gemma 3 are there only if its pattern does not divide their number, and
        # the stack only if there are that many.
        rare = len(places(framework, family, scanned)) > 1 and family == "gemma3"
        spaces |= {f"{name}{place.tag}": word for name, word in _INNER.items()}
        for row in block:
            names = "|".join(_INNER)
            axes = re.sub(rf"\b({names})\b", lambda m, tag=place.tag: m[0] + tag, row.axes)
            if place.stacked:
                words = re.findall(r"(?:\w*\([^)]*\)|[\w.{}]+)\*?", axes)
                stack = "layer.{i}" if "{i}" in place.tag else "layer"
                axes = " ".join([*words[:axis], stack, *words[axis:]])
            table[f"{'?' if row.optional or rare else ''}**{place.path(row.leaf)}"] = axes
    axes, optional = pairs(table)
    return Rules(axes, spaces, {}, optional)


@architecture()
def maxtext(config: Config) -> Rules:
    """Gives the rules of the trees of MaxText's decoders, with or without scanned layers.

    Spaces inside of stacked layers are shared by these: `align` can match each layer by itself, with
    `within={"hidden": "layer", ...}`.

    Args:
      config: A configuration with entries that MaxText's own has: `decoder_block` ("llama2", also
        for Llama 3; "mistral", "qwen2", "qwen3", "gemma", "gemma2" or "gemma3"). It may have
        `scan_layers` (true where not stated), `param_scan_axis` (1) and `logits_via_embedding`
        (false).

    Returns:
      The rules. They state no entries of a configuration, so that growth takes new sizes by the
      names of spaces.

    Raises:
      ValueError: If an entry is missing or not of its kind.

    >>> rules = maxtext({"decoder_block": "llama2"})
    >>> dict(rules.axes)["**decoder/layers/mlp/wo/kernel"]
    'hidden* layer resid'
    """
    names = {"llama2": "llama", "gemma3": "gemma3_text"}
    known = {"llama2", "gemma3", *FAMILIES["maxtext"]} - {"llama", "gemma3_text"}
    block = setting(config, "decoder_block")
    if block not in known:
        raise ValueError(
            f"the configuration's 'decoder_block' must be one of {', '.join(sorted(known))}, got "
            f"{block!r}{nearest(str(block), known)}"
        )
    axis = setting(config, "param_scan_axis", default=1)
    if axis not in (0, 1) or isinstance(axis, bool):
        raise ValueError(f"the configuration's 'param_scan_axis' must be 0 or 1, got {axis!r}")
    family = FAMILIES["maxtext"][names.get(block, block)]
    scanned = flag(config, "scan_layers", default=True)
    return _rules(
        "maxtext", family, scanned, axis, flag(config, "logits_via_embedding", default=False)
    )


@architecture()
def tunix(config: Config) -> Rules:
    """Gives the rules of the trees of Tunix's decoders.

    Args:
      config: A configuration with `decoder`: "llama3", "qwen2", "qwen3", "gemma", "gemma2" or
        "gemma3". It may have `use_tied_embedding` (false where not stated; Gemma's is always tied).

    Returns:
      The rules. They state no entries of a configuration, so that growth takes new sizes by the
      names of spaces.

    Raises:
      ValueError: If an entry is missing or not of its kind.

    >>> rules = tunix({"decoder": "gemma"})
    >>> dict(rules.axes)["**embedder/input_embedding"]
    'vocab* resid | vocab resid*'
    """
    names = {"llama3": "llama", "gemma3": "gemma3_text"}
    known = {"llama3", "gemma3", *FAMILIES["tunix"]} - {"llama", "gemma3_text"}
    decoder = setting(config, "decoder")
    if decoder not in known:
        raise ValueError(
            f"the configuration's 'decoder' must be one of {', '.join(sorted(known))}, got "
            f"{decoder!r}{nearest(str(decoder), known)}"
        )
    family = FAMILIES["tunix"][names.get(decoder, decoder)]
    tied = family != "llama" or flag(config, "use_tied_embedding", default=False)
    return _rules("tunix", family, False, 0, tied)


def of_tree(params: PyTree) -> dict[str, Any] | None:
    """Recognises the tree of a framework by its paths and shapes.

    Args:
      params: The parameters, as arrays or ShapeDtypeStructs.

    Returns:
      The configuration of `maxtext` or `tunix` that fits the tree, with `model_type`; None if the
      tree is another.

    Raises:
      ValueError: If layers are stacked and both of the first axes have as many entries as there are
        units in the stream.

    >>> tree = {"decoder": {"layers_0": {"mlp": {"wo": {"kernel": jax.numpy.ones((4, 2))}}}}}
    >>> of_tree(tree) is None
    True
    """
    shapes = {p: x.shape for p, x in zip(leaf_paths(params), jax.tree.leaves(params), strict=True)}
    return recognised(shapes)


def recognised(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any] | None:
    """Recognises the tree of a framework, as `of_tree` does, from shapes by path."""
    paths = list(shapes)

    def first(pattern: str) -> str | None:
        return next(_matching(paths, pattern), None)

    if first(r"embedder/input_embedding") and first(r"layers/\d+/mlp/down_proj/kernel"):
        if first(r"layers/\d+/attn/q_proj/w"):
            norm = first(r"layers/\d+/attn/q_norm/w")
            decoder = "qwen3" if norm else "qwen2" if first(r"layers/\d+/attn/q_bias") else "llama3"
            tied = first(r"lm_head/w") is None
            return {"model_type": "tunix", "decoder": decoder, "use_tied_embedding": tied}
        if first(r"layers/\d+/attn/attn_vec_einsum/w"):
            post = first(r"layers/\d+/post_attn_norm/scale")
            gemma3 = first(r"layers/\d+/post_attention_norm/scale")
            decoder = "gemma3" if gemma3 else "gemma2" if post else "gemma"
            return {"model_type": "tunix", "decoder": decoder}
        return None
    stream, layer = first(r"decoder/decoder_norm/scale"), r"decoder/layers(?:_\d+|/layers_\d+)?/"
    if not stream or not first(r"token_embedder/embedding"):
        return None
    kinds = (
        ("gemma3", "post_ffw_norm/scale"),
        ("gemma2", "pre_ffw_norm_local/scale"),
        ("gemma", "pre_ffw_norm/scale"),
        ("qwen3", "self_attention/query_norm/scale"),
        ("qwen2", "self_attention/query/bias"),
        ("llama2", "mlp/wi_0/kernel"),
    )
    block = next((name for name, leaf in kinds if first(layer + leaf)), None)
    if block is None:
        return None
    config: dict[str, Any] = {"model_type": "maxtext", "decoder_block": block}
    config["logits_via_embedding"] = first(r"decoder/logits_dense/kernel") is None
    norm = first(r"decoder/layers/(?:layers_\d+/)?pre_self_attention_(?:layer_)?norm\w*/scale")
    config["scan_layers"] = norm is not None or bool(first(r"decoder/layers_remainder/.*"))
    if norm is not None:
        shape, width = tuple(shapes[norm]), tuple(shapes[stream])[-1]
        if len(shape) != 2 or width not in shape:
            return None
        if shape[0] == shape[1]:
            raise ValueError(
                f"{norm!r} of shape {shape}: as many layers as units; give a configuration with "
                "'param_scan_axis', 0 or 1"
            )
        config["param_scan_axis"] = int(shape[0] == width)
    return config


def _matching(paths: Iterable[str], pattern: str) -> Iterator[str]:
    """The paths that end in a pattern, after a separator or nothing."""
    compiled = re.compile(rf"(?:.*/)?{pattern}(?:/value)?")
    return (path for path in paths if compiled.fullmatch(path))
