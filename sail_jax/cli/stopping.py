"""Stops a command on a signal: at its next safe point, and soon."""

# `main` imports this module before signals are handled, so slow imports are in the functions below.
import os
import signal
from collections.abc import Callable
from types import FrameType

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
                if hasattr(signal, name))  # fmt: skip
# The seconds that a command has for stopping at a safe point.
GRACE = 5.0


def leave_on_signals() -> None:
    """Makes each of SIGNALS end the process at once with code 130, before any work begins.

    Call it in the main thread, first of all. Only Python's start and the import of `sail_jax` and
    this module (some 7 ms) come before it; Python's defaults handle signals during that time.
    Ignored signals stay ignored, as `nohup` requires.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        try:
            os.write(2, b"sail-jax: interrupted\n")
        finally:  # the terminal may no longer exist
            os._exit(130)

    _handle(leave)


def stop_on_signals(leave: Callable[[], None]) -> None:
    """Makes each of SIGNALS stop the command, by a KeyboardInterrupt in the main thread.

    Call it in the main thread. Ignored signals stay ignored.

    Python cannot raise in the main thread during a compilation or a computation, or while it waits
    for other threads that compute. `leave` is therefore called GRACE seconds after the first
    signal, or at the second one. It is called at once while the main thread imports a module,
    because interrupted imports of compiled modules crash the process. If other code handles signals
    meanwhile, such as a training run that must store its steps, `leave` is not called. That code
    then decides when to end. Signals are ignored while the interpreter shuts down.

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

    # Python immediately writes the number of each signal here, even while no handler can run.
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    handled = _handle(stop)

    def watch() -> None:
        """Handles a signal when it arrives, regardless of the state of the main thread."""
        with theirs:  # stays open while a second signal may come
            while not set(ours.recv(1)) & set(handled):
                pass
            answer()

    def answer() -> None:
        ours.settimeout(1)
        with contextlib.suppress(TimeoutError):
            # This is a second signal, which the main thread may never process.
            ours.recv(1)
            return leave_unless_taken_over()
        with contextlib.suppress(OSError):  # the terminal no longer exists
            say("sail-jax: stopping at the next safe point")
        ours.settimeout(GRACE - 1)
        with contextlib.suppress(TimeoutError):
            ours.recv(1)
        leave_unless_taken_over()

    def leave_unless_taken_over() -> None:
        if signal.getsignal(handled[0]) is stop:
            leave()

    if handled:
        threading.Thread(target=watch, name="stopping", daemon=True).start()
    # The command has finished its work by then.
    atexit.register(_handle, signal.SIG_IGN)


def importing(frame: FrameType | None) -> bool:
    """Checks whether the main thread is importing a module.

    Args:
      frame: The current frame of the main thread, from a signal handler.

    Returns:
      Whether the frame is within an import.
    """
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib."):
        frame = frame.f_back
    return frame is not None


def _handle(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> list[int]:
    """Sets a handler for SIGNALS, except ignored ones, and returns the handled signals."""
    handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handler)
    return handled
