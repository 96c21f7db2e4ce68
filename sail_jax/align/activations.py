"""Activation matching: units that respond alike to the same inputs are one unit.

Git Re-Basin (Ainsworth et al. 2023, section 3.1) maximises the mean product of activations, Li et
al. 2016 their correlation. Each space is matched by itself, so that no sweeps are needed.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from sail_jax.align.assignment import hungarian
from sail_jax.align.matching import Families, families
from sail_jax.align.problem import Assign
from sail_jax.align.solvers import procrustes
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, select
from sail_jax.basis.spaces import Spec
from sail_jax.checks import as_array, concrete

__all__ = ["Moments", "activation_matching", "moments", "pool", "stream"]


class Moments(NamedTuple):
    """Joint moments of units x [.., m] and y [.., n] over `count` samples, central, per sample."""

    count: Float[Array, ""]
    mean_x: Float[Array, "m"]
    mean_y: Float[Array, "n"]
    var_x: Float[Array, "m"]
    var_y: Float[Array, "n"]
    cov: Float[Array, "m n"]


def moments(x: Float[Array, "... m"], y: Float[Array, "... n"]) -> Moments:
    """The moments of one batch, in float32 at least; all leading axes are samples."""
    x, y = (v.reshape(-1, v.shape[-1]) for v in (x, y))
    x, y = (v.astype(jnp.promote_types(v.dtype, jnp.float32)) for v in (x, y))
    means = x.mean(0), y.mean(0)
    x, y = x - means[0], y - means[1]
    # the mean of rounded differences: second pass of a two-pass mean (Neely 1966)
    shift = x.mean(0), y.mean(0)
    x, y = x - shift[0], y - shift[1]
    count = jnp.asarray(len(x), x.dtype)
    cov = jnp.matmul(x.T, y, precision=jax.lax.Precision.HIGHEST) / count
    mean_x, mean_y = means[0] + shift[0], means[1] + shift[1]
    return Moments(count, mean_x, mean_y, (x**2).mean(0), (y**2).mean(0), cov)


def pool(one: Moments, two: Moments) -> Moments:
    """The moments of both samples together (Chan, Golub & LeVeque 1983); associative."""
    count = one.count + two.count
    part = two.count / count
    dx, dy = two.mean_x - one.mean_x, two.mean_y - one.mean_y
    spread = Moments(
        count, dx, dy, part * dx**2, part * dy**2, part * dx[:, None] * dy
    )  # times (1 - part), of what lies between the two means

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
    """The moments, by space, of `x(batch)` and `y(batch)` over batches; memory of one batch."""
    total: dict[str, Moments] = {}
    for batch in batches:
        total = _add(total, x(batch), y(batch))
    if not total:
        raise ValueError("there are no batches, or no activations of any space")
    return total


def activation_matching(
    reference: Any,
    params: Any,
    spec: Spec,
    *,
    activations: Callable[[PyTree, Any], Mapping[str, Array]] | None = None,
    batches: Iterable[Any] | None = None,
    how: Literal["correlation", "covariance"] = "correlation",
    family: Families = None,
    assignment: Assign = hungarian,
) -> dict[str, SpaceMap]:
    """The maps under which the activations of `params` are most like those of `reference`.

    Either `reference` and `params` are the activations of the two networks on the same inputs,
    `{space: [..., size]}`; or they are parameters, `activations(params, batch)` gives such a
    dictionary, and `batches` are gone through once. Spaces without activations get no map. For
    one that lies in several places (a residual stream) give them together, stacked as samples;
    for heads, what stands for each head.

    how: match by "correlation", which no unit's scale or offset changes, or by "covariance".
    family: as in `match_weights`, without LINEAR; ORTHOGONAL is Procrustes on the covariance,
    POSITIVE_MONOMIAL matches the units' standard deviations. Units that do not vary correlate
    with none.

    Raises ValueError, naming the space, for sizes that are not the spec's, activations that
    differ in shape, are traced or are not finite, and for families as in `match_weights`.

    >>> from sail_jax.basis.spaces import spec
    >>> net = {"in": jnp.ones((1, 2)), "out": jnp.ones((2, 1))}
    >>> s = spec(net, {"in": "x* h", "out": "h* y"}, spaces={"h": "relu", "{x,y}": "outer"})
    >>> a = jnp.array([[1.0, 0.0], [0.0, 1.0], [2.0, 0.5]])
    >>> activation_matching({"h": a}, {"h": a[:, ::-1]}, s)["h"].index.tolist()
    [1, 0]
    """
    if how not in ("correlation", "covariance"):
        raise ValueError(f"how must be 'correlation' or 'covariance', got {how!r}")
    if (activations is None) != (batches is None):
        raise ValueError("activations (a function) and batches are given together or not at all")
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
                f"space {name!r} has {size} units, its activations {total[name].cov.shape}"
            )
        maps[name] = _match(name, total[name], kind, how, assignment)
    return maps


def _match(name: str, m: Moments, family: Family, how: str, assign: Assign) -> SpaceMap:
    host = [concrete(x) for x in m]
    if any(x is None for x in host):
        raise ValueError(f"the activations of {name!r} are traced: match outside jit")
    if not all(np.isfinite(x).all() for x in host if x is not None):
        raise ValueError(f"the activations of {name!r} are not finite")
    cov, sx, sy = (np.asarray(x, np.float64) for x in (m.cov, m.var_x**0.5, m.var_y**0.5))
    n = len(cov)
    if family == Family.ORTHOGONAL:
        Q = procrustes(cov)
        return SpaceMap(jnp.asarray(Q, jnp.float32), jnp.asarray(Q.T, jnp.float32), family)
    scale = np.outer(sx, sy)
    correlation = np.divide(cov, scale, out=np.zeros_like(cov), where=scale > 0)
    benefit = correlation if how == "correlation" else cov
    if family == Family.SIGNED_PERMUTATION:
        index = np.asarray(assign(np.abs(benefit)))
        signs = jnp.asarray(np.where(benefit[np.arange(n), index] < 0, -1.0, 1.0), jnp.float32)
        return select(index, n, write=signs, read=signs, family=family)
    if family == Family.POSITIVE_MONOMIAL:
        index = np.asarray(assign(correlation))
        live = (sx > 0) & (sy[index] > 0)
        s = np.divide(sx, sy[index], out=np.ones(n), where=live)
        s = jnp.asarray(s, jnp.float32)
        return select(index, n, write=s, read=1 / s, family=family | Family.INVERTIBLE)
    if family == Family.PERMUTATION:
        return select(np.asarray(assign(benefit)), n, family=family)
    raise ValueError(f"no matching of the activations of {name!r} over {family!s} maps")


def _add(
    total: dict[str, Moments], x: Mapping[str, Array], y: Mapping[str, Array]
) -> dict[str, Moments]:
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


_moments, _pool = jax.jit(moments), jax.jit(pool)
