"""Integers, bools, random keys and complex numbers in a merge: they are not averaged.

Many checkpoints hold steps, counters, positions and keys with their weights. Where the models
agree they are copied. Where they differ, one rule decides for files and for pytrees alike.

Complex numbers are copied where the models agree, too. Where they differ they are weights, and one
model's would be wrong next to merged ones: no rule admits that.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import ArrayLike

from sail_jax.checks import one_of

Integers = Literal["first", "last", "max", "refuse"]
"""Whose values are taken where models differ: those of the base or else the first model, of the
last model, or the largest, entry by entry. "refuse" makes a difference an error."""


def check_integers(integers: Integers | None) -> Integers:
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
    one_of("integers", integers, Integers)
    return integers


def is_complex(dtype: DTypeLike) -> bool:
    """Checks whether a dtype is one of complex numbers.

    Args:
      dtype: The dtype.

    Returns:
      Whether it is.
    """
    return jnp.issubdtype(dtype, jnp.complexfloating)


def rule_for(dtype: DTypeLike, integers: Integers) -> Integers:
    """Finds the rule for a dtype.

    Args:
      dtype: The dtype of the values, one that is not floating.
      integers: The rule for integers.

    Returns:
      "refuse" for complex numbers, else the rule for integers.

    >>> rule_for(np.complex64, "first"), rule_for(np.int32, "first")
    ('refuse', 'first')
    """
    return "refuse" if is_complex(dtype) else integers


def remedy(dtype: DTypeLike, otherwise: str) -> str:
    """Finds what to do about values that differ and are refused, for messages.

    Args:
      dtype: The dtype of the values.
      otherwise: What to do about integers.

    Returns:
      The rest of a sentence.
    """
    of_complex = "complex numbers are not merged, and select can leave them out"
    return of_complex if is_complex(dtype) else otherwise


def taken(values: Sequence[Any], integers: Integers) -> Any:
    """Takes one array in the place of several.

    Args:
      values: The arrays of the base, if there is one, and of each model. They have one shape. Under
        "max" they are arrays of numbers or bools.
      integers: The rule.

    Returns:
      The array that the rule takes.

    >>> taken([np.array([100, 7]), np.array([200, 3])], "max")
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


def _plain(x: ArrayLike) -> np.ndarray:
    """The values of an array, or the data of a random key."""
    keys = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if keys else x)
