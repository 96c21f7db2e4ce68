"""Shared test set-up. The suite runs on the CPU, so that it is equivalent on every machine, and
with one BLAS thread per worker, like the command (explained in `sail_jax.cli.main`).

Most of the time of the tests is spent on compiling programs that run once. Quick and slow tests
therefore compile without optimisations, which takes a quarter of the time. With `XLA_FLAGS=
pytest`, and always in soak tests, they compile with the usual optimisations. Programs compiled by
one worker are read from disk by the others."""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".programs"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# the Python location of each operation, which takes 5 % of the time and is never used here
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import less_waste
import pytest
from slow_examples import SLOW_EXAMPLES

from sail_jax.cli.kernels import quick_flags

DOCS = Path(__file__).parents[1] / "docs"


def pytest_configure(config):
    """Sets XLA's flags, which are read when the first device is created."""
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        less_waste.one_context()  # not in the process that distributes tests, since it runs none
    if "not soak" in config.getoption("markexpr"):
        os.environ.setdefault("XLA_FLAGS", quick_flags())


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Excludes imported modules and collected tests from garbage collection."""
    with less_waste.kept():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Makes the examples of pages slow, because some train networks, and the dearest ones of
    docstrings. After pytest has selected by mark, keeps every N-th test with `--share I/N`,
    beginning with the I-th."""
    for item in items:
        if item.path.is_relative_to(DOCS) or item.name in SLOW_EXAMPLES:
            item.add_marker(pytest.mark.slow)
    result = yield
    if share := config.getoption("share"):
        first, count = share
        left_out = [item for i, item in enumerate(items) if i % count != first % count]
        items[:] = [item for i, item in enumerate(items) if i % count == first % count]
        config.hook.pytest_deselected(items=left_out)
    return result


def share(text):
    """Parses "I/N"."""
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and int(count)):
        raise ValueError(text)
    return int(first), int(count)


@pytest.fixture
def float64():
    """Numbers of 64 bits, for the modules that mark their tests with it."""
    import jax

    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory):
    """Examples make temporary folders, which are deleted with those of the tests. `tiny_runs`
    stores results of all workers of this session in TINY_RUNS."""
    folder = tmp_path_factory.getbasetemp()
    own = folder / "examples"
    own.mkdir()
    shared = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "tiny_runs"
    shared.mkdir(exist_ok=True)
    os.environ |= {"TMPDIR": str(own), "TINY_RUNS": str(shared)}
    tempfile.tempdir = None  # read anew


def memory_is_short() -> bool:
    """Checks whether this process uses 1/6 of the machine's memory, and 2 GiB; true if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        size, physical = (os.sysconf(f"SC_{name}") for name in ("PAGE_SIZE", "PHYS_PAGES"))
    except (OSError, ValueError):
        return True
    return pages > max(physical / 6, 2**31 / size)


@pytest.fixture(scope="module", autouse=True)
def forget_compilations():
    """Clears compiled programs if memory is short. They are kept otherwise, because other files use
    some of them, but thousands of programs take gigabytes.
    """
    yield
    if memory_is_short():
        for forget in less_waste.FORGET:
            forget()


def pytest_addoption(parser):
    add = parser.getgroup("general").addoption
    add("--share", type=share, metavar="I/N", help="only every N-th test, beginning with the I-th")
    add = parser.getgroup("fuzzing").addoption
    add("--fuzz", type=int, metavar="N", help="inputs for each target; default: a few seconds'")
    add("--fuzz-seed", type=int, metavar="S", default=0, help="of the first input; default: 0")
