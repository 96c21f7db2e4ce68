"""Activation matching: pairs units that respond alike to the same inputs.

Git Re-Basin (Ainsworth et al. 2023, Sec. 3.1) maximises the mean product of activations, Li et al.
(2016) their correlation. Each space is matched independently, so no sweeps over the spaces are
needed, unlike in `sail_jax.align.matching`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from sail_jax.align.assignment import Assign, hungarian
from sail_jax.align.matching import Families, families
from sail_jax.align.solvers import procrustes, scaled_by, signed_by
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, select
from sail_jax.basis.spaces import Spec
from sail_jax.checks import as_array, concrete, one_of


class Moments(NamedTuple):
    """The means, variances and covariances of two sets of units over the same samples.

    Variances and covariances are central moments, divided by `count`.

    Attributes:
      count: The number of samples, as a float.
      mean_x: The means of the units of x, `(m,)`.
      mean_y: The means of the units of y, `(n,)`.
      var_x: The variances of the units of x, `(m,)`.
      var_y: The variances of the units of y, `(n,)`.
      cov: The covariance of each unit of x with each unit of y, `(m, n)`.
    """

    count: Float[Array, ""]
    mean_x: Float[Array, "m"]
    mean_y: Float[Array, "n"]
    var_x: Float[Array, "m"]
    var_y: Float[Array, "n"]
    cov: Float[Array, "m n"]


def moments(x: Float[Array, "... m"], y: Float[Array, "... n"]) -> Moments:
    """Computes the moments of one batch of activations.

    Args:
      x: Activations of one network, `(..., m)`. All leading axes count as samples.
      y: Activations of the other network on the same samples, `(..., n)`.

    Returns:
      The moments, in float32 or the wider dtype of the activations.

    References:
      Neely, Comparison of several algorithms for computation of means, standard deviations and
      correlation coefficients, 1966: the two-pass mean.

    >>> x = jnp.array([[0.0], [2.0]])
    >>> m = moments(x, 3 * x)
    >>> m.mean_y.tolist(), m.var_x.tolist(), m.cov.tolist()
    ([3.0], [1.0], [[3.0]])
    """
    x, y = (v.reshape(-1, v.shape[-1]) for v in (x, y))
    x, y = (v.astype(jnp.promote_types(v.dtype, jnp.float32)) for v in (x, y))
    means = x.mean(0), y.mean(0)
    x, y = x - means[0], y - means[1]
    # The means are rounded. A second pass removes the effect of this rounding from the differences.
    shift = x.mean(0), y.mean(0)
    x, y = x - shift[0], y - shift[1]
    count = jnp.asarray(len(x), x.dtype)
    cov = jnp.matmul(x.T, y, precision=jax.lax.Precision.HIGHEST) / count
    mean_x, mean_y = means[0] + shift[0], means[1] + shift[1]
    return Moments(count, mean_x, mean_y, (x**2).mean(0), (y**2).mean(0), cov)


def pool(one: Moments, two: Moments) -> Moments:
    """Computes the moments of two samples together from the moments of each.

    With p = n_2 / (n_1 + n_2) and d = mean_2 - mean_1,

        mean = mean_1 + p d
        var = (1 - p) var_1 + p var_2 + p (1 - p) d^2

    and likewise for covariances. The operation is associative up to rounding.

    Args:
      one: The moments of the first sample.
      two: The moments of the second sample, of the same units.

    Returns:
      The moments of both samples together.

    References:
      Chan, Golub and LeVeque, Algorithms for computing the sample variance, 1983.

    >>> parts = [moments(jnp.array([[a]]), jnp.array([[a]])) for a in (0.0, 2.0)]
    >>> pool(*parts).var_x.tolist()
    [1.0]
    """
    count = one.count + two.count
    part = two.count / count
    dx, dy = two.mean_x - one.mean_x, two.mean_y - one.mean_y
    # The contribution of the difference of the means, up to a factor of (1 - part).
    spread = Moments(count, dx, dy, part * dx**2, part * dy**2, part * dx[:, None] * dy)

    def mix(a: Array, b: Array, between: Array) -> Array:
        return a + part * (b - a) + (1 - part) * between

    return Moments(
        count,
        one.mean_x + part * dx,
        one.mean_y + part * dy,
        mix(one.var_x, two.var_x, spread.var_x),
        mix(one.var_y, two.var_y, spread.var_y),
        mix(one.cov, two.cov, spread.cov),
    )


def stream(
    x: Callable[[Any], Mapping[str, Array]],
    y: Callable[[Any], Mapping[str, Array]],
    batches: Iterable[Any],
) -> dict[str, Moments]:
    """Accumulates the moments of each space over batches, with one batch in memory at a time.

    Args:
      x: A function of a batch that returns `{space: activations (..., m)}` of one network.
      y: The same for the other network, with the same spaces and leading axes.
      batches: The batches, in one pass.

    Returns:
      The moments of each space over all batches.

    Raises:
      ValueError: If there are no batches or no activations, if only one network has activations of
        a space, or if the activations of a space have no leading axes or different ones.

    >>> batches = [jnp.ones((2, 1)), jnp.zeros((2, 1))]
    >>> total = stream(lambda b: {"h": b}, lambda b: {"h": -b}, batches)
    >>> total["h"].count.item(), total["h"].cov.tolist()
    (4.0, [[-0.25]])
    """
    total: dict[str, Moments] = {}
    for batch in batches:
        total = _add(total, x(batch), y(batch))
    if not total:
        raise ValueError("expected batches with the activations of at least one space, got none")
    return total


def activation_matching(
    reference: PyTree,
    params: PyTree,
    spec: Spec,
    *,
    activations: Callable[[PyTree, Any], Mapping[str, Array]] | None = None,
    batches: Iterable[Any] | None = None,
    how: Literal["correlation", "covariance"] = "correlation",
    family: Families = None,
    assignment: Assign = hungarian,
) -> dict[str, SpaceMap]:
    """Finds the maps under which the activations of one network are most similar to another's.

    There are two ways to call this function. Either `reference` and `params` are the activations of
    the two networks on the same inputs. Or they are parameters, and `activations` and `batches` are
    given. Spaces without activations get no map. If a space occurs in several places (a residual
    stream), stack its activations as samples. For a space of heads, give one number per head.

    With the covariance C, the standard deviations s_x, s_y and R = C / (s_x s_y^T), the criteria of
    the families are:

        PERMUTATION         max over index of sum_i B[i, index[i]], B = R or C, see `how`
        SIGNED_PERMUTATION  the same with |B|, then the signs of B
        POSITIVE_MONOMIAL   the same with R, then the scales s_x[i] / s_y[index[i]]
        ORTHOGONAL          max over Q of sum(Q * C), the Procrustes problem

    A constant unit has correlation 0 with every unit.

    Args:
      reference: `{space: (..., size)}`, or the parameters of the network that stays.
      params: The same for the network that is moved.
      spec: The spec of the parameters. It defines the sizes and nonlinearities of the spaces.
      activations: A function `(params, batch) -> {space: (..., size)}`; None if `reference` and
        `params` are activations.
      batches: Inputs for `activations`, used in one pass. Give both arguments or neither.
      how: "correlation", which is independent of the scale and offset of a unit, or "covariance".
        It matters for permutations with or without signs.
      family: One family for all spaces, or families by patterns of space names. The default is
        PERMUTATION. LINEAR has no criterion here.
      assignment: The solver of the assignment problem, from benefits `(n, n)` to an index `(n,)`.

    Returns:
      One map of float32 entries for each space with activations, for `change_basis(params, spec,
      maps)`.

    Raises:
      ValueError: For an unknown `how`, only one of `activations` and `batches`, activations that
        have the wrong size or different shapes or are traced or not finite, missing batches, or a
        family that has no criterion or that the nonlinearity of a space does not allow. Messages
        contain the name of the space.

    References:
      Ainsworth et al., Git Re-Basin, 2023 (arXiv 2209.04836), Sec. 3.1; Li et al., Convergent
      Learning, 2016 (arXiv 1511.07543).

    >>> from sail_jax.basis.spaces import spec
    >>> net = {"in": jnp.ones((1, 2)), "out": jnp.ones((2, 1))}
    >>> s = spec(net, {"in": "x* h", "out": "h* y"}, spaces={"h": "relu", "{x,y}": "outer"})
    >>> a = jnp.array([[1.0, 0.0], [0.0, 1.0], [2.0, 0.5]])
    >>> activation_matching({"h": a}, {"h": a[:, ::-1]}, s)["h"].index.tolist()
    [1, 0]
    """
    one_of("how", how, ("correlation", "covariance"))
    if (activations is None) != (batches is None):
        raise ValueError("give both activations (a function) and batches, or neither")
    if activations is None:
        total = _add({}, reference, params)
    else:
        f, inputs = activations, batches if batches is not None else ()
        total = stream(lambda b: f(reference, b), lambda b: f(params, b), inputs)
    chosen = families(spec, family, list(total))
    maps = {}
    for name, kind in chosen.items():
        size = spec.space(name).size
        if total[name].cov.shape != (size, size):
            raise ValueError(
                f"space {name!r} has {size} units, but its activations have {total[name].cov.shape}"
            )
        maps[name] = _match(name, total[name], kind, how, assignment)
    return maps


def _match(name: str, m: Moments, family: Family, how: str, assign: Assign) -> SpaceMap:
    """Finds the best map of one space from the moments of its activations in both networks."""
    host = [concrete(x) for x in m]
    if any(x is None for x in host):
        raise ValueError(f"the activations of {name!r} are traced: match them outside jit")
    if not all(np.isfinite(x).all() for x in host if x is not None):
        raise ValueError(f"the activations of {name!r} are not finite")
    cov, sx, sy = (np.asarray(x, np.float64) for x in (m.cov, m.var_x**0.5, m.var_y**0.5))
    n = len(cov)
    if family == Family.ORTHOGONAL:
        return procrustes(cov)
    scale = np.outer(sx, sy)
    # The correlation of a constant unit is 0 / 0; it counts as 0.
    correlation = np.divide(cov, scale, out=np.zeros_like(cov), where=scale > 0)
    benefit = correlation if how == "correlation" else cov
    if family == Family.SIGNED_PERMUTATION:
        return signed_by(benefit, 0.0, assign)
    if family == Family.POSITIVE_MONOMIAL:
        # A positive scale leaves correlations unchanged, so scales are found after the pairs.
        index = np.asarray(assign(correlation))
        # A unit that is constant in one of the networks keeps its own scale.
        live = (sx > 0) & (sy[index] > 0)
        return scaled_by(index, np.divide(sx, sy[index], out=np.ones(n), where=live))
    if family == Family.PERMUTATION:
        return select(np.asarray(assign(benefit)), n, family=family)
    raise ValueError(f"activations cannot be matched by {family!s} maps (space {name!r})")


def _add(
    total: dict[str, Moments], x: Mapping[str, Array], y: Mapping[str, Array]
) -> dict[str, Moments]:
    """Pools the moments so far with those of one more batch."""
    if x.keys() != y.keys():
        raise ValueError(f"only one network has activations of {sorted(x.keys() ^ y.keys())}")
    for name in x:
        if jnp.shape(x[name])[:-1] != jnp.shape(y[name])[:-1] or jnp.ndim(x[name]) < 2:
            raise ValueError(
                f"activations of {name!r} must be [..., size] on the same inputs, got "
                f"{jnp.shape(x[name])} and {jnp.shape(y[name])}"
            )
    new = {name: _moments(as_array(x[name]), as_array(y[name])) for name in x}
    return {k: _pool(total[k], v) if k in total else v for k, v in new.items()}


# Compiled once for each shape, however many batches there are.
_moments, _pool = jax.jit(moments), jax.jit(pool)
