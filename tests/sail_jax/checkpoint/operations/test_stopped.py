"""Merging, growing and aligning, stopped by signals while they write, and resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from small_checkpoints import CONFIG, SHAPES

from sail_jax.checkpoint import save_checkpoint
from sail_jax.cli import main as cli

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")

COMMANDS = {
    "merge": ["merge", "r.yaml"],
    "grow": ["grow", "--width=2x", "--no-certify", "a"],
    "align": ["align", "--max-sweeps=1", "--no-certify", "a", "b"],
}
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]
# The program that runs the suite may have disabled signals, which its children inherit.
CHILD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from sail_jax.cli.main import main
sys.exit(main())
"""
ROWS = 150_000  # of embeddings: outputs of 20 MB and of 40 MB


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models and a recipe."""
    folder = tmp_path_factory.mktemp("stopped")
    config = json.dumps(CONFIG | {"vocab_size": ROWS}).encode()
    for seed, name in enumerate("ab"):
        random = np.random.default_rng(seed)
        save_checkpoint(
            folder / name,
            {
                name: random.normal(size=(ROWS if shape[0] == 20 else shape[0], *shape[1:])).astype(
                    np.float32
                )
                for name, shape in SHAPES.items()
            },
            extras={"config.json": config},
        )
    (folder / "r.yaml").write_text(
        "merge_method: ties\nparameters: {density: 0.5, weight: 1}\nbase_model: a\n"
        "models: [{model: a}, {model: b}]\n"
    )
    return folder


def contents(folder):
    """The bytes of all files but the card, whose title is the name of the output."""
    files = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    return files | {"README.md": b""}


def stopped(command, out, number, wait):
    """Runs it in a process of its own, and stops that `wait` seconds after it began to write.

    Returns how long it wrote, None if it did not get to the end, and its exit code.
    """
    argv = [sys.executable, "-c", CHILD, *command, out, "--resume", "--quiet"]
    journal = f".{out}.partial/journal"
    before = os.path.exists(journal) and os.stat(journal).st_ino
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        # A resumed run writes its journal anew, under another inode.
        while child.poll() is None and (
            not os.path.exists(journal) or os.stat(journal).st_ino == before
        ):
            time.sleep(0.001)
        began, wrote = time.monotonic(), None
        while child.poll() is None and time.monotonic() - began < wait:
            if wrote is None and os.path.exists(out):
                wrote = time.monotonic() - began
            time.sleep(0.001)
        if child.poll() is None:
            child.send_signal(number)
        _, said = child.communicate(timeout=120)
    whole = os.path.exists(out) and not os.path.exists(f".{out}.partial")
    if child.returncode == -number != -signal.SIGKILL:  # no signals are handled at exit
        assert whole, said
    else:
        assert child.returncode in {0, -number if number == signal.SIGKILL else 130}, said
    assert "Traceback" not in said
    return wrote, child.returncode


def attacked(name, numbers, moments, seed):
    """Stops a command at random moments of its writing; returns how many of them hit it."""
    random, hits, command, out = np.random.default_rng(seed), 0, COMMANDS[name], f"out-{name}"
    writes, code = stopped(command, out, signal.SIGKILL, 100)
    assert code == 0
    assert writes is not None
    want = contents(out)
    for k in range(moments):
        if os.path.exists(out):
            assert contents(out) == want
            shutil.rmtree(out)
        wrote, code = stopped(command, out, numbers[k % len(numbers)], random.uniform(0, writes))
        writes = wrote or writes  # the speed of a machine varies
        hits += code in (130, -signal.SIGKILL)
        assert not os.path.exists(out) or contents(out) == want
        if k + 1 == moments or random.random() < 0.7:  # otherwise it is stopped once more
            assert cli.main([*command, out, "--resume", "--quiet"]) == 0
            assert contents(out) == want
            assert not os.path.exists(f".{out}.partial")
    shutil.rmtree(out)
    return hits


@pytest.mark.slow
def test_stopped_while_it_writes_it_resumes_to_the_same_bytes(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert attacked("merge", [signal.SIGTERM, signal.SIGKILL], 3, seed=0) > 0


@pytest.mark.soak
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("name", COMMANDS)
def test_stopped_at_many_moments_it_resumes_to_the_same_bytes(name, number, folder, monkeypatch):
    monkeypatch.chdir(folder)
    hits = attacked(name, [number], 20, seed=0)
    assert hits >= 10  # moments are drawn evenly from how long one run wrote
