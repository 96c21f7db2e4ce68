"""Wall time and peak memory of whole processes."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# A child's peak counts the memory of the process that started it, as it was at that moment; so a
# bare interpreter starts it, not the benchmark, which has drawn gigabytes of random numbers.
_STARTER = """
import json, os, sys, time
log, *command = sys.argv[1:]
to_log = (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
both = (os.POSIX_SPAWN_DUP2, 1, 2)
start = time.perf_counter()
child = os.posix_spawnp(command[0], command, os.environ, file_actions=[to_log, both])
_, status, usage = os.wait4(child, 0)
seconds = time.perf_counter() - start
unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB elsewhere
print(json.dumps([seconds, usage.ru_maxrss * unit, os.waitstatus_to_exitcode(status)]))
"""

# Reads all files but the last into one reused buffer and writes the first to the last.
_COPIER = """
import os, sys
sync, *files, out = sys.argv[1:]
buffer = memoryview(bytearray(1 << 20))
target = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
for i, file in enumerate(files):
    source = os.open(file, os.O_RDONLY)
    while n := os.readv(source, [buffer]):
        if i == 0:
            os.write(target, buffer[:n])
    os.close(source)
if sync == "sync":
    os.fsync(target)
"""


class Sample(NamedTuple):
    """One run of a command.

    Attributes:
      seconds: Its wall time.
      peak: Its largest resident memory in bytes.
      failure: Why it failed; "" if it did not.
    """

    seconds: float
    peak: int
    failure: str


def measure(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Sample:
    """Runs a command to its end, and measures it.

    What the system has still to write is flushed to disk before the clock starts.

    Args:
      command: The words of the command.
      log: The file for its output.
      env: Variables to be added to this process's environment.

    Returns:
      The measurement. A command that fails is reported in it, not raised.
    """
    if hasattr(os, "sync"):
        os.sync()
    start = [sys.executable, "-I", "-S", "-c", _STARTER, str(log), *command]
    # Whoever forbids compiled Python here would have every run compile it anew.
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.run(
        start, env={**inherited, **(env or {})}, capture_output=True, text=True
    )
    if process.returncode:
        return Sample(float("nan"), 0, process.stderr.strip().splitlines()[-1])
    seconds, peak, status = json.loads(process.stdout)
    if status == 0:
        return Sample(seconds, peak, "")
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return Sample(seconds, peak, f"exit {status}: {said[-1].strip() if said else 'silent'}")


def copying(files: Sequence[Path], out: Path, *, sync: bool) -> list[str]:
    """Returns the command that reads files and writes a copy of the first, and does nothing else.

    It is the limit that no merge of these files can beat.
    """
    words = ["sync" if sync else "no", *map(str, files), str(out)]
    return [sys.executable, "-I", "-S", "-c", _COPIER, *words]
