"""Accepts connections within the process's limit of open files and each address's limit."""

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
# Open files reserved for everything except connections and transfers, such as databases, child
# processes, logs and libraries.
OTHER_FILES = 256
# Minimum numbers of connections and of downloads or uploads, even if the limit of open files is
# very low.
CONNECTIONS_MIN = 16
TRANSFERS_MIN = 4
# An upload keeps one file open for its content and, while it is stored, one for its type.
FILES_PER_UPLOAD = 2
# The limit used if the system reports none. macOS doesn't accept a larger one.
FILES_WITHOUT_LIMIT = 10_240
# Maximum number of connections accepted in one iteration of the event loop.
ACCEPTS_AT_ONCE = 64
# Length of the operating system's queue of connections that haven't been accepted yet. Thousands of
# workers may reconnect at the same moment.
LISTEN_BACKLOG = 4096
# Seconds to stop accepting connections after the process has run out of files or memory.
PAUSE_SECONDS = 1.0
WARN_SECONDS = 60.0
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Up to this many bytes of a rejected request are read. Closing a socket with unread data resets the
# connection, and the client might lose the response.
DROPPED_BYTES_MAX = 64 * 1024


def raise_files_limit() -> int:
    """Raises the soft limit of open files to the hard limit, and returns the resulting limit."""
    if sys.platform == "win32":
        return FILES_WITHOUT_LIMIT
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (hard, FILES_WITHOUT_LIMIT):
        if limit == resource.RLIM_INFINITY or limit <= soft:
            continue
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return limit
    return FILES_WITHOUT_LIMIT if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True)
class FileShares:
    """The maximum numbers of connections, downloads and uploads that together stay within the
    process's limit of open files."""

    connections: int
    downloads: int
    uploads: int


def divide_files(files: int, connections_wanted: int) -> FileShares:
    """Divides the limit of open files. Downloads and uploads open files in addition to their
    connections."""
    free = max(0, files - OTHER_FILES)
    downloads = max(TRANSFERS_MIN, free // 4)
    uploads = max(TRANSFERS_MIN, free // 8 // FILES_PER_UPLOAD)
    remaining = free - downloads - uploads * FILES_PER_UPLOAD
    return FileShares(max(CONNECTIONS_MIN, min(connections_wanted, remaining)), downloads, uploads)


class ClientSocket(socket.socket):
    """A client's socket that counts the bytes passed to the operating system and runs callbacks
    when it is closed, regardless of the protocol that uses it."""

    __slots__ = ("_on_close", "sent_bytes")

    def __init__(self, accepted: socket.socket, on_close: Callable[[], object]) -> None:
        # asyncio disables Nagle's algorithm only if the socket's protocol number is that of TCP.
        super().__init__(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        self._on_close: tuple[Callable[[], object], ...] = (on_close,)
        self.sent_bytes = 0

    def send(self, data: Any, flags: int = 0) -> int:
        count = super().send(data, flags)
        self.sent_bytes += count
        return count

    def sendmsg(self, *arguments: Any) -> int:
        """Counts the bytes that newer versions of asyncio send from several buffers in one call."""
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
    """Accepts the connections of a listening socket.

    If the process is out of files, asyncio's own accept loop retries up to `backlog` times in a row
    and logs every failure. This class pauses for a second and logs once a minute.
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
        """Stops accepting connections. New ones then wait in the operating system's queue."""
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
        """Closes the listening socket, so that the operating system refuses new connections.

        Connections in its queue are accepted first, because closing the socket would reset them.
        """
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
        """Accepts one connection. Returns False if none is waiting or resources are exhausted."""
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
            logger.warning("can't accept connections: %s", error.strerror)
        self.pause(PAUSE_SECONDS)


def _host_of(address: Any) -> str:
    """Returns the client's address, or an empty string for a Unix socket."""
    return str(address[0]) if isinstance(address, tuple) else ""


def refuse(client: socket.socket) -> None:
    """Answers 429 to a client whose address has too many connections without a valid key."""
    message = "this address has too many connections without a valid key"
    _answer(client, HTTPStatus.TOO_MANY_REQUESTS, TooManyCalls.code, message, retry_seconds=5)


def refuse_when_stopping(client: socket.socket) -> None:
    """Answers 503 to a client whose connection can't be passed to any process during shutdown."""
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
        # Closing a socket with unread data resets it, and the client might lose the response.
        with contextlib.suppress(BlockingIOError):
            client.recv(DROPPED_BYTES_MAX)
        client.send(head.encode() + body)
        client.shutdown(socket.SHUT_WR)
