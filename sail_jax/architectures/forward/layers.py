"""Common parts of the forward passes: tensors by name, norms, attention, positions."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sail_jax.checks import nearest

See = Callable[[str, Array], Array]
"""A function of a layer's name and outputs. Its return value replaces the outputs."""


def unseen(name: str, x: Array) -> Array:
    """Returns the outputs of a layer unchanged."""
    del name
    return x


class Tensors:
    """The tensors of a checkpoint under a prefix: `t["wte.weight"]`, `t / "h.0."`.

    `t[name]` raises a ValueError with the closest names if there is no such tensor. `name in t`
    checks whether there is. `t / prefix` adds to the prefix.

    Attributes:
      params: All tensors by their full names.
      prefix: The text in front of requested names.
    """

    def __init__(self, params: Mapping[str, Any], prefix: str = ""):
        self.params, self.prefix = params, prefix

    def __getitem__(self, name: str) -> Array:
        path = self.prefix + name
        if path not in self.params:
            raise ValueError(f"the checkpoint has no tensor {path!r}{nearest(path, self.params)}")
        return jnp.asarray(self.params[path])

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.params

    def __truediv__(self, prefix: str) -> "Tensors":
        return Tensors(self.params, self.prefix + prefix)

    def maybe(self, prefix: str) -> "Tensors":
        """Adds a prefix if any tensor has it; base models are saved without it."""
        full_prefix = self.prefix + prefix
        return self / prefix if any(path.startswith(full_prefix) for path in self.params) else self


def linear(t: Tensors, name: str, x: Float[Array, "*batch n"]) -> Float[Array, "*batch m"]:
    """Applies a linear layer: `x @ weight.T + bias`; the bias is optional."""
    y = x @ t[f"{name}.weight"].T
    return y + t[f"{name}.bias"] if f"{name}.bias" in t else y


def layer_norm(t: Tensors, name: str, x: Array, eps: float) -> Array:
    """Applies LayerNorm over the last axis: (x - mean) / sqrt(variance + eps) * weight + bias.

    `x` and the result are `(..., n)`.
    """
    centred = x - x.mean(-1, keepdims=True)
    # The variance uses centred values: mean(x^2) - mean(x)^2 cancels for activations far from 0.
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + eps) * t[f"{name}.weight"] + t[f"{name}.bias"]


def rms_norm(t: Tensors, name: str, x: Array, eps: float) -> Array:
    """Applies RMSNorm over the last axis: x / sqrt(mean(x^2) + eps) * weight."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps) * t[f"{name}.weight"]


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    # These are Hugging Face's names. There "gelu" is exact, and two names stand for the tanh
    # approximation that GPT-2 was trained with.
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
}


def activation(name: str) -> Callable[[Array], Array]:
    """Returns a nonlinearity by its name in configurations.

    `name` is a name such as "gelu_new". An unknown name raises a ValueError with the closest names.
    """
    if name not in _ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}{nearest(name, _ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def attend(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b s g k"],
    v: Float[Array, "b s g v"],
    *,
    scale: float,
    mask: Bool[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
) -> Float[Array, "b t hv"]:
    """Computes softmax attention. Several query heads may share a head of keys and values.

        softmax(scale q k^T + bias) v

    Args:
      q: Queries, `(b, t, h, k)`.
      k: Keys, `(b, s, g, k)`. Each of the g heads serves h / g consecutive query heads.
      v: Values, `(b, s, g, v)`.
      scale: The factor on the products.
      mask: True where a query may attend to a key, broadcastable to `(b, h, t, s)`. None:
        everywhere.
      bias: The summand of the products, broadcastable to `(b, h, t, s)`.

    Returns:
      The attention outputs, heads concatenated, `(b, t, h * v)`.
    """
    share = q.shape[2] // k.shape[2]
    # Query head h uses the keys and values of head h // share, as in the original code.
    k, v = (jnp.repeat(x, share, axis=2) for x in (k, v))
    logits = jnp.einsum("bthk,bshk->bhts", q, k) * scale
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    # A query without any allowed key would give NaN. Causal masks allow at least the token itself,
    # and padding masks allow the real tokens.
    mixed = jnp.einsum("bhts,bshv->bthv", jax.nn.softmax(logits, axis=-1), v)
    return mixed.reshape(*mixed.shape[:2], -1)


def attention(
    t: Tensors,
    names: str,
    x: Float[Array, "b t n"],
    heads: int,
    *,
    source: Float[Array, "b s m"] | None = None,
    scale: float | None = None,
    **kwargs: Any,
) -> Float[Array, "b t n"]:
    """Applies an attention layer: four linear layers around softmax attention.

    Args:
      t: The tensors.
      names: The names of query, key, value and output layers, separated by blanks.
      x: The input of the queries, `(b, t, n)`.
      heads: The number of heads.
      source: The input of keys and values, `(b, s, m)`. None: `x`.
      scale: The factor on the products. None: 1 / sqrt(size of a head).
      **kwargs: `mask` and `bias` of `attend`.

    Returns:
      The outputs, `(b, t, n)`.
    """
    q, k, v, o = names.split()
    source = x if source is None else source
    Q, K, V = (
        linear(t, n, y).reshape(*y.shape[:2], heads, -1)
        for n, y in ((q, x), (k, source), (v, source))
    )
    scale = 1 / math.sqrt(Q.shape[-1]) if scale is None else scale
    return linear(t, o, attend(Q, K, V, scale=scale, **kwargs))


def rotary(
    x: Float[Array, "b t h k"], frequencies: Float[Array, "k//2"]
) -> Float[Array, "b t h k"]:
    """Rotates queries or keys by their positions, pairing unit i with unit i + k/2.

    `x` contains queries or keys, `(b, t, h, k)`. `frequencies` contains the angle of each pair per
    position, `(k / 2,)`. Returns the rotated array, `(b, t, h, k)`.

    References:
      Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021
      (arXiv 2104.09864).
    """
    # Units i and i + k/2 form a pair, not neighbours as in the paper: Hugging Face checkpoints
    # store queries and keys in this order.
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def patches(
    x: Float[Array, "b c h w"], kernel: Float[Array, "n c p p"]
) -> Float[Array, "b patches n"]:
    """Embeds the patches of images by a convolution with its kernel size as stride.

    `x` contains images, `(b, c, h, w)`. `kernel` is the kernel, `(n, c, p, p)`. Returns the
    embedded patches, row by row, `(b, patches, n)`.
    """
    size = kernel.shape[2:]
    # [b, n, rows, columns] -> [b, patches, n], row by row.
    y = jax.lax.conv_general_dilated(x, kernel, size, "VALID")
    return jnp.moveaxis(y.reshape(*y.shape[:2], -1), 1, 2)


def embed_patches(
    pixels: Float[Array | np.ndarray, "b c h w"],
    kernel: Float[Array, "n c p p"],
    bias: Float[Array, "n"] | None,
    first: Int[Array, "n"] | Float[Array, "n"],
    positions: Float[Array, "t n"],
) -> Float[Array, "b t n"]:
    """Embeds images as a class token, followed by their patches, and adds positions.

    Args:
      pixels: Images, `(b, c, h, w)`.
      kernel: The kernel of the patches, `(n, c, p, p)`.
      bias: The summand of every patch, `(n,)`, or None.
      first: The class token, `(n,)`.
      positions: The embeddings of positions, `(t, n)`.

    Returns:
      The embedded tokens, `(b, t, n)`.

    Raises:
      ValueError: If the number of patches does not match the number of positions.
    """
    x = patches(jnp.asarray(pixels), kernel)
    x = x if bias is None else x + bias
    x = jnp.concatenate([jnp.broadcast_to(first, (len(x), 1, x.shape[-1])), x], axis=1)
    if x.shape[1] != positions.shape[0]:
        raise ValueError(
            f"images of shape {list(pixels.shape)} have {x.shape[1] - 1} patches, but the "
            f"checkpoint has positions for {positions.shape[0] - 1}"
        )
    return x + positions
