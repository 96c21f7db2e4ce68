"""Makers that change the size of a space, and the published methods that choose among them.

A maker returns the map of one space. A method (`fpi`, `hypercloning`, `lemon`) takes a spec and
the new sizes and returns a map per space; `lossless=True` makes it refuse, space by space, what
`exactness` does not report exact.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from sail_jax.basis.certificate import exactness
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, identity, select
from sail_jax.basis.spaces import Spec
from sail_jax.checks import concrete
from sail_jax.growth.basic import check_growth, lemon_gain, widen
from sail_jax.growth.fresh import leaf_key

__all__ = [
    "compensate",
    "fpi",
    "hypercloning",
    "interpolate",
    "lemon",
    "principal",
    "project",
    "singular",
    "split_readers",
    "tile",
]


def project(
    old: int, new: int, key: PRNGKeyArray, *, how: Literal["orthogonal", "gaussian"] = "orthogonal"
) -> SpaceMap:
    """A random projection that keeps the mean square of a unit; either size may be the larger.

    "orthogonal": `write.T @ write == new/old I`, a random embedding, read by its inverse on its
    range: ISOMETRIC, exact in an "rmsnorm" space without gains. "gaussian": entries N(0, 1/old),
    the mean square kept in expectation, read by the pseudo-inverse; LINEAR. With `new < old` the
    rows are orthogonal instead, both are LINEAR, and lossy.

    Raises ValueError for sizes that are not positive, or another `how`.
    """
    if min(old, new) < 1:
        raise ValueError(f"sizes must be positive, got old={old}, new={new}")
    if how == "gaussian":
        write = jax.random.normal(key, (new, old)) / old**0.5
        return SpaceMap(write, jnp.linalg.pinv(write))
    if how != "orthogonal":
        raise ValueError(f"how must be 'orthogonal' or 'gaussian', got {how!r}")
    n, m = max(old, new), min(old, new)
    Q, R = jnp.linalg.qr(jax.random.normal(key, (n, m)))
    Q = Q * jnp.sign(jnp.diagonal(R))  # Haar
    if new < old:  # E |write x|^2 / new == |x|^2 / old as it is
        return SpaceMap(Q.T, Q)
    scale = (new / old) ** 0.5
    return SpaceMap(scale * Q, Q.T / scale, Family.ISOMETRIC)


def interpolate(old: int, new: int) -> SpaceMap:
    """Units (or layers) as samples of a function on [0, 1], ends kept, interpolated linearly.

    Rows of `write` are nonnegative and sum to one; `read` is the pseudo-inverse. LINEAR, and
    lossless to a linear reader where `write` has full column rank. Raises ValueError for sizes
    that are not positive.

    >>> interpolate(2, 3).write.tolist()
    [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]
    """
    if min(old, new) < 1:
        raise ValueError(f"sizes must be positive, got old={old}, new={new}")
    if old == new:
        return identity(old)
    at = np.linspace(0, old - 1, new)
    write = jnp.asarray(np.maximum(1 - np.abs(at[:, None] - np.arange(old)), 0), float)
    return SpaceMap(write, jnp.linalg.pinv(write))


def split_readers(m: SpaceMap, weights: Float[ArrayLike, "new"]) -> SpaceMap:
    """The same units, their readers divided among copies in proportion to `weights`, so that
    `read @ write == I` stays: uneven shares break the symmetry of copies (LEMON's alpha + beta
    = 1). Keeps family and index.

    Raises ValueError for a dense map, or a unit whose copies have no weight.
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
        raise ValueError(f"the copies of units {bad[:8].tolist()} have no weight to be read with")
    return select(m.index, m.old, write=write, read=read, family=m.family)


@partial(jax.jit, static_argnums=3)
def _divided(
    weights: Array, write: Array | None, index: Array, old: int
) -> tuple[Float[Array, "old"], Float[Array, "new"]]:
    """The weight of all copies of each old unit, and the share that each new one has of it."""
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
    """`new // old` copies of all units, and the `new % old` units that remain (LEMON, Wang et al.
    2024): "circ" copies the first units once more (V_circ), "zero" adds zeros (V_zero), both
    SELECTION; "average" adds units that hold the mean over the old ones (V_avg), LINEAR. Nothing
    reads the added zeros and averages. `weights` divide the readers among the copies
    (`split_readers`), evenly by default.

    Without remainder this is `widen`: EVEN_DUPLICATION. V_avg makes a LayerNorm compute copies of
    what it did, over eta = `lemon_gain`, and zeros, if its epsilon becomes eta**2 epsilon; its
    gain must be multiplied by eta, which no map does: see `scale_norms`.

    With `isometric` and "zero", copies are divided by eta, which keeps the mean square: RMSNorm
    does the same as before, its epsilon and its gain unchanged. MONOMIAL, ISOMETRIC.

    Raises ValueError if `new < old`, for another remainder, or `isometric` without "zero".
    """
    check_growth(old, new)
    if remainder not in ("circ", "zero", "average"):
        raise ValueError(f"remainder must be 'circ', 'zero' or 'average', got {remainder!r}")
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
    m = split_readers(m, jnp.where(copied, shares, 0))
    if remainder == "zero":
        return m
    m = m.dense()
    return SpaceMap(jnp.where(copied[:, None], jnp.asarray(m.write), 1 / old), m.read)


def compensate(m: SpaceMap, gram: Float[ArrayLike, "old old"], *, ridge: float = 0.0) -> SpaceMap:
    """The same units, read by least squares: `read` minimises E |x - read @ write @ x|^2 + ridge.

    gram: E x x^T over the activations x that the space's readers see (not centred). The readers
    of the units that remain absorb those that are removed or rotated away: for `prune` and
    `principal` alike. ridge: times the mean of the diagonal of `write @ gram @ write.T`, added to
    that diagonal. Keeps the family. Where the removed units were linear in the kept ones, the
    network is preserved on those data, though `read @ write` is not the identity.

    Raises ValueError for another shape, or a gram that is not symmetric.
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
    small = write @ G @ write.T
    small = small + ridge * jnp.trace(small) / len(write) * jnp.eye(len(write))
    # a pseudo-inverse: units kept twice, or silent ones, have no other
    return G @ write.T @ jnp.linalg.pinv(small, hermitian=True)


def principal(gram: Float[ArrayLike, "old old"], new: int) -> SpaceMap:
    """The `new` leading principal axes of the activations, largest first: what a linear reader
    loses least by (the rotation and removal of SliceGPT, Ashkboos et al. 2024). `read` is
    `write.T`. ORTHOGONAL for `new == old`, else LINEAR and lossy.

    Raises ValueError unless `gram` is square and 0 < new <= old.
    """
    G = jnp.asarray(gram, float)
    if G.ndim != 2 or G.shape[0] != G.shape[1]:
        raise ValueError(f"gram must be square, got shape {G.shape}")
    if not 0 < new <= len(G):
        raise ValueError(f"principal needs 0 < new <= old, got old={len(G)}, new={new}")
    write = jnp.linalg.eigh(G)[1][:, ::-1][:, :new].T
    return SpaceMap(write, write.T, Family.ORTHOGONAL if new == len(G) else Family.LINEAR)


def singular(
    theta: Float[ArrayLike, "in out"],
    new_in: int,
    new_out: int,
    *,
    key: PRNGKeyArray | None = None,
) -> tuple[Float[Array, "new_in in"], Float[Array, "new_out out"]]:
    """C_in, C_out of `C_in @ theta @ C_out.T`, from the SVD of theta (SAIL, App. F.1).

    C_in = W_in U~^T and C_out = W_out V~^T with the r' = min(new_in, new_out, in, out) leading
    singular vectors U~ [in, r'], V~ [out, r'] (the paper prints U~ as [new_in, r'], which does
    not conform), so that the result is W_in S~ W_out^T, of rank r' at most. W is the paper's free
    choice: with a key, entries N(0, 1/new), which keeps the squared norm of S~ in expectation;
    without, the singular vectors themselves, padded with zeros or cut: theta's best approximation
    of rank r', padded or cut.

    Raises ValueError unless theta is a matrix and the sizes are positive.
    """
    theta = jnp.asarray(theta, float)
    if theta.ndim != 2:
        raise ValueError(f"theta must be a matrix, got shape {theta.shape}")
    if min(new_in, new_out) < 1:
        raise ValueError(f"sizes must be positive, got new_in={new_in}, new_out={new_out}")
    U, _, Vt = jnp.linalg.svd(theta, full_matrices=False)
    rank = min(new_in, new_out, *theta.shape)
    keys = (None, None) if key is None else jax.random.split(key)
    sides = ((U, new_in, keys[0]), (Vt.T, new_out, keys[1]))
    c_in, c_out = (_lift(basis[:, :rank], new, k) @ basis[:, :rank].T for basis, new, k in sides)
    return c_in, c_out


def _lift(basis: Array, new: int, key: Array | None) -> Float[Array, "new rank"]:
    old, rank = basis.shape
    if key is not None:
        return jax.random.normal(key, (new, rank)) / new**0.5
    return jnp.pad(basis[:new], ((0, max(new - old, 0)), (0, 0)))


def fpi(
    spec: Spec, sizes: Mapping[str, int], *, key: PRNGKeyArray, lossless: bool = False
) -> dict[str, SpaceMap]:
    """Net2WiderNet on every named space (Chen et al. 2016): random units are copied, readers
    divided evenly. As all uses of a space share its map, this is bert2BERT's function-preserving
    initialisation (Chen et al. 2022), head by head where heads are a space.

    SELECTION: exact for any elementwise nonlinearity, not before a LayerNorm or RMSNorm, whose
    statistics need copies in equal numbers (`hypercloning`). Raises ValueError as `lemon` does.
    """
    return _method(spec, sizes, lossless, lambda n, o, w, k: widen(o, k, key=leaf_key(key, n)))


def hypercloning(
    spec: Spec, sizes: Mapping[str, int], *, lossless: bool = False
) -> dict[str, SpaceMap]:
    """Tile every named space (HyperCloning, Samragh et al. 2024): integer factors only.

    EVEN_DUPLICATION: exact under LayerNorm and RMSNorm too. A tied leaf must be untied first. The
    copies stay equal in training until noise tells them apart: see `noise_pairs`. Raises
    ValueError, naming the space, unless its new size is a multiple; else as `lemon` does.
    """
    for name, new in sizes.items():
        if new % spec.space(name).size:
            raise ValueError(
                f"hypercloning takes integer factors, but space {name!r} goes from "
                f"{spec.space(name).size} to {new} units: use lemon"
            )
    return _method(spec, sizes, lossless, lambda n, o, w, k: widen(o, k, even=True))


def lemon(
    spec: Spec,
    sizes: Mapping[str, int],
    *,
    key: PRNGKeyArray | None = None,
    lossless: bool = False,
) -> dict[str, SpaceMap]:
    """LEMON (Wang et al. 2024): any new size. "layernorm" spaces are tiled with averages, all
    others circularly; "rmsnorm" spaces with zeros, copies divided by eta (`tile`, isometric).

    With a key, the copies outside of "rmsnorm" and "layernorm" share their readers unevenly,
    which breaks their symmetry. A "layernorm" space whose size is no multiple is exact only
    after `scale_norms`, and with epsilon times `lemon_gain(old, new)**2`, and if all that writes
    it is re-expressed; `exactness` judges maps alone and so does not report it exact.

    Raises ValueError, naming the space, if it is none of the spec or would shrink; with
    `lossless`, also with the sentences of `exactness`, if that reports anything lost.
    """

    def make(name: str, old: int, words: list[str], new: int) -> SpaceMap:
        if "layernorm" in words:
            return tile(old, new, "average")
        if "rmsnorm" in words:
            return tile(old, new, "zero", isometric=new % old != 0)
        weights = None
        if key is not None:
            weights = jax.random.uniform(leaf_key(key, name), (new,), minval=0.25, maxval=0.75)
        return tile(old, new, "circ", weights=weights)

    return _method(spec, sizes, lossless, make)


def _method(
    spec: Spec,
    sizes: Mapping[str, int],
    lossless: bool,
    make: Callable[[str, int, list[str], int], SpaceMap],
) -> dict[str, SpaceMap]:
    maps = {}
    for name, new in sizes.items():
        _, old, words = spec.space(name)
        if new < old:
            raise ValueError(
                f"space {name!r} has {old} units (leaf {spec.uses(name)[0].path!r}), more than "
                f"the {new} asked for: to shrink it use prune or principal"
            )
        maps[name] = make(name, old, words.split(), new)
    if lossless:
        report = exactness(spec, maps)
        if not report.exact:
            sentences = (f"{s.space!r}: {s.reason}" for s in report.spaces if not s.exact)
            raise ValueError("lossless growth was asked for, but " + "; ".join(sentences))
    return maps
