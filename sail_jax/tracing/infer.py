"""`spec_of` infers the spec of a network from its forward pass.

*The problem.* Two axes are in one space if a permutation of the units of one always requires the
same permutation of the other. This does not follow from shapes. An axis of 8 may be 8 units, or 2
heads of 4, or concatenated queries and keys. Often only a distant operation reveals the structure
of an axis. A tied table, a gate or a norm also determine the allowed changes beyond the order of
units.

*Why running the network is not sufficient.* One could permute two axes and compare outputs. For n
axes this takes n^2 / 2 runs, and each run may agree by accident for these weights and inputs. It
cannot find products of spaces either, because their factors must be known first. Running the
network is a way to check a spec (`check_spec`), not to find it.

*The method* is type inference. Every axis starts as a separate variable. Each operation of the
jaxpr unifies the terms of the axes that it relates (`sail_jax.tracing.terms`). An operation without
a rule fixes its axes, which is correct for any operation. For attention on a stream of 8 units with
2 heads:

    q = x @ wq            wq: (a, b)               a is the stream, b has 8 units
    q.reshape(2, 4)       b = h * d                h of 2 units, d of 4
    k likewise            wk: (a, c), c = g * e
    sum_d q k             d = e, h = g             a contraction, and heads side by side
    softmax               nothing is added: it acts along positions
    o = y @ wo            wo: (h * v, a)           the stream again, by the residual sum

When all terms are known, a second pass finds the allowed changes beyond the order of units. Each
axis of each value gets an unknown exponent. Operations give linear equations for the exponents, and
`sail_jax.tracing.roles` solves them. In the example, wq writes d and wk reads it. Queries may
therefore be multiplied by any c if keys are divided by c. If the second pass fixes a space, it runs
again with this space fixed. This terminates, because the number of spaces is finite.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jaxtyping import PyTree

from sail_jax.basis.axes import (
    Axis,
    Factor,
    Role,
    end_to_end,
    format_axes,
    parse_axes,
    times,
)
from sail_jax.basis.families import Family
from sail_jax.basis.layers import outputs
from sail_jax.basis.listed import Layers, listed
from sail_jax.basis.spaces import Leaf, Space, Spec, Tie, free_name
from sail_jax.checks import nearest
from sail_jax.jax_internals import ClosedJaxpr
from sail_jax.tracing.interpreter import Interpreter, alive
from sail_jax.tracing.multiples import Multiples, multiples
from sail_jax.tracing.pieces import in_pieces
from sail_jax.tracing.roles import Found, Place, solve
from sail_jax.tracing.scans import Stack, change_of_layers, stacks
from sail_jax.tracing.terms import (
    Atom,
    Fixed,
    Label,
    Product,
    Sum,
    Term,
    Variable,
    atoms,
    cutter,
    reason,
    resolve,
)
from sail_jax.tracing.ties import undoing
from sail_jax.tracing.values import Value, is_floating, joined, settled, shape
from sail_jax.trees import leaf_paths


@dataclass(frozen=True)
class Inferred:
    """The spec inferred from a forward pass; `print` shows the axes string of each parameter.

    Attributes:
      spec: The spaces of the parameters.
      why: The reason why an axis is in no space, by leaf and number of the axis. It is the effect
        of the primitive that fixed its order, the primitive and the source line.
      unknown: Names of primitives without a rule. They fix all their axes.
      unused: Paths of parameters that no output depends on.
      multiples: Factors in the forward pass: numbers, for comparison with another size, and gains
        that only matrices read.
      notes: Signs that the network is in training mode, one sentence each: parameters that no
        output depends on, such as running statistics, and random numbers.
    """

    spec: Spec
    why: Mapping[tuple[str, int], str]
    unknown: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    multiples: Multiples = Multiples()  # noqa: RUF009
    notes: tuple[str, ...] = ()

    @property
    def rules(self) -> dict[str, str]:
        """The axes string of each leaf, in an editable form for `sail_jax.spec`."""
        return {leaf.path: format_axes(leaf.axes) for leaf in self.spec.leaves}

    def __str__(self) -> str:
        lines = [f"{path}: {text!r}" for path, text in self.rules.items()]
        return "\n".join([*lines, str(self.spec), *self.notes])


def spec_of(
    apply: Callable[..., Any],
    params: PyTree,
    *inputs: PyTree,
    names: Mapping[str, str] | None = None,
    stored: Callable[[PyTree], PyTree] | None = None,
    layers: str | Mapping[str, str] | None = None,
) -> Inferred:
    """Infers the feature space of every axis of every parameter from the forward pass.

    The forward pass is traced but not computed. Each operation relates the axes of its operands.
    Two axes are in one space if a permutation of the units of one always requires the same
    permutation of the other. Axes of an unknown operation are in no space.

    If `jax.lax.scan` goes along parameters only, their first axis is a "stack" space of layers. It
    is also "residual" if the equations show that a layer with outputs of zero returns its input.
    Layers in a list are named by `layers`. The network is then also traced with more of them.

    Args:
      apply: The network, called as `apply(params, *inputs)`. It may return any pytree of arrays.
      params: The parameters, any pytree of arrays or ShapeDtypeStructs.
      *inputs: Inputs, as arrays or ShapeDtypeStructs.
      names: Names of spaces, as axes strings by the path of a leaf. Other spaces get the name of a
        leaf that writes them.
      stored: A function from parameters to their stored form, such as the tensors of a file with
        other names and shapes. The spec then describes this form. Experts or layers that share an
        axis but are stored separately get separate spaces.
      layers: The start of the paths of listed layers, with `*` for the number of the layer, such as
        "blocks/*", or such starts by the name of their list. A single list is called "layer". The
        network must run with any number of these layers, so it loops over the list.

    Returns:
      The spec, and the reasons why axes are in no space.

    Raises:
      TypeError: If `layers` is neither a text nor a mapping of texts.
      ValueError: If `names` has an unknown leaf, or two names for one space, or if this version of
        JAX describes a primitive in an unknown way (`UnknownLayoutError`). If `layers` matches no
        leaf, its layers differ in leaves or shapes, or it is given together with `stored`.

    >>> import jax.numpy as jnp
    >>> def net(p, x):
    ...     return jax.nn.relu(x @ p["in"] + p["bias"]) @ p["out"]
    >>> layers = {"in": jnp.zeros((3, 8)), "bias": jnp.zeros(8), "out": jnp.zeros((8, 2))}
    >>> print(spec_of(net, layers, jnp.zeros((5, 3))))
    bias: 'in'
    in: '_ in'
    out: 'in* _'
    space  size  nonlinearity  writers   readers  gains
    in     8     relu          bias, in  out      -
    """
    if layers is not None and stored is not None:
        raise ValueError(
            "layers names leaves of params, so it cannot be given together with stored"
        )
    paths = leaf_paths(params)
    shape_of = {path: x.shape for path, x in zip(paths, jax.tree.leaves(params), strict=True)}
    lists = listed(shape_of, {} if layers is None else layers)
    traced = whole = jax.make_jaxpr(apply)(params, *inputs)
    scaled = multiples(traced, paths)
    scans = [] if stored is not None else stacks(traced, len(paths))
    _, used = alive(traced.jaxpr)
    unused = [p for p, v in zip(paths, traced.jaxpr.invars, strict=False) if v not in used]
    storing = None if stored is None else jax.make_jaxpr(stored)(params)
    apart = {} if storing is None else _kept_apart(storing)
    traced = in_pieces(traced, len(paths), apart)
    storing = storing and in_pieces(storing, len(paths), apart)
    paths = [
        name
        for k, (path, x) in enumerate(zip(paths, jax.tree.leaves(params), strict=True))
        for name in ([f"{path}/{n}" for n in range(x.shape[apart[k]])] if k in apart else [path])
    ]
    shapes = [shape(v) for v in traced.jaxpr.invars[: len(paths)]]
    floating = [is_floating(v) for v in traced.jaxpr.invars[: len(paths)]]
    variables = [
        tuple(Variable(n) if real else Fixed(n, "a parameter of integers") for n in size)
        for size, real in zip(shapes, floating, strict=True)
    ]
    labels: list[tuple[Label, ...]] = list(variables)
    first = Interpreter()
    _run(first, traced, labels)
    if storing is not None:
        _stored(first, storing, labels)
    while True:
        second, atomic = _with_atoms(traced, labels)
        kept = atomic if storing is None else _stored(second, storing, atomic)
        late = {id(s): s for s in second.algebra.spaces if s.why and s.bound is None}
        if not late:
            break
        for space in late.values():
            space.bound = Fixed(space.size)
    # A scan fixes the order of its layers, but their number can grow.
    scans = [stack for stack in scans if all(floating[n] for n in stack.parameters)]
    scanned = {number for stack in scans for number in stack.parameters}
    shapes = [size[1:] if n in scanned else size for n, size in enumerate(shapes)]
    found = {}
    for space, one in _solved(second, atomic, shapes).items():
        # A sum over units is the same in any order. Without a writer and a reader, growth and
        # scales are meaningless.
        found[space] = one if _has_sides(one) else one._replace(family=Family.PERMUTATION)
    why = {
        (path, k): reason(variable) or _unread(variable)
        for path, own, axes in zip(paths, variables, atomic, strict=True)
        if path not in unused
        for k, (variable, label) in enumerate(zip(own, axes, strict=True))
        if isinstance(variable, Variable) and variable.size > 1
        and not any(atom.space in found for atom in atoms(label))
    }  # fmt: skip
    idle = [path for path, axes in zip(paths, variables, strict=True) if path in unused and axes]
    if stored is not None:
        paths = leaf_paths(jax.eval_shape(stored, params))
        why = {where: text for where, text in why.items() if where[0] in paths}
    reserved = {of.name for of in lists}
    called = _names(paths, kept, found, names or {}, reserved)
    spec = replace(_spec(paths, kept, found, called), layers=lists)
    spec = _stacked(spec, scans, names or {}, reserved)
    judged = (
        of._replace(loss=change_of_layers(apply, params, inputs, whole, of, _zeroed(spec, of)))
        for of in lists
    )
    spec = replace(spec, layers=tuple(judged))
    spec = replace(spec, undivided=tuple(_undivided(spec, scaled)))
    if stored is None:
        spec = replace(spec, ties=_ties(spec, whole))
    ordered = {(paths[n], 0) for n in scanned}
    why = {where: text for where, text in why.items() if where not in ordered}
    notes = _notes(idle, [name for name in sorted(first.unknown) if _RANDOM.match(name)])
    return Inferred(spec, why, tuple(sorted(first.unknown)), tuple(unused), scaled, notes)


_RANDOM = re.compile("random_|threefry")


def _notes(idle: Sequence[str], random: Sequence[str]) -> tuple[str, ...]:
    """Describes the signs that the network is in training mode."""
    notes = []
    if idle:
        more = f" and {len(idle) - 1} more" if idle[1:] else ""
        notes.append(
            f"no output depends on {idle[0]!r}{more}, so growth keeps their sizes. For running "
            "statistics, infer the spec of the network in evaluation mode"
        )
    if random:
        notes.append(
            f"random numbers ({', '.join(random)}) fix the order of the units that they meet: for "
            "dropout, infer the spec of the network in evaluation mode"
        )
    return tuple(notes)


def _unread(variable: Variable) -> str:
    """The reason why units are in no space although nothing fixed them."""
    where = cutter(variable) if isinstance(resolve(variable), Fixed) else ""
    return f"its units are used one by one: {where}" if where else "nothing reads it"


def _kept_apart(storing: ClosedJaxpr) -> dict[int, int]:
    """Finds the parameters with separately stored slices, and the axis of the slices."""
    sizes = [shape(v) for v in storing.jaxpr.invars]
    labels: list[tuple[Label, ...]] = [tuple(map(Variable, size)) for size in sizes]
    _stored(Interpreter(), storing, labels)
    apart: dict[int, int] = {}
    for k, axes in enumerate(labels):
        for axis, label in enumerate(axes):
            # The axis was cut into single units and not fixed as a whole.
            if (
                len(axes) > 1
                and isinstance(label, Variable)
                and isinstance(label.became, Sum)
                and isinstance(resolve(label), Fixed)
                and not reason(label)
            ):
                apart.setdefault(k, axis)
    return apart


def _parameters(labels: list[tuple[Label, ...]]) -> list[Value]:
    """Makes parameters with these labels."""
    return [
        Value(
            tuple(None if label is not None and label.size == 1 else label for label in axes),
            parametric=True,
            view=True,
        )
        for axes in labels
    ]


def _stored(
    interpreter: Interpreter, storing: ClosedJaxpr, labels: list[tuple[Label, ...]]
) -> list[tuple[Label, ...]]:
    """Returns the labels of the stored form of parameters, with the atoms of the parameters."""
    outs = interpreter.run(storing, _parameters(labels))
    return [joined(interpreter, out).axes for out in outs]


def _run(interpreter: Interpreter, traced: ClosedJaxpr, labels: list[tuple[Label, ...]]) -> None:
    """Runs the forward pass on labels; the axes of inputs and outputs are fixed."""
    values = _parameters(labels)
    rest = traced.jaxpr.invars[len(labels) :]
    values += [Value(tuple(Fixed(n, "the network's input") for n in shape(v))) for v in rest]
    for value in interpreter.run(traced, values):
        value = settled(interpreter, value)
        interpreter.algebra.where = "the network's output"
        if value.numbers is not None:
            interpreter.algebra.fixed(value.numbers, "units are numbered")
        for label in value.axes:
            interpreter.algebra.fixed(label)


def _with_atoms(
    traced: ClosedJaxpr, labels: list[tuple[Label, ...]]
) -> tuple[Interpreter, list[tuple[Label, ...]]]:
    """Runs a second forward pass with an exponent at every use."""
    interpreter = Interpreter()

    def atomic(term: Term) -> Term:
        term = resolve(term)
        if isinstance(term, Variable):
            return interpreter.algebra.atom(term)
        if isinstance(term, Product | Sum):
            return type(term)(tuple(map(atomic, term.parts)))
        return term

    places: list[tuple[Label, ...]] = [
        tuple(None if label is None else atomic(label) for label in axes) for axes in labels
    ]
    _run(interpreter, traced, places)
    return interpreter, places


def _solved(
    interpreter: Interpreter, labels: list[tuple[Label, ...]], shapes: list[tuple[int, ...]]
) -> dict[Variable, Found]:
    """Finds the roles and the family of every space of parameters."""
    algebra = interpreter.algebra
    places: dict[Variable, list[Place]] = {}
    for axes, size in zip(labels, shapes, strict=True):
        own = [atom for label in axes for atom in atoms(label)]
        matrix = sum(n > 1 for n in size) > 1 or len(own) > 1
        for atom in own:
            for slot in interpreter.uses.get(atom.slot, ()):
                places.setdefault(atom.space, []).append(Place(slot, atom.slot, matrix))
    equations: dict[Variable, list] = {space: [] for space in places}
    for of in algebra.equations:
        equations.get(algebra.spaces[of.slots[0]], []).append(of)
    events: dict[Variable, list] = {space: [] for space in places}
    for event in algebra.events:
        events.get(algebra.spaces[event.slots[0]], []).append(event)
    return {
        space: solve(sorted(own), equations[space], events[space]) for space, own in places.items()
    }


def _has_sides(found: Found) -> bool:
    """Checks whether parameters both write and read a space."""
    return bool(found.tied) or {"write", "read"} <= set(found.roles.values())


# Path endings that do not distinguish modules.
_ENDS = re.compile(r"(?<=.)[/.](kernel|weight|w|embedding|scale|value)(?=[/.]value$|$)")


def _stem(path: str) -> str:
    """Converts a path to the start of a space's name."""
    return re.sub(r"[^\w./:-]", "-", _ENDS.sub("", path)) or "space"


def _names(
    paths: list[str],
    labels: list[tuple[Label, ...]],
    found: Mapping[Variable, Found],
    asked: Mapping[str, str],
    reserved: Collection[str],
) -> dict[Variable, str]:
    """Returns names of spaces: as given, or from the first leaf that writes them."""
    called = _asked(paths, labels, asked)
    if both := {*called.values()} & {*reserved}:
        raise ValueError(f"names: {min(both)!r} is the name of a list of layers: give another name")
    taken = {*called.values(), *reserved}
    leaf: dict[int, str] = {}
    for path, axes in zip(paths, labels, strict=True):
        for atom in (atom for label in axes for atom in atoms(label)):
            leaf.setdefault(atom.slot, path)
    for space, of in found.items():
        if space in called:
            continue
        users = [root for root in of.roles if root in leaf]
        writer = leaf[min(users, key=lambda root: of.roles[root] != "write")]
        name = free_name(_stem(writer), taken)
        taken.add(name)
        called[space] = name
    return called


def _asked(
    paths: list[str], labels: list[tuple[Label, ...]], asked: Mapping[str, str]
) -> dict[Variable, str]:
    known = dict(zip(paths, labels, strict=True))
    called: dict[Variable, str] = {}
    for path, text in asked.items():
        if path not in known:
            raise ValueError(f"names[{path!r}]: no such leaf{nearest(path, known)}")
        axes = parse_axes(text)
        if len(axes) != len(known[path]):
            raise ValueError(f"names[{path!r}]: expected {len(known[path])} axes, got {text!r}")
        for axis, label in zip(axes, known[path], strict=True):
            terms, own = _tree(label)
            parts = (terms[int(f.space)] for f in own)
            atomic = [part for part in parts if isinstance(part, Atom)]
            if len(atomic) != len(axis):
                # Fixed parts have separate names, and their assignment to parts is unclear.
                continue
            for factor, space in zip(axis, (atom.space for atom in atomic), strict=True):
                if called.setdefault(space, factor.space) != factor.space:
                    raise ValueError(
                        f"names[{path!r}]: the space {factor.space!r} is already called "
                        f"{called[space]!r}"
                    )
    twice = [name for name, n in Counter(called.values()).items() if n > 1]
    if twice:
        raise ValueError(
            f"names gives two spaces the name {twice[0]!r}: the forward pass keeps them apart"
        )
    return called


def _tree(label: Label) -> tuple[list[Term], Axis]:
    """Returns the parts of a label that are neither products nor sums, and its axis in their
    numbers.

    A part may occur several times in the axis.
    """
    terms: list[Term] = []

    def made(term: Term) -> Axis:
        term = resolve(term)
        if isinstance(term, Product | Sum):
            of = times if isinstance(term, Product) else end_to_end
            return of([made(part) for part in term.parts])
        terms.append(term)
        return (Factor(str(len(terms) - 1), "write"),)

    axis = () if label is None else made(label)
    return terms, axis


def _spec(
    paths: list[str],
    labels: list[tuple[Label, ...]],
    found: Mapping[Variable, Found],
    called: Mapping[Variable, str],
) -> Spec:
    """Makes the spec of the parameters from these spaces."""
    spaces = {
        name: Space(name, int(space.size), found[space].words)
        for space, name in called.items()
        if space in found
    }

    def factor(term: Term, stem: str) -> Factor:
        if isinstance(term, Atom) and term.space in found:
            of = found[term.space]
            role: Role = of.roles.get(term.slot, "write")
            return Factor(called[term.space], role, term.slot in of.tied)
        # The other parts of this axis are free.
        name = free_name(f"{stem}.order", spaces)
        spaces[name] = Space(name, int(term.size), "outer")
        return Factor(name, "write")

    def axis(path: str, label: Label) -> Axis:
        if label is None or not any(atom.space in found for atom in atoms(label)):
            return ()
        terms, own = _tree(label)
        named = [factor(term, _stem(path)) for term in terms]
        return tuple(named[int(f.space)]._replace(block=f.block) for f in own)

    made = tuple(
        Leaf(path, tuple(axis(path, label) for label in axes))
        for path, axes in zip(paths, labels, strict=True)
    )
    used = {f.space for leaf in made for axis in leaf.axes for f in axis}
    return Spec(made, tuple(spaces[name] for name in sorted(used)))


def _stacked(
    spec: Spec, stacks: Sequence[Stack], asked: Mapping[str, str], reserved: Collection[str]
) -> Spec:
    """Adds the spaces of layers under scans, one for each scan along parameters."""
    leaves, taken = list(spec.leaves), {*(space.name for space in spec.spaces), *reserved}
    names: list[str] = []
    for stack in stacks:
        own = [leaves[number] for number in stack.parameters]
        given = [parse_axes(asked[leaf.path])[0] for leaf in own if leaf.path in asked]
        name = free_name(next((axis[0].space for axis in given if axis), "layer"), taken)
        names.append(name)
        taken.add(name)
        for number, leaf in zip(stack.parameters, own, strict=True):
            leaves[number] = leaf._replace(axes=((Factor(name, "write"),), *leaf.axes[1:]))
    layers = [Space(n, stack.scan.length, "stack") for n, stack in zip(names, stacks, strict=True)]
    out = replace(spec, leaves=tuple(leaves), spaces=tuple(sorted((*spec.spaces, *layers))))
    residual = set()
    for name, stack in zip(names, stacks, strict=True):
        # Growth of several stacks together may keep biases that growth of one sets to zero.
        both = [outputs(out, out.layer, grown).writers for grown in ({name}, set(names))]
        zero = [n for n in stack.parameters if all(leaves[n].path in found for found in both)]
        residual |= {name} if stack.residual(zero) else set()
    spaces = (
        space._replace(nonlinearity="stack residual") if space.name in residual else space
        for space in out.spaces
    )
    return replace(out, spaces=tuple(spaces))


def _ties(spec: Spec, traced: ClosedJaxpr) -> tuple[Tie, ...]:
    """The tied leaves whose products other leaves can scale."""
    found = []
    for number, (path, axes) in enumerate(spec.leaves):
        for k, axis in enumerate(axes):
            if len(axis) == 1 and axis[0].tied and axis[0].role == "write":
                scales = undoing(traced, len(spec.leaves), number, k)
                if scales:
                    names = tuple(spec.leaves[n].path for n in scales)
                    found.append(Tie(path, axis[0].space, names))
    return tuple(found)


def _zeroed(spec: Spec, layers: Layers) -> set[str]:
    """The leaves that growth sets to zero in a new layer, whatever other layers grow with it.

    Each has a leaf of the same name in all layers of the list, and all of these write outputs.
    """
    stacks = {space.name for space in spec.spaces if "stack" in space.nonlinearity.split()}
    both = [outputs(spec, spec.layer, grown).writers for grown in (set[str](), stacks)]
    own: dict[str, list[str]] = {}
    for leaf in spec.leaves:
        layer = spec.layer(leaf.path)
        if layer and layer[0] == layers.name:
            end = leaf.path[len(layers.start.replace("{i}", str(layer[1]))) :]
            own.setdefault(end, []).append(leaf.path)
    alike = (paths for paths in own.values() if all(p in found for p in paths for found in both))
    return {path for paths in alike for path in paths}


def _undivided(spec: Spec, scaled: Multiples) -> Iterator[str]:
    """Yields the "dot" spaces of which no root of the size is among the numbers of the code."""
    numbers = [abs(number.value) for number in scaled.numbers if number.value]
    for name, size, words in spec.spaces:
        # Both sides of a product may be divided by the fourth root.
        roots = [size**power for power in (-0.5, 0.5, -0.25, 0.25)]
        if words == "dot" and not any(
            math.isclose(number, root, rel_tol=1e-4) for number in numbers for root in roots
        ):
            yield name
