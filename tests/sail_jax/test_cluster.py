"""Tasks run here or on a cluster, with the same results, errors and messages."""

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from sail_jax import cluster
from sail_jax.cluster import ClusterError, connected, listener


def squared(x):
    hear = listener()
    if hear is not None:
        hear(f"squaring {x}")
    if x == 13:
        raise ValueError("no thirteen")
    return x * x


def killed_once(folder, number):
    """Ends its own process the first time that it runs."""
    mark = Path(folder, str(number))
    if number == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    mark.touch()
    return number


def killed(number):
    os.kill(os.getpid(), signal.SIGKILL)


def slow(folder, number):
    Path(folder, str(number)).touch()
    time.sleep(1)


@pytest.fixture(scope="module")
def local():
    with connected("local:2") as workers:
        yield workers


WORKERS = pytest.mark.parametrize(
    "on", [None, pytest.param("local", marks=pytest.mark.slow)], ids=["here", "local"]
)


@pytest.fixture
def workers(on, request):
    return cluster.HERE if on is None else request.getfixturevalue(on)


@WORKERS
def test_each_item_has_its_result_and_messages(workers, on):
    heard = []
    found = dict(workers.each(squared, [3, 1, 2], lambda *said: heard.append(said)))
    assert found == {0: 9, 1: 1, 2: 4}
    end = time.monotonic() + 10  # messages and results come on different ways
    while len(heard) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    assert sorted(heard) == [(0, "squaring 3"), (1, "squaring 1"), (2, "squaring 2")]
    assert dict(workers.each(squared, [])) == {}
    assert listener() is None


@WORKERS
def test_an_error_of_a_task_is_raised(workers, on):
    with pytest.raises(ValueError, match="no thirteen"):
        list(workers.each(squared, [1, 13, 2]))
    assert dict(workers.each(squared, [5])) == {0: 25}


@pytest.mark.slow
def test_a_lost_worker_costs_its_task(local, tmp_path):
    found = dict(local.each(partial(killed_once, str(tmp_path)), [0, 1, 2, 3]))
    assert found == {0: 0, 1: 1, 2: 2, 3: 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]


@pytest.mark.soak
def test_a_task_that_kills_all_its_workers_ends_the_run():
    with connected("local:1") as workers, pytest.raises(ClusterError, match="task 1 of 1"):
        list(workers.each(killed, [0]))


@pytest.mark.slow
def test_tasks_that_have_not_begun_are_dropped(local, tmp_path):
    tasks = local.each(partial(slow, str(tmp_path)), range(40))
    next(tasks)
    tasks.close()
    time.sleep(2.5)
    assert len([*tmp_path.iterdir()]) < 10


@pytest.mark.slow
def test_only_who_started_a_local_cluster_can_use_it(local):
    """Its connections are encrypted, with credentials that only this process has."""
    from distributed import Client

    address = local._client.scheduler.address
    assert address.startswith("tls://127.0.0.1:")
    with pytest.raises((OSError, TypeError, ValueError)):
        Client(address, timeout=3)
    with pytest.raises((OSError, TypeError, ValueError)):
        Client(address.replace("tls", "tcp"), timeout=3)


@pytest.mark.slow
def test_a_scheduler_of_ones_own_is_used_by_address_file_and_client(tmp_path):
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=1, threads_per_worker=2, host="127.0.0.1", dashboard_address=None
        ) as own,
        Client(own, set_as_default=False) as client,
    ):
        client.write_scheduler_file(str(tmp_path / "scheduler.json"))
        for on in (client, own.scheduler_address, str(tmp_path / "scheduler.json")):
            with connected(on) as workers:
                assert workers.count == 2
                assert dict(workers.each(squared, [4])) == {0: 16}
        with connected(client) as workers, connected(workers) as again:
            assert again is workers
        # A scheduler that ends takes its tasks with it.
        with connected(own.scheduler_address) as workers:
            tasks = workers.each(partial(slow, str(tmp_path)), range(9))
            next(tasks)
            threading.Timer(0.1, own.close).start()
            with pytest.raises(ClusterError, match="the scheduler"):
                list(tasks)


@pytest.mark.parametrize(
    ("on", "says"),
    [
        ("local:0", "expected local:N, the address of a scheduler .*; got 'local:0'"),
        ("here", "got 'here'"),
        ("http://127.0.0.1:1", "got 'http://127.0.0.1:1'"),
        ("nothing.json", "nothing.json: expected the JSON file of a Dask scheduler"),
        ("tcp://127.0.0.1:1", "no scheduler answers at tcp://127.0.0.1:1"),
    ],
)
def test_what_is_no_cluster_is_refused(on, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ClusterError, match=says), connected(on, patience=0.2):
        pass
    assert cluster.is_address(on) == on.endswith((".json", "tcp://127.0.0.1:1"))


def test_connections_in_the_clear_are_warned_of():
    with (
        pytest.warns(UserWarning, match="whoever reaches this scheduler can run programs as you"),
        pytest.raises(ClusterError),
        connected("tcp://192.0.2.1:1", patience=0.2),
    ):
        pass
