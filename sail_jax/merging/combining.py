"""Transforms and reductions as values, and what combines them."""

import fnmatch
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass
from jaxtyping import Array, PyTree

from sail_jax.merging.evaluate import Leaf, evaluate
from sail_jax.merging.leafwise import check_paths
from sail_jax.merging.steps import Kernel, Needs, Scope, Statistic, Step, kernel
from sail_jax.merging.task_vectors import TaskVectors
from sail_jax.trees import leaf_paths

__all__ = [
    "Reduction",
    "Transform",
    "chain",
    "from_function",
    "masked",
    "matching",
    "reduce",
    "transform",
]


@dataclass(frozen=True, eq=False)
class Transform:
    """A change of task vectors: `TaskVectors -> TaskVectors`, as a description.

    Attributes:
      steps: What it does, in order. Transforms are closed under `chain`.
    """

    steps: tuple[Step, ...] = ()

    def __call__(self, vectors: TaskVectors) -> TaskVectors:
        """The task vectors after it; under `jit`, `grad`, `vmap`, and sharded, too."""
        values = _evaluated(self.steps, vectors, lambda delta, weight: (delta, weight))
        treedef = jax.tree.structure(vectors.delta)
        return TaskVectors(*(treedef.unflatten(v[side] for v in values) for side in range(2)))


@dataclass(frozen=True, eq=False)
class Reduction:
    """What task vectors add up to: `TaskVectors -> update`, as a description.

    Attributes:
      steps: The last one reduces; it is the only place where the task axis disappears.
    """

    steps: tuple[Step, ...]

    def __call__(self, vectors: TaskVectors) -> PyTree:
        """The update of every leaf."""
        values = _evaluated(self.steps, vectors, lambda delta, weight: delta[0])
        return jax.tree.structure(vectors.delta).unflatten(values)


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Given:
    """The task vectors of a leaf."""

    delta: Array
    weight: Array

    @property
    def tasks(self) -> int:
        return len(self.delta)

    def vectors(self) -> tuple[Array, Array]:
        return self.delta, self.weight


def _value(source: _Given, value: Any) -> Any:
    return value


def _evaluated(
    steps: Sequence[Step], vectors: TaskVectors, empty: Callable[[Array, Array], Any]
) -> list[Any]:
    """What the steps make of each leaf; `empty` says it of leaves without entries."""
    delta, treedef = jax.tree.flatten(vectors.delta)
    weight = treedef.flatten_up_to(vectors.weight)
    sources = [_Given(jnp.asarray(d), jnp.asarray(w)) for d, w in zip(delta, weight, strict=True)]
    leaves = [
        Leaf(path, math.prod(source.delta.shape[1:]), source)
        for path, source in zip(leaf_paths(vectors.delta), sources, strict=True)
    ]
    check_paths(steps, [leaf.path for leaf in leaves])
    values = iter(evaluate(steps, [leaf for leaf in leaves if leaf.size], kernel(_value)))
    return [
        next(values) if leaf.size else empty(source.delta, source.weight)
        for leaf, source in zip(leaves, sources, strict=True)
    ]


def transform(
    kernel: Kernel,
    *statistics: Statistic,
    needs: Needs = "entry",
    scope: Scope = "tensor",
    local: Any = None,
) -> Transform:
    """A transform of one step; see `steps.Step`."""
    return Transform((Step(kernel, statistics, needs, scope, local=local),))


def reduce(
    kernel: Kernel,
    *statistics: Statistic,
    needs: Needs = "entry",
    scope: Scope = "tensor",
    local: Any = None,
) -> Reduction:
    """A reduction of one step; see `steps.Step`."""
    return Reduction((Step(kernel, statistics, needs, scope, local=local),))


def from_function(
    function: Callable[..., tuple[Array, Array]], *arrays: Any, needs: Needs = "entry"
) -> Transform:
    """A transform of one's own.

    Args:
      function: `(*arrays, delta, weight) -> (delta, weight)`, of one leaf or a part of it, with a
        leading task axis. A weight of 0 masks an entry. It should live as long as the process: a
        new function is compiled anew.
      *arrays: Further arguments, whose values may be traced.
      needs: What the function has to see at once: any "entry", a "row" (all entries along the last
        axis), or the whole "tensor".

    >>> halve = from_function(lambda delta, weight: (delta / 2, weight))
    >>> halve(TaskVectors({"a": jnp.ones((1, 2))}, {"a": jnp.ones((1, 1))})).delta["a"].tolist()
    [[0.5, 0.5]]
    """
    return transform(kernel(_without_piece, function=function).bind(*arrays), needs=needs)


def _without_piece(*args: Any, function: Callable[..., Any]) -> Any:
    *arrays, _, delta, weight = args
    return function(*arrays, delta, weight)


def chain(*transforms: Transform) -> Transform:
    """The transform that applies `transforms` from left to right; `chain()` changes nothing."""
    for part in transforms:
        if not isinstance(part, Transform):
            raise TypeError(f"chain: expected transforms, got {part!r}; see `from_function`")
    return Transform(tuple(step for part in transforms for step in part.steps))


def masked(inner: Transform, predicate: str | Callable[[str], bool]) -> Transform:
    """A transform confined to some of the leaves, which are all it sees.

    Args:
      inner: What is applied to them. Statistics of the tree are taken over them alone.
      predicate: Whether a leaf is chosen, by its path; or a glob pattern, matched with case, in
        which `*` crosses "/".

    Raises:
      ValueError: When it is applied, if no leaf is chosen.
    """
    chosen = matching(predicate)

    def confine(step: Step) -> Step:
        where = chosen if step.where is None else functools.partial(_both, chosen, step.where)
        return replace(step, where=where)

    return Transform(tuple(map(confine, inner.steps)))


def matching(predicate: str | Callable[[str], bool]) -> Callable[[str], bool]:
    """The predicate on paths that a glob pattern stands for; see `masked`."""
    return functools.partial(_glob, predicate) if isinstance(predicate, str) else predicate


def _glob(pattern: str, path: str) -> bool:
    return fnmatch.fnmatchcase(path, pattern)


def _both(a: Callable[[str], bool], b: Callable[[str], bool], path: str) -> bool:
    return a(path) and b(path)
