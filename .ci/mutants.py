"""Applies the errors of mutants.yaml to a copy of the tree, one at a time, and runs quick tests.

An error is found if a test fails with it that passes without it. Errors that change no result carry
the reason under `equivalent`, and are not run. The exit code is 1 if under 95 % are found.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", ".programs", "__pycache__", ".*_cache", "_build", "generated", "results"
)
SHARE = 0.95


class Mutant(NamedTuple):
    """One plausible error: `old` occurs once in `file`, and `tests` are of the room of `file`.

    The examples of the file are tests, too.
    """

    room: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    def source(self, root: Path) -> str:
        """The mutated source; ValueError unless the old text occurs exactly once."""
        source = (root / self.file).read_text()
        count = source.count(self.old)
        if self.old == self.new or count != 1:
            raise ValueError(f"{self.name}: expected once in {self.file}: {self.old!r}; {count=}")
        return source.replace(self.old, self.new)


def listed() -> list[Mutant]:
    """All mutants, in the order of the list."""
    rooms = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    found = []
    for room, entries in rooms.items():
        for entry in entries:
            tests = tuple(entry.pop("tests").split())
            found.append(Mutant(room=room, tests=tests, **entry))
    return found


def failing(copy: Path, tests: Sequence[str], *options: str) -> list[str]:
    """The tests that fail in the copy; RuntimeError if tests could not be run."""
    shutil.rmtree(copy / ".pytest_cache", ignore_errors=True)
    programs = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / "tests" / ".programs")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", *options, *tests],
        cwd=copy, env={**programs, **os.environ, "PYTHONPATH": str(copy)},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    if done.returncode not in (0, 1, 5):  # 5: no test of the room is quick
        raise RuntimeError(f"pytest {' '.join(tests)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    last = copy / ".pytest_cache/v/cache/lastfailed"
    return list(json.loads(last.read_text())) if done.returncode == 1 else []


def main(words: list[str]) -> int:
    """Runs the selected mutants, all by default, and returns the exit code."""
    chosen = [m for m in listed() if not words or any(w in " ".join(m[:3]) for w in words)]
    if not chosen:
        sys.exit(f"no room, name or file of .ci/mutants.yaml has any of {words}")
    failed = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(ROOT, Path(folder) / "tree", ignore=LEFT_OUT))
        for mutant in chosen:
            mutated, file = mutant.source(copy), copy / mutant.file
            if mutant.equivalent:
                print(f"equivalent {mutant.room}: {mutant.name}: {mutant.equivalent}", flush=True)
                continue
            original, start = file.read_text(), time.monotonic()
            file.write_text(mutated)
            failed[mutant] = failing(copy, [mutant.file, *mutant.tests], "-x")
            file.write_text(original)
            seconds, word = time.monotonic() - start, "found" if failed[mutant] else "NOT found"
            by = failed[mutant][0] if failed[mutant] else " ".join(mutant.tests)
            print(f"{word:9} {seconds:4.0f} s  {mutant.room}: {mutant.name}\n  {by}", flush=True)
        noticed = sorted({test for tests in failed.values() for test in tests})
        broken = failing(copy, noticed) if noticed else []
    for test in broken:
        print(f"{test} fails without an error, too")
    found = sum(bool(set(tests) - set(broken)) for tests in failed.values())
    print(f"{found} of {len(failed)} found, {len(chosen) - len(failed)} equivalent")
    return int(found < SHARE * len(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
