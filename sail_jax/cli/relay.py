"""Connects the processes of one run; started as a program of its own.

It runs JAX's service instead of the first process, because XLA ends each process with a stack trace
as soon as the service's process is gone. It also passes on lines between the processes: a "stop"
from one of them goes to the others, and "lost" goes out when one is gone without a "bye".
"""

import ast
import contextlib
import os
import socket
import sys
import threading
import time

STOP, LOST, BYE, HELLO = b"stop\n", b"lost\n", b"bye\n", b"hello\n"
# Seconds without an answer after which a machine counts as gone, and seconds that the others have
# to end after the first process has ended.
SILENCE = LINGER = 5


class Relay:
    """Passes on lines between the connected processes."""

    def __init__(self) -> None:
        self._connected: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._ending = False

    def serve(self, listener: socket.socket) -> None:
        """Accepts processes in an endless loop."""
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._follow, args=(connection,), daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Waits until all processes have disconnected."""
        end = time.monotonic() + seconds
        while self._connected and time.monotonic() < end:
            time.sleep(0.05)

    def _follow(self, connection: socket.socket) -> None:
        """Reads the lines of one process until it is gone."""
        _watched(connection)
        lines, line = connection.makefile("rb"), b""
        with connection, contextlib.suppress(OSError):
            if lines.readline(64) != HELLO:  # an unrelated program
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
        """Sends a line to all processes but one, unless they are already ending."""
        with self._lock:
            if self._ending:
                return
            self._ending = True
            for connection in self._connected - {but}:
                with contextlib.suppress(OSError):
                    connection.sendall(line)


def _watched(connection: socket.socket) -> None:
    """Makes the system probe idle connections, since a lost machine sends nothing."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", SILENCE - 2)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def main(how: str) -> None:
    """Serves until standard input ends, which happens when the parent process ends.

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
