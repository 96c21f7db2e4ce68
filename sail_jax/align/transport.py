"""Soft correspondences between networks of different width and depth, by optimal transport.

`transport_units` couples the units of two layers of any widths that respond alike to the same
inputs. `transport_layers` couples the layers of two networks of any depths, by the cost of coupling
their units. `barycentric` converts a coupling to a map, for `change_basis`. A correspondence of
layers can be the `matrix` of `deepen`, and its logarithm the logits of `mix_layers`.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logsumexp
from jaxtyping import Array, ArrayLike, Float

from sail_jax.align.activations import moments
from sail_jax.basis.maps import SpaceMap
from sail_jax.checks import as_array, concrete


class LayerTransport(NamedTuple):
    """Couplings of the layers of two networks, and of the units of each pair of layers.

    Attributes:
      layers: The share of each old layer in each new one, `(new layers, old layers)`. Rows sum to
        one.
      costs: The cost of coupling the units of each pair of layers, in the same shape.
      couplings: `couplings[k][i]` couples the units of new layer k with the units of old layer i,
        `(new units, old units)`.
    """

    layers: Float[Array, "new old"]
    costs: Float[Array, "new old"]
    couplings: tuple[tuple[Float[Array, "n m"], ...], ...]


def sinkhorn(
    cost: Float[ArrayLike, "n m"],
    rows: Float[ArrayLike, "n"] | None = None,
    columns: Float[ArrayLike, "m"] | None = None,
    *,
    entropy: float = 0.01,
    balance: float = np.inf,
    steps: int = 300,
) -> Float[Array, "n m"]:
    """Finds a coupling of rows and columns with low cost: entropic optimal transport.

        min over P >= 0 with P 1 = rows of
          sum(P * cost) - entropy * H(P) + balance * KL(P^T 1 | columns)

    The algorithm is Sinkhorn's, in the log domain. During the first half of the steps the entropy
    falls to the requested value. It runs inside `jit`. With an infinite `balance` also P^T 1 =
    columns. The remaining violation of both conditions is corrected as in Altschuler et al. After
    convergence, the cost exceeds the optimum by at most `entropy` times the smaller entropy of the
    two marginals. A small entropy requires many steps if the costs of several couplings are close
    to the optimum.

    Args:
      cost: The cost of coupling row i with column j, `(n, m)`, finite.
      rows: The mass of each row, positive, with sum one; uniform by default.
      columns: The same for the columns.
      entropy: The weight of the entropy, above 0, in the units of `cost`. float32 resolves values
        down to about 1e-4 times the range of `cost`.
      balance: The weight of the columns' masses, 0 or more. With 0 each row goes to its cheapest
        columns.
      steps: The number of steps, 1 or more.

    Returns:
      The coupling P, `(n, m)`.

    Raises:
      ValueError: If `cost` is not a finite matrix, the masses have the wrong shape, are not
        positive or do not sum to one, or `entropy`, `balance` or `steps` is out of range. Traced
        values are not checked.

    References:
      Cuturi, Sinkhorn Distances, 2013 (arXiv 1306.0895).
      Chizat et al., Scaling Algorithms for Unbalanced Transport, 2018 (arXiv 1607.05816).
      Altschuler et al., Near-linear time approximation for optimal transport, 2017 (arXiv
      1705.09634), Alg. 2.

    >>> sinkhorn(jnp.array([[0.0, 1.0], [1.0, 0.0]])).round(3).tolist()
    [[0.5, 0.0], [0.0, 0.5]]
    >>> sinkhorn(jnp.array([[0.0, 1.0], [0.0, 1.0]]), balance=0).round(3).tolist()
    [[0.5, 0.0], [0.5, 0.0]]
    """
    known = concrete(entropy), concrete(balance)
    if known[0] is not None and not 0 < known[0] < np.inf:
        raise ValueError(f"entropy must be finite and above 0, got {entropy}")
    if known[1] is not None and not known[1] >= 0:
        raise ValueError(f"balance must be 0 or more, got {balance}")
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
    C = jnp.asarray(cost, float)
    values = concrete(C)
    if C.ndim != 2 or not C.size or (values is not None and not np.isfinite(values).all()):
        raise ValueError(f"cost must be a finite matrix [rows, columns], got shape {C.shape}")
    masses = [
        _mass(name, given, size)
        for name, given, size in zip(("rows", "columns"), (rows, columns), C.shape, strict=True)
    ]
    return _sinkhorn(C, *masses, entropy, balance, steps)


def transport_units(
    old: Float[ArrayLike, "... m"],
    new: Float[ArrayLike, "... n"],
    *,
    entropy: float = 0.01,
    balance: float = np.inf,
    steps: int = 300,
) -> tuple[Float[Array, "n m"], Float[Array, ""]]:
    """Couples the units of two layers of any widths by their responses to the same inputs.

    Coupling unit j of the new layer with unit i of the old one costs 1 - the correlation of their
    activations. A constant unit has correlation 0 with every unit. If each old unit has the same
    number of copies in the new layer, in any order, the coupling approaches a coupling of copies as
    `entropy` falls. Unequal numbers of copies need a smaller `balance`.

    Args:
      old: Activations of one layer, `(..., m)`. All leading axes count as samples.
      new: Activations of the other layer on the same samples, `(..., n)`.
      entropy: See `sinkhorn`.
      balance: The weight of the old units' masses, see `sinkhorn`.
      steps: See `sinkhorn`.

    Returns:
      The coupling, `(n, m)`, and its cost, from 0 to 2.

    Raises:
      ValueError: If the activations have different leading axes or none, or are not finite; and as
        `sinkhorn` does.

    References:
      Singh and Jaggi, Model Fusion via Optimal Transport, 2020 (arXiv 1910.05653).
      Cui et al., Transport and Merge, 2026 (arXiv 2602.05495).

    >>> a = jnp.array([[1.0, 0.0], [0.0, 1.0], [2.0, 0.5]])
    >>> (4 * transport_units(a, a[:, [1, 0, 0, 1]])[0]).round(3).tolist()
    [[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    """
    x, y = as_array(old), as_array(new)
    if x.ndim < 2 or y.ndim < 2 or x.shape[:-1] != y.shape[:-1]:
        raise ValueError(
            f"old and new must be [..., units] on the same inputs, got {x.shape} and {y.shape}"
        )
    cost = _unit_costs(x, y)
    values = concrete(cost)
    if values is not None and not np.isfinite(values).all():
        raise ValueError("activations and their variances must be finite")
    P = sinkhorn(cost, entropy=entropy, balance=balance, steps=steps)
    return P, jnp.sum(P * cost)


def transport_layers(
    old: Sequence[Float[ArrayLike, "... _"]],
    new: Sequence[Float[ArrayLike, "... _"]],
    *,
    entropy: float = 0.01,
    balance: float = 0.0,
    steps: int = 300,
) -> LayerTransport:
    """Couples the layers of two networks of any depths and widths, and the units of their layers.

    The units of each pair of layers are coupled first (`transport_units`). The cost of this
    coupling is then the cost of coupling the layers. Every new layer has the same mass.

    Activations show the result of all computation up to a layer. A new layer that computes the
    identity therefore corresponds to the old layer before it. `deepen` repeats that layer, and
    `overwrite` makes the copy do nothing.

    Args:
      old: Activations of each layer of one network, `(..., units)` in each.
      new: The same for the other network, on the same inputs.
      entropy: See `sinkhorn`; for units and for layers.
      balance: The weight of equal masses of the old layers. The default is 0: each new layer goes
        to the nearest old layers. Old units always have equal masses.
      steps: See `sinkhorn`.

    Returns:
      The correspondence of layers, and the coupling of units of each pair.

    Raises:
      ValueError: If a network has no layers; and as `transport_units` does, with the layers' names.

    References:
      Cui et al., Transport and Merge, 2026 (arXiv 2602.05495).
      Nguyen et al., On Cross-Layer Alignment for Model Fusion, 2021 (arXiv 2110.15538).

    >>> a = jax.random.normal(jax.random.key(0), (20, 3))
    >>> t = transport_layers([a, a**2], [a, a, a[:, ::-1] ** 2])
    >>> t.layers.round(3).tolist()
    [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    """
    if not len(old) or not len(new):
        raise ValueError(f"old and new must have layers, got {len(old)} and {len(new)}")

    def pair(k: int, i: int) -> tuple[Array, Array]:
        try:
            return transport_units(old[i], new[k], entropy=entropy, steps=steps)
        except ValueError as error:
            raise ValueError(f"old[{i}] and new[{k}]: {error}") from None

    grid = [[pair(k, i) for i in range(len(old))] for k in range(len(new))]
    costs = jnp.stack([jnp.stack([cost for _, cost in row]) for row in grid])
    P = sinkhorn(costs, entropy=entropy, balance=balance, steps=steps)
    couplings = tuple(tuple(coupling for coupling, _ in row) for row in grid)
    return LayerTransport(P / P.sum(axis=1, keepdims=True), costs, couplings)


def barycentric(coupling: Float[ArrayLike, "new old"]) -> SpaceMap:
    """Makes the map of a coupling: each new unit is the mean of the old units coupled with it.

    `write` is the coupling with rows normalised to sum one, and `read` is its transpose, normalised
    in the same way. A coupling of copies only is a duplication with even readers (or, from the
    larger to the smaller network, a mean of copies). It loses nothing. Other maps are LINEAR and
    lossy.

    Args:
      coupling: A coupling of new units with old ones, `(new, old)`. Every row and column must have
        mass.

    Returns:
      The map of `old` units to `new` units, in dense form.

    Raises:
      ValueError: If `coupling` is not a matrix, has negative entries, or has a row or column
        without mass (not checked for traced values).

    References:
      Singh and Jaggi, Model Fusion via Optimal Transport, 2020 (arXiv 1910.05653).

    >>> m = barycentric(jnp.array([[0.25, 0.0], [0.0, 0.5], [0.25, 0.0]]))
    >>> m.write.tolist(), m.read.tolist()
    ([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]])
    """
    P = jnp.asarray(coupling, float)
    if P.ndim != 2:
        raise ValueError(f"coupling must be a matrix [new, old], got shape {P.shape}")
    values = concrete(P)
    if values is not None:
        masses = np.concatenate([values.sum(0), values.sum(1)])
        if not (np.all(values >= 0) and np.all(masses > 0) and np.isfinite(masses).all()):
            raise ValueError("coupling must be 0 or more, with mass in every row and column")
    return SpaceMap(P / P.sum(axis=1, keepdims=True), (P / P.sum(axis=0)).T)


@jax.jit
def _unit_costs(x: Array, y: Array) -> Float[Array, "n m"]:
    """Returns 1 - the correlation of each unit of y with each of x."""
    m = moments(y, x)
    # A constant unit has covariance 0. Dividing it by 1 keeps its gradient finite.
    sd_y, sd_x = (jnp.sqrt(jnp.where(var == 0, 1, var)) for var in (m.var_x, m.var_y))
    return 1 - m.cov / (sd_y[:, None] * sd_x)


@partial(jax.jit, static_argnums=5)
def _sinkhorn(
    C: Array, a: Array, b: Array, entropy: ArrayLike, balance: ArrayLike, steps: int
) -> Float[Array, "n m"]:
    """Computes exp((f + g - C) / entropy) with alternating updates of the potentials f and g."""
    # Adding a constant to the costs changes no coupling. Smaller costs have smaller rounding
    # errors.
    C = C - jnp.min(C)
    # A large entropy needs few steps. Each smaller one starts from the current potentials.
    start = jnp.maximum(jnp.max(C), entropy)
    falls = jnp.minimum(jnp.arange(steps) / max(steps // 2, 1), 1)

    def update(g: Array, fall: Array) -> tuple[Array, None]:
        eps = start * (entropy / start) ** fall
        f = eps * (jnp.log(a) - logsumexp((g - C) / eps, axis=1))
        g = eps * (jnp.log(b) - logsumexp((f[:, None] - C) / eps, axis=0))
        # The penalty keeps the columns' potentials near 0: 1 for an infinite balance, 0 for none.
        return g / (1 + eps / balance), None

    g, _ = lax.scan(update, jnp.zeros_like(b), falls)
    P = a[:, None] * jax.nn.softmax((g - C) / entropy, axis=1)
    # Excess mass of rows or columns is removed, and added where mass is missing.
    goal = jnp.where(jnp.isinf(balance), b, P.sum(axis=0))
    P = P * jnp.minimum(1, goal / jnp.maximum(P.sum(axis=0), jnp.finfo(P.dtype).tiny))
    lack = jnp.maximum(a - P.sum(axis=1), 0), jnp.maximum(goal - P.sum(axis=0), 0)
    total = jnp.maximum(lack[0].sum(), jnp.finfo(P.dtype).tiny)
    return P + lack[0][:, None] * lack[1] / total


def _mass(name: str, given: ArrayLike | None, size: int) -> Float[Array, "n"]:
    """Returns the masses of rows or columns, uniform by default."""
    if given is None:
        return jnp.full(size, 1 / size)
    mass = jnp.asarray(given, float)
    if mass.shape != (size,):
        raise ValueError(f"{name} must have the shape ({size},), got {mass.shape}")
    values = concrete(mass)
    if values is not None and not (np.all(values > 0) and abs(values.sum() - 1) < 1e-5):
        raise ValueError(f"{name} must be positive and sum to one, got the sum {values.sum()}")
    return mass
