"""Transforms the state of an optimiser under a change of basis.

First moments are averages of gradients. They transform dually, exactly for every map. Second
moments are averages of squared gradients. A map in index form (a permutation or duplication, for
example) transforms them exactly. A map that mixes units does not, because that would require the
covariances of gradients. Counts and schedules do not change. Averages of parameters (EMA) are
parameters, and `change_basis` transforms them.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath
from jaxtyping import Array, PyTree

from sail_jax.basis.axes import Axis, Role, parts
from sail_jax.basis.change_basis import change_basis
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap
from sail_jax.basis.spaces import Spec, table
from sail_jax.checks import one_of
from sail_jax.trees import path_str

Law = Literal["params", "gradients", "second_moments", "restart"]
"""The transformation of a field of a state: a kind of `change_basis`, or "restart"."""

LAWS: dict[str, Law] = {
    "mu": "gradients",
    "trace": "gradients",
    "ema": "gradients",
    "acc_grads": "gradients",
    "nu": "second_moments",
    "nu_max": "second_moments",
    "sum_of_squares": "second_moments",
    "z": "params",
    "mean": "params",
    "newer": "params",
}
"""The transformations of the fields of optax states, by name.

The fields belong to Adam(W), AMSGrad, Lion, RMSProp, SGD with momentum, `optax.ema` (an average of
updates), Adagrad, MultiSteps, schedule-free and `trajectory.average_params`.
"""


class Moved(NamedTuple):
    """The treatment of one field of an optimiser's state.

    Attributes:
      path: The path of the field, its keys joined by "/".
      how: Whether the field was moved, kept or restarted.
      reason: The law of a moved field, or the reason for a restart; "" if kept.
    """

    path: str
    how: Literal["moved", "kept", "restarted"]
    reason: str


class StateReport(NamedTuple):
    """The report of `change_state`; `print` shows a table.

    Attributes:
      fields: One entry per field of the state.
    """

    fields: tuple[Moved, ...]

    @property
    def exact(self) -> bool:
        """Whether nothing was restarted."""
        return all(field.how != "restarted" for field in self.fields)

    def __str__(self) -> str:
        return table([("field", "how", "why"), *self.fields])


def change_state(
    state: PyTree,
    fresh: PyTree,
    spec: Spec,
    maps: Mapping[str, SpaceMap],
    *,
    laws: Mapping[str, Law] | None = None,
) -> tuple[PyTree, StateReport]:
    """Transforms an optimiser's state like the parameters, to continue training.

    A field with a value for each parameter moves by its law. A second moment cannot be transformed
    by a dense map. In that case its whole state is restarted, including count and first moment. A
    count without its moments would make the bias correction wrong and the first steps too long.
    Counts elsewhere (schedules) are kept.

    Args:
      state: The optax state before the change of basis.
      fresh: `optimizer.init(new_params)` of the same optimiser, used by restarts.
      spec: The spec of the parameters before the change.
      maps: The maps, by space.
      laws: Laws by the name of the field, in addition to `LAWS` or instead of them.

    Returns:
      The new state, and a report on each field.

    Raises:
      TypeError: If an entry of `maps` is not a `SpaceMap`.
      ValueError: If a law is unknown, or there is no law for a field with a value for each
        parameter. If the two states differ in structure, or the maps do not match the spec.

    >>> import optax
    >>> from sail_jax.basis.spaces import spec
    >>> from sail_jax.growth import widen
    >>> s = spec({"bias": jnp.zeros(2)}, {"bias": "h"}, spaces={"h": "outer"})
    >>> optimizer = optax.sgd(0.1, momentum=0.9)
    >>> old, fresh = (optimizer.init({"bias": jnp.zeros(n)}) for n in (2, 3))
    >>> state, report = change_state(old, fresh, s, {"h": widen(2, 3)})
    >>> print(report)
    field    how    why
    0/trace  moved  gradients
    """
    all_laws: dict[str, Law] = {**LAWS, **(laws or {})}
    for field, law in all_laws.items():
        one_of(f"laws[{field!r}]", law, Law)
    spec.check(maps)
    # Second moments are squares and follow a map that copies units. A map that mixes units does not
    # determine them, so a dense map restarts their state.
    dense = [n for n, m in maps.items() if m.index is None and Family.IDENTITY not in m.family]
    rows: list[Moved] = []
    out = _walk(state, fresh, "", spec, maps, all_laws, dense, rows)
    return out, StateReport(tuple(rows))


def _walk(
    node: PyTree,
    fresh: PyTree,
    path: str,
    spec: Spec,
    maps: Mapping[str, SpaceMap],
    laws: Mapping[str, Law],
    dense: list[str],
    rows: list[Moved],
) -> PyTree:
    """Computes the new state of one node, and adds its report to `rows`."""
    parts, structure = _parts(node)
    others, other = _parts(fresh)
    if structure != other:
        raise ValueError(
            f"the state at {path!r}, {type(node).__name__}, has other parts in fresh, "
            f"{type(fresh).__name__}: fresh must be optimizer.init(new_params) of the same "
            "optimizer"
        )
    if structure == jax.tree.structure(0):
        if jnp.shape(node) != jnp.shape(fresh):
            raise ValueError(
                f"the state {path!r} has shape {list(jnp.shape(node))}, in fresh "
                f"{list(jnp.shape(fresh))}, and is not a tree of parameters"
            )
        if hasattr(node, "shape"):
            rows.append(Moved(path, "kept", ""))
        return node
    # Only optax's states have field names that determine the law.
    named = isinstance(node, tuple) and hasattr(node, "_fields")
    held = {name for name, part in parts.items() if named and _holds_params(part, spec)}
    places = {name: f"{path}/{name}".lstrip("/") for name in parts}
    for name in (name for name in parts if name in held):
        if name not in laws:
            raise ValueError(
                f"the state {places[name]!r} ({type(node).__name__}) has a value for each "
                f"parameter, but its law is unknown: give laws={{{name!r}: ...}}"
            )
        # A field without a law also restarts its neighbours, which keeps them consistent.
        if laws[name] == "restart" or (laws[name] == "second_moments" and dense):
            asked = laws[name] == "restart"
            reason = "asked for" if asked else f"the map of {dense[0]!r} is dense"
            rows.append(Moved(places[name], "restarted", f"{reason}; with all of its state"))
            return fresh
    out = []
    for name, part in parts.items():
        if name in held:
            rows.append(Moved(places[name], "moved", laws[name]))
            out.append(change_basis(part, spec, maps, kind=laws[name]))  # pyright: ignore
        else:
            out.append(_walk(part, others[name], places[name], spec, maps, laws, dense, rows))
    return jax.tree.unflatten(structure, out)


def _parts(node: PyTree) -> tuple[dict[str, PyTree], Any]:
    """Returns the children of a node by name, and its structure."""
    found, structure = jax.tree.flatten_with_path(node, is_leaf=lambda x: x is not node)
    return {path_str(path): part for path, part in found}, structure


def _holds_params(value: PyTree, spec: Spec) -> bool:
    """Checks whether a field has leaves, all of them at paths of parameters."""
    paths = [path_str(path) for path, _ in jax.tree.leaves_with_path(value)]
    return bool(paths) and {leaf.path for leaf in spec.leaves}.issuperset(paths)


def learning_rates(
    params: PyTree, spec: Spec, maps: Mapping[str, SpaceMap], optimizer: Literal["sgd", "adam"]
) -> PyTree:
    """Computes factors on updates that make training commute with the maps.

    With these factors, the grown network follows the image of the old network's training
    trajectory. If a map multiplies an entry by a (w' = a w) and its gradient by b (g' = b g), the
    factor depends on the optimiser:

    - "sgd", with or without momentum, has the factor a / b. For c copies it is c for weights that
      write them, and 1 / c for weights that read them.
    - "adam" has the factor |a|, because its updates do not depend on the scale of gradients (except
      for epsilon). It is 1 for weights that write copies, and 1 / c for weights that read them.

    For a permutation all factors are 1.

    Args:
      params: The grown parameters.
      spec: The spec before the growth.
      maps: The maps, by space.
      optimizer: The optimiser, "sgd" or "adam".

    Returns:
      A tree with the structure of `params`. Its leaves broadcast against the parameters.

    Raises:
      TypeError: If an entry of `maps` is not a `SpaceMap`.
      ValueError: If `optimizer` is unknown, the maps do not match the spec, or a map is dense.
        Under "sgd" orthogonal maps are allowed, because they commute with it and have factors of 1.

    >>> from sail_jax.basis.spaces import spec
    >>> from sail_jax.growth import widen
    >>> s = spec({"bias": jnp.zeros(2)}, {"bias": "h"}, spaces={"h": "outer"})
    >>> learning_rates({"bias": jnp.zeros(3)}, s, {"h": widen(2, 3)}, "sgd")["bias"].tolist()
    [2.0, 1.0, 2.0]
    """
    one_of("optimizer", optimizer, ("sgd", "adam"))
    spec.check(maps)
    vectors: dict[str, dict[Role, Array]] = {}
    for name, m in maps.items():
        if m.index is not None:
            vectors[name] = _factors(m, optimizer)
        elif optimizer == "adam" or Family.ORTHOGONAL not in m.family:
            raise ValueError(
                f"no learning rate per entry makes {optimizer} commute with the dense map of "
                f"{name!r}, which mixes entries"
            )
    sizes = {space.name: space.size for space in spec.resized(maps).spaces}

    def leaf(key_path: KeyPath, x: Array) -> Array:
        axes = spec.axes(path_str(key_path))
        out = jnp.ones((1,) * len(axes))
        for k, axis in enumerate(axes):
            if any(f.space in vectors for f in axis):
                shape = [-1 if i == k else 1 for i in range(len(axes))]
                out = out * along(axis).reshape(shape)
        return out

    def along(axis: Axis) -> Array:
        """Returns the factors along an axis: products are multiplied, blocks concatenated."""
        lead, inner = parts(axis)
        out = jnp.ones(1)
        for f in lead:
            factor = vectors.get(f.space, {}).get(f.role, jnp.ones(sizes[f.space]))
            out = (out[:, None] * factor).reshape(-1)
        if inner:
            out = (out[:, None] * jnp.concatenate(list(map(along, inner)))).reshape(-1)
        return out

    return jax.tree.map_with_path(leaf, params)


def _factors(m: SpaceMap, optimizer: str) -> dict[Role, Array]:
    """Computes the factors for each role and new unit of a map in index form."""
    write, read = (jnp.ones(m.new) if e is None else e for e in m.entries)
    gain, dual = (write != 0).astype(write.dtype), write * read
    if optimizer == "adam":
        return {"write": jnp.abs(write), "read": jnp.abs(read), "gain": gain}
    # Each pair (a, b) has the factors on a parameter in this role and on its gradient.
    pairs: dict[Role, tuple[Array, Array]] = {
        "write": (write, read),
        "read": (read, write),
        "gain": (gain, dual),
    }
    # If there is no gradient, the rate does not matter.
    return {k: jnp.where(b == 0, 1, a / jnp.where(b == 0, 1, b)) for k, (a, b) in pairs.items()}
