"""Repairs of the activations of merged networks.

Averaging parameters shrinks the variances of activations and makes the running statistics of
BatchNorm wrong. `repair` restores the variances from the endpoints' statistics. `reset_statistics`
recomputes the running statistics from data.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from sail_jax.align.activations import Moments, stream
from sail_jax.basis.change_basis import change_basis
from sail_jax.basis.maps import select
from sail_jax.basis.spaces import Spec
from sail_jax.checks import nearest
from sail_jax.trees import leaf_paths, path_str

Activations = Callable[[PyTree, Any], Mapping[str, Array]]


def repair(
    params: PyTree,
    endpoints: Sequence[PyTree],
    spec: Spec,
    preactivations: Activations,
    batches: Iterable[Any],
    spaces: Sequence[str],
    *,
    weights: Float[Array, "models"] | Sequence[float] | None = None,
) -> PyTree:
    """Gives the units of a merge the average mean and standard deviation of its endpoints.

    For each space, from the input to the output, preactivations are measured after the repair of
    the earlier spaces. Then every tensor that writes the space is scaled, and its bias shifted, to
    reach

        mean = sum_k w_k mean_k,  std = sum_k w_k std_k

    for endpoint k. Constant units are only shifted. Each endpoint is measured once and the merge
    once for each space, over all batches.

    Args:
      params: The merge of the endpoints.
      endpoints: The merged networks, aligned with one another.
      spec: The spec of all of them.
      preactivations: A function `(params, batch) -> {space: (..., size)}`: the sum of all tensors'
        outputs to a space, before its nonlinearity.
      batches: Inputs. They are stored in a list.
      spaces: The spaces to repair, from the input to the output.
      weights: The weights w_k, one for each endpoint, with sum one. None: equal weights.

    Returns:
      The repaired parameters, in their own dtypes.

    Raises:
      ValueError: If the weights do not match the endpoints, a space is missing in `preactivations`
        or has another size, or there are no batches. Also if a space does not have exactly one
        bias, a leaf multiplies it (use `reset_statistics` for normalised networks), or it occurs in
        a tied leaf. Messages contain the path of the leaf.

    References:
      Jordan et al., REPAIR: REnormalizing Permuted Activations for Interpolation Repair, 2023
      (arXiv 2211.08403).
    """
    # A list, since an iterator would be empty after the first of several passes.
    inputs = list(batches)
    M = len(endpoints)
    w = [1 / M] * M if weights is None else [float(x) for x in weights]
    if len(w) != M or not math.isclose(sum(w), 1, rel_tol=1e-5):
        raise ValueError(f"weights must be {M} numbers, one per endpoint, with sum one; got {w}")
    biases = {name: _bias(spec, name) for name in spaces}
    moments = [_measure(preactivations, p, inputs) for p in endpoints]
    for name in spaces:
        # The merge is measured again for each space, since earlier repairs have changed the
        # space's inputs.
        stats = _measure(preactivations, params, inputs)
        for measured in (stats, *moments):
            if name not in measured or measured[name].mean_x.shape != (spec.space(name).size,):
                raise ValueError(
                    f"preactivations have no [..., {spec.space(name).size}] of space {name!r}"
                )
        mean = sum(wk * e[name].mean_x for wk, e in zip(w, moments, strict=True))
        std = sum(wk * jnp.sqrt(e[name].var_x) for wk, e in zip(w, moments, strict=True))
        own = jnp.sqrt(stats[name].var_x)
        # A constant unit cannot get a standard deviation; it is only shifted.
        scale = jnp.where(own > 0, std / jnp.where(own > 0, own, 1), 1)
        params = _affine(params, spec, name, biases[name], scale, mean - scale * stats[name].mean_x)
    return params


def reset_statistics(
    params: PyTree,
    inputs: Activations,
    batches: Iterable[Any],
    leaves: Mapping[str, tuple[str, str]],
) -> PyTree:
    """Sets running means and variances to the statistics of data, for merges of BatchNorm networks.

    Each normalisation is measured after the earlier ones have been set, which makes the result
    independent of the batch size.

    Args:
      params: The merged parameters, including running statistics.
      inputs: A function `(params, batch) -> {name: (..., size)}`: the inputs of each normalisation
        when it uses its running statistics.
      batches: Inputs. They are stored in a list.
      leaves: The paths of the running mean and the running variance for each name, from the input
        to the output. The variance is set to the biased one.

    Returns:
      New parameters, in their own dtypes.

    Raises:
      ValueError: If a path matches no leaf, a name is missing in `inputs`, the sizes of an input
        and its leaf differ, or there are no batches.

    >>> net = {"mean": jnp.zeros(1), "var": jnp.ones(1)}
    >>> data = [jnp.array([[0.0], [4.0]])]
    >>> new = reset_statistics(net, lambda p, x: {"norm": x}, data, {"norm": ("mean", "var")})
    >>> new["mean"].tolist(), new["var"].tolist()
    ([2.0], [4.0])
    """
    # As in `repair`, every normalisation takes a separate pass.
    data = list(batches)
    paths = leaf_paths(params)
    for name, where in leaves.items():
        for path in where:
            if path not in paths:
                raise ValueError(f"leaves[{name!r}]: no leaf {path!r}{nearest(path, paths)}")
    for name, (mean, var) in leaves.items():
        # Measured again for each name, since the inputs depend on the statistics that have been
        # set so far.
        measured = _measure(inputs, params, data)
        if name not in measured:
            raise ValueError(f"inputs have no entry {name!r}{nearest(name, measured)}")
        new = {mean: measured[name].mean_x, var: measured[name].var_x}
        params = _replace(params, lambda path, x, new=new: _as(path, new[path], x), new)
    return params


def _measure(f: Activations, params: PyTree, batches: Sequence[Any]) -> dict[str, Moments]:
    """Computes the moments of each space over batches.

    `stream` needs two networks. The second is a constant here, and only the moments of x are used.
    """
    return stream(
        lambda batch: f(params, batch),
        lambda batch: {k: jnp.zeros((*v.shape[:-1], 1)) for k, v in f(params, batch).items()},
        batches,
    )


def _bias(spec: Spec, name: str) -> str:
    """Returns the path of a space's only bias. Raises a ValueError if it cannot be rescaled."""
    paths = []
    for use in spec.uses(name):
        spaces = [f.space for axis in spec.axes(use.path) for f in axis]
        if use.tied:
            raise ValueError(f"the tied leaf {use.path!r} writes {name!r}: it cannot be rescaled")
        if use.role == "gain":
            raise ValueError(
                f"leaf {use.path!r} multiplies {name!r}: reset its statistics, or leave it out"
            )
        if use.role == "write" and len(spaces) == len(spec.axes(use.path)) == 1:
            paths.append(use.path)
    if len(paths) != 1:
        raise ValueError(
            f"space {name!r} needs exactly one bias to shift its mean, it has {paths or 'none'}: "
            "add one, or leave the space out"
        )
    return paths[0]


def _affine(params: PyTree, spec: Spec, name: str, bias: str, scale: Array, shift: Array) -> PyTree:
    """Multiplies every tensor that writes a space by `scale`, and adds `shift` to its bias."""
    # Leaves that read the space stay unchanged.
    maps = {name: select(jnp.arange(len(scale)), len(scale), write=scale)}

    def move(path: str, x: Array) -> Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        new = change_basis({path: wide}, spec, maps)[path]
        return (new + shift if path == bias else new).astype(x.dtype)

    writers = {use.path for use in spec.uses(name) if use.role == "write"}
    return _replace(params, move, writers)


def _as(path: str, new: Array, old: Array) -> Array:
    """Casts measured values to the dtype of the old leaf. Raises a ValueError for other shapes."""
    if new.shape != old.shape:
        raise ValueError(f"leaf {path!r} has shape {old.shape}, but the measurement {new.shape}")
    return new.astype(old.dtype)


def _replace(params: PyTree, f: Callable[[str, Array], Array], paths: Collection[str]) -> PyTree:
    """Replaces the leaves in `paths` by `f(path, leaf)`."""

    def at(path: tuple[Any, ...], x: Array) -> Array:
        named = path_str(path)
        return f(named, x) if named in paths else x

    return jax.tree.map_with_path(at, params)
