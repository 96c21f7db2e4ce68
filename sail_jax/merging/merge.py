"""A merging method as an expression, apart from the arrays that it is applied to."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.checks import nearest
from sail_jax.merging.task_vectors import (
    Count,
    Rule,
    Weights,
    apply,
    everybody,
    origin,
    task_vectors,
)

__all__ = [
    "METHODS",
    "Base",
    "Compat",
    "Expression",
    "Method",
    "default",
    "expression",
    "get",
    "knobs",
    "method",
    "with_base",
]

Base = Literal["required", "optional", "unused", "votes"]
Compat = Literal["paper", "mergekit"]
Method = Callable[..., PyTree]
T = TypeVar("T")


@dataclass(frozen=True)
class Expression:
    """base + scale * count(rule(votes of the models)).

    normalize: divide the weights by their sum over all models, before any rule sees them.
    base: "required", "optional" (votes are deltas from 0 without one), "unused" (deltas from 0; one
        given says the output's dtypes), or "votes" (required; deltas from 0, and the base's own is
        the first).
    models: the least and the largest number of models, None for any.
    """

    count: Count
    rule: Rule = everybody
    normalize: bool = False
    scale: Float[ArrayLike, ""] = 1.0
    base: Base = "required"
    models: tuple[int, int | None] = (1, None)

    def check_models(self, count: int, base: bool) -> None:
        """ValueError for another number of models than this takes, or a missing base."""
        least, most = self.models
        if count < least or (most is not None and count > most):
            expected = f"{least}" if least == most else f"{least} to {most}"
            expected = f"at least {least}" if most is None else expected
            raise ValueError(f"models: expected {expected}, got {count}")
        if self.base in ("required", "votes") and not base:
            raise TypeError("base: expected the pytree that the models were tuned from, got None")

    def merge(
        self, models: Sequence[PyTree], base: PyTree | None = None, weights: Weights = None
    ) -> PyTree:
        """The merged pytree; raises as `task_vectors` and `apply` do."""
        if isinstance(models, str) or not isinstance(models, Sequence):
            raise TypeError(f"models: expected a sequence of pytrees, got {type(models).__name__}")
        self.check_models(len(models), base is not None)
        like = models[0] if base is None else base
        if self.base == "votes":
            models, weights = [base, *models], with_base(weights)
        relative = base is not None and self.base in ("required", "optional")
        start = base if relative else origin(like)
        votes = task_vectors(models, start, weights, self.normalize)
        return apply(start, self.count(self.rule(votes)), self.scale)


def with_base(weights: Weights) -> Weights:
    """The weights of the models, after that of a base which votes as they do: 1."""
    if weights is None:
        return None
    return jnp.concatenate([jnp.ones(1), jnp.asarray(weights, jnp.result_type(float)).reshape(-1)])


def default(compat: Compat) -> Callable[[T | None, T, T], T]:
    """`value`, or where it is None what `compat` makes of it: `(value, paper, mergekit)`."""
    if compat not in ("paper", "mergekit"):
        raise ValueError(f"compat: expected 'paper' or 'mergekit', got {compat!r}")

    def choose(value: T | None, paper: T, mergekit: T) -> T:
        return value if value is not None else paper if compat == "paper" else mergekit

    return choose


METHODS: dict[str, Method] = {}
_EXPRESSIONS: dict[str, Callable[..., Expression]] = {}


def method(express: Callable[..., Expression]) -> Method:
    """The method of an expression: `express(*, key, **knobs)` becomes
    `method(models, base=None, *, weights=None, key=None, **knobs)`, registered by its name."""
    name = express.__name__

    @functools.wraps(express)
    def merge(
        models: Sequence[PyTree],
        base: PyTree | None = None,
        *,
        weights: Weights = None,
        key: Array | None = None,
        **knobs: Any,
    ) -> PyTree:
        try:
            return expression(name, key=key, **knobs).merge(models, base, weights)
        except (TypeError, ValueError) as error:
            if type(error) not in (TypeError, ValueError):
                raise
            raise type(error)(f"{name}: {error}") from error

    first = [inspect.Parameter("models", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    first += [inspect.Parameter("base", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)]
    first += [inspect.Parameter("weights", inspect.Parameter.KEYWORD_ONLY, default=None)]
    rest = inspect.signature(express).parameters.values()
    merge.__signature__ = inspect.Signature([*first, *rest])  # type: ignore[attr-defined]
    METHODS[name], _EXPRESSIONS[name] = merge, express
    return merge


def expression(name: str, *, key: Array | None = None, **knobs: Any) -> Expression:
    """The expression of the method `name`, for these knobs.

    ValueError for an unknown method, TypeError for an unknown knob, each with the nearest name.
    """
    known = _known(name)
    for knob in knobs:
        if knob not in known:
            raise TypeError(f"{name} has no knob {knob!r}{nearest(knob, known)}")
    return _EXPRESSIONS[name](key=key, **knobs)


def knobs(name: str) -> Mapping[str, inspect.Parameter]:
    """The knobs of the method `name` with their defaults and types."""
    return MappingProxyType(_known(name))


def _known(name: str) -> dict[str, inspect.Parameter]:
    get(name)
    parameters = inspect.signature(_EXPRESSIONS[name]).parameters
    return {knob: parameter for knob, parameter in parameters.items() if knob != "key"}


def get(name: str) -> Method:
    """The method called `name`; ValueError with the nearest name for an unknown one.

    >>> from sail_jax import methods
    >>> get("ties") is methods.ties
    True
    """
    if name not in METHODS:
        raise ValueError(f"no merging method {name!r}{nearest(str(name), METHODS)}")
    return METHODS[name]
