"""Adapters of low rank (LoRA) for the matrices of transformer blocks.

If a rank is given, `measure.fine_tune` trains these instead of all weights.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from sail_jax.trees import path_str

# The matrices with an adapter: not embeddings, the output layer or a GPT's positions.
_MATRIX = re.compile(r"block_\d+/\w+/kernel")


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Adds a trainable product of low rank to every matrix of a network's blocks.

    A matrix W becomes W + (alpha / rank) A B. Initially A is random and B is 0, so the network is
    unchanged. An instance is hashable, and can be the `join` of `training.together`.

    Attributes:
      rank: The number of columns of A and of rows of B, at least 1.
      alpha: The product is multiplied by alpha / rank.

    References:
      Hu et al., LoRA: Low-rank adaptation of large language models, 2021 (arXiv 2106.09685).
    """

    rank: int
    alpha: float

    def start(self, params: PyTree, key: Array) -> dict[str, dict[str, Array]]:
        """Draws the initial factors of training.

        Args:
          params: The network's parameters. Kernels of blocks get factors; other parameters do not.
          key: A random key.

        Returns:
          For each matrix, by its path with dots instead of slashes: "A" `(inputs, rank)`, normal
          with variance 1 / inputs, and "B" `(rank, outputs)`, which is 0. Both are float32.

        Raises:
          ValueError: If the rank exceeds the smaller side of a matrix. The message contains its
            name.
        """
        own = {}
        for path, leaf in jax.tree.leaves_with_path(params):
            name = path_str(path)
            if not _MATRIX.fullmatch(name):
                continue
            rows, columns = _sizes(name, leaf.shape)
            if self.rank > min(rows, columns):
                raise ValueError(
                    f"tune.rank must be at most {min(rows, columns)}, because {name} is {rows} x "
                    f"{columns}; got {self.rank}"
                )
            draw = jax.random.normal(jax.random.fold_in(key, len(own)), (rows, self.rank))
            own[name.replace("/", ".")] = {
                "A": draw / math.sqrt(rows),
                "B": jnp.zeros((self.rank, columns)),
            }
        return own

    def __call__(self, params: PyTree, own: PyTree) -> PyTree:
        """Adds the adapters to the parameters.

        Args:
          params: The network's parameters.
          own: The factors, from `start` or trained from there.

        Returns:
          The parameters of the adapted network, all cast to the dtype of the factors.
        """
        # A step casts the trained values to its dtype, but not the constant ones.
        dtype = jax.tree.leaves(own)[0].dtype

        def leaf(path: tuple, x: Array) -> Array:
            """Adds its product to one parameter, if it has one."""
            factors = own.get(path_str(path).replace("/", "."))
            x = x.astype(dtype)
            if factors is None:
                return x
            change = (factors["A"] @ factors["B"]).reshape(x.shape)
            return x + (self.alpha / self.rank) * change

        return jax.tree.map_with_path(leaf, params)


def _sizes(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the numbers of rows and columns of a kernel as a matrix [in, out].

    Heads are a separate axis: an input axis of attention's output projection, and an output axis of
    queries, keys and values.
    """
    reads = len(shape) - 1 if name.endswith("o/kernel") else 1
    return math.prod(shape[:reads]), math.prod(shape[reads:])
