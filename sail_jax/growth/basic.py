"""Makers for one space: permute, widen, pad, prune, rotate, rescale or flip its units.

A maker never sees a parameter. It returns a `SpaceMap`, which `change_basis` applies. The family of
the map (in capitals below) determines the nonlinearities that it commutes with.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, identity, measure, select
from sail_jax.checks import as_array, concrete, one_key


def permute(index: ArrayLike) -> SpaceMap:
    """Reorders units: new unit j is old unit `index[j]`. PERMUTATION.

    Args:
      index: A permutation of range(n), of shape (n,).

    Returns:
      The map of n units to n units.

    Raises:
      TypeError: If `index` does not contain integers.
      ValueError: If `index` is not a vector, or not a permutation (not checked under tracing).

    >>> permute(jnp.array([2, 0, 1])).index.tolist()
    [2, 0, 1]
    """
    index = as_array(index)
    values = concrete(index)
    if values is not None and not np.array_equal(np.sort(values, axis=None), np.arange(index.size)):
        raise ValueError(f"index must be a permutation of range({index.size}), got {values}")
    return select(index, index.size, family=Family.PERMUTATION)


def widen(old: int, new: int, *, key: PRNGKeyArray | None = None, even: bool = False) -> SpaceMap:
    r"""Duplicates units, and divides their readers evenly among the copies (Net2Net).

    If new unit j copies old unit g(j), and count(i) is the number of copies of unit i, the map is

    .. math::

        \mathrm{write}_{ji} = [i = g(j)],
        \qquad \mathrm{read}_{ij} = \frac{[i = g(j)]}{\mathrm{count}(i)}

    Readers therefore compute the same outputs as before. The family is EVEN_DUPLICATION if all
    units always have equally many copies, otherwise SELECTION. This requires that `new` is a
    multiple of `old`, and either `even` or no key.

    Args:
      old: The number of units.
      new: The number of units after widening, at least `old`.
      key: Without a key, new unit j copies old unit `j % old`. With a key, the units beyond the
        first `old` copy random old units, drawn uniformly (Net2Net).
      even: Whether each unit gets equally many copies. With a key, each further block of `old`
        units is then a random order of all units.

    Returns:
      The map of `old` units to `new` units.

    Raises:
      ValueError: If not 0 < old <= new, or with `even` if `new` is not a multiple of `old`.

    References:
      Chen et al., Net2Net, 2016 (arXiv 1511.05641): Net2WiderNet.

    >>> widen(2, 3).read.scale.tolist()
    [0.5, 1.0, 0.5]
    """
    one_key(key, optional=True)
    check_growth(old, new)
    if even and new % old:
        raise ValueError(f"even copies need new to be a multiple of old, got old={old}, new={new}")
    index = np.arange(new) % old
    if key is not None:
        index = _dealt(key, old, new, even)
    # Random copies may happen to be equal in number, but the claimed family must hold for every
    # key.
    exact = new % old == 0 and (even or key is None)
    return duplicate(index, old, Family.EVEN_DUPLICATION if exact else Family.SELECTION)


def pad(old: int, new: int) -> SpaceMap:
    """Adds units that are zero and that are not read. SELECTION.

    Args:
      old: The number of units.
      new: The number of units after growth, at least `old`.

    Returns:
      The map of `old` units to `new` units; the first `old` are the old ones.

    Raises:
      ValueError: If not 0 < old <= new.

    >>> pad(2, 3).dense().write.tolist()
    [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    """
    check_growth(old, new)
    is_old = np.arange(new) < old
    # A gather requires an old unit for each new unit. The copies for fresh units are multiplied by
    # zero.
    index = np.where(is_old, np.arange(new), 0)
    entries = is_old.astype(float)
    return select(index, old, write=entries, read=entries, family=Family.SELECTION)


def prune(keep: ArrayLike, old: int) -> SpaceMap:
    """Keeps some units and drops the others, whose outputs are lost. SELECTION.

    Args:
      keep: The units to keep, distinct integers of shape (new,), in their new order.
      old: The number of units.

    Returns:
      The map of `old` units to `new` units.

    Raises:
      TypeError: If `keep` is a mask, or does not contain integers.
      ValueError: If `keep` repeats a unit, leaves range(old), or is not a vector.

    >>> prune(jnp.array([2, 0]), 3).dense().write.tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    keep = as_array(keep)
    if keep.dtype == bool:
        raise TypeError("keep must hold the numbers of units, got a mask: use jnp.flatnonzero")
    values = concrete(keep)
    if values is not None and len(np.unique(values)) != values.size:
        raise ValueError(f"keep must not repeat a unit, got {values}")
    return select(keep, old, family=Family.SELECTION)


def rotate(Q: Float[ArrayLike, "n n"]) -> SpaceMap:
    """Rotates (or reflects) a space: `write = Q` and `read = Q.T`. ORTHOGONAL.

    Args:
      Q: An orthogonal matrix, of shape (n, n).

    Returns:
      The map of n units to n units, in dense form.

    Raises:
      ValueError: If Q is not square, or not orthogonal up to rounding (not checked under tracing).

    >>> str(rotate(jnp.array([[0.0, -1.0], [1.0, 0.0]])).family)
    'orthogonal'
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
    """Multiplies units by positive scales. POSITIVE_MONOMIAL and INVERTIBLE.

    Readers are divided by the same scales, so their outputs do not change.

    Args:
      scale: The factor on each unit, of shape (n,).

    Returns:
      The map of n units to n units.

    Raises:
      ValueError: If a scale is not positive and finite (not checked under tracing).

    >>> m = rescale(jnp.array([2.0, 4.0]))
    >>> m.write.scale.tolist(), m.read.scale.tolist()
    ([2.0, 4.0], [0.5, 0.25])
    """
    scale = as_array(scale)
    values = concrete(scale)
    if values is not None and not np.all((values > 0) & np.isfinite(values)):
        raise ValueError(f"scale must be positive and finite, got {values}")
    family = Family.POSITIVE_MONOMIAL | Family.INVERTIBLE
    return select(np.arange(scale.size), scale.size, write=scale, read=1 / scale, family=family)


def flip(signs: ArrayLike) -> SpaceMap:
    """Changes the signs of units, and of their readers. SIGNED_PERMUTATION.

    Args:
      signs: The sign of each unit, +1 or -1, of shape (n,).

    Returns:
      The map of n units to n units.

    Raises:
      ValueError: If a sign is neither +1 nor -1 (not checked under tracing).

    >>> flip(jnp.array([1, -1])).dense().write.tolist()
    [[1.0, 0.0], [0.0, -1.0]]
    """
    signs = as_array(signs)
    values = concrete(signs)
    if values is not None and not np.isin(values, (-1, 1)).all():
        raise ValueError(f"signs must be +1 or -1, got {values}")
    n = signs.size
    return select(np.arange(n), n, write=signs, read=signs, family=Family.SIGNED_PERMUTATION)


def lemon_gain(old: int, new: int) -> float:
    r"""Computes eta, LEMON's correction for a LayerNorm over a space that is tiled with averages.

    .. math:: \eta = \sqrt{\lfloor n' / n \rfloor \, n / n'}, \qquad n = old, \quad n' = new

    eta is the factor by which the standard deviation of the space changes. Of the `new` units,
    floor(new / old) * old are copies. The others contain the mean and do not contribute to the
    variance. LEMON multiplies the gain of the norm by eta, and its epsilon by eta^2.

    Args:
      old: The number of units.
      new: The number of units after growth, at least `old`.

    Returns:
      eta, in (0, 1]; 1 if `new` is a multiple of `old`.

    Raises:
      ValueError: If not 0 < old <= new.

    References:
      Wang et al., LEMON: Lossless model expansion, 2024 (arXiv 2310.07999).

    >>> round(lemon_gain(4, 6), 4), lemon_gain(4, 8)
    (0.8165, 1.0)
    """
    check_growth(old, new)
    return (new // old * old / new) ** 0.5


@partial(jax.jit, static_argnums=(1, 2, 3))
def _dealt(key: PRNGKeyArray, old: int, new: int, even: bool) -> Int[Array, "new"]:
    """Lists the old units in order, then random units; with `even`, random orders of all units."""
    if even:
        deal = jax.vmap(partial(jax.random.permutation, x=old))
        drawn = deal(jax.random.split(key, new // old - 1)).reshape(-1)
    else:
        drawn = jax.random.randint(key, (new - old,), 0, old)
    return jnp.concatenate([jnp.arange(old), drawn])


def duplicate(index: Int[ArrayLike, "new"], old: int, family: Family) -> SpaceMap:
    """Makes the map that copies units and divides their readers evenly.

    Args:
      index: The old unit that each new unit copies, integers of shape (new,).
      old: The number of units.
      family: The family that the map claims.

    Returns:
      The map of `old` units to `new` units. If the number of units does not change, it is
      `identity(old)`.

    Raises:
      TypeError: If `index` does not contain integers.
      ValueError: If `index` is not a vector or leaves range(old).
    """
    if np.size(index) == old:
        return identity(old)
    # This is called only for its checks. The scales depend on the counts below.
    select(index, old)
    copied = as_array(index)
    values = concrete(copied)
    if values is None:
        count = jnp.zeros(old).at[copied].add(1)
        return select(copied, old, read=1 / count[copied], family=family)
    # Counts are computed on the host, because JAX would compile a program for every size.
    count = np.bincount(values, minlength=old)
    return select(copied, old, read=1 / count[values], family=family)


def check_growth(old: int, new: int) -> None:
    """Checks that 0 < old <= new."""
    if not 0 < old <= new:
        raise ValueError(f"growth needs 0 < old <= new, got old={old}, new={new}")
