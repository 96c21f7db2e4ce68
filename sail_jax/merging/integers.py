"""Integers, bools and random keys in a merge: they cannot be averaged.

Many checkpoints hold steps, counters, positions and keys with their weights. Where the models
agree they are copied. Where they differ, one rule decides for files and for pytrees alike.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Integers", "check_integers", "differ", "one_of"]

Integers = Literal["first", "last", "max", "refuse"]
"""Whose values are taken where models differ: those of the base or else the first model, of the
last model, or the largest, entry by entry. "refuse" makes a difference an error."""


def check_integers(integers: Any) -> Integers:
    """Checks the name of a rule.

    Args:
      integers: What should be the name; None for the default.

    Returns:
      The rule.

    Raises:
      ValueError: If the rule does not exist.
    """
    if integers is None:
        return "first"
    if integers not in get_args(Integers):
        raise ValueError(
            f"integers: expected one of {', '.join(get_args(Integers))}; got {integers!r}"
        )
    return integers


def one_of(values: Sequence[Any], integers: Integers) -> Any:
    """Takes one array in the place of several.

    Args:
      values: The arrays of the base, if there is one, and of each model. They have one shape. Under
        "max" they are arrays of numbers or bools.
      integers: The rule.

    Returns:
      The array that the rule takes.

    >>> one_of([np.array([100, 7]), np.array([200, 3])], "max")
    array([200,   7])
    """
    if integers == "max":
        numpy = all(isinstance(x, np.ndarray) for x in values)
        return reduce(np.maximum if numpy else jnp.maximum, values)
    return values[-1 if integers == "last" else 0]


def differ(values: Sequence[Any]) -> bool:
    """Compares arrays by their values.

    Args:
      values: Arrays with known values, or typed random keys.

    Returns:
      Whether one is unlike the first.
    """
    first, *others = map(_plain, values)
    return not all(np.array_equal(first, other) for other in others)


def _plain(x: Any) -> np.ndarray:
    """The values of an array, or the data of a random key."""
    keys = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if keys else x)
