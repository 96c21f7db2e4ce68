import ctypes
import os
import subprocess
import sys

import pytest

# Blocks of 4 MB are written, freed and taken again. How many pages does the system have to give?
PROGRAM = """
import resource, sys
import numpy as np
from sail_jax.cli.memory import reuse_freed_memory
if sys.argv[1] == "reuse":
    reuse_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(1 << 22, np.uint8)
before = faults()
for _ in range(50):
    np.ones(1 << 22, np.uint8), np.ones(1 << 22, np.uint8)
print(faults() - before)
"""


def page_faults(way, **environment):
    own = ("MALLOC_", "GLIBC_TUNABLES")
    env = {name: x for name, x in os.environ.items() if not name.startswith(own)}
    command = [sys.executable, "-c", PROGRAM, way]
    run = subprocess.run(command, env={**env, **environment}, capture_output=True, check=True)
    return int(run.stdout)


@pytest.mark.slow
@pytest.mark.skipif(
    os.name != "posix" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc alone has it"
)
def test_freed_memory_is_used_again_unless_the_environment_says_how():
    fresh, reused = page_faults("default"), page_faults("reuse")
    # 100 blocks of a thousand pages, or of two huge ones; of those reused none but the first two.
    assert reused < fresh / 10
    own = page_faults("reuse", MALLOC_TRIM_THRESHOLD_="0", MALLOC_MMAP_THRESHOLD_="65536")
    assert own > 10 * reused


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells a process its peak")
@pytest.mark.parametrize(
    "command", ["align a b out", "transplant a b out", "upcycle a out --experts 2"]
)
def test_a_limit_below_the_program_is_refused_within_it(command):
    """Without a file: nothing is opened before."""
    script = (
        "import re, sys; from sail_jax.cli.main import main; "
        f"code = main({[*command.split(), '--max-memory', '200MB']}); "
        "print(code, re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    code, peak = map(int, done.stdout.split())
    assert code == 2, done.stderr
    assert "--max-memory: the program alone needs 300 MiB, got 190 MiB" in done.stderr
    assert peak < 200e6 / 1024
