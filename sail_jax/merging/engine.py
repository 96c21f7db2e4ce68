"""Threads that apply the steps of merges to tensors, piece by piece.

Each worker is a thread that handles one unit at a time (`streaming.Unit`): one large tensor, or
several small ones. XLA and system calls release the interpreter lock, so reading, computing and
writing overlap. The result does not depend on which worker takes which unit, when, or how much
memory it keeps.

`checkpoint.executor` passes works on files to an `Engine`, and `merge_arrays` works on arrays.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import ArrayLike

from sail_jax.merging.arithmetic import in_64_bits
from sail_jax.merging.buffers import Buffers
from sail_jax.merging.leafwise import barrier, check_paths, naming
from sail_jax.merging.pulse import Pulse
from sail_jax.merging.sharing import SharedTree, Sharing
from sail_jax.merging.streaming import Reader, Tree, Unit, units
from sail_jax.merging.task_vectors import Proposal
from sail_jax.merging.tensors import Shape, aligned
from sail_jax.merging.work import PieceOf, Work, is_crowd, tree_bits

Item = TypeVar("Item")
SEVERAL = 1 << 22
"""Arrays with more entries than this in total are merged by several threads."""
KEPT = 64 << 20
"""Bytes of arrays that a thread keeps between passes instead of copying them again."""
NEAR = 4 << 20
"""Trees up to this many bytes are kept whole between their passes. Keeping more than a core's cache
would cost more than reading each unit over the previous one.
"""


class Engine:
    """Executes works, the merges of single tensors, on several threads.

    It is a context manager that starts and ends the threads.

    After `pulse.stop()`, workers stop reading and raise `KeyboardInterrupt`.

    Args:
      works: All works of the run, including finished works, because they determine the precision
        and the pieces. If one input is float64, everything is computed in 64 bits, because tensors
        share statistics over the tree.
      threads: The number of workers; with 1 the calling thread does the work.
      hold: Bytes of a tensor that a worker may keep between passes instead of reading them again.
      check: Whether inputs and results must be finite.
      only: The pieces to finish, computed in float64. None for all pieces, computed in the
        precision of their inputs.
      sharing: The connection to other processes that write some of the works. Statistics over the
        tree are then computed together. None for a single process.

    Attributes:
      pulse: Records that the workers are active at each piece, and can stop them.
      faint: The pieces in which XLA may have lost numbers near 0 (`merging.extremes`). Their
        results are not yielded. An engine with `only=faint` finishes them.
    """

    def __init__(
        self,
        works: Sequence[Work],
        threads: int = 1,
        hold: int = 0,
        check: bool = True,
        only: Set[PieceOf] | None = None,
        sharing: Sharing | None = None,
    ):
        self._sharing = sharing
        self._check, self._threads, self._hold, self._only = check, threads, hold, only
        self.faint: set[PieceOf] = set()
        # On other devices the check would copy pieces to the host, and may not be necessary.
        self._looks = only is None and jax.default_backend() == "cpu"
        # This is computed once for all works, because it determines the lengths of pieces in all
        # units.
        self._crowded = is_crowd(works)
        # Without float64 enabled, JAX would read float64 tensors as float32.
        dtypes = {tensor.dtype for work in works for tensor in work.inputs}
        self._wide = only is not None or np.dtype(np.float64) in dtypes
        # Each thread has its own buffers. Pieces are read into the memory of the previous piece.
        self._local = threading.local()
        # The pieces of all units, if one worker has enough memory. Each piece is then read once.
        self._kept: dict[int, dict[int, Proposal]] = {}
        self.pulse = Pulse()
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> "Engine":
        if self._threads > 1:
            self._pool = ThreadPoolExecutor(self._threads, "merge")
        return self

    def __exit__(self, *_: object) -> None:
        self.pulse.stop()
        if self._pool is not None:
            # Workers end at their next piece, so this does not wait for whole tensors.
            self._pool.shutdown()

    def buffers(self) -> Buffers:
        """Returns the reusable memory of the calling thread, created by the first call.

        Returns:
          The buffers of this thread only.
        """
        if not hasattr(self._local, "buffers"):
            self._local.buffers = Buffers(self._hold)
        return self._local.buffers

    @contextlib.contextmanager
    def reader(self, unit: Unit) -> Iterator[Reader]:
        """Makes a context in which the pieces of a unit can be read.

        Args:
          unit: The unit. Its name is put in front of the message of a ValueError raised in the
            context.

        Yields:
          A reader over the buffers of the calling thread.
        """
        buffers = self.buffers()
        owner = id(unit) if id(unit) in self._kept else None
        # Some steps visit a single piece several times, too (`Unit.is_counted`).
        fits = (unit.passes > 1 or len(unit.runs) == 1) and unit.held <= self._hold
        kept = self._kept.get(id(unit), {} if fits else None)
        faint = self.faint if self._looks else None
        with in_64_bits(self._wide), naming(unit.name):
            yield Reader(unit, buffers, self._check, self.pulse, kept, owner, faint, self._only)
        buffers.trim()

    def each(self, function: Callable[[Item], None], items: Sequence[Item]) -> None:
        """Calls a function for every item on the workers, and waits for all calls.

        Args:
          function: A function of one item. Several threads may call it at once.
          items: The items, started in this order.

        Raises:
          BaseException: The first exception of any call. With several workers, the others are
            then stopped and pending calls are cancelled.
        """
        if self._pool is None:
            for item in items:
                function(item)
            return
        futures: list[Future] = [self._pool.submit(function, item) for item in items]
        try:
            pending = set(futures)
            while pending:  # in short waits, to react to an interrupt
                finished, pending = wait(pending, 0.2, FIRST_EXCEPTION)
                for future in finished:
                    # Raises the worker's exception.
                    future.result()
        except BaseException:
            self.pulse.stop()
            # Pending calls are cancelled. Running calls are awaited, because they write into memory
            # and files that the caller frees next.
            for future in futures:
                future.cancel()
            wait(futures)
            raise

    def prepared(
        self, works: Sequence[Work], wanted: Callable[[Work], bool] = lambda work: True
    ) -> list[Unit]:
        """Makes the units of some works, and computes statistics over the whole tree.

        After this, every unit can be finished independently of the others.

        Args:
          works: The works. Works with the same merge object share its statistics.
          wanted: A predicate on works that selects the works to finish. Other works are read only
            for statistics over the tree.

        Returns:
          The units with a wanted work.

        Raises:
          ValueError: If a merge over the tree has a step for missing leaves, or arrays for missing
            leaves.
        """
        groups: dict[int, list[Work]] = {}
        alone: list[Work] = []
        for work in works:
            if work.merge is not None and work.merge.over_tree:
                # Works of one merge object share its statistics over the tree and must be visited
                # together. Another merge object with the same hyperparameters has its own tree.
                groups.setdefault(id(work.merge), []).append(work)
            elif wanted(work):
                alone.append(work)
        ready = units(alone, self._crowded, wide=self._only is not None)
        for number, group in enumerate(groups.values()):
            # The statistics need all members of the group, even those that a resumed merge has
            # already written.
            if any(map(wanted, group)):
                members = self._over_tree(group, wanted, number)
                ready += [unit for unit in members if any(map(wanted, unit.works))]
        return ready

    def _over_tree(
        self, group: Sequence[Work], wanted: Callable[[Work], bool], number: int
    ) -> list[Unit]:
        """Makes the units of a merge over the tree, and resolves its steps up to the last step over
        the tree. All processes number such merges in the same order.
        """
        steps = group[0].steps
        check_paths(steps, [work.name for work in group])
        # Works are sorted by name, because sums over the tree must not depend on their order.
        in_order = sorted(group, key=lambda work: work.name)
        ordered = units(in_order, self._crowded, tree_bits(group), self._only is not None)
        room = sum([unit.room for unit in ordered])
        if self._threads == 1 and room <= min(self._hold, NEAR):
            self._kept |= {id(unit): {} for unit in ordered}
        sharing = self._sharing

        def is_here(unit: Unit) -> bool:
            """Checks whether this process must visit a unit, to write it or to count it."""
            if sharing is None or any(map(wanted, unit.works)):
                return True
            return sharing.owner(unit.name) == sharing.mine

        here = [*filter(is_here, ordered)]
        # Steps after the last one over the tree are resolved when their unit is finished.
        for place, step in enumerate(steps[: barrier(steps)]):
            if not step.over_tree:
                self._visit(here, lambda _, unit, read, step=step: unit.resolve(step, read))
                continue
            chosen = []
            for unit in ordered:
                if unit.runs and step.applies(unit.name):
                    chosen.append(unit)
                else:
                    unit.pass_by()
            places = [k for k, unit in enumerate(chosen) if is_here(unit)]
            if not places:
                continue
            bits = tree_bits([work for unit in chosen for work in unit.works])
            visit = functools.partial(self._visit, chosen, places=places)
            with in_64_bits(self._wide):
                if sharing is None:
                    Tree(chosen, visit, bits).resolve(step)
                else:
                    label = f"{number}-{place}"
                    SharedTree(chosen, visit, bits, sharing, label, places).resolve(step)
        return ordered

    def _visit(
        self,
        chosen: Sequence[Unit],
        function: Callable[[int, Unit, Reader], None],
        places: Sequence[int] | None = None,
    ) -> None:
        """Calls a function with the place of each unit in a list, the unit and its reader.

        `places` restricts it to the units at these places.
        """

        def visit(place: int) -> None:
            with self.reader(chosen[place]) as reader:
                function(place, chosen[place], reader)

        self.each(visit, range(len(chosen)) if places is None else places)


class InMemory(NamedTuple):
    """An array in memory, read piece by piece like a tensor of a file.

    Attributes:
      name: The path of the leaf.
      source: The owner of the array for messages, such as "model 0" or "base".
      dtype: The dtype of the array.
      shape: Its shape.
      entries: Its entries, flat.
    """

    name: str
    source: str
    dtype: np.dtype
    shape: Shape
    entries: np.ndarray

    @classmethod
    def of(cls, name: str, source: str, array: ArrayLike) -> "InMemory":
        """Describes an array."""
        x = np.asarray(array)
        return cls(name, source, x.dtype, x.shape, x.reshape(-1))

    def read(self, out: np.ndarray, start: int = 0) -> None:
        """Copies consecutive entries, in row-major order, into a buffer."""
        out[:] = self.entries[start : start + len(out)]


def merge_arrays(works: Sequence[Work]) -> list[np.ndarray]:
    """Merges tensors with inputs in memory.

    Args:
      works: The work for each tensor.

    Returns:
      The merged array of each work, in the order of `works`. JAX can use their memory without a
      copy, because it is not shared.

    Raises:
      NotFiniteError: If an input or a result contains NaN or infinity.
      ValueError: If a kernel raises it. The message starts with the path of the leaf.
    """
    outcomes = {work.name: aligned(work.shape, work.dtype) for work in works}
    size = sum([work.size for work in works])
    threads = min(8, os.cpu_count() or 1) if size > SEVERAL else 1

    def carry_out(engine: Engine, wanted: Callable[[Work], bool]) -> None:
        def finish(unit: Unit) -> None:
            with engine.reader(unit) as reader:
                for work, start, entries, _ in unit.outcome(reader):
                    outcomes[work.name].reshape(-1)[start : start + len(entries)] = entries
            # A unit stays in the list until the last unit is merged, so the memory for its steps is
            # freed now.
            unit.forget()

        engine.each(finish, engine.prepared(works, wanted))

    with Engine(works, threads, KEPT) as engine:
        carry_out(engine, lambda work: True)
    if engine.faint:
        faint = {name for name, _ in engine.faint}
        with Engine(works, threads, KEPT, only=engine.faint) as wide:
            carry_out(wide, lambda work: work.name in faint)
    return list(outcomes.values())
