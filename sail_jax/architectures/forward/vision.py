"""Forward passes of ViT, CLIP and the ReLU MLP, from the tensors of a checkpoint.

Images are `(batch, channel, y, x)`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sail_jax.architectures.forward.layers import (
    See,
    Tensors,
    activation,
    attention,
    embed_patches,
    layer_norm,
    linear,
    unseen,
)
from sail_jax.architectures.table import Config, setting

__all__ = ["clip", "clip_images", "mlp", "vit"]

Params = Mapping[str, Any]
Images = Float[Array | np.ndarray, "batch c y x"]


def vit(
    params: Params, config: Config, images: Images, see: See = unseen
) -> Float[Array, "batch labels"]:
    """Runs ViT.

    Args:
      params: The tensors by name.
      config: The configuration; it must have `num_attention_heads` and `num_hidden_layers`.
      images: Images, `(batch, channel, y, x)`.
      see: Called after each layer, with its name and its outputs; what it returns goes on instead.

    Returns:
      The logits of its classifier, `(batch, labels)`, or the last states, `(batch, time, width)`,
      where there is none.

    Raises:
      ValueError: If a tensor is missing, the images do not fit the positions, or the activation is
        unknown.
    """
    t = Tensors(params)
    body = t.maybe("vit.")
    eps, act = config.get("layer_norm_eps", 1e-12), activation(config.get("hidden_act", "gelu"))
    e = body / "embeddings."
    patch = "patch_embeddings.projection"
    first, positions = e["cls_token"][0, 0], e["position_embeddings"][0]
    x = embed_patches(images, e[f"{patch}.weight"], e[f"{patch}.bias"], first, positions)
    inner = "attention.attention"
    qkvo = f"{inner}.query {inner}.key {inner}.value attention.output.dense"
    for i in range(config["num_hidden_layers"]):
        h = body / f"encoder.layer.{i}."
        y = layer_norm(h, "layernorm_before", x, eps)
        x = x + attention(h, qkvo, y, config["num_attention_heads"])
        y = act(linear(h, "intermediate.dense", layer_norm(h, "layernorm_after", x, eps)))
        x = see(f"encoder.layer.{i}", x + linear(h, "output.dense", y))
    x = layer_norm(body, "layernorm", x, eps)
    return linear(t, "classifier", x[:, 0]) if "classifier.weight" in t else x


def mlp(
    params: Params,
    config: Config,
    inputs: Float[Array, "batch n"],
    see: See = unseen,
) -> Float[Array, "batch outputs"]:
    """Runs a ReLU MLP with layers `layers.0, layers.1, ..., out`, whose kernels are `(in, out)`.

    Args:
      params: The tensors by name.
      config: The configuration; `widths` lists the sizes of the hidden layers.
      inputs: Inputs, `(batch, n)`.
      see: Called after each layer, with its name and its outputs; what it returns goes on instead.

    Returns:
      The outputs, `(batch, outputs)`.

    Raises:
      ValueError: If a tensor or `widths` is missing.

    >>> net = {"layers.0.kernel": jnp.eye(2), "layers.0.bias": jnp.zeros(2)}
    >>> net |= {"out.kernel": jnp.ones((2, 1)), "out.bias": jnp.zeros(1)}
    >>> mlp(net, {"widths": [2]}, jnp.array([[3.0, -1.0]])).tolist()
    [[3.0]]
    """
    t, x = Tensors(params), inputs
    for k in range(len(setting(config, "widths"))):
        x = jax.nn.relu(x @ t[f"layers.{k}.kernel"] + t[f"layers.{k}.bias"])
        x = see(f"layers.{k}", x)
    return x @ t["out.kernel"] + t["out.bias"]


def clip(
    params: Params,
    config: Config,
    inputs: tuple[Int[Array | np.ndarray, "texts time"], Images],
    see: See = unseen,
) -> Float[Array, "images texts"]:
    """Runs CLIP on texts and images: the scaled cosines between them.

    Texts have no padding but after their end.

    Args:
      params: The tensors by name.
      config: The configuration; it must have `text_config` and `vision_config`, each with
        `num_attention_heads` and `num_hidden_layers`.
      inputs: Token numbers, `(texts, time)`, and images, `(images, channel, y, x)`.
      see: Called after each layer, with its name and its outputs; what it returns goes on instead.

    Returns:
      The logits, `(images, texts)`.

    Raises:
      ValueError: If a tensor or a part of the configuration is missing, the images do not fit the
        positions, or an activation is unknown.
    """
    tokens, images = inputs
    t = Tensors(params)
    text = setting(config, "text_config")
    body = t / "text_model."
    e = body / "embeddings."
    x = e["token_embedding.weight"][tokens] + e["position_embedding.weight"][: tokens.shape[1]]
    x = _clip_layers(body, text, x, jnp.tri(tokens.shape[1], dtype=bool), see)
    x = layer_norm(body, "final_layer_norm", x, text.get("layer_norm_eps", 1e-5))
    # Early releases state 2 as the end token, which is wrong: theirs is the largest number of all
    # tokens.
    end = text.get("eos_token_id", 2)
    at = jnp.argmax(tokens if end == 2 else tokens == end, axis=-1)
    a = linear(t, "text_projection", x[jnp.arange(len(x)), at])
    b = clip_images(params, config, images, see)
    a, b = (y / jnp.linalg.norm(y, axis=-1, keepdims=True) for y in (a, b))
    return jnp.exp(t["logit_scale"]) * b @ a.T


def clip_images(
    params: Params, config: Config, images: Images, see: See = unseen
) -> Float[Array, "images width"]:
    """Runs CLIP on images alone.

    Args:
      params: The tensors by name.
      config: The configuration; its `vision_config` must have `num_attention_heads` and
        `num_hidden_layers`.
      images: Images, `(images, channel, y, x)`.
      see: Called after each layer, with its name and its outputs; what it returns goes on instead.

    Returns:
      The embeddings of the images before their norm is divided out, `(images, width)`.

    Raises:
      ValueError: As `clip` does.
    """
    t, vision = Tensors(params), setting(config, "vision_config")
    body, eps = t / "vision_model.", vision.get("layer_norm_eps", 1e-5)
    e = body / "embeddings."
    first, positions = e["class_embedding"], e["position_embedding.weight"]
    x = embed_patches(images, e["patch_embedding.weight"], None, first, positions)
    # The name of the norm is misspelt in the checkpoints.
    x = _clip_layers(body, vision, layer_norm(body, "pre_layrnorm", x, eps), None, see)
    return linear(t, "visual_projection", layer_norm(body, "post_layernorm", x[:, 0], eps))


def _clip_layers(body: Tensors, config: Config, x: Array, mask: Array | None, see: See) -> Array:
    """Applies the layers of one tower of CLIP."""
    eps = config.get("layer_norm_eps", 1e-5)
    act = activation(config.get("hidden_act", "quick_gelu"))
    qkvo = " ".join(f"self_attn.{p}_proj" for p in ("q", "k", "v", "out"))
    for i in range(config["num_hidden_layers"]):
        h = body / f"encoder.layers.{i}."
        y = layer_norm(h, "layer_norm1", x, eps)
        x = x + attention(h, qkvo, y, config["num_attention_heads"], mask=mask)
        y = act(linear(h, "mlp.fc1", layer_norm(h, "layer_norm2", x, eps)))
        x = see(f"{body.prefix}encoder.layers.{i}", x + linear(h, "mlp.fc2", y))
    return x
