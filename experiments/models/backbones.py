"""Image encoders from Hugging Face's checkpoints, with parameters by tensor names: ResNet (He et
al. 2016), ViT (Dosovitskiy et al. 2021) and CLIP's image tower (Radford et al. 2021)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from sail_jax.architectures.forward import clip_images, vit
from sail_jax.checkpoint import load_checkpoint

Tensors = Mapping[str, Any]
KINDS = ("resnet", "vit", "clip")
IMAGENET = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}
_UNUSED = ("classifier.", "text_model.", "text_projection", "logit_scale")
_STATISTICS = ("running_mean", "running_var")
# The momentum of running statistics; PyTorch's convention for the same value is 0.1.
_MOMENTUM = 0.9
_EPS = 1e-5  # of BatchNorm


class Backbone(NamedTuple):
    """An image encoder.

    Attributes:
      config: Hugging Face's configuration.
      params: Its learned tensors by name.
      statistics: Running means and variances of BatchNorm by name; empty without BatchNorm.
      mean: The mean of each colour, `(3,)`, which is subtracted from pixels in [0, 1].
      std: The standard deviation of each colour, `(3,)`, by which they are then divided.
    """

    config: Mapping[str, Any]
    params: Tensors
    statistics: Tensors
    mean: Float[np.ndarray, "3"]
    std: Float[np.ndarray, "3"]


def load_backbone(folder: str | Path) -> Backbone:
    """Reads an encoder from a folder with `config.json` and the weights.

    The head and CLIP's text tower are omitted. Means and standard deviations of colours come from
    `preprocessor_config.json`, or are ImageNet's if it is missing.

    Args:
      folder: The folder.

    Returns:
      The encoder, in float32.

    Raises:
      ValueError: If the configuration is missing, or not that of a ResNet, ViT or CLIP.
      StoreError: If a file cannot be read.
    """
    folder = Path(folder)
    config, how = (_json(folder / f"{name}.json") for name in ("config", "preprocessor_config"))
    if config.get("model_type") not in KINDS:
        raise ValueError(
            f"{folder}: expected a config.json with model_type {', '.join(KINDS)}; got "
            f"{config.get('model_type')!r}"
        )
    tensors = {
        name: np.asarray(x, np.float32)
        for name, x in load_checkpoint(folder).items()
        if not name.startswith(_UNUSED) and np.asarray(x).dtype.kind not in "iu"
    }
    statistics = {name: x for name, x in tensors.items() if name.endswith(_STATISTICS)}
    params = {name: x for name, x in tensors.items() if name not in statistics}
    colours = (np.asarray(how.get(name, IMAGENET[name]), np.float32) for name in IMAGENET)
    return Backbone(config, params, statistics, *colours)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        told = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    return told if isinstance(told, dict) else {}


def encode(
    backbone: Backbone,
    params: Tensors,
    statistics: Tensors,
    images: UInt8[Array | np.ndarray, "n side side 3"],
    *,
    train: bool = False,
) -> tuple[Float[Array, "n width"], dict[str, Array]]:
    """Computes the features of images.

    Args:
      backbone: The encoder, for its configuration and colours.
      params: The learned tensors to use.
      statistics: The running statistics to use.
      images: Pixels from 0 to 255.
      train: Whether BatchNorm normalises by these images and updates its statistics with them.

    Returns:
      The features, and the statistics after these images.

    Raises:
      ValueError: If a tensor is missing, or images do not match the positions.
    """
    pixels = (jnp.asarray(images, jnp.float32) / 255 - backbone.mean) / backbone.std
    x, kind = pixels.transpose(0, 3, 1, 2), backbone.config["model_type"]
    if kind == "resnet":
        return _resnet(backbone.config, params, statistics, x, train)
    if kind == "clip":
        return clip_images(params, backbone.config, x), {}
    # The head was omitted when the tensors were read.
    base = {**backbone.config, "architectures": ["ViTModel"]}
    return vit(params, base, x)["last_hidden_state"][:, 0], {}


def _resnet(
    config: Mapping[str, Any], params: Tensors, statistics: Tensors, x: Array, train: bool
) -> tuple[Array, dict[str, Array]]:
    """Runs Hugging Face's ResNet, with blocks of two convolutions ("basic") or three
    ("bottleneck")."""
    new: dict[str, Array] = {}

    def conv(name: str, x: Array, stride: int) -> Array:
        """Applies a convolution and BatchNorm. The size is divided by the stride."""
        kernel = jnp.asarray(params[f"{name}.convolution.weight"])
        pad = kernel.shape[-1] // 2
        x = lax.conv_general_dilated(x, kernel, (stride, stride), [(pad, pad)] * 2)
        at = f"{name}.normalization"
        ends = [f"{at}.{end}" for end in _STATISTICS]
        if train:
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
            n = x.size // x.shape[1]
            # As in PyTorch: the batch is normalised by the variance with divisor n, and the running
            # variance has n - 1.
            for end, value in zip(ends, (mean, var * n / max(n - 1, 1)), strict=True):
                new[end] = _MOMENTUM * statistics[end] + (1 - _MOMENTUM) * value
        else:
            mean, var = (jnp.asarray(statistics[end]) for end in ends)
        scale = params[f"{at}.weight"] * lax.rsqrt(var + _EPS)
        shift = params[f"{at}.bias"] - mean * scale
        return x * scale[:, None, None] + shift[:, None, None]

    prefix = "resnet." if "resnet.embedder.embedder.convolution.weight" in params else ""
    x = jax.nn.relu(conv(f"{prefix}embedder.embedder", x, 2))
    x = lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1))
    )
    bottleneck = config.get("layer_type", "bottleneck") == "bottleneck"
    strides = (1, 2, 1) if bottleneck else (2, 1)  # of a block that halves the image
    if bottleneck and config.get("downsample_in_bottleneck", False):
        strides = (2, 1, 1)
    for s, depth in enumerate(config["depths"]):
        for b in range(depth):
            halves = b == 0 and (s > 0 or config.get("downsample_in_first_stage", False))
            at, y = f"{prefix}encoder.stages.{s}.layers.{b}", x
            for i, stride in enumerate(strides):
                y = conv(f"{at}.layer.{i}", y, stride if halves else 1)
                y = jax.nn.relu(y) if i < len(strides) - 1 else y
            if f"{at}.shortcut.convolution.weight" in params:
                x = conv(f"{at}.shortcut", x, 2 if halves else 1)
            x = jax.nn.relu(x + y)
    return x.mean((2, 3)), new
