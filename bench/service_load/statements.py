"""Counts the statements that a server sends to PostgreSQL, with a relay that reads the client's
messages.

A message counts once, even if its text has several statements, because on PostgreSQL the round trip
costs the most.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.engine import make_url

SOCKET = ".s.PGSQL.5432"
CHUNK_BYTES = 64 * 1024
HEAD_BYTES = 5  # the kind, and a length that includes itself
PARSE, BIND, EXECUTE, QUERY = b"P", b"B", b"E", b"Q"


@dataclass
class Counted:
    """Counts statements by kind: `begin`, `commit`, `read`, `write`."""

    kinds: Counter[str] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.kinds[kind_of(text)] += 1
        self.texts.append(text)

    def take(self) -> tuple[Counter[str], list[str]]:
        """Returns the counts since the last call, and resets them."""
        counts = self.kinds, self.texts
        self.kinds, self.texts = Counter(), []
        return counts


def kind_of(text: str) -> str:
    word = text.split(maxsplit=1)[0].rstrip(";").lower() if text.strip() else ""
    if word in ("begin", "start"):
        return "begin"
    if word in ("commit", "rollback"):
        return "commit"
    writes = any(keyword in text.lower() for keyword in ("insert into", "update ", "delete from"))
    return "write" if writes else "read"


class _Reader:
    """Reads one connection, because names of prepared statements and portals are per connection."""

    def __init__(self, counted: Counted) -> None:
        self._counted = counted
        self._left = b""
        self._is_open = False
        self._prepared: dict[bytes, str] = {}
        self._portals: dict[bytes, str] = {}

    def read(self, data: bytes) -> None:
        self._left += data
        if not self._is_open:  # the first message has no kind
            length = int.from_bytes(self._left[:4], "big")
            if len(self._left) < max(4, length):
                return
            self._left, self._is_open = self._left[length:], True
        while len(self._left) >= HEAD_BYTES:
            length = int.from_bytes(self._left[1:HEAD_BYTES], "big") + 1
            if len(self._left) < length:
                return
            kind, body = self._left[:1], self._left[HEAD_BYTES:length]
            self._left = self._left[length:]
            self._message(kind, body)

    def _message(self, kind: bytes, body: bytes) -> None:
        if kind == QUERY:
            self._counted.add(body.rstrip(b"\0").decode())
        elif kind == PARSE:
            name, text, _ = body.split(b"\0", 2)
            self._prepared[name] = text.decode()
        elif kind == BIND:
            portal, name, _ = body.split(b"\0", 2)
            self._portals[portal] = self._prepared.get(name, "")
        elif kind == EXECUTE:
            self._counted.add(self._portals.get(body.split(b"\0", 1)[0], ""))


@asynccontextmanager
async def relay(server_url: str, folder: Path) -> AsyncIterator[tuple[str, Counted]]:
    """Runs a relay, and yields the URL to use instead and the counts."""
    url, counted = make_url(server_url), Counted()
    target = Path(str(url.query["host"])) / SOCKET

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            far_reader, far_writer = await asyncio.open_unix_connection(target)
            read = _Reader(counted).read
            await asyncio.gather(
                _copy(reader, far_writer, read), _copy(far_reader, writer, lambda data: None)
            )

    server = await asyncio.start_unix_server(serve, folder / SOCKET)
    try:
        here = url.update_query_dict({"host": str(folder)})
        yield here.render_as_string(hide_password=False), counted
    finally:
        server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, read: object) -> None:
    while data := await reader.read(CHUNK_BYTES):
        read(data)  # type: ignore[operator]
        writer.write(data)
        await writer.drain()
    writer.close()
