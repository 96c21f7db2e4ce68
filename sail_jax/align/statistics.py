"""What averaging does to activations, undone: variances collapse, running statistics go stale."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from sail_jax.align.activations import Moments, stream
from sail_jax.basis.spaces import Spec
from sail_jax.checks import nearest
from sail_jax.trees import leaf_paths, path_str

__all__ = ["repair", "reset_statistics"]

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
    """REPAIR (Jordan et al. 2023): give units the mean and deviation of the endpoints, averaged.

    `params` is a merge of `endpoints`, which are aligned. `preactivations(params, batch)` gives
    `{space: [..., size]}`, what the writers of each space add up to, before its nonlinearity. For
    each of `spaces`, from the input to the output, both are measured with the spaces before it
    already repaired, and the space's writers changed to give E = sum_k w_k E_k and
    std = sum_k w_k std_k (weights equal by default, and summing to one). Units that do not vary
    are only shifted. Batches are gone through once per space and network.

    Raises ValueError, naming the leaf, unless a bias writes each space, nothing multiplies it (a
    normalised network needs `reset_statistics` instead) and no writer is tied.
    """
    inputs = list(batches)
    M = len(endpoints)
    w = [1 / M] * M if weights is None else [float(x) for x in weights]
    if len(w) != M or not math.isclose(sum(w), 1, rel_tol=1e-5):
        raise ValueError(f"weights must be one for each of {M} endpoints and sum to one, got {w}")
    biases = {name: _bias(spec, name) for name in spaces}
    moments = [_measure(preactivations, p, inputs) for p in endpoints]
    for name in spaces:
        stats = _measure(preactivations, params, inputs)
        for measured in (stats, *moments):
            if name not in measured or measured[name].mean_x.shape != (spec.space(name).size,):
                raise ValueError(
                    f"preactivations give no [..., {spec.space(name).size}] of space {name!r}"
                )
        mean = sum(wk * e[name].mean_x for wk, e in zip(w, moments, strict=True))
        std = sum(wk * jnp.sqrt(e[name].var_x) for wk, e in zip(w, moments, strict=True))
        own = jnp.sqrt(stats[name].var_x)
        scale = jnp.where(own > 0, std / jnp.where(own > 0, own, 1), 1)
        params = _affine(params, spec, name, biases[name], scale, mean - scale * stats[name].mean_x)
    return params


def reset_statistics(
    params: PyTree,
    inputs: Activations,
    batches: Iterable[Any],
    leaves: Mapping[str, tuple[str, str]],
) -> PyTree:
    """Running means and variances set to those of the data, as after a merge of BatchNorm nets.

    `inputs(params, batch)` gives `{name: [..., size]}`, what each normalisation normalises, when
    it uses its running statistics; `leaves` gives, from the input to the output, the paths of
    the running mean and (biased) variance of each name. Each is measured with those before it
    already set, so that the result does not depend on the batch size. Returns new parameters.
    """
    data = list(batches)
    paths = leaf_paths(params)
    for name, where in leaves.items():
        for path in where:
            if path not in paths:
                raise ValueError(f"leaves[{name!r}] is no leaf: {path!r}{nearest(path, paths)}")
    for name, (mean, var) in leaves.items():
        measured = _measure(inputs, params, data)
        if name not in measured:
            raise ValueError(f"inputs give nothing for {name!r}{nearest(name, measured)}")
        new = {mean: measured[name].mean_x, var: measured[name].var_x}
        params = _replace(params, lambda path, x, new=new: _as(path, new[path], x), new)
    return params


def _measure(f: Activations, params: PyTree, batches: Sequence[Any]) -> dict[str, Moments]:
    """Moments of each space with a constant: its own are those of x."""
    return stream(
        lambda batch: f(params, batch),
        lambda batch: {k: jnp.zeros((*v.shape[:-1], 1)) for k, v in f(params, batch).items()},
        batches,
    )


def _bias(spec: Spec, name: str) -> str:
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
            f"space {name!r} needs one bias to shift its mean, it has {paths or 'none'}: "
            "add one, or leave the space out"
        )
    return paths[0]


def _affine(params: PyTree, spec: Spec, name: str, bias: str, scale: Array, shift: Array) -> PyTree:
    """Every writer of a space times `scale`, its bias plus `shift`."""
    writers = {use.path: use for use in spec.uses(name) if use.role == "write"}

    def move(path: str, x: Array) -> Array:
        use, axes = writers[path], spec.axes(path)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        # one axis may be a group: its factor is split off and merged again
        sizes = [spec.space(f.space).size for f in axes[use.axis]]
        split = wide.reshape(*x.shape[: use.axis], *sizes, *x.shape[use.axis + 1 :])
        column = [1] * split.ndim
        column[use.axis + use.factor] = -1
        new = (split * scale.reshape(column)).reshape(x.shape)
        return (new + shift if path == bias else new).astype(x.dtype)

    return _replace(params, move, writers)


def _as(path: str, new: Array, old: Array) -> Array:
    if new.shape != old.shape:
        raise ValueError(f"leaf {path!r} has shape {old.shape}, what was measured {new.shape}")
    return new.astype(old.dtype)


def _replace(params: PyTree, f: Callable[[str, Array], Array], paths: Any) -> PyTree:
    def at(path: tuple[Any, ...], x: Array) -> Array:
        named = path_str(path)
        return f(named, x) if named in paths else x

    return jax.tree.map_with_path(at, params)
