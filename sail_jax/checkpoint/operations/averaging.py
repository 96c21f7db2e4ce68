"""Averages the checkpoints of a training run, and writes a run or only the parameters."""

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from sail_jax.checkpoint.executor import limits
from sail_jax.checkpoint.formats import rewritten, runs
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.formats.orbax_folders import numbered
from sail_jax.checkpoint.formats.runs import Step
from sail_jax.checkpoint.formats.table import layouts, needs, of_output
from sail_jax.checkpoint.operations.results import Result
from sail_jax.checkpoint.operations.running import (
    DEFAULTS,
    Inputs,
    Path_,
    Ready,
    Request,
    RunOptions,
    carried_out,
    notes_on_format,
)
from sail_jax.checkpoint.sources.averaged import Averaged, Zeros
from sail_jax.checkpoint.sources.chosen import Chosen
from sail_jax.checks import argument, one_of
from sail_jax.merging.integers import is_complex
from sail_jax.merging.selection import averaged_statistics, of_optimiser
from sail_jax.merging.tensors import Tensor
from sail_jax.merging.work import Work, copy
from sail_jax.trajectory import shapes
from sail_jax.trajectory.shapes import At, Shape

State = Literal["last", "zero", "drop", "average-moments"]
"""The treatment of the optimiser's state; see `average_checkpoints`."""
WriteAs = Literal["run", "params", "safetensors"]
"""The form of the output; see `average_checkpoints`."""
Gets = Literal["average", "average of moments", "zero", "same in all", "last", "left out"]
"""The value of an output tensor: the average, 0, or the newest checkpoint's value. "same in all"
also requires equal values in all checkpoints."""


@dataclass(frozen=True, kw_only=True, repr=False)
class AveragedRun(Result):
    """The result of `average_checkpoints`.

    Attributes:
      steps: The checkpoints that were averaged, oldest first.
      weights: The weight of each.
      gets: The treatment of each tensor of the newest checkpoint, by name.
    """

    steps: tuple[Step, ...]
    weights: np.ndarray
    gets: Mapping[str, Gets]


@dataclass(frozen=True, kw_only=True)
class Averaging(Ready[AveragedRun]):
    """An average before its execution.

    Attributes:
      steps: The checkpoints, oldest first, as `inputs`.
      weights: The weight c of each.
      decay: The factor d of the update before each.
      gets: The treatment of each tensor of the newest checkpoint, by name.
      selection: How the averaged tensors were chosen, in words.
      write_as: The form of the output.
    """

    steps: tuple[Step, ...]
    weights: np.ndarray
    decay: np.ndarray
    gets: Mapping[str, Gets]
    selection: str
    write_as: WriteAs

    @property
    def tensors(self) -> int:
        """The number of tensors of the output."""
        return sum(gets != "left out" for gets in self.gets.values())

    def completed(self) -> "Averaging":
        if self.write_as == "run" and self.run.format is not None:
            raise CheckpointError(
                f"{argument('format')}: a run keeps its own, got {self.run.format!r}; "
                f"{argument('write_as')} 'params' writes other formats"
            )
        return self

    def about(self) -> str:
        """Describes the average: steps with their weights, and the treatment of tensors.

        Returns:
          Several lines.
        """
        numbers = [step.number for step in self.steps]
        paths = [step.path for step in self.steps]
        alike = len({path.name for path in paths}) < len(paths)
        names = [
            str((path if alike else path.name) if number is None else number)
            for path, number in zip(paths, numbers, strict=True)
        ]
        width = max(4, *map(len, names))
        lines = [f"{'step':>{width}}  {'c':>9}  {'d':>9}"]
        for name, c, d in zip(names, self.weights, self.decay, strict=True):
            lines.append(f"{name:>{width}}  {c:9.6f}  {d:9.6f}")
        age = shapes.mean_age(self.weights)
        line = f"n_eff {shapes.effective_number(self.weights):.2f}, mean age {age:.2f} checkpoints"
        if None not in numbers:
            t = np.array(numbers, float)
            line += f", {float(self.weights @ (t[-1] - t)):.0f} steps"
        lines += [line, self.selection]
        for gets, names in self.groups().items():
            shown = ", ".join(names[:4]) + f" and {len(names) - 4} more" * (len(names) > 4)
            what = "as in the newest checkpoint" if gets == "last" else gets
            count = sum(g == gets for g in self.gets.values())
            lines.append(f"{what}: {count} tensors in {shown}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def groups(self) -> dict[Gets, list[str]]:
        """Groups the branches of the tree by the treatment of their tensors.

        Returns:
          The first keys of paths, in the order of the checkpoint.
        """
        found: dict[Gets, list[str]] = {}
        for gets in get_args(Gets):
            branches = Counter(_branch(n) for n, g in self.gets.items() if g == gets)
            if branches:
                found[gets] = list(branches)
        return found


@dataclass(frozen=True)
class AverageRequest(Request[Averaging]):
    """The arguments of `average_checkpoints`."""

    checkpoints: Path_ | Sequence[Path_]
    out: Path_ | None = None
    window: int | None = None
    shape: Shape = "uniform"
    decay: float | None = None
    weights: Sequence[float] | None = None
    at: At = "points"
    state: State | None = None
    write_as: WriteAs | None = None

    def plan(self, inputs: Inputs) -> Averaging:
        """Plans the average from the headers of the checkpoints."""
        out = beside(self.checkpoints) if self.out is None else Path(self.out)
        steps = _within(_named(self.checkpoints), self.window)
        c = _weights(steps, self.shape, self.decay, self.weights, self.at)
        *_, newest = opened = [inputs(step.path) for step in steps]
        selected = newest.selection
        assert selected is not None
        for checkpoint in opened:
            # Tensors outside the selection may be averaged, too, for example moments.
            checkpoint.select("*")
        write_as = _form(newest, self.write_as, out)
        state = _state(self.state, write_as)
        gets = _treated(newest, selected.chosen, state, write_as, c)
        works = _works(opened, gets, c, write_as, inputs.run)
        mark = repr(
            [c.tolist(), [str(step.path) for step in steps], write_as, sorted(gets.items())]
        )
        run, notes = inputs.run, tuple(_notes(opened, gets, write_as))
        if write_as == "run":
            held = rewritten.needs([newest.tensors[work.name] for work in works])
        else:
            run = replace(run, format=_written(write_as, newest, out, run))
            held, notes = needs(run.format), notes + notes_on_format(works, out, run)
        bounds = limits(works, run.max_memory, run.threads, output=held)
        ready = Averaging(
            steps=steps, weights=c, decay=shapes.decay_of(c), gets=gets, selection=str(selected),
            out=out, write_as=write_as, run=run, works=works, limits=bounds, fingerprint=mark,
            inputs=tuple(opened), notes=notes, view=newest, divisible=True,
            rewrites=newest if write_as == "run" else None,
            make=functools.partial(AveragedRun, steps=steps, weights=c, gets=gets),
        )  # fmt: skip
        if inputs.writes:
            inputs.admit(out, [checkpoint.path for checkpoint in opened])
            _admit(ready, out, newest)
        return ready


def average_checkpoints(
    checkpoints: Path_ | Sequence[Path_],
    out: Path_ | None = None,
    *,
    window: int | None = None,
    shape: Shape = "uniform",
    decay: float | None = None,
    weights: Sequence[float] | None = None,
    at: At = "points",
    state: State | None = None,
    write_as: WriteAs | None = None,
    run: RunOptions = DEFAULTS,
    before: Callable[[Averaging], None] | None = None,
) -> AveragedRun:
    """Averages the checkpoints of one training run on disk, tensor by tensor.

    One checkpoint is read at a time, block by block, so memory does not grow with their number.

    Args:
      checkpoints: A run or some of its steps, such as "run@last:10" or "run@1000:5000:500"; a
        pattern, such as "run/checkpoint-*"; or a list of these. If their steps are known, the
        checkpoints are sorted by step; otherwise the list must start with the oldest.
      out: The path of the output, which may not be a step of the run itself. By default it lies
        next to the run: "run-average" for "run".
      window: The number of last steps to average.
      shape: The shape of the weights; see `trajectory.weights`.
      decay: The factor of "ema", between 0 and 1.
      weights: One for each checkpoint, oldest first, instead of a shape. They are divided by their
        sum.
      at: The convention of weights at uneven steps; see `trajectory.weights_at`.
      state: The treatment of the optimiser's state. "last" (the default for a run): it comes from
        the newest checkpoint. "zero": all of it is 0, counts and schedules as well, as before the
        first step. "average-moments": its floating tensors are averaged with the same weights,
        which may not be negative; counts come from the newest. "drop" (the default for parameters):
        it is left out.
      write_as: The form of the output. "run": a run with one step, a copy of the newest step in
        which only the averaged tensors differ, so a trainer can restore it (the default for orbax).
        "params": only the averaged tensors, in the format of the input or of `run`. "safetensors":
        the same in that format.
      run: Options of the run. `run.select` contains patterns of the tensors that are averaged, such
        as "params". The default is the weights of a known training state, or else all tensors.
        Integers and bools come from the newest checkpoint. Complex numbers are copied, and must be
        equal in all checkpoints.
      before: Called when everything except the values is known, before any tensor is read.
        Without it, notes are warnings.

    Returns:
      The result.

    Raises:
      ValueError: CheckpointError for checkpoints that cannot be read or do not fit each other, and
        for an output that cannot be written; MergeError for insufficient memory; and for invalid
        arguments.

    >>> import numpy as np, tempfile
    >>> from sail_jax.checkpoint import load_checkpoint, save_checkpoint
    >>> folder = tempfile.mkdtemp()
    >>> for step, value in ((100, 0.0), (200, 3.0), (300, 6.0)):
    ...     save_checkpoint(f"{folder}/run/checkpoint-{step}", {"w": np.full(2, value, np.float32)})
    >>> done = average_checkpoints(f"{folder}/run@last:2")
    >>> done.out.name, load_checkpoint(done.out)["w"]
    ('run-average', array([4.5, 4.5], dtype=float32))
    """

    def planned(ready: Averaging) -> None:
        if before is not None:
            return before(ready)
        for note in ready.notes:
            warnings.warn(note, stacklevel=4)

    request = AverageRequest(checkpoints, out, window, shape, decay, weights, at, state, write_as)
    return carried_out(request, run, planned)


def beside(checkpoints: Path_ | Sequence[Path_]) -> Path:
    """Returns the default path of an output.

    Args:
      checkpoints: See `average_checkpoints`.

    Returns:
      The run's folder with "-average" at the end of its name.

    >>> beside("runs/gpt@last:10").as_posix(), beside("gpt/checkpoint-*").as_posix()
    ('runs/gpt-average', 'gpt-average')
    """
    first = checkpoints if isinstance(checkpoints, str | PathLike) else checkpoints[0]
    path = Path(runs.split(first)[0])
    if runs.several(path) or path.is_file():
        path = path.parent
    path = path if path.name else path.resolve()
    return path.with_name(f"{path.name}-average")


def _named(checkpoints: Path_ | Sequence[Path_]) -> tuple[Step, ...]:
    """Returns the chosen checkpoints, oldest first."""
    one = isinstance(checkpoints, str | PathLike)
    given = [checkpoints] if one else list(checkpoints)
    if not given:
        raise CheckpointError("checkpoints: expected at least one, got none")
    found = [step for text in given for step in runs.named(text)]
    numbers = [step.number for step in found]
    if len(set(numbers)) < len(numbers) or None in numbers:
        # Such numbers are not steps of one run, so the order of the list is used.
        return tuple(Step(None, step.path) for step in found)
    return tuple(sorted(found))


def _within(steps: tuple[Step, ...], window: int | None) -> tuple[Step, ...]:
    """Returns the checkpoints of the last steps."""
    if window is None:
        return steps
    if window < 1:
        raise CheckpointError(f"{argument('window')}: expected a number of steps, got {window}")
    numbers = [step.number for step in steps if step.number is not None]
    if len(numbers) < len(steps):
        raise CheckpointError(f"{argument('window')} needs steps, but these names have no numbers")
    return tuple(s for s, n in zip(steps, numbers, strict=True) if n > numbers[-1] - window)


def _weights(
    steps: Sequence[Step],
    shape: Shape,
    decay: float | None,
    weights: Sequence[float] | None,
    at: At,
) -> np.ndarray:
    """Returns the weight of each checkpoint."""
    if weights is None:
        numbers = [step.number for step in steps if step.number is not None]
        # Without steps in the names, the distances are assumed to be equal.
        even = numbers if len(numbers) == len(steps) else range(len(steps))
        return shapes.weights_at(list(even), shape, at, decay=decay)
    if shape != "uniform" or decay is not None:
        raise CheckpointError(f"{argument('weights')} and {argument('shape')}: expected only one")
    c = np.asarray(weights, float)
    if c.shape != (len(steps),) or not np.isfinite(c).all():
        raise CheckpointError(
            f"{argument('weights')}: expected {len(steps)} finite numbers, one for each "
            f"checkpoint, got {list(weights)}"
        )
    if abs(c.sum()) <= 1e-9 * np.abs(c).sum():
        raise CheckpointError(f"{argument('weights')}: expected a sum other than 0")
    return c / c.sum()


def _form(newest: Checkpoint, write_as: WriteAs | None, out: Path) -> WriteAs:
    """Returns the form of the output; for a trainer's trees the default is a run."""
    if write_as is None:
        whole = newest.format in ("orbax", "levanter") and of_output(out) is None
        return "run" if whole else "params"
    one_of(argument("write_as"), write_as, WriteAs, CheckpointError)
    return write_as


def _state(state: State | None, write_as: WriteAs) -> State:
    """Returns the treatment of the optimiser's state."""
    if state is None:
        return "last" if write_as == "run" else "drop"
    one_of(argument("state"), state, State, CheckpointError)
    if write_as == "run" and state == "drop":
        raise CheckpointError(
            f"{argument('state')}: a trainer cannot restore a run without its state, got 'drop'; "
            f"{argument('write_as')} 'params' writes the parameters alone"
        )
    if write_as != "run" and state != "drop":
        raise CheckpointError(
            f"{argument('state')}: parameters are written without a state, got {state!r}"
        )
    return state


def _treated(
    newest: Checkpoint, chosen: Sequence[str], state: State, write_as: WriteAs, c: np.ndarray
) -> dict[str, Gets]:
    """Returns the treatment of each tensor, given the selected ones."""
    moments = of_optimiser(newest.tensors)
    if state in ("zero", "average-moments") and not moments:
        raise CheckpointError(
            f"{argument('state')}: {newest.path} lacks an optimiser's state in this item"
        )
    if state == "average-moments" and (c < 0).any():
        raise CheckpointError(
            f"{argument('state')}: a second moment may not be negative, but a weight is negative"
        )
    weights = set(chosen)
    gets: dict[str, Gets] = {}
    for name, tensor in newest.tensors.items():
        floating = _floating(tensor)
        copied: Gets = "same in all" if is_complex(tensor.dtype) else "last"
        if name in weights:
            gets[name] = "average" if floating else copied
        elif write_as != "run":
            gets[name] = "left out"
        elif name in moments and state == "zero":
            gets[name] = "zero"
        elif name in moments and state == "average-moments":
            gets[name] = "average of moments" if floating else copied
        else:
            gets[name] = "last"
    if not any(g == "average" for g in gets.values()):
        raise CheckpointError(f"{newest.path}: no floating tensor is selected")
    return gets


def _works(
    inputs: Sequence[Checkpoint],
    gets: Mapping[str, Gets],
    c: np.ndarray,
    write_as: WriteAs,
    run: RunOptions,
) -> tuple[Work, ...]:
    """Returns the works: every tensor that is written; for a run, only tensors that change."""
    works = []
    for name, what in gets.items():
        last = inputs[-1].tensors[name]
        if what.startswith("average"):
            tensor: Tensor = Averaged(_each(inputs, name), c.tolist(), run.allow_nonfinite)
        elif what == "zero":
            tensor = Zeros(name, last.dtype, last.shape, last.source)
        elif what == "same in all":
            tensor = Chosen(_each(inputs, name), "refuse")
        elif what == "last" and write_as != "run":
            tensor = last
        else:
            continue
        works.append(copy(name, last.dtype, tensor))
    return tuple(works)


def _notes(
    inputs: Sequence[Checkpoint], gets: Mapping[str, Gets], write_as: WriteAs
) -> Iterator[str]:
    """Returns notes on tensors that occur only in older checkpoints, and on running statistics."""
    newest = inputs[-1]
    for checkpoint in inputs:
        yield from (f"{checkpoint.path}: {text}" for text in checkpoint.unread())
    for checkpoint in inputs[:-1]:
        more = [name for name in checkpoint.tensors if name not in newest.tensors]
        if write_as != "run":
            moments = of_optimiser(checkpoint.tensors)
            more = [name for name in more if name not in moments]
        if more:
            others = f" and {len(more) - 1} more" if len(more) > 1 else ""
            yield (
                f"{checkpoint.path} has {more[0]!r}{others}, which {newest.path} lacks: left out"
            )
    yield from averaged_statistics(n for n, what in gets.items() if what == "average")


def _each(inputs: Sequence[Checkpoint], name: str) -> list[Tensor]:
    """Returns a tensor of every checkpoint; raises a CheckpointError if one is missing."""
    last = inputs[-1].tensors[name]
    for checkpoint in inputs:
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{checkpoint.path} lacks '{name}' of {inputs[-1].path}")
        alike = _floating(tensor) if _floating(last) else tensor.dtype == last.dtype
        if tensor.shape != last.shape or not alike:
            raise CheckpointError(
                f"'{name}' is {tensor.dtype}{list(tensor.shape)} in {checkpoint.path}, but "
                f"{last.dtype}{list(last.shape)} in {inputs[-1].path}"
            )
    return [checkpoint.tensors[name] for checkpoint in inputs]


def _floating(tensor: Tensor) -> bool:
    return tensor.dtype.name.startswith(("float", "bfloat"))


def _branch(name: str) -> str:
    """Returns the first keys of a path, by which tensors are grouped."""
    keys = name.split("/")
    return "/".join(keys[: min(2, max(1, len(keys) - 1))])


def _admit(ready: Averaging, out: Path, newest: Checkpoint) -> None:
    """Refuses an output that would become a step of the run itself, or has another form."""
    homes = {step.path.resolve().parent for step in ready.steps if step.path.is_dir()}
    if out.resolve().parent in homes and numbered(out.name):
        raise CheckpointError(
            f"{out} would become a step of the run: choose a place next to the run, such as "
            f"{beside(ready.steps[-1].path.parent)}"
        )
    if ready.write_as == "run" and of_output(out) and newest.path.is_dir():
        raise CheckpointError(f"{out}: a run is a folder, not a {out.suffix} file")


def _written(write_as: WriteAs, newest: Checkpoint, out: Path, run: RunOptions) -> str | None:
    """Returns the format of parameters alone; None if the suffix of the output determines it."""
    if write_as == "safetensors":
        return write_as
    if run.format or of_output(out):
        return run.format
    return newest.format if newest.format in layouts() else None
