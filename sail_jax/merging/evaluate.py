"""Evaluates steps on pytrees in one compiled program.

Each leaf goes through the steps one after another. Before a step with a statistic of the whole
tree, every leaf is visited to compute the statistic. After the last such step each leaf is finished
separately. The same steps can be evaluated in two ways:

* Piece by piece (`engine`, `streaming`), for files and for arrays on one CPU. Kernels are compiled
  for a few sizes of pieces and reused.
* In one program (`evaluate`), for traced arrays (under `jit`, `grad`, `vmap`) and arrays on
  accelerators or several devices. Leaves of one shape share one loop. The program then grows with
  the number of shapes instead of the number of leaves. Plain functions are not sufficient, because
  XLA inlines them.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from sail_jax.jax_internals import operation
from sail_jax.merging.leafwise import (
    Add,
    Data,
    Known,
    Leaf,
    alone,
    local_of,
    naming,
    summarise,
    through,
)
from sail_jax.merging.steps import Kernel, Piece, Step, fingerprint, resolve

SHORT = 44
"""Up to this number of operations, the program of a leaf is repeated for every leaf."""
FEW = 1 << 12
"""Leaves with up to this number of entries are stacked, because branches take longer to compile."""


def is_traced(*trees: Any) -> bool:
    """Checks whether any array of some trees is traced, with an unknown value.

    Args:
      *trees: Pytrees of anything.

    Returns:
      True if any leaf is a tracer.
    """

    def traced(x: Any) -> bool:
        try:
            # Tracers of `jit`, `grad` and `vmap` all raise an error for `devices()`. This
            # identifies them without private parts of JAX.
            return isinstance(x, jax.Array) and not x.devices()
        except jax.errors.ConcretizationTypeError:
            return True

    return any(map(traced, jax.tree.leaves(trees)))


def on_one_cpu(*trees: Any) -> bool:
    """Checks whether all arrays of some trees are on JAX's default device, and it is a CPU.

    Args:
      *trees: Pytrees of anything without traced arrays. Only leaves that are JAX arrays count.

    Returns:
      True if NumPy can read all arrays in place.
    """
    here, *_ = jax.devices()
    arrays = [x for x in jax.tree.leaves(trees) if isinstance(x, jax.Array)]
    return here.platform == "cpu" and not [x for x in arrays if x.devices() != {here}]


class Plan(NamedTuple):
    """Everything except shapes for which a compiled program is specialised.

    A loop is a group of leaves with equal shape, dtype and steps.

    Attributes:
      loops: The indices of the leaves in each loop.
      sizes: The number of entries of a leaf, for each loop.
      applied: For each loop, which steps apply to its leaves.
      first: The path of the first leaf of each loop, for messages.
      data: For each leaf the structure of its `Data`, and the indices of its arrays.
    """

    loops: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    applied: tuple[tuple[bool, ...], ...]
    first: tuple[str, ...]
    data: tuple[tuple[Any, tuple[int, ...]], ...]


class Tables(NamedTuple):
    """Values that NumPy computes before the program runs.

    Attributes:
      names: The `fingerprint` of each leaf, an array `[leaf, 4]` for each loop.
      places: The position of each leaf in the order of paths, an array `[leaf]` for each loop.
      prepared: For each step the values that its statistics derive from sizes (`Step.prepare`).
        These are the size of the tree, or a tuple for the leaf size of each loop.
    """

    names: tuple[np.ndarray, ...]
    places: tuple[np.ndarray, ...]
    prepared: tuple[PyTree, ...]


def evaluate(steps: Sequence[Step], leaves: Sequence[Leaf], tail: Kernel) -> list[PyTree]:
    """Applies steps to leaves, in one compiled program.

    Args:
      steps: The steps in order; the last one may reduce.
      leaves: Leaves of at least one entry each, all with the same number of models.
      tail: Kernel `(source, value) -> result` that finishes a leaf. `value` is the output of the
        last step: (delta, weight), or the update.

    Returns:
      The result of each leaf, in their order.

    Raises:
      ValueError: If a kernel raises it. The message starts with the path of a leaf.
    """
    if not leaves:
        return []
    data = tuple(Data(leaf.source, local_of(steps, leaf.path)) for leaf in leaves)
    loops: dict[Any, list[int]] = {}
    for i, (leaf, inputs) in enumerate(zip(leaves, data, strict=True)):
        # Leaves of one loop are stacked, or are branches of one switch. All of these properties
        # must be equal.
        applied = tuple([step.applies(leaf.path) for step in steps])
        arrays, structure = jax.tree.flatten(inputs)
        types = tuple((jnp.shape(x), jnp.result_type(x), jax.typeof(x).sharding) for x in arrays)
        loops.setdefault((applied, structure, types), []).append(i)
    # An array that several leaves share, such as the weights of models, is one argument.
    arrays = list({id(x): x for x in jax.tree.leaves(data)}.values())
    known = {id(x): i for i, x in enumerate(arrays)}
    plan = Plan(
        tuple(map(tuple, loops.values())),
        tuple(leaves[members[0]].size for members in loops.values()),
        tuple(key[0] for key in loops),
        tuple(leaves[members[0]].path for members in loops.values()),
        tuple(
            (jax.tree.structure(x), tuple(known[id(y)] for y in jax.tree.leaves(x))) for x in data
        ),
    )

    def prepare(s: int, step: Step) -> Any:
        if step.over_tree:
            counts = zip(plan.sizes, plan.loops, plan.applied, strict=True)
            # Ranks over the tree depend on the entries of all leaves that the step applies to.
            return step.prepare(sum(n * len(members) for n, members, mask in counts if mask[s]))
        return tuple(
            step.prepare(n) if mask[s] else ()
            for n, mask in zip(plan.sizes, plan.applied, strict=True)
        )

    in_order = sorted(range(len(leaves)), key=lambda i: leaves[i].path)
    place = {i: rank for rank, i in enumerate(in_order)}
    tables = Tables(
        # Paths are data of the program. Trees with the same shapes and other names share a program.
        tuple(np.stack([fingerprint(leaves[i].path) for i in members]) for members in plan.loops),
        # The path breaks ties between equal magnitudes, regardless of the order of the pytree.
        tuple(np.array([place[i] for i in members], np.int32) for members in plan.loops),
        tuple(prepare(s, step) for s, step in enumerate(steps)),
    )
    return _compiled(plan, tuple(step.compiled() for step in steps), arrays, tables, tail)


def _walk(
    stacked: bool,
    plan: Plan,
    steps: tuple[Step, ...],
    arrays: Sequence[Array],
    tables: Tables,
    tail: Kernel,
) -> list[PyTree]:
    """Applies the steps to all loops; the body of the compiled program."""
    data = [structure.unflatten(arrays[i] for i in places) for structure, places in plan.data]
    loops = [
        _Loop(members, size, tuple(data[i] for i in members), names, places, stacked)
        for members, size, names, places in zip(
            plan.loops, plan.sizes, tables.names, tables.places, strict=True
        )
    ]
    for s, step in enumerate(steps):
        chosen = [k for k, applied in enumerate(plan.applied) if applied[s]]
        kernels: list[Kernel | None] = [None] * len(loops)
        if step.over_tree:
            # Visits every leaf at least once, each time through all earlier steps.
            visit = _Loops([loops[k] for k in chosen], len(data))
            bound, own = resolve(step, visit, tables.prepared[s])
            for i, k in enumerate(chosen):
                kernels[k], loops[k].own[s] = bound, tuple(argument[i] for argument in own)
        else:
            for k in chosen:
                kernels[k] = alone(step).bind(tables.prepared[s][k])
        for loop, bound in zip(loops, kernels, strict=True):
            # Each iteration appends one kernel (or None), so `known[s]` belongs to step s.
            loop.known.append(bound)
    outcomes: dict[int, PyTree] = {}
    for loop, path in zip(loops, plan.first, strict=True):
        with naming(path):
            outcomes |= zip(loop.members, loop.finish(tail), strict=True)
    return [outcomes[i] for i in range(len(data))]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _program(plan: Plan, *args: Any) -> list[PyTree]:
    """Runs `_walk` on leaves that are not stacked."""
    return _walk(False, plan, *args)


@_program.defjvp
def _program_jvp(plan: Plan, primals: tuple, tangents: tuple) -> tuple[PyTree, PyTree]:
    """Differentiates `_walk` with the leaves of each loop stacked."""
    # A loop that selects its leaf by a branch would return gradients of all leaves in each
    # iteration.
    return jax.jvp(functools.partial(_walk, True, plan), primals, tangents)


# `jit` also helps if this is only traced, because the next call need not trace it again.
_compiled = jax.jit(_program, static_argnums=0)

Body = Callable[[Any, Known, Data, Piece], tuple[PyTree, PyTree]]
"""(state, known, data, piece) -> (state, result)."""


@dataclass(eq=False)
class _Loop:
    """Leaves of one shape; steps are applied to one leaf after another.

    Attributes:
      members: The indices of the leaves among all leaves.
      size: The number of entries of each leaf.
      data: The arrays of each leaf.
      names: The fingerprint of each leaf, `[leaf, 4]`.
      places: The number of leaves before each in order of paths, `[leaf]`.
      stacked: Whether the arrays are stacked first. Stacks are better for derivatives and take more
        memory.
      known: The kernels of the resolved steps, None where a step does not apply.
      own: For each step over the tree, further arguments of its kernel, stacked over leaves.
    """

    members: tuple[int, ...]
    size: int
    data: tuple[Data, ...]
    names: Array | np.ndarray
    places: Array | np.ndarray
    stacked: bool
    known: list[Kernel | None] = field(default_factory=list)
    own: dict[int, tuple[PyTree, ...]] = field(default_factory=dict)

    def scan(self, f: Body, state: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the last state, and the stacked results of all leaves."""
        if len(self.data) == 1:  # a loop would only prevent fusion
            state, outcome = self.visit(f, state, 0)
            return state, jax.tree.map(lambda x: x[None], outcome)
        mine = self.names, self.places, self.own
        rows, structure = [jax.tree.leaves(x) for x in self.data], jax.tree.structure(self.data[0])
        # Arrays that all leaves share, such as the weights of models, are not stacked or selected.
        own = [
            k for k, column in enumerate(zip(*rows, strict=True)) if len(set(map(id, column))) > 1
        ]

        def whole(mine: Sequence[Array]) -> Data:
            arrays = dict(enumerate(rows[0])) | dict(zip(own, mine, strict=True))
            return structure.unflatten(arrays.values())

        if self.stacked or self.size <= FEW:
            xs = [jnp.stack([row[k] for row in rows]) for k in own], mine
            return lax.scan(lambda state, x: self._step(f, state, whole(x[0]), x[1]), state, xs)
        # A branch selects the leaf, because stacking would copy all inputs.
        branches = [lambda row=row: [jnp.asarray(row[k]) for k in own] for row in rows]

        def step(state: PyTree, x: Any) -> tuple[PyTree, PyTree]:
            return self._step(f, state, whole(lax.switch(x[0], branches)), x[1])

        return lax.scan(step, state, (jnp.arange(len(self.data)), mine))

    def visit(self, f: Body, state: PyTree, i: int) -> tuple[PyTree, PyTree]:
        """Returns the next state and the result of leaf `i`."""
        mine = jax.tree.map(lambda x: x[i], (self.names, self.places, self.own))
        return self._step(f, state, self.data[i], mine)

    def _step(self, f: Body, state: PyTree, data: Data, mine: Any) -> tuple[PyTree, PyTree]:
        """Calls the body of a loop with the kernels of one leaf."""
        name, place, own = mine
        kernels = tuple(
            kernel and kernel.bind(*own.get(s, ())) for s, kernel in enumerate(self.known)
        )
        return f(state, kernels, data, Piece(name, place=place))

    def finish(self, tail: Kernel) -> Iterable[PyTree]:
        """Applies the last steps to every leaf, and returns the results."""

        @functools.partial(jax.jit, inline=True)  # traced once for all leaves
        def finished(
            before: PyTree, kernels: Known, data: Data, piece: Piece
        ) -> tuple[PyTree, PyTree]:
            return before + 1, tail(data.source, through(kernels, data, piece))

        none, count = jnp.int32(0), len(self.data)
        if count == 1 or self._is_short(finished, none):
            return [self.visit(finished, none, i)[1] for i in range(count)]
        counted, stack = self.scan(finished, none)
        return _unstacked(stack, count, None if self.stacked else counted)

    def _is_short(self, f: Body, state: PyTree) -> bool:
        """Checks whether a leaf requires so few operations that a loop is not worthwhile.

        A loop prevents XLA from fusing a leaf's operations with the surrounding program, which
        costs copies.
        """
        # To count them, the program of one leaf is traced, but not compiled.
        return _operations(jax.make_jaxpr(lambda: self.visit(f, state, 0))().jaxpr) <= SHORT


def _operations(jaxpr: Any) -> int:
    """Counts the operations of a program, including its inner programs."""
    total = 0
    for equation in jaxpr.eqns:
        inner = list(operation(equation).inner_jaxprs)
        total += sum(map(_operations, inner)) if inner else 1
    return total


def _unstacked(stack: PyTree, count: int, counted: Array | None) -> list[PyTree]:
    """Splits a stack of results along its leading axis.

    `counted` is the loop's own count, or None if the result will be differentiated.
    """
    leaves, structure = jax.tree.flatten(stack)
    if counted is None:  # the transpose of `split` is one concatenation
        columns = [[part[0] for part in lax.split(x, (1,) * count)] for x in leaves]
        return [structure.unflatten(row) for row in zip(*columns, strict=True)]
    # XLA compiles each slice at a known place separately, but slices at unknown places once.
    places = lax.cond(
        counted == count,  # always true, but XLA does not analyse the loop
        lambda: tuple(jnp.int32(i) for i in range(count)),
        lambda: (jnp.int32(0),) * count,
    )
    columns = [[lax.dynamic_index_in_dim(x, at, 0, False) for at in places] for x in leaves]
    return [structure.unflatten(row) for row in zip(*columns, strict=True)]


class _Loops:
    """The visit (`steps.Leaves`) of all leaves by loops.

    Values kept by pieces form a list with one entry for each loop, stacked over its leaves.
    """

    def __init__(self, loops: Sequence[_Loop], leaves: int):
        self.loops, self.tasks = loops, loops[0].data[0].source.tasks
        self.leaves, self.largest = leaves, max(loop.size for loop in loops)

    def run(self, function: Kernel, *args: Any) -> PyTree:
        return function(*args)

    def fold(self, summary: Kernel, add: Add) -> PyTree:
        return self._visit(lambda *leaf: (summarise(leaf[0], summary, *leaf[1:]), ()), add)[0]

    def keep(self, summary: Kernel, add: Add) -> tuple[PyTree, PyTree]:
        return self._visit(lambda *leaf: summarise(leaf[0], summary, *leaf[1:]), add)

    def _visit(
        self, part: Callable[..., tuple[PyTree, PyTree]], add: Add
    ) -> tuple[PyTree, list[PyTree]]:
        """Adds up the parts of all leaves, loop by loop, and collects the value that each leaf
        keeps.
        """

        def accumulate(total: PyTree, *leaf: Any) -> tuple[PyTree, PyTree]:
            shared, own = part(*leaf)
            return add(total, shared), own

        def alone(state: PyTree, *leaf: Any) -> tuple[PyTree, PyTree]:
            return part(*leaf)

        # Zeros are the identity of every sum, so all loops add to one total.
        shapes, _ = jax.eval_shape(lambda: self.loops[0].visit(alone, (), 0))
        total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        own = []
        for loop in self.loops:
            total, mine = loop.scan(accumulate, total)
            own.append(mine)
        return total, own

    def each(self, function: Kernel) -> PyTree:
        def of(name: Any, place: Any) -> PyTree:
            return function(Piece(name, place=place))

        return [jax.vmap(of)(loop.names, loop.places) for loop in self.loops]
