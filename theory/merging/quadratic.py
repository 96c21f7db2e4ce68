"""Exact expectations of the quantities in the merging bounds, on `QuadraticTasks`.

`simulation.simulate` draws the same quantities.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory.merging.bounds import Constants
from theory.merging.tasks import QuadraticTasks
from theory.problems import check, defined, log1p

# f = mean_i f_i is the mean of the tasks' empirical risks, with minimiser x^. F is its expectation,
# f~ = sum_i w_i f_i the surrogate, and x the merged model.


class Quantities(NamedTuple):
    """Expectations over data and batches, or (`simulate`) draws along a leading axis.

    f_i is the empirical risk of task i, f = mean_i f_i their mean with minimiser x^, F the
    expectation of f, and f~ = sum_i w_i f_i the surrogate. x is the merged model and x_i is expert
    i.

    Attributes:
      risk: F(x).
      excess: F(x) - f(x^).
      generalisation: F(x) - f(x).
      optimisation: f(x) - f(x^).
      gradient: |grad f(x)|^2.
      surrogate_gradient: |grad f~(x)|^2.
      sample_gradient: The mean over tasks and over samples z of D_i of |grad l(x; z)|^2.
      stability: The mean over tasks of |x - x'|^2, where one sample of this task is replaced
        (Definition 2).
      local_stability: |x_i - x_i'|^2 of each task, where one of its n_i samples is replaced and
        batches have the same places, `(..., N)`.
      cross: <x_i - x_i', grad l(x_i'; z) - grad l(x_i'; z')> of each task, for the sample z and its
        replacement z', `(..., N)`.
      variance: The variance sigma_i^2 of a sample's gradient within D_i, `(..., N)`.
      heterogeneity: |grad f_i - grad f|^2 of each task, the same at every point, `(..., N)`.
      gap: f~(start) - inf f~.
      update: |x_i - start|^2 of each task, `(..., N)`.
      dispersion: sum_i w_i |x_i - x|^2.
    """

    risk: Float[Array, "*r"]
    excess: Float[Array, "*r"]
    generalisation: Float[Array, "*r"]
    optimisation: Float[Array, "*r"]
    gradient: Float[Array, "*r"]
    surrogate_gradient: Float[Array, "*r"]
    sample_gradient: Float[Array, "*r"]
    stability: Float[Array, "*r"]
    local_stability: Float[Array, "*r N"]
    cross: Float[Array, "*r N"]
    variance: Float[Array, "*r N"]
    heterogeneity: Float[Array, "*r N"]
    gap: Float[Array, "*r"]
    update: Float[Array, "*r N"]
    dispersion: Float[Array, "*r"]


class _Moments(NamedTuple):
    """First and second moments of the experts, per task and eigenvalue, `(N, d)`.

    x_i = kept * start + pull * (mean of the data) + noise of SGD.
    """

    pull: Float[Array, "N d"]
    kept: Float[Array, "N d"]  # 1 - pull, also where pull rounds to 1
    data: Float[Array, "N d"]  # variance of the mean of the data, s^2 / n
    noise: Float[Array, "N d"]  # variance that batches add
    memory: Float[Array, "N d"]  # (rate h)^2 sum_k (1 - rate h)^2k


def _moments(tasks: QuadraticTasks) -> _Moments:
    u = tasks.rate * tasks.curvature  # in (0, 2)
    k = tasks.steps[:, None]
    # log |1 - u|, and the sign of (1 - u)^K, which is negative for u > 1 and odd K.
    log = jnp.where(u < 1, log1p(-jnp.minimum(u, 1.0)), jnp.log(jnp.abs(u - 1)))
    odd = (u > 1) & (k % 2 == 1)
    # This is 1 - (1 - u)^K without its cancellation for small u.
    pull = jnp.where(odd, 1 + jnp.exp(k * log), -jnp.expm1(k * log))
    left = jnp.where(odd, -1, 1) * jnp.exp(k * log)
    # u^2 sum_{k<K} (1 - u)^{2k} = u (1 - (1 - u)^{2K}) / (2 - u), as 1 - (1 - u)^2 = u (2 - u).
    memory = u / (2 - u) * -jnp.expm1(2 * k * log)
    n, b = tasks.samples[:, None], tasks.batch[:, None]
    s2 = tasks.noise**2
    # A batch of b samples drawn with replacement has the variance of the data about their mean, s^2
    # (1 - 1/n), divided by b.
    noise = memory * s2 * (1 - 1 / n) / b
    return _Moments(pull, left, jnp.broadcast_to(s2 / n, pull.shape), noise, memory)


@defined
@jax.jit
def exact(tasks: QuadraticTasks) -> Quantities:
    """Computes all expectations in closed form.

    Args:
      tasks: The testbed.

    Returns:
      The expectations.

    >>> tasks = QuadraticTasks([1.0], [[0.0]], noise=1.0, samples=4, steps=1, batch=jnp.inf,
    ...                        rate=1.0)
    >>> round(float(exact(tasks).generalisation), 4)  # the mean of 4 samples: s^2 / n
    0.25
    """
    h, w = tasks.curvature, tasks.weights[:, None]
    # All quantities depend only on differences of positions. Without this shift, centres and start
    # far from 0 would cancel.
    origin = tasks.centres[0]
    c, start = tasks.centres - origin, tasks.start - origin
    n, s2, N = tasks.samples[:, None], tasks.noise**2, tasks.number
    pull, left, data, noise, memory = _moments(tasks)

    def square(of_start: Array, of_data: Array, of_noise: Array) -> Array:
        """Computes the mean square of a combination of the start, data means and noises, `(d,)`.

        E (of_start x start + sum_j of_data_j x data mean_j + sum_j of_noise_j x noise_j)^2, with
        coefficients `(d,)`, `(N, d)` and `(N, d)`.
        """
        mean = of_start * start + jnp.sum(of_data * c, 0)
        return mean**2 + jnp.sum(of_data**2 * data + of_noise**2 * noise, 0)

    # Row i is the mean of the data of task i.
    units = jnp.eye(N)[:, :, None]
    retained = jnp.sum(w * left, 0)
    # The merged model is retained x start + sum_i w_i (pull_i x data mean_i + noise_i). Each of the
    # next lines subtracts another point from it: x^ = mean_i (data mean_i), the minimiser sum_i w_i
    # (data mean_i) of f~, and the data mean of task i.
    to_minimum = square(retained, w * pull - 1 / N, w)
    to_surrogate = square(retained, -w * left, w)
    to_task = jax.vmap(lambda e: square(retained, w * pull - e, w))(units)
    between = jax.vmap(lambda e: square(jnp.zeros_like(h), e - 1 / N, 0 * w))(units)
    # Its distance to the centres enters F, an expectation over fresh samples.
    to_centre = (retained * start + jnp.sum(w * pull * c, 0) - c) ** 2
    to_centre = to_centre + jnp.sum((w * pull) ** 2 * data + w**2 * noise, 0)
    moved = pull**2 * ((c - start) ** 2 + data) + noise
    # x_i - x is taken by differences to task 0, in which a distant start cancels.
    nearer = jnp.where(pull + pull[0] > 1, left[0] - left, pull - pull[0])
    apart = pull * c - nearer * start
    apart = apart - jnp.sum(w * apart, 0)
    spread = apart**2 + (1 - w) * (pull**2 * data + noise)
    first = square(jnp.ones_like(h), -w * jnp.ones_like(pull), 0 * w)
    # A sample and its replacement differ by 2 s^2. Their weight is 1/n on average. Their fraction
    # of a batch has the variance (1/n) (1 - 1/n) / b.
    local = 2 * s2 * jnp.sum((pull / n) ** 2 + memory * (1 - 1 / n) / (n * _batch(tasks)), 1)
    risk = jnp.mean(jnp.sum(h * (to_centre + s2), 1)) / 2
    optimisation = jnp.sum(h * to_minimum) / 2
    generalisation = jnp.mean(jnp.sum(h * w * pull * data, 1))
    return Quantities(
        risk=risk,
        excess=generalisation + optimisation,
        generalisation=generalisation,
        optimisation=optimisation,
        gradient=jnp.sum(h**2 * to_minimum),
        surrogate_gradient=jnp.sum(h**2 * to_surrogate),
        sample_gradient=jnp.mean(jnp.sum(h**2 * (to_task + s2 * (1 - 1 / n)), 1)),
        stability=jnp.mean(tasks.weights**2 * local),
        local_stability=local,
        cross=-2 * s2 * jnp.sum(h * pull / n, 1),
        variance=s2 * (1 - 1 / tasks.samples) * jnp.sum(h**2),
        heterogeneity=jnp.sum(h**2 * between, 1),
        gap=jnp.sum(h * first) / 2,
        update=jnp.sum(moved, 1),
        dispersion=jnp.sum(w * spread),
    )


def _batch(tasks: QuadraticTasks) -> Float[Array, "N 1"]:
    return tasks.batch[:, None]


@defined
def constants(tasks: QuadraticTasks) -> Constants:
    """Computes the constants of the paper's assumptions for this testbed.

    L = max h and C = 1 / (2 min h) over the eigenvalues h. sigma_i^2, zeta_i^2 and the gap depend
    on the data and are expectations over them.

    Args:
      tasks: The testbed.

    Returns:
      The constants, for `bounds`.

    >>> tasks = QuadraticTasks([2.0, 0.5], [[0.0, 0.0]], noise=1.0, samples=4, steps=1, batch=1,
    ...                        rate=0.1)
    >>> float(constants(tasks).smoothness), float(constants(tasks).pl)
    (2.0, 1.0)
    """
    quantities, h = exact(tasks), jnp.asarray(tasks.curvature)
    return Constants(
        h.max(), 1 / (2 * h.min()), quantities.variance, quantities.heterogeneity, quantities.gap
    )


class Dropped(NamedTuple):
    """Excess risk and dispersion after DARE, as means over its masks.

    Attributes:
      excess: Excess risk F(x) - f(x^).
      dispersion: sum_i w_i |d_i - d|^2 of the task vectors d_i and their weighted mean d.
    """

    excess: Float[Array, ""]
    dispersion: Float[Array, ""]


@defined
def dare(tasks: QuadraticTasks, rate: ArrayLike) -> Dropped:
    """Computes the expected effect of DARE, rescaled, on excess risk and dispersion.

    Both grow by p / (1 - p) times a sum. For the excess it is sum_i w_i^2 E|x_i - start|_H^2 / 2,
    and for the dispersion sum_i w_i (1 - w_i) E|x_i - start|^2.

    Args:
      tasks: The testbed.
      rate: Drop rate p in [0, 1).

    Returns:
      Excess risk and dispersion after DARE.

    Raises:
      ValueError: If the rate is out of range.

    References:
      Yu et al., Language Models are Super Mario, 2024 (arXiv 2311.03099), introduce DARE.
    """
    check("rate", rate, lambda p: (p >= 0) & (p < 1), "in [0, 1)")
    return _dare(tasks, jnp.asarray(rate, float))


@jax.jit
def _dare(tasks: QuadraticTasks, p: Float[Array, ""]) -> Dropped:
    before = exact(tasks)
    pull, _, data, noise, _ = _moments(tasks)
    moved = pull**2 * ((tasks.centres - tasks.start) ** 2 + data) + noise
    w, odds = tasks.weights, p / (1 - p)
    return Dropped(
        before.excess + odds * jnp.sum(w[:, None] ** 2 * tasks.curvature * moved) / 2,
        before.dispersion + odds * jnp.sum(w * (1 - w) * before.update),
    )
