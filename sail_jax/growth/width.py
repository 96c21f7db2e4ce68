"""Makers that change the size of a space, and the published methods that combine them.

A maker returns the map of one space. A method (`fpi`, `hypercloning`, `lemon`) takes a spec and the
new sizes, and returns one map per space. With `lossless=True` it refuses every space that
`exactness` reports as lossy.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from sail_jax import linalg
from sail_jax.basis.certificate import exactness
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, identity, select
from sail_jax.basis.spaces import Spec
from sail_jax.checks import concrete, one_key, one_of
from sail_jax.growth.basic import check_growth, lemon_gain, widen
from sail_jax.growth.fresh import leaf_key

Options = Mapping[str, Any]
"""The options of a growth method: numbers, words, or nothing."""
Make = Callable[[int, int, set[str], PRNGKeyArray | None], SpaceMap]
"""A function that makes the map of one space; see `each_space`."""
Widths = Callable[[Spec, Mapping[str, int], PRNGKeyArray | None, Options], dict[str, SpaceMap]]
"""A function of a spec, new sizes, a key and options that makes a map for each changed space.
"""


def project(
    old: int, new: int, key: PRNGKeyArray, *, how: Literal["orthogonal", "gaussian"] = "orthogonal"
) -> SpaceMap:
    """Projects a space at random to more or fewer units, keeping the mean square of its units.

    Args:
      old: The number of units.
      new: The number of units after projection.
      key: A PRNG key.
      how: "orthogonal" is a random embedding with `write.T @ write == new/old * I`. `read` is its
        inverse on its range. It is ISOMETRIC, and therefore exact in an "rmsnorm" space without
        gains. "gaussian" has independent entries N(0, 1/old), which keep the mean square in
        expectation. `read` is the pseudo-inverse. It is LINEAR. With `new < old`, "orthogonal" has
        orthonormal rows, and both are LINEAR and lossy.

    Returns:
      The map of `old` units to `new` units, in dense form.

    Raises:
      ValueError: If a size is not positive, or `how` is unknown.

    References:
      Structured-Initialization Learning (SAIL), Sec. 4.1.

    >>> str(project(2, 4, jax.random.key(0)).family)
    'isometric'
    """
    one_key(key)
    if min(old, new) < 1:
        raise ValueError(f"sizes must be positive, got old={old}, new={new}")
    one_of("how", how, ("orthogonal", "gaussian"))
    if how == "gaussian":
        write = jax.random.normal(key, (new, old)) / old**0.5
        return SpaceMap(write, linalg.pinv(write))
    n, m = max(old, new), min(old, new)
    Q, R = linalg.qr(jax.random.normal(key, (n, m)))
    # QR does not fix the signs of R's diagonal. With positive signs, Q is uniform (Haar) for a
    # Gaussian matrix.
    Q = Q * jnp.sign(jnp.diagonal(R))
    # Random orthonormal rows keep the mean square on average without a factor: E |write x|^2 / new
    # = |x|^2 / old.
    if new < old:
        return SpaceMap(Q.T, Q)
    scale = (new / old) ** 0.5
    return SpaceMap(scale * Q, Q.T / scale, Family.ISOMETRIC)


def interpolate(old: int, new: int) -> SpaceMap:
    """Interpolates units linearly, as samples of a function on [0, 1] with fixed ends.

    It also works for layers. Rows of `write` are nonnegative and sum to one, and `read` is the
    pseudo-inverse. LINEAR. The map is lossless for a linear reader if `write` has full column rank.

    Args:
      old: The number of units.
      new: The number of units after interpolation, more or fewer.

    Returns:
      The map of `old` units to `new` units.

    Raises:
      ValueError: If a size is not positive.

    References:
      Structured-Initialization Learning (SAIL), Sec. 4.1.

    >>> interpolate(2, 3).write.tolist()
    [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]
    """
    if min(old, new) < 1:
        raise ValueError(f"sizes must be positive, got old={old}, new={new}")
    if old == new:
        return identity(old)
    # The position of each new unit between the old ones, from 0 to old - 1.
    at = np.linspace(0, old - 1, new)
    # Each row has the weights of linear interpolation, hat functions at its position.
    write = jnp.asarray(np.maximum(1 - np.abs(at[:, None] - np.arange(old)), 0), float)
    return SpaceMap(write, linalg.pinv(write))


def split_readers(m: SpaceMap, weights: Float[ArrayLike, "new"]) -> SpaceMap:
    """Divides the readers of each unit among its copies in proportion to weights.

    The units and `read @ write` do not change. Uneven shares break the symmetry of copies (LEMON's
    alpha + beta = 1).

    Args:
      m: A map in index form. Its old `read` is ignored.
      weights: The share of each new unit, of shape (new,), up to a factor for each old unit.

    Returns:
      The map with the same `write`, index and family, and the new `read`.

    Raises:
      ValueError: If the map is dense, or `weights` has another shape. If the weights of a unit's
        copies sum to 0 or are not finite (not checked under tracing).

    References:
      Wang et al., LEMON: Lossless model expansion, 2024 (arXiv 2310.07999).

    >>> split_readers(widen(1, 2), jnp.array([3.0, 1.0])).read.scale.tolist()
    [0.75, 0.25]
    """
    if m.index is None:
        raise ValueError("split_readers needs a map in index form: in a dense one, set read")
    weights = jnp.asarray(weights, float)
    if weights.shape != (m.new,):
        raise ValueError(f"weights must have the shape ({m.new},), got {weights.shape}")
    write, _ = m.entries
    total, read = _divided(weights, write, m.index, m.old)
    values = concrete(total)
    if values is not None and not np.all(np.isfinite(values) & (values != 0)):
        bad = np.flatnonzero(~(np.isfinite(values) & (values != 0)))
        raise ValueError(f"the weights of the copies of units {bad[:8].tolist()} must not sum to 0")
    return select(m.index, m.old, write=write, read=read, family=m.family)


@partial(jax.jit, static_argnums=3)
def _divided(
    weights: Array, write: Array | None, index: Array, old: int
) -> tuple[Float[Array, "old"], Float[Array, "new"]]:
    """Computes the total weight of the copies of each old unit, and the share of each new unit."""
    # The shares of all copies, times their write factors, must add up to one: sum_j read_j write_j
    # = 1 for each old unit.
    total = jnp.zeros(old).at[index].add(weights if write is None else weights * write)
    read = weights / total[index]
    return total, read if write is None else jnp.where(write == 0, 0, read)


def tile(
    old: int,
    new: int,
    remainder: Literal["circ", "zero", "average"] = "circ",
    *,
    weights: Float[ArrayLike, "new"] | None = None,
    isometric: bool = False,
) -> SpaceMap:
    """Tiles a space with copies of its units, then fills the remainder (LEMON).

    There are `new // old` copies of all units and a remainder of `new % old` units. Units that
    "zero" and "average" add are not read. Without a remainder this is `widen`: EVEN_DUPLICATION.

    "average" is suitable for a LayerNorm. If its epsilon becomes eta^2 epsilon with eta =
    `lemon_gain`, the norm computes copies of its old output divided by eta, and zeros. Its gain
    must be multiplied by eta, which a map cannot do; see `scale_norms`. "zero" with `isometric` is
    suitable for an RMSNorm. It divides the copies by eta, which keeps the mean square, so the
    norm's output stays the same with unchanged epsilon and gain.

    Args:
      old: The number of units.
      new: The number of units after tiling, at least `old`.
      remainder: The last `new % old` units. "circ": copies of the first units (V_circ), SELECTION.
        "zero": zeros (V_zero), SELECTION. "average": the mean over the old units (V_avg), LINEAR.
      weights: The proportions in which copies share their readers, of shape (new,); see
        `split_readers`. Equal by default.
      isometric: Whether to keep the mean square; POSITIVE_MONOMIAL and ISOMETRIC.

    Returns:
      The map of `old` units to `new` units.

    Raises:
      ValueError: If not 0 < old <= new, `remainder` is unknown, or `isometric` is set without
        "zero". If `weights` has another shape, or sums to 0 over the copies of a unit.

    References:
      Wang et al., LEMON: Lossless model expansion, 2024 (arXiv 2310.07999).

    >>> tile(2, 3, "zero").dense().write.tolist()
    [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    """
    check_growth(old, new)
    one_of("remainder", remainder, ("circ", "zero", "average"))
    if isometric and remainder != "zero":
        raise ValueError(f"isometric needs the remainder 'zero', got {remainder!r}")
    if new % old == 0 or remainder == "circ":
        m = widen(old, new)
        return m if weights is None else split_readers(m, weights)
    end = new - new % old
    copied = np.arange(new) < end
    write = copied.astype(float) / (lemon_gain(old, new) if isometric else 1)
    index = np.where(copied, np.arange(new) % old, 0)
    family = Family.SELECTION
    if isometric:
        family = Family.POSITIVE_MONOMIAL | Family.ISOMETRIC
    m = select(index, old, write=write, read=write, family=family)
    shares = np.ones(new) if weights is None else jnp.asarray(weights, float)
    if shares.shape != (new,):
        raise ValueError(f"weights must have the shape ({new},), got {shares.shape}")
    # The remainder is not read. An old unit is read only through its copies.
    m = split_readers(m, jnp.where(copied, shares, 0))
    if remainder == "zero":
        return m
    m = m.dense()
    return SpaceMap(jnp.where(copied[:, None], jnp.asarray(m.write), 1 / old), m.read)


def compensate(m: SpaceMap, gram: Float[ArrayLike, "old old"], *, ridge: float = 0.0) -> SpaceMap:
    r"""Chooses new readers for a space by least squares over its activations.

    `read` minimises the expected error over activations x, plus a ridge penalty:

    .. math:: \mathrm{E} \, | x - \mathrm{read} \, \mathrm{write} \, x |^2

    After `prune` or `principal`, the readers of the remaining units then compensate for the removed
    directions. If the removed units were linear in the kept units, the network is preserved on
    these data, although `read @ write` is not the identity.

    Args:
      m: The map. Its `write` does not change.
      gram: E x x^T over the activations x of the readers (not centred), of shape (old, old).
      ridge: A number that is added to the diagonal of `write @ gram @ write.T`, relative to the
        mean of that diagonal.

    Returns:
      The map in dense form with the new `read`, and the same family (without INVERTIBLE if sizes
      differ).

    Raises:
      ValueError: If `gram` has another shape, or is not symmetric (not checked under tracing).
    """
    G = jnp.asarray(gram, float)
    if G.shape != (m.old, m.old):
        raise ValueError(f"gram must have shape {(m.old, m.old)}, got {G.shape}")
    values = concrete(G)
    if values is not None and not np.abs(values - values.T).max() <= 1e-4 * np.abs(values).max():
        raise ValueError("gram must be symmetric")
    write = jnp.asarray(m.dense().write)
    read = _least_squares(write, G, ridge)
    return SpaceMap(write, read, m.family & ~Family.INVERTIBLE if m.new != m.old else m.family)


@jax.jit
def _least_squares(write: Array, G: Array, ridge: float) -> Float[Array, "old new"]:
    """Computes G write^T (write G write^T + ridge)^-1, with a pseudo-inverse."""
    small = write @ G @ write.T
    # The ridge is relative to the mean eigenvalue, so it does not depend on the scale of
    # activations.
    small = small + ridge * jnp.trace(small) / len(write) * jnp.eye(len(write))
    # Units that are kept twice, or are never active, make the matrix singular.
    return G @ write.T @ linalg.pinv(small, hermitian=True)


def principal(gram: Float[ArrayLike, "old old"], new: int) -> SpaceMap:
    """Keeps the leading principal axes of the activations of a space, largest first (SliceGPT).

    Of all maps onto `new` units, this one has the smallest mean loss for a linear reader over these
    activations. `read` is `write.T`. ORTHOGONAL for `new == old`, otherwise LINEAR and lossy.
    Gradients do not flow through the axes, because axes with equal eigenvalues are arbitrary.

    Args:
      gram: E x x^T over the activations x of the space, of shape (old, old); symmetric.
      new: The number of units to keep, at most `old`.

    Returns:
      The map of `old` units to `new` units, in dense form.

    Raises:
      ValueError: If `gram` is not square, or not 0 < new <= old.

    References:
      Ashkboos et al., SliceGPT, 2024 (arXiv 2401.15024).

    >>> jnp.abs(principal(jnp.diag(jnp.array([1.0, 9.0])), 1).write).round(3).tolist()
    [[0.0, 1.0]]
    """
    G = jnp.asarray(gram, float)
    if G.ndim != 2 or G.shape[0] != G.shape[1]:
        raise ValueError(f"gram must be square, got shape {G.shape}")
    if not 0 < new <= len(G):
        raise ValueError(f"principal needs 0 < new <= old, got old={len(G)}, new={new}")
    # `eigh` orders from the smallest eigenvalue, and its vectors are columns.
    write = linalg.eigh(lax.stop_gradient(G))[1][:, ::-1][:, :new].T
    return SpaceMap(write, write.T, Family.ORTHOGONAL if new == len(G) else Family.LINEAR)


def singular(
    theta: Float[ArrayLike, "in out"],
    new_in: int,
    new_out: int,
    *,
    key: PRNGKeyArray | None = None,
) -> tuple[Float[Array, "new_in in"], Float[Array, "new_out out"]]:
    r"""Makes the two matrices of SAIL's width transformation from a singular value decomposition.

    With :math:`\theta = U S V^T` and the leading r' singular vectors :math:`\tilde U` and
    :math:`\tilde V`,

    .. math::

        C_{in} = W_{in} \tilde U^T, \qquad C_{out} = W_{out} \tilde V^T,
        \qquad C_{in} \theta C_{out}^T = W_{in} \tilde S W_{out}^T

    Here r' = min(new_in, new_out, in, out) is the largest rank of the result. The paper leaves W
    free; `key` selects one of two choices. The paper prints :math:`\tilde U` as [new_in, r'], which
    does not conform. Gradients do not flow through the singular vectors, because vectors with equal
    singular values are arbitrary.

    Args:
      theta: The matrix, of shape (in, out).
      new_in: The new number of rows.
      new_out: The new number of columns.
      key: With a key, W has independent entries N(0, 1/new), which keep the squared norm of S~ in
        expectation. Without a key, W contains the singular vectors, padded with zeros or cut. The
        result is then theta's best approximation of rank r', padded or cut.

    Returns:
      C_in of shape (new_in, in), and C_out of shape (new_out, out).

    Raises:
      ValueError: If theta is not a matrix, or a size is not positive.

    References:
      Structured-Initialization Learning (SAIL), App. F.1.

    >>> theta = jnp.array([[2.0]])
    >>> c_in, c_out = singular(theta, 2, 1)
    >>> (c_in @ theta @ c_out.T).round(3).tolist()
    [[2.0], [0.0]]
    """
    one_key(key, optional=True)
    theta = jnp.asarray(theta, float)
    if theta.ndim != 2:
        raise ValueError(f"theta must be a matrix, got shape {theta.shape}")
    if min(new_in, new_out) < 1:
        raise ValueError(f"sizes must be positive, got new_in={new_in}, new_out={new_out}")
    U, _, Vt = linalg.svd(lax.stop_gradient(theta), full_matrices=False)
    # This is r' of the paper, or less if theta's shape limits the rank.
    rank = min(new_in, new_out, *theta.shape)
    keys = (None, None) if key is None else jax.random.split(key)
    sides = ((U, new_in, keys[0]), (Vt.T, new_out, keys[1]))
    c_in, c_out = (lift(basis[:, :rank], new, k) @ basis[:, :rank].T for basis, new, k in sides)
    return c_in, c_out


def lift(basis: Array, new: int, key: Array | None) -> Float[Array, "new rank"]:
    """Makes W of `singular` for one side: random, or the basis padded or cut to `new` rows.

    `basis` is `(old, rank)`.
    """
    old, rank = basis.shape
    if key is not None:
        return jax.random.normal(key, (new, rank)) / new**0.5
    return jnp.pad(basis[:new], ((0, max(new - old, 0)), (0, 0)))


def fpi(
    spec: Spec, sizes: Mapping[str, int], *, key: PRNGKeyArray, lossless: bool = False
) -> dict[str, SpaceMap]:
    """Makes the maps of bert2BERT's function-preserving initialisation (FPI).

    Each space is widened as in Net2Net: random units are copied, and their readers are divided
    evenly (`widen`). All uses of a space share its map. The method therefore works for whole
    networks, and head by head if heads are a space.

    The maps are SELECTION, and exact for any elementwise nonlinearity. They are not exact before a
    LayerNorm or RMSNorm, which needs equally many copies of each unit (`hypercloning`).

    Args:
      spec: The spaces of the parameters.
      sizes: The new size of each space that grows, by name.
      key: A PRNG key for the copied units. The draws also depend on the name of each space.
      lossless: Whether to refuse maps that `exactness` reports as lossy.

    Returns:
      A map for each space of `sizes`.

    Raises:
      ValueError: If a space is unknown to the spec, a space would shrink, or `lossless` is set and
        a map is lossy. The message contains the space.

    References:
      Chen et al., bert2BERT, 2022 (arXiv 2110.07143).
      Chen et al., Net2Net, 2016 (arXiv 1511.05641).

    >>> from sail_jax.basis.spaces import spec
    >>> s = spec({"bias": jnp.zeros(2)}, {"bias": "h"}, spaces={"h": "outer"})
    >>> fpi(s, {"h": 3}, key=jax.random.key(0))["h"].new
    3
    """

    one_key(key)

    def make(old: int, new: int, words: set[str], key: PRNGKeyArray | None) -> SpaceMap:
        return widen(old, new, key=key)

    return _checked(spec, each_space(make)(spec, sizes, key, {}), lossless)


def hypercloning(
    spec: Spec, sizes: Mapping[str, int], *, lossless: bool = False
) -> dict[str, SpaceMap]:
    """Makes the maps of HyperCloning: every space is tiled, by integer factors only.

    The maps are EVEN_DUPLICATION, and exact under LayerNorm and RMSNorm too. A tied leaf must be
    untied first. The copies stay equal in training until noise separates them; see `noise_pairs`.

    Args:
      spec: The spaces of the parameters.
      sizes: The new size of each space that grows, by name, a multiple of the old size.
      lossless: Whether to refuse maps that `exactness` reports as lossy.

    Returns:
      A map for each space of `sizes`.

    Raises:
      ValueError: If a space is unknown to the spec, a space would shrink, or a new size is not a
        multiple of the old size. If `lossless` is set and a map is lossy. The message contains the
        space.

    References:
      Samragh et al., Scaling Smart (HyperCloning), 2024 (arXiv 2409.12903).

    >>> from sail_jax.basis.spaces import spec
    >>> s = spec({"bias": jnp.zeros(2)}, {"bias": "h"}, spaces={"h": "outer"})
    >>> hypercloning(s, {"h": 4})["h"].index.tolist()
    [0, 1, 0, 1]
    """
    for name, new in sizes.items():
        if new % spec.space(name).size:
            raise ValueError(
                f"hypercloning takes integer factors, but space {name!r} goes from "
                f"{spec.space(name).size} to {new} units: use lemon"
            )

    def make(old: int, new: int, words: set[str], key: PRNGKeyArray | None) -> SpaceMap:
        return widen(old, new, even=True)

    return _checked(spec, each_space(make)(spec, sizes, None, {}), lossless)


def lemon(
    spec: Spec,
    sizes: Mapping[str, int],
    *,
    key: PRNGKeyArray | None = None,
    lossless: bool = False,
) -> dict[str, SpaceMap]:
    """Makes the maps of LEMON, which allows any new size.

    "layernorm" spaces are tiled with averages. "rmsnorm" spaces are tiled with zeros, and their
    copies are divided by eta (`tile`, isometric). All other spaces are tiled circularly.

    A "layernorm" space with a new size that is not a multiple of the old size is exact only under
    two conditions. `scale_norms` must be applied, with epsilon times `lemon_gain(old, new)**2`, and
    every leaf that writes the space must use the map. `exactness` judges only maps, and reports
    such a space as lossy.

    Args:
      spec: The spaces of the parameters.
      sizes: The new size of each space that grows, by name.
      key: With a key, copies outside "rmsnorm" and "layernorm" spaces share their readers unevenly,
        which breaks their symmetry. Without a key, they share evenly.
      lossless: Whether to refuse maps that `exactness` reports as lossy.

    Returns:
      A map for each space of `sizes`.

    Raises:
      ValueError: If a space is unknown to the spec, a space would shrink, or `lossless` is set and
        a map is lossy. The message contains the space.

    References:
      Wang et al., LEMON: Lossless model expansion, 2024 (arXiv 2310.07999).

    >>> from sail_jax.basis.spaces import spec
    >>> s = spec({"bias": jnp.zeros(2)}, {"bias": "h"}, spaces={"h": "outer"})
    >>> lemon(s, {"h": 3})["h"].index.tolist()
    [0, 1, 0]
    """

    one_key(key, optional=True)

    def make(old: int, new: int, words: set[str], key: PRNGKeyArray | None) -> SpaceMap:
        if "layernorm" in words:
            return tile(old, new, "average")
        if "rmsnorm" in words:
            return tile(old, new, "zero", isometric=new % old != 0)
        weights = None
        if key is not None:
            weights = jax.random.uniform(key, (new,), minval=0.25, maxval=0.75)
        return tile(old, new, "circ", weights=weights)

    return _checked(spec, each_space(make)(spec, sizes, key, {}), lossless)


def each_space(make: Make) -> Widths:
    """Makes a method that maps every growing space with the same function.

    Args:
      make: A function that makes the map of a space. Its arguments are the old size, the new size,
        the words of the nonlinearity, and a key (or None).

    Returns:
      The `widths` of a growth method, a function of the spec, the new sizes, a key and options. It
      raises a ValueError if a space is unknown to the spec or would shrink.

    >>> from sail_jax.basis.spaces import spec
    >>> s = spec({"bias": jnp.zeros(2)}, {"bias": "h"}, spaces={"h": "outer"})
    >>> halves = each_space(lambda old, new, words, key: widen(old, new))
    >>> halves(s, {"h": 3}, None, {})["h"].index.tolist()
    [0, 1, 0]
    """

    def widths(
        spec: Spec, sizes: Mapping[str, int], key: PRNGKeyArray | None, options: Options
    ) -> dict[str, SpaceMap]:
        maps = {}
        for name, new in sizes.items():
            _, old, words = spec.space(name)
            if new < old:
                raise ValueError(
                    f"space {name!r} has {old} units (leaf {spec.uses(name)[0].path!r}), more than "
                    f"the {new} asked for: to shrink it use prune or principal"
                )
            own = None if key is None else leaf_key(key, name)
            maps[name] = make(old, new, set(words.split()), own)
        return maps

    return widths


def _checked(spec: Spec, maps: dict[str, SpaceMap], lossless: bool) -> dict[str, SpaceMap]:
    """Returns the maps; with `lossless`, raises a ValueError if `exactness` reports a loss."""
    if lossless and (lost := exactness(spec, maps).lost):
        raise ValueError(f"lossless growth was asked for, but {lost}")
    return maps
