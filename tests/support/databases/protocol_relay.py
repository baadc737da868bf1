"""A relay that reads the PostgreSQL protocol between client and server, to record the statements."""

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from sqlalchemy.engine import make_url

SSL_REQUEST = 80877103


@dataclass
class Wire:
    """The statements of all connections, in the order in which they were sent."""

    sent: list[str] = field(default_factory=list)
    port: int = 0

    def through(self, url: str) -> str:
        """The URL of the same database through the relay."""
        parsed = make_url(url).set(host="127.0.0.1", port=self.port, query={})
        return parsed.render_as_string(hide_password=False)

    @contextmanager
    def meanwhile(self) -> Iterator[list[str]]:
        """The statements sent inside the block."""
        start = len(self.sent)
        found: list[str] = []
        try:
            yield found
        finally:
            found += [each for each in self.sent[start:] if not _is_of_driver(each)]

    async def read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        texts: dict[bytes, str] = {}
        portals: dict[bytes, str] = {}
        await self._begin(reader, writer)
        while head := await reader.read(1):
            length = await reader.readexactly(4)
            body = await reader.readexactly(struct.unpack("!i", length)[0] - 4)
            parts = body.split(b"\0")
            if head == b"P":
                texts[parts[0]] = parts[1].decode()
            elif head == b"B":
                portals[parts[0]] = texts[parts[1]]
            elif head == b"E":
                self.sent.append(portals[parts[0]])
            elif head == b"Q":
                self.sent.append(parts[0].decode())
            writer.write(head + length + body)
            await writer.drain()

    async def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes the start-up messages, which have no type byte; the client may ask for encryption before."""
        code = SSL_REQUEST
        while code == SSL_REQUEST:
            length = await reader.readexactly(4)
            body = await reader.readexactly(struct.unpack("!i", length)[0] - 4)
            (code,) = struct.unpack("!i", body[:4])
            writer.write(length + body)
            await writer.drain()


def _is_of_driver(text: str) -> bool:
    """Whether the driver sent it: once per connection it asks how to read an array's type."""
    return "typeinfo_tree" in text or "'jit'" in text


@asynccontextmanager
async def wire_to(url: str) -> AsyncIterator[Wire]:
    wire = Wire()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, words = await _connected(url)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(wire.read(reader, words))
                both.create_task(_copy(answers, writer))
        except* (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            words.close()
            writer.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    wire.port = server.sockets[0].getsockname()[1]
    async with server:
        yield wire


async def _connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    target = make_url(url)
    port, folder = target.port or 5432, target.query.get("host")
    if folder:
        return await asyncio.open_unix_connection(f"{folder}/.s.PGSQL.{port}")
    return await asyncio.open_connection(target.host, port)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
