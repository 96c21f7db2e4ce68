"""Compares the average of a run's checkpoints with learning-rate decay, on a noisy quadratic.

A step of SGD on h x^2 / 2 with gradient noise of standard deviation sigma is x' = (1 - eta h) x -
eta sigma xi. The rate is constant, with a checkpoint every `spacing` steps, x_0 to x_k. Weights c_j
give the average sum_j c_j x_j. With U_i = x_i - x_{i-1} and d_i = sum_{j>=i} c_j it is x_0 + sum_i
d_i U_i, the past updates scaled by a decay. Training with the rates eta d_i has other updates,
because its gradients are computed at other points. Here, both start at checkpoint 0 and take the
same number of steps.

An end point is characterised by two numbers, the remaining fraction of x_0 and the variance of the
noise since then. For any decay in [0, 1] and eta h < 1, the average never has the smaller fraction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erf
from jax.typing import ArrayLike
from jaxtyping import Array, Float
from scipy.optimize import brentq
from scipy.special import factorial

from sail_jax.checks import concrete
from sail_jax.trajectory import decay_of
from theory.problems import check, check_sum, defined, in_float64, log1p

Numbers = Any  # a number, or an array of them
Weights = Sequence[float] | ArrayLike  # one number per checkpoint, of sum 1

# Below this time a series replaces differences of nearly equal numbers.
SHORT, TERMS = 1.0, 20
# The break-even of short windows: the squared distance, in stationary variances.
LEAST = 0.2


def _nonnegative(x: np.ndarray) -> np.ndarray:
    return np.asarray((x >= 0) & (x < np.inf))


def _pace(rate: Numbers, curvature: Numbers) -> Array:
    """Computes eta h in float64, because products of small numbers underflow in float32."""
    with jax.enable_x64(True):
        return jnp.asarray(rate, float) * jnp.asarray(curvature, float)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NoisyQuadratic:
    """Constant-rate SGD on a quadratic, with the law of its first checkpoint.

    Fields may be arrays of one shape, or of shapes that broadcast: one problem per entry.

    Attributes:
      curvature: Curvature h, > 0.
      rate: Learning rate eta, with 0 < eta h < 2.
      noise: Standard deviation sigma of a step's gradient, finite and >= 0.
      spacing: Steps between two checkpoints, an integer >= 1.
      mean: Mean of the first checkpoint, measured from the minimum, finite.
      variance: Variance of the first checkpoint about its mean, finite and >= 0. None is the
        stationary variance of a long run.
    """

    curvature: Numbers
    rate: Numbers
    noise: Numbers
    spacing: Numbers
    mean: Numbers = 0.0
    variance: Numbers | None = None

    def __post_init__(self) -> None:
        # JAX also constructs these objects from placeholders, which cannot be checked.
        if isinstance(self.curvature, float | int | np.number | np.ndarray | jax.Array):
            check("curvature", self.curvature, lambda h: h > 0, "> 0")
            check(
                "rate * curvature",
                _pace(self.rate, self.curvature),
                lambda u: (u > 0) & (u < 2),
                "in (0, 2)",
            )
            check("noise", self.noise, _nonnegative, "finite and >= 0")
            check(
                "spacing",
                self.spacing,
                lambda p: (p >= 1) & (p == np.floor(p)) & (p < np.inf),
                "whole, >= 1",
            )
            check("mean", self.mean, np.isfinite, "finite")
            if self.variance is not None:
                check("variance", self.variance, _nonnegative, "finite and >= 0")

    @property
    def stationary(self) -> Array:
        """The stationary variance eta sigma^2 / (h (2 - eta h)) of SGD at this rate."""
        h, eta = jnp.asarray(self.curvature, float), jnp.asarray(self.rate, float)
        return eta * jnp.square(jnp.asarray(self.noise, float)) / (h * (2 - eta * h))

    @property
    def start(self) -> Array:
        """The variance of the first checkpoint."""
        return self.stationary if self.variance is None else jnp.asarray(self.variance, float)


class Moments(NamedTuple):
    """The law of the end point of an average or of a run.

    Attributes:
      bias: Its mean, measured from the minimum.
      variance: Its variance.
      loss: The expected loss h (bias^2 + variance) / 2.
    """

    bias: Float[Array, "*b"]
    variance: Float[Array, "*b"]
    loss: Float[Array, "*b"]


class _Shares(NamedTuple):
    """The remaining fraction of the first checkpoint, and the variance of the noise since then."""

    left: Float[Array, "*b"]
    noise: Float[Array, "*b"]


def _decay(weights: Float[Array, " n"]) -> Float[Array, " k"]:
    """Computes d_1, ..., d_k as `sail_jax.trajectory.decay_of` does, for traced weights."""
    return jnp.cumsum(weights[::-1])[::-1][1:]


def _checked(weights: Weights) -> Numbers:
    """Checks weights in their own precision, because the caller's precision would round them."""
    if np.ndim(weights) != 1 or not np.size(weights):
        raise ValueError(
            f"weights must be a vector, one for each checkpoint; got shape {np.shape(weights)}"
        )
    check_sum(jnp.asarray(weights, float))
    known = concrete(weights)
    return weights if known is None else known


def _log(u: Array) -> Array:
    """Computes log |1 - u|."""
    return jnp.where(u < 1, log1p(-jnp.minimum(u, 1.0)), jnp.log(jnp.abs(u - 1)))


def _kept(u: Array, steps: Array) -> Array:
    """Computes (1 - u)^steps, the remaining fraction of a start."""
    size = jnp.exp(steps * _log(u))
    return jnp.where((u > 1) & (steps % 2 == 1), -size, size)


def _lost(u: Array, steps: Array) -> Array:
    """Computes 1 - (1 - u)^steps."""
    return jnp.where(u < 1, -jnp.expm1(steps * _log(u)), 1 - _kept(u, steps))


def _sum(u: Array, steps: Array) -> Array:
    """Computes sum_{t < steps} (1 - u)^t. With 1 - u = (1 - eta h)^2 it is the variance of the
    noise.
    """
    return jnp.where(u == 0, steps, _lost(u, steps) / jnp.where(u == 0, 1.0, u))


def _gap(u: Array, share: Array, steps: Array) -> Array:
    """Computes `_sum` at share u minus `_sum` at u, by the binomial series where they are nearly
    equal.
    """
    m = np.arange(1, TERMS + 1)
    n, v, x = steps[..., None], u[..., None], share[..., None]
    terms = n * jnp.cumprod((m - n) * v / (m + 1), -1)
    short = -jnp.sum(terms * (1 - x**m), -1)
    return jnp.where(steps * u < SHORT, short, _sum(share * u, steps) - _sum(u, steps))


def _floats(*values: Numbers) -> list[Array]:
    return [jnp.asarray(x, float)[..., None] for x in values]


def _kick(problem: NoisyQuadratic) -> Array:
    """Computes the variance of one step's noise."""
    return jnp.square(jnp.asarray(problem.rate, float) * jnp.asarray(problem.noise, float))


def _to_the_end(rho: Array, c: Float[Array, " n"]) -> Float[Array, "*b n"]:
    """Computes sum_{j>=i} c_j rho^(j-i), the average's factor of the noise before checkpoint i."""
    later = np.arange(c.size) - np.arange(c.size)[:, None]
    return jnp.sum(jnp.where(later >= 0, c * rho[..., None] ** np.maximum(later, 0), 0.0), -1)


def _left_by_average(problem: NoisyQuadratic, c: Float[Array, " n"]) -> _Shares:
    """Computes the fractions of the average from its factors of the noise per interval."""
    h, eta, p = _floats(problem.curvature, problem.rate, problem.spacing)
    has = _to_the_end(_kept(eta * h, p), c)
    noise = _sum(eta * h * (2 - eta * h), p)[..., 0] * jnp.sum(has[..., 1:] ** 2, -1)
    return _Shares(has[..., 0], _kick(problem) * noise)


def _after(x: Array, gather: Callable = jnp.cumprod, nothing: float = 1.0) -> Array:
    """Computes the products, or sums, of all later entries."""
    later = gather(x[..., :0:-1], axis=-1)[..., ::-1]
    return jnp.concatenate([later, jnp.full_like(x[..., :1], nothing)], -1)


_summed_after = partial(_after, gather=jnp.cumsum, nothing=0.0)


def _left_by_decay(problem: NoisyQuadratic, d: Float[Array, " k"]) -> _Shares:
    """Computes the fractions of a run at the rates eta d_i, `spacing` steps each."""
    h, eta, p = _floats(problem.curvature, problem.rate, problem.spacing)
    u = eta * h * d
    kept = _kept(u, p)
    noise = jnp.sum((d * _after(kept)) ** 2 * _sum(u * (2 - u), p), -1)
    return _Shares(jnp.prod(kept, -1), _kick(problem) * noise)


def _moments(problem: NoisyQuadratic, shares: _Shares) -> Moments:
    bias = jnp.asarray(problem.mean, float) * shares.left
    variance = problem.start * shares.left**2 + shares.noise
    h = jnp.asarray(problem.curvature, float)
    return Moments(*jnp.broadcast_arrays(bias, variance, h * (bias**2 + variance) / 2))


@defined
def averaged(problem: NoisyQuadratic, weights: Weights) -> Moments:
    """Computes the moments of the average of checkpoints, in closed form.

    bias = mu_0 sum_j c_j rho^j and variance = v sum_ij c_i c_j rho^|i-j| + (v_0 - v) (sum_j c_j
    rho^j)^2, with rho = (1 - eta h)^spacing and the stationary variance v. The variance is computed
    as a sum over intervals, without cancellation at small rates.

    Args:
      problem: The quadratic.
      weights: Weights c_j `(n,)` of sum 1, oldest checkpoint first.

    Returns:
      The moments.

    Raises:
      ValueError: If the weights are not a vector of sum 1.

    >>> problem = NoisyQuadratic(1.0, rate=0.1, noise=1.0, spacing=7, mean=3.0)
    >>> found = averaged(problem, [1 / 13] * 13)
    >>> round(float(found.bias), 3), round(float(found.variance), 4)
    (0.442, 0.0104)
    """
    return _averaged(problem, _checked(weights))


@in_float64
@jax.jit
def _averaged(problem: NoisyQuadratic, weights: Weights) -> Moments:
    c = jnp.asarray(weights, float)
    return _moments(problem, _left_by_average(problem, c))


@defined
def decayed(problem: NoisyQuadratic, weights: Weights) -> Moments:
    """Computes the moments of SGD at the decayed rates that correspond to an average.

    Interval i, between checkpoints i - 1 and i, is run at the rate eta d_i, d_i = sum_{j>=i} c_j.

    Args:
      problem: The quadratic, with the highest rate.
      weights: Weights c_j `(n,)` of sum 1 of the average, oldest checkpoint first.

    Returns:
      The moments.

    Raises:
      ValueError: If the weights are not a vector of sum 1.

    >>> problem = NoisyQuadratic(1.0, rate=0.1, noise=1.0, spacing=7, mean=3.0)
    >>> found = decayed(problem, [1 / 13] * 13)
    >>> round(float(found.bias), 3), round(float(found.variance), 4)
    (0.039, 0.0151)
    """
    return _decayed(problem, _checked(weights))


@in_float64
@jax.jit
def _decayed(problem: NoisyQuadratic, weights: Weights) -> Moments:
    c = jnp.asarray(weights, float)
    return _moments(problem, _left_by_decay(problem, _decay(c)))


@defined
def break_even(problem: NoisyQuadratic, weights: Weights) -> Float[Array, "*b"]:
    """Computes the distance of the first checkpoint below which the average is better than the
    decay.

    Both expected losses are linear in the second moment of x_0, so it has a closed form. It is E
    x_0^2 = (noise of the decay - noise of the average) / (left^2 of the average - left^2 of the
    decay). The mean is the root of this minus the variance of x_0. For the rate, the spacing or the
    number of checkpoints the equation cannot be solved in closed form.

    Args:
      problem: The quadratic; its `mean` is ignored.
      weights: Weights c_j `(n,)` of sum 1 of the average, oldest checkpoint first.

    Returns:
      The |mean| below which the average has the smaller loss. It is inf if the average always has
      it. It is 0 if both are equal, if the average never has it, or only above some |mean| (eta h >
      1).

    Raises:
      ValueError: If the weights are not a vector of sum 1.
    """
    return _break_even(problem, _checked(weights))


@in_float64
@jax.jit
def _break_even(problem: NoisyQuadratic, weights: Weights) -> Float[Array, "*b"]:
    c = jnp.asarray(weights, float)
    d = _decay(c)
    more, less = _differences(problem, c, d)
    # The average has the smaller loss where mean^2 more < less - (variance of x_0) more.
    gain = less - problem.start * more
    some = jnp.where(more > 0, more, 1.0)
    always = jnp.where(gain > 0, jnp.inf, 0.0)
    edge = jnp.where(more > 0, jnp.sqrt(jnp.maximum(gain / some, 0.0)), always)
    # If all d_i are 1 or 0, the average is one checkpoint, the end of the decay.
    return jnp.where(jnp.any((d != 0) & (d != 1)), edge, 0.0)


def _differences(
    problem: NoisyQuadratic, c: Float[Array, " n"], d: Float[Array, " k"]
) -> tuple[Array, Array]:
    """Computes how much more of x_0^2 the average keeps, and how much less noise it has.

    Both differences are of higher order in eta h than their parts. They are computed as sums over
    intervals, in which each term has this order.
    """
    h, eta, p = _floats(problem.curvature, problem.rate, problem.spacing)
    u, ages, slow = eta * h, np.arange(c.size), eta * h < 1
    kept, after = _kept(u * d, p), _after(_kept(u * d, p))
    has = _to_the_end(_kept(u, p), c)

    # In interval i, the decay loses at least d_i times the fraction that constant rates lose.
    # Before, it lost less than constant rates.
    before = _after(kept[..., ::-1])[..., ::-1]
    faster = p * log1p(jnp.where(slow, u * (1 - d) / jnp.where(slow, 1 - u, 1.0), 0.0))
    ahead = _summed_after(faster[..., ::-1])[..., ::-1]
    behind = jnp.where(slow, -before * jnp.expm1(-ahead), before - _kept(u, p) ** ages[:-1])
    share = jnp.sum(d * (before * u * _gap(u, d, p) + _lost(u, p) * behind), -1)
    more = share * (has[..., 0] + jnp.prod(kept, -1))

    # Both start with d_i times the noise of interval i, and lose some of it in later intervals.
    gone = jnp.where(slow, -jnp.expm1(_summed_after(p * _log(u * d))), 1 - after)
    age = ages - ages[1:, None]
    fades = jnp.where(age > 0, c * _lost(u, p * ages)[..., np.maximum(age, 0)], 0.0)
    gaps = _gap(u * (2 - u), d * (2 - u * d) / (2 - u), p)
    apart = (jnp.sum(fades, -1) - d * gone) * (d * after + has[..., 1:])
    less = jnp.sum((d * after) ** 2 * gaps + _sum(u * (2 - u), p) * apart, -1)
    return more, _kick(problem) * less


# --- many steps of a small rate -------------------------------------------------------------------


class Dense(NamedTuple):
    """The remaining fractions of the first checkpoint and of the stationary variance, in the dense
    limit.

    Attributes:
      bias: The fraction of the mean.
      variance: The variance of a stationary run, in units of the stationary variance.
    """

    bias: Float[Array, "*b"]
    variance: Float[Array, "*b"]


def _positive(time: np.ndarray) -> np.ndarray:
    return np.asarray((time > 0) & (time < np.inf))


@in_float64
def dense(time: ArrayLike) -> tuple[Dense, Dense]:
    """Computes the fractions of a uniform average of all iterates and of linear decay to 0, for
    small rates.

    With T = eta h times the steps, the average keeps (1 - e^-T) / T of the mean and 2 (T - 1 +
    e^-T) / T^2 of the variance. The decay keeps e^(-T/2) and sqrt(pi / T) erf(sqrt T) / 2.

    Args:
      time: T > 0, finite, of any shape.

    Returns:
      The fractions of the average, and of the decay.

    Raises:
      ValueError: If a time is not positive, or infinite.
    """
    check("time", time, _positive, "finite and > 0")
    t = jnp.asarray(time, float)
    share = -jnp.expm1(-t) / t
    n = np.arange(TERMS)
    short = jnp.sum(2 / factorial(n + 2) * (-jnp.minimum(t, SHORT)[..., None]) ** n, -1)
    average = Dense(share, jnp.where(t < SHORT, short, 2 * (1 - share) / t))
    return average, Dense(jnp.exp(-t / 2), jnp.sqrt(jnp.pi / t) * erf(jnp.sqrt(t)) / 2)


@in_float64
def dense_break_even(time: ArrayLike) -> Float[Array, "*b"]:
    """Computes the distance below which a uniform average is better than linear decay, at small
    rates.

    The run was stationary about its mean. The square of the result is the difference of the
    variances of `dense`, divided by the difference of the squared biases. It is 1/5 for short
    windows, and grows as sqrt(pi) / 2 T^(3/2).

    Args:
      time: T = eta h times the steps of the window, > 0, finite, of any shape.

    Returns:
      The |mean| below which the average has the smaller loss, in stationary standard deviations.

    Raises:
      ValueError: If a time is not positive, or infinite.

    >>> [round(float(dense_break_even(t)), 2) for t in (1e-3, 1.0, 10.0)]
    [0.45, 0.59, 3.17]
    """
    check("time", time, _positive, "finite and > 0")
    return _dense_break_even(jnp.asarray(time, float))


@jax.jit
def _dense_break_even(t: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Computes `dense_break_even`, by series of both differences where they cancel."""
    n = np.arange(2, TERMS + 2)
    of_noise = 1 / (factorial(n) * (2 * n + 1)) - 2 / factorial(n + 2)
    of_bias = (2.0 ** (n + 2) - 2) / factorial(n + 2) - 1 / factorial(n)
    powers = (-jnp.minimum(t, SHORT)[..., None]) ** (n - 2)
    short = jnp.sum(of_noise * powers, -1) / jnp.sum(of_bias * powers, -1)
    average, decay = dense(jnp.maximum(t, SHORT))
    # Squared biases of long windows underflow.
    long = jnp.sqrt((decay.variance - average.variance) / (average.bias - decay.bias))
    return jnp.where(t < SHORT, jnp.sqrt(short), long / jnp.sqrt(average.bias + decay.bias))


@defined
def dense_window(distance: float) -> float:
    """Computes the window above which the average is better than linear decay, at small rates.

    It is a root of `dense_break_even`, found by Brent's method.

    Args:
      distance: |mean| of the run at the start of the window, in stationary standard deviations.

    Returns:
      The time T = eta h times the steps. It is 0 if every window is long enough, that is, for
      distances up to sqrt(1/5).

    Raises:
      ValueError: If the distance is negative or infinite.
    """
    check("distance", distance, _nonnegative, "finite and >= 0")

    def beyond(time: float) -> float:
        with jax.enable_x64(True):
            return float(_dense_break_even(jnp.asarray(time, float))) - float(distance)

    if distance <= LEAST**0.5 or beyond(0.0) >= 0:
        return 0.0
    high = 1.0
    while beyond(high) < 0:
        high *= 2
    root: Any = brentq(beyond, 0.0, high, xtol=1e-300, maxiter=1000)
    return float(root)


# --- simulation -----------------------------------------------------------------------------------


class Draws(NamedTuple):
    """End points of simulated runs, each `(runs,)`.

    Attributes:
      averaged: The average of the checkpoints of a run of constant rate.
      decayed: The end of a run of decayed rates, from the same start and with the same noise.
      last: The last checkpoint of the run of constant rate.
    """

    averaged: Float[Array, " runs"]
    decayed: Float[Array, " runs"]
    last: Float[Array, " runs"]


@defined
def simulate_average(key: Array, problem: NoisyQuadratic, weights: Weights, runs: int) -> Draws:
    """Runs SGD step by step, with constant and with decayed rates, and averages checkpoints.

    Args:
      key: Random key.
      problem: The quadratic: a single problem with concrete numbers.
      weights: Weights c_j `(n,)` of sum 1 of the average, oldest checkpoint first.
      runs: Number of independent runs, >= 1.

    Returns:
      The end points.

    Raises:
      ValueError: If the weights are not a vector of sum 1, or runs < 1.
    """
    if runs < 1:
        raise ValueError(f"runs must be >= 1; got {runs}")
    c, p = jnp.asarray(_checked(weights), float), int(problem.spacing)
    # The decay of the rate in every step, and the weight of a checkpoint after it.
    rates = np.repeat(decay_of(np.asarray(weights, float))[1:], p)
    after = np.where(np.arange(1, rates.size + 1) % p, 0.0, np.repeat(np.asarray(c)[1:], p))
    return _simulate(key, problem, c[0], jnp.asarray(rates, float), jnp.asarray(after), runs)


@partial(jax.jit, static_argnames="runs")
def _simulate(
    key: Array,
    problem: NoisyQuadratic,
    first: Float[Array, ""],
    rates: Float[Array, " steps"],
    after: Float[Array, " steps"],
    runs: int,
) -> Draws:
    start_key, key = jax.random.split(key)
    spread = jnp.sqrt(problem.start) * jax.random.normal(start_key, (runs,))
    start = jnp.asarray(problem.mean, float) + spread

    def step(at: Draws, now: tuple[Array, Array, Array]) -> tuple[Draws, None]:
        key, decay, weight = now
        kick = problem.noise * jax.random.normal(key, (runs,))
        x = at.last - problem.rate * (problem.curvature * at.last + kick)
        slower = at.decayed - problem.rate * decay * (problem.curvature * at.decayed + kick)
        return Draws(at.averaged + weight * x, slower, x), None

    keys = jax.random.split(key, rates.size)
    return jax.lax.scan(step, Draws(first * start, start, start), (keys, rates, after))[0]
