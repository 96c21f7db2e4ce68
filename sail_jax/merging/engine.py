"""Workers that take tensors through the steps of merges, piece by piece.

Workers are threads, each with one unit (`streaming.Unit`) at a time: XLA and system calls release
the interpreter, so reading, computing and writing overlap. Which worker takes which unit, when, and
how much is kept in memory change nothing of what comes out.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np

from sail_jax.merging.leafwise import barrier, check_paths, naming
from sail_jax.merging.steps import Step
from sail_jax.merging.streaming import (
    Buffers,
    Reader,
    Resolved,
    Tree,
    Unit,
    Work,
    is_crowd,
    tree_bits,
    units,
)

__all__ = ["Engine"]


class Engine:
    """Workers, and what they share.

    Args:
      works: All that will be done, or was done before: the precision and the pieces of each follow
        from all. If one of them has float64, everything is computed in 64 bits, for tensors share
        the statistics of a tree.
      threads: How many workers; one works in the thread that asks.
      hold: Bytes of a tensor that a worker may keep between visits instead of reading it again.
      check: Whether inputs and outcomes have to be finite.
    """

    def __init__(self, works: Sequence[Work], threads: int = 1, hold: int = 0, check: bool = True):
        self._check, self._threads, self._hold = check, threads, hold
        self._crowded = is_crowd(works)
        self._wide = any(t.dtype == np.float64 for work in works for t in work.inputs)
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
            self._pool.shutdown()

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """64 bits wherever an input has them; a setting of the thread that asks."""
        return jax.enable_x64(True) if self._wide else contextlib.nullcontext()

    def buffers(self) -> Buffers:
        """Those of this worker."""
        if not hasattr(self._local, "buffers"):
            self._local.buffers = Buffers(self._hold)
        return self._local.buffers

    @contextlib.contextmanager
    def reader(self, unit: Unit) -> Iterator[Reader]:
        """Reads the pieces of a unit."""
        with self.precision(), naming(unit.name):
            yield Reader(unit, self.buffers(), self._check, self.stopped)
        self.buffers().trim()

    def each(self, function: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Calls a function for all items; the first exception stops all and is raised here."""
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
                    future.result()
        except BaseException:
            self.stopped.set()
            for future in futures:
                future.cancel()
            wait(futures)
            raise

    def prepared(
        self, works: Sequence[Work], wanted: Callable[[Work], bool] = lambda work: True
    ) -> list[Unit]:
        """Units of which nothing has to be known any more but the unit itself.

        Args:
          works: Those of one merge (the same object) share its statistics of the tree.
          wanted: Which of them are to be finished. Others are read where such a statistic needs
            them.

        """
        groups: dict[int, list[Work]] = {}
        alone: list[Work] = []
        for work in works:
            if work.merge is not None and work.merge.over_tree:
                groups.setdefault(id(work.merge), []).append(work)
            elif wanted(work):
                alone.append(work)
        ready = units(alone, self._crowded)
        for group in groups.values():
            if any(map(wanted, group)):
                members = self._resolved(group)
                ready += [unit for unit in members if any(map(wanted, unit.works))]
        return ready

    def _resolved(self, group: Sequence[Work]) -> list[Unit]:
        """The units of a merge over the tree, the kernels of its first steps known."""
        steps = group[0].steps
        check_paths(steps, [work.name for work in group])
        in_order = sorted(group, key=lambda work: work.name)
        ordered = units(in_order, self._crowded, tree_bits(group))
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
        works = [work for unit in chosen for work in unit.works]
        tree = Tree(chosen, functools.partial(self._visit, chosen), tree_bits(works))
        with self.precision():
            resolved = tree.resolve(step, step.prepare(sum(work.size for work in works)))
        return {id(unit): its for unit, its in zip(chosen, resolved, strict=True)}

    def _resolve(self, unit: Unit, step: Step) -> None:
        with self.reader(unit) as reader:
            unit.resolve(step, reader)

    def _visit(self, chosen: Sequence[Unit], function: Callable[[int, Unit, Reader], None]) -> None:
        def visit_unit(place: int) -> None:
            with self.reader(chosen[place]) as reader:
                function(place, chosen[place], reader)

        self.each(visit_unit, range(len(chosen)))
