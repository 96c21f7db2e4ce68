"""Folds the scales of RMSNorm into the matrices that read the norm.

Once every scale is one, rotations of the norm's space leave the network's function unchanged.
`match_weights` requires this for orthogonal maps.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from sail_jax.align.blocks import factor_shape, factors
from sail_jax.basis.axes import Axis, Factor, path_pattern
from sail_jax.basis.change_basis import by_block
from sail_jax.basis.spaces import Leaf, Spec
from sail_jax.checks import as_array, nearest
from sail_jax.trees import path_str

_NONE = (Factor("", "write"),)


def fold_scales(
    params: PyTree,
    spec: Spec,
    readers: Mapping[str, str] | None = None,
    *,
    unscaled: Sequence[str] = (),
) -> tuple[PyTree, Spec]:
    """Multiplies the scales of each "rmsnorm" space into the leaves that read the norm.

        (norm(x) * g) W = norm(x) (diag(g) W)

    The function of the network stays the same, and every scale becomes one. The new spec leaves the
    scales' axes without a space, so orthogonal maps of the space are exact.

    The readers must directly follow the scale, as in RMSNorm. LayerScale and a bias after
    the scale are not supported.

    Args:
      params: The parameters, including all scales of the spec.
      spec: The spec of `params`.
      readers: The readers of each scale, by patterns of paths. A `{i}` captured in the first
        pattern stands for the same text in the second:
        `{"blocks/{i}/norm1": "blocks/{i}/{q,k,v}", "norm": "head"}`. It is optional if a single
        scale precedes all readers of a space.
      unscaled: Patterns of leaves that read the space without a scale in front.

    Returns:
      The new parameters, in their own dtypes, and their spec.

    Raises:
      ValueError: If a scale is missing in `params`, has unknown readers or none, or has an axis
        that its reader does not have; if a reader is tied, has two scales, or has none and is not
        in `unscaled`. Messages contain the path of the leaf.

    References:
      Ashkboos et al., SliceGPT, 2024 (arXiv 2401.15024); Ashkboos et al., QuaRot, 2024
      (arXiv 2404.00456).

    >>> from sail_jax.basis.spaces import spec
    >>> net = {"in": jnp.ones((1, 2)), "norm": jnp.array([2.0, 3.0]), "out": jnp.ones((2, 1))}
    >>> s = spec(net, {"in": "x* h", "norm": "diag(h)", "out": "h* y"},
    ...          spaces={"h": "rmsnorm", "{x,y}": "outer"})
    >>> folded, _ = fold_scales(net, s)
    >>> folded["norm"].tolist(), folded["out"].tolist()
    ([1.0, 1.0], [[2.0], [3.0]])
    """
    gains = _gains(spec)
    readers_of = (
        _all_readers(spec, gains) if readers is None else _named(spec, gains, readers, unscaled)
    )
    follows: dict[str, str] = {}
    for gain, paths in readers_of.items():
        for path in paths:
            if path in follows:
                raise ValueError(f"leaf {path!r} reads after both {follows[path]!r} and {gain!r}")
            follows[path] = gain
    scales = {path_str(p): x for p, x in jax.tree.leaves_with_path(params) if path_str(p) in gains}
    if missing := gains.keys() - scales.keys():
        raise ValueError(f"params have no leaf {min(missing)!r}")

    def fold(path: tuple[Any, ...], x: Array) -> Array:
        named = path_str(path)
        # The readers now contain the scale.
        if named in gains:
            return jnp.ones_like(x)
        if named not in follows:
            return x
        gain = follows[named]

        def block(x: Array, axes: tuple[Axis, ...]) -> Array:
            wide = jnp.reshape(x, factor_shape(spec, axes, x.shape))
            # The product uses float32 at least, and is rounded once.
            wide = wide.astype(jnp.promote_types(x.dtype, jnp.float32))
            scale = _beside(spec, gain, scales[gain], named, axes)
            return (wide * scale).reshape(x.shape).astype(x.dtype)

        return by_block(as_array(x), spec.axes(named), spec, block)

    # Scales that are one stay one under any map of the space, so their axes get no space from here
    # on.
    leaves = tuple(
        Leaf(path, tuple(() if path in gains and _is_gain(axis) else axis for axis in axes))
        for path, axes in spec.leaves
    )
    return jax.tree.map_with_path(fold, params), replace(spec, leaves=leaves)


def _gains(spec: Spec) -> dict[str, str]:
    """Returns the space of each scale to fold, by the path of the scale."""
    out = {}
    for name, _, words in spec.spaces:
        if "rmsnorm" not in words.split():
            continue
        for use in spec.uses(name):
            if use.role == "gain":
                out[use.path] = name
    return out


def _beside(spec: Spec, gain: str, scale: Array, reader: str, axes: tuple[Axis, ...]) -> Array:
    """Reshapes a scale to be multiplied with a reader by broadcasting."""
    own, its = ([f.space for axis in a for f in axis or _NONE] for a in (spec.axes(gain), axes))
    if odd := [name for name in own if name not in its]:
        raise ValueError(
            f"the scale {gain!r} has {odd[0] or '_'!r}, but its reader {reader!r} does not"
        )
    scale = factors(spec, gain, scale)
    # With stacked layers, scale and reader share the stack's axis, perhaps at different positions.
    scale = jnp.transpose(scale, sorted(range(len(own)), key=lambda k: its.index(own[k])))
    return scale.reshape([spec.space(name).size if name in own else 1 for name in its])


def _is_gain(axis: Axis) -> bool:
    return any(f.role == "gain" for f in axis)


def _readers(spec: Spec, space: str) -> list[str]:
    """Returns the leaves that read a space. Raises a ValueError if one of its leaves is tied."""
    for use in spec.uses(space):
        if use.tied:
            raise ValueError(
                f"the tied leaf {use.path!r} reads and writes {space!r}, but a scale can only be "
                "folded into the reader; untie the leaf"
            )
    return [use.path for use in spec.uses(space) if use.role == "read"]


def _all_readers(spec: Spec, gains: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the readers of each scale, if every space has a single scale."""
    spaces = list(gains.values())
    for gain, space in gains.items():
        if spaces.count(space) > 1:
            raise ValueError(
                f"{spaces.count(space)} scales multiply {space!r}, including {gain!r}: give the "
                f"readers of each, readers={{{gain!r}: ...}}"
            )
    return {gain: _readers(spec, space) for gain, space in gains.items()}


def _named(
    spec: Spec, gains: Mapping[str, str], readers: Mapping[str, str], unscaled: Sequence[str]
) -> dict[str, list[str]]:
    """Resolves the argument `readers`, and checks that it is complete."""
    out: dict[str, list[str]] = {}
    for pattern, text in readers.items():
        matches = {gain: m for gain in gains if (m := path_pattern(pattern).fullmatch(gain))}
        if not matches:
            raise ValueError(f"readers[{pattern!r}] names no scale{nearest(pattern, gains)}")
        for gain, match in matches.items():
            names = match.groupdict()
            filled = re.sub(r"\{(\w+)\}", lambda m, n=names: n.get(m[1], m[0]), text)
            reader_paths = _readers(spec, gains[gain])
            hits = [path for path in reader_paths if path_pattern(filled).fullmatch(path)]
            if not hits:
                raise ValueError(
                    f"readers[{pattern!r}]: no leaf that reads {gains[gain]!r} matches {filled!r}"
                    f"{nearest(filled, reader_paths)}"
                )
            out[gain] = hits
    if missing := [gain for gain in gains if gain not in out]:
        raise ValueError(f"readers must contain the scale {missing[0]!r}")
    for space in set(gains.values()):
        named = {path for gain, paths in out.items() if gains[gain] == space for path in paths}
        bare = [path_pattern(pattern) for pattern in unscaled]
        left = [path for path in _readers(spec, space) if path not in named]
        if left := [path for path in left if not any(p.fullmatch(path) for p in bare)]:
            raise ValueError(
                f"leaf {left[0]!r} reads {space!r} after none of its scales; add it to readers, or "
                "to unscaled if this is correct"
            )
    return out
