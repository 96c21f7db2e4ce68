"""GPT: a transformer with learned positions, causal attention and pre-norm blocks.

`Block` is also the block of `vit.ViT`.
"""

import flax.linen as nn
from jaxtyping import Array, Float, Int

from experiments.models.attention import attend, check_length, dropped


class Block(nn.Module):
    """A transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    The width is that of the input. All other sizes are free.

    Attributes:
      heads: The number of attention heads.
      head_dim: The size of a head.
      hidden: The number of units of the MLP, with GELU.
      causal: Whether a position attends only to itself and to earlier positions.
      dropout: The dropout rate of attention and of the outputs of both parts.
      layer_norm_eps: The epsilon of both LayerNorms.
    """

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
        """Applies the block.

        Args:
          x: The input at each position.
          train: Whether dropout is on, with the PRNG stream "dropout".

        Returns:
          The output at each position.
        """
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
    """GPT, a causal language model: the logits of the next token at each position.

    Dropout acts on the embeddings, on attention and on the outputs of a block's parts.

    Attributes:
      vocab: The number of tokens.
      context: The number of positions: the longest sequence.
      width: The width of the residual stream.
      layers: The number of blocks. Their names are "block_0" and so on.
      heads: The number of attention heads in a block.
      head_dim: The size of a head.
      hidden: The number of units of an MLP.
      tied: Whether the embeddings also compute the logits; else a layer without biases does.
      dropout: The dropout rate, in training only.
      layer_norm_eps: The epsilon of all LayerNorms.

    References:
      Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (GPT-2).

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
        """Computes the logits of the next token.

        Args:
          tokens: The tokens, in range(vocab); a sequence has at most `context` of them.
          train: Whether dropout is on, with the PRNG stream "dropout".

        Returns:
          The logits of the next token at each position.

        Raises:
          ValueError: If the sequence is longer than `context`.
        """
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
