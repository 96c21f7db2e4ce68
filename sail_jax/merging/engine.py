"""Threads that take tensors through the steps of merges, piece by piece.

Each worker is a thread with one unit at a time (`streaming.Unit`): one large tensor, or several
small ones. XLA and system calls release the interpreter lock, so reading, computing and writing
overlap. The outcome does not depend on which worker takes which unit, when, or how much is kept in
memory.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np

from sail_jax.merging.buffers import Buffers
from sail_jax.merging.leafwise import barrier, check_paths, naming
from sail_jax.merging.steps import Step
from sail_jax.merging.streaming import Reader, Resolved, Tree, Unit, units
from sail_jax.merging.work import PieceOf, Work, is_crowd, tree_bits

__all__ = ["Engine"]


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
    ):
        self._check, self._threads, self._hold, self._only = check, threads, hold, only
        self.faint: set[PieceOf] = set()
        # Elsewhere pieces would have to be fetched for it, and it is not known to be needed.
        self._looks = only is None and jax.default_backend() == "cpu"
        # Decided once for all works: the lengths of pieces follow from it, and all units have to
        # agree.
        self._crowded = is_crowd(works)
        # JAX has no float64 unless it is enabled, and would read float64 tensors as float32.
        self._wide = only is not None or any(
            t.dtype == np.float64 for work in works for t in work.inputs
        )
        # Buffers belong to one thread each: pieces are read into memory that the piece before has
        # used.
        self._local = threading.local()
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
        with self.precision(), naming(unit.name):
            faint = self.faint if self._looks else None
            yield Reader(unit, self.buffers(), self._check, self.stopped, faint, self._only)
        self.buffers().trim()

    def each(self, function: Callable[[Any], None], items: Sequence[Any]) -> None:
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
        for group in groups.values():
            # The statistics need all members of the group, also those that are not wanted
            # themselves (a resumed merge has written them already).
            if any(map(wanted, group)):
                members = self._resolved(group)
                ready += [unit for unit in members if any(map(wanted, unit.works))]
        return ready

    def _resolved(self, group: Sequence[Work]) -> list[Unit]:
        """Makes the units of a merge over the tree, and resolves its steps up to the last such
        step.
        """
        steps = group[0].steps
        check_paths(steps, [work.name for work in group])
        # In order of names: sums over the tree must not depend on the order of the works.
        in_order = sorted(group, key=lambda work: work.name)
        ordered = units(in_order, self._crowded, tree_bits(group), self._only is not None)
        # Steps after the last one over the tree are resolved when their unit is finished.
        for step in steps[: barrier(steps)]:
            if not step.over_tree:
                self.each(lambda unit, step=step: self._resolve(unit, step), ordered)
                continue
            chosen = [unit for unit in ordered if unit.runs and step.applies(unit.name)]
            own = self._over_tree(chosen, step) if chosen else {}
            for unit in ordered:
                unit.resolved(*own.get(id(unit), (None, [])))
        return ordered

    def _over_tree(self, chosen: Sequence[Unit], step: Step) -> dict[int, Resolved]:
        """Finds the statistics of one step over the tree, for each unit by its id."""
        works = [work for unit in chosen for work in unit.works]
        tree = Tree(chosen, functools.partial(self._visit, chosen), tree_bits(works))
        with self.precision():
            resolved = tree.resolve(step, step.prepare(sum(work.size for work in works)))
        return {id(unit): its for unit, its in zip(chosen, resolved, strict=True)}

    def _resolve(self, unit: Unit, step: Step) -> None:
        """Finds the statistics of one step in a unit."""
        with self.reader(unit) as reader:
            unit.resolve(step, reader)

    def _visit(self, chosen: Sequence[Unit], function: Callable[[int, Unit, Reader], None]) -> None:
        """Calls a function with every chosen unit and its place in the list, on the workers."""

        def visit_unit(place: int) -> None:
            with self.reader(chosen[place]) as reader:
                function(place, chosen[place], reader)

        self.each(visit_unit, range(len(chosen)))
