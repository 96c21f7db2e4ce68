"""Writes to the terminal: progress and errors to stderr, results to stdout.

All text is escaped, because names in files may contain control sequences.
"""

import re
import sys
import time
from typing import TYPE_CHECKING, TextIO

from sail_jax.checks import escaped, shortened, storage

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.status import Status

# The largest length of a message in characters.
LONGEST = 300


def say(line: str = "", *, stream: TextIO | None = None, end: str = "\n") -> None:
    """Prints a line of progress, or an error.

    Args:
      line: The text.
      stream: The output stream; None for stderr.
      end: The text after the line.
    """
    print(_lines(line), file=stream or sys.stderr, end=end, flush=True)


def show(text: object, *, end: str = "\n") -> None:
    """Prints a result on stdout.

    Args:
      text: One line or several.
      end: The text after them.
    """
    print(_lines(str(text)), end=end)


def fitted(message: str, longest: int = LONGEST) -> str:
    """Shortens a message to one line of limited length.

    The longest words are shortened in their middle first, then the whole message.

    Args:
      message: The message.
      longest: The largest length in characters.

    Returns:
      The line, with control characters escaped.

    >>> fitted("no tensor '\\x1b[31m" + 90 * "b" + "' here", 60)
    "no tensor '\\\\x1b[31mbbbbbbbbbb...bbbbbbbbbbbbbbbbb' here"
    """
    line = escaped(message)
    for word in (120, 80, 40):
        if len(line) > longest:
            line = re.sub(rf"\S{{{word},}}", lambda match: shortened(match[0], word), line)  # noqa: B023
    return shortened(line, longest)


def _lines(text: str) -> str:
    """Escapes a text line by line, keeping line breaks."""
    return "\n".join(map(escaped, text.split("\n")))


class Meter:
    """Shows the progress of long work: a live bar in a terminal, otherwise some lines.

    Use it in a `with` statement, which removes the live bar at the end.

    Args:
      quiet: Whether to show nothing.
      unit: The name of what is counted, in the plural.
    """

    def __init__(self, quiet: bool = False, unit: str = "bytes") -> None:
        self._quiet = quiet
        self._unit = unit
        self._live = not quiet and sys.stderr.isatty()
        self._bar: Progress | None = None
        self._status: Status | None = None
        self._said_at, self._said = time.monotonic(), ""

    def __enter__(self) -> "Meter":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        for shown in (self._bar, self._status):
            if shown is not None:
                shown.stop()

    def __call__(self, done: int, total: int, what: str) -> None:
        """Shows the bytes or other units done, the total, and the last finished item."""
        if self._live:
            if self._bar is None:
                self._stop()
                self._bar = _bar(self._unit)
                self._bar.start()
                self._bar.add_task("", completed=done, total=total)
            bar, text = self._bar, escaped(what)
            bar.update(bar.task_ids[0], completed=done, total=total, description=text)
        elif not self._quiet and time.monotonic() - self._said_at > 10 and done < total:
            self._said_at = time.monotonic()
            whole = storage(total) if self._unit == "bytes" else f"{total} {self._unit}"
            say(f"  {done / total:4.0%} of {whole}  {fitted(what, 70)}")

    def tell(self, what: str, detail: str) -> None:
        """Shows the current step of work without a count.

        Args:
          what: The current step. Without a terminal, a line is printed when it changes.
          detail: The current item of the step, shown only in the live bar.
        """
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


def _bar(unit: str) -> "Progress":
    """Makes the live bar, as wide as the terminal."""
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    fixed = Column(no_wrap=True)
    rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)  # the remaining width
    if unit == "bytes":
        amounts = (
            progress.DownloadColumn(table_column=fixed),
            progress.TransferSpeedColumn(table_column=fixed),
        )
    else:
        amounts = (progress.MofNCompleteColumn(table_column=fixed),)
    return progress.Progress(
        progress.BarColumn(bar_width=20),
        *amounts,
        progress.TimeRemainingColumn(table_column=fixed),
        progress.TextColumn("{task.description}", markup=False, table_column=rest),
        console=Console(stderr=True),
        transient=True,
        expand=True,
    )
