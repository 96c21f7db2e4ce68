"""Forward passes of ViT, CLIP and the ReLU MLP, from the tensors of a checkpoint.

Images are `(batch, channel, y, x)`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sail_jax.architectures.forward.heads import States, outputs
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
from sail_jax.configurations import class_of

Params = Mapping[str, Any]
Images = Float[Array | np.ndarray, "batch c y x"]
Texts = Int[Array | np.ndarray, "texts time"]
Outputs = dict[str, Array]


def vit(params: Params, config: Config, images: Images, see: See = unseen) -> Outputs:
    """Runs ViT.

    Args:
      params: The tensors by name.
      config: The configuration; it must have `num_attention_heads` and `num_hidden_layers`.
      images: Images, `(batch, channel, y, x)`.
      see: Called after each layer with its name and outputs; its return value replaces them.

    Returns:
      The outputs by name (see `heads.outputs`): the outputs of the stored heads, or the states of a
      base model.

    Raises:
      ValueError: If a tensor or a head is missing, the number of patches does not match the
        positions, or the activation is unknown.
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
    out = {"last_hidden_state": x}
    if "pooler.dense.weight" in body:
        pool = activation(config.get("pooler_act", "tanh"))
        out["pooler_output"] = pool(linear(body, "pooler.dense", x[:, 0]))
    return outputs("vit", t, config, States(out))


def mlp(
    params: Params,
    config: Config,
    inputs: Float[Array, "batch n"],
    see: See = unseen,
) -> Outputs:
    """Runs a ReLU MLP with layers `layers.0, layers.1, ..., out` and kernels `(in, out)`.

    Args:
      params: The tensors by name.
      config: The configuration; `widths` lists the sizes of the hidden layers.
      inputs: Inputs, `(batch, n)`.
      see: Called after each layer with its name and outputs; its return value replaces them.

    Returns:
      The outputs, `(batch, outputs)`, as "logits".

    Raises:
      ValueError: If a tensor or `widths` is missing.

    >>> net = {"layers.0.kernel": jnp.eye(2), "layers.0.bias": jnp.zeros(2)}
    >>> net |= {"out.kernel": jnp.ones((2, 1)), "out.bias": jnp.zeros(1)}
    >>> mlp(net, {"widths": [2]}, jnp.array([[3.0, -1.0]]))["logits"].tolist()
    [[3.0]]
    """
    t, x = Tensors(params), inputs
    for k in range(len(setting(config, "widths"))):
        x = jax.nn.relu(x @ t[f"layers.{k}.kernel"] + t[f"layers.{k}.bias"])
        x = see(f"layers.{k}", x)
    return {"logits": x @ t["out.kernel"] + t["out.bias"]}


def clip(
    params: Params, config: Config, inputs: tuple[Texts, Images], see: See = unseen
) -> Outputs:
    """Runs CLIP on texts and images, or its classifier on images.

    Texts may have padding only after their end.

    Args:
      params: The tensors by name.
      config: The configuration; it must have `text_config` and `vision_config`, each with
        `num_attention_heads` and `num_hidden_layers`.
      inputs: Token numbers, `(texts, time)`, and images, `(images, channel, y, x)`.
      see: Called after each layer with its name and outputs; its return value replaces them.

    Returns:
      `logits_per_image`, `(images, texts)`: the scaled cosines between the embeddings; and the
      embeddings `image_embeds` and `text_embeds`, divided by their norms. For the class with a
      classifier: its logits, `(images, labels)`.

    Raises:
      ValueError: If a tensor or a part of the configuration is missing, the number of patches does
        not match the positions, or an activation is unknown.
    """
    t, (tokens, images) = Tensors(params), inputs
    vision = setting(config, "vision_config")
    if class_of(config).endswith("ForImageClassification"):
        states = _vision_tower(t / "vision_model.", vision, images, see)
        return outputs("clip", t, config, states)
    states = _text_tower(t / "text_model.", setting(config, "text_config"), tokens, see)
    a = linear(t, "text_projection", states.outputs["pooler_output"])
    b = clip_images(params, config, images, see)
    a, b = (y / jnp.linalg.norm(y, axis=-1, keepdims=True) for y in (a, b))
    logits = jnp.exp(t["logit_scale"]) * b @ a.T
    return {"logits_per_image": logits, "image_embeds": b, "text_embeds": a}


def clip_images(
    params: Params, config: Config, images: Images, see: See = unseen
) -> Float[Array, "images width"]:
    """Runs CLIP on images only.

    Args:
      params: The tensors by name.
      config: The configuration; its `vision_config` must have `num_attention_heads` and
        `num_hidden_layers`.
      images: Images, `(images, channel, y, x)`.
      see: Called after each layer with its name and outputs; its return value replaces them.

    Returns:
      The embeddings of the images before normalisation, `(images, width)`.

    Raises:
      ValueError: As `clip` does.
    """
    t = Tensors(params)
    states = _vision_tower(t / "vision_model.", setting(config, "vision_config"), images, see)
    return linear(t, "visual_projection", states.outputs["pooler_output"])


def clip_text_model(params: Params, config: Config, tokens: Texts, see: See = unseen) -> Outputs:
    """Runs CLIP's text tower from its own checkpoint, with or without its projection.

    Args:
      params: The tensors by name.
      config: The configuration of the tower.
      tokens: Token numbers, `(texts, time)`.
      see: Called after each layer with its name and outputs; its return value replaces them.

    Returns:
      `text_embeds`, `(texts, width)`, if there is a projection; otherwise the states of the tower.

    Raises:
      ValueError: If a tensor is missing, or the activation is unknown.
    """
    t = Tensors(params)
    states = _text_tower(t.maybe("text_model."), config, tokens, see)
    return _projected(t, config, "text_projection", "text_embeds", states)


def clip_vision_model(params: Params, config: Config, images: Images, see: See = unseen) -> Outputs:
    """Runs CLIP's image tower from its own checkpoint, with or without its projection.

    Args:
      params: The tensors by name.
      config: The configuration of the tower.
      images: Images, `(images, channel, y, x)`.
      see: Called after each layer with its name and outputs; its return value replaces them.

    Returns:
      `image_embeds`, `(images, width)`, if there is a projection; otherwise the states of the
      tower.

    Raises:
      ValueError: If a tensor is missing, the number of patches does not match the positions, or the
        activation is unknown.
    """
    t = Tensors(params)
    states = _vision_tower(t.maybe("vision_model."), config, images, see)
    return _projected(t, config, "visual_projection", "image_embeds", states)


def _projected(t: Tensors, config: Config, name: str, output: str, states: States) -> Outputs:
    """Returns the outputs of a tower with its own checkpoint."""
    # A class with "projection" in its name must have one: `linear` reports a missing tensor.
    if f"{name}.weight" in t or class_of(config).endswith("WithProjection"):
        return {output: linear(t, name, states.outputs["pooler_output"])}
    return dict(states.outputs)


def _text_tower(body: Tensors, config: Config, tokens: Texts, see: See) -> States:
    """Computes the states of texts."""
    e = body / "embeddings."
    x = e["token_embedding.weight"][tokens] + e["position_embedding.weight"][: tokens.shape[1]]
    x = _clip_layers(body, config, x, jnp.tri(tokens.shape[1], dtype=bool), see)
    x = layer_norm(body, "final_layer_norm", x, config.get("layer_norm_eps", 1e-5))
    # Early releases state 2 as the end token, which is wrong: the end token is the token with the
    # largest number.
    end = config.get("eos_token_id", 2)
    at = jnp.argmax(tokens if end == 2 else tokens == end, axis=-1)
    return States({"last_hidden_state": x, "pooler_output": x[jnp.arange(len(x)), at]})


def _vision_tower(body: Tensors, config: Config, images: Images, see: See) -> States:
    """Computes the states of images."""
    e, eps = body / "embeddings.", config.get("layer_norm_eps", 1e-5)
    first, positions = e["class_embedding"], e["position_embedding.weight"]
    x = embed_patches(images, e["patch_embedding.weight"], None, first, positions)
    # The checkpoints misspell the name of the norm.
    x = _clip_layers(body, config, layer_norm(body, "pre_layrnorm", x, eps), None, see)
    pooled = layer_norm(body, "post_layernorm", x[:, 0], eps)
    return States({"last_hidden_state": x, "pooler_output": pooled})


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
