"""A client in a separate process that sends prepared bytes. `LoopStalls` doesn't count its work.

This file is also the program of that process, so it imports little.
"""

import asyncio
import base64
import http.client
import io
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

SECONDS_MAX = 300.0
READ_BYTES = 1024 * 1024
TEXT, CLOSE = 1, 8


@dataclass(frozen=True)
class RawAnswer:
    """All bytes that a connection received until the server closed it. Read them after the
    measurement."""

    raw: bytes

    @property
    def status(self) -> int:
        return int(self.raw.split(b" ", 2)[1]) if self.raw.startswith(b"HTTP/1.") else 0

    @property
    def body(self) -> bytes:
        response = http.client.HTTPResponse(cast("socket.socket", _Readable(self.raw)))
        response.begin()
        return response.read()

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def close_code(self) -> int | None:
        """The code with which the server closed the websocket; None if it did not."""
        frames = self.raw.partition(b"\r\n\r\n")[2]
        while len(frames) >= 2:
            opcode, length, start = frames[0] & 15, frames[1] & 127, 2
            if length >= 126:
                size = 2 if length == 126 else 8
                length, start = int.from_bytes(frames[2 : 2 + size], "big"), 2 + size
            payload, frames = frames[start : start + length], frames[start + length :]
            if opcode == CLOSE:
                return int.from_bytes(payload[:2], "big") if len(payload) >= 2 else 1005
        return None


class _Readable:
    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._raw)


def raw_request(
    method: str,
    path: str,
    *,
    key: str = "",
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """A whole request, after whose answer the server closes the connection."""
    given = {
        "Host": "control.test",
        "Connection": "close",
        **({"Authorization": f"Bearer {key}"} if key else {}),
        **({"Content-Length": str(len(body))} if body or method in ("POST", "PUT") else {}),
        **({"Content-Type": "application/json"} if body else {}),
        **(headers or {}),
    }
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def raw_websocket(
    path: str, frames: Sequence[bytes], *, key: str = "", closes: bool = True
) -> tuple[bytes, bytes]:
    """A handshake that offers compression; then, when it was answered, frames and a closing frame.

    Without a closing frame the exchange lasts until the server closes the connection.
    """
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": base64.b64encode(b"0123456789abcdef").decode(),
        "Sec-WebSocket-Extensions": "permessage-deflate",
    }
    handshake = raw_request("GET", path, key=key, headers=headers)
    end = websocket_frame(struct.pack(">H", 1000), opcode=CLOSE) if closes else b""
    return handshake, b"".join([*frames, end])


def websocket_frame(payload: bytes, *, opcode: int = TEXT, is_compressed: bool = False) -> bytes:
    """A frame of a client, masked with zeros."""
    if is_compressed:
        packer = zlib.compressobj(wbits=-15)
        payload = (packer.compress(payload) + packer.flush(zlib.Z_SYNC_FLUSH))[:-4]
    first, size = 0x80 | opcode | (0x40 if is_compressed else 0), len(payload)
    if size < 126:
        head = struct.pack(">BB", first, 0x80 | size)
    elif size < 1 << 16:
        head = struct.pack(">BBH", first, 0x80 | 126, size)
    else:
        head = struct.pack(">BBQ", first, 0x80 | 127, size)
    return head + bytes(4) + payload


async def send_from_outside(
    url: str, requests: Sequence[bytes | tuple[bytes, bytes]], *, at_once: int | None = None
) -> list[RawAnswer]:
    """Sends each request over a connection of its own; returns what came back, in the same order.

    Of two parts the second is sent once the server has answered the first.
    `at_once`: how many connections are open at the same time; None means all.
    """
    address = urlsplit(url)
    with tempfile.TemporaryDirectory(prefix="outside-") as name:
        folder = Path(name)
        for number, request in enumerate(requests):
            first, second = (request, b"") if isinstance(request, bytes) else request
            (folder / f"{number}.request").write_bytes(first)
            (folder / f"{number}.second").write_bytes(second)
        words = (
            str(address.hostname),
            str(address.port),
            name,
            len(requests),
            at_once or len(requests),
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", __file__, *map(str, words)), stderr=subprocess.PIPE
        )
        _, told = await process.communicate()
        assert process.returncode == 0, told.decode()
        return [
            RawAnswer((folder / f"{each}.answer").read_bytes()) for each in range(len(requests))
        ]


def _exchange(host: str, port: int, request: Path) -> None:
    with socket.create_connection((host, port), timeout=SECONDS_MAX) as connection:
        answered = threading.Event()
        sender = threading.Thread(target=_send, args=(connection, request, answered))
        sender.start()
        with request.with_suffix(".answer").open("wb") as answer, suppress(ConnectionError):
            while received := connection.recv(READ_BYTES):
                answer.write(received)
                answered.set()
        answered.set()
        sender.join()


def _send(connection: socket.socket, request: Path, answered: threading.Event) -> None:
    with suppress(OSError):
        connection.sendall(request.read_bytes())
        if second := request.with_suffix(".second").read_bytes():
            answered.wait()
            connection.sendall(second)


def _main() -> None:
    host, port, folder, count, at_once = sys.argv[1:]
    left = iter(range(int(count)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                return
            _exchange(host, int(port), Path(folder) / f"{number}.request")

    threads = [threading.Thread(target=work) for _ in range(int(at_once))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)


if __name__ == "__main__":
    _main()
