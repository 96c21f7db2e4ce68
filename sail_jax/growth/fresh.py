"""What growth does to parameters beyond a change of basis: fresh units, noise, masks.

All take the parameters after `change_basis`, with the spec from before it and the maps, and return
parameters of the same shapes. A *grown* unit is one that repeats an earlier unit, or is zero; of a
dense map, every unit beyond the first `old`.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, PRNGKeyArray, PyTree

from sail_jax.basis.axes import Axis, Factor, blocks, path_pattern
from sail_jax.basis.maps import SpaceMap
from sail_jax.basis.spaces import Spec
from sail_jax.checks import as_array, nearest
from sail_jax.growth.basic import lemon_gain
from sail_jax.trees import leaf_paths, path_str

__all__ = [
    "aki",
    "break_symmetry",
    "fresh_units",
    "grown",
    "leaf_key",
    "mask_units",
    "masked_layernorm",
    "masked_rmsnorm",
    "noise_pairs",
    "null_noise",
    "ramp",
    "scale_norms",
]


def leaf_key(key: PRNGKeyArray, name: str) -> PRNGKeyArray:
    """The key of a leaf or space: it depends on the name, not on what is drawn beside it."""
    return jax.random.fold_in(key, np.uint32(zlib.crc32(name.encode())))


def grown(m: SpaceMap) -> Bool[Array, "new"]:
    """Which new units repeat an earlier one or are zero; of a dense map, those beyond `old`."""
    at = jnp.arange(m.new)
    if m.index is None:
        return at >= m.old
    write, _ = m.entries
    live = jnp.ones(m.new, bool) if write is None else write != 0
    first = jnp.full(m.old, m.new).at[m.index].min(jnp.where(live, at, m.new))
    return ~(live & (first[m.index] == at))


class _Place(NamedTuple):
    """A mapped factor of a leaf: the axis of it after groups are split, and its map."""

    axis: int
    factor: Factor
    map: SpaceMap

    def spread(self, vector: Array, ndim: int) -> Array:
        """A vector over the units, to be broadcast against the leaf."""
        return vector.reshape([-1 if k == self.axis else 1 for k in range(ndim)])


_Edit = Callable[[str, Array, tuple[Axis, ...], list[_Place]], Array]


def _edit(params: PyTree, spec: Spec, maps: Mapping[str, SpaceMap], edit: _Edit) -> PyTree:
    """`edit` applied to every leaf with a mapped factor (of a fused one, to every block), groups
    split, float32 at least."""
    resized = spec.resized(maps)

    def leaf(key_path: Any, x: Array) -> Array:
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
                f"leaf {path!r} has shape {list(x.shape)}, which is not that after a change of "
                "basis by these maps: apply change_basis first"
            )
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return block(path, y, axes).astype(x.dtype)

    def block(path: str, x: Array, axes: tuple[Axis, ...]) -> Array:
        for k, axis in enumerate(axes):
            if len(parts := blocks(axis)) > 1:
                ends = np.cumsum([resized.extent(part) for part in parts])[:-1]
                return jnp.concatenate(
                    [
                        block(f"{path}[{n}]", y, (*axes[:k], part, *axes[k + 1 :]))
                        for n, (y, part) in enumerate(
                            zip(jnp.split(x, ends, axis=k), parts, strict=True)
                        )
                    ],
                    axis=k,
                )
        factors = [(k, f) for k, axis in enumerate(axes) for f in axis or (None,)]
        places = [
            _Place(k, f, maps[f.space]) for k, (_, f) in enumerate(factors) if f and f.space in maps
        ]
        sizes = [x.shape[k] if f is None else resized.space(f.space).size for k, f in factors]
        return edit(path, x.reshape(sizes), axes, places).reshape(x.shape) if places else x

    return jax.tree.map_with_path(leaf, params)


def _any_grown(places: list[_Place], ndim: int) -> Array:
    out = jnp.zeros((1,) * ndim, bool)
    for place in places:
        out = out | place.spread(grown(place.map), ndim)
    return out


def _rms(x: Array) -> Array:
    return jnp.sqrt(jnp.mean(x**2))


def fresh_units(
    params: PyTree,
    spec: Spec,
    maps: Mapping[str, SpaceMap],
    key: PRNGKeyArray,
    *,
    std: float = 0.02,
) -> PyTree:
    """Entries that touch a grown unit drawn anew from N(0, std^2): of gains ones, of biases (what
    reads no space) zeros. After `pad` this is the initialisation of masked structural growth
    (Yao et al. 2023), where `mask_units` then makes it function-preserving.
    """

    def edit(path: str, x: Array, axes: tuple[Axis, ...], places: list[_Place]) -> Array:
        factors = [f for axis in axes for f in axis]
        if any(f.role == "gain" for f in factors):
            new = jnp.ones(x.shape)
        elif any(f.role == "read" or f.tied for f in factors):
            new = std * jax.random.normal(leaf_key(key, path), x.shape)
        else:
            new = jnp.zeros(x.shape)
        return jnp.where(_any_grown(places, x.ndim), new, x)

    return _edit(params, spec, maps, edit)


def break_symmetry(
    params: PyTree,
    spec: Spec,
    maps: Mapping[str, SpaceMap],
    key: PRNGKeyArray,
    *,
    scale: float = 1e-2,
) -> PyTree:
    """Noise N(0, (scale * rms of the leaf)^2) on what writes grown units (Net2WiderNet's small
    noise). Not function-preserving: the output moves in proportion to `scale`; for noise that
    preserves see `noise_pairs`.
    """

    def edit(path: str, x: Array, axes: tuple[Axis, ...], places: list[_Place]) -> Array:
        writers = [p for p in places if p.factor.role == "write" and not p.factor.tied]
        if not writers:
            return x
        noise = scale * _rms(x) * jax.random.normal(leaf_key(key, path), x.shape)
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
    """Noise +N, -N on the readers of each pair of copies, an odd copy left alone (HyperCloning,
    Samragh et al. 2024): copies carry equal activations, so the function is preserved.

    The standard deviation of N is the rms of the leaf times 10**(-snr_db/20). A leaf gets noise
    along the first axis that reads a space mapped in index form; tied leaves get none, nor do
    those that read two spaces and write none: one side of a product, which may be normalised.
    """

    def edit(path: str, x: Array, axes: tuple[Axis, ...], places: list[_Place]) -> Array:
        for place in [] if _one_side(axes) else places:
            reads = place.factor.role == "read" and not place.factor.tied
            if reads and place.map.index is not None:
                source, sign = _pairs(place.map)
                noise = jax.random.normal(leaf_key(key, path), x.shape)
                noise = jnp.take(noise, source, axis=place.axis) * place.spread(sign, x.ndim)
                return x + 10 ** (-snr_db / 20) * _rms(x) * noise
        return x

    return _edit(params, spec, maps, edit)


def _one_side(axes: tuple[Axis, ...]) -> bool:
    factors = [f for axis in axes for f in axis]
    return len({f.space for f in factors}) > 1 and all(f.role == "read" for f in factors)


def _pairs(m: SpaceMap) -> tuple[Array, Array]:
    """For each new unit, the even member of its pair, and +-1 over `write`, 0 if it has no pair."""
    write, _ = m.entries
    live = jnp.ones(m.new, bool) if write is None else write != 0
    index = jnp.where(live, jnp.asarray(m.index), m.old)
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
    return source, sign if write is None else sign / jnp.where(live, write, 1)


def null_noise(
    params: PyTree,
    spec: Spec,
    maps: Mapping[str, SpaceMap],
    key: PRNGKeyArray,
    *,
    snr_db: float = 20.0,
) -> PyTree:
    """Noise on readers, less its projection onto the range of `write`: it reads only what the
    grown network never writes, so the function is preserved under any map.

    Before the projection its standard deviation is the rms of the leaf times 10**(-snr_db/20). A
    leaf gets noise along the first axis that reads a mapped space; tied leaves get none, nor do
    those that read two spaces and write none.
    """

    def edit(path: str, x: Array, axes: tuple[Axis, ...], places: list[_Place]) -> Array:
        for place in [] if _one_side(axes) else places:
            if place.factor.role == "read" and not place.factor.tied:
                write = jnp.asarray(place.map.dense().write)
                null = jnp.eye(place.map.new) - write @ jnp.linalg.pinv(write)
                noise = jax.random.normal(leaf_key(key, path), x.shape)
                noise = jnp.tensordot(noise, null, (place.axis, 0), precision="highest")
                return x + 10 ** (-snr_db / 20) * _rms(x) * jnp.moveaxis(noise, -1, place.axis)
        return x

    return _edit(params, spec, maps, edit)


def aki(
    params: PyTree, spec: Spec, maps: Mapping[str, SpaceMap], *, layers: str = "layer"
) -> PyTree:
    """Advanced knowledge initialisation (bert2BERT, Chen et al. 2022): in leaves stacked on the
    space `layers`, what writes a grown unit is taken from the next layer, the top one keeping its
    own. `params` are those after `fpi`; of listed layers, after `stack_layers`. Gains keep FPI's.

    Not function-preserving: it trades the function for units that differ. Raises ValueError if
    `layers` is no "stack" space of the spec, or is mapped itself.
    """
    if "stack" not in spec.space(layers).nonlinearity.split():
        raise ValueError(f"layers must name a stack space, but {layers!r} is not declared 'stack'")
    if layers in maps:
        raise ValueError(f"widen before you deepen: {layers!r} itself has a map")

    def edit(path: str, x: Array, axes: tuple[Axis, ...], places: list[_Place]) -> Array:
        factors = [f for axis in axes for f in axis or (None,)]
        at = [k for k, f in enumerate(factors) if f and f.space == layers]
        writers = [p for p in places if p.factor.role == "write" and not p.factor.tied]
        if not at or not writers:
            return x
        depth = x.shape[at[0]]
        above = jnp.take(x, jnp.minimum(jnp.arange(depth) + 1, depth - 1), axis=at[0])
        return jnp.where(_any_grown(writers, x.ndim), above, x)

    return _edit(params, spec, maps, edit)


def mask_units(params: PyTree, spec: Spec, maps: Mapping[str, SpaceMap], mask: ArrayLike) -> PyTree:
    """Grown units multiplied by `mask`, a number from 0 (absent) to 1, in what reads them (MSG,
    Yao et al. 2023), and under a norm, whose input is a stream, also in what writes them. After
    `pad`, mask 0 preserves the function whatever `fresh_units` put there.

    The statistics of those norms are weighted by the same mask, in the network: `masked_layernorm`
    or `masked_rmsnorm` with `jnp.where(grown(m), mask, 1)`.
    """
    norms = {"layernorm", "rmsnorm"}
    streams = {n for n in maps if norms & set(spec.space(n).nonlinearity.split())}

    def edit(path: str, x: Array, axes: tuple[Axis, ...], places: list[_Place]) -> Array:
        uses = [p for p in places if p.factor.role != "gain"]
        read = [p for p in uses if p.factor.role == "read" or p.factor.tied]
        written = [p for p in uses if p.factor.role == "write" or p.factor.tied]
        for used in (read, [p for p in written if p.factor.space in streams]):
            x = jnp.where(_any_grown(used, x.ndim), mask * x, x)
        return x

    return _edit(params, spec, maps, edit)


def masked_layernorm(
    x: Float[Array, "*batch n"], mask: Float[Array, "n"], eps: float = 1e-6
) -> Float[Array, "*batch n"]:
    """(x - mean) / sqrt(variance + eps), both over units weighted by `mask`; gain and bias follow.

    x: the stream, already multiplied by `mask` (as `mask_units` sees to).
    """
    total = jnp.sum(mask)
    mean = jnp.sum(x * mask, -1, keepdims=True) / total
    variance = jnp.sum((x - mean) ** 2 * mask, -1, keepdims=True) / total
    return (x - mean) * jax.lax.rsqrt(variance + eps)


def masked_rmsnorm(
    x: Float[Array, "*batch n"], mask: Float[Array, "n"], eps: float = 1e-6
) -> Float[Array, "*batch n"]:
    """x / sqrt(mean square + eps), the mean over units weighted by `mask`."""
    square = jnp.sum(x**2 * mask, -1, keepdims=True) / jnp.sum(mask)
    return x * jax.lax.rsqrt(square + eps)


def ramp(step: ArrayLike, start: float, length: float) -> Float[Array, ""]:
    """MSG's mask: 0 until `start`, then linearly to 1 over `length` steps.

    >>> [float(ramp(t, 10, 20)) for t in (5, 20, 40)]
    [0.0, 0.5, 1.0]
    """
    if length <= 0:
        raise ValueError(f"length must be positive, got {length}")
    return jnp.clip((jnp.asarray(step, float) - start) / length, 0, 1)


def scale_norms(
    params: PyTree, spec: Spec, maps: Mapping[str, SpaceMap], *, gains: str = "**"
) -> PyTree:
    """LEMON's rule for LayerNorm under V_avg (Wang et al. 2024): gains of "layernorm" spaces times
    eta = `lemon_gain(old, new)`. The network must also take epsilon times eta**2.

    gains: pattern of the paths of the norms' gains, where others (LayerScale) share the space.
    Raises ValueError, naming the space, if it is "layernorm" and has no such gain.
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
