"""The loop of a training: it runs the steps, keeps metrics and checkpoints, and prints progress.

Batches are prepared ahead on a thread, and several steps are in flight at once. A training that is
killed goes on from its last checkpoint and ends in the same state.
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

from experiments.lab import progress
from experiments.training.checkpoints import Checkpoints
from experiments.training.rows import Row, Rows
from experiments.training.step import Metrics, State, Step, examples, places, watched
from sail_jax.checks import integer
from sail_jax.cli import processes
from sail_jax.cli.stopping import SIGNALS, importing
from sail_jax.disk import StoreError

AHEAD = 2  # batches prepared, and steps in flight
METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"


class Trained(NamedTuple):
    """What a training ends with, and how it went.

    Attributes:
      state: The final state.
      rows: The metrics, with those from before a resume. The row of step t has the loss and the
        gradient norm of the parameters after t updates. What `evaluate` measured is in rows of its
        own.
      seconds: The wall time from the end of this process's first step, which compiles, to the end
        of the last. Evaluations and checkpoints in between count.
      step_share: The share of that time spent on steps, and not on waiting for input, evaluating or
        storing; NaN if there was no step.
      input_share: The share of it spent on waiting for input; NaN if there was no step.
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
) -> Trained:
    """Trains from a state to a number of steps, or goes on from the checkpoint in `directory`.

    A training that is killed at any time and called again with the same arguments ends in the same
    state and with the same rows. Once the first step is taken, a signal that stops a command
    (SIGINT, SIGTERM, SIGHUP) makes it store the state, if there is a directory, and raise
    `KeyboardInterrupt`. A second one acts as it would without `train`.

    Args:
      step: The step, from `step.make_step`.
      state: The state to begin with, which stays valid. It may be that of a later step.
      batch: The batch of a step, by its number alone. It is called on a thread, `AHEAD` steps
        early.
      steps: The number of steps of the whole training, those before a resume included.
      directory: Where checkpoints and metrics are kept, and found again after a kill. None keeps
        nothing.
      config: A dataclass with all that the training depends on; needed with `directory`.
        Checkpoints of another config are refused.
      save_every: The number of steps between two checkpoints. The final state is stored in any
        case.
      keep: How many checkpoints are kept, at least 1.
      log_every: The number of steps between two rows of metrics. The last step has a row in any
        case.
      evaluate: Measures a state: finite numbers by name. It is called before each step whose number
        `evaluate_every` divides, 0 included, and at the end. None measures nothing.
      evaluate_every: The number of steps between two evaluations.
      place: Puts a batch on the devices; it is called on the same thread.
      say: Prints a line of progress; None for no progress.
      say_every: The least number of seconds between two lines of progress.

    Returns:
      The final state, and how the training went.

    Raises:
      ValueError: If `steps`, `save_every`, `log_every`, `evaluate_every` or `keep` is below 1,
        `directory` is given without `config`, or more than `steps` steps were taken already.
      FloatingPointError: If the loss, the gradient or the state stops being finite. The message
        names the step, and what was first not finite there. It is raised within `log_every` steps,
        and before such a state is stored.
      RefusedError: If `directory` holds another training.
      StoreError: If a checkpoint or the metrics are damaged, or cannot be written.
      KeyboardInterrupt: If a signal stopped the training. The message says how to go on.
    """
    cadence = {"save_every": save_every, "log_every": log_every, "evaluate_every": evaluate_every}
    for name, value in {"steps": steps, **cadence}.items():
        integer(name, value)
    if directory is not None and config is None:
        raise ValueError("directory: a config is needed beside it, to tell trainings apart")
    with contextlib.ExitStack() as stack:
        checkpoints, path = None, None
        if directory is not None:
            folder = Path(directory)
            checkpoints = stack.enter_context(Checkpoints(folder / CHECKPOINTS, config, keep=keep))
            path = folder / METRICS if jax.process_index() == 0 else None
        restored = checkpoints.restore(state) if checkpoints is not None else None
        # The state is copied, since the step takes over the buffers that it is given, and the
        # caller's state shall stay valid.
        state = jax.tree.map(jnp.copy, state) if restored is None else restored
        start = int(state.step)
        if start > steps:
            raise ValueError(f"steps must be at least {start}, which were taken; got {steps}")
        rows = Rows(path, start, kept=restored is not None)
        if restored is not None and say and processes.is_first():
            say(f"  resumed at step {start} of {steps}")
        signals = stack.enter_context(_Signals())
        feed = stack.enter_context(_prefetched(lambda t: place(batch(t)), start, steps))
        clock = _Clock(start, steps, say if processes.is_first() else None, say_every)
        flying: deque[tuple[int, Any, Any]] = deque()
        taken: PyTree = None

        def land() -> None:
            """Waits for the oldest step in flight; adds its row if it is one of `log_every`."""
            t, metrics, fault = flying.popleft()
            jax.block_until_ready(fault)
            if t % log_every == 0 or t == steps - 1:
                checked(fault, metrics)
                row = {"step": t, **{k: float(v) for k, v in jax.device_get(metrics).items()}}
                rows.add(row)
                clock.tell(t, row)

        def land_all() -> None:
            """Waits for all steps in flight."""
            while flying:
                land()

        def checked(fault: jax.Array, metrics: Metrics) -> None:
            """Raises an error if a step, this one or one before, met something not finite."""
            at, which = np.asarray(fault).tolist()
            if at >= 0:
                raise _not_finite(at, places(state, taken, metrics)[which], checkpoints)

        def store() -> None:
            """Stores the state unless it is stored already; raises an error if it is not finite."""
            if checkpoints is None or int(state.step) in checkpoints.steps():
                return
            checked(state.fault, last)
            # A fault is what a step met. Whether its result is finite only the next step would see.
            bad = _first_bad(state)
            if bad is not None:
                raise _not_finite(int(state.step), bad, checkpoints)
            # First the rows: to go on from this state, all rows before it are needed.
            rows.sync()
            checkpoints.save(state)

        def stop_before(t: int) -> NoReturn:
            """Stores the state before step t, and ends the training."""
            land_all()
            store()
            if checkpoints is not None:
                checkpoints.wait()
            raise KeyboardInterrupt(_how(t, steps, directory))

        last: Metrics = {}
        alone = processes.is_alone()
        # Alone, a signal may end the process at once until the first step, which compiles, is done:
        # there is nothing to store yet. Several processes have to agree on where they stop.
        if not alone:
            signals.handle()
        for t in range(start, steps):
            # Several processes must stop at the same step. To agree they wait for one another, so
            # they ask at every `log_every`-th step only.
            if (t % log_every == 0 or alone) and processes.any_of(signals.came):
                stop_before(t)
            if t > start and t % save_every == 0:
                land_all()
                with clock.apart("other"):
                    store()
            if evaluate is not None and t % evaluate_every == 0:
                land_all()
                # One process alone breaks an evaluation off at a signal, as it may be long. Several
                # processes would leave it at different places.
                breaking = signals.raised() if alone else contextlib.nullcontext()
                try:
                    with clock.apart("other"), breaking:
                        measured = evaluate(state)
                except KeyboardInterrupt:
                    if not signals.came:
                        raise
                    stop_before(t)
                rows.add({"step": t, **measured})
            with clock.apart("input"):
                taken = next(feed)
            # The step has donated the old state's buffers: nothing below may look at them.
            state, last, fault = step(state, taken)
            flying.append((t, last, fault))
            if t == start:
                jax.block_until_ready(fault)
                signals.handle()
                clock.start(examples(taken))
            # JAX returns before a step is computed: without a limit the host would run far ahead,
            # and hold a batch for every step in flight.
            while len(flying) > AHEAD:
                land()
        land_all()
        clock.stop()
        bad = _first_bad(state)
        if bad is not None:
            raise _not_finite(steps, bad, checkpoints)
        store()
        if evaluate is not None:
            rows.add({"step": steps, **evaluate(state)})
        rows.sync()
    return Trained(state, rows.rows, clock.wall, *clock.shares())


def _first_bad(state: State) -> str | None:
    """The name of the first leaf of a state that is not finite, if there is one."""
    leaves = watched((), state.params, state.mutable, (), {})
    fine = jax.device_get(_finite([leaf for _, leaf in leaves]))
    return next((name for (name, _), ok in zip(leaves, fine, strict=True) if not ok), None)


@jax.jit
def _finite(leaves: list[jax.Array]) -> list[jax.Array]:
    """Whether all entries are finite, of each leaf."""
    return [jnp.isfinite(leaf).all() for leaf in leaves]


def _not_finite(step: int, place: str, checkpoints: Checkpoints | None) -> FloatingPointError:
    """The error for something not finite, with the last step that is stored."""
    stored = []
    if checkpoints is not None:
        # Of two errors, this one says more than that a checkpoint could not be written.
        with contextlib.suppress(StoreError):
            checkpoints.wait()
        stored = checkpoints.steps()
    where = f"; step {stored[-1]} is stored and finite" if stored else ""
    return FloatingPointError(f"step {step}: {place} is not finite, the first to be so{where}")


def _how(step: int, steps: int, directory: str | Path | None) -> str:
    """The message of an interrupted training."""
    if directory is None:
        return f"stopped before step {step} of {steps}; nothing is stored without a directory"
    return (
        f"stopped before step {step} of {steps}, which {directory} holds: run the same again to "
        "go on from there"
    )


class _Signals:
    """Notes the first signal that stops a command, from `handle` to the end of the `with` block.

    A second signal acts as it did before. Signals that are ignored stay so. In a thread other than
    the main one nothing is handled, since Python sets handlers in the main thread only.
    """

    def __init__(self) -> None:
        self.came = False
        self._raises = False
        self._before: dict[int, Any] = {}

    def handle(self) -> None:
        """Begins to note signals, in the main thread."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if (before := signal.getsignal(number)) != signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Notes the first signal; gives the second to the handler that was there before."""
        if self.came:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
        self.came = True
        if self._raises and not importing(frame):
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Within the block, the first signal raises `KeyboardInterrupt`, unless it comes amid an
        import."""
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
    """Yields an iterator over `make(start)`, `make(start + 1)`, ..., made early on a thread."""
    pool = ThreadPoolExecutor(1, "input")
    ahead: deque[Future[PyTree]] = deque()

    def batches() -> Iterator[PyTree]:
        for t in range(start, stop):
            while len(ahead) <= AHEAD and t + len(ahead) < stop:
                # Batches are functions of their step alone, so it does not matter when they are
                # made.
                ahead.append(pool.submit(make, t + len(ahead)))
            yield ahead.popleft().result()

    try:
        yield batches()
    finally:
        pool.shutdown(cancel_futures=True)


class _Clock:
    """Measures where the wall time goes, from the end of the first step on."""

    def __init__(self, first: int, steps: int, say: Callable[[str], None] | None, every: float):
        self.first, self.steps, self.say, self.every = first, steps, say, every
        self.wall, self.spent = 0.0, {"input": 0.0, "other": 0.0}
        self.examples, self.began, self.told = 0, None, -float("inf")

    def start(self, examples: int) -> None:
        """Starts the clock anew, at the end of the first step."""
        self.began, self.examples = time.perf_counter(), examples
        self.spent = {"input": 0.0, "other": 0.0}

    def stop(self) -> None:
        """Takes the wall time up to now."""
        if self.began is not None:
            self.wall = time.perf_counter() - self.began

    @contextlib.contextmanager
    def apart(self, what: Literal["input", "other"]) -> Iterator[None]:
        """Counts the time of the block as no step's: waiting for input, evaluating or storing."""
        start = time.perf_counter()
        yield
        self.spent[what] += time.perf_counter() - start

    def shares(self) -> tuple[float, float]:
        """The shares of the wall time that went to steps and to waiting for input."""
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
