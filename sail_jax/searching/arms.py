"""The candidates of a search: methods with the ranges of their hyperparameters."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from sail_jax import methods
from sail_jax.checks import nearest
from sail_jax.merging import random_bits
from sail_jax.merging.merge import Merge
from sail_jax.methods import registry
from sail_jax.trees import leaf_paths

Bounds = tuple[float, float] | tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Arm:
    """A method with hyperparameters to search.

    Attributes:
      name: The name of the arm, unique in a search.
      make: A function from hyperparameters to a merge, usually a method of `sail_jax.methods`.
      bounds: (low, high) for each hyperparameter to search. "weights" (an argument of the merge)
        has one pair for each model. Empty for no search.
      start: The initial hyperparameters, with the names of `bounds`. Missing ones start in the
        middle.
      groups: Patterns of leaf paths, such as "layers/0/*". Each group of leaves then has a separate
        scale ("scales" in `bounds`) on its change from the base.
    """

    name: str
    make: Callable[..., Merge]
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", MappingProxyType(dict(self.bounds)))
        object.__setattr__(self, "start", MappingProxyType(dict(self.start)))

    def merge(self, options: Mapping[str, Any]) -> tuple[Merge, Any]:
        """Makes the merge for given hyperparameters.

        Args:
          options: The hyperparameters, with the names of `bounds`.

        Returns:
          The merge and the weights of its models (None for 1 each).
        """
        own = {name: x for name, x in options.items() if name not in ("weights", "scales")}
        return self.make(**own), options.get("weights")

    def apply(
        self, models: Sequence[PyTree], base: PyTree | None, options: Mapping[str, Any]
    ) -> PyTree:
        """Merges models with given hyperparameters.

        Args:
          models: The models.
          base: Their base.
          options: The hyperparameters, with the names of `bounds`.

        Returns:
          The merged model. With groups, each group is base + scale (merge - base).
        """
        merge, weights = self.merge(options)
        merged = merge(models, base, weights=weights)
        if not self.groups:
            return merged
        start = models[0] if base is None else base
        leaves, treedef = jax.tree.flatten(merged)
        scaled = [
            x if (k := self.group(path)) is None else _scaled(x, origin, options["scales"][k])
            for path, x, origin in zip(
                leaf_paths(merged), leaves, jax.tree.leaves(start), strict=True
            )
        ]
        return treedef.unflatten(scaled)

    def group(self, path: str) -> int | None:
        """Finds the first group of a leaf.

        Args:
          path: The path of the leaf.

        Returns:
          The number of the group, or None.
        """
        fits = (k for k, pattern in enumerate(self.groups) if fnmatchcase(path, pattern))
        return next(fits, None)

    def first(self) -> dict[str, Any]:
        """Lists the initial hyperparameters.

        Returns:
          A value for each name of `bounds`.
        """
        return {name: self.start.get(name, _middle(pair)) for name, pair in self.bounds.items()}

    def spread(self, count: int, rng: np.random.Generator) -> list[dict[str, Any]]:
        """Draws hyperparameters within the bounds, spread evenly.

        Args:
          count: The number of draws.
          rng: The source of the draws.

        Returns:
          Hyperparameters from a Latin hypercube. Every hyperparameter visits each of `count` equal
          parts of its range once.
        """
        drawn: list[dict[str, Any]] = [{} for _ in range(count)]
        for name, pair in self.bounds.items():
            low, high = np.reshape(pair, (-1, 2)).T
            parts = np.stack([rng.permutation(count) for _ in low], -1)
            places = (parts + rng.random(parts.shape)) / max(count, 1)
            for options, value in zip(drawn, low + (high - low) * places, strict=True):
                options[name] = float(value[0]) if np.ndim(pair) == 1 else value
        return drawn


def _middle(pair: Bounds) -> Any:
    middle = np.mean(pair, -1)
    return float(middle) if np.ndim(pair) == 1 else middle


def _scaled(x: Any, origin: Any, scale: Any) -> Any:
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return x
    return (origin + scale * (x - origin)).astype(x.dtype)


def usual(base: bool) -> Arm:
    """Returns the reference arm, task arithmetic at its usual scale.

    Args:
      base: Whether there is a base. Without a base, the reference is the uniform soup.

    Returns:
      The arm. The scale is 0.3, as in the paper of AdaMerging and in fusion_bench.

    References:
      Ilharco et al., Editing Models with Task Arithmetic, 2023 (arXiv 2212.04089).
    """
    if not base:
        return Arm("uniform soup", methods.linear)
    return Arm("task arithmetic at 0.3", lambda: methods.task_arithmetic(scale=0.3))


def affine(
    arm: Arm, options: Mapping[str, Any], count: int, base: bool
) -> Float[np.ndarray, "p"] | None:
    """Returns the weights of a merge that is a weighted mean of models and base.

    Args:
      arm: The arm.
      options: Its hyperparameters.
      count: The number of models.
      base: Whether there is a base.

    Returns:
      A weight for each model, and for the base if given, with sum 1. None for other merges.
    """
    merge, weights = arm.merge(options)
    if arm.groups or merge.name not in ("linear", "task_arithmetic"):
        return None
    shares = np.ones(count) if weights is None else np.asarray(weights, float)
    if merge.normalize:
        shares = shares / shares.sum()
    if merge.name == "task_arithmetic":
        shares = float(np.asarray(merge.scale)) * shares
        return np.append(shares, 1 - shares.sum())
    if not np.isclose(shares.sum(), 1):
        return None
    return np.append(shares, 0.0) if base else shares


def arms(
    count: int,
    base: bool,
    names: Iterable[str | Arm] | None = None,
    *,
    groups: Sequence[str] = (),
    seed: int = 0,
) -> tuple[Arm, ...]:
    """Lists the methods that are applicable to the models, with their stated ranges.

    Args:
      count: The number of models.
      base: Whether there is a base.
      names: The methods, and custom arms. By default all applicable methods, and "weights".
      groups: Patterns of leaf paths. If given, the last arm is task arithmetic (without a base, the
        uniform soup) with a scale for each group.
      seed: The seed of methods that draw random numbers.

    Returns:
      The arms. The arm "weights" searches the weights of a weighted mean.

    Raises:
      ValueError: If a given method is unknown or not applicable to the models.

    >>> [arm.name for arm in arms(2, True, ["linear", "ties"])]
    ['linear', 'ties']
    >>> arms(2, True, ["ties"])[0].bounds["density"]
    (0.05, 1.0)
    """
    found = []
    known = [*registry.known(), "weights"]
    for name in known if names is None else names:
        if isinstance(name, Arm):
            found.append(name)
            continue
        if name not in known:
            raise ValueError(f"methods: no merging method {name!r}{nearest(name, known)}")
        if name == "weights":
            found.append(_weighted(count))
            continue
        reason = _unfit(name, count, base)
        if not reason:
            found.append(_arm(name, seed))
        elif names is not None:
            raise ValueError(f"methods: {name} {reason}")
    if groups:
        pairs, start = ((0.0, 2.0),) * len(groups), np.ones(len(groups))
        whole = usual(base)
        found.append(Arm("groups", whole.make, {"scales": pairs}, {"scales": start}, tuple(groups)))
    return tuple(found)


def _weighted(count: int) -> Arm:
    even = np.full(count, 1 / count)
    return Arm("weights", methods.linear, {"weights": ((0.0, 1.0),) * count}, {"weights": even})


def _unfit(name: str, count: int, base: bool) -> str:
    """Returns the reason why a method cannot be searched with the models; empty if it can."""
    example = registry.example(name)
    if example is None:
        return "needs arrays in addition to the models; give it as an Arm"
    least, most = example.models
    if count < least or (most is not None and count > most):
        return f"takes {least} to {most or 'any number of'} models; there are {count}"
    return "needs a base" if example.base in ("required", "merged") and not base else ""


def _arm(name: str, seed: int) -> Arm:
    """Makes the arm of a method, which starts at the method's defaults if these are numbers."""
    make = registry.get(name)
    bounds = {option: (x.low, x.high) for option, x in registry.ranges(name).items()}
    options = registry.options_of(name)
    fixed = {"key": random_bits.key(seed)} if "key" in options else {}
    defaults = {key: options[key].default for key in bounds}
    start = {
        key: float(value)
        for key, value in defaults.items()
        if isinstance(value, int | float) and bounds[key][0] <= value <= bounds[key][1]
    }
    return Arm(name, functools.partial(make, **fixed), bounds, start)
