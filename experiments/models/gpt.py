"""GPT: pre-norm blocks, learned positions, causal attention (Radford et al. 2019)."""

import flax.linen as nn
from jaxtyping import Array, Float, Int

from experiments.models.attention import attend, check_length, dropped


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`; every size is its own."""

    heads: int
    head_dim: int
    hidden: int
    causal: bool = False
    dropout: float = 0.0
    layer_norm_eps: float = 1e-6

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch time width"], train: bool = False
    ) -> Float[Array, "*batch time width"]:
        width, heads = x.shape[-1], (self.heads, self.head_dim)
        drop = dropped(self.dropout, train)
        y = nn.LayerNorm(self.layer_norm_eps, name="ln_1")(x)
        q, k, v = (nn.DenseGeneral(heads, name=name)(y) for name in "qkv")
        mixed = attend(q, k, v, causal=self.causal, drop=drop)
        y = nn.DenseGeneral(width, axis=(-2, -1), name="o")(mixed)
        x = x + (drop(y) if drop else y)
        y = nn.LayerNorm(self.layer_norm_eps, name="ln_2")(x)
        y = nn.Dense(width, name="out")(nn.gelu(nn.Dense(self.hidden, name="in")(y)))
        return x + (drop(y) if drop else y)


class GPT(nn.Module):
    """Logits of the next token; `tied` reads them out with the embeddings. `dropout`, of
    embeddings, attention and what blocks add, takes place under `train` (PRNG stream "dropout").

    >>> import jax, numpy as np
    >>> model = GPT(vocab=11, context=8, width=8, layers=2, heads=2, head_dim=4, hidden=16)
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
    tied: bool = False
    dropout: float = 0.0
    layer_norm_eps: float = 1e-6

    @nn.compact
    def __call__(
        self, tokens: Int[Array, "*batch time"], train: bool = False
    ) -> Float[Array, "*batch time vocab"]:
        check_length(tokens, self.context)
        embed = nn.Embed(self.vocab, self.width, name="token_embed")
        shape = (self.context, self.width)
        positions = self.param("position_embed", nn.initializers.normal(0.02), shape)
        x = embed(tokens) + positions[: tokens.shape[-1]]
        if drop := dropped(self.dropout, train):
            x = drop(x)
        sizes, eps = (self.heads, self.head_dim, self.hidden), self.layer_norm_eps
        for i in range(self.layers):
            x = Block(*sizes, True, self.dropout, eps, name=f"block_{i}")(x, train)
        x = nn.LayerNorm(eps, name="ln")(x)
        return embed.attend(x) if self.tied else nn.Dense(self.vocab, False, name="unembed")(x)
