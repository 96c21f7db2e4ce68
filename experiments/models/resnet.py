"""A residual network with BatchNorm (He et al. 2016), for small images."""

from collections.abc import Sequence

import flax.linen as nn
from jaxtyping import Array, Float


class ResNet(nn.Module):
    """A stage of `blocks` blocks per width; the first block of each but the first halves the
    image and projects. `train` normalises by the batch and updates `batch_stats`.

    `inner` gives the width inside each block, stage by stage, where it is not the stage's own.

    >>> import jax, jax.numpy as jnp
    >>> model = ResNet(widths=(4, 8), blocks=1, outputs=10)
    >>> variables = model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))
    >>> sorted(variables), model.apply(variables, jnp.zeros((3, 8, 8, 1))).shape
    (['batch_stats', 'params'], (3, 10))
    """

    widths: Sequence[int]
    blocks: int
    outputs: int
    inner: Sequence[int] | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch height width c"], train: bool = False
    ) -> Float[Array, "batch outputs"]:
        def norm(name):
            return nn.BatchNorm(not train, momentum=0.9, name=name)

        x = nn.relu(norm("stem_bn")(_conv(self.widths[0], "stem")(x)))
        for s, (width, inner) in enumerate(
            zip(self.widths, self.inner or self.widths, strict=True)
        ):
            for b in range(self.blocks):
                name = f"stage{s}_block{b}"
                x = _Block(width, inner, project=s > 0 and b == 0, name=name)(x, train)
        return nn.Dense(self.outputs, name="head")(x.mean(axis=(1, 2)))


class _Block(nn.Module):
    width: int
    inner: int
    project: bool

    @nn.compact
    def __call__(self, x, train: bool):
        def norm(name):
            return nn.BatchNorm(not train, momentum=0.9, name=name)

        stride = 2 if self.project else 1
        y = nn.relu(norm("bn1")(_conv(self.inner, "conv1", stride)(x)))
        y = norm("bn2")(_conv(self.width, "conv2")(y))
        if self.project:
            x = norm("proj_bn")(nn.Conv(self.width, (1, 1), 2, use_bias=False, name="proj")(x))
        return nn.relu(x + y)


def _conv(width: int, name: str, stride: int = 1) -> nn.Conv:
    return nn.Conv(width, (3, 3), stride, use_bias=False, name=name)
