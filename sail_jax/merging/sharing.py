"""Computes statistics of a whole tree in several processes, each from its own tensors.

TIES trims below one threshold for all tensors of a model. If each of four processes writes a
quarter of the tensors, each of them only has to read its quarter, because counts of keys add up.
Each process visits its own units, sends their contributions, and receives those of the others.

Integers add up to the same sum in any order, so a process sends one sum. Floats do not. Each
process therefore sends the contribution of each unit, and all processes add these up in the order
of a single process. The result has the same bytes for any number of processes.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import PyTree

from sail_jax.merging.counting import Wide, flatten
from sail_jax.merging.leafwise import Add
from sail_jax.merging.steps import Kernel
from sail_jax.merging.streaming import InOrder, Reader, Tree, Unit, parts
from sail_jax.merging.task_vectors import Proposal


@runtime_checkable
class Sharing(Protocol):
    """The assignment of tensors to processes, and their communication.

    Attributes:
      mine: The number of this process, from 0.
    """

    mine: int

    def owner(self, name: str) -> int:
        """Returns the number of the process that writes a tensor."""
        ...

    def gather(
        self, what: str, among: Collection[int], compute: Callable[[], list[np.ndarray]]
    ) -> dict[int, list[np.ndarray]]:
        """Sends arrays of this process, and waits for the arrays of others.

        `what` is their name, which is the same in all processes. `compute` is called unless an
        earlier run of this process has stored its result.
        """
        ...


class SharedTree(Tree):
    """The visit (`steps.Visit`) of all pieces of some units, shared with other processes.

    A unit of several small tensors may contain tensors of several processes. The owner of its first
    tensor counts it. The other processes visit it only to store values for its pieces.

    Args:
      units: The units of all processes, in order.
      visit: A function that calls its argument for each unit that is visited here, as in `Tree`.
      bits: The number of bits of a key that one pass finds.
      sharing: The communication with the other processes.
      label: The name of the step, the same in all processes.
      here: The places of the units that this process visits, at least one.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        visit: Callable[[Callable[[int, Unit, Reader], None]], None],
        bits: int,
        sharing: Sharing,
        label: str,
        here: Sequence[int],
    ):
        super().__init__(units, visit, bits)
        self.sharing, self.label, self.here, self._rounds = sharing, label, here, 0
        self.owners = [sharing.owner(unit.name) for unit in units]
        self._own_like: PyTree = None

    def kept_of(self, own: Any, place: int, k: int) -> Any:
        """Returns the value that a piece keeps, or None for a piece that is not visited here."""
        return own.get((place, k))

    def _visit(self, summary: Kernel, add: Add, keep: bool) -> tuple[Any, dict[Any, Any]]:
        like, self._own_like = self._like(summary, add, keep)
        leaves, structure = jax.tree.flatten(like)
        exact = all(np.issubdtype(leaf.dtype, np.integer) for leaf in leaves)
        mine = [p for p, owner in enumerate(self.owners) if owner == self.sharing.mine]
        rank = {place: number for number, place in enumerate(mine)}
        sums, own = InOrder(self.plus(add)), {}
        each: dict[int, list[np.ndarray]] = {}

        def visit_unit(place: int, unit: Unit, read: Reader) -> None:
            total = self.total(place, unit, read, summary, add, keep, own)
            if place in rank and exact:
                sums.add(rank[place], total)
            elif place in rank:
                each[place] = jax.device_get(jax.tree.leaves(total))

        def compute() -> list[np.ndarray]:
            self.visit(visit_unit)
            if exact:
                return jax.device_get(jax.tree.leaves(sums.sum))
            return [x for place in mine for x in each[place]]

        if keep:
            # Values kept by pieces are not stored, so the pieces are always visited.
            brought = compute()
            compute = functools.partial(list, brought)
        if not leaves:
            return like, own
        by_process = self._gather(compute, frozenset(self.owners))
        if exact:
            contributions = [by_process[process] for process in sorted(by_process)]
        else:
            those = {process: iter(arrays) for process, arrays in by_process.items()}
            contributions = [[next(those[owner]) for _ in leaves] for owner in self.owners]
        all_of_them = InOrder(self.plus(add))
        for place, arrays in enumerate(contributions):
            all_of_them.add(place, structure.unflatten(arrays))
        return jax.device_get(all_of_them.sum), own

    def sample(self, summary: Kernel) -> tuple[np.ndarray, float] | None:
        """Computes `[task, ...]` for a few pieces, each in the process that owns it."""
        chosen = self.sampled()
        if not chosen:
            return None
        mine = [at for at in chosen if self.owners[at[0]] == self.sharing.mine]

        def compute() -> list[np.ndarray]:
            drawn = self.drawn(summary, mine)
            return [drawn[at] for at in mine]

        among = frozenset(self.owners[place] for place, _ in chosen)
        those = {k: iter(arrays) for k, arrays in self._gather(compute, among).items()}
        return self.joined([next(those[self.owners[place]]) for place, _ in chosen])

    def before(self, own: PyTree) -> PyTree:
        """Adds up, for each piece, the counts kept by the pieces before it, in all processes.

        Only counts are sent to other processes.
        """
        leaves, structure = flatten(self._own_like)
        counts = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Wide)]
        pieces = [(p, k) for p, unit in enumerate(self.units) for k in range(len(unit.runs))]
        kept = {key: jax.device_get(flatten(own[key])[0]) for key in pieces if key in own}

        def compute() -> list[np.ndarray]:
            mine = [kept[key] for key in pieces if self.owners[key[0]] == self.sharing.mine]
            words = [[word for i in counts for word in row[i]] for row in mine]
            return [np.concatenate(each) for each in zip(*words, strict=True)]

        by_process = self._gather(compute, frozenset(self.owners))
        ends = dict.fromkeys(by_process, 0)
        everywhere = {}
        for place, k in pieces:
            owner, batch = self.owners[place], self.units[place].batch
            found = kept.get((place, k), [np.empty(0)] * len(leaves))
            start, ends[owner] = ends[owner], ends[owner] + batch
            words = iter(by_process[owner])
            for i in counts:
                found[i] = Wide(*(next(words)[start : ends[owner]] for _ in leaves[i]))
            everywhere[place, k] = structure.unflatten(found)
        return super().before(everywhere)

    def _gather(
        self, compute: Callable[[], list[np.ndarray]], among: Collection[int]
    ) -> dict[int, list[np.ndarray]]:
        """Sends the arrays of the next round; returns the arrays of all contributing processes."""
        self._rounds += 1
        return self.sharing.gather(f"{self.label}-{self._rounds}", among, compute)

    def _like(self, summary: Kernel, add: Add, keep: bool) -> tuple[PyTree, PyTree]:
        """Returns the shapes and dtypes of a unit's contribution and of its pieces' values."""
        # This reads and compiles nothing, because all counts may be stored already in a resumed
        # run.
        unit = self.units[self.here[0]]
        arrays: list[Any] = [
            jax.ShapeDtypeStruct((unit.batch, *axes, *unit.runs[0].shape), unit.dtype)
            for _, axes, _ in unit.inputs
        ]
        models, *start = reversed(arrays)
        source = Proposal(start[0] if start else None, models, unit.weights, unit.out_dtype)
        program = functools.partial(parts, add, keep)
        return jax.eval_shape(program, summary, unit.count, unit.local, *unit.arguments(0), source)
