"""Edits grown parameters beyond a change of basis: fresh units, noise, masks.

Functions of a tree take the parameters after `change_basis`, the spec before it, and the maps. They
return parameters with the same shapes and dtypes. A *grown* unit repeats an earlier unit or is
zero. In a dense map, every unit beyond the first `old` is grown.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import Array, ArrayLike, Bool, Float, PRNGKeyArray, PyTree

from sail_jax.basis.axes import Axis, Factor, blocks, path_pattern
from sail_jax.basis.change_basis import by_block
from sail_jax.basis.maps import SpaceMap
from sail_jax.basis.spaces import Spec
from sail_jax.checks import as_array, nearest, one_key
from sail_jax.growth.basic import lemon_gain
from sail_jax.merging.arithmetic import norm
from sail_jax.trees import leaf_paths, path_str


def leaf_key(key: PRNGKeyArray, name: str) -> PRNGKeyArray:
    """Derives the random key of one leaf or space from its name.

    Random numbers from it depend only on the name and the key, not on other draws or their order.
    """
    # A checksum, because Python's `hash` differs between processes.
    return jax.random.fold_in(key, np.uint32(zlib.crc32(name.encode())))


def grown(m: SpaceMap) -> Bool[Array, "new"]:
    """Computes a mask of the grown units of a map.

    Args:
      m: The map.

    Returns:
      A mask of shape (new,). It is True for a unit that repeats an earlier unit or is zero. In a
      dense map, it is True beyond the first `old` units.

    >>> from sail_jax.growth import widen
    >>> grown(widen(2, 3)).tolist()
    [False, False, True]
    """
    at = jnp.arange(m.new)
    if m.index is None:
        return at >= m.old
    write, _ = m.entries
    live = jnp.ones(m.new, bool) if write is None else write != 0
    # The first new unit that copies each old unit. A scatter works for a traced index too.
    first = jnp.full(m.old, m.new).at[m.index].min(jnp.where(live, at, m.new))
    return ~(live & (first[m.index] == at))


class _Place(NamedTuple):
    """A factor of a leaf, for a space with a map.

    Attributes:
      axis: The axis of the factor, after products of spaces are split into one axis each.
      factor: The space and its role.
      map: The map of the space.
    """

    axis: int
    factor: Factor
    map: SpaceMap

    def spread(self, vector: Array, ndim: int) -> Array:
        """Reshapes a vector over the units to broadcast against a leaf with `ndim` axes."""
        return vector.reshape([-1 if k == self.axis else 1 for k in range(ndim)])


_Edit = Callable[[str, Array, tuple[Axis, ...], list[_Place]], Array]


def _edit(params: PyTree, spec: Spec, maps: Mapping[str, SpaceMap], edit: _Edit) -> PyTree:
    """Applies `edit` to every leaf with a mapped space, and to each block of a fused leaf.

    `edit` gets the path, the array (in float32 or float64, with one axis per factor), the axes, and
    the mapped factors.
    """
    resized = spec.resized(maps)

    def leaf(key_path: KeyPath, x: Array) -> Array:
        path = path_str(key_path)
        axes = spec.axes(path)
        if not any(f.space in maps for axis in axes for f in axis):
            return x
        x = as_array(x)
        sizes = [resized.extent(axis) if axis else None for axis in axes]
        fits = x.ndim == len(axes) and all(
            n is None or n == m for n, m in zip(sizes, x.shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"leaf {path!r} has shape {list(x.shape)}, which does not fit the new "
                "basis of these maps: apply change_basis first"
            )
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        fused = any(len(blocks(axis)) > 1 for axis in axes)
        numbers = itertools.count()

        def block(x: Array, axes: tuple[Axis, ...]) -> Array:
            return one(f"{path}[{next(numbers)}]" if fused else path, x, axes)

        # The sizes are those after the maps, because the basis of the array has already changed.
        return by_block(y, axes, resized, block).astype(x.dtype)

    def one(path: str, x: Array, axes: tuple[Axis, ...]) -> Array:
        # Each factor of a product of spaces gets its own axis, because each may have a map.
        factors = [(k, f) for k, axis in enumerate(axes) for f in axis or (None,)]
        places = [
            _Place(k, f, maps[f.space]) for k, (_, f) in enumerate(factors) if f and f.space in maps
        ]
        sizes = [x.shape[k] if f is None else resized.space(f.space).size for k, f in factors]
        return edit(path, x.reshape(sizes), axes, places).reshape(x.shape) if places else x

    return jax.tree.map_with_path(leaf, params)


def _any_grown(places: list[_Place], ndim: int) -> Array:
    """Computes a broadcastable mask of the entries of grown units along any of these axes."""
    out = jnp.zeros((1,) * ndim, bool)
    for place in places:
        out = out | place.spread(grown(place.map), ndim)
    return out


def _rms(x: Array) -> Array:
    """Returns the root mean square."""
    return norm(x) / math.sqrt(x.size)


def fresh_units(
    params: PyTree,
    spec: Spec,
    maps: Mapping[str, SpaceMap],
    key: PRNGKeyArray,
    *,
    std: float = 0.02,
) -> PyTree:
    """Draws new values for the entries of grown units.

    Every entry that belongs to a grown unit along any axis is replaced. In leaves that read a
    space, the new value is a draw from N(0, std^2). In biases it is 0, and in gains 1. After `pad`,
    this is the initialisation of masked structural growth. `mask_units` then makes it
    function-preserving.

    Args:
      params: The parameters after `change_basis`.
      spec: The spec before `change_basis`.
      maps: The maps, by space.
      key: A PRNG key. The draws also depend on the path of each leaf.
      std: The standard deviation of fresh weights.

    Returns:
      The parameters with fresh entries.

    Raises:
      TypeError: If an entry of `maps` is not a `SpaceMap`.
      ValueError: If the maps do not match the spec, or a leaf has another shape than after
        `change_basis`.

    References:
      Yao et al., Masked Structural Growth for 2x Faster Language Model Pre-training, 2023 (arXiv
        2305.02869).

    >>> from sail_jax.basis.spaces import spec
    >>> from sail_jax.growth import pad
    >>> s = spec({"bias": jnp.zeros(2)}, {"bias": "h"}, spaces={"h": "outer"})
    >>> padded = {"bias": jnp.full(3, 5.0)}
    >>> fresh_units(padded, s, {"h": pad(2, 3)}, jax.random.key(0))["bias"].tolist()
    [5.0, 5.0, 0.0]
    """

    one_key(key)

    def edit(path: str, x: Array, axes: tuple[Axis, ...], places: list[_Place]) -> Array:
        factors = [f for axis in axes for f in axis]
        new = initial(factors, leaf_key(key, path), x.shape, std)
        return jnp.where(_any_grown(places, x.ndim), new, x)

    return _edit(params, spec, maps, edit)


def initial(
    factors: Sequence[Factor], key: PRNGKeyArray | None, shape: tuple[int, ...], std: float
) -> Array:
    """Draws a new leaf: gains are 1, leaves that read a space N(0, std^2), biases 0.

    `factors` lists the factors of all axes. `key` may be None if nothing is drawn.
    """
    if any(f.role == "gain" for f in factors):
        # A norm's gain of 1 does not change fresh units.
        return jnp.ones(shape)
    if any(f.role == "read" or f.tied for f in factors):
        assert key is not None
        return std * jax.random.normal(key, shape)
    return jnp.zeros(shape)


def break_symmetry(
    params: PyTree,
    spec: Spec,
    maps: Mapping[str, SpaceMap],
    key: PRNGKeyArray,
    *,
    scale: float = 1e-2,
) -> PyTree:
    """Adds noise to the weights that write grown units, to make copies differ.

    Each entry that writes a grown unit gets a draw from N(0, (scale * rms of the leaf)^2). This is
    the small noise of Net2WiderNet. It does not preserve the function. The output changes in
    proportion to `scale`. `noise_pairs` adds noise that preserves the function.

    Args:
      params: The parameters after `change_basis`.
      spec: The spec before `change_basis`.
      maps: The maps, by space.
      key: A PRNG key. The draws also depend on the path of each leaf.
      scale: The standard deviation of the noise, relative to the rms of each leaf.

    Returns:
      The parameters with noise. Tied leaves, and leaves that do not write a mapped space, do not
      change.

    Raises:
      TypeError: If an entry of `maps` is not a `SpaceMap`.
      ValueError: If the maps do not match the spec, or a leaf has another shape than after
        `change_basis`.

    References:
      Chen et al., Net2Net, 2016 (arXiv 1511.05641).

    >>> from sail_jax.basis.spaces import spec
    >>> from sail_jax.growth import widen
    >>> s = spec({"bias": jnp.zeros(1)}, {"bias": "h"}, spaces={"h": "outer"})
    >>> b = break_symmetry({"bias": jnp.ones(2)}, s, {"h": widen(1, 2)}, jax.random.key(0))["bias"]
    >>> float(b[0]), bool(b[1] == 1)
    (1.0, False)
    """

    one_key(key)

    def edit(path: str, x: Array, axes: tuple[Axis, ...], places: list[_Place]) -> Array:
        writers = _writing(places)
        if not writers:
            return x
        noise = scale * _rms(x) * jax.random.normal(leaf_key(key, path), x.shape)
        # The first copy does not change, which is sufficient to make the copies differ.
        return x + jnp.where(_any_grown(writers, x.ndim), noise, 0)

    return _edit(params, spec, maps, edit)


def noise_pairs(
    params: PyTree,
    spec: Spec,
    maps: Mapping[str, SpaceMap],
    key: PRNGKeyArray,
    *,
    snr_db: float = 20.0,
) -> PyTree:
    """Adds noise to the readers of copies that cancels between the copies.

    In each pair of copies, +N is added to one reader and -N to the other. An odd copy does not
    change. Copies have equal activations, so the function is preserved, while training separates
    the copies. N has the standard deviation rms(leaf) * 10^(-snr_db / 20).

    A leaf gets noise along the first axis that reads a space with a map in index form. Tied leaves
    get no noise. Leaves that read two spaces and write none get no noise either. They are one side
    of a product (queries, keys), which may be normalised.

    Args:
      params: The parameters after `change_basis`.
      spec: The spec before `change_basis`.
      maps: The maps, by space.
      key: A PRNG key. The draws also depend on the path of each leaf.
      snr_db: The ratio of signal to noise in decibels.

    Returns:
      The parameters with noise.

    Raises:
      TypeError: If an entry of `maps` is not a `SpaceMap`.
      ValueError: If the maps do not match the spec, or a leaf has another shape than after
        `change_basis`.

    References:
      Samragh et al., Scaling Smart (HyperCloning), 2024 (arXiv 2409.12903).
    """

    one_key(key)

    def edit(path: str, x: Array, axes: tuple[Axis, ...], places: list[_Place]) -> Array:
        for place in _reading(axes, places):
            if place.map.index is not None:
                source, sign = _pairs(place.map)
                noise = jax.random.normal(leaf_key(key, path), x.shape)
                # Both members of a pair take the draw of the even one, with opposite signs.
                noise = jnp.take(noise, source, axis=place.axis) * place.spread(sign, x.ndim)
                return x + 10 ** (-snr_db / 20) * _rms(x) * noise
        return x

    return _edit(params, spec, maps, edit)


def _reading(axes: tuple[Axis, ...], places: list[_Place]) -> list[_Place]:
    """Lists the axes that read; empty for a leaf that reads two or more spaces and writes none."""
    factors = [f for axis in axes for f in axis]
    if len({f.space for f in factors}) > 1 and all(f.role == "read" for f in factors):
        return []
    return [p for p in places if p.factor.role == "read" and not p.factor.tied]


def _writing(places: list[_Place]) -> list[_Place]:
    """Lists the axes along which a leaf writes."""
    return [p for p in places if p.factor.role == "write" and not p.factor.tied]


def _pairs(m: SpaceMap) -> tuple[Array, Array]:
    """Returns the even member of each new unit's pair, and +-1 / write, or 0 without a pair."""
    write, _ = m.entries
    live = jnp.ones(m.new, bool) if write is None else write != 0
    index = jnp.where(live, jnp.asarray(m.index), m.old)
    # A stable sort makes copies of a unit neighbours. They are paired in order: 0 with 1, 2 with 3.
    # Sorting and counting have fixed shapes, so the index may be traced. Units that are zero sort
    # to the end, as copies of unit number `old`.
    order = jnp.argsort(index, stable=True)
    ranked = index[order]
    at = jnp.arange(m.new)
    rank = at - jnp.searchsorted(ranked, ranked, side="left")
    count = jnp.zeros(m.old + 1, int).at[index].add(1)
    odd = rank % 2
    paired = (ranked < m.old) & (rank + 1 - odd < count[ranked])
    sign = jnp.where(paired, 1.0 - 2.0 * odd, 0.0)
    source = jnp.zeros(m.new, int).at[order].set(order[at - odd])
    sign = jnp.zeros(m.new).at[order].set(sign)
    # A reader receives write times the old unit, so the noise is divided by write to cancel.
    return source, sign if write is None else sign / jnp.where(live, write, 1)


def aki(
    params: PyTree, spec: Spec, maps: Mapping[str, SpaceMap], *, layers: str = "layer"
) -> PyTree:
    """Initialises the new units of each layer from the next layer (AKI).

    This is the advanced knowledge initialisation of bert2BERT. It changes leaves that are stacked
    on the space `layers`. Entries that write a grown unit are replaced by the same entries of the
    next layer. The top layer and all gains keep their entries. The function is not preserved, but
    the new units differ from the old ones.

    Args:
      params: The parameters after widening by `fpi`. Listed layers need `stack_layers` first.
      spec: The spec before the widening.
      maps: The maps of the widening, by space.
      layers: The name of the "stack" space.

    Returns:
      The parameters with units from the next layers.

    Raises:
      TypeError: If an entry of `maps` is not a `SpaceMap`.
      ValueError: If `layers` is not a "stack" space of the spec, or has a map. If the maps do not
        match the spec, or a leaf has another shape than after `change_basis`.

    References:
      Chen et al., bert2BERT, 2022 (arXiv 2110.07143).

    >>> from sail_jax.basis.spaces import spec
    >>> from sail_jax.growth import widen
    >>> biases = {"bias": jnp.array([[1.0], [2.0]])}  # of two layers
    >>> s = spec(biases, {"bias": "layer h"}, spaces={"layer": "stack", "h": "outer"})
    >>> aki({"bias": jnp.array([[1.0, 1.0], [2.0, 2.0]])}, s, {"h": widen(1, 2)})["bias"].tolist()
    [[1.0, 2.0], [2.0, 2.0]]
    """
    if "stack" not in spec.space(layers).nonlinearity.split():
        raise ValueError(f"layers must name a stack space, but {layers!r} is not declared 'stack'")
    if layers in maps:
        raise ValueError(f"widen before you deepen: {layers!r} itself has a map")

    def edit(path: str, x: Array, axes: tuple[Axis, ...], places: list[_Place]) -> Array:
        factors = [f for axis in axes for f in axis or (None,)]
        at = [k for k, f in enumerate(factors) if f and f.space == layers]
        writers = _writing(places)
        if not at or not writers:
            return x
        depth = x.shape[at[0]]
        # The top layer keeps its own entries.
        above = jnp.take(x, jnp.minimum(jnp.arange(depth) + 1, depth - 1), axis=at[0])
        return jnp.where(_any_grown(writers, x.ndim), above, x)

    return _edit(params, spec, maps, edit)


def mask_units(params: PyTree, spec: Spec, maps: Mapping[str, SpaceMap], mask: ArrayLike) -> PyTree:
    """Multiplies grown units by a mask where they are read.

    In a space under a norm (a stream), grown units are also multiplied where they are written,
    because the norm sees them. After `pad`, mask 0 preserves the function for any values of
    `fresh_units`, and mask 1 uses the units fully. The network's norms over such a stream must
    weight their statistics by the same mask, `jnp.where(grown(m), mask, 1)`. `masked_layernorm` and
    `masked_rmsnorm` do this.

    Args:
      params: The parameters after `change_basis`.
      spec: The spec before `change_basis`.
      maps: The maps, by space.
      mask: A number from 0 (absent) to 1. It may be traced. `ramp` is its schedule.

    Returns:
      The parameters, masked.

    Raises:
      TypeError: If an entry of `maps` is not a `SpaceMap`.
      ValueError: If the maps do not match the spec, or a leaf has another shape than after
        `change_basis`.

    References:
      Yao et al., Masked Structural Growth for 2x Faster Language Model Pre-training, 2023 (arXiv
        2305.02869).

    >>> from sail_jax.basis.spaces import spec
    >>> from sail_jax.growth import pad
    >>> s = spec({"out": jnp.zeros((1, 1))}, {"out": "h* y"}, spaces={"{h,y}": "outer"})
    >>> mask_units({"out": jnp.ones((2, 1))}, s, {"h": pad(1, 2)}, 0.25)["out"].tolist()
    [[1.0], [0.25]]
    """
    norms = {"layernorm", "rmsnorm"}
    streams = {n for n in maps if norms & set(spec.space(n).nonlinearity.split())}

    def edit(path: str, x: Array, axes: tuple[Axis, ...], places: list[_Place]) -> Array:
        uses = [p for p in places if p.factor.role != "gain"]
        read = [p for p in uses if p.factor.role == "read" or p.factor.tied]
        written = [p for p in uses if p.factor.role == "write" or p.factor.tied]
        # Reads and writes are masked one after another. An entry that reads one grown unit and
        # writes a grown unit of a stream is multiplied twice.
        for used in (read, [p for p in written if p.factor.space in streams]):
            x = jnp.where(_any_grown(used, x.ndim), mask * x, x)
        return x

    return _edit(params, spec, maps, edit)


def masked_layernorm(
    x: Float[Array, "*batch n"], mask: Float[Array, "n"], eps: float = 1e-6
) -> Float[Array, "*batch n"]:
    """Normalises activations, with a mask as the weights of units in mean and variance.

    The result is (x - mean) / sqrt(variance + eps), with mean = sum_i mask_i x_i / sum_i mask_i.
    The variance is the mean of (x - mean)^2 with the same weights. The caller applies gain and
    bias.

    Args:
      x: Activations of shape (..., n), already multiplied by the mask, as `mask_units` does.
      mask: The weight of each unit, from 0 to 1, of shape (n,).
      eps: A number that is added to the variance.

    Returns:
      The normalised activations, of the same shape.

    >>> y = masked_layernorm(jnp.array([3.0, 1.0, 0.0]), jnp.array([1.0, 1.0, 0.0]), 0.0)
    >>> y[:2].round(3).tolist()
    [1.0, -1.0]
    """
    total = jnp.sum(mask)
    mean = jnp.sum(x * mask, -1, keepdims=True) / total
    variance = jnp.sum((x - mean) ** 2 * mask, -1, keepdims=True) / total
    return (x - mean) * jax.lax.rsqrt(variance + eps)


def masked_rmsnorm(
    x: Float[Array, "*batch n"], mask: Float[Array, "n"], eps: float = 1e-6
) -> Float[Array, "*batch n"]:
    """Divides activations by their root mean square, with a mask as the weights of units.

    The result is x / sqrt(mean square + eps), with the mean square sum_i mask_i x_i^2 / sum_i
    mask_i. The caller applies the gain.

    Args:
      x: Activations of shape (..., n), already multiplied by the mask, as `mask_units` does.
      mask: The weight of each unit, from 0 to 1, of shape (n,).
      eps: A number that is added to the mean square.

    Returns:
      The normalised activations, of the same shape.

    >>> y = masked_rmsnorm(jnp.array([2.0, 2.0, 0.0]), jnp.array([1.0, 1.0, 0.0]), 0.0)
    >>> y.round(3).tolist()
    [1.0, 1.0, 0.0]
    """
    square = jnp.sum(x**2 * mask, -1, keepdims=True) / jnp.sum(mask)
    return x * jax.lax.rsqrt(square + eps)


def ramp(step: ArrayLike, start: float, length: float) -> Float[Array, ""]:
    """Computes the mask of masked structural growth at a training step.

    It is 0 until `start`, then grows linearly to 1 over `length` steps.

    Args:
      step: The number of the step. It may be traced.
      start: The last step at which the mask is 0.
      length: The number of steps from 0 to 1.

    Returns:
      The mask, from 0 to 1, in the shape of `step`.

    Raises:
      ValueError: If `length` is not positive.

    References:
      Yao et al., Masked Structural Growth for 2x Faster Language Model Pre-training, 2023 (arXiv
        2305.02869).

    >>> [float(ramp(t, 10, 20)) for t in (5, 20, 40)]
    [0.0, 0.5, 1.0]
    """
    if length <= 0:
        raise ValueError(f"length must be positive, got {length}")
    return jnp.clip((jnp.asarray(step, float) - start) / length, 0, 1)


def scale_norms(
    params: PyTree, spec: Spec, maps: Mapping[str, SpaceMap], *, gains: str = "**"
) -> PyTree:
    """Multiplies the gains of LayerNorms over spaces that were tiled with averages (LEMON).

    Gains of "layernorm" spaces are multiplied by eta = `lemon_gain(old, new)`. The network must
    also use epsilon times eta^2.

    Args:
      params: The parameters after `change_basis`.
      spec: The spec before `change_basis`.
      maps: The maps, by space; `lemon` makes them.
      gains: A pattern for the paths of the norms' gains, if other gains (LayerScale) share the
        space. By default all gains.

    Returns:
      The parameters with scaled gains.

    Raises:
      TypeError: If an entry of `maps` is not a `SpaceMap`.
      ValueError: If a "layernorm" space has no such gain although eta is not 1. If the maps do not
        match the spec, or a leaf has another shape than after `change_basis`.

    References:
      Wang et al., LEMON: Lossless model expansion, 2024 (arXiv 2310.07999).

    >>> from sail_jax.basis.spaces import spec
    >>> from sail_jax.growth import tile
    >>> net = {"in": jnp.ones((1, 2)), "scale": jnp.ones(2), "out": jnp.ones((2, 1))}
    >>> rules = {"in": "x* h", "scale": "diag(h)", "out": "h* y"}
    >>> s = spec(net, rules, spaces={"h": "layernorm", "{x,y}": "outer"})
    >>> grown_gain = {"scale": jnp.ones(3)}
    >>> scaled = scale_norms(grown_gain, s, {"h": tile(2, 3, "average")})["scale"]
    >>> [f"{x:.4f}" for x in scaled.tolist()]
    ['0.8165', '0.8165', '0.8165']
    """
    pattern, paths = path_pattern(gains), leaf_paths(params)
    normed = {n for n in maps if "layernorm" in spec.space(n).nonlinearity.split()}
    for name in sorted(normed):
        gain_paths = [use.path for use in spec.uses(name) if use.role == "gain"]
        if lemon_gain(maps[name].old, maps[name].new) != 1 and not any(
            pattern.fullmatch(path) for path in gain_paths
        ):
            raise ValueError(
                f"space {name!r} has no gain {gains!r} to carry eta{nearest(gains, paths)}: add a "
                "scale of ones to its norms"
            )

    def edit(path: str, x: Array, axes: tuple[Axis, ...], places: list[_Place]) -> Array:
        if pattern.fullmatch(path):
            for place in places:
                if place.factor.role == "gain" and place.factor.space in normed:
                    x = x * lemon_gain(place.map.old, place.map.new)
        return x

    return _edit(params, spec, maps, edit)
