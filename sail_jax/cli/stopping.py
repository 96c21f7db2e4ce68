"""Ends a command that is told to stop: at its next safe point, and soon."""

import contextlib
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

from sail_jax.cli.progress import say

__all__ = ["SIGNALS", "stop_on_signals"]

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
                if hasattr(signal, name))  # fmt: skip
# The seconds that a command has to stop by itself.
GRACE = 5.0


def stop_on_signals(leave: Callable[[], None]) -> None:
    """Makes each of SIGNALS stop the command, by a KeyboardInterrupt in the main thread.

    It is called in the main thread. Signals that are ignored stay so, as `nohup` wants it.

    Python cannot raise in the main thread while that is in a compilation or a computation, or waits
    for threads that are. GRACE seconds after the first signal, or at the second one, `leave` is
    therefore called. If other code handles signals meanwhile, as a training does that has steps to
    store, `leave` is not called, and that code decides when to end.

    Args:
      leave: Ends the process.
    """
    told = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if told:
            leave()
        told = True
        raise KeyboardInterrupt

    handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, stop)
    # Python writes each signal's number here at once, even if no handler can run yet.
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        """Woken by the signal itself, whatever the main thread is at."""
        with theirs:  # open as long as a second signal may come
            while not set(ours.recv(1)) & set(handled):
                pass
            answer()

    def answer() -> None:
        ours.settimeout(1)
        with contextlib.suppress(TimeoutError):
            # This is a second signal, which the main thread may never see.
            ours.recv(1)
            return leave_unless_taken_over()
        with contextlib.suppress(OSError):  # the terminal is gone
            say("sail-jax: told to stop; waiting for the next safe point")
        ours.settimeout(GRACE - 1)
        with contextlib.suppress(TimeoutError):
            ours.recv(1)
        leave_unless_taken_over()

    def leave_unless_taken_over() -> None:
        if signal.getsignal(handled[0]) is stop:
            leave()

    if handled:
        threading.Thread(target=watch, name="stopping", daemon=True).start()
