"""Several processes that run one command together: which of them writes, and when others go on.

The processes of a study compute the same. What only one may do, such as writing a file, the first
process does while the others wait. Processes that merge each make a part of the output, and the
first joins the parts. The folder that is written must be one that all of them see. Processes end
together: when one is told to stop, all are, and when one is gone, the others say so and end.
"""

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from sail_jax.cli import relay
from sail_jax.cli.stopping import before_leaving
from sail_jax.disk import StoreError

T = TypeVar("T")
AUTO = "auto"
# Under this key the processes learn where to hear of each other.
KEY = "sail-jax/relay"
LOST = "another of the processes has ended, and this one ends with it"


def join(how: str) -> None:
    """Connects this process with the others that run the same command.

    Call it before JAX computes anything. It is not needed where there is one process.

    Args:
      how: "auto" where SLURM, a TPU pod, Kubernetes or Open MPI tells each process its place. Else
        "HOST:PORT,COUNT,RANK": the address of the process of rank 0, the number of processes, and
        the rank of this one, from 0.

    Raises:
      ValueError: If `how` is neither, the rank is not below the count, or "auto" finds nothing that
        tells this process its place.
    """
    import jax

    if how == AUTO:
        try:
            _linked(jax.distributed.initialize)
        except ValueError as exc:
            why = "nothing here tells this process which of several it is"
            raise ValueError(f"--processes: {why}; give HOST:PORT,COUNT,RANK") from exc
        return
    address, *numbers = how.split(",")
    if len(numbers) != 2 or ":" not in address or not all(n.isdecimal() for n in numbers):
        raise ValueError(f"--processes: expected auto or HOST:PORT,COUNT,RANK; got '{how}'")
    count, rank = map(int, numbers)
    if not rank < count:
        raise ValueError(f"--processes: the rank must be below the count; got {rank} of {count}")
    _linked(partial(jax.distributed.initialize, address, count, rank))


def _linked(initialize: Callable[[], None]) -> None:
    """Connects the processes. From then on all end when one of them is stopped or lost."""
    import jax
    from jax._src import distributed as of_jax

    distributed: Any = of_jax
    # It would take SIGTERM away from the handler that stops a command.
    jax.config.update("jax_enable_preemption_service", False)
    real = distributed._jax.get_distributed_runtime_service
    distributed._jax.get_distributed_runtime_service = _Service
    try:
        initialize()
    finally:
        distributed._jax.get_distributed_runtime_service = real
    state = distributed.global_state
    if isinstance(state.service, _Service):
        state.client.key_value_set(KEY, str(state.service.port))
    port = int(state.client.blocking_key_value_get(KEY, 60_000))
    host = state.coordinator_address.rsplit(":", 1)[0].strip("[]")
    try:
        link = socket.create_connection((host, port), 10)
    except OSError:
        return  # JAX, too, sees that a process is gone, after 100 s
    link.settimeout(None)
    link.sendall(relay.HELLO)
    stopped = threading.Event()

    def tell() -> None:
        """Has the others stopped."""
        stopped.set()
        with contextlib.suppress(OSError):
            link.sendall(relay.STOP)

    def listen() -> None:
        """Ends this process when the relay says so."""
        with contextlib.suppress(OSError):
            line = link.makefile("rb").readline(64)
            if line == relay.STOP and not stopped.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
            elif line == relay.LOST:
                os.write(2, f"sail-jax: error: {LOST}\n".encode())
                os._exit(1)

    def leave() -> None:
        """Waits for the others at the end, and has it known that this process is not lost."""
        jax.distributed.shutdown()
        with contextlib.suppress(OSError):
            link.sendall(relay.BYE)

    before_leaving(tell)
    atexit.register(leave)
    threading.Thread(target=listen, name="processes", daemon=True).start()


class _Service:
    """JAX's service of the first process, in a process of its own; see `relay`."""

    def __init__(self, address: str, *given: Any, **options: Any) -> None:
        _wait_for(int(address.rsplit(":", 1)[1]))
        command = [sys.executable, "-P", relay.__file__, repr(((address, *given), options))]
        # A session of its own: a terminal's interrupt is not for it.
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        assert self._child.stdout is not None
        port = self._child.stdout.readline()
        if not port:
            raise ValueError(f"--processes: cannot listen at {address}")
        self.port = int(port)

    def shutdown(self) -> None:
        """Ends the service, once all processes have left."""
        self._child.communicate(b"end")


def _wait_for(port: int) -> None:
    """Waits until the service of an earlier run has left a port."""
    end = time.monotonic() + relay.LINGER + 1
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return
        time.sleep(0.1)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Ends this process soon if its block fails in a way of its own, as others wait for it.

    Yields:
      Nothing.

    Raises:
      Exception: What the block raises. If that is because another process has ended, this one has
        ended before, with one sentence.
    """
    try:
        yield
    except StoreError:  # raised in all of them
        raise
    except Exception:
        if not is_alone():
            time.sleep(2)  # it may be another process that has ended: then this one says so
            atexit.register(_end)
        raise


def _end() -> None:
    """Ends the process without the others, for which JAX would wait here."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def is_first() -> bool:
    """Checks whether this is the process that writes.

    Returns:
      True in the process of rank 0, and so wherever there is only one.
    """
    if "jax" not in sys.modules:
        # Without JAX this process computes nothing and has joined no others, as when a run is drawn
        # again. Importing it would only cost time.
        return True
    import jax

    return jax.process_index() == 0


def by_first(do: Callable[[], T]) -> T | None:
    """Calls a function in the first process only, and lets the others wait until it is done.

    Args:
      do: The function, such as one that writes a file.

    Returns:
      What `do` returns in the first process; None in the others.

    Raises:
      StoreError: In all processes but the first, if `do` raised an exception there. The first
        process raises that exception itself.
    """
    if is_alone():
        return do()
    result, error = None, None
    if is_first():
        try:
            result = do()
        except Exception as exc:
            error = exc
    # An exception must not keep the first from this broadcast: the others wait in it.
    failed = agreed(error is not None)
    if error is not None:
        raise error
    # The others learn from the first that it failed; they have no error of their own to show.
    if failed:
        raise StoreError("the first of the processes failed; it says why")
    return result


def agreed(flag: bool) -> bool:
    """Gives every process the flag of the first one.

    All processes must call it. They wait for one another.

    Args:
      flag: What this process would say.

    Returns:
      The flag of the first process, in all of them.
    """
    if is_alone():
        return flag
    import numpy as np
    from jax.experimental import multihost_utils

    return bool(multihost_utils.broadcast_one_to_all(np.asarray(flag)))


def any_of(flag: bool) -> bool:
    """Finds out whether the flag of at least one process is true.

    All processes must call it. They wait for one another.

    Args:
      flag: What this process says.

    Returns:
      Whether the flag of any process is true, in all of them.
    """
    if is_alone():
        return flag
    import numpy as np
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def in_parts(carry_out: Callable[[Namespace], bool | None]) -> Callable[[Namespace], None]:
    """Lets several processes carry out a command, where its options say so (`--processes`).

    Each makes a part of the output. When all are whole, the first process joins them.

    Args:
      carry_out: Carries out the command: all of it, or what `part` and `join` of its arguments say.
        Of a part it returns whether the output was finished before: then nothing is joined.

    Returns:
      The function of the arguments that does so.
    """

    def run(args: Namespace) -> None:
        if args.processes is None or args.plan:
            carry_out(args)
            return
        if args.part is not None or args.join:
            raise ValueError("--processes makes all parts and joins them: give no --part, --join")
        join(args.processes)
        import jax

        with together():
            if is_alone():
                carry_out(args)
                return
            number, count = jax.process_index() + 1, jax.process_count()
            try:
                unchanged = carry_out(Namespace(**{**vars(args), "part": (number, count)}))
                _wait_for_all("parts")
                if is_first() and not unchanged:
                    carry_out(Namespace(**{**vars(args), "join": True}))
            except (StoreError, ValueError):
                # It is raised here alone, and the others would wait for this process.
                atexit.register(_end)
                raise
            _wait_for_all("joined")

    return run


def _wait_for_all(what: str) -> None:
    """Waits until all processes have come so far, which may take days."""
    from jax._src import distributed as of_jax

    distributed: Any = of_jax
    distributed.global_state.client.wait_at_barrier(f"sail-jax/{what}", 30 * 86_400_000)


def is_alone() -> bool:
    """Checks whether this process runs the command by itself.

    Returns:
      True if JAX knows of no other process.
    """
    import jax

    return jax.process_count() == 1
