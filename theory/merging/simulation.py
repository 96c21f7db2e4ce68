"""Simulated training and merging of experts on drawn data, with every quantity measured.

The expectations of these draws are in `quadratic`, in closed form.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from sail_jax.checks import concrete
from theory.merging.quadratic import Quantities
from theory.merging.tasks import QuadraticTasks


def simulate(key: Array, tasks: QuadraticTasks, runs: int) -> Quantities:
    """Trains and merges experts on drawn data and measures all quantities.

    Each run draws the data of all tasks and their batches, trains every expert by SGD, and trains
    it again with its first sample replaced by a fresh one and the batches at the same places.
    Nothing is averaged over runs. Losses and gradients are sums over the drawn samples; F alone is
    an expectation.

    Args:
      key: Random key.
      tasks: The testbed, with known (not traced) numbers of samples and batch sizes.
      runs: Number of independent runs, >= 1.

    Returns:
      The quantities, with a leading axis `runs`.

    Raises:
      ValueError: If runs < 1.
      TypeError: If numbers of samples or batch sizes are traced.
    """
    if runs < 1:
        raise ValueError(f"runs must be >= 1; got {runs}")
    n, b = concrete(tasks.samples), concrete(tasks.batch)
    if n is None or b is None:
        raise TypeError("samples and batch are traced: simulate draws arrays of these sizes")
    most, widest = int(n.max()), int(np.max(b, where=np.isfinite(b), initial=1))
    # XLA's own generator: it compiles ten times faster than threefry
    words = jax.random.bits(key, (4,), jnp.uint32)
    return _runs(jax.random.wrap_key_data(words, impl="rbg"), tasks, runs, most, widest)


@partial(jax.jit, static_argnums=(2, 3, 4))
def _runs(key: Array, tasks: QuadraticTasks, runs: int, most: int, widest: int) -> Quantities:
    N, d = tasks.centres.shape
    n, finite = tasks.samples[:, None], jnp.isfinite(tasks.batch)[:, None]
    size = jnp.where(finite, tasks.batch[:, None], widest)
    share = (jnp.arange(widest) < size) / size
    data_key, batch_key = jax.random.split(key)
    drawn = tasks.noise * jax.random.normal(data_key, (runs, N, most + 1, d))
    samples = tasks.centres[:, None] + drawn
    z, other = samples[:, :, :-1], samples[:, :, -1]
    mean = jnp.sum(_owned(tasks, most)[..., None] * z, 2)

    def batch(k: Array) -> tuple[Float[Array, "r N d"], Float[Array, "r N 1"]]:
        """Means of batches, and the share of the first sample in them."""
        uniform = jax.random.uniform(jax.random.fold_in(batch_key, k), (runs, N, widest))
        place = jnp.minimum(jnp.floor(uniform * n), n - 1)
        picked = jnp.take_along_axis(z, place.astype(int)[..., None], 2)
        batch_mean = jnp.sum(share[..., None] * picked, 2)
        first = jnp.sum(share * (place == 0), 2, keepdims=True)
        return jnp.where(finite, batch_mean, mean), jnp.where(finite, first, 1 / n)

    def step(k: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        seen, first = batch(k)
        targets = seen, seen + first * (other - z[:, :, 0])
        on = (k < tasks.steps)[:, None]
        a, b = (
            jnp.where(on, xi - tasks.rate * tasks.curvature * (xi - t), xi)
            for xi, t in zip(x, targets, strict=True)
        )
        return a, b

    # a loop of traced length: one compilation whatever the steps
    begin = jnp.broadcast_to(tasks.start, (runs, N, d))
    x, twin = lax.fori_loop(0, tasks.steps.max().astype(int), step, (begin, begin))
    return jax.vmap(partial(_measure, tasks))(z, other, x, twin)


def _owned(tasks: QuadraticTasks, most: int) -> Float[Array, "N m"]:
    """Returns 1 / n_i for the samples that a task has and 0 elsewhere; rows sum to 1."""
    return (jnp.arange(most) < tasks.samples[:, None]) / tasks.samples[:, None]


def _measure(
    tasks: QuadraticTasks,
    z: Float[Array, "N m d"],
    other: Float[Array, "N d"],
    x: Float[Array, "N d"],
    twin: Float[Array, "N d"],
) -> Quantities:
    """Measures all quantities of one run, by sums over its samples."""
    h, c, start, w = tasks.curvature, tasks.centres, tasks.start, tasks.weights
    owned = _owned(tasks, z.shape[1])
    merged = start + w @ (x - start)
    twins = merged + w[:, None] * (twin - x)  # expert i swapped for its twin, [N d]

    def loss(at: Array) -> Float[Array, "p N"]:
        """f_i at points [p d]."""
        away = (at[:, None, None] - z) ** 2
        return jnp.sum(owned * jnp.sum(h * away, 3), 2) / 2

    mean = jnp.sum(owned[..., None] * z, 1)
    attained, best, surrogate, first = loss(jnp.stack([merged, mean.mean(0), w @ mean, start]))
    gradients = h * (merged - z)  # of samples
    g = jnp.sum(owned[..., None] * gradients, 1)
    deviation = jnp.sum((gradients - g[:, None]) ** 2, 2)
    risk = jnp.mean(jnp.sum(h * ((merged - c) ** 2 + tasks.noise**2), 1)) / 2
    return Quantities(
        risk=risk,
        excess=risk - best.mean(),
        generalisation=risk - attained.mean(),
        optimisation=jnp.mean(attained - best),
        gradient=jnp.sum(g.mean(0) ** 2),
        surrogate_gradient=jnp.sum((w @ g) ** 2),
        sample_gradient=jnp.mean(jnp.sum(owned * jnp.sum(gradients**2, 2), 1)),
        stability=jnp.mean(jnp.sum((merged - twins) ** 2, 1)),
        local_stability=jnp.sum((x - twin) ** 2, 1),
        cross=jnp.sum((x - twin) * h * (other - z[:, 0]), 1),
        variance=jnp.sum(owned * deviation, 1),
        heterogeneity=jnp.sum((g - g.mean(0)) ** 2, 1),
        gap=w @ (first - surrogate),
        update=jnp.sum((x - start) ** 2, 1),
        dispersion=w @ jnp.sum((x - merged) ** 2, 1),
    )
