"""Residual networks for images, of blocks with two convolutions and BatchNorm."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import flax.linen as nn
from jaxtyping import Array, Float

Stem = Literal["small", "standard"]


class ResNet(nn.Module):
    """A residual network for images, with one stage of blocks for each width.

    Every stage but the first begins with a block that halves the sides of the image and projects
    the shortcut. ResNet-18 has blocks (2, 2, 2, 2), ResNet-34 (3, 4, 6, 3), both with widths (64,
    128, 256, 512). The names of the blocks are "stage0_block0" and so on.

    Attributes:
      widths: The number of channels of each stage.
      blocks: The number of blocks in each stage: one number for all, or one for each.
      outputs: The number of outputs.
      inner: The number of channels inside the blocks of each stage; None for `widths`.
      stem: "standard" is a 7 x 7 convolution and pooling, which together divide the sides of the
        image by four. "small", for small images, is a 3 x 3 convolution that preserves the sides.

    References:
      He et al., Deep Residual Learning for Image Recognition, 2016 (arXiv 1512.03385), Table 1.

    >>> import jax, numpy as np
    >>> model = ResNet(widths=(4, 8), blocks=1, outputs=10)
    >>> made = jax.eval_shape(model.init_with_output, jax.random.key(0), np.zeros((3, 8, 8, 1)))
    >>> logits, variables = made
    >>> sorted(variables), logits.shape
    (['batch_stats', 'params'], (3, 10))
    """

    widths: Sequence[int]
    blocks: int | Sequence[int]
    outputs: int
    inner: Sequence[int] | None = None
    stem: Stem = "small"

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch height width c"], train: bool = False
    ) -> Float[Array, "batch outputs"]:
        """Computes the outputs.

        Args:
          x: The images, with c channels.
          train: Whether BatchNorm normalises by the statistics of the batch and updates the running
            ones. If so, apply the network with `mutable=["batch_stats"]`. Otherwise it uses the
            running ones.

        Returns:
          The outputs, which are not normalised.

        Raises:
          ValueError: If `blocks` or `inner` does not have the length of `widths`, or the stem is
            unknown.
        """
        x = nn.relu(_norm(train)(name="stem_bn")(_stem(self.stem, self.widths[0])(x)))
        if self.stem == "standard":
            x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))  # pyright: ignore[reportArgumentType]
        for name, (s, b) in self.places().items():
            inner = (self.inner or self.widths)[s]
            x = _Block(self.widths[s], inner, project=s > 0 and b == 0, name=name)(x, train)
        return nn.Dense(self.outputs, name="head")(x.mean(axis=(1, 2)))

    def places(self) -> dict[str, tuple[int, int]]:
        """Lists the blocks from the input to the output.

        Returns the stage of each block and its number within the stage, both from 0, by name.

        Raises `ValueError` if `blocks` or `inner` does not have the length of `widths`.
        """
        n = len(self.widths)
        blocks = [self.blocks] * n if isinstance(self.blocks, int) else self.blocks
        if len(blocks) != n or len(self.inner or blocks) != n:
            raise ValueError(f"{n} widths of stages, but blocks {blocks} and inner {self.inner}")
        return {f"stage{s}_block{b}": (s, b) for s in range(n) for b in range(blocks[s])}


class _Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut. With `project` both halve the sides of the image."""

    width: int
    inner: int
    project: bool

    @nn.compact
    def __call__(self, x, train: bool):
        norm, stride = _norm(train), 2 if self.project else 1
        y = nn.relu(norm(name="bn1")(_conv(self.inner, "conv1", stride)(x)))
        y = norm(name="bn2")(_conv(self.width, "conv2")(y))
        if self.project:
            x = nn.Conv(self.width, (1, 1), 2, use_bias=False, name="proj")(x)
            x = norm(name="proj_bn")(x)
        return nn.relu(x + y)


def _norm(train: bool):
    """Returns BatchNorm without a name. It uses batch statistics in training, else running ones."""
    return partial(nn.BatchNorm, not train, momentum=0.9)


def _stem(stem: Stem, width: int) -> nn.Conv:
    """Returns the first convolution, as `ResNet.stem` selects it."""
    if stem == "standard":
        return nn.Conv(width, (7, 7), 2, ((3, 3), (3, 3)), use_bias=False, name="stem")
    if stem == "small":
        return _conv(width, "stem")
    raise ValueError(f"stem must be 'small' or 'standard', got {stem!r}")


def _conv(width: int, name: str, stride: int = 1) -> nn.Conv:
    """Returns a 3 x 3 convolution. It has no biases, because the next BatchNorm would cancel
    them."""
    return nn.Conv(width, (3, 3), stride, use_bias=False, name=name)
