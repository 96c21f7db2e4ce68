"""Makers of one space: permute, widen, pad, prune, rotate, rescale, flip its units.

A maker never sees a parameter; `change_basis` applies what it returns. Each states its family.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, identity, measure, select
from sail_jax.checks import as_array, concrete

__all__ = ["flip", "lemon_gain", "pad", "permute", "prune", "rescale", "rotate", "widen"]


def permute(index: ArrayLike) -> SpaceMap:
    """New unit j is old unit `index[j]`. PERMUTATION.

    Raises ValueError unless `index` is a permutation.
    """
    index = as_array(index)
    values = concrete(index)
    if values is not None and not np.array_equal(np.sort(values, axis=None), np.arange(index.size)):
        raise ValueError(f"index must be a permutation of range({index.size}), got {values}")
    return select(index, index.size, family=Family.PERMUTATION)


def widen(old: int, new: int, *, key: PRNGKeyArray | None = None, even: bool = False) -> SpaceMap:
    """Duplicate units, copies sharing their readers evenly (Net2WiderNet, Chen et al. 2016).

    New unit j copies old unit `j % old`; with a key, units beyond the first `old` copy uniform
    random ones (Net2Net), or, with `even`, random ones without repetition until each is dealt.
    `even` asks for equally many copies of each. EVEN_DUPLICATION where that holds by
    construction (`new` a multiple of `old`, and no key or `even`), SELECTION otherwise.

    Raises ValueError if `new < old`, or `even` and `new` is not a multiple of `old`.

    >>> widen(2, 3).read.scale.tolist()
    [0.5, 1.0, 0.5]
    """
    check_growth(old, new)
    if even and new % old:
        raise ValueError(f"even copies need new to be a multiple of old, got old={old}, new={new}")
    index = np.arange(new) % old
    if key is not None:
        index = _dealt(key, old, new, even)
    exact = new % old == 0 and (even or key is None)
    return duplicate(index, old, Family.EVEN_DUPLICATION if exact else Family.SELECTION)


def pad(old: int, new: int) -> SpaceMap:
    """Add `new - old` units that are zero and that nothing reads. SELECTION.

    Raises ValueError if `new < old`.
    """
    check_growth(old, new)
    is_old = np.arange(new) < old
    index = np.where(is_old, np.arange(new), 0)
    entries = is_old.astype(float)
    return select(index, old, write=entries, read=entries, family=Family.SELECTION)


def prune(keep: ArrayLike, old: int) -> SpaceMap:
    """Keep the units `keep`, distinct and in the given order; lossy. SELECTION.

    Raises TypeError unless `keep` holds integers, ValueError if they repeat or exceed `old`.
    """
    keep = as_array(keep)
    if keep.dtype == bool:
        raise TypeError("keep must hold the numbers of units, got a mask: use jnp.flatnonzero")
    values = concrete(keep)
    if values is not None and len(np.unique(values)) != values.size:
        raise ValueError(f"keep must not repeat a unit, got {values}")
    return select(keep, old, family=Family.SELECTION)


def rotate(Q: Float[ArrayLike, "n n"]) -> SpaceMap:
    """`write = Q`, `read = Q.T` for an orthogonal Q [n, n]. ORTHOGONAL.

    Raises ValueError unless Q is square and orthogonal to rounding.
    """
    Q = as_array(Q)
    if Q.ndim != 2 or Q.shape[0] != Q.shape[1]:
        raise ValueError(f"Q must be square, got shape {Q.shape}")
    m = SpaceMap(Q, Q.T, Family.ORTHOGONAL)
    measured = measure(m)
    if measured is not None and not measured[0] <= measured[1]:
        raise ValueError(f"Q must be orthogonal, but Q.T @ Q - I reaches {measured[0]:.2g}")
    return m


def rescale(scale: Float[ArrayLike, "n"]) -> SpaceMap:
    """New unit j is `scale[j]` times old unit j, `scale > 0`. POSITIVE_MONOMIAL, invertible.

    Raises ValueError unless all scales are positive and finite.
    """
    scale = as_array(scale)
    values = concrete(scale)
    if values is not None and not np.all((values > 0) & np.isfinite(values)):
        raise ValueError(f"scale must be positive and finite, got {values}")
    family = Family.POSITIVE_MONOMIAL | Family.INVERTIBLE
    return select(np.arange(scale.size), scale.size, write=scale, read=1 / scale, family=family)


def flip(signs: ArrayLike) -> SpaceMap:
    """New unit j is `signs[j]` times old unit j, signs +-1. SIGNED_PERMUTATION.

    Raises ValueError unless all signs are +1 or -1.
    """
    signs = as_array(signs)
    values = concrete(signs)
    if values is not None and not np.isin(values, (-1, 1)).all():
        raise ValueError(f"signs must be +1 or -1, got {values}")
    n = signs.size
    return select(np.arange(n), n, write=signs, read=signs, family=Family.SIGNED_PERMUTATION)


def lemon_gain(old: int, new: int) -> float:
    """eta = sqrt(floor(new/old) old/new): by how much V_avg shrinks the standard deviation.

    LEMON's rules for a normalisation: gain times eta, epsilon times eta**2.

    >>> round(lemon_gain(4, 6), 4), lemon_gain(4, 8)
    (0.8165, 1.0)
    """
    check_growth(old, new)
    return (new // old * old / new) ** 0.5


@partial(jax.jit, static_argnums=(1, 2, 3))
def _dealt(key: PRNGKeyArray, old: int, new: int, even: bool) -> Int[Array, "new"]:
    """Old units in their order, then random ones; with `even`, all of them before any again."""
    if even:
        deal = jax.vmap(partial(jax.random.permutation, x=old))
        drawn = deal(jax.random.split(key, new // old - 1)).reshape(-1)
    else:
        drawn = jax.random.randint(key, (new - old,), 0, old)
    return jnp.concatenate([jnp.arange(old), drawn])


def duplicate(index: Int[ArrayLike, "new"], old: int, family: Family) -> SpaceMap:
    """New unit j copies old unit `index[j]`, copies sharing their readers evenly."""
    if np.size(index) == old:
        return identity(old)
    select(index, old)  # which checks it
    copied = as_array(index)
    values = concrete(copied)
    if values is None:
        count = jnp.zeros(old).at[copied].add(1)
        return select(copied, old, read=1 / count[copied], family=family)
    count = np.bincount(values, minlength=old)  # on the host: nothing to compile for every size
    return select(copied, old, read=1 / count[values], family=family)


def check_growth(old: int, new: int) -> None:
    """ValueError unless 0 < old <= new."""
    if not 0 < old <= new:
        raise ValueError(f"growth needs 0 < old <= new, got old={old}, new={new}")
