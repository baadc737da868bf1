"""A customer's server that receives webhooks, and at times is down, fails, or cuts the connection."""

import asyncio
import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum, auto

from comfyfleet.api.webhooks import is_signature_valid

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_ID = re.compile(rb"\r\nx-comfyfleet-delivery: *([^\r]+)", re.IGNORECASE)
_SIGNATURE = re.compile(rb"\r\nx-comfyfleet-signature: *([^\r]+)", re.IGNORECASE)


class Mood(Enum):
    """The receiver's behavior. Unless it is REFUSING, it reads a message first."""

    ACCEPTING = auto()
    FAILING = auto()
    CUTTING = auto()
    REFUSING = auto()


@dataclass
class Receiver:
    port: int = 0
    mood: Mood = Mood.ACCEPTING
    secrets: dict[str, str] = field(default_factory=dict)  # the webhooks' secrets by path
    accepted: Counter[str] = field(default_factory=Counter)  # how often, by the id of the delivery
    problems: list[str] = field(default_factory=list)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, path: str) -> str:
        return f"http://{self.host}/{path}"

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["Receiver"]:
        server = await asyncio.start_server(self._receive, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self.mood is not Mood.REFUSING:
                with contextlib.suppress(OSError, EOFError):
                    await self._answer(reader, writer)
        finally:
            writer.transport.abort() if self.mood is Mood.CUTTING else writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        if self.mood is Mood.CUTTING:
            return
        if self.mood is Mood.FAILING:
            status = b"503 Service Unavailable"
        else:
            status = b"200 OK"
            self._accept(head, body)
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()

    def _accept(self, head: bytes, body: bytes) -> None:
        path = head.split(b" ", 2)[1].decode().removeprefix("/")
        id, signature = _ID.search(head), _SIGNATURE.search(head)
        if id is None or signature is None:
            self.problems.append(f"a message without id or signature: {head[:300]!r}")
            return
        secret = self.secrets.get(path, "")
        if not is_signature_valid(secret, body, signature[1].decode(), now=int(time.time())):
            self.problems.append(f"a wrong signature of {id[1]!r} at {path}")
        if json.loads(body)["id"] != id[1].decode():
            self.problems.append(f"the header and the body of {id[1]!r} differ in their ids")
        self.accepted[id[1].decode()] += 1
