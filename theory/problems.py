"""Every convention of the theory, once.

Inputs x ~ N(0, I_d); labels y = x.beta_t + sigma * noise, noise ~ N(0, 1), so `sigma` is a
standard deviation. Source and target are unit vectors at angle `theta` (radians). Training loss
|y - X beta|^2 / (2n) (+ ridge |w|^2 / 2 on the trained weights), gradient flow at unit rate. Risk
is the full E|beta_hat - beta_t|^2: no factor 1/2, no label noise. Load gamma = n / d. `depth`
counts weight matrices: 1 is linear regression, inf is allowed where a closed form has that limit.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float
from scipy.special import poch

from sail_jax.checks import concrete

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Sample(NamedTuple):
    """One target data set and the two tasks it belongs to."""

    x: Float[Array, "n d"]
    y: Float[Array, " n"]
    beta_s: Float[Array, " d"]
    beta_t: Float[Array, " d"]


def tasks(d: int, theta: ArrayLike) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
    """Unit source e_1 and unit target cos(theta) e_1 + sin(theta) e_2; rotation invariance makes
    this choice free for isotropic inputs."""
    if d < 2:
        raise ValueError(f"d must be at least 2 (source and target span a plane); got {d}")
    theta = jnp.asarray(theta, dtype=float)
    source = jnp.zeros(d).at[0].set(1.0)
    return source, jnp.zeros(d).at[0].set(jnp.cos(theta)).at[1].set(jnp.sin(theta))


def draw(key: Array, n: int, d: int, theta: ArrayLike, sigma: ArrayLike) -> Sample:
    """A target set of n pairs (x, y) at the default float precision."""
    beta_s, beta_t = tasks(d, theta)
    key_x, key_noise = jax.random.split(key)
    x = jax.random.normal(key_x, (n, d))
    return Sample(x, x @ beta_t + sigma * jax.random.normal(key_noise, (n,)), beta_s, beta_t)


def in_float64(closed_form: Callable[Given, Result]) -> Callable[Given, Result]:
    """Computes in float64 whatever the caller's precision, in which the result is returned.

    Counts beyond 2^24, squares beyond 1e38 and differences of near numbers lie outside of float32,
    the results do not.
    """

    @functools.wraps(closed_form)
    def computed(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        dtype = jnp.zeros(()).dtype
        with jax.enable_x64(True):
            return jax.tree.map(lambda x: jnp.asarray(x, dtype), closed_form(*args, **kwargs))

    return computed


def cos_sin(theta: ArrayLike) -> tuple[Array, Array]:
    """The cosine and sine of an angle, 0 at the numbers next to pi/2 and pi in its precision."""
    theta = jnp.asarray(theta)
    theta = theta if jnp.issubdtype(theta.dtype, jnp.floating) else theta.astype(float)
    right, straight = (theta == jnp.asarray(x, theta.dtype) for x in (np.pi / 2, np.pi))
    wide = theta.astype(float)
    return jnp.where(right, 0.0, jnp.cos(wide)), jnp.where(straight, 0.0, jnp.sin(wide))


def wallis(m: int) -> float:
    """C(2m, m) / 4^m = Gamma(m + 1/2) / (sqrt(pi) Gamma(m + 1)), where a difference of logarithms
    of factorials would lose digits."""
    m = int(m)  # 4**m overflows in NumPy's integers
    if m < 10_000:
        return math.comb(2 * m, m) / 4**m
    return float(poch(m + 1, -0.5)) / math.sqrt(math.pi)


def log1p(x: Array) -> Array:
    """log(1 + x) to a few eps: XLA's own is some 100 off in float64."""
    y = 1 + x
    return jnp.where(y == 1, x, jnp.log(y) * x / jnp.where(y == 1, 1.0, y - 1))


def angle(u: Float[Array, "*b d"], v: Float[Array, "*b d"]) -> Float[Array, "*b"]:
    """The angle between nonzero vectors, to a few eps at both ends of [0, pi]: Kahan's form
    2 atan2(|u - v|, |u + v|) of unit vectors."""
    u, v = (a / jnp.linalg.norm(a, axis=-1, keepdims=True) for a in (u, v))
    return 2 * jnp.arctan2(jnp.linalg.norm(u - v, axis=-1), jnp.linalg.norm(u + v, axis=-1))


def risk(beta: Float[Array, "*b d"], beta_t: Float[Array, "*b d"]) -> Float[Array, "*b"]:
    """|beta - beta_t|^2, features-are-fate eq. (8) for Gaussian inputs."""
    return jnp.sum((beta - beta_t) ** 2, axis=-1)


def check(
    name: str,
    value: ArrayLike | Sequence[float],
    ok: Callable[[np.ndarray], np.ndarray | np.bool],
    allowed: str,
) -> None:
    """Raise ValueError("{name} must be {allowed}; got ...") where a known value is not `ok`.

    NaN is never ok: `ok` is a comparison, and comparisons with NaN are false.
    """
    values = concrete(value)
    if values is not None and not (good := np.asarray(ok(values))).all():
        bad = np.broadcast_to(values, good.shape)[~good]
        raise ValueError(f"{name} must be {allowed}; got {bad.flat[0]:g}")


def check_times(times: Sequence[float] | ArrayLike) -> Float[Array, " times"]:
    """Increments of ascending times >= 0, from 0 on; ValueError for anything else."""
    times = jnp.asarray(times, dtype=float)
    if times.ndim != 1 or times.size == 0:
        raise ValueError(f"times must be a non-empty vector; got shape {times.shape}")
    increments = jnp.diff(times, prepend=0.0)
    check("times", increments, lambda h: (h >= 0) & (h < np.inf), "ascending and >= 0")
    return increments


def check_theta(theta: ArrayLike) -> None:
    slack = 1e-6  # float32 pi is 9e-8 above pi
    check("theta", theta, lambda t: (t >= 0) & (t <= np.pi + slack), "an angle in [0, pi] radians")


def check_sigma(sigma: ArrayLike) -> None:
    check("sigma", sigma, lambda s: (s >= 0) & (s < np.inf), "a finite standard deviation >= 0")


def check_gamma(gamma: ArrayLike) -> None:
    check("gamma", gamma, lambda g: (g >= 0) & (g < np.inf), "a finite load n/d >= 0")


def check_ridge(ridge: ArrayLike) -> None:
    check("ridge", ridge, lambda r: (r >= 0) & (r < np.inf), "finite and >= 0")


def check_depth(depth: ArrayLike) -> None:
    check("depth", depth, lambda L: L >= 1, "a number of layers >= 1 (inf allowed)")
