"""The loop of a training: it runs the steps, keeps metrics and checkpoints, and prints progress.

A thread prepares batches ahead, and several steps are in flight at once. A killed training
continues from its last checkpoint and ends in the same state.
"""

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from experiments.lab import callbacks, processes, progress
from experiments.lab.callbacks import METRICS, Callback, JsonLines, Row
from experiments.training.checkpoints import Checkpoints
from experiments.training.sharding import gathered
from experiments.training.step import Metrics, State, Step, examples, places, watched
from sail_jax.checks import integer
from sail_jax.cli.stopping import SIGNALS, importing
from sail_jax.disk import StoreError

AHEAD = 2  # batches prepared, and steps in flight
CHECKPOINTS = "checkpoints"


class Trained(NamedTuple):
    """The result and the record of a training.

    Attributes:
      state: The final state.
      rows: The metrics, including those from before a resume. The row of step t has the loss and
        the gradient norm of the parameters after t updates. Results of `evaluate` are in separate
        rows.
      seconds: The wall time from the end of this process's first step, which compiles, to the end
        of the last. Evaluations and checkpoints in between count.
      step_share: The fraction of that time spent on steps, not on waiting for input, evaluating or
        storing; NaN without steps.
      input_share: The fraction of that time spent on waiting for input; NaN without steps.
    """

    state: State
    rows: list[Row]
    seconds: float
    step_share: float
    input_share: float


def train(
    step: Step,
    state: State,
    batch: Callable[[int], PyTree],
    steps: int,
    *,
    directory: str | Path | None = None,
    config: Any = None,
    save_every: int = 1000,
    keep: int = 2,
    log_every: int = 10,
    evaluate: Callable[[State], dict[str, float]] | None = None,
    evaluate_every: int = 100,
    place: Callable[[PyTree], PyTree] = jax.device_put,
    say: Callable[[str], None] | None = progress.say,
    say_every: float = 10.0,
    callback: Callback | None = None,
) -> Trained:
    """Trains from a state to a number of steps, or continues from the checkpoint in `directory`.

    A killed training that is called again with the same arguments ends in the same state and with
    the same rows. After the first step, a signal that stops a command (SIGINT, SIGTERM, SIGHUP)
    makes the training store its state, if there is a directory, and raise `KeyboardInterrupt`. A
    second signal has its usual effect.

    Args:
      step: The step, from `step.make_step`.
      state: The initial state, which stays valid. It may be the state of a later step.
      batch: The batch of a step, as a function of the step's number only. A thread calls it `AHEAD`
        steps early.
      steps: The number of steps of the whole training, including those before a resume.
      directory: The directory for checkpoints and metrics, which are found again after a kill. None
        stores nothing.
      config: A dataclass with everything that affects the training; required with `directory`.
        Checkpoints of a different config are rejected.
      save_every: The number of steps between two checkpoints. The final state is always stored.
      keep: The number of checkpoints that are kept, at least 1.
      log_every: The number of steps between two rows of metrics. The last step always has a row.
      evaluate: Measures a state: finite numbers by name. It is called before each step with a
        number that `evaluate_every` divides, including 0, and at the end. None measures nothing.
      evaluate_every: The number of steps between two evaluations.
      place: Puts a batch on the devices. The same thread calls it.
      say: Prints a line of progress; None prints nothing.
      say_every: The smallest number of seconds between two lines of progress.
      callback: Called with the step and the numbers of each row, after the row is written. None for
        the callback with which the study runs, if any.

    Returns:
      The final state and the record of the training.

    Raises:
      ValueError: If `steps`, `save_every`, `log_every`, `evaluate_every` or `keep` is below 1,
        `directory` is given without `config`, or more than `steps` steps were taken already.
      FloatingPointError: If the loss, the gradient or the state is not finite. The message contains
        the step, and the first array that was not finite. It is raised within `log_every` steps,
        and before such a state is stored.
      RefusedError: If `directory` contains a different training.
      StoreError: If a checkpoint or the metrics are damaged, or cannot be written.
      TypeError: If `callback` is not a function of a step and its numbers.
      CallbackError: If `callback` raised an exception. The state is stored before, if there is a
        directory. With several processes, the training ends first.
      KeyboardInterrupt: If a signal stopped the training. The message explains how to continue.
    """
    cadence = {"save_every": save_every, "log_every": log_every, "evaluate_every": evaluate_every}
    for name, value in {"steps": steps, **cadence}.items():
        integer(name, value)
    if directory is not None and config is None:
        raise ValueError("directory: also give config, which identifies the training")
    with contextlib.ExitStack() as stack:
        checkpoints, path = None, None
        if directory is not None:
            folder = Path(directory)
            checkpoints = stack.enter_context(Checkpoints(folder / CHECKPOINTS, config, keep=keep))
            path = folder / METRICS if jax.process_index() == 0 else None
        restored = checkpoints.restore(state) if checkpoints is not None else None
        # The state is copied, because the step takes over its buffers and the caller's state must
        # stay valid.
        state = jax.tree.map(jnp.copy, state) if restored is None else restored
        start = int(state.step)
        if start > steps:
            raise ValueError(f"steps must be at least the {start} steps already taken; got {steps}")
        rows = JsonLines(path, start, kept=restored is not None)
        report = callbacks.training(rows, callback, directory)
        if restored is not None and say and processes.is_first():
            say(f"  resumed at step {start} of {steps}")
        signals = stack.enter_context(_Signals())
        feed = stack.enter_context(_prefetched(lambda t: place(batch(t)), start, steps))
        clock = _Clock(start, steps, say if processes.is_first() else None, say_every)
        flying: deque[tuple[int, Any, Any]] = deque()
        taken: PyTree = None

        def land() -> None:
            """Waits for the oldest step in flight, and adds its row if `log_every` divides its
            number."""
            t, metrics, fault = flying.popleft()
            jax.block_until_ready(fault)
            if t % log_every == 0 or t == steps - 1:
                checked(fault, metrics)
                row = _scalars(metrics)
                report(t, row)
                clock.tell(t, row)

        def land_all() -> None:
            """Waits for all steps in flight."""
            while flying:
                land()

        def checked(fault: jax.Array, metrics: Metrics) -> None:
            """Raises an error if this step or an earlier one met a value that is not finite."""
            at, which = np.asarray(fault).tolist()
            if at >= 0:
                raise _not_finite(at, places(state, taken, metrics)[which], checkpoints)

        def store() -> None:
            """Stores the state unless it is stored already. Raises if the state is not finite."""
            if checkpoints is None or int(state.step) in checkpoints.steps():
                return
            checked(state.fault, last)
            # A fault is a value that a step met. Only the next step would check this step's result.
            bad = _first_bad(state)
            if bad is not None:
                raise _not_finite(int(state.step), bad, checkpoints)
            # Rows come first, because continuing from this state needs all earlier rows.
            rows.sync()
            checkpoints.save(state)

        def stop_before(t: int) -> NoReturn:
            """Stores the state before step t and ends the training."""
            land_all()
            store()
            if checkpoints is not None:
                checkpoints.wait()
            how = _how(t, steps, directory)
            report.check(how)
            raise KeyboardInterrupt(how)

        last: Metrics = {}
        alone = processes.is_alone()
        # A single process may end at once until the first step, which compiles, is done: there is
        # nothing to store yet. Several processes must stop at the same step: JAX handles SIGTERM.
        for t in range(start, steps):
            if (alone and report.error) or signals.came or processes.preempted(t - start + 1):
                stop_before(t)
            if t > start and t % save_every == 0:
                land_all()
                with clock.apart("other"):
                    store()
            if evaluate is not None and t % evaluate_every == 0:
                land_all()
                # A single process interrupts an evaluation at a signal, because evaluations may be
                # long. Several processes would leave it at different points.
                breaking = signals.raised() if alone else contextlib.nullcontext()
                try:
                    with clock.apart("other"), breaking:
                        measured = evaluate(state)
                except KeyboardInterrupt:
                    if not signals.came:
                        raise
                    stop_before(t)
                report(t, measured)
            with clock.apart("input"):
                taken = next(feed)
            # The step has donated the old state's buffers: the code below must not read them.
            state, last, fault = step(state, taken)
            flying.append((t, last, fault))
            if t == start:
                jax.block_until_ready(fault)
                if alone:
                    signals.handle()
                clock.start(examples(taken))
            # JAX returns before a step is computed. Without a limit, the host would run far ahead,
            # and keep a batch for every step in flight.
            while len(flying) > AHEAD:
                land()
        land_all()
        clock.stop()
        bad = _first_bad(state)
        if bad is not None:
            raise _not_finite(steps, bad, checkpoints)
        store()
        if evaluate is not None:
            report(steps, evaluate(state))
        rows.sync()
        report.check()
    return Trained(state, rows.rows, clock.wall, *clock.shares())


def _scalars(metrics: Metrics) -> dict[str, float]:
    """Returns the entries of metrics by name. A vector's are "0/name", "1/name", ..."""
    return {
        "/".join([*map(str, place), name]): float(x)
        for name, values in gathered(metrics).items()
        for place, x in np.ndenumerate(values)
    }


def _first_bad(state: State) -> str | None:
    """Returns the name of the first leaf of a state that is not finite, or None."""
    leaves = watched((), state.params, state.mutable, (), {})
    fine = jax.device_get(_finite([leaf for _, leaf in leaves]))
    return next((name for (name, _), ok in zip(leaves, fine, strict=True) if not ok), None)


@jax.jit
def _finite(leaves: list[jax.Array]) -> list[jax.Array]:
    """Returns for each leaf whether all its entries are finite."""
    return [jnp.isfinite(leaf).all() for leaf in leaves]


def _not_finite(step: int, place: str, checkpoints: Checkpoints | None) -> FloatingPointError:
    """Builds the error for a value that is not finite, with the last stored step."""
    stored = []
    if checkpoints is not None:
        # Of two errors, this one is more useful than a failed write of a checkpoint.
        with contextlib.suppress(StoreError):
            checkpoints.wait()
        stored = checkpoints.steps()
    where = f"; step {stored[-1]} is stored and finite" if stored else ""
    return FloatingPointError(f"step {step}: {place} is not finite (the first such array){where}")


def _how(step: int, steps: int, directory: str | Path | None) -> str:
    """Builds the message of an interrupted training."""
    if directory is None:
        return f"stopped before step {step} of {steps}; nothing is stored without a directory"
    return (
        f"stopped before step {step} of {steps}, which {directory} holds: run the same command "
        "again to continue"
    )


class _Signals:
    """Records the first signal that stops a command, from `handle` to the end of the `with` block.

    A second signal has its usual effect. Ignored signals remain ignored. Outside the main thread,
    nothing is handled, because Python sets handlers only in the main thread.
    """

    def __init__(self) -> None:
        self.came = False
        self._raises = False
        self._before: dict[int, Any] = {}

    def handle(self) -> None:
        """Begins to record signals, in the main thread."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if (before := signal.getsignal(number)) != signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Records the first signal. Passes the second to the previous handler."""
        if self.came:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
        self.came = True
        if self._raises and not importing(frame):
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Raises `KeyboardInterrupt` at the block's first signal, except during an import."""
        self._raises = True
        try:
            if self.came:
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)


@contextlib.contextmanager
def _prefetched(make: Callable[[int], PyTree], start: int, stop: int) -> Iterator[Iterator[PyTree]]:
    """Yields an iterator over `make(start)`, `make(start + 1)`, ..., prepared early by a thread."""
    pool = ThreadPoolExecutor(1, "input")
    ahead: deque[Future[PyTree]] = deque()

    def batches() -> Iterator[PyTree]:
        for t in range(start, stop):
            while len(ahead) <= AHEAD and t + len(ahead) < stop:
                # A batch depends only on its step, so the time of its making does not matter.
                ahead.append(pool.submit(make, t + len(ahead)))
            yield ahead.popleft().result()

    try:
        yield batches()
    finally:
        pool.shutdown(cancel_futures=True)


class _Clock:
    """Measures how the wall time is spent, from the end of the first step."""

    def __init__(self, first: int, steps: int, say: Callable[[str], None] | None, every: float):
        self.first, self.steps, self.say, self.every = first, steps, say, every
        self.wall, self.spent = 0.0, {"input": 0.0, "other": 0.0}
        self.examples, self.began, self.told = 0, None, -float("inf")

    def start(self, examples: int) -> None:
        """Restarts the clock, at the end of the first step."""
        self.began, self.examples = time.perf_counter(), examples
        self.spent = {"input": 0.0, "other": 0.0}

    def stop(self) -> None:
        """Stops the wall time."""
        if self.began is not None:
            self.wall = time.perf_counter() - self.began

    @contextlib.contextmanager
    def apart(self, what: Literal["input", "other"]) -> Iterator[None]:
        """Measures time that is not spent on steps: waiting for input, evaluating or storing."""
        start = time.perf_counter()
        yield
        self.spent[what] += time.perf_counter() - start

    def shares(self) -> tuple[float, float]:
        """Returns the fractions of the wall time spent on steps and on waiting for input."""
        if not self.wall:
            return float("nan"), float("nan")
        return 1 - sum(self.spent.values()) / self.wall, self.spent["input"] / self.wall

    def tell(self, t: int, row: Row) -> None:
        """Prints a line of progress if the last one is old enough, or this step is the last."""
        self.stop()
        now, done = time.perf_counter(), t - self.first
        if not self.say or (now - self.told < self.every and t < self.steps - 1):
            return
        self.told = now
        line = f"  step {t + 1}/{self.steps}  loss {row['loss']:.4g}"
        if done and self.wall:
            rate = done / self.wall
            left = round((self.steps - t - 1) / rate)
            line += (
                f"  {rate:.3g} steps/s  {rate * self.examples:.3g} examples/s"
                f"  {left // 60}:{left % 60:02d} left  waiting for input {self.shares()[1]:.0%}"
            )
        self.say(line)
