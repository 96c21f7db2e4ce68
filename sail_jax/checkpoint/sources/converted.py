"""Converts tensors to the layout of another program as they are read.

Several Hugging Face tensors may share one leaf of a tree. The leaf is then read once, and kept
until the last of them has been computed.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np
from jaxtyping import Array

from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.sources.computed import Computed
from sail_jax.checkpoint.sources.programs import Programs
from sail_jax.checkpoint.sources.view import View
from sail_jax.configurations import Config
from sail_jax.interop import layouts
from sail_jax.interop.layouts import Link
from sail_jax.lora import factors, folded
from sail_jax.merging.tensors import OnDemand, Tensor, bytes_of, held, read_whole

Widths = Callable[[np.dtype], np.dtype]
"""Converts a dtype."""


class _Leaf(OnDemand):
    """A leaf of a tree, assembled from Hugging Face tensors."""

    def __init__(self, link: Link, parts: list[Tensor], dtype: np.dtype) -> None:
        shapes = {part.shape for part in parts}
        if len(shapes) > 1:
            raise ValueError(f"{link.leaf!r}: its tensors differ in shape, {sorted(shapes)}")
        super().__init__(link.leaf, dtype, link.shape(parts[0].shape), parts[0].source)
        self._link, self._parts = link, parts
        self.mark = repr(link)

    @property
    def needs(self) -> int:
        """The bytes of the leaf, of one tensor, and of its part in the leaf."""
        return bytes_of(self) + max(
            bytes_of(x) + held(x) + _wide(self._link, x) for x in self._parts
        )

    def form(self) -> np.ndarray:
        out = np.empty(self.shape, self.dtype)
        for n, part in enumerate(self._parts):
            array = read_whole(part).reshape(part.shape)
            out[self._link.at(n, self.shape)] = self._link.put(array, self.dtype)
        return out.reshape(-1)


class _Shared:
    """A leaf that contains several tensors, read with the first of them."""

    def __init__(self, leaf: Tensor, users: int) -> None:
        self.leaf, self._users, self._left = leaf, users, users
        self._lock = threading.Lock()
        self._array: np.ndarray | None = None

    def array(self) -> np.ndarray:
        """Returns the leaf, and frees it after its last use."""
        with self._lock:
            if self._array is None:
                self._array = read_whole(self.leaf).reshape(self.leaf.shape)
            array, self._left = self._array, self._left - 1
            if self._left <= 0:
                self._array, self._left = None, self._users
            return array


class _Part(OnDemand):
    """A Hugging Face tensor, taken from a leaf of a tree."""

    def __init__(self, link: Link, n: int, shared: _Shared, dtype: np.dtype) -> None:
        leaf = shared.leaf
        super().__init__(link.tensors[n], dtype, link.tensor(leaf.shape), leaf.source)
        self._link, self._n, self._shared = link, n, shared
        self.mark = repr(link)

    @property
    def needs(self) -> int:
        """The bytes of the leaf, and of the tensor before it is rounded."""
        leaf = self._shared.leaf
        return bytes_of(leaf) + held(leaf) + bytes_of(self) + _wide(self._link, self)

    def form(self) -> np.ndarray:
        leaf = self._shared.array()
        part = leaf[self._link.at(self._n, leaf.shape)]
        return self._link.take(part, self.dtype).reshape(-1)


def _wide(link: Link, tensor: Tensor | OnDemand) -> int:
    """Returns the bytes for laying out a tensor: a copy, and float64 for a computation."""
    return math.prod(tensor.shape) * (tensor.dtype.itemsize + 8 * (not link.plain))


@contextlib.contextmanager
def _explained(checkpoint: Checkpoint) -> Iterator[None]:
    """Adds the path of a checkpoint to errors about its tensors."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error


def as_tree(
    checkpoint: Checkpoint,
    links: Iterable[Link],
    config: Config,
    widths: Widths,
) -> View:
    """Converts a Hugging Face checkpoint to the leaves of a framework's tree.

    Args:
      checkpoint: The checkpoint.
      links: The leaves and their tensors; see `sail_jax.interop.layouts.links`.
      config: The new content of config.json.
      widths: The dtype of a leaf, from its tensors' dtype.

    Returns:
      The view; its leaves are computed as they are read.

    Raises:
      CheckpointError: If a tensor is missing, has no counterpart in the tree, or has another shape.
    """
    have, tensors = checkpoint.tensors, {}
    with _explained(checkpoint):
        links = layouts.matched(links, have, "tensors")
        layouts.check_placed(links, have)
        for link in links:
            parts = [have[name] for name in link.tensors]
            tensors[link.leaf] = _Leaf(link, parts, widths(parts[0].dtype))
    return View([checkpoint], tensors, config)


def as_hugging_face(
    checkpoint: Checkpoint,
    links: Iterable[Link],
    config: Config,
    widths: Widths,
) -> View:
    """Converts a checkpoint with a framework's tree to Hugging Face tensors.

    Args:
      checkpoint: The checkpoint.
      links: The leaves and their tensors; see `sail_jax.interop.layouts.links_of`.
      config: The new content of config.json.
      widths: The dtype of a tensor, from its leaf's dtype.

    Returns:
      The view; its tensors are computed as they are read.

    Raises:
      CheckpointError: If a leaf is missing, or has another shape.
    """
    have, tensors = checkpoint.tensors, {}
    with _explained(checkpoint):
        for link in layouts.matched(links, have, "leaf"):
            leaf = have[link.leaf]
            shared = _Shared(leaf, len(link.tensors))
            for n, name in enumerate(link.tensors):
                tensors[name] = _Part(link, n, shared, widths(leaf.dtype))
    return View([checkpoint], tensors, config)


def without_factors(checkpoint: Checkpoint, alpha: float) -> View:
    """Adds the factors that qwix stores next to weights to these weights.

    Args:
      checkpoint: The checkpoint.
      alpha: The alpha of qwix's rule.

    Returns:
      The view, without factors; sums are computed as they are read.

    Raises:
      CheckpointError: As `sail_jax.lora.fold` raises ValueError.
    """
    have, programs = checkpoint.tensors, Programs()
    # An optimiser's moments have the paths of the factors, inside its state.
    names = [name for name in have if "opt_state" not in name.split("/")]
    with _explained(checkpoint):
        pairs = factors(dict.fromkeys(names))
        if not pairs:
            raise ValueError("expected leaves such as 'kernel_lora_a' of qwix, got none")
        left = {name for pair in pairs.values() for name in pair}
        tensors: dict[str, Tensor] = {n: have[n] for n in names if n not in left}
        for name, pair in pairs.items():
            parts = [have[n] for n in (name, *pair)]
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in parts]
            function = _Folded(name, alpha)
            jax.eval_shape(function, (), *shapes)
            like = jax.ShapeDtypeStruct(parts[0].shape, parts[0].dtype)
            tensors[name] = Computed(
                name, like, parts, function, (), programs, how="folded", mark=f"alpha {alpha}"
            )
    return View([checkpoint], tensors)


class _Folded:
    """`sail_jax.lora.folded` for one alpha; weights of one shape share its program."""

    def __init__(self, path: str, alpha: float) -> None:
        self._path, self._alpha = path, alpha

    def __hash__(self) -> int:
        return hash(self._alpha)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Folded) and other._alpha == self._alpha

    def __call__(self, _: tuple[()], weight: Array, a: Array, b: Array) -> Array:
        return folded(weight, a, b, self._alpha, self._path)
