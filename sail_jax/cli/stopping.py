"""Ends a command that is told to stop: at its next safe point, and soon."""

# `main` imports this before signals are handled: what takes time to import is imported below.
import os
import signal
from collections.abc import Callable
from types import FrameType

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
                if hasattr(signal, name))  # fmt: skip
# The seconds that a command has to stop by itself.
GRACE = 5.0


def leave_on_signals() -> None:
    """Makes each of SIGNALS end the process at once with code 130, before any work has begun.

    It is called in the main thread, as the first thing that a command does. Before it come the
    start of Python and some 7 ms in which `sail_jax` and this module are imported: a signal does
    then what Python makes of it. Signals that are ignored stay so, as `nohup` wants it.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        try:
            os.write(2, b"sail-jax: interrupted\n")
        finally:  # the terminal may be gone
            os._exit(130)

    _handle(leave)


def stop_on_signals(leave: Callable[[], None]) -> None:
    """Makes each of SIGNALS stop the command, by a KeyboardInterrupt in the main thread.

    It is called in the main thread. Signals that are ignored stay so.

    Python cannot raise in the main thread while that is in a compilation or a computation, or waits
    for threads that are. GRACE seconds after the first signal, or at the second one, `leave` is
    therefore called. It is called at once while the main thread imports a module: modules of
    compiled code, broken off there, end the process in ways of their own. If other code handles
    signals meanwhile, as a training does that has steps to store, `leave` is not called, and that
    code decides when to end. Signals are ignored once the interpreter is ending.

    Args:
      leave: Ends the process.
    """
    import atexit
    import contextlib
    import socket
    import threading

    from sail_jax.cli.progress import say

    told = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if told or importing(frame):
            leave()
        told = True
        raise KeyboardInterrupt

    # Python writes each signal's number here at once, even if no handler can run yet.
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    handled = _handle(stop)

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
    # What the command was to do is done then.
    atexit.register(_handle, signal.SIG_IGN)


_last: list[Callable[[], None]] = []


def before_leaving(do: Callable[[], None]) -> None:
    """Adds to what is done before an interrupted process ends, in any thread; it may not raise."""
    _last.append(do)


def taken_leave() -> None:
    """Does what `before_leaving` was given, once."""
    while _last:
        _last.pop()()


def importing(frame: FrameType | None) -> bool:
    """Finds out whether a module is being imported, by the main thread.

    Args:
      frame: What a handler of signals is given: where the main thread is.

    Returns:
      Whether it is within an import.
    """
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib."):
        frame = frame.f_back
    return frame is not None


def _handle(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> list[int]:
    """Gives SIGNALS to a handler, except those that are ignored; returns those that it handles."""
    handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handler)
    return handled
