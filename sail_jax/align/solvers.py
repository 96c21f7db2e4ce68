"""The best map of one space for each family of maps, with all other spaces fixed.

A `Cost` contains the sums of w_t a_i . b_j for the units i of the reference and j of the other
network, `(n, n)`, or `(blocks, n, n)` with a map per block.
"""

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from sail_jax.align.assignment import Assign
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, select
from sail_jax.checks import as_array

Matrix = Float[np.ndarray, "n n"]
INVERTIBLE = Family.LINEAR | Family.INVERTIBLE
GENERAL = (Family.LINEAR, INVERTIBLE)
SCALED = Family.POSITIVE_MONOMIAL | Family.INVERTIBLE


class Cost(NamedTuple):
    """The terms of all tensors for one space, summed in float64.

    For the units i of the reference and j of the moved network, a_i and b_j are the corresponding
    slices of a tensor t. With a map per block, all arrays have a leading axis of blocks.

    Attributes:
      products: sum_t w_t a_i . b_j, `(..., n, n)`, by the tensors' role for the space: "write",
        "read", "gain", or "bound" for an upper bound, where t has other unmatched spaces. For
        permutations, which do not depend on the role, one sum under "all".
      squares: sum_t w_t |b_j|^2, `(..., n)`, of writers and of readers, for maps with scales; empty
        for other maps.
      grams: sum_t w_t b_i . b_j of writers and sum_t w_t a_i . a_j of readers, `(..., n, n)`, for
        general linear maps; empty for other maps.
    """

    products: dict[str, Float[np.ndarray, "... n n"]]
    squares: dict[str, Float[np.ndarray, "... n"]]
    grams: dict[str, Float[np.ndarray, "... n n"]]

    def add(self, kind: str, part: str, value: np.ndarray, weight: float) -> None:
        """Adds one tensor's term to a sum.

        `kind` is the field: "products", "squares" or "grams". `value` is the term without its
        weight. It is overwritten, since terms may be the largest arrays of a matching.
        """
        into = getattr(self, kind)
        # Sums over many tensors are kept in float64, which preserves small terms next to large
        # ones.
        value *= weight
        if part in into:
            into[part] += value
        else:
            into[part] = value


def solver(family: Family) -> Callable[[Cost, Assign, bool], SpaceMap]:
    """Returns the solver of a family of maps.

    `family` is one of the keys of `SOLVERS`. Returns a function `(cost, assign, blocked) -> map`.
    `cost` is a `Cost`, `assign` solves assignment problems. If `blocked`, each block is solved
    separately, and the leaves of the maps are stacked.
    """
    solve_block = SOLVERS[family]

    def solve(cost: Cost, assign: Assign, blocked: bool) -> SpaceMap:
        if not blocked:
            return solve_block(cost, assign)
        count = next(iter(cost.products.values())).shape[0]
        # `vmap` is not used: assignments and decompositions run on the host, in NumPy and SciPy.
        maps = [solve_block(jax.tree.map(lambda x, k=k: x[k], cost), assign) for k in range(count)]
        return jax.tree.map(lambda *x: jnp.stack(x), *maps)

    return solve


def _permutation(cost: Cost, assign: Assign) -> SpaceMap:
    """Finds the permutation with the largest sum of products."""
    benefit = reduce(np.add, cost.products.values())
    index = as_array(assign(benefit))
    return select(index, len(benefit), family=Family.PERMUTATION)


def _signed_permutation(cost: Cost, assign: Assign) -> SpaceMap:
    """Finds the permutation and the signs with the largest sum of products."""
    # With the better sign each pair gains |signed|. A gain or a bound contributes the same for both
    # signs.
    return signed_by(*_sides(cost), assign)


def signed_by(signed: Matrix, unsigned: Matrix | float, assign: Assign) -> SpaceMap:
    """Makes the permutation that maximises |signed| + unsigned, with the signs of `signed`."""
    index = np.asarray(assign(np.abs(signed) + unsigned))
    n = len(index)
    signs = jnp.asarray(np.where(signed[np.arange(n), index] < 0, -1.0, 1.0), jnp.float32)
    return select(index, n, write=signs, read=signs, family=Family.SIGNED_PERMUTATION)


def _orthogonal(cost: Cost, _: Assign) -> SpaceMap:
    """Finds the orthogonal matrix nearest to sum_t w_t a b^T, its polar factor (Schonemann)."""
    return procrustes(_sides(cost)[0])


def procrustes(benefit: Matrix) -> SpaceMap:
    """Makes the map of the orthogonal matrix Q that maximises sum(Q * benefit).

    Q is U V^T for the singular value decomposition benefit = U S V^T. It is computed in float64,
    since the singular vectors of close singular values are sensitive to rounding.

    References:
      Schonemann, A generalized solution of the orthogonal Procrustes problem, 1966.
    """
    U, _, Vt = np.linalg.svd(benefit)
    Q = U @ Vt
    return SpaceMap(jnp.asarray(Q, jnp.float32), jnp.asarray(Q.T, jnp.float32), Family.ORTHOGONAL)


def _positive_monomial(cost: Cost, assign: Assign) -> SpaceMap:
    """Finds the permutation and scales s > 0 that minimise |a_w - s b_w|^2 + |a_r - b_r / s|^2.

    Index w denotes tensors that write the space, r tensors that read it.
    """
    parts = cost.products
    n = len(next(iter(parts.values())))
    none, zero = np.zeros(n), np.zeros((n, n))
    # A gain does not scale with the unit, but a bound does, so bounds count only where the tensors
    # do not determine the scale.
    still = parts.get("gain", zero) + (zero if cost.squares else parts.get("bound", zero))
    scale, loss = _best_scales(
        *(parts.get(role, zero) for role in ("write", "read")),
        *(cost.squares.get(role, none) for role in ("write", "read")),
    )
    # `assign` maximises, and the loss should be small.
    index = np.asarray(assign(still - loss))
    return scaled_by(index, scale[np.arange(n), index])


def scaled_by(index: np.ndarray, scales: np.ndarray) -> SpaceMap:
    """Makes the map that permutes units and multiplies them by scales."""
    s = jnp.asarray(scales, jnp.float32)
    return select(index, len(s), write=s, read=1 / s, family=SCALED)


def _best_scales(P: Matrix, R: Matrix, p: np.ndarray, r: np.ndarray) -> tuple[Matrix, Matrix]:
    """Minimises p s^2 / 2 - P s + r / (2 s^2) - R / s over s > 0, entry by entry.

    Returns the minimiser and the minimum. Stationary points solve p s^4 - P s^3 + R s - r = 0. A
    grid over the range of positive roots (Cauchy's bound) gives a starting point, and Newton's
    method in log s descends from there.
    """

    def cost(u: Matrix) -> Matrix:
        s = np.exp(u)
        return p * s**2 / 2 - P * s + r / (2 * s**2) - R / s

    # Without scaling tensors there is nothing to choose. With tensors of one role alone, the
    # minimum is explicit.
    if not (p.any() or r.any()):
        return np.ones_like(P), np.zeros_like(P)
    if not (p.any() and r.any()):
        side, own = (P, p) if p.any() else (R, r)
        # The minimum of p s^2 / 2 - P s is at s = P / p (for readers, 1 / s = R / r). The limits
        # keep s positive where P <= 0, and finite where p is 0.
        u = np.log(np.clip(side / np.maximum(own, 1e-12 * own.max()), 1e-3, 1e3))
        u = u if p.any() else -u
        return np.exp(u), cost(u)
    # This keeps log(r / p) finite for a unit that is zero on one side.
    tiny = 1e-12 * max(p.max(), r.max())
    p, r = np.maximum(p, tiny), np.maximum(r, tiny)
    # With s = z exp(step) and z^4 = r / p, the first and last coefficients of the quartic have
    # equal magnitude. Cauchy's bound is then the same for exp(step) and for its inverse.
    middle = np.broadcast_to(np.log(r / p) / 4, P.shape)
    z = np.exp(middle)
    reach = np.log1p(max(1.0, np.abs(P / (p * z)).max(), np.abs(R * z / r).max()))
    u, low = middle, cost(middle)
    for step in np.linspace(-reach, reach, 4 * int(np.ceil(reach)) + 13):
        value = cost(middle + step)
        u, low = np.where(value < low, middle + step, u), np.minimum(value, low)
    for _ in range(6):
        s = np.exp(u)
        slope = p * s**2 - P * s - r / s**2 + R / s
        # A step divided by the magnitude of the second derivative descends even where the curve is
        # concave.
        curve = np.abs(2 * p * s**2 - P * s + 2 * r / s**2 - R / s) + 1e-300
        trial = u - np.clip(slope / curve, -0.5, 0.5)
        value = cost(trial)
        u, low = np.where(value < low, trial, u), np.minimum(value, low)
    return np.exp(u), low


def _general(cost: Cost, _: Assign) -> SpaceMap:
    """Finds the matrix M that minimises |a_w - M b_w|^2 + |M^T a_r - b_r|^2.

    The second residual is measured in b's coordinates, which makes the problem linear. The normal
    equations are M (b_w b_w^T) + (a_r a_r^T) M = a_w b_w^T + a_r b_r^T, a Sylvester equation with
    two positive semidefinite sides. It is solved in their eigenbases.
    """
    signed, _unsigned = _sides(cost)
    none = np.zeros_like(signed)
    left, right = (cost.grams.get(role, none) for role in ("read", "write"))
    (mu, U), (nu, V) = np.linalg.eigh(left), np.linalg.eigh(right)
    # In the eigenbases the equation is (mu_i + nu_j) M_ij = C_ij, one division for each entry.
    # Where both sides are singular, it does not determine the entry, and the quotient is kept
    # finite.
    sums = np.maximum(mu[:, None] + nu, 1e-12 * (mu.max() + nu.max()) + 1e-300)
    M = U @ ((U.T @ signed @ V) / sums) @ V.T
    # float32 cannot undo a change of basis that is closer to singular than this. A NaN also fails
    # the comparison. The identity is then used, which changes nothing.
    if not np.linalg.cond(M) < 1e6:
        M = np.eye(len(M))
    return SpaceMap(
        jnp.asarray(M, jnp.float32), jnp.asarray(np.linalg.inv(M), jnp.float32), INVERTIBLE
    )


def _sides(cost: Cost) -> tuple[Matrix, Matrix]:
    """Sums the products that change sign with the unit, and those that do not."""
    zero = np.zeros_like(next(iter(cost.products.values())))
    odd, even = ("write", "read"), ("gain", "bound")
    signed, unsigned = (
        sum((cost.products.get(p, zero) for p in part), zero) for part in (odd, even)
    )
    return signed, unsigned


SOLVERS: dict[Family, Callable[[Cost, Assign], SpaceMap]] = {
    Family.PERMUTATION: _permutation,
    Family.SIGNED_PERMUTATION: _signed_permutation,
    Family.POSITIVE_MONOMIAL: _positive_monomial,
    Family.ORTHOGONAL: _orthogonal,
    **dict.fromkeys(GENERAL, _general),
}
