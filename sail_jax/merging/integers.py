"""The treatment of integers, bools, random keys and complex numbers in a merge, which are not
averaged.

Many checkpoints contain steps, counters, positions and keys next to their weights. If the models
agree, the values are copied. If they differ, one rule applies, for files and for pytrees.

Complex numbers are copied only if the models agree. If they differ, they are weights, and copying
one model's weights next to merged weights would be wrong, so every rule refuses them.
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
"""The source of values where models differ: the base or else the "first" model, the "last" model,
or the largest value of each entry ("max"). "refuse" raises an error."""


def check_integers(integers: Integers | None) -> Integers:
    """Checks the name of a rule.

    Args:
      integers: The name; None for the default.

    Returns:
      The rule.

    Raises:
      ValueError: For an unknown rule.
    """
    if integers is None:
        return "first"
    one_of("integers", integers, Integers)
    return integers


def is_complex(dtype: DTypeLike) -> bool:
    """Checks whether a dtype is complex.

    Args:
      dtype: The dtype.

    Returns:
      True for complex dtypes.
    """
    return jnp.issubdtype(dtype, jnp.complexfloating)


def rule_for(dtype: DTypeLike, integers: Integers) -> Integers:
    """Finds the rule for a dtype.

    Args:
      dtype: The dtype of the values, not floating.
      integers: The rule for integers.

    Returns:
      "refuse" for complex numbers, otherwise the rule for integers.

    >>> rule_for(np.complex64, "first"), rule_for(np.int32, "first")
    ('refuse', 'first')
    """
    return "refuse" if is_complex(dtype) else integers


def remedy(dtype: DTypeLike, otherwise: str) -> str:
    """Finds the advice in messages about refused values.

    Args:
      dtype: The dtype of the values.
      otherwise: The advice about integers.

    Returns:
      The rest of a sentence.
    """
    of_complex = "complex numbers are not merged; select can leave them out"
    return of_complex if is_complex(dtype) else otherwise


def taken(values: Sequence[Any], integers: Integers) -> Any:
    """Selects one array from several.

    Args:
      values: The arrays of the base, if given, and of each model, all with one shape. Under "max"
        they contain numbers or bools.
      integers: The rule.

    Returns:
      The array that the rule selects.

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
      True if any array differs from the first.
    """
    first, *others = map(_plain, values)
    return not all(np.array_equal(first, other) for other in others)


def _plain(x: ArrayLike) -> np.ndarray:
    """Returns the values of an array, or the data of a random key."""
    keys = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if keys else x)
