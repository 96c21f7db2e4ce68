"""A merge as a value: its transform, its reduction, and the requirements on its inputs."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from os import PathLike
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from sail_jax.checks import concrete, described, scalar
from sail_jax.merging.arithmetic import in_64_bits, number
from sail_jax.merging.combining import Reduction, Transform
from sail_jax.merging.engine import InMemory, merge_arrays
from sail_jax.merging.evaluate import evaluate, is_traced, on_one_cpu
from sail_jax.merging.identity import digest
from sail_jax.merging.integers import Integers
from sail_jax.merging.leafwise import check_paths, local_of
from sail_jax.merging.parting import Rest, part
from sail_jax.merging.selection import Select
from sail_jax.merging.steps import brief, called, kernel
from sail_jax.merging.streaming import NotFiniteError
from sail_jax.merging.task_vectors import (
    Checked,
    Matched,
    Prefix,
    Weights,
    by_leaf,
    known_finite,
    match,
    outcome,
    overflow,
    task_weights,
)
from sail_jax.merging.tensors import Shape, Tensor
from sail_jax.merging.work import Program, Work
from sail_jax.views import view

Base = Literal["required", "optional", "unused", "merged"]
"""The role of a base in a merge; see `Merge`."""


@dataclass(frozen=True, eq=False, repr=False)
class Merge(Program):
    """A merge of models: base + scale * reduction(transform(task vectors)).

    `merge(models, base, weights=...)` applies it to pytrees, under `jit`, `grad`, `vmap` and
    sharded. `merge_checkpoints(..., method=merge)` applies it to files. The functions of
    `sail_jax.methods` return merges. Other merges can be built from `sail_jax.transforms` and
    `sail_jax.reductions`.

    Models are added up in their listed order, so another order may change the last bits. On CPUs,
    XLA treats numbers below the smallest normal number as 0 (1.2e-38 in float32, 2.2e-308 in
    float64). Merges of files, and of arrays outside `jit`, keep such float32 numbers. They compute
    the affected results in float64 (`merging.extremes`).

    Attributes:
      transform: The transform of the task vectors.
      reduction: The reduction of the task vectors to one update.
      scale: The factor on the merged task vector, a finite number. It may be traced.
      normalize: Whether the weights are divided by their sum over all models, before any transform.
      base: The role of a base. "required": task vectors are relative to it. "optional": they are
        relative to it, or to 0 without a base. "unused": they are relative to 0, and a given base
        only sets the dtypes of the result. "merged": a base is required, task vectors are relative
        to 0, and the base is merged as the first model, with weight 1.
      models: The smallest and the largest number of models; None for no limit.
      positive_weights: Whether negative weights are rejected.
      remedy: The message about a result that contains NaN, with advice. By default the message
        states that the values overflow.
      name: The name of the merge in messages and reports.
      options: Its hyperparameters by name.

    Raises:
      TypeError: If `transform` is not a `Transform`, or `reduction` not a `Reduction`.
      ValueError: If `scale` is not one finite number.

    >>> from sail_jax import Merge, reductions, transforms
    >>> merge = Merge(transforms.elect(), reductions.weighted_mean)
    >>> base = {"a": jnp.zeros(2)}
    >>> merge([{"a": jnp.array([3.0, 1.0])}, {"a": jnp.array([-1.0, 3.0])}], base)["a"].tolist()
    [3.0, 2.0]
    """

    normalize: bool = False
    base: Base = "required"
    models: tuple[int, int | None] = (1, None)
    positive_weights: bool = False
    name: str = "merge"
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.transform, Transform):
            raise TypeError(f"transform: expected a Transform, got {self.transform!r}")
        if not isinstance(self.reduction, Reduction):
            raise TypeError(f"reduction: expected a Reduction, got {self.reduction!r}")
        scalar("scale", self.scale, np.isfinite, "a finite number")
        # The copy is read-only, because merges are immutable.
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))

    @property
    def relative(self) -> bool:
        """Whether task vectors are relative to a given base."""
        return self.base in ("required", "optional")

    @functools.cached_property
    def identity(self) -> str:
        """A hash of all that the merge computes, the same in every process; see `identity.digest`.

        It does not cover the name and the remedy, which affect only messages.
        """
        return digest(self.steps, self.scale, self.normalize, self.base, self.models)

    def __repr__(self) -> str:
        if self.name != "merge":
            options = [f"{name}={brief(value)}" for name, value in self.options.items()]
            return f"{self.name}({', '.join(options)})"
        own = [f for f in fields(self) if f.repr and getattr(self, f.name) is not f.default]
        return called(Merge, (), {f.name: getattr(self, f.name) for f in own})

    def _repr_html_(self) -> str:
        least, most = self.models
        rows = [*self.options.items()] if self.name != "merge" else [("merge", repr(self))]
        expected = f"{least}" if most == least else f"{least} to {most or 'any number'}"
        return view(self.name, [*rows, ("base", self.base), ("models", expected)])

    def check_models(self, count: int, base: bool) -> None:
        """Checks the number of models, and that a base is given if it is required.

        Args:
          count: The number of models, without the base.
          base: Whether a base is given.

        Raises:
          ValueError: If the merge does not accept this number of models.
          TypeError: If a required base is missing.
        """
        least, most = self.models
        if count < least or (most is not None and count > most):
            expected = f"{least}" if least == most else f"{least} to {most}"
            expected = f"at least {least}" if most is None else expected
            raise ValueError(f"models: expected {expected}, got {count}")
        if self.base in ("required", "merged") and not base:
            raise TypeError(
                "base: expected the pytree that the models were fine-tuned from, got None"
            )

    def check_weights(self, weights: Weights, tasks: int) -> Checked:
        """Checks weights, and normalises them if the merge normalises.

        Args:
          weights: One for each model, or None for 1 each.
          tasks: The number of models.

        Returns:
          Shape `[task]`; a NumPy array if the values are known.

        Raises:
          ValueError: Unless the weights are `tasks` finite numbers. If one is negative and the
            merge rejects negative weights, or if they sum to 0 and are normalised. Traced values
            are not checked.
        """
        w = task_weights(weights, tasks, self.normalize)
        values = concrete(w)
        if self.positive_weights and values is not None and (values < 0).any():
            raise ValueError(f"weights: expected finite values >= 0, got {values.tolist()}")
        return w

    def work(
        self,
        name: str,
        shape: Shape,
        dtype: np.dtype,
        models: Sequence[Tensor],
        base: Tensor | None,
        weights: Weights,
    ) -> Work:
        """Describes the merge of one tensor for the engine.

        Args:
          name: The path of the tensor.
          shape: The shape of all inputs.
          dtype: The dtype of the result.
          models: The tensor in each model.
          base: The tensor in the base, None without a base.
          weights: One for each model, or None for 1 each.

        Returns:
          The work for `Engine`.

        Raises:
          ValueError: For a number of models that the merge does not accept, and for invalid
            weights.
          TypeError: For a missing base.
        """
        self.check_models(len(models), base is not None)
        # The base counts as one more model, and the task vectors are the models.
        if self.base == "merged" and base is not None:
            models, weights = (base, *models), with_base(weights)
        start = base if self.relative else None
        # Weights are computed in float64, regardless of the caller's precision. `Unit` rounds them
        # once, to the precision of its inputs.
        with jax.enable_x64(True):
            w = np.asarray(self.check_weights(weights, len(models)))
        return Work(name, shape, np.dtype(dtype), tuple(models), start, w, self)

    def __call__(
        self,
        models: Sequence[PyTree] | PyTree,
        base: PyTree | None = None,
        *,
        weights: Weights | Prefix = None,
        axis: int | None = None,
        integers: Integers | None = None,
        select: Select = None,
        rest: Rest = "last",
    ) -> PyTree:
        """Merges pytrees.

        Args:
          models: M pytrees with the same leaf paths and shapes. Floating leaves are merged in
            float32, or in float64 where a model is float64 (NumPy arrays too, except under `jit`
            without 64 bits). Integers, bools and random keys are copied. So are complex numbers,
            which must be equal in all models. All other leaves must be equal. A model may also be a
            whole training state, such as a `TrainState` or `nnx.state(model)`, of which only the
            weights are merged.
          base: The pytree that the models were fine-tuned from, with the same paths and shapes.
          weights: Shape `[M]`, finite; 1 for each model by default. Or a mapping of such weights, a
            prefix of the tree: {"encoder": [1, 0], "head": [1, 2]}. An entry applies to all leaves
            below its name. Every merged leaf needs an entry.
          axis: The axis of the models if `models` is one pytree with stacked leaves, such as
            parameters trained under `vmap`. None for a sequence of pytrees.
          integers: The source of integers, bools and keys where models differ: the base or else the
            "first" model, the "last" model, or the largest value ("max"). "refuse" raises an error.
            By default the first is used with a warning, except for traced values.
          select: The leaves to merge: patterns such as "params/*", or a function of a path. By
            default the weights of a state that `selection` recognises, and all leaves of any other
            tree.
          rest: The source of all other leaves: the base or else the "first" model, or the "last"
            model. "error" rejects trees with other leaves.

        Returns:
          A pytree with the structure and dtypes of the base (of the first model without a base).
          Leaves are JAX arrays. NumPy's 64-bit leaves stay NumPy arrays unless JAX has 64 bits
          enabled.

        Raises:
          ValueError: For inconsistent models or weights, for values that are not finite, for
            results that overflow their dtype, and for a selected optimiser state. The message
            contains the merge and the leaf. Traced values are not checked.
          TypeError: For dtypes that cannot be merged, and for a missing base.
        """
        try:
            if axis is not None:
                models = _apart(models, axis)
            return self._merged(models, base, weights, integers, select, rest)
        except (TypeError, ValueError) as error:
            raise named(self.name, error) from error

    def _merged(
        self,
        models: Sequence[PyTree],
        base: PyTree | None,
        weights: Weights | Prefix,
        integers: Integers | None,
        select: Select,
        rest: Rest,
    ) -> PyTree:
        """Merges pytrees; the caller adds the name of the merge to errors."""
        if isinstance(models, str) or not isinstance(models, Sequence):
            advice = "; for models that are stacked on an axis of each leaf, give axis=0"
            raise TypeError(
                f"models: expected a sequence of pytrees, got {described(models)}{advice}"
            )
        if any(isinstance(x, str | PathLike) for x in (*models, base)):
            raise TypeError(
                "models: expected pytrees, got a path; merge_checkpoints(models, out, "
                "method=...) merges files"
            )
        self.check_models(len(models), base is not None)
        # The base, or else the first model, determines the leaves and the dtypes of the result.
        like = models[0] if base is None else base
        if (parted := part(models, like, select, rest)) is not None:
            *models, like = parted.trees
            base = None if base is None else like
            return parted.whole(self._merged(models, base, weights, integers, "*", rest))
        if self.base == "merged":
            models = [base, *models]
        matched = match(models, like, integers)
        w = self._weights(weights, [matched.paths[i] for i in matched.merged], len(models))
        # Paths are checked before anything is computed. Otherwise a misspelt path would silently
        # make a step ineffective.
        check_paths(self.steps, [matched.paths[i] for i, x in enumerate(matched.floating) if x])
        own = [local_of(self.steps, matched.paths[i]) for i in matched.merged]
        traced = matched.traced or is_traced(w, self.scale, self.steps, own)
        # On one CPU the engine for files is used. Its programs are compiled for pieces of a few
        # lengths, and reused.
        if not traced and on_one_cpu(matched.start, matched.models, self.steps, own):
            outcomes = self._in_pieces(matched, w, self.relative and base is not None)
        else:
            outcomes = self._in_one_program(matched, w, self.relative and base is not None, traced)
        merged = dict(zip(matched.merged, outcomes, strict=True))
        if not traced:
            merged = _as_given(matched, merged)
        # Other leaves are copied, because the owner of a NumPy array may write to it.
        return matched.treedef.unflatten(
            merged[i] if i in merged else x.copy() if isinstance(x, np.ndarray) else x
            for i, x in enumerate(matched.start)
        )

    def _weights(
        self, weights: Weights | Prefix, paths: Sequence[str], tasks: int
    ) -> list[Checked]:
        """Checks the weights of each merged leaf; `tasks` includes a merged base."""

        def check(own: Weights) -> Checked:
            return self.check_weights(with_base(own) if self.base == "merged" else own, tasks)

        # Known weights are float64, as for files. Computations in float32 round them once.
        with in_64_bits(not is_traced(weights)):
            if isinstance(weights, Mapping):
                return by_leaf(weights, paths, check)
            return [check(weights)] * len(paths)

    def _in_one_program(
        self, matched: Matched, w: Sequence[Checked], relative: bool, traced: bool
    ) -> Sequence[Array]:
        """Merges the leaves that have entries in one compiled program."""
        if traced:
            # Under tracing, JAX determines the precision.
            matched = matched.narrow()
        leaves = matched.leaves(w, relative)
        tail = kernel(outcome, number(self.scale), check=not traced)
        with in_64_bits(not traced and any(leaf.source.wide for leaf in leaves)):
            outcomes = evaluate(self.steps, leaves, tail)
        if traced:
            matched.refuse(known_finite(leaves))
            return outcomes
        # Inputs are checked first: a result from inputs that are not finite is not an overflow.
        flags = [np.asarray(finite) for _, finite in outcomes]
        matched.refuse([finite[:-1] for finite in flags])
        for leaf, (out, _), finite in zip(leaves, outcomes, flags, strict=True):
            if not finite[-1]:
                nan = bool(jnp.isnan(out).any())
                raise ValueError(self._not_finite(leaf.path, leaf.source.dtype, nan))
        return [out for out, _ in outcomes]

    def _in_pieces(
        self, matched: Matched, w: Sequence[Checked], relative: bool
    ) -> Sequence[np.ndarray]:
        """Merges all leaves with entries, using the engine for files."""
        works = []
        for i, own in zip(matched.merged, w, strict=True):
            path, start = matched.paths[i], matched.start[i]
            models = [InMemory.of(path, f"model {k}", x[i]) for k, x in enumerate(matched.models)]
            like = InMemory.of(path, "base", start) if relative else None
            dtype = np.dtype(start.dtype)
            works.append(Work(path, start.shape, dtype, tuple(models), like, np.asarray(own), self))
        try:
            return merge_arrays(works)
        except NotFiniteError as error:
            at = error.tensor
            if isinstance(at, Work):
                raise ValueError(self._not_finite(at.name, at.dtype, error.nan)) from None
            what = f"{at.source}, leaf {at.name!r}: expected finite values, got NaN or infinity"
            raise ValueError(what) from None

    def _not_finite(self, path: str, dtype: DTypeLike, nan: bool) -> str:
        """Returns the message about a leaf with infinity or NaN in its result."""
        return f"leaf {path!r}: {self.remedy}" if nan and self.remedy else overflow(path, dtype)


def _apart(stacked: PyTree, axis: int) -> list[PyTree]:
    """Splits a tree of stacked models into the models."""
    shapes = [np.shape(x) for x in jax.tree.leaves(stacked)]
    counts = {shape[axis] for shape in shapes if len(shape) > axis >= 0}
    if len(counts) != 1 or any(len(shape) <= axis for shape in shapes):
        got = f"shapes {', '.join(map(str, shapes[:5]))}"
        raise ValueError(f"models: expected leaves of equal length on axis {axis}, got {got}")
    (count,) = counts
    before = (slice(None),) * axis
    return [jax.tree.map(lambda x, k=k: x[*before, k], stacked) for k in range(count)]


def _as_given(
    matched: Matched, merged: Mapping[int, Array | np.ndarray]
) -> dict[int, Array | np.ndarray]:
    """Converts merged leaves to JAX arrays, unless the base's leaf stayed a NumPy array.

    Args:
      matched: The leaves of the base, and of the models.
      merged: NumPy or JAX arrays, by index of the leaf.
    """
    ours = [i for i in merged if not isinstance(matched.start[i], np.ndarray)]
    with in_64_bits(any(merged[i].dtype == np.float64 for i in ours)):
        # Their memory is not shared, so no copy is needed.
        arrays = jax.device_put([merged[i] for i in ours], may_alias=True)
    return {i: np.asarray(x) for i, x in merged.items()} | dict(zip(ours, arrays, strict=True))


def named(name: str, error: Exception) -> Exception:
    """Prefixes the message of a TypeError or ValueError with the name of a merge.

    Args:
      name: The name.
      error: The error.

    Returns:
      An error with the name. An error of any other class is returned unchanged.
    """
    # Subclasses, such as JAX's own errors, contain more than their message.
    return type(error)(f"{name}: {error}") if type(error) in (TypeError, ValueError) else error


def with_base(weights: Weights) -> Weights:
    """Prepends the weight 1 of a base to the weights of models.

    Merges with `base="merged"` use it.

    Args:
      weights: One for each model, possibly traced; or None for 1 each.

    Returns:
      Shape `[1 + model]`; None stays None, which again means 1 each.

    >>> with_base([0.5, 2.0]).tolist()
    [1.0, 0.5, 2.0]
    """
    if weights is None:
        return None
    values: Any = concrete(weights)
    if values is None:
        return jnp.concatenate([jnp.ones(1), jnp.asarray(weights, float).reshape(-1)])
    return np.concatenate([np.ones(1), values.reshape(-1)])
