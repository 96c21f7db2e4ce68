"""Common parts of all estimates of distances: a value with its standard error, and checks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from sail_jax.checks import concrete


class Distance(NamedTuple):
    """An estimate of a distance with its standard error.

    Both fields are JAX arrays for differentiable estimators, and floats for the others.

    Attributes:
      value: The estimate.
      stderr: The estimated standard deviation of `value` under fresh samples.
    """

    value: Any
    stderr: Any


def samples(
    x: ArrayLike, y: ArrayLike, least: int
) -> tuple[Float[Array, "m dim"], Float[Array, "n dim"]]:
    """Checks two samples and returns them as floating arrays.

    Args:
      x: Points `[m, dim]`, real numbers, finite if their values are known.
      y: Points `[n, dim]`, likewise.
      least: The smallest allowed number of points.

    Returns:
      Both samples, in one dtype: float32, or float64 if one of them is float64.

    Raises:
      ValueError: For another number of axes, empty samples, too few points, values that are not
        finite, and points of different dimensions.
      TypeError: For values that are not real numbers.
    """
    a, b = (jnp.asarray(z) for z in _checked(x, y, least))
    dtype = jnp.promote_types(jnp.result_type(a, b), jnp.float32)
    return a.astype(dtype), b.astype(dtype)


def host_samples(
    x: ArrayLike, y: ArrayLike, least: int
) -> tuple[Float[np.ndarray, "m dim"], Float[np.ndarray, "n dim"]]:
    """Checks two samples and returns them as NumPy arrays in float64.

    `x` contains points `[m, dim]`, finite real numbers, and `y` points `[n, dim]`. Raises a
    ValueError as `samples` does, and a TypeError as `samples` does and for traced arrays.
    """
    for name, value in (("x", x), ("y", y)):
        if concrete(value) is None:
            raise TypeError(f"{name} is traced: this distance is computed outside jax.jit")
    a, b = _checked(x, y, least)
    return np.asarray(a, np.float64), np.asarray(b, np.float64)


def _checked(x: Any, y: Any, least: int) -> list[Any]:
    """Converts both samples to arrays, with the checks of `samples`."""
    pair = []
    for name, value in (("x", x), ("y", y)):
        if not isinstance(value, jax.Array):  # traced arrays are JAX arrays
            value = np.asarray(value)
        if value.ndim != 2 or 0 in value.shape:
            raise ValueError(f"{name} must be a sample [n, dim], not empty; got {value.shape}")
        numeric = jnp.issubdtype(value.dtype, jnp.number) or value.dtype == bool
        if not numeric or jnp.issubdtype(value.dtype, jnp.complexfloating):
            raise TypeError(f"{name} must be real numbers; got {value.dtype}")
        if len(value) < least:
            raise ValueError(f"{name} must have at least {least} points; got {len(value)}")
        values = concrete(value)
        if values is not None and not np.isfinite(values.astype(np.float64)).all():
            raise ValueError(f"{name} must be finite")
        pair.append(value)
    (_, dim), (_, other) = (z.shape for z in pair)
    if dim != other:
        raise ValueError(f"y must have points of the dimension of x, {dim}; got {other}")
    return pair
