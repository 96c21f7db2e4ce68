"""What the terminal sees while a command works, on stderr: stdout is for results."""

import sys
import time
from typing import Any, Self, TextIO

__all__ = ["Meter", "say"]


def say(line: str = "", *, stream: TextIO | None = None, end: str = "\n") -> None:
    """A line of progress."""
    print(line, file=stream or sys.stderr, end=end, flush=True)


class Meter:
    """How far long work is: a bar where a person looks, else a line now and then.

    `meter(done, total, what)` counts bytes; `meter.tell(what)` shows work that cannot be counted.
    Silent if `quiet`.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = not quiet and sys.stderr.isatty()
        self._bar: Any = None
        self._shown, self._told = time.monotonic(), ""

    def __enter__(self) -> Self:
        if self._live:
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.SpinnerColumn(),
                progress.BarColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.description}", markup=False),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=what)
        elif not self._quiet and time.monotonic() - self._shown > 10 and done < total:
            self._shown = time.monotonic()
            say(f"  {done / total:4.0%} of {total / 1e9:.2f} GB  {what}"[:100])

    def tell(self, what: str, detail: str = "") -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=f"{what}: {detail}" if detail else what)
        elif not self._quiet and what != self._told:
            self._told = what
            say(f"  {what}")
