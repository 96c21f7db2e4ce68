"""One study in several processes of JAX: which process writes, and when the others continue.

The processes compute the same values, each on its devices, by `jax.distributed`. Work for one
process, such as writing a file, is done by the first process while the others wait. All processes
must see the output folder.

A SIGTERM to one of them is a notice of JAX's preemption service: a training stores its state in all
processes at the same step, and ends. When a process is lost, JAX ends the others after `HEARTBEAT`
seconds. `--resume` continues from what is stored.
"""

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

from sail_jax.disk import StoreError

T = TypeVar("T")
AUTO = "auto"
HEARTBEAT = 30
"""The seconds without a sign of life after which JAX takes a process for lost."""


def join(how: str) -> None:
    """Connects this process with the others that run the same command.

    Call it before JAX computes anything. A single process does not need it.

    Args:
      how: "auto" under SLURM, on a TPU pod, in Kubernetes or with Open MPI, which give each process
        its rank. Otherwise "HOST:PORT,COUNT,RANK": the address of the process of rank 0, the number
        of processes, and the rank of this one, from 0. The process of rank 0 listens there.

    Raises:
      ValueError: If `how` is neither, the rank is not below the count, "auto" finds no
        environment that gives this process a rank, or the processes do not find one another.
    """
    import jax

    if how == AUTO:
        try:
            jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT)
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
    try:
        jax.distributed.initialize(
            address, count, rank, coordinator_bind_address=address,
            heartbeat_timeout_seconds=HEARTBEAT,
        )  # fmt: skip
    except RuntimeError as exc:
        why = str(exc).splitlines()[0]
        raise ValueError(f"--processes: cannot connect at {address} ({why})") from exc


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Ends this process at once if its block fails in this process only.

    The others wait for it. They end `HEARTBEAT` seconds later.

    Yields:
      Nothing.

    Raises:
      Exception: The exception of the block.
    """
    try:
        yield
    except StoreError:  # every process raises it
        raise
    except Exception:
        if not is_alone():
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


def preempted(call: int) -> bool:
    """Checks whether a process has received SIGTERM, and all have agreed to stop here.

    Args:
      call: The number of this call. All processes call it with the same numbers, in order.

    Returns:
      True in all processes at the same call. False in a single process, which handles its signals
      itself.
    """
    if is_alone():
        return False
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(call)


def is_alone() -> bool:
    """Checks whether this process runs the command alone.

    Returns:
      True if JAX has no other process.
    """
    import jax

    return jax.process_count() == 1
