"""A command of sail-jax that also measures how long JAX compiles its programs.

`accelerator` starts it. Usage: python -m experiments.bench._compiling FILE WORD... runs `sail-jax
WORD...`, and appends a line with the seconds and the last word to FILE.
"""

import sys
from typing import Any

import jax

from sail_jax.cli.main import main

EVENT = "/jax/core/compile/backend_compile_duration"


def run(file: str, *words: str) -> int:
    """Runs a command, and returns its exit code."""
    seconds = [0.0]

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == EVENT:
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        return main(words)
    finally:
        with open(file, "a") as lines:
            print(sum(seconds), words[-1], file=lines)


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
