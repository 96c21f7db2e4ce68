"""How a command ends when it is told to: at its next safe point, and soon."""

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
GRACE = 5.0  # seconds


def stop_on_signals(leave: Callable[[], None]) -> None:
    """From now on each of SIGNALS raises KeyboardInterrupt in the main thread, which is the caller.

    What is ignored stays so, as `nohup` wants it. The main thread may be in a compilation or a
    computation, where Python cannot raise, or wait for threads that are: GRACE seconds after the
    first signal, or at the second, `leave` is called, which ends the process. Whoever handles
    signals himself meanwhile, as a training does that has steps to store, is left to it.
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
            ours.recv(1)  # a second signal, which the main thread may never see
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
