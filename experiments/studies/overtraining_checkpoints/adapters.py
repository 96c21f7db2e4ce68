"""Adapters of low rank (LoRA) of the matrices of blocks, trained in place of all weights."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from sail_jax.trees import path_str

_MATRIX = re.compile(r"block_\d+/\w+/kernel")


@dataclasses.dataclass(frozen=True)
class LoRA:
    """W + (alpha / rank) A B for every matrix of the blocks, A at random and B 0 in the beginning.

    References:
      Hu et al., LoRA: Low-rank adaptation of large language models, 2021 (arXiv 2106.09685).
    """

    rank: int
    alpha: float

    def start(self, params: PyTree, key: Array) -> dict[str, dict[str, Array]]:
        """Factors by the name of the matrix; ValueError where the rank exceeds one."""
        own = {}
        for path, leaf in jax.tree.leaves_with_path(params):
            name = path_str(path)
            if not _MATRIX.fullmatch(name):
                continue
            rows, columns = _sizes(name, leaf.shape)
            if self.rank > min(rows, columns):
                raise ValueError(
                    f"tune.rank must be at most {min(rows, columns)}, as {name} is {rows} x "
                    f"{columns}; got {self.rank}"
                )
            draw = jax.random.normal(jax.random.fold_in(key, len(own)), (rows, self.rank))
            own[name.replace("/", ".")] = {
                "A": draw / math.sqrt(rows),
                "B": jnp.zeros((self.rank, columns)),
            }
        return own

    def __call__(self, params: PyTree, own: PyTree) -> PyTree:
        """The parameters with the adapters added, in the type of these."""
        dtype = jax.tree.leaves(own)[0].dtype

        def leaf(path: tuple, x: Array) -> Array:
            factors = own.get(path_str(path).replace("/", "."))
            x = x.astype(dtype)
            if factors is None:
                return x
            change = (factors["A"] @ factors["B"]).reshape(x.shape)
            return x + (self.alpha / self.rank) * change

        return jax.tree.map_with_path(leaf, params)


def _sizes(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a kernel as a matrix [in, out]; heads have an axis of their own."""
    reads = len(shape) - 1 if name.endswith("o/kernel") else 1
    return math.prod(shape[:reads]), math.prod(shape[reads:])
