"""A heartbeat of the workers of a run, at each piece."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

PATIENCE = 60.0
"""The seconds without a finished piece after which a run is reported."""


class Pulse:
    """Shared by the workers of a run, which call `beat` before each piece.

    Attributes:
      last: The time when a worker last began a piece, in seconds of `time.monotonic`.
    """

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self.last = time.monotonic()

    def beat(self) -> None:
        """Records that a worker makes progress; raises KeyboardInterrupt if the run was stopped."""
        if self._stopped.is_set():
            raise KeyboardInterrupt
        self.last = time.monotonic()

    def stop(self) -> None:
        """Stops all workers at their next piece."""
        self._stopped.set()

    @contextlib.contextmanager
    def watched(self, report: Callable[[float], None]) -> Iterator[None]:
        """Makes a context in which a thread reports that no worker makes progress.

        Args:
          report: Called in a separate thread with the seconds since the last piece, once for each
            pause of PATIENCE seconds.

        Yields:
          Nothing.
        """
        over = threading.Event()

        def watch() -> None:
            reported = 0.0
            while not over.wait(min(1.0, PATIENCE / 4)):
                pause = time.monotonic() - self.last
                if pause >= PATIENCE and self.last > reported:
                    reported = self.last
                    report(pause)

        watcher = threading.Thread(target=watch, name="pulse", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
