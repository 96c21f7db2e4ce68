"""Transforms and reductions as values, and the functions that make and combine them.

Both are tuples of steps (module `steps`). A call on task vectors evaluates these steps. A `Merge`
evaluates the steps of its transform and its reduction together.
"""

import fnmatch
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass
from jaxtyping import Array, PyTree

from sail_jax.merging.evaluate import Leaf, evaluate
from sail_jax.merging.leafwise import check_paths
from sail_jax.merging.steps import Kernel, Needs, Scope, Statistic, Step, Workspace, called, kernel
from sail_jax.merging.task_vectors import TaskVectors, in_float64
from sail_jax.trees import leaf_paths

Made = TypeVar("Made", "Transform", "Reduction")
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)
class Transform:
    """A function from task vectors to task vectors, described by its steps.

    Call it on `TaskVectors`, pass it to `Merge`, or join it to others with `chain`. `Transform()`
    changes nothing. The functions of `sail_jax.transforms` return transforms.

    Attributes:
      steps: The steps in the order in which they are applied.
    """

    steps: tuple[Step, ...] = ()

    def __repr__(self) -> str:
        one = len(self.steps) == 1
        return repr(self.steps[0]) if one else called(chain, self.steps, {})

    @in_float64("vectors")
    def __call__(self, vectors: TaskVectors) -> TaskVectors:
        """Applies the transform; works under `jit`, `grad` and `vmap`, and on sharded arrays.

        Args:
          vectors: Leaves of shape `[task, ...]`.

        Returns:
          Task vectors of the same structure.

        Raises:
          ValueError: If a step raises it, such as a `masked` that selects no leaf.
        """
        values = _evaluated(self.steps, vectors, lambda delta, weight: (delta, weight))
        treedef = jax.tree.structure(vectors.delta)
        return TaskVectors(*(treedef.unflatten(v[side] for v in values) for side in range(2)))


@dataclass(frozen=True, eq=False, repr=False)
class Reduction:
    """A function from task vectors to the update of a base, described by its steps.

    Pass it to `Merge`, or call it on `TaskVectors`. `sail_jax.reductions` contains the reductions.

    Attributes:
      steps: The steps in the order in which they are applied. The last step reduces. It is the only
        step that removes the task axis.
    """

    steps: tuple[Step, ...]

    def __repr__(self) -> str:
        return repr(self.steps[0]) if len(self.steps) == 1 else called(Reduction, self.steps, {})

    @in_float64("vectors")
    def __call__(self, vectors: TaskVectors) -> PyTree:
        """Reduces task vectors; works under `jit`, `grad` and `vmap`, and on sharded arrays.

        Args:
          vectors: Leaves of shape `[task, ...]`.

        Returns:
          The update, a pytree with the structure of `vectors.delta` and leaves without the task
          axis.

        Raises:
          ValueError: If a step raises it.
        """
        values = _evaluated(self.steps, vectors, lambda delta, weight: delta[0])
        return jax.tree.structure(vectors.delta).unflatten(values)


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Given:
    """A `Source` with the known task vectors of one leaf."""

    delta: Array
    weight: Array

    @property
    def tasks(self) -> int:
        return len(self.delta)

    def vectors(self) -> tuple[Array, Array]:
        return self.delta, self.weight


def _value(source: _Given, value: T) -> T:
    """Returns the task vectors or the update of a leaf unchanged."""
    return value


def _evaluated(
    steps: Sequence[Step], vectors: TaskVectors, empty: Callable[[Array, Array], Any]
) -> list[Any]:
    """Applies steps to each leaf; `empty` computes the result for leaves without entries."""
    delta, treedef = jax.tree.flatten(vectors.delta)
    weight = treedef.flatten_up_to(vectors.weight)
    sources = [_Given(jnp.asarray(d), jnp.asarray(w)) for d, w in zip(delta, weight, strict=True)]
    leaves = [
        Leaf(path, math.prod(source.delta.shape[1:]), source)
        # The leading axis of a delta counts models and does not belong to the leaf.
        for path, source in zip(leaf_paths(vectors.delta), sources, strict=True)
    ]
    check_paths(steps, [leaf.path for leaf in leaves])
    # Leaves without entries are skipped.
    values = iter(evaluate(steps, [leaf for leaf in leaves if leaf.size], kernel(_value)))
    return [
        next(values) if leaf.size else empty(source.delta, source.weight)
        for leaf, source in zip(leaves, sources, strict=True)
    ]


def shown(factory: Callable[P, Made]) -> Callable[P, Made]:
    """Makes the transforms and reductions of a function show the call in their `repr`.

    Args:
      factory: A function that makes a transform or a reduction of one step.

    Returns:
      The same function. The `repr` of its result shows the function's name and the given arguments.

    >>> from sail_jax import transforms
    >>> chain(transforms.trim(0.2), transforms.elect(tie="positive"))
    chain(trim(density=0.2), elect(tie='positive'))
    """
    signature = inspect.signature(factory)
    default = signature.parameters

    @functools.wraps(factory)
    def make(*args: P.args, **options: P.kwargs) -> Made:
        made = factory(*args, **options)
        given = {
            name: value
            for name, value in signature.bind(*args, **options).arguments.items()
            # `==` alone is not sufficient, because arrays compare entry by entry.
            if not (type(value) is type(default[name].default) and value == default[name].default)
        }
        (step,) = made.steps
        return replace(made, steps=(replace(step, call=called(factory, (), given)),))

    return make


def transform(
    kernel: Kernel,
    *statistics: Statistic,
    needs: Needs = "entry",
    scope: Scope = "tensor",
    local: Callable[[str], Any] | None = None,
    ranked: Kernel | None = None,
    workspace: Workspace | None = None,
) -> Transform:
    """Makes a transform of one step.

    Args:
      kernel: `(*found, *own, piece, delta, weight) -> (delta, weight)`; see `steps.Step`.
      *statistics: The statistics of other entries that the kernel requires, in the order of its
        arguments.
      needs: The part of a tensor that the kernel requires at once: single entries ("entry"), rows
        along the last axis ("row"), or the whole "tensor".
      scope: Whether statistics are taken over each "tensor" or over the whole "tree".
      local: A function from the path of a leaf to its own arrays; see `steps.PerLeaf`.
      ranked: A kernel for the sizes that are ranked in rows; see `steps.Step`.
      workspace: The extra memory of the kernel; see `steps.Step`.

    Returns:
      The transform.
    """
    step = Step(kernel, statistics, needs, scope, local=local, ranked=ranked, workspace=workspace)
    return Transform((step,))


def reduce(
    kernel: Kernel,
    *statistics: Statistic,
    needs: Needs = "entry",
    scope: Scope = "tensor",
    local: Callable[[str], Any] | None = None,
    propagates_nonfinite: bool = False,
    workspace: Workspace | None = None,
) -> Reduction:
    """Makes a reduction of one step.

    Args:
      kernel: `(*found, *own, piece, delta, weight) -> update`; see `steps.Step`.
      *statistics: See `transform`.
      needs: See `transform`.
      scope: See `transform`.
      local: See `transform`.
      propagates_nonfinite: See `steps.Step`.
      workspace: See `transform`.

    Returns:
      The reduction.
    """
    step = Step(
        kernel,
        statistics,
        needs,
        scope,
        local=local,
        propagates_nonfinite=propagates_nonfinite,
        workspace=workspace,
    )
    return Reduction((step,))


def from_function(
    function: Callable[..., tuple[Array, Array]], *arrays: Any, needs: Needs = "entry"
) -> Transform:
    """Makes a transform from a function on arrays.

    The function may receive a leaf in parts and in another shape. With needs "entry" the shape is
    `[task, n]`. With "row" it is `[task, rows, columns]`, or `[task, n]` for a vector. In both
    cases zeros may follow the last entry. The weight broadcasts with the delta.

    >>> halve = from_function(lambda delta, weight: (delta / 2, weight))
    >>> halve(TaskVectors({"a": jnp.ones((1, 2))}, {"a": jnp.ones((1, 1))})).delta["a"].tolist()
    [[0.5, 0.5]]
    """
    return transform(kernel(_without_piece, function=function).bind(*arrays), needs=needs)


def _without_piece(*args: Any, function: Callable[..., Any]) -> Any:
    """Calls a function of arrays, delta and weight with the arguments of a kernel."""
    *arrays, _, delta, weight = args
    return function(*arrays, delta, weight)


def chain(*transforms: Transform) -> Transform:
    """Joins transforms into one that applies them from left to right.

    Args:
      *transforms: Any number of transforms; `chain()` changes nothing.

    Returns:
      The transform with the steps of all of them.

    Raises:
      TypeError: If an argument is not a `Transform`.

    >>> from sail_jax import transforms
    >>> vectors = TaskVectors({"a": jnp.array([[4.0, 1.0], [-3.0, 2.0]])}, {"a": jnp.ones((2, 1))})
    >>> both = chain(transforms.trim(0.5, "tensor"), transforms.elect())
    >>> both(vectors).weight["a"].tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    for part in transforms:
        if not isinstance(part, Transform):
            raise TypeError(f"chain: expected transforms, got {part!r}; see `from_function`")
    return Transform(tuple(step for part in transforms for step in part.steps))


def masked(inner: Transform, predicate: str | Callable[[str], bool]) -> Transform:
    """Restricts a transform to some of the leaves; the other leaves pass unchanged.

    Args:
      inner: The transform. Its statistics over the tree use only the selected leaves.
      predicate: A predicate on the path of a leaf, or a case-sensitive glob pattern in which `*`
        also matches "/".

    Returns:
      The restricted transform.

    Raises:
      ValueError: When the transform is applied, if no leaf is selected.

    >>> from sail_jax import transforms
    >>> delta = {"bias": jnp.array([[1.0, 2.0]]), "kernel": jnp.array([[1.0, 2.0]])}
    >>> vectors = TaskVectors(delta, {"bias": jnp.ones((1, 1)), "kernel": jnp.ones((1, 1))})
    >>> weight = masked(transforms.trim(0.5), "kern*")(vectors).weight
    >>> weight["bias"].tolist(), weight["kernel"].tolist()
    ([[1.0]], [[0.0, 1.0]])
    """
    chosen = matching(predicate)

    def confine(step: Step) -> Step:
        # A restricted step stays restricted, so nested calls of `masked` intersect.
        where = chosen if step.where is None else functools.partial(_both, chosen, step.where)
        return replace(step, where=where, call=called(masked, (step, predicate), {}))

    return Transform(tuple(map(confine, inner.steps)))


def matching(predicate: str | Callable[[str], bool]) -> Callable[[str], bool]:
    """Converts a glob pattern to a predicate on paths of leaves.

    Args:
      predicate: A glob pattern, or a predicate; see `masked`.

    Returns:
      A function from a path to a bool. A predicate is returned unchanged.
    """
    return functools.partial(_glob, predicate) if isinstance(predicate, str) else predicate


def _glob(pattern: str, path: str) -> bool:
    """Checks whether a path matches a glob pattern."""
    return fnmatch.fnmatchcase(path, pattern)


def _both(a: Callable[[str], bool], b: Callable[[str], bool], path: str) -> bool:
    """Checks whether both of two predicates select a path."""
    return a(path) and b(path)
