"""Shared test set-up: the suite runs on the CPU, so that it means the same on every machine, and
with one BLAS thread per worker, as the command does (`sail_jax.cli.main` says why).

Nearly all the time of the tests goes into compiling programs that run once. So the quick and the
slow tests compile without optimising, which takes a quarter of the time. With `XLA_FLAGS= pytest`
they compile as users do, and the soak tests always. What a worker has compiled, now or earlier,
the others read from disk."""

import collections
import os
import zlib
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".programs"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import pytest

UNOPTIMISED = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if jax.__version_info__[:2] == (0, 10):  # a flag that XLA does not know ends the process
    UNOPTIMISED += " --xla_cpu_use_fusion_emitters=false"


def pytest_configure(config):
    """Before the first program: XLA reads its flags when its first device is made."""
    if "not soak" in config.getoption("markexpr"):
        os.environ.setdefault("XLA_FLAGS", UNOPTIMISED)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by mark
def pytest_collection_modifyitems(items):
    """Of the cells of a test marked `thirds`, one of every three stays quick: not the same one in
    every test, so that each method and each study meets quick tests."""
    cells = collections.Counter()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "thirds" in marks and not marks & {"slow", "soak"}:
            test = item.nodeid.partition("[")[0]
            if (cells[test] + zlib.crc32(test.encode())) % 3:
                item.add_marker("slow")
            cells[test] += 1


@pytest.fixture(scope="module", autouse=True)
def forget_compilations():
    """What one file compiles, no other needs: thousands of kept programs take gigabytes."""
    yield
    jax.clear_caches()


def pytest_addoption(parser):
    add = parser.getgroup("fuzzing").addoption
    add("--fuzz", type=int, metavar="N", help="inputs for each target; default: a few seconds'")
    add("--fuzz-seed", type=int, metavar="S", default=0, help="of the first input; default: 0")
