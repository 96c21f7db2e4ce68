"""What the terminal sees of a run: each stage as it starts, and what it took."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Stage = Callable[[str, Callable[[], Mapping[str, Any]]], dict[str, Any]]


def say(line: str = "", *, stream: TextIO | None = None, end: str = "\n") -> None:
    """A line of progress, on stderr: stdout is for results."""
    print(line, file=stream or sys.stderr, end=end, flush=True)


def reporting(stage: Stage, *, stream: TextIO | None = None) -> Stage:
    """The same stage, telling its name as it starts and its seconds (or `kept`) when it is done."""

    def reported(name: str, compute: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        computed = False

        def noted() -> Mapping[str, Any]:
            nonlocal computed
            computed = True
            return compute()

        say(f"  {name} ...", stream=stream, end="")
        start = time.perf_counter()
        try:
            result = stage(name, noted)
        except BaseException:
            say(" stopped", stream=stream)
            raise
        say(f" {time.perf_counter() - start:.1f} s" if computed else " kept", stream=stream)
        return result

    return reported
