"""Tables of language models, for the tensor names of Hugging Face.

They are GPT-2, Llama and its kin, BERT, RoBERTa and T5. Linear layers of PyTorch are `(out, in)`,
those of GPT-2 `(in, out)`.
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
from sail_jax.architectures.table import Config, Rules, count, divided, flag, pairs
from sail_jax.configurations import class_of

__all__ = ["attention", "bert", "gpt2", "llama", "roberta", "t5"]


def attention(
    names: str, *, tag: str, tower: str = "", resid: str = "resid", group: bool = False
) -> dict[str, str]:
    """Gives the rules of the query, key, value and output projections of an attention layer.

    Weights are `(out, in)`, biases are optional. With `group`, each head of keys and values serves
    a group of queries: the units of queries are numbered by (head, group, unit), row-major.

    Args:
      names: The four patterns of query, key, value and output, separated by blanks.
      tag: What the names of the spaces inside the layer end with, such as ".{i}".
      tower: What these names begin with, for networks of several towers.
      resid: The space that the layer reads and writes.
      group: Whether heads of keys and values are shared.

    Returns:
      Axes strings by pattern, as `pairs` takes them.
    """
    head, group_, qk, v = (f"{tower}{x}{tag}" for x in ("head", "group", "qk", "v"))
    query_heads = f"{head} {group_}" if group else head
    q, k, value, o = names.split()
    out = {
        f"{q}.weight": f"({query_heads} {qk}) {resid}*",
        f"{k}.weight": f"({head} {qk}*) {resid}*",
        f"{value}.weight": f"({head} {v}) {resid}*",
        f"{o}.weight": f"{resid} ({query_heads} {v})*",
    }
    # The bias of keys has a starred factor: keys are contracted against queries, so they live in
    # the dual of the units that queries write.
    biases = {q: f"({query_heads} {qk})", k: f"({head} {qk}*)", value: f"({head} {v})", o: resid}
    return out | {f"?{name}.bias": axes for name, axes in biases.items()}


@architecture(outputs=forward.gpt2, causal=True)
def gpt2(config: Config) -> Rules:
    """Gives the rules of GPT-2, whose queries, keys and values are fused.

    Args:
      config: A configuration with `n_embd` and `n_head`. It may have `tie_word_embeddings` (true
        where not stated) and `architectures` (a model with a head where not stated).

    Returns:
      The rules.

    Raises:
      ValueError: If an entry is missing or not of its kind, `n_head` does not divide `n_embd`, or
        the second of two heads does not end in one number.

    References:
      Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
    """
    h = "{transformer.,}h.{i}."
    tied = flag(config, "tie_word_embeddings", default=True) and has_vocabulary(config)
    if class_of(config).endswith("DoubleHeadsModel"):
        for key in ("summary_use_proj", "summary_proj_to_labels"):
            if not flag(config, key, default=True):
                raise ValueError(f"the configuration's {key!r} is false, which no table knows")
    table = {
        "{transformer.,}wte.weight": _table(tied),
        "{transformer.,}wpe.weight": "position* resid",
        f"{h}ln_{{1,2}}.weight": "diag(resid)",
        f"{h}ln_{{1,2}}.bias": "resid",
        f"{h}attn.c_attn.weight": "resid* (head.{i} qk.{i} + head.{i} qk.{i}* + head.{i} v.{i})",
        f"{h}attn.c_attn.bias": "(head.{i} qk.{i} + head.{i} qk.{i}* + head.{i} v.{i})",
        f"{h}attn.c_proj.weight": "(head.{i} v.{i})* resid",
        f"{h}attn.c_proj.bias": "resid",
        # Buffers of old releases: the causal mask, and what it fills in.
        f"?{h}attn.bias": "_ _ _ _",
        f"?{h}attn.masked_bias": "",
        f"{h}mlp.c_fc.weight": "resid* hidden.{i}",
        f"{h}mlp.c_fc.bias": "hidden.{i}",
        f"{h}mlp.c_proj.weight": "hidden.{i}* resid",
        f"{h}mlp.c_proj.bias": "resid",
        "{transformer.,}ln_f.weight": "diag(resid)",
        "{transformer.,}ln_f.bias": "resid",
        _lm_head(config, tied): "vocab resid*",
        **head_axes("gpt2", config),
    }
    axes, optional = pairs(table)
    width, heads = count(config, "n_embd"), count(config, "n_head")
    size = divided(width, heads, "n_head heads in n_embd units")
    return Rules(
        axes,
        {"resid": "layernorm", **_OUTER} | _inner("{i}", "dot", "elementwise"),
        {"head.{i}": heads, "qk.{i}": size, "v.{i}": size},
        optional,
        ends("gpt2", config),
        settings=(
            ("vocab_size", "vocab"),
            ("n_positions", "position"),
            ("n_embd", "resid"),
            ("n_embd", "head.{i} qk.{i}"),
            ("n_embd", "head.{i} v.{i}"),
            ("n_head", "head.{i}"),
            ("n_inner", "hidden.{i}"),
        ),
        layers={"n_layer": h},
    )


@architecture("mistral", "qwen2", "qwen3", outputs=forward.llama, causal=True)
def llama(config: Config) -> Rules:
    """Gives the rules of Llama, Mistral, Qwen2 and Qwen3.

    These have RMSNorm, SwiGLU, and heads of keys and values that groups of queries share. Qwen2 has
    biases, Qwen3 norms of queries and keys. Rotary positions tell the units of a query apart, so
    these cannot be permuted.

    Args:
      config: A configuration with `num_attention_heads`, and `hidden_size` or `head_dim`. It may
        have `num_key_value_heads`, `tie_word_embeddings` (false where not stated) and
        `architectures`.

    Returns:
      The rules.

    Raises:
      ValueError: If an entry is missing or not of its kind, or numbers of heads do not divide.

    References:
      Touvron et al., LLaMA, 2023 (arXiv 2302.13971); Jiang et al., Mistral 7B, 2023
      (arXiv 2310.06825).

    >>> rules = llama({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8})
    >>> dict(rules.axes)["{model.,transformer.,}layers.{i}.self_attn.q_proj.weight"]
    '(head.{i} group.{i} qk.{i}) resid*'
    >>> rules.sizes["group.{i}"]
    2
    """
    # The class for question answering calls its body as GPT-2 does.
    p = "{model.,transformer.,}"
    x = f"{p}layers.{{i}}."
    heads = count(config, "num_attention_heads")
    shared = count(config, "num_key_value_heads", default=heads)
    group = divided(heads, shared, "num_key_value_heads among num_attention_heads")
    size = count(config, "head_dim", default=0) or divided(
        count(config, "hidden_size"), heads, "num_attention_heads heads in hidden_size units"
    )
    tied = flag(config, "tie_word_embeddings", default=False) and has_vocabulary(config)
    qkvo = " ".join(f"{x}self_attn.{p}_proj" for p in "qkvo")
    table = {
        f"{p}embed_tokens.weight": _table(tied),
        **attention(qkvo, tag=".{i}", group=True),
        f"?{x}self_attn.{{q,k}}_norm.weight": "diag(qk.{i})",
        f"{x}mlp.{{gate,up}}_proj.weight": "hidden.{i} resid*",
        f"?{x}mlp.{{gate,up}}_proj.bias": "hidden.{i}",
        f"{x}mlp.down_proj.weight": "resid hidden.{i}*",
        f"?{x}mlp.down_proj.bias": "resid",
        f"{x}input_layernorm.weight": "diag(resid)",
        f"{x}post_attention_layernorm.weight": "diag(resid)",
        f"{p}norm.weight": "diag(resid)",
        _lm_head(config, tied): "vocab resid*",
        **head_axes("llama", config),
        "?**rotary_emb.inv_freq": "_",
    }
    axes, optional = pairs(table)
    inner = {"group.{i}": "elementwise"} | _inner("{i}", "outer", "elementwise")
    return Rules(
        axes,
        {"resid": "rmsnorm", **_OUTER} | inner,
        {"head.{i}": shared, "group.{i}": group, "qk.{i}": size, "v.{i}": size},
        optional,
        ends("llama", config),
        settings=(
            ("vocab_size", "vocab"),
            ("hidden_size", "resid"),
            ("intermediate_size", "hidden.{i}"),
            ("num_key_value_heads", "head.{i}"),
            ("num_attention_heads", "head.{i} group.{i}"),
            ("head_dim", "qk.{i}"),
            ("head_dim", "v.{i}"),
        ),
        folds={
            f"{x}input_layernorm.weight": (f"{x}self_attn.{{q,k,v}}_proj.weight",),
            f"{x}post_attention_layernorm.weight": (f"{x}mlp.{{gate,up}}_proj.weight",),
            f"{p}norm.weight": readers("llama", config, tied),
        },
        layers={"num_hidden_layers": x},
    )


@architecture(outputs=forward.bert)
def bert(config: Config) -> Rules:
    """Gives the rules of BERT, whose norms come after the sums.

    The head for masked words is tied. It applies its nonlinearity in the space of the embeddings,
    so the stream is "elementwise" beside "layernorm".

    Args:
      config: A configuration with `hidden_size` and `num_attention_heads`. It may have
        `tie_word_embeddings` (true where not stated) and `architectures` (with the head for masked
        words where not stated).

    Returns:
      The rules.

    Raises:
      ValueError: If an entry is missing or not of its kind, or the heads do not divide the width.

    References:
      Devlin et al., BERT, 2019 (arXiv 1810.04805).
    """
    return _bert(config, "bert", "{bert.,}")


@architecture("xlm-roberta", outputs=forward.roberta)
def roberta(config: Config) -> Rules:
    """Gives the rules of RoBERTa and XLM-R: BERT with other names at the head.

    Args:
      config: As in `bert`.

    Returns:
      The rules.

    Raises:
      ValueError: As `bert`.

    References:
      Liu et al., RoBERTa, 2019 (arXiv 1907.11692).
    """
    return _bert(config, "roberta", "{roberta.,}")


def _bert(config: Config, family: str, p: str) -> Rules:
    """The rules that BERT and RoBERTa share, with their own heads and prefix of names."""
    x = f"{p}encoder.layer.{{i}}."
    tied = flag(config, "tie_word_embeddings", default=True) and has_vocabulary(config)
    qkvo = f"{x}attention.self.query {x}attention.self.key {x}attention.self.value "
    table = {
        f"{p}embeddings.word_embeddings.weight": _table(tied),
        f"{p}embeddings.position_embeddings.weight": "position* resid",
        f"{p}embeddings.token_type_embeddings.weight": "segment* resid",
        f"?{p}embeddings.{{position,token_type}}_ids": "_ _",
        f"{p}embeddings.LayerNorm.weight": "diag(resid)",
        f"{p}embeddings.LayerNorm.bias": "resid",
        **attention(f"{qkvo}{x}attention.output.dense", tag=".{i}"),
        f"{x}intermediate.dense.weight": "hidden.{i} resid*",
        f"{x}intermediate.dense.bias": "hidden.{i}",
        f"{x}output.dense.weight": "resid hidden.{i}*",
        f"{x}output.dense.bias": "resid",
        f"{x}{{attention.output,output}}.LayerNorm.weight": "diag(resid)",
        f"{x}{{attention.output,output}}.LayerNorm.bias": "resid",
        f"?{p}pooler.dense.weight": "pooled resid*",
        f"?{p}pooler.dense.bias": "pooled",
        **head_axes(family, config),
    }
    axes, optional = pairs(table)
    width, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    size = divided(width, heads, "num_attention_heads heads in hidden_size units")
    spaces = {"resid": "layernorm elementwise", "pooled": "odd", "segment": "outer", **_OUTER}
    return Rules(
        axes,
        spaces | _inner("{i}", "dot", "elementwise"),
        {"head.{i}": heads, "qk.{i}": size, "v.{i}": size},
        optional,
        ends(family, config),
        settings=(
            ("vocab_size", "vocab"),
            ("max_position_embeddings", "position"),
            ("type_vocab_size", "segment"),
            ("hidden_size", "resid"),
            ("hidden_size", "pooled"),
            ("hidden_size", "head.{i} qk.{i}"),
            ("hidden_size", "head.{i} v.{i}"),
            ("num_attention_heads", "head.{i}"),
            ("intermediate_size", "hidden.{i}"),
        ),
        layers={"num_hidden_layers": x},
    )


@architecture(outputs=forward.t5, inputs=both(tokens, tokens))
def t5(config: Config) -> Rules:
    """Gives the rules of T5, also of its version 1.1.

    Encoder and decoder live in the one space of their shared embeddings, with RMSNorm and without
    biases. The first layer of each tower holds biases by relative position for the heads of all its
    layers, so that these are one space.

    Args:
      config: A configuration with `num_heads` and `d_kv`. It may have `feed_forward_proj` ("relu"
        where not stated), `tie_word_embeddings`, `scale_decoder_outputs` and `architectures`.

    Returns:
      The rules.

    Raises:
      ValueError: If an entry is missing or not of its kind.

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
    # What reads the encoder's last norm are the keys and values of the decoder's attention to it.
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
            # The layers of T5 have no biases, which `attention` marks as optional.
            for pattern, text in attention(names, tag=".{i}", tower=space).items():
                if pattern[0] != "?":
                    text = text.replace(f"{space}head.{{i}}", f"{space}head") if own else text
                    table[pattern] = text
            head = f"{space}head" if own else f"{space}head.{{i}}"
            if own:
                bias = f"{p}{tower}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
                table[bias] = f"bucket* {head}"
                single.add(bias)
            # The bias by relative position is added to the logits. A sign of a head would cancel in
            # queries and keys, but not there, so heads may only be selected ("elementwise").
            spaces |= {head: "elementwise" if own else "odd"}
            # T5 does not divide logits by the root of a head's size, so that units of queries may
            # change in number too ("linear", where others have "dot").
            spaces |= {f"{space}{name}.{{i}}": "linear" for name in ("qk", "v")}
            sizes |= {head: heads, f"{space}qk.{{i}}": size, f"{space}v.{{i}}": size}
            settings += [("num_heads", head)]
            settings += [("d_kv", f"{space}{name}.{{i}}") for name in ("qk", "v")]
            folds[f"{x}layer_norm.weight"] = (
                f"{module}.{{q,k,v}}.weight" if own else f"{module}.q.weight",
            )
    # The old release of the format gave the decoder's second attention a bias that is not used.
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
    """The pattern of the head: required if it is not tied, else optional."""
    return "lm_head.weight" if has_vocabulary(config) and not tied else "?lm_head.weight"


def _table(tied: bool) -> str:
    """The axes of the embeddings, which if tied are the output's table too."""
    return "vocab* resid | vocab resid*" if tied else "vocab* resid"


def _inner(i: str, qk: str, hidden: str) -> dict[str, str]:
    """What is applied to the spaces inside a layer."""
    names = {"head": "odd", "qk": qk, "v": "linear", "hidden": hidden}
    return {f"{name}.{i}": word for name, word in names.items()}


_OUTER = {"vocab": "outer", "position": "outer", **LABELS}
