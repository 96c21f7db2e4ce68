"""Tables of vision transformers, for the tensor names of Hugging Face: ViT and CLIP's towers."""

from collections.abc import Mapping
from typing import Any

from sail_jax.architectures import forward
from sail_jax.architectures.detect import architecture
from sail_jax.architectures.forward.inputs import both, images, of_part, tokens
from sail_jax.architectures.table import Config, Rules, count, divided, pairs, setting
from sail_jax.architectures.text import attention

__all__ = ["clip", "vit"]


@architecture(logits=forward.vit, inputs=images)
def vit(config: Config) -> Rules:
    """Gives the rules of ViT, also of DeiT without distillation.

    Pixels are in no space.

    Args:
      config: A configuration with `hidden_size` and `num_attention_heads`.

    Returns:
      The rules.

    Raises:
      ValueError: If an entry is missing or not of its kind, or the heads do not divide the width.

    References:
      Dosovitskiy et al., An Image is Worth 16x16 Words, 2021 (arXiv 2010.11929).
    """
    x = "{vit.,}encoder.layer.{i}."
    inner = f"{x}attention.attention."
    table = {
        "{vit.,}embeddings.cls_token": "_ _ resid",
        "?{vit.,}embeddings.mask_token": "_ _ resid",
        "{vit.,}embeddings.position_embeddings": "_ _ resid",
        "{vit.,}embeddings.patch_embeddings.projection.weight": "resid channel* _ _",
        "{vit.,}embeddings.patch_embeddings.projection.bias": "resid",
        **attention(f"{inner}query {inner}key {inner}value {x}attention.output.dense", tag=".{i}"),
        f"{x}intermediate.dense.weight": "hidden.{i} resid*",
        f"{x}intermediate.dense.bias": "hidden.{i}",
        f"{x}output.dense.weight": "resid hidden.{i}*",
        f"{x}output.dense.bias": "resid",
        f"{x}layernorm_{{before,after}}.weight": "diag(resid)",
        f"{x}layernorm_{{before,after}}.bias": "resid",
        "{vit.,}layernorm.weight": "diag(resid)",
        "{vit.,}layernorm.bias": "resid",
        "?{vit.,}pooler.dense.weight": "pooled resid*",
        "?{vit.,}pooler.dense.bias": "pooled",
        "?classifier.weight": "labels resid*",
        "?classifier.bias": "labels",
    }
    axes, optional = pairs(table)
    spaces, sizes, settings = _tower(config)
    spaces |= dict.fromkeys(("pooled", "labels", "channel"), "outer")
    # Without a classifier the base model hands out the stream itself.
    ends = {"resid": ("classifier.weight",)}
    settings += (("num_channels", "channel"), ("pooler_output_size", "pooled"))
    layers = {"num_hidden_layers": x}
    return Rules(axes, spaces, sizes, optional, ends, settings=settings, layers=layers)


@architecture(
    logits=forward.clip,
    inputs=both(of_part("text_config", tokens), of_part("vision_config", images)),
)
def clip(config: Config) -> Rules:
    """Gives the rules of CLIP: two towers whose projections meet in one space, normalised.

    Args:
      config: A configuration with `text_config` and `vision_config`, each with `hidden_size` and
        `num_attention_heads`.

    Returns:
      The rules.

    Raises:
      ValueError: If an entry is missing or not of its kind, or heads do not divide a width.

    References:
      Radford et al., Learning Transferable Visual Models From Natural Language Supervision, 2021
      (arXiv 2103.00020).
    """
    table = {
        "logit_scale": "",
        "text_model.embeddings.token_embedding.weight": "vocab* text.resid",
        "text_model.embeddings.position_embedding.weight": "position* text.resid",
        "vision_model.embeddings.class_embedding": "vision.resid",
        "vision_model.embeddings.patch_embedding.weight": "vision.resid channel* _ _",
        "vision_model.embeddings.position_embedding.weight": "_ vision.resid",
        "?{text,vision}_model.embeddings.position_ids": "_ _",
        "text_projection.weight": "shared text.resid*",
        "visual_projection.weight": "shared* vision.resid*",
    }
    spaces, sizes, settings = {"vocab": "outer", "shared": "rmsnorm"}, {}, ()
    spaces |= {"position": "outer", "channel": "outer"}
    # Both towers end in the shared space, whose vectors are divided by their norms before they are
    # compared: any rotation of both keeps the logits.
    settings += (("projection_dim", "shared"), ("text_config.vocab_size", "vocab"))
    settings += (("text_config.max_position_embeddings", "position"),)
    settings += (("vision_config.num_channels", "channel"),)
    norms = {"text": "text_model.final_layer_norm"}
    norms["vision"] = "vision_model.{pre_layrnorm,post_layernorm}"
    for tower, norm in norms.items():
        x = f"{tower}_model.encoder.layers.{{i}}."
        resid, hidden = f"{tower}.resid", f"{tower}.hidden.{{i}}"
        names = " ".join(f"{x}self_attn.{p}_proj" for p in ("q", "k", "v", "out"))
        table |= {
            **attention(names, tag=".{i}", tower=f"{tower}.", resid=resid),
            f"{x}layer_norm{{1,2}}.weight": f"diag({resid})",
            f"{x}layer_norm{{1,2}}.bias": resid,
            f"{x}mlp.fc1.weight": f"{hidden} {resid}*",
            f"{x}mlp.fc1.bias": hidden,
            f"{x}mlp.fc2.weight": f"{resid} {hidden}*",
            f"{x}mlp.fc2.bias": resid,
            f"{norm}.weight": f"diag({resid})",
            f"{norm}.bias": resid,
        }
        inner = setting(config, key := f"{tower}_config")
        if not isinstance(inner, Mapping):
            raise ValueError(f"the configuration's {key!r} must be a mapping, got {inner!r}")
        more = _tower(inner, f"{tower}.", f"{key}.")
        spaces, sizes, settings = spaces | more[0], sizes | more[1], settings + more[2]
    # A norm before the first layer writes into the stream, and its scale multiplies the stream unit
    # by unit: no unit of it may become an average of others.
    spaces["vision.resid"] = "layernorm odd"
    axes, optional = pairs(table)
    layers = {f"{t}_config.num_hidden_layers": f"{t}_model.encoder.layers.{{i}}." for t in norms}
    return Rules(axes, spaces, sizes, optional, settings=settings, layers=layers)


def _tower(config: Config, tower: str = "", key: str = "") -> tuple[Any, ...]:
    """The spaces, the sizes and the settings of one stack of layers."""
    width, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    size = divided(width, heads, f"{key}num_attention_heads heads in hidden_size units")
    words = {"resid": "layernorm"} | {
        f"{name}.{{i}}": word
        for name, word in (
            ("head", "odd"),
            ("qk", "dot"),
            ("v", "linear"),
            ("hidden", "elementwise"),
        )
    }
    settings = (
        ("hidden_size", "{0}resid"),
        ("hidden_size", "{0}head.{{i}} {0}qk.{{i}}"),
        ("hidden_size", "{0}head.{{i}} {0}v.{{i}}"),
        ("num_attention_heads", "{0}head.{{i}}"),
        ("intermediate_size", "{0}hidden.{{i}}"),
    )
    return (
        {tower + name: word for name, word in words.items()},
        {f"{tower}{name}.{{i}}": n for name, n in (("head", heads), ("qk", size), ("v", size))},
        tuple((key + entry, text.format(tower)) for entry, text in settings),
    )
