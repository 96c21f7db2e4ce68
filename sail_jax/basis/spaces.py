"""The feature space of every axis of every parameter: rules, checked into a `Spec`.

Rules give an axes string to each leaf by a pattern of its path, as partition rules give shardings.
`sail_jax.basis.axes` defines both. One small table serves a whole architecture:

    "embed":                        "vocab* resid"
    "blocks/{i}/mlp/in/kernel":     "resid* hidden{i}"
    "blocks/{i}/mlp/out/kernel":    "hidden{i}* resid"
    "**/scale":                     "diag(resid)"
    "head":                         "resid* logits"
"""

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sail_jax.basis.axes import Axis, Patterns, Role, blocks, format_axes, parse_axes
from sail_jax.basis.families import NONLINEARITIES
from sail_jax.basis.listed import Layers, layer_at, listed
from sail_jax.basis.maps import SpaceMap
from sail_jax.checks import escaped, nearest
from sail_jax.trees import leaf_paths
from sail_jax.views import view


class Leaf(NamedTuple):
    """A parameter array and the spaces of its axes.

    Attributes:
      path: The path of the leaf, its keys joined by "/".
      axes: The factors of each array axis, in order.
    """

    path: str
    axes: tuple[Axis, ...]


class Space(NamedTuple):
    """A feature space.

    Attributes:
      name: Its name, as in the axes strings.
      size: The number of its units.
      nonlinearity: Its nonlinearities: words of `NONLINEARITIES`, separated by spaces, or "" if
        unstated.
    """

    name: str
    size: int
    nonlinearity: str


class Tie(NamedTuple):
    """A tied leaf whose products another leaf can scale.

    Attributes:
      path: The path of the tied leaf.
      space: The space that it both writes and reads.
      scales: Leaves that undo a factor on everything that it reads, if they are divided by the
        factor, such as the gain and the bias of a norm, or a scale of the outputs.
    """

    path: str
    space: str
    scales: tuple[str, ...]


class Use(NamedTuple):
    """An occurrence of a space.

    Attributes:
      path: The path of the leaf.
      axis: The index of the array axis.
      factor: The index of the factor within the axis.
      role: The axis's role for the space.
      tied: Whether the leaf is used a second time, with another role for the space.
    """

    path: str
    axis: int
    factor: int
    role: Role
    tied: bool


@jax.tree_util.register_static
@dataclass(frozen=True, repr=False)
class Spec:
    """The feature spaces of a parameter tree, as `spec` returns them.

    A spec contains no parameters. It is immutable, hashable, and static under jit. `print` shows a
    table of the spaces with their writers, readers and gains.

    Attributes:
      leaves: The leaves of the tree, in its order, with the spaces of their axes.
      spaces: The spaces in them, with their sizes.
      layers: The lists of layers in the tree.
      ties: The tied leaves whose products other leaves can scale, if they are known.
      undivided: The "dot" spaces whose products the code does not divide by the root of their size,
        if the forward pass is known. Two specs are equal whether this is known or not.
    """

    leaves: tuple[Leaf, ...]
    spaces: tuple[Space, ...]
    layers: tuple[Layers, ...] = ()
    ties: tuple[Tie, ...] = ()
    undivided: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def _axes(self) -> dict[str, tuple[Axis, ...]]:
        return dict(self.leaves)

    @cached_property
    def _spaces(self) -> dict[str, Space]:
        return {space.name: space for space in self.spaces}

    @cached_property
    def _uses(self) -> dict[str, tuple[Use, ...]]:
        uses: dict[str, list[Use]] = {space.name: [] for space in self.spaces}
        for path, axes in self.leaves:
            for a, axis in enumerate(axes):
                for f, factor in enumerate(axis):
                    uses[factor.space].append(Use(path, a, f, factor.role, factor.tied))
        return {name: tuple(where) for name, where in uses.items()}

    @cached_property
    def _hash(self) -> int:
        return hash((self.leaves, self.spaces, self.layers, self.ties))

    def __hash__(self) -> int:
        return self._hash

    def axes(self, path: str) -> tuple[Axis, ...]:
        """Looks up the spaces of a leaf.

        Args:
          path: The path of the leaf.

        Returns:
          The factors of each array axis, in order.

        Raises:
          ValueError: If the spec has no such leaf; the message suggests similar paths.
        """
        if path not in self._axes:
            raise ValueError(f"the spec has no leaf {path!r}{nearest(path, self._axes)}")
        return self._axes[path]

    def layer(self, path: str) -> tuple[str, int] | None:
        """Finds the layer of a leaf in `layers`.

        Args:
          path: The path of the leaf.

        Returns:
          The name of the list and the number of the layer; None for a leaf outside the lists.
        """
        return layer_at(self.layers, path)

    def space(self, name: str) -> Space:
        """Looks up a space.

        Args:
          name: The name of the space.

        Returns:
          The space.

        Raises:
          ValueError: If the spec has no such space; the message suggests similar names.
        """
        if name not in self._spaces:
            raise ValueError(f"the spec has no space {name!r}{nearest(name, self._spaces)}")
        return self._spaces[name]

    def shape(self, path: str) -> tuple[int | None, ...]:
        """Computes the shape of a leaf from the spec.

        Args:
          path: The path of the leaf.

        Returns:
          The extent of each axis; None for an axis without a space.

        Raises:
          ValueError: If the spec has no such leaf.
        """
        return tuple(self.extent(axis) if axis else None for axis in self.axes(path))

    def extent(self, axis: Axis) -> int:
        """Computes the number of entries of an axis.

        Args:
          axis: The factors of the axis.

        Returns:
          The sum over its blocks of the product of the sizes of their spaces.

        Raises:
          ValueError: If one of the spaces is unknown to the spec.
        """
        return sum(math.prod(self.space(f.space).size for f in block) for block in blocks(axis))

    def uses(self, name: str) -> tuple[Use, ...]:
        """Lists every occurrence of a space.

        Args:
          name: The name of the space.

        Returns:
          Its uses, in the order of the leaves.

        Raises:
          ValueError: If the spec has no such space.
        """
        return self._uses[self.space(name).name]

    def check(self, maps: Mapping[str, SpaceMap]) -> None:
        """Checks that maps fit the spaces of this spec.

        Args:
          maps: Maps by the name of their space.

        Raises:
          TypeError: If an entry is not a `SpaceMap`.
          ValueError: If a map is for an unknown space, has another size, or is batched.
        """
        for name, m in maps.items():
            if not isinstance(m, SpaceMap):
                raise TypeError(f"maps[{name!r}] must be a SpaceMap, got {type(m).__name__}")
            if name not in self._spaces:
                raise ValueError(f"maps: no space {name!r}{nearest(name, self._spaces)}")
            size = self._spaces[name].size
            if m.old != size:
                raise ValueError(
                    f"space {name!r} has {size} units (leaf {self.uses(name)[0].path!r}), "
                    f"but its map takes {m.old} to {m.new}"
                )
            if len(m.write.shape) != 2:
                raise ValueError(
                    f"the map of {name!r} is batched, write {m.write.shape}: use jax.vmap"
                )

    def alone(self, path: str) -> tuple["Spec", dict[str, str]]:
        """Builds the spec of a single leaf, with neutral names.

        Leaves with equal uses, such as corresponding leaves of different layers, have equal specs,
        and therefore share one compiled program.

        Args:
          path: The path of the leaf.

        Returns:
          The spec with the leaf name "leaf" and the spaces "s0", "s1", ...; and a mapping from the
          names of spaces in this spec to those.

        Raises:
          ValueError: If the spec has no such leaf.
        """
        names: dict[str, str] = {}
        axes = tuple(
            tuple(f._replace(space=names.setdefault(f.space, f"s{len(names)}")) for f in axis)
            for axis in self.axes(path)
        )
        spaces = tuple(self.space(old)._replace(name=new) for old, new in names.items())
        return Spec((Leaf("leaf", axes),), spaces), names

    def resized(self, maps: Mapping[str, SpaceMap]) -> "Spec":
        """Builds the spec of the parameters after a change of basis.

        Args:
          maps: The maps, by the name of their space.

        Returns:
          The same leaves and spaces, with the new sizes.

        Raises:
          TypeError: If an entry is not a `SpaceMap`.
          ValueError: If a map is for an unknown space, has another size, or is batched.
        """
        self.check(maps)
        sizes = {name: m.new for name, m in maps.items()}
        spaces = (space._replace(size=sizes.get(space.name, space.size)) for space in self.spaces)
        return replace(self, spaces=tuple(spaces))

    def __repr__(self) -> str:
        return f"Spec({len(self.leaves)} leaves, {len(self.spaces)} spaces)"

    def __str__(self) -> str:
        return table(self._rows())

    def _repr_html_(self) -> str:
        header, *rows = self._rows()
        return view(repr(self), rows, header)

    def _rows(self) -> list[tuple[str, ...]]:
        """Lists the titles of the columns, and the cells of each space and each list of layers."""
        rows: list[tuple[str, ...]] = [
            ("space", "size", "nonlinearity", "writers", "readers", "gains")
        ]
        for name, size, nonlinearity in self.spaces:
            users = (_users(self._uses[name], role) for role in ("write", "read", "gain"))
            rows.append((name, str(size), nonlinearity or "unstated", *map(_some, users)))
        for name, start, loss in self.layers:
            found = {self.layer(leaf.path) for leaf in self.leaves} - {None}
            count = sum(layer[0] == name for layer in found if layer)
            rows.append((name, str(count), "stack" if loss else "stack residual", start, "-", "-"))
        return rows


def spec(
    params: Any,
    rules: Mapping[str, str] | Sequence[tuple[str, str]],
    *,
    spaces: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
    layers: str | Mapping[str, str] | None = None,
) -> Spec:
    """Assigns a feature space to every array axis of a parameter tree, and checks the result.

    A typo in a rule must not create a new space. Therefore every leaf must match exactly
    one rule; every rule and every entry of `spaces` and `sizes` must be used; every axis must have
    a name; every space must have one size, a writer and a reader (or be "softmax", and occur twice
    or be in `sizes`); and only floating leaves may have spaces.

    The keys of `spaces` and `sizes` are names of spaces as they appear in axes strings. In a key,
    `{i}` stands for any text without "/" and ".", and `{a,b}` for alternatives.

    Args:
      params: The parameters, as arrays or ShapeDtypeStructs.
      rules: An axes string for each path pattern, as a mapping or as pairs; `sail_jax.basis.axes`
        defines both languages.
      spaces: The nonlinearity of each space: one or more words, separated by blanks, of "linear",
        "rmsnorm", "relu", "odd", "elementwise", "layernorm", "dot", "softmax"; or "outer" (the
        network's input or output, which may have no writer or no reader) or "stack" (a stacked
        layer axis without readers), perhaps with "residual". `NONLINEARITIES` defines the words. An
        unstated space is assumed to commute with permutations only.
      sizes: The sizes of spaces that the shapes do not determine: factors of a product, or blocks
        of a fused axis, that never occur alone.
      layers: The start of the paths of listed layers, with `*` for the number of the layer, such as
        "blocks/*", or such starts by the name of their list.

    Returns:
      The spec, with the leaves in the order of the tree.

    Raises:
      TypeError: If a rule is not a pair of texts, or `layers` has an invalid type.
      ValueError: If one of the conditions above is violated, a pattern, an axes string or a word
        cannot be parsed, or two leaves have one path. The message contains the leaf and a
        correction.

    >>> layer = {"in": jnp.zeros((3, 8)), "bias": jnp.zeros(8), "out": jnp.zeros((8, 2))}
    >>> rules = {"in": "x* hidden", "bias": "hidden", "out": "hidden* y"}
    >>> print(spec(layer, rules, spaces={"hidden": "relu", "{x,y}": "outer"}))
    space   size  nonlinearity  writers   readers  gains
    hidden  8     relu          bias, in  out      -
    x       3     outer         -         in       -
    y       2     outer         out       -        -
    """
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
    arrays = dict(zip(leaf_paths(params), map(_shape_dtype, jax.tree.leaves(params)), strict=True))
    matched = _match(arrays, pairs)
    leaves = _parse(arrays, matched)
    names = sorted({f.space for leaf in leaves for axis in leaf.axes for f in axis})
    stated = _expand("spaces", spaces or {}, names)
    given = _expand("sizes", sizes or {}, names)
    _check_nonlinearities(stated)
    solved = _sizes(arrays, leaves, given)
    made = tuple(Space(n, solved[n], stated.get(n, "")) for n in names)
    lists = listed({path: x.shape for path, x in arrays.items()}, {} if layers is None else layers)
    if taken := {name for name, _, _ in lists} & {*names}:
        raise ValueError(
            f"layers: {min(taken)!r} is the name of a space: give the list another name"
        )
    out = Spec(leaves, made, lists)
    _check_sides(out, given)
    return out


def _match(
    arrays: Mapping[str, jax.ShapeDtypeStruct], pairs: list[tuple[str, str]]
) -> dict[str, tuple[str, str]]:
    """Finds each leaf's rule: its pattern, and the axes string with captures filled in."""
    problems, out, used = [], {}, set()
    for pattern, axes in pairs:
        if not isinstance(pattern, str) or not isinstance(axes, str):
            raise TypeError(f"expected a pattern and an axes string, got {(pattern, axes)!r}")
    patterns = Patterns(pattern for pattern, _ in pairs)
    for path, leaf in arrays.items():
        hits = patterns.matches(path)
        used |= {k for k, _ in hits}
        if not hits:
            near = _nearest(path, (pattern for pattern, _ in pairs), problems)
            problems.append(
                f"no rule matches leaf {_show(path, leaf)}{near}; "
                f"to leave it unchanged write {path!r}: {' '.join('_' * len(leaf.shape))!r}"
            )
        elif len(hits) > 1:
            rules = ", ".join(f"{pairs[k][0]!r}: {pairs[k][1]!r}" for k, _ in hits)
            problems.append(
                f"leaf {_show(path, leaf)} matches {len(hits)} rules: {rules}; narrow all but one"
            )
        else:
            ((k, names),) = hits
            pattern, axes = pairs[k]
            if unknown := [n for n in re.findall(r"\{(.*?)\}", axes) if n not in names]:
                problems.append(
                    f"the axes {axes!r} of leaf {path!r} use {{{unknown[0]}}}, which its pattern "
                    f"{pattern!r} does not capture"
                )
                continue
            filled = re.sub(r"\{(.*?)\}", lambda m, names=names: names[m[1]], axes)
            out[path] = (pattern, filled)
    for k, (pattern, axes) in enumerate(pairs):
        if k not in used:
            problems.append(
                f"rule {pattern!r}: {axes!r} matches no leaf{_nearest(pattern, arrays, problems)}; "
                "correct or delete it"
            )
    _raise(problems)
    return out


def _parse(
    arrays: Mapping[str, jax.ShapeDtypeStruct], matched: Mapping[str, tuple[str, str]]
) -> tuple[Leaf, ...]:
    """Parses the leaves' axes strings. Raises a ValueError if they do not fit the arrays."""
    problems, leaves = [], []
    for path, leaf in arrays.items():
        pattern, text = matched[path]
        try:
            axes = parse_axes(text)
        except ValueError as error:
            problems.append(f"leaf {_show(path, leaf)}, rule {pattern!r}: {error}")
            continue
        ndim = len(leaf.shape)
        if len(axes) != ndim:
            padded = format_axes([*axes, *[()] * ndim][:ndim])
            problems.append(
                f"leaf {_show(path, leaf)} has {ndim} axes, but rule {pattern!r} gives "
                f"{len(axes)}: {text!r}; write one name per axis, such as {padded!r}"
            )
        elif any(axes) and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            problems.append(
                f"leaf {_show(path, leaf)} is not floating, so no axis of it can change basis; "
                f"write {pattern!r}: {' '.join('_' * ndim)!r}"
            )
        leaves.append(Leaf(path, axes))
    _raise(problems)
    return tuple(leaves)


def _expand(argument: str, entries: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Converts entries keyed by patterns of space names to entries keyed by names."""
    out: dict[str, Any] = {}
    owner: dict[str, str] = {}
    problems = []
    patterns, named = Patterns(entries, stars=False), [list[str]() for _ in entries]
    for name in names:
        for k, _ in patterns.matches(name):
            named[k].append(name)
    for (key, value), hits in zip(entries.items(), named, strict=True):
        if not hits:
            near = _nearest(key, names, problems)
            problems.append(f"{argument}[{key!r}] matches no space{near}")
        for name in hits:
            if name in out:
                problems.append(
                    f"{argument}[{key!r}] and {argument}[{owner[name]!r}] both match {name!r}"
                )
            out[name], owner[name] = value, key
    _raise(problems)
    return out


def _check_nonlinearities(stated: Mapping[str, str]) -> None:
    """Raises a ValueError for an unknown word."""
    problems = []
    for name, words in stated.items():
        for word in (isinstance(words, str) and words.split()) or [words]:
            if word not in NONLINEARITIES:
                valid = ", ".join(NONLINEARITIES)
                problems.append(f"spaces[{name!r}] is {word!r}; write one of {valid}")
    _raise(problems)


def _sizes(
    arrays: Mapping[str, jax.ShapeDtypeStruct], leaves: Iterable[Leaf], given: Mapping[str, int]
) -> dict[str, int]:
    """Returns the size of every space: given, or deduced from the shapes of the leaves."""
    size = {name: int(n) for name, n in given.items()}
    source = {name: f"sizes[{name!r}]" for name in size}
    pending = [
        (leaf.path, arrays[leaf.path].shape[k], axis)
        for leaf in leaves
        for k, axis in enumerate(leaf.axes)
        if axis
    ]
    problems, progress = [], True
    # An axis can be solved once at most one of its spaces is unknown. The result may make another
    # axis solvable, so the loop repeats until a round finds nothing new.
    while pending and progress:
        progress, later = False, []
        for path, n, axis in pending:
            names = list(dict.fromkeys(f.space for f in axis))
            unknown = [name for name in names if name not in size]
            solved = _solve(n, axis, size) if len(unknown) < 2 else None
            if solved is None:
                later.append((path, n, axis))
                continue
            progress = True
            rest, per = solved
            # The extent is rest = unknown * per, so per must divide it.
            if unknown and per and rest >= 0 and rest % per == 0:
                size[unknown[0]] = rest // per
                source[unknown[0]] = f"leaf {_show(path, arrays[path])}"
            elif unknown or rest:
                settled = (f"{s!r} has {size[s]} in {source[s]}" for s in names if s in size)
                problems.append(
                    f"leaf {_show(path, arrays[path])} has {n} units of {format_axes([axis])!r}, "
                    f"but {', '.join(settled)}"
                )
                # These spaces count as known from here on, to report each problem once.
                size |= dict.fromkeys(unknown, 0)
                source |= dict.fromkeys(unknown, f"leaf {path!r}")
        pending = later
    for path, n, axis in pending:
        free = next(f.space for f in axis if f.space not in size)
        problems.append(
            f"leaf {_show(path, arrays[path])} has {n} units of {format_axes([axis])!r}, which "
            f"no other leaf splits; write sizes={{{free!r}: ...}}"
        )
    _raise(problems)
    return size


def _solve(n: int, axis: Axis, size: Mapping[str, int]) -> tuple[int, int] | None:
    """Splits the extent n of an axis between its known spaces and its one unknown space.

    Returns n minus the blocks with only known spaces, and the factor of the unknown space in the
    other blocks; None if two unknown factors multiply each other.
    """
    per = 0
    for block in blocks(axis):
        known = math.prod(size[f.space] for f in block if f.space in size)
        unknown = sum(f.space not in size for f in block)
        if unknown > 1:
            return None
        n, per = (n, per + known) if unknown else (n - known, per)
    return n, per


def _check_sides(out: Spec, given: Container[str]) -> None:
    """Raises a ValueError for a space without a writer or reader, except "outer" and "stack".

    Spaces with a given size are named on purpose, so they are not typos.
    """
    problems = []
    names = [space.name for space in out.spaces]
    for name, _, words in out.spaces:
        uses = out.uses(name)
        writers, readers = _users(uses, "write"), _users(uses, "read")
        permuted, count = "softmax" in words.split(), len(uses)
        if "stack" in words.split():
            if readers:
                problems.append(
                    f"{name!r} is a stack, but leaf {readers[0]!r} reads {name + '*'!r}"
                )
        elif permuted and (count > 1 or name in given):
            # Units that are only permuted need no roles, such as experts and their router, or
            # latents that attention sums over.
            continue
        elif "outer" not in words.split() and not (writers and readers):
            near = _nearest(name, (other for other in names if other != name), problems)
            have, lack = ("written", "reads") if writers else ("read", "writes")
            if not writers and not readers:
                have, lack = "only multiplied", "writes or reads"
            problems.append(
                f"space {name!r} is {have} by leaf {uses[0].path!r}, but no leaf {lack} it{near}; "
                f"if it is the network's input or output, write spaces={{{name!r}: 'outer'}}"
            )
    _raise(problems)


def free_name(stem: str, taken: Container[str]) -> str:
    """Returns a name that is not taken: the stem, or the stem with a number.

    Args:
      stem: The wanted name.
      taken: The names that are taken.

    Returns:
      The name.

    >>> free_name("layer", {"layer", "layer:2"})
    'layer:3'
    """
    name, k = stem, 1
    while name in taken:
        k += 1
        name = f"{stem}:{k}"
    return name


def table(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows of cells as left-aligned columns, for printing.

    Args:
      rows: The rows, all of the same length, the titles first.

    Returns:
      One line per row, with two spaces between columns and control characters escaped.
    """
    rows = [[escaped(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _users(uses: Iterable[Use], role: str) -> list[str]:
    """Returns the paths of the leaves in that role, each once; a tied leaf writes and reads."""
    paths = (u.path for u in uses if u.role == role or (u.tied and role != "gain"))
    return list(dict.fromkeys(paths))


def _some(paths: list[str]) -> str:
    """Returns the first three paths and the number of further ones; "-" for none."""
    more = f", +{len(paths) - 3}" if len(paths) > 3 else ""
    return (", ".join(paths[:3]) or "-") + more


def _shape_dtype(leaf: Any) -> jax.ShapeDtypeStruct:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    leaf = np.asarray(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _show(path: str, leaf: jax.ShapeDtypeStruct) -> str:
    """Describes a leaf for a message: its path, dtype and shape."""
    return f"{path!r} {leaf.dtype}{list(leaf.shape)}"


_SHOWN = 8


def _nearest(word: str, options: Iterable[str], problems: list[str]) -> str:
    """Suggests similar words; "" if earlier problems fill the message."""
    return nearest(word, options) if len(problems) < _SHOWN else ""


def _raise(problems: list[str]) -> None:
    """Raises one ValueError with the first eight problems, if there are any."""
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ValueError("\n".join(problems[:_SHOWN] + more))
