"""No command hangs for any numbers of threads and cores; a pause is reported."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import repeated_commands
import small_checkpoints

from sail_jax.checkpoint import RunOptions, merge_checkpoints
from sail_jax.merging import pulse
from sail_jax.methods import linear

SCRIPT = Path(repeated_commands.__file__)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("threads")
    here = os.getcwd()
    os.chdir(folder)
    try:
        commands = repeated_commands.prepare(folder)
    finally:
        os.chdir(here)
    (folder / "commands.json").write_text(json.dumps(commands))
    return folder, [*commands]


def repeated(inputs, threads, cores, times, names):
    """Runs commands in a separate process, on some cores; returns the bytes of each output."""
    folder, _ = inputs
    # compiled as users do: tests are told to use one thread of XLA's
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), *sys.path])
    how = [",".join(map(str, cores)), str(threads), str(times)]
    done = subprocess.run(
        [sys.executable, SCRIPT, folder, *how, *names],
        cwd=folder, env=environment, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{threads} threads on {cores}: {done.stdout} {done.stderr}"
    return dict(line.split("\t") for line in done.stdout.splitlines() if "\t" in line)


CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@pytest.mark.soak
@pytest.mark.skipif(not CORES, reason="this system does not choose cores")
def test_transplants_and_spectral_merges_end_in_two_threads(inputs):
    names = ["transplant", "merge tsv_m"]
    one = repeated(inputs, 1, CORES[:2], 1, names)
    assert repeated(inputs, 2, CORES[:2], 3, names) == one


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="this system does not choose cores, or has one")
def test_inner_products_do_not_depend_on_the_number_of_cores(inputs):
    names = ["merge karcher", "merge multislerp"]
    one, two = (repeated(inputs, 1, CORES[:cores], 1, names) for cores in (1, 2))
    assert one == two


PARTS = 12


@pytest.mark.soak
@pytest.mark.skipif(not CORES, reason="this system does not choose cores")
@pytest.mark.parametrize("part", range(PARTS))
def test_no_command_stands_still(inputs, part):
    """With 1, 2, 3 and 8 threads on 1 and 2 cores, fifty times each, if commands decompose matrices
    or compute tensors as they are read; others ten times. Bytes are equal."""
    assert set(inputs[1]) >= repeated_commands.OFTEN
    names = inputs[1][part::PARTS]
    often = [name for name in names if name in repeated_commands.OFTEN]
    rest = [name for name in names if name not in often]
    outputs = [
        repeated(inputs, threads, CORES[:cores], 50, often)
        | repeated(inputs, threads, CORES[:cores], 10, rest)
        for cores in (1, 2)
        for threads in (1, 2, 3, 8)
    ]
    assert set(outputs[0]) == set(names)
    assert outputs == [outputs[0]] * len(outputs)


def test_a_run_without_progress_writes_what_each_thread_waits_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(pulse, "PATIENCE", 0.05)
    base = small_checkpoints.tensors()
    for name in "ab":
        small_checkpoints.save(tmp_path / name, base, small_checkpoints.CONFIG)
    stacks = tmp_path / ".out.partial" / "threads"

    def slow(done, total, name):  # holds up the only thread
        until = time.monotonic() + 20
        while not stacks.exists() and time.monotonic() < until:
            time.sleep(0.01)

    with caplog.at_level(logging.WARNING):
        merge_checkpoints(
            [tmp_path / "a", tmp_path / "b"], tmp_path / "out", method=linear(),
            run=RunOptions(threads=1, progress=slow),
        )  # fmt: skip
    assert "no progress for 0 s" in caplog.text
    assert str(stacks) in caplog.text
    assert not stacks.exists()  # like all of the unfinished work
