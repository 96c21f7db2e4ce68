"""Threads that take tensors through the steps of merges, piece by piece.

Each worker is a thread with one unit at a time (`streaming.Unit`): one large tensor, or several
small ones. XLA and system calls release the interpreter lock, so reading, computing and writing
overlap. The outcome does not depend on which worker takes which unit, when, or how much is kept in
memory.

`checkpoint.executor` gives works of files to an `Engine`, `merge_arrays` works of arrays.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import ArrayLike

from sail_jax.merging.buffers import Buffers
from sail_jax.merging.leafwise import barrier, check_paths, naming
from sail_jax.merging.sharing import SharedTree, Sharing
from sail_jax.merging.streaming import Reader, Tree, Unit, units
from sail_jax.merging.task_vectors import Proposal
from sail_jax.merging.tensors import Shape, aligned
from sail_jax.merging.work import PieceOf, Work, is_crowd, tree_bits

Item = TypeVar("Item")
SEVERAL = 1 << 22
"""The total number of entries of arrays above which several threads merge them."""
KEPT = 64 << 20
"""Bytes of arrays that a thread keeps between passes, instead of copying them again."""
NEAR = 4 << 20
"""Bytes up to which a whole tree is kept between its passes: more than a core's cache holds would
cost more than to read each unit over the one before.
"""


class Engine:
    """Carries out works, the merges of single tensors, on several threads.

    It is a context manager that starts and ends the threads.

    `stopped` is an event: once it is set, workers read nothing more and raise `KeyboardInterrupt`.

    Args:
      works: All works of the run, also those that are finished already: the precision and the
        pieces of each follow from all of them. If one input is float64, everything is computed in
        64 bits, since tensors share statistics over the tree.
      threads: The number of workers; with 1 the calling thread does the work.
      hold: Bytes of a tensor that a worker may keep between passes instead of reading them again.
      check: Whether inputs and outcomes have to be finite.
      only: The pieces to finish, which are computed in float64; None for all pieces, computed as
        their inputs are.
      sharing: The way to other processes that write some of the works: statistics over the tree are
        then found together. None without any.

    Attributes:
      faint: The pieces of which XLA may have lost numbers near 0 (`merging.extremes`); their
        outcomes were not yielded, and an engine that is given them as `only` finishes them.
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
        # Elsewhere pieces would have to be fetched for it, and it is not known to be needed.
        self._looks = only is None and jax.default_backend() == "cpu"
        # Decided once for all works: the lengths of pieces follow from it, and all units have to
        # agree.
        self._crowded = is_crowd(works)
        # JAX has no float64 unless it is enabled, and would read float64 tensors as float32.
        dtypes = {tensor.dtype for work in works for tensor in work.inputs}
        self._wide = only is not None or np.dtype(np.float64) in dtypes
        # Buffers belong to one thread each: pieces are read into memory that the piece before has
        # used.
        self._local = threading.local()
        # What one worker reads of all units, if there is room for it: each is read once then.
        self._kept: dict[int, dict[int, Proposal]] = {}
        self.stopped = threading.Event()
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> "Engine":
        if self._threads > 1:
            self._pool = ThreadPoolExecutor(self._threads, "merge")
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        if self._pool is not None:
            # Workers see `stopped` at their next piece, so this does not wait for whole tensors.
            self._pool.shutdown()

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Makes a context in which JAX computes in 64 bits if any input is read as float64.

        The setting belongs to the thread that enters the context.

        Returns:
          The context manager.
        """
        return jax.enable_x64(True) if self._wide else contextlib.nullcontext()

    def buffers(self) -> Buffers:
        """Returns the reusable memory of the calling thread, which is made on its first call.

        Returns:
          The buffers, which no other thread uses.
        """
        if not hasattr(self._local, "buffers"):
            self._local.buffers = Buffers(self._hold)
        return self._local.buffers

    @contextlib.contextmanager
    def reader(self, unit: Unit) -> Iterator[Reader]:
        """Makes a context in which the pieces of a unit can be read.

        Args:
          unit: The unit; its name is put in front of a ValueError raised in the context.

        Yields:
          A reader over the buffers of the calling thread.
        """
        buffers = self.buffers()
        owner = id(unit) if id(unit) in self._kept else None
        fits = unit.passes > 1 and unit.held <= self._hold
        kept = self._kept.get(id(unit), {} if fits else None)
        faint = self.faint if self._looks else None
        with self.precision(), naming(unit.name):
            yield Reader(unit, buffers, self._check, self.stopped, kept, owner, faint, self._only)
        buffers.trim()

    def each(self, function: Callable[[Item], None], items: Sequence[Item]) -> None:
        """Calls a function for every item, on the workers, and waits for all calls.

        Args:
          function: Function of one item; it may be called from several threads at once.
          items: The items, started in this order.

        Raises:
          BaseException: The first exception of any call. With several workers `stopped` is set
            then, and calls that have not begun are cancelled.
        """
        if self._pool is None:
            for item in items:
                function(item)
            return
        futures: list[Future] = [self._pool.submit(function, item) for item in items]
        try:
            pending = set(futures)
            while pending:  # in short waits: an interrupt is noticed between them
                finished, pending = wait(pending, 0.2, FIRST_EXCEPTION)
                for future in finished:
                    # Raises what the worker raised.
                    future.result()
        except BaseException:
            self.stopped.set()
            # Those not begun are cancelled, and those under way are waited for: they write into
            # memory and files that the caller frees next.
            for future in futures:
                future.cancel()
            wait(futures)
            raise

    def prepared(
        self, works: Sequence[Work], wanted: Callable[[Work], bool] = lambda work: True
    ) -> list[Unit]:
        """Makes the units of some works, with statistics over the whole tree computed.

        After this, every unit can be finished without looking at the others.

        Args:
          works: The works; those that share one merge (the same object) share its statistics.
          wanted: Predicate on works: which are to be finished. Others are read only where a
            statistic over the tree needs them.

        Returns:
          The units that hold a wanted work.

        Raises:
          ValueError: If a merge over the tree has a step confined to leaves of which there are
            none, or one with arrays for other leaves than there are.
        """
        groups: dict[int, list[Work]] = {}
        alone: list[Work] = []
        for work in works:
            if work.merge is not None and work.merge.over_tree:
                # Works of one merge share its statistics over the tree, so they have to be visited
                # together. The same hyperparameters elsewhere make another merge and another tree.
                groups.setdefault(id(work.merge), []).append(work)
            elif wanted(work):
                alone.append(work)
        ready = units(alone, self._crowded, wide=self._only is not None)
        for number, group in enumerate(groups.values()):
            # The statistics need all members of the group, also those that are not wanted
            # themselves (a resumed merge has written them already).
            if any(map(wanted, group)):
                members = self._over_tree(group, wanted, number)
                ready += [unit for unit in members if any(map(wanted, unit.works))]
        return ready

    def _over_tree(
        self, group: Sequence[Work], wanted: Callable[[Work], bool], number: int
    ) -> list[Unit]:
        """Makes the units of a merge over the tree, and resolves its steps up to the last such
        step. All processes number such merges alike.
        """
        steps = group[0].steps
        check_paths(steps, [work.name for work in group])
        # In order of names: sums over the tree must not depend on the order of the works.
        in_order = sorted(group, key=lambda work: work.name)
        ordered = units(in_order, self._crowded, tree_bits(group), self._only is not None)
        room = sum([unit.room for unit in ordered])
        if self._threads == 1 and room <= min(self._hold, NEAR):
            self._kept |= {id(unit): {} for unit in ordered}
        sharing = self._sharing

        def is_here(unit: Unit) -> bool:
            """Whether this process has to look at a unit: to write it, or to count it."""
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
            with self.precision():
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
        """Calls a function with the place of units in a list, the unit and its reader.

        It is called for all units, or for those at some places.
        """

        def visit(place: int) -> None:
            with self.reader(chosen[place]) as reader:
                function(place, chosen[place], reader)

        self.each(visit, range(len(chosen)) if places is None else places)


class InMemory(NamedTuple):
    """An array in memory, read piece by piece like a tensor of a file.

    Attributes:
      name: The path of the leaf.
      source: Whose array it is, for messages: "model 0", "base".
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
    """Merges tensors whose inputs are in memory.

    Args:
      works: What to do for each tensor.

    Returns:
      The merged array of each work, of its shape and dtype, in the order of `works`. JAX can take
      the memory of each as it is, and nobody else holds it.

    Raises:
      NotFiniteError: If an input or an outcome holds NaN or infinity.
      ValueError: For what kernels raise; the message starts with the path of the leaf.
    """
    outcomes = {work.name: aligned(work.shape, work.dtype) for work in works}
    size = sum([work.size for work in works])
    threads = min(8, os.cpu_count() or 1) if size > SEVERAL else 1

    def carry_out(engine: Engine, wanted: Callable[[Work], bool]) -> None:
        def finish(unit: Unit) -> None:
            with engine.reader(unit) as reader:
                for work, start, entries, _ in unit.outcome(reader):
                    outcomes[work.name].reshape(-1)[start : start + len(entries)] = entries
            # A unit stays in the list of all units until the last one is merged, so it has to free
            # what it kept for its steps now.
            unit.forget()

        engine.each(finish, engine.prepared(works, wanted))

    with Engine(works, threads, KEPT) as engine:
        carry_out(engine, lambda work: True)
    if engine.faint:
        faint = {name for name, _ in engine.faint}
        with Engine(works, threads, KEPT, only=engine.faint) as wide:
            carry_out(wide, lambda work: work.name in faint)
    return list(outcomes.values())
