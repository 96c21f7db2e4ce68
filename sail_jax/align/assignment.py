"""The linear assignment problem: exactly on the host, and to a stated gap inside `jit`."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from sail_jax.checks import concrete

__all__ = ["auction", "auction_gap", "hungarian"]


def hungarian(benefit: Float[ArrayLike, "n n"]) -> Int[np.ndarray, "n"]:
    """The permutation that maximises `sum_i benefit[i, index[i]]`: exact, float64, on the host.

    The modified Jonker-Volgenant algorithm of `scipy.optimize.linear_sum_assignment`, O(n^3).
    Raises ValueError unless `benefit` is a finite square matrix, TypeError if it is traced.

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
    """A permutation whose `sum_i benefit[i, index[i]]` is within `auction_gap` of the largest.

    Bertsekas' forward auction with scaling of epsilon (Bertsekas 1988; Bertsekas & Castanon
    1989): rows that own no column bid for their best one the margin over the second best plus
    epsilon, which falls by `shrink` from phase to phase, prices being kept. For use inside `jit`
    and `vmap`: one `while_loop`, memory O(n) beside `benefit`. `bidders` rows bid at once (None:
    an eighth of them, at least 16); a round costs `bidders * n`.

    Exact where the second best permutation is worse by more than the gap. `gap` is relative, see
    `auction_gap`. If `max_rounds` are spent, rows without a column take the free ones in order: a
    permutation still, without the guarantee. Values that are not finite count as the least.
    """
    a = jnp.asarray(benefit)
    _square(a)
    if not jnp.issubdtype(a.dtype, jnp.floating) or jnp.finfo(a.dtype).bits < 32:
        a = a.astype(jnp.float32)
    n = a.shape[0]
    if n < 2:
        return jnp.zeros(n, jnp.int32)
    a = jnp.where(jnp.isfinite(a), a, jnp.min(a, where=jnp.isfinite(a), initial=jnp.inf))
    low, high = jnp.min(a), jnp.max(a)
    # the range is one: what follows needs no other scale
    a = jnp.where(high > low, (a - low) / jnp.where(high > low, high - low, 1), 0)
    last = _epsilon(n, gap, a.dtype)
    k = min(n, max(16, n // 8) if bidders is None else bidders)
    free = jnp.full(n, -1, jnp.int32)
    rows = jnp.arange(n, dtype=jnp.int32)

    def bid(state):
        price, owner, column, epsilon, rounds = state
        who = jnp.nonzero(column < 0, size=k, fill_value=n)[0].astype(jnp.int32)
        value = a.at[who].get(mode="clip") - price
        want = jnp.argmax(value, axis=1)
        best = jnp.max(value, axis=1)
        second = jnp.max(jnp.where(jnp.arange(n) == want[:, None], -jnp.inf, value), axis=1)
        offer = jnp.where(who < n, price[want] + (best - second) + epsilon, -jnp.inf)
        top = jnp.full(n, -jnp.inf, a.dtype).at[want].max(offer)
        wins = (who < n) & (offer == top[want])
        winner = jnp.full(n, n, jnp.int32).at[want].min(jnp.where(wins, who, n))
        sold = winner < n
        column = column.at[jnp.where(sold & (owner >= 0), owner, n)].set(-1, mode="drop")
        column = column.at[winner].set(rows, mode="drop")
        owner, price = jnp.where(sold, winner, owner), jnp.where(sold, top, price)
        # the next phase: everybody lets go, prices stay up to a constant
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

    first = jnp.maximum(jnp.asarray(0.25, a.dtype), last)
    start = (jnp.zeros(n, a.dtype), free, free, first, jnp.int32(0))
    _, owner, column, _, _ = lax.while_loop(unfinished, bid, start)
    spare = jnp.nonzero(owner < 0, size=n, fill_value=0)[0].astype(jnp.int32)
    rank = jnp.cumsum(column < 0) - 1
    return jnp.where(column < 0, spare[rank], column)


def auction_gap(benefit: Float[ArrayLike, "n n"], gap: float = 0.0) -> float:
    """How much `auction` may fall short of the largest sum: n epsilon, and the rounding.

    `gap` asks for n epsilon as a part of the range of values; it is at least what rounding
    allows, 16 machine epsilons a row (6e-5 of the range for n = 32 in float32).
    """
    a = np.asarray(benefit)
    n = len(_square(a))
    dtype = a.dtype if a.dtype == np.float64 else np.dtype(np.float32)
    # values and prices, of the order of the range, are each rounded twice
    per_unit = _epsilon(n, gap, dtype) + 4 * float(jnp.finfo(dtype).eps)
    return float(n * per_unit * (a.max() - a.min())) if n else 0.0


def _epsilon(n: int, gap: float, dtype: np.dtype) -> float:
    if not (math.isfinite(gap) and gap >= 0):
        raise ValueError(f"gap must be finite and not negative, got {gap}")
    # below, a raise would be lost in the rounding of a price, of the order of the range
    return max(gap / n, 16 * float(jnp.finfo(dtype).eps))


def _square(a: Any) -> Any:
    if a.ndim != 2 or a.shape[0] != a.shape[1]:
        raise ValueError(f"benefit must be a square matrix, got shape {a.shape}")
    return a
