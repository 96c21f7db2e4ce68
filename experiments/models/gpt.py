"""A small GPT: pre-norm blocks, learned positions, causal attention."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`; every size is its own."""

    heads: int
    head_dim: int
    hidden: int
    causal: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*batch time width"]) -> Float[Array, "*batch time width"]:
        width, heads = x.shape[-1], (self.heads, self.head_dim)
        y = nn.LayerNorm(name="ln_1")(x)
        q, k, v = (nn.DenseGeneral(heads, name=name)(y) for name in "qkv")
        logits = jnp.einsum("...thd,...shd->...hts", q, k) / self.head_dim**0.5
        if self.causal:
            logits = jnp.where(jnp.tri(x.shape[-2], dtype=bool), logits, -jnp.inf)
        mixed = jnp.einsum("...hts,...shd->...thd", jax.nn.softmax(logits), v)
        x = x + nn.DenseGeneral(width, axis=(-2, -1), name="o")(mixed)
        y = nn.gelu(nn.Dense(self.hidden, name="in")(nn.LayerNorm(name="ln_2")(x)))
        return x + nn.Dense(width, name="out")(y)


class GPT(nn.Module):
    """Logits of the next token; `tied` reads them out with the embeddings.

    >>> model = GPT(vocab=11, context=8, width=8, layers=2, heads=2, head_dim=4, hidden=16)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 8), int))
    >>> model.apply(params, jnp.zeros((3, 5), int)).shape
    (3, 5, 11)
    """

    vocab: int
    context: int
    width: int
    layers: int
    heads: int
    head_dim: int
    hidden: int
    tied: bool = False

    @nn.compact
    def __call__(self, tokens: Int[Array, "*batch time"]) -> Float[Array, "*batch time vocab"]:
        embed = nn.Embed(self.vocab, self.width, name="token_embed")
        shape = (self.context, self.width)
        positions = self.param("position_embed", nn.initializers.normal(0.02), shape)
        x = embed(tokens) + positions[: tokens.shape[-1]]
        for i in range(self.layers):
            block = Block(self.heads, self.head_dim, self.hidden, causal=True, name=f"block_{i}")
            x = block(x)
        x = nn.LayerNorm(name="ln")(x)
        return embed.attend(x) if self.tied else nn.Dense(self.vocab, False, name="unembed")(x)
