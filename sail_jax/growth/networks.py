"""Grows whole networks by a plan, leaf by leaf, from shapes and a configuration.

`plan` determines everything without reading parameters, unless units are pruned. `Growth.leaf` then
computes any tensor of the grown network from the few tensors on which it depends. `grow` in memory
and growth from disk to disk share this definition. Depth comes first: layers are renumbered,
repeated or mixed. The deep network is then widened by the maps of its spaces.
"""

import math
import numbers
from collections.abc import Callable, Mapping
from reprlib import repr as short
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import block_diag
from jaxtyping import ArrayLike, PRNGKeyArray, PyTree

from sail_jax.architectures.table import Config, Rules, fill, look, put
from sail_jax.basis.axes import parse_axes, path_pattern
from sail_jax.basis.certificate import Report
from sail_jax.basis.maps import SpaceMap, compose, identity
from sail_jax.basis.spaces import Spec
from sail_jax.checks import nearest, one_key
from sail_jax.configurations import LAYER_KEYS
from sail_jax.growth.depth import _is_flat, _nested, deepen, interpolate
from sail_jax.growth.layers import Source, added, chained, deepened, layer_row, own_first, relayered
from sail_jax.growth.leaves import Growth
from sail_jax.growth.named import METHODS, Method
from sail_jax.growth.pruning import prune_units, values_of
from sail_jax.growth.quantities import Fitted, fit, judge, undone, without_ties
from sail_jax.growth.targets import (
    TIES,
    check_depth,
    check_stated,
    layer_count,
    new_sizes,
    other_outputs,
    rules_of,
    target,
)
from sail_jax.layer_entries import moved
from sail_jax.trees import leaf_paths, with_layers


def grow(
    params: PyTree,
    config: Config,
    to: Mapping[str, Any],
    method: str = "lemon",
    *,
    key: PRNGKeyArray | None = None,
    **options: Any,
) -> tuple[PyTree, Growth]:
    """Grows a network: plans the growth and computes every leaf.

    Args:
      params: The parameters of the network, by path or as a pytree.
      config: The configuration of the network; see `plan`.
      to: The target; see `plan`.
      method: The growth method, a name in `METHODS`.
      key: A PRNG key; see `plan` for the methods that require it.
      **options: The other arguments of `plan`, and the options of the method.

    Returns:
      The parameters of the grown network, and the `Growth` with the new configuration and the
      report of losses. The parameters have the structure of `params` if their paths are the same.
      Otherwise they are dictionaries, flat if `params` is flat. Neither network is run.

    Raises:
      TypeError: As in `plan`.
      ValueError: As in `plan`.

    >>> config = {"model_type": "mlp", "inputs": 1, "widths": [2]}
    >>> net = {"layers.0.kernel": jnp.array([[1.0, 2.0]]), "layers.0.bias": jnp.zeros(2),
    ...        "out.kernel": jnp.array([[3.0], [4.0]]), "out.bias": jnp.zeros(1)}
    >>> new, growth = grow(net, config, {"width": 1.5}, "interpolate")
    >>> new["layers.0.kernel"].tolist(), growth.config["widths"]
    ([[1.0, 1.5, 2.0]], [3])
    """
    growth = plan(params, config, to, method, key=key, **options)
    leaves, structure = jax.tree.flatten(params)
    arrays = dict(zip(leaf_paths(params), leaves, strict=True))
    new = {path: growth.leaf(path, arrays) for path in growth.leaves}
    if new.keys() == arrays.keys():
        return jax.tree.unflatten(structure, [new[path] for path in arrays]), growth
    if growth.spec.layers:
        like = _relisted(params, growth)
        ordered = [new[path] for path in leaf_paths(like)]
        return jax.tree.unflatten(jax.tree.structure(like), ordered), growth
    return (new if _is_flat(params) else _nested(new)), growth


def plan(
    shapes: PyTree,
    config: Config,
    to: Mapping[str, Any],
    method: str = "lemon",
    *,
    key: PRNGKeyArray | None = None,
    depth_method: str | None = None,
    untie: bool | None = None,
    require_lossless: bool = False,
    rules: Spec | Rules | Callable[[Config], Rules] | None = None,
    scores: Mapping[str, ArrayLike] | None = None,
    **options: Any,
) -> Growth:
    """Plans the growth of a network to a larger size, or its pruning to a smaller size.

    Args:
      shapes: The parameters of the network, as arrays or ShapeDtypeStructs, by path or as a pytree.
        Only methods that prune read their values.
      config: The configuration of the network for `sail_jax.architectures.of`, such as a
        config.json.
      to: The target. It is a whole configuration, or a mapping of the entries or spaces that
        change, or the factors {"width": 2, "depth": 4}. The value "2x" means twice the old value. A
        factor of width multiplies the number of heads. The size of a head, and the number of query
        heads per key head, do not change.
      method: The growth method, a name in `METHODS`. It must widen if any width grows, and prune if
        any width shrinks.
      key: A PRNG key for methods that draw random numbers. Some other methods use it if given:
        LEMON divides readers unevenly, and Net2Net copies random units.
      depth_method: The depth method, a name in `METHODS`. By default `deepens_by` of the method, or
        "identity" for a chain of unequal layers.
      untie: Whether a tied table gets a separate head. True by default if `to` states untied
        tables, or if the method is lossless and the maps would break the tie. A network that is
        known by its spec has no place for the head. There a gain or a scale of the outputs is
        divided, if `Spec.ties` names it. Other maps are refused, unless `untie` is False.
      require_lossless: Whether to refuse a growth with a loss in its report. An empty report is
        necessary but not sufficient, because neither network is run here. To check that the
        function is preserved, compare outputs (`sail_jax.certificate`), or grow a checkpoint on
        disk with `grow_checkpoint(..., require_lossless=True)`, which runs both networks.
      rules: For an unknown architecture, its spec (see `sail_jax.spec_of`), its `Rules`, or a
        function from a configuration to `Rules`. With a spec, `config` may be empty, and the keys
        of `to` are spaces and the names of lists of layers.
      scores: For a method that prunes, the scores of units by space, such as the mean squares of
        activations, which replace the method's scores.
      **options: The options of the method and the depth method; see `METHODS`.

    Returns:
      The growth: the new configuration, the shape of every new leaf, the report of losses, and the
      computation of each leaf.

    Raises:
      TypeError: If `config` or `to` is not a mapping, or a key of `to` is not a string. If `key` is
        not a PRNG key, or `rules` has an invalid type.
      ValueError: For an unknown method or option, an option with an invalid value, or a
        configuration that contradicts the tensors. If growth cannot reach `to`, a key is missing,
        or a tied table cannot be untied. If a leaf has an 8-bit float dtype, or a method that
        prunes gets only shapes. If `require_lossless` is set and the report has a loss. The message
        is one sentence that contains the entry, space or leaf at fault.

    >>> config = {"model_type": "mlp", "inputs": 3, "widths": [4]}
    >>> net = {"layers.0.kernel": jnp.zeros((3, 4)), "layers.0.bias": jnp.zeros(4),
    ...        "out.kernel": jnp.zeros((4, 2)), "out.bias": jnp.zeros(2)}
    >>> growth = plan(net, config, {"width": 2}, "interpolate")
    >>> growth.config["widths"], growth.leaves["out.kernel"].shape
    ([8], (8, 2))
    >>> print(growth.report.lost[:55])
    'hidden.0': its nonlinearity (relu) commutes with posit
    """
    one_key(key, optional=True)
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a mapping (config.json), got {type(config).__name__}")
    flat = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for path, x in zip(leaf_paths(shapes), jax.tree.leaves(shapes), strict=True)
    }
    for path, x in flat.items():
        if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1:
            raise ValueError(
                f"leaf {path!r} is {x.dtype}, which has no arithmetic: cast the network first, "
                "with its scales"
            )
    rules = Rules.of(rules) if isinstance(rules, Spec) else rules
    to = _plain(to)
    make = rules_of(config, rules)
    old_rules = make(config)
    # Layers are counted first, because this gives the best message about a missing tensor.
    counts = layer_count(old_rules, flat)
    old_spec = old_rules.spec(flat)
    check_stated(config, old_rules, old_spec, counts)
    goal, given = target(config, to, old_rules, old_spec, counts)
    asked = {name: look(goal, name) for name in counts}
    chains = {name for name, new in asked.items() if isinstance(new, list | tuple)}
    for name in chains:
        if not isinstance(look(config, name), list | tuple):
            raise ValueError(
                f"{name} is {look(config, name)!r}, not a list; got {short(asked[name])}"
            )
    wide, deep = _methods(method, depth_method)
    if (
        depth_method is None
        and not wide.deepens
        and any(len(asked[name]) != counts[name] for name in chains)
    ):
        # Unequal layers cannot be mixed or copied, so only identity deepens them.
        deep = METHODS["identity"]
    values = _values(wide, deep, options)
    notes: list[str] = []

    # Depth comes first, because widths refer to the new layers. It determines the old leaves for
    # each leaf of the deep network.
    layers = {}
    for name, new in asked.items():
        old, new = counts[name], len(new) if name in chains else new
        if new != old and name in chains and deep.new != "fresh":
            raise ValueError(f"the layers of {name!r} are unequal: only identity deepens them")
        if new != old and wide.prunes:
            raise ValueError(
                f"{method!r} removes units of layers, but {name!r} is {old} and would be "
                f"{short(new)}"
            )
        if new != old:
            fixed = int(name not in chains and own_first(flat, old_rules, name))
            layers[name] = _layers(deep, old, new, values, name, fixed, name in chains)
    sources = deepened(flat, old_rules, layers, wide.above)
    if layers and isinstance(rules, Rules) and rules.given:
        deep_spec, given = relayered(rules.given, sources, given)
        rules = Rules.of(deep_spec)
        make = rules_of(config, rules)
    deep_config = dict(config)
    for name, new in asked.items():
        if name in chains and name in layers:
            listed = look(config, name)
            deep_config = put(deep_config, name, [listed[i] for i in layers[name].index.tolist()])
            sources = chained(flat, old_rules, name, layers[name], sources)
        elif name not in chains:
            deep_config = put(deep_config, name, new)
    for name, m in layers.items():
        # Entries that belong to layers follow the layers.
        deep_config, goal = _per_layer(deep_config, goal, name, m)
    kinds, stated = deep_config.get("layer_types"), goal.get("layer_types")
    # A target may state explicitly that all layers are of the default kind.
    plain = kinds is None and set(stated or ()) <= {"full_attention"}
    if stated and kinds != stated and not plain:
        raise ValueError(f"growth keeps the kinds of layers, {kinds!r}, but to states {stated!r}")
    goal = goal if kinds is None else goal | {"layer_types": kinds}
    # The spec of the deep network at its old widths. All maps of widths refer to it.
    spec = make(deep_config).spec(_shapes(flat, sources))
    goal_rules = make(goal)
    # Given rules contain the sizes of the network before growth, which do not apply to the target.
    if isinstance(rules, Rules):
        goal_rules = goal_rules._replace(sizes={})
    sizes = new_sizes(goal_rules, goal, spec, given, method if wide.prunes else "")

    # A tied table both writes and reads its space, which only orthogonal maps allow. To stay exact
    # under other maps, its second use becomes a separate leaf, made from the same table.
    tied = {path for s in spec.spaces for path, _, _, _, tie in spec.uses(s.name) if tie}
    if asked_ties := [key for key in TIES if key in to]:
        if to[asked_ties[0]] and not tied and not config.get(asked_ties[0]):
            raise ValueError(f"to states {asked_ties[0]!r}, but the network's tables are not tied")
        untie = True if not to[asked_ties[0]] and untie is None else untie
    broken = any(f.tied and f.space in sizes for _, axes in spec.leaves for a in axes for f in a)
    loose = bool(tied) and (
        # Only the table of an architecture determines the path of a second leaf.
        broken and wide.lossless and not wide.prunes and not old_rules.inferred
        if untie is None
        else untie
    )
    if loose and old_rules.inferred:
        raise ValueError(
            f"untie needs the table of an architecture, with a place for the head of "
            f"{min(tied)!r}: give a network with a separate head, and infer its spec"
        )
    if loose:
        if isinstance(rules, Rules):
            make = rules_of(config, rules.loose())
        deep_config, goal = (_untied(entries, old_rules) for entries in (deep_config, goal))
        heads = _heads(flat, spec, make(deep_config), old_rules.head_power)
        sources |= heads
        spec = make(deep_config).spec(_shapes(flat, sources))
        notes += [f"the table {s.paths[0]!r} was untied: {path!r}" for path, s in heads.items()]

    stacks = {n: m for n, m in sizes.items() if "stack" in spec.space(n).nonlinearity.split()}
    widths = {n: m for n, m in sizes.items() if n not in stacks}
    if widths and not (wide.widens or wide.prunes):
        name = next(iter(widths))
        raise ValueError(
            f"{method!r} only deepens, but {name!r} goes from {spec.space(name).size} to "
            f"{widths[name]} units: give a method that widens, and depth_method={method!r}"
        )
    # A key is required only if something is drawn.
    drawn = (widths and wide.needs_key(values)) or ((layers or stacks) and deep.needs_key(values))
    if key is None and drawn:
        raise ValueError(f"{method!r} draws numbers: give key=jax.random.key(0)")
    maps = wide.widths(spec, widths, key, values) if wide.widths and widths else {}
    dropped: dict[str, str] = {}
    if wide.prunes:
        maps, dropped = prune_units(_reader(shapes, sources), spec, widths, scores)
    elif scores is not None:
        raise ValueError(f"scores are for methods that prune, which {method!r} does not")
    layers |= {n: _layers(deep, spec.space(n).size, m, values, n) for n, m in stacks.items()}

    # The next part fits maps to sizes that the network computes with, reports losses, and treats
    # repeated layers.
    deep_rules = make(deep_config)
    fitted = Fitted(maps, goal)
    if wide.lossless:
        # When pruning, only queries and keys are fitted. Experts are also "dot", with further
        # words.
        fitting = {
            name: m
            for name, m in maps.items()
            if not wide.prunes or spec.space(name).nonlinearity == "dot"
        }
        fitted = fit(fitting, spec, deep_rules, goal)
        fitted = fitted._replace(maps=maps | fitted.maps)
    exact = wide.lossless and not wide.prunes
    undoing = undone(spec, fitted.maps) if exact else {}
    judged = without_ties(spec, undoing)
    rows = judge(judged, maps, fitted, _loses(method, wide, values)).spaces
    for name, factors in undoing.items():
        sources, said = _multiplied(sources, factors)
        notes += [f"{text}: the tied leaf reads {name!r} as it writes it" for text in said]
    others = other_outputs(goal_rules, spec, sizes)
    # The loss from pruning depends on the values, not only on axes and maps.
    known = dropped | others
    rows = tuple(row._replace(lost=known.get(row.space, row.lost)) for row in rows)
    new = added(spec, old_rules, layers, chains, deep, values)
    rows += tuple(
        layer_row(n, m, spec, old_rules, deep, new, n in chains, values, goal)
        for n, m in layers.items()
    )
    report = Report(rows)
    if old_rules.inferred and untie is None and exact:
        _check_tied(method, spec, report)
    if require_lossless and report.lost:
        raise ValueError(f"lossless growth was asked for, but {report.lost}")
    if new.unpaired:
        more = f" and {len(new.unpaired) - 1} more" if new.unpaired[1:] else ""
        notes.append(
            f"{new.unpaired[0]!r}{more} are zero: units are paired only in spaces that are not "
            "outer, and only if the spec states the nonlinearity of the stream"
        )
    if isinstance(rules, Rules) and not rules.settings:
        _check_unstated({k: n for k, n in config.items() if k not in counts}, spec, maps)
    grown = dict(fitted.maps) | {n: m for n, m in layers.items() if n in stacks}
    if wide.above:
        _check_alike(method, flat, sources, spec, grown)
    resized = spec.resized(grown)
    final = make(goal).resized(fitted.config, resized)
    for name, m in new.pairs.items():
        grown[name] = compose(grown[name], m) if name in grown else m
    # Some networks multiply a leaf by a size, such as embeddings by the root of their width. Such a
    # leaf is divided by the growth of this factor.
    if wide.lossless:
        growths = {s.name: resized.space(s.name).size / s.size for s in spec.spaces}
        growths |= {n: layers[n].new / layers[n].old if n in layers else 1.0 for n in counts}
        sources, said = _multiplied(sources, _scaled_by_size(deep_rules, spec, growths))
        notes += [f"{text}, to compensate for a factor of the network that grows" for text in said]
    leaves = {}
    for path, x in _shapes(flat, sources).items():
        shape = tuple(n or m for n, m in zip(resized.shape(path), x.shape, strict=True))
        leaves[path] = jax.ShapeDtypeStruct(shape, x.dtype)
    return Growth(
        final,
        leaves,
        report,
        (*notes, *fitted.notes),
        spec,
        grown,
        wide,
        {name: values[name] for name in wide.options},
        key,
        sources,
        fitted.eta,
        new.outputs,
        new.fresh,
        values.get("std", 0.02),
    )


def _relisted(params: PyTree, growth: Growth) -> PyTree:
    """A tree with the structure of the grown network, which has other numbers of listed layers."""
    for name, start, _ in growth.spec.layers:
        order: dict[int, int] = {}
        for path in growth.leaves:
            new, old = map(growth.spec.layer, (path, growth.needs(path)[0]))
            if new and old and new[0] == name:
                order[new[1]] = old[1]
        before = start.removesuffix("{i}")
        params = with_layers(params, before, [order[k] for k in range(len(order))])
    return params


def _plain(value: Any) -> Any:
    """Converts the integers in a target to Python's, which JSON and the checks of sizes require."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    is_other = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return int(value) if is_other else value


def _methods(method: str, depth_method: str | None) -> tuple[Method, Method]:
    """Looks up the methods for width and depth; a depth method does not widen."""
    for name in (method, depth_method):
        if name is not None and (not isinstance(name, str) or name not in METHODS):
            name = str(name)
            raise ValueError(f"no growth method {name!r}{nearest(name, METHODS)}")
    wide = METHODS[method]
    if wide.prunes and depth_method is not None:
        raise ValueError(f"{method!r} prunes and cannot take depth_method: deepen in a second step")
    if depth_method is None:
        return wide, wide if wide.deepens or wide.prunes else METHODS[wide.deepens_by]
    if not METHODS[depth_method].deepens:
        raise ValueError(
            f"depth_method {depth_method!r} does not deepen; these do: "
            f"{', '.join(name for name, m in METHODS.items() if m.deepens)}"
        )
    if wide.deepens and method != depth_method:
        raise ValueError(
            f"two depth methods, {method!r} and {depth_method!r}: give one that widens"
        )
    return wide, METHODS[depth_method]


def _reader(shapes: PyTree, sources: Mapping[str, Source]) -> Callable[[str], np.ndarray]:
    """Reads the leaves of a network with unchanged layers, by the paths of its new spec."""
    leaves = dict(zip(leaf_paths(shapes), jax.tree.leaves(shapes), strict=True))

    def read(path: str) -> np.ndarray:
        source = sources[path]
        x = values_of(source.paths[0], leaves[source.paths[0]])
        return x.T if source.transpose else x

    return read


def _check_tied(method: str, spec: Spec, report: Report) -> None:
    """Raises a ValueError if a method that preserves functions cannot preserve a tied leaf."""
    names = {space.name for space in spec.spaces}
    for row in report.spaces:
        uses = spec.uses(row.space) if row.lost and row.space in names else ()
        tied = [use.path for use in uses if use.tied]
        if tied:
            known = tied[0] in {tie.path for tie in spec.ties}
            raise ValueError(
                f"{method!r} cannot preserve the function while leaf {tied[0]!r} is tied. Space "
                f"{row.space!r}: {row.lost}; "
                + ("" if known else "multiply its products by a parameter that growth can divide, ")
                + "use two leaves, or give untie=False to grow it with this loss"
            )


def _check_alike(
    method: str,
    flat: Mapping[str, Any],
    sources: Mapping[str, Source],
    spec: Spec,
    maps: Mapping[str, SpaceMap],
) -> None:
    """Raises a ValueError if a leaf with units from the next layer has another shape there."""
    for path, source in sources.items():
        grows = any(f.space in maps for axis in spec.axes(path) for f in axis)
        own = tuple(flat[source.paths[0]].shape)
        above = tuple(flat[source.above].shape) if source.above else own
        if grows and own != above:
            raise ValueError(
                f"{method!r} takes new units of leaf {path!r}, {own}, from the next layer, but "
                f"{source.above!r} is {above}: give a method that works with unequal layers"
            )


def _check_unstated(config: Config, spec: Spec, maps: Mapping[str, SpaceMap]) -> None:
    """Raises a ValueError if the configuration would still contain the old size of a grown space.

    This happens if settings are missing in the rules. Equal numbers then suggest which entry
    belongs to which space.
    """
    for name, m in maps.items():
        for key, n in config.items():
            if type(n) is int and n == m.old != m.new:
                raise ValueError(
                    f"space {name!r} grows from {n} to {m.new} units, but the configuration would "
                    f"still state {key!r}: {n}, because the rules lack settings: add the "
                    f"entry that states the space, such as {{{key}: {name}}}"
                )


def _values(wide: Method, deep: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of all options of both methods, all of which must be known."""
    defaults = {**deep.options, **wide.options}
    for name in options:
        if name not in defaults:
            raise ValueError(
                f"no option {name!r}{nearest(name, defaults) if defaults else ': it takes none'}"
            )
    return defaults | {
        name: _option(name, defaults[name], value) for name, value in options.items()
    }


def _option(name: str, default: Any, value: Any) -> Any:
    """Converts an option's value to the kind of its default, hashable for `Rule`."""
    if value is None and default is None:
        return None
    if name == "logits":
        try:
            rows: Any = np.asarray(value, float)
        except (TypeError, ValueError):
            rows = np.zeros(0)
        if rows.ndim != 2 or not np.isfinite(rows).all():
            raise ValueError(f"{name} must be a matrix [new, old] of finite numbers, got {value!r}")
        return tuple(tuple(map(float, row)) for row in rows)
    if isinstance(default, bool | str):
        if not isinstance(value, type(default)):
            kind = "true or false" if isinstance(default, bool) else "a text"
            raise ValueError(f"{name} must be {kind}, got {value!r}")
        return value
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    number = float(value) if is_real else math.nan  # pyright: ignore[reportArgumentType]
    if not math.isfinite(number) or (number < 0 and default is not None):
        raise ValueError(f"{name} must be a finite number, not negative, got {value!r}")
    return number


def _loses(method: str, wide: Method, options: Mapping[str, Any]) -> str:
    """Returns the loss in every space from a method's edits beyond its maps; "" if lossless."""
    if wide.above or wide.move is not None:
        return f"{method}: {wide.about}"
    if options.get("noise"):
        return f"noise of {options['noise']} on the weights that write new units"
    if options.get("mask"):
        return f"new units take part with a mask of {options['mask']}"
    return ""


def _layers(
    deep: Method,
    old: int,
    new: int,
    options: Mapping[str, Any],
    name: str,
    fixed: int = 0,
    chain: bool = False,
) -> SpaceMap:
    """Makes the map of the layers, in which the first `fixed` layers are kept."""
    check_depth(name, old, new)
    if new == old:
        return identity(old)
    if new < old and (chain or deep.new != "copy"):
        raise ValueError(
            f"growth was asked for, but {name!r} is {old} and would be {new}: "
            + (
                "unequal layers cannot be mixed"
                if chain
                else "for fewer layers give depth_method='mean_depth' or another method that mixes"
            )
        )
    if new <= fixed:
        raise ValueError(
            f"{name!r} is {old} and would be {new}, but its first layer differs from the others"
        )
    repeats = interpolate if chain else deep.layers
    if repeats is None:
        assert deep.mixes is not None
        # Each fixed layer is made only from itself.
        shares = deep.mixes(old - fixed, new - fixed, options)
        return deepen(old, new, matrix=block_diag(jnp.eye(fixed), shares))
    index = fixed + repeats(old - fixed, new - fixed)
    return deepen(old, new, lambda *_: np.concatenate([np.arange(fixed), index]))


def _scaled_by_size(rules: Rules, spec: Spec, growths: Mapping[str, float]) -> dict[str, float]:
    """Computes the factor on each leaf that compensates for a growing size that multiplies it."""
    out: dict[str, float] = {}
    for path, axes in spec.leaves:
        for pattern, (size, power) in rules.scales.items():
            if match := path_pattern(pattern).fullmatch(path):
                factor = growths[fill(size, match.groupdict())] ** -power
                factors = [f for axis in axes for f in axis]
                tied = any(f.tied for f in factors)
                if factor == 1 or (tied and any(growths[f.space] != 1 for f in factors)):
                    # A tied table with growing spaces is already reported as a loss.
                    continue
                if tied:
                    raise ValueError(
                        f"the network multiplies {path!r} by {size}^{power:g} where it writes, not "
                        "where it reads: it cannot stay tied"
                    )
                out[path] = out.get(path, 1.0) * factor
    return out


def _multiplied(
    sources: Mapping[str, Source], factors: Mapping[str, float]
) -> tuple[dict[str, Source], list[str]]:
    """Multiplies leaves by factors, and describes those that change."""
    out = {
        path: sources[path]._replace(scale=sources[path].scale * f) for path, f in factors.items()
    }
    said = [f"{path!r} times {factor:.6g}" for path, factor in factors.items() if factor != 1]
    return {**sources, **out}, said


def _shapes(flat: Mapping[str, Any], sources: Mapping[str, Source]) -> dict[str, Any]:
    """Returns the shapes of the leaves of the deep network, at the old widths."""
    out = {}
    for path, source in sources.items():
        x = flat[source.paths[0]]
        shape = 2 * x.shape if source.identity else x.shape
        out[path] = jax.ShapeDtypeStruct(shape[::-1] if source.transpose else shape, x.dtype)
    return out


def _per_layer(
    config: dict[str, Any], goal: dict[str, Any], name: str, m: SpaceMap
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the configuration and the target, with entries of layers in their new order.

    A mixed layer has the kind of the layer with the largest weight.
    """
    part, _, key = name.rpartition(".")
    if part:
        own, wanted = config.get(part), goal.get(part)
        if isinstance(own, dict) and isinstance(wanted, dict):
            own, wanted = _per_layer(own, wanted, key, m)
            config, goal = config | {part: own}, goal | {part: wanted}
        return config, goal
    if name not in LAYER_KEYS:
        return config, goal
    # Growth reports this entry as a loss.
    reported = {key: config[key] for key in ("scale_attn_by_inverse_layer_idx",) if key in config}
    own = {key: value for key, value in config.items() if key not in reported}
    new = moved(own, m.old, np.asarray(m.dense().write).argmax(axis=1).tolist()) | reported
    changed = {key: value for key, value in new.items() if value != config.get(key)}
    # A target may list the kinds itself; they are compared.
    if goal.get("layer_types") not in (None, config.get("layer_types")):
        changed.pop("layer_types", None)
    return new, goal | changed


def _untied(config: dict[str, Any], rules: Rules) -> dict[str, Any]:
    """Returns the configuration of the network with a separate head."""
    key = next((k for k in TIES if k in config), TIES[0])
    return config | {key: False} | dict(rules.untied)


def _heads(flat: Mapping[str, Any], spec: Spec, loose: Rules, power: float) -> dict[str, Source]:
    """Finds the separate head for a tied table, unless the checkpoint has one.

    Raises a ValueError if no pattern matches a head.
    """
    tied = {
        path: pattern
        for path, axes in spec.leaves
        for pattern, _ in loose.axes
        if any(f.tied for a in axes for f in a) and path_pattern(pattern).fullmatch(path)
    }
    (table, own), *_ = tied.items()
    names = [axis[0].space if axis else "" for axis in spec.axes(table)]
    stream = names[-1]
    scale = spec.space(stream).size ** power if stream else 1.0
    out: dict[str, Source] = {}
    named = False
    for pattern, text in loose.axes:
        # Axes with a capture belong to leaves inside layers. The head is outside layers.
        if "{" in text:
            continue
        axes = parse_axes(text)
        spaces = [axis[0].space if axis else "" for axis in axes]
        head = sorted(spaces) == sorted(names) and pattern not in tied.values()
        if not head or not any(f.space == stream and f.role == "read" for a in axes for f in a):
            continue
        prefix = table.removesuffix(own.removeprefix("**")) if own.startswith("**") else ""
        path = prefix + pattern.removeprefix("**")
        named = True
        if path in flat:
            continue
        out[path] = Source((table,), transpose=spaces != names, scale=scale)
        bias = path.removesuffix("decoder.weight") + "bias"
        if path.endswith("decoder.weight") and bias in flat:
            # A separate head has a separate bias.
            out.setdefault(path.removesuffix("weight") + "bias", Source((bias,)))
    if not named:
        raise ValueError(
            f"the tied table {table!r} must be untied, but no pattern matches its head: "
            f"add an optional pattern such as 'lm_head.weight: {names[0]} {names[1]}*', or give "
            "untie=False, which is not exact"
        )
    return out
