"""Computes the leaves of a grown network from the leaves of the old network.

`sail_jax.growth.networks.plan` makes a `Growth`. Both `grow` (in memory) and the growth of
checkpoints on disk compute leaves with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from sail_jax.basis.axes import Factor
from sail_jax.basis.certificate import Report
from sail_jax.basis.change_basis import change_basis
from sail_jax.basis.maps import SpaceMap
from sail_jax.basis.spaces import Leaf, Space, Spec
from sail_jax.checks import as_array, nearest
from sail_jax.growth.fresh import aki, initial, leaf_key, scale_norms
from sail_jax.growth.layers import Source
from sail_jax.growth.named import Method, Step
from sail_jax.views import view


class Operands(NamedTuple):
    """The arrays that differ between leaves with the same computation.

    Attributes:
      weights: The weights of the old leaves in the sum; None for a single leaf.
      maps: The maps of the leaf's spaces, by their names in `Rule.spec`.
      key: The leaf's PRNG key; None if the growth was planned without a key.
      fresh: A mask of the entries that are drawn anew, broadcastable to the leaf; None for no
        entries.
      output: The factor on the result, broadcastable to the leaf; None for 1.
    """

    weights: np.ndarray | None
    maps: dict[str, SpaceMap]
    key: PRNGKeyArray | None
    fresh: Array | None
    output: Array | None


@dataclass(frozen=True)
class Rule:
    """The computation of a leaf, independent of its name: `rule(operands, *arrays)`, pure and
    jitted.

    Leaves with the same computation have equal rules, which are compiled once. The arrays are the
    old leaves in the sum, then the leaf of the next layer unless it is among them.

    Attributes:
      spec: The spec of only this leaf; see `Spec.alone`.
      move: The method's function that applies maps; None for `change_basis`.
      edits: The method's further edits of the leaf, in order.
      options: The names and values of the method's options.
      transpose: Whether the sum of the old leaves is transposed.
      scale: The factor on the sum.
      identity: Whether an identity matrix replaces the sum.
      above: The index of the array with the leaf of the next layer; None if not needed.
      eta: Whether the leaf is a gain that `scale_norms` multiplies.
      std: The standard deviation of fresh entries.
    """

    spec: Spec
    move: Step | None
    edits: tuple[Step, ...]
    options: tuple[tuple[str, Any], ...]
    transpose: bool
    scale: float
    identity: bool
    above: int | None
    eta: bool
    std: float

    def __call__(self, operands: Operands, *arrays: Array) -> Array:
        return _compute(self, operands, arrays)


@dataclass(frozen=True, eq=False, repr=False)
class Growth:
    """A planned growth of a network, leaf by leaf, from `plan`. It contains no parameters.

    Attributes:
      config: The new configuration (widths, heads, layers, epsilons, ties).
      leaves: The shape and dtype of each leaf of the grown network, by path.
      report: The losses according to the axes: one row per mapped space, and one per changed number
        of layers. A growth without a loss in the report is not necessarily exact; see `Report`.
      notes: Further changes, one sentence each.
      spec: The spaces of the network after deepening and before widening.
      maps: The maps of these spaces. With `spec` and `maps`, `change_state` converts the state of
        an optimiser.
    """

    config: dict[str, Any]
    leaves: dict[str, jax.ShapeDtypeStruct]
    report: Report
    notes: tuple[str, ...]
    spec: Spec
    maps: Mapping[str, SpaceMap]
    _method: Method
    _options: Mapping[str, Any]
    _key: PRNGKeyArray | None
    _sources: Mapping[str, Source]
    _eta: frozenset[str]
    _outputs: Mapping[str, Array]
    _fresh: Mapping[str, Array]
    _std: float

    def _repr_html_(self) -> str:
        changed = [("leaves", len(self.leaves)), *(("note", note) for note in self.notes)]
        sizes = [(name, f"{m.old} to {m.new}") for name, m in self.maps.items()]
        return view(
            f"growth: {self.report.lost or 'no loss according to the axes'}", changed + sizes
        )

    def needs(self, path: str) -> tuple[str, ...]:
        """Lists the leaves of the old network that a new leaf depends on."""
        source = self._source(path)
        return tuple(dict.fromkeys([*source.paths, *([source.above] if source.above else [])]))

    def leaf(self, path: str, arrays: Mapping[str, Array]) -> Array:
        """Computes one leaf of the grown network. Pure, jitted.

        Args:
          path: The path of the new leaf.
          arrays: Leaves of the old network by path, at least the leaves in `needs(path)`.

        Returns:
          The new leaf, in the dtype of the old leaves.

        Raises:
          ValueError: If the leaf is not in the grown network, or a required old leaf is missing.
        """
        needs = self.needs(path)
        for name in needs:
            if name not in arrays:
                raise ValueError(f"leaf {path!r} is computed from {name!r}, which is missing")
        rule, operands = self.computation(path)
        return rule(operands, *(as_array(arrays[name]) for name in needs))

    def computation(self, path: str) -> tuple[Rule, Operands]:
        """Returns the computation of `leaf` as a rule and its operands, to be run elsewhere.

        Args:
          path: The path of the new leaf.

        Returns:
          A rule and its operands. `rule(operands, *arrays)` is the new leaf, where `arrays` are the
          old leaves in the order of `needs(path)`.

        Raises:
          ValueError: If the leaf is not in the grown network.
        """
        source = self._source(path)
        # With neutral names, equivalent leaves of all layers share one rule, which is compiled
        # once.
        spec, names = self.spec.alone(path)
        gains = {f.space for axis in self.spec.axes(path) for f in axis if f.role == "gain"}
        rule = Rule(
            spec,
            self._method.move,
            self._method.edits,
            tuple(self._options.items()),
            source.transpose,
            source.scale,
            source.identity,
            self.needs(path).index(source.above) if source.above else None,
            bool(gains & self._eta),
            self._std,
        )
        return rule, Operands(
            None if len(source.paths) == 1 else np.asarray(source.weights),
            {new: self.maps[old] for old, new in names.items() if old in self.maps},
            None if self._key is None else leaf_key(self._key, path),
            self._fresh.get(path),
            self._outputs.get(path),
        )

    def _source(self, path: str) -> Source:
        """Returns the source of a new leaf; raises a ValueError for an unknown leaf."""
        if path not in self._sources:
            raise ValueError(
                f"the grown network has no leaf {path!r}{nearest(path, self._sources)}"
            )
        return self._sources[path]

    def __repr__(self) -> str:
        return f"Growth({len(self.leaves)} leaves, lost: {self.report.lost or 'nothing found'})"


@partial(jax.jit, static_argnums=0)
def _compute(rule: Rule, operands: Operands, arrays: tuple[Array, ...]) -> Array:
    """Computes the new leaf: sum, maps, edits, new draws, factor."""
    spec, options = rule.spec, dict(rule.options)
    weights, maps, key, fresh, output = operands
    dtype = arrays[0].dtype
    x = arrays[0]
    if weights is not None:
        wide = jnp.promote_types(dtype, jnp.float32)
        # There may be more arrays than weights, because the leaf of the next layer may follow the
        # leaves in the sum.
        x = reduce(add, (w * a.astype(wide) for w, a in zip(weights, arrays, strict=False)))
    if rule.scale != 1:
        x = x.astype(jnp.promote_types(dtype, jnp.float32)) * rule.scale
    # For an identity, `x` is the bias of the layer, and its length is the number of rows.
    x = jnp.eye(len(x), dtype=dtype) if rule.identity else x.T if rule.transpose else x
    # The order matters. Maps refer to the network at its new depth and old widths, and grown units
    # exist only after the maps.
    if maps:
        if rule.above is not None:
            x = _from_above(x, arrays[rule.above], spec, maps)
        elif rule.move is not None:
            x = rule.move({"leaf": x}, spec, maps, key, options)["leaf"]
        else:
            x = change_basis({"leaf": x}, spec, maps)["leaf"]
        for edit in rule.edits:
            x = edit({"leaf": x}, spec, maps, key, options)["leaf"]
        if rule.eta:
            x = scale_norms({"leaf": x}, spec, maps)["leaf"]
    if fresh is not None:
        factors = [f for axis in spec.axes("leaf") for f in axis]
        drawn = initial(factors, key, x.shape, rule.std)
        x = jnp.where(fresh, drawn.astype(x.dtype), x)
    if output is not None:
        x = x * output.astype(x.dtype)
    return x.astype(dtype)


def _from_above(x: Array, above: Array, spec: Spec, maps: dict[str, SpaceMap]) -> Array:
    """Takes the entries that write new units from the leaf of the next layer."""
    ((path, axes),) = spec.leaves
    layer = ((Factor("layer", "write"),), *axes)
    # `aki` works on stacked layers. In a stack of these two, the lower layer takes its new units
    # from the upper layer.
    two = Spec((Leaf(path, layer),), (*spec.spaces, Space("layer", 2, "stack")))
    stacked = change_basis({path: jnp.stack([x, above])}, two, maps)
    return aki(stacked, two, maps)[path][0]
