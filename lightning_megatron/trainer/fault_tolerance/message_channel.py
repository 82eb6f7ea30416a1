"""Messages of the failure watch: JSON objects, one a line, over a connection on which nothing waits.

A process that holds a connection tells by that that it lives; the kernel closes it when the process ends, however that
comes. A fork would hold it open for its parent: `close_in_forks` closes it there.
"""

import json
import os
import selectors
import socket
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]

# The longest line, which has a traceback.
MOST_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16


class MessageChannel:
    """One end of a connection. `timeout_seconds` is how long the other end may be silent."""

    def __init__(self, sock: socket.socket, timeout_seconds: float, most_bytes: int = MOST_BYTES) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            # Otherwise the kernel gives up a connection without answers after some 15 minutes.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * timeout_seconds))
        self.socket = sock
        self.most_bytes = most_bytes
        self.is_open = True
        """Whether the other end may still say something."""
        self.heard_seconds = time.monotonic()
        """When the other end said something last."""
        self._incoming = bytearray()
        self._outgoing = bytearray()

    @property
    def is_blocked(self) -> bool:
        """Whether messages wait because the other end does not take them."""
        return bool(self._outgoing)

    def send(self, message: Message) -> None:
        """Sends a message, or as much of it as the other end takes now; `flush` sends the rest."""
        self.send_line(json.dumps(message).encode())

    def send_line(self, line: bytes) -> None:
        """Sends bytes without a line feed in them."""
        self._outgoing += line + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what waits, as far as the other end takes it."""
        try:
            while self._outgoing:
                del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            # What the other end said before it went is still to be read, and then that it went.
            self._outgoing.clear()

    def lines(self) -> list[bytes]:
        """Lines that have come; `is_open` says whether there may be more."""
        self._receive()
        *lines, rest = bytes(self._incoming).split(b"\n")
        self._incoming = bytearray(rest)
        if len(rest) > self.most_bytes:
            self.is_open = False
        return lines

    def next_line(self, until_seconds: float) -> bytes | None:
        """The next line, once it has come; None where none comes until then."""
        while b"\n" not in self._incoming:
            wait_seconds = until_seconds - time.monotonic()
            if not self.is_open or wait_seconds <= 0:
                return None
            with selectors.DefaultSelector() as selector:
                selector.register(self.socket, selectors.EVENT_READ)
                selector.select(wait_seconds)
            self._receive()
        line, _, rest = bytes(self._incoming).partition(b"\n")
        self._incoming = bytearray(rest)
        return line

    def _receive(self) -> None:
        try:
            while len(self._incoming) <= self.most_bytes:
                chunk = self.socket.recv(_CHUNK_BYTES)
                if not chunk:
                    self.is_open = False
                    return
                self._incoming += chunk
                self.heard_seconds = time.monotonic()
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False

    def messages(self) -> list[Message]:
        """Messages that have come, from an end that is known to be a rank's."""
        return [json.loads(line) for line in self.lines()]

    def end(self) -> None:
        """Says that nothing more will be said; what was said still arrives."""
        self.flush()
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            # The other end is gone already.
            self.is_open = False

    def close(self) -> None:
        """Closes the connection."""
        self.is_open = False
        self.socket.close()


def close_in_forks(owner: Any, sockets_of: Callable[[Any], list[socket.socket]]) -> None:
    """Closes the sockets of `owner` in every process that is forked from this one while the owner is there."""
    reference = weakref.ref(owner)

    def close() -> None:
        held = reference()
        for sock in [] if held is None else sockets_of(held):
            sock.close()

    os.register_at_fork(after_in_child=close)
