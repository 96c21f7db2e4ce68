"""The transformers Llama and OLMo (version 1), which differ in their norms."""

from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from experiments.models.attention import attend, check_length, dropped

Norm = Literal["rmsnorm", "layernorm"]


def rotary(
    x: Float[Array, "*batch t h k"], theta: float = 10000.0, start: int = 0
) -> Float[Array, "*batch t h k"]:
    """Rotates the halves of each head by angles that grow with the position (rotary positions).

    At position p the pair (x_i, x_{i+k/2}) is rotated by the angle p theta^(-2i/k), for i < k/2.
    This pairing follows Hugging Face's checkpoints; the paper pairs neighbours.

    Args:
      x: Queries or keys: h heads of even size k at each of t positions.
      theta: The base of the frequencies.
      start: The first position.

    Returns:
      The rotated array. Products of queries and keys then depend only on distances of positions.

    Raises:
      ValueError: If the size of a head is odd.

    References:
      Su et al., RoFormer, 2021 (arXiv 2104.09864).

    >>> rotary(jnp.ones((2, 1, 2))).round(3).tolist()
    [[[1.0, 1.0]], [[-0.301..., 1.38...]]]
    """
    size = x.shape[-1]
    if size % 2:
        raise ValueError(f"head_dim must be even for rotary positions, got {size}")
    frequencies = theta ** (-jnp.arange(0, size, 2) / size)
    angles = (start + jnp.arange(x.shape[-3]))[:, None, None] * frequencies
    # Angles are in float32, because half precision cannot resolve large positions.
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class _Block(nn.Module):
    """A transformer block without biases: causal attention with rotary positions, then a SwiGLU
    MLP.
    """

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
    """Makes the norm of a Llama or of an OLMo.

    Args:
      norm: "rmsnorm" for RMSNorm with a scale, "layernorm" for OLMo's LayerNorm without parameters.
      eps: The epsilon of the norm.
      name: The name of the submodule.

    Returns:
      The norm.

    Raises:
      ValueError: If the norm is neither.
    """
    if norm == "rmsnorm":
        return nn.RMSNorm(eps, name=name)
    if norm == "layernorm":
        return nn.LayerNorm(eps, use_bias=False, use_scale=False, name=name)
    raise ValueError(f"norm must be 'rmsnorm' or 'layernorm', got {norm!r}")


class Llama(nn.Module):
    """Llama or OLMo, a causal language model: the logits of the next token at each position.

    Blocks have rotary positions and SwiGLU MLPs, and there are no biases. Dropout acts on the
    embeddings, on attention and on the outputs of a block's parts. Each block sows its gated units
    as "hidden" in the collection "intermediates".

    Attributes:
      vocab: The number of tokens.
      context: The length of the longest sequence.
      width: The width of the residual stream.
      layers: The number of blocks. Their names are "block_0" and so on.
      heads: The number of heads of queries in a block.
      head_dim: The size of a head, which is even.
      hidden: The number of gated units of an MLP.
      kv_heads: The number of heads of keys and values, which divides `heads`; None for `heads`.
      tied: Whether the embeddings also compute the logits; else a layer without biases does.
      norm: "rmsnorm" (Llama), or "layernorm" without parameters (OLMo).
      rope_theta: The base of the frequencies of rotary positions.
      rms_norm_eps: The epsilon of all norms, of either kind.
      dropout: The dropout rate, in training only.
      logit_scale: The factor on the logits. muP with tied embeddings uses the base width over the
        width.

    References:
      Touvron et al., LLaMA, 2023 (arXiv 2302.13971).
      Groeneveld et al., OLMo, 2024 (arXiv 2402.00838).

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
    logit_scale: float = 1.0

    @nn.compact
    def __call__(
        self, tokens: Int[Array, "*batch time"], train: bool = False
    ) -> Float[Array, "*batch time vocab"]:
        """Computes the logits of the next token.

        Args:
          tokens: The tokens, in range(vocab); a sequence has at most `context` of them.
          train: Whether dropout is on, with the PRNG stream "dropout".

        Returns:
          The logits of the next token at each position.

        Raises:
          ValueError: If the sequence is longer than `context`, `kv_heads` does not divide `heads`,
            `head_dim` is odd, or `norm` is unknown.
        """
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
        if self.logit_scale != 1:
            x = x * self.logit_scale
        return embed.attend(x) if self.tied else nn.Dense(self.vocab, False, name="unembed")(x)
