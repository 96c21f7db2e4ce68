"""A small vision transformer, for classification."""

import flax.linen as nn
from jaxtyping import Array, Float

from experiments.models.gpt import Block


class ViT(nn.Module):
    """A vision transformer: patches, blocks, and a linear layer on the mean over patches.

    Positions are learned. The blocks are `gpt.Block`s with the names "block_0" and so on.

    Attributes:
      outputs: The number of outputs.
      patch: The side of a patch. Rows and columns beyond the last whole patch are ignored.
      width: The width of the residual stream.
      layers: The number of blocks.
      heads: The number of attention heads in a block.
      head_dim: The size of a head.
      hidden: The number of units of an MLP.

    References:
      Dosovitskiy et al., An Image is Worth 16x16 Words, 2021 (arXiv 2010.11929), has a class token
      in place of the mean.

    >>> import jax, numpy as np
    >>> model = ViT(outputs=10, patch=4, width=8, layers=1, heads=2, head_dim=4, hidden=16)
    >>> made = jax.eval_shape(model.init_with_output, jax.random.key(0), np.zeros((3, 8, 8, 1)))
    >>> logits, params = made
    >>> logits.shape
    (3, 10)
    """

    outputs: int
    patch: int
    width: int
    layers: int
    heads: int
    head_dim: int
    hidden: int

    @nn.compact
    def __call__(self, x: Float[Array, "batch height width c"]) -> Float[Array, "batch outputs"]:
        """Computes the outputs.

        Args:
          x: The images, with c channels. All have the size used at initialisation.

        Returns:
          The outputs, which are not normalised.
        """
        size = (self.patch, self.patch)
        x = nn.Conv(self.width, size, size, padding="VALID", name="patch_embed")(x)
        x = x.reshape(x.shape[0], -1, self.width)
        shape = x.shape[1:]
        x = x + self.param("position_embed", nn.initializers.normal(0.02), shape)
        for i in range(self.layers):
            x = Block(self.heads, self.head_dim, self.hidden, name=f"block_{i}")(x)
        return nn.Dense(self.outputs, name="head")(nn.LayerNorm(name="ln")(x).mean(axis=1))
