"""A run by two processes equals that of one."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import jax
import many_devices
import numpy as np
import pytest
from tiny_runs import tiny_run

from experiments.lab import registry, store
from sail_jax.cli import main as cli

RUN = ("run", "transfer_phase", "--preset", "tiny")
LOSSES = ("loss", "gamma_loss", "series_loss", "accuracy")


def by_two(name, out, double):
    """Returns exit codes and the output of each process of a run by two processes with two devices
    each.
    """
    precision = {"JAX_ENABLE_X64": str(int(double))}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "sail_jax.cli", "run", name, *RUN[2:], "--out", out]
    started = [
        subprocess.Popen(
            [*command, "--processes", f"{address},2,{rank}"],
            env=many_devices.environment(2) | precision,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], ended


# Sweeps in float64, on other devices and in other batches. Trainings in float32 (eps 1.2e-7) for 40
# steps, which sum gradients in a different order.
@pytest.mark.parametrize(
    ("name", "variables", "tolerance", "double"),
    [
        pytest.param("overtraining_linear", None, 1e-9, True, marks=pytest.mark.soak),
        pytest.param("transfer_phase", None, 1e-9, False, marks=pytest.mark.soak),
        pytest.param("sail_language", LOSSES, 1e-5, False, marks=pytest.mark.soak),
    ],
)
def test_two_processes_make_one_run(name, variables, tolerance, double, tmp_path):
    codes, ((out, err), (silent, _)) = by_two(name, tmp_path / "run", double)
    assert codes == [0, 0], err
    assert "result.nc" in out
    assert "result.nc" not in silent
    run, module = store.reopen(tmp_path / "run"), registry.load(name)
    dataset, _ = store.drawn(run, module)
    assert dataset.attrs["device_count"] == 4
    with jax.enable_x64(double):
        direct = module.run(module.presets["tiny"]) if double else tiny_run(name).dataset
    for variable in variables or direct:
        np.testing.assert_allclose(
            dataset[variable], direct[variable], rtol=tolerance, atol=tolerance
        )
    codes, ended = by_two(name, tmp_path / "run", double)
    assert codes == [2, 1]
    assert "finished" in ended[0][1]
    assert "the first of the processes failed" in ended[1][1]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("here", "expected auto or HOST:PORT,COUNT,RANK; got 'here'"),
        ("localhost:1,2", "got 'localhost:1,2'"),
        ("localhost:1,2,2", "the rank must be below the count"),
    ],
)
def test_what_is_no_process_is_refused(how, says, tmp_path, capsys):
    assert cli.main([*RUN, "--out", str(tmp_path / "x"), "--processes", how]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_process_that_nobody_tells_which_it_is_says_so(tmp_path):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "KUBE"))}
    command = [sys.executable, "-m", "sail_jax.cli", *RUN, "--out", tmp_path / "x"]
    ended = subprocess.run(
        [*command, "--processes", "auto"], env=clean, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2
    assert "auto found no environment that gives this process a rank" in ended.stderr
    assert not (tmp_path / "x").exists()


TOGETHER = """
    import sys, time
    import jax
    from experiments.lab import processes

    processes.HEARTBEAT = 10
    processes.join(sys.argv[1])
    with processes.together():
        for call in range(1, 10_000):
            if processes.preempted(call):
                print("stopped at", call, flush=True)
                break
            print("going", processes.agreed(True), flush=True)
            time.sleep(0.1)
"""


def started_together():
    """Two processes that count together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(TOGETHER), f"{address},2,{rank}"],
            env=many_devices.environment(1), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    for process in started:
        assert process.stdout is not None
        while (line := process.stdout.readline()) != "going True\n":
            assert line, process.communicate()[1]
    return started


@pytest.mark.slow
def test_a_notice_to_one_process_stops_all_at_the_same_call():
    started = started_together()
    try:
        time.sleep(1)
        started[1].send_signal(signal.SIGTERM)
        said = [process.communicate(timeout=60)[0].splitlines()[-1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert said[0] == said[1]
    assert said[0].startswith("stopped at ")
    assert [process.returncode for process in started] == [0, 0]


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_process_ends_the_others(rank):
    """JAX notices it within the time limit that `join` sets."""
    started = started_together()
    try:
        started[rank].kill()
        assert started[1 - rank].wait(timeout=60) != 0
    finally:
        for process in started:
            process.kill()
