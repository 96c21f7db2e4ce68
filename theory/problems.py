"""Conventions that all closed forms share, and helpers that check arguments.

Inputs are x ~ N(0, I_d). Labels are y = x.beta_t + sigma * noise with noise ~ N(0, 1), so `sigma`
is a standard deviation. Source and target are unit vectors at an angle `theta` in radians. The
training loss is |y - X beta|^2 / (2n), plus ridge |w|^2 / 2 on the trained weights if there is a
ridge. Gradient flow runs at unit rate. The risk is the full E|beta_hat - beta_t|^2, without a
factor 1/2 and without label noise. The load is n / d, the number of samples per dimension. `depth`
counts weight matrices. Depth 1 is linear regression, and inf is allowed where a closed form has
that limit.
"""

import functools
import inspect
import math
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float
from scipy.special import poch

from sail_jax.annotations import check_types, is_real
from sail_jax.checks import concrete, described
from sail_jax.deprecated import former

__getattr__ = former(__name__, {"check_gamma": "check_load"}, until="0.4")

Given = ParamSpec("Given")
Result = TypeVar("Result")


def typed(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Makes a function check the types of its arguments against its annotations.

    Args:
      function: Any function.

    Returns:
      The function with the same signature, which raises the errors of
      `sail_jax.annotations.check_types`.
    """
    return _replaced(function, _called)


def defined(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Makes a function check the types of its arguments, and reject those where its result is NaN.

    Each argument may be in range while a square or a product of them exceeds the largest float. 0
    times infinity is then NaN. Descent with a rate that is too large also ends in NaN. Results that
    are traced by JAX are not checked.

    Args:
      function: A function of arrays and pytrees.

    Returns:
      The function with the same signature, which raises a ValueError in place of NaN and of
      Python's errors of arithmetic, and the errors of `sail_jax.annotations.check_types`.
    """
    return _replaced(function, _checked)


def _replaced(function: Callable, check: Callable) -> Callable:
    """Makes a function with the signature of another that calls `check` with its arguments."""
    # A lambda, because import hooks that check types would give a function its own globals.
    refusing: Any = lambda *args, **kwargs: check(function, args, kwargs)  # noqa: E731
    # With the globals of the function's own module. doctest skips functions of another module.
    of = getattr(inspect.unwrap(function), "__globals__", {})
    made = types.FunctionType(refusing.__code__, of, closure=refusing.__closure__)
    return functools.update_wrapper(made, function)


class _ShapesError(ValueError):
    """Raised if arguments have shapes that do not fit each other."""


class _UndefinedError(ValueError):
    """Raised if a result is not a number."""


def _called(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Calls a function with arguments of the annotated types."""
    check_types(function, args, kwargs)
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        # Also for an error of an inner function, as in `_checked`.
        raw = re.search(r"could not be broadcast|ncompatible shapes for broadcasting", str(error))
        if not (raw or isinstance(error, _ShapesError)):
            raise
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        shapes = {name: getattr(x, "shape", ()) for name, x in given.items()}
        shapes |= {name: (len(x),) for name, x in given.items() if isinstance(x, list | tuple)}
        named = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items() if shape)
        raise _ShapesError(
            f"{function.__name__}: expected arguments with shapes that are equal or can be "
            f"broadcast; got {named}"
        ) from error


def _checked(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Calls a function with arguments of the annotated types, and rejects a result that is NaN."""
    try:
        result = _called(function, args, kwargs)
        if any(np.isnan(known).any() for known in _numbers(result)):
            raise _UndefinedError
    except (ArithmeticError, _UndefinedError) as error:
        # Also for an error of an inner function, because the user knows the arguments of this one.
        found = "NaN" if isinstance(error, _UndefinedError) else error
        raise _UndefinedError(
            f"the result of {function.__name__} must be a number; got {found} where "
            + _sizes(function, args, kwargs)
        ) from error
    return result


def _sizes(function: Callable, args: tuple, kwargs: dict) -> str:
    """Describes each argument by its name and its largest absolute value."""
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    numbers = {name: [x.ravel() for x in _numbers(value)] for name, value in given.items()}
    sizes = {name: abs(np.concatenate(x)).max(initial=0) for name, x in numbers.items() if x}
    return ", ".join(f"|{name}| is up to {size:g}" for name, size in sizes.items())


def _numbers(tree: object) -> list[np.ndarray]:
    """Returns the leaves that are concrete numbers, without keys, functions and integers beyond
    int64.
    """
    leaves = jax.tree.leaves(tree)
    numbers = [x for x in leaves if jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.number)]
    known = [concrete(x) for x in numbers]
    return [x for x in known if x is not None and x.dtype != object]


class Sample(NamedTuple):
    """A target data set, together with the source and target tasks.

    Attributes:
      x: Inputs `(n, d)`.
      y: Noisy labels `(n,)` of the target task.
      beta_s: Unit weight vector of the source task, `(d,)`.
      beta_t: Unit weight vector of the target task, `(d,)`.
    """

    x: Float[Array, "n d"]
    y: Float[Array, " n"]
    beta_s: Float[Array, " d"]
    beta_t: Float[Array, " d"]


@defined
def tasks(d: int, theta: ArrayLike) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
    """Returns unit source and target vectors at a given angle.

    The source is e_1 and the target is cos(theta) e_1 + sin(theta) e_2. For isotropic inputs any
    other pair at this angle gives the same risks, by rotation invariance.

    Args:
      d: Dimension, at least 2.
      theta: Angle between the tasks in radians, a scalar.

    Returns:
      The source and the target, each `(d,)`.

    Raises:
      ValueError: If d < 2.
    """
    if d < 2:
        raise ValueError(f"d must be at least 2 (source and target span a plane); got {d}")
    theta = jnp.asarray(theta, dtype=float)
    source = jnp.zeros(d).at[0].set(1.0)
    return source, jnp.zeros(d).at[0].set(jnp.cos(theta)).at[1].set(jnp.sin(theta))


@defined
def draw(key: Array, n: int, d: int, theta: ArrayLike, sigma: ArrayLike) -> Sample:
    """Draws a target data set of n Gaussian samples.

    Args:
      key: Random key.
      n: Number of samples.
      d: Dimension, at least 2.
      theta: Angle between source and target in radians, a scalar.
      sigma: Standard deviation of the label noise, a scalar.

    Returns:
      The sample, in the default float precision.

    Raises:
      ValueError: If d < 2.
    """
    beta_s, beta_t = tasks(d, theta)
    # The noise has its own key, so that data sets of different noise levels share their inputs.
    key_x, key_noise = jax.random.split(key)
    x = jax.random.normal(key_x, (n, d))
    return Sample(x, x @ beta_t + sigma * jax.random.normal(key_noise, (n,)), beta_s, beta_t)


def in_float64(closed_form: Callable[Given, Result]) -> Callable[Given, Result]:
    """Makes a closed form compute in float64 and reject NaN.

    Args:
      closed_form: A function that returns a pytree of arrays.

    Returns:
      The function with the same signature; its result has the caller's default float precision.
    """
    return defined(unchecked_in_float64(closed_form))


def unchecked_in_float64(closed_form: Callable[Given, Result]) -> Callable[Given, Result]:
    """Makes a closed form compute in float64, regardless of the caller's precision.

    The result may have NaN where a quantity is undefined, as in a table of several quantities.
    float64 is necessary because counts above 2^24, squares above 1e38 and differences of nearly
    equal numbers are not representable in float32, although the results are.

    Args:
      closed_form: A function that returns a pytree of arrays.

    Returns:
      The function with the same signature; its result has the caller's default float precision.
    """

    @functools.wraps(closed_form)
    def computed(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        dtype = jnp.zeros(()).dtype
        with jax.enable_x64(True):
            return jax.tree.map(lambda x: jnp.asarray(x, dtype), closed_form(*args, **kwargs))

    return computed


@defined
def cos_sin(theta: ArrayLike) -> tuple[Array, Array]:
    """Returns the cosine and sine of an angle; the cosine is exactly 0 at pi/2, the sine at pi.

    Floating-point pi/2 and pi are not exact, so the library functions return about 1e-16 or 1e-8
    there. The comparison is made in the precision of `theta`, before it is converted to the default
    precision.

    Args:
      theta: Angles in radians, of any shape.

    Returns:
      The cosine and the sine, each with the shape of `theta`.
    """
    theta = jnp.asarray(theta)
    theta = theta if jnp.issubdtype(theta.dtype, jnp.floating) else theta.astype(float)
    right, straight = (theta == jnp.asarray(x, theta.dtype) for x in (np.pi / 2, np.pi))
    wide = theta.astype(float)
    return jnp.where(right, 0.0, jnp.cos(wide)), jnp.where(straight, 0.0, jnp.sin(wide))


@defined
def wallis(m: int) -> float:
    """Computes C(2m, m) / 4^m = Gamma(m + 1/2) / (sqrt(pi) Gamma(m + 1)) without losing digits.

    The difference of two logarithms of factorials would lose digits at large m.

    Args:
      m: An integer >= 0.

    Returns:
      The ratio.
    """
    m = int(m)  # 4**m overflows in NumPy's integers
    # The exact binomial coefficient is cheap here. The Pochhammer symbol replaces it for larger m.
    if m < 10_000:
        return math.comb(2 * m, m) / 4**m
    return float(poch(m + 1, -0.5)) / math.sqrt(math.pi)


@defined
def log1p(x: Array) -> Array:
    """Computes log(1 + x) to a few units of rounding.

    XLA's own `log1p` has an error of about 100 units in float64, for x between -0.41 and -0.36.

    Args:
      x: Values >= -1, of any shape.

    Returns:
      The logarithms, with the shape of `x`.
    """
    # Below -1/4 the logarithm magnifies the rounding of 1 + x at most threefold. The usual
    # correction log(y) x / (y - 1) fails, because the compiler simplifies (1 + x) - 1 to x.
    low = x < -0.25
    return jnp.where(low, jnp.log(1 + x), jnp.log1p(jnp.where(low, 0.0, x)))


@defined
def angle(u: Float[Array, "*b d"], v: Float[Array, "*b d"]) -> Float[Array, "*b"]:
    """Computes the angle between nonzero vectors, accurately at both ends of [0, pi].

    Formula: 2 atan2(|u - v|, |u + v|) of the normalised vectors (Kahan). The arccosine of their
    inner product loses half of the digits near 0 and pi.

    Args:
      u: Vectors `(..., d)`.
      v: Vectors `(..., d)`; leading axes broadcast.

    Returns:
      Angles in radians in [0, pi], without the last axis.
    """
    u, v = (a / jnp.linalg.norm(a, axis=-1, keepdims=True) for a in (u, v))
    return 2 * jnp.arctan2(jnp.linalg.norm(u - v, axis=-1), jnp.linalg.norm(u + v, axis=-1))


@defined
def risk(beta: Float[Array, "*b d"], beta_t: Float[Array, "*b d"]) -> Float[Array, "*b"]:
    """Computes the risk |beta - beta_t|^2 of a linear predictor under isotropic inputs.

    Args:
      beta: Fitted weight vectors `(..., d)`.
      beta_t: Target weight vectors `(..., d)`; leading axes broadcast.

    Returns:
      The risks, without the last axis.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), eq. (8).
    """
    return jnp.sum((beta - beta_t) ** 2, axis=-1)


def check(
    name: str,
    value: ArrayLike | Sequence[float],
    ok: Callable[[np.ndarray], np.ndarray | np.bool],
    allowed: str,
) -> None:
    """Raises an error unless every known value satisfies a condition.

    Values that are traced by JAX are not checked. NaN never passes, because comparisons with NaN
    are false.

    Args:
      name: The argument's name, for the message.
      value: The value or array to check.
      ok: Maps the values, as a NumPy array, to booleans.
      allowed: A description of the allowed values, for the message "{name} must be {allowed}; got
        ...".

    Raises:
      TypeError: If `value` does not consist of numbers.
      ValueError: If a known value is not `ok`. The message shows the first such value.
    """
    if not is_real(value):
        raise TypeError(f"{name} must be {allowed}; got {described(value)}")
    values = concrete(value)
    if values is not None and not (good := np.asarray(ok(values))).all():
        bad = np.broadcast_to(values, good.shape)[~good]
        raise ValueError(f"{name} must be {allowed}; got {bad.flat[0]:g}")


def check_sum(weights: Array) -> None:
    """Raises an error unless known weights sum to 1, up to rounding.

    Each weight may have a rounding error, and the sum adds more. The tolerance is 4 eps per weight,
    in units of the sum of absolute values.

    Args:
      weights: Weights `(N,)`, of either sign.

    Raises:
      ValueError: If they do not.
    """
    known = concrete(weights)
    if known is not None:
        slack = 4 * known.size * float(jnp.finfo(weights.dtype).eps) * max(1.0, abs(known).sum())
        if not abs(known.sum() - 1) <= slack:
            raise ValueError(f"weights must sum to 1; got {known.sum():g}")


def check_squares(name: str, value: ArrayLike | Sequence[float]) -> None:
    """Raises an error unless values and sums of their squares are finite.

    Args:
      name: The argument's name, for the message.
      value: The values. Integers are converted to the default precision.

    Raises:
      ValueError: If a value is infinite or NaN, or too large for its precision.
    """
    dtype = jnp.result_type(jnp.asarray(value), float)
    most = float(f"{1e-4 * float(jnp.finfo(dtype).max) ** 0.5:.0e}")
    check(name, value, np.isfinite, "finite")
    held = f"from {-most:g} to {most:g}, as {dtype} has to hold squares"
    check(name, value, lambda x: abs(x) <= most, held)


def check_times(times: Sequence[float] | ArrayLike) -> Float[Array, " times"]:
    """Checks that times ascend from 0 and returns the increments between them.

    Args:
      times: Times `(times,)`, ascending, finite and >= 0. Equal neighbours are allowed.

    Returns:
      The increments `(times,)`; the first one counts from 0.

    Raises:
      ValueError: If `times` is not a non-empty vector, or is not ascending, finite and >= 0.
    """
    times = jnp.asarray(times, dtype=float)
    if times.ndim != 1 or times.size == 0:
        raise ValueError(f"times must be a non-empty vector; got shape {times.shape}")
    increments = jnp.diff(times, prepend=0.0)
    check("times", increments, lambda h: (h >= 0) & (h < np.inf), "ascending and >= 0")
    return increments


def check_theta(theta: ArrayLike) -> None:
    """Raises an error unless theta is in [0, pi].

    Args:
      theta: Angles in radians. 1e-6 beyond pi is tolerated, because float32 rounds pi upwards.

    Raises:
      ValueError: If an angle is not in [0, pi].
    """
    slack = 1e-6  # float32 pi is 9e-8 above pi
    check("theta", theta, lambda t: (t >= 0) & (t <= np.pi + slack), "an angle in [0, pi] radians")


def check_sigma(sigma: ArrayLike) -> None:
    """Raises an error unless sigma is a finite standard deviation >= 0.

    All closed forms use its square, which is 0 or infinite in float64 beyond these bounds.

    Args:
      sigma: Standard deviations of label noise, 0 or from 1e-150 to 1e150.

    Raises:
      ValueError: If a value is negative, infinite or NaN, or its square overflows or underflows in
        float64.
    """
    check("sigma", sigma, lambda s: (s >= 0) & (s < np.inf), "a finite standard deviation >= 0")

    def squared(s: np.ndarray) -> Any:
        s = s.astype(float)
        return (s == 0) | ((s >= 1e-150) & (s <= 1e150))

    check("sigma", sigma, squared, "0, or from 1e-150 to 1e150")


def check_load(load: ArrayLike) -> None:
    """Raises an error unless load is a finite ratio n / d >= 0.

    Args:
      load: Loads n / d.

    Raises:
      ValueError: If a value is negative, infinite or NaN.
    """
    check("load", load, lambda g: (g >= 0) & (g < np.inf), "a finite load n/d >= 0")


def check_ridge(ridge: ArrayLike) -> None:
    """Raises an error unless ridge is a finite penalty >= 0.

    Args:
      ridge: Ridge penalties.

    Raises:
      ValueError: If a value is negative, infinite or NaN.
    """
    check("ridge", ridge, lambda r: (r >= 0) & (r < np.inf), "finite and >= 0")


def check_depth(depth: ArrayLike) -> None:
    """Raises an error unless depth is a number of layers >= 1.

    Args:
      depth: Numbers of weight matrices; inf is allowed.

    Raises:
      ValueError: If a value is below 1 or NaN.
    """
    check("depth", depth, lambda L: L >= 1, "a number of layers >= 1 (inf allowed)")
