"""The Hessian of a loss by its products with vectors: eigenvalues, trace and spectral density.

Stochastic Lanczos quadrature (Ubaru, Chen & Saad 2017; Ghorbani, Krishnan & Xiao 2019) with full
reorthogonalisation; products are forward over reverse (Pearlmutter 1994), with all floating
parameters as one vector, in float32 at least.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.probe.combinations import numbers, stack
from sail_jax.probe.estimates import Estimate, check_finite, check_size, estimate, examples, mean
from sail_jax.probe.networks import Apply, outputs

__all__ = [
    "Spectrum",
    "dot",
    "flatten",
    "hessian_spectrum",
    "lanczos",
    "product",
    "ritz",
    "spectral_density",
]

Vector = Float[Array, "p"]
dot = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class Spectrum(NamedTuple):
    """largest: eigenvalues from the top, descending; smallest: from the bottom, ascending. An
    eigenvalue of the matrix lies within its residual of each (Lanczos' bound |beta_m s_mi|); the
    r-th is never beyond the matrix's own r-th. The spectral norm is the larger of |largest[0]| and
    |smallest[0]|.
    trace: Hutchinson's, over probes.
    nodes, weights: Gauss quadrature of the density of eigenvalues, [probe, step]; weights sum to 1.
    """

    largest: Float[Array, "top"]
    largest_residual: Float[Array, "top"]
    smallest: Float[Array, "top"]
    smallest_residual: Float[Array, "top"]
    trace: Estimate
    nodes: Float[Array, "probe step"]
    weights: Float[Array, "probe step"]


def hessian_spectrum(
    loss: Callable[..., Float[Array, ""]],
    params: PyTree,
    data: PyTree,
    key: Array,
    *,
    top: int = 1,
    steps: int = 32,
    probes: int = 4,
    network: Apply | None = None,
    batch_size: int | None = None,
) -> Spectrum:
    """The spectrum of the Hessian of loss(params, batch), the mean over the examples of a batch.

    With a `network` that of the Gauss-Newton matrix of loss(network(params, batch), batch), as the
    outputs' Hessian lies between the network's Jacobians; it has no negative eigenvalue if that has
    none. steps: of Lanczos' iteration, at most as many as there are parameters, when all is exact
    up to rounding. probes: Rademacher vectors, at least 2 for standard errors.

    steps x probes products, each about two gradients (over all `data`, `batch_size` examples at a
    time). Memory: a matrix of Krylov vectors, `steps` times the parameters, and one product's.

    Raises ValueError for data and sizes that do not fit, for values that are not finite, and
    fewer than 2 probes.

    >>> d = jnp.array([3.0, 1.0, -2.0])
    >>> found = hessian_spectrum(
    ...     lambda w, x: jnp.mean(x) * jnp.sum(d * w**2) / 2, jnp.zeros(3), jnp.ones(1),
    ...     jax.random.key(0), top=2)
    >>> found.largest.round(4).tolist(), found.trace.value.round(4).item()
    ([3.0, 1.0], 2.0)
    """
    examples(data)
    stack([params])
    size = sum(x.size for x in jax.tree.leaves(flatten(params)[0]))
    check_size(top=top, steps=steps, probes=probes, batch_size=batch_size)
    if probes < 2:
        raise ValueError("probes: expected at least 2, for standard errors, got 1")
    if top > min(steps, size):
        raise ValueError(
            f"top: expected at most steps ({steps}) and parameters ({size}), got {top}"
        )
    spectrum = _spectrum(
        loss, params, data, key, top, min(steps, size), probes, network, batch_size
    )
    check_finite("loss: its second derivatives", spectrum.nodes)
    return spectrum


def spectral_density(
    spectrum: Spectrum, grid: Float[ArrayLike, "point"], width: ArrayLike
) -> Estimate:
    """The density of eigenvalues at the points of a grid, smoothed by a Gaussian of that standard
    deviation, with standard errors over probes. It integrates to 1."""
    t, width = numbers("grid", grid), jnp.asarray(width, jnp.result_type(float))
    if width.shape or not (width > 0):
        raise ValueError(f"width: expected a number > 0, got {width}")
    kernel = jax.scipy.stats.norm.pdf(t[:, None, None], spectrum.nodes, width)
    return estimate(jnp.sum(kernel * spectrum.weights, -1).T)


def flatten(params: PyTree) -> tuple[Vector, Callable[[Vector], PyTree]]:
    """The floating leaves as one vector, in float32 at least, and the way back, where they stay as
    wide; the other leaves are kept."""
    leaves, treedef = jax.tree.flatten(params)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    at = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    wide = [leaves[i].astype(jnp.promote_types(leaves[i].dtype, jnp.float32)) for i in at]
    if not any(x.size for x in wide):
        raise ValueError("params: expected floating leaves, got none")
    flat, unravel = ravel_pytree(wide)

    def back(vector: Vector) -> PyTree:
        floating = dict(zip(at, unravel(vector), strict=True))
        return treedef.unflatten(floating.get(i, leaf) for i, leaf in enumerate(leaves))

    return flat, back


def product(
    loss: Callable[..., Array],
    params: PyTree,
    data: PyTree,
    batch_size: int | None = None,
    network: Apply | None = None,
) -> tuple[int, Callable[[Vector], Vector]]:
    """How many parameters there are, and v -> H v, the mean over the data."""
    theta, back = flatten(params)

    def hessian(v: Vector, batch: Any) -> Vector:
        slope = jax.grad(lambda t: loss(back(t), batch))
        return jax.jvp(slope, (theta,), (v,))[1]

    def gauss_newton(v: Vector, batch: Any) -> Vector:
        def f(t: Vector) -> Any:
            return outputs(network, back(t), batch)  # pyright: ignore[reportArgumentType]

        out, pull = jax.vjp(f, theta)
        push = jax.jvp(f, (theta,), (v,))[1]
        return pull(jax.jvp(jax.grad(lambda y: loss(y, batch)), (out,), (push,))[1])[0]

    batch_product = hessian if network is None else gauss_newton
    return theta.size, lambda v: mean(lambda batch: batch_product(v, batch), data, batch_size)


@partial(jax.jit, static_argnames=("loss", "top", "steps", "probes", "network", "batch_size"))
def _spectrum(
    loss: Callable[..., Array], params: PyTree, data: PyTree, key: Array, top: int, steps: int,
    probes: int, network: Apply | None, batch_size: int | None,
) -> Spectrum:  # fmt: skip
    size, multiply = product(loss, params, data, batch_size, network)
    dtype = flatten(params)[0].dtype

    def probe(key: Array) -> tuple[Array, ...]:
        begin, fresh = jax.random.split(key)
        start = jax.random.rademacher(begin, (size,), dtype) / jnp.sqrt(size).astype(dtype)
        alpha, beta = lanczos(multiply, start, steps, fresh)
        nodes, first, residuals = ritz(alpha, beta)
        return nodes, first**2, residuals, size * alpha[0]

    nodes, weights, residuals, traces = lax.map(probe, jax.random.split(key, probes))

    def extreme(nodes: Array, residuals: Array, pick: Callable[..., Array]) -> tuple[Array, Array]:
        best = pick(nodes, 0)  # Ritz values stay within, so that the outermost is the nearest
        outermost = (jnp.take_along_axis(x, best[None], 0)[0] for x in (nodes, residuals))
        return tuple(outermost)  # pyright: ignore[reportReturnType]

    up, down = slice(None, -top - 1, -1), slice(0, top)
    return Spectrum(
        *extreme(nodes[:, up], residuals[:, up], jnp.argmax),
        *extreme(nodes[:, down], residuals[:, down], jnp.argmin),
        estimate(traces),
        nodes,
        weights,
    )


def lanczos(
    multiply: Callable[[Vector], Vector], start: Vector, steps: int, key: Array
) -> tuple[Float[Array, "step"], Float[Array, "step"]]:
    """Diagonal and off-diagonal of T = V^T A V, for a symmetric A and V from a unit vector; the
    last off-diagonal is what a further step would have.

    Vectors are orthogonalised against all before, again where that cancels ("twice is enough",
    Parlett 1980). Where the Krylov space is exhausted the iteration goes on from a random vector
    outside it, by which T falls into blocks.
    """
    eps = jnp.finfo(start.dtype).eps

    def project(V: Array, w: Vector) -> Vector:
        return w - dot(V.T, dot(V, w))

    def orthogonal(V: Array, w: Vector) -> Vector:
        once = project(V, w)
        cancelled = jnp.linalg.norm(once) < 0.7 * jnp.linalg.norm(w)
        return lax.cond(cancelled, lambda x: project(V, project(V, x)), lambda x: x, once)

    def step(
        carry: tuple[Array, Vector, Array, Array], j: Array
    ) -> tuple[Any, tuple[Array, Array]]:
        V, v, before, scale = carry
        V = V.at[j].set(v)
        w = multiply(v)
        alpha = dot(v, w)
        w = w - alpha * v - before * jnp.where(j > 0, V[j - 1], 0)
        w = orthogonal(V, w)
        beta = jnp.linalg.norm(w)
        scale = jnp.maximum(scale, jnp.abs(alpha) + beta)
        # what is left of a product is its rounding
        exhausted = beta <= 10 * eps * jnp.sqrt(v.size) * scale

        def fresh(_: Vector) -> Vector:
            r = jax.random.normal(jax.random.fold_in(key, j), v.shape, v.dtype)
            return orthogonal(V, r / jnp.linalg.norm(r))

        w = lax.cond(exhausted, fresh, lambda w: w, w)
        norm = jnp.linalg.norm(w)
        beta = jnp.where(exhausted, 0, beta)
        return (V, w / jnp.where(norm == 0, 1, norm), beta, scale), (alpha, beta)

    zero = jnp.zeros((), start.dtype)
    V = jnp.zeros((steps, start.size), start.dtype)
    _, diagonals = lax.scan(step, (V, start, zero, zero), jnp.arange(steps))
    return diagonals


def ritz(
    alpha: Float[Array, "step"], beta: Float[Array, "step"]
) -> tuple[Float[Array, "step"], Float[Array, "step"], Float[Array, "step"]]:
    """The eigenvalues of T, ascending, the first entries of their vectors, and how far off at most
    an eigenvalue of A is from each, |beta_m s_mi|."""
    T = jnp.diag(alpha) + jnp.diag(beta[:-1], 1) + jnp.diag(beta[:-1], -1)
    nodes, S = jnp.linalg.eigh(T)
    return nodes, S[0], jnp.abs(beta[-1] * S[-1])
