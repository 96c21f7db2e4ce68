"""Several processes that run the same experiment side by side: who writes, and when others read.

Every process computes the same; of what only one may do, the first does it while the others wait.
The directory of a run must be one that all of them see.
"""

from collections.abc import Callable
from typing import TypeVar

from sail_jax.disk import StoreError

T = TypeVar("T")
AUTO = "auto"


def join(how: str) -> None:
    """Makes this process one of several, before anything is computed.

    how: "auto", where SLURM, a TPU pod, Kubernetes or Open MPI tells each process what it is; or
    "HOST:PORT,COUNT,RANK", the address being that of rank 0. Raises `ValueError` if it is neither.
    """
    import jax

    if how == AUTO:
        try:
            jax.distributed.initialize()
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
    jax.distributed.initialize(address, count, rank)


def is_first() -> bool:
    """Whether this is the process that writes: the only one, as a rule."""
    import jax

    return jax.process_index() == 0


def by_first(do: Callable[[], T]) -> T | None:
    """`do()` in the first process, None in the others, which go on once it is done.

    What it raises is raised in the first, and `StoreError` in the others.
    """
    if is_alone():
        return do()
    result, error = None, None
    if is_first():
        try:
            result = do()
        except Exception as exc:
            error = exc
    failed = agreed(error is not None)
    if error is not None:
        raise error
    if failed:
        raise StoreError("the first of the processes failed; it says why")
    return result


def agreed(flag: bool) -> bool:
    """What the first process says, in all of them."""
    if is_alone():
        return flag
    import numpy as np
    from jax.experimental import multihost_utils

    return bool(multihost_utils.broadcast_one_to_all(np.asarray(flag)))


def any_of(flag: bool) -> bool:
    """Whether one of the processes says so, in all of them."""
    if is_alone():
        return flag
    import numpy as np
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def is_alone() -> bool:
    import jax

    return jax.process_count() == 1
