"""Solvers of the linear assignment problem, which pairs the units of two networks.

`hungarian` is exact and runs on the host. `auction` runs inside `jit` and `vmap`. Its sum of
benefits is within a stated gap of the optimum.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from sail_jax.checks import concrete

Assign = Callable[[Float[ArrayLike, "n n"]], Int[ArrayLike, "n"]]
"""Solves the assignment problem: from benefits `(n, n)` to the column of each row."""


Square = TypeVar("Square", Array, np.ndarray)


def hungarian(benefit: Float[ArrayLike, "n n"]) -> Int[np.ndarray, "n"]:
    """Finds the permutation that maximises the sum of the chosen benefits, exactly.

        max over permutations of sum_i benefit[i, index[i]]

    It runs on the host in float64 with the modified Jonker-Volgenant algorithm of
    `scipy.optimize.linear_sum_assignment`, in O(n^3).

    Args:
      benefit: The benefit of assigning column j to row i, `(n, n)`.

    Returns:
      The column of each row, integers `(n,)`.

    Raises:
      TypeError: If `benefit` is traced.
      ValueError: If `benefit` is not a square matrix or not finite.

    >>> hungarian(np.array([[1.0, 5.0], [0.0, 3.0]])).tolist()
    [1, 0]
    """
    from scipy.optimize import linear_sum_assignment

    values = concrete(benefit)
    if values is None:
        raise TypeError("benefit is traced: use sail_jax.align.auction inside jit")
    values = _square(values).astype(np.float64, copy=False)
    if not np.isfinite(values).all():
        raise ValueError("benefit must be finite")
    return linear_sum_assignment(values, maximize=True)[1]


def auction(
    benefit: Float[ArrayLike, "n n"],
    *,
    gap: float = 0.0,
    shrink: float = 5.0,
    bidders: int | None = None,
    max_rounds: int = 1_000_000,
) -> Int[Array, "n"]:
    """Finds a permutation with a sum of benefits within `auction_gap` of the optimum.

    Rows bid for columns. A row without a column bids for its best column at the current prices. The
    bid raises that column's price by the margin over the row's second-best column, plus epsilon.
    Once every row has a column, a new phase begins with a smaller epsilon and the current prices.

    This is Bertsekas' forward auction with epsilon scaling, written as one `while_loop`, for use
    inside `jit` and `vmap`. It stores a rescaled copy of `benefit` and `bidders` of its rows. The
    result is exact if the second-best permutation is worse by more than the gap.

    Args:
      benefit: The benefit of assigning column j to row i, `(n, n)`. Dtypes narrower than float32
        are widened. Non-finite values count as the smallest finite one.
      gap: The requested gap, as a fraction of the range of `benefit`; see `auction_gap`.
      shrink: The factor by which epsilon is divided between phases, above 1.
      bidders: The number of rows that bid in one round, which costs `bidders * n`. None means an
        eighth of the rows, and at least 16.
      max_rounds: The largest number of rounds. After it, rows without a column take the free
        columns in order. The result is then still a permutation, but without the guarantee.

    Returns:
      The column of each row, int32 `(n,)`.

    Raises:
      ValueError: If `benefit` is not a square matrix, or `gap` is negative or not finite.

    References:
      Bertsekas, The auction algorithm, 1988; Bertsekas and Castanon, The auction algorithm for the
      transportation problem, 1989.

    >>> auction(jnp.array([[1.0, 5.0], [0.0, 3.0]])).tolist()
    [1, 0]
    """
    a = jnp.asarray(benefit)
    _square(a)
    if not jnp.issubdtype(a.dtype, jnp.floating) or jnp.finfo(a.dtype).bits < 32:
        a = a.astype(jnp.float32)
    n = a.shape[0]
    if n < 2:
        return jnp.zeros(n, jnp.int32)
    # `jit` cannot refuse values. A non-finite value becomes equal to the smallest one.
    a = jnp.where(jnp.isfinite(a), a, jnp.min(a, where=jnp.isfinite(a), initial=jnp.inf))
    low, high = jnp.min(a), jnp.max(a)
    # The range is scaled to one. Epsilon, the gap and the rounding of prices are then relative to
    # it.
    a = jnp.where(high > low, (a - low) / jnp.where(high > low, high - low, 1), 0)
    last = _epsilon(n, gap, a.dtype)
    # Shapes are static inside `jit`: k rows bid in each round, regardless of how many are free.
    k = min(n, max(16, n // 8) if bidders is None else bidders)
    free = jnp.full(n, -1, jnp.int32)
    rows = jnp.arange(n, dtype=jnp.int32)

    def bid(state):
        price, owner, column, epsilon, rounds = state
        # Fewer than k rows may be free. The remaining entries are n, which bid -inf and win
        # nothing.
        who = jnp.nonzero(column < 0, size=k, fill_value=n)[0].astype(jnp.int32)
        # [k, n]: the value of each column to each bidder at the current prices.
        value = a.at[who].get(mode="clip") - price
        want = jnp.argmax(value, axis=1)
        best = jnp.max(value, axis=1)
        second = jnp.max(jnp.where(jnp.arange(n) == want[:, None], -jnp.inf, value), axis=1)
        # The bid is the highest price at which the column is still worth as much as the second
        # best, plus epsilon. Without epsilon two rows could bid for the same columns forever.
        offer = jnp.where(who < n, price[want] + (best - second) + epsilon, -jnp.inf)
        top = jnp.full(n, -jnp.inf, a.dtype).at[want].max(offer)
        # Of equal bids the first row's wins, so each column goes to a single row.
        wins = (who < n) & (offer == top[want])
        winner = jnp.full(n, n, jnp.int32).at[want].min(jnp.where(wins, who, n))
        sold = winner < n
        # The previous owners first lose their columns, and the new owners then receive them. n is
        # out of bounds, and `mode="drop"` ignores it.
        column = column.at[jnp.where(sold & (owner >= 0), owner, n)].set(-1, mode="drop")
        column = column.at[winner].set(rows, mode="drop")
        owner, price = jnp.where(sold, winner, owner), jnp.where(sold, top, price)
        # In the next phase all rows are free again, and the prices stay. Subtracting a constant
        # from all prices changes no bid, and keeps growing prices from losing precision.
        over = jnp.all(column >= 0) & (epsilon > last)
        return (
            jnp.where(over, price - jnp.min(price), price),
            jnp.where(over, free, owner),
            jnp.where(over, free, column),
            jnp.where(over, jnp.maximum(epsilon / shrink, last), epsilon),
            rounds + 1,
        )

    def unfinished(state):
        return jnp.any(state[2] < 0) & (state[4] < max_rounds)

    # Bertsekas' scaling: a quarter of the range finds rough prices in few rounds, and each phase
    # refines the previous prices. With the last epsilon alone, prices would rise in such small
    # steps that contested columns would take very many rounds.
    first = jnp.maximum(jnp.asarray(0.25, a.dtype), last)
    start = (jnp.zeros(n, a.dtype), free, free, first, jnp.int32(0))
    _, owner, column, _, _ = lax.while_loop(unfinished, bid, start)
    # Only needed if the rounds ran out: the free rows receive the free columns in order, which
    # makes the result a permutation.
    spare = jnp.nonzero(owner < 0, size=n, fill_value=0)[0].astype(jnp.int32)
    rank = jnp.cumsum(column < 0) - 1
    return jnp.where(column < 0, spare[rank], column)


def auction_gap(benefit: Float[ArrayLike, "n n"], gap: float = 0.0) -> float:
    """Returns the largest possible shortfall of `auction`'s sum from the optimum.

        n (epsilon + 4 eps) (max(benefit) - min(benefit)),  epsilon = max(gap / n, 16 eps)

    Here eps is the machine epsilon of the auction's dtype. For n = 32 in float32 and a gap of 0,
    the shortfall is 8e-5 of the range.

    Args:
      benefit: The matrix of the assignment problem, `(n, n)`, finite and not traced.
      gap: The `gap` argument of `auction`.

    Returns:
      The largest possible shortfall, in the units of `benefit`.

    Raises:
      ValueError: If `benefit` is not a square matrix, or `gap` is negative or not finite.

    >>> f"{auction_gap(np.eye(4), gap=0.1):.2f}"
    '0.10'
    """
    a = np.asarray(benefit)
    n = len(_square(a))
    dtype = a.dtype if a.dtype == np.float64 else np.dtype(np.float32)
    # Values and prices have the magnitude of the range, and each is rounded twice.
    per_unit = _epsilon(n, gap, dtype) + 4 * float(jnp.finfo(dtype).eps)
    return float(n * per_unit * (a.max() - a.min())) if n else 0.0


def _epsilon(n: int, gap: float, dtype: np.dtype) -> float:
    """Returns the last epsilon of the auction for benefits with range one."""
    if not (math.isfinite(gap) and gap >= 0):
        raise ValueError(f"gap must be finite and not negative, got {gap}")
    # A smaller raise would vanish in the rounding of a price, which has the range's magnitude.
    return max(gap / max(n, 1), 16 * float(jnp.finfo(dtype).eps))


def _square(a: Square) -> Square:
    if a.ndim != 2 or a.shape[0] != a.shape[1]:
        raise ValueError(f"benefit must be a square matrix, got shape {a.shape}")
    return a
