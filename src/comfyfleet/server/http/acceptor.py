"""Accepts connections: within the process's limit of open files, and within each address's limit."""

import asyncio
import contextlib
import errno
import json
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from comfyfleet.errors import TooManyCalls, Unavailable

logger = logging.getLogger(__name__)
# Files that are neither connections nor transfers: databases, child processes, logs, libraries.
OTHER_FILES = 256
CONNECTIONS_MIN = 16
TRANSFERS_MIN = 4
# The received bytes, and while they are stored, their type.
FILES_PER_UPLOAD = 2
# The largest limit that macOS accepts where it reports none.
FILES_WITHOUT_LIMIT = 10_240
# Connections accepted in one turn of the event loop.
ACCEPTS_AT_ONCE = 64
# Connections that wait in the system's queue. Ten thousand workers may come back at the same moment.
LISTEN_BACKLOG = 4096
PAUSE_SECONDS = 1.0
WARN_SECONDS = 60.0
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Bytes of a rejected request to read, so that the response is sent without a reset.
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


@dataclass(frozen=True)
class FileShares:
    """How many of a process's files each use may have, so that together they stay within its limit."""

    connections: int
    downloads: int
    uploads: int


def divide_files(files: int, connections_wanted: int) -> FileShares:
    """Divides the limit of open files. Downloads and uploads hold files in addition to their connections."""
    free = max(0, files - OTHER_FILES)
    downloads = max(TRANSFERS_MIN, free // 4)
    uploads = max(TRANSFERS_MIN, free // 8 // FILES_PER_UPLOAD)
    left = free - downloads - uploads * FILES_PER_UPLOAD
    return FileShares(max(CONNECTIONS_MIN, min(connections_wanted, left)), downloads, uploads)


class ClientSocket(socket.socket):
    """A client's socket that reports when it is closed, whichever protocol used it last, and counts the
    bytes that the system has taken for sending."""

    __slots__ = ("_on_close", "sent_bytes")

    def __init__(self, accepted: socket.socket, on_close: Callable[[], object]) -> None:
        # The protocol is passed on because asyncio turns off Nagle's delay only for known TCP sockets.
        super().__init__(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        self._on_close: tuple[Callable[[], object], ...] = (on_close,)
        self.sent_bytes = 0

    def send(self, data: Any, flags: int = 0) -> int:
        count = super().send(data, flags)
        self.sent_bytes += count
        return count

    def sendmsg(self, *arguments: Any) -> int:
        """Used by newer versions of asyncio, which send several buffers at once."""
        count = super().sendmsg(*arguments)
        self.sent_bytes += count
        return count

    def close(self) -> None:
        super().close()
        callbacks, self._on_close = self._on_close, ()
        for callback in callbacks:
            callback()

    def add_close_callback(self, callback: Callable[[], object]) -> None:
        self._on_close += (callback,)


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
        """Stops accepting connections. New ones then wait in the system's queue."""
        if self._is_running:
            self._is_running = False
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
        if self._paused is not None:
            self._paused.cancel()
            self._paused = None

    def pause(self, seconds: float) -> None:
        """Stops accepting connections for the given seconds."""
        self.stop()
        self._paused = asyncio.get_running_loop().call_later(seconds, self.start)

    def close(self) -> None:
        """Closes the listening socket: further connections are refused by the system. Those in the system's queue
        are accepted first, because closing the listener would reset them."""
        if self._is_running or self._paused is not None:
            self._is_running = True
            for _ in range(LISTEN_BACKLOG):
                if not self._accept_one():
                    break
        self.stop()
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            if not self._is_running or not self._accept_one():
                return

    def _accept_one(self) -> bool:
        """Returns False if there is no connection to accept, or no room for it."""
        try:
            accepted, address = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in OUT_OF_RESOURCES:
                raise
            self._wait_for_resources(error)
            return False
        accepted.setblocking(False)
        self._take(accepted, _host_of(address))
        return True

    def _wait_for_resources(self, error: OSError) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._warned_at >= WARN_SECONDS:
            self._warned_at = now
            logger.warning("no connection can be accepted: %s", error.strerror)
        self.pause(PAUSE_SECONDS)


def _host_of(address: Any) -> str:
    """Returns the client's address, or an empty string for a Unix socket."""
    return str(address[0]) if isinstance(address, tuple) else ""


def refuse(client: socket.socket) -> None:
    """Answers 429 to a client whose address has too many connections without a valid key."""
    message = "this address has too many connections without a valid key"
    _answer(client, HTTPStatus.TOO_MANY_REQUESTS, TooManyCalls.code, message, retry_seconds=5)


def refuse_when_stopping(client: socket.socket) -> None:
    """Answers 503 to a client whose connection no process can take any more."""
    message = "this control plane is stopping; try again"
    _answer(client, HTTPStatus.SERVICE_UNAVAILABLE, Unavailable.code, message, retry_seconds=1)


def _answer(
    client: socket.socket, status: HTTPStatus, code: str, message: str, *, retry_seconds: int
) -> None:
    body = json.dumps({"error": {"code": code, "message": message, "details": {}}}).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nconnection: close\r\nretry-after: {retry_seconds}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with client, contextlib.suppress(OSError):
        # Unread bytes would turn the close into a reset, and the client might lose the answer.
        with contextlib.suppress(BlockingIOError):
            client.recv(DROPPED_BYTES_MAX)
        client.send(head.encode() + body)
        client.shutdown(socket.SHUT_WR)
