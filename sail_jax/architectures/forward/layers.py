"""What the forward passes share: tensors by name, norms, nonlinearities, attention, positions."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sail_jax.checks import nearest

__all__ = [
    "Tensors",
    "activation",
    "attend",
    "attention",
    "embed_patches",
    "layer_norm",
    "linear",
    "patches",
    "rms_norm",
    "rotary",
]


class Tensors:
    """Tensors of a checkpoint under a prefix: `t["wte.weight"]`, `t / "h.0."`."""

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
        """Under the prefix if any tensor is: base models are saved without it."""
        full_prefix = self.prefix + prefix
        return self / prefix if any(path.startswith(full_prefix) for path in self.params) else self


def linear(t: Tensors, name: str, x: Float[Array, "*batch n"]) -> Float[Array, "*batch m"]:
    """`x @ weight.T + bias`, if there is one."""
    y = x @ t[f"{name}.weight"].T
    return y + t[f"{name}.bias"] if f"{name}.bias" in t else y


def layer_norm(t: Tensors, name: str, x: Array, eps: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + eps) * t[f"{name}.weight"] + t[f"{name}.bias"]


def rms_norm(t: Tensors, name: str, x: Array, eps: float) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps) * t[f"{name}.weight"]


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
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
    """By the name that configurations use; ValueError, naming the nearest, if unknown."""
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
    """Softmax attention, each head of keys and values serving h / g consecutive queries."""
    share = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, share, axis=2) for x in (k, v))
    logits = jnp.einsum("bthk,bshk->bhts", q, k) * scale
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
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
    """Attention by four linear layers (query, key, value, output), `scale` 1/sqrt(size)."""
    q, k, v, o = names.split()
    source = x if source is None else source
    Q, K, V = (
        linear(t, n, y).reshape(*y.shape[:2], heads, -1)
        for n, y in ((q, x), (k, source), (v, source))
    )
    scale = 1 / math.sqrt(Q.shape[-1]) if scale is None else scale
    return linear(t, o, attend(Q, K, V, scale=scale, **kwargs))


def rotary(x: Float[Array, "b t h k"], frequencies: Float[Array, "k/2"]) -> Float[Array, "b t h k"]:
    """Rotary positions (Su et al. 2021), unit i paired with unit i + k/2."""
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def patches(
    x: Float[Array, "b c h w"], kernel: Float[Array, "n c p p"]
) -> Float[Array, "b patches n"]:
    """Each patch of the image against the kernel, row by row."""
    size = kernel.shape[2:]
    y = jax.lax.conv_general_dilated(x, kernel, size, "VALID")
    return jnp.moveaxis(y.reshape(*y.shape[:2], -1), 1, 2)


def embed_patches(
    pixels: Float[Array, "b c h w"],
    kernel: Float[Array, "n c p p"],
    bias: Float[Array, "n"] | None,
    first: Int[Array, "n"] | Float[Array, "n"],
    positions: Float[Array, "t n"],
) -> Float[Array, "b t n"]:
    """A class token, then the patches, plus their positions."""
    x = patches(pixels, kernel)
    x = x if bias is None else x + bias
    x = jnp.concatenate([jnp.broadcast_to(first, (len(x), 1, x.shape[-1])), x], axis=1)
    if x.shape[1] != positions.shape[0]:
        raise ValueError(
            f"images of shape {list(pixels.shape)} make {x.shape[1] - 1} patches, but the "
            f"checkpoint has positions for {positions.shape[0] - 1}"
        )
    return x + positions
