"""The table of T5, for the tensor names of Hugging Face.

Its class in transformers has no head, although many checkpoints have one. This table is therefore
written by hand. Tables of other language models are found by tracing (`files`).
"""

from sail_jax.architectures import forward
from sail_jax.architectures.detect import architecture
from sail_jax.architectures.forward.heads import (
    LABELS,
    ends,
    has_vocabulary,
    head_axes,
    readers,
)
from sail_jax.architectures.forward.inputs import both, tokens
from sail_jax.architectures.table import Config, Rules, count, flag, pairs
from sail_jax.configurations import class_of


def attention(names: str, *, tag: str, tower: str = "", resid: str = "resid") -> dict[str, str]:
    """Gives the rules of the query, key, value and output projections of an attention layer.

    Weights are `(out, in)`, biases are optional.

    Args:
      names: The four patterns of query, key, value and output, separated by blanks.
      tag: The suffix of the names of the layer's inner spaces, such as ".{i}".
      tower: The prefix of these names, for networks of several towers.
      resid: The space that the layer reads and writes.

    Returns:
      Axes strings by pattern, for `pairs`.
    """
    head, qk, v = (f"{tower}{x}{tag}" for x in ("head", "qk", "v"))
    q, k, value, o = names.split()
    out = {
        f"{q}.weight": f"({head} {qk}) {resid}*",
        f"{k}.weight": f"({head} {qk}*) {resid}*",
        f"{value}.weight": f"({head} {v}) {resid}*",
        f"{o}.weight": f"{resid} ({head} {v})*",
    }
    # The bias of keys has a starred factor: keys are contracted with queries, so they belong to the
    # dual of the space that queries write.
    biases = {q: f"({head} {qk})", k: f"({head} {qk}*)", value: f"({head} {v})", o: resid}
    return out | {f"?{name}.bias": axes for name, axes in biases.items()}


@architecture(outputs=forward.t5, inputs=both(tokens, tokens))
def t5(config: Config) -> Rules:
    """Gives the rules of T5, including version 1.1.

    Encoder and decoder share the space of their embeddings, with RMSNorm and without biases. The
    first layer of each tower stores the relative position biases for the heads of all its layers,
    so these heads are one space.

    Args:
      config: A configuration with `num_heads` and `d_kv`. It may have `feed_forward_proj` (default:
        "relu"), `tie_word_embeddings`, `scale_decoder_outputs` and `architectures`.

    Returns:
      The rules.

    Raises:
      ValueError: If an entry is missing or has the wrong type.

    References:
      Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text
      Transformer, 2020 (arXiv 1910.10683).
    """
    tied = flag(config, "tie_word_embeddings", default=True) and has_vocabulary(config)
    # Some classes call their body "transformer", and some have no decoder.
    p, towers = "{transformer.,}", {"encoder": "sf", "decoder": "scf"}
    if encodes := class_of(config).endswith(("EncoderModel", "ForTokenClassification")):
        del towers["decoder"]
    table = {
        f"{p}shared.weight": _table(tied),
        f"?{p}{{encoder,decoder}}.embed_tokens.weight": _table(tied),
        **{f"{p}{tower}.final_layer_norm.weight": "diag(resid)" for tower in towers},
        _lm_head(config, tied): "vocab resid*",
        **head_axes("t5", config),
    }
    last = readers("t5", config, tied)
    # The readers of the encoder's last norm are the keys and values of the decoder's attention to
    # it.
    crossed = (f"{p}decoder.block.*.layer.1.EncDecAttention.{{k,v}}.weight",)
    folds = {f"{p}encoder.final_layer_norm.weight": last if encodes else crossed}
    if not encodes:
        folds[f"{p}decoder.final_layer_norm.weight"] = last
    spaces = {"resid": "rmsnorm", "pooled": "odd", "bucket": "outer", **_OUTER}
    heads, size = count(config, "num_heads"), count(config, "d_kv")
    sizes, single = {}, set()
    settings = [("vocab_size", "vocab"), ("d_model", "resid"), ("d_model", "pooled")]
    settings += [("relative_attention_num_buckets", "bucket")]
    for tower, parts in towers.items():
        for n, part in enumerate(parts):
            x = f"{p}{tower}.block.{{i}}.layer.{n}."
            table[f"{x}layer_norm.weight"] = "diag(resid)"
            if part == "f":
                hidden = f"{tower}.hidden.{{i}}"
                table[f"{x}DenseReluDense.{{wi,wi_0,wi_1}}.weight"] = f"{hidden} resid*"
                table[f"{x}DenseReluDense.wo.weight"] = f"resid {hidden}*"
                act = config.get("feed_forward_proj", "relu")
                spaces[hidden] = "relu" if act == "relu" else "elementwise"
                settings.append(("d_ff", hidden))
                folds[f"{x}layer_norm.weight"] = (f"{x}DenseReluDense.{{wi,wi_0,wi_1}}.weight",)
                continue
            own = part == "s"
            space = f"{tower}." if own else "cross."
            module = f"{x}{'SelfAttention' if own else 'EncDecAttention'}"
            names = " ".join(f"{module}.{one}" for one in "qkvo")
            # T5's layers have no biases, which `attention` marks as optional.
            for pattern, text in attention(names, tag=".{i}", tower=space).items():
                if pattern[0] != "?":
                    text = text.replace(f"{space}head.{{i}}", f"{space}head") if own else text
                    table[pattern] = text
            head = f"{space}head" if own else f"{space}head.{{i}}"
            if own:
                bias = f"{p}{tower}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
                table[bias] = f"bucket* {head}"
                single.add(bias)
            # The relative position bias is added to the attention logits. The sign of a head would
            # cancel in queries and keys, but not there, so heads may only be selected
            # ("elementwise").
            spaces |= {head: "elementwise" if own else "odd"}
            # T5 does not divide attention logits by sqrt(size of a head), so the number of query
            # units may also change ("linear" instead of "dot").
            spaces |= {f"{space}{name}.{{i}}": "linear" for name in ("qk", "v")}
            sizes |= {head: heads, f"{space}qk.{{i}}": size, f"{space}v.{{i}}": size}
            settings += [("num_heads", head)]
            settings += [("d_kv", f"{space}{name}.{{i}}") for name in ("qk", "v")]
            folds[f"{x}layer_norm.weight"] = (
                f"{module}.{{q,k,v}}.weight" if own else f"{module}.q.weight",
            )
    # The old release of the format has an unused bias in the decoder's second attention.
    unused = f"{p}decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    table[f"?{unused}"] = "_ _"
    single.add(unused)
    axes, optional = pairs(table)
    counts = {"encoder": "num_layers", "decoder": "num_decoder_layers"}
    layers = {counts[tower]: f"{p}{tower}.block.{{i}}." for tower in towers}
    scaled = flag(config, "scale_decoder_outputs", default=True)
    return Rules(
        axes,
        spaces,
        sizes,
        optional,
        ends("t5", config),
        settings=tuple(settings),
        folds=folds,
        layers=layers,
        single=frozenset(single),
        head_power=-0.5 if scaled else 0.0,
        untied={"scale_decoder_outputs": False},
    )


def _lm_head(config: Config, tied: bool) -> str:
    """Returns the pattern of the head: required unless it is tied."""
    return "lm_head.weight" if has_vocabulary(config) and not tied else "?lm_head.weight"


def _table(tied: bool) -> str:
    """Returns the axes of the embeddings, which are also the output's table if tied."""
    return "vocab* resid | vocab resid*" if tied else "vocab* resid"


_OUTER = {"vocab": "outer", "position": "outer", **LABELS}
