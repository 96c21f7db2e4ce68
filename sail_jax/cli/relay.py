"""The process through which several that run one study hear of each other; run as a program.

It serves JAX, in the place of the first of them: XLA ends each process with its stack as soon as
the one that serves it is gone. And it passes on what they write, a line at a time: "stop" from one
of them goes to the others, and "lost" does where one is gone that has not written "bye".
"""

import ast
import contextlib
import os
import socket
import sys
import threading
import time

STOP, LOST, BYE, HELLO = b"stop\n", b"lost\n", b"bye\n", b"hello\n"
# Seconds without an answer after which a machine counts as gone, and those that are left to the
# others to end when the first process has.
SILENCE = LINGER = 5


class Relay:
    """Passes on lines between processes that are connected with it."""

    def __init__(self) -> None:
        self._connected: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._ending = False

    def serve(self, listener: socket.socket) -> None:
        """Accepts processes, for ever."""
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._follow, args=(connection,), daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Waits until no process is connected any more."""
        end = time.monotonic() + seconds
        while self._connected and time.monotonic() < end:
            time.sleep(0.05)

    def _follow(self, connection: socket.socket) -> None:
        """Reads what one process writes, until it is gone."""
        _watched(connection)
        lines, line = connection.makefile("rb"), b""
        with connection, contextlib.suppress(OSError):
            if lines.readline(64) != HELLO:  # a stranger
                return
            with self._lock:
                self._connected.add(connection)
            while (line := lines.readline(64)) == STOP:
                self._tell(STOP, connection)
        with self._lock:
            self._connected.discard(connection)
        if line != BYE:
            self._tell(LOST, connection)

    def _tell(self, line: bytes, but: socket.socket) -> None:
        """Writes a line to all processes but one, unless they are ending already."""
        with self._lock:
            if self._ending:
                return
            self._ending = True
            for connection in self._connected - {but}:
                with contextlib.suppress(OSError):
                    connection.sendall(line)


def _watched(connection: socket.socket) -> None:
    """Lets the system ask for signs of life: of a machine that is gone, nothing comes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", SILENCE - 2)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def main(how: str) -> None:
    """Serves until standard input ends, as it does with the process that started this one.

    Args:
      how: The arguments of JAX's service, and its options, as a tuple in Python's notation.
    """
    import importlib

    given, options = ast.literal_eval(how)
    xla = importlib.import_module("jaxlib._jax")
    service = xla.get_distributed_runtime_service(*given, **options)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    relay, listener = Relay(), socket.create_server(("", 0), family=family, dualstack_ipv6=both)
    threading.Thread(target=relay.serve, args=(listener,), daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    orderly = sys.stdin.read()
    relay.wait(LINGER)
    if orderly:
        service.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
