"""SiT: a transformer that models the velocity of latents, given a time and a class."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from experiments.models.attention import attend


def timestep_embedding(t: Float[Array, "batch"], size: int) -> Float[Array, "batch size"]:
    """Embeds times as cosines and sines of many frequencies.

    The entries are cos(1000 t f_i), then sin(1000 t f_i), with f_i = 10000^(-2i/size) for i <
    size/2.

    Args:
      t: The times, from 0 to 1.
      size: The number of entries, which is even.

    Returns:
      The embedding of each time.
    """
    frequencies = jnp.exp(-math.log(10000.0) * jnp.arange(size // 2) / (size // 2))
    angles = 1000.0 * t[:, None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def sine_positions(side: int, width: int) -> Float[np.ndarray, "side*side width"]:
    """Computes fixed positions for the patches of a square image, from sines and cosines.

    With f_i = 10000^(-4i/width) for i < width/4, a patch in row r and column c has the entries
    sin(c f_i), cos(c f_i), sin(r f_i), cos(r f_i), a quarter of the width each.

    Args:
      side: The number of patches along a side.
      width: The number of entries, a multiple of 4.

    Returns:
      The positions of the patches, row by row, in float32.

    Raises:
      ValueError: If the width is not a multiple of 4.
    """
    if width % 4:
        raise ValueError(f"width must be a multiple of 4 for sine positions, got {width}")
    frequencies = 10000.0 ** (-np.arange(width // 4) / (width // 4))
    row, column = np.divmod(np.arange(side * side), side)
    parts = [f(x[:, None] * frequencies) for x in (column, row) for f in (np.sin, np.cos)]
    return np.concatenate(parts, axis=-1).astype(np.float32)


class _Block(nn.Module):
    """A transformer block that the condition `c` shifts, scales and gates (adaLN-zero)."""

    heads: int
    head_dim: int
    hidden: int

    @nn.compact
    def __call__(self, x: Float[Array, "batch time width"], c: Float[Array, "batch width"]):
        width = x.shape[-1]
        change = _modulation(6, width, "ada")(nn.silu(c))[:, :, None]
        shift, scale, gate, shift_2, scale_2, gate_2 = jnp.moveaxis(change, 1, 0)
        y = _norm("ln_1")(x) * (1 + scale) + shift
        q, k, v = (nn.DenseGeneral((self.heads, self.head_dim), name=n)(y) for n in "qkv")
        y = nn.DenseGeneral(width, axis=(-2, -1), name="o")(attend(q, k, v))
        x = x + gate * y
        y = _norm("ln_2")(x) * (1 + scale_2) + shift_2
        y = nn.Dense(width, name="out")(nn.gelu(nn.Dense(self.hidden, name="in")(y)))
        return x + gate_2 * y


def _norm(name: str) -> nn.Module:
    """LayerNorm without parameters; the condition shifts and scales its output."""
    return nn.LayerNorm(use_bias=False, use_scale=False, name=name)


def _modulation(n: int, width: int, name: str) -> nn.Module:
    """Maps the condition to `n` vectors of the stream's width, all zero at initialisation."""
    return nn.DenseGeneral((n, width), kernel_init=nn.initializers.zeros, name=name)


class SiT(nn.Module):
    """SiT, a transformer for diffusion: the velocity of noisy latents at a time, given a label.

    At initialisation every block is the identity and the velocity is 0 (adaLN-zero). Positions are
    among the parameters but get no gradient, so exclude them from weight decay.

    Attributes:
      side: The side of the square latents.
      channels: The number of channels of the latents.
      classes: The number of classes.
      patch: The side of a patch, which divides `side`.
      width: The width of the residual stream, a multiple of 4.
      layers: The number of blocks. Their names are "block_0" and so on, and their outputs are
        `(batch, patches, width)`.
      heads: The number of attention heads in a block.
      head_dim: The size of a head.
      hidden: The number of units of an MLP, with GELU.
      frequencies: The size of the embedding of times, an even number.

    References:
      Ma et al., SiT, 2024 (arXiv 2401.08740).
      Peebles and Xie, Scalable Diffusion Models with Transformers, 2023 (arXiv 2212.09748).

    >>> sizes = dict(width=8, layers=1, heads=2, head_dim=4, hidden=16)
    >>> model = SiT(side=4, channels=3, classes=10, patch=2, **sizes)
    >>> inputs = np.zeros((5, 4, 4, 3)), np.zeros(5), np.zeros(5, int)
    >>> velocity, params = jax.eval_shape(model.init_with_output, jax.random.key(0), *inputs)
    >>> velocity.shape
    (5, 4, 4, 3)
    """

    side: int
    channels: int
    classes: int
    patch: int
    width: int
    layers: int
    heads: int
    head_dim: int
    hidden: int
    frequencies: int = 256

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch side side channels"],
        t: Float[Array, "batch"],
        labels: Int[Array, "batch"],
    ) -> Float[Array, "batch side side channels"]:
        """Computes the velocity.

        Args:
          x: The noisy latents.
          t: Their times, from 0 to 1.
          labels: Their classes. The label `classes` means no class, as required for guidance.

        Returns:
          The velocity at each entry of the latents.

        Raises:
          ValueError: If the latents do not have the expected shape, `patch` does
            not divide `side`, or `width` is not a multiple of 4.
        """
        want = (self.side, self.side, self.channels)
        if x.shape[1:] != want or self.side % self.patch:
            raise ValueError(
                f"latents must be [batch, {self.side}, {self.side}, {self.channels}], and patches "
                f"of {self.patch} divide {self.side}: got shape {list(x.shape)}"
            )
        n, p = self.side // self.patch, self.patch
        c = timestep_embedding(t, self.frequencies).astype(x.dtype)
        c = nn.Dense(self.width, name="time_in")(c)
        c = nn.Dense(self.width, name="time_out")(nn.silu(c))
        c = c + nn.Embed(self.classes + 1, self.width, name="label_embed")(labels)
        x = nn.Conv(self.width, (p, p), p, "VALID", name="patch_embed")(x)
        sines = jnp.asarray(sine_positions(n, self.width))
        # A parameter, because the architecture's table permutes it with the stream to which it is
        # added.
        positions = self.param("position_embed", lambda _: sines)
        x = x.reshape(len(x), n * n, -1) + jax.lax.stop_gradient(positions)
        for i in range(self.layers):
            x = _Block(self.heads, self.head_dim, self.hidden, name=f"block_{i}")(x, c)
        shift, scale = jnp.moveaxis(_modulation(2, self.width, "ada_out")(nn.silu(c)), 1, 0)
        x = _norm("ln")(x) * (1 + scale[:, None]) + shift[:, None]
        x = nn.Dense(p * p * self.channels, kernel_init=nn.initializers.zeros, name="head")(x)
        x = x.reshape(len(x), n, n, p, p, self.channels)
        # [row, column, patch row, patch column] -> [row, patch row, column, patch column]: rows of
        # pixels.
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(len(x), *want)
