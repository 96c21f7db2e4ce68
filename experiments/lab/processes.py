"""Several processes that run one study together: which of them writes, and when the others go on.

Every process computes the same. What only one may do, such as writing a file, the first process
does while the others wait. The directory of a run must be one that all of them see.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from sail_jax.cli.stopping import before_leaving
from sail_jax.disk import StoreError

T = TypeVar("T")
AUTO = "auto"
# Seconds without a sign of life after which a process counts as lost.
SILENCE = 6
# Under this key the processes learn that one of them was told to stop.
STOP, EVERY = "sail-jax/stop", 0.25


def join(how: str) -> None:
    """Connects this process with the others that run the same study.

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

    initialize = partial(jax.distributed.initialize, heartbeat_timeout_seconds=SILENCE)
    if how == AUTO:
        try:
            _linked(initialize)
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
    _linked(partial(initialize, address, count, rank))


def _linked(initialize: Callable[[], None]) -> None:
    """Connects the processes. From then on all end when one of them is stopped."""
    import jax
    from jax._src import distributed

    # It would take SIGTERM away from the handler that stops a command.
    jax.config.update("jax_enable_preemption_service", False)
    initialize()
    stopped = threading.Event()
    client: Any = distributed.global_state.client

    def tell() -> None:
        """Tells the others to stop. The first of them keeps what they read this from."""
        stopped.set()
        with contextlib.suppress(Exception):
            client.key_value_set(STOP, "", True)
            time.sleep(4 * EVERY * is_first())

    def listen() -> None:
        """Stops this process by a signal once another one was told to stop."""
        while not stopped.wait(EVERY):
            with contextlib.suppress(Exception):  # raised as long as there is no such key
                client.key_value_try_get(STOP)
                stopped.set()
                os.kill(os.getpid(), signal.SIGTERM)

    before_leaving(tell)
    threading.Thread(target=listen, name="processes", daemon=True).start()


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Ends this process soon if its block fails in a way of its own, as others wait for it.

    Yields:
      Nothing.

    Raises:
      Exception: What the block raises.
    """
    try:
        yield
    except StoreError:  # raised in all of them
        raise
    except Exception:
        if not is_alone():
            atexit.register(_end)
        raise


def _end() -> None:
    """Ends the process without the others, for which JAX would wait here."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def is_first() -> bool:
    """Tells whether this is the process that writes.

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
    """Tells every process what the first one says.

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
    """Tells every process whether at least one of them says yes.

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


def is_alone() -> bool:
    """Tells whether this process runs the study by itself.

    Returns:
      True if JAX knows of no other process.
    """
    import jax

    return jax.process_count() == 1
