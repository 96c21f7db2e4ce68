"""Tables of CLIP and of its towers, for the tensor names of Hugging Face."""

from collections.abc import Mapping
from typing import Any

from sail_jax.architectures import forward
from sail_jax.architectures.detect import architecture
from sail_jax.architectures.forward.heads import LABELS, ends, head_axes
from sail_jax.architectures.forward.inputs import both, images, of_part, tokens
from sail_jax.architectures.table import Config, Rules, count, divided, pairs, setting
from sail_jax.architectures.text import attention
from sail_jax.configurations import class_of


@architecture(
    outputs=forward.clip,
    inputs=both(of_part("text_config", tokens), of_part("vision_config", images)),
)
def clip(config: Config) -> Rules:
    """Gives the rules of CLIP: two towers with projections into one normalised space.

    The embeddings in that space are outputs, in addition to the logits. The class with an image
    classifier has neither the projections nor the text tower.

    Args:
      config: A configuration with `text_config` and `vision_config`, each with `hidden_size` and
        `num_attention_heads`. It may have `architectures`.

    Returns:
      The rules.

    Raises:
      ValueError: If an entry is missing or has the wrong type, or heads do not divide a width.

    References:
      Radford et al., Learning Transferable Visual Models From Natural Language Supervision, 2021
      (arXiv 2103.00020).
    """
    if class_of(config).endswith("ForImageClassification"):
        return _clip(config, {"vision": "vision_config."}, head_axes("clip", config))
    table = {
        "logit_scale": "",
        "text_projection.weight": "shared text.resid*",
        "visual_projection.weight": "shared* vision.resid*",
    }
    return _clip(config, {tower: f"{tower}_config." for tower in ("text", "vision")}, table)


@architecture(outputs=forward.clip_text_model)
def clip_text_model(config: Config) -> Rules:
    """Gives the rules of CLIP's text tower alone, with or without its projection.

    Args:
      config: The configuration of the tower, with `hidden_size` and `num_attention_heads`.

    Returns:
      The rules.

    Raises:
      ValueError: As `clip` does.
    """
    return _clip(config, {"text": ""}, {"?text_projection.weight": "shared text.resid*"})


@architecture(outputs=forward.clip_vision_model, inputs=images)
def clip_vision_model(config: Config) -> Rules:
    """Gives the rules of CLIP's image tower alone, with or without its projection.

    Args:
      config: The configuration of the tower, with `hidden_size` and `num_attention_heads`.

    Returns:
      The rules.

    Raises:
      ValueError: As `clip` does.
    """
    return _clip(config, {"vision": ""}, {"?visual_projection.weight": "shared vision.resid*"})


def _clip(config: Config, towers: Mapping[str, str], table: dict[str, str]) -> Rules:
    """Makes the rules of towers, each with the key of its configuration, and of their readers."""
    spaces, sizes, layers = dict(LABELS), {}, {}
    # Embeddings are stored and compared with others, so their space is an output. (Rotating both
    # towers would preserve the logits.)
    handed: dict[str, tuple[str, ...]] = {"shared": ()}
    spaces |= {"vocab": "outer", "position": "outer", "channel": "outer", "shared": "rmsnorm"}
    settings: tuple[tuple[str, str], ...] = (("projection_dim", "shared"),)
    for tower, key in towers.items():
        # A separate tower may be saved without the prefix in its names.
        name = f"{tower}_model." if key else f"{{{tower}_model.,}}"
        x = f"{name}encoder.layers.{{i}}."
        resid, hidden = f"{tower}.resid", f"{tower}.hidden.{{i}}"
        names = " ".join(f"{x}self_attn.{p}_proj" for p in ("q", "k", "v", "out"))
        if tower == "text":
            norm = f"{name}final_layer_norm"
            table |= {
                f"{name}embeddings.token_embedding.weight": f"vocab* {resid}",
                f"{name}embeddings.position_embedding.weight": f"position* {resid}",
            }
            more = {"vocab_size": "vocab", "max_position_embeddings": "position"}
        else:
            norm = f"{name}{{pre_layrnorm,post_layernorm}}"
            table |= {
                f"{name}embeddings.class_embedding": resid,
                f"{name}embeddings.patch_embedding.weight": f"{resid} channel* _ _",
                f"{name}embeddings.position_embedding.weight": f"_ {resid}",
            }
            more = {"num_channels": "channel"}
        settings += tuple((key + entry, space) for entry, space in more.items())
        table |= {
            f"?{name}embeddings.position_ids": "_ _",
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
        layers[f"{key}num_hidden_layers"] = x
        inner = setting(config, key[:-1]) if key else config
        if not isinstance(inner, Mapping):
            raise ValueError(f"the configuration's {key[:-1]!r} must be a mapping, got {inner!r}")
        own = _tower(inner, f"{tower}.", key)
        spaces, sizes, settings = spaces | own[0], sizes | own[1], settings + own[2]
        projection = f"{'text' if tower == 'text' else 'visual'}_projection.weight"
        handed[resid] = (projection, *ends("clip", config, resid)[resid])
    # A norm before the first layer writes into the stream, and its scale multiplies the stream unit
    # by unit, so units may not become averages of others.
    spaces["vision.resid"] = "layernorm odd"
    axes, optional = pairs(table)
    return Rules(axes, spaces, sizes, optional, handed, settings=settings, layers=layers)


def _tower(config: Config, tower: str = "", key: str = "") -> tuple[Any, ...]:
    """Makes the spaces, the sizes and the settings of one stack of layers."""
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
