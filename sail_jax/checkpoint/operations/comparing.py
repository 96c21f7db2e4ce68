"""Checkpoints beside each other before they are merged: read once, a piece at a time."""

import contextlib
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.open import Checkpoint, open_values
from sail_jax.checkpoint.planning.inputs import config_of, is_derived
from sail_jax.checkpoint.planning.tokenizers import read_vocabulary
from sail_jax.growth.targets import differences
from sail_jax.merging.tensors import Tensor
from sail_jax.probe.networks import Names
from sail_jax.probe.tasks import Conflict, conflict, sums

__all__ = ["Comparison", "Vectors", "compare_checkpoints", "pooled"]

PIECE, FEW = 1 << 20, 1 << 14  # entries read at a time; all pieces have one of these two sizes


class Vectors(NamedTuple):
    """Models as vectors: conflict of all tensors together, and of each, [tensor, ...]."""

    total: Conflict
    each: Conflict


class Comparison(NamedTuple):
    """What merging will meet, tensor by tensor.

    weights: of the models themselves. tasks: of their task vectors, None without a base.
    base_norms: [tensor], None likewise. sizes: entries, [tensor]. equal: [model, model], which hold
    the same values. differences: a line for each thing in which configurations, tokenizers or
    tensors that are not floating differ from the first's; they say that a merge may not work as
    either model does.
    """

    models: Names
    base: str | None
    tensors: Names
    sizes: Int[np.ndarray, "tensor"]
    weights: Vectors
    tasks: Vectors | None
    base_norms: Float[np.ndarray, "tensor"] | None
    equal: Bool[np.ndarray, "model model"]
    differences: tuple[str, ...]

    @property
    def relative_norms(self) -> Float[np.ndarray, "model"]:
        """|theta_i - base| / |base|, over all tensors; ValueError without a base."""
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
) -> Comparison:
    """Cosines, norms, sign conflicts and heterogeneity of two or more checkpoints, with equal
    weights, as `sail_jax.probe.interference` has them of trees (but for subspaces).

    Every file is read once, a piece of 2^20 entries at a time for each core: memory does not grow
    with the models. Squares are summed in float32 within a piece and in float64 over pieces.

    Raises CheckpointError, a ValueError, for fewer than two models or one named twice, for tensors
    that are missing or of other shapes, naming them, and for values that are not finite.
    """
    if isinstance(paths, str | PathLike) or len(paths) < 2:
        raise CheckpointError("name at least two checkpoints to compare")
    named = [Path(path) for path in paths] + ([] if base is None else [Path(base)])
    for first, second in itertools.combinations(named, 2):
        if os.path.realpath(first) == os.path.realpath(second):
            raise CheckpointError(f"{second} is named twice: a model says nothing beside itself")
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(open_values(path, allow_pickle=allow_pickle)) for path in named
        ]
        names = _alike(opened)
        floating = [n for n in names if jnp.issubdtype(opened[0].tensors[n].dtype, jnp.floating)]
        if not floating:
            raise CheckpointError(f"{named[0]} holds no floating tensors to compare")
        lines = _differences(opened, [n for n in names if n not in set(floating)])
        columns = [[checkpoint.tensors[n] for checkpoint in opened] for n in floating]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            rows = list(pool.map(partial(_compared, base is not None), columns))
        for checkpoint in opened:
            checkpoint.check_unchanged()
    sizes = np.array([math.prod(column[0].shape) for column in columns])
    weights, tasks, norms, equal = zip(*rows, strict=True)
    return Comparison(
        Names(map(str, paths)),
        None if base is None else str(base),
        Names(floating),
        sizes,
        _vectors(weights, sizes),
        None if base is None else _vectors(tasks, sizes),
        None if base is None else np.sqrt(np.array(norms)),
        np.logical_and.reduce(equal),
        tuple(lines),
    )


def _alike(opened: Sequence[Checkpoint]) -> list[str]:
    """The tensors that all have, in the first one's order."""
    first, *others = opened
    for other in others:
        for a, b in ((first, other), (other, first)):
            lost = [n for n in a.tensors if n not in b.tensors and not is_derived(n)]
            if lost:
                more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
                raise CheckpointError(
                    f"{b.path} has no tensor {lost[0]!r}{more}, which {a.path} has: models "
                    "of different structure cannot be averaged"
                )
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


def _differences(opened: Sequence[Checkpoint], rest: Sequence[str]) -> list[str]:
    first, *others = opened
    config, vocabulary = config_of(first.extras), _vocabulary(first)
    lines = []
    for other in others:
        there = config_of(other.extras)
        for key, (a, b) in (differences(config, there) if config and there else {}).items():
            lines.append(f"config: {key!r} is {a!r} in {first.path}, {b!r} in {other.path}")
        if vocabulary and (ids := _vocabulary(other)) and ids != vocabulary:
            apart = sum(ids.get(text) != i for text, i in vocabulary.items())
            lines.append(
                f"tokenizer: {max(apart, abs(len(ids) - len(vocabulary)))} of {len(vocabulary)} "
                f"tokens of {first.path} have another id, or none, in {other.path}"
            )
        lines += [
            f"{name!r} is not floating, and differs between {first.path} and {other.path}"
            for name in rest
            if not is_derived(name) and not _same(first.tensors[name], other.tensors[name])
        ]
    return lines


def _vocabulary(opened: Checkpoint) -> Mapping[str, int] | None:
    vocabulary = read_vocabulary({n: p for n, p in opened.extras.items() if isinstance(p, Path)})
    return None if vocabulary is None else vocabulary.ids


def _same(a: Tensor, b: Tensor) -> bool:
    def parts(tensor: Tensor) -> Any:
        for start in range(0, size, PIECE):
            out = np.empty(min(PIECE, size - start), tensor.dtype)
            tensor.read(out, start)
            yield out

    size = math.prod(a.shape)
    return all(map(np.array_equal, parts(a), parts(b)))


def _compared(
    with_base: bool, column: Sequence[Tensor]
) -> tuple[list[np.ndarray], list[np.ndarray], float, np.ndarray]:
    """Sums of one tensor: of the models, of their task vectors, and the base's square; and which
    models agree everywhere."""
    size = math.prod(column[0].shape)
    k = len(column) - with_base
    w = jnp.full(k, 1 / k, jnp.float32)
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
    return [np.zeros((k, k)), np.zeros(()), np.zeros(())]


def _read(tensor: Tensor, start: int, count: int) -> np.ndarray:
    """Padded with zeros, which no sum counts; float32 or float64."""
    raw = np.empty(count, tensor.dtype)
    tensor.read(raw, start)
    wide = np.float64 if tensor.dtype == np.float64 else np.float32
    out = np.zeros(FEW if count <= FEW else PIECE, wide)
    out[:count] = raw
    if not np.isfinite(out).all():
        raise CheckpointError(f"{tensor.source}: '{tensor.name}' has values that are not finite")
    return out


def _add(
    total: list[np.ndarray], stack: np.ndarray, w: jax.Array, column: Sequence[Tensor]
) -> None:
    addends = sums(jnp.asarray(stack.astype(np.float32)), w)
    for i, x in enumerate(addends):
        total[i] = total[i] + np.asarray(x, np.float64)
    if not np.isfinite(total[0]).all():
        raise CheckpointError(f"'{column[0].name}': squares of its values overflow float32")


def _vectors(parts: Sequence[Sequence[np.ndarray]], sizes: np.ndarray) -> Vectors:
    stacks = [np.stack(x) for x in zip(*parts, strict=True)]
    return Vectors(_conflict([x.sum(0) for x in stacks], sizes.sum()), _conflict(stacks, sizes))


def _conflict(parts: Sequence[np.ndarray], size: np.ndarray) -> Conflict:
    with jax.enable_x64(True):
        products, opposed, apart = (jnp.asarray(x, float) for x in parts)
        made = conflict((products, opposed, apart), jnp.asarray(size, float))
    return jax.tree.map(np.asarray, made)


def pooled(vectors: Vectors, sizes: Int[np.ndarray, "tensor"], chosen: Sequence[int]) -> Conflict:
    """The conflict of some of the tensors together."""
    at = np.asarray(chosen, int)
    norms, cosines, signs, apart = (np.asarray(x)[at] for x in vectors.each)
    products = cosines * norms[:, :, None] * norms[:, None, :]
    parts = [x.sum(0) for x in (products, signs * sizes[at], apart)]
    return _conflict(parts, sizes[at].sum())
