"""The Hessian of a loss from Hessian-vector products: eigenvalues, trace and spectral density.

The method is stochastic Lanczos quadrature (Ubaru, Chen and Saad 2017; Ghorbani, Krishnan and Xiao
2019) with full reorthogonalisation. A product is a forward derivative of the gradient (Pearlmutter
1994). All floating parameters form one vector, in float32 or wider.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax import linalg
from sail_jax.checks import callable_with, one_key
from sail_jax.merging.arithmetic import norm
from sail_jax.probe.combinations import numbers, stack
from sail_jax.probe.connectivity import check_loss
from sail_jax.probe.estimates import Estimate, check_finite, check_size, estimate, examples, mean
from sail_jax.probe.networks import Apply, outputs

Vector = Float[Array, "p"]
dot = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class Spectrum(NamedTuple):
    """Estimates of the eigenvalues of a symmetric matrix, such as a Hessian.

    The matrix has an eigenvalue within the residual of each estimate (the bound |beta_m s_mi| of
    Lanczos' iteration). The r-th estimate never lies beyond the r-th eigenvalue. The larger of
    |largest[0]| and |smallest[0]| estimates the spectral norm.

    Attributes:
      largest: Estimates of the largest eigenvalues, descending, `(top,)`.
      largest_residual: Their residuals, `(top,)`.
      smallest: Estimates of the smallest eigenvalues, ascending, `(top,)`.
      smallest_residual: Their residuals, `(top,)`.
      trace: Hutchinson's estimate of the trace, its standard error over probes.
      nodes: Nodes of Gauss quadrature of the density of eigenvalues, `(probe, step)`.
      weights: Weights of that quadrature, `(probe, step)`, with sum 1 per probe.
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
    """Estimates the spectrum of the Hessian of a loss.

    With a `network` it is the spectrum of the Gauss-Newton matrix of loss(network(params, batch),
    batch): the Hessian in the outputs, between the Jacobians of the network. If the Hessian in the
    outputs is positive semi-definite, so is this matrix.

    It requires steps * probes products with the matrix, each about as expensive as two gradients
    over all data, and memory for `steps` vectors of the size of the parameters and for one product.

    Args:
      loss: A function `(params, batch) -> scalar`, the mean over the examples of a batch; with a
        `network`, `(outputs, batch) -> scalar`.
      params: The parameters at which the matrix is evaluated.
      data: A tree of arrays `(n, ...)`.
      key: A PRNG key for the probe vectors.
      top: The number of eigenvalues to estimate at each end.
      steps: The number of steps of Lanczos' iteration, at most the number of parameters. With that
        number, the results are exact up to rounding.
      probes: The number of Rademacher vectors to average over, at least 2 for standard errors.
      network: A function `(params, batch) -> outputs`.
      batch_size: The number of examples in memory at a time. None: all.

    Returns:
      The extreme eigenvalues, the trace and the quadrature of the density.

    Raises:
      ValueError: For invalid data or sizes, fewer than 2 probes, parameters without
        floating leaves, and non-finite values.

    References:
      Ubaru, Chen and Saad, Fast estimation of tr(f(A)) via stochastic Lanczos quadrature, 2017.
      Ghorbani, Krishnan and Xiao, An Investigation into Neural Net Optimization via Hessian
      Eigenvalue Density, 2019 (arXiv 1901.10159).

    >>> d = jnp.array([3.0, 1.0, -2.0])
    >>> found = hessian_spectrum(
    ...     lambda w, x: jnp.mean(x) * jnp.sum(d * w**2) / 2, jnp.zeros(3), jnp.ones(1),
    ...     jax.random.key(0), top=2)
    >>> found.largest.round(4).tolist(), found.trace.value.round(4).item()
    ([3.0, 1.0], 2.0)
    """
    one_key(key)
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
    if network is not None:
        callable_with("network", network, "params", "batch")
    at = params if network is None else jax.eval_shape(network, params, data)
    check_loss(loss, at, data)
    spectrum = _spectrum(
        loss, params, data, key, top, min(steps, size), probes, network, batch_size
    )
    check_finite("loss: its second derivatives", spectrum.nodes)
    return spectrum


def spectral_density(
    spectrum: Spectrum, grid: Float[ArrayLike, "point"], width: ArrayLike
) -> Estimate:
    """Estimates the density of eigenvalues, smoothed by a Gaussian.

    It integrates to 1 over the real line.

    Args:
      spectrum: The output of `hessian_spectrum`.
      grid: The points at which to evaluate the density, `(point,)`.
      width: The standard deviation of the Gaussian, positive.

    Returns:
      The density at the points of the grid, `(point,)`, with standard errors over probes.

    Raises:
      ValueError: If `grid` is not a vector of finite numbers, or `width` is not a positive number.
    """
    t, width = numbers("grid", grid), jnp.asarray(width, jnp.result_type(float))
    if width.shape or not (width > 0):
        raise ValueError(f"width: expected a number > 0, got {width}")
    kernel = jax.scipy.stats.norm.pdf(t[:, None, None], spectrum.nodes, width)
    return estimate(jnp.sum(kernel * spectrum.weights, -1).T)


def flatten(params: PyTree) -> tuple[Vector, Callable[[Vector], PyTree]]:
    """Flattens the floating leaves of parameters into one vector.

    Returns the vector `(p,)`, in float32 or wider, and the function that converts such a vector to
    parameters. These keep the wider dtype, and the non-floating leaves. Raises a ValueError if
    there are no floating leaves with entries.
    """
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
    """Makes the function that multiplies vectors by the Hessian, or by the Gauss-Newton matrix.

    Args:
      loss: As in `hessian_spectrum`.
      params: As in `hessian_spectrum`.
      data: As in `hessian_spectrum`.
      batch_size: As in `hessian_spectrum`.
      network: As in `hessian_spectrum`.

    Returns:
      The number of parameters p, and the function v -> H v of vectors `(p,)`, where H is the mean
      over the data.
    """
    theta, back = flatten(params)

    def hessian(v: Vector, batch: PyTree) -> Vector:
        slope = jax.grad(lambda t: loss(back(t), batch))
        # Forward over reverse: one pass, with the memory of the gradient and its tangent.
        return jax.jvp(slope, (theta,), (v,))[1]

    def gauss_newton(v: Vector, batch: PyTree) -> Vector:
        def f(t: Vector) -> Any:
            return outputs(network, back(t), batch)  # pyright: ignore[reportArgumentType]

        out, pull = jax.vjp(f, theta)
        push = jax.jvp(f, (theta,), (v,))[1]
        # J^T H_out J v, from the right: push v through the network, multiply by the Hessian in the
        # outputs, and pull back.
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
        # The vector has length one, so alpha[0] times the size is Hutchinson's estimate of the
        # trace. Entries of +-1 have less variance than Gaussian entries, since the diagonal terms
        # are exact.
        start = jax.random.rademacher(begin, (size,), dtype) / jnp.sqrt(size).astype(dtype)
        alpha, beta = lanczos(multiply, start, steps, fresh)
        nodes, first, residuals = ritz(alpha, beta)
        return nodes, first**2, residuals, size * alpha[0]

    # The probes run one after another, because each requires `steps` vectors of the size of the
    # parameters.
    nodes, weights, residuals, traces = lax.map(probe, jax.random.split(key, probes))

    def extreme(nodes: Array, residuals: Array, pick: Callable[..., Array]) -> tuple[Array, Array]:
        # Ritz values stay within the spectrum, so the outermost value over probes is the nearest.
        best = pick(nodes, 0)
        outermost = (jnp.take_along_axis(x, best[None], 0)[0] for x in (nodes, residuals))
        return tuple(outermost)  # pyright: ignore[reportReturnType]

    # Ritz values ascend: the largest come last, and are taken in descending order.
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
    """Reduces a symmetric matrix A to a tridiagonal one, T = V^T A V.

    Every new vector is made orthogonal to all earlier ones, a second and third time if much of it
    cancels ("twice is enough", Parlett 1980). When the Krylov space is exhausted, the iteration
    continues from a random vector outside it, and T splits into blocks.

    Args:
      multiply: The function v -> A v of vectors `(p,)`.
      start: The first column of V, a unit vector `(p,)`.
      steps: The size of T.
      key: A PRNG key for vectors outside exhausted Krylov spaces.

    Returns:
      The diagonal of T, `(steps,)`, and its off-diagonal, `(steps,)`. The last entry of the latter
      is for a further step.

    References:
      Parlett, The Symmetric Eigenvalue Problem, 1980.
    """
    eps = jnp.finfo(start.dtype).eps

    def project(V: Array, w: Vector) -> Vector:
        return w - dot(V.T, dot(V, w))

    def orthogonal(V: Array, w: Vector) -> Vector:
        once = project(V, w)
        cancelled = norm(once) < 0.7 * norm(w)
        return lax.cond(cancelled, lambda x: project(V, project(V, x)), lambda x: x, once)

    def step(
        carry: tuple[Array, Vector, Array, Array], j: Array
    ) -> tuple[Any, tuple[Array, Array]]:
        V, v, before, scale = carry
        # Invariant: the first j + 1 rows of V are orthonormal. The others are 0 and change no
        # projection.
        V = V.at[j].set(v)
        w = multiply(v)
        alpha = dot(v, w)
        w = w - alpha * v - before * jnp.where(j > 0, V[j - 1], 0)
        # In exact arithmetic w is orthogonal to the earlier vectors. Without this step, rounding
        # reintroduces them, and known eigenvalues appear again as copies.
        w = orthogonal(V, w)
        beta = norm(w)
        scale = jnp.maximum(scale, jnp.abs(alpha) + beta)
        # The product is only rounding: the Krylov space has no further direction.
        exhausted = beta <= 10 * eps * jnp.sqrt(v.size) * scale

        def fresh(_: Vector) -> Vector:
            r = jax.random.normal(jax.random.fold_in(key, j), v.shape, v.dtype)
            return orthogonal(V, r / norm(r))

        w = lax.cond(exhausted, fresh, lambda w: w, w)
        length = norm(w)
        beta = jnp.where(exhausted, 0, beta)
        return (V, w / jnp.where(length == 0, 1, length), beta, scale), (alpha, beta)

    zero = jnp.zeros((), start.dtype)
    V = jnp.zeros((steps, start.size), start.dtype)
    _, diagonals = lax.scan(step, (V, start, zero, zero), jnp.arange(steps))
    return diagonals


def ritz(
    alpha: Float[Array, "step"], beta: Float[Array, "step"]
) -> tuple[Float[Array, "step"], Float[Array, "step"], Float[Array, "step"]]:
    """Computes the eigenvalues of the tridiagonal matrix T, and bounds for A's eigenvalues.

    Args:
      alpha: The diagonal of T, `(step,)`.
      beta: The off-diagonal, `(step,)`, from `lanczos`.

    Returns:
      The eigenvalues, ascending; the first entries of their eigenvectors; and a bound on the
      distance from each to an eigenvalue of A, |beta_m s_mi|. All are `(step,)`.
    """
    T = jnp.diag(alpha) + jnp.diag(beta[:-1], 1) + jnp.diag(beta[:-1], -1)
    nodes, S = linalg.eigh(T)
    # |A y - node y| = beta_m |last entry of the eigenvector of T| (Parlett), with y = V s.
    return nodes, S[0], jnp.abs(beta[-1] * S[-1])
