"""Tables for the parameter trees of MaxText and Tunix: spaces of axes, and Hugging Face names.

A row describes one kind of leaf: its path in a layer, its Hugging Face tensors, the rearrangement
of a tensor's axes to the leaf's, and the spaces of the leaf. Both the specs here and the
conversions of `sail_jax.interop.layouts` use these rows.

Axes are letters, as in einops: `e` stream, `f` hidden units of the MLP, `h` query heads, `k` heads
of keys and values, `d` units of a head, `v` vocabulary. The units of a rotated head are ordered
(p j) at Hugging Face: the first halves of all pairs, then the second halves. Where pairs are
adjacent, the order is (j p).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from sail_jax.architectures.detect import architecture
from sail_jax.architectures.table import Config, Rules, flag, pairs, setting
from sail_jax.checks import integer, one_of
from sail_jax.trees import leaf_paths


class Row(NamedTuple):
    """One kind of leaf.

    Attributes:
      leaf: Its path inside a layer, or inside the tree.
      tensors: The names of the tensors that it contains, inside a layer or the model. Several
        tensors are stacked on a new first axis.
      layout: The rearrangement of each tensor's axes to the leaf's, as in "(h d) e -> e h d".
      axes: The spaces of the leaf's axes, in the notation of `sail_jax.basis.axes`.
      optional: Whether it may be missing in a tree.
    """

    leaf: str
    tensors: tuple[str, ...]
    layout: str
    axes: str
    optional: bool = False


class Place(NamedTuple):
    """The position of some layers in a tree.

    Attributes:
      folder: The path of a layer, with `{i}` for the part that distinguishes such layers.
      suffix: The suffix of the first name in a leaf's path.
      tag: The suffix of the names of inner spaces.
      stacked: Whether several layers are stacked on one axis.
    """

    folder: str
    suffix: str
    tag: str
    stacked: bool

    def path(self, leaf: str) -> str:
        """Returns the path of a leaf.

        >>> Place("decoder/layers_{i}/", "_local", "", False).path("mlp/wo/kernel")
        'decoder/layers_{i}/mlp_local/wo/kernel'
        """
        first, _, rest = leaf.partition("/")
        return f"{self.folder}{first}{self.suffix}/{rest}"


# Each framework's names of its decoders, by the Hugging Face model types.
DECODERS = {
    "maxtext": {
        **{"llama": "llama2", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"},
        **{"gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3"},
    },
    "tunix": {
        **{"llama": "llama3", "qwen2": "qwen2", "qwen3": "qwen3"},
        **{"gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3"},
    },
}


def family_of(decoder: str) -> str:
    """Returns the table below that describes a framework's decoder.

    Args:
      decoder: One of the values of `DECODERS`.

    Returns:
      "llama", "gemma", "gemma2" or "gemma3".
    """
    return decoder if decoder.startswith("gemma") else "llama"


def _table(text: str) -> tuple[Row, ...]:
    """Parses rows: a leaf ("?" in front if optional), its tensors, the layout, and the spaces.

    Tensor names without the ending "bias" end in ".weight".
    """
    out = []
    for line in text.strip().splitlines():
        leaf, names, layout, axes = (cell.strip() for cell in line.split("|"))
        tensors = tuple(n if n.endswith("bias") else f"{n}.weight" for n in names.split())
        out.append(Row(leaf.removeprefix("?"), tensors, layout, axes, leaf[0] == "?"))
    return tuple(out)


_MAXTEXT_BLOCK = _table("""
    self_attention/query/kernel | self_attn.q_proj | (h d) e -> e h d | resid* (head group) qk
    self_attention/key/kernel | self_attn.k_proj | (k d) e -> e k d | resid* head qk*
    self_attention/value/kernel | self_attn.v_proj | (k d) e -> e k d | resid* head v
    self_attention/out/kernel | self_attn.o_proj | e (h d) -> h d e | (head group)* v* resid
    ?self_attention/query/bias | self_attn.q_proj.bias | (h d) -> h d | (head group) qk
    ?self_attention/key/bias | self_attn.k_proj.bias | (k d) -> k d | head qk*
    ?self_attention/value/bias | self_attn.v_proj.bias | (k d) -> k d | head v
    ?self_attention/query_norm/scale | self_attn.q_norm | d -> d | diag(qk)
    ?self_attention/key_norm/scale | self_attn.k_norm | d -> d | diag(qk)
    mlp/wi_0/kernel | mlp.gate_proj | f e -> e f | resid* hidden
    mlp/wi_1/kernel | mlp.up_proj | f e -> e f | resid* hidden
    mlp/wo/kernel | mlp.down_proj | e f -> f e | hidden* resid
""")
_MAXTEXT_ENDS = _table("""
    token_embedder/embedding     | model.embed_tokens | v e -> v e | vocab* resid
    decoder/decoder_norm/scale   | model.norm         | e -> e     | diag(resid)
    ?decoder/logits_dense/kernel | lm_head            | v e -> e v | resid* vocab
""")
_TUNIX_MLP = """
    mlp/gate_proj/kernel       | mlp.gate_proj         | f e -> e f       | resid* hidden
    mlp/up_proj/kernel         | mlp.up_proj           | f e -> e f       | resid* hidden
    mlp/down_proj/kernel       | mlp.down_proj         | e f -> f e       | hidden* resid
"""
_TUNIX_LLAMA = _table(
    """
    attn/q_proj/w              | self_attn.q_proj      | (h d) e -> e h d | resid* (head group) qk
    attn/k_proj/w              | self_attn.k_proj      | (k d) e -> e k d | resid* head qk*
    attn/v_proj/w              | self_attn.v_proj      | (k d) e -> e k d | resid* head v
    attn/o_proj/w              | self_attn.o_proj      | e (h d) -> h d e | (head group)* v* resid
    ?attn/q_bias               | self_attn.q_proj.bias | (h d) -> (h d)   | (head group qk)
    ?attn/k_bias               | self_attn.k_proj.bias | (k d) -> (k d)   | (head qk*)
    ?attn/v_bias               | self_attn.v_proj.bias | (k d) -> (k d)   | (head v)
    ?attn/q_norm/w             | self_attn.q_norm      | d -> d           | diag(qk)
    ?attn/k_norm/w             | self_attn.k_norm      | d -> d           | diag(qk)
    input_layernorm/w          | input_layernorm       | e -> e           | diag(resid)
    post_attention_layernorm/w | post_attention_layernorm | e -> e        | diag(resid)
"""
    + _TUNIX_MLP.lstrip("\n")
)
# Keys and values share an array, with one space each on its last axis. Axes that cannot be
# distinguished get no space.
_Q, _KV = "self_attn.q_proj", "self_attn.k_proj self_attn.v_proj"
_TUNIX_GEMMA = _table(
    f"""
    ?attn/qkv_einsum/w         | {_Q} {_KV}            | (k d) e -> k e d | _ head resid* _
    ?attn/q_einsum/w           | {_Q}                  | (h d) e -> h e d | (head group) resid* _
    ?attn/kv_einsum/w          | {_KV}                 | (k d) e -> k e d | _ head resid* _
    attn/attn_vec_einsum/w     | self_attn.o_proj      | e (h d) -> h d e | (head group)* _ resid
    ?attn/_query_norm/scale    | self_attn.q_norm      | d -> d           | _
    ?attn/_key_norm/scale      | self_attn.k_norm      | d -> d           | _
"""
    + _TUNIX_MLP.lstrip("\n")
)


def _norms(names: str) -> tuple[Row, ...]:
    """Makes the rows of norms, from pairs of their names in a tree and at Hugging Face."""
    words = names.split()
    both = zip(words[::2], words[1::2], strict=True)
    return _table("\n".join(f"{ours}/scale | {hf} | e -> e | diag(resid)" for ours, hf in both))


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
# Gemma 3 has five layers with local attention for each layer with global attention.
GEMMA3_PATTERN = 6


def rows(framework: str, family: str) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Returns the rows of a family of trees.

    Args:
      framework: "maxtext" or "tunix".
      family: The result of `family_of`.

    Returns:
      The rows of a layer, and the rows of leaves outside layers.
    """
    ends = _MAXTEXT_ENDS
    if framework == "tunix":
        norm = "final_norm/w" if family == "llama" else "final_norm/scale"
        names = "embedder/input_embedding", norm, "lm_head/w"
        ends = tuple(row._replace(leaf=leaf) for row, leaf in zip(ends, names, strict=True))
    return _LAYERS[framework][family], ends


def places(framework: str, family: str, scanned: bool) -> tuple[Place, ...]:
    """Returns the positions of the layers in a family of trees.

    Args:
      framework: "maxtext" or "tunix".
      family: The result of `family_of`.
      scanned: Whether layers are stacked.

    Returns:
      The positions.
    """
    if framework == "tunix":
        return (Place("layers/{i}/", "", ".{i}", False),)
    if family == "gemma2":
        # A MaxText layer is two layers here: one with local, one with global attention.
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
    # Rotary positions distinguish the units of a query.
    "qk": "outer",
    "v": "linear",
    "hidden": "elementwise",
}


def _rules(framework: str, family: str, scanned: bool, axis: int, tied: bool) -> Rules:
    """Makes the rules of a family of trees."""
    block, (embedding, *ends) = rows(framework, family)
    table = {f"**{embedding.leaf}": f"{embedding.axes}{' | vocab resid*' if tied else ''}"}
    spaces = {"resid": "rmsnorm", "vocab": "outer", "layer": "stack", "layer.{i}": "stack"}
    for row in ends:
        table[f"{'?' if row.optional else ''}**{row.leaf}"] = row.axes
    for place in places(framework, family, scanned):
        # The last layers of Gemma 3 exist only if its pattern does not divide their number, and the
        # stack exists only if there are enough layers.
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

    Stacked layers share their inner spaces. `sail_jax.align` can match each layer separately, with
    `within={"hidden": "layer", ...}`.

    Args:
      config: A configuration with MaxText's own entries: `decoder_block` ("llama2", also for Llama
        3; "mistral", "qwen2", "qwen3", "gemma", "gemma2" or "gemma3"). It may have `scan_layers`
        (default: true), `param_scan_axis` (default: 1) and `logits_via_embedding` (default: false).

    Returns:
      The rules. They contain no entries of a configuration: growth takes new sizes by the names of
      spaces.

    Raises:
      ValueError: If an entry is missing or has the wrong type.

    >>> rules = maxtext({"decoder_block": "llama2"})
    >>> dict(rules.axes)["**decoder/layers/mlp/wo/kernel"]
    'hidden* layer resid'
    """
    family = family_of(_decoder(config, "decoder_block", "maxtext"))
    axis = setting(config, "param_scan_axis", default=1)
    one_of("the configuration's 'param_scan_axis'", integer("param_scan_axis", axis, 0), (0, 1))
    scanned = flag(config, "scan_layers", default=True)
    return _rules(
        "maxtext", family, scanned, axis, flag(config, "logits_via_embedding", default=False)
    )


@architecture()
def tunix(config: Config) -> Rules:
    """Gives the rules of the trees of Tunix's decoders.

    Args:
      config: A configuration with `decoder`: "llama3", "qwen2", "qwen3", "gemma", "gemma2" or
        "gemma3". It may have `use_tied_embedding` (default: false; Gemma's is always tied).

    Returns:
      The rules. They contain no entries of a configuration: growth takes new sizes by the names of
      spaces.

    Raises:
      ValueError: If an entry is missing or has the wrong type.

    >>> rules = tunix({"decoder": "gemma"})
    >>> dict(rules.axes)["**embedder/input_embedding"]
    'vocab* resid | vocab resid*'
    """
    family = family_of(_decoder(config, "decoder", "tunix"))
    tied = family != "llama" or flag(config, "use_tied_embedding", default=False)
    return _rules("tunix", family, False, 0, tied)


def _decoder(config: Config, key: str, framework: str) -> str:
    """Returns the configuration's decoder, checked to be a known one."""
    name = setting(config, key)
    one_of(f"the configuration's {key!r}", name, tuple(DECODERS[framework].values()))
    return name


def of_tree(params: PyTree) -> dict[str, Any] | None:
    """Recognises the tree of a framework by its paths and shapes.

    Args:
      params: The parameters, as arrays or ShapeDtypeStructs.

    Returns:
      The configuration of `maxtext` or `tunix` that describes the tree, with `model_type`; None for
      other trees.

    Raises:
      ValueError: If layers are stacked and both of the first axes have the size of the stream,
        which is ambiguous.

    >>> tree = {"decoder": {"layers_0": {"mlp": {"wo": {"kernel": jax.numpy.ones((4, 2))}}}}}
    >>> of_tree(tree) is None
    True
    """
    shapes = {p: x.shape for p, x in zip(leaf_paths(params), jax.tree.leaves(params), strict=True)}
    return recognised(shapes)


def recognised(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any] | None:
    """Recognises the tree of a framework from shapes.

    Args:
      shapes: The shapes of its leaves by path. The tree may be part of another.

    Returns:
      As `of_tree`.

    Raises:
      ValueError: As `of_tree` does.
    """
    paths = list(shapes)

    def first(pattern: str) -> str | None:
        compiled = re.compile(rf"(?:.*/)?{pattern}(?:/value)?")
        return next((path for path in paths if compiled.fullmatch(path)), None)

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
    if stream is None or not shapes[stream] or not first(r"token_embedder/embedding"):
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
                f"{norm!r} has shape {shape}: the numbers of layers and units are equal; give a "
                "configuration with 'param_scan_axis', 0 or 1"
            )
        config["param_scan_axis"] = int(shape[0] == width)
    return config
