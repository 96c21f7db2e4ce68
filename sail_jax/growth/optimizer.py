"""The state of an optimiser, carried through a change of basis.

First moments are averages of gradients and move dually, exactly for every map. Second moments are
averages of squared gradients. A permutation, duplication or any other index form moves them
exactly; a map that mixes units does not, as that would need the covariances of gradients. Counts
and schedules stay. Averages of parameters (EMA) are parameters: `change_basis` itself moves them.
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
"""How a field of a state moves: a kind of `change_basis`, or "restart"."""

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
"""How the fields of optax states move, by name.

They are those of Adam(W), AMSGrad, Lion, RMSProp, SGD with momentum, `optax.ema` (an average of
updates), Adagrad, MultiSteps, schedule-free and `trajectory.average_params`.
"""


class Moved(NamedTuple):
    """What was done to one field of an optimiser's state.

    Attributes:
      path: Where the field is, its keys joined by "/".
      how: Whether it was moved, kept as it was, or restarted.
      reason: The law by which it was moved, or why it was restarted; "" if it was kept.
    """

    path: str
    how: Literal["moved", "kept", "restarted"]
    reason: str


class StateReport(NamedTuple):
    """What `change_state` did; `print` shows a table.

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
    """Re-expresses an optimiser's state as the parameters are, so that training can go on.

    A field that holds something for each parameter moves by its law. Where a second moment has no
    law (a dense map), the whole state that holds it is restarted, its count and first moment too: a
    count without its moments would make the bias correction wrong and the first steps too long.
    Counts elsewhere (schedules) are kept.

    Args:
      state: The optax state before the change of basis.
      fresh: `optimizer.init(new_params)`, of the same optimiser: what a restart takes.
      spec: The spec of the parameters before the change.
      maps: The maps, by space.
      laws: How fields move that `LAWS` lacks, or other laws for those it has, by the name of the
        field.

    Returns:
      The new state, and a report of what was done to each field.

    Raises:
      TypeError: If an entry of `maps` is no `SpaceMap`.
      ValueError: If a law is unknown, a field holds something for each parameter and has no law,
        the two states differ in structure, or the maps do not fit the spec.

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
    # Second moments, being squares, follow a map that copies units. Through one that mixes them
    # they are not known, so a dense map restarts the state that holds them.
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
    """The new state of one node; what was done is added to `rows`."""
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
                f"{list(jnp.shape(fresh))}, and is no tree of parameters"
            )
        if hasattr(node, "shape"):
            rows.append(Moved(path, "kept", ""))
        return node
    # Only the fields of optax's states have names that say how they move.
    named = isinstance(node, tuple) and hasattr(node, "_fields")
    held = {name for name, part in parts.items() if named and _holds_params(part, spec)}
    places = {name: f"{path}/{name}".lstrip("/") for name in parts}
    for name in (name for name in parts if name in held):
        if name not in laws:
            raise ValueError(
                f"the state {places[name]!r} ({type(node).__name__}) holds something for each "
                f"parameter, and how it moves is not known: say laws={{{name!r}: ...}}"
            )
        # One field without a law restarts its neighbours too, so that they stay consistent.
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
    """The children of a node by name, and what makes the node of them."""
    found, structure = jax.tree.flatten_with_path(node, is_leaf=lambda x: x is not node)
    return {path_str(path): part for path, part in found}, structure


def _holds_params(value: PyTree, spec: Spec) -> bool:
    """Whether a field has leaves, all of them at paths of parameters."""
    paths = [path_str(path) for path, _ in jax.tree.leaves_with_path(value)]
    return bool(paths) and {leaf.path for leaf in spec.leaves}.issuperset(paths)


def learning_rates(
    params: PyTree, spec: Spec, maps: Mapping[str, SpaceMap], optimizer: Literal["sgd", "adam"]
) -> PyTree:
    """Computes factors on updates with which training commutes with the maps.

    A grown network that trains with them follows, image by image, the path that the old one would
    have taken. The factors depend on what an entry w and its gradient are multiplied by, w' = a w
    and g' = b g, and on how the optimiser's update depends on the gradient:

    - "sgd", with momentum or not: a / b. Of c copies, c for what writes them and 1 / c for what
      reads them.
    - "adam", whose updates do not depend on the scale of gradients (epsilon aside): |a|. 1 for what
      writes copies, 1 / c for what reads them.

    They are all ones for a permutation.

    Args:
      params: The grown parameters.
      spec: The spec from before the growth.
      maps: The maps, by space.
      optimizer: Which rule the factors are for.

    Returns:
      A tree of the structure of `params`, whose leaves broadcast against the parameters.

    Raises:
      TypeError: If an entry of `maps` is no `SpaceMap`.
      ValueError: If `optimizer` is neither of these, the maps do not fit the spec, or a map is
        dense. Under "sgd" orthogonal maps are allowed: they commute with it, so their factors are
        ones.

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
        """The factors along an axis: those of a product multiply, blocks are laid end to end."""
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
    """The factors for each role, per new unit of an index form."""
    write, read = (jnp.ones(m.new) if e is None else e for e in m.entries)
    gain, dual = (write != 0).astype(write.dtype), write * read
    if optimizer == "adam":
        return {"write": jnp.abs(write), "read": jnp.abs(read), "gain": gain}
    # Each pair (a, b) says what a parameter in this role is multiplied by, and what its gradient
    # is.
    pairs: dict[Role, tuple[Array, Array]] = {
        "write": (write, read),
        "read": (read, write),
        "gain": (gain, dual),
    }
    # Where no gradient arrives, nothing moves at any rate.
    return {k: jnp.where(b == 0, 1, a / jnp.where(b == 0, 1, b)) for k, (a, b) in pairs.items()}
