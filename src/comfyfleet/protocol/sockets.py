"""Websocket connections of clients, and the delivery of JSON messages and ComfyUI's three binary
frames. The executor thread sends frames, and the event loop delivers them.

A client id stands for one socket. A second socket with the same id replaces the first one, and when
either closes, nothing is delivered to this id anymore. This is ComfyUI's behavior, and clients that
share an id must find the same behavior here.
"""

import asyncio
import json
import struct
import threading
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Protocol

from comfyfleet.media import SNIFF_BYTES, sniff_type


class BinaryFrame(IntEnum):
    IMAGE = 1
    TEXT = 3
    IMAGE_WITH_METADATA = 4


class ImageFormat(IntEnum):
    JPEG = 1
    PNG = 2


def json_frame(event: str, data: object) -> str:
    return json.dumps({"type": event, "data": data})


def image_frame(picture: bytes) -> bytes:
    return struct.pack(">II", BinaryFrame.IMAGE, _format(picture)) + picture


def image_with_metadata_frame(picture: bytes, metadata: Mapping[str, Any]) -> bytes:
    mime_type = f"image/{_format(picture).name.lower()}"
    header = json.dumps({**metadata, "image_type": mime_type}).encode()
    return struct.pack(">II", BinaryFrame.IMAGE_WITH_METADATA, len(header)) + header + picture


def text_frame(node_id: str, line: str) -> bytes:
    name = node_id.encode()
    return struct.pack(">II", BinaryFrame.TEXT, len(name)) + name + line.encode()


def _format(picture: bytes) -> ImageFormat:
    return ImageFormat.PNG if sniff_type(picture[:SNIFF_BYTES]) == "image/png" else ImageFormat.JPEG


# Limits for unsent frames. A client that doesn't read is disconnected, so that its backlog can't
# grow indefinitely.
BACKLOG_FRAMES_MAX = 10_000
BACKLOG_BYTES_MAX = 64 * 1024 * 1024
BEHIND_BYTES_MIN = 1024 * 1024

Frame = str | bytes


class Audience(Protocol):
    """Receives the executor's messages. `to` is a client's id. None means all clients.

    `data` may change after the call, so implementations must copy or serialize it immediately.
    """

    def send(self, event: str, data: Mapping[str, Any], to: Any = None) -> None: ...

    def send_frame(self, frame: bytes, to: Any = None) -> None: ...

    def wants_metadata(self, client_id: Any) -> bool:
        """Checks whether the client supports previews with metadata."""


class Socket:
    """Holds a connection's frames until they are sent."""

    def __init__(self) -> None:
        self.features: Mapping[str, Any] = {}
        self.overrun = asyncio.Event()
        self._backlog: asyncio.Queue[Frame] = asyncio.Queue(BACKLOG_FRAMES_MAX)
        self._size = 0

    def push(self, frame: Frame) -> None:
        """Adds a frame. If the backlog is empty, a frame of any size is accepted."""
        if self._backlog.full() or (self._size and self._size + len(frame) > BACKLOG_BYTES_MAX):
            self.overrun.set()
        else:
            self._backlog.put_nowait(frame)
            self._size += len(frame)

    @property
    def frames_unsent(self) -> int:
        return self._backlog.qsize()

    @property
    def is_behind(self) -> bool:
        """Checks whether the client reads too slowly. If it does, temporary frames such as progress
        may be skipped."""
        return self._size > BEHIND_BYTES_MIN

    async def next_frame(self) -> Frame:
        frame = await self._backlog.get()
        self._size -= len(frame)
        return frame


class Sockets:
    """The open connections of all clients, by client id."""

    def __init__(self) -> None:
        self._sockets: dict[str, list[Socket]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._outbox: list[tuple[Frame, Any]] = []

    def attach(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._loop = loop

    def connect(self, client_id: str) -> Socket:
        """Creates a socket that replaces all others with this id."""
        self._sockets[client_id] = [Socket()]
        return self._sockets[client_id][0]

    def disconnect(self, client_id: str) -> None:
        self._sockets.pop(client_id, None)

    def join(self, client_id: str) -> Socket:
        """Adds another socket with this id, because Comfy Cloud sends all messages to all
        connections of a user."""
        socket = Socket()
        self._sockets.setdefault(client_id, []).append(socket)
        return socket

    def leave(self, client_id: str, socket: Socket) -> None:
        others = [other for other in self._sockets.get(client_id, ()) if other is not socket]
        if others:
            self._sockets[client_id] = others
        else:
            self.disconnect(client_id)

    def wants_metadata(self, client_id: Any) -> bool:
        supported = [
            socket.features.get("supports_preview_metadata") for socket in self._of(client_id)
        ]
        return bool(supported) and all(value is True for value in supported)

    def send(self, event: str, data: Mapping[str, Any], to: Any = None) -> None:
        # A message without a receiver isn't serialized, because many runs have no client.
        if self._has_receiver(to):
            self._post(json_frame(event, data), to)

    def send_frame(self, frame: bytes, to: Any = None) -> None:
        if self._has_receiver(to):
            self._post(frame, to)

    def _has_receiver(self, to: Any) -> bool:
        return bool(self._sockets if to is None else self._of(to))

    def _of(self, client_id: Any) -> list[Socket]:
        return self._sockets.get(client_id, []) if isinstance(client_id, str) else []

    def _post(self, frame: Frame, to: Any) -> None:
        """Queues a frame. The event loop is woken only for the first of the frames that accumulate
        until it runs."""
        with self._lock:
            self._outbox.append((frame, to))
            first = len(self._outbox) == 1
        if first and self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            outbox, self._outbox = self._outbox, []
        for frame, to in outbox:
            for socket in self._receivers(to):
                socket.push(frame)

    def _receivers(self, to: Any) -> list[Socket]:
        if to is None:
            return [socket for sockets in self._sockets.values() for socket in sockets]
        return self._of(to)
