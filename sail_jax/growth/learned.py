"""Maps that are learned: the loss of the grown network, descended through `change_basis`.

`learn_maps` is the loop; `sail_*` and `ligo_*` are what it trains: the spec under which a method's
maps are free or tied as published, their initial coefficients, and the maps of coefficients.

    wide = sail_spec(spec)
    free = sail_init(params, spec, {"hidden": 512, "layer": 24})
    got = learn_maps(loss, params, wide, free, sail_maps, batches, steps=100)

Imports optax, and so is not imported by `sail_jax`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from sail_jax.basis.axes import blocks
from sail_jax.basis.change_basis import change_basis
from sail_jax.basis.maps import SpaceMap
from sail_jax.basis.spaces import Leaf, Space, Spec
from sail_jax.growth.basic import check_growth
from sail_jax.growth.depth import deepen
from sail_jax.growth.fresh import leaf_key
from sail_jax.learning import Learned, learn
from sail_jax.trees import leaf_paths

__all__ = [
    "learn_maps",
    "ligo_init",
    "ligo_maps",
    "ligo_spec",
    "sail_init",
    "sail_maps",
    "sail_spec",
    "width_gradients",
]

Free = dict[str, dict[str, Array]]


def learn_maps(
    loss: Callable[[PyTree, PyTree], Float[Array, ""]],
    params: PyTree,
    spec: Spec,
    free: PyTree,
    maps: Callable[[Any], Mapping[str, SpaceMap]],
    batches: PyTree,
    *,
    steps: int,
    optimizer: optax.GradientTransformation | None = None,
) -> Learned:
    """Minimise loss(change_basis(params, spec, maps(free)), batch) over `free`, `params` frozen.

    One compiled scan, see `sail_jax.learning.learn`: batches have leaves [n, ...], step t
    sees entry t mod n; Adam at 1e-3 by default. Returns the grown parameters, the trained `free`,
    and the loss before each step. Raises ValueError for a loss that is not finite.
    """

    def grow(free: PyTree, key: Array | None) -> PyTree:
        return change_basis(params, spec, maps(free))

    return learn(loss, grow, free, batches, steps=steps, optimizer=optimizer)


def sail_spec(spec: Spec) -> Spec:
    """The spec under which every use of a space has a map of its own, as SAIL's C_in and C_out
    are free for each matrix (App. F.1); gains move like biases. Only "stack" spaces stay shared:
    one D for all leaves.

    The space of axis 1, factor 0 of leaf "w" is called "w@1.0". Tied leaves keep one map per axis.
    """
    stacks = _stacks(spec)
    leaves, spaces = [], [s for s in spec.spaces if s.name in stacks]
    for path, axes in spec.leaves:
        renamed = []
        for k, axis in enumerate(axes):
            names = [
                f.space if f.space in stacks else f"{path}@{k}.{i}" for i, f in enumerate(axis)
            ]
            spaces += [
                Space(name, spec.space(f.space).size, "outer")
                for name, f in zip(names, axis, strict=True)
                if f.space not in stacks
            ]
            renamed.append(
                tuple(
                    f._replace(space=n, role="write" if f.role == "gain" else f.role)
                    for f, n in zip(axis, names, strict=True)
                )
            )
        leaves.append(Leaf(path, tuple(renamed)))
    return Spec(tuple(leaves), tuple(sorted(spaces)))


def sail_init(
    params: PyTree,
    spec: Spec,
    sizes: Mapping[str, int],
    *,
    key: PRNGKeyArray | None = None,
    how: Literal["stack", "stack_top", "interpolate"] = "interpolate",
    sharpness: float = 4.0,
) -> Free:
    """The coefficients from which SAIL's maps are learned (App. F): C = W U~^T for each use of
    a space, U~ being the leading left singular vectors of the leaf unfolded along that axis, and
    logits of depth, `sharpness` for the layer that `deepen(..., how)` takes, 0 for the others.

    spec, sizes: the original ones, by spaces. For a matrix U~ are the singular vectors of
    `singular`, whose choices of W these are: N(0, 1/new) with a key, else U~ padded or cut.

    Raises ValueError for a space that the spec lacks, a stack that would shrink, or a fused leaf.
    """
    stacks = _stacks(spec)
    for name in sizes:
        spec.space(name)
    arrays = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
    free: Free = {}
    for name in sorted(stacks & set(sizes)):
        index = deepen(spec.space(name).size, sizes[name], how).index
        free[name] = {"logits": sharpness * jax.nn.one_hot(index, spec.space(name).size)}
    for path, axes in spec.leaves:
        factors = [(k, i, f) for k, axis in enumerate(axes) for i, f in enumerate(axis or (None,))]
        if any(len(blocks(axis)) > 1 for axis in axes):
            raise ValueError(
                f"leaf {path!r} fuses several matrices, which have singular vectors of their own: "
                "apply sail_jax.unfuse first"
            )
        was = jnp.shape(arrays[path])
        shape = [was[k] if f is None else spec.space(f.space).size for k, _, f in factors]
        x = jnp.asarray(arrays[path], float).reshape(shape)
        for at, (k, i, f) in enumerate(factors):
            if f is None or f.space in stacks or f.space not in sizes:
                continue
            name, new = f"{path}@{k}.{i}", sizes[f.space]
            unfolded = jnp.moveaxis(x, at, 0).reshape(x.shape[at], -1)
            basis = jnp.linalg.svd(unfolded, full_matrices=False)[0][:, :new]
            if key is None:
                lift = jnp.pad(basis[:new], ((0, max(new - len(basis), 0)), (0, 0)))
            else:
                lift = jax.random.normal(leaf_key(key, name), (new, basis.shape[1])) / new**0.5
            free[name] = {"c": lift @ basis.T}
    return free


def sail_maps(free: Free) -> dict[str, SpaceMap]:
    """The maps of `sail_init`'s coefficients, for `sail_spec`: C for a use, be it written or
    read, and the softmax of the logits for depth."""
    out = {}
    for name, value in free.items():
        c = value["c"] if "c" in value else jax.nn.softmax(value["logits"], axis=-1)
        out[name] = SpaceMap(c, c.T)  # the leaf has one role here, so that each is its own C
    return out


def ligo_spec(spec: Spec) -> Spec:
    """The spec under which LiGO's tying holds (Wang et al. 2023): a space keeps one map for all
    leaves, gains move like biases (B g), and each leaf mixes layers with coefficients of its own.

    The "stack" space `layer` of leaf "w" is called "layer@w".
    """
    stacks = _stacks(spec)
    leaves, spaces = [], [s for s in spec.spaces if s.name not in stacks]
    for path, axes in spec.leaves:
        renamed = []
        for axis in axes:
            factors = []
            for f in axis:
                if f.space in stacks:
                    f = f._replace(space=f"{f.space}@{path}")
                    spaces.append(Space(f.space, spec.space(f.space.split("@")[0]).size, "stack"))
                factors.append(f._replace(role="write") if f.role == "gain" else f)
            renamed.append(tuple(factors))
        leaves.append(Leaf(path, tuple(renamed)))
    return Spec(tuple(leaves), tuple(sorted(spaces)))


def ligo_init(
    spec: Spec,
    sizes: Mapping[str, int],
    key: PRNGKeyArray,
    *,
    width: Literal["rand", "sel"] = "rand",
    depth: Literal["stack", "interlace", "rand"] = "stack",
    noise: float = 0.03,
) -> Free:
    """The coefficients from which LiGO's maps are learned; spec, sizes: the original ones.

    Width: the rows that B adds below I, uniform and summing to one ("rand"), or one-hot ("sel").
    Depth: w of each leaf, StackBERT's or interlaced one-hots plus U(0, noise), rows normalised to
    sum to one, or "rand". Defaults are the published code's.

    Raises ValueError for a space that the spec lacks or would shrink, or an unknown choice.
    """
    if width not in ("rand", "sel") or depth not in ("stack", "interlace", "rand"):
        raise ValueError(f"unknown width {width!r} or depth {depth!r}")
    stacks = _stacks(spec)
    free: Free = {}
    for name, new in sizes.items():
        old = spec.space(name).size
        check_growth(old, new)
        space_key = leaf_key(key, name)
        if name not in stacks:
            if width == "sel":
                rows = jax.nn.one_hot(jax.random.randint(space_key, (new - old,), 0, old), old)
            else:
                rows = _normalised(jax.random.uniform(space_key, (new - old, old)))
            free[name] = {"rows": rows}
            continue
        layer = jnp.arange(new)
        start = jax.nn.one_hot(layer % old if depth == "stack" else layer * old // new, old)
        for path in dict.fromkeys(use.path for use in spec.uses(name)):
            drawn = jax.random.uniform(leaf_key(space_key, path), (new, old))
            w = drawn if depth == "rand" else start + noise * drawn
            free[f"{name}@{path}"] = {"depth": _normalised(w)}
    return free


def ligo_maps(free: Free) -> dict[str, SpaceMap]:
    """The maps of `ligo_init`'s coefficients, for `ligo_spec`: B = [I; rows] writes and, as
    published, its transpose reads, without a count of copies (so nothing is preserved at the
    start: A^{q,k,v} = B_emb^T, A^o = B_v^T, A^fc2 = B_fc1^T)."""
    out = {}
    for name, value in free.items():
        B = value["depth"] if "depth" in value else _below(value["rows"])
        out[name] = SpaceMap(B, B.T)
    return out


def width_gradients(
    theta: Float[Array, "in out"],
    c_in: Float[Array, "new_in in"],
    c_out: Float[Array, "new_out out"],
    G: Float[Array, "new_in new_out"],
) -> tuple[Float[Array, "new_in in"], Float[Array, "new_out out"]]:
    """dL/dC_in = G C_out theta^T and dL/dC_out = G^T C_in theta, for G = dL/d(C_in theta C_out^T).

    SAIL, App. F.1 prints G theta C_out^T and G (C_in theta)^T, whose shapes do not conform.
    """
    return G @ c_out @ theta.T, G.T @ c_in @ theta


def _stacks(spec: Spec) -> set[str]:
    return {s.name for s in spec.spaces if "stack" in s.nonlinearity.split()}


def _normalised(rows: Array) -> Array:
    return rows / rows.sum(axis=-1, keepdims=True)


def _below(rows: Float[Array, "more old"]) -> Float[Array, "new old"]:
    return jnp.concatenate([jnp.eye(rows.shape[1], dtype=rows.dtype), rows])
