"""Compares checkpoints before they are merged, reading each once, piece by piece."""

import contextlib
import itertools
import math
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from os import PathLike
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Bool, Float, Int

from sail_jax.checkpoint.contents.relations import contradictions_of
from sail_jax.checkpoint.contents.vocabulary import Vocabulary, read_vocabulary
from sail_jax.checkpoint.formats import hub
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.open import Checkpoint, check_there
from sail_jax.checkpoint.planning.inputs import config_of, is_derived
from sail_jax.checkpoint.sources.quantised import open_values
from sail_jax.configurations import differences
from sail_jax.merging.arithmetic import Products
from sail_jax.merging.selection import Select
from sail_jax.merging.tensors import Tensor, held, same_entries
from sail_jax.probe.networks import Names
from sail_jax.probe.tasks import Conflict, conflict, sums

# Entries read at a time. A piece has one of these two sizes, padded, so only two shapes are
# compiled. Most tensors are large, and norms and biases would waste the large size.
PIECE, FEW = 1 << 20, 1 << 14
# The largest number of bytes of packed or strided tensors, which are loaded whole, per thread.
_HELD = 64 << 20


class Vectors(NamedTuple):
    """Models, or their task vectors, compared as vectors.

    Attributes:
      total: The conflict over all tensors together.
      each: The conflict in each tensor, with a leading axis `[tensor, ...]`.
    """

    total: Conflict
    each: Conflict


class Comparison(NamedTuple):
    """A comparison of checkpoints before a merge.

    Attributes:
      models: The paths of the models.
      base: The path of the base, if there is one.
      tensors: The names of the floating tensors, which are compared.
      sizes: The number of entries of each of these tensors, `[tensor]`.
      weights: The models themselves, compared as vectors.
      tasks: Their task vectors, compared; None without a base.
      base_norms: The norm of each tensor of the base, `[tensor]`; None without a base.
      equal: Which models have the same values everywhere, `[model, model]`.
      differences: A sentence for each difference from the first model in configurations, tokenizers
        and non-float tensors. The merged model may then behave like neither of them.
      contradictions: A sentence for each statement of a configuration or tokenizer that its own
        checkpoint's tensors contradict."""

    models: Names
    base: str | None
    tensors: Names
    sizes: Int[np.ndarray, "tensor"]
    weights: Vectors
    tasks: Vectors | None
    base_norms: Float[np.ndarray, "tensor"] | None
    equal: Bool[np.ndarray, "model model"]
    differences: tuple[str, ...]
    contradictions: tuple[str, ...]

    def __repr__(self) -> str:
        models, tensors = list(self.models), len(self.tensors)
        return f"Comparison(models={models}, base={self.base!r}, tensors={tensors})"

    @property
    def relative_norms(self) -> Float[np.ndarray, "model"]:
        """|theta_i - base| / |base| over all tensors, `[model]`; ValueError without a base."""
        if self.tasks is None or self.base_norms is None:
            raise ValueError("task vectors need a base: none was given")
        return np.asarray(self.tasks.total.norms) / max(
            float(np.linalg.norm(self.base_norms)), 1e-300
        )


def compare_checkpoints(
    paths: Sequence[str | PathLike[str]],
    base: str | PathLike[str] | None = None,
    *,
    allow_pickle: bool = False,
    offline: bool = False,
    select: Select = None,
) -> Comparison:
    """Compares two or more checkpoints: cosines, norms, sign conflicts and heterogeneity.

    These are the quantities of `sail_jax.probe.interference` (without its subspaces), with equal
    weights of the models. Every file is read once, in pieces of 2^20 entries of each model, one
    tensor per core (up to 8). Packed tensors, as in compressed .npz files, are loaded whole. Packed
    tensors that require more than 64 MiB over all models are compared one after another. There is
    no other limit on memory.

    Args:
      paths: The checkpoints, at least two.
      base: The checkpoint before fine-tuning; task vectors are compared only if it is given.
      allow_pickle: Whether PyTorch's pickles are read; see `open_checkpoint`.
      offline: Whether models on the Hub are not downloaded; see `open_checkpoint`.
      select: Which tensors are compared; see `sail_jax.merging.selection`.

    Returns:
      The comparison, in total and for each tensor.

    Raises:
      CheckpointError: If there are fewer than two models or one occurs twice, tensors are missing
        or have different shapes, none is floating-point, or values are not finite.

    >>> import tempfile
    >>> from sail_jax.checkpoint import save_checkpoint
    >>> folder = tempfile.mkdtemp()
    >>> for name, values in {"a": [1, 1], "b": [1, -1], "base": [0, 0]}.items():
    ...     save_checkpoint(f"{folder}/{name}", {"w": np.array(values, np.float32)})
    >>> compared = compare_checkpoints([f"{folder}/a", f"{folder}/b"], f"{folder}/base")
    >>> tasks = compared.tasks.total
    >>> tasks.cosines[0, 1].item(), tasks.sign_conflict.item()  # one entry of two is opposed
    (0.0, 0.5)
    """
    if isinstance(paths, str | PathLike) or len(paths) < 2:
        raise CheckpointError("expected at least two checkpoints to compare")
    named = [os.fspath(path) for path in (*paths, *([] if base is None else [base]))]
    for first, second in itertools.combinations(named, 2):
        # Links and relative paths are resolved: two names of one file are one model.
        if os.path.realpath(first) == os.path.realpath(second):
            raise CheckpointError(f"{second} is given twice; expected different models")
    check_there(named, offline=offline)
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(
                open_values(path, allow_pickle=allow_pickle, offline=offline, select=select)
            )
            for path in named
        ]
        names = _alike(opened)
        floating = [n for n in names if jnp.issubdtype(opened[0].tensors[n].dtype, jnp.floating)]
        if not floating:
            raise CheckpointError(f"{named[0]} holds no floating tensors to compare")
        vocabularies = [read_vocabulary(checkpoint.extras) for checkpoint in opened]
        rest = [n for n in names if n not in set(floating)]
        lines = _differences(opened, vocabularies, rest)
        contradictions = [
            f"{hub.called(checkpoint.path)}: {found}"
            for checkpoint, vocabulary in zip(opened, vocabularies, strict=True)
            for found in contradictions_of(checkpoint, vocabulary)
        ]
        labels = [
            hub.called(path if checkpoint.snapshot is None else checkpoint.path)
            for path, checkpoint in zip(named, opened, strict=True)
        ]
        columns = [[checkpoint.tensors[n] for checkpoint in opened] for n in floating]
        # Each thread processes one tensor: reading and XLA release the interpreter lock.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            alone = partial(_alone, threading.Lock(), base is not None)
            rows = list(pool.map(alone, columns))
        for checkpoint in opened:
            checkpoint.check_unchanged()
    sizes = np.array([math.prod(column[0].shape) for column in columns])
    weights, tasks, norms, equal = zip(*rows, strict=True)
    return Comparison(
        Names(labels[: len(paths)]),
        None if base is None else labels[-1],
        Names(floating),
        sizes,
        _vectors(weights, sizes),
        None if base is None else _vectors(tasks, sizes),
        None if base is None else np.sqrt(np.array(norms)),
        np.logical_and.reduce(equal),
        tuple(lines),
        tuple(contradictions),
    )


def _alike(opened: Sequence[Checkpoint]) -> list[str]:
    """Returns the tensors that all checkpoints contain, in the order of the first.

    Raises a CheckpointError if a tensor is missing in one of them (except tensors derived from the
    configuration), or has another shape.
    """
    first, *others = opened
    for other in others:
        for a, b in ((first, other), (other, first)):
            lost = [n for n in a.tensors if n not in b.tensors and not is_derived(n)]
            if lost:
                more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
                raise CheckpointError(
                    f"{b.path} lacks the tensor {lost[0]!r}{more} of {a.path}: models "
                    "of different structure cannot be averaged"
                )
    # Tensors derived from the configuration may be in some files only, and are ignored.
    names = [n for n in first.tensors if all(n in other.tensors for other in others)]
    for name in names:
        want = first.tensors[name]
        for other in others:
            got = other.tensors[name]
            kinds = [jnp.issubdtype(x.dtype, jnp.floating) for x in (want, got)]
            if got.shape != want.shape or kinds[0] != kinds[1]:
                raise CheckpointError(
                    f"{name!r} is {want.dtype}{list(want.shape)} in {first.path}, but "
                    f"{got.dtype}{list(got.shape)} in {other.path}"
                )
    return names


def _differences(
    opened: Sequence[Checkpoint],
    vocabularies: Sequence[Vocabulary | None],
    rest: Sequence[str],
) -> list[str]:
    """Returns the sentences of `Comparison.differences`; `rest` are the non-float tensors."""
    first, *others = opened
    config = config_of(first.extras)
    lines = []
    vocabulary, *theirs = map(_ids, vocabularies)
    for other, ids in zip(others, theirs, strict=True):
        there = config_of(other.extras)
        for key, (a, b) in (differences(config, there) if config and there else {}).items():
            lines.append(f"config: {key!r} is {a!r} in {first.path}, but {b!r} in {other.path}")
        if vocabulary and ids and ids != vocabulary:
            # Tokens that only the other vocabulary has affect its length, not this count.
            apart = sum(ids.get(text) != i for text, i in vocabulary.items())
            lines.append(
                f"tokenizer: {max(apart, abs(len(ids) - len(vocabulary)))} of {len(vocabulary)} "
                f"tokens of {first.path} have another id, or none, in {other.path}"
            )
        lines += [
            f"{name!r} is not floating, and differs between {first.path} and {other.path}"
            for name in rest
            if not is_derived(name) and not same_entries(first.tensors[name], other.tensors[name])
        ]
    return lines


def _ids(vocabulary: Vocabulary | None) -> Mapping[str, int]:
    """Returns the id of each token; empty if the tokenizer is unknown."""
    return {} if vocabulary is None else vocabulary.ids


def _alone(
    lock: threading.Lock, with_base: bool, column: Sequence[Tensor]
) -> tuple[list[np.ndarray], list[np.ndarray], float, np.ndarray]:
    """Computes the sums of `_compared` for one tensor; one tensor at a time if it is large."""
    with lock if sum(map(held, column)) > _HELD else contextlib.nullcontext():
        return _compared(with_base, column)


def _compared(
    with_base: bool, column: Sequence[Tensor]
) -> tuple[list[np.ndarray], list[np.ndarray], float, np.ndarray]:
    """Computes sums over one tensor, which determine its conflict; the base, if any, comes last.

    Returns the sums of the models and of their task vectors, the square of the base's norm, and
    which models are equal.
    """
    size = math.prod(column[0].shape)
    k = len(column) - with_base
    w = np.full(k, 1 / k)
    own, task, square = _zeros(k), _zeros(k), 0.0
    equal = np.ones((k, k), bool)
    for start in range(0, size, PIECE):
        count = min(PIECE, size - start)
        stack = [_read(tensor, start, count) for tensor in column]
        models, origin = np.stack(stack[:k]), stack[-1]
        equal &= np.array([[np.array_equal(a, b) for b in models] for a in models])
        _add(own, models, w, column)
        if with_base:
            _add(task, models - origin, w, column)
            square += float(np.square(origin, dtype=np.float64).sum())
    return own, task, square, equal


def _zeros(k: int) -> list[np.ndarray]:
    """Totals for `sums`, for k models."""
    return [np.zeros((k, k)), np.zeros(()), np.zeros(())]


def _read(tensor: Tensor, start: int, count: int) -> np.ndarray:
    """Returns entries in float32 or float64, padded with zeros, which do not affect the sums.

    With the padding, only two shapes of pieces occur, and little is compiled.
    """
    raw = np.empty(count, tensor.dtype)
    tensor.read(raw, start)
    wide = np.float64 if tensor.dtype == np.float64 else np.float32
    out = np.zeros(FEW if count <= FEW else PIECE, wide)
    out[:count] = raw
    if not np.isfinite(out).all():
        raise CheckpointError(f"{tensor.source}: '{tensor.name}' has values that are not finite")
    return out


def _add(
    total: list[np.ndarray], stack: np.ndarray, w: np.ndarray, column: Sequence[Tensor]
) -> None:
    """Adds the sums over a piece, taken in its own dtype, to totals in float64."""
    with jax.enable_x64(stack.dtype == np.float64):
        inner, opposed, apart = jax.device_get(sums(stack, w))
    with np.errstate(over="ignore"):
        for i, x in enumerate((inner.plain, np.float64(opposed), apart.plain[0, 0])):
            total[i] = np.asarray(total[i] + x)
    if not np.isfinite(total[0]).all():
        raise CheckpointError(f"'{column[0].name}': squares of its values overflow float64")


def _vectors(parts: Sequence[Sequence[np.ndarray]], sizes: np.ndarray) -> Vectors:
    """Computes the conflict over all tensors and in each of them, from sums."""
    stacks = [np.stack(x) for x in zip(*parts, strict=True)]
    return Vectors(_conflict([x.sum(0) for x in stacks], sizes.sum()), _conflict(stacks, sizes))


def _conflict(parts: Sequence[ArrayLike], size: ArrayLike) -> Conflict:
    """Computes the conflict from sums, in float64."""
    with jax.enable_x64(True):
        inner, opposed, apart = (jnp.asarray(x, float) for x in parts)
        apart = apart[..., None, None]
        inner, apart = (Products(jnp.ones(x.shape[:-1]), x) for x in (inner, apart))
        made = conflict((inner, opposed, apart), jnp.asarray(size, float))
    return jax.tree.map(np.asarray, made)


def pooled(vectors: Vectors, sizes: Int[np.ndarray, "tensor"], chosen: Sequence[int]) -> Conflict:
    """Computes the conflict over several tensors together, such as a layer's tensors.

    Args:
      vectors: The comparison of models or of task vectors.
      sizes: The number of entries of each tensor, `[tensor]`.
      chosen: The indices of the tensors.

    Returns:
      The conflict over these tensors, as if they were one.
    """
    at = np.asarray(chosen, int)
    norms, cosines, signs, apart = (np.asarray(x)[at] for x in vectors.each)
    # Cosines and fractions are converted back to sums over entries, which can be added.
    products = cosines * norms[:, :, None] * norms[:, None, :]
    parts = [x.sum(0) for x in (products, signs * sizes[at], apart)]
    return _conflict(parts, sizes[at].sum())
