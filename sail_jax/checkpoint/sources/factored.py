"""Factors of low rank as tensors, which are computed from checkpoints or merged, then laid out for
PEFT.

The rank of factors is known only after their computation. The only entry of a `Factored` is the
rank. Reading it passes on the factors, which are stored until all ranks are known.
"""

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sail_jax.checkpoint.contents.layers import role
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.sources.adapter_keys import PREFIX, Pair
from sail_jax.lora import (
    OVERSAMPLING,
    POWERS,
    LowRank,
    approximate,
    concatenate,
    core_space,
    refactor,
    sketched,
)
from sail_jax.merging.merge import Merge
from sail_jax.merging.tensors import OnDemand, Tensor, aligned, bytes_of, held, read_whole

# The number of entries of a difference that are read at once.
_BLOCK = 1 << 20
# An embedding, which PEFT wraps differently from a linear layer. T5's position biases are one.
_EMBEDDING = re.compile(r"(?:^|[._])(?:wte|wpe|embed\w*|\w*embeddings?|relative_attention_bias)$")


class Factors(NamedTuple):
    """The factors of one change, and their error.

    Attributes:
      left: Shape `[rows of the tensor, rank]`.
      right: Shape `[rank, columns of the tensor]`.
      norm: The Frobenius norm of the change.
      error: The Frobenius norm of the change minus left right; 0 if it is exact.
    """

    left: np.ndarray
    right: np.ndarray
    norm: float
    error: float


Keep = Callable[[str, Factors], None]
"""Keeps factors, by name, until all ranks are known."""


class Factored(OnDemand):
    """The rank of factors. Reading it computes and stores the factors."""

    def __init__(self, name: str, source: str, keep: Keep) -> None:
        """Stores the arguments; reads nothing yet.

        Args:
          name: The name under which the factors are stored.
          source: The paths of their inputs, for messages.
          keep: Stores them.
        """
        super().__init__(name, np.dtype(np.int32), (1,), source)
        self._keep = keep

    @property
    @abstractmethod
    def reads(self) -> int:
        """The number of bytes that are read for the factors."""

    @abstractmethod
    def factors(self) -> Factors:
        """Computes the factors."""

    def form(self) -> np.ndarray:
        factors = self.factors()
        self._keep(self.name, factors)
        return np.array([factors.right.shape[0]], np.int32)


class Difference(Factored):
    """The factors of the difference of two tensors.

    Attributes:
      tuned: The tensor after training.
      base: The tensor before.
    """

    def __init__(
        self,
        name: str,
        tuned: Tensor,
        base: Tensor,
        keep: Keep,
        *,
        rank: int | None,
        energy: float | None,
        dtype: np.dtype,
        seed: int,
    ) -> None:
        """Stores the arguments; reads nothing yet.

        Args:
          name: The name under which the factors are stored.
          tuned: The matrix after training.
          base: The matrix before, of the same shape.
          keep: Stores them.
          rank: The largest rank; see `sail_jax.lora.approximate`.
          energy: The fraction of squared singular values to keep.
          dtype: The dtype to which the factors are rounded.
          seed: The seed of the random columns.
        """
        super().__init__(name, f"{tuned.source} without {base.source}", keep)
        self.tuned, self.base = tuned, base
        self._rank, self._energy, self._dtype, self._seed = rank, energy, dtype, seed

    @property
    def reads(self) -> int:
        return sum(bytes_of(x) for x in (self.tuned, self.base))

    @property
    def needs(self) -> int:
        """The bytes of the difference in float32, and of the decomposition's arrays."""
        rows, columns = self.tuned.shape
        low, high = sorted((rows, columns))
        rank = low if self._rank is None else min(low, self._rank)
        entries = rows * columns
        if self._energy is None and sketched((rows, columns), rank):
            # The columns of the space, their products, and a copy of each in QR.
            width = (POWERS + 1) * (rank + OVERSAMPLING)
            entries += 3 * width * (low + high)
        else:
            # All singular vectors, with a copy of the matrix and the work space of `gesdd`.
            entries += 3 * rows * columns + 8 * low * low
        block = 2 * _BLOCK * (self.tuned.dtype.itemsize + 4)
        return 4 * entries + block + held(self.tuned) + held(self.base)

    def factors(self) -> Factors:
        delta = self._delta()
        rows, columns = delta.shape
        if not delta.any():
            return Factors(np.zeros((rows, 0), "f"), np.zeros((0, columns), "f"), 0.0, 0.0)
        matrix = jax.device_put(delta, may_alias=True)
        key = jax.random.key(self._seed)
        pair, _ = approximate(matrix, self._rank, self._energy, key=key)
        left, right = (np.asarray(x).astype(self._dtype) for x in pair)
        # The error of the factors as written. (Not from `residual`, which is compiled for each
        # rank.)
        return Factors(left, right, _norm(delta), _distance(delta, left, right))

    def _delta(self) -> np.ndarray:
        """Computes the difference, in float32."""
        delta = aligned(self.tuned.shape, np.dtype(np.float32))
        flat = delta.reshape(-1)
        wide = np.result_type(*(_wider(x.dtype) for x in (self.tuned, self.base)))
        for start in range(0, flat.size, _BLOCK):
            parts = []
            for tensor in (self.tuned, self.base):
                part = np.empty(min(_BLOCK, flat.size - start), tensor.dtype)
                tensor.read(part, start)
                parts.append(part.astype(wide))
            block = flat[start : start + _BLOCK]
            block[...] = parts[0] - parts[1]
            if not np.isfinite(block).all():
                for tensor, part in zip((self.tuned, self.base), parts, strict=True):
                    if not np.isfinite(part).all():
                        raise CheckpointError(
                            f"NaN or infinity in {tensor.name} in {tensor.source}, which cannot be "
                            "factored"
                        )
                raise CheckpointError(f"{self.name} of {self.source}: it does not fit float32")
        return delta


@dataclass(frozen=True)
class Scaled:
    """The factors of one module in one adapter.

    Attributes:
      pair: The factors as they are stored.
      scale: The factor on their product.
    """

    pair: Pair
    scale: float

    def read(self) -> LowRank:
        """Reads the factors.

        Returns:
          B, multiplied by the scale, and A, in float32.
        """
        A, B = (read_whole(self.pair.parts[side]).astype(np.float32) for side in "AB")
        return LowRank(B * np.float32(self.scale), A)  # type: ignore


class Joint(Factored):
    """The factors of several adapters' changes of one module, merged.

    `left` is the merged B, and `right` the merged A.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[Scaled | None],
        keep: Keep,
        *,
        weights: Sequence[float],
        merge: Merge | None,
        rank: int | None,
        dtype: np.dtype,
    ) -> None:
        """Stores the arguments; reads nothing yet.

        Args:
          name: The name under which the factors are stored.
          parts: The factors in each adapter; None if there are none.
          keep: Stores them.
          weights: One for each adapter.
          merge: The merge of core matrices; None adds the products.
          rank: The largest rank; None for no limit.
          dtype: The dtype to which the factors are rounded.
        """
        present = [part for part in parts if part is not None]
        sources = dict.fromkeys(part.pair.parts["A"].source for part in present)
        super().__init__(name, " and ".join(sources), keep)
        self._parts, self._weights, self._merge = tuple(parts), tuple(weights), merge
        self._rank, self._dtype = rank, dtype

    @property
    def reads(self) -> int:
        return sum(bytes_of(x) for part in self._parts if part for x in part.pair.parts.values())

    @property
    def needs(self) -> int:
        """The bytes of all factors in float32, of their bases and of the result."""
        tensors = [x for part in self._parts if part for x in part.pair.parts.values()]
        entries = sum(math.prod(x.shape) for x in tensors)
        ranks = sum(part.pair.parts["A"].shape[0] for part in self._parts if part)
        return 4 * (5 * entries + (len(self._parts) + 8) * ranks * ranks) + sum(map(held, tensors))

    def factors(self) -> Factors:
        read = [part and part.read() for part in self._parts]
        for part, pair in zip(self._parts, read, strict=True):
            if part and pair and not all(np.isfinite(x).all() for x in pair):
                where = part.pair.parts["A"].source
                raise CheckpointError(f"NaN or infinity in the factors of {self.name} in {where}")
        adapters = [{} if pair is None else {self.name: pair} for pair in read]
        if self._merge is None:
            whole = concatenate(adapters, list(self._weights))
        else:
            whole = core_space(self._merge, adapters, weights=list(self._weights))
        kept = whole if self._rank is None else refactor(whole, self._rank)
        B, A = (np.asarray(x).astype(self._dtype) for x in kept[self.name])
        # The norms of the change and its error are computed from products of factors, not a dense
        # array.
        written = {self.name: LowRank(jnp.asarray(B, "f"), jnp.asarray(A, "f"))}
        error = concatenate([whole, written], [1.0, -1.0])
        return Factors(B, A, *(_product_norm(x[self.name]) for x in (whole, error)))


@dataclass(frozen=True)
class Target:
    """A module with factors for its weight, and their layout in PEFT.

    Attributes:
      module: The name of the module.
      kind: "linear" for a weight [out, in], "transposed" for one stored as [in, out], and
        "embedding" for rows of tokens or positions.
    """

    module: str
    kind: str

    @classmethod
    def of(cls, module: str, transposed: bool) -> "Target":
        """Determines how PEFT wraps a module.

        Args:
          module: The name of the module.
          transposed: Whether its weight is stored as [in, out].

        Returns:
          The target.

        >>> [Target.of(module, False).kind for module in ("transformer.wte", "lm_head")]
        ['embedding', 'linear']
        """
        name = f"{module}.weight"
        if role(name) != "head" and (role(name) == "embedding" or _EMBEDDING.search(module)):
            return cls(module, "embedding")
        return cls(module, "transposed" if transposed else "linear")

    def keys(self) -> tuple[str, str]:
        """Returns the keys of the factors A and B.

        Returns:
          The key of A and the key of B.
        """
        start = f"{PREFIX}{self.module}.lora_"
        if self.kind == "embedding":
            return f"{start}embedding_A", f"{start}embedding_B"
        return f"{start}A.weight", f"{start}B.weight"


def _wider(dtype: np.dtype) -> np.dtype:
    """Returns a dtype of NumPy that contains all values of another one, for differences."""
    return np.dtype(np.float64 if dtype.itemsize > 4 else np.float32)


def _norm(array: np.ndarray) -> float:
    """Computes the Frobenius norm of a matrix, summing its rows in float64."""
    return math.sqrt(sum(float(np.vdot(row, row)) for row in array))


def _distance(delta: np.ndarray, left: np.ndarray, right: np.ndarray) -> float:
    """Computes the Frobenius norm of a matrix minus left right, in blocks of rows."""
    left, right = left.astype(np.float32), right.astype(np.float32)
    height = max(1, _BLOCK // delta.shape[1])
    total = 0.0
    for row in range(0, delta.shape[0], height):
        rows = slice(row, row + height)
        total += _norm(delta[rows] - left[rows] @ right) ** 2
    return math.sqrt(total)


def _product_norm(pair: LowRank) -> float:
    """Computes the Frobenius norm of B A, from triangular factors of both."""
    R, L = (
        np.asarray(np.linalg.qr(np.asarray(x, np.float64), mode="r")) for x in (pair.B, pair.A.T)
    )
    return float(np.linalg.norm(R @ L.T))
