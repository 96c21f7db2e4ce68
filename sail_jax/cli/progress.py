"""What the terminal sees: progress and errors on stderr, results on stdout."""

import re
import sys
import time
from typing import Any, Self, TextIO

from sail_jax.checks import escaped

__all__ = ["Meter", "fitted", "say", "show"]

LONGEST = 300  # characters of a message


def say(line: str = "", *, stream: TextIO | None = None, end: str = "\n") -> None:
    """A line of progress."""
    print(_lines(line), file=stream or sys.stderr, end=end, flush=True)


def show(text: object, *, end: str = "\n") -> None:
    """A result, of one line or of several."""
    print(_lines(str(text)), end=end)


def fitted(message: str, longest: int = LONGEST) -> str:
    """A message as one line that is not too long, the longest words of it cut in their middle.

    >>> fitted("no tensor '\\x1b[31m" + 90 * "b" + "' here", 60)
    "no tensor '\\\\x1b[31mbbbbbbbbbb...bbbbbbbbbbbbbbbbb' here"
    """
    line = escaped(message)
    for word in (120, 80, 40):
        if len(line) > longest:
            line = re.sub(rf"\S{{{word},}}", lambda match: _without_middle(match[0], word), line)  # noqa: B023
    return _without_middle(line, longest)


def _lines(text: str) -> str:
    return "\n".join(map(escaped, text.split("\n")))


def _without_middle(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    tail = (longest - 3) // 2
    return f"{text[: longest - 3 - tail]}...{text[-tail:]}"


class Meter:
    """How far long work is: shown live where a person looks, else a line now and then.

    `meter(done, total, what)` counts bytes; `meter.tell(what, detail)` shows work that cannot be
    counted. Silent if `quiet`.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = not quiet and sys.stderr.isatty()
        self._bar: Any = None
        self._status: Any = None
        self._said_at, self._said = time.monotonic(), ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        for shown in (self._bar, self._status):
            if shown is not None:
                shown.stop()

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._live:
            if self._bar is None:
                self._stop()
                self._bar = _bar()
                self._bar.start()
                self._bar.add_task("", completed=done, total=total)
            self._bar.update(self._bar.task_ids[0], completed=done, description=escaped(what))
        elif not self._quiet and time.monotonic() - self._said_at > 10 and done < total:
            self._said_at = time.monotonic()
            say(f"  {done / total:4.0%} of {total / 1e9:.2f} GB  {fitted(what, 70)}")

    def tell(self, what: str, detail: str) -> None:
        if self._live:
            from rich.console import Console
            from rich.text import Text

            if self._status is None:
                self._status = Console(stderr=True).status("")
                self._status.start()
            self._status.update(Text(escaped(f"{what}: {detail}")))
        elif not self._quiet and what != self._said:
            self._said = what
            say(f"  {what}")


def _bar() -> Any:
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    fixed = Column(no_wrap=True)
    rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)  # what the others leave
    return progress.Progress(
        progress.BarColumn(bar_width=20),
        progress.DownloadColumn(table_column=fixed),
        progress.TransferSpeedColumn(table_column=fixed),
        progress.TimeRemainingColumn(table_column=fixed),
        progress.TextColumn("{task.description}", markup=False, table_column=rest),
        console=Console(stderr=True),
        transient=True,
        expand=True,
    )
