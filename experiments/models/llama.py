"""The block of Llama (Touvron et al. 2023) and OLMo (Groeneveld et al. 2024)."""

from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from experiments.models.attention import attend, check_length, dropped

Norm = Literal["rmsnorm", "layernorm"]


def rotary(
    x: Float[Array, "*batch t h k"], theta: float = 10000.0, start: int = 0
) -> Float[Array, "*batch t h k"]:
    """Rotary positions `start, start + 1, ...` (Su et al. 2021): unit i paired with unit i + k/2
    and turned by position * theta**(-2 i / k), as the checkpoints of Hugging Face have it.

    ValueError for a head of an odd size.
    """
    size = x.shape[-1]
    if size % 2:
        raise ValueError(f"head_dim must be even for rotary positions, got {size}")
    frequencies = theta ** (-jnp.arange(0, size, 2) / size)
    angles = (start + jnp.arange(x.shape[-3]))[:, None, None] * frequencies
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class _Block(nn.Module):
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    norm: Norm
    rope_theta: float
    eps: float
    dropout: float

    @nn.compact
    def __call__(self, x: Float[Array, "*batch time width"], train: bool):
        width, drop = x.shape[-1], dropped(self.dropout, train)

        y = normalised(self.norm, self.eps, "norm_1")(x)
        q, k, v = (
            nn.Dense(n * self.head_dim, False, name=name)(y).reshape(*y.shape[:-1], n, -1)
            for name, n in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        q, k = rotary(q, self.rope_theta), rotary(k, self.rope_theta)
        y = attend(q, k, v, causal=True, drop=drop)
        y = nn.Dense(width, False, name="o")(y.reshape(*y.shape[:-2], -1))
        x = x + (drop(y) if drop else y)
        y = normalised(self.norm, self.eps, "norm_2")(x)
        gate, up = (nn.Dense(self.hidden, False, name=name)(y) for name in ("gate", "up"))
        y = nn.silu(gate) * up
        self.sow("intermediates", "hidden", y)
        y = nn.Dense(width, False, name="down")(y)
        return x + (drop(y) if drop else y)


def normalised(norm: Norm, eps: float, name: str) -> nn.Module:
    """RMSNorm with a scale, or OLMo's LayerNorm without parameters; ValueError for another."""
    if norm == "rmsnorm":
        return nn.RMSNorm(eps, name=name)
    if norm == "layernorm":
        return nn.LayerNorm(eps, use_bias=False, use_scale=False, name=name)
    raise ValueError(f"norm must be 'rmsnorm' or 'layernorm', got {norm!r}")


class Llama(nn.Module):
    """Logits of the next token: RMSNorm, SwiGLU, rotary positions, no biases. `kv_heads` of keys
    and values are shared by `heads` queries (all its own where None); `tied` reads out with the
    embeddings; `norm="layernorm"` is OLMo's, without parameters.

    `dropout`, of embeddings, attention and what blocks add, takes place under `train` (PRNG
    stream "dropout"). Features: every submodule's output, and of each block the gated "hidden".

    >>> import jax, numpy as np
    >>> sizes = dict(width=8, layers=1, heads=4, kv_heads=2, head_dim=4, hidden=12)
    >>> model = Llama(vocab=11, context=8, **sizes)
    >>> made = jax.eval_shape(model.init_with_output, jax.random.key(0), np.zeros((3, 5), int))
    >>> logits, params = made
    >>> logits.shape
    (3, 5, 11)
    """

    vocab: int
    context: int
    width: int
    layers: int
    heads: int
    head_dim: int
    hidden: int
    kv_heads: int | None = None
    tied: bool = False
    norm: Norm = "rmsnorm"
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    dropout: float = 0.0

    @nn.compact
    def __call__(
        self, tokens: Int[Array, "*batch time"], train: bool = False
    ) -> Float[Array, "*batch time vocab"]:
        check_length(tokens, self.context)
        shared = self.kv_heads or self.heads
        if self.heads % shared:
            raise ValueError(f"kv_heads: {shared} do not divide {self.heads} heads")
        embed = nn.Embed(self.vocab, self.width, name="token_embed")
        x = embed(tokens)
        if drop := dropped(self.dropout, train):
            x = drop(x)
        sizes = (self.heads, shared, self.head_dim, self.hidden)
        how = (self.norm, self.rope_theta, self.rms_norm_eps, self.dropout)
        for i in range(self.layers):
            x = _Block(*sizes, *how, name=f"block_{i}")(x, train)
        x = normalised(self.norm, self.rms_norm_eps, "norm")(x)
        return embed.attend(x) if self.tied else nn.Dense(self.vocab, False, name="unembed")(x)
