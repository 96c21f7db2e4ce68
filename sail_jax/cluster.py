"""Independent tasks on other processes and machines, by Dask.

A `Workers` runs a function on each item of a list. Without a cluster it does so here, one item
after the other, so code that uses it has no second way. With a cluster the tasks go to the workers
of a Dask scheduler: of this machine, of a job array, of Kubernetes. The extra `cluster` installs
Dask.

A task may run twice: when a worker is lost, its tasks go to another one. So tasks are idempotent:
they write where a second run finds and continues their work, and they name inputs by path. Relative
paths are those of the process that gives the tasks, so all workers must see its working directory.
"""

import contextlib
import functools
import ipaddress
import json
import logging
import os
import re
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from distributed import Client, Future, as_completed

T = TypeVar("T")
R = TypeVar("R")

ATTEMPTS = 3
"""How many times the scheduler may give a task up, each time after it has lost several workers."""

KINDS = "local:N, the address of a scheduler (tcp://HOST:PORT or tls://HOST:PORT), or its JSON file"


ANSWER = 30.0
"""The seconds that a scheduler has for its answer."""


class ClusterError(ValueError):
    """Raised when a cluster cannot be reached, or is lost."""


class Workers:
    """What runs tasks. This class runs them in this process; see `connected` for others.

    Attributes:
      count: How many tasks run at the same time, now.
    """

    count = 1

    def each(
        self,
        task: Callable[[T], R],
        items: Sequence[T],
        heard: Callable[[int, Any], None] | None = None,
    ) -> Iterator[tuple[int, R]]:
        """Runs a task on each item.

        An error of a task ends the iteration. Leaving the iteration early drops the tasks that
        have not begun.

        Args:
          task: A function of one item. It and the items must be picklable.
          items: The items.
          heard: Called with the place of an item and each message of its task; see `listener`.

        Yields:
          The place of an item and the result, in the order in which the tasks finish.

        Raises:
          Exception: The first error of a task.
          ClusterError: If the scheduler is lost, or too many workers are lost with the same task.
        """
        for place, item in enumerate(items):
            with _heard_by(None if heard is None else functools.partial(heard, place)):
                result = task(item)
            yield place, result


HERE = Workers()
"""Runs tasks in this process."""


class _Cluster(Workers):
    """The workers of a Dask cluster.

    Args:
      client: The connection to the scheduler.
      around: Makes a context in which each task runs, such as settings of JAX. It is picklable.
      patience: How many seconds the cluster may be without a worker.
    """

    def __init__(
        self,
        client: "Client",
        around: Callable[[], AbstractContextManager[Any]],
        patience: float,
    ) -> None:
        # Its methods return coroutines in an asynchronous client, which this one is not.
        self._client: Any = client
        self._around, self._patience = around, patience

    @property
    def count(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return max(1, sum(self._client.nthreads().values()))

    def each(
        self,
        task: Callable[[T], R],
        items: Sequence[T],
        heard: Callable[[int, Any], None] | None = None,
    ) -> Iterator[tuple[int, R]]:
        from distributed import CancelledError, KilledWorker, as_completed
        from distributed.comm.core import CommClosedError

        client, topic = self._client, f"sail-jax/{uuid.uuid4()}"
        if heard is not None:
            client.subscribe_topic(topic, lambda event: heard(*event[1]["said"]))
        where = os.getcwd()
        run = functools.partial(_run, task, self._around, where, topic if heard else None)
        futures: dict[Future, int] = {
            client.submit(run, place, item, pure=False, retries=0): place
            for place, item in enumerate(items)
        }
        lost = [0] * len(items)
        completed = as_completed(list(futures), loop=client.loop)
        try:
            while futures:
                future = self._next(completed)
                place = futures.pop(future)
                try:
                    result = future.result()
                except KilledWorker as error:
                    lost[place] += 1
                    if lost[place] == ATTEMPTS:
                        raise ClusterError(
                            f"task {place + 1} of {len(items)}: all workers were lost that ran it; "
                            "see their logs (a worker without enough memory is killed)"
                        ) from error
                    again = client.submit(run, place, items[place], pure=False, retries=0)
                    futures[again] = place
                    completed.add(again)
                    continue
                except (CancelledError, CommClosedError) as error:
                    raise ClusterError(_lost(client)) from error
                yield place, result
        finally:
            with contextlib.suppress(Exception):  # the scheduler may be lost
                if futures:
                    client.cancel(list(futures), force=True)
                if heard is not None:
                    client.unsubscribe_topic(topic)

    def _next(self, completed: "as_completed") -> "Future":
        """Waits for the next task; ClusterError if no worker is left."""
        last = asked = time.monotonic()
        while not completed.has_ready():
            time.sleep(_LOOK)
            now = time.monotonic()
            if now - asked < _ASK:
                continue
            asked = now
            try:
                workers = self._client.nthreads()
            except OSError as error:
                raise ClusterError(_lost(self._client)) from error
            if workers:
                last = now
            elif now - last > self._patience:
                raise ClusterError(
                    f"the cluster has had no worker for {self._patience:.0f} s, and tasks are left"
                )
        return next(completed)


# Seconds between two looks at the results, and between two questions whether there is a worker.
_LOOK, _ASK = 0.02, 2.0


On: TypeAlias = "str | Client | Workers | None"
"""Where tasks run: here, on a cluster by its address, or on one that is connected."""


@contextlib.contextmanager
def connected(
    on: On,
    *,
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    patience: float = 600.0,
) -> Iterator[Workers]:
    """Connects with a cluster, as a context manager.

    Args:
      on: "local:N" starts N processes on this machine, with connections that are encrypted and
        only accept this process. An address "tcp://HOST:PORT" or "tls://HOST:PORT", or the path of
        the JSON file of a scheduler, connects with a running cluster; Dask's configuration has its
        certificates. A `Client` of Dask is used as it is. None, or `Workers`, need no connection.
      around: Makes a context in which each task runs. It must be picklable.
      patience: How many seconds the cluster may be without a worker, such as those that a queue of
        jobs starts.

    Yields:
      The workers.

    Raises:
      ClusterError: If `on` is none of these, Dask is not installed, or no scheduler or no worker
        answers.

    >>> with connected(None) as workers:
    ...     sorted(workers.each(abs, [3, -4]))
    [(0, 3), (1, 4)]
    """
    if on is None or isinstance(on, Workers):
        yield on or HERE
        return
    try:
        import distributed
    except ImportError as error:
        raise ClusterError(
            f"{_shown(on)} requires Dask: pip install 'sail-jax[cluster]'"
        ) from error
    from distributed.utils import silence_logging_cmgr

    if isinstance(on, distributed.Client):
        yield _Cluster(on, around, patience)
        return
    with contextlib.ExitStack() as stack:
        # What Dask logs, such as a lost connection with its traceback, becomes one of our errors.
        for name in (name for name in logging.root.manager.loggerDict if "distributed" in name):
            stack.enter_context(silence_logging_cmgr(logging.CRITICAL, name))
        if match := re.fullmatch(r"local:([1-9]\d{0,3})", on):
            client = stack.enter_context(_local(int(match[1])))
        else:
            client = stack.enter_context(_remote(on, patience))
        try:
            client.wait_for_workers(1, timeout=patience)
        except TimeoutError as error:
            raise ClusterError(
                f"{_shown(on)}: no worker has come within {patience:.0f} s"
            ) from error
        except OSError as error:
            raise ClusterError(_lost(client)) from error
        yield _Cluster(client, around, patience)


def listener() -> Callable[[Any], None] | None:
    """Returns what hears messages of the current task, such as its progress.

    Call it in the thread of the task. The function itself may be called in any thread.

    Returns:
      A function of one picklable message; None if nobody listens.
    """
    return _listener.get()


def is_address(text: str) -> bool:
    """Checks whether a text can name a cluster, without connecting.

    Args:
      text: As `on` of `connected`.

    Returns:
      Whether it has one of the forms.
    """
    return re.fullmatch(r"local:[1-9]\d{0,3}|(tcp|tls)://.+:\d+|.*\.json", text) is not None


_listener: ContextVar[Callable[[Any], None] | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def _heard_by(hears: Callable[[Any], None] | None) -> Iterator[None]:
    """Sets the listener of the current task during the block."""
    token = _listener.set(hears)
    try:
        yield
    finally:
        _listener.reset(token)


def _run(
    task: Callable[[T], R],
    around: Callable[[], AbstractContextManager[Any]],
    where: str,
    topic: str | None,
    place: int,
    item: T,
) -> R:
    """Runs a task on a worker, in the working directory `where`."""
    from distributed import get_worker

    worker = get_worker()

    def pass_on(message: Any) -> None:
        assert topic is not None
        worker.log_event(topic, {"said": (place, message)})

    with _FOLDER.be(where), around(), _heard_by(pass_on if topic else None):
        return task(item)


class _Folder:
    """The working directory of a process, in which tasks of several threads may run."""

    def __init__(self) -> None:
        self._changed, self._users, self._before = threading.Condition(), 0, ""

    @contextlib.contextmanager
    def be(self, where: str) -> Iterator[None]:
        """Makes `where` the working directory, once no task needs another one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._users or os.getcwd() == where)
            if not self._users:
                self._before = os.getcwd()
                try:
                    os.chdir(where)
                except OSError as error:
                    raise ClusterError(f"a worker cannot enter {where} ({error})") from error
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                if not self._users:
                    os.chdir(self._before)
                    self._changed.notify_all()


_FOLDER = _Folder()


@contextlib.contextmanager
def _local(count: int) -> "Iterator[Client]":
    """Starts workers on this machine, each with one thread."""
    from distributed import Client, LocalCluster

    # The credentials exist in memory only: no other user of this machine can give tasks.
    try:
        cluster: Any = LocalCluster(
            n_workers=count, threads_per_worker=1, host="127.0.0.1", protocol="tls://",
            security=True, dashboard_address="127.0.0.1:0", memory_limit=0,
            silence_logs=logging.CRITICAL,
        )  # fmt: skip
    except (RuntimeError, OSError, ImportError) as error:
        raise ClusterError(f"local:{count}: the workers did not start ({error})") from error
    with cluster, Client(cluster, security=cluster.security, set_as_default=False) as client:
        yield client


@contextlib.contextmanager
def _remote(on: str, patience: float) -> "Iterator[Client]":
    """Connects with a running scheduler."""
    from distributed import Client

    if not is_address(on):
        raise ClusterError(f"expected {KINDS}; got '{on}'")
    address = on
    if on.endswith(".json") and "://" not in on:
        try:
            address = json.loads(Path(on).read_text())["address"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ClusterError(f"{on}: expected the JSON file of a Dask scheduler") from error
    if address.startswith("tcp://") and not _is_loopback(address):
        warnings.warn(
            f"{address}: whoever reaches this scheduler can run programs as you, and read what is "
            "sent; use tls://",
            stacklevel=2,
        )
    try:
        client = Client(address, timeout=min(patience, ANSWER), set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise ClusterError(f"no scheduler answers at {address} ({error})") from error
    with client:
        yield client


def _is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _lost(client: "Client") -> str:
    """The message for a scheduler that does not answer any more."""
    at = "" if client.scheduler is None else f" at {client.scheduler.address}"
    return f"the scheduler{at} is lost, or has dropped the tasks"


def _shown(on: object) -> str:
    return on if isinstance(on, str) else "a cluster"
