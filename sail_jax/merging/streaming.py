"""Evaluates merges piece by piece, over tensors that may be too large for memory.

Three models of 7 billion parameters and their base are 56 GB in bfloat16, more than most machines
can hold. Tensors are therefore read in runs of 2^20 entries. Each run goes through the steps of the
merge, and the result is written. Three problems arise:

* Compilation. XLA compiles a program for each shape, and models have many shapes. Runs are
  therefore padded to one of four lengths (`work.pieces`), and small tensors of one kind share a
  program in a batch. 60 leaves of a few entries each are four calls of one program, whatever their
  shapes.
* Statistics, such as the threshold below which TIES trims. `Tree` visits all pieces before any is
  finished. Files are slow to read, so the search needs few passes. A 32-bit threshold needs two
  passes with 16-bit digits (`ranking`), and one for equal keys. If a sample shows the threshold,
  one pass replaces all three (`guessing`).
* Reproducible bytes. Threads finish units in any order, and sums of floats depend on the order.
  Parts are therefore added in the order of units (`InOrder`). Pieces depend only on shapes, never
  on memory or threads.

For example, tensors of 2.5 * 2^20, 100 and 40 entries are two units. The first unit has four runs:
two of 2^20 entries, and two of 2^18. The other two tensors share a batch with rows of 2^14 entries.
The first 100 and 40 entries of their rows are used, and zeros follow.

Pieces are read into the same memory again and again (`buffers`), because fresh pages are slow. On a
CPU, programs read it in place, so a buffer is reused only when its readers are finished. The page
"How a merge is evaluated" (docs/explanation/evaluating.md) follows a merge through this module.
"""

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from sail_jax.merging import counting
from sail_jax.merging.arithmetic import Products, number, products, settled
from sail_jax.merging.buffers import Buffers
from sail_jax.merging.extremes import finite, lost
from sail_jax.merging.leafwise import (
    Add,
    Data,
    Known,
    alone,
    local_of,
    summarise,
    through,
)
from sail_jax.merging.pulse import Pulse
from sail_jax.merging.ranking import Order
from sail_jax.merging.row_ranks import host_ranks
from sail_jax.merging.steps import Kernel, Piece, Step, fingerprint, kernel, resolve
from sail_jax.merging.task_vectors import Proposal, written
from sail_jax.merging.tensors import Tensor
from sail_jax.merging.work import ENTRIES, SOME, PieceOf, Work, at_a_time, passes, pieces, read_as

SAMPLED = 4
"""The number of pieces in a sample."""
Computed = TypeVar("Computed")
Shaped = TypeVar("Shaped", Tensor, Work)


class NotFiniteError(ValueError):
    """Raised if an input or a result contains NaN or infinity.

    Attributes:
      tensor: The input, or the work of the result.
      nan: Whether a result contains NaN. Overflow alone gives only infinity.
    """

    def __init__(self, tensor: Tensor | Work, nan: bool = False):
        super().__init__(f"{tensor.name}: expected finite values, got NaN or infinity")
        self.tensor, self.nan = tensor, nan


def all_finite(tensor: Tensor) -> bool:
    """Reads a tensor and checks that it contains neither NaN nor infinity.

    Args:
      tensor: The tensor. It is read piece by piece.

    Returns:
      True if all entries are finite.
    """
    size = math.prod(tensor.shape)
    buffer = np.empty(min(size, ENTRIES), tensor.dtype)
    for start in range(0, size, ENTRIES):
        part = buffer[: min(ENTRIES, size - start)]
        tensor.read(part, start)
        if not finite(part):
            return False
    return True


def _not_finite(tensors: Sequence[Shaped], rows: np.ndarray, count: int) -> Shaped | None:
    """Returns the first tensor with NaN or infinity in its row, or None.

    The first `count` entries of each row are checked, or fewer for a smaller tensor. The entries
    after them may be anything.
    """
    # Checking all rows at once is fast. If the check fails, padding may be the cause, so each row
    # is checked.
    if not finite(rows):
        for tensor, row in zip(tensors, rows, strict=True):
            if not finite(row[: min(count, math.prod(tensor.shape))]):
                return tensor
    return None


class Reader:
    """Reads the pieces of a unit on demand, and keeps them if memory allows.

    Args:
      unit: The unit to read.
      buffers: The memory for pieces.
      check: Whether NaN and infinity are rejected when a piece is first read.
      pulse: Records activity before each piece, and can stop reading.
      kept: The pieces in memory, by index; None to keep no pieces.
      owner: The owner of the memory. Readers with the same owner (or None) share memory.
      faint: A set that collects pieces in which XLA may have lost numbers near 0, as (name of the
        work, index of the piece). None skips this check.
      only: The wanted pieces of results; None for all pieces that are not faint.
    """

    def __init__(
        self,
        unit: "Unit",
        buffers: Buffers,
        check: bool,
        pulse: Pulse,
        kept: dict[int, Proposal] | None = None,
        owner: int | None = None,
        faint: set[PieceOf] | None = None,
        only: Set[PieceOf] | None = None,
    ):
        self.unit, self.buffers, self.kept, self.owner = unit, buffers, kept, owner
        self.check, self.pulse, self.faint, self.only = check, pulse, faint, only

    def __call__(self, k: int, compute: Callable[[Proposal], Computed]) -> Computed:
        """Reads a piece and calls a function on it.

        The arrays of a piece share memory with the next piece, although JAX assumes immutable
        arrays and computes in the background. Only `compute` may therefore see them, and the memory
        is reused only when all results of `compute` are ready. If `compute` fails, its computations
        cannot be awaited, and the memory is not reused.

        Args:
          k: The index of the piece in `unit.runs`.
          compute: A function of the arrays of the piece, stacked over tensors: `[tensor, *piece]`
            for starts, `[tensor, model, *piece]` for models. It must not keep them.

        Returns:
          The result of `compute`.

        Raises:
          NotFiniteError: If an input contains NaN or infinity.
          KeyboardInterrupt: If the run was stopped.
        """
        self.pulse.beat()
        try:
            piece = None if self.kept is None else self.kept.get(k)
            return jax.block_until_ready(compute(piece or self._read(k)))
        except BaseException:
            self.buffers.clear()
            raise

    def wanted(self, k: int) -> list[int]:
        """Lists the positions of the tensors whose result for a piece is wanted."""
        if self.only is None and not self.faint:
            return [*range(len(self.unit.works))]
        pieces = [(work.name, k) for work in self.unit.works]
        if self.only is not None:
            return [b for b, piece in enumerate(pieces) if piece in self.only]
        return [b for b, piece in enumerate(pieces) if piece not in (self.faint or ())]

    def _read(self, k: int) -> Proposal:
        """Reads a piece of the start and the models of every tensor into buffers."""
        unit, run = self.unit, self.unit.runs[k]
        arrays: list[Array | None] = []
        for part, axes, inputs in unit.inputs:
            # If memory is short, each piece overwrites the previous one.
            label = part, self.owner, 0 if self.kept is None else k
            memory = self.buffers.take(label, (unit.batch, *axes, *run.shape), unit.dtype)
            rows = memory[: len(unit.works)].reshape(-1, math.prod(run.shape))
            for (tensor, size), row in zip(inputs, rows, strict=True):
                # Entries are converted to the unit's dtype, and zeros follow, because the memory
                # may hold old entries.
                count = min(run.count, size)
                if tensor.dtype == unit.dtype:
                    tensor.read(row[:count], run.start)
                else:
                    raw = self.buffers.take("cast", (count,), tensor.dtype)
                    tensor.read(raw, run.start)
                    row[:count] = raw.astype(unit.dtype)
                row[count:] = 0
            # Each piece is checked once, because later passes read the same bytes.
            if self.check and k in unit.unchecked:
                bad = _not_finite([tensor for tensor, _ in inputs], rows, run.count)
                if bad is not None:
                    raise NotFiniteError(bad)
            arrays.append(self.buffers.on_device(memory))
        unit.unchecked.discard(k)
        models, *start = reversed(arrays)
        assert models is not None
        source = Proposal(start[0] if start else None, models, unit.weights, unit.out_dtype)
        if self.kept is not None:
            self.kept[k] = source
        return source


# --- units


class Unit:
    """The tensors merged at a time: one tensor of many pieces, or several small tensors.

    The steps are resolved one after another (`resolve`). Then `outcome` merges the pieces.

    Args:
      works: Works of one merge. Several works must be of small tensors of one kind (`units`).
      bits: The number of bits of a key that one pass over the whole tree finds.
      crowded: Whether there are many tiny tensors (`is_crowd`).
      wide: Whether inputs are read as float64 and results are cast by NumPy. Both keep numbers that
        float32 loses (`faint`).

    Attributes:
      works: The works.
      merge: The merge, None if a model is copied.
      name: The name of the first tensor.
      tasks: The number of models.
      passes: The number of times that the inputs are read, unless they are kept in memory.
      runs: The pieces. Several pieces belong to a single tensor.
      places: The `Piece` arguments of kernels, stacked over tensors.
      unchecked: The pieces with inputs that are not yet checked for finite values.
      batch: The capacity of arrays, in tensors.
      dtype: The dtype for reading inputs.
      held: The bytes of all inputs in this dtype.
      room: The bytes of all inputs with padding.
      weights: The weights of each tensor, `[batch, model]`.
      known: The kernels of the steps resolved so far; None where a step does not apply.
      own: For each of these steps and each piece, the further arguments of the kernel, stacked over
        tensors.
    """

    def __init__(self, works: Sequence[Work], bits: int, crowded: bool, wide: bool = False):
        first = works[0]
        self.works, self.merge, self.steps = tuple(works), first.merge, first.steps
        self.name, self.tasks, self.wide = first.name, len(first.models), wide
        self.passes, self.batch = passes(first, bits), at_a_time(first, crowded)
        self.dtype = np.dtype(np.float64) if wide else read_as(first)
        self.out_dtype = str(jnp.dtype(self.dtype if wide else first.dtype))
        # Tensors that are merged together share the runs of the largest tensor; the others are
        # padded.
        largest = max(works, key=lambda work: work.size)
        self.runs = pieces(largest.shape, first.needs, crowded)
        # Checking results is sufficient if NaN and infinity propagate to them. Some one-byte dtypes
        # have no NaN.
        shown = first.dtype.itemsize > 1 and all(s.propagates_nonfinite for s in self.steps)
        self.unchecked = set() if shown else set(range(len(self.runs)))
        entries = sum([work.size * len(work.inputs) for work in works])
        self.held = entries * self.dtype.itemsize
        width = self.batch * len(first.inputs) * self.dtype.itemsize
        self.room = width * sum([math.prod(run.shape) for run in self.runs])
        # (label, further axes, tensors with their sizes) of the arrays to read for each piece.
        starts = [(w.start, w.size) for w in works if w.start is not None]
        models = [(x, w.size) for w in works for x in w.models]
        self.inputs: list[tuple[str, tuple[int, ...], list[tuple[Tensor, int]]]] = [
            *([("start", (), starts)] if starts else []),
            ("models", (self.tasks,), models),
        ]
        precision = np.float64 if self.dtype == np.float64 else np.float32
        # Weights are computed in float64 and rounded once, to the precision of the inputs.
        self.weights = self._stacked([work.weights.astype(precision) for work in works])
        # A tensor with own arrays is merged separately (`at_a_time`).
        local = local_of(self.steps, self.name)
        self.local = jax.tree.map(lambda x: np.asarray(x)[None], local)
        # The count is an array, so a partly filled batch runs the same program.
        self.count = np.int32(len(works))
        names = self._stacked([fingerprint(work.name) for work in works])
        self.on_host = on_host = jax.default_backend() == "cpu"
        self.places = [
            Piece(
                names,
                np.full(self.batch, start, np.uint32),
                None
                if first.needs == "tensor"
                else self._stacked([np.uint32(min(count, work.size)) for work in works]),
                on_host,
            )
            for start, count, _ in self.runs
        ]
        self.known: list[Kernel | None] = []
        self.own: list[list[tuple[PyTree, ...]]] = []

    def _stacked(self, values: Sequence[Any]) -> Any:
        """Stacks NumPy pytrees, one for each tensor, along a leading axis with the length of a
        batch.

        Zeros follow the last tensor. They are never read.
        """

        def stack(*x: Any) -> np.ndarray:
            out = np.zeros((self.batch, *np.shape(x[0])), np.asarray(x[0]).dtype)
            out[: len(x)] = x
            return out

        return jax.tree.map(stack, *values)

    def arguments(self, k: int) -> tuple[Sequence[Kernel | None], Any, Piece]:
        """Collects the arguments of programs for one piece, except its arrays.

        Args:
          k: The index of the piece in `runs`.

        Returns:
          The known kernels, their further arguments, and the piece.
        """
        return (
            tuple(self.known),
            tuple([step[k] if step else () for step in self.own]),
            self.places[k],
        )

    def beside(self, k: int, source: Proposal) -> tuple[PyTree, ...]:
        """Collects the steps' own arrays for the tensors, and computes row ranks with NumPy.

        NumPy is not called inside programs, because such programs are compiled again in every
        process.

        Args:
          k: The index of the piece in `runs`.
          source: The arrays of the piece.

        Returns:
          `local`, with the ranks for steps that need them (`Step.ranked`).
        """
        local = list(self.local)
        for s, step in enumerate(self.steps if self.on_host else ()):
            # A statistic that is already found does not require its ranks again.
            found = step.statistics and s < len(self.known) and len(self.runs) > 1
            if step.ranked is None or not step.applies(self.name) or s > len(self.known) or found:
                continue
            kernels, own, place = self.arguments(k)
            sizes = _sizes(
                step.ranked, self.count, tuple(local), kernels[:s], own[:s], place, source
            )
            local[s] = host_ranks(np.asarray(sizes))
        return tuple(local)

    def forget(self) -> None:
        """Frees the values kept for the steps.

        Units stay listed until the last unit is finished, and their kept values would accumulate.
        """
        self.known, self.own = [], []

    def pass_by(self) -> None:
        """Records that the next step does not apply."""
        self.known.append(None)
        self.own.append([])

    def resolve(self, step: Step, reader: Reader) -> None:
        """Finds the statistics of the next step, which must not be over the tree.

        Args:
          step: The next step.
          reader: Reads the pieces.
        """
        if not self.runs or not step.applies(self.name):
            self.pass_by()
        elif not step.statistics:
            self.known.append(step.kernel)
            self.own.append([])
        elif len(self.runs) == 1 and not self.is_counted(step):
            self.known.append(alone(step))
            self.own.append([(self._stacked([step.prepare(work.size) for work in self.works]),)])
        else:
            Tree([self], lambda function: function(0, self, reader), 16).resolve(step)

    def is_counted(self, step: Step) -> bool:
        """Checks whether the thresholds of a single piece are found as those of several pieces.

        The result is the same. The program that searches a piece and merges it takes longest to
        compile and to load, and larger tensors need the other programs in any case.

        Args:
          step: A step with statistics.

        Returns:
          True if the piece is not padded, and all statistics of the step are ranks.
        """
        (run,) = self.runs
        whole = run.shape in ((SOME,), (ENTRIES,)) and run.shape == (run.count,)
        return whole and all(isinstance(statistic, Order) for statistic in step.statistics)

    def outcome(
        self, reader: Reader, measure: bool = False
    ) -> Iterator[tuple[Work, int, np.ndarray, dict[str, np.ndarray]]]:
        """Merges the tensors piece by piece, after resolving the remaining steps.

        Args:
          reader: Reads the pieces.
          measure: Whether sums for a report are also computed.

        Yields:
          (work, index of the first entry, entries, measurements by name) for each wanted piece of
          each tensor. The entries are flat, in the work's dtype. Measurements are float arrays,
          empty without `measure`. Pieces in which XLA may have lost numbers near 0 are not yielded
          if the reader collects them.

        Raises:
          NotFiniteError: For inputs that contain NaN or infinity, and for results that overflow
            their dtype, if the reader checks.
        """
        tail = kernel(written, number(self.merge.scale if self.merge else 1.0))
        for step in self.steps[len(self.known) :]:
            self.resolve(step, reader)
        for k, (start, count, _) in enumerate(self.runs):
            if not reader.wanted(k):
                continue
            rows, seen = reader(k, functools.partial(self._merged, k, tail, measure, reader.faint))
            bad = _not_finite(self.works, rows, count) if reader.check else None
            if bad is not None:
                # If an input is not finite, the error is about this input.
                blamed = next((x for x in bad.inputs if not all_finite(x)), bad)
                row = rows[self.works.index(bad)]
                raise NotFiniteError(blamed, bool(np.isnan(row[: min(count, bad.size)]).any()))
            for b in reader.wanted(k):
                work = self.works[b]
                mine = {name: np.asarray(x[b], float) for name, x in seen.items()} if seen else {}
                if mine.pop("unit", None) is not None:
                    mine["gram"] = Products(seen["unit"][b], seen["gram"][b]).plain
                yield work, start, rows[b, : min(count, work.size)], mine

    def _merged(
        self, k: int, tail: Kernel, measure: bool, faint: set[PieceOf] | None, source: Proposal
    ) -> tuple[np.ndarray, dict[str, Array]]:
        """Merges a piece of every tensor; each row of the result is a tensor, in its dtype."""
        local = self.beside(k, source)
        out, seen = _outcomes(tail, self.count, local, *self.arguments(k), source, measure)
        n, dtype = len(self.works), self.works[0].dtype
        rows = np.asarray(out).reshape(self.batch, -1)[:n]
        if self.wide:
            # NumPy keeps numbers that XLA treats as 0. The reader rejects infinities.
            with np.errstate(over="ignore"):
                return rows.astype(dtype), seen
        # no wider dtype exists for float64
        if faint is not None and dtype != np.float64:
            start, models = source.start, np.asarray(source.models)
            inputs = [] if start is None else [np.asarray(start)]
            inputs += [models[:, task] for task in range(self.tasks)]
            inputs = [x[:n].reshape(rows.shape) for x in inputs]
            found = lost(rows, inputs, entrywise=self.works[0].needs == "entry")
            faint |= {(self.works[b].name, k) for b in np.flatnonzero(found)}
        return rows, seen


def units(works: Sequence[Work], crowded: bool, bits: int = 16, wide: bool = False) -> list[Unit]:
    """Groups works into units: small tensors of the same kind together in order, others separately.

    Args:
      works: Works of one merge, or of several merges without statistics of the tree.
      crowded: Whether there are many tiny tensors (`is_crowd`).
      bits: The number of bits of a key that one pass over the whole tree finds.
      wide: Whether all computation is in float64; see `Unit`.

    Returns:
      The units.
    """
    alike: dict[Any, list[list[Work]]] = {}
    for place, work in enumerate(works):
        batch = at_a_time(work, crowded)
        # Runs of entries are padded equally for any shape of the tensor.
        shape = None if work.needs == "entry" else work.shape
        inputs = (len(work.models), work.start is None, *[x.dtype for x in work.inputs])
        applied = tuple([step.applies(work.name) for step in work.steps])
        # Everything that a compiled program depends on. Tensors with equal keys share a program.
        key = (batch, shape, work.dtype, inputs, applied, work.size == 0, id(work.merge))
        groups = alike.setdefault(place if batch == 1 else key, [[]])
        if len(groups[-1]) == batch:
            groups.append([])
        groups[-1].append(work)
    return [Unit(x, bits, crowded, wide) for groups in alike.values() for x in groups]


class Tree:
    """The visit (`steps.Visit`) of all pieces of some units.

    Values kept by pieces are a dictionary by (place of the unit, index of the piece), stacked over
    tensors.

    Args:
      units: The units in order.
      visit: A function that calls its argument for each unit with (place, unit, reader), in any
        order, possibly from several threads at once.
      bits: The number of bits of a key that one pass finds.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        visit: Callable[[Callable[[int, Unit, Reader], None]], None],
        bits: int,
    ):
        self.units, self.visit, self.bits = units, visit, bits
        self.tasks = units[0].tasks

    def resolve(self, step: Step) -> None:
        """Finds the statistics of the next step, and stores its kernel in every unit.

        Args:
          step: The step.
        """
        prepared = step.prepare(sum([work.size for unit in self.units for work in unit.works]))
        kernel, own = resolve(step, self, prepared)
        for place, unit in enumerate(self.units):
            unit.known.append(kernel)
            pieces = range(len(unit.runs))
            kept = self.kept_of
            unit.own.append([tuple([kept(argument, place, k) for argument in own]) for k in pieces])

    def kept_of(self, own: Any, place: int, k: int) -> Any:
        """Returns the value that a piece keeps."""
        return own[place, k]

    def fold(self, summary: Kernel, add: Add) -> PyTree:
        """Adds up the contributions of all pieces in order; see `Visit.fold`."""
        return self._visit(summary, add, False)[0]

    def keep(self, summary: Kernel, add: Add) -> tuple[PyTree, PyTree]:
        """Adds up the contributions of all pieces, and keeps a value for each; see `Visit.keep`."""
        return self._visit(summary, add, True)

    def _visit(self, summary: Kernel, add: Add, keep: bool) -> tuple[Any, dict[Any, Any]]:
        sums = InOrder(self.plus(add))
        own: dict[tuple[int, int], PyTree] = {}

        def visit_unit(place: int, unit: Unit, read: Reader) -> None:
            sums.add(place, self.total(place, unit, read, summary, add, keep, own))

        self.visit(visit_unit)
        # Sums are few numbers. They move to the host, where the next digit of a key is chosen.
        return jax.device_get(sums.sum), own

    def plus(self, add: Add) -> Add:
        """Returns the sum of two parts, compiled where this pays."""
        # On a CPU, NumPy adds without compiling or copying.
        return add if jax.default_backend() == "cpu" else functools.partial(_sum, add)

    def total(
        self, place: int, unit: Unit, read: Reader, summary: Kernel, add: Add, keep: bool,
        own: dict[tuple[int, int], PyTree],
    ) -> PyTree:  # fmt: skip
        """Adds up the contributions of a unit's pieces; their kept values go to `own`."""
        total, plus, on_host = None, self.plus(add), jax.default_backend() == "cpu"
        for k in range(len(unit.runs)):
            contribute = functools.partial(_contribution, unit, k, summary, add, keep)
            part, mine = read(k, contribute)
            part = jax.device_get(part) if on_host else part
            # Added immediately, because the histograms of all pieces of a large tensor would fill
            # the memory.
            total = part if total is None else plus(total, part)
            if keep:
                own[place, k] = mine
        return total

    def sample(self, summary: Kernel) -> tuple[np.ndarray, float] | None:
        """Computes `[task, ...]` for a few pieces of the largest length; see `Visit.sample`."""
        chosen = self.sampled()
        if not chosen:
            return None
        drawn = self.drawn(summary, chosen)
        return self.joined([drawn[at] for at in chosen])

    def sampled(self) -> list[tuple[int, int]]:
        """Chooses the pieces of a sample, in order; empty if a sample would be too expensive."""
        full = [
            (place, k)
            for place, unit in enumerate(self.units)
            for k, run in enumerate(unit.runs)
            if run.count == math.prod(run.shape) >= SOME and unit.batch == 1
        ]
        if len(full) < min(2, sum([len(unit.runs) for unit in self.units])):
            return []
        # The first and the last piece, and others at equal distances.
        steps = max(1, min(SAMPLED, len(full)) - 1)
        return sorted({full[i * (len(full) - 1) // steps] for i in range(steps + 1)})

    def drawn(
        self, summary: Kernel, chosen: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], np.ndarray]:
        """Computes the samples of given pieces."""
        found: dict[tuple[int, int], np.ndarray] = {}

        def visit_unit(place: int, unit: Unit, read: Reader) -> None:
            for k in [k for at, k in chosen if at == place]:
                part, _ = read(k, functools.partial(_contribution, unit, k, summary, _first, False))
                found[place, k] = jax.device_get(part)

        self.visit(visit_unit)
        return found

    def joined(self, drawn: Sequence[np.ndarray]) -> tuple[np.ndarray, float]:
        """Joins the samples of pieces, and computes their share of all entries."""
        values = np.concatenate(drawn, axis=1)
        return values, values.shape[1] / sum([w.size for unit in self.units for w in unit.works])

    def before(self, own: PyTree) -> PyTree:
        """Adds up, for each piece, the counts kept by the pieces before it; see `Visit.before`.

        Pieces are in order of (name of the tensor, index of the first entry).
        """
        order = []
        for place, unit in enumerate(self.units):
            for k, run in enumerate(unit.runs):
                order += [(w.name, run.start, (place, k), b) for b, w in enumerate(unit.works)]
        order.sort()
        kept = {key: counting.flatten(jax.device_get(value)) for key, value in own.items()}
        for i, first in enumerate(next(iter(kept.values()))[0]):
            if not isinstance(first, counting.Wide):
                continue
            # NumPy counts in 64 bits, because counts of a model exceed 32 bits.
            sums = {key: counting.integers(leaves[i]) for key, (leaves, _) in kept.items()}
            so_far = np.zeros(first.lo.shape[1:], np.int64)
            for _, _, key, b in order:
                with_this = so_far + sums[key][b]
                sums[key][b], so_far = so_far, with_this
            for key, (leaves, _) in kept.items():
                leaves[i] = counting.wide(sums[key])
        return {key: structure.unflatten(leaves) for key, (leaves, structure) in kept.items()}

    def run(self, function: Kernel, *args: Any) -> PyTree:
        """Calls a kernel, compiled; see `Visit.run`."""
        return _run(function, *args)

    def repeat(self, times: int, body: Callable[[Any, PyTree], PyTree], state: PyTree) -> PyTree:
        """Applies a function to a state repeatedly; see `Visit.repeat`."""
        for i in range(times):
            state = body(i, state)
        return state


def _contribution(
    unit: Unit, k: int, summary: Kernel, add: Add, keep: bool, source: Proposal
) -> tuple[PyTree, PyTree]:
    """Computes the contribution of a piece to a statistic, and the value that it keeps."""
    local = unit.beside(k, source)
    kernels, own, place = unit.arguments(k)
    part, kept = None, ()
    # Sums at scale 1 need one pass over the piece, and nearly always suffice.
    for at_scale_1 in (True, False) if unit.on_host else (False,):
        here = replace(place, at_scale_1=at_scale_1)
        part, kept = parts(add, keep, summary, unit.count, local, kernels, own, here, source)
        if at_scale_1 and settled(jax.device_get(part)):
            break
    return part, kept


class InOrder:
    """Adds parts in the order of their positions, regardless of the order in which they arrive.

    A part is added as soon as all earlier parts have arrived. Keeping the parts of all leaves of a
    large model would fill the memory, because histograms are large.
    """

    def __init__(self, function: Add) -> None:
        self.function, self.lock, self.next = function, threading.Lock(), 0
        self.sum: PyTree = None
        self.early: dict[int, PyTree] = {}

    def add(self, place: int, part: PyTree) -> None:
        """Receives the part of a position; None if it contributes nothing."""
        with self.lock:
            self.early[place] = part
            while self.next in self.early:
                part = self.early.pop(self.next)
                self.next += 1
                if part is not None:
                    self.sum = part if self.sum is None else self.function(self.sum, part)


# --- compiled


_sum = jax.jit(lambda add, a, b: add(a, b), static_argnums=0)
_run = jax.jit(lambda function, *args: function(*args))


def _bound(kernels: Known, own: tuple[tuple[PyTree, ...], ...]) -> Known:
    """Binds the kernels of the first steps to the values that a piece keeps."""
    return tuple(k and k.bind(*more) for k, more in zip(kernels, own, strict=True))


@functools.partial(jax.jit, static_argnames=("add", "keep"))
def parts(
    add: Add, keep: bool, summary: Kernel, count: Array, local: PyTree,
    kernels: Known, own: PyTree, place: Piece, source: Proposal,
) -> tuple[PyTree, PyTree]:  # fmt: skip
    """Computes the total contribution of a batch, and the stacked values that its tensors keep."""

    def contribute(x: Any) -> tuple[PyTree, PyTree]:
        mine, data, place = x
        contribution = summarise(_bound(kernels, mine), summary, data, place)
        return contribution if keep else (contribution, ())

    return _batched(contribute, count, (own, Data(source, local), place), add)


@jax.jit
def _sizes(
    ranked: Kernel, count: Array, local: PyTree,
    kernels: Known, own: PyTree, place: Piece, source: Proposal,
) -> Array:  # fmt: skip
    """Computes the sizes that a step ranks in rows, stacked over the tensors of a batch."""

    def sizes(x: Any) -> tuple[PyTree, Array]:
        mine, data, place = x
        return (), summarise(_bound(kernels, mine), ranked, data, place)

    return _batched(sizes, count, (own, Data(source, local), place), _first)[1]


@functools.partial(jax.jit, static_argnames="measure")
def _outcomes(
    tail: Kernel,
    count: Array,
    local: PyTree,
    kernels: Known,
    own: PyTree,
    place: Piece,
    source: Proposal,
    measure: bool,
) -> tuple[Array, dict[str, Array]]:
    """Merges a piece of each tensor of a batch; `measure` adds sums for a report."""

    def merged(x: Any) -> tuple[PyTree, PyTree]:
        mine, data, place = x
        steps: Any = _bound(kernels, mine)
        *first, last = steps
        vectors: tuple[Array, Array] = through(first, data, place)
        # The barrier makes XLA compute them once, for the result and the measurements.
        delta, weight = lax.optimization_barrier(vectors) if measure else vectors
        change, out = tail(data.source, last(place.beside(data.local[-1]), delta, weight))
        return (), (out, _measured(place, data.source, delta, weight, change) if measure else {})

    return _batched(merged, count, (own, Data(source, local), place), _first)[1]


def _first(a: PyTree, b: PyTree) -> PyTree:
    """Returns the first of two parts, as the sum of empty parts."""
    return a


def _batched(
    body: Callable[[PyTree], tuple[PyTree, PyTree]], count: Array, xs: PyTree, add: Add
) -> tuple[PyTree, PyTree]:
    """Calls `body` for the first `count` entries along the leading axis of `xs`.

    Returns the sum of the first results and a stack of the second results.
    """
    first = jax.tree.map(lambda x: x[0], xs)
    room = len(jax.tree.leaves(xs)[0])
    if room == 1:  # a single tensor needs neither a loop nor a stack
        part, own = body(first)
        return part, jax.tree.map(lambda x: x[None], own)

    def step(i: Array, sofar: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        item = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, False), xs)
        part, own = body(item)
        put = functools.partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
        return add(sofar[0], part), jax.tree.map(put, sofar[1], own)

    body = jax.jit(body)  # traced once, for both shapes and loop
    part, own = jax.eval_shape(body, first)
    total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), part)
    stack = jax.tree.map(lambda x: jnp.zeros((room, *x.shape), x.dtype), own)
    return lax.fori_loop(0, count, step, (total, stack))


def _measured(
    place: Piece, source: Proposal, delta: Array, weight: Array, change: Array
) -> dict[str, Array]:
    """Computes sums over a piece for norms, cosines, conflicts and kept fractions.

    `gram` contains the inner products of the task vectors and (last) the change, divided by their
    units (`arithmetic.Products`). The others count entries. For each model, `moved` counts entries
    that differ from the start, and `kept` counts unmasked entries. `conflicts` counts entries with
    opposite signs in two models, and `changed` counts entries that the merge changes.
    """
    raw, _ = source.vectors()
    inside = place.inside(change.shape)
    inside = True if inside is None else inside
    count = functools.partial(jnp.sum, dtype=jnp.uint32)
    axes = range(1, raw.ndim)
    unit, inner = products(jnp.concatenate([raw, change[None]]))
    return {
        "unit": unit,
        "gram": inner,
        "moved": count(raw != 0, axes),
        "kept": count((delta != 0) & (weight != 0) & inside, axes),
        "conflicts": count((raw > 0).any(0) & (raw < 0).any(0)),
        "changed": count(change != 0),
    }
