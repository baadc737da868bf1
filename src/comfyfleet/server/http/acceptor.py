"""Accepts connections: within the process's limit of open files, and within each address's limit."""

import asyncio
import contextlib
import errno
import json
import logging
import socket
import sys
from collections.abc import Callable
from typing import Any

from comfyfleet.errors import TooManyCalls

logger = logging.getLogger(__name__)
# Files that are no connections: databases, stores, uploads, logs, libraries.
OTHER_FILES = 256
CONNECTIONS_MIN = 16
# The largest limit that macOS accepts where it reports none.
FILES_WITHOUT_LIMIT = 10_240
# Connections accepted in one turn of the event loop.
ACCEPTS_AT_ONCE = 64
PAUSE_SECONDS = 1.0
WARN_SECONDS = 60.0
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Enough of a refused request to send the answer without a reset.
DROPPED_BYTES_MAX = 64 * 1024


def raise_files_limit() -> int:
    """Raises the soft limit of open files to the hard limit; returns the limit that now applies."""
    if sys.platform == "win32":
        return FILES_WITHOUT_LIMIT
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, FILES_WITHOUT_LIMIT):
        if wanted == resource.RLIM_INFINITY or wanted <= soft:
            continue
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return FILES_WITHOUT_LIMIT if soft == resource.RLIM_INFINITY else soft


def connections_within(files: int, wanted: int) -> int:
    """Returns how many connections fit below the limit of open files."""
    return max(CONNECTIONS_MIN, min(wanted, files - OTHER_FILES))


class ClientSocket(socket.socket):
    """A client's socket that reports when it is closed, whichever protocol used it last."""

    __slots__ = ("_on_close",)

    def __init__(self, accepted: socket.socket, on_close: Callable[[], object]) -> None:
        # The protocol is passed on because asyncio turns off Nagle's delay only for known TCP sockets.
        super().__init__(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        self._on_close: Callable[[], object] | None = on_close

    def close(self) -> None:
        super().close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


Take = Callable[[socket.socket, str], object]


class Acceptor:
    """Accepts the connections of one listening socket.

    asyncio's own loop tries again as often as its backlog says when the process is out of files, and
    logs each time. This one pauses for a second and logs once a minute.
    """

    def __init__(self, listener: socket.socket, take: Take) -> None:
        self._listener = listener
        self._take = take
        self._paused: asyncio.TimerHandle | None = None
        self._is_running = False
        self._warned_at = -WARN_SECONDS

    def start(self) -> None:
        if not self._is_running:
            self._listener.setblocking(False)
            self._is_running = True
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def stop(self) -> None:
        """Accepts no more; connections then wait in the system's queue."""
        if self._is_running:
            self._is_running = False
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
        if self._paused is not None:
            self._paused.cancel()
            self._paused = None

    def pause(self, seconds: float) -> None:
        """Stops for a moment."""
        self.stop()
        self._paused = asyncio.get_running_loop().call_later(seconds, self.start)

    def close(self) -> None:
        """Closes the listening socket: further connections are refused by the system."""
        self.stop()
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            if not self._is_running:
                return
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in OUT_OF_RESOURCES:
                    raise
                self._wait_for_resources(error)
                return
            accepted.setblocking(False)
            self._take(accepted, _host_of(address))

    def _wait_for_resources(self, error: OSError) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._warned_at >= WARN_SECONDS:
            self._warned_at = now
            logger.warning("no connection can be accepted: %s", error.strerror)
        self.pause(PAUSE_SECONDS)


def _host_of(address: Any) -> str:
    """Returns the client's address; an empty text for a Unix socket."""
    return str(address[0]) if isinstance(address, tuple) else ""


def refuse(client: socket.socket) -> None:
    """Answers 429 to a client whose address has too many connections without a valid key."""
    error = {
        "code": TooManyCalls.code,
        "message": "this address has too many connections without a valid key",
        "details": {},
    }
    body = json.dumps({"error": error}).encode()
    head = (
        "HTTP/1.1 429 Too Many Requests\r\nconnection: close\r\nretry-after: 5\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with client, contextlib.suppress(OSError):
        # Unread bytes would turn the close into a reset, and the client might lose the answer.
        with contextlib.suppress(BlockingIOError):
            client.recv(DROPPED_BYTES_MAX)
        client.send(head.encode() + body)
        client.shutdown(socket.SHUT_WR)
