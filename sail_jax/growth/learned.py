"""Learned maps: gradient descent on the loss of the grown network, through `change_basis`.

`learn_maps` is the training loop. The functions `sail_*` and `ligo_*` define the parametrisations.
Each method consists of a spec that ties or frees its maps as published, initial coefficients, and a
function from coefficients to maps.

    wide = sail_spec(spec)
    free = sail_init(params, spec, {"hidden": 512, "layer": 24})
    got = learn_maps(loss, params, wide, free, sail_maps, batches, steps=100)

This module imports optax. `sail_jax` therefore does not import it.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from sail_jax import linalg
from sail_jax.basis.axes import blocks
from sail_jax.basis.change_basis import change_basis
from sail_jax.basis.maps import SpaceMap
from sail_jax.basis.spaces import Leaf, Space, Spec
from sail_jax.checks import one_key, one_of
from sail_jax.growth.basic import check_growth
from sail_jax.growth.depth import interpolate, mixing_logits, stack
from sail_jax.growth.fresh import leaf_key
from sail_jax.growth.width import lift
from sail_jax.learning import Learned, learn
from sail_jax.trees import leaf_paths

Free = dict[str, dict[str, Array]]
"""Learned coefficients: named arrays for each space."""


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
    """Learns maps by gradient descent on the loss of the grown network.

    It minimises loss(change_basis(params, spec, maps(free)), batch) over `free`. `params` do not
    change. The whole loop is one compiled scan; see `sail_jax.learning.learn`.

    Args:
      loss: The loss of the grown parameters on a batch, a scalar.
      params: The parameters to grow.
      spec: The spec for the maps, such as `sail_spec(...)` or `ligo_spec(...)`.
      free: The initial coefficients, any pytree that `maps` accepts.
      maps: A differentiable function from coefficients to maps: `sail_maps`, `ligo_maps` or
        another.
      batches: The batches, in leaves of shape (n, ...). Step t uses entry t mod n.
      steps: The number of steps, 0 or more. LiGO uses 100.
      optimizer: An optax optimiser; by default Adam with learning rate 1e-3.

    Returns:
      The grown parameters, the trained `free` (as `coefficients`), and the loss before each step.

    Raises:
      TypeError: If `maps` does not return `SpaceMap`s, or a leaf with a mapped space is not
        floating.
      ValueError: If the loss is not finite, `steps` is not an integer >= 0, `batches` are empty, or
        the maps do not match the spec.
    """

    def grow(free: PyTree, key: Array | None) -> PyTree:
        return change_basis(params, spec, maps(free))

    return learn(loss, grow, free, batches, steps=steps, optimizer=optimizer)


def sail_spec(spec: Spec) -> Spec:
    """Makes the spec in which every use of a space has its own map (SAIL).

    C_in and C_out are then free for each matrix. The space of factor 0 of axis 1 of leaf "w"
    becomes "w@1.0". Gains transform like biases. Only "stack" spaces stay shared, with one matrix D
    for all leaves. Tied leaves keep one map per axis.

    Args:
      spec: The spec of the network.

    Returns:
      The spec with renamed spaces.

    References:
      Structured-Initialization Learning (SAIL), App. F.1.
    """
    stacks = _stacks(spec)

    def name(path: str, axis: int, number: int, space: str) -> str:
        return space if space in stacks else f"{path}@{axis}.{number}"

    return _respaced(spec, name, "outer")


def sail_init(
    params: PyTree,
    spec: Spec,
    sizes: Mapping[str, int],
    *,
    key: PRNGKeyArray | None = None,
    how: Literal["stack", "stack_top", "interpolate", "mean"] | None = None,
    sharpness: float = 4.0,
) -> Free:
    """Computes the initial coefficients of SAIL's learned maps.

    For each use of a space, C = W U~^T. U~ contains the leading left singular vectors of the leaf,
    unfolded along that axis. W is chosen as in `singular`, which treats the case of a matrix.
    Gradients do not flow through the singular vectors. For depth, the coefficients are the logits
    of `mix_layers`.

    Args:
      params: The parameters to grow.
      spec: Their spec, before `sail_spec`.
      sizes: The new size of each space that changes, by its name in `spec`.
      key: With a key, W is drawn from N(0, 1/new). Without a key, W is U~, padded or cut.
      how: The order of layers at the start; see `deepen`. None means "interpolate", or the "mean"
        of neighbours if a stack shrinks.
      sharpness: The logit of the chosen layers; all others have 0 (see `mixing_logits`).

    Returns:
      {"c": C} for each use of a space in `sizes`, by its name in `sail_spec(spec)`, with C of shape
      (new, old). {"logits": ...} of shape (new, old) for each "stack" space in `sizes`.

    Raises:
      ValueError: If a space of `sizes` is unknown to the spec, a stack would be empty, `how` is
        unknown, or a leaf fuses several matrices.

    References:
      Structured-Initialization Learning (SAIL), App. F.
    """
    one_key(key, optional=True)
    stacks = _stacks(spec)
    for name in sizes:
        spec.space(name)
    arrays = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
    free: Free = {}
    for name in sorted(stacks & set(sizes)):
        logits = mixing_logits(spec.space(name).size, sizes[name], how, sharpness)
        free[name] = {"logits": logits}
    for path, axes in spec.leaves:
        factors = [(k, i, f) for k, axis in enumerate(axes) for i, f in enumerate(axis or (None,))]
        if any(len(blocks(axis)) > 1 for axis in axes):
            raise ValueError(
                f"leaf {path!r} fuses several matrices with separate singular vectors: "
                "apply sail_jax.unfuse first"
            )
        was = jnp.shape(arrays[path])
        shape = [was[k] if f is None else spec.space(f.space).size for k, _, f in factors]
        x = jnp.asarray(arrays[path], float).reshape(shape)
        for at, (k, i, f) in enumerate(factors):
            if f is None or f.space in stacks or f.space not in sizes:
                continue
            name, new = f"{path}@{k}.{i}", sizes[f.space]
            # The mode unfolding [units of this axis, everything else]. Its left singular vectors
            # belong to the axis.
            unfolded = jnp.moveaxis(x, at, 0).reshape(x.shape[at], -1)
            unfolded = jax.lax.stop_gradient(unfolded)
            basis = linalg.svd(unfolded, full_matrices=False)[0][:, :new]
            own = None if key is None else leaf_key(key, name)
            free[name] = {"c": lift(basis, new, own) @ basis.T}
    return free


def sail_maps(free: Free) -> dict[str, SpaceMap]:
    """Makes maps from SAIL's coefficients, for `sail_spec`.

    Args:
      free: Coefficients, as from `sail_init`.

    Returns:
      A dense map for each entry. A use of a space, reading or writing, gets the map of C. Depth
      gets the map of the softmax of the logits.

    >>> sail_maps({"w@0.0": {"c": jnp.array([[1.0], [2.0]])}})["w@0.0"].read.tolist()
    [[1.0, 2.0]]
    """
    out = {}
    for name, value in free.items():
        c = value["c"] if "c" in value else jax.nn.softmax(value["logits"], axis=-1)
        # Each space has one use here, which is contracted with C in either role: as `write`, or as
        # the transpose of `read`.
        out[name] = SpaceMap(c, c.T)
    return out


def ligo_spec(spec: Spec) -> Spec:
    """Makes the spec that ties maps as in LiGO.

    A space keeps one map for all leaves, and gains transform like biases (B g). Each leaf mixes
    layers with its own coefficients. For this, the "stack" space `layer` of leaf "w" becomes
    "layer@w".

    Args:
      spec: The spec of the network.

    Returns:
      The spec with renamed "stack" spaces.

    References:
      Wang et al., Learning to Grow Pretrained Models (LiGO), 2023 (arXiv 2303.00980).
    """
    stacks = _stacks(spec)

    def name(path: str, axis: int, number: int, space: str) -> str:
        return f"{space}@{path}" if space in stacks else space

    # LiGO multiplies a norm's gain by B, like a bias.
    return _respaced(spec, name, "stack")


def ligo_init(
    spec: Spec,
    sizes: Mapping[str, int],
    key: PRNGKeyArray,
    *,
    width: Literal["rand", "sel"] = "rand",
    depth: Literal["stack", "interlace", "rand"] = "stack",
    noise: float = 0.03,
) -> Free:
    """Draws the initial coefficients of LiGO's learned maps.

    The published code has the same defaults.

    Args:
      spec: The spec of the network, before `ligo_spec`.
      sizes: The new size of each space that grows, by its name in `spec`.
      key: A PRNG key. The draws also depend on the names of spaces and leaves.
      width: The initial rows of B below the identity. "rand" rows are uniform draws that sum to
        one. "sel" rows are one-hot.
      depth: The initial coefficients of each leaf's layers. "stack" (StackBERT's one-hot rows) and
        "interlace" (each layer repeated in place) have noise. "rand" is uniform. Rows sum to one.
      noise: The upper limit of the uniform noise of depth, before rows are normalised.

    Returns:
      {"rows": ...} of shape (new - old, old) for each space in `sizes`. {"depth": ...} of shape
      (new, old) for each leaf with a "stack" space in `sizes`, by the name of that space in
      `ligo_spec(spec)`.

    Raises:
      ValueError: If a space of `sizes` is unknown to the spec, a space would shrink, or `width` or
        `depth` is unknown.

    References:
      Wang et al., Learning to Grow Pretrained Models (LiGO), 2023 (arXiv 2303.00980).
    """
    one_key(key)
    one_of("width", width, ("rand", "sel"))
    one_of("depth", depth, ("stack", "interlace", "rand"))
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
        order = stack if depth == "stack" else interpolate
        start = jax.nn.one_hot(order(old, new), old)
        for path in dict.fromkeys(use.path for use in spec.uses(name)):
            drawn = jax.random.uniform(leaf_key(space_key, path), (new, old))
            w = drawn if depth == "rand" else start + noise * drawn
            free[f"{name}@{path}"] = {"depth": _normalised(w)}
    return free


def ligo_maps(free: Free) -> dict[str, SpaceMap]:
    """Makes maps from LiGO's coefficients, for `ligo_spec`.

    B = [I; rows] writes a space. As published, its transpose reads the space, without dividing by
    the number of copies. The function is therefore not preserved at the start. (A^{q,k,v} =
    B_emb^T, A^o = B_v^T, A^fc2 = B_fc1^T.)

    Args:
      free: Coefficients, as from `ligo_init`.

    Returns:
      A dense map for each entry: B for a space, the coefficients for depth.

    References:
      Wang et al., Learning to Grow Pretrained Models (LiGO), 2023 (arXiv 2303.00980).

    >>> ligo_maps({"h": {"rows": jnp.array([[0.5, 0.5]])}})["h"].write.tolist()
    [[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]
    """
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
    """Computes the gradients of a loss with respect to C_in and C_out of `C_in theta C_out^T`.

    dL/dC_in = G C_out theta^T and dL/dC_out = G^T C_in theta. (The paper prints G theta C_out^T and
    G (C_in theta)^T; their shapes do not conform.)

    Args:
      theta: The matrix, of shape (in, out).
      c_in: C_in, of shape (new_in, in).
      c_out: C_out, of shape (new_out, out).
      G: The gradient with respect to `C_in theta C_out^T`, of shape (new_in, new_out).

    Returns:
      The gradients with respect to C_in and to C_out, in their shapes.

    References:
      Structured-Initialization Learning (SAIL), App. F.1.
    """
    return G @ c_out @ theta.T, G.T @ c_in @ theta


def _stacks(spec: Spec) -> set[str]:
    """Returns the names of the "stack" spaces."""
    return {s.name for s in spec.spaces if "stack" in s.nonlinearity.split()}


def _respaced(spec: Spec, name: Callable[[str, int, int, str], str], words: str) -> Spec:
    """Returns the spec with spaces renamed by `name(path, axis, number of the factor, space)`.

    Renamed spaces have these words. Gains transform like biases.
    """
    leaves: list[Leaf] = []
    spaces: set[Space] = set()
    for path, axes in spec.leaves:
        renamed = []
        for k, axis in enumerate(axes):
            factors = []
            for i, f in enumerate(axis):
                old, new = spec.space(f.space), name(path, k, i, f.space)
                spaces.add(old if new == old.name else Space(new, old.size, words))
                role = "write" if f.role == "gain" else f.role
                factors.append(f._replace(space=new, role=role))
            renamed.append(tuple(factors))
        leaves.append(Leaf(path, tuple(renamed)))
    return Spec(tuple(leaves), tuple(sorted(spaces)))


def _normalised(rows: Array) -> Array:
    """Rows divided by their sums."""
    return rows / rows.sum(axis=-1, keepdims=True)


def _below(rows: Float[Array, "more old"]) -> Float[Array, "new old"]:
    """Returns the identity with further rows below it."""
    return jnp.concatenate([jnp.eye(rows.shape[1], dtype=rows.dtype), rows])
