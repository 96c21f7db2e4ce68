"""Residual networks of two-convolution blocks with BatchNorm (He et al. 2016)."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import flax.linen as nn
from jaxtyping import Array, Float

Stem = Literal["small", "standard"]


class ResNet(nn.Module):
    """A stage of blocks per width, `blocks` of them, or stage by stage; the first block of each
    stage but the first halves the image and projects. ResNet-18 has blocks (2, 2, 2, 2), ResNet-34
    (3, 4, 6, 3). `train` normalises by the batch and updates `batch_stats`.

    The "standard" stem divides the image by four, by a convolution of 7 x 7 and a pooling; "small",
    for small images ("modified"), is a convolution of 3 x 3. `inner` gives the width inside each
    block, stage by stage, where it is not the stage's own.

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
        x = nn.relu(_norm(train)(name="stem_bn")(_stem(self.stem, self.widths[0])(x)))
        if self.stem == "standard":
            x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))  # pyright: ignore[reportArgumentType]
        for name, (s, b) in self.places().items():
            inner = (self.inner or self.widths)[s]
            x = _Block(self.widths[s], inner, project=s > 0 and b == 0, name=name)(x, train)
        return nn.Dense(self.outputs, name="head")(x.mean(axis=(1, 2)))

    def places(self) -> dict[str, tuple[int, int]]:
        """Stage of each block, and its number there, by name, from the input to the output."""
        n = len(self.widths)
        blocks = [self.blocks] * n if isinstance(self.blocks, int) else self.blocks
        if len(blocks) != n or len(self.inner or blocks) != n:
            raise ValueError(f"{n} widths of stages, but blocks {blocks} and inner {self.inner}")
        return {f"stage{s}_block{b}": (s, b) for s in range(n) for b in range(blocks[s])}


class _Block(nn.Module):
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
    return partial(nn.BatchNorm, not train, momentum=0.9)


def _stem(stem: Stem, width: int) -> nn.Conv:
    if stem == "standard":
        return nn.Conv(width, (7, 7), 2, ((3, 3), (3, 3)), use_bias=False, name="stem")
    if stem == "small":
        return _conv(width, "stem")
    raise ValueError(f"stem must be 'small' or 'standard', got {stem!r}")


def _conv(width: int, name: str, stride: int = 1) -> nn.Conv:
    return nn.Conv(width, (3, 3), stride, use_bias=False, name=name)
