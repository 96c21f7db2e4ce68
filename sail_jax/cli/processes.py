"""Runs one command in several processes: which process writes, and when the others continue.

The processes of a study compute the same values. Work for one process, such as writing a file, is
done by the first process while the others wait. In a merge each process makes a part of the output,
and the first process joins the parts. All processes must see the output folder. They end together:
when one is stopped, all stop; when one is lost, the others print this and end.
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
# The key under which the processes find the address of the relay.
KEY = "sail-jax/relay"
LOST = "another of the processes has ended, so this one ends, too"


def join(how: str) -> None:
    """Connects this process with the others that run the same command.

    Call it before JAX computes anything. A single process does not need it.

    Args:
      how: "auto" under SLURM, on a TPU pod, in Kubernetes or with Open MPI, which give each process
        its rank. Otherwise "HOST:PORT,COUNT,RANK": the address of the process of rank 0, the number
        of processes, and the rank of this one, from 0.

    Raises:
      ValueError: If `how` is neither, the rank is not below the count, or "auto" finds no
        environment that gives this process a rank.
    """
    import jax

    if how == AUTO:
        try:
            _linked(jax.distributed.initialize)
        except ValueError as exc:
            why = "auto found no environment that gives this process a rank"
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
    """Connects the processes. From then on all end when one is stopped or lost."""
    import jax

    from sail_jax import jax_internals

    distributed = jax_internals.distributed()
    # Otherwise JAX would replace our handler of SIGTERM.
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
        return  # JAX also notices a lost process, after 100 s
    link.settimeout(None)
    link.sendall(relay.HELLO)
    stopped = threading.Event()

    def tell() -> None:
        """Stops the other processes."""
        stopped.set()
        with contextlib.suppress(OSError):
            link.sendall(relay.STOP)

    def listen() -> None:
        """Ends this process when the relay sends "stop" or "lost"."""
        with contextlib.suppress(OSError):
            line = link.makefile("rb").readline(64)
            if line == relay.STOP and not stopped.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
            elif line == relay.LOST:
                os.write(2, f"sail-jax: error: {LOST}\n".encode())
                os._exit(1)

    def leave() -> None:
        """Waits for the others at the end, and reports that this process is not lost."""
        jax.distributed.shutdown()
        with contextlib.suppress(OSError):
            link.sendall(relay.BYE)

    before_leaving(tell)
    atexit.register(leave)
    threading.Thread(target=listen, name="processes", daemon=True).start()


class _Service:
    """Runs JAX's service of the first process in a separate process; see `relay`."""

    def __init__(self, address: str, *given: Any, **options: Any) -> None:
        _wait_for(int(address.rsplit(":", 1)[1]))
        command = [sys.executable, "-P", relay.__file__, repr(((address, *given), options))]
        # A session of its own protects it from the terminal's interrupt.
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
    """Ends this process soon if its block fails in this process only, since the others wait for it.

    Yields:
      Nothing.

    Raises:
      Exception: The exception of the block. If another process has ended first, this process ends
        with one sentence instead.
    """
    try:
        yield
    except StoreError:  # every process raises it
        raise
    except Exception:
        if not is_alone():
            time.sleep(2)  # if another process has ended, this one prints so and ends meanwhile
            atexit.register(_end)
        raise


def _end() -> None:
    """Ends the process without the JAX shutdown, which would wait for the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def is_first() -> bool:
    """Checks whether this is the process that writes.

    Returns:
      True in the process of rank 0, and in every single process.
    """
    if "jax" not in sys.modules:
        # Without JAX this process computes nothing and has not joined others, for example when it
        # only redraws a run. Importing JAX would waste time.
        return True
    import jax

    return jax.process_index() == 0


def by_first(do: Callable[[], T]) -> T | None:
    """Calls a function in the first process only, while the others wait.

    Args:
      do: The function, such as one that writes a file.

    Returns:
      The result of `do` in the first process; None in the others.

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
    # The first process must reach this broadcast even after an exception: the others wait in it.
    failed = agreed(error is not None)
    if error is not None:
        raise error
    # The first process reports its failure. The others have no error of their own to show.
    if failed:
        raise StoreError("the first of the processes failed; see its error")
    return result


def agreed(flag: bool) -> bool:
    """Sends the flag of the first process to all processes.

    All processes must call it. They wait for one another.

    Args:
      flag: The flag of this process.

    Returns:
      The flag of the first process, in all of them.
    """
    if is_alone():
        return flag
    import numpy as np
    from jax.experimental import multihost_utils

    return bool(multihost_utils.broadcast_one_to_all(np.asarray(flag)))


def any_of(flag: bool) -> bool:
    """Checks whether the flag of at least one process is true.

    All processes must call it. They wait for one another.

    Args:
      flag: The flag of this process.

    Returns:
      True in all processes if any flag is true.
    """
    if is_alone():
        return flag
    import numpy as np
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def in_parts(carry_out: Callable[[Namespace], bool | None]) -> Callable[[Namespace], None]:
    """Lets several processes run a command together if it has the option `--processes`.

    Each makes a part of the output. When all parts are complete, the first process joins them.

    Args:
      carry_out: Runs the command: all of it, or the `part` or `join` in its arguments. For a part,
        it returns whether the output was finished before; then nothing is joined.

    Returns:
      The function that runs the command in this way.
    """

    def run(args: Namespace) -> None:
        if args.processes is None or args.plan:
            carry_out(args)
            return
        if args.part is not None or args.join:
            raise ValueError("--processes makes and joins all parts: remove --part and --join")
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
                # Only this process raises it, and the others would wait for this process.
                atexit.register(_end)
                raise
            _wait_for_all("joined")

    return run


def _wait_for_all(what: str) -> None:
    """Waits until all processes reach this point, which may take days."""
    from sail_jax import jax_internals

    distributed = jax_internals.distributed()
    distributed.global_state.client.wait_at_barrier(f"sail-jax/{what}", 30 * 86_400_000)


def is_alone() -> bool:
    """Checks whether this process runs the command alone.

    Returns:
      True if JAX has no other process.
    """
    import jax

    return jax.process_count() == 1
