"""A small HTTP client with persistent connections that uses little CPU."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

HEAD_BYTES_MAX = 64 * 1024
ANSWER_SECONDS_MAX = 120


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def sent(self, host: str) -> bytes:
        lines = [f"{self.method} {self.path} HTTP/1.1", f"host: {host}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines.append(f"content-length: {len(self.body)}")
        return "\r\n".join([*lines, "", ""]).encode() + self.body


def json_call(method: str, path: str, key: str = "", body: Any = None, **headers: str) -> Call:
    all_headers = {"content-type": "application/json"} | (
        {"authorization": f"Bearer {key}"} if key else {}
    )
    for name, value in headers.items():
        all_headers[name.replace("_", "-")] = value
    return Call(method, path, b"" if body is None else json.dumps(body).encode(), all_headers)


class CallFailed(Exception):
    """Raised for any status but 2xx."""


class Connection:
    """A connection with one call at a time. It opens at the first call, and again after the server
    has closed it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, call: Call) -> Any:
        """Sends a call and returns the answer's JSON."""
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            try:
                status, body = await self._answer(call)
            # the server closed the idle connection
            except (asyncio.IncompleteReadError, ConnectionError):
                self.close()
                status, body = await self._answer(call)
        if not 200 <= status < 300:
            raise CallFailed(f"{call.method} {call.path}: {status} {body[:500]!r}")
        return json.loads(body) if body[:1] in (b"{", b"[") else None

    async def _answer(self, call: Call) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(
                self._host, self._port, limit=HEAD_BYTES_MAX
            )
        reader, writer = self._streams
        writer.write(call.sent(f"{self._host}:{self._port}"))
        status, length, is_kept = _parsed(await reader.readuntil(b"\r\n\r\n"))
        body = await reader.readexactly(length)
        if not is_kept:
            self.close()
        return status, body

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def _parsed(head: bytes) -> tuple[int, int, bool]:
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    if "transfer-encoding" in headers:
        raise CallFailed("chunked answers are not read here")
    return (
        int(first.split()[1]),
        int(headers.get("content-length", 0)),
        (headers.get("connection", "").lower() != "close"),
    )


class Connections:
    """Distributes calls over several connections."""

    def __init__(self, url: str, count: int) -> None:
        self._all = [Connection(url) for _ in range(count)]

    async def ask(self, call: Call) -> Any:
        return await self._all[0].ask(call)

    async def ask_all(self, calls: Sequence[Call]) -> list[Any]:
        """Sends calls and returns their answers in order. Each connection has one call in
        progress."""
        answers: list[Any] = [None] * len(calls)
        numbers = iter(range(len(calls)))

        async def one(connection: Connection) -> None:
            for number in numbers:
                answers[number] = await connection.ask(calls[number])

        await asyncio.gather(*map(one, self._all))
        return answers

    def close(self) -> None:
        for connection in self._all:
            connection.close()
