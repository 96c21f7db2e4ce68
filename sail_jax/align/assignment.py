"""Solvers of the linear assignment problem, which pairs the units of two networks.

`hungarian` is exact and runs on the host. `auction` runs inside `jit` and `vmap`, to within a
stated gap.
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

    It runs on the host in float64, by the modified Jonker-Volgenant algorithm of
    `scipy.optimize.linear_sum_assignment`, in O(n^3).

    Args:
      benefit: What is gained if row i takes column j, `(n, n)`.

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
        raise TypeError("benefit is traced: inside jit use sail_jax.align.auction")
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
    """Finds a permutation whose sum of benefits is within `auction_gap` of the largest.

    Rows bid for columns. A row without a column bids for the column that is worth most to it at the
    current prices. Its bid raises that price by the margin over its second best column, plus
    epsilon. Once every row has a column, a new phase begins with a smaller epsilon and the prices
    so far.

    This is Bertsekas' forward auction with scaling of epsilon, written as one `while_loop`, for use
    inside `jit` and `vmap`. Beside a rescaled copy of `benefit` it holds `bidders` of its rows. The
    result is exact where the second best permutation is worse by more than the gap.

    Args:
      benefit: What is gained if row i takes column j, `(n, n)`. Dtypes narrower than float32 are
        widened. Values that are not finite count as much as the least finite one.
      gap: The gap asked for, as a fraction of the range of `benefit`; see `auction_gap`.
      shrink: What epsilon is divided by from phase to phase, above 1.
      bidders: How many rows bid in one round, each round costing `bidders * n`. None: an eighth of
        the rows, and at least 16.
      max_rounds: If so many rounds were not enough, rows without a column take the free columns in
        order. The result is still a permutation, but without the guarantee.

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
    # Values cannot be refused inside of `jit`; one that is not finite becomes as bad as the worst.
    a = jnp.where(jnp.isfinite(a), a, jnp.min(a, where=jnp.isfinite(a), initial=jnp.inf))
    low, high = jnp.min(a), jnp.max(a)
    # The range is made one, so that epsilon, the gap and the rounding of prices are all relative to
    # it.
    a = jnp.where(high > low, (a - low) / jnp.where(high > low, high - low, 1), 0)
    last = _epsilon(n, gap, a.dtype)
    # Shapes are static inside of `jit`: k rows bid in each round, however many are free.
    k = min(n, max(16, n // 8) if bidders is None else bidders)
    free = jnp.full(n, -1, jnp.int32)
    rows = jnp.arange(n, dtype=jnp.int32)

    def bid(state):
        price, owner, column, epsilon, rounds = state
        # Fewer than k rows may be free: the rest is n, which offers -inf and wins nothing.
        who = jnp.nonzero(column < 0, size=k, fill_value=n)[0].astype(jnp.int32)
        # [k, n]: what each column is worth to each bidder at the present prices.
        value = a.at[who].get(mode="clip") - price
        want = jnp.argmax(value, axis=1)
        best = jnp.max(value, axis=1)
        second = jnp.max(jnp.where(jnp.arange(n) == want[:, None], -jnp.inf, value), axis=1)
        # The highest price at which the column is still worth as much as the second best, and
        # epsilon more, without which two rows that want the same two columns would bid forever.
        offer = jnp.where(who < n, price[want] + (best - second) + epsilon, -jnp.inf)
        top = jnp.full(n, -jnp.inf, a.dtype).at[want].max(offer)
        # Of equal offers that of the first row wins, so that a column is sold to one row.
        wins = (who < n) & (offer == top[want])
        winner = jnp.full(n, n, jnp.int32).at[want].min(jnp.where(wins, who, n))
        sold = winner < n
        # First the old owners lose their columns, then the new ones get them: n is out of bounds,
        # and `mode="drop"` ignores it.
        column = column.at[jnp.where(sold & (owner >= 0), owner, n)].set(-1, mode="drop")
        column = column.at[winner].set(rows, mode="drop")
        owner, price = jnp.where(sold, winner, owner), jnp.where(sold, top, price)
        # In the next phase all rows are free again and prices stay, less a constant: it changes no
        # bid, and as prices only rise it would cost them precision.
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
    # refines those of the one before. With the last epsilon alone, prices would rise by such small
    # steps that contested columns took very many rounds.
    first = jnp.maximum(jnp.asarray(0.25, a.dtype), last)
    start = (jnp.zeros(n, a.dtype), free, free, first, jnp.int32(0))
    _, owner, column, _, _ = lax.while_loop(unfinished, bid, start)
    # Only if the rounds ran out: the rows still free get the columns still free, in order, so that
    # the outcome is a permutation all the same.
    spare = jnp.nonzero(owner < 0, size=n, fill_value=0)[0].astype(jnp.int32)
    rank = jnp.cumsum(column < 0) - 1
    return jnp.where(column < 0, spare[rank], column)


def auction_gap(benefit: Float[ArrayLike, "n n"], gap: float = 0.0) -> float:
    """Returns how far the sum found by `auction` may fall short of the largest sum.

        n (epsilon + 4 eps) (max(benefit) - min(benefit)),  epsilon = max(gap / n, 16 eps)

    where eps is the machine epsilon in which the auction runs. For n = 32 in float32 and a gap of 0
    this is 8e-5 of the range.

    Args:
      benefit: The matrix of the assignment problem, `(n, n)`, finite and not traced.
      gap: As given to `auction`.

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
    # Values and prices, of the order of the range, are each rounded twice.
    per_unit = _epsilon(n, gap, dtype) + 4 * float(jnp.finfo(dtype).eps)
    return float(n * per_unit * (a.max() - a.min())) if n else 0.0


def _epsilon(n: int, gap: float, dtype: np.dtype) -> float:
    """The last epsilon of the auction, for benefits whose range is one."""
    if not (math.isfinite(gap) and gap >= 0):
        raise ValueError(f"gap must be finite and not negative, got {gap}")
    # A smaller raise would be lost in the rounding of a price, which is of the order of the range.
    return max(gap / max(n, 1), 16 * float(jnp.finfo(dtype).eps))


def _square(a: Square) -> Square:
    if a.ndim != 2 or a.shape[0] != a.shape[1]:
        raise ValueError(f"benefit must be a square matrix, got shape {a.shape}")
    return a
