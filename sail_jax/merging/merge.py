"""A merge as a value: its transform, its reduction, and what it expects of its inputs."""

import contextlib
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
from sail_jax.merging.arithmetic import number
from sail_jax.merging.combining import Reduction, Transform
from sail_jax.merging.engine import InMemory, merge_arrays
from sail_jax.merging.evaluate import evaluate, is_traced, on_one_cpu
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

Base = Literal["required", "optional", "unused", "merged"]
"""What a base is to a merge; see `Merge`."""


@dataclass(frozen=True, eq=False, repr=False)
class Merge(Program):
    """A way to merge models: base + scale * reduction(transform(task vectors)).

    `merge(models, base, weights=...)` applies it to pytrees, under `jit`, `grad`, `vmap` and
    sharded; `merge_checkpoints(..., method=merge)` applies it to files. The functions of
    `sail_jax.methods` return merges; others can be made of `sail_jax.transforms` and
    `sail_jax.reductions`.

    Models are added up in the order in which they are listed, so another order may change the last
    bits. On CPUs XLA takes numbers below the smallest normal one of float32, 1.2e-38 (of float64,
    2.2e-308), for 0. Merges of files, and of arrays outside of `jit`, keep those of float32: what
    they matter for is computed in float64 (`merging.extremes`).

    Attributes:
      transform: What is done to the task vectors.
      reduction: How they become one update.
      scale: A finite number by which the update is multiplied; may be traced.
      normalize: Whether the weights are divided by their sum over all models, before any transform.
      base: What a base is to the merge. "required": task vectors are relative to it. "optional":
        they are relative to it, and to 0 without one. "unused": they are relative to 0, and a base
        that is given only sets the dtypes of the outcome. "merged": it is required, task vectors
        are relative to 0, and the base itself is merged as the first model, with weight 1.
      models: The least and the largest number of models; None for no limit.
      positive_weights: Whether negative weights are refused.
      remedy: What an error says of an outcome that holds NaN, with advice. By default it says that
        the values do not fit.
      name: The name of the merge in messages and reports.
      options: The hyperparameters it was made with, by name.

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
        # A copy that cannot be changed: merges are immutable.
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))

    @property
    def relative(self) -> bool:
        """Whether task vectors are relative to the base, if there is one."""
        return self.base in ("required", "optional")

    def __repr__(self) -> str:
        if self.name != "merge":
            options = [f"{name}={brief(value)}" for name, value in self.options.items()]
            return f"{self.name}({', '.join(options)})"
        own = [f for f in fields(self) if f.repr and getattr(self, f.name) is not f.default]
        return called(Merge, (), {f.name: getattr(self, f.name) for f in own})

    def check_models(self, count: int, base: bool) -> None:
        """Checks the number of models, and that a base is given if it is required.

        Args:
          count: The number of models, without the base.
          base: Whether a base is given.

        Raises:
          ValueError: If the merge takes another number of models.
          TypeError: If it requires a base and none is given.
        """
        least, most = self.models
        if count < least or (most is not None and count > most):
            expected = f"{least}" if least == most else f"{least} to {most}"
            expected = f"at least {least}" if most is None else expected
            raise ValueError(f"models: expected {expected}, got {count}")
        if self.base in ("required", "merged") and not base:
            raise TypeError("base: expected the pytree that the models were tuned from, got None")

    def check_weights(self, weights: Weights, tasks: int) -> Checked:
        """Checks weights and normalises them if the merge does so.

        Args:
          weights: One for each model, or None for 1 each.
          tasks: The number of models.

        Returns:
          Shape `[task]`; a NumPy array if the values are known.

        Raises:
          ValueError: If the weights are not `tasks` finite numbers, if they are negative and may
            not be, or if they sum to 0 and have to be normalised. Traced values are not checked.
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
          dtype: The dtype of the outcome.
          models: The tensor in each model.
          base: The tensor in the base, None without one.
          weights: One for each model, or None for 1 each.

        Returns:
          What `Engine` carries out.

        Raises:
          ValueError: For another number of models than the merge takes, and for weights that do not
            fit.
          TypeError: For a missing base.
        """
        self.check_models(len(models), base is not None)
        # The base is one more model then, and task vectors are the models themselves.
        if self.base == "merged" and base is not None:
            models, weights = (base, *models), with_base(weights)
        start = base if self.relative else None
        # In float64 whatever the caller's precision: `Unit` rounds them to that of its inputs.
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
          models: M pytrees with the same leaf paths and shapes. Floating leaves are merged, in
            float32, or in float64 where a model has it, arrays of NumPy included, except under
            `jit` without 64 bits. Integers, bools and random keys are copied, and complex numbers
            that are equal in all models.
            All other leaves have to agree between models. They may be whole states of training,
            such as a `TrainState` or `nnx.state(model)`: then only their weights are merged.
          base: The pytree from which the models were tuned, of the same paths and shapes.
          weights: Shape `[M]`, finite; 1 for each model by default. Or a mapping of such weights, a
            prefix of the tree: {"encoder": [1, 0], "head": [1, 2]}. An entry counts for all leaves
            below its name, and every merged leaf needs one.
          axis: The axis of the models, where `models` is one pytree with stacked leaves, such as
            parameters that `vmap` trained; None for a sequence of pytrees.
          integers: Whose integers, bools and keys are taken where models differ: those of the base
            or else of the "first" model, of the "last", or the largest ("max"); "refuse" makes it
            an error. By default the first, with a warning; traced values cause none.
          select: Which leaves are merged: patterns such as "params/*", or a function of a path. By
            default the weights of a state that `selection` knows, and all leaves of any other tree.
          rest: Whose other leaves are taken: those of the base or else the "first" model, or of the
            "last". "error" refuses trees that have any.

        Returns:
          A pytree of the structure and dtypes of the base (of the first model without one). Leaves
          are arrays of JAX; those of NumPy's 64-bit dtypes are arrays of NumPy, if JAX is not
          enabled for 64 bits.

        Raises:
          ValueError: For models and weights that do not fit, for values that are not finite, and
            for outcomes that do not fit their dtype, and where the state of an optimiser is
            selected. The message names the merge and the leaf. Traced values are not checked.
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
        """Merges pytrees; its errors do not name the merge yet."""
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
        # Something has to say which leaves there are and what dtype the outcome has.
        like = models[0] if base is None else base
        if (parted := part(models, like, select, rest)) is not None:
            *models, like = parted.trees
            base = None if base is None else like
            return parted.whole(self._merged(models, base, weights, integers, "*", rest))
        if self.base == "merged":
            models = [base, *models]
        matched = match(models, like, integers)
        w = self._weights(weights, [matched.paths[i] for i in matched.merged], len(models))
        # Before anything is computed: a misspelt path would otherwise show as a step without
        # effect.
        check_paths(self.steps, [matched.paths[i] for i, x in enumerate(matched.floating) if x])
        own = [local_of(self.steps, matched.paths[i]) for i in matched.merged]
        traced = matched.traced or is_traced(w, self.scale, self.steps, own)
        # On one CPU the engine of files is used: its programs are compiled for pieces of a few
        # lengths, and kept.
        if not traced and on_one_cpu(matched.start, matched.models, self.steps, own):
            outcomes = self._in_pieces(matched, w, self.relative and base is not None)
        else:
            outcomes = self._in_one_program(matched, w, self.relative and base is not None, traced)
        merged = dict(zip(matched.merged, outcomes, strict=True))
        if not traced:
            merged = _as_given(matched, merged)
        # What is not merged is copied: arrays of NumPy may be written to by their owner.
        return matched.treedef.unflatten(
            merged[i] if i in merged else x.copy() if isinstance(x, np.ndarray) else x
            for i, x in enumerate(matched.start)
        )

    def _weights(
        self, weights: Weights | Prefix, paths: Sequence[str], tasks: int
    ) -> list[Checked]:
        """Checks the weights of each leaf that is merged; `tasks` counts a base that is merged."""

        def check(own: Weights) -> Checked:
            return self.check_weights(with_base(own) if self.base == "merged" else own, tasks)

        # In float64 if they are known, as for files. What computes in float32 rounds them once.
        with _wide(not is_traced(weights)):
            if isinstance(weights, Mapping):
                return by_leaf(weights, paths, check)
            return [check(weights)] * len(paths)

    def _in_one_program(
        self, matched: Matched, w: Sequence[Checked], relative: bool, traced: bool
    ) -> Sequence[Array]:
        """Merges the leaves that have entries in one compiled program."""
        if traced:
            # JAX has decided on the precision.
            matched = matched.narrow()
        leaves = matched.leaves(w, relative)
        tail = kernel(outcome, number(self.scale), check=not traced)
        with _wide(not traced and any(leaf.source.wide for leaf in leaves)):
            outcomes = evaluate(self.steps, leaves, tail)
        if traced:
            matched.refuse(known_finite(leaves))
            return outcomes
        # Inputs first: an outcome of inputs that are not finite is no overflow.
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
        """Merges the leaves that have entries with the engine that merges files."""
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
        """Returns the message about a leaf whose outcome holds infinity, or NaN."""
        return f"leaf {path!r}: {self.remedy}" if nan and self.remedy else overflow(path, dtype)


def _apart(stacked: PyTree, axis: int) -> list[PyTree]:
    """Takes a tree of stacked models apart into the models."""
    shapes = [np.shape(x) for x in jax.tree.leaves(stacked)]
    counts = {shape[axis] for shape in shapes if len(shape) > axis >= 0}
    if len(counts) != 1 or any(len(shape) <= axis for shape in shapes):
        got = f"shapes {', '.join(map(str, shapes[:5]))}"
        raise ValueError(f"models: expected as many models on axis {axis} of every leaf, got {got}")
    (count,) = counts
    before = (slice(None),) * axis
    return [jax.tree.map(lambda x, k=k: x[*before, k], stacked) for k in range(count)]


def _wide(wide: bool) -> contextlib.AbstractContextManager[object]:
    """Makes a context in which JAX computes in 64 bits, if it has to."""
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


def _as_given(
    matched: Matched, merged: Mapping[int, Array | np.ndarray]
) -> dict[int, Array | np.ndarray]:
    """Returns merged leaves as arrays of NumPy where those of the base had to stay so, else of JAX.

    Args:
      matched: The leaves of the base, and of the models.
      merged: Arrays of either, by index of the leaf.
    """
    ours = [i for i in merged if not isinstance(matched.start[i], np.ndarray)]
    with _wide(any(merged[i].dtype == np.float64 for i in ours)):
        # Nobody else holds their memory: nothing is copied.
        arrays = jax.device_put([merged[i] for i in ours], may_alias=True)
    return {i: np.asarray(x) for i, x in merged.items()} | dict(zip(ours, arrays, strict=True))


def named(name: str, error: Exception) -> Exception:
    """Puts the name of a merge in front of the message of a TypeError or ValueError.

    Args:
      name: The name.
      error: The error.

    Returns:
      An error with the name; the error itself if it is of any other class.
    """
    # Subclasses, such as JAX's own errors, mean more than their message.
    return type(error)(f"{name}: {error}") if type(error) in (TypeError, ValueError) else error


def with_base(weights: Weights) -> Weights:
    """Puts the weight 1 of a base in front of the weights of models.

    Merges with `base="merged"` use it.

    Args:
      weights: One for each model, which may be traced; or None for 1 each.

    Returns:
      Shape `[1 + model]`; None for None, which means 1 for each as well.

    >>> with_base([0.5, 2.0]).tolist()
    [1.0, 0.5, 2.0]
    """
    if weights is None:
        return None
    values: Any = concrete(weights)
    if values is None:
        return jnp.concatenate([jnp.ones(1), jnp.asarray(weights, float).reshape(-1)])
    return np.concatenate([np.ones(1), values.reshape(-1)])
